"""What commands share that run until they are told to stop: your box, signals, and health and metrics over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import click

from ..app import Pillarbox
from ..errors import MissingExtraError
from ..redaction import described
from ..settings import Settings
from ..stores.schema import check_schema
from .database import reached
from .output import CommandError, Exit

logger = logging.getLogger("pillarbox")

Address = tuple[str, int]
Render = Callable[[str], Awaitable[tuple[bytes, str] | None]]
"""Metrics for whoever accepts these formats: a body and its content type."""

EXCHANGE_SECONDS = 10.0
"""How long a request over HTTP may take, from its first byte to the last of the answer."""


class Worker(Protocol):
    """A relay, or consumers."""

    @property
    def alive(self) -> bool:
        """Whether it does what it can; else only a restart helps."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether it does so with success."""
        ...

    def status(self) -> dict[str, Any]:
        """What it does. Holds no keys and no payloads."""
        ...

    def stop(self) -> None:
        """Let `run` finish what it has begun, and return."""
        ...

    async def run(self) -> None:
        """Work until `stop`."""
        ...


# -- the box -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def opened_box(reference: str) -> AsyncIterator[Pillarbox]:
    """The box that MODULE:BOX names, started, with a database that answers and is migrated."""
    async with load_box(reference) as box, reached(box.engine, f"the URL of {reference}"):
        async with box.engine.connect() as connection:
            await connection.run_sync(check_schema)
        yield box


def load_box(reference: str) -> Pillarbox:
    """The box that MODULE:BOX names."""
    module, _, name = reference.partition(":")
    if not module:
        raise CommandError(f"{reference!r} names no module: write MODULE:BOX", Exit.USAGE)
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), name or "box", None)
    except ModuleNotFoundError as error:
        raise CommandError(f"{reference}: there is no module {error.name!r}", Exit.USAGE) from error
    except Exception as error:  # whatever a module of the user's may raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        runs = "asyncio.run()" in str(error)
        hint = '; let it run only `if __name__ == "__main__":`' if runs else ""
        raise CommandError(
            f"{reference} cannot be imported: {type(error).__name__}: {error} "
            f"({where.filename}, line {where.lineno}){hint}",
            Exit.USAGE,
        ) from error
    if not isinstance(found, Pillarbox):
        raise CommandError(f"{reference}: {name or 'box'} in {module} is no Pillarbox", Exit.USAGE)
    return found


def observe(box: Pillarbox, settings: Settings, *, metrics: bool) -> Render:
    """Let the signals of the box be seen; how metrics are shown comes back. A box may have its observers already."""
    if settings.tracing == "otel":
        from ..otel import OtelSignals  # noqa: PLC0415  an extra

        if not any(isinstance(each, OtelSignals) for each in box.signals.observers):
            box.signals.add(OtelSignals())
    if not metrics:
        return no_metrics
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector  # noqa: PLC0415  an extra

        from ..prometheus import PrometheusSignals  # noqa: PLC0415  an extra
    except (ImportError, MissingExtraError):
        return no_metrics
    for each in box.signals.observers:
        if isinstance(each, PrometheusSignals):
            return each.render
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)  # memory, CPU and files of this process
    shown = PrometheusSignals(registry)
    box.signals.add(shown)
    return shown.render


async def no_metrics(accept: str) -> tuple[bytes, str] | None:  # noqa: ARG001  there are none in any format
    """There is nobody to show any."""
    return None


# -- its life ----------------------------------------------------------------------------------------------------------


_ENDING_SECONDS = 2.0
"""What is left of a process after the second signal."""


async def serve(
    worker: Worker, http: Address | None, metrics: Render, *, announce: Callable[[str | None], None]
) -> None:
    """Let it work until SIGTERM or SIGINT; a second one ends it at once. ``announce`` is told the address over HTTP."""
    async with AsyncExitStack() as stack:
        address = None
        if http is not None:
            address = await stack.enter_async_context(answering(worker, metrics, *http))
        running = asyncio.ensure_future(worker.run())
        _stop_on_signals(worker, running)
        announce(address)
        try:
            await running
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait([running])
            raise


def _stop_on_signals(worker: Worker, running: asyncio.Future[None]) -> None:
    def told(number: int) -> None:
        if told_before:
            running.cancel()
            # What cannot be cancelled, or is in a thread, would keep the process alive. To kill it loses nothing.
            loop.call_later(_ENDING_SECONDS, os._exit, 128 + number)
        told_before.append(True)
        worker.stop()

    told_before: list[bool] = []
    loop = asyncio.get_running_loop()
    if sys.platform != "win32":
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told, number)


# -- HTTP --------------------------------------------------------------------------------------------------------------


def parse_address(_context: click.Context, _parameter: click.Parameter, given: str | None) -> Address | None:
    """An address to listen on."""
    if given is None:
        return None
    host, _, port = given.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) <= 65_535:
        raise click.BadParameter(f"{given!r} is no address: write 9464, or 0.0.0.0:9464.")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return host or "127.0.0.1", int(port)


http_option = click.option(
    "--http",
    metavar="[HOST:]PORT",
    callback=parse_address,
    help="Answer GET /livez, /readyz and /metrics there, while it runs; loopback by default.",
)
"""``--http``."""


@asynccontextmanager
async def answering(worker: Worker, metrics: Render, host: str, port: int) -> AsyncIterator[str]:
    """Health and metrics over HTTP; the address comes back."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(EXCHANGE_SECONDS):
                await exchange(reader, writer)
        except TimeoutError:
            writer.transport.abort()  # to close it would wait for whoever does not read
        except (OSError, ValueError):
            pass  # whoever asked has gone, or is no HTTP client
        finally:
            writer.close()

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readline()).split(b" ")
        accept = ""
        while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"accept":
                accept = value.strip().decode("latin-1")
        path = request[1].partition(b"?")[0] if len(request) == 3 and request[0] == b"GET" else b""
        try:
            status, kind, body = await _answer(worker, metrics, path.decode("latin-1"), accept)
        except Exception as error:  # a format that nobody has, or a collector of yours
            logger.warning("GET %s failed: %s", path.decode("latin-1"), described(error))
            status, kind, body = "500 Internal Server Error", "text/plain", b""
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        writer.close()
        await writer.wait_closed()

    try:
        server = await asyncio.start_server(answer, host, port, limit=8_192)
    except OSError as error:
        raise CommandError(f"cannot listen on {_location(host, port)}: {error.strerror}", Exit.USAGE) from error
    async with server:
        bound = server.sockets[0].getsockname()
        yield f"http://{_location(bound[0], bound[1])}"


def _location(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _answer(worker: Worker, metrics: Render, path: str, accept: str) -> tuple[str, str, bytes]:
    """Status, content type and body. 200 while the worker does its work, 503 when it does not: ready if it does so with
    success, alive if it tries. Of troubles only the names are told: the words of a transport may hold addresses.
    """
    if path in ("/livez", "/readyz"):
        well = worker.alive if path == "/livez" else worker.healthy
        status = worker.status()
        if "troubles" in status:
            status["troubles"] = sorted(status["troubles"])
        body = json.dumps(status).encode()
        return "200 OK" if well else "503 Service Unavailable", "application/json", body
    if path == "/metrics":
        shown = await metrics(accept)
        if shown is not None:
            return "200 OK", shown[1], shown[0]
        return "501 Not Implemented", "text/plain", b"metrics need a package: pip install 'pillarbox[prometheus]'\n"
    return "404 Not Found", "text/plain", b""
