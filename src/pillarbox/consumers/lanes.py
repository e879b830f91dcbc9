"""A consumer as the destination of lanes: of those that it has spilled to, or of the outbox of its own service.

A relay brings the messages, in order per key. What has taken effect counts as delivered. A message that fails for now
is rejected for now: its key waits, and no attempt is counted. One that can never take effect fails at once, and an
unknown error counts an attempt. While the consumer's database is away, so is the destination.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from .. import clock
from ..inbox import KnownBy, digest_of
from ..outbox import Key
from ..redaction import described
from ..relay import Relay
from ..retry import RetryPolicy
from ..transport import Capabilities, Message, Outcome, Rejection, Verdict
from .dead_letters import DeadLetterRoute
from .failure import Failure
from .hands import Hands
from .intake import STALLED
from .processing import Processed, Processor
from .progress import Progress
from .spilling import Trouble, work_of
from .window import Line, Work

AT_ONCE = 100
"""How many messages a lane hands over at once to a consumer that has a transaction for each."""
SLOW, SLOW_BATCH = 1.0, 10.0
"""Seconds after which a lane goes on with others while a message, or a batch of them, is still being handled."""
PATIENT, PATIENT_FOR = 30.0, 600.0
"""The same for so long after a process has died: of a message that its lane did not wait for, the lane would not know
that the next one dies, too.
"""
HELD_PAUSE = 0.05
DRAIN_PAUSE = 0.5
"""The longest wait of a drain between two tries."""
LEFT = 60.0
"""Seconds for which a drain leaves what has failed again and again."""
_TRIES_KEPT = 100_000
_ENDED_KEPT = 1_000
_STILL_HANDLED = "it is still being handled"
_TENANT_HELD = "other messages of its tenant fail, and nothing of it takes effect"


class LaneIntake:
    """`Intake` from lanes. ``relay`` makes a relay for a destination; ``make_due`` lets what waits for its next attempt
    wait no longer.
    """

    def __init__(
        self,
        destination: LaneDestination,
        relay: Callable[[LaneDestination], Relay],
        make_due: Callable[[], Awaitable[None]],
    ) -> None:
        self._destination = destination
        self._make_relay = relay
        self._make_due = make_due
        self._relay: Relay | None = None
        self._stopping = False

    @property
    def connected(self) -> bool:
        return self._relay is not None and self._relay.healthy

    def backlog(self) -> int | None:
        return None

    def at_hand(self) -> list[Work]:
        return self._destination.at_hand()

    def stop(self) -> None:
        self._stopping = True
        if self._relay is not None:
            self._relay.stop()

    async def run(self) -> None:
        self._relay = self._make_relay(self._destination)
        try:
            if not self._stopping:
                await self._relay.run()
        finally:
            self._relay, self._stopping = None, False
            await self._destination.finish()

    async def drain(self, idle: float) -> bool:  # noqa: ARG002  the database knows when there is no more
        """Whether anything was settled."""
        destination = self._destination
        settled = destination.settled
        await self._make_due()
        with destination.draining():
            while True:
                await self._make_relay(destination).drain()
                if not (rest := destination.take_rest()):
                    return destination.settled > settled
                await asyncio.sleep(rest)


class LaneDestination:
    """A `Publisher` that lets what it is sent take effect."""

    def __init__(
        self,
        processor: Processor,
        *,
        progress: Progress,
        hands: Hands,
        batch: int,
        grace: float,
        retry: RetryPolicy,
        dead_letters: DeadLetterRoute | None,
    ) -> None:
        self.capabilities = Capabilities(max_messages=max(batch, AT_ONCE), timeout=None)  # `Processor` has one
        self.settled = 0
        self._processor = processor
        self._progress = progress
        self._hands = hands
        self._batch = batch
        self._grace = grace
        self._retry = retry
        self._dead_letters = dead_letters
        self._at_work: dict[asyncio.Task[Any], Sequence[Work]] = {}
        """What is being handled."""
        self._tries: dict[Line, int] = {}
        """How often the first message of each line has failed for now."""
        self._ended: dict[Hashable, Trouble] = {}
        """Why messages have failed that were not waited for: it is said when they are offered again."""
        self._patient_until = -math.inf
        self._is_draining = False
        self._rest = 0.0
        """In a drain, after how many seconds all lines are due that are worth another try."""

    def at_hand(self) -> list[Work]:
        """What is being handled."""
        return [work for works in [*self._at_work.values()] for work in works]

    def be_patient(self) -> None:
        """A process has died, perhaps of a message that it had handled for long."""
        self._patient_until = clock.current().monotonic() + PATIENT_FOR

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Leave messages that fail again and again, and say when others are to be tried again."""
        was_draining, self._is_draining, self._rest = self._is_draining, True, 0.0
        self._tries.clear()
        try:
            yield
        finally:
            self._is_draining = was_draining

    def take_rest(self) -> float:
        """After how many seconds lines are to be tried again that were put off since this was last asked; 0 if there
        are none. What is discarded then, paused, or in the hands of another process is not waited for again.
        """
        rest, self._rest = self._rest, 0.0
        return rest

    def preflight(self, message: Message) -> str | None:  # noqa: ARG002  a consumer looks at everything
        return None

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:  # noqa: ARG002  nothing to open
        return {}

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:  # noqa: ARG002  lines are what counts
        """Handle them, different lines or tenants beside each other, and say what is left. What takes long is not
        waited for: it goes on, its key waits, and when it is offered again the inbox knows what became of it.
        """
        answers = _Answers([work_of(message) for message in messages])
        await self._answer(Processed(failed=self._failed_before(answers.works)), answers)
        busy = {work.line for work in self.at_hand()}
        chains = {
            asyncio.ensure_future(self._handle(units, answers, busy)): units
            for units in _chains(answers.works, self._batch, spilled=self._processor.knows_failures)
        }
        try:
            _, late = await asyncio.wait(chains, timeout=self._patience)
        except BaseException:
            for task in chains:
                task.cancel()
            await asyncio.wait(chains)  # a transaction that is undone later would outlive its consumer
            raise
        for task in late:
            for unit in chains[task]:
                answers.put_off(unit, SLOW, _STILL_HANDLED)
            if task not in self._at_work:
                task.cancel()  # it waits for its turn
        answers.closed = True
        for task in chains.keys() - late:
            task.result()  # an error here is ours, and no handler's
        return answers.outcome()

    @property
    def _patience(self) -> float | None:
        """Seconds for which a request waits for handlers; None in a drain, which has time."""
        if self._is_draining:
            return None
        if clock.current().monotonic() < self._patient_until:
            return PATIENT
        return SLOW if self._batch == 1 else SLOW_BATCH

    async def _handle(self, units: Sequence[Sequence[Work]], answers: _Answers, busy: Collection[Line]) -> None:
        """Handle units one after the other, each in a transaction."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        for unit in units:
            free = [work for work in unit if not answers.stops(work)]
            if again := [work for work in free if work.line in busy]:
                answers.put_off(again, SLOW, _STILL_HANDLED)
                free = [work for work in free if work.line not in busy]
            if not free:
                continue
            tenant = free[0].tenant
            if not self._progress.may_try(tenant):
                answers.put_off(free, self._rest_of(tenant), _TENANT_HELD)
                continue
            async with self._hands.one(tenant):
                if answers.closed:
                    return
                self._at_work[task] = free
                try:
                    await self._answer(await self._processor.process(free), answers)
                finally:
                    del self._at_work[task]
            if answers.closed or answers.away:
                return

    async def _answer(self, processed: Processed, answers: _Answers) -> None:
        for work in processed.settled:
            self._tries.pop(work.line, None)
        self.settled += len(processed.settled)
        if answers.closed:
            self._keep(processed.failed)
            return
        for work, trouble in processed.failed:
            if trouble.failure is Failure.TRANSIENT:
                answers.put_off([work], self._later(work), trouble.reason)
        await self._refuse([it for it in processed.failed if it[1].failure is not Failure.TRANSIENT], answers)
        answers.settle(processed.settled)
        if processed.away:
            answers.away = processed.away
        elif left := [work for work in processed.left if not answers.stops(work)]:
            answers.put_off(left, self._rest_of(left[0].tenant), _TENANT_HELD)

    def _failed_before(self, works: Sequence[Work]) -> list[tuple[Work, Trouble]]:
        """The first of each key, if there is nothing to be tried: it has failed when it was not waited for, or it was
        spilled because it could not be read, and still cannot.
        """
        failed: list[tuple[Work, Trouble]] = []
        for work in {_key(work): work for work in reversed(works)}.values():
            trouble = self._ended.pop(_offer_of(work), None)
            if trouble is None and work.known_by is KnownBy.CONTENT:
                trouble = self._processor.unreadable(work)
            if trouble is not None:
                failed.append((work, trouble))
        return failed

    async def _refuse(self, failed: Sequence[tuple[Work, Trouble]], answers: _Answers) -> None:
        """These have failed for good, or an attempt is counted."""
        last = [each for each in failed if self._is_last(*each)]
        copies = [(work, trouble) for work, trouble in last if trouble.failure is not Failure.BUSINESS]
        if copies and self._dead_letters is not None:
            try:
                await self._dead_letters.copy(copies)
            except Exception as error:  # the database is away
                answers.away = described(error)
                return
        if answers.closed:  # meanwhile
            self._keep(failed)
            return
        for work, _ in last:
            self._progress.settled(work.tenant)
        self.settled += len(last)
        for work, trouble in failed:
            answers.reject(work, trouble.reason, final=trouble.failure is not Failure.UNKNOWN)

    def _keep(self, failed: Sequence[tuple[Work, Trouble]]) -> None:
        """These failed too late for an answer: it is given when they are offered again."""
        for work, trouble in failed:
            self._ended[_offer_of(work)] = trouble
            if len(self._ended) > _ENDED_KEPT:
                del self._ended[next(iter(self._ended))]

    def _is_last(self, work: Work, trouble: Trouble) -> bool:
        return trouble.failure is not Failure.UNKNOWN or self._retry.exhausted(work.message.attempts + 1)

    def _later(self, work: Work) -> float:
        """When the line of this, which has failed for now, may be offered again."""
        tries = self._tries[work.line] = self._tries.pop(work.line, 0) + 1
        if len(self._tries) > _TRIES_KEPT:
            del self._tries[next(iter(self._tries))]
        return self._waits(self._retry.delay(tries), tries)

    def _rest_of(self, tenant: str | None) -> float:
        """The same for lines that were not tried: when their tenant may be."""
        return self._waits(self._progress.rest_of(tenant) + HELD_PAUSE, self._progress.probes_of(tenant))

    def _waits(self, seconds: float, tries: int) -> float:
        """How long a line waits that was tried so often. A drain leaves it in the end."""
        if not self._is_draining:
            return seconds
        if tries >= STALLED:
            return LEFT
        seconds = min(seconds, DRAIN_PAUSE)
        self._rest = max(self._rest, seconds)
        return seconds

    async def close(self, producer: str | None = None) -> None:
        """What is being handled goes on: who has its lane next finds in the inbox what became of it."""

    async def finish(self) -> None:
        """Let what is being handled end within our grace, or at once if we are cancelled. The rest is undone, and comes
        again.
        """
        late = {*self._at_work}
        ours = asyncio.current_task()
        grace = 0.0 if ours is not None and ours.cancelling() else self._grace
        try:
            if late:
                _, late = await asyncio.wait(late, timeout=grace)
        finally:
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)


class _Answers:
    """What is known of the messages of a request."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works
        self.closed = False
        """The request was answered: nothing more is begun for it."""
        self.away = ""
        self._places = {id(work): place for place, work in enumerate(works)}
        self._settled: list[int] = []
        self._rejected: dict[Key, Rejection] = {}

    def stops(self, work: Work) -> bool:
        """Whether one of its key, before it, was not settled."""
        return _key(work) in self._rejected

    def settle(self, works: Sequence[Work]) -> None:
        """They have taken effect, now or before."""
        if not self.closed:
            self._settled += [self._places[id(work)] for work in works]

    def put_off(self, works: Sequence[Work], seconds: float, reason: str) -> None:
        """The first of each key that is not settled is to be offered again after so many seconds."""
        settled = {*self._settled}
        for work in works:
            if (place := self._places[id(work)]) not in settled:
                self._reject(work, Rejection(place, reason, seconds))

    def reject(self, work: Work, reason: str, *, final: bool) -> None:
        """It failed. What was spilled has failed before, and what takes effect at once does not come this way: a lane
        in which all fails says nothing about the consumer.
        """
        alone = work.claim is not None
        self._reject(work, Rejection(self._places[id(work)], reason, final=final, alone=alone))

    def _reject(self, work: Work, rejection: Rejection) -> None:
        if not self.closed:
            known = self._rejected.setdefault(_key(work), rejection)
            if rejection.index < known.index:
                self._rejected[_key(work)] = rejection

    def outcome(self) -> Outcome:
        """What to tell the lane."""
        verdict = Verdict.UNAVAILABLE if self.away else None
        return Outcome(sorted(self._settled), [*self._rejected.values()], unfinished=verdict, reason=self.away)


def _key(work: Work) -> Key:
    return Key(work.tenant, work.row_key)


def _offer_of(work: Work) -> Hashable:
    """Which offer of a row it is: when it was edited, or another attempt was counted, it is another one."""
    known = work.message.headers.get("event_id") if work.claim is None else work.claim.inbox_id
    return work.line if work.message.key else None, known, work.message.attempts, digest_of(work.message.body)


def _chains(works: Sequence[Work], batch: int, *, spilled: bool) -> list[list[list[Work]]]:
    """Units that share a transaction, in chains: what is in different chains may be handled at the same time. A spilled
    message has a transaction of its own, unless ``spilled`` ones may share it: it has failed, or hung, before.
    """
    chains: dict[Hashable, list[list[Work]]] = {}
    for work in works:
        alone = batch == 1 or (work.claim is not None and not spilled)
        chain = chains.setdefault(_key(work) if alone else work.tenant, [])
        if alone or not chain or len(chain[-1]) == batch:
            chain.append([work])
        else:
            chain[-1].append(work)
    return [*chains.values()]
