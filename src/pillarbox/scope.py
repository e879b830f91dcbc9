"""Which tables belong to tenants, and where a statement names them.

Tenancy puts a condition on mapped classes. It does not reach a table that is named in any other way (`Model.__table__`,
a text, a join made by hand), nor a statement that SQLAlchemy executes without regard to conditions. This finds both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, TypeVar, cast

from sqlalchemy import (
    Alias,
    ColumnClause,
    FromClause,
    Index,
    Join,
    Select,
    String,
    Table,
    TableClause,
    TextClause,
    TextualSelect,
    __version__,
    event,
)
from sqlalchemy.orm import FromStatement, Mapped, MappedColumn, Mapper, ORMExecuteState, declared_attr, mapped_column
from sqlalchemy.sql.visitors import HasTraverseInternals

_Value = TypeVar("_Value")

scoped_tables: set[Table] = set()
"""All tables of classes that are `TenantScoped`."""


def mixin_column(make: Callable[[], MappedColumn[_Value]]) -> Mapped[_Value]:
    """A column that a mixin gives to the classes it is mixed into, dataclasses or not.

    SQLAlchemy takes an annotation on it for a dataclass field, and refuses one that comes from a mixin: so it has none.
    """
    return cast("Mapped[_Value]", declared_attr(lambda _cls: make()))


def _tenant_column() -> MappedColumn[str]:
    # MySQL compares without regard to case unless told otherwise. The old value is needed to see whose row it was.
    kind = String(200).with_variant(String(200, collation="utf8mb4_bin"), "mysql", "mariadb")
    return mapped_column(kind, nullable=False, active_history=True, sort_order=-1)


class TenantScoped:
    """Mixin for mapped classes whose rows belong to a tenant. Adds ``tenant_id`` and an index that begins with it."""

    tenant_id = mixin_column(_tenant_column)


@event.listens_for(TenantScoped, "after_mapper_constructed", propagate=True)
def _on_mapped(mapper: Mapper[Any], _class: type) -> None:
    table = mapper.local_table
    if not isinstance(table, Table) or table in scoped_tables:
        return
    scoped_tables.add(table)
    _table_called.cache_clear()
    keys = list(table.primary_key.columns)
    if "tenant_id" in table.c and keys[0] is not table.c.tenant_id:
        rest = (key for key in keys if key is not table.c.tenant_id)
        Index(f"ix_{table.name}_tenant", table.c.tenant_id, *rest)


Level = list[Any]
"""The parts of one SELECT, UPDATE, INSERT or DELETE; those of a nested SELECT are a level of their own."""


def levels(statement: Any) -> Iterator[Level]:
    """Take a statement apart, down to mapped classes and their columns."""
    pending = [statement]
    while pending:
        level = list(_parts_of(pending.pop()))
        pending += [part for part in level[1:] if isinstance(part, Select)]
        yield level


def scoped_class(part: Any) -> type | None:
    """The tenant's class that this part of a statement stands for, or belongs to."""
    entity = _entity(part)
    return entity.mapper.class_ if entity is not None and issubclass(entity.mapper.class_, TenantScoped) else None


def raw_table(level: Level) -> str | None:
    """A tenant table that the level names without its mapped class."""
    # A plain column is fine beside the class it belongs to: both mean the same place in FROM.
    mapped = {table for part in level if isinstance(part, FromClause) for table in _tables_of(part)}
    return next((name for part in level if (name := _raw_name(part, mapped))), None)


def table_in(sql: str) -> str | None:
    """A tenant table whose name occurs in a text: only a parser for each dialect could tell names from other words."""
    words = re.findall(r"\w+", sql)
    odd = (
        name
        for name in (table.name for table in scoped_tables)
        if re.search(r"\W", name) and name.casefold() in sql.casefold()
    )
    return next((name for word in words if (name := _table_called(word.casefold()))), None) or next(odd, None)


def unnamed_class(statement: Any) -> type | None:
    """A tenant's class that a SELECT uses without naming it among its columns, FROM or joins. SQLAlchemy 2.0 puts it
    into FROM, and the condition on the tenant does not reach it there; 2.1 sees to that.
    """
    pending: list[tuple[Any, frozenset[Any]]] = [(statement, frozenset())]
    while not _CONDITIONS_REACH_ALL and pending:
        select, named = pending.pop()
        parts = list(_parts_of(select))
        if isinstance(select, Select):
            places = (*select._raw_columns, *select._from_obj, *(join[0] for join in select._setup_joins))
            named |= {_entity(part) for place in places for part in _parts_of(place)}
            for part in parts:
                if (found := scoped_class(part)) is not None and _entity(part) not in named:
                    return found
        pending += [(part, named) for part in parts[1:] if isinstance(part, Select)]
    return None


_CONDITIONS_REACH_ALL = not __version__.startswith("2.0.")


def unconditional(state: ORMExecuteState) -> str | None:
    """What this statement is, if it names a tenant's class and yet the condition on the tenant would not hold in it."""
    statement: Any = state.statement
    if isinstance(statement, FromStatement):
        return _unconditional_within(statement.element)
    if state.is_insert:
        return "an INSERT statement (unlike an added object) for"
    if state.is_update and (isinstance(state.parameters, list) or "dml_strategy" in state.execution_options):
        return "a bulk UPDATE by primary key of"
    if state.is_update and _sets_tenant(state):
        return "an UPDATE of the tenant of"
    if (state.is_update or state.is_delete) and _is_joined(statement):
        return "an UPDATE or DELETE that is joined to"
    return None


def _unconditional_within(element: Any) -> str | None:
    """The same, for what ``from_statement`` was given."""
    if isinstance(element, (TextClause, TextualSelect)):
        return "a text that selects"
    return "an INSERT, UPDATE or DELETE within from_statement that names" if element.is_dml else None


def _parts_of(statement: Any) -> Iterator[Any]:
    pending, seen = [statement], dict[int, Any]()  # holds them: some are made on demand, and ids are used again
    while pending:
        part = pending.pop()
        if id(part) not in seen:
            seen[id(part)] = part
            yield part
            if part is statement or not isinstance(part, Select):
                pending += _children(part)


def _children(part: Any) -> Iterable[Any]:
    entity = _entity(part)
    if entity is not None:
        # Only what `aliased(Model, subquery)` selects from was written by somebody.
        return () if isinstance(entity.selectable, (Table, Alias, Join)) else (entity.selectable,)
    if isinstance(part, ColumnClause):
        return () if part.table is None or isinstance(part.table, Table) else (part.table,)
    if isinstance(part, (Select, FromStatement)):
        # Their own get_children add the tables of the columns, where those of mapped columns look like any others.
        return HasTraverseInternals.get_children(part, omit_attrs=("_correlate", "_correlate_except"))
    children: Iterable[Any] = part.get_children()
    return children


def _entity(part: Any) -> Any:
    """The mapper or alias that this part came from, if it came from a mapped class."""
    annotations = getattr(part, "_annotations", {})
    if isinstance(part, Join) and "parentmapper" not in annotations:
        return None  # made by hand
    entity = annotations.get("parententity") or annotations.get("parentmapper")
    if entity is None and "proxy_owner" in annotations:
        relationship = annotations["proxy_owner"].mapper.relationships.get(annotations["proxy_key"])
        entity = None if relationship is None else relationship.mapper
    return entity


def _tables_of(part: Any) -> Iterable[Any]:
    entity = _entity(part)
    return () if entity is None or entity.is_aliased_class else entity.mapper.tables


def _raw_name(part: Any, mapped: set[Any]) -> str | None:
    if _entity(part) is not None:
        return None
    if isinstance(part, TextClause):
        return table_in(part.text)
    if isinstance(part, Join):
        sides = filter(None, map(scoped_class, (part.left, part.right)))
        return next((side.__name__ for side in sides), None)
    if isinstance(part, ColumnClause):
        if part.is_literal:
            return table_in(part.name)
        part = None if part.table in mapped else part.table
    if isinstance(part, Table):
        return part.name if part in scoped_tables else None
    return _table_called(part.name.casefold()) if isinstance(part, TableClause) else None


@lru_cache(maxsize=4096)
def _table_called(name: str) -> str | None:
    return next((table.name for table in scoped_tables if table.name.casefold() == name), None)


def _sets_tenant(state: ORMExecuteState) -> bool:
    statement: Any = state.statement
    ordered = dict(getattr(statement, "_ordered_values", None) or ())
    columns = (*(statement._values or ()), *ordered, *(state.parameters or ()))
    return any(getattr(column, "key", column) == "tenant_id" for column in columns)


def _is_joined(statement: Any) -> bool:
    """Whether a tenant's class stands in an UPDATE or DELETE beside its target, which alone gets the condition."""
    entities = (_entity(part) for part in _parts_of(statement) if scoped_class(part))
    return any(entity.is_aliased_class or statement.table not in entity.mapper.tables for entity in entities)
