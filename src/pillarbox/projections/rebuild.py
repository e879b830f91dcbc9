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
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy import Connection, StaticPool, exists, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from .. import clock
from ..consumers.consumer import Consumer
from ..consumers.failure import Failure, classify
from ..consumers.handling import Incoming, Reader
from ..consumers.spilling import work_of
from ..errors import ConfigurationError, EventError, StoreError
from ..inbox import Admission, Arrival, Inbox, KnownBy, consumer_id, digest_of
from ..redaction import described, redacted
from ..retry import RetryPolicy
from ..stores import claims, sqlite
from ..stores import inbox as stored
from ..stores.forgetting import forget_inbox
from ..stores.pool import with_own_pool
from ..stores.tables import inbox as inbox_table
from ..transport import History, Message, Rereads, spellings_of
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
_Decided = dict[tuple[Place, bytes], tuple[Place, bytes | None]]
"""What operators have decided about spilled messages, by their events and the digests of their bodies as received:
where the inbox has the message, and the body to apply; None if it was discarded."""


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
_Opened = tuple[Place, Arrival, Incoming]
"""The digest of the arrival is that of the body as received, which an operator may have edited since."""


@dataclass(eq=False)
class Rebuild:
    """One rebuild of one projection. Made by `ProjectionConsumer.rebuild`."""

    consumer: Consumer
    live: Projection
    engine: AsyncEngine
    reader: Reader
    inbox: Inbox
    progress: Tell | None

    def __post_init__(self) -> None:
        self.name = self.consumer.name
        if isinstance(self.engine.pool, StaticPool):
            raise ConfigurationError(
                f"projection {self.name}: an in-memory SQLite has one connection, and a rebuild needs more: use a file"
            )
        self.engine = with_own_pool(self.engine)  # the live projection must not wait for connections
        sqlite.configure_transactions(self.engine.sync_engine)
        if self.engine.dialect.name != "sqlite":
            self.engine = self.engine.execution_options(isolation_level="READ COMMITTED")
        self._shadow = Shadow(self.live.table)
        self._projection = self.live.into(self._shadow.table)
        self._connection: AsyncConnection
        self._past: History
        self._events = self._rounds = 0
        self._generation = self._old = self._new = 0
        """The generation that is made, and the numbers of the live one and of that in the inbox."""
        self._left_out: dict[Place, str] = {}
        """Events that cannot be applied, or that an operator has discarded, and why."""
        self._decided: _Decided = {}

    async def run(self, source: From, *, incomplete: bool) -> Rebuilt:
        """Rebuild the projection from this source."""
        began = clock.current().monotonic()
        try:
            async with alone(self.engine, self.name):
                live = await self._clear()  # rebuilds that have died may have left rows
                self._generation = live + 1
                self._old, self._new = consumer_id(self.name, live), consumer_id(self.name, live + 1)
                try:
                    async with self.engine.connect() as self._connection:
                        await self._do(self._shadow.create)
                        self._past = await self._find_past(source)
                        async with aclosing(self._past):
                            await self._go_through()
                            await self._switch(incomplete=incomplete)
                    await self._tell(Stage.CLEARING)
                finally:
                    await self._end()
        finally:
            await self.engine.dispose()
        seconds = clock.current().monotonic() - began
        logger.info("projection %s: generation %d has %d events", self.name, self._generation, self._events)
        return Rebuilt(self.name, self._generation, self._events, len(self._left_out), self._rounds, round(seconds, 3))

    async def _tell(self, stage: Stage) -> None:
        if self.progress is not None:
            total = getattr(self._past, "total", None)
            told = self.progress(Progress(stage, self._events, total, len(self._left_out), self._rounds))
            if inspect.isawaitable(told):
                await told

    async def _end(self) -> None:
        """Leave nothing in the inbox, whether the switch has committed or not."""
        try:
            await self._clear()
        except Exception as error:
            reason = described(error)
            logger.warning("projection %s: the next rebuild clears the inbox: %s", self.name, reason)

    async def _clear(self) -> int:
        """Delete the rows of the generations before and after the live one from the inbox; the number of that one."""
        # Locked: a switch whose connection was lost may be committing still.
        live: int = await self._apart(stored.hold_generation, self.name)
        for other in {live - 1, live + 1} - {0}:
            while await self._apart(forget_inbox, consumer_id(self.name, other), CLEARED_AT_ONCE):
                pass
        return live

    async def _apart(self, work: Callable[..., Any], *given: Any) -> Any:
        async with self.engine.begin() as connection:
            return await connection.run_sync(work, *given)

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

    # -- the past ------------------------------------------------------------------------------------------------------

    async def _find_past(self, source: From) -> History:
        subscriber = self.consumer.subscriber
        if source == "broker":
            if not isinstance(subscriber, Rereads):
                given = f"{self.consumer.source!r}, which cannot be read again"
                where = "the outbox" if subscriber is None else given
                raise ConfigurationError(f"projection {self.name} has its events from {where}: use `--from outbox`")
            return await subscriber.reread(self.consumer.topics)
        if source != "outbox" and isinstance(source, str):
            raise ConfigurationError(f"rebuild: the past is in the outbox, at the broker or in files, not {source!r}")
        # A route and the consumer may spell the same topic in two ways.
        topics = spellings_of(self.consumer.topics, subscriber)
        names = [kind.name for kind in self.live.kinds]
        feed = await self._do(history.feed_of, self.name, self.consumer.source, topics, names)
        return history.Outbox(self.engine, feed, self._old, self._new, () if isinstance(source, str) else source)

    async def _go_through(self) -> None:
        left = await self._replay(Stage.REPLAYING)
        while True:
            self._rounds += 1
            before, left = left, await self._replay(Stage.CATCHING_UP)
            if left <= FEW or left > before // 2:  # a next round would find as many
                return

    async def _replay(self, stage: Stage, kept: list[Sequence[Message]] | None = None) -> int:
        """Apply the messages of the past that were not applied yet; how many it found. The pages that it reads are
        added to those which are ``kept`` from tries before: a broker brings them once.
        """
        await self._tell(stage)
        await self._do(self._look_up_decisions)
        for page in kept or ():
            await self._apply(page)
        found = 0
        async with aclosing(self._past.pages()) as pages:
            async for page in pages:
                if kept is not None:
                    kept.append(page)
                await self._apply(page)
                found += len(page)
                await self._tell(stage)
        return found

    async def _apply(self, page: Sequence[Message]) -> None:
        """Apply these, one transaction per tenant."""
        by_tenant: dict[str | None, list[_Opened]] = {}
        for message in page:
            if (opened := self._open(message)) is not None:
                self._left_out.pop(opened[0], None)  # it may have come in an unknown version before
                by_tenant.setdefault(opened[0][0], []).append(opened)
        for tenant, theirs in by_tenant.items():
            await self._take_effect(tenant, theirs)

    def _open(self, message: Message) -> _Opened | None:
        place, digest = (message.headers.get("tenant_id"), _event_of(message)), digest_of(message.body)
        decision = self._decided.get((place, ANY_BODY)) or self._decided.get((place, digest))
        if decision is not None:
            _, body = decision
            if body is None:
                return None
            message = msgspec.structs.replace(message, body=body)
        try:
            incoming = self.reader.read(message)
        except EventError as error:
            self._left_out[place] = redacted(str(error))
            return None
        except Exception as error:  # of an upcaster, or of the event's own class
            self._leave_out(place, message.headers.get("event_type"), error)
            return None
        if incoming is None:
            return None
        arrival = msgspec.structs.replace(incoming.arrival, digest=digest)
        return (incoming.context.tenant, arrival.event_id), arrival, incoming

    def _leave_out(self, place: Place, event_type: str | None, error: Exception) -> None:
        """Leave out an event that is itself the cause of the error; any other error ends the rebuild."""
        failure, reason = classify(error), described(error)
        if failure not in (Failure.POISON, Failure.BUSINESS):
            raise StoreError(
                f"projection {self.name} is as it was: event {place[1]} ({event_type}) cannot be applied: {reason}"
            ) from error
        self._left_out[place] = reason

    async def _take_effect(self, tenant: str | None, opened: Sequence[_Opened]) -> None:
        """Apply events of one tenant in one transaction. If one makes it fail, try the halves, down to that event."""
        try:
            self._events += await self._do(self._write, tenant, opened)
        except Exception as error:
            if classify(error) is Failure.TRANSIENT:
                raise
            if len(opened) == 1:
                [(place, _, incoming)] = opened
                self._leave_out(place, incoming.context.event_type, error)
                return
            half = len(opened) // 2
            for part in (opened[:half], opened[half:]):
                await self._take_effect(tenant, part)

    def _write(self, connection: Connection, tenant: str | None, opened: Sequence[_Opened]) -> int:
        admissions = self.inbox.admit(connection, self._new, tenant, [arrival for _, arrival, _ in opened]).admissions
        new = [it[2] for it, admission in zip(opened, admissions, strict=True) if admission is Admission.NEW]
        self._projection.write(connection, tenant, new)
        return len(new)

    # -- decisions of operators ----------------------------------------------------------------------------------------

    def _look_up_decisions(self, connection: Connection) -> None:
        """Read the decisions. One about an event that was applied before ends the rebuild: it cannot be undone."""
        decided: _Decided = {}
        for tenant, message, body in claims.amended(connection, self.name):
            work = work_of(message)
            if work.claim is not None:
                # A message that was unreadable or altered says nothing about other bodies of its event.
                form = ANY_BODY if work.known_by is KnownBy.EVENT else digest_of(work.message.body)
                edited = None if body is None else work_of(msgspec.structs.replace(message, body=body)).message.body
                event = work.tenant, _event_of(work.message)
                decided[event, form] = (tenant, work.claim.inbox_id), edited
        for (event, form), (place, edited) in decided.items() - self._decided.items():
            if form == ANY_BODY and connection.scalar(_digest_in_inbox(self._new, place)) is not None:
                raise StoreError(
                    f"projection {self.name} is as it was: event {event[1]} was applied, and then a person edited "
                    "or discarded it: rebuild again"
                )
            if edited is None:
                self._left_out[place] = "a person has discarded it"
            else:
                self._left_out.pop(event, None)  # perhaps it can be applied now
        self._decided = decided  # last: after a transient error, the checks are repeated

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
                await self._connection.run_sync(stored.set_generation, self.name, self._generation)
                await self._replay(Stage.SWITCHING, rest)
                if not incomplete:
                    await self._do(self._check_complete)
                await self._do(self._settle)
                await self._do(self._shadow.switch, [self._old, self._new])

        await _patiently(once)

    def _check_complete(self, connection: Connection) -> None:
        """Raise `StoreError` if the inbox knows events that the live projection has had, and the rebuild has not."""
        history.compare_all(connection)
        old, new = inbox_table.alias(), inbox_table.alias()
        same_event = new.c.tenant == old.c.tenant, new.c.event_id == old.c.event_id
        lacking = (
            select(old.c.tenant, old.c.event_id)
            .where(old.c.consumer == self._old)
            .where(old.c.schema_version > 0)  # the others had no effect under that id
            .where(~exists().where(new.c.consumer == self._new, *same_event))
            .where(~claims.is_claimed(self.name, old))
            .limit(len(self._left_out) + 1_000)
        )
        found = sum((tenant or None, event) not in self._left_out for tenant, event in connection.execute(lacking))
        if found:
            is_from_broker = not isinstance(self._past, history.Outbox)
            other = "outbox" if is_from_broker else "broker" if isinstance(self.consumer.subscriber, Rereads) else ""
            elsewhere = f"`--from {other}` if the {other} has them, " if other else ""
            raise StoreError(
                f"projection {self.name} is as it was: it has had {found:,} events or more that are not found any "
                f"more; use {elsewhere}`--from FILE` for each archive that has them, or `--incomplete` if the new "
                "table may lack them"
            )

    def _settle(self, connection: Connection) -> None:
        """Messages that wait in lanes and were applied count as handled; the others go on waiting. Events that were
        left out, and that the live projection has had, count as handled too: the source will not deliver them again.
        """
        claims.move(connection, self.name, self._old, self._new)  # first: what is left out may wait
        for place, reason in self._left_out.items():
            tenant, event_id = place
            if (digest := connection.scalar(_digest_in_inbox(self._old, place))) is not None:
                self.inbox.admit(connection, self._new, tenant, [Arrival(event_id, LEFT_OUT, bytes(digest))])
            logger.warning("projection %s: event %s is left out: %s", self.name, event_id, reason)


def _digest_in_inbox(consumer: int, place: Place) -> Any:
    here = inbox_table.c.tenant == (place[0] or ""), inbox_table.c.event_id == place[1]
    return select(inbox_table.c.digest).where(inbox_table.c.consumer == consumer, *here)


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


def _event_of(message: Message) -> UUID:
    """Which event a message is about, by its header; of one without, a hash of all that it says."""
    try:
        return Arrival.of_event(UUID(message.headers["event_id"]), 0, message.body).event_id
    except (KeyError, ValueError):
        return Arrival.of_content(message).event_id
