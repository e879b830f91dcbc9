"""The ledger: what the database committed, compared with what the sink has in its file.

Every business transaction also enters its events here, so the ledger holds exactly what was committed. Nothing else is
asked: not the outbox, not the relays, not the writers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

import sqlalchemy as sa

from ...stores.columns import ByteExact
from .sink import Arrival

_AROUND = 2.0  # seconds: what was sent this long before a fault may not have been settled yet


class Entry(NamedTuple):
    """A committed event: where it stands within its key."""

    tenant: str | None
    key: str
    version: int


def ledger_table(metadata: sa.MetaData, name: str) -> sa.Table:
    """The table that business transactions enter their events in."""
    return sa.Table(
        name,
        metadata,
        sa.Column("event_id", sa.Uuid, primary_key=True),
        sa.Column("tenant", ByteExact(200)),
        sa.Column("key", ByteExact(512), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
    )


def read_ledger(connection: sa.Connection, ledger: sa.Table) -> dict[str, Entry]:
    """All that was committed, by event id."""
    found = connection.execute(sa.select(ledger.c.event_id, ledger.c.tenant, ledger.c.key, ledger.c.version))
    return {str(event_id): Entry(tenant, key, version) for event_id, tenant, key, version in found}


class Kind(StrEnum):
    """What can go wrong."""

    KILL = "kill"
    FREEZE = "freeze"
    STOP_SINK = "stop_sink"
    POISON = "poison"
    STALL = "stall"
    """Not done by us: a relay lost a lease, or did not wait for an answer, because something was too slow."""


@dataclass(slots=True)
class Fault:
    """Something that went wrong, and when."""

    kind: Kind
    target: str
    """The relay that it happened to; for other kinds, what people know it by."""
    started: float
    ended: float = inf

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.ended - self.started

    def explains(self, first: Arrival, again: Arrival) -> bool:
        """Whether it can be the reason why a message came twice.

        A relay is killed, or the sink is stopped, after the message arrived and before that was settled: somebody sends
        it again. A relay that was frozen, or too slow, may also wake up and finish what another one has done meanwhile.
        """
        if self.kind is Kind.POISON:
            return False
        if self.kind is Kind.KILL:
            return first.relay == self.target and again.at >= self.started and self._is_near(first)
        if self.kind is Kind.STOP_SINK:
            return again.at >= self.started and self._is_near(first)
        return self.target in (first.relay, again.relay) and (self._is_near(first) or self._is_near(again))

    def _is_near(self, arrival: Arrival) -> bool:
        return self.started - _AROUND <= arrival.at <= self.ended + _AROUND


@dataclass(frozen=True, slots=True)
class Balance:
    """What the ledger and the sink's file say, side by side."""

    committed: int
    delivered: int
    """Different events."""
    lost: int
    """Committed, and not in the file."""
    ghosts: int
    """In the file, and not committed like that."""
    duplicates: int
    duplicates_tied: int
    """Duplicates that a fault explains."""
    out_of_order: int
    """Events whose first copy came after that of a later event of their key."""

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.ghosts or self.out_of_order) and self.duplicates == self.duplicates_tied


def compare(committed: Mapping[str, Entry], arrived: Iterable[Arrival], faults: Sequence[Fault]) -> Balance:
    """Hold the two against each other."""
    last: defaultdict[tuple[str | None, str], int] = defaultdict(int)
    latest: dict[str, Arrival] = {}
    ghosts = duplicates = tied = out_of_order = 0
    for arrival in arrived:
        entry = committed.get(arrival.event_id)
        if entry is None or (entry.tenant, entry.key) != (arrival.tenant, arrival.key):
            ghosts += 1
            continue
        before = latest.get(arrival.event_id)
        latest[arrival.event_id] = arrival
        if before is not None:
            duplicates += 1
            tied += any(fault.explains(before, arrival) for fault in faults)
        else:
            out_of_order += entry.version <= last[entry.tenant, entry.key]
            last[entry.tenant, entry.key] = max(last[entry.tenant, entry.key], entry.version)
    lost = len(committed) - len(latest)
    return Balance(len(committed), len(latest), lost, ghosts, duplicates, tied, out_of_order)
