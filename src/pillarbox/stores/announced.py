"""What the announcement of a batch says in a log: between which cursors its rows are, and what is left out of it."""

from __future__ import annotations

import msgspec

from ..cursor import Cursor, RowAt
from ..outbox import Lane


class Contents(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an announcement says about its batch, beside its count and digest."""

    to: str
    """The cursor once the batch is settled."""
    start: str | None = None
    """The cursor before it, if it is not the lane's."""
    redo: tuple[int, ...] = ()
    """Failed rows that are sent again, before the others."""
    skip: tuple[int, ...] = ()
    """Rows that the cursor passes and that are no items."""
    out: tuple[int, ...] = ()
    """Items that were amended away. Their numbers stay unused."""
    attempts: dict[int, int] = msgspec.field(default_factory=dict)
    """Of items that are suspected of killing relays."""

    def ends(self, lane: Lane) -> tuple[Cursor, Cursor]:
        """The cursors before and after the batch."""
        return lane.cursor if self.start is None else Cursor.parse(self.start), Cursor.parse(self.to)

    def holds(self, row: RowAt, lane: Lane) -> bool:
        """Whether the row is on its way."""
        if row.id in self.out or row.id in self.skip:
            return False
        start, to = self.ends(lane)
        return row.id in self.redo or (to.covers(row) and not start.covers(row))


def contents_of(lane: Lane) -> Contents | None:
    """What is announced."""
    return None if lane.announced is None else msgspec.convert(lane.announced.details, Contents, strict=False)


def position(lane: Lane) -> Cursor:
    """Where the next look starts: behind what is announced."""
    cursor: Cursor = lane.cursor
    return cursor if lane.announced is None else Cursor.parse(lane.announced.details["to"])
