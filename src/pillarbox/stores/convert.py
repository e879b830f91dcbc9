"""From a queue to a log and back, on PostgreSQL, while writers write and relays send.

Writers notice nothing: both stores have the same table and the same INSERT. Relays decide for each lane, whenever they
take it, which of the two it is. So a conversion goes lane by lane, each in one short transaction that begins with the
lane's row: what its owner has written is seen, and what it still wants to write fails, as after a take-over. Between
two such transactions every lane is one or the other; whatever ends a conversion, the next one finishes it.

*To a log*: the cursor begins before the first row. A log looks at rows that are PENDING and at those of transactions
that its last look did not show; what a queue has dealt with is neither, once no row has a number that is still to be
given out. What waits gets its row among the failures.

*To a queue*: what the settled cursor covers, and has not failed, becomes SENT: most of it before the lane is locked,
because a row that is covered stays so. What failed takes its state, and what people made of it, back into its row. What
no cursor covers, late rows too, is PENDING as it always was.

A batch that is announced keeps its numbers, its count and its fingerprint: it is told in the other store's words. On a
destination without numbers its rows may come twice, as after any take-over, so a lane that has an owner is given some
time to settle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..cursor import Cursor, Snapshot
from ..errors import BatchMismatchError, StoreError
from ..outbox import Announcement, Lane, LaneName, Row
from . import log_sql, part_indexes
from .announced import Contents, contents_of
from .columns import from_now
from .leases import lane_of, stored
from .log import LogStore
from .partitions import layout
from .tables import lanes, meta, routes
from .trail import Author, note

PATIENCE = 5.0
"""Seconds that owners get to settle what they have announced."""
_AGAIN = 0.02
_CHUNK = 2_000
_PASSES = 8
_OLD_TRANSACTIONS = 60.0
_LOCK = 7_810_773_118_041_326
"""Of conversions: one at a time. Drawn by lot."""


class Store(StrEnum):
    """How a database keeps progress."""

    LOG = "log"
    QUEUE = "queue"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a conversion would do."""

    to: Store
    store: Store
    """What new lanes are now."""
    lanes: int
    """That are still the other thing."""
    announced: int
    """Of these: with a batch under way."""
    waiting: int
    """Deliveries that have failed, or wait behind one: they change their place."""
    passed: int
    """To a queue: how many are marked as sent, at most."""
    index: bool
    """Whether the index of the log is built, or dropped."""

    @property
    def is_done(self) -> bool:
        """Nothing is left to do."""
        return self.store is self.to and not self.lanes and not self.index


@dataclass(slots=True)
class Progress:
    """How far a conversion has come."""

    audit: int | None = None
    lanes: int = 0
    batches: int = 0
    """Announced ones that were taken along."""
    waiting: int = 0
    marked: int = 0
    left: dict[str, str] = field(default_factory=dict)
    """Lanes that stay as they are, each with the reason."""
    index: bool = False
    unfinished: str | None = None
    """What is still to be done, if everything else is."""


class _LeftAloneError(Exception):
    """A lane stays as it is, and the others go on."""

    def __init__(self, lane: Lane, reason: str) -> None:
        super().__init__(reason)
        self.lane = str(lane)


def plan(connection: Connection, to: Store) -> Plan:
    """Look what a conversion would do, and whether it can: `StoreError` if not."""
    _check(connection)
    found = connection.execute(_PLAN[to]).one()
    index = connection.execute(_INDEX).first()
    missing = index is None or not index.indisvalid
    store = Store(connection.execute(select(meta.c.store)).scalar_one())
    return Plan(
        to,
        store,
        lanes=found.lanes,
        announced=found.announced,
        waiting=found.waiting,
        passed=int(found.passed),
        index=missing if to is Store.LOG else index is not None,
    )


def _check(connection: Connection) -> None:
    from .migrations.step_0003 import FIRST_VERSION  # noqa: PLC0415  Alembic is for those who migrate

    if connection.dialect.name != "postgresql":
        raise StoreError(f"on {connection.dialect.name} the outbox is a queue: only PostgreSQL has the other")
    version = connection.dialect.server_version_info or ()
    if version < FIRST_VERSION:
        raise StoreError(f"the log needs PostgreSQL {FIRST_VERSION[0]}, and this is {'.'.join(map(str, version))}")
    original, cache, standby, filtered, *_ = connection.execute(log_sql.GUARDS).one()
    if standby:
        raise StoreError("this server is a standby: convert the primary")
    if not original:
        raise StoreError(
            "this database is a copy, from a dump or by replication, and its transactions have other numbers than "
            "those that lanes remember: run `pillarbox outbox rebase` first"
        )
    if filtered:
        raise StoreError(
            "row level security hides rows of pillarbox_outbox from this role, and they would be left behind: "
            "take a role with BYPASSRLS, or the table's owner"
        )
    if cache != 1:
        raise StoreError(
            f"the ids of pillarbox_outbox are drawn {cache} at a time, so keys would lose their order: "
            "ALTER TABLE pillarbox_outbox ALTER COLUMN id SET CACHE 1"
        )


class Conversion:
    """One run, from the first lane to the last. It can be cancelled or killed at any moment, and run again."""

    def __init__(
        self,
        engine: AsyncEngine,
        to: Store,
        author: Author,
        *,
        tell: Callable[[str], None] = lambda _: None,
        patience: float = PATIENCE,
    ) -> None:
        self.progress = Progress()
        self._engine = engine.execution_options(isolation_level="READ COMMITTED")
        self._each_alone = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._store = LogStore(engine)
        self._to = to
        self._author = author
        self._tell = tell
        self._patience = patience

    async def run(self) -> Progress:
        """Do all that is to be done, or say what is left."""
        async with self._alone():
            async with self._engine.connect() as connection:
                wanted = await connection.run_sync(plan, self._to)
            if wanted.is_done:
                return self.progress
            if self._to is Store.LOG and wanted.index:
                await self._build_index()
            await self._decide(wanted)
            await self._lanes()
            await self._stragglers()
            await self._lanes()
            if self._to is Store.QUEUE:
                await self._drop_index()
        return self.progress

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """The lock ends with its transaction: whoever is killed leaves none behind, not even at a pooler."""
        async with self._engine.connect() as connection:
            if not (await connection.execute(_TRY_LOCK, {"key": _LOCK})).scalar_one():
                raise StoreError("somebody else is converting this database")
            # The last statement must be one without a snapshot: the index would wait for that, and we for the index.
            await connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
            yield

    async def _decide(self, wanted: Plan) -> None:
        """New lanes are what we convert to, from now on; and who wanted it is written down."""
        async with self._engine.begin() as connection:
            await connection.execute(update(meta).values(store=self._to.value))
            details = {"to": self._to, "lanes": wanted.lanes}
            target = f"the outbox, to a {self._to}"
            self.progress.audit = await connection.run_sync(note, self._author, "convert", target, details=details)

    # -- lanes ---------------------------------------------------------------------------------------------------------

    async def _lanes(self) -> None:
        """Every lane that is still the other thing; those that are busy come last, and are not asked twice."""
        names = await self._others()
        self.progress.left.clear()  # whoever was left alone is asked again
        deadline = time.monotonic() + self._patience
        count = len(names)
        while names:
            impatient = time.monotonic() >= deadline
            busy = [name for name in names if not await self._lane(name, impatient=impatient)]
            if len(busy) < len(names):
                self._tell(f"{count - len(busy) - len(self.progress.left):,} of {count:,} lanes")
            names = busy
            if busy:
                await asyncio.sleep(_AGAIN)

    async def _others(self) -> list[LaneName]:
        other = lanes.c.cursor.is_(None) if self._to is Store.LOG else lanes.c.cursor.is_not(None)
        wanted = select(lanes.c.route, lanes.c.shard).where(other).order_by(lanes.c.route, lanes.c.shard)
        async with self._engine.connect() as connection:
            return [LaneName(*row) for row in await connection.execute(wanted)]

    async def _lane(self, name: LaneName, *, impatient: bool) -> bool:
        """Convert it, unless its owner should settle first."""
        here = {"route": name.route, "shard": name.shard}
        try:
            await (self._mark if self._to is Store.QUEUE else self._forget)(here)
            async with self._engine.begin() as connection:
                await connection.execute(_BY_INDEX)
                row = (await connection.execute(_LOCKED, here)).one()
                lane = lane_of(row._mapping)
                if (lane.cursor is None) == (self._to is Store.QUEUE):
                    return True
                if lane.announced is not None and row.held and not impatient:
                    return False
                change = self._to_log if self._to is Store.LOG else self._to_queue
                announced = await change(connection, lane, here)
                await connection.execute(_changed(lane, self._to, announced))
        except _LeftAloneError as error:
            self.progress.left[error.lane] = str(error)
            return True
        self.progress.lanes += 1
        self.progress.batches += announced is not None
        return True

    async def _to_log(self, connection: AsyncConnection, lane: Lane, here: Mapping[str, Any]) -> Announcement | None:
        announced = lane.announced
        if announced is not None:
            # A log finds its batches by cursors. These rows have none, so they are told as rows that are sent again.
            await self._rebuilt(lane)
            rows = sorted(row for row in announced.items if row)
            if rows:
                await connection.execute(_SET_ASIDE, {**here, "ids": rows, "low": rows[0], "high": rows[-1]})
            contents = Contents(to=str(Cursor()), redo=tuple(rows))
            announced = replace(announced, details={**announced.details, **msgspec.to_builtins(contents)})
        self.progress.waiting += (await connection.execute(_TO_FAILURES, here)).rowcount
        return announced

    async def _to_queue(self, connection: AsyncConnection, lane: Lane, here: Mapping[str, Any]) -> Announcement | None:
        announced, contents = lane.announced, contents_of(lane)
        await _check_time(connection, lane)
        if announced is not None and contents is not None:
            numbered = {number: row.id for number, row in await self._rebuilt(lane)}
            first = announced.first_number
            items = tuple(numbered.get(number, 0) for number in range(first, max(numbered, default=first - 1) + 1))
            details = {name: it for name, it in announced.details.items() if name not in Contents.__struct_fields__}
            announced = replace(announced, items=items, details=details)
        after = 0
        while (found := (await connection.execute(_MARK, {**here, "after": after, "limit": _CHUNK})).one()).last:
            after = found.last
            self.progress.marked += found.marked
        self.progress.waiting += (await connection.execute(_FROM_FAILURES, here)).rowcount
        await connection.execute(_FORGET_FAILURES, here)
        for row, attempts in (contents.attempts if contents is not None else {}).items():
            await connection.execute(_COUNT_ATTEMPTS, {**here, "id": row, "attempts": attempts})
        return announced

    async def _rebuilt(self, lane: Lane) -> list[tuple[int, Row]]:
        """The announced batch. Nobody can change it: the lane's row is locked by us."""
        try:
            return await self._store.rebuild(lane)
        except BatchMismatchError as error:
            raise _LeftAloneError(lane, str(error)) from error

    async def _mark(self, here: Mapping[str, Any]) -> None:
        """Mark what has been sent while the lane goes on, until the rest is little."""
        for _ in range(_PASSES):
            after = marked = 0
            while True:
                async with self._engine.begin() as connection:
                    await connection.execute(_BY_INDEX)
                    row = (await connection.execute(_LOOK, here)).one()
                    lane = lane_of(row._mapping)
                    if lane.cursor is None:
                        return
                    await _check_time(connection, lane)
                    found = (await connection.execute(_MARK, {**here, "after": after, "limit": _CHUNK})).one()
                if found.last is None:
                    break
                after, marked = found.last, marked + found.marked
                self.progress.marked += found.marked
                self._tell(f"marked as sent so far: {self.progress.marked:,}, now in lane {lane}")
            if marked <= _CHUNK:
                return

    async def _forget(self, here: Mapping[str, Any]) -> None:
        """Take numbers that nobody here has been given from rows of a queue, where none are needed. An older release
        may have left them in a copy when it rebased it, and a log would take their rows for late ones, again and again.
        """
        found = _CHUNK
        while found >= _CHUNK:
            async with self._engine.begin() as connection:
                await connection.execute(_BY_INDEX)
                lane = lane_of((await connection.execute(_LOCKED, here)).one()._mapping)
                if lane.cursor is not None:
                    return
                found = (await connection.execute(_FORGET, {**here, "limit": _CHUNK})).scalar_one()

    async def _stragglers(self) -> None:
        """Wait for those who read what new lanes are before we changed it: they may still make some."""
        deadline = time.monotonic() + _OLD_TRANSACTIONS
        async with self._each_alone.connect() as connection:
            readers = {*(await connection.scalars(_READERS))}
            while readers and time.monotonic() < deadline:
                await asyncio.sleep(_AGAIN)
                readers &= {*(await connection.scalars(_READERS))}
        if readers:
            self.progress.unfinished = (
                f"{len(readers)} old transactions may still make lanes of the other kind: "
                "run this again when they have ended"
            )

    # -- the index -----------------------------------------------------------------------------------------------------

    async def _build_index(self) -> None:
        from .migrations.step_0003 import INDEX  # noqa: PLC0415  Alembic is for those who migrate

        async with self._each_alone.connect() as connection:
            if (await connection.execute(_BEING_BUILT)).first() is not None:
                raise StoreError(
                    "an index of pillarbox_outbox is being built right now: run this again when it is there"
                )
            partitioned = (await connection.run_sync(layout)).partitioned
            if (await connection.execute(_INDEX)).first() is not None:  # what is left of a build that was ended
                await (part_indexes.drop(self._engine, _XID) if partitioned else connection.execute(_DROP_INDEX))
            self._tell(f"building the index {_XID}, which waits for transactions that are open now")
            if partitioned:
                await part_indexes.build(self._engine, _XID, INDEX)
            else:
                await connection.execute(text(INDEX.replace("CREATE INDEX", "CREATE INDEX CONCURRENTLY")))
        self.progress.index = True

    async def _drop_index(self) -> None:
        if self.progress.left or self.progress.unfinished or await self._others():
            return
        async with self._each_alone.connect() as connection:
            self._tell(f"dropping the index {_XID}")
            if (await connection.run_sync(layout)).partitioned:
                await part_indexes.drop(self._engine, _XID)
            else:
                await connection.execute(_DROP_INDEX)
        self.progress.index = True


def _changed(lane: Lane, to: Store, announced: Announcement | None) -> Any:
    """The lane is the other thing, and nobody's: the next write of its owner finds another epoch, and stops."""
    nobody = dict.fromkeys(("token", "locked_by", "locked_until", "trouble", "trouble_until"))
    return (
        update(lanes)
        .where(lanes.c.route == lane.route.id, lanes.c.shard == lane.shard)
        .values(
            cursor=str(Cursor()) if to is Store.LOG else None,
            detours=None,
            epoch=lanes.c.epoch + 1,
            **nobody,
            **stored(announced),
        )
    )


async def _check_time(connection: AsyncConnection, lane: Lane) -> None:
    """A database that went back in time gives numbers out again: the cursor would cover what it never saw."""
    now = Snapshot.parse((await connection.execute(_NOW)).scalar_one())
    if now.lies_below(lane.cursor.paging or lane.cursor.seen):
        raise _LeftAloneError(
            lane,
            f"it has seen snapshot {lane.cursor.paging or lane.cursor.seen}, and the database is at {now}: "
            "run `pillarbox outbox rebase`",
        )


# -- statements --------------------------------------------------------------------------------------------------------

_TRY_LOCK = text("SELECT pg_try_advisory_xact_lock(:key)")
_NOW = text("SELECT CAST(pg_current_snapshot() AS text)")
_BY_INDEX = text("SET LOCAL enable_seqscan = off")  # whatever the statistics say
_XID = "ix_pillarbox_outbox_xid"
_INDEX = text(
    "SELECT i.indisvalid FROM pg_index i WHERE i.indexrelid = CAST(to_regclass('ix_pillarbox_outbox_xid') AS oid)"
)
_BEING_BUILT = text(
    "SELECT 1 FROM pg_stat_progress_create_index WHERE relid = CAST('pillarbox_outbox' AS regclass) "
    "OR relid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = CAST('pillarbox_outbox' AS regclass))"
)
_DROP_INDEX = text("DROP INDEX CONCURRENTLY IF EXISTS ix_pillarbox_outbox_xid")
_READERS = text(
    "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND granted "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND relation = CAST('pillarbox_meta' AS regclass) AND pid IS DISTINCT FROM pg_backend_pid()"
)
"""Transactions that have looked into `pillarbox_meta`."""

_LOOK = (
    select(lanes, routes, (lanes.c.locked_until > from_now()).label("held"))
    .join(routes, routes.c.id == lanes.c.route)
    .where(text("pillarbox_lanes.route = :route AND pillarbox_lanes.shard = :shard"))
)
_LOCKED = _LOOK.with_for_update(of=lanes)

_PLAN = {
    Store.LOG: text(
        """
        SELECT count(*) AS lanes, count(l.announced) AS announced, (
            SELECT count(*) FROM pillarbox_outbox o JOIN pillarbox_lanes p ON p.route = o.route AND p.shard = o.shard
            WHERE p.cursor IS NULL AND o.status IN ('RETRYING', 'PARKED', 'FAILED')
        ) AS waiting, 0 AS passed
        FROM pillarbox_lanes l WHERE l.cursor IS NULL
        """
    ),
    Store.QUEUE: text(
        """
        SELECT count(*) AS lanes, count(l.announced) AS announced, (
            SELECT count(*) FROM pillarbox_failures f WHERE f.status IN ('RETRYING', 'PARKED', 'FAILED')
        ) AS waiting, coalesce(sum((
            SELECT count(*) FROM pillarbox_outbox o
            WHERE o.route = l.route AND o.shard = l.shard AND o.status = 'PENDING' AND o.status <> 'SENT'
              AND o.id <= CAST(split_part(l.cursor, ' ', 1) AS bigint)
        )), 0) AS passed
        FROM pillarbox_lanes l WHERE l.cursor IS NOT NULL
        """
    ),
}

_HERE = "o.route = :route AND o.shard = :shard"
# Whose row we see has ended, so its number is among those that our snapshot shows, or is not of this server.
_FORGET = text(
    f"""
    WITH found AS MATERIALIZED (
        (SELECT o.tableoid AS part, o.ctid AS place FROM pillarbox_outbox o
         WHERE {_HERE} AND o.xid >= (SELECT pg_snapshot_xmax(pg_current_snapshot()))
         ORDER BY o.xid, o.id LIMIT :limit)
        UNION ALL
        SELECT one.part, one.place FROM pg_snapshot_xip(pg_current_snapshot()) AS running(xid) CROSS JOIN LATERAL (
            SELECT o.tableoid AS part, o.ctid AS place FROM pillarbox_outbox o
            WHERE {_HERE} AND o.xid = running.xid ORDER BY o.id LIMIT :limit
        ) one
    ), forgotten AS (
        UPDATE pillarbox_outbox o SET xid = NULL FROM found WHERE o.ctid = found.place AND o.tableoid = found.part
    )
    SELECT count(*) FROM found
    """  # noqa: S608  constants
)
_SET_ASIDE = text(
    f"""
    UPDATE pillarbox_outbox o SET status = 'RETRYING', available_at = clock_timestamp()
    WHERE {_HERE} AND o.status = 'PENDING' AND o.status <> 'SENT'
      AND o.id BETWEEN :low AND :high AND o.id = ANY (CAST(:ids AS bigint[]))
    """  # noqa: S608  constants
)
"""The rows of a batch are not fresh any more."""
_TO_FAILURES = text(
    f"""
    INSERT INTO pillarbox_failures (route, shard, row_id, tenant, key, status, attempts, available_at, last_error)
    SELECT o.route, o.shard, o.id, o.tenant, o.key, o.status, o.attempts, o.available_at, o.last_error
    FROM pillarbox_outbox o
    WHERE {_HERE} AND o.status IN ('RETRYING', 'PARKED', 'FAILED') AND o.status <> 'SENT'
    """  # noqa: S608  constants
)
_REDONE = """
    SELECT unnest(j.redone) AS id, j.batch, j.settled_at FROM pillarbox_journal j
    WHERE j.route = :route AND j.shard = :shard AND j.redone <> '{}'
"""
# What the cursor covers, and has not failed, has been sent, and will have been for ever: it makes no difference that
# the lane goes on. In a statement the cursor and the failures are of the same moment.
_MARK = text(
    f"""
    WITH lane AS MATERIALIZED (
        SELECT l.cursor, l.detours, CAST(split_part(l.cursor, ' ', 1) AS bigint) AS high
        FROM pillarbox_lanes l WHERE l.route = :route AND l.shard = :shard
    ), page AS MATERIALIZED (
        SELECT o.id, o.xid, o.tenant, o.tableoid AS part, o.ctid AS place FROM pillarbox_outbox o
        WHERE {_HERE} AND o.status = 'PENDING' AND o.status <> 'SENT'
          AND o.id > :after AND o.id <= (SELECT high FROM lane)
        ORDER BY o.id LIMIT :limit
    ), redone AS MATERIALIZED ({_REDONE}), passed AS MATERIALIZED (
        SELECT o.part, o.place, coalesce(redone.batch, j.batch) AS batch,
               coalesce(redone.settled_at, j.settled_at, clock_timestamp()) AS sent_at
        FROM page o CROSS JOIN lane l LEFT JOIN redone ON redone.id = o.id
        LEFT JOIN LATERAL (
            SELECT j.batch, j.settled_at FROM pillarbox_journal j
            WHERE j.route = :route AND j.shard = :shard AND j.high >= o.id
              AND pillarbox_covered(j.cursor, o.id, o.xid) AND {log_sql.TELLS_ABOUT}
            ORDER BY j.high, j.batch LIMIT 1
        ) j ON true
        WHERE pillarbox_covered(pillarbox_cursor(l.cursor, l.detours, o.tenant), o.id, o.xid) AND NOT EXISTS (
            SELECT FROM pillarbox_failures f WHERE f.route = :route AND f.shard = :shard AND f.row_id = o.id
        )
    ), marked AS (
        UPDATE pillarbox_outbox o SET status = 'SENT', sent_at = passed.sent_at, batch = passed.batch
        FROM passed WHERE o.ctid = passed.place AND o.tableoid = passed.part RETURNING 1
    )
    SELECT (SELECT max(id) FROM page) AS last, (SELECT count(*) FROM marked) AS marked
    """  # noqa: S608  constants
)
_FROM_FAILURES = text(
    f"""
    WITH redone AS MATERIALIZED ({_REDONE}), failed AS MATERIALIZED (
        SELECT f.*, place.part, place.ctid AS place, redone.settled_at
        FROM pillarbox_failures f CROSS JOIN unnest(ARRAY['PENDING', 'RETRYING', 'PARKED', 'FAILED']) AS s(status)
        CROSS JOIN LATERAL (
            SELECT o.tableoid AS part, o.ctid FROM pillarbox_outbox o
            WHERE {_HERE} AND o.status = s.status AND o.status <> 'SENT' AND o.id = f.row_id ORDER BY o.id LIMIT 1
        ) place LEFT JOIN redone ON f.status = 'SENT' AND redone.id = f.row_id
        WHERE f.route = :route AND f.shard = :shard
    )
    UPDATE pillarbox_outbox o
    SET status = failed.status, attempts = failed.attempts, available_at = failed.available_at,
        last_error = coalesce(failed.last_error, o.last_error), event_id = coalesce(failed.event_id, o.event_id),
        headers = coalesce(failed.headers, o.headers), body = coalesce(failed.body, o.body),
        sent_at = CASE WHEN failed.status = 'SENT' THEN coalesce(failed.settled_at, clock_timestamp()) END
    FROM failed WHERE o.ctid = failed.place AND o.tableoid = failed.part
    """  # noqa: S608  constants
)
_FORGET_FAILURES = text("DELETE FROM pillarbox_failures WHERE route = :route AND shard = :shard")
_COUNT_ATTEMPTS = text(
    f"""
    UPDATE pillarbox_outbox o SET attempts = :attempts
    WHERE {_HERE} AND o.status = 'PENDING' AND o.status <> 'SENT' AND o.id = :id
    """  # noqa: S608  constants
)
