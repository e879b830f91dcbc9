"""The outbox as people see it: questions to the view ``outbox_events``, and to the server about itself.

Nothing here changes anything. All values are bound; filters by key and tenant compare bytes, as the store does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    Connection,
    Row,
    bindparam,
    column,
    func,
    or_,
    select,
    table,
    text,
)
from sqlalchemy.types import TypeEngine

from ..outbox import Status
from .columns import Utc, from_now
from .tables import lanes, outbox, routes

TYPE_PATTERN = re.compile(r"(?:[a-z0-9_-]+|\*)(?:\.(?:[a-z0-9_-]+|\*))*|(?:[a-z0-9_-]+\.)*\*\*")
"""The patterns of event names that one SQL condition can express: those of routes, without ``*`` before ``**``."""

_WAITING = (Status.PENDING, Status.SENDING, Status.RETRYING)


@dataclass(frozen=True, slots=True)
class Summary:
    """A delivery in one line."""

    id: int
    event_id: UUID
    event_type: str
    route: str | None
    key: str
    tenant_id: str | None
    status: Status
    attempts: int
    next_attempt_at: datetime | None
    last_error: str | None
    created_at: datetime
    sent_at: datetime | None


@dataclass(frozen=True, slots=True)
class Details(Summary):
    """All that the view knows about a delivery; its payload only if that was asked for."""

    destination: str | None
    topic: str
    shard: int
    schema_version: int
    aggregate_type: str | None
    aggregate_id: str | None
    version: str | None
    occurred_at: str | None
    trace_id: str | None
    correlation_id: str | None
    content_type: str | None
    locked_by: str | None
    locked_until: datetime | None
    batch: int | None
    number: int | None
    headers: dict[str, str]
    payload: str | None = None


@dataclass(frozen=True, slots=True)
class Filter:
    """Which deliveries are wanted; None does not restrict."""

    status: Status | None = None
    route: str | None = None
    type: str | None = None
    """Matches `TYPE_PATTERN`."""
    tenant: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The deliveries of a route that share a status."""

    route: str | None
    status: Status
    count: int
    oldest_at: datetime
    oldest_age_seconds: float


@dataclass(frozen=True, slots=True)
class Unserved:
    """A route with waiting deliveries in lanes that no relay holds."""

    route: str
    destination: str
    lanes: int
    waiting: int


_COLUMN_TYPES: dict[str, TypeEngine[Any]] = {
    "id": BigInteger(),
    "next_attempt_at": Utc(),
    "locked_until": Utc(),
    "created_at": Utc(),
    "sent_at": Utc(),
    "headers": outbox.c.headers.type,
}
events = table(
    "outbox_events",
    *(column(field.name, _COLUMN_TYPES.get(field.name)) for field in fields(Details)),
)


def deliveries(connection: Connection, wanted: Filter, *, after: int, limit: int) -> list[Summary]:
    """The deliveries that match, in the order of their ids, from the first one after ``after``."""
    columns = [events.c[field.name] for field in fields(Summary)]
    found = select(*columns).where(events.c.id > after, *_conditions(wanted)).order_by(events.c.id).limit(limit)
    return [Summary(**_values(row)) for row in connection.execute(found)]


def deliveries_of(connection: Connection, event_id: UUID, *, payload: bool) -> list[Details]:
    """All deliveries of one event."""
    columns = [events.c[field.name] for field in fields(Details) if payload or field.name != "payload"]
    found = select(*columns).where(_is(outbox.c.event_id, event_id)).order_by(events.c.id)
    return [Details(**_values(row)) for row in connection.execute(found)]


def statistics(connection: Connection) -> list[Group]:
    """How many deliveries each route has in each status, and since when, by the database's clock."""
    now: datetime = connection.execute(select(from_now())).scalar_one()
    oldest = func.min(events.c.created_at)
    grouped = select(events.c.route, events.c.status, func.count(), oldest).group_by(events.c.route, events.c.status)
    return [
        Group(route, Status(status), count, since, max(0.0, (now - since).total_seconds()))
        for route, status, count, since in connection.execute(grouped.order_by(events.c.route, events.c.status))
    ]


def unserved(connection: Connection) -> list[Unserved]:
    """Routes whose deliveries wait in lanes without an owner. Lanes that were paused wait on purpose."""
    free = or_(lanes.c.locked_until.is_(None), lanes.c.locked_until < from_now())
    found = (
        select(routes.c.name, routes.c.destination, func.count(lanes.c.shard.distinct()), func.count())
        .select_from(outbox)
        .join(lanes, (lanes.c.route == outbox.c.route) & (lanes.c.shard == outbox.c.shard))
        .join(routes, routes.c.id == outbox.c.route)
        .where(outbox.c.status.in_(_WAITING), ~lanes.c.paused, free)
        .group_by(routes.c.name, routes.c.destination)
        .order_by(routes.c.name)
    )
    return [Unserved(*row) for row in connection.execute(found)]


def server(connection: Connection) -> tuple[str, tuple[int, ...]]:
    """The product behind the connection, and its version."""
    dialect = connection.dialect
    product = {"postgresql": "PostgreSQL", "sqlite": "SQLite"}.get(dialect.name)
    if product is None:
        product = "MariaDB" if getattr(dialect, "is_mariadb", False) else "MySQL"
    return product, tuple(part for part in dialect.server_version_info or () if isinstance(part, int))


def variables(connection: Connection, names: Collection[str]) -> dict[str, str]:
    """Settings of the server as this connection sees them; those that it does not know are left out."""
    statement = _VARIABLES[connection.dialect.name if connection.dialect.name != "mariadb" else "mysql"]
    found = connection.execute(statement, {"names": list(names)})
    return {name: str(value) for name, value in found}


def id_cache(connection: Connection) -> int:
    """How many outbox ids a PostgreSQL session draws at once."""
    cache: int = connection.execute(_ID_CACHE).scalar_one()
    return cache


_NAMES: BindParameter[list[str]] = bindparam("names", expanding=True)
_VARIABLES = {
    "postgresql": text("SELECT name, setting FROM pg_settings WHERE name IN :names").bindparams(_NAMES),
    "mysql": text("SHOW VARIABLES WHERE Variable_name IN :names").bindparams(_NAMES),
    "sqlite": text("SELECT 'encoding', encoding FROM pragma_encoding() WHERE 'encoding' IN :names").bindparams(_NAMES),
}
_ID_CACHE = text(
    "SELECT seqcache FROM pg_sequence "
    "WHERE seqrelid = CAST(pg_get_serial_sequence('pillarbox_outbox', 'id') AS regclass)"
)


def _conditions(wanted: Filter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if wanted.status is not None:
        conditions.append(events.c.status == wanted.status)
    if wanted.route is not None:
        conditions.append(events.c.route == wanted.route)
    if wanted.type is not None:
        conditions += _of_type(wanted.type)
    if wanted.tenant is not None:
        conditions.append(_is(outbox.c.tenant, wanted.tenant))
    if wanted.key is not None:
        conditions.append(_is(outbox.c.key, wanted.key))
    return conditions


def _is(exact: Column[Any], value: object) -> ColumnElement[bool]:
    """Ask the table: the view is for people's eyes, and some databases compare text by its meaning."""
    return events.c.id.in_(select(outbox.c.id).where(exact == value))


def _of_type(pattern: str) -> list[ColumnElement[bool]]:
    name = events.c.event_type
    like = name.like(pattern.replace("_", "/_").replace("**", "%").replace("*", "%"), escape="/")
    if pattern.endswith("**"):
        return [like]
    # As many dots as the pattern has: then no wildcard can stand for one.
    return [like, func.length(name) - func.length(func.replace(name, ".", "")) == pattern.count(".")]


def _values(row: Row[Any]) -> dict[str, Any]:
    values = dict(row._mapping)
    values["status"] = Status(values["status"])
    values["event_id"] = UUID(str(values["event_id"]))
    if isinstance(values.get("headers"), str):
        values["headers"] = json.loads(values["headers"])
    return values
