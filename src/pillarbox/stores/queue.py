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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import msgspec
from msgspec.structs import replace
from sqlalchemy import (
    ColumnElement,
    Connection,
    Dialect,
    and_,
    bindparam,
    case,
    func,
    insert,
    literal_column,
    or_,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from ..errors import BatchMismatchError, DuplicateEventError, LeaseLostError, NotMigratedError, StoreError
from ..outbox import (
    Announcement,
    Batch,
    Delivery,
    Failure,
    FailurePolicy,
    Key,
    Lane,
    Page,
    RouteRecord,
    Row,
    Status,
    digest,
)
from ..retry import RetryPolicy
from .columns import from_now
from .statement import FixedStatement
from .tables import lanes, meta, outbox, routes

_COLUMNS = ("event_id", "event_type", "route", "shard", "schema_version", "topic", "key", "tenant", "headers", "body")
_ARRAYS = ("uuid", "text", "bigint", "integer", "integer", "text", "text", "text", "text", "bytea")
_ROWS_PER_STATEMENT = 100
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


class QueueStore:
    """`OutboxStore` and `Appends` on a relational database."""

    def __init__(self, engine: AsyncEngine) -> None:
        # Repeatable reads would show a relay the world as it was at its first statement.
        level = (
            {"isolation_level": "READ COMMITTED"} if engine.dialect.name in ("mysql", "mariadb", "postgresql") else {}
        )
        self._engine = engine.execution_options(**level)
        self._inserts: dict[tuple[int, int], FixedStatement] = {}

    # -- the write side ------------------------------------------------------------------------------------------------

    def register(self, connection: Connection, records: Iterable[RouteRecord]) -> int:
        with _explained():
            shards: int = connection.execute(select(meta.c.shards)).scalar_one()
            known = {row.id: row for row in connection.execute(select(routes))}
            made = {(row.route, row.shard) for row in connection.execute(select(lanes.c.route, lanes.c.shard))}
            for record in sorted(records, key=lambda record: record.id):
                found = known.get(record.id)
                if found is None:
                    _insert_missing(connection, routes, [_route_values(record)])
                elif found.name != record.name:
                    raise StoreError(
                        f"the routes {found.name!r} and {record.name!r} have the same number: rename the newer one"
                    )
                elif _record(found._mapping) != record:
                    connection.execute(update(routes).where(routes.c.id == record.id).values(_route_values(record)))
                missing = [
                    {"route": record.id, "shard": shard} for shard in range(shards) if (record.id, shard) not in made
                ]
                _insert_missing(connection, lanes, missing)
            return shards

    def append(self, connection: Connection, deliveries: Sequence[Delivery]) -> None:
        try:
            with _explained():
                if len(deliveries) > 1 and connection.dialect.name == "postgresql":
                    self._append_arrays(connection, deliveries)
                else:
                    for start in range(0, len(deliveries), _ROWS_PER_STATEMENT):
                        self._append_values(connection, deliveries[start : start + _ROWS_PER_STATEMENT])
        except IntegrityError as error:
            known = ", ".join(sorted({str(row.event_id) for row in deliveries}))
            raise DuplicateEventError(f"one of these events was written by an earlier transaction: {known}") from error

    def _append_values(self, connection: Connection, deliveries: Sequence[Delivery]) -> None:
        statement = self._insert(connection.dialect, len(deliveries))
        statement.execute(connection, [value for row in deliveries for value in _values(row)])

    def _append_arrays(self, connection: Connection, deliveries: Sequence[Delivery]) -> None:
        """One text for any number of rows, so that the driver's statement cache holds one entry and not hundreds."""
        columns = [list(column) for column in zip(*(_values(row) for row in deliveries), strict=True)]
        columns[0] = [str(event_id) for event_id in columns[0]]
        self._insert(connection.dialect, 0).execute(connection, columns)

    def _insert(self, dialect: Dialect, rows: int) -> FixedStatement:
        """The INSERT for a number of rows; for 0, the one that takes arrays."""
        statement = self._inserts.get((id(dialect), rows))
        if statement is None:
            statement = self._inserts[id(dialect), rows] = (
                _values_insert(dialect, rows) if rows else _array_insert(dialect)
            )
        return statement

    def committed(self, connection: Connection, written: tuple[UUID, int, int]) -> bool:
        """Whether the transaction that wrote this row has committed. Waits for it, if it is still at work.

        A row that we try to insert under the same identity waits for the other one's fate; ours is never committed.
        """
        event_id, route, schema_version = written
        probe = Delivery(event_id, "pillarbox.probe", route, -1, schema_version, "probe", "probe", None, {}, b"")
        savepoint = connection.begin_nested()
        try:
            self._append_values(connection, [probe])
        except IntegrityError:
            return True
        finally:
            savepoint.rollback()
        return False

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
        .join(routes, routes.c.id == lanes.c.route)
        .where(routes.c.destination.in_(destinations), ~lanes.c.paused, free)
        .order_by(lanes.c.route, lanes.c.shard)
        .limit(limit)
        .with_for_update(of=lanes, skip_locked=True)
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
        .values(
            epoch=lanes.c.epoch + 1,
            token=token,
            tries=lanes.c.tries + case((lost, 1), else_=0),
            locked_by=relay,
            locked_until=from_now(lease),
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
        route=_record(row),
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
        .where(allowed, outbox.c.key.in_(sorted({key.key for key in keys})), _is_waiting(lane))
        .order_by(outbox.c.id)
        .limit(limit)
    )
    found: list[Row] = []
    stopped: set[Key] = set()
    for row in rows:
        key = Key(row.tenant, row.key)
        if key not in keys or key in stopped:
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
    UPDATE pillarbox_outbox SET status = 'SENDING', batch = :batch, number = t.value ->> '$.number'
    FROM json_each(:pairs) AS t
    WHERE pillarbox_outbox.id = t.value ->> '$.id'
      AND route = :route AND shard = :shard AND status IN ('PENDING', 'RETRYING', 'PARKED')
""")


# -- small parts -------------------------------------------------------------------------------------------------------


def _of(lane: Lane) -> ColumnElement[bool]:
    return and_(outbox.c.route == lane.route.id, outbox.c.shard == lane.shard)


def _is(*statuses: Status) -> ColumnElement[bool]:
    """The status as a constant: only then does the planner see that the lane's partial index holds all such rows."""
    return outbox.c.status.in_([literal_column(f"'{status}'") for status in statuses])


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


@contextmanager
def _explained() -> Iterator[None]:
    """A missing table is the most common of all mistakes: say what to do."""
    try:
        yield
    except DBAPIError as error:
        if any(
            sign in str(error.orig) for sign in ("does not exist", "no such table", "doesn't exist")
        ) and "pillarbox_" in str(error.orig):
            raise NotMigratedError(
                "Pillarbox's tables are not in this database: run `pillarbox migrate`, or await box.migrate()"
            ) from error
        raise


def _expect(changed: int, wanted: int) -> None:
    if changed != wanted:
        raise StoreError(
            f"{wanted} rows of the batch should have changed and {changed} did: somebody changed them by hand"
        )


def _row(row: Any) -> Row:
    headers = row.headers if isinstance(row.headers, dict) else msgspec.json.decode(row.headers)
    return Row(row.id, row.event_id, row.topic, row.key, row.tenant, headers, bytes(row.body), row.attempts)


def _values(row: Delivery) -> tuple[Any, ...]:
    headers = msgspec.json.encode(row.headers).decode()
    return (
        row.event_id,
        row.event_type,
        row.route,
        row.shard,
        row.schema_version,
        row.topic,
        row.key,
        row.tenant,
        headers,
        row.body,
    )


def _values_insert(dialect: Dialect, count: int) -> FixedStatement:
    parameters = [(f"{name}_{index}", outbox.c[name].type) for index in range(count) for name in _COLUMNS]
    rows = [
        {name: bindparam(f"{name}_{index}", type_=outbox.c[name].type) for name in _COLUMNS} for index in range(count)
    ]
    return FixedStatement(insert(outbox).inline().values(rows), dialect, parameters)


def _array_insert(dialect: Dialect) -> FixedStatement:
    return FixedStatement(_ARRAY_INSERT, dialect, [(name, None) for name in _COLUMNS])


_ARRAY_INSERT = text(
    f"INSERT INTO pillarbox_outbox ({', '.join(_COLUMNS)}) "  # noqa: S608  constants
    f"SELECT {', '.join(f'CAST({name} AS json)' if name == 'headers' else name for name in _COLUMNS)} FROM unnest("
    + ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in zip(_COLUMNS, _ARRAYS, strict=True))
    + f") AS t({', '.join(_COLUMNS)})"
)


def _insert_missing(connection: Connection, table: Any, rows: list[dict[str, Any]]) -> None:
    """Insert what another process may be inserting, too."""
    if not rows:
        return
    statement: Any
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql  # noqa: PLC0415  loaded already, if this is the dialect

        statement = postgresql.insert(table).on_conflict_do_nothing()
    elif connection.dialect.name == "sqlite":
        from sqlalchemy.dialects import sqlite  # noqa: PLC0415  loaded already, if this is the dialect

        statement = sqlite.insert(table).on_conflict_do_nothing()
    else:
        statement = insert(table).prefix_with("IGNORE")
    connection.execute(statement.values(rows))


def _route_values(record: RouteRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "name": record.name,
        "destination": record.destination,
        "topic": record.topic,
        "schema_version": record.schema_version,
        "on_failure": record.on_failure.value,
        "retry_base": record.retry.base,
        "retry_cap": record.retry.cap,
        "retry_attempts": record.retry.attempts,
        "updated_at": from_now(),
    }


def _record(row: Mapping[Any, Any]) -> RouteRecord:
    return RouteRecord(
        name=row[routes.c.name],
        destination=row[routes.c.destination],
        topic=row[routes.c.topic],
        schema_version=row[routes.c.schema_version],
        on_failure=FailurePolicy(row[routes.c.on_failure]),
        retry=RetryPolicy(row[routes.c.retry_base], row[routes.c.retry_cap], row[routes.c.retry_attempts]),
    )


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
