"""Receives from Apache Pulsar by the official client, which is imported when a `PulsarSubscriber` is created.

Each topic has a consumer of that client, including topics that are found for a template later. The client knows nothing
of event loops: one of its threads receives the messages of all topics and passes them to the loop in batches.

Delivery is at least once: unacknowledged messages are redelivered after a lost connection, here or elsewhere.
Acknowledgements are sent with the client's next flush (0.1 s), or at closing. If several messages were published in one
entry, their acknowledgements count when the whole entry is acknowledged, unless the broker has
``acknowledgmentAtBatchIndexLevelEnabled``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal

from ...errors import ConfigurationError
from ...route import topic_pattern
from ...transport import Message, Received
from . import official_client
from .address import check_admin_url, parse_address
from .admin import PulsarAdmin
from .client import Client
from .credentials import Credentials, Tls, said, secret_of
from .history import PulsarHistory
from .names import TopicName, spellings
from .templates import TopicFinder, check_topics
from .unacked import Copy, Room, Unacked

KINDS = {"key_shared": "KeyShared", "failover": "Failover"}
_STARTS = {"earliest": "Earliest", "latest": "Latest"}
MAX_BYTES = 16_777_216
"""Most bytes of bodies that were received and not offered yet."""
LOOK = 2.0
"""Seconds between checks for new topics of templates, and of existing consumers."""
_FEWEST = 10
"""Least number of messages that the client prefetches per topic: with one, it would wait for each message."""
_AT_ONCE = 8
"""Number of topics that are joined at the same time."""
_REFUSED = 30.0
"""Seconds after which a topic of a template that could not be joined is tried again."""
_LOST = 30.0
"""Seconds without a connection after which a topic is joined again: the client may have given it up silently."""
_IDLE = 5.0
"""Seconds without a message after which the broker is asked to dispatch again."""
_FAREWELL = 2.0
"""Seconds that the broker may take to confirm closing: it drops a lost connection by itself."""
_TIMEOUT = 8.0
_KEEP_ALIVE = 5.0

_log = logging.getLogger(__name__)


class PulsarSubscriber:
    """A `Subscriber` for a Pulsar cluster; ``url``, ``credentials``, ``tls`` and ``admin_url`` as for
    `PulsarTransport`. Topics may be templates; ``admin_url`` is needed for those with a placeholder in the tenant or
    the namespace.

    Groups are subscriptions of a ``kind``. With ``key_shared``, the members share the keys of each topic. This keeps
    the order per key if each entry has one key only. `PulsarTransport` writes such entries by default, and a warning
    names topics with others. When a member leaves, 4.0.8 sometimes delivers later messages first. With ``failover``,
    one member at a time has a topic or partition, in order.

    A new group begins with the ``earliest`` stored message, or with the ``latest``, the next one to be published; in
    topics that are found later, with the earliest. The client prefetches ``prefetch`` messages of a topic, and fewer of
    each of many topics, but at least ten.
    """

    def __init__(
        self,
        url: str,
        *,
        kind: Literal["key_shared", "failover"] = "key_shared",
        admin_url: str | None = None,
        credentials: Credentials | None = None,
        tls: Tls | None = None,
        prefetch: int = 100,
        start: Literal["earliest", "latest"] = "earliest",
    ) -> None:
        address = parse_address(url)
        if address.options:
            raise ConfigurationError(f"a Pulsar address has no option {next(iter(address.options))!r}")
        for name, value, known in (("kind", kind, KINDS), ("start", start, _STARTS)):
            if value not in known:
                raise ConfigurationError(f"{name} is one of {', '.join(known)}, not {value!r}")
        if prefetch < 1:
            raise ConfigurationError("prefetch must be above 0")
        self._url = address.service_url
        self._admin_url = address.admin_url if admin_url is None else check_admin_url(admin_url)
        self._kind = kind
        self._credentials = credentials or address.credentials
        self._tls = tls or address.tls
        if self._credentials.method == "tls" and self._tls.cert_file is None:
            raise ConfigurationError("a client certificate is the credential, and tls names no cert_file")
        self._prefetch = prefetch
        self._start = start
        self._pulsar = official_client.load()

    def __repr__(self) -> str:
        return f"PulsarSubscriber({self._url!r}, kind={self._kind!r})"

    def check_topics(self, topics: Sequence[str]) -> None:
        """Refuse invalid names, and templates that cannot be resolved."""
        check_topics(topics, admin=self._admin_url is not None)

    async def subscribe(self, topics: Sequence[str], group: str) -> PulsarSubscription:
        """Join a group. Raises `ConnectionError` with the reason if the broker refuses it."""
        if not topics:
            raise ConfigurationError(f"group {group!r} subscribes to topics, or to templates of topics, got none")
        self.check_topics(topics)
        await secret_of(self._credentials)  # a missing secret gives its reason here
        pulsar = self._pulsar
        client = official_client.new_client(self._url, self._credentials, self._tls)
        subscription = PulsarSubscription(
            client,
            partial(
                client.subscribe,
                subscription_name=group,
                consumer_type=getattr(pulsar.ConsumerType, KINDS[self._kind]),
                batch_index_ack_enabled=True,
            ),
            *self._named(topics),
            kind=self._kind,
            prefetch=self._prefetch,
        )
        try:
            await subscription.join(getattr(pulsar.InitialPosition, _STARTS[self._start]))
        except BaseException as error:
            await subscription.abandon()
            if isinstance(error, (pulsar.PulsarException, OSError)):
                raise ConnectionError(f"group {group!r} cannot be joined at {self._url}: {said(error)}") from None
            raise
        return subscription

    async def unsubscribe(self, topics: Sequence[str], group: str) -> None:
        """Remove a group from these topics. It remains while it has a member elsewhere."""
        subscription = await self.subscribe(topics, group)
        try:
            await subscription.unsubscribe()
        except self._pulsar.PulsarException as error:
            raise ConnectionError(f"group {group!r} is left at {self._url}: {said(error)}") from None
        finally:
            await subscription.close()

    def _named(self, topics: Sequence[str]) -> tuple[Mapping[TopicName, str], TopicFinder | None]:
        """The named topics, and the finder for those of templates."""
        templates = [topic for topic in topics if topic_pattern(topic) is not None]
        plain = {TopicName.parse(topic): topic for topic in topics if topic not in templates}
        if not templates:
            return plain, None
        client = Client(self._url, self._credentials, self._tls, timeout=_TIMEOUT, keep_alive=_KEEP_ALIVE)
        admin = None
        if self._admin_url is not None:
            admin = PulsarAdmin(self._admin_url, self._credentials, self._tls)
        return plain, TopicFinder(templates, client, admin)

    async def reread(self, topics: Sequence[str]) -> PulsarHistory:
        """Read these topics, and the existing topics of templates, from their first stored message on."""
        self.check_topics(topics)
        await secret_of(self._credentials)
        return PulsarHistory(official_client.new_client(self._url, self._credentials, self._tls), *self._named(topics))

    def spellings(self, topic: str) -> Sequence[str]:
        """All names of this topic, or of this template."""
        return spellings(topic)


class PulsarSubscription:
    """A member of a group. `receive` recovers by itself when the broker was unavailable for a moment."""

    def __init__(
        self, client: Any, subscribe: Callable[..., Any], plain: Mapping[TopicName, str], finder: TopicFinder | None, *,
        kind: str, prefetch: int,
    ) -> None:  # fmt: skip
        self._pulsar = official_client.load()
        self._client = client
        self._subscribe = subscribe
        self._plain = plain
        """Topics with the names that the user gave them."""
        self._finder = finder
        self._kind = kind
        self._prefetch = prefetch
        self._loop = asyncio.get_running_loop()
        self._consumers: dict[TopicName, _Consumer] = {}
        self._joining = asyncio.Semaphore(_AT_ONCE)
        self._refused: dict[TopicName, float] = {}
        """Time of the next try to join a topic."""
        self._joins: dict[TopicName, asyncio.Task[None]] = {}
        """Joins of topics that were found later."""
        self._tending: asyncio.Task[None] | None = None
        self._room = Room(max(prefetch, _FEWEST), MAX_BYTES)
        self._arrived: deque[Copy] = deque()
        self._told = False
        """Whether the loop was told of new messages."""
        self._heard = 0.0
        self._change = asyncio.Event()
        self._orders = count()
        self._unacked = Unacked()
        self._entries: dict[str, tuple[tuple[int, int], str]] = {}
        """The last entry of each topic or partition, and the key of its first message."""
        self._mixed: set[str] = set()
        """Topics for which a warning about entries with several keys was logged."""
        self._closing: asyncio.Future[None] | None = None
        self._lost_because: str | None = None

    # -- the port ------------------------------------------------------------------------------------------------------

    async def receive(self, limit: int, max_bytes: float = math.inf) -> Sequence[Received]:
        while True:
            self._check()
            if taken := self._unacked.take(limit, max_bytes):
                fresh = [copy for copy in taken if not copy.offered]
                for copy in fresh:
                    copy.offered = True
                self._room.free(len(fresh), sum(len(copy.message.body) for copy in fresh))
                return [Received(copy.message, copy.attempt, copy) for copy in taken]
            self._change.clear()
            await self._change.wait()

    async def ack(self, received: Sequence[Received]) -> None:
        self._check()
        for copy in [each.handle for each in received]:
            if copy not in self._unacked:
                continue
            try:
                copy.consumer.acknowledge(copy.id)  # does not wait: it is sent with the next flush
            except self._pulsar.PulsarException as error:
                raise ConnectionError(f"message {copy.id} cannot be acknowledged: {said(error)}") from None
            self._unacked.drop(copy)

    async def extend(self, received: Sequence[Received]) -> None:
        """Do nothing: held messages stay with this member while it is connected."""

    @property
    def deadline(self) -> float | None:
        return None

    def backlog(self) -> int | None:
        return None

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._leave())
            self._change.set()
            self._room.close()
        await asyncio.shield(self._closing)

    async def unsubscribe(self) -> None:
        """Remove the group from all joined topics."""
        for consumer in self._consumers.values():
            await asyncio.to_thread(consumer.of_client.unsubscribe)

    # -- topics --------------------------------------------------------------------------------------------------------

    async def join(self, start: Any) -> None:
        """Join all existing topics, and check for new ones from now on."""
        if self._finder is not None:
            await self._finder.look()
        found = self._found()
        share = self._share(len(self._plain) + len(found))
        await asyncio.gather(*(self._join(topic, called, start, share) for topic, called in self._plain.items()))
        await asyncio.gather(*(self._join_found(topic, called, start, share) for topic, called in found.items()))
        self._heard = self._loop.time()
        self._tending = asyncio.create_task(self._tend())

    async def abandon(self) -> None:
        """Stop joining, and leave nothing behind. Threads that wait for the broker are interrupted."""
        self._room.close()
        closing = [asyncio.to_thread(self._client.shutdown)]
        if self._finder is not None:
            closing.append(self._finder.close())
        await asyncio.shield(asyncio.gather(*closing))

    def _found(self) -> dict[TopicName, str]:
        """Topics of templates that are not joined yet."""
        now = self._loop.time()
        return {
            topic: called
            for topic, called in (self._finder.found.items() if self._finder is not None else ())
            if topic not in self._consumers
            and topic not in self._plain
            and topic not in self._joins
            and self._refused.get(topic, now) <= now
        }

    def _share(self, topics: int) -> int:
        """Number of prefetched messages per topic, for this number of topics."""
        return max(self._prefetch // max(topics, 1), min(self._prefetch, _FEWEST))

    async def _join(self, topic: TopicName, called: str, start: Any, share: int) -> None:
        whole = str(topic)
        async with self._joining:
            consumer = await asyncio.to_thread(
                self._subscribe,
                whole,
                message_listener=partial(self._arrive, whole, called),
                receiver_queue_size=share,
                initial_position=start,
            )
        self._consumers[topic] = _Consumer(consumer, self._loop.time())

    async def _join_found(self, topic: TopicName, called: str, start: Any, share: int) -> None:
        """Join a topic. On failure, it is tried again later."""
        try:
            await self._join(topic, called, start, share)
        except Exception as error:
            if topic not in self._refused:
                _log.warning("topic %s cannot be received now: %s", topic, said(error))
            self._refused[topic] = self._loop.time() + _REFUSED
        finally:
            self._joins.pop(topic, None)

    async def _tend(self) -> None:
        """Check the consumers, whose losses the client does not report, and join new topics."""
        trouble = ""
        while True:
            await asyncio.sleep(LOOK)
            self._look_after()
            if self._finder is None:
                continue
            before, trouble = trouble, ""
            try:
                await self._finder.look()
            except Exception as error:
                if (trouble := said(error)) != before:
                    _log.warning("not all new topics can be looked for: %s", trouble)
            # Not awaited: a broker that does not answer for one topic must not delay the others.
            share = self._share(len(self._consumers) + 1)
            for topic, called in self._found().items():
                joining = self._join_found(topic, called, self._pulsar.InitialPosition.Earliest, share)
                self._joins[topic] = asyncio.create_task(joining)

    def _look_after(self) -> None:
        now = self._loop.time()
        for topic, consumer in [*self._consumers.items()]:
            if consumer.of_client.is_connected():
                consumer.connected = now
            elif now - consumer.connected > _LOST:
                if topic in self._plain:
                    self._lose(f"{topic} has had no connection for {_LOST:g} s")
                del self._consumers[topic]
                _ = self._loop.run_in_executor(None, self._give_up, consumer.of_client)
        # A broker that changes the active member of a group while it waits for messages may keep waiting, whatever is
        # stored, until the next message is published (seen once, on 4.0.8). So ask it to dispatch again.
        if self._kind == "failover" and not len(self._unacked) and now - self._heard > _IDLE:
            self._heard = now
            for consumer in self._consumers.values():
                with suppress(self._pulsar.PulsarException):
                    consumer.of_client.redeliver_unacknowledged_messages()

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closing is not None:
            raise ConnectionError("the subscription is closed")
        if self._lost_because is not None:
            raise ConnectionError(f"the subscription is lost: {self._lost_because}")

    def _lose(self, why: str) -> None:
        self._lost_because = why
        self._change.set()

    def _take_in(self) -> None:
        self._told = False  # before taking them: later messages notify again
        self._heard = self._loop.time()
        while self._arrived:
            copy = self._arrived.popleft()
            if not self._unacked.put(copy):
                self._room.free(1, len(copy.message.body))
        self._change.set()

    async def _leave(self) -> None:
        closing = [asyncio.to_thread(self._say_goodbye)]
        for task in (self._tending, *self._joins.values()):
            if task is not None:
                task.cancel()
        if self._finder is not None:
            closing.append(self._finder.close())
        await asyncio.gather(*closing)

    # -- on other threads ----------------------------------------------------------------------------------------------

    def _arrive(self, whole: str, called: str, consumer: Any, found: Any) -> None:
        """Called by the client for each message of a topic. It blocks the client while there is no room."""
        place = found.message_id()
        try:
            physical, key, body = found.topic_name(), found.partition_key(), found.data()
            message = Message(called, key, body, found.properties(), place="" if physical == whole else physical)
        except UnicodeDecodeError as error:
            _log.error("message %s of %s stays unacknowledged, its key or properties are no text: %s",
                       place, whole, said(error))  # fmt: skip
            return
        ledger, entry, index = place.ledger_id(), place.entry_id(), place.batch_index()
        if index >= 0 and self._kind == "key_shared":
            self._check_key(physical, (ledger, entry), index, key)
        if not self._room.use(len(body)):
            return
        stored = physical, ledger, entry, index
        self._arrived.append(Copy(message, next(self._orders), stored, consumer, place, found.redelivery_count() + 1))
        if not self._told:
            self._told = True
            with suppress(RuntimeError):  # the loop was closed before the subscription
                self._loop.call_soon_threadsafe(self._take_in)

    def _check_key(self, physical: str, entry: tuple[int, int], index: int, key: str) -> None:
        if index == 0:
            self._entries[physical] = entry, key
            return
        last = self._entries.get(physical)
        if last is not None and last[0] == entry and last[1] != key and physical not in self._mixed:
            self._mixed.add(physical)
            _log.warning(
                "%s has entries with several keys: a key_shared subscription hands out whole entries, so their keys "
                "lose their order; let producers batch by key, or not at all, or subscribe by failover",
                physical,
            )

    def _give_up(self, consumer: Any) -> None:
        with suppress(self._pulsar.PulsarException):
            consumer.close()

    def _say_goodbye(self) -> None:
        """Send pending acknowledgements. If the broker does not answer in time, disconnect without them."""
        goodbye = threading.Thread(target=self._give_up, args=(self._client,), name="pillarbox-pulsar", daemon=True)
        goodbye.start()
        goodbye.join(_FAREWELL)
        self._client.shutdown()
        goodbye.join()


@dataclass(slots=True)
class _Consumer:
    of_client: Any
    connected: float
    """Time at which it was last seen connected."""
