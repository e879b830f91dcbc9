"""Accounts, for proofs about consumers: their events, the ledger of them, three consumers, and the comparison.

Handlers write a row and raise an event for each event; a guarded projection must not miss one; another one adds up, and
has nothing but the inbox. Run as a program, it is a process with the three of them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
import uvloop
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import Aggregate, IntegrationEvent, Message, Pillarbox, RetryPolicy, Route, UnitOfWork
from pillarbox.consumers.consumer import Consumer
from pillarbox.projections import Add, Change, Projection, ProjectionRow, on
from pillarbox.stores.tables import claims
from pillarbox.transport import Subscriber
from pillarbox.transports.memory import MemoryTransport
from tests.prove.hostile import HostileSubscriber

TOPIC, REPORTS = "accounts", "reports"
RETRY = RetryPolicy(base=0.02, cap=0.5)


class Moved(IntegrationEvent, name="effects.account.moved"):
    """Money went in or out."""

    account_id: UUID
    customer: str
    cents: int
    note: str


class Closed(IntegrationEvent, name="effects.account.closed"):
    """Nothing is left of it. A later move opens it again."""

    account_id: UUID
    customer: str


class Reported(IntegrationEvent, name="effects.report.made"):
    """What follows from an event."""

    about: UUID


class Base(DeclarativeBase):
    pass


class Account(Aggregate, Base):
    """What the writer changes."""

    __tablename__ = "effects_accounts"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    customer: Mapped[str]
    events: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  SQLAlchemy's way


class Entry(Base):
    """The ledger, in the order of the events."""

    __tablename__ = "effects_ledger"

    id: Mapped[int] = mapped_column(primary_key=True)
    event_id: Mapped[UUID]
    account_id: Mapped[UUID]
    customer: Mapped[str]
    cents: Mapped[int | None]
    """None if it was closed."""
    note: Mapped[str]


class Effect(Base):
    """What a handler does. Nothing here would refuse a second row for an event."""

    __tablename__ = "effects_done"

    id: Mapped[int] = mapped_column(primary_key=True)
    event_id: Mapped[UUID]


class AccountRow(ProjectionRow, Base):
    __tablename__ = "effects_account_rows"

    account_id: Mapped[UUID] = mapped_column(primary_key=True)
    customer: Mapped[str]
    note: Mapped[str]
    cents: Mapped[int] = mapped_column(default=0)


class CustomerRow(ProjectionRow, Base):
    __tablename__ = "effects_customer_rows"

    customer: Mapped[str] = mapped_column(primary_key=True)
    cents: Mapped[int] = mapped_column(sa.BigInteger, default=0)
    events: Mapped[int] = mapped_column(default=0)


class AccountView(Projection, row=AccountRow):
    """Each row is what its last event says, in whatever order they come; sums are for `CustomerView`."""

    @on(Moved)
    def moved(self, event: Moved) -> Change:
        return self.put(account_id=event.account_id, customer=event.customer, note=event.note, cents=event.cents)

    @on(Closed)
    def closed(self, event: Closed) -> Change:
        return self.remove(account_id=event.account_id)


class CustomerView(Projection, row=CustomerRow, guarded=False):
    """Sums, which have no version to be guarded by."""

    @on(Moved)
    def moved(self, event: Moved) -> Change:
        return self.put(customer=event.customer, cents=Add(event.cents), events=Add(1))

    @on(Closed)
    def closed(self, event: Closed) -> Change:
        return self.put(customer=event.customer, events=Add(1))


HANDLERS = "effects"
GROUPS = (HANDLERS, AccountView.name, CustomerView.name)
ROUTES = [
    Route("effects.account.*", to="broker", topic=TOPIC),
    Route("effects.report.*", to="broker", topic=REPORTS),
]


def consumers(box: Pillarbox, source: str | Subscriber, **options: Any) -> list[Consumer]:
    """The three whose effects are compared."""
    effects = box.consumer(HANDLERS, source=source, topics=[TOPIC], max_messages=100, **options)

    @effects.on(Moved, Closed)
    async def report(event: Moved | Closed, uow: UnitOfWork) -> None:
        uow.add(Effect(event_id=event.event_id))
        uow.publish(Reported(about=event.event_id), key=str(event.account_id))

    accounts = box.projection(AccountView, source=source, topics=[TOPIC], batch=100, max_messages=400, **options)
    customers = box.projection(CustomerView, source=source, topics=[TOPIC], batch=500, max_messages=1_000, **options)
    return [effects, accounts, customers]


# -- what is compared --------------------------------------------------------------------------------------------------


class Balance(NamedTuple):
    """What is wrong; all zero if nothing is."""

    missing: int
    """Events without an effect."""
    doubled: int
    """Effects too many."""
    follow_ups_missing: int
    follow_ups_doubled: int
    mismatches: int
    """Rows of the guarded projection that are not what the ledger makes of them."""
    wrong_sums: int
    dead_letters: int
    waiting: int
    """Messages that were spilled and have not taken effect."""

    @property
    def holds(self) -> bool:
        return not any(self)


async def compare(box: Pillarbox, reports: Sequence[Message]) -> Balance:
    """The effects, against the ledger."""
    async with box.engine.connect() as connection:
        entries = (await connection.execute(sa.select(*Entry.__table__.columns).order_by(Entry.id))).all()
        effects = Counter((await connection.execute(sa.select(Effect.event_id))).scalars())
        columns = AccountRow.account_id, AccountRow.customer, AccountRow.note, AccountRow.cents
        rows = (await connection.execute(sa.select(*columns).where(~AccountRow.deleted))).all()
        sums = (await connection.execute(sa.select(CustomerRow.customer, CustomerRow.cents, CustomerRow.events))).all()
    wanted = {entry.event_id for entry in entries}
    # A relay may send one of these twice, too: that is no second event.
    causes = {message.headers["event_id"]: UUID(message.headers["causation_id"]) for message in reports}
    follow_ups = Counter(causes.values())
    return Balance(
        *_against(wanted, effects),
        *_against(wanted, follow_ups),
        mismatches=len({tuple(row) for row in rows} ^ fold(entries)),
        wrong_sums=len({tuple(row) for row in sums} ^ add_up(entries)),
        dead_letters=len([letter async for letter in box.dead_letters()]),
        waiting=await waiting(box),
    )


async def waiting(box: Pillarbox) -> int:
    """How many spilled messages have not taken effect."""
    async with box.engine.connect() as connection:
        return int((await connection.execute(sa.select(sa.func.count()).select_from(claims))).scalar_one())


def _against(wanted: set[UUID], found: Counter[UUID]) -> tuple[int, int]:
    """How many are missing, and how many there are too many."""
    return len(wanted - found.keys()), found.total() - len(wanted & found.keys())


def fold(entries: Iterable[Any]) -> set[tuple[Any, ...]]:
    """What `AccountView` should have."""
    rows: dict[UUID, tuple[Any, ...]] = {}
    for entry in entries:
        if entry.cents is None:
            rows.pop(entry.account_id, None)
            continue
        rows[entry.account_id] = entry.account_id, entry.customer, entry.note, entry.cents
    return {*rows.values()}


def add_up(entries: Iterable[Any]) -> set[tuple[Any, ...]]:
    """What `CustomerView` should have."""
    cents, events = Counter[str](), Counter[str]()
    for entry in entries:
        cents[entry.customer] += entry.cents or 0
        events[entry.customer] += 1
    return {(customer, cents[customer], number) for customer, number in events.items()}


# -- their life --------------------------------------------------------------------------------------------------------


async def set_up(box: Pillarbox) -> None:
    """The tables of both sides."""
    await box.migrate()
    async with box.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)


async def consume(url: str, socket: Path, name: str) -> None:
    """The life of such a process."""
    engine = create_async_engine(url, pool_size=14)
    async with Pillarbox(engine, transports={"broker": MemoryTransport()}, routes=ROUTES) as box:
        running = consumers(box, HostileSubscriber(socket, name), retry=RETRY, patience=5.0)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _stop, running)
        await asyncio.gather(*(consumer.run() for consumer in running))
    await engine.dispose()


def _stop(running: Sequence[Consumer]) -> None:
    for consumer in running:
        consumer.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="Consume until told to stop.")
    parser.add_argument("url")
    parser.add_argument("socket", type=Path)
    parser.add_argument("name")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    uvloop.run(consume(given.url, given.socket, given.name))


if __name__ == "__main__":
    main()
