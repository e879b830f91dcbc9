"""The inbox and the letters in memory, without a database. There are no transactions: what is written stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from msgspec.structs import replace

from .. import clock
from ..inbox import Admission, Arrival, Letter, LetterFilter, LetterKind, LetterState
from ..redaction import redacted
from .inbox import Seen, admissions

_Place = tuple[int, str]


class MemoryInbox:
    """`Inbox` without a database."""

    def __init__(self) -> None:
        self._rows: dict[_Place, dict[UUID, tuple[Seen, datetime]]] = {}

    def admit(
        self,
        connection: Any,  # noqa: ARG002  there is none
        consumer: int,
        tenant: str | None,
        arrivals: Sequence[Arrival],
    ) -> Sequence[Admission]:
        rows = self._rows.setdefault((consumer, tenant or ""), {})
        found = {arrival.event_id: rows[arrival.event_id][0] for arrival in arrivals if arrival.event_id in rows}
        answers = admissions(found, arrivals)
        now = clock.current().now()
        for arrival, answer in zip(arrivals, answers, strict=True):
            if answer is Admission.NEW:
                rows[arrival.event_id] = (arrival.schema_version, arrival.digest), now
        return answers

    def prune(
        self,
        connection: Any,  # noqa: ARG002  there is none
        consumer: int,
        older_than: timedelta,
        limit: int,
    ) -> int:
        before = clock.current().now() - older_than
        places = [rows for (owner, _), rows in self._rows.items() if owner == consumer]
        old = [(at, event_id, rows) for rows in places for event_id, (_, at) in rows.items() if at < before]
        gone = sorted(old, key=lambda row: row[:2])[:limit]
        for _, event_id, rows in gone:
            del rows[event_id]
        return len(gone)


class MemoryLetters:
    """`Letters` without a database."""

    def __init__(self) -> None:
        self._letters: dict[int, Letter] = {}
        self._last_id = 0

    def write(self, connection: Any, letters: Sequence[Letter]) -> Sequence[int]:  # noqa: ARG002  there is none
        now = clock.current().now()
        first = self._last_id + 1
        for letter in letters:
            self._last_id += 1
            reason = redacted(letter.reason)
            self._letters[self._last_id] = replace(
                letter, id=self._last_id, reason=reason, created_at=now, updated_at=now
            )
        return range(first, self._last_id + 1)

    def find(
        self,
        connection: Any,  # noqa: ARG002  there is none
        wanted: LetterFilter,
        *,
        after: int = 0,
        limit: int = 100,
    ) -> Sequence[Letter]:
        return [letter for letter in self._letters.values() if letter.id > after and _matches(letter, wanted)][:limit]

    def count(
        self,
        connection: Any,  # noqa: ARG002  there is none
        wanted: LetterFilter,
    ) -> Mapping[tuple[str, LetterKind], int]:
        found = (letter for letter in self._letters.values() if _matches(letter, wanted))
        return Counter((letter.consumer, letter.kind) for letter in found)

    def take(self, connection: Any, letter_id: int) -> Letter | None:  # noqa: ARG002  there is none
        letter = self._letters.get(letter_id)
        return letter if letter is not None and letter.state is LetterState.OPEN else None

    def close(self, connection: Any, letter_id: int, state: LetterState) -> bool:
        return self._change(connection, letter_id, state=state)

    def failed(self, connection: Any, letter_id: int, kind: LetterKind, reason: str) -> bool:
        letter = self.take(connection, letter_id)
        attempts = 0 if letter is None else letter.attempts + 1
        return self._change(connection, letter_id, kind=kind, reason=redacted(reason), attempts=attempts)

    def edit(self, connection: Any, letter_id: int, body: bytes) -> bool:
        return self._change(connection, letter_id, edited=body)

    def _change(self, connection: Any, letter_id: int, **changes: Any) -> bool:
        letter = self.take(connection, letter_id)
        if letter is None:
            return False
        self._letters[letter_id] = replace(letter, updated_at=clock.current().now(), **changes)
        return True


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
