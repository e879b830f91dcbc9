"""Streamed rows that no read has named yet: a bounded buffer that drops the oldest first.

The buffer is never progress, and never the only copy. A row leaves it when a read of the table names its id and its
transaction: both were then committed on the server of the stream. Rows that are missing here are read from the table.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection

from ..outbox import LaneName
from .pgoutput import Streamed

OVERHEAD = 800
"""Approximate overhead of a row in bytes."""
AHEAD = 20_000
"""Number of remembered rows that were sent before the stream delivered them."""
RINGS = 8
"""How often a row that a read has passed over is rung for again: it may not have been visible yet."""


class _Lane:
    def __init__(self) -> None:
        self.rows: OrderedDict[int, Streamed] = OrderedDict()
        self.low = self.high = 0


class Buffer:
    """Rows by lane and id, in the order of their arrival. Belongs to one relay and its event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self.server: str | None = None
        """The server of the rows and its start time. Reads of another server do not use them."""
        self._lanes: dict[LaneName, _Lane] = {}
        self._order: deque[tuple[LaneName, int]] = deque()
        """The order of arrival, including rows that were dropped since."""
        self._held = 0
        self.ahead: OrderedDict[int, None] = OrderedDict()
        """Rows that were read from the table while the stream was up, and that it may still deliver."""

        self._passed_over: dict[int, tuple[LaneName, int]] = {}

    def put(self, row: Streamed) -> None:
        """Keep a row, and drop the oldest ones if there are too many. For lanes that are not read, nothing is kept."""
        lane = self._lanes.get(row.lane)
        if lane is None:
            return
        if row.id in lane.rows:
            self._drop(lane, row.id)
        if not lane.rows:
            lane.low = lane.high = row.id
        elif row.id > lane.high:
            lane.high = row.id
        elif row.id < lane.low:
            lane.low = row.id
        lane.rows[row.id] = row
        self._held += 1
        self.bytes += _size(row)
        self._order.append((row.lane, row.id))
        self._shrink()

    def span(self, name: LaneName) -> tuple[int, int] | None:
        """The lowest and highest id in the buffer. Most rows of the lane between them are in it, but not necessarily
        all.

        Rows of a lane are kept once this was called for it. It is never called for a lane without a cursor, which could
        not use them.
        """
        lane = self._lanes.get(name)
        if lane is None:
            self._lanes[name] = _Lane()
        return None if lane is None or not lane.rows else (lane.low, lane.high)

    def get(self, name: LaneName, row: int, xid: int) -> Streamed | None:
        """The row, if it is buffered with this transaction. With another one, it is from another history."""
        lane = self._lanes.get(name)
        found = None if lane is None else lane.rows.get(row)
        return found if found is not None and found.xid == xid else None

    def passed(self, name: LaneName, rows: list[int]) -> None:
        """Drop rows that a read has named, wherever their content came from. Unnamed rows before them are dropped too:
        the table has them if they are needed.
        """
        if self.server is None or not rows:
            return
        lane = self._lanes.get(name)
        if (lane is None or not lane.rows) and not self._passed_over:  # the normal case while a backlog is sent
            self.ahead.update(dict.fromkeys(rows))
        else:
            self._let_go(name, lane or _Lane(), rows)
        while len(self.ahead) > AHEAD:
            self.ahead.popitem(last=False)

    def _let_go(self, name: LaneName, lane: _Lane, rows: list[int]) -> None:
        for row in rows:
            if row in lane.rows:
                self._drop(lane, row)
            elif self._passed_over.pop(row, None) is None:
                self.ahead[row] = None
        while lane.rows and (first := next(iter(lane.rows))) <= rows[-1]:
            self._drop(lane, first)
            self._passed_over[first] = (name, RINGS)
        lane.low = max(lane.low, rows[-1] + 1)

    def unnamed(self, asked: Collection[LaneName]) -> set[LaneName]:
        """The given lanes that may have rows that no read has named. Rows that a read has passed over count a few
        times only. Lanes whose rows are not kept always count.
        """
        lanes = {name for name in asked if (lane := self._lanes.get(name)) is None or lane.rows}
        for row, (name, left) in [*self._passed_over.items()]:
            if name not in asked:
                continue
            lanes.add(name)
            if left > 1:
                self._passed_over[row] = (name, left - 1)
            else:
                del self._passed_over[row]
        return lanes

    def clear(self) -> None:
        """Drop everything: the stream is lost, or comes from another server."""
        self._lanes.clear()
        self._order.clear()
        self.ahead.clear()
        self._passed_over.clear()
        self.bytes = self._held = 0
        self.server = None

    def _drop(self, lane: _Lane, row: int) -> None:
        self.bytes -= _size(lane.rows.pop(row))
        self._held -= 1

    def _shrink(self) -> None:
        if len(self._order) > 2 * self._held + 1_000:  # a row that is never read keeps all later ones in the list
            self._order = deque((name, row) for name, row in self._order if row in self._lanes[name].rows)
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
