"""``pillarbox demo``: the write side under load, with a ledger that tells whether it kept its promises.

Writers place and reprice orders at the same time. Some change their mind, some roll back a savepoint, some meet at the
same order and lose. Every event is also entered in a ledger, by the transaction that raises it; when all is quiet,
ledger and outbox must agree, event by event. The tables and the route carry the name of the run, and go with it.
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from secrets import token_hex
from uuid import UUID

import click
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from .. import clock
from ..aggregate import Aggregate
from ..app import Pillarbox
from ..context import event_context
from ..errors import CommitOutcomeUnknown, ConcurrencyError
from ..event import IntegrationEvent
from ..route import Route
from ..settings import Settings
from ..stores.columns import ByteExact
from ..stores.schema import check_schema
from ..stores.tables import lanes, outbox, routes
from ..transports.memory import MemoryTransport
from ..unit_of_work import UnitOfWork
from .database import load_settings, opened, run
from .output import CommandError, Exit, emit, options, shown, table

WRITERS = 8
TENANTS = ("acme", "globex", "initech")
HOT_ORDERS = 4  # of each tenant are repriced: few, so that writers meet
RUN = token_hex(4)


class OrderPlaced(IntegrationEvent, name="demo.order.placed"):
    """An order has come in."""

    total_cents: int


class OrderRepriced(IntegrationEvent, name="demo.order.repriced"):
    """An order costs something else now."""

    total_cents: int


class Base(DeclarativeBase):
    """The tables of this run."""


class Order(Aggregate, Base):
    """The business of the demo."""

    __tablename__ = f"pillarbox_demo_orders_{RUN}"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    total_cents: Mapped[int]
    version: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  SQLAlchemy's way


ledger = sa.Table(
    f"pillarbox_demo_ledger_{RUN}",
    Base.metadata,
    sa.Column("event_id", sa.Uuid, primary_key=True),
    sa.Column("tenant", ByteExact(200), nullable=False),
    sa.Column("key", ByteExact(512), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
)
route = Route("demo.order.*", to=f"demo-{RUN}", topic=f"pillarbox.demo.{RUN}")


@dataclass(frozen=True, slots=True)
class Balance:
    """What ledger and outbox say, side by side."""

    committed: int
    written: int
    lost: int
    ghosts: int
    out_of_order: int
    rolled_back: int
    transactions_per_second: float
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether every committed event is in the outbox once, in the order of its key, and nothing else is."""
        return self.committed == self.written and not (self.lost or self.ghosts or self.out_of_order)


@click.command()
@click.option("--seconds", type=click.FloatRange(0, 3600, min_open=True), default=10.0, show_default=True)
@options
def command(config: Path | None, as_json: bool, seconds: float) -> None:
    """Write under load for some seconds, then compare ledger and outbox.

    Runs on a database of its own within the embedded PostgreSQL or, if database_url is set, on that database, which
    must be migrated. Whatever the demo writes there it removes. Exits with 1 if the figures do not balance.
    """
    balance = run(_demo(load_settings(config), seconds))
    figures = [(name.replace("_", " "), shown(value)) for name, value in asdict(balance).items()]
    emit(asdict(balance), table(figures), as_json=as_json)
    if not balance.holds:
        raise CommandError("ledger and outbox do not agree: please report it, with the figures", Exit.PROBLEM)


async def _demo(settings: Settings, seconds: float) -> Balance:
    async with opened(settings, embedded="pillarbox_demo") as engine:
        transports = {route.to: MemoryTransport()}
        box = Pillarbox(engine, transports=transports, routes=[route], shards=settings.shards, tenancy=settings.tenancy)
        if settings.database_url is None:
            await box.migrate()
        async with _tables(engine):
            await box.register()
            shop = _Shop(box)
            with event_context(source_service=settings.service.name, source_version=settings.service.version):
                elapsed = await shop.open_for(seconds)
            async with engine.connect() as connection:
                figures = await connection.run_sync(_compare)
    return Balance(*figures, shop.rolled_back, round(shop.transactions / elapsed, 1), round(elapsed, 3))


@asynccontextmanager
async def _tables(engine: AsyncEngine) -> AsyncIterator[None]:
    """The tables of this run; whatever happens, nothing of it is left behind."""
    async with engine.connect() as connection:
        await connection.run_sync(check_schema)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        yield
    finally:
        async with engine.begin() as connection:
            await connection.execute(sa.delete(outbox).where(outbox.c.route == route.record.id))
            await connection.execute(sa.delete(lanes).where(lanes.c.route == route.record.id))
            await connection.execute(sa.delete(routes).where(routes.c.id == route.record.id))
            await connection.run_sync(Base.metadata.drop_all)


class _ChangedItsMind(Exception):  # noqa: N818  an outcome, not a failure
    """The business rolls back."""


class _Shop:
    """The writers, and what they count."""

    def __init__(self, box: Pillarbox) -> None:
        self._box = box
        self._orders: defaultdict[str, deque[UUID]] = defaultdict(lambda: deque(maxlen=HOT_ORDERS))
        self.transactions = 0
        self.rolled_back = 0

    async def open_for(self, seconds: float) -> float:
        """Let the writers work; how long it took."""
        started = clock.current().monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                writers = [group.create_task(self._write(number, started + seconds)) for number in range(WRITERS)]
                if sys.stderr.isatty():
                    await self._tell(writers, started)
        except ExceptionGroup as failed:  # one reason is enough: they share the database
            raise failed.exceptions[0] from None
        return clock.current().monotonic() - started

    async def _write(self, number: int, until: float) -> None:
        for turn in count(number):
            if clock.current().monotonic() >= until:
                return
            tenant = TENANTS[turn % len(TENANTS)]
            try:
                placed = await self._unit(turn, tenant)
            except (_ChangedItsMind, ConcurrencyError):
                self.rolled_back += 1
                continue
            except CommitOutcomeUnknown as unknown:
                raise ConnectionError("the connection broke while COMMIT was on its way") from unknown
            self.transactions += 1
            if placed is not None:  # only now do others know of it
                self._orders[tenant].append(placed)

    async def _unit(self, turn: int, tenant: str) -> UUID | None:
        """One business transaction; the order that it placed."""
        known = self._orders[tenant]
        async with self._box.unit_of_work(tenant=tenant) as uow:
            if turn % 4 == 0 or not known:
                return await _place(uow, tenant, turn)
            if turn % 7 == 0:
                savepoint = await uow.session.begin_nested()
                await _reprice(uow, tenant, known[0], turn)
                await savepoint.rollback()
                self.rolled_back += 1
                return await _place(uow, tenant, turn)
            await _reprice(uow, tenant, known[turn % len(known)], turn)
            if turn % 10 == 0:
                raise _ChangedItsMind
            return None

    async def _tell(self, writers: list[asyncio.Task[None]], started: float) -> None:
        while any(not writer.done() for writer in writers):
            passed = clock.current().monotonic() - started
            line = f"\r{passed:5.1f} s  {self.transactions:,} committed, {self.rolled_back:,} rolled back "
            click.echo(line, err=True, nl=False)
            await asyncio.wait(writers, timeout=0.5)
        click.echo(err=True)


async def _place(uow: UnitOfWork, tenant: str, total_cents: int) -> UUID:
    order = Order(id=clock.current().new_id(), total_cents=total_cents)
    uow.add(order)
    await _raise(uow, tenant, order, OrderPlaced(total_cents=total_cents))
    return order.id


async def _reprice(uow: UnitOfWork, tenant: str, order_id: UUID, total_cents: int) -> None:
    order = await uow.session.get_one(Order, order_id)
    order.total_cents = total_cents
    await _raise(uow, tenant, order, OrderRepriced(total_cents=total_cents))


async def _raise(uow: UnitOfWork, tenant: str, order: Order, event: IntegrationEvent) -> None:
    """Raise the event and enter it in the ledger. The flush comes between: it gives the order its version."""
    order.raise_event(event)
    await uow.flush()
    entry = {"event_id": event.event_id, "tenant": tenant, "key": str(order.id), "version": order.version}
    await uow.session.execute(sa.insert(ledger).values(entry))


def _compare(connection: sa.Connection) -> tuple[int, int, int, int, int]:
    """Committed, written, lost, ghosts, out of order."""
    ours = outbox.c.route == route.record.id
    same = sa.and_(
        ours,
        outbox.c.event_id == ledger.c.event_id,
        outbox.c.tenant == ledger.c.tenant,
        outbox.c.key == ledger.c.key,
    )

    def number(source: sa.FromClause, *conditions: sa.ColumnElement[bool]) -> int:
        return connection.execute(sa.select(sa.func.count()).select_from(source).where(*conditions)).scalar_one()

    before = sa.func.lag(ledger.c.version).over(partition_by=ledger.c.key, order_by=outbox.c.id).label("before")
    steps = sa.select(ledger.c.version, before).select_from(ledger.join(outbox, same)).subquery()
    return (
        number(ledger),
        number(outbox, ours),
        number(ledger, ~sa.exists().where(same).correlate(ledger)),
        number(outbox, ours, ~sa.exists().where(same).correlate(outbox)),
        number(steps, steps.c.version <= steps.c.before),
    )
