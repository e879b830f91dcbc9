"""What kept rows cost: draining from a table that holds millions of delivered rows, to draining from an empty one.

Twice: right after the rows were written, with neither VACUUM nor ANALYZE, so that the planner knows nothing; and after
both. The two databases take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from sqlalchemy import text

from pillarbox import Pillarbox

from .load import Sink, drain, fill, seed, vacuum
from .servers import Bench

_CHUNK = 1_000_000
_FIRST = 1_000_000_000
"""The number of the first event that is drained: event ids are made from it, and must not meet the kept ones."""
_DELIVERED = (
    "UPDATE pillarbox_lanes "
    "SET cursor = (SELECT coalesce(max(id), 0) FROM pillarbox_outbox) || ' ' || pg_current_snapshot()"
)
"""Every lane has come past all rows that are there."""


async def measure(bench: Bench) -> dict[str, object]:
    """All figures, by name."""
    sink = Sink()
    async with (
        bench.database() as empty_url,
        bench.database() as kept_url,
        bench.box(empty_url, sink) as empty,
        bench.box(kept_url, sink) as kept,
    ):
        await _keep(kept, bench.sizes.kept)
        unanalyzed = await _ratio(bench, empty, kept, sink, _FIRST)
        await vacuum(kept)
        await vacuum(empty)
        analyzed = await _ratio(bench, empty, kept, sink, 2 * _FIRST)
    return {"kept_rows_ratio": analyzed, "kept_rows_unanalyzed_ratio": unanalyzed, "kept_rows": bench.sizes.kept}


async def _keep(box: Pillarbox, rows: int) -> None:
    async with box.engine.begin() as connection:
        await connection.execute(text("ALTER TABLE pillarbox_outbox SET (autovacuum_enabled = false)"))
    for first in range(0, rows, _CHUNK):
        async with box.engine.begin() as connection:
            count = min(_CHUNK, rows - first)
            await seed(connection, count, first=first, keys=100_000, shards=box.router.shards)
    async with box.engine.begin() as connection:
        await connection.execute(text(_DELIVERED))


async def _ratio(bench: Bench, empty: Pillarbox, kept: Pillarbox, sink: Sink, first: int) -> float:
    ratios = []
    events = bench.sizes.drain
    for number in range(bench.sizes.few):
        rates = []
        for box in (empty, kept):
            await fill(box, events, first=first + number * events)
            rates.append(await drain(box, sink, events))
        ratios.append(rates[1] / rates[0])
    return statistics.median(ratios)


def report(results: Mapping[str, Any]) -> str:
    """Lines for people."""
    return (
        f"kept rows: drain beside {results['kept_rows']:,} delivered rows, to an empty table\n"
        f"  ratio              {results['kept_rows_ratio']:10.2f}\n"
        f"  not analyzed       {results['kept_rows_unanalyzed_ratio']:10.2f}"
    )
