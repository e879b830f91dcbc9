"""What the writers write, what consumers make of it, and what both are held against.

A writer raises the counter of a key, which locks its row, and publishes the new number. So the numbers of a key rise in
the order of commits, and the sum of all counters is how many events there are.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from ...consumers.handling import MessageContext
from ...event import IntegrationEvent
from ...projections import Add, Change, Projection, ProjectionRow, on
from ...route import Route
from ..demo.ledger import ledger_table

WRITERS = 3
KEYS = 20
"""Of each writer: one that hangs with locks in its hands holds up nobody else."""
TOPIC = "persistent://public/default/chaos"

metadata = sa.MetaData()
ledger = ledger_table(metadata, "chaos_ledger")
counters = sa.Table(
    "chaos_counters",
    metadata,
    sa.Column("key", sa.String(20), primary_key=True),
    sa.Column("number", sa.Integer, nullable=False),
)
route = Route("chaos.thing.*", to="pulsar", topic=TOPIC)


effects = sa.Table(
    "chaos_effects",
    metadata,
    sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
    sa.Column("event_id", sa.Uuid, nullable=False),
)
"""A row for each time that an event took effect."""


class Base(DeclarativeBase):
    """The tables that have a class."""

    metadata = metadata


class ThingRow(ProjectionRow, Base):
    """How many events of a thing have come in."""

    __tablename__ = "chaos_things"

    key: Mapped[str] = mapped_column(sa.String(20), primary_key=True)
    number: Mapped[int]


class Counted(IntegrationEvent, name="chaos.thing.counted"):
    """Something has happened to a thing, for the n-th time."""

    number: int


class Things(Projection, row=ThingRow, guarded=False):
    """Counts: an event too few or too many shows for ever."""

    @on(Counted)
    def counted(self, _event: Counted, context: MessageContext) -> Change:
        """One more."""
        return self.put(key=context.key, number=Add(1))


def keys(writer: int) -> list[str]:
    """The keys of a writer."""
    return [f"thing-{writer}-{number}" for number in range(KEYS)]
