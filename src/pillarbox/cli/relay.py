"""``pillarbox relay``: send what the outbox holds, until told to stop."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import click
from sqlalchemy import select

from ..app import Pillarbox
from ..relay import Relay
from ..settings import Settings
from ..stores.schema import check_schema
from ..stores.tables import meta
from ..transports import connect
from .database import load_settings, opened, run
from .output import CommandError, Exit, emit, options


def _parse_shards(_context: click.Context, _parameter: click.Parameter, given: str | None) -> frozenset[int] | None:
    if given is None:
        return None
    shards: set[int] = set()
    for part in given.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise click.BadParameter(f"{given!r} are no shards: write 0-7, or 0,3,8-11.")
        shards.update(range(int(first), int(last or first) + 1))
    return frozenset(shards)


def _parse_address(_context: click.Context, _parameter: click.Parameter, given: str | None) -> tuple[str, int] | None:
    if given is None:
        return None
    host, _, port = given.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) <= 65_535:
        raise click.BadParameter(f"{given!r} is no address: write 8081, or 0.0.0.0:8081.")
    return host or "127.0.0.1", int(port)


@click.command()
@click.argument("box", required=False, metavar="[MODULE:BOX]")
@click.option("--name", metavar="NAME", help="How it is called in the outbox; by default host, process and a number.")
@click.option("--shards", metavar="LIST", callback=_parse_shards, help="Keep to these shards: 0-7, or 0,3,8-11.")
@click.option(
    "--health", metavar="[HOST:]PORT", callback=_parse_address, help="Answer GET /healthz there; loopback by default."
)
@click.option("--drain", is_flag=True, help="Send what can be sent now, and exit.")
@options
def command(
    config: Path | None,
    as_json: bool,
    *,
    box: str | None,
    name: str | None,
    shards: frozenset[int] | None,
    health: tuple[str, int] | None,
    drain: bool,
) -> None:
    """Run a relay.

    It serves the transports of the settings; with MODULE:BOX those of a Pillarbox in your code, and its handlers, too.
    SIGTERM and SIGINT let it finish and release its lanes; a second one ends it at once, which loses nothing.
    """
    settings = load_settings(config)

    async def work() -> None:
        async with _opened(settings, box) as opened_box:
            await _check_shards(opened_box, shards)
            relay = opened_box.relay(name=name, shards=shards, **settings.relay.model_dump())
            if drain:
                done = asdict(await relay.drain())
                emit(
                    {"relay": relay.name, **done}, f"{done['sent']} sent, {done['rejected']} rejected", as_json=as_json
                )
            else:
                await _serve(relay, health, as_json=as_json)

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
            box = _load(reference)
        await stack.enter_async_context(box)
        async with box.engine.connect() as connection:
            await connection.run_sync(check_schema)
        yield box


async def _check_shards(box: Pillarbox, shards: frozenset[int] | None) -> None:
    async with box.engine.connect() as connection:
        count = (await connection.execute(select(meta.c.shards))).scalar_one()
    if shards is not None and max(shards) >= count:
        raise CommandError(f"--shards: this database has the shards 0 to {count - 1}", Exit.USAGE)


def _load(reference: str) -> Pillarbox:
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


async def _serve(relay: Relay, health: tuple[str, int] | None, *, as_json: bool) -> None:
    async with AsyncExitStack() as stack:
        address = None
        if health is not None:
            address = await stack.enter_async_context(_answering(relay, *health))
        running = asyncio.ensure_future(relay.run())
        _stop_on_signals(relay, running)
        ready = {"relay": relay.name, "health": address}
        emit(ready, f"relay {relay.name} runs" + (f"; health at {address}" if address else ""), as_json=as_json)
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
async def _answering(relay: Relay, host: str, port: int) -> AsyncIterator[str]:
    """A health endpoint: 200 while the relay sees to its leases, 503 when it does not."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(5):
                request = await reader.readline()
                while await reader.readline() not in (b"\r\n", b"\n", b""):
                    pass
            known = request.split(b" ")[:2] == [b"GET", b"/healthz"]
            line = "404 Not Found" if not known else "200 OK" if relay.healthy else "503 Service Unavailable"
            body = json.dumps(relay.status()).encode() if known else b""
            head = f"HTTP/1.1 {line}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
            await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # whoever asked has gone, or is no HTTP client
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(answer, host, port, limit=8_192)
    except OSError as error:
        raise CommandError(f"cannot listen on {host}:{port}: {error.strerror}", Exit.USAGE) from error
    async with server:
        bound = server.sockets[0].getsockname()
        yield f"http://{bound[0]}:{bound[1]}/healthz"
