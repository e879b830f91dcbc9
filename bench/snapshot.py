"""What an old snapshot costs: poll and advance while a transaction stays open, to the same without it.

A report that reads for a minute, and a transaction that has written and does not end, keep the server from clearing
dead rows away, and stay in every snapshot that a relay takes. Writers go on meanwhile, and so do the turns of all
lanes, through the port of the store. What is compared are the turns of the last quarter: then it has hurt for longest.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from sqlalchemy import text

from pillarbox import Pillarbox
from pillarbox.outbox import Batch, Lane

from .children import Task, writer
from .figures import BATCH
from .load import ROUTE, Sink, seed
from .proof import require
from .servers import Bench

_RATE = 1000
_TOGETHER = 20
_COUNT = text("SELECT count(*) FROM pillarbox_outbox")
_HELD = 900_000_000
"""The number of the event that is not committed."""


async def measure(bench: Bench) -> dict[str, float]:
    """All figures, by name."""
    without = await _turns(bench, held=False)
    held = await _turns(bench, held=True)
    return {
        "old_snapshot_ratio": held / without,
        "old_snapshot_turn_ms": held,
        "old_snapshot_without_turn_ms": without,
    }


async def _turns(bench: Bench, *, held: bool) -> float:
    """Milliseconds of a turn, in the last quarter of the time."""
    seconds = bench.sizes.snapshot_seconds
    async with bench.database() as url, bench.box(url, Sink()) as box:
        lanes = await box.store.take("bench", lease=3600, wanted={ROUTE.id: box.router.shards})
        assert len(lanes) == box.router.shards
        task = Task(url, _RATE, seconds + 5, _TOGETHER)
        async with writer(task), _old_transactions(box) if held else nullcontext():
            await _until_written(box)
            return await _sweep(box, lanes, seconds)


@asynccontextmanager
async def _old_transactions(box: Pillarbox) -> AsyncIterator[None]:
    """One that reads and one that has written, both open."""
    repeatable = box.engine.execution_options(isolation_level="REPEATABLE READ")
    async with repeatable.connect() as reading, box.engine.connect() as writing:
        before = await reading.scalar(_COUNT)
        await seed(writing, 1, first=_HELD, keys=_HELD + 1, shards=box.router.shards)
        try:
            yield
            after, own = await reading.scalar(_COUNT), await writing.scalar(_COUNT)
            require(after == before and own, "the old transactions were not open any more, or saw what came later")
        finally:
            await writing.rollback()
            await reading.rollback()


async def _until_written(box: Pillarbox) -> None:
    async with asyncio.timeout(30):
        while not await box.store.ready([ROUTE.id]):  # noqa: ASYNC110  another process writes
            await asyncio.sleep(0.01)


async def _sweep(box: Pillarbox, lanes: list[Lane], seconds: float) -> float:
    started = time.perf_counter()
    taken: list[float] = []
    while (now := time.perf_counter()) - started < seconds:
        for index, lane in enumerate(lanes):
            before = time.perf_counter()
            lanes[index], rows = await _turn(box, lane)
            if rows and now - started > seconds * 0.75:
                taken.append((time.perf_counter() - before) * 1000)
        await asyncio.sleep(0.005)
    return statistics.median(taken)


async def _turn(box: Pillarbox, lane: Lane) -> tuple[Lane, int]:
    """What a relay asks of the store to send what is new; the lane and the number of rows come back."""
    page = await box.store.poll(lane, limit=BATCH)
    if page.fresh:
        batch = Batch(items=[row.id for row in page.fresh], cursor=page.cursor, relaxed=True)
        return await box.store.announce(lane, batch, settle=lane.announced is not None), len(page.fresh)
    return (lane if lane.announced is None else await box.store.settle(lane)), 0


def report(results: Mapping[str, Any]) -> str:
    """Lines for people."""
    with_it, without = results["old_snapshot_turn_ms"], results["old_snapshot_without_turn_ms"]
    return (
        "old snapshot: poll and advance with old transactions open, to without\n"
        f"  ratio              {results['old_snapshot_ratio']:10.2f} ({with_it:.2f} ms, {without:.2f} ms)"
    )
