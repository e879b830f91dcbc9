"""Spilling: a message that cannot take effect now leaves the memory and the broker, and waits in an inbound lane.

One transaction writes its row of the inbox, a claim on its line, and a delivery to the lane. From there on it is a
delivery like any other: tried again, parked behind others of its key, failed, redriven, edited or discarded. The row
of the lane has an id of its own; what the inbox knows the message by is in its headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from .. import clock
from ..inbox import Admission, Arrival, Claim, Inbox, KnownBy, Spill, consumer_id
from ..outbox import INBOX_DESTINATION, Delivery, FailurePolicy, NewRows, count_rows, shard_of, stable_hash
from ..retry import RetryPolicy
from ..route import MAX_KEY_BYTES, MAX_TOPIC, OnFailure, Route
from ..transport import Message
from .box import Box
from .failure import Failure
from .handling import Incoming
from .window import Work, line_of

_NO_EVENT = "pillarbox.spilled"
"""The pattern of the routes of inbound lanes: no event is called so."""
_MAX_EVENT_TYPE = 200
BEHIND_SECONDS = 0.5
"""Lanes are told of what was spilled behind others no more often than that."""
_OURS = _INBOX_ID, _LINE, _KNOWN_BY, _FAILURE, _WHOLE = tuple(
    f"pillarbox_{name}" for name in ("inbox_id", "line", "known_by", "failure", "whole")
)


class Trouble(NamedTuple):
    """Why a message does not take effect now, and what the inbox knows it by."""

    message: Message
    arrival: Arrival
    tenant: str | None
    """Whose it is; None if what it says of that cannot be believed."""
    known_by: KnownBy = KnownBy.EVENT
    failure: Failure | None = None
    """None: it was not tried."""
    reason: str = ""
    """Already redacted."""

    @classmethod
    def of(cls, message: Message, incoming: Incoming) -> Trouble:
        """A message that can be read, and that was not tried."""
        return cls(message, incoming.arrival, incoming.context.tenant)

    @property
    def is_final(self) -> bool:
        """Whether it fails at once. Else it is to be tried, and its line waits for it."""
        return self.failure is Failure.BUSINESS or self.failure is Failure.POISON

    def altered(self) -> Trouble:
        """The message turns out to have the id of another one, with another body."""
        known = self.arrival
        return Trouble(self.message, known.altered(), self.tenant, KnownBy.BODY, Failure.POISON, known.why_altered)


Stored = tuple[NewRows, Any]
"""The rows that a transaction has written for spilled messages, and what `Posts` has prepared for them."""


class Spiller:
    """Spills the messages of one consumer."""

    def __init__(
        self,
        name: str,
        box: Box,
        inbox: Inbox,
        identify: Callable[[Connection], int],
        *,
        retry: RetryPolicy,
        on_failure: OnFailure,
    ) -> None:
        self.claims = consumer_id(name)
        """The number by which claims know the consumer."""
        self.is_full = False
        """Whether as many messages wait as may: then nothing more is received."""
        self.untrusted = 0
        """How many messages are to be spilled before any is tried: a process may have died of one of them."""
        self._box = box
        self._inbox = inbox
        self._identify = identify
        self._untold: NewRows = {}
        """Rows of which their lanes have not been told."""
        self._told_at = 0.0
        self.route = Route(
            _NO_EVENT, to=INBOX_DESTINATION, topic=name, name=f"consumer:{name}", on_failure=on_failure, retry=retry
        )
        box.router.add(self.route)

    async def spill(self, troubles: Sequence[Trouble]) -> int:
        """Spill messages of one tenant, in order per line, but for those that the inbox knows; how many they were."""
        stored = await self._box.apart(self._admit_and_write, troubles)
        if stored is None:
            return 0
        self.committed(stored)
        return sum(stored[0].values())

    def _admit_and_write(self, connection: Connection, troubles: Sequence[Trouble]) -> Stored | None:
        number = self._identify(connection)
        found = self._admit(connection, number, troubles)
        if altered := {place: troubles[place].altered() for place in found if found[place] is Admission.ALTERED}:
            troubles = [altered.get(place, each) for place, each in enumerate(troubles)]  # in its place in its line
            again = self._admit(connection, number, [*altered.values()])
            found |= dict(zip(altered, again.values(), strict=True))
        new = [each for place, each in enumerate(troubles) if found[place] is Admission.NEW]
        return self.write(connection, new) if new else None

    def _admit(self, connection: Connection, number: int, troubles: Sequence[Trouble]) -> dict[int, Admission]:
        arrivals = [each.arrival for each in troubles]
        return dict(enumerate(self._inbox.admit(connection, number, troubles[0].tenant, arrivals).admissions))

    def write(self, connection: Connection, troubles: Sequence[Trouble]) -> Stored:
        """Write claims and deliveries beside rows of the inbox that this transaction has written."""
        prepared = self._box.posts.prepare(connection)
        deliveries = [self._delivery(each) for each in troubles]
        spills = [
            Spill(_claim_of(each), it.event_id, gate=self._gates(each), refused=each.reason if each.is_final else None)
            for each, it in zip(troubles, deliveries, strict=True)
        ]
        self._inbox.spill(connection, self.claims, troubles[0].tenant, spills)
        self._box.inbound.append(connection, deliveries)
        return count_rows(deliveries, {}), prepared

    def _gates(self, trouble: Trouble) -> bool:
        """Whether later messages of its line wait for it. In the lane they do so by tenant and key: by those of a
        message whose tenant cannot be believed, others would wait.
        """
        parks = self.route.record.on_failure is FailurePolicy.PARK
        return not trouble.is_final or (parks and trouble.tenant == trouble.message.headers.get("tenant_id"))

    def committed(self, stored: Stored, *, behind: bool = False) -> None:
        """The transaction that wrote it has committed. Lanes are not woken at once for what was spilled ``behind``
        others: all that they could do is park it. They come to it with those, or when they look for themselves.
        """
        rows, prepared = stored
        for place, number in rows.items():
            self._untold[place] = self._untold.get(place, 0) + number
        now = clock.current().monotonic()
        if not behind or now - self._told_at >= BEHIND_SECONDS:
            rows, self._untold, self._told_at = self._untold, {}, now
            self._box.posts.committed(rows, prepared)

    def _delivery(self, trouble: Trouble) -> Delivery:
        message, arrival, line = _storable(trouble.message), trouble.arrival, hash_of_line(trouble.message)
        key = message.key or (str(line) if line else arrival.event_id.hex)
        return Delivery(
            event_id=clock.new_id(),
            event_type=storable(message.headers.get("event_type", ""))[:_MAX_EVENT_TYPE] or _NO_EVENT,
            route=self.route.id,
            shard=shard_of(key, self._box.router.shards),
            schema_version=arrival.schema_version,
            topic=message.topic,
            key=key,
            tenant=trouble.tenant,
            headers={
                **message.headers,
                _INBOX_ID: str(arrival.event_id),
                _LINE: str(_claim_of(trouble).line),
                _KNOWN_BY: trouble.known_by.value,
                **({_FAILURE: str(trouble.failure)} if trouble.is_final else {}),
            },
            body=message.body,
        )


def work_of(message: Message) -> Work:
    """A spilled message, as it was received; or any other message of a lane."""
    headers = dict(message.headers)
    inbox_id, line, known_by, failure = (headers.pop(name, None) for name in (_INBOX_ID, _LINE, _KNOWN_BY, _FAILURE))
    if inbox_id is None or line is None or known_by is None:
        return Work(message, row_key=message.key)
    if headers.pop(_WHOLE, None) is not None:
        whole = _whole.decode(message.body)
        topic, key, headers, body = whole.topic, whole.key, dict(whole.headers), whole.body
    else:
        topic, key, body = message.topic, "" if message.key == UUID(inbox_id).hex else message.key, message.body
    received = Message(topic, key, body, headers, attempts=message.attempts)
    return Work(
        received,
        claim=Claim(int(line), UUID(inbox_id)),
        known_by=KnownBy(known_by),
        refused_as=None if failure is None else Failure(failure),
        row_key=message.key,
    )


def with_body(message: Message, body: bytes) -> bytes:
    """What stands in the lane in place of a message that is to come with another body."""
    if _WHOLE not in message.headers:
        return body
    return msgspec.msgpack.encode(msgspec.structs.replace(_whole.decode(message.body), body=body))


@lru_cache(maxsize=4096)
def _hash_of(*parts: str) -> int:
    # With their lengths, so that no two lines are written alike.
    return stable_hash(_cleaned("".join(f"{len(part)}:{part}" for part in parts)))


def _claim_of(trouble: Trouble) -> Claim:
    """Without a line, its tenant takes the place of that: two tenants may have events with one id."""
    line = hash_of_line(trouble.message) or _hash_of("", trouble.tenant or "", "")
    return Claim(line, trouble.arrival.event_id)


def hash_of_line(message: Message) -> int:
    """How claims know the message's line; 0 if it has none."""
    line = line_of(message)
    return 0 if line is None else _hash_of(*(part or "" for part in line))


class _Whole(msgspec.Struct):
    topic: str
    key: str
    headers: Mapping[str, str]
    body: bytes


_whole = msgspec.msgpack.Decoder(_Whole)


def _storable(message: Message) -> Message:
    """A message that every database takes, whatever strangers have written into it: if need be, as one binary. Its key
    is left out then if it cannot be stored.
    """
    given = {name: value for name, value in message.headers.items() if name not in _OURS}
    message = msgspec.structs.replace(message, headers=given)
    texts = [message.topic, message.key, *message.headers, *message.headers.values()]
    said = "".join(texts)
    if len(message.topic) <= MAX_TOPIC and is_storable_key(message.key) and storable(said) == said:
        return message
    headers = {_cleaned(name): _cleaned(value) for name, value in message.headers.items()}
    whole = _Whole(_cleaned(message.topic), _cleaned(message.key), headers, message.body)
    key = whole.key if is_storable_key(whole.key) else ""
    return Message(storable(message.topic)[:MAX_TOPIC], key, msgspec.msgpack.encode(whole), {_WHOLE: "1"})


def is_storable_key(key: str) -> bool:
    """Whether every database takes it."""
    return len(key.encode(errors="replace")) <= MAX_KEY_BYTES and storable(key) == key


def storable(text: str) -> str:
    """It, or something similar that every database takes."""
    return _cleaned(text).replace("\0", "?")


def _cleaned(text: str) -> str:
    """Without halves of surrogate pairs, which nothing can store. Brokers do not bring them."""
    return text.encode(errors="replace").decode()
