"""Relays without servers: a store and a broker in memory, and time that jumps to the next alarm instead of passing."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ParamSpec
from uuid import UUID

from pillarbox import clock
from pillarbox.lane import LaneWorker
from pillarbox.lane_report import Counts
from pillarbox.outbox import Delivery, FailurePolicy, Key, Lane, RouteRecord, Status, stable_hash
from pillarbox.rejections import Rejections
from pillarbox.relay import Pacing, Relay
from pillarbox.retry import RetryPolicy
from pillarbox.sending import Acknowledged
from pillarbox.transport import Capabilities, Message, Outcome, Publisher
from pillarbox.transports.memory import MemoryTransport
from tests.memory.store import MemoryStore

TOPIC = "orders.events"
FOR_EVER = 600.0
"""Seconds of virtual time after which a test fails."""

P = ParamSpec("P")


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorator: run an async test on a loop whose time jumps. It takes no real time, and nothing in it may."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(FOR_EVER):
                await test(*args, **kwargs)

        selector = _Jumping()
        with (
            clock.use(VirtualClock(selector)),
            asyncio.Runner(loop_factory=lambda: _VirtualLoop(selector)) as runner,
        ):
            runner.run(bounded())

    return run


class _Jumping(selectors.SelectSelector):
    """Instead of waiting it lets time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        if not found and timeout is not None and timeout > 0:
            self.now += timeout
        return found


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, selector: _Jumping) -> None:
        super().__init__(selector)
        self._jumping = selector

    def time(self) -> float:
        return self._jumping.now


class VirtualClock:
    """The time of the loop, for everything that asks for it."""

    def __init__(self, selector: _Jumping) -> None:
        self._selector = selector
        self._ids = 0

    def jump(self, seconds: float) -> None:
        """What a process sees that was frozen for so long."""
        self._selector.now += seconds

    def now(self) -> datetime:
        return clock.EPOCH + timedelta(seconds=self._selector.now)

    def monotonic(self) -> float:
        return self._selector.now

    def new_id(self) -> UUID:
        self._ids += 1
        return clock.uuid7(int(self._selector.now * 1000) << 12, self._ids)


class Broker(MemoryTransport):
    """A broker in memory that remembers who asked for what."""

    def __init__(self, capabilities: Capabilities | None = None) -> None:
        super().__init__(capabilities)
        self.requests: list[str] = []
        self.before: Callable[[str, str], Awaitable[Outcome | None]] | None = None
        """Is called with producer and events before each request, and may answer in the broker's place."""

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:
        events = " ".join(message.body.decode().strip() for message in messages)
        self.requests.append(events)
        answer = await self.before(producer, events) if self.before is not None else None
        return answer or await super().send(producer, messages)


class Choosy(Broker):
    """One that is known beforehand to refuse some events."""

    def __init__(self, *refused: str, capabilities: Capabilities | None = None) -> None:
        super().__init__(capabilities)
        self._refused = refused

    def preflight(self, message: Message) -> str | None:
        return "not this one" if message.body.decode().strip() in self._refused else super().preflight(message)


@dataclass
class World:
    """A route and its lanes, with a broker that can misbehave.

    Events are written as words: ``a2`` is the second event of the key ``a``.
    """

    shards: int = 1
    capabilities: Capabilities = field(default_factory=Capabilities)
    on_failure: FailurePolicy = FailurePolicy.PARK
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(base=1.0, cap=8.0, attempts=3))
    rows: dict[str, int] = field(default_factory=dict)
    kind: type[MemoryStore] = MemoryStore
    template: str = TOPIC
    """Of the topics of the route."""

    def __post_init__(self) -> None:
        self.broker = Broker(self.capabilities)
        self.store = self.kind(shards=self.shards)
        self.route = RouteRecord("orders", "broker", self.template, None, self.on_failure, self.retry)
        self.store.register(None, [self.route])

    def write(self, events: str, *, tenant: str | None = None, size: int = 0, topic: str = TOPIC) -> None:
        """Commit these events, in this order."""
        for event in events.split():
            self.rows[event] = len(self.rows) + 1
            self.store.append(None, [self._delivery(event, tenant, size, topic)])

    def _delivery(self, event: str, tenant: str | None, size: int, topic: str) -> Delivery:
        key, event_id = event.rstrip("0123456789"), clock.new_id()
        headers = {"event_id": str(event_id)} | ({"tenant_id": tenant} if tenant else {})
        shard = stable_hash(key) % self.shards
        return Delivery(event_id, "t", self.route.id, shard, 1, topic, key, tenant, headers, event.ljust(size).encode())

    @property
    def sent(self) -> str:
        """What the broker has, in the order of arrival."""
        return " ".join(message.body.decode().strip() for message in self.broker.sent(TOPIC))

    async def received(self, count: int) -> str:
        """Wait until the broker has that many messages."""
        await self.broker.received(TOPIC, count)
        return self.sent

    def reject(self, *events: str, reason: str = "I do not like it") -> None:
        """Let the broker reject these events, until it is told otherwise."""
        self.broker.reject(lambda message: message.body.decode().strip() in events, reason=reason)

    def status(self, event: str) -> Status:
        return self.store.status_of(self.rows[event])

    def statuses(self, *statuses: Status) -> str:
        """The events in one of these states."""
        return " ".join(event for event in self.rows if self.status(event) in statuses)

    def attempts(self, event: str) -> int:
        return self.store._rows[self.rows[event]].row.attempts

    def redrive(self, event: str) -> None:
        self.store.request(self.rows[event], "redrive")

    def waiting(self) -> set[Key]:
        return {key for lane in self.store._lanes.values() for key in lane.keys}

    def relay(self, name: str = "r1", publisher: Publisher | None = None, **options: Any) -> Relay:
        """A relay with a lease of 3 seconds."""
        pacing = Pacing(**{"lease": 3.0, **options.pop("pacing", {})})
        store = options.pop("store", self.store)
        return Relay(store, {"broker": publisher or self.broker}, name=name, pacing=pacing, draw=half, **options)

    async def take(self, name: str = "r1", *, lease: float = 3.0) -> Lane:
        """Take the first lane that is free."""
        (lane,) = await self.store.take(name, lease=lease, wanted={self.route.id: 1})
        return lane

    def worker(self, lane: Lane, *, seconds: float = 1e9, acknowledged: Acknowledged | None = None) -> LaneWorker:
        """The owner of a lane, who believes in the lease for that long."""
        return LaneWorker(
            lane,
            self.store,
            self.broker,
            producer=f"memory/{lane}",
            deadline=clock.current().monotonic() + seconds,
            rejections=Rejections(half),
            counts=Counts(),
            draw=half,
            changed=lambda: None,
            acknowledged=acknowledged or {},
        )


def half() -> float:
    """Chance, without surprises."""
    return 0.5


@asynccontextmanager
async def running(*relays: Relay) -> AsyncIterator[None]:
    """Let relays run during the block, and stop them after it."""
    tasks = [asyncio.ensure_future(relay.run()) for relay in relays]
    try:
        yield
    finally:
        for relay in relays:
            relay.stop()
        await asyncio.gather(*tasks)


class Line:
    """A connection that can be cut: then nothing goes through, neither way, until it is mended."""

    def __init__(self, to: Any) -> None:
        self._to = to
        self._open = asyncio.Event()
        self._open.set()
        self._error: Exception | None = None

    def cut(self) -> None:
        self._open.clear()

    def fail(self, error: Exception) -> None:
        """Let every call fail at once, until it is mended."""
        self._error = error

    def mend(self) -> None:
        self._error = None
        self._open.set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._to, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self._error is not None:
                raise self._error
            await self._open.wait()
            answer = await found(*args, **kwargs)
            await self._open.wait()
            return answer

        return call


def freeze(seconds: float) -> None:
    """Let time pass at once, as it does for a process that stands still."""
    now = clock.current()
    assert isinstance(now, VirtualClock)
    now.jump(seconds)


async def until(condition: Callable[[], object], *, seconds: float = FOR_EVER) -> None:
    """Wait until it holds. A condition may be async."""
    async with asyncio.timeout(seconds):
        while not await _holds(condition):  # noqa: ASYNC110  nobody signals it: that is what is being tested
            await asyncio.sleep(0.01)


async def _holds(condition: Callable[[], object]) -> object:
    found = condition()
    return await found if isinstance(found, Awaitable) else found


async def soon(condition: Callable[[], object], *, seconds: float = 20.0) -> None:
    """The same where time is real."""
    await until(condition, seconds=seconds)
