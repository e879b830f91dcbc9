"""The failure book of a queue: its statements on MariaDB, MySQL and SQLite.

A queue finds its rows by their status in the outbox, so that status follows the book. A row that is not in the book is
PENDING, or final.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import BigInteger, TextClause, Uuid, bindparam, text

from ..outbox import Lane
from .failures import Book, Failures, Known, Written
from .queue_sql import Words, with_ids, with_json, words
from .tables import failures, outbox


class QueueFailures(Failures):
    """The failed rows of a lane in a queue."""

    def statements(self) -> Book:
        return _book(self._words)

    @property
    def _words(self) -> Words:
        return words(self.connection.dialect.name, self.table)

    def columns(self, rows: Sequence[Written]) -> dict[str, Any]:
        return {"rows": msgspec.json.encode(rows).decode()}

    def redone(self) -> Sequence[int]:
        return sending(self.lane)

    def settled(self) -> Sequence[int]:
        # The keys of failed rows are among the waiting ones.
        return sending(self.lane) if self.lane.waiting else ()

    def is_sending(self, row: Known, lane: Lane) -> bool:
        return row.at.id in sending(lane)

    def is_passed(self, row: Known, lane: Lane) -> bool:  # noqa: ARG002  the interface
        return False  # `Book.known` finds only rows that are PENDING or in the book

    def changed(self, rows: Collection[int]) -> None:
        self._do(_follow(self._words), ids=[*rows])


def sending(lane: Lane) -> list[int]:
    """The rows in flight."""
    return [] if lane.announced is None else [row for row in lane.announced.items if row]


# -- statements --------------------------------------------------------------------------------------------------------

_LANE = "f.route = :route AND f.shard = :shard"
_WAITING = "IN ('RETRYING', 'PARKED', 'FAILED')"
_ROW = """
    o.id, coalesce(f.event_id, o.event_id), o.topic, o.`key`, o.tenant, coalesce(f.headers, o.headers),
    coalesce(f.body, o.body), coalesce(f.attempts, 0)"""


@cache
def rows_named(table: str) -> TextClause:
    """Rows that are not final, as they are to be sent, with their schema versions."""
    return with_ids(
        f"""
        SELECT {_ROW}, o.schema_version FROM {table} o
        LEFT JOIN pillarbox_failures f ON f.route = o.route AND f.shard = o.shard AND f.row_id = o.id
        WHERE o.route = :route AND o.shard = :shard AND o.status IN ('PENDING', 'RETRYING', 'PARKED', 'FAILED')
          AND o.id IN :ids
        """  # noqa: S608  constants
    )


def _is_due(words: Words) -> str:
    return f"f.status = 'RETRYING' AND f.available_at <= {words.now}"


def _blocks(words: Words, rows: str, tenant: str, parks: str = ":parks") -> str:
    """Whether a row is of this tenant, and later ones of its key must not overtake it."""
    return f"{rows}.tenant {words.same} {tenant} AND ({rows}.status <> 'FAILED' OR {parks})"


def _first(words: Words, of: str, parks: str = ":parks") -> str:
    """The first row of a key that later ones must not overtake."""
    return f"""(
        SELECT b.row_id FROM pillarbox_failures b {words.by_key}
        WHERE b.`key` = {of}.`key` AND b.route = {of}.route AND b.shard = {of}.shard AND b.status {_WAITING}
          AND {_blocks(words, "b", f"{of}.tenant", parks)}
        ORDER BY b.row_id LIMIT 1)"""  # noqa: S608  constants


def _page(words: Words, found: str, status: str) -> str:
    """Rows up to the one with which the bytes are reached. Sizes come first, because databases copy summed values."""
    return f"""
        SELECT {_ROW}, {status} FROM (
            SELECT sized.row_id, sized.size, sum(sized.size) OVER (ORDER BY sized.row_id) AS total FROM (
                SELECT f.row_id, length(coalesce(f.body, o.body)) AS size FROM {found} LIMIT :limit
            ) sized
        ) page {words.join} pillarbox_failures f ON {_LANE} AND f.row_id = page.row_id
        {words.join} {words.table} o ON o.id = page.row_id
        WHERE page.total - page.size < :max_bytes"""  # noqa: S608  constants


@cache
def _book(words: Words) -> Book:
    rows = f"{words.join} {words.table} o ON o.id = f.row_id WHERE {_LANE} AND f.row_id NOT IN :sending"
    heads = f"""pillarbox_failures f {words.by_time} {rows} AND {_is_due(words)}
        AND (f.tenant IS NULL OR f.tenant NOT IN :paused) AND f.row_id = {_first(words, "f")}
        ORDER BY f.available_at"""
    behind = f"""pillarbox_failures f {words.by_key} {rows} AND f.`key` = :key AND f.row_id > :after
        AND f.status {_WAITING} AND {_blocks(words, "f", ":tenant")}
        ORDER BY f.row_id"""
    may_follow = f"CASE WHEN f.status = 'PARKED' OR ({_is_due(words)}) THEN 'due' ELSE f.status END"
    on_their_way = bindparam("sending", expanding=True, type_=BigInteger)
    key = bindparam("key", type_=outbox.c.key.type)
    paused = bindparam("paused", expanding=True, type_=outbox.c.tenant.type)
    tenant = bindparam("tenant", type_=outbox.c.tenant.type)
    event, body = bindparam("event_id", type_=Uuid()), bindparam("body", type_=failures.c.body.type)
    again = f"status = 'RETRYING', available_at = {words.now}"
    book, read = f"pillarbox_failures {words.by_id}", f"pillarbox_failures f {words.by_id}"
    named = "route = :route AND shard = :shard AND row_id IN :ids"
    return Book(
        known=with_ids(
            f"SELECT o.id, NULL, o.tenant, o.`key` FROM {words.table} o WHERE o.route = :route AND o.shard = :shard "  # noqa: S608
            "AND o.id IN :ids AND o.status IN ('PENDING', 'RETRYING', 'PARKED', 'FAILED')"
        ),
        failed=with_ids(
            f"SELECT f.row_id, f.status, f.attempts, f.tenant, f.`key` FROM {read} "  # noqa: S608
            f"WHERE {_LANE} AND f.row_id IN :ids"
        ),
        heads=text(_page(words, heads, "f.status")).bindparams(on_their_way, paused),
        followers=text(_page(words, behind, may_follow)).bindparams(on_their_way, key, tenant),
        redone=rows_named(words.table),
        taken=text(
            f"""
            SELECT 1 FROM {words.table}
            WHERE event_id = :event_id AND route = :route AND schema_version = :schema_version
            UNION ALL
            SELECT 1 FROM pillarbox_failures WHERE event_id = :event_id AND route = :route
            """  # noqa: S608
        ).bindparams(event),
        firsts=with_ids(
            f"""
            SELECT k.tenant, k.`key`, k.row_id, (
                SELECT f.status FROM {read} WHERE {_LANE} AND f.row_id = k.row_id
            ) FROM (
                SELECT t.tenant, t.`key`, {_first(words, "t")} AS row_id FROM {words.table} t {words.by_id}
                WHERE t.route = :route AND t.shard = :shard AND t.id IN :ids
            ) k
            """  # noqa: S608  constants
        ),
        write=text(words.write),
        promote=with_ids(f"UPDATE {book} SET {again} WHERE {named} AND status = 'PARKED'"),  # noqa: S608  constants
        done=(
            # An edit is kept as long as its row, as the record of what was sent.
            with_ids(
                f"UPDATE {book} SET status = 'SENT', available_at = NULL WHERE {named} AND event_id IS NOT NULL"  # noqa: S608
            ),
            with_ids(f"DELETE FROM pillarbox_failures WHERE {named} AND event_id IS NULL"),  # noqa: S608  constants
        ),
        redrive=with_ids(
            f"UPDATE {book} SET {again}, attempts = 0 WHERE {named} AND status IN ('RETRYING', 'FAILED')"  # noqa: S608
        ),
        edit=text(
            f"UPDATE {book} SET {again}, attempts = 0, event_id = :event_id, body = :body, headers = :headers "  # noqa: S608
            "WHERE route = :route AND shard = :shard AND row_id = :row_id AND status IN ('RETRYING', 'FAILED')"
        ).bindparams(event, body),
        forget=with_json(words.forget),
    )


@cache
def _follow(words: Words) -> TextClause:
    """Copy the statuses of these rows from the book to the outbox."""
    return with_ids(
        f"""
        UPDATE {words.table} {words.by_id} SET status = coalesce((
            SELECT f.status FROM pillarbox_failures f WHERE {_LANE} AND f.row_id = {words.table}.id
        ), status)
        WHERE route = :route AND shard = :shard AND id IN :ids AND status <> 'SENT'
        """  # noqa: S608  constants
    )


@cache
def ready(words: Words, *, here: bool) -> TextClause:
    """Lanes that have something to do; with ``here``, only those of one relay."""
    first = _first(words, "f", "r.on_failure = 'park'")
    held = f"AND l.locked_by = :relay AND l.locked_until > {words.now}" if here else ""
    return with_ids(
        f"""
        SELECT l.route, l.shard FROM pillarbox_lanes l JOIN pillarbox_routes r ON r.id = l.route
        WHERE l.route IN :routes AND NOT l.paused {held} AND (
            l.announced IS NOT NULL
            OR (SELECT o.id FROM {words.table} o
                WHERE o.route = l.route AND o.shard = l.shard AND o.status = 'PENDING' AND o.status <> 'SENT'
                ORDER BY o.id LIMIT 1) IS NOT NULL
            OR (SELECT f.row_id FROM pillarbox_failures f {words.by_time}
                WHERE f.route = l.route AND f.shard = l.shard AND {_is_due(words)} AND f.row_id = {first}
                ORDER BY f.available_at LIMIT 1) IS NOT NULL
            OR EXISTS (SELECT 1 FROM pillarbox_requests q WHERE q.route = l.route AND q.shard = l.shard)
        )
        """,  # noqa: S608  constants
        "routes",
    )
