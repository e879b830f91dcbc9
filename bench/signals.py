"""What signals cost: the drain rate with `PrometheusSignals` beside the rate without, in turns on one database."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import relay
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import Pillarbox
from pillarbox.prometheus import PrometheusSignals

PAIRS = 21


async def measure(url: str) -> dict[str, object]:
    """All figures, by name."""
    engine = create_async_engine(url)
    ratios: list[float] = []
    sink, metrics = relay.Sink(), PrometheusSignals()
    transports, routes = {"sink": sink}, [relay.ROUTE]
    try:
        async with (
            Pillarbox(engine, transports=transports, routes=routes) as silent,
            Pillarbox(engine, transports=transports, routes=routes, signals=[metrics]) as observed,
        ):
            await silent.migrate()
            for number in range(PAIRS + 1):
                rates: dict[Pillarbox, float] = {}
                # Each goes first in every second pair: what comes second finds everything warm.
                for box in (silent, observed) if number % 2 else (observed, silent):
                    await relay.fill(box)
                    rates[box] = await relay.drain(box, sink)
                if number:  # the first pair warms up
                    ratios.append(rates[observed] / rates[silent])
    finally:
        await engine.dispose()
    told = metrics.registry.get_sample_value(
        "outbox_publish_success_total", {"route": relay.ROUTE.record.name, "destination": "sink"}
    )
    assert told == (PAIRS + 1) * relay.EVENTS, told
    return {"signals_ratio": statistics.median(ratios)}


def report(results: Mapping[str, object]) -> str:
    """Lines for people."""
    return f"signals: drain with metrics to drain without\n  ratio              {results['signals_ratio']:10.3f}"
