"""Ways in which an event could be lost without a word, each seen once, each closed."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import cached_property
from uuid import uuid4

import pytest
from sqlalchemy import ForeignKey, String, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import Mapped, mapped_column, relationship, selectinload

from pillarbox import Aggregate, DuplicateEventError, IntegrationEvent, Pillarbox, Route, downcaster, register_event
from pillarbox.errors import SessionError
from pillarbox.stores.tables import lanes
from pillarbox.transports.memory import MemoryTransport
from tests.domain import Base, Order, OrderNoted, order_box, set_up, until_somebody_waits, written
from tests.servers import Database


@register_event("tests.order.foreign")
@dataclasses.dataclass(frozen=True)
class Foreign:
    number: int


class Parcel(Aggregate, Base):
    """Has no version."""

    __tablename__ = "test_parcels"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str] = mapped_column(String(20), default="new")
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("test_parcels.id"))
    children: Mapped[list[Parcel]] = relationship()

    def say(self, note: str) -> None:
        self.raise_event(OrderNoted(note=note))


@pytest.fixture
async def box(postgres_database: Database) -> AsyncIterator[Pillarbox]:
    async with order_box(postgres_database.url()) as box:
        await set_up(box)
        yield box


async def test_foreign_events_are_told_apart_after_they_are_gone(box: Pillarbox) -> None:
    async with box.unit_of_work() as uow:
        for number in range(50):
            uow.publish(Foreign(number), key="k")
            await uow.flush()
    assert len(await written(box.engine)) == 50


async def test_raising_without_a_change_writes_nothing_that_was_read_before(box: Pillarbox) -> None:
    async with box.unit_of_work() as uow:
        uow.add(Parcel(id=1))
    async with box.unit_of_work() as uow:
        parcel = await uow.session.get_one(Parcel, 1)
        async with box.unit_of_work(new_transaction=True) as other:
            (await other.session.get_one(Parcel, 1)).status = "paid"
        parcel.say("nothing has changed here")
    async with box.engine.connect() as connection:
        assert (await connection.execute(select(Parcel.status))).scalar() == "paid"
    assert await written(box.engine) == ["noted"]


async def test_raising_without_a_change_locks_the_row_of_a_class_without_a_version(box: Pillarbox) -> None:
    async with box.unit_of_work() as uow:
        uow.add(Parcel(id=1))

    async def second() -> None:
        async with box.unit_of_work() as uow:
            (await uow.session.get_one(Parcel, 1, with_for_update=True)).say("second")

    async with box.unit_of_work() as uow:
        (await uow.session.get_one(Parcel, 1)).say("first")
        await uow.flush()
        task = asyncio.create_task(second())
        await until_somebody_waits(box)
    await task
    assert [payload for (payload,) in await written(box.engine, "payload")] == ['{"note":"first"}', '{"note":"second"}']


async def test_a_deadlock_inside_a_savepoint_ends_the_whole_transaction_on_mariadb(mariadb_database: Database) -> None:
    async with order_box(mariadb_database.url()) as box:
        await set_up(box)
        async with box.unit_of_work() as uow:
            uow.add(Parcel(id=1), Parcel(id=2))
        lock = text("UPDATE test_parcels SET status = 'x' WHERE id = :id")
        with pytest.raises(Exception, match=r"(?i)deadlock|invalid transaction|rolled back"):
            async with box.unit_of_work() as uow:
                uow.add(Order.place())
                await uow.flush()
                await uow.session.execute(lock, {"id": 1})
                async with box.engine.connect() as other:
                    # The other one has done more, so it is ours that the server gives up.
                    await other.execute(text("UPDATE test_parcels SET status = 'y' WHERE id = 2"))
                    for number in range(100, 200):
                        await other.execute(text(f"INSERT INTO test_parcels (id, status) VALUES ({number}, 'z')"))
                    waiting = asyncio.create_task(other.execute(lock, {"id": 1}))
                    with pytest.raises(DBAPIError, match=r"(?i)deadlock"):
                        async with uow.nested():
                            for _ in range(10):
                                await uow.session.execute(lock, {"id": 2})
                    await waiting
                    await other.rollback()
                uow.add(Order.place())
        assert await written(box.engine) == []


async def test_an_aggregate_that_moves_to_another_session_takes_its_events_along(box: Pillarbox) -> None:
    sessions = box.bind(async_sessionmaker(box.engine, expire_on_commit=False))
    async with sessions.begin() as session:
        session.add(Parcel(id=1))
    first, second = sessions(), sessions()
    parcel = await first.get_one(Parcel, 1)
    parcel.status = "moved"
    parcel.say("moved")
    first.expunge(parcel)
    second.add(parcel)
    await first.close()
    await second.commit()
    await second.close()
    assert await written(box.engine) == ["noted"]


async def test_merge_takes_the_events_of_children_along_and_gives_them_back(box: Pillarbox) -> None:
    async with box.unit_of_work() as uow:
        uow.add(Parcel(id=1, children=[Parcel(id=2)]))
    async with box.unit_of_work() as uow:
        parent = await uow.session.get_one(Parcel, 1, options=[selectinload(Parcel.children)])
    parent.children[0].status = "paid"
    parent.children[0].say("paid")
    async with box.unit_of_work() as uow:
        await uow.session.merge(parent)
        await uow.flush()
        await uow.rollback()
        await uow.session.merge(parent)
    assert await written(box.engine) == ["noted"]


async def test_an_object_that_was_deleted_and_rolled_back_begins_again_at_version_one(box: Pillarbox) -> None:
    order = Order.place()
    async with box.unit_of_work() as uow:
        uow.add(order)
        await uow.flush()
        await uow.session.delete(order)
        await uow.flush()
        await uow.rollback()
        order.id, order.total_cents = uuid4(), 1
        uow.add(order)
    assert await written(box.engine, "version") == [("1",)]


async def test_routes_are_registered_anew_in_another_database(box: Pillarbox) -> None:
    async with box.engine.begin() as connection:
        await connection.execute(text("DELETE FROM pillarbox_lanes"))
        await connection.execute(text("DELETE FROM pillarbox_routes"))
    await box.register()
    async with box.engine.connect() as connection:
        assert len((await connection.execute(select(lanes))).all()) == 16


async def test_what_is_registered_in_a_foreign_transaction_is_not_taken_for_granted(
    postgres_database: Database,
) -> None:
    async with order_box(postgres_database.url()) as box:
        await set_up(box)
        async with box.engine.begin() as connection:
            await connection.execute(text("DELETE FROM pillarbox_lanes"))
        box._outbox.forget()
        async with box.engine.connect() as connection:
            outer = await connection.begin()
            async with box.bind(async_sessionmaker(connection))() as session:
                box.publish(session, OrderNoted(note="undone"), key="k")
                await session.commit()
            await outer.rollback()
        async with box.unit_of_work() as uow:
            uow.publish(OrderNoted(note="kept"), key="k")
        [route] = (await box.store.census()).routes
        assert await box.store.take("r", lease=5, wanted={route: 100})


async def test_a_failed_flush_in_an_inner_unit_of_work_undoes_only_that_one(box: Pillarbox) -> None:
    async with box.unit_of_work() as uow:
        uow.add(order := Order.place())
    async with box.unit_of_work() as outer:
        outer.publish(OrderNoted(note="before"), key="k")
        with pytest.raises(IntegrityError):
            async with box.unit_of_work() as inner:
                inner.add(Order.place(order_id=order.id))
        outer.publish(OrderNoted(note="after"), key="k")
    assert await written(box.engine) == ["placed", "noted", "noted"]


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_transaction_that_postgresql_has_given_up_does_not_commit(
    postgres_database: Database, driver: str
) -> None:
    """It answers COMMIT with ROLLBACK, and drivers take that for a success."""
    async with order_box(postgres_database.url(driver)) as box:
        await set_up(box)
        again = text("INSERT INTO pillarbox_lanes SELECT * FROM pillarbox_lanes")
        with pytest.raises(DBAPIError, match="current transaction is aborted"):
            async with box.unit_of_work() as uow:
                uow.add(Order.place())
                await uow.flush()
                with suppress(IntegrityError):
                    await uow.session.execute(again)
        assert not uow.committed
        assert await written(box.engine) == []
        async with box.unit_of_work() as uow:
            uow.add(Order.place())
            await uow.flush()
            with suppress(IntegrityError):
                async with uow.session.begin_nested():
                    await uow.session.execute(again)
        assert await written(box.engine) == ["placed"], "a savepoint has kept it whole"


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_transaction_that_postgresql_has_given_up_for_an_outbox_row_does_not_commit(
    postgres_database: Database, driver: str
) -> None:
    """The row was refused, and the application takes back what it raised: nothing would write again before COMMIT."""
    async with order_box(postgres_database.url(driver)) as box:
        await set_up(box)
        async with box.unit_of_work() as uow:
            uow.publish(known := OrderNoted(note="x"), key="k")
        with pytest.raises(DBAPIError, match="current transaction is aborted"):
            async with box.unit_of_work() as uow:
                uow.add(order := Order.place())
                await uow.flush()
                order.raise_event(known)
                with pytest.raises(DuplicateEventError):
                    await uow.flush()
                order.pull_events()
        assert not uow.committed
        assert await written(box.engine) == ["noted"]


async def test_an_outer_unit_of_work_cannot_end_while_an_inner_one_is_open(box: Pillarbox) -> None:
    async with box.unit_of_work() as outer, box.unit_of_work():
        with pytest.raises(SessionError, match="still open"):
            await outer.commit()


async def test_a_unit_of_work_may_end_in_another_context(box: Pillarbox) -> None:
    uow = box.unit_of_work()
    await asyncio.get_running_loop().create_task(uow.__aenter__(), context=contextvars.copy_context())
    uow.publish(OrderNoted(note="x"), key="k")
    await uow.__aexit__(None, None, None)
    assert uow.committed
    assert await written(box.engine) == ["noted"]


async def test_a_plain_aggregate_can_be_used_again(box: Pillarbox) -> None:
    class Basket(Aggregate):
        id = "b"

    basket = Basket()
    for _ in range(2):
        basket.raise_event(OrderNoted(note="x"))
        async with box.unit_of_work() as uow:
            uow.add(basket)
    assert await written(box.engine) == ["noted", "noted"]


async def test_a_caster_cannot_change_what_other_routes_send(sqlite_database: Database) -> None:
    class Packed(IntegrationEvent, name="tests.packing.packed", version=2):
        items: list[int]

        @cached_property
        def secret(self) -> str:
            return "not a field"

    @downcaster("tests.packing.packed", from_version=2)
    def first_only(new: dict[str, list[int]]) -> dict[str, list[int]]:
        new["items"].pop()
        return new

    async with Pillarbox(
        sqlite_database.url(),
        transports={"broker": MemoryTransport()},
        routes=[
            Route("tests.packing.*", to="broker", topic="t", version=1),
            Route("tests.packing.*", to="broker", topic="t"),
        ],
    ) as box:
        await box.migrate()
        async with box.unit_of_work() as uow:
            event = Packed(items=[1, 2, 3], event_id=uuid4())
            assert event.secret
            uow.publish(event, key="k")
        assert sorted(await written(box.engine, "schema_version", "payload")) == [
            (1, '{"items":[1,2]}'),
            (2, '{"items":[1,2,3]}'),
        ]
