"""Queries for operators: the views of deliveries, and the audit trail.

Each direction has its own table, views and ids. Nothing here changes anything. All values are bound. Filters by key and
tenant compare bytes, as the store does. Ages and leases are computed by the database's clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Row,
    Select,
    Text,
    and_,
    bindparam,
    cast,
    column,
    exists,
    func,
    or_,
    select,
    table,
    text,
    true,
)
from sqlalchemy.types import TypeEngine

from ..outbox import INBOX_DESTINATION, LOCAL, Direction, FailurePolicy, RouteRecord, Status, stable_hash
from .columns import Utc, from_now
from .tables import audit, claims, failures, outbox, requests, routes
from .tables import deliveries as tables

TYPE_PATTERN = re.compile(r"(?:[a-z0-9_-]+|\*)(?:\.(?:[a-z0-9_-]+|\*))*|(?:[a-z0-9_-]+\.)*\*\*")
"""The patterns of event names that one SQL condition can express: those of routes, without ``*`` before ``**``."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A delivery in one line."""

    id: int
    """Unique within its direction."""
    direction: Direction
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
    """All details of a delivery; the payload only on request."""

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


ANY_CONSUMER = "*"


@dataclass(frozen=True, slots=True)
class Filter:
    """Filter of deliveries; None does not restrict."""

    status: Status | None = None
    route: str | None = None
    type: str | None = None
    """Matches `TYPE_PATTERN`."""
    tenant: str | None = None
    key: str | None = None
    older_than: float | None = None
    """Minimum age in seconds."""
    direction: Direction | None = None
    consumer: str | None = None
    """Name of a consumer, or `ANY_CONSUMER`."""
    topic: Sequence[str] | None = None
    """All names of the topic from which they were received."""

    def __str__(self) -> str:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        given |= {"topic": given["topic"][0]} if "topic" in given else {}
        return ", ".join(f"{name} {value}" for name, value in given.items())


@dataclass(frozen=True, slots=True)
class Group:
    """The deliveries of a route that have the same status."""

    direction: Direction
    route: str | None
    status: Status
    count: int
    oldest_at: datetime
    oldest_age_seconds: float


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An action of an operator."""

    id: int
    at: datetime
    who: str
    action: str
    target: str
    event_id: UUID | None
    reason: str | None
    details: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request of an operator that the lane's owner has not carried out yet."""

    row_id: int
    action: str
    event_id: UUID | None
    audit: int
    who: str
    at: datetime


_COLUMN_TYPES: dict[str, TypeEngine[Any]] = {
    "id": BigInteger(),
    "event_id": outbox.c.event_id.type,
    "next_attempt_at": Utc(),
    "locked_until": Utc(),
    "created_at": Utc(),
    "sent_at": Utc(),
    "headers": outbox.c.headers.type,
}
_UNSENT = ("id", "event_id", "event_type", "route", "shard", "tenant", "key", "status", "created_at")


class View:
    """The deliveries of one direction."""

    def __init__(self, direction: Direction) -> None:
        self.direction = direction
        self.rows = tables[direction.table]
        self.events = table(
            f"pillarbox_{direction}_events",
            *(column(each.name, _COLUMN_TYPES.get(each.name)) for each in fields(Details)),
            column("raised_event_id", outbox.c.event_id.type),
        )
        self.unsent = table(f"pillarbox_{direction}_unsent", *(column(name, outbox.c[name].type) for name in _UNSENT))
        """Deliveries that are unsent or were discarded. PostgreSQL finds them without reading the whole table."""
        goes_in = routes.c.destination == INBOX_DESTINATION
        claimed = exists().where(claims.c.delivery == self.events.c.raised_event_id)
        self.has_route: ColumnElement[bool] = goes_in if direction is Direction.INBOUND else ~goes_in
        """Whether a route has this direction."""
        self.waits: ColumnElement[bool] = claimed if direction is Direction.INBOUND else true()
        """Whether a delivery is still to take effect. A received message has a claim while it waits; its lane may learn
        of the effect a little later.
        """


VIEWS = {direction: View(direction) for direction in Direction}


def views(direction: Direction | None) -> list[View]:
    """The view of a direction, or both: outbound first."""
    return [VIEWS[each] for each in Direction if direction in (None, each)]


def deliveries(connection: Connection, wanted: Filter, *, after: int, limit: int) -> list[Summary]:
    """The deliveries that match, outbound before inbound, each in the order of their ids. Starts after an id of the
    wanted direction, or else of the first one.
    """
    found: list[Summary] = []
    for view in views(wanted.direction):
        found += page(connection, view, conditions_for(wanted, view), after=after, limit=limit - len(found))
        after = 0
    return found


def page(
    connection: Connection, view: View, conditions: Sequence[ColumnElement[bool]], *, after: int, limit: int
) -> list[Summary]:
    """The deliveries of one direction that match, after an id."""
    columns = [view.events.c[each.name] for each in fields(Summary)]
    found = select(*columns).where(view.events.c.id > after, *conditions).order_by(view.events.c.id).limit(limit)
    return [Summary(**_values(row)) for row in connection.execute(found)]


def deliveries_of(connection: Connection, event_id: UUID, *, payload: bool) -> list[Details]:
    """All deliveries of one event. A received message is found by the id of its row and by that of its event."""
    found: list[Details] = []
    for view in VIEWS.values():
        columns = [view.events.c[each.name] for each in fields(Details) if payload or each.name != "payload"]
        is_one = of_events(connection, [event_id], view)
        if view.direction is Direction.INBOUND:
            is_one = or_(is_one, view.events.c.raised_event_id.in_(_came_in_as(connection, event_id, view)))
        these = select(*columns).where(is_one).order_by(view.events.c.id)
        found += [Details(**_values(row)) for row in connection.execute(these)]
    return found


def _came_in_as(connection: Connection, event_id: UUID, view: View) -> list[UUID]:
    """The rows of a received event. Of rows that do not wait, only the headers have its id, so all rows are read."""
    rows = view.rows
    if connection.execute(select(rows.c.id).where(rows.c.event_id == event_id)).first() is not None:
        return []  # it is the id of a row
    headers = cast(rows.c.headers, Text)
    named = connection.execute(select(rows.c.event_id, headers).where(headers.like(f'%"{event_id}"%')))
    return [row for row, told in named if str(event_id) in known_as(json.loads(told))]


def known_as(headers: Mapping[str, str]) -> set[str]:
    """The ids of a received event for senders and for the inbox."""
    return {headers[name] for name in ("event_id", "pillarbox_inbox_id") if name in headers}


def of_events(connection: Connection, ids: Collection[UUID], view: View) -> ColumnElement[bool]:
    """The deliveries of these events. After an edit, the id of a delivery differs from that of its row, and only the
    latter has an index. A received message has a row id of its own.
    """
    if view.direction is Direction.INBOUND:
        waiting = connection.scalars(select(claims.c.delivery).where(claims.c.inbox_id.in_(ids)))
        return view.events.c.raised_event_id.in_([*ids, *waiting])
    if connection.dialect.name == "postgresql":
        edited = connection.scalars(_EDITED_IN_LOG, {"ids": [*ids]}).all()
    else:
        edited = connection.scalars(_EDITED, {"ids": [*ids]}).all()
    return and_(view.events.c.event_id.in_(ids), view.events.c.raised_event_id.in_([*ids, *edited]))


_EDITED = (
    select(outbox.c.event_id)
    .join(failures, failures.c.row_id == outbox.c.id)
    .where(failures.c.event_id.in_(bindparam("ids", expanding=True)))
)
_EDITED_IN_LOG = text(
    """
    SELECT o.event_id FROM pillarbox_failures f CROSS JOIN LATERAL (
        SELECT o.event_id FROM pillarbox_outbox o
        WHERE o.route = f.route AND o.shard = f.shard AND o.status = 'PENDING'
          AND o.id = f.row_id
        ORDER BY o.id LIMIT 1
    ) o
    WHERE f.event_id = ANY (CAST(:ids AS uuid[]))
    """
)
"""Search without an index, because there is none on the id alone."""


def statistics(connection: Connection, direction: Direction | None = None) -> list[Group]:
    """Number and age of the deliveries of each route and status, by the database's clock."""
    do_not_compile(connection)
    now = database_time(connection)
    found = []
    for view in views(direction):
        what = (view.events.c.route, view.events.c.status)
        grouped = select(*what, func.count(), func.min(view.events.c.created_at)).group_by(*what).order_by(*what)
        found += [
            Group(view.direction, route, Status(status), count, since, max(0.0, (now - since).total_seconds()))
            for route, status, count, since in connection.execute(grouped)
        ]
    return found


def lead_to_indexes(connection: Connection) -> None:
    """Disable sequential scans for this transaction: because of a limit, PostgreSQL would expect an early match and
    read the whole outbox for each lane.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")


def do_not_compile(connection: Connection) -> None:
    """Disable JIT for this transaction: the plans of the views look expensive, and PostgreSQL would compile for 15 s a
    query of 10 ms.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL jit = off"))


def database_time(connection: Connection) -> datetime:
    """Now, by the database's clock."""
    now: datetime = connection.execute(select(from_now())).scalar_one()
    return now


# -- one delivery ------------------------------------------------------------------------------------------------------


def head_of_key(connection: Connection, delivery: Details, route: RouteRecord) -> Details | None:
    """The first unsettled delivery of its lane and key that was tried before this one."""
    blocking = [Status.RETRYING, Status.PARKED]
    if route.on_failure is FailurePolicy.PARK:
        blocking.append(Status.FAILED)
    unsent = VIEWS[delivery.direction].unsent
    tenant = unsent.c.tenant
    first = (
        select(unsent.c.event_id, unsent.c.id)
        .where(unsent.c.route == route.id, unsent.c.shard == delivery.shard, unsent.c.status.in_(blocking))
        .where(unsent.c.key == delivery.key, unsent.c.id < delivery.id)
        .where(tenant.is_(None) if delivery.tenant_id is None else tenant == delivery.tenant_id)
        .order_by(unsent.c.id)
        .limit(1)
    )
    row = connection.execute(first).one_or_none()
    if row is None:
        return None
    of_row = and_(failures.c.route == route.id, failures.c.shard == delivery.shard, failures.c.row_id == row.id)
    event_id = connection.scalar(select(failures.c.event_id).where(of_row)) or row.event_id  # possibly edited
    found = deliveries_of(connection, event_id, payload=False)
    return next((each for each in found if (each.direction, each.id) == (delivery.direction, row.id)), None)


def pending_before(connection: Connection, delivery: Details) -> int:
    """Number of deliveries that precede it in its lane."""
    unsent = VIEWS[delivery.direction].unsent
    ahead = select(func.count()).where(
        unsent.c.route == stable_hash(delivery.route or ""),
        unsent.c.shard == delivery.shard,
        unsent.c.status == Status.PENDING,
        unsent.c.id < delivery.id,
    )
    return connection.execute(ahead).scalar_one()


def body_of(connection: Connection, delivery: Details) -> bytes:
    """The raw bytes of a delivery."""
    is_edited = and_(failures.c.event_id == delivery.event_id, failures.c.body.is_not(None))
    here = select(failures.c.body).where(failures.c.row_id == delivery.id, is_edited)
    if (edited := connection.scalars(here).first()) is not None:
        return bytes(edited)
    rows = VIEWS[delivery.direction].rows
    same = and_(rows.c.event_id == delivery.event_id, rows.c.id == delivery.id)
    return bytes(connection.execute(select(rows.c.body).where(same)).scalar_one())


def took_effect(connection: Connection, delivery: Details) -> bool:
    """Whether a received message was processed, although its lane may not have recorded that yet."""
    claim = select(claims.c.line).where(claims.c.delivery == delivery.event_id).limit(1)
    return delivery.direction is Direction.INBOUND and connection.execute(claim).first() is None


# -- audit trail -------------------------------------------------------------------------------------------------------


def audit_trail(
    connection: Connection, *, event: UUID | None = None, actions: Collection[str] = (), limit: int | None = None
) -> list[AuditEntry]:
    """Audit entries, newest first: all of them, or those that name an event."""
    found = select(audit).order_by(audit.c.id.desc()).limit(limit)
    if actions:
        found = found.where(audit.c.action.in_(actions))
    if event is not None:
        named = f"%{event}%"
        found = found.where(or_(audit.c.event_id == event, audit.c.target.like(named), audit.c.details.like(named)))
    return [_entry(row._mapping) for row in connection.execute(found)]


def last_done(connection: Connection, action: str, targets: Collection[str]) -> AuditEntry | None:
    """The newest entry about one of these targets."""
    found = select(audit).where(audit.c.action == action, audit.c.target.in_(targets)).order_by(audit.c.id.desc())
    # Compared again: some databases ignore case.
    return next((_entry(row._mapping) for row in connection.execute(found) if row.target in targets), None)


def discarded_by(connection: Connection, delivery: Details) -> list[AuditEntry]:
    """The runs that may have discarded it: the one that named it, or else those whose filters match it."""
    runs = audit_trail(connection, actions=["discard"])
    ids = {str(delivery.event_id)}
    if delivery.direction is Direction.INBOUND:
        ids |= known_as(delivery.headers)
    named = [run for run in runs if any(each in run.target for each in ids)]
    return named[:1] or [run for run in runs if _covers(connection, run.details, delivery)]


def _covers(connection: Connection, details: Mapping[str, Any], delivery: Details) -> bool:
    first, last = details.get("rows", {}).get(delivery.direction, (1, 0))
    if not first <= delivery.id <= last:
        return False
    # The status at that time is unknown.
    wanted = Filter(**details.get("filter", {}) | {"status": None})
    view = VIEWS[delivery.direction]
    same = (of_events(connection, [delivery.event_id], view), view.events.c.id == delivery.id)
    return connection.execute(select(view.events.c.id).where(*same, *conditions_for(wanted, view))).first() is not None


def open_requests(connection: Connection, delivery: Summary) -> list[OpenRequest]:
    """Open requests for a delivery, in the order in which they will be carried out."""
    found = (
        select(requests.c.row_id, requests.c.action, requests.c.event_id, requests.c.audit, audit.c.who, audit.c.at)
        .join(audit, audit.c.id == requests.c.audit)
        .where(requests.c.row_id == delivery.id, requests.c.route == stable_hash(delivery.route or ""))
        .order_by(requests.c.id)
    )
    return [OpenRequest(*row) for row in connection.execute(found)]


def _entry(row: Mapping[Any, Any]) -> AuditEntry:
    values = {each.name: row[each.name] for each in fields(AuditEntry)}
    values["details"] = json.loads(values["details"] or "{}")
    return AuditEntry(**values)


def conditions_for(wanted: Filter, view: View) -> list[ColumnElement[bool]]:
    """The filter, as conditions on the deliveries of one direction."""
    events, conditions = view.events, list[ColumnElement[bool]]()
    if wanted.status is not None:
        conditions.append(events.c.status == wanted.status)
    if wanted.route is not None:
        conditions.append(events.c.route == wanted.route)
    if wanted.type is not None:
        conditions += _of_type(events.c.event_type, wanted.type)
    if wanted.tenant is not None:
        conditions.append(_is(view, "tenant", wanted.tenant))
    if wanted.key is not None:
        conditions.append(_is(view, "key", wanted.key))
    if wanted.consumer is not None:
        conditions.append(events.c.route.in_(_routes_of(wanted.consumer)))
    if wanted.topic is not None:
        conditions.append(events.c.topic.in_(wanted.topic))
    if wanted.older_than is not None:
        conditions.append(events.c.created_at < from_now(-wanted.older_than))
    return conditions


def _routes_of(consumer: str) -> Select[tuple[str]]:
    """Names of the routes to a consumer: of its received messages, and of deliveries from the outbox."""
    found = select(routes.c.name).where(routes.c.destination.in_((LOCAL, INBOX_DESTINATION)))
    return found if consumer == ANY_CONSUMER else found.where(routes.c.topic == consumer)


def _is(view: View, exact: str, value: object) -> ColumnElement[bool]:
    """Compare in the table: the view has display text, and some databases compare text without regard to case."""
    return view.events.c.id.in_(select(view.rows.c.id).where(view.rows.c[exact] == value))


def _of_type(name: ColumnElement[str], pattern: str) -> list[ColumnElement[bool]]:
    like = name.like(pattern.replace("_", "/_").replace("**", "%").replace("*", "%"), escape="/")
    if pattern.endswith("**"):
        return [like]
    # The same number of dots as the pattern: then no wildcard matches a dot.
    return [like, func.length(name) - func.length(func.replace(name, ".", "")) == pattern.count(".")]


def _values(row: Row[Any]) -> dict[str, Any]:
    values = dict(row._mapping)
    values |= {"status": Status(values["status"]), "direction": Direction(values["direction"])}
    if isinstance(values.get("headers"), str):
        values["headers"] = json.loads(values["headers"])
    return values
