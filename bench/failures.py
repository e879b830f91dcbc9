"""What failures cost the lanes that they are in.

dead_row_ratio  drain with one, and with a thousand, failed rows in each lane, to none
discard_60k_s   seconds from the command that discards what waits in a lane until all of it is discarded
fail_20k_s      seconds in which so many events of a lane fail, among as many that do not; on MariaDB
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

from sqlalchemy import text

from pillarbox import Message, Pillarbox, RetryPolicy, Route
from pillarbox.stores import operations
from pillarbox.stores.audit import Author
from pillarbox.stores.inspection import Filter
from pillarbox.stores.log import LogStore
from pillarbox.transport import Outcome, Rejection
from tests.servers import MariaDB, Missing

from .load import ROUTE, Sink, box_on, drain, empty, fill, seed, vacuum
from .proof import meant
from .servers import Bench

_FAILED = (1, 1000)
_FIRST = 1_000_000_000
"""The number of the first failed event: event ids are made from it, and must not meet those that are drained."""
_PORTION = 500
_ONE_ATTEMPT = Route("bench.**", to="sink", topic=ROUTE.topic, retry=RetryPolicy(attempts=1))
_FAIL = """
    INSERT INTO pillarbox_failures (route, shard, row_id, tenant, key, status, attempts, last_error)
    SELECT route, shard, id, tenant, key, 'FAILED', 5, 'rejected' FROM pillarbox_outbox
"""
_MOVE_ON = (
    "UPDATE pillarbox_lanes SET cursor = "
    "(SELECT coalesce(max(id), 0) FROM pillarbox_outbox) || ' ' || pg_current_snapshot()"
)


async def measure(bench: Bench) -> dict[str, object]:
    """All figures, by name."""
    sink = Sink()
    async with bench.database() as url, bench.box(url, sink) as box:
        figures = await _beside_failed_rows(bench, box, sink)
    async with bench.database() as url, bench.box(url, sink) as box:
        figures |= await _discarding(box, bench.sizes.discard)
    try:
        with bench.another(MariaDB) as url:
            return figures | await _failing(url, bench.sizes.fail)
    except Missing:
        return figures


async def _beside_failed_rows(bench: Bench, box: Pillarbox, sink: Sink) -> dict[str, object]:
    ratios: dict[int, list[float]] = {count: [] for count in _FAILED}
    await _drained(bench, box, sink, 0)  # lanes are made, and plans
    for _ in range(bench.sizes.rounds):
        without = await _drained(bench, box, sink, 0)
        for count, found in ratios.items():
            found.append(await _drained(bench, box, sink, count) / without)
    return {"dead_row_ratio": {str(count): statistics.median(found) for count, found in ratios.items()}}


async def _drained(bench: Bench, box: Pillarbox, sink: Sink, failed: int) -> float:
    """The rate of a drain beside so many failed rows in each lane, of keys of their own."""
    await empty(box)
    async with box.engine.begin() as connection:
        await connection.execute(text("DELETE FROM pillarbox_failures"))
        shards = box.router.shards
        if failed:
            await seed(connection, failed * shards, first=_FIRST, shards=shards, prefix="failed-")
            await connection.execute(text(_FAIL))
    async with box.engine.begin() as connection:
        await connection.execute(text(_MOVE_ON))
    await fill(box, bench.sizes.drain)
    await vacuum(box)
    return await drain(box, sink, bench.sizes.drain)


async def _discarding(box: Pillarbox, events: int) -> dict[str, object]:
    async with box.engine.begin() as connection:
        await seed(connection, events)
    looks: list[float] = []
    poll = LogStore.poll

    async def timed(*given: Any, **options: Any) -> Any:
        started = time.perf_counter()
        page = await poll(*given, **options)
        looks.append(time.perf_counter() - started)
        return page

    started = time.perf_counter()
    selection = operations.Selection(operations.Action.DISCARD, Filter(route=ROUTE.name))
    author, run = Author("bench", "they are not wanted"), operations.Run()
    while run.requested < events:
        async with box.engine.begin() as connection:
            run = await connection.run_sync(operations.request, selection, author, run, _PORTION)
    asked = time.perf_counter() - started
    with patch.object(LogStore, "poll", timed):
        await box.relay().drain()
    seconds = time.perf_counter() - started
    async with box.engine.connect() as connection:
        discarded = "SELECT count(*) FROM outbox_events WHERE status = 'DISCARDED'"
        assert (await connection.execute(text(discarded))).scalar_one() == events
    return {"discard_60k_s": seconds, "discard_command_s": asked, "discard_longest_look_s": max(looks)}


class _Refusing(Sink):
    """Refuses every other key."""

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:  # noqa: ARG002
        accepted = [index for index, message in enumerate(messages) if int(message.key) % 2]
        self.take([messages[index] for index in accepted])
        refused = [Rejection(index, "refused") for index, message in enumerate(messages) if not int(message.key) % 2]
        return Outcome(accepted, refused)


async def _failing(url: str, events: int) -> dict[str, object]:
    async with box_on(url, _Refusing(), _ONE_ATTEMPT, shards=1) as box:
        await fill(box, 2 * events)
        started = time.perf_counter()
        with meant("is dead after"):
            await box.relay().drain()
        seconds = time.perf_counter() - started
        async with box.engine.connect() as connection:
            rows = await connection.execute(text("SELECT status, count(*) FROM outbox_events GROUP BY status"))
            assert dict(rows.all()) == {"FAILED": events, "SENT": events}
            epochs = await connection.execute(text("SELECT epoch FROM pillarbox_lanes"))
            assert epochs.scalars().all() == [1], "the lease was lost"
    return {"fail_20k_s": seconds}


def report(results: Mapping[str, Any]) -> str:
    """Lines for people."""
    ratios = results["dead_row_ratio"]
    return (
        "failures: what they cost the lanes that they are in\n"
        + "".join(f"  drain beside {count:>5} {ratio:10.2f}\n" for count, ratio in ratios.items())
        + f"  discarding         {results['discard_60k_s']:10.1f} s\n"
        f"  of it to ask       {results['discard_command_s']:10.1f} s\n"
        f"  the longest look   {results['discard_longest_look_s']:10.3f} s"
        + (f"\n  failing, MariaDB   {results['fail_20k_s']:10.1f} s" if "fail_20k_s" in results else "")
    )
