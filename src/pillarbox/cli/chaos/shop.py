"""What the writers write, and what it is held against: the tables, the event and its route.

A writer raises the counter of a key, which locks its row, and publishes the new number. So the numbers of a key rise in
the order of commits, and the sum of all counters is how many events there are.
"""

from __future__ import annotations

import sqlalchemy as sa

from ...event import IntegrationEvent
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


class Counted(IntegrationEvent, name="chaos.thing.counted"):
    """Something has happened to a thing, for the n-th time."""

    number: int


def keys(writer: int) -> list[str]:
    """The keys of a writer."""
    return [f"thing-{writer}-{number}" for number in range(KEYS)]
