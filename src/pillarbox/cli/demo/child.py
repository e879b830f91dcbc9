"""The processes of the demo: each can be killed, frozen and thawed, and none outlives its parent.

A child is a module. Its standard input is a pipe that only the parent holds: the first line says all
that it needs to know (so that no list of processes shows a password), later lines change it, and the end of the pipe is
the end of the parent. A frozen child cannot notice that; on Linux the kernel ends it, too.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..output import CommandError, Exit

if TYPE_CHECKING:
    from ..serving import Worker

STOP_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1

Told = dict[str, Any]
"""What a child has been told, by name."""


class Child:
    """A process of the demo, as its parent sees it."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self._ended_by_us = False

    @classmethod
    async def start(cls, module: str, log: Path, package: str = __package__, /, **told: Any) -> Child:
        """Start a module of this package, or of another. What it writes to standard error goes to the log."""
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"{package}.{module}"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                process_group=0,  # Ctrl-C is for the parent, which then ends its children
            )
        child = cls(process, log)
        child.tell(**told)
        return child

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def tell(self, **told: Any) -> None:
        """Let it know something."""
        pipe = self._process.stdin
        assert pipe is not None  # noqa: S101  it was started with one
        pipe.write(msgspec.json.encode(told) + b"\n")

    async def answer(self) -> Any:
        """The next thing that it says."""
        pipe = self._process.stdout
        assert pipe is not None  # noqa: S101  it was started with one
        line = await pipe.readline()
        if not line:
            await self._process.wait()
            self.check()
        return msgspec.json.decode(line)

    def freeze(self) -> None:
        """Let it stand still, like a machine that swaps or is moved."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on, as if nothing had happened."""
        self._send(signal.SIGCONT)

    async def kill(self) -> None:
        """End it at once: it has no time for anything."""
        self._ended_by_us = True
        self._send(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        """Ask it to end, and wait; kill it if it does not."""
        self._ended_by_us = True
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            await self.kill()

    def check(self) -> None:
        """A `CommandError` if it has ended by itself."""
        if self._process.returncode is not None and not self._ended_by_us:
            lines = self._log.read_text("utf-8", "replace").splitlines()
            why = lines[-1] if lines else "it did not say why"
            raise CommandError(f"a process of the demo ended: {why}", Exit.PROBLEM)

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended already
            self._process.send_signal(number)


def live(work: Callable[[Told], Coroutine[Any, Any, None]]) -> None:
    """In a child: do the work with what the parent says, until it is done or the parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    asyncio.run(_live(work))


def say(value: Any) -> None:
    """In a child: tell the parent something."""
    sys.stdout.write(f"{msgspec.json.encode(value).decode()}\n")
    sys.stdout.flush()


async def work_until_told(*workers: Worker) -> None:
    """In a child: say that it is ready, and let these work until SIGTERM."""

    def stop() -> None:
        for worker in workers:
            worker.stop()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    say("ready")
    await asyncio.gather(*(worker.run() for worker in workers))


async def _live(work: Callable[[Told], Coroutine[Any, Any, None]]) -> None:
    parent = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(parent)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    told: Told = msgspec.json.decode(await parent.readline())
    listening = asyncio.create_task(_listen(parent, told))
    try:
        await work(told)
    finally:
        listening.cancel()


async def _listen(parent: asyncio.StreamReader, told: Told) -> None:
    async for line in parent:
        told.update(msgspec.json.decode(line))
    os._exit(1)
