"""The past of a projection in the database: the events that made its table, in the order in which they were written.

The outbox holds those that retention has left there, archives those that it removed. A broker that keeps its messages
brings them itself: see `pillarbox.transport.Rereads`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    MetaData,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    cast,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from ..consumers.box import OUTBOX
from ..errors import ConfigurationError, StoreError
from ..outbox import LOCAL, Status
from ..route import topic_pattern
from ..stores import archive_file, sqlite
from ..stores.archive_file import Archived
from ..stores.columns import LongText
from ..stores.tables import failures, inbox, meta, outbox, routes
from ..transport import Message

PAGE = 2_000
"""Events that are read at a time."""

_WAITING = (Status.RETRYING, Status.PARKED, Status.FAILED)
"""A delivery in such a state, and all later ones of its key, are left to the live projection unless that has had them:
they may be sent later, be edited, or never be sent."""
_NO_SUCH_TABLE = "42P01"
_NOBODY = literal("", inbox.c.tenant.type)
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode
_pattern = lru_cache(maxsize=1024)(topic_pattern)


class Feed(NamedTuple):
    """The deliveries that a projection gets."""

    routes: tuple[int, ...]
    topics: tuple[str, ...]
    """Names, or templates of names; all topics if empty."""
    names: tuple[str, ...]
    """Names of the events that it wants."""

    def has_topic(self, topic: str) -> bool:
        """Whether deliveries to this topic belong to it."""
        if not self.topics or topic in self.topics:
            return True
        return any(pattern.fullmatch(topic) for pattern in map(_pattern, self.topics) if pattern is not None)


def feed_of(connection: Connection, name: str, source: str, topics: Sequence[str], names: Sequence[str]) -> Feed:
    """The feed of a consumer: the route that bears its name, or those that lead to its source."""
    own_route = and_(routes.c.destination == LOCAL, routes.c.topic == name)
    fits = own_route if source == OUTBOX else routes.c.destination == source
    found = tuple(connection.scalars(select(routes.c.id).where(fits)))
    if not found:
        raise ConfigurationError(
            f"no route of this database leads to {source!r}, from where {name!r} has its events: rebuild it with "
            '`--from broker`, or rebuild("broker")'
        )
    return Feed(found, tuple(topics), tuple(sorted(set(names))))


def compare_all(connection: Connection) -> None:
    """Statements of this transaction compare a large part of the inbox. The planner may not know the rows of a new
    consumer yet, expect few of them, and choose a nested loop.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL enable_nestloop = off")


class Outbox:
    """`History` of archives and the outbox. ``live`` is the number of the live generation in the inbox, ``new`` that of
    the new one.
    """

    def __init__(self, engine: AsyncEngine, feed: Feed, live: int, new: int, files: Sequence[Path] = ()) -> None:
        self._engine = engine
        self._feed = feed
        self._live, self._new = live, new
        self._files = files
        self.total: int | None = None
        """About how many events the first call finds, if that is known before it reads them."""

    async def pages(self) -> AsyncGenerator[Sequence[Message], None]:
        """The first call brings the events of the archives. Every call brings those of the outbox that the new
        generation does not know.

        One statement copies these to a temporary table, so they come from one snapshot. Each event of a key is written
        after the one before has committed: a snapshot that shows an event shows its predecessors. A snapshot per page
        would break the order: a transaction that draws its ids early and commits late would be missing on the first
        page, and the next event of its key be on the second. A snapshot that stays open for all pages would keep dead
        rows in every table.
        """
        files, self._files = self._files, ()
        for archived in await self._archives(files):
            while page := await asyncio.to_thread(list, islice(archived, PAGE)):
                yield page
        async with sqlite.for_reading(self._engine).connect() as connection:
            try:
                found = await connection.run_sync(self._copy)
                await connection.commit()
                if self.total is None and not files:
                    self.total = found
                after = 0
                while rows := (await connection.execute(_NEXT, {"after": after, "page": PAGE})).all():
                    await connection.commit()
                    yield self._messages(rows)
                    after = rows[-1].id
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) == _NO_SUCH_TABLE:
                    raise ConfigurationError(
                        "a rebuild needs connections of its own, and a pooler lends these by the transaction: let the "
                        "box that rebuilds connect to PostgreSQL itself"
                    ) from error
                raise
            finally:
                await connection.invalidate()  # the temporary table goes with the connection

    async def aclose(self) -> None:
        """Each call of `pages` closes its own connection."""

    def _copy(self, connection: Connection) -> int:
        compare_all(connection)
        _PAST.create(connection, checkfirst=False)
        names = _PAST.c.keys()
        wanted = insert(_PAST).from_select(names, _unseen(self._feed, self._live, self._new), include_defaults=False)
        return int(connection.execute(wanted).rowcount)

    def _messages(self, rows: Sequence[Any]) -> list[Message]:
        found = (row for row in rows if self._feed.has_topic(row.topic))
        return [Message(row.topic, row.key, bytes(row.body), _decode_headers(row.headers)) for row in found]

    async def _archives(self, files: Sequence[Path]) -> list[Iterator[Message]]:
        """The messages in these files, from the oldest file on."""
        if not files:
            return []
        async with sqlite.for_reading(self._engine).connect() as connection:
            here = (await connection.execute(select(meta.c.install_id))).scalar_one()
        known = [(file, await asyncio.to_thread(archive_file.verify, file)) for file in files]
        for file, summary in known:
            if summary.header.install_id != here:
                raise StoreError(f"{file} was not made from this database: it is of {summary.header.install_id}")
        known.sort(key=lambda each: each[1].header.made_at)
        return [self._messages_in(archive_file.read_in_order(file, summary)) for file, summary in known]

    def _messages_in(self, archived: Iterator[Archived]) -> Iterator[Message]:
        routes, _, names = self._feed
        for row in archived:
            fits = row.route_id in routes and row.event_type in names and row.status is Status.SENT
            if fits and self._feed.has_topic(row.topic):
                yield Message(row.topic, row.key, row.content, row.headers)


_PAST = Table(
    "pillarbox_past",
    MetaData(),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("topic", outbox.c.topic.type),
    Column("key", outbox.c.key.type),
    Column("headers", LongText),
    Column("body", outbox.c.body.type),
    prefixes=["TEMPORARY"],
)
"""Visible to its own connection only."""
_NEXT = select(_PAST).where(_PAST.c.id > bindparam("after")).order_by(_PAST.c.id).limit(bindparam("page"))


def _unseen(feed: Feed, live: int, new: int) -> Select[Any]:
    o, f, late = outbox, failures, failures.alias()
    kept = (
        select(late.c.route, late.c.key, _owner(late).label("tenant"), func.min(late.c.row_id).label("first"))
        .where(late.c.route.in_(feed.routes), late.c.status.in_(_WAITING))
        .group_by(late.c.route, late.c.key, late.c.tenant)
        .subquery()
    )
    same_key = kept.c.route == o.c.route, kept.c.key == o.c.key, kept.c.tenant == _owner(o), kept.c.first <= o.c.id
    free = and_(kept.c.first.is_(None), func.coalesce(f.c.status, o.c.status) != Status.DISCARDED)
    # Of an edited delivery the failure book has what was sent.
    known = and_(inbox.c.tenant == _owner(o), inbox.c.event_id == func.coalesce(f.c.event_id, o.c.event_id))
    wanted: list[Any] = [o.c.route.in_(feed.routes), o.c.event_type.in_(feed.names)]
    if feed.topics and not any(map(_pattern, feed.topics)):  # `Feed.has_topic` looks at templates
        wanted.append(o.c.topic.in_(feed.topics))
    headers = func.coalesce(f.c.headers, o.c.headers)
    return (
        select(o.c.id, o.c.topic, o.c.key, cast(headers, Text), func.coalesce(f.c.body, o.c.body))
        .select_from(
            o.outerjoin(f, and_(f.c.route == o.c.route, f.c.shard == o.c.shard, f.c.row_id == o.c.id)).outerjoin(
                kept, and_(*same_key)
            )
        )
        .where(*wanted, ~exists().where(inbox.c.consumer == new, known))
        .where(or_(free, exists().where(inbox.c.consumer == live, known)))
        .order_by(o.c.id)
    )


def _owner(rows: Any) -> Any:
    """The tenant of a row, as the inbox stores it."""
    return func.coalesce(rows.c.tenant, _NOBODY)
