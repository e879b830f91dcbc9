"""What is measured of every contender, in a process of its own, with the library under test and no other.

    drain    a backlog to a handler that does nothing, until every event is durably done in the database
    latency  from COMMIT returning in a second process to the handler being called
    write    (that second process)

The answer is one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import asyncpg  # type: ignore[import-untyped]

from bench.figures import cpu_seconds, waits

Arrived = Callable[[int], None]

_WARM_UP = 1.0
_DRAIN_SECONDS = 120.0
_LATENCY_SECONDS = 20.0


class Contender:
    """A library. Subclasses say how it is used; those of one table say what is left in it."""

    left = ""
    """SQL that counts the events that are not durably done."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.url = dsn.replace("postgresql://", "postgresql+asyncpg://")

    async def prepare(self) -> None:
        """Make its tables."""
        raise NotImplementedError

    async def fill(self, events: int) -> None:
        """Commit so many events, numbered from 0."""
        raise NotImplementedError

    async def start(self, arrived: Arrived, *, drain: bool) -> None:
        """Send in the background, and call ``arrived`` with each event's number."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stop sending."""
        raise NotImplementedError

    async def open(self) -> None:
        """Make ready to write, a few transactions at a time."""
        raise NotImplementedError

    async def commit(self, seq: int) -> None:
        """Write an event by a transaction of its own."""
        raise NotImplementedError

    async def count_left(self, connection: asyncpg.Connection) -> int:
        return int(await connection.fetchval(self.left))


class Arrivals:
    """Which events have come, and when the last one has."""

    def __init__(self, expected: int) -> None:
        self.times: dict[int, float] = {}
        self.all_here = asyncio.Event()
        self._expected = expected

    def __call__(self, seq: int) -> None:
        self.times.setdefault(seq, time.monotonic())
        if len(self.times) == self._expected:
            self.all_here.set()


async def drain(contender: Contender, events: int) -> dict[str, float]:
    await contender.prepare()
    await contender.fill(events)
    observer = await asyncpg.connect(contender.dsn)
    await observer.execute("VACUUM ANALYZE")
    assert await contender.count_left(observer) > 0
    arrivals = Arrivals(events)
    wal_before, cpu_before = await _wal(observer), cpu_seconds()
    started = time.perf_counter()
    await contender.start(arrivals, drain=True)
    async with asyncio.timeout(_DRAIN_SECONDS):
        await arrivals.all_here.wait()
        while await contender.count_left(observer):  # noqa: ASYNC110  only the database knows
            await asyncio.sleep(0.005)
    seconds = time.perf_counter() - started
    cpu, wal = cpu_seconds() - cpu_before, await _wal(observer) - wal_before
    await contender.stop()
    await observer.close()
    return {
        "per_second": events / seconds,
        "cpu_us_per_event": cpu / events * 1e6,
        "wal_bytes_per_event": wal / events,
    }


async def _wal(connection: asyncpg.Connection) -> int:
    return int(await connection.fetchval("SELECT pg_current_wal_insert_lsn() - '0/0'"))


async def latency(contender: Contender, rate: int, seconds: float) -> dict[str, float]:
    events = int((_WARM_UP + seconds) * rate)
    await contender.prepare()
    arrivals = Arrivals(events)
    await contender.start(arrivals, drain=False)
    await asyncio.sleep(1.0)  # it goes idle
    command = [*sys.orig_argv[: sys.orig_argv.index("latency")], "write", contender.dsn]
    options = ["--events", str(events), "--rate", str(rate)]
    writer = await asyncio.create_subprocess_exec(*command, *options, stdout=subprocess.PIPE)
    output, _ = await writer.communicate()
    committed = {int(seq): at for seq, at in json.loads(output).items() if int(seq) >= _WARM_UP * rate}
    async with asyncio.timeout(_LATENCY_SECONDS):
        await arrivals.all_here.wait()
    await contender.stop()
    return waits(committed, arrivals.times)


async def write(contender: Contender, events: int, rate: int) -> dict[int, float]:
    committed: dict[int, float] = {}

    async def commit(seq: int) -> None:
        await contender.commit(seq)
        committed[seq] = time.monotonic()

    await contender.open()
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for seq in range(events):
            await asyncio.sleep(max(0.0, started + seq / rate - time.monotonic()))
            group.create_task(commit(seq))
    return committed


def main(kind: type[Contender]) -> None:
    """The whole program of a contender's module."""
    import uvloop  # noqa: PLC0415  who only asks for names needs none

    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["drain", "latency", "write"])
    parser.add_argument("dsn")
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--rate", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0)
    asked = parser.parse_args()

    async def go() -> Any:
        contender = kind(asked.dsn)
        if asked.mode == "drain":
            return await drain(contender, asked.events)
        if asked.mode == "latency":
            return await latency(contender, asked.rate, asked.seconds)
        return await write(contender, asked.events, asked.rate)

    print(json.dumps(uvloop.run(go())), flush=True)
    os._exit(0)  # libraries leave tasks and threads behind
