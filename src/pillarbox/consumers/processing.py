"""What becomes of a message: its effect once, or trouble.

One transaction holds the row of the inbox, the effect, and the events that the effect raises. Nothing is acknowledged
before it has committed; whatever crashes in between, the message comes again and the inbox knows it. Several messages
share a transaction where that is asked for: if it fails, all of it is undone and they are tried one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from .. import clock
from ..context import caused_by
from ..errors import EventError
from ..inbox import Admission, Arrival, Inbox, KnownBy
from ..redaction import described, redacted, text_of
from ..transport import Message
from .box import Box
from .failure import Failure, classify
from .handling import Effects, EventsFailedError, Incoming, Reader
from .progress import Progress
from .report import ConsumerReport
from .spilling import Spiller, Stored, Trouble, hash_of_line
from .window import Line, Work

GATE_SECONDS, GATED_AGAIN = 1.0, 10.0
"""How long messages of a line wait in memory for the last spilled ones of it to take effect, and how often. Else they
are spilled, too: a line that gets messages all the time must neither go by its lane for ever, nor wait here for ever.
"""
_GATED_KEPT = 10_000
_Admissions = dict[Work, Admission | None]
"""What the inbox says of each; None: it was spilled behind others."""


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

    @property
    def unsettled(self) -> set[Line]:
        """The lines of which something is not settled."""
        return {work.line for work in self.left}.union(work.line for work, _ in self.failed)


class _SomeFailedError(Exception):
    """These messages have failed by themselves, or, where there is None, wait for spilled ones of their lines."""

    def __init__(self, errors: Mapping[Work, Exception | Trouble | None]) -> None:
        super().__init__(errors)
        self.errors = errors


class Processor:
    """Lets the messages of one consumer take effect. May be asked several times at once, for different lines."""

    def __init__(
        self,
        name: str,
        box: Box,
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
        self._box = box
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

    @property
    def knows_failures(self) -> bool:
        """Whether several messages of which some fail cost hardly more than those alone."""
        return self._effects.names_failures

    async def process(self, works: Sequence[Work]) -> Processed:
        """Let messages of one tenant take effect, in order per line. All of them were spilled, or none."""
        if not works:
            return Processed()
        doubtful = {work.line for work in works if work.tries or self._may_wait(work)}
        if doubtful and (others := [work for work in works if work.line not in doubtful]):
            # They must neither fail nor wait with these. What is spilled behind others does neither.
            return await self._in_turn((others, [work for work in works if work.line in doubtful]))
        return await self._try(works)

    async def _try(self, works: Sequence[Work]) -> Processed:
        begun, task = self._begun, asyncio.current_task()
        try:
            return await self._together(works)
        except _SomeFailedError as some:
            return await self._without(works, some.errors)
        except BaseException as error:
            if _is_for_us(error, task):
                raise
            is_away = self._begun == begun and classify(error) is Failure.TRANSIENT
            if is_away:
                return Processed(left=[*works], away=self._trouble(works[0], error).reason)
            if len(works) > 1:
                middle = len(works) // 2
                return await self._in_turn((works[:middle], works[middle:]))
            return Processed(failed=[(works[0], self._failed(works[0], error))])

    async def _without(self, works: Sequence[Work], errors: Mapping[Work, Exception | Trouble | None]) -> Processed:
        """Let all go on but those that have failed or wait, and what comes behind them."""
        others, rest = parted(works, errors)
        processed = await self.process(others)
        stopped = processed.unsettled
        for work in rest:
            if work.line in stopped or processed.away:
                processed.left.append(work)
                continue
            stopped.add(work.line)
            if (error := errors[work]) is not None:
                processed.failed.append((work, self._failed(work, error)))
            else:
                processed.left.append(work)
                processed.gated.append(work)
        return processed

    async def _in_turn(self, parts: Sequence[Sequence[Work]]) -> Processed:
        """Each part by itself. What comes behind a message that was not settled waits, and so does all the rest if the
        database is away, or the tenant is held.
        """
        processed, stopped = Processed(), set[Line]()
        for part in parts:
            waits = bool(processed.away) or self._progress.is_held(part[0].tenant)
            free = [work for work in part if not waits and work.line not in stopped]
            processed.left += [work for work in part if waits or work.line in stopped]
            done = await self.process(free)
            stopped |= done.unsettled
            processed.add(done)
        return processed

    async def _together(self, works: Sequence[Work]) -> Processed:
        """All that can be read in one transaction, or nothing."""
        processed, stopped = Processed(), set[Line]()
        opened: dict[Work, Incoming] = {}
        for work in works:
            if work.line in stopped:
                processed.left.append(work)
                continue
            found = self._open(work)
            if isinstance(found, Incoming):
                opened[work] = found
            elif found is not None:
                processed.failed.append((work, found))
                if self._parks:
                    stopped.add(work.line)
            else:
                if work.claim is not None:
                    await self._box.apart(self._redeem_unwanted, work)
                processed.settled.append(work)
        if opened:
            processed.add(await self._take_effect(opened))
        return processed

    async def _take_effect(self, opened: Mapping[Work, Incoming]) -> Processed:
        first = next(iter(opened))
        began = clock.current().monotonic()
        alone = caused_by(first.message.headers) if len(opened) == 1 else nullcontext()
        async with self._box.turn:
            with alone, self._naming_timeout():  # what COMMIT itself brings about is caused by the message, too
                admissions = await self._commit(opened)
        ended = clock.current().monotonic()
        processed, new, duplicates = Processed(), list[Incoming](), 0
        for work, admission in admissions.items():
            if admission is Admission.ALTERED:
                processed.failed.append((work, Trouble.of(work.message, opened[work]).altered()))
                continue
            processed.settled.append(work)
            if admission is None:
                processed.behind.append(work)
            elif admission is Admission.NEW:
                new.append(opened[work])
            else:
                duplicates += 1
        self._report.handled(new, duplicates, ended - began)
        self._report.left_out(self._effects.left_out())
        if new:
            self._progress.succeeded(first.tenant)
        return processed

    @contextmanager
    def _naming_timeout(self) -> Iterator[None]:
        """Give a time-out of the unit of work a text: it would have none."""
        now = asyncio.get_running_loop().time
        began = now()
        try:
            yield
        except TimeoutError as error:
            if not error.args and now() - began >= self._timeout:
                error.args = (f"the handler did not finish within {self._timeout:g} s (timeout)",)
            raise

    async def _commit(self, opened: Mapping[Work, Incoming]) -> _Admissions:
        """The row of the inbox first, or the claim of what was spilled, then the effect: one is there, or gone, if and
        only if the other is there.
        """
        first = next(iter(opened))
        admit: Callable[..., tuple[_Admissions, Stored | None]]
        admit = self._admit if first.claim is None else self._redeem_all
        async with self._box.unit_of_work(tenant=first.tenant, timeout=self._timeout, new_transaction=True) as uow:
            admissions, stored = await self._box.within(uow, admit, opened)
            new = {work: incoming for work, incoming in opened.items() if admissions[work] is Admission.NEW}
            self._begun += 1
            try:
                with self._report.processing([*new.values()]), uow.sealed():
                    await self._effects.apply(uow, [*new.values()])
            except EventsFailedError as several:
                works = [*new]
                raise _SomeFailedError({works[place]: it for place, it in several.errors.items()}) from several
        if stored is not None and self._spiller is not None:
            self._spiller.committed(stored, behind=True)
        return admissions

    # -- before the effect, in its transaction -------------------------------------------------------------------------

    def _admit(
        self, connection: Connection, opened: Mapping[Work, Incoming]
    ) -> tuple[dict[Work, Admission | None], Any]:
        """What the inbox says of each, and what was written to spill those whose lines are gated."""
        number, arrivals = self._identify(connection), [incoming.arrival for incoming in opened.values()]
        lines: dict[int, Line] = {}

        def hashes() -> Collection[int]:
            lines.update((hash_of_line(work.message), work.line) for work in opened if work.message.key)
            return lines

        gates: dict[str, Any] = {} if self._spiller is None else {"claims": self._spiller.claims, "lines": hashes}
        tenant = next(iter(opened)).tenant
        admitted = self._inbox.admit(connection, number, tenant, arrivals, **gates)
        admissions: _Admissions = dict(zip(opened, admitted.admissions, strict=True))
        if self._parks and Admission.ALTERED in admitted.admissions:
            changed = [work for work in opened if admissions[work] is Admission.ALTERED]
            raise _SomeFailedError({work: Trouble.of(work.message, opened[work]).altered() for work in changed})
        gated = {lines[line] for line in admitted.gated}
        if self._gated:
            for line in {work.line for work in opened} - gated:
                self._gated.pop(line, None)
        behind = [work for work in opened if work.line in gated and admissions[work] is Admission.NEW] if gated else []
        if self._spiller is None or not behind:
            return admissions, None
        if waits := self._lines_that_wait({work.line for work in behind}):
            raise _SomeFailedError(dict.fromkeys(work for work in behind if work.line in waits))
        troubles = [Trouble.of(work.message, opened[work]) for work in behind]
        return admissions | dict.fromkeys(behind), self._spiller.write(connection, troubles)

    def _redeem_all(self, connection: Connection, opened: Mapping[Work, Incoming]) -> tuple[_Admissions, None]:
        """Delete the claims: what has none has taken effect before."""
        number = self._identify(connection)
        admissions: _Admissions = {}
        refusals = dict[Work, Trouble]()
        for work, incoming in opened.items():
            is_there, refused = self._redeem(connection, work)
            admissions[work] = Admission.NEW if is_there else Admission.DUPLICATE
            if is_there and refused is None and work.known_by is KnownBy.CONTENT:
                # It could not be read when it came, and its event may have come again since.
                arrival = incoming.arrival
                [admissions[work]] = self._inbox.admit(connection, number, work.tenant, [arrival]).admissions
                if admissions[work] is Admission.ALTERED:
                    refused = arrival.why_altered
            if refused is not None:
                refusals[work] = self._unreadable(work.message, work.refused_as or Failure.POISON, refused)
        if refusals:
            raise _SomeFailedError(refusals)
        return admissions, None

    def _redeem(self, connection: Connection, work: Work) -> tuple[bool, str | None]:
        if self._spiller is None or work.claim is None:
            raise ValueError("this consumer has spilled nothing")
        self._begun += 1  # the database is there: a claim that another transaction has locked concerns its line alone
        return self._inbox.redeem(connection, self._spiller.claims, work.claim)

    def _redeem_unwanted(self, connection: Connection, work: Work) -> None:
        self._identify(connection)
        self._redeem(connection, work)

    # -- lines that are gated ------------------------------------------------------------------------------------------

    def spilled(self, works: Iterable[Work]) -> None:
        """What comes in their lines has to wait: in memory, if they were not tried and may soon take effect."""
        now = clock.current().monotonic()
        for work in works:
            self._gated.setdefault(work.line, now - GATE_SECONDS if work.tries else now)
        self._forget_gates()

    def _forget_gates(self) -> None:
        """Not one by one from the front: a dict looks at all that were deleted there before."""
        if len(self._gated) > 2 * _GATED_KEPT:
            self._gated = dict([*self._gated.items()][-_GATED_KEPT:])

    def _may_wait(self, work: Work) -> bool:
        """Whether a message may have to wait in memory for spilled ones of its line."""
        since = self._gated.get(work.line) if work.claim is None else None
        return since is not None and not GATE_SECONDS <= clock.current().monotonic() - since <= GATED_AGAIN

    def _lines_that_wait(self, lines: Collection[Line]) -> set[Line]:
        now = clock.current().monotonic()
        for line in lines:
            since = self._gated.pop(line, now)
            self._gated[line] = now if now - since > GATED_AGAIN else since
        waits = {line for line in lines if now - self._gated[line] < GATE_SECONDS}
        self._forget_gates()
        return waits

    # -- what is in a message ------------------------------------------------------------------------------------------

    def unreadable(self, work: Work) -> Trouble | None:
        """Why a message cannot be read; None if it can, or if that has to be tried."""
        try:
            found = self._open(work)
        except Exception:  # by code of the event's own class
            return None
        return found if isinstance(found, Trouble) else None

    def untried(self, work: Work) -> Trouble | None:
        """What is to be stored of a message that was not tried; None if no handler wants it."""
        try:
            found = self._open(work)
        except Exception as error:  # by code of the event's own class
            return self._trouble(work, error)
        return Trouble.of(work.message, found) if isinstance(found, Incoming) else found

    def _open(self, work: Work) -> Incoming | Trouble | None:
        """The event in it; None if no handler wants it."""
        try:
            return self._reader.read(work.message, work.message.attempts + work.tries + 1)
        except EventError as error:
            self._report.failed(work.message, Failure.POISON, redacted(str(error)), error)
            return self._unreadable(work.message, Failure.POISON, redacted(str(error)))

    def _failed(self, work: Work, error: BaseException | Trouble) -> Trouble:
        trouble = error if isinstance(error, Trouble) else self._trouble(work, error)
        if not trouble.is_final:
            self._progress.failed(work.tenant, work.line)
        return trouble

    def _trouble(self, work: Work, error: BaseException) -> Trouble:
        failure = classify(error)
        reason = redacted(text_of(error)) if failure is Failure.BUSINESS else described(error)
        self._report.failed(work.message, failure, reason, error)
        try:
            incoming = self._reader.read(work.message)
        except Exception:  # it fails while it is built, by code of the event's own class
            incoming = None
        if incoming is None:
            return self._unreadable(work.message, failure, reason)
        return Trouble.of(work.message, incoming)._replace(failure=failure, reason=reason)

    def _unreadable(self, message: Message, failure: Failure, reason: str) -> Trouble:
        try:
            tenant = self._reader.tenant_of(message)
        except EventError:  # nobody's: what a tenant has in the inbox is not for strangers to fill
            tenant = None
        return Trouble(message, Arrival.of_content(message), tenant, KnownBy.CONTENT, failure, reason)


def parted(works: Sequence[Work], failed: Collection[Work]) -> tuple[list[Work], list[Work]]:
    """Those in front of all that have failed in their line, and the others."""
    parts: tuple[list[Work], list[Work]] = [], []
    stopped = set[Line]()
    for work in works:
        if work in failed:
            stopped.add(work.line)
        parts[work.line in stopped].append(work)
    return parts


def _is_for_us(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Whether we, who are this task, are told to stop. Anything else, even SystemExit, was raised by a handler, and is
    an error of its message: a process that ended by it would meet the same message again.
    """
    try:
        is_alive = asyncio.current_task() is task
    except RuntimeError:  # no loop runs
        is_alive = False
    if not is_alive:  # our loop has ended before us, and what is left of us is thrown away
        return True
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt)
