"""``pillarbox relay``: send what the outbox holds, until told to stop."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import click
from sqlalchemy import select

from ..app import Pillarbox
from ..relay import Relay
from ..settings import Settings
from ..stores.overview import live_relays
from ..stores.tables import meta, routes
from ..transports import connect
from .arguments import options
from .database import changing, load_settings, run
from .output import CommandError, Exit, emit
from .serving import Address, Render, http_option, observe, opened_box, serve

logger = logging.getLogger("pillarbox")


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


def _parse_tenants(_context: click.Context, _parameter: click.Parameter, given: str | None) -> frozenset[str] | None:
    if given is None:
        return None
    tenants = frozenset(name.strip() for name in given.split(","))
    if "" in tenants:
        raise click.BadParameter(f"{given!r} are no tenants: write acme, or acme,globex.")
    return tenants


@click.command()
@click.argument("box", required=False, metavar="[MODULE:BOX]")
@click.option("--name", metavar="NAME", help="How it is called in the outbox; by default host, process and a number.")
@click.option(
    "--shards", metavar="LIST", callback=_parse_shards, help="Keep to these shards: 0-7, 0,3,8-11, or 0-7/16."
)
@click.option(
    "--tenants",
    metavar="LIST",
    callback=_parse_tenants,
    help="Keep to the lanes of these tenants, on routes that are sharded by tenant: acme,globex.",
)
@http_option
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
    tenants: frozenset[str] | None,
    http: Address | None,
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
    if shards is not None and tenants is not None:
        raise click.UsageError("A relay keeps to --shards or to --tenants: choose one.")
    settings = load_settings(config)
    if slot is not None and (source or settings.relay.source) != "cdc":
        raise click.UsageError("--slot is for a relay that reads a stream: say --source cdc, too.")
    said = {"source": source, "slot": slot}
    chosen = settings.relay.model_dump() | {option: value for option, value in said.items() if value is not None}

    async def work() -> None:
        async with _opened(settings, box) as started:
            await _check_shards(started, shards)
            await _check_tenants(started, tenants)
            await _check_name(started, name)
            metrics = observe(started, settings, metrics=http is not None)
            relay = started.relay(name=name, shards=shards and shards.some, tenants=tenants, **chosen)
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
    if reference is not None:
        async with opened_box(reference) as box:
            yield box
        return
    if not settings.transports:
        raise CommandError(
            "this relay has nothing to send to: set transports, or name your box as MODULE:BOX", Exit.SETTINGS
        )
    transports = {name: connect(name, address) for name, address in settings.transports.items()}
    async with changing(settings) as engine, Pillarbox(engine, transports=transports) as box:
        yield box


async def _check_shards(box: Pillarbox, shards: Shards | None) -> None:
    async with box.engine.connect() as connection:
        count = (await connection.execute(select(meta.c.shards))).scalar_one()
    if shards is not None and (max(shards.some) >= count or shards.of not in (None, count)):
        raise CommandError(f"--shards: this database has the shards 0 to {count - 1}", Exit.USAGE)


async def _check_tenants(box: Pillarbox, tenants: frozenset[str] | None) -> None:
    if tenants is None:
        return
    async with box.engine.connect() as connection:
        ways = (await connection.execute(select(routes.c.shard_by))).scalars().all()
    if ways and "tenant" not in ways:
        raise CommandError(
            '--tenants: no route in this database is sharded by tenant; say Route(..., shard_by="tenant")', Exit.USAGE
        )


async def _check_name(box: Pillarbox, name: str | None) -> None:
    """One that has died is known for a while: so this is no error."""
    async with box.engine.connect() as connection:
        alive = await connection.run_sync(live_relays)
    if any(each.name == name for each in alive):
        logger.warning("a relay called %s was there a moment ago: if it still is, only one of the two sends", name)


async def _serve(relay: Relay, http: Address | None, metrics: Render, *, as_json: bool) -> None:
    def announce(address: str | None) -> None:
        runs = f"relay {relay.name} runs" + (f"; it answers at {address}" if address else "")
        emit({"relay": relay.name, "http": address}, runs, as_json=as_json)

    await serve(relay, http, metrics, announce=announce)
    status = relay.status()
    emit(
        status, f"relay {relay.name} has stopped: {status['sent']} sent, {status['rejected']} rejected", as_json=as_json
    )
