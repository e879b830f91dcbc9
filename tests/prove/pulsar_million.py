"""A million events into a Pulsar cluster whose broker is killed, by relays that are killed.

One writer commits large transactions while two relay processes drain them. At 33 points of the drain, which the seed
decides, a relay gets SIGKILL and another one takes its place, or the broker gets it and is started again. At the end
the topic, read by the official client, must hold each committed event once, in order per key.

    python -m tests.prove.pulsar_million --events 1000000 --relay-kills 30 --broker-kills 3 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import defaultdict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import sqlalchemy as sa

from pillarbox import Pillarbox
from pillarbox.outbox import Direction
from pillarbox.stores.inspection import VIEWS
from pillarbox.stores.tables import lanes
from pillarbox.testing.pulsar import PulsarCluster
from pillarbox.transports.pulsar import PulsarTransport
from tests.prove.ack_kill import Acknowledged, Tally, Where, numbers_on, official_client, open_box, start_relay
from tests.servers import PulsarClusters, Servers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

unsent = VIEWS[Direction.OUTBOUND].unsent
KEYS = 200
PER_TRANSACTION = 1_000
RELAYS = 2
LEASE = 3.0
PATIENCE = 180.0
"""Seconds without any progress, after which the proof has failed."""


class Relays:
    """Processes that serve the outbox; one that is killed is replaced."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._running: list[asyncio.subprocess.Process] = []
        self.kills = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self._running = [await self._start() for _ in range(RELAYS)]
        try:
            yield
        finally:
            for process in self._running:
                process.kill()
                await process.wait()

    async def kill_one(self, draw: random.Random) -> None:
        victim = self._running.pop(draw.randrange(RELAYS))
        victim.kill()
        await victim.wait()
        self.kills += 1
        self._running.append(await self._start())

    def check(self) -> None:
        for process in self._running:
            if process.returncode is not None:
                raise RuntimeError(f"a relay ended by itself, with {process.returncode}")

    async def _start(self) -> asyncio.subprocess.Process:
        return await start_relay(self._where, lease=LEASE)


class Drain:
    """How far the relays have come, and whether they go on."""

    def __init__(self, box: Pillarbox, relays: Relays) -> None:
        self._box = box
        self._relays = relays
        self._moved_at = time.monotonic()
        self._seen: int | None = None
        self._start = 0

    async def begin(self) -> None:
        self._start = await self._numbers()

    async def reached(self, events: int) -> None:
        """Wait until so many have been announced. Unlike a count of rows, the numbers of lanes cost nothing to ask."""
        while await self._progress() < events:  # noqa: ASYNC110  a database rings no bell
            await asyncio.sleep(0.05)

    async def finished(self) -> None:
        """Wait until nothing is left to be sent."""
        while await self._ask(sa.select(sa.func.count()).select_from(unsent)):
            await self._progress()
            await asyncio.sleep(0.1)

    async def _progress(self) -> int:
        self._relays.check()
        reached = await self._numbers()
        if reached != self._seen:
            self._seen, self._moved_at = reached, time.monotonic()
        elif time.monotonic() > self._moved_at + PATIENCE:
            raise TimeoutError(f"nothing has moved for {PATIENCE} s, after {reached - self._start} events")
        return reached - self._start

    async def _numbers(self) -> int:
        return await self._ask(sa.select(sa.func.sum(lanes.c.next_number)))

    async def _ask(self, question: sa.Select[Any]) -> int:
        async with self._box.engine.connect() as connection:
            return int((await connection.execute(question)).scalar_one() or 0)


async def write(box: Pillarbox, written: dict[str, int], events: int, draw: random.Random) -> None:
    names = [f"k{number}" for number in range(KEYS)]
    for start in range(0, events, PER_TRANSACTION):
        async with box.unit_of_work() as uow:
            for key in draw.choices(names, k=min(PER_TRANSACTION, events - start)):
                written[key] += 1
                uow.publish(Acknowledged(number=written[key]), key=key)


def spread(victims: dict[str, int], events: int, draw: random.Random) -> list[tuple[int, str]]:
    """When to kill whom: by chance, but each kind over all of the drain."""
    return sorted(
        (int((index + draw.random()) / kills * events), victim)
        for victim, kills in victims.items()
        for index in range(kills)
    )


async def break_things(
    drain: Drain, relays: Relays, cluster: PulsarCluster, kills: list[tuple[int, str]], draw: random.Random
) -> None:
    for moment, victim in kills:
        await drain.reached(moment)
        print(f"{moment:>9,} events: kill a {victim}", file=sys.stderr, flush=True)
        if victim == "relay":
            await relays.kill_one(draw)
        else:
            await asyncio.to_thread(cluster.restart_broker)


async def prove(
    database: str, cluster: PulsarCluster, *, events: int, relay_kills: int, broker_kills: int, seed: int
) -> dict[str, Any]:
    """Write, drain and kill at the same time, then read."""
    started = time.perf_counter()
    draw = random.Random(seed)
    kills = spread({"relay": relay_kills, "broker": broker_kills}, events, draw)
    where = Where(database, cluster.url, cluster.admin_url, f"persistent://public/default/million-{uuid4().hex[:12]}")
    written: dict[str, int] = defaultdict(int)
    relays = Relays(where)
    async with open_box(database, PulsarTransport(where.url, admin_url=where.admin_url), where.topic) as box:
        await box.migrate()
        drain = Drain(box, relays)
        await drain.begin()
        async with relays.serving(), asyncio.TaskGroup() as group:
            group.create_task(write(box, written, events, random.Random(seed + 1)))
            await break_things(drain, relays, cluster, kills, draw)
            await drain.reached(events)
            await drain.finished()
        await box.engine.dispose()
    drained = time.perf_counter() - started
    tally = await asyncio.to_thread(count, where, written)
    return {
        "seed": seed,
        "events": sum(written.values()),
        "relay_kills": relays.kills,
        "broker_kills": broker_kills,
        "on_topic": tally.on_topic,
        **tally.faults,
        "seconds": round(time.perf_counter() - started, 1),
        "seconds_until_drained": round(drained, 1),
    }


def count(where: Where, written: dict[str, int]) -> Tally:
    tally = Tally(written)
    with official_client(where.url) as client:
        for key, number in numbers_on(client, where.topic):
            tally.add(key, number)
    return tally


def holds(result: dict[str, Any]) -> bool:
    faultless = not any(result[kind] for kind in ("missing", "doubled", "inverted", "ghosts"))
    return faultless and result["on_topic"] == result["events"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--relay-kills", type=int, default=30)
    parser.add_argument("--broker-kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr, flush=True)
    servers = Servers()
    os.environ["PILLARBOX_HOME"] = str(servers.folder / "home")
    try:
        database = servers.create_database("embedded").url()
        clusters = servers.get("pulsar-cluster")
        assert isinstance(clusters, PulsarClusters)
        with clusters.fresh() as cluster:
            result = asyncio.run(prove(database, cluster, **vars(given)))
    finally:
        servers.stop()
    print(json.dumps(result, indent=2))
    return int(not holds(result))


if __name__ == "__main__":
    sys.exit(main())
