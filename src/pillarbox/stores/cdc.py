"""The log, with bodies from a replication stream: another way to read the same table.

Which rows come next, and how far a lane has come, is decided as in `stores.log`: by a look at the table, with its
cursor. Of rows that the stream has brought already, the look tells only where they stand, and the rest is taken from
the buffer; what that lacks is read from the table. So a stream that is slow, cut, or whose slot is lost costs nothing
but a little speed, and brings nothing that is not committed in the table.
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
    """Looks for places of rows, and fills them from the buffer."""

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
        if _told(found)[1] is not None:  # a late row: there will be a closer look
            return found
        return self._filled(connection, found, parameters) or super().glance(connection, parameters)

    def look(self, connection: Connection, looks: Looks, parameters: dict[str, Any]) -> Sequence[Any]:
        if (span := self._span(parameters)) is None:
            return self._read(super().look(connection, looks, parameters), parameters)
        found = looks.places.fetch(connection, parameters | span)
        if looks is self.questions.poll and _told(found)[1] > parameters["limit"]:  # then they are paged through
            return found
        return self._filled(connection, found, parameters) or super().look(connection, looks, parameters)

    def _span(self, parameters: dict[str, Any]) -> dict[str, int] | None:
        if "detour" in parameters:  # such a look tells how far it has come, which is true of whole pages only
            return None
        span = self._buffer.span(LaneName(parameters["route"], parameters["shard"]))
        return None if span is None else {"elsewhere_from": span[0], "elsewhere_to": span[1]}

    def _filled(
        self, connection: Connection, found: Sequence[Any], parameters: dict[str, Any]
    ) -> list[tuple[Any, ...]] | None:
        """The look with the rows that it has named, up to the one with which a limit is reached; nothing if it must be
        done again, without us.
        """
        lane, buffer = LaneName(parameters["route"], parameters["shard"]), self._buffer
        told = _told(found)
        if told[5] is not None:  # we may not look
            return [*found]
        if told[6] != buffer.server:  # another server, where an id may stand for something else
            return None
        places = sorted((values for values in found if values[0] < _LOOK), key=itemgetter(1))[: parameters["limit"]]
        at_hand, streamed = dict[int, tuple[Any, ...]](), set[int]()
        for place in places:
            if place[2] is not None:  # it came with the look
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
        """All of it came from the table."""
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
