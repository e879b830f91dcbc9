"""Orders, and what happens to them. Nothing here knows of HTTP, relays or the warehouse."""

from __future__ import annotations

from enum import StrEnum
from uuid import UUID, uuid4

from sqlalchemy import String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import Aggregate, Event, IntegrationEvent


class OrderPlaced(IntegrationEvent, name="orders.order.placed", version=1):
    """The warehouse has something to send."""

    order_id: UUID
    customer: str
    article: str
    quantity: int


class OrderCancelled(IntegrationEvent, name="orders.order.cancelled", version=1):
    """The warehouse need not send it."""

    order_id: UUID


class OrderRepriced(Event, name="orders.order.repriced", version=1):
    """A matter between us and the customer: a plain `Event` stays inside this service."""

    order_id: UUID
    total_cents: int


class OrderError(Exception):
    """The order does not allow it."""


class Status(StrEnum):
    PLACED = "placed"
    CANCELLED = "cancelled"


class Base(DeclarativeBase):
    pass


class Order(Aggregate, Base):
    """Changes by its own methods only, and each of them raises an event."""

    __tablename__ = "orders"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    customer: Mapped[str] = mapped_column(String(100))
    article: Mapped[str] = mapped_column(String(100))
    quantity: Mapped[int]
    total_cents: Mapped[int]
    status: Mapped[Status] = mapped_column(String(20))
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  SQLAlchemy's way

    @classmethod
    def place(cls, customer: str, article: str, quantity: int, total_cents: int) -> Order:
        order = cls(
            id=uuid4(),
            customer=customer,
            article=article,
            quantity=quantity,
            total_cents=total_cents,
            status=Status.PLACED,
        )
        order.raise_event(OrderPlaced(order_id=order.id, customer=customer, article=article, quantity=quantity))
        return order

    def reprice(self, total_cents: int) -> None:
        self._check_open()
        self.total_cents = total_cents
        self.raise_event(OrderRepriced(order_id=self.id, total_cents=total_cents))

    def cancel(self) -> None:
        self._check_open()
        self.status = Status.CANCELLED
        self.raise_event(OrderCancelled(order_id=self.id))

    def _check_open(self) -> None:
        if self.status == Status.CANCELLED:
            raise OrderError("the order is cancelled")


class Notice(Base):
    """What we have written to the customer, one for each event."""

    __tablename__ = "notices"

    event_id: Mapped[UUID] = mapped_column(primary_key=True)
    order_id: Mapped[UUID] = mapped_column(index=True)
    text: Mapped[str] = mapped_column(String(200))
