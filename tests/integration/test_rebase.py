"""`rebase` on real copies: what the source had not done is sent from the copy, once and in order, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack

import psycopg
import pytest
from sqlalchemy import Connection

from pillarbox.embedded import EmbeddedPostgres
from pillarbox.errors import StoreError
from pillarbox.outbox import OUTBOUND, Batch, Failure
from pillarbox.outbox import TABLES as DELIVERIES
from pillarbox.stores import rebase as module
from pillarbox.stores.audit import Author
from pillarbox.stores.rebase import Survey, forget, rebase, survey
from tests.conftest import FreshDatabase
from tests.copies import SHARD, Outbox, copy_rows, dump, outbox
from tests.relays import soon
from tests.servers import Postgres, Server, Servers

ANNA = Author("anna@office", "moved house")
LATER = 3600.0


@pytest.fixture(scope="module")
def elsewhere(servers: Servers) -> Iterator[str]:
    """Another server, a young one: few transactions have a number there."""
    with EmbeddedPostgres(servers.folder / "elsewhere", "postgres") as postgres:
        yield postgres.dsn()


class Places:
    """A source, and empty databases to copy it into."""

    def __init__(self, stack: AsyncExitStack, fresh: FreshDatabase, elsewhere: str) -> None:
        self._stack = stack
        self._fresh = fresh
        self._elsewhere = elsewhere
        self._made = 0
        self.table = OUTBOUND

    async def source(self) -> tuple[Outbox, str]:
        database = self._fresh("embedded")
        assert isinstance(database.server, Postgres)
        source = await self._stack.enter_async_context(outbox(database.url(), self.table))
        await source.set_up()
        return source, database.server.address(database.name)

    async def empty(self, where: str) -> tuple[Outbox, str]:
        if where == "the same server":
            database = self._fresh("embedded", empty=True)
            assert isinstance(database.server, Postgres)
            address = database.server.address(database.name)
        else:
            self._made += 1
            name = f"copy{self._made}"
            with psycopg.connect(self._elsewhere, autocommit=True) as connection:
                connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
                connection.execute(f"CREATE DATABASE {name}")
            address = self._elsewhere.replace("@/postgres?", f"@/{name}?", 1)
        url = address.replace("postgresql:", "postgresql+asyncpg:", 1)
        return await self._stack.enter_async_context(outbox(url, self.table)), address


@pytest.fixture
async def places(
    fresh_database: FreshDatabase, use_server: Callable[[str], Server], elsewhere: str
) -> AsyncIterator[Places]:
    use_server("embedded")
    async with AsyncExitStack() as stack:
        yield Places(stack, fresh_database, elsewhere)


async def make_history(source: Outbox, stack: AsyncExitStack, *, paging: bool) -> None:
    """A lane in which everything has happened that can be in a copy. Left open is a batch of late rows, with a page of
    them before it, or one of fresh rows, of which one was rejected, while others are late.
    """
    store = source.store
    late, never = [await stack.enter_async_context(source.engine.connect()) for _ in range(2)]
    await source.write("l1 l2", late)
    await source.write("n1", never)  # still at work when the copy is made
    await source.write("a1 b1 c1 c2 d1 d2 e1")
    lane = await source.take()
    page, rows = await source.look(lane)
    failures = [Failure(rows["c1"], 1, "not now", 0.0), Failure(rows["d1"], 3, "never", None)]
    batch = Batch([rows["a1"], rows["b1"], rows["e1"]], failures, [rows["c2"], rows["d2"]], cursor=page.cursor)
    lane = await store.settle(await store.announce(lane, batch, settle=False))
    await source.write("x1 f1 g1 g2 h1")
    await ask_to_discard(source, "x1")
    page = await store.poll(lane, limit=1)
    lane = await store.announce(lane, Batch(requests=page.requests), settle=False)
    if paging:
        await late.commit()
        page, rows = await source.look(lane)
        lane = await store.settle(await store.announce(lane, Batch([rows["l1"]], cursor=page.cursor), settle=False))
        page, rows = await source.look(lane)
        await store.announce(lane, Batch([rows["l2"]], cursor=page.cursor), settle=False)
    else:
        page, rows = await source.look(lane)
        assert [*rows] == ["f1", "g1", "g2", "h1"]
        lane = await store.announce(lane, Batch([*rows.values()], cursor=page.cursor), settle=False)
        await store.amend(lane, [Failure(rows["g2"], 1, "not now", 0.0)])
        await late.commit()
    await source.write("a2 c3 g3 d3 x2 y1 y2")
    await ask_to_discard(source, "y1")  # nobody has done it yet


async def ask_to_discard(source: Outbox, event: str) -> None:
    await source.do(
        "INSERT INTO pillarbox_requests (route, shard, row_id, action, audit) "
        f"SELECT route, shard, id, 'discard', 0 FROM {source.table} WHERE body = '{event}'"
    )


def by_key(sent: str) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for event in sent.split():
        keys.setdefault(event[0], []).append(event)
    return keys


TABLES = [
    *("pillarbox_meta", "pillarbox_routes", "pillarbox_lanes", "pillarbox_outbox", "pillarbox_failures"),
    *("pillarbox_origin", "pillarbox_requests"),
]


async def run(copy: Outbox, *, new_install_id: bool = False) -> Survey:
    async with copy.engine.connect() as connection:
        await connection.run_sync(forget)
    async with copy.engine.begin() as connection:
        found, _, _ = await connection.run_sync(lambda it: rebase(it, ANNA, new_install_id=new_install_id))
    return found


@pytest.mark.parametrize("where", ["the same server", "elsewhere"])
@pytest.mark.parametrize("paging", [True, False], ids=["late batch", "fresh batch"])
@pytest.mark.parametrize("table", DELIVERIES)
async def test_h107_a_restored_dump_goes_on_where_the_source_was(
    places: Places, where: str, paging: bool, table: str
) -> None:
    places.table = table
    source, address = await places.source()
    await source.burn()
    async with AsyncExitStack() as stack:
        await make_history(source, stack, paging=paging)
        copy, target = await places.empty(where)
        dump(address, target)
    before = await copy.states()
    with pytest.raises(StoreError, match="outbox rebase"):
        await copy.take()

    found = await run(copy)

    sending = {event: "PENDING" for event, status in before.items() if status == "SENDING"}
    assert await copy.states() == before | sending | ({} if paging else {"g1": "RETRYING"})
    assert (found.lanes, found.batches, found.late, found.failed) == ((16, 1, 1, 4) if paging else (16, 1, 5, 5))
    for each in (copy, source):
        await each.write("a3 g4 l3")
    sent, expected = await copy.drain(), await source.drain()
    assert by_key(sent) == by_key(expected)
    assert {"l2", "l3", "g1", "g2", "g4", "c3", "x2", "y2"} <= {*sent.split()}
    states = await copy.states()
    assert states == await source.states()
    assert {states[event] for event in ("d1", "d3", "x1")} == {"FAILED", "PARKED", "DISCARDED"}
    assert await copy.drain() == ""


async def test_h107_a_copy_goes_on_where_a_detour_was(places: Places) -> None:
    source, address = await places.source()
    await source.burn()
    await source.write("a1 a2", tenant="loud")
    await source.write("b1")
    lane = await source.send(await source.store.part(await source.take(), ["loud"]))
    page = await source.store.poll(lane, limit=1, detour="loud")
    batch = Batch([row.id for row in page.fresh], cursor=page.cursor)
    await source.store.settle(await source.store.announce(lane, batch, settle=False))
    await source.write("a3", tenant="loud")
    copy, target = await places.empty("the same server")
    dump(address, target)
    await run(copy)
    assert await copy.drain() == await source.drain() == "a2 a3"


async def test_h107_a_row_that_a_lane_has_paged_over_and_its_detour_has_not_is_told_once(places: Places) -> None:
    source, address = await places.source()
    await source.burn()
    async with source.engine.connect() as late:
        await source.write("l1", late, tenant="loud")
        await source.write("m1 n1 o1", late)
        await source.write("l2", tenant="loud")
        lane = await source.take()
        page, rows = await source.look(lane)
        batch = Batch(failures=[Failure(rows["l2"], 3, "never", None)], cursor=page.cursor)
        lane = await source.store.part(await source.store.announce(lane, batch, settle=False), ["loud"])
        await late.commit()
    page = await source.store.poll(lane, limit=1)
    batch = Batch([row.id for row in page.fresh], cursor=page.cursor)
    lane = await source.store.settle(await source.store.announce(lane, batch, settle=False))
    assert lane.cursor.paging is not None
    copy, target = await places.empty("the same server")
    dump(address, target)
    found = await run(copy)
    assert (found.late, found.failed) == (3, 1)
    assert sorted((await copy.drain()).split()) == ["l1", "n1", "o1"]
    assert (await copy.states())["l2"] == "FAILED"


async def test_what_was_written_into_the_copy_before_is_sent_too(places: Places) -> None:
    source, address = await places.source()
    await source.burn()
    await source.write("a1 b1")
    await source.send(await source.take())
    await source.write("a2")
    copy, target = await places.empty("elsewhere")
    dump(address, target)
    await copy.write("a3 b2")
    await run(copy)
    assert await copy.drain() == "a2 a3 b2"


async def test_a_logical_copy_draws_no_id_twice(places: Places) -> None:
    """It has a sequence of its own, which begins at the beginning: what was written before has ids of old rows."""
    source, address = await places.source()
    await source.burn()
    await source.write("a1 a2 b1 c1")
    await source.send(await source.take())
    await source.write("a3")
    copy, target = await places.empty("elsewhere")
    await copy.set_up()
    copy_rows(address, target, TABLES)
    with pytest.raises(StoreError, match="outbox rebase"):
        await copy.take()
    async with copy.engine.connect() as older:  # since then no number counts as old
        await older.exec_driver_sql("SELECT pg_current_xact_id()")
        await copy.write("a4 b2")
        await run(copy)
    await copy.write("a5")
    assert await copy.drain() == "a3 a4 b2 a5"
    ids = [row for (row,) in await copy.ask("SELECT id FROM pillarbox_outbox")]
    assert sorted(ids) == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_rebase_waits_for_writers_and_its_own_number_is_not_taken_for_an_old_one(places: Places) -> None:
    """While it waits, transactions with higher numbers end: its own, which late rows get, must not count as ended."""
    source, address = await places.source()
    await source.burn()
    await source.write("a1")
    late = await source.engine.connect()
    await source.write("l1", late)
    await source.write("b1")
    await source.send(await source.take())
    await late.commit()
    await late.close()
    copy, target = await places.empty("elsewhere")
    dump(address, target)
    async with copy.engine.connect() as writer:
        await copy.write("b2", writer)
        rebasing = asyncio.create_task(run(copy))
        await soon(lambda: waits(copy))
        await copy.burn(20)
        await writer.commit()
        await rebasing
    assert (await copy.drain()).split() == ["l1", "b2"]


async def waits(copy: Outbox) -> bool:
    return bool(await copy.ask("SELECT 1 FROM pg_locks WHERE NOT granted AND mode = 'ShareRowExclusiveLock'"))


async def test_a_number_that_the_source_had_by_chance_is_not_sent_again(places: Places) -> None:
    """Rows that are done have the very number that the transaction which rebases will get."""
    source, address = await places.source()
    await source.write("a1 b1")
    await source.send(await source.take())
    copy, target = await places.empty("elsewhere")
    dump(address, target)
    await copy.do(f"UPDATE pillarbox_lanes SET cursor = '2 9999999:9999999:' WHERE shard = {SHARD}")
    following = "CAST(CAST(CAST(CAST(pg_current_xact_id() AS text) AS bigint) + 1 AS text) AS xid8)"
    await copy.do(f"UPDATE pillarbox_outbox SET xid = {following}")
    async with copy.engine.begin() as connection:
        await connection.run_sync(lambda it: rebase(it, ANNA))
    assert await copy.drain() == ""


async def test_what_is_left_in_the_middle_is_begun_again(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PORTION", 2)
    source, address = await places.source()
    await source.burn()
    async with AsyncExitStack() as stack:
        await make_history(source, stack, paging=False)
        copy, target = await places.empty("elsewhere")
        dump(address, target)
    before = await copy.states()
    async with copy.engine.connect() as connection:
        assert await connection.run_sync(forget) > 10
        assert await connection.run_sync(forget) == 0
    assert await copy.states() == before
    with pytest.raises(StoreError, match="outbox rebase"):
        await copy.take()
    await run(copy)
    assert by_key(await copy.drain()) == by_key(await source.drain())


async def test_it_is_audited_and_fences_whoever_was_there(places: Places) -> None:
    source, address = await places.source()
    async with AsyncExitStack() as stack:
        await make_history(source, stack, paging=False)
        copy, target = await places.empty("elsewhere")
        dump(address, target)
    lane = f"SELECT epoch, next_number, announced, locked_by FROM pillarbox_lanes WHERE shard = {SHARD}"
    [(epoch, number, announced, _)] = await copy.ask(lane)
    [(install,)] = await copy.ask("SELECT install_id FROM pillarbox_meta")
    assert announced is not None
    await run(copy, new_install_id=True)
    assert await copy.ask(lane) == [(epoch + 1, number, None, None)]
    assert await copy.ask("SELECT install_id FROM pillarbox_meta") != [(install,)]
    [(who, action, reason, details)] = await copy.ask("SELECT who, action, reason, details FROM pillarbox_audit")
    assert (who, action, reason) == ("anna@office", "rebase", "moved house")
    assert json.loads(details)["late"] == 5
    assert json.loads(details)["old_install_id"] == str(install)
    assert await source.ask("SELECT install_id FROM pillarbox_meta") == [(install,)]


@pytest.mark.parametrize("work", [survey, forget, lambda it: rebase(it, ANNA)], ids=["survey", "forget", "rebase"])
async def test_an_original_is_refused(places: Places, work: Callable[[Connection], object]) -> None:
    source, _ = await places.source()
    await source.write("a1")
    async with source.engine.connect() as connection:
        with pytest.raises(StoreError, match="is no copy"):
            await connection.run_sync(work)


async def test_a_copy_whose_lanes_are_leased_is_refused(places: Places) -> None:
    source, address = await places.source()
    await source.take(LATER)
    copy, target = await places.empty("elsewhere")
    dump(address, target)
    with pytest.raises(StoreError, match=r"leased until .* UTC \(copies/0\)"):
        await run(copy)


async def test_after_it_the_database_is_an_original(places: Places) -> None:
    _, address = await places.source()
    copy, target = await places.empty("elsewhere")
    dump(address, target)
    await run(copy)
    with pytest.raises(StoreError, match="is no copy"):
        await run(copy)
    await copy.do("VACUUM (FULL, FREEZE) pillarbox_origin")
    await copy.take()
    second, target = await places.empty("elsewhere")
    dump(target.replace("copy2", "copy1"), target)
    with pytest.raises(StoreError, match="outbox rebase"):
        await second.take()
