"""A producer: the voice of one lane on one physical topic.

It is a shared one with a name of its own, which the broker gives to one connection at a time: a holder that answers
keeps it, a dead one frees it at once, a frozen one after five seconds. The exclusive modes are per topic, so two lanes
on one topic would throw each other out for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from . import wire_pb2 as wire
from .connection import BrokerError, Connection
from .frames import Entry

_DUPLICATE = 2**64 - 1
"""The ledger of a message that was not stored, because its number was given before."""
SILENCE = 60.0
"""Seconds after which we stop waiting for a broker that is there, and says nothing of what it was sent. One whose
bookies are away says so after thirty."""
_Type = wire.Command.Type


@dataclass(slots=True)
class Answers:
    """What the broker said about entries: the indexes of those it stored, had already, or refused."""

    stored: list[int] = field(default_factory=list)
    duplicates: list[int] = field(default_factory=list)
    refused: dict[int, BrokerError] = field(default_factory=dict)
    lost: str | None = None
    """Why there will be no more answers."""


class Producer:
    """Made by `open`. Once it is lost it stays so; whoever owns the lane opens another one."""

    def __init__(self, connection: Connection, topic: str, name: str | None) -> None:
        self.topic = topic
        self.name = name or ""
        self.last = -1
        """The highest number that the topic was given under this name: first by the broker's word, then by ours."""
        self.used = asyncio.get_running_loop().time()
        """When somebody last asked for it."""
        self.lost_because: str | None = None
        self._connection = connection
        self._id = connection.join(self)
        self._open: dict[int, tuple[int, int]] = {}
        """Entries without an answer, by their first number: their index, and their last number."""
        self._answers = Answers()
        self._answered: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, connection: Connection, topic: str, name: str | None, *, patience: float) -> Producer:
        """Ask the broker for the topic. Without a name the broker makes one up, which nobody else has."""
        self = cls(connection, topic, name)
        try:
            success: wire.ProducerSuccess = await connection.ask(
                _Type.PRODUCER,
                lambda number: wire.Command(
                    producer=wire.Producer(
                        topic=topic,
                        producer_id=self._id,
                        request_id=number,
                        producer_name=name,
                        user_provided_producer_name=name is not None,
                    )
                ),
                patience=patience,
            )
        except BaseException:
            self.close()  # the broker may have made it all the same
            raise
        self.name, self.last = success.producer_name, success.last_sequence_id
        return self

    async def publish(self, entries: Sequence[Entry], *, largest: int) -> Answers:
        """Send entries and wait for what becomes of them.

        An entry that is larger than the largest one that was ever stored goes alone: it is the one that may be refused,
        and what is stored behind a refused number would hide it from whoever takes over. For the same reason nothing is
        sent after an entry that was not stored.
        """
        answers = Answers()
        for chunk in _chunks(entries, largest):
            if not await self._publish(entries, chunk, answers):
                break
        return answers

    async def _publish(self, entries: Sequence[Entry], chunk: range, answers: Answers) -> bool:
        if self.lost_because is not None:
            answers.lost = self.lost_because
            return False
        self._answers = answers
        self._open = {entries[index].first: (index, entries[index].last) for index in chunk}
        answered = self._answered = asyncio.get_running_loop().create_future()
        try:
            for index in chunk:
                self._connection.write(entries[index].framed(self._id, self.name))
            while not answered.done():
                unanswered = len(self._open)
                await asyncio.wait({answered}, timeout=SILENCE)
                if len(self._open) == unanswered > 0:
                    self.close(f"the broker said nothing of what it was sent for {SILENCE:g} s")
        except BaseException:
            self.close("we did not wait for its answers")  # and so cannot tell any more what it has stored
            raise
        finally:
            self._answered = None
        answers.lost = answers.lost or self.lost_because
        return answers.lost is None and not answers.refused

    def close(self, why: str = "it was closed") -> None:
        """Give the name back. Only who needs it again waits for that: see `closed`."""
        if self.lost_because is None:
            self._connection.leave(self._id)
            self.lost(why)
            self._closing = asyncio.get_running_loop().create_task(self._close())

    @property
    def is_gone(self) -> bool:
        """Whether nobody has to wait for it any more."""
        return self.lost_because is not None and (self._closing is None or self._closing.done())

    async def closed(self) -> None:
        """Once the broker has taken the name back, or is not there to say so."""
        if self._closing is not None:
            await asyncio.wait({self._closing})

    async def _close(self) -> None:
        with suppress(OSError):  # a broker that is away has forgotten it anyhow
            await self._connection.ask(
                _Type.CLOSE_PRODUCER,
                lambda number: wire.Command(close_producer=wire.CloseProducer(producer_id=self._id, request_id=number)),
                patience=5.0,
            )

    # -- what the broker says ------------------------------------------------------------------------------------------

    def received(self, receipt: wire.SendReceipt) -> None:
        answered = self._open.pop(receipt.sequence_id, None)
        if answered is not None:
            index, last = answered
            duplicate = receipt.message_id.ledger_id == _DUPLICATE
            (self._answers.duplicates if duplicate else self._answers.stored).append(index)
            self.last = max(self.last, last)
            self._check_answered()

    def refused(self, error: wire.SendError) -> None:
        # A receipt names an entry by its first number, an error by its last.
        for first, (index, last) in self._open.items():
            if error.sequence_id in (first, last):
                del self._open[first]
                self._answers.refused[index] = BrokerError(error.error, error.message)
                self._check_answered()
                break

    def lost(self, why: str) -> None:
        if self.lost_because is None:
            self.lost_because = why
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _check_answered(self) -> None:
        if not self._open and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)


def _chunks(entries: Sequence[Entry], largest: int) -> Iterator[range]:
    """What may be on its way together."""
    start = 0
    under_way: set[str] = set()
    for index, entry in enumerate(entries):
        size = len(entry.payload)
        keys = {message.key for message in entry.messages} if entry.key is None else {entry.key}
        if size > largest:
            if start < index:
                yield range(start, index)
            yield range(index, index + 1)
            start, largest = index + 1, size
            under_way.clear()
            continue
        if not under_way.isdisjoint(keys):  # if the one before it were refused all the same, this one would overtake it
            yield range(start, index)
            start = index
            under_way.clear()
        under_way |= keys
    if start < len(entries):
        yield range(start, len(entries))
