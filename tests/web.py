"""Applications over HTTP: in this process, and in real ones that can be killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx

from tests.servers import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Starlette recommends another HTTP client, which does the same
    from fastapi.testclient import TestClient

__all__ = ["ROOT", "Process", "TestClient", "client", "environment", "free_port"]

ROOT = Path(__file__).parent.parent


def client(app: Any, **options: Any) -> httpx.AsyncClient:
    """A client of an application in this process. Its lifespan is not run."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, **options), base_url="http://test")


def environment(*without: str) -> dict[str, str]:
    """What people have who have not set these variables, with our commands on their path."""
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"}


def free_port() -> int:
    """A port on loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Process:
    """A process that answers HTTP on loopback, until the block is left."""

    def __init__(
        self, arguments: list[str], port: int, log: Path, *, environment: Mapping[str, str], path: str = "/livez"
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, *arguments]
        self._environment = dict(environment)
        self._path = path
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> subprocess.Popen[bytes]:
        """The process itself."""
        assert self._process is not None, "it is not started"
        return self._process

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for pytest, which then stops us
            )
        try:
            wait_until(self._answers, f"{self._command} to answer", seconds=60)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End it at once: it has no time for anything."""
        self.running.kill()
        self.running.wait(30)

    def stop(self) -> int:
        """Ask it to end, and wait; its exit code."""
        if self.running.poll() is None:
            self.running.send_signal(signal.SIGTERM)
        try:
            return self.running.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def _answers(self) -> bool:
        if self.running.poll() is not None:
            raise RuntimeError(f"{self._command} ended with {self.running.returncode}:\n{self.log.read_text()}")
        try:
            return httpx.get(self.url + self._path, timeout=5).status_code < 500
        except httpx.TransportError:
            return False
