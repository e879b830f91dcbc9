"""The other end, from a user's chair: this program runs unchanged, on the embedded PostgreSQL, on SQLite and on MariaDB.

python consumer.py [SQLAlchemy URL]
"""

import asyncio
import sys
from uuid import UUID, uuid4

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import Aggregate, IntegrationEvent, Pillarbox, Reject, Route, UnitOfWork
from pillarbox.transports.memory import MemoryTransport


class OrderPlaced(IntegrationEvent, name="orders.order.placed", version=1):
    order_id: UUID
    total_cents: int


class InvoiceIssued(IntegrationEvent, name="billing.invoice.issued", version=1):
    order_id: UUID


class Base(DeclarativeBase):
    pass


class Invoice(Aggregate, Base):
    __tablename__ = "invoices"

    order_id: Mapped[UUID] = mapped_column(primary_key=True)
    total_cents: Mapped[int]

    @classmethod
    def issue(cls, order_id: UUID, total_cents: int) -> "Invoice":
        invoice = cls(order_id=order_id, total_cents=total_cents)
        invoice.raise_event(InvoiceIssued(order_id=order_id))
        return invoice


async def main(url: str | None) -> None:
    broker = MemoryTransport()
    calls: dict[UUID, int] = {}
    run = uuid4().hex[:8]  # a consumer and topics of its own for every run of this program
    name, orders_topic, invoices_topic = f"billing-{run}", f"orders.order.{run}", f"billing.invoice.{run}"
    engine = create_async_engine(url) if url else None
    async with Pillarbox(
        engine,
        transports={"broker": broker},
        routes=[
            Route("orders.order.*", to="broker", topic=orders_topic, name=f"orders-{run}"),
            Route("billing.invoice.*", to="broker", topic=invoices_topic, name=f"invoices-{run}"),
        ],
    ) as box:
        await box.migrate()
        async with box.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)

        billing = box.consumer(name, source="broker", topics=[orders_topic])

        @billing.on(OrderPlaced)
        async def issue_invoice(event: OrderPlaced, uow: UnitOfWork) -> None:
            calls[event.order_id] = calls.get(event.order_id, 0) + 1
            if event.total_cents < 0:
                raise Reject("a negative total cannot be invoiced")
            if event.total_cents == 7 and calls[event.order_id] == 1:
                raise ConnectionError("the tax service is away for a moment")
            uow.add(Invoice.issue(event.order_id, event.total_cents))

        orders = [OrderPlaced(order_id=uuid4(), total_cents=cents) for cents in (100, 7, -1, 300)]
        async with box.unit_of_work(tenant="acme") as uow:
            for order in orders:
                uow.publish(order, key=str(order.order_id))

        await box.relay().drain()
        await billing.drain()
        broker.redeliver(orders_topic)  # all of it once more, as any broker may
        await billing.drain()
        await box.relay().drain()

        async with box.unit_of_work(tenant="acme") as uow:
            mine = Invoice.order_id.in_([order.order_id for order in orders])
            invoices = await uow.session.scalar(select(func.count()).select_from(Invoice).where(mine))
        rejected = [letter async for letter in box.dead_letters(consumer=name)]
    if engine:
        await engine.dispose()

    issued = broker.sent(invoices_topic)
    assert invoices == 3, invoices
    assert len(issued) == 3 and all(m.headers["tenant_id"] == "acme" for m in issued), issued
    placed = {m.headers["event_id"] for m in broker.sent(orders_topic)}
    assert {m.headers["causation_id"] for m in issued} <= placed
    assert [letter.reason for letter in rejected] == ["a negative total cannot be invoiced"], rejected
    assert calls[orders[1].order_id] == 2 and calls[orders[0].order_id] == 1, calls
    print("3 invoices from 4 orders delivered twice; 1 rejected with its reason; 1 retried; 3 events went on")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
