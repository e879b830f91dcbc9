"""Claims: which messages of a consumer wait in its lanes, and which of them later ones of their key must not overtake.

The transaction that spills a message writes its claim, and the one in which the message takes effect deletes it. So a
claim is never late, while a lane hears of an effect only afterwards. When the owner of a lane changes what becomes of a
row, the claim follows in the same transaction; the failure book (`stores.failures`) says when. Deliveries that go out
have no claims.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Exists,
    FromClause,
    String,
    Text,
    and_,
    cast,
    delete,
    exists,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    update,
)

from ..outbox import INBOUND, Lane, Status, stable_hash
from ..transport import Message
from .audit import Author, note
from .tables import claims, consumers, deliveries, failures, inbox, requests

_T = TypeVar("_T")

_decode_headers = msgspec.json.Decoder(dict[str, str]).decode

_AT_ONCE = 1_000
_inbound = deliveries[INBOUND]


class Claims:
    """The claims of a lane's rows, in a transaction of its owner."""

    def __init__(self, connection: Connection, lane: Lane, table: str) -> None:
        self._connection = connection
        self._lane = lane.name
        self._here = table == INBOUND

    def drop(self, rows: Collection[int]) -> None:
        """These rows never take effect."""
        for portion in _portions(self._events(rows).values()):
            self._connection.execute(delete(claims).where(claims.c.delivery.in_(portion)))

    def gate(self, rows: Collection[int], *, gate: bool) -> None:
        """Later messages must wait for these rows, or need not wait any longer. Whoever has to wait again starts anew:
        why it was refused is forgotten.
        """
        values = {"gate": True, "refused": None} if gate else {"gate": False}
        for portion in _portions(self._events(rows).values()):
            self._connection.execute(update(claims).where(claims.c.delivery.in_(portion)).values(values))

    def open_gates(self) -> None:
        """Nothing waits for rows of this lane that have failed for good."""
        if self._here:
            of_lane = (failures.c.route == self._lane.route, failures.c.shard == self._lane.shard)
            dead = select(failures.c.row_id).where(*of_lane, failures.c.status == Status.FAILED)
            self.gate(self._connection.scalars(dead).all(), gate=False)

    def gone(self, rows: Iterable[int]) -> Collection[int]:
        """Those of the rows that took effect, or never will. Waits for transactions in which one is just taking effect;
        nobody else begins with another before this one ends.
        """
        events = self._events({*rows})
        held = set[UUID]()
        for portion in _portions(events.values()):
            named = select(claims.c.delivery).where(claims.c.delivery.in_(portion)).with_for_update()
            held.update(self._connection.scalars(named))
        return {row for row, event in events.items() if event not in held}

    def undisturbed(self, asked: Collection[int]) -> list[int]:
        """Those of the requests whose messages are not just taking effect. The others wait: to carry them out now, the
        lane would wait for the handler, and all its keys with it.
        """
        if not self._here:
            return sorted(asked)
        named = select(requests.c.id, requests.c.row_id).where(requests.c.id.in_(asked))
        rows = {row.id: row.row_id for row in self._connection.execute(named)}
        events = self._events({*rows.values()})
        claimed = select(claims.c.delivery).where(claims.c.delivery.in_({*events.values()}))
        free = {*self._connection.scalars(claimed.with_for_update(skip_locked=True))}
        busy = {*self._connection.scalars(claimed)} - free  # a new statement: what has just ended is gone
        return sorted(each for each in asked if events.get(rows.get(each, 0)) not in busy)

    def _events(self, rows: Collection[int]) -> Mapping[int, UUID]:
        """By which ids the claims know these rows."""
        found: dict[int, UUID] = {}
        if not self._here:
            return found
        # With a status that is written out, PostgreSQL is led to the index of the lane.
        of_lane = [_inbound.c.route == self._lane.route, _inbound.c.shard == self._lane.shard]
        if self._connection.dialect.name == "postgresql":
            of_lane.append(_inbound.c.status == literal_column("'PENDING'"))
        for portion in _portions(rows):
            named = select(_inbound.c.id, _inbound.c.event_id).where(*of_lane, _inbound.c.id.in_(portion))
            found |= {row.id: row.event_id for row in self._connection.execute(named)}
        return found


class Waiting(NamedTuple):
    """How much waits for a consumer, of one tenant."""

    consumer: str
    tenant: str | None
    messages: int


def waiting(connection: Connection) -> list[Waiting]:
    """What waits for consumers, dead letters included."""
    names = dict(connection.execute(select(consumers.c.id, consumers.c.name)).all())
    of = (claims.c.consumer, claims.c.tenant)
    found = connection.execute(select(*of, func.count()).group_by(*of).order_by(*of))
    return [Waiting(names.get(consumer, str(consumer)), tenant or None, count) for consumer, tenant, count in found]


def without_delivery(connection: Connection) -> dict[str, int]:
    """Claims that nothing will ever end, by their consumers."""
    name = func.coalesce(consumers.c.name, cast(claims.c.consumer, String))
    found = (
        select(name, func.count())
        .select_from(claims.outerjoin(consumers, consumers.c.id == claims.c.consumer))
        .where(~exists().where(_inbound.c.event_id == claims.c.delivery))
        .group_by(name)
        .order_by(name)
    )
    return dict(connection.execute(found).all())


# -- what a rebuild needs ----------------------------------------------------------------------------------------------


def is_claimed(consumer: str, inbox: FromClause) -> Exists:
    """Whether the message of a row of the inbox waits for its effect."""
    return exists().where(
        claims.c.consumer == stable_hash(consumer),
        claims.c.inbox_id == inbox.c.event_id,
        claims.c.tenant == inbox.c.tenant,
    )


def move(connection: Connection, consumer: str, old: int, new: int) -> None:
    """Let the claims of a consumer belong to another number of it in the inbox. What that has handled needs none, and
    is no dead letter any more. What could not be read is known there as before, too.
    """
    handled = exists().where(
        inbox.c.consumer == new, inbox.c.tenant == claims.c.tenant, inbox.c.event_id == claims.c.inbox_id
    )
    _redrive_failed(connection, consumer, handled)
    connection.execute(delete(claims).where(claims.c.consumer == stable_hash(consumer), handled))
    names = ["consumer", "tenant", "event_id", "schema_version", "digest"]
    columns = [literal(new).label("consumer"), *(inbox.c[name] for name in names[1:])]
    known = select(*columns).where(
        inbox.c.consumer == old, or_(is_claimed(consumer, inbox), inbox.c.schema_version == 0)
    )
    connection.execute(insert(inbox).from_select(names, known, include_defaults=False))


def _redrive_failed(connection: Connection, consumer: str, handled: Exists) -> None:
    """Once its claim is gone, the owner of its lane settles a delivery that is tried; nobody else may, and a failed one
    is not tried by itself.
    """
    f, o = failures, _inbound
    failed = connection.execute(
        select(f.c.route, f.c.shard, f.c.row_id)
        .select_from(f.join(o, and_(*_is_its_row(connection))).join(claims, claims.c.delivery == o.c.event_id))
        .where(f.c.route == _route_of(consumer), f.c.status == Status.FAILED)
        .where(claims.c.consumer == stable_hash(consumer), handled)
    ).all()
    if failed:
        author = Author(f"projection {consumer}", "a rebuild has applied them")
        entry = note(connection, author, "redrive", f"route consumer:{consumer}", details={"count": len(failed)})
        asked = [{**row._mapping, "action": "redrive", "audit": entry} for row in failed]
        connection.execute(insert(requests), asked)


def amended(connection: Connection, consumer: str) -> list[tuple[str | None, Message, bytes | None]]:
    """What operators have decided about messages in the inbound lanes of a consumer: the tenant, the message as it
    stands in its lane, and the body that takes effect; None if the message was discarded.
    """
    f, o = failures, _inbound
    rows = connection.execute(
        select(o.c.tenant, o.c.topic, o.c.key, cast(o.c.headers, Text), o.c.body, f.c.status, f.c.body)
        .select_from(o.join(f, and_(*_is_its_row(connection))))
        .where(f.c.route == _route_of(consumer))
        .where(or_(f.c.status == Status.DISCARDED, f.c.body.is_not(None)))
    )
    return [
        (
            tenant,
            Message(topic, key, bytes(body), _decode_headers(headers)),
            None if status == Status.DISCARDED else bytes(edited),
        )
        for tenant, topic, key, headers, body, status, edited in rows
    ]


def _route_of(consumer: str) -> int:
    return stable_hash(f"consumer:{consumer}")


def _is_its_row(connection: Connection) -> list[ColumnElement[bool]]:
    """What joins a row of an inbound lane and what the failure book says of it."""
    f, o = failures, _inbound
    found = [o.c.route == f.c.route, o.c.shard == f.c.shard, o.c.id == f.c.row_id]
    if connection.dialect.name == "postgresql":
        found.append(o.c.status == literal_column("'PENDING'"))
    return found


def _portions(items: Iterable[_T]) -> Iterator[list[_T]]:
    """A statement takes only so many."""
    every = list(items)
    return (every[start : start + _AT_ONCE] for start in range(0, len(every), _AT_ONCE))
