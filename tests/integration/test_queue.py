"""The queue on MariaDB, where a statement locks every row that it reads: none waits for rows of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from sqlalchemy import Executable, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox.outbox import Batch, Failure, Lane, Status
from pillarbox.stores import retention
from pillarbox.stores.migrations import migrate
from pillarbox.stores.queue import QueueStore
from pillarbox.stores.retention import RowKey
from pillarbox.stores.tables import failures, outbox, requests
from pillarbox.testing.conformance.outbox import ROUTE, delivery
from tests.conftest import FreshDatabase
from tests.servers import Database

PATIENCE = 5.0
"""Seconds after which a statement certainly waits for a transaction that is open: InnoDB waits for fifty."""


@pytest.fixture
async def engine(mariadb_database: Database) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(mariadb_database.url())
    yield engine
    await engine.dispose()


@pytest.fixture
async def store(engine: AsyncEngine) -> QueueStore:
    store = QueueStore(engine)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(store.register, [ROUTE])
    return store


async def _write(engine: AsyncEngine, store: QueueStore, *keys: str, shard: int = 0) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(store.append, [delivery(key, shard=shard) for key in keys])


async def _take(store: QueueStore, shard: int = 0) -> Lane:
    [lane] = await store.take("r", lease=60, wanted={ROUTE.id: 1}, shards={ROUTE.id: [shard]})
    return lane


async def test_h65_a_lane_does_not_wait_for_requests_that_are_written_for_another_one(
    engine: AsyncEngine, store: QueueStore
) -> None:
    await _write(engine, store, "a", "b", "c")
    await _write(engine, store, "d", shard=1)
    async with engine.connect() as connection:
        *here, there = (await connection.execute(select(outbox.c.id).order_by(outbox.c.id))).scalars()

    def request(row: int, shard: int) -> Executable:
        return insert(requests).values(route=ROUTE.id, shard=shard, row_id=row, action="discard", audit=0)

    async with engine.begin() as connection:
        for row in here:
            await connection.execute(request(row, 0))
    lane = await _take(store)
    page = await store.poll(lane, limit=10)
    async with engine.begin() as somebody:
        await somebody.execute(request(there, 1))
        async with asyncio.timeout(PATIENCE):
            await store.announce(lane, Batch(requests=page.requests), settle=False)
    async with engine.connect() as connection:
        assert (await connection.execute(select(requests.c.row_id))).scalars().all() == [there]


async def test_what_is_pruned_does_not_wait_for_writers(engine: AsyncEngine, store: QueueStore) -> None:
    await _write(engine, store, *(f"k{number}" for number in range(100)))
    async with engine.begin() as connection:
        await connection.execute(update(outbox).values(status=Status.SENT))
        rows = (await connection.execute(select(outbox))).all()
        edited = {"status": "SENT", "event_id": uuid4(), "row_id": rows[0].id}
        await connection.execute(insert(failures).values(route=ROUTE.id, shard=0, key="k0", **edited))
    keys = [RowKey(row.id, row.event_id, row.route, row.schema_version, 0) for row in rows]
    async with engine.begin() as writer:
        await writer.run_sync(store.append, [delivery("fresh")])
        async with asyncio.timeout(PATIENCE), engine.begin() as connection:
            assert await connection.run_sync(retention.remove, keys) == 100
    async with engine.connect() as connection:
        assert await connection.scalar(select(func.count()).select_from(failures)) == 0
        assert await connection.scalar(select(func.count()).select_from(outbox)) == 1


async def test_an_error_is_kept_whatever_the_character_set_of_the_database(fresh_database: FreshDatabase) -> None:
    database = fresh_database("mariadb", empty=True)
    engine = create_async_engine(database.url())
    async with engine.connect() as connection:
        await connection.execute(text(f"ALTER DATABASE `{database.name}` CHARACTER SET latin1"))
    await engine.dispose()
    store = QueueStore(engine)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(store.register, [ROUTE])
    await _write(engine, store, "a")
    lane = await _take(store)
    [row] = (await store.poll(lane, limit=1)).fresh
    await store.announce(lane, Batch(failures=[Failure(row.id, 1, "żółć 😀 'bad'", 3.0)]), settle=False)
    async with engine.connect() as connection:
        assert await connection.scalar(select(failures.c.last_error)) == "żółć 😀 'bad'"
    await engine.dispose()
