"""A relay with a replication stream beside one without, on the same server, in pairs that take turns to be first.

    cdc_ratio       a backlog that was there before: the stream is opened meanwhile, and has none of its bodies
    cdc_live_ratio  while others write: how long until the last of their events is there
    cdc_hits        of these, the part whose bodies the stream had brought; and if the destination takes its time

A relay that loses its stream, or gets none, goes on from the table: that fails the subject. The server decodes its WAL,
which that of the other subjects does not: so it is one of its own.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import psycopg

from pillarbox import Pillarbox, telemetry
from pillarbox.embedded import EmbeddedPostgres
from pillarbox.relay import Relay
from pillarbox.telemetry import Labels, Metric, Observer
from pillarbox.transport import Message, Outcome

from .figures import BATCH
from .load import Sink, empty, fill, ring, seed, vacuum
from .proof import require
from .servers import Bench

Source = Literal["cursor", "cdc"]
_TRANSACTION = 100
"""Events that a writer commits at once."""
_PAUSE = 0.05
"""What a destination takes for a request, if it takes its time."""
_UP_SECONDS = 30.0


class _Rows(Observer):
    """Where bodies came from, and how often a stream was lost."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()

    def count(self, metric: Metric, labels: Labels, amount: int, tenant: str | None = None) -> None:  # noqa: ARG002
        if metric is telemetry.STREAM_ROWS:
            self.counts[labels[0]] += amount
        elif metric is telemetry.STREAM_LOST:
            self.lost[labels[0]] += amount

    def share(self) -> float:
        """The part that came by the stream."""
        return self.counts["stream"] / max(1, self.counts.total())


class _Patient(Sink):
    """May take its time."""

    pause = 0.0

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:
        if self.pause:
            await asyncio.sleep(self.pause)
        return await super().send(producer, messages)


async def measure(bench: Bench) -> dict[str, object]:
    """All figures, by name."""
    sink, rows, hits = _Patient(), _Rows(), dict[str, float]()
    drains: dict[Source, list[float]] = {"cursor": [], "cdc": []}
    lives: dict[Source, list[float]] = {"cursor": [], "cdc": []}
    with _server(bench) as url:
        there = replace(bench, url=url)
        async with there.database() as database, there.box(database, sink, signals=[rows]) as box:
            for number in range(2 * bench.sizes.rounds):
                pair: tuple[Source, ...] = ("cursor", "cdc") if number % 2 else ("cdc", "cursor")
                for source in pair:
                    drains[source].append(await _drain(box, sink, bench.sizes.relays_backlog, source))
            rows.counts.clear()
            for number in range(2 * bench.sizes.rounds):
                pair = ("cursor", "cdc") if number % 2 else ("cdc", "cursor")
                for source in pair:
                    lives[source].append(await _live(box, sink, bench.sizes.drain, source))
            hits["at once"] = rows.share()
            rows.counts.clear()
            sink.pause = _PAUSE
            await _live(box, sink, bench.sizes.drain, "cdc")
            hits["after 50 ms"] = rows.share()
            require(min(hits.values()) > 0, f"all bodies came from the table, and none by the stream: {hits}")
        require(not rows.lost.total(), f"streams were lost meanwhile: {dict(rows.lost)}")
    return {
        "cdc_ratio": _ratio(drains),
        "cdc_per_second": {source: statistics.median(found) for source, found in drains.items()},
        "cdc_live_ratio": _ratio(lives),
        "cdc_live_per_second": {source: statistics.median(found) for source, found in lives.items()},
        "cdc_hits": hits,
    }


def _ratio(rates: Mapping[Source, list[float]]) -> float:
    return statistics.median(cdc / cursor for cdc, cursor in zip(rates["cdc"], rates["cursor"], strict=True))


@contextmanager
def _server(bench: Bench) -> Iterator[str]:
    server = EmbeddedPostgres(bench.folder / "logical", database="postgres")
    with server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET wal_level = 'logical'")
    with server:
        yield server.url


async def _drain(box: Pillarbox, sink: Sink, events: int, source: Source) -> float:
    await empty(box)
    await fill(box, events)
    await vacuum(box)
    sink.seen.clear()
    relay = box.relay(batch=BATCH, source=source)
    started = time.perf_counter()
    running = asyncio.ensure_future(relay.run())
    return await _finish(relay, running, sink, events, started)


async def _live(box: Pillarbox, sink: Sink, events: int, source: Source) -> float:
    await empty(box)
    sink.seen.clear()
    relay = box.relay(batch=BATCH, source=source)
    running = asyncio.ensure_future(relay.run())
    await _until_up(relay, box.router.shards)
    started = time.perf_counter()
    await asyncio.gather(*(_write(box, first, events // 4) for first in range(0, events, events // 4)))
    return await _finish(relay, running, sink, events, started)


async def _write(box: Pillarbox, first: int, events: int) -> None:
    for start in range(first, first + events, _TRANSACTION):
        async with box.engine.begin() as connection:
            await seed(connection, _TRANSACTION, first=start, shards=box.router.shards)
        ring(box)


async def _finish(relay: Relay, running: asyncio.Future[None], sink: Sink, events: int, started: float) -> float:
    while len(sink.seen) < events:  # noqa: ASYNC110  a sink rings no bell
        await asyncio.sleep(0.002)
    rate = events / (time.perf_counter() - started)
    await _until_up(relay)  # the stream of a short backlog may still be on its way
    relay.stop()
    await running
    return rate


async def _until_up(relay: Relay, lanes: int = 0) -> None:
    """Wait for the stream, if the relay is to have one."""
    ends = time.monotonic() + _UP_SECONDS
    while relay.status()["lanes"] < lanes or relay.status().get("stream", "up") != "up":
        require(time.monotonic() < ends, f"the stream is not up after {_UP_SECONDS:g} s: {relay.status()}")
        await asyncio.sleep(0.002)


def report(results: Mapping[str, Any]) -> str:
    """Lines for people."""
    drain, live = results["cdc_per_second"], results["cdc_live_per_second"]
    hits = ", ".join(f"{share:.0%} if the answer comes {when}" for when, share in results["cdc_hits"].items())
    return "\n".join(
        [
            "stream: a relay with source=cdc, and of it one without",
            f"  backlog            {drain['cdc']:10,.0f} events/s {results['cdc_ratio']:10.2f}",
            f"  while others write {live['cdc']:10,.0f} events/s {results['cdc_live_ratio']:10.2f}",
            f"  by the stream      {hits}",
        ]
    )
