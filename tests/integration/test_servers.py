"""The servers that other tests rely on: each kind, through each driver, and a new database each time."""

from __future__ import annotations

import pytest
import redis.asyncio
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox.stores.migrations import migrate
from tests.conftest import FreshDatabase
from tests.servers import Database

pytestmark = pytest.mark.dialects

ASYNC_DRIVERS = ("asyncpg", "psycopg", "asyncmy", "aiomysql", "aiosqlite")


def test_a_database_is_new_and_empty(empty_database: Database) -> None:
    engine = create_engine(empty_database.url(empty_database.server.drivers[-1]))
    with engine.begin() as connection:
        assert inspect(connection).get_table_names() == []
        connection.execute(text("CREATE TABLE here (id INTEGER)"))
    engine.dispose()


def test_a_database_that_is_migrated_already_is_nobody_elses(fresh_database: FreshDatabase, database: Database) -> None:
    def install_id(of: Database) -> object:
        engine = create_engine(of.url(of.server.drivers[-1]))
        with engine.begin() as connection:
            migrate(connection)
            found = connection.execute(text("SELECT install_id FROM pillarbox_meta")).scalar_one()
        engine.dispose()
        return found

    assert install_id(database) != install_id(fresh_database(database.kind))


def test_two_databases_know_nothing_of_each_other(fresh_database: FreshDatabase, database: Database) -> None:
    other = fresh_database(database.kind)
    assert other.url() != database.url()
    assert other.is_postgres == (database.kind not in {"mariadb", "sqlite"})


async def test_the_usual_driver_of_each_kind_is_async(database: Database) -> None:
    engine = create_async_engine(database.url())
    async with engine.connect() as connection:
        assert await connection.scalar(text("SELECT 1")) == 1
    await engine.dispose()


async def test_every_driver_connects(database: Database) -> None:
    for driver in database.server.drivers:
        if driver in ASYNC_DRIVERS:
            engine = create_async_engine(database.url(driver))
            async with engine.connect() as connection:
                assert await connection.scalar(text("SELECT 'ünïcode'")) == "ünïcode"
            await engine.dispose()
        else:
            sync_engine = create_engine(database.url(driver))
            with sync_engine.connect() as sync_connection:
                assert sync_connection.scalar(text("SELECT 'ünïcode'")) == "ünïcode"
            sync_engine.dispose()


async def test_a_test_that_forgot_a_connection_does_not_block_the_drop(
    database: Database, request: pytest.FixtureRequest
) -> None:
    engine = create_engine(database.url(database.server.drivers[-1]))
    request.addfinalizer(engine.dispose)
    connection = engine.connect()
    request.addfinalizer(connection.invalidate)
    connection.execute(text("CREATE TABLE held (id INTEGER)"))
    connection.execute(text("INSERT INTO held VALUES (1)"))
    database.server.drop(database.name)


async def test_redis_is_empty(redis_url: str) -> None:
    async with redis.asyncio.from_url(redis_url) as client:
        assert await client.dbsize() == 0
        await client.set("here", 1)
