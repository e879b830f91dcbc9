"""Overviews of lanes, relays, routes and tenants, for operators and for checks.

Nothing here changes anything. Backlogs are counted by the views of unsent deliveries, and ages by the database's clock.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Select,
    and_,
    case,
    func,
    join,
    literal_column,
    or_,
    select,
    true,
    union_all,
)

from ..outbox import Direction, RouteRecord, Status, stable_hash
from .append import route_record
from .columns import from_now
from .inspection import View, database_time, do_not_compile, lead_to_indexes, views
from .tables import deliveries, lanes, relays, routes, tenants

_WAITING = (Status.PENDING, Status.RETRYING)
_AFTER_FAILURE = (Status.RETRYING, Status.PARKED, Status.FAILED)
COUNTED = 50_000
"""Limit of counts per lane: beyond it, an exact number is not worth reading the whole backlog."""
_YOUNGEST = 0.001
"""Minimum age of a waiting delivery, whatever clocks say: 0 means that nothing waits."""


@dataclass(frozen=True, slots=True)
class Unserved:
    """A route with waiting deliveries in lanes without an owner."""

    route: str
    destination: str
    topic: str
    """The route's topic, or the handler's name if the destination is this process."""
    lanes: int
    waiting: int


@dataclass(frozen=True, slots=True)
class LaneState:
    """A lane: its owner, its backlog, and why it does not send."""

    direction: Direction
    route: str
    destination: str
    shard: int
    owner: str | None
    lease_seconds: float | None
    """Seconds until the lease expires; negative after its expiry; None without an owner."""
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
    """Seconds until the owner tries again. None with a trouble: it waits for an operator."""

    @property
    def held(self) -> bool:
        """Whether a relay owns it now."""
        return self.lease_seconds is not None and self.lease_seconds > 0

    def __str__(self) -> str:
        return f"{self.route}/{self.shard}"


@dataclass(frozen=True, slots=True)
class RelayState:
    """A live relay and its routes."""

    name: str
    routes: tuple[str, ...]
    shards: tuple[int, ...] | None
    """None: all shards."""

    def serves(self, route: str, shard: int) -> bool:
        """Whether it may take this lane."""
        return route in self.routes and (self.shards is None or shard in self.shards)


@dataclass(frozen=True, slots=True)
class TenantState:
    """A paused or rate-limited tenant."""

    tenant: str
    paused: bool
    rate: float | None


# -- backlogs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Backlog:
    """The backlog of a route."""

    route: str
    pending: int
    """PENDING, SENDING, RETRYING and PARKED."""
    failed: int
    oldest_pending_seconds: float


def unowned_lanes(connection: Connection) -> dict[str, int]:
    """Number of lanes per route without an owner, except paused lanes."""
    free = or_(lanes.c.locked_until.is_(None), lanes.c.locked_until <= from_now())
    unowned = func.count(case((and_(free, ~lanes.c.paused), 1)))
    counted = select(routes.c.name, unowned).join(lanes, lanes.c.route == routes.c.id).group_by(routes.c.name)
    return dict(connection.execute(counted).all())


def backlog(connection: Connection) -> list[Backlog]:
    """The backlog of each route. Reads only the index of unsent deliveries, and the first row of each lane. On
    PostgreSQL, where counting takes longest, it stops at `COUNTED` per lane and status.
    """
    do_not_compile(connection)
    lead_to_indexes(connection)
    bounded = connection.dialect.name == "postgresql"
    statuses = (Status.PENDING, *_AFTER_FAILURE)
    counted = [_counted(view, status, bounded) for view in _used(connection) for status in statuses]
    pending, failed, first = dict[int, int](), dict[int, int](), dict[int, tuple[int, datetime]]()
    for route, status, count, lowest, written_at in connection.execute(union_all(*counted)) if counted else ():
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


def _used(connection: Connection, direction: Direction | None = None) -> list[View]:
    """The views of directions that have a route: without a consumer, there is no inbound one to query."""
    return [view for view in views(direction) if connection.execute(select(routes.c.id).where(view.has_route)).first()]


def _counted(view: View, status: Status, bounded: bool) -> Select[Any]:
    """Count per lane, so that every database uses its index and reads no sent rows. The same statement reads the age of
    the first row: it may be sent before another statement could.
    """
    unsent = view.unsent
    its_lanes = join(lanes, routes, and_(routes.c.id == lanes.c.route, view.has_route))
    found = unsent.c.status == literal_column(f"'{status}'")
    same_lane = and_(unsent.c.route == lanes.c.route, unsent.c.shard == lanes.c.shard)
    if bounded:
        some = select(unsent.c.id).where(same_lane, found).limit(COUNTED).correlate(lanes).lateral("some")
        counting = (
            select(lanes.c.route, lanes.c.shard).add_columns(*_amount(some)).select_from(its_lanes).join(some, true())
        )
    else:
        counting = select(lanes.c.route, lanes.c.shard).add_columns(*_amount(unsent)).select_from(its_lanes)
        counting = counting.join(unsent, and_(same_lane, found))
    counted = counting.group_by(lanes.c.route, lanes.c.shard).subquery()
    # Without lane and status, finding a row by its id would read all of them.
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


def unserved(connection: Connection) -> list[Unserved]:
    """Routes whose deliveries wait in lanes without an owner. Paused lanes are left out."""
    free = or_(lanes.c.locked_until.is_(None), lanes.c.locked_until <= from_now())
    what = (routes.c.name, routes.c.destination, routes.c.topic)
    found: list[Unserved] = []
    for view in _used(connection):
        unsent = view.unsent
        waiting = (
            select(*what, func.count(lanes.c.shard.distinct()), func.count())
            .select_from(unsent)
            .join(lanes, (lanes.c.route == unsent.c.route) & (lanes.c.shard == unsent.c.shard))
            .join(routes, routes.c.id == unsent.c.route)
            .where(unsent.c.status.in_(_WAITING), ~lanes.c.paused, free)
            .group_by(*what)
            .order_by(routes.c.name)
        )
        found += [Unserved(*row) for row in connection.execute(waiting)]
    return found


# -- lanes and relays --------------------------------------------------------------------------------------------------


def lane_states(
    connection: Connection,
    route: str | None = None,
    shard: int | None = None,
    *,
    direction: Direction | None = None,
) -> list[LaneState]:
    """All lanes, or those of one direction, of one route, or a single one."""
    wanted = [] if route is None else [lanes.c.route == stable_hash(route)]
    if shard is not None:
        wanted.append(lanes.c.shard == shard)
    now = database_time(connection)
    return [
        state
        for view in _used(connection, direction)
        for state in _states(connection, view, [view.has_route, *wanted], now)
    ]


def _states(
    connection: Connection, view: View, wanted: Collection[ColumnElement[bool]], now: datetime
) -> list[LaneState]:
    unsent = view.unsent
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
    # Without lane and status, finding a row by its id would read all of them.
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
    return [_lane_state(view.direction, row, now) for row in connection.execute(found)]


def _lane_state(direction: Direction, row: Row[Any], now: datetime) -> LaneState:
    return LaneState(
        direction=direction,
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
    """The live relays."""
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
    """The stored record of a route."""
    row = connection.execute(select(routes).where(routes.c.id == stable_hash(name))).one_or_none()
    return None if row is None else route_record(row._mapping)


def routes_to(connection: Connection, destinations: Collection[str]) -> list[RouteRecord]:
    """The stored routes to these destinations."""
    found = select(routes).where(routes.c.destination.in_(destinations)).order_by(routes.c.name)
    return [route_record(row._mapping) for row in connection.execute(found)]


def topics_of(connection: Connection, route: RouteRecord) -> list[str]:
    """The topics of all existing deliveries of a route: the values of its template so far."""
    rows = deliveries[route.table]
    found = select(rows.c.topic).where(rows.c.route == route.id).distinct()
    return sorted(connection.execute(found).scalars())


def tenant_states(connection: Connection) -> list[TenantState]:
    """Paused and rate-limited tenants."""
    held = or_(tenants.c.paused, tenants.c.rate.is_not(None))
    return [TenantState(*row) for row in connection.execute(select(tenants).where(held).order_by(tenants.c.tenant))]
