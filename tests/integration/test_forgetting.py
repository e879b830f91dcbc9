"""Forgetting a consumer that is gone: nothing of it stays, nothing of others goes, and one that lives is left alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import ColumnElement, Table, event, func, select, text, update

from pillarbox import Message, Pillarbox, Reject
from pillarbox.errors import StoreError
from pillarbox.inbox import consumer_id
from pillarbox.outbox import stable_hash
from pillarbox.stores import forgetting, overview
from pillarbox.stores import inbox as stored
from pillarbox.stores.forgetting import Remains
from pillarbox.stores.operations import Action
from pillarbox.stores.tables import claims, consumers, failures, inbox, lanes, requests, routes
from pillarbox.stores.tables import deliveries as tables
from pillarbox.transports.memory import MemoryTransport
from tests.conftest import EACH_DATABASE, FreshDatabase
from tests.questions import TOPIC, Asked, answering, ask, ask_for, effects, open_box
from tests.relays import until
from tests.servers import Database

pytestmark = pytest.mark.dialects


@pytest.fixture(params=EACH_DATABASE)
def database(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> Database:
    return fresh_database(request.param, shards=2)


@pytest.fixture
async def opened(database: Database) -> AsyncIterator[tuple[Pillarbox, MemoryTransport]]:
    async with open_box(database) as found:
        yield found


@pytest.fixture
def box(opened: tuple[Pillarbox, MemoryTransport]) -> Pillarbox:
    return opened[0]


@pytest.fixture
def broker(opened: tuple[Pillarbox, MemoryTransport]) -> MemoryTransport:
    return opened[1]


async def remains(box: Pillarbox, name: str = "answers") -> Remains:
    async with box.engine.connect() as connection:
        return await connection.run_sync(forgetting.remains, name)


async def forget(box: Pillarbox, name: str = "answers", *, discard: bool = False) -> Counter[str]:
    gone = Counter[str]()
    while True:
        async with box.engine.begin() as connection:
            portion = await connection.run_sync(forgetting.forget, name, discard=discard)
        if portion is None:
            return gone
        gone[portion[0]] += portion[1]


async def be_gone(box: Pillarbox) -> None:
    """As if consumers had been stopped long ago."""
    async with box.engine.begin() as connection:
        await connection.execute(update(consumers).values(seen_at=datetime(2001, 1, 1, tzinfo=UTC)))


async def rows_of(box: Pillarbox, name: str) -> dict[str, int]:
    """How many rows of each table are about a consumer."""
    route, number = stable_hash(f"consumer:{name}"), consumer_id(name)
    of_route = (tables["pillarbox_inbound"], lanes, failures, requests)
    conditions: list[tuple[Table, ColumnElement[bool]]] = [(each, each.c.route == route) for each in of_route]
    conditions += [(routes, routes.c.id == route), (consumers, consumers.c.id == number)]
    conditions += [(each, each.c.consumer == number) for each in (inbox, claims)]
    found = {}
    async with box.engine.connect() as connection:
        for table, condition in conditions:
            found[table.name] = await connection.scalar(select(func.count()).select_from(table).where(condition)) or 0
        if connection.dialect.name == "postgresql":
            told = text("SELECT count(*) FROM pillarbox_journal WHERE route = :route")
            found["pillarbox_journal"] = await connection.scalar(told, {"route": route})
    return found


async def two_consumers(box: Pillarbox) -> None:
    """Each has taken two messages in, and refused one; one waits for a redrive."""
    for name in ("answers", "others"):
        consumer = answering(box, name)

        @consumer.on(Asked)
        async def refuse(event: Asked) -> None:
            if event.number < 0:
                raise Reject("less than nothing")

    await ask(box, ("a", 1), ("b", 2), ("c", -1))
    for consumer in box.consumers.values():
        await consumer.drain()
        await ask_for(box, Action.REDRIVE, consumer.name)
    await be_gone(box)


async def test_nothing_of_it_stays_and_nothing_of_others_goes(box: Pillarbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting, "AT_ONCE", 2)
    await two_consumers(box)
    other = await rows_of(box, "others")
    assert min(other.values()) >= 1
    found = await remains(box)
    assert (found.inbox, found.deliveries, found.waiting) == (3, 1, 1)
    gone = await forget(box, discard=True)
    assert (gone["inbox"], gone["deliveries"], gone["claims"], gone["requests"]) == (3, 1, 1, 1)
    assert set((await rows_of(box, "answers")).values()) == {0}
    assert await rows_of(box, "others") == other
    with pytest.raises(StoreError, match="there is no consumer 'answers'"):
        await remains(box)


async def test_it_may_come_again_and_begins_anew(box: Pillarbox) -> None:
    await two_consumers(box)
    await forget(box, discard=True)
    box._outbox.forget()  # as a new process
    await ask(box, ("d", 4), ("e", -5))
    assert (await box.consumers["answers"].drain()).spilled == 1
    assert ("d", 4) in await effects(box)
    found = await rows_of(box, "answers")
    assert (found["pillarbox_inbox"], found["pillarbox_inbound"], found["pillarbox_claims"]) == (2, 1, 1)


async def test_what_waits_is_discarded_only_if_that_is_said(box: Pillarbox) -> None:
    await two_consumers(box)
    before = await rows_of(box, "answers")
    with pytest.raises(StoreError, match=r"messages wait for answers \(1, dead letters"):
        await forget(box)
    assert await rows_of(box, "answers") == before


async def test_one_that_is_alive_is_left_alone(box: Pillarbox) -> None:
    consumer = answering(box)
    await ask(box, ("a", 1))
    running = asyncio.create_task(consumer.run())
    async with asyncio.timeout(60):
        await until(lambda: consumer.healthy and consumer.status()["handled"] == 1)
    async with box.engine.connect() as connection:
        [relay] = [each.name for each in await connection.run_sync(overview.live_relays) if each.routes]
    with pytest.raises(StoreError, match="'answers' is alive") as refused:
        await forget(box)
    assert relay in str(refused.value)
    consumer.stop()
    await running
    with pytest.raises(StoreError, match="'answers' was seen 0 seconds ago"):
        await forget(box)
    await be_gone(box)
    assert (await forget(box))["inbox"] == 1


async def test_one_that_has_just_registered_is_left_alone(box: Pillarbox) -> None:
    """Its relay may not have been heard of yet, and its first note is seconds away."""
    consumer = answering(box)
    await consumer.register()
    with pytest.raises(StoreError, match="'answers' was seen 0 seconds ago"):
        await remains(box)
    await be_gone(box)
    await consumer.register()
    with pytest.raises(StoreError, match="'answers' was seen 0 seconds ago"):
        await forget(box)


on_servers = pytest.mark.parametrize("database", ["embedded", "mariadb"], indirect=True)
"""SQLite has one writer at a time."""


@on_servers
async def test_one_that_is_just_registering_is_left_alone(box: Pillarbox) -> None:
    consumer = answering(box)
    await consumer.register()
    await be_gone(box)
    async with box.engine.begin() as starting:
        await starting.run_sync(stored.register_consumer, "answers", kind="handlers", source="broker", topics=[TOPIC])
        forgetting_it = asyncio.create_task(forget(box))
        await asyncio.wait([forgetting_it], timeout=0.5)
    with pytest.raises(StoreError, match="'answers' was seen"):
        await forgetting_it
    assert (await rows_of(box, "answers"))["pillarbox_consumers"] == 1


@on_servers
async def test_one_that_registers_while_it_is_forgotten_begins_anew(box: Pillarbox) -> None:
    consumer = answering(box)
    await consumer.register()
    await be_gone(box)
    async with box.engine.begin() as connection:
        while await connection.run_sync(forgetting.forget, "answers", discard=False) is not None:
            pass
        starting = asyncio.create_task(consumer.register())
        await asyncio.wait([starting], timeout=0.5)
        assert not starting.done()
    await starting
    assert (await rows_of(box, "answers"))["pillarbox_consumers"] == 1


async def test_copies_of_its_dead_letters_go_with_it(box: Pillarbox, broker: MemoryTransport) -> None:
    consumer = answering(box)
    await broker.send("a stranger", [Message(TOPIC, "a", b"not json", {"event_id": "?"})])
    await consumer.drain()
    await be_gone(box)
    copies = stable_hash("dlq:answers")
    assert (await remains(box)).waiting == 2
    await box.relay().drain()
    assert len(broker.sent(f"{TOPIC}.dlq")) == 1
    assert (await remains(box)).waiting == 1
    await forget(box, discard=True)
    async with box.engine.connect() as connection:
        for column in (routes.c.id, lanes.c.route, tables["pillarbox_outbox"].c.route):
            assert (await connection.execute(select(column).where(column == copies))).all() == []


async def test_a_consumer_of_the_outbox(box: Pillarbox) -> None:
    """What it has not taken yet waits in the outbox."""
    consumer = box.consumer("answers", source="outbox")

    @consumer.on(Asked)
    async def refuse(event: Asked) -> None:
        if event.number < 0:
            raise Reject("less than nothing")

    await ask(box, ("a", 1), ("b", -2))
    await consumer.drain()
    await ask(box, ("c", 3))
    await be_gone(box)
    found = await remains(box)
    assert (found.inbox, found.waiting) == (1, 2)
    [route] = found.routes
    assert route.table == "pillarbox_outbox"
    with pytest.raises(StoreError, match=r"messages wait for answers \(2, "):
        await forget(box)
    await forget(box, discard=True)
    rows = tables[route.table]
    async with box.engine.connect() as connection:
        assert await connection.scalar(select(func.count()).select_from(rows).where(rows.c.route == route.id)) == 0
        assert await connection.scalar(select(func.count()).select_from(lanes).where(lanes.c.route == route.id)) == 0
        assert (await connection.scalar(select(func.count()).select_from(rows)) or 0) == 3  # those for the broker


@pytest.mark.parametrize("database", ["embedded"], indirect=True)
async def test_its_deliveries_are_counted_without_a_look_at_those_of_others(box: Pillarbox) -> None:
    await two_consumers(box)
    async with box.engine.begin() as connection:
        await connection.execute(
            text("""
INSERT INTO pillarbox_inbound (event_id, event_type, route, shard, schema_version, topic, key, headers, body)
SELECT gen_random_uuid(), 'tests.asked', 7, 0, 1, 'questions', 'k', '{}', '' FROM generate_series(1, 5000)
            """)
        )
    async with box.engine.begin() as connection:
        await connection.execute(text("ANALYZE pillarbox_inbound"))
    asked: list[tuple[str, Any]] = []
    event.listen(box.engine.sync_engine, "before_cursor_execute", lambda *given: asked.append((given[2], given[3])))
    assert (await remains(box)).deliveries == 1
    counts = [each for each in asked if "FROM pillarbox_inbound" in each[0]]
    assert counts
    async with box.engine.connect() as connection:
        for statement, parameters in counts:
            plan = await connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)
            said = "\n".join(row[0] for row in plan)
            assert "ix_pillarbox_inbound_lane" in said, said
