"""Apache Pulsar, exactly once: by a lane's numbers, the broker's deduplication, and a producer name per lane.

The transport has its own implementation of the broker's protocol: a batch is deduplicated only if it has its first and
its highest number, which the official client for Python never sends. See docs/explanation/pulsar.md for the guarantees
and their limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from ...errors import ConfigurationError
from ...transport import Capabilities, Message, Outcome, Rejection, TopicsRefusedError, Verdict
from . import wire_pb2 as wire
from .address import check_admin_url, parse_address
from .admin import PulsarAdmin
from .client import Client
from .connection import DEFAULT_MESSAGE_LIMIT, SMALLEST_MESSAGE_LIMIT, BrokerError
from .credentials import Credentials, Tls
from .entries import Compression, Cut, Cutter
from .frames import Entry
from .history import PulsarHistory
from .names import TopicName, partition_of, spellings
from .producer import Answers, Producer
from .subscriber import KINDS, PulsarSubscriber, PulsarSubscription
from .templates import check_topics, namespaces_of

_Kind = TypeVar("_Kind", bound=StrEnum)

ROOM = 16_384
"""Largest size of an entry's metadata, without its messages."""
_OURS = frozenset({wire.NotAllowedError, wire.ChecksumError})
"""Errors caused by the entry, not by the broker."""
_THIS_TOPIC = frozenset({
    wire.AuthorizationError, wire.TopicNotFound, wire.TopicTerminatedError, wire.InvalidTopicName, wire.NotAllowedError,
    wire.ProducerBlockedQuotaExceededError, wire.ProducerBlockedQuotaExceededException, wire.IncompatibleSchema,
    wire.MetadataError,
})  # fmt: skip
"""Errors at opening that concern one topic and persist: the others are opened anyway."""
MOVING = 3.0
"""Seconds for which a lane waits for a topic that fails while others are open: usually the topic is being moved, which
takes less than one. After that, it is refused, and the others continue.
"""
AT_ONCE = 4
"""Number of topics that a lane opens at the same time, so that one that does not answer does not delay all others. Not
more, because many lanes start together, and a broker that loads hundreds of topics at once is slow with each.
"""
TIMEOUT = 8.0
"""Seconds for an answer. A broker first asks the holder of a producer's name, for five seconds, whether it is alive. A
client that gives up earlier makes the broker start over.
"""
PAUSES = 4
"""A refused topic is not retried for this many times as long as it took to fail, so that topics that do not answer stop
their lane for at most a fifth of the time.
"""


MAX_HEADERS = SMALLEST_MESSAGE_LIMIT // 4
LARGE = MAX_HEADERS // 8
"""Smaller messages are never too large."""
RECOUNT = 60.0
"""Seconds after which the partitions of a topic and the settings of a namespace are read again."""
FORGETS_AFTER = 6 * 3600.0
"""Seconds: a broker's default of brokerDeduplicationProducerInactivityTimeoutMinutes."""
SLOWEST = 30.0
"""Seconds that a request may take: a producer reconnects by itself meanwhile."""
IDLE = 300.0
"""Seconds after which an unused producer is closed, when others are opened."""


_OPTIONS: dict[str, Callable[[str], Any]] = {
    "guarantee": str,
    "entries": str,
    "compression": str,
    "compress_from": int,
    "max_message_bytes": int,
    "timeout": float,
    "keep_alive": float,
    "listener_name": str,
    "subscription": str,
}
"""Options of an address, beside location and credentials."""


class _Topic(NamedTuple):
    partitions: int
    places: tuple[str, ...]
    seen: float


class _Failing(NamedTuple):
    """A topic that could not be opened."""

    error: OSError | ConfigurationError
    since: float
    again: float
    """Time of the next try."""

    @property
    def is_final(self) -> bool:
        """Whether the failure concerns this topic alone, and persists."""
        error = self.error
        return isinstance(error, ConfigurationError) or (isinstance(error, BrokerError) and error.code in _THIS_TOPIC)


class Guarantee(StrEnum):
    """How often a message may be on the topic."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"


class PulsarTransport:
    """A `Publisher` for a Pulsar cluster.

    ``url`` is that of the binary protocol (``pulsar://host:6650``, several hosts separated by commas, ``pulsar+ssl://``
    for TLS). ``admin_url`` is that of the REST interface, where the transport checks that deduplication is on; without
    it, ``exactly_once`` is refused. ``entries`` cut ``by_key`` suit every subscription; ``mixed`` ones are faster, but
    not for key_shared. Payloads from ``compress_from`` bytes on are compressed by ``compression``. ``listener_name``
    selects one of the broker's ``advertisedListeners``, for example behind a port forward. Consumers join by a
    ``subscription`` of this kind, see `PulsarSubscriber`.
    """

    def __init__(
        self,
        url: str,
        *,
        admin_url: str | None = None,
        guarantee: Literal["exactly_once", "at_least_once"] = "exactly_once",
        entries: Literal["by_key", "mixed"] = "by_key",
        compression: Literal["none", "lz4", "zstd"] = "none",
        compress_from: int = 4_096,
        max_message_bytes: int = DEFAULT_MESSAGE_LIMIT,
        credentials: Credentials | None = None,
        tls: Tls | None = None,
        timeout: float = TIMEOUT,
        keep_alive: float = 5.0,
        listener_name: str | None = None,
        subscription: Literal["key_shared", "failover"] = "key_shared",
    ) -> None:
        address = parse_address(url)
        if address.options:
            raise ConfigurationError(f"a Pulsar address has no option {next(iter(address.options))!r}")
        admin_url = address.admin_url if admin_url is None else check_admin_url(admin_url)
        credentials, tls = credentials or address.credentials, tls or address.tls
        self._guarantee = _choice("guarantee", Guarantee, guarantee)
        self._cutter = Cutter(
            cut := _choice("entries", Cut, entries), _choice("compression", Compression, compression), compress_from
        )
        if timeout <= 0 or keep_alive <= 0 or max_message_bytes < SMALLEST_MESSAGE_LIMIT or compress_from < 0:
            raise ConfigurationError(
                "timeout and keep_alive must be above 0, compress_from not below, and max_message_bytes at least "
                f"{SMALLEST_MESSAGE_LIMIT:,}"
            )
        if subscription not in KINDS:
            raise ConfigurationError(f"subscription is one of {', '.join(KINDS)}, not {subscription!r}")
        numbered = self._guarantee is Guarantee.EXACTLY_ONCE
        if numbered and admin_url is None:
            raise ConfigurationError(
                "exactly_once needs admin_url, the address of the REST interface: only there can be seen that "
                "deduplication is on; without it say guarantee='at_least_once'"
            )
        self._capabilities = Capabilities(
            max_body_bytes=_body_limit(max_message_bytes),
            max_header_bytes=MAX_HEADERS,
            timeout=SLOWEST,
            numbered=numbered,
            grouped=cut is Cut.BY_KEY,
            opens=True,
            forgets_after=FORGETS_AFTER,
        )
        self._max_message_bytes = max_message_bytes
        self._client = Client(
            address.service_url, credentials, tls, timeout=timeout, keep_alive=keep_alive, listener_name=listener_name
        )
        self.admin = PulsarAdmin(admin_url, credentials, tls) if admin_url is not None else None
        self._reading: dict[str, Any] = {
            "url": url, "kind": subscription, "admin_url": admin_url, "credentials": credentials, "tls": tls,
        }  # fmt: skip
        self._timeout = timeout
        self._producers: dict[str, dict[str, Producer]] = {}
        """Producers by name, then by physical topic."""
        self._topics: dict[str, _Topic] = {}
        self._failing: dict[tuple[str, str], _Failing] = {}
        """Topics that fail while others of the producer are open, by producer and topic."""
        self._deduplicating: set[str] = set()
        self._checking: dict[str, asyncio.Lock] = {}
        self._namespaces: dict[str, float] = {}
        """Time at which a namespace was last seen to deduplicate."""
        self._largest: dict[str, int] = {}
        """The largest stored payload of each topic."""
        self._entry_limits: dict[str, int] = {}
        """Limits of topics that accept less than their broker."""
        self._numbers: dict[str, int] = {}

    @classmethod
    def from_address(cls, address: str) -> PulsarTransport:
        """Create a transport from the settings: ``pulsar://host:6650?admin=http://host:8080&entries=mixed``."""
        parsed = parse_address(address)
        options: dict[str, Any] = {}
        for name, value in parsed.options.items():
            if name not in _OPTIONS:
                raise ConfigurationError(f"a Pulsar address has no option {name!r}; there are {', '.join(_OPTIONS)}")
            try:
                options[name] = _OPTIONS[name](value)
            except ValueError:
                raise ConfigurationError(f"the option {name} of a Pulsar address is a number, not {value!r}") from None
        return cls(
            parsed.service_url, admin_url=parsed.admin_url, credentials=parsed.credentials, tls=parsed.tls, **options
        )

    def __repr__(self) -> str:
        return f"PulsarTransport({self._client.url!r})"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def _limit(self) -> int:
        """Largest entry: as configured, or as the connected brokers allow."""
        return min([self._max_message_bytes, *self._client.message_limits()])

    def preflight(self, message: Message) -> str | None:
        size = len(message.body)
        if size > LARGE and size > (limit := _body_limit(self._limit)):
            return f"the body has {size:,} bytes, and {limit:,} are allowed"
        if sum(map(len, message.headers.values())) > LARGE:
            size = sum([len(name.encode()) + len(value.encode()) for name, value in message.headers.items()])
            if size > MAX_HEADERS:
                return f"the headers have {size:,} bytes, and {MAX_HEADERS:,} are allowed"
        return self._misnamed(message.topic)

    # -- opening -------------------------------------------------------------------------------------------------------

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:
        missing = [topic for topic in topics if self._standing(producer, topic) is None]
        failing = await self._open_missing(producer, missing) if missing else {}
        now, lasts = asyncio.get_running_loop().time(), dict[str, int]()
        held = self._producers.get(producer, {})
        for topic in topics:
            for place in self._topics[topic].places if topic not in failing else ():
                if place in held:  # otherwise another lane has just found it: unavailable for now
                    held[place].used = now
                    lasts[place] = held[place].last
        if len(failing) < len(missing):
            self._close_idle(held, now)
        if failing:
            self._refuse(producer, failing)
        return lasts if self._capabilities.numbered else {}

    async def _open_missing(self, owner: str, topics: Sequence[str]) -> dict[str, _Failing]:
        """Open all topics that can be opened. Returns the failures."""
        turns = asyncio.Semaphore(AT_ONCE)
        # Wait for all of them: a producer that is opened after a return would keep its name.
        tried = await asyncio.gather(*(self._try(owner, topic, turns) for topic in topics), return_exceptions=True)
        failing: dict[str, _Failing] = {}
        for topic, failure in zip(topics, tried, strict=True):
            if isinstance(failure, BaseException):
                raise failure
            if failure is not None:
                failing[topic] = failure
        return failing

    async def _try(self, owner: str, topic: str, turns: asyncio.Semaphore) -> _Failing | None:
        clock = asyncio.get_running_loop().time
        async with turns:
            began, before = clock(), self._failing.get((owner, topic))
            if before is not None and began < before.again:
                return before
            try:
                await self._open(owner, topic, owner if self._capabilities.numbered else None)
            except (OSError, ConfigurationError) as error:
                ended = clock()
                lasting = before is not None and began < before.again + RECOUNT  # otherwise it was unused for long
                since = before.since if before is not None and lasting else began
                return _Failing(error.with_traceback(None), since, ended + PAUSES * (ended - began))
            self._failing.pop((owner, topic), None)
            return None

    def _refuse(self, owner: str, failing: Mapping[str, _Failing]) -> NoReturn:
        """Raise the error for topics that cannot be opened. If none can, the destination is unavailable, and no topic
        is to blame.
        """
        now = asyncio.get_running_loop().time()
        theirs = {place for topic in failing if topic in self._topics for place in self._topics[topic].places}
        held = self._producers.get(owner, {})
        others = any(each.lost_because is None for place, each in held.items() if place not in theirs)
        refused: dict[str, str] = {}
        for topic, failure in failing.items():
            if failure.is_final or (others and failure.since + MOVING <= now):
                refused[topic] = str(failure.error)
            if others and not failure.is_final:
                self._failing[owner, topic] = failure
            else:
                self._failing.pop((owner, topic), None)
        if refused:
            raise TopicsRefusedError(refused)
        raise next(iter(failing.values())).error

    def partitions(self, topic: str) -> int:
        """Number of partitions of the topic, as known since it was opened; 0 if it has none."""
        known = self._topics.get(topic)
        return 0 if known is None else known.partitions

    def place(self, topic: str, key: str, partitions: int) -> str:
        """The partition of a key, for this number of partitions."""
        return _place(topic, partition_of(key, partitions))

    def _standing(self, owner: str, topic: str) -> dict[str, Producer] | None:
        """The producers of a topic, if all of them are open."""
        known = self._topics.get(topic)
        held = self._producers.get(owner)
        if known is None or held is None or known.seen + RECOUNT < asyncio.get_running_loop().time():
            return None
        found = {place: held[place] for place in known.places if place in held and held[place].lost_because is None}
        return found if len(found) == len(known.places) else None

    async def _open(self, owner: str, topic: str, name: str | None) -> None:
        """Open the missing producers of a topic: one, or one for each of its partitions."""
        parsed = TopicName.parse(topic)
        if self._capabilities.numbered:
            await self._check_deduplication(topic, parsed)
        now = asyncio.get_running_loop().time()
        count = await self._client.partitions(parsed)
        places = {str(each): each for each in map(parsed.partition, range(count))} or {topic: parsed}
        self._topics[topic] = _Topic(count, tuple(places), now)
        held = self._producers.setdefault(owner, {})
        missing = [place for place in places if place not in held or held[place].lost_because is not None]
        await asyncio.gather(*(held[place].closed() for place in missing if place in held))
        opened = await asyncio.gather(
            *(self._open_place(held, place, places[place], name) for place in missing), return_exceptions=True
        )
        for failure in opened:
            if failure is not None:
                raise failure

    def _close_idle(self, held: dict[str, Producer], now: float) -> None:
        """Close unused producers. A lane may have a topic for each tenant, and most tenants are idle most of the time.
        The broker and the lane remember the numbers. A producer whose name the broker has not released yet is kept, so
        that the next use can wait for that.
        """
        for place, producer in list(held.items()):
            if producer.used + IDLE < now:
                producer.close()
                if producer.is_gone:
                    del held[place]

    async def _open_place(self, held: dict[str, Producer], place: str, topic: TopicName, name: str | None) -> None:
        connection = await self._client.broker_of(topic)
        # Stored at once: the caller may have been cancelled.
        held[place] = await Producer.open(connection, str(topic), name, patience=self._timeout)

    async def _check_deduplication(self, topic: str, name: TopicName) -> None:
        """Check deduplication once for all lanes: they start together, so one of them asks and the others wait."""
        if self.admin is None or topic in self._deduplicating:
            return
        async with self._checking.setdefault(topic, asyncio.Lock()):
            if topic not in self._deduplicating and not await self._is_deduplicating(self.admin, name):
                raise ConfigurationError(
                    f"deduplication is off for {name}, so it cannot be written exactly once: run `pillarbox topics "
                    f"apply`, or `pulsar-admin namespaces set-deduplication {name.namespace_name} --enable`, or say "
                    "guarantee='at_least_once'"
                )
            self._deduplicating.add(topic)
        self._checking.pop(topic, None)

    async def _is_deduplicating(self, admin: PulsarAdmin, name: TopicName) -> bool:
        """The setting of a namespace is cached for a while: it may have a topic for each tenant."""
        said = await admin.deduplication_of(name, applied=True)
        if said is not None:
            return said
        namespace, now = name.namespace_name, asyncio.get_running_loop().time()
        if self._namespaces.get(namespace, float("-inf")) + RECOUNT < now:
            if not await admin.namespace_deduplicates(namespace):
                return False
            self._namespaces[namespace] = now
        return True

    # -- sending -------------------------------------------------------------------------------------------------------

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:
        for index, message in enumerate(messages):
            if (len(message.body) > LARGE or sum(map(len, message.headers.values())) > LARGE) and (
                refusal := self.preflight(message)
            ):  # the broker would cut the connection, which looks like an outage
                before = await self._send(producer, messages[:index]) if index else Outcome(())
                whole = len(before.accepted) == index
                return replace(before, rejected=[Rejection(index, refusal)]) if whole else before
        return await self._send(producer, messages)

    async def _send(self, producer: str, messages: Sequence[Message]) -> Outcome:
        if not self._capabilities.numbered:
            messages = await self._made_ready(producer, messages)
        held = self._producers.get(producer, {})
        parts = list(_by_place(messages))
        for place, _, _ in parts:
            known = held.get(place)
            if known is None or known.lost_because is not None:
                why = "it is not open" if known is None else known.lost_because
                return Outcome((), unfinished=Verdict.UNAVAILABLE, reason=f"{place}: {why}")
        answered = await asyncio.gather(*(self._publish(held[place], some, where) for place, some, where in parts))
        return _outcome(answered)

    def check_topics(self, topics: Sequence[str]) -> None:
        """Refuse invalid names, and templates that cannot be resolved."""
        check_topics(topics, admin=self.admin is not None)

    async def subscribe(self, topics: Sequence[str], group: str) -> PulsarSubscription:
        """Receive from the same cluster. `PulsarSubscriber` has more options."""
        return await PulsarSubscriber(**self._reading).subscribe(topics, group)

    async def unsubscribe(self, topics: Sequence[str], group: str) -> None:
        """See `PulsarSubscriber.unsubscribe`."""
        await PulsarSubscriber(**self._reading).unsubscribe(topics, group)

    async def reread(self, topics: Sequence[str]) -> PulsarHistory:
        """See `PulsarSubscriber.reread`."""
        return await PulsarSubscriber(**self._reading).reread(topics)

    async def redelivery(self, topics: Sequence[str]) -> float | None:
        """How long a broker keeps unacknowledged messages: their time to live, or infinity."""
        if self.admin is None:
            return None
        found = [await namespaces_of(TopicName.parse(topic, template=True), self.admin) for topic in topics]
        namespaces = {place.namespace_name for places in found for place, _ in places}
        limits = await asyncio.gather(*map(self.admin.message_ttl, namespaces))
        return max([limit for limit in limits if limit is not None], default=None)

    def spellings(self, topic: str) -> Sequence[str]:
        """All names of this topic, or of this template."""
        return spellings(topic)

    async def close(self, producer: str | None = None) -> None:
        owners = list(self._producers) if producer is None else [producer]
        for owner in owners:
            for held in self._producers.pop(owner, {}).values():
                held.close()
            self._failing = {key: failing for key, failing in self._failing.items() if key[0] != owner}
        if producer is None:
            await self._client.close()
            if self.admin is not None:
                await self.admin.close()

    async def _publish(
        self, producer: Producer, messages: Sequence[Message], indexes: Sequence[int]
    ) -> tuple[Sequence[Entry], Answers]:
        topic = producer.topic
        limit = min(self._limit - ROOM, self._entry_limits.get(topic, self._max_message_bytes))
        entries = self._cutter.entries(messages, indexes, max_bytes=limit, after=producer.last)
        answers = await producer.publish(entries, largest=self._largest.get(topic, 0))
        if answers.stored:
            self._largest[topic] = max(
                self._largest.get(topic, 0), *[len(entries[index].payload) for index in answers.stored]
            )
        for index, error in list(answers.refused.items()):
            entry = entries[index]
            too_large = error.code == wire.NotAllowedError
            if too_large:
                # The topic accepts less than its broker, or than before: messages of this size must be sent alone
                # again.
                self._largest.pop(topic, None)
            if too_large and len(entry.messages) > 1:
                self._entry_limits[topic] = max(1, len(entry.payload) // 2)
            elif error.code in _OURS:
                continue
            if not any(later > index for later in answers.stored):
                # The messages are sent again, in smaller entries if this one was too large. But if a later entry is
                # stored, the last number of the topic would count this one as stored, too: then its messages get new
                # numbers, at the risk of a second copy.
                del answers.refused[index]
                answers.lost = str(error)
        if answers.lost is not None:
            producer.close()  # the next owner must read the last number first
        return entries, answers

    async def _made_ready(self, owner: str, messages: Sequence[Message]) -> Sequence[Message]:
        """For a destination without numbers: open the topics, and number the messages here."""
        await self.open(owner, {message.topic for message in messages})
        ready: list[Message] = []
        start = self._numbers.get(owner, 0)
        for number, message in enumerate(messages, start=start + 1):
            count = self.partitions(message.topic)
            place = self.place(message.topic, message.key, count) if count else ""
            ready.append(Message(message.topic, message.key, message.body, message.headers, number, place))
        self._numbers[owner] = start + len(messages)
        return ready

    def _misnamed(self, topic: str) -> str | None:
        if topic in self._topics:
            return None
        try:
            TopicName.parse(topic)
        except ConfigurationError as error:
            return str(error)
        return None


def _body_limit(message_limit: int) -> int:
    return message_limit - ROOM - 3 * MAX_HEADERS  # each header takes a little more than its text


@lru_cache(maxsize=65_536)
def _place(topic: str, partition: int) -> str:
    return str(TopicName.parse(topic).partition(partition))


def _by_place(messages: Sequence[Message]) -> Iterator[tuple[str, Sequence[Message], Sequence[int]]]:
    """The messages of each physical topic, with their positions in the request."""
    first = messages[0]
    if len({(message.topic, message.place) for message in messages}) == 1:
        yield first.place or first.topic, messages, range(len(messages))
        return
    found: dict[str, tuple[list[Message], list[int]]] = {}
    for index, message in enumerate(messages):
        part = found.setdefault(message.place or message.topic, ([], []))
        part[0].append(message)
        part[1].append(index)
    for place, (part_messages, indexes) in found.items():
        yield place, part_messages, indexes


def _outcome(answered: Sequence[tuple[Sequence[Entry], Answers]]) -> Outcome:
    accepted: list[int] = []
    duplicates: list[int] = []
    rejected: list[Rejection] = []
    reason = ""
    unfinished: Verdict | None = None
    for entries, answers in answered:
        for index in answers.stored:
            accepted += entries[index].indexes
        for index in answers.duplicates:
            duplicates += entries[index].indexes
        for index, error in answers.refused.items():
            rejected.append(Rejection(entries[index].indexes[0], str(error)))
        if answers.lost is not None:
            unfinished, reason = Verdict.UNKNOWN, answers.lost
    accepted += duplicates
    return Outcome(accepted, rejected, duplicates, unfinished, reason)


def _choice(name: str, kind: type[_Kind], value: str) -> _Kind:
    try:
        return kind(value)
    except ValueError:
        raise ConfigurationError(f"{name} is one of {', '.join(kind)}, not {value!r}") from None
