"""The inbox in memory, without a database.

The connection is a `MemoryTransaction`, or None: then what is written stays at once. A row that a transaction has
written is its own until it ends; others see what was there before, and whoever wants to write it is told by
`RowLockedError` whom to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar
from uuid import UUID

from pillarbox import clock
from pillarbox.errors import ConcurrencyError, StoreError
from pillarbox.inbox import Admission, Admitted, Arrival, Claim, Spill
from pillarbox.stores.inbox import Seen, admissions

_Place = tuple[int, str, UUID]
_Key = TypeVar("_Key", bound=Hashable)
_Row = TypeVar("_Row")
_Found = TypeVar("_Found")


class RowLockedError(StoreError):
    """Another transaction has written the row, and nobody knows yet whether that stands: try again when it is over."""

    def __init__(self, owner: MemoryTransaction) -> None:
        super().__init__("another transaction has written this row")
        self.owner = owner


class MemoryTransaction:
    """What was written in it stands or falls together."""

    def __init__(self) -> None:
        self.is_open = True
        self.has_gates: bool | None = None
        """Whether any line was gated when its statement began, while that waits for another transaction."""
        self._undo: list[Callable[[], None]] = []
        self._release: list[Callable[[], None]] = []
        self._waiting: list[Callable[[], object]] = []

    def attempt(self, function: Callable[..., _Found], *arguments: Any, **options: Any) -> _Found:
        """Call a function of this transaction; if it fails, it has done nothing, and holds nothing."""
        undo, release = len(self._undo), len(self._release)
        try:
            return function(self, *arguments, **options)
        except Exception:
            self._go_back(undo, release)
            raise

    def holds(self, release: Callable[[], None]) -> None:
        """It holds one more row; this lets go of it."""
        self._release.append(release)

    def wrote(self, undo: Callable[[], None]) -> None:
        """It has written; this undoes it."""
        self._undo.append(undo)

    def commit(self) -> None:
        """Let it stand."""
        self._undo.clear()
        self._end()

    def rollback(self) -> None:
        """Let nothing of it have happened."""
        self._end()

    def when_over(self, callback: Callable[[], object]) -> None:
        """Call it when nothing is held any more."""
        self._waiting.append(callback)

    def _end(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._go_back(0, 0)
        for callback in self._waiting:
            callback()

    def _go_back(self, undo: int, release: int) -> None:
        for step in reversed(self._undo[undo:]):
            step()
        for step in self._release[release:]:
            step()
        del self._undo[undo:], self._release[release:]


class MemoryTable(Generic[_Key, _Row]):
    """Rows by their keys."""

    def __init__(self) -> None:
        self.rows: dict[_Key, _Row] = {}
        """With those that are not committed."""
        self._held: dict[_Key, tuple[MemoryTransaction, _Row | None]] = {}
        """Who has written a row, and what was there before."""

    def seen(self, transaction: MemoryTransaction | None) -> Iterator[tuple[_Key, _Row]]:
        """The rows as this transaction sees them."""
        for key in self.rows | self._held:
            row = self.rows.get(key)
            owner, before = self._held.get(key, (transaction, row))
            visible = row if owner is transaction else before
            if visible is not None:
                yield key, visible

    def hold(self, transaction: MemoryTransaction | None, key: _Key) -> _Row | None:
        """The row, which nobody else may write from now on."""
        owner, _ = self._held.get(key, (None, None))
        if owner is not None and owner is not transaction:
            raise RowLockedError(owner)
        row = self.rows.get(key)
        if transaction is not None and owner is None:
            self._held[key] = transaction, row
            transaction.holds(lambda: self._let_go(key))
        return row

    def write(self, transaction: MemoryTransaction | None, key: _Key, row: _Row | None) -> None:
        """Put a row in its place, or nothing."""
        before = self.hold(transaction, key)
        if transaction is not None:
            transaction.wrote(lambda: self._set(key, before))
        self._set(key, row)

    def _set(self, key: _Key, row: _Row | None) -> None:
        if row is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = row

    def _let_go(self, key: _Key) -> None:
        del self._held[key]


class ClaimLockedError(ConcurrencyError):
    """Another transaction redeems the claim: nobody waits for that."""


class MemoryInbox:
    """`Inbox` without a database."""

    def __init__(self) -> None:
        self.table = MemoryTable[_Place, tuple[Seen, datetime]]()
        self.claims = MemoryTable[tuple[int, Claim], Spill]()

    def admit(
        self,
        connection: MemoryTransaction | None,
        consumer: int,
        tenant: str | None,
        arrivals: Sequence[Arrival],
        *,
        claims: int = 0,
        lines: Callable[[], Collection[int]] = tuple,
    ) -> Admitted:
        before = None if connection is None else connection.has_gates
        has_gates = self._has_gates(connection, claims) if before is None else before
        if connection is not None:
            connection.has_gates = has_gates
        found: dict[UUID, Seen] = {}
        for arrival in arrivals:
            row = self.table.hold(connection, (consumer, tenant or "", arrival.event_id))
            if row is not None:
                found[arrival.event_id] = row[0]
        if connection is not None:
            connection.has_gates = None
        answers = admissions(found, arrivals)
        now = clock.now()
        for arrival, answer in zip(arrivals, answers, strict=True):
            if answer is Admission.NEW:
                row = (arrival.schema_version, arrival.digest), now
                self.table.write(connection, (consumer, tenant or "", arrival.event_id), row)
        # A statement sees what was committed when it began: after a refusal, another one is needed.
        return Admitted(answers, self._gated(connection, claims, lines()) if found or has_gates else ())

    def _has_gates(self, connection: MemoryTransaction | None, claims: int) -> bool:
        return any(of == claims and spill.gate for (of, _), spill in self.claims.seen(connection))

    def _gated(self, connection: MemoryTransaction | None, claims: int, lines: Collection[int]) -> Collection[int]:
        seen = self.claims.seen(connection) if lines else ()
        return {claim.line for (of, claim), spill in seen if of == claims and spill.gate and claim.line in lines}

    def spill(
        self,
        connection: MemoryTransaction | None,
        claims: int,
        tenant: str | None,  # noqa: ARG002  a claim is found without it
        spills: Sequence[Spill],
    ) -> None:
        for spill in spills:
            self.claims.write(connection, (claims, spill.claim), spill)

    def redeem(self, connection: MemoryTransaction | None, claims: int, claim: Claim) -> tuple[bool, str | None]:
        try:
            spill = self.claims.hold(connection, (claims, claim))
        except RowLockedError as locked:
            raise ClaimLockedError("another transaction redeems this claim") from locked
        if spill is None:
            return False, None
        self.claims.write(connection, (claims, claim), None)
        return True, spill.refused

    def count_claims(self, connection: MemoryTransaction | None, claims: int, limit: int) -> int:
        return min(limit, sum(of == claims for (of, _), _ in self.claims.seen(connection)))

    def prune(self, connection: MemoryTransaction | None, consumer: int, older_than: timedelta, limit: int) -> int:
        before = clock.current().now() - older_than
        waiting = {claim.inbox_id for _, claim in self.claims.rows}
        rows = self.table.seen(connection)
        old = [(at, place) for place, (_, at) in rows if place[0] == consumer and at < before]
        gone = sorted(each for each in old if each[1][2] not in waiting)[:limit]
        for _, place in gone:
            self.table.write(connection, place, None)
        return len(gone)
