"""Turns: a few connections that are shared by frequent statements and kept between them.

Taking a connection from the pool and returning it costs as much as a simple statement, and more with a ping. So a
connection passes from one call to the next while others wait. While a relay is busy, it keeps one or two of them for a
moment, if the pool is large enough.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, NullPool, Pool, QueuePool, StaticPool
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from .. import clock
from .append import explain, explained
from .statement import DirectStatement, takes_at_once

_T = TypeVar("_T")

AT_A_TIME = 4
"""Number of concurrent statements and transactions of one store."""

HUNG_SECONDS = 10.0
"""Time after which a statement counts as hung."""

_KEPT = 2
_KEPT_SECONDS = 1.0
"""A connection that was idle this long returns to the pool, which checks whether it is still valid."""


_PLANS_SECONDS = 5.0
"""How long PostgreSQL may use a cached plan. The right plan for a table of one page is wrong when an old snapshot has
kept thousands of dead rows in it, and would be kept until the next vacuum.
"""
_PLANNED = "pillarbox_planned"


def only_turn(engine: AsyncEngine) -> asyncio.Semaphore | None:
    """The only turn on an in-memory SQLite, which has one connection; None elsewhere."""
    pool = engine.sync_engine.pool
    return _only.setdefault(pool, asyncio.Semaphore(1)) if isinstance(pool, StaticPool) else None


_only: WeakKeyDictionary[Pool, asyncio.Semaphore] = WeakKeyDictionary()


class Turns:
    """Assigns turns and connections."""

    def __init__(self, engine: AsyncEngine) -> None:
        # With repeatable reads, a relay would see the state of its first statement.
        level = (
            {"isolation_level": "READ COMMITTED"} if engine.dialect.name in ("mysql", "mariadb", "postgresql") else {}
        )
        self._engine = engine.execution_options(**level)
        # Autocommit saves two round trips per read, and on SQLite the lock that blocks writers.
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        # More would not be faster. Leases have a turn of their own, so that they do not wait behind the lanes.
        only = only_turn(engine)
        self._turns = only or asyncio.Semaphore(AT_A_TIME)
        self._lease_turns = only or asyncio.Semaphore(1)
        self._spare: deque[tuple[Connection, float]] = deque()
        self._waiting = 0
        self._kept = 0

    async def autocommit(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run ``work`` on a connection in autocommit mode."""
        self._waiting += 1
        try:
            return await self._run(self._turns, self._connected, work, *arguments)
        finally:
            self._waiting -= 1
            if self._is_too_much(self._waiting):  # the caller that should get the connection was cancelled
                await greenlet_spawn(self._close_surplus, self._waiting)

    async def fetch(self, statement: DirectStatement, parameters: Mapping[str, Any]) -> Sequence[Any]:
        """Run one statement in autocommit mode, directly on a kept connection of asyncpg if there is one."""
        connection = self._at_hand()
        if connection is None:
            return await self.autocommit(statement.fetch, parameters)
        self._waiting += 1
        try:
            async with self._turns:
                rows = await statement.fetch_at_once(connection, parameters, HUNG_SECONDS)
            self._spare.append((connection, clock.current().monotonic()))
        except DBAPIError as error:
            explain(error)
            raise
        finally:
            self._waiting -= 1
            if self._is_too_much(self._waiting):
                await greenlet_spawn(self._close_surplus, self._waiting)
        return rows

    async def transaction(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run ``work`` in a transaction."""
        return await self._run(self._turns, self._begun, work, *arguments)

    async def ask_apart(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Read without waiting behind the lanes."""
        return await self._run(self._lease_turns, self._reader.sync_engine.connect, work, *arguments)

    async def change_apart(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run a transaction without waiting behind the lanes."""
        return await self._run(self._lease_turns, self._engine.sync_engine.begin, work, *arguments)

    def keep(self) -> None:
        """Keep connections between calls, until `let_go`."""
        self._kept = _kept(self._reader.sync_engine.pool)

    async def let_go(self) -> None:
        """Return all connections."""
        self._kept = 0
        await greenlet_spawn(self._close_surplus, self._waiting)

    async def _run(
        self,
        turns: asyncio.Semaphore,
        connect: Callable[[], AbstractContextManager[Connection]],
        work: Callable[..., _T],
        *arguments: Any,
    ) -> _T:
        def connected() -> _T:
            with connect() as connection:
                return work(connection, *arguments)

        # A connection may hang without an error, when a packet filter drops it: then a new one is needed. One greenlet
        # does all steps: one each for connecting, working and closing would take as long as a simple statement.
        with explained():
            async with turns, asyncio.timeout(HUNG_SECONDS):
                found = await greenlet_spawn(connected)
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    await asyncio.sleep(0)  # if the time limit ended during COMMIT, raise it here, not later
                return found

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        now = clock.current().monotonic()
        while self._spare and now - self._spare[-1][1] > _KEPT_SECONDS:
            self._spare.pop()[0].close()
        connection = self._spare.pop()[0] if self._spare else self._reader.sync_engine.connect()
        try:
            if not self._is_well_planned(connection, now):
                connection.exec_driver_sql("DISCARD PLANS")
                connection.info[_PLANNED] = now
            yield connection
        except BaseException:
            connection.close()
            raise
        if connection.invalidated:
            connection.close()
        else:
            self._spare.append((connection, clock.current().monotonic()))
        self._close_surplus(self._waiting - 1)  # this call is still counted

    @contextmanager
    def _begun(self) -> Iterator[Connection]:
        while len(self._spare) > self._kept:  # a small pool may have no other connection left
            self._spare.popleft()[0].close()
        with self._engine.sync_engine.begin() as connection:
            yield connection

    def _at_hand(self) -> Connection | None:
        """A kept connection that is ready to be used."""
        if not self._spare or self._turns.locked():
            return None
        (connection, since), now = self._spare[-1], clock.current().monotonic()
        if now - since > _KEPT_SECONDS or not self._is_well_planned(connection, now) or not takes_at_once(connection):
            return None
        self._spare.pop()
        return connection

    def _is_well_planned(self, connection: Connection, now: float) -> bool:
        if connection.dialect.name != "postgresql":
            return True
        planned: float = connection.info.get(_PLANNED, -_PLANS_SECONDS)
        return now - planned < _PLANS_SECONDS

    def _is_too_much(self, waiting: int) -> bool:
        """Whether the connection that was idle longest is neither wanted by a waiting call nor worth keeping."""
        spare = len(self._spare)
        if spare <= waiting:
            return False
        return spare > self._kept or clock.current().monotonic() - self._spare[0][1] > _KEPT_SECONDS

    def _close_surplus(self, waiting: int) -> None:
        while self._is_too_much(waiting):
            self._spare.popleft()[0].close()


def _kept(pool: Pool) -> int:
    """Number of connections to keep without starving other users of the pool."""
    if isinstance(pool, NullPool):
        return _KEPT
    if not isinstance(pool, QueuePool):
        return 0
    if pool._max_overflow < 0:
        return _KEPT
    return max(0, min(_KEPT, pool.size() + pool._max_overflow - AT_A_TIME - 1))  # one is for the leases
