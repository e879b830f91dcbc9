"""The unit of work: one business transaction, with the events that it raises.

    async with box.unit_of_work(tenant="acme") as uow:
        uow.add(order)

Leaving the block commits; an exception rolls back, state and events together. A unit of work inside another one, in the
same task, is a savepoint of it: its failure undoes only its own part, and no second connection is needed.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self
from uuid import UUID
from weakref import WeakKeyDictionary

from sqlalchemy.exc import IllegalStateChangeError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session
from sqlalchemy.util import greenlet_spawn

from . import telemetry
from .aggregate import Aggregate
from .errors import SessionError, SessionSharedError
from .session import KEPT_OPEN, SEALED, bound_session
from .tenancy import Tenancy

logger = logging.getLogger("pillarbox")

CLEANUP_SECONDS = 10.0


class EventPublisher(Protocol):
    """All that application code needs to know in order to publish an event without an aggregate."""

    def publish(self, event: object, *, key: str | UUID, tenant: str | None = None, ordered: bool = False) -> None:
        """Record the event; it leaves if and only if the surrounding transaction commits.

        ``key`` is the unit of order. Concurrent transactions that publish under one key have no order between them
        unless they ask for it by ``ordered=True``, which makes them wait for each other.
        """
        ...


class SessionPublisher:
    """`EventPublisher` for a session of one's own."""

    def __init__(self, session: Session | AsyncSession) -> None:
        self._collector = bound_session(session).collector

    def publish(self, event: object, *, key: str | UUID, tenant: str | None = None, ordered: bool = False) -> None:
        self._collector.publish(event, key, tenant, ordered=ordered)


class UnitOfWork:
    """A session and its transaction. Made by ``box.unit_of_work()``."""

    def __init__(
        self,
        sessions: async_sessionmaker[AsyncSession],
        tenancy: Tenancy,
        *,
        tenant: str | None,
        timeout: float | None,
        watchdog: Watchdog | None,
        new_transaction: bool,
    ) -> None:
        self._sessions = sessions
        self._tenancy = tenancy
        self._tenant = tenant
        self._timeout = asyncio.timeout(timeout) if timeout is not None else None
        self._watchdog = watchdog
        self._unwatch: Callable[[], object] | None = None
        self._new_transaction = new_transaction
        self._outer: UnitOfWork | None = None
        self._savepoint: Any = None
        self._session: AsyncSession | None = None
        self._open = False
        self._inner = 0
        self._around: tuple[UnitOfWork, asyncio.Task[Any] | None] | None = None

    @property
    def session(self) -> AsyncSession:
        """The session, from entering the block to leaving it."""
        if self._session is None or not self._open:
            raise SessionError("this unit of work is not open: work inside its `async with` block")
        return self._session

    @property
    def committed(self) -> bool:
        """Whether the newest transaction has committed. Right also for a task that was cancelled meanwhile."""
        return self._session is not None and bound_session(self._session).collector.committed

    # -- what people do with it ----------------------------------------------------------------------------------------

    def add(self, *objects: object) -> None:
        """Add objects to the session. A plain aggregate, which no table knows, is asked for its events only."""
        for item in objects:
            if isinstance(item, Aggregate) and not hasattr(type(item), "__mapper__"):
                bound_session(self.session).collector.attach(item, new=True)
            else:
                self.session.sync_session.add(item)

    def publish(self, event: object, *, key: str | UUID, tenant: str | None = None, ordered: bool = False) -> None:
        """See `EventPublisher.publish`."""
        bound_session(self.session.sync_session).collector.publish(event, key, tenant, ordered=ordered)

    async def flush(self) -> None:
        """Write what has changed and what was raised, without committing."""
        await self.session.flush()

    async def commit(self) -> None:
        """Commit what was done so far; the unit of work goes on with a new transaction. Inside another one: release the
        savepoint.
        """
        self._check_no_inner()
        if self._outer is None:
            await self.session.commit()
        else:
            await self._savepoint.commit()
            self._savepoint = await self.session.begin_nested()

    async def rollback(self) -> None:
        """Undo what was done since the last commit; the unit of work goes on with a new transaction."""
        self._check_no_inner()
        if self._outer is None:
            await self.session.rollback()
        else:
            await self._savepoint.rollback()
            self._savepoint = await self.session.begin_nested()

    def _check_no_inner(self) -> None:
        if self._inner:
            raise SessionError("a unit of work inside this one is still open: end that one first")

    @asynccontextmanager
    async def nested(self) -> AsyncIterator[Self]:
        """A savepoint: an exception in the block undoes the block, events included, and goes on."""
        async with self.session.begin_nested():
            yield self

    @contextmanager
    def sealed(self) -> Iterator[None]:
        """Whoever works in the block may not end the transaction."""
        info = self.session.info
        info[SEALED] = True
        try:
            yield
        finally:
            info[SEALED] = False

    # -- its life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        around = _current.get()
        if (
            around is not None
            and around[1] is task
            and not self._new_transaction
            and around[0]._sessions is self._sessions
        ):
            await self._join(around[0])
        else:
            self._session, self._open = self._sessions(), True
            session = self._session.sync_session
            session.info["uow"], session.info[KEPT_OPEN] = self, True
            if self._tenant is not None:
                self._tenancy.assign(session, self._tenant)
            session.begin()
            if self._watchdog is not None:
                self._unwatch = self._watchdog.watch(self, task, self._tenant)
        if self._timeout is not None:
            await self._timeout.__aenter__()
        self._around = around
        _current.set((self, task))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current = _current.get()
        if current is not None and current[0] is self:  # or it was entered in another context, which has ended
            _current.set(self._around)
        try:
            if self._timeout is not None:
                await self._timeout.__aexit__(kind, error, trace)
        finally:
            try:
                await (self._leave(error) if self._outer else self._end(error))
            finally:
                self._open = False

    async def _join(self, outer: UnitOfWork) -> None:
        if self._tenant is not None and self._tenant != self._tenancy.of(outer.session.sync_session):
            raise SessionError("the unit of work around this one has another tenant: say new_transaction=True")
        self._outer = outer
        self._session, self._open = outer.session, True
        self._savepoint = await self.session.begin_nested()
        outer._inner += 1  # not before: what the savepoint flushes may fail, and then nobody leaves

    async def _leave(self, error: BaseException | None) -> None:
        if self._outer is not None:
            self._outer._inner -= 1
        if error is not None:
            await self._undo()
        elif not self._holds_savepoint():
            raise SessionError("the savepoint of this unit of work was ended inside it, by somebody else")
        else:
            try:
                await self._savepoint.commit()
            except BaseException:
                await self._undo()
                raise

    async def _undo(self) -> None:
        if self._holds_savepoint():
            await self._savepoint.rollback()

    def _holds_savepoint(self) -> bool:
        return self._savepoint.sync_transaction is self.session.sync_session.get_nested_transaction()

    async def _end(self, error: BaseException | None) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        session = self.session.sync_session
        session.info[KEPT_OPEN] = False
        try:
            if error is None:
                try:
                    await greenlet_spawn(_commit_and_close, session)
                finally:
                    if (task := asyncio.current_task()) is not None and task.cancelling():
                        await asyncio.sleep(0)  # a cancellation that COMMIT has held back is to be raised here
            else:
                await self._clean_up()
        except (asyncio.CancelledError, *_NOT_ALONE):
            await self._clean_up()
            raise
        finally:
            # They come so often that none may wait for the garbage collector: nothing of it refers to itself now.
            session.info.pop("uow", None)

    async def _clean_up(self) -> None:
        try:
            await _finish(self.session.rollback, self.session)
        finally:
            await _finish(self.session.close, self.session)


class Watchdog:
    """Tells of units of work that stay open for long. One timer of a loop serves all of its units, since most are over
    before it runs.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._watches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = WeakKeyDictionary()

    def watch(self, unit: UnitOfWork, task: asyncio.Task[Any] | None, tenant: str | None) -> Callable[[], object]:
        """It is open from now on, until the result is called."""
        loop = asyncio.get_running_loop()
        watch = self._watches.get(loop)
        if watch is None:
            watch = self._watches[loop] = _Watch(self._seconds)
        return watch.begin(loop, unit, task, tenant)


class _Watch:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._open: dict[UnitOfWork, tuple[float, asyncio.Task[Any] | None, str | None]] = {}
        """Since when, the oldest first, and in which task and for which tenant."""

    def begin(
        self,
        loop: asyncio.AbstractEventLoop,
        unit: UnitOfWork,
        task: asyncio.Task[Any] | None,
        tenant: str | None,
    ) -> Callable[[], object]:
        self._open[unit] = loop.time(), task, tenant
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look, loop)
        return partial(self._open.pop, unit, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, now = None, loop.time()
        for unit, (since, task, tenant) in [*self._open.items()]:
            if since + self._seconds > now:
                self._timer = loop.call_at(since + self._seconds, self._look, loop)
                return
            del self._open[unit]
            self._tell(task, tenant)

    def _tell(self, task: asyncio.Task[Any] | None, tenant: str | None) -> None:
        frames = [] if task is None else [(frame, frame.f_lineno) for frame in task.get_stack()]
        logger.warning(
            "a unit of work has been open for %s s; it holds locks and a connection. It is here:\n%s",
            self._seconds,
            "".join(traceback.StackSummary.extract(frames).format()),
            extra=telemetry.fields(telemetry.LOG_SLOW, tenant=tenant),
        )


def _commit_and_close(session: Session) -> None:
    try:
        session.commit()
    finally:
        session.close()


async def _finish(clean_up: Callable[[], Awaitable[None]], session: AsyncSession) -> None:
    """Clean up to the end even if we are cancelled; a connection that cannot be cleaned is thrown away, never used
    again.
    """
    cleaning = asyncio.ensure_future(_when_alone(clean_up))
    _cleaning.add(cleaning)
    cleaning.add_done_callback(_cleaning.discard)
    try:
        # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the result.
        async with asyncio.timeout(CLEANUP_SECONDS):
            await asyncio.shield(cleaning)
    except asyncio.CancelledError:
        await asyncio.wait([cleaning], timeout=CLEANUP_SECONDS)
        if not cleaning.done():
            await _throw_away(session)
        raise
    except TimeoutError:
        await _throw_away(session)


async def _throw_away(session: AsyncSession) -> None:
    with suppress(*_NOT_ALONE):  # then it is cleaned when they are gone
        await session.invalidate()


_NOT_ALONE = (IllegalStateChangeError, SessionSharedError)
"""Tasks that were started inside are still at work in the session."""
_cleaning: set[asyncio.Future[None]] = set()


async def _when_alone(clean_up: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            return await clean_up()
        except _NOT_ALONE:
            await asyncio.sleep(0.01)


_current: ContextVar[tuple[UnitOfWork, asyncio.Task[Any] | None] | None] = ContextVar(
    "pillarbox_unit_of_work", default=None
)
