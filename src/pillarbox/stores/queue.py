"""The outbox as a queue, for MariaDB/MySQL and SQLite: a status per row.

A relay leases the lane, not its rows, so it locks nothing while it sends, and keys keep their order. Fresh rows are
found by their status, so the next poll finds a transaction that commits late, with a low id. Failed rows and the rows
behind them are in the failure book (`stores.failures`), and their status in the outbox follows it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncEngine

from ..errors import StoreError
from ..outbox import OUTBOUND, Announcement, Batch, Failure, Lane, LaneName, Page, Row, digest
from .announced import refuse_detours
from .append import Appender
from .claims import Claims
from .failures import place, row_of
from .leases import Leases, confirm, fenced, stored
from .queue_failures import QueueFailures, ready, rows_named, sending
from .queue_sql import Words, fresh, sent, words


class QueueStore(Appender, Leases):
    """`LaneStore`, `OutboxStore` and `Appends` on a relational database."""

    failures = QueueFailures

    def __init__(self, engine: AsyncEngine, table: str = OUTBOUND) -> None:
        Appender.__init__(self, table)
        Leases.__init__(self, engine)

    async def ready(self, routes: Collection[int], *, relay: str | None = None) -> frozenset[LaneName]:
        return await self.autocommit(self._ready, sorted(routes), relay)

    async def poll(
        self,
        lane: Lane,
        *,
        limit: int,
        max_bytes: int = 4_194_304,
        paused: Collection[str] = (),
        detour: str | None = None,
    ) -> Page:
        refuse_detours(detour)
        return await self.autocommit(self._poll, lane, limit, max_bytes, sorted(paused))

    async def part(self, lane: Lane, tenants: Collection[str]) -> Lane:
        refuse_detours(*tenants)
        return lane

    async def join(self, lane: Lane, tenants: Collection[str]) -> Lane:
        refuse_detours(*tenants)
        return lane

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        lane.check_announced(wanted=settle)
        following = _following(lane, batch)
        return await self.transaction(self._announce, lane, following, batch)

    async def amend(
        self,
        lane: Lane,
        failures: Sequence[Failure],
        *,
        parked: Sequence[int] = (),
        attempts: Mapping[int, int] | None = None,
    ) -> Lane:
        if lane.announced is None and (failures or parked or attempts):
            raise StoreError("there is no announced batch to amend")
        return await self.transaction(self._amend, lane, failures, parked, attempts or {})

    async def settle(self, lane: Lane) -> Lane:
        lane.check_announced()
        settled = replace(lane, announced=None, tries=0)
        return await self.transaction(self._settle, lane, settled)

    async def rebuild(self, lane: Lane) -> list[tuple[int, Row]]:
        return await self.autocommit(self._rebuild, lane)

    # -- reads ---------------------------------------------------------------------------------------------------------

    def _ready(self, connection: Connection, routes: list[int], relay: str | None) -> frozenset[LaneName]:
        statement = ready(self._words(connection), here=relay is not None)
        return frozenset(LaneName(*row) for row in connection.execute(statement, {"routes": routes, "relay": relay}))

    def _poll(self, connection: Connection, lane: Lane, limit: int, max_bytes: int, paused: list[str]) -> Page:
        on_their_way = sending(lane)
        asked = {**place(lane), "limit": limit, "max_bytes": max_bytes, "paused": paused, "sending": on_their_way}
        found = _fetched(connection, fresh(self.table, sending=bool(on_their_way), paused=bool(paused)), asked)
        rows = [row_of(values) for values in found if not values[8]]
        requests: Sequence[int] = ()
        if len(rows) < len(found):
            requests = Claims(connection, lane, self.table).undisturbed([values[0] for values in found if values[8]])
        redo = self.book(connection, lane).redo(limit, max_bytes, paused) if lane.waiting else ()
        return Page(redo=tuple(redo), fresh=tuple(sorted(rows, key=attrgetter("id"))), requests=tuple(requests))

    def _rebuild(self, connection: Connection, lane: Lane) -> list[tuple[int, Row]]:
        if lane.announced is None:
            return []
        pairs, attempts = _pairs(lane), _attempts(lane)
        rows = connection.execute(rows_named(self.table), {**place(lane), "ids": [row for row, _ in pairs]}).all()
        numbers = dict(pairs)
        found = sorted(((numbers[values[0]], row_of(values)) for values in rows), key=itemgetter(0))
        lane.check_batch(found)
        return [(number, replace(row, attempts=attempts.get(row.id, row.attempts))) for number, row in found]

    # -- writes --------------------------------------------------------------------------------------------------------

    def _announce(self, connection: Connection, lane: Lane, following: Lane, batch: Batch) -> Lane:
        values = stored(following.announced)
        fenced(connection, lane, batch=following.batch, next_number=following.next_number, tries=0, **values)
        book = self.book(connection, lane)
        book.settle()
        self._mark_sent(connection, lane)
        # Attempts are given back without a read: the row may have been sent or discarded meanwhile.
        given_back = book.know(failure.row for failure in batch.failures if not failure.error)
        book.fail(batch.failures, {*given_back, *(failure.row for failure in batch.failures if failure.error)})
        book.park(batch.parked, batch.parked)
        book.carry_out(following, batch.requests)
        return book.after(following)

    def _amend(
        self,
        connection: Connection,
        lane: Lane,
        failures: Sequence[Failure],
        parked: Sequence[int],
        attempts: Mapping[int, int],
    ) -> Lane:
        if lane.announced is None or not (failures or parked or attempts):
            confirm(connection, lane)
            return lane
        announced, batch = lane.announced, sending(lane)
        if strange := [row for row in attempts if row not in batch]:
            raise StoreError(f"row {strange[0]} is not in the announced batch of lane {lane}")
        rows = {*(failure.row for failure in failures), *parked}
        items = tuple(0 if row in rows else row for row in announced.items)
        left = [(number, row) for number, row in enumerate(items, start=announced.first_number) if row]
        book, counted = self.book(connection, lane), _attempts(lane)
        known = book.failed_before(attempts)
        told = counted | {row: count for row, count in attempts.items() if row not in known}
        details = {
            **announced.details,
            **({"attempts": {str(row): count for row, count in told.items()}} if told else {}),
        }
        amended = replace(announced, count=len(left), digest=digest(left), items=items, details=details)
        fenced(connection, lane, **stored(amended))
        book.count_attempts({row: count for row, count in attempts.items() if row in known})
        book.fail(failures, batch, counted)
        book.park(parked, batch)
        return book.after(replace(lane, announced=amended))

    def _settle(self, connection: Connection, lane: Lane, settled: Lane) -> Lane:
        fenced(connection, lane, tries=0, **stored(None))
        book = self.book(connection, lane)
        book.settle()
        self._mark_sent(connection, lane)
        return book.after(settled)

    def _mark_sent(self, connection: Connection, lane: Lane) -> None:
        if pairs := _pairs(lane):
            told = {**place(lane), "batch": lane.batch, "pairs": msgspec.json.encode(pairs).decode()}
            connection.execute(sent(self._words(connection)), told)

    def _words(self, connection: Connection) -> Words:
        return words(connection.dialect.name, self.table)


def _fetched(connection: Connection, statement: Any, parameters: dict[str, Any]) -> Sequence[Any]:
    """The rows in the driver's own form: they need no conversion, and wrappers would cost more than the rest."""
    result = connection.execute(statement, parameters)
    rows: Sequence[Any] = result.cursor.fetchall() if result.cursor is not None else ()
    result.close()
    return rows


def _following(lane: Lane, batch: Batch) -> Lane:
    """The lane after the batch is announced."""
    first, items = lane.next_number, tuple(batch.items)
    announced = None
    if items:
        announced = Announcement(first, len(items), digest(enumerate(items, start=first)), items, batch.details)
    return replace(lane, batch=lane.batch + 1, next_number=first + len(items), announced=announced, tries=0)


def _pairs(lane: Lane) -> list[tuple[int, int]]:
    """Row ids and numbers of the announced batch, by row id."""
    if lane.announced is None:
        return []
    return sorted((row, number) for number, row in enumerate(lane.announced.items, lane.announced.first_number) if row)


def _attempts(lane: Lane) -> dict[int, int]:
    """Attempts of rows of the announced batch that are suspected of killing relays, and have never failed."""
    told = {} if lane.announced is None else lane.announced.details.get("attempts", {})
    return {int(row): count for row, count in told.items()}
