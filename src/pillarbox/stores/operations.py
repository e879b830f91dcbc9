"""Operators' actions: requests for deliveries, pauses, rates, lanes taken away; each with its audit entry.

Only the owner of a lane changes its deliveries. An operator's request is stored, and the owner carries it out with its
next announcement; a lane without an owner keeps the request. Every function here runs in the caller's transaction,
together with the audit entry that records who requested it and why.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, and_, exists, func, insert, select, update

from ..errors import StoreError
from ..outbox import Direction, Status, stable_hash
from .audit import Author, note, one_person_at_a_time
from .columns import from_now
from .inspection import (
    VIEWS,
    Details,
    Filter,
    Summary,
    View,
    conditions_for,
    of_events,
    open_requests,
    page,
    views,
)
from .overview import live_relays, route_named
from .tables import failures, lanes, requests, routes, tenants


class Action(StrEnum):
    """Actions on deliveries."""

    REDRIVE = "redrive"
    """Retry now, with all attempts again."""
    DISCARD = "discard"
    """Never send it."""
    EDIT = "edit"
    """Send another body in its place, as a new event."""


ELIGIBLE: Mapping[Action, tuple[Status, ...]] = {
    Action.REDRIVE: (Status.FAILED, Status.RETRYING, Status.SENDING),
    Action.DISCARD: (Status.FAILED, Status.RETRYING, Status.PARKED, Status.PENDING, Status.SENDING),
    Action.EDIT: (Status.FAILED, Status.RETRYING, Status.SENDING),
}
"""The states in which an action is possible. For a delivery in flight, the request waits for the answer of the
destination; without an answer, the lane withdraws the batch first.
"""


# -- requests about many deliveries ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """The deliveries that a request selects: those that match the filter, of these events if any are named."""

    action: Action
    wanted: Filter
    events: tuple[UUID, ...] = ()

    def __str__(self) -> str:
        named = f"events {', '.join(map(str, self.events))}" if self.events else ""
        return "; ".join(filter(None, (named, str(self.wanted)))) or "everything"


_AHEAD = 20_000
"""Number of deliveries that a run reads at once. A change of their state meanwhile does no harm: the lane's owner
carries out only requests that are still possible.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """Progress of a request for many deliveries."""

    audit: int | None = None
    requested: int = 0
    rows: Mapping[Direction, tuple[int, int]] = field(default_factory=dict)
    """The first and last row of each direction. The run continues behind the last ones."""
    ahead: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    """The next deliveries, read in advance: each read goes through all deliveries of the view."""


def count(connection: Connection, selection: Selection) -> tuple[int, int]:
    """Number of selected deliveries, and of those left out because they have the same request already."""
    found = {False: 0, True: 0}
    for view in views(selection.wanted.direction):
        # MySQL groups by columns only.
        before = _is_asked(selection.action, view).label("before")
        asked = select(before).where(*_conditions(connection, selection, view)).subquery()
        for was_asked, number in connection.execute(select(asked.c.before, func.count()).group_by(asked.c.before)):
            found[bool(was_asked)] += number
    return found[False], found[True]


def sample(connection: Connection, selection: Selection, limit: int) -> list[Summary]:
    """The first selected deliveries."""
    found: list[Summary] = []
    for view in views(selection.wanted.direction):
        conditions = [*_conditions(connection, selection, view), ~_is_asked(selection.action, view)]
        found += page(connection, view, conditions, after=0, limit=limit - len(found))
    return found


TOOK_EFFECT = "dealt with already"


def left_alone(connection: Connection, selection: Selection) -> dict[UUID, list[str]]:
    """Of the named events, those that exist, each with the states of its deliveries that are left out."""
    found: dict[UUID, list[str]] = {}
    for event in selection.events:
        for view in VIEWS.values():
            named, events = of_events(connection, [event], view), view.events
            if connection.execute(select(events.c.id).where(named).limit(1)).first() is not None:
                found.setdefault(event, [])
            if selection.wanted.direction not in (None, view.direction):
                continue
            matching = conditions_for(replace(selection.wanted, status=None), view)
            for status, waits in connection.execute(select(events.c.status, view.waits).where(named, *matching)):
                if status not in ELIGIBLE[selection.action] or selection.wanted.status not in (None, status):
                    found[event].append(status)
                elif not waits:
                    found[event].append(TOOK_EFFECT)
    return found


def request(connection: Connection, selection: Selection, author: Author, run: Run, limit: int) -> Run:
    """Store the next portion of requests, and count them in the run's single audit entry.

    Returns the run unchanged when nothing is left. A delivery that has the same open request gets no second one, also
    when two operators request it at the same time.
    """
    one_person_at_a_time(connection)
    portion, ahead = _portion(connection, selection, run, limit)
    if not portion:
        return run
    rows = dict(run.rows)
    for row in portion:
        rows[row.direction] = rows.get(row.direction, (row.id, row.id))[0], row.id
    run = replace(run, requested=run.requested + len(portion), rows=rows, ahead=ahead)
    details = {"count": run.requested, "filter": _given(selection.wanted), "rows": run.rows}
    event = selection.events[0] if len(selection.events) == 1 else None
    entry = note(connection, author, selection.action, str(selection), details=details, event_id=event, entry=run.audit)
    run = replace(run, audit=entry)
    made = [
        {
            "route": stable_hash(row.route),
            "shard": row.shard,
            "row_id": row.id,
            "action": selection.action,
            "audit": run.audit,
        }
        for row in portion
    ]
    connection.execute(insert(requests), made)
    return run


def _portion(connection: Connection, selection: Selection, run: Run, limit: int) -> tuple[list[Any], tuple[Any, ...]]:
    """The next deliveries without this request, and the rest of those that were read."""
    last, ahead = {direction: rows[1] for direction, rows in run.rows.items()}, run.ahead
    while ahead := ahead or _found(connection, selection, last, max(limit, _AHEAD)):
        portion, ahead = ahead[:limit], ahead[limit:]
        last |= {row.direction: row.id for row in portion}
        named = (requests.c.row_id.in_([row.id for row in portion]), requests.c.action == selection.action)
        asked = {*map(tuple, connection.execute(select(requests.c.route, requests.c.row_id).where(*named)))}
        if left := [row for row in portion if (stable_hash(row.route), row.id) not in asked]:
            return left, ahead
    return [], ()


def _found(connection: Connection, selection: Selection, last: Mapping[Direction, int], limit: int) -> tuple[Any, ...]:
    """The next selected deliveries, all of one direction."""
    for view in views(selection.wanted.direction):
        events = view.events
        found = (
            select(events.c.id, events.c.direction, events.c.route, events.c.shard)
            .where(events.c.id > last.get(view.direction, 0), *_conditions(connection, selection, view))
            .where(~_is_asked(selection.action, view))
            .order_by(events.c.id)
            .limit(limit)
        )
        if rows := tuple(connection.execute(found)):
            return rows
    return ()


def unserved_requests(connection: Connection, run: Run) -> list[str]:
    """Routes with requests of this run in lanes that no live relay serves, where they wait."""
    alive = live_relays(connection)
    found = (
        select(routes.c.name, requests.c.shard)
        .join(requests, requests.c.route == routes.c.id)
        .where(requests.c.audit == run.audit)
        .distinct()
    )
    lanes_asked = connection.execute(found).all()
    return sorted({name for name, shard in lanes_asked if not any(relay.serves(name, shard) for relay in alive)})


def _conditions(connection: Connection, selection: Selection, view: View) -> list[ColumnElement[bool]]:
    conditions = conditions_for(selection.wanted, view)
    conditions += [view.events.c.status.in_(ELIGIBLE[selection.action]), view.events.c.route.is_not(None), view.waits]
    if selection.events:
        conditions.append(of_events(connection, selection.events, view))
    return conditions


def _is_asked(action: Action, view: View) -> ColumnElement[bool]:
    this_way = requests.c.route.in_(select(routes.c.id).where(view.has_route))
    return exists().where(requests.c.row_id == view.events.c.id, requests.c.action == action, this_way)


def _given(wanted: Filter) -> dict[str, Any]:
    return {name: value for name, value in asdict(wanted).items() if value is not None}


# -- edits -------------------------------------------------------------------------------------------------------------


def edit(
    connection: Connection, delivery: Details, author: Author, *, old: bytes, new: bytes, event_id: UUID
) -> int | None:
    """Request another body under a new event id. Returns the number of the audit entry, which has the old body, or None
    if an edit of this delivery is already waiting. An inbound message keeps its event id.
    """
    one_person_at_a_time(connection)
    if any(request.action == Action.EDIT for request in open_requests(connection, delivery)):
        return None
    if delivery.direction is Direction.INBOUND:
        event_id = delivery.event_id
    details = {"route": delivery.route, "new_event_id": str(event_id), "old_body": base64.b64encode(old).decode()}
    target = f"event {delivery.event_id}; route {delivery.route}"
    entry = note(connection, author, Action.EDIT, target, details=details, event_id=delivery.event_id)
    connection.execute(
        insert(requests).values(
            route=stable_hash(delivery.route or ""),
            shard=delivery.shard,
            row_id=delivery.id,
            action=Action.EDIT,
            event_id=event_id,
            body=new,
            audit=entry,
        )
    )
    return entry


# -- lanes and tenants -------------------------------------------------------------------------------------------------


def retry_now(connection: Connection, route: int) -> None:
    """Make all deliveries of this route that wait for a retry due now."""
    waits = failures.c.route == route, failures.c.status == Status.RETRYING, failures.c.available_at > from_now()
    connection.execute(update(failures).where(*waits).values(available_at=from_now()))


@dataclass(frozen=True, slots=True)
class Lanes:
    """All lanes of a route, or one of them."""

    route: str
    shard: int | None = None

    def __str__(self) -> str:
        return f"route {self.route}" if self.shard is None else f"lane {self.route}/{self.shard}"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, in all lanes."""

    tenant: str

    def __str__(self) -> str:
        return f"tenant {self.tenant}"


class Handle(StrEnum):
    """Changes of lanes and tenants."""

    PAUSE = "pause"
    RESUME = "resume"
    RATE = "rate"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of lanes or of a tenant."""

    handle: Handle
    target: Lanes | Tenant
    rate: float | None = None
    """Messages per second, per lane; None removes the limit."""


def find_lanes(connection: Connection, name: str) -> Lanes:
    """Parse ``ROUTE`` or ``ROUTE/SHARD``; route names may contain slashes. Raises `StoreError` if it does not exist."""
    if route_named(connection, name):
        return Lanes(name)
    route, _, shard = name.rpartition("/")
    if route_named(connection, route) is None or not shard.isdecimal():
        raise StoreError(f"there is no route or lane {name!r}: see `pillarbox lanes list`")
    named = Lanes(route, int(shard))
    if connection.execute(select(lanes.c.shard).where(_in(named))).first() is None:
        raise StoreError(f"route {route!r} has no lane {shard}")
    return named


def affected(connection: Connection, change: Change) -> int:
    """Number of lanes or tenants that the change would affect."""
    if isinstance(change.target, Tenant):
        row = connection.execute(select(tenants).where(tenants.c.tenant == change.target.tenant)).one_or_none()
        before = {"paused": False, "rate": None} if row is None else row._mapping
        return int(any(before[name] != value for name, value in _values(change).items()))
    return connection.execute(
        select(func.count()).select_from(lanes).where(*_touched(change, change.target))
    ).scalar_one()


def apply(connection: Connection, change: Change, author: Author) -> tuple[int, int | None]:
    """Apply the change. Returns the number of changed lanes or tenants, and the number of the audit entry. Without a
    change there is no entry.
    """
    if change.rate is not None and not (math.isfinite(change.rate) and change.rate > 0):
        raise StoreError(f"a rate is a number above 0, got {change.rate}")
    one_person_at_a_time(connection)
    changed = affected(connection, change)
    if not changed:
        return 0, None
    if isinstance(change.target, Tenant):
        this = tenants.c.tenant == change.target.tenant
        if connection.execute(select(tenants.c.tenant).where(this)).first() is None:
            connection.execute(insert(tenants).values(tenant=change.target.tenant))
        connection.execute(update(tenants).where(this).values(_values(change)))
    else:
        values = _values(change)
        changed = connection.execute(update(lanes).where(*_touched(change, change.target)).values(values)).rowcount
    details = {"count": changed} | ({"rate": change.rate} if change.handle is Handle.RATE else {})
    return changed, note(connection, author, change.handle, str(change.target), details=details)


def _in(target: Lanes) -> ColumnElement[bool]:
    route = lanes.c.route == stable_hash(target.route)
    return route if target.shard is None else and_(route, lanes.c.shard == target.shard)


def _touched(change: Change, target: Lanes) -> tuple[ColumnElement[bool], ...]:
    differs = {
        Handle.PAUSE: ~lanes.c.paused,
        Handle.RESUME: lanes.c.paused,
        Handle.RATE: lanes.c.rate.is_distinct_from(change.rate),
        Handle.RELEASE: lanes.c.locked_by.is_not(None),
    }
    return _in(target), differs[change.handle]


def _values(change: Change) -> dict[str, Any]:
    if change.handle is Handle.RELEASE:
        # The next write of the owner finds another epoch, and the owner stops. Without a token, no write can pass.
        values = dict.fromkeys(("token", "locked_by", "locked_until", "trouble", "trouble_until"))
        return {"epoch": lanes.c.epoch + 1, **values}
    if change.handle is Handle.RATE:
        return {"rate": change.rate}
    return {"paused": change.handle is Handle.PAUSE}
