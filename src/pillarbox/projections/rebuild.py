"""A projection is written anew while the old one is read and goes on.

A rebuild is another generation of the projection: with a temporary table, and an inbox of its own, so that each event
has its effect there once. It goes through the past, then through what has come meanwhile, until that does not get less.
Then one transaction keeps the live projection waiting, applies the rest, and replaces the rows: the next batch of the
live one belongs to the new generation, whose inbox knows what its table has.

No handler of a consumer is ever called here: only projections can be rebuilt, and they do nothing but write their rows.
What cannot be applied is left out, and a log line says so. Whatever goes wrong before the switch leaves the live one as
it was.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol
from uuid import UUID

from msgspec import structs
from sqlalchemy import Connection, StaticPool, exists, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from .. import clock
from ..consumers.failure import Failure, classify
from ..consumers.handling import Incoming
from ..consumers.home import Home
from ..consumers.identity import KnownBy, arrival_in, named_event
from ..consumers.reading import Reader
from ..consumers.spilling import work_of
from ..errors import ConfigurationError, EventError, StoreError
from ..inbox import Admission, Arrival, Inbox, consumer_id, digest_of
from ..redaction import redacted
from ..retry import RetryPolicy
from ..stores import claims, sqlite
from ..stores import inbox as stored
from ..stores.columns import from_now
from ..stores.pool import with_own_pool
from ..stores.tables import inbox as inbox_table
from ..transport import Message, Rereads, Subscriber, spellings_of
from . import history
from .projection import Projection
from .shadow import Shadow, alone

logger = logging.getLogger("pillarbox")

FEW = 500
"""With so many events left, or fewer, the live projection is kept waiting."""
CLEARED_AT_ONCE = 5_000
LEFT_OUT = -1
"""What stands in the inbox in place of the schema version of events that count as dealt with, and were not applied."""
RETRY = RetryPolicy(base=0.1, cap=2.0, attempts=60)

ANY_BODY = b""
"""In place of a digest."""

Place = tuple[str | None, UUID]
"""An event in the inbox: its tenant and its id."""


class Stage(StrEnum):
    """How far a rebuild has come."""

    REPLAYING = "replaying"
    """It goes through the past."""
    CATCHING_UP = "catching up"
    """It goes through what has come meanwhile."""
    SWITCHING = "switching"
    """The live projection waits."""
    CLEARING = "clearing"
    """It is done; what the old generation has left is removed."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a rebuild has done so far."""

    stage: Stage
    events: int
    total: int | None
    """About how many there were when it began, if that is known."""
    left_out: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a rebuild has done."""

    projection: str
    generation: int
    events: int
    """That were applied."""
    left_out: int
    """That could not be, or that a person had discarded."""
    rounds: int
    """How often it went through what had come meanwhile."""
    seconds: float


Tell = Callable[[Progress], Awaitable[None] | None]
From = Literal["outbox", "broker"] | Sequence[Path]
"""Where the past is: in the outbox, at the broker, or in these archives and then in the outbox."""


class _Past(Protocol):
    def pages(self) -> AsyncGenerator[Sequence[Message], None]:
        """The events that earlier calls did not bring, or that the new generation does not know, up to those that are
        there when it is called. In order per key.
        """
        ...


class _Opened(NamedTuple):
    message: Message
    arrival: Arrival
    incoming: Incoming

    @property
    def place(self) -> Place:
        return self.incoming.context.tenant, self.arrival.event_id


class _Decision(NamedTuple):
    place: Place
    """Of the message that was spilled."""
    body: bytes | None
    """That is to have its effect; None: nothing is."""


class Rebuild:
    """One rebuild of one projection. Made by `ProjectionConsumer.rebuild`."""

    def __init__(
        self,
        name: str,
        home: Home,
        projection: Projection,
        *,
        reader: Reader,
        source: str,
        topics: Sequence[str],
        subscriber: Subscriber | None,
        inbox: Inbox,
        progress: Tell | None,
    ) -> None:
        if isinstance(home.engine.pool, StaticPool):
            raise ConfigurationError(
                f"projection {name}: an in-memory SQLite has one connection, and a rebuild needs more: use a file"
            )
        self._name = name
        self._engine = _own_engine(home.engine)
        self._live = projection
        self._reader = reader
        self._source = source
        self._topics = topics
        self._spellings = spellings_of(topics, subscriber)
        """A route may call a topic by another name than the consumer, and the broker take both for the same."""
        self._subscriber = subscriber
        self._inbox = inbox
        self._progress = progress
        self._shadow = Shadow(projection.table)
        self._projection = projection.into(self._shadow.table)
        self._connection: AsyncConnection
        self._events = self._rounds = self._old = self._new = 0
        self._total: int | None = None
        self._left_out: dict[Place, str] = {}
        """Events that cannot be applied, or that a person has discarded, and why."""
        self._decided: dict[Place, dict[bytes, _Decision]] = {}
        """What people have decided about events, by the digest of the body in which they came."""

    async def run(self, source: From, *, incomplete: bool) -> Rebuilt:
        """Do it."""
        began = clock.current().monotonic()
        try:
            async with alone(self._engine, self._name):
                self._old = await self._apart(stored.generation_of, self._name)
                self._new = self._old + 1
                for left in (self._old - 1, self._new):  # by rebuilds that have died
                    await self._forget(left)
                try:
                    async with self._engine.connect() as self._connection, AsyncExitStack() as stack:
                        await self._do(self._shadow.create)
                        past = await self._past(source, stack)
                        await self._go_through(past, incomplete=incomplete)
                        await self._switch(past, incomplete=incomplete)
                except BaseException:
                    await self._give_up()
                    raise
                await self._tell(Stage.CLEARING)
                await self._forget(self._old)
        finally:
            await self._engine.dispose()
        seconds = clock.current().monotonic() - began
        logger.info("projection %s: generation %d has %d events", self._name, self._new, self._events)
        return Rebuilt(self._name, self._new, self._events, len(self._left_out), self._rounds, round(seconds, 3))

    async def _tell(self, stage: Stage) -> None:
        if self._progress is not None:
            told = self._progress(Progress(stage, self._events, self._total, len(self._left_out), self._rounds))
            if inspect.isawaitable(told):
                await told

    async def _do(self, work: Callable[..., Any], *given: Any) -> Any:
        """On the connection that has the shadow: in a transaction, or in a savepoint of the one that switches."""
        connection = self._connection
        async with connection.begin_nested() if connection.in_transaction() else connection.begin():
            return await connection.run_sync(work, *given)

    async def _apart(self, work: Callable[..., Any], *given: Any) -> Any:
        async with self._engine.begin() as connection:
            return await connection.run_sync(work, *given)

    async def _give_up(self) -> None:
        """Leave nothing in the inbox. If even that fails, the next rebuild does it."""
        try:
            if await self._apart(stored.generation_of, self._name) != self._new:
                await self._forget(self._new)
        except Exception as error:
            reason = redacted(f"{type(error).__name__}: {error}")
            logger.warning("projection %s: the next rebuild clears the inbox: %s", self._name, reason)

    async def _forget(self, generation: int) -> None:
        """Let the inbox forget a generation."""
        while generation > 0 and await self._apart(stored.forget, self._number(generation), CLEARED_AT_ONCE):
            pass

    # -- the past ------------------------------------------------------------------------------------------------------

    async def _past(self, source: From, stack: AsyncExitStack) -> _Past:
        if source == "broker":
            if not isinstance(self._subscriber, Rereads):
                where = "the outbox" if self._subscriber is None else f"{self._source!r}, which cannot be read again"
                raise ConfigurationError(f"projection {self._name} has its events from {where}: use `--from outbox`")
            return await stack.enter_async_context(aclosing(await self._subscriber.reread(self._topics)))
        if source != "outbox" and isinstance(source, str):
            raise ConfigurationError(f"rebuild: the past is in the outbox, at the broker or in files, not {source!r}")
        names = [kind.name for kind in self._live.kinds]
        feed = await self._do(history.feed_of, self._name, self._source, self._spellings, names)
        files: Sequence[Path] = () if isinstance(source, str) else source
        if not files:
            self._total = await self._do(history.count, feed)
        return history.Outbox(self._engine, feed, self._number(self._old), self._number(self._new), files)

    def _number(self, generation: int) -> int:
        return consumer_id(self._name, generation)

    async def _go_through(self, past: _Past, *, incomplete: bool) -> None:
        began = await self._do(lambda it: it.scalar(select(from_now())))
        await self._tell(Stage.REPLAYING)
        left = await self._replay(past.pages(), Stage.REPLAYING)
        if not incomplete:
            await self._do(self._check_complete, began)
        while True:
            self._rounds += 1
            await self._tell(Stage.CATCHING_UP)
            before, left = left, await self._replay(past.pages(), Stage.CATCHING_UP)
            if left <= FEW or left > before // 2:  # a next round would find as many
                return

    async def _replay(self, pages: AsyncGenerator[Sequence[Message], None], stage: Stage | None) -> int:
        """Apply all that these pages bring; how much that was."""
        await self._do(self._look_up_decisions)
        count = 0
        async with aclosing(pages):
            async for page in pages:
                count += await self._apply(page)
                if stage is not None:
                    await self._tell(stage)
        return count

    def _look_up_decisions(self, connection: Connection) -> None:
        """What people have decided meanwhile. What was applied before they did cannot be taken back."""
        before, self._decided = self._decided, _decisions(claims.amended(connection, self._name))
        for place, decided in self._decided.items():
            for form, decision in decided.items():
                if decision == before.get(place, {}).get(form):
                    continue
                if form == ANY_BODY and self._is_applied(connection, decision.place):
                    raise StoreError(
                        f"projection {self._name} is as it was: event {place[1]} was applied, and then a person edited "
                        "or discarded it: rebuild again"
                    )
                if decision.body is None:
                    self._left_out[decision.place] = "a person has discarded it"
                else:
                    self._left_out.pop(place, None)  # perhaps it can be applied now

    def _is_applied(self, connection: Connection, place: Place) -> bool:
        here = inbox_table.c.tenant == (place[0] or ""), inbox_table.c.event_id == place[1]
        found = select(inbox_table.c.event_id).where(inbox_table.c.consumer == self._number(self._new), *here)
        return connection.scalar(found) is not None

    async def _apply(self, page: Sequence[Message]) -> int:
        """Apply these, those of one tenant together; how many of them were not known to be left out."""
        by_tenant: dict[str | None, list[_Opened]] = {}
        count = 0
        for message in page:
            place = message.headers.get("tenant_id"), named_event(message)
            known = place in self._left_out
            if (opened := self._open(message, place)) is not None:
                self._left_out.pop(opened.place, None)  # behind an unknown version of it, a known one may come
                by_tenant.setdefault(opened.incoming.context.tenant, []).append(opened)
            count += opened is not None or not known
        for theirs in by_tenant.values():
            await self._take_effect(theirs)
        return count

    def _open(self, message: Message, place: Place) -> _Opened | None:
        edited = message
        if decision := self._decision_about(message, place):
            if decision.body is None:
                return None
            edited = Message(message.topic, message.key, decision.body, message.headers)
        try:
            incoming = self._reader.read(edited)
        except EventError as error:
            self._left_out[place] = redacted(str(error))
            return None
        except Exception as error:  # of an upcaster, or of the event's own class
            self._give_up_on(message, place, error)
            return None
        if incoming is None:
            return None
        known = arrival_in(incoming)  # but for the body, which a person may have edited: it comes as it was
        arrival = Arrival(known.event_id, known.schema_version, digest_of(message.body))
        return _Opened(message, arrival, incoming)

    def _decision_about(self, message: Message, place: Place) -> _Decision | None:
        if (decided := self._decided.get(place)) is None:
            return None
        return decided.get(ANY_BODY) or decided.get(digest_of(message.body))

    def _give_up_on(self, message: Message, place: Place, error: Exception) -> None:
        """Leave out an event that is at fault itself; any other error ends the rebuild."""
        failure, reason = classify(error), redacted(f"{type(error).__name__}: {error}")
        if failure in (Failure.POISON, Failure.BUSINESS):
            self._left_out[place] = reason
            return
        raise StoreError(
            f"projection {self._name} is as it was: event {place[1]} ({message.headers.get('event_type')}) "
            f"cannot be applied: {reason}"
        ) from error

    async def _take_effect(self, opened: Sequence[_Opened]) -> None:
        """In one transaction. If that fails by the fault of an event, the halves are tried, down to that event."""
        attempt = 0
        while True:
            try:
                self._events += await self._do(self._write, opened)
            except Exception as error:
                if classify(error) is Failure.TRANSIENT:
                    if self._connection.in_transaction() or RETRY.exhausted(attempt := attempt + 1):
                        raise  # the switch is tried again as a whole
                    await asyncio.sleep(RETRY.delay(attempt))
                    continue
                if len(opened) > 1:
                    half = len(opened) // 2
                    await self._take_effect(opened[:half])
                    await self._take_effect(opened[half:])
                else:
                    self._give_up_on(opened[0].message, opened[0].place, error)
            return

    def _write(self, connection: Connection, opened: Sequence[_Opened]) -> int:
        tenant = opened[0].incoming.context.tenant
        arrivals = [it.arrival for it in opened]
        admissions = self._inbox.admit(connection, self._number(self._new), tenant, arrivals).admissions
        new = [it.incoming for it, found in zip(opened, admissions, strict=True) if found is Admission.NEW]
        self._projection.write(connection, tenant, new)
        return len(new)

    def _check_complete(self, connection: Connection, began: Any) -> None:
        """The new table must not lack what the old one has had before that, as far as the inbox remembers."""
        if lacking := self._lacking(connection, began):
            elsewhere = "" if self._subscriber is None else "`--from broker` if the broker has them, "
            raise StoreError(
                f"projection {self._name} is as it was: it has had {lacking:,} events or more that are not found any "
                f"more; use {elsewhere}`--from FILE` for each archive that has them, or `--incomplete` if the new "
                "table may lack them"
            )

    def _lacking(self, connection: Connection, began: Any) -> int:
        """What was dealt with before we began was delivered before, so the past must have it."""
        history.compare_all(connection)
        old, new = inbox_table.alias(), inbox_table.alias()
        number = self._number(self._new)
        found = exists().where(new.c.consumer == number, new.c.tenant == old.c.tenant, new.c.event_id == old.c.event_id)
        these = [old.c.consumer == self._number(self._old)]
        if began is not None:
            these.append(old.c.at < began)
        these.append(old.c.schema_version > 0)  # the others had no effect under that id
        enough = len(self._left_out) + 1_000
        waits = claims.is_claimed(self._name, old)
        rows = connection.execute(select(old.c.tenant, old.c.event_id).where(*these, ~found, ~waits).limit(enough))
        return sum((tenant or None, event_id) not in self._left_out for tenant, event_id in rows)

    # -- the switch ----------------------------------------------------------------------------------------------------

    async def _switch(self, past: _Past, *, incomplete: bool) -> None:
        """One transaction, tried again as long as others are in its way."""
        events, left_out, decided = self._events, dict(self._left_out), self._decided
        rest: list[Sequence[Message]] = []
        attempt = 0
        while True:
            self._events, self._left_out, self._decided = events, dict(left_out), decided
            try:
                async with self._connection.begin():
                    # Waits for the batches of the live one, and lets no other begin: so all that it has done was
                    # delivered, and can be seen.
                    await self._connection.run_sync(stored.set_generation, self._name, self._new)
                    await self._tell(Stage.SWITCHING)
                    await self._replay(_kept(rest, past), None)
                    if not incomplete:  # a broker may have been slow to bring what the live one has had
                        await self._do(self._check_complete, None)
                    await self._do(self._settle)
                    await self._do(self._shadow.switch, [self._number(self._old), self._number(self._new)])
            except Exception as error:
                if classify(error) is not Failure.TRANSIENT or RETRY.exhausted(attempt := attempt + 1):
                    raise
                logger.debug("projection %s: no switch yet: %s", self._name, redacted(str(error)))
                await asyncio.sleep(RETRY.delay(attempt))
            else:
                return

    def _settle(self, connection: Connection) -> None:
        """What waits in lanes and was applied counts as handled; the rest goes on waiting. What was left out, and the
        live one has had, will not come again: it counts as handled, too.
        """
        numbers = self._number(self._old), self._number(self._new)
        claims.move(connection, self._name, *numbers)  # first: what is left out may wait
        for (tenant, event_id), reason in self._left_out.items():
            here = inbox_table.c.tenant == (tenant or ""), inbox_table.c.event_id == event_id
            had = select(inbox_table.c.digest).where(inbox_table.c.consumer == numbers[0], *here)
            if (digest := connection.scalar(had)) is not None:
                self._inbox.admit(connection, numbers[1], tenant, [Arrival(event_id, LEFT_OUT, bytes(digest))])
            logger.warning("projection %s: event %s is left out: %s", self._name, event_id, reason)


def _decisions(amended: Sequence[claims.Amended]) -> dict[Place, dict[bytes, _Decision]]:
    found: dict[Place, dict[bytes, _Decision]] = {}
    for tenant, message, body in amended:
        work = work_of(message)
        if work.claim is not None:
            # What could not be read, or came with another body, is no decision about other forms of its event.
            form = ANY_BODY if work.known_by is KnownBy.EVENT else digest_of(work.message.body)
            as_edited = None if body is None else work_of(structs.replace(message, body=body)).message.body
            decision = _Decision((tenant, work.claim.inbox_id), as_edited)
            found.setdefault((work.tenant, named_event(work.message)), {})[form] = decision
    return found


async def _kept(rest: list[Sequence[Message]], past: _Past) -> AsyncGenerator[Sequence[Message], None]:
    """What is in ``rest``, and the pages of the past, which stay there: who tries again needs them once more."""
    for page in [*rest]:
        yield page
    async with aclosing(past.pages()) as pages:
        async for page in pages:
            rest.append(page)
            yield page


def _own_engine(engine: AsyncEngine) -> AsyncEngine:
    """Connections of its own: the live projection must not wait for those of the rebuild, nor the rebuild for its."""
    own = with_own_pool(engine)
    if own.dialect.name == "sqlite":
        sqlite.configure_transactions(own.sync_engine)
        return own
    return own.execution_options(isolation_level="READ COMMITTED")
