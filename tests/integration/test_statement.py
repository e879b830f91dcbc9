"""Statements that go straight to the driver fail as others do, and leave no broken connection behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from sqlalchemy import event, func, select, text
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox.errors import NotMigratedError
from pillarbox.outbox import Batch
from pillarbox.stores import turns
from pillarbox.stores.log import LogStore
from pillarbox.stores.migrations import migrate
from pillarbox.stores.statement import DirectStatement
from pillarbox.stores.tables import outbox
from pillarbox.testing.conformance.outbox import ROUTE, delivery
from tests.conftest import FreshDatabase


@pytest.fixture(params=["asyncpg", "psycopg"])
async def engine(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(fresh_database("embedded").url(request.param), pool_size=1, max_overflow=0)
    yield engine
    await engine.dispose()


async def test_an_error_is_one_of_sqlalchemy_and_costs_the_connection(engine: AsyncEngine) -> None:
    before = await _backend(engine)
    with pytest.raises(ProgrammingError, match="nowhere"):
        await LogStore(engine).autocommit(DirectStatement(text("SELECT * FROM nowhere")).fetch, {})
    assert await _backend(engine) != before


async def test_a_changed_table_is_an_error_once_at_most(engine: AsyncEngine) -> None:
    """A prepared statement knows the types of before. asyncpg forgets it by itself."""
    store, look = LogStore(engine), DirectStatement(text("SELECT * FROM shifting"))
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE shifting AS SELECT 1 AS it"))
    for _ in range(8):  # psycopg prepares what it has seen often
        await store.autocommit(look.fetch, {})
    other = create_async_engine(engine.url)
    async with other.begin() as connection:
        await connection.execute(text("ALTER TABLE shifting ALTER it TYPE text"))
    await other.dispose()
    if engine.driver == "psycopg":
        with pytest.raises(DBAPIError, match="cached"):
            await store.autocommit(look.fetch, {})
    assert [[*row] for row in await store.autocommit(look.fetch, {})] == [["1"]]


async def test_nothing_is_written_into_a_transaction_that_its_owner_has_given_up(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(LogStore(engine).register, [ROUTE])
    async with engine.connect() as connection:
        async with connection.begin() as transaction:
            await transaction.rollback()
        await connection.run_sync(LogStore(engine).append, [delivery("ghost")])
        assert connection.in_transaction()  # of SQLAlchemy's knowledge, so that nobody else commits it
        await connection.rollback()
    async with engine.connect() as connection:
        assert (await connection.execute(select(func.count()).select_from(outbox))).scalar_one() == 0


async def test_whoever_watches_the_engine_sees_what_a_transaction_writes(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(LogStore(engine).register, [ROUTE])
    seen: list[str] = []
    for watched in (False, True):
        if watched:
            event.listen(engine.sync_engine, "before_cursor_execute", lambda *call: seen.append(call[2]))
        async with engine.begin() as connection:
            await connection.run_sync(LogStore(engine).append, [delivery("a")])
        assert [statement for statement in seen if "INSERT INTO pillarbox_outbox" in statement] == seen
        assert len(seen) == watched
    async with engine.connect() as connection:
        assert (await connection.execute(select(func.count()).select_from(outbox))).scalar_one() == 2


async def test_a_connection_that_is_lost_while_writing_fails_the_transaction(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(LogStore(engine).register, [ROUTE])
    other = create_async_engine(engine.url)
    with pytest.raises(DBAPIError) as failed:
        async with engine.begin() as connection:
            pid = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one()
            async with other.begin() as killer:
                await killer.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
            await connection.run_sync(LogStore(engine).append, [delivery("a")])
    assert failed.value.connection_invalidated
    await other.dispose()
    async with engine.connect() as connection:
        assert (await connection.execute(select(func.count()).select_from(outbox))).scalar_one() == 0


async def test_a_lost_connection_is_replaced(engine: AsyncEngine) -> None:
    store = LogStore(engine)
    die = DirectStatement(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    with pytest.raises(DBAPIError):
        await store.autocommit(die.fetch, {})
    [(answer,)] = await store.autocommit(DirectStatement(text("SELECT CAST(:it AS int)")).fetch, {"it": 7})
    assert answer == 7


@pytest.fixture
async def keeping(fresh_database: FreshDatabase) -> AsyncIterator[LogStore]:
    """A store that has kept a connection, which takes statements at once."""
    engine = create_async_engine(fresh_database("embedded", empty=True).url(), pool_size=8)
    store = LogStore(engine)
    store.keep()
    await store.fetch(PID, {})
    yield store
    await store.let_go()
    assert engine.pool.status().endswith("Current Checked out connections: 0")
    await engine.dispose()


PID = DirectStatement(text("SELECT pg_backend_pid()"))


async def test_a_kept_connection_takes_statements_without_a_greenlet(
    keeping: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not so one whose prepared statements somebody wants to name, as behind PgBouncer."""
    [(before,)] = await keeping.fetch(PID, {})
    with monkeypatch.context() as patch:
        patch.setattr(turns, "greenlet_spawn", None)
        assert [[*row] for row in await keeping.fetch(PID, {})] == [[before]]
    named = create_async_engine(
        keeping._engine.url, connect_args={"prepared_statement_name_func": lambda: f"ours_{uuid4()}"}, pool_size=8
    )
    store = LogStore(named)
    store.keep()
    names = DirectStatement(text("SELECT name FROM pg_prepared_statements"))
    for _ in range(3):
        assert all(name.startswith("ours_") for (name,) in await store.fetch(names, {}))
    await store.let_go()
    await named.dispose()


async def test_what_fails_at_once_is_an_error_of_sqlalchemy_and_costs_the_connection(keeping: LogStore) -> None:
    [(before,)] = await keeping.fetch(PID, {})
    with pytest.raises(ProgrammingError, match="nowhere"):
        await keeping.fetch(DirectStatement(text("SELECT * FROM nowhere")), {})
    [(after,)] = await keeping.fetch(PID, {})
    assert after != before
    with pytest.raises(DBAPIError) as lost:
        await keeping.fetch(DirectStatement(text("SELECT pg_terminate_backend(pg_backend_pid())")), {})
    assert lost.value.connection_invalidated
    assert await keeping.fetch(PID, {})
    with pytest.raises(NotMigratedError):
        await keeping.fetch(DirectStatement(text("SELECT * FROM pillarbox_lanes")), {})


async def test_transactions_do_not_wait_for_connections_that_others_are_to_get(
    fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "HUNG_SECONDS", 3.0)
    engine = create_async_engine(fresh_database("embedded").url(), pool_size=turns.AT_A_TIME, max_overflow=0)
    store = LogStore(engine)
    store.keep()
    slow = DirectStatement(text("SELECT pg_sleep(0.2)"))
    working = [asyncio.ensure_future(store.autocommit(slow.fetch, {})) for _ in range(turns.AT_A_TIME)]
    await asyncio.sleep(0)
    working += [asyncio.ensure_future(store.transaction(PID.fetch, {})) for _ in range(turns.AT_A_TIME)]
    await asyncio.sleep(0)
    working += [asyncio.ensure_future(store.fetch(PID, {})) for _ in range(turns.AT_A_TIME)]
    assert len(await asyncio.gather(*working)) == len(working)
    await store.let_go()
    await engine.dispose()


async def test_what_hangs_or_is_cancelled_leaves_no_connection_behind(
    keeping: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_ever = DirectStatement(text("SELECT pg_sleep(600)"))
    [(before,)] = await keeping.fetch(PID, {})
    with monkeypatch.context() as patch:
        patch.setattr(turns, "HUNG_SECONDS", 0.1)
        with pytest.raises(TimeoutError):
            await keeping.fetch(for_ever, {})
    [(after,)] = await keeping.fetch(PID, {})
    assert after != before
    waiting = asyncio.ensure_future(keeping.fetch(for_ever, {}))
    async with keeping._engine.connect() as watching:
        asleep = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'")
        while (await watching.execute(asleep)).scalar_one() == 0:
            await watching.rollback()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    [(last,)] = await keeping.fetch(PID, {})
    assert last != after


async def test_a_relaxed_announcement_waits_for_no_disk_and_everything_after_it_does(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby that never answers lets every COMMIT wait that must be durable."""
    monkeypatch.setattr(turns, "HUNG_SECONDS", 1.0)
    store = LogStore(engine)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(store.register, [ROUTE])
        await connection.run_sync(store.append, [delivery("a"), delivery("b")])
    [lane] = await store.take("r", lease=60, wanted={ROUTE.id: 1})
    await _configure(engine, "synchronous_standby_names", "nobody")
    try:
        while await _commits(engine):
            pass
        announced = lane
        for settles in (False, True):
            page = await store.poll(announced, limit=1)
            batch = Batch(items=[row.id for row in page.fresh], cursor=page.cursor, relaxed=True)
            announced = await store.announce(announced, batch, settle=settles)
        level = await store.autocommit(DirectStatement(text("SHOW synchronous_commit")).fetch, {})
        assert [*level[0]] == ["on"]
        with pytest.raises(TimeoutError):
            await store.settle(announced)
    finally:
        await _configure(engine, "synchronous_standby_names", "")


async def _commits(engine: AsyncEngine) -> bool:
    try:
        async with asyncio.timeout(0.3), engine.begin() as connection:
            await connection.execute(text("SELECT pg_logical_emit_message(true, 'test', 'x')"))
    except TimeoutError:
        return False
    return True


async def _backend(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        return int((await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one())


async def _configure(engine: AsyncEngine, name: str, value: str) -> None:
    async with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        await connection.execute(text(f"ALTER SYSTEM SET {name} = '{value}'"))
        await connection.execute(text("SELECT pg_reload_conf()"))
