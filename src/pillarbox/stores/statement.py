"""Hot statements: built with Core, compiled once per dialect, executed by their text.

SQLAlchemy's own execution caches the compiled form, but finds it again by walking the statement each time; for the one
statement that every business transaction pays for, that walk costs more than everything else we do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import ClauseElement, Connection, CursorResult, Dialect
from sqlalchemy.types import TypeEngine

_Processor = Callable[[Any], Any]


class FixedStatement:
    """A statement whose text never changes, for one dialect."""

    def __init__(
        self, statement: ClauseElement, dialect: Dialect, types: Mapping[str, TypeEngine[Any]], **compile_kw: Any
    ) -> None:
        compiled: Any = statement.compile(dialect=dialect, **compile_kw)
        self.text: str = compiled.string
        self._positional = bool(compiled.positional)
        self._parameters: list[tuple[str, _Processor | None]] = [
            (name, types[name].dialect_impl(dialect).bind_processor(dialect) if name in types else None)
            for name in (compiled.positiontup if self._positional else compiled.params)
        ]

    def execute(self, connection: Connection, values: Mapping[str, Any]) -> CursorResult[Any]:
        """Run it. Every parameter must have a value."""
        if self._positional:
            return connection.exec_driver_sql(
                self.text,
                tuple(process(values[name]) if process else values[name] for name, process in self._parameters),
            )
        return connection.exec_driver_sql(
            self.text, {name: process(values[name]) if process else values[name] for name, process in self._parameters}
        )
