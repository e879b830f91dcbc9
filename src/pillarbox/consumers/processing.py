"""What becomes of a message: its effect once, or trouble.

One transaction holds the row of the inbox, the effect, and the events that the effect raises. Nothing is acknowledged
before it has committed; whatever crashes in between, the message comes again and the inbox knows it. Several messages
share a transaction where that is asked for: if it fails, all of it is undone and they are tried one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from .. import clock
from ..context import caused_by
from ..errors import EventError
from ..inbox import Admission, Arrival, Inbox
from ..redaction import described, redacted, text_of
from ..transport import Message
from .failure import Failure, classify
from .handling import Effects, EventsFailedError, Incoming, Reader
from .home import Home
from .identity import KnownBy, altered, arrival_in, arrival_of, why_altered
from .progress import Progress
from .report import ConsumerReport
from .spilling import Spilled, Spiller, hash_of_line
from .window import Line, Work

GATE_SECONDS, GATED_AGAIN = 1.0, 10.0
"""How long messages of a line wait in memory for the last spilled ones of it to take effect, and how often. Else they
are spilled, too: a line that gets messages all the time must neither go by its lane for ever, nor wait here for ever.
"""
_GATED_KEPT = 10_000


class Trouble(NamedTuple):
    """Why a message has not taken effect."""

    failure: Failure
    reason: str
    """Already redacted."""
    arrival: Arrival
    """What the inbox knows the message by, if it is spilled."""
    known_by: KnownBy
    tenant: str | None
    """Whose it is; None if what it says of that cannot be believed."""

    def spilled(self, work: Work, *, refused: bool = False) -> Spilled:
        """What is to be stored of the message; ``refused``: it fails at once."""
        failure, reason = (self.failure, self.reason) if refused else (None, None)
        return Spilled(work.message, self.arrival, self.tenant, self.known_by, failure, reason)


@dataclass(slots=True)
class Processed:
    """What has become of some messages."""

    settled: list[Work] = field(default_factory=list)
    """They have taken effect, now or before, or no handler wants them, or they were spilled behind others."""
    failed: list[tuple[Work, Trouble]] = field(default_factory=list)
    """At most one of each line, except for those that cannot be read."""
    behind: list[Work] = field(default_factory=list)
    """Of the settled ones, those that were spilled behind others of their lines."""
    left: list[Work] = field(default_factory=list)
    """Not tried, in their order."""
    gated: list[Work] = field(default_factory=list)
    """Of those, the ones that wait for spilled ones of their lines."""
    away: str = ""
    """Why nothing can take effect now: the database did not even let a handler begin."""

    def add(self, other: Processed) -> None:
        """And this."""
        self.settled += other.settled
        self.failed += other.failed
        self.behind += other.behind
        self.left += other.left
        self.gated += other.gated
        self.away = self.away or other.away


class _Readable(msgspec.Struct, gc=False):
    """A message with an event in it that is wanted."""

    work: Work
    arrival: Arrival
    incoming: Incoming


class _GatedError(Exception):
    """Messages of these lines may wait for those before them that were spilled."""

    def __init__(self, lines: set[Line]) -> None:
        super().__init__(lines)
        self.lines = lines


class _AlteredError(Exception):
    """The message's id was seen before, with another body."""

    def __init__(self, arrival: Arrival) -> None:
        super().__init__(why_altered(arrival))
        self.arrival = arrival


class _SomeFailedError(Exception):
    """These messages have failed by themselves."""

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        super().__init__(errors)
        self.errors = errors


class _RefusedError(Exception):
    """A spilled message fails without being tried."""


class Processor:
    """Lets the messages of one consumer take effect. May be asked several times at once, for different lines."""

    def __init__(
        self,
        name: str,
        home: Home,
        effects: Effects,
        *,
        reader: Reader,
        inbox: Inbox,
        report: ConsumerReport,
        progress: Progress,
        identify: Callable[[Connection], int],
        timeout: float,
        spiller: Spiller | None,
        parks: bool,
    ) -> None:
        self._name = name
        self._home = home
        self._effects = effects
        self._reader = reader
        self._inbox = inbox
        self._report = report
        self._progress = progress
        self._identify = identify
        self._timeout = timeout
        self._spiller = spiller
        self._parks = parks
        """Whether the rest of a key waits behind a message that has failed for good."""
        self._begun = 0
        """How often the database has let handlers begin."""
        self._gated: dict[Line, float] = {}
        """Lines that were gated when they were last looked at, and since when their messages wait for that."""

    async def process(self, works: Sequence[Work]) -> Processed:
        """Let messages of one tenant take effect, in order per line. One that was spilled comes alone."""
        doubtful = {work.line for work in works if work.tries or self._may_wait(work.line)}
        if doubtful and (others := [work for work in works if work.line not in doubtful]):
            # They must neither fail nor wait with these. What is spilled behind others does neither.
            return await self._in_turn((others, [work for work in works if work.line in doubtful]))
        return await self._try(works)

    async def _try(self, works: Sequence[Work]) -> Processed:
        begun = self._begun
        try:
            return await self._together(works)
        except _GatedError as gated:
            waits = [work for work in works if work.line in gated.lines]
            free = [work for work in works if work.line not in gated.lines]
            processed = await self.process(free) if free else Processed()
            processed.add(Processed(left=waits, gated=waits))
            return processed
        except _SomeFailedError as some:
            return await self._without(works, some.errors)
        except BaseException as error:
            if _is_for_us(error):
                raise
            is_away = self._begun == begun and classify(error) is Failure.TRANSIENT
            if len(works) > 1 and not is_away:
                middle = len(works) // 2
                return await self._in_turn((works[:middle], works[middle:]))
            if is_away:
                return Processed(left=[*works], away=self._trouble(works[0], error).reason)
            return Processed(failed=[(works[0], self._failed(works[0], error))])

    async def _without(self, works: Sequence[Work], errors: Mapping[int, Exception]) -> Processed:
        """Let all go on but those that have failed, and what comes behind them."""
        stopped, others, rest = set[Line](), list[Work](), list[Work]()
        for work in works:
            if id(work) in errors:
                stopped.add(work.line)
            (rest if work.line in stopped else others).append(work)
        processed = await self.process(others) if others else Processed()
        waits = {work.line for work in processed.left}.union(work.line for work, _ in processed.failed)
        for work in rest:
            if work.line in waits or processed.away:
                processed.left.append(work)
            else:
                waits.add(work.line)
                processed.failed.append((work, self._failed(work, errors[id(work)])))
        return processed

    def _failed(self, work: Work, error: BaseException) -> Trouble:
        trouble = self._trouble(work, error)
        if trouble.failure in (Failure.TRANSIENT, Failure.UNKNOWN):
            self._progress.failed(work.tenant, work.line)
        return trouble

    async def _in_turn(self, parts: Sequence[Sequence[Work]]) -> Processed:
        """Each part by itself. What comes behind a message that was not settled waits, and so does all the rest if the
        database is away, or the tenant is held.
        """
        processed, stopped = Processed(), set[Line]()
        for part in parts:
            waits = bool(processed.away) or self._progress.is_held(part[0].tenant)
            free = [work for work in part if not waits and work.line not in stopped]
            processed.left += [work for work in part if waits or work.line in stopped]
            if free:
                done = await self.process(free)
                stopped.update(work.line for work in done.left)
                stopped.update(work.line for work, _ in done.failed)
                processed.add(done)
        return processed

    def spilled(self, works: Sequence[Work]) -> None:
        """What comes in their lines has to wait for them."""
        now = clock.current().monotonic()
        for work in works:
            self._gated.setdefault(work.line, now)
        self._forget_gates()

    def _forget_gates(self) -> None:
        """Not one by one from the front: a dict looks at all that were deleted there before."""
        if len(self._gated) > 2 * _GATED_KEPT:
            self._gated = dict([*self._gated.items()][-_GATED_KEPT:])

    def unreadable(self, work: Work) -> Trouble | None:
        """Why a message cannot be read; None if it can, or if that has to be tried."""
        try:
            found = self._open(work)
        except Exception:  # by code of the event's own class
            return None
        return found if isinstance(found, Trouble) else None

    def untried(self, work: Work) -> Spilled | None:
        """What is to be stored of a message that was not tried; None if no handler wants it."""
        try:
            found = self._open(work)
        except Exception as error:  # by code of the event's own class
            return self._trouble(work, error).spilled(work)
        if isinstance(found, _Readable):
            return Spilled(work.message, found.arrival, work.tenant)
        return None if found is None else found.spilled(work, refused=True)

    async def _together(self, works: Sequence[Work]) -> Processed:
        """All that can be read in one transaction, or nothing."""
        processed, stopped = Processed(), set[Line]()
        opened: list[_Readable] = []
        for work in works:
            if work.line in stopped:
                processed.left.append(work)
                continue
            found = self._open(work)
            if isinstance(found, _Readable):
                opened.append(found)
            elif found is not None:
                processed.failed.append((work, found))
                if self._parks:
                    stopped.add(work.line)
            else:
                if work.claim is not None:
                    await self._home.apart(self._redeemed, work)
                processed.settled.append(work)
        if opened:
            processed.add(await self._take_effect(opened))
        return processed

    async def _take_effect(self, opened: Sequence[_Readable]) -> Processed:
        first = opened[0].work
        began = clock.current().monotonic()
        alone = caused_by(first.message.headers) if len(opened) == 1 else nullcontext()
        async with self._home.turn:
            with alone, self._naming_timeout():  # what COMMIT itself brings about is caused by the message, too
                admissions = await (self._commit(opened) if first.claim is None else self._redeem(opened[0]))
        ended = clock.current().monotonic()
        processed, new, duplicates = Processed(), [], 0
        for found, admission in zip(opened, admissions, strict=True):
            if admission is Admission.ALTERED:
                processed.failed.append((found.work, _altered(found.work, found.arrival)))
                continue
            processed.settled.append(found.work)
            if admission is None:
                processed.behind.append(found.work)
            elif admission is Admission.NEW:
                new.append(found.incoming)
            else:
                duplicates += 1
        self._report.handled(new, duplicates, ended - began)
        self._report.left_out(self._effects.left_out())
        if new:
            self._progress.succeeded(first.tenant)
        return processed

    @contextmanager
    def _naming_timeout(self) -> Iterator[None]:
        """Let a time-out of ours say so: it would have no text."""
        now = asyncio.get_running_loop().time
        began = now()
        try:
            yield
        except TimeoutError as error:
            if not error.args and now() - began >= self._timeout:
                error.args = (f"the handler did not finish within {self._timeout:g} s (timeout)",)
            raise

    async def _commit(self, opened: Sequence[_Readable]) -> Sequence[Admission | None]:
        """The row of the inbox first, then the effect: one is there if and only if the other is. None for what was
        spilled behind others.
        """
        tenant, spilled = opened[0].work.tenant, None
        async with self._home.unit_of_work(tenant=tenant, timeout=self._timeout, new_transaction=True) as uow:
            admissions, gated = await self._home.within(uow, self._admit, tenant, opened)
            if self._parks and Admission.ALTERED in admissions:
                raise _SomeFailedError(
                    {
                        id(found.work): _AlteredError(found.arrival)
                        for found, it in zip(opened, admissions, strict=True)
                        if it is Admission.ALTERED
                    }
                )
            answers: list[Admission | None] = [*admissions]
            if self._gated:
                for line in {found.work.line for found in opened} - gated:
                    self._gated.pop(line, None)
            if gated and self._spiller is not None:
                behind = [
                    place
                    for place, found in enumerate(opened)
                    if found.work.line in gated and admissions[place] is Admission.NEW
                ]
                if behind:
                    self._wait_for_gates([opened[place].work for place in behind])
                    spills = [Spilled(opened[place].work.message, opened[place].arrival, tenant) for place in behind]
                    spilled = await self._home.within(uow, self._spiller.write, spills)
                    for place in behind:
                        answers[place] = None
            fresh = [found for found, it in zip(opened, answers, strict=True) if it is Admission.NEW]
            new = [found.incoming for found in fresh]
            self._begun += 1
            try:
                with self._report.processing(new), uow.sealed():
                    await self._effects.apply(uow, new)
            except EventsFailedError as several:
                raise _SomeFailedError({id(fresh[place].work): it for place, it in several.errors.items()}) from several
        if spilled is not None and self._spiller is not None:
            self._spiller.committed(spilled, behind=True)
        return answers

    def _admit(
        self, connection: Connection, tenant: str | None, opened: Sequence[_Readable]
    ) -> tuple[Sequence[Admission], set[Line]]:
        """What the inbox says of each, and the lines that are gated."""
        number, arrivals = self._identify(connection), [found.arrival for found in opened]
        if self._spiller is None:
            return self._inbox.admit(connection, number, tenant, arrivals).admissions, set()
        lines: dict[int, Line] = {}

        def hashes() -> Collection[int]:
            lines.update((hash_of_line(found.work.message), found.work.line) for found in opened)
            lines.pop(0, None)
            return lines

        admitted = self._inbox.admit(connection, number, tenant, arrivals, claims=self._spiller.claims, lines=hashes)
        return admitted.admissions, {lines[line] for line in admitted.gated}

    def _may_wait(self, line: Line) -> bool:
        """Whether messages of this line may have to wait in memory for spilled ones."""
        since = self._gated.get(line)
        return since is not None and not GATE_SECONDS <= clock.current().monotonic() - since <= GATED_AGAIN

    def _wait_for_gates(self, behind: Sequence[Work]) -> None:
        now = clock.current().monotonic()
        waits = set[Line]()
        for line in {work.line for work in behind}:
            since = self._gated.pop(line, now)
            self._gated[line] = since = now if now - since > GATED_AGAIN else since
            if now - since < GATE_SECONDS:
                waits.add(line)
        self._forget_gates()
        if waits:
            raise _GatedError(waits)

    async def _redeem(self, found: _Readable) -> Sequence[Admission]:
        """The claim first, then the effect: one is gone if and only if the other is there."""
        async with self._home.unit_of_work(
            tenant=found.work.tenant, timeout=self._timeout, new_transaction=True
        ) as uow:
            admission = await self._home.within(uow, self._delete_claim, found)
            if admission is Admission.NEW:
                with self._report.processing([found.incoming]), uow.sealed():
                    await self._effects.apply(uow, [found.incoming])
        return [admission]

    def _delete_claim(self, connection: Connection, found: _Readable) -> Admission:
        number, (is_there, refused) = self._redeemed(connection, found.work)
        if not is_there:
            return Admission.DUPLICATE  # it has taken effect before
        if refused is not None:
            raise _RefusedError(refused)
        if found.work.known_by is not KnownBy.CONTENT:
            return Admission.NEW
        # It could not be read when it came, and its event may have come again since.
        [admission] = self._inbox.admit(connection, number, found.work.tenant, [found.arrival]).admissions
        if admission is Admission.ALTERED:
            raise _RefusedError(why_altered(found.arrival))
        return admission

    def _redeemed(self, connection: Connection, work: Work) -> tuple[int, tuple[bool, str | None]]:
        if self._spiller is None or work.claim is None:
            raise ValueError("this consumer has spilled nothing")
        self._begun += 1  # the database is there: a claim that another transaction has locked concerns its line alone
        return self._identify(connection), self._inbox.redeem(connection, self._spiller.claims, work.claim)

    def _open(self, work: Work) -> _Readable | Trouble | None:
        """What is in it; None if no handler wants it."""
        message = work.message
        try:
            incoming = self._reader.read(message, message.attempts + work.tries + 1)
        except EventError as error:
            self._report.failed(message, Failure.POISON, redacted(str(error)), error)
            return self._unreadable(message, Failure.POISON, redacted(str(error)))
        if incoming is None:
            return None
        return _Readable(work, arrival_in(incoming), incoming)

    def _trouble(self, work: Work, error: BaseException) -> Trouble:
        failure = classify(error)
        reason = redacted(text_of(error)) if failure is Failure.BUSINESS else described(error)
        if isinstance(error, _AlteredError):
            return _altered(work, error.arrival)
        if isinstance(error, _RefusedError):
            return self._unreadable(work.message, work.refused_as or Failure.POISON, str(error))
        self._report.failed(work.message, failure, reason, error)
        try:
            incoming = self._reader.read(work.message)
        except Exception:  # it fails while it is built, by code of the event's own class
            incoming = None
        if incoming is None:
            return self._unreadable(work.message, failure, reason)
        return Trouble(failure, reason, arrival_in(incoming), KnownBy.EVENT, work.tenant)

    def _unreadable(self, message: Message, failure: Failure, reason: str) -> Trouble:
        try:
            tenant = self._reader.tenant_of(message)
        except EventError:  # nobody's: what a tenant has in the inbox is not for strangers to fill
            tenant = None
        return Trouble(failure, reason, arrival_of(message), KnownBy.CONTENT, tenant)


def _altered(work: Work, arrival: Arrival) -> Trouble:
    return Trouble(Failure.POISON, why_altered(arrival), altered(arrival), KnownBy.BODY, work.tenant)


def _is_for_us(error: BaseException) -> bool:
    """Whether we are told to stop. Anything else, even SystemExit, was raised by a handler, and is an error of its
    message: a process that ended by it would meet the same message again.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs: what was left of our task is thrown away
        return True
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt)
