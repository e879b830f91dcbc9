"""Hot statements: built with Core, compiled once per dialect, executed by their text.

SQLAlchemy's own execution caches the compiled form, but finds it again by walking the statement each time, and prepares
for results that nobody asks for. For the one statement that every business transaction pays for, and for the two of
every turn of a lane, that costs more than everything else we do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from sqlalchemy import ClauseElement, Connection, Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.types import TypeEngine
from sqlalchemy.util import await_only, greenlet_spawn


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
        processors = enumerate(_processor(kind, dialect) for _, kind in parameters)
        self._processors = [(place, process) for place, process in processors if process is not None]

    def execute(self, connection: Connection, values: list[Any]) -> None:
        """Run it. Whoever watches the statements of the engine sees it. The values are ours from now on."""
        for place, process in self._processors:
            values[place] = process(values[place])
        given = tuple(values) if self._names is None else dict(zip(self._names, values, strict=True))
        if connection.dialect.name == "postgresql" and _needs_no_sqlalchemy(connection):
            _hand_over(connection, self._text, given)
        else:
            connection.exec_driver_sql(self._text, given)


class DirectStatement:
    """A statement that is handed to the driver as it is, for what a relay asks all the time. Nobody who watches the
    engine sees it. An error costs the connection: it may know a plan of before somebody changed the table, and would
    fail for ever.
    """

    def __init__(self, statement: ClauseElement) -> None:
        self._statement = statement
        self._compiled: dict[str, tuple[str, Sequence[str], bool]] = {}

    def fetch(self, connection: Connection, parameters: Mapping[str, Any]) -> Sequence[Any]:
        """Run it; the rows as the driver has them."""
        text, given = self._with(parameters, connection.dialect)
        try:
            rows: Sequence[Any] = _hand_over(connection, text, given, lambda cursor: cursor.fetchall())
        except DBAPIError as error:
            connection.invalidate(error)
            raise
        return rows

    async def fetch_at_once(
        self, connection: Connection, parameters: Mapping[str, Any], seconds: float
    ) -> Sequence[Any]:
        """The same without a greenlet, on a connection that `takes_at_once`. It may take so many seconds.
        Whatever the error, the connection is closed then.
        """
        text, given = "", None
        try:
            text, given = self._with(parameters, connection.dialect)
            driver: Any = connection.connection.driver_connection
            rows: Sequence[Any] = await driver.fetch(text, *given, timeout=seconds)
        except BaseException as error:
            failure = await greenlet_spawn(_given_up, connection, text, given, error)
            raise failure from failure.__cause__
        return rows

    def _with(self, parameters: Mapping[str, Any], dialect: Dialect) -> tuple[str, Any]:
        text, names, positional = self._compiled.get(dialect.driver) or self._compile(dialect)
        values = [parameters[name] for name in names]
        return text, tuple(values) if positional else dict(zip(names, values, strict=True))

    def _compile(self, dialect: Dialect) -> tuple[str, Sequence[str], bool]:
        compiled: Any = self._statement.compile(dialect=dialect)
        names = compiled.positiontup if compiled.positional else [*compiled.binds]
        self._compiled[dialect.driver] = found = (compiled.string, names, compiled.positional)
        return found


def takes_at_once(connection: Connection) -> bool:
    """Whether a `DirectStatement` may go to this connection's driver without a greenlet, which takes longer than an
    easy statement.
    """
    return connection.dialect.driver == "asyncpg" and _needs_no_cursor(connection.connection.dbapi_connection)


def _hand_over(connection: Connection, text: str, given: Any, result: Callable[[Any], Any] | None = None) -> Any:
    """Have the driver run it. What fails, fails as it does in SQLAlchemy: with its errors, and without a connection
    that nobody could use again.
    """
    adapter: Any = connection.connection.dbapi_connection
    cursor: Any = None
    try:
        if connection.dialect.driver == "asyncpg" and _needs_no_cursor(adapter):
            return await_only(_one_at_a_time(adapter, text, given))
        cursor = adapter.cursor()
        cursor.execute(text, given)
        found = None if result is None else result(cursor)
    except BaseException as error:
        failure = _failure(connection, text, given, error, cursor)
        raise failure from failure.__cause__
    cursor.close()
    return found


def _failure(connection: Connection, text: str, given: Any, error: BaseException, cursor: Any = None) -> BaseException:
    """What to raise for an error. A connection that nobody could use again is given up."""
    dialect: Any = connection.dialect
    if dialect.driver == "asyncpg" and isinstance(error, Exception):
        try:
            cast("Any", connection.connection.dbapi_connection)._handle_exception(error)
        except Exception as translated:
            error = translated
    answered = isinstance(error, dialect.dbapi.Error)
    gone = not answered or dialect.is_disconnect(error, connection.connection.dbapi_connection, cursor)
    if gone:
        connection.invalidate(error)
    if not answered:
        return error
    failure = DBAPIError.instance(
        text,
        given,
        cast("Exception", error),
        dialect.dbapi.Error,
        hide_parameters=connection.engine.hide_parameters,
        connection_invalidated=gone,
        dialect=dialect,
    )
    failure.__cause__ = error
    return failure


def _given_up(connection: Connection, text: str, given: Any, error: BaseException) -> BaseException:
    try:
        failure = _failure(connection, text, given, error)
        connection.invalidate()
    finally:
        connection.close()
    return failure


def _needs_no_cursor(adapter: Any) -> bool:
    """Whether the cursor that stands between us and asyncpg would do nothing but take time: it begins the transaction
    with its first statement, and gives prepared statements the names that somebody may want behind PgBouncer.
    """
    begun = adapter._connection.is_in_transaction() or adapter.autocommit
    return begun and adapter._prepared_statement_name_func is adapter._default_name_func


async def _one_at_a_time(adapter: Any, text: str, given: Any) -> Sequence[Any]:
    """Whoever shares the connection waits, as everybody does who goes by a cursor."""
    await adapter._execute_mutex.acquire()
    try:
        rows: Sequence[Any] = await adapter._connection.fetch(text, *given)
    finally:
        adapter._execute_mutex.release()
    return rows


def _needs_no_sqlalchemy(connection: Connection) -> bool:
    """Whether what is written now belongs to a transaction that SQLAlchemy knows and has not given up, and nobody
    listens to, or logs, the statements of this connection: instruments, or a person.
    """
    transaction = connection._nested_transaction or connection._transaction
    if transaction is None or not transaction.is_active or connection._echo:
        return False
    if connection._has_events or connection.engine._has_events:
        dispatch: Any = connection.dispatch
        return not (dispatch.before_cursor_execute or dispatch.after_cursor_execute)
    return True


def _processor(kind: TypeEngine[Any] | None, dialect: Dialect) -> Callable[[Any], Any] | None:
    return None if kind is None else kind.dialect_impl(dialect).bind_processor(dialect)
