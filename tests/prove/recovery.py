"""How long lanes stand still when things go wrong, and what an outage costs.

Two relay processes serve a steady stream of events. One is killed: the time runs until the first event of each of its
lanes arrives from the other one, and may be the lease and one second. One is told to stop by SIGTERM: that may take one
second. Then the sink is away for a minute: afterwards everything has arrived in order, no attempt was counted, and the
relays have not grown.

    python -m tests.prove.recovery --lease 5 --outage 60 --database postgres
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox import IntegrationEvent, Pillarbox, Route
from pillarbox.cli.demo.ledger import compare, ledger_table, read_ledger
from pillarbox.cli.demo.processes import Processes, Slot
from pillarbox.cli.demo.sink import Arrival
from pillarbox.cli.demo.transport import SinkTransport
from pillarbox.outbox import SHARDS, stable_hash
from pillarbox.stores.tables import lanes, outbox
from tests.prove.kills import DATABASES, until
from tests.servers import Servers

KEYS = 64
PER_SECOND = 100
PATIENCE = 60.0
MOST_GROWTH = 0.1
"""What a relay may have grown by at the end of an outage, of its size before."""


class Ticked(IntegrationEvent, name="recovery.clock.ticked"):
    """Time has passed, for the n-th time."""

    number: int


ledger = ledger_table(sa.MetaData(), "recovery_ledger")
route = Route("recovery.clock.*", to="recovery", topic="recovery")


class Stream:
    """A steady stream of events, and what has arrived of it."""

    def __init__(self, box: Pillarbox, processes: Processes) -> None:
        self._box = box
        self._processes = processes
        self.arrived: list[Arrival] = []
        self.committed = 0
        self.stopped = False

    async def write(self) -> None:
        started, numbers = time.monotonic(), dict.fromkeys(range(KEYS), 0)
        while not self.stopped:
            await asyncio.sleep(max(0.0, started + self.committed / PER_SECOND - time.monotonic()))
            key = self.committed % KEYS
            numbers[key] += 1
            async with self._box.unit_of_work() as uow:
                event = Ticked(number=numbers[key])
                uow.publish(event, key=f"key-{key}")
                entry = {"event_id": event.event_id, "tenant": None, "key": f"key-{key}", "version": numbers[key]}
                await uow.session.execute(sa.insert(ledger), entry)
            self.committed += 1

    def look(self) -> list[Arrival]:
        more = self._processes.arrivals.more()
        self.arrived += more
        return more

    async def arrival_of_all(self) -> None:
        """Wait until as many events have arrived as are committed now."""
        committed = self.committed

        def arrived() -> bool:
            self.look()
            return len({arrival.event_id for arrival in self.arrived}) >= committed

        async with asyncio.timeout(PATIENCE):
            await until(arrived)


def shard_of(arrival: Arrival) -> int:
    return stable_hash(arrival.key) % SHARDS


async def owners(engine: AsyncEngine) -> dict[int, str | None]:
    async with engine.connect() as connection:
        rows = await connection.execute(sa.select(lanes.c.shard, lanes.c.locked_by).where(lanes.c.route == route.id))
        return {row.shard: row.locked_by for row in rows}


async def shared_equally(engine: AsyncEngine, relays: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            held = list((await owners(engine)).values())
            if None not in held and sorted(map(held.count, {*held})) == [SHARDS // relays] * relays:
                return
            await asyncio.sleep(0.05)


async def standstill(engine: AsyncEngine, stream: Stream, victim: Slot, end: Callable[[], Awaitable[None]]) -> float:
    """Seconds from the end of a relay to the first event of each of its lanes from somebody else."""
    mine = {shard for shard, owner in (await owners(engine)).items() if owner == victim.name}
    stream.look()
    name, ended = victim.name, time.time()
    ending = asyncio.ensure_future(end())
    first: dict[int, float] = {}
    deadline = time.monotonic() + PATIENCE
    while len(first) < len(mine) and time.monotonic() < deadline:
        for arrival in stream.look():
            if arrival.relay != name and shard_of(arrival) in mine:
                first.setdefault(shard_of(arrival), arrival.at)
        await asyncio.sleep(0.005)
    await ending
    assert len(first) == len(mine), f"{len(mine) - len(first)} lanes stand still"
    return max(first.values()) - ended


def resident_kilobytes(slot: Slot) -> int:
    status = Path(f"/proc/{slot.child.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


async def outage(
    engine: AsyncEngine, stream: Stream, writing: asyncio.Future[None], processes: Processes, seconds: float
) -> dict[str, Any]:
    await stream.arrival_of_all()
    before = max(map(resident_kilobytes, processes.slots))
    async with processes.without_sink():
        await asyncio.sleep(seconds)
        during = max(map(resident_kilobytes, processes.slots))
    stream.stopped = True
    await writing
    await stream.arrival_of_all()
    async with engine.connect() as connection:
        burnt = await connection.execute(sa.select(sa.func.count()).where(outbox.c.attempts > 0))
    return {
        "outage_seconds": seconds,
        "attempts_burnt": burnt.scalar_one(),
        "resident_kilobytes_before": before,
        "resident_kilobytes_during": during,
    }


async def prove(url: str, folder: Path, *, lease: float, seconds: float) -> dict[str, Any]:
    engine = create_async_engine(url, isolation_level="READ COMMITTED")
    async with Pillarbox(engine, transports={route.to: SinkTransport(0, "", timeout=1.0)}, routes=[route]) as box:
        await box.migrate()
        async with engine.begin() as connection:
            await connection.run_sync(ledger.metadata.create_all)
        async with Processes(folder, url=url, destination=route.to, relays=2, lease=lease) as processes:
            stream = Stream(box, processes)
            writing = asyncio.ensure_future(stream.write())
            one, other = processes.slots
            await shared_equally(engine, 2)

            async def kill() -> None:
                async with processes.killed(one):
                    await asyncio.sleep(lease + 2)  # so that nobody helps

            killed = await standstill(engine, stream, one, kill)
            await shared_equally(engine, 2)
            stopped = await standstill(engine, stream, other, other.child.stop)
            processes.slots.remove(other)
            cost = await outage(engine, stream, writing, processes, seconds)
            await processes.stop()
            stream.look()
        async with engine.connect() as connection:
            committed = await connection.run_sync(read_ledger, ledger)
    await engine.dispose()
    balance = compare(committed, stream.arrived, [*processes.faults, *processes.stalls])
    growth = cost["resident_kilobytes_during"] / cost["resident_kilobytes_before"] - 1
    return {
        "lease": lease,
        "after_kill_seconds": round(killed, 2),
        "after_sigterm_seconds": round(stopped, 2),
        **cost,
        **asdict(balance),
        "holds": killed <= lease + 1
        and stopped < 1
        and cost["attempts_burnt"] == 0
        and growth <= MOST_GROWTH
        and balance.holds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lease", type=float, default=5.0)
    parser.add_argument("--outage", type=float, default=60.0)
    parser.add_argument("--database", choices=[*DATABASES, "both"], default="both")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    servers = Servers()
    os.environ["PILLARBOX_HOME"] = str(servers.folder / "home")
    try:
        for database in DATABASES if given.database == "both" else [given.database]:
            url = servers.create_database(DATABASES[database]).url()
            with tempfile.TemporaryDirectory(prefix="pillarbox-recovery-") as folder:
                results[database] = asyncio.run(prove(url, Path(folder), lease=given.lease, seconds=given.outage))
    finally:
        servers.stop()
    print(json.dumps(results, indent=2))
    return int(not all(result["holds"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
