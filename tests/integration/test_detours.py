"""A lane with a detour, and all who read cursors: the view, counting, pruning, copying."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection

from pillarbox.cursor import Cursor
from pillarbox.outbox import OUTBOUND, Batch, Lane
from pillarbox.stores import log, look, look_sql, partition_pruning, retention
from pillarbox.stores.announced import encode_detours
from pillarbox.stores.audit import Author
from pillarbox.stores.overview import backlog, lane_states
from pillarbox.stores.partition_pruning import Fate
from pillarbox.stores.partitions import Part
from tests.copies import ROUTE, SHARD, Outbox, outbox
from tests.servers import Database

ANNA = Author("anna", "it floods")


@pytest.fixture
async def here(postgres_database: Database) -> AsyncIterator[Outbox]:
    async with outbox(postgres_database.url()) as made:
        await made.set_up()
        yield made


async def behind(here: Outbox) -> Lane:
    """A lane that is done, but for a detour that has sent ``a1`` and has ``a2`` and ``a3`` left."""
    async with here.engine.begin() as late:
        await here.write("a1", tenant="loud")
        lane = await here.store.part(await here.take(), ["loud"])
        await here.write("l1", late, tenant="slow")
        await here.write("b1 b2")
        lane = await sent(here, lane)
        lane = await sent(here, lane, "loud")
        await here.write("a2 a3", tenant="loud")
        await here.write("b3")
    return await sent(here, lane)


async def sent(here: Outbox, lane: Lane, detour: str | None = None, *, limit: int = 100) -> Lane:
    """Send what a look finds."""
    page = await here.store.poll(lane, limit=limit, detour=detour)
    batch = Batch([row.id for row in page.fresh], cursor=page.cursor)
    lane = await here.store.announce(lane, batch, settle=lane.announced is not None)
    return await here.store.settle(lane) if lane.announced else lane


async def test_detours_are_written_when_one_of_them_has_moved(here: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = await here.store.part(await here.take(), ["loud", "quiet"])
    await here.write("a1", tenant="loud")
    await here.write("b1")
    written = list[Mapping[str, object]]()

    def watched(detours: Mapping[str, Cursor]) -> str | None:
        written.append(detours)
        return encode_detours(detours)

    monkeypatch.setattr(log, "encode_detours", watched)
    lane = await sent(here, lane)
    assert not written
    lane = await sent(here, lane, "loud")
    assert written == [lane.detours]
    told = await here.ask(f"SELECT detours FROM pillarbox_lanes WHERE shard = {SHARD}")
    assert told == [(encode_detours(lane.detours),)]


async def test_people_see_what_a_detour_has_not_come_to(here: Outbox) -> None:
    await behind(here)
    assert await here.states() == {
        **dict.fromkeys(("a1", "l1", "b1", "b2", "b3"), "SENT"),
        **dict.fromkeys(("a2", "a3"), "PENDING"),
    }
    assert await here.ask("SELECT count(*) FROM pillarbox_unsent") == [(2,)]


async def test_what_a_lane_has_paged_over_and_its_detour_has_not_is_counted_once(here: Outbox) -> None:
    lane = await here.store.part(await here.take(), ["loud"])
    async with here.engine.begin() as late:
        await here.write("a1", late, tenant="loud")
        await here.write("b1 c1 d1", late)
        await here.write("e1")
        lane = await sent(here, lane)
    lane = await sent(here, lane, limit=1)
    assert lane.cursor.paging is not None
    assert [row for (row,) in await here.ask("SELECT id FROM pillarbox_unsent ORDER BY id")] == [1, 3, 4]
    async with here.engine.connect() as connection:
        (route,) = await connection.run_sync(backlog)
        states = await connection.run_sync(lane_states)
    assert route.pending == 3
    assert [state.pending for state in states] == [3] + 15 * [0]


async def test_people_see_when_a_detour_has_sent_a_row(here: Outbox) -> None:
    lane = await behind(here)
    (before,) = await here.ask("SELECT max(settled_at) FROM pillarbox_journal")
    lane = await here.store.join(await sent(here, lane, "loud"), ["loud"])
    assert not lane.detours
    told = "SELECT convert_from(o.body, 'UTF8'), v.sent_at FROM outbox_events v JOIN pillarbox_outbox o USING (id)"
    times = dict(await here.ask(told))
    assert None not in times.values()
    assert {event for event, at in times.items() if at > before[0]} == {"a2", "a3"}
    assert await here.ask("SELECT count(*) FROM pillarbox_unsent") == [(0,)]


async def test_h62_what_a_detour_has_not_come_to_is_not_pruned(here: Outbox) -> None:
    lane = await behind(here)
    assert await pruned(here) == (5, 3)
    assert await here.states() == {"a2": "PENDING", "a3": "PENDING"}
    await sent(here, lane, "loud")
    assert await pruned(here) == (2, 1)


async def test_h62_how_old_a_row_is_tells_the_detour_that_has_sent_it(here: Outbox) -> None:
    """Its lane has passed it over, and long ago."""
    lane = await behind(here)
    await here.do("UPDATE pillarbox_outbox SET created_at = created_at - interval '2 hours'")
    await here.do("UPDATE pillarbox_journal SET settled_at = settled_at - interval '2 hours'")
    await sent(here, lane, "loud")

    def judged(connection: Connection) -> Fate:
        """As if the whole table were a day."""
        scope = retention.scope(connection, older_than=3600)
        table = Part("pillarbox_outbox", UUID(int=0), UUID(int=2**128 - 1))
        return partition_pruning._fate(connection, table, scope, retention.stretches(connection, scope))

    async with here.engine.begin() as connection:
        assert (await connection.run_sync(judged)).stay == 2
    assert await pruned(here, older_than=3600) == (5, 3)
    assert {*await here.states()} == {"a2", "a3"}
    await here.do("UPDATE pillarbox_journal SET settled_at = settled_at - interval '2 hours'")
    assert await pruned(here, older_than=3600) == (2, 1)
    assert await here.ask("SELECT count(*) FROM pillarbox_journal") == [(0,)]


async def test_a_lane_in_which_everybody_has_a_detour_is_pruned(here: Outbox) -> None:
    """It passes over everything, and nothing in the journal is its own."""
    lane = await here.store.part(await here.take(), ["loud"])
    for number in range(5):
        await here.write(f"a{number} b{number}", tenant="loud")
        lane = await sent(here, await sent(here, lane), "loud")
        if number == 2:
            await here.do("UPDATE pillarbox_outbox SET created_at = created_at - interval '2 hours'")
            await here.do("UPDATE pillarbox_journal SET settled_at = settled_at - interval '2 hours'")
    assert await pruned(here, older_than=3600) == (6, 3)
    assert {*await here.states()} == {"a3", "b3", "a4", "b4"}
    assert await pruned(here) == (4, 2)


async def test_a_tenant_that_waits_keeps_no_line_of_the_journal(here: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_REMEMBERED", 3)
    lane = await here.store.part(await here.take(), ["paused"])
    await here.write("p1 p2 p3 p4 p5", tenant="paused")
    for number in range(6):
        await here.write(f"b{number}")
        lane = await sent(here, lane)
    assert await pruned(here) == (6, 6)


async def pruned(here: Outbox, older_than: float = 0.0) -> tuple[int, int]:
    """How many rows have gone, and how many lines of the journal."""

    def prune(connection: Connection) -> tuple[int, int]:
        scope, gone = retention.scope(connection, older_than=older_than), 0
        places = retention.stretches(connection, scope)
        for place in places:
            gone += retention.remove(connection, retention.page(connection, scope, place, (), 100).keys)
        return gone, sum(retention.clear_journal(connection, place, (), 100)[0] for place in places)

    async with here.engine.begin() as connection:
        return await connection.run_sync(prune)


async def test_h61_a_detour_pages_through_late_rows(here: Outbox) -> None:
    lane = await here.store.part(await here.take(), ["loud"])
    async with here.engine.begin() as late:
        await here.write("a1 a2 a3 a4 a5", late, tenant="loud")
        await here.write("l1 l2 l3", late, tenant="slow")
        await here.write("b1")
        lane = await sent(here, lane)
        await here.write("a9", tenant="loud")
        lane = await sent(here, lane)
        lane = await sent(here, lane, "loud")
    found = []
    for _ in range(12):
        for detour in (None, "loud"):
            page = await here.store.poll(lane, limit=2, detour=detour)
            found += [row.body.decode() for row in page.fresh]
            if page.cursor is not None and (page.fresh or page.passed):
                batch = Batch([row.id for row in page.fresh], cursor=page.cursor)
                lane = await here.store.announce(lane, batch, settle=lane.announced is not None)
                lane = await here.store.settle(lane) if lane.announced else lane
    assert sorted(found) == ["a1", "a2", "a3", "a4", "a5", "l1", "l2", "l3"]
    assert [event for event in found if event[0] == "a"] == ["a1", "a2", "a3", "a4", "a5"]
    assert not (await here.store.join(lane, ["loud"])).detours


async def test_h110_a_detour_that_comes_through_late_rows_first_waits_for_its_lane(here: Outbox) -> None:
    lane = await here.take()
    async with here.engine.begin() as late:
        await here.write("a1 a2 a3", late, tenant="loud")
        await here.write("l1 l2", late)
        await here.write("b1")
        lane = await sent(here, lane)
    page = await here.store.poll(lane, limit=2)  # in the middle of the late rows
    batch = Batch([row.id for row in page.fresh], cursor=page.cursor)
    lane = await here.store.settle(await here.store.announce(lane, batch, settle=False))
    lane = await here.store.part(lane, ["loud"])
    found = [row.body.decode() for row in page.fresh]
    unsent = []
    for detour in ("loud", "loud", "loud", None, None, None, "loud", "loud"):
        ((count,),) = await here.ask("SELECT count(*) FROM pillarbox_unsent")
        unsent.append(count + len(found))
        page = await here.store.poll(lane, limit=2, detour=detour)
        found += [row.body.decode() for row in page.fresh]
        if page.fresh or page.passed:
            batch = Batch([row.id for row in page.fresh], cursor=page.cursor)
            lane = await here.store.announce(lane, batch, settle=lane.announced is not None)
            lane = await here.store.settle(lane) if lane.announced else lane
    assert sorted(found) == ["a1", "a2", "a3", "l1", "l2"]
    assert {*unsent} == {5}
    assert not (await here.store.join(lane, ["loud"])).detours


async def test_a_look_goes_through_so_many_rows_at_a_time(here: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "SCAN", 3)
    await here.write("a1 a2 a3 a4 a5 a6 a7", tenant="loud")
    await here.write("b1")
    lane = await here.store.part(await here.take(), ["loud"])
    looks = 0
    while not (page := await here.store.poll(lane, limit=10)).fresh:
        assert page.passed
        assert page.scan_exhausted
        lane = await here.store.announce(lane, Batch(cursor=page.cursor), settle=False)
        looks += 1
    assert looks == 2
    assert not page.scan_exhausted
    assert [row.body for row in page.fresh] == [b"b1"]


async def test_a_look_that_found_something_tells_that_it_was_cut(here: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the rest would wait for somebody to look again."""
    monkeypatch.setattr(look, "SCAN", 3)
    await here.write("a1", tenant="loud")
    await here.write("b1")
    await here.write("a2 a3 a4", tenant="loud")
    await here.write("b2")
    lane = await here.store.part(await here.take(), ["loud"])
    page = await here.store.poll(lane, limit=10)
    assert ([row.body for row in page.fresh], page.passed) == ([b"b1"], True)


@pytest.mark.parametrize("detour", [None, "loud"], ids=["lane", "detour"])
async def test_h56_a_lane_with_detours_is_led_to_its_indexes(here: Outbox, detour: str | None) -> None:
    """Whatever the statistics say: here there are none, and the table is small."""
    await behind(here)
    given: dict[str, Any] = {"route": ROUTE.id, "shard": SHARD, "high": 3, "limit": 10, "max_bytes": 1000}
    given |= {"xmax": "900", "running": ["800"], "late": ["800"], "done": 1, "snapshot": None, "up_to": 9, "scan": 100}
    given |= {"detour": detour, "passed_over": ["loud"]}
    async with here.engine.connect() as connection:
        questions = look_sql.questions_to(OUTBOUND)
        for looks in (questions.divided_poll, questions.divided_page):
            for statement in (looks.light, looks.sized):
                told, names, _ = statement._compile(here.engine.dialect)
                found = await connection.exec_driver_sql(f"EXPLAIN {told}", tuple(given[name] for name in names))
                plan = "\n".join(line for (line,) in found)
                assert "Seq Scan on pillarbox_outbox" not in plan, plan
                assert plan.count("pillarbox_outbox") >= 1
