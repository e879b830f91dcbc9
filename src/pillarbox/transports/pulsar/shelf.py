"""What a member of a group has received and not acknowledged: what may be offered, and what waits for its key.

Pulsar cannot hold a key back: a nack lets the next message of the key pass. So a refused message rests here, and
whatever is behind it in its lane waits, unacknowledged, until it has been offered again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from ...transport import Message


@dataclass(slots=True, eq=False)
class Copy:
    """A message that is with us until it is acknowledged."""

    message: Message
    order: int
    place: Hashable
    """Where the broker stores it: the same message that comes again has the same."""
    lane: Hashable
    """Whatever has the same keeps its order."""
    id: Any
    """What the client acknowledges it by."""
    physical: str
    """The topic or partition that it came from."""
    attempts: int
    offers: int = 0
    """Of the attempts, those that were made here."""
    out: bool = False
    resting: bool = False


class Shelf:
    """Lives on the loop. Nothing is searched for: a message that was acknowledged, or has come to be behind one that
    rests, is found out when its turn comes.
    """

    def __init__(self) -> None:
        self._open: dict[Hashable, Copy] = {}
        self._free: list[tuple[int, Copy]] = []
        """A heap of what may be offered, unless its lane is held."""
        self._held: dict[Hashable, list[tuple[int, Copy]]] = {}
        """For each lane with a message that rests, a heap of that and of what was found to be behind it."""

    def __len__(self) -> int:
        """How many are not acknowledged."""
        return len(self._open)

    def __contains__(self, copy: Copy) -> bool:
        return self._open.get(copy.place) is copy

    def put(self, copy: Copy) -> bool:
        """Whether it is new. After a lost connection the broker sends all again that is not acknowledged: what we have
        is not put twice, and what is out is offered again, as nobody knows whether it will ever be acknowledged.
        """
        known = self._open.setdefault(copy.place, copy)
        if known is not copy:  # the client counts acknowledgements of an entry by the ids that came last
            known.id, known.attempts = copy.id, max(known.attempts, copy.attempts)
        if known is copy or known.out:
            known.out = False
            heappush(self._free, (known.order, known))
        return known is copy

    def take(self, limit: int) -> list[Copy]:
        """Up to so many, in order; they are out then."""
        taken: list[Copy] = []
        while self._free and len(taken) < limit:
            order, copy = heappop(self._free)
            if copy not in self:
                continue
            held = self._held.get(copy.lane)
            if held and held[0][0] < order:
                heappush(held, (order, copy))
                continue
            copy.out = True
            copy.offers += 1
            copy.attempts += 1
            taken.append(copy)
        return taken

    def drop(self, copy: Copy) -> None:
        """It is acknowledged."""
        del self._open[copy.place]

    def hold(self, copy: Copy) -> bool:
        """Let it rest, and its lane wait, until `release`. False if it is not out."""
        if not copy.out or copy not in self:
            return False
        copy.out, copy.resting = False, True
        heappush(self._held.setdefault(copy.lane, []), (copy.order, copy))
        return True

    def release(self, copy: Copy) -> None:
        """It has rested, or is acknowledged: it may go, and what is behind it up to the next one that rests."""
        copy.resting = False
        held = self._held[copy.lane]
        while held and not held[0][1].resting:
            heappush(self._free, heappop(held))
        if not held:
            del self._held[copy.lane]
