"""What becomes of a delivery that has come in, and of the claim of its message: both in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from uuid import UUID, uuid4

import pytest
from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox import clock
from pillarbox.outbox import (
    INBOUND,
    INBOX_DESTINATION,
    Batch,
    Delivery,
    Direction,
    Failure,
    FailurePolicy,
    Lane,
    RouteRecord,
    Status,
)
from pillarbox.stores import inspection, operations, overview, sqlite, store_on
from pillarbox.stores.audit import Author
from pillarbox.stores.inspection import Details, Filter
from pillarbox.stores.migrations import migrate
from pillarbox.stores.operations import Action, Run, Selection
from pillarbox.stores.tables import claims, requests
from tests.conftest import FreshDatabase

SKIPPING = RouteRecord("consumer:billing", INBOX_DESTINATION, "billing", on_failure=FailurePolicy.SKIP)
PARKING = RouteRecord("consumer:ledger", INBOX_DESTINATION, "ledger")
ANNA = Author("anna", "mended")
SHARD = 0


class Inbox:
    """Messages that wait for a consumer, and the relay that has its lane."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.store = store_on(engine, INBOUND)

    async def spill(self, route: RouteRecord, *keys: str) -> list[UUID]:
        """The ids of the events that could not take effect, as their sender knows them."""
        events = [uuid4() for _ in keys]
        rows = [_row(route, key) for key in keys]
        async with self.engine.begin() as connection:
            await connection.run_sync(self.store.register, [route])
            for row, event in zip(rows, events, strict=True):
                claim = {"consumer": 1, "line": 1, "inbox_id": event, "tenant": "", "delivery": row.event_id}
                await connection.execute(insert(claims).values(**claim, gate=True, refused="no"))
            await connection.run_sync(self.store.append, rows)
        return events

    async def take(self, route: RouteRecord) -> Lane:
        (lane,) = await self.store.take("r", lease=30, wanted={route.id: 1}, shards={route.id: [SHARD]})
        return lane

    async def fail(self, lane: Lane) -> Lane:
        """All that comes next is given up."""
        page = await self.store.poll(lane, limit=100)
        failures = [Failure(row.id, 5, "no", None) for row in page.fresh]
        return await self.store.announce(lane, Batch(failures=failures, cursor=page.cursor), settle=False)

    async def ask(self, action: Action, *events: UUID) -> Run:
        async with self.engine.begin() as connection:
            return await connection.run_sync(operations.request, Selection(action, Filter(), events), ANNA, Run(), 100)

    async def carry_out(self, lane: Lane) -> Lane:
        page = await self.store.poll(lane, limit=100)
        assert page.requests
        return await self.store.announce(lane, Batch(requests=page.requests), settle=False)

    async def claims(self) -> dict[UUID, tuple[bool, str | None]]:
        async with self.engine.connect() as connection:
            found = await connection.execute(select(claims.c.inbox_id, claims.c.gate, claims.c.refused))
            return {event: (gate, refused) for event, gate, refused in found}

    async def take_effect(self, *events: UUID) -> None:
        async with self.engine.begin() as connection:
            await connection.execute(delete(claims).where(claims.c.inbox_id.in_(events)))

    async def find(self, event: UUID) -> Details:
        async with self.engine.connect() as connection:
            (found,) = await connection.run_sync(partial(inspection.deliveries_of, event_id=event, payload=True))
            return found

    async def statuses(self, events: Sequence[UUID]) -> list[Status]:
        return [(await self.find(event)).status for event in events]


def _row(route: RouteRecord, key: str) -> Delivery:
    event_id = clock.current().new_id()
    headers = {"event_id": "of the sender", "content_type": "application/json"}
    return Delivery(event_id, "orders.order.placed", route.id, SHARD, 1, "orders", key, "acme", headers, b"{}")


@pytest.fixture(params=["embedded", "mariadb", "sqlite"])
async def inbox(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> AsyncIterator[Inbox]:
    engine = create_async_engine(fresh_database(request.param).url())
    sqlite.configure_transactions(engine.sync_engine)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
    yield Inbox(engine)
    await engine.dispose()


async def test_what_is_given_up_lets_later_messages_pass_if_its_route_says_so(inbox: Inbox) -> None:
    (skipped,) = await inbox.spill(SKIPPING, "a")
    (parked,) = await inbox.spill(PARKING, "a")
    for route in (SKIPPING, PARKING):
        await inbox.fail(await inbox.take(route))
    assert await inbox.claims() == {skipped: (False, "no"), parked: (True, "no")}


async def test_what_waits_behind_what_was_given_up_passes_once_the_route_says_so(inbox: Inbox) -> None:
    (event,) = await inbox.spill(PARKING, "a")
    lane = await inbox.fail(await inbox.take(PARKING))
    await inbox.store.release("r", [lane])
    changed = RouteRecord(PARKING.name, INBOX_DESTINATION, PARKING.topic, on_failure=FailurePolicy.SKIP)
    async with inbox.engine.begin() as connection:
        await connection.run_sync(inbox.store.register, [changed])
    await inbox.take(changed)
    assert await inbox.claims() == {event: (False, "no")}


async def test_a_retry_keeps_the_gate_shut(inbox: Inbox) -> None:
    (event,) = await inbox.spill(SKIPPING, "a")
    lane = await inbox.take(SKIPPING)
    page = await inbox.store.poll(lane, limit=10)
    again = Batch(failures=[Failure(page.fresh[0].id, 1, "not yet", 60.0)], cursor=page.cursor)
    await inbox.store.announce(lane, again, settle=False)
    assert await inbox.claims() == {event: (True, "no")}


async def test_a_redrive_shuts_the_gate_again(inbox: Inbox) -> None:
    event, other = await inbox.spill(SKIPPING, "a", "b")
    lane = await inbox.fail(await inbox.take(SKIPPING))
    assert (await inbox.ask(Action.REDRIVE, event)).requested == 1
    await inbox.carry_out(lane)
    assert await inbox.claims() == {event: (True, None), other: (False, "no")}
    assert await inbox.statuses([event, other]) == [Status.RETRYING, Status.FAILED]


async def test_what_is_discarded_has_no_claim(inbox: Inbox) -> None:
    event, other = await inbox.spill(SKIPPING, "a", "b")
    delivery = await inbox.find(event)
    lane = await inbox.fail(await inbox.take(SKIPPING))
    assert (await inbox.ask(Action.DISCARD, event)).requested == 1
    await inbox.carry_out(lane)
    assert await inbox.claims() == {other: (False, "no")}
    assert await inbox.statuses([delivery.event_id]) == [Status.DISCARDED]


async def test_what_is_edited_stays_the_event_that_it_is(inbox: Inbox) -> None:
    (event,) = await inbox.spill(SKIPPING, "a")
    lane = await inbox.fail(await inbox.take(SKIPPING))
    before = await inbox.find(event)
    async with inbox.engine.begin() as connection:
        edit = partial(operations.edit, old=b"{}", new=b'{"total": 1}', event_id=uuid4())
        assert await connection.run_sync(edit, before, ANNA) is not None
    lane = await inbox.carry_out(lane)
    after = await inbox.find(event)
    assert (after.event_id, after.headers, after.payload) == (before.event_id, before.headers, '{"total": 1}')
    assert await inbox.claims() == {event: (True, None)}
    (row,) = (await inbox.store.poll(lane, limit=10)).redo
    assert (row.event_id, row.body) == (before.event_id, b'{"total": 1}')


async def test_nothing_is_asked_for_what_took_effect(inbox: Inbox) -> None:
    event, other = await inbox.spill(SKIPPING, "a", "b")
    delivery, waiting = await inbox.find(event), await inbox.find(other)
    await inbox.fail(await inbox.take(SKIPPING))
    await inbox.take_effect(event)
    selection = Selection(Action.DISCARD, Filter(), (delivery.event_id, other))
    async with inbox.engine.connect() as connection:
        assert await connection.run_sync(operations.count, selection) == (1, 0)
        left = await connection.run_sync(operations.left_alone, selection)
        assert left == {delivery.event_id: [operations.TOOK_EFFECT], other: []}
        assert await connection.run_sync(inspection.took_effect, delivery)
        assert not await connection.run_sync(inspection.took_effect, waiting)
    assert (await inbox.ask(Action.DISCARD, delivery.event_id, other)).requested == 1


@pytest.mark.parametrize("action", list(Action))
async def test_a_request_for_what_took_effect_meanwhile_only_settles_it(inbox: Inbox, action: Action) -> None:
    (event,) = await inbox.spill(SKIPPING, "a")
    lane = await inbox.fail(await inbox.take(SKIPPING))
    delivery = await inbox.find(event)
    asked = {"route": SKIPPING.id, "shard": SHARD, "row_id": delivery.id, "action": action, "audit": 0}
    async with inbox.engine.begin() as connection:
        await connection.execute(insert(requests).values(**asked, event_id=delivery.event_id, body=b"new"))
    await inbox.take_effect(event)
    lane = await inbox.carry_out(lane)
    page = await inbox.store.poll(lane, limit=10)
    assert [(row.event_id, row.body) for row in page.redo] == [(delivery.event_id, b"{}")]
    batch = Batch([row.id for row in page.redo], cursor=page.cursor)
    await inbox.store.settle(await inbox.store.announce(lane, batch, settle=False))
    assert await inbox.statuses([delivery.event_id]) == [Status.SENT]


async def test_people_see_both_directions(inbox: Inbox) -> None:
    outbox, route = store_on(inbox.engine), RouteRecord("broker:orders", "broker", "orders")
    async with inbox.engine.begin() as connection:
        await connection.run_sync(outbox.register, [route])
        await connection.run_sync(outbox.append, [_row(route, "k") for _ in range(3)])
    await inbox.spill(PARKING, "a", "b")
    async with inbox.engine.connect() as connection:
        listed = partial(inspection.deliveries, after=0, limit=4)
        found = await connection.run_sync(listed, Filter())
        assert [(it.direction, it.id) for it in found] == [
            *((Direction.OUTBOUND, id_) for id_ in (1, 2, 3)),
            (Direction.INBOUND, 1),
        ]
        found = await connection.run_sync(listed, Filter(direction=Direction.INBOUND))
        assert [(it.direction, it.id) for it in found] == [(Direction.INBOUND, 1), (Direction.INBOUND, 2)]
        groups = await connection.run_sync(inspection.statistics)
        assert [(it.direction, it.route, it.count) for it in groups] == [
            (Direction.OUTBOUND, route.name, 3),
            (Direction.INBOUND, PARKING.name, 2),
        ]
        backlog = await connection.run_sync(overview.backlog)
        assert {it.route: it.pending for it in backlog} == {route.name: 3, PARKING.name: 2}
        lanes = await connection.run_sync(partial(overview.lane_states, direction=Direction.INBOUND))
        assert {(it.direction, it.route) for it in lanes} == {(Direction.INBOUND, PARKING.name)}
        assert sum(it.pending for it in lanes) == 2
        unserved = await connection.run_sync(overview.unserved)
        assert [(it.route, it.waiting) for it in unserved] == [(route.name, 3), (PARKING.name, 2)]


async def test_requests_about_rows_of_two_tables_with_one_id_are_told_apart(inbox: Inbox) -> None:
    outbox, route = store_on(inbox.engine), RouteRecord("broker:orders", "broker", "orders")
    async with inbox.engine.begin() as connection:
        await connection.run_sync(outbox.register, [route])
        await connection.run_sync(outbox.append, [_row(route, "k")])
    await inbox.spill(PARKING, "a")
    everything = Selection(Action.DISCARD, Filter())
    outbound = Selection(Action.DISCARD, Filter(direction=Direction.OUTBOUND))
    async with inbox.engine.begin() as connection:
        run = await connection.run_sync(operations.request, outbound, ANNA, Run(), 10)
        assert (run.requested, run.rows) == (1, {Direction.OUTBOUND: (1, 1)})
        assert await connection.run_sync(operations.count, everything) == (1, 1)
        (left,) = await connection.run_sync(operations.sample, everything, 10)
        assert left.direction is Direction.INBOUND
        run = await connection.run_sync(operations.request, everything, ANNA, Run(), 10)
        assert (run.requested, run.rows) == (1, {Direction.INBOUND: (1, 1)})
        asked = [await connection.run_sync(inspection.open_requests, it) for it in (left,)]
        assert [len(it) for it in asked] == [1]


@pytest.mark.parametrize("action", [Action.DISCARD, Action.REDRIVE])
async def test_a_request_waits_for_its_message_to_take_effect_and_its_lane_does_not(
    inbox: Inbox, action: Action
) -> None:
    if inbox.engine.dialect.name == "sqlite":
        pytest.skip("there is one writer at a time")
    (event,) = await inbox.spill(SKIPPING, "a")
    lane = await inbox.fail(await inbox.take(SKIPPING))
    delivery = await inbox.find(event)
    await inbox.ask(action, event)
    async with inbox.engine.connect() as effect:
        await effect.execute(delete(claims).where(claims.c.inbox_id == event))
        assert (await inbox.store.poll(lane, limit=100)).requests == ()
        await effect.commit()
    await inbox.carry_out(lane)
    assert await inbox.statuses([delivery.event_id]) == [Status.RETRYING]


@pytest.mark.parametrize("action", [Action.DISCARD, Action.REDRIVE])
async def test_an_effect_that_began_since_is_waited_for(inbox: Inbox, action: Action) -> None:
    if inbox.engine.dialect.name == "sqlite":
        pytest.skip("there is one writer at a time")
    (event,) = await inbox.spill(SKIPPING, "a")
    lane = await inbox.fail(await inbox.take(SKIPPING))
    delivery = await inbox.find(event)
    await inbox.ask(action, event)
    page = await inbox.store.poll(lane, limit=100)
    async with inbox.engine.connect() as effect:
        await effect.execute(delete(claims).where(claims.c.inbox_id == event))
        announcing = asyncio.create_task(inbox.store.announce(lane, Batch(requests=page.requests), settle=False))
        await asyncio.wait([announcing], timeout=0.5)
        assert not announcing.done()
        await effect.commit()
    await announcing
    assert await inbox.statuses([delivery.event_id]) == [Status.RETRYING]
