"""How messages come to a consumer from a broker: into a window, from there to their effect, or into an inbound lane.

One task receives, as long as there is room; others handle what is in the window, some batches at a time. What is
settled is acknowledged. What fails is tried again in place, for a moment; what still fails then is spilled, and so is
what waits too long for its turn while another tenant wants the room. Nothing stays here for long, so no tenant and no
key stops another. If the connection is lost, so is what waits: it comes again by the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from .. import clock
from ..inbox import KnownBy
from ..redaction import described
from ..retry import RetryPolicy
from ..transport import Received, Subscriber, Subscription
from .failure import Failure, classify
from .hands import Hands
from .processing import Processed, Processor, parted
from .progress import Progress
from .report import NO_SOURCE, ConsumerReport
from .spilling import Spiller, Trouble
from .window import Line, Window, Work

logger = logging.getLogger("pillarbox")

STALLED = 4
"""A drain leaves a key that has failed so often in it."""
CLOSE_SECONDS = 5.0
IN_PLACE = 3
"""How often a message is tried before it is spilled."""
IN_PLACE_SECONDS = 1.5
"""The same, for one that takes long to fail."""
REJOIN = RetryPolicy(base=0.2, cap=5.0)
"""How long a consumer waits before it joins its group again, after its connection is lost or refused."""
IN_PLACE_CAP, GATE_PAUSE, AWAY_CAP = 0.5, 0.1, 5.0
SPILLED_AT_ONCE = 500
LONG_WAIT = 1.0
"""Seconds after which what waits in a full window makes room for other tenants."""
HANGING = 30.0
"""The same for what waits behind one message, where only one tenant is known: its handler may just be slow."""
REDELIVERIES = 3
"""A message that came so often without being settled may have killed its consumers: its lane tries and isolates it."""
REFUSED_IN_A_ROW = 10_000
"""So many messages that cannot be read, and no effect: something else than the messages may be wrong. More are received
slowly only."""


Left = dict[Work, float]
"""Messages that stay in the window, and for how many seconds the line of each rests."""


class Intake(Protocol):
    """Where a consumer's messages come from."""

    async def run(self) -> None:
        """Let them come until `stop`, or until we are cancelled."""
        ...

    async def drain(self, idle: float) -> bool:
        """Let come what is there now; whether anything was settled."""
        ...

    def stop(self) -> None:
        """Finish what is being handled, and let `run` return."""
        ...

    @property
    def connected(self) -> bool:
        """Whether the source is available."""
        ...

    def backlog(self) -> int | None:
        """How many messages wait for the consumer, if that is known."""
        ...

    def at_hand(self) -> list[Work]:
        """What was received and is not settled."""
        ...


@dataclass(frozen=True)
class Flow:
    """How much a consumer does at once."""

    batch: int = 1
    """Messages per transaction."""
    concurrency: int = 8
    """Transactions at a time, those of its lanes included."""
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
        processor: Processor,
        spiller: Spiller,
        progress: Progress,
        hands: Hands,
        report: ConsumerReport,
        flow: Flow,
        retry: RetryPolicy,
    ) -> None:
        self._subscriber = subscriber
        self._topics = [*topics]
        self._group = group
        self._processor = processor
        self._spiller = spiller
        self._progress = progress
        self._hands = hands
        self._report = report
        self._flow = flow
        self._retry = retry
        self._window = Window()
        self._working: dict[asyncio.Task[None], Sequence[Work]] = {}
        self._attempts: dict[asyncio.Timeout, tuple[Sequence[Work], float]] = {}
        """What is with the handlers, and since when."""
        self._subscription: Subscription | None = None
        self._stopped = asyncio.Event()
        self._change = asyncio.Event()
        hands.offer = self._begin_one
        self._room = asyncio.Event()
        self._heard_at = 0.0
        self._settled = 0
        self._refused_in_a_row = 0
        self._away_in_a_row = 0
        self._making_room: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._subscription is not None

    def backlog(self) -> int | None:
        return None if self._subscription is None else self._subscription.backlog()

    def at_hand(self) -> list[Work]:
        return self._window.waiting() + [work for works in [*self._working.values()] for work in works]

    def stop(self) -> None:
        self._stopped.set()
        self._change.set()

    async def run(self) -> None:
        attempt = 0
        try:
            while not self._stopped.is_set():
                try:
                    subscription = await self._subscribe()
                    if subscription is None:
                        return
                    self._report.outage(NO_SOURCE, None)
                    attempt = 0
                    await self._serve(subscription)
                except OSError as error:
                    attempt += 1
                    self._report.outage(NO_SOURCE, described(error))
                    await self._pause(REJOIN.delay(attempt))
        finally:
            self._stopped.clear()

    async def drain(self, idle: float) -> bool:
        self._stopped.clear()
        settled = self._settled
        await self._serve(await self._subscriber.subscribe(self._topics, self._group), idle)
        return self._settled > settled

    async def _subscribe(self) -> Subscription | None:
        """Join the group. None if we are told to stop meanwhile: a broker may take long to answer."""
        joining = asyncio.ensure_future(self._subscriber.subscribe(self._topics, self._group))
        stopping = asyncio.ensure_future(self._stopped.wait())
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

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()

    # -- while there is a subscription ---------------------------------------------------------------------------------

    async def _serve(self, subscription: Subscription, idle: float | None = None) -> None:
        self._subscription, self._window = subscription, Window()
        self._heard_at = clock.current().monotonic()
        try:
            with _running(self._receive(subscription)) as receiving, _running(self._extend(subscription)) as extending:
                while not self._stopped.is_set() and not self._is_over(idle):
                    self._change.clear()
                    self._hand_out()
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
                room = self._flow.max_messages - self._window.count
                size = self._flow.max_bytes - self._window.bytes
                if room <= 0 or size <= 0 or self._spiller.is_full:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LONG_WAIT):
                            await self._room.wait()
                    self._change.set()
                    continue
                if self._refused_in_a_row > REFUSED_IN_A_ROW:
                    await asyncio.sleep(LONG_WAIT)
                    room = min(room, 100)
                received = await subscription.receive(room, size)
                self._heard_at = now = clock.current().monotonic()
                self._window.put([Work(it.message, it, it.attempt - 1, since=now) for it in received])
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
                    await subscription.extend(_received(self.at_hand()))
        finally:
            self._change.set()

    def _hand_out(self) -> None:
        for task in [task for task in self._working if task.done()]:
            del self._working[task]
            task.result()  # an error here is ours, and no handler's
        while self._begin_one():
            pass

    def _begin_one(self) -> bool:
        """Let a hand take messages of a tenant that may have one; false if there is none."""
        subscription = self._subscription
        if subscription is None or self._stopped.is_set():
            return False
        self._make_room(subscription)
        free = [tenant for tenant in self._window.ready() if self._hands.is_free(tenant)]
        if not free:
            return False
        tenant, most = free[0], self._flow.batch
        if self._spiller.untrusted or (self._progress.is_held(tenant) and not self._progress.everything_fails):
            most = max(SPILLED_AT_ONCE, most)
        works = self._window.take(tenant, most)
        self._hands.begin(tenant)
        task = self._begin(subscription, works, partial(self._handle, works))
        task.add_done_callback(lambda _task: self._hands.end(tenant))
        return True

    def _make_room(self, subscription: Subscription) -> None:
        """If a tenant has more than half of a full window, and waits for its turn, the others need the room: its
        messages go on by their lanes. So do those that wait behind one that takes long, and that one before them.
        """
        if not self._is_full or self._making_room in self._working or self._progress.everything_fails:
            return
        [(tenant, count)] = self._window.tenants.most_common(1)
        if 2 * count <= self._window.count:
            return
        oldest = self._window.oldest(tenant)
        if oldest is None:
            # Where topics name tenants, there are others, though their messages have not come yet.
            has_others = self._hands.is_shared or any("{tenant}" in topic for topic in self._topics)
            self._interrupt(tenant, LONG_WAIT if has_others else HANGING)
        elif self._hands.is_shared and clock.current().monotonic() - oldest.since >= LONG_WAIT:
            works = self._window.take(tenant, SPILLED_AT_ONCE)
            self._making_room = self._begin(subscription, works, partial(self._spill_untried, works))

    def _interrupt(self, tenant: str | None, patience: float) -> None:
        """End the attempt of a tenant that keeps the most messages waiting, if it has taken so long: they cannot go to
        their lane before it is undone and has gone there itself.
        """
        until = clock.current().monotonic() - patience
        waiting = {
            attempt: sum(map(self._window.waiting_in, {work.line for work in works}))
            for attempt, (works, since) in self._attempts.items()
            if works[0].tenant == tenant and since <= until
        }
        attempt = max(waiting, key=waiting.__getitem__, default=None)
        if attempt is not None and waiting[attempt]:
            del self._attempts[attempt]
            attempt.reschedule(asyncio.get_running_loop().time())

    @property
    def _is_full(self) -> bool:
        return self._window.count >= self._flow.max_messages or self._window.bytes >= self._flow.max_bytes

    def _begin(
        self, subscription: Subscription, works: list[Work], handle: Callable[[], Awaitable[Left]]
    ) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._work(subscription, works, handle))
        self._working[task] = works
        task.add_done_callback(lambda _task: self._change.set())
        return task

    async def _work(self, subscription: Subscription, works: list[Work], handle: Callable[[], Awaitable[Left]]) -> None:
        left, window = await handle(), self._window  # a subscription has its own, and ends after its tasks
        settled = [work for work in works if work not in left]
        if settled:
            self._settled += len(settled)
            self._spiller.untrusted = max(0, self._spiller.untrusted - len(settled))
            try:
                await subscription.ack(_received(settled))
            except OSError as error:  # they come again, and the inbox knows them
                logger.debug("consumer %s: not acknowledged: %s", self._group, error)
        waits: dict[Line, float] = {}
        for work, wait in left.items():
            waits[work.line] = max(wait, waits.get(work.line, 0.0))
        for line in window.done(works, [work for work in works if work in left]):
            if waits[line]:
                asyncio.get_running_loop().call_later(waits[line], self._wake, window, line)
            else:  # it was not tried
                self._wake(window, line)
        self._room.set()

    def _wake(self, window: Window, line: Line) -> None:
        window.wake(line)
        self._change.set()

    # -- what becomes of messages --------------------------------------------------------------------------------------

    async def _handle(self, works: list[Work]) -> Left:
        """Let messages of one tenant take effect, or spill them. More of their lines may be added to them."""
        tenant = works[0].tenant
        if self._spiller.untrusted:
            return await self._spill_untried(works)
        if not self._progress.may_try(tenant):
            if self._progress.everything_fails:
                return self._rest(works, self._progress.rest_of(tenant))
            return await self._spill_untried(works)
        firsts = {work.line: work for work in reversed(works)}
        if suspects := [work for work in firsts.values() if _is_suspect(work)]:
            left = await self._spill_untried(suspects)
            spilled = {*suspects} - left.keys()
            return {work: left.get(work, 0.0) for work in works if work not in spilled}
        tried, untried = parted(works, {work for work in works if _is_suspect(work)})
        tried, untried = tried[: self._flow.batch], [*tried[self._flow.batch :], *untried]
        processed = await self._try(tried)
        if processed is None:
            for line in dict.fromkeys(work.line for work in tried):
                works += self._window.more_of(line, SPILLED_AT_ONCE)
            return await self._spill_untried(works)
        if any(trouble.known_by is KnownBy.CONTENT for _, trouble in processed.failed):
            works += self._look_for_more(tenant, processed)
        left = await self._see_to(processed) | dict.fromkeys(untried, 0.0)
        stopped = {work.line for work in left}
        lines = dict.fromkeys(work.line for work in processed.behind if work.line not in stopped)
        if more := [work for line in lines for work in self._window.more_of(line, SPILLED_AT_ONCE)]:
            works += more  # all goes by the lane now
            left |= await self._spill_untried(more)
        return left

    async def _try(self, works: Sequence[Work]) -> Processed | None:
        """Let messages take effect. None if they were interrupted, to make room: nothing of it is there then, unless it
        has just committed.
        """
        attempt = asyncio.timeout(None)
        try:
            async with attempt:
                self._attempts[attempt] = works, clock.current().monotonic()
                return await self._processor.process(works)
        except TimeoutError:
            return None
        finally:
            self._attempts.pop(attempt, None)

    def _look_for_more(self, tenant: str | None, processed: Processed) -> list[Work]:
        """Where one message cannot be read there may be thousands, and a transaction for each of them takes long."""
        more = self._window.take(tenant, SPILLED_AT_ONCE)
        readable = set[Line]()
        for work in more:
            trouble = None if work.line in readable else self._processor.unreadable(work)
            if trouble is None:  # those behind it must not pass it
                readable.add(work.line)
                processed.left.append(work)
            else:
                processed.failed.append((work, trouble))
        return more

    async def _see_to(self, processed: Processed) -> Left:
        """What is to be tried again, after what is not was spilled."""
        if processed.settled or processed.failed:
            self._away_in_a_row = 0
        if processed.settled:
            self._refused_in_a_row = 0
        if processed.behind:
            self._report.spilled(len(processed.behind))
        left: Left = {}
        spilled: list[tuple[Work, Trouble]] = []
        for work, trouble in processed.failed:
            if trouble.is_final:
                self._refused_in_a_row += trouble.failure is Failure.POISON
                self._progress.settled(work.tenant)
            else:
                work.tries += 1
                if self._is_worth_another_try(work):
                    wait = min(self._retry.delay(work.tries), IN_PLACE_CAP)
                    left[work] = max(wait, self._progress.rest_of(work.tenant))
                    continue
            spilled.append((work, trouble))
        left |= await self._spill(spilled)
        if processed.away:
            self._away_in_a_row += 1
            return left | self._rest(processed.left, min(self._retry.delay(self._away_in_a_row), AWAY_CAP))
        return left | dict.fromkeys(processed.left, 0.0) | dict.fromkeys(processed.gated, GATE_PAUSE)

    def _is_worth_another_try(self, work: Work) -> bool:
        if self._progress.everything_fails:
            return True
        waited = clock.current().monotonic() - work.since
        return work.tries < IN_PLACE and waited < IN_PLACE_SECONDS and not self._progress.is_held(work.tenant)

    async def _spill_untried(self, works: Sequence[Work]) -> Left:
        return await self._spill([(work, found) for work in works if (found := self._processor.untried(work))])

    async def _spill(self, troubles: Sequence[tuple[Work, Trouble]]) -> Left:
        """What could not be spilled comes back."""
        by_tenant: dict[str | None, list[tuple[Work, Trouble]]] = {}
        for work, trouble in troubles:
            by_tenant.setdefault(trouble.tenant, []).append((work, trouble))
        left: Left = {}
        for theirs in by_tenant.values():
            left |= await self._spill_together(theirs)
        return left

    async def _spill_together(self, troubles: Sequence[tuple[Work, Trouble]]) -> Left:
        try:
            self._report.spilled(await self._spiller.spill([trouble for _, trouble in troubles]))
        except Exception as error:
            if len(troubles) > 1 and classify(error) is not Failure.TRANSIENT:
                return await self._spill_one_by_one(troubles)
            self._report.not_spilled(len(troubles), described(error))
            return self._rest([work for work, _ in troubles], AWAY_CAP)
        self._processor.spilled(work for work, it in troubles if work.message.key and not it.is_final)
        return {}

    async def _spill_one_by_one(self, troubles: Sequence[tuple[Work, Trouble]]) -> Left:
        """One of them cannot be stored. What is behind it in its line must not pass it."""
        left: Left = {}
        for work, trouble in troubles:
            is_behind = any(it.line == work.line for it in left)
            left |= self._rest([work], AWAY_CAP) if is_behind else await self._spill_together([(work, trouble)])
        return left

    @staticmethod
    def _rest(works: Sequence[Work], seconds: float) -> Left:
        for work in works:
            work.tries += seconds > 0
        return dict.fromkeys(works, seconds)

    # -- its end -------------------------------------------------------------------------------------------------------

    def _is_over(self, idle: float | None) -> bool:
        """Whether a drain has nothing more to wait for."""
        if idle is None:
            return False
        left = self._window.waiting()  # and those that are tried right now: with many that fail, there are always some
        left += [work for task, works in self._working.items() if not task.done() for work in works]
        if any(work.tries < STALLED for work in left):
            return False
        if self._is_full or self._spiller.is_full:
            return True  # nothing more can come
        backlog = self.backlog()
        if backlog is not None:
            return backlog <= len(left)
        return clock.current().monotonic() - self._heard_at >= idle

    async def _until_change(self, idle: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(idle):
                await self._change.wait()

    async def _finish(self) -> None:
        """Wait for what is being handled; what takes too long is cancelled, and comes again."""
        if self._working:
            _, late = await asyncio.wait(self._working, timeout=self._flow.grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._working, return_exceptions=True)
        self._working.clear()


def _is_suspect(work: Work) -> bool:
    return work.redelivered >= REDELIVERIES


def _received(works: Sequence[Work]) -> list[Received]:
    return [work.received for work in works if work.received is not None]


@contextmanager
def _running(work: Coroutine[Any, Any, None]) -> Iterator[asyncio.Task[None]]:
    """A task that does not outlive the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
