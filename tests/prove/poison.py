"""Poison stops nothing else: keys and tenants that a destination rejects, and messages that a transport stumbles over.

`shares`: some of the keys are rejected, on one lane and on many. `tenants`: one of five tenants on a shared topic has
20,000 keys that are rejected. `bugs`: one message makes `Publisher.send` raise, hang or answer nonsense; what operators
request while it is being sent is carried out, and a restart of the relay changes nothing. Every healthy event must
arrive soon, in order, and in no more copies than it takes. What is poisoned ends FAILED after its attempts, and arrives
when the cause is mended and it is redriven.

    python -m tests.prove.poison --seed 7 --parts shares --shares 5 --lanes 1 --databases postgresql
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import product
from typing import Any
from uuid import UUID, uuid4

import uvloop
from sqlalchemy import Connection, func, select
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import Pillarbox, RetryPolicy, Route
from pillarbox.outbox import Status
from pillarbox.stores import inspection, operations
from pillarbox.stores.inspection import Filter, Summary
from pillarbox.stores.operations import ELIGIBLE, Action, Run, Selection
from pillarbox.stores.tables import requests
from tests.prove.poisoned import AUTHOR, Committed, Destination, Service, running
from tests.servers import Servers
from tests.transport_bugs import Bug

DATABASES = {"postgresql": "embedded", "mariadb": "mariadb", "sqlite": "sqlite"}
PARTS = ("shares", "tenants", "bugs")
SHARES, LANES = (1, 5, 20, 50, 95), (1, 16)
LEASE = 1.0
RETRY = RetryPolicy(base=0.2, cap=1.0, attempts=3)
SOON = 30.0
"""Seconds after its commit within which a healthy event must have arrived."""
PATIENCE = 120.0
"""Seconds in which what is poisoned must have used up its attempts, or arrived after it was redriven."""
MOST_COPIES = 4
"""Of one event, by a transport with a bug: it has sent the event before it failed, and the request comes again."""
SLOWER = 3.0
"""How many times later than without poison the events of healthy tenants may arrive."""
TENANTS, RATE = 4, 20.0
"""Healthy tenants, and the transactions that each of them commits in a second."""
MANY = 1_000_000


@asynccontextmanager
async def serving(url: str, destinations: Sequence[Destination], lanes: int = 16) -> AsyncIterator[Service]:
    """A migrated database, and a route to each destination."""
    engine = create_async_engine(url)
    routes = [Route("poison.thing.*", to=it.topic, topic=it.topic, name=it.topic, retry=RETRY) for it in destinations]
    transports = {it.topic: it for it in destinations}
    async with Pillarbox(engine, transports=transports, routes=routes, shards=lanes) as box:
        await box.migrate()
        yield Service(box, destinations)
    await engine.dispose()


def failed(connection: Connection) -> list[Summary]:
    """The deliveries that are out of attempts."""
    return inspection.deliveries(connection, Filter(status=Status.FAILED), after=0, limit=MANY)


def miscounted(deliveries: Sequence[Summary]) -> list[str]:
    """What failed deliveries have wrong: other attempts than their route allows, or no error."""
    return [
        f"{it.route}: {it.event_id} is FAILED after {it.attempts} attempts with the error {it.last_error!r}"
        for it in deliveries
        if it.attempts != RETRY.attempts or not it.last_error
    ]


# -- shares ------------------------------------------------------------------------------------------------------------


async def prove_share(url: str, *, share: float, lanes: int, events: int, seed: int) -> dict[str, Any]:
    """That share of the keys, in percent, is rejected; nothing else is."""
    draw = random.Random(f"{seed} shares {share} {lanes}")
    names = [f"key-{number}" for number in range(events * 2 // 3)]
    poisoned = {*draw.sample(names, max(1, round(len(names) * share / 100)))}
    keys = [*names, *draw.choices(names, k=events - len(names))]
    draw.shuffle(keys)
    destination = Destination("shared")
    async with serving(url, [destination], lanes) as service:
        await service.commit(keys[: events // 2], poisoned=poisoned)  # a backlog
        async with running(service.box.relay(lease=LEASE)):
            await service.commit(keys[events // 2 :], poisoned=poisoned)
            wrong = await service.missing(SOON)
            over = asyncio.Event()
            trickle = asyncio.create_task(_trickle(service, over))
            if not wrong and not await service.until(lambda it: len(failed(it)) == len(service.poisoned), PATIENCE):
                dead = len(await service.ask(failed))
                wrong.append(f"{dead} of {len(service.poisoned)} poisoned keys are FAILED after {PATIENCE} s")
            over.set()
            await trickle
            wrong += miscounted(await service.ask(failed)) + await service.missing(SOON)
            slowest = max(service.latencies(destination, service.healthy), default=0.0)
            if not wrong:
                await service.redrive(PATIENCE)
    wrong += service.balance(most_copies=1)
    return {"events": events, "rejected_keys": len(poisoned), "slowest_healthy_s": round(slowest, 2), "wrong": wrong}


async def _trickle(service: Service, over: asyncio.Event) -> None:
    """Go on with healthy events, as a service does, while poisoned ones use up their attempts."""
    while not over.is_set():
        await service.commit([f"later-{uuid4()}"])
        await asyncio.sleep(0.1)


# -- tenants -----------------------------------------------------------------------------------------------------------


async def prove_tenants(url: str, *, keys: int, seconds: float, seed: int, slower: float = SLOWER) -> dict[str, Any]:
    """The same load twice: the keys of one tenant are accepted at first, then rejected.

    That tenant commits in a process of its own: the others must wait for the relay and the database, not for the proof.
    """
    draw = random.Random(f"{seed} tenants")
    p99: list[float] = []
    wrong: list[str] = []
    destination = Destination("shared")
    async with (
        serving(url, [destination]) as service,
        _another_process() as elsewhere,
        running(service.box.relay(lease=LEASE)),
    ):
        for poisoned in (False, True):
            flood = [f"key-{poisoned}-{number}" for number in range(keys)]
            gc.collect()
            gc.freeze()  # what the proof remembers is no load that a relay has
            async with asyncio.TaskGroup() as group:
                steady = [
                    group.create_task(_commit_steadily(service, f"tenant-{number}", seconds, draw.random()))
                    for number in range(TENANTS)
                ]
                group.create_task(elsewhere(_commit_flood, url, flood, poisoned))
            service.know(await elsewhere(_flooded))
            wrong += await service.missing(SOON)
            latencies = service.latencies(destination, [event for task in steady for event in task.result()])
            p99.append(statistics.quantiles(latencies, n=100)[-1])
        await service.redrive(PATIENCE)
    if p99[1] > slower * p99[0]:
        wrong.append(f"healthy tenants waited {p99[1] / p99[0]:.1f} times as long as without poison")
    wrong += service.balance(most_copies=1)
    calm, poisoned_p99 = (round(each * 1000, 1) for each in p99)
    return {"rejected_keys": keys, "p99_ms": calm, "p99_ms_with_poison": poisoned_p99, "wrong": wrong}


@asynccontextmanager
async def _another_process() -> AsyncIterator[Callable[..., Coroutine[Any, Any, Any]]]:
    """Call functions in a process that has been started."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:

        async def call(function: Callable[..., Any], *arguments: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

        await call(_flooded)
        yield call


_flood = Committed([], {}, {})
"""What the process has committed that floods the relay: its parent has no time to read that during the flood."""


def _commit_flood(url: str, keys: Sequence[str], poisoned: bool) -> None:
    async def commit() -> Committed:
        async with serving(url, [Destination("shared")]) as service:
            await service.commit(keys, poisoned={*keys} if poisoned else (), tenant="flood")
            return service.committed()

    global _flood  # noqa: PLW0603
    _flood = uvloop.run(commit())


def _flooded() -> Committed:
    return _flood


async def _commit_steadily(service: Service, tenant: str, seconds: float, seed: float) -> list[UUID]:
    draw, committed, started = random.Random(seed), list[UUID](), time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        if len(committed) <= passed * RATE:
            committed += await service.commit([f"key-{draw.randrange(50)}"], tenant=tenant)
        else:
            await asyncio.sleep(0.01)
    return committed


# -- bugs --------------------------------------------------------------------------------------------------------------

REQUESTED = {f"{action}-while-sending": action for action in Action}
"""Destinations that hang, and what an operator requests for the event that they hang with."""


async def prove_bugs(url: str, *, restart: bool, seed: int) -> dict[str, Any]:
    """All bugs of a transport at once, each with a route and a lane of its own."""
    draw = random.Random(f"{seed} bugs")
    keys = [f"key-{number}" for number in range(30) for _ in range(3)]
    draw.shuffle(keys)
    poisoned = {draw.choice(keys)}
    destinations = [Destination(bug, bug) for bug in Bug] + [Destination(topic, Bug.HANGS) for topic in REQUESTED]
    wrong: list[str] = []
    async with serving(url, destinations, lanes=1) as service:
        async with running(service.box.relay(lease=LEASE, grace=LEASE)):
            await service.commit(keys, poisoned=poisoned)
            [event] = service.poisoned.values()
            await asyncio.gather(*(it.until(partial(getattr, it, "tries"), SOON) for it in destinations))
            for topic, action in REQUESTED.items():
                wrong += await _request(service, event, topic, action)
            if not restart:
                wrong += await _follow(service)
        if restart:
            async with running(service.box.relay(lease=LEASE, grace=LEASE)):
                wrong += await _follow(service)
    wrong += service.balance(MOST_COPIES)
    slowest = {it.topic: round(max(service.latencies(it, service.healthy), default=0.0), 2) for it in destinations}
    copies = {it.topic: len(it.stored) - len(it.first_at) for it in destinations}
    return {"events": len(keys), "slowest_healthy_s": slowest, "copies": copies, "wrong": wrong}


async def _request(service: Service, event: UUID, topic: str, action: Action) -> list[str]:
    """Request that for a delivery that is being sent, and enter it in the ledger."""
    found = await service.ask(partial(inspection.deliveries_of, event_id=event, payload=False))
    [delivery] = [each for each in found if each.route == topic]
    if delivery.status != Status.SENDING:
        return [f"{topic}: it is {delivery.status}"]
    if delivery.status not in ELIGIBLE[action]:
        return [f"{topic}: the request is refused"]
    ledger = service.ledgers[topic]
    [entry] = [each for each in ledger.committed if each.event_id == event]
    if action is Action.EDIT:
        new = uuid4()
        old = await service.ask(inspection.body_of, delivery)
        body = old.replace(b"true", b"false")
        await service.ask(partial(operations.edit, delivery=delivery, author=AUTHOR, old=old, new=body, event_id=new))
        ledger.edited[entry.identity] = entry._replace(event_id=new)
        return []
    if action is Action.DISCARD:
        ledger.may_be_missing.add(entry.identity)
    await service.ask(operations.request, Selection(action, Filter(route=topic), (event,)), AUTHOR, Run(), 1)
    return []


async def _follow(service: Service) -> list[str]:
    """Healthy events arrive, requests are carried out, and of each destination one poisoned event ends FAILED: the
    first of its key that was neither discarded nor edited.
    """
    await service.commit([f"later-{number}" for number in range(10)])
    wrong = await service.missing(SOON)
    if not wrong and not await service.until(lambda it: len(failed(it)) == len(service.destinations), PATIENCE):
        alive = {it.topic for it in service.destinations} - {each.route for each in await service.ask(failed)}
        wrong += [f"{topic}: nothing is FAILED after {PATIENCE} s" for topic in sorted(alive)]
    wrong += miscounted(await service.ask(failed))
    if left := await service.ask(lambda it: it.scalar(select(func.count()).select_from(requests))):
        wrong.append(f"{left} requests were not carried out")
    if not wrong:
        await service.redrive(PATIENCE)
    return wrong


# -- all of it ---------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=[*DATABASES])
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="percent of the keys")
    parser.add_argument("--lanes", nargs="+", type=int, default=LANES)
    parser.add_argument("--events", type=int, default=3_000, help="of each share")
    parser.add_argument("--keys", type=int, default=20_000, help="of the tenant that is rejected")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which the other tenants go on")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    logging.getLogger("pillarbox").setLevel(logging.CRITICAL)  # it has much to say here
    results: dict[str, Any] = {}
    servers = Servers()
    os.environ["PILLARBOX_HOME"] = str(servers.folder / "home")
    try:
        for part, database in product(given.parts, given.databases):
            for name, proof in _proofs(part, given).items():
                url = servers.create_database(DATABASES[database]).url()
                results[f"{part} {database}{name}"] = result = uvloop.run(proof(url, seed=given.seed))
                print(f"{part} {database}{name}: {result}", file=sys.stderr)
    finally:
        servers.stop()
    holds = not any(result["wrong"] for result in results.values())
    print(json.dumps({"seed": given.seed, **results, "holds": holds}, indent=2))
    return int(not holds)


def _proofs(part: str, given: argparse.Namespace) -> dict[str, Callable[..., Coroutine[Any, Any, dict[str, Any]]]]:
    if part == "shares":
        return {
            f", {share:g} % on {lanes} lanes": partial(prove_share, share=share, lanes=lanes, events=given.events)
            for share, lanes in product(given.shares, given.lanes)
        }
    if part == "tenants":
        return {"": partial(prove_tenants, keys=given.keys, seconds=given.seconds)}
    return {"": partial(prove_bugs, restart=False), ", relay restarted": partial(prove_bugs, restart=True)}


if __name__ == "__main__":
    sys.exit(main())
