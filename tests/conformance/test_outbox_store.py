"""Every store against the same promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, ClassVar, cast
from uuid import UUID, uuid4

import pytest
from sqlalchemy import ColumnElement, Executable, and_, delete, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from pillarbox.outbox import (
    INBOUND,
    OUTBOUND,
    Batch,
    Delivery,
    Direction,
    Failure,
    LaneName,
    RouteRecord,
    Status,
    stable_hash,
)
from pillarbox.stores import sqlite
from pillarbox.stores.buffer import Buffer
from pillarbox.stores.cdc import CdcStore
from pillarbox.stores.columns import from_now
from pillarbox.stores.feed import Feed
from pillarbox.stores.inspection import VIEWS
from pillarbox.stores.log import LogStore
from pillarbox.stores.migrations import migrate
from pillarbox.stores.pgoutput import Streamed
from pillarbox.stores.queue import QueueStore
from pillarbox.stores.tables import claims, deliveries, lanes, meta, metadata, relays, requests, tenants
from pillarbox.testing.conformance.detours import DetourContract
from pillarbox.testing.conformance.outbox import LEASE, ROUTE, SKIPPING, OutboxStoreContract, World, delivery
from tests.deliveries import put_in
from tests.memory.log import MemoryLogStore
from tests.memory.store import MemoryStore
from tests.relays import soon
from tests.servers import QUEUES, Database, Server, Servers


class MemoryWorld(World):
    def __init__(self, store: MemoryStore) -> None:
        self.store: MemoryStore = store

    async def register(self, *records: RouteRecord) -> int:
        return self.store.register(None, records)

    async def append(self, deliveries: Sequence[Delivery]) -> None:
        self.store.append(None, deliveries)

    async def status(self, row: int) -> Status:
        return self.store.status_of(row)

    async def tamper(self, row: int) -> None:
        self.store._move(row, Status.DISCARDED)

    async def request(self, row: int, action: str, *, body: bytes | None = None, event_id: UUID | None = None) -> int:
        return self.store.request(row, action, body=body, event_id=event_id)

    async def pause_lane(self, name: LaneName, paused: bool = True) -> None:
        self.store.pause_lane(name, paused)

    async def pause_tenant(self, tenant: str, paused: bool = True) -> None:
        self.store.pause_tenant(tenant, paused)

    async def set_rate(self, rate: float | None, *, lane: LaneName | None = None, tenant: str | None = None) -> None:
        self.store.set_rate(rate, lane=lane, tenant=tenant)

    async def trouble(self, name: LaneName) -> str | None:
        trouble = self.store.trouble_of(name)
        return None if trouble is None else trouble.reason


class Everything:
    """All lanes, whoever owns them."""

    def __contains__(self, lane: object) -> bool:
        return True


class DatabaseWorld(World):
    def __init__(self, engine: AsyncEngine, store: LogStore | QueueStore) -> None:
        self.engine = engine
        self.store: LogStore | QueueStore = store
        self.rows = deliveries[store.table]

    async def register(self, *records: RouteRecord) -> int:
        async with self.engine.begin() as connection:
            return await connection.run_sync(self.store.register, records)

    async def append(self, deliveries: Sequence[Delivery]) -> None:
        async with self.engine.begin() as connection:
            await self.write(connection, deliveries)

    async def write(self, connection: AsyncConnection, deliveries: Sequence[Delivery]) -> None:
        """In a transaction of the caller."""
        await connection.run_sync(self.store.append, deliveries)
        if self.store.table == INBOUND and deliveries:
            await connection.execute(insert(claims), [claim_of(row) for row in deliveries])

    async def status(self, row: int) -> Status:
        async with self.engine.connect() as connection:
            view = VIEWS[Direction.INBOUND if self.store.table == INBOUND else Direction.OUTBOUND].events
            return Status((await connection.execute(select(view.c.status).where(view.c.id == row))).scalar_one())

    async def tamper(self, row: int) -> None:
        async with self.engine.begin() as connection:
            await connection.execute(update(self.rows).where(self.rows.c.id == row).values(status=Status.DISCARDED))

    async def request(self, row: int, action: str, *, body: bytes | None = None, event_id: UUID | None = None) -> int:
        async with self.engine.begin() as connection:
            rows = self.rows
            found = await connection.execute(select(rows.c.route, rows.c.shard).where(rows.c.id == row))
            place = dict(found.one()._mapping)
            made: Any = await connection.execute(
                insert(requests).values(**place, row_id=row, action=action, event_id=event_id, body=body, audit=0)
            )
            return int(made.inserted_primary_key[0])

    async def pause_lane(self, name: LaneName, paused: bool = True) -> None:
        await self.change(update(lanes).where(_is(name)).values(paused=paused))

    async def pause_tenant(self, tenant: str, paused: bool = True) -> None:
        await self.change(delete(tenants).where(tenants.c.tenant == tenant))
        await self.change(insert(tenants).values(tenant=tenant, paused=paused))

    async def set_rate(self, rate: float | None, *, lane: LaneName | None = None, tenant: str | None = None) -> None:
        if lane is not None:
            await self.change(update(lanes).where(_is(lane)).values(rate=rate))
        if tenant is not None:
            await self.change(delete(tenants).where(tenants.c.tenant == tenant))
            await self.change(insert(tenants).values(tenant=tenant, rate=rate))

    async def trouble(self, name: LaneName) -> str | None:
        async with self.engine.connect() as connection:
            found = await connection.execute(select(lanes.c.trouble).where(_is(name)))
            return cast("str | None", found.scalar_one())

    async def change(self, statement: Executable) -> None:
        async with self.engine.begin() as connection:
            await connection.execute(statement)


def claim_of(row: Delivery) -> dict[str, Any]:
    """The claim of a message that was spilled."""
    line = {"consumer": row.route, "line": stable_hash(row.key), "tenant": row.tenant or ""}
    return {**line, "inbox_id": uuid4(), "delivery": row.event_id, "gate": True}


class Counting(Buffer):
    """Keeps rows also of lanes that nobody has looked at yet, and counts."""

    received = 0

    def put(self, row: Streamed) -> None:
        self.span(row.lane)
        super().put(row)
        self.received += 1


class StreamingWorld(DatabaseWorld):
    """What is appended has come by the stream before anybody polls."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.buffer = Counting(10_000_000)
        self.feed = Feed(engine, self.buffer, relay="conformance")
        super().__init__(engine, CdcStore(engine, self.buffer))

    async def start(self) -> None:
        self.feed.start(len, Everything())
        await soon(lambda: self.feed.works)

    async def append(self, deliveries: Sequence[Delivery]) -> None:
        before = self.buffer.received
        await super().append(deliveries)
        await soon(lambda: self.buffer.received >= before + len(deliveries))


def _is(name: LaneName) -> ColumnElement[bool]:
    return and_(lanes.c.route == name.route, lanes.c.shard == name.shard)


class TestMemoryStore(OutboxStoreContract):
    @pytest.fixture
    def world(self) -> World:
        return MemoryWorld(MemoryStore())


class TestMemoryLogStore(DetourContract):
    @pytest.fixture
    def world(self) -> World:
        return MemoryWorld(MemoryLogStore())


@pytest.fixture(scope="module")
def migrated(servers: Servers) -> Iterator[dict[str, Database]]:  # noqa: ARG001  they outlive the databases
    """One database of each kind for all tests: making the tables would take longer than most of them."""
    made: dict[str, Database] = {}
    yield made
    for database in made.values():
        database.server.drop(database.name)


class DatabaseStoreContract(OutboxStoreContract):
    """What stores on a database promise beyond that."""

    kind: ClassVar[type[LogStore | QueueStore]]
    table: ClassVar[str] = OUTBOUND

    @pytest.fixture
    def database_kind(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def world(self, database_world: DatabaseWorld) -> World:
        return database_world

    @pytest.fixture
    async def database_world(
        self,
        database_kind: str,
        servers: Servers,
        use_server: Callable[[str], Server],
        migrated: dict[str, Database],
    ) -> AsyncIterator[DatabaseWorld]:
        use_server(database_kind)
        is_new = database_kind not in migrated
        if is_new:
            migrated[database_kind] = servers.create_database(database_kind)
        engine = create_async_engine(migrated[database_kind].url())
        sqlite.configure_transactions(engine.sync_engine)
        if is_new:
            async with engine.begin() as connection:
                await connection.run_sync(migrate)
        yield DatabaseWorld(engine, self.kind(engine, self.table))
        async with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                await connection.execute(text("TRUNCATE pillarbox_failures, pillarbox_journal"))
            for table in metadata.sorted_tables:
                if table is not meta:
                    await connection.execute(delete(table))
        await engine.dispose()

    async def test_h01_a_row_that_commits_late_with_a_low_id_is_found(self, world: DatabaseWorld) -> None:
        if world.engine.dialect.name == "sqlite":
            pytest.skip("writers take turns")
        await world.register(ROUTE)
        late, early = delivery("a"), delivery("b")
        async with world.engine.begin() as connection:
            await connection.run_sync(world.store.append, [late])
            await world.append([early])
            lane = await self.lane(world)
            [row] = (await world.store.poll(lane, limit=10)).fresh
            lane = await world.announce(lane, Batch(items=[row.id]), settle=False)
        [found] = (await world.store.poll(await world.store.settle(lane), limit=10)).fresh
        assert (found.event_id, found.id < row.id) == (late.event_id, True)

    async def test_a_late_row_that_was_discarded_is_not_sent_by_any_later_turn(self, world: DatabaseWorld) -> None:
        if world.engine.dialect.name == "sqlite":
            pytest.skip("writers take turns")
        await world.register(ROUTE)
        lane = await self.lane(world)
        async with world.engine.begin() as connection:
            await world.write(connection, [delivery("a")])
            await world.append([delivery("b")])
            [row] = (await world.store.poll(lane, limit=10)).fresh
            lane = await world.store.settle(await world.announce(lane, Batch(items=[row.id]), settle=False))
        [late] = (await world.store.poll(lane, limit=10)).fresh
        asked = await world.request(late.id, "discard")
        lane = await world.store.announce(lane, Batch(requests=[asked]), settle=False)
        lane = await world.store.announce(lane, Batch(), settle=False)  # moves no cursor
        assert (await world.store.poll(lane, limit=10)).fresh == ()
        assert await world.status(late.id) is Status.DISCARDED

    async def test_h65_a_turn_waits_for_no_business_transaction(self, world: DatabaseWorld) -> None:
        if world.engine.dialect.name == "sqlite":
            pytest.skip("writers take turns")
        rows, lane = await self.filled(world, "a", "a", "b", "b", "c", "d")
        async with asyncio.timeout(10), world.engine.begin() as connection:
            await connection.run_sync(world.store.append, [delivery(key) for key in "abcd" * 5])
            asked = [await world.request(rows[5].id, "discard")]
            refused = Batch(
                items=[rows[2].id, rows[3].id, rows[4].id],
                failures=[Failure(rows[0].id, 5, "no", None)],
                parked=[rows[1].id],
                requests=asked,
            )
            lane = await world.announce(lane, refused, settle=False)
            lane = await world.store.amend(lane, [Failure(rows[2].id, 1, "no", 0.0)], parked=[rows[3].id])
            lane = await world.store.amend(lane, (), attempts={rows[4].id: 1})
            edit = await world.request(rows[0].id, "edit", body=b"", event_id=uuid4())
            redo = await self.due(world, lane)
            again = Batch(items=[row.id for row in redo], requests=[edit])
            lane = await world.announce(lane, again, settle=True)
            lane = await world.store.settle(lane)
            assert lane.name in await world.store.renew("r1", [lane], lease=LEASE, serves=[])
            await world.store.release("r1", [lane])

    async def test_h64_reading_waits_for_no_writer(self, world: DatabaseWorld) -> None:
        rows, lane = await self.filled(world, "a")
        lane = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        async with asyncio.timeout(10), world.engine.begin() as connection:
            await connection.run_sync(world.store.append, [delivery("b")])
            assert (await world.store.poll(lane, limit=10)).fresh == ()
            assert await world.store.ready([ROUTE.id]) == {lane.name}
            assert len(await world.store.rebuild(lane)) == 1
            assert (await world.store.census()).next_expiry is not None

    async def test_relays_that_died_long_ago_are_forgotten(self, world: DatabaseWorld) -> None:
        for name in ("lately", "long ago"):
            await world.store.renew(name, [], lease=LEASE, serves=[])
        died = {"lately": -60.0, "long ago": -4000.0}
        for name, seconds in died.items():
            await world.change(update(relays).where(relays.c.name == name).values(expires_at=from_now(seconds)))
        await world.store.renew("new", [], lease=LEASE, serves=[])
        async with world.engine.connect() as connection:
            assert set(await connection.scalars(select(relays.c.name))) == {"lately", "new"}


class TestQueueStore(DatabaseStoreContract):
    kind = QueueStore

    @pytest.fixture(params=QUEUES)
    def database_kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    async def test_a_key_with_very_many_parked_rows_hides_no_other_one(self, world: DatabaseWorld) -> None:
        """As it is when a route that has parked behind dead rows is told to skip them."""
        await world.register(SKIPPING)
        await world.append([delivery(key, route=SKIPPING) for key in ("a", "b", *["a"] * 10_001, "b")])
        async with world.engine.begin() as connection:
            rows = world.rows
            *_, last_dead = await connection.scalars(select(rows.c.id).order_by(rows.c.id).limit(2))
            await connection.run_sync(put_in, rows, rows.c.id > last_dead, status=Status.PARKED)
            await connection.run_sync(put_in, rows, rows.c.id <= last_dead, status=Status.FAILED)
        lane = await self.lane(world, route=SKIPPING)
        assert {row.key for row in await self.due(world, lane)} == {"a", "b"}


class TestLogStore(DetourContract, DatabaseStoreContract):
    kind = LogStore

    @pytest.fixture(params=["embedded", pytest.param("oldest", marks=pytest.mark.elsewhere)])
    def database_kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


class TestInboundQueueStore(TestQueueStore):
    table = INBOUND

    @pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.elsewhere) for kind in QUEUES])
    def database_kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


class TestInboundLogStore(TestLogStore):
    table = INBOUND


class TestCdcStore(DetourContract, DatabaseStoreContract):
    kind = LogStore

    @pytest.fixture(params=["logical", pytest.param("logical-oldest", marks=pytest.mark.elsewhere)])
    def database_kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    async def world(self, database_world: DatabaseWorld) -> AsyncIterator[World]:
        world = StreamingWorld(database_world.engine)
        await world.start()
        yield world
        await world.feed.stop()
