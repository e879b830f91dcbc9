"""The ledger checker: what was committed, compared with what arrived.

It knows nothing about how either came about, so it serves a simulation as well as real servers. The ledger is written
by the business transaction; topics are read by somebody else than the sender.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID


class Entry(NamedTuple):
    """A committed delivery, or a message that arrived."""

    topic: str
    tenant: str | None
    key: str
    event_id: UUID
    body: bytes

    @property
    def order(self) -> tuple[str, str | None, str]:
        """Within this the order counts."""
        return self.topic, self.tenant, self.key

    @property
    def identity(self) -> tuple[str, UUID]:
        """Two routes deliver one event to two topics."""
        return self.topic, self.event_id


Identity = tuple[str, UUID]


@dataclass
class Ledger:
    """What was committed, per key in the order of commits, and what people and policies have made of it since."""

    committed: list[Entry] = field(default_factory=list)
    may_be_missing: set[Identity] = field(default_factory=set)
    """A person has discarded it, or it is lost with its database."""
    may_be_late: set[Identity] = field(default_factory=set)
    """Its key went on without it."""
    edited: dict[Identity, Entry] = field(default_factory=dict)
    """By what it was replaced, by a person."""


def check(ledger: Ledger, topics: Mapping[str, Sequence[Entry]], once: Collection[str] = ()) -> list[str]:
    """Everything that is wrong, one line each. On the topics ``once`` each event must be there exactly once."""
    known = {entry.identity: entry for entry in ledger.committed}
    originals = {new.identity: old for old, new in ledger.edited.items()}
    known |= {new.identity: new for new in ledger.edited.values()}
    wrong: list[str] = []
    arrived: dict[Identity, int] = {}
    for message in (message for topic in topics.values() for message in topic):
        fact = known.get(message.identity)
        if fact is None:
            wrong.append(f"I2 ghost: {_named(message)} was never committed")
            continue
        if (fact.body, fact.key) != (message.body, message.key):
            wrong.append(f"I7 integrity: {_named(message)} is not what was committed")
        if fact.tenant != message.tenant:
            wrong.append(f"I8 isolation: {_named(message)} arrived as tenant {message.tenant}")
        original = originals.get(message.identity, message.identity)
        arrived[original] = arrived.get(original, 0) + 1
        if message.topic in once and arrived[original] > 1:
            wrong.append(f"I3 once: {_named(message)} arrived {arrived[original]} times")
    wrong += [
        f"I1 loss: {_named(entry)} never arrived"
        for entry in ledger.committed
        if entry.identity not in arrived and entry.identity not in ledger.may_be_missing
    ]
    return wrong + _inversions(ledger, arrived)


def _inversions(ledger: Ledger, arrived: Iterable[Identity]) -> list[str]:
    """Per key, what arrived for the first time must come in the order of the ledger. ``arrived`` is in that order."""
    excused = ledger.may_be_late | ledger.may_be_missing
    places = {entry.identity: place for place, entry in enumerate(ledger.committed)}
    newest: dict[tuple[str, str | None, str], int] = {}
    wrong: list[str] = []
    for identity in arrived:
        if identity in excused:
            continue
        entry = ledger.committed[places[identity]]
        if places[identity] < newest.get(entry.order, -1):
            wrong.append(f"I5 order: {_named(entry)} arrived after a later one of its key")
        newest[entry.order] = max(places[identity], newest.get(entry.order, -1))
    return wrong


def _named(entry: Entry) -> str:
    return f"{entry.event_id.hex[-6:]} of key {entry.tenant}/{entry.key} on {entry.topic}"
