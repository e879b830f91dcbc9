"""The stage of the demo: the order service, the processes behind it, and the faults that befall them.

Four times a second everything that there is to see goes into a `Scene`. What a picture makes of it is its own affair.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from ... import clock
from ...outbox import Status
from ...stores import inspection, operations, overview
from ...stores.audit import Author
from ...stores.inspection import Filter
from ...stores.operations import Action, Selection
from .ledger import Balance, Kind, compare, read_ledger
from .processes import Processes, Slot, State
from .shop import OPERATOR, Shop, ledger, route
from .sink import Arrival

DRAIN_SECONDS = 60.0
TICK = 0.25
RECENT = 2.0  # seconds that rates and lags are taken from

PLAN = {Kind.POISON: 0.08, Kind.KILL: 0.2, Kind.FREEZE: 0.42, Kind.STOP_SINK: 0.62}
"""When each fault comes by itself, as a part of the whole time."""
_AT_REST = {Status.SENT, Status.DISCARDED}
MENDED = 0.8
"""When the poisoned event is redriven."""


class Happening(NamedTuple):
    """Something that people should be told."""

    at: float
    what: str
    good: bool


@dataclass
class Scene:
    """What there is to see."""

    seconds: float
    """How long the shop is to be open."""
    slots: list[Slot]
    title: str = "pillarbox demo"
    destination: str = "sink"
    elapsed: float = 0.0
    committed: list[int] = field(default_factory=lambda: [0])
    """In total, tick by tick."""
    delivered: list[int] = field(default_factory=lambda: [0])
    lags: deque[tuple[float, float]] = field(default_factory=deque)
    """Of the last seconds: when a message arrived, and how long after its COMMIT."""
    owners: list[str | None] = field(default_factory=list)
    """The letter of the relay that holds each lane."""
    sink: State = State.RUNNING
    waiting: int = 0
    """Deliveries that were rejected, and those of their keys behind them."""
    story: list[Happening] = field(default_factory=list)
    balance: Balance | None = None
    """At the end."""

    @property
    def backlog(self) -> list[int]:
        """What was committed and is not delivered, tick by tick."""
        return [max(0, ours - theirs) for ours, theirs in zip(self.committed, self.delivered, strict=True)]

    def rate(self, totals: Sequence[int]) -> float:
        """How fast a total has grown lately, per second."""
        ticks = min(len(totals) - 1, int(RECENT / TICK))
        return (totals[-1] - totals[-1 - ticks]) / (ticks * TICK) if ticks else 0.0

    def lag(self, part: float) -> float:
        """The lag, in milliseconds, that this part of the recent messages did not exceed."""
        return percentile([lag for _, lag in self.lags], part)


class Stage:
    """All that plays, and what is done to it."""

    def __init__(
        self, shop: Shop, processes: Processes, *, seconds: float, lease: float, exactly_once: bool = False
    ) -> None:
        self._exactly_once = exactly_once
        self.shop = shop
        self.processes = processes
        self._lease = lease
        self.started = clock.now().timestamp()
        self._started = clock.current().monotonic()
        self._over = asyncio.Event()
        self._closed = False
        self._group = asyncio.TaskGroup()
        self._episodes: set[asyncio.Task[None]] = set()
        self._targets = deque(processes.slots)
        self._mending = 0
        self._arrivals: list[Arrival] = []
        self._delivered: set[str] = set()
        self.lags: list[float] = []
        """Of every event, in milliseconds."""
        self.scene = Scene(seconds, processes.slots)

    # -- the play ------------------------------------------------------------------------------------------------------

    async def play(self, kinds: Collection[Kind], show: Callable[[Scene], None]) -> Balance:
        """Open the shop, let these faults come, close it, wait until all is delivered, and compare."""
        try:
            async with self._group:
                try:
                    self._group.create_task(self._watch(show))
                    writing = self._group.create_task(self.shop.open())
                    await self._perform(kinds)
                    self.shop.close()
                    await writing
                    await self._drain()
                finally:
                    # Told, not only cancelled: there are drivers that swallow a cancellation.
                    self._closed = True
                    self.finish()
                    self.shop.close()
        except ExceptionGroup as failed:  # whatever else failed, failed because of it
            raise failed.exceptions[0] from None
        await self.processes.stop()
        self._look()
        async with self.shop.box.engine.connect() as connection:
            committed = await connection.run_sync(read_ledger, ledger)
        # On a broker that deduplicates nothing explains a duplicate.
        excuses = [] if self._exactly_once else [*self.processes.faults, *self.processes.stalls]
        self.scene.balance = compare(committed, self._arrivals, excuses)
        show(self.scene)
        return self.scene.balance

    def strike(self, kind: Kind) -> None:
        """Let a fault come now. It heals by itself."""
        if not self._over.is_set():
            episode = self._group.create_task(_EPISODES[kind](self))
            self._episodes.add(episode)
            episode.add_done_callback(self._episodes.discard)

    def finish(self) -> None:
        """Let the play come to its end now."""
        self._over.set()

    async def _perform(self, kinds: Collection[Kind]) -> None:
        for kind, part in PLAN.items():
            if kind in kinds:
                await self._pause(part * self.scene.seconds - self._elapsed)
                self.strike(kind)
        await self._pause(self.scene.seconds - self._elapsed)
        self.finish()
        while self._episodes:
            await asyncio.wait(self._episodes)

    async def _drain(self) -> None:
        """Wait until the outbox has nothing left to send. Whether that was right is for the ledger to say."""
        deadline = clock.current().monotonic() + DRAIN_SECONDS
        while clock.current().monotonic() < deadline:
            async with self.shop.box.engine.connect() as connection:
                groups = await connection.run_sync(inspection.statistics)
            if {group.status for group in groups if group.route == route.name} <= _AT_REST:
                return
            await asyncio.sleep(TICK / 5)

    # -- faults --------------------------------------------------------------------------------------------------------

    async def _kill(self) -> None:
        if slot := self._next_target():
            async with self.processes.killed(slot):
                self._tell(f"relay {slot.letter} was killed (kill -9)")
                await self._pause(2 * self._lease)
            self._tell(f"relay {slot.letter} is back", good=True)

    async def _freeze(self) -> None:
        if slot := self._next_target():
            with self.processes.frozen(slot):
                self._tell(f"relay {slot.letter} was frozen (SIGSTOP), longer than its lease")
                await self._pause(1.75 * self._lease)
            self._tell(f"relay {slot.letter} woke up, and knows nothing of it", good=True)

    async def _stop_sink(self) -> None:
        if self.processes.sink_state is State.RUNNING:
            async with self.processes.without_sink():
                self._tell(f"the {self.processes.sink_name} was stopped")
                await self._pause(1.5 * self._lease)
            self._tell(f"the {self.processes.sink_name} is back", good=True)

    async def _poison(self) -> None:
        event_id = await self.shop.poison()
        with self.processes.fault(Kind.POISON, str(event_id)):
            self._tell("an event was poisoned: its order waits, all others go on")
            await self._pause(max(2.5 * self._lease, MENDED * self.scene.seconds - self._elapsed))
        self._mend(+1)
        self._tell("the sink was mended, and the poisoned event redriven", good=True)
        deadline = clock.current().monotonic() + DRAIN_SECONDS
        while str(event_id) not in self._delivered and not self._closed and clock.current().monotonic() < deadline:
            await self._redrive(event_id)
            await asyncio.sleep(TICK)
        self._mend(-1)

    def _mend(self, more: int) -> None:
        """The sink digests everything as long as somebody wants it to."""
        self._mending += more
        self.processes.let_sink_reject(self._mending == 0)

    async def _redrive(self, event_id: UUID) -> None:
        """Ask for it, as ``pillarbox outbox redrive`` does, if its attempts are used up."""
        failed = Selection(Action.REDRIVE, Filter(status=Status.FAILED), (event_id,))
        async with self.shop.box.engine.begin() as connection:
            author = Author(OPERATOR, "the sink was mended")
            await connection.run_sync(operations.request, failed, author, operations.Run(), 1)

    def _next_target(self) -> Slot | None:
        """A relay that nothing has happened to, or to which it happened long ago."""
        for slot in self._targets:
            if slot.state is State.RUNNING:
                self._targets.remove(slot)
                self._targets.append(slot)
                return slot
        return None

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), max(0.0, seconds))

    # -- what there is to see ------------------------------------------------------------------------------------------

    @property
    def _elapsed(self) -> float:
        return clock.current().monotonic() - self._started

    def _tell(self, what: str, *, good: bool = False) -> None:
        self.scene.story.append(Happening(self._elapsed, what, good))

    async def _watch(self, show: Callable[[Scene], None]) -> None:
        while not self._closed:
            self.processes.check()
            self._look()
            await self._ask()
            scene = self.scene
            scene.elapsed = self._elapsed
            scene.sink = self.processes.sink_state
            scene.delivered.append(len(self._delivered))
            scene.committed.append(self.shop.committed)
            show(scene)
            await asyncio.sleep(TICK)

    def _look(self) -> None:
        """Read what has come to the sink."""
        recent = self.scene.lags
        for arrival in self.processes.arrivals.more():
            self._arrivals.append(arrival)
            asked = self.shop.asked.get(arrival.event_id)
            if asked is not None and arrival.event_id not in self._delivered:
                recent.append((arrival.at, lag := (arrival.at - asked) * 1000))
                self.lags.append(lag)
            self._delivered.add(arrival.event_id)
        while recent and recent[0][0] < recent[-1][0] - RECENT:
            recent.popleft()

    async def _ask(self) -> None:
        """Ask the database who owns which lane, and what waits."""
        async with self.shop.box.engine.connect() as connection:
            lanes = await connection.run_sync(overview.lane_states, route.name)
        letters = {slot.name: slot.letter for slot in self.processes.slots}
        self.scene.owners = [letters.get(lane.owner or "") if lane.held else None for lane in lanes]
        self.scene.waiting = sum(lane.waiting for lane in lanes)


_EPISODES: dict[Kind, Callable[[Stage], Coroutine[Any, Any, None]]] = {
    Kind.KILL: Stage._kill,
    Kind.FREEZE: Stage._freeze,
    Kind.STOP_SINK: Stage._stop_sink,
    Kind.POISON: Stage._poison,
}


def percentile(values: Sequence[float], part: float) -> float:
    """What this part of the values does not exceed; 0 if there are none."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0
