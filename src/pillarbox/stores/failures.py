"""The failure book: failed deliveries of a lane, and the deliveries that wait behind them. Only the lane's owner writes
to it.

The first waiting row of a key decides: it is RETRYING until its due time, or FAILED and waits for an operator. The rows
behind it are PARKED. When the first one is gone, the next becomes RETRYING and is due at once. Discarded and edited
rows stay in the book as long as in the outbox.

The rules are the same for all stores. A store adds its statements and the rows that are in flight:
`stores.log_failures` and `stores.queue_failures`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection, func, select

from ..cursor import RowAt
from ..errors import StoreError
from ..outbox import Ahead, Failure, FailurePolicy, Key, Lane, Row, Status
from .claims import Claims
from .tables import failures as book
from .tables import requests

WAITING = frozenset({Status.RETRYING, Status.PARKED, Status.FAILED})
_KEYS_WITH_FOLLOWERS = 8
"""Number of keys in a page whose followers are read too: each costs a statement."""
_KEYS_AT_ONCE = 10_000
"""Most ids of a statement."""


class Known(msgspec.Struct, frozen=True):
    """Position and key of a row."""

    at: RowAt
    key: Key

    @property
    def ahead(self) -> Ahead:
        """The row and its tenant."""
        return Ahead(self.at, self.key.tenant)


class _Failed(msgspec.Struct, frozen=True):
    status: Status
    attempts: int
    key: Key


class Written(msgspec.Struct, frozen=True, omit_defaults=True):
    """The new entry of a row."""

    row: int
    tenant: str | None
    key: str
    status: Status
    attempts: int
    available_in: float | None = None
    """Seconds until the next attempt. None: it waits for another row or an operator, or it is final."""
    last_error: str | None = None
    """None keeps the stored error."""


class Book(NamedTuple):
    """The statements about the book, in the SQL of one database. Each is about one lane, given by `place`."""

    known: Any
    """Positions and keys of the rows ``ids``."""
    failed: Any
    """Entries of the rows ``ids``."""
    heads: Any
    """Rows that are due and first of their keys."""
    followers: Any
    """Waiting rows of a key behind one of its rows, with 'due' if they may follow."""
    redone: Any
    """The rows ``ids`` as they are to be sent, with their schema versions."""
    taken: Any
    """Whether an event id is taken."""
    firsts: Any
    """For keys, each given by a row: the first row that later ones must not overtake."""
    write: Any
    promote: Any
    """Make the parked rows ``ids`` due."""
    done: tuple[Any, ...]
    """Mark the rows ``ids`` as sent."""
    redrive: Any
    edit: Any
    forget: Any
    """Delete the requests ``ids``, which were carried out."""


class Failures:
    """The failed rows of a lane, read and written in one transaction."""

    def __init__(self, connection: Connection, lane: Lane, table: str) -> None:
        self.lane = lane
        self.table = table
        self.connection = connection
        self.place = place(lane)
        self._known: dict[int, Known] = {}
        self._book = self.statements()
        self._claims = Claims(connection, lane, table)
        self._touched: dict[Key, int] = {}
        """Keys whose first row may have changed, each with one of its rows."""

    # -- for stores to override ----------------------------------------------------------------------------------------

    def statements(self) -> Book:
        """The statements of the database."""
        raise NotImplementedError

    def columns(self, rows: Sequence[Written]) -> dict[str, Any]:
        """Rows as parameters of `Book.write`."""
        raise NotImplementedError

    def redone(self) -> Sequence[int]:
        """Rows of the announced batch that may have failed before."""
        raise NotImplementedError

    def settled(self) -> Sequence[int]:
        """The redone rows that are at the destination once the batch is settled."""
        raise NotImplementedError

    def is_sending(self, row: Known, lane: Lane) -> bool:
        """Whether the row is in flight in the announced batch."""
        raise NotImplementedError

    def is_passed(self, row: Known, lane: Lane) -> bool:
        """Whether the lane has passed a row that is not in the book."""
        raise NotImplementedError

    def changed(self, rows: Collection[int]) -> None:
        """Called when the entries of these rows have changed."""

    # -- reads ---------------------------------------------------------------------------------------------------------

    def know(self, rows: Iterable[int]) -> Mapping[int, Known]:
        """Positions and keys of rows of the lane. Missing rows are left out."""
        wanted = {*rows}
        if ids := sorted(wanted - self._known.keys()):
            for row, xid, tenant, key in self._ask(self._book.known, ids=ids):
                self._known[row] = Known(RowAt(row, xid or 0), Key(text_of(tenant), text_of(key)))
        return {row: self._known[row] for row in wanted & self._known.keys()}

    def redo(self, limit: int, max_bytes: int, paused: Sequence[str]) -> list[Row]:
        """The rows that are due and first of their keys, followed by the rows behind them as far as there is room."""
        asked = {"limit": limit, "max_bytes": max_bytes, "sending": [*self.redone()], "paused": [*paused]}
        found = [row_of(values) for values in self._ask(self._book.heads, **asked)]
        room, left = limit - len(found), max_bytes - sum(len(row.body) for row in found)
        for head in sorted(found, key=attrgetter("id"))[:_KEYS_WITH_FOLLOWERS]:
            if room <= 0 or left <= 0:
                break
            behind = {**asked, "tenant": head.tenant, "key": head.key, "after": head.id, "limit": room}
            rows = self._ask(self._book.followers, **{**behind, "max_bytes": left})
            for values in sorted(rows, key=itemgetter(0)):
                if values[8] != "due":
                    break
                row = row_of(values)
                found.append(row)
                room, left = room - 1, left - len(row.body)
        return sorted(found, key=attrgetter("id"))

    # -- results of batches --------------------------------------------------------------------------------------------

    def fail(
        self, failures: Sequence[Failure], batch: Collection[int], counted: Mapping[int, int] | None = None
    ) -> None:
        """Schedule the next attempt of these rows, of the batch or failed before, or mark them as failed."""
        again = [failure.row for failure in failures if not failure.error and failure.row not in batch]
        too_late = {*again} - {row for row, failed in self._failed(again).items() if failed.status in WAITING}
        due = [failure for failure in failures if failure.row not in too_late]
        before = self._admit([failure.row for failure in due], batch, WAITING)
        written = []
        for failure in due:
            row, attempts = failure.row, failure.attempts
            if not failure.error:  # not an attempt: a redrive may have reset the attempts meanwhile
                attempts = min(attempts, before[row].attempts if row in before else (counted or {}).get(row, 0))
            status = Status.FAILED if failure.retry_after is None else Status.RETRYING
            key = self._known[row].key
            written.append(Written(row, key.tenant, key.key, status, attempts, failure.retry_after, failure.error))
        self._write(written)
        if self.lane.route.on_failure is FailurePolicy.SKIP:
            self._claims.gate([it.row for it in written if it.status is Status.FAILED], gate=False)

    def park(self, rows: Sequence[int], batch: Collection[int]) -> None:
        """Park these rows behind a failed one of their key."""
        before = self._admit(rows, batch, (Status.RETRYING, Status.PARKED))
        attempts = {row: failed.attempts for row, failed in before.items()}
        of = {row: self._known[row].key for row in rows}
        self._write([Written(row, of[row].tenant, of[row].key, Status.PARKED, attempts.get(row, 0)) for row in rows])

    def failed_before(self, rows: Iterable[int]) -> Collection[int]:
        """The given rows that have failed before."""
        return self._failed(rows).keys()

    def count_attempts(self, attempts: Mapping[int, int]) -> None:
        """Store the attempts of failed rows that are being sent again."""
        at_once = {Status.RETRYING: 0.0}
        self._write(
            [
                Written(row, it.key.tenant, it.key.key, it.status, attempts[row], at_once.get(it.status))
                for row, it in self._failed(attempts).items()
            ]
        )

    def settle(self) -> None:
        """Mark the failed rows of the announced batch as sent."""
        if before := self._failed(self.settled()):
            self._touched |= {failed.key: row for row, failed in before.items()}
            for statement in self._book.done:
                self._do(statement, ids=sorted(before))

    def unpark_skipped(self) -> None:
        """Make rows due that were parked behind failed ones before the route changed to skip."""
        self._claims.open_gates()
        waits = (book.c.route == self.lane.route.id, book.c.shard == self.lane.shard, book.c.status == Status.PARKED)
        one_of_each = select(book.c.tenant, book.c.key, func.min(book.c.row_id)).where(*waits)
        found = self.connection.execute(one_of_each.group_by(book.c.tenant, book.c.key)).all()
        for start in range(0, len(found), _KEYS_AT_ONCE):
            self._touched = {Key(tenant, key): row for tenant, key, row in found[start : start + _KEYS_AT_ONCE]}
            self.after(self.lane)

    def after(self, lane: Lane) -> Lane:
        """The lane after these changes: promotes the first rows of the changed keys and updates the waiting keys."""
        if not self._touched:
            return lane
        keys = sorted(self._touched, key=lambda key: (key.key, key.tenant or ""))
        asked = {"tenants": [key.tenant for key in keys], "keys": [key.key for key in keys]}
        firsts = self._ask(self._book.firsts, **asked, ids=[self._touched[key] for key in keys])
        come, gone, promoted = set[Key](), set[Key](), []
        for tenant, key, first, status in firsts:
            of = Key(text_of(tenant), text_of(key))
            (gone if first is None else come).add(of)
            if first is not None and status == Status.PARKED:
                promoted.append(first)
        if promoted:
            self._do(self._book.promote, ids=promoted)
            self.changed(promoted)
        if come <= lane.waiting and gone.isdisjoint(lane.waiting):
            return lane  # avoids a copy: there may be a million keys
        return replace(lane, waiting=(lane.waiting - gone) | come)

    def _failed(self, rows: Iterable[int]) -> dict[int, _Failed]:
        if not (ids := sorted({*rows})):
            return {}
        return {
            row: _Failed(Status(status), attempts, Key(text_of(tenant), text_of(key)))
            for row, status, attempts, tenant, key in self._ask(self._book.failed, ids=ids)
        }

    def _admit(self, rows: Sequence[int], batch: Collection[int], statuses: Collection[Status]) -> dict[int, _Failed]:
        """Entries of the rows that have failed before. Raises `StoreError` for a row that is neither of the batch nor
        in a permitted state.
        """
        if not rows:
            return {}
        known, before = self.know(rows), self._failed(rows)
        for row in rows:
            failed = before.get(row)
            if row not in known or (row not in batch if failed is None else failed.status not in statuses):
                raise StoreError(
                    f"row {row} is not of this batch of lane {self.lane}, or is in no state to be changed: "
                    "somebody changed it by hand"
                )
        return before

    def _write(self, rows: Sequence[Written]) -> None:
        if rows:
            self._do(self._book.write, **self.columns(rows))
            self._touched |= {Key(it.tenant, it.key): it.row for it in rows}
            self.changed([it.row for it in rows])

    def _ask(self, statement: Any, **parameters: Any) -> Sequence[Any]:
        return self.connection.execute(statement, {**self.place, **parameters}).all()

    def _do(self, statement: Any, **parameters: Any) -> None:
        self.connection.execute(statement, {**self.place, **parameters})

    # -- requests of operators -----------------------------------------------------------------------------------------

    def carry_out(self, following: Lane, ids: Sequence[int]) -> None:
        """Carry out these requests in their order. A row in flight keeps its request. A message that has taken effect
        is redriven, whatever was requested: this settles its row without a further effect.
        """
        if not ids:
            return
        here = (requests.c.route == self.lane.route.id, requests.c.shard == self.lane.shard)
        found = self.connection.execute(
            select(requests).where(*here, requests.c.id.in_(ids)).order_by(requests.c.id)
        ).all()
        known = self.know(request.row_id for request in found)
        asked = [it for it in found if it.row_id not in known or not self.is_sending(known[it.row_id], following)]
        gone = self._claims.gone(request.row_id for request in asked)
        for action, run in groupby(asked, key=lambda it: "redrive" if it.row_id in gone else it.action):
            if action == "edit":
                for request in run:
                    self._edit(request.row_id, request.event_id, request.body)
                continue
            rows = sorted({request.row_id for request in run if request.row_id in known})
            if action == "redrive":
                self._do(self._book.redrive, ids=rows)
                self.changed(rows)
                self._claims.gate(rows, gate=True)
            elif action == "discard":
                self._discard(following, rows)
                self._claims.drop(rows)
        if asked:
            self._do(self._book.forget, ids=[request.id for request in asked])
        self._touched |= {known[it.row_id].key: it.row_id for it in asked if it.row_id in known}

    def _discard(self, lane: Lane, rows: Sequence[int]) -> None:
        before = self._failed(rows)
        attempts = {row: 0 for row in rows if row not in before and not self.is_passed(self._known[row], lane)}
        attempts |= {row: failed.attempts for row, failed in before.items() if failed.status in WAITING}
        of = {row: self._known[row].key for row in attempts}
        self._write(
            [Written(row, of[row].tenant, of[row].key, Status.DISCARDED, count) for row, count in attempts.items()]
        )

    def _edit(self, row: int, event_id: UUID | None, body: bytes | None) -> None:
        failed = self._failed([row]).get(row)
        if failed is None or failed.status not in (Status.FAILED, Status.RETRYING) or event_id is None or body is None:
            return
        found = self._ask(self._book.redone, ids=[row])
        if not found:  # the row was deleted by hand
            return
        old = row_of(found[0])
        headers = dict(old.headers)
        if event_id != old.event_id:  # an inbound message keeps its event id
            if self._ask(self._book.taken, event_id=event_id, schema_version=found[0][-1]):
                return  # possibly this very edit: requested twice, it is done once
            headers |= {"event_id": str(event_id), "original_event_id": str(old.event_id)}
        told = msgspec.json.encode(headers).decode()
        self._do(self._book.edit, row_id=row, event_id=event_id, body=body, headers=told)
        self.changed([row])
        self._claims.gate([row], gate=True)


def place(lane: Lane) -> dict[str, Any]:
    """The lane and its failure policy, as parameters of statements."""
    return {
        "route": lane.route.id,
        "shard": lane.shard,
        "parks": lane.route.on_failure is FailurePolicy.PARK,
    }


decode_headers = msgspec.json.Decoder(dict[str, str]).decode


def text_of(value: Any) -> Any:
    """A key or tenant as text: MariaDB and MySQL store bytes."""
    return value.decode() if isinstance(value, bytes) else value


def row_of(values: Sequence[Any]) -> Row:
    """A row from the driver's values. Further values are ignored."""
    row_id, event, topic, key, tenant, headers, body, attempts, *_ = values
    return Row(
        row_id,
        str(event),
        topic,
        text_of(key),
        text_of(tenant),
        decode_headers(headers),
        body,
        attempts,
    )
