"""What people ask for and do, and what they are told about it, on every database."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox import IntegrationEvent, Pillarbox, Route
from pillarbox.cli import outbox as outbox_command
from pillarbox.cli.doctor import State, _troubled
from pillarbox.cli.output import CommandError
from pillarbox.cli.trace import life
from pillarbox.cli.why import Answer, explain
from pillarbox.cursor import Cursor
from pillarbox.errors import LeaseLostError, StoreError
from pillarbox.outbox import Batch, FailurePolicy, Lane, Status, stable_hash
from pillarbox.stores import inspection, operations, overview, sqlite, store_on
from pillarbox.stores.audit import Author
from pillarbox.stores.columns import from_now
from pillarbox.stores.inspection import Filter, Summary
from pillarbox.stores.operations import Action, Change, Handle, Lanes, Run, Selection, Tenant
from pillarbox.stores.tables import audit, lanes, outbox, relays, requests, routes
from pillarbox.transports.memory import MemoryTransport
from tests.deliveries import put
from tests.domain import until_somebody_waits
from tests.servers import Database

pytestmark = pytest.mark.dialects

ROUTE = "broker:depot.events"
ROUTE_ID = stable_hash(ROUTE)
ANNA = Author("anna@office", "the broker was full")
BEN = Author("ben@office")

_T = TypeVar("_T")


class Came(IntegrationEvent, name="depot.truck.came"):
    pass


class Yard:
    """Six deliveries of one route: three of the key ``truck-1``, and one each of three others."""

    KEYS = ("truck-1", "truck-1", "truck-1", "truck-2", "truck-3", "truck-4")

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.store = store_on(engine)
        self.is_log = engine.dialect.name == "postgresql"
        self.box = Pillarbox(
            engine,
            transports={"broker": MemoryTransport()},
            routes=[Route("depot.**", to="broker", topic="depot.events")],
        )
        self.rows: list[Summary] = []

    async def open(self) -> None:
        sqlite.configure_transactions(self.engine.sync_engine)
        await self.box.migrate()
        for key in self.KEYS:
            async with self.box.unit_of_work(tenant="acme") as uow:
                uow.publish(Came(), key=key)
        self.rows = await self.ask(lambda it: inspection.deliveries(it, Filter(), after=0, limit=100))

    async def ask(self, question: Callable[[Connection], _T]) -> _T:
        async with self.engine.begin() as connection:
            return await connection.run_sync(question)

    async def put(self, *rows: Summary, status: Status, **values: Any) -> None:
        """As an owner of the lane would have left them."""
        async with self.engine.begin() as connection:
            found = outbox.c.id.in_([row.id for row in rows])
            await connection.run_sync(put, found, status=status, **values)

    async def written(self, row: Summary, *, ago: timedelta) -> None:
        async with self.engine.begin() as connection:
            now = datetime.now(UTC)
            await connection.execute(update(outbox).where(outbox.c.id == row.id).values(created_at=now - ago))

    async def kill(self, *rows: Summary) -> None:
        await self.put(*rows, status=Status.FAILED, attempts=5, last_error="too long")

    async def lane(self, **values: Any) -> None:
        async with self.engine.begin() as connection:
            await connection.execute(update(lanes).values(values))

    async def announced(self, row: Summary, *, batch: int) -> None:
        """The row is on its way."""
        details = {"to": str(Cursor()), "redo": [row.id]} if self.is_log else {}
        items = [] if self.is_log else [row.id]
        stored = json.dumps({"first_number": 1, "count": 1, "digest": "", "items": items, "details": details})
        await self.lane(announced=stored, announced_low=row.id, announced_high=row.id, batch=batch)

    async def held(self, owner: str = "relay-1") -> None:
        await self.lane(locked_by=owner, locked_until=from_now(60), token=uuid4())

    async def alive(self, name: str = "relay-1", shards: str | None = None) -> None:
        async with self.engine.begin() as connection:
            values = {"expires_at": from_now(60), "serves": f"[{ROUTE_ID}]", "shards": shards}
            await connection.execute(insert(relays).values(name=name, **values))

    async def request(
        self, action: Action, wanted: Filter | None = None, *events: UUID, author: Author = ANNA, limit: int = 100
    ) -> Run:
        selection = Selection(action, wanted or Filter(), events)
        return await self.ask(lambda it: operations.request(it, selection, author, Run(), limit))

    async def requested(self) -> list[tuple[int, str]]:
        found = select(requests.c.row_id, requests.c.action).order_by(requests.c.id)
        return [(row, action) for row, action in await self.ask(lambda it: it.execute(found).all())]

    async def trail(self) -> Sequence[inspection.AuditEntry]:
        return await self.ask(inspection.audit_trail)

    async def why(self, row: Summary) -> Answer:
        (answer,) = await self.ask(lambda it: explain(it, row.event_id))
        return answer

    async def do(self, handle: Handle, target: Lanes | Tenant, rate: float | None = None) -> tuple[int, int | None]:
        return await self.ask(lambda it: operations.apply(it, Change(handle, target, rate), BEN))

    async def carry_out(self) -> None:
        """What the owner does with requests, in its next turn."""
        for lane in await self.take():
            page = await self.store.poll(lane, limit=100)
            lane = await self.store.announce(lane, Batch(requests=page.requests), settle=False)  # noqa: PLW2901
            await self.store.release("relay-1", [lane])

    async def take(self) -> list[Lane]:
        return await self.store.take("relay-1", lease=60, wanted={ROUTE_ID: 16})


@pytest.fixture
async def yard(database: Database) -> AsyncIterator[Yard]:
    engine = create_async_engine(database.url())
    yard = Yard(engine)
    await yard.open()
    yield yard
    await engine.dispose()


def shard_of(yard: Yard, row: Summary) -> int:
    return stable_hash(row.key) % yard.box.router.shards


class TestRequests:
    async def test_portion_by_portion_with_one_row_in_the_trail(self, yard: Yard) -> None:
        await yard.kill(*yard.rows[1:])
        selection = Selection(Action.REDRIVE, Filter(Status.FAILED, key="truck-1"))
        assert await yard.ask(lambda it: operations.count(it, selection)) == (2, 0)
        run = Run()
        for requested in (1, 2, 2):
            run = await yard.ask(lambda it, before=run: operations.request(it, selection, ANNA, before, 1))  # type: ignore[misc]
            assert run.requested == requested
        assert await yard.requested() == [(yard.rows[1].id, "redrive"), (yard.rows[2].id, "redrive")]
        (entry,) = await yard.trail()
        assert (entry.id, entry.who, entry.action, entry.reason) == (run.audit, "anna@office", "redrive", ANNA.reason)
        assert (entry.target, entry.event_id) == ("status FAILED, key truck-1", None)
        assert entry.details["count"] == 2
        assert abs((datetime.now(UTC) - entry.at).total_seconds()) < 300

    async def test_nothing_to_do_leaves_no_trace(self, yard: Yard) -> None:
        assert await yard.request(Action.REDRIVE) == Run()
        assert await yard.trail() == []

    async def test_only_for_those_whom_it_can_help(self, yard: Yard) -> None:
        _, sending, *others = yard.rows
        for row, status in zip(others, (Status.SENT, Status.RETRYING, Status.PARKED, Status.DISCARDED), strict=True):
            await yard.put(row, status=status)
        await yard.announced(sending, batch=1)
        assert (await yard.request(Action.REDRIVE)).requested == 2
        assert (await yard.request(Action.DISCARD)).requested == 4
        first, second, _, retrying, parked, _ = (row.id for row in yard.rows)
        discarded = [(row, "discard") for row in (first, second, retrying, parked)]
        assert sorted(await yard.requested()) == sorted([(second, "redrive"), (retrying, "redrive"), *discarded])

    async def test_named_events_and_filters_narrow_each_other(self, yard: Yard) -> None:
        await yard.kill(*yard.rows)
        first, second = yard.rows[0].event_id, yard.rows[3].event_id
        assert (await yard.request(Action.REDRIVE, Filter(key="truck-2"), first, second)).requested == 1
        (entry,) = await yard.trail()
        assert entry.target == f"events {first}, {second}; key truck-2"
        run = await yard.request(Action.REDRIVE, None, first)
        assert run.requested == 1
        assert (await yard.trail())[0].event_id == first

    async def test_by_age(self, yard: Yard) -> None:
        await yard.kill(*yard.rows)
        await yard.written(yard.rows[4], ago=timedelta(hours=3))
        await yard.request(Action.REDRIVE, Filter(older_than=7_200.0))
        assert await yard.requested() == [(yard.rows[4].id, "redrive")]

    async def test_h89_what_waits_to_be_done_is_not_asked_for_again(self, yard: Yard) -> None:
        await yard.kill(*yard.rows)
        first = await yard.request(Action.REDRIVE, limit=2)
        second = await yard.request(Action.REDRIVE, author=BEN)
        assert (first.requested, second.requested) == (2, 4)
        assert await yard.request(Action.REDRIVE, author=BEN) == Run()
        assert (await yard.request(Action.DISCARD, author=BEN)).requested == 6
        selection = Selection(Action.REDRIVE, Filter())
        assert await yard.ask(lambda it: operations.count(it, selection)) == (0, 6)
        assert len(await yard.trail()) == 3

    async def test_h89_two_people_ask_at_the_same_time(self, yard: Yard, database: Database) -> None:
        await yard.kill(*yard.rows)
        selection = Selection(Action.REDRIVE, Filter(Status.FAILED))
        async with yard.engine.begin() as connection:
            mine = await connection.run_sync(operations.request, selection, ANNA, Run(), 100)
            theirs = asyncio.create_task(yard.request(Action.REDRIVE, selection.wanted, author=BEN))
            if database.is_postgres:
                await until_somebody_waits(yard.box)
        assert (mine.requested, await theirs) == (6, Run())
        assert len(await yard.requested()) == 6
        assert [entry.who for entry in await yard.trail()] == ["anna@office"]

    async def test_says_which_routes_nobody_serves(self, yard: Yard) -> None:
        await yard.kill(yard.rows[0])
        run = await yard.request(Action.REDRIVE)
        assert await yard.ask(lambda it: operations.unserved_requests(it, run)) == [ROUTE]
        shard = shard_of(yard, yard.rows[0])
        await yard.alive("elsewhere", shards=f"[{(shard + 1) % 16}]")
        assert await yard.ask(lambda it: operations.unserved_requests(it, run)) == [ROUTE]
        await yard.alive("here", shards=f"[{shard}]")
        assert await yard.ask(lambda it: operations.unserved_requests(it, run)) == []

    async def test_the_owner_does_it(self, yard: Yard) -> None:
        await yard.kill(yard.rows[3], yard.rows[4])
        await yard.request(Action.REDRIVE, Filter(key="truck-2"))
        await yard.request(Action.DISCARD, Filter(key="truck-3"))
        await yard.carry_out()
        assert await yard.requested() == []
        found = await yard.ask(lambda it: inspection.deliveries(it, Filter(), after=0, limit=100))
        assert (found[3].status, found[3].attempts) == (Status.RETRYING, 0)
        assert found[4].status is Status.DISCARDED


class TestEdits:
    async def test_the_trail_keeps_the_old_body(self, yard: Yard) -> None:
        await yard.kill(yard.rows[3])
        entry, new_id = await self.edit(yard)
        (kept,) = await yard.trail()
        assert (kept.id, kept.action, kept.event_id) == (entry, "edit", yard.rows[3].event_id)
        assert kept.details["new_event_id"] == str(new_id)
        assert base64.b64decode(kept.details["old_body"]) == b"{}"
        assert await self.edit(yard) == (None, None)

        await yard.carry_out()
        (edited,) = await yard.ask(lambda it: inspection.deliveries_of(it, new_id or uuid4(), payload=True))
        assert (edited.id, edited.payload, edited.status) == (yard.rows[3].id, '{"door":1}', Status.RETRYING)
        assert edited.headers["original_event_id"] == str(yard.rows[3].event_id)

    async def test_who_asks_for_the_old_event_is_led_to_the_new_one(self, yard: Yard) -> None:
        await yard.kill(yard.rows[3])
        _, new_id = await self.edit(yard)
        assert new_id is not None
        await yard.held()
        assert (await yard.why(yard.rows[3])).cause == "request-waiting"
        await yard.lane(locked_until=from_now(-1))
        await yard.carry_out()
        answer = await yard.why(yard.rows[3])
        assert (answer.cause, answer.route, answer.state) == ("edited", ROUTE, None)
        assert str(new_id) in answer.detail
        old = yard.rows[3].event_id
        for command in (
            lambda it: outbox_command._deliveries_of(it, old),
            lambda it: outbox_command._editable(it, old, None),
            lambda it: outbox_command._look(it, Selection(Action.DISCARD, Filter(), (old,)), None),
        ):
            with pytest.raises(CommandError, match=f"event {old}, {ROUTE}: edited by .*: it goes on as event {new_id}"):
                await yard.ask(command)
        for event in (old, new_id):
            told = [step.what for step in await yard.ask(lambda it, event=event: life(it, event))]  # type: ignore[misc]
            assert told[:3] == ["raised", "written", "edit asked for by anna@office"]

    async def edit(self, yard: Yard) -> tuple[int | None, UUID | None]:
        new_id = uuid4()

        def edit(connection: Connection) -> int | None:
            (delivery,) = inspection.deliveries_of(connection, yard.rows[3].event_id, payload=False)
            old = inspection.body_of(connection, delivery)
            return operations.edit(connection, delivery, ANNA, old=old, new=b'{"door":1}', event_id=new_id)

        entry = await yard.ask(edit)
        return (entry, new_id) if entry else (None, None)


class TestLanes:
    async def test_names(self, yard: Yard) -> None:
        async def find(name: str) -> Lanes:
            return await yard.ask(lambda it: operations.find_lanes(it, name))

        assert await find(ROUTE) == Lanes(ROUTE)
        assert await find(f"{ROUTE}/3") == Lanes(ROUTE, 3)
        for absent in ("nothing", f"{ROUTE}/16", f"{ROUTE}/x", f"{ROUTE}/", "/3", ROUTE.upper()):
            with pytest.raises(StoreError, match=r"there is no route|has no lane"):
                await find(absent)

    async def test_pause_and_resume(self, yard: Yard) -> None:
        assert await yard.do(Handle.PAUSE, Lanes(ROUTE, 3)) == (1, 1)
        assert await yard.do(Handle.PAUSE, Lanes(ROUTE)) == (15, 2)
        assert await yard.do(Handle.PAUSE, Lanes(ROUTE)) == (0, None)
        assert await yard.take() == []
        assert await yard.do(Handle.RESUME, Lanes(ROUTE)) == (16, 3)
        assert len(await yard.take()) == 16
        assert [entry.target for entry in await yard.trail()] == [f"route {ROUTE}", f"route {ROUTE}", f"lane {ROUTE}/3"]

    async def test_rates(self, yard: Yard) -> None:
        assert (await yard.do(Handle.RATE, Lanes(ROUTE), 2.5))[0] == 16
        assert await yard.do(Handle.RATE, Lanes(ROUTE), 2.5) == (0, None)
        assert (await yard.do(Handle.RATE, Lanes(ROUTE, 0), 5.0))[0] == 1
        census = await yard.store.census()
        assert sorted(census.lane_rates.values()) == [2.5] * 15 + [5.0]
        assert (await yard.do(Handle.RATE, Lanes(ROUTE), None))[0] == 16
        assert (await yard.store.census()).lane_rates == {}
        for strange in (math.inf, math.nan, 0.0, -1.0):
            with pytest.raises(StoreError, match="a rate is a number above 0"):
                await yard.do(Handle.RATE, Lanes(ROUTE), strange)
        await yard.lane(rate=-1.0)  # somebody else has written it
        assert (await yard.store.census()).lane_rates == {}
        assert [entry.details["rate"] for entry in await yard.trail()] == [None, 5.0, 2.5]

    async def test_tenants_are_told_apart_byte_by_byte(self, yard: Yard) -> None:
        assert await yard.do(Handle.RESUME, Tenant("acme")) == (0, None)
        for tenant in ("acme", "Acme", "acme "):
            assert (await yard.do(Handle.PAUSE, Tenant(tenant)))[0] == 1
        assert (await yard.do(Handle.RATE, Tenant("acme"), 1.0))[0] == 1
        assert (await yard.do(Handle.RESUME, Tenant("Acme")))[0] == 1
        census = await yard.store.census()
        assert census.paused_tenants == {"acme", "acme "}
        assert census.tenant_rates == {"acme": 1.0}
        assert await yard.do(Handle.PAUSE, Tenant("acme")) == (0, None)

    async def test_a_lane_that_was_taken_away_changes_nothing_any_more(self, yard: Yard) -> None:
        held = {lane.shard: lane for lane in await yard.take()}
        shard = shard_of(yard, yard.rows[0])
        await yard.lane(trouble="it hangs")
        assert await yard.ask(lambda it: operations.affected(it, Change(Handle.RELEASE, Lanes(ROUTE, shard)))) == 1
        assert (await yard.do(Handle.RELEASE, Lanes(ROUTE, shard)))[0] == 1
        assert await yard.do(Handle.RELEASE, Lanes(ROUTE, shard)) == (0, None)
        with pytest.raises(LeaseLostError):
            await yard.store.announce(held[shard], Batch(items=[yard.rows[0].id]), settle=False)
        (again,) = await yard.store.take("relay-2", lease=60, wanted={ROUTE_ID: 16})
        assert (again.shard, again.epoch) == (shard, held[shard].epoch + 2)
        (state,) = await yard.ask(lambda it: overview.lane_states(it, ROUTE, shard))
        assert (state.owner, state.trouble) == ("relay-2", None)

    async def test_what_a_list_shows(self, yard: Yard) -> None:
        first, *_, last = yard.rows
        await yard.written(first, ago=timedelta(seconds=600))
        await yard.kill(last)
        await yard.held()
        await yard.lane(rate=3.0, trouble="no route to host", trouble_until=from_now(30))
        states = {each.shard: each for each in await yard.ask(overview.lane_states)}
        assert len(states) == 16
        assert sum(each.pending for each in states.values()) == 5
        state = states[shard_of(yard, first)]
        assert (state.route, state.destination, state.owner, state.held) == (ROUTE, "broker", "relay-1", True)
        assert 590 < (state.oldest_pending_seconds or 0) < 900
        assert 0 < (state.lease_seconds or 0) <= 60
        assert 0 < (state.trouble_seconds or 0) <= 30
        assert states[shard_of(yard, last)].waiting == 1
        assert await yard.ask(lambda it: overview.lane_states(it, "another")) == []


class TestWhy:
    async def test_nobody_is_there(self, yard: Yard) -> None:
        row = yard.rows[3]
        answer = await yard.why(row)
        assert (answer.event_id, answer.route, answer.state) == (row.event_id, ROUTE, Status.PENDING)
        assert answer.cause == "no-relay"
        assert "needs the destination 'broker'" in answer.detail
        assert "pillarbox relay" in (answer.remedy or "")
        await yard.lane(locked_by="relay-1", locked_until=from_now(-90))
        answer = await yard.why(row)
        assert answer.cause == "lease-expired"
        assert "belongs to relay-1, whose lease has expired 1.5 min ago" in answer.detail
        assert "start a relay" in (answer.remedy or "")
        await yard.alive("relay-2")
        assert (await yard.why(row)).remedy == "relay-2 will take it over"
        await yard.lane(locked_by=None, locked_until=None)
        answer = await yard.why(row)
        assert (answer.cause, (answer.remedy or "").split(";")[0]) == ("lane-free", "relay-2 will take it")

    async def test_a_handler_needs_the_program_that_has_it(self, yard: Yard) -> None:
        async with yard.engine.begin() as connection:
            await connection.execute(update(routes).values(destination="local", topic="depot.note"))
        answer = await yard.why(yard.rows[3])
        assert "needs the handler 'depot.note'" in answer.detail
        assert "pillarbox relay MODULE:BOX" in (answer.remedy or "")

    async def test_somebody_paused_it(self, yard: Yard) -> None:
        row = yard.rows[3]
        await yard.held()
        await yard.ask(lambda it: operations.apply(it, Change(Handle.PAUSE, Tenant("acme")), ANNA))
        answer = await yard.why(row)
        assert answer.cause == "tenant-paused"
        assert "tenant acme was paused by anna@office at 20" in answer.detail
        assert ANNA.reason in answer.detail  # type: ignore[operator]
        await yard.do(Handle.PAUSE, Tenant("ACME"))
        assert "anna@office" in (await yard.why(row)).detail
        await yard.do(Handle.PAUSE, Lanes(ROUTE))
        answer = await yard.why(row)
        assert answer.cause == "lane-paused"
        assert "was paused by ben@office at 20" in answer.detail
        assert answer.remedy == f"`pillarbox lanes resume {ROUTE}`"
        await yard.do(Handle.RESUME, Lanes(ROUTE))
        await yard.do(Handle.PAUSE, Lanes(ROUTE, shard_of(yard, row)))
        assert (await yard.why(row)).remedy == f"`pillarbox lanes resume {ROUTE}/{shard_of(yard, row)}`"
        async with yard.engine.begin() as connection:
            await connection.execute(delete(audit))
        assert "the trail does not say by whom" in (await yard.why(row)).detail

    async def test_the_destination_is_in_trouble(self, yard: Yard) -> None:
        await yard.held()
        await yard.lane(trouble="connection refused", trouble_until=from_now(30))
        for status in (Status.PENDING, Status.SENDING, Status.RETRYING):
            await yard.put(yard.rows[3], status=status)
            answer = await yard.why(yard.rows[3])
            assert (answer.cause, answer.state) == ("destination-trouble", status)
            assert "connection refused; it tries again in " in answer.detail
        await yard.lane(trouble="the batch has other rows", trouble_until=None)
        answer = await yard.why(yard.rows[3])
        assert answer.cause == "lane-halted"
        assert "pillarbox lanes release" in (answer.remedy or "")

    async def test_its_lane_fails_again_and_again(self, yard: Yard) -> None:
        await yard.held()
        for times, state in (("", State.WARNING), (" 3 times in a row", State.PROBLEM)):
            trouble = f"the lane failed{times}: TypeError: odd"
            await yard.lane(trouble=trouble, trouble_until=from_now(0))
            answer = await yard.why(yard.rows[3])
            assert f"{trouble}; it is trying again" in answer.detail
            assert "it is a bug: the log of the relay has the traceback" in (answer.remedy or "")
            (check,) = await yard.ask(lambda it: [*_troubled(overview.lane_states(it, ROUTE))])
            assert check.state is state
            assert trouble in check.found

    async def test_it_is_on_its_way(self, yard: Yard) -> None:
        row = yard.rows[2]
        await yard.held()
        answer = await yard.why(row)
        assert (answer.cause, answer.remedy) == ("backlog", None)
        assert re_number(answer.detail) >= 2
        await yard.lane(rate=2.0)
        answer = await yard.why(row)
        assert answer.cause == "rate-limited"
        assert "is held to 2 per second" in answer.detail
        await yard.lane(rate=None, tries=1)
        await yard.do(Handle.RATE, Tenant("acme"), 0.5)
        assert "tenant acme is held to 0.5 per second" in (await yard.why(row)).detail
        await yard.announced(row, batch=7)
        answer = await yard.why(row)
        assert answer.cause == "sending"
        assert answer.detail == "relay-1 is sending it: batch 7, after 1 owner that did not finish"
        await yard.lane(paused=True)
        assert (await yard.why(row)).cause == "sending"
        await yard.put(row, status=Status.SENT, sent_at=datetime(2024, 5, 1, 12, tzinfo=UTC), batch=7, number=12)
        answer = await yard.why(row)
        assert (answer.cause, answer.remedy) == ("sent", None)
        assert answer.detail == "sent at 2024-05-01T12:00:00.000Z, batch 7, number 12"

    async def test_it_was_refused(self, yard: Yard) -> None:
        first, second, *_ = yard.rows
        await yard.held()
        later = datetime.now(UTC) + timedelta(hours=1)
        await yard.put(first, status=Status.RETRYING, attempts=2, last_error="too long", available_at=later)
        answer = await yard.why(first)
        assert answer.cause == "retrying"
        assert "after 2 of 5 attempts: too long" in answer.detail
        for status in (Status.PENDING, Status.PARKED):
            await yard.put(second, status=status)
            answer = await yard.why(second)
            assert answer.cause == "parked"
            assert f"behind event {first.event_id} of the same key, which is next attempt at" in answer.detail
        await yard.kill(first)
        answer = await yard.why(first)
        assert (answer.cause, answer.detail) == ("failed", "failed after 5 attempts: too long")
        assert f"pillarbox outbox redrive {first.event_id}" in (answer.remedy or "")
        answer = await yard.why(second)
        assert answer.cause == "parked"
        assert "which failed after 5 attempts: too long" in answer.detail
        assert f"pillarbox outbox redrive {first.event_id}" in (answer.remedy or "")
        async with yard.engine.begin() as connection:
            await connection.execute(update(routes).values(on_failure=FailurePolicy.SKIP))
        await yard.put(second, status=Status.PENDING)
        assert (await yard.why(second)).cause == "backlog"

    async def test_it_is_behind_one_that_was_edited_and_failed_again(self, yard: Yard) -> None:
        first, second, *_ = yard.rows
        await yard.held()
        new = uuid4()
        await yard.put(first, status=Status.RETRYING, attempts=1, last_error="too long", event_id=new)
        await yard.put(second, status=Status.PARKED)
        answer = await yard.why(second)
        assert answer.cause == "parked"
        assert f"behind event {new} of the same key" in answer.detail

    async def test_somebody_asked_for_something(self, yard: Yard) -> None:
        first, second, *_ = yard.rows
        await yard.kill(first)
        await yard.put(second, status=Status.PARKED)
        await yard.request(Action.REDRIVE)
        assert (await yard.why(first)).cause == "no-relay"
        await yard.held()
        answer = await yard.why(first)
        assert answer.cause == "request-waiting"
        assert "anna@office asked for its redrive at 20" in answer.detail
        assert (await yard.why(second)).cause == "parked"

    async def test_somebody_discarded_it(self, yard: Yard) -> None:
        await yard.kill(*yard.rows)
        named, chosen, untold = yard.rows[3:]
        await yard.request(Action.DISCARD, None, named.event_id)
        await yard.request(Action.DISCARD, Filter(key="truck-3"), author=BEN)
        await yard.carry_out()
        await yard.put(untold, status=Status.DISCARDED)
        assert "discarded by anna@office at 20" in (await yard.why(named)).detail
        assert "discarded by ben@office at 20" in (await yard.why(chosen)).detail
        assert (await yard.why(untold)).detail == "the trail does not say by whom"

    async def test_it_is_not_there(self, yard: Yard) -> None:
        (answer,) = await yard.ask(lambda it: explain(it, uuid4()))
        assert (answer.cause, answer.route, answer.state) == ("absent", None, None)
        async with yard.engine.begin() as connection:
            await connection.execute(delete(lanes))
        assert (await yard.why(yard.rows[0])).cause == "no-lane"
        async with yard.engine.begin() as connection:
            await connection.execute(delete(routes))
        (answer,) = await yard.ask(lambda it: explain(it, yard.rows[0].event_id))
        assert (answer.cause, answer.route) == ("no-lane", None)


def re_number(detail: str) -> int:
    """How many deliveries go first."""
    return int(detail.split(", and ")[1].split(maxsplit=1)[0])


class TestTrace:
    async def test_a_life(self, yard: Yard) -> None:
        row = yard.rows[3]
        later = datetime.now(UTC) + timedelta(hours=1)
        await yard.put(row, status=Status.RETRYING, attempts=2, last_error="too long", available_at=later)
        await yard.request(Action.REDRIVE, Filter(key="truck-2"))
        steps = await yard.ask(lambda it: life(it, row.event_id))
        assert [step.what for step in steps] == [
            "raised",
            "written",
            "redrive asked for by anna@office",
            "refused 2 times",
            "retrying",
            "redrive waits",
            "next attempt",
        ]
        assert {(step.route, step.event_id) for step in steps} == {(ROUTE, row.event_id)}
        assert steps[3].detail == "too long"
        assert [step.at is None for step in steps] == [False, False, False, True, True, True, False]

    async def test_how_it_ended(self, yard: Yard) -> None:
        sent, sending, discarded = yard.rows[3:]
        await yard.put(sent, status=Status.SENT, sent_at=datetime.now(UTC), batch=4, number=9)
        steps = await yard.ask(lambda it: life(it, sent.event_id))
        assert [(step.what, step.detail) for step in steps[2:]] == [("sent", "batch 4, number 9")]
        await yard.held()
        await yard.announced(sending, batch=5)
        steps = await yard.ask(lambda it: life(it, sending.event_id))
        assert (steps[2].what, steps[2].detail) == ("being sent", "batch 5, by relay-1")
        await yard.lane(locked_by=None, locked_until=None, announced=None)
        await yard.request(Action.DISCARD, Filter(key=discarded.key), author=BEN)
        await yard.carry_out()
        steps = await yard.ask(lambda it: life(it, discarded.event_id))
        assert [step.what for step in steps[2:]] == ["discard asked for by ben@office", "discarded"]
        assert await yard.ask(lambda it: life(it, uuid4())) == []
