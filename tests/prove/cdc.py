"""The proof of the cursor once more, with bodies from a replication stream, while somebody takes the stream away: its
slot is dropped, its connection cut, its publication dropped, every second or so. The ledger says what must have
arrived, and in which order; and every loss must have been said.

    python -m tests.prove.cdc --events 100000 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import make_url

from pillarbox.embedded import EmbeddedPostgres
from pillarbox.retry import RetryPolicy
from pillarbox.stores import feed as feeds
from pillarbox.stores.buffer import Buffer
from pillarbox.stores.cdc import CdcStore
from pillarbox.stores.feed import Feed
from pillarbox.telemetry import Labels, Metric, Observer, Signals
from tests.prove import cursor
from tests.prove.cursor import PROCESSES, SHARDS, WRITERS, Reader, compare, write
from tests.servers import Servers

SLOT = "pillarbox_prove"


class Counts(Observer):
    """Adds up what is told."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()

    def count(self, metric: Metric, labels: Labels, amount: int, tenant: str | None = None) -> None:  # noqa: ARG002
        self.counted[f"{metric.name.removeprefix('outbox_stream_').removesuffix('_total')}: {labels[0]}"] += amount


class Everything:
    """All lanes."""

    def __contains__(self, lane: object) -> bool:
        return True


class Thief:
    """Takes the stream away, in every way that there is."""

    def __init__(self, url: str, seed: int) -> None:
        self._address = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        self._draw = random.Random(f"{seed} thief")
        self.deeds: Counter[str] = Counter()

    async def run(self, feed: Feed, over: asyncio.Event, pause: float) -> None:
        """Strike, wait until that was noticed and there is a stream again, and strike again."""
        while not over.is_set():
            await self._until(feed, over, up=True)
            await asyncio.sleep(self._draw.random() * pause)
            await asyncio.to_thread(self._strike)
            await self._until(feed, over, up=False)

    async def noticed(self, feed: Feed) -> None:
        """The last strike may not have been, yet."""
        async with asyncio.timeout(30):
            await self._until(feed, asyncio.Event(), up=True)

    async def _until(self, feed: Feed, over: asyncio.Event, *, up: bool) -> None:
        while (feed.state == "up") != up and not over.is_set():  # noqa: ASYNC110  nobody signals it
            await asyncio.sleep(0.001)

    def _strike(self) -> None:
        deed = self._draw.choice(("slot dropped", "connection cut", "publication dropped"))
        with psycopg.connect(self._address, autocommit=True) as connection:
            if deed == "publication dropped":
                connection.execute("DROP PUBLICATION IF EXISTS pillarbox")
            else:
                connection.execute(
                    "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots "
                    "WHERE database = current_database() AND active_pid IS NOT NULL"
                )
            if deed == "slot dropped":
                drop_slots(connection)
        self.deeds[deed] += 1


def drop_slots(connection: psycopg.Connection[Any]) -> None:
    """Those that nobody reads."""
    connection.execute(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
        "WHERE database = current_database() AND active_pid IS NULL AND NOT temporary"
    )


async def prove(
    url: str, *, events: int, seed: int, two_phase: bool, processes: int = 0, pace: float = 1.0, pause: float = 1.5
) -> dict[str, Any]:
    """Write, read and take away at the same time, then compare."""
    started, written, counts = time.perf_counter(), asyncio.Event(), Counts()
    async with cursor._engine(url, 2 * SHARDS + 6) as engine:
        await cursor._set_up(engine)
        buffer, thief = Buffer(4_000_000), Thief(url, seed)
        feed = Feed(engine, buffer, relay="prove", slot=SLOT, signals=Signals([counts]))
        feed.start(len, Everything())
        store = CdcStore(engine, buffer, Signals([counts]))
        # Lanes with detours read from the table.
        readers = [Reader(store, shard, seed, parts=0.002) for shard in range(SHARDS)]
        working = [asyncio.create_task(reader.run(written)) for reader in readers]
        stealing = asyncio.create_task(thief.run(feed, written, pause))
        try:
            if processes:
                books = await cursor._write_in_processes(url, events, seed, two_phase, processes)
            else:
                books = [await write(url, range(WRITERS), events, seed, two_phase=two_phase, pace=pace)]
        except BaseException:
            for task in working:
                task.cancel()
            raise
        finally:
            written.set()
        lanes = await asyncio.gather(*working)
        await stealing
        await thief.noticed(feed)
        await feed.stop()
        balance = await compare(engine, lanes)
    with psycopg.connect(thief._address, autocommit=True) as connection:
        drop_slots(connection)
    struck, told = thief.deeds.total(), sum(count for what, count in counts.counted.items() if what.startswith("lost"))
    from_stream = counts.counted["rows: stream"]
    return {
        **asdict(balance),
        "first_faults": [fault for lane in lanes for fault in lane.faults][:10],
        "transactions": dict(sum((each.deeds for each in books), Counter())),
        "struck": dict(thief.deeds),
        "told": dict(counts.counted),
        "bodies_by_the_stream": from_stream,
        **{
            name: sum(getattr(lane, name) for lane in lanes) for name in ("polls", "pages", "late", "owners", "rebuilt")
        },
        "seconds": round(time.perf_counter() - started, 1),
        "holds": balance.holds and struck > 0 and told >= struck - 1 and from_stream > 0,
    }


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """A PostgreSQL whose WAL can be decoded, and that can prepare transactions."""
    postgres = EmbeddedPostgres(folder)
    with postgres, psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET wal_level = 'logical'")
        connection.execute(f"ALTER SYSTEM SET max_prepared_transactions = {2 * WRITERS}".encode())
    with postgres:
        yield postgres.url


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    feeds.CHECK_SECONDS = 0.2
    feeds.AGAIN = RetryPolicy(base=0.2, cap=0.5)  # it is taken away far more often than a stream that is worth it
    servers = Servers()
    os.environ["PILLARBOX_HOME"] = str(servers.folder / "home")
    try:
        with server(servers.folder / "cdc") as url:
            result = asyncio.run(prove(url, events=given.events, seed=given.seed, two_phase=True, processes=PROCESSES))
    finally:
        servers.stop()
    print(json.dumps({"seed": given.seed, **result}, indent=2))
    return int(not result["holds"])


if __name__ == "__main__":
    sys.exit(main())
