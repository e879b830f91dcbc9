"""From a queue to a log and back, while writers write and relays send."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox import IntegrationEvent, Pillarbox, RetryPolicy, Route
from pillarbox.cursor import Cursor
from pillarbox.errors import LeaseLostError, StoreError
from pillarbox.outbox import Batch, Failure, Lane, LaneName, Status, stable_hash
from pillarbox.stores import convert, inspection, operations
from pillarbox.stores.convert import Conversion, Plan, Progress, Store
from pillarbox.stores.log import LogStore
from pillarbox.stores.migrations.step_0003 import INDEX
from pillarbox.stores.operations import Action, Change, Handle, Run, Selection, Tenant
from pillarbox.stores.tables import lanes, meta, outbox
from pillarbox.stores.trail import Author
from pillarbox.transport import Capabilities, Message
from pillarbox.transports.memory import MemoryTransport
from tests.domain import until_somebody_waits
from tests.relays import running, soon
from tests.servers import Database

ANNA = Author("anna@office", "it is time")
TOPIC = "mill.events"
KEYS = 24
SEED = 20261115


class Ground(IntegrationEvent, name="mill.grain.ground"):
    """The n-th sack of somebody."""

    number: int
    again: str = ""


class _ChangedItsMind(Exception):  # noqa: N818  leaves a unit of work by an error
    pass


class Mill:
    """A box, a broker that knows numbers, and what was committed."""

    def __init__(self, engine: AsyncEngine, *, numbered: bool = True, attempts: int = 3) -> None:
        self.engine = engine
        self.store = LogStore(engine)
        self.broker = MemoryTransport(Capabilities(numbered=numbered))
        retry = RetryPolicy(base=0.01, cap=0.02, attempts=attempts)
        self.route = Route("mill.**", to="broker", topic=TOPIC, retry=retry)
        self.box = Pillarbox(engine, transports={"broker": self.broker}, routes=[self.route])
        self.committed: list[tuple[str, int]] = []
        """Keys and numbers, in the order of commits."""

    async def write(self, key: str, *numbers: int, tenant: str | None = None) -> None:
        """In a transaction of its own, whatever the caller is in."""
        await asyncio.create_task(self._write(key, *numbers, tenant=tenant), context=Context())

    async def _write(self, key: str, *numbers: int, tenant: str | None) -> None:
        async with self.box.unit_of_work(tenant=tenant) as uow:
            for number in numbers:
                uow.publish(Ground(number=number), key=key)
        self.committed += [(key, number) for number in numbers]

    async def convert(self, to: Store, **options: Any) -> Progress:
        return await Conversion(self.engine, to, ANNA, **options).run()

    async def plan(self, to: Store) -> Plan:
        async with self.engine.connect() as connection:
            return await connection.run_sync(convert.plan, to)

    async def stores(self) -> Counter[Store]:
        """How many lanes are what."""
        async with self.engine.connect() as connection:
            cursors = await connection.scalars(select(lanes.c.cursor))
            return Counter(Store.QUEUE if cursor is None else Store.LOG for cursor in cursors)

    async def statuses(self, *columns: str) -> dict[tuple[str, int], Any]:
        """What people see."""
        async with self.engine.connect() as connection:
            rows = (await connection.execute(text("SELECT * FROM outbox_events ORDER BY id"))).all()
        found = {}
        for row in rows:
            values = tuple(row._mapping[column] for column in columns)
            found[row.key, json.loads(row.payload)["number"]] = (row.status, *values) if columns else row.status
        return found

    async def count(self, statement: str) -> int:
        async with self.engine.connect() as connection:
            return int((await connection.execute(text(statement))).scalar_one())

    async def ask(self, action: Action, key: str, status: Status) -> None:
        wanted = Selection(action, inspection.Filter(status, key=key))
        async with self.engine.begin() as connection:
            run = await connection.run_sync(operations.request, wanted, ANNA, Run(), 100)
        assert run.requested

    async def tenant(self, handle: Handle, tenant: str) -> None:
        async with self.engine.begin() as connection:
            await connection.run_sync(operations.apply, Change(handle, Tenant(tenant)), ANNA)

    async def build_index(self) -> None:
        """Beforehand: a conversion would wait for all who write."""
        async with self.engine.begin() as connection:
            await connection.execute(text(INDEX))

    async def take(self, count: int = 16) -> list[Lane]:
        async with self.engine.connect() as connection:
            (route,) = await connection.scalars(select(lanes.c.route).distinct())
        return await self.store.take("by hand", lease=60, wanted={route: count})

    def check(self, *, without: Sequence[tuple[str, int]] = (), copies: bool = False) -> None:
        """Nothing lost, no ghosts, nothing twice, and every key in its order."""
        sent = [(message.key, _number(message)) for message in self.broker.sent(TOPIC)]
        first = list(dict.fromkeys(sent))
        expected = {*self.committed} - {*without}
        assert expected - {*first} == set(), "lost"
        assert {*first} - expected == set(), "ghosts"
        if not copies:
            assert len(sent) == len(first), [it for it, count in Counter(sent).items() if count > 1]
        for key in {key for key, _ in first}:
            assert [it for it in first if it[0] == key] == [
                it for it in self.committed if it[0] == key and it not in {*without}
            ], f"{key} is out of order"


def _number(message: Message) -> int:
    return int(json.loads(message.body)["number"])


@asynccontextmanager
async def mill_on(database: Database, start: Store, **options: Any) -> AsyncIterator[Mill]:
    engine = create_async_engine(database.url(), pool_size=10)
    mill = Mill(engine, **options)
    try:
        async with mill.box:
            await mill.box.migrate()
            if start is Store.QUEUE:
                await mill.convert(Store.QUEUE)
            yield mill
    finally:
        await engine.dispose()


def other(store: Store) -> Store:
    return Store.QUEUE if store is Store.LOG else Store.LOG


BOTH = pytest.mark.parametrize("to", Store)


# -- under load --------------------------------------------------------------------------------------------------------


@dataclass
class Writers:
    """They write until they are told to stop; each has keys of its own."""

    mill: Mill
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    rolled_back: int = 0
    late: int = 0

    async def write(self, number: int) -> None:
        draw = random.Random(SEED + number)
        last = dict.fromkeys((f"k{key}" for key in range(number, KEYS, 4)), 0)
        while not self.stop.is_set():
            keys = draw.choices(list(last), k=draw.choice((1, 1, 2, 5, 20)))
            now = dict(last)
            try:
                async with self.mill.box.unit_of_work(tenant="slow" if number == 3 else None) as uow:
                    for key in keys:
                        now[key] += 1
                        uow.publish(Ground(number=now[key]), key=key)
                    if draw.random() < 0.3:  # others commit before us
                        await uow.flush()
                        self.late += 1
                        await asyncio.sleep(draw.random() * 0.05)
                    if draw.random() < 0.1:
                        raise _ChangedItsMind  # noqa: TRY301  it is what rolls back
            except _ChangedItsMind:
                self.rolled_back += 1
                continue
            new = [(key, each) for key in {*keys} for each in range(last[key] + 1, now[key] + 1)]
            self.mill.committed += new
            last = now
            await asyncio.sleep(0.03)


@pytest.mark.parametrize("numbered", [True, False])
async def test_there_and_back_under_load(postgres_database: Database, numbered: bool) -> None:
    async with mill_on(postgres_database, Store.QUEUE, numbered=numbered, attempts=50) as mill:
        draw, refused = random.Random(SEED), set[tuple[str, int]]()

        def refuse(message: Message) -> bool:
            """Some are refused, once or more."""
            chosen = _number(message) % 30 == 7 and draw.random() < 0.6
            if chosen:
                refused.add((message.key, _number(message)))
            return chosen

        mill.broker.reject(refuse)
        writers = Writers(mill)
        relays = [mill.box.relay(name=name, lease=3.0, batch=40) for name in ("one", "two")]
        taken_along = 0
        async with running(*relays):
            tasks = [asyncio.ensure_future(writers.write(number)) for number in range(4)]
            await mill.broker.received(TOPIC, 100)
            for number, to in enumerate((Store.LOG, Store.QUEUE) * 2):
                if number in (1, 3):
                    await mill.tenant(Handle.PAUSE if number == 1 else Handle.RESUME, "slow")
                progress = await mill.convert(to, patience=0.1)
                assert not progress.left
                assert not progress.unfinished
                taken_along += progress.batches
                assert await mill.stores() == {to: 16}
                await mill.broker.received(TOPIC, len(mill.broker.sent(TOPIC)) + 50)
            writers.stop.set()
            await asyncio.gather(*tasks)
            mill.broker.stop_rejecting()
            await soon(
                lambda: {*mill.committed} <= {(it.key, _number(it)) for it in mill.broker.sent(TOPIC)}, seconds=60
            )
            await soon(lambda: _all_sent(mill))
        mill.check(copies=not numbered)
        assert refused
        assert writers.late
        assert writers.rolled_back
        if not numbered:  # a batch that was taken along may have been on its way
            assert len(mill.broker.sent(TOPIC)) - len({*mill.committed}) <= taken_along * 40
        await mill.convert(Store.LOG)
        assert {*(await mill.statuses()).values()} == {"SENT"}
        await mill.convert(Store.QUEUE)
        assert {*(await mill.statuses()).values()} == {"SENT"}
        assert await mill.count("SELECT count(*) FROM pillarbox_outbox WHERE status <> 'SENT'") == 0


async def _all_sent(mill: Mill) -> bool:
    return not await mill.count("SELECT count(*) FROM outbox_events WHERE status <> 'SENT'")


# -- what becomes of what ----------------------------------------------------------------------------------------------

SEEN = ("attempts", "next_attempt_at", "last_error", "event_id", "headers", "payload", "tenant_id")


async def all_kinds(mill: Mill) -> dict[tuple[str, int], str]:
    """One of each state, made by a relay and by people."""
    await mill.tenant(Handle.PAUSE, "paused")
    bad = {("dead", 1), ("thrown", 1), ("mended", 1), ("edited", 1)}
    mill.broker.reject(lambda message: (message.key, _number(message)) in bad and not json.loads(message.body)["again"])
    await mill.write("fine", 1, 2)
    async with running(mill.box.relay(name="one")):
        # One after the other, with something good between them: otherwise it would be the broker's fault.
        for number, key in enumerate(("dead", "thrown", "mended", "edited"), 1):
            await mill.write(key, 1, 2)
            await soon(partial(_counts, mill, FAILED=number, PARKED=number))
            await mill.write("fine", number + 2)
            await soon(partial(_counts, mill, SENT=number + 2))
        await mill.ask(Action.DISCARD, "thrown", Status.FAILED)
        for key in ("mended", "edited"):
            await _edit(mill, key)
        await soon(lambda: _counts(mill, FAILED=1, DISCARDED=1, PARKED=1, SENT=11))
        bad.add(("retried", 1))
    async with running(mill.box.relay(name="two")):
        await mill.write("retried", 1, 2)
        await soon(lambda: _counts(mill, FAILED=2, PARKED=2))
        await mill.write("ours", 1, 2, tenant="paused")
    await mill.write("new", 1, 2)
    async with mill.engine.begin() as connection:  # as it was before its last attempt
        for table, column in (("pillarbox_failures", "row_id"), ("pillarbox_outbox", "id")):
            await connection.execute(
                text(
                    f"UPDATE {table} SET status = 'RETRYING', attempts = 2, available_at = '2100-01-01' "
                    f"WHERE status = 'FAILED' AND key = 'retried' AND {column} > 0"
                )
            )
    return await mill.statuses()


async def _edit(mill: Mill, key: str) -> None:
    def edit(connection: Connection) -> None:
        (found,) = inspection.deliveries(connection, inspection.Filter(Status.FAILED, key=key), after=0, limit=2)
        (details,) = inspection.deliveries_of(connection, found.event_id, payload=True)
        new = b'{"number": 1, "again": "again"}'
        operations.edit(connection, details, ANNA, old=b"{}", new=new, event_id=uuid4())

    async with mill.engine.begin() as connection:
        await connection.run_sync(edit)


async def _counts(mill: Mill, **expected: int) -> bool:
    found = Counter((await mill.statuses()).values())
    return all(found[status] == count for status, count in expected.items())


@BOTH
async def test_everything_is_afterwards_what_it_was(postgres_database: Database, to: Store) -> None:
    async with mill_on(postgres_database, other(to)) as mill:
        states = await all_kinds(mill)
        assert states["dead", 1] == states["dead", 1] == "FAILED"
        assert states["dead", 2] == states["retried", 2] == "PARKED"
        assert states["retried", 1] == "RETRYING"
        assert states["thrown", 1] == "DISCARDED"
        assert states["edited", 1] == states["fine", 1] == states["thrown", 2] == "SENT"
        assert states["new", 1] == "PENDING"
        before = await mill.statuses(*SEEN)
        planned = await mill.plan(to)
        assert (planned.lanes, planned.announced, planned.is_done) == (16, 0, False)
        progress = await mill.convert(to)
        assert progress.lanes == 16
        assert await mill.statuses(*SEEN) == before
        await mill.convert(other(to))
        assert await mill.statuses(*SEEN) == before
        await mill.convert(to)
        assert await mill.statuses(*SEEN) == before
        unsent = await mill.count("SELECT count(*) FROM pillarbox_unsent WHERE status NOT IN ('SENT', 'DISCARDED')")
        assert unsent == sum(state not in ("SENT", "DISCARDED") for state in states.values())
        sent_before = len(mill.broker.sent(TOPIC))

        mill.broker.stop_rejecting()
        await mill.tenant(Handle.RESUME, "paused")
        for key, status in (("dead", Status.FAILED), ("retried", Status.RETRYING)):
            await mill.ask(Action.REDRIVE, key, status)
        async with running(mill.box.relay(name="three")):
            await soon(lambda: _counts(mill, SENT=len(states) - 1))
        assert sent_before + 8 == len(mill.broker.sent(TOPIC))
        mill.check(without=[("thrown", 1)])
        await mill.convert(other(to))
        assert Counter((await mill.statuses()).values()) == {"SENT": len(states) - 1, "DISCARDED": 1}


async def test_a_row_that_is_sent_tells_when(postgres_database: Database) -> None:
    async with mill_on(postgres_database, Store.LOG) as mill:
        await mill.write("a", 1)
        async with running(mill.box.relay(name="one")):
            await soon(lambda: _counts(mill, SENT=1))
        before = await mill.statuses("sent_at", "batch")
        await mill.convert(Store.QUEUE)
        assert await mill.statuses("sent_at", "batch") == before


# -- a batch under way -------------------------------------------------------------------------------------------------


async def one_lane(mill: Mill, key: str = "a") -> Lane:
    """The lane of a key, in our hands."""
    async with mill.engine.connect() as connection:
        shard = (await connection.scalars(select(outbox.c.shard).where(outbox.c.key == key))).first()
    (lane,) = [lane for lane in await mill.take() if lane.shard == shard]
    return lane


@BOTH
async def test_a_batch_keeps_its_promise(postgres_database: Database, to: Store) -> None:
    async with mill_on(postgres_database, other(to)) as mill:
        await mill.write("a", 1, 2, 3, 4, 5, 6)
        lane = await one_lane(mill)
        page = await mill.store.poll(lane, limit=1)
        failed = Failure(page.fresh[0].id, 1, "no", 0.0)
        lane = await mill.store.announce(lane, Batch(failures=[failed], cursor=page.cursor), settle=False)
        page = await mill.store.poll(lane, limit=4)
        ids = [row.id for row in (*page.redo, *page.fresh)]
        assert len(ids) == 5
        lane = await mill.store.announce(
            lane, Batch(items=ids, cursor=page.cursor, details={"paused": ["x"]}), settle=False
        )
        lane = await mill.store.amend(lane, [Failure(ids[2], 1, "no", 60.0)], attempts={ids[1]: 2})
        expected = await mill.store.rebuild(lane)
        assert [number for number, _ in expected] == [1, 2, 4, 5]
        states = await mill.statuses("batch")

        progress = await mill.convert(to, patience=0.0)
        assert progress.batches == 1
        assert await mill.statuses("batch") == states
        for write in (mill.store.settle(lane), mill.store.amend(lane, ())):
            with pytest.raises(LeaseLostError):
                await write
        successor = await one_lane(mill)
        assert (successor.tries, successor.next_number, successor.batch) == (0, lane.next_number, lane.batch)
        assert [(number, row) for number, row in await mill.store.rebuild(successor)] == expected
        assert successor.announced is not None
        assert successor.announced.details["paused"] == ["x"]
        assert (successor.announced.count, successor.announced.digest) == (4, lane.announced and lane.announced.digest)

        back = await mill.convert(other(to), patience=0.0)
        assert back.batches == 1
        third = await one_lane(mill)
        assert await mill.store.rebuild(third) == expected
        third = await mill.store.settle(third)
        assert [*(await mill.statuses()).values()] == ["SENT", "SENT", "RETRYING", "SENT", "SENT", "PENDING"]
        page = await mill.store.poll(third, limit=10)
        assert not page.redo
        assert [row.id for row in page.fresh] == [ids[-1] + 1]


@BOTH
async def test_an_owner_is_given_time_to_settle(postgres_database: Database, to: Store) -> None:
    async with mill_on(postgres_database, other(to)) as mill:
        await mill.write("a", 1)
        lane = await one_lane(mill)
        page = await mill.store.poll(lane, limit=1)
        lane = await mill.store.announce(lane, Batch(items=[page.fresh[0].id], cursor=page.cursor), settle=False)
        heard = asyncio.Event()
        converting = asyncio.ensure_future(mill.convert(to, patience=60.0, tell=lambda _: heard.set()))
        await heard.wait()  # of all other lanes
        await mill.store.settle(lane)
        progress = await converting
        assert (progress.lanes, progress.batches) == (16, 0)
        assert await mill.statuses() == {("a", 1): "SENT"}


@BOTH
async def test_a_batch_that_was_changed_by_hand_stays_where_it_is(postgres_database: Database, to: Store) -> None:
    async with mill_on(postgres_database, other(to)) as mill:
        await mill.write("a", 1)
        lane = await one_lane(mill)
        page = await mill.store.poll(lane, limit=1)
        await mill.store.announce(lane, Batch(items=[page.fresh[0].id], cursor=page.cursor), settle=False)
        async with mill.engine.begin() as connection:
            await connection.execute(text("DELETE FROM pillarbox_outbox"))
        progress = await mill.convert(to, patience=0.0)
        assert "somebody changed them by hand" in progress.left[str(lane)]
        assert await mill.stores() == {to: 15, other(to): 1}
        assert await mill.count("SELECT count(*) FROM pg_class WHERE relname = 'ix_pillarbox_outbox_xid'") == 1


# -- transactions that are open ----------------------------------------------------------------------------------------


@BOTH
async def test_what_is_not_committed_yet_is_found_later(postgres_database: Database, to: Store) -> None:
    async with mill_on(postgres_database, other(to)) as mill:
        await mill.write("a", 1)
        if to is Store.LOG:
            await mill.build_index()
        async with mill.box.unit_of_work() as late:
            late.publish(Ground(number=2), key="a")
            await late.flush()
            await mill.write("b", 1)
            async with running(mill.box.relay(name="one")):
                await mill.broker.received(TOPIC, 2)
            converting = asyncio.ensure_future(mill.convert(to))
            await soon(partial(_are_all, mill, to))
            async with running(mill.box.relay(name="two")):
                await mill.write("c", 1)
                await mill.broker.received(TOPIC, 3)
        mill.committed.append(("a", 2))
        progress = await converting
        assert (progress.lanes, progress.left, progress.unfinished) == (16, {}, None)
        async with running(mill.box.relay(name="three")):
            await mill.broker.received(TOPIC, 4)
        mill.check()


async def _are_all(mill: Mill, store: Store) -> bool:
    return await mill.stores() == {store: 16}


async def test_rows_from_before_the_log_are_sent(postgres_database: Database) -> None:
    async with mill_on(postgres_database, Store.QUEUE) as mill:
        await mill.write("a", 1, 2)
        async with mill.engine.begin() as connection:
            await connection.execute(text("UPDATE pillarbox_outbox SET xid = NULL"))
        await mill.convert(Store.LOG)
        async with running(mill.box.relay(name="one")):
            await mill.broker.received(TOPIC, 2)
            await soon(lambda: _all_sent(mill))
        mill.check()
        await mill.convert(Store.QUEUE)
        assert await _all_sent(mill)


async def test_h107_numbers_of_another_server_are_not_believed(
    postgres_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older release has left them in a queue. Some are still to come here, one is of a writer at work."""
    monkeypatch.setattr(convert, "_CHUNK", 2)
    async with mill_on(postgres_database, Store.QUEUE) as mill:
        await mill.write("a", 1, 2, 3, 4, 5, 6)
        async with running(mill.box.relay(name="one")):
            await soon(lambda: _counts(mill, SENT=6))
        await mill.write("a", 7)
        await mill.build_index()
        async with mill.box.unit_of_work() as late:
            late.publish(Ground(number=8), key="a")
            await late.flush()
            at_work = await late.session.scalar(text("SELECT CAST(pg_current_xact_id() AS text)"))
            async with mill.engine.begin() as connection:
                foreign = f"CASE WHEN id = 2 THEN '{at_work}' ELSE CAST(9000000000 + id AS text) END"
                await connection.execute(text(f"UPDATE pillarbox_outbox SET xid = CAST({foreign} AS xid8)"))
            converting = asyncio.ensure_future(mill.convert(Store.LOG))
            await soon(partial(_are_all, mill, Store.LOG))
        mill.committed.append(("a", 8))
        await converting
        assert await mill.count("SELECT count(*) FROM pillarbox_outbox WHERE xid IS NOT NULL") == 1
        for number in (9, 10):
            await mill.write("a", number)
            async with running(mill.box.relay(name="two")):
                await mill.broker.received(TOPIC, number)
                await soon(lambda: _all_sent(mill))
        mill.check()


@BOTH
async def test_lanes_that_come_meanwhile(postgres_database: Database, to: Store) -> None:
    """Who registered before our decision, and commits after it, has made lanes of the old kind."""
    async with mill_on(postgres_database, other(to)) as mill:
        if to is Store.LOG:
            await mill.build_index()
        async with mill.engine.connect() as connection:
            assert await connection.scalar(select(meta.c.store)) == other(to)
            converting = asyncio.ensure_future(mill.convert(to))
            await soon(lambda: _is(mill, to))
            assert not converting.done()
            old = stable_hash("old")
            cursor = "NULL" if to is Store.LOG else f"'{Cursor()}'"
            await connection.execute(
                text(f"INSERT INTO pillarbox_lanes (route, shard, cursor) VALUES ({old}, 0, {cursor})")
            )
            await connection.execute(
                text(
                    f"INSERT INTO pillarbox_routes VALUES ({old}, 'old', 'broker', 'old', 1, 'park', 1, 1, 1, now())",
                )
            )
            await connection.commit()
        progress = await converting
        assert progress.lanes == 17
        assert await mill.stores() == {to: 17}


async def _is(mill: Mill, store: Store) -> bool:
    async with mill.engine.connect() as connection:
        return bool(await connection.scalar(select(meta.c.store)) == store)


async def test_a_database_that_went_back_in_time(postgres_database: Database) -> None:
    async with mill_on(postgres_database, Store.LOG) as mill:
        await mill.write("a", 1)
        ahead = f"5 {2**40}:{2**40}:"
        async with mill.engine.begin() as connection:
            await connection.execute(update(lanes).where(lanes.c.shard == 3).values(cursor=ahead))
        progress = await mill.convert(Store.QUEUE)
        (reason,) = progress.left.values()
        assert "rebase" in reason
        assert await mill.stores() == {Store.QUEUE: 15, Store.LOG: 1}


async def test_a_lane_that_could_not_be_converted_at_first(postgres_database: Database) -> None:
    async with mill_on(postgres_database, Store.LOG) as mill:
        await mill.write("a", 1)
        third = update(lanes).where(lanes.c.shard == 3)
        async with mill.engine.begin() as connection:
            cursor = await connection.scalar(select(lanes.c.cursor).where(lanes.c.shard == 3))
            await connection.execute(third.values(cursor=f"5 {2**40}:{2**40}:"))
        lines: list[str] = []
        async with mill.engine.connect() as reader:
            await reader.scalar(select(meta.c.store))
            converting = asyncio.ensure_future(mill.convert(Store.QUEUE, tell=lines.append))
            await soon(lambda: len(lines))
            assert await mill.stores() == {Store.QUEUE: 15, Store.LOG: 1}
            async with mill.engine.begin() as connection:
                await connection.execute(third.values(cursor=cursor))
        progress = await converting
        assert (progress.lanes, progress.left, progress.index) == (16, {}, True)
        assert lines[:2] == ["15 of 16 lanes", "1 of 1 lanes"]
        assert (await mill.plan(Store.QUEUE)).is_done


async def test_pages_of_late_rows(postgres_database: Database) -> None:
    """A lane in the middle of them keeps what is done and what is not apart."""
    async with mill_on(postgres_database, Store.LOG) as mill:
        await mill.write("a", 0)
        async with mill.box.unit_of_work() as late:
            for number in range(1, 8):
                late.publish(Ground(number=number), key="a")
            await late.flush()
            await mill.write("a", 100)
            lane = await _settled(mill, await one_lane(mill), 10)
        mill.committed += [("a", number) for number in range(1, 8)]
        lane = await _settled(mill, lane, 3)
        assert lane.cursor.paging is not None
        progress = await mill.convert(Store.QUEUE)
        assert progress.marked == 5
        found = await mill.statuses()
        assert [number for (_, number), status in found.items() if status == "PENDING"] == [4, 5, 6, 7]


async def _settled(mill: Mill, lane: Lane, limit: int) -> Lane:
    page = await mill.store.poll(lane, limit=limit)
    items = [row.id for row in page.fresh]
    return await mill.store.settle(
        await mill.store.announce(lane, Batch(items=items, cursor=page.cursor), settle=False)
    )


# -- how it ends -------------------------------------------------------------------------------------------------------


@BOTH
async def test_an_empty_database(postgres_database: Database, to: Store) -> None:
    async with mill_on(postgres_database, other(to)) as mill:
        planned = await mill.plan(to)
        assert (planned.lanes, planned.index, planned.is_done) == (16, True, False)
        assert (await mill.convert(to)).audit is not None
        assert (await mill.plan(to)).is_done
        assert (await mill.convert(to)).audit is None
        await mill.write("a", 1)
        assert await mill.stores() == {to: 16}
        async with running(mill.box.relay(name="one")):
            await mill.broker.received(TOPIC, 1)


async def test_one_at_a_time(postgres_database: Database) -> None:
    async with mill_on(postgres_database, Store.LOG) as mill, mill.engine.begin() as connection:
        await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": convert._LOCK})
        with pytest.raises(StoreError, match="somebody else"):
            await mill.convert(Store.QUEUE)


@BOTH
async def test_killed_in_the_middle(postgres_database: Database, tmp_path: Path, to: Store) -> None:
    async with mill_on(postgres_database, other(to)) as mill:
        for key in range(KEYS):
            await mill.write(f"k{key}", 1, 2)
        if to is Store.LOG:
            await mill.build_index()
        async with mill.engine.connect() as connection:
            names = select(lanes.c.route, lanes.c.shard).order_by(lanes.c.shard)
            held = LaneName(*(await connection.execute(names)).all()[9])
            here = (lanes.c.route == held.route, lanes.c.shard == held.shard)
            await connection.execute(select(lanes.c.shard).where(*here).with_for_update())
            process = start(postgres_database, tmp_path, "--to", to, "--yes")
            try:
                await until_somebody_waits(mill.box)
            finally:
                process.kill()
                process.communicate()
        stores = await mill.stores()
        assert stores == {to: 9, other(to): 7}
        async with running(mill.box.relay(name="one"), mill.box.relay(name="two")):
            await mill.broker.received(TOPIC, KEYS)
            await soon(lambda: _nobody_converts(mill))  # the server has noticed that its client is gone
            progress = await mill.convert(to)
            assert progress.lanes in (6, 7)  # what waited for the lock may have been done after all
            for key in range(KEYS):
                await mill.write(f"k{key}", 3)
            await mill.broker.received(TOPIC, 3 * KEYS)
        mill.check()
        assert await mill.stores() == {to: 16}


async def _nobody_converts(mill: Mill) -> bool:
    return not await mill.count("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")


async def test_killed_while_the_index_is_built(postgres_database: Database, tmp_path: Path) -> None:
    async with mill_on(postgres_database, Store.QUEUE) as mill:
        await mill.write("a", 1)
        async with mill.box.unit_of_work() as open_one:
            open_one.publish(Ground(number=2), key="a")
            await open_one.flush()
            process = start(postgres_database, tmp_path, "--to", "log", "--yes")
            await soon(lambda: mill.count("SELECT count(*) FROM pg_stat_progress_create_index"))
            process.kill()
            process.communicate()
            await soon(lambda: _nobody_converts(mill))
            with pytest.raises(StoreError, match="being built"):
                await mill.convert(Store.LOG)
            ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_progress_create_index"
            await mill.count(ended)
            await soon(lambda: _is_over(mill))
        mill.committed.append(("a", 2))
        assert await mill.count("SELECT count(*) FROM pg_index WHERE NOT indisvalid") == 1
        assert (await mill.plan(Store.LOG)).index
        assert (await mill.convert(Store.LOG)).index
        assert await mill.count("SELECT count(*) FROM pg_index WHERE NOT indisvalid") == 0
        async with running(mill.box.relay(name="one")):
            await mill.broker.received(TOPIC, 2)
        mill.check()


async def _is_over(mill: Mill) -> bool:
    return not await mill.count("SELECT count(*) FROM pg_stat_progress_create_index")


async def test_a_huge_backlog(postgres_database: Database) -> None:
    """50,000 that are sent, and as many that are not, in both directions."""
    async with mill_on(postgres_database, Store.QUEUE) as mill:
        await mill.write("a", 1)
        async with mill.engine.begin() as connection:
            await connection.execute(_BACKLOG, {"first": 2})
        progress = await mill.convert(Store.LOG)
        assert progress.lanes == 16
        async with running(mill.box.relay(name="one")):
            await mill.broker.received(TOPIC, 50_001)
            await soon(lambda: _nothing_unsent(mill), seconds=60)
        async with mill.engine.begin() as connection:
            await connection.execute(_BACKLOG, {"first": 100_000})
        progress = await mill.convert(Store.QUEUE)
        assert progress.marked == 50_001
        assert await mill.count("SELECT count(*) FROM pillarbox_unsent") == 50_000
        async with running(mill.box.relay(name="two")):
            await mill.broker.received(TOPIC, 100_001)
        sent = [(message.key, _number(message)) for message in mill.broker.sent(TOPIC)]
        assert len({*sent}) == len(sent) == 100_001


async def _nothing_unsent(mill: Mill) -> bool:
    return not await mill.count("SELECT count(*) FROM pillarbox_unsent")


_BACKLOG = text(
    """
    INSERT INTO pillarbox_outbox (event_id, event_type, route, shard, schema_version, topic, key, headers, body)
    SELECT gen_random_uuid(), o.event_type, o.route, n % 16, o.schema_version, o.topic, 'key ' || n % 500, o.headers,
           convert_to('{"number": ' || n || '}', 'UTF8')
    FROM (SELECT * FROM pillarbox_outbox LIMIT 1) o, generate_series(CAST(:first AS int), :first + 49999) n
    """
)


# -- the command -------------------------------------------------------------------------------------------------------


def start(database: Database, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PILLARBOX_DATABASE_URL": database.url()}
    command = [str(Path(sys.executable).parent / "pillarbox"), "outbox", "convert", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=folder, text=True, stdout=pipe, stderr=pipe, stdin=pipe)


async def said(database: Database, folder: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(database, folder, *arguments)
    out, err = await asyncio.to_thread(process.communicate)
    return process.returncode, out, err


async def test_the_command(postgres_database: Database, tmp_path: Path) -> None:
    async with mill_on(postgres_database, Store.LOG) as mill:
        await mill.write("a", 1)
        async with running(mill.box.relay(name="one")):
            await soon(lambda: _counts(mill, SENT=1))
        code, out, err = await said(postgres_database, tmp_path, "--to", "queue", "--dry-run")
        planned = "16 lanes, up to 1 delivery to mark as sent, the index ix_pillarbox_outbox_xid to drop"
        assert (code, out, err) == (0, f"convert to a queue: {planned}; nothing was done\n", "")
        code, out, err = await said(postgres_database, tmp_path, "--to", "queue")
        assert (code, out) == (2, "")
        assert f"this would make the outbox a queue: {planned}: say --yes" in err
        assert await mill.stores() == {Store.LOG: 16}

        code, out, err = await said(postgres_database, tmp_path, "--to", "queue", "--yes", "--by", "ben", "--json")
        assert code == 0, err
        report = json.loads(out)
        assert (report["done"]["lanes"], report["done"]["marked"], report["done"]["left"]) == (16, 1, {})
        assert await mill.stores() == {Store.QUEUE: 16}
        async with mill.engine.connect() as connection:
            (entry,) = await connection.run_sync(inspection.audit_trail)
        assert (entry.who, entry.action, entry.target) == ("ben", "convert", "the outbox, to a queue")
        code, out, err = await said(postgres_database, tmp_path, "--to", "queue", "--yes")
        assert (code, out, err) == (0, "convert: the outbox is a queue already\n", "")
        code, out, err = await said(postgres_database, tmp_path, "--to", "log", "--yes")
        assert (code, out) == (0, "convert to a log: 16 lanes, audit entry 2\n")
        assert "building the index" in err


async def test_only_postgresql_has_two(sqlite_database: Database, tmp_path: Path) -> None:
    box = Pillarbox(sqlite_database.url())
    async with box:
        await box.migrate()
    code, _, err = await said(sqlite_database, tmp_path, "--to", "log", "--yes")
    assert (code, err) == (1, "error: on sqlite the outbox is a queue: only PostgreSQL has the other\n")


async def test_a_sequence_that_draws_many_is_refused(postgres_database: Database) -> None:
    async with mill_on(postgres_database, Store.QUEUE) as mill:
        async with mill.engine.begin() as connection:
            await connection.execute(text("ALTER TABLE pillarbox_outbox ALTER COLUMN id SET CACHE 50"))
        with pytest.raises(StoreError, match="SET CACHE 1"):
            await mill.convert(Store.LOG)
