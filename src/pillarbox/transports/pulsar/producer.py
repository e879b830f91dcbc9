"""A producer: sends for one lane to one physical topic.

Its access mode is shared, with a unique name, which the broker gives to one connection at a time: a holder that answers
keeps it, a dead one frees it at once, a frozen one after five seconds. The exclusive modes are per topic, so two lanes
on one topic would keep fencing each other out.
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
"""The ledger of a message that was not stored because its number was used before."""
SILENCE = 60.0
"""Seconds without receipts after which a broker is given up. One without bookies reports an error after thirty."""
_Type = wire.Command.Type


@dataclass(slots=True)
class Answers:
    """The broker's answers about entries: the indexes of those that it stored, had already, or refused."""

    stored: list[int] = field(default_factory=list)
    duplicates: list[int] = field(default_factory=list)
    refused: dict[int, BrokerError] = field(default_factory=dict)
    lost: str | None = None
    """Why there will be no more answers."""


class Producer:
    """Made by `open`. A lost producer stays lost; the lane's owner opens another one."""

    def __init__(self, connection: Connection, topic: str, name: str | None) -> None:
        self.topic = topic
        self.name = name or ""
        self.last = -1
        """The highest number of this name on the topic: first as the broker reports it, then as counted here."""
        self.used = asyncio.get_running_loop().time()
        """Time of its last use."""
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
        """Open a producer for the topic. Without a name, the broker assigns a unique one."""
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
            self.close()  # the broker may have created it anyway
            raise
        self.name, self.last = success.producer_name, success.last_sequence_id
        return self

    async def publish(self, entries: Sequence[Entry], *, largest: int) -> Answers:
        """Send entries and wait for their answers.

        An entry that is larger than the largest stored one is sent alone. It may be refused, and a number stored behind
        a refused one would hide it from a successor. For the same reason, nothing is sent after an entry that was not
        stored.
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
            self.close("we did not wait for its answers")  # without all answers, the last stored number is unknown
            raise
        finally:
            self._answered = None
        answers.lost = answers.lost or self.lost_because
        return answers.lost is None and not answers.refused

    def close(self, why: str = "it was closed") -> None:
        """Release the name without waiting for the broker; see `closed`."""
        if self.lost_because is None:
            self._connection.leave(self._id)
            self.lost(why)
            self._closing = asyncio.get_running_loop().create_task(self._close())

    @property
    def is_gone(self) -> bool:
        """Whether `closed` has nothing to wait for."""
        return self.lost_because is not None and (self._closing is None or self._closing.done())

    async def closed(self) -> None:
        """Wait until the broker has released the name, or is unavailable."""
        if self._closing is not None:
            await asyncio.wait({self._closing})

    async def _close(self) -> None:
        with suppress(OSError):  # an unavailable broker has forgotten it anyway
            await self._connection.ask(
                _Type.CLOSE_PRODUCER,
                lambda number: wire.Command(close_producer=wire.CloseProducer(producer_id=self._id, request_id=number)),
                patience=5.0,
            )

    # -- answers of the broker -----------------------------------------------------------------------------------------

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
    """Entries that may be in flight together."""
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
        if not under_way.isdisjoint(keys):  # if the earlier entry were refused, this one would overtake it
            yield range(start, index)
            start = index
            under_way.clear()
        under_way |= keys
    if start < len(entries):
        yield range(start, len(entries))
