"""Worlds of consumers: the shipped consumer between a hostile broker and a database that fails.

A seed decides what is sent, what its handler makes of it, what goes wrong, and what people do about it. Each process
has the intake from the broker, and a relay that brings it what was spilled. After the faults have stopped, every
message must have exactly one effect, or one delivery that has failed or was discarded, or that waits behind such a one
if keys park: `consumer_checker` says what is wrong.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast
from unittest.mock import patch
from uuid import UUID

from pillarbox.consumers import intake
from pillarbox.consumers.consumer import Consumer, Terms
from pillarbox.consumers.handling import EventsFailedError, Handlers, Incoming, MessageContext
from pillarbox.consumers.intake import Flow
from pillarbox.errors import Poison, Reject
from pillarbox.event import IntegrationEvent
from pillarbox.inbox import consumer_id
from pillarbox.outbox import FailurePolicy, Status
from pillarbox.relay import Pacing
from pillarbox.retry import RetryPolicy
from pillarbox.transport import Message, Received
from pillarbox.unit_of_work import UnitOfWork
from tests.simulation.consumer_broker import HostileBroker, SimulatedSubscriber
from tests.simulation.consumer_checker import Found, Lot, Sent, check_consumed
from tests.simulation.consumer_database import MARK, SOURCE, Database, SimulatedBox, SimulatedUnitOfWork
from tests.simulation.course import ACTIVE, PATIENCE, Course, Focus, Result
from tests.simulation.loop import START, Life
from tests.simulation.wire import Wire

NAME = "simulated"
TOPIC = "simulated.topic"
LEASE = 5.0
STOPPING = 60
"""Seconds in which all consumers must stop when they are told to."""
MANY_CALLS = 50_000
"""A world that needs more of them does not come to rest."""
LAST_PRUNE = 60.0
"""Seconds after the last fault at which the inbox forgets all that it may. Nothing is on its way for so long."""
ORDERS = ("redrive", "redrive", "edit", "discard", "leave")
CALLS = ("admit", "write", "commit", "spill", "ack", "subscribe", "announce", "amend", "settle")
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
    *["person gives an order"] * 4,
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
    Lot.NEWER,
    Lot.STUBBORN,
)


class Noted(IntegrationEvent, name="simulation.note.taken", version=1):
    """What consumers are sent."""

    mark: int


class NotedAnew(IntegrationEvent, name="simulation.note.taken", version=2):
    """What they can read once they have been deployed anew."""

    mark: int


@dataclass(frozen=True)
class SeededRetry(RetryPolicy):
    """Waits that are the same for the same seed."""

    source: Callable[[], float] = random.random

    def delay(self, attempt: int, draw: Callable[[], float] = random.random) -> float:  # noqa: ARG002  ours counts
        return super().delay(attempt, self.source)


class Collecting(Handlers):
    """Says which of several events have failed, as a projection does."""

    names_failures = True

    async def apply(self, uow: UnitOfWork, incoming: Sequence[Incoming]) -> None:
        errors: dict[int, Exception] = {}
        for place, one in enumerate(incoming):
            try:
                await super().apply(uow, [one])
            except Exception as error:
                if len(incoming) == 1:
                    raise
                errors[place] = error
        if errors:
            raise EventsFailedError(errors)


class ConsumerWorld(Course):
    """Everything that a seed stands for.

    What is given besides the ``seed`` leaves less to chance. In a ``calm`` world nothing happens but what ``crash_at``
    says.
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
        parks: bool | None = None,
        counts: bool | None = None,
        hosts: int | None = None,
        focus: Focus | None = None,
        calm: bool = False,
        crash_at: tuple[int, str] | None = None,
    ) -> None:
        super().__init__(seed, focus=focus, calm=calm, crash_at=crash_at)
        self._own = random.Random(f"{seed} consumers")
        self.sent: dict[int, Sent] = {}
        self.others_away = False
        """Whether a service that handlers need is."""
        self.deployed = False
        """Whether consumers can read the newer version."""
        self.unread: set[int] = set()
        self.narrow = self.draw.random() < 0.4 if narrow is None else narrow
        """Whether a consumer has room for few messages only."""
        self.fails: str | None = "one" if lots is None and not calm and seed % 10 == 3 else None
        """A tenant of which everything fails as long as fate does not relent."""
        self.parks = seed % 4 == 2 if parks is None else parks
        """Whether later messages of a key wait for a person behind one that has failed for good."""
        self.prunes = not calm and seed % 10 == 5
        """Whether the inbox forgets what it may before people look at what has failed."""
        self.database = Database(self.chaos, log=seed % 2 == 0)
        self.broker = HostileBroker(
            self.chaos,
            ordered=self.draw.random() < 0.7 if ordered is None else ordered,
            deadline=self.draw.choice((None, 3.0, 8.0)),
            echoes=0.0 if calm else self.draw.choice((0.0, 0.3, 0.8)),
            prefetch=12 if self.narrow else 1_000,
            counts=self._own.random() < 0.5 if counts is None else counts,
        )
        self._flow = Flow(
            batch=self.draw.choice((1, 1, 3, 8)) if batch is None else batch,
            concurrency=self.draw.choice((1, 2, 4)),
            max_messages=3 if self.narrow else 1_000,
            grace=self.draw.choice((0.5, 5.0)),
        )
        self._retry = SeededRetry(base=0.2, cap=2.0, attempts=6, source=self.draw.random)
        self._keys = [
            (self.draw.choice((None, "one", "two")), f"k{number}") for number in range(self.draw.choice((1, 3, 8)))
        ]
        if self.draw.random() < 0.2:
            self._keys.append((None, ""))
        self._deadly = seed % 10 == 7
        self._fatal = seed % 10 in (1, 7)
        self._hosts = self._own.choice((1, 1, 1, 2)) if hosts is None else hosts
        """How many hosts have processes. Each misses those of its own only that have died."""
        self._collects = seed % 3 == 1
        self._lots = lots
        self._is_over = False

    # -- its course ----------------------------------------------------------------------------------------------------

    async def _happen(self) -> None:
        with patch.object(intake, "REJOIN", self._retry):  # its own waits are drawn from no seed
            await self._go_on()

    async def _go_on(self) -> None:
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
            self._look_at_the_dead()
            await asyncio.sleep(1.0)
        await self._stop()
        self._judge()

    def _plan(self) -> None:
        lots = self._lots or (*LOTS, *[Lot.DEADLY] * self._deadly, *[Lot.FATAL] * self._fatal)
        if self.prunes:  # of two with one id, the inbox may forget the one before a person has the other one tried
            lots = [lot for lot in lots if lot not in (Lot.FORGED, Lot.NEWER)]
        for _ in range(self.draw.randrange(6, 20)):
            self.chaos.later(self.chaos.between(0, ACTIVE * 0.8), self._send, self.draw.choice(lots))
        if self.calm:
            return
        for number in range(30 if self.fails else 0):
            self.chaos.later(self.chaos.between(0, 3), self._publish, self.new_id(), self.fails, f"f{number}", Lot.FINE)
        self._let_calls_fail(CALLS)
        self.chaos.later(self.chaos.between(0, ACTIVE * 2), self._deploy)
        for _ in range(self.draw.randrange(12)):
            self.chaos.later(self.chaos.between(0.5, ACTIVE), self._misfortune, self.draw.choice(MISFORTUNES))

    def new_id(self) -> UUID:
        """Unlike any other, and the same for the same seed."""
        return UUID(int=self.draw.getrandbits(128))

    def _relent(self) -> None:
        self.chaos.note("fate relents")
        self.chaos.rate = 0.0
        self.fails = None
        self._mend()

    def _deploy(self) -> None:
        self.chaos.note("deployed")
        spilled = [stored.row.headers for stored in self.database.store.rows()]
        at_hand = [it.message.headers for life in self.living for it in life.relay._at_hand()]  # or just being spilled
        self.unread = {int(headers[MARK]) for headers in spilled + at_hand if headers["schema_version"] == "v2"}
        self.deployed = True
        for life in self.living:
            life.relay.on(NotedAnew)(self.handle)

    def _judge(self) -> None:
        rows: defaultdict[int, list[Status]] = defaultdict(list)
        for stored in self.database.store.rows():
            rows[self._mark(stored)].append(stored.status)
        self.violations += self.database.wrong + self.database.store.wrong_gates() + self.database.store.stale_claims()
        late = {self._mark(self.database.store.row(row)) for row in self.database.store.ever_failed}
        late |= {self._mark(it) for it in self.database.store.rows() if "pillarbox_failure" in it.row.headers}
        found = Found(self.database.log, rows, late, self.unread, parks=self.parks)
        self.violations += check_consumed(self.sent, found, ordered=self.broker.ordered)

    def _unfinished(self) -> list[str]:
        waiting = [it for it in self.database.store.rows() if it.status not in (Status.SENT, Status.DISCARDED)]
        left = {it.id for it in waiting if it.status is Status.FAILED and self._is_left(it)}
        excused = left.union(self.database.store.waits_for_person(left) if self.parks else ())
        found = [f"C9 liveness: message {self._mark(it)} is {it.status}" for it in waiting if it.id not in excused]
        if self.broker.backlog:
            found.append(f"C9 liveness: {self.broker.backlog} not acknowledged")
        return found or (["C9 liveness: the inbox was not pruned"] if self.prunes else [])

    def _is_left(self, stored: Any) -> bool:
        return "leave" in self.sent[self._mark(stored)].asked and not self.database.store.is_requested(stored.id)

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
        event_id = self.new_id()
        if lot in (Lot.FORGED, Lot.NEWER):
            newer = self.draw.choice((0, 1))
            first, second = (
                self._publish(event_id, tenant, key, lot, 1 + (lot is Lot.NEWER and number == newer))
                for number in range(2)
            )
            first.twin, second.twin = second.mark, first.mark
        else:
            self._publish(event_id, tenant, key, lot)

    def _publish(self, event_id: UUID, tenant: str | None, key: str, lot: Lot, version: int = 1) -> Sent:
        mark = len(self.sent)
        body = {Lot.GARBLED: b"{", Lot.MISSHAPEN: b'{"mark":"many"}'}.get(lot, b'{"mark":%d}' % mark)
        headers = {
            "event_type": "simulation.note.lost" if lot is Lot.UNHEARD_OF else "simulation.note.taken",
            "schema_version": f"v{version}",
            "event_id": str(event_id),
            "occurred_at": START.isoformat(),
            MARK: str(mark),
        }
        if tenant is not None:
            headers["tenant_id"] = tenant
        failures = self.draw.choice((1, 2, 5)) if lot in (Lot.UNLUCKY, Lot.PUZZLING, Lot.DEADLY) else 0
        sent = self.sent[mark] = Sent(mark, Message(TOPIC, key, body, headers), lot, failures)
        self.chaos.note("sent", mark, lot, tenant, key)
        self.broker.publish(sent.message)
        return sent

    async def handle(self, event: Noted | NotedAnew, uow: UnitOfWork, context: MessageContext) -> None:
        """The handler of all processes: an effect and a follow-up, or what the message has before it."""
        unit = cast(SimulatedUnitOfWork, uow)
        sent = self.sent[event.mark]
        self.chaos.note("handles", event.mark, context.attempt)
        unit.add(event.mark)
        if event.mark % 2:
            await unit.flush()  # so that there is something to be undone
        if event.mark % 5 == 0:
            await asyncio.sleep(self.draw.random())
        if (sent.lot is Lot.DEADLY and sent.failures) or (sent.lot is Lot.FATAL and "cured" not in sent.asked):
            if sent.lot is Lot.FATAL:
                await asyncio.sleep(self._own.choice((0.0, 0.0, 3.0)))
            sent.failures -= 1
            sent.deaths += 1
            self.kill(unit.transaction.life)
            await asyncio.sleep(1.0)
        self._raise(sent, context.tenant)
        unit.publish(event.mark)

    def _raise(self, sent: Sent, tenant: str | None) -> None:
        if self.others_away or (tenant is not None and tenant == self.fails):
            raise ConnectionRefusedError("a service that is needed is away")
        if "cured" in sent.asked:
            return
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
            sent = self.sent[int(each.message.headers[MARK])]
            known = {sent.mark} if sent.twin is None or sent.lot is Lot.FORGED else {sent.mark, sent.twin}
            if known.isdisjoint(self.database.settled):
                self.violations.append(f"C6 acked: message {sent.mark}, which has neither effect nor delivery")

    @staticmethod
    def _mark(stored: Any) -> int:
        return int(stored.row.headers[MARK])

    # -- people --------------------------------------------------------------------------------------------------------

    def _look_at_the_dead(self) -> None:
        """Somebody decides about every delivery that has failed for good."""
        if self.prunes:
            self._prune()
            return
        for stored in self.database.store.rows():
            if stored.status is Status.FAILED and not self.database.store.is_requested(stored.id):
                self._order(stored, self.draw.choice(ORDERS))

    def _person_gives_an_order(self) -> None:
        rows = self.database.store.rows()
        if found := [it for it in rows if it.status not in (Status.SENT, Status.DISCARDED)] or [*rows]:
            self._order(self.draw.choice(found), self.draw.choice(ORDERS[:-1]))

    def _order(self, stored: Any, action: str) -> None:
        sent = self.sent[self._mark(stored)]
        self.chaos.note("order", action, stored.id, sent.mark)
        sent.asked.add(action)
        if action == "leave":
            return
        if action != "discard" and (self.draw.random() < 0.5 or sent.lot is Lot.FATAL):
            sent.asked.add("cured")
        body = b'{"mark":%d}' % sent.mark if action == "edit" else None
        self.database.store.request(stored.id, action, body=body, event_id=stored.row.event_id)

    def _prune(self) -> None:
        """The inbox forgets all that nobody can bring again any more, and then some of the rest comes again."""
        if self.loop.time() < ACTIVE + LAST_PRUNE or self.broker.backlog or self.database.open:
            return
        self.prunes = False
        count = self.database.inbox.prune(None, consumer_id(NAME), timedelta(seconds=-1), 1_000)
        self.chaos.note("pruned", count)
        store = self.database.store
        waiting = [it.id for it in store.rows() if it.status not in (Status.SENT, Status.DISCARDED)]
        gone = store.gone(waiting)  # a process that died may not have said so: these have taken effect
        for row in waiting:
            if row not in gone:
                self.broker.publish(self.sent[self._mark(store.row(row))].message)

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
        life.host = self._births % self._hosts
        wire = Wire(self.chaos, life)
        pacing = Pacing(lease=LEASE, batch=self.draw.choice((2, 5, 50)), look=4.0, grace=self._flow.grace)
        box = SimulatedBox(self.database, self.chaos, life, wire, pacing)
        effects = Collecting() if self._collects else Handlers()
        life.relay = consumer = Consumer(
            NAME,
            box.as_box,
            effects,
            source=SOURCE,
            subscriber=SimulatedSubscriber(self.broker, self.chaos, life, wire, self._acked),
            topics=[TOPIC],
            inbox=self.database.inbox,
            flow=self._flow,
            terms=Terms(
                retry=self._retry,
                timeout=PATIENCE,
                patience=PATIENCE,
                on_failure=FailurePolicy.PARK if self.parks else FailurePolicy.SKIP,
            ),
        )
        consumer.on(*[Noted, NotedAnew] if self.deployed else [Noted])(self.handle)
        self.chaos.note(life.name, "starts")
        self.loop.create_task(self._live(life)).set_name(life.name)

    def _lost(self, life: Life) -> None:
        self.broker.lost(life)
        self.database.lost(life)


def simulate_consumers(seed: int, **options: Any) -> Result:
    """Run one seed."""
    return ConsumerWorld(seed, **options).run()
