"""The stores beside each other, and the floors: one backlog, drained by each in turns.

PostgreSQL runs with its default durability. MariaDB and SQLite are there to compare, as far as they are installed;
MariaDB is the server of the tests, which flushes its log once per second.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from pillarbox import Pillarbox
from tests.servers import DatabaseServer, MariaDB, Missing, SQLite

from . import floors
from .load import Sink, box_on, refill_and_drain
from .servers import Bench

_OTHERS: dict[str, type[DatabaseServer]] = {"MariaDB": MariaDB, "SQLite": SQLite}


async def measure(bench: Bench) -> dict[str, object]:
    """All figures, by name."""
    events = bench.sizes.drain
    rates: dict[str, list[float]] = {f"floor: {kind}": [] for kind in floors.KINDS}
    sink = Sink()
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(bench.database())
        floor = await stack.enter_async_context(floors.floor_on(url))
        boxes = {name: box async for name, box in _boxes(bench, sink, stack)}
        for _ in range(bench.sizes.few):
            for kind in floors.KINDS:
                rates[f"floor: {kind}"].append(await floor.refill_and_drain(events, kind))
            for name, box in boxes.items():
                rates.setdefault(name, []).append(await refill_and_drain(box, sink, events))
    marks = rates["floor: mark"]
    return {
        "stores": {
            name: {
                "per_second": statistics.median(found),
                "ratio": statistics.median(rate / mark for rate, mark in zip(found, marks, strict=True)),
            }
            for name, found in rates.items()
        }
    }


async def _boxes(bench: Bench, sink: Sink, stack: AsyncExitStack) -> AsyncIterator[tuple[str, Pillarbox]]:
    url = await stack.enter_async_context(bench.database())
    yield "PostgreSQL", await stack.enter_async_context(box_on(url, sink))
    for name, kind in _OTHERS.items():
        try:
            url = stack.enter_context(bench.another(kind))
        except Missing:
            continue
        yield name, await stack.enter_async_context(box_on(url, sink))


def report(results: Mapping[str, Any]) -> str:
    """A table: rates, and ratios to the floor that claims and marks."""
    lines = ["stores and floors: events/s, and of the floor that claims and marks"]
    for name, found in results["stores"].items():
        lines.append(f"  {name:18} {found['per_second']:10,.0f} {found['ratio']:8.2f}")
    return "\n".join(lines)
