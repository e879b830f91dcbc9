"""What people do with letters, each time with a row in the trail that says who wanted it and why.

Every function here runs in a transaction of its caller. Whoever changes a letter names the state that it must have, so
of two people who want something for the same letter one is late, and hears of it.
"""

from __future__ import annotations

import base64
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection

from ..inbox import Letter, LetterState
from .letters import SqlLetters
from .trail import Author, amend, note

_LETTERS = SqlLetters()


class LetterAction(StrEnum):
    """What can be done with a letter. Called otherwise than what can be done with deliveries: the same event may be
    both.
    """

    REDRIVE = "letter-redrive"
    DISCARD = "letter-discard"
    EDIT = "letter-edit"


def discard(connection: Connection, letter: Letter, author: Author) -> bool:
    """Close a letter without an effect. False, and nothing is written, if it is not open any more."""
    if not _LETTERS.close(connection, letter.id, LetterState.DISCARDED):
        return False
    _note(connection, LetterAction.DISCARD, letter, author)
    return True


def edit(connection: Connection, letter_id: int, body: bytes, author: Author) -> int | None:
    """Let a redrive use another body; the number of the row in the trail, which keeps the one before. None if it is
    not open any more.
    """
    letter = _LETTERS.take(connection, letter_id)
    if letter is None:
        return None
    _LETTERS.edit(connection, letter_id, body)
    return _note(connection, LetterAction.EDIT, letter, author, old_body=base64.b64encode(letter.body).decode())


def begin_redrive(connection: Connection, letter: Letter, author: Author) -> int:
    """Somebody wants it redriven; the number of the row in the trail. It commits before the handlers are called, so
    that whatever they do is on record.
    """
    return _note(connection, LetterAction.REDRIVE, letter, author, outcome=None)


def end_redrive(connection: Connection, entry: int, letter: Letter, outcome: str) -> None:
    """What has become of it."""
    amend(connection, entry, _details(letter, outcome=outcome))


def _note(connection: Connection, action: LetterAction, letter: Letter, author: Author, **more: Any) -> int:
    target = f"letter {letter.id} of {letter.consumer}"
    return note(connection, author, action, target, details=_details(letter, **more), event_id=letter.event_id)


def _details(letter: Letter, **more: Any) -> dict[str, Any]:
    return {"letter": letter.id, "kind": letter.kind, **more}
