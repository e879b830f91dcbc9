"""No statement of a lane's turn walks the outbox: however much was sent before, and whatever the statistics say."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from uuid import UUID

import asyncpg  # type: ignore[import-untyped]
import pytest
from sqlalchemy import Connection, event, func, select, text
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_cursor
from sqlalchemy.dialects.sqlite.aiosqlite import AsyncAdapt_aiosqlite_cursor
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox.errors import StoreError
from pillarbox.outbox import OUTBOUND, Batch, Direction, Failure, Lane, Status
from pillarbox.stores import operations, rebase, sqlite, store_on
from pillarbox.stores.audit import Author
from pillarbox.stores.columns import from_now
from pillarbox.stores.identity import renew
from pillarbox.stores.inspection import VIEWS, Filter, lead_to_indexes
from pillarbox.stores.log import LogStore
from pillarbox.stores.migrations import migrate
from pillarbox.stores.overview import backlog
from pillarbox.stores.queue import QueueStore
from pillarbox.stores.tables import meta, outbox
from pillarbox.testing.conformance.outbox import ROUTE, delivery
from tests.conftest import FreshDatabase
from tests.deliveries import put
from tests.relays import soon

unsent = VIEWS[Direction.OUTBOUND].unsent
_ANALYZE = {"postgresql": "ANALYZE pillarbox_outbox", "sqlite": "ANALYZE"}
_EXPLAIN = {"postgresql": "EXPLAIN", "sqlite": "EXPLAIN QUERY PLAN"}
_CURSORS: dict[str, Any] = {"postgresql": AsyncAdapt_asyncpg_cursor, "sqlite": AsyncAdapt_aiosqlite_cursor}
_WALKS = {
    "postgresql": ("Seq Scan on pillarbox_outbox",),
    "sqlite": ("SCAN o", "SCAN pillarbox_outbox", "SCAN f", "SCAN b"),
}


@pytest.fixture(params=["embedded", pytest.param("system", marks=pytest.mark.elsewhere), "sqlite"])
async def engine(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(fresh_database(request.param).url())
    sqlite.configure_transactions(engine.sync_engine)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
    yield engine
    await engine.dispose()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("analyzed", [False, True], ids=["without statistics", "with statistics"])
async def test_h56_a_turn_of_a_queue_costs_the_same_however_much_was_sent(engine: AsyncEngine, analyzed: bool) -> None:
    store = store_on(engine)
    await _fill(engine, store)
    if analyzed:
        async with engine.begin() as connection:
            await connection.execute(text("ANALYZE"))
    [lane] = await store.take("r", lease=30, wanted={ROUTE.id: 1})
    with _recorded(engine, of="pillarbox_") as statements:
        await store.ready([ROUTE.id], relay="r")
        page = await store.poll(lane, limit=100)
        assert page.redo
        assert page.fresh
        items = [row.id for row in (*page.redo, *page.fresh[1:])]
        batch = Batch(items, failures=[Failure(page.fresh[0].id, 1, "no", 0.0)])
        lane = await store.announce(lane, batch, settle=False)
        await store.rebuild(lane)
        lane = await store.amend(lane, [Failure(items[-1], 1, "no", 0.0)])
        await store.settle(lane)
    assert len(statements) > 8
    async with engine.connect() as connection:
        for statement, parameters in statements:
            found = await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            plan = [str(row[-1]) for row in found]
            assert not any(walk in line for line in plan for walk in _WALKS["sqlite"]), "\n".join((statement, *plan))


async def test_the_backlog_is_counted_without_reading_what_was_sent(engine: AsyncEngine) -> None:
    await _fill(engine, store_on(engine))
    async with engine.begin() as connection:
        await connection.execute(text(_ANALYZE[engine.dialect.name]))
    async with engine.connect() as connection:
        with _recorded(engine) as statements:
            (route,) = await connection.run_sync(backlog)
        assert (route.pending, route.failed) == (2202, 1)
        if engine.dialect.name == "postgresql":  # to compile it would take a thousand times as long
            assert (await connection.execute(text("SHOW jit"))).scalar_one() == "off"
        assert len(statements) == 1
        for statement, parameters in statements:
            found = await connection.exec_driver_sql(f"{_EXPLAIN[engine.dialect.name]} {statement}", parameters)
            plan = [str(row[-1]) for row in found]
            assert not any(walk in line for line in plan for walk in _WALKS[engine.dialect.name]), "\n".join(plan)
            assert any("ix_pillarbox_outbox_lane" in line or "PRIMARY KEY" in line for line in plan), "\n".join(plan)


async def test_a_new_install_id_is_given_without_a_look_at_what_waits(engine: AsyncEngine) -> None:
    """It keeps everybody waiting who registers or prunes."""
    store = store_on(engine)
    await _fill(engine, store)
    taken = await store.take("r", lease=30, wanted={ROUTE.id: 1})
    async with engine.connect() as connection:
        with pytest.raises(StoreError, match=rf"relays hold lanes \({ROUTE.name}/0\)"):
            await connection.run_sync(renew, Author("anna", "a copy"))
    await store.release("r", taken)
    async with engine.begin() as connection:
        with _recorded(engine) as statements:
            install, *_ = await connection.run_sync(renew, Author("anna", "a copy"))
        assert statements == []
        assert await connection.scalar(select(meta.c.install_id)) == install


async def test_h56_an_old_snapshot_makes_no_turn_of_a_log_longer(fresh_database: FreshDatabase) -> None:
    """The dead versions of a lane's row stay. A turn neither walks over them nor makes an entry in an index, which
    would; and whoever has a plan for a small table makes another one.
    """
    database = fresh_database("embedded")
    engine, other = create_async_engine(database.url()), create_async_engine(database.url())
    store = LogStore(engine)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(store.register, [ROUTE])
    async with other.execution_options(isolation_level="REPEATABLE READ").connect() as reader:
        await reader.execute(text("SELECT count(*) FROM pillarbox_lanes"))
        lanes = await store.take("r", lease=30, wanted={ROUTE.id: 16})
        with _recorded(engine, of="pillarbox_lanes") as statements:
            for number in range(40):
                async with engine.begin() as connection:
                    rows = [delivery(f"k{shard}", shard=shard) for shard in range(16)]
                    await connection.run_sync(store.append, rows)
                for index, lane in enumerate(lanes):
                    page = await store.poll(lane, limit=10)
                    batch = Batch([row.id for row in page.fresh], cursor=page.cursor)
                    lanes[index] = await store.announce(lane, batch, settle=number > 0)
        straight = [parameters for statement, parameters in statements if "ctid =" in statement]
        assert len(straight) == 16 * 39
        await engine.dispose()  # whoever goes tells what it has done

        async def hot() -> bool:
            told = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'pillarbox_lanes'"
            async with other.connect() as watching:
                updated, in_place = (await watching.execute(text(told))).one()
            return bool(updated >= 16 * 40 and in_place > updated * 0.7)

        await soon(hot)
        statement, parameters = next(it for it in statements if "ctid =" in it[0])
        found = await reader.exec_driver_sql(f"EXPLAIN {statement}", parameters)
        assert any("Tid Scan" in row[0] for row in found)
    await other.dispose()


@pytest.mark.parametrize("analyzed", ["never", "while it was empty", "now"])
@pytest.mark.parametrize("kind", ["embedded", "system"])
async def test_h117_a_turn_in_the_log_is_led_to_the_right_index(  # noqa: PLR0915  a turn has many statements
    fresh_database: FreshDatabase, kind: str, analyzed: str
) -> None:
    engine = create_async_engine(fresh_database(kind).url())
    store = LogStore(engine)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(store.register, [ROUTE])
    if analyzed == "while it was empty":
        await _run(engine, _ANALYZE["postgresql"])
    [lane] = await store.take("r", lease=30, wanted={ROUTE.id: 1})
    # Much that was sent here, and much that waits in other lanes.
    await _run(engine, _MANY.format(0, ROUTE.id, 20_000))
    await _run(
        engine,
        "UPDATE pillarbox_lanes SET cursor = (SELECT max(id) FROM pillarbox_outbox) || ' ' || "
        "pg_current_snapshot() WHERE shard = 0",
    )
    await _run(engine, _MANY.format("1 + i % 15", ROUTE.id, 20_000))
    if analyzed == "now":
        await _run(engine, _ANALYZE["postgresql"])
    await store.release("r", [lane])
    with _recorded(engine) as statements:
        [lane] = await store.take("r", lease=30, wanted={ROUTE.id: 1})
        async with engine.begin() as connection:
            await connection.run_sync(store.append, [delivery("late") for _ in range(8)])
            async with engine.begin() as other:
                await other.run_sync(store.append, [delivery(f"k{index}") for index in range(4)])
            page = await store.poll(lane, limit=10)
            batch = Batch(items=[row.id for row in page.fresh], cursor=page.cursor)
            lane = await store.announce(lane, batch, settle=False)
            lane = await store.settle(lane)
            await store.ready([ROUTE.id], relay="r")
        for limit in (5, 5, 10):  # paged, because the late rows are more than the limit
            page = await store.poll(lane, limit=limit)
            first, *others = [row.id for row in page.fresh]
            batch = Batch(items=others, failures=[Failure(first, 1, "no", 0.0)], cursor=page.cursor)
            lane = await store.announce(lane, batch, settle=lane.announced is not None)
            await store.rebuild(lane)
            lane = await store.amend(lane, [Failure(others[-1], 1, "no", 0.0)])
            async with engine.begin() as other:
                await other.run_sync(store.append, [delivery(f"k{index}") for index in range(4)])
        await store.poll(await store.settle(lane), limit=5)
        await store.ready([ROUTE.id], relay="r")
        async with engine.connect() as reader:
            await reader.run_sync(backlog)
    assert len(statements) > 15
    async with engine.connect() as connection:
        for statement, parameters in statements:
            if statement.lstrip().startswith("INSERT INTO pillarbox_outbox"):
                continue  # these are writers
            if "_unsent" in statement:
                await connection.run_sync(lead_to_indexes)
            found = await connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)
            plan = [str(row[-1]) for row in found]
            scans = [(line, after) for line, after in pairwise(plan) if "on pillarbox_outbox" in line]
            for line, condition in scans:
                assert "Seq Scan" not in line, "\n".join((statement, *plan))
                if "_unsent" in statement:
                    continue  # it counts what is in lanes, of both kinds
                by_id = re.search("ix_pillarbox_outbox_lane|uq_pillarbox_outbox_event", line)
                needed = r"\b(event_)?id\b" if by_id else r"\bxid\b"
                assert re.search(needed, condition), "\n".join((statement, *plan))
    await engine.dispose()


@pytest.mark.parametrize("analyzed", [False, True], ids=["without statistics", "with statistics"])
async def test_h117_foreign_numbers_are_found_by_an_index(fresh_database: FreshDatabase, analyzed: bool) -> None:
    """A copy is walked over once, in portions."""
    engine = create_async_engine(fresh_database("embedded").url())
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
    await _run(engine, _MANY.format("i % 16", ROUTE.id, 50_000))
    if analyzed:
        await _run(engine, _ANALYZE["postgresql"])
    page = {"event": str(UUID(int=0)), "route": 0, "version": 0, "oldest": "3", "limit": 2_000}
    async with engine.connect() as connection:
        await connection.execute(rebase._IN_ORDER)
        found = await connection.execute(text(f"EXPLAIN {rebase._EACH[OUTBOUND].forget.text}"), page)
        plan = "\n".join(row[0] for row in found)
    assert re.search(r"Limit .*\n +-> +Index Scan using uq_pillarbox_outbox_event", plan), plan
    assert "Seq Scan" not in plan, plan
    await engine.dispose()


async def _alone(fresh_database: FreshDatabase, *keys: str) -> tuple[LogStore, Lane]:
    """A lane of a log with these rows, in our hands."""
    store = LogStore(create_async_engine(fresh_database("embedded").url()))
    async with store._engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(store.register, [ROUTE])
        await connection.run_sync(store.append, [delivery(key) for key in keys])
    [lane] = await store.take("r", lease=30, wanted={ROUTE.id: 1})
    return store, lane


async def test_h122_only_keys_that_wait_leave_the_fast_path(fresh_database: FreshDatabase) -> None:
    """Beside rows that wait, a turn of other keys is two statements, and a retry that is due is found all the same."""
    store, lane = await _alone(fresh_database, "dead", "later", *(f"k{index}" for index in range(20)))
    page = await store.poll(lane, limit=2)
    failures = [Failure(page.fresh[0].id, 5, "no", None), Failure(page.fresh[1].id, 1, "not yet", 3600.0)]
    lane = await store.announce(lane, Batch(failures=failures, cursor=page.cursor), settle=False)
    assert len(lane.waiting) == 2
    with _recorded(store._engine, of="pillarbox_") as statements:
        for number in range(4):
            page = await store.poll(lane, limit=5)
            batch = Batch([row.id for row in page.fresh], cursor=page.cursor)
            assert (page.redo, len(batch.items)) == ((), 5)
            lane = await store.announce(lane, batch, settle=number > 0)
        lane = await store.settle(lane)
    assert len(statements) == 4 * 2 + 1
    await _run(store._engine, "UPDATE pillarbox_failures SET available_at = now() WHERE status = 'RETRYING'")
    page = await store.poll(lane, limit=5)
    assert [row.key for row in page.redo] == ["later"]
    lane = await store.announce(lane, Batch([row.id for row in page.redo], cursor=page.cursor), settle=False)
    lane = await store.settle(lane)
    assert [key.key for key in lane.waiting] == ["dead"]
    await store._engine.dispose()


async def test_h123_what_was_discarded_is_passed_in_turns_that_are_all_alike(fresh_database: FreshDatabase) -> None:
    rows, limit = 600, 50
    store, lane = await _alone(fresh_database, *(f"k{index}" for index in range(rows + 3)))
    engine = store._engine
    first, *_ = (await store.poll(lane, limit=1)).fresh
    kept = {first.id + 10, first.id + rows + 1, first.id + rows + 2}
    await _run(
        engine,
        "INSERT INTO pillarbox_requests (route, shard, row_id, action, audit) "
        f"SELECT route, shard, id, 'discard', 0 FROM pillarbox_outbox WHERE id <> ALL (ARRAY{sorted(kept)})",
    )
    turns, sent = list[int](), list[int]()
    while True:
        with _recorded(engine, of="pillarbox_") as statements:
            page = await store.poll(lane, limit=limit)
            items = [] if page.requests else [row.id for row in page.fresh]
            if not (items or page.requests or page.passed):
                break
            batch = Batch(items, requests=page.requests, cursor=None if page.requests else page.cursor)
            lane = await store.announce(lane, batch, settle=lane.announced is not None)
        for _, parameters in statements:
            assert max((len(it) for it in parameters if isinstance(it, list)), default=0) <= limit
        if items:
            assert [row.id for _, row in await store.rebuild(lane)] == items
        sent += items
        turns.append(len(statements))
    assert sent == sorted(kept)
    assert len(turns) == 2 * rows / limit + 1
    assert max(turns) <= 11
    await engine.dispose()


async def test_h123_a_run_of_requests_goes_through_all_deliveries_once(fresh_database: FreshDatabase) -> None:
    store, _ = await _alone(fresh_database, *(f"k{index}" for index in range(30)))
    selection = operations.Selection(operations.Action.DISCARD, Filter(route=ROUTE.name))
    run = operations.Run()
    with _recorded(store._engine, of="pillarbox_outbound_events") as statements:
        for _ in range(3):
            async with store._engine.begin() as connection:
                run = await connection.run_sync(operations.request, selection, Author("anna", "a flood"), run, 10)
    assert (run.requested, len(statements)) == (30, 1)
    await store._engine.dispose()


async def test_h124_failing_rows_are_written_without_a_look_at_those_that_wait(fresh_database: FreshDatabase) -> None:
    """The lane's row is locked meanwhile: a transaction that grows with what waits outlives the lease. All tenants use
    the same key here.
    """
    engine = create_async_engine(fresh_database("mariadb").url())
    store = QueueStore(engine)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(store.register, [ROUTE])
    [lane] = await store.take("r", lease=30, wanted={ROUTE.id: 1})
    looked: list[int] = []
    for waiting in (0, 3_000):
        async with engine.begin() as connection:
            await connection.run_sync(store.append, [delivery("k", tenant=f"w{index}") for index in range(waiting)])
            if waiting:
                await connection.run_sync(put, outbox.c.status == Status.PENDING, status=Status.PARKED)
            tenants = [f"{waiting}-{index}" for index in range(50)]
            await connection.run_sync(store.append, [delivery("k", tenant=tenant) for tenant in tenants])
        rows = [row.id for row in (await store.poll(lane, limit=100)).fresh]
        assert len(rows) == 50
        with _rows_looked_at(engine) as counted:
            lane = await store.announce(lane, Batch(rows), settle=lane.announced is not None)
            lane = await store.amend(lane, [Failure(row, 1, "no", 600.0) for row in rows])
            lane = await store.settle(lane)
        looked.append(sum(counted))
    few, many = looked
    assert 50 <= many <= 1.5 * few
    await engine.dispose()


@contextmanager
def _rows_looked_at(engine: AsyncEngine) -> Iterator[list[int]]:
    """How many rows MariaDB reads in each transaction."""
    counted: list[int] = []

    def so_far(connection: Connection) -> int:
        rows = connection.execute(text("SHOW SESSION STATUS LIKE 'Handler_read%'"))
        return sum(int(value) for _, value in rows)

    def begins(connection: Connection) -> None:
        counted.append(-so_far(connection))

    def ends(connection: Connection) -> None:
        counted[-1] += so_far(connection)

    event.listen(engine.sync_engine, "begin", begins)
    event.listen(engine.sync_engine, "commit", ends)
    try:
        yield counted
    finally:
        event.remove(engine.sync_engine, "begin", begins)
        event.remove(engine.sync_engine, "commit", ends)


_MANY = (
    "INSERT INTO pillarbox_outbox (event_id, event_type, route, shard, schema_version, topic, key, headers, body) "
    "SELECT gen_random_uuid(), 'a.b', {1}, {0}, 1, 'orders', 'k' || i, '{{}}', '' FROM generate_series(1, {2}) i"
)


async def _run(engine: AsyncEngine, statement: str) -> None:
    async with engine.begin() as connection:
        await connection.execute(text(statement))


async def _fill(engine: AsyncEngine, store: LogStore | QueueStore) -> None:
    """Much that was sent, a key with much behind a dead row, one that is due with a row behind it, and fresh rows."""
    is_log, last = engine.dialect.name == "postgresql", 0
    async with engine.begin() as connection:
        await connection.run_sync(store.register, [ROUTE])
        for keys, status, values in (
            ([f"k{index}" for index in range(5000)], Status.SENT, {}),
            (["stuck"], Status.FAILED, {}),
            (["stuck"] * 2000, Status.PARKED, {}),
            (["due"], Status.RETRYING, {"available_at": from_now(-1.0)}),
            (["due"], Status.PARKED, {}),
            ([f"new{index}" for index in range(200)], Status.PENDING, {}),
        ):
            await connection.run_sync(store.append, [delivery(key) for key in keys])
            written = outbox.c.id > last
            last = (await connection.execute(select(func.max(outbox.c.id)))).scalar_one()
            if status is not Status.PENDING and not (is_log and status is Status.SENT):
                await connection.run_sync(put, written, status=status, **values)
    if is_log:  # in a transaction that sees the end of the first
        passed = "(SELECT max(row_id) FROM pillarbox_failures) || ' ' || pg_current_snapshot()"
        await _run(engine, f"UPDATE pillarbox_lanes SET cursor = {passed}")


@contextmanager
def _recorded(engine: AsyncEngine, of: str = outbox.name) -> Iterator[list[tuple[str, Any]]]:
    """What the store asks about a table. Heard at the driver: not all of it goes through the engine."""
    statements: list[tuple[str, Any]] = []
    cursor = _CURSORS[engine.dialect.name]
    execute = cursor.execute

    def heard(statement: str, parameters: Any) -> None:
        if of in statement or unsent.name in statement:
            statements.append((statement, tuple(parameters)))

    def recording(self: Any, statement: str, parameters: Any = None) -> Any:
        heard(statement, parameters)
        return execute(self, statement, parameters)

    async def fetch(self: asyncpg.Connection, statement: str, *parameters: Any, **options: Any) -> Any:
        heard(statement, parameters)
        return await straight(self, statement, *parameters, **options)

    straight = asyncpg.Connection.fetch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cursor, "execute", recording)
        patch.setattr(asyncpg.Connection, "fetch", fetch)
        yield statements


@pytest.mark.parametrize("analyzed", ["never", "while they were parked", "now"])
async def test_h117_the_first_of_a_key_is_one_probe_however_many_wait(
    fresh_database: FreshDatabase, analyzed: str
) -> None:
    engine = create_async_engine(fresh_database("embedded").url())
    store, waiting = LogStore(engine), "pillarbox_failures"
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(store.register, [ROUTE])
        # Other tenants use the same key, and theirs are no probes more.
        tenants = [*(f"t{number}" for number in range(2_000)), *[None] * 2_000]
        await connection.run_sync(store.append, [delivery("k", tenant=tenant) for tenant in tenants])
    await _run(engine, _PARK)
    if analyzed == "while they were parked":
        await _run(engine, f"ANALYZE {waiting}")
    await _run(engine, f"UPDATE {waiting} SET status = 'RETRYING', available_at = now()")
    if analyzed == "now":
        await _run(engine, f"ANALYZE {waiting}")
    [lane] = await store.take("r", lease=30, wanted={ROUTE.id: 1})
    with _recorded(engine, of=waiting) as statements:
        await store.ready([ROUTE.id], relay="r")
        assert len((await store.poll(lane, limit=100)).redo) == 100
    firsts = [
        (statement, values) for statement, values in statements if f"{waiting} b" in statement.replace(" AS ", " ")
    ]
    assert len(firsts) > 1
    async with engine.connect() as connection:
        for statement, parameters in firsts:
            found = await connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)
            plan = [str(row[-1]) for row in found]
            probes = [pair for pair in pairwise(plan) if f"on {waiting} b" in pair[0]]
            assert probes, "\n".join(plan)
            for node, condition in probes:
                assert "->  Index" in node, "\n".join(plan)
                assert "COALESCE(tenant" in condition, "\n".join(plan)
    await engine.dispose()


_PARK = (
    "INSERT INTO pillarbox_failures (route, shard, row_id, tenant, key, status) "
    "SELECT route, shard, id, tenant, key, 'PARKED' FROM pillarbox_outbox"
)
