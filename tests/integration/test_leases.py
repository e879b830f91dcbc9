"""Leases on real databases: what only their clocks and transactions can show."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox.stores import leases, sqlite
from pillarbox.stores.columns import from_now, now
from pillarbox.stores.migrations import migrate
from pillarbox.stores.queue import QueueStore
from pillarbox.stores.tables import lanes
from pillarbox.testing.conformance.outbox import ROUTE
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
