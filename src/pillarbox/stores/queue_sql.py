"""Statements of the queue store for MariaDB, MySQL and SQLite. `stores.queue_failures` has those about failures.

Statuses are constants, so that the planner knows that a partial index covers the query. A subquery for one row has an
ORDER BY and a LIMIT, so that it is an index probe and never a join, regardless of statistics. SQLite accepts MySQL's
quotes, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import BindParameter, Dialect, Text, TextClause, TypeDecorator, bindparam, text

from .tables import outbox

_FRESH = "o.route = :route AND o.shard = :shard AND o.status = 'PENDING' AND o.status <> 'SENT'"


@dataclass(frozen=True)
class Words:
    """The dialect-specific parts of the statements about a table of deliveries."""

    table: str
    now: str
    same: str
    """Whether two values are equal or both missing."""
    send: str
    """Marks rows as sent, with their numbers: takes pairs of id and number."""
    write: str
    """Writes rows of the table into the failure book."""
    forget: str
    """Deletes requests by their ids."""
    remove: tuple[str, str]
    """Deletes final rows by their ids: from the failure book, and then from the table."""
    join: str = "JOIN"
    """Joins tables in their written order."""
    by_id: str = ""
    by_key: str = ""
    by_time: str = ""
    """Forces an index, regardless of statistics. InnoDB locks all rows that it reads, and waits for rows of open
    business transactions, so a statement must read only rows that it changes.
    """


_LISTED = "JSON_TABLE(:ids, '$[*]' COLUMNS (id BIGINT PATH '$')) t"


def _mysql(table: str) -> Words:
    return Words(
        table=table,
        now="UTC_TIMESTAMP(6)",
        same="<=>",
        send=f"""
            UPDATE JSON_TABLE(:pairs, '$[*]' COLUMNS (id BIGINT PATH '$[0]', number BIGINT PATH '$[1]')) t
            STRAIGHT_JOIN {table} o FORCE INDEX (PRIMARY) ON o.id = t.id
            SET o.status = 'SENT', o.sent_at = UTC_TIMESTAMP(6), o.batch = :batch, o.number = t.number
            WHERE o.route = :route AND o.shard = :shard AND o.status IN ('PENDING', 'RETRYING', 'PARKED')""",  # noqa: S608
        write=f"""
            INSERT INTO pillarbox_failures
                (route, shard, row_id, tenant, `key`, status, attempts, available_at, last_error)
            SELECT o.route, o.shard, o.id, o.tenant, o.`key`, v.status, v.attempts,
                   UTC_TIMESTAMP(6) + INTERVAL v.available_in * 1000000 MICROSECOND, v.last_error
            FROM JSON_TABLE(:rows, '$[*]' COLUMNS (
                row_id BIGINT PATH '$.row', status VARCHAR(10) PATH '$.status', attempts INT PATH '$.attempts',
                available_in DOUBLE PATH '$.available_in',
                last_error LONGTEXT CHARACTER SET utf8mb4 PATH '$.last_error'
            )) v STRAIGHT_JOIN {table} o FORCE INDEX (PRIMARY) ON o.id = v.row_id
            ON DUPLICATE KEY UPDATE status = VALUES(status), attempts = VALUES(attempts),
                available_at = VALUES(available_at),
                last_error = coalesce(VALUES(last_error), pillarbox_failures.last_error)""",  # noqa: S608
        forget=f"""
            DELETE q FROM {_LISTED} STRAIGHT_JOIN pillarbox_requests q FORCE INDEX (PRIMARY) ON q.id = t.id""",
        remove=(
            f"""
            DELETE f FROM {_LISTED} STRAIGHT_JOIN {table} o FORCE INDEX (PRIMARY) ON o.id = t.id
            STRAIGHT_JOIN pillarbox_failures f FORCE INDEX (PRIMARY)
                ON f.route = o.route AND f.shard = o.shard AND f.row_id = o.id
            WHERE o.status IN ('SENT', 'DISCARDED')""",
            f"""
            DELETE o FROM {_LISTED} STRAIGHT_JOIN {table} o FORCE INDEX (PRIMARY) ON o.id = t.id
            WHERE o.status IN ('SENT', 'DISCARDED')""",
        ),
        join="STRAIGHT_JOIN",
        by_id="FORCE INDEX (PRIMARY)",
        by_key="FORCE INDEX (ix_pillarbox_failures_key)",
        by_time="FORCE INDEX (ix_pillarbox_failures_due)",
    )


def _sqlite(table: str) -> Words:
    return Words(
        table=table,
        now="strftime('%Y-%m-%d %H:%M:%f', 'now')",
        same="IS",
        send=f"""
            UPDATE {table}
            SET status = 'SENT', sent_at = strftime('%Y-%m-%d %H:%M:%f', 'now'), batch = :batch,
                number = json_extract(t.value, '$[1]')
            FROM json_each(:pairs) AS t
            WHERE {table}.id = json_extract(t.value, '$[0]')
              AND route = :route AND shard = :shard AND status IN ('PENDING', 'RETRYING', 'PARKED')""",  # noqa: S608
        write=f"""
            INSERT INTO pillarbox_failures
                (route, shard, row_id, tenant, `key`, status, attempts, available_at, last_error)
            SELECT o.route, o.shard, o.id, o.tenant, o.`key`,
                   json_extract(v.value, '$.status'), json_extract(v.value, '$.attempts'),
                   strftime('%Y-%m-%d %H:%M:%f', 'now', json_extract(v.value, '$.available_in') || ' seconds'),
                   json_extract(v.value, '$.last_error')
            FROM json_each(:rows) v CROSS JOIN {table} o ON o.id = json_extract(v.value, '$.row')
            WHERE true
            ON CONFLICT (route, shard, row_id) DO UPDATE SET status = excluded.status, attempts = excluded.attempts,
                available_at = excluded.available_at, last_error = coalesce(excluded.last_error, last_error)""",  # noqa: S608
        forget="DELETE FROM pillarbox_requests WHERE id IN (SELECT value FROM json_each(:ids))",
        remove=(
            f"""
            DELETE FROM pillarbox_failures WHERE (route, shard, row_id) IN (
                SELECT o.route, o.shard, o.id FROM json_each(:ids) t CROSS JOIN {table} o ON o.id = t.value
                WHERE o.status IN ('SENT', 'DISCARDED')
            )""",  # noqa: S608
            f"""
            DELETE FROM {table}
            WHERE id IN (SELECT value FROM json_each(:ids)) AND status IN ('SENT', 'DISCARDED')""",  # noqa: S608
        ),
        join="CROSS JOIN",
    )


@cache
def words(dialect: str, table: str) -> Words:
    """The dialect-specific parts for a table of deliveries."""
    return _sqlite(table) if dialect == "sqlite" else _mysql(table)


def with_ids(statement: str, *lists: str) -> TextClause:
    """A statement with lists of ids among its parameters."""
    return text(statement).bindparams(*(bindparam(name, expanding=True) for name in lists or ("ids",)))


class _Json(TypeDecorator[Sequence[int]]):
    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Sequence[int] | None, dialect: Dialect) -> str:  # noqa: ARG002  the same for all dialects
        return msgspec.json.encode(value).decode()


def with_json(statement: str) -> TextClause:
    """A statement with a list of ids that it reads as a table."""
    return text(statement).bindparams(bindparam("ids", type_=_Json))


# -- pages -------------------------------------------------------------------------------------------------------------


@cache
def fresh(table: str, *, sending: bool, paused: bool) -> TextClause:
    """Rows that were never tried, followed by 0, and ids of operators' requests, followed by 1. With or without rows in
    flight and paused tenants.
    """
    not_sending = "AND {} NOT IN :sending" if sending else ""
    not_paused = "AND (o.tenant IS NULL OR o.tenant NOT IN :paused)" if paused else ""
    lists: list[BindParameter[Any]] = []
    if sending:
        lists.append(bindparam("sending", expanding=True))
    if paused:
        lists.append(bindparam("paused", expanding=True, type_=outbox.c.tenant.type))
    return text(f"""
        SELECT o.id, o.event_id, o.topic, o.`key`, o.tenant, o.headers, o.body, 0 AS attempts, 0 AS is_request FROM (
            SELECT sized.id, sized.size, sum(sized.size) OVER (ORDER BY sized.id) AS total FROM (
                SELECT o.id, length(o.body) AS size FROM {table} o
                WHERE {_FRESH} {not_sending.format("o.id")} {not_paused}
                ORDER BY o.id LIMIT :limit
            ) sized
        ) page JOIN {table} o ON o.id = page.id
        WHERE page.total - page.size < :max_bytes
        UNION ALL
        SELECT asked.id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1 FROM (
            SELECT q.id FROM pillarbox_requests q
            WHERE q.route = :route AND q.shard = :shard {not_sending.format("q.row_id")} ORDER BY q.id LIMIT :limit
        ) asked
    """).bindparams(*lists)  # noqa: S608  constants


# -- batches -----------------------------------------------------------------------------------------------------------


@cache
def sent(words: Words) -> TextClause:
    """Mark the batch as sent."""
    return text(words.send)
