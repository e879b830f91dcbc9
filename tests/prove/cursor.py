"""200,000 events of 24 writers that do whatever transactions can do, read from the log by owners that die: the ledger
says what must have arrived, and in which order.

Transactions get their number long before their first event, roll back to savepoints, roll back, stay open, bring
hundreds of rows at once, and are prepared and committed later by another connection. They take the lock of a key
before they write its event, as the unit of work does. The readers use the store that ships: they poll with small
limits, so that late rows are paged through, announce a part of what they found, have rows rejected and the rest of
their keys parked, are replaced at any moment, and compare batches that are rebuilt, at once and much later, with what
was announced.

    python -m tests.prove.cursor --events 200000 --seed 7
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
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from pillarbox import clock
from pillarbox.cursor import Window
from pillarbox.embedded import EmbeddedPostgres
from pillarbox.errors import BatchMismatchError, LeaseLostError
from pillarbox.outbox import Batch, Delivery, Failure, Key, Lane, LaneName, RouteRecord, Row
from pillarbox.stores.log import LogStore
from pillarbox.stores.look import Look
from pillarbox.stores.migrations import migrate
from tests.servers import Servers

ROUTE = RouteRecord("prove", "nowhere", "prove.events")
SHARDS = 3
KEYS = 240
TENANTS = ("one", "two")
WRITERS = 24
PROCESSES = 3
LEASE = 0.001
"""Over at once: whoever wants the lane gets it."""

_TABLES = (
    "CREATE TABLE prove_keys (key text PRIMARY KEY, version integer NOT NULL)",
    "CREATE TABLE prove_ledger (event_id uuid PRIMARY KEY, key text NOT NULL, version integer NOT NULL)",
    "CREATE TABLE prove_audit (note text)",
    f"INSERT INTO prove_keys SELECT 'k' || n, 0 FROM generate_series(0, {KEYS - 1}) n",
    f"INSERT INTO prove_keys SELECT 'bulk' || n, 0 FROM generate_series(0, {WRITERS - 1}) n",
)

# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass
class Written:
    """What the writers of a process have done."""

    events: int = 0
    deeds: Counter[str] = field(default_factory=Counter)


class Writer:
    """Runs one random transaction after the other."""

    def __init__(
        self, connection: AsyncConnection, store: LogStore, number: int, seed: int, *, two_phase: bool, pace: float
    ) -> None:
        self._connection = connection
        self._store = store
        self._number = number
        self._draw = random.Random(f"{seed} writer {number}")
        self._two_phase = two_phase
        self._pace = pace
        self._transactions = 0

    async def run(self, until: int, books: Written) -> None:
        """Write until all of us together have committed so many events."""
        await self._do("SET lock_timeout = '200ms'")
        while books.events < until:
            self._transactions += 1
            await self._do("BEGIN")
            try:
                deeds, events = await self._work()
                end, events = await self._end(events)
            except DBAPIError:  # a lock that was not granted, or a deadlock
                await self._do("ROLLBACK")
                end, events, deeds = "refused", 0, []
            books.deeds.update([*deeds, end])
            books.events += events

    async def _work(self) -> tuple[list[str], int]:
        draw, deeds, events = self._draw, list[str](), 0
        if draw.random() < 0.4:
            deeds.append("number before the first event")
            await self._do("INSERT INTO prove_audit VALUES ('early')")
            await self._sleep(0.02)
        if draw.random() < 0.05:
            deeds.append("bulk")
            events += await self._write(f"bulk{self._number}", draw.randint(20, 300))
        for _ in range(draw.randint(1, 3)):
            events += await self._one(deeds)
        if draw.random() < 0.03:
            deeds.append("long")
            await self._sleep(1.5)
        elif draw.random() < 0.3:
            await self._sleep(0.05)
        return deeds, events

    async def _one(self, deeds: list[str]) -> int:
        draw, key = self._draw, f"k{self._draw.randrange(KEYS)}"
        if draw.random() >= 0.3:
            return await self._write(key, 1)
        await self._do("SAVEPOINT here")
        events = await self._write(key, draw.randint(1, 2))
        if draw.random() < 0.4:
            deeds.append("savepoint rolled back")
            await self._do("ROLLBACK TO SAVEPOINT here")
            return 0
        deeds.append("savepoint kept")
        await self._do("RELEASE SAVEPOINT here")
        return events

    async def _end(self, events: int) -> tuple[str, int]:
        draw = self._draw
        if draw.random() < 0.15:
            await self._do("ROLLBACK")
            return "rolled back", 0
        if not self._two_phase or draw.random() >= 0.06:
            await self._do("COMMIT")
            return "committed", events
        name = f"prove {self._number} {self._transactions}"
        await self._do(f"PREPARE TRANSACTION '{name}'")
        await self._sleep(0.3)
        if draw.random() < 0.2:
            await self._do(f"ROLLBACK PREPARED '{name}'")
            return "prepared and rolled back", 0
        await self._do(f"COMMIT PREPARED '{name}'")
        return "prepared and committed", events

    async def _write(self, key: str, count: int) -> int:
        """Lock the key, then write events of it, and the ledger."""
        locked = await self._connection.execute(_LOCK, {"key": key, "count": count})
        first = locked.scalar_one() - count + 1
        await self._sleep(0.004, 0.1)
        rows = [_delivery(key, version) for version in range(first, first + count)]
        await self._connection.run_sync(self._store.append, rows)
        ledger = {"ids": [str(row.event_id) for row in rows], "key": key, "first": first}
        await self._connection.execute(_LEDGER, ledger)
        return count

    async def _do(self, statement: str) -> None:
        await self._connection.exec_driver_sql(statement)

    async def _sleep(self, seconds: float, chance: float = 1.0) -> None:
        if self._draw.random() < chance:
            await asyncio.sleep(self._draw.random() * seconds * self._pace)


_LOCK = text("UPDATE prove_keys SET version = version + :count WHERE key = :key RETURNING version")
_LEDGER = text(
    "INSERT INTO prove_ledger SELECT id, :key, CAST(:first AS integer) + n - 1 "
    "FROM unnest(CAST(:ids AS uuid[])) WITH ORDINALITY AS t(id, n)"
)


def _delivery(key: str, version: int) -> Delivery:
    event_id, body = clock.new_id(), f"{key} {version}".encode()
    headers = {"event_id": str(event_id), "version": str(version)}
    shard, tenant = shard_of(key), tenant_of(key)
    return Delivery(event_id, "prove.happened", ROUTE.id, shard, 1, ROUTE.topic, key, tenant, headers, body)


def shard_of(key: str) -> int:
    return int(key.lstrip("bulk")) % SHARDS


def tenant_of(key: str) -> str | None:
    """One of those that take detours, or nobody."""
    return (None, *TENANTS)[int(key.lstrip("bulk")) // SHARDS % (len(TENANTS) + 1)]


async def write(url: str, writers: Sequence[int], until: int, seed: int, *, two_phase: bool, pace: float) -> Written:
    """Let these writers write, at the same time, until they have committed so many events."""
    books = Written()

    async def run(number: int) -> None:
        async with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            writer = Writer(connection, store, number, seed, two_phase=two_phase, pace=pace)
            await writer.run(until, books)

    async with _engine(url, len(writers)) as engine, asyncio.TaskGroup() as group:
        store = LogStore(engine)
        for number in writers:
            group.create_task(run(number))
    return books


def _write_in_process(url: str, writers: list[int], until: int, seed: int, two_phase: bool) -> Written:
    return asyncio.run(write(url, writers, until, seed, two_phase=two_phase, pace=1.0))


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What became of a lane."""

    delivered: list[Row] = field(default_factory=list)
    polls: int = 0
    pages: int = 0
    """Looks that found more late rows than they could take, or went on with them."""
    late: int = 0
    cut: int = 0
    rejected: int = 0
    parked: int = 0
    owners: int = 0
    rebuilt: int = 0
    parted: int = 0
    joined: int = 0
    detoured: int = 0
    """Rows that went by a detour."""
    faults: list[str] = field(default_factory=list)


@dataclass
class Plan:
    """What is to become of the rows of a page."""

    items: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    parked: list[int] = field(default_factory=list)


def _rejected(row: Row, draw: random.Random) -> Failure:
    return Failure(row.id, row.attempts + 1, "not today", draw.choice((0.0, 0.0, 0.02)))


class Reader:
    """The owners of one lane, one after the other."""

    def __init__(self, store: LogStore, shard: int, seed: int, *, parts: float = 0.02) -> None:
        self._store = store
        self._parts = parts
        """How often a tenant gets a detour."""
        self._name = LaneName(ROUTE.id, shard)
        self._draw = random.Random(f"{seed} reader {shard}")
        self._batch: list[tuple[int, UUID]] = []
        """What the newest announcement holds, with its numbers."""
        self._history: list[tuple[Lane, list[tuple[int, UUID]]]] = []
        self.found = Found()

    async def run(self, written: asyncio.Event) -> Found:
        """Read until everything that was written is delivered."""
        lane = await self._take(None)
        while True:
            over, draw = written.is_set(), self._draw
            lane = await self._turn(await self._divide(lane, over))
            if draw.random() < 0.03:
                lane = await self._take(lane)
            if draw.random() < 0.1:
                await self._compare(*draw.choice(self._history[-500:])) if self._history else None
            if over and lane.announced is None and not lane.waiting and await self._is_empty(lane):
                return self.found

    async def _divide(self, lane: Lane, over: bool) -> Lane:
        """Now and then somebody gets a detour, or comes back from it."""
        draw, detours = self._draw, lane.detours or {}
        if draw.random() < (0.0 if over else self._parts):
            tenant = draw.choice(TENANTS)
            if lane.announced is not None:
                lane = await self._store.settle(lane)
            self.found.parted += tenant not in detours
            return await self._store.part(lane, [tenant])
        if detours and draw.random() < (0.3 if over else 0.05):
            if lane.announced is not None:
                lane = await self._store.settle(lane)
            lane = await self._store.join(lane, TENANTS)
            self.found.joined += len(detours) - len(lane.detours or ())
        return lane

    async def _turn(self, lane: Lane) -> Lane:
        draw, found = self._draw, self.found
        limit = draw.choice((1, 2, 3, 5, 8, 30, 300))
        max_bytes = draw.choice((4_194_304, 4_194_304, 4_194_304, 60))
        detour = draw.choice((None, *(lane.detours or ())))
        page = await self._store.poll(lane, limit=limit, max_bytes=max_bytes, detour=detour)
        if page.cursor is None:
            return lane
        window: Window = page.cursor.window
        found.polls += 1
        found.pages += window.more or window.start.paging is not None
        if draw.random() < 0.03:  # who looked dies before it says anything
            return await self._take(lane)
        if not page.fresh and not page.redo:
            if lane.announced is not None:
                return await self._store.settle(lane)
            await asyncio.sleep(0.001)
            if draw.random() < 0.7 and not page.passed:
                return lane
            return await self._store.announce(lane, Batch(cursor=page.cursor), settle=False)
        if draw.random() < 0.02 and self._name not in await self._store.ready([ROUTE.id]):
            found.faults.append(f"rows are waiting in lane {self._name.shard}, which is said to have nothing to do")
        fresh = list(page.fresh)
        if fresh and draw.random() < 0.3:
            fresh = fresh[: draw.randint(1, len(fresh))]
            found.cut += 1
        found.detoured += len(fresh) if detour is not None else 0
        late = {*window.late}
        found.late += sum(row.id in late for row in fresh)
        return await self._announce(lane, self._plan(lane, page.redo, fresh), page.cursor)

    def _plan(self, lane: Lane, redo: Sequence[Row], fresh: Sequence[Row]) -> Plan:
        """Now and then a row is rejected; what comes after it in its key waits behind it."""
        plan, stopped, new = Plan(), set[Key](), {row.id for row in fresh}
        for row in (*redo, *fresh):
            if row.order_key in stopped or (row.id in new and row.order_key in lane.waiting):
                if row.id in new:
                    plan.parked.append(row.id)
            elif self._draw.random() < 0.02 and row.key.startswith("k"):
                plan.failures.append(_rejected(row, self._draw))
                stopped.add(row.order_key)
            else:
                plan.items.append(row)
        if self._draw.random() < 0.1:
            plan.items.sort(key=lambda row: row.key)  # by key, as a transport may want it
        self.found.rejected += len(plan.failures)
        self.found.parked += len(plan.parked)
        return plan

    async def _announce(self, lane: Lane, plan: Plan, look: Look) -> Lane:
        first, settle = lane.next_number, lane.announced is not None
        items = [row.id for row in plan.items]
        batch = Batch(items, plan.failures, plan.parked, cursor=look)
        lane = await self._store.announce(lane, batch, settle=settle)
        sent = list(enumerate(plan.items, start=first))
        if sent and self._draw.random() < 0.05:
            lane, sent = await self._amend(lane, sent)
        self.found.delivered += [row for _, row in sent]
        self._batch = [(number, row.event_id) for number, row in sent]
        if sent and self._draw.random() < 0.2:
            await self._compare(lane, self._batch)
        if sent and {*items} <= {*look.window.ids}:  # what was redone can be rebuilt only until it is settled
            self._history.append((lane, self._batch))
        return await self._store.settle(lane) if sent and self._draw.random() < 0.2 else lane

    async def _amend(self, lane: Lane, sent: list[tuple[int, Row]]) -> tuple[Lane, list[tuple[int, Row]]]:
        """The destination rejects a row; later ones of its key are taken out with it."""
        candidates = [at for at, (_, row) in enumerate(sent) if row.key.startswith("k")]
        if not candidates:  # hundreds that wait behind one would keep us from late rows
            return lane, sent
        at = self._draw.choice(candidates)
        rejected = sent[at][1]
        parked = [row.id for _, row in sent[at + 1 :] if row.order_key == rejected.order_key]
        lane = await self._store.amend(lane, [_rejected(rejected, self._draw)], parked=parked)
        self.found.rejected += 1
        self.found.parked += len(parked)
        return lane, [(number, row) for number, row in sent if row.id not in (rejected.id, *parked)]

    async def _compare(self, lane: Lane, batch: list[tuple[int, UUID]]) -> None:
        """A batch is the same whenever it is rebuilt."""
        self.found.rebuilt += 1
        try:
            rebuilt = [(number, row.event_id) for number, row in await self._store.rebuild(lane)]
        except BatchMismatchError as error:
            self.found.faults.append(f"not rebuilt: {error}")
            return
        if rebuilt != batch:
            self.found.faults.append(f"batch {lane.batch} of lane {lane.shard} was rebuilt differently")

    async def _take(self, before: Lane | None) -> Lane:
        """The owner dies, and another one takes the lane over, with what is announced."""
        await asyncio.sleep(LEASE * 2)
        self.found.owners += 1
        (lane,) = await self._store.take(
            f"owner {self.found.owners}", lease=LEASE, wanted={ROUTE.id: 1}, shards={ROUTE.id: [self._name.shard]}
        )
        if lane.announced is not None:
            await self._compare(lane, self._batch)
        if before is not None and self._draw.random() < 0.2:
            try:
                await self._store.announce(before, Batch(), settle=before.announced is not None)
            except LeaseLostError:
                return lane
            self.found.faults.append("an owner that was replaced could still announce")
        return lane

    async def _is_empty(self, lane: Lane) -> bool:
        page = await self._store.poll(lane, limit=1)
        return not lane.detours and not page.fresh and not page.passed and page.cursor.window.start.paging is None


# -- the ledger --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Balance:
    """What was committed, compared with what was delivered."""

    committed: int
    missing: int
    doubled: int
    ghosts: int
    inversions: int
    wrong_lane: int
    wrong_state: int
    faults: int

    @property
    def holds(self) -> bool:
        return self.committed > 0 and not any(list(asdict(self).values())[1:])


async def compare(engine: AsyncEngine, lanes: Sequence[Found]) -> Balance:
    async with engine.connect() as connection:
        ledger = {row.event_id: (row.key, row.version) for row in await connection.execute(text(_READ_LEDGER))}
        unsent = (await connection.execute(text("SELECT count(*) FROM pillarbox_unsent"))).scalar_one()
        told = (await connection.execute(text(_READ_STATES))).scalar_one()
    delivered = [row for lane in lanes for row in lane.delivered]
    ids = Counter(row.event_id for row in delivered)
    last: dict[str, int] = {}
    inversions = wrong_lane = 0
    for shard, lane in enumerate(lanes):
        for row in lane.delivered:
            key, version = row.body.decode().split()
            inversions += int(version) != last.get(key, 0) + 1
            last[key] = int(version)
            wrong_lane += shard_of(key) != shard or ledger.get(row.event_id) not in ((key, int(version)), None)
    return Balance(
        committed=len(ledger),
        missing=len(ledger.keys() - ids.keys()),
        doubled=sum(ids.values()) - len(ids),
        ghosts=len(ids.keys() - ledger.keys()),
        inversions=inversions,
        wrong_lane=wrong_lane,
        wrong_state=unsent + told,
        faults=sum(len(lane.faults) for lane in lanes),
    )


_READ_LEDGER = "SELECT event_id, key, version FROM prove_ledger"
_READ_STATES = """
    SELECT count(*) FROM (
        SELECT event_id FROM prove_ledger ORDER BY md5(CAST(event_id AS text)) LIMIT 1000
    ) picked JOIN outbox_events ON raised_event_id = picked.event_id WHERE status <> 'SENT' OR sent_at IS NULL
"""

# -- all of it ---------------------------------------------------------------------------------------------------------


async def prove(
    url: str, *, events: int, seed: int, two_phase: bool, processes: int = 0, pace: float = 1.0
) -> dict[str, Any]:
    """Write and read at the same time, then compare. Without processes, the writers run in this one."""
    started, written = time.perf_counter(), asyncio.Event()
    async with _engine(url, 2 * SHARDS + 4) as engine:
        await _set_up(engine)
        readers = [Reader(LogStore(engine), shard, seed) for shard in range(SHARDS)]
        reading = [asyncio.create_task(reader.run(written)) for reader in readers]
        try:
            if processes:
                books = await _write_in_processes(url, events, seed, two_phase, processes)
            else:
                writers = range(WRITERS)
                books = [await write(url, writers, events, seed, two_phase=two_phase, pace=pace)]
            writing = time.perf_counter() - started
        except BaseException:
            for task in reading:
                task.cancel()
            raise
        finally:
            written.set()
        lanes = await asyncio.gather(*reading)
        balance = await compare(engine, lanes)
    faults = [fault for lane in lanes for fault in lane.faults]
    return {
        **asdict(balance),
        "first_faults": faults[:10],
        "transactions": dict(sum((each.deeds for each in books), Counter())),
        **{name: sum(getattr(lane, name) for lane in lanes) for name in _COUNTS},
        "seconds_writing": round(writing, 1),
        "seconds": round(time.perf_counter() - started, 1),
        "holds": balance.holds,
    }


_COUNTS = (
    *("polls", "pages", "late", "cut", "rejected", "parked", "owners", "rebuilt"),
    *("parted", "joined", "detoured"),
)


async def _write_in_processes(url: str, events: int, seed: int, two_phase: bool, processes: int) -> list[Written]:
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(processes) as pool:
        parts = [list(range(WRITERS))[part::processes] for part in range(processes)]
        share = -(-events // processes)
        jobs = [loop.run_in_executor(pool, _write_in_process, url, part, share, seed, two_phase) for part in parts]
        return await asyncio.gather(*jobs)


async def _set_up(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
        for statement in _TABLES:
            await connection.execute(text(statement))
        await connection.run_sync(LogStore(engine).register, [ROUTE])


@asynccontextmanager
async def _engine(url: str, connections: int) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url, pool_size=connections, max_overflow=0)
    try:
        yield engine
    finally:
        await engine.dispose()


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """A PostgreSQL that can prepare transactions, which others are not set up for."""
    with EmbeddedPostgres(folder) as postgres:
        asyncio.run(_allow_prepared(postgres.url))
    with EmbeddedPostgres(folder) as postgres:
        yield postgres.url


async def _allow_prepared(url: str) -> None:
    async with _engine(url, 1) as engine, engine.connect() as connection:
        await (await connection.execution_options(isolation_level="AUTOCOMMIT")).exec_driver_sql(
            f"ALTER SYSTEM SET max_prepared_transactions = {2 * WRITERS}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--database", choices=["embedded", "system", "oldest"], default="embedded")
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    sizes = {"events": given.events, "seed": given.seed, "processes": PROCESSES}
    servers = Servers()
    os.environ["PILLARBOX_HOME"] = str(servers.folder / "home")
    try:
        if given.database == "embedded":
            with server(servers.folder / "cursor") as url:
                result = asyncio.run(prove(url, **sizes, two_phase=True))
        else:  # the servers of the tests are not set up for prepared transactions
            url = servers.create_database(given.database).url()
            result = asyncio.run(prove(url, **sizes, two_phase=False))
    finally:
        servers.stop()
    print(json.dumps({"seed": given.seed, **result}, indent=2))
    return int(not result["holds"])


if __name__ == "__main__":
    sys.exit(main())
