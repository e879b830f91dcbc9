"""Deliveries as relays leave them, without the time that it takes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, delete, insert, select, update

from pillarbox.outbox import Status
from pillarbox.stores.tables import failures, outbox

_IN_BOTH = ("route", "shard", "tenant", "key")


def put(connection: Connection, /, *conditions: ColumnElement[bool], status: Status, **values: Any) -> None:
    """These deliveries have come so far."""
    put_in(connection, outbox, *conditions, status=status, **values)


def put_in(
    connection: Connection, table: Table, /, *conditions: ColumnElement[bool], status: Status, **values: Any
) -> None:
    """The same for the rows of a table. What is neither fresh nor sent stands in the failure book, and a queue finds
    its rows by their status.
    """
    rows = connection.execute(select(table.c.id, *map(table.c.get, _IN_BOTH)).where(*conditions)).all()
    ids = [row.id for row in rows]
    of_them = failures.c.route.in_({row.route for row in rows}), failures.c.row_id.in_(ids)
    connection.execute(delete(failures).where(*of_them))
    if status in (Status.PENDING, Status.SENT):
        connection.execute(update(table).where(table.c.id.in_(ids)).values(status=status, **values))
        return
    known = [{"row_id": row.id, **{name: getattr(row, name) for name in _IN_BOTH}} for row in rows]
    connection.execute(insert(failures).values(status=status, **values), known)
    if connection.dialect.name != "postgresql":
        connection.execute(update(table).where(table.c.id.in_(ids)).values(status=status))
