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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import Connection

from .. import clock, telemetry
from ..codec import parse_moment
from ..errors import ConfigurationError
from ..inbox import Inbox, LetterFilter, LetterKind, Letters, Redriven, consumer_id
from ..projections.projection import Projection
from ..projections.rebuild import From, Rebuild, Rebuilt, Tell
from ..redaction import redacted
from ..retry import RetryPolicy
from ..stores import inbox as stored
from ..telemetry import Sample
from ..transport import Redelivers, Subscriber, spellings_of
from .dead_letters import DeadLetterRoute
from .desk import Work
from .failure import Failure, classify
from .from_outbox import OutboxIntake
from .handling import Effects, Handlers
from .home import OUTBOX, Home
from .intake import Flow, Intake, SubscriptionIntake
from .processing import Processor
from .reading import Reader
from .report import ConsumerReport, Tally

logger = logging.getLogger("pillarbox")

HOUSEKEEPING = 5.0
"""Seconds between two notes of how far a consumer has come."""
PRUNED_AT_ONCE = 5_000
_TENANTS_NAMED = 20
PRUNED_IN_A_ROW = 10

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


RETRY = RetryPolicy(base=0.2, cap=5.0)


@dataclass(frozen=True)
class Terms:
    """How a consumer bears failures."""

    retry: RetryPolicy = RETRY
    """How long a key waits after a failure. There is no last attempt."""
    timeout: float = 300.0
    """Seconds that a transaction may take, its handlers included: a connection may be dead and not say so."""
    patience: float = 300.0
    """Seconds after which an error that nobody knows makes a letter, and any other an alarm."""
    retention: timedelta = timedelta(days=30)
    """How long the inbox remembers. Longer than a broker may deliver again, or a dead letter be sent again. Closed
    letters are kept as long; those of a projection that were discarded or edited, for ever.
    """
    ignores: Sequence[str] = ()
    """Patterns of events that may come, and that nobody here knows or wants."""


class Consumer:
    """Made by ``box.consumer()`` and ``box.projection()``."""

    def __init__(
        self,
        name: str,
        home: Home,
        effects: Effects,
        *,
        source: str,
        subscriber: Subscriber | None,
        topics: Sequence[str],
        inbox: Inbox,
        letters: Letters,
        flow: Flow,
        terms: Terms,
    ) -> None:
        self.name = name
        self.source = source
        self.topics = [*topics]
        self.effects = effects
        self._home = home
        self._subscriber = subscriber
        self._inbox = inbox
        self._letters = letters
        self.terms = terms
        self._report = ConsumerReport(name, home.signals)
        self._reader = Reader(name, effects, home.codecs, terms.ignores, spellings_of(topics, subscriber))
        self._processor = Processor(
            name,
            home,
            effects,
            reader=self._reader,
            inbox=inbox,
            letters=letters,
            report=self._report,
            identify=self.identify,
            retry=terms.retry,
            timeout=terms.timeout,
            patience=terms.patience,
            dead_letters=DeadLetterRoute.of(name, source, home),
        )
        self._intake: Intake
        if subscriber is None:
            self._intake = OutboxIntake(self._processor, flow, lambda it: home.relay_to(name, it, flow.grace))
        else:
            self._intake = SubscriptionIntake(
                subscriber,
                topics,
                name,
                deals=self._processor,
                report=self._report,
                flow=flow,
                retry=terms.retry,
                takes_turns=lambda: home.takes_turns,
            )
        if isinstance(effects, Projection):
            effects.letters = letters
            effects.read = self._reader.read_held
        self._running = False
        self._stopping = False
        self._finished = asyncio.Event()
        self._finished.set()
        self._told = Tally()
        self._subscribe()

    @property
    def kind(self) -> str:
        """What it has: ``handlers``, or a ``projection``."""
        return "handlers" if isinstance(self.effects, Handlers) else "projection"

    def on(self, *kinds: type) -> Callable[[_Handler], _Handler]:
        """Decorator: call this function for events of these types. It may ask, by annotation, for the event, a
        `UnitOfWork`, an `AsyncSession` and a `MessageContext`; what it does with them commits together with the row
        of the inbox. An event may have several handlers: they are one transaction.
        """

        def keep(handler: _Handler) -> _Handler:
            if not isinstance(self.effects, Handlers):
                raise ConfigurationError(f"{self.name} is a projection: it has its handlers in its class")
            self.effects.add(kinds, handler)
            self._subscribe()
            return handler

        return keep

    def _subscribe(self) -> None:
        self._reader.refresh()
        if self.source == OUTBOX and self.effects.kinds:
            self._home.router.feed(self.name, [*self.effects.kinds], self.terms.retry)

    # -- its life ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Consume until `stop` is called or we are cancelled."""
        self._begin()
        try:
            await self._register_patiently()
            keeping = asyncio.create_task(self._keep_house())
            try:
                if not self._stopping:
                    await self._intake.run()
            finally:
                keeping.cancel()
                await asyncio.wait([keeping])
                await self._note()
        finally:
            self._end()

    def stop(self) -> None:
        """Receive nothing more, finish what is being dealt with, and let `run` return. May be called from a signal
        handler.
        """
        if self._running:
            self._stopping = True
            self._intake.stop()

    async def finished(self) -> None:
        """Wait until `run` has returned, or is about to."""
        await self._finished.wait()

    async def drain(self, *, idle: float = 0.5) -> Tally:
        """Deal with all that is there now, and say what was done. Where the source cannot tell that there is no more,
        nothing new for ``idle`` seconds will do. A key that fails again and again is left.
        """
        self._begin()
        before = replace(self._report.tally)
        try:
            await self.register()
            await self._intake.drain(idle)
            await self._note()
        finally:
            self._end()
        return _difference(self._report.tally, before)

    async def redrive(self, letter_id: int) -> Redriven:
        """Give a letter of this consumer to the handlers once more. See `Processor.redrive`."""
        redriven = await self._processor.redrive(letter_id)
        if redriven and not self._running:  # else it is noted with all the rest
            await self._note_redrive()
        return redriven

    async def rebuild(
        self, source: From = "outbox", *, incomplete: bool = False, progress: Tell | None = None
    ) -> Rebuilt:
        """Write the table of a projection anew, from the events in the outbox, at the broker, or in these archives and
        then in the outbox, and put it in the place of the old one. It may run meanwhile, here and elsewhere.

        Refused if the old one has had events that are not found there, unless it may be ``incomplete``. ``progress`` is
        told how far it has come, and may be async.
        """
        if not isinstance(self.effects, Projection):
            raise ConfigurationError(
                f"{self.name} has handlers, and what they do is not done again: only projections can be rebuilt"
            )
        await self.register()
        rebuild = Rebuild(
            self.name,
            self._home,
            self.effects,
            source=self.source,
            topics=self.topics,
            ignores=self.terms.ignores,
            subscriber=self._subscriber,
            inbox=self._inbox,
            letters=self._letters,
            progress=progress,
        )
        return await rebuild.run(source, incomplete=incomplete)

    async def redelivery(self) -> float | None:
        """Seconds for which the source may deliver a message again, if it can say that; infinite without a limit."""
        if not isinstance(self._subscriber, Redelivers):
            return None
        return await self._subscriber.redelivery(self.topics)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._running

    @property
    def healthy(self) -> bool:
        """Whether it runs, its source is available, and every tenant with waiting messages makes progress: something of
        it was dealt with within the consumer's patience.
        """
        return self._running and self._intake.connected and not self._standstill()

    def _standstill(self) -> dict[str | None, float]:
        return self._processor.standstill(self._intake.at_hand())

    def status(self) -> dict[str, Any]:
        """What it does, for health checks: ``standstill`` names the tenants without progress, "" being none. Holds no
        keys and no payloads.
        """
        tally = self._report.tally
        return {
            "consumer": self.name,
            "healthy": self.healthy,
            "at_hand": len(self._intake.at_hand()),
            "handled": tally.handled,
            "duplicates": tally.duplicates,
            "letters": tally.letters,
            "lag": self._lag(),
            "standstill": sorted(tenant or "" for tenant in self._standstill())[:_TENANTS_NAMED],
        }

    def samples(self) -> Iterator[Sample]:
        """What gauges show of it while it runs."""
        if not self._running:
            return
        labels, backlog, at_hand = (self.name,), self._intake.backlog(), self._intake.at_hand()
        yield Sample(telemetry.UNDELIVERED, labels, len(at_hand) if backlog is None else backlog)
        yield Sample(telemetry.OLDEST_UNACKED, labels, self._lag(at_hand))
        yield Sample(telemetry.STANDSTILL, labels, len(self._standstill()))
        yield Sample(telemetry.VERSION_LAG, labels, self._report.version_lag)

    def _begin(self) -> None:
        if self._running:
            raise ConfigurationError(f"consumer {self.name} runs already")
        if not self.effects.kinds:
            raise ConfigurationError(f"consumer {self.name} has no handler: register one with @{self.name}.on(...)")
        self._running = True
        self._stopping = False
        self._finished.clear()
        self._report.begins()

    def _end(self) -> None:
        self._running = False
        self._finished.set()

    # -- its place in the database -------------------------------------------------------------------------------------

    def identify(self, connection: Connection) -> int:
        """Our number in the inbox: the first thing that a transaction of ours asks for. That of a projection depends on
        its generation, which stays as it is as long as this transaction does.
        """
        stored.read_committed(connection)
        if self.kind == "handlers":
            return consumer_id(self.name)
        return consumer_id(self.name, stored.hold_generation(connection, self.name))

    async def register(self) -> None:
        """Let people see that there is such a consumer."""
        await self._home.apart(
            stored.register_consumer, self.name, kind=self.kind, source=self.source, topics=self.topics
        )

    async def _register_patiently(self) -> None:
        """A consumer may start before its database."""
        attempt = 0
        while not self._stopping:
            try:
                await self.register()
                break
            except Exception as error:
                if classify(error) is not Failure.TRANSIENT:
                    raise
                attempt += 1
                if attempt == 1:
                    self._report.away(redacted(f"{type(error).__name__}: {error}"))
                await asyncio.sleep(self.terms.retry.delay(attempt))

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING)
            self._standstill()  # asked now and again, it knows since when
            await self._note()

    async def _note(self) -> None:
        """Write down how far we have come, and let the inbox forget what it need not know."""
        tally, position = replace(self._report.tally), self._report.position
        try:
            held = await self._home.apart(self._letters.count, LetterFilter(self.name, kinds=(LetterKind.HELD,)))
            await self._home.apart(
                stored.report_position,
                self.name,
                handled=tally.handled - self._told.handled,
                last_event_id=position.event_id,
                last_occurred_at=position.occurred_at,
                lag=self._lag(),
                held=sum(held.values()),
            )
            self._told = tally  # whatever becomes of the rest, it is not counted again
            for _ in range(PRUNED_IN_A_ROW):
                if await self._home.apart(self._prune) < PRUNED_AT_ONCE:
                    break
        except Exception as error:
            logger.debug("consumer %s: not all was noted: %s", self.name, redacted(str(error)))

    async def _note_redrive(self) -> None:
        """Count a letter that was redriven where the consumer itself does not run, and say nothing else about it."""
        self._told.handled += 1
        try:
            await self._home.apart(stored.count_handled, self.name, 1)
        except Exception as error:  # the letter has taken effect all the same
            logger.debug("consumer %s: a redrive was not noted: %s", self.name, redacted(str(error)))

    def _prune(self, connection: Connection) -> int:
        number = self.identify(connection)
        # What people have decided about events holds in every rebuild, however late.
        keep = isinstance(self.effects, Projection)
        self._letters.prune(connection, self.name, self.terms.retention, PRUNED_AT_ONCE, keep_decisions=keep)
        return self._inbox.prune(connection, number, self.terms.retention, PRUNED_AT_ONCE)

    def _lag(self, at_hand: Sequence[Work] | None = None) -> float:
        """Seconds since the oldest event at hand occurred."""
        now = clock.now()
        moments = [_occurred_at(work) for work in (self._intake.at_hand() if at_hand is None else at_hand)]
        return max(((now - moment).total_seconds() for moment in moments if moment is not None), default=0.0)


def _occurred_at(work: Work) -> datetime | None:
    with suppress(KeyError, ValueError):
        return parse_moment(work.message.headers["occurred_at"])
    return None


def _difference(after: Tally, before: Tally) -> Tally:
    return Tally(
        after.handled - before.handled,
        after.duplicates - before.duplicates,
        after.letters - before.letters,
        after.failures - before.failures,
    )
