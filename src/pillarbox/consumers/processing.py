"""What becomes of a message: its effect once, a letter, or another attempt.

One transaction holds the row of the inbox, the effect, and the events that the effect raises. Nothing is acknowledged
before it has committed; whatever crashes in between, the message comes again and the inbox knows it. Several messages
share a transaction where that is asked for: if it fails, all of it is undone and they are tried one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from uuid import UUID

from msgspec import structs
from sqlalchemy import Connection

from .. import clock
from ..context import caused_by
from ..errors import (
    BeingSwappedError,
    ConfigurationError,
    EventError,
    HeaderError,
    StaleLetterError,
    StoreError,
    UnknownEventError,
)
from ..inbox import (
    Admission,
    Arrival,
    Inbox,
    Letter,
    LetterFilter,
    LetterKind,
    Letters,
    LetterState,
    Redriven,
    digest_of,
)
from ..outbox import Delivery, count_rows
from ..redaction import redacted
from ..retry import RetryPolicy
from ..transport import Message
from ..unit_of_work import UnitOfWork
from .dead_letters import DeadLetterRoute
from .desk import Line, Work
from .failure import Failure, classify
from .handling import Effects, Incoming
from .home import Home
from .naming import VERSIONS, arrival_in, arrival_of, by_content, identity, known_as, letter_about
from .reading import Reader
from .report import ConsumerReport

OUTAGE = 3
"""So many failures in a row that are nobody's fault, and the rest of a batch is not tried now."""
RECENT = 60.0
"""Seconds after which a message that has failed is no more taken to wait here: it may have gone to another process."""
REMEMBERED = 10_000
"""Messages that fail, and whose attempts are counted."""


@dataclass(slots=True)
class Dealt:
    """What has become of a batch."""

    settled: list[Work] = field(default_factory=list)
    """These may be acknowledged."""
    left: list[Work] = field(default_factory=list)
    """These are to be tried again, in this order per line."""
    delays: dict[Line, float] = field(default_factory=dict)
    """How long their lines should wait. Those that are not here were not tried, and may go on at once."""
    reasons: dict[Line, str] = field(default_factory=dict)
    """Why those lines wait whose messages have failed."""
    away: str = ""
    """Why nothing at all can be dealt with now: no message has failed, and no line is to blame."""

    def add(self, other: Dealt) -> None:
        """And this."""
        self.settled += other.settled
        self.left += other.left
        self.delays |= other.delays
        self.reasons |= other.reasons
        self.away = self.away or other.away


@dataclass(slots=True)
class _Trouble:
    """A message that fails again and again."""

    since: float
    attempts: int = 0
    tried_at: float = 0.0
    told: bool = False


class Processor:
    """Deals with the messages of one consumer. May be asked several times at once, for different lines."""

    def __init__(
        self,
        name: str,
        home: Home,
        effects: Effects,
        *,
        reader: Reader,
        inbox: Inbox,
        letters: Letters,
        report: ConsumerReport,
        identify: Callable[[Connection], int],
        retry: RetryPolicy,
        timeout: float,
        patience: float,
        dead_letters: DeadLetterRoute | None,
    ) -> None:
        self._name = name
        self._home = home
        self._effects = effects
        self._reader = reader
        self._inbox = inbox
        self._letters = letters
        self._report = report
        self._retry = retry
        self._timeout = timeout
        self._patience = patience
        self._identify = identify
        self._dead_letters = dead_letters
        self._troubles: dict[tuple[str | None, UUID], _Trouble] = {}
        self._succeeded_at = float("-inf")
        self._waits_since: dict[str | None, float] = {}
        """Since when something of a tenant waits, and nothing of it has been dealt with."""
        self._begun = 0
        """How often the database has let handlers begin."""

    # -- messages ------------------------------------------------------------------------------------------------------

    async def deal(self, works: Sequence[Work]) -> Dealt:
        """Deal with messages of one tenant, in order per line."""
        begun = self._begun
        try:
            await self._together(works)
        except (Exception, asyncio.CancelledError) as error:
            if _is_for_us(error):
                raise
            if isinstance(error, BeingSwappedError):
                return self._wait_for_swap(works, error)
            if len(works) > 1:
                return await self._one_by_one(works if self._begun == begun else self._untried_first(works))
            return await self._after_failure(works[0], error, begun=self._begun > begun)
        return Dealt([*works])

    def standstill(self, at_hand: Iterable[Work]) -> dict[str | None, float]:
        """The tenants of which nothing was dealt with for longer than our patience, though something waits: what is at
        hand, and what has failed here of late. Each with the seconds, as far as we know since we were last asked.
        """
        now = clock.current().monotonic()
        failing = {tenant for (tenant, _), it in self._troubles.items() if now - it.tried_at < RECENT}
        waiting = failing | {work.tenant for work in at_hand}
        self._waits_since = {tenant: self._waits_since.get(tenant, now) for tenant in waiting}
        return {tenant: now - since for tenant, since in self._waits_since.items() if now - since >= self._patience}

    async def _one_by_one(self, works: Sequence[Work]) -> Dealt:
        """After an `OUTAGE` the rest waits, too. But if handlers have begun, the database is there, and messages that
        were never tried do not wait: nothing speaks against them.
        """
        dealt, in_a_row, begun = Dealt(), 0, self._begun
        for work in works:
            if work.line in dealt.delays or in_a_row >= OUTAGE:
                dealt.left.append(work)
                continue
            one = await self.deal([work])
            in_a_row = in_a_row + 1 if one.left else 0
            dealt.add(one)
        longest, away = max(dealt.delays.values(), default=0.0), self._begun == begun
        for line, first in {work.line: work for work in reversed(dealt.left)}.items():
            if away or self._attempts(first):
                dealt.delays.setdefault(line, longest)
        return dealt

    def _untried_first(self, works: Sequence[Work]) -> list[Work]:
        """Lines whose messages have failed before come last: the others must not wait for them."""
        failing = {work.line for work in works if self._attempts(work)}
        return sorted(works, key=lambda work: work.line in failing)

    async def _together(self, works: Sequence[Work]) -> None:
        """All in one transaction, or nothing."""
        opened = [*map(self._open, works)]
        if unfit := [found for found in opened if isinstance(found, _Unfit)]:
            await self._park(unfit)
        if readable := [found for found in opened if isinstance(found, _Readable)]:
            await self._take_effect(readable)
        for work in works:
            self._forget(work)
        self._waits_since.pop(works[0].tenant, None)

    async def _take_effect(self, opened: Sequence[_Readable]) -> None:
        tenant = opened[0].work.tenant
        began = clock.current().monotonic()
        alone = caused_by(opened[0].work.message.headers) if len(opened) == 1 else nullcontext()
        with alone:  # what COMMIT itself brings about is caused by the message, too
            new, admissions = await self._commit(tenant, opened)
        ended = clock.current().monotonic()
        if new:  # a duplicate shows nothing of handlers
            self._succeeded_at = ended
        self._report.handled(new, len(opened) - len(new), ended - began)
        self._report.left_out(self._effects.left_out())
        if altered := [found for found, it in zip(opened, admissions, strict=True) if it is Admission.ALTERED]:
            await self._park([found.quarantined() for found in altered])

    async def _commit(
        self, tenant: str | None, opened: Sequence[_Readable]
    ) -> tuple[Sequence[Incoming], Sequence[Admission]]:
        """The row of the inbox first, then the effect: one is there if and only if the other is."""
        async with self._home.unit_of_work(tenant=tenant, timeout=self._timeout, new_transaction=True) as uow:
            admissions = await self._home.within(uow, self._admit, tenant, [found.arrival for found in opened])
            new = [found.incoming for found, it in zip(opened, admissions, strict=True) if it is Admission.NEW]
            self._begun += 1
            with self._report.processing(new), uow.sealed():
                await self._effects.apply(uow, new)
        return new, admissions

    def _admit(self, connection: Connection, tenant: str | None, arrivals: Sequence[Arrival]) -> Sequence[Admission]:
        number = self._identify(connection)
        admissions = [*self._inbox.admit(connection, number, tenant, arrivals)]
        others = [place for place, it in enumerate(admissions) if it is Admission.OTHER_VERSION]
        if others and self._letters.count(connection, LetterFilter(self._name, kinds=(LetterKind.UNKNOWN,))):
            for place in others:
                if self._supersedes_letter(connection, number, tenant, arrivals[place].event_id):
                    [admissions[place]] = self._inbox.admit(connection, number, tenant, [arrivals[place]])
        return admissions

    def _supersedes_letter(self, connection: Connection, number: int, tenant: str | None, event_id: UUID) -> bool:
        """Whether the event came first in a version that nobody knew here, and the letter about that was still open.
        It is closed, and the inbox forgets that version.
        """
        wanted = LetterFilter(self._name, kinds=(LetterKind.UNKNOWN,), event_id=event_id)
        for each in self._letters.find(connection, wanted):
            letter = self._letters.take(connection, each.id) if each.tenant == tenant else None
            if letter is None or letter.kind is not LetterKind.UNKNOWN:
                continue
            # Another message of that name may have taken effect, and this letter be about one that was not like it.
            first = Arrival(event_id, letter.schema_version, digest_of(letter.message.body))
            if self._inbox.forget(connection, number, tenant, first):
                return self._letters.close(connection, letter.id, LetterState.SUPERSEDED)
        return False

    def _open(self, work: Work) -> _Readable | _Unfit | None:
        """What is in it; None if nobody wants it."""
        message = work.message
        try:
            incoming = self._reader.read(message, self._attempts(work) + 1)
        except UnknownEventError as error:
            return self._unfit(work, LetterKind.UNKNOWN, str(error))
        except EventError as error:
            return self._unfit(work, LetterKind.POISON, str(error))
        if incoming is None:
            return None
        return _Readable(work, arrival_in(incoming), incoming)

    def _unfit(self, work: Work, kind: LetterKind, reason: str) -> _Unfit:
        try:
            tenant = self._reader.tenant_of(work.message)
        except HeaderError:  # nobody's: what a tenant has in the inbox is not for strangers to fill
            tenant = None
        # What cannot be read is known by what stands outside of it, whoever may read it one day.
        arrival = arrival_of(work.message) if kind is LetterKind.UNKNOWN else self._arrival(work.message)
        return _Unfit(work, tenant, arrival, kind, reason)

    def _arrival(self, message: Message) -> Arrival:
        """By the name under which it would be known if it had taken effect, even if no event can be made of it."""
        try:
            content = self._reader.decode(message)
        except Exception:  # by a codec of anybody's
            return arrival_of(message)
        version = content.version if abs(content.version) < VERSIONS else 0
        return Arrival(known_as(content.event_id), version, digest_of(message.body))

    # -- failures ------------------------------------------------------------------------------------------------------

    async def _after_failure(self, work: Work, error: BaseException, *, begun: bool) -> Dealt:
        failure = classify(error)
        reason = f"{type(error).__name__}: {error}"
        kind: LetterKind | None = None
        if failure is Failure.BUSINESS:
            kind, reason = LetterKind.REJECTED, str(error)
        elif failure is Failure.POISON:
            kind = LetterKind.POISON
        self._report.failed(work.message, failure, redacted(reason), error)
        trouble = self._trouble(work)
        if kind is None and failure is Failure.UNKNOWN and self._is_its_own_fault(trouble):
            kind = LetterKind.POISON
            reason = f"given up after {trouble.attempts} attempts in {self._patience:g} s: {reason}"
        if kind is not None:
            try:
                await self._park([self._unfit(work, kind, reason)])
            except Exception as problem:  # the letter cannot be written now: so the message is kept
                reason = f"{type(problem).__name__}: {problem}"
            else:
                self._forget(work)
                self._waits_since.pop(work.tenant, None)
                return Dealt([work])
        self._tell_if_long(work, trouble, reason)
        dealt = Dealt(left=[work], delays={work.line: self._retry.delay(trouble.attempts)})
        if failure is Failure.TRANSIENT and not begun:
            dealt.away = redacted(reason)  # the database did not even let the handler begin
        else:
            dealt.reasons[work.line] = redacted(reason)
        return dealt

    def _wait_for_swap(self, works: Sequence[Work], error: BeingSwappedError) -> Dealt:
        """To try them one by one would change nothing, and to reject them would say that they are at fault."""
        first, reason = works[0], redacted(f"{type(error).__name__}: {error}")
        self._report.failed(first.message, classify(error), reason, error)
        trouble = self._trouble(first)
        self._tell_if_long(first, trouble, reason)
        delay = self._retry.delay(trouble.attempts)
        return Dealt(left=[*works], delays={work.line: delay for work in works}, away=reason)

    def _is_its_own_fault(self, trouble: _Trouble) -> bool:
        """It has failed for too long, while others succeed. If nothing does, it is not the message."""
        late = clock.current().monotonic() - trouble.since >= self._patience
        return late and self._succeeded_at > trouble.since

    def _tell_if_long(self, work: Work, trouble: _Trouble, reason: str) -> None:
        waited = clock.current().monotonic() - trouble.since
        if waited >= self._patience and not trouble.told:
            trouble.told = True
            self._report.stuck(work.message, trouble.attempts, waited, redacted(reason))

    def _trouble(self, work: Work) -> _Trouble:
        key = identity(work.message)
        trouble = self._troubles.get(key)
        if trouble is None:
            if len(self._troubles) >= REMEMBERED:  # they went elsewhere since, or there would not be so many
                del self._troubles[next(iter(self._troubles))]
            trouble = self._troubles[key] = _Trouble(clock.current().monotonic())
        trouble.attempts += 1
        trouble.tried_at = clock.current().monotonic()
        return trouble

    def _attempts(self, work: Work) -> int:
        if not self._troubles:
            return 0
        trouble = self._troubles.get(identity(work.message))
        return 0 if trouble is None else trouble.attempts

    def _forget(self, work: Work) -> None:
        if self._troubles:
            self._troubles.pop(identity(work.message), None)

    # -- letters -------------------------------------------------------------------------------------------------------

    async def _park(self, unfit: Sequence[_Unfit]) -> None:
        """Write letters, each once, and what goes to the dead-letter topic, in one transaction."""
        written, deliveries, prepared = await self._home.apart(self._write_letters, unfit)
        if deliveries:
            self._home.posts.committed(count_rows(deliveries, {}), prepared)
        for letter in written:
            self._report.letter(letter)

    def _write_letters(
        self, connection: Connection, unfit: Sequence[_Unfit]
    ) -> tuple[list[Letter], list[Delivery], Any]:
        number = self._identify(connection)
        letters: list[Letter] = []
        for tenant in dict.fromkeys(found.tenant for found in unfit):
            theirs = [found for found in unfit if found.tenant == tenant]
            admissions = self._inbox.admit(connection, number, tenant, [found.arrival for found in theirs])
            new = [found for found, it in zip(theirs, admissions, strict=True) if it is Admission.NEW]
            altered = [found.renamed() for found, it in zip(theirs, admissions, strict=True) if it is Admission.ALTERED]
            again = self._inbox.admit(connection, number, tenant, [found.arrival for found in altered])
            new += [found for found, it in zip(altered, again, strict=True) if it is Admission.NEW]
            letters += [found.letter(self._name, self._attempts(found.work)) for found in new]
        if not letters:
            return [], [], None
        self._letters.write(connection, letters)
        deliveries = [] if self._dead_letters is None else self._dead_letters.deliveries(letters)
        if not deliveries:
            return letters, [], None
        prepared = self._home.posts.prepare(connection)
        self._home.posts.append(connection, deliveries)
        return letters, deliveries, prepared

    async def redrive(self, letter_id: int) -> Redriven:
        """Try an open letter of this consumer once more: its effect and its closing are one transaction, so of two
        people who ask for it one succeeds. What the handler raises is raised.
        """
        found = await self._home.apart(self._letters.find, LetterFilter(ids=(letter_id,), states=()))
        if not found:
            return Redriven.GONE
        letter = found[0]
        if letter.consumer != self._name:
            raise StoreError(f"letter {letter_id} is one of consumer {letter.consumer}, and not of {self._name}")
        if letter.state is not LetterState.OPEN:
            return Redriven.GONE
        if letter.kind is LetterKind.HELD:
            raise StoreError(f"letter {letter_id} waits for events before it, and is applied when they have come")
        try:
            async with self._home.unit_of_work(
                tenant=letter.tenant, timeout=self._timeout, new_transaction=True
            ) as uow:
                number, taken = await self._home.within(uow, self._take, letter_id)
                if taken is None:
                    return Redriven.GONE
                incoming = self._read_letter(taken)
                superseded = await self._home.within(uow, self._has_come_again, number, taken, incoming)
                if not superseded:
                    await self._apply_late(uow, incoming)
                state = LetterState.SUPERSEDED if superseded else LetterState.REDRIVEN
                await self._home.within(uow, self._letters.close, letter_id, state)
        except Exception as error:
            kind = LetterKind.REJECTED if classify(error) is Failure.BUSINESS else letter.kind
            reason = str(error) if kind is LetterKind.REJECTED else f"{type(error).__name__}: {error}"
            await self._home.apart(self._letters.failed, letter_id, kind, redacted(reason))
            raise
        if superseded:
            self._report.handled((), 1, 0.0)
            return Redriven.SUPERSEDED
        self._report.redriven(incoming)
        return Redriven.DONE

    async def _apply_late(self, uow: UnitOfWork, incoming: Incoming) -> None:
        with self._report.processing([incoming]), uow.sealed():
            stale = await self._effects.apply(uow, [incoming])
        if stale:
            raise StaleLetterError(
                f"a later event has changed the row in {self._name} already, so nothing was written: rebuild the "
                "projection, or discard the letter if nothing is missing"
            )

    def _take(self, connection: Connection, letter_id: int) -> tuple[int, Letter | None]:
        """Our number in the inbox, and the letter. A projection does not change places with another one before we have
        committed.
        """
        return self._identify(connection), self._letters.take(connection, letter_id)

    def _has_come_again(self, connection: Connection, number: int, letter: Letter, incoming: Incoming) -> bool:
        """Whether a message whose id could not be read when it became a letter has been dealt with since, under its id.
        If not, the inbox knows it by that from now on.
        """
        arrival = arrival_in(incoming)
        if letter.event_id == arrival.event_id:
            return False
        if letter.event_id is not None and letter.kind is not LetterKind.UNKNOWN:
            return False  # it could be read, and had the id that is in its body; a header has another one
        as_it_came = Arrival(arrival.event_id, arrival.schema_version, digest_of(letter.message.body))
        [admission] = self._inbox.admit(connection, number, letter.tenant, [as_it_came])
        if admission is Admission.ALTERED:
            raise StoreError(
                f"event {arrival.event_id} was dealt with in another body: find out who sends it, then discard this one"
            )
        return admission is not Admission.NEW

    def _read_letter(self, letter: Letter) -> Incoming:
        incoming = self._reader.read(_as_edited(letter), letter.attempts + 1)
        if incoming is None:
            raise ConfigurationError(f"consumer {self._name} has no handler for {letter.event_type!r}")
        return incoming


class _Readable(NamedTuple):
    """A message with an event in it that somebody wants."""

    work: Work
    arrival: Arrival
    incoming: Incoming

    def quarantined(self) -> _Unfit:
        """It says something else than the message of the same name."""
        known = self.arrival
        reason = f"event {known.event_id} was seen before in version {known.schema_version}, with another body"
        return _Unfit(self.work, self.work.tenant, by_content(known), LetterKind.ALTERED, reason)


@dataclass(slots=True, frozen=True)
class _Unfit:
    """A message that becomes a letter instead of an effect."""

    work: Work
    tenant: str | None
    """Whose it is; nobody's, if what it says of that cannot be believed."""
    arrival: Arrival
    kind: LetterKind
    reason: str

    def letter(self, consumer: str, attempts: int) -> Letter:
        """What is to be kept of it."""
        message = self.work.message
        found = letter_about(consumer, message, self.kind, self.reason, arrival=self.arrival, attempts=attempts)
        return structs.replace(found, tenant=self.tenant)

    def renamed(self) -> _Unfit:
        """The same, if another message has had its name."""
        return replace(self, arrival=by_content(self.arrival))


def _is_for_us(error: BaseException) -> bool:
    """Whether we are told to stop, and not a handler."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _as_edited(letter: Letter) -> Message:
    message = letter.message
    return message if letter.edited is None else Message(message.topic, message.key, letter.edited, message.headers)
