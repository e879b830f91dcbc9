"""From COMMIT returning in one process to the sink being called in another, at 100 and at 2,000 events per second.

At 100 each event is a transaction. At 2,000 a transaction has twenty: as many transactions as that, each waiting for
its disk, are more than a small machine can commit.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from typing import Any

from pillarbox import Pillarbox

from .children import Task, write
from .figures import waits
from .load import TimingSink
from .proof import doorbell_heard
from .servers import Bench

_RATES = {"latency_ms": (100, 1), "latency_2000_ms": (2000, 20)}


async def measure(bench: Bench) -> dict[str, object]:
    """All figures, by name."""
    sink = TimingSink()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _RATES}
    async with bench.database() as url, bench.box(url, sink) as box:
        for number in range(bench.sizes.latency_rounds):
            for name, (rate, together) in _RATES.items():
                task = Task(url, rate, bench.sizes.latency_seconds, together, first=number * 1_000_000)
                found[name].append(await _latency(box, sink, task))
    return {name: {each: _median(rounds, each) for each in ("p50", "p99")} for name, rounds in found.items()}


async def _latency(box: Pillarbox, sink: TimingSink, task: Task) -> dict[str, float]:
    sink.arrived.clear()
    relay = box.relay()
    running = asyncio.ensure_future(relay.run())
    async with doorbell_heard(box, task.seconds):
        committed = await write(task)
    async with asyncio.timeout(10):
        while not committed.keys() <= sink.arrived.keys():  # noqa: ASYNC110  a sink rings no bell
            await asyncio.sleep(0.01)
    relay.stop()
    await running
    return waits(committed, sink.arrived)


def _median(rounds: list[dict[str, float]], name: str) -> float:
    return statistics.median(each[name] for each in rounds)


def report(results: Mapping[str, Any]) -> str:
    """Lines for people."""
    lines = ["latency: COMMIT returned to sink called, in another process"]
    for name, (rate, _) in _RATES.items():
        lines.append(f"  {rate:5,} events/s      {results[name]['p50']:8.2f} ms p50, {results[name]['p99']:.2f} ms p99")
    return "\n".join(lines)
