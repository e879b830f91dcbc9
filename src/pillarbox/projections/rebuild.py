"""A projection is written anew while the old one is read and goes on.

A rebuild is another generation of the projection: with a table of its own beside the live one, and an inbox of its own,
so that each event has its effect there once. It goes through the past, then through what has come meanwhile, and again,
until little is left. Then the live one is held for a moment, the rest is applied, and the tables change places: the
next batch of the live one belongs to the new generation, whose inbox knows what its table has.

No handler of a consumer is ever called here: only projections can be rebuilt, and they do nothing but write their rows.
What cannot be applied is left out, and has a letter. Whatever goes wrong before the tables change places leaves the
live one as it was.

On PostgreSQL the live one is held by a lock, and all of the swap is one transaction. Elsewhere a mark in the place of
the generation holds it: if the process dies just then, the next rebuild finds the mark, and finishes or takes it away.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol
from uuid import UUID, uuid4

from sqlalchemy import Connection, StaticPool, delete, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

from .. import clock
from ..consumers.failure import Failure, classify
from ..consumers.handling import Incoming
from ..consumers.home import Home
from ..consumers.naming import arrival_in, arrival_of, letter_about
from ..consumers.reading import Reader
from ..errors import ConfigurationError, EventError, StoreError, UnknownEventError
from ..inbox import UNDECIDING, Admission, Arrival, Inbox, LetterKind, Letters, LetterState, consumer_id
from ..redaction import redacted
from ..retry import RetryPolicy
from ..stores import inbox as stored
from ..stores import sqlite
from ..stores.columns import from_now
from ..stores.pool import with_own_pool
from ..stores.tables import inbox as inbox_table
from ..stores.tables import letters as letters_table
from ..transport import Message, Subscriber, Subscription, spellings_of
from . import history
from .editions import replaced
from .projection import Projection
from .shadow import LOCK_SECONDS, Shadow, alone, shadow_of

logger = logging.getLogger("pillarbox")

FEW = 500
"""With so many events left, or fewer, the live projection is held."""
MAX_ROUNDS = 20
"""If ever more events come meanwhile, it is held all the same."""
QUIET = 3.0
"""Seconds after which a broker that brings nothing has nothing more."""
PAGE_BYTES = 16_777_216
"""What the bodies of the messages may take that are received at a time."""
CLEARED_AT_ONCE = 5_000
LEFT_OUT = -1
"""What stands in the inbox in place of the schema version of events that count as dealt with, and were not applied."""
RETRY = RetryPolicy(base=0.1, cap=2.0, attempts=60)

Place = tuple[str | None, UUID]
"""An event in the inbox: its tenant and its id."""


class Stage(StrEnum):
    """How far a rebuild has come."""

    REPLAYING = "replaying"
    """It goes through the past."""
    CATCHING_UP = "catching up"
    """It goes through what has come meanwhile."""
    SWAPPING = "swapping"
    """The live projection is held."""
    SWAPPED = "swapped"
    """The new table has the name of the old one; where that is a transaction, it has not committed."""
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
    """That could not be, or that somebody had discarded."""
    rounds: int
    """How often it went through what had come meanwhile."""
    seconds: float


Tell = Callable[[Progress], Awaitable[None] | None]
From = Literal["outbox", "broker"] | Sequence[Path]
"""Where the past is: in the outbox, at the broker, or in these archives and then in the outbox."""


class _Past(Protocol):
    """Where events come from."""

    def pages(self) -> AsyncGenerator[list[Message], None]:
        """Those that the new generation does not know. In order per key, over all pages and all calls. To ask for the
        next page says that the one before is dealt with.
        """
        ...


class _Opened(NamedTuple):
    message: Message
    arrival: Arrival
    incoming: Incoming


class _LeftOut(NamedTuple):
    message: Message
    arrival: Arrival
    kind: LetterKind
    reason: str


class Rebuild:
    """One rebuild of one projection. Made by `Consumer.rebuild`."""

    def __init__(
        self,
        name: str,
        home: Home,
        projection: Projection,
        *,
        source: str,
        topics: Sequence[str],
        ignores: Sequence[str],
        subscriber: Subscriber | None,
        inbox: Inbox,
        letters: Letters,
        progress: Tell | None,
    ) -> None:
        if isinstance(home.engine.pool, StaticPool):
            raise ConfigurationError(
                f"projection {name}: an in-memory SQLite has one connection, and a rebuild needs more: use a file"
            )
        self._name = name
        self._home = home
        self._live = projection
        self._source = source
        self._topics = topics
        self._spellings = spellings_of(topics, subscriber)
        """A route may call a topic by another name than the consumer, and the broker take both for the same."""
        self._ignores = ignores
        self._subscriber = subscriber
        self._inbox = inbox
        self._letters = letters
        self._progress = progress
        self._events = self._rounds = 0
        self._total: int | None = None
        self._left_out: dict[Place, _LeftOut] = {}
        self._amended: Mapping[Place, bytes | None] = {}
        self._engine: AsyncEngine
        self._shadow: Shadow
        self._projection: Projection
        self._reader: Reader
        self._old = self._new = 0
        self._incomplete = False

    async def run(self, source: From, *, incomplete: bool) -> Rebuilt:
        """Do it."""
        began = clock.current().monotonic()
        self._engine = _own_engine(self._home.engine)
        try:
            async with alone(self._engine, self._name), AsyncExitStack() as stack:
                await self._prepare()
                try:
                    past = await self._past(source, stack)
                    await self._go_through(past, incomplete=incomplete)
                    await self._swap(past)
                except BaseException:
                    await self._give_up()
                    raise
                await self._tell(Stage.CLEARING)
                await self._clear()
        finally:
            await self._engine.dispose()
        seconds = clock.current().monotonic() - began
        done = Rebuilt(self._name, self._new, self._events, len(self._left_out), self._rounds, round(seconds, 3))
        logger.info("projection %s: generation %d has %d events", self._name, self._new, self._events)
        return done

    async def _tell(self, stage: Stage) -> None:
        if self._progress is not None:
            told = self._progress(Progress(stage, self._events, self._total, len(self._left_out), self._rounds))
            if inspect.isawaitable(told):
                await told

    # -- before and after ----------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Make the shadow. What is left of rebuilds that died goes first."""
        self._old = await self._mend()
        self._new = self._old + 1
        self._shadow = shadow_of(self._live.table, self._new, self._engine.dialect)
        self._projection = self._live.into(self._shadow.table)
        # By another name, so that what it holds is not mistaken for what the live one holds.
        self._reader = Reader(self._alias, self._live, self._home.codecs, self._ignores, self._spellings)
        self._projection.read = self._reader.read_held
        await self._ask(self._shadow.check)
        await self._in_transaction(shadow_of(self._live.table, self._old, self._engine.dialect).drop)
        await self._forget(self._old - 1)
        await self._forget(self._new)
        await self._in_transaction(self._shadow.create)

    @property
    def _alias(self) -> str:
        return f"{self._name}@{self._new}"

    async def _mend(self) -> int:
        """The generation of the live table. If somebody died between the mark and the end of a swap, this finishes it,
        or takes the mark away.
        """
        found: int = await self._ask(stored.generation_of, self._name)
        if found > 0:
            return found
        self._old, self._new = -found - 1, -found
        self._shadow = shadow_of(self._live.table, self._new, self._engine.dialect)
        if await self._ask(self._shadow.is_there):
            await self._in_transaction(stored.set_generation, self._name, self._old)
            return self._old
        await self._in_transaction(self._finish)
        await self._in_transaction(self._shadow.drop)
        return self._new

    async def _give_up(self) -> None:
        """Leave the live one as it was, and nothing else. If even that fails, the next rebuild does it."""
        try:
            if await self._mend() != self._new:
                await self._in_transaction(self._shadow.drop)
                await self._forget(self._new)
        except Exception as error:
            logger.warning(
                "projection %s: what a rebuild has left is still there, until the next one: %s",
                self._name,
                redacted(f"{type(error).__name__}: {error}"),
            )

    async def _clear(self) -> None:
        await self._in_transaction(self._shadow.drop)
        await self._forget(self._old)

    async def _forget(self, generation: int) -> None:
        """Let the inbox forget a generation, and the letters what it has held."""
        if generation < 1:
            return
        await self._in_transaction(_drop_held, f"{self._name}@{generation}")
        number, ever = consumer_id(self._name, generation), timedelta(days=-1)
        while await self._in_transaction(self._inbox.prune, number, ever, CLEARED_AT_ONCE):
            pass

    async def _ask(self, question: Callable[..., Any], *given: Any) -> Any:
        async with sqlite.for_reading(self._engine).connect() as connection:
            return await connection.run_sync(question, *given)

    async def _in_transaction(self, work: Callable[..., Any], *given: Any) -> Any:
        async with self._engine.begin() as connection:
            return await connection.run_sync(work, *given)

    # -- the past ------------------------------------------------------------------------------------------------------

    async def _past(self, source: From, stack: AsyncExitStack) -> _Past:
        if source == "broker":
            if self._subscriber is None:
                raise ConfigurationError(f"projection {self._name} has its events from the outbox: there is no broker")
            # A group of its own for each attempt: one that was given up has come half way.
            subscription = await self._subscriber.subscribe(self._topics, f"{self._alias}-{uuid4().hex[:8]}")
            stack.push_async_callback(subscription.close)
            return _Broker(subscription)
        names = [kind.name for kind in self._live.kinds]
        feed = await self._ask(history.feed_of, self._name, self._source, self._spellings, names)
        if source != "outbox" and isinstance(source, str):
            raise ConfigurationError(f"rebuild: the past is in the outbox, at the broker or in files, not {source!r}")
        files: Sequence[Path] = () if isinstance(source, str) else source
        if not files:
            self._total = await self._ask(history.count, feed)
        live, new = (consumer_id(self._name, generation) for generation in (self._old, self._new))
        return _Outbox(self._engine, feed, live, new, files)

    async def _go_through(self, past: _Past, *, incomplete: bool) -> None:
        began = await self._ask(lambda it: it.scalar(select(from_now())))
        await self._tell(Stage.REPLAYING)
        await self._apply_all(past, Stage.REPLAYING)
        self._incomplete = incomplete
        await self._check_complete(began)
        for _ in range(MAX_ROUNDS):
            self._rounds += 1
            await self._tell(Stage.CATCHING_UP)
            if await self._apply_all(past, Stage.CATCHING_UP) <= FEW:
                break
        await self._in_transaction(self._shadow.freshen)

    async def _apply_all(self, past: _Past, stage: Stage | None) -> int:
        """Apply all that is there now; how much that was."""
        self._amended = await self._ask(_amended, self._name)
        for place, body in self._amended.items():
            if body is not None and place in self._left_out:
                del self._left_out[place]  # somebody has redriven it since: so it can be applied
        count = 0
        async with aclosing(past.pages()) as pages:
            async for page in pages:
                count += await self._apply(page)
                if stage is not None:
                    await self._tell(stage)
        return count

    async def _apply(self, page: Sequence[Message]) -> int:
        """Apply these, those of one tenant together; how many of them were not known to be left out."""
        by_tenant: dict[str | None, list[_Opened]] = {}
        count = 0
        for message in page:
            arrival = arrival_of(message)
            place = message.headers.get("tenant_id"), arrival.event_id
            left = self._left_out.get(place)
            # Behind a version that nobody knows here, one that is known may come.
            if left is not None and (left.kind is not LetterKind.UNKNOWN or left.arrival == arrival):
                continue
            count += 1
            if (opened := self._open(message, arrival)) is not None:
                self._left_out.pop(place, None)
                by_tenant.setdefault(opened.incoming.context.tenant, []).append(opened)
        for theirs in by_tenant.values():
            await self._take_effect(theirs)
        return count

    def _open(self, message: Message, arrival: Arrival) -> _Opened | None:
        place = message.headers.get("tenant_id"), arrival.event_id
        amended = self._amended.get(place, message.body)
        if amended is None:
            self._leave_out(message, arrival, LetterKind.REJECTED, "discarded by somebody")
            return None
        if amended is not message.body:
            message = Message(message.topic, message.key, amended, message.headers)
        try:
            incoming = self._reader.read(message)
        except EventError as error:
            kind = LetterKind.UNKNOWN if isinstance(error, UnknownEventError) else LetterKind.POISON
            self._leave_out(message, arrival, kind, str(error))
            return None
        except Exception as error:  # of an upcaster, or of the event's own class
            self._give_up_on(message, arrival, error)
            return None
        if incoming is None:
            return None
        known = arrival_in(incoming)  # but for the body, which somebody may have edited: it comes as it was
        return _Opened(message, Arrival(known.event_id, known.schema_version, arrival.digest), incoming)

    def _leave_out(self, message: Message, arrival: Arrival, kind: LetterKind, reason: str) -> None:
        left = _LeftOut(message, arrival, kind, reason)
        self._left_out[message.headers.get("tenant_id"), arrival.event_id] = left

    def _give_up_on(self, message: Message, arrival: Arrival, error: Exception) -> None:
        """Leave out an event that is at fault itself; any other error ends the rebuild."""
        failure, reason = classify(error), f"{type(error).__name__}: {error}"
        if failure in (Failure.POISON, Failure.BUSINESS):
            kind = LetterKind.REJECTED if failure is Failure.BUSINESS else LetterKind.POISON
            self._leave_out(message, arrival, kind, reason)
            return
        raise StoreError(
            f"projection {self._name} is as it was: event {arrival.event_id} ({message.headers.get('event_type')}) "
            f"cannot be applied: {redacted(reason)}"
        ) from error

    async def _take_effect(self, opened: Sequence[_Opened]) -> None:
        """In one transaction. If that fails by the fault of an event, the halves are tried, down to that event."""
        attempt = 0
        while True:
            try:
                await self._write(opened)
            except Exception as error:
                failure = classify(error)
                if failure is Failure.TRANSIENT and not RETRY.exhausted(attempt := attempt + 1):
                    await asyncio.sleep(RETRY.delay(attempt))
                    continue
                if failure is not Failure.TRANSIENT and len(opened) > 1:
                    half = len(opened) // 2
                    await self._take_effect(opened[:half])
                    await self._take_effect(opened[half:])
                else:
                    self._give_up_on(opened[0].message, opened[0].arrival, error)
            return

    async def _write(self, opened: Sequence[_Opened]) -> None:
        tenant = opened[0].incoming.context.tenant
        async with self._home.unit_of_work(tenant=tenant, new_transaction=True) as uow:
            admissions = await uow.session.run_sync(self._admit, tenant, [it.arrival for it in opened])
            new = [it.incoming for it, found in zip(opened, admissions, strict=True) if found is Admission.NEW]
            await self._projection.apply(uow, new)
        self._events += len(new)

    def _admit(self, session: Session, tenant: str | None, arrivals: Sequence[Arrival]) -> Sequence[Admission]:
        # Not by the session's own method: what we do is no statement of the user's.
        number = consumer_id(self._name, self._new)
        return self._inbox.admit(Session.connection(session), number, tenant, arrivals)

    async def _check_complete(self, began: Any) -> None:
        """The new table must not lack what the old one has had before that, as far as the inbox remembers."""
        if self._incomplete:
            return
        lacking = await self._ask(self._lacking, began)
        if lacking:
            raise StoreError(
                f"projection {self._name} is as it was: it has had {lacking:,} events or more that are not found any "
                "more; name the archives that have them, or say that it may be incomplete"
            )

    def _lacking(self, connection: Connection, began: Any) -> int:
        """What was dealt with before we began was delivered before, so the past must have it."""
        history.compare_all(connection)
        old, new = inbox_table.alias(), inbox_table.alias()
        number = consumer_id(self._name, self._new)
        found = exists().where(new.c.consumer == number, new.c.tenant == old.c.tenant, new.c.event_id == old.c.event_id)
        told = exists().where(letters_table.c.consumer == self._name, letters_table.c.event_id == old.c.event_id)
        these = [old.c.consumer == consumer_id(self._name, self._old)]
        if began is not None:
            these.append(old.c.at < began)
        # Letters about what cannot be named stand in the inbox under names that only the live one knows.
        nameless = connection.scalar(
            select(func.count())
            .select_from(letters_table)
            .where(
                letters_table.c.consumer == self._name,
                or_(letters_table.c.event_id.is_(None), letters_table.c.kind == LetterKind.ALTERED),
            )
        )
        enough = len(self._left_out) + (nameless or 0) + 1_000
        rows = connection.execute(select(old.c.tenant, old.c.event_id).where(*these, ~found, ~told).limit(enough)).all()
        lacking = sum((tenant or None, event_id) not in self._left_out for tenant, event_id in rows)
        return max(0, lacking - (nameless or 0))

    # -- the swap ------------------------------------------------------------------------------------------------------

    async def _swap(self, past: _Past) -> None:
        try:
            await self._change_places(past)
        finally:  # an error may hide that it was done
            if self._live.cache is not None:
                await replaced(self._live.cache, self._live.row)

    async def _change_places(self, past: _Past) -> None:
        if self._shadow.has_row_locks:
            await self._persist(lambda: self._swap_under_lock(past))
            return
        await self._persist(lambda: self._in_transaction(stored.set_generation, self._name, -self._new))
        await self._tell(Stage.SWAPPING)
        await self._apply_all(past, None)
        await self._check_complete(None)
        await self._in_transaction(self._settle_left_out)
        if self._shadow.is_transactional:
            await self._persist(lambda: self._in_transaction(self._exchange))
        else:
            await self._persist(lambda: self._in_transaction(self._shadow.swap))
            await self._tell(Stage.SWAPPED)
            await self._persist(lambda: self._in_transaction(self._finish))

    async def _swap_under_lock(self, past: _Past) -> None:
        async with self._engine.begin() as connection:
            await connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
            # Waits for what the live one is doing; what it would do next waits for us. So all that it has done was
            # delivered, and can be seen.
            await connection.run_sync(stored.set_generation, self._name, self._new)
            await self._tell(Stage.SWAPPING)
            await self._apply_all(past, None)
            await self._check_complete(None)  # a broker may have been slow to bring what the live one has had
            await connection.run_sync(self._settle_left_out)
            await connection.run_sync(self._exchange)
            await self._tell(Stage.SWAPPED)

    async def _persist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Try again as long as others are in our way."""
        attempt = 0
        while True:
            try:
                return await work()
            except Exception as error:
                if classify(error) is not Failure.TRANSIENT or RETRY.exhausted(attempt := attempt + 1):
                    raise
                logger.debug("projection %s: no swap yet: %s", self._name, redacted(str(error)))
            await asyncio.sleep(RETRY.delay(attempt))

    def _exchange(self, connection: Connection) -> None:
        """The tables last: from then on, those who read wait for us."""
        self._finish(connection)
        self._shadow.swap(connection)

    def _finish(self, connection: Connection) -> None:
        """Let the live one be of the new generation, with the letters that belong to it."""
        _drop_held(connection, self._name)
        held = letters_table.c.kind == LetterKind.HELD
        connection.execute(
            update(letters_table).where(letters_table.c.consumer == self._alias, held).values(consumer=self._name)
        )
        # Who redrives them would apply them twice.
        applied = exists().where(
            inbox_table.c.schema_version >= 0,
            inbox_table.c.consumer == consumer_id(self._name, self._new),
            inbox_table.c.event_id == letters_table.c.event_id,
            inbox_table.c.tenant == func.coalesce(letters_table.c.tenant, _NOBODY),
        )
        still_open = letters_table.c.consumer == self._name, letters_table.c.state == LetterState.OPEN
        curable = letters_table.c.kind.not_in(UNDECIDING)
        closed = {"state": LetterState.REDRIVEN, "updated_at": from_now()}
        connection.execute(update(letters_table).where(*still_open, curable, applied).values(closed))
        stored.set_generation(connection, self._name, self._new)

    def _settle_left_out(self, connection: Connection) -> None:
        """What was left out, and the live one has dealt with, will not come again: it counts as dealt with, and has a
        letter, if there is none.
        """
        for (tenant, event_id), left in self._left_out.items():
            here = inbox_table.c.tenant == (tenant or ""), inbox_table.c.event_id == event_id
            old = inbox_table.c.consumer == consumer_id(self._name, self._old)
            if connection.scalar(select(func.count()).where(old, *here)):
                marked = Arrival(event_id, LEFT_OUT, left.arrival.digest)
                [found] = self._inbox.admit(connection, consumer_id(self._name, self._new), tenant, [marked])
                if found is not Admission.NEW:
                    continue  # it was applied in another version, or we were here before
                letter = letters_table.c.consumer == self._name, letters_table.c.event_id == event_id
                if not connection.scalar(select(func.count()).where(*letter)):
                    told = letter_about(self._name, left.message, left.kind, left.reason, arrival=left.arrival)
                    self._letters.write(connection, [told])


_NOBODY = ""


def _own_engine(engine: AsyncEngine) -> AsyncEngine:
    """Connections of our own: the live projection must not wait for ours, nor we for its."""
    own = with_own_pool(engine)
    if own.dialect.name == "sqlite":
        sqlite.configure_transactions(own.sync_engine)
        return own
    return own.execution_options(isolation_level="READ COMMITTED")


def _amended(connection: Connection, name: str) -> dict[Place, bytes | None]:
    """What people have decided about events: the body that is to have its effect, or None."""
    table = letters_table
    rows = connection.execute(
        select(
            table.c.tenant, table.c.event_id, table.c.state, func.coalesce(table.c.edited, table.c.body).label("used")
        )
        .where(table.c.consumer == name, table.c.event_id.is_not(None))
        .where(or_(table.c.state != LetterState.OPEN, table.c.edited.is_not(None)))  # a redrive may be too late for it
        .where(table.c.kind.not_in(UNDECIDING))
        .order_by(table.c.id)
    )
    return {
        (row.tenant, row.event_id): None if row.state == LetterState.DISCARDED else row.used
        for row in rows
        if row.state != LetterState.SUPERSEDED  # nobody has decided that
    }


def _drop_held(connection: Connection, consumer: str) -> None:
    table = letters_table
    waiting = table.c.kind == LetterKind.HELD, table.c.state == LetterState.OPEN
    connection.execute(delete(table).where(table.c.consumer == consumer, *waiting))


class _Outbox:
    """The outbox and, before it, archives of what has left it."""

    def __init__(self, engine: AsyncEngine, feed: history.Feed, live: int, new: int, files: Sequence[Path]) -> None:
        self._engine = engine
        self._feed = feed
        self._live, self._new = live, new
        self._files = files

    async def pages(self) -> AsyncGenerator[list[Message], None]:
        if self._files:
            async for page in history.archived(self._engine, self._files, self._feed):
                yield page
            self._files = ()
        async with aclosing(history.unseen(self._engine, self._feed, self._live, self._new)) as pages:
            async for page in pages:
                yield page


class _Broker:
    """All that a broker has kept."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    async def pages(self) -> AsyncGenerator[list[Message], None]:
        while True:
            received = None
            with suppress(TimeoutError):
                async with asyncio.timeout(QUIET):
                    received = await self._subscription.receive(history.PAGE, PAGE_BYTES)
            if received is None:
                return
            yield [it.message for it in received]
            await self._subscription.ack(received)
