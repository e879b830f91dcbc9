"""A thousand tenants on one relay, each with a Pulsar topic of its own.

Ten events of each tenant wait, in random order, when the relay begins. Then some tenants are paused, others are added
while it runs, and the paused ones go on: nothing of theirs may have left meanwhile. At the end each topic, read by the
official client, must hold the events of its tenant, each once, in order per key. What a relay process needs for that is
reported: its time, its memory, its producers, and what it costs to open a topic, at first and when many are open.

    python -m tests.prove.pulsar_tenants --tenants 1000 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from pillarbox import Pillarbox
from pillarbox.outbox import Direction
from pillarbox.stores.audit import Author
from pillarbox.stores.inspection import VIEWS
from pillarbox.stores.operations import Change, Handle, Tenant, apply
from pillarbox.transports.pulsar import PulsarTransport
from pillarbox.transports.pulsar.names import TopicName
from tests.prove.ack_kill import Acknowledged, Tally, Where, numbers_on, official_client, open_box
from tests.servers import Servers

unsent = VIEWS[Direction.OUTBOUND].unsent
EACH = 10
LATER = 5
KEYS = 3
"""Of each tenant: they are in different lanes, and each lane has a producer of its own."""
LEASE = 3.0
PER_TRANSACTION = 100
READERS = 8
PATIENCE = 120.0
"""Seconds without any progress, after which the proof has failed."""


class Measured(PulsarTransport):
    """Knows what it spends on opening topics."""

    def __init__(self, *address: str) -> None:
        super().__init__(address[0], admin_url=address[1])
        self.opened: list[float] = []
        self.checked: list[float] = []

    async def _open(self, owner: str, topic: str, name: str | None) -> None:
        began = time.perf_counter()
        await super()._open(owner, topic, name)
        self.opened.append(time.perf_counter() - began)

    async def _check_deduplication(self, topic: str, name: TopicName) -> None:
        began = time.perf_counter()
        await super()._check_deduplication(topic, name)
        self.checked.append(time.perf_counter() - began)

    def report(self) -> dict[str, Any]:
        some = max(1, len(self.opened) // 5)
        return {
            "producers": sum(not each.lost_because for held in self._producers.values() for each in held.values()),
            "peak_rss_mb": round(_peak_kilobytes() / 1024, 1),
            "opened": len(self.opened),
            "open_ms_first_fifth": _milliseconds(self.opened[:some]),
            "open_ms_last_fifth": _milliseconds(self.opened[-some:]),
            "open_seconds": round(sum(self.opened), 1),
            "check_ms": _milliseconds(self.checked),
            "check_seconds": round(sum(self.checked), 1),
        }


def _peak_kilobytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _milliseconds(durations: list[float]) -> float:
    return round(statistics.median(durations) * 1000, 1) if durations else 0.0


async def relay(where: Where) -> None:
    """What runs in a process of its own: it reports when it is told to stop, and then stops."""
    transport = Measured(where.url, where.admin_url)
    async with open_box(where.database, transport, where.topic) as box:
        relay = box.relay(lease=LEASE)

        def stop() -> None:
            print(json.dumps(transport.report()), flush=True)
            relay.stop()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        await relay.run()


class Tenants:
    """What they have written, and what of it waits."""

    def __init__(self, box: Pillarbox, draw: random.Random) -> None:
        self.written: dict[str, int] = defaultdict(int)
        self._box = box
        self._draw = draw

    async def write(self, tenants: Iterable[str], each: int) -> None:
        order = [tenant for tenant in tenants for _ in range(each)]
        self._draw.shuffle(order)
        for start in range(0, len(order), PER_TRANSACTION):
            async with self._box.unit_of_work() as uow:
                for tenant in order[start : start + PER_TRANSACTION]:
                    key = f"{tenant}.{self._draw.randrange(KEYS)}"
                    self.written[key] += 1
                    uow.publish(Acknowledged(number=self.written[key]), key=key, tenant=tenant)

    async def handle(self, handle: Handle, tenants: Iterable[str]) -> None:
        async with self._box.engine.begin() as connection:
            for tenant in tenants:
                await connection.run_sync(apply, Change(handle, Tenant(tenant)), Author("the proof"))

    async def waiting(self) -> dict[str, int]:
        """How many events of whom are not sent."""
        async with self._box.engine.connect() as connection:
            counted = sa.select(unsent.c.tenant, sa.func.count()).group_by(unsent.c.tenant)
            return {tenant: count for tenant, count in await connection.execute(counted)}  # noqa: C416

    async def sent(self, but_for: Collection[str] = ()) -> None:
        """Wait until nobody else has anything left."""
        best, deadline = sum(self.written.values()) + 1, time.monotonic() + PATIENCE
        while True:
            left = {tenant: count for tenant, count in (await self.waiting()).items() if tenant not in but_for}
            if not left:
                return
            if sum(left.values()) < best:
                best, deadline = sum(left.values()), time.monotonic() + PATIENCE
            elif time.monotonic() > deadline:
                raise TimeoutError(f"nothing has moved for {PATIENCE} s: {len(left)} tenants wait")
            await asyncio.sleep(0.1)


async def prove(database: str, url: str, admin: str, *, tenants: int, seed: int) -> dict[str, Any]:
    """Write, relay, pause, add, resume, and read."""
    draw = random.Random(seed)
    topic = f"persistent://public/default/tenants-{uuid4().hex[:12]}-{{tenant}}"
    where = Where(database, url, admin, topic)
    names = [f"t{number}" for number in range(tenants)]
    paused = draw.sample(names, max(1, tenants // 50))
    added = [f"new{number}" for number in range(max(1, tenants // 20))]
    async with open_box(database, PulsarTransport(url, admin_url=admin), topic) as box:
        await box.migrate()
        everybody = Tenants(box, draw)
        await everybody.write(names, EACH)
        started = time.perf_counter()
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.prove.pulsar_tenants", "relay", *where), stdout=asyncio.subprocess.PIPE
        )
        try:
            await everybody.sent()
            seconds = time.perf_counter() - started
            await everybody.handle(Handle.PAUSE, paused)
            await asyncio.sleep(LEASE)  # a relay hears of it when it sees to its leases
            await everybody.write([*draw.sample(names, max(1, tenants // 10)), *paused, *added], LATER)
            await everybody.sent(but_for=paused)
            held = await everybody.waiting()
            await everybody.handle(Handle.RESUME, paused)
            await everybody.sent()
        finally:
            if child.returncode is None:
                child.terminate()
            said, _ = await child.communicate()
        await box.engine.dispose()
    found = await asyncio.to_thread(read, where, [*names, *added], everybody.written)
    return {
        "seed": seed,
        "tenants": len(names) + len(added),
        "events": sum(everybody.written.values()),
        **found,
        "paused": len(paused),
        "leaked_while_paused": sum(held.get(tenant, 0) < LATER for tenant in paused),
        "seconds": round(seconds, 1),
        "events_per_second": round(tenants * EACH / seconds),
        "relay": json.loads(said),
    }


def read(where: Where, tenants: Iterable[str], written: dict[str, int]) -> dict[str, int]:
    """All topics. What is on the topic of somebody else is a stray."""
    tally, strays = Tally(written), 0
    with official_client(where.url) as client, ThreadPoolExecutor(READERS) as readers:

        def read_one(tenant: str) -> tuple[str, list[tuple[str, int]]]:
            return tenant, list(numbers_on(client, where.topic.format(tenant=tenant)))

        for tenant, numbers in readers.map(read_one, tenants):
            for key, number in numbers:
                tally.add(key, number)
                strays += not key.startswith(f"{tenant}.")
    return {"on_topics": tally.on_topic, **tally.faults, "strays": strays}


def holds(result: dict[str, Any]) -> bool:
    kinds = ("missing", "doubled", "inverted", "ghosts", "strays", "leaked_while_paused")
    return not any(result[kind] for kind in kinds) and result["on_topics"] == result["events"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr, flush=True)
    servers = Servers()
    os.environ["PILLARBOX_HOME"] = str(servers.folder / "home")
    try:
        database = servers.create_database("embedded").url()
        broker: Any = servers.get("pulsar")
        result = asyncio.run(prove(database, broker.url, broker.admin_url, tenants=given.tenants, seed=given.seed))
    finally:
        servers.stop()
    print(json.dumps(result, indent=2))
    return int(not holds(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["relay"]:
        asyncio.run(relay(Where(*sys.argv[2:6])))
    else:
        sys.exit(main())
