"""Relays on every database: order, one copy, take-over, and what people do to a running system."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import Connection, event, func, select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox import Pillarbox, RetryPolicy, Route, clock
from pillarbox.errors import SessionError
from pillarbox.fairness import Pace
from pillarbox.lane import LaneWorker
from pillarbox.lane_report import Counts
from pillarbox.outbox import Batch, Failure, Status
from pillarbox.rejections import Rejections
from pillarbox.relay import Relay
from pillarbox.stores import operations
from pillarbox.stores.audit import Author
from pillarbox.stores.inspection import Filter, deliveries, deliveries_of
from pillarbox.stores.operations import Action, Change, Handle, Run, Selection, Tenant
from pillarbox.stores.pool import with_own_pool
from pillarbox.stores.tables import lanes, relays
from pillarbox.transport import Message
from pillarbox.transports.memory import MemoryTransport
from tests.copies import TOPIC as COPIES
from tests.copies import outbox
from tests.domain import Order, set_up, written
from tests.relays import Line, half, running, soon
from tests.servers import Database, Postgres, Server, Servers

TOPIC = "tests.order.events"
ANNA = Author("anna@office")

on_postgres = pytest.mark.parametrize("database", ["embedded"], indirect=True)
on_two = pytest.mark.parametrize("database", ["embedded", "sqlite"], indirect=True)


@pytest.fixture
async def engine(database: Database) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database.url())
    yield engine
    await engine.dispose()


@pytest.fixture
async def box(engine: AsyncEngine) -> AsyncIterator[Pillarbox]:
    async with order_box(engine) as box:
        await set_up(box)
        yield box


def order_box(engine: AsyncEngine | str | None, broker: MemoryTransport | None = None) -> Pillarbox:
    retry = RetryPolicy(base=0.05, cap=0.1, attempts=2)
    route = Route("tests.order.*", to="broker", topic=TOPIC, retry=retry)
    return Pillarbox(engine, transports={"broker": broker or MemoryTransport()}, routes=[route])


def broker_of(box: Pillarbox) -> MemoryTransport:
    broker = box.transports["broker"]
    assert isinstance(broker, MemoryTransport)
    return broker


async def place(box: Pillarbox, *, changes: int = 0, tenant: str | None = None) -> UUID:
    """An order that is repriced so many times, each in a transaction of its own."""
    async with box.unit_of_work(tenant=tenant) as uow:
        order = Order.place(order_id=uuid4())
        uow.add(order)
    for number in range(changes):
        async with box.unit_of_work(tenant=tenant) as uow:
            (await uow.session.get_one(Order, order.id)).reprice(number)
    return order.id


async def received(box: Pillarbox, count: int) -> list[Message]:
    async with asyncio.timeout(20):
        return await broker_of(box).received(TOPIC, count)


async def statuses(box: Pillarbox) -> set[str]:
    return {status for (status,) in await written(box.engine, "status")}


async def settled(box: Pillarbox) -> bool:
    return await statuses(box) <= {Status.SENT}


async def held(box: Pillarbox) -> dict[str, int]:
    """How many lanes each relay has."""
    async with box.engine.connect() as connection:
        owners = select(lanes.c.locked_by, func.count()).where(lanes.c.locked_by.is_not(None))
        found = await connection.execute(owners.group_by(lanes.c.locked_by))
        return {row[0]: row[1] for row in found}


def assert_order(messages: Sequence[Message], orders: int, changes: int) -> None:
    """Every event of every order, the first copies in order."""
    first = dict.fromkeys((message.key, int(message.headers["version"])) for message in messages)
    versions: dict[str, list[int]] = {}
    for key, version in first:
        versions.setdefault(key, []).append(version)
    assert len(versions) == orders
    assert {tuple(found) for found in versions.values()} == {tuple(range(1, changes + 2))}


async def test_what_is_committed_is_sent_in_order_and_marked(box: Pillarbox) -> None:
    async with running(box.relay()):
        order = await place(box, changes=3)
        messages = await received(box, 4)
        await soon(lambda: settled(box))
    assert [message.headers["version"] for message in messages] == ["1", "2", "3", "4"]
    assert {message.key for message in messages} == {str(order)}
    assert all(sent_at is not None for (sent_at,) in await written(box.engine, "sent_at"))
    assert await held(box) == {}


async def test_h27_r5_several_relays_and_writers_at_once(box: Pillarbox, caplog: pytest.LogCaptureFixture) -> None:
    """No event is lost, doubled or overtaken, and no business transaction fails because of a relay (H49)."""
    async with running(*(box.relay(name=f"r{number}", batch=3) for number in range(3))):
        await asyncio.gather(*(place(box, changes=4) for _ in range(12)))
        messages = await received(box, 60)
        await soon(lambda: settled(box))
    assert len(messages) == 60
    assert_order(messages, 12, 4)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.every_loop
async def test_h43_a_rejected_event_and_those_behind_it_until_a_person_redrives_them(box: Pillarbox) -> None:
    broker = broker_of(box)
    broker.reject(lambda message: message.headers["version"] == "2", reason="password=swordfish is wrong")
    async with running(box.relay()):
        await place(box, changes=2)
        await soon(lambda: _is(box, ["SENT", "FAILED", "PARKED"]))
        failed = [row for row in await written(box.engine, "last_error", "attempts") if row[0]]
        assert failed == [("password=*** is wrong", 2)]
        await place(box)  # others go on
        await received(box, 2)
        broker.stop_rejecting()
        selection = Selection(Action.REDRIVE, Filter(status=Status.FAILED))
        async with box.engine.begin() as connection:
            await connection.run_sync(operations.request, selection, ANNA, Run(), 10)
        messages = await received(box, 4)
        await soon(lambda: settled(box))
    assert [message.headers["version"] for message in messages if message.key == messages[0].key] == ["1", "2", "3"]


async def test_what_was_discarded_or_edited_before_it_was_sent_is_not_sent_as_it_was(box: Pillarbox) -> None:
    """Nobody served the lane when they asked: its first page has the rows, and the requests about them."""
    broker = broker_of(box)
    broker.reject(lambda _message: True)
    edited, given_up = await place(box), await place(box)
    await box.relay().run_once()
    await soon(lambda: _is(box, ["RETRYING", "RETRYING"]))
    broker.stop_rejecting()
    never_tried = await place(box)

    def ask(connection: Connection) -> None:
        for order in (given_up, never_tried):
            operations.request(connection, Selection(Action.DISCARD, Filter(key=str(order))), ANNA, Run(), 10)
        [delivery] = deliveries(connection, Filter(key=str(edited)), after=0, limit=1)
        [details] = deliveries_of(connection, delivery.event_id, payload=False)
        operations.edit(connection, details, ANNA, old=b"", new=b'{"edited":true}', event_id=uuid4())

    async with box.engine.begin() as connection:
        await connection.run_sync(ask)
    await box.relay().drain()
    assert [(message.key, message.body) for message in broker.sent(TOPIC)] == [(str(edited), b'{"edited":true}')]
    assert sorted(status for (status,) in await written(box.engine, "status")) == ["DISCARDED", "DISCARDED", "SENT"]


async def _is(box: Pillarbox, expected: list[str]) -> bool:
    return [status for (status,) in await written(box.engine, "status")] == expected


async def test_h66_business_goes_on_while_the_broker_is_away(box: Pillarbox) -> None:
    broker_of(box).go_away()
    relay = box.relay()
    async with running(relay):
        await asyncio.gather(*(place(box, changes=2) for _ in range(5)))
        await soon(lambda: relay.status()["troubles"])
        assert {attempts for (attempts,) in await written(box.engine, "attempts")} == {0}
        broker_of(box).come_back()
        messages = await received(box, 15)
        await soon(lambda: settled(box))
    assert_order(messages, 5, 2)


async def test_h45_a_relay_that_hangs_is_replaced_and_settles_nothing_when_it_wakes(box: Pillarbox) -> None:
    one, two = box.relay(name="r1", lease=0.5), box.relay(name="r2", lease=0.5)
    line = Line(one._store)
    one._store = line
    async with running(one):
        await soon(lambda: _holds(box, {"r1": 16}))
        line.cut()
        order = await place(box, changes=1)
        async with running(two):
            await soon(lambda: _holds(box, {"r2": 16}))
            assert [message.key for message in await received(box, 2)] == [str(order)] * 2
            await soon(lambda: settled(box))
            line.mend()
            await soon(lambda: _holds(box, {"r1": 8, "r2": 8}))
            await place(box, changes=1)
            await received(box, 4)
            await soon(lambda: settled(box))
    assert_order(broker_of(box).sent(TOPIC), 2, 1)


async def _holds(box: Pillarbox, expected: dict[str, int]) -> bool:
    return await held(box) == expected


@on_two
async def test_h91_a_relay_that_stops_is_replaced_at_once(box: Pillarbox) -> None:
    """Its leases of a minute are not waited for."""
    async with running(box.relay(name="r2", lease=60.0)):
        async with running(box.relay(name="r1", lease=60.0)):
            await soon(lambda: _holds(box, {"r1": 8, "r2": 8}))
        await soon(lambda: _holds(box, {"r2": 16}), seconds=5)
        async with box.engine.connect() as connection:
            assert list(await connection.scalars(select(relays.c.name))) == ["r2"]


@on_postgres
async def test_h35_the_database_hangs_up_again_and_again(box: Pillarbox, database: Database) -> None:
    """Every connection of the relay is cut, whatever it is doing: nothing is lost, nothing overtaken."""
    assert isinstance(database.server, Postgres)
    address = database.server.address(database.name)
    relay = box.relay(name="r1", lease=1.0, batch=2)
    mine = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'relay'"
    await _name_connections(relay, "relay")
    with psycopg.connect(address, autocommit=True) as person:
        async with running(relay):
            for _ in range(10):
                await asyncio.gather(*(place(box, changes=2) for _ in range(2)))
                person.execute(mine)
            await received(box, 60)
            await soon(lambda: settled(box))
    assert_order(broker_of(box).sent(TOPIC), 20, 2)


async def _name_connections(relay: Relay, name: str) -> None:
    """So that they can be told from those of the business."""
    engine: Any = relay._store._engine  # type: ignore[attr-defined]
    await engine.dispose()

    @event.listens_for(engine.sync_engine, "connect")
    def connected(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"SET application_name = '{name}'")
        cursor.close()
        connection.commit()


@on_two
async def test_h25_a_relay_does_not_wait_for_the_connections_of_the_business(database: Database) -> None:
    engine = create_async_engine(database.url(), **({} if database.kind == "sqlite" else {"pool_size": 1}))
    async with order_box(engine) as box:
        await set_up(box)
        await place(box)
        async with running(box.relay()), engine.connect():  # the only one
            await received(box, 1)
    await engine.dispose()


async def test_h25_pools_that_connect_at_the_same_time_do_not_trip_over_each_other(postgres_database: Database) -> None:
    """They share a dialect, and what it knows about the server it learns with its first connection."""
    for number in range(10):
        engine = create_async_engine(postgres_database.url())
        async with order_box(engine) as box:
            own = with_own_pool(box.engine)
            plain = own.execution_options(isolation_level="AUTOCOMMIT")
            await asyncio.gather(_connect(engine), *(_connect(it, 0.001 * number) for it in (engine, own, plain)))
            await own.dispose()
        await engine.dispose()


async def _connect(engine: AsyncEngine, delay: float = 0.0) -> None:
    await asyncio.sleep(delay)
    async with engine.connect() as connection:
        await connection.execute(select(1))


async def test_draining_a_sqlite_in_memory() -> None:
    engine = create_async_engine("sqlite+aiosqlite://")
    async with order_box(engine) as box:
        await set_up(box)
        await place(box, changes=1)
        assert (await box.relay().drain()).sent == 2
        assert await settled(box)
    await engine.dispose()


@pytest.mark.parametrize("given", ["an engine", "a URL"])
async def test_h128_a_relay_runs_again_after_its_box_was_stopped(sqlite_database: Database, given: str) -> None:
    engine = create_async_engine(sqlite_database.url())
    box = order_box(engine if given == "an engine" else sqlite_database.url())
    async with box:
        await set_up(box)
        relay = box.relay()
        await relay.drain()
    async with box:
        await place(box)
        async with running(relay):
            await received(box, 1)
    await engine.dispose()


@pytest.mark.parametrize("given", ["an engine", "a URL"])
async def test_a_relay_needs_a_box_that_is_started(sqlite_database: Database, given: str) -> None:
    engine = create_async_engine(sqlite_database.url())
    await _needs_its_box(order_box(engine if given == "an engine" else sqlite_database.url()))
    await engine.dispose()


async def test_a_relay_on_the_embedded_postgresql_needs_its_box_and_runs_again_while_the_address_is_the_same(
    servers: Servers, use_server: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_server("embedded")
    monkeypatch.setenv("PILLARBOX_HOME", str(servers.folder / "relays"))
    box = order_box(None)
    relay = await _needs_its_box(box)
    async with box:
        await place(box)
        async with running(relay):
            await received(box, 1)
    monkeypatch.setattr("pillarbox.embedded._SOCKET_PATH_LIMIT", 0)  # from now on each start has another address
    async with box:
        with pytest.raises(SessionError, match=r"make another with box.relay\(\)"):
            await relay.drain()
        await box.relay().drain()


async def _needs_its_box(box: Pillarbox) -> Relay:
    with pytest.raises(SessionError, match="the box is not started"):
        box.relay()
    async with box:
        await set_up(box)
        relay = box.relay()
        await relay.drain()
    for work in (relay.run, relay.drain, relay.run_once):
        with pytest.raises(SessionError, match="the box is not started"):
            await work()
    with pytest.raises(SessionError, match="the box is not started"):
        box.relay()
    return relay


async def test_a_box_that_stops_before_its_relay_began_leaves_no_connection(sqlite_database: Database) -> None:
    async with order_box(sqlite_database.url()) as box:
        await set_up(box)
    before = threading.active_count()  # a connection to SQLite has a thread
    async with box:
        relay = box.relay()
        running = asyncio.create_task(relay.run())
    await running
    await soon(lambda: threading.active_count() <= before)


async def test_run_once_and_drain_say_what_they_did(box: Pillarbox) -> None:
    await asyncio.gather(*(place(box, changes=1) for _ in range(5)))
    relay = box.relay(batch=1)
    once = await relay.run_once()
    assert 0 < once.sent < 10
    assert once.sent + (await relay.drain()).sent == 10
    assert await settled(box)
    assert await held(box) == {}


async def test_a_paused_tenant_waits_until_it_is_resumed(box: Pillarbox) -> None:
    async def change(handle: Handle) -> None:
        async with box.engine.begin() as connection:
            await connection.run_sync(operations.apply, Change(handle, Tenant("acme")), ANNA)

    await change(Handle.PAUSE)
    async with running(box.relay(lease=0.6)):
        await place(box, tenant="acme", changes=1)
        await place(box, tenant="ball")
        (message,) = await received(box, 1)
        assert message.headers["tenant_id"] == "ball"
        await change(Handle.RESUME)
        await received(box, 3)


@on_two
async def test_h114_a_relay_serves_what_others_have_written(box: Pillarbox, engine: AsyncEngine) -> None:
    """It has the transport and no routes at all: the table knows them."""
    await place(box)
    broker = MemoryTransport()
    other = Pillarbox(engine, transports={"broker": broker})
    async with other:
        await other.relay().drain()
    assert len(broker.sent(TOPIC)) == 1


@on_two
async def test_h44_a_broker_that_heals_gets_what_it_rejected(box: Pillarbox) -> None:
    rejections = iter([True])
    broker_of(box).reject(lambda message: message.headers["version"] == "1" and next(rejections, False))
    async with running(box.relay()):
        await place(box, changes=1)
        messages = await received(box, 2)
        await soon(lambda: settled(box))
    assert [message.headers["version"] for message in messages] == ["1", "2"]


@on_two
@pytest.mark.every_loop
async def test_w7_a_commit_of_this_process_is_sent_without_waiting_for_a_look(box: Pillarbox) -> None:
    relay = _without_looking(box.relay())
    async with running(relay):
        await soon(lambda: _holds(box, {relay.name: 16}))
        for count in range(1, 6):
            await place(box)
            await received(box, count)


def _without_looking(relay: Relay) -> Relay:
    relay._keep_looking = asyncio.Event.wait  # type: ignore[method-assign, assignment]
    return relay


async def test_a_key_with_many_parked_events_goes_on_without_a_pause(postgres_database: Database) -> None:
    """Its rows go a batch at a time, and the first of those behind them is due only when they are settled."""
    async with outbox(postgres_database.url()) as here:
        await here.set_up()
        await here.write(" ".join(f"a{number}" for number in range(1, 31)))
        lane = await here.take(lease=60)
        page, _ = await here.look(lane)
        first, *behind = [row.id for row in page.fresh]
        failed = Batch(failures=[Failure(first, 0, None, 0.0)], parked=behind, cursor=page.cursor)
        broker = MemoryTransport()
        worker = LaneWorker(
            await here.store.announce(lane, failed, settle=False),
            here.store,
            broker,
            producer="p",
            deadline=clock.current().monotonic() + 60,
            rejections=Rejections(half),
            counts=Counts(),
            draw=half,
            changed=lambda: None,
            acknowledged={},
        )
        worker.pace = Pace(batch=5)
        working = asyncio.create_task(worker.run())
        await broker.received(COPIES, 30)
        worker.stop()
        await working
        assert [message.body.decode() for message in broker.sent(COPIES)] == [f"a{number}" for number in range(1, 31)]
