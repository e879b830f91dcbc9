"""The outbox as a log, on PostgreSQL: the business transaction writes rows once, and nothing updates them.

The lane's row has its position as a cursor (`pillarbox.cursor`). One fenced UPDATE of that row settles a batch and
announces the next one. The cursors before and after a batch define its rows, so it can be read again at any time. Only
failures have rows of their own, in the failure book (`stores.failures`).

A row that a read misses is lost, because rows have no state. So a read is one statement, on a primary, without row
filters. A database whose transaction ids have changed, because it was restored or went back in time, is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncEngine

from ..cursor import Cursor, Window
from ..errors import LaneHaltedError, StoreError
from ..outbox import OUTBOUND, Announcement, Batch, Failure, Lane, LaneName, Page, Row, digest
from . import log_sql as sql
from .announced import Contents, contents_of, encode_detours, moved, position, settled, settled_at
from .append import Appender
from .copy_check import COPY
from .leases import Leases, confirm, fenced, lease_lost, stored
from .log_failures import LogFailures
from .look import FILTERED, Found, Look, Looked, Room, RowReader, look_at, poll, question_of, rebuild, side
from .schema import SCHEMA_VERSION

logger = logging.getLogger("pillarbox")

_AT_ONCE = 500
"""Number of rows of a detour that are checked together for one that is to be sent."""


class LogStore(Appender, Leases):
    """`LaneStore`, `OutboxStore` and `Appends` on PostgreSQL."""

    failures = LogFailures

    def __init__(self, engine: AsyncEngine, table: str = OUTBOUND) -> None:
        Appender.__init__(self, table)
        Leases.__init__(self, engine)
        self._warned = False
        self._rows = RowReader(table)
        self._places: dict[LaneName, str] = {}
        """Physical places of the lanes' rows after the last write."""

    def _take(self, connection: Connection, *arguments: Any) -> list[Lane]:
        guards = connection.execute(sql.guards(self.table)).one()
        if guards.standby:
            raise StoreError("this server is a standby: relays need the primary")
        taken = super()._take(connection, *arguments)
        if taken:
            self._check(guards)  # a refusal rolls the taking back
        return taken

    def _check(self, guards: Any) -> None:
        """Refuse a database in which the stored cursors would have another meaning."""
        _, original, cache, filtered, fsync, synchronous, schema = guards
        if schema > SCHEMA_VERSION:  # a newer release may store data in a lane that this one would ignore
            raise StoreError(f"the database has schema version {schema}, newer than this relay: upgrade pillarbox")
        if not original:
            raise StoreError(COPY)
        if filtered:
            raise StoreError(FILTERED)
        if cache != 1:
            raise StoreError(
                f"the ids of {self.table} are drawn {cache} at a time, so keys would lose their order: "
                f"ALTER TABLE {self.table} ALTER COLUMN id SET CACHE 1"
            )
        if not self._warned and (fsync != "on" or synchronous == "off"):
            logger.warning(
                "fsync is %s and synchronous_commit is %s: after a crash of the server, events may have left whose "
                "transactions it has forgotten",
                fsync,
                synchronous,
            )
        self._warned = True

    async def ready(self, routes: Collection[int], *, relay: str | None = None) -> frozenset[LaneName]:
        return await self.autocommit(_ready, self.table, sorted(routes), relay)

    async def poll(
        self,
        lane: Lane,
        *,
        limit: int,
        max_bytes: int = 4_194_304,
        paused: Collection[str] = (),
        detour: str | None = None,
    ) -> Page:
        try:
            return await self._look(lane, Room(limit, max_bytes, self._rows), sorted(paused), detour)
        except LaneHaltedError:
            # A crashed server may have lost relaxed writes, and the transactions that this relay has seen. Then the
            # lane has its earlier state for its next owner.
            if not await self._is_ours(lane):
                raise lease_lost(lane) from None
            raise

    async def _look(self, lane: Lane, room: Room, paused: list[str], detour: str | None) -> Page:
        found: Found | None = None
        if self._rows.at_a_glance and not (lane.detours or paused or detour):
            found, late = await self._glance(lane, room)
            if found is not None and not (found.asked or found.in_book or (found.due and lane.waiting)):
                return Page(redo=(), fresh=tuple(found.rows), passed=found.passed, cursor=found.look)
            room = room._replace(late=late)
        return await self.autocommit(poll, lane, room, paused, detour, found)

    async def _glance(self, lane: Lane, room: Room) -> tuple[Found | None, bool | None]:
        start = position(lane)
        if start.paging is not None:
            return None, None
        question = question_of(start, lane, room)
        return Looked(start, room.limit, None).glance(await self.fetch(self._rows.glance_for(question), question))

    async def part(self, lane: Lane, tenants: Collection[str]) -> Lane:
        parted = {**(lane.detours or {}), **{it: lane.cursor for it in tenants if it not in (lane.detours or ())}}
        return await self.transaction(_divide, lane, parted)

    async def join(self, lane: Lane, tenants: Collection[str]) -> Lane:
        return await self.transaction(self._join, lane, tenants)

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        lane.check_announced(wanted=settle)
        following, skipped = _following(lane, batch)
        if not (_redone(lane) or skipped or batch.failures or batch.parked or batch.requests):
            await self._write_at_once(lane, following, batch.cursor, relaxed=batch.relaxed)
            return following
        return await self.transaction(self._announce, lane, following, batch, skipped)

    async def amend(
        self,
        lane: Lane,
        failures: Sequence[Failure],
        *,
        parked: Sequence[int] = (),
        attempts: Mapping[int, int] | None = None,
    ) -> Lane:
        if failures or parked or attempts:
            if lane.announced is None:
                raise StoreError("there is no announced batch to amend")
            return await self.transaction(self._amend, lane, failures, parked, attempts or {})
        if lane.announced is not None:
            await self.transaction(confirm, lane)
        elif not await self._is_ours(lane):  # only checks the owner, so nothing is written
            raise lease_lost(lane)
        return lane

    async def settle(self, lane: Lane) -> Lane:
        lane.check_announced()
        following = settled(lane)
        if not _redone(lane):
            await self._write_at_once(lane, following)
            return following
        return await self.transaction(self._settle, lane, following)

    async def rebuild(self, lane: Lane) -> list[tuple[int, Row]]:
        return await self.autocommit(rebuild, self.table, lane)

    async def _is_ours(self, lane: Lane) -> bool:
        was_announced = stored(lane.announced)["announced"]
        return bool(await self.fetch(sql.STILL_OURS, {**_fence(lane), "was_announced": was_announced, "server": None}))

    async def _write_at_once(
        self, lane: Lane, following: Lane, look: Look | None = None, *, relaxed: bool = False
    ) -> None:
        """Write in one statement, the common case. If the write is relaxed and the server crashes, a successor finds
        the lane in its earlier state, and sends the later messages again. A settlement without a next batch is never
        relaxed, so an idle lane is on disk completely.
        """
        parameters = {
            **_entry(lane),
            **_fence(lane),
            "was_announced": stored(lane.announced)["announced"],
            "announced": stored(following.announced)["announced"],
            "cursor": str(following.cursor),
            # None leaves the detours unchanged: there may be many, and a batch moves one of them at most.
            "detours": None if following.detours is lane.detours else encode_detours(following.detours),
            "next_batch": following.batch,
            "next_number": following.next_number,
            "server": None if look is None else look.server,
        }
        settling = (sql.SETTLE, sql.SETTLE_RELAXED)[relaxed]
        announcing = (sql.ANNOUNCE, sql.ANNOUNCE_RELAXED)[relaxed]
        step = announcing if lane.announced is None else settling
        place = self._places.pop(lane.name, None)
        found: Sequence[Any] = ()
        if place is not None:
            found = await self.fetch(step.at_place, {**parameters, "place": place})
        if not found:  # the row has moved: by a renewal of this relay, or by another owner
            found = await self.fetch(step.by_key, parameters)
        if not found:
            raise lease_lost(lane)
        self._places[lane.name] = found[0][0]

    # -- in a transaction ----------------------------------------------------------------------------------------------

    def _announce(
        self, connection: Connection, lane: Lane, following: Lane, batch: Batch, skipped: tuple[int, ...]
    ) -> Lane:
        if batch.cursor is not None and connection.execute(sql.SERVER).scalar_one() != batch.cursor.server:
            raise lease_lost(lane)
        _write(connection, lane, following)
        if skipped and following.announced is None:
            detour = None if batch.cursor is None else batch.cursor.detour
            connection.execute(sql.JOURNAL, _entry(following, skipped, detour))
        failures = self.book(connection, lane)
        failures.settle()
        failures.fail(batch.failures, skipped)
        failures.park(batch.parked, skipped)
        failures.carry_out(following, batch.requests)
        return failures.after(following)

    def _settle(self, connection: Connection, lane: Lane, following: Lane) -> Lane:
        _write(connection, lane, following)
        failures = self.book(connection, lane)
        failures.settle()
        return failures.after(following)

    def _join(self, connection: Connection, lane: Lane, tenants: Collection[str]) -> Lane:
        detours = lane.detours or {}
        arrived = {it for it in tenants if it in detours and self._has_arrived(connection, lane, it)}
        if not arrived:
            return lane
        return _divide(connection, lane, {tenant: at for tenant, at in detours.items() if tenant not in arrived})

    def _has_arrived(self, connection: Connection, lane: Lane, detour: str) -> bool:
        """Whether the detour has sent everything that the lane has skipped, so that the lane's cursor is enough."""
        main, at = settled_at(lane), settled_at(lane, detour)
        while main.has_passed(at):
            found = look_at(connection, lane, detour, Room(_AT_ONCE, 1_048_576, RowReader(self.table)))
            if found.rows:
                return False
            if not found.passed:
                return True
            lane = moved(lane, detour, at := found.look.window.dealt_with(found.look.discarded))
        return False

    def _amend(
        self,
        connection: Connection,
        lane: Lane,
        failures: Sequence[Failure],
        parked: Sequence[int],
        attempts: Mapping[int, int],
    ) -> Lane:
        contents, announced = contents_of(lane), lane.announced
        if contents is None or announced is None:
            raise StoreError("there is no announced batch to amend")
        rows = {*(failure.row for failure in failures), *parked}
        book = self.book(connection, lane)
        known = book.know([*rows, *attempts])
        batch = {row for row in (*rows, *attempts) if row in known and contents.holds(known[row].ahead, lane)}
        if strange := [row for row in attempts if row not in batch]:
            raise StoreError(f"row {strange[0]} is not in the announced batch of lane {lane}")
        again = {row: count for row, count in attempts.items() if row in contents.redo}
        counted = contents.attempts | {row: count for row, count in attempts.items() if row not in again}
        changed = replace(contents, out=tuple(sorted({*contents.out, *rows})), attempts=counted)
        amended = replace(announced, details={**announced.details, **msgspec.to_builtins(changed, str_keys=True)})
        if rows:
            left = [(number, row.id) for number, row in rebuild(connection, self.table, lane) if row.id not in rows]
            amended = replace(amended, count=len(left), digest=digest(left))
        fenced(connection, lane, **stored(amended))
        book.count_attempts(again)
        book.fail(failures, batch, contents.attempts)
        book.park(parked, batch)
        return book.after(replace(lane, announced=amended))


def _ready(connection: Connection, table: str, routes: list[int], relay: str | None) -> frozenset[LaneName]:
    return frozenset(LaneName(*row) for row in connection.execute(sql.ready(table), {"routes": routes, "relay": relay}))


# -- progress ----------------------------------------------------------------------------------------------------------


def _redone(lane: Lane) -> bool:
    """Whether the announced batch may have failed rows."""
    return lane.announced is not None and bool(lane.announced.details.get("redo"))


def _following(lane: Lane, batch: Batch) -> tuple[Lane, tuple[int, ...]]:
    """The lane after the batch is announced, and the rows that its cursor passes without sending them."""
    look: Look | None = batch.cursor
    detour = None if look is None else look.detour
    reached, items = position(lane, detour), tuple(batch.items)
    window = Window(reached, reached.seen) if look is None else look.window
    redo: tuple[int, ...] = ()
    natural, skipped = window.ids, redo
    if look is not None and items == natural:  # the whole page, which is the usual case
        to = window.after(len(items))
    else:
        sent = {*items}
        dealt = {*items, *batch.parked, *(failure.row for failure in batch.failures)}
        if look is not None and (gone := look.discarded):
            dealt.update(takewhile(lambda row: row in dealt or row in gone, natural))
        to = reached if look is None else window.dealt_with(dealt)
        passed = [row for row in natural if row in dealt]
        skipped = tuple(row for row in passed if row not in sent)
        redo = tuple(sorted(sent.difference(passed)))
        natural = (*redo, *(row for row in passed if row in sent))
    following = replace(settled(lane), batch=lane.batch + 1, tries=0)
    if not items:
        return moved(following, detour, to), skipped
    first = lane.next_number
    contents = Contents(
        to=str(to),
        start=None if window.start == reached else str(window.start),
        detour=detour,
        redo=redo,
        skip=skipped,
    )
    announced = Announcement(
        first,
        len(items),
        digest(enumerate(items, start=first)),
        () if items == natural else items,
        {**batch.details, **msgspec.to_builtins(contents)},
    )
    return replace(following, next_number=first + len(items), announced=announced), skipped


def _fence(lane: Lane) -> dict[str, Any]:
    return {
        "route": lane.route.id,
        "shard": lane.shard,
        "batch": lane.batch,
        "epoch": lane.epoch,
        "token": str(lane.token),
    }


def _entry(lane: Lane, skipped: Sequence[int] = (), detour: str | None = None) -> dict[str, Any]:
    """The journal entry of the lane's batch."""
    entry: dict[str, Any] = {"route": lane.route.id, "shard": lane.shard, "batch": lane.batch}
    contents = contents_of(lane)
    if lane.announced is None or contents is None:
        cursor = settled_at(lane, detour)
        return entry | {
            "settled": str(cursor),
            "settled_high": cursor.high,
            "redone": [],
            "skipped": [*skipped],
            "first_number": lane.next_number,
            "count": 0,
            **side(lane, detour),
        }
    out = {*contents.out}
    return entry | {
        "settled": contents.to,
        "settled_high": int(contents.to.partition(" ")[0]),
        "redone": [row for row in contents.redo if row not in out],
        "skipped": [*contents.skip, *contents.out],
        "first_number": lane.announced.first_number,
        "count": lane.announced.count,
        **side(lane, contents.detour),
    }


def _write(connection: Connection, lane: Lane, following: Lane) -> None:
    fenced(
        connection,
        lane,
        batch=following.batch,
        next_number=following.next_number,
        tries=0,
        cursor=str(following.cursor),
        detours=encode_detours(following.detours),
        **stored(following.announced),
    )
    if lane.announced is not None:
        connection.execute(sql.JOURNAL, _entry(lane))


def _divide(connection: Connection, lane: Lane, detours: Mapping[str, Cursor]) -> Lane:
    """Change which tenants have a detour. This counts as a batch without rows, so that a successor does not mistake it
    for another batch.
    """
    if lane.announced is not None:
        raise StoreError(f"lane {lane} has a batch under way: settle it first")
    following = replace(lane, batch=lane.batch + 1, tries=0, detours=detours)
    _write(connection, lane, following)
    return following
