"""Leases on real databases: what only their clocks and transactions can show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from pillarbox import IntegrationEvent, Pillarbox, Route, clock
from pillarbox.errors import StoreError
from pillarbox.outbox import Batch, Failure, FailurePolicy, Lane, LaneName, shard_of
from pillarbox.stores import leases, sqlite, store_on
from pillarbox.stores.columns import from_now, now
from pillarbox.stores.leases import Leases
from pillarbox.stores.log import LogStore
from pillarbox.stores.log_failures import LogFailures
from pillarbox.stores.migrations import migrate
from pillarbox.stores.tables import lanes, relays
from pillarbox.testing.conformance.outbox import ROUTE, delivery
from pillarbox.transports.memory import MemoryTransport
from tests.relays import running, soon
from tests.servers import Database

pytestmark = pytest.mark.dialects

LEASE = 0.5
with_locks_on_rows = pytest.mark.parametrize("database", ["embedded", "mariadb"], indirect=True)


class Rung(IntegrationEvent, name="leases.bell.rung"):
    number: int


async def test_h30_a_lease_counts_from_the_moment_it_is_taken_however_old_the_transaction(database: Database) -> None:
    engine = create_async_engine(database.url())
    sqlite.configure_transactions(engine.sync_engine)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        await connection.run_sync(store_on(engine).register, [ROUTE])
    async with engine.begin() as connection:
        begun = (await connection.execute(select(now()))).scalar_one()
        while not (await connection.execute(select(from_now(-LEASE) > begun))).scalar_one():
            pass
        [lane] = await connection.run_sync(leases._take, "r", LEASE, {ROUTE.id: 1}, None)
        here = (lanes.c.route == lane.route.id, lanes.c.shard == lane.shard)
        assert (await connection.execute(select(lanes.c.locked_until > from_now(LEASE / 5)).where(*here))).scalar_one()
    await engine.dispose()


class Busy(LogFailures):
    def unpark_skipped(self) -> None:
        raise StoreError("the database is busy")


class Unready(LogStore):
    """Cannot do what is to be done once lanes are taken."""

    failures = Busy


class Stuck(Unready):
    """Nor let go of them."""

    async def release(self, *_: object, **__: object) -> None:
        raise StoreError("somebody else has locked them")


async def test_h45_lanes_that_could_not_be_made_ready_are_free_at_once(
    postgres_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert await Unready(engine).take("r", lease=60, wanted={ROUTE.id: 1}) == []
    assert "cannot be made ready, and is left: the database is busy" in caplog.text
    others = await Stuck(engine).take("r", lease=0.001, wanted={ROUTE.id: 2})
    assert [lane.shard for lane in others] == [1], "what can be had is had"
    [lane] = await store.take("another", lease=60, wanted={ROUTE.id: 1}, shards={ROUTE.id: [0]})
    assert [row.id for row in (await store.poll(lane, limit=10)).redo] == [behind]
    await engine.dispose()


@asynccontextmanager
async def locked(engine: AsyncEngine, name: LaneName) -> AsyncIterator[AsyncConnection]:
    """Somebody keeps the row of a lane in a transaction."""
    here = (lanes.c.route == name.route, lanes.c.shard == name.shard)
    async with engine.begin() as connection:
        await connection.execute(select(lanes.c.epoch).where(*here).with_for_update())
        yield connection


@with_locks_on_rows
class TestALaneThatSomebodyHasLocked:
    @pytest.fixture
    async def store(self, database: Database) -> AsyncIterator[Leases]:
        engine = create_async_engine(database.url())
        self.engine = engine
        async with engine.begin() as connection:
            await connection.run_sync(migrate)
            await connection.run_sync(store_on(engine).register, [ROUTE])
        store = store_on(engine)
        yield store
        await store.let_go()
        await engine.dispose()

    async def take(self, store: Leases) -> list[Lane]:
        return await store.take("r1", lease=60, wanted={ROUTE.id: 3})

    async def renewed(self, store: Leases, held: Sequence[Lane], lease: float = LEASE) -> list[bool | None]:
        kept = await store.renew("r1", held, lease=lease, serves=[])
        return [kept.get(lane.name) for lane in held]

    async def test_is_neither_renewed_nor_lost_and_no_other_one_waits_for_it(self, store: Leases) -> None:
        held = await self.take(store)
        async with locked(self.engine, held[1].name):
            assert await self.renewed(store, held) == [True, False, True]
        assert await self.renewed(store, held) == [True, True, True]

    async def test_is_lost_when_it_has_got_another_owner(self, store: Leases) -> None:
        held = await self.take(store)
        async with locked(self.engine, held[1].name) as connection:
            here = (lanes.c.route == held[1].route.id, lanes.c.shard == held[1].shard)
            await connection.execute(lanes.update().where(*here).values(epoch=lanes.c.epoch + 1))
            assert await self.renewed(store, held) == [True, False, True]
        assert await self.renewed(store, held) == [True, None, True]

    async def test_is_renewed_as_soon_as_it_is_free(self, store: Leases) -> None:
        """A lane is also busy with the writes of its own owner, and is not lost for that."""
        held = await self.take(store)
        async with locked(self.engine, held[1].name):
            renewing = asyncio.create_task(self.renewed(store, held, lease=600))
            there = select(func.count()).where(lanes.c.locked_until > from_now(300))
            async with self.engine.connect() as connection:
                while (await connection.execute(there)).scalar_one() < 2:
                    await connection.rollback()
        assert await renewing == [True, True, True]

    async def test_is_waited_for_together_with_all_others(self, store: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
        """However many somebody has locked, the leases of the rest are renewed in time."""
        held = await store.take("r1", lease=60, wanted={ROUTE.id: 16})
        left: list[float] = []
        wait_for = Leases._wait_for

        async def watched(self: Leases, few: Sequence[Lane], change: Any, until: float) -> dict[LaneName, bool]:
            left.append(until - clock.current().monotonic())
            return await wait_for(self, few, change, until)

        monkeypatch.setattr(Leases, "_wait_for", watched)
        async with self.engine.begin() as connection:
            await connection.execute(select(lanes.c.epoch).with_for_update())
            assert await self.renewed(store, held) == [False] * 16
        assert [seconds > 0.001 for seconds in left] == [True, False, False, False]

    async def test_is_not_released_and_no_other_one_waits_for_it(self, store: Leases) -> None:
        held = await self.take(store)
        async with locked(self.engine, held[1].name):
            with pytest.raises(StoreError, match=f"somebody else has locked {held[1]}"):
                await store.release("r1", held)
            taken = await store.take("r2", lease=60, wanted={ROUTE.id: 3}, shards={ROUTE.id: [it.shard for it in held]})
        assert [lane.shard for lane in taken] == [held[0].shard, held[2].shard]
        assert await self.renewed(store, held) == [None, True, None]


@with_locks_on_rows
async def test_h49_relays_that_come_and_go_do_not_wait_for_each_other(database: Database) -> None:
    """MySQL locks all rows that a DELETE looks at, and two relays that wait for each other are a deadlock."""
    engine = create_async_engine(database.url())
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
    store, long_dead = store_on(engine), {"expires_at": from_now(-7200.0), "serves": "[]"}
    async with engine.begin() as connection:
        await connection.execute(insert(relays).values(name="dead", **long_dead))
    async with engine.begin() as coming:
        await coming.execute(insert(relays).values(name="r1", expires_at=from_now(5.0), serves="[]"))
        async with asyncio.timeout(5):
            await store.renew("r2", [], lease=LEASE, serves=[])
            await store.release("r2", [], leaving=True)
    async with engine.connect() as connection:
        assert (await connection.scalars(select(relays.c.name))).all() == ["r1"]
    await engine.dispose()


@with_locks_on_rows
async def test_a_lane_that_somebody_has_locked_costs_a_relay_no_other_one(database: Database) -> None:
    """For longer than a lease, and with something to send there."""
    engine = create_async_engine(database.url())
    broker = MemoryTransport()
    routes = [Route("leases.**", to="broker", topic="bells")]
    async with Pillarbox(engine, transports={"broker": broker}, routes=routes) as box:
        await box.migrate()

        async def ring(number: int) -> None:
            async with box.unit_of_work() as uow:
                for shard in range(16):
                    uow.publish(Rung(number=number), key=_KEYS[shard])

        await ring(0)
        relay = box.relay(name="r1", lease=1.0)
        async with running(relay):
            await soon(lambda: len(broker.sent("bells")) == 16)
            async with engine.connect() as connection:
                (route,) = (await connection.scalars(select(lanes.c.route).distinct())).all()
                before = {*await connection.execute(select(lanes.c.shard, lanes.c.epoch))}
            async with locked(engine, LaneName(route, 3)):
                async with engine.connect() as connection:
                    begun = (await connection.execute(select(now()))).scalar_one()
                await ring(1)
                over = select(func.count()).where(lanes.c.locked_until > from_now(), from_now(-3.0) > begun)
                async with asyncio.timeout(30):  # it never comes if the other leases have ended
                    alive = 0
                    while alive < 15:
                        async with engine.connect() as connection:
                            alive = (await connection.execute(over)).scalar_one()
                assert len(broker.sent("bells")) == 31
            await soon(lambda: len(broker.sent("bells")) == 32)
            async with engine.connect() as connection:
                after = {*await connection.execute(select(lanes.c.shard, lanes.c.epoch))}
        assert {shard for shard, _ in after - before} <= {3}
    await engine.dispose()


_KEYS = {shard_of(key, 16): key for key in map(str, range(500))}
