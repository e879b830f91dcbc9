"""The relay: leases lanes, keeps a worker on each of them, and hands over when it stops.

Before this: the outbox has committed rows. After it: transports have the messages. Relays need no leader. Each says
that it is alive, counts those who serve the same routes, takes its share of the lanes that nobody holds, and lets go of
what is too much. A relay that dies is missed when its leases end; one that stops lets its lanes go at once.

Three things wake a lane, and each would do: the doorbell after a commit, a look at all our lanes at once that slows
down while nothing happens, and whatever alarm the lane has set itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import socket
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Container,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Protocol

from . import clock, telemetry
from .breaker import RESTS
from .doorbell import ANYBODY, Doorbell
from .errors import ConfigurationError, LaneHaltedError, LeaseLostError
from .fairness import Pace
from .lane import LaneWorker
from .outbox import Census, Lane, LaneName, LaneStore, OutboxStore, Trouble, shard_of
from .redaction import redacted
from .rejections import Rejections
from .report import STUMBLED, TIMES_IN_A_ROW, Counts, described, traceback_of
from .sending import Acknowledged
from .telemetry import SILENT, LogEvent, Sample, Signals
from .transport import Publisher

logger = logging.getLogger("pillarbox")

QUICKEST_LOOK = 0.02
CLOSE_SECONDS = 2.0
STALLED = 4
"""`Relay.drain` leaves a lane whose destination was unavailable so often in a row."""
NO_PROGRESS = "messages of a tenant wait for it, and none takes effect"
STANDING = 3
"""A lane that fails so often in a row will not mend itself."""


class RelayStore(LaneStore, OutboxStore, Protocol):
    """All that a relay needs of a store."""


class Feed(Protocol):
    """Brings rows to the store by another way, and rings for them, while the relay runs. A hint, as the doorbell is."""

    state: Any

    @property
    def works(self) -> bool:
        """Whether commits are heard of by it now."""
        ...

    def start(self, hearer: Callable[[Collection[LaneName]], object], lanes: Container[LaneName]) -> None:
        """Begin, in the background, for rows of these lanes."""
        ...

    async def stop(self) -> None:
        """End."""
        ...

    def samples(self) -> Iterable[Sample]:
        """What gauges show of it."""
        ...


class RelayedConsumer(Protocol):
    """A consumer that gets its messages from a relay alone."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def progresses(self) -> bool:
        """Whether what waits for it takes effect."""
        ...

    def served(self, *, draining: bool) -> AbstractAsyncContextManager[object]:
        """Work as long as the block does. In a drain it has time for what takes long, and tries every key."""
        ...


@dataclass(frozen=True)
class Pacing:
    """How a relay spends its time, in seconds and sizes."""

    lease: float = 5.0
    """A lane whose owner has not been heard of for so long is taken over."""
    batch: int = 500
    """Messages per lane and turn."""
    window_bytes: int = 33_554_432
    """What the bodies that all lanes have in memory may take."""
    look: float = 1.0
    """The longest time between two looks at the outbox while the doorbell works; without it, a quarter."""
    linger: float = 0.02
    """How long a lane waits for more before it settles its last batch by itself."""
    grace: float = 10.0
    """How long lanes may take to finish what they have announced, when the relay stops."""

    def __post_init__(self) -> None:
        for option in fields(self):
            given, most = getattr(self, option.name), _MOST.get(option.name, math.inf)
            whole = isinstance(option.default, int)
            if isinstance(given, bool) or not isinstance(given, int if whole else int | float) or not 0 < given <= most:
                what = "a whole number" if whole else "a number"
                bounds = "above 0" if most == math.inf else f"above 0 and up to {most:,}"
                raise ConfigurationError(f"relay: {option.name} must be {what} {bounds}, got {given!r}")


@dataclass(frozen=True, slots=True)
class _Stumbles:
    """Turns of a lane that failed, one after the other."""

    count: int
    said: str
    batch: int
    """The newest batch of the lane when it failed last."""

    @property
    def trouble(self) -> Trouble:
        often = f" {self.count} {TIMES_IN_A_ROW}" if self.count >= STANDING else ""
        return Trouble(f"{STUMBLED}{often}: {self.said}", 0.0)

    def is_over(self, lane: Lane) -> bool:
        """Whether a turn has gone well since: a batch is announced when the one before is stored."""
        return lane.batch > self.batch + 1


_MOST = {"lease": 3600, "batch": 10_000, "grace": 3600, "look": 3600, "linger": 3600}


class Relay:
    """Sends what the outbox holds. Made by ``box.relay()``.

    ``publishers`` are the destinations that it can serve, by what a route needs, and ``consumers`` work among them
    while it does. ``shards`` keeps it to some lanes of each route, and ``tenants`` to those in which these tenants are,
    of routes that are sharded by tenant. While it lives these lanes are left to it by relays that keep to none; when it
    is gone they take them over.
    """

    def __init__(
        self,
        store: RelayStore,
        publishers: Mapping[str, Publisher],
        *,
        consumers: Sequence[RelayedConsumer] = (),
        name: str | None = None,
        pacing: Pacing | None = None,
        shards: Collection[int] | None = None,
        tenants: Collection[str] | None = None,
        bell: Doorbell | None = None,
        feed: Feed | None = None,
        draw: Callable[[], float] = random.random,
        shares_connection: bool = False,
        signals: Signals = SILENT,
        check_usable: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name or relay_name()
        self.counts = Counts()
        self._store = store
        self._publishers = publishers
        self._consumers = consumers
        self._pacing = pacing or Pacing()
        if shards is not None and (not shards or not all(isinstance(shard, int) for shard in shards)):
            raise ConfigurationError(f"relay: shards are numbers, and at least one, got {shards!r}")
        if tenants is not None and (isinstance(tenants, str) or not tenants or not all(map(_is_name, tenants))):
            raise ConfigurationError(f"relay: tenants are names, and at least one, got {tenants!r}")
        if shards is not None and tenants is not None:
            raise ConfigurationError("relay: it keeps to shards or to tenants, not to both")
        self._shards = None if shards is None else frozenset(shards)
        self._tenants = None if tenants is None else frozenset(tenants)
        self._bell = bell
        self._feed = feed
        self._draw = draw
        self._shares_connection = shares_connection
        self._signals = signals
        self._check_usable = check_usable
        self._rejections = Rejections(draw, self._heard)
        self._acknowledged: dict[LaneName, Acknowledged] = {}
        """What is known of the batches of lanes that were lost, in case they come back."""
        self._workers: dict[LaneName, LaneWorker] = {}
        self._tasks: dict[LaneName, asyncio.Task[None]] = {}
        self._alive: set[asyncio.Task[None]] = set()
        """All of these, and those that have come to the end of a lane and let it go."""
        self._stumbles: dict[LaneName, _Stumbles] = {}
        self._census: Census | None = None
        self._renewed_at: float | None = None
        self._attended_at: float | None = None
        self._tried_at: float | None = None
        self._began_at: float | None = None
        self._reachable = True
        self._stops = 0
        self._leaving = False
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._finished = asyncio.Event()
        self._finished.set()

    # -- what people do with it ----------------------------------------------------------------------------------------

    def run(self) -> Coroutine[Any, Any, None]:
        """Send until `stop` is called or we are cancelled. Lanes are released on the way out.

        What counts is a `stop` after this call, even if its task has not begun by then: one that came before, after a
        `drain` say, was for what ran at that time.
        """
        return self._run(self._stops)

    async def _run(self, stops: int) -> None:
        if self._stops != stops:
            return  # its box may have closed everything by now
        self._check_usable()
        if not self._finished.is_set():
            raise ConfigurationError(
                f"relay {self.name} runs already: for a second one beside it, make another with box.relay()"
            )
        if self._shares_connection:
            raise ConfigurationError(
                "an in-memory SQLite has one connection, and a relay beside the service would commit the service's "
                "transactions: use a file, or drain() while nothing else runs"
            )
        self._finished.clear()
        self._began_at = clock.current().monotonic()
        try:
            async with self._consuming(draining=False):
                await self._send_until(stops)
        finally:
            self._began_at = None
            self._finished.set()

    @asynccontextmanager
    async def _consuming(self, *, draining: bool) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for consumer in self._consumers:
                await stack.enter_async_context(consumer.served(draining=draining))
            yield

    async def _send_until(self, stops: int) -> None:
        """Until we are told to stop."""
        stop_hearing = self._bell.hear(self._heard) if self._bell is not None else None
        if self._feed is not None:
            self._feed.start(self._heard, self._workers)
        over = asyncio.Event()
        looking = asyncio.ensure_future(self._keep_looking(over))
        try:
            while self._stops == stops:
                self._wake.clear()
                await self._attend()
                if looking.done():
                    looking.result()  # a task that died in silence would leave us deaf
                await self._sleep(self._next_attendance())
        finally:
            if stop_hearing is not None:
                stop_hearing()
            over.set()
            try:
                await self._leave()
                # Not cancelled while it asks: a connection that is just being made would be left open.
                await asyncio.wait([looking], timeout=self._pacing.lease)
            finally:
                looking.cancel()
                if self._feed is not None:
                    await self._feed.stop()

    def stop(self) -> None:
        """Finish what is announced, release all lanes, and let `run` return. May be called from a signal handler."""
        self._stops += 1
        self._wake.set()

    async def finished(self) -> None:
        """Wait until `run` has returned, or is about to."""
        await self._finished.wait()

    async def run_once(self) -> Counts:
        """Take every lane that is free, take one turn of each, and let them go; what was done comes back."""
        self._check_usable()
        before = Counts(**asdict(self.counts))
        async with self._consuming(draining=True):
            try:
                census = await self._attend_once()
                await self._take(census, dict.fromkeys(self._served(census), census.shard_count), once=True)
                while self._tasks:
                    await asyncio.wait([*self._tasks.values()], timeout=self._pacing.lease / 3)
                    await self._renew(census)
            finally:
                await self._leave()
        return self.counts.since(before)

    async def drain(self) -> Counts:
        """Send all that may be sent now, release the lanes, and say what was done.

        Leases of relays that have died are waited out. What is parked, dead, paused or due later is not waited for, nor
        is a destination that is away.
        """
        self._check_usable()
        before = Counts(**asdict(self.counts))
        async with self._consuming(draining=True):
            try:
                await self._drain()
            finally:
                await self._leave()
        return self.counts.since(before)

    @property
    def healthy(self) -> bool:
        """Whether it has seen to its leases lately, no topic has been rejecting everything for a while, and what waits
        for handlers takes effect: what a readiness probe should ask.
        """
        progresses = all(consumer.progresses for consumer in self._consumers)
        return progresses and self._is_recent(self._attended_at) and not self._rejections.standing()

    @property
    def alive(self) -> bool:
        """Whether it has tried to lately, with or without success: what a liveness probe should ask. A database that
        is away does not come back by a restart of ours.
        """
        return self._is_recent(self._tried_at)

    def _is_recent(self, moment: float | None) -> bool:
        return moment is not None and clock.current().monotonic() - moment < 2 * self._pacing.lease

    def status(self) -> dict[str, Any]:
        """What it holds and what it has done, for health checks. Holds no keys and no payloads."""
        troubles = {str(it.lane): trouble.reason for it in [*self._workers.values()] if (trouble := self._trouble(it))}
        troubles |= {it.name: NO_PROGRESS for it in self._consumers if not it.progresses}
        return {
            "relay": self.name,
            "healthy": self.healthy,
            "lanes": len(self._workers),
            **asdict(self.counts),
            "troubles": troubles,
            **({} if self._feed is None else {"stream": self._feed.state}),
        }

    def samples(self) -> Iterator[Sample]:
        """What gauges show of it while it runs. May be called from any thread."""
        began, attended, census = self._began_at, self._attended_at, self._census
        if began is None:
            return
        workers = dict(self._workers)  # others may take and release lanes meanwhile
        held = Counter(name.route for name in workers)
        stopped = Counter(name.route for name, worker in workers.items() if self._trouble(worker))
        for route in [census.routes[served] for served in self._served(census)] if census is not None else ():
            yield Sample(telemetry.LANES_HELD, (route.name,), held[route.id])
            yield Sample(telemetry.LANES_STOPPED, (route.name, route.destination), stopped[route.id])
        since = began if attended is None else max(began, attended)
        yield Sample(telemetry.CYCLE_AGE, (), clock.current().monotonic() - since)
        if self._feed is not None:
            yield from self._feed.samples()

    # -- leases --------------------------------------------------------------------------------------------------------

    async def _attend(self) -> None:
        """See to our leases and take our share. A store that fails is tried again; leases end by themselves."""
        self._tried_at = clock.current().monotonic()
        try:
            census = await self._attend_once()
            wanted = self._balance(census)
            if wanted:
                await self._take(census, wanted)
        except Exception as error:
            if self._reachable:
                logger.warning(
                    "relay %s: the outbox cannot be reached: %s",
                    *(self.name, described(error)),
                    extra=self._fields(telemetry.LOG_UNREACHABLE, reason=described(error)),
                )
            logger.debug("relay %s: the outbox cannot be reached", self.name, exc_info=True)
            self._reachable = False
        else:
            if not self._reachable:
                logger.warning(
                    "relay %s: the outbox can be reached again", self.name, extra=self._fields(telemetry.LOG_REACHABLE)
                )
            self._reachable = True

    async def _attend_once(self) -> Census:
        now = clock.current().monotonic()
        census = self._census = await self._store.census()
        if self._tenants is not None:
            self._shards = frozenset(shard_of(tenant, census.shard_count) for tenant in self._tenants)
        await self._renew_when_due(census)
        self._attended_at = now
        self._set_paces(census)
        return census

    async def _renew_when_due(self, census: Census) -> None:
        comes = self._renewed_at is None
        if comes or clock.current().monotonic() - (self._renewed_at or 0.0) >= self._pacing.lease / 4:
            await self._renew(census)
        if comes:
            self._ring()  # the others make room at once

    async def _renew(self, census: Census) -> None:
        before = clock.current().monotonic()
        lanes = [worker.lane for worker in self._workers.values()]
        ours = await self._store.renew(
            self.name,
            lanes,
            lease=self._pacing.lease,
            serves=() if self._leaving else self._served(census),
            shards=self._shards,
            troubles={name: trouble for name, it in self._workers.items() if (trouble := self._trouble(it))},
        )
        self._renewed_at = before
        for lane in lanes:
            worker = self._workers.get(lane.name)
            if worker is None or worker.lane.token != lane.token:
                continue
            if ours.get(lane.name):
                worker.extend(self._deadline(before))
            elif lane.name not in ours:  # else its row is locked, and what we know of the lease holds until it ends
                extra = self._fields(telemetry.LOG_TAKEN_OVER, lane)
                logger.warning("relay %s: lane %s was taken over", self.name, lane, extra=extra)
                worker.lose()

    def _deadline(self, before: float) -> float:
        """When to stop using a lease: before it ends, and counted from before we asked for it."""
        return before + self._pacing.lease * 0.9

    def _served(self, census: Census) -> frozenset[int]:
        return frozenset(
            route
            for route, record in census.routes.items()
            if record.needs in self._publishers and (self._tenants is None or record.shard_by == "tenant")
        )

    def _balance(self, census: Census) -> dict[int, int]:
        """Let go of what is too much; how many lanes of each route we may take comes back."""
        wanted: dict[int, int] = {}
        for worker in self._workers.values():
            if census.routes.get(worker.lane.route.id) != worker.lane.route:
                worker.stop()  # somebody has changed the route: whoever takes the lane next goes by the new one
        for route in sorted(self._served(census)):
            mine = [worker for name, worker in self._workers.items() if name.route == route]
            ground = open_ground(route, self._shards, census)
            astray = [worker for worker in mine if worker.lane.shard not in ground]
            # An idle lane changes hands without anybody noticing.
            kept = sorted((worker for worker in mine if worker not in astray), key=lambda it: not it.idle)
            quota = fair_share(self.name, route, self._shards, census)
            for worker in [*astray, *kept[: max(0, len(kept) - quota)]]:
                worker.stop()
            if len(mine) < quota:
                wanted[route] = quota - len(mine)
        return wanted

    def _set_paces(self, census: Census) -> None:
        room = max(65_536, self._pacing.window_bytes // max(1, len(self._workers)))
        for name, worker in self._workers.items():
            pace = Pace(
                self._pacing.batch, room, census.paused_tenants, census.lane_rates.get(name), census.tenant_rates
            )
            if pace != worker.pace:
                worker.pace = pace
                worker.ring()

    async def _take(self, census: Census, wanted: Mapping[int, int], *, once: bool = False) -> None:
        before = clock.current().monotonic()
        grounds = {route: open_ground(route, self._shards, census) for route in wanted}
        lanes = await self._store.take(self.name, lease=self._pacing.lease, wanted=wanted, shards=grounds)
        if strange := [lane for lane in lanes if lane.route.needs not in self._publishers]:
            await self._store.release(self.name, strange)
        for lane in lanes:
            if lane.route.needs not in self._publishers:
                continue
            if (before_us := self._workers.get(lane.name)) is not None:
                before_us.lose()
                self._remember(before_us)
            self._workers[lane.name] = worker = self._worker(lane, self._deadline(before))
            self._tasks[lane.name] = task = asyncio.create_task(
                self._look_after(worker, once=once), name=f"lane {lane}"
            )
            self._alive.add(task)
            task.add_done_callback(self._alive.discard)
        self._set_paces(census)
        if any(lane.name in self._stumbles for lane in lanes):
            await self._renew(census)  # people must go on to see what troubles them: the release has wiped it out

    def _worker(self, lane: Lane, deadline: float) -> LaneWorker:
        install = self._census.install if self._census is not None else ""
        return LaneWorker(
            lane,
            self._store,
            self._publishers[lane.route.needs],
            producer=f"{install}/{lane}",
            deadline=deadline,
            rejections=self._rejections,
            counts=self.counts,
            draw=self._draw,
            changed=partial(self._changed, lane.name),
            signals=self._signals,
            linger=0.0 if self._began_at is None else self._pacing.linger,
            acknowledged=self._acknowledged.pop(lane.name, {}),
        )

    def _changed(self, name: LaneName) -> None:
        worker = self._workers.get(name)
        if worker is not None and worker.idle:
            self._stumbles.pop(name, None)
        self._progress.set()

    def _trouble(self, worker: LaneWorker) -> Trouble | None:
        """What keeps a lane from sending, also while it tries again after it has stumbled."""
        stumbles = self._stumbles.get(worker.lane.name)
        if stumbles is None or stumbles.is_over(worker.lane):
            return worker.trouble
        return worker.breaker.trouble or stumbles.trouble

    async def _look_after(self, worker: LaneWorker, *, once: bool) -> None:
        """Run a lane to its end, whatever that is, and let it go. No lane takes another one with it."""
        name = worker.lane.name
        try:
            await (worker.run_once() if once else worker.run())
            self._stumbles.pop(name, None)
        except LeaseLostError as lost:
            extra = self._fields(telemetry.LOG_LEASE_LOST, worker.lane, str(lost))
            logger.warning("relay %s: %s", self.name, lost, extra=extra)
            worker.lose()
        except LaneHaltedError as halted:
            extra = self._fields(telemetry.LOG_HALTED, worker.lane, redacted(str(halted)))
            logger.error("relay %s: lane %s halts: %s", self.name, worker.lane, halted, extra=extra)  # noqa: TRY400  says it all
            # We keep it: whoever took it would run into the same wall.
            await worker.breaker.halt(redacted(str(halted)))
        except BaseException as error:
            if _ends_task(error):
                raise
            before = self._stumbles.get(name)
            count = 1 if before is None or before.is_over(worker.lane) else before.count + 1
            self._stumbles[name] = stumbles = _Stumbles(count, described(error), worker.lane.batch)
            where = traceback_of(error) if self._rejections.is_new_bug(worker.lane, error) else ""
            extra = self._fields(telemetry.LOG_STUMBLED, worker.lane, stumbles.said)
            said = f"{stumbles.said}{where}"
            logger.warning("relay %s: lane %s stumbled: %s", self.name, worker.lane, said, extra=extra)
            await worker.breaker.wait(RESTS.delay(count, self._draw), stumbles.trouble.reason)
        finally:
            if self._workers.get(name) is worker:  # we may have taken the lane again after we slept
                del self._workers[name], self._tasks[name]
                self._rejections.forget(name)
                self._remember(worker)
            self._progress.set()
        if not self._leaving:
            await self._let_go([worker])

    def _remember(self, worker: LaneWorker) -> None:
        """What a destination has acknowledged is not sent again if the lane was lost only for a while."""
        if acknowledged := worker.acknowledged:
            self._acknowledged[worker.lane.name] = acknowledged

    def _fields(self, event: LogEvent, lane: Lane | None = None, reason: str | None = None) -> dict[str, object]:
        destination = lane.route.destination if lane is not None else None
        return telemetry.fields(event, relay=self.name, lane=lane and str(lane), destination=destination, reason=reason)

    async def _let_go(self, workers: Collection[LaneWorker], *, leaving: bool = False) -> None:
        await asyncio.gather(*map(self._close, workers))
        try:
            await self._store.release(self.name, [worker.lane for worker in workers], leaving=leaving)
        except Exception as error:
            said = described(error)
            logger.warning("relay %s: %d lanes wait for their leases to end: %s", self.name, len(workers), said)
        else:
            self._ring()

    async def _close(self, worker: LaneWorker) -> None:
        """Let go of the producer. A transport that cannot do that keeps nobody from taking the lane."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await worker.close()
        except BaseException as error:
            if _ends_task(error):
                raise
            logger.warning("relay %s: a producer of %s cannot be closed: %s", self.name, worker.lane, described(error))

    async def _leave(self) -> None:
        self._leaving = True
        try:
            await self._finish_and_release()
        finally:
            self._renewed_at = None
            self._leaving = False

    async def _finish_and_release(self) -> None:
        """Finish, release everything, and be gone from the census. Who is ready does not wait for the others."""
        workers = {task: self._workers[name] for name, task in self._tasks.items()}
        going = self._alive.difference(workers)
        for worker in workers.values():
            worker.stop()
        until = clock.current().monotonic() + self._pacing.grace
        while workers and clock.current().monotonic() < until:
            await asyncio.wait(workers, timeout=min(0.2, self._pacing.lease / 5))
            done = [task for task in workers if task.done()]
            if len(done) < len(workers):
                await self._renew_quietly()  # from now on nobody counts on us
                await self._let_go([workers.pop(task) for task in done])
            else:
                break
        await _end(workers)
        await self._let_go(workers.values(), leaving=True)
        if going:  # lanes that we were about to let go as it is: nobody may have to wait for their leases
            await asyncio.wait(going, timeout=self._pacing.grace)
            await _end(going)

    async def _renew_quietly(self) -> None:
        try:
            if self._census is not None:
                await self._renew(self._census)
        except Exception as error:
            logger.debug("relay %s: leases could not be renewed while leaving: %s", self.name, described(error))

    # -- waking up -----------------------------------------------------------------------------------------------------

    def _heard(self, lanes: Collection[LaneName]) -> Collection[LaneName]:
        if ANYBODY in lanes:
            self._wake.set()
        for name in lanes:
            if name in self._workers:
                self._workers[name].ring()
        return [name for name in lanes if name not in self._workers]

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.ring([ANYBODY])

    async def _keep_looking(self, over: asyncio.Event) -> None:
        """Find what no bell has told us: rows of other processes, rows that are due, people's requests."""
        pause, sees = QUICKEST_LOOK, True
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await over.wait()
            if over.is_set():
                return
            sent = self.counts.sent
            try:
                ready = await self._store.ready(self._served(self._census) if self._census else (), relay=self.name)
            except Exception as error:
                if sees:
                    logger.warning("relay %s: cannot see what there is to send: %s", self.name, described(error))
                sees, pause = False, self._pacing.look
                continue
            if not sees:
                logger.warning("relay %s: sees again what there is to send", self.name)
            sees = True
            for name in ready:
                worker = self._workers.get(name)
                if worker is not None and worker.idle:
                    worker.ring()
            if self._hears_commits:
                pause = self._pacing.look
            else:
                busy = bool(ready) and self.counts.sent != sent
                pause = QUICKEST_LOOK if busy else min(pause * 2, self._pacing.look / 4)

    @property
    def _hears_commits(self) -> bool:
        by_bell = self._bell is not None and self._bell.reaches_everybody
        return by_bell or (self._feed is not None and self._feed.works)

    def _next_attendance(self) -> float:
        """Seconds until we look at leases again: in time for our own, and as soon as somebody's ends."""
        waits = [self._pacing.lease / 3]
        if self._bell is None or not self._bell.reaches_everybody:
            waits.append(0.5)  # nobody tells us when a lane is released
        if self._census is not None and self._census.next_expiry is not None:
            waits.append(self._census.next_expiry + 0.01)
        return min(waits) * (0.9 + 0.1 * self._draw())

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    # -- draining ------------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        changed_at, seen = clock.current().monotonic(), -1
        while True:
            census = await self._attend_once()
            routes = self._served(census)
            await self._take(census, dict.fromkeys(routes, census.shard_count))
            await self._until_quiet(census)
            ready = [name for name in await self._store.ready(routes) if not self._shards or name.shard in self._shards]
            here = [worker for name in ready if (worker := self._workers.get(name)) and not _is_stuck(worker)]
            elsewhere = [name for name in ready if name not in self._workers]
            progress, seen = self.counts.total != seen, self.counts.total
            if not elsewhere and not (here and progress):
                return
            now = clock.current().monotonic()
            if progress:
                changed_at = now
            if now - changed_at > 2 * self._pacing.lease:
                logger.warning("relay %s: other relays hold %d lanes that have work", self.name, len(elsewhere))
                return
            for worker in here:
                worker.ring()
            if elsewhere:
                await asyncio.sleep(min(0.1, census.next_expiry or 0.1))

    async def _until_quiet(self, census: Census) -> None:
        while True:
            self._progress.clear()
            await self._renew_when_due(census)
            if all(worker.idle or _is_stuck(worker) for worker in self._workers.values()):
                return
            try:
                async with asyncio.timeout(self._pacing.lease / 3):
                    await self._progress.wait()
            except TimeoutError:
                pass


def relay_name() -> str:
    """A name that no other relay has."""
    return f"{socket.gethostname()}-{os.getpid()}-{random.getrandbits(32):08x}"


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _ends_task(error: BaseException) -> bool:
    """Whether this task is to end. A cancellation that the task was not asked for comes out of a transport, which
    waited for something that was cancelled.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)


def _is_name(given: object) -> bool:
    return isinstance(given, str) and bool(given)


def _is_stuck(worker: LaneWorker) -> bool:
    halted = worker.trouble is not None and worker.trouble.seconds is None
    return halted or worker.breaker.failures >= STALLED


def open_ground(route: int, shards: frozenset[int] | None, census: Census) -> frozenset[int]:
    """The shards of a route that are for a relay, and not paused: those that it keeps to. One that keeps to none leaves
    to others what they keep to, as long as they live.
    """
    if shards is None:
        kept = [census.shards.get(name, frozenset()) for name, served in census.relays.items() if route in served]
        shards = frozenset(range(census.shard_count)).difference(*kept)
    return frozenset(shard for shard in shards if LaneName(route, shard) not in census.paused)


def fair_share(relay: str, route: int, shards: frozenset[int] | None, census: Census) -> int:
    """How many lanes of a route a relay may hold: an equal part, and of what remains one each, in turns."""
    peers = {name for name, served in census.relays.items() if route in served and census.shards.get(name) == shards}
    ranked = sorted(peers | {relay})
    part, rest = divmod(len(open_ground(route, shards, census)), len(ranked))
    return part + ((ranked.index(relay) + route) % len(ranked) < rest)
