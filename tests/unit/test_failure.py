"""Whose fault it was, told from exceptions as drivers and clients raise them."""

from __future__ import annotations

import asyncio
import errno
import gzip
import importlib
import io
import socket
import sqlite3
import urllib.error
from email.message import Message
from importlib.util import find_spec
from uuid import uuid4

import asyncmy.errors
import asyncpg  # type: ignore[import-untyped]
import httpx
import psycopg
import psycopg.errors
import psycopg2
import pymysql.err
import pytest
import redis.exceptions
import sqlalchemy.exc
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm.exc import StaleDataError

from pillarbox import CommitOutcomeUnknown, ConcurrencyError, PayloadError, Poison, Reject, TenancyError
from pillarbox.consumers.failure import CLASSES, MAX_DEPTH, Failure, classify
from pillarbox.errors import (
    ConfigurationError,
    DuplicateEventError,
    HeaderError,
    LeaseLostError,
    MissingExtraError,
    NotFoundError,
    UnknownEventError,
    UnregisteredEventError,
)

TRANSIENT, BUSINESS, POISON, UNKNOWN = Failure.TRANSIENT, Failure.BUSINESS, Failure.POISON, Failure.UNKNOWN


def wrapped(orig: Exception, kind: type[DBAPIError] = DBAPIError, *, gone: bool = False) -> DBAPIError:
    """As SQLAlchemy raises what a driver raised."""
    error = kind("SELECT 1", {}, orig, connection_invalidated=gone)
    error.__cause__ = orig
    return error


def named(module: str, name: str, *bases: type[BaseException]) -> BaseException:
    """An exception of a package that is not installed here."""
    made: BaseException = type(name, bases or (Exception,), {"__module__": module})("it said so")
    return made


def sqlite_error(kind: type[sqlite3.Error], text: str, name: str | None) -> sqlite3.Error:
    error = kind(text)
    if name is not None:
        error.sqlite_errorname = name
    return error


def of_grpc(code: str) -> BaseException:
    class StatusCode:
        name = code

    class RpcError(Exception):
        def code(self) -> StatusCode:
            return StatusCode()

    RpcError.__module__ = "grpc"
    return RpcError()


class TestOurOwn:
    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (Reject("sold out"), BUSINESS),
            (Poison("no such currency"), POISON),
            (UnknownEventError("no type for it"), UNKNOWN),
            (PayloadError("$.total", "not a number"), UNKNOWN),
            (HeaderError("no tenant"), UNKNOWN),
            (UnregisteredEventError("the handler published it"), UNKNOWN),
            (DuplicateEventError("the handler published it"), UNKNOWN),
            (ConfigurationError("the row has no such column"), UNKNOWN),
            (MissingExtraError("the cache", extra="redis"), UNKNOWN),
            (ConcurrencyError("changed"), TRANSIENT),
            (CommitOutcomeUnknown([(uuid4(), 1, 1)]), TRANSIENT),
            (LeaseLostError("gone"), TRANSIENT),
            (NotFoundError("its predecessor may come"), UNKNOWN),
            (TenancyError("none"), UNKNOWN),
        ],
    )
    def test_h87_what_pillarbox_raises(self, error: Exception, kind: Failure) -> None:
        assert classify(error) is kind

    def test_h87_a_subclass_of_ones_own_is_what_its_base_is(self) -> None:
        class SoldOut(Reject):
            pass

        assert classify(SoldOut("sold out")) is BUSINESS


class TestTheOperatingSystem:
    @pytest.mark.parametrize(
        "error",
        [
            ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
            ConnectionResetError(errno.ECONNRESET, "reset"),
            BrokenPipeError(errno.EPIPE, "pipe"),
            TimeoutError(),
            socket.gaierror(socket.EAI_AGAIN, "no name server"),
            OSError(errno.ENOSPC, "disk full"),
            OSError("Multiple exceptions: [Errno 111] Connect call failed"),
            urllib.error.URLError("no route"),
        ],
    )
    def test_h87_circumstances(self, error: Exception) -> None:
        assert classify(error) is TRANSIENT

    @pytest.mark.parametrize(
        "error",
        [
            FileNotFoundError(errno.ENOENT, "no such file", "a.txt"),
            PermissionError(errno.EACCES, "denied"),
            IsADirectoryError(errno.EISDIR, "a folder"),
            NotADirectoryError(errno.ENOTDIR, "a file"),
            FileExistsError(errno.EEXIST, "there"),
            gzip.BadGzipFile("not gzip"),
            io.UnsupportedOperation("not readable"),
            urllib.error.HTTPError("http://localhost", 400, "bad request", Message(), None),
            named("requests.exceptions", "RequestException", OSError),
        ],
    )
    def test_h87_what_only_looks_like_circumstances(self, error: Exception) -> None:
        assert classify(error) is UNKNOWN


class TestPostgres:
    @pytest.mark.parametrize(
        ("state", "kind"),
        [
            *((state, TRANSIENT) for state in ("08006", "25006", "25P03", "28P01", "40001", "40P01", "53300")),
            *((state, TRANSIENT) for state in ("55P03", "57014", "57P01", "57P03", "58030")),
            *((state, POISON) for state in ("22001", "22003", "22P02", "23514")),
            *((state, UNKNOWN) for state in ("23502", "2200H")),
            *((state, UNKNOWN) for state in ("23503", "23505", "23P01", "42P01", "42703", "25P02", "XX000", "P0001")),
        ],
    )
    def test_h87_every_driver_gives_the_same(self, state: str, kind: Failure) -> None:
        of_asyncpg: Exception = asyncpg.PostgresError.new({"C": state, "M": "it said so"})
        of_psycopg = psycopg.errors.lookup(state)() if state != "XX000" else psycopg.errors.InternalError_()
        assert classify(of_asyncpg) is classify(of_psycopg) is kind
        assert classify(wrapped(of_asyncpg)) is classify(wrapped(of_psycopg)) is kind

    def test_h87_the_adapters_error_is_told_by_the_drivers(self) -> None:
        adapters = Exception("it said so")
        adapters.__cause__ = asyncpg.CheckViolationError("it said so")
        assert classify(wrapped(adapters, sqlalchemy.exc.IntegrityError)) is POISON

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (asyncpg.InterfaceError("connection is closed"), TRANSIENT),
            (psycopg.OperationalError("connection refused"), TRANSIENT),
            (psycopg.InterfaceError("the connection is closed"), TRANSIENT),
            (psycopg2.OperationalError("server closed the connection unexpectedly"), TRANSIENT),
            (psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes"), POISON),
            (psycopg.ProgrammingError("cannot adapt type"), UNKNOWN),
        ],
    )
    def test_h87_without_a_code_the_class_counts(self, error: Exception, kind: Failure) -> None:
        assert classify(error) is classify(wrapped(error)) is kind


class TestMySQL:
    @pytest.mark.parametrize(
        ("number", "kind"),
        [
            *((number, TRANSIENT) for number in (1021, 1040, 1114, 1158, 1159, 1160, 1161, 1203, 1205, 1213, 1290)),
            *((number, TRANSIENT) for number in (1317, 1792, 1836, 2002, 2003, 2006, 2013, 2055, 3024)),
            *((number, POISON) for number in (1264, 1366, 1406, 3819, 4025)),
            *((number, UNKNOWN) for number in (1048, 1364)),
            *((number, UNKNOWN) for number in (1054, 1062, 1146, 1305, 1451, 1452, 1064)),
        ],
    )
    def test_h87_every_driver_gives_the_same(self, number: int, kind: Failure) -> None:
        for error in (
            pymysql.err.OperationalError(number, "it said so"),
            asyncmy.errors.OperationalError(number, "it said so"),
            named_mysql_connector(number),
        ):
            assert classify(error) is classify(wrapped(error)) is kind

    @pytest.mark.parametrize(
        "error", [pymysql.err.InterfaceError(0, ""), asyncmy.errors.InterfaceError("(0, 'Not connected')")]
    )
    def test_h87_a_closed_connection_has_no_number(self, error: Exception) -> None:
        assert classify(error) is classify(wrapped(error)) is TRANSIENT


def named_mysql_connector(number: int) -> Exception:
    """It has the number as an attribute, and an SQLSTATE, which says less."""

    class DatabaseError(Exception):
        errno = number
        sqlstate = "HY000"

    DatabaseError.__module__ = "mysql.connector.errors"
    return DatabaseError("it said so")


class TestSQLite:
    @pytest.mark.parametrize("with_name", [True, False])
    @pytest.mark.parametrize(
        ("kind_of", "text", "name", "kind"),
        [
            (sqlite3.OperationalError, "database is locked", "SQLITE_BUSY_SNAPSHOT", TRANSIENT),
            (sqlite3.OperationalError, "database table is locked: orders", "SQLITE_LOCKED", TRANSIENT),
            (sqlite3.OperationalError, "database or disk is full", "SQLITE_FULL", TRANSIENT),
            (sqlite3.OperationalError, "disk I/O error", "SQLITE_IOERR_WRITE", TRANSIENT),
            (sqlite3.OperationalError, "unable to open database file", "SQLITE_CANTOPEN", TRANSIENT),
            (sqlite3.IntegrityError, "NOT NULL constraint failed: o.a", "SQLITE_CONSTRAINT_NOTNULL", UNKNOWN),
            (sqlite3.IntegrityError, "CHECK constraint failed: positive", "SQLITE_CONSTRAINT_CHECK", POISON),
            (sqlite3.IntegrityError, "UNIQUE constraint failed: o.a", "SQLITE_CONSTRAINT_UNIQUE", UNKNOWN),
            (sqlite3.IntegrityError, "FOREIGN KEY constraint failed", "SQLITE_CONSTRAINT_FOREIGNKEY", UNKNOWN),
            (sqlite3.OperationalError, "no such table: orders", "SQLITE_ERROR", UNKNOWN),
        ],
    )
    def test_h87_by_name_else_by_text(
        self, kind_of: type[sqlite3.Error], text: str, name: str, kind: Failure, with_name: bool
    ) -> None:
        error = sqlite_error(kind_of, text, name if with_name else None)
        assert classify(error) is classify(wrapped(error)) is kind

    def test_h87_it_has_no_wire(self) -> None:
        error = sqlite3.InterfaceError("Error binding parameter 0: type is not supported")
        assert classify(wrapped(error, sqlalchemy.exc.InterfaceError)) is UNKNOWN


class TestSQLAlchemy:
    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (sqlalchemy.exc.TimeoutError("QueuePool limit"), TRANSIENT),
            (StaleDataError("0 rows were matched"), TRANSIENT),
            (wrapped(Exception("no code"), gone=True), TRANSIENT),
            (wrapped(Exception("no code"), sqlalchemy.exc.InterfaceError), TRANSIENT),
            (wrapped(Exception("no code"), sqlalchemy.exc.DataError), POISON),
            (wrapped(Exception("no code"), sqlalchemy.exc.OperationalError), UNKNOWN),
            (sqlalchemy.exc.NoResultFound("none"), UNKNOWN),
        ],
    )
    def test_h87_what_it_says_itself(self, error: Exception, kind: Failure) -> None:
        assert classify(error) is kind

    def test_h87_a_code_goes_before_the_state_of_the_connection(self) -> None:
        """A box gives up the connection at 1305, which may also be a function that does not exist."""
        assert classify(wrapped(pymysql.err.OperationalError(1305, "no such function"), gone=True)) is UNKNOWN

    def test_h87_a_session_that_failed_before_is_told_by_what_it_failed_of(self) -> None:
        gone = sqlalchemy.exc.PendingRollbackError(
            "Can't reconnect until invalid transaction is rolled back.", code="8s2b"
        )
        assert classify(gone) is TRANSIENT
        for orig, kind in ((psycopg.errors.DeadlockDetected(), TRANSIENT), (psycopg.errors.CheckViolation(), POISON)):
            with pytest.raises(sqlalchemy.exc.PendingRollbackError) as caught:
                try:
                    raise wrapped(orig)
                except DBAPIError:
                    raise sqlalchemy.exc.PendingRollbackError("rolled back before", code="7s2a")  # noqa: B904  as it does
            assert classify(caught.value) is kind
        assert classify(sqlalchemy.exc.PendingRollbackError("rolled back before", code="7s2a")) is UNKNOWN


class TestOtherServers:
    @pytest.mark.parametrize(
        "error",
        [
            httpx.ConnectError("refused"),
            httpx.ReadTimeout("slow"),
            redis.exceptions.ConnectionError("refused"),
            redis.exceptions.TimeoutError("slow"),
            redis.exceptions.BusyLoadingError("loading"),
            named("aiohttp.client_exceptions", "ClientConnectionError"),
            named("botocore.exceptions", "EndpointConnectionError"),
            named("requests.exceptions", "ConnectionError", OSError),
            of_grpc("UNAVAILABLE"),
            of_grpc("DEADLINE_EXCEEDED"),
        ],
    )
    def test_h87_out_of_reach(self, error: BaseException) -> None:
        assert classify(error) is TRANSIENT

    @pytest.mark.parametrize(
        "error",
        [
            httpx.InvalidURL("no"),
            redis.exceptions.ResponseError("WRONGTYPE"),
            of_grpc("INVALID_ARGUMENT"),
            named("elsewhere", "ConnectionError"),
        ],
    )
    def test_h87_an_answer_is_not_an_outage(self, error: BaseException) -> None:
        assert classify(error) is UNKNOWN


class TestCausesAndGroups:
    @pytest.mark.parametrize("error", [ValueError("no"), KeyError("no"), asyncio.CancelledError(), AssertionError()])
    def test_h87_what_is_in_no_table_is_unknown(self, error: BaseException) -> None:
        assert classify(error) is UNKNOWN

    def test_h87_an_exception_that_says_nothing_is_what_caused_it(self) -> None:
        error = RuntimeError("could not charge")
        error.__cause__ = ValueError("no answer")
        error.__cause__.__cause__ = ConnectionResetError()
        assert classify(error) is TRANSIENT

    def test_h87_one_that_says_something_stays_what_it_is(self) -> None:
        error = Reject("no credit")
        error.__cause__ = ConnectionResetError()
        assert classify(error) is BUSINESS

    def test_h87_what_happened_before_is_no_cause(self) -> None:
        error = RuntimeError("while handling it, something else")
        error.__context__ = ConnectionResetError()
        assert classify(error) is UNKNOWN

    def test_h87_endless_causes_are_not_followed_for_ever(self) -> None:
        first, second = RuntimeError("a"), RuntimeError("b")
        first.__cause__, second.__cause__ = second, first
        assert classify(first) is UNKNOWN
        chain: BaseException = ConnectionResetError()
        for _ in range(MAX_DEPTH):
            chain, chain.__cause__ = RuntimeError("around it"), chain
        assert classify(chain) is UNKNOWN

    def test_h87_a_group_is_what_all_its_members_are(self) -> None:
        lost, slow, no = ConnectionResetError(), TimeoutError(), Reject("no")
        assert classify(ExceptionGroup("all", [lost, ExceptionGroup("inside", [slow])])) is TRANSIENT
        assert classify(ExceptionGroup("all", [no, no])) is BUSINESS
        assert classify(ExceptionGroup("mixed", [lost, no])) is UNKNOWN
        assert classify(ExceptionGroup("mixed", [lost, ValueError()])) is UNKNOWN


@pytest.mark.parametrize("name", [name for name in CLASSES if find_spec(name.partition(".")[0])])
def test_h87_every_name_in_the_table_is_that_of_an_exception(name: str) -> None:
    """A class that moved, or a slip of the pen, would be an entry that never counts."""
    module, _, last = name.rpartition(".")
    found = getattr(importlib.import_module(module), last)
    assert issubclass(found, BaseException)
    assert f"{found.__module__}.{found.__qualname__}" == name
