"""Reading and writing many rows of a projection at once, on each database in its own way.

PostgreSQL gets one array for each column, so that the text of a statement does not depend on the number of rows. The
others get their rows one after the other in one request; the drivers of MySQL make one statement of them.

A row that was read is locked until the end of the transaction, where the database has such locks. The guard is in the
statements all the same: a row that somebody else has changed meanwhile is not written, and that is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, Connection, Dialect, String, Table, UniqueConstraint, bindparam, select, text, tuple_
from sqlalchemy import Enum as EnumType
from sqlalchemy.exc import IntegrityError

from .. import clock
from ..errors import ConcurrencyError, ConfigurationError
from ..tenancy import UNSCOPED
from .change import AT, COUNT, DELETED, INDEX, VERSION, Add, Key, RowState, Shape

_OURS = {UNSCOPED: True}
"""Every statement here names the tenant itself."""
_KEYS_PER_SELECT = 1000
_DUPLICATE_KEY = 1062


_Select = Callable[[Connection, Sequence[Key], str | None], Iterable[Any]]


class _Kind(Enum):
    """What is known of the row that is to be written."""

    NEW = "new"
    """There is none."""
    NEXT = "next"
    """There is one, and its version moves on."""
    SAME = "same"
    """There is one, and its version stays: an event without a version has changed it."""
    BLIND = "blind"
    """Nobody has looked."""


@dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """Rows with the same plan are written by the same statement."""

    kind: _Kind
    columns: tuple[str, ...]
    """What a new row has."""
    changed: tuple[str, ...]
    """What an old one gets."""
    added: tuple[str, ...] = ()
    """What is added to an old one."""


class Writer:
    """The rows of one table."""

    def __init__(self, table: Table, shape: Shape) -> None:
        self.table = table
        self._shape = shape
        self._key = shape.key
        self._conflict = (*((shape.tenant,) if shape.tenant else ()), *shape.key)
        self._often_same = (*((shape.tenant,) if shape.tenant else ()), INDEX, COUNT, DELETED, AT)
        whole = [_Plan(kind, shape.columns, shape.columns) for kind in (_Kind.NEW, _Kind.NEXT, _Kind.SAME)]
        self._new, self._next, self._same = whole
        indexes = any(index.unique for index in table.indexes)
        self._has_other_keys = indexes or any(isinstance(it, UniqueConstraint) for it in table.constraints)
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._statements: dict[tuple[str, _Plan, tuple[str, ...]], _Statement] = {}
        self._selects: dict[tuple[str, bool], _Select] = {}

    def must_look(self, connection: Connection) -> bool:
        """Whether rows must be read before they are written: MySQL's upsert takes any unique index for the key, and
        would write into a row of somebody else.
        """
        return connection.dialect.name in ("mysql", "mariadb") and self._has_other_keys

    # -- reading -------------------------------------------------------------------------------------------------------

    def load(self, connection: Connection, rows: Mapping[Key, RowState], tenant: str | None, *, whole: bool) -> None:
        """Read and lock those of these rows that exist: where they stand and, if ``whole``, what is in them."""
        chosen = (connection.dialect.driver, whole)
        select_them = self._selects.get(chosen)
        if select_them is None:
            make = self._select_arrays if connection.dialect.name == "postgresql" else self._select_lists
            select_them = self._selects[chosen] = make(connection.dialect, whole)
        width, columns = len(self._key), self._shape.columns
        for found in map(tuple, select_them(connection, list(rows), tenant)):
            key = found[:width]
            version, index, count, deleted = found[width : width + 4]
            row = rows.get(key)
            if row is None:
                raise ConfigurationError(
                    f"{self.table.name}: the key {key!r} is found where an equal one was asked for, of another type "
                    "or spelling; put keys as the table has them"
                )
            values = dict(zip(columns, found[width + 4 :], strict=True)) if whole else {}
            row.load((version, index), count, values, is_alive=not deleted)

    def _read_columns(self, whole: bool) -> list[Any]:
        names = (*self._key, VERSION, INDEX, COUNT, DELETED, *(self._shape.columns if whole else ()))
        return [self.table.c[name] for name in names]

    def _select_arrays(self, dialect: Dialect, whole: bool) -> _Select:
        columns = self._read_columns(whole)
        quoted = [_quoted(dialect, name) for name in self._key]
        arrays = [f"CAST(:k{i} AS {_cast_to(self.table.c[name].type, dialect)}[])" for i, name in enumerate(self._key)]
        condition = (
            f"t.{quoted[0]} = ANY({arrays[0]})"
            if len(quoted) == 1
            else f"({', '.join(f't.{name}' for name in quoted)}) IN (SELECT * FROM unnest({', '.join(arrays)}))"  # noqa: S608  our names
        )
        if self._shape.tenant:
            condition = f"t.{_quoted(dialect, self._shape.tenant)} = :tenant AND {condition}"
        statement = text(
            f"SELECT {', '.join(f't.{_quoted(dialect, column.name)}' for column in columns)} "  # noqa: S608  our names
            f"FROM {_table(dialect, self.table)} AS t WHERE {condition} "
            f"ORDER BY {', '.join(f't.{name}' for name in quoted)} FOR UPDATE"
        ).columns(*columns)
        prepare = [_processor(self.table.c[name].type, dialect) for name in self._key]

        def run(connection: Connection, keys: Sequence[Key], tenant: str | None) -> Iterable[Any]:
            given: dict[str, Any] = {
                f"k{i}": _processed(process, [key[i] for key in keys]) for i, process in enumerate(prepare)
            }
            if self._shape.tenant:
                given["tenant"] = tenant
            return connection.execute(statement, given, execution_options=_OURS)

        return run

    def _select_lists(self, _dialect: Dialect, whole: bool) -> _Select:
        key = [self.table.c[name] for name in self._key]
        wanted: Any = bindparam("keys", expanding=True)
        condition = key[0].in_(wanted) if len(key) == 1 else tuple_(*key).in_(wanted)
        statement = select(*self._read_columns(whole)).where(condition).order_by(*key).with_for_update()
        if self._shape.tenant:
            statement = statement.where(self.table.c[self._shape.tenant] == bindparam("tenant"))

        def run(connection: Connection, keys: Sequence[Key], tenant: str | None) -> Iterable[Any]:
            for start in range(0, len(keys), _KEYS_PER_SELECT):
                page = keys[start : start + _KEYS_PER_SELECT]
                given: dict[str, Any] = {"keys": [one[0] for one in page] if len(key) == 1 else list(page)}
                if self._shape.tenant:
                    given["tenant"] = tenant
                yield from connection.execute(statement, given, execution_options=_OURS)

        return run

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, connection: Connection, rows: Mapping[Key, RowState], tenant: str | None) -> None:
        """Write those that have changed. `ConcurrencyError` if somebody else was quicker."""
        now = clock.now()
        planned: dict[_Plan, list[RowState]] = {}
        for row in _in_one_order([row for row in rows.values() if row.is_changed]):
            planned.setdefault(self._plan(row), []).append(row)
        for plan, group in planned.items():
            self._write(connection, plan, group, tenant, now)

    def _plan(self, row: RowState) -> _Plan:
        is_whole = len(row.values) == len(self._shape.columns)
        if row.is_known:
            if row.is_fresh and not is_whole:
                self._shape.filled(row.values, entirely=row.stored is not None)
                is_whole = len(row.values) == len(self._shape.columns)
            plan = self._new if row.stored is None else self._same if row.stored == row.position else self._next
            return plan if is_whole else self._plan_of(plan.kind, row.values, row.values)
        added = tuple([name for name, value in row.values.items() if type(value) is Add])
        if row.is_fresh and row.is_alive:
            self._shape.filled(row.values, entirely=True)
        changed = tuple([name for name in row.values if name not in added])
        if not is_whole:
            self._shape.filled(row.values, entirely=False)
        return self._plan_of(_Kind.BLIND, row.values, changed, added)

    def _plan_of(
        self, kind: _Kind, values: Collection[str], changed: Collection[str], added: tuple[str, ...] = ()
    ) -> _Plan:
        given = (kind.value, *values, 0, *changed, 0, *added)
        plan = self._plans.get(given)
        if plan is None:
            names = [tuple([name for name in self._shape.columns if name in some]) for some in (values, changed, added)]
            plan = self._plans[given] = self._plans.setdefault((kind.value, *names), _Plan(kind, *names))
        return plan

    def _write(
        self, connection: Connection, plan: _Plan, rows: Sequence[RowState], tenant: str | None, now: Any
    ) -> None:
        lists: dict[str, list[Any]] = {self._shape.tenant: [tenant] * len(rows)} if self._shape.tenant else {}
        for i, name in enumerate(self._key):
            lists[name] = [row.key[i] for row in rows]
        for name in plan.columns:
            values = [row.values[name] for row in rows]
            lists[name] = [value.amount for value in values] if name in plan.added else values
        lists[VERSION], lists[INDEX] = map(list, zip(*[row.position for row in rows], strict=True))
        lists[COUNT] = [row.count for row in rows]
        lists[DELETED] = [not row.is_alive for row in rows]
        lists[AT] = [now] * len(rows)
        same = tuple(name for name in self._often_same if lists[name].count(lists[name][0]) == len(rows))
        statement = self._statement(connection.dialect, plan, same)
        if statement.execute(connection, list(lists.values())) != len(rows):
            raise ConcurrencyError(
                f"somebody else has written a row of {self.table.name} since it was read: do it again"
            )

    def _statement(self, dialect: Dialect, plan: _Plan, same: tuple[str, ...]) -> _Statement:
        chosen = (dialect.driver, plan, same)
        if chosen not in self._statements:
            self._statements[chosen] = _FAMILIES[dialect.name](self.table, self._conflict, plan, same, dialect)
        return self._statements[chosen]


def _in_one_order(rows: list[RowState]) -> list[RowState]:
    """In the same order everywhere: two transactions that write rows in different orders would wait for each other."""
    if all(row.stored is not None for row in rows):
        return rows  # locked already
    try:
        return sorted(rows, key=_order)
    except TypeError:
        return sorted(rows, key=lambda row: repr(row.key))


def _order(row: RowState) -> Key:
    return tuple([part.int if type(part) is UUID else part for part in row.key])  # which compare much faster


class _Statement:
    """An upsert of many rows. ``execute`` says how many it has written."""

    def __init__(
        self, table: Table, conflict: Sequence[str], plan: _Plan, same: Collection[str], dialect: Dialect
    ) -> None:
        self._same = same
        self._names = (*conflict, *plan.columns, VERSION, INDEX, COUNT, DELETED, AT)
        self._types = [table.c[name].type for name in self._names]
        self._table = table
        self._plan = plan
        self._dialect = dialect
        self._conflict = [_quoted(dialect, name) for name in conflict]
        columns = ", ".join(_quoted(dialect, name) for name in self._names)
        self._statement = self._typed(
            f"INSERT INTO {self._target()} ({columns}) {self._source()} {self._otherwise()}".rstrip()
        )

    def execute(self, connection: Connection, lists: Sequence[list[Any]]) -> int:
        rows = [{f"p{i}": value for i, value in enumerate(row)} for row in zip(*lists, strict=True)]
        return int(connection.execute(self._statement, rows, execution_options=_OURS).rowcount)

    def _typed(self, sql: str) -> Any:
        return text(sql).bindparams(*(bindparam(f"p{i}", type_=kind) for i, kind in enumerate(self._types)))

    def _target(self) -> str:
        return f"{_table(self._dialect, self._table)} AS t"

    def _source(self) -> str:
        return f"VALUES ({', '.join(f':p{i}' for i in range(len(self._names)))})"

    def _otherwise(self) -> str:
        """What is to be done if the row is there."""
        conflict = f"ON CONFLICT ({', '.join(self._conflict)})"
        if self._plan.kind is _Kind.NEW:
            return f"{conflict} DO NOTHING"
        guard = self._guard("t.{0}", "excluded.{0}")
        changes = ", ".join(f"{name} = {what}" for name, what in self._changes("t.{0}", "excluded.{0}"))
        return f"{conflict} DO UPDATE SET {changes}" + (f" WHERE {guard}" if guard else "")

    def _guard(self, old: str, new: str) -> str:
        if self._plan.kind is _Kind.BLIND:
            return ""
        stored, given = (", ".join(form.format(name) for name in (VERSION, INDEX)) for form in (old, new))
        return f"({stored}) {'<' if self._plan.kind is _Kind.NEXT else '='} ({given})"

    def _changes(self, old: str, new: str) -> Iterable[tuple[str, str]]:
        """The columns of a row that is there, and what each of them becomes."""
        for name in (*self._plan.changed, *self._plan.added, DELETED, AT):
            quoted = _quoted(self._dialect, name)
            before, given = old.format(quoted), new.format(quoted)
            yield quoted, f"COALESCE({before}, 0) + {given}" if name in self._plan.added else given
        if self._plan.kind is _Kind.NEXT:
            # MySQL sets one after the other and looks at what it has set: by the index first, the guard still holds
            # for the version, or the version is the same anyway.
            for name in (COUNT, INDEX, VERSION):
                yield name, new.format(name)


class _PostgresUpsert(_Statement):
    """An array for each column, but for what is the same in all rows. A column that is an array itself does not go into
    one: then it is row by row.
    """

    def __init__(
        self, table: Table, conflict: Sequence[str], plan: _Plan, same: Collection[str], dialect: Dialect
    ) -> None:
        self._is_single = any(isinstance(column.type.dialect_impl(dialect), ARRAY) for column in table.columns)
        super().__init__(table, conflict, plan, same, dialect)
        self._prepare = [(name in same, _processor(table.c[name].type, dialect)) for name in self._names]

    def execute(self, connection: Connection, lists: Sequence[list[Any]]) -> int:
        if self._is_single:
            write = super().execute
            return sum(write(connection, [[value] for value in row]) for row in zip(*lists, strict=True))
        given: dict[str, Any] = {}
        for i, ((is_same, process), values) in enumerate(zip(self._prepare, lists, strict=True)):
            given[f"p{i}"] = _processed(process, values[:1])[0] if is_same else _processed(process, values)
        return int(connection.execute(self._statement, given, execution_options=_OURS).rowcount)

    def _typed(self, sql: str) -> Any:
        return super()._typed(sql) if self._is_single else text(sql)

    def _source(self) -> str:
        if self._is_single:
            return super()._source()
        values, arrays = [], {}
        for i, (name, kind) in enumerate(zip(self._names, self._types, strict=True)):
            wanted = _cast_to(kind, self._dialect)
            if name in self._same:
                values.append(f"CAST(:p{i} AS {wanted})")
            else:
                values.append(f"c{i}")
                arrays[f"c{i}"] = f"CAST(:p{i} AS {wanted}[])"
        given = f"unnest({', '.join(arrays.values())}) AS given ({', '.join(arrays)})"
        return f"SELECT {', '.join(values)} FROM {given}"  # noqa: S608  our names


class _MysqlUpsert(_Statement):
    """MySQL does not say how many rows it has left alone. Those that were read are locked, so that there are none."""

    def execute(self, connection: Connection, lists: Sequence[list[Any]]) -> int:
        try:
            super().execute(connection, lists)
        except IntegrityError as error:
            number, *said = getattr(error.orig, "args", ()) or (0,)
            if self._plan.kind is _Kind.NEW and number == _DUPLICATE_KEY and "PRIMARY'" in str(said):
                return 0
            raise
        return len(lists[0])

    def _target(self) -> str:
        return _table(self._dialect, self._table)

    def _otherwise(self) -> str:
        if self._plan.kind is _Kind.NEW:
            return ""
        guard = self._guard("{0}", "VALUES({0})")
        changes = self._changes("{0}", "VALUES({0})")
        return "ON DUPLICATE KEY UPDATE " + ", ".join(
            f"{name} = IF({guard}, {what}, {name})" if guard else f"{name} = {what}" for name, what in changes
        )


_FAMILIES: Mapping[str, type[_Statement]] = {
    "postgresql": _PostgresUpsert,
    "mysql": _MysqlUpsert,
    "mariadb": _MysqlUpsert,
    "sqlite": _Statement,
}


def _quoted(dialect: Dialect, name: str) -> str:
    return dialect.identifier_preparer.quote(name).replace(":", "\\:")


def _table(dialect: Dialect, table: Table) -> str:
    return dialect.identifier_preparer.format_table(table).replace(":", "\\:")


def _cast_to(kind: Any, dialect: Dialect) -> str:
    """The type that such values are given as. A text has no length there: a cast would silently cut it off."""
    impl = kind.dialect_impl(dialect)
    inner = getattr(impl, "impl_instance", impl)
    if isinstance(inner, String) and not (isinstance(inner, EnumType) and inner.native_enum):
        return "TEXT"
    return dialect.type_compiler_instance.process(inner)


def _processor(kind: Any, dialect: Dialect) -> Callable[[Any], Any] | None:
    process: Callable[[Any], Any] | None = kind.dialect_impl(dialect).bind_processor(dialect)
    return process


def _processed(process: Callable[[Any], Any] | None, values: list[Any]) -> list[Any]:
    return [process(value) for value in values] if process else values
