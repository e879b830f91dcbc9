"""Hot statements: built with Core, compiled once per dialect, executed by their text.

SQLAlchemy's own execution caches the compiled form, but finds it again by walking the statement each time; for the one
statement that every business transaction pays for, that walk costs more than everything else we do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import ClauseElement, Connection, Dialect
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
