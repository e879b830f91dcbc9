"""Removal of a consumer: deletes its rows in portions.

Each portion is a short transaction, which first checks that no process of the consumer is alive. The consumer's own row
is deleted last, so another run can finish an interrupted one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, TextClause, and_, delete, func, literal_column, select, text

from ..errors import StoreError
from ..inbox import consumer_id
from ..outbox import INBOX_DESTINATION, LOCAL, OUTBOUND, RouteRecord, Status
from . import inbox as stored
from .append import route_record
from .inbox import ConsumerRecord
from .inspection import VIEWS, database_time
from .overview import live_relays, route_named
from .retention import alone, guard
from .tables import claims, consumers, deliveries, inbox, lanes, routes

AT_ONCE = 5_000
SEEN_OF_LATE = 15.0
"""Seconds for which a consumer counts as alive after a process of it has reported its progress."""


@dataclass(frozen=True, slots=True)
class Remains:
    """The rows of a consumer in the database."""

    record: ConsumerRecord
    routes: Sequence[RouteRecord]
    """Routes of its deliveries and of the copies of its dead letters."""
    inbox: int = 0
    """Rows of its inbox."""
    deliveries: int = 0
    waiting: int = 0
    """Messages that have not taken effect, including dead letters."""


def remains(connection: Connection, name: str) -> Remains:
    """The rows of a consumer. Raises `StoreError` if it does not exist, or if a process of it is alive."""
    this = _remains(connection, name)
    numbers = inbox.c.consumer.in_(_numbers(this.record))
    rows = [_count(connection, deliveries[route.table], _is_of(connection, route)) for route in this.routes]
    return Remains(
        this.record,
        this.routes,
        inbox=_count(connection, inbox, numbers),
        deliveries=sum(rows),
        waiting=_waiting(connection, this),
    )


def forget(connection: Connection, name: str, *, discard: bool) -> tuple[str, int] | None:
    """Delete the next portion. Returns what was deleted and the number of rows, or None when everything is gone,
    including the consumer. Raises `StoreError` if it is alive, or if messages wait for it and ``discard`` is not set.
    """
    alone(connection)
    guard(connection)
    # Locked: a process that registers it is seen before it is too late, or finds that the consumer is gone.
    connection.execute(select(consumers.c.id).where(consumers.c.id == consumer_id(name)).with_for_update())
    this = _remains(connection, name)
    if not discard and (count := _waiting(connection, this)):
        raise StoreError(waits(name, count))
    for what, statement, values in _portions(connection, this):
        if gone := connection.execute(statement, {**values, "limit": AT_ONCE}).rowcount:
            return what, gone
    for route in this.routes:
        connection.execute(delete(lanes).where(lanes.c.route == route.id))
        connection.execute(delete(routes).where(routes.c.id == route.id))
    connection.execute(delete(consumers).where(consumers.c.id == consumer_id(name)))
    return None


def waits(name: str, count: int) -> str:
    """The reason for which a consumer is not removed."""
    return (
        f"messages wait for {name} ({count:,}, dead letters and copies of them that are not sent yet included): start "
        "it and a relay; or say --discard, and they never take effect"
    )


def _remains(connection: Connection, name: str) -> Remains:
    found = {each.name: each for each in stored.consumers(connection)}
    if name not in found:
        raise StoreError(f"there is no consumer {name!r}: see `pillarbox consumers list`")
    leading = select(routes).where(routes.c.destination.in_((INBOX_DESTINATION, LOCAL)), routes.c.topic == name)
    to_it = [route_record(row._mapping) for row in connection.execute(leading)]
    to_it = [route for route in to_it if route.topic == name]  # some databases compare text without regard to case
    copies = route_named(connection, f"dlq:{name}")
    this = Remains(found[name], to_it if copies is None else [*to_it, copies])
    _check_gone(connection, this)
    return this


def _check_gone(connection: Connection, this: Remains) -> None:
    name, names = this.record.name, {route.name for route in this.routes if route.topic == this.record.name}
    if alive := [relay.name for relay in live_relays(connection) if not names.isdisjoint(relay.routes)]:
        raise StoreError(f"consumer {name!r} is alive ({', '.join(alive)}): stop it first")
    seen = this.record.seen_at
    if seen is not None and (age := (database_time(connection) - seen).total_seconds()) < SEEN_OF_LATE:
        raise StoreError(
            f"consumer {name!r} was seen {age:.0f} seconds ago: if its processes have been stopped, say this again "
            f"{SEEN_OF_LATE - age:.0f} seconds from now"
        )


def _numbers(record: ConsumerRecord) -> list[int]:
    """Numbers of its generations in the inbox, including the one of an interrupted rebuild."""
    return [consumer_id(record.name, generation) for generation in range(1, record.generation + 2)]


def _waiting(connection: Connection, this: Remains) -> int:
    """Messages that wait: each received message has a claim, and a delivery of the outbox waits until it is sent."""
    count = _count(connection, claims, claims.c.consumer == consumer_id(this.record.name))
    for route in this.routes:
        if route.table == OUTBOUND:
            unsent = VIEWS[route.direction].unsent
            is_open = and_(unsent.c.route == route.id, unsent.c.status != Status.DISCARDED)
            count += _count(connection, unsent, is_open)
    return count


def _count(connection: Connection, table: Any, condition: ColumnElement[bool]) -> int:
    return connection.scalar(select(func.count()).select_from(table).where(condition)) or 0


# -- portions ----------------------------------------------------------------------------------------------------------


def _is_of(connection: Connection, route: RouteRecord) -> ColumnElement[bool]:
    rows = deliveries[route.table]
    of_route = rows.c.route == route.id
    # Written out, the status leads PostgreSQL to the index of the lane.
    return and_(of_route, rows.c.status == literal_column("'PENDING'")) if _is_postgres(connection) else of_route


def _portions(connection: Connection, this: Remains) -> Iterator[tuple[str, TextClause, Mapping[str, Any]]]:
    """The deletions in their order, beginning with the rows that can take effect. The inbox is the last."""
    dialect, postgres = connection.dialect.name, _is_postgres(connection)
    number = consumer_id(this.record.name)
    yield (
        "claims",
        _delete(dialect, "pillarbox_claims", "consumer, line, inbox_id", "consumer = :consumer"),
        {"consumer": number},
    )
    of_route = "route = :route"
    for route in this.routes:
        values = {"route": route.id}
        yield "requests", _delete(dialect, "pillarbox_requests", "id", of_route), values
        yield "failures", _delete(dialect, "pillarbox_failures", "route, shard, row_id", of_route), values
        # On PostgreSQL the index of a lane has all rows except restored history, which pruning removes.
        unsent = f"{of_route} AND status = 'PENDING'" if postgres else of_route
        yield "deliveries", _delete(dialect, route.table, "id", unsent), values
        if postgres:
            yield "journal", _delete(dialect, "pillarbox_journal", "", of_route), values
    for generation in _numbers(this.record):
        yield "inbox", _delete_inbox(dialect), {"consumer": generation}


def forget_inbox(connection: Connection, consumer: int, limit: int) -> int:
    """Delete up to ``limit`` rows of a generation that is not the live one; how many they were. No claim is about them:
    what waits belongs to the live one.
    """
    gone = connection.execute(_delete_inbox(connection.dialect.name), {"consumer": consumer, "limit": limit})
    return int(gone.rowcount)


def _delete_inbox(dialect: str) -> TextClause:
    return _delete(dialect, "pillarbox_inbox", "consumer, tenant, event_id", "consumer = :consumer")


@cache
def _delete(dialect: str, table: str, key: str, these: str) -> TextClause:
    """Delete up to ``limit`` of these rows."""
    # In partitions, several rows may have the same ctid: the condition holds for all rows that are deleted.
    places = f"SELECT ctid FROM {table} WHERE {these} LIMIT :limit"  # noqa: S608  constants
    found = {
        "postgresql": f"ctid = ANY (ARRAY({places})) AND {these}",
        "sqlite": f"({key}) IN (SELECT {key} FROM {table} WHERE {these} LIMIT :limit)",  # noqa: S608  constants
    }
    return text(f"DELETE FROM {table} WHERE {found.get(dialect, f'{these} LIMIT :limit')}")  # noqa: S608  constants


def _is_postgres(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"
