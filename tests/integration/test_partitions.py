"""Daily partitions: nothing changes for anybody but for those who prune, and a day goes only when all of it may.

Days lie in the past here, and "old" is meant by a clock that is an hour ahead.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from datetime import UTC, date, datetime, timedelta
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from pillarbox import IntegrationEvent, Pillarbox, RetryPolicy, Route
from pillarbox.cli import partitions as cli
from pillarbox.errors import DuplicateEventError, StoreError
from pillarbox.outbox import OUTBOUND, Batch, Delivery, Failure, Status, stable_hash
from pillarbox.stores import inspection, operations, partition_pruning, partitions, retention, server, sqlite, store_on
from pillarbox.stores.audit import Author
from pillarbox.stores.inspection import Filter
from pillarbox.stores.log import LogStore
from pillarbox.stores.migrations import migrate
from pillarbox.stores.operations import Action, Run, Selection
from pillarbox.stores.partition_pruning import Fate, Survey
from pillarbox.stores.partitions import first_id, is_busy, took_too_long, was_taken
from pillarbox.stores.retention import Page
from pillarbox.testing.conformance.outbox import ROUTE, delivery
from pillarbox.transports.memory import MemoryTransport
from tests import commands
from tests.conftest import FreshDatabase
from tests.domain import make_due, until_somebody_waits
from tests.integration.test_store_plans import _recorded
from tests.relays import running, soon
from tests.servers import Database

TOPIC = "yard.events"
ROUTE_ID = stable_hash(f"broker:{TOPIC}")
ANNA = Author("anna@office", "room for more")
AHEAD = 0.0
TODAY = datetime.now(UTC).date()
OLD = [TODAY - timedelta(days=number) for number in (9, 8, 7)]
KEYS = [key for key in (f"wagon-{number}" for number in range(200)) if stable_hash(key) % 16 == 0]
"""Of one lane."""
_numbers = count()
_T = TypeVar("_T")

newest_and_oldest = pytest.mark.parametrize("kind", ["embedded", pytest.param("oldest", marks=pytest.mark.elsewhere)])


class Moved(IntegrationEvent, name="partitions.wagon.moved"):
    pass


def an_id(day: date) -> UUID:
    """An id of version 7 of a day."""
    return UUID(int=first_id(day).int + (next(_numbers) << 80) + (uuid4().int & ((1 << 64) - 1)) + (7 << 76))


class Yard:
    """An outbox, its broker, and somebody who partitions and prunes it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.store = store_on(engine)
        self.broker = MemoryTransport()
        retry = RetryPolicy(base=0.001, cap=0.001, attempts=2)
        routes = [Route("partitions.**", to="broker", topic=TOPIC, retry=retry)]
        self.box = Pillarbox(engine, transports={"broker": self.broker}, routes=routes)

    async def publish(self, key: str, *on: date | UUID) -> None:
        async with self.box.unit_of_work() as uow:
            for day in on:
                uow.publish(Moved(event_id=day if isinstance(day, UUID) else an_id(day)), key=key)

    async def drain(self) -> None:
        await make_due(self.engine)
        await self.box.relay().drain()

    async def ask(self, question: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        async with self.engine.begin() as connection:
            return await connection.run_sync(lambda it: question(it, *arguments, **named))

    async def execute(self, statement: str) -> list[Any]:
        def execute(connection: Connection) -> list[Any]:
            done = connection.execute(text(statement))
            return [tuple(row) for row in done] if done.returns_rows else []

        return await self.ask(execute)

    async def partition(self, *more: date, ahead: int = 1) -> None:
        await self.ask(partitions.partition, ANNA, ahead=ahead)
        for day in more:
            await self.ask(partitions.make_day, day, ANNA)

    async def survey(self) -> tuple[Survey, retention.Scope, list[retention.Stretch]]:
        scope = await self.ask(retention.scope, older_than=AHEAD)
        places = await self.ask(retention.stretches, scope)
        return await self.ask(partition_pruning.survey, scope, places), scope, places

    async def fates(self) -> dict[str, tuple[int, int]]:
        """How many rows a day has, and how many of them stay."""
        found, *_ = await self.survey()
        return {str(fate.part): (fate.rows, fate.stay) for fate in found.fates}

    async def drop(self) -> list[Fate]:
        found, scope, places = await self.survey()
        return [await self.ask(partition_pruning.drop, fate.part, scope, places) for fate in found.doomed]

    async def prune_rows(self, limit: int = 2) -> int:
        found, scope, _ = await self.survey()
        gone = 0
        for place in found.places:
            page = Page((), ())
            while page.after is not None:
                page = await self.ask(retention.page, scope, place, page.after, limit)
                gone += await self.ask(retention.remove, page.keys)
        return gone

    async def where(self) -> dict[str, int]:
        """How many rows each table has."""
        found = await self.execute(
            "SELECT CAST(CAST(tableoid AS regclass) AS text), count(*) FROM pillarbox_outbox GROUP BY 1"
        )
        return {name.removeprefix("pillarbox_outbox_"): number for name, number in found}

    async def statuses(self) -> list[tuple[str, str]]:
        found = await self.ask(inspection.deliveries, Filter(), after=0, limit=1000)
        return [(row.key, row.status) for row in found]

    async def request(self, action: Action, key: str) -> None:
        assert (await self.ask(operations.request, Selection(action, Filter(key=key)), ANNA, Run(), 100)).requested

    @property
    def sent(self) -> list[str]:
        return [message.key for message in self.broker.sent(TOPIC)]


@pytest.fixture
def kind() -> str:
    return "embedded"


@pytest.fixture
async def yard(kind: str, fresh_database: FreshDatabase) -> AsyncIterator[Yard]:
    engine = create_async_engine(fresh_database(kind).url())
    yard = Yard(engine)
    async with yard.box:
        await yard.box.migrate()
        yield yard
    await engine.dispose()


@pytest.mark.dialects
@newest_and_oldest
class TestPartition:
    async def test_rows_keep_everything_and_are_sent_as_before(self, yard: Yard) -> None:
        await yard.publish("a", TODAY, uuid4(), OLD[0])
        await yard.drain()
        await yard.publish("b", TODAY)
        columns = "id, event_id, xid, status, key, ctid"
        before = await yard.execute(f"SELECT {columns} FROM pillarbox_outbox ORDER BY id")
        shown = await yard.statuses()
        plan = await yard.ask(partitions.plan, ahead=2)
        assert (plan.partitioned, plan.taken) == (False, [TODAY])
        await yard.partition(ahead=2)
        assert await yard.execute(f"SELECT {columns} FROM pillarbox_outbox ORDER BY id") == before
        assert await yard.statuses() == shown == [("a", Status.SENT)] * 3 + [("b", Status.PENDING)]
        await yard.publish("c", TODAY + timedelta(days=1), TODAY)
        assert await yard.where() == {"default": 5, f"{TODAY + timedelta(days=1):%Y%m%d}": 1}
        assert [row[0] for row in await yard.execute("SELECT id FROM pillarbox_outbox ORDER BY id")] == [
            1,
            2,
            3,
            4,
            5,
            6,
        ]
        await yard.drain()
        assert sorted(yard.sent) == ["a", "a", "a", "b", "c", "c"]
        assert await yard.ask(server.id_cache, OUTBOUND) == 1
        (entry,) = await yard.ask(inspection.audit_trail)
        assert (entry.who, entry.action, entry.target) == (ANNA.who, "partition", "the outbox, by days")

    async def test_nothing_is_left_to_do_and_a_second_time_is_refused(self, yard: Yard) -> None:
        await yard.partition(ahead=3)
        plan = await yard.ask(partitions.plan, ahead=3)
        assert (plan.partitioned, plan.days, plan.taken) == (True, [], [])
        assert (await yard.ask(partitions.plan, ahead=4)).days == [TODAY + timedelta(days=4)]
        with pytest.raises(StoreError, match="somebody else has partitioned"):
            await yard.partition()
        assert await yard.ask(migrate) == 0

    async def test_rights_policies_and_publications_are_those_of_the_table(self, yard: Yard) -> None:
        [(names_columns,)] = await yard.execute("SELECT CAST(current_setting('server_version_num') AS int) >= 150000")
        await yard.execute("CREATE ROLE pillarbox_clerk")
        try:
            for statement in (
                "GRANT SELECT, INSERT ON pillarbox_outbox TO pillarbox_clerk",
                "GRANT UPDATE (status) ON pillarbox_outbox TO pillarbox_clerk WITH GRANT OPTION",
                "GRANT SELECT ON outbox_events TO pillarbox_clerk",
                "ALTER DEFAULT PRIVILEGES GRANT DELETE ON TABLES TO pillarbox_clerk",
                "ALTER TABLE pillarbox_outbox ENABLE ROW LEVEL SECURITY",
                "CREATE POLICY mine ON pillarbox_outbox FOR SELECT TO pillarbox_clerk USING (tenant = 'a')",
                "CREATE PUBLICATION news FOR TABLE pillarbox_outbox",
                *(["CREATE PUBLICATION heads FOR TABLE pillarbox_outbox (id, key)"] if names_columns else []),
            ):
                await yard.execute(statement)
            clerk = "WHERE grantee = 'pillarbox_clerk' AND table_name NOT LIKE '%default' ORDER BY 1, 2"
            of_table = "FROM pg_class WHERE relname = 'pillarbox_outbox'"
            asked = [
                f"SELECT table_name, privilege_type FROM information_schema.role_table_grants {clerk}",
                f"SELECT column_name, privilege_type, is_grantable FROM information_schema.column_privileges {clerk}",
                "SELECT policyname, cmd, roles, qual FROM pg_policies WHERE tablename = 'pillarbox_outbox'",
                f"SELECT relrowsecurity, relforcerowsecurity {of_table}",
                "SELECT pubname, tablename, to_jsonb(t) -> 'attnames' FROM pg_publication_tables t ORDER BY 1",
                "SELECT indexname FROM pg_indexes WHERE tablename = 'pillarbox_outbox' ORDER BY 1",
            ]
            before = [await yard.execute(question) for question in asked]
            await yard.partition()
            assert [await yard.execute(question) for question in asked] == before
            # The old indexes serve, none was built anew.
            of_default = "WHERE tablename = 'pillarbox_outbox_default' ORDER BY 1"
            old = await yard.execute(f"SELECT indexname FROM pg_indexes {of_default}")
            assert old == [(f"{name}_default",) for (name,) in before[-1]]
        finally:
            await yard.execute("DROP OWNED BY pillarbox_clerk")
            await yard.execute("DROP ROLE pillarbox_clerk")

    async def test_what_would_stay_behind_is_named(self, yard: Yard) -> None:
        await yard.execute("CREATE MATERIALIZED VIEW copied AS SELECT id FROM pillarbox_outbox")
        await yard.execute("CREATE VIEW counted AS SELECT count(*) FROM pillarbox_outbox")
        with pytest.raises(StoreError, match="depends on it: rule _RETURN on materialized view copied; drop it"):
            await yard.partition()
        await yard.execute("DROP MATERIALIZED VIEW copied")
        await yard.partition()
        await yard.publish("a", TODAY)
        assert await yard.execute("SELECT * FROM counted") == [(1,)]

    async def test_an_event_is_written_once_wherever_it_is(self, yard: Yard) -> None:
        await yard.partition(OLD[0])
        for event_id in (an_id(OLD[0]), an_id(TODAY), uuid4()):
            await yard.publish("a", event_id)
            with pytest.raises(DuplicateEventError):
                await yard.publish("a", event_id)

    async def test_ids_of_no_day_are_in_the_default_partition(self, yard: Yard) -> None:
        await yard.partition(OLD[0])
        await yard.publish("a", date(1999, 1, 1), date(2999, 1, 1), uuid4(), UUID(int=0), UUID(int=2**128 - 1))
        await yard.publish("b", OLD[0], TODAY)
        assert await yard.where() == {"default": 5, f"{OLD[0]:%Y%m%d}": 1, f"{TODAY:%Y%m%d}": 1}
        await yard.drain()
        assert sorted(yard.sent) == ["a"] * 5 + ["b"] * 2


class TestInTheWay:
    async def test_writers_wait_for_a_moment_at_most(self, yard: Yard) -> None:
        async with yard.engine.begin() as writer:
            await writer.run_sync(yard.store.append, [delivery("a")])
            with pytest.raises(DBAPIError) as error:
                await yard.partition()
            assert is_busy(error.value)
        await yard.partition()

    async def test_rows_that_cannot_be_looked_through_in_time(self, yard: Yard) -> None:
        await yard.ask(yard.store.append, [delivery("a") for _ in range(20_000)])
        with pytest.raises(DBAPIError) as error:
            await yard.ask(partitions.partition, ANNA, ahead=1, patience=0.001)
        assert took_too_long(error.value)
        assert not (await yard.ask(partitions.layout)).partitioned

    async def test_a_day_of_which_the_default_has_rows_stays_there(self, yard: Yard) -> None:
        await yard.partition()
        await yard.publish("a", TODAY + timedelta(days=2))
        plan = await yard.ask(partitions.plan, ahead=3)
        assert (plan.days, plan.taken) == ([TODAY + timedelta(days=3)], [TODAY + timedelta(days=2)])
        with pytest.raises(DBAPIError) as error:
            await yard.ask(partitions.make_day, plan.taken[0], ANNA)
        assert was_taken(error.value)
        await yard.drain()
        assert yard.sent == ["a"]

    @pytest.mark.parametrize("before", [False, True], ids=["the first time", "more days"])
    async def test_the_first_row_of_a_day_may_come_meanwhile(self, yard: Yard, before: bool, tmp_path: Path) -> None:
        """Then the day stays where it is, and nothing has gone wrong."""
        day = TODAY + timedelta(days=2)
        if before:
            await yard.partition()
        async with yard.box.unit_of_work() as uow:
            uow.publish(Moved(event_id=an_id(day)), key="a")
            await uow.flush()
            environment = {**os.environ, "PILLARBOX_DATABASE_URL": yard.engine.url.render_as_string(False)}
            command = partial(commands.fork, ["outbox", "partition", "--yes", "--json"], environment, tmp_path, 60)
            partitioning = asyncio.create_task(asyncio.to_thread(command))
            await until_somebody_waits(yard.box)
        done = await partitioning
        report = json.loads(done.stdout)
        assert report["taken"] == [str(day)]
        assert str(day) not in report["made"]
        assert len(report["notes"]) == 1
        assert done.returncode == 0

    async def test_a_writer_of_another_day_does_not_notice_that_one_is_made(self, yard: Yard) -> None:
        await yard.partition()
        async with yard.engine.begin() as writer:
            await writer.run_sync(yard.store.append, [_of(TODAY)])
            await yard.ask(partitions.make_day, OLD[0], ANNA)

    async def test_only_postgresql_has_partitions(self, sqlite_database: Database) -> None:
        engine = create_async_engine(sqlite_database.url())
        sqlite.configure_transactions(engine.sync_engine)
        async with engine.begin() as connection:
            await connection.run_sync(migrate)
            with pytest.raises(StoreError, match="only PostgreSQL has"):
                await connection.run_sync(partitions.plan, ahead=1)
            assert not (await connection.run_sync(partitions.layout)).partitioned
        await engine.dispose()

    async def test_only_the_owner_makes_days(self, yard: Yard) -> None:
        await yard.partition(OLD[0])
        await yard.execute("CREATE ROLE pillarbox_porter")
        try:
            await yard.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO pillarbox_porter")
            async with yard.engine.begin() as connection:
                await connection.execute(text("SET LOCAL ROLE pillarbox_porter"))
                with pytest.raises(StoreError, match="only the owner"):
                    await connection.run_sync(partitions.plan, ahead=1)
        finally:
            await yard.execute("DROP OWNED BY pillarbox_porter")
            await yard.execute("DROP ROLE pillarbox_porter")


def _of(day: date, key: str = KEYS[0]) -> Delivery:
    return replace(delivery(key), event_id=an_id(day), route=ROUTE_ID, topic=TOPIC)


class TestDays:
    @newest_and_oldest
    async def test_h62_a_day_goes_when_all_of_it_may(self, yard: Yard) -> None:
        await yard.partition(*OLD)
        yard.broker.reject(lambda message: message.key == "bad")
        await yard.publish("a", OLD[0], OLD[1], OLD[2], TODAY)
        await yard.publish("bad", OLD[1], OLD[1])
        for _ in range(3):
            await yard.drain()
        await yard.publish("b", OLD[2])  # never sent so far
        assert await yard.fates() == {str(OLD[0]): (1, 0), str(OLD[1]): (3, 2), str(OLD[2]): (2, 1)}
        assert [(str(it.part), it.rows, it.stay) for it in await yard.drop()] == [(str(OLD[0]), 1, 0)]
        # What is left of days that should have gone goes row by row; today stays whole.
        assert await yard.prune_rows() == 2
        assert await yard.statuses() == [
            ("a", Status.SENT), ("bad", Status.FAILED), ("bad", Status.PARKED), ("b", Status.PENDING)
        ]  # fmt: skip
        yard.broker.stop_rejecting()
        await yard.request(Action.REDRIVE, "bad")
        for _ in range(3):
            await yard.drain()
        assert [it.rows for it in await yard.drop()] == [2, 1]
        assert sorted(yard.sent) == ["a", "a", "a", "a", "b", "bad", "bad"]
        assert set(await yard.where()) == {f"{TODAY:%Y%m%d}"}

    async def test_what_was_discarded_goes_with_its_record(self, yard: Yard) -> None:
        await yard.partition(OLD[0])
        yard.broker.reject(lambda message: message.key == "bad")
        await yard.publish("bad", OLD[0])
        for _ in range(3):
            await yard.drain()
        await yard.request(Action.DISCARD, "bad")
        await yard.drain()
        assert len(await yard.drop()) == 1
        assert await yard.execute("SELECT * FROM pillarbox_failures") == []

    async def test_h62_what_is_on_its_way_keeps_its_day(self, yard: Yard) -> None:
        await yard.partition(OLD[0])
        await yard.publish(KEYS[0], OLD[0], OLD[0])
        (lane,) = await yard.store.take("relay-1", lease=60, wanted={ROUTE_ID: 1}, shards={ROUTE_ID: [0]})
        page = await yard.store.poll(lane, limit=2)
        items = [row.id for row in page.fresh]
        lane = await yard.store.announce(lane, Batch(items, cursor=page.cursor), settle=False)
        assert await yard.fates() == {str(OLD[0]): (2, 2)}
        await yard.store.settle(lane)
        assert len(await yard.drop()) == 1

    @newest_and_oldest
    async def test_h101_a_row_that_is_not_committed_yet_keeps_its_day(self, yard: Yard) -> None:
        """All that anybody can see of the day was sent; a transaction that began before has one more."""
        await yard.partition(OLD[0])
        async with yard.engine.connect() as first:
            begun = await first.begin()
            await first.run_sync(yard.store.append, [_of(OLD[0], KEYS[0])])  # the lower id
            await yard.publish(KEYS[1], OLD[0])
            await yard.drain()
            found, scope, places = await yard.survey()
            for part in found.layout.parts[:1]:
                with pytest.raises(DBAPIError) as error:
                    await yard.ask(partition_pruning.drop, part, scope, places)
                assert is_busy(error.value)
            await begun.commit()
        assert (await yard.ask(partition_pruning.drop, found.layout.parts[0], scope, places)).stay
        await yard.drain()
        assert yard.sent == [KEYS[1], KEYS[0]]
        assert [it.rows for it in await yard.drop()] == [2]

    async def test_h101_a_row_that_comes_after_the_survey_is_seen_under_the_lock(self, yard: Yard) -> None:
        await yard.partition(OLD[0])
        await yard.publish("a", OLD[0])
        await yard.drain()
        found, scope, places = await yard.survey()
        assert [fate.stay for fate in found.fates] == [0]
        await yard.publish("b", OLD[0])
        assert (await yard.ask(partition_pruning.drop, found.fates[0].part, scope, places)).stay == 1
        await yard.drain()
        assert yard.sent == ["a", "b"]

    async def test_a_writer_of_another_day_makes_the_drop_wait_and_nobody_else(self, yard: Yard) -> None:
        await yard.partition(OLD[0])
        async with yard.engine.begin() as writer:
            await writer.run_sync(yard.store.append, [_of(TODAY)])
            with pytest.raises(DBAPIError) as error:
                await yard.drop()
            assert is_busy(error.value)
        assert len(await yard.drop()) == 1

    async def test_a_day_is_counted_again_when_nobody_is_in_the_way_any_more(
        self, yard: Yard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Counting a large day takes long, and every try would do it in vain."""
        monkeypatch.setattr(cli, "_PAUSE", 0.0)
        await yard.partition(OLD[0])
        await yard.publish("a", OLD[0])
        await yard.drain()
        whole = cli.Days(*await yard.survey())
        part = whole.found.doomed[0].part
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        statements: list[str] = []
        event.listen(yard.engine.sync_engine, "before_cursor_execute", lambda *given: statements.append(given[2]))

        def asked(what: str) -> int:
            return sum(what in it for it in statements)

        async with yard.engine.begin() as writer:
            await writer.run_sync(yard.store.append, [_of(TODAY)])
            dropping = asyncio.create_task(whole.drop(yard.engine, told, lambda *_: 1, lambda *_: None))
            await soon(lambda: asked("set_config('lock_timeout'") > 4)
            assert asked(counting := f"FROM {part.name} o LEFT JOIN") == 1
        await dropping
        assert (whole.dropped, asked(counting)) == ([str(OLD[0])], 2)

    async def test_a_place_is_one_of_its_partition(self, yard: Yard) -> None:
        """The first row of every partition has the same place; only those that were asked for go."""
        await yard.partition(*OLD)
        await yard.publish("a", *OLD)
        await yard.drain()
        scope = await yard.ask(retention.scope, older_than=AHEAD)
        keys: list[retention.RowKey] = []
        for place in await yard.ask(retention.stretches, scope):
            keys += (await yard.ask(retention.page, scope, place, (), 10)).keys
        assert len(keys) == 3
        assert await yard.ask(retention.remove, keys[1:2]) == 1
        assert await yard.where() == {f"{OLD[0]:%Y%m%d}": 1, f"{OLD[2]:%Y%m%d}": 1}

    async def test_h62_h101_days_come_and_go_under_load(self, yard: Yard) -> None:
        """Writers write into all days, some slowly; days are dropped and made all the time; nothing is lost."""
        await yard.partition(*OLD)
        stop, committed, dropped, phase = asyncio.Event(), list[str](), 0, 0

        async def write(number: int) -> None:
            for turn in count():
                if stop.is_set():
                    return
                key = f"load-{number}-{turn}"
                async with yard.box.unit_of_work() as uow:
                    uow.publish(Moved(event_id=an_id(OLD[phase % 3] if turn % 2 else TODAY)), key=key)
                    if turn % 5 == number:
                        await uow.flush()
                        await asyncio.sleep(0.01)  # others commit before us
                committed.append(key)

        async def tried(work: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return await yard.ask(work, *arguments)
            except DBAPIError as error:
                if not (is_busy(error) or was_taken(error)):
                    raise
                return None

        async def janitor() -> None:
            nonlocal dropped, phase
            while dropped < 4:
                phase += 1  # the other days come to rest
                found, scope, places = await yard.survey()
                for doomed in found.doomed:
                    fate = await tried(partition_pruning.drop, doomed.part, scope, places)
                    dropped += fate is not None and not fate.stay
                there = {str(part) for part in (await yard.ask(partitions.layout)).parts}
                for day in OLD:
                    if str(day) not in there:
                        await tried(partitions.make_day, day, ANNA)
                await yard.prune_rows(500)

        async with running(yard.box.relay(name="one"), yard.box.relay(name="two")):
            writers = [asyncio.ensure_future(write(number)) for number in range(3)]
            async with asyncio.timeout(60):
                await janitor()
            stop.set()
            await asyncio.gather(*writers)
        await yard.drain()
        assert sorted(yard.sent) == sorted(committed)


class TestFailures:
    async def test_of_several_partitions_are_redriven(self, yard: Yard) -> None:
        await yard.partition(*OLD)
        yard.broker.reject(lambda message: message.key.startswith("bad"))
        await yard.publish("good", *OLD, uuid4())
        await yard.publish("bad-1", *OLD)
        await yard.publish("bad-2", uuid4(), TODAY)
        for _ in range(3):
            await yard.drain()
        shown = await yard.statuses()
        yard.broker.stop_rejecting()
        await yard.request(Action.REDRIVE, "bad-1")
        for _ in range(4):
            await yard.drain()
        expected = [(key, Status.SENT if key == "bad-1" else status) for key, status in shown]
        assert await yard.statuses() == expected
        assert (await yard.fates())[str(OLD[0])] == (2, 0)


_MANY = """
    INSERT INTO pillarbox_outbox (event_id, event_type, route, shard, schema_version, topic, key, headers, body)
    SELECT CAST(lpad(to_hex(CAST({0} AS bigint) + i), 12, '0') || '7' || substr(md5(CAST(i AS text)), 1, 19) AS uuid),
           'a.b', {1}, i % 16, 1, 'orders', 'k' || i, '{{}}', '' FROM generate_series(1, 8000) i
"""


class TestPlans:
    @pytest.mark.parametrize("analyzed", [False, True], ids=["without statistics", "with statistics"])
    @pytest.mark.parametrize("number", [1, 8, 31])
    async def test_h117_every_partition_is_read_by_the_right_index(
        self, fresh_database: FreshDatabase, analyzed: bool, number: int
    ) -> None:
        """A partition without a page may be read in any way: that is no work."""
        engine = create_async_engine(fresh_database("embedded").url())
        kept = LogStore(engine)
        async with engine.begin() as connection:
            await connection.run_sync(migrate)
            await connection.run_sync(kept.register, [ROUTE])
            await _partitioned(connection, number)
            for day in (TODAY, TODAY + timedelta(days=1), date(2000, 1, 1)):
                await connection.execute(text(_MANY.format(first_id(day).int >> 80, ROUTE.id)))
            passed = "(SELECT max(id) FROM pillarbox_outbox) || ' ' || pg_current_snapshot()"
            await connection.execute(text(f"UPDATE pillarbox_lanes SET cursor = {passed}"))
        if analyzed:
            async with engine.begin() as connection:
                await connection.execute(text("ANALYZE pillarbox_outbox"))
        async with engine.begin() as connection:
            await connection.run_sync(kept.append, [delivery(f"k{number}") for number in range(6)])
        [lane] = await kept.take("r", lease=30, wanted={ROUTE.id: 1})
        with _recorded(engine) as statements:
            async with engine.begin() as late:
                await late.run_sync(kept.append, [delivery("late") for _ in range(8)])
                page = await kept.poll(lane, limit=10)
                first, *others = [row.id for row in page.fresh]
                batch = Batch(others, failures=[Failure(first, 1, "no", 0.0)], cursor=page.cursor)
                lane = await kept.announce(lane, batch, settle=False)
                await kept.rebuild(lane)
                lane = await kept.amend(lane, [Failure(others[-1], 1, "no", 0.0)])
                lane = await kept.settle(lane)
            page = await kept.poll(lane, limit=5)
            items = [row.id for row in (*page.redo, *page.fresh)]
            lane = await kept.announce(lane, Batch(items, cursor=page.cursor), settle=False)
            await kept.settle(lane)
            await kept.ready([ROUTE.id], relay="r")
        async with engine.connect() as connection:
            used = "SELECT relname FROM pg_class WHERE relname LIKE 'pillarbox_outbox%' AND pg_relation_size(oid) > 0"
            filled = {*(await connection.scalars(text(used)))}
            for statement, parameters in statements:
                if statement.lstrip().startswith("INSERT INTO pillarbox_outbox"):
                    continue
                found = await connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)
                plan = [str(row[-1]) for row in found]
                for line, condition in pairwise(plan):
                    scan = re.search(r"Scan.* on (pillarbox_outbox\w*)", line)
                    if scan is None or scan[1] not in filled:
                        continue
                    assert "Seq Scan" not in line, "\n".join((statement, *plan))
                    of_lane = re.search(r"_lane|_route_shard_id_idx", line)  # of a partition, as PostgreSQL names it
                    led = re.search(r"\bid\b" if of_lane else r"\b(xid|event_id|ctid|TID)\b", condition)
                    assert led, "\n".join((statement, *plan))
        await engine.dispose()


async def _partitioned(connection: AsyncConnection, number: int) -> None:
    if number > 1:
        await connection.run_sync(partitions.partition, ANNA, ahead=number - 2)
    else:
        await connection.run_sync(partitions.partition, ANNA, ahead=-1)
    assert len((await connection.run_sync(partitions.layout)).parts) == number - 1
