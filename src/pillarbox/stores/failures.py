"""The failed rows of a lane that is a log: a narrow table, which only the lane's owner changes.

Among the waiting rows of a key the first one decides. It is RETRYING with a time, or FAILED and needs a person; the
rows behind it are PARKED. When the first one is gone, the next becomes RETRYING and is due at once. What a person has
discarded, or sent in another form, is kept there as long as the row itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection, delete, select

from ..cursor import RowAt
from ..errors import StoreError
from ..outbox import Ahead, Failure, FailurePolicy, Key, Lane, Row, Status
from . import log_sql as sql
from .announced import contents_of, detour_of, position
from .tables import requests

_WAITING = frozenset({Status.RETRYING, Status.PARKED, Status.FAILED})
_KEYS_WITH_FOLLOWERS = 8
"""How many keys of a page bring the rows behind their first one: each costs a statement."""


class Known(msgspec.Struct, frozen=True):
    """Where a row stands, and what it is ordered by."""

    at: RowAt
    key: Key

    @property
    def ahead(self) -> Ahead:
        """The row, and whose it is."""
        return Ahead(self.at, self.key.tenant)


class _Failed(msgspec.Struct, frozen=True):
    status: Status
    attempts: int
    key: Key


class Failures:
    """What the owner of a lane knows and writes about its failed rows, in one transaction."""

    def __init__(self, connection: Connection, lane: Lane) -> None:
        self._connection = connection
        self._lane = lane
        self._place = place(lane)
        self._known: dict[int, Known] = {}
        self._touched: set[Key] = set()

    def know(self, rows: Iterable[int]) -> Mapping[int, Known]:
        """Where rows of the lane stand; those that are not there are left out."""
        if ids := sorted({*rows} - self._known.keys()):
            for row, xid, tenant, key in self._connection.execute(sql.KNOWN, {**self._place, "ids": ids}):
                self._known[row] = Known(RowAt(row, xid or 0), Key(tenant, key))
        return self._known

    def redo(self, limit: int, max_bytes: int, paused: Sequence[str]) -> list[Row]:
        """The rows that are due and first of their keys, filled up with those behind them."""
        contents = contents_of(self._lane)
        sending = [] if contents is None else [*contents.redo]
        asked = {**self._place, "limit": limit, "max_bytes": max_bytes, "sending": sending, "paused": paused}
        found = [row_of(values) for values in self._connection.execute(sql.HEADS, asked)]
        room, left = limit - len(found), max_bytes - sum(len(row.body) for row in found)
        for head in sorted(found, key=attrgetter("id"))[:_KEYS_WITH_FOLLOWERS]:
            if room <= 0 or left <= 0:
                break
            behind = {**asked, "tenant": head.tenant, "key": head.key, "after": head.id, "limit": room}
            rows = self._connection.execute(sql.FOLLOWERS, {**behind, "max_bytes": left}).all()
            for values in sorted(rows, key=itemgetter(0)):
                if values[8] != "due":
                    break
                row = row_of(values)
                found.append(row)
                room, left = room - 1, left - len(row.body)
        return sorted(found, key=attrgetter("id"))

    # -- what becomes of rows ------------------------------------------------------------------------------------------

    def fail(
        self, failures: Sequence[Failure], batch: Collection[int], counted: Mapping[int, int] | None = None
    ) -> None:
        """These rows, of the batch or failed before, are tried again later, or not at all."""
        again = [failure.row for failure in failures if not failure.error and failure.row not in batch]
        gone = {*again} - {row for row, failed in self._failed(again).items() if failed.status in _WAITING}
        failures = [failure for failure in failures if failure.row not in gone]
        before = self._admit([failure.row for failure in failures], batch, _WAITING)
        written = []
        for failure in failures:
            row, attempts = failure.row, failure.attempts
            if not failure.error:  # it is no attempt: then a person may have set them back meanwhile
                attempts = min(attempts, before[row].attempts if row in before else (counted or {}).get(row, 0))
            status = Status.FAILED if failure.retry_after is None else Status.RETRYING
            written.append((row, *self._known[row].key, status, attempts, failure.retry_after, failure.error))
        self._write(written)

    def park(self, rows: Sequence[int], batch: Collection[int]) -> None:
        """These rows go behind a failed one of their key."""
        before = self._admit(rows, batch, (Status.RETRYING, Status.PARKED))
        attempts = {row: failed.attempts for row, failed in before.items()}
        self._write([(row, *self._known[row].key, Status.PARKED, attempts.get(row, 0), None, None) for row in rows])

    def count_attempts(self, attempts: Mapping[int, int]) -> None:
        """Of failed rows that are being sent again."""
        before = self._failed(attempts)
        self._write(
            [(row, *it.key, it.status, attempts[row], 0.0, None) for row, it in before.items() if row in attempts]
        )

    def settle(self) -> None:
        """The failed rows of the announced batch are at the destination."""
        contents = contents_of(self._lane)
        ids = [] if contents is None else [row for row in contents.redo if row not in contents.out]
        if ids:
            self._touched |= {failed.key for failed in self._failed(ids).values()}
            for statement in sql.DONE:
                self._connection.execute(statement, {**self._place, "ids": ids})

    def after(self, lane: Lane) -> Lane:
        """What is true of the lane after all that: who is first of the keys, and which keys wait."""
        if not self._touched:
            return lane
        keys = sorted(self._touched, key=lambda key: (key.key, key.tenant or ""))
        asked = {**self._place, "tenants": [key.tenant for key in keys], "keys": [key.key for key in keys]}
        waiting, promoted = set(lane.waiting), []
        for tenant, key, first, status in self._connection.execute(sql.FIRSTS, asked):
            if first is None:
                waiting.discard(Key(tenant, key))
                continue
            waiting.add(Key(tenant, key))
            if status == Status.PARKED:
                promoted.append(first)
        if promoted:
            self._connection.execute(sql.PROMOTE, {**self._place, "ids": promoted})
        return replace(lane, waiting=frozenset(waiting))

    def _failed(self, rows: Iterable[int]) -> dict[int, _Failed]:
        if not (ids := sorted({*rows})):
            return {}
        found = self._connection.execute(sql.FAILURES, {**self._place, "ids": ids})
        return {
            row: _Failed(Status(status), attempts, Key(tenant, key)) for row, status, attempts, tenant, key in found
        }

    def _admit(self, rows: Sequence[int], batch: Collection[int], statuses: Collection[Status]) -> dict[int, _Failed]:
        """Those of the rows that have failed before. The others must be of the batch."""
        if not rows:
            return {}
        known, before = self.know(rows), self._failed(rows)
        for row in rows:
            failed = before.get(row)
            if row not in known or (row not in batch if failed is None else failed.status not in statuses):
                raise StoreError(
                    f"row {row} is not of this batch of lane {self._lane}, or is in no state to be changed: "
                    "somebody changed it by hand"
                )
        return before

    def _write(self, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            columns = zip(sql.FAILURE_COLUMNS, map(list, zip(*rows, strict=True)), strict=True)
            self._connection.execute(sql.WRITE_FAILURES, {**self._place, **dict(columns)})
            self._touched |= {Key(row[1], row[2]) for row in rows}

    # -- what people ask for -------------------------------------------------------------------------------------------

    def carry_out(self, following: Lane, ids: Sequence[int]) -> None:
        """Do what was asked, in that order. A row that is being sent keeps its request."""
        if not ids:
            return
        here = (requests.c.route == self._lane.route.id, requests.c.shard == self._lane.shard)
        found = self._connection.execute(
            select(requests).where(*here, requests.c.id.in_(ids)).order_by(requests.c.id)
        ).all()
        known, sending = self.know(request.row_id for request in found), contents_of(following)
        asked = [
            request
            for request in found
            if not (sending and request.row_id in known and sending.holds(known[request.row_id].ahead, following))
        ]
        for action, run in groupby(asked, key=attrgetter("action")):
            if action == "edit":
                for request in run:
                    self._edit(request.row_id, request.event_id, request.body)
                continue
            rows = sorted({request.row_id for request in run if request.row_id in known})
            if action == "redrive":
                self._connection.execute(sql.REDRIVE, {**self._place, "ids": rows})
            elif action == "discard":
                self._discard(following, rows)
        if asked:
            self._connection.execute(delete(requests).where(requests.c.id.in_([request.id for request in asked])))
        self._touched |= {known[request.row_id].key for request in asked if request.row_id in known}

    def _discard(self, lane: Lane, rows: Sequence[int]) -> None:
        before = self._failed(rows)
        attempts = {row: 0 for row in rows if row not in before and not self._is_passed(lane, self._known[row])}
        attempts |= {row: failed.attempts for row, failed in before.items() if failed.status in _WAITING}
        self._write(
            [(row, *self._known[row].key, Status.DISCARDED, count, None, None) for row, count in attempts.items()]
        )

    def _is_passed(self, lane: Lane, row: Known) -> bool:
        return position(lane, detour_of(lane, row.key.tenant)).covers(row.at)

    def _edit(self, row: int, event_id: UUID | None, body: bytes | None) -> None:
        failed = self._failed([row]).get(row)
        if failed is None or failed.status not in (Status.FAILED, Status.RETRYING) or event_id is None or body is None:
            return
        asked = {**self._place, "row_id": row, "ids": [row], "event_id": str(event_id), "body": body}
        values = self._connection.execute(sql.REDONE, asked).first()
        if values is None:  # somebody has deleted the row by hand
            return
        if self._connection.execute(sql.TAKEN, {**asked, "schema_version": values[-1]}).first() is not None:
            return  # this very edit perhaps: asked twice, it is done once
        old = row_of(values)
        headers = {**old.headers, "event_id": str(event_id), "original_event_id": str(old.event_id)}
        self._connection.execute(sql.EDIT, {**asked, "headers": msgspec.json.encode(headers).decode()})


def place(lane: Lane) -> dict[str, Any]:
    """The lane, for statements."""
    return {
        "route": lane.route.id,
        "shard": lane.shard,
        "parks": lane.route.on_failure is FailurePolicy.PARK,
    }


decode_headers = msgspec.json.Decoder(dict[str, str]).decode


def row_of(values: Sequence[Any]) -> Row:
    """A row from what the driver gives, whatever is behind it."""
    row_id, event_id, topic, key, tenant, headers, body, attempts, *_ = values
    return Row(row_id, event_id, topic, key, tenant, decode_headers(headers), body, attempts)
