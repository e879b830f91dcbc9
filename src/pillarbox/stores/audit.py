"""The audit trail: who did what, and why. Every function runs in the transaction of the audited change."""

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
    """The operator of an action, and the reason."""

    who: str
    reason: str | None = None


def one_person_at_a_time(connection: Connection) -> None:
    """Let operators wait for each other, without locking anything that relays or writers lock.

    Called first in a transaction, so that later reads see the writes of the previous operator.
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
    """Write an audit entry, or update ``entry`` about the same action. Returns its number."""
    if entry is not None:
        amend(connection, entry, details)
        return entry
    values = {"who": author.who, "action": action, "target": target, "event_id": event_id, "reason": author.reason}
    done: Any = connection.execute(insert(audit).values(**values, details=json.dumps(details)))
    return int(done.inserted_primary_key[0])


def amend(connection: Connection, entry: int, details: Mapping[str, Any]) -> None:
    """Update an audit entry with the result."""
    connection.execute(update(audit).where(audit.c.id == entry).values(details=json.dumps(details)))
