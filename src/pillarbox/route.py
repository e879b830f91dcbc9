"""Routes: which events go where.

Before this: an aggregate raised an event and its session captured it. After it: the store writes one delivery per
route. Everything that can be decided is decided here, in the business transaction: topic, key, shard, schema version,
bytes. The relay only carries.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, Literal

import msgspec

from .codec import Codec, Content
from .context import NO_CONTEXT, check_header
from .errors import ConfigurationError, HeaderError, PayloadTooLargeError, RouteError, TenancyError
from .event import EventType, Raised, registry
from .outbox import INBOX_DESTINATION, LOCAL, Delivery, FailurePolicy, RouteRecord, shard_of
from .payload import Plain
from .retry import RetryPolicy
from .transport import Capabilities

logger = logging.getLogger("pillarbox")

PATTERN = re.compile(r"(?:[a-z0-9_-]+|\*)(?:\.(?:[a-z0-9_-]+|\*))*(?:\.\*\*)?|\*\*")
PLACEHOLDERS = frozenset({"tenant", "aggregate"})
# What may be put into a topic's name: no dot and no slash, so that two tenants can never meet in one topic.
TOPIC_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_PLACEHOLDER = re.compile(r"\{(" + "|".join(sorted(PLACEHOLDERS)) + r")\}")
MAX_KEY_BYTES = 512
MAX_TENANT_BYTES = 200
MAX_TOPIC = 400

KeyOf = Callable[[Any], str]
OnFailure = FailurePolicy | Literal["park", "skip"]


class Route:
    """Sends the events that match its patterns to one topic of one transport.

    ``*`` stands for one part of an event's name, ``**`` at the end for one or more. The topic may contain ``{tenant}``
    and
    ``{aggregate}``. ``version`` sends that schema version, by downcasters if the event is newer, so v1 and v2 can go
    out side by side.
    ``key`` computes the ordering key from the event; by default it is the aggregate's id. ``name`` identifies the route
    for ever: rename the patterns as you like, but not the name while deliveries wait under it.
    """

    def __init__(
        self,
        *patterns: str,
        to: str,
        topic: str,
        name: str | None = None,
        key: KeyOf | None = None,
        codec: str = "json",
        version: int | None = None,
        shard_by: Literal["key", "tenant"] = "key",
        on_failure: OnFailure = FailurePolicy.PARK,
        retry: RetryPolicy | None = None,
        copy: bool = False,
    ) -> None:
        self.patterns = patterns
        self.to = to
        self.topic = topic
        self.name = name or f"{to}:{topic}" + (f":v{version}" if version else "")
        self.key = key
        self.codec = codec
        self.version = version
        self.shard_by = shard_by
        self.copy = copy
        self._check()
        try:
            policy = FailurePolicy(on_failure)
        except ValueError:
            raise RouteError(f"{self!r}: on_failure is 'park' or 'skip', got {on_failure!r}") from None
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise RouteError(f"{self!r}: retry is a RetryPolicy, got {retry!r}")
        self.record = RouteRecord(self.name, to, topic, version, policy, retry or RetryPolicy(), shard_by)
        self.id = self.record.id

    def __repr__(self) -> str:
        return f"Route({', '.join(map(repr, self.patterns))}, to={self.to!r}, topic={self.topic!r}, name={self.name!r})"

    def matches(self, event_name: str) -> bool:
        """Whether an event of this name goes this way."""
        return any(matches(pattern.split("."), event_name.split(".")) for pattern in self.patterns)

    def overlaps(self, other: Route) -> bool:
        """Whether some event name could match both."""
        return any(_intersects(a.split("."), b.split(".")) for a in self.patterns for b in other.patterns)

    def topic_for(self, tenant: str | None, aggregate_type: str) -> str:
        """The topic's final name."""
        if "{" not in self.topic:
            return self.topic
        values = {"tenant": tenant, "aggregate": aggregate_type}
        topic = re.sub(r"\{(\w+)\}", lambda found: self._part(found[1], values[found[1]]), self.topic)
        if len(topic) > MAX_TOPIC:
            raise HeaderError(f"{self!r}: the topic {topic!r} has {len(topic)} characters, and {MAX_TOPIC} are allowed")
        return topic

    def _part(self, placeholder: str, value: str | None) -> str:
        if value is None:
            raise TenancyError(f"{self!r}: its topic names the tenant, and this event has none")
        if not TOPIC_PART.fullmatch(value):
            raise HeaderError(
                f"{self!r}: {placeholder} {value!r} cannot be part of a topic name; use letters, digits, '_' and '-'"
            )
        return value

    def _check(self) -> None:
        if not self.patterns:
            raise RouteError(f"{self!r}: name at least one pattern of events, like 'orders.order.*'")
        for pattern in self.patterns:
            if not isinstance(pattern, str) or not PATTERN.fullmatch(pattern):
                raise RouteError(
                    f"{self!r}: {pattern!r} is not a pattern; "
                    "write 'orders.order.placed', 'orders.order.*' or 'orders.**'"
                )
        for first, second in combinations(self.patterns, 2):
            if _intersects(first.split("."), second.split(".")):
                raise RouteError(f"{self!r}: its patterns {first!r} and {second!r} overlap; one of them is enough")
        if not self.to or not self.topic or len(self.topic) > MAX_TOPIC or not self.topic.isprintable():
            raise RouteError(f"{self!r}: needs a destination and a topic of 1 to {MAX_TOPIC} printable characters")
        names = re.findall(r"\{([^{}]*)\}", self.topic)
        if unknown := [name for name in names if name not in PLACEHOLDERS]:
            raise RouteError(
                f"{self!r}: unknown placeholder {{{unknown[0]}}}; a topic may use {{tenant}} and {{aggregate}}"
            )
        if set("{}") & set(re.sub(r"\{[^{}]*\}", "", self.topic)):
            raise RouteError(f"{self!r}: the topic has an unbalanced brace")
        if self.key is not None and not callable(self.key):
            raise RouteError(f"{self!r}: key is a function of the event, got {self.key!r}")
        if self.version is not None and (type(self.version) is not int or self.version < 1):
            raise RouteError(f"{self!r}: version must be a whole number from 1, got {self.version!r}")
        if self.shard_by not in ("key", "tenant"):
            raise RouteError(f"{self!r}: shard_by is 'key' or 'tenant', got {self.shard_by!r}")
        if len(self.name) > MAX_TOPIC or not self.name.isprintable():
            raise RouteError(f"{self!r}: a route's name has at most {MAX_TOPIC} printable characters")


def check_routes(routes: Sequence[Route], transports: Iterable[str]) -> None:
    """Refuse routes that cannot work together; the message names both."""
    known = set(transports)
    if LOCAL in known:
        raise RouteError(f"{LOCAL!r} is the name of the handlers in this process; call the transport something else")
    for route in routes:
        if route.to not in known:
            raise RouteError(
                f"{route!r}: no transport is called {route.to!r}; known are: {', '.join(sorted(known)) or 'none'}"
            )
    for one, other in combinations(routes, 2):
        if one.name == other.name:
            raise RouteError(f"two routes have the same name: {one!r} and {other!r}; give one of them name=...")
        same_place = one.to == other.to and one.version == other.version
        if same_place and one.topic == other.topic:
            raise RouteError(
                f"two routes share one topic, which would break its order: {one!r} and {other!r}; "
                "join their patterns in one route"
            )
        if same_place and one.overlaps(other) and not (one.copy or other.copy):
            raise RouteError(
                f"two routes overlap: {one!r} and {other!r}; "
                "narrow the patterns, or say copy=True on the one that takes copies"
            )


def check_transports(transports: Mapping[str, object]) -> None:
    """Refuse what is no transport, before the first message finds out."""
    for name, transport in transports.items():
        where, kind = f"transports[{name!r}]", type(transport).__name__
        if name == INBOX_DESTINATION:
            raise ConfigurationError(
                f"{where}: {name!r} is the name of the consumers' side; call the transport something else"
            )
        if isinstance(transport, type):
            raise ConfigurationError(f"{where} is a class: give an instance, {transport.__name__}(...)")
        if missing := [each for each in _MEMBERS if not hasattr(transport, each)]:
            raise ConfigurationError(
                f"{where}: {kind} is no transport, it has no {', '.join(missing)}; see pillarbox.transport.Publisher"
            )
        for each in ("open", "send", "close"):
            if _surely_not_async(getattr(transport, each)):
                raise ConfigurationError(f"{where}: {kind}.{each} is not async; write `async def {each}(...)`")


_MEMBERS = ("capabilities", "preflight", "open", "send", "close")


def _surely_not_async(method: object) -> bool:
    """A plain ``def``. One that is decorated, or says that it returns something to be awaited, may well be right."""
    if not inspect.ismethod(method) or inspect.iscoroutinefunction(method) or hasattr(method, "__wrapped__"):
        return False
    returns = str(method.__func__.__annotations__.get("return", ""))
    return not any(each in returns for each in ("Awaitable", "Coroutine", "Future", "Task"))


@lru_cache(maxsize=1024)
def topic_pattern(topic: str) -> re.Pattern[str] | None:
    """What the topics look like that a template, as routes have it, may come to, with a group for each placeholder;
    None if it is a plain name.
    """
    if "{" not in topic:
        return None
    pattern, known = "", set[str]()
    for index, part in enumerate(_PLACEHOLDER.split(topic)):
        if index % 2:
            pattern += f"(?P={part})" if part in known else f"(?P<{part}>{TOPIC_PART.pattern})"
            known.add(part)
        elif set("{}") & set(part):
            raise ConfigurationError(f"the topic {topic!r} may use {{tenant}} and {{aggregate}}, and no other braces")
        else:
            pattern += re.escape(part)
    return re.compile(pattern)


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """The template with these values for its placeholders; those without a value stay."""
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), template)


def may_come_to(template: str, topic: str, tenant: str) -> bool:
    """Whether a template, as routes have it, or a plain name, may come to this topic for this tenant."""
    if "{tenant}" in template:
        if not TOPIC_PART.fullmatch(tenant):
            return False
        template = fill_template(template, {"tenant": tenant})
    pattern = topic_pattern(template)
    return topic == template if pattern is None else pattern.fullmatch(topic) is not None


class Origin(msgspec.Struct, frozen=True, gc=False):
    """Where a raised event comes from: the aggregate, or just a key."""

    aggregate_type: str
    aggregate_id: str
    version: int | None
    index: int
    count: int


class Router:
    """Turns raised events into deliveries, for the routes and handlers of one box."""

    def __init__(
        self,
        routes: Sequence[Route],
        codecs: Callable[[str], Codec],
        capabilities: Mapping[str, Capabilities],
        shards: int,
    ) -> None:
        self.shards = shards
        self._routes = list(routes)
        self._handlers: dict[str, Route] = {}
        self._handled: dict[str, list[Route]] = {}
        self._codecs = {route.codec: codecs(route.codec) for route in routes} | {"json": codecs("json")}
        self._capabilities = capabilities
        self._plans: dict[EventType, tuple[Route, ...]] = {}
        self._records: tuple[RouteRecord, ...] | None = None

    @property
    def records(self) -> tuple[RouteRecord, ...]:
        """Everything that must be registered in the database before the first row."""
        if self._records is None:
            self._records = tuple(route.record for route in (*self._routes, *self._handlers.values()))
        return self._records

    def feed(self, consumer: str, kinds: Sequence[EventType], retry: RetryPolicy, on_failure: OnFailure) -> None:
        """Deliver these events, and no others, to a consumer of this process, by a route of its own."""
        for routes in self._handled.values():
            routes[:] = [route for route in routes if route.topic != consumer]
        names = sorted({kind.name for kind in kinds})
        route = Route(*names, to=LOCAL, topic=consumer, name=f"{LOCAL}:{consumer}", retry=retry, on_failure=on_failure)
        self._handlers[consumer] = route
        for name in names:
            self._handled.setdefault(name, []).append(route)
        self._changed()

    def add(self, route: Route) -> None:
        """One more way, which nobody's events go by themselves."""
        if any(route.name == known.record.name for known in self._routes):
            raise RouteError(f"two routes have the same name: {route!r}")
        self._routes.append(route)
        self._changed()

    def _changed(self) -> None:
        self._plans.clear()
        self._records = None

    def reaches(self, destination: str) -> bool:
        """Whether there is such a transport."""
        return destination in self._capabilities

    def plan(self, kind: EventType) -> tuple[Route, ...]:
        """The ways that events of this type go. Events that are not integration events stay with the handlers."""
        plan = self._plans.get(kind)
        if plan is None:
            away = [route for route in self._routes if kind.integration and route.matches(kind.name)]
            plan = self._plans[kind] = (*_once_per_topic(away, kind), *self._handled.get(kind.name, ()))
            if kind.integration and not plan:
                logger.warning("%s matches no route and has no handler: it is written nowhere", kind.name)
        return plan

    def deliveries(self, raised: Raised, origin: Origin, tenant: str | None) -> list[Delivery]:
        """One delivery per route, encoded."""
        kind = raised.type
        found = []
        for route in self.plan(kind):
            version = route.version or kind.version
            codec = self._codecs[route.codec]
            headers = _headers(raised, origin, version, codec.content_type, tenant)
            payload = (
                raised.payload
                if version == kind.version
                else registry.cast(kind.name, raised.payload, kind.version, version)
            )
            body = codec.encode(Content(kind.name, version, raised.event_id, raised.occurred_at, payload), headers)
            self._check_size(route, body, headers, payload)
            ordering = origin.aggregate_id
            if route.key is not None:
                ordering = check_key("key", route.key(raised.event), MAX_KEY_BYTES)
            if route.shard_by == "tenant" and tenant is None:
                raise TenancyError(f"{route!r} is sharded by tenant, and this event has none")
            unit = ordering if route.shard_by == "key" else tenant or ""
            found.append(
                Delivery(
                    event_id=raised.event_id,
                    event_type=kind.name,
                    route=route.id,
                    shard=shard_of(unit, self.shards),
                    schema_version=version,
                    topic=route.topic_for(tenant, origin.aggregate_type),
                    key=ordering,
                    tenant=tenant,
                    headers=headers,
                    body=body,
                )
            )
        return found

    def _check_size(self, route: Route, body: bytes, headers: Mapping[str, str], payload: Mapping[str, Plain]) -> None:
        limits = self._capabilities.get(route.to)
        if limits is None:
            return
        if len(body) > limits.max_body_bytes:
            largest = max(payload, key=lambda name: len(str(payload[name])), default="payload")
            raise PayloadTooLargeError(
                f"{largest}: the body has {len(body):,} bytes and {route.to!r} takes {limits.max_body_bytes:,}; "
                "this is its largest field"
            )
        characters = sum(map(len, headers)) + sum(map(len, headers.values()))
        if characters * 4 <= limits.max_header_bytes:  # no character takes more than four bytes
            return
        total = sum(len(name) + len(value.encode()) for name, value in headers.items())
        if total > limits.max_header_bytes:
            raise PayloadTooLargeError(
                f"headers: they have {total:,} bytes and {route.to!r} takes {limits.max_header_bytes:,}"
            )


def _once_per_topic(routes: Sequence[Route], kind: EventType) -> list[Route]:
    """A route for an old schema version rests while the event is still at that version and goes to the topic anyway."""
    as_it_is = {(route.to, route.topic) for route in routes if route.version is None}
    return [route for route in routes if route.version != kind.version or (route.to, route.topic) not in as_it_is]


def check_key(name: str, value: str, limit: int) -> str:
    """A key or tenant: a printable string, not empty, within the limit, taken byte by byte as it is."""
    if not isinstance(value, str) or not value:
        raise HeaderError(f"{name}: must be a string that is not empty, got {value!r}")
    if not value.isprintable():
        check_header(name, value)
    if len(value) * 4 > limit and (size := len(value.encode())) > limit:
        raise HeaderError(f"{name}: has {size} bytes, and {limit} are allowed")
    return value


def check_tenant(tenant: str) -> str:
    """What a session may belong to."""
    if check_key("tenant", tenant, MAX_TENANT_BYTES) != tenant.strip():
        raise TenancyError(f"the tenant {tenant!r} begins or ends with a space, which MySQL does not see")
    return tenant


@lru_cache(maxsize=4096)
def default_aggregate_type(event_name: str) -> str:
    """For events without an aggregate: the second part of the event's name."""
    return event_name.split(".")[1]


def _headers(raised: Raised, origin: Origin, version: int, content_type: str, tenant: str | None) -> dict[str, str]:
    headers = {
        "event_id": msgspec.to_builtins(raised.event_id),  # as str() has it, in a quarter of the time
        "event_type": raised.type.name,
        "aggregate_id": origin.aggregate_id,
        "aggregate_type": origin.aggregate_type,
        "occurred_at": raised.occurred_at.isoformat().removesuffix("+00:00") + "Z",
        "schema_version": f"v{version}",
        "content_type": content_type,
        "event_index": str(origin.index),
        "event_count": str(origin.count),
    }
    if raised.context is not NO_CONTEXT:
        headers |= raised.context.headers()
    if tenant is not None:
        headers["tenant_id"] = tenant
    if origin.version is not None:
        headers["version"] = str(origin.version)
    return headers


def matches(pattern: Sequence[str], name: Sequence[str]) -> bool:
    """Whether a pattern, in its parts, covers the name of an event."""
    if not pattern or not name:
        return not pattern and not name
    if pattern[0] == "**":
        return True
    return pattern[0] in ("*", name[0]) and matches(pattern[1:], name[1:])


def _intersects(one: Sequence[str], other: Sequence[str]) -> bool:
    if not one or not other:
        return not one and not other
    if "**" in (one[0], other[0]):
        return True
    return (one[0] == other[0] or "*" in (one[0], other[0])) and _intersects(one[1:], other[1:])
