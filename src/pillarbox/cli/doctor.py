"""``pillarbox doctor``: what is wrong with the database, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import click
from sqlalchemy import Connection

from ..errors import NotMigratedError, StoreError
from ..outbox import Status
from ..settings import Settings, masked
from ..stores import inspection
from ..stores.schema import check_schema, schema_version
from .database import load_settings, opened, run
from .output import CommandError, Exit, emit, options, plain

_OLDEST = {"PostgreSQL": (14,), "MariaDB": (10, 6), "MySQL": (8, 0), "SQLite": (3, 35)}
# Settings under which a crash of the server can lose what it has said to be committed.
_RISKY = {
    "fsync": ("off",),
    "synchronous_commit": ("off",),
    "full_page_writes": ("off",),
    "innodb_flush_log_at_trx_commit": ("0", "2"),
}
_ENCODINGS = {
    "server_encoding": "UTF8",
    "character_set_connection": "utf8mb4",
    "encoding": "UTF-8",
}


class State(StrEnum):
    """How a check turned out."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: State
    found: str
    remedy: str | None = None


@click.command()
@options
def command(config: Path | None, as_json: bool) -> None:
    """Examine the database. Exits with 1 if there is a problem; warnings do not count."""
    checks = run(_examine(load_settings(config)))
    counts = {f"{state}s": sum(check.state is state for check in checks) for state in (State.WARNING, State.PROBLEM)}
    text = "\n".join(map(_described, checks))
    emit({"checks": [asdict(check) for check in checks], **counts}, text, as_json=as_json)
    if counts["problems"]:
        click.get_current_context().exit(Exit.PROBLEM)


def _described(check: Check) -> str:
    line = f"{check.state:<8} {check.name}: {plain(check.found)}"
    return line if check.remedy is None else f"{line}\n{'':<8} {plain(check.remedy)}"


async def _examine(settings: Settings) -> list[Check]:
    try:
        async with opened(settings) as engine, engine.connect() as connection:
            return await connection.run_sync(lambda it: list(_checks(it)))
    except (CommandError, StoreError) as error:
        return [Check("database", State.PROBLEM, str(error))]


def _checks(connection: Connection) -> Iterator[Check]:
    yield Check("database", State.OK, f"{masked(connection.engine.url)} answers")
    yield _version(connection)
    yield from _durability(connection)
    yield from _encoding(connection)
    try:
        check_schema(connection)
    except NotMigratedError as error:
        yield Check("schema", State.PROBLEM, str(error))
        return
    yield Check("schema", State.OK, f"version {schema_version(connection)}")
    yield from _ids(connection)
    yield from _lanes(connection)
    yield from _failures(connection)


def _version(connection: Connection) -> Check:
    product, version = inspection.server(connection)
    found = f"{product} {'.'.join(map(str, version))}"
    oldest = _OLDEST[product]
    if version < oldest:
        return Check("version", State.PROBLEM, found, f"upgrade to {product} {'.'.join(map(str, oldest))} or newer")
    return Check("version", State.OK, found)


def _durability(connection: Connection) -> Iterator[Check]:
    for name, value in inspection.variables(connection, _RISKY).items():
        if value in _RISKY[name]:
            remedy = f"a crash of the server may lose committed events: set {name} to its default"
            yield Check("durability", State.WARNING, f"{name} is {value}", remedy)
        else:
            yield Check("durability", State.OK, f"{name} is {value}")


def _encoding(connection: Connection) -> Iterator[Check]:
    for name, value in inspection.variables(connection, _ENCODINGS).items():
        wanted = _ENCODINGS[name]
        if value == wanted:
            yield Check("encoding", State.OK, value)
        else:
            remedy = f"keys, tenants and names need {wanted}: use a database, and a connection, with that encoding"
            yield Check("encoding", State.PROBLEM, f"{name} is {value}", remedy)


def _ids(connection: Connection) -> Iterator[Check]:
    """Within a key, ids must rise in the order of locks: nobody may draw ids in advance or out of another series."""
    if connection.dialect.name == "postgresql":
        cache = inspection.id_cache(connection)
        remedy = "events of a key may change places: ALTER TABLE pillarbox_outbox ALTER COLUMN id SET CACHE 1"
        yield _expected("ids", "the cache of the sequence of pillarbox_outbox.id", cache, State.PROBLEM, remedy)
    for name, value in inspection.variables(connection, ["auto_increment_increment"]).items():
        remedy = "several nodes draw ids, and events of a key may change places: let all writers use one node"
        yield _expected("ids", name, int(value), State.WARNING, remedy)


def _expected(check: str, what: str, value: int, otherwise: State, remedy: str) -> Check:
    if value == 1:
        return Check(check, State.OK, f"{what} is 1")
    return Check(check, otherwise, f"{what} is {value}, and should be 1", remedy)


def _lanes(connection: Connection) -> Iterator[Check]:
    found = inspection.unserved(connection)
    for route in found:
        what = f"{route.waiting:,} deliveries of route {route.route!r} wait in {route.lanes} lanes that nobody serves"
        yield Check("lanes", State.WARNING, what, f"they wait for a relay that serves {route.destination!r}")
    if not found:
        yield Check("lanes", State.OK, "no delivery waits for a relay")


def _failures(connection: Connection) -> Iterator[Check]:
    groups = [it for it in inspection.statistics(connection) if it.status in (Status.FAILED, Status.PARKED)]
    for group in groups:
        state = State.PROBLEM if group.status is Status.FAILED else State.WARNING
        what = f"{group.count:,} deliveries of route {group.route!r} are {group.status}"
        remedy = f"see `pillarbox outbox list --status {group.status}` and their last_error"
        yield Check("failures", state, what, remedy)
    if not groups:
        yield Check("failures", State.OK, "no delivery has failed")
