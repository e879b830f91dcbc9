"""Leases on real databases: what only their clocks and transactions can show."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from sqlalchemy import select
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox.errors import StoreError
from pillarbox.outbox import Batch, Failure, FailurePolicy
from pillarbox.stores import leases, sqlite
from pillarbox.stores.columns import from_now, now
from pillarbox.stores.log import LogStore
from pillarbox.stores.migrations import migrate
from pillarbox.stores.queue import QueueStore
from pillarbox.stores.tables import lanes
from pillarbox.testing.conformance.outbox import ROUTE, delivery
from tests.servers import Database

LEASE = 0.5


async def test_h30_a_lease_counts_from_the_moment_it_is_taken_however_old_the_transaction(database: Database) -> None:
    engine = create_async_engine(database.url())
    sqlite.put_right(engine.sync_engine)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(QueueStore(engine).register, [ROUTE])
    async with engine.begin() as connection:
        begun = (await connection.execute(select(now()))).scalar_one()
        while not (await connection.execute(select(from_now(-LEASE) > begun))).scalar_one():
            pass
        [lane] = await connection.run_sync(leases._take, "r", LEASE, {ROUTE.id: 1}, None)
        here = (lanes.c.route == lane.route.id, lanes.c.shard == lane.shard)
        assert (await connection.execute(select(lanes.c.locked_until > from_now(LEASE / 5)).where(*here))).scalar_one()
    await engine.dispose()


class Unready(LogStore):
    """Cannot do what is to be done once lanes are taken."""

    def free_parked(self, *_: object) -> None:
        raise StoreError("the database is busy")


async def test_h45_lanes_that_could_not_be_made_ready_are_free_at_once(postgres_database: Database) -> None:
    engine = create_async_engine(postgres_database.url())
    store = LogStore(engine)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(store.register, [ROUTE])
        await connection.run_sync(store.append, [delivery("a"), delivery("a")])
    [lane] = await store.take("r", lease=60, wanted={ROUTE.id: 1})
    page = await store.poll(lane, limit=10)
    dead, behind = (row.id for row in page.fresh)
    batch = Batch(failures=[Failure(dead, 5, "no", None)], parked=[behind], cursor=page.cursor)
    await store.release("r", [await store.announce(lane, batch, settle=False)])
    async with engine.begin() as connection:
        await connection.run_sync(store.register, [replace(ROUTE, on_failure=FailurePolicy.SKIP)])
    with pytest.raises(StoreError, match="the database is busy"):
        await Unready(engine).take("r", lease=60, wanted={ROUTE.id: 1})
    [lane] = await store.take("another", lease=60, wanted={ROUTE.id: 1}, shards={ROUTE.id: [0]})
    assert [row.id for row in (await store.poll(lane, limit=10)).redo] == [behind]
    await engine.dispose()
