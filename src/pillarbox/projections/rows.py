"""The rows of a projection's table: read and locked, and written.

A row that was read is locked until the end of the transaction (SQLite has one writer at a time), so the guard that was
asked about it still holds when it is written. A row that was not there is inserted: if another process was quicker, the
primary key says so, and the batch is tried again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Table, any_, bindparam, insert, select, tuple_
from sqlalchemy.dialects import mysql, postgresql, sqlite

from .. import clock
from ..errors import ConfigurationError
from ..tenancy import UNSCOPED
from .change import COUNT, DELETED, GUARDS, INDEX, VERSION, Key, RowState, Shape

_OURS = {UNSCOPED: True}
"""Every statement here names the tenant itself."""
_KEYS_PER_SELECT = 1000


class Rows:
    """The rows of one table."""

    def __init__(self, table: Table, shape: Shape) -> None:
        self.table = table
        self._shape = shape
        self._select = cache(self._make_select)
        self._upsert = cache(self._make_upsert)

    def load(
        self, connection: Connection, keys: Collection[Key], tenant: str | None, *, whole: bool
    ) -> dict[Key, RowState]:
        """Lock those of these rows that exist, and read where they stand and, if ``whole``, what is in them."""
        rows = {key: RowState() for key in keys}
        wanted, width = [*keys] if len(self._shape.key) > 1 else [key for (key,) in keys], len(self._shape.key)
        statement = self._select(connection.dialect.name, whole)
        for start in range(0, len(wanted), _KEYS_PER_SELECT):
            given = {"keys": wanted[start : start + _KEYS_PER_SELECT], "tenant": tenant}
            for found in connection.execute(statement, given, execution_options=_OURS):
                key, (version, index, count, deleted) = tuple(found[:width]), found[width : width + 4]
                if key not in rows:
                    raise ConfigurationError(
                        f"{self.table.name}: the key {key!r} is found where an equal one was asked for, of another "
                        "type or spelling; put keys as the table has them"
                    )
                values = dict(zip(self._shape.columns, found[width + 4 :], strict=True)) if whole else {}
                rows[key] = RowState(
                    is_stored=True, is_alive=not deleted, position=(version, index), count=count, values=values
                )
        return rows

    def write(self, connection: Connection, rows: Mapping[Key, RowState], tenant: str | None) -> None:
        """Write those that have changed, in the same order everywhere: two transactions that write rows in different
        orders would wait for each other.
        """
        now, alike = clock.now(), dict[tuple[Any, ...], list[dict[str, Any]]]()
        for key, row in sorted([it for it in rows.items() if it[1].is_changed], key=_order):
            if row.is_new and row.is_alive and len(row.values) < len(self._shape.columns):
                self._shape.filled(row.values, entirely=row.is_stored)
            values = {
                **dict(zip(self._shape.key, key, strict=True)),
                **row.values,
                **dict(zip(GUARDS, (*row.position, row.count, not row.is_alive, now), strict=True)),
            }
            if self._shape.tenant is not None:
                values[self._shape.tenant] = tenant
            alike.setdefault((row.is_stored, *values), []).append(values)
        for (is_stored, *_), group in alike.items():
            statement = self._upsert(connection.dialect.name) if is_stored else insert(self.table)
            connection.execute(statement, group, execution_options=_OURS)

    def _make_select(self, dialect: str, whole: bool) -> Any:
        key = [self.table.c[name] for name in self._shape.key]
        names = (VERSION, INDEX, COUNT, DELETED, *(self._shape.columns if whole else ()))
        wanted: Any = bindparam("keys", expanding=True)
        condition: Any = key[0].in_(wanted) if len(key) == 1 else tuple_(*key).in_(wanted)
        if dialect == "postgresql" and len(key) == 1:  # one parameter is bound much faster than hundreds
            condition = key[0] == any_(bindparam("keys", type_=postgresql.ARRAY(key[0].type)))
        statement = select(*key, *(self.table.c[name] for name in names)).where(condition).order_by(*key)
        if self._shape.tenant is not None:
            statement = statement.where(self.table.c[self._shape.tenant] == bindparam("tenant"))
        return statement.with_for_update()

    def _make_upsert(self, dialect: str) -> Any:
        """For rows that are there. One statement with many rows is one round trip on every database; an UPDATE of each
        is not on MariaDB.
        """
        names = [*self._shape.columns, *GUARDS]
        if dialect in ("mysql", "mariadb"):
            given = mysql.insert(self.table)
            return given.on_duplicate_key_update({name: given.inserted[name] for name in names})
        new: Any = (sqlite if dialect == "sqlite" else postgresql).insert(self.table)
        changes = {name: new.excluded[name] for name in names}
        return new.on_conflict_do_update(index_elements=[*self.table.primary_key], set_=changes)


def _order(entry: tuple[Key, RowState]) -> list[Any]:
    """UUIDs compare much faster as numbers; what cannot be compared at all, as text."""
    return [part.int if type(part) is UUID else part if isinstance(part, str | int) else str(part) for part in entry[0]]
