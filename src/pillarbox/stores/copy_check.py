"""Detects whether a database is the original of its lanes, or a copy in which transactions have other ids.

There are two rows. The first is never updated. The second records the transaction that wrote the first, and is itself
written by a subtransaction. In a copy that was not made from files (a dump, or logical replication), another
transaction has written the first row, or a single one has written both.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, text

from ..outbox import TABLES

COPY = (
    "this database is a copy, from a dump or by replication, and its transactions have other numbers than those that "
    "lanes remember: run `pillarbox outbox rebase`"
)
"""The text of errors about a copy."""

WRITE = (
    "DELETE FROM pillarbox_origin",
    "INSERT INTO pillarbox_origin (id) VALUES (1)",
    """
DO $$
BEGIN
    BEGIN
        INSERT INTO pillarbox_origin (id, first_xmin)
        SELECT 2, CAST(CAST(xmin AS text) AS bigint) FROM pillarbox_origin WHERE id = 1;
    EXCEPTION WHEN unique_violation THEN
        RAISE;
    END;
END
$$""",
)
"""Mark a database as original, in this order."""

IS_ORIGINAL = """
    (SELECT second.first_xmin = CAST(CAST(first.xmin AS text) AS bigint) AND first.xmin <> second.xmin
     FROM pillarbox_origin first, pillarbox_origin second WHERE first.id = 1 AND second.id = 2)"""
"""For a SELECT: true, false, or null if the database was never marked."""


def is_copy(connection: Connection) -> bool:
    """Whether the stored cursors have lost their meaning here."""
    return connection.dialect.name == "postgresql" and not state(connection).original


def state(connection: Connection) -> Any:
    """On PostgreSQL, whether the database is ``original`` and the server a ``standby``, and whether row level security
    hides (``filtered``) deliveries from this role.
    """
    return connection.execute(_STATE).one()


_STATE = text(
    f"""
    SELECT {IS_ORIGINAL} AS original, pg_is_in_recovery() AS standby,
           {" OR ".join(f"row_security_active('{table}')" for table in (*TABLES, "pillarbox_failures"))} AS filtered
    """
)
