"""Faults between a message and its acknowledgement, for tests of handlers.

They are injected where consumers receive messages, so they are the same for every source.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from uuid import UUID

from ..consumers.handling import Effects, Incoming, LeftOut
from ..consumers.processing import Processed, Processor
from ..consumers.spilling import Trouble
from ..consumers.window import Work
from ..event import EventType
from ..unit_of_work import UnitOfWork


class Faults:
    """The faults to inject."""

    def __init__(self) -> None:
        self.copies = 0
        """Number of redeliveries of every message."""
        self.before_ack = 0
        """Number of batches that are redelivered because the process dies before their acknowledgement."""
        self.before_commit = 0
        """Number of transactions during which the process dies."""

    def repeats(self) -> int:
        """Number of redeliveries of the messages just processed."""
        crash = self.before_ack > 0
        self.before_ack -= crash
        return self.copies + crash

    def dies(self) -> bool:
        """Whether the process dies before this COMMIT."""
        dies = self.before_commit > 0
        self.before_commit -= dies
        return dies


class Failures:
    """Handlers that have failed and not succeeded since, with their exceptions, so that a test shows their origin."""

    def __init__(self) -> None:
        self.open: dict[tuple[str, str], tuple[str, BaseException | None]] = {}
        """Text and exception, by handler and event."""

    def failed(self, handler: str, event_id: str, said: str, error: BaseException | None) -> None:
        """Record a failed attempt."""
        self.open[handler, event_id] = said, error

    def settled(self, handler: str, event_id: str) -> None:
        """Remove a message that was settled."""
        self.open.pop((handler, event_id), None)


class FaultyEffects:
    """`Effects` that may be rolled back at the last moment, and that record exceptions."""

    def __init__(self, effects: Effects, faults: Faults) -> None:
        self._effects = effects
        self._faults = faults
        self.raised: dict[UUID, BaseException] = {}

    @property
    def kinds(self) -> Collection[EventType]:
        return self._effects.kinds

    @property
    def names_failures(self) -> bool:
        return self._effects.names_failures

    def left_out(self) -> LeftOut:
        return self._effects.left_out()

    async def apply(self, uow: UnitOfWork, incoming: Sequence[Incoming]) -> None:
        try:
            await self._effects.apply(uow, incoming)
        except Exception as error:
            self.raised |= {each.context.event_id: error for each in incoming}
            raise
        if incoming and self._faults.dies():
            raise ConnectionError("the test lets the process die before COMMIT")


class FaultyProcessor(Processor):
    """A `Processor` that receives processed messages again."""

    def __init__(
        self, consumer: str, processor: Processor, effects: FaultyEffects, faults: Faults, failures: Failures
    ) -> None:
        vars(self).update(vars(processor))
        self._consumer = consumer
        self._processor = processor
        self._faulty = effects
        self._faults = faults
        self._failures = failures

    async def process(self, works: Sequence[Work]) -> Processed:
        self._faulty.raised.clear()
        processed = await self._processor.process(works)
        for work in processed.settled:
            self._failures.settled(self._consumer, _event_id(work))
        for work, trouble in processed.failed:
            self._note(work, trouble)
        if again := [work for work in processed.settled if work.claim is None]:
            for _ in range(self._faults.repeats()):
                for work in again:
                    await self._processor.process([work])
        return processed

    def _note(self, work: Work, trouble: Trouble) -> None:
        if trouble.is_final:
            self._failures.settled(self._consumer, _event_id(work))
            return
        raised = next((it for found, it in self._faulty.raised.items() if str(found) == _event_id(work)), None)
        self._failures.failed(self._consumer, _event_id(work), trouble.reason, raised)


def _event_id(work: Work) -> str:
    return work.message.headers.get("event_id", "")
