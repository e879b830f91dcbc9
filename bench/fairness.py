"""What a crowd costs its neighbour: latency of a small tenant beside a huge backlog of another one in the same shard,
to its latency alone.

The relay starts in front of the backlog. How long it takes until the first event of the small tenant comes through is a
figure of its own; latencies are those of the events that were written after that, and before the crowd was gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import text

from pillarbox import Pillarbox

from .children import Task, writer
from .figures import waits
from .load import TimingSink, seed
from .proof import doorbell_heard, require
from .servers import Bench

_PER_SECOND = 50
_CROWD = 100_000_000
"""The number of the first event of the crowd."""
_SECONDS = 600
_ENOUGH = 5


async def measure(bench: Bench) -> dict[str, object]:
    """All figures, by name."""
    alone, _ = await _latency(bench, crowd=0)
    beside, first = await _latency(bench, crowd=bench.sizes.crowd)
    return {
        "fairness_first_s": first,
        "fairness_ratio": beside["p99"] / alone["p99"],
        "fairness_ms": {"alone": alone, "beside": beside},
        "fairness_crowd": bench.sizes.crowd,
    }


async def _latency(bench: Bench, crowd: int) -> tuple[dict[str, float], float]:
    sink = TimingSink()
    # One shard, so that nobody has a lane to himself.
    async with bench.database() as url, bench.box(url, sink, shards=1) as box:
        if crowd:
            async with box.engine.begin() as connection:
                await seed(connection, crowd, first=_CROWD, keys=1000, prefix="crowd-", tenant="large")
        task = Task(url, _PER_SECOND, bench.sizes.crowd_seconds, warm_up=0.0, tenant="small")
        async with doorbell_heard(box, task.seconds), writer(task) as committing:
            await _until_written(box)
            relay, started = box.relay(), time.monotonic()
            running = asyncio.ensure_future(relay.run())
            committed = await committing
        async with asyncio.timeout(_SECONDS):
            while not committed.keys() <= sink.arrived.keys():  # noqa: ASYNC110  a sink rings no bell
                await asyncio.sleep(0.05)
        relay.stop()
        await running
    began = min(sink.arrived[seq] for seq in committed)
    ended = max((at for seq, at in sink.arrived.items() if seq >= _CROWD), default=float("inf"))
    measured = {seq: at for seq, at in committed.items() if began <= at <= ended}
    require(len(measured) >= _ENOUGH, f"{len(measured)} events were committed beside the crowd, too few to measure")
    return waits(measured, sink.arrived), began - started


async def _until_written(box: Pillarbox) -> None:
    """The relay starts when the small tenant has."""
    async with asyncio.timeout(30), box.engine.connect() as connection:
        statement = text("SELECT count(*) FROM (SELECT FROM pillarbox_outbox WHERE tenant = 'small' LIMIT 1) AS found")
        while not (await connection.execute(statement)).scalar():
            await connection.rollback()
            await asyncio.sleep(0.05)


def report(results: Mapping[str, Any]) -> str:
    """Lines for people."""
    alone, beside = results["fairness_ms"]["alone"], results["fairness_ms"]["beside"]
    return (
        f"fairness: a small tenant beside {results['fairness_crowd']:,} waiting events of another, to alone\n"
        f"  ratio of p99       {results['fairness_ratio']:10.1f}\n"
        f"  first event after  {results['fairness_first_s']:10.2f} s\n"
        f"  alone              {alone['p50']:10.2f} ms p50, {alone['p99']:.2f} ms p99\n"
        f"  beside             {beside['p50']:10.2f} ms p50, {beside['p99']:.2f} ms p99"
    )
