"""``pillarbox relay``: send what the outbox holds, until told to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import click
from sqlalchemy import select

from ..app import Pillarbox
from ..errors import MissingExtraError
from ..redaction import redacted
from ..relay import Relay
from ..settings import Settings
from ..stores.inspection import live_relays
from ..stores.schema import check_schema
from ..stores.tables import meta
from ..transports import connect
from .database import load_settings, opened, reached, run
from .output import CommandError, Exit, emit, options

logger = logging.getLogger("pillarbox")

Render = Callable[[str], Awaitable[tuple[bytes, str] | None]]
"""Metrics for whoever accepts these formats: a body and its content type."""

EXCHANGE_SECONDS = 10.0
"""How long a request over HTTP may take, from its first byte to the last of the answer."""


class Shards(NamedTuple):
    """Some shards, and of how many they are, if that was said."""

    some: frozenset[int]
    of: int | None


def _parse_shards(_context: click.Context, _parameter: click.Parameter, given: str | None) -> Shards | None:
    if given is None:
        return None
    shards: set[int] = set()
    parts, slash, of = given.partition("/")
    for part in parts.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise click.BadParameter(f"{given!r} are no shards: write 0-7, 0,3,8-11, or 0-7/16.")
        shards.update(range(int(first), int(last or first) + 1))
    if slash and not (of.isdecimal() and max(shards) < int(of)):
        raise click.BadParameter(f"{given!r} are no shards: what follows the slash is how many there are in all.")
    return Shards(frozenset(shards), int(of) if slash else None)


def _parse_address(_context: click.Context, _parameter: click.Parameter, given: str | None) -> tuple[str, int] | None:
    if given is None:
        return None
    host, _, port = given.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) <= 65_535:
        raise click.BadParameter(f"{given!r} is no address: write 9464, or 0.0.0.0:9464.")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return host or "127.0.0.1", int(port)


@click.command()
@click.argument("box", required=False, metavar="[MODULE:BOX]")
@click.option("--name", metavar="NAME", help="How it is called in the outbox; by default host, process and a number.")
@click.option(
    "--shards", metavar="LIST", callback=_parse_shards, help="Keep to these shards: 0-7, 0,3,8-11, or 0-7/16."
)
@click.option(
    "--http",
    metavar="[HOST:]PORT",
    callback=_parse_address,
    help="Answer GET /livez, /readyz and /metrics there, while it runs; loopback by default.",
)
@click.option(
    "--source",
    type=click.Choice(["cursor", "cdc"]),
    help="Where bodies come from: the table, or PostgreSQL's replication stream; by default as the settings say.",
)
@click.option("--slot", metavar="NAME", help="With cdc: a replication slot that is kept, instead of a temporary one.")
@click.option("--drain", is_flag=True, help="Send what can be sent now, and exit.")
@options
def command(
    config: Path | None,
    as_json: bool,
    *,
    box: str | None,
    name: str | None,
    shards: Shards | None,
    http: tuple[str, int] | None,
    source: str | None,
    slot: str | None,
    drain: bool,
) -> None:
    """Run a relay.

    It serves the transports of the settings; with MODULE:BOX those of a Pillarbox in your code, and its handlers, too.
    SIGTERM and SIGINT let it finish and release its lanes; a second one ends it at once, which loses nothing.
    """
    if drain and http is not None:
        raise click.UsageError("--http is for a relay that runs on, and --drain for one that exits: choose one.")
    settings = load_settings(config)
    said = {"source": source, "slot": slot}
    options = settings.relay.model_dump() | {option: value for option, value in said.items() if value is not None}

    async def work() -> None:
        async with _opened(settings, box) as opened_box:
            await _check_shards(opened_box, shards)
            await _check_name(opened_box, name)
            metrics = _observe(opened_box, settings, metrics=http is not None)
            relay = opened_box.relay(name=name, shards=shards and shards.some, **options)
            if drain:
                done = asdict(await relay.drain())
                emit(
                    {"relay": relay.name, **done}, f"{done['sent']} sent, {done['rejected']} rejected", as_json=as_json
                )
            else:
                await _serve(relay, http, metrics, as_json=as_json)

    run(work())


@asynccontextmanager
async def _opened(settings: Settings, reference: str | None) -> AsyncIterator[Pillarbox]:
    async with AsyncExitStack() as stack:
        if reference is None:
            if not settings.transports:
                raise CommandError(
                    "this relay has nothing to send to: set transports, or name your box as MODULE:BOX", Exit.SETTINGS
                )
            transports = {name: connect(name, address) for name, address in settings.transports.items()}
            box = Pillarbox(await stack.enter_async_context(opened(settings)), transports=transports)
        else:
            box = load_box(reference)
        await stack.enter_async_context(box)
        if reference is not None:
            await stack.enter_async_context(reached(box.engine, f"the URL of {reference}"))
        async with box.engine.connect() as connection:
            await connection.run_sync(check_schema)
        yield box


async def _check_shards(box: Pillarbox, shards: Shards | None) -> None:
    async with box.engine.connect() as connection:
        count = (await connection.execute(select(meta.c.shards))).scalar_one()
    if shards is not None and (max(shards.some) >= count or shards.of not in (None, count)):
        raise CommandError(f"--shards: this database has the shards 0 to {count - 1}", Exit.USAGE)


async def _check_name(box: Pillarbox, name: str | None) -> None:
    """One that has died is known for a while: so this is no error."""
    async with box.engine.connect() as connection:
        alive = await connection.run_sync(live_relays)
    if any(each.name == name for each in alive):
        logger.warning("a relay called %s was there a moment ago: if it still is, only one of the two sends", name)


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
        raise CommandError(
            f"{reference} cannot be imported: {type(error).__name__}: {error} ({where.filename}, line {where.lineno})",
            Exit.USAGE,
        ) from error
    if not isinstance(found, Pillarbox):
        raise CommandError(f"{reference}: {name or 'box'} in {module} is no Pillarbox", Exit.USAGE)
    return found


def _observe(box: Pillarbox, settings: Settings, *, metrics: bool) -> Render:
    """Let the signals of the box be seen; how metrics are shown comes back. A box may have its observers already."""
    if settings.tracing == "otel":
        from ..otel import OtelSignals  # noqa: PLC0415  an extra

        if not any(isinstance(each, OtelSignals) for each in box.signals.observers):
            box.signals.add(OtelSignals())
    if not metrics:
        return _no_metrics
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector  # noqa: PLC0415  an extra

        from ..prometheus import PrometheusSignals  # noqa: PLC0415  an extra
    except (ImportError, MissingExtraError):
        return _no_metrics
    for each in box.signals.observers:
        if isinstance(each, PrometheusSignals):
            return each.render
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)  # memory, CPU and files of this process
    shown = PrometheusSignals(registry)
    box.signals.add(shown)
    return shown.render


async def _no_metrics(accept: str) -> tuple[bytes, str] | None:  # noqa: ARG001  there are none in any format
    return None


async def _serve(relay: Relay, http: tuple[str, int] | None, metrics: Render, *, as_json: bool) -> None:
    async with AsyncExitStack() as stack:
        address = None
        if http is not None:
            address = await stack.enter_async_context(_answering(relay, metrics, *http))
        running = asyncio.ensure_future(relay.run())
        _stop_on_signals(relay, running)
        ready = {"relay": relay.name, "http": address}
        emit(ready, f"relay {relay.name} runs" + (f"; it answers at {address}" if address else ""), as_json=as_json)
        try:
            await running
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait([running])
            raise
    status = relay.status()
    emit(
        status, f"relay {relay.name} has stopped: {status['sent']} sent, {status['rejected']} rejected", as_json=as_json
    )


def _stop_on_signals(relay: Relay, running: asyncio.Future[None]) -> None:
    def told() -> None:
        if told_before:
            running.cancel()
        told_before.append(True)
        relay.stop()

    told_before: list[bool] = []
    if sys.platform != "win32":
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, told)


@asynccontextmanager
async def _answering(relay: Relay, metrics: Render, host: str, port: int) -> AsyncIterator[str]:
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
            status, kind, body = await _answer(relay, metrics, path.decode("latin-1"), accept)
        except Exception as error:  # a format that nobody has, or a collector of yours
            logger.warning("GET %s failed: %s", path.decode("latin-1"), redacted(f"{type(error).__name__}: {error}"))
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


async def _answer(relay: Relay, metrics: Render, path: str, accept: str) -> tuple[str, str, bytes]:
    """Status, content type and body. 200 while the relay sees to its leases, 503 when it does not: ready if it does so
    with success, alive if it tries. Of lanes in trouble only the names are told: the words of a transport may hold
    addresses.
    """
    if path in ("/livez", "/readyz"):
        well = relay.alive if path == "/livez" else relay.healthy
        status = relay.status()
        body = json.dumps(status | {"troubles": sorted(status["troubles"])}).encode()
        return "200 OK" if well else "503 Service Unavailable", "application/json", body
    if path == "/metrics":
        shown = await metrics(accept)
        if shown is not None:
            return "200 OK", shown[1], shown[0]
        return "501 Not Implemented", "text/plain", b"metrics need a package: pip install 'pillarbox[prometheus]'\n"
    return "404 Not Found", "text/plain", b""
