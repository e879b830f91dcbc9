"""Handlers in this process: durable ones after the commit, and those that belong to the transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import create_engine, func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from pillarbox import Event, MessageContext, Pillarbox, Reject, UnitOfWork
from pillarbox.context import current_context
from pillarbox.errors import ConfigurationError, SessionError
from pillarbox.leased_lane import LeasedLane
from pillarbox.stores.inbox import ConsumerRecord, consumers
from pillarbox.transports.memory import MemoryTransport
from tests.conftest import FreshDatabase
from tests.domain import (
    DiscountConsidered,
    Line,
    Order,
    OrderNoted,
    OrderPlaced,
    OrderRepriced,
    make_due,
    order_box,
    set_up,
    written,
)
from tests.relays import running, until
from tests.servers import Database


@pytest.fixture(params=["embedded", pytest.param("mariadb", marks=pytest.mark.elsewhere)])
async def box(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> AsyncIterator[Pillarbox]:
    async for made in _box(fresh_database(request.param).url()):
        yield made


@pytest.fixture
async def sqlite_box(sqlite_database: Database) -> AsyncIterator[Pillarbox]:
    async for made in _box(sqlite_database.url()):
        yield made


async def _box(url: str) -> AsyncIterator[Pillarbox]:
    engine = create_async_engine(url)
    async with order_box(engine) as box:
        await set_up(box)
        yield box
    await engine.dispose()


async def place(box: Pillarbox, *, tenant: str | None = None) -> UUID:
    async with box.unit_of_work(tenant=tenant) as uow:
        order = Order.place(order_id=uuid4())
        uow.add(order)
    return order.id


def sent(box: Pillarbox) -> list[Mapping[str, str]]:
    """The headers of what the broker has."""
    broker = box.transports["broker"]
    assert isinstance(broker, MemoryTransport)
    return [message.headers for message in broker.sent("tests.order.events")]


class TestAfterTheCommit:
    async def test_r2_async_and_plain_handlers_get_the_event(self, box: Pillarbox) -> None:
        seen: list[tuple[str, Event]] = []

        @box.subscribe(OrderPlaced)
        async def waits(event: OrderPlaced) -> None:
            seen.append(("waits", event))

        @box.subscribe(OrderPlaced)
        def blocks(event: OrderPlaced) -> None:
            seen.append(("blocks", event))

        order = await place(box)
        done = await box.relay().drain()
        assert done.sent == 3  # the broker is a destination, too
        assert sorted(name for name, _ in seen) == ["blocks", "waits"]
        assert {event.order_id for _, event in seen if isinstance(event, OrderPlaced)} == {order}

    async def test_a_handler_that_fails_is_tried_again_alone(self, box: Pillarbox) -> None:
        good: list[Event] = []
        bad: list[Event] = []
        fails = True

        @box.subscribe(OrderPlaced, name="good")
        async def remember(event: OrderPlaced) -> None:
            good.append(event)

        @box.subscribe(OrderPlaced, name="bad")
        async def fail(event: OrderPlaced) -> None:
            if fails:
                raise ValueError("not yet")
            bad.append(event)

        await place(box)
        await box.relay().drain()
        statuses = dict(await written(box.engine, "topic", "status"))
        assert (statuses["good"], statuses["bad"]) == ("SENT", "RETRYING")
        fails = False
        await make_due(box.engine)
        await box.relay().drain()
        assert (len(good), len(bad)) == (1, 1)

    async def test_drain_goes_on_while_handlers_raise_events(self, box: Pillarbox) -> None:
        @box.subscribe(OrderPlaced)
        async def note(event: OrderPlaced) -> None:
            async with box.unit_of_work() as uow:
                (await uow.session.get_one(Order, event.order_id)).reprice(7)

        noted: list[Event] = []

        @box.subscribe(OrderRepriced)
        async def remember(event: OrderRepriced) -> None:
            noted.append(event)

        await place(box)
        done = await box.relay().drain()
        assert (done.sent, len(noted)) == (4, 1)

    async def test_an_event_that_stays_in_the_process_is_handled_here(self, sqlite_box: Pillarbox) -> None:
        seen: list[Event] = []

        @sqlite_box.subscribe(DiscountConsidered)
        async def remember(event: DiscountConsidered) -> None:
            seen.append(event)

        async with sqlite_box.unit_of_work() as uow:
            order = Order.place(order_id=uuid4())
            order.raise_event(DiscountConsidered(order_id=order.id))
            uow.add(order)
        await sqlite_box.relay().drain()
        assert [headers["event_type"] for headers in sent(sqlite_box)] == ["tests.order.placed"]
        assert len(seen) == 1

    async def test_h12_nothing_runs_for_a_transaction_that_was_rolled_back(self, sqlite_box: Pillarbox) -> None:
        @sqlite_box.subscribe(OrderPlaced)
        async def never(_event: OrderPlaced) -> None:
            raise AssertionError

        with pytest.raises(RuntimeError):
            async with sqlite_box.unit_of_work() as uow:
                uow.add(Order.place())
                raise RuntimeError("changed its mind")
        assert (await sqlite_box.relay().drain()).total == 0

    async def test_w6_what_a_handler_raises_knows_its_cause_and_its_tenant(self, sqlite_box: Pillarbox) -> None:
        box = sqlite_box

        @box.subscribe(OrderPlaced)
        async def reprice(event: OrderPlaced) -> None:
            assert current_context().tenant == "acme"
            async with box.unit_of_work() as uow:
                (await uow.session.get_one(Order, event.order_id)).reprice(7)

        await place(box, tenant="acme")
        await box.relay().drain()
        placed, repriced = sent(box)
        assert repriced["causation_id"] == repriced["correlation_id"] == placed["event_id"]
        assert repriced["tenant_id"] == "acme"

    async def test_h114_a_handler_that_is_gone_leaves_its_deliveries_waiting(self, sqlite_box: Pillarbox) -> None:
        box = sqlite_box

        @box.subscribe(OrderPlaced, name="moved elsewhere")
        async def handle(_event: OrderPlaced) -> None:
            """Is not there any more."""

        await place(box)
        gone = box.handlers.pop("moved elsewhere")
        await box.relay().drain()
        assert dict(await written(box.engine, "topic", "status"))["moved elsewhere"] == "PENDING"
        box.handlers["moved elsewhere"] = gone
        assert (await box.relay().drain()).sent == 1

    async def test_a_running_relay_calls_handlers_at_once(self, sqlite_box: Pillarbox) -> None:
        called = asyncio.Event()

        @sqlite_box.subscribe(OrderPlaced)
        async def handle(_event: OrderPlaced) -> None:
            called.set()

        async with running(sqlite_box.relay()):
            await place(sqlite_box)
            async with asyncio.timeout(10):
                await called.wait()

    async def test_two_handlers_of_one_name_are_refused(self, sqlite_box: Pillarbox) -> None:
        def subscribe() -> None:
            @sqlite_box.subscribe(OrderPlaced, name="same")
            def handle(_event: OrderPlaced) -> None: ...

        subscribe()
        with pytest.raises(ConfigurationError, match="same"):
            subscribe()

    async def test_subscribing_to_nothing_is_refused(self, sqlite_box: Pillarbox) -> None:
        with pytest.raises(ConfigurationError, match="at least one event type"):
            sqlite_box.subscribe()

    async def test_h34_what_it_does_in_its_unit_of_work_takes_effect_once(
        self, box: Pillarbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[Event] = []

        @box.subscribe(OrderPlaced, name="gifts")
        async def add_line(event: OrderPlaced, uow: UnitOfWork, context: MessageContext) -> None:
            assert (context.consumer, context.tenant) == ("gifts", "acme")
            calls.append(event)
            uow.add(Line(order_id=event.order_id, article="gift"))

        await place(box, tenant="acme")
        with monkeypatch.context() as patch:  # the process dies after the effect, before it is noted
            patch.setattr(LeasedLane, "settle", _die)
            await box.relay().run_once()
        assert dict(await written(box.engine, "topic", "status"))["gifts"] == "SENDING"
        assert (await box.relay().drain()).sent == 2  # it comes again, as to the broker
        assert await _count(box.engine, Line) == len(calls) == 1
        assert box.handlers["gifts"]._report.tally.duplicates == 1

    async def test_h43_one_that_is_refused_is_a_dead_letter_and_its_key_goes_on(self, box: Pillarbox) -> None:
        seen: list[int] = []

        @box.subscribe(OrderRepriced, name="prices")
        async def see(event: OrderRepriced) -> None:
            if event.total_cents == 1:
                raise Reject("too cheap")
            seen.append(event.total_cents)

        await place(box)
        async with box.unit_of_work() as uow:
            for cents in (1, 2):
                uow.publish(OrderRepriced(order_id=uuid4(), total_cents=cents), key="k")
        await box.relay().drain()
        assert seen == [2]
        [letter] = [letter async for letter in box.dead_letters(consumer="prices")]
        assert (letter.reason, letter.attempts) == ("too cheap", 1)

    async def test_what_fails_for_now_is_retried_without_an_attempt(self, box: Pillarbox) -> None:
        away = True

        @box.subscribe(OrderPlaced, name="mails")
        async def send(_event: OrderPlaced) -> None:
            if away:
                raise ConnectionError("no mail server")

        await place(box)
        await box.relay().drain()
        assert ("mails", "RETRYING", 0) in await written(box.engine, "topic", "status", "attempts")
        away = False
        await make_due(box.engine)
        assert (await box.relay().drain()).sent == 1

    async def test_a_drain_waits_for_one_that_takes_long(
        self, sqlite_box: Pillarbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pillarbox.consumers.lanes.SLOW", 0.01)
        done: list[Event] = []

        @sqlite_box.subscribe(OrderPlaced)
        async def dawdle(event: OrderPlaced) -> None:
            await asyncio.sleep(0.05)
            done.append(event)

        await place(sqlite_box)
        await sqlite_box.relay().drain()
        assert len(done) == 1

    async def test_a_relay_that_stops_lets_it_finish(self, box: Pillarbox, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pillarbox.consumers.lanes.SLOW", 0.01)
        begun, go = asyncio.Event(), asyncio.Event()
        calls: list[Event] = []

        @box.subscribe(OrderPlaced, name="slow")
        async def dawdle(event: OrderPlaced, uow: UnitOfWork) -> None:
            calls.append(event)
            begun.set()
            await go.wait()
            uow.add(Line(order_id=event.order_id, article="gift"))

        await place(box)
        relay = box.relay()
        task = asyncio.ensure_future(relay.run())
        async with asyncio.timeout(20):
            await begun.wait()
            while dict(await written(box.engine, "topic", "status"))["slow"] != "RETRYING":  # noqa: ASYNC110  nobody rings
                await asyncio.sleep(0.01)  # the lane does not wait for it
            relay.stop()
            await until(lambda: not relay.status()["lanes"])
            go.set()
            await task
        assert await _count(box.engine, Line) == 1
        await make_due(box.engine)
        await box.relay().drain()
        assert (len(calls), box.handlers["slow"]._report.tally.duplicates) == (1, 1)

    async def test_a_relay_may_start_before_the_tables_are_made(self, sqlite_database: Database) -> None:
        engine = create_async_engine(f"{sqlite_database.url()}.new")
        called = asyncio.Event()
        async with order_box(engine) as box:

            @box.subscribe(OrderPlaced, name="early")
            async def handle(_event: OrderPlaced) -> None:
                called.set()

            async with running(box.relay()), asyncio.timeout(20):
                await asyncio.sleep(0)
                await set_up(box)
                await place(box)
                await called.wait()
                while not (found := await _consumers(box)):  # noqa: ASYNC110  nobody rings
                    await asyncio.sleep(0.01)
        assert [it.name for it in found] == ["early"]
        await engine.dispose()

    @pytest.mark.parametrize("drained", [True, False])
    async def test_it_is_listed_with_what_it_has_handled(self, box: Pillarbox, *, drained: bool) -> None:
        called = asyncio.Event()

        @box.subscribe(OrderPlaced, name="count")
        def count(_event: OrderPlaced) -> None:
            loop.call_soon_threadsafe(called.set)

        loop = asyncio.get_running_loop()
        await place(box)
        if drained:
            await box.relay().drain()
        else:
            async with running(box.relay()), asyncio.timeout(10):
                await called.wait()
        [found] = await _consumers(box)
        assert (found.name, found.kind, found.source, found.handled) == ("count", "handlers", "outbox", 1)
        assert not box.handlers["count"].alive
        assert not box.consumers

    async def test_several_relays_of_a_box_share_its_handlers(self, box: Pillarbox) -> None:
        seen: list[Event] = []
        all_of_them = asyncio.Event()

        @box.subscribe(OrderPlaced)
        async def remember(event: OrderPlaced) -> None:
            seen.append(event)
            if len(seen) == 40:
                all_of_them.set()

        async with running(box.relay(), box.relay()):
            for _ in range(40):
                await place(box)
            await box.relay().drain()
            async with asyncio.timeout(20):
                await all_of_them.wait()
        assert (await box.relay().drain()).sent == 0
        assert len({event.event_id for event in seen}) == len(seen) == 40

    async def test_handlers_work_on_a_sqlite_in_memory(self) -> None:
        engine = create_async_engine("sqlite+aiosqlite://")
        async with order_box(engine) as box:
            await set_up(box)

            @box.subscribe(OrderPlaced)
            async def reprice(event: OrderPlaced, session: AsyncSession) -> None:
                (await session.get_one(Order, event.order_id)).reprice(7)

            @box.subscribe(OrderPlaced)
            async def add_line(event: OrderPlaced) -> None:
                async with box.unit_of_work() as uow:
                    uow.add(Line(order_id=event.order_id, article="gift"))

            for _ in range(20):
                await place(box)
            assert (await box.relay().drain()).sent == 20 * 4
            assert await _count(engine, Line) == 20
        await engine.dispose()


async def _consumers(box: Pillarbox) -> list[ConsumerRecord]:
    async with box.engine.connect() as connection:
        return await connection.run_sync(consumers)


async def _die(_lane: LeasedLane) -> None:
    raise ConnectionError("the process has died")


class TestBeforeTheCommit:
    async def test_r2_what_it_does_and_raises_commits_with_the_transaction(self, box: Pillarbox) -> None:
        @box.subscribe(OrderPlaced, before_commit=True)
        def add_line(event: OrderPlaced, session: Session) -> None:
            session.add(Line(order_id=event.order_id, article="gift"))

        @box.subscribe(OrderPlaced, before_commit=True)
        async def add_another(event: OrderPlaced, session: AsyncSession) -> None:
            assert await session.scalar(select(func.count()).select_from(Line)) == 0
            session.add(Line(order_id=event.order_id, article="card"))
            box.publish(session, OrderNoted(note="with a gift"), key=event.order_id)

        order = await place(box)
        assert await written(box.engine) == ["placed", "noted"]
        async with AsyncSession(box.engine) as session:
            articles = await session.scalars(select(Line.article).where(Line.order_id == order))
            assert sorted(articles) == ["card", "gift"]

    async def test_its_failure_fails_the_transaction(self, box: Pillarbox) -> None:
        @box.subscribe(OrderPlaced, before_commit=True)
        async def refuse(_event: OrderPlaced, _session: AsyncSession) -> None:
            raise PermissionError("over the limit")

        with pytest.raises(PermissionError, match="over the limit"):
            await place(box)
        assert await written(box.engine) == []
        assert await _count(box.engine, Order) == 0

    async def test_a_rollback_undoes_what_it_did(self, sqlite_box: Pillarbox) -> None:
        _add_lines(sqlite_box)
        with pytest.raises(RuntimeError):
            async with sqlite_box.unit_of_work() as uow:
                uow.add(Order.place())
                await uow.session.flush()
                raise RuntimeError("changed its mind")
        assert await _count(sqlite_box.engine, Line) == 0

    async def test_it_runs_once_however_often_the_session_flushes(self, sqlite_box: Pillarbox) -> None:
        calls = _add_lines(sqlite_box)
        async with sqlite_box.unit_of_work() as uow:
            uow.add(Order.place())
            for _ in range(3):
                await uow.session.flush()
        assert len(calls) == 1

    async def test_h15_a_chain_of_events_is_handled_to_its_end(self, sqlite_box: Pillarbox) -> None:
        box = sqlite_box

        @box.subscribe(OrderPlaced, before_commit=True)
        async def reprice(event: OrderPlaced, session: AsyncSession) -> None:
            box.publish(session, OrderRepriced(order_id=event.order_id, total_cents=1), key=event.order_id)

        @box.subscribe(OrderRepriced, before_commit=True)
        def note(event: OrderRepriced, session: Session) -> None:
            box.publish(session, OrderNoted(note="cheaper"), key=event.order_id)

        await place(box)
        assert await written(box.engine) == ["placed", "repriced", "noted"]

    async def test_h15_an_endless_chain_is_refused(self, sqlite_box: Pillarbox) -> None:
        box = sqlite_box

        @box.subscribe(OrderNoted, before_commit=True)
        def answer(_event: OrderNoted, session: Session) -> None:
            box.publish(session, OrderNoted(note="no, you"), key="k")

        with pytest.raises(SessionError, match="they answer each other"):
            async with box.unit_of_work() as uow:
                uow.publish(OrderNoted(note="after you"), key="k")
        assert await written(box.engine) == []

    async def test_h17_what_a_savepoint_took_back_is_done_again(self, sqlite_box: Pillarbox) -> None:
        box = sqlite_box
        calls = _add_lines(box)
        order, placed = Order(id=uuid4(), total_cents=1), None
        async with box.unit_of_work() as uow:
            uow.add(order)
            await uow.session.flush()
            placed = OrderPlaced(order_id=order.id, total_cents=1)
            savepoint = await uow.session.begin_nested()
            uow.publish(placed, key=order.id)
            await uow.session.flush()
            await savepoint.rollback()
            uow.publish(placed, key=order.id)
        assert len(calls) == 2
        assert await _count(box.engine, Line) == 1

    async def test_a_plain_session_runs_plain_handlers_and_refuses_async_ones(
        self, sqlite_box: Pillarbox, sqlite_database: Database
    ) -> None:
        calls = _add_lines(sqlite_box)
        plain = create_engine(sqlite_database.url("pysqlite"))
        sessions = sqlite_box.bind(sessionmaker(plain))
        with sessions.begin() as session:
            session.add(Order.place())
        assert len(calls) == 1

        @sqlite_box.subscribe(OrderPlaced, before_commit=True)
        async def waits(_event: OrderPlaced, _session: AsyncSession) -> None: ...

        with pytest.raises(SessionError, match="needs an AsyncSession"), sessions.begin() as session:
            session.add(Order.place())
        plain.dispose()

    async def test_own_async_sessions_run_them_too(self, sqlite_box: Pillarbox) -> None:
        calls = _add_lines(sqlite_box)
        sessions = sqlite_box.bind(async_sessionmaker(sqlite_box.engine))
        async with sessions.begin() as session:
            session.add(Order.place())
        assert len(calls) == 1

    async def test_an_async_callable_object_is_awaited(self, sqlite_box: Pillarbox) -> None:
        seen: list[Event] = []

        class Remember:
            async def __call__(self, event: OrderPlaced, _session: AsyncSession) -> None:
                seen.append(event)

        sqlite_box.subscribe(OrderPlaced, before_commit=True)(Remember())
        await place(sqlite_box)
        assert len(seen) == 1

    async def test_an_event_that_goes_nowhere_is_handled_all_the_same(self, sqlite_box: Pillarbox) -> None:
        seen: list[Event] = []

        @sqlite_box.subscribe(DiscountConsidered, before_commit=True)
        def remember(event: DiscountConsidered, _session: Session) -> None:
            seen.append(event)

        async with sqlite_box.unit_of_work() as uow:
            uow.publish(DiscountConsidered(order_id=uuid4()), key="k")
        assert len(seen) == 1
        assert await written(sqlite_box.engine) == []


def _add_lines(box: Pillarbox) -> list[Event]:
    """A handler that writes a row, and what it was called with."""
    calls: list[Event] = []

    @box.subscribe(OrderPlaced, before_commit=True)
    def add_line(event: OrderPlaced, session: Session) -> None:
        calls.append(event)
        session.add(Line(order_id=event.order_id, article="gift"))

    return calls


async def _count(engine: AsyncEngine, kind: Any) -> int:
    async with engine.connect() as connection:
        return (await connection.execute(select(func.count()).select_from(kind))).scalar_one()
