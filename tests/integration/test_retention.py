"""What may go, what never does, and the way into an archive and back, on every database.

"Old" is meant by a clock that is an hour ahead, so that all that was ever written is old enough.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox import IntegrationEvent, Pillarbox, RetryPolicy, Route
from pillarbox.errors import StoreError
from pillarbox.outbox import (
    INBOUND,
    INBOX_DESTINATION,
    OUTBOUND,
    Batch,
    Delivery,
    Lane,
    RouteRecord,
    Status,
    stable_hash,
)
from pillarbox.stores import archive, archive_file, inspection, operations, retention, sqlite, store_on
from pillarbox.stores.append import Appender
from pillarbox.stores.archive_file import Archived, Writer
from pillarbox.stores.audit import Author
from pillarbox.stores.inspection import Filter
from pillarbox.stores.operations import Action, Run, Selection
from pillarbox.stores.retention import Page, Position, Scope
from pillarbox.testing.conformance.outbox import delivery
from pillarbox.transports.memory import MemoryTransport
from tests.domain import make_due
from tests.relays import running
from tests.servers import Database

pytestmark = pytest.mark.dialects

TOPIC, ROUTE = "depot.events", "broker:depot.events"
ROUTE_ID = stable_hash(ROUTE)
ANNA = Author("anna@office", "the disk is full")
AHEAD = -3600.0
KEYS = [key for key in (f"truck-{number}" for number in range(200)) if stable_hash(key) % 16 == 0]
"""Of one lane."""

_T = TypeVar("_T")

on_postgres = pytest.mark.parametrize("database", ["embedded"], indirect=True)


class Came(IntegrationEvent, name="retention.truck.came"):
    load: str = ""


class Depot:
    """An outbox with one route, its broker, and somebody who prunes it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.is_log = engine.dialect.name == "postgresql"
        self.store = store_on(engine)
        self.broker = MemoryTransport()
        retry = RetryPolicy(base=0.001, cap=0.001, attempts=2)
        routes = [Route("retention.**", to="broker", topic=TOPIC, retry=retry)]
        self.box = Pillarbox(engine, transports={"broker": self.broker}, routes=routes)

    async def publish(self, *keys: str, load: str = "") -> None:
        for key in keys:
            async with self.box.unit_of_work(tenant="acme") as uow:
                uow.publish(Came(load=load), key=key)

    async def drain(self) -> None:
        await make_due(self.engine)
        await self.box.relay().drain()

    async def ask(self, question: Callable[..., _T], *arguments: Any) -> _T:
        async with self.engine.begin() as connection:
            return await connection.run_sync(question, *arguments)

    async def execute(self, statement: str, **values: Any) -> list[Any]:
        def execute(connection: Connection) -> list[Any]:
            done = connection.execute(text(statement), values)
            return [tuple(row) for row in done] if done.returns_rows else []

        return await self.ask(execute)

    async def scope(self, route: str | None = None, older_than: float = AHEAD) -> Scope:
        return await self.ask(lambda it: retention.scope(it, older_than=older_than, route=route))

    async def pages(self, scope: Scope, limit: int = 2) -> AsyncIterator[Page]:
        for place in await self.ask(retention.stretches, scope):
            async for page in self.pages_of(scope, place, limit):
                yield page

    async def pages_of(self, scope: Scope, place: retention.Stretch, limit: int = 2) -> AsyncIterator[Page]:
        page = Page((), ())
        while page.after is not None:
            page = await self.ask(retention.page, scope, place, page.after, limit)
            yield page

    async def prune(self, **given: Any) -> tuple[int, int]:
        """How many deliveries have gone, and how many lines of the journal."""
        scope, gone, lines = await self.scope(**given), 0, 0
        places = await self.ask(retention.stretches, scope)
        for place in places:
            async for page in self.pages_of(scope, place):
                gone += await self.ask(retention.remove, page.keys, place.table)
        for place in places:
            after: Position | None = ()
            while after is not None:
                cleared, after = await self.ask(retention.clear_journal, place, after, 2)
                lines += cleared
        return gone, lines

    async def archive(self, path: Path) -> list[Archived]:
        scope = await self.scope()
        writer = Writer(path, await self.ask(archive.header, scope.now))
        async for page in self.pages(scope):
            for portion in archive_file.portions(page.keys):
                writer.add(await self.ask(archive.fetch, portion))
        writer.close()
        writer.finish()
        rows = [*archive_file.read(path)]
        assert await self.ask(retention.remove, [row.row for row in rows]) == len(rows)
        return rows

    async def rows(self) -> list[tuple[str, str]]:
        """What people see: keys and statuses."""
        found = await self.ask(lambda it: inspection.deliveries(it, Filter(), after=0, limit=1000))
        return [(row.key, row.status) for row in found]

    async def request(self, action: Action, key: str) -> None:
        selection = Selection(action, Filter(key=key))
        assert (await self.ask(operations.request, selection, ANNA, Run(), 100)).requested

    async def take(self) -> Lane:
        (lane,) = await self.store.take("relay-1", lease=60, wanted={ROUTE_ID: 1}, shards={ROUTE_ID: [0]})
        return lane

    @property
    def sent(self) -> list[str]:
        return [message.key for message in self.broker.sent(TOPIC)]


@pytest.fixture
async def depot(database: Database) -> AsyncIterator[Depot]:
    url = database.url()
    extra: dict[str, Any] = {"connect_args": {"timeout": 30}} if database.kind == "sqlite" else {}
    engine = create_async_engine(url, **extra)
    depot = Depot(engine)
    sqlite.configure_transactions(engine.sync_engine)
    async with depot.box:
        await depot.box.migrate()
        yield depot
    await engine.dispose()


class TestH62AgeAloneNeverDeletes:
    async def test_h62_what_is_sent_goes_and_what_waits_stays(self, depot: Depot) -> None:
        await depot.publish("a", "b", "c")
        await depot.drain()
        await depot.publish("d", "e")
        assert await depot.prune() == (3, 3 if depot.is_log else 0)
        assert await depot.rows() == [("d", Status.PENDING), ("e", Status.PENDING)]
        await depot.drain()
        assert sorted(depot.sent) == ["a", "b", "c", "d", "e"]
        assert (await depot.prune())[0] == 2
        assert await depot.prune() == (0, 0)

    async def test_h62_what_has_failed_and_what_is_behind_it_stays(self, depot: Depot) -> None:
        depot.broker.reject(lambda message: message.key == "bad")
        await depot.publish("good", "bad", "bad", "good")
        for _ in range(3):
            await depot.drain()
        assert [*depot.sent] == ["good", "good"]
        assert (await depot.prune())[0] == 2
        assert await depot.rows() == [("bad", Status.FAILED), ("bad", Status.PARKED)]

        depot.broker.stop_rejecting()
        await depot.request(Action.REDRIVE, "bad")
        for _ in range(3):
            await depot.drain()
        assert depot.sent == ["good", "good", "bad", "bad"]
        assert (await depot.prune())[0] == 2
        assert await depot.rows() == []

    async def test_what_is_young_stays(self, depot: Depot) -> None:
        await depot.publish("a")
        await depot.drain()
        assert await depot.prune(older_than=3600.0) == (0, 0)
        assert await depot.rows() == [("a", Status.SENT)]

    async def test_what_was_discarded_goes_with_its_record(self, depot: Depot) -> None:
        depot.broker.reject(lambda message: message.key == "bad")
        await depot.publish("bad")
        for _ in range(3):
            await depot.drain()
        await depot.request(Action.DISCARD, "bad")
        await depot.drain()
        assert await depot.rows() == [("bad", Status.DISCARDED)]
        assert (await depot.prune())[0] == 1
        assert await depot.rows() == []
        assert await depot.execute("SELECT * FROM pillarbox_failures") == []

    async def test_only_of_one_route(self, depot: Depot) -> None:
        await depot.publish("a")
        await depot.drain()
        with pytest.raises(StoreError, match="there is no route 'other'"):
            await depot.prune(route="other")
        assert (await depot.prune(route=ROUTE))[0] == 1

    async def test_events_with_ids_of_all_kinds(self, depot: Depot) -> None:
        """Ids tell the time only if they are of version 7."""
        async with depot.box.unit_of_work() as uow:
            for _ in range(7):
                uow.publish(Came(event_id=uuid4()), key="a")
        await depot.drain()
        if depot.is_log:  # as if they had come back from an archive
            await depot.execute("UPDATE pillarbox_outbox SET status = 'SENT', sent_at = now()")
        assert (await depot.prune())[0] == 7


async def test_what_consumers_have_dealt_with_goes_and_is_never_archived(depot: Depot) -> None:
    store, route = store_on(depot.engine, INBOUND), RouteRecord("consumer:billing", INBOX_DESTINATION, "billing")
    await depot.publish("a")
    await depot.drain()
    await depot.ask(store.register, [route])
    await depot.ask(store.append, [delivery(key, route=route) for key in "bcd"])
    (lane,) = await store.take("consumer", lease=60, wanted={route.id: 1}, shards={route.id: [0]})
    page = await store.poll(lane, limit=2)
    batch = Batch([row.id for row in page.fresh], cursor=page.cursor)
    await store.settle(await store.announce(lane, batch, settle=False))
    scope = await depot.ask(partial(retention.scope, older_than=AHEAD, tables=(OUTBOUND,)))
    assert {place.table for place in await depot.ask(retention.stretches, scope)} == {OUTBOUND}
    with pytest.raises(StoreError, match="are in pillarbox_inbound, not in pillarbox_outbox"):
        await depot.ask(partial(retention.scope, older_than=AHEAD, route=route.name, tables=(OUTBOUND,)))
    assert (await depot.prune(route=route.name))[0] == 2
    assert await depot.rows() == [("a", Status.SENT), ("d", Status.PENDING)]
    assert (await depot.prune())[0] == 1
    assert await depot.rows() == [("d", Status.PENDING)]


async def test_what_failed_and_came_to_its_end_goes(depot: Depot) -> None:
    await depot.publish("thrown", "edited", "good")
    depot.broker.reject(lambda message: message.key != "good")
    for _ in range(3):
        await depot.drain()
    assert await depot.rows() == [("thrown", Status.FAILED), ("edited", Status.FAILED), ("good", Status.SENT)]
    assert (await depot.prune())[0] == 1

    depot.broker.stop_rejecting()
    await depot.request(Action.DISCARD, "thrown")
    new = uuid4()
    await depot.ask(_edit, "edited", new)
    await depot.drain()
    assert depot.sent == ["good", "edited"]
    (found,) = await depot.ask(lambda it: inspection.deliveries_of(it, new, payload=True))
    assert (found.status, found.payload) == (Status.SENT, '{"load": "other"}')
    assert await depot.rows() == [("thrown", Status.DISCARDED), ("edited", Status.SENT)]
    assert (await depot.prune(older_than=3600.0))[0] == 0
    assert (await depot.prune())[0] == 2
    assert await depot.rows() == []

    await depot.publish("thrown", "edited")
    await depot.drain()
    await depot.prune()
    assert await depot.execute("SELECT * FROM pillarbox_failures") == []
    if depot.is_log:
        assert await depot.execute("SELECT * FROM pillarbox_journal") == []


def _edit(connection: Connection, key: str, event_id: UUID) -> None:
    (found,) = inspection.deliveries(connection, Filter(key=key), after=0, limit=2)
    (details,) = inspection.deliveries_of(connection, found.event_id, payload=True)
    operations.edit(connection, details, ANNA, old=b"{}", new=b'{"load": "other"}', event_id=event_id)


class TestAnnounced:
    async def test_rows_on_their_way_are_never_touched(self, depot: Depot) -> None:
        await depot.publish(*KEYS[:4])
        lane = await depot.take()
        page = await depot.store.poll(lane, limit=2)
        items = [row.id for row in page.fresh]
        lane = await depot.store.announce(lane, Batch(items, cursor=page.cursor), settle=False)
        assert (await depot.prune())[0] == 0
        assert [row.id for _, row in await depot.store.rebuild(lane)] == items
        lane = await depot.store.settle(lane)
        assert (await depot.prune())[0] == 2
        assert [key for key, _ in await depot.rows()] == KEYS[2:4]


def _delivery(key: str, body: bytes = b"{}") -> Delivery:
    headers = {"content_type": "application/octet-stream"}
    return Delivery(uuid4(), "retention.truck.came", ROUTE_ID, 0, 1, TOPIC, key, None, headers, body)


@on_postgres
class TestH101PrunedBeforeItWasSeen:
    async def test_h101_a_row_that_commits_late_is_delivered(self, depot: Depot) -> None:
        await depot.publish(KEYS[5])
        await depot.drain()
        async with depot.engine.connect() as first, first.begin():
            await first.run_sync(Appender().append, [_delivery(KEYS[0])])  # the lower id
            await depot.publish(KEYS[1])
            await depot.drain()
            assert depot.sent == [KEYS[5], KEYS[1]]
            # The second one was sent, but it is not older than all that was at work: it may stay.
            assert (await depot.prune())[0] == 1
        assert (await depot.prune())[0] == 0
        assert await depot.rows() == [(KEYS[0], Status.PENDING), (KEYS[1], Status.SENT)]
        await depot.drain()
        assert depot.sent == [KEYS[5], KEYS[1], KEYS[0]]
        assert (await depot.prune())[0] == 2
        assert await depot.execute("SELECT * FROM pillarbox_journal") == []

    async def test_h101_late_rows_that_are_dealt_with_in_pages(self, depot: Depot) -> None:
        await depot.publish(KEYS[5])
        await depot.drain()
        async with depot.engine.connect() as first, first.begin():
            await first.run_sync(Appender().append, [_delivery(key) for key in KEYS[:5]])
            await depot.publish(KEYS[6])
            await depot.drain()
        lane, seen = await depot.take(), []
        for _ in range(3):
            page = await depot.store.poll(lane, limit=2)
            items = [row.id for row in page.fresh]
            lane = await depot.store.announce(lane, Batch(items, cursor=page.cursor), settle=False)
            lane = await depot.store.settle(lane)
            seen += [row.key for row in page.fresh]
            await depot.prune()
        assert seen == KEYS[:5]
        assert (await depot.rows()) == []

    async def test_h101_a_rolled_back_transaction_holds_nothing(self, depot: Depot) -> None:
        async with depot.engine.connect() as first:
            transaction = await first.begin()
            await first.run_sync(Appender().append, [replace(_delivery(KEYS[0]), route=1)])
            await depot.publish(KEYS[1])
            await depot.drain()
            await transaction.rollback()
        await depot.publish(KEYS[2])
        await depot.drain()
        assert (await depot.prune())[0] == 2

    async def test_a_copy_is_refused(self, depot: Depot) -> None:
        await depot.publish("a")
        await depot.drain()
        await depot.execute("UPDATE pillarbox_origin SET first_xmin = first_xmin + 1 WHERE id = 2")
        with pytest.raises(StoreError, match="this database is a copy"):
            await depot.prune()


@on_postgres
class TestJournal:
    async def test_says_when_a_row_was_sent_as_long_as_there_is_one(self, depot: Depot) -> None:
        """The dead row was passed by the first batch, and sent by the last one: in between everything may go."""
        depot.broker.reject(lambda message: message.key == KEYS[0])
        await depot.publish(*KEYS[:2])
        for _ in range(3):
            await depot.drain()
        for key in KEYS[2:8]:
            await depot.publish(key)
            await depot.drain()
        lines = len(await depot.execute("SELECT * FROM pillarbox_journal"))
        gone, cleared = await depot.prune()
        assert gone == 7
        assert 6 <= cleared == lines - len(await depot.execute("SELECT * FROM pillarbox_journal"))
        depot.broker.stop_rejecting()
        await depot.request(Action.REDRIVE, KEYS[0])
        await depot.drain()
        await depot.drain()
        (told,) = await depot.execute("SELECT status, sent_at FROM outbox_events")
        (last,) = await depot.execute("SELECT settled_at FROM pillarbox_journal WHERE redone <> '{}'")
        assert told == (Status.SENT, last[0])
        assert (await depot.prune())[0] == 1
        assert await depot.execute("SELECT * FROM pillarbox_journal") == []

    async def test_a_row_is_as_old_as_the_batch_that_passed_it(self, depot: Depot) -> None:
        await depot.publish("a")
        await depot.execute("UPDATE pillarbox_outbox SET created_at = now() - interval '30 days'")
        await depot.drain()  # after a month without a broker
        assert await depot.prune(older_than=86_400.0) == (0, 0)
        await depot.execute("UPDATE pillarbox_journal SET settled_at = now() - interval '2 days'")
        assert await depot.prune(older_than=86_400.0) == (1, 1)


@on_postgres
class TestPlans:
    async def test_every_statement_goes_by_an_index(self, depot: Depot) -> None:
        """However many rows there are, and with what the server knows of them."""
        await depot.publish(KEYS[0])
        columns = "event_type, route, shard, schema_version, topic, key, headers, body"
        await depot.execute(
            f"INSERT INTO pillarbox_outbox (event_id, {columns}) "
            f"SELECT gen_random_uuid(), {columns.replace('shard', 'g % 16')} "
            "FROM pillarbox_outbox, generate_series(1, 9000) g"
        )
        await depot.drain()
        await depot.execute("ANALYZE pillarbox_outbox")
        statements: list[tuple[str, Any]] = []

        def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
            statements.append((statement, parameters))

        def begun(_connection: object) -> None:
            statements.append(("BEGIN", ()))

        event.listen(depot.engine.sync_engine, "begin", begun)
        event.listen(depot.engine.sync_engine, "before_cursor_execute", note)
        scope = await depot.scope()
        for place in await depot.ask(retention.stretches, scope):
            page = await depot.ask(retention.page, scope, place, (), 100)
            if page.after:
                page = await depot.ask(retention.page, scope, place, page.after, 100)
            await depot.ask(archive.fetch, page.keys)
            await depot.ask(retention.remove, page.keys)
            await depot.ask(retention.clear_journal, place, (), 100)
        event.remove(depot.engine.sync_engine, "before_cursor_execute", note)
        event.remove(depot.engine.sync_engine, "begin", begun)
        explained = 0
        async with depot.engine.connect() as connection:
            for statement, given in statements:
                if statement == "BEGIN":
                    await connection.rollback()
                elif "set_config" in statement:
                    await connection.exec_driver_sql(statement, given)
                elif "pillarbox_outbox" in statement:
                    plan = "\n".join(row[0] for row in await connection.exec_driver_sql(f"EXPLAIN {statement}", given))
                    assert "Seq Scan on pillarbox_outbox" not in plan, f"{statement}\n{plan}"
                    explained += 1
        assert explained > 60


class TestH49BesideTheOthers:
    async def test_h49_writers_and_relays_notice_nothing(self, depot: Depot) -> None:
        """Three write, a relay sends and two prune at the same time: nothing is lost, doubled, or in the way."""
        count, done = 60, asyncio.Event()
        pruned = 0

        async def write(name: str) -> None:
            for _ in range(count):
                await depot.publish(name)

        async def prune() -> None:
            nonlocal pruned
            while not done.is_set():
                pruned += (await depot.prune())[0]

        writers = ("left", "right", "middle")
        async with running(depot.box.relay()), asyncio.TaskGroup() as group:
            pruners = [group.create_task(prune()) for _ in range(2)]
            async with asyncio.TaskGroup() as inner:
                for name in writers:
                    inner.create_task(write(name))
            async with asyncio.timeout(60):
                await depot.broker.received(TOPIC, 3 * count)
            done.set()
            await asyncio.wait(pruners)
        await depot.publish(*KEYS)
        await depot.drain()
        assert sorted(depot.sent) == sorted([*(name for name in writers for _ in range(count)), *KEYS])
        assert pruned + (await depot.prune())[0] > 0  # beside them, or at last: a busy lane lets go of little


class TestArchive:
    @pytest.mark.parametrize("name", ["old.jsonl", "old.jsonl.zst"])
    async def test_there_and_back_as_history(self, depot: Depot, tmp_path: Path, name: str) -> None:
        await depot.publish("a", "b", load="fünf Äpfel")
        await depot.ask(Appender().append, [_delivery(KEYS[0], b"\xff\x00binary")])
        await depot.drain()
        before = await _seen(depot)
        rows = await depot.archive(tmp_path / name)
        assert await depot.rows() == []
        assert {row.status for row in rows} == {Status.SENT}
        assert all(row.sent_at for row in rows)
        assert [row.body_base64 is not None for row in rows].count(True) == 1

        assert await depot.ask(lambda it: archive.restore(it, rows, resend=False)) == 3
        assert await depot.ask(lambda it: archive.restore(it, rows, resend=False)) == 0
        assert await _seen(depot) == before
        await depot.drain()
        assert len(depot.sent) == 3
        assert (await depot.prune())[0] == 3

    async def test_to_be_sent_again(self, depot: Depot, tmp_path: Path) -> None:
        await depot.publish("a", "a", "b")
        await depot.drain()
        path = tmp_path / "old.jsonl"
        await depot.archive(path)
        summary = archive_file.verify(path)
        rows = [*archive_file.read_in_order(path, summary)]
        assert await depot.ask(lambda it: archive.restore(it, rows[:2], resend=True)) == 2
        assert await depot.ask(lambda it: archive.restore(it, rows, resend=True)) == 1
        assert {status for _, status in await depot.rows()} == {Status.PENDING}
        await depot.drain()
        messages = depot.broker.sent(TOPIC)
        sent = [(message.key, message.headers["event_id"], message.body) for message in messages]
        assert sorted(sent[3:]) == sorted(sent[:3])
        assert [event for key, event, _ in sent[3:] if key == "a"] == [
            event for key, event, _ in sent[:3] if key == "a"
        ]
        # What is still in the outbox is no second event.
        assert await depot.ask(lambda it: archive.restore(it, rows, resend=True)) == 0

    async def test_an_edit_is_archived_as_it_was_sent(self, depot: Depot, tmp_path: Path) -> None:
        depot.broker.reject(lambda message: b"heavy" in message.body)
        await depot.publish("a", load="heavy")
        for _ in range(3):
            await depot.drain()
        (row,) = await depot.ask(lambda it: inspection.deliveries(it, Filter(), after=0, limit=9))
        (details,) = await depot.ask(lambda it: inspection.deliveries_of(it, row.event_id, payload=False))
        new = uuid4()
        await depot.ask(lambda it: operations.edit(it, details, ANNA, old=b"", new=b'{"load":"light"}', event_id=new))
        await depot.drain()
        await depot.drain()
        (kept,) = await depot.archive(tmp_path / "old.jsonl")
        assert (kept.event_id, kept.content, kept.headers["original_event_id"]) == (
            new,
            b'{"load":"light"}',
            str(row.event_id),
        )
        assert await depot.rows() == []
        assert await depot.execute("SELECT * FROM pillarbox_failures") == []

    async def test_into_a_table(self, depot: Depot) -> None:
        await depot.publish("a", "b")
        await depot.drain()

        def move(connection: Connection, keys: Sequence[retention.RowKey]) -> None:
            kept = archive.archive_table(connection, "old_deliveries")
            kept.create(connection, checkfirst=True)
            if keys:
                archive.keep(connection, kept, archive.fetch(connection, keys))
            retention.remove(connection, keys)

        async for page in depot.pages(await depot.scope()):
            await depot.ask(move, page.keys)
        assert await depot.rows() == []
        found = await depot.execute("SELECT route, status FROM old_deliveries ORDER BY id")
        assert found == [(ROUTE, Status.SENT)] * 2
        for name in ("pillarbox_outbox", "Robert'; DROP", "outbox_events"):
            with pytest.raises(StoreError, match="cannot be the name of an archive: "):
                await depot.ask(archive.archive_table, name)
        await depot.execute("CREATE TABLE others (id integer)")
        with pytest.raises(StoreError, match="table others is no archive of Pillarbox"):
            await depot.ask(archive.archive_table, "others")


async def _seen(depot: Depot) -> list[tuple[Any, ...]]:
    found = await depot.ask(lambda it: inspection.deliveries(it, Filter(), after=0, limit=100))
    details = [
        (await depot.ask(lambda it, row=row: inspection.deliveries_of(it, row.event_id, payload=True)))[0]
        for row in found
    ]
    return sorted(
        (
            it.event_id,
            it.key,
            it.tenant_id,
            it.status,
            it.created_at,
            it.sent_at,
            it.payload,
            sorted(it.headers.items()),
        )
        for it in details
    )


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
class TestDamage:
    @pytest.fixture
    async def path(self, depot: Depot, tmp_path: Path) -> Path:
        await depot.publish("a", "b", "c")
        await depot.drain()
        await depot.archive(tmp_path / "old.jsonl")
        return tmp_path / "old.jsonl"

    def test_of_a_file(self, path: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        assert len(lines) == 5
        for damaged, said in (
            (lines[:-1], "its end is missing"),
            ([*lines[:2], *lines[3:]], "3 deliveries with another checksum than the 2 in it"),
            ([*lines[:2], lines[2].replace(b"SENT", b"sent"), *lines[3:]], "is damaged"),
            ([*lines[:2], lines[2].replace(b'"acme"', b'"acne"'), *lines[3:]], "another checksum"),
            ([*lines[:-1], lines[-1][:20]], "its end is missing"),
            ([], "its end is missing"),
            ([b"hello\n", b"world\n"], "is no archive of Pillarbox"),
            ([lines[0].replace(b'archive":1', b'archive":2'), *lines[1:]], "written by a newer release"),
            ([lines[0].replace(b'schema_version":', b'schema_version":9'), *lines[1:]], "written by a newer release"),
        ):
            path.write_bytes(b"".join(damaged))
            with pytest.raises(StoreError, match=said):
                archive_file.verify(path)
        with pytest.raises(StoreError, match="cannot read"):
            archive_file.verify(path.with_name("absent.jsonl"))

    async def test_of_a_compressed_file(self, depot: Depot, tmp_path: Path) -> None:
        await depot.publish(*"abcdefgh")
        await depot.drain()
        path = tmp_path / "old.jsonl.zst"
        await depot.archive(path)
        data = path.read_bytes()
        for damaged in (data[:-20], data[: len(data) // 2], b"x" + data[1:], b""):
            path.write_bytes(damaged)
            with pytest.raises(StoreError, match=r"is damaged|is no archive"):
                archive_file.verify(path)

    async def test_of_another_installation(self, depot: Depot, path: Path) -> None:
        summary = archive_file.verify(path)
        await depot.execute("UPDATE pillarbox_meta SET install_id = :it", it=uuid4().hex)
        with pytest.raises(StoreError, match="from another installation"):
            await depot.ask(lambda it: archive.check_origin(it, summary, foreign=False))
        await depot.ask(lambda it: archive.check_origin(it, summary, foreign=True))
        await depot.execute("UPDATE pillarbox_meta SET shards = 8")
        with pytest.raises(StoreError, match="with 16 shards, and this one has 8"):
            await depot.ask(lambda it: archive.check_origin(it, summary, foreign=True))

    async def test_a_route_that_nobody_serves_is_not_sent_again(self, depot: Depot, path: Path) -> None:
        rows = [*archive_file.read(path)]
        await depot.execute("DELETE FROM pillarbox_lanes")
        with pytest.raises(StoreError, match="nobody has ever written for route 'broker:depot\\.events' here"):
            await depot.ask(lambda it: archive.restore(it, rows, resend=True))

    async def test_rows_come_back_in_the_order_of_their_ids(self, depot: Depot, path: Path) -> None:
        """A log is archived lane by lane; its rows are sent again in the order in which they were written."""
        rows = [*archive_file.read(path)]
        other = path.with_name("other.jsonl")
        scope = await depot.scope()
        writer = Writer(other, await depot.ask(archive.header, scope.now))
        writer.add([replace(row, shard=0) for row in reversed(rows)])
        summary = writer.close()
        writer.finish()
        assert not summary.in_order
        assert [row.id for row in archive_file.read_in_order(other, summary)] == [row.id for row in rows]
        assert json.loads(other.read_bytes().splitlines()[-1])["count"] == 3
