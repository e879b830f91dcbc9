"""Whether a database is the one in which its lanes were written, or a copy in which transactions have other numbers.

Of two rows the first is never touched again, and the second says which transaction wrote it, itself written by a
subtransaction. In a copy that was not made of the files, by a dump or by logical replication, another one has written
the first, or one has written both.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, text

from ..outbox import TABLES

COPY = (
    "this database is a copy, from a dump or by replication, and its transactions have other numbers than those that "
    "lanes remember: run `pillarbox outbox rebase`"
)
"""What an error says about it."""

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
"""Makes the database an original, in this order."""

IS_ORIGINAL = """
    (SELECT second.first_xmin = CAST(CAST(first.xmin AS text) AS bigint) AND first.xmin <> second.xmin
     FROM pillarbox_origin first, pillarbox_origin second WHERE first.id = 1 AND second.id = 2)"""
"""For a SELECT: true, false, or null if nobody has ever said so."""


def is_copy(connection: Connection) -> bool:
    """Whether the cursors of lanes mean something else here than when they were written."""
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
