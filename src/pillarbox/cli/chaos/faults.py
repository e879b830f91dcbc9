"""The faults: what can go wrong, how often each kind comes, and how it heals.

Kinds are drawn from a deck that the seed has shuffled, so a minute has seen nearly all of them. Cheap ones strike about
once a second and overlap; those that take a server away come one at a time, and the next one only after the relays have
caught up.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any

from ...testing.link import BOTH, Link, Way
from ..demo.processes import Slot, State
from .world import CONSUMERS, LEASE, World


class Kind(StrEnum):
    """What can go wrong."""

    KILL = "kill"
    FREEZE = "freeze"
    STOP = "stop"
    BACKEND = "backend"
    POSTGRES = "postgres"
    PROMOTE = "promote"
    BROKER = "broker"
    BOOKIE = "bookie"
    UNLOAD = "unload"
    CUT = "cut"
    BLACKHOLE = "blackhole"
    HALF_OPEN = "half-open"
    DELAY = "delay"
    COMMIT = "commit"


DECK = {
    Kind.KILL: 5,
    Kind.FREEZE: 3,
    Kind.STOP: 4,
    Kind.BACKEND: 8,
    Kind.POSTGRES: 1,
    Kind.PROMOTE: 1,
    Kind.BROKER: 1,
    Kind.UNLOAD: 4,
    Kind.CUT: 7,
    Kind.BLACKHOLE: 4,
    Kind.HALF_OPEN: 4,
    Kind.DELAY: 5,
    Kind.COMMIT: 8,
}
"""How many of each kind are in a deck. The only bookie is killed only for who asks for it: a real cluster has more."""
SERVERS = frozenset({Kind.POSTGRES, Kind.PROMOTE, Kind.BROKER, Kind.BOOKIE})
"""What takes a server away."""
_RELAYS = frozenset({Kind.KILL, Kind.FREEZE, Kind.STOP})
_QUICKEST, _SLOWEST = 0.3, 1.2
"""Seconds between two faults."""


@dataclass(slots=True)
class Fault:
    """Something that went wrong, and when."""

    kind: Kind
    target: str
    at: float
    ended: float = inf


class Faults:
    """Lets things go wrong, and remembers what did."""

    def __init__(self, world: World, kinds: Collection[Kind], seed: int, tell: Callable[..., None]) -> None:
        self._world = world
        self._cards = [kind for kind in Kind if kind in kinds for _ in range(DECK.get(kind, 1))]
        self._draw = random.Random(f"{seed} faults")  # noqa: S311  repeatable
        self._tell = tell
        self._deck: list[Kind] = []
        self._bad: set[Link] = set()
        self._server: Kind | None = None
        """What a server suffers from now."""
        self.all: list[Fault] = []

    async def strike(self, seconds: float) -> None:
        """Let things go wrong for so long, then wait until the last of it has healed."""
        await self._world.caught_up()  # there is something to break
        deadline = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < deadline:
                kind = self._next()
                if kind is not None:
                    group.create_task(self._play(kind))
                await asyncio.sleep(self._draw.uniform(_QUICKEST, _SLOWEST))
        self._world.mend()

    def _next(self) -> Kind | None:
        """The next card that can be played now; what cannot stays for later, and a new deck goes below it."""
        for _ in range(2):
            for index, kind in enumerate(self._deck):
                if self._is_possible(kind):
                    return self._deck.pop(index)
            kept = set(self._deck)
            self._deck += [kind for kind in self._draw.sample(self._cards, len(self._cards)) if kind not in kept]
        return None

    async def _play(self, kind: Kind) -> None:
        if kind not in SERVERS:
            await _EPISODES[kind](self)
            return
        self._server = kind
        await _EPISODES[kind](self)
        await self._world.caught_up()
        self._tell(f"{kind}: the relays have caught up", good=True)
        self._server = None

    def _is_possible(self, kind: Kind) -> bool:
        if kind in SERVERS:
            return self._server is None and (kind is not Kind.PROMOTE or self._world.database.replica is not None)
        if kind is Kind.BACKEND:
            return self._server not in (Kind.POSTGRES, Kind.PROMOTE)
        if kind is Kind.UNLOAD:
            return self._world.broker_state is State.RUNNING
        return bool(self._targets()) if kind in _RELAYS else len(self._bad) < len(list(self._world.links)) // 2

    @contextmanager
    def _fault(self, kind: Kind, target: str, what: str) -> Iterator[Fault]:
        """It lasts as long as the block."""
        fault = Fault(kind, target, time.time())
        self.all.append(fault)
        self._tell(what)
        yield fault
        fault.ended = time.time()

    # -- relays --------------------------------------------------------------------------------------------------------

    def _targets(self) -> list[Slot]:
        return [slot for slot in self._world.processes if slot.state is State.RUNNING]

    async def _kill(self) -> None:
        slot = self._draw.choice(self._targets())
        slot.state = State.KILLED
        with self._fault(Kind.KILL, slot.name, f"{_who(slot.name)} was killed (kill -9)"):
            await slot.child.kill()
            await asyncio.sleep(self._draw.random() * LEASE)
            await self._world.replace(slot)

    async def _stop(self) -> None:
        slot = self._draw.choice(self._targets())
        slot.state = State.KILLED
        with self._fault(Kind.STOP, slot.name, f"{_who(slot.name)} was told to stop (SIGTERM)"):
            await slot.child.stop()
            await self._world.replace(slot)

    async def _freeze(self) -> None:
        slot = self._draw.choice(self._targets())
        slot.state = State.FROZEN
        with self._fault(Kind.FREEZE, slot.name, f"{_who(slot.name)} was frozen (SIGSTOP), longer than a lease"):
            slot.child.freeze()
            await asyncio.sleep(LEASE * self._draw.uniform(1.1, 3.5))
            slot.child.thaw()
            slot.state = State.RUNNING

    # -- servers -------------------------------------------------------------------------------------------------------

    async def _backend(self) -> None:
        with self._fault(Kind.BACKEND, "postgres", "a connection was ended by the server (pg_terminate_backend)"):
            await self._world.kill_backend()

    async def _postgres(self) -> None:
        await self._suffer(Kind.POSTGRES, "PostgreSQL crashed, and starts again", self._world.database.restart())

    async def _promote(self) -> None:
        what = "PostgreSQL's primary was lost, and its replica promoted"
        await self._suffer(Kind.PROMOTE, what, self._world.promote_replica())
        await self._world.database.add_replica()

    async def _broker(self) -> None:
        what = "the broker was killed (kill -9), and starts again"
        await self._suffer(Kind.BROKER, what, self._world.restart_broker())

    async def _bookie(self) -> None:
        what = "the bookie hung, then it and the broker were killed"
        await self._suffer(Kind.BOOKIE, what, self._world.lose_bookie(3 * LEASE))

    async def _suffer(self, kind: Kind, what: str, doing: Coroutine[Any, Any, None]) -> None:
        with self._fault(kind, "server", what) as fault:
            await doing
        self._tell(f"{kind}: the server is back after {fault.ended - fault.at:.1f} s", good=True)

    async def _unload(self) -> None:
        with self._fault(Kind.UNLOAD, "broker", "the topic was unloaded"):
            await self._world.unload_topic()

    # -- links ---------------------------------------------------------------------------------------------------------

    async def _cut(self) -> None:
        await self._spoil(Kind.CUT, "was cut", Link.cut, 0.05, 2.0)

    async def _blackhole(self) -> None:
        await self._spoil(Kind.BLACKHOLE, "swallows everything", lambda link: link.swallow(BOTH), 0.5, 2.5 * LEASE)

    async def _half_open(self) -> None:
        way = self._draw.choice([*Way])
        what = f"swallows what goes {way.value}"
        await self._spoil(Kind.HALF_OPEN, what, lambda link: link.swallow(frozenset({way})), 0.5, 2.5 * LEASE)

    async def _delay(self) -> None:
        way, seconds = self._draw.choice([*Way]), self._draw.uniform(0.02, 0.4)
        what = f"holds up what goes {way.value} for {seconds * 1000:.0f} ms"
        await self._spoil(Kind.DELAY, what, lambda link: link.slow_down(way, seconds), 1.0, 5.0)

    async def _commit(self) -> None:
        name, link = self._good_link(writers_only=True)
        self._bad.add(link)
        if await self._world.trap.caught(link, LEASE):
            with self._fault(Kind.COMMIT, name, f"{name} was cut right after COMMIT was sent"):
                await asyncio.sleep(self._draw.random() * 0.2)
                link.drop()
                link.mend()
        self._bad.discard(link)

    async def _spoil(
        self, kind: Kind, what: str, spoil: Callable[[Link], None], shortest: float, longest: float
    ) -> None:
        name, link = self._good_link()
        self._bad.add(link)
        with self._fault(kind, name, f"{name} {what}"):
            spoil(link)
            await asyncio.sleep(self._draw.uniform(shortest, longest))
            link.mend()
        self._bad.discard(link)

    def _good_link(self, *, writers_only: bool = False) -> tuple[str, Link]:
        world = self._world
        found = {f"the link of {_who(name)} to PostgreSQL": link for name, link in world.database_links.items()}
        if writers_only:
            found = {name: link for name, link in found.items() if "writer" in name}
        else:
            found |= {f"the link of {_who(name)} to the broker": link for name, link in world.broker_links.items()}
        good = [name for name, link in found.items() if link not in self._bad] or list(found)
        name = self._draw.choice(good)
        return name, found[name]


def _who(name: str) -> str:
    if name.isdigit():
        return f"writer {name}"
    return f"consumer {name}" if name[0] in CONSUMERS else f"relay {name}"


_EPISODES: dict[Kind, Callable[[Faults], Coroutine[Any, Any, None]]] = {
    Kind.KILL: Faults._kill,
    Kind.FREEZE: Faults._freeze,
    Kind.STOP: Faults._stop,
    Kind.BACKEND: Faults._backend,
    Kind.POSTGRES: Faults._postgres,
    Kind.PROMOTE: Faults._promote,
    Kind.BROKER: Faults._broker,
    Kind.BOOKIE: Faults._bookie,
    Kind.UNLOAD: Faults._unload,
    Kind.CUT: Faults._cut,
    Kind.BLACKHOLE: Faults._blackhole,
    Kind.HALF_OPEN: Faults._half_open,
    Kind.DELAY: Faults._delay,
    Kind.COMMIT: Faults._commit,
}
