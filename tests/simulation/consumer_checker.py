"""What must have become of each message that consumers were sent, compared with what the database has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pillarbox.outbox import Status
from pillarbox.transport import Message
from tests.simulation.consumer_broker import Line, line_of
from tests.simulation.consumer_database import DEAD_LETTER, EFFECT, FOLLOW_UP, Record


class Lot(StrEnum):
    """What awaits a message at its handler."""

    FINE = "fine"
    UNLUCKY = "unlucky"
    """The circumstances are against it, for a while."""
    PUZZLING = "puzzling"
    """It fails for a while, in a way that nobody knows."""
    STUBBORN = "stubborn"
    """It does so for ever."""
    REFUSED = "refused"
    """The handler rejects it."""
    POISONOUS = "poisonous"
    DEADLY = "deadly"
    """The process dies of it, a few times."""
    FATAL = "fatal"
    """Every process dies of it."""
    GARBLED = "garbled"
    """It is no JSON."""
    MISSHAPEN = "misshapen"
    """It has not the fields of its type."""
    UNHEARD_OF = "unheard of"
    """Nobody knows its type."""
    FORGED = "forged"
    """Another one has the same id, and says something else."""
    NEWER = "newer"
    """The same event was sent in a version that is known, and in one that will be."""


DEATHS = 40
"""At most so many processes die of a message; of several on average, as each disturbs the search for the others."""
UNREADABLE = {Lot.GARBLED, Lot.MISSHAPEN, Lot.UNHEARD_OF}
_MAY_FAIL = UNREADABLE | {Lot.PUZZLING, Lot.STUBBORN, Lot.REFUSED, Lot.POISONOUS, Lot.FORGED, Lot.NEWER}
_MAY_FAIL |= {Lot.DEADLY, Lot.FATAL}
_NEEDS_A_PERSON = UNREADABLE | {Lot.STUBBORN, Lot.REFUSED, Lot.POISONOUS, Lot.FATAL}
"""These take effect only if a person has asked for that."""
_CURABLE = {Lot.STUBBORN, Lot.REFUSED, Lot.POISONOUS, Lot.FATAL}


@dataclass
class Sent:
    """A message as it was sent."""

    mark: int
    message: Message
    lot: Lot
    failures: int = 0
    """How often it will still fail."""
    deaths: int = 0
    """How many processes have died of it."""
    twin: int | None = None
    """The other one with its id."""
    asked: set[str] = field(default_factory=set)
    """What people have asked for it."""

    @property
    def line(self) -> Line:
        return line_of(self.message)


@dataclass
class Found:
    """What the database has in the end."""

    log: Sequence[Record]
    rows: Mapping[int, Sequence[Status]]
    """Of each message that was spilled."""
    late: Collection[int] = ()
    """Those that have once failed for good."""
    unread: Collection[int] = ()
    """Those that were spilled when nobody could read them."""
    parks: bool = False
    """Whether later ones of their keys wait for them."""


def check_consumed(sent: Mapping[int, Sent], found: Found, *, ordered: bool) -> list[str]:
    """Everything that is wrong, one line each."""
    counts = Counter(found.log)
    wrong: list[str] = []
    for mark, one in sent.items():
        rows = [status for status in found.rows.get(mark, ()) if status is not Status.SENT]
        wrong += _wrong_with(one, rows, counts, found)
        if one.twin is not None:
            wrong += _wrong_with_both(one, sent[one.twin], counts, found)
    fatal = [one for one in sent.values() if one.lot is Lot.FATAL]
    if (deaths := sum(one.deaths for one in fatal)) > DEATHS * len(fatal):
        wrong.append(f"C12 deaths: {deaths} processes died of {len(fatal)} messages")
    return wrong + (_inversions(sent, found) if ordered else [])


def _wrong_with(one: Sent, rows: Sequence[Status], counts: Mapping[Record, int], found: Found) -> list[str]:
    effects, dead = counts[Record(EFFECT, one.mark)], counts[Record(DEAD_LETTER, one.mark)]
    became = " and ".join([EFFECT] * effects + [status.value for status in rows])
    if not became:
        return [] if one.lot is Lot.NEWER else [f"C1 loss: {_named(one)} has neither effect nor delivery"]
    if effects and rows and one.mark not in found.unread:  # who can read it later sees another one
        return [f"C3 both: {_named(one)} became {became}"]
    if effects + len(rows) > 1 + (one.mark in found.unread):
        return [f"C2 once: {_named(one)} became {became}"]
    wrong = []
    if effects and one.lot in _NEEDS_A_PERSON and not one.asked & {"redrive", "edit"}:
        wrong.append(f"C4 kind: {_named(one)} became {became}")
    if rows == [Status.FAILED] and (one.lot not in _MAY_FAIL or (one.lot in _CURABLE and "cured" in one.asked)):
        wrong.append(f"C4 kind: {_named(one)} became {became}")
    if rows == [Status.DISCARDED] and "discard" not in one.asked:
        wrong.append(f"C4 kind: {_named(one)} became {became}")
    if counts[Record(FOLLOW_UP, one.mark)] != effects:
        wrong.append(f"C7 follow-up: {_named(one)} has {counts[Record(FOLLOW_UP, one.mark)]}, and {became}")
    least = rows == [Status.FAILED] and one.lot not in (Lot.REFUSED, Lot.DEADLY, Lot.FATAL)
    most = one.lot in _MAY_FAIL and one.lot is not Lot.REFUSED
    if not least <= dead <= most:
        wrong.append(f"C8 dead letter: {_named(one)} has {dead}, and {became}")
    if one.lot not in _MAY_FAIL and one.mark in found.late:
        wrong.append(f"C4 kind: {_named(one)} has failed for good")
    return wrong


def _wrong_with_both(one: Sent, other: Sent, counts: Mapping[Record, int], found: Found) -> list[str]:
    """Of two with one id."""
    effects = counts[Record(EFFECT, one.mark)] + counts[Record(EFFECT, other.mark)]
    if one.lot is Lot.FORGED and effects == 2 and not (one.asked | other.asked) & {"redrive", "edit"}:
        return [f"C4 kind: {_named(one)} and its twin both took effect"]
    if one.lot is Lot.NEWER and effects > 1:
        return [f"C2 once: {_named(one)} and its twin took effect"]
    settled = [it for it in (one, other) if it.mark not in found.unread and found.rows.get(it.mark)]
    parked = [it for it in (one, other) if Status.PARKED in found.rows.get(it.mark, ())]  # behind one that is left
    if one.lot is Lot.NEWER and not effects and not settled and not parked:
        return [f"C1 loss: neither {_named(one)} nor its twin took effect"]
    return []


def _inversions(sent: Mapping[int, Sent], found: Found) -> list[str]:
    """Per key, effects come in the order in which the messages were sent: their marks rise."""
    newest: dict[Line, int] = {}
    wrong = []
    # What has failed for good comes back when a person says so, before others or after them, unless these wait for it.
    # What could not be read was another message for the inbox, which may come again where it can be.
    free = found.unread if found.parks else found.late
    for record in found.log:
        one = sent[record.mark]
        if record.what != EFFECT or not one.message.key or one.mark in free:
            continue
        if one.mark < newest.get(one.line, -1):
            wrong.append(f"C5 order: {_named(one)} took effect after message {newest[one.line]} of its key")
        newest[one.line] = max(one.mark, newest.get(one.line, -1))
    return wrong


def _named(one: Sent) -> str:
    return f"message {one.mark} ({one.lot}) of key {one.line[0]}/{one.line[1]}"
