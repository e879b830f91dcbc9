"""The fixture ``pillarbox``: a box that is ready for a test, with methods to inspect and disturb it.

The box is a service's own, or a new one with some routes. Each of its transports is a broker in memory, and its
database is a file in the test's folder. Nothing runs in the background: `Harness.drain` does all pending work and
returns.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload
from uuid import UUID

import msgspec
from sqlalchemy import Connection, MetaData, update
from sqlalchemy.event import listen
from sqlalchemy.ext.asyncio import AsyncEngine

from .. import clock
from ..app import Pillarbox
from ..clock import Clock
from ..consumers.consumer import Consumer
from ..consumers.report import Tally
from ..consumers.window import Work
from ..errors import ConfigurationError
from ..event import capture, registry
from ..inbox import DeadLetter
from ..outbox import Status
from ..route import Origin, Route, Router, default_aggregate_type
from ..stores.columns import from_now
from ..stores.tables import failures
from ..transport import Message, Transport
from ..transports.memory import MemoryTransport
from .fake_clock import FakeClock
from .faults import Failures, Faults
from .published import check_fields, describe, differences
from .takeover import Takeover

ATTEMPTS = 5
"""Number of rounds without other progress after which a drain gives up on failing handlers."""
ROUNDS = 200

_Event = TypeVar("_Event")


class HandlerFailedError(AssertionError):
    """A handler has failed repeatedly. Its own exception is the cause."""


@dataclass(frozen=True)
class PillarboxConfig:
    """Configuration of a test's box. Return one from a fixture ``pillarbox_config``."""

    box: Pillarbox | Callable[[], Pillarbox] | None = None
    """The box of the service, or a function that makes one. Its transports and its database are replaced during the
    test, and restored afterwards.
    """
    routes: Sequence[Route] = ()
    """Without a box: the routes of a new one."""
    transports: Collection[str] | Mapping[str, Transport] = ()
    """Without a box: transports without routes. All are brokers in memory; transport objects pass on their limits."""
    tenancy: Literal["off", "required"] = "off"
    """Without a box: whether each event needs a tenant."""
    metadata: MetaData | Sequence[MetaData] = ()
    """Tables of the service, which are created."""
    setup: Callable[[Pillarbox], Any] | None = None
    """Called with the box when it is started, before its tables are created: registers handlers and consumers, binds
    sessionmakers to ``box.engine``. May be async.
    """
    url: str | None = None
    """URL of a database to use instead of an SQLite file in the test's folder. It should be empty."""


@dataclass(frozen=True)
class Drained:
    """Counts of a drain."""

    sent: int = 0
    """Deliveries accepted by brokers and handlers."""
    handled: int = 0
    """Messages that took effect in consumers and handlers."""
    duplicates: int = 0
    """Messages that consumers had already processed."""
    spilled: int = 0
    """Messages that were moved to inbound lanes."""
    failures: int = 0
    """Failed attempts of consumers, including those that were retried successfully."""

    def __add__(self, other: Drained) -> Drained:
        mine, theirs = vars(self), vars(other)
        return Drained(**{name: mine[name] + theirs[name] for name in mine})

    def __sub__(self, other: Drained) -> Drained:
        mine, theirs = vars(self), vars(other)
        return Drained(**{name: mine[name] - theirs[name] for name in mine})


class Harness:
    """The fixture's value. Used as ``async with``; the plugin does so around every async test with the fixture."""

    def __init__(self, config: PillarboxConfig, folder: Path) -> None:
        self.clock = FakeClock()
        """The clock of the test, and of the box during the test. The database has its own, real clock."""
        self._config = config
        self._url = config.url or f"sqlite+aiosqlite:///{folder / 'pillarbox.db'}"
        self._faults = Faults()
        self._failures = Failures()
        self.box = _box_of(config)
        """The box."""
        self._takeover = Takeover(self.box, self._faults, self._failures)
        self.brokers = self._takeover.brokers
        """The brokers in memory, by the names of the transports that they replace."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clocks: list[AbstractContextManager[Clock]] = []
        self._sent_here: set[UUID] = set()
        self._numbers = itertools.count(1)

    @property
    def broker(self) -> MemoryTransport:
        """The only broker, if there is one."""
        return self._broker(None)

    # -- start and stop ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        self._clocks.append(clock.use(self.clock))
        self._clocks[-1].__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clocks.pop().__exit__(kind, error, trace)
        await self.stop()

    @property
    def started(self) -> bool:
        """Whether it must be stopped."""
        return self._loop is not None

    async def start(self) -> None:
        """Make the box ready: started, migrated, with the tables of the service. May be called repeatedly: an async
        fixture that needs the box calls it, because the test has not begun then.
        """
        if self._loop is not None:
            return
        self._takeover.begin(self._url)
        self._loop = asyncio.get_running_loop()
        try:
            await self._make_ready()
        except BaseException:
            await self.stop()
            raise

    async def _make_ready(self) -> None:
        await self.box.start()
        if self.box.takes_turns:
            await _do_not_wait_for_the_disk(self.box.engine)
        if self._config.setup is not None:
            made = self._config.setup(self.box)
            if inspect.isawaitable(made):
                await made
        await self.box.migrate()
        given = self._config.metadata
        async with self.box.engine.begin() as connection:
            for metadata in [given] if isinstance(given, MetaData) else given:
                await connection.run_sync(metadata.create_all)

    async def stop(self) -> None:
        """Stop the box, and restore its state from before the test."""
        if self._loop is None:
            return
        self._loop = None
        try:
            await self.box.stop()
        finally:
            self._takeover.end()

    def close(self) -> None:
        """Stop a box that was started outside of a test and not stopped, in the loop that is left."""
        loop = self._loop
        if loop is None:
            return
        if loop.is_closed():
            asyncio.run(self.stop())
        else:
            loop.run_until_complete(self.stop())

    # -- actions -------------------------------------------------------------------------------------------------------

    async def drain(self, *, strict: bool = True) -> Drained:
        """Send the deliveries of the outbox and process received messages, with everything that follows from them,
        until nothing is left. Does not wait for backoffs.

        A handler that keeps failing fails the test by `HandlerFailedError`, unless ``strict`` is false. Its events stay
        where they are, and the next drain retries them. Deliveries to an unavailable broker stay in the outbox.
        """
        await self.start()
        total, in_vain = Drained(), 0
        self._failures.open.clear()
        with clock.use(self.clock):
            for _ in range(ROUNDS):
                done, rejected = await self._round()
                total += done
                in_vain = 0 if done.sent + done.handled + done.spilled else in_vain + 1
                # Messages were received in the round that sent them; a processed one may have raised new events.
                if not (done.handled or done.spilled or done.failures or rejected) or in_vain == ATTEMPTS:
                    break
            else:
                raise AssertionError(f"there is no end after {ROUNDS} rounds: handlers seem to answer each other")
        if strict:
            self._raise_failure()
        return total

    async def _round(self) -> tuple[Drained, int]:
        """Do everything once. Returns the counts, and the number of rejected deliveries."""
        self._takeover.adopt()
        async with self.box.engine.begin() as connection:
            await connection.run_sync(_make_due)
        handlers = [*self.box.handlers.values()]
        before = [_done(handler) for handler in handlers]
        counts = await self.box.relay().drain()
        done = Drained(sent=counts.sent)
        for handler, known in zip(handlers, before, strict=True):
            done += _done(handler) - known
        for consumer in [*self.box.consumers.values()]:
            if consumer.effects.kinds:
                with suppress(ConnectionError):  # its broker is unavailable
                    done += _drained(await consumer.drain())
        return done, counts.rejected

    async def deliver(
        self,
        event: object,
        *,
        consumer: str | Consumer | None = None,
        key: str | UUID | None = None,
        tenant: str | None = None,
    ) -> Drained:
        """Pass an event to a consumer, or to all that handle it, as if its source had delivered it. The effect exists
        when this returns; events that the handler has raised are in the outbox, for `drain`.
        """
        await self.start()
        self._takeover.adopt()
        done = Drained()
        with clock.use(self.clock):
            for each in self._wanting(event, consumer):
                message = self._message(event, _topic_of(each, event, tenant), key, tenant)
                done += await self._deal(each, message)
                self._raise_failure(each.name, message.headers["event_id"])
        return done

    async def _deal(self, consumer: Consumer, message: Message) -> Drained:
        before = _done(consumer)
        await consumer.register()
        work = Work(message)
        for _ in range(ATTEMPTS):
            processed = await self._takeover.processors[consumer.name].process([work])
            refused = [trouble for _, trouble in processed.failed if trouble.is_final]
            if refused and consumer._spiller is not None:
                await consumer._spiller.spill(refused)
                await consumer._intakes[-1].drain(0.0)
            if refused or processed.settled:
                break
        return _done(consumer) - before

    def _wanting(self, event: object, consumer: str | Consumer | None) -> list[Consumer]:
        if isinstance(consumer, Consumer):
            return [consumer]
        known = self._takeover.consumers
        if consumer is not None:
            if consumer not in known:
                names = ", ".join(sorted(known)) or "none"
                raise ConfigurationError(f"no consumer is called {consumer!r}; known are: {names}")
            return [known[consumer]]
        name = registry.of(event).name
        found = [each for each in known.values() if any(kind.name == name for kind in each.effects.kinds)]
        if not found:
            raise ConfigurationError(f"no consumer of the box has a handler for {name!r}")
        return found

    async def send(
        self,
        event: object,
        *,
        topic: str,
        key: str | UUID | None = None,
        tenant: str | None = None,
        broker: str | None = None,
    ) -> None:
        """Publish an event on a topic, like another service, for the next `drain`. It does not count as published."""
        await self.start()
        message = self._message(event, topic, key, tenant)
        self._sent_here.add(UUID(message.headers["event_id"]))
        outcome = await self._broker(broker).send("another service", [message])
        if not outcome.accepted:
            refused = [rejection.reason for rejection in outcome.rejected]
            raise ConnectionError("; ".join(refused) or outcome.reason)

    def _message(self, event: object, topic: str, key: str | UUID | None, tenant: str | None) -> Message:
        raised = capture(event)
        kind = replace(raised.type, integration=True)  # an event that stays inside reaches consumers of the outbox
        router = Router([Route(kind.name, to="test", topic="test")], self.box.codecs.named, {}, 1)
        origin = Origin(default_aggregate_type(kind.name), str(key or raised.event_id), None, 0, 1)
        [delivery] = router.deliveries(msgspec.structs.replace(raised, type=kind), origin, tenant)
        return Message(topic, delivery.key, delivery.body, delivery.headers, number=next(self._numbers))

    def _broker(self, name: str | None) -> MemoryTransport:
        if name is None and len(self.brokers) == 1:
            return next(iter(self.brokers.values()))
        if name not in self.brokers:
            known = ", ".join(sorted(self.brokers)) or "none"
            raise ConfigurationError(f"which broker? known are: {known}; take one from pillarbox.brokers")
        return self.brokers[name]

    def _raise_failure(self, *wanted: str) -> None:
        """Raise the failure of a handler and an event, or any failure."""
        __tracebackhide__ = True
        for (handler, event_id), (said, error) in self._failures.open.items():
            if not wanted or wanted == (handler, event_id):
                raise HandlerFailedError(f"{handler} cannot handle event {event_id}: {said}") from error

    # -- results -------------------------------------------------------------------------------------------------------

    @overload
    def published(self) -> list[object]: ...

    @overload
    def published(self, kind: type[_Event]) -> list[_Event]: ...

    def published(self, kind: type | None = None) -> list[Any]:
        """The decoded events that brokers have received, of one type or all. An event on several topics, or twice on
        one, counts once; dead letters do not count.
        """
        found: dict[str, object] = {}
        for broker in self.brokers.values():
            for topic in broker.topics():
                for message in broker.sent(topic):
                    event_id = message.headers["event_id"]
                    ours = UUID(event_id) not in self._sent_here and "dlq_consumer" not in message.headers
                    if ours and event_id not in found:
                        found[event_id] = self.box.decode(message)
        return [event for event in found.values() if kind is None or isinstance(event, kind)]

    def assert_published(self, kind: type[_Event], *, times: int | None = None, **fields: object) -> list[_Event]:
        """Assert that such events were published, ``times`` times or at least once, and return them."""
        __tracebackhide__ = True
        check_fields(kind, fields)
        found = [event for event in self.published(kind) if not differences(event, fields)]
        if len(found) == times or (times is None and found):
            return found
        raise AssertionError(describe(kind, fields, times, len(found), self.published()))

    def assert_nothing_published(self, kind: type | None = None) -> None:
        """Assert that no event, or none of this type, was published."""
        __tracebackhide__ = True
        found = self.published() if kind is None else self.published(kind)
        if found:
            raise AssertionError(describe(kind, {}, 0, len(found), found))

    async def dead_letters(self, *, consumer: str | None = None, tenant: str | None = None) -> list[DeadLetter]:
        """The failed deliveries of a consumer, or of all consumers: messages that they could not process."""
        await self.start()
        return [letter async for letter in self.box.dead_letters(consumer=consumer, tenant=tenant)]

    # -- faults --------------------------------------------------------------------------------------------------------

    def duplicate(self, times: int = 1) -> None:
        """Redeliver every message to consumers this many times from now on; 0 stops it."""
        self._faults.copies = times

    def reorder(self, seed: int = 0, *, within_keys: bool = False) -> None:
        """From now on, brokers deliver messages in an order given by the seed. Each key keeps its own order unless
        ``within_keys`` is set. See `MemoryTransport.reorder`.
        """
        for broker in self.brokers.values():
            broker.reorder(seed, within_keys=within_keys)

    def crash_before_ack(self, times: int = 1) -> None:
        """Let the process die after the next batch and before its acknowledgement, so that the batch is redelivered."""
        self._faults.before_ack += times

    def crash_before_commit(self, times: int = 1) -> None:
        """Let the process die in a consumer's next transaction, after its handlers and before COMMIT, so that its
        messages are redelivered.
        """
        self._faults.before_commit += times


def _box_of(config: PillarboxConfig) -> Pillarbox:
    if config.box is None:
        given = config.transports if isinstance(config.transports, Mapping) else {}
        names = dict.fromkeys([*config.transports, *(route.to for route in config.routes)])
        transports = {name: given.get(name, MemoryTransport()) for name in names}
        return Pillarbox(transports=transports, routes=config.routes, tenancy=config.tenancy)
    if config.routes or config.transports or config.tenancy != "off":
        raise ConfigurationError("PillarboxConfig: a box has its own routes, transports and tenancy; give it alone")
    return config.box if isinstance(config.box, Pillarbox) else config.box()


async def _do_not_wait_for_the_disk(engine: AsyncEngine) -> None:
    """Turn off durability: a test's file need not survive a power cut."""

    def relax(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA synchronous = OFF").close()

    listen(engine.sync_engine, "connect", relax)
    await engine.dispose()  # existing connections


def _make_due(connection: Connection) -> None:
    """Make waiting retries due. No relay is running, so this disturbs none."""
    connection.execute(update(failures).where(failures.c.status == Status.RETRYING).values(available_at=from_now()))


def _topic_of(consumer: Consumer, event: object, tenant: str | None) -> str:
    """The topic by which a consumer would receive the event."""
    topic = consumer.topics[0] if consumer.topics else consumer.name
    if tenant is None:
        return topic
    name = registry.of(event).name
    return Route(name, to="test", topic=topic).topic_for(tenant, default_aggregate_type(name))


def _done(consumer: Consumer) -> Drained:
    """Counts of a consumer so far."""
    return _drained(consumer._report.tally)


def _drained(tally: Tally) -> Drained:
    return Drained(handled=tally.handled, duplicates=tally.duplicates, spilled=tally.spilled, failures=tally.failures)
