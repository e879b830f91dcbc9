"""One connection to a broker: handshake, requests and answers, receipts for producers, and a keep-alive, because a link
may be dead for hours before TCP reports it.

A connection is never repaired. When it is lost, all its users are told and open another one.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from itertools import count
from typing import Any, NamedTuple, Protocol, cast

from ...alarm import Alarm
from . import wire_pb2 as wire
from .credentials import Credentials, said, secret_of
from .frames import PING, PONG, Frames, ProtocolError, framed

PROTOCOL_VERSION = 20
DEFAULT_MESSAGE_LIMIT = 5 * 1_048_576
CLOSE_SECONDS = 1.0
"""How long a closed connection may take to end: pending writes are sent, and with TLS the peer answers."""
SMALLEST_MESSAGE_LIMIT = 262_144
"""Smallest accepted limit: below it, a message would have no room beside its headers."""
_CLIENT = f"pillarbox {version('pillarbox')}"
_Type = wire.Command.Type
_ABOUT_PRODUCERS: dict[int, str] = {
    _Type.SEND_RECEIPT: "send_receipt",
    _Type.SEND_ERROR: "send_error",
    _Type.CLOSE_PRODUCER: "close_producer",
}
_ANSWERS: dict[int, str] = {
    _Type.PRODUCER_SUCCESS: "producer_success",
    _Type.LOOKUP_RESPONSE: "lookup_response",
    _Type.PARTITIONED_METADATA_RESPONSE: "partitioned_metadata_response",
    _Type.TOPICS_OF_NAMESPACE_RESPONSE: "topics_of_namespace_response",
    _Type.SUCCESS: "success",
}


class BrokerError(ConnectionError):
    """An error answer of the broker."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        name = wire.ServerError.Name(wire.ServerError.ValueType(code))
        super().__init__(f"{name}: {message.strip().splitlines()[0][:300]}" if message.strip() else name)


class Endpoint(NamedTuple):
    """A broker's address, and what a proxy in front of it must be told."""

    host: str
    port: int
    proxy_to: str | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" + (f" (for {self.proxy_to})" if self.proxy_to else "")


class Listener(Protocol):
    """The interface of a producer for its connection."""

    def received(self, receipt: wire.SendReceipt) -> None: ...
    def refused(self, error: wire.SendError) -> None: ...
    def lost(self, why: str) -> None: ...


class Connection(asyncio.Protocol):
    """A connection. Opened by `open`, ended by `close`, by the peer or by a time-out."""

    def __init__(self, address: Endpoint, credentials: Credentials, *, keep_alive: float) -> None:
        self.address = address
        self.message_limit = DEFAULT_MESSAGE_LIMIT
        self.lost: str | None = None
        """Why it is unusable; None while it works."""
        self._credentials = credentials
        self._keep_alive = keep_alive
        self._frames = Frames()
        self._socket: asyncio.Transport
        self._requests = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listeners: dict[int, Listener] = {}
        self._ids = count(1)
        self._heard = 0.0
        self._alarm = Alarm(self._watch)
        self._answering: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    @classmethod
    async def open(
        cls,
        address: Endpoint,
        credentials: Credentials,
        *,
        tls: ssl.SSLContext | None = None,
        keep_alive: float = 5.0,
        patience: float = 5.0,
    ) -> Connection:
        """Connect and authenticate. Raises `OSError` or `TimeoutError` if that fails or takes too long."""
        loop = asyncio.get_running_loop()
        secret = await secret_of(credentials)  # not timed: a slow issuer is not the broker's fault
        self = cls(address, credentials, keep_alive=keep_alive)
        try:
            async with asyncio.timeout(patience):
                await loop.create_connection(lambda: self, address.host, address.port, ssl=tls)
                self.write(
                    framed(
                        wire.Command(
                            type=_Type.CONNECT,
                            connect=wire.Connect(
                                client_version=_CLIENT,
                                protocol_version=PROTOCOL_VERSION,
                                auth_method_name=credentials.method,
                                auth_data=secret,
                                proxy_to_broker_url=address.proxy_to,
                                feature_flags=wire.FeatureFlags(supports_auth_refresh=True),
                            ),
                        )
                    )
                )
                await self._connected
        except TimeoutError:
            self.abort(f"no answer within {patience:g} s")
            raise TimeoutError(f"{address} does not answer within {patience:g} s") from None
        except ssl.SSLError as error:
            self.abort(str(error))
            raise ConnectionError(f"{address}: TLS fails: {error.reason or error}") from error
        except BaseException:
            self.abort("it was not opened")
            raise
        self._watch()
        return self

    def write(self, data: bytes) -> None:
        """Send one or several frames. Does nothing on a lost connection, where uvloop's transports would raise."""
        if self.lost is None:
            self._socket.write(data)

    async def ask(self, kind: wire.Command.Type, part: Callable[[int], wire.Command], *, patience: float) -> Any:
        """Send a request and return the answer. Raises `BrokerError` for an error answer."""
        if self.lost is not None:
            raise ConnectionError(f"{self.address}: {self.lost}")
        number = next(self._requests)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            command = part(number)
            command.type = kind
            self.write(framed(command))
            async with asyncio.timeout(patience):
                return await answer
        except TimeoutError:
            raise TimeoutError(f"{self.address} did not answer {_Type.Name(kind)} within {patience:g} s") from None
        finally:
            del self._waiting[number]

    def join(self, listener: Listener) -> int:
        """Register a producer, and return its number. The broker's messages about it go to ``listener``."""
        number = next(self._ids)
        self._listeners[number] = listener
        return number

    def leave(self, number: int) -> None:
        """Remove a producer."""
        self._listeners.pop(number, None)

    def say(self, command: wire.Command) -> None:
        """Send a command that has no answer."""
        self.write(framed(command))

    def close(self) -> None:
        """Close it gracefully: pending writes are still sent."""
        if self.lost is None:
            self._end("it was closed")
            self._socket.close()

    async def closed(self) -> None:
        """Wait until the socket is closed: an event loop that ends earlier would leave it open."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            self._socket.abort()

    def abort(self, why: str) -> None:
        """End it now."""
        if self.lost is None:
            self._end(why)
            if hasattr(self, "_socket"):
                self._socket.abort()

    # -- messages of the peer ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)
        if self.lost is not None:  # there is no waiter left
            self._socket.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(str(exc) if exc else "the broker closed the connection")
        self._ended.set()

    def data_received(self, data: bytes) -> None:
        self._heard = asyncio.get_running_loop().time()
        try:
            for command in self._frames.feed(data):
                if self.lost is not None:
                    return
                self._dispatch(command)
        except ProtocolError as error:
            self.abort(str(error))

    def _dispatch(self, command: wire.Command) -> None:
        kind = command.type
        if (part := _ABOUT_PRODUCERS.get(kind)) is not None:
            self._tell(kind, getattr(command, part))
        elif (part := _ANSWERS.get(kind)) is not None:
            answer = getattr(command, part)
            if kind != _Type.PRODUCER_SUCCESS or answer.producer_ready:  # otherwise a later answer reports it
                self._answer(answer)
        elif kind == _Type.PING:
            self.write(PONG)
        elif kind == _Type.ERROR:
            self._fail(command.error)
        elif kind == _Type.CONNECTED:
            self._welcome(command.connected)
        elif kind == _Type.AUTH_CHALLENGE:
            self._answering = asyncio.get_running_loop().create_task(self._reauthenticate())
        # A newer broker may send unknown commands.

    def _tell(self, kind: wire.Command.Type, what: Any) -> None:
        listener = self._listeners.get(what.producer_id)
        if listener is None:
            return
        if kind == _Type.SEND_RECEIPT:
            listener.received(what)
        elif kind == _Type.SEND_ERROR:
            listener.refused(what)
        else:
            self.leave(what.producer_id)
            listener.lost("the broker closed the producer: its topic moves")

    def _welcome(self, connected: wire.Connected) -> None:
        size = connected.max_message_size
        if 0 < size < SMALLEST_MESSAGE_LIMIT:
            self.abort(
                f"it takes messages of at most {size:,} bytes, and we need {SMALLEST_MESSAGE_LIMIT:,}: raise its "
                "maxMessageSize"
            )
            return
        if size > 0:
            self.message_limit = size
        if not self._connected.done():
            self._connected.set_result(None)

    def _answer(self, answer: Any) -> None:
        waiting = self._waiting.get(answer.request_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _fail(self, error: wire.Error) -> None:
        refusal = BrokerError(error.error, error.message)
        waiting = self._waiting.get(error.request_id)
        if waiting is None and not self._connected.done():
            waiting = self._connected  # the handshake has no request number
        if waiting is not None and not waiting.done():
            waiting.set_exception(refusal)

    async def _reauthenticate(self) -> None:
        """Authenticate again: the credentials of the connection have expired."""
        try:
            secret = await secret_of(self._credentials)
        except Exception as error:  # whatever it is, no caller could receive it
            self.abort(f"the credentials could not be renewed: {said(error)}")
            return
        data = wire.AuthData(auth_method_name=self._credentials.method, auth_data=secret)
        response = wire.AuthResponse(client_version=_CLIENT, response=data, protocol_version=PROTOCOL_VERSION)
        self.say(wire.Command(type=_Type.AUTH_RESPONSE, auth_response=response))

    # -- keep-alive and end --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self.lost is not None:
            return
        silent = asyncio.get_running_loop().time() - self._heard
        if silent >= 2 * self._keep_alive:
            self.abort(f"nothing was heard for {silent:.1f} s")
            return
        if silent >= self._keep_alive:
            self.write(PING)
        self._alarm.set(self._keep_alive / 2)

    def _end(self, why: str) -> None:
        if self.lost is not None:
            return
        self.lost = why
        self._alarm.cancel()
        if self._answering is not None:
            self._answering.cancel()
        error = ConnectionError(f"{self.address}: {why}")
        for waiting in (self._connected, *self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(error)
        with suppress(BaseException):
            self._connected.exception()  # mark the error as retrieved: there may be no waiter
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.lost(why)
