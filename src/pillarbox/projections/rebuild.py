"""Rebuilds: the rows of a projection are computed again from its events, while the live projection goes on.

A rebuild makes another generation of the projection, with a temporary table and its own rows in the inbox: each event
takes effect there once. It replays the past, and then, in rounds, the events that arrived meanwhile. Finally one
transaction, the switch, blocks the live projection, applies the remaining events and replaces the rows. The next batch
of the live projection belongs to the new generation.

A rebuild reads messages as its consumer does, and calls no handler of a consumer: a projection only writes its rows. An
event that cannot be applied is left out and logged. Until the switch commits, a failure leaves the live table as it is.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy import Connection, StaticPool, exists, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from .. import clock
from ..consumers.failure import Failure, classify
from ..consumers.handling import Incoming
from ..consumers.identity import KnownBy, arrival_in, named_event
from ..consumers.reading import Reader
from ..consumers.spilling import work_of
from ..errors import ConfigurationError, EventError, StoreError
from ..inbox import Admission, Arrival, Inbox, consumer_id, digest_of
from ..redaction import redacted
from ..retry import RetryPolicy
from ..stores import claims, sqlite
from ..stores import inbox as stored
from ..stores.pool import with_own_pool
from ..stores.tables import inbox as inbox_table
from ..transport import History, Message, Rereads, Subscriber, spellings_of
from . import history
from .projection import Projection
from .shadow import Shadow, alone

logger = logging.getLogger("pillarbox")

FEW = 500
"""A round that finds no more events than this is the last one before the switch."""
CLEARED_AT_ONCE = 5_000
LEFT_OUT = -1
"""The schema version in the inbox of events that count as handled and were not applied."""
RETRY = RetryPolicy(base=0.1, cap=2.0, attempts=60)

ANY_BODY = b""
"""In place of a digest: the decision holds for every body of the event."""

Place = tuple[str | None, UUID]
"""An event in the inbox: its tenant and its id."""


class Stage(StrEnum):
    """The stages of a rebuild."""

    REPLAYING = "replaying"
    """It replays the past."""
    CATCHING_UP = "catching up"
    """It applies the events that arrived meanwhile."""
    SWITCHING = "switching"
    """The live projection waits."""
    CLEARING = "clearing"
    """The switch has committed; the rows of the old generation leave the inbox."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a rebuild."""

    stage: Stage
    events: int
    total: int | None
    """About how many events the replay covers, if that is known."""
    left_out: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The result of a rebuild."""

    projection: str
    generation: int
    events: int
    """Events that were applied."""
    left_out: int
    """Events that could not be applied, or that an operator had discarded."""
    rounds: int
    """Rounds of catching up."""
    seconds: float


Tell = Callable[[Progress], Awaitable[None] | None]
From = Literal["outbox", "broker"] | Sequence[Path]
"""Where the past is: in the outbox, at the broker, or in these archives and then in the outbox."""

_Found = TypeVar("_Found")


class _Opened(NamedTuple):
    arrival: Arrival
    """Its digest is that of the body as received, which an operator may have edited since."""
    incoming: Incoming

    @property
    def place(self) -> Place:
        return self.incoming.context.tenant, self.arrival.event_id


class _Decision(NamedTuple):
    """An operator's edit or discard of a spilled message."""

    place: Place
    """The message in the inbox."""
    body: bytes | None
    """The body to apply; None if the message was discarded."""


@dataclass(kw_only=True, eq=False)
class Rebuild:
    """One rebuild of one projection. Made by `ProjectionConsumer.rebuild`."""

    name: str
    engine: AsyncEngine
    live: Projection
    reader: Reader
    source: str
    topics: Sequence[str]
    subscriber: Subscriber | None
    inbox: Inbox
    progress: Tell | None

    def __post_init__(self) -> None:
        if isinstance(self.engine.pool, StaticPool):
            raise ConfigurationError(
                f"projection {self.name}: an in-memory SQLite has one connection, and a rebuild needs more: use a file"
            )
        self.engine = _own_engine(self.engine)
        self._shadow = Shadow(self.live.table)
        self._projection = self.live.into(self._shadow.table)
        self._connection: AsyncConnection
        self._past: History
        self._events = self._rounds = self._old = self._new = 0
        self._left_out: dict[Place, str] = {}
        """Events that cannot be applied, or that an operator has discarded, and why."""
        self._decided: dict[tuple[Place, bytes], _Decision] = {}
        """The decisions of operators about events, by the digest of the body as received."""

    async def run(self, source: From, *, incomplete: bool) -> Rebuilt:
        """Rebuild the projection from this source."""
        began = clock.current().monotonic()
        try:
            async with alone(self.engine, self.name):
                self._old = await self._apart(stored.generation_of, self.name)
                self._new = self._old + 1
                for left in (self._old - 1, self._new):  # by rebuilds that have died
                    await self._forget(left)
                try:
                    async with self.engine.connect() as self._connection:
                        await self._do(self._shadow.create)
                        self._past = await self._find_past(source)
                        async with aclosing(self._past):
                            await self._go_through()
                            await self._switch(incomplete=incomplete)
                except BaseException:
                    await self._give_up()
                    raise
                await self._tell(Stage.CLEARING)
                await self._forget(self._old)
        finally:
            await self.engine.dispose()
        seconds = clock.current().monotonic() - began
        logger.info("projection %s: generation %d has %d events", self.name, self._new, self._events)
        return Rebuilt(self.name, self._new, self._events, len(self._left_out), self._rounds, round(seconds, 3))

    async def _tell(self, stage: Stage) -> None:
        if self.progress is not None:
            total = getattr(self._past, "total", None)
            told = self.progress(Progress(stage, self._events, total, len(self._left_out), self._rounds))
            if inspect.isawaitable(told):
                await told

    async def _do(self, work: Callable[..., Any], *given: Any) -> Any:
        """Call a function on the connection of the temporary table: in a transaction, which is retried after transient
        errors, or in a savepoint of the switch.
        """
        connection = self._connection

        async def once() -> Any:
            async with connection.begin():
                return await connection.run_sync(work, *given)

        if not connection.in_transaction():
            return await _patiently(once)
        async with connection.begin_nested():
            return await connection.run_sync(work, *given)

    async def _apart(self, work: Callable[..., Any], *given: Any) -> Any:
        async with self.engine.begin() as connection:
            return await connection.run_sync(work, *given)

    async def _give_up(self) -> None:
        """Clear the new generation's rows from the inbox. If that fails, the next rebuild does it."""
        try:
            if await self._apart(stored.generation_of, self.name) != self._new:
                await self._forget(self._new)
        except Exception as error:
            reason = redacted(f"{type(error).__name__}: {error}")
            logger.warning("projection %s: the next rebuild clears the inbox: %s", self.name, reason)

    async def _forget(self, generation: int) -> None:
        """Delete a generation's rows from the inbox."""
        while generation > 0 and await self._apart(stored.forget, self._number(generation), CLEARED_AT_ONCE):
            pass

    def _number(self, generation: int) -> int:
        return consumer_id(self.name, generation)

    # -- the past ------------------------------------------------------------------------------------------------------

    async def _find_past(self, source: From) -> History:
        if source == "broker":
            if not isinstance(self.subscriber, Rereads):
                where = "the outbox" if self.subscriber is None else f"{self.source!r}, which cannot be read again"
                raise ConfigurationError(f"projection {self.name} has its events from {where}: use `--from outbox`")
            return await self.subscriber.reread(self.topics)
        if source != "outbox" and isinstance(source, str):
            raise ConfigurationError(f"rebuild: the past is in the outbox, at the broker or in files, not {source!r}")
        # A route and the consumer may spell the same topic in two ways.
        topics = spellings_of(self.topics, self.subscriber)
        names = [kind.name for kind in self._projection.kinds]
        feed = await self._do(history.feed_of, self.name, self.source, topics, names)
        files = () if isinstance(source, str) else source
        return history.Outbox(self.engine, feed, self._number(self._old), self._number(self._new), files)

    async def _go_through(self) -> None:
        left = await self._replay(self._past.pages(), Stage.REPLAYING)
        while True:
            self._rounds += 1
            before, left = left, await self._replay(self._past.pages(), Stage.CATCHING_UP)
            if left <= FEW or left > before // 2:  # a next round would find as many
                return

    async def _replay(self, pages: AsyncGenerator[Sequence[Message], None], stage: Stage) -> int:
        """Apply the events of these pages; how many they were."""
        await self._tell(stage)
        await self._do(self._look_up_decisions)
        applied = 0
        async with aclosing(pages):
            async for page in pages:
                applied += await self._apply(page)
                await self._tell(stage)
        return applied

    async def _apply(self, page: Sequence[Message]) -> int:
        """Apply these, one transaction per tenant; how many of them were not known to be left out."""
        by_tenant: dict[str | None, list[_Opened]] = {}
        applied = 0
        for message in page:
            place = message.headers.get("tenant_id"), named_event(message)
            known = place in self._left_out
            if (opened := self._open(message, place)) is not None:
                self._left_out.pop(opened.place, None)  # it may follow in a known version
                by_tenant.setdefault(opened.incoming.context.tenant, []).append(opened)
            applied += opened is not None or not known
        for theirs in by_tenant.values():
            await self._take_effect(theirs)
        return applied

    def _open(self, message: Message, place: Place) -> _Opened | None:
        digest = digest_of(message.body)
        decision = self._decided.get((place, ANY_BODY)) or self._decided.get((place, digest))
        if decision is not None:
            if decision.body is None:
                return None
            message = msgspec.structs.replace(message, body=decision.body)
        try:
            incoming = self.reader.read(message)
        except EventError as error:
            self._left_out[place] = redacted(str(error))
            return None
        except Exception as error:  # of an upcaster, or of the event's own class
            self._give_up_on(place, message.headers.get("event_type"), error)
            return None
        if incoming is None:
            return None
        return _Opened(msgspec.structs.replace(arrival_in(incoming), digest=digest), incoming)

    def _give_up_on(self, place: Place, event_type: str | None, error: Exception) -> None:
        """Leave out an event that is itself the cause of the error; any other error ends the rebuild."""
        failure, reason = classify(error), redacted(f"{type(error).__name__}: {error}")
        if failure not in (Failure.POISON, Failure.BUSINESS):
            raise StoreError(
                f"projection {self.name} is as it was: event {place[1]} ({event_type}) cannot be applied: {reason}"
            ) from error
        self._left_out[place] = reason

    async def _take_effect(self, opened: Sequence[_Opened]) -> None:
        """Apply events of one tenant in one transaction. If one makes it fail, try the halves, down to that event."""
        try:
            self._events += await self._do(self._write, opened)
        except Exception as error:
            if classify(error) is Failure.TRANSIENT:
                raise
            if len(opened) == 1:
                self._give_up_on(opened[0].place, opened[0].incoming.context.event_type, error)
                return
            half = len(opened) // 2
            await self._take_effect(opened[:half])
            await self._take_effect(opened[half:])

    def _write(self, connection: Connection, opened: Sequence[_Opened]) -> int:
        tenant = opened[0].incoming.context.tenant
        arrivals = [it.arrival for it in opened]
        admissions = self.inbox.admit(connection, self._number(self._new), tenant, arrivals).admissions
        new = [it.incoming for it, found in zip(opened, admissions, strict=True) if found is Admission.NEW]
        self._projection.write(connection, tenant, new)
        return len(new)

    def _check_complete(self, connection: Connection) -> None:
        """Raise `StoreError` if the inbox knows events that the live projection has had, and the rebuild has not."""
        history.compare_all(connection)
        old, new = inbox_table.alias(), inbox_table.alias()
        same_event = new.c.tenant == old.c.tenant, new.c.event_id == old.c.event_id
        lacking = (
            select(old.c.tenant, old.c.event_id)
            .where(old.c.consumer == self._number(self._old))
            .where(old.c.schema_version > 0)  # the others had no effect under that id
            .where(~exists().where(new.c.consumer == self._number(self._new), *same_event))
            .where(~claims.is_claimed(self.name, old))
            .limit(len(self._left_out) + 1_000)
        )
        found = sum((tenant or None, event) not in self._left_out for tenant, event in connection.execute(lacking))
        if found:
            is_from_outbox, has_other = isinstance(self._past, history.Outbox), isinstance(self.subscriber, Rereads)
            other = "outbox" if not is_from_outbox else "broker" if has_other else ""
            elsewhere = f"`--from {other}` if the {other} has them, " if other else ""
            raise StoreError(
                f"projection {self.name} is as it was: it has had {found:,} events or more that are not found any "
                f"more; use {elsewhere}`--from FILE` for each archive that has them, or `--incomplete` if the new "
                "table may lack them"
            )

    # -- decisions of operators ----------------------------------------------------------------------------------------

    def _look_up_decisions(self, connection: Connection) -> None:
        """Read the decisions. One about an event that was applied before ends the rebuild: it cannot be undone."""
        before, self._decided = self._decided, _decisions(claims.amended(connection, self.name))
        for (place, form), decision in self._decided.items() - before.items():
            here = _digest_in_inbox(self._number(self._new), decision.place)
            if form == ANY_BODY and connection.scalar(here) is not None:  # it was applied
                raise StoreError(
                    f"projection {self.name} is as it was: event {place[1]} was applied, and then a person edited "
                    "or discarded it: rebuild again"
                )
            if decision.body is None:
                self._left_out[decision.place] = "a person has discarded it"
            else:
                self._left_out.pop(place, None)  # perhaps it can be applied now

    # -- the switch ----------------------------------------------------------------------------------------------------

    async def _switch(self, *, incomplete: bool) -> None:
        """Replace the rows in one transaction, which is retried as a whole after transient errors."""
        events, left_out, decided = self._events, self._left_out, self._decided
        rest: list[Sequence[Message]] = []

        async def once() -> None:
            self._events, self._left_out, self._decided = events, dict(left_out), decided
            async with self._connection.begin():
                # Waits for the running batches of the live projection and blocks new ones: everything that it has
                # handled is visible from here on.
                await self._connection.run_sync(stored.set_generation, self.name, self._new)
                await self._replay(_kept(rest, self._past), Stage.SWITCHING)
                if not incomplete:
                    await self._do(self._check_complete)
                await self._do(self._settle)
                await self._do(self._shadow.switch, [self._number(self._old), self._number(self._new)])

        await _patiently(once)

    def _settle(self, connection: Connection) -> None:
        """Messages that wait in lanes and were applied count as handled; the others go on waiting. Events that were
        left out, and that the live projection has had, count as handled too: the source will not deliver them again.
        """
        old, new = self._number(self._old), self._number(self._new)
        claims.move(connection, self.name, old, new)  # first: what is left out may wait
        for place, reason in self._left_out.items():
            tenant, event_id = place
            if (digest := connection.scalar(_digest_in_inbox(old, place))) is not None:
                self.inbox.admit(connection, new, tenant, [Arrival(event_id, LEFT_OUT, bytes(digest))])
            logger.warning("projection %s: event %s is left out: %s", self.name, event_id, reason)


def _decisions(amended: Sequence[claims.Amended]) -> dict[tuple[Place, bytes], _Decision]:
    found: dict[tuple[Place, bytes], _Decision] = {}
    for tenant, message, body in amended:
        work = work_of(message)
        if work.claim is not None:
            # A message that was unreadable or altered says nothing about other bodies of its event.
            form = ANY_BODY if work.known_by is KnownBy.EVENT else digest_of(work.message.body)
            place = work.tenant, named_event(work.message)
            edited = None if body is None else work_of(msgspec.structs.replace(message, body=body)).message.body
            found[place, form] = _Decision((tenant, work.claim.inbox_id), edited)
    return found


def _digest_in_inbox(consumer: int, place: Place) -> Any:
    here = inbox_table.c.tenant == (place[0] or ""), inbox_table.c.event_id == place[1]
    return select(inbox_table.c.digest).where(inbox_table.c.consumer == consumer, *here)


async def _kept(rest: list[Sequence[Message]], past: History) -> AsyncGenerator[Sequence[Message], None]:
    """The pages in ``rest``, and then those of the past, which are kept there for a retry of the switch."""
    for page in [*rest]:
        yield page
    async with aclosing(past.pages()) as pages:
        async for page in pages:
            rest.append(page)
            yield page


async def _patiently(work: Callable[[], Awaitable[_Found]]) -> _Found:
    """Retry after transient errors, such as locks and deadlocks."""
    attempt = 0
    while True:
        try:
            return await work()
        except Exception as error:
            if classify(error) is not Failure.TRANSIENT or RETRY.exhausted(attempt := attempt + 1):
                raise
            logger.debug("a rebuild tries again: %s", redacted(str(error)))
            await asyncio.sleep(RETRY.delay(attempt))


def _own_engine(engine: AsyncEngine) -> AsyncEngine:
    """A separate pool: the live projection and the rebuild must not wait for each other's connections."""
    own = with_own_pool(engine)
    if own.dialect.name == "sqlite":
        sqlite.configure_transactions(own.sync_engine)
        return own
    return own.execution_options(isolation_level="READ COMMITTED")
