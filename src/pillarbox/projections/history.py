"""The past of a projection: the events that have made its table, in the order in which they were written.

The outbox still has them, as far as retention has left them there; archives have what it has taken away. A broker may
have all of them, and brings them by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Exists, Select, and_, exists, func, literal, or_, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from ..consumers.home import OUTBOX
from ..errors import ConfigurationError, StoreError
from ..outbox import BUS, Status
from ..route import PLACEHOLDERS, topic_pattern
from ..stores import archive_file, sqlite
from ..stores.archive_file import Archived
from ..stores.tables import inbox, meta, outbox, routes
from ..transport import Message

PAGE = 2_000
"""Events that are read at a time."""

_WAITING = (Status.RETRYING, Status.PARKED, Status.FAILED)
"""What a failure keeps back, and with it all behind it that has its key. It may come by itself, perhaps edited, or
never: unless the live projection has had it, it is left to that."""
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode
_pattern = lru_cache(maxsize=1024)(topic_pattern)


class Feed(NamedTuple):
    """Which deliveries a projection gets."""

    routes: tuple[int, ...]
    topics: tuple[str, ...]
    """Names, or templates of names. All topics, if there is none."""
    names: tuple[str, ...]
    """Of the events that it wants."""

    def has(self, row: Archived) -> bool:
        """Whether it got this one."""
        fits = row.route_id in self.routes and row.event_type in self.names and row.status is Status.SENT
        return fits and self.has_topic(row.topic)

    def has_topic(self, topic: str) -> bool:
        """Whether it gets what is sent there."""
        if not self.topics or topic in self.topics:
            return True
        return any(pattern.fullmatch(topic) for pattern in map(_pattern, self.topics) if pattern is not None)

    @property
    def likes(self) -> list[str]:
        """Its templates as patterns for LIKE, which let more through than `has_topic`: a database escapes as it likes,
        so nothing is escaped.
        """
        return [_like(topic) for topic in self.topics if _pattern(topic) is not None]


def _like(template: str) -> str:
    for name in PLACEHOLDERS:
        template = template.replace(f"{{{name}}}", "%")
    return template.replace("\\", "_")


def feed_of(connection: Connection, name: str, source: str, topics: Sequence[str], names: Sequence[str]) -> Feed:
    """The feed of a consumer: the route that bears its name, or those that lead to its source."""
    if source == OUTBOX:
        fits = and_(routes.c.destination == BUS, routes.c.topic == name)
    else:
        fits = routes.c.destination == source
    found = tuple(connection.scalars(select(routes.c.id).where(fits)))
    if not found:
        raise ConfigurationError(
            f"no route of this database leads to {source!r}, from where {name!r} has its events: rebuild it with "
            '`--from broker`, or rebuild("broker")'
        )
    return Feed(found, tuple(topics), tuple(sorted(set(names))))


def compare_all(connection: Connection) -> None:
    """What this transaction asks compares a large part of the inbox with something else. The planner may not know yet
    that a new consumer is there, take its rows for few, and look for each of them by itself.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL enable_nestloop = off")


# -- the outbox --------------------------------------------------------------------------------------------------------


def count(connection: Connection, feed: Feed) -> int:
    """About how many events there are."""
    wanted = select(func.count()).select_from(outbox).where(*_conditions(feed))
    return int(connection.scalar(wanted) or 0)


class Outbox:
    """The outbox and, before it, archives of what has left it."""

    def __init__(self, engine: AsyncEngine, feed: Feed, live: int, new: int, files: Sequence[Path]) -> None:
        self._engine = engine
        self._feed = feed
        self._live, self._new = live, new
        self._files = files

    async def pages(self) -> AsyncGenerator[Sequence[Message], None]:
        files, self._files = self._files, ()
        if files:
            async for page in archived(self._engine, files, self._feed):
                yield page
        async with aclosing(unseen(self._engine, self._feed, self._live, self._new)) as pages:
            async for page in pages:
                yield page


async def unseen(engine: AsyncEngine, feed: Feed, live: int, new: int) -> AsyncGenerator[list[Message], None]:
    """What the outbox has for this feed and the inbox does not know of the new consumer, in pages. ``live`` is the one
    that has consumed it so far.

    All pages are of one snapshot. A key's events are written one after the other, each when the one before has
    committed: so whenever a snapshot shows an event, it shows those before it. Pages with a snapshot each would not do:
    a transaction that draws its numbers early and commits late would be missing on the first one, and the next event of
    its key be there on the second.
    """
    read = _stream if engine.dialect.name == "postgresql" else _pages
    async with aclosing(read(engine, feed, live, new)) as pages:
        async for page in pages:
            yield page


async def _stream(engine: AsyncEngine, feed: Feed, live: int, new: int) -> AsyncGenerator[list[Message], None]:
    """By a cursor, which sorts once: on PostgreSQL the outbox has no index by id.

    The server puts its rows aside when the transaction commits, and the snapshot ends. To keep it open would keep every
    row that is updated meanwhile, in all tables: those of a busy projection would grow, and be slow, until the end.
    """
    given = {"routes": [*feed.routes], "names": [*feed.names], "topics": [*feed.topics] or None, "likes": feed.likes}
    async with engine.connect() as connection:
        await connection.run_sync(compare_all)
        await connection.execute(_UNSEEN, {**given, "live": live, "new": new})
        await connection.commit()
        try:
            while rows := (await connection.exec_driver_sql(f"FETCH {PAGE} FROM pillarbox_past")).all():
                await connection.commit()
                yield _messages(rows, feed)
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == _NO_SUCH_CURSOR:
                raise ConfigurationError(
                    "a rebuild needs connections of its own, and a pooler lends these by the transaction: let the box "
                    "that rebuilds connect to PostgreSQL itself"
                ) from error
            raise
        finally:
            await connection.invalidate()  # and the cursor with it, whatever has happened


async def _pages(engine: AsyncEngine, feed: Feed, live: int, new: int) -> AsyncGenerator[list[Message], None]:
    wanted = _unseen(feed, live, new)
    # SQLite has one writer at a time: rows commit in the order of their ids, so those up to the last one are as good as
    # a snapshot, which would keep it from tidying up.
    level = "AUTOCOMMIT" if engine.dialect.name == "sqlite" else "REPEATABLE READ"
    async with engine.execution_options(isolation_level=level).connect() as connection:
        last = await connection.scalar(select(func.max(outbox.c.id)))
        wanted = wanted.where(outbox.c.id <= (last or 0))
        after = 0
        while rows := (await connection.execute(wanted.where(outbox.c.id > after).limit(PAGE))).all():
            yield _messages(rows, feed)
            after = rows[-1].id


def _messages(rows: Sequence[Any], feed: Feed) -> list[Message]:
    found = (row for row in rows if feed.has_topic(row.topic))
    return [Message(row.topic, row.key, bytes(row.body), _decode_headers(row.headers)) for row in found]


def _conditions(feed: Feed) -> list[Any]:
    found: list[Any] = [outbox.c.route.in_(feed.routes), outbox.c.event_type.in_(feed.names)]
    if feed.topics:
        found.append(or_(outbox.c.topic.in_(feed.topics), *map(outbox.c.topic.like, feed.likes)))
    return found


def _unseen(feed: Feed, live: int, new: int) -> Select[Any]:
    late = outbox.alias()
    group = late.c.route, late.c.key, late.c.tenant
    kept = (
        select(*group, func.min(late.c.id).label("first"))
        .where(late.c.route.in_(feed.routes), late.c.status.in_(_WAITING))
        .group_by(*group)
        .subquery()
    )
    same_key = and_(
        kept.c.route == outbox.c.route,
        kept.c.key == outbox.c.key,
        kept.c.tenant.is_not_distinct_from(outbox.c.tenant),
        kept.c.first <= outbox.c.id,
    )
    free = and_(kept.c.first.is_(None), outbox.c.status != Status.DISCARDED)
    return (
        select(outbox.c.id, outbox.c.topic, outbox.c.key, outbox.c.headers, outbox.c.body)
        .outerjoin(kept, same_key)
        .where(*_conditions(feed), ~_is_known(new), or_(free, _is_known(live)))
        .order_by(outbox.c.id)
    )


def _is_known(consumer: int) -> Exists:
    return exists().where(
        inbox.c.consumer == consumer,
        inbox.c.tenant == func.coalesce(outbox.c.tenant, literal("", inbox.c.tenant.type)),
        inbox.c.event_id == outbox.c.event_id,
    )


# An edit is what was sent, and the records of failures have it.
_KNOWN = """
SELECT FROM pillarbox_inbox i
WHERE i.consumer = {} AND i.tenant = coalesce(o.tenant, '') AND i.event_id = coalesce(f.event_id, o.event_id)
"""
_NO_SUCH_CURSOR = "34000"
_STATUSES = ", ".join(f"'{status}'" for status in _WAITING)
_UNSEEN = text(
    f"""
    DECLARE pillarbox_past NO SCROLL CURSOR WITH HOLD FOR
    WITH kept AS MATERIALIZED (
        SELECT route, key, coalesce(tenant, '') AS tenant, min(id) AS first
        FROM (
            SELECT route, key, tenant, row_id AS id FROM pillarbox_failures WHERE status IN ({_STATUSES})
            UNION ALL
            SELECT route, key, tenant, id FROM pillarbox_outbox WHERE status IN ({_STATUSES}) AND status <> 'SENT'
        ) late
        WHERE route = ANY (CAST(:routes AS bigint[]))
        GROUP BY 1, 2, 3
    )
    SELECT o.id, o.topic, o.key, CAST(coalesce(f.headers, o.headers) AS text) AS headers,
           coalesce(f.body, o.body) AS body
    FROM pillarbox_outbox o
    LEFT JOIN pillarbox_failures f ON f.route = o.route AND f.shard = o.shard AND f.row_id = o.id
    LEFT JOIN kept k ON k.route = o.route AND k.key = o.key AND k.tenant = coalesce(o.tenant, '') AND k.first <= o.id
    WHERE o.route = ANY (CAST(:routes AS bigint[])) AND o.event_type = ANY (CAST(:names AS text[]))
      AND (CAST(:topics AS text[]) IS NULL OR o.topic = ANY (CAST(:topics AS text[]))
           OR o.topic LIKE ANY (CAST(:likes AS text[])))
      AND NOT EXISTS ({_KNOWN.format(":new")})
      AND ((k.first IS NULL AND coalesce(f.status, o.status) <> 'DISCARDED') OR EXISTS ({_KNOWN.format(":live")}))
    ORDER BY o.id
    """  # noqa: S608  constants
)


# -- archives ----------------------------------------------------------------------------------------------------------


async def archived(engine: AsyncEngine, files: Sequence[Path], feed: Feed) -> AsyncGenerator[list[Message], None]:
    """What these files have for this feed, from the oldest file on. All of them are verified first."""
    async with sqlite.for_reading(engine).connect() as connection:
        here = (await connection.execute(select(meta.c.install_id))).scalar_one()
    known = [(file, await asyncio.to_thread(archive_file.verify, file)) for file in files]
    for file, summary in known:
        if summary.header.install_id != here:
            raise StoreError(f"{file} was not made from this database: it is of {summary.header.install_id}")
    for file, summary in sorted(known, key=lambda each: each[1].header.made_at):
        rows = iter(archive_file.read_in_order(file, summary))
        while page := await asyncio.to_thread(_next_page, rows, feed):
            yield page


def _next_page(rows: Iterator[Archived], feed: Feed) -> list[Message]:
    fitting = (Message(row.topic, row.key, row.content, row.headers) for row in rows if feed.has(row))
    return [*islice(fitting, PAGE)]
