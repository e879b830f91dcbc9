"""The first write after a deployment makes routes known: it keeps nobody waiting, and itself never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, func, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import sessionmaker

from pillarbox import FailurePolicy, Pillarbox, Route
from pillarbox.outbox import SHARDS
from pillarbox.stores import apart
from pillarbox.stores.migrations import migrate
from pillarbox.stores.pool import own_pool
from pillarbox.stores.tables import lanes, routes
from pillarbox.transports.memory import MemoryTransport
from tests.conftest import FreshDatabase
from tests.domain import OrderNoted, order_box, written
from tests.servers import Database


@pytest.fixture
async def database(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> Database:
    """Migrated, and no route is known."""
    database = fresh_database(request.param)
    async with Pillarbox(database.url()) as box:
        await box.migrate()
    return database


on_servers = pytest.mark.parametrize("database", ["embedded", "mariadb"], indirect=True)


async def registered(engine: AsyncEngine) -> tuple[Any, ...]:
    """How many routes and lanes everybody sees."""
    async with engine.connect() as connection:
        counts = [await connection.scalar(select(func.count()).select_from(table)) for table in (routes, lanes)]
    return tuple(counts)


async def publish(box: Pillarbox) -> None:
    async with asyncio.timeout(30), box.unit_of_work() as uow:
        uow.publish(OrderNoted(note="second"), key="k")


@asynccontextmanager
async def alone(url: str, **options: Any) -> AsyncIterator[Pillarbox]:
    """A box whose pool has one connection."""
    engine = create_async_engine(url, pool_size=1, max_overflow=0, pool_timeout=5)
    async with order_box(engine, **options) as box:
        yield box
    await engine.dispose()


@on_servers
async def test_h126_the_first_write_of_another_process_does_not_wait_for_a_transaction_that_stays_open(
    database: Database,
) -> None:
    async with alone(database.url()) as one, order_box(database.url()) as other:
        async with one.unit_of_work() as uow:
            uow.publish(OrderNoted(note="first"), key="k")
            await uow.flush()
            await publish(other)
            assert await written(other.engine) == ["noted"]
        assert await written(other.engine) == ["noted", "noted"]


@on_servers
async def test_h126_nor_does_it_when_a_route_has_changed(database: Database) -> None:
    async with order_box(database.url()) as before:
        await publish(before)

    def deployed() -> Pillarbox:
        route = Route("tests.order.*", to="broker", topic="tests.order.events", on_failure=FailurePolicy.SKIP)
        return Pillarbox(database.url(), transports={"broker": MemoryTransport()}, routes=[route])

    async with deployed() as one, deployed() as other, one.unit_of_work() as uow:
        uow.publish(OrderNoted(note="first"), key="k")
        await uow.flush()
        await publish(other)


@on_servers
async def test_h126_routes_stay_known_if_the_first_write_is_rolled_back(database: Database) -> None:
    async with alone(database.url()) as box:
        with pytest.raises(RuntimeError):
            async with box.unit_of_work() as uow:
                uow.publish(OrderNoted(note="x"), key="k")
                await uow.flush()
                raise RuntimeError
        assert await registered(box.engine) == (1, SHARDS)
        await publish(box)
        assert await written(box.engine) == ["noted"]


@on_servers
async def test_h126_first_writes_at_the_same_time(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    transactions: list[Engine] = []

    def counted(engine: Engine) -> Engine:
        transactions.append(engine)
        return own_pool(engine)

    monkeypatch.setattr(apart, "own_pool", counted)
    async with order_box(database.url()) as one, order_box(database.url()) as other:
        async with asyncio.TaskGroup() as tasks:
            for box in [one, other] * 4:
                tasks.create_task(publish(box))
        assert await registered(one.engine) == (1, SHARDS)
        assert len(await written(one.engine)) == 8
    assert len(transactions) == 2, "each process needs one"


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
async def test_h126_a_transaction_that_locks_what_it_reads(database: Database) -> None:
    """At SERIALIZABLE, MariaDB locks every row that a transaction has looked at."""
    engine = create_async_engine(database.url(), isolation_level="SERIALIZABLE")
    async with order_box(engine) as one, order_box(database.url()) as other, one.unit_of_work() as uow:
        uow.publish(OrderNoted(note="first"), key="k")
        await uow.flush()
        await publish(other)
        assert (await other.relay().drain()).sent == 1
    await engine.dispose()


async def test_h126_a_schema_that_is_set_for_each_transaction(fresh_database: FreshDatabase) -> None:
    """Another connection finds the tables of another service, and would leave this outbox without lanes."""
    database = fresh_database("embedded")
    engine, inside = create_async_engine(database.url()), "SET LOCAL search_path = shop"
    event.listen(engine.sync_engine, "begin", lambda connection: connection.exec_driver_sql(inside))
    async with order_box(engine) as box:
        async with engine.begin() as connection:
            await connection.execute(text("CREATE SCHEMA shop"))
            await connection.run_sync(migrate)
        await publish(box)
        async with engine.connect() as connection:
            for place, count in {"shop": SHARDS, "public": 0}.items():
                found = await connection.scalar(text(f"SELECT count(*) FROM {place}.pillarbox_lanes"))
                assert (place, found) == (place, count)
    await engine.dispose()


@pytest.mark.parametrize("database", ["embedded"], indirect=True)
async def test_h126_what_could_not_be_done_apart_is_not_tried_by_every_transaction(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_engine: Engine) -> Engine:
        raise ConnectionError("too many connections")

    monkeypatch.setattr(apart, "own_pool", refuse)
    async with order_box(database.url()) as box:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="rolled back"):
                async with box.unit_of_work() as uow:
                    uow.publish(OrderNoted(note="x"), key="k")
                    await uow.flush()
                    raise RuntimeError("rolled back")
        await publish(box)
        assert await registered(box.engine) == (1, SHARDS)
    [warning] = [it.message for it in caplog.records if it.levelname == "WARNING"]
    assert warning.endswith("as none apart from it succeeded: ConnectionError: too many connections")


@pytest.mark.parametrize("bound", ["an engine", "a connection"])
@pytest.mark.parametrize(
    ("database", "driver"),
    [("system", "psycopg"), ("system", "psycopg2"), ("mariadb", "pymysql")],
    indirect=["database"],
)
async def test_h126_a_session_that_blocks(database: Database, driver: str, bound: str) -> None:
    engine = create_engine(database.url(driver), pool_size=1, max_overflow=0)
    async with order_box(database.url()) as box, AsyncExitStack() as stack:
        bind = stack.enter_context(engine.connect()) if bound == "a connection" else engine
        with box.bind(sessionmaker(bind))() as session:
            box.publish(session, OrderNoted(note="first"), key="k")
            session.flush()
            await publish(box)
            assert await written(box.engine) == ["noted"]
            session.commit()
        if isinstance(bind, Connection):
            bind.commit()
        assert await written(box.engine) == ["noted", "noted"]
    engine.dispose()


@pytest.mark.parametrize(("database", "memory"), [("sqlite", False), ("sqlite", True)], indirect=["database"])
async def test_h126_a_database_with_one_writer_registers_in_the_transaction(database: Database, memory: bool) -> None:
    url = "sqlite+aiosqlite://" if memory else database.url()
    async with order_box(url) as box:
        async with box.engine.begin() as connection:
            await connection.run_sync(migrate)
        await publish(box)
        assert await registered(box.engine) == (1, SHARDS)


async def test_h126_tables_that_only_this_transaction_sees(fresh_database: FreshDatabase) -> None:
    """As in a test that rolls back all that it does."""
    database = fresh_database("embedded", empty=True)
    engine = create_engine(database.url("psycopg"))
    async with order_box(database.url()) as box:
        with engine.connect() as connection:
            migrate(connection)
            with box.bind(sessionmaker(connection))() as session:
                box.publish(session, OrderNoted(note="x"), key="k")
                session.commit()
            assert connection.scalar(text("SELECT count(*) FROM outbox_events")) == 1
            connection.rollback()
    engine.dispose()


@pytest.mark.parametrize("database", ["pgbouncer"], indirect=True)
async def test_h126_a_pooler_that_has_no_second_connection(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "SECONDS", 0.2)
    async with alone(database.url(), slow_after=None) as box, AsyncExitStack() as others:
        async with box.unit_of_work() as uow:
            await uow.session.execute(text("SELECT 1"))
            for _ in range(database.server.connections - 1):  # type: ignore[attr-defined]
                engine = create_async_engine(database.url())
                others.push_async_callback(engine.dispose)
                connection = await others.enter_async_context(engine.begin())
                await connection.execute(text("SELECT 1"))
            uow.publish(OrderNoted(note="first"), key="k")
        await others.aclose()
        assert await written(box.engine) == ["noted"]
        assert await registered(box.engine) == (1, SHARDS)
