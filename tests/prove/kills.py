"""Relays that are killed again and again, and a sink that remembers what reached it.

Four relay processes share the lanes of one route while writers commit events for a few keys, and some roll back. Every
now and then, at a moment that the seed decides, a relay gets SIGKILL and another one takes its place. At the end the
ledger and the sink's file must agree: nothing lost, nothing that was never committed, every key in order at first
occurrence, and no duplicate but those whose sender was killed around the time of the first copy. On a machine that is
too slow for the lease a relay also loses lanes by itself, and says so: these are the stalls, which explain duplicates,
too.

    python -m tests.prove.kills --events 20000 --kills 40 --seed 7 --database both
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
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
from pillarbox.outbox import Status
from pillarbox.stores import inspection
from tests.servers import Servers

RELAYS = 4
KEYS = 30
WRITERS = 3
MOST_PER_TRANSACTION = 20
MOST_UNDER_WAY = 300
ROLLED_BACK = 0.1
PATIENCE = 60.0
"""Seconds without any progress, after which the proof has failed."""

DATABASES = {"postgres": "embedded", "mariadb": "mariadb"}


class Counted(IntegrationEvent, name="kills.thing.counted"):
    """Something has happened to a thing, for the n-th time."""

    number: int


ledger = ledger_table(sa.MetaData(), "kills_ledger")
route = Route("kills.thing.*", to="kills", topic="kills")


class _ChangedItsMind(Exception):  # noqa: N818  leaves a unit of work by an error
    pass


class Flow:
    """What is on its way: how much was committed, what has arrived, and who sends."""

    def __init__(self, processes: Processes, events: int) -> None:
        self._processes = processes
        self.events = events
        self.next_kill = 0
        self.committed = 0
        self.arrived: list[Arrival] = []
        self.delivered: set[str] = set()
        self._senders: set[str] = set()

    async def watch(self) -> None:
        """Look at the sink's file until we are cancelled; nothing new for a long time is an error."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self._processes.check()
            if self.look():
                deadline = time.monotonic() + PATIENCE
            await asyncio.sleep(0.01)
        raise TimeoutError(f"nothing has arrived for {PATIENCE} s, after {len(self.arrived)} messages")

    def look(self) -> bool:
        more = self._processes.arrivals.more()
        self.arrived += more
        self.delivered |= {arrival.event_id for arrival in more}
        self._senders |= {arrival.relay for arrival in more}
        return bool(more)

    @property
    def has_room(self) -> bool:
        """Whether writers may go on: they do not run far ahead of the sink, nor of the next kill."""
        return self.committed < min(len(self.delivered), self.next_kill) + MOST_UNDER_WAY

    @property
    def victims(self) -> list[Slot]:
        """Whom to kill now, if it is time: those who have sent something. If nothing is left to send: anybody."""
        if len(self.delivered) < self.next_kill:
            return []
        slots = self._processes.slots
        idle = len(self.delivered) == self.committed and (self.committed == self.events or not self.has_room)
        return [slot for slot in slots if slot.name in self._senders] or (slots if idle else [])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  a file rings no bell
        await asyncio.sleep(0.01)


class Writer:
    """Writes events of its own keys, so that the order within a key is the order of its transactions."""

    def __init__(self, box: Pillarbox, flow: Flow, number: int, events: int, seed: int) -> None:
        self._box = box
        self._flow = flow
        self._draw = random.Random(f"{seed} writer {number}")
        self._last = {f"thing-{key}": 0 for key in range(number, KEYS, WRITERS)}
        self._left = events
        self.rolled_back = 0

    async def write(self) -> None:
        while self._left:
            await until(lambda: self._flow.has_room)
            keys = self._draw.choices(list(self._last), k=min(self._left, self._draw.randint(1, MOST_PER_TRANSACTION)))
            last = dict(self._last)
            try:
                await self._transaction(keys, last)
            except _ChangedItsMind:
                self.rolled_back += len(keys)
            else:
                self._last, self._left = last, self._left - len(keys)
                self._flow.committed += len(keys)

    async def _transaction(self, keys: list[str], last: dict[str, int]) -> None:
        async with self._box.unit_of_work() as uow:
            entries = []
            for key in keys:
                last[key] += 1
                event = Counted(number=last[key])
                uow.publish(event, key=key)
                entries.append({"event_id": event.event_id, "tenant": None, "key": key, "version": last[key]})
            await uow.session.execute(sa.insert(ledger), entries)
            if self._draw.random() < ROLLED_BACK:
                raise _ChangedItsMind


async def kill(processes: Processes, flow: Flow, kills: int, seed: int) -> None:
    """Kill relays as the sink fills, each at a number of events that the seed decides."""
    draw = random.Random(f"{seed} kills")
    for moment in sorted(draw.sample(range(1, flow.events), kills)):
        flow.next_kill = moment
        await until(lambda: bool(flow.victims))
        await asyncio.sleep(draw.random() * 0.05)
        async with processes.killed(draw.choice(flow.victims)):
            pass
    flow.next_kill = flow.events


async def prove(url: str, folder: Path, *, events: int, kills: int, lease: float, seed: int) -> dict[str, Any]:
    """Write and kill at the same time, wait until the outbox is empty, and compare."""
    started = time.perf_counter()
    engine = create_async_engine(url, isolation_level="READ COMMITTED")
    box = Pillarbox(engine, transports={route.to: SinkTransport(0, "", timeout=1.0)}, routes=[route])
    await box.start()
    await box.migrate()
    async with engine.begin() as connection:
        await connection.run_sync(ledger.metadata.create_all)
    async with Processes(folder, url=url, destination=route.to, relays=RELAYS, lease=lease) as processes:
        flow = Flow(processes, events)
        shares = [len(range(number, events, WRITERS)) for number in range(WRITERS)]
        writers = [Writer(box, flow, number, share, seed) for number, share in enumerate(shares)]
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(flow.watch())
            work = [group.create_task(writer.write()) for writer in writers]
            work.append(group.create_task(kill(processes, flow, kills, seed)))
            await asyncio.wait(work)
            while not await _at_rest(engine):  # noqa: ASYNC110  a database rings no bell
                await asyncio.sleep(0.05)
            watching.cancel()
        await processes.stop()
        flow.look()
        stalls = processes.stalls
    async with engine.connect() as connection:
        committed = await connection.run_sync(read_ledger, ledger)
    await box.stop()
    await engine.dispose()
    balance = compare(committed, flow.arrived, [*processes.faults, *stalls])
    return {
        **asdict(balance),
        "rolled_back": sum(writer.rolled_back for writer in writers),
        "kills": len(processes.faults),
        "stalls": len(stalls),
        "kills_before_settle": len(_senders_of_duplicates(flow.arrived) & {kill.target for kill in processes.faults}),
        "seconds": round(time.perf_counter() - started, 1),
        "holds": balance.holds,
    }


async def _at_rest(engine: AsyncEngine) -> bool:
    async with engine.connect() as connection:
        groups = await connection.run_sync(inspection.statistics)
    return {group.status for group in groups} == {Status.SENT}


def _senders_of_duplicates(arrived: list[Arrival]) -> set[str]:
    """Who sent the first copy of an event that came again."""
    first: dict[str, str] = {}
    found = set()
    for arrival in arrived:
        if arrival.event_id in first:
            found.add(first[arrival.event_id])
        first.setdefault(arrival.event_id, arrival.relay)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--lease", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--database", choices=[*DATABASES, "both"], default="both")
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    results: dict[str, Any] = {"seed": given.seed}
    servers = Servers()
    os.environ["PILLARBOX_HOME"] = str(servers.folder / "home")
    try:
        for database in DATABASES if given.database == "both" else [given.database]:
            url = servers.create_database(DATABASES[database]).url()
            sizes = {"events": given.events, "kills": given.kills, "lease": given.lease, "seed": given.seed}
            with tempfile.TemporaryDirectory(prefix="pillarbox-kills-") as folder:
                results[database] = asyncio.run(prove(url, Path(folder), **sizes))
    finally:
        servers.stop()
    print(json.dumps(results, indent=2))
    return int(not all(results[name]["holds"] for name in DATABASES if name in results))


if __name__ == "__main__":
    sys.exit(main())
