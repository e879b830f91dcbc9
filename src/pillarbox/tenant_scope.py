"""Finds tenant tables in statements.

Tenancy adds a condition to mapped classes. The condition reaches neither a table that is named in another way
(`Model.__table__`, text, a hand-written join) nor a statement that SQLAlchemy executes without such conditions. This
module finds both.
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
    """A column for a mixin, whose classes may be dataclasses or not.

    SQLAlchemy takes an annotated column for a dataclass field and refuses it in a mixin, so the column has no
    annotation.
    """
    return cast("Mapped[_Value]", declared_attr(lambda _cls: make()))


def _tenant_column() -> MappedColumn[str]:
    # By default MySQL compares without regard to case. The old value shows which tenant owned the row.
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
"""The parts of one SELECT, UPDATE, INSERT or DELETE. Those of a nested SELECT are a separate level."""


def levels(statement: Any) -> Iterator[Level]:
    """Split a statement into levels, down to mapped classes and their columns."""
    pending = [statement]
    while pending:
        level = list(_parts_of(pending.pop()))
        pending += [part for part in level[1:] if isinstance(part, Select)]
        yield level


def scoped_class(part: Any) -> type | None:
    """The tenant-scoped class that this part of a statement is or belongs to."""
    entity = _entity(part)
    return entity.mapper.class_ if entity is not None and issubclass(entity.mapper.class_, TenantScoped) else None


def raw_table(level: Level) -> str | None:
    """A tenant table that the level names without its mapped class."""
    # A plain column beside its own class is fine: both refer to the same entry in FROM.
    mapped = {table for part in level if isinstance(part, FromClause) for table in _tables_of(part)}
    return next((name for part in level if (name := _raw_name(part, mapped))), None)


def table_in(sql: str) -> str | None:
    """A tenant table whose name occurs in a text. Only a parser per dialect could tell table names from other words."""
    words = re.findall(r"\w+", sql)
    odd = (
        name
        for name in (table.name for table in scoped_tables)
        if re.search(r"\W", name) and name.casefold() in sql.casefold()
    )
    return next((name for word in words if (name := _table_called(word.casefold()))), None) or next(odd, None)


def unnamed_class(statement: Any) -> type | None:
    """A tenant-scoped class that a SELECT uses without naming it among its columns, FROM or joins. SQLAlchemy 2.0 adds
    it to FROM without the condition on the tenant; 2.1 adds the condition.
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
    """Describe a statement that names a tenant-scoped class but would run without the condition on the tenant."""
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
    """The same for the argument of ``from_statement``."""
    if isinstance(element, (TextClause, TextualSelect)):
        return "a text that selects"
    return "an INSERT, UPDATE or DELETE within from_statement that names" if element.is_dml else None


def _parts_of(statement: Any) -> Iterator[Any]:
    pending, seen = [statement], dict[int, Any]()  # keeps temporary parts alive: ids may be reused
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
        # Of an alias, only the subquery in `aliased(Model, subquery)` is written by the user.
        return () if isinstance(entity.selectable, (Table, Alias, Join)) else (entity.selectable,)
    if isinstance(part, ColumnClause):
        return () if part.table is None or isinstance(part.table, Table) else (part.table,)
    if isinstance(part, (Select, FromStatement)):
        # The overridden get_children add the tables of columns, and do not mark those of mapped columns.
        return HasTraverseInternals.get_children(part, omit_attrs=("_correlate", "_correlate_except"))
    children: Iterable[Any] = part.get_children()
    return children


def _entity(part: Any) -> Any:
    """The mapper or alias of this part, if it comes from a mapped class."""
    annotations = getattr(part, "_annotations", {})
    if isinstance(part, Join) and "parentmapper" not in annotations:
        return None  # a hand-written join
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
    """Whether an UPDATE or DELETE names a tenant-scoped class beside its target. Only the target gets the condition."""
    entities = (_entity(part) for part in _parts_of(statement) if scoped_class(part))
    return any(entity.is_aliased_class or statement.table not in entity.mapper.tables for entity in entities)
