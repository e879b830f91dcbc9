"""What a relay costs: drain rate, client CPU and WAL, beside the same work by hand, in turns on one database.

A run ends when every event is durably done. Beside it, how depth, keys and processes change the rate:

    deep_backlog_ratio  the first events of a deep backlog, to a small one
    hot_key_ratio       all events of one key, to all keys different
    relays_ratio        several relay processes, to one
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from typing import Any

from pillarbox import Pillarbox

from . import children
from .figures import BATCH, PAYLOAD_BYTES, cpu_seconds
from .floors import floor_on
from .load import ROUTE, Sink, drain, empty, fill, refill_and_drain, vacuum
from .proof import require
from .servers import Bench


async def measure(bench: Bench) -> dict[str, object]:
    """All figures, by name."""
    sink = Sink()
    async with bench.database() as url, bench.box(url, sink) as box:
        figures = await _beside_floor(bench, url, box, sink)
        figures |= await _hot_key(bench, box, sink)
        figures |= await _deep(bench, box, sink)
    return figures | await _relays(bench)


async def _beside_floor(bench: Bench, url: str, box: Pillarbox, sink: Sink) -> dict[str, object]:
    events = bench.sizes.drain
    ratios, rates, floors, cpu, wal = [], [], [], [], []
    async with floor_on(url) as floor:
        for _ in range(bench.sizes.rounds):
            floors.append(await floor.refill_and_drain(events))
            await empty(box)
            await fill(box, events)
            await vacuum(box)
            wal_before, cpu_before = await floor.wal_bytes(), cpu_seconds()
            rates.append(await drain(box, sink, events))
            cpu.append((cpu_seconds() - cpu_before) / events * 1e6)
            wal.append((await floor.wal_bytes() - wal_before) / events)
            ratios.append(rates[-1] / floors[-1])
    return {
        "drain_ratio": statistics.median(ratios),
        "drain_per_second": statistics.median(rates),
        "drain_floor_per_second": statistics.median(floors),
        "cpu_us_per_event": statistics.median(cpu),
        "wal_bytes_per_event": statistics.median(wal),
    }


async def _hot_key(bench: Bench, box: Pillarbox, sink: Sink) -> dict[str, float]:
    ratios = []
    for _ in range(bench.sizes.few):
        spread = await refill_and_drain(box, sink, bench.sizes.drain)
        ratios.append(await refill_and_drain(box, sink, bench.sizes.drain, keys=1) / spread)
    return {"hot_key_ratio": statistics.median(ratios)}


async def _deep(bench: Bench, box: Pillarbox, sink: Sink) -> dict[str, float]:
    smalls = [await _first(box, sink, bench.sizes.drain, bench.sizes.drain) for _ in range(bench.sizes.few)]
    deep = await _first(box, sink, bench.sizes.backlog, bench.sizes.backlog_first)
    smalls += [await _first(box, sink, bench.sizes.drain, bench.sizes.drain) for _ in range(bench.sizes.few)]
    return {"deep_backlog_ratio": deep / statistics.median(smalls), "deep_backlog_per_second": deep}


async def _first(box: Pillarbox, sink: Sink, events: int, enough: int) -> float:
    """The rate at which the first so many leave."""
    await empty(box)
    await fill(box, events)
    await vacuum(box)
    sink.seen.clear()
    relay = box.relay(batch=BATCH)
    started = time.perf_counter()
    running = asyncio.ensure_future(relay.run())
    while len(sink.seen) < enough:  # noqa: ASYNC110  a sink rings no bell
        await asyncio.sleep(0.002)
    rate = len(sink.seen) / (time.perf_counter() - started)
    relay.stop()
    await running
    return rate


async def _relays(bench: Bench) -> dict[str, object]:
    rates: dict[int, list[float]] = {count: [] for count in bench.sizes.relays}
    for _ in range(bench.sizes.few):
        for count in bench.sizes.relays:
            async with bench.database() as url, bench.box(url, Sink()) as box:
                rates[count].append(await _with_relays(bench, url, box, count))
    one = rates[1]
    ratios = {
        str(count): statistics.median(many / single for many, single in zip(found, one, strict=True))
        for count, found in rates.items()
    }
    return {"relays_ratio": ratios, "relays_per_second": {str(n): statistics.median(it) for n, it in rates.items()}}


async def _with_relays(bench: Bench, url: str, box: Pillarbox, count: int) -> float:
    events = bench.sizes.relays_backlog
    async with children.relays(url, count) as running:
        await fill(box, events)
        started = time.perf_counter()
        while await box.store.ready([ROUTE.id]):  # noqa: ASYNC110  other processes send
            await asyncio.sleep(0.02)
        rate = events / (time.perf_counter() - started)
        told = [await relay.told() for relay in running]
    assert sum(each["count"] for each in told) == events, told
    assert not any(each["disordered"] for each in told), told
    require(all(each["count"] for each in told), f"some of the relays sent nothing: {told}")
    return rate


def report(results: Mapping[str, Any]) -> str:
    """Lines for people."""
    relays = ", ".join(f"{count}: {ratio:.2f}" for count, ratio in results["relays_ratio"].items())
    return "\n".join(
        [
            f"relay: events of {PAYLOAD_BYTES} bytes to a sink that does nothing",
            f"  drain              {results['drain_per_second']:10,.0f} events/s",
            f"  by hand            {results['drain_floor_per_second']:10,.0f} events/s",
            f"  ratio              {results['drain_ratio']:10.2f}",
            f"  client CPU         {results['cpu_us_per_event']:10.1f} us per event",
            f"  WAL                {results['wal_bytes_per_event']:10,.0f} bytes per event",
            f"  one hot key        {results['hot_key_ratio']:10.2f} of all keys different",
            f"  deep backlog       {results['deep_backlog_ratio']:10.2f} of a small one",
            f"  relay processes    {relays} of one",
        ]
    )
