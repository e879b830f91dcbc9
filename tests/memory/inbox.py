"""The inbox and the letters in memory, without a database.

The connection is a `MemoryTransaction`, or None: then what is written stays at once. A row that a transaction has
written is its own until it ends; others see what was there before, and whoever wants to write it is told by
`RowLockedError` whom to wait for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar
from uuid import UUID

from msgspec.structs import replace

from pillarbox import clock
from pillarbox.errors import StoreError
from pillarbox.inbox import Admission, Arrival, Letter, LetterFilter, LetterKind, LetterState
from pillarbox.redaction import redacted
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


class MemoryInbox:
    """`Inbox` without a database."""

    def __init__(self) -> None:
        self.table = MemoryTable[_Place, tuple[Seen, datetime]]()

    def admit(
        self, connection: MemoryTransaction | None, consumer: int, tenant: str | None, arrivals: Sequence[Arrival]
    ) -> Sequence[Admission]:
        found: dict[UUID, Seen] = {}
        for arrival in arrivals:
            row = self.table.hold(connection, (consumer, tenant or "", arrival.event_id))
            if row is not None:
                found[arrival.event_id] = row[0]
        answers = admissions(found, arrivals)
        now = clock.now()
        for arrival, answer in zip(arrivals, answers, strict=True):
            if answer is Admission.NEW:
                row = (arrival.schema_version, arrival.digest), now
                self.table.write(connection, (consumer, tenant or "", arrival.event_id), row)
        return answers

    def forget(self, connection: MemoryTransaction | None, consumer: int, tenant: str | None, arrival: Arrival) -> bool:
        place = consumer, tenant or "", arrival.event_id
        row = self.table.hold(connection, place)
        if row is None or row[0] != (arrival.schema_version, arrival.digest):
            return False
        self.table.write(connection, place, None)
        return True

    def prune(self, connection: MemoryTransaction | None, consumer: int, older_than: timedelta, limit: int) -> int:
        before = clock.now() - older_than
        old = [(at, place) for place, (_, at) in self.table.seen(connection) if place[0] == consumer and at < before]
        gone = sorted(old)[:limit]
        for _, place in gone:
            self.table.write(connection, place, None)
        return len(gone)


class MemoryLetters:
    """`Letters` without a database."""

    def __init__(self) -> None:
        self.table = MemoryTable[int, Letter]()
        self._last_id = 0

    def write(self, connection: MemoryTransaction | None, letters: Sequence[Letter]) -> Sequence[int]:
        now = clock.now()
        first = self._last_id + 1
        for letter in letters:
            self._last_id += 1
            reason = redacted(letter.reason)
            stored = replace(letter, id=self._last_id, reason=reason, created_at=now, updated_at=now)
            self.table.write(connection, self._last_id, stored)
        return range(first, self._last_id + 1)

    def find(
        self, connection: MemoryTransaction | None, wanted: LetterFilter, *, after: int = 0, limit: int = 100
    ) -> Sequence[Letter]:
        found = (letter for number, letter in self.table.seen(connection) if number > after)
        return [letter for letter in found if _matches(letter, wanted)][:limit]

    def count(self, connection: MemoryTransaction | None, wanted: LetterFilter) -> Mapping[tuple[str, LetterKind], int]:
        found = (letter for _, letter in self.table.seen(connection) if _matches(letter, wanted))
        return Counter((letter.consumer, letter.kind) for letter in found)

    def take(self, connection: MemoryTransaction | None, letter_id: int) -> Letter | None:
        letter = self.table.hold(connection, letter_id)
        return letter if letter is not None and letter.state is LetterState.OPEN else None

    def close(self, connection: MemoryTransaction | None, letter_id: int, state: LetterState) -> bool:
        return self._change(connection, letter_id, state=state)

    def failed(self, connection: MemoryTransaction | None, letter_id: int, kind: LetterKind, reason: str) -> bool:
        letter = self.take(connection, letter_id)
        attempts = 0 if letter is None else letter.attempts + 1
        return self._change(connection, letter_id, kind=kind, reason=redacted(reason), attempts=attempts)

    def edit(self, connection: MemoryTransaction | None, letter_id: int, body: bytes) -> bool:
        return self._change(connection, letter_id, edited=body)

    def prune(
        self,
        connection: MemoryTransaction | None,
        consumer: str,
        older_than: timedelta,
        limit: int,
        *,
        keep_decisions: bool = False,
    ) -> int:
        before = clock.now() - older_than
        gone = [
            number
            for number, letter in self.table.seen(connection)
            if letter.consumer == consumer and letter.state is not LetterState.OPEN and _changed_at(letter) < before
            if not (keep_decisions and letter.is_decision)
        ][:limit]
        for number in gone:
            self.table.write(connection, number, None)
        return len(gone)

    def _change(self, connection: MemoryTransaction | None, letter_id: int, **changes: Any) -> bool:
        letter = self.take(connection, letter_id)
        if letter is None:
            return False
        self.table.write(connection, letter_id, replace(letter, updated_at=clock.now(), **changes))
        return True


def _changed_at(letter: Letter) -> datetime:
    return letter.updated_at or clock.EPOCH


def _matches(letter: Letter, wanted: LetterFilter) -> bool:
    asked = (
        (wanted.consumer, letter.consumer),
        (wanted.tenant, letter.tenant),
        (wanted.event_type, letter.event_type),
        (wanted.event_id, letter.event_id),
        (wanted.topic, letter.message.topic),
        (wanted.key, letter.message.key),
    )
    return (
        all(value is None or value == found for value, found in asked)
        and (not wanted.kinds or letter.kind in wanted.kinds)
        and (not wanted.states or letter.state in wanted.states)
        and (wanted.ids is None or letter.id in wanted.ids)
    )
