"""The rows of a projection's table: read and locked, and written.

A row that was read is locked until the end of the transaction (SQLite has one writer at a time), so the guard that was
asked about it still holds when it is written. A row that was not there is inserted: if another process was quicker, the
primary key says so, and the batch is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, Connection, Dialect, Enum, String, Table, Text, any_, bindparam, func, select, tuple_
from sqlalchemy.dialects import mysql, postgresql, sqlite

from .. import clock
from ..errors import ConfigurationError
from ..tenancy import UNSCOPED
from .change import AT, COUNT, DELETED, GUARDS, INDEX, VERSION, Key, RowState, Shape

_OURS = {UNSCOPED: True}
"""Every statement here names the tenant itself."""
_KEYS_PER_SELECT = 1000
_OFTEN_SAME = (INDEX, COUNT, DELETED)
"""What rows often have in common: one value is bound faster than an array."""


class Rows:
    """The rows of one table."""

    def __init__(self, table: Table, shape: Shape) -> None:
        self.table = table
        self._shape = shape
        self._select = cache(self._make_select)
        self._insert = cache(self._make_insert)

    def load(self, connection: Connection, rows: Mapping[Key, RowState], tenant: str | None, *, whole: bool) -> None:
        """Lock those of these rows that exist, and read where they stand and, if ``whole``, what is in them."""
        width = len(self._shape.key)
        wanted = [*rows] if width > 1 else [key for (key,) in rows]
        statement = self._select(connection.dialect.name, whole)
        for start in range(0, len(wanted), _KEYS_PER_SELECT):
            given = {"keys": wanted[start : start + _KEYS_PER_SELECT], "tenant": tenant}
            for found in connection.execute(statement, given, execution_options=_OURS):
                key, (version, index, count, deleted) = tuple(found[:width]), found[width : width + 4]
                row = rows.get(key)
                if row is None:
                    raise ConfigurationError(
                        f"{self.table.name}: the key {key!r} is found where an equal one was asked for, of another "
                        "type or spelling; put keys as the table has them"
                    )
                row.is_stored, row.is_alive = True, not deleted
                row.position, row.count = (version, index), count
                if whole:
                    row.values = dict(zip(self._shape.columns, found[width + 4 :], strict=True))

    def write(self, connection: Connection, rows: Mapping[Key, RowState], tenant: str | None) -> None:
        """Write those that have changed, in the same order everywhere: two transactions that write rows in different
        orders would wait for each other.
        """
        alike: dict[tuple[Any, ...], list[tuple[Key, RowState]]] = {}
        for key, row in sorted([it for it in rows.items() if it[1].is_changed], key=_order):
            if len(row.values) < len(self._shape.columns):
                self._shape.fill(row.values, entirely=row.is_stored)
            alike.setdefault((row.is_stored, *row.values), []).append((key, row))
        for (is_stored, *names), group in alike.items():
            lists: dict[str, Sequence[Any]] = dict(
                zip(self._shape.key, zip(*[key for key, _ in group], strict=True), strict=True)
            )
            lists |= {name: [row.values[name] for _, row in group] for name in names}
            lists |= dict(zip((VERSION, INDEX), zip(*[row.position for _, row in group], strict=True), strict=True))
            lists[COUNT], lists[DELETED] = [row.count for _, row in group], [not row.is_alive for _, row in group]
            same = {AT: clock.now()} if self._shape.tenant is None else {AT: clock.now(), self._shape.tenant: tenant}
            same |= {name: lists.pop(name)[0] for name in _OFTEN_SAME if len({*lists[name]}) == 1}
            statement, takes_lists = self._insert(connection.dialect, is_stored, tuple(lists), tuple(same))
            given: Any = lists | same
            if not takes_lists:
                given = [dict(zip(lists, values, strict=True)) | same for values in zip(*lists.values(), strict=True)]
            connection.execute(statement, given, execution_options=_OURS)

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

    def _make_insert(
        self, dialect: Dialect, is_stored: bool, lists: Sequence[str], same: Sequence[str]
    ) -> tuple[Any, bool]:
        """The statement for rows that are there, or that are not, and whether it takes the values of a column as one
        list: PostgreSQL writes 500 rows from arrays in a third of the time. Rows that are there are upserted: an UPDATE
        of each is not one round trip on MariaDB.
        """
        family: Any = {"mysql": mysql, "mariadb": mysql, "sqlite": sqlite}.get(dialect.name, postgresql)
        new = family.insert(self.table)
        arrays = [_in_array(self.table.c[name].type, dialect) for name in lists]
        takes_lists = dialect.name == "postgresql" and None not in arrays
        if takes_lists:
            given: list[Any] = [
                func.unnest(bindparam(name, type_=array)) for name, array in zip(lists, arrays, strict=True)
            ]
            given += [bindparam(name, type_=self.table.c[name].type) for name in same]
            new = new.from_select([*lists, *same], select(*given))
        if not is_stored:
            return new, takes_lists
        changed = [*self._shape.columns, *GUARDS]
        if family is mysql:
            return new.on_duplicate_key_update({name: new.inserted[name] for name in changed}), takes_lists
        changes = {name: new.excluded[name] for name in changed}
        return new.on_conflict_do_update(index_elements=[*self.table.primary_key], set_=changes), takes_lists


def _in_array(kind: Any, dialect: Dialect) -> Any:
    """An array of such values; None if it takes none, or not as they are."""
    impl = kind.dialect_impl(dialect)
    inner = getattr(impl, "impl_instance", impl)
    if isinstance(inner, String) and inner.length and not isinstance(inner, Enum):  # a cast would cut texts off
        return None if inner is not impl else postgresql.ARRAY(Text(), dimensions=1)
    return None if isinstance(inner, ARRAY) else postgresql.ARRAY(kind, dimensions=1)


def _order(entry: tuple[Key, RowState]) -> list[Any]:
    """UUIDs compare much faster as numbers; what cannot be compared at all, as text."""
    return [part.int if type(part) is UUID else part if isinstance(part, str | int) else str(part) for part in entry[0]]
