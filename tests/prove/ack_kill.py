"""Relays that die between the broker's word and their own: what Pulsar has acknowledged and nobody has settled.

Events are written without a pause. Each relay process kills itself, without warning, as soon as the broker has
acknowledged one of its first requests, and another one takes its place. At the end the topic, read by the official
client, must hold each committed event once, in order per key.

    python -m tests.prove.ack_kill --kills 200 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import pulsar as official
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import IntegrationEvent, Pillarbox, Route
from pillarbox.transport import Message, Outcome
from pillarbox.transports.pulsar import PulsarTransport
from tests.servers import Servers

KEYS = 20
LEASE = 1.0
PATIENCE = 60.0
"""Seconds after which a relay that has not died is taken to be stuck."""


class Acknowledged(IntegrationEvent, name="ack_kill.thing.acknowledged"):
    """Something has happened to a thing, for the n-th time."""

    number: int
    filling: str = ""


class Doomed(PulsarTransport):
    """Kills its process, or stops it, at a point where that hurts most."""

    def __init__(self, *address: str, failpoint: str, after: int, **options: Any) -> None:
        super().__init__(address[0], admin_url=address[1], **options)
        self._failpoint = failpoint
        self._left = after

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:
        if self._failpoint == "open":
            self._strike(signal.SIGSTOP)
        return await super().open(producer, topics)

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:
        outcome = await super().send(producer, messages)
        if (outcome.accepted and self._failpoint == "acked") or (outcome.rejected and self._failpoint == "rejected"):
            self._strike(signal.SIGKILL)
        return outcome

    def _strike(self, how: signal.Signals) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), how)


def open_box(database: str, transport: PulsarTransport, topic: str) -> Pillarbox:
    """A box whose events go to one topic."""
    return Pillarbox(
        create_async_engine(database),
        transports={"pulsar": transport},
        routes=[Route("ack_kill.thing.*", to="pulsar", topic=topic, name="ack-kill")],
    )


class Where(NamedTuple):
    """What a relay needs to know."""

    database: str
    url: str
    admin_url: str
    topic: str


async def start_relay(where: Where, failpoint: str, after: int = 1) -> asyncio.subprocess.Process:
    """A process that will strike itself."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.prove.ack_kill", "relay"),
        *(*where, failpoint, str(after)),
    )


async def relay(where: Where, failpoint: str, after: str) -> None:
    """What runs in it."""
    doomed = Doomed(where.url, where.admin_url, failpoint=failpoint, after=int(after))
    async with open_box(where.database, doomed, where.topic) as box:
        await box.relay(lease=LEASE).run()


def read_topic(url: str, topic: str) -> dict[str, list[int]]:
    """The numbers of each key on a topic, by the official client."""
    client = official.Client(url, logger=official.ConsoleLogger(official.LoggerLevel.Error))
    try:
        reader = client.create_reader(topic, official.MessageId.earliest)
        found: dict[str, list[int]] = defaultdict(list)
        while reader.has_message_available():
            message = reader.read_next(timeout_millis=10_000)
            found[message.partition_key()].append(json.loads(message.data())["number"])
        return found
    finally:
        client.close()


def compare(written: Mapping[str, int], found: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """What is wrong with a topic, if ``written`` says how many events each key has."""
    return {
        "missing": sum(len({*range(1, count + 1)}.difference(found.get(key, ()))) for key, count in written.items()),
        "doubled": sum(len(numbers) - len({*numbers}) for numbers in found.values()),
        "inverted": sum(_inversions(numbers) for numbers in found.values()),
        "ghosts": sum(number > written.get(key, 0) for key, numbers in found.items() for number in numbers),
    }


def _inversions(numbers: Iterable[int]) -> int:
    highest = count = 0
    for number in numbers:
        count += number < highest
        highest = max(highest, number)
    return count


async def prove(database: str, url: str, admin: str, *, kills: int, seed: int) -> dict[str, Any]:
    """Kill so many relays; what came of it is returned."""
    draw = random.Random(seed)
    topic = f"persistent://public/default/ack-kill-{uuid4().hex[:12]}"
    written: dict[str, int] = defaultdict(int)
    async with open_box(database, PulsarTransport(url, admin_url=admin), topic) as box:
        await box.migrate()
        enough = asyncio.Event()
        writing = asyncio.create_task(_write(box, written, random.Random(seed + 1), enough))
        for _ in range(kills):
            child = await start_relay(Where(database, url, admin, topic), "acked", draw.randint(1, 4))
            async with asyncio.timeout(PATIENCE):
                code = await child.wait()
            if code != -signal.SIGKILL:
                raise RuntimeError(f"a relay ended by itself, with {code}")
        enough.set()
        await writing
        await box.relay().drain()
        await box.engine.dispose()
    found = await asyncio.to_thread(read_topic, url, topic)
    events = sum(written.values())
    return {"seed": seed, "kills": kills, "events": events, "on_topic": sum(map(len, found.values()))} | compare(
        written, found
    )


async def _write(box: Pillarbox, written: dict[str, int], draw: random.Random, enough: asyncio.Event) -> None:
    while not enough.is_set():
        async with box.unit_of_work() as uow:
            for key in draw.choices([f"k{number}" for number in range(KEYS)], k=draw.randint(1, 30)):
                written[key] += 1
                uow.publish(Acknowledged(number=written[key]), key=key)
        await asyncio.sleep(
            draw.random() * 0.02
        )  # at its own pace: the relays shall have something to do, not to drown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    wanted = parser.parse_args()
    print(f"seed {wanted.seed}", file=sys.stderr, flush=True)
    servers = Servers()
    os.environ["PILLARBOX_HOME"] = str(servers.folder / "home")
    try:
        database = servers.create_database("embedded").url()
        broker: Any = servers.get("pulsar")
        result = asyncio.run(prove(database, broker.url, broker.admin_url, kills=wanted.kills, seed=wanted.seed))
    finally:
        servers.stop()
    print(json.dumps(result, indent=2))
    sys.exit(any(result[kind] for kind in ("missing", "doubled", "inverted", "ghosts")))


if __name__ == "__main__":
    if sys.argv[1:2] == ["relay"]:
        asyncio.run(relay(Where(*sys.argv[2:6]), *sys.argv[6:]))
    else:
        main()
