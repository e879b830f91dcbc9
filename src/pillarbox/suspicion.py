"""Whether a destination rejects everything: then it is the destination's fault, and no message's.

A missing right or a wrong schema makes a broker reject every message, and each rejection looks like the message's own
fault; a million deliveries would be dead in minutes. So rejections are counted per destination and topic, over all
lanes of a relay: twenty different keys without a success between them, or three if the topic never took anything from
this relay or if all of them were rejected twice, and what goes there stops. Attempts are taken back, and one row at a
time is tried until one is accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from operator import attrgetter

from . import clock, telemetry
from .outbox import Failure, Key, Lane, LaneName, Row
from .retry import RetryPolicy

logger = logging.getLogger("pillarbox")

MANY_KEYS = 20
FEW_KEYS = 3
PROBES = RetryPolicy(base=1.0, cap=30.0, attempts=1)


@dataclass(slots=True)
class Place:
    """A topic of a destination, and how it has treated us since its last success."""

    name: tuple[str, str]
    has_accepted: bool = False
    keys: dict[Key, int] = field(default_factory=dict)
    """How often each was rejected."""
    attempts: dict[LaneName, dict[int, int]] = field(default_factory=dict)
    """Per lane the rejected rows, with the attempts that they had before."""
    lanes: set[LaneName] = field(default_factory=set)
    blocked: bool = False
    reason: str = ""
    probes: int = 0
    next_probe: float = 0.0


class Suspicion:
    """What one relay has seen of its destinations."""

    def __init__(
        self, draw: Callable[[], float], wake: Callable[[Collection[LaneName]], object] = lambda _lanes: None
    ) -> None:
        self._draw = draw
        self._wake = wake
        self._places: dict[tuple[str, str], Place] = {}

    def accepted(self, lane: Lane, topic: str) -> None:
        """The topic takes messages: whatever was rejected was rejected for its own sake."""
        place = self._place(lane, topic)
        if place.blocked:
            logger.warning("%s takes messages again", " ".join(place.name), extra=_fields(telemetry.LOG_TAKES, place))
        place.has_accepted, place.blocked, place.probes = True, False, 0
        place.keys.clear()
        place.attempts.clear()

    def rejected(self, lane: Lane, row: Row, reason: str) -> int | None:
        """Count a rejection. If it is the destination's fault, the attempts that this row really had come back."""
        place = self._place(lane, row.topic)
        place.keys[row.order_key] = place.keys.get(row.order_key, 0) + 1
        place.lanes.add(lane.name)
        place.reason = reason
        place.attempts.setdefault(lane.name, {}).setdefault(row.id, row.attempts)
        if not place.blocked and _is_suspicious(place):
            place.blocked = True
            self._postpone(place)
            logger.error(
                "%s rejects everything (%d different keys, %s): its lanes stop, and no attempt is counted",
                " ".join(place.name),
                len(place.keys),
                reason,
                extra=_fields(telemetry.LOG_REFUSES, place),
            )
            self._wake(place.lanes)  # they have attempts to take back
        return place.attempts[lane.name].pop(row.id) if place.blocked else None

    def let_through(self, lane: Lane, rows: list[Row]) -> tuple[list[Row], Place | None]:
        """Nothing goes to topics that reject everything, but for one row now and then; what is behind it waits. Also
        the one of them that may be tried next.
        """
        blocked = {it.name[1]: it for it in self._places.values() if it.blocked and lane.name in it.lanes}
        if not blocked:
            return rows, None
        through: list[Row] = []
        held: set[Key] = set()
        met: dict[str, Place] = {}
        for row in rows:
            if row.order_key in held:
                continue
            place = blocked.get(row.topic)
            if place is not None:
                held.add(row.order_key)
                tried = row.topic not in met and self._may_probe(place)
                met[row.topic] = place
                if not tried:
                    continue
            through.append(row)
        return through, min(met.values(), key=attrgetter("next_probe"), default=None)

    def _postpone(self, place: Place) -> None:
        place.probes += 1
        wait = PROBES.ceiling(place.probes) * (0.5 + self._draw() / 2)
        place.next_probe = clock.current().monotonic() + wait

    def to_give_back(self, lane: Lane) -> list[Failure]:
        """Attempts that were counted before we knew better."""
        return [
            Failure(row, attempts, None, 0.0)
            for place in self._places.values()
            if place.blocked
            for row, attempts in place.attempts.get(lane.name, {}).items()
        ]

    def given_back(self, lane: Lane) -> None:
        """They are written down."""
        for place in self._places.values():
            if place.blocked:
                place.attempts.pop(lane.name, None)

    def _may_probe(self, place: Place) -> bool:
        """Whether it is time to try one row, and nobody else has taken the chance: then it is ours."""
        if clock.current().monotonic() < place.next_probe:
            return False
        self._postpone(place)
        return True

    def _place(self, lane: Lane, topic: str) -> Place:
        name = (lane.route.destination, topic)
        return self._places.setdefault(name, Place(name))


def _fields(event: telemetry.LogEvent, place: Place) -> dict[str, object]:
    destination, topic = place.name
    return telemetry.fields(event, destination=destination, topic=topic, reason=place.reason)


def _is_suspicious(place: Place) -> bool:
    if len(place.keys) < FEW_KEYS:
        return False
    return len(place.keys) >= MANY_KEYS or not place.has_accepted or min(place.keys.values()) > 1
