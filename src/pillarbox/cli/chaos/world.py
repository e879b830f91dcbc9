"""The world of the chaos: servers, relays, consumers and writers as processes, and links between them and the servers.

The links live here, in the process that breaks them. What a process says or how it ended is noticed here, too: a relay
that ended by itself is started again, as its supervisor would.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any, Self

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from ...app import Pillarbox
from ...outbox import Status
from ...stores import inspection
from ...stores.tables import lanes
from ...testing.link import Link, Way
from ...testing.pulsar import HOST
from ...transports.pulsar import PulsarTransport
from ..demo.child import Child
from ..demo.processes import Slot, State
from ..output import CommandError
from .servers import Database, free_port, pulsar_cluster
from .shop import TOPIC, WRITERS, ThingRow, counters, effects, keys, ledger, metadata, route
from .writer import Written

RELAYS = "abcd"
CONSUMERS = "yz"
LEASE = 2.0
TRANSACTIONS_PER_SECOND = 20.0
"""Of each writer."""
PATIENCE = 90.0
"""Seconds without any progress, after which what is left counts as lost."""
_PAUSE = 0.1
DATABASE_TROUBLE = (DBAPIError, OSError, TimeoutError)


class CommitTrap:
    """Shuts when COMMIT has gone up a link: then no answer comes down."""

    def __init__(self) -> None:
        self._armed: dict[Link, asyncio.Event] = {}

    def __call__(self, link: Link, data: bytes) -> None:
        """Is shown what goes up."""
        shut = self._armed.get(link)
        if shut is not None and b"COMMIT;" in data:  # and not READ COMMITTED
            link.swallow(frozenset({Way.DOWN}))
            shut.set()

    async def caught(self, link: Link, seconds: float) -> bool:
        """Wait for a COMMIT; False if none comes."""
        shut = self._armed[link] = asyncio.Event()
        try:
            await asyncio.wait_for(shut.wait(), seconds)
        except TimeoutError:
            return False
        finally:
            del self._armed[link]
        return True


class World:
    """Everything that a fault can befall. ``async with World(...)``: everything runs."""

    def __init__(self, folder: Path, *, seed: int, replicated: bool, canary: str | None) -> None:
        self.folder = folder
        self._seed = seed
        self._canary = canary
        self._exits = AsyncExitStack()
        self._names = count(1)
        self.database = Database(folder, replicated=replicated)
        self.trap = CommitTrap()
        self.slots: list[Slot] = []
        """The relays."""
        self.consumers: list[Slot] = []
        self.written: list[Written] = []
        self.database_links: dict[str, Link] = {}
        """By the letter of a relay or consumer, or the number of a writer."""
        self.broker_links: dict[str, Link] = {}
        self.broker_state = State.RUNNING
        self.peak_memory = 0
        """The most that a relay has had in memory, in bytes."""
        self.ended: list[str] = []
        """What relays said that ended by themselves."""
        self._writers: list[Child] = []

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def _start(self) -> None:
        broker_port = free_port()
        for letter in RELAYS:
            self.broker_links[letter] = await self._exits.enter_async_context(Link(HOST, broker_port))
        listeners = {f"relay-{letter}": link.port for letter, link in self.broker_links.items()}
        self.cluster = pulsar_cluster(self.folder / "pulsar", broker_port, listeners)
        self._exits.callback(self.cluster.kill)
        self._exits.push_async_callback(self.database.stop)
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(self.cluster.start))
            group.create_task(self.database.start())
        await self._prepare()
        for name in [*RELAYS, *CONSUMERS, *map(str, range(WRITERS))]:
            link = Link(str(self.database.primary.socket), watch=self.trap)
            self.database_links[name] = await self._exits.enter_async_context(link)
        self._exits.push_async_callback(self._end)
        for letter in RELAYS:
            self.slots.append(Slot(letter, *await self._start_relay(letter)))
        for letter in CONSUMERS:
            self.consumers.append(Slot(letter, *await self._start_consumer(letter)))
        await asyncio.gather(*(slot.child.answer() for slot in self.processes))

    async def _prepare(self) -> None:
        """The tables, the route and its lanes."""
        engine = create_async_engine(self.database.primary.url)
        pulsar = PulsarTransport(self.cluster.url, admin_url=self.cluster.admin_url)
        async with Pillarbox(engine, transports={route.to: pulsar}, routes=[route]) as box:
            await box.migrate()
            await box.register()
            async with engine.begin() as connection:
                await connection.run_sync(metadata.create_all)
                every = [{"key": key, "number": 0} for writer in range(WRITERS) for key in keys(writer)]
                await connection.execute(sa.insert(counters), every)
        await engine.dispose()

    # -- writers -------------------------------------------------------------------------------------------------------

    async def write(self) -> None:
        """Let the writers work until we are told to stop."""
        for number in range(WRITERS):
            told = {"url": self._url(str(number)), "number": number, "seed": self._seed}
            told["per_second"] = TRANSACTIONS_PER_SECOND
            self._writers.append(await self._child("writer", **told))
        async with asyncio.TaskGroup() as group:
            for writer in self._writers:
                group.create_task(self._hear(writer))

    def stop_writing(self) -> None:
        """Let the writers finish what they have begun."""
        for writer in self._writers:
            writer.tell(stop=True)

    async def _hear(self, writer: Child) -> None:
        while (said := await writer.answer()) is not None:
            self.written.append(msgspec.convert(said, Written))

    # -- relays --------------------------------------------------------------------------------------------------------

    @property
    def processes(self) -> list[Slot]:
        """Relays and consumers."""
        return [*self.slots, *self.consumers]

    async def replace(self, slot: Slot) -> None:
        """Start another one in the place of one that has ended."""
        start = self._start_relay if slot in self.slots else self._start_consumer
        slot.name, slot.child = await start(slot.letter)
        slot.state = State.RUNNING

    async def look_after_them(self) -> None:
        """Start those again that have ended by themselves, and see how large they are."""
        for slot in self.processes:
            if slot.state is not State.RUNNING:
                continue
            self.peak_memory = max(self.peak_memory, _memory(slot.child.pid))
            try:
                slot.child.check()
            except CommandError as error:
                self.ended.append(str(error))
                await self.replace(slot)

    async def stop_relays(self) -> None:
        """Let them release their lanes and end."""
        await asyncio.gather(*(slot.child.stop() for slot in self.slots))

    async def stop_consumers(self) -> None:
        """Let them finish and end."""
        await asyncio.gather(*(slot.child.stop() for slot in self.consumers))

    async def _start_consumer(self, letter: str) -> tuple[str, Child]:
        name = f"{letter}{next(self._names)}"
        told = {"name": name, "url": self._url(letter), "pulsar": self.cluster.url, "timeout": 3 * LEASE}
        return name, await self._child("consumer", **told)

    async def _start_relay(self, letter: str) -> tuple[str, Child]:
        name = f"{letter}{next(self._names)}"
        told = {
            "name": name,
            "url": self._url(letter),
            "pulsar": f"pulsar://{HOST}:{self.broker_links[letter].port}",
            "admin_url": self.cluster.admin_url,
            "listener_name": f"relay-{letter}",
            "lease": LEASE,
            "canary": self._canary,
        }
        return name, await self._child("relay", **told)

    async def _child(self, module: str, **told: Any) -> Child:
        return await Child.start(module, self.folder / "log", __package__, **told)

    def _url(self, name: str) -> str:
        return f"postgresql+asyncpg://postgres@{HOST}:{self.database_links[name].port}/{self.database.primary.database}"

    async def _end(self) -> None:
        await asyncio.gather(*(child.kill() for child in [*self._writers, *(slot.child for slot in self.processes)]))

    # -- servers -------------------------------------------------------------------------------------------------------

    async def promote_replica(self) -> None:
        """Lose the primary; the links lead to what was its replica."""
        await self.database.promote()
        for link in self.database_links.values():
            link.lead_to(str(self.database.primary.socket))

    async def restart_broker(self) -> None:
        """Kill the broker, and wait until it is back."""
        self.broker_state = State.KILLED
        await asyncio.to_thread(self.cluster.restart_broker)
        self.broker_state = State.RUNNING

    async def lose_bookie(self, seconds: float) -> None:
        """Let the bookie hang, so that the broker has what is stored nowhere; then lose both, and wait for them."""
        self.cluster.freeze_bookie()
        await asyncio.sleep(seconds)
        self.broker_state = State.KILLED
        for step in (self.cluster.kill_broker, self.cluster.kill_bookie, self.cluster.start_bookie):
            await asyncio.to_thread(step)
        await asyncio.to_thread(self.cluster.start_broker)
        self.broker_state = State.RUNNING

    async def kill_backend(self) -> None:
        """End the connection of somebody to PostgreSQL, from within."""
        with suppress(*DATABASE_TROUBLE):  # it has just gone down
            await self.database.kill_backend()

    async def unload_topic(self) -> None:
        """Let the broker let go of the topic, as it does when load is balanced."""
        path = TOPIC.replace("://", "/")
        with suppress(OSError):  # the broker has not come far enough yet
            await asyncio.to_thread(self.cluster.admin, "PUT", f"/{path}/unload")

    def mend(self) -> None:
        """Let all links be good."""
        for link in self.links:
            link.mend()

    @property
    def links(self) -> Iterable[Link]:
        """All of them."""
        return [*self.database_links.values(), *self.broker_links.values()]

    # -- progress ------------------------------------------------------------------------------------------------------

    async def progress(self) -> tuple[int, int, list[str | None]] | None:
        """How many events there are, how many have been announced, and who holds each lane; None: no answer."""
        held = sa.case((lanes.c.locked_until > sa.func.now(), lanes.c.locked_by))
        try:
            async with asyncio.timeout(LEASE), self.database.engine.connect() as connection:
                committed = await connection.scalar(sa.select(sa.func.sum(counters.c.number)))
                found = (await connection.execute(sa.select(lanes.c.next_number, held).order_by(lanes.c.shard))).all()
        except DATABASE_TROUBLE:
            return None
        return committed or 0, sum(row[0] - 1 for row in found), [row[1] and row[1][0] for row in found]

    async def caught_up(self) -> None:
        """Wait until what is there now has been announced: whatever was wrong, it is over. But not for ever."""
        deadline, wanted = _later(), 0
        while asyncio.get_running_loop().time() < deadline:
            found = await self.progress()
            if found is not None:
                wanted = wanted or found[0]
                if found[1] >= wanted > 0:
                    return
            await asyncio.sleep(_PAUSE)

    async def drained(self) -> bool:
        """Wait until nothing is left to send; False if that does not come about."""
        deadline, before = _later(), -1
        while asyncio.get_running_loop().time() < deadline:
            async with self.database.engine.connect() as connection:
                groups = await connection.run_sync(inspection.statistics)
            waiting = sum(group.count for group in groups if group.status is not Status.SENT)
            if waiting == 0:
                return True
            if waiting != before:
                deadline, before = _later(), waiting
            await self.look_after_them()
            await asyncio.sleep(_PAUSE)
        return False

    async def consumed(self) -> bool:
        """Wait until all that was sent has taken effect, at least; False if that does not come about."""
        deadline, before = _later(), -1
        statement = sa.select(
            sa.select(sa.func.count()).select_from(ledger).scalar_subquery(),
            sa.select(sa.func.count()).select_from(effects).scalar_subquery(),
            sa.select(sa.func.coalesce(sa.func.sum(ThingRow.number), 0)).scalar_subquery(),
        )
        while asyncio.get_running_loop().time() < deadline:
            async with self.database.engine.connect() as connection:
                events, noted, counted = (await connection.execute(statement)).one()
            if min(noted, counted) >= events:
                return True
            if noted + counted != before:
                deadline, before = _later(), noted + counted
            await self.look_after_them()
            await asyncio.sleep(_PAUSE)
        return False


def _later() -> float:
    return asyncio.get_running_loop().time() + PATIENCE


def _memory(pid: int) -> int:
    """The most memory that a process has had, where the system says so."""
    if sys.platform != "linux":
        return 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
