"""What a huge late transaction costs: memory of a relay that finds a million events at once, behind it.

The transaction takes its ids first and commits last: meanwhile others commit, and their events are delivered. Then all
of it must arrive, each key in order, and the relay, a process of its own, must not hold it in memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from .children import RelayProcess, relays
from .figures import resident_mb
from .load import Sink, fill, ring, seed
from .servers import Bench

_OTHERS = 2000
_KEYS = 1000
_SILENT = 20.0
"""What has not come after so many seconds without any event is lost."""
_IDLE = 2.0


async def measure(bench: Bench) -> dict[str, float]:
    """All figures, by name."""
    events = bench.sizes.late
    async with bench.database() as url, bench.box(url, Sink()) as box, relays(url, 1) as [relay]:
        await fill(box, _OTHERS, first=2 * events)
        await _until(relay, _OTHERS)
        await asyncio.sleep(_IDLE)
        idle = resident_mb(relay.pid)
        async with box.engine.begin() as connection:
            # Keys of its own: a key that others write, too, would have made them wait for its lock.
            await seed(connection, events, keys=_KEYS, shards=box.router.shards, prefix="late-")
            await fill(box, _OTHERS, first=3 * events)
            await _until(relay, 2 * _OTHERS)
        ring(box)
        started = time.perf_counter()
        most = await _until(relay, 2 * _OTHERS + events)
        seconds = time.perf_counter() - started
        told = await relay.told()
    assert told["count"] == 2 * _OTHERS + events, told
    assert told["disordered"] == 0, told
    return {"late_1m_rss_mb": max(0.0, most - idle), "late_1m_per_second": events / seconds, "late_events": events}


async def _until(relay: RelayProcess, events: int) -> float:
    """Wait until so many have arrived; the most memory that the relay had meanwhile comes back."""
    most, here, changed_at = 0.0, -1, time.perf_counter()
    while here < events:
        before, here = here, (await relay.told())["count"]
        if here != before:
            changed_at = time.perf_counter()
        assert time.perf_counter() - changed_at < _SILENT, f"{here:,} of {events:,} events have come, and no more do"
        most = max(most, resident_mb(relay.pid))
        await asyncio.sleep(0.05)
    return most


def report(results: Mapping[str, Any]) -> str:
    """Lines for people."""
    return (
        f"late transaction: {results['late_events']:,} events that commit behind others\n"
        f"  relay's memory     {results['late_1m_rss_mb']:10.1f} MB over idle\n"
        f"  delivered          {results['late_1m_per_second']:10,.0f} events/s, each key in order"
    )
