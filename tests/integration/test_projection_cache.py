"""A cache that readers of a projection have: it forgets rows that events change, after the commit."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import String
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import Change, IntegrationEvent, Pillarbox, Projection, ProjectionRow, TenantScoped, on
from pillarbox.cache import Cache, MemoryCache
from pillarbox.caches.redis import RedisCache
from pillarbox.projections.read import ReadDao
from tests.servers import Database


class Hung(IntegrationEvent, name="test.projection-cache.hung"):
    picture: str
    wall: str


class Taken(IntegrationEvent, name="test.projection-cache.taken"):
    picture: str


class Base(DeclarativeBase):
    pass


class Picture(TenantScoped, ProjectionRow, Base):
    __tablename__ = "pictures"

    picture: Mapped[str] = mapped_column(String(50), primary_key=True)
    wall: Mapped[str] = mapped_column(String(50))


class Pictures(Projection, row=Picture):
    @on(Hung)
    def hung(self, event: Hung) -> Change:
        return self.put(picture=event.picture, wall=event.wall)

    @on(Taken)
    def taken(self, event: Taken) -> Change:
        return self.remove(picture=event.picture)


@pytest.fixture(params=["memory", "redis"])
async def cache(request: pytest.FixtureRequest) -> AsyncIterator[Cache]:
    if request.param == "memory":
        yield MemoryCache()
    else:
        async with RedisCache(request.getfixturevalue("redis_url")) as cache:
            yield cache


@pytest.fixture
async def box(postgres_database: Database) -> AsyncIterator[Pillarbox]:
    engine = create_async_engine(postgres_database.url())
    async with Pillarbox(engine) as box:
        await box.migrate()
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        yield box
    await engine.dispose()


async def tell(box: Pillarbox, event: Hung | Taken, tenant: str) -> None:
    async with box.unit_of_work(tenant=tenant) as uow:
        uow.publish(event, key=event.picture)
    await box.consumers["pictures"].drain()


async def wall(dao: ReadDao[Picture], tenant: str) -> str | None:
    order = [column.name for column in Picture.__table__.primary_key]
    key = {"tenant_id": tenant, "picture": "sunset"}
    found = await dao.get(tuple(key[name] for name in order), tenant=tenant)
    return None if found is None else found.wall


async def test_what_events_change_is_read_anew(box: Pillarbox, cache: Cache) -> None:
    box.projection(Pictures, source="outbox", cache=cache)
    dao = ReadDao(box, Picture, cache=cache)
    for tenant in ("acme", "globex"):
        await tell(box, Hung(picture="sunset", wall="north"), tenant)
        assert await wall(dao, tenant) == "north"
    await tell(box, Hung(picture="sunset", wall="south"), "acme")
    assert (await wall(dao, "acme"), await wall(dao, "globex")) == ("south", "north")
    await tell(box, Taken(picture="sunset"), "acme")
    assert (await wall(dao, "acme"), await wall(dao, "globex")) == (None, "north")


async def test_a_cache_that_is_down_stops_no_projection(box: Pillarbox) -> None:
    async with RedisCache("redis://127.0.0.1:1/0") as down:
        box.projection(Pictures, source="outbox", cache=down)
        await tell(box, Hung(picture="sunset", wall="north"), "acme")
        assert (await box.consumers["pictures"].drain()).failures == 0
    page = await ReadDao(box, Picture).page(tenant="acme")
    assert [(row.picture, row.wall) for row in page.items] == [("sunset", "north")]
