"""COMMIT: the one moment when nobody but the database knows what happened.

Three things are put right for every engine that a box works with. A cancelled task does not tear a COMMIT apart: the
answer is waited for, and the cancellation arrives after it. An error that is not an answer of the server becomes
`CommitOutcomeUnknown`, so that nobody takes a lost answer for a failure and does the work twice. And a transaction that
PostgreSQL has given up, because a statement failed and somebody caught that, does not end with a COMMIT that undoes it
without a word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary, ref

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.util import await_only, greenlet_spawn

from .errors import CommitOutcomeUnknown, SessionError

GUARDED = "pillarbox_guards_commits"
"""The mark of a dialect whose COMMIT is guarded."""

ANSWER_SECONDS = 10.0
"""How long a task that was cancelled waits for the answer to its COMMIT. What takes longer will not come."""

Written = Sequence[tuple[UUID, int, int]]

# Answers by which a PostgreSQL server says that it, or the connection, is going away: it may have committed before.
_POSTGRES_GOODBYES = frozenset({"57P01", "57P02", "57P03", "57P05"})
# The same for MySQL and MariaDB: shutdown, interrupted, killed. Errors of the client library are 2000 to 2999.
_MYSQL_GOODBYES = frozenset({1053, 1077, 1078, 1079, 1317, 1927, 4031})


class OpenTransaction:
    """A transaction that has written to the outbox and has not ended."""

    __slots__ = ("connection", "held_back", "unknown", "written")

    def __init__(self, connection: object, written: Callable[[], Written]) -> None:
        self.connection = ref(connection)
        self.written = written
        self.held_back: asyncio.Task[object] | None = None
        """A task that was cancelled while COMMIT was on its way."""
        self.unknown = False
        """Whether COMMIT was not answered."""


_open: WeakKeyDictionary[object, OpenTransaction] = WeakKeyDictionary()
"""By the connection that will send COMMIT. A session whose ROLLBACK fails never says that its transaction has ended:
then that is forgotten with the connection.
"""
_doubtful: set[int] = set()
"""Connections to PostgreSQL on which a statement has failed, by their identity. Unless a savepoint was rolled back
since, COMMIT would undo everything, and be answered as if all were well. One too many costs a question.
"""


def remember(connection: object, written: Callable[[], Written]) -> OpenTransaction:
    """The transaction on this connection writes outbox rows; what comes back is for `forget`."""
    _open[connection] = transaction = OpenTransaction(connection, written)
    return transaction


def forget(transaction: OpenTransaction) -> bool:
    """It has ended and its connection is back: a cancellation that was held back may come now. Whether its outcome is
    unknown comes back.
    """
    connection = transaction.connection()
    if connection is not None:
        _open.pop(connection, None)
    if transaction.held_back is not None:
        transaction.held_back.cancel()
    return transaction.unknown


def guard_commits(engine: Engine) -> None:
    """Make COMMIT on this engine uninterruptible, and its lost answers visible. Calling it twice is fine."""
    dialect: Any = engine.dialect
    if GUARDED in dialect.__dict__:
        return

    def plain_commit(dbapi_connection: Any, send: Callable[[Any], None] = dialect.do_commit) -> None:
        if id(dbapi_connection) in _doubtful:
            _doubtful.discard(id(dbapi_connection))
            _ask(dbapi_connection)
        if dialect.driver == "asyncpg" and (adapter := dbapi_connection.dbapi_connection)._transaction is not None:
            adapter._transaction = _Transaction(adapter._transaction, dbapi_connection)
        send(dbapi_connection)

    def do_commit(dbapi_connection: Any) -> None:
        if dialect.driver == "asyncpg" and _was_ended_inside(dbapi_connection.dbapi_connection):
            dbapi_connection.rollback()
            raise SessionError(
                "the transaction was ended inside, by a COMMIT or ROLLBACK that was executed as a statement: what came "
                "before it is committed or undone already, and what came after it was committed statement by statement"
            )
        try:
            if dialect.is_async and dialect.driver != "asyncpg":
                await_only(_to_the_end(_apart(plain_commit, dbapi_connection), dbapi_connection))
            else:
                plain_commit(dbapi_connection)
        except Exception as error:
            if was_answered(dialect.name, error):
                raise
            transaction = _open.get(dbapi_connection)
            if transaction is not None:
                transaction.unknown = True
            raise CommitOutcomeUnknown(transaction.written() if transaction else ()) from error

    dialect.do_commit = do_commit
    setattr(dialect, GUARDED, True)
    event.listen(engine, "handle_error", _throw_away)
    if dialect.name == "postgresql":
        event.listen(engine, "handle_error", _doubt)
        # Not by an event of the connection: one listener for those makes SQLAlchemy look for them at every statement.
        dialect.do_rollback = _trusting(dialect.do_rollback)


def doubt(connection: Connection) -> None:
    """A statement has failed on this connection: PostgreSQL may have given up the transaction."""
    if connection.dialect.name == "postgresql" and not (connection.closed or connection.invalidated):
        _doubtful.add(id(connection.connection))


def _doubt(context: ExceptionContext) -> None:
    if context.connection is not None and not context.is_disconnect:
        doubt(context.connection)


def _trusting(rollback: Callable[[Any], None]) -> Callable[[Any], None]:
    def do_rollback(dbapi_connection: Any) -> None:
        rollback(dbapi_connection)
        _doubtful.discard(id(dbapi_connection))

    return do_rollback


def _ask(dbapi_connection: Any) -> None:
    """Fail, if the transaction has, which is over then: after a COMMIT that failed, nobody rolls back."""
    cursor = dbapi_connection.cursor()
    try:
        cursor.execute("SELECT 1")
    except Exception:
        dbapi_connection.rollback()
        raise
    finally:
        cursor.close()


def _was_ended_inside(adapter: Any) -> bool:
    """Whether the server knows of no transaction, though SQLAlchemy has begun one."""
    connection = adapter._connection
    # A closed one cannot be asked, and COMMIT says so itself.
    return adapter._transaction is not None and not connection.is_closed() and not connection.is_in_transaction()


def _throw_away(context: ExceptionContext) -> None:
    """Connections that nobody may use again: one that lost its COMMIT, and one whose transaction MySQL has ended.

    After a deadlock InnoDB undoes the whole transaction, also from inside a savepoint; what comes next would begin a
    new one, and commit without what was before.
    """
    error = context.original_exception
    ended = context.dialect.name in ("mysql", "mariadb") and error.args[:1] in ((1213,), (1305,))
    if ended or isinstance(error, CommitOutcomeUnknown):
        context.is_disconnect = True


def was_answered(dialect_name: str, error: BaseException) -> bool:
    """Whether the server itself said that the COMMIT failed. Anything else (cut, closed, timed out) is no answer."""
    if dialect_name == "sqlite":
        return True  # there is no wire between us and the file
    if dialect_name == "postgresql":
        state = _first(error, "sqlstate", "pgcode")
        return isinstance(state, str) and not state.startswith("08") and state not in _POSTGRES_GOODBYES
    if dialect_name in ("mysql", "mariadb"):
        number = error.args[0] if error.args else None
        return (
            isinstance(number, int) and number >= 1000 and not 2000 <= number < 3000 and number not in _MYSQL_GOODBYES
        )
    return False


def _first(error: BaseException, *names: str) -> object:
    """An attribute of the error, or of the driver's own error that it was raised from."""
    for holder in (error, error.__cause__, getattr(error, "orig", None)):
        for name in names:
            if value := getattr(holder, name, None):
                return value
    return None


class _Transaction:
    """A transaction of asyncpg whose COMMIT runs to its end. It needs no task for that, and no greenlet."""

    def __init__(self, plain: Any, connection: object) -> None:
        self._plain = plain
        self._connection = connection
        self.rollback = plain.rollback

    def commit(self) -> Coroutine[Any, Any, None]:
        return _to_the_end(self._plain.commit(), self._connection)


async def _apart(commit: Callable[[Any], None], dbapi_connection: Any) -> None:
    """Run COMMIT in a task of its own: drivers that limit their time by `asyncio.timeout` cancel the task they run in,
    which must not be one that holds cancellations back.
    """
    await asyncio.ensure_future(greenlet_spawn(commit, dbapi_connection))


async def _to_the_end(sending: Coroutine[Any, Any, None], connection: object) -> None:
    """Run COMMIT until it is answered. A first cancellation waits for the answer; a second one gives up."""
    held, raised = _Held(sending), False
    try:
        await held
    except asyncio.CancelledError:
        raised = True  # it was given up
        raise
    finally:
        if held.cancelled and not raised and (task := asyncio.current_task()) is not None:
            task.uncancel()
            _hold_back(task, connection)


class _Held:
    """Awaits work to its end although the task is cancelled. A task and a shield would do so too, for far more.

    A task that is cancelled cancels the future that it waits for. Here it waits for this object, which leaves the
    future of the work alone: then the task keeps the cancellation until that future is done, and raises it here.
    """

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = work
        self._future: Any = None
        self._limit: asyncio.TimerHandle | None = None
        self.cancelled = False

    def __await__(self) -> Generator[Any, None, None]:
        try:
            while True:
                self._future = future = self._work.send(None)
                # What a task asks of a future, beside to be cancelled.
                self._asyncio_future_blocking = True
                self.get_loop, self.add_done_callback = future.get_loop, future.add_done_callback
                try:
                    yield self
                except (asyncio.CancelledError, Exception):  # noqa: S112  the work gets the future's own from that
                    continue
        except StopIteration:
            pass
        finally:
            self._work.close()
            if self._limit is not None:
                self._limit.cancel()

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002  a future has it
        """Called by the task, which keeps the cancellation to itself, because this one is not cancelled."""
        if not self.cancelled:
            self.cancelled = True
            self._limit = self._future.get_loop().call_later(ANSWER_SECONDS, self._give_up)
        else:
            self._give_up()
        return False

    def _give_up(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = self._future.get_loop().call_later(1.0, self._give_up)  # to close the connection may hang, too
        self._future.cancel()


def _hold_back(task: asyncio.Task[object], connection: object) -> None:
    """Ask again for the cancellation, when the session knows what it has done and has cleaned up."""
    transaction = _open.get(connection)
    if transaction is not None:
        transaction.held_back = task
    else:
        task.cancel()
