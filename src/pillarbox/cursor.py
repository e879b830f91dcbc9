"""Cursors of a log: which rows of a lane come next, although no row is ever updated.

Row ids are drawn when a row is written, and rows become visible when their transaction commits, so ids do not appear in
order. A lane therefore stores two values: `high`, and `seen`, the snapshot of its last read. **Every row with an id up
to high that is visible in seen has been processed.** The remaining rows are

- *fresh*: above high;
- *late*: up to high, of a transaction that was still running in seen.

One statement reads both, and its own snapshot becomes the next `seen`. Late rows have lower ids than fresh ones, so a
window that is sorted by id keeps the order of each key.

One transaction may add a million late rows at once. They are processed in pages: the cursor keeps `seen`, and stores
the snapshot that it pages through, the transactions of the late rows, and the last processed id. Fresh rows wait until
the last page.

A tenant may have a *detour*: its own cursor in the same lane, which starts at the lane's cursor. From then on the lane
skips the tenant's rows, and the detour reads them: rows that the lane's cursor covers and its own does not. A detour
never takes a snapshot of its own, so it is not ahead of the lane, except within late rows that both are paging through.

This module does no I/O: the store on PostgreSQL and the model in memory share it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from .errors import StoreError

FIRST_XID = 3
"""First transaction id of a PostgreSQL cluster. Rows without one are from before the log, and count as older."""


class Snapshot(msgspec.Struct, frozen=True):
    """Which transactions had ended at a moment, in PostgreSQL's terms: those below ``xmin``, and those below ``xmax``
    that were not running. Transactions from ``xmax`` on are not listed.
    """

    xmin: int
    xmax: int
    running: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Parse PostgreSQL's own form, ``xmin:xmax:xip,xip``."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), tuple(map(int, running.split(","))) if running else ())

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.running))}"

    def shows(self, xid: int) -> bool:
        """Whether rows of this transaction are visible, unless it has rolled back."""
        return xid < self.xmin or (xid < self.xmax and xid not in self.running)

    def lies_below(self, other: Snapshot) -> bool:
        """Whether it is older than the other snapshot. A later read cannot have an older one, unless the database went
        back in time or was replaced.
        """
        return self.xmin < other.xmin or self.xmax < other.xmax


NOTHING = Snapshot(FIRST_XID, FIRST_XID)
"""A snapshot before the first transaction."""


class RowAt(NamedTuple):
    """A row's id and the transaction that wrote it."""

    id: int
    xid: int


class Cursor(msgspec.Struct, frozen=True):
    """The position of a lane in a log."""

    high: int = 0
    seen: Snapshot = NOTHING
    paging: Snapshot | None = None
    """The snapshot whose late rows are being paged through: the next ``seen``."""
    late: tuple[int, ...] = ()
    """While paging: the transactions of the late rows. They were running in ``seen``, so there are at most as many as
    there were connections.
    """
    done: int = 0
    """While paging: the last processed id."""

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Parse the form that is stored in a lane's row."""
        high, seen, *page = text.split(" ")
        if not page:
            return cls(int(high), Snapshot.parse(seen))
        paging, late, done = page
        return cls(int(high), Snapshot.parse(seen), Snapshot.parse(paging), tuple(map(int, late.split(","))), int(done))

    def __str__(self) -> str:
        page = "" if self.paging is None else f" {self.paging} {','.join(map(str, self.late))} {self.done}"
        return f"{self.high} {self.seen}{page}"

    def covers(self, row: RowAt) -> bool:
        """Whether the committed row has been processed."""
        if row.id > self.high:
            return False
        return self.seen.shows(row.xid) or (row.id <= self.done and row.xid in self.late)

    def is_fresh(self, row: RowAt) -> bool:
        """Whether the row is a fresh one. While the cursor pages through late rows, no row is."""
        return self.paging is None and row.id > self.high

    def is_late(self, row: RowAt) -> bool:
        """Whether the row became visible after rows with higher ids."""
        if self.paging is not None:
            return self.done < row.id <= self.high and row.xid in self.late
        return row.id <= self.high and not self.seen.shows(row.xid)

    def paged(self, snapshot: Snapshot, late: tuple[int, ...], done: int = 0) -> Cursor:
        """The same position while paging through the late rows of these transactions, visible in this snapshot."""
        return Cursor(self.high, self.seen, snapshot, late, done)

    def leads(self, other: Cursor) -> bool:
        """Whether every row that the other cursor has processed was visible in this one's snapshot, so that this one
        may have skipped more. A detour that is ahead of its lane within late rows has to wait for it.
        """
        return self.high >= other.high and not self.seen.lies_below(other.seen)

    def has_passed(self, other: Cursor) -> bool:
        """Whether it is at or beyond the other cursor, and neither is paging."""
        return self.paging is None and other.paging is None and self.leads(other)


class Window(msgspec.Struct, frozen=True):
    """The rows that one read of a lane has found, and the cursor after a part of them."""

    start: Cursor
    snapshot: Snapshot
    """Snapshot of the read; while paging, the snapshot that is paged through."""
    late: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    xids: tuple[int, ...] = ()
    """The transactions of all late rows, also of those beyond the window."""
    more: bool = False
    """Whether there are late rows beyond the window."""
    reach: int = 0
    """The id up to which there are no other fresh rows, if it is beyond the last fresh row of the window."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All rows, in the order in which they must be processed."""
        return self.late + self.fresh

    def after(self, count: int) -> Cursor:
        """The cursor after the first ``count`` rows."""
        start, late = self.start, len(self.late)
        if count < late or self.more:
            return start.paged(self.snapshot, self.xids, self.late[count - 1] if count else start.done)
        high = self.fresh[count - late - 1] if count > late else start.high
        return Cursor(max(high, self.reach) if count == late + len(self.fresh) else high, self.snapshot)

    def dealt_with(self, ids: Collection[int]) -> Cursor:
        """The cursor after these rows. They must be the first ones: rows behind the cursor are never read again."""
        rows = self.ids
        count = next((index for index, row in enumerate(rows) if row not in ids), len(rows))
        if any(row in ids for row in rows[count:]):
            raise StoreError(f"row {rows[count]} would be passed over: a batch takes rows as they come")
        return self.start if rows and not count else self.after(count)


def look(start: Cursor, rows: Iterable[RowAt], snapshot: Snapshot, limit: int, reach: int = 0) -> Window:
    """Select the window of a cursor from the committed rows of a lane, in the order of their ids. The store on
    PostgreSQL does the same by its indexes. ``reach`` is the last row read, where the read skipped rows that are not
    for this cursor.
    """
    snapshot = start.paging or snapshot
    visible = [row for row in rows if snapshot.shows(row.xid)]
    late = [row for row in visible if start.is_late(row)]
    xids = start.late or tuple(sorted({row.xid for row in late}))
    ids = tuple(row.id for row in late[:limit])
    if start.paging is not None or len(late) > limit:
        return Window(start, snapshot, late=ids, xids=xids, more=len(late) > limit)
    fresh = [row.id for row in visible if start.is_fresh(row)]
    room = limit - len(ids)
    return Window(
        start, snapshot, late=ids, fresh=tuple(fresh[:room]), xids=xids, reach=reach if len(fresh) <= room else 0
    )
