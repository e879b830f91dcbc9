"""Every store against the same promises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox.outbox import Delivery, RouteRecord, Status
from pillarbox.stores import sqlite
from pillarbox.stores.memory import MemoryStore
from pillarbox.stores.migrations import migrate
from pillarbox.stores.queue import QueueStore
from pillarbox.stores.tables import outbox
from pillarbox.testing.conformance.outbox import OutboxStoreContract, World
from tests.servers import Database


class MemoryWorld(World):
    def __init__(self) -> None:
        self.store: MemoryStore = MemoryStore()

    async def register(self, *records: RouteRecord) -> int:
        return self.store.register(None, records)

    async def append(self, deliveries: Sequence[Delivery]) -> None:
        self.store.append(None, deliveries)

    async def status(self, row: int) -> Status:
        return self.store.status_of(row)

    async def tamper(self, row: int) -> None:
        self.store._rows[row].status = Status.DISCARDED


class QueueWorld(World):
    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.store: QueueStore = QueueStore(engine)

    async def register(self, *records: RouteRecord) -> int:
        async with self.engine.begin() as connection:
            return await connection.run_sync(self.store.register, records)

    async def append(self, deliveries: Sequence[Delivery]) -> None:
        async with self.engine.begin() as connection:
            await connection.run_sync(self.store.append, deliveries)

    async def status(self, row: int) -> Status:
        async with self.engine.connect() as connection:
            return Status((await connection.execute(select(outbox.c.status).where(outbox.c.id == row))).scalar_one())

    async def tamper(self, row: int) -> None:
        async with self.engine.begin() as connection:
            await connection.execute(update(outbox).where(outbox.c.id == row).values(status=Status.DISCARDED))


class TestMemoryStore(OutboxStoreContract):
    @pytest.fixture
    def world(self) -> World:
        return MemoryWorld()


class TestQueueStore(OutboxStoreContract):
    @pytest.fixture
    async def world(self, database: Database) -> AsyncIterator[World]:
        engine = create_async_engine(database.url())
        sqlite.put_right(engine.sync_engine)
        async with engine.begin() as connection:
            await connection.run_sync(migrate)
        yield QueueWorld(engine)
        await engine.dispose()
