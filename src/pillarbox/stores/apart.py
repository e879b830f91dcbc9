"""A transaction of our own beside one that is open, on a connection that no pool has to spare.

The open transaction waits for it, so ours must never wait for that one: a database that has one writer at a time, or
one connection, is refused, and every wait has an end. A pooler in front of the server, or a limit there, may keep us
from a second connection for as long as the first one is in use: then time runs out, and the caller does without.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, StaticPool
from sqlalchemy.util import await_only, greenlet_spawn

from .pool import own_pool

SECONDS = 3.0
"""How long the open transaction waits."""

_LOCK_TIMEOUTS = {
    "postgresql": f"SET LOCAL lock_timeout = {round(SECONDS * 1000)}",
    "mysql": f"SET SESSION innodb_lock_wait_timeout = {round(SECONDS)}",
    "mariadb": f"SET SESSION innodb_lock_wait_timeout = {round(SECONDS)}",
}


class Apart:
    """Runs such transactions, one at a time in this process: many that begin at once need the same."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    def run(self, engine: Engine, work: Callable[[Connection], object]) -> bool:
        """Do the work and commit it; whether that was possible comes back. May be called in a greenlet of an async
        session, and in any thread.
        """
        if engine.dialect.name not in _LOCK_TIMEOUTS or isinstance(engine.pool, StaticPool):
            return False
        with suppress(Exception):  # whatever it is: the caller does the work itself, and finds out
            if engine.dialect.is_async:
                await_only(self._run(engine, work))
            else:
                self._run_in_thread(engine, work)
            return True
        return False

    async def _run(self, engine: Engine, work: Callable[[Connection], object]) -> None:
        turn = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with asyncio.timeout(SECONDS), turn:
            await greenlet_spawn(_transact, engine, work)

    def _run_in_thread(self, engine: Engine, work: Callable[[Connection], object]) -> None:
        """A driver that blocks can be waited for, and be left, only from another thread."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                with self._turn:
                    _transact(engine, work)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=run, name="pillarbox: apart", daemon=True).start()
        done.result(SECONDS)


def _transact(engine: Engine, work: Callable[[Connection], object]) -> None:
    own = own_pool(engine)
    try:
        with own.execution_options(isolation_level="READ COMMITTED").begin() as connection:
            connection.exec_driver_sql(_LOCK_TIMEOUTS[engine.dialect.name])
            work(connection)
    finally:
        own.dispose()
