"""The outbox as a queue: a status per row, for MariaDB/MySQL and SQLite.

A relay owns the lane, not the rows, so nothing is locked while it sends and order within a key is never lost. What a
row is waiting for is in the row itself: a transaction that commits late, with a low id, is simply found by the next
poll.

One rule keeps keys in order: among the waiting rows of a key, the first one decides. It is RETRYING with a time, or
FAILED and needs a person; the rows behind it are PARKED. When the first one is gone, the next becomes RETRYING and is
due at once. Only the keys of rows that an announcement touches can have a new first one, so only these are looked at.

The statements of every turn are in `stores.turn`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import replace
from sqlalchemy import ColumnElement, Connection, and_, case, delete, func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from ..errors import StoreError
from ..outbox import Announcement, Batch, Failure, FailurePolicy, Key, Lane, LaneName, Page, Row, Status, digest
from . import turn
from .announced import refuse_detours
from .append import Appender
from .columns import from_now
from .leases import Leases, among, confirm, fenced, is_, stored, with_keys
from .tables import outbox, requests

_OPEN = (Status.PENDING, Status.RETRYING, Status.PARKED)
_KEYS_AT_ONCE = 10_000
"""A statement has no room for any number of ids."""
_KEYS_WITH_FOLLOWERS = 8
"""How many keys of a page bring the rows behind their first one: each costs a statement."""


class QueueStore(Appender, Leases):
    """`LaneStore`, `OutboxStore` and `Appends` on a relational database."""

    def __init__(self, engine: AsyncEngine) -> None:
        Appender.__init__(self)
        Leases.__init__(self, engine)

    def free_parked(self, connection: Connection, lane: Lane) -> None:
        confirm(connection, lane)
        parked = select(func.min(outbox.c.id)).where(_of(lane), is_(Status.PARKED))
        firsts = connection.scalars(parked.group_by(outbox.c.tenant, outbox.c.key)).all()
        for start in range(0, len(firsts), _KEYS_AT_ONCE):
            _after(connection, lane, firsts[start : start + _KEYS_AT_ONCE])

    def with_waiting_keys(self, connection: Connection, taken: list[Lane]) -> list[Lane]:
        skipping = [lane.route.id for lane in taken if lane.route.on_failure is FailurePolicy.SKIP]
        found = connection.execute(
            select(outbox.c.route, outbox.c.shard, outbox.c.tenant, outbox.c.key)
            .where(
                among(outbox, [lane.name for lane in taken]),
                is_(Status.RETRYING, Status.PARKED, Status.FAILED),
                ~and_(is_(Status.FAILED), outbox.c.route.in_(skipping)),
            )
            .distinct()
        )
        return with_keys(taken, found)

    async def ready(self, routes: Collection[int], *, relay: str | None = None) -> frozenset[LaneName]:
        return await self.each_alone(_ready, sorted(routes), relay)

    async def poll(
        self,
        lane: Lane,
        *,
        limit: int,
        max_bytes: int = 4_194_304,
        paused: Collection[str] = (),
        detour: str | None = None,
    ) -> Page:
        refuse_detours(detour)
        return await self.each_alone(_poll, lane, limit, max_bytes, sorted(paused))

    async def part(self, lane: Lane, tenants: Collection[str]) -> Lane:
        refuse_detours(*tenants)
        return lane

    async def join(self, lane: Lane, tenants: Collection[str]) -> Lane:
        refuse_detours(*tenants)
        return lane

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        lane.check_announced(wanted=settle)
        following = _following(lane, batch)
        return await self.all_or_nothing(_announce, lane, following, batch)

    async def amend(
        self,
        lane: Lane,
        failures: Sequence[Failure],
        *,
        parked: Sequence[int] = (),
        attempts: Mapping[int, int] | None = None,
    ) -> Lane:
        if lane.announced is None and (failures or parked or attempts):
            raise StoreError("there is no announced batch to amend")
        return await self.all_or_nothing(_amend, lane, failures, parked, attempts or {})

    async def settle(self, lane: Lane) -> Lane:
        lane.check_announced()
        settled = replace(lane, announced=None, tries=0)
        return await self.all_or_nothing(_settle, lane, settled)

    async def rebuild(self, lane: Lane) -> list[tuple[int, Row]]:
        return await self.each_alone(_rebuild, lane)


# -- reading -----------------------------------------------------------------------------------------------------------


def _ready(connection: Connection, routes: list[int], relay: str | None) -> frozenset[LaneName]:
    statement = turn.READY if relay is None else turn.READY_HERE
    return frozenset(LaneName(*row) for row in connection.execute(statement, {"routes": routes, "relay": relay}))


def _poll(connection: Connection, lane: Lane, limit: int, max_bytes: int, paused: list[str]) -> Page:
    sending = _sending(lane)
    reads = turn.reads(sending=bool(sending), paused=bool(paused))
    parameters = {**_place(lane), "limit": limit, "max_bytes": max_bytes, "paused": paused, "sending": sending}
    found = _fetched(connection, reads.fresh, parameters)
    fresh = [_row(values) for values in found if not values[8]]
    asked = [values[0] for values in found if values[8]] if len(fresh) < len(found) else ()
    redo = _redo(connection, reads, parameters) if lane.waiting else ()
    return Page(redo=_by_id(redo), fresh=_by_id(fresh), requests=tuple(sorted(asked)))


def _redo(connection: Connection, reads: turn.Reads, parameters: dict[str, Any]) -> list[Row]:
    """The rows that are due and first of their keys, filled up with those behind them."""
    found = [_row(values) for values in connection.execute(reads.heads, parameters).all()]
    room, left = parameters["limit"] - len(found), parameters["max_bytes"] - sum(len(row.body) for row in found)
    for head in sorted(found, key=attrgetter("id"))[:_KEYS_WITH_FOLLOWERS]:
        if room <= 0 or left <= 0:
            break
        behind = {"tenant": head.tenant, "key": head.key, "after": head.id, "limit": room, "max_bytes": left}
        rows = connection.execute(reads.followers, {**parameters, **behind}).all()
        for values in sorted(rows, key=itemgetter(0)):
            *_, status, due = values
            if not (due or status == Status.PARKED):
                break
            row = _row(values)
            found.append(row)
            room, left = room - 1, left - len(row.body)
    return found


def _rebuild(connection: Connection, lane: Lane) -> list[tuple[int, Row]]:
    if lane.announced is None:
        return []
    pairs = _pairs(lane)
    rows = connection.execute(turn.ITEMS, {**_place(lane), "ids": [row for row, _ in pairs]}).all()
    numbers = dict(pairs)
    found = sorted(((numbers[values[0]], _row(values)) for values in rows), key=itemgetter(0))
    lane.check_batch(found)
    return found


# -- writing -----------------------------------------------------------------------------------------------------------


def _following(lane: Lane, batch: Batch) -> Lane:
    """The lane once the batch is announced."""
    first, items = lane.next_number, tuple(batch.items)
    announced = None
    if items:
        announced = Announcement(first, len(items), digest(enumerate(items, start=first)), items, batch.details)
    return replace(lane, batch=lane.batch + 1, next_number=first + len(items), announced=announced, tries=0)


def _announce(connection: Connection, lane: Lane, following: Lane, batch: Batch) -> Lane:
    values = stored(following.announced)
    fenced(connection, lane, batch=following.batch, next_number=following.next_number, tries=0, **values)
    redone = _redone(connection, lane)
    failed = _fail(connection, lane, batch.failures)
    parked = _park(connection, lane, batch.parked)
    asked = _carry_out(connection, lane, batch.requests, {*_sending(lane), *_sending(following)})
    following = _after(connection, following, [*failed, *parked, *asked], gone=redone)
    _mark_sent(connection, lane)
    return following


def _amend(
    connection: Connection,
    lane: Lane,
    failures: Sequence[Failure],
    parked: Sequence[int],
    attempts: Mapping[int, int],
) -> Lane:
    confirm(connection, lane)
    for row, count in attempts.items():
        _count_attempts(connection, lane, row, count)
    touched = [*_fail(connection, lane, failures), *_park(connection, lane, parked)]
    if lane.announced is None or not touched:
        return lane
    taken_out = {*touched}
    items = tuple(0 if row in taken_out else row for row in lane.announced.items)
    left = [(number, row) for number, row in enumerate(items, start=lane.announced.first_number) if row]
    announced = replace(lane.announced, count=len(left), digest=digest(left), items=items)
    fenced(connection, lane, **stored(announced))
    return _after(connection, replace(lane, announced=announced), touched)


def _settle(connection: Connection, lane: Lane, settled: Lane) -> Lane:
    fenced(connection, lane, tries=0, **stored(None))
    redone = _redone(connection, lane)
    settled = _after(connection, settled, [], gone=redone)
    _mark_sent(connection, lane)
    return settled


def _after(connection: Connection, lane: Lane, touched: Sequence[int], *, gone: Sequence[Any] = ()) -> Lane:
    """What is true of the lane once these rows have changed and those that are gone are sent: who is first of their
    keys, and which keys wait.
    """
    keys_gone = {(tenant, key): row for row, tenant, key in gone}  # one row of each is enough
    ids = [*touched, *keys_gone.values()]
    if not ids:
        return lane
    waiting = set(lane.waiting)
    promoted: list[int] = []
    firsts = turn.firsts(connection.dialect.name, gone=bool(gone))
    parameters = {**_place(lane), "ids": ids, "gone": [row for row, *_ in gone]}
    for tenant, key, first, is_parked in connection.execute(firsts, parameters):
        if first is None:
            waiting.discard(Key(tenant, key))
            continue
        waiting.add(Key(tenant, key))
        if is_parked:
            promoted.append(first)
    if promoted:
        _change(connection, lane, promoted, (Status.PARKED,), status=Status.RETRYING, available_at=from_now())
    return replace(lane, waiting=frozenset(waiting))


def _redone(connection: Connection, lane: Lane) -> Sequence[Any]:
    """The rows of the batch that waited before they were sent. While any are on their way, their keys wait."""
    if not lane.waiting or not (sending := _sending(lane)):
        return ()
    return connection.execute(turn.WAITED, {**_place(lane), "ids": sending}).all()


def _change(connection: Connection, lane: Lane, rows: Sequence[int], statuses: Iterable[Status], **values: Any) -> int:
    """Change those of the rows that have one of these statuses; how many they were.

    Status by status, as an index has them. One that the rows get must be the first, or they would be counted twice.
    """
    changed = 0
    named = and_(outbox.c.id.between(min(rows), max(rows)), outbox.c.id.in_(rows))
    for status in statuses:
        if changed < len(rows):
            having = and_(_of(lane), is_(status), named)
            changed += connection.execute(turn.BY_ID.where(having).values(values)).rowcount
    return changed


def _fail(connection: Connection, lane: Lane, failures: Sequence[Failure]) -> list[int]:
    for failure in failures:
        dead = failure.retry_after is None
        changed = _change(
            connection,
            lane,
            [failure.row],
            (*_OPEN, Status.FAILED),
            status=Status.FAILED if dead else Status.RETRYING,
            attempts=failure.attempts if failure.error else _no_more_than(failure.attempts),
            available_at=None if dead else from_now(failure.retry_after or 0.0),
            last_error=func.coalesce(failure.error, outbox.c.last_error),
        )
        if failure.error:  # else it may have been dealt with meanwhile
            _expect(changed, 1)
    return [failure.row for failure in failures]


def _no_more_than(attempts: int) -> ColumnElement[int]:
    """Without an error it is no attempt: then a person may have set them back meanwhile."""
    return case((outbox.c.attempts < attempts, outbox.c.attempts), else_=attempts)


def _count_attempts(connection: Connection, lane: Lane, row: int, attempts: int) -> None:
    if lane.announced is None or row not in lane.announced.items:
        raise StoreError(f"row {row} is not in the announced batch of lane {lane}")
    _expect(_change(connection, lane, [row], _OPEN, attempts=attempts), 1)


def _park(connection: Connection, lane: Lane, rows: Sequence[int]) -> Sequence[int]:
    if rows:
        statuses = (Status.PARKED, Status.PENDING, Status.RETRYING)
        _expect(_change(connection, lane, rows, statuses, status=Status.PARKED, available_at=None), len(rows))
    return rows


def _mark_sent(connection: Connection, lane: Lane) -> None:
    pairs = _pairs(lane)
    if not pairs:
        return
    parameters = {**_place(lane), "pairs": msgspec.json.encode(pairs).decode()}
    connection.execute(turn.SENT[connection.dialect.name], parameters)


def _sending(lane: Lane) -> list[int]:
    """The rows that are on their way."""
    return [] if lane.announced is None else [row for row in lane.announced.items if row]


def _pairs(lane: Lane) -> list[tuple[int, int]]:
    """Row ids and numbers of the announced batch, by row id."""
    if lane.announced is None:
        return []
    return sorted((row, number) for number, row in enumerate(lane.announced.items, lane.announced.first_number) if row)


# -- what people ask for -----------------------------------------------------------------------------------------------


def _carry_out(connection: Connection, lane: Lane, ids: Sequence[int], sending: Collection[int]) -> list[int]:
    """Do what was asked, in that order; the rows that it is about come back. A row that is being sent keeps its
    request.
    """
    if not ids:
        return []
    wanted = select(requests).where(turn.ASKED, requests.c.id.in_(ids)).order_by(requests.c.id)
    asked = [request for request in connection.execute(wanted, _place(lane)) if request.row_id not in sending]
    for action, run in groupby(asked, key=attrgetter("action")):
        if action == "edit":
            for request in run:
                _edit(connection, lane, request)
        elif action in _ACTIONS:
            statuses, values = _ACTIONS[action]
            _change(connection, lane, sorted({request.row_id for request in run}), statuses, **values)
    if asked:
        connection.execute(delete(requests).where(requests.c.id.in_([request.id for request in asked])))
    return [request.row_id for request in asked]


_DUE_NOW = {"status": Status.RETRYING, "available_at": from_now(), "attempts": 0}
_ACTIONS: dict[str, tuple[tuple[Status, ...], dict[str, Any]]] = {
    "redrive": ((Status.RETRYING, Status.FAILED), _DUE_NOW),
    "discard": (
        (Status.PENDING, Status.RETRYING, Status.PARKED, Status.FAILED),
        {"status": Status.DISCARDED, "available_at": None},
    ),
}


def _edit(connection: Connection, lane: Lane, request: Any) -> None:
    here = and_(_of(lane), is_(Status.FAILED, Status.RETRYING), outbox.c.id == request.row_id)
    row = connection.execute(
        select(outbox.c.event_id, outbox.c.schema_version, outbox.c.headers, outbox.c.body).where(here)
    ).first()
    if row is None or request.event_id is None or request.body is None:
        return
    if _is_taken(connection, lane, request.event_id, row.schema_version):
        return
    headers = _HEADERS.decode(row.headers)
    headers |= {"event_id": str(request.event_id), "original_event_id": str(row.event_id)}
    connection.execute(
        turn.BY_ID.where(here).values(
            event_id=request.event_id, body=request.body, headers=msgspec.json.encode(headers).decode(), **_DUE_NOW
        )
    )


def _is_taken(connection: Connection, lane: Lane, event_id: UUID, schema_version: int) -> bool:
    """Whether the route has that event already, this very edit perhaps: asked twice, it is done once."""
    same = and_(
        outbox.c.event_id == event_id, outbox.c.route == lane.route.id, outbox.c.schema_version == schema_version
    )
    return connection.execute(select(outbox.c.id).where(same)).first() is not None


# -- small parts -------------------------------------------------------------------------------------------------------

_HEADERS = msgspec.json.Decoder(dict[str, str])


def _place(lane: Lane) -> dict[str, Any]:
    """The lane and its batch, for statements that are built once."""
    return {
        "lane_route": lane.route.id,
        "lane_shard": lane.shard,
        "lane_batch": lane.batch,
        "parks": int(lane.route.on_failure is FailurePolicy.PARK),
    }


def _of(lane: Lane) -> ColumnElement[bool]:
    return and_(outbox.c.route == lane.route.id, outbox.c.shard == lane.shard, turn.UNSENT)


def _by_id(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=attrgetter("id")))


def _expect(changed: int, wanted: int) -> None:
    if changed != wanted:
        raise StoreError(
            f"{wanted} rows of the batch should have changed and {changed} did: somebody changed them by hand"
        )


def _fetched(connection: Connection, statement: Any, parameters: dict[str, Any]) -> Sequence[Any]:
    """The rows as the driver has them: nothing in them is to be converted, and a wrapper around each would cost more
    than the rest.
    """
    result = connection.execute(statement, parameters)
    rows: Sequence[Any] = result.cursor.fetchall() if result.cursor is not None else ()
    result.close()
    return rows


def _row(values: Sequence[Any]) -> Row:
    """A row from what the driver gives, whatever comes behind it."""
    row_id, event_id, topic, key, tenant, headers, body, attempts, *_ = values
    return Row(
        row_id,
        UUID(event_id),
        topic,
        key.decode() if isinstance(key, bytes) else key,
        tenant.decode() if isinstance(tenant, bytes) else tenant,
        _HEADERS.decode(headers),
        body,
        attempts,
    )
