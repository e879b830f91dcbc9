"""Every interleaving of a few transactions with the reader of a lane: nothing missing, doubled or inverted.

The database is a model of PostgreSQL's rules: transactions get their id at their first write, perhaps long before a row
of the outbox; rows get theirs when they are written, under the lock of their key; a snapshot ends behind the latest
*completed* transaction, so that what runs above it is not listed. The reader is the code that ships,
`pillarbox.cursor`: it looks with several limits, announces any prefix of what it found, or dies and leaves the rest to
a successor, at any moment. All states that can be reached are visited, and in each of them must hold:

- what the cursor covers has been delivered, and what it does not cover has not (so nothing is missing or doubled);
- within a key, deliveries are in the order in which the lock was held;
- the newest batch, rebuilt from its two cursors, is the very batch;
- what may be pruned has been delivered.

Wrong readers, each with a plausible mistake, are visited, too: each must break the promise that it is expected to.

    python -m tests.prove.cursor_model            all scenarios
    python -m tests.prove.cursor_model --stories  how each wrong reader fails, step by step
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from pillarbox.cursor import FIRST_XID, Cursor, RowAt, Snapshot, Window, look

# -- the database ------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of the outbox. The version counts the changes of its key: the order in which the lock was held."""

    id: int
    xid: int
    key: str
    version: int
    owner: int
    """The place of its transaction in the scenario."""
    savepoint: bool = False
    """Whether it belongs to a savepoint that is still open."""

    @property
    def at(self) -> RowAt:
        return RowAt(self.id, self.xid)


class Tx(NamedTuple):
    """How far a transaction has come."""

    step: int = 0
    xid: int = 0
    top: int = 0
    """The highest transaction id that it has used: savepoints have ids of their own."""
    ended: bool = False


class World(NamedTuple):
    """The database, and the transactions at work in it. ``committed`` is sorted by id."""

    txs: tuple[Tx, ...]
    next_xid: int = FIRST_XID
    completed: int = FIRST_XID - 1
    """The latest transaction id that has ended, by commit or rollback."""
    next_id: int = 1
    pending: tuple[Row, ...] = ()
    committed: tuple[Row, ...] = ()

    @property
    def snapshot(self) -> Snapshot:
        """As ``pg_current_snapshot()`` gives it: what runs above the latest completed one is not listed."""
        xmax = self.completed + 1
        running = tuple(sorted(tx.xid for tx in self.txs if tx.xid and not tx.ended and tx.xid < xmax))
        return Snapshot(min(running, default=xmax), xmax, running)

    @property
    def at_rest(self) -> bool:
        """No transaction is at work."""
        return all(tx.ended or not tx.xid for tx in self.txs)


Step = tuple[str, World]


def steps(world: World, programs: Sequence[str]) -> Iterator[Step]:
    """All that can happen in the database next."""
    for index, (tx, program) in enumerate(zip(world.txs, programs, strict=True)):
        if tx.ended:
            continue
        if tx.xid:
            yield f"T{index + 1} rolls back", _ended(world, index, ())
        if tx.step == len(program):
            yield f"T{index + 1} commits", _ended(world, index, _rows_of(world, index))
        else:
            yield from _step(world, index, program)


def _step(world: World, index: int, program: str) -> Iterator[Step]:
    """The next letter of a transaction: ``.`` writes elsewhere, a letter locks its key and writes a row, ``(`` and
    ``)`` are a savepoint, which may be kept or rolled back.
    """
    tx, letter, name = world.txs[index], program[world.txs[index].step], f"T{index + 1}"
    if letter == ")":
        yield f"{name} keeps its savepoint", _moved(world, index, pending=_kept(world, index))
        undone = tuple(row for row in world.pending if not (row.owner == index and row.savepoint))
        yield (
            f"{name} rolls its savepoint back",
            _moved(world, index, pending=undone, completed=max(world.completed, tx.top)),
        )
        return
    if letter == "(":  # its first write follows at once: only that can be noticed
        world, letter = _moved(world, index), program[tx.step + 1]
    if letter != "." and any(row.key == letter and row.owner != index for row in world.pending):
        return  # somebody else holds the lock
    world = _with_xid(world, index)
    if letter == ".":
        yield f"{name} gets the transaction id {world.txs[index].xid}", _moved(world, index)
        return
    inside = program[: world.txs[index].step].endswith("(")
    if inside:
        world = _with_savepoint_xid(world, index)
    known = [row.version for row in world.committed + world.pending if row.key == letter]
    row = Row(world.next_id, world.txs[index].xid, letter, max(known, default=0) + 1, index, inside)
    where = " in a savepoint" if inside else ""
    yield (
        f"{name}, which is transaction {row.xid}, writes row {row.id} of {letter}{where}",
        _moved(world, index, pending=(*world.pending, row), next_id=row.id + 1),
    )


def _moved(world: World, index: int, **changes: Any) -> World:
    tx = world.txs[index]
    return _with_tx(world, index, tx._replace(step=tx.step + 1))._replace(**changes)


def _with_tx(world: World, index: int, tx: Tx) -> World:
    return world._replace(txs=(*world.txs[:index], tx, *world.txs[index + 1 :]))


def _with_xid(world: World, index: int) -> World:
    tx, xid = world.txs[index], world.next_xid
    if tx.xid:
        return world
    return _with_tx(world, index, tx._replace(xid=xid, top=xid))._replace(next_xid=xid + 1)


def _with_savepoint_xid(world: World, index: int) -> World:
    top = world.next_xid
    return _with_tx(world, index, world.txs[index]._replace(top=top))._replace(next_xid=top + 1)


def _kept(world: World, index: int) -> tuple[Row, ...]:
    return tuple(row._replace(savepoint=False) if row.owner == index else row for row in world.pending)


def _rows_of(world: World, index: int) -> tuple[Row, ...]:
    return tuple(row for row in world.pending if row.owner == index)


def _ended(world: World, index: int, committed: tuple[Row, ...]) -> World:
    tx = world.txs[index]
    return _with_tx(world, index, tx._replace(ended=True))._replace(
        completed=max(world.completed, tx.top),
        pending=tuple(row for row in world.pending if row.owner != index),
        committed=tuple(sorted(world.committed + committed)),
    )


# -- the reader --------------------------------------------------------------------------------------------------------


class View(NamedTuple):
    """What a statement sees."""

    rows: tuple[Row, ...]
    snapshot: Snapshot


class Found(NamedTuple):
    """The answer to a look: rows in the order of their delivery, and the cursor once the first n are dealt with."""

    start: Any
    rows: tuple[Row, ...]
    after: tuple[Any, ...]


class Half(NamedTuple):
    """Between the two statements of a reader that needs two."""

    view: View
    limit: int


class Bounds(NamedTuple):
    """The two cursors of a batch, and its rows."""

    start: Any
    end: Any
    rows: tuple[Row, ...]


class Reader:
    """The reader that ships. Its cursors are stored as text, as in a lane's row."""

    two_statements = False
    limits: tuple[int, ...] = (1, 2)
    beginning: Any = str(Cursor())

    def found(self, cursor: Any, view: View, limit: int, *, earlier: View | None = None) -> Found:
        """One look. With two statements, ``earlier`` is what the first one saw."""
        seen = earlier or view
        window = self.window(Cursor.parse(cursor), [row.at for row in seen.rows], seen.snapshot, limit)
        return _answer(window, view.rows, [self.after(window, count) for count in range(len(window.ids) + 1)])

    def window(self, cursor: Cursor, rows: Sequence[RowAt], snapshot: Snapshot, limit: int) -> Window:
        return look(cursor, rows, snapshot, limit)

    def after(self, window: Window, count: int) -> Cursor:
        return window.dealt_with(window.ids[:count])

    def rebuild(self, start: Any, end: Any, view: View) -> tuple[int, ...]:
        """The batch between two cursors, from what is in the table now."""
        first, last = Cursor.parse(start), Cursor.parse(end)
        return tuple(row.id for row in view.rows if last.covers(row.at) and not first.covers(row.at))

    def covers(self, cursor: Any, row: Row) -> bool | None:
        """Whether the row counts as dealt with; None if this reader makes no such statement."""
        return Cursor.parse(cursor).covers(row.at)

    def prunable(self, cursor: Any, row: Row) -> bool:
        """Whether retention may delete the row, once this cursor is settled."""
        settled = Cursor.parse(cursor)
        return row.id <= settled.high and row.xid < settled.seen.xmin


def _answer(window: Window, rows: Sequence[Row], after: Sequence[Cursor]) -> Found:
    by_id = {row.id: row for row in rows}
    return Found(str(window.start), tuple(by_id[each] for each in window.ids), tuple(map(str, after)))


class Wrong(Reader):
    """A reader with a mistake, which must be found by breaking this promise."""

    breaks: str

    def covers(self, cursor: Any, row: Row) -> bool | None:  # noqa: ARG002  what it believes does not matter
        return None


class HighWaterMark(Wrong):
    """Remembers the highest id, and nothing else (H01)."""

    breaks = "missing"

    def window(self, cursor: Cursor, rows: Sequence[RowAt], snapshot: Snapshot, limit: int) -> Window:
        fresh = [row.id for row in rows if row.id > cursor.high]
        return Window(cursor, snapshot, fresh=tuple(fresh[:limit]))


class ListedOnly(Wrong):
    """Takes for late only what the snapshot lists as running: transactions at or above xmax are not listed."""

    breaks = "missing"

    def window(self, cursor: Cursor, rows: Sequence[RowAt], snapshot: Snapshot, limit: int) -> Window:
        wanted = [row for row in rows if row.id > cursor.high or row.xid in cursor.seen.running]
        return look(cursor, wanted, snapshot, limit)


class SnapshotLater(Wrong):
    """Reads the rows, and asks for the snapshot by another statement."""

    breaks = "missing"
    two_statements = True

    def found(self, cursor: Any, view: View, limit: int, *, earlier: View | None = None) -> Found:
        assert earlier is not None
        return _mixed(cursor, earlier, view.snapshot, limit)


class SnapshotBefore(Wrong):
    """Asks for the snapshot, and reads the rows by another statement."""

    breaks = "doubled"
    two_statements = True

    def found(self, cursor: Any, view: View, limit: int, *, earlier: View | None = None) -> Found:
        assert earlier is not None
        return _mixed(cursor, view, earlier.snapshot, limit)


def _mixed(cursor: Any, view: View, snapshot: Snapshot, limit: int) -> Found:
    """A look whose rows and whose snapshot are from different statements."""
    window = look(Cursor.parse(cursor), [row.at for row in view.rows], view.snapshot, limit)
    if window.start.paging is None:
        window = replace(window, snapshot=snapshot)
    return _answer(window, view.rows, [window.dealt_with(window.ids[:n]) for n in range(len(window.ids) + 1)])


class OnStandby(Wrong):
    """Looks at a standby, whose snapshots list nothing (H106)."""

    breaks = "missing"

    def found(self, cursor: Any, view: View, limit: int, *, earlier: View | None = None) -> Found:  # noqa: ARG002
        return _mixed(cursor, view, replace(view.snapshot, running=()), limit)


class OwnSnapshotPerPage(Wrong):
    """Pages through late rows with a snapshot of its own for every page."""

    breaks = "missing"

    def window(self, cursor: Cursor, rows: Sequence[RowAt], snapshot: Snapshot, limit: int) -> Window:
        if cursor.paging is not None:
            cursor = replace(cursor, paging=snapshot)
        return look(cursor, rows, snapshot, limit)


class ByTransaction(Wrong):
    """Delivers a window in the order of transaction ids (H02)."""

    breaks = "inverted"

    def found(self, cursor: Any, view: View, limit: int, *, earlier: View | None = None) -> Found:  # noqa: ARG002
        right = super().found(cursor, view, limit)
        rows = tuple(sorted(right.rows, key=lambda row: (row.xid, row.id)))
        whole = right.after[-1]  # a part of it would make no sense in this order
        return Found(
            right.start, rows, tuple(whole if count == len(rows) else cursor for count in range(len(rows) + 1))
        )

    def rebuild(self, start: Any, end: Any, view: View) -> tuple[int, ...]:
        wanted = {*super().rebuild(start, end, view)}
        return tuple(row.id for row in sorted(view.rows, key=lambda row: (row.xid, row.id)) if row.id in wanted)


class CutIsForgotten(Wrong):
    """Takes the snapshot of the look for the new one, though only a part of the late rows was dealt with."""

    breaks = "missing"

    def after(self, window: Window, count: int) -> Cursor:
        if window.ids and 0 < count < len(window.late) and window.start.paging is None:
            return Cursor(window.start.high, window.snapshot)
        return super().after(window, count)


class FullPageIsLast(Wrong):
    """Takes a page for the last one, because it has asked for no more than that."""

    breaks = "missing"

    def window(self, cursor: Cursor, rows: Sequence[RowAt], snapshot: Snapshot, limit: int) -> Window:
        return replace(look(cursor, rows, snapshot, limit), more=False)


class LateAskedLater(Wrong):
    """Asks for the transactions of late rows by another statement, and not for those of the first one's snapshot."""

    breaks = "doubled"
    two_statements = True
    limits = (1,)

    def found(self, cursor: Any, view: View, limit: int, *, earlier: View | None = None) -> Found:
        assert earlier is not None
        start = Cursor.parse(cursor)
        window = look(start, [row.at for row in earlier.rows], earlier.snapshot, limit)
        if window.more and start.paging is None:
            later = look(start, [row.at for row in view.rows], view.snapshot, limit)
            window = replace(later, snapshot=window.snapshot)
        return _answer(window, view.rows, [window.dealt_with(window.ids[:n]) for n in range(len(window.ids) + 1)])


class RebuiltAnew(Wrong):
    """Rebuilds a batch with the snapshot of now, instead of the one that was announced (H103)."""

    breaks = "rebuilt differently"

    def rebuild(self, start: Any, end: Any, view: View) -> tuple[int, ...]:
        first, last = Cursor.parse(start), replace(Cursor.parse(end), seen=view.snapshot, paging=None)
        return tuple(row.id for row in view.rows if last.covers(row.at) and not first.covers(row.at))


class PrunedById(Wrong):
    """Deletes whatever has an id up to high (H101)."""

    breaks = "pruned too early"

    def prunable(self, cursor: Any, row: Row) -> bool:
        return row.id <= Cursor.parse(cursor).high


class Ahead(NamedTuple):
    """The cursor of `FreshFirst`: beside the pages, how far it has gone ahead of them."""

    cursor: str
    high: int = 0


class FreshFirst(Wrong):
    """Does not let fresh rows wait while late ones are paged through."""

    breaks = "inverted"
    beginning = Ahead(str(Cursor()))

    def found(self, cursor: Any, view: View, limit: int, *, earlier: View | None = None) -> Found:  # noqa: ARG002
        start, rows = Cursor.parse(cursor.cursor), [row.at for row in view.rows]
        window, by_id = look(start, rows, view.snapshot, limit), {row.id: row for row in view.rows}
        fresh = [row.id for row in rows if row.id > start.high][:limit]
        if not window.more or start.paging or not fresh:
            after = [_caught_up(window.dealt_with(window.ids[:n]), cursor.high) for n in range(len(window.ids) + 1)]
            return Found(cursor, tuple(by_id[each] for each in window.ids), tuple(after))
        paging = str(start.paged(window.snapshot, window.xids))
        after = [cursor, *(Ahead(paging, high) for high in fresh)]
        return Found(cursor, tuple(by_id[each] for each in fresh), tuple(after))

    def rebuild(self, start: Any, end: Any, view: View) -> tuple[int, ...]:
        first, last = self._covered(start, view), self._covered(end, view)
        return tuple(row.id for row in view.rows if row.id in last and row.id not in first)

    @staticmethod
    def _covered(ahead: Ahead, view: View) -> set[int]:
        cursor = Cursor.parse(ahead.cursor)
        early = {row.id for row in view.rows if cursor.paging and cursor.high < row.id <= ahead.high}
        shown = {row.id for row in view.rows if cursor.paging and cursor.paging.shows(row.xid)}
        return {row.id for row in view.rows if cursor.covers(row.at)} | (early & shown)

    def prunable(self, cursor: Any, row: Row) -> bool:
        return super().prunable(cursor.cursor, row)


def _caught_up(cursor: Cursor, high: int) -> Ahead:
    """Once the last page is done, what was done ahead of it counts."""
    if cursor.paging is None:
        return Ahead(str(replace(cursor, high=max(cursor.high, high))))
    return Ahead(str(cursor), high)


WRONG: tuple[type[Wrong], ...] = (
    HighWaterMark,
    ListedOnly,
    SnapshotLater,
    SnapshotBefore,
    OnStandby,
    OwnSnapshotPerPage,
    FreshFirst,
    ByTransaction,
    CutIsForgotten,
    FullPageIsLast,
    LateAskedLater,
    RebuiltAnew,
    PrunedById,
)


class Lane(NamedTuple):
    """What is stored about the lane, what its owner has in memory, and what the destination has."""

    cursor: Any
    settled: Any
    batch: Bounds | None = None
    """The newest one. Announced as long as ``settled`` is not ``cursor``."""
    memory: Found | Half | None = None
    delivered: frozenset[int] = frozenset()
    versions: tuple[tuple[str, int], ...] = ()


class Sight(NamedTuple):
    """What of a world matters to the promises."""

    view: int
    pending: tuple[Row, ...]
    at_rest: bool


# -- all states --------------------------------------------------------------------------------------------------------

Value = TypeVar("Value", bound=Hashable)


class Numbers(Generic[Value]):
    """Gives every value a number, and the value for a number: a state is then two numbers."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._numbers: dict[Value, int] = {}

    def of(self, value: Value) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


@dataclass
class Result:
    """What a visit to all states has found."""

    states: int = 0
    broken: dict[str, int] = field(default_factory=dict)
    """How often each promise was broken."""
    story: list[str] = field(default_factory=list)
    """The shortest way to the first break."""


_SHIFT = 32
_MASK = (1 << _SHIFT) - 1


class Model:
    """A scenario with a reader: visits every state that can be reached, the nearest first."""

    def __init__(self, programs: Sequence[str], reader: Reader | None = None, *, limits: Sequence[int] = ()) -> None:
        self._programs = programs
        self._reader = reader or Reader()
        self._limits = limits or self._reader.limits
        self._until: str | None = None
        self._worlds: Numbers[World] = Numbers()
        self._lanes: Numbers[Lane] = Numbers()
        self._views: Numbers[View] = Numbers()
        self._steps: dict[int, tuple[int, ...]] = {}
        self._sights: Numbers[Sight] = Numbers()
        self._sight_of: dict[int, tuple[int, int]] = {}
        self._moves: dict[int, tuple[int, ...]] = {}
        self._looks: dict[tuple[Any, int], tuple[Found, ...]] = {}
        self._broken: dict[int, str] = {}
        """Lanes that could only be reached by breaking a promise."""
        self._checked: dict[int, str | None] = {}

    def visit(self, *, until: str | None = None) -> Result:
        """Visit all states; or, until one of them breaks this promise, whatever becomes of the others."""
        self._until = until
        begin = Lane(self._reader.beginning, self._reader.beginning)
        first = self._worlds.of(World(tuple(Tx() for _ in self._programs))) << _SHIFT | self._lanes.of(begin)
        came_from: dict[int, int] = {first: first}
        queue, result = deque([first]), Result()
        while queue:
            state = queue.popleft()
            world, lane = state >> _SHIFT, state & _MASK
            broken = self._broken.get(lane) or self._check(world, lane)
            if broken is not None:
                result.broken[broken] = result.broken.get(broken, 0) + 1
                result.story = result.story or [*self._story(came_from, state), broken]
                if until:
                    break
                continue
            following = [step << _SHIFT | lane for step in self._next_worlds(world)]
            following += [world << _SHIFT | move for move in self._next_lanes(world, lane)]
            for each in following:
                if each not in came_from:
                    came_from[each] = state
                    queue.append(each)
        result.states = len(came_from)
        return result

    def _next_worlds(self, world: int) -> tuple[int, ...]:
        found = self._steps.get(world)
        if found is None:
            found = tuple(self._worlds.of(step) for _, step in steps(self._worlds.values[world], self._programs))
            self._steps[world] = found
        return found

    def _next_lanes(self, world: int, lane: int) -> tuple[int, ...]:
        view, _ = self._sight(world)
        key = view << _SHIFT | lane
        found = self._moves.get(key)
        if found is None:
            moves = self._move(self._lanes.values[lane], view)
            found = self._moves[key] = tuple(number for _, number in moves)
        return found

    def _sight(self, world: int) -> tuple[int, int]:
        """What of the database matters to the reader, and what matters to us: many worlds have these in common."""
        found = self._sight_of.get(world)
        if found is None:
            now = self._worlds.values[world]
            view = self._views.of(View(now.committed, now.snapshot))
            found = self._sight_of[world] = view, self._sights.of(Sight(view, now.pending, now.at_rest))
        return found

    def _move(self, lane: Lane, view: int) -> list[tuple[str, int]]:
        """What the owner of the lane can do next."""
        moves = []
        if lane.memory is None:
            moves += [(said, self._lanes.of(lane._replace(memory=found))) for said, found in self._ask(lane, view)]
        else:
            moves.append(("the owner dies, another takes over", self._lanes.of(lane._replace(memory=None))))
        if isinstance(lane.memory, Half):
            now = self._views.values[view]
            found = self._reader.found(lane.cursor, now, lane.memory.limit, earlier=lane.memory.view)
            moves.append((f"the second statement: {_ids(found.rows)}", self._lanes.of(lane._replace(memory=found))))
        elif lane.memory is not None:
            moves += self._announce(lane, lane.memory)
        if lane.settled != lane.cursor:
            moves.append(("the batch is settled", self._lanes.of(lane._replace(settled=lane.cursor))))
        return moves

    def _ask(self, lane: Lane, view: int) -> Iterator[tuple[str, Found | Half]]:
        if self._reader.two_statements:
            for limit in self._limits:
                yield f"the first statement of a look, limit {limit}", Half(self._views.values[view], limit)
            return
        for limit, found in zip(self._limits, self._look(lane.cursor, view), strict=True):
            if found.rows or found.after[0] != lane.cursor:
                yield f"a look with limit {limit} finds {_ids(found.rows)}", found

    def _look(self, cursor: Any, view: int) -> tuple[Found, ...]:
        key = cursor, view
        if key not in self._looks:
            now = self._views.values[view]
            earlier = now if self._reader.two_statements else None
            looks = (self._reader.found(cursor, now, limit, earlier=earlier) for limit in self._limits)
            self._looks[key] = tuple(looks)
        return self._looks[key]

    def _announce(self, lane: Lane, found: Found) -> Iterator[tuple[str, int]]:
        """Any prefix of what was found, which is delivered then; the batch before it is settled by the same write."""
        for count in range(min(1, len(found.rows)), len(found.rows) + 1):
            rows, end = found.rows[:count], found.after[count]
            if end == lane.cursor:
                continue
            broken = _broken_by(lane, rows)
            if self._until not in (None, broken):
                broken = None
            delivered = lane.delivered.union(row.id for row in rows)
            versions = dict(lane.versions) | {row.key: row.version for row in rows}
            following = Lane(end, lane.cursor, Bounds(found.start, end, rows), None, delivered, _sorted(versions))
            if broken:  # a state of its own, which is not followed any further
                following = following._replace(memory=found)
            number = self._lanes.of(following)
            if broken:
                self._broken[number] = broken
            yield f"{_ids(rows)} announced and delivered, the cursor is {end}", number

    # -- promises ------------------------------------------------------------------------------------------------------

    def _check(self, world: int, lane: int) -> str | None:
        """The promise that is broken in this state."""
        _, sight = self._sight(world)
        key = sight << _SHIFT | lane
        if key not in self._checked:
            self._checked[key] = self._judge(self._sights.values[sight], self._lanes.values[lane])
        return self._checked[key]

    def _judge(self, sight: Sight, lane: Lane) -> str | None:
        return next((each for each in self._breaks(sight, lane) if self._until in (None, each)), None)

    def _breaks(self, sight: Sight, lane: Lane) -> Iterator[str]:
        reader, seen = self._reader, self._views.values[sight.view]
        for row in seen.rows + sight.pending:
            covered, delivered = reader.covers(lane.cursor, row), row.id in lane.delivered
            if covered is not None and covered != delivered:
                yield "missing" if covered else "doubled"
            if not delivered and reader.prunable(lane.settled, row):
                yield "pruned too early"
        if lane.batch is not None:
            wanted = tuple(row.id for row in lane.batch.rows)
            if reader.rebuild(lane.batch.start, lane.batch.end, seen) != wanted:
                yield "rebuilt differently"
        missing = any(row.id not in lane.delivered for row in seen.rows)
        if sight.at_rest and missing and lane.memory is None and self._is_idle(lane, sight.view):
            yield "missing"

    def _is_idle(self, lane: Lane, view: int) -> bool:
        """Whether nothing would ever be delivered any more."""
        return not any(found.rows or found.after[0] != lane.cursor for found in self._look(lane.cursor, view))

    # -- stories -------------------------------------------------------------------------------------------------------

    def _story(self, came_from: dict[int, int], state: int) -> list[str]:
        way = [state]
        while came_from[way[-1]] != way[-1]:
            way.append(came_from[way[-1]])
        way.reverse()
        return [self._told(before, after) for before, after in pairwise(way)]

    def _told(self, before: int, after: int) -> str:
        world, lane = before >> _SHIFT, before & _MASK
        if after & _MASK == lane:
            wanted = self._worlds.values[after >> _SHIFT]
            return next(said for said, step in steps(self._worlds.values[world], self._programs) if step == wanted)
        moves = self._move(self._lanes.values[lane], self._sight(world)[0])
        return next(said for said, number in moves if number == after & _MASK)


def _broken_by(lane: Lane, rows: Sequence[Row]) -> str | None:
    versions, delivered = dict(lane.versions), set(lane.delivered)
    for row in rows:
        if row.id in delivered:
            return "doubled"
        if row.version < versions.get(row.key, 0):
            return "inverted"
        versions[row.key] = row.version
        delivered.add(row.id)
    return None


def _sorted(versions: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(versions.items()))


def _ids(rows: Sequence[Row]) -> str:
    return f"rows {', '.join(str(row.id) for row in rows)}" if rows else "nothing"


# -- scenarios ---------------------------------------------------------------------------------------------------------

SMALL = (".K K", "K L", ".K L", "KK L", "M KK L", "KK L K", "(K) .L K")
"""One word for each transaction. A dot writes elsewhere, so that the transaction gets its number; a letter is a row of
that key; parentheses are a savepoint. Every wrong reader fails in one of these."""

LARGE = ("KK L K M", ".KL L K L", "(K)L MM .K", "KL LK K L", "(K) L K L", *SMALL)


def visit(scenario: str, *, limits: Sequence[int] = ()) -> Result:
    """The reader that ships, in one scenario."""
    return Model(scenario.split(), limits=limits).visit()


def expose(wrong: type[Wrong]) -> tuple[str, Result]:
    """The first scenario in which a wrong reader breaks what it is expected to."""
    for scenario in SMALL:
        result = Model(scenario.split(), wrong()).visit(until=wrong.breaks)
        if result.broken:
            return scenario, result
    return "", Result()


def _timed(scenario: str) -> tuple[Result, float]:
    started = time.perf_counter()
    return visit(scenario), round(time.perf_counter() - started, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", help="instead of the usual ones")
    parser.add_argument("--stories", action="store_true", help="tell how each wrong reader fails")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    started, scenarios = time.perf_counter(), given.scenario or LARGE
    with ProcessPoolExecutor(given.processes) as pool:
        right = dict(zip(scenarios, pool.map(_timed, scenarios), strict=True))
        wrong = dict(zip(WRONG, pool.map(expose, WRONG), strict=True))
    broken = {scenario: result.broken for scenario, (result, _) in right.items() if result.broken}
    hidden = [reader.__name__ for reader, (scenario, _) in wrong.items() if not scenario]
    for scenario, (result, _) in right.items():
        if result.broken:
            _tell(f"the reader that ships, in {scenario!r}", result)
    if given.stories:
        for reader, (scenario, result) in wrong.items():
            _tell(f"{reader.__name__}: {reader.__doc__} In {scenario!r}:", result)
    report = {
        "states": sum(result.states for result, _ in right.values()),
        "broken": broken,
        "scenarios": {name: {"states": result.states, "seconds": seconds} for name, (result, seconds) in right.items()},
        "wrong_readers": {
            reader.__name__: {"breaks": reader.breaks, "scenario": scenario, "states": result.states}
            for reader, (scenario, result) in wrong.items()
        },
        "wrong_readers_not_caught": hidden,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(report, indent=2))
    return int(bool(broken or hidden))


def _tell(heading: str, result: Result) -> None:
    print(f"\n{heading}", *(f"  {step}" for step in result.story), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
