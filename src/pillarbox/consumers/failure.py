"""Whose fault it was: the class of what a handler raised.

Taking the message's fault for that of the circumstances tries it for ever; the other way round, an outage fills the
dead letters with healthy messages. So what is known stands in tables, and what is not known is `Failure.UNKNOWN`: tried
again, so many times. Drivers and clients are known by name, and none of them is imported for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from sqlalchemy.exc import DBAPIError, PendingRollbackError


class Failure(StrEnum):
    """What is to be done about an exception depends on this alone."""

    TRANSIENT = "transient"
    """The circumstances': retried without limit, never a dead letter."""
    BUSINESS = "business"
    """A handler's decision: what the event asks for cannot be done."""
    POISON = "poison"
    """The message's own fault: no attempt will ever succeed."""
    UNKNOWN = "unknown"
    """Nobody can tell: tried again as if it were transient, but attempts are counted."""


# -- what is known -----------------------------------------------------------------------------------------------------

SQLSTATES: Mapping[str, Failure] = {
    "08": Failure.TRANSIENT,  # the connection
    "22": Failure.POISON,  # data: too long, out of range, not a number
    "2200H": Failure.UNKNOWN,  # a sequence is used up, for all messages alike
    "23514": Failure.POISON,  # CHECK
    "25006": Failure.TRANSIENT,  # read-only: a fail-over left us at a replica
    "25P03": Failure.TRANSIENT,  # idle in its transaction for too long
    "25P04": Failure.TRANSIENT,  # the transaction took too long
    "28": Failure.TRANSIENT,  # a password or a role: it concerns all messages alike
    "40": Failure.TRANSIENT,  # serialization failures and deadlocks
    "53": Failure.TRANSIENT,  # disk, memory or connections are used up
    "55": Failure.TRANSIENT,  # locked by somebody else
    "57": Failure.TRANSIENT,  # cancelled, timed out, shut down
    "58": Failure.TRANSIENT,  # the operating system
}
"""PostgreSQL, by class or by code; the code goes first. Not here are 23505, 23503 and 23P01, which a race or a missing
predecessor may have caused, and class 42 and 23502 (NOT NULL): a migration may be late, or early.
"""

MYSQL_NUMBERS: Mapping[int, Failure] = {
    1020: Failure.TRANSIENT,  # the row changed since our snapshot (MariaDB)
    1021: Failure.TRANSIENT,  # disk full
    1040: Failure.TRANSIENT,  # too many connections
    1045: Failure.TRANSIENT,  # access denied, to all messages alike
    1047: Failure.TRANSIENT,  # this Galera node is not ready
    1053: Failure.TRANSIENT,  # shutting down
    1114: Failure.TRANSIENT,  # table full
    1158: Failure.TRANSIENT,  # network, while reading
    1159: Failure.TRANSIENT,  # network, time-out while reading
    1160: Failure.TRANSIENT,  # network, while writing
    1161: Failure.TRANSIENT,  # network, time-out while writing
    1203: Failure.TRANSIENT,  # too many connections of this user
    1205: Failure.TRANSIENT,  # lock wait timeout
    1213: Failure.TRANSIENT,  # deadlock
    1226: Failure.TRANSIENT,  # this user has used up a limit
    1290: Failure.TRANSIENT,  # read-only server
    1317: Failure.TRANSIENT,  # interrupted
    1792: Failure.TRANSIENT,  # read-only transaction
    1836: Failure.TRANSIENT,  # read-only mode
    1927: Failure.TRANSIENT,  # killed (MariaDB)
    1969: Failure.TRANSIENT,  # max_statement_time (MariaDB)
    2002: Failure.TRANSIENT,  # cannot connect, by socket
    2003: Failure.TRANSIENT,  # cannot connect
    2006: Failure.TRANSIENT,  # the server has gone away
    2013: Failure.TRANSIENT,  # lost while asking
    2014: Failure.TRANSIENT,  # out of step, after it was interrupted
    2055: Failure.TRANSIENT,  # lost, with a reason
    3024: Failure.TRANSIENT,  # max_execution_time (MySQL)
    3572: Failure.TRANSIENT,  # NOWAIT, and it is locked
    4031: Failure.TRANSIENT,  # idle for too long (MySQL)
    1264: Failure.POISON,  # out of range
    1265: Failure.POISON,  # truncated
    1292: Failure.POISON,  # not a date, not a number
    1366: Failure.POISON,  # not of the column's type or character set
    1406: Failure.POISON,  # too long
    1690: Failure.POISON,  # out of range, in an expression
    3819: Failure.POISON,  # CHECK (MySQL)
    4025: Failure.POISON,  # CHECK (MariaDB)
}
"""MySQL and MariaDB. Not here are 1062, 1451 and 1452, which a race or a missing predecessor may have caused, and 1054,
1146, 1048 and 1364 (NOT NULL): a migration may be late, or early.
"""

SQLITE_NAMES: Mapping[str, Failure] = {
    "SQLITE_BUSY": Failure.TRANSIENT,
    "SQLITE_CANTOPEN": Failure.TRANSIENT,
    "SQLITE_FULL": Failure.TRANSIENT,
    "SQLITE_INTERRUPT": Failure.TRANSIENT,
    "SQLITE_IOERR": Failure.TRANSIENT,
    "SQLITE_LOCKED": Failure.TRANSIENT,
    "SQLITE_PROTOCOL": Failure.TRANSIENT,
    "SQLITE_CONSTRAINT_CHECK": Failure.POISON,
    "SQLITE_CONSTRAINT_DATATYPE": Failure.POISON,
    "SQLITE_MISMATCH": Failure.POISON,
    "SQLITE_TOOBIG": Failure.POISON,
}
"""SQLite, by the beginning of the name of its code."""

SQLITE_TEXTS: Mapping[str, Failure] = {
    "database is locked": Failure.TRANSIENT,
    "database table is locked": Failure.TRANSIENT,
    "database schema is locked": Failure.TRANSIENT,
    "database or disk is full": Failure.TRANSIENT,
    "disk I/O error": Failure.TRANSIENT,
    "unable to open database file": Failure.TRANSIENT,
    "CHECK constraint failed": Failure.POISON,
}
"""SQLite, for builds of its module that do not give the name."""

GRPC_CODES: Mapping[str, Failure] = {
    "ABORTED": Failure.TRANSIENT,
    "DEADLINE_EXCEEDED": Failure.TRANSIENT,
    "RESOURCE_EXHAUSTED": Failure.TRANSIENT,
    "UNAVAILABLE": Failure.TRANSIENT,
}

CLASSES: Mapping[str, Failure] = {
    "pillarbox.errors.Reject": Failure.BUSINESS,
    "pillarbox.errors.Poison": Failure.POISON,
    "pillarbox.errors.EventError": Failure.UNKNOWN,  # of an event that the handler publishes
    "pillarbox.errors.ConfigurationError": Failure.UNKNOWN,  # a mistake in code, which may meet all messages alike
    "pillarbox.errors.ConcurrencyError": Failure.TRANSIENT,
    "pillarbox.errors.CommitOutcomeUnknown": Failure.TRANSIENT,
    "pillarbox.errors.LeaseLostError": Failure.TRANSIENT,
    # Errors of the operating system, except those that are about one file, and what only looks like one.
    "builtins.OSError": Failure.TRANSIENT,
    "builtins.FileExistsError": Failure.UNKNOWN,
    "builtins.FileNotFoundError": Failure.UNKNOWN,
    "builtins.IsADirectoryError": Failure.UNKNOWN,
    "builtins.NotADirectoryError": Failure.UNKNOWN,
    "builtins.PermissionError": Failure.UNKNOWN,
    "gzip.BadGzipFile": Failure.UNKNOWN,
    "io.UnsupportedOperation": Failure.UNKNOWN,
    "shutil.Error": Failure.UNKNOWN,
    "smtplib.SMTPException": Failure.UNKNOWN,
    "smtplib.SMTPConnectError": Failure.TRANSIENT,
    "smtplib.SMTPServerDisconnected": Failure.TRANSIENT,
    "urllib.error.HTTPError": Failure.UNKNOWN,
    "requests.exceptions.RequestException": Failure.UNKNOWN,
    "requests.exceptions.ConnectionError": Failure.TRANSIENT,
    "requests.exceptions.Timeout": Failure.TRANSIENT,
    # Databases, where no code came with it.
    "sqlalchemy.exc.TimeoutError": Failure.TRANSIENT,  # no connection in the pool
    "sqlalchemy.exc.DataError": Failure.POISON,
    "sqlalchemy.exc.InterfaceError": Failure.TRANSIENT,
    "sqlalchemy.orm.exc.StaleDataError": Failure.TRANSIENT,
    "asyncpg.exceptions._base.InterfaceError": Failure.TRANSIENT,
    "asyncmy.errors.InterfaceError": Failure.TRANSIENT,
    "psycopg.DataError": Failure.POISON,
    "psycopg.InterfaceError": Failure.TRANSIENT,
    "psycopg.OperationalError": Failure.TRANSIENT,  # without a code: it could not connect, or lost the connection
    "psycopg2.DataError": Failure.POISON,
    "psycopg2.InterfaceError": Failure.TRANSIENT,
    "psycopg2.OperationalError": Failure.TRANSIENT,
    "pymysql.err.InterfaceError": Failure.TRANSIENT,
    "sqlite3.InterfaceError": Failure.UNKNOWN,  # there is no wire: a value that it cannot store, or a misuse
    # Other servers.
    "aiohttp.client_exceptions.ClientConnectionError": Failure.TRANSIENT,
    "botocore.exceptions.ConnectionError": Failure.TRANSIENT,
    "botocore.exceptions.EndpointConnectionError": Failure.TRANSIENT,
    "botocore.exceptions.HTTPClientError": Failure.TRANSIENT,
    "httpx.TransportError": Failure.TRANSIENT,
    "redis.exceptions.BusyLoadingError": Failure.TRANSIENT,
    "redis.exceptions.ConnectionError": Failure.TRANSIENT,
    "redis.exceptions.TimeoutError": Failure.TRANSIENT,
}
"""By class; the nearest one among an exception's bases counts."""

MAX_DEPTH = 8
"""How far causes and groups are followed."""

_MYSQL_MODULES = {"MySQLdb", "aiomysql", "asyncmy", "mariadb", "mysql", "pymysql"}
_RECONNECT = "8s2b"
"""SQLAlchemy's code for a transaction whose connection is gone."""


# -- looking it up -----------------------------------------------------------------------------------------------------


def classify(error: BaseException) -> Failure:
    """The class of an exception that a handler raised. One that says nothing by itself is what caused it."""
    return _classify(error, MAX_DEPTH)


def _classify(error: BaseException, depth: int) -> Failure:
    if depth == 0:
        return Failure.UNKNOWN
    if isinstance(error, BaseExceptionGroup):
        kinds = {_classify(each, depth - 1) for each in error.exceptions}
        return kinds.pop() if len(kinds) == 1 else Failure.UNKNOWN  # each asks for something else
    found = _by_itself(error)
    if found is Failure.UNKNOWN and (cause := _cause(error)) is not None:
        return _classify(cause, depth - 1)
    return found


def _cause(error: BaseException) -> BaseException | None:
    # The session only says that something failed before, and does so for whoever goes on after catching it.
    return error.__cause__ or (error.__context__ if isinstance(error, PendingRollbackError) else None)


def _by_itself(error: BaseException) -> Failure:
    if isinstance(error, PendingRollbackError):
        return Failure.TRANSIENT if error.code == _RECONNECT else Failure.UNKNOWN
    if isinstance(error, FileNotFoundError) and error.errno is not None and error.filename is None:
        return Failure.TRANSIENT  # about no file: the Unix socket of a server that is away, or starts
    if not isinstance(error, DBAPIError):
        return _by_code(error) or _by_class(error) or Failure.UNKNOWN
    # SQLAlchemy's adapter for asyncpg keeps the driver's own error, which knows more, as its cause.
    parts = [each for each in (getattr(error.orig, "__cause__", None), error.orig, error) if each is not None]
    known = _first(map(_by_code, parts))
    if known is None and error.connection_invalidated:
        return Failure.TRANSIENT
    return known or _first(map(_by_class, parts)) or Failure.UNKNOWN


def _first(found: Iterable[Failure | None]) -> Failure | None:
    return next(filter(None, found), None)


def _by_code(error: BaseException) -> Failure | None:
    """What a server's code says; None if there is no code."""
    roots = {base.__module__.partition(".")[0] for base in type(error).__mro__}
    if roots & _MYSQL_MODULES:
        number = getattr(error, "errno", None) or next(iter(error.args), None)
        return MYSQL_NUMBERS.get(number, Failure.UNKNOWN) if isinstance(number, int) and number else None
    if "sqlite3" in roots:
        return _of_sqlite(error)
    if "grpc" in roots and callable(code := getattr(error, "code", None)):
        return GRPC_CODES.get(getattr(code(), "name", ""), Failure.UNKNOWN)
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if not isinstance(state, str):
        return None
    return SQLSTATES.get(state) or SQLSTATES.get(state[:2], Failure.UNKNOWN)


def _of_sqlite(error: BaseException) -> Failure | None:
    name = getattr(error, "sqlite_errorname", None)
    if name is not None:
        return next((kind for start, kind in SQLITE_NAMES.items() if name.startswith(start)), Failure.UNKNOWN)
    said = str(error)
    return next((kind for text, kind in SQLITE_TEXTS.items() if text in said), None)


def _by_class(error: BaseException) -> Failure | None:
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__)
    return _first(map(CLASSES.get, names))
