"""Separate transactions: runs work in another transaction while one is open, on a connection outside the pool.

The open transaction waits for the separate one, so that one must never wait for the open one: databases with a single
writer or a single connection are refused, and every wait is limited. A pooler or a connection limit of the server may
grant no second connection while the first is in use. Then the time runs out, and the caller continues without it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Dialect, Engine, StaticPool
from sqlalchemy.util import await_only, greenlet_spawn

from .. import clock
from ..redaction import described
from .pool import own_pool

logger = logging.getLogger("pillarbox")

SECONDS = 3.0
"""How long the open transaction waits."""
AGAIN_SECONDS = 60.0
"""How long after a failure nothing is tried on the same database."""

_MILLISECONDS = round(SECONDS * 1000)
# A lost connection leaves its transaction and its locks behind until the server ends them.
_LIMITS = {
    "postgresql": f"SELECT set_config('lock_timeout', '{_MILLISECONDS}', true), "
    f"set_config('idle_in_transaction_session_timeout', '{_MILLISECONDS}', true)",
    "mysql": f"SET SESSION innodb_lock_wait_timeout = {round(SECONDS)}",
    "mariadb": f"SET SESSION innodb_lock_wait_timeout = {round(SECONDS)}, idle_transaction_timeout = {round(SECONDS)}",
}


class Apart:
    """Runs separate transactions, one at a time in this process: callers that start together need the same work."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._left: set[asyncio.Task[None]] = set()
        self._failed: WeakKeyDictionary[Dialect, float] = WeakKeyDictionary()

    def run(self, engine: Engine, work: Callable[[Engine], None]) -> bool:
        """Do the work in a `transaction` of this engine. Returns whether that was possible. May be called in a greenlet
        of an async session, and in any thread.
        """
        now = clock.current().monotonic()
        if engine.dialect.name not in _LIMITS or isinstance(engine.pool, StaticPool):
            return False
        if now - self._failed.get(engine.dialect, float("-inf")) < AGAIN_SECONDS:
            return False
        try:
            if engine.dialect.is_async:
                await_only(self._run(engine, work))
            else:
                self._run_in_thread(engine, work)
        except Exception as error:  # any failure: the caller then does the work itself and gets the error
            self._failed[engine.dialect] = now
            said = described(error)
            logger.warning("registering routes in the business transaction, as none apart from it succeeded: %s", said)
            return False
        return True

    async def _run(self, engine: Engine, work: Callable[[Engine], None]) -> None:
        """Run the work in a task that is abandoned after its time: a driver may take long to close a connection."""
        task = asyncio.ensure_future(self._take_turn(engine, work))
        self._left.add(task)
        task.add_done_callback(self._end)
        try:
            done, _ = await asyncio.wait([task], timeout=SECONDS)
        finally:
            task.cancel()
        if not done:
            raise TimeoutError(f"it took longer than {SECONDS:g} s")
        task.result()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # mark the error as retrieved: there may be no waiter

    async def _take_turn(self, engine: Engine, work: Callable[[Engine], None]) -> None:
        async with self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            await greenlet_spawn(work, engine)

    def _run_in_thread(self, engine: Engine, work: Callable[[Engine], None]) -> None:
        """Wait for a blocking driver in another thread, so that the wait can be abandoned."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                with self._turn:
                    work(engine)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=run, name="pillarbox: apart", daemon=True).start()
        done.result(SECONDS)


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """A transaction on a connection that is closed afterwards."""
    own = own_pool(engine)
    try:
        with own.execution_options(isolation_level="READ COMMITTED").begin() as connection:
            is_mariadb = getattr(engine.dialect, "is_mariadb", False)
            connection.exec_driver_sql(_LIMITS["mariadb" if is_mariadb else engine.dialect.name])
            yield connection
    finally:
        own.dispose()
