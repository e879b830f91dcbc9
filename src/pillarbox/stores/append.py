"""The write side of a relational store: routes, lanes and rows go in with the business transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import astuple
from sqlalchemy import Connection, Dialect, bindparam, insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from ..cursor import Cursor
from ..errors import DuplicateEventError, NotMigratedError, StoreError
from ..outbox import OUTBOUND, Delivery, FailurePolicy, RouteRecord
from ..retry import RetryPolicy
from .columns import from_now
from .statement import FixedStatement
from .tables import deliveries as tables
from .tables import lanes, meta, routes

_COLUMNS = ("event_id", "event_type", "route", "shard", "schema_version", "topic", "key", "tenant", "headers", "body")
_ARRAYS = ("uuid", "text", "bigint", "integer", "integer", "text", "text", "text", "text", "bytea")
_ROWS_PER_STATEMENT = 100


class Appender:
    """`Appends` on a relational database."""

    def __init__(self, table: str = OUTBOUND) -> None:
        self.table = table
        self._inserts: dict[tuple[str, str, int], FixedStatement] = {}

    def register(self, connection: Connection, records: Iterable[RouteRecord]) -> int:
        with explained():
            shards = connection.execute(select(meta.c.shards)).scalar_one()
            start = {"cursor": str(Cursor())} if connection.dialect.name == "postgresql" else {}
            known = {row.id: row for row in connection.execute(select(routes))}
            made = {(row.route, row.shard) for row in connection.execute(select(lanes.c.route, lanes.c.shard))}
            for record in sorted(records, key=lambda record: record.id):
                found = known.get(record.id)
                if found is None:
                    insert_missing(connection, routes, [_route_values(record)])
                elif found.name != record.name:
                    raise StoreError(
                        f"the routes {found.name!r} and {record.name!r} have the same number: rename the newer one"
                    )
                elif route_record(found._mapping) != record:
                    record.check_lanes(found.shard_by)
                    connection.execute(update(routes).where(routes.c.id == record.id).values(_route_values(record)))
                missing = [
                    {"route": record.id, "shard": shard, **start}
                    for shard in range(shards)
                    if (record.id, shard) not in made
                ]
                insert_missing(connection, lanes, missing)
            return int(shards)

    def install_id(self, connection: Connection) -> UUID:
        """Whose tables this connection finds."""
        with explained():
            install: UUID = connection.execute(select(meta.c.install_id)).scalar_one()
            return install

    def append(self, connection: Connection, deliveries: Sequence[Delivery]) -> None:
        try:
            if len(deliveries) > 1 and connection.dialect.name == "postgresql":
                self._append_arrays(connection, deliveries)
            else:
                for start in range(0, len(deliveries), _ROWS_PER_STATEMENT):
                    self._append_values(connection, deliveries[start : start + _ROWS_PER_STATEMENT])
        except IntegrityError as error:
            if not any(sign in str(error.orig) for sign in (f"uq_{self.table}_event", f"{self.table}.event_id")):
                raise
            known = ", ".join(sorted({str(row.event_id) for row in deliveries}))
            raise DuplicateEventError(f"one of these events was written by an earlier transaction: {known}") from error
        except DBAPIError as error:
            explain(error)
            raise

    def _append_values(self, connection: Connection, deliveries: Sequence[Delivery]) -> None:
        values: list[Any] = []
        for row in deliveries:
            values += _values(row)
        self._insert(connection.dialect, len(deliveries)).execute(connection, values)

    def _append_arrays(self, connection: Connection, deliveries: Sequence[Delivery]) -> None:
        """One text for any number of rows, so that the driver's statement cache holds one entry and not hundreds."""
        columns = [list(column) for column in zip(*(_values(row) for row in deliveries), strict=True)]
        columns[0] = [str(event_id) for event_id in columns[0]]
        self._insert(connection.dialect, 0).execute(connection, columns)

    def _insert(self, dialect: Dialect, rows: int) -> FixedStatement:
        """The INSERT for a number of rows; for 0, the one that takes arrays."""
        key = (dialect.name, dialect.driver, rows)
        statement = self._inserts.get(key)
        if statement is None:
            insertion = _values_insert(self.table, dialect, rows) if rows else _array_insert(self.table, dialect)
            statement = self._inserts[key] = insertion
        return statement

    def committed(self, connection: Connection, written: tuple[UUID, int, int]) -> bool:
        """Whether the transaction that wrote this row has committed. Waits for it, if it is still at work.

        A row that we try to insert under the same identity waits for the other one's fate; ours is never committed.
        """
        event_id, route, schema_version = written
        probe = Delivery(event_id, "pillarbox.probe", route, -1, schema_version, "probe", "probe", None, {}, b"")
        savepoint = connection.begin_nested()
        try:
            self._append_values(connection, [probe])
        except IntegrityError:
            return True
        finally:
            savepoint.rollback()
        return False


def route_record(row: Mapping[Any, Any]) -> RouteRecord:
    return RouteRecord(
        name=row[routes.c.name],
        destination=row[routes.c.destination],
        topic=row[routes.c.topic],
        schema_version=row[routes.c.schema_version],
        on_failure=FailurePolicy(row[routes.c.on_failure]),
        retry=RetryPolicy(row[routes.c.retry_base], row[routes.c.retry_cap], row[routes.c.retry_attempts]),
        shard_by=row[routes.c.shard_by],
    )


@contextmanager
def explained() -> Iterator[None]:
    """A missing table is the most common of all mistakes: say what to do."""
    try:
        yield
    except DBAPIError as error:
        explain(error)
        raise


def explain(error: DBAPIError) -> None:
    """Raise something better, if we know it."""
    if any(
        sign in str(error.orig)
        for sign in ("does not exist", "no such table", "doesn't exist", "no such column", "Unknown column")
    ) and "pillarbox_" in str(error.orig):
        raise NotMigratedError(
            "Pillarbox's tables, or some of their columns, are not in this database: run `pillarbox migrate`, or "
            "await box.migrate()"
        ) from error


def _values(row: Delivery) -> tuple[Any, ...]:
    *values, headers, body = astuple(row)
    return (*values, msgspec.json.encode(headers).decode(), body)


def _values_insert(name: str, dialect: Dialect, count: int) -> FixedStatement:
    table = tables[name]
    kinds = {column: table.c[column].type for column in _COLUMNS if column != "body"}  # bytes, as drivers take them
    parameters = [(f"{column}_{index}", kinds.get(column)) for index in range(count) for column in _COLUMNS]
    rows = [
        {column: bindparam(f"{column}_{index}", type_=table.c[column].type) for column in _COLUMNS}
        for index in range(count)
    ]
    return FixedStatement(insert(table).inline().values(rows), dialect, parameters)


def _array_insert(table: str, dialect: Dialect) -> FixedStatement:
    arrays = ", ".join(f"CAST(:{column} AS {kind}[])" for column, kind in zip(_COLUMNS, _ARRAYS, strict=True))
    names = ", ".join(_COLUMNS)
    insertion = f"INSERT INTO {table} ({names}) SELECT {names} FROM unnest({arrays}) AS t({names})"  # noqa: S608
    return FixedStatement(text(insertion), dialect, [(column, None) for column in _COLUMNS])


def insert_missing(connection: Connection, table: Any, rows: list[dict[str, Any]]) -> None:
    """Insert what another process may be inserting, too."""
    if not rows:
        return
    statement: Any
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql  # noqa: PLC0415  loaded already, if this is the dialect

        statement = postgresql.insert(table).on_conflict_do_nothing()
    elif connection.dialect.name == "sqlite":
        from sqlalchemy.dialects import sqlite  # noqa: PLC0415  loaded already, if this is the dialect

        statement = sqlite.insert(table).on_conflict_do_nothing()
    else:
        from sqlalchemy.dialects import mysql  # noqa: PLC0415  loaded already, if this is the dialect

        # IGNORE would lock what is there for reading only, and two who then change it would wait for each other.
        key = next(iter(table.primary_key))
        statement = mysql.insert(table).on_duplicate_key_update({key.name: key})
    connection.execute(statement.values(rows))


def _route_values(record: RouteRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "name": record.name,
        "destination": record.destination,
        "topic": record.topic,
        "schema_version": record.schema_version,
        "on_failure": record.on_failure.value,
        "retry_base": record.retry.base,
        "retry_cap": record.retry.cap,
        "retry_attempts": record.retry.attempts,
        "shard_by": record.shard_by,
        "updated_at": from_now(),
    }
