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
import logging
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from uuid import uuid4

import pulsar as official
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import IntegrationEvent, Pillarbox, Route
from pillarbox.transport import Message, Outcome
from pillarbox.transports.pulsar import PulsarTransport
from pillarbox.transports.pulsar.client import _endpoint
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
        here = _endpoint(address[0])
        self._client._through = lambda *_: here  # type: ignore[method-assign]  # a Link may stand before the broker

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


async def start_relay(
    where: Where, failpoint: str = "none", after: int = 1, *, lease: float = LEASE
) -> asyncio.subprocess.Process:
    """A process that will strike itself, or waits to be struck."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.prove.ack_kill", "relay"),
        *(*where, failpoint, str(after), str(lease)),
    )


async def relay(where: Where, failpoint: str, after: str, lease: str) -> None:
    """What runs in it."""
    logging.getLogger("pillarbox").setLevel(logging.ERROR)  # that a broker is away is no news here
    doomed = Doomed(where.url, where.admin_url, failpoint=failpoint, after=int(after))
    async with open_box(where.database, doomed, where.topic) as box:
        await box.relay(lease=float(lease)).run()


class Tally:
    """What is wrong with a topic that is read message by message, if ``written`` says how many events each key has.

    It remembers the highest number of each key, and the gaps below it: a topic may have millions.
    """

    def __init__(self, written: Mapping[str, int]) -> None:
        self.on_topic = 0
        self._written = written
        self._last: dict[str, int] = defaultdict(int)
        self._gaps: dict[str, set[int]] = defaultdict(set)
        self._doubled = self._inverted = self._ghosts = 0

    def add(self, key: str, number: int) -> None:
        """Found on the topic, behind all that were found before."""
        self.on_topic += 1
        self._ghosts += number > self._written.get(key, 0)
        last = self._last[key]
        if number > last:
            self._gaps[key].update(range(last + 1, number))
            self._last[key] = number
            return
        self._inverted += number < last
        if number in self._gaps[key]:
            self._gaps[key].remove(number)
        else:
            self._doubled += 1

    @property
    def faults(self) -> dict[str, int]:
        """How many of each kind; a topic that has none is as it must be."""
        beyond = sum(max(0, count - self._last.get(key, 0)) for key, count in self._written.items())
        gaps = sum(sum(gap <= self._written.get(key, 0) for gap in gaps) for key, gaps in self._gaps.items())
        return {
            "missing": beyond + gaps,
            "doubled": self._doubled,
            "inverted": self._inverted,
            "ghosts": self._ghosts,
        }


@contextmanager
def official_client(url: str) -> Iterator[official.Client]:
    """Which shares no line with ours."""
    client = official.Client(url, logger=official.ConsoleLogger(official.LoggerLevel.Error))
    try:
        yield client
    finally:
        client.close()


def numbers_on(client: official.Client, topic: str) -> Iterator[tuple[str, int]]:
    """Key and number of each message on a topic, in its order."""
    reader = client.create_reader(topic, official.MessageId.earliest)
    while reader.has_message_available():
        message = reader.read_next(timeout_millis=10_000)
        yield message.partition_key(), json.loads(message.data())["number"]
    reader.close()


def read_topic(url: str, topic: str) -> dict[str, list[int]]:
    """The numbers of each key on a topic, by the official client."""
    found: dict[str, list[int]] = defaultdict(list)
    with official_client(url) as client:
        for key, number in numbers_on(client, topic):
            found[key].append(number)
    return found


def compare(written: Mapping[str, int], found: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """What is wrong with a topic that was read as a whole."""
    tally = Tally(written)
    for key, numbers in found.items():
        for number in numbers:
            tally.add(key, number)
    return tally.faults


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
