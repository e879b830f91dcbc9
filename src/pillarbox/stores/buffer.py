"""Rows that a stream has brought and that no look has named yet: bounded, and the oldest go first.

What is here is never progress, and never the only copy. A row leaves it when a look at the table names its id and its
transaction; then both were committed there, on the server that the stream came from. Whatever is not here is read from
the table.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from ..outbox import LaneName
from .pgoutput import Streamed

OVERHEAD = 800
"""What a row takes beside its bytes, about."""


class _Lane:
    def __init__(self) -> None:
        self.rows: OrderedDict[int, Streamed] = OrderedDict()
        self.low = self.high = 0


class Buffer:
    """Rows by lane and id, in the order of their arrival. Belongs to one relay, and to its event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self.received = 0
        """Rows that have come, ever."""
        self.server: str | None = None
        """Where they come from, and since when it runs: looks at another server do not use them."""
        self._lanes: dict[LaneName, _Lane] = {}
        self._order: deque[tuple[LaneName, int]] = deque()

    def put(self, row: Streamed) -> None:
        """Keep a row, and let go of the oldest ones if they are too many."""
        self.received += 1
        lane = self._lanes.get(row.lane)
        if lane is None:
            lane = self._lanes[row.lane] = _Lane()
        if row.id in lane.rows:
            self._drop(lane, row.id)
        if not lane.rows:
            lane.low = lane.high = row.id
        elif row.id > lane.high:
            lane.high = row.id
        elif row.id < lane.low:
            lane.low = row.id
        lane.rows[row.id] = row
        self.bytes += _size(row)
        self._order.append((row.lane, row.id))
        self._shrink()

    def span(self, name: LaneName) -> tuple[int, int] | None:
        """The lowest and the highest id at hand; between them most rows of the lane are, but not all need be."""
        lane = self._lanes.get(name)
        return None if lane is None or not lane.rows else (lane.low, lane.high)

    def get(self, name: LaneName, row: int, xid: int) -> Streamed | None:
        """The row, if it is here and of that transaction. Another one of the same id is from another history."""
        lane = self._lanes.get(name)
        found = None if lane is None else lane.rows.get(row)
        return found if found is not None and found.xid == xid else None

    def passed(self, name: LaneName, rows: list[int]) -> None:
        """These rows are in use. What came before them is let go, too: if it is needed at all, the table has it."""
        lane = self._lanes.get(name)
        if lane is None or not rows:
            return
        for row in rows:
            if row in lane.rows:
                self._drop(lane, row)
        last = rows[-1]
        while lane.rows and (first := next(iter(lane.rows))) <= last:
            self._drop(lane, first)
        lane.low = max(lane.low, last + 1)

    def clear(self) -> None:
        """Let go of everything: the stream is lost, or comes from another server."""
        self._lanes.clear()
        self._order.clear()
        self.bytes = 0
        self.server = None

    def _drop(self, lane: _Lane, row: int) -> None:
        self.bytes -= _size(lane.rows.pop(row))

    def _shrink(self) -> None:
        while self._order:
            name, row = self._order[0]
            lane = self._lanes[name]
            if row in lane.rows:
                if self.bytes <= self.limit:
                    return
                self._drop(lane, row)
            self._order.popleft()


def _size(row: Streamed) -> int:
    return OVERHEAD + len(row.headers) + len(row.body) + len(row.key) + len(row.topic)
