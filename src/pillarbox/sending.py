"""Sends an announced batch until every message is stored at the destination or amended away.

Before this: a lane has announced a batch. After it: the destination has the messages, in order per key, or the batch
records which of them it rejected. A successor rebuilds the announced batch and continues it.

There are three answers. *Rejected*: the row is retried later, its key waits, the batch continues. *Unavailable* or
*unknown*: the lane pauses, and no attempt is counted. *Lease lost*: the lane stops at once.

A transport with a bug raises an unexpected error, contradicts itself, or never answers. Then the batch is sent one
message at a time, and the message that triggers the bug is rejected, so that no other message waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from . import clock
from .breaker import Breaker
from .errors import BatchMismatchError, LaneHaltedError, LeaseLostError
from .lane_report import Report
from .leased_lane import LeasedLane
from .numbering import Numbering
from .outbox import Failure, Key, Row
from .plan import Plan, stops_key
from .redaction import redacted
from .rejections import PROBES, Accepted, Rejections
from .retry import LONGEST
from .transport import Message, Outcome, Publisher, Rejection, TopicsRefusedError, Verdict, contradiction

logger = logging.getLogger("pillarbox")

LARGE = 65_536
"""A message larger than this, and larger than any accepted one, is sent alone: a broker that cuts the connection on
oversize looks unavailable, and other messages of the request must not be affected.
"""

SUSPECT_SECONDS = 5.0
"""How long a suspect message waits for the suspect message of another lane."""
DEADLY_TRIES = 3
"""After this many lost owners, a batch is sent one message at a time, at least at first."""

UNANSWERED_TRIES = 3
"""After this many consecutive requests without an answer, a batch is sent one message at a time, to find the cause."""

_LONERS_KEPT = 100

ENDING_SECONDS = 5.0
"""How long a cancelled request may take to end."""

LATE = "no answer in time"
NO_REASON = "no reason was given"

_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""They end the process or the task, and are not bugs of a transport."""

_Item = tuple[int, Row]


Acknowledged = Mapping[int, str]
"""Accepted events of an announced batch, by number. The number alone is not enough: after a failover that loses
transactions, the database may assign the same number and row to another event.
"""


class _Fault(Exception):  # noqa: N818  it never leaves this module
    """A message triggered a bug of the transport, or got no answer."""

    def __init__(self, reason: str, messages: Sequence[Message], *, unanswered: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.number = messages[0].number if len(messages) == 1 else None
        """Number of the message, if it was sent alone."""
        self.unanswered = unanswered


class _Bug(Exception):  # noqa: N818  it never leaves this module
    """The transport failed to open topics, with an error that only a bug explains."""


class _Care:
    """How many messages a request may have: the whole batch, or one message at a time."""

    def __init__(self, *, deadly: bool, grows: bool) -> None:
        self.most: int | None = 1 if deadly else None
        """Most messages of a request."""
        self.fault: _Fault | None = None
        """Fault of the last request, until it is handled."""
        self.in_doubt = False
        """Whether the destination may be unavailable: it left a request unanswered and has accepted nothing since."""
        self._deadly = deadly
        self._grows = grows
        self._unanswered = 0

    @property
    def suspects_each(self) -> bool:
        """Whether each message may kill the relay."""
        return self._deadly and self.most == 1

    def blame(self, fault: _Fault) -> Outcome | None:
        """Continue one message at a time. A single message without an answer may mean an outage."""
        self.fault, self.most = fault, 1
        if not fault.unanswered or fault.number is None:
            return None
        self.in_doubt = True
        return _no_answer(fault.reason)

    def heard(self, outcome: Outcome) -> None:
        """Count the result of a request."""
        if outcome.accepted:
            self._unanswered, self.in_doubt = 0, False
            if self._deadly and self._grows and self.most is not None:
                # Relays that die for other reasons leave batches that look deadly. Where the destination remembers the
                # last number, requests may grow again: an owner that dies of a larger request leaves its successor
                # closer to the cause, which in the end is alone.
                self.most *= 2
        if outcome.unfinished is not None:
            self._unanswered += outcome.unfinished is Verdict.UNKNOWN
            if self._deadly or self._unanswered >= UNANSWERED_TRIES:
                self.most = 1


class Sender:
    """Sends the batches of one lane."""

    def __init__(
        self,
        leased: LeasedLane,
        publisher: Publisher,
        *,
        producer: str,
        rejections: Rejections,
        breaker: Breaker,
        report: Report,
        draw: Callable[[], float],
        acknowledged: Acknowledged,
    ) -> None:
        self.numbering = Numbering(publisher)
        self.stored = False
        """Whether the destination is known to have the whole announced batch."""
        self._leased = leased
        self._publisher = publisher
        self._producer = producer
        self._rejections = rejections
        self._breaker = breaker
        self._report = report
        self._draw = draw
        self._before = acknowledged
        """Accepted messages of the announced batch from an earlier lease of this relay."""
        self._accepted: dict[int, str] = {}
        """Accepted messages of the announced batch."""
        self._acceptances = 0
        """Number of requests that were accepted, at least in part."""
        self._largest = LARGE
        self._loners: dict[int, int] = {}
        """Rows that triggered a fault, with the number of acceptances at that time. They are sent alone."""

    @property
    def acknowledged(self) -> Acknowledged:
        """Accepted messages of the announced batch: if this relay loses the lane and takes it again, it does not send
        them again. Empty for a numbered destination.
        """
        numbered = self._publisher.capabilities.numbered  # then the destination knows its last number
        return {} if numbered or self._leased.lane.announced is None else {**self._before, **self._accepted}

    # -- before a batch is announced -----------------------------------------------------------------------------------

    def preflight(self, message: Message) -> str | None:
        """Call the transport's ``preflight``, and turn a bug of it into a refusal."""
        try:
            refusal: object = self._publisher.preflight(message)
        except (Exception, asyncio.CancelledError) as error:  # nothing here awaits, so this is a bug too
            return self._bug(error)
        if refusal is None or isinstance(refusal, str):
            return refusal
        return self._bug(f"preflight returned {type(refusal).__name__}, neither None nor a text")

    async def open(self, plan: Plan) -> bool:
        """Open the topics of a batch before it is announced. Deliveries to a topic that cannot be opened wait, and hold
        up no others. Returns False if the batch cannot be announced now.
        """
        while topics := {row.topic for row in plan.items}:
            try:
                lasts = await self._open(topics)
            except TopicsRefusedError as error:
                self._leave_out(plan, error.reasons)
            except (OSError, _Bug) as error:
                is_bug, is_alone = isinstance(error, _Bug), len(topics) == 1
                if not is_bug and (is_alone or not isinstance(error, TimeoutError)):
                    reasons = dict.fromkeys(topics, str(error) or LATE)
                else:
                    reasons = dict.fromkeys(topics, str(error)) if is_alone else await self._open_each(topics)
                if len(reasons) == len(topics) and not (is_bug and is_alone):
                    await self._breaker.rest(Verdict.UNAVAILABLE, str(error) or LATE)
                    return False
                self._leave_out(plan, reasons)
            else:
                self._report.topic_opened(topics)
                self._rejections.opened(self._leased.lane, topics)
                self._check_lasts(lasts)
                self.numbering.opened(lasts)
                break
        return True

    async def _open_each(self, topics: Collection[str]) -> dict[str, str]:
        """Open topics one by one, to find those that do not answer or trigger a bug. Returns their reasons."""
        reasons: dict[str, str] = {}
        for topic in sorted(topics):
            try:
                await self._open({topic})
            except (OSError, _Bug) as error:
                reasons[topic] = str(error) or LATE
        return reasons

    async def _open(self, topics: Collection[str]) -> Mapping[str, int]:
        """The last numbers of these topics, if the transport is numbered. Raises `_Bug` for an unexpected answer."""
        capabilities = self._publisher.capabilities
        try:
            async with self._leased.within(), asyncio.timeout(capabilities.timeout):
                lasts: object = await self._publisher.open(self._producer, topics)
        except TopicsRefusedError as error:
            if error.reasons.keys() & {*topics}:
                raise
            raise _Bug(self._bug(f"open refused topics that were not asked for: {error}")) from error
        except OSError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, LeaseLostError) or _is_cancelled(error):
                raise
            raise _Bug(self._bug(error)) from error
        if not capabilities.numbered:
            return {}
        if isinstance(lasts, Mapping) and {*map(type, lasts.values())} <= {int}:
            return lasts
        raise _Bug(self._bug(f"open returned {type(lasts).__name__}, not the last number of each topic"))

    def _leave_out(self, plan: Plan, reasons: Mapping[str, str]) -> None:
        plan.set_aside(
            {
                row.id: Failure(row.id, row.attempts, redacted(reasons[row.topic]), PROBES.cap)
                for row in plan.items
                if row.topic in reasons
            }
        )
        for topic, reason in reasons.items():
            self._report.topic_refused(topic, redacted(reason))
            self._rejections.not_opened(self._leased.lane, topic)

    def _check_lasts(self, lasts: Mapping[str, int]) -> None:
        lane = self._leased.lane
        for place, last in lasts.items():
            if last >= lane.next_number:
                raise LaneHaltedError(
                    f"{place} has message {last} of {self._producer}, and the outbox has announced no more than "
                    f"{lane.next_number - 1}: the database went back in time, and new events would be dropped as "
                    "known; `pillarbox outbox new-install-id` goes on under another name"
                )
            if last < (reached := self.numbering.reached(lane, place)):
                self._report.forgotten(place, last, reached)

    def failed(self, row: Row, reason: str) -> Failure:
        policy, attempts = self._leased.lane.route.retry, row.attempts + 1
        delay = None if policy.exhausted(attempts) else policy.delay(attempts, self._draw)
        return Failure(row.id, attempts, redacted(reason) or NO_REASON, delay)

    def tell(self, row: Row, failure: Failure, number: int = 0) -> None:
        said = failure.error or ""
        if failure.retry_after is None:
            self._report.dead(row, number, failure.attempts, said, rejected=True)
        else:
            self._report.rejected(row, number, failure.attempts, said)

    def _bug(self, found: BaseException | str) -> str:
        """The reason for an error or answer that only a bug of the transport explains. Logs it."""
        return self._report.bug(found, first=self._rejections.is_new_bug(self._leased.lane, found))

    # -- the announced batch -------------------------------------------------------------------------------------------

    async def deliver(self, items: list[_Item] | None, messages: list[Message] | None = None) -> None:
        """Send the announced batch until every message is stored or amended away. With None, rebuild it first.
        ``messages`` are the messages of all items, if they are known.
        """
        if items is not None:
            self._accepted, self._before = {}, {}
        self.stored = False
        began = clock.current().monotonic()
        care = _Care(deadly=self._leased.lane.tries >= DEADLY_TRIES, grows=self._publisher.capabilities.numbered)
        while items is None or items:
            try:
                if items is None:
                    items, outcome = await self._recover(care)
                elif care.suspects_each:
                    items, outcome = await self._send_suspect(items)
                else:
                    items, outcome = await self._send(items, messages, care.most)
            except _Fault as fault:
                items, outcome = None, care.blame(fault)
            messages = None
            if outcome is None:
                continue
            care.heard(outcome)
            if outcome.unfinished is not None:
                items = None  # an outage costs no memory: the rest is read again
                if not await self._breaker.rest(outcome.unfinished, outcome.reason):
                    await self._abandon()
                    return
        if not care.in_doubt:
            self._breaker.close()
        self.stored = True
        self._report.delivered(clock.current().monotonic() - began)

    async def _send(
        self, items: list[_Item], ready: list[Message] | None, most: int | None
    ) -> tuple[list[_Item], Outcome]:
        """Send one request of up to ``most`` messages. Returns the items that are left."""
        if ready is None or not self._is_one_request(ready):
            ready = self._next_request(items, most)
        outcome = await self._request(ready)
        if outcome.accepted and self._loners and len(ready) == 1:
            self._loners.pop(items[0][1].id, None)
        if outcome.unfinished is Verdict.UNKNOWN and most == 1 and not outcome.accepted:
            raise _Fault(outcome.reason, ready, unanswered=True)
        is_all = len(outcome.accepted) == len(items) and not outcome.duplicates and outcome.unfinished is None
        if not (is_all and self._publisher.capabilities.numbered):
            self._accepted.update([(items[index][0], items[index][1].event) for index in outcome.accepted])
        if is_all:
            return [], outcome
        passed: Collection[int] = ()
        if outcome.unfinished is not None and self._publisher.capabilities.numbered:
            # A rejection is recorded only when all lower numbers are known to be stored; until then the message is sent
            # again. A passed message is recorded at once: a later last number of its place would count it as stored.
            passed = _passed_over(ready, outcome.accepted)
            outcome = replace(outcome, rejected=[each for each in outcome.rejected if each.index in passed])
        if outcome.duplicates:
            logger.error(
                "%s: the destination took a message for a duplicate that was never sent before", self._leased.lane
            )
        if outcome.rejected or passed:
            return await self._amend(items, len(ready), outcome, passed), outcome
        return [item for item in items if item[0] not in self._accepted], outcome

    def _is_one_request(self, messages: list[Message]) -> bool:
        few = len(messages) <= self._publisher.capabilities.max_messages
        return few and not self._loners and max([len(message.body) for message in messages]) <= self._largest

    def _next_request(self, items: Sequence[_Item], most: int | None) -> list[Message]:
        messages: list[Message] = []
        for number, row in items[: min(most or len(items), self._publisher.capabilities.max_messages)]:
            alone = len(row.body) > self._largest or row.id in self._loners
            if alone and messages:
                break
            messages.append(self.numbering.message(self._leased.lane, number, row))
            if alone:
                break
        return messages

    async def _request(self, messages: Sequence[Message]) -> Outcome:
        """Send one request. Raises `_Fault` for a bug, or if there is no answer in time."""
        self._leased.check()
        with self._report.sending(self._producer, messages) as tell:
            try:
                outcome = await self._ask(messages)
            except _Fault as fault:
                tell(_no_answer(fault.reason))
                raise
            tell(outcome)
        if outcome.accepted:
            self._went_well(messages, outcome.accepted)
        return outcome

    async def _ask(self, messages: Sequence[Message]) -> Outcome:
        capabilities = self._publisher.capabilities
        limit = asyncio.timeout(capabilities.timeout)
        try:
            async with self._stuck_is_told(capabilities.timeout), self._leased.within(), limit:
                outcome = await self._publisher.send(self._producer, messages)
            wrong = contradiction(messages, outcome, numbered=capabilities.numbered)
        except TimeoutError as error:
            if limit.expired():
                raise _Fault(f"no answer within {capabilities.timeout:g} s", messages, unanswered=True) from error
            return _no_answer(str(error) or LATE)
        except OSError as error:
            return Outcome((), unfinished=Verdict.UNAVAILABLE, reason=f"{type(error).__name__}: {error}")
        except BaseException as error:  # native extensions may raise a BaseException
            if isinstance(error, (*_ENDS, LeaseLostError)) or _is_cancelled(error):
                raise
            raise _Fault(self._bug(error), messages) from error
        if wrong is not None:
            raise _Fault(self._bug(wrong), messages)
        return outcome

    @asynccontextmanager
    async def _stuck_is_told(self, seconds: float | None) -> AsyncIterator[None]:
        """Report a request that does not end when cancelled as the lane's trouble. It holds the lane: a second request
        beside it could duplicate or reorder messages.
        """
        if seconds is None:
            yield
            return
        timer = asyncio.get_running_loop().call_later(seconds + ENDING_SECONDS, self._tell_stuck, seconds)
        before = self._breaker.trouble
        try:
            yield
        finally:
            timer.cancel()
            self._breaker.trouble = before

    def _tell_stuck(self, seconds: float) -> None:
        said = f"a request was cancelled after {seconds:g} s and does not end, and its lane waits for that"
        self._breaker.tell(self._report.bug(said, first=True))

    def _went_well(self, messages: Sequence[Message], accepted: Collection[int]) -> None:
        self._report.sent(messages, accepted)
        self._breaker.close()
        self._acceptances += 1
        self._rejections.accepted(self._leased.lane, messages, accepted)
        self.numbering.accepted(messages, accepted)
        if len(messages) == 1:  # in a larger request, other messages may be the largest
            self._largest = max(self._largest, len(messages[0].body))

    async def _amend(
        self, items: list[_Item], asked: int, outcome: Outcome, passed: Collection[int] = ()
    ) -> list[_Item]:
        """Record rejections before any higher number leaves. Returns the items that are left."""
        rejected = {rejection.index: rejection for rejection in outcome.rejected}
        failures: list[Failure] = []
        parked: list[int] = []
        left: list[_Item] = []
        stopped: set[Key] = set()
        stored = set(outcome.accepted)
        places = {(items[index][1].topic, items[index][1].tenant) for index in stored}
        for index, (number, row) in enumerate(items):
            if index in stored:
                continue
            if (rejection := rejected.get(index)) is not None:
                failures.append(self._failure_by(rejection, row, number, places))
                if stops_key(failures[-1], self._leased.lane):
                    stopped.add(row.order_key)
            elif passed and index < asked and index not in passed:
                left.append((number, row))  # it may be stored under its number, and so keeps it
            elif row.order_key in stopped:
                parked.append(row.id)
            elif index in passed or (index < asked and outcome.unfinished is None):
                # It shared a request with a rejected message. Its number may be used up, so it gets a new one.
                failures.append(Failure(row.id, row.attempts, None, 0.0))
                stopped.add(row.order_key)
            else:
                left.append((number, row))
        await self._leased.amend(failures, parked=parked)
        return left

    def _failure_by(self, rejection: Rejection, row: Row, number: int, accepted: Accepted) -> Failure:
        if rejection.retry_after is not None:
            return self._postponed(row, rejection)
        if rejection.final:
            self._breaker.close()
            failure = Failure(row.id, row.attempts + 1, redacted(rejection.reason) or NO_REASON, None)
            self.tell(row, failure, number)
            return failure
        return self._rejected(row, rejection.reason, number, accepted, alone=rejection.alone)

    def _rejected(self, row: Row, reason: str, number: int, accepted: Accepted = (), *, alone: bool = False) -> Failure:
        reason = redacted(reason) or NO_REASON
        attempts = None if alone else self._rejections.rejected(self._leased.lane, row, reason, accepted)
        if attempts is not None:
            self._report.refused_like_all()
            return Failure(row.id, attempts, reason, PROBES.cap)  # other rows are probed before it
        self._breaker.close()  # a rejection is an answer
        failure = self.failed(row, reason)
        self.tell(row, failure, number)
        return failure

    def _postponed(self, row: Row, rejection: Rejection) -> Failure:
        """Retry at the time that the destination asked for, without counting an attempt."""
        self._breaker.close()
        self._report.postponed()
        wait = min(max(0.0, rejection.retry_after or 0.0), LONGEST)
        return Failure(row.id, row.attempts, redacted(rejection.reason) or NO_REASON, wait)

    async def _send_suspect(self, items: list[_Item]) -> tuple[list[_Item], Outcome | None]:
        """Send the first message of a batch of which relays may have died. Its attempt is recorded first, and taken
        back unless the answer is a rejection. Lanes send their suspects one after the other, so that a death has one
        cause; each waits for `SUSPECT_SECONDS` at most.
        """
        suspects = self._rejections.suspects
        try:
            async with asyncio.timeout(SUSPECT_SECONDS):
                await suspects.acquire()
        except TimeoutError:  # a suspect that hangs must not hold up the others
            return await self._send_alone(items)
        try:
            return await self._send_alone(items)
        finally:
            suspects.release()

    async def _send_alone(self, items: list[_Item]) -> tuple[list[_Item], Outcome | None]:
        number, row = items[0]
        self._leased.check()
        if self._leased.lane.route.retry.exhausted(row.attempts):
            dead = Failure(row.id, row.attempts, "relays died while this was being sent", None)
            self._report.dead(row, number, row.attempts, str(dead.error), rejected=False)
            return await self._take_out(items, {number: dead}), None
        await self._leased.amend(attempts={row.id: row.attempts + 1})
        try:
            outcome = await self._request([self.numbering.message(self._leased.lane, number, row)])
        except _Fault:  # the relay is alive; `_recover` checks whether the event is stored
            await self._leased.amend((), attempts={row.id: row.attempts})
            raise
        if outcome.rejected:
            return await self._amend(items, 1, outcome), outcome
        await self._leased.amend((), attempts={row.id: row.attempts})
        if outcome.accepted:
            self._accepted[number] = row.event
        return [item for item in items if item[0] not in self._accepted], outcome

    async def _set_aside(self, items: list[_Item], fault: _Fault | None) -> list[_Item]:
        """Take the message that triggered the ``fault`` out of the batch, and the rows of blocked places. If operators
        have requests for rows of the batch, take out all: the next announcement carries the requests out.
        """
        failures: dict[int, Failure] = {}
        asked = await self._leased.asked([row.id for _, row in items])
        for number, row in items:
            if fault is not None and number == fault.number:
                failures[number] = self._blamed(row, fault)
            elif asked or self._rejections.is_blocked(self._leased.lane, row):
                failures[number] = Failure(row.id, row.attempts, None, 0.0)
        return await self._take_out(items, failures) if failures else items

    def _blamed(self, row: Row, fault: _Fault) -> Failure:
        """A bug counts as a rejection. A missing answer counts as one only if the destination has accepted others since
        the first time; otherwise it may be an outage, which costs no attempt.
        """
        since = self._loners.setdefault(row.id, self._acceptances)
        if len(self._loners) > _LONERS_KEPT:
            del self._loners[next(iter(self._loners))]
        if fault.unanswered and since == self._acceptances:
            delay = self._leased.lane.route.retry.delay(row.attempts + 1, self._draw)
            return Failure(row.id, row.attempts, redacted(fault.reason), delay)
        failure = self._rejected(row, fault.reason, fault.number or 0)
        if failure.retry_after is None:
            self._loners.pop(row.id)
        return failure

    async def _take_out(self, items: Sequence[_Item], failures: Mapping[int, Failure]) -> list[_Item]:
        """Amend the batch by failures, given by number. Returns the items that are left."""
        out: list[Failure] = []
        parked: list[int] = []
        left: list[_Item] = []
        stopped: set[Key] = set()
        for number, row in items:
            failure = failures.get(number)
            if row.order_key in stopped:
                parked.append(row.id)
            elif failure is None:
                left.append((number, row))
            else:
                out.append(failure)
                if stops_key(failure, self._leased.lane):
                    stopped.add(row.order_key)
        await self._leased.amend(out, parked=parked)
        return left

    # -- recovery ------------------------------------------------------------------------------------------------------

    async def _recover(self, care: _Care) -> tuple[list[_Item] | None, Outcome | None]:
        """Rebuild the announced batch, without the messages that are known to be stored, and take out the rows that
        keep it from continuing.
        """
        self._leased.check()
        items = await self._left()
        if items and self._publisher.capabilities.numbered:
            items, outcome = await self._without_those_stored(items)
            if outcome is not None:
                return None, outcome
        fault, care.fault = care.fault, None
        return await self._set_aside(items, fault) if items else items, None

    async def _without_those_stored(self, items: list[_Item]) -> tuple[list[_Item], Outcome | None]:
        """Leave out the messages that a numbered destination has stored, by its last numbers."""
        try:
            lasts = await self._open({row.topic for _, row in items})
        except (OSError, _Bug) as error:
            return items, Outcome((), unfinished=Verdict.UNAVAILABLE, reason=str(error) or LATE)
        # Open, then the fenced write, then send: in another order, a relay that slept through its lease could still
        # send.
        await self._leased.amend(())
        self._check_lasts(lasts)
        for place in sorted(lasts):
            if lasts[place] < 0 and self.numbering.may_be_forgotten(self._leased.lane, place):
                self._report.forgotten(place, lasts[place], -1)
            items, outcome = await self._without_stored(items, place, lasts[place])
            if outcome is not None:
                return items, outcome
        return items, None

    async def _left(self) -> list[_Item]:
        """The items of the announced batch that are not known to be stored."""
        try:
            items = await self._leased.rebuild()
        except BatchMismatchError:
            # Its next owner may have settled it. Then the lane is lost, and nothing is wrong with it.
            await self._leased.amend()
            raise
        before, self._before = self._before, {}
        self._accepted.update((number, row.event) for number, row in items if before.get(number) == row.event)
        return [item for item in items if item[0] not in self._accepted]

    async def _without_stored(self, items: list[_Item], place: str, last: int) -> tuple[list[_Item], Outcome | None]:
        """Leave out what the place has stored. Message ``last`` was received, but may not be stored yet: it is sent
        once more as a probe.
        """
        pushed = [
            (number, row)
            for number, row in items
            if number <= last and self.numbering.place(self._leased.lane, row) == place
        ]
        if not pushed:
            return items, None
        found = len(pushed)
        if pushed[-1][0] == last:  # otherwise it was amended away, after all lower ones were stored
            outcome = None
            while outcome is None and pushed:
                try:
                    outcome = await self._request([self.numbering.message(self._leased.lane, *pushed[-1])])
                except _Fault as fault:
                    if fault.unanswered:
                        outcome = _no_answer(fault.reason)
                    else:
                        pushed.pop()  # a bug proves nothing; the message before it may
            if outcome is None:
                return items, None
            if not outcome.accepted:
                return items, _unanswered(outcome)
            if not outcome.duplicates:
                raise LaneHaltedError(
                    f"{place} stored message {pushed[-1][0]} of {self._producer} again, though it says that its last "
                    f"one is {last}: is deduplication on?"
                )
            found = len(pushed) - 1  # the probe is counted already
        self._report.found_stored(found)
        gone = {number for number, _ in pushed}
        return [item for item in items if item[0] not in gone], None

    async def _abandon(self) -> None:
        """Record the accepted messages of a batch when the lane stops while its destination is unavailable, so that the
        successor does not send them again.

        A numbered destination reports its last number to the successor; there, the announcement must stay as it is.
        """
        if not self._accepted or self._publisher.capabilities.numbered:
            return
        await self._leased.amend([Failure(row.id, row.attempts, None, 0.0) for _, row in await self._left()])
        self.stored = True


def _is_cancelled(error: BaseException) -> bool:
    """Whether this task is cancelled, rather than something that the transport waited for."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _no_answer(reason: str) -> Outcome:
    return Outcome((), unfinished=Verdict.UNKNOWN, reason=reason)


def _passed_over(messages: Sequence[Message], accepted: Collection[int]) -> set[int]:
    """Indexes of messages that are not stored although a later one of their place is."""
    highest: dict[str, int] = {}
    for index in accepted:
        place = messages[index].place or messages[index].topic
        highest[place] = max(highest.get(place, -1), messages[index].number)
    return {
        index
        for index, message in enumerate(messages)
        if message.number < highest.get(message.place or message.topic, -1)
    }.difference(accepted)


def _unanswered(outcome: Outcome) -> Outcome:
    """If a probe is not accepted, everything below it is unknown."""
    reason = outcome.reason or (outcome.rejected[0].reason if outcome.rejected else "")
    return Outcome((), unfinished=outcome.unfinished or Verdict.UNKNOWN, reason=reason)
