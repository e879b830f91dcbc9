"""The letters on a relational database. Whoever changes one names the state that it must have: of two, one is late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, insert, not_, or_, select, update

from ..inbox import UNDECIDING, Letter, LetterFilter, LetterKind, LetterState
from ..redaction import redacted
from ..transport import Message
from .append import explained
from .columns import from_now
from .tables import letters

_HEADERS = msgspec.json.Decoder(dict[str, str])


class SqlLetters:
    """`Letters` on PostgreSQL, MariaDB/MySQL and SQLite."""

    def write(self, connection: Connection, letters: Sequence[Letter]) -> Sequence[int]:
        with explained():
            return [_insert(connection, letter) for letter in letters]

    def find(
        self, connection: Connection, wanted: LetterFilter, *, after: int = 0, limit: int = 100
    ) -> Sequence[Letter]:
        page = select(letters).where(letters.c.id > after, *_conditions(wanted)).order_by(letters.c.id).limit(limit)
        with explained():
            return [_letter(row) for row in connection.execute(page)]

    def count(self, connection: Connection, wanted: LetterFilter) -> Mapping[tuple[str, LetterKind], int]:
        group = letters.c.consumer, letters.c.kind
        counted = select(*group, func.count()).where(*_conditions(wanted)).group_by(*group)
        with explained():
            return {(consumer, LetterKind(kind)): number for consumer, kind, number in connection.execute(counted)}

    def take(self, connection: Connection, letter_id: int) -> Letter | None:
        if connection.dialect.name == "sqlite" and not _change(connection, letter_id, {"state": letters.c.state}):
            return None  # there only a write locks, and it locks the whole database
        row = connection.execute(select(letters).where(*_is_open(letter_id)).with_for_update()).one_or_none()
        return None if row is None else _letter(row)

    def close(self, connection: Connection, letter_id: int, state: LetterState) -> bool:
        return _change(connection, letter_id, {"state": state, "updated_at": from_now()})

    def failed(self, connection: Connection, letter_id: int, kind: LetterKind, reason: str) -> bool:
        tried = {"kind": kind, "reason": redacted(reason), "attempts": letters.c.attempts + 1}
        return _change(connection, letter_id, {**tried, "updated_at": from_now()})

    def edit(self, connection: Connection, letter_id: int, body: bytes) -> bool:
        return _change(connection, letter_id, {"edited": body, "updated_at": from_now()})

    def prune(
        self, connection: Connection, consumer: str, older_than: timedelta, limit: int, *, keep_decisions: bool = False
    ) -> int:
        closed = [letters.c.consumer == consumer, letters.c.state != LetterState.OPEN]
        if keep_decisions:
            about_event = letters.c.event_id.is_not(None), letters.c.kind.not_in(UNDECIDING)
            changed = or_(letters.c.state == LetterState.DISCARDED, letters.c.edited.is_not(None))
            closed.append(not_(and_(*about_event, changed)))
        old = letters.c.updated_at < from_now(-older_than.total_seconds())
        found = connection.scalars(select(letters.c.id).where(*closed, old).order_by(letters.c.id).limit(limit)).all()
        if found:
            connection.execute(delete(letters).where(letters.c.id.in_(found)))
        return len(found)


def _insert(connection: Connection, letter: Letter) -> int:
    made: Any = connection.execute(
        insert(letters).values(
            consumer=letter.consumer,
            kind=letter.kind,
            state=letter.state,
            reason=redacted(letter.reason),
            tenant=letter.tenant,
            event_id=letter.event_id,
            event_type=letter.event_type,
            schema_version=letter.schema_version,
            topic=letter.message.topic,
            key=letter.message.key,
            headers=msgspec.json.encode(letter.message.headers).decode(),
            body=letter.message.body,
            edited=letter.edited,
            attempts=letter.attempts,
        )
    )
    return int(made.inserted_primary_key[0])


def _change(connection: Connection, letter_id: int, values: Mapping[str, Any]) -> bool:
    changed = update(letters).where(*_is_open(letter_id)).values(values)
    return connection.execute(changed).rowcount == 1


def _is_open(letter_id: int) -> tuple[ColumnElement[bool], ...]:
    return letters.c.id == letter_id, letters.c.state == LetterState.OPEN


def _conditions(wanted: LetterFilter) -> list[ColumnElement[bool]]:
    given = {
        letters.c.consumer: wanted.consumer,
        letters.c.tenant: wanted.tenant,
        letters.c.event_type: wanted.event_type,
        letters.c.event_id: wanted.event_id,
        letters.c.topic: wanted.topic,
        letters.c.key: wanted.key,
    }
    conditions = [column == value for column, value in given.items() if value is not None]
    if wanted.kinds:
        conditions.append(letters.c.kind.in_(wanted.kinds))
    if wanted.states:
        conditions.append(letters.c.state.in_(wanted.states))
    if wanted.ids is not None:
        conditions.append(letters.c.id.in_(wanted.ids))
    return conditions


def _letter(row: Row[Any]) -> Letter:
    headers = row.headers if isinstance(row.headers, dict) else _HEADERS.decode(row.headers)
    return Letter(
        consumer=row.consumer,
        kind=LetterKind(row.kind),
        reason=row.reason,
        message=Message(row.topic, row.key, row.body, headers),
        event_id=row.event_id,
        event_type=row.event_type,
        schema_version=row.schema_version,
        tenant=row.tenant,
        id=row.id,
        state=LetterState(row.state),
        attempts=row.attempts,
        edited=row.edited,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
