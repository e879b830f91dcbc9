"""A small domain that many tests share: orders and their events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import ForeignKey, String, text
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from pillarbox import Aggregate, Event, IntegrationEvent, Pillarbox, Route, register_event
from pillarbox.transports.memory import MemoryTransport


class OrderPlaced(IntegrationEvent, name="tests.order.placed", version=1):
    order_id: UUID
    total_cents: int


class OrderRepriced(IntegrationEvent, name="tests.order.repriced", version=1):
    order_id: UUID
    total_cents: int


class OrderNoted(IntegrationEvent, name="tests.order.noted", version=1):
    note: str


class OrderCancelled(IntegrationEvent, name="tests.order.cancelled", version=1):
    order_id: UUID


@register_event("tests.order.jotted")
@dataclass(frozen=True)
class OrderJotted:
    """An event of a class of one's own, which carries no id."""

    note: str


class DiscountConsidered(Event, name="tests.order.discount_considered", version=1):
    order_id: UUID


class Base(DeclarativeBase):
    pass


class Order(Aggregate, Base):
    __tablename__ = "test_orders"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    total_cents: Mapped[int]
    version: Mapped[int] = mapped_column(default=0)
    lines: Mapped[list[Line]] = relationship(lazy="selectin")
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  SQLAlchemy's way

    @classmethod
    def place(cls, total_cents: int = 100, order_id: UUID | None = None) -> Order:
        order = cls(id=order_id or uuid4(), total_cents=total_cents)
        order.raise_event(OrderPlaced(order_id=order.id, total_cents=total_cents))
        return order

    def reprice(self, total_cents: int) -> None:
        self.total_cents = total_cents
        self.raise_event(OrderRepriced(order_id=self.id, total_cents=total_cents))

    def note(self, note: str) -> None:
        """Says something and changes nothing."""
        self.raise_event(OrderNoted(note=note))

    def cancel(self) -> None:
        self.raise_event(OrderCancelled(order_id=self.id))


class Line(Base):
    __tablename__ = "test_lines"

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    order_id: Mapped[UUID] = mapped_column(ForeignKey("test_orders.id"))
    article: Mapped[str] = mapped_column(String(50))


def order_box(engine: AsyncEngine | str, **options: Any) -> Pillarbox:
    """A box for this domain."""
    return Pillarbox(
        engine,
        transports={"broker": MemoryTransport()},
        routes=[Route("tests.order.*", to="broker", topic="tests.order.events")],
        **options,
    )


async def set_up(box: Pillarbox) -> None:
    """Migrate and make the domain's tables."""
    await box.migrate()
    async with box.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)


async def written(engine: AsyncEngine, *columns: str) -> Sequence[Any]:
    """What is in the outbox, oldest first: event types, or the columns that are asked for."""
    async with engine.connect() as connection:
        rows = await connection.execute(text("SELECT * FROM outbox_events ORDER BY id"))
        if not columns:
            return [row.event_type.removeprefix("tests.order.") for row in rows]
        return [tuple(row._mapping[column] for column in columns) for row in rows]


async def until_somebody_waits(box: Pillarbox) -> None:
    """Until a backend of this database waits for a lock."""
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    # It may be a process that has to start first, on a machine that has much else to do.
    async with asyncio.timeout(60), box.engine.connect() as connection:
        while not (await connection.execute(waiting)).scalar():
            await connection.rollback()
            await asyncio.sleep(0.01)


async def make_due(engine: AsyncEngine) -> None:
    """What waits for another try has waited long enough."""
    async with engine.begin() as connection:
        await connection.execute(
            text("UPDATE pillarbox_failures SET available_at = '2020-01-01' WHERE status = 'RETRYING'")
        )
