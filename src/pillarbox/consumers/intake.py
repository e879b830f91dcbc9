"""How messages come to a consumer: from a subscription, with as much at hand as it can bear.

One task receives, as long as there is room; others deal with what is on the desk, some batches at a time. What is dealt
with is acknowledged; what rests after a failure stays here with its key. If the connection is lost, so is what waits:
it comes again by the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from .. import clock
from ..redaction import redacted
from ..retry import RetryPolicy
from ..transport import Subscriber, Subscription
from .desk import Desk, Line, Work
from .processing import Dealt
from .report import ConsumerReport

logger = logging.getLogger("pillarbox")

STALLED = 4
"""A drain leaves a key that has failed so often in it."""
CLOSE_SECONDS = 5.0


class Deals(Protocol):
    """Whoever deals with messages."""

    async def deal(self, works: Sequence[Work]) -> Dealt:
        """See `Processor.deal`."""
        ...


class Intake(Protocol):
    """Where a consumer's messages come from."""

    async def run(self) -> None:
        """Let them come until `stop`, or until we are cancelled."""
        ...

    async def drain(self, idle: float) -> None:
        """Let come what is there now."""
        ...

    def stop(self) -> None:
        """Finish what is being dealt with, and let `run` return."""
        ...

    @property
    def connected(self) -> bool:
        """Whether the source is to be had."""
        ...

    def backlog(self) -> int | None:
        """How many messages wait for the consumer, if that is known."""
        ...

    def at_hand(self) -> list[Work]:
        """What was received and is not dealt with."""
        ...


@dataclass(frozen=True)
class Flow:
    """How much a consumer does at once."""

    batch: int = 1
    """Messages per transaction."""
    concurrency: int = 8
    """Transactions at a time."""
    max_messages: int = 1_000
    """Messages at hand."""
    max_bytes: int = 16_777_216
    """What their bodies may take."""
    grace: float = 10.0
    """How long it may take to finish, when the consumer stops."""


async def _leave(joining: asyncio.Future[Subscription]) -> None:
    """It was cancelled, perhaps when it was through already. Wait until nothing of it is left: a loop that ends before
    would leave the group a member that receives, and never acknowledges.
    """

    async def leave() -> None:
        with suppress(Exception, asyncio.CancelledError):
            await (await joining).close()

    leaving = asyncio.ensure_future(leave())
    _leaving.add(leaving)
    leaving.add_done_callback(_leaving.discard)
    await asyncio.wait([leaving], timeout=CLOSE_SECONDS)


_leaving: set[asyncio.Task[None]] = set()
"""References: the loop itself keeps none."""


class SubscriptionIntake:
    """`Intake` from a broker."""

    def __init__(
        self,
        subscriber: Subscriber,
        topics: Sequence[str],
        group: str,
        *,
        deals: Deals,
        report: ConsumerReport,
        flow: Flow,
        retry: RetryPolicy,
        takes_turns: Callable[[], bool] = lambda: False,
    ) -> None:
        self._subscriber = subscriber
        self._topics = [*topics]
        self._group = group
        self._deals = deals
        self._report = report
        self._flow = flow
        self._retry = retry
        self._takes_turns = takes_turns
        self._desk = Desk()
        self._working: dict[asyncio.Task[None], Sequence[Work]] = {}
        self._subscription: Subscription | None = None
        self._stopping = False
        self._change = asyncio.Event()
        self._room = asyncio.Event()
        self._heard_at = 0.0
        self._failures: Counter[Line] = Counter()

    @property
    def connected(self) -> bool:
        return self._subscription is not None

    def backlog(self) -> int | None:
        return None if self._subscription is None else self._subscription.backlog()

    def at_hand(self) -> list[Work]:
        return self._desk.waiting() + [work for works in [*self._working.values()] for work in works]

    def stop(self) -> None:
        self._stopping = True
        self._change.set()

    async def run(self) -> None:
        attempt = 0
        self._stopping = False
        while not self._stopping:
            try:
                subscription = await self._subscribe()
                if subscription is None:
                    return
                if attempt:
                    self._report.back()
                attempt = 0
                await self._serve(subscription)
            except OSError as error:
                attempt += 1
                if attempt == 1:
                    self._report.away(redacted(f"{type(error).__name__}: {error}"))
                await self._pause(self._retry.delay(attempt))

    async def drain(self, idle: float) -> None:
        self._stopping = False
        await self._serve(await self._subscriber.subscribe(self._topics, self._group), idle)

    async def _subscribe(self) -> Subscription | None:
        """Join the group. None if we are told to stop meanwhile: a broker may take long to answer."""
        self._change.clear()
        joining = asyncio.ensure_future(self._subscriber.subscribe(self._topics, self._group))
        stopping = asyncio.ensure_future(self._until_stopped())
        joined = False
        try:
            await asyncio.wait([joining, stopping], return_when=asyncio.FIRST_COMPLETED)
            joined = joining.done()
            return joining.result() if joined else None
        finally:
            stopping.cancel()
            if not joined:
                joining.cancel()
                await _leave(joining)

    async def _until_stopped(self) -> None:
        while not self._stopping:
            await self._change.wait()
            self._change.clear()

    async def _pause(self, seconds: float) -> None:
        self._change.clear()
        if not self._stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._change.wait()

    # -- while there is a subscription ---------------------------------------------------------------------------------

    async def _serve(self, subscription: Subscription, idle: float | None = None) -> None:
        self._subscription, self._desk = subscription, Desk()
        self._failures.clear()  # of lines that went with their desk
        self._heard_at = clock.current().monotonic()
        try:
            with _running(self._receive(subscription)) as receiving, _running(self._extend(subscription)) as extending:
                while not self._stopping and not self._is_over(idle):
                    self._change.clear()
                    self._hand_out(subscription)
                    for task in (receiving, extending):
                        if task.done():
                            task.result()  # lost
                    await self._until_change(idle)
        finally:
            self._subscription = None
            await self._finish()
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await subscription.close()

    async def _receive(self, subscription: Subscription) -> None:
        try:
            while True:
                self._room.clear()
                messages = self._flow.max_messages - self._desk.count
                size = self._flow.max_bytes - self._desk.bytes
                if messages <= 0 or size <= 0:
                    await self._room.wait()
                    continue
                self._desk.put(await subscription.receive(messages, size))
                self._heard_at = clock.current().monotonic()
                self._change.set()
        finally:
            self._change.set()

    async def _extend(self, subscription: Subscription) -> None:
        """What takes long, or waits for long, stays ours."""
        try:
            while True:
                if subscription.deadline is None:
                    await asyncio.get_running_loop().create_future()  # for ever
                else:
                    await asyncio.sleep(subscription.deadline / 3)
                    await subscription.extend([work.received for work in self.at_hand()])
        finally:
            self._change.set()

    def _hand_out(self, subscription: Subscription) -> None:
        for task in [task for task in self._working if task.done()]:
            del self._working[task]
            task.result()  # an error here is ours, and no handler's
        hands = 1 if self._takes_turns() else self._flow.concurrency
        while len(self._working) < hands and (works := self._desk.take(self._flow.batch)):
            task = asyncio.ensure_future(self._work(subscription, self._desk, works))
            self._working[task] = works
            task.add_done_callback(lambda _task: self._change.set())

    async def _work(self, subscription: Subscription, desk: Desk, works: Sequence[Work]) -> None:
        dealt = await self._deals.deal(works)
        if dealt.settled:
            try:
                await subscription.ack([work.received for work in dealt.settled])
            except OSError as error:  # they come again, and the inbox knows them
                logger.debug("consumer %s: not acknowledged: %s", self._group, error)
        for work in dealt.settled:
            self._failures.pop(work.line, None)
        for line in desk.done(works, dealt.left):
            if line in dealt.delays:
                self._failures[line] += 1
                asyncio.get_running_loop().call_later(dealt.delays[line], self._wake, desk, line)
            else:  # it was not tried
                self._wake(desk, line)
        self._room.set()

    def _wake(self, desk: Desk, line: Line) -> None:
        desk.wake(line)
        self._change.set()

    def _is_over(self, idle: float | None) -> bool:
        """Whether a drain has nothing more to wait for."""
        if idle is None:
            return False
        left = self._desk.waiting()  # and those that are tried right now: with many that fail, there are always some
        left += [work for task, works in self._working.items() if not task.done() for work in works]
        if any(self._failures[work.line] < STALLED for work in left):
            return False
        backlog = self.backlog()
        if backlog is not None:
            return backlog <= len(left)
        return clock.current().monotonic() - self._heard_at >= idle

    async def _until_change(self, idle: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(idle):
                await self._change.wait()

    async def _finish(self) -> None:
        """Wait for what is being dealt with; what takes too long is cancelled, and comes again."""
        if self._working:
            _, late = await asyncio.wait(self._working, timeout=self._flow.grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._working, return_exceptions=True)
        self._working.clear()


@contextmanager
def _running(work: Coroutine[Any, Any, None]) -> Iterator[asyncio.Task[None]]:
    """A task that does not outlive the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
