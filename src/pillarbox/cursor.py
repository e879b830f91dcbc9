"""Which rows of a lane come next, when nothing is ever written to a row: the arithmetic of snapshots.

Row ids are drawn when a row is written, and rows appear when their transaction commits, so ids do not appear in order.
A lane therefore remembers two things: `high`, and `seen`, the snapshot in which it last looked. **Every row with an id
up to high that seen shows has been dealt with**; so what is left is

- *fresh*: above high;
- *late*: up to high, of a transaction that seen did not show, because it was still at work.

A look reads both with one statement, and takes the snapshot of that very statement as the next `seen`. Late rows have
lower ids than fresh ones, so a window that is sorted by id is in the order of each key.

One transaction may bring a million late rows at once. Then they are dealt with in pages: the cursor keeps `seen`, and
beside it the snapshot that it pages through, whose rows those are, and the last id that is done. Fresh rows wait until
the last page.

A tenant may have a *detour*: a cursor of its own in the same lane, which starts where the lane's cursor stood. From
then on the lane passes over the tenant's rows, and the detour finds them: those that the lane's cursor covers and its
own does not. It never looks with a snapshot of its own, so it is not ahead of the lane, but for late rows that both are
in the middle of.

Nothing here touches a database: the store on PostgreSQL and the model in memory use the same code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from .errors import StoreError

FIRST_XID = 3
"""The first transaction of a PostgreSQL cluster. Rows without one, from before there was a log, count as older."""


class Snapshot(msgspec.Struct, frozen=True):
    """Which transactions had ended at a moment, as PostgreSQL tells it: those below ``xmin``, and those below ``xmax``
    that were not running. What runs at or above ``xmax`` is not listed.
    """

    xmin: int
    xmax: int
    running: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """From PostgreSQL's own form, ``xmin:xmax:xip,xip``."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), tuple(map(int, running.split(","))) if running else ())

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.running))}"

    def shows(self, xid: int) -> bool:
        """Whether rows of this transaction are to be seen, if it has not rolled back."""
        return xid < self.xmin or (xid < self.xmax and xid not in self.running)

    def lies_below(self, other: Snapshot) -> bool:
        """Whether it is from before the other one, which a later look cannot be: the database went back in time, or is
        not the one that it was.
        """
        return self.xmin < other.xmin or self.xmax < other.xmax


NOTHING = Snapshot(FIRST_XID, FIRST_XID)
"""A snapshot from before the first transaction."""


class RowAt(NamedTuple):
    """Where a row stands: its id, and the transaction that wrote it."""

    id: int
    xid: int


class Cursor(msgspec.Struct, frozen=True):
    """How far a lane has come."""

    high: int = 0
    seen: Snapshot = NOTHING
    paging: Snapshot | None = None
    """The snapshot whose late rows are being paged through: the next ``seen``."""
    late: tuple[int, ...] = ()
    """While paging: the transactions whose rows those are. They were at work when ``seen`` was taken, so they are no
    more than there were connections.
    """
    done: int = 0
    """While paging: the last id that is dealt with."""

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """From the form that a lane's row keeps."""
        high, seen, *page = text.split(" ")
        if not page:
            return cls(int(high), Snapshot.parse(seen))
        paging, late, done = page
        return cls(int(high), Snapshot.parse(seen), Snapshot.parse(paging), tuple(map(int, late.split(","))), int(done))

    def __str__(self) -> str:
        page = "" if self.paging is None else f" {self.paging} {','.join(map(str, self.late))} {self.done}"
        return f"{self.high} {self.seen}{page}"

    def covers(self, row: RowAt) -> bool:
        """Whether the row, which has committed, has been dealt with."""
        if row.id > self.high:
            return False
        return self.seen.shows(row.xid) or (row.id <= self.done and row.xid in self.late)

    def is_fresh(self, row: RowAt) -> bool:
        """Whether the row comes in its turn. None does while late ones are paged through."""
        return self.paging is None and row.id > self.high

    def is_late(self, row: RowAt) -> bool:
        """Whether the row comes after rows with higher ids."""
        if self.paging is not None:
            return self.done < row.id <= self.high and row.xid in self.late
        return row.id <= self.high and not self.seen.shows(row.xid)

    def paged(self, snapshot: Snapshot, late: tuple[int, ...], done: int = 0) -> Cursor:
        """The same place, in the middle of the late rows that a snapshot shows, of these transactions."""
        return Cursor(self.high, self.seen, snapshot, late, done)

    def leads(self, other: Cursor) -> bool:
        """Whether all that the other one has dealt with was there when this one looked: so it may have passed more.
        A detour that has come through the same late rows as its lane, and sooner, has to wait for it.
        """
        return self.high >= other.high and not self.seen.lies_below(other.seen)

    def has_passed(self, other: Cursor) -> bool:
        """Whether it is where the other one is, or further on, and neither is in the middle of late rows."""
        return self.paging is None and other.paging is None and self.leads(other)


class Window(msgspec.Struct, frozen=True):
    """What a look at a lane has found, and where the lane stands once a part of it is dealt with."""

    start: Cursor
    snapshot: Snapshot
    """The one of the look; while paging, the one that is paged through."""
    late: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    xids: tuple[int, ...] = ()
    """The transactions of all late rows, here or not."""
    more: bool = False
    """Whether there are late rows that are not here."""
    reach: int = 0
    """Up to where there are no other fresh rows, if that is further than the last of these."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All rows, in the order in which they must be dealt with."""
        return self.late + self.fresh

    def after(self, count: int) -> Cursor:
        """Where the lane stands once the first ``count`` rows are dealt with."""
        start, late = self.start, len(self.late)
        if count < late or self.more:
            return start.paged(self.snapshot, self.xids, self.late[count - 1] if count else start.done)
        high = self.fresh[count - late - 1] if count > late else start.high
        return Cursor(max(high, self.reach) if count == late + len(self.fresh) else high, self.snapshot)

    def dealt_with(self, ids: Collection[int]) -> Cursor:
        """Where the lane stands once these rows are dealt with. They must be the first ones: what the cursor has
        passed is never looked at again.
        """
        rows = self.ids
        count = next((index for index, row in enumerate(rows) if row not in ids), len(rows))
        if any(row in ids for row in rows[count:]):
            raise StoreError(f"row {rows[count]} would be passed over: a batch takes rows as they come")
        return self.start if rows and not count else self.after(count)


def look(start: Cursor, rows: Iterable[RowAt], snapshot: Snapshot, limit: int, reach: int = 0) -> Window:
    """What a statement with this snapshot finds among the committed rows of a lane, which come in the order of their
    ids. The store on PostgreSQL asks its indexes the same question. ``reach`` is the last row that it has looked at,
    where some are not for this cursor.
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
