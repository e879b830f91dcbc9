"""The order service of the demo: several writers under load, whose transactions do not all commit.

Writers place, change and cancel orders at the same time. Some change their mind, some roll back a savepoint, some meet
at the same order and lose. Every event is entered in the ledger by the transaction that raises it. The tables and the
route carry the name of the run, and go with it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from secrets import token_hex
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from ... import clock
from ...aggregate import Aggregate
from ...app import Pillarbox
from ...errors import CommitOutcomeUnknown, ConcurrencyError
from ...event import IntegrationEvent
from ...retry import RetryPolicy
from ...route import Route
from ...stores.tables import audit, lanes, outbox, relays, requests, routes
from ...unit_of_work import UnitOfWork
from .ledger import ledger_table
from .sink import POISONED

WRITERS = 6
RATE = 250.0  # transactions per second that the writers try for; a slower machine does what it can
TENANTS = ("acme", "globex", "initech")
HOT_ORDERS = 4  # of each tenant are changed: few, so that writers meet
RUN = token_hex(4)
OPERATOR = f"pillarbox demo {RUN}"


class OrderPlaced(IntegrationEvent, name="demo.order.placed"):
    """An order has come in."""

    total_cents: int


class OrderChanged(IntegrationEvent, name="demo.order.changed"):
    """An order costs something else now."""

    total_cents: int


class OrderCancelled(IntegrationEvent, name="demo.order.cancelled"):
    """Nobody wants it any more."""


class OrderPoisoned(IntegrationEvent, name=POISONED):
    """Something that the sink cannot digest until it is mended."""


class Base(DeclarativeBase):
    """The tables of this run."""


class Order(Aggregate, Base):
    """The business of the demo."""

    __tablename__ = f"pillarbox_demo_orders_{RUN}"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    total_cents: Mapped[int]
    version: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  SQLAlchemy's way


ledger = ledger_table(Base.metadata, f"pillarbox_demo_ledger_{RUN}")
route = Route(
    "demo.order.*",
    to=f"demo-{RUN}",
    topic=f"pillarbox.demo.{RUN}",
    retry=RetryPolicy(base=0.3, cap=1.0, attempts=3),  # a person in a hurry wants to see it fail
)


@asynccontextmanager
async def tables(engine: AsyncEngine) -> AsyncIterator[None]:
    """The tables of this run; whatever happens, nothing of it is left behind."""
    try:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        yield
    finally:
        async with engine.begin() as connection:
            for table in (requests, outbox, lanes):
                await connection.execute(sa.delete(table).where(table.c.route == route.record.id))
            await connection.execute(sa.delete(routes).where(routes.c.id == route.record.id))
            await connection.execute(sa.delete(relays).where(relays.c.name.like(f"{route.to}/%")))
            await connection.execute(sa.delete(audit).where(audit.c.who == OPERATOR))
            await connection.run_sync(Base.metadata.drop_all)


_Business = Callable[[UnitOfWork], Awaitable[tuple[Order, IntegrationEvent]]]


class _ChangedItsMind(Exception):  # noqa: N818  an outcome, not a failure
    """The business rolls back."""


class Shop:
    """The writers, and what they count."""

    def __init__(self, box: Pillarbox) -> None:
        self.box = box
        self._orders: defaultdict[str, deque[UUID]] = defaultdict(lambda: deque(maxlen=HOT_ORDERS))
        self._poisoned: deque[tuple[str, UUID]] = deque()
        self._next_slot = 0.0
        self._closed = False
        self.asked: dict[str, float] = {}
        """When COMMIT was asked for, by event id. What was rolled back is not in it."""
        self.committed = 0
        self.rolled_back = 0

    async def open(self) -> None:
        """Let the writers work until the shop is closed."""
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(WRITERS):
                    group.create_task(self._write(number))
        except ExceptionGroup as failed:  # one reason is enough: they share the database
            raise failed.exceptions[0] from None

    def close(self) -> None:
        """Let the writers finish what they have begun."""
        self._closed = True

    async def poison(self) -> UUID:
        """Let an order raise what the sink cannot digest; the event. The order goes on, and its later events wait."""
        while not any(self._orders.values()):
            await self._slot()
        tenant, known = next((tenant, known) for tenant, known in self._orders.items() if known)
        order_id = known.popleft()  # so that nobody cancels it
        event = OrderPoisoned()
        while not await self._commits(tenant, partial(_change, tenant=tenant, order_id=order_id, event=event)):
            await self._slot()  # somebody else changed the order first
        self._poisoned.append((tenant, order_id))
        return event.event_id

    async def _write(self, number: int) -> None:
        for turn in count(number):
            await self._slot()
            if self._closed:
                return
            if turn % 20 == 0 and self._poisoned:
                tenant, order_id = self._poisoned[0]
                self._poisoned.rotate()
                await self._commits(tenant, partial(_change, tenant=tenant, order_id=order_id, event=_changed(turn)))
            else:
                tenant = TENANTS[turn % len(TENANTS)]
                await self._commits(tenant, partial(self._business, tenant=tenant, turn=turn))

    async def _slot(self) -> None:
        """Wait for a place in the stream of transactions."""
        now = clock.current().monotonic()
        self._next_slot = max(now, self._next_slot) + 1 / RATE
        await asyncio.sleep(self._next_slot - now)

    async def _commits(self, tenant: str, business: _Business) -> bool:
        """Run a business transaction; whether it committed."""
        event_id = None
        try:
            async with self.box.unit_of_work(tenant=tenant) as uow:
                order, event = await business(uow)
                event_id = str(event.event_id)
                self.asked[event_id] = clock.now().timestamp()
        except (_ChangedItsMind, ConcurrencyError):
            self.rolled_back += 1
            self.asked.pop(event_id or "", None)
            return False
        except CommitOutcomeUnknown as unknown:
            raise ConnectionError("the connection broke while COMMIT was on its way") from unknown
        self.committed += 1
        if isinstance(event, OrderPlaced):  # only now do others know of it
            self._orders[tenant].append(order.id)
        return True

    async def _business(self, uow: UnitOfWork, *, tenant: str, turn: int) -> tuple[Order, IntegrationEvent]:
        known = self._orders[tenant]
        if turn % 4 == 0 or not known:
            return await _place(uow, tenant, turn)
        if turn % 7 == 0:
            savepoint = await uow.session.begin_nested()
            await _change(uow, tenant, known[0], _changed(turn))
            await savepoint.rollback()
            self.rolled_back += 1
            return await _place(uow, tenant, turn)
        if turn % 9 == 0:
            return await _change(uow, tenant, known.popleft(), OrderCancelled())
        changed = await _change(uow, tenant, known[turn % len(known)], _changed(turn))
        if turn % 10 == 0:
            raise _ChangedItsMind
        return changed


async def _place(uow: UnitOfWork, tenant: str, total_cents: int) -> tuple[Order, IntegrationEvent]:
    order = Order(id=clock.new_id(), total_cents=total_cents)
    uow.add(order)
    return await _raise(uow, tenant, order, OrderPlaced(total_cents=total_cents))


async def _change(
    uow: UnitOfWork, tenant: str, order_id: UUID, event: IntegrationEvent
) -> tuple[Order, IntegrationEvent]:
    order = await uow.session.get_one(Order, order_id)
    if isinstance(event, OrderChanged):
        order.total_cents = event.total_cents
    return await _raise(uow, tenant, order, event)


async def _raise(uow: UnitOfWork, tenant: str, order: Order, event: IntegrationEvent) -> tuple[Order, IntegrationEvent]:
    """Raise the event and enter it in the ledger. The flush comes between: it gives the order its version."""
    order.raise_event(event)
    await uow.flush()
    entry = {"event_id": event.event_id, "tenant": tenant, "key": str(order.id), "version": order.version}
    await uow.session.execute(sa.insert(ledger).values(entry))
    return order, event


def _changed(total_cents: int) -> OrderChanged:
    return OrderChanged(total_cents=total_cents)
