"""Numbers and places at a destination that deduplicates by number.

A place is a topic or a partition of one. All places of a lane share one series of numbers, and each has its own highest
number. Each batch announces the partition counts of its topics and the highest numbers of its places. A successor uses
the announced values, not the current ones: partitions may have been added, and a broker may have forgotten a producer
that was absent for long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from . import clock
from .outbox import Lane, Row
from .transport import Message, Partitioned, Publisher

PARTITIONS = "partitions"
REACHED = "reached"
AT = "at"


class Numbering:
    """The numbers of one lane. Empty for a destination without numbers."""

    def __init__(self, publisher: Publisher) -> None:
        self._numbered = publisher.capabilities.numbered
        self._forgets_after = publisher.capabilities.forgets_after
        self._partitioned = publisher if isinstance(publisher, Partitioned) else None
        self._reached: dict[str, int] = {}

    def details(self, rows: Iterable[Row]) -> dict[str, Any]:
        """The details to announce with these rows."""
        if not self._numbered:
            return {}
        topics = {row.topic for row in rows}
        found: dict[str, Any] = {}
        partitioned = self._partitioned
        if partitioned and (counts := {topic: count for topic in topics if (count := partitioned.partitions(topic))}):
            found[PARTITIONS] = counts
            topics = topics.difference(counts)
            topics |= {partitioned.place(row.topic, row.key, counts[row.topic]) for row in rows if row.topic in counts}
        if reached := {place: last for place in topics if (last := self._reached.get(place, -1)) >= 0}:
            found[REACHED] = reached
        if self._forgets_after is not None and len(reached) < len(topics):
            found[AT] = int(clock.now().timestamp())
        return found

    def place(self, lane: Lane, row: Row) -> str:
        """The place of a row of the announced batch."""
        return self._partition(lane, row) or row.topic

    def message(self, lane: Lane, number: int, row: Row) -> Message:
        """The message of a row of the announced batch."""
        return Message(row.topic, row.key, row.body, row.headers, number, self._partition(lane, row), row.attempts)

    def opened(self, lasts: Mapping[str, int]) -> None:
        """Record the last numbers of the destination, read while no request is in flight. They replace the known ones:
        this owner may be new, or the destination may have forgotten its producer.
        """
        self._reached.update(lasts)

    def accepted(self, messages: Sequence[Message], indexes: Collection[int]) -> None:
        """Record the numbers that the destination has stored."""
        if self._numbered:
            reached = self._reached
            for index in indexes:
                message = messages[index]
                place = message.place or message.topic
                if message.number > reached.get(place, -1):
                    reached[place] = message.number

    def reached(self, lane: Lane, place: str) -> int:
        """The highest number that the place is known to have stored, or -1."""
        before: int = (_announced(lane, REACHED) or {}).get(place, -1)
        return max(self._reached.get(place, -1), before)

    def may_be_forgotten(self, lane: Lane, place: str) -> bool:
        """Whether the place may have stored messages of the announced batch and forgotten them since. True only for a
        place that knows no number of this lane.
        """
        announced_at: int | None = _announced(lane, AT)
        if self._forgets_after is None or announced_at is None or self.reached(lane, place) >= 0:
            return False
        return clock.now().timestamp() - announced_at > self._forgets_after

    def _partition(self, lane: Lane, row: Row) -> str:
        count = (_announced(lane, PARTITIONS) or {}).get(row.topic, 0)
        return self._partitioned.place(row.topic, row.key, count) if count and self._partitioned else ""


def _announced(lane: Lane, name: str) -> Any:
    return None if lane.announced is None else lane.announced.details.get(name)
