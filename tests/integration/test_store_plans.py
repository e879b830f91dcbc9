"""No statement of a lane's turn walks the outbox: however much was sent before, and whatever the statistics say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_cursor
from sqlalchemy.dialects.sqlite.aiosqlite import AsyncAdapt_aiosqlite_cursor
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox.outbox import Batch, Failure
from pillarbox.stores import sqlite
from pillarbox.stores.columns import from_now
from pillarbox.stores.inspection import backlog
from pillarbox.stores.migrations import migrate
from pillarbox.stores.queue import QueueStore
from pillarbox.stores.tables import outbox
from pillarbox.testing.conformance.outbox import ROUTE, delivery
from tests.conftest import FreshDatabase

_ANALYZE = {"postgresql": "ANALYZE pillarbox_outbox", "sqlite": "ANALYZE"}
_EXPLAIN = {"postgresql": "EXPLAIN", "sqlite": "EXPLAIN QUERY PLAN"}
_CURSORS: dict[str, Any] = {"postgresql": AsyncAdapt_asyncpg_cursor, "sqlite": AsyncAdapt_aiosqlite_cursor}
_WALKS = {"postgresql": ("Seq Scan on pillarbox_outbox",), "sqlite": ("SCAN o", "SCAN pillarbox_outbox", "SCAN w")}


@pytest.fixture(params=["embedded", "system", "sqlite"])
async def engine(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(fresh_database(request.param).url())
    sqlite.put_right(engine.sync_engine)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
    yield engine
    await engine.dispose()


@pytest.mark.parametrize("analyzed", [False, True], ids=["without statistics", "with statistics"])
async def test_h56_a_turn_costs_the_same_however_much_was_sent(engine: AsyncEngine, analyzed: bool) -> None:
    store = QueueStore(engine)
    await _fill(engine, store)
    if analyzed:
        async with engine.begin() as connection:
            await connection.execute(text(_ANALYZE[engine.dialect.name]))
    [lane] = await store.take("r", lease=30, wanted={ROUTE.id: 1})
    with _recorded(engine) as statements:
        await store.ready([ROUTE.id], relay="r")
        page = await store.poll(lane, limit=100)
        assert page.redo
        assert page.fresh
        items = [row.id for row in (*page.redo, *page.fresh[1:])]
        batch = Batch(items=items, failures=[Failure(page.fresh[0].id, 1, "no", 0.0)])
        lane = await store.announce(lane, batch, settle=False)
        await store.rebuild(lane)
        lane = await store.amend(lane, [Failure(items[-1], 1, "no", 0.0)])
        await store.settle(lane)
    assert len(statements) > 8
    async with engine.connect() as connection:
        for statement, parameters in statements:
            found = await connection.exec_driver_sql(f"{_EXPLAIN[engine.dialect.name]} {statement}", parameters)
            plan = [str(row[-1]) for row in found]
            assert not _walks(engine.dialect.name, plan), "\n".join((statement, *plan))


async def test_the_backlog_is_counted_without_reading_what_was_sent(engine: AsyncEngine) -> None:
    await _fill(engine, QueueStore(engine))
    async with engine.begin() as connection:
        await connection.execute(text(_ANALYZE[engine.dialect.name]))
    async with engine.connect() as connection:
        with _recorded(engine) as statements:
            (route,) = await connection.run_sync(backlog)
        assert (route.pending, route.failed) == (2202, 1)
        assert len(statements) == 1
        for statement, parameters in statements:
            found = await connection.exec_driver_sql(f"{_EXPLAIN[engine.dialect.name]} {statement}", parameters)
            plan = [str(row[-1]) for row in found]
            assert not any(walk in line for line in plan for walk in _WALKS[engine.dialect.name]), "\n".join(plan)
            assert any("ix_pillarbox_outbox_lane" in line or "PRIMARY KEY" in line for line in plan), "\n".join(plan)


def _walks(dialect: str, plan: list[str]) -> bool:
    if any(walk in line for line in plan for walk in _WALKS[dialect]):
        return True
    # Of the lane's index, all but its status is as good as nothing: a lane may have a million rows.
    conditions = [after for line, after in pairwise(plan) if "on pillarbox_outbox" in line and "Index Cond" in after]
    return not all("status" in condition or "key" in condition for condition in conditions)


async def _fill(engine: AsyncEngine, store: QueueStore) -> None:
    """Much that was sent, a key with much behind a dead row, one that is due with a row behind it, and fresh rows."""
    async with engine.begin() as connection:
        await connection.run_sync(store.register, [ROUTE])
        for keys, status, due in (
            ([f"k{index}" for index in range(5000)], "SENT", None),
            (["stuck"], "FAILED", None),
            (["stuck"] * 2000, "PARKED", None),
            (["due"], "RETRYING", from_now(-1.0)),
            (["due"], "PARKED", None),
            ([f"new{index}" for index in range(200)], "PENDING", None),
        ):
            await connection.run_sync(store.append, [delivery(key) for key in keys])
            written = outbox.c.status == "PENDING"
            await connection.execute(update(outbox).where(written).values(status=status, available_at=due))
        assert (await connection.execute(select(outbox.c.id).limit(1))).first()


@contextmanager
def _recorded(engine: AsyncEngine) -> Iterator[list[tuple[str, Any]]]:
    """What the store asks about the outbox. Heard at the driver: not all of it goes through the engine."""
    statements: list[tuple[str, Any]] = []
    cursor = _CURSORS[engine.dialect.name]
    execute = cursor.execute

    def recording(self: Any, statement: str, parameters: Any = None) -> Any:
        if outbox.name in statement:
            statements.append((statement, tuple(parameters)))
        return execute(self, statement, parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cursor, "execute", recording)
        yield statements
