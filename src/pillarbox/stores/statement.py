"""Hot statements: built with Core, compiled once per dialect, executed by their text.

SQLAlchemy's own execution caches the compiled form, but finds it again by walking the statement each time; for the one
statement that every business transaction pays for, that walk costs more than everything else we do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import ClauseElement, Connection, Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.types import TypeEngine


class FixedStatement:
    """A statement whose text never changes, for one dialect. Values are given in the order of ``parameters``."""

    def __init__(
        self, statement: ClauseElement, dialect: Dialect, parameters: Sequence[tuple[str, TypeEngine[Any] | None]]
    ) -> None:
        compiled: Any = statement.compile(dialect=dialect)
        self._text: str = compiled.string
        self._names: list[str] | None = None if compiled.positional else [name for name, _ in parameters]
        if compiled.positional and list(compiled.positiontup) != [name for name, _ in parameters]:
            raise ValueError("the parameters are not named in the order in which the statement uses them")
        processors = [_processor(kind, dialect) for _, kind in parameters]
        self._processors = processors if any(processors) else None

    def execute(self, connection: Connection, values: Sequence[Any]) -> None:
        """Run it."""
        if self._processors is not None:
            pairs = zip(self._processors, values, strict=True)
            values = [process(value) if process else value for process, value in pairs]
        if self._names is None:
            connection.exec_driver_sql(self._text, tuple(values))
        else:
            connection.exec_driver_sql(self._text, dict(zip(self._names, values, strict=True)))


def _processor(kind: TypeEngine[Any] | None, dialect: Dialect) -> Callable[[Any], Any] | None:
    return None if kind is None else kind.dialect_impl(dialect).bind_processor(dialect)


class DirectStatement:
    """A statement that is handed to the driver as it is, for what every turn of a lane does: half of its time would go
    into what SQLAlchemy does around it. No listener of the engine sees it, and an error costs the connection.
    """

    def __init__(self, statement: ClauseElement) -> None:
        self._statement = statement
        self._compiled: dict[str, tuple[str, Sequence[str], bool]] = {}

    def fetch(self, connection: Connection, parameters: Mapping[str, Any]) -> Sequence[Any]:
        """Run it; the rows as the driver has them."""
        compiled = self._compiled.get(connection.dialect.driver) or self._compile(connection.dialect)
        text, names, positional = compiled
        values = [parameters[name] for name in names]
        cursor = connection.connection.cursor()
        try:
            cursor.execute(text, tuple(values) if positional else dict(zip(names, values, strict=True)))
            rows: Sequence[Any] = cursor.fetchall()
        except BaseException as error:
            connection.invalidate(error)
            dbapi: Any = connection.dialect.dbapi
            if isinstance(error, dbapi.Error):
                raise DBAPIError.instance(text, None, error, dbapi.Error, connection_invalidated=True) from error
            raise
        cursor.close()
        return rows

    def _compile(self, dialect: Dialect) -> tuple[str, Sequence[str], bool]:
        compiled: Any = self._statement.compile(dialect=dialect)
        names = compiled.positiontup if compiled.positional else [*compiled.binds]
        self._compiled[dialect.driver] = found = (compiled.string, names, compiled.positional)
        return found
