"""What a flush costs late in a long transaction, and what the transaction keeps of what it has written.

One unit of work flushes again and again, some events each time: the time of its 2,000th flush to that of its 10th,
each a median over its neighbours. Then the memory that Python has allocated for a transaction, when everything is
written and nothing committed.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Mapping
from typing import Any

from pillarbox import Pillarbox, UnitOfWork

from .load import Sink
from .servers import Bench
from .write import OrderCreated, fields

EARLY, LATE, AROUND = 10, 2_000, 5
EVENTS = 100
"""In a flush whose time is taken."""
MANY = 1_000
"""In a flush of a large transaction."""


async def measure(bench: Bench) -> dict[str, float]:
    """All figures, by name."""
    sizes = bench.sizes
    async with bench.database() as url, bench.box(url, Sink(), slow_after=None) as box:
        await _flushes(box, EARLY + AROUND)
        runs = [await _flushes(box, LATE + AROUND) for _ in range(sizes.few)]
        kept = await _kept(box, sizes.transaction)
    return {
        "flush_early_ms": statistics.median(early for early, _ in runs) * 1000,
        "flush_late_ms": statistics.median(late for _, late in runs) * 1000,
        "flush_ratio": statistics.median(late / early for early, late in runs),
        "bytes_per_event": kept,
    }


async def _flushes(box: Pillarbox, count: int) -> tuple[float, float]:
    """Seconds of an early flush and of the last ones."""
    times = []
    async with box.unit_of_work() as uow:
        for number in range(count):
            _publish(uow, number * EVENTS, EVENTS)
            started = time.perf_counter()
            await uow.flush()
            times.append(time.perf_counter() - started)
        await uow.rollback()
    middle = 2 * AROUND + 1
    return statistics.median(times[EARLY - 1 - AROUND :][:middle]), statistics.median(times[-middle:])


async def _kept(box: Pillarbox, events: int) -> float:
    """Bytes per event that a transaction holds before COMMIT."""
    async with box.unit_of_work() as uow:
        _publish(uow, 0, MANY)
        await uow.flush()
        gc.collect()
        tracemalloc.start()
        try:
            for first in range(MANY, events, MANY):
                _publish(uow, first, MANY)
                await uow.flush()
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        await uow.rollback()
    return kept / (events - MANY)


def _publish(uow: UnitOfWork, first: int, events: int) -> None:
    for seq in range(first, first + events):
        uow.publish(OrderCreated(**fields(seq)), key=str(seq))  # type: ignore[arg-type]


def report(results: Mapping[str, Any]) -> str:
    """Lines for people."""
    return "\n".join(
        [
            f"flush: a transaction with many flushes of {EVENTS} events",
            f"  {EARLY:,}th flush, ms     {results['flush_early_ms']:10.2f}",
            f"  {LATE:,}th flush, ms  {results['flush_late_ms']:10.2f}",
            f"  ratio              {results['flush_ratio']:10.3f}",
            f"  bytes per event    {results['bytes_per_event']:10.0f}",
        ]
    )
