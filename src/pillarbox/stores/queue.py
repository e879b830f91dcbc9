"""The outbox as a queue: a status per row, for PostgreSQL, MariaDB/MySQL and SQLite.

A relay owns the lane, not the rows, so nothing is locked while it sends and order within a key is never lost. What a
row is waiting for is in the row itself: a transaction that commits late, with a low id, is simply found by the next
poll.

One rule keeps keys in order: among the waiting rows of a key, the first one decides. It is RETRYING with a time, or
FAILED and needs a person; the rows behind it are PARKED. When the first one is gone, the next becomes RETRYING and is
due at once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from uuid import uuid4

import msgspec
from msgspec.structs import replace
from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    case,
    func,
    literal_column,
    or_,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncEngine

from ..errors import BatchMismatchError, LeaseLostError, StoreError
from ..outbox import (
    Announcement,
    Batch,
    Failure,
    FailurePolicy,
    Key,
    Lane,
    Page,
    Row,
    Status,
    digest,
)
from .append import Appender, route_record
from .columns import from_now
from .tables import lanes, outbox, routes

_OPEN = (Status.PENDING, Status.SENDING, Status.RETRYING, Status.PARKED)

_ROW = (
    outbox.c.id,
    outbox.c.event_id,
    outbox.c.topic,
    outbox.c.key,
    outbox.c.tenant,
    outbox.c.headers,
    outbox.c.body,
    outbox.c.attempts,
)


class QueueStore(Appender):
    """`OutboxStore` and `Appends` on a relational database."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__()
        # Repeatable reads would show a relay the world as it was at its first statement.
        level = (
            {"isolation_level": "READ COMMITTED"} if engine.dialect.name in ("mysql", "mariadb", "postgresql") else {}
        )
        self._engine = engine.execution_options(**level)

    # -- the relay's side ----------------------------------------------------------------------------------------------

    async def take(self, relay: str, *, lease: float, limit: int, destinations: Collection[str]) -> list[Lane]:
        async with self._engine.begin() as connection:
            return await connection.run_sync(_take, relay, lease, limit, sorted(destinations))

    async def poll(self, lane: Lane, *, limit: int, cursor: Any = None, paused: Collection[str] = ()) -> Page:  # noqa: ARG002  the status is the cursor
        async with self._engine.connect() as connection:
            return await connection.run_sync(_poll, lane, limit, sorted(paused))

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        if (lane.announced is not None) != settle:
            raise StoreError(
                "a batch is announced over an unsettled one"
                if lane.announced
                else "there is no announced batch to settle"
            )
        async with self._engine.begin() as connection:
            return await connection.run_sync(_announce, lane, batch)

    async def amend(self, lane: Lane, failures: Sequence[Failure], *, parked: Sequence[int] = ()) -> Lane:
        async with self._engine.begin() as connection:
            return await connection.run_sync(_amend, lane, failures, parked)

    async def settle(self, lane: Lane) -> Lane:
        if lane.announced is None:
            raise StoreError("there is no announced batch to settle")
        async with self._engine.begin() as connection:
            return await connection.run_sync(_settle, lane)

    async def rebuild(self, lane: Lane) -> list[tuple[int, Row]]:
        async with self._engine.connect() as connection:
            return await connection.run_sync(_rebuild, lane)


# -- leases ------------------------------------------------------------------------------------------------------------


def _take(connection: Connection, relay: str, lease: float, limit: int, destinations: list[str]) -> list[Lane]:
    free = or_(lanes.c.locked_until.is_(None), lanes.c.locked_until < from_now())
    found = connection.execute(
        select(lanes.c.route, lanes.c.shard)
        .where(
            lanes.c.route.in_(select(routes.c.id).where(routes.c.destination.in_(destinations))), ~lanes.c.paused, free
        )
        .order_by(lanes.c.route, lanes.c.shard)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    if not found:
        return []
    token = uuid4()
    mine = tuple_(lanes.c.route, lanes.c.shard).in_([(row.route, row.shard) for row in found])
    # A clean release leaves no owner behind: only an owner that was lost counts against its batch.
    lost = and_(lanes.c.announced.is_not(None), lanes.c.locked_by.is_not(None))
    connection.execute(
        update(lanes)
        .where(mine)
        .ordered_values(  # MySQL assigns from left to right: tries must still see who was here
            (lanes.c.tries, lanes.c.tries + case((lost, 1), else_=0)),
            (lanes.c.epoch, lanes.c.epoch + 1),
            (lanes.c.token, token),
            (lanes.c.locked_by, relay),
            (lanes.c.locked_until, from_now(lease)),
        )
    )
    taken = connection.execute(
        select(lanes, routes)
        .join(routes, routes.c.id == lanes.c.route)
        .where(mine)
        .order_by(lanes.c.route, lanes.c.shard)
    )
    return [_lane(connection, row._mapping) for row in taken.all()]


def _lane(connection: Connection, row: Mapping[Any, Any]) -> Lane:
    lane = Lane(
        route=route_record(row),
        shard=row[lanes.c.shard],
        epoch=row[lanes.c.epoch],
        token=row[lanes.c.token],
        batch=row[lanes.c.batch],
        next_number=row[lanes.c.next_number],
        announced=_announcement(row[lanes.c.announced]),
        tries=row[lanes.c.tries],
        waiting=frozenset(),
    )
    return replace(lane, waiting=_waiting_keys(connection, lane))


def _fenced(connection: Connection, lane: Lane, **values: Any) -> None:
    """The first write of every step: nothing else happens if the lane is not ours any more."""
    changed = connection.execute(
        update(lanes)
        .where(
            lanes.c.route == lane.route.id,
            lanes.c.shard == lane.shard,
            lanes.c.epoch == lane.epoch,
            lanes.c.token == lane.token,
            lanes.c.batch == lane.batch,
        )
        .values(**values)
    )
    if changed.rowcount != 1:
        raise LeaseLostError(
            f"lane {lane.route.name}/{lane.shard} has another owner than epoch {lane.epoch}, batch {lane.batch}"
        )


# -- one turn of a lane ------------------------------------------------------------------------------------------------


def _poll(connection: Connection, lane: Lane, limit: int, paused: list[str]) -> Page:
    allowed = _of(lane)
    if paused:
        allowed = and_(allowed, or_(outbox.c.tenant.is_(None), outbox.c.tenant.not_in(paused)))
    fresh = connection.execute(select(*_ROW).where(allowed, _is(Status.PENDING)).order_by(outbox.c.id).limit(limit))
    return Page(redo=_redo(connection, lane, allowed, limit), fresh=tuple(_row(row) for row in fresh))


def _redo(connection: Connection, lane: Lane, allowed: ColumnElement[bool], limit: int) -> tuple[Row, ...]:
    due = and_(_is(Status.RETRYING), outbox.c.available_at <= from_now())
    keys = {
        Key(row.tenant, row.key)
        for row in connection.execute(select(outbox.c.tenant, outbox.c.key).where(allowed, due).limit(limit))
    }
    if not keys:
        return ()
    rows = connection.execute(
        select(*_ROW, due.label("due"), outbox.c.status)
        .where(allowed, or_(*map(_has_key, keys)), _is_waiting(lane))
        .order_by(outbox.c.id)
        .limit(limit)
    )
    found: list[Row] = []
    stopped: set[Key] = set()
    for row in rows:
        key = Key(row.tenant, row.key)
        if key in stopped:
            continue
        if row.due or row.status == Status.PARKED:
            found.append(_row(row))
        else:
            stopped.add(key)
    return tuple(found)


def _announce(connection: Connection, lane: Lane, batch: Batch) -> Lane:
    numbers = list(range(lane.next_number, lane.next_number + len(batch.items)))
    announced = None
    if batch.items:
        fingerprint = digest(zip(numbers, batch.items, strict=True))
        announced = Announcement(lane.next_number, len(batch.items), fingerprint, batch.details)
    following = replace(
        lane, batch=lane.batch + 1, next_number=lane.next_number + len(batch.items), announced=announced, tries=0
    )
    _fenced(
        connection,
        lane,
        batch=following.batch,
        next_number=following.next_number,
        announced=_stored(announced),
        tries=0,
    )
    if lane.announced is not None:
        _mark_sent(connection, lane)
    _fail(connection, lane, batch.failures)
    _park(connection, lane, batch.parked)
    if batch.items:
        _mark_sending(connection, following, batch.items, numbers)
    return _after(connection, following, touched=bool(batch.failures or batch.parked))


def _amend(connection: Connection, lane: Lane, failures: Sequence[Failure], parked: Sequence[int]) -> Lane:
    if lane.announced is None:
        raise StoreError("there is no announced batch to amend")
    _fenced(connection, lane, tries=lane.tries)
    _fail(connection, lane, failures)
    _park(connection, lane, parked)
    left = [(row.number, row.id) for row in connection.execute(_items(lane, outbox.c.number, outbox.c.id))]
    announced = replace(lane.announced, count=len(left), digest=digest(left))
    _fenced(connection, lane, announced=_stored(announced))
    return _after(connection, replace(lane, announced=announced), touched=True)


def _settle(connection: Connection, lane: Lane) -> Lane:
    _fenced(connection, lane, announced=None, tries=0)
    _mark_sent(connection, lane)
    return _after(connection, replace(lane, announced=None, tries=0), touched=False)


def _rebuild(connection: Connection, lane: Lane) -> list[tuple[int, Row]]:
    if lane.announced is None:
        return []
    found = [(row.number, _row(row)) for row in connection.execute(_items(lane, outbox.c.number, *_ROW))]
    if len(found) != lane.announced.count or digest((number, row.id) for number, row in found) != lane.announced.digest:
        raise BatchMismatchError(
            f"batch {lane.batch} of lane {lane.route.name}/{lane.shard} had {lane.announced.count} rows "
            f"when it was announced and has {len(found)} now, or others: somebody changed them by hand"
        )
    return found


def _after(connection: Connection, lane: Lane, *, touched: bool) -> Lane:
    """What is true of the lane once its rows have changed: who is first among the waiting, and which keys wait."""
    if not (touched or lane.waiting):
        return lane
    first = select(func.min(outbox.c.id)).where(_of(lane), _is_waiting(lane)).group_by(outbox.c.tenant, outbox.c.key)
    promoted = connection.scalars(
        select(outbox.c.id).where(_of(lane), _is(Status.PARKED), outbox.c.id.in_(first))
    ).all()
    if promoted:
        connection.execute(
            update(outbox)
            .where(_of(lane), _is(Status.PARKED), outbox.c.id.in_(promoted))
            .values(status=Status.RETRYING, available_at=from_now())
        )
    return replace(lane, waiting=_waiting_keys(connection, lane))


def _fail(connection: Connection, lane: Lane, failures: Sequence[Failure]) -> None:
    for failure in failures:
        dead = failure.retry_after is None
        _expect(
            connection.execute(
                update(outbox)
                .where(_of(lane), _is(*_OPEN), outbox.c.id == failure.row)
                .values(
                    status=Status.FAILED if dead else Status.RETRYING,
                    attempts=failure.attempts,
                    available_at=None if dead else from_now(failure.retry_after or 0.0),
                    last_error=func.coalesce(failure.error, outbox.c.last_error),
                    batch=None,
                    number=None,
                )
            ).rowcount,
            1,
        )


def _park(connection: Connection, lane: Lane, rows: Sequence[int]) -> None:
    if rows:
        changed = connection.execute(
            update(outbox)
            .where(_of(lane), _is(*_OPEN), outbox.c.id.in_(rows))
            .values(status=Status.PARKED, available_at=None, batch=None, number=None)
        )
        _expect(changed.rowcount, len(rows))


def _mark_sending(connection: Connection, lane: Lane, items: Sequence[int], numbers: Sequence[int]) -> None:
    parameters: dict[str, Any] = {"route": lane.route.id, "shard": lane.shard, "batch": lane.batch}
    if connection.dialect.name == "postgresql":
        changed = connection.execute(_SENDING_POSTGRES, {**parameters, "ids": list(items), "numbers": list(numbers)})
    else:
        pairs = json.dumps([{"id": row, "number": number} for row, number in zip(items, numbers, strict=True)])
        statement = _SENDING_SQLITE if connection.dialect.name == "sqlite" else _SENDING_MYSQL
        changed = connection.execute(statement, {**parameters, "pairs": pairs})
    _expect(changed.rowcount, len(items))


def _mark_sent(connection: Connection, lane: Lane) -> None:
    connection.execute(
        update(outbox)
        .where(_of(lane), _is(Status.SENDING), outbox.c.batch == lane.batch)
        .values(status=Status.SENT, sent_at=from_now(), available_at=None)
    )


# The number of an item is its place in the send order, so ids and numbers go in as pairs.
_SENDING_POSTGRES = text("""
    UPDATE pillarbox_outbox o SET status = 'SENDING', batch = :batch, number = t.number
    FROM unnest(CAST(:ids AS bigint[]), CAST(:numbers AS bigint[])) AS t(id, number)
    WHERE o.id = t.id AND o.route = :route AND o.shard = :shard AND o.status IN ('PENDING', 'RETRYING', 'PARKED')
""")
_SENDING_MYSQL = text("""
    UPDATE pillarbox_outbox o
    JOIN JSON_TABLE(:pairs, '$[*]' COLUMNS (id BIGINT PATH '$.id', number BIGINT PATH '$.number')) t ON o.id = t.id
    SET o.status = 'SENDING', o.batch = :batch, o.number = t.number
    WHERE o.route = :route AND o.shard = :shard AND o.status IN ('PENDING', 'RETRYING', 'PARKED')
""")
_SENDING_SQLITE = text("""
    UPDATE pillarbox_outbox SET status = 'SENDING', batch = :batch, number = json_extract(t.value, '$.number')
    FROM json_each(:pairs) AS t
    WHERE pillarbox_outbox.id = json_extract(t.value, '$.id')
      AND route = :route AND shard = :shard AND status IN ('PENDING', 'RETRYING', 'PARKED')
""")


# -- small parts -------------------------------------------------------------------------------------------------------


def _of(lane: Lane) -> ColumnElement[bool]:
    return and_(outbox.c.route == lane.route.id, outbox.c.shard == lane.shard)


def _is(*statuses: Status) -> ColumnElement[bool]:
    """The status as a constant: only then does the planner see that the lane's partial index holds all such rows."""
    return outbox.c.status.in_([literal_column(f"'{status}'") for status in statuses])


def _has_key(key: Key) -> ColumnElement[bool]:
    return and_(
        outbox.c.key == key.key, outbox.c.tenant.is_(None) if key.tenant is None else outbox.c.tenant == key.tenant
    )


def _is_waiting(lane: Lane) -> ColumnElement[bool]:
    """Rows that later rows of their key must not overtake."""
    blocking = [
        Status.RETRYING,
        Status.PARKED,
        *([Status.FAILED] if lane.route.on_failure is FailurePolicy.PARK else []),
    ]
    return _is(*blocking)


def _waiting_keys(connection: Connection, lane: Lane) -> frozenset[Key]:
    found = connection.execute(select(outbox.c.tenant, outbox.c.key).where(_of(lane), _is_waiting(lane)).distinct())
    return frozenset(Key(row.tenant, row.key) for row in found)


def _items(lane: Lane, *columns: Any) -> Any:
    return (
        select(*columns).where(_of(lane), _is(Status.SENDING), outbox.c.batch == lane.batch).order_by(outbox.c.number)
    )


def _expect(changed: int, wanted: int) -> None:
    if changed != wanted:
        raise StoreError(
            f"{wanted} rows of the batch should have changed and {changed} did: somebody changed them by hand"
        )


def _row(row: Any) -> Row:
    headers = row.headers if isinstance(row.headers, dict) else msgspec.json.decode(row.headers)
    return Row(row.id, row.event_id, row.topic, row.key, row.tenant, headers, bytes(row.body), row.attempts)


def _announcement(stored: str | None) -> Announcement | None:
    return None if stored is None else Announcement(**json.loads(stored))


def _stored(announced: Announcement | None) -> str | None:
    if announced is None:
        return None
    return json.dumps(
        {
            "first_number": announced.first_number,
            "count": announced.count,
            "digest": announced.digest,
            "details": dict(announced.details),
        }
    )
