"""What people can ask about the outbox, on every database."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox import IntegrationEvent, Pillarbox, Route
from pillarbox.outbox import Status
from pillarbox.stores import inspection, overview
from pillarbox.stores.inspection import TYPE_PATTERN, Filter
from pillarbox.stores.overview import Unserved
from pillarbox.stores.tables import lanes, outbox
from pillarbox.transports.memory import MemoryTransport
from tests.deliveries import put
from tests.servers import Database

pytestmark = pytest.mark.dialects


class Came(IntegrationEvent, name="yard.truck.came"):
    pass


class CameBack(IntegrationEvent, name="yard.truck.came_back"):
    pass


class Closed(IntegrationEvent, name="yard.closed"):
    pass


@pytest.fixture
async def engine(database: Database) -> AsyncIterator[AsyncEngine]:
    """Four deliveries of one route; keys and tenants differ only for those who look closely."""
    engine = create_async_engine(database.url())
    box = Pillarbox(
        engine, transports={"broker": MemoryTransport()}, routes=[Route("yard.**", to="broker", topic="yard.events")]
    )
    await box.migrate()
    for event, key, tenant in (
        (Came(), "A", "acme"),
        (CameBack(), "a", "acme"),
        (Came(), "A ", "Acme"),
        (Closed(), "\u00c4", "acm\u00e9"),
    ):
        async with box.unit_of_work(tenant=tenant) as uow:
            uow.publish(event, key=key)
    yield engine
    await engine.dispose()


async def ids(engine: AsyncEngine, wanted: Filter, *, after: int = 0, limit: int = 100) -> list[int]:
    async with engine.connect() as connection:
        found = await connection.run_sync(inspection.deliveries, wanted, after=after, limit=limit)
    return [each.id for each in found]


async def test_filters(engine: AsyncEngine) -> None:
    first, second, third, fourth = everything = await ids(engine, Filter())
    for wanted, expected in (
        (Filter(key="A"), [first]),
        (Filter(key="A "), [third]),
        (Filter(key="\u00c4"), [fourth]),
        (Filter(key="A\u0308"), []),
        (Filter(key="' OR 1=1 --"), []),
        (Filter(tenant="acme"), [first, second]),
        (Filter(tenant="ACME"), []),
        (Filter(tenant="acme", key="a"), [second]),
        (Filter(route="broker:yard.events"), everything),
        (Filter(route="broker%"), []),
        (Filter(status=Status.PENDING), everything),
        (Filter(status=Status.SENT), []),
        (Filter(type="yard.truck.came"), [first, third]),
        (Filter(type="yard.truck.came_back"), [second]),
        (Filter(type="yard.truck.came__ack"), []),
        (Filter(type="yard.truck.*"), [first, second, third]),
        (Filter(type="yard.*.came"), [first, third]),
        (Filter(type="yard.*"), [fourth]),
        (Filter(type="*.*"), [fourth]),
        (Filter(type="yard.**"), everything),
        (Filter(type="yard.truck.**"), [first, second, third]),
        (Filter(type="yard.closed.**"), []),
        (Filter(type="**"), everything),
    ):
        assert await ids(engine, wanted) == expected, wanted


async def test_pages(engine: AsyncEngine) -> None:
    everything = await ids(engine, Filter())
    assert await ids(engine, Filter(), limit=3) == everything[:3]
    assert await ids(engine, Filter(), after=everything[2]) == everything[3:]


async def test_statistics_follow_the_status(engine: AsyncEngine) -> None:
    first, *_ = await ids(engine, Filter())
    async with engine.begin() as connection:
        await connection.run_sync(put, outbox.c.id == first, status=Status.FAILED)
        groups = await connection.run_sync(inspection.statistics)
    assert [(each.route, each.status, each.count) for each in groups] == [
        ("broker:yard.events", Status.FAILED, 1),
        ("broker:yard.events", Status.PENDING, 3),
    ]


async def test_paused_lanes_wait_on_purpose(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        (found,) = await connection.run_sync(overview.unserved)
        assert found == Unserved("broker:yard.events", "broker", "yard.events", found.lanes, 4)
        assert 1 <= found.lanes <= 4
        await connection.execute(update(lanes).values(paused=True))
        assert await connection.run_sync(overview.unserved) == []


async def test_a_delivery_whose_route_is_gone_is_still_shown(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(update(outbox).values(route=17))
        found = await connection.run_sync(inspection.deliveries, Filter(), after=0, limit=100)
        (details,) = await connection.run_sync(inspection.deliveries_of, found[0].event_id, payload=True)
    assert [each.route for each in found] == [None] * 4
    assert (details.route, details.destination, details.payload) == (None, None, "{}")


@pytest.mark.parametrize("pattern", ["", ".", "a.", "a..b", "**.a", "a.**.b", "a.*.**", "A", "a b", "a%", "a'"])
def test_what_is_no_pattern(pattern: str) -> None:
    assert not TYPE_PATTERN.fullmatch(pattern)
