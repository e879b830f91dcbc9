"""The way to the sink: a `Publisher` over one TCP connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from ...transport import Capabilities, Message, Outcome, Rejection, Verdict
from .sink import Post, Receipt, frame, read_frame

CAPABILITIES = Capabilities(max_body_bytes=2**31, max_messages=500)
"""The sink takes whatever fits into a frame."""


class SinkTransport:
    """Sends to the sink. All lanes share a connection; their requests follow each other without waiting for answers.

    ``unanswered`` is called when a request was sent and its answer is not waited for any more.
    """

    def __init__(self, port: int, relay: str, *, timeout: float, unanswered: Callable[[], None] = lambda: None) -> None:
        self._port = port
        self._relay = relay
        self._timeout = timeout
        self._unanswered = unanswered
        self._connecting = asyncio.Lock()
        self._connection: _Connection | None = None

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def preflight(self, message: Message) -> str | None:
        return None if "event_id" in message.headers else "the sink wants the header event_id"

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:  # noqa: ARG002  the port has them
        await self._connected()
        return {}

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:  # noqa: ARG002  the port has it
        try:
            connection = await self._connected()
        except (OSError, TimeoutError) as error:
            return Outcome((), unfinished=Verdict.UNAVAILABLE, reason=str(error) or "the sink does not answer")
        try:
            async with asyncio.timeout(self._timeout):
                receipt = await connection.request([_post(message) for message in messages])
        except (ConnectionError, TimeoutError) as error:
            self._unanswered()
            connection.close()  # for the others that wait, too, nothing will come
            return Outcome((), unfinished=Verdict.UNKNOWN, reason=str(error) or "the sink did not answer in time")
        except asyncio.CancelledError:
            self._unanswered()
            raise
        return Outcome(receipt.accepted, [Rejection(index, reason) for index, reason in receipt.rejected])

    async def close(self, producer: str | None = None) -> None:
        if producer is None and self._connection is not None:
            self._connection.close()

    async def _connected(self) -> _Connection:
        async with self._connecting:
            if self._connection is None or self._connection.closed:
                async with asyncio.timeout(self._timeout):
                    streams = await asyncio.open_connection("127.0.0.1", self._port)
                self._connection = _Connection(*streams, self._relay)
            return self._connection


class _Connection:
    """Requests and their answers, both in the same order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, relay: str) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: deque[asyncio.Future[Receipt]] = deque()
        writer.write(frame(relay))
        self._reading = asyncio.create_task(self._read())

    @property
    def closed(self) -> bool:
        return self._reading.done() or self._writer.is_closing()

    async def request(self, posts: Sequence[Post]) -> Receipt:
        answer: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._writer.write(frame(posts))
        return await answer

    def close(self) -> None:
        self._reading.cancel()
        self._writer.close()
        self._lost()

    async def _read(self) -> None:
        try:
            while True:
                receipt = msgspec.msgpack.decode(await read_frame(self._reader), type=Receipt)
                answer = self._waiting.popleft()
                if not answer.done():  # else nobody waits for it any more
                    answer.set_result(receipt)
        except (asyncio.IncompleteReadError, OSError):
            self._writer.close()
            self._lost()

    def _lost(self) -> None:
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(ConnectionError("the connection to the sink was lost"))
        self._waiting.clear()


def _post(message: Message) -> Post:
    headers = message.headers
    return Post(
        headers["event_id"],
        headers.get("event_type", ""),
        message.topic,
        headers.get("tenant_id"),
        message.key,
        headers.get("version"),
        message.body,
    )
