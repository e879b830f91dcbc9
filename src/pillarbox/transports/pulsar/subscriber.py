"""Receiving from Apache Pulsar, over the official client, which is imported when a `PulsarSubscriber` is made.

The client blocks, and knows nothing of event loops: a thread of each subscription receives, and hands what came in to
the loop in runs. A nack to the broker would let the next message of the key pass, so none is ever sent: a message that
was refused stays here, its key waits behind it, and after the delay it is offered again.

At least once: what was not acknowledged comes again after a lost connection, here or elsewhere. Acknowledgements leave
with the client's next flush (0.1 s), or at closing; those of messages that were published in one entry count when all
of the entry are given, unless the broker has ``acknowledgmentAtBatchIndexLevelEnabled``.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count
from typing import Any, Literal

from ...errors import ConfigurationError
from ...route import topic_pattern
from ...transport import Message, Received
from . import official
from .address import parse_address
from .credentials import Credentials, Tls, said, secret_of
from .dead_letters import DeadLetters
from .names import DEFAULT_NAMESPACE, TopicName, namespace_of, spellings
from .shelf import Copy, Shelf

_KINDS = {"key_shared": "KeyShared", "failover": "Failover", "exclusive": "Exclusive", "shared": "Shared"}
_STARTS = {"earliest": "Earliest", "latest": "Latest"}
_IDLE = 5.0
"""Seconds without a message after which a broker is reminded of us."""
_DISCOVERY = 5
"""Seconds between two looks for new topics that fit a template."""
_FAREWELL = 2.0
"""Seconds that the broker may take to answer a goodbye: it lets go of a lost connection by itself."""

_log = logging.getLogger(__name__)


class PulsarSubscriber:
    """A `Subscriber` for a Pulsar cluster; ``url``, ``credentials`` and ``tls`` as for `PulsarTransport`.

    Groups are subscriptions of a ``kind``; all but ``shared`` keep the order per key, as far as the broker does; when
    a member leaves a key_shared group, 4.0.8 at times hands out later messages first. A new group begins with the
    ``earliest`` message that is stored, or with the ``latest``, what comes from now on. Up to ``prefetch`` messages of
    each partition wait in the client, and as many here: if those are all of keys that are held, the others wait, too,
    so let delays be seconds, not hours.

    A message that is refused after its last of ``max_redeliveries``, as this member counts, goes to the
    ``dead_letter_topic``, with ``ORIGIN_MESSAGE_ID`` and ``REAL_TOPIC`` added to its properties, and its key goes on.
    That topic needs a subscription or a retention of its own, or the broker drops what is sent there.
    """

    def __init__(
        self,
        url: str,
        *,
        kind: Literal["key_shared", "failover", "exclusive", "shared"] = "key_shared",
        credentials: Credentials | None = None,
        tls: Tls | None = None,
        dead_letter_topic: str | None = None,
        max_redeliveries: int | None = None,
        prefetch: int = 1_000,
        start: Literal["earliest", "latest"] = "earliest",
    ) -> None:
        address = parse_address(url)
        if address.options:
            raise ConfigurationError(f"a Pulsar address has no option {next(iter(address.options))!r}")
        for name, value, known in (("kind", kind, _KINDS), ("start", start, _STARTS)):
            if value not in known:
                raise ConfigurationError(f"{name} is one of {', '.join(known)}, not {value!r}")
        if (dead_letter_topic is None) != (max_redeliveries is None):
            raise ConfigurationError("dead_letter_topic and max_redeliveries are given together, or not at all")
        if prefetch < 1 or (max_redeliveries or 0) < 0:
            raise ConfigurationError("prefetch must be above 0, and max_redeliveries not below")
        self._url = address.service_url
        self._kind = kind
        self._credentials = credentials or address.credentials
        self._tls = tls or address.tls
        if self._credentials.method == "tls" and self._tls.cert_file is None:
            raise ConfigurationError("a client certificate is the credential, and tls names no cert_file")
        self._dead_letter_topic = None if dead_letter_topic is None else str(TopicName.parse(dead_letter_topic))
        self._max_redeliveries = max_redeliveries or 0
        self._prefetch = prefetch
        self._start = start
        self._pulsar = official.load()

    def __repr__(self) -> str:
        return f"PulsarSubscriber({self._url!r}, kind={self._kind!r})"

    async def subscribe(self, topics: Sequence[str], group: str) -> PulsarSubscription:
        """Join a group. A `ConnectionError` says why the broker does not let us in."""
        topic, names = _subscribed(topics, group)
        await secret_of(self._credentials)  # if there is none to be had, here it says why
        pulsar = self._pulsar
        client = official.new_client(self._url, self._credentials, self._tls)
        try:
            consumer = await asyncio.to_thread(
                client.subscribe,
                topic,
                group,
                getattr(pulsar.ConsumerType, _KINDS[self._kind]),
                receiver_queue_size=self._prefetch,
                initial_position=getattr(pulsar.InitialPosition, _STARTS[self._start]),
                batch_index_ack_enabled=True,
                pattern_auto_discovery_period=_DISCOVERY,
            )
        except BaseException as error:
            # Whoever still waits for the broker in that thread is thrown out by it; it may ask us for a token before.
            _ = asyncio.get_running_loop().run_in_executor(None, client.shutdown)
            if isinstance(error, pulsar.PulsarException):
                raise ConnectionError(f"group {group!r} cannot be joined at {self._url}: {said(error)}") from None
            raise
        letters = None
        if self._dead_letter_topic is not None:
            letters = DeadLetters(client, self._dead_letter_topic, self._max_redeliveries)
        return PulsarSubscription(client, consumer, names, kind=self._kind, dead_letters=letters, room=self._prefetch)

    def spellings(self, topic: str) -> Sequence[str]:
        """All names of this topic, or of the topics of this template."""
        return spellings(topic)


class PulsarSubscription:
    """A member of a group. `receive` goes on by itself when the broker was away; `nack` never needs it."""

    def __init__(
        self, client: Any, consumer: Any, names: Mapping[str, str], *,
        kind: str, dead_letters: DeadLetters | None, room: int,
    ) -> None:  # fmt: skip
        self._pulsar = official.load()
        self._client = client
        self._consumer = consumer
        self._names = names
        """Topics as the user calls them, by their full names."""
        self._by_key = kind != "shared"
        self._one_at_a_time = kind in ("failover", "exclusive")
        self._dead_letters = dead_letters
        self._loop = asyncio.get_running_loop()
        self._room = threading.Semaphore(room)
        """How many more may come in before some of them are offered."""
        self._arrived: deque[Copy] = deque()
        self._told = False
        """The loop knows that something has arrived."""
        self._change = asyncio.Event()
        self._orders = count()
        self._shelf = Shelf()
        self._burials: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Future[None] | None = None
        self._lost_because: str | None = None
        self._thread = threading.Thread(target=self._pump, name="pillarbox-pulsar", daemon=True)
        self._thread.start()

    # -- the port ------------------------------------------------------------------------------------------------------

    async def receive(self, limit: int) -> Sequence[Received]:
        while True:
            self._check()
            if taken := self._shelf.take(limit):
                if fresh := sum(copy.offers == 1 for copy in taken):
                    self._room.release(fresh)
                return [Received(copy.message, copy.attempts, copy) for copy in taken]
            self._change.clear()
            await self._change.wait()

    async def ack(self, received: Sequence[Received]) -> None:
        self._check()
        for copy in [each.handle for each in received]:
            self._settle(copy)

    async def nack(self, received: Sequence[Received], *, delay: float = 0.0) -> None:
        self._check()
        for copy in [each.handle for each in received]:
            if not self._shelf.hold(copy):
                pass
            elif self._dead_letters is not None and copy.offers > self._dead_letters.max_redeliveries:
                burial = asyncio.create_task(self._bury(copy, self._dead_letters, delay))
                self._burials.add(burial)
                burial.add_done_callback(self._burials.discard)
            else:
                self._loop.call_later(delay, self._release, copy)

    async def extend(self, received: Sequence[Received]) -> None:
        """What we hold is ours as long as we are connected."""

    @property
    def deadline(self) -> float | None:
        return None

    def backlog(self) -> int | None:
        return None

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(asyncio.to_thread(self._leave))
            for burial in self._burials:
                burial.cancel()
            self._change.set()
            self._room.release()
        await asyncio.shield(self._closing)

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closing is not None:
            raise ConnectionError("the subscription is closed")
        if self._lost_because is not None:
            raise ConnectionError(f"the subscription is lost: {self._lost_because}")

    def _settle(self, copy: Copy) -> None:
        if copy not in self._shelf:
            return
        try:
            self._consumer.acknowledge(copy.id)  # does not wait: it goes out with the next flush
        except self._pulsar.PulsarException as error:
            raise ConnectionError(f"message {copy.id} cannot be acknowledged: {said(error)}") from None
        self._shelf.drop(copy)

    def _release(self, copy: Copy) -> None:
        self._shelf.release(copy)
        self._change.set()

    async def _bury(self, copy: Copy, dead_letters: DeadLetters, delay: float) -> None:
        try:
            await dead_letters.send(copy)
            self._settle(copy)
        except Exception as error:
            _log.warning("message %s is no dead letter yet, and offered again: %s", copy.id, said(error))
            self._loop.call_later(delay, self._release, copy)
        else:
            self._release(copy)

    def _take_in(self) -> None:
        self._told = False  # before we look: what arrives from now on is told again
        while self._arrived:
            if not self._shelf.put(self._arrived.popleft()):
                self._room.release()
        self._change.set()

    # -- on other threads ----------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Receive, as long as there is room."""
        with suppress(RuntimeError):  # the loop was closed, and the subscription was not
            try:
                while self._room.acquire() and self._closing is None:
                    self._arrive(self._next())
            except self._pulsar.PulsarException as error:
                self._lost_because = said(error)
                self._loop.call_soon_threadsafe(self._change.set)

    def _next(self) -> Any:
        """A broker that changes the active member of a group while it waits for messages may go on waiting, with all
        that is stored before its eyes, until the next one is published (seen once, on 4.0.8). So ask it to look again.
        """
        while True:
            try:
                return self._consumer.receive(int(_IDLE * 1_000))
            except self._pulsar.Timeout:
                if self._one_at_a_time and not len(self._shelf):
                    self._consumer.redeliver_unacknowledged_messages()

    def _arrive(self, found: Any) -> None:
        place = found.message_id()
        try:
            copy = self._copy(found, place)
        except UnicodeDecodeError as error:
            _log.error("message %s of %s stays unacknowledged, its key or properties are no text: %s",
                       place, found.topic_name(), said(error))  # fmt: skip
            self._room.release()
            return
        self._arrived.append(copy)
        if not self._told:
            self._told = True
            self._loop.call_soon_threadsafe(self._take_in)

    def _copy(self, found: Any, place: Any) -> Copy:
        physical = found.topic_name()
        topic = self._names.get(physical)
        partition = ""
        if topic is None:
            whole = _whole(physical)
            partition, topic = (physical if whole != physical else ""), self._names.get(whole) or _called(whole)
        message = Message(topic, found.partition_key(), found.data(), found.properties(), place=partition)
        order = next(self._orders)
        return Copy(
            message=message,
            order=order,
            place=(place.ledger_id(), place.entry_id(), place.batch_index()),
            lane=(topic, message.key) if self._by_key else order,
            id=place,
            physical=physical,
            attempts=found.redelivery_count(),
        )

    def _leave(self) -> None:
        """Say goodbye, which sends what is acknowledged; a broker that does not answer is left without."""
        goodbye = threading.Thread(target=self._say_goodbye, name="pillarbox-pulsar-close", daemon=True)
        goodbye.start()
        goodbye.join(_FAREWELL)
        self._client.shutdown()
        goodbye.join()
        self._thread.join()

    def _say_goodbye(self) -> None:
        with suppress(self._pulsar.PulsarException):
            self._consumer.close()


def _subscribed(topics: Sequence[str], group: str) -> tuple[Any, dict[str, str]]:
    """What the client is to subscribe to, and what the user calls it. Several plain topics, or one template: the client
    knows nothing between.
    """
    patterns = [topic for topic in topics if topic_pattern(topic) is not None]
    if not topics or (patterns and len(topics) > 1):
        raise ConfigurationError(f"group {group!r} subscribes to topics, or to one template of a topic, got {topics!r}")
    if not patterns:
        names = {str(TopicName.parse(topic)): topic for topic in topics}
        return ([*names] if len(names) > 1 else next(iter(names))), names
    head, _, template = topics[0].rpartition("/")
    pattern = topic_pattern(template)
    if pattern is None or "{" in head:
        raise ConfigurationError(
            f"{topics[0]!r}: Pulsar finds topics of one namespace; use {{tenant}} in its last part"
        )
    return re.compile(namespace_of(topics[0]) + pattern.pattern), {}


def _called(whole: str) -> str:
    """A topic that was found by a template, as a route calls it."""
    return whole.removeprefix(DEFAULT_NAMESPACE)


@lru_cache(maxsize=4_096)
def _whole(partition: str) -> str:
    return str(TopicName.parse(partition, partition=True).whole)
