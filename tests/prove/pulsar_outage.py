"""A Pulsar broker that is cut off while a service writes: what that costs the events, and what it costs the service.

A writer commits single events at a steady rate, and a relay process sends them through a link that is cut for 5 s, five
times, then for 30 s, and then for 30 s swallows all bytes without telling anybody. Each time nothing may be lost,
doubled or out of order, no attempt may be counted, and what had piled up must be acknowledged within 5 s after the link
is mended. The writer must not notice: its latencies while the link is bad are compared with those before, slice by
slice, and the median of five such ratios counts.

    python -m tests.prove.pulsar_outage --rate 200 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

import sqlalchemy as sa

from pillarbox import Pillarbox
from pillarbox.outbox import Direction
from pillarbox.stores.inspection import VIEWS
from pillarbox.stores.tables import outbox
from pillarbox.testing.link import Link
from pillarbox.transports.pulsar import PulsarTransport
from tests.prove.ack_kill import Acknowledged, Where, compare, open_box, read_topic, start_relay
from tests.servers import Servers

unsent = VIEWS[Direction.OUTBOUND].unsent
KEYS = 50
RATE = 200.0
MOST_P50, MOST_P99 = 1.1, 1.5
MOST_SECONDS = 5.0
"""From the mended link to the acknowledgement of all that was written before."""
PATIENCE = 60.0
WAITING = sa.select(sa.func.count()).select_from(unsent)
BURNT = sa.text("SELECT count(*) FROM outbox_events WHERE attempts > 0 OR status IN ('RETRYING', 'FAILED', 'PARKED')")


class Outage(NamedTuple):
    """One kind: what happens to the link, for how long, how often, and in how many slices it is compared."""

    how: Callable[[Link], None]
    seconds: float
    rounds: int
    slices: int


OUTAGES = {
    "cut_5": Outage(Link.cut, 5.0, rounds=5, slices=1),
    "cut_30": Outage(Link.cut, 30.0, rounds=1, slices=5),
    "swallow_30": Outage(Link.swallow, 30.0, rounds=1, slices=5),
}


class Service:
    """Writes at its own pace, whatever becomes of the events."""

    def __init__(self, box: Pillarbox, rate: float, draw: random.Random) -> None:
        self.written: dict[str, int] = defaultdict(int)
        self._box = box
        self._rate = rate
        self._draw = draw
        self._latencies: list[float] = []

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        stopped = asyncio.Event()
        task = asyncio.create_task(self._write(stopped))
        try:
            yield
        finally:
            stopped.set()
            await task

    async def slice(self, seconds: float) -> list[float]:
        """The latencies of so many seconds."""
        first = len(self._latencies)
        await asyncio.sleep(seconds)
        return self._latencies[first:]

    async def _write(self, stopped: asyncio.Event) -> None:
        due = time.perf_counter()
        while not stopped.is_set():
            due += 1 / self._rate
            await asyncio.sleep(due - time.perf_counter())
            key = f"k{self._draw.randrange(KEYS)}"
            self.written[key] += 1
            began = time.perf_counter()
            async with self._box.unit_of_work() as uow:
                uow.publish(Acknowledged(number=self.written[key]), key=key)
            self._latencies.append(time.perf_counter() - began)
            due = max(due, began)  # what a slow machine has missed is not made up for


async def suffer(box: Pillarbox, service: Service, links: Sequence[Link], outage: Outage) -> dict[str, Any]:
    """All rounds of one kind of outage."""
    seconds = outage.seconds / outage.slices
    pairs: list[tuple[list[float], list[float]]] = []
    recoveries, burnt, lags = [], 0, []
    for _ in range(outage.rounds):
        before = [await service.slice(seconds) for _ in range(outage.slices)]
        for link in links:
            outage.how(link)
        during = [await service.slice(seconds) for _ in range(outage.slices)]
        pairs += zip(before, during, strict=True)
        burnt += await _ask(box, BURNT)
        last = await _ask(box, sa.select(sa.func.max(outbox.c.id)))
        waiting = WAITING.where(unsent.c.id <= last)
        lags.append(await _ask(box, waiting))
        mended = time.perf_counter()
        for link in links:
            link.mend()
        async with asyncio.timeout(PATIENCE):
            while await _ask(box, waiting):  # noqa: ASYNC110  a database rings no bell
                await asyncio.sleep(0.05)
        recoveries.append(time.perf_counter() - mended)
    return {
        "lag_events": max(lags),
        "recovery_seconds": [round(each, 2) for each in recoveries],
        "attempts_burnt": burnt + await _ask(box, BURNT),
        "write_p50_ms": [_both(pair, 50, 1000) for pair in pairs],
        "write_p99_ms": [_both(pair, 99, 1000) for pair in pairs],
        "write_p50_ratio": _ratio(pairs, 50),
        "write_p99_ratio": _ratio(pairs, 99),
    }


async def _ask(box: Pillarbox, question: sa.Executable) -> int:
    async with box.engine.connect() as connection:
        return int((await connection.execute(question)).scalar_one() or 0)


def _percentile(latencies: list[float], percent: int) -> float:
    return statistics.quantiles(latencies, n=100, method="inclusive")[percent - 1]


def _both(pair: tuple[list[float], list[float]], percent: int, factor: float) -> list[float]:
    return [round(_percentile(side, percent) * factor, 2) for side in pair]


def _ratio(pairs: list[tuple[list[float], list[float]]], percent: int) -> float:
    """Of the bad time to the good time before it, by the median of all pairs."""
    ratios = [_percentile(during, percent) / _percentile(before, percent) for before, during in pairs]
    return round(statistics.median(ratios), 3)


async def prove(
    database: str, url: str, admin: str, *, outages: dict[str, Outage], rate: float, seed: int
) -> dict[str, Any]:
    """One outage after the other on one topic, which is read at the end."""
    topic = f"persistent://public/default/outage-{uuid4().hex[:12]}"
    results: dict[str, Any] = {}
    async with (
        Link("127.0.0.1", urlsplit(url).port or 0) as link,
        Link("127.0.0.1", urlsplit(admin).port or 0) as admin_link,
        open_box(database, PulsarTransport(url, admin_url=admin), topic) as box,
    ):
        await box.migrate()
        where = Where(database, f"pulsar://127.0.0.1:{link.port}", f"http://127.0.0.1:{admin_link.port}", topic)
        relay = await start_relay(where, lease=5.0)
        service = Service(box, rate, random.Random(seed))
        try:
            async with service.writing():
                await _served(box, service)
                for name, outage in outages.items():
                    print(name, file=sys.stderr, flush=True)
                    results[name] = await suffer(box, service, [link, admin_link], outage)
            await _served(box, service)
            if relay.returncode is not None:
                raise RuntimeError(f"the relay ended by itself, with {relay.returncode}")
        finally:
            if relay.returncode is None:
                relay.kill()
            await relay.wait()
        await box.engine.dispose()
    found = await asyncio.to_thread(read_topic, url, topic)
    events, on_topic = sum(service.written.values()), sum(map(len, found.values()))
    return (
        {"seed": seed, "rate": rate, "events": events, "on_topic": on_topic} | compare(service.written, found) | results
    )


async def _served(box: Pillarbox, service: Service) -> None:
    """Until the relay keeps up."""
    async with asyncio.timeout(PATIENCE):
        while not service.written or await _ask(box, WAITING) > KEYS:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)


def violations(result: dict[str, Any], outages: dict[str, Outage]) -> list[str]:
    """What must not be, one by one."""
    found = [kind for kind in ("missing", "doubled", "inverted", "ghosts") if result[kind]]
    for name in outages:
        measured = result[name]
        if measured["attempts_burnt"]:
            found.append(f"{name}: attempts were counted")
        if max(measured["recovery_seconds"]) > MOST_SECONDS:
            found.append(f"{name}: the lag did not fall back in time")
        found += [
            f"{name}: business writes were slower by their {percent}"
            for percent, most in (("p50", MOST_P50), ("p99", MOST_P99))
            if measured[f"write_{percent}_ratio"] > most
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--only", choices=OUTAGES, action="append", help="one kind of outage; may be repeated")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr, flush=True)
    outages = {name: OUTAGES[name] for name in given.only or OUTAGES}
    servers = Servers()
    os.environ["PILLARBOX_HOME"] = str(servers.folder / "home")
    try:
        database = servers.create_database("embedded").url()
        broker: Any = servers.get("pulsar")
        proving = prove(database, broker.url, broker.admin_url, outages=outages, rate=given.rate, seed=given.seed)
        result = asyncio.run(proving)
    finally:
        servers.stop()
    result["violations"] = violations(result, outages)
    print(json.dumps(result, indent=2))
    return int(bool(result["violations"]))


if __name__ == "__main__":
    sys.exit(main())
