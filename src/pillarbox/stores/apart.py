"""Work in a transaction of its own while another one is open, on a connection that no pool has to spare.

The open transaction waits for it, so this one must never wait for that one: a database that has one writer at a time,
or one connection, is refused, and every wait has an end. A pooler in front of the server, or a limit there, may grant
no second connection as long as the first one is in use: then time runs out, and the caller does without.
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
# A connection that is lost without a word leaves its transaction behind, with locks, until the server gives it up.
_LIMITS = {
    "postgresql": f"SELECT set_config('lock_timeout', '{_MILLISECONDS}', true), "
    f"set_config('idle_in_transaction_session_timeout', '{_MILLISECONDS}', true)",
    "mysql": f"SET SESSION innodb_lock_wait_timeout = {round(SECONDS)}",
    "mariadb": f"SET SESSION innodb_lock_wait_timeout = {round(SECONDS)}, idle_transaction_timeout = {round(SECONDS)}",
}


class Apart:
    """Runs such work, one at a time in this process: many that begin at once need the same."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._left: set[asyncio.Task[None]] = set()
        self._failed: WeakKeyDictionary[Dialect, float] = WeakKeyDictionary()

    def run(self, engine: Engine, work: Callable[[Engine], None]) -> bool:
        """Do the work, in a `transaction` of this engine; whether that was possible comes back. May be called in a
        greenlet of an async session, and in any thread.
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
        except Exception as error:  # whatever it is: the caller does the work itself, and finds out
            self._failed[engine.dialect] = now
            said = described(error)
            logger.warning("registering routes in the business transaction, as none apart from it succeeded: %s", said)
            return False
        return True

    async def _run(self, engine: Engine, work: Callable[[Engine], None]) -> None:
        """In a task that is left behind if its time is over: a driver may take long to give up a connection."""
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
            task.exception()  # it may be that nobody waits for it any more

    async def _take_turn(self, engine: Engine, work: Callable[[Engine], None]) -> None:
        async with self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            await greenlet_spawn(work, engine)

    def _run_in_thread(self, engine: Engine, work: Callable[[Engine], None]) -> None:
        """A driver that blocks can be waited for, and be left, only from another thread."""
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
    """A transaction on a connection that ends with it."""
    own = own_pool(engine)
    try:
        with own.execution_options(isolation_level="READ COMMITTED").begin() as connection:
            is_mariadb = getattr(engine.dialect, "is_mariadb", False)
            connection.exec_driver_sql(_LIMITS["mariadb" if is_mariadb else engine.dialect.name])
            yield connection
    finally:
        own.dispose()
