"""The consumer: messages of some topics, their handlers, and the inbox that makes their effects happen once.

    billing = box.consumer("billing", source="pulsar", topics=["orders"])

    @billing.on(OrderPlaced)
    async def issue_invoice(event: OrderPlaced, uow: UnitOfWork) -> None:
        uow.add(Invoice.issue(event.order_id, event.total_cents))

What it does in its unit of work, the events that it raises there, and the row of the inbox are one transaction.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from .. import clock, telemetry
from ..codec import parse_moment
from ..errors import ConfigurationError
from ..inbox import Inbox, consumer_id
from ..options import check_numbers
from ..outbox import LOCAL, FailurePolicy, stable_hash
from ..redaction import described
from ..retry import RetryPolicy
from ..route import PATTERN, OnFailure
from ..stores import inbox as stored
from ..stores.operations import retry_now
from ..telemetry import Sample
from ..transport import Redelivers, Subscriber, spellings_of
from . import lives
from .box import OUTBOX, Box
from .dead_letters import DeadLetterRoute
from .failure import Failure, classify
from .handling import Effects, Handlers, Reader
from .hands import Hands
from .intake import Flow, Intake, SubscriptionIntake
from .lanes import LaneDestination, LaneIntake
from .processing import Processor
from .progress import Progress
from .report import FULL_LANES, NO_DATABASE, NO_HOUSEKEEPING, ConsumerReport, Tally
from .spilling import Spiller
from .window import Work

logger = logging.getLogger("pillarbox")

HOUSEKEEPING = 5.0
"""Seconds between two notes of how far a consumer has come."""
PRUNED_AT_ONCE = 5_000
REGISTER_CAP = 1.0
"""The longest wait between two tries of a consumer that starts before its database: it may be told to stop."""
_TENANTS_NAMED = 20
_MOMENT = len("2026-01-01T00:00:00.000000Z")
PRUNED_IN_A_ROW = 10

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


RETRY = RetryPolicy(base=0.2, cap=30.0, attempts=12)


@dataclass(frozen=True)
class Terms:
    """How a consumer bears failures."""

    retry: RetryPolicy = RETRY
    """How long a key waits after a failure. An unknown error fails the delivery after its ``attempts``, while
    those that the circumstances explain are retried without end."""
    timeout: float = 300.0
    """Seconds that a transaction may take, its handlers included: a connection may be dead and not say so."""
    patience: float = 300.0
    """Seconds after which a tenant of which messages wait and none takes effect makes the consumer unhealthy."""
    retention: timedelta = timedelta(days=30)
    """How long the inbox remembers. Longer than a broker may deliver again, or a dead letter be sent again."""
    ignores: Sequence[str] = ()
    """Patterns of events that may come, and that nobody here knows or wants."""
    on_failure: OnFailure = FailurePolicy.SKIP
    """Whether later messages of a key wait for a person behind one that has failed for good."""
    max_spilled: int = 1_000_000
    """How many messages may wait in its lanes before it receives nothing more: they fill its database."""

    def check(self, where: str) -> None:
        """Refuse what cannot work. ``where`` begins the message."""
        check_numbers(where, self)
        if not isinstance(self.retry, RetryPolicy):
            raise ConfigurationError(f"{where}: retry is a RetryPolicy, got {self.retry!r}")
        if not isinstance(self.retention, timedelta) or self.retention <= timedelta(0):
            raise ConfigurationError(
                f"{where}: retention must be a timedelta above 0, like timedelta(days=30), got {self.retention!r}"
            )
        if self.on_failure not in [*FailurePolicy]:
            raise ConfigurationError(f"{where}: on_failure is 'park' or 'skip', got {self.on_failure!r}")
        given: object = self.ignores
        patterns = [*given] if isinstance(given, Collection) and not isinstance(given, str | bytes) else [given]
        if wrong := [it for it in patterns if it is given or not isinstance(it, str) or not PATTERN.fullmatch(it)]:
            raise ConfigurationError(
                f"{where}: ignores is a list of patterns, like ['orders.order.paid', 'orders.**'], got {wrong[0]!r}"
            )


class Consumer:
    """Made by ``box.consumer()``."""

    kind = "handlers"
    """What it has: ``handlers``, or a ``projection``."""

    def __init__(
        self,
        name: str,
        box: Box,
        effects: Effects,
        *,
        source: str,
        subscriber: Subscriber | None,
        topics: Sequence[str],
        inbox: Inbox,
        flow: Flow,
        terms: Terms,
    ) -> None:
        self.name = name
        self.source = source
        self.topics = [*topics]
        self.effects = effects
        self._box = box
        self.subscriber = subscriber
        self._inbox = inbox
        self.terms = terms
        self._report = ConsumerReport(name, box.signals)
        self._reader = Reader(name, effects, box.codecs, terms.ignores, spellings_of(topics, subscriber))
        self._progress = Progress(terms.patience)
        self._flow = flow
        self._hands = Hands(flow.concurrency)
        self._spiller = None
        if subscriber is not None:
            self._spiller = Spiller(name, box, inbox, self.identify, retry=terms.retry, on_failure=terms.on_failure)
        self._dead_letters = DeadLetterRoute.of(name, source, box)
        self._processor = Processor(
            name,
            box,
            effects,
            reader=self._reader,
            inbox=inbox,
            report=self._report,
            progress=self._progress,
            identify=self.identify,
            timeout=terms.timeout,
            spiller=self._spiller,
            parks=terms.on_failure == FailurePolicy.PARK,
        )
        self._intakes = self._make_intakes(self._processor, subscriber, terms.retry)
        self._users = 0
        """How many let it work: `run`, `drain`, and each relay that it is `served` to."""
        self._stopping = False
        self._finished = asyncio.Event()
        self._finished.set()
        self._noted = 0
        """How many of the handled messages the database knows of."""
        self._subscribe()

    def _make_intakes(self, processor: Processor, subscriber: Subscriber | None, retry: RetryPolicy) -> list[Intake]:
        self.destination = LaneDestination(
            processor,
            progress=self._progress,
            hands=self._hands,
            batch=self._flow.batch,
            grace=self._flow.grace,
            retry=retry,
            dead_letters=self._dead_letters,
        )
        inbound = self._spiller is not None
        relay = partial(self._box.relay_to, self.name, grace=self._flow.grace, inbound=inbound)
        route = f"consumer:{self.name}" if inbound else f"{LOCAL}:{self.name}"
        make_due = partial(self._box.apart, retry_now, stable_hash(route))
        intakes: list[Intake] = [LaneIntake(self.destination, relay, make_due)]
        if subscriber is not None and self._spiller is not None:
            received = SubscriptionIntake(
                subscriber,
                self.topics,
                self.name,
                processor=processor,
                spiller=self._spiller,
                progress=self._progress,
                hands=self._hands,
                report=self._report,
                flow=self._flow,
                retry=retry,
            )
            intakes.insert(0, received)
        return intakes

    def on(self, *kinds: type) -> Callable[[_Handler], _Handler]:
        """Decorator: call this function for events of these types. It may ask, by annotation, for the event, a
        `UnitOfWork`, an `AsyncSession` and a `MessageContext`; what it does with them commits together with the row
        of the inbox. An event may have several handlers: they are one transaction.
        """

        effects = self.effects
        if not isinstance(effects, Handlers):
            raise ConfigurationError(f"{self.name} is a projection: it has its handlers in its class")
        if wrong := [kind for kind in kinds if not isinstance(kind, type)]:
            raise ConfigurationError(
                f"consumer {self.name}: on takes event types, as in @{self.name}.on(OrderPlaced), got {wrong[0]!r}"
            )

        def keep(handler: _Handler) -> _Handler:
            effects.add(kinds, handler)
            self._subscribe()
            return handler

        return keep

    def _subscribe(self) -> None:
        self._reader.refresh()
        if self.source == OUTBOX and self.effects.kinds:
            self._box.router.feed(self.name, [*self.effects.kinds], self.terms.retry, self.terms.on_failure)

    # -- its life ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Consume until `stop` is called or we are cancelled."""
        with self._working():
            await self._register_patiently(Failure.TRANSIENT)
            try:
                async with _beside(self._keep_house()):
                    if not self._stopping:
                        await self._run_intakes()
            finally:
                await self._note()
                await self._end_life()

    @asynccontextmanager
    async def served(self, *, draining: bool) -> AsyncIterator[None]:
        """Work as long as the block does, for a relay that sends to `destination`: there may be several at a time."""
        try:
            with self._working(alone=False):
                if draining:
                    await self.register()
                    async with _beside(self._keep_house()):
                        with self._draining():
                            yield
                else:
                    async with _beside(self._register_and_keep_house()):
                        yield
        finally:
            if not self._users:
                await self.destination.finish()
                await self._note()

    async def _run_intakes(self) -> None:
        """Until all have come to their end. If one fails, so do the others."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for intake in self._intakes:
                    tasks.create_task(intake.run())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def stop(self) -> None:
        """Receive nothing more, finish what is being dealt with, and let `run` return. May be called from a signal
        handler.
        """
        if self._users:
            self._stopping = True
            for intake in self._intakes:
                intake.stop()

    async def finished(self) -> None:
        """Wait until `run` has returned, or is about to."""
        await self._finished.wait()

    async def drain(self, *, idle: float = 0.5) -> Tally:
        """Deal with all that is there now, and say what was done. Where the source cannot tell that there is no more,
        nothing new for ``idle`` seconds will do. A key that fails again and again is left.
        """
        with self._working():
            before = replace(self._report.tally)
            await self.register()
            async with _beside(self._keep_house()):
                with self._draining():
                    while await self._drain_each(idle) and self._spiller is not None and not self._stopping:
                        pass  # what one has settled may be what another waits for
            await self._note()
        return self._report.tally - before

    @contextmanager
    def _draining(self) -> Iterator[None]:
        """Try every key."""
        self._progress.holds = False
        try:
            with self.destination.draining():
                yield
        finally:
            self._progress.holds = True

    async def _drain_each(self, idle: float) -> bool:
        """Whether anything was settled."""
        *received, lanes = self._intakes
        settled = [await intake.drain(idle) for intake in received]
        if await self._has_lanes_to_drain():
            settled.append(await lanes.drain(idle))
            await self._count_waiting()  # there may be room again
        return any(settled)

    async def _has_lanes_to_drain(self) -> bool:
        if self._spiller is None or await self._count_waiting():
            return True
        # Without a claim there may be what another process has not settled, and what a rebuild has asked for.
        return bool(await self._box.inbound.ready([self._spiller.route.id]))

    async def redelivery(self) -> float | None:
        """Seconds for which the source may deliver a message again, if it can say that; infinite without a limit."""
        if not isinstance(self.subscriber, Redelivers):
            return None
        return await self.subscriber.redelivery(self.topics)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._users > 0

    @property
    def healthy(self) -> bool:
        """Whether it runs, its source is available, there is room in its lanes, and every tenant with waiting messages
        makes progress: something of it was dealt with within the consumer's patience.
        """
        if not self.alive or self._is_full:
            return False
        return all(it.connected for it in self._intakes) and self.progresses

    @property
    def progresses(self) -> bool:
        """Whether every tenant with waiting messages makes progress."""
        return not self._standstill()

    @property
    def _is_full(self) -> bool:
        return self._spiller is not None and self._spiller.is_full

    def _standstill(self) -> dict[str | None, float]:
        return self._progress.standstill({work.tenant for work in self._at_hand()})

    def _at_hand(self) -> list[Work]:
        return [work for intake in self._intakes for work in intake.at_hand()]

    def status(self) -> dict[str, Any]:
        """What it does, for health checks: ``standstill`` names the tenants without progress, "" being none; ``full``
        says that as many messages wait in its lanes as may. Holds no keys and no payloads.
        """
        tally, at_hand = self._report.tally, self._at_hand()
        return {
            "consumer": self.name,
            "healthy": self.healthy,
            "at_hand": len(at_hand),
            "handled": tally.handled,
            "duplicates": tally.duplicates,
            "spilled": tally.spilled,
            "lag": self._lag(at_hand),
            "full": self._is_full,
            "standstill": sorted(tenant or "" for tenant in self._standstill())[:_TENANTS_NAMED],
        }

    def samples(self) -> Iterator[Sample]:
        """What gauges show of it while it runs."""
        if not self.alive:
            return
        labels, backlog, at_hand = (self.name,), self._intakes[0].backlog(), self._at_hand()
        yield Sample(telemetry.UNDELIVERED, labels, len(at_hand) if backlog is None else backlog)
        yield Sample(telemetry.OLDEST_UNACKED, labels, self._lag(at_hand))
        yield Sample(telemetry.STANDSTILL, labels, len(self._standstill()))
        yield Sample(telemetry.VERSION_LAG, labels, self._report.version_lag)

    @contextmanager
    def _working(self, *, alone: bool = True) -> Iterator[None]:
        if alone and self._users:
            raise ConfigurationError(f"consumer {self.name} runs already")
        if not self.effects.kinds:
            raise ConfigurationError(f"consumer {self.name} has no handler: register one with @{self.name}.on(...)")
        if not self._users:
            if self._box.takes_turns:  # only now the database is known for sure
                self._hands.concurrency = 1
            self._stopping = False
            self._finished.clear()
            self._report.begins()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._finished.set()

    # -- its place in the database -------------------------------------------------------------------------------------

    def identify(self, connection: Connection) -> int:
        """Our number in the inbox: the first thing that a transaction of ours asks for."""
        stored.read_committed(connection)
        return consumer_id(self.name)

    async def register(self) -> None:
        """Let people see that there is such a consumer."""
        await self._box.apart(
            stored.register_consumer, self.name, kind=self.kind, source=self.source, topics=self.topics
        )
        await self._count_waiting()

    async def _count_waiting(self) -> int:
        """How many messages wait in our lanes, and whether there may be more."""
        if self._spiller is None:
            return 0
        most = self.terms.max_spilled
        waiting = await self._box.apart(self._inbox.count_claims, self._spiller.claims, most)
        self._spiller.is_full = waiting >= most
        self._report.outage(FULL_LANES, f"{most:,}" if self._spiller.is_full else None)
        return waiting

    async def _register_patiently(self, *borne: Failure) -> None:
        """A consumer may start before its database."""
        attempt = 0
        while not self._stopping:
            try:
                await self.register()
                await self._begin_life()
            except Exception as error:
                if classify(error) not in borne:
                    raise
                attempt += 1
                self._report.outage(NO_DATABASE, described(error))
                await asyncio.sleep(min(self.terms.retry.delay(attempt), REGISTER_CAP))
            else:
                self._report.outage(NO_DATABASE, None)
                return

    async def _register_and_keep_house(self) -> None:
        await self._register_patiently(Failure.TRANSIENT, Failure.UNKNOWN)  # as a relay waits for tables, too
        await self._keep_house()

    async def _begin_life(self) -> None:
        """If a process has died, it may have died of a message: those that come first are not tried before they are in
        lanes, which find out.
        """
        if self._spiller is not None:
            died = await self._box.apart(stored.begin_life, self.name, lives.this(), has_died=lives.has_died)
            self._spiller.untrusted = self._flow.concurrency * self._flow.batch if died else 0
            if died:
                self.destination.be_patient()

    async def _end_life(self) -> None:
        if self._spiller is not None:
            with suppress(Exception):  # then the next process is careful for nothing
                await self._box.apart(stored.end_life, self.name, lives.this())

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING)
            self._standstill()  # asked now and again, it knows since when
            await self._note()

    async def _note(self) -> None:
        """Write down how far we have come, and let the inbox forget what it need not know."""
        handled, position = self._report.tally.handled, self._report.position
        try:
            await self._box.apart(
                stored.report_position,
                self.name,
                handled=handled - self._noted,
                last_event_id=position.event_id,
                last_occurred_at=position.occurred_at,
                lag=self._lag(self._at_hand()),
            )
            self._noted = handled  # whatever becomes of the rest, it is not counted again
            await self._count_waiting()
            for _ in range(PRUNED_IN_A_ROW):
                if await self._box.apart(self._prune) < PRUNED_AT_ONCE:
                    break
        except Exception as error:
            self._report.outage(NO_HOUSEKEEPING, described(error))
        else:
            self._report.outage(NO_HOUSEKEEPING, None)

    def _prune(self, connection: Connection) -> int:
        number = self.identify(connection)
        return self._inbox.prune(connection, number, self.terms.retention, PRUNED_AT_ONCE)

    def _lag(self, at_hand: Sequence[Work]) -> float:
        """Seconds since the oldest event at hand occurred. Thousands may be at hand, and parsing each would be slow.
        Texts of the form that Pillarbox writes are in the order of their moments, so only the first of them is parsed.
        """
        texts = {work.message.headers.get("occurred_at", "") for work in at_hand}
        alike = {text for text in texts if len(text) == _MOMENT and text.endswith("Z")}
        moments = [*map(_moment, texts - alike), _moment(min(alike, default=""))]
        oldest = min(filter(None, moments), default=None)
        return 0.0 if oldest is None else max(0.0, (clock.now() - oldest).total_seconds())


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do this as long as the block lasts."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _moment(text: str) -> datetime | None:
    with suppress(ValueError):
        return parse_moment(text)
    return None
