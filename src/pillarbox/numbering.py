"""What a lane knows about a destination that deduplicates by its numbers: where each message goes, and how far each
place has come.

A place is a topic, or a partition of one. All places of a lane share one series of numbers, and each has its own
highest one. How many partitions a topic has, and how far its places had come, is announced with each batch: a successor
goes by that, not by what it finds, as partitions may have been added, and a broker may have forgotten a producer that
was away for long.
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
    """For one lane. With a destination that knows no numbers it has nothing to say."""

    def __init__(self, publisher: Publisher) -> None:
        self._numbered = publisher.capabilities.numbered
        self._forgets_after = publisher.capabilities.forgets_after
        self._partitioned = publisher if isinstance(publisher, Partitioned) else None
        self._reached: dict[str, int] = {}

    def details(self, rows: Iterable[Row]) -> dict[str, Any]:
        """What has to be announced with these rows."""
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
        """Where a row of the announced batch goes."""
        return self._partition(lane, row) or row.topic

    def message(self, lane: Lane, number: int, row: Row) -> Message:
        """A row of the announced batch, as it is sent."""
        return Message(row.topic, row.key, row.body, row.headers, number, self._partition(lane, row), row.attempts)

    def opened(self, lasts: Mapping[str, int]) -> None:
        """What the destination says while nothing is on its way is what it has stored: we may be new here, or it may
        have forgotten what we knew.
        """
        self._reached.update(lasts)

    def accepted(self, messages: Sequence[Message], indexes: Collection[int]) -> None:
        """The destination has stored these."""
        if self._numbered:
            reached = self._reached
            for index in indexes:
                message = messages[index]
                place = message.place or message.topic
                if message.number > reached.get(place, -1):
                    reached[place] = message.number

    def reached(self, lane: Lane, place: str) -> int:
        """The highest number that the place is known to have stored; -1: none."""
        before: int = (_announced(lane, REACHED) or {}).get(place, -1)
        return max(self._reached.get(place, -1), before)

    def may_be_forgotten(self, lane: Lane, place: str) -> bool:
        """Whether the place, which knows of no message of this lane, may have stored the first ones, which are the
        announced batch, and forgotten them since.
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
