"""Reads of a log: the next rows of a lane, and its cursor after them.

A read is one statement, whose result is assembled here. Nothing is written: the cursors before and after a batch define
its rows, so they can be read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection

from ..cursor import Cursor, Snapshot, Window
from ..errors import LaneHaltedError, StoreError
from ..outbox import Lane, Page, Row
from . import look_sql as sql
from .announced import contents_of, position
from .claims import Claims
from .failures import decode_headers, place, row_of
from .log_failures import LogFailures, book_of
from .statement import DirectStatement

_LOOK, _REQUEST, _REACHED, _IN_BOOK, _DUE = 2, 3, 4, 5, 6

SCAN = 20_000
"""Most rows that one read examines, where some of them are not for it."""
_WORTH_A_WRITE = 1_000
"""A detour that finds nothing moves its cursor only past this many ids or more."""
FILTERED = (
    "row level security hides deliveries from this role, and what a relay does not see it passes over: "
    "give it a role with BYPASSRLS, or the table's owner"
)


class Look(msgspec.Struct, frozen=True):
    """The facts of a page that its announcement needs."""

    window: Window
    server: str
    """The server of the read. After a failover, another server may reuse transaction ids that were read."""
    detour: str | None = None
    """The tenant of a detour's page."""
    discarded: frozenset[int] = frozenset()
    """Rows of the page that were discarded."""


class RowReader:
    """Reads the rows of a log: here, all content from the table."""

    at_a_glance: ClassVar[bool] = True
    """Whether a quick read is a single statement."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.questions = sql.questions_to(table)

    def glance(self, connection: Connection, parameters: dict[str, Any]) -> Sequence[Any]:
        """A quick read, which is usually enough. Rows that are too large may lack their bodies."""
        return self.glance_for(parameters).fetch(connection, parameters)

    def glance_for(self, parameters: dict[str, Any]) -> DirectStatement:
        """The statement of a quick read."""
        return self.questions.glances[bool(parameters["running"])]

    def look(self, connection: Connection, looks: sql.Looks, parameters: dict[str, Any]) -> Sequence[Any]:
        """A full read, with all bodies that fit into the bytes."""
        found = looks.light.fetch(connection, parameters)
        if not _lacks_bodies(found):
            return found
        # It may have left out rows that were too large, so its reach says nothing.
        return [values for values in looks.sized.fetch(connection, parameters) if values[0] != _REACHED]


class Room(NamedTuple):
    """Size limits of a page, and the source of its rows."""

    limit: int
    max_bytes: int
    reader: RowReader
    late: bool | None = None
    """Whether an earlier quick read has found late rows; None if there was none."""


class Found(msgspec.Struct, frozen=True):
    look: Look
    rows: list[Row]
    asked: dict[int, int]
    """Operators' requests, each with its row."""
    passed: bool
    """Whether the cursor should move even without rows to send. With rows, whether there are more behind them."""
    scan_exhausted: bool = False
    due: bool = True
    """Whether failed rows may be due, as far as the read has checked."""
    in_book: bool = False
    """Whether some of the rows may have been discarded."""


def poll(  # noqa: PLR0917  the parameters of one statement
    connection: Connection, lane: Lane, room: Room, paused: list[str], detour: str | None, found: Found | None
) -> Page:
    if found is not None:
        found = _without_discarded(found, connection, lane)
    elif detour is None or _may_find(lane, detour):
        found = look_at(connection, lane, detour, room)
    redo: tuple[Row, ...] = ()
    if lane.waiting and (found is None or found.due):
        redo = tuple(LogFailures(connection, lane, room.reader.table).redo(room.limit, room.max_bytes, paused))
    if found is None:
        return Page(redo=redo, fresh=())
    held = {tenant for row in found.rows if (tenant := row.tenant) is not None and tenant in paused} if paused else ()
    asked = found.asked
    if asked and (contents := contents_of(lane)) is not None:
        known = LogFailures(connection, lane, room.reader.table).know(asked.values())
        asked = {it: row for it, row in asked.items() if row not in known or not contents.holds(known[row].ahead, lane)}
    requests = tuple(Claims(connection, lane, room.reader.table).undisturbed(asked)) if asked else ()
    if held:
        return Page(redo=redo, fresh=(), held=frozenset(held), requests=requests)
    return Page(
        redo=redo,
        fresh=tuple(found.rows),
        passed=found.passed,
        scan_exhausted=found.scan_exhausted,
        requests=requests,
        cursor=found.look,
    )


def _may_find(lane: Lane, detour: str) -> bool:
    """Whether the lane may have skipped rows since the last read of the detour."""
    start, main = position(lane, detour), position(lane)
    return start.paging is not None or (start != main and main.leads(start))


def look_at(connection: Connection, lane: Lane, detour: str | None, room: Room) -> Found:
    """Read the next rows."""
    start = position(lane, detour)
    found = _look_from(start, connection, lane, detour, room)
    if start.paging is not None and not found.rows:  # the late rows that are left belong to detours
        behind = Cursor(start.high, start.paging)
        if detour is None or position(lane).leads(behind):
            found = _look_from(behind, connection, lane, detour, room)
        else:
            found = replace(found, look=replace(found.look, window=Window(behind, behind.seen)))
        found = replace(found, passed=True)
    return _without_discarded(found, connection, lane)


def _without_discarded(found: Found, connection: Connection, lane: Lane) -> Found:
    """The result without discarded rows. The cursor passes over them."""
    if not found.in_book:
        return found
    asked = {"route": lane.route.id, "shard": lane.shard, "ids": [row.id for row in found.rows]}
    discarded = frozenset(row for (row,) in sql.DISCARDED.fetch(connection, asked))
    if not discarded:
        return found
    rows = [row for row in found.rows if row.id not in discarded]
    return replace(found, look=replace(found.look, discarded=discarded), rows=rows, passed=True)


def question_of(start: Cursor, lane: Lane, room: Room) -> dict[str, Any]:
    return {
        "route": lane.route.id,
        "shard": lane.shard,
        "high": start.high,
        "limit": room.limit,
        "max_bytes": room.max_bytes,
        "xmax": str(start.seen.xmax),
        "running": [str(xid) for xid in start.seen.running],
    }


def _look_from(start: Cursor, connection: Connection, lane: Lane, detour: str | None, room: Room) -> Found:
    limit, reader, late = room.limit, room.reader, room.late
    parameters = question_of(start, lane, room)
    questions = reader.questions
    poll, page = questions.poll, questions.page
    main: Cursor | None = None
    if lane.detours:
        poll, page = questions.divided_poll, questions.divided_page
        parameters |= side(lane, detour) | {"snapshot": None, "up_to": None, "scan": SCAN}
        if detour is not None:
            main = position(lane)
            parameters |= {"snapshot": str(main.seen), "up_to": main.high}
    window = Looked(start, limit, detour)
    if start.paging is not None:
        found = reader.look(connection, page, {**parameters, **_late(start.late), "done": start.done})
        window.check(found)
        return window.of(found, start.paging, start.late)
    if late is None and not lane.detours:
        glanced, late = window.glance(reader.glance(connection, parameters))
        if glanced is not None:
            return glanced
    found = reader.look(connection, poll, parameters)
    count, snapshot, xids = window.check(found)
    if main is not None:
        snapshot = main.seen  # a detour sees only rows that the lane has skipped
    if count <= limit:
        return window.of(found, snapshot, xids)
    # More late rows than fit into one batch. To page through them, their transactions are enough.
    more = connection.execute(questions.late_xids, {**parameters, "snapshot": str(snapshot)}).scalars()
    xids = tuple(sorted({*more, *(xid for xid in start.seen.running if snapshot.shows(xid))}))
    found = reader.look(connection, page, {**parameters, **_late(xids), "done": 0})
    return window.of(found, snapshot, xids)


def side(lane: Lane, detour: str | None) -> dict[str, Any]:
    """Tenant parameters of a statement."""
    return {"detour": detour, "passed_over": [] if detour is not None else sorted(lane.detours or ())}


def _lacks_bodies(found: Sequence[Any]) -> bool:
    return any([values[7] is None and values[0] < _LOOK for values in found])  # noqa: C419  faster


def _late(xids: Iterable[int]) -> dict[str, list[str]]:
    return {"late": [str(xid) for xid in xids]}


class Looked(msgspec.Struct, frozen=True):
    """Evaluates the result of a read."""

    start: Cursor
    limit: int
    detour: str | None

    def check(self, found: Sequence[Any]) -> tuple[Any, Snapshot, tuple[int, ...]]:
        """The number of late rows (after a quick read, one of them), the read's snapshot, and their transactions."""
        _, count, _, told, xids, refused, *_ = next(values for values in found if values[0] == _LOOK)
        if refused == "standby":
            raise StoreError("this server is a standby: its snapshots do not show who is at work on the primary")
        if refused == "filtered":
            raise StoreError(FILTERED)
        snapshot, before = Snapshot.parse(told), self.start.paging or self.start.seen
        if snapshot.lies_below(before):
            raise LaneHaltedError(
                f"the lane has seen snapshot {before}, and the database is at {snapshot}: "
                "it went back in time, or is another one"
            )
        return count, snapshot, tuple(sorted(map(int, xids.split(",")))) if xids else ()

    def glance(self, found: Sequence[Any]) -> tuple[Found | None, bool]:
        """The result, if a quick read is enough; and whether there are late rows."""
        late, snapshot, _ = self.check(found)
        if late is not None or _lacks_bodies(found):
            return None, late is not None
        return replace(self.of(found, snapshot), due=any(values[0] == _DUE for values in found)), False

    def of(self, found: Sequence[Any], snapshot: Snapshot, xids: tuple[int, ...] = ()) -> Found:
        """The part of the result that fits into a batch."""
        rows = [
            Row(row_id, event, topic, key, tenant, decode_headers(headers), body, 0)
            for part, row_id, event, topic, key, tenant, headers, body in found
            if part < _LOOK
        ]
        rows.sort(key=attrgetter("id"))
        cut = len(rows) > self.limit
        del rows[self.limit :]
        count, server = next((values[1] or 0, values[6]) for values in found if values[0] == _LOOK)
        late = min(count, sum(values[0] == 0 for values in found), self.limit)
        more = late < count
        if more:  # fresh rows must not come before the last late one
            del rows[late:]
        reach, seen, passed_late = next(
            ((it[1] or 0, int(it[3]), it[4]) for it in found if it[0] == _REACHED), (0, 0, None)
        )
        window = Window(
            self.start,
            snapshot,
            late=tuple(row.id for row in rows[:late]),
            fresh=tuple(row.id for row in rows[late:]),
            xids=xids,
            more=more,
            reach=0 if cut or more else reach,
        )
        step = 1 if self.detour is None else _WORTH_A_WRITE
        passed = self.start.paging is not None or seen >= SCAN  # the read has not examined the rows behind
        if not rows:
            passed = passed or passed_late is not None or reach >= self.start.high + step
        in_book = next((values[1] for values in found if values[0] == _IN_BOOK), None)
        return Found(
            Look(window, server, self.detour),
            rows,
            {values[1]: int(values[4]) for values in found if values[0] == _REQUEST},
            passed,
            scan_exhausted=seen >= SCAN and not rows,
            in_book=late > 0 or (bool(rows) and in_book is not None and in_book <= rows[-1].id),
        )


def rebuild(connection: Connection, table: str, lane: Lane) -> list[tuple[int, Row]]:
    contents, announced = contents_of(lane), lane.announced
    if announced is None or contents is None:
        return []
    start, end = contents.ends(lane)
    parameters = {
        **place(lane),
        **side(lane, contents.detour),
        "xmax": str(start.seen.xmax),
        "running": [str(xid) for xid in start.seen.running],
        "snapshot": str(end.paging or end.seen),
        "late_after": start.done,
        "late_up_to": start.high if end.paging is None else end.done,
        "after": start.high,
        "up_to": start.high if end.paging is not None else end.high,
        "ids": [*contents.redo],
    }
    skip = {*contents.skip}
    rows = {values[0]: row_of(values) for values in connection.execute(sql.questions_to(table).between, parameters)}
    order = [*contents.redo, *(row for row in rows if row not in skip)]
    if contents.redo:
        rows |= {values[0]: row_of(values) for values in connection.execute(book_of(table).redone, parameters)}
    numbered = enumerate(announced.items or order, start=announced.first_number)
    found = [(number, rows[row]) for number, row in numbered if row in rows and row not in contents.out]
    lane.check_batch(found)
    if contents.attempts:
        attempts = contents.attempts
        found = [(number, replace(row, attempts=attempts.get(row.id, row.attempts))) for number, row in found]
    return found
