"""Decides whose fault rejections are: the messages' or the destination's.

A missing right or a wrong schema makes a broker reject every message. Each rejection looks like the message's own
fault, and a million deliveries would be out of attempts within minutes. So a relay counts, over all its lanes, which
keys a topic has rejected since it last accepted a message of the same tenant. The limit is twenty different keys. It is
three if the topic has never accepted anything from this relay, or if all of them were rejected twice. At the limit, the
*place*, the tenant's messages to that topic, is blocked. The counted attempts are given back, and one message at a time
probes the place until one is accepted. The lanes that have messages for it take turns.

A place is no evidence about other tenants. The whole topic is blocked only if several tenants are rejected and none is
accepted; then each tenant has its own probe.

A rejection does not count if the same request had another message of the place accepted, or if the message was rejected
before while its place accepted others. These are the messages' own fault, unless three such keys are rejected three
times each without an acceptance in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from . import clock, telemetry
from .outbox import Failure, Key, Lane, LaneName, Row
from .retry import RetryPolicy
from .transport import Message

logger = logging.getLogger("pillarbox")

REJECTS_EVERYTHING = "rejects everything"
MANY_KEYS = 20
FEW_KEYS = 3
MANY_TIMES = 3
MOST_KEYS = 100
"""After a long run of rejections and an acceptance, a topic is allowed twice that run, up to this many keys."""
PROBES = RetryPolicy(base=0.05, cap=30.0, attempts=1)
_PROBES_A_STEP = 20
"""Number of probes at the same interval: where most keys are bad, it takes several to find a good one."""
STANDSTILL_SECONDS = 30.0
"""A topic that rejects, and accepts nothing for this long, is unhealthy."""
PATIENCE = 1.0
"""Seconds after which any lane may send a probe that is due, if the lane whose turn it is did not."""
FORGOTTEN_SECONDS = 2 * PROBES.cap
"""A place that had no message for this long is forgotten."""
CANDIDATES = 100
"""Number of rows of a blocked place that stay due for its next probe. Rows beyond it are put off."""
MOST_PUT_OFF = 10_000
"""A lane with this many waiting keys puts no more rows off: they stay where they are and hold up the rows behind them.
"""
_KEYS_KEPT = 1_000
_ROWS_KEPT = 1_000
_BUGS_KEPT = 1_000
_TOPICS_KEPT = 10_000

Accepted = Collection[tuple[str, str | None]]
"""Topics and tenants that had a message of the request accepted."""


@dataclass(slots=True, eq=False)
class Topic:
    """A topic of a destination, and its rejections since the last acceptance."""

    destination: str
    name: str
    has_accepted: bool = False
    longest_run: int = 0
    keys: dict[Key, int] = field(default_factory=dict)
    """Number of rejections per key, over all tenants."""
    suspects: dict[Key, int] = field(default_factory=dict)
    """Keys that were rejected until their place accepted others, and that were not accepted since."""
    places: dict[str | None, Place] = field(default_factory=dict)
    """Places with rejections, by tenant."""
    blocked: bool = False
    rejects_since: float | None = None
    """Time since which a blocked place rejects probes while no place accepts anything."""

    def __str__(self) -> str:
        return f"{self.destination} {self.name}"

    @property
    def keys_needed(self) -> int:
        """Number of different keys that are evidence against the destination."""
        return min(MOST_KEYS, max(MANY_KEYS, 2 * self.longest_run))


@dataclass(slots=True, eq=False)
class Place:
    """The messages of one tenant to a topic, and their rejections since the last acceptance."""

    topic: Topic
    tenant: str | None
    keys: dict[Key, int] = field(default_factory=dict)
    """Number of rejections per key; the last rejected key is last."""
    again: dict[Key, int] = field(default_factory=dict)
    """The same for messages that had been rejected before others were accepted."""
    attempts: dict[LaneName, dict[int, int]] = field(default_factory=dict)
    """Rejected rows per lane, with their attempts before the rejection; of a blocked place, the rows put off."""
    lanes: dict[LaneName, None] = field(default_factory=dict)
    """Lanes that had a rejection in this place, or a message for it since it was blocked. They probe in this order."""
    blocked: bool = False
    reason: str = ""
    probes: int = 0
    skipped: int = 0
    """Number of lanes that had no message for a probe since the last one."""
    next_probe: float = 0.0
    met_at: float = 0.0
    """Time of the last message for it."""

    def __str__(self) -> str:
        return str(self.topic) if self.tenant is None else f"{self.topic} of tenant {self.tenant}"

    def is_turn_of(self, lane: LaneName) -> bool:
        """Whether the lane is the next to probe it."""
        return next(iter(self.lanes), None) == lane

    def due(self, lane: LaneName) -> float:
        """When the lane may probe it. The lane whose turn it is comes first, so that not all look for a message."""
        return self.next_probe if self.is_turn_of(lane) else self.next_probe + PATIENCE

    def to_the_end(self, lane: LaneName) -> None:
        """Move the lane behind all others."""
        self.lanes.pop(lane, None)
        self.lanes[lane] = None


@dataclass(slots=True)
class _Closed:
    what: str
    since: float
    tried_at: float


class Rejections:
    """The rejections that one relay has seen."""

    def __init__(
        self, draw: Callable[[], float], wake: Callable[[Collection[LaneName]], object] = lambda _lanes: None
    ) -> None:
        self._draw = draw
        self._wake = wake
        self.suspects = asyncio.Lock()
        """Held while a message is sent of which relays may have died."""
        self._topics: dict[tuple[str, str], Topic] = {}
        self._blocked: dict[LaneName, set[Place]] = {}
        """The blocked places of each lane. Empty while nothing is blocked, so that a turn costs nothing."""
        self._owed: dict[LaneName, dict[int, int]] = {}
        """Attempts to give back, per lane and row."""
        self._bugs: set[tuple[str, str, str, int]] = set()
        self._closed: dict[tuple[LaneName, str], _Closed] = {}
        """Topics that lanes cannot open."""
        self._swept_at = 0.0

    # -- results of requests -------------------------------------------------------------------------------------------

    def accepted(self, lane: Lane, messages: Sequence[Message], indexes: Collection[int]) -> None:
        """Record acceptances: earlier rejections of these tenants were the messages' own fault."""
        for name in {messages[index].topic for index in indexes}:
            topic = self._topic(lane, name)
            topic.has_accepted = True
            if topic.keys or topic.places or topic.suspects:
                mine = (messages[index] for index in indexes if messages[index].topic == name)
                keys = {Key(message.headers.get("tenant_id"), message.key) for message in mine}
                self._clear(topic, {key.tenant for key in keys})
                for key in keys:
                    topic.suspects.pop(key, None)

    def rejected(self, lane: Lane, row: Row, reason: str, accepted: Accepted = ()) -> int | None:
        """Count a rejection in a request that had other messages ``accepted``. If the destination is at fault, return
        the row's attempts without this rejection, else None.
        """
        topic = self._topic(lane, row.topic)
        place = topic.places.get(row.tenant)
        is_blocked = place is not None and place.blocked
        if not is_blocked and (row.topic, row.tenant) in accepted:
            return None
        is_new = place is None or row.order_key not in place.keys
        rejected_before = topic.has_accepted and row.attempts > 0 and is_new and not is_blocked
        place = self._place(topic, row.tenant)
        place.reason = reason
        self._meet(lane.name, place)
        # One attempt for each time that the place has accepted others meanwhile. Otherwise a few bad keys would be
        # evidence again and again, and never run out of attempts.
        before = row.attempts + (rejected_before or (is_new and row.order_key in topic.suspects))
        if rejected_before:
            _count(place.again, row.order_key)
        else:
            _count(place.keys, row.order_key)
            if not any(name == row.topic for name, _ in accepted):
                _count(topic.keys, row.order_key)
        if is_blocked:
            if topic.rejects_since is None:
                topic.rejects_since = clock.current().monotonic()
        elif lane.route.retry.exhausted(before):
            self._judge(place)
            return None
        else:
            _remember(place, lane.name, row.id, before, _ROWS_KEPT)
            self._judge(place)
            if not place.blocked:
                return None
        attempts = self._owed.get(lane.name, {}).pop(row.id, row.attempts)
        _remember(place, lane.name, row.id, attempts, MOST_PUT_OFF)
        return attempts

    def _judge(self, place: Place) -> None:
        topic = place.topic
        if len({key.tenant for key in topic.keys}) > 1 and _is_suspicious(topic.keys, topic):
            topic.blocked = True
            self._block(topic, [each for each in topic.places.values() if not each.blocked], topic.keys, place.reason)
        elif _is_suspicious(place.keys, topic):
            self._block(place, [place], place.keys, place.reason)
        elif sum(count >= MANY_TIMES for count in place.again.values()) >= FEW_KEYS:
            self._block(place, [place], place.again, place.reason)

    def _block(self, what: Topic | Place, places: Collection[Place], keys: Collection[Key], reason: str) -> None:
        for place in places:
            place.blocked = True
            self._postpone(place)
            for name in place.lanes:
                self._blocked.setdefault(name, set()).add(place)
            for name, attempts in place.attempts.items():
                self._owed.setdefault(name, {}).update(attempts)
            place.attempts.clear()
        logger.error(
            "%s rejects everything (%d different keys, %s): deliveries wait, no attempt is counted, and one message "
            "at a time probes it",
            *(what, len(keys), reason),
            extra=_fields(telemetry.LOG_REFUSES, what, reason),
        )
        self._wake({name for place in places for name in place.lanes})  # they have attempts to give back

    def _clear(self, topic: Topic, tenants: Collection[str | None]) -> None:
        topic.keys.clear()
        topic.rejects_since = None
        was_blocked, topic.blocked = topic.blocked, False
        cleared = [place for tenant in tenants if (place := topic.places.pop(tenant, None)) is not None]
        if was_blocked:  # places that were blocked only together with the others are free again
            logger.warning("%s accepts messages again", topic, extra=_fields(telemetry.LOG_TAKES, topic))
            innocent = [place for place in topic.places.values() if not _is_suspicious(place.keys, topic)]
            cleared += [topic.places.pop(place.tenant) for place in innocent]
        for place in cleared:
            for key in place.keys:
                _count(topic.suspects, key)
            if place.blocked and not was_blocked:
                logger.warning("%s accepts messages again", place, extra=_fields(telemetry.LOG_TAKES, place))
            topic.longest_run = max(topic.longest_run, min(len(place.keys), MOST_KEYS))
            if place.blocked:  # rows that were put off may be sent now
                for name, rows in place.attempts.items():
                    self._owed.setdefault(name, {}).update(rows)
            self._forget(place)

    # -- questions of lanes --------------------------------------------------------------------------------------------

    def filter_blocked(self, lane: Lane, rows: list[Row], fresh: Sequence[Row] = ()) -> list[Row]:
        """The rows that may be sent. Of a blocked place, this is only a probe when one is due, if possible of an
        untried key. Later rows of a key wait for its first row. In a log, ``fresh`` rows behind the first waiting one
        cannot be probes.
        """
        if not self._blocked:
            return rows
        places = [self._blocked_place(lane, row) for row in rows]
        firsts: dict[Key, Row] = {}
        candidates: dict[Place, list[Row]] = {}
        only_once = {row.id for row in fresh} if lane.cursor is not None else set[int]()
        is_behind = False
        for row, place in zip(rows, places, strict=True):
            is_first = firsts.setdefault(row.order_key, row) is row
            if place is None or (is_behind and row.id in only_once):
                continue
            if is_first:
                candidates.setdefault(place, []).append(row)
            is_behind = is_behind or row.id in only_once
        probes = {_choose(place, found).id for place, found in candidates.items() if self._may_probe(place, lane.name)}
        free: list[Row] = []
        held: set[Key] = set()
        for row, place in zip(rows, places, strict=True):
            if row.order_key not in held and (place is None or row.id in probes):
                free.append(row)
            if place is not None:
                held.add(row.order_key)
        return free

    def put_off(self, lane: Lane, rows: Sequence[Row], fresh: Sequence[Row]) -> dict[int, Failure]:
        """Put off rows that may not be sent, so that a lane with several places reaches the rows behind them. The next
        candidates for a probe stay due.
        """
        if not self._blocked or len(lane.waiting) >= MOST_PUT_OFF:
            return {}
        places = [self._blocked_place(lane, row) for row in rows]
        is_mixed = None in places or _has_many_topics(lane)
        found: Counter[Place] = Counter()
        failures: dict[int, Failure] = {}
        left, new = set[Key](), {row.id for row in fresh}
        for row, place in zip(rows, places, strict=True):
            if row.order_key in left:
                continue  # a row that is put off could overtake an earlier one of its key
            if place is None:
                failures[row.id] = Failure(row.id, row.attempts, None, 0.0)  # it waits for an earlier row of its key
                continue
            found[place] += 1
            is_near = found[place] <= CANDIDATES
            if (is_mixed and row.id in new) or not is_near:
                failures[row.id] = Failure(row.id, row.attempts, None, 0.0 if is_near else PROBES.cap)
            else:
                left.add(row.order_key)
        return failures

    def have_been_put_off(self, lane: Lane, rows: Iterable[Row]) -> None:
        """The announcement has put these rows off. They are due again as soon as their places accept something."""
        for row in rows:
            place = self._blocked_place(lane, row)
            if place is None:
                self._owed.setdefault(lane.name, {})[row.id] = row.attempts
            else:
                _remember(place, lane.name, row.id, row.attempts, MOST_PUT_OFF)

    def held(self, lane: Lane) -> frozenset[str]:
        """Tenants of blocked places that this lane may not probe now."""
        if lane.name not in self._blocked or (_has_many_topics(lane) and len(lane.waiting) < MOST_PUT_OFF):
            return frozenset()
        now = clock.current().monotonic()
        return frozenset(
            place.tenant
            for place in self._blocked[lane.name]
            if place.tenant is not None and place.due(lane.name) > now
        )

    def tenants_blocked(self, lane: Lane, rows: Iterable[Row]) -> set[str]:
        """The tenants of these rows whose only topic is blocked."""
        if not self._blocked or _has_many_topics(lane):
            return set()
        return {row.tenant for row in rows if row.tenant is not None and self._blocked_place(lane, row) is not None}

    def is_blocked(self, lane: Lane, row: Row) -> bool:
        """Whether the row's place is blocked."""
        return bool(self._blocked) and self._blocked_place(lane, row) is not None

    def probed_elsewhere(self, lane: Lane) -> frozenset[str]:
        """Tenants of blocked places whose next probe comes from their detour, if they have one: every second probe. The
        lane has the rows that failed before, and the detour may have the good keys.
        """
        return frozenset(
            place.tenant for place in self._blocked.get(lane.name, ()) if place.tenant is not None and place.probes % 2
        )

    def next_to_probe(self, lane: LaneName) -> Place | None:
        """The blocked place of the lane whose probe is due first."""
        gone = clock.current().monotonic() - FORGOTTEN_SECONDS
        alive = [place for place in (*self._blocked.get(lane, ()),) if place.next_probe >= gone]
        return min(alive, key=attrgetter("next_probe"), default=None)

    def until_probe(self, lane: LaneName, *, more: bool) -> float | None:
        """Seconds until the lane may probe one of its blocked places. If the lane has nothing ``more`` to send, it
        passes its turn to the next lane.
        """
        now = clock.current().monotonic()
        places = self._blocked.get(lane, ())
        if not more:
            for place in places:
                if place.next_probe <= now and place.is_turn_of(lane) and place.skipped < len(place.lanes):
                    place.skipped += 1
                    self._next_turn(place, lane)
        return min((wait for place in places if (wait := place.due(lane) - now) > 0), default=None)

    def owed(self, lane: Lane) -> list[Failure]:
        """Failures that give back attempts counted before the destination was known to be at fault, and that make rows
        due which were put off. `paid` confirms them.
        """
        return [Failure(row, attempts, None, 0.0) for row, attempts in self._owed.get(lane.name, {}).items()]

    def paid(self, lane: Lane, failures: Iterable[Failure]) -> None:
        """The store has recorded these failures."""
        owed = self._owed.get(lane.name, {})
        for failure in failures:
            owed.pop(failure.row, None)
        if not owed:
            self._owed.pop(lane.name, None)

    def forget(self, lane: LaneName) -> None:
        """Forget a lane that the relay does not own any more, and places that no lane is left for."""
        self._owed.pop(lane, None)
        self._blocked.pop(lane, None)
        self._closed = {at: each for at, each in self._closed.items() if at[0] != lane}
        for topic in self._topics.values():
            for place in [*topic.places.values()]:
                place.lanes.pop(lane, None)
                place.attempts.pop(lane, None)
                if not place.lanes:
                    del topic.places[place.tenant]
            _tidy(topic)

    def is_new_bug(self, lane: Lane, found: BaseException | str) -> bool:
        """Whether this relay sees this bug of the destination for the first time: an error of this type from this line,
        or this answer.
        """
        line = found.__traceback__ if isinstance(found, BaseException) else None
        while line is not None and line.tb_next is not None:
            line = line.tb_next
        kind = type(found).__qualname__ if isinstance(found, BaseException) else found
        where = ("", 0) if line is None else (line.tb_frame.f_code.co_filename, line.tb_lineno)
        bug = lane.route.destination, kind, *where
        is_new = bug not in self._bugs
        if len(self._bugs) >= _BUGS_KEPT:
            self._bugs.clear()
        self._bugs.add(bug)
        return is_new

    def not_opened(self, lane: Lane, topic: str) -> None:
        """Record that the lane cannot open the topic."""
        now = clock.current().monotonic()
        closed = self._closed.setdefault((lane.name, topic), _Closed(f"{lane.route.destination} {topic}", now, now))
        closed.tried_at = now

    def opened(self, lane: Lane, topics: Iterable[str]) -> None:
        """Record that the lane has opened the topics."""
        if self._closed:
            for topic in topics:
                self._closed.pop((lane.name, topic), None)

    def standing(self) -> list[str]:
        """Topics that have accepted nothing for a while, or could not be opened."""
        now = clock.current().monotonic()
        until = now - STANDSTILL_SECONDS
        # A topic that was not tried for a while has no waiting deliveries.
        self._closed = {at: each for at, each in self._closed.items() if each.tried_at >= now - FORGOTTEN_SECONDS}
        return [each.what for each in self._closed.values() if each.since <= until] + [
            str(topic)
            for topic in {place.topic for places in [*self._blocked.values()] for place in places}
            if topic.rejects_since is not None and topic.rejects_since <= until
        ]

    # -- details -------------------------------------------------------------------------------------------------------

    def _topic(self, lane: Lane, name: str) -> Topic:
        at = lane.route.destination, name
        if (topic := self._topics.get(at)) is None:
            if len(self._topics) >= _TOPICS_KEPT:
                self._topics = {at: topic for at, topic in self._topics.items() if topic.places}
            topic = self._topics[at] = Topic(*at)
        return topic

    def _place(self, topic: Topic, tenant: str | None) -> Place:
        """The place of a tenant. If the whole topic is blocked, a new place is blocked and may be probed at once."""
        now = clock.current().monotonic()
        if (place := topic.places.get(tenant)) is None:
            self._sweep(now)
            place = topic.places[tenant] = Place(topic, tenant, blocked=topic.blocked, next_probe=now)
        place.met_at = now
        return place

    def _sweep(self, now: float) -> None:
        """Forget places that have no more messages."""
        if now - self._swept_at < FORGOTTEN_SECONDS:
            return
        self._swept_at = now
        for topic in self._topics.values():
            for place in [
                place
                for place in topic.places.values()
                if max(place.met_at, place.next_probe) < now - FORGOTTEN_SECONDS
            ]:
                del topic.places[place.tenant]
                self._forget(place)
            if not topic.places:
                topic.suspects.clear()
            _tidy(topic)

    def _meet(self, lane: LaneName, place: Place) -> None:
        place.lanes.setdefault(lane)
        if place.blocked:
            self._blocked.setdefault(lane, set()).add(place)

    def _blocked_place(self, lane: Lane, row: Row) -> Place | None:
        topic = self._topics.get((lane.route.destination, row.topic))
        if topic is None or not (topic.blocked or row.tenant in topic.places):
            return None
        place = self._place(topic, row.tenant)
        if not place.blocked:
            return None
        self._meet(lane.name, place)
        return place

    def _may_probe(self, place: Place, lane: LaneName) -> bool:
        """Whether this lane may send a probe now. If so, the probe counts as sent."""
        if clock.current().monotonic() < place.next_probe:
            return False
        self._postpone(place)
        if not place.is_turn_of(lane):  # it took the turn that the first lane missed
            place.to_the_end(next(iter(place.lanes)))
        self._next_turn(place, lane)
        return True

    def _next_turn(self, place: Place, lane: LaneName) -> None:
        """Move the lane behind the others, and wake the next one."""
        place.to_the_end(lane)
        if not place.is_turn_of(lane):
            self._wake([next(iter(place.lanes))])

    def _postpone(self, place: Place) -> None:
        wait = PROBES.ceiling(1 + place.probes // _PROBES_A_STEP) * (0.5 + self._draw() / 2)
        if place.topic.blocked:  # its tenants take turns
            wait = min(PROBES.cap, wait * len(place.topic.places))
        place.probes += 1
        place.skipped = 0
        place.next_probe = clock.current().monotonic() + wait

    def _forget(self, place: Place) -> None:
        for name in place.lanes:
            if (places := self._blocked.get(name)) is not None:
                places.discard(place)
                if not places:
                    del self._blocked[name]
        self._wake(place.lanes)


def _choose(place: Place, rows: Iterable[Row]) -> Row:
    """The first row of an untried key, or else the row whose key was tried longest ago."""
    tried = {key: number for number, key in enumerate(place.keys)}
    return min(rows, key=lambda row: tried.get(row.order_key, -1))


def _has_many_topics(lane: Lane) -> bool:
    """Whether the deliveries of a tenant in this lane go to several topics."""
    return "{aggregate}" in lane.route.topic


def _remember(place: Place, lane: LaneName, row: int, attempts: int, most: int) -> None:
    rows = place.attempts.setdefault(lane, {})
    rows.setdefault(row, attempts)
    if len(rows) > most:
        del rows[next(iter(rows))]


def _tidy(topic: Topic) -> None:
    if not any(place.blocked for place in topic.places.values()):
        topic.blocked, topic.rejects_since = False, None
    if not topic.places:
        topic.keys.clear()


def _count(keys: dict[Key, int], key: Key) -> None:
    keys[key] = keys.pop(key, 0) + 1
    if len(keys) > _KEYS_KEPT:
        del keys[next(iter(keys))]


def _is_suspicious(keys: dict[Key, int], topic: Topic) -> bool:
    if len(keys) < FEW_KEYS:
        return False
    return len(keys) >= topic.keys_needed or not topic.has_accepted or min(keys.values()) > 1


def _fields(event: telemetry.LogEvent, what: Topic | Place, reason: str | None = None) -> dict[str, object]:
    topic, tenant = (what, None) if isinstance(what, Topic) else (what.topic, what.tenant)
    return telemetry.fields(event, destination=topic.destination, topic=topic.name, tenant=tenant, reason=reason)
