"""The database of consumers is away while messages go on coming: none of them may become a dead letter, all take
effect once, and consumers go on soon after the database is there again.

The server is stopped as a crash would stop it, in the middle of everything. Consumers try but once, so that
an error of the outage which is not known for what it is would make dead letters.

    python -m tests.prove.consumer_outage --seconds 60 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import sqlalchemy as sa
import uvloop
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import Message, Pillarbox, RetryPolicy
from pillarbox.consumers.consumer import RETRY, Consumer
from pillarbox.consumers.failure import Failure
from pillarbox.embedded import EmbeddedPostgres
from pillarbox.telemetry import HANDLING_FAILED, Labels, Metric, Observer
from pillarbox.testing.link import Link
from pillarbox.transports.memory import MemoryTransport
from tests.prove.accounts import REPORTS, ROUTES, TOPIC, Entry, compare, consumers, set_up, waiting

ACCOUNTS = 200
CUSTOMERS = 20
ONCE = RetryPolicy(RETRY.base, RETRY.cap, attempts=1)
SOON = RETRY.cap + 5.0
"""Seconds after which consumers must have gone on: none of them waits longer for its next attempt, and machines are
busy.
"""
GIVEN_UP = 60.0
"""Seconds without any progress."""


class Failures(Observer):
    """Counts failed attempts by their class."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()

    def count(self, metric: Metric, labels: Labels, amount: int, tenant: str | None = None) -> None:  # noqa: ARG002
        if metric is HANDLING_FAILED:
            self.counted[labels[1]] += amount


class Stream:
    """Messages at a steady pace. It keeps the ledger until there is a database for it."""

    def __init__(self, broker: MemoryTransport, rate: float, seed: int) -> None:
        self.entries: list[dict[str, Any]] = []
        self._broker = broker
        self._rate = rate
        self._draw = random.Random(seed)
        self._versions: Counter[UUID] = Counter()

    async def run(self, stopped: asyncio.Event) -> None:
        started = time.perf_counter()
        while not stopped.is_set():
            due = int((time.perf_counter() - started) * self._rate) - len(self.entries)
            await self._broker.send("stream", [self._message() for _ in range(due)])
            await asyncio.sleep(0.02)

    def _message(self) -> Message:
        number = self._draw.randrange(ACCOUNTS)
        account, event_id = UUID(int=number), uuid4()
        about = {"account_id": account, "customer": f"customer-{number % CUSTOMERS}"}
        content = {**about, "cents": self._draw.randint(-10_000, 10_000), "note": f"note {len(self.entries)}"}
        self._versions[account] += 1
        self.entries.append({"event_id": event_id, **content})
        headers = {
            "event_id": str(event_id),
            "event_type": "effects.account.moved",
            "schema_version": "v1",
            "occurred_at": datetime.now(UTC).isoformat(),
            "content_type": "application/json",
            "aggregate_type": "account",
            "aggregate_id": str(account),
            "version": str(self._versions[account]),
            "event_index": "0",
            "event_count": "1",
        }
        return Message(TOPIC, str(account), msgspec.json.encode(content), headers)


@asynccontextmanager
async def stopped(server: EmbeddedPostgres) -> AsyncIterator[None]:
    """The server is gone during the block, as if it had crashed."""
    await asyncio.to_thread(server.control, "stop", "-m", "immediate")
    yield
    await asyncio.to_thread(server.control, "start")


@asynccontextmanager
async def cut(link: Link) -> AsyncIterator[None]:
    """The way to the server is cut during the block."""
    link.cut()
    yield
    link.mend()


@asynccontextmanager
async def linked(url: str) -> AsyncIterator[tuple[str, Link]]:
    """The same database, behind a link."""
    there = make_url(url)
    socket = "{host}/.s.PGSQL.{port}".format(**there.query) if there.host is None else ""
    async with Link(there.host or socket, there.port or 0) as link:
        near = there.set(host="127.0.0.1", port=link.port, query={})
        yield near.render_as_string(hide_password=False), link


async def prove(
    url: str, away: AbstractAsyncContextManager[None], *, seconds: float, rate: float, seed: int
) -> dict[str, Any]:
    """Consume, lose the database for so long, and go on."""
    engine, broker, failures = create_async_engine(url), MemoryTransport(), Failures()
    async with Pillarbox(engine, transports={"broker": broker}, routes=ROUTES, signals=[failures]) as box:
        await set_up(box)
        members = consumers(box, "broker", retry=ONCE)
        stream, over = Stream(broker, rate, seed), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(member.run()) for member in members]
            streaming = group.create_task(stream.run(over))
            await _progress(members)
            async with away:
                await asyncio.sleep(seconds)
                during = len(stream.entries)
                going_on = group.create_task(_progress(members))
            resumed = await _seconds(going_on)
            over.set()
            await streaming
            caught_up = resumed + await _seconds(group.create_task(_at_rest(box, members)))
            for member in members:
                member.stop()
            await asyncio.gather(*running)
        async with engine.begin() as connection:
            await connection.execute(sa.insert(Entry), stream.entries)
        await box.relay().drain()
        balance = await compare(box, broker.sent(REPORTS))
    await engine.dispose()
    others = {name: number for name, number in failures.counted.items() if name != Failure.TRANSIENT and number}
    return {
        "events": len(stream.entries),
        "events_until_return": during,
        "outage_seconds": seconds,
        "failed_attempts": failures.counted[Failure.TRANSIENT],
        "failures_of_other_classes": others,
        "resumed_after_seconds": round(resumed, 2),
        "caught_up_after_seconds": round(caught_up, 2),
        **balance._asdict(),
        "holds": balance.holds and not others and resumed <= SOON,
    }


async def _seconds(task: asyncio.Task[None]) -> float:
    began = time.perf_counter()
    await task
    return time.perf_counter() - began


async def _progress(members: list[Consumer]) -> None:
    """Wait until every one of them has dealt with more than now."""
    before = [member.status()["handled"] for member in members]
    async with asyncio.timeout(GIVEN_UP):
        for member, number in zip(members, before, strict=True):
            while member.status()["handled"] <= number:  # noqa: ASYNC110  nobody rings
                await asyncio.sleep(0.005)


async def _at_rest(box: Pillarbox, members: list[Consumer]) -> None:
    """Wait until nothing is left for any of them, at the broker or in a lane."""
    left, deadline = -1, 0.0
    while left:
        before, left = left, sum(intake.backlog() or 0 for member in members for intake in member._intakes)
        left += await waiting(box)
        if left != before:
            deadline = time.monotonic() + GIVEN_UP
        assert time.monotonic() < deadline, f"{left} messages are left, and nothing happens"
        await asyncio.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="pillarbox-outage-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # the server may run as another user, who has to get through
        with EmbeddedPostgres(folder / "server") as server:
            result = uvloop.run(
                prove(server.url, stopped(server), seconds=given.seconds, rate=given.rate, seed=given.seed)
            )
    print(json.dumps({"seed": given.seed, **result}, indent=2))
    return int(not result["holds"])


if __name__ == "__main__":
    sys.exit(main())
