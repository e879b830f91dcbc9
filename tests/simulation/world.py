"""A world: writers, people, relays, brokers, and what happens to them. A seed decides all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from contextvars import Context, copy_context
from dataclasses import replace
from typing import Any, cast
from uuid import UUID

from pillarbox.doorbell import Doorbell
from pillarbox.outbox import FailurePolicy, LaneName, RouteRecord, Row, Status
from pillarbox.relay import Pacing, Relay, RelayStore
from pillarbox.retry import RetryPolicy
from pillarbox.transport import Message
from tests.simulation.brokers import Broker, BrokerPublisher, NumberedBroker, event_of
from tests.simulation.checker import Entry, Identity, Ledger, check
from tests.simulation.course import ACTIVE, PATIENCE, Course, Focus, Result
from tests.simulation.fate import Fate
from tests.simulation.loop import Life
from tests.simulation.poison import Poison, Poisoners
from tests.simulation.store import PROGRESS, SimulatedStore, Watch
from tests.simulation.wire import CALLS, Wire
from tests.simulation.writers import Writers

LEASE = 5.0


class StorePort:
    """The store, as one process sees it: at the other end of a wire."""

    def __init__(self, world: World, life: Life, wire: Wire) -> None:
        self._world = world
        self._life = life
        self._wire = wire

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            store = self._world.store  # what is on its way to one that is gone does not reach its successor
            return await self._wire.ask(
                name, lambda reply: reply(self._world.in_store(self._life, store, name, args, options))
            )

        return call


class SimulatedCarrier:
    """Brings rings from process to process, if it works."""

    def __init__(self, world: World, life: Life) -> None:
        self.works = world.draw.random() < 0.8
        self._world = world
        self._life = life

    async def carry(self, lanes: Collection[LaneName]) -> None:
        self._world.ring(lanes)

    async def listen(self, hearer: Callable[[Collection[LaneName]], object]) -> None:
        self._world.hearers[self._life] = (copy_context(), hearer)
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing is open."""


class World(Course):
    """Everything that a seed stands for.

    ``numbered``, ``failover``, ``log``, ``floods``, ``sessions``, ``poison`` and ``focus`` leave less to chance. In a
    ``calm`` world nothing happens but what ``crash_at`` says. What is not ``watched`` is judged by what arrives alone.
    """

    process = "relay"
    shards = 2

    def __init__(
        self,
        seed: int,
        *,
        numbered: bool | None = None,
        failover: bool | None = None,
        log: bool | None = None,
        floods: bool | None = None,
        sessions: bool | None = None,
        poison: Poison | bool | None = None,
        focus: Focus | None = None,
        calm: bool = False,
        watched: bool = True,
        crash_at: tuple[int, str] | None = None,
    ) -> None:
        super().__init__(seed, focus=focus, calm=calm, crash_at=crash_at)
        self.ledger = Ledger()
        poison = seed % 16 in (1, 6) if poison is None else poison
        self.failover = seed % 10 == 7 if failover is None else failover
        self.forgotten: set[int] = set()
        """Rows of which a failover has forgotten that they were rejected: a numbered broker is thought to have them."""
        numbered = self.draw.random() < 0.6 if numbered is None else numbered
        self.broker: Broker = NumberedBroker(self.chaos) if numbered else Broker(self.chaos)
        self.plain = Broker(self.chaos)
        """Where one of the routes may lead: it knows no numbers."""
        self.routes = self._routes()
        self.everything_once = numbered and all(route.destination == "broker" for route in self.routes)
        self.store = SimulatedStore(
            shards=self.shards, draw_token=self.new_id, log=seed % 2 == 0 if log is None else log
        )
        self.floods = self.draw.random() < 0.3 if floods is None else floods
        """Whether a tenant writes so much at once that it gets a detour."""
        self.store.register(None, self.routes)
        self.producers = {
            f"memory/{route.name}/{shard}": LaneName(route.id, shard)
            for route in self.routes
            for shard in range(self.shards)
        }
        self.store_away = False
        self.cut_off: set[Life] = set()
        self.disconnected: set[Life] = set()
        self.watch = Watch(self, quiet=not watched)
        self.writers = self._writers(seed % 20 == 0 if sessions is None else sessions, poison)
        self.capabilities = self.writers.capabilities(numbered)
        self.fate = Fate(self)
        self.hearers: dict[Life, tuple[Context, Callable[[Collection[LaneName]], object]]] = {}

    def _routes(self) -> list[RouteRecord]:
        retry = RetryPolicy(base=self.draw.choice((1.0, 1.0, 5.0)), cap=5.0, attempts=3)
        routes = [
            RouteRecord("park", "broker", "park", 1, FailurePolicy.PARK, retry),
            RouteRecord("skip", "broker", "skip", 1, FailurePolicy.SKIP, retry),
        ]
        if self.draw.random() < 0.3:
            routes[self.draw.randrange(2)] = RouteRecord("plain", "plain", "plain", 1, FailurePolicy.PARK, retry)
        return routes

    def _writers(self, sessions: bool, poison: Poison | bool) -> Writers:
        if poison is not False:
            return Poisoners(self, None if poison is True else poison)
        if not sessions:
            return Writers(self)
        from .sessions import SessionWriters

        return SessionWriters(self)

    def new_id(self) -> UUID:
        """Unlike any other, and the same for the same seed."""
        return UUID(int=self.draw.getrandbits(128))

    # -- its course ----------------------------------------------------------------------------------------------------

    async def _happen(self) -> None:
        self.writers.plan(ACTIVE)
        if not self.calm:
            self._let_calls_fail(CALLS)
            self.fate.plan(ACTIVE)
        for _ in range(self.draw.choice((1, 2, 2, 3))):
            self.chaos.later(self.chaos.between(0, 3), self.start)
        await asyncio.sleep(ACTIVE)
        self.fate.relent()
        until = self.loop.time() + PATIENCE
        while unfinished := self._unfinished():
            if self.loop.time() > until or self.chaos.calls > self.writers.many_calls:
                self.violations += [*unfinished, f"I10 bounded: {self.chaos.calls} calls"]
                break
            self.violations += self.writers.overdue()
            self.writers.go_on()
            self.fate.look_at_the_dead()
            await asyncio.sleep(1.0)
        self._judge()

    def _unfinished(self) -> list[str]:
        """What has not found its end. A lane that halts because the database went back in time is right to do so."""
        if self.writers.open:
            return ["a transaction is open"]
        return [
            f"I9 liveness: row {stored.id} is {stored.status}, and its lane has {self.store.trouble_of(stored.lane)}"
            for stored in self.store.rows()
            if stored.status not in (Status.SENT, Status.DISCARDED)
            and not (self.failover and self.store.is_halted(stored.lane))
        ]

    def _judge(self) -> None:
        self.ledger.may_be_missing |= {
            self.identity(stored.row) for stored in self.store.rows() if stored.status is not Status.SENT
        }
        topics = {
            topic: [_entry(message) for message in messages]
            for broker in (self.broker, self.plain)
            for topic, messages in broker.topics.items()
        }
        self.violations += check(self.ledger, topics, once=self.broker.topics if self.broker.numbered else ())

    # -- what is known about a delivery --------------------------------------------------------------------------------

    def identity(self, row: Row) -> Identity:
        """The event as it was committed, whatever a person has made of it."""
        for identity, new in self.ledger.edited.items():
            if new.identity == (row.topic, row.event_id):
                return identity
        return row.topic, row.event_id

    def has_arrived(self, row: Row) -> bool:
        """Whether it is on its topic."""
        event = row.headers["event_id"]
        topics = self.broker.topics.get(row.topic, ()), self.plain.topics.get(row.topic, ())
        return any(event_of(message) == event for topic in topics for message in reversed(topic))

    def rejections(self, event: str) -> int:
        """How often an event was rejected, wherever it went."""
        return self.broker.rejections[event] + self.plain.rejections[event]

    # -- processes -----------------------------------------------------------------------------------------------------

    def _begin(self, life: Life) -> None:
        wire = Wire(self.chaos, life)
        life.relay = Relay(
            cast(RelayStore, StorePort(self, life, wire)),
            {
                "broker": BrokerPublisher(self.broker, wire, life, self.watch, self.capabilities),
                "plain": BrokerPublisher(
                    self.plain, wire, life, self.watch, replace(self.capabilities, numbered=False)
                ),
            },
            name=life.name,
            pacing=Pacing(lease=LEASE, batch=self.draw.choice(self.writers.batches), look=4.0, grace=6.0),
            bell=Doorbell(SimulatedCarrier(self, life)) if self.draw.random() < 0.8 else None,
            draw=self.draw.random,
        )
        manner = self.draw.choice(("run",) * 8 + ("drain", "run_once"))
        self.chaos.note(life.name, "starts", manner)
        self.loop.create_task(self._live(life, manner)).set_name(life.name)

    def _lost(self, life: Life) -> None:
        self.hearers.pop(life, None)

    def ring(self, lanes: Collection[LaneName]) -> None:
        """Tell everybody, as far as it arrives."""
        for context, hearer in [*self.hearers.values()]:
            if self.draw.random() < 0.8:
                self.loop.call_later(self.draw.random() * 0.01, hearer, lanes, context=context)

    def in_store(
        self, life: Life, store: SimulatedStore, name: str, args: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        """A call has arrived at the store."""
        result: Any
        if self.store_away or store is not self.store or life in self.cut_off or life in self.disconnected:
            self.disconnected.discard(life)
            return ConnectionError("the database is away")
        try:
            with self.watch.over(name, args, options) if name in PROGRESS else nullcontext():
                result = _run_now(getattr(store, name)(*args, **options))
        except Exception as error:
            result = error
        self.chaos.note(life.name, name, *args, options, result)
        return result


def simulate(seed: int, **options: Any) -> Result:
    """Run one seed."""
    return World(seed, **options).run()


def _run_now(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("a store in memory does not wait")


def _entry(message: Message) -> Entry:
    headers = message.headers
    return Entry(message.topic, headers.get("tenant_id"), message.key, UUID(headers["event_id"]), message.body)
