"""Worlds of consumers: the shipped intake and processor between a hostile broker and a database that fails.

A seed decides what is sent, what its handler makes of it, and what goes wrong. After the faults have stopped, every
message must have exactly one effect or exactly one letter, and `consumer_checker` says what is wrong with that.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID

from pillarbox.consumers.dead_letters import DeadLetterRoute
from pillarbox.consumers.handling import Handlers, MessageContext
from pillarbox.consumers.intake import Flow, SubscriptionIntake
from pillarbox.consumers.processing import Processor
from pillarbox.consumers.reading import Reader
from pillarbox.consumers.report import ConsumerReport
from pillarbox.errors import Poison, Reject
from pillarbox.event import IntegrationEvent
from pillarbox.inbox import consumer_id
from pillarbox.retry import RetryPolicy
from pillarbox.transport import Message, Received
from pillarbox.unit_of_work import UnitOfWork
from tests.simulation.consumer_broker import HostileBroker, SimulatedSubscriber
from tests.simulation.consumer_checker import Lot, Sent, check_consumed
from tests.simulation.consumer_database import MARK, SOURCE, Database, SimulatedHome, SimulatedUnitOfWork
from tests.simulation.course import ACTIVE, PATIENCE, Course, Focus, Result
from tests.simulation.loop import START, Life
from tests.simulation.wire import Wire

NAME = "simulated"
TOPIC = "simulated.topic"
GIVING_UP = 15.0
"""Seconds that a consumer bears an error which nobody knows."""
STOPPING = 60
"""Seconds in which all consumers must stop when they are told to."""
MANY_CALLS = 20_000
"""A world that needs more of them does not come to rest."""
CALLS = ("admit", "write", "commit", "park", "ack", "subscribe")
MISFORTUNES = (
    "broker goes away",
    "connection is lost",
    "database goes away",
    "database restarts",
    "others go away",
    "process is killed",
    "process is told to stop",
    "process is frozen",
    "process joins",
)
LOTS = (
    *[Lot.FINE] * 8,
    *[Lot.UNLUCKY] * 3,
    *[Lot.PUZZLING] * 2,
    *[Lot.REFUSED] * 2,
    Lot.POISONOUS,
    Lot.GARBLED,
    Lot.MISSHAPEN,
    Lot.UNHEARD_OF,
    Lot.FORGED,
)


class Noted(IntegrationEvent, name="simulation.note.taken", version=1):
    """What consumers are sent."""

    mark: int


@dataclass(frozen=True)
class SeededRetry(RetryPolicy):
    """Waits that are the same for the same seed."""

    source: Callable[[], float] = random.random

    def delay(self, attempt: int, draw: Callable[[], float] = random.random) -> float:  # noqa: ARG002  ours counts
        return super().delay(attempt, self.source)


class ConsumerWorld(Course):
    """Everything that a seed stands for.

    ``ordered``, ``batch``, ``narrow``, ``lots`` and ``focus`` leave less to chance. In a ``calm`` world nothing happens
    but what ``crash_at`` says.
    """

    process = "consumer"

    def __init__(
        self,
        seed: int,
        *,
        ordered: bool | None = None,
        batch: int | None = None,
        narrow: bool | None = None,
        lots: Sequence[Lot] | None = None,
        focus: Focus | None = None,
        calm: bool = False,
        crash_at: tuple[int, str] | None = None,
    ) -> None:
        super().__init__(seed, focus=focus, calm=calm, crash_at=crash_at)
        self.sent: dict[int, Sent] = {}
        self.others_away = False
        """Whether a service that handlers need is."""
        self.narrow = self.draw.random() < 0.4 if narrow is None else narrow
        """Whether a consumer has room for few messages only. A key that waits may take all of it, and then nothing else
        can succeed: so there is nothing in such a world that must be given up for that.
        """
        self.database = Database(self.chaos)
        self.broker = HostileBroker(
            self.chaos,
            ordered=self.draw.random() < 0.7 if ordered is None else ordered,
            deadline=self.draw.choice((None, 3.0, 8.0)),
            echoes=0.0 if calm else self.draw.choice((0.0, 0.3, 0.8)),
            prefetch=12 if self.narrow else 1_000,
        )
        self._flow = Flow(
            batch=self.draw.choice((1, 1, 3, 8)) if batch is None else batch,
            concurrency=self.draw.choice((1, 2, 4)),
            max_messages=3 if self.narrow else 1_000,
            grace=self.draw.choice((0.5, 5.0)),
        )
        self._retry = SeededRetry(base=0.2, cap=2.0, source=self.draw.random)
        self._keys = [
            (self.draw.choice((None, "one", "two")), f"k{number}") for number in range(self.draw.choice((1, 3, 8)))
        ]
        self._lots = lots
        self._is_over = False

    # -- its course ----------------------------------------------------------------------------------------------------

    async def _happen(self) -> None:
        self._plan()
        self.broker.work()
        for _ in range(self.draw.choice((1, 2, 2, 3))):
            self.chaos.later(self.chaos.between(0, 2), self.start)
        await asyncio.sleep(ACTIVE)
        self._relent()
        until = self.loop.time() + PATIENCE
        while unfinished := self._unfinished():
            if self.loop.time() > until or self.chaos.calls > MANY_CALLS:
                self.violations += [*unfinished, f"C9 liveness: {self.chaos.calls} calls"]
                break
            if any(self.sent[mark].lot in (Lot.STUBBORN, Lot.PUZZLING) for mark in self._unsettled()):
                # As long as nothing succeeds, nobody knows whose fault a failure is.
                self._publish(UUID(int=self.draw.getrandbits(128)), None, f"else{len(self.sent)}", Lot.FINE)
            await asyncio.sleep(1.0)
        await self._stop()
        self.violations += check_consumed(self.sent, self.database.log, ordered=self.broker.ordered)

    def _plan(self) -> None:
        lots = self._lots or (LOTS if self.narrow else (*LOTS, Lot.STUBBORN))
        for _ in range(self.draw.randrange(6, 20)):
            self.chaos.later(self.chaos.between(0, ACTIVE * 0.8), self._send, self.draw.choice(lots))
        if self.calm:
            return
        self._let_calls_fail(CALLS)
        for _ in range(self.draw.randrange(10)):
            self.chaos.later(self.chaos.between(0.5, ACTIVE), self._misfortune, self.draw.choice(MISFORTUNES))

    def _relent(self) -> None:
        self.chaos.note("fate relents")
        self.chaos.rate = 0.0
        self._mend()

    def _unsettled(self) -> list[int]:
        return [mark for mark in self.sent if mark not in self.database.settled]

    def _unfinished(self) -> list[str]:
        found = [f"C9 liveness: message {mark} ({self.sent[mark].lot}) waits" for mark in self._unsettled()]
        return found or ([f"C9 liveness: {self.broker.backlog} not acknowledged"] if self.broker.backlog else [])

    async def _stop(self) -> None:
        """All come to an end when they are asked to, and nothing of them stays open."""
        self._is_over = True
        for life in self.living:
            life.relay.stop()
        for _ in range(STOPPING):
            if self.living or self.database.open:
                await asyncio.sleep(1.0)
        self.violations += [f"C10 end: {life.name} does not stop" for life in self.living]
        self.violations += [f"C10 end: a transaction of {it.life.name} is open" for it in self.database.open]

    # -- messages ------------------------------------------------------------------------------------------------------

    def _send(self, lot: Lot) -> None:
        tenant, key = self.draw.choice(self._keys)
        event_id = UUID(int=self.draw.getrandbits(128))
        if lot is Lot.FORGED:
            first, second = (self._publish(event_id, tenant, key, lot) for _ in range(2))
            first.twin, second.twin = second.mark, first.mark
        else:
            self._publish(event_id, tenant, key, lot)

    def _publish(self, event_id: UUID, tenant: str | None, key: str, lot: Lot) -> Sent:
        mark = len(self.sent)
        body = {Lot.GARBLED: b"{", Lot.MISSHAPEN: b'{"mark":"many"}'}.get(lot, b'{"mark":%d}' % mark)
        headers = {
            "event_type": "simulation.note.lost" if lot is Lot.UNHEARD_OF else "simulation.note.taken",
            "schema_version": "v1",
            "event_id": str(event_id),
            "occurred_at": START.isoformat(),
            MARK: str(mark),
        }
        if tenant is not None:
            headers["tenant_id"] = tenant
        failures = self.draw.choice((1, 2, 5)) if lot in (Lot.UNLUCKY, Lot.PUZZLING) else 0
        sent = self.sent[mark] = Sent(mark, Message(TOPIC, key, body, headers), lot, failures)
        self.chaos.note("sent", mark, lot, tenant, key)
        self.broker.publish(sent.message)
        return sent

    async def handle(self, event: Noted, uow: UnitOfWork, context: MessageContext) -> None:
        """The handler of all processes: an effect and a follow-up, or what the message has before it."""
        unit = cast(SimulatedUnitOfWork, uow)
        sent = self.sent[event.mark]
        self.chaos.note("handles", event.mark, context.attempt)
        unit.add(event.mark)
        if event.mark % 2:
            await unit.flush()  # so that there is something to be undone
        if event.mark % 5 == 0:
            await asyncio.sleep(self.draw.random())
        self._raise(sent)
        unit.publish(event.mark)

    def _raise(self, sent: Sent) -> None:
        if self.others_away:
            raise ConnectionRefusedError("a service that is needed is away")
        if sent.lot is Lot.REFUSED:
            raise Reject("no stock")
        if sent.lot is Lot.POISONOUS:
            raise Poison("nobody can bear it")
        if sent.lot is Lot.STUBBORN:
            raise LookupError("nobody knows why")
        if sent.failures:
            sent.failures -= 1
            raise TimeoutError("busy") if sent.lot is Lot.UNLUCKY else LookupError("nobody knows why")

    def _acked(self, received: Sequence[Received]) -> None:
        for each in received:
            mark = int(each.message.headers[MARK])
            if mark not in self.database.settled:
                self.violations.append(f"C6 acked: message {mark}, which has neither effect nor letter")

    # -- misfortunes ---------------------------------------------------------------------------------------------------

    def _misfortune(self, what: str) -> None:
        self.chaos.happened[what] += 1
        self.chaos.note(what)
        getattr(self, f"_{what.replace(' ', '_')}")()

    def _mend(self) -> None:
        self.broker.away = self.database.away = self.others_away = False

    def _mend_later(self) -> None:
        self.chaos.later(self.chaos.between(0.1, 10), self._mend)

    def _broker_goes_away(self) -> None:
        self.broker.go_away()
        self._mend_later()

    def _connection_is_lost(self) -> None:
        if self.broker.members:
            self.broker.drop(self.draw.choice(self.broker.members))

    def _database_goes_away(self) -> None:
        self.database.away = True
        self._mend_later()

    def _database_restarts(self) -> None:
        self.database.restart()

    def _others_go_away(self) -> None:
        self.others_away = True
        self._mend_later()

    def _somebody(self) -> Life | None:
        awake = [life for life in self.living if life.paused_at is None]
        return self.draw.choice(awake) if awake else None

    def _process_is_killed(self) -> None:
        if life := self._somebody():
            self.kill(life)

    def _process_is_told_to_stop(self) -> None:
        if life := self._somebody():
            life.relay.stop()

    def _process_is_frozen(self) -> None:
        if life := self._somebody():
            self.pause(life, self.chaos.between(1, 15))

    def _process_joins(self) -> None:
        if len(self.living) < 3:
            self.start()

    # -- processes -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a process, unless all are to stop."""
        if not self._is_over:
            super().start()

    def _begin(self, life: Life) -> None:
        wire = Wire(self.chaos, life)
        home = SimulatedHome(self.database, self.chaos, life, wire)
        effects = Handlers()
        effects.add([Noted], self.handle)
        report = ConsumerReport(NAME, home.signals)
        processor = Processor(
            NAME,
            home.as_home,
            effects,
            reader=Reader(NAME, effects, home.codecs),
            inbox=self.database.inbox,
            letters=self.database.letters,
            report=report,
            identify=lambda _connection: consumer_id(NAME),
            retry=self._retry,
            timeout=PATIENCE,
            patience=GIVING_UP,
            dead_letters=DeadLetterRoute.of(NAME, SOURCE, home.as_home),
        )
        life.relay = SubscriptionIntake(
            SimulatedSubscriber(self.broker, self.chaos, life, wire, self._acked),
            [TOPIC],
            NAME,
            deals=processor,
            report=report,
            flow=self._flow,
            retry=self._retry,
        )
        self.chaos.note(life.name, "starts")
        self.loop.create_task(self._live(life)).set_name(life.name)

    def _lost(self, life: Life) -> None:
        self.broker.lost(life)
        self.database.lost(life)


def simulate_consumers(seed: int, **options: Any) -> Result:
    """Run one seed."""
    return ConsumerWorld(seed, **options).run()
