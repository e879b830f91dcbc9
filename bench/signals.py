"""What signals cost: the drain rate with `PrometheusSignals` beside the rate without, in turns on one database."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from pillarbox import Pillarbox
from pillarbox.prometheus import PrometheusSignals

from .load import ROUTE, Sink, refill_and_drain
from .servers import Bench


async def measure(bench: Bench) -> dict[str, float]:
    """All figures, by name."""
    events, rounds = bench.sizes.signal_events, bench.sizes.signal_rounds
    ratios: list[float] = []
    sink, metrics = Sink(), PrometheusSignals()
    async with (
        bench.database() as url,
        bench.box(url, sink) as silent,
        bench.box(url, sink, signals=[metrics]) as observed,
    ):
        for number in range(rounds + 1):
            rates: dict[Pillarbox, float] = {}
            # Each goes first in every second pair: what comes second finds everything warm.
            for box in (silent, observed) if number % 2 else (observed, silent):
                rates[box] = await refill_and_drain(box, sink, events)
            if number:  # the first pair warms up
                ratios.append(rates[observed] / rates[silent])
    labels = {"route": ROUTE.record.name, "destination": "sink"}
    told = metrics.registry.get_sample_value("outbox_publish_success_total", labels)
    assert told == (rounds + 1) * events, told
    return {"signals_ratio": statistics.median(ratios)}


def report(results: Mapping[str, Any]) -> str:
    """Lines for people."""
    return f"signals: drain with metrics to drain without\n  ratio              {results['signals_ratio']:10.3f}"
