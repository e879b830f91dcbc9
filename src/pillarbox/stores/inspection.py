"""The outbox as people see it: questions to the view ``outbox_events``, to lanes, relays and the trail of what people
did, and to the server about itself.

Nothing here changes anything. All values are bound; filters by key and tenant compare bytes, as the store does. Ages
and leases are told by the database's clock.
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
    BindParameter,
    Column,
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Select,
    and_,
    bindparam,
    case,
    column,
    func,
    literal_column,
    or_,
    select,
    table,
    text,
    true,
    union_all,
)
from sqlalchemy.types import TypeEngine

from ..outbox import FailurePolicy, RouteRecord, Status, stable_hash
from .append import route_record
from .columns import Utc, from_now
from .tables import audit, failures, lanes, outbox, relays, requests, routes, tenants

TYPE_PATTERN = re.compile(r"(?:[a-z0-9_-]+|\*)(?:\.(?:[a-z0-9_-]+|\*))*|(?:[a-z0-9_-]+\.)*\*\*")
"""The patterns of event names that one SQL condition can express: those of routes, without ``*`` before ``**``."""

_WAITING = (Status.PENDING, Status.RETRYING)
_AFTER_FAILURE = (Status.RETRYING, Status.PARKED, Status.FAILED)
COUNTED = 50_000
"""What a lane has beyond that need not be known so exactly that the whole backlog is read for it."""
_YOUNGEST = 0.001
"""What waits is at least so many seconds old, whatever clocks say: 0 means that nothing does."""


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
    older_than: float | None = None
    """Seconds since it was written, at least."""

    def __str__(self) -> str:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return ", ".join(f"{name} {value}" for name, value in given.items())


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
    topic: str
    """As the route says it; the handler's name if the destination is this process."""
    lanes: int
    waiting: int


@dataclass(frozen=True, slots=True)
class LaneState:
    """A lane: who holds it, what it has before it, and what holds it back."""

    route: str
    destination: str
    shard: int
    owner: str | None
    lease_seconds: float | None
    """Until the lease ends; below zero: since it has ended; None: nobody holds the lane."""
    epoch: int
    batch: int
    tries: int
    pending: int
    waiting: int
    """Deliveries that are RETRYING, PARKED or FAILED."""
    oldest_pending_seconds: float | None
    paused: bool
    rate: float | None
    trouble: str | None
    trouble_seconds: float | None
    """Until the owner tries again; None, if there is trouble: it needs a person."""

    @property
    def held(self) -> bool:
        """Whether a relay holds it now."""
        return self.lease_seconds is not None and self.lease_seconds > 0

    def __str__(self) -> str:
        return f"{self.route}/{self.shard}"


@dataclass(frozen=True, slots=True)
class RelayState:
    """A relay that is alive, and what it serves."""

    name: str
    routes: tuple[str, ...]
    shards: tuple[int, ...] | None
    """None: all of them."""

    def serves(self, route: str, shard: int) -> bool:
        """Whether it may hold this lane."""
        return route in self.routes and (self.shards is None or shard in self.shards)


@dataclass(frozen=True, slots=True)
class TenantState:
    """A tenant that people have stopped or slowed."""

    tenant: str
    paused: bool
    rate: float | None


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What a person has done."""

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
    """What a person wants done with a delivery, and the owner of its lane has not done yet."""

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
events = table(
    "outbox_events",
    *(column(each.name, _COLUMN_TYPES.get(each.name)) for each in fields(Details)),
    column("raised_event_id", outbox.c.event_id.type),
)
unsent = table(
    "pillarbox_unsent",
    *(
        column(name, outbox.c[name].type)
        for name in ("id", "event_id", "event_type", "route", "shard", "tenant", "key", "status", "created_at")
    ),
)
"""What is still to be sent, or was discarded. PostgreSQL finds it without a look at all that was ever written."""


def deliveries(
    connection: Connection, wanted: Filter, *, after: int, limit: int, also: Sequence[ColumnElement[bool]] = ()
) -> list[Summary]:
    """The deliveries that match, in the order of their ids, from the first one after ``after``."""
    columns = [events.c[each.name] for each in fields(Summary)]
    conditions = (events.c.id > after, *conditions_for(wanted), *also)
    found = select(*columns).where(*conditions).order_by(events.c.id).limit(limit)
    return [Summary(**_values(row)) for row in connection.execute(found)]


def deliveries_of(connection: Connection, event_id: UUID, *, payload: bool) -> list[Details]:
    """All deliveries of one event."""
    columns = [events.c[each.name] for each in fields(Details) if payload or each.name != "payload"]
    found = select(*columns).where(of_events(connection, [event_id])).order_by(events.c.id)
    return [Details(**_values(row)) for row in connection.execute(found)]


def of_events(connection: Connection, ids: Collection[UUID]) -> ColumnElement[bool]:
    """The deliveries of these events. An edit gives a delivery another id than its row has, and only the row's is found
    by an index.
    """
    if connection.dialect.name == "postgresql":
        edited = connection.scalars(_EDITED_IN_LOG, {"ids": [*ids]}).all()
    else:
        edited = connection.scalars(_EDITED, {"ids": [*ids]}).all()
    return and_(events.c.event_id.in_(ids), events.c.raised_event_id.in_([*ids, *edited]))


_EDITED = (
    select(outbox.c.event_id)
    .join(failures, failures.c.row_id == outbox.c.id)
    .where(failures.c.event_id.in_(bindparam("ids", expanding=True)))
)
_EDITED_IN_LOG = text(
    """
    SELECT o.event_id FROM pillarbox_failures f CROSS JOIN LATERAL (
        SELECT o.event_id FROM pillarbox_outbox o
        WHERE o.route = f.route AND o.shard = f.shard AND o.status = 'PENDING' AND o.status <> 'SENT'
          AND o.id = f.row_id
        ORDER BY o.id LIMIT 1
    ) o
    WHERE f.event_id = ANY (CAST(:ids AS uuid[]))
    """
)
"""There an id alone has no index."""


def statistics(connection: Connection) -> list[Group]:
    """How many deliveries each route has in each status, and since when, by the database's clock."""
    do_not_compile(connection)
    now = database_time(connection)
    oldest = func.min(events.c.created_at)
    grouped = select(events.c.route, events.c.status, func.count(), oldest).group_by(events.c.route, events.c.status)
    return [
        Group(route, Status(status), count, since, max(0.0, (now - since).total_seconds()))
        for route, status, count, since in connection.execute(grouped.order_by(events.c.route, events.c.status))
    ]


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a route has before it."""

    route: str
    pending: int
    """PENDING, SENDING, RETRYING and PARKED."""
    failed: int
    oldest_pending_seconds: float


def unowned_lanes(connection: Connection) -> dict[str, int]:
    """How many lanes of each route nobody holds, without those that are paused."""
    free = or_(lanes.c.locked_until.is_(None), lanes.c.locked_until < from_now())
    unowned = func.count(case((and_(free, ~lanes.c.paused), 1)))
    counted = select(routes.c.name, unowned).join(lanes, lanes.c.route == routes.c.id).group_by(routes.c.name)
    return dict(connection.execute(counted).all())


def backlog(connection: Connection) -> list[Backlog]:
    """What each route has to send. Reads only the index of what is not sent, and the first row of each lane. On
    PostgreSQL, where counting takes longest, it stops at `COUNTED` in each lane and status.
    """
    do_not_compile(connection)
    lead_to_indexes(connection)
    bounded = connection.dialect.name == "postgresql"
    counted = union_all(*(_counted(status, bounded) for status in (Status.PENDING, *_AFTER_FAILURE)))
    pending, failed, first = dict[int, int](), dict[int, int](), dict[int, tuple[int, datetime]]()
    for route, status, count, lowest, written_at in connection.execute(counted):
        counts = failed if status == Status.FAILED else pending
        counts[route] = counts.get(route, 0) + count
        if counts is pending:
            first[route] = min(first.get(route, (lowest, written_at)), (lowest, written_at))
    now = database_time(connection)
    return [
        Backlog(
            name,
            pending.get(route, 0),
            failed.get(route, 0),
            max(_YOUNGEST, (now - first[route][1]).total_seconds()) if route in first else 0.0,
        )
        for route, name in connection.execute(select(routes.c.id, routes.c.name))
    ]


def _counted(status: Status, bounded: bool) -> Select[Any]:
    """Per lane, so that every database finds them by its index, and none reads what was sent. When the first was
    written is asked in the same statement: by the next one it may have been sent.
    """
    found = unsent.c.status == literal_column(f"'{status}'")
    same_lane = and_(unsent.c.route == lanes.c.route, unsent.c.shard == lanes.c.shard)
    if bounded:
        some = select(unsent.c.id).where(same_lane, found).limit(COUNTED).correlate(lanes).lateral("some")
        counting = (
            select(lanes.c.route, lanes.c.shard).add_columns(*_amount(some)).select_from(lanes).join(some, true())
        )
    else:
        counting = select(lanes.c.route, lanes.c.shard).add_columns(*_amount(unsent)).select_from(lanes)
        counting = counting.join(unsent, and_(same_lane, found))
    counted = counting.group_by(lanes.c.route, lanes.c.shard).subquery()
    # Only with its lane and status is a row found by its id without reading all of them.
    is_first = and_(
        unsent.c.route == counted.c.route, unsent.c.shard == counted.c.shard, unsent.c.id == counted.c.first
    )
    written_at = select(unsent.c.created_at).where(is_first, found).correlate(counted).scalar_subquery()
    return select(
        counted.c.route,
        literal_column(f"'{status}'"),
        counted.c.amount,
        counted.c.first,
        written_at.label("written_at"),
    )


def _amount(rows: FromClause) -> tuple[ColumnElement[int], ColumnElement[int]]:
    return func.count().label("amount"), func.min(rows.c.id).label("first")


def lead_to_indexes(connection: Connection) -> None:
    """A limit makes PostgreSQL hope that it comes soon to what it looks for, and read the whole outbox for each lane.
    For this transaction.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")


def do_not_compile(connection: Connection) -> None:
    """The plans of our views are large and look expensive: where PostgreSQL has a compiler, it would spend 15 s on what
    takes 10 ms without. For this transaction.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL jit = off"))


def unserved(connection: Connection) -> list[Unserved]:
    """Routes whose deliveries wait in lanes without an owner. Lanes that were paused wait on purpose."""
    free = or_(lanes.c.locked_until.is_(None), lanes.c.locked_until < from_now())
    what = (routes.c.name, routes.c.destination, routes.c.topic)
    found = (
        select(*what, func.count(lanes.c.shard.distinct()), func.count())
        .select_from(unsent)
        .join(lanes, (lanes.c.route == unsent.c.route) & (lanes.c.shard == unsent.c.shard))
        .join(routes, routes.c.id == unsent.c.route)
        .where(unsent.c.status.in_(_WAITING), ~lanes.c.paused, free)
        .group_by(*what)
        .order_by(routes.c.name)
    )
    return [Unserved(*row) for row in connection.execute(found)]


def database_time(connection: Connection) -> datetime:
    """Now, as the database sees it."""
    now: datetime = connection.execute(select(from_now())).scalar_one()
    return now


# -- lanes and relays --------------------------------------------------------------------------------------------------


def lane_states(connection: Connection, route: str | None = None, shard: int | None = None) -> list[LaneState]:
    """All lanes, or those of one route, or one of them."""
    wanted = [] if route is None else [lanes.c.route == stable_hash(route)]
    if shard is not None:
        wanted.append(lanes.c.shard == shard)
    is_pending = unsent.c.status == Status.PENDING
    counted = (
        select(
            unsent.c.route,
            unsent.c.shard,
            func.count(case((is_pending, 1))).label("pending"),
            func.count(case((~is_pending, 1))).label("waiting"),
            func.min(case((is_pending, unsent.c.id))).label("first"),
        )
        .where(unsent.c.status.in_((Status.PENDING, *_AFTER_FAILURE)))
        .group_by(unsent.c.route, unsent.c.shard)
        .subquery()
    )
    # Only with its lane and status is a row found by its id without reading all of them.
    is_first = and_(
        unsent.c.route == lanes.c.route, unsent.c.shard == lanes.c.shard, is_pending, unsent.c.id == counted.c.first
    )
    found = (
        select(lanes, routes.c.name, routes.c.destination, counted.c.pending, counted.c.waiting, unsent.c.created_at)
        .join(routes, routes.c.id == lanes.c.route)
        .outerjoin(counted, and_(counted.c.route == lanes.c.route, counted.c.shard == lanes.c.shard))
        .outerjoin(unsent, is_first)
        .where(*wanted)
        .order_by(routes.c.name, lanes.c.shard)
    )
    now = database_time(connection)
    return [_lane_state(row, now) for row in connection.execute(found)]


def _lane_state(row: Row[Any], now: datetime) -> LaneState:
    return LaneState(
        route=row.name,
        destination=row.destination,
        shard=row.shard,
        owner=row.locked_by,
        lease_seconds=_until(row.locked_until, now),
        epoch=row.epoch,
        batch=row.batch,
        tries=row.tries,
        pending=row.pending or 0,
        waiting=row.waiting or 0,
        oldest_pending_seconds=None if row.created_at is None else max(0.0, (now - row.created_at).total_seconds()),
        paused=row.paused,
        rate=row.rate,
        trouble=row.trouble,
        trouble_seconds=_until(row.trouble_until, now),
    )


def _until(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else (moment - now).total_seconds()


def live_relays(connection: Connection) -> list[RelayState]:
    """The relays that are alive."""
    names = {row.id: row.name for row in connection.execute(select(routes.c.id, routes.c.name))}
    found = select(relays).where(relays.c.expires_at > from_now()).order_by(relays.c.name)
    return [
        RelayState(
            name=row.name,
            routes=tuple(sorted(names[route] for route in json.loads(row.serves) if route in names)),
            shards=None if row.shards is None else tuple(json.loads(row.shards)),
        )
        for row in connection.execute(found)
    ]


def route_named(connection: Connection, name: str) -> RouteRecord | None:
    """What the database knows about a route."""
    row = connection.execute(select(routes).where(routes.c.id == stable_hash(name))).one_or_none()
    return None if row is None else route_record(row._mapping)


def routes_to(connection: Connection, destinations: Collection[str]) -> list[RouteRecord]:
    """The routes that lead to these destinations, as far as the database knows them."""
    found = select(routes).where(routes.c.destination.in_(destinations)).order_by(routes.c.name)
    return [route_record(row._mapping) for row in connection.execute(found)]


def topics_of(connection: Connection, route: RouteRecord) -> list[str]:
    """The topics of all deliveries of a route that are in the outbox: what its template has become so far."""
    found = select(outbox.c.topic).where(outbox.c.route == route.id).distinct()
    return sorted(connection.execute(found).scalars())


def tenant_states(connection: Connection) -> list[TenantState]:
    """Tenants that are paused or held to a rate."""
    held = or_(tenants.c.paused, tenants.c.rate.is_not(None))
    return [TenantState(*row) for row in connection.execute(select(tenants).where(held).order_by(tenants.c.tenant))]


# -- one delivery ------------------------------------------------------------------------------------------------------


def head_of_key(connection: Connection, delivery: Details, route: RouteRecord) -> Details | None:
    """The first unsettled delivery of its lane and key that was tried before this one."""
    blocking = [Status.RETRYING, Status.PARKED]
    if route.on_failure is FailurePolicy.PARK:
        blocking.append(Status.FAILED)
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
    return next((each for each in deliveries_of(connection, row.event_id, payload=False) if each.id == row.id), None)


def pending_before(connection: Connection, delivery: Details) -> int:
    """How many deliveries of its lane go before it."""
    ahead = select(func.count()).where(
        unsent.c.route == stable_hash(delivery.route or ""),
        unsent.c.shard == delivery.shard,
        unsent.c.status == Status.PENDING,
        unsent.c.id < delivery.id,
    )
    return connection.execute(ahead).scalar_one()


def body_of(connection: Connection, delivery: Details) -> bytes:
    """The bytes of a delivery, whatever they are."""
    if connection.dialect.name == "postgresql":
        edited = connection.scalars(_EDITED_BODY, {"row": delivery.id, "event": str(delivery.event_id)}).first()
        if edited is not None:
            return bytes(edited)
    same = and_(outbox.c.event_id == delivery.event_id, outbox.c.id == delivery.id)
    return bytes(connection.execute(select(outbox.c.body).where(same)).scalar_one())


_EDITED_BODY = text(
    "SELECT body FROM pillarbox_failures WHERE row_id = :row AND event_id = CAST(:event AS uuid) AND body IS NOT NULL"
)


# -- what people did ---------------------------------------------------------------------------------------------------


def audit_trail(
    connection: Connection, *, event: UUID | None = None, actions: Collection[str] = (), limit: int | None = None
) -> list[AuditEntry]:
    """What people did, newest first: all of it, or what names an event."""
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
    # Compared once more: some databases take letters of another case for the same.
    return next((_entry(row._mapping) for row in connection.execute(found) if row.target in targets), None)


def discarded_by(connection: Connection, delivery: Details) -> list[AuditEntry]:
    """The runs that may have discarded it: the one that named it, else those whose filter takes it."""
    runs = audit_trail(connection, actions=["discard"])
    named = [run for run in runs if str(delivery.event_id) in run.target]
    return named[:1] or [run for run in runs if _covers(connection, run.details, delivery)]


def _covers(connection: Connection, details: Mapping[str, Any], delivery: Details) -> bool:
    first, last = details.get("rows", (1, 0))
    if not first <= delivery.id <= last:
        return False
    # What the status was then, nobody knows any more.
    wanted = Filter(**details.get("filter", {}) | {"status": None})
    same = (of_events(connection, [delivery.event_id]), events.c.id == delivery.id)
    return connection.execute(select(events.c.id).where(*same, *conditions_for(wanted))).first() is not None


def open_requests(connection: Connection, rows: Collection[int]) -> list[OpenRequest]:
    """What people want done with these deliveries, in the order in which it will be done."""
    found = (
        select(requests.c.row_id, requests.c.action, requests.c.event_id, requests.c.audit, audit.c.who, audit.c.at)
        .join(audit, audit.c.id == requests.c.audit)
        .where(requests.c.row_id.in_(rows))
        .order_by(requests.c.id)
    )
    return [OpenRequest(*row) for row in connection.execute(found)]


def _entry(row: Mapping[Any, Any]) -> AuditEntry:
    values = {each.name: row[each.name] for each in fields(AuditEntry)}
    values["details"] = json.loads(values["details"] or "{}")
    return AuditEntry(**values)


# -- the server --------------------------------------------------------------------------------------------------------


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


def conditions_for(wanted: Filter) -> list[ColumnElement[bool]]:
    """The filter, as conditions on the view."""
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
    if wanted.older_than is not None:
        conditions.append(events.c.created_at < from_now(-wanted.older_than))
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
    if isinstance(values.get("headers"), str):
        values["headers"] = json.loads(values["headers"])
    return values
