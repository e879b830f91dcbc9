"""The audit trail: who has done what, and why. What is written here stands or falls with what was done: every function
runs in a transaction of its caller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, insert, select, update

from .tables import audit, meta


@dataclass(frozen=True, slots=True)
class Author:
    """Who does something, and why."""

    who: str
    reason: str | None = None


def one_person_at_a_time(connection: Connection) -> None:
    """People wait for each other, never a relay or a writer for them: nothing that those lock is locked here.

    It comes first in a transaction, so that what is read after it is what the one before has written.
    """
    connection.execute(select(meta.c.id).with_for_update())


def note(
    connection: Connection,
    author: Author,
    action: str,
    target: str,
    *,
    details: Mapping[str, Any],
    event_id: UUID | None = None,
    entry: int | None = None,
) -> int:
    """Write a row of the trail, or into ``entry``, which is about the same, what has become of it since; its number."""
    if entry is not None:
        amend(connection, entry, details)
        return entry
    values = {"who": author.who, "action": action, "target": target, "event_id": event_id, "reason": author.reason}
    done: Any = connection.execute(insert(audit).values(**values, details=json.dumps(details)))
    return int(done.inserted_primary_key[0])


def amend(connection: Connection, entry: int, details: Mapping[str, Any]) -> None:
    """Write into a row of the trail what has become of it."""
    connection.execute(update(audit).where(audit.c.id == entry).values(details=json.dumps(details)))
