"""Projections as consumers: what strangers send, and what a second unique key does to MySQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar
from uuid import uuid4

import pytest
from sqlalchemy import String, select
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import (
    Change,
    IntegrationEvent,
    Message,
    Pillarbox,
    Projection,
    ProjectionRow,
    RetryPolicy,
    TenantScoped,
    on,
)
from pillarbox.consumers.consumer import Consumer
from pillarbox.consumers.processing import Processor
from pillarbox.transports.memory import MemoryTransport
from tests.conftest import EACH_DATABASE, FreshDatabase

TOPIC = "shelves"


class Shelved(IntegrationEvent, name="test.projection-consumer.shelved"):
    book: str
    shelf: str


class Base(DeclarativeBase):
    pass


class BookRow(ProjectionRow, Base):
    __tablename__ = "books"

    book: Mapped[str] = mapped_column(String(50), primary_key=True)
    shelf: Mapped[str] = mapped_column(String(50))


class Books(Projection, row=BookRow, name="books"):
    @on(Shelved)
    def shelved(self, event: Shelved) -> Change:
        return self.put(book=event.book, shelf=event.shelf)


class LooseBooks(Projection, row=BookRow, name="loose"):
    lost: ClassVar[set[str]] = set()
    """Those of which nothing can be said now."""

    @on(Shelved)
    def shelved(self, event: Shelved) -> Change:
        if event.book in self.lost:
            raise LookupError(event.book)
        return self.put(book=event.book, shelf=event.shelf)


class PlaceRow(TenantScoped, ProjectionRow, Base):
    __tablename__ = "places"

    book: Mapped[str] = mapped_column(String(50), primary_key=True)
    shelf: Mapped[str] = mapped_column(String(50), unique=True)


class Places(Projection, row=PlaceRow, guarded=False):
    @on(Shelved)
    def shelved(self, event: Shelved) -> Change:
        return self.put(book=event.book, shelf=event.shelf)


@pytest.fixture
def broker() -> MemoryTransport:
    return MemoryTransport()


@pytest.fixture(params=EACH_DATABASE)
async def box(
    request: pytest.FixtureRequest, fresh_database: FreshDatabase, broker: MemoryTransport
) -> AsyncIterator[Pillarbox]:
    engine = create_async_engine(fresh_database(request.param, shards=2).url())
    async with Pillarbox(engine, transports={"broker": broker}, shards=2) as box:
        await box.migrate()
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        yield box
    await engine.dispose()


async def send(
    broker: MemoryTransport, book: str, shelf: str, *, version: int | None = None, tenant: str = "acme"
) -> None:
    headers = {
        "event_id": str(uuid4()),
        "event_type": "test.projection-consumer.shelved",
        "schema_version": "v1",
        "occurred_at": "2026-01-01T00:00:00Z",
        "aggregate_id": book,
        "tenant_id": tenant,
    }
    if version is not None:
        headers["version"] = str(version)
    body = f'{{"book": "{book}", "shelf": "{shelf}"}}'.encode()
    await broker.send("somebody", [Message(TOPIC, book, body, headers)])


async def shelves(box: Pillarbox, row: type[BookRow | PlaceRow] = BookRow) -> dict[str, str]:
    async with box.engine.connect() as connection:
        found = await connection.execute(select(row.__table__.c.book, row.__table__.c.shelf))
        return {row.book: row.shelf for row in found}


def projection(box: Pillarbox, kind: type[Projection]) -> Consumer:
    return box.projection(kind, source="broker", topics=[TOPIC], batch=1)


async def test_versions_of_strangers_may_begin_with_zero(box: Pillarbox, broker: MemoryTransport) -> None:
    books = projection(box, Books)
    await send(broker, "emma", "new", version=0)
    await books.drain()
    assert await shelves(box) == {"emma": "new"}
    await send(broker, "emma", "desk", version=1)
    await send(broker, "emma", "late", version=0)
    await books.drain()
    assert await shelves(box) == {"emma": "desk"}


async def test_a_second_unique_key_leads_to_nobody_elses_row(box: Pillarbox, broker: MemoryTransport) -> None:
    places = projection(box, Places)
    await send(broker, "emma", "window", tenant="acme")
    assert (await places.drain()).handled == 1
    await send(broker, "persuasion", "window", tenant="globex")
    assert (await places.drain()).handled == 0
    assert await shelves(box, PlaceRow) == {"emma": "window"}


@pytest.mark.dialects
async def test_what_was_spilled_takes_effect_together_but_for_what_still_fails(
    box: Pillarbox, broker: MemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickly = RetryPolicy(base=0.001, cap=0.01)
    books = box.projection(LooseBooks, source="broker", topics=[TOPIC], batch=50, retry=quickly)
    names, redeemed, redeem = [f"book {number}" for number in range(8)], list[int](), Processor._redeem_all

    def count(self: Processor, connection: Any, opened: Any) -> Any:
        redeemed.append(len(opened))
        return redeem(self, connection, opened)

    monkeypatch.setattr(Processor, "_redeem_all", count)
    monkeypatch.setattr(LooseBooks, "lost", {*names})
    for shelf in ("window", "desk"):
        for name in names:
            await send(broker, name, shelf)
    await books.register()
    await books._intakes[0].drain(0.5)
    assert await shelves(box) == {}
    monkeypatch.setattr(LooseBooks, "lost", {"book 3"})
    await books.drain()
    assert await shelves(box) == {name: "desk" for name in names if name != "book 3"}
    assert max(redeemed) > 1


async def test_what_has_taken_effect_may_come_again_alone(box: Pillarbox, broker: MemoryTransport) -> None:
    places = projection(box, Places)
    await send(broker, "emma", "window")
    assert (await places.drain()).handled == 1
    broker.redeliver(TOPIC)
    tally = await places.drain()
    assert (tally.handled, tally.duplicates, tally.failures) == (0, 1, 0), tally
