"""A service that is asked questions, and its consumer, which writes an effect for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from sqlalchemy import String, select
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import IntegrationEvent, Message, Pillarbox, RetryPolicy, Route, UnitOfWork, upcaster
from pillarbox.consumers.consumer import Consumer
from pillarbox.consumers.spilling import with_body
from pillarbox.inbox import DeadLetter
from pillarbox.outbox import Direction
from pillarbox.stores import inspection, operations
from pillarbox.stores.audit import Author
from pillarbox.stores.inspection import Details, Filter
from pillarbox.stores.operations import Action, Run, Selection
from pillarbox.transports.memory import MemoryTransport
from tests.servers import Database

TOPIC, REPLIES = "consumed", "replied"
QUICKLY = RetryPolicy(base=0.001, cap=0.01)
ANNA = Author("anna", "the test wants it")


class Asked(IntegrationEvent, name="test.consumer.asked", version=2):
    subject: str
    number: int


class Answered(IntegrationEvent, name="test.consumer.answered"):
    subject: str


@upcaster("test.consumer.asked", from_version=1)
def _number(payload: dict[str, Any]) -> dict[str, Any]:
    return {**payload, "number": 0}


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "effects"

    id: Mapped[int] = mapped_column(primary_key=True)
    event_id: Mapped[UUID]
    subject: Mapped[str] = mapped_column(String(100))
    number: Mapped[int]


@asynccontextmanager
async def open_box(database: Database) -> AsyncIterator[tuple[Pillarbox, MemoryTransport]]:
    engine = create_async_engine(database.url())
    broker = MemoryTransport()
    routes = [
        Route("test.consumer.asked", to="broker", topic=TOPIC),
        Route("test.consumer.answered", to="broker", topic=REPLIES),
    ]
    async with Pillarbox(engine, transports={"broker": broker}, routes=routes) as box:
        await box.migrate()
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        yield box, broker
    await engine.dispose()


async def ask(box: Pillarbox, *questions: tuple[str, int], tenant: str | None = "acme") -> list[Asked]:
    events = [Asked(subject=subject, number=number) for subject, number in questions]
    async with box.unit_of_work(tenant=tenant) as uow:
        for event in events:
            uow.publish(event, key=event.subject)
    await box.relay().drain()
    return events


def answering(box: Pillarbox, name: str = "answers", **options: Any) -> Consumer:
    """A consumer that writes an effect for each question."""
    consumer = box.consumer(name, source="broker", topics=[TOPIC], **{"retry": QUICKLY, **options})

    @consumer.on(Asked)
    async def write(event: Asked, uow: UnitOfWork) -> None:
        uow.add(Effect(event_id=event.event_id, subject=event.subject, number=event.number))

    return consumer


async def effects(box: Pillarbox) -> list[tuple[str, int]]:
    async with box.unit_of_work() as uow:
        found = await uow.session.execute(select(Effect.subject, Effect.number).order_by(Effect.id))
        return [(subject, number) for subject, number in found]


async def dead_letters(box: Pillarbox, **wanted: Any) -> list[DeadLetter]:
    return [letter async for letter in box.dead_letters(**wanted)]


async def ask_for(box: Pillarbox, action: Action, consumer: str = "answers", *events: UUID) -> int:
    """Redrive or discard what has failed in the lanes of a consumer, as an operator does; how many are meant."""
    selection = Selection(action, Filter(route=f"consumer:{consumer}", direction=Direction.INBOUND), events)
    async with box.engine.begin() as connection:
        run = await connection.run_sync(operations.request, selection, ANNA, Run(), 1_000)
    return run.requested


async def redrive(box: Pillarbox, consumer: Consumer) -> None:
    """Let what has failed in its lanes be tried again, and wait for what comes of it."""
    assert await ask_for(box, Action.REDRIVE, consumer.name)
    await consumer.drain()


async def delivery_of(box: Pillarbox, event_id: UUID) -> Details:
    """The one delivery of an event that waits in an inbound lane, or has."""
    async with box.engine.connect() as connection:
        found = await connection.run_sync(inspection.deliveries_of, event_id, payload=False)
    [delivery] = [each for each in found if each.direction is Direction.INBOUND]
    return delivery


async def edit(box: Pillarbox, event_id: UUID, body: bytes) -> None:
    """Give a failed delivery another body, as an operator does."""
    delivery = await delivery_of(box, event_id)
    async with box.engine.begin() as connection:
        stored = await connection.run_sync(inspection.body_of, delivery)
        new = with_body(Message(delivery.topic, delivery.key, stored, delivery.headers), body)
        entry = await connection.run_sync(operations.edit, delivery, ANNA, old=b"", new=new, event_id=event_id)
        assert entry is not None


def fail_once(consumer: Consumer, error: Callable[[], Exception]) -> list[int]:
    """The first call for number 2 fails, after the effect of another handler."""
    calls: list[int] = []

    @consumer.on(Asked)
    async def fail(event: Asked) -> None:
        calls.append(event.number)
        if event.number == 2 and calls.count(2) == 1:
            raise error()

    return calls


def fail_for(consumer: Consumer, subjects: str) -> list[str]:
    """Every call for subjects that begin so fails. All that are tried come back."""
    tried: list[str] = []

    @consumer.on(Asked)
    async def fail(event: Asked) -> None:
        tried.append(event.subject)
        if event.subject.startswith(subjects):
            raise ConnectionError("its server is away")

    return tried
