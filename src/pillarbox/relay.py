"""The relay: leases lanes, runs a worker for each of them, and hands them over when it stops.

Before this: the outbox has committed rows. After it: transports have the messages. Relays need no leader. Each renews a
row that shows that it is alive, counts the relays that serve the same routes, takes free lanes up to its fair share,
and releases lanes above it. The lanes of a dead relay are free when its leases expire; a relay that stops releases its
lanes at once.

Each of three things alone is enough to wake a lane: the doorbell after a commit; a query for all lanes of the relay,
which slows down while nothing happens; and the alarm that the lane has set.
"""

from __future__ import annotations

import asyncio
import logging
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
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from . import clock, telemetry
from .breaker import RESTS
from .doorbell import ANYBODY, Doorbell
from .errors import ConfigurationError, LaneHaltedError, LeaseLostError
from .fairness import Pace
from .lane import LaneWorker
from .lane_report import STUMBLED, TIMES_IN_A_ROW, Counts, traceback_of
from .options import check_numbers
from .outbox import Census, Lane, LaneName, LaneStore, OutboxStore, Trouble, shard_of
from .redaction import described, redacted
from .rejections import Rejections
from .sending import Acknowledged
from .telemetry import SILENT, LogEvent, Sample, Signals
from .transport import Publisher

logger = logging.getLogger("pillarbox")

QUICKEST_LOOK = 0.02
CLOSE_SECONDS = 2.0
STALLED = 4
"""`Relay.drain` leaves a lane after this many consecutive failures of its destination."""
NO_PROGRESS = "messages of a tenant wait for it, and none takes effect"
STANDING = 3
"""Consecutive failures of a lane after which it is unlikely to recover by itself."""


class RelayStore(LaneStore, OutboxStore, Protocol):
    """The operations that a relay needs from a store."""


class Feed(Protocol):
    """Streams rows to the store and wakes lanes for them while the relay runs. A hint only, like the doorbell."""

    state: Any

    @property
    def works(self) -> bool:
        """Whether it currently reports commits."""
        ...

    def start(self, hearer: Callable[[Collection[LaneName]], object], lanes: Container[LaneName]) -> None:
        """Start in the background, for rows of these lanes."""
        ...

    async def stop(self) -> None:
        """Stop."""
        ...

    def samples(self) -> Iterable[Sample]:
        """Its gauges."""
        ...


class RelayedConsumer(Protocol):
    """A consumer that receives its messages only from a relay."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def progresses(self) -> bool:
        """Whether the messages that wait for it take effect."""
        ...

    def served(self, *, draining: bool) -> AbstractAsyncContextManager[object]:
        """Work until the block ends. With ``draining``, wait for slow handlers, and try every key."""
        ...


@dataclass(frozen=True)
class Pacing:
    """Durations in seconds, and sizes."""

    lease: float = 5.0
    """Duration of a lease. Without a renewal, another relay takes the lane over after this time."""
    batch: int = 500
    """Most deliveries per lane and turn."""
    window_bytes: int = 33_554_432
    """Most bytes of bodies in memory, over all lanes."""
    look: float = 1.0
    """Longest time between two queries of the outbox while the doorbell works; a quarter of it otherwise."""
    linger: float = 0.02
    """How long a lane waits for more deliveries before it settles its last batch by a separate write."""
    grace: float = 10.0
    """How long lanes may take to finish announced batches when the relay stops."""

    def __post_init__(self) -> None:
        check_numbers("relay", self, _MOST)


@dataclass(frozen=True, slots=True)
class _Stumbles:
    """Consecutive failed turns of a lane."""

    count: int
    said: str
    batch: int
    """Number of the newest batch when the lane last failed."""

    @property
    def trouble(self) -> Trouble:
        often = f" {self.count} {TIMES_IN_A_ROW}" if self.count >= STANDING else ""
        return Trouble(f"{STUMBLED}{often}: {self.said}", 0.0)

    def is_over(self, lane: Lane) -> bool:
        """Whether a turn has succeeded since: a batch is announced only when the previous one is stored."""
        return lane.batch > self.batch + 1


_MOST = {"lease": 3600, "batch": 10_000, "grace": 3600, "look": 3600, "linger": 3600}


class Relay:
    """Sends the deliveries of the outbox. Made by ``box.relay()``.

    ``publishers`` are the destinations that it can serve, by a route's ``needs``; ``consumers`` run while the relay
    runs. ``shards`` limits it to these shards of each route, ``tenants`` to the shards of these tenants, on routes that
    are sharded by tenant. While a limited relay is alive, relays without limits leave its lanes to it; afterwards they
    take them over.
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
        """Acknowledged messages of lanes that this relay has lost, in case it takes them again."""
        self._workers: dict[LaneName, LaneWorker] = {}
        self._tasks: dict[LaneName, asyncio.Task[None]] = {}
        self._alive: set[asyncio.Task[None]] = set()
        """The tasks above, and the tasks of finished lanes that are still being released."""
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

    # -- control -------------------------------------------------------------------------------------------------------

    def run(self) -> Coroutine[Any, Any, None]:
        """Send until `stop` is called or the task is cancelled, then release all lanes.

        A `stop` after this call counts, even if the task has not started by then. A `stop` before this call, for
        example after a `drain`, does not.
        """
        return self._run(self._stops)

    async def _run(self, stops: int) -> None:
        if self._stops != stops:
            return  # the box may have closed everything by now
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
        """Send until `stop` is called."""
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
                    looking.result()  # re-raise its error: without this task the relay finds no rows of other processes
                await self._sleep(self._next_attendance())
        finally:
            if stop_hearing is not None:
                stop_hearing()
            over.set()
            try:
                await self._leave()
                # Do not cancel a query in progress: a connection that is being opened would leak.
                await asyncio.wait([looking], timeout=self._pacing.lease)
            finally:
                looking.cancel()
                if self._feed is not None:
                    await self._feed.stop()

    def stop(self) -> None:
        """Finish announced batches, release all lanes, and let `run` return. May be called from a signal handler."""
        self._stops += 1
        self._wake.set()

    async def finished(self) -> None:
        """Wait until `run` has returned, or is about to."""
        await self._finished.wait()

    async def run_once(self) -> Counts:
        """Take every free lane, take one turn of each, and release them. Returns the counts of this call."""
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
        """Send all deliveries that may be sent now, and release the lanes. Returns the counts of this call.

        Waits for the leases of dead relays to expire. Does not wait for parked, failed or paused deliveries, for
        deliveries that are due later, or for a destination that is unavailable.
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
        """For readiness probes: the relay has renewed its leases lately, no topic has rejected everything for a while,
        and the messages for handlers take effect.
        """
        progresses = all(consumer.progresses for consumer in self._consumers)
        return progresses and self._is_recent(self._attended_at) and not self._rejections.standing()

    @property
    def alive(self) -> bool:
        """For liveness probes: the relay has tried to renew its leases lately, with or without success. A restart does
        not bring an unavailable database back.
        """
        return self._is_recent(self._tried_at)

    def _is_recent(self, moment: float | None) -> bool:
        return moment is not None and clock.current().monotonic() - moment < 2 * self._pacing.lease

    def status(self) -> dict[str, Any]:
        """Its lanes and counts, for health checks. Contains no keys and no payloads."""
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
        """Its gauges while it runs. May be called from any thread."""
        began, attended, census = self._began_at, self._attended_at, self._census
        if began is None:
            return
        workers = dict(self._workers)  # the relay may take and release lanes meanwhile
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
        """Renew leases and take lanes up to the fair share. If the store fails, try again later."""
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
            self._ring()  # other relays release lanes for this one at once

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
            elif lane.name not in ours:  # otherwise its row is locked, and the current lease holds
                extra = self._fields(telemetry.LOG_TAKEN_OVER, lane)
                logger.warning("relay %s: lane %s was taken over", self.name, lane, extra=extra)
                worker.lose()

    def _deadline(self, before: float) -> float:
        """When to stop using a lease: before it ends, counted from before it was requested."""
        return before + self._pacing.lease * 0.9

    def _served(self, census: Census) -> frozenset[int]:
        return frozenset(
            route
            for route, record in census.routes.items()
            if record.needs in self._publishers and (self._tenants is None or record.shard_by == "tenant")
        )

    def _balance(self, census: Census) -> dict[int, int]:
        """Release lanes above the fair share. Returns how many lanes of each route to take."""
        wanted: dict[int, int] = {}
        for worker in self._workers.values():
            if census.routes.get(worker.lane.route.id) != worker.lane.route:
                worker.stop()  # the route has changed: the next owner reads the new record
        for route in sorted(self._served(census)):
            mine = [worker for name, worker in self._workers.items() if name.route == route]
            ground = open_ground(route, self._shards, census)
            astray = [worker for worker in mine if worker.lane.shard not in ground]
            # Idle lanes first: releasing one interrupts no batch.
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
            await self._renew(census)  # the release has deleted the troubles of these lanes: write them again

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
        """Why a lane does not send, also while it retries after a failed turn."""
        stumbles = self._stumbles.get(worker.lane.name)
        if stumbles is None or stumbles.is_over(worker.lane):
            return worker.trouble
        return worker.breaker.trouble or stumbles.trouble

    async def _look_after(self, worker: LaneWorker, *, once: bool) -> None:
        """Run a worker to its end, then release its lane. A failure affects this lane only."""
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
            logger.error("relay %s: lane %s halts: %s", self.name, worker.lane, halted, extra=extra)  # noqa: TRY400  complete
            # Keep the lane: any other relay would halt at the same batch.
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
            if self._workers.get(name) is worker:  # after an expired lease, this relay may have taken the lane again
                del self._workers[name], self._tasks[name]
                self._rejections.forget(name)
                self._remember(worker)
            self._progress.set()
        if not self._leaving:
            await self._let_go([worker])

    def _remember(self, worker: LaneWorker) -> None:
        """Keep the acknowledged messages of a lane: if this relay takes it again, it does not send them again."""
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
        """Close the producer. A transport that fails to close does not delay the release."""
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
        """Finish, release all lanes, and leave the census. A finished lane does not wait for the others."""
        workers = {task: self._workers[name] for name, task in self._tasks.items()}
        going = self._alive.difference(workers)
        for worker in workers.values():
            worker.stop()
        until = clock.current().monotonic() + self._pacing.grace
        while workers and clock.current().monotonic() < until:
            await asyncio.wait(workers, timeout=min(0.2, self._pacing.lease / 5))
            done = [task for task in workers if task.done()]
            if len(done) < len(workers):
                await self._renew_quietly()  # also records that this relay serves no route any more
                await self._let_go([workers.pop(task) for task in done])
            else:
                break
        await _end(workers)
        await self._let_go(workers.values(), leaving=True)
        if going:  # lanes that are being released already: without this, others would wait until their leases expire
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
        """Find work without the doorbell: rows of other processes, rows that are due, operators' requests."""
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
        """Seconds until the next attendance: in time for renewals, and when the next lease of another relay expires."""
        waits = [self._pacing.lease / 3]
        if self._bell is None or not self._bell.reaches_everybody:
            waits.append(0.5)  # without a doorbell, releases of other relays are not reported
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
    """A unique name."""
    return f"{socket.gethostname()}-{os.getpid()}-{random.getrandbits(32):08x}"


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _ends_task(error: BaseException) -> bool:
    """Whether this task must end. If the task itself was not cancelled, a `CancelledError` comes from something that
    the transport waited for.
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
    """The shards of a route that a relay may take: not paused, and within its limits. A relay without limits leaves out
    the shards to which a live relay is limited.
    """
    if shards is None:
        kept = [census.shards.get(name, frozenset()) for name, served in census.relays.items() if route in served]
        shards = frozenset(range(census.shard_count)).difference(*kept)
    return frozenset(shard for shard in shards if LaneName(route, shard) not in census.paused)


def fair_share(relay: str, route: int, shards: frozenset[int] | None, census: Census) -> int:
    """Number of lanes of a route that a relay may hold: an equal part, and for some routes one lane more."""
    peers = {name for name, served in census.relays.items() if route in served and census.shards.get(name) == shards}
    ranked = sorted(peers | {relay})
    part, rest = divmod(len(open_ground(route, shards, census)), len(ranked))
    return part + ((ranked.index(relay) + route) % len(ranked) < rest)
