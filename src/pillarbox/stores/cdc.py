"""The log, with bodies from a replication stream: another way to read the same table.

The next rows and the position of a lane are determined as in `stores.log`: by a read of the table with the lane's
cursor. For rows that the stream has delivered, the read returns only their places, and the buffer has their content.
Missing content is read from the table. So a slow or lost stream, or a lost slot, costs only some speed, and an
uncommitted row is never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncEngine

from .. import telemetry
from ..outbox import OUTBOUND, LaneName
from ..telemetry import SILENT, Signals
from .buffer import Buffer
from .log import LogStore
from .look import RowReader
from .look_sql import Looks

_LOOK = 2


class CdcStore(LogStore):
    """The store of one relay that has a stream."""

    def __init__(self, engine: AsyncEngine, buffer: Buffer, signals: Signals = SILENT) -> None:
        super().__init__(engine)
        self._rows = _StreamReader(buffer, signals)


class _StreamReader(RowReader):
    """Reads the places of rows, and fills in their content from the buffer."""

    at_a_glance = False

    def __init__(self, buffer: Buffer, signals: Signals) -> None:
        super().__init__(OUTBOUND)
        self._buffer = buffer
        self._signals = signals

    def glance(self, connection: Connection, parameters: dict[str, Any]) -> Sequence[Any]:
        if (span := self._span(parameters)) is None:
            found = super().glance(connection, parameters)
            return found if _told(found)[1] is not None else self._read(found, parameters)
        found = self.questions.glances_at_places[bool(parameters["running"])].fetch(connection, parameters | span)
        if _told(found)[1] is not None:  # a late row: a full read follows
            return found
        return self._filled(connection, found, parameters) or super().glance(connection, parameters)

    def look(self, connection: Connection, looks: Looks, parameters: dict[str, Any]) -> Sequence[Any]:
        if (span := self._span(parameters)) is None:
            return self._read(super().look(connection, looks, parameters), parameters)
        found = looks.places.fetch(connection, parameters | span)
        if looks is self.questions.poll and _told(found)[1] > parameters["limit"]:  # then they are read in pages
            return found
        return self._filled(connection, found, parameters) or super().look(connection, looks, parameters)

    def _span(self, parameters: dict[str, Any]) -> dict[str, int] | None:
        if "detour" in parameters:  # this read also returns how far it came, which holds for whole pages only
            return None
        span = self._buffer.span(LaneName(parameters["route"], parameters["shard"]))
        return None if span is None else {"elsewhere_from": span[0], "elsewhere_to": span[1]}

    def _filled(
        self, connection: Connection, found: Sequence[Any], parameters: dict[str, Any]
    ) -> list[tuple[Any, ...]] | None:
        """The result with the content of its rows, up to the row that reaches a limit. None if the read must be
        repeated without the buffer.
        """
        lane, buffer = LaneName(parameters["route"], parameters["shard"]), self._buffer
        told = _told(found)
        if told[5] is not None:  # this server or role may not be read
            return [*found]
        if told[6] != buffer.server:  # on another server, an id may be another row
            return None
        places = sorted((values for values in found if values[0] < _LOOK), key=itemgetter(1))[: parameters["limit"]]
        at_hand, streamed = dict[int, tuple[Any, ...]](), set[int]()
        for place in places:
            if place[2] is not None:  # the read has its content
                if place[7] is not None:
                    at_hand[place[1]] = tuple(place)
            elif place[3] is not None and (row := buffer.get(lane, place[1], int(place[3]))) is not None:
                at_hand[row.id] = (place[0], row.id, *row.values())
                streamed.add(row.id)
        if lacking := [place[1] for place in places if place[1] not in at_hand]:
            parts = {place[1]: place[0] for place in places}
            for values in self.questions.named.fetch(connection, parameters | {"ids": lacking}):
                at_hand[values[0]] = (parts[values[0]], *values)
        filled, total = list[tuple[Any, ...]](), 0
        for place in places:
            row_values = at_hand.get(place[1])
            if row_values is None:
                break
            filled.append(row_values)
            total += len(row_values[7])
            if total >= parameters["max_bytes"]:
                break
        if places and not filled:
            return None
        used = [values[1] for values in filled]
        buffer.passed(lane, used)
        from_stream = len(streamed.intersection(used))
        self._count(from_stream, len(used) - from_stream)
        return [*filled, *(values for values in found if values[0] >= _LOOK)]

    def _read(self, found: Sequence[Any], parameters: dict[str, Any]) -> Sequence[Any]:
        """Return a result that came from the table alone."""
        rows = [values[1] for values in found if values[0] < _LOOK]
        self._buffer.passed(LaneName(parameters["route"], parameters["shard"]), rows)
        self._count(0, len(rows))
        return found

    def _count(self, streamed: int, read: int) -> None:
        if self._signals:
            for source, rows in (("stream", streamed), ("table", read)):
                if rows > 0:
                    self._signals.count(telemetry.STREAM_ROWS, (source,), rows)


def _told(found: Sequence[Any]) -> Any:
    return next(values for values in found if values[0] == _LOOK)
