"""The log in memory: transactions with numbers, snapshots, and lanes with cursors, without a database.

What a look finds and where a lane stands is decided by the same code as on PostgreSQL (`pillarbox.cursor`). What
becomes of the rows is written down as in `stores.memory`, but no look goes by it: a row that the cursor has passed over
would stay PENDING for ever, and one that it finds twice is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from ..cursor import FIRST_XID, Cursor, RowAt, Snapshot, Window, look
from ..errors import BatchMismatchError, LaneHaltedError
from ..outbox import Batch, Delivery, Lane, LaneName, Page, RouteRecord, Row, Status
from .announced import position
from .memory import MemoryStore


class MemoryLogStore(MemoryStore):
    """`LaneStore`, `OutboxStore` and `Appends` without a database. Appending is committing."""

    def __init__(self, *, log: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self._is_log = log
        self._xids: dict[int, int] = {}
        self._running: set[int] = set()
        self._next_xid = FIRST_XID
        self._completed = FIRST_XID - 1

    # -- transactions --------------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """The number of a new transaction."""
        self._next_xid += 1
        self._running.add(self._next_xid - 1)
        return self._next_xid - 1

    def end(self, xid: int) -> None:
        """It has committed, or rolled back."""
        self._running.discard(xid)
        self._completed = max(self._completed, xid)

    def snapshot(self) -> Snapshot:
        """Who is at work. As on PostgreSQL, those above the newest that has ended are not listed."""
        xmax = self._completed + 1
        running = tuple(sorted(xid for xid in self._running if xid < xmax))
        return Snapshot(min(running, default=xmax), xmax, running)

    def register(self, connection: Any, records: Iterable[RouteRecord]) -> int:
        shards = super().register(connection, records)
        for lane in self._lanes.values():
            if self._is_log and lane.cursor is None:
                lane.cursor = Cursor()
        return shards

    def append(self, connection: Any, deliveries: Sequence[Delivery], *, xid: int | None = None) -> None:
        written_by = self.begin() if xid is None else xid
        super().append(connection, deliveries)
        last = self._last_id
        self._xids.update(dict.fromkeys(range(last - len(deliveries) + 1, last + 1), written_by))
        if xid is None:
            self.end(written_by)

    # -- looking -------------------------------------------------------------------------------------------------------

    async def poll(self, lane: Lane, *, limit: int, max_bytes: int = 4_194_304, paused: Collection[str] = ()) -> Page:
        page = await super().poll(lane, limit=limit, max_bytes=max_bytes, paused=paused)
        if lane.cursor is None:
            return page
        window = self._look(lane, limit, max_bytes)
        rows = [self._rows[row].row for row in window.ids]
        return replace(
            page,
            fresh=tuple(row for row in rows if row.tenant not in paused),
            held=tuple(row for row in rows if row.tenant in paused),
            cursor=window,
        )

    def _look(self, lane: Lane, limit: int, max_bytes: int) -> Window:
        start, snapshot = position(lane), self.snapshot()
        if snapshot.lies_below(start.paging or start.seen):
            raise LaneHaltedError(f"lane {lane} has seen more than there is: the database went back in time")
        rows = [row for row in self._written(lane.name) if row not in lane.discarded]
        window = look(start, rows, snapshot, limit)
        if start.paging is not None and not window.ids:
            window = look(Cursor(start.high, start.paging), rows, snapshot, limit)
        size, fitting = 0, 0
        for row in window.ids:
            size += len(self._rows[row].row.body)
            if fitting and size > max_bytes:
                break
            fitting += 1
        return window if fitting == len(window.ids) else look(window.start, rows, snapshot, fitting)

    def _written(self, lane: LaneName) -> list[RowAt]:
        """All that was ever committed to a lane."""
        return [RowAt(row, self._xids[row]) for row, it in sorted(self._rows.items()) if it.lane == lane]

    def _has_work(self, name: LaneName, now: float) -> bool:
        kept = self._lanes[name]
        if kept.cursor is None:
            return super()._has_work(name, now)
        fresh, kept.fresh = kept.fresh, {}
        try:
            waits = super()._has_work(name, now)
        finally:
            kept.fresh = fresh
        dead = self._discarded(name)
        rows = [row for row in self._written(name) if row not in dead]
        return waits or kept.cursor.paging is not None or bool(look(kept.cursor, rows, self.snapshot(), 1).ids)

    # -- progress ------------------------------------------------------------------------------------------------------

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        if lane.cursor is None:
            return await super().announce(lane, batch, settle=settle)
        start, window = position(lane), batch.cursor
        dealt = {*batch.items, *batch.parked, *(failure.row for failure in batch.failures)}
        to = start if window is None else window.dealt_with(dealt)
        ends = {"start": str(start if window is None else window.start), "to": str(to)}
        await super().announce(lane, replace(batch, details={**batch.details, **ends}), settle=settle)
        self._lanes[lane.name].cursor = start if batch.items else to
        return self._lane(lane.name)

    async def settle(self, lane: Lane) -> Lane:
        settled = await super().settle(lane)
        if lane.cursor is None:
            return settled
        self._lanes[lane.name].cursor = position(lane)
        return self._lane(lane.name)

    async def rebuild(self, lane: Lane) -> list[tuple[int, Row]]:
        found = await super().rebuild(lane)
        if lane.cursor is None or lane.announced is None:
            return found
        start, end = (Cursor.parse(lane.announced.details[name]) for name in ("start", "to"))
        between = {row.id for row in self._written(lane.name) if end.covers(row) and not start.covers(row)}
        if strange := [row.id for _, row in found if not (row.id in between or start.covers(self._at(row.id)))]:
            raise BatchMismatchError(f"the cursors of batch {lane.batch} of lane {lane} do not hold {strange}")
        return found

    def _at(self, row: int) -> RowAt:
        return RowAt(row, self._xids[row])

    def _lane(self, name: LaneName) -> Lane:
        lane, kept = super()._lane(name), self._lanes[name]
        return lane if kept.cursor is None else replace(lane, cursor=kept.cursor, discarded=self._discarded(name))

    def _discarded(self, name: LaneName) -> frozenset[RowAt]:
        kept = self._lanes[name]
        return frozenset(
            self._at(row)
            for row, it in self._rows.items()
            if it.lane == name and it.status is Status.DISCARDED and not kept.cursor.covers(self._at(row))
        )
