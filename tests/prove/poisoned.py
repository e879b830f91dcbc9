"""A service whose events are partly poisoned, and destinations that reject poison or stumble over it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from pillarbox import IntegrationEvent, Pillarbox
from pillarbox.relay import Relay
from pillarbox.stores import operations
from pillarbox.stores.audit import Author
from pillarbox.stores.inspection import Filter
from pillarbox.stores.operations import Action, Run, Selection
from pillarbox.transport import Capabilities, Message, Outcome, Rejection
from tests.simulation.checker import Entry, Ledger, check
from tests.transport_bugs import Bug, misbehave

AUTHOR = Author("the proof", "to see what becomes of it")
PER_TRANSACTION = 100

_Found = TypeVar("_Found")


class Measured(IntegrationEvent, name="poison.thing.measured"):
    """A thing was measured for the n-th time."""

    number: int
    poisoned: bool


class Destination:
    """Stores what it is sent, at least once, but nothing that is poisoned: that it rejects, or its bug shows."""

    capabilities = Capabilities(max_messages=500, timeout=2.0)

    def __init__(self, topic: str, bug: Bug | None = None) -> None:
        self.topic = topic
        self.bug = bug
        self.mended = False
        self.stored: list[Entry] = []
        self.first_at: dict[UUID, float] = {}
        self.tries = 0
        """How often it met something poisoned."""
        self._news = asyncio.Event()

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether the condition, which depends on what was sent here, was met in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        return condition()

    def preflight(self, message: Message) -> str | None:  # noqa: ARG002  poison shows when it is sent
        return None

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:  # noqa: ARG002  nothing to open
        return {}

    async def close(self, producer: str | None = None) -> None:
        """Nothing is open."""

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:  # noqa: ARG002  all producers are equal
        stored, rejected, stopped = list[int](), list[Rejection](), set[object]()
        for index, message in enumerate(messages):
            content, tenant = msgspec.json.decode(message.body), message.headers.get("tenant_id")
            if (tenant, message.key) in stopped:
                continue
            if not content["poisoned"] or self.mended:
                stored.append(index)
                self._store(message, tenant, content["number"])
                continue
            self.tries += 1
            self._news.set()
            if self.bug is not None:
                return await misbehave(self.bug, stored, len(messages))
            rejected.append(Rejection(index, "poisoned"))
            stopped.add((tenant, message.key))
        self._news.set()
        await asyncio.sleep(0)  # as if the answer were on its way
        return Outcome(stored, rejected)

    def _store(self, message: Message, tenant: str | None, number: int) -> None:
        event_id = UUID(message.headers["event_id"])
        self.stored.append(Entry(self.topic, tenant, message.key, event_id, str(number).encode()))
        self.first_at.setdefault(event_id, time.perf_counter())


class Committed(NamedTuple):
    """What a service has committed for one destination."""

    entries: list[Entry]
    healthy: dict[UUID, float]
    poisoned: dict[str, UUID]


class Service:
    """Commits events, each for all destinations, and knows what has to arrive there."""

    def __init__(self, box: Pillarbox, destinations: Sequence[Destination]) -> None:
        self.box = box
        self.destinations = destinations
        self.ledgers = {it.topic: Ledger() for it in destinations}
        self.healthy: dict[UUID, float] = {}
        """Events of keys without poison, and when they were committed."""
        self.poisoned: dict[str, UUID] = {}
        """The first event of each poisoned key: the others wait behind it."""
        self._numbers = Counter[tuple[str | None, str]]()

    async def commit(
        self, keys: Sequence[str], *, poisoned: Collection[str] = (), tenant: str | None = None
    ) -> list[UUID]:
        """Commit an event for each of the keys, in transactions of bounded size. A key is always poisoned, or never."""
        portions = [keys[start : start + PER_TRANSACTION] for start in range(0, len(keys), PER_TRANSACTION)]
        return [event for portion in portions for event in await self._commit(portion, poisoned, tenant)]

    async def _commit(self, keys: Sequence[str], poisoned: Collection[str], tenant: str | None) -> list[UUID]:
        events: list[tuple[str, Measured]] = []
        async with self.box.unit_of_work(tenant=tenant) as uow:
            for key in keys:
                self._numbers[tenant, key] += 1
                event = Measured(number=self._numbers[tenant, key], poisoned=key in poisoned)
                uow.publish(event, key=key)
                events.append((key, event))
        now = time.perf_counter()
        for key, event in events:
            for topic, ledger in self.ledgers.items():
                ledger.committed.append(Entry(topic, tenant, key, event.event_id, str(event.number).encode()))
            if event.poisoned:
                self.poisoned.setdefault(key, event.event_id)
            else:
                self.healthy[event.event_id] = now
        return [event.event_id for _, event in events]

    def committed(self) -> Committed:
        """What it has committed, if it has one destination."""
        [ledger] = self.ledgers.values()
        return Committed(ledger.committed, self.healthy, self.poisoned)

    def know(self, committed: Committed) -> None:
        """Count it in what has to arrive: another process has committed it."""
        [ledger] = self.ledgers.values()
        ledger.committed += committed.entries
        self.healthy |= committed.healthy
        self.poisoned |= committed.poisoned

    async def ask(self, question: Callable[..., _Found], *arguments: Any) -> _Found:
        """Ask the database, in a transaction of its own."""
        async with self.box.engine.begin() as connection:
            return await connection.run_sync(question, *arguments)

    async def until(self, condition: Callable[[Connection], bool], seconds: float) -> bool:
        """Whether the database came to that in time."""
        deadline = time.monotonic() + seconds
        while not (met := await self.ask(condition)) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.2)  # a database rings no bell
        return met

    async def missing(self, seconds: float) -> list[str]:
        """Wait for the healthy events; what is wrong if some have not arrived so soon after they were committed."""
        await self._arrive({it.topic: self.healthy.keys() for it in self.destinations}, seconds)
        wrong = []
        for it in self.destinations:
            latencies = self.latencies(it, self.healthy)
            absent, late = len(self.healthy) - len(latencies), sum(each > seconds for each in latencies)
            if absent or late:
                wrong.append(f"{it.topic}: of {len(self.healthy)} healthy events {absent} have not come, {late} late")
        return wrong

    async def _arrive(self, wanted: Mapping[str, Collection[UUID]], seconds: float) -> None:
        def arrived(it: Destination) -> bool:
            return it.first_at.keys() >= {*wanted[it.topic]}

        await asyncio.gather(*(it.until(partial(arrived, it), seconds) for it in self.destinations))

    def latencies(self, destination: Destination, events: Collection[UUID]) -> list[float]:
        """Seconds from the commit of these healthy events to their arrival, of those that have arrived."""
        arrived = destination.first_at
        return [arrived[event] - self.healthy[event] for event in events if event in arrived]

    async def redrive(self, seconds: float) -> None:
        """Mend the cause, redrive all that has failed, and wait for it."""
        for it in self.destinations:
            it.mended = True
        before, run = None, Run()
        while run != before:
            before = run
            run = await self.ask(operations.request, Selection(Action.REDRIVE, Filter()), AUTHOR, before, 500)
        await self._arrive({topic: _wanted(ledger) for topic, ledger in self.ledgers.items()}, seconds)

    def balance(self, most_copies: int) -> list[str]:
        """Everything that is wrong with what arrived."""
        wrong = []
        for it in self.destinations:
            found = Counter(said.partition(":")[0] for said in check(self.ledgers[it.topic], {it.topic: it.stored}))
            wrong += [f"{it.topic}: {kind} of {number} events" for kind, number in found.items()]
            copies = Counter(entry.event_id for entry in it.stored).values()
            if (most := max(copies, default=0)) > most_copies:
                wrong.append(f"{it.topic}: {sum(each > most_copies for each in copies)} events came up to {most} times")
        return wrong


def _wanted(ledger: Ledger) -> set[UUID]:
    """The events that must have arrived at last."""
    stay = [entry for entry in ledger.committed if entry.identity not in ledger.may_be_missing]
    return {ledger.edited.get(entry.identity, entry).event_id for entry in stay}


@asynccontextmanager
async def running(relay: Relay) -> AsyncIterator[None]:
    """The relay runs during the block."""
    task = asyncio.create_task(relay.run())
    try:
        yield
    finally:
        relay.stop()
        await task
