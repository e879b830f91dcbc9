"""What must have become of each message that consumers were sent, compared with what the database has."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

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
    GARBLED = "garbled"
    """It is no JSON."""
    MISSHAPEN = "misshapen"
    """It has not the fields of its type."""
    UNHEARD_OF = "unheard of"
    """Nobody knows its type."""
    FORGED = "forged"
    """Another one has the same id, and says something else."""


_MUST: Mapping[Lot, frozenset[str]] = {
    Lot.FINE: frozenset({EFFECT}),
    Lot.UNLUCKY: frozenset({EFFECT}),
    Lot.PUZZLING: frozenset({EFFECT, "letter poison"}),
    Lot.STUBBORN: frozenset({"letter poison"}),
    Lot.REFUSED: frozenset({"letter rejected"}),
    Lot.POISONOUS: frozenset({"letter poison"}),
    Lot.GARBLED: frozenset({"letter unknown"}),
    Lot.MISSHAPEN: frozenset({"letter unknown"}),
    Lot.UNHEARD_OF: frozenset({"letter unknown"}),
    Lot.FORGED: frozenset({EFFECT, "letter altered"}),
}
_NO_ORDER = {Lot.GARBLED, Lot.MISSHAPEN, Lot.UNHEARD_OF, Lot.FORGED}
"""These become letters without a handler, which need not wait for those before them."""


@dataclass
class Sent:
    """A message as it was sent."""

    mark: int
    message: Message
    lot: Lot
    failures: int = 0
    """How often it will still fail."""
    twin: int | None = None
    """The other one with its id."""

    @property
    def line(self) -> Line:
        return line_of(self.message)


def check_consumed(sent: Mapping[int, Sent], log: Sequence[Record], *, ordered: bool) -> list[str]:
    """Everything that is wrong, one line each."""
    outcomes: defaultdict[int, list[str]] = defaultdict(list)
    for record in log:
        if record.is_outcome:
            outcomes[record.mark].append(record.what)
    counts = Counter(log)
    wrong: list[str] = []
    for mark, one in sent.items():
        wrong += _wrong_with(one, outcomes[mark], counts)
        if one.twin is not None and outcomes[mark] == outcomes[one.twin]:
            wrong.append(f"C4 kind: {_named(one)} and its twin both became {outcomes[mark]}")
    return wrong + (_inversions(sent, log) if ordered else [])


def _wrong_with(one: Sent, outcomes: Sequence[str], counts: Mapping[Record, int]) -> list[str]:
    if not outcomes:
        return [f"C1 loss: {_named(one)} has neither effect nor letter"]
    if len({*outcomes}) > 1:
        return [f"C3 both: {_named(one)} became {' and '.join(outcomes)}"]
    if len(outcomes) > 1:
        return [f"C2 once: {_named(one)} became {' and '.join(outcomes)}"]
    [outcome] = outcomes
    wrong = [] if outcome in _MUST[one.lot] else [f"C4 kind: {_named(one)} became {outcome}"]
    follow_ups, dead = counts[Record(FOLLOW_UP, one.mark)], counts[Record(DEAD_LETTER, one.mark)]
    if follow_ups != (outcome == EFFECT):
        wrong.append(f"C7 follow-up: {_named(one)} has {follow_ups}, and {outcome}")
    if dead != (outcome not in (EFFECT, "letter rejected")):
        wrong.append(f"C8 dead letter: {_named(one)} has {dead}, and {outcome}")
    return wrong


def _inversions(sent: Mapping[int, Sent], log: Sequence[Record]) -> list[str]:
    """Per key, outcomes come in the order in which the messages were sent: their marks rise."""
    newest: dict[Line, int] = {}
    wrong = []
    for record in log:
        one = sent[record.mark]
        if not record.is_outcome or one.lot in _NO_ORDER:
            continue
        if one.mark < newest.get(one.line, -1):
            wrong.append(f"C5 order: {_named(one)} became {record.what} after a later one of its key")
        newest[one.line] = max(one.mark, newest.get(one.line, -1))
    return wrong


def _named(one: Sent) -> str:
    return f"message {one.mark} ({one.lot}) of key {one.line[0]}/{one.line[1]}"
