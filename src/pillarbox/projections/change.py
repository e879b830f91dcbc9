"""What an event does to rows of a projection, and the row that several changes come to. No database in here.

Before this: a handler has said what is to be changed. After it: one set of values for each row, which is written once
however many events there were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import JSON, Column, Table
from sqlalchemy import Enum as EnumType
from sqlalchemy.orm import Mapper

from ..errors import ConfigurationError, Poison
from ..scope import TenantScoped

VERSION, INDEX, COUNT, DELETED, AT = (
    "projected_version",
    "projected_index",
    "projected_count",
    "deleted",
    "projected_at",
)
GUARDS = (VERSION, INDEX, COUNT, DELETED, AT)
"""The columns that every projection row has, and that only we write."""

Key = tuple[Any, ...]
"""The values of a row's primary key, without the tenant."""


@dataclass(frozen=True, slots=True)
class Add:
    """As a value in `put`: add this to what is there, or to 0 if nothing is."""

    amount: Any


class Act(Enum):
    """What a change does."""

    PUT = "put"
    REMOVE = "remove"
    ADVANCE = "advance"
    """Only the version moves on."""


class Change(msgspec.Struct, frozen=True, gc=False):
    """What an event does to one row. Made by the ``put`` and ``remove`` of a projection."""

    act: Act
    key: Key
    values: Mapping[str, Any]
    """By the names of columns."""
    is_whole: bool
    """Whether nothing of the row as it was is left."""


Position = tuple[int, int]
"""Where an event stands among those of its aggregate: the version, and its place among the events of that version."""


class _Form(NamedTuple):
    """What a put with certain names looks like: worked out once."""

    key: tuple[str, ...]
    values: tuple[tuple[str, str], ...]
    is_plain: bool
    """Whether the names are those of the columns."""
    is_whole: bool


class Shape:
    """The columns of a projection's row, and what each of them holds if nobody says it."""

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
        self._forms: dict[tuple[str, ...], _Form] = {}

    def identity(self, key: Key, tenant: str | None) -> tuple[Any, ...]:
        """The whole primary key, as the table has it."""
        values = dict(zip(self.key, key, strict=True))
        return tuple(tenant if column.name == self.tenant else values[column.name] for column in self.table.primary_key)

    # -- changes -------------------------------------------------------------------------------------------------------

    def put(self, values: dict[str, Any]) -> Change:
        """What to change. The values become part of it."""
        form = self._forms.get(names := tuple(values)) or self._form(names)
        key = tuple([values.pop(name) for name in form.key])
        content = values if form.is_plain else {column: values[name] for name, column in form.values}
        return Change(Act.PUT, key, content, form.is_whole and Add not in map(type, content.values()))

    def remove(self, values: Mapping[str, Any]) -> Change:
        form = self._forms.get(names := tuple(values)) or self._form(names)
        if form.values:
            raise ConfigurationError(
                f"{self.row.__qualname__}: remove takes the primary key, and no {form.values[0][0]!r}"
            )
        return Change(Act.REMOVE, tuple([values[name] for name in form.key]), self.blank, is_whole=True)

    def _form(self, names: tuple[str, ...]) -> _Form:
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
        values = tuple((by_column[column], column) for column in self.columns if column in by_column)
        key = tuple(by_column[column] for column in self.key)
        is_plain = all(name == column for name, column in values)
        form = self._forms[names] = _Form(key, values, is_plain, len(values) == len(self.columns))
        return form

    # -- what nobody has said ------------------------------------------------------------------------------------------

    @cached_property
    def blank(self) -> Mapping[str, Any]:
        """What is left of the columns in a tombstone: what the row said is gone."""
        return {name: self._blank(self.table.c[name]) for name in self.columns}

    def _blank(self, column: Column[Any]) -> Any:
        if column.name in self._defaults:
            return self._defaults[column.name]()
        if column.nullable:
            return None
        if isinstance(column.type, EnumType) and column.type.enum_class is None:
            return column.type.enums[0]
        kind = dict if isinstance(column.type, JSON) else _python_type(column)
        if issubclass(kind, Enum):
            return next(iter(kind))
        if kind not in _BLANKS:
            raise ConfigurationError(
                f"{self.row.__qualname__}: nothing is known to leave in {column.name!r} when a row is removed; "
                "let it be nullable, or give it a default"
            )
        return _BLANKS[kind]

    def is_insertable(self, values: Mapping[str, Any]) -> bool:
        """Whether a new row could be made of these."""
        return not any(self._is_needed(name) for name in self.columns if name not in values)

    def filled(self, values: dict[str, Any], *, entirely: bool) -> dict[str, Any]:
        """The values of a row that is new; ``entirely`` if the database adds nothing, as there is an old one in its
        place.
        """
        for name in self.columns:
            if name in values:
                continue
            if name in self._defaults:
                values[name] = self._defaults[name]()
            elif self._is_needed(name) or (entirely and self.table.c[name].server_default is not None):
                raise Poison(
                    f"{self.row.__qualname__}: an event changes a row that is not there, and says nothing about "
                    f"{name!r}, which a new one needs"
                )
            elif self.table.c[name].server_default is None:
                values[name] = None
        return values

    def _is_needed(self, name: str) -> bool:
        column = self.table.c[name]
        return not column.nullable and column.server_default is None and name not in self._defaults


class RowState(msgspec.Struct, gc=False):
    """A row, from what is in the table to what is to be written."""

    shape: Shape
    key: Key
    is_known: bool = True
    """False if nobody has looked whether it is there."""
    stored: Position | None = None
    """What the row in the table stands at; None if there is none."""
    position: Position = (0, 0)
    count: int = 1
    is_alive: bool = False
    is_fresh: bool = False
    """Whether it was made, or made again after a removal, by the changes here: then it has nothing from before."""
    is_changed: bool = False
    values: dict[str, Any] = msgspec.field(default_factory=dict)
    latest: object = None
    """The event that was decided about last, for those that change a row twice."""
    takes: bool = False
    """What was decided."""

    def load(self, position: Position, count: int, values: dict[str, Any], *, is_alive: bool) -> None:
        """What the table has."""
        self.stored = self.position = position
        self.count, self.is_alive, self.values = count, is_alive, values

    @property
    def successor(self) -> Position:
        """The event that comes next."""
        version, place = self.position
        return (version, place + 1) if place + 1 < self.count else (version + 1, 0)

    def fold(self, change: Change) -> None:
        """Change it."""
        self.is_changed = True
        if change.act is Act.PUT:
            self._put(change)
        elif change.act is Act.REMOVE or (self.stored is None and not self.is_fresh):
            self.values, self.is_alive, self.is_fresh = dict(change.values or self.shape.blank), False, True

    def keep_place(self) -> None:
        """Have a row, if only a tombstone, so that others who bring events for it wait for us."""
        if self.stored is None and not self.is_changed:
            self.fold(Change(Act.REMOVE, self.key, self.shape.blank, is_whole=True))

    def _put(self, change: Change) -> None:
        if not self.is_alive and (self.is_known or self.is_fresh):
            self.values, self.is_fresh = {}, True
        self.is_alive = True
        if change.is_whole:
            self.values = dict(change.values)
            return
        for name, value in change.values.items():
            self.values[name] = self._sum(name, value) if type(value) is Add else value

    def _sum(self, name: str, added: Add) -> Any:
        if name not in self.values:
            return added.amount if self.is_known or self.is_fresh else added  # else the database must add
        there = self.values[name]
        if type(there) is Add:
            return Add(there.amount + added.amount)
        return added.amount if there is None else there + added.amount


_BLANKS: Mapping[type, Any] = {
    str: "",
    bytes: b"",
    int: 0,
    float: 0.0,
    bool: False,
    Decimal: Decimal(0),
    UUID: UUID(int=0),
    datetime: datetime(1970, 1, 1, tzinfo=UTC),
    date: date(1970, 1, 1),
    time: time(0),
    timedelta: timedelta(0),
    dict: {},
    list: [],
}


def _python_type(column: Column[Any]) -> type:
    try:
        return column.type.python_type
    except NotImplementedError:
        return object


def _default(column: Column[Any]) -> Callable[[], Any] | None:
    """The default that SQLAlchemy would use for an object; one that is SQL is not known here."""
    default: Any = column.default
    if default is None or not (default.is_scalar or default.is_callable):
        return None
    return (lambda: default.arg(None)) if default.is_callable else (lambda: default.arg)
