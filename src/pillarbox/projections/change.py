"""What an event changes in the rows of a projection, and the row that several changes come to. No database in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache, cached_property
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import JSON, Column, Table
from sqlalchemy import Enum as EnumType
from sqlalchemy.orm import Mapper

from ..errors import ConfigurationError, Poison
from ..tenant_scope import TenantScoped

GUARDS = VERSION, INDEX, COUNT, DELETED, AT = (
    "projected_version",
    "projected_index",
    "projected_count",
    "deleted",
    "projected_at",
)
"""The columns that every projection row has, and that only Pillarbox writes."""

Key = tuple[Any, ...]
"""The values of a row's primary key, without the tenant."""

Position = tuple[int, int]
"""Where an event stands among those of its aggregate: the version, and its place among the events of that version."""


@dataclass(frozen=True, slots=True)
class Add:
    """As a value in `put`: add this to what is there, or to 0 if nothing is."""

    amount: Any


class Change(msgspec.Struct, frozen=True, gc=False):
    """What an event does to one row. Made by the ``put`` and ``remove`` of a projection."""

    key: Key
    values: Mapping[str, Any]
    """By the names of columns."""
    is_whole: bool
    """Whether nothing of the row as it was is left."""
    removes: bool = False


class Shape:
    """The columns of a projection's row, and what each of them holds if an event does not say it."""

    def __init__(self, row: type, mapper: Mapper[Any]) -> None:
        table = mapper.local_table
        if not isinstance(table, Table) or len(mapper.tables) != 1:
            raise ConfigurationError(f"{row.__qualname__}: a projection's row is in one table")
        self.table = table
        self.row = row
        self.tenant = "tenant_id" if issubclass(row, TenantScoped) else None
        if self.tenant is not None and table.c.tenant_id not in set(table.primary_key):
            raise ConfigurationError(
                f"{row.__qualname__}: its tenant_id must belong to the primary key, or equal ids of two tenants "
                "would be one row"
            )
        names = {attribute.key: attribute.columns[0].name for attribute in mapper.column_attrs}
        if missing := set(GUARDS) - names.keys():
            raise ConfigurationError(f"{row.__qualname__} has no {min(missing)}: let it inherit from ProjectionRow")
        self.key = tuple(column.name for column in table.primary_key if column.name != self.tenant)
        if not self.key:
            raise ConfigurationError(f"{row.__qualname__}: its primary key needs a column beside the tenant")
        fixed = {*GUARDS, *self.key, self.tenant}
        self.columns = tuple(c.name for c in table.columns if c.name not in fixed and c.computed is None)
        self._names = {name: column for name, column in names.items() if column in {*self.key, *self.columns}}
        self._defaults = {name: made for name in self.columns if (made := _default(table.c[name])) is not None}
        self.form = cache(self._form)

    def identity(self, key: Key, tenant: str | None) -> tuple[Any, ...]:
        """The whole primary key, in the order of the table."""
        values = dict(zip(self.key, key, strict=True))
        return tuple(tenant if column.name == self.tenant else values[column.name] for column in self.table.primary_key)

    def _form(self, names: tuple[str, ...]) -> tuple[Sequence[str], Sequence[tuple[str, str]]]:
        """Those of the names that make the key, and the columns that the others stand for, in their order."""
        for name in names:
            if name not in self._names:
                raise ConfigurationError(
                    f"{self.row.__qualname__} has no {name!r} to be put: it has {', '.join(self._names)}"
                )
        by_column = {self._names[name]: name for name in names}
        for column in self.key:
            if column not in by_column:
                raise ConfigurationError(
                    f"{self.row.__qualname__}: {column!r} is in its primary key, and must be given"
                )
        others = [(column, by_column[column]) for column in self.columns if column in by_column]
        return [by_column[column] for column in self.key], others

    # -- what an event does not say ------------------------------------------------------------------------------------

    @cached_property
    def blank(self) -> Mapping[str, Any]:
        """The columns of a tombstone."""
        return {name: self._blank(self.table.c[name]) for name in self.columns}

    def _blank(self, column: Column[Any]) -> Any:
        if column.name in self._defaults:
            return self._defaults[column.name]()
        if column.nullable:
            return None
        if isinstance(column.type, EnumType) and column.type.enum_class is None:
            return column.type.enums[0]
        kind: type = object
        with suppress(NotImplementedError):
            kind = dict if isinstance(column.type, JSON) else column.type.python_type
        if issubclass(kind, Enum):
            return next(iter(kind))
        if kind not in _BLANKS:
            raise ConfigurationError(
                f"{self.row.__qualname__}: nothing is known to leave in {column.name!r} when a row is removed; "
                "let it be nullable, or give it a default"
            )
        return _BLANKS[kind]

    def fill(self, values: dict[str, Any], *, entirely: bool) -> None:
        """Complete the values of a new row; ``entirely`` if it replaces a tombstone, where the database adds no
        default.
        """
        for name in self.columns:
            if name in values:
                continue
            if name in self._defaults:
                values[name] = self._defaults[name]()
            elif entirely or self.table.c[name].server_default is None:
                raise Poison(
                    f"{self.row.__qualname__}: an event changes a row that is not there, and says nothing about "
                    f"{name!r}, which a new one needs"
                )


class RowState(msgspec.Struct, gc=False):
    """A row, from what is in the table to what is to be written."""

    is_stored: bool = False
    """Whether the table has it."""
    is_alive: bool = False
    is_changed: bool = False
    position: Position = (0, 0)
    """The last event that has changed it."""
    count: int = 1
    """How many events that version has."""
    values: dict[str, Any] = msgspec.field(default_factory=dict)
    """By the names of columns; those are missing that no event has named since the row was made."""

    @property
    def successor(self) -> Position:
        """The event that comes next."""
        version, place = self.position
        return (version, place + 1) if place + 1 < self.count else (version + 1, 0)

    def fold(self, change: Change) -> None:
        """Change it."""
        if not self.is_alive:
            self.values = {}
        self.is_changed, self.is_alive = True, not change.removes
        if change.is_whole:
            self.values = dict(change.values)
            return
        for name, value in change.values.items():
            if type(value) is Add:
                there = self.values.get(name)
                self.values[name] = value.amount if there is None else there + value.amount
            else:
                self.values[name] = value


_BLANKS: Mapping[type, Any] = {
    **{kind: kind() for kind in (str, bytes, int, float, bool, Decimal, time, timedelta, dict, list)},
    UUID: UUID(int=0),
    datetime: datetime(1970, 1, 1, tzinfo=UTC),
    date: date(1970, 1, 1),
}


def _default(column: Column[Any]) -> Callable[[], Any] | None:
    """What SQLAlchemy writes for an object that says nothing about the column; None if only the database knows."""
    default: Any = column.default
    if default is not None and (default.is_scalar or default.is_callable):
        return (lambda: default.arg(None)) if default.is_callable else (lambda: default.arg)
    return (lambda: None) if column.nullable and column.server_default is None else None
