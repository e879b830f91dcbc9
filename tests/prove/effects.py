"""Effects happen once: events through a broker that doubles and reorders them, to consumers that are killed again and
again, also between an effect and its acknowledgement.

A writer raises events and enters them in a ledger, a relay sends them, and processes with three consumers each get
them. At the end what these have done is compared with the ledger.

    python -m tests.prove.effects --events 100000 --seed 7
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
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any, Self
from uuid import UUID

import sqlalchemy as sa
import uvloop
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import Pillarbox, UnitOfWork
from pillarbox.transports.memory import MemoryTransport
from tests.prove.accounts import GROUPS, REPORTS, ROUTES, TOPIC, Account, Closed, Entry, Moved, compare, set_up, waiting
from tests.prove.hostile import HostileBroker
from tests.servers import Servers

ACCOUNTS = 500
CUSTOMERS = 20
PER_TRANSACTION = 50
MOST_PER_ACCOUNT = 4
CLOSED = 0.05
ROLLED_BACK = 0.05
PROCESSES = 3
MOST_UNDER_WAY = 5_000
"""Copies that a group may have in front of it before the writer waits."""
PATIENCE = 60.0
"""Seconds without any progress, after which the proof has failed."""


class _ChangedItsMind(Exception):  # noqa: N818  leaves a unit of work by an error
    pass


class Writer:
    """Raises events of accounts, several of one account in a transaction, and enters them."""

    def __init__(self, box: Pillarbox, seed: int) -> None:
        self._box = box
        self._draw = random.Random(f"{seed} writer")
        self._numbers = 0

    async def transaction(self, limit: int) -> int:
        """How many events were committed."""
        try:
            async with self._box.unit_of_work() as uow:
                written = await self._write(uow, min(limit, PER_TRANSACTION))
                if self._draw.random() < ROLLED_BACK:
                    raise _ChangedItsMind
        except _ChangedItsMind:
            return 0
        return written

    async def _write(self, uow: UnitOfWork, limit: int) -> int:
        numbers = self._draw.sample(range(ACCOUNTS), limit // MOST_PER_ACCOUNT + 1)
        there = await uow.session.execute(sa.select(Account).where(Account.id.in_([UUID(int=n) for n in numbers])))
        accounts = {account.id: account for account in there.scalars()}
        entries: list[dict[str, Any]] = []
        for number in numbers:
            account = accounts.get(UUID(int=number))
            if account is None:
                account = Account(id=UUID(int=number), customer=f"customer-{number % CUSTOMERS}", events=0)
                uow.add(account)
            count = min(self._draw.randint(1, MOST_PER_ACCOUNT), limit - len(entries))
            account.events += count
            entries += [self._event(account) for _ in range(count)]
        await uow.session.execute(sa.insert(Entry), entries)
        return len(entries)

    def _event(self, account: Account) -> dict[str, Any]:
        about: dict[str, Any] = {"account_id": account.id, "customer": account.customer}
        self._numbers += 1
        note, cents = f"note {self._numbers}", self._draw.randint(-10_000, 10_000)
        if self._draw.random() < CLOSED:
            closed = Closed(**about)
            account.raise_event(closed)
            return {"event_id": closed.event_id, **about, "cents": None, "note": ""}
        moved = Moved(**about, cents=cents, note=note)
        account.raise_event(moved)
        return {"event_id": moved.event_id, **about, "cents": cents, "note": note}


# -- processes ---------------------------------------------------------------------------------------------------------


class Processes:
    """Consumers as processes. None of them outlives the block."""

    def __init__(self, url: str, folder: Path, socket: Path, count: int) -> None:
        self._command = [sys.executable, "-m", "tests.prove.accounts", url, str(socket)]
        self._log = folder / "consumers.log"
        self._count = count
        self._lives = 0
        self.running: dict[str, asyncio.subprocess.Process] = {}

    async def __aenter__(self) -> Self:
        for _ in range(self._count):
            await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in [*self.running]:
            await self.kill(name)

    async def start(self) -> None:
        self._lives += 1
        name = f"consumers-{self._lives}"
        with self._log.open("ab") as log:
            self.running[name] = await asyncio.create_subprocess_exec(*self._command, name, stderr=log)

    async def kill(self, name: str) -> None:
        process = self.running.pop(name)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def stop(self) -> None:
        """Ask all of them to end, and wait for it."""
        for process in self.running.values():
            process.terminate()
        for name in [*self.running]:
            assert await self.running.pop(name).wait() == 0, self.said()

    def check(self) -> None:
        """All of them live, but those that we have killed."""
        assert all(process.returncode is None for process in self.running.values()), self.said()

    def said(self) -> str:
        """The last that they have told."""
        return self._log.read_text()[-4000:]


class Killer:
    """Kills consumers as work gets done: now any of them at any moment, now one whose effect is committed and whose
    acknowledgement nobody has heard.
    """

    def __init__(self, broker: HostileBroker, processes: Processes, seed: int) -> None:
        self._broker = broker
        self._processes = processes
        self._draw = random.Random(f"{seed} kills")
        self._groups = cycle(GROUPS)
        self.kills = 0
        self.before_ack = 0

    async def run(self, kills: int, last: int) -> None:
        """Kill so many, until so many copies are acknowledged."""
        for moment in sorted(self._draw.choices(range(last), k=kills)):
            while self._progress() < moment:  # noqa: ASYNC110  nobody rings
                await asyncio.sleep(0.01)
            victim = await (self._whoever_acknowledges() if self.kills % 2 else self._anybody())
            await self._processes.kill(victim)
            await self._processes.start()
            self.kills += 1

    def _progress(self) -> int:
        return sum(group.acknowledged for group in self._broker.groups.values())

    async def _anybody(self) -> str:
        await asyncio.sleep(self._draw.random() * 0.1)
        return self._draw.choice([*self._processes.running])

    async def _whoever_acknowledges(self) -> str:
        caught: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._broker.trap = next(self._groups), caught.set_result
        self.before_ack += 1
        return await caught


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  nobody rings
        await asyncio.sleep(0.01)


# -- the proof ---------------------------------------------------------------------------------------------------------


async def prove(
    url: str, folder: Path, *, events: int, kills: int, seed: int, processes: int = PROCESSES
) -> dict[str, Any]:
    """Write, deliver, consume and kill at the same time; wait until all is acknowledged; compare."""
    started = time.perf_counter()
    engine, memory = create_async_engine(url), MemoryTransport()
    broker = HostileBroker(folder / "broker", GROUPS, seed)
    members = Processes(url, folder, broker.socket, processes)
    async with Pillarbox(engine, transports={"broker": memory}, routes=ROUTES) as box:
        await set_up(box)
        async with broker, members, asyncio.TaskGroup() as group:
            helpers = [group.create_task(work) for work in (box.relay().run(), _forward(memory, broker))]
            helpers.append(group.create_task(_watch(broker, members)))
            killer = Killer(broker, members, seed)
            killing = group.create_task(killer.run(kills, last=events * len(GROUPS)))
            await _write(Writer(box, seed), broker, memory, events)
            await killing
            await until(lambda: not any(each.left for each in broker.groups.values()))
            while await waiting(box):  # noqa: ASYNC110  nobody rings
                await asyncio.sleep(0.01)
            for helper in helpers:
                helper.cancel()
            await members.stop()
        await box.relay().drain()
        balance = await compare(box, memory.sent(REPORTS))
    await engine.dispose()
    groups = broker.groups.values()
    return {
        "events": events,
        "deliveries": sum(group.deliveries for group in groups),
        "duplicates": sum(group.duplicates for group in groups),
        "disordered": sum(group.disordered for group in groups),
        "kills": killer.kills,
        "kills_before_ack": killer.before_ack,
        "seconds": round(time.perf_counter() - started, 1),
        **balance._asdict(),
        "holds": balance.holds,
    }


async def _write(writer: Writer, broker: HostileBroker, memory: MemoryTransport, events: int) -> None:
    """Write all of them, not too far ahead of the consumers."""
    left = events
    while left:
        left -= await writer.transaction(left)
        await until(lambda: max(group.left for group in broker.groups.values()) < MOST_UNDER_WAY)
    await memory.received(TOPIC, events)
    await until(lambda: min(group.offered for group in broker.groups.values()) == events)
    broker.complete()


async def _forward(memory: MemoryTransport, broker: HostileBroker) -> None:
    """What the relay sends goes to the hostile broker."""
    subscription = await memory.subscribe([TOPIC], "hostile")
    while True:
        received = await subscription.receive(1_000)
        broker.offer([each.message for each in received])
        await subscription.ack(received)


async def _watch(broker: HostileBroker, processes: Processes) -> None:
    """Nothing acknowledged for a long time, or a consumer that ends by itself, is an error."""
    before, deadline = -1, 0.0
    while True:
        processes.check()
        now = sum(group.acknowledged for group in broker.groups.values())
        if now != before:
            before, deadline = now, time.monotonic() + PATIENCE
        if time.monotonic() > deadline:
            left = {name: group.left for name, group in broker.groups.items()}
            raise TimeoutError(f"nothing was acknowledged for {PATIENCE} s; left are {left}; {processes.said()}")
        await asyncio.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    servers = Servers()
    os.environ["PILLARBOX_HOME"] = str(servers.folder / "home")
    try:
        url = servers.create_database("embedded").url()
        with tempfile.TemporaryDirectory(prefix="pillarbox-effects-") as folder:
            result = uvloop.run(prove(url, Path(folder), events=given.events, kills=given.kills, seed=given.seed))
    finally:
        servers.stop()
    print(json.dumps({"seed": given.seed, **result}, indent=2))
    return int(not result["holds"])


if __name__ == "__main__":
    sys.exit(main())
