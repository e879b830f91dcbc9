"""One tenant's trouble stays that tenant's: four tenants go on while a fifth has every kind of it.

Each scenario runs twice on a database of its own, first without the trouble. The events of the four healthy tenants
must take effect at most `LATEST` seconds after they were published, or three times later than without trouble. What
the troubled tenant waits for is mended then: nothing may be missing, doubled or out of order, health must name exactly
the tenant that made no progress, and memory must not have grown much.

    python -m tests.prove.bulkhead --seed 7 --scenarios away hangs --sources memory --databases postgresql
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

import msgspec
import uvloop
from sqlalchemy import String, func, select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import IntegrationEvent, Message, MessageContext, Pillarbox, UnitOfWork
from pillarbox.consumers.consumer import Consumer
from pillarbox.outbox import INBOUND
from pillarbox.stores.tables import claims, deliveries
from pillarbox.transports.memory import MemoryTransport
from tests.prove.victim import survive_kills
from tests.servers import Servers

DATABASES = {"postgresql": "embedded", "mariadb": "mariadb", "sqlite": "sqlite"}
SOURCES = ("memory", "outbox", "pulsar")
LATEST, SLOWER = 3.0, 3.0
"""Seconds, and how many times later than without trouble."""
HEALTHY = [f"healthy-{number}" for number in range(4)]
TROUBLED = "troubled"
RATE = 10.0
"""Events that each healthy tenant publishes in a second."""
PATIENCE = 2.0
MENDED = 300.0
"""Seconds in which all must have taken effect after the trouble was mended."""
MOST_MEMORY = 200 * 1024
"""Kilobytes by which the process may have grown."""
LARGE = 1_000_000
KILLED = "killed"
"""Another kind of trouble: the consumer is a process, and is killed while 3,000 messages are spilled."""


class Told(IntegrationEvent, name="bulkhead.told"):
    key: str
    number: int
    text: str = ""


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "bulkhead_effects"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    event_id: Mapped[UUID]
    tenant: Mapped[str] = mapped_column(String(50))
    key: Mapped[str] = mapped_column(String(50))
    number: Mapped[int]


@dataclass
class Scenario:
    """What is wrong with a tenant."""

    events: int
    keys: int = 0
    """How many the tenant has; 0: each event has its own."""
    fails: Callable[[Told, int], Exception | None] = lambda _event, _calls: None
    """What a handler raises for an event of the tenant, by how often it was called for that."""
    blocks: bool = False
    hangs: bool = False
    headers: dict[str, str | None] = field(default_factory=dict)
    """What is wrong in its messages: such never take effect."""
    size: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    stands_still: bool = True
    """Whether nothing of the tenant makes progress."""
    only: Sequence[str] = SOURCES

    @property
    def is_mendable(self) -> bool:
        return not self.headers


def _always(error: Callable[[], Exception]) -> Callable[[Told, int], Exception | None]:
    return lambda _event, _calls: error()


SCENARIOS = {
    "no-tenant": Scenario(6_000, headers={"tenant_id": None}, stands_still=False, only=("memory", "pulsar")),
    "away": Scenario(2_000, fails=_always(lambda: ConnectionError("its service is away"))),
    "plain-hangs": Scenario(20, blocks=True),
    "hangs": Scenario(20, hangs=True),
    "plain-hangs-on-one-key": Scenario(3_000, keys=1, blocks=True),
    "hangs-on-one-key": Scenario(3_000, keys=1, hangs=True),
    "bug": Scenario(1_100, keys=1, fails=_always(lambda: LookupError("a bug")), stands_still=False),
    "headers": Scenario(1_100, headers={"correlation_id": "\n"}, stands_still=False, only=("memory", "pulsar")),
    "large": Scenario(17, size=LARGE, fails=_always(lambda: ConnectionError("too large for now"))),
    "one-key": Scenario(
        10_000, keys=1, fails=lambda event, _calls: ConnectionError("not yet") if event.number == 0 else None
    ),
    "poison": Scenario(
        5_000, headers={"event_type": "bulkhead.unheard"}, stands_still=False, only=("memory", "pulsar")
    ),
}


class Ledger:
    """What was published, and when it took effect."""

    def __init__(self) -> None:
        self.published: dict[UUID, tuple[str, str, int, float]] = {}
        self.took: dict[UUID, float] = {}

    def add(self, event: Told, tenant: str) -> None:
        self.published[event.event_id] = tenant, event.key, event.number, time.perf_counter()

    def latencies(self, tenants: Sequence[str]) -> list[float]:
        now = time.perf_counter()
        return [
            self.took.get(event, now) - at for event, (tenant, _, _, at) in self.published.items() if tenant in tenants
        ]

    def waiting(self, tenants: Sequence[str]) -> int:
        return sum(tenant in tenants and event not in self.took for event, (tenant, *_) in self.published.items())


class World:
    """A box with a consumer, and a tenant in trouble."""

    def __init__(self, box: Pillarbox, source: str, scenario: Scenario, *, troubled: bool) -> None:
        self.box = box
        self.source = source
        self.scenario = scenario
        self.troubled = troubled
        self.ledger = Ledger()
        self.wrong: list[str] = []
        self.mended = threading.Event()
        self.mended_here = asyncio.Event()
        self.calls: Counter[UUID] = Counter()
        self.at_work = 0
        self.most_at_work = 0
        self.topic = f"bulkhead-{uuid4().hex[:8]}-{{tenant}}"
        place: dict[str, Any] = {"source": source}
        if source != "outbox":
            place["topics"] = [self.topic]
        self.consumer: Consumer = box.consumer(
            f"bulkhead-{uuid4().hex[:8]}", **place, patience=PATIENCE, timeout=600.0, **scenario.options
        )
        self.consumer.on(Told)(self._handle_plain if scenario.blocks else self._handle)

    async def _handle(self, event: Told, uow: UnitOfWork, context: MessageContext) -> None:
        if context.tenant == TROUBLED and not self.mended.is_set() and self.troubled:
            self.calls[event.event_id] += 1
            if self.scenario.hangs:
                await self.mended_here.wait()
            if (error := self.scenario.fails(event, self.calls[event.event_id])) is not None:
                raise error
        self._effect(event, uow, context)

    def _handle_plain(self, event: Told, uow: UnitOfWork, context: MessageContext) -> None:
        if context.tenant == TROUBLED and not self.mended.is_set() and self.troubled:
            self.calls[event.event_id] += 1
            if self.calls[event.event_id] > 1:
                self.wrong.append(f"{event.event_id} is handled beside itself")
            self.mended.wait()
        self._effect(event, uow, context)

    def _effect(self, event: Told, uow: UnitOfWork, context: MessageContext) -> None:
        tenant = str(context.tenant)
        uow.add(Effect(event_id=event.event_id, tenant=tenant, key=event.key, number=event.number))
        self.ledger.took[event.event_id] = time.perf_counter()

    # -- publishing ----------------------------------------------------------------------------------------------------

    async def publish(self, tenant: str, events: Sequence[Told], **headers: str | None) -> None:
        """Send them to the tenant's topic, or commit them."""
        for event in events:
            if not headers:
                self.ledger.add(event, tenant)
        if self.source == "outbox":
            async with self.box.unit_of_work(tenant=tenant) as uow:
                for event in events:
                    uow.publish(event, key=event.key)
            return
        transport = self.box.transports[self.source]
        topic = self.topic.replace("{tenant}", tenant)
        await transport.open("bulkhead", [topic])
        outcome = await transport.send("bulkhead", [_message(topic, tenant, event, headers) for event in events])
        if len(outcome.accepted) != len(events):
            raise RuntimeError(f"the broker took {len(outcome.accepted)} of {len(events)}: {outcome.reason}")

    async def be_healthy(self, tenant: str, seconds: float, seed: str) -> None:
        draw, started, number = random.Random(seed), time.perf_counter(), 0
        while (passed := time.perf_counter() - started) < seconds:
            if number <= passed * RATE:
                await self.publish(tenant, [Told(key=f"{tenant}-{draw.randrange(20)}", number=number)])
                number += 1
            else:
                await asyncio.sleep(0.01)

    async def be_troubled(self) -> None:
        scenario, portion = self.scenario, 1 if self.scenario.size else 200
        for first in range(0, scenario.events, portion):
            numbers = range(first, min(first + portion, scenario.events))
            keys = scenario.keys or scenario.events
            events = [Told(key=f"key-{number % keys}", number=number, text="x" * scenario.size) for number in numbers]
            await self.publish(TROUBLED, events, **(scenario.headers if self.troubled else {}))
            await asyncio.sleep(0)

    # -- judging -------------------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.perf_counter() + seconds
        while not condition() and time.perf_counter() < deadline:  # noqa: ASYNC110  what it looks at tells nobody
            await asyncio.sleep(0.05)
        return condition()

    async def check_health(self) -> None:
        if not self.troubled or not self.scenario.stands_still:
            return
        if not await self.until(lambda: self.consumer.status()["standstill"] == [TROUBLED], 10 * PATIENCE):
            self.wrong.append(f"health names {self.consumer.status()['standstill']}, not the troubled tenant")

    async def mend(self) -> None:
        self.mended.set()
        self.mended_here.set()
        everybody = [*HEALTHY, TROUBLED]
        if not await self.until(lambda: not self.ledger.waiting(everybody), MENDED):
            self.wrong.append(f"{self.ledger.waiting(everybody)} events did not take effect in {MENDED} s")

    async def balance(self, engine: AsyncEngine) -> None:
        async with engine.connect() as connection:
            rows = (await connection.execute(select(Effect).order_by(Effect.id))).all()
            left = await connection.scalar(select(func.count()).select_from(claims).where(claims.c.gate))
            spilled = await connection.scalar(select(func.count()).select_from(deliveries[INBOUND]))
        times, newest = Counter(row.event_id for row in rows), defaultdict[tuple[str, str], int](lambda: -1)
        for event, (tenant, key, number, _) in self.ledger.published.items():
            if times[event] != 1:
                self.wrong.append(f"event {number} of {tenant} {key} has {times[event]} effects")
        for row in rows:
            if row.number < newest[row.tenant, row.key]:
                self.wrong.append(f"event {row.number} of {row.tenant} {row.key} is out of order")
            newest[row.tenant, row.key] = row.number
        if left:
            self.wrong.append(f"{left} claims are left")
        self.spilled = spilled


def _message(topic: str, tenant: str, event: Told, headers: dict[str, str | None]) -> Message:
    known: dict[str, str | None] = {
        "event_id": str(event.event_id),
        "event_type": "bulkhead.told",
        "schema_version": "v1",
        "occurred_at": event.occurred_at.isoformat(),
        "content_type": "application/json",
        "tenant_id": tenant,
    }
    body = msgspec.json.encode({"key": event.key, "number": event.number, "text": event.text})
    kept = {name: value for name, value in {**known, **headers}.items() if value is not None}
    return Message(topic, event.key, body, kept)


@asynccontextmanager
async def _box(url: str, pulsar: str | None) -> AsyncIterator[tuple[Pillarbox, AsyncEngine]]:
    engine = create_async_engine(url)
    transports: dict[str, Any] = {"memory": MemoryTransport()}
    if pulsar is not None:
        from pillarbox.transports.pulsar import PulsarTransport

        transports["pulsar"] = PulsarTransport(pulsar, guarantee="at_least_once")
    async with Pillarbox(engine, transports=transports, shards=4) as box:
        await box.migrate()
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.drop_all)
            await connection.run_sync(Base.metadata.create_all)
        yield box, engine
    await engine.dispose()


async def run_world(
    url: str, source: str, scenario: Scenario, *, troubled: bool, seconds: float, seed: int, pulsar: str | None = None
) -> tuple[float, World, int]:
    """The healthy tenants' p99, and how many kilobytes the process has grown by."""
    async with _box(url, pulsar) as (box, engine):
        world = World(box, source, scenario, troubled=troubled)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        running = asyncio.create_task(world.consumer.run())
        await world.until(lambda: world.consumer.healthy, 30.0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.be_troubled())
            for tenant in HEALTHY:
                tasks.create_task(world.be_healthy(tenant, seconds, f"{seed} {tenant}"))
        if not await world.until(lambda: not world.ledger.waiting(HEALTHY), 60.0):
            world.wrong.append(f"{world.ledger.waiting(HEALTHY)} healthy events wait for the troubled tenant")
        await world.check_health()
        p99 = statistics.quantiles(world.ledger.latencies(HEALTHY), n=100)[-1]
        await world.mend()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        world.consumer.stop()
        await running
        await world.balance(engine)
        return p99, world, grown


async def prove(
    url: Callable[[], str], source: str, scenario: Scenario, *, seconds: float, seed: int, pulsar: str | None = None
) -> dict[str, Any]:
    """The same load twice: without the trouble, and with it."""
    calm, first, _ = await run_world(url(), source, scenario, troubled=False, seconds=seconds, seed=seed, pulsar=pulsar)
    p99, world, grown = await run_world(
        url(), source, scenario, troubled=True, seconds=seconds, seed=seed, pulsar=pulsar
    )
    wrong = [f"without trouble: {each}" for each in first.wrong] + world.wrong
    if p99 > max(LATEST, SLOWER * calm):
        wrong.append(f"healthy events took effect after {p99:.1f} s, without trouble after {calm:.1f} s")
    if grown > MOST_MEMORY:
        wrong.append(f"the process has grown by {grown // 1024} MB")
    return {
        "p99_ms": round(calm * 1000, 1),
        "p99_ms_with_trouble": round(p99 * 1000, 1),
        "spilled": world.spilled,
        "grown_mb": grown // 1024,
        "wrong": wrong[:10],
    }


def _new_database(servers: Servers, kind: str) -> str:
    return servers.create_database(kind).url()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scenarios = [*SCENARIOS, KILLED]
    parser.add_argument("--scenarios", nargs="+", choices=scenarios, default=scenarios)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=SOURCES)
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=["postgresql", "mariadb"])
    parser.add_argument("--seconds", type=float, default=10.0, help="for which the healthy tenants publish")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    logging.getLogger("pillarbox").setLevel(logging.CRITICAL)  # it has much to say here
    results: dict[str, Any] = {}
    servers = Servers()
    os.environ["PILLARBOX_HOME"] = str(servers.folder / "home")
    try:
        for name, source, database in product(given.scenarios, given.sources, given.databases):
            if source not in (["pulsar"] if name == KILLED else SCENARIOS[name].only):
                continue
            pulsar = cast(Any, servers.get("pulsar")).url if source == "pulsar" else None
            if name == KILLED and pulsar is not None:
                with tempfile.TemporaryDirectory(prefix="pillarbox-bulkhead-") as folder:
                    url = _new_database(servers, DATABASES[database])
                    uvloop.run(survive_kills(url, pulsar, Path(folder), events=3_000))
                results[f"{name} {source} {database}"] = {"wrong": []}
                continue
            result = uvloop.run(
                prove(
                    partial(_new_database, servers, DATABASES[database]),
                    source,
                    SCENARIOS[name],
                    seconds=given.seconds,
                    seed=given.seed,
                    pulsar=pulsar,
                )
            )
            results[f"{name} {source} {database}"] = result
            print(f"{name} {source} {database}: {result}", file=sys.stderr)
    finally:
        servers.stop()
    holds = not any(result["wrong"] for result in results.values())
    print(json.dumps({"seed": given.seed, **results, "holds": holds}, indent=2))
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
