"""The log in memory: transactions with numbers, snapshots, and lanes with cursors, without a database.

What a look finds and where a lane stands is decided by the same code as on PostgreSQL (`pillarbox.cursor`). What
becomes of the rows is written down as in `store`, but no look goes by it: a row that the cursor has passed over
would stay PENDING for ever, and one that it finds twice is refused.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from msgspec.structs import replace

from pillarbox.cursor import FIRST_XID, Cursor, RowAt, Snapshot, Window, look
from pillarbox.errors import BatchMismatchError, LaneHaltedError, StoreError
from pillarbox.outbox import Batch, Delivery, Lane, LaneName, Page, RouteRecord, Row, Status
from pillarbox.stores.announced import detour_of, moved, position, settled, settled_at
from tests.memory.store import MemoryStore


class MemoryLook(NamedTuple):
    """What a page has to tell its announcement."""

    window: Window
    detour: str | None
    discarded: frozenset[int]


class MemoryLogStore(MemoryStore):
    """`LaneStore`, `OutboxStore` and `Appends` without a database. Appending is committing."""

    def __init__(self, *, log: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self._is_log = log
        self._xids: dict[int, int] = {}
        self._by_lane: dict[LaneName, list[RowAt]] = {}
        """All that was ever committed to each lane, in the order of their ids."""
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
        for row in range(self._last_id - len(deliveries) + 1, self._last_id + 1):
            self._xids[row] = written_by
            insort(self._by_lane.setdefault(self._rows[row].lane, []), RowAt(row, written_by))
        if xid is None:
            self.end(written_by)

    # -- looking -------------------------------------------------------------------------------------------------------

    async def poll(
        self,
        lane: Lane,
        *,
        limit: int,
        max_bytes: int = 4_194_304,
        paused: Collection[str] = (),
        detour: str | None = None,
    ) -> Page:
        if lane.cursor is None:
            return await super().poll(lane, limit=limit, max_bytes=max_bytes, paused=paused, detour=detour)
        page = replace(await super().poll(lane, limit=limit, max_bytes=max_bytes, paused=paused), fresh=())
        start = position(lane, detour)
        window = self._look(lane, start, detour, limit, max_bytes)
        if window is None:
            return page
        discarded = self._discarded(window)
        rows = [self._rows[row].row for row in window.ids if row not in discarded]
        if held := frozenset({row.tenant for row in rows}.intersection(paused)):
            return replace(page, held=held)
        moves = start.paging is not None or bool(discarded)
        if detour is None and not rows:
            moves = moves or window.after(0).high > start.high or self._is_late(lane, start)
        return replace(page, fresh=tuple(rows), passed=moves, cursor=MemoryLook(window, detour, discarded))

    def _is_late(self, lane: Lane, start: Cursor) -> bool:
        """Whether there is any late row, for whomever."""
        return bool(look(start, self._written(lane.name), self.snapshot(), 1).late)

    def _look(self, lane: Lane, start: Cursor, detour: str | None, limit: int, max_bytes: int) -> Window | None:
        """What a statement finds; None if a detour has nothing to look for."""
        snapshot, main = self.snapshot(), position(lane)
        if snapshot.lies_below(start.paging or start.seen):
            raise LaneHaltedError(f"lane {lane} has seen more than there is: the database went back in time")
        written = [row for row in self._written(lane.name) if snapshot.shows(row.xid)]
        if detour is not None:
            if start.paging is None and not main.leads(start):
                return None
            snapshot, written = main.seen, [row for row in written if row.id <= main.high]
        reach = max((row.id for row in written), default=0)
        rows = [row for row in written if detour_of(lane, self._tenant(row)) == detour]
        window = look(start, rows, snapshot, limit, reach)
        if start.paging is not None and not window.ids:
            behind = Cursor(start.high, start.paging)
            if detour is not None and not main.leads(behind):
                return Window(behind, behind.seen)
            window = look(behind, rows, snapshot, limit, reach)
        size, fitting = 0, 0
        for row in window.ids:
            if size >= max_bytes:
                break
            size += len(self._rows[row].row.body)
            fitting += 1
        return window if fitting == len(window.ids) else look(window.start, rows, snapshot, fitting, reach)

    def _tenant(self, row: RowAt) -> str | None:
        return self._rows[row.id].row.tenant

    def _written(self, lane: LaneName) -> Sequence[RowAt]:
        """All that was ever committed to a lane."""
        return self._by_lane.get(lane, ())

    def _has_work(self, name: LaneName, now: float) -> bool:
        kept = self._lanes[name]
        if kept.cursor is None:
            return super()._has_work(name, now)
        fresh, kept.fresh = kept.fresh, {}
        try:
            waits = super()._has_work(name, now)
        finally:
            kept.fresh = fresh
        open_detours = [at for tenant, at in kept.detours.items() if not self._paused_tenants.get(tenant)]
        if waits or kept.cursor.paging is not None or any(at != kept.cursor for at in open_detours):
            return True
        return bool(look(kept.cursor, self._written(name), self.snapshot(), 1).ids)

    # -- progress ------------------------------------------------------------------------------------------------------

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        if lane.cursor is None:
            return await super().announce(lane, batch, settle=settle)
        told: MemoryLook | None = batch.cursor
        detour = None if told is None else told.detour
        start = position(lane, detour)
        dealt = {*batch.items, *batch.parked, *(failure.row for failure in batch.failures)}
        if told is not None:
            dealt.update(takewhile(lambda row: row in dealt or row in told.discarded, told.window.ids))
        to = start if told is None else told.window.dealt_with(dealt)
        ends = {"start": str(start if told is None else told.window.start), "to": str(to), "detour": detour}
        following = settled(lane)
        await super().announce(lane, replace(batch, details={**batch.details, **ends}), settle=settle)
        return self._keep(following if batch.items else moved(following, detour, to))

    async def settle(self, lane: Lane) -> Lane:
        following = await super().settle(lane)
        return following if lane.cursor is None else self._keep(settled(lane))

    async def part(self, lane: Lane, tenants: Collection[str]) -> Lane:
        if lane.cursor is None:
            return await super().part(lane, tenants)
        detours = lane.detours or {}
        return self._divide(lane, {**dict.fromkeys(tenants, lane.cursor), **detours})

    async def join(self, lane: Lane, tenants: Collection[str]) -> Lane:
        if lane.cursor is None:
            return await super().join(lane, tenants)
        left = {it: at for it, at in (lane.detours or {}).items() if it not in tenants or not self._arrived(lane, it)}
        return lane if left == lane.detours else self._divide(lane, left)

    def _arrived(self, lane: Lane, detour: str) -> bool:
        at = position(lane, detour)
        if not position(lane).has_passed(at):
            return False
        found = self._look(lane, at, detour, len(self._rows) + 1, sys.maxsize)
        return found is not None and self._discarded(found).issuperset(found.ids)

    def _divide(self, lane: Lane, detours: Mapping[str, Any]) -> Lane:
        kept = self._fenced(lane)
        if lane.announced is not None:
            raise StoreError(f"lane {lane} has a batch under way: settle it first")
        kept.batch += 1
        kept.tries = 0
        return self._keep(replace(lane, detours=detours))

    def _keep(self, lane: Lane) -> Lane:
        kept = self._lanes[lane.name]
        kept.cursor, kept.detours = lane.cursor, dict(lane.detours or {})
        return self._lane(lane.name)

    async def rebuild(self, lane: Lane) -> list[tuple[int, Row]]:
        found = await super().rebuild(lane)
        if lane.cursor is None or lane.announced is None:
            return found
        start, end = (Cursor.parse(lane.announced.details[name]) for name in ("start", "to"))
        between = {row.id for row in self._written(lane.name) if end.covers(row) and not start.covers(row)}
        if strange := [row.id for _, row in found if row.id not in between and not self._is_passed(lane, row)]:
            raise BatchMismatchError(f"the cursors of batch {lane.batch} of lane {lane} do not hold {strange}")
        return found

    def _is_passed(self, lane: Lane, row: Row) -> bool:
        return settled_at(lane, detour_of(lane, row.tenant)).covers(self._at(row.id))

    def _at(self, row: int) -> RowAt:
        return RowAt(row, self._xids[row])

    def _lane(self, name: LaneName) -> Lane:
        lane, kept = super()._lane(name), self._lanes[name]
        if kept.cursor is None:
            return lane
        return replace(lane, cursor=kept.cursor, detours=dict(kept.detours))

    def _discarded(self, window: Window) -> frozenset[int]:
        return frozenset(row for row in window.ids if self._rows[row].status is Status.DISCARDED)
