"""What people do: requests about deliveries, pauses, rates, lanes that are taken away; each with its row in the trail.

Nobody but the owner of a lane changes its deliveries. People write down what they want, and the owner does it with its
next announcement; a lane without an owner keeps the request until it has one. Every function here runs in a transaction
of its caller, and what it writes stands or falls with the row in the trail that says who wanted it and why.
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
from .trail import Author, note, one_person_at_a_time


class Action(StrEnum):
    """What can be asked for a delivery."""

    REDRIVE = "redrive"
    """Try it again now, with all its attempts before it."""
    DISCARD = "discard"
    """Never send it."""
    EDIT = "edit"
    """Send another body in its place, as another event."""


ELIGIBLE: Mapping[Action, tuple[Status, ...]] = {
    Action.REDRIVE: (Status.FAILED, Status.RETRYING, Status.SENDING),
    Action.DISCARD: (Status.FAILED, Status.RETRYING, Status.PARKED, Status.PENDING, Status.SENDING),
    Action.EDIT: (Status.FAILED, Status.RETRYING, Status.SENDING),
}
"""The deliveries that an action is for. Of one that is being sent the request waits for the answer of the destination;
if there is none, its lane takes it back first.
"""


# -- requests about many deliveries ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """The deliveries that a person wants something for: those of these events, if any are named, that match."""

    action: Action
    wanted: Filter
    events: tuple[UUID, ...] = ()

    def __str__(self) -> str:
        named = f"events {', '.join(map(str, self.events))}" if self.events else ""
        return "; ".join(filter(None, (named, str(self.wanted)))) or "everything"


_AHEAD = 20_000
"""How many deliveries a run finds at once. What becomes of them before it is their turn does no harm: the owner of a
lane carries out only what can be done."""


@dataclass(frozen=True, slots=True)
class Run:
    """How far a request about many deliveries has come."""

    audit: int | None = None
    requested: int = 0
    rows: Mapping[Direction, tuple[int, int]] = field(default_factory=dict)
    """The first and the last row of each direction: it goes on behind the last ones."""
    ahead: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    """Deliveries that were found already and come next: to find a portion, the view goes through all deliveries."""


def count(connection: Connection, selection: Selection) -> tuple[int, int]:
    """How many deliveries are selected, and how many more are left out because the same was asked for them before."""
    found = {False: 0, True: 0}
    for view in views(selection.wanted.direction):
        # MySQL groups by nothing but columns.
        before = _is_asked(selection.action, view).label("before")
        asked = select(before).where(*_conditions(connection, selection, view)).subquery()
        for was_asked, number in connection.execute(select(asked.c.before, func.count()).group_by(asked.c.before)):
            found[bool(was_asked)] += number
    return found[False], found[True]


def sample(connection: Connection, selection: Selection, limit: int) -> list[Summary]:
    """The first deliveries that are selected."""
    found: list[Summary] = []
    for view in views(selection.wanted.direction):
        conditions = [*_conditions(connection, selection, view), ~_is_asked(selection.action, view)]
        found += page(connection, view, conditions, after=0, limit=limit - len(found))
    return found


TOOK_EFFECT = "dealt with already"


def left_alone(connection: Connection, selection: Selection) -> dict[UUID, list[str]]:
    """Of the named events: those that are there, each with the states in which its deliveries are left alone."""
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
    """Write down the next portion of requests, and count them in the one row of the trail that is about the run.

    The run comes back as it was when nothing is left. A delivery for which the same was asked before, and not yet
    done, gets no second request, also when two people ask at the same time.
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
    """The next deliveries for which this was not asked before, and those that were found behind them."""
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
    """The next deliveries that are selected, all of one direction."""
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
    """Routes with requests of this run in lanes that no live relay serves: there they wait."""
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


# -- another body ------------------------------------------------------------------------------------------------------


def edit(
    connection: Connection, delivery: Details, author: Author, *, old: bytes, new: bytes, event_id: UUID
) -> int | None:
    """Ask for another body under a new event id; the number of the row in the trail, which keeps the old body.

    None if an edit of this delivery is waiting already. What has come in stays the event that it is.
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
    """Let what waits for its next attempt in the lanes of this route wait no longer."""
    waits = failures.c.route == route, failures.c.status == Status.RETRYING, failures.c.available_at > from_now()
    connection.execute(update(failures).where(*waits).values(available_at=from_now()))


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of a route, or one of them."""

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
    """What can be done to lanes and tenants."""

    PAUSE = "pause"
    RESUME = "resume"
    RATE = "rate"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Change:
    """Something that a person does to lanes or to a tenant."""

    handle: Handle
    target: Lanes | Tenant
    rate: float | None = None
    """Messages per second, for each lane; None lifts the limit."""


def find_lanes(connection: Connection, name: str) -> Lanes:
    """``ROUTE`` or ``ROUTE/SHARD``; the names of routes may have slashes, too. `StoreError` if there is no such."""
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
    """How many lanes, or tenants, would not be any more as they are."""
    if isinstance(change.target, Tenant):
        row = connection.execute(select(tenants).where(tenants.c.tenant == change.target.tenant)).one_or_none()
        before = {"paused": False, "rate": None} if row is None else row._mapping
        return int(any(before[name] != value for name, value in _values(change).items()))
    return connection.execute(
        select(func.count()).select_from(lanes).where(*_touched(change, change.target))
    ).scalar_one()


def apply(connection: Connection, change: Change, author: Author) -> tuple[int, int | None]:
    """Do it; how many lanes or tenants have changed, and the number of the row in the trail. No change, no row."""
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
        # The next write of its owner finds another epoch, and stops. Without a token nobody else's can pass, either.
        values = dict.fromkeys(("token", "locked_by", "locked_until", "trouble", "trouble_until"))
        return {"epoch": lanes.c.epoch + 1, **values}
    if change.handle is Handle.RATE:
        return {"rate": change.rate}
    return {"paused": change.handle is Handle.PAUSE}
