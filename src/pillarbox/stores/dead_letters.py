"""The dead letters of consumers: the failed deliveries of their lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, and_, cast, func, literal_column, or_, select

from ..inbox import DeadLetter
from ..outbox import INBOUND, INBOX_DESTINATION, LOCAL, OUTBOUND, Status
from ..transport import Message
from .failures import decode_headers
from .tables import deliveries, failures, routes

_OF_CONSUMERS = {
    INBOUND: routes.c.destination == INBOX_DESTINATION,
    OUTBOUND: routes.c.destination == LOCAL,
}
"""The routes to consumers, by the tables of their deliveries."""


def dead_letters(
    connection: Connection, table: str, consumer: str | None, tenant: str | None, *, after: int, limit: int
) -> Sequence[DeadLetter]:
    """Failed deliveries of this consumer, or of all consumers, in the order of their ids, after ``after``."""
    o, f = deliveries[table], failures
    is_its_row = and_(o.c.route == f.c.route, o.c.shard == f.c.shard, o.c.id == f.c.row_id)
    if connection.dialect.name == "postgresql":  # led to the index of the lane by a status that is written out
        is_its_row = and_(is_its_row, o.c.status == literal_column("'PENDING'"))
    found = (
        select(
            f.c.row_id,
            routes.c.topic.label("consumer"),
            f.c.tenant,
            f.c.last_error,
            f.c.attempts,
            o.c.topic,
            o.c.key,
            cast(func.coalesce(f.c.headers, o.c.headers), Text).label("headers"),
            func.coalesce(f.c.body, o.c.body, type_=o.c.body.type).label("body"),
            o.c.event_type,
            o.c.created_at,
        )
        .select_from(f.join(routes, routes.c.id == f.c.route).join(o, is_its_row))
        .where(f.c.status == Status.FAILED, f.c.row_id > after, _OF_CONSUMERS[table])
        .where(*_is(routes.c.topic, consumer), *_is(f.c.tenant, tenant))
        .order_by(f.c.row_id)
        .limit(limit)
    )
    return [
        DeadLetter(
            consumer=row.consumer,
            reason=row.last_error or "",
            message=Message(row.topic, row.key, bytes(row.body), decode_headers(row.headers)),
            event_type=row.event_type,
            tenant=row.tenant,
            attempts=row.attempts,
            created_at=row.created_at,
            row=row.row_id,
        )
        for row in connection.execute(found)
    ]


def _is(column: ColumnElement[Any], value: str | None) -> list[ColumnElement[bool]]:
    return [] if value is None else [column == value]


def count_dead_letters(connection: Connection) -> dict[str, int]:
    """Number of dead letters per consumer."""
    found = (
        select(routes.c.topic, func.count().label("number"))
        .select_from(failures.join(routes, routes.c.id == failures.c.route))
        .where(failures.c.status == Status.FAILED, or_(*_OF_CONSUMERS.values()))
        .group_by(routes.c.topic)
    )
    return {row.topic: row.number for row in connection.execute(found)}
