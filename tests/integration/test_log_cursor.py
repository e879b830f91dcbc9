"""The cursor of the log on a real PostgreSQL: the small form of ``make prove-cursor``, and the store step by step
beside the arithmetic that it must follow.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from pillarbox import clock
from pillarbox.cursor import Cursor, RowAt, Snapshot, Window, look
from pillarbox.outbox import OUTBOUND, Batch, Delivery, Lane, RouteRecord
from pillarbox.stores import look as looking
from pillarbox.stores import look_sql
from pillarbox.stores.log import LogStore
from pillarbox.stores.look import Look
from pillarbox.stores.look_sql import Looks
from pillarbox.stores.migrations import migrate
from pillarbox.stores.statement import DirectStatement
from tests.conftest import FreshDatabase
from tests.prove.cursor import prove, server
from tests.servers import Server, Servers

SEED = 20261115
ROUTE = RouteRecord("step by step", "nowhere", "steps")
BODY = b"0123456789"
SCHEDULES, STEPS = 3, 220


@pytest.fixture
def with_prepared_transactions(servers: Servers, use_server: Callable[[str], Server]) -> Iterator[str]:
    use_server("embedded")  # or this is skipped
    with server(servers.folder / "cursor") as url:
        yield url


async def test_writers_and_owners_of_all_kinds_leave_what_the_ledger_says(with_prepared_transactions: str) -> None:
    result = await prove(with_prepared_transactions, events=2_500, seed=SEED, two_phase=True, pace=0.4)
    assert result["holds"], result
    # How much of each is a matter of time; the schedules below leave nothing to it.
    assert result["late"]
    assert result["rebuilt"]
    assert result["owners"] > 3
    assert result["transactions"]["prepared and committed"]


# -- step by step ------------------------------------------------------------------------------------------------------


@dataclass
class Session:
    """A transaction of a connection, and the rows that it would commit."""

    connection: AsyncConnection
    open: bool = False
    rows: list[RowAt] = field(default_factory=list)
    before_savepoint: list[RowAt] | None = None


class SideBySide:
    """Runs one random schedule on the store and on a list, and compares them after every step.

    The list knows what was committed. Which transactions a snapshot shows is PostgreSQL's own word.
    """

    def __init__(self, engine: AsyncEngine, seed: int) -> None:
        self._draw = random.Random(seed)
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._store = LogStore(engine)
        self._shard = seed % 16
        self._sessions: list[Session] = []
        self._committed: list[RowAt] = []
        self._cursor = Cursor()
        self._batches: list[tuple[Lane, Cursor, Cursor, tuple[int, ...]]] = []
        self.pages = 0
        self.late = 0
        self.unlisted = 0
        """Late rows of transactions that ``seen`` did not list."""

    async def run(self, steps: int) -> None:
        async with AsyncExitStack() as stack:
            for _ in range(8):
                self._sessions.append(Session(await stack.enter_async_context(self._engine.connect())))
            self._watch = await stack.enter_async_context(self._engine.connect())
            lane = await self._take()
            self._cursor = lane.cursor
            for _ in range(steps):
                if self._draw.random() < 0.05:
                    await self._overtake()
                    lane = await self._read(lane)
                await self._write(self._draw.choice(self._sessions))
                if self._draw.random() < 0.08:
                    for _ in range(self._draw.randint(1, 4)):
                        lane = await self._read(lane)
            for session in self._sessions:
                if session.open:
                    await self._end(session, "COMMIT")
            while (await self._look(lane, 3))[0].window.ids:
                lane = await self._read(lane)
        assert all(self._cursor.covers(row) for row in self._committed)

    # -- writing -------------------------------------------------------------------------------------------------------

    async def _write(self, session: Session) -> None:
        draw = self._draw
        if not session.open:
            await session.connection.exec_driver_sql("BEGIN")
            session.open = True
            if draw.random() < 0.7:
                await session.connection.execute(text("SELECT pg_current_xact_id()"))
            return
        step = draw.choice(["append"] * 4 + ["savepoint"] * 2 + ["COMMIT"] * 2 + ["ROLLBACK"])
        if step == "append":
            session.rows += await self._append(session, draw.choice((1, 1, 2, 5)))
        elif step == "savepoint":
            await self._savepoint(session)
        else:
            await self._end(session, step)

    async def _overtake(self) -> None:
        """One that began earlier writes later and commits first: then a snapshot does not list the other. Chance alone
        hardly ever does that, as our own writes are transactions, too.
        """
        closed = [session for session in self._sessions if not session.open]
        if len(closed) < 2:
            return
        earlier, later = closed[:2]
        for session in (earlier, later):
            await session.connection.exec_driver_sql("BEGIN")
            await session.connection.execute(text("SELECT pg_current_xact_id()"))
            session.open = True
        later.rows += await self._append(later, 2)
        earlier.rows += await self._append(earlier, 2)
        await self._end(earlier, "COMMIT")

    async def _append(self, session: Session, count: int) -> list[RowAt]:
        rows = [
            Delivery(clock.new_id(), "t", ROUTE.id, self._shard, 1, "steps", "k", None, {}, BODY) for _ in range(count)
        ]
        await session.connection.run_sync(self._store.append, rows)
        ids = {"ids": [str(row.event_id) for row in rows]}
        found = await session.connection.execute(_WRITTEN, ids)
        return [RowAt(int(row.id), int(row.xid)) for row in found]

    async def _savepoint(self, session: Session) -> None:
        if session.before_savepoint is None:
            await session.connection.exec_driver_sql("SAVEPOINT here")
            session.before_savepoint = [*session.rows]
        elif self._draw.random() < 0.5:
            await session.connection.exec_driver_sql("ROLLBACK TO SAVEPOINT here")
            session.rows, session.before_savepoint = session.before_savepoint, None
        else:
            await session.connection.exec_driver_sql("RELEASE SAVEPOINT here")
            session.before_savepoint = None

    async def _end(self, session: Session, how: str) -> None:
        await session.connection.exec_driver_sql(how)
        if how == "COMMIT":
            self._committed = sorted(self._committed + session.rows)
        session.open, session.rows, session.before_savepoint = False, [], None

    # -- reading -------------------------------------------------------------------------------------------------------

    async def _read(self, lane: Lane) -> Lane:
        draw = self._draw
        await self._check(lane)
        seen, ours = await self._look(lane, draw.choice((1, 2, 3, 50, 50, 50)))
        window = seen.window
        part = window.ids
        if draw.random() < 0.3:
            part = part[: draw.randint(min(1, len(part)), len(part))]
        settle = lane.announced is not None
        lane = await self._store.announce(lane, Batch(part, cursor=seen), settle=settle)
        before, self._cursor = self._cursor, ours.dealt_with(part)
        assert self._same(window.dealt_with(part)) == self._same(self._cursor)
        if part:
            self._batches.append((lane, before, self._cursor, part))
        if draw.random() < 0.3:
            lane = await self._take()
        if lane.announced is not None and draw.random() < 0.5:
            lane = await self._store.settle(lane)
        await self._check(lane)
        return lane

    async def _take(self) -> Lane:
        (lane,) = await self._store.take("r", lease=0.0, wanted={ROUTE.id: 1}, shards={ROUTE.id: [self._shard]})
        return lane

    async def _look(self, lane: Lane, limit: int) -> tuple[Look, Window]:
        """What the store finds, and what must be found."""
        rows = self._draw.choice((1, 2, 4, *[100] * 9))
        before = await self._snapshot()
        page = await self._store.poll(lane, limit=limit, max_bytes=rows * len(BODY))
        seen: Look = page.cursor
        window = seen.window
        if before == await self._snapshot():  # else somebody else was at work: autovacuum perhaps
            assert window.start.paging is not None or window.snapshot == before
        ours = look(self._cursor, self._committed, before, min(limit, rows))
        if ours.start.paging is None:
            ours = replace(ours, snapshot=window.snapshot)
        assert tuple(row.id for row in page.fresh) == window.ids
        assert (window.late, window.fresh, window.more) == (ours.late, ours.fresh, ours.more)
        assert window.snapshot == ours.snapshot
        assert self._same(window.start) == self._same(ours.start)
        self.pages += ours.more
        self.late += len(ours.late)
        late = [row for row in self._committed if row.id in ours.late]
        self.unlisted += sum(row.xid >= ours.start.seen.xmax for row in late)
        return seen, ours

    async def _snapshot(self) -> Snapshot:
        return Snapshot.parse((await self._watch.execute(_SNAPSHOT)).scalar_one())

    async def _check(self, lane: Lane) -> None:
        """What is stored means what we think that it means: the newest batches, and what is settled."""
        for announced, start, end, part in self._batches[-3:]:
            assert tuple(row.id for _, row in await self._store.rebuild(announced)) == part
            assert part == tuple(row.id for row in self._committed if end.covers(row) and not start.covers(row))
        settled = self._cursor if lane.announced is None else self._batches[-1][1]
        covered = await self._watch.execute(_COVERED, {"cursor": str(lane.cursor), "shard": self._shard})
        assert {row.id for row in self._committed if settled.covers(row)} == {*covered.scalars()}

    def _same(self, cursor: Cursor) -> Cursor:
        """Transactions without a late row make no difference."""
        known = {row.xid for row in self._committed if row.id <= cursor.high}
        return replace(cursor, late=tuple(xid for xid in cursor.late if xid in known))


_SNAPSHOT = text("SELECT CAST(pg_current_snapshot() AS text)")
_WRITTEN = text(
    "SELECT id, CAST(xid AS text) AS xid FROM pillarbox_outbox WHERE event_id = ANY (CAST(:ids AS uuid[])) ORDER BY id"
)
_COVERED = text(
    "SELECT id FROM pillarbox_outbox WHERE shard = :shard AND pillarbox_covered(CAST(:cursor AS text), id, xid)"
)


@pytest.fixture
async def engine(fresh_database: FreshDatabase) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(fresh_database("embedded").url(), pool_size=12)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(LogStore(engine).register, [ROUTE])
    yield engine
    await engine.dispose()


async def test_the_store_finds_what_the_arithmetic_finds(engine: AsyncEngine) -> None:
    schedules = [SideBySide(engine, SEED + number) for number in range(SCHEDULES)]
    for schedule in schedules:
        await schedule.run(STEPS)
    assert sum(schedule.pages for schedule in schedules) > 20
    assert sum(schedule.late for schedule in schedules) > 100
    assert sum(schedule.unlisted for schedule in schedules) > 5


def _take_a_full_page_for_the_last_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(looking, "Window", lambda *args, **values: Window(*args, **{**values, "more": False}))


def _look_only_at_what_the_snapshot_lists(patch: pytest.MonkeyPatch) -> None:
    _replace(patch, "poll", "o.xid >=", "false AND o.xid >=")


def _rebuild_with_the_snapshot_of_now(patch: pytest.MonkeyPatch) -> None:
    _replace(patch, "between", "CAST(CAST(:snapshot AS text) AS pg_snapshot)", "pg_current_snapshot()")


def _replace(patch: pytest.MonkeyPatch, name: str, old: str, new: str) -> None:
    def changed(statement: Any) -> Any:
        if isinstance(statement, Looks):
            return Looks(changed(statement.light), changed(statement.sized), changed(statement.places))
        if isinstance(statement, DirectStatement):
            return DirectStatement(changed(statement._statement))
        assert old in statement.text
        return text(statement.text.replace(old, new))

    questions = look_sql.questions_to(OUTBOUND)
    patch.setattr(questions, name, changed(getattr(questions, name)))


@pytest.mark.parametrize(
    "mistake",
    [
        _take_a_full_page_for_the_last_one,
        _look_only_at_what_the_snapshot_lists,
        _rebuild_with_the_snapshot_of_now,
    ],
)
async def test_a_planted_mistake_is_found(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mistake(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011  whatever it breaks
        for number in range(SCHEDULES):
            await SideBySide(engine, SEED + number).run(STEPS)
