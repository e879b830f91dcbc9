"""Receiving from Apache Pulsar, over the official client, which is imported when a `PulsarSubscriber` is made.

Each topic has a consumer of that client, and so has each that is found for a template later. The client knows nothing
of event loops: one thread of it brings the messages of all topics, and hands what came in to the loop in runs.

At least once: what was not acknowledged comes again after a lost connection, here or elsewhere. Acknowledgements leave
with the client's next flush (0.1 s), or at closing; those of messages that were published in one entry count when all
of the entry are given, unless the broker has ``acknowledgmentAtBatchIndexLevelEnabled``.
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
from . import official
from .address import check_admin_url, parse_address
from .admin import PulsarAdmin
from .client import Client
from .credentials import Credentials, Tls, said, secret_of
from .history import PulsarHistory
from .names import TopicName, spellings
from .shelf import Copy, Room, Shelf
from .templates import TopicFinder, check_topics

KINDS = {"key_shared": "KeyShared", "failover": "Failover"}
_STARTS = {"earliest": "Earliest", "latest": "Latest"}
MAX_BYTES = 16_777_216
"""What the bodies may take that have come in and were not offered yet."""
LOOK = 2.0
"""Seconds between two looks for new topics of templates, and after the consumers that there are."""
_FEWEST = 10
"""Messages that the client fetches in advance for each topic at least: with one it would wait for each."""
_AT_ONCE = 8
"""Topics that are joined at the same time."""
_REFUSED = 30.0
"""Seconds for which a topic of a template that cannot be joined is left alone."""
_LOST = 30.0
"""Seconds without a connection after which a topic is joined again: the client may have given it up without a word."""
_IDLE = 5.0
"""Seconds without a message after which the broker is asked to look again."""
_FAREWELL = 2.0
"""Seconds that the broker may take to answer a goodbye: it lets go of a lost connection by itself."""
_TIMEOUT = 8.0
_KEEP_ALIVE = 5.0

_log = logging.getLogger(__name__)


class PulsarSubscriber:
    """A `Subscriber` for a Pulsar cluster; ``url``, ``credentials``, ``tls`` and ``admin_url`` as for
    `PulsarTransport`. Topics may be templates; ``admin_url`` is needed for those with a placeholder in the tenant or
    the namespace.

    Groups are subscriptions of a ``kind``. By ``key_shared`` the members share the keys of each topic; it keeps the
    order per key if an entry holds one key only. `PulsarTransport` writes such entries unless it is told otherwise, and
    a warning names the topics with others. When a member leaves, 4.0.8 at times hands out later messages first. By
    ``failover`` one member at a time has a topic or partition, in order.

    A new group begins with the ``earliest`` message that is stored, or with the ``latest``, what comes from now on; in
    topics that are found later, with the earliest. The client fetches ``prefetch`` messages of a topic in advance, and
    fewer, but ten, of each of many.
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
        self._pulsar = official.load()

    def __repr__(self) -> str:
        return f"PulsarSubscriber({self._url!r}, kind={self._kind!r})"

    def check_topics(self, topics: Sequence[str]) -> None:
        """Refuse names that are none, and templates that we cannot look for."""
        check_topics(topics, admin=self._admin_url is not None)

    async def subscribe(self, topics: Sequence[str], group: str) -> PulsarSubscription:
        """Join a group. A `ConnectionError` says why the broker does not let us in."""
        if not topics:
            raise ConfigurationError(f"group {group!r} subscribes to topics, or to templates of topics, got none")
        self.check_topics(topics)
        await secret_of(self._credentials)  # if there is none to be had, here it says why
        pulsar = self._pulsar
        client = official.new_client(self._url, self._credentials, self._tls)
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
        """Remove a group from these topics. A member that is elsewhere keeps it there."""
        subscription = await self.subscribe(topics, group)
        try:
            await subscription.unsubscribe()
        except self._pulsar.PulsarException as error:
            raise ConnectionError(f"group {group!r} is left at {self._url}: {said(error)}") from None
        finally:
            await subscription.close()

    def _named(self, topics: Sequence[str]) -> tuple[Mapping[TopicName, str], TopicFinder | None]:
        """The topics that are named, and what finds those of the templates."""
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
        """Read these topics from their first stored message on, and those that there are for templates."""
        self.check_topics(topics)
        await secret_of(self._credentials)
        return PulsarHistory(official.new_client(self._url, self._credentials, self._tls), *self._named(topics))

    def spellings(self, topic: str) -> Sequence[str]:
        """All names of this topic, or of the topics of this template."""
        return spellings(topic)


class PulsarSubscription:
    """A member of a group. `receive` goes on by itself when the broker was away for a moment."""

    def __init__(
        self, client: Any, subscribe: Callable[..., Any], plain: Mapping[TopicName, str], finder: TopicFinder | None, *,
        kind: str, prefetch: int,
    ) -> None:  # fmt: skip
        self._pulsar = official.load()
        self._client = client
        self._subscribe = subscribe
        self._plain = plain
        """With the names that the user calls them by."""
        self._finder = finder
        self._kind = kind
        self._prefetch = prefetch
        self._loop = asyncio.get_running_loop()
        self._consumers: dict[TopicName, _Consumer] = {}
        self._joining = asyncio.Semaphore(_AT_ONCE)
        self._refused: dict[TopicName, float] = {}
        """When to try again to join a topic."""
        self._joins: dict[TopicName, asyncio.Task[None]] = {}
        """Of topics that were found later."""
        self._tending: asyncio.Task[None] | None = None
        self._room = Room(max(prefetch, _FEWEST), MAX_BYTES)
        self._arrived: deque[Copy] = deque()
        self._told = False
        """The loop knows that something has arrived."""
        self._heard = 0.0
        self._change = asyncio.Event()
        self._orders = count()
        self._shelf = Shelf()
        self._entries: dict[str, tuple[tuple[int, int], str]] = {}
        """Of each topic or partition, the entry that came last, and the key of its first message."""
        self._mixed: set[str] = set()
        """Topics of which we have told that their entries hold several keys."""
        self._closing: asyncio.Future[None] | None = None
        self._lost_because: str | None = None

    # -- the port ------------------------------------------------------------------------------------------------------

    async def receive(self, limit: int, max_bytes: float = math.inf) -> Sequence[Received]:
        while True:
            self._check()
            if taken := self._shelf.take(limit, max_bytes):
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
            if copy not in self._shelf:
                continue
            try:
                copy.consumer.acknowledge(copy.id)  # does not wait: it goes out with the next flush
            except self._pulsar.PulsarException as error:
                raise ConnectionError(f"message {copy.id} cannot be acknowledged: {said(error)}") from None
            self._shelf.drop(copy)

    async def extend(self, received: Sequence[Received]) -> None:
        """What we hold is ours as long as we are connected."""

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
        """Remove the group from all topics that were joined."""
        for consumer in self._consumers.values():
            await asyncio.to_thread(consumer.of_client.unsubscribe)

    # -- topics --------------------------------------------------------------------------------------------------------

    async def join(self, start: Any) -> None:
        """Join all topics that there are, and look for others from now on."""
        if self._finder is not None:
            await self._finder.look()
        found = self._found()
        share = self._share(len(self._plain) + len(found))
        await asyncio.gather(*(self._join(topic, called, start, share) for topic, called in self._plain.items()))
        await asyncio.gather(*(self._join_found(topic, called, start, share) for topic, called in found.items()))
        self._heard = self._loop.time()
        self._tending = asyncio.create_task(self._tend())

    async def abandon(self) -> None:
        """Give up joining, and leave nothing behind: whoever waits for the broker in a thread is thrown out."""
        self._room.close()
        closing = [asyncio.to_thread(self._client.shutdown)]
        if self._finder is not None:
            closing.append(self._finder.close())
        await asyncio.shield(asyncio.gather(*closing))

    def _found(self) -> dict[TopicName, str]:
        """The topics of templates that are to be joined."""
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
        """How many messages are fetched in advance of each of so many topics."""
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
        """One that cannot be joined is left for later."""
        try:
            await self._join(topic, called, start, share)
        except Exception as error:
            if topic not in self._refused:
                _log.warning("topic %s cannot be received now: %s", topic, said(error))
            self._refused[topic] = self._loop.time() + _REFUSED
        finally:
            self._joins.pop(topic, None)

    async def _tend(self) -> None:
        """Find out what the client does not say, and join new topics."""
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
            # Not waited for: a broker that does not answer about one topic must not make others late.
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
        # A broker that changes the active member of a group while it waits for messages may go on waiting, whatever is
        # stored, until the next one is published (seen once, on 4.0.8). So ask it to look again.
        if self._kind == "failover" and not len(self._shelf) and now - self._heard > _IDLE:
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
        self._told = False  # before we look: what arrives from now on is told again
        self._heard = self._loop.time()
        while self._arrived:
            copy = self._arrived.popleft()
            if not self._shelf.put(copy):
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
        """The client calls this for each message of a topic, and waits as long as we do."""
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
            with suppress(RuntimeError):  # the loop was closed, and the subscription was not
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
        """Sends what is acknowledged; a broker that does not answer is left without."""
        goodbye = threading.Thread(target=self._give_up, args=(self._client,), name="pillarbox-pulsar", daemon=True)
        goodbye.start()
        goodbye.join(_FAREWELL)
        self._client.shutdown()
        goodbye.join()


@dataclass(slots=True)
class _Consumer:
    of_client: Any
    connected: float
    """When it was last seen to be connected."""
