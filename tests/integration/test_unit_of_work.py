"""The unit of work, hazard by hazard: what a transaction raises is in the outbox if and only if it commits."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import Any, cast
from uuid import uuid4

import pytest
from sqlalchemy import ForeignKey, String, create_engine, delete, func, insert, inspect, select, text, update
from sqlalchemy import event as sqlalchemy_events
from sqlalchemy.exc import IllegalStateChangeError, IntegrityError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Mapped, Session, mapped_column, selectinload, sessionmaker

from pillarbox import (
    Aggregate,
    ConcurrencyError,
    DuplicateEventError,
    EventPublisher,
    Pillarbox,
    Route,
    UnitOfWork,
    event_context,
)
from pillarbox.errors import (
    BulkStatementError,
    ConfigurationError,
    HeaderError,
    NotMigratedError,
    SessionError,
    SessionNotBoundError,
    SessionSharedError,
)
from pillarbox.transports.memory import MemoryTransport
from pillarbox.unit_of_work import Watchdog
from tests.conftest import FreshDatabase
from tests.domain import (
    Base,
    DiscountConsidered,
    Line,
    Order,
    OrderJotted,
    OrderNoted,
    OrderPlaced,
    order_box,
    set_up,
    until_somebody_waits,
    written,
)
from tests.servers import Database

pytestmark = pytest.mark.dialects


@pytest.fixture
async def box(database: Database) -> AsyncIterator[Pillarbox]:
    async with order_box(database.url()) as box:
        await set_up(box)
        yield box


@pytest.fixture
async def one_box(postgres_database: Database) -> AsyncIterator[Pillarbox]:
    """For what does not depend on the database."""
    async with order_box(postgres_database.url()) as box:
        await set_up(box)
        yield box


async def placed(box: Pillarbox, total: int = 100) -> Order:
    async with box.unit_of_work() as uow:
        order = Order.place(total)
        uow.add(order)
    return order


class TestCommitAndRollback:
    async def test_state_and_events_commit_together(self, box: Pillarbox) -> None:
        order = await placed(box)
        async with box.unit_of_work() as uow:
            (await uow.session.get_one(Order, order.id)).reprice(90)
        assert await written(box.engine, "event_type", "aggregate_id", "version") == [
            ("tests.order.placed", str(order.id), "1"),
            ("tests.order.repriced", str(order.id), "2"),
        ]

    async def test_h12_nothing_leaves_a_transaction_that_rolls_back(self, box: Pillarbox) -> None:
        with pytest.raises(RuntimeError):
            async with box.unit_of_work() as uow:
                uow.add(Order.place())
                await uow.flush()
                raise RuntimeError
        assert await written(box.engine) == []

    async def test_several_commits_in_one_unit_of_work(self, box: Pillarbox) -> None:
        with pytest.raises(RuntimeError):
            async with box.unit_of_work() as uow:
                order = Order.place()
                uow.add(order)
                await uow.commit()
                order.reprice(1)
                await uow.rollback()
                await uow.session.refresh(order)
                order.reprice(2)
                await uow.commit()
                order.reprice(3)
                raise RuntimeError
        assert await written(box.engine) == ["placed", "repriced"]

    async def test_the_session_knows_its_unit_of_work(self, one_box: Pillarbox) -> None:
        async with one_box.unit_of_work() as uow:
            assert uow.session.info["uow"] is uow
            publisher: EventPublisher = uow
            publisher.publish(OrderNoted(note="through the port"), key="k")
        assert await written(one_box.engine) == ["noted"]

    async def test_nothing_is_left_to_the_garbage_collector(self, one_box: Pillarbox) -> None:
        gc.disable()
        try:
            async with one_box.unit_of_work() as uow:
                uow.add(Order.place())
                objects: list[Any] = [uow, uow.session, uow.session.sync_session]
                left = [weakref.ref(each) for each in objects]
            del uow, objects
            await asyncio.sleep(0)  # the task that has committed is gone
            assert [each() for each in left] == [None, None, None]
        finally:
            gc.enable()

    async def test_a_stale_version_is_a_concurrency_error(self, box: Pillarbox) -> None:
        order = await placed(box)
        async with box.engine.connect() as connection:
            await connection.execute(text("UPDATE test_orders SET version = version + 1"))
            await connection.commit()
        order.reprice(1)
        with pytest.raises(ConcurrencyError):
            async with box.unit_of_work() as uow:
                uow.add(order)
        assert await written(box.engine) == ["placed"]

    async def test_a_database_without_tables_says_what_to_do(self, fresh_database: FreshDatabase) -> None:
        async with order_box(fresh_database("embedded", empty=True).url()) as box:
            with pytest.raises(NotMigratedError, match="pillarbox migrate"):
                async with box.unit_of_work() as uow:
                    uow.publish(OrderNoted(note="too early"), key="k")

    @pytest.mark.parametrize(
        ("engine", "complaint"),
        [
            ("postgresql+psycopg2://host/db", "async driver"),
            ("not a url", "database URL"),
            ("oracle://host/db", "not supported"),
            (create_engine("sqlite://"), "AsyncEngine"),
        ],
    )
    async def test_an_engine_that_cannot_be_used_is_refused_in_one_line(self, engine: Any, complaint: str) -> None:
        with pytest.raises(ConfigurationError, match=complaint):
            await Pillarbox(engine).start()

    async def test_a_url_without_a_driver_gets_the_usual_one(self, sqlite_database: Database) -> None:
        async with order_box(sqlite_database.url().replace("+aiosqlite", "")) as box:
            assert box.engine.driver == "aiosqlite"

    @pytest.mark.parametrize(
        "options", [{"routes": Route("a.*", to="b", topic="t")}, {"transports": [MemoryTransport()]}]
    )
    def test_routes_and_transports_of_the_wrong_kind_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="routes is a list"):
            Pillarbox("sqlite://", **options)

    async def test_the_box_disposes_only_an_engine_that_it_made(self, sqlite_database: Database) -> None:
        engine = create_async_engine(sqlite_database.url())
        async with order_box(engine) as box:
            await set_up(box)
        async with engine.connect() as connection:
            assert (await connection.execute(text("SELECT 1"))).scalar() == 1
        await engine.dispose()


class TestCollection:
    async def test_h13_an_event_is_collected_once_over_many_flushes(self, box: Pillarbox) -> None:
        async with box.unit_of_work() as uow:
            order = Order.place()
            uow.add(order)
            for total in range(4):
                order.total_cents = total
                await uow.flush()
        assert await written(box.engine) == ["placed"]

    async def test_h14_autoflush_before_queries_writes_it_once(self, box: Pillarbox) -> None:
        async with box.unit_of_work() as uow:
            uow.add(Order.place())
            for _ in range(3):
                await uow.session.scalar(select(func.count()).select_from(Order))
        assert await written(box.engine) == ["placed"]

    async def test_h15_events_raised_by_listeners_during_the_flush_are_collected(self, one_box: Pillarbox) -> None:
        order = await placed(one_box)
        async with one_box.unit_of_work() as uow:
            other = await uow.session.get_one(Order, order.id)

            def answer(session: Session, _context: object) -> None:
                if any(isinstance(item, Order) for item in session.new):
                    other.note("answered after the flush")

            sqlalchemy_events.listen(uow.session.sync_session, "after_flush", answer)
            uow.add(Order.place())
        assert await written(one_box.engine) == ["placed", "placed", "noted"]
        assert (await written(one_box.engine, "version"))[-1] == ("2",)

    async def test_h15_a_cycle_of_listeners_is_refused(self, one_box: Pillarbox) -> None:
        with pytest.raises(SessionError, match="answers every event"):
            async with one_box.unit_of_work() as uow:
                seen: list[Order] = []

                def answer(session: Session, _context: object) -> None:
                    order = Order.place()
                    seen.append(order)
                    session.add(order)

                sqlalchemy_events.listen(uow.session.sync_session, "after_flush", answer)
                uow.add(Order.place())
        assert await written(one_box.engine) == []

    async def test_events_published_in_a_before_commit_listener_are_written(self, one_box: Pillarbox) -> None:
        async with one_box.unit_of_work() as uow:
            sqlalchemy_events.listen(
                uow.session.sync_session,
                "before_commit",
                lambda _session: uow.publish(OrderNoted(note="at the last moment"), key="k"),
                once=True,
            )
        assert await written(one_box.engine) == ["noted"]

    async def test_h19_bulk_statements_on_aggregates_are_refused_unless_marked(self, one_box: Pillarbox) -> None:
        async with one_box.unit_of_work() as uow:
            for statement in (
                update(Order).values(total_cents=1),
                update(Order.__table__).values(total_cents=1),  # type: ignore[arg-type]
                Order.__table__.delete(),  # type: ignore[attr-defined]
            ):
                with pytest.raises(BulkStatementError, match="pillarbox_bulk"):
                    await uow.session.execute(statement)
            await uow.session.execute(update(Order).values(total_cents=1).execution_options(pillarbox_bulk=True))

    async def test_h19_bulk_statements_within_from_statement_are_refused_too(self, one_box: Pillarbox) -> None:
        await placed(one_box)
        changed = update(Order).values(total_cents=1).returning(Order)
        removed = delete(Order).returning(Order)
        added = insert(Order).values(id=uuid4(), total_cents=1).returning(Order)
        async with one_box.unit_of_work() as uow:
            for statement in (changed, removed, added):
                with pytest.raises(BulkStatementError, match="pillarbox_bulk"):
                    await uow.session.execute(select(Order).from_statement(statement))
            for marked in (
                select(Order).from_statement(changed).execution_options(pillarbox_bulk=True),
                select(Order).from_statement(changed.execution_options(pillarbox_bulk=True)),
            ):
                assert [order.total_cents for order in await uow.session.scalars(marked)] == [1]

    async def test_h19_the_old_bulk_methods_are_refused_too(self, one_box: Pillarbox) -> None:
        def attempt(session: Session) -> None:
            with pytest.raises(BulkStatementError):
                session.bulk_save_objects([Order.place()])
            with pytest.raises(BulkStatementError):
                session.bulk_insert_mappings(inspect(Order), [{}])
            with pytest.raises(BulkStatementError):
                session.bulk_update_mappings(inspect(Order), [{}])

        async with one_box.unit_of_work() as uow:
            await uow.session.run_sync(attempt)

    async def test_what_a_detached_aggregate_raised_is_written_by_its_merged_copy(self, box: Pillarbox) -> None:
        order = await placed(box)
        order.reprice(7)
        async with box.unit_of_work() as uow:
            merged = await uow.session.merge(order)
            assert merged is not order
        assert await written(box.engine, "event_type", "version") == [
            ("tests.order.placed", "1"),
            ("tests.order.repriced", "2"),
        ]

    async def test_what_detached_aggregates_raised_is_written_if_they_are_merged_together(self, box: Pillarbox) -> None:
        orders = [await placed(box), await placed(box)]
        for order in orders:
            order.reprice(7)
        async with box.unit_of_work() as uow:
            if hasattr(uow.session, "merge_all"):  # since SQLAlchemy 2.1
                copies = await uow.session.merge_all(orders)
            else:
                copies = await uow.session.run_sync(lambda session: session.merge_all(orders))
            assert [copy.id for copy in copies] == [order.id for order in orders]
        assert await written(box.engine, "event_type", "version") == [
            ("tests.order.placed", "1"),
            ("tests.order.placed", "1"),
            ("tests.order.repriced", "2"),
            ("tests.order.repriced", "2"),
        ]

    async def test_h20_an_event_without_a_changed_column_is_written(self, box: Pillarbox) -> None:
        order = await placed(box)
        async with box.unit_of_work() as uow:
            (await uow.session.get_one(Order, order.id)).note("nothing else changed")
        assert await written(box.engine, "event_type", "version") == [
            ("tests.order.placed", "1"),
            ("tests.order.noted", "2"),
        ]

    async def test_a_changed_collection_is_no_change_of_the_row_and_it_is_touched(self, one_box: Pillarbox) -> None:
        order = await placed(one_box)
        async with one_box.unit_of_work() as uow:
            loaded = await uow.session.get_one(Order, order.id, options=[selectinload(Order.lines)])
            loaded.lines.append(Line(article="book"))
            loaded.note("a line was added")
        assert (await written(one_box.engine, "version"))[-1] == ("2",)

    async def test_h21_an_aggregate_that_nobody_holds_keeps_its_event(self, box: Pillarbox) -> None:
        order = await placed(box)
        async with box.unit_of_work() as uow:
            (await uow.session.get_one(Order, order.id)).note("dropped at once")
            gc.collect()
        assert await written(box.engine) == ["placed", "noted"]

    async def test_h23_events_need_nothing_from_the_database_after_commit(self, one_box: Pillarbox) -> None:
        order = await placed(one_box)
        assert order.total_cents == 100
        assert order.aggregate_version == 1

    async def test_h24_an_event_is_what_it_was_when_it_was_raised(self, one_box: Pillarbox) -> None:
        from tests.unit.test_event import Listed

        names = ["first"]
        async with one_box.unit_of_work() as uow:
            uow.publish(Listed(names=names), key="k")
            names.append("too late")
        [(payload,)] = await written(one_box.engine, "payload")
        assert payload == '{"names":["first"]}'

    async def test_deleted_aggregates_tell_their_last_version_and_one(self, box: Pillarbox) -> None:
        order = await placed(box)
        async with box.unit_of_work() as uow:
            loaded = await uow.session.get_one(Order, order.id)
            loaded.cancel()
            await uow.session.delete(loaded)
        assert await written(box.engine, "event_type", "version") == [
            ("tests.order.placed", "1"),
            ("tests.order.cancelled", "2"),
        ]

    async def test_events_of_one_flush_are_numbered_and_local_ones_are_not_counted(self, one_box: Pillarbox) -> None:
        @one_box.subscribe(DiscountConsidered)
        def consider(event: DiscountConsidered) -> None: ...

        async with one_box.unit_of_work() as uow:
            order = Order.place()
            order.raise_event(DiscountConsidered(order_id=order.id))
            order.note("second")
            uow.add(order)
        async with one_box.engine.connect() as connection:
            rows = (
                await connection.execute(
                    text(
                        "SELECT event_type, headers ->> 'event_index' i, headers ->> 'event_count' c FROM outbox_events"
                    )
                )
            ).all()
        assert {row.event_type: (row.i, row.c) for row in rows} == {
            "tests.order.placed": ("0", "2"),
            "tests.order.discount_considered": ("0", "1"),
            "tests.order.noted": ("1", "2"),
        }

    async def test_the_same_event_twice_in_one_session_is_written_once_and_later_refused(self, box: Pillarbox) -> None:
        event = OrderNoted(note="once")
        async with box.unit_of_work() as uow:
            uow.publish(event, key="k")
            uow.publish(event, key="k")
            await uow.flush()
            uow.publish(event, key="k")
        assert await written(box.engine) == ["noted"]
        with pytest.raises(DuplicateEventError, match=str(event.event_id)):
            async with box.unit_of_work() as uow:
                uow.publish(event, key="k")
        assert await written(box.engine) == ["noted"]

    async def test_two_events_with_one_id_are_a_mistake(self, one_box: Pillarbox) -> None:
        event = OrderNoted(note="one")
        for other, key in ((OrderNoted(note="two", event_id=event.event_id), "k"), (event, "another key")):
            with pytest.raises(DuplicateEventError, match="make a new event"):
                async with one_box.unit_of_work() as uow:
                    uow.publish(event, key="k")
                    uow.publish(other, key=key)
            with pytest.raises(DuplicateEventError, match="make a new event"):
                async with one_box.unit_of_work() as uow:
                    uow.publish(event, key="k")
                    await uow.flush()
                    uow.publish(other, key=key)
        assert await written(one_box.engine) == []

    async def test_an_expired_aggregate_can_raise(self, box: Pillarbox) -> None:
        async with box.bind(async_sessionmaker(box.engine))() as session:
            order = Order.place()
            session.add(order)
            await session.commit()
            order.note("expired by the commit")
            await session.commit()
        assert await written(box.engine, "event_type", "version") == [
            ("tests.order.placed", "1"),
            ("tests.order.noted", "2"),
        ]

    async def test_a_unit_of_work_that_is_not_open_is_refused(self, one_box: Pillarbox) -> None:
        uow = one_box.unit_of_work()
        with pytest.raises(SessionError, match="not open"):
            uow.publish(OrderNoted(note="too early"), key="k")
        async with uow:
            pass
        with pytest.raises(SessionError, match="not open"):
            uow.publish(OrderNoted(note="too late"), key="k")

    @pytest.mark.parametrize("step", ["close", "reset", "invalidate", "__aexit__"])
    async def test_its_session_cannot_be_closed_inside(self, one_box: Pillarbox, step: str) -> None:
        with pytest.raises(SessionError, match="cannot be closed in it"):
            async with one_box.unit_of_work() as uow:
                uow.publish(OrderNoted(note="would be lost"), key="k")
                await uow.flush()
                await getattr(uow.session, step)(*(None, None, None) if step == "__aexit__" else ())
        assert await written(one_box.engine) == []

    async def test_a_task_that_outlives_it_cannot_begin_a_transaction_without_an_end(self, one_box: Pillarbox) -> None:
        async with one_box.unit_of_work() as uow:
            session = uow.session
        with pytest.raises(InvalidRequestError, match="permanently closed"):
            await session.execute(text("SELECT 1"))

    @pytest.mark.parametrize("statement", ["ROLLBACK", "COMMIT"])
    async def test_a_transaction_that_a_statement_has_ended_is_not_taken_for_committed(
        self, one_box: Pillarbox, statement: str
    ) -> None:
        with pytest.raises(SessionError, match="executed as a statement"):
            async with one_box.unit_of_work() as uow:
                uow.publish(OrderNoted(note="before"), key="k")
                await uow.flush()
                await uow.session.execute(text(statement))
        assert await written(one_box.engine) == ["noted"] * (statement == "COMMIT")
        async with one_box.unit_of_work() as uow:  # the connection is as good as before
            uow.publish(OrderNoted(note="after"), key="k")

    async def test_an_event_that_goes_nowhere_is_reported_once(
        self, sqlite_database: Database, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with Pillarbox(sqlite_database.url()) as box:
            await box.migrate()
            for _ in range(2):
                async with box.unit_of_work() as uow:
                    uow.publish(OrderNoted(note="nobody wants it"), key="k")
        assert caplog.text.count("matches no route") == 1

    async def test_what_looks_something_up_while_events_are_written_flushes_nothing(
        self, sqlite_database: Database
    ) -> None:
        using: list[Session] = []

        def key(_event: object) -> str:
            return f"{using[0].scalars(select(func.count()).select_from(Line)).one()} lines"

        route = Route("tests.order.*", to="broker", topic="tests.order.events", key=key)
        async with Pillarbox(sqlite_database.url(), transports={"broker": MemoryTransport()}, routes=[route]) as box:
            await set_up(box)
            async with box.unit_of_work() as uow:
                using.append(uow.session.sync_session)
                uow.publish(OrderNoted(note="which key?"), key="k")
            assert await written(box.engine, "key") == [("0 lines",)]

    async def test_plain_aggregates_are_asked_for_their_events(self, one_box: Pillarbox) -> None:
        class Basket(Aggregate):
            id = "basket-1"

        async with one_box.unit_of_work() as uow:
            basket = Basket()
            basket.raise_event(OrderNoted(note="from a plain object"))
            uow.add(basket)
            basket.raise_event(OrderNoted(note="and another"))
        assert (
            await written(one_box.engine, "aggregate_id", "aggregate_type", "version")
            == [("basket-1", "basket", None)] * 2
        )

    async def test_pulled_events_are_not_written(self, one_box: Pillarbox) -> None:
        async with one_box.unit_of_work() as uow:
            order = Order.place()
            uow.add(order)
            assert [type(event) for event in order.pull_events()] == [OrderPlaced]
        assert await written(one_box.engine) == []

    @pytest.mark.parametrize("key", ["", "a\nb", "\ud800", "x" * 513, None, 7])
    async def test_bad_keys_are_refused_when_the_event_is_published(self, one_box: Pillarbox, key: str) -> None:
        async with one_box.unit_of_work() as uow:
            with pytest.raises(HeaderError, match="key"):
                uow.publish(OrderNoted(note="x"), key=key)


class TestSavepoints:
    async def test_h16_events_of_a_rolled_back_savepoint_are_dropped(self, box: Pillarbox) -> None:
        order = await placed(box)
        async with box.unit_of_work() as uow:
            loaded = await uow.session.get_one(Order, order.id)
            with pytest.raises(RuntimeError):
                async with uow.nested():
                    loaded.reprice(1)
                    await uow.flush()
                    raise RuntimeError
        assert await written(box.engine) == ["placed"]

    @pytest.mark.parametrize("flushed", [True, False])
    async def test_h17_what_a_savepoint_drained_is_restored_with_the_object(
        self, box: Pillarbox, flushed: bool
    ) -> None:
        order = Order.place()
        async with box.unit_of_work() as uow:
            with pytest.raises(RuntimeError):
                async with uow.nested():
                    uow.add(order)
                    order.note("raised after it was added: dropped")
                    if flushed:
                        await uow.flush()
                    raise RuntimeError
            uow.add(order)
        assert await written(box.engine) == ["placed"]

    async def test_h17_a_change_that_is_redone_raises_its_event_once(self, box: Pillarbox) -> None:
        order = await placed(box)
        async with box.unit_of_work() as uow:
            loaded = await uow.session.get_one(Order, order.id)
            with pytest.raises(RuntimeError):
                async with uow.nested():
                    loaded.reprice(1)
                    await uow.flush()
                    raise RuntimeError
            await uow.session.refresh(loaded)
            loaded.reprice(1)
        assert await written(box.engine, "event_type", "version") == [
            ("tests.order.placed", "1"),
            ("tests.order.repriced", "2"),
        ]

    async def test_a_released_savepoint_rolls_back_with_its_transaction(self, box: Pillarbox) -> None:
        with pytest.raises(RuntimeError):
            async with box.unit_of_work() as uow:
                async with uow.nested():
                    uow.add(Order.place())
                raise RuntimeError
        assert await written(box.engine) == []

    async def test_savepoints_within_savepoints(self, box: Pillarbox) -> None:
        async with box.unit_of_work() as uow:
            uow.publish(OrderNoted(note="outside"), key="k")
            async with uow.nested():
                uow.publish(OrderNoted(note="kept"), key="k")
                with pytest.raises(RuntimeError):
                    async with uow.nested():
                        uow.publish(OrderNoted(note="dropped"), key="k")
                        async with uow.nested():
                            uow.publish(OrderNoted(note="released, then dropped"), key="k")
                        raise RuntimeError
            uow.publish(OrderNoted(note="last"), key="k")
        notes = [payload for (payload,) in await written(box.engine, "payload")]
        assert notes == ['{"note":"outside"}', '{"note":"kept"}', '{"note":"last"}']

    async def test_h18_a_retry_on_the_same_objects_does_not_double_events(self, box: Pillarbox) -> None:
        new, old = Order.place(), await placed(box)
        async with box.unit_of_work() as uow:
            loaded = await uow.session.get_one(Order, old.id)
            for attempt in range(3):
                uow.add(new)
                loaded.reprice(attempt)
                await uow.flush()
                if attempt < 2:
                    await uow.rollback()
                    await uow.session.refresh(loaded)
        assert sorted(await written(box.engine)) == ["placed", "placed", "repriced"]

    async def test_a_failed_flush_leaves_nothing_behind(self, box: Pillarbox) -> None:
        order = await placed(box)
        async with box.unit_of_work() as uow:
            with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
                async with uow.nested():
                    uow.add(Order.place(order_id=order.id))
                    await uow.flush()
            uow.publish(OrderNoted(note="still here"), key="k")
        assert await written(box.engine) == ["placed", "noted"]


class TestNesting:
    async def test_h25_a_unit_of_work_inside_another_is_a_savepoint_of_it(self, postgres_database: Database) -> None:
        engine = create_async_engine(postgres_database.url(), pool_size=1, max_overflow=0, pool_timeout=2)
        async with order_box(engine) as box:
            await set_up(box)
            async with box.unit_of_work(tenant="acme") as outer:
                async with box.unit_of_work() as inner:
                    assert inner.session is outer.session
                    inner.add(Order.place())
                with pytest.raises(RuntimeError):
                    async with box.unit_of_work() as failing:
                        failing.add(Order.place())
                        raise RuntimeError
            assert await written(engine, "event_type", "tenant_id") == [("tests.order.placed", "acme")]
        await engine.dispose()

    @pytest.mark.parametrize("fails", ["the aggregate's row", "the event"])
    async def test_h127_one_that_cannot_begin_inside_leaves_the_outer_one_usable(
        self, one_box: Pillarbox, fails: str
    ) -> None:
        """A savepoint flushes what the outer one holds, and that may fail."""
        taken = await placed(one_box)
        async with one_box.unit_of_work() as outer:
            if fails == "the event":
                outer.publish(first := OrderNoted(note="a"), key="k")
                outer.publish(OrderNoted(note="b", event_id=first.event_id), key="k")
            else:
                outer.add(Order.place(order_id=taken.id))
            with pytest.raises(DuplicateEventError if fails == "the event" else IntegrityError):
                async with one_box.unit_of_work():
                    pass
            await outer.rollback()
            outer.publish(OrderNoted(note="kept"), key="k")
            async with one_box.unit_of_work() as inner:
                inner.publish(OrderNoted(note="kept"), key="k")
            await outer.commit()
        assert await written(one_box.engine) == ["placed", "noted", "noted"]

    async def test_h25_new_transaction_says_that_it_wants_its_own(self, one_box: Pillarbox) -> None:
        with pytest.raises(RuntimeError):
            async with one_box.unit_of_work() as outer:
                outer.add(Order.place())
                async with one_box.unit_of_work(new_transaction=True) as inner:
                    inner.publish(OrderNoted(note="kept"), key="k")
                raise RuntimeError
        assert await written(one_box.engine) == ["noted"]

    async def test_a_task_started_inside_has_a_transaction_of_its_own(self, one_box: Pillarbox) -> None:
        async def child() -> None:
            async with one_box.unit_of_work() as uow:
                uow.publish(OrderNoted(note="child"), key="k")

        with pytest.raises(RuntimeError):
            async with one_box.unit_of_work() as uow:
                uow.add(Order.place())
                await asyncio.gather(child(), child())
                raise RuntimeError
        assert await written(one_box.engine) == ["noted", "noted"]

    async def test_the_tenant_of_the_context_is_the_tenant_of_the_unit_of_work(self, one_box: Pillarbox) -> None:
        with event_context(tenant="acme"):
            async with one_box.unit_of_work(), one_box.unit_of_work(tenant="acme") as inner:
                inner.publish(OrderNoted(note="x"), key="k")
        assert await written(one_box.engine, "tenant_id") == [("acme",)]

    async def test_another_tenant_inside_needs_a_transaction_of_its_own(self, one_box: Pillarbox) -> None:
        async with one_box.unit_of_work(tenant="one"):
            with pytest.raises(SessionError, match="new_transaction"):
                async with one_box.unit_of_work(tenant="two"):
                    pass


class TestSharing:
    @pytest.mark.filterwarnings("ignore:Usage of the")
    async def test_h22_tasks_that_share_a_session_leave_its_connection_clean(self, box: Pillarbox) -> None:
        async def work(uow: UnitOfWork) -> None:
            uow.add(Order.place())
            await uow.flush()

        for _ in range(10):
            with pytest.raises(SessionSharedError):
                async with box.unit_of_work() as uow:
                    await asyncio.gather(*(work(uow) for _ in range(3)))
        with pytest.raises((SessionSharedError, IllegalStateChangeError)):
            async with box.unit_of_work() as uow:
                forgotten = asyncio.create_task(work(uow))
                await asyncio.sleep(0)  # it has begun
        forgotten.cancel()
        await asyncio.wait([forgotten])
        assert box.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        async with box.unit_of_work() as uow:
            await work(uow)
        assert len(await written(box.engine)) == 1

    async def test_h22_two_tasks_in_one_session_at_once_are_refused(self, one_box: Pillarbox) -> None:
        async with one_box.unit_of_work() as uow:
            results = await asyncio.gather(
                uow.session.execute(text("SELECT pg_sleep(0.2)")),
                uow.session.execute(text("SELECT 1")),
                return_exceptions=True,
            )
        assert [type(result) for result in results if isinstance(result, BaseException)] == [SessionSharedError]

    @pytest.mark.parametrize("step", ["rollback", "commit", "flush"])
    async def test_h22_another_task_cannot_end_the_transaction_meanwhile(self, one_box: Pillarbox, step: str) -> None:
        async with one_box.unit_of_work() as uow:
            uow.add(Order.place())
            await uow.flush()
            first = asyncio.create_task(uow.session.execute(text("SELECT pg_sleep(0.3)")))
            await asyncio.sleep(0)
            with pytest.raises(SessionSharedError):
                await getattr(uow.session, step)()
            await first
        assert await written(one_box.engine) == ["placed"]

    async def test_h22_two_threads_in_one_session_at_once_are_refused(self, postgres_database: Database) -> None:
        async with order_box(postgres_database.url()) as box:
            await set_up(box)
            engine = create_engine(postgres_database.url("psycopg"))
            session = box.bind(sessionmaker(engine))()
            busy = threading.Event()
            session.execute(text("SELECT 1"))

            def hold() -> None:
                with session._alone():  # type: ignore[attr-defined]
                    busy.set()
                    released.wait(10)

            released = threading.Event()
            thread = threading.Thread(target=hold)
            thread.start()
            busy.wait(10)
            with pytest.raises(SessionSharedError):
                session.execute(text("SELECT 1"))
            released.set()
            thread.join()
            session.execute(text("SELECT 1"))
            session.close()
            engine.dispose()

    async def test_h22_handing_a_session_on_is_fine(self, one_box: Pillarbox) -> None:
        async with one_box.unit_of_work() as uow:
            uow.add(Order.place())
            await asyncio.create_task(uow.flush())
            await asyncio.wait_for(uow.session.execute(text("SELECT 1")), 5)
            await asyncio.shield(uow.session.execute(text("SELECT 1")))
        assert await written(one_box.engine) == ["placed"]


class TestLongTransactions:
    async def test_h26_a_slow_unit_of_work_is_reported_with_its_place(
        self, postgres_database: Database, caplog: pytest.LogCaptureFixture
    ) -> None:
        reported = asyncio.Event()

        class Signal(logging.Handler):
            def emit(self, _record: logging.LogRecord) -> None:
                reported.set()

        logging.getLogger("pillarbox").addHandler(handler := Signal())
        async with order_box(postgres_database.url(), slow_after=0.01) as box, box.unit_of_work():
            await asyncio.wait_for(reported.wait(), 10)
        logging.getLogger("pillarbox").removeHandler(handler)
        assert "test_h26_a_slow_unit_of_work" in caplog.text

    async def test_h26_units_of_work_in_several_loops_are_watched(self, caplog: pytest.LogCaptureFixture) -> None:
        watchdog = Watchdog(0.2)

        def stay() -> None:
            async def work() -> None:
                watchdog.watch(cast(UnitOfWork, object()), asyncio.current_task(), threading.current_thread().name)
                await asyncio.sleep(0.4)

            asyncio.run(work())

        threads = [threading.Thread(target=stay, name=f"loop {number}") for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert {record.__dict__["tenant"] for record in caplog.records} == {"loop 0", "loop 1"}

    async def test_h26_a_hard_limit_rolls_back(self, one_box: Pillarbox) -> None:
        never = asyncio.Event()
        with pytest.raises(TimeoutError):
            async with one_box.unit_of_work(timeout=0.05) as uow:
                uow.add(Order.place())
                await uow.flush()
                await never.wait()
        assert await written(one_box.engine) == []


class Vehicle(Aggregate, Base):
    __tablename__ = "test_vehicles"
    id: Mapped[int] = mapped_column(primary_key=True)
    plate: Mapped[str] = mapped_column(String(20))
    kind: Mapped[str] = mapped_column(String(20))
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "vehicle"}  # noqa: RUF012  SQLAlchemy's way


class Truck(Vehicle):
    __tablename__ = "test_trucks"
    id: Mapped[int] = mapped_column(ForeignKey("test_vehicles.id"), primary_key=True)
    load: Mapped[int]
    __mapper_args__ = {"polymorphic_identity": "truck"}  # noqa: RUF012  SQLAlchemy's way


class TestManyFlushes:
    """H125: what a transaction has written costs it neither time nor memory, but for ids."""

    @staticmethod
    def _work_of(flush: Callable[[], None]) -> int:
        """How many instructions of our own it takes: unlike the time, always the same."""
        count = 0

        def trace(frame: FrameType, kind: str, _argument: object) -> Any:
            nonlocal count
            frame.f_trace_opcodes = "pillarbox" in frame.f_code.co_filename
            count += kind == "opcode"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            flush()
        finally:
            sys.settrace(before)
        return count

    @pytest.mark.parametrize("savepoints", [False, True])
    async def test_h125_a_late_flush_costs_what_an_early_one_costs(
        self, sqlite_database: Database, savepoints: bool
    ) -> None:
        async with order_box(sqlite_database.url()) as box:
            await set_up(box)
            engine = create_engine(sqlite_database.url("pysqlite"))
            costs = []
            with box.bind(sessionmaker(engine))() as session:
                for number in range(40):
                    savepoint = session.begin_nested() if savepoints else None
                    for key in range(10):
                        box.publish(session, OrderNoted(note=f"{number}"), key=f"k{key}")
                    costs.append(self._work_of(session.flush))
                    if savepoint is not None:
                        savepoint.commit()
                session.commit()
            engine.dispose()
            assert len(await written(box.engine)) == 400
        assert max(costs[-5:]) <= 1.02 * min(costs[2:7])

    @pytest.mark.parametrize("kind", [OrderNoted, OrderJotted])
    async def test_h125_only_ids_are_kept_of_what_is_written(
        self, one_box: Pillarbox, kind: type[OrderNoted | OrderJotted]
    ) -> None:
        async with one_box.unit_of_work() as uow:
            for number in range(12):
                if number == 2:  # all that is made once is there
                    gc.collect()
                    tracemalloc.start()
                for key in range(100):
                    uow.publish(kind(note=f"{number}".ljust(1_000)), key=f"k{key}")
                await uow.flush()
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert kept < 1_000 * 400
        assert len(await written(one_box.engine)) == 1_200

    async def test_h13_an_event_is_of_one_tenant(self, one_box: Pillarbox) -> None:
        async with one_box.unit_of_work() as uow:
            event = OrderNoted(note="x")
            for tenant in ("acme", "globex"):
                uow.publish(event, key="k", tenant=tenant)
            with pytest.raises(DuplicateEventError, match="another content, key, tenant"):
                await uow.flush()
            await uow.rollback()

    async def test_h13_an_event_without_an_id_is_known_as_long_as_it_is_kept(self, one_box: Pillarbox) -> None:
        async with one_box.unit_of_work() as uow:
            uow.publish(first := OrderJotted("first"), key="k")
            await uow.flush()
            uow.publish(first, key="k")
            for number in range(100):  # each may be where the one before was
                uow.publish(OrderJotted("the same" if number % 2 else f"{number}"), key="k")
                await uow.flush()
            for kept in (False, True):
                savepoint = await uow.session.begin_nested()
                uow.publish(first := OrderJotted("again") if not kept else first, key="k")
                await uow.flush()
                await (savepoint.commit() if kept else savepoint.rollback())
        assert len(await written(one_box.engine)) == 102

    async def test_h125_an_aggregate_that_nobody_holds_is_free_when_its_events_are_written(
        self, one_box: Pillarbox
    ) -> None:
        async with one_box.unit_of_work() as uow:
            uow.add(order := Order.place())
            seen = weakref.ref(order)
            await uow.flush()
            del order
            gc.collect()
            assert seen() is None
        assert await written(one_box.engine) == ["placed"]

    async def test_h125_a_repetition_is_known_many_flushes_later_unless_a_savepoint_took_it_back(
        self, box: Pillarbox
    ) -> None:
        kept, undone = OrderNoted(note="kept"), OrderNoted(note="undone")
        async with box.unit_of_work() as uow:
            uow.publish(kept, key="k")
            await uow.flush()
            with pytest.raises(RuntimeError):
                async with uow.nested():
                    uow.publish(undone, key="k")
                    await uow.flush()
                    async with uow.nested():
                        uow.publish(OrderNoted(note="released, and undone with the rest"), key="k")
                    raise RuntimeError
            async with uow.nested():
                uow.publish(kept, key="k")
                uow.publish(undone, key="k")
            uow.publish(undone, key="k")
            await uow.flush()
            uow.publish(OrderNoted(note="other", event_id=kept.event_id), key="k")
            with pytest.raises(DuplicateEventError, match="recorded twice"):
                await uow.flush()
            await uow.rollback()
            uow.publish(kept, key="k")
            uow.publish(undone, key="k")
        assert await written(box.engine) == ["noted", "noted"]


class TestOrder:
    async def test_h05_h113_the_row_is_written_after_the_aggregate_is_locked(self, postgres_database: Database) -> None:
        """One transaction raises without a change and flushes; a second one must wait until it is done."""
        async with order_box(postgres_database.url()) as box:
            await set_up(box)
            order = await placed(box)
            second_done = asyncio.Event()

            async def second() -> None:
                async with box.unit_of_work() as uow:
                    loaded = await uow.session.get_one(Order, order.id, with_for_update=True)
                    loaded.reprice(2)
                second_done.set()

            async with box.unit_of_work() as uow:
                first = await uow.session.get_one(Order, order.id)
                first.note("raised without a change")
                await uow.session.execute(select(func.count()).select_from(Order))
                task = asyncio.create_task(second())
                await until_somebody_waits(box)
                assert not second_done.is_set()
                first.reprice(1)
            await task
            assert await written(box.engine, "event_type", "version") == [
                ("tests.order.placed", "1"),
                ("tests.order.noted", "2"),
                ("tests.order.repriced", "3"),
                ("tests.order.repriced", "4"),
            ]

    async def test_all_changes_of_one_aggregate_meet_in_one_row_also_with_joined_inheritance(
        self, one_box: Pillarbox
    ) -> None:
        async with one_box.engine.begin() as connection:
            await connection.run_sync(Vehicle.metadata.create_all)
        async with one_box.unit_of_work() as uow:
            uow.add(Truck(id=1, plate="A", load=0))
        async with one_box.unit_of_work() as uow:
            truck = await uow.session.get_one(Truck, 1)
            truck.load = 5  # a change of the child's table alone
            truck.raise_event(OrderNoted(note="loaded"))
            await uow.flush()
            async with one_box.engine.connect() as other:
                locked = await other.execute(text("SELECT id FROM test_vehicles FOR UPDATE SKIP LOCKED"))
                assert locked.all() == []

    async def test_ordered_publishing_waits_for_the_transaction_before(self, one_box: Pillarbox) -> None:
        async def second() -> None:
            async with one_box.unit_of_work() as uow:
                uow.publish(OrderNoted(note="second"), key="k", ordered=True)

        async with one_box.unit_of_work() as uow:
            uow.publish(OrderNoted(note="first"), key="k", ordered=True)
            await uow.flush()
            task = asyncio.create_task(second())
            await until_somebody_waits(one_box)
        await task
        assert [payload for (payload,) in await written(one_box.engine, "payload")] == [
            '{"note":"first"}',
            '{"note":"second"}',
        ]

    async def test_ordered_publishing_is_refused_where_it_cannot_be_kept(self, mariadb_database: Database) -> None:
        async with order_box(mariadb_database.url()) as box:
            await set_up(box)
            async with box.unit_of_work() as uow:
                with pytest.raises(SessionError, match="ordered"):
                    uow.publish(OrderNoted(note="x"), key="k", ordered=True)


class TestOwnSessions:
    async def test_a_session_that_is_not_bound_is_refused(self, one_box: Pillarbox) -> None:
        async with AsyncSession(one_box.engine) as session:
            with pytest.raises(SessionNotBoundError, match=r"box\.bind"):
                one_box.publish(session, OrderNoted(note="x"), key="k")

    async def test_binding_twice_is_fine_and_to_another_box_is_not(self, one_box: Pillarbox) -> None:
        sessions = one_box.bind(async_sessionmaker(one_box.engine))
        assert one_box.bind(sessions) is sessions
        with pytest.raises(SessionError, match="another box"):
            order_box(one_box.engine).bind(sessions)

    async def test_a_maker_that_learns_its_engine_later_is_protected_too(self, sqlite_database: Database) -> None:
        async with order_box(sqlite_database.url()) as box:
            await set_up(box)
            engine = create_engine(sqlite_database.url("pysqlite"))
            with box.bind(sessionmaker())(bind=engine) as session:
                with session.begin_nested():
                    box.publish(session, OrderNoted(note="released, then rolled back"), key="k")
                session.rollback()
            engine.dispose()
            assert await written(box.engine) == []

    async def test_a_session_without_a_database_for_the_outbox_is_refused(self, one_box: Pillarbox) -> None:
        sessions = one_box.bind(async_sessionmaker(binds={Order: one_box.engine}))
        async with sessions() as session:
            one_box.publish(session, OrderNoted(note="x"), key="k")
            with pytest.raises(SessionError, match="bind=engine"):
                await session.flush()

    @pytest.mark.parametrize("how", ["engine", "option"])
    async def test_an_engine_in_autocommit_mode_is_refused(self, postgres_database: Database, how: str) -> None:
        if how == "engine":
            engine = create_async_engine(postgres_database.url(), isolation_level="AUTOCOMMIT")
        else:
            engine = create_async_engine(postgres_database.url()).execution_options(isolation_level="AUTOCOMMIT")
        async with order_box(postgres_database.url()) as box:
            await set_up(box)
            async with box.bind(async_sessionmaker(engine))() as session:
                box.publish(session, OrderNoted(note="x"), key="k")
                with pytest.raises(SessionError, match="AUTOCOMMIT"):
                    await session.flush()
            assert await written(box.engine) == []
        await engine.dispose()

    async def test_what_was_published_in_a_session_that_is_closed_is_gone(self, one_box: Pillarbox) -> None:
        session = one_box.bind(async_sessionmaker(one_box.engine))()
        one_box.publish(session, OrderNoted(note="abandoned"), key="k")
        await session.close()
        one_box.publish(session, OrderNoted(note="kept"), key="k")
        await session.commit()
        await session.close()
        assert [payload for (payload,) in await written(one_box.engine, "payload")] == ['{"note":"kept"}']

    async def test_publishing_begins_the_transaction(self, one_box: Pillarbox) -> None:
        async with one_box.bind(async_sessionmaker(one_box.engine))() as session:
            one_box.publish(session, OrderNoted(note="x"), key=uuid4())
            assert session.in_transaction()
            with pytest.raises(InvalidRequestError):
                session.sync_session.begin()
            await session.commit()
        assert await written(one_box.engine) == ["noted"]
