"""The table of consumers, and what the inbox costs on a database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox.errors import NotMigratedError, StoreError
from pillarbox.inbox import Admission, Arrival, digest_of
from pillarbox.stores import sqlite
from pillarbox.stores.inbox import (
    _PRUNE,
    _STORED_ARRAY,
    ConsumerRecord,
    SqlInbox,
    consumers,
    register_consumer,
    report_position,
    set_generation,
)
from pillarbox.stores.migrations import migrate
from pillarbox.testing.conformance.inbox import arrival, spill
from tests.conftest import FreshDatabase
from tests.servers import Database

pytestmark = pytest.mark.dialects


@pytest.fixture
async def engine(database: Database) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database.url())
    sqlite.configure_transactions(engine.sync_engine)
    await call(engine, migrate)
    yield engine
    await engine.dispose()


async def call(engine: AsyncEngine, function: Any, *arguments: Any, **options: Any) -> Any:
    """In a transaction of its own."""
    async with engine.begin() as connection:
        return await connection.run_sync(function, *arguments, **options)


def arrivals(count: int) -> list[Arrival]:
    return [Arrival(uuid4(), 1, digest_of(b"{}")) for _ in range(count)]


async def register(engine: AsyncEngine, name: str = "Bücher", *topics: str, kind: str = "handlers") -> int:
    generation = await call(engine, register_consumer, name, kind, "broker", topics)
    assert isinstance(generation, int)
    return generation


async def only(engine: AsyncEngine) -> ConsumerRecord:
    [found] = await call(engine, consumers)
    assert isinstance(found, ConsumerRecord)
    return found


class TestConsumers:
    async def test_a_consumer_is_registered_once(self, engine: AsyncEngine) -> None:
        assert await register(engine, "Bücher", "orders", "päyments") == 1
        before = await only(engine)
        assert (before.name, before.kind, before.source) == ("Bücher", "handlers", "broker")
        assert (before.topics, before.generation, before.handled) == (("orders", "päyments"), 1, 0)
        assert (before.last_event_id, before.last_occurred_at, before.lag) == (None, None, None)
        assert before.seen_at is not None
        assert await register(engine, "Bücher", "orders", "päyments") == 1
        again = await only(engine)
        assert again == msgspec.structs.replace(before, seen_at=again.seen_at)
        assert again.seen_at is not None
        assert again.seen_at >= before.seen_at

    async def test_what_has_changed_about_it_is_stored(self, engine: AsyncEngine) -> None:
        await register(engine, "Bücher", "orders")
        before = await only(engine)
        await register(engine, "Bücher", "orders", "payments", kind="projection")
        found = await only(engine)
        assert (found.topics, found.kind) == (("orders", "payments"), "projection")
        assert found.updated_at >= before.updated_at

    async def test_processes_that_register_at_once_take_turns(self, engine: AsyncEngine) -> None:
        names = ["a", "b", "c", "d"] * 2
        found = await asyncio.wait_for(asyncio.gather(*(register(engine, name, "orders") for name in names)), 20)
        assert found == [1] * 8
        assert [record.name for record in await call(engine, consumers)] == ["a", "b", "c", "d"]

    async def test_reports_add_up(self, engine: AsyncEngine) -> None:
        await register(engine)
        event_id, moment = uuid4(), datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
        last = {"last_event_id": event_id, "last_occurred_at": moment}
        await call(engine, report_position, "Bücher", handled=3, lag=0.25, **last)
        found = await only(engine)
        assert (found.handled, found.last_event_id, found.last_occurred_at) == (3, event_id, moment)
        assert found.lag == 0.25
        assert found.seen_at is not None
        nothing = {"last_event_id": None, "last_occurred_at": None}
        await call(engine, report_position, "Bücher", handled=4, lag=None, **nothing)
        found = await only(engine)
        assert (found.handled, found.last_event_id, found.last_occurred_at) == (7, event_id, moment)
        assert found.lag is None

    async def test_a_new_generation_is_kept_by_those_who_register_later(self, engine: AsyncEngine) -> None:
        await register(engine)
        await call(engine, set_generation, "Bücher", 2)
        assert await register(engine, "Bücher", "other") == 2
        with pytest.raises(StoreError, match="no consumer 'nobody'"):
            await call(engine, set_generation, "nobody", 2)

    async def test_two_names_with_one_number_are_told(
        self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pillarbox.stores.inbox.consumer_id", lambda _name: 7)
        await register(engine, "one")
        with pytest.raises(StoreError, match="'one' and 'other' have the same number"):
            await register(engine, "other")


class TestAdmission:
    async def test_a_database_without_the_table_says_what_to_do(self, empty_database: Database) -> None:
        engine = create_async_engine(empty_database.url())
        with pytest.raises(NotMigratedError, match="pillarbox migrate"):
            await call(engine, SqlInbox().admit, 1, None, arrivals(1))
        await engine.dispose()

    async def test_what_is_new_costs_one_statement_however_many_it_is(self, engine: AsyncEngine) -> None:
        seen: list[str] = []
        event.listen(engine.sync_engine, "before_cursor_execute", lambda *given: seen.append(given[2]))
        for count in (1, 500):
            batch = arrivals(count)
            async with engine.begin() as connection:
                seen.clear()
                await connection.run_sync(SqlInbox().admit, 1, "acme", batch)
                assert len(seen) == 1
            async with engine.begin() as connection:
                seen.clear()
                answers, _ = await connection.run_sync(SqlInbox().admit, 1, "acme", [*batch, *arrivals(1)])
                assert (answers[:-1], answers[-1]) == ([Admission.DUPLICATE] * count, Admission.NEW)
                assert len(seen) <= 3

    @pytest.mark.parametrize(
        ("kind", "driver"),
        [("embedded", "psycopg"), ("embedded", "psycopg2"), ("mariadb", "pymysql"), ("sqlite", "pysqlite")],
    )
    def test_drivers_without_asyncio_can_do_it_too(self, fresh_database: FreshDatabase, kind: str, driver: str) -> None:
        engine = create_engine(fresh_database(kind).url(driver))
        sqlite.configure_transactions(engine)
        with engine.begin() as connection:
            migrate(connection)
            known, new = arrivals(3), arrivals(2)
            for batch in (known[:1], known[1:]):
                assert SqlInbox().admit(connection, 1, None, batch).admissions == [Admission.NEW] * len(batch)
            assert SqlInbox().admit(connection, 1, None, known[:1]).admissions == [Admission.DUPLICATE]
            changed = Arrival(known[0].event_id, 1, digest_of(b"other"))
            assert SqlInbox().admit(connection, 1, None, [changed, *new, known[1]]).admissions == [
                *(Admission.ALTERED, Admission.NEW, Admission.NEW, Admission.DUPLICATE)
            ]
            assert SqlInbox().prune(connection, 1, timedelta(days=1), 10) == 0
            spilled = spill(arrival(), line=7, refused="Käy ")
            SqlInbox().spill(connection, 1, None, [spilled])
            assert [*SqlInbox().admit(connection, 1, None, arrivals(1), claims=1, lines=lambda: [6, 7]).gated] == [7]
            assert SqlInbox().redeem(connection, 1, spilled.claim) == (True, "Käy ")
            assert SqlInbox().redeem(connection, 1, spilled.claim) == (False, None)
        engine.dispose()

    async def test_h78_a_snapshot_that_is_older_than_the_row_lets_nothing_through(
        self, fresh_database: FreshDatabase
    ) -> None:
        """PostgreSQL refuses the whole transaction, which is then tried again."""
        engine = create_async_engine(fresh_database("embedded").url(), isolation_level="REPEATABLE READ")
        await call(engine, migrate)
        batch = arrivals(2)
        async with engine.connect() as connection:
            await connection.run_sync(consumers)
            await call(engine, SqlInbox().admit, 1, None, batch)
            with pytest.raises(DBAPIError, match="could not serialize"):
                await connection.run_sync(SqlInbox().admit, 1, None, batch)
        await engine.dispose()

    async def test_h78_mysql_finds_a_row_that_its_snapshot_does_not_show(self, mariadb_database: Database) -> None:
        engine = create_async_engine(mariadb_database.url(), isolation_level="REPEATABLE READ")
        await call(engine, migrate)
        known, new = arrivals(2), arrivals(2)
        async with engine.begin() as connection:
            await connection.run_sync(consumers)
            await call(engine, SqlInbox().admit, 1, None, known)
            answers, _ = await connection.run_sync(SqlInbox().admit, 1, None, [*known, *new])
            assert answers == [Admission.DUPLICATE] * 2 + [Admission.NEW] * 2
        await engine.dispose()

    def test_h81_what_is_pruned_just_when_it_comes_again_is_still_a_duplicate(
        self, postgres_database: Database
    ) -> None:
        engine = create_engine(postgres_database.url("psycopg"))
        known, new = arrivals(1), arrivals(1)
        with engine.begin() as connection:
            migrate(connection)
            SqlInbox().admit(connection, 1, None, known)

        def prune(_connection: object, _cursor: object, statement: str, *_more: object) -> None:
            if statement.lstrip().startswith("SELECT"):
                with engine.begin() as other:
                    assert SqlInbox().prune(other, 1, timedelta(0), 10) == 1

        with engine.begin() as connection:
            event.listen(connection, "before_cursor_execute", prune)
            answers, _ = SqlInbox().admit(connection, 1, None, [*known, *new])
        assert answers == [Admission.DUPLICATE, Admission.NEW]
        engine.dispose()

    async def test_an_error_that_is_no_duplicate_is_passed_on(self, engine: AsyncEngine) -> None:
        missing: Any = None
        with pytest.raises(DBAPIError):
            await call(engine, SqlInbox().admit, 1, None, [Arrival(uuid4(), missing, digest_of(b""))])


class TestPlans:
    async def test_h81_pruning_walks_over_no_row_that_stays(self, postgres_database: Database) -> None:
        engine = create_async_engine(postgres_database.url())
        await call(engine, migrate)
        async with engine.begin() as connection:
            await connection.execute(text(_MANY))
        async with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            await connection.execute(text("ANALYZE pillarbox_inbox"))
        asked = {"consumer": 1, "before": datetime.now(UTC) - timedelta(days=1), "limit": 100}
        async with engine.begin() as connection:
            explained = await connection.execute(text(f"EXPLAIN {_PRUNE['postgresql'].text}"), asked)
            plan = "\n".join(explained.scalars())
            assert "Index Scan using ix_pillarbox_inbox_at" in plan
            assert "Seq Scan" not in plan
            assert await connection.run_sync(SqlInbox().prune, 1, timedelta(days=1), 100) == 100
        await engine.dispose()

    async def test_duplicates_are_found_by_their_keys_before_there_are_any_statistics(
        self, postgres_database: Database
    ) -> None:
        engine = create_async_engine(postgres_database.url())
        await call(engine, migrate)
        async with engine.begin() as connection:
            await connection.execute(text(_MANY))
            asked = {"consumer": 1, "tenant": "acme", "event_ids": [uuid4(), uuid4()]}
            plan = "\n".join((await connection.execute(text(f"EXPLAIN {_STORED_ARRAY.text}"), asked)).scalars())
        assert "using pillarbox_inbox_pkey" in plan
        await engine.dispose()


_MANY = """
INSERT INTO pillarbox_inbox (consumer, tenant, event_id, schema_version, digest, at)
SELECT 1, 'acme', gen_random_uuid(), 1, decode(md5(CAST(n AS text)), 'hex'), now() - n * interval '1 minute'
FROM generate_series(1, 20000) AS n
"""
