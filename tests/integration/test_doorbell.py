"""The doorbell between processes: what wakes a relay, and what happens when nothing does."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import sessionmaker

from pillarbox import Pillarbox
from pillarbox.outbox import LaneName
from pillarbox.relay import Relay
from pillarbox.stores import notify
from pillarbox.stores.notify import PostgresCarrier
from pillarbox.transports.memory import MemoryTransport
from tests.conftest import FreshDatabase
from tests.domain import Order, OrderNoted, order_box, set_up
from tests.relays import running, soon
from tests.servers import Database, Postgres

TOPIC = "tests.order.events"
ROOT = Path(__file__).parents[2]
SYNC = {"embedded": "psycopg", "system": "psycopg2", "mariadb": "pymysql", "sqlite": "pysqlite"}

WRITE = """
import asyncio, sys
from tests.domain import Order, order_box

async def main():
    async with order_box(sys.argv[1]) as box:
        async with box.unit_of_work() as uow:
            uow.add(Order.place())

asyncio.run(main())
"""


@pytest.fixture(params=["asyncpg", "psycopg"])
async def engine(request: pytest.FixtureRequest, postgres_database: Database) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(postgres_database.url(request.param))
    yield engine
    await engine.dispose()


@pytest.fixture
async def box(engine: AsyncEngine) -> AsyncIterator[Pillarbox]:
    async with order_box(engine) as box:
        await set_up(box)
        yield box


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listeners that find out in tenths of a second what takes many seconds otherwise."""
    monkeypatch.setattr(notify, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr(notify, "ECHO_SECONDS", 0.5)


def blind(relay: Relay) -> Relay:
    """It never looks by itself: only the bell can wake its lanes."""
    relay._keep_looking = asyncio.Event.wait  # type: ignore[method-assign, assignment]
    return relay


def sent(box: Pillarbox, count: int) -> asyncio.Future[object]:
    broker = box.transports["broker"]
    assert isinstance(broker, MemoryTransport)
    return asyncio.ensure_future(asyncio.wait_for(broker.received(TOPIC, count), 20))


async def place(box: Pillarbox) -> None:
    async with box.unit_of_work() as uow:
        uow.add(Order.place())


async def listening(box: Pillarbox, relay: Relay) -> None:
    """Until it has all its lanes and hears others."""
    await soon(lambda: relay.status()["lanes"] == 16 and box.doorbell.reaches_everybody)


def terminate_listeners(database: Database) -> int:
    assert isinstance(database.server, Postgres)
    with psycopg.connect(database.server.address(database.name), autocommit=True) as person:
        found = person.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND query LIKE 'LISTEN%' AND pid <> pg_backend_pid()"
        )
        return len(found.fetchall())


async def test_a_commit_in_another_process_wakes_the_relay(box: Pillarbox, engine: AsyncEngine) -> None:
    relay = blind(box.relay())
    async with running(relay):
        await listening(box, relay)
        url = engine.url.render_as_string(hide_password=False)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", WRITE, url, cwd=ROOT)
        await sent(box, 1)
        assert await process.wait() == 0


@pytest.mark.usefixtures("impatient")
async def test_h51_a_listener_that_was_hung_up_on_mends_itself(
    box: Pillarbox, engine: AsyncEngine, postgres_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pillarbox")
    relay = box.relay()
    async with running(relay), order_box(engine) as other:
        await listening(box, relay)
        assert terminate_listeners(postgres_database) == 1
        await place(other)
        await sent(box, 1)  # found by looking
        await soon(lambda: complaints(caplog))
        await soon(lambda: box.doorbell.reaches_everybody)
        await place(other)
        await sent(box, 2)
    assert not any("\n" in complaint for complaint in complaints(caplog))


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said about the bell."""
    said = [record.getMessage() for record in caplog.records if record.name == "pillarbox"]
    return [message for message in said if "LISTEN" in message or "doorbell" in message]


async def test_h51_it_is_noticed_at_once(box: Pillarbox, postgres_database: Database) -> None:
    """Not only when it checks itself the next time."""
    relay = box.relay()
    async with running(relay):
        await listening(box, relay)
        terminate_listeners(postgres_database)
        async with asyncio.timeout(5):
            await soon(lambda: not box.doorbell.reaches_everybody)


@pytest.mark.usefixtures("impatient")
async def test_h52_where_listen_does_not_work_the_relay_says_so_and_looks_by_itself(
    box: Pillarbox,
    engine: AsyncEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a pooler: LISTEN is accepted, and nothing ever comes."""
    monkeypatch.setattr(PostgresCarrier, "_arrived", lambda *_: None)
    async with running(box.relay()), order_box(engine) as other:
        await soon(lambda: "LISTEN does not work on this connection" in caplog.text)
        await place(other)
        await sent(box, 1)
        assert not box.doorbell.reaches_everybody


async def test_h54_no_commit_fails_because_the_bell_does(box: Pillarbox, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ConnectionError("the notification queue is full")

    monkeypatch.setattr(PostgresCarrier, "_notify", broken)
    await place(box)
    await place(box)
    assert (await box.relay().drain()).sent == 2


async def test_h55_more_lanes_than_a_message_can_hold(box: Pillarbox) -> None:
    relay = box.relay()
    async with running(relay):
        await listening(box, relay)
        carrier = box.doorbell._carrier
        assert carrier is not None
        await carrier.carry([LaneName(2**62 + number, 4095) for number in range(5000)])


@pytest.mark.usefixtures("impatient")
async def test_rings_and_checks_share_a_connection(box: Pillarbox) -> None:
    relay = box.relay()
    async with running(relay):
        await listening(box, relay)
        carrier = box.doorbell._carrier
        assert isinstance(carrier, PostgresCarrier)
        await asyncio.gather(*(carrier.carry([LaneName(1, 1)]) for _ in range(50)))
        assert box.doorbell.reaches_everybody


async def test_somebody_else_on_our_channel_does_no_harm(box: Pillarbox, postgres_database: Database) -> None:
    assert isinstance(postgres_database.server, Postgres)
    relay = blind(box.relay())
    async with running(relay):
        await listening(box, relay)
        with psycopg.connect(postgres_database.server.address(postgres_database.name), autocommit=True) as somebody:
            for payload in ("", "hello", "1/2/3", "echo somebody else's", "0/-1,x/y"):
                somebody.execute("SELECT pg_notify('pillarbox', %s)", [payload])
        await place(box)
        await sent(box, 1)


async def test_a_box_can_be_stopped_and_started_again(engine: AsyncEngine) -> None:
    box = order_box(engine)
    async with box:
        await set_up(box)
    for count in (1, 2):
        async with box:
            relay = blind(box.relay())
            async with running(relay):
                await listening(box, relay)
                await place(box)
                await sent(box, count)


@pytest.mark.parametrize("kind", SYNC)
async def test_a_plain_session_in_a_thread_rings(fresh_database: FreshDatabase, kind: str) -> None:
    database = fresh_database(kind)
    engine, plain = create_async_engine(database.url()), create_engine(database.url(SYNC[kind]))
    async with order_box(engine) as box:
        await set_up(box)
        sessions = box.bind(sessionmaker(plain))

        def commit() -> None:
            with sessions.begin() as session:
                box.publish(session, OrderNoted(note="from a thread"), key="k")

        relay = blind(box.relay())
        async with running(relay):
            await soon(lambda: relay.status()["lanes"] == 16)
            await asyncio.to_thread(commit)
            await sent(box, 1)
    await engine.dispose()
    plain.dispose()


@pytest.mark.parametrize("kind", ["mariadb", "sqlite"])
async def test_without_a_bell_relays_find_what_others_write_by_looking(
    fresh_database: FreshDatabase, kind: str
) -> None:
    engine = create_async_engine(fresh_database(kind).url())
    async with order_box(engine) as box, order_box(engine) as other:
        await set_up(box)
        relay = box.relay()
        async with running(relay):
            await soon(lambda: relay.status()["lanes"] == 16)
            assert not box.doorbell.reaches_everybody
            await place(other)
            async with asyncio.timeout(3):
                await sent(box, 1)
    await engine.dispose()
