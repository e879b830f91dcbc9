"""The inbox on a relational database, and the table of those who have one.

The rows are inserted before anything is asked: whoever asks first and inserts afterwards lets the same message through
twice. What was refused as a duplicate is read afterwards, to be compared. Rows go in sorted by their event ids, so that
two batches with the same messages wait for each other, and never each for the other.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Connection, bindparam, delete, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from ..errors import BeingSwappedError, StoreError
from ..inbox import Admission, Arrival
from ..outbox import stable_hash
from .append import explained, insert_missing
from .columns import from_now
from .tables import consumers as consumers_table
from .tables import inbox

Seen = tuple[int, bytes]
"""Schema version and digest of what was dealt with."""

_MYSQL_DUPLICATE = 1062


class SqlInbox:
    """`Inbox` on PostgreSQL, MariaDB/MySQL and SQLite."""

    def admit(
        self, connection: Connection, consumer: int, tenant: str | None, arrivals: Sequence[Arrival]
    ) -> Sequence[Admission]:
        first: dict[UUID, Arrival] = {}
        for arrival in arrivals:
            first.setdefault(arrival.event_id, arrival)
        if not first:
            return ()
        place = {"consumer": consumer, "tenant": tenant or ""}
        write = _write_mysql if connection.dialect.name in ("mysql", "mariadb") else _write
        with explained():
            seen = write(connection, place, [*first.values()])
        if not seen and len(first) == len(arrivals):
            return [Admission.NEW] * len(arrivals)
        return admissions(seen, arrivals)

    def forget(self, connection: Connection, consumer: int, tenant: str | None, arrival: Arrival) -> bool:
        gone = delete(inbox).where(
            inbox.c.consumer == consumer,
            inbox.c.tenant == (tenant or ""),
            inbox.c.event_id == arrival.event_id,
            inbox.c.schema_version == arrival.schema_version,
            inbox.c.digest == arrival.digest,
        )
        return connection.execute(gone).rowcount == 1

    def prune(self, connection: Connection, consumer: int, older_than: timedelta, limit: int) -> int:
        # The moment is a value, and no expression: an index serves no condition that could change from row to row.
        before = connection.scalar(select(from_now(-older_than.total_seconds())))
        gone = connection.execute(
            _PRUNE[connection.dialect.name], {"consumer": consumer, "before": before, "limit": limit}
        )
        return int(gone.rowcount)


def admissions(seen: Mapping[UUID, Seen], arrivals: Sequence[Arrival]) -> list[Admission]:
    """What each arrival is, if these were there before all of them."""
    found = dict(seen)
    answers = []
    for arrival in arrivals:
        this = arrival.schema_version, arrival.digest
        before = found.setdefault(arrival.event_id, this)
        if before is this:
            answers.append(Admission.NEW)
        elif before[0] != this[0]:
            answers.append(Admission.OTHER_VERSION)
        elif before[1] != this[1]:
            answers.append(Admission.ALTERED)
        else:
            answers.append(Admission.DUPLICATE)
    return answers


# -- PostgreSQL and SQLite ---------------------------------------------------------------------------------------------


def _write(connection: Connection, place: Mapping[str, Any], arrivals: Sequence[Arrival]) -> dict[UUID, Seen]:
    """Insert what is new, in one statement; what was there before comes back."""
    postgres = connection.dialect.name == "postgresql"
    new = (_insert_postgres if postgres else _insert_sqlite)(connection, place, arrivals)
    if new is None:
        return {}
    refused = {arrival.event_id: arrival for arrival in arrivals if arrival.event_id not in new}
    ids = [*refused] if postgres else json.dumps([event_id.hex for event_id in refused])
    stored = _seen(connection.execute(_STORED_ARRAY if postgres else _STORED_JSON, {**place, "event_ids": ids}).all())
    # What was pruned in between had been dealt with: it is taken for what has come now.
    return {event_id: stored.get(event_id, (each.schema_version, each.digest)) for event_id, each in refused.items()}


def _insert_postgres(
    connection: Connection, place: Mapping[str, Any], arrivals: Sequence[Arrival]
) -> Collection[UUID] | None:
    """The ids that were new; None if all were."""
    if len(arrivals) == 1:
        [one] = arrivals
        given = {"event_id": one.event_id, "version": one.schema_version, "digest": one.digest}
        return None if connection.execute(_INSERT_ONE, {**place, **given}).first() else ()
    arrays = {
        "event_ids": [arrival.event_id for arrival in arrivals],
        "versions": [arrival.schema_version for arrival in arrivals],
        "digests": [arrival.digest for arrival in arrivals],
    }
    number, new = connection.execute(_INSERT_ARRAYS, {**place, **arrays, "count": len(arrivals)}).one()
    return None if number == len(arrivals) else {*(new or ())}


def _insert_sqlite(
    connection: Connection, place: Mapping[str, Any], arrivals: Sequence[Arrival]
) -> Collection[UUID] | None:
    """The same. JSON has no bytes: the digests, which are all of one length, come as one value."""
    rows = json.dumps([(arrival.event_id.hex, arrival.schema_version) for arrival in arrivals])
    digests = b"".join(arrival.digest for arrival in arrivals)
    new = connection.scalars(_INSERT_JSON, {**place, "rows": rows, "digests": digests}).all()
    return None if len(new) == len(arrivals) else {UUID(event_id) for event_id in new}


def _seen(rows: Sequence[Any]) -> dict[UUID, Seen]:
    return {UUID(str(event_id)): (version, bytes(digest)) for event_id, version, digest in rows}


_KEY = "consumer, tenant, event_id"
_COLUMNS = f"{_KEY}, schema_version, digest"
_INSERT_ONE = text(f"""
INSERT INTO pillarbox_inbox ({_COLUMNS})
VALUES (CAST(:consumer AS bigint), CAST(:tenant AS text), CAST(:event_id AS uuid), CAST(:version AS integer),
        CAST(:digest AS bytea))
ON CONFLICT DO NOTHING RETURNING schema_version
""")  # noqa: S608  constants
# One text for any number of rows, with few parameters: drivers prepare it once, and no limit of theirs is near. The ids
# come back only if some are missing.
_INSERT_ARRAYS = text(f"""
WITH written AS (
    INSERT INTO pillarbox_inbox ({_COLUMNS})
    SELECT CAST(:consumer AS bigint), CAST(:tenant AS text), t.event_id, t.schema_version, t.digest
    FROM unnest(CAST(:event_ids AS uuid[]), CAST(:versions AS integer[]), CAST(:digests AS bytea[]))
         AS t(event_id, schema_version, digest)
    ORDER BY t.event_id
    ON CONFLICT DO NOTHING RETURNING event_id
)
SELECT count(*), CASE WHEN count(*) < CAST(:count AS bigint) THEN array_agg(event_id) END FROM written
""")  # noqa: S608  constants
_INSERT_JSON = text(f"""
INSERT INTO pillarbox_inbox ({_COLUMNS})
SELECT :consumer, :tenant, json_extract(t.value, '$[0]'), json_extract(t.value, '$[1]'),
       substr(:digests, 1 + 16 * t.key, 16)
FROM json_each(:rows) AS t WHERE true
ON CONFLICT DO NOTHING RETURNING event_id
""")  # noqa: S608  constants
# One row at a time, by the whole key: whatever PostgreSQL believes of the table, the primary key is the best way then.
_STORED_ARRAY = text("""
SELECT i.event_id, i.schema_version, i.digest
FROM unnest(CAST(:event_ids AS uuid[])) AS t(event_id)
CROSS JOIN LATERAL (
    SELECT i.event_id, i.schema_version, i.digest FROM pillarbox_inbox i
    WHERE i.consumer = :consumer AND i.tenant = :tenant AND i.event_id = t.event_id
    LIMIT 1
) i
""")
_STORED_JSON = text("""
SELECT event_id, schema_version, digest FROM pillarbox_inbox
WHERE consumer = :consumer AND tenant = :tenant AND event_id IN (SELECT value FROM json_each(:event_ids))
""")


# -- MariaDB and MySQL -------------------------------------------------------------------------------------------------


def _write_mysql(connection: Connection, place: Mapping[str, Any], arrivals: Sequence[Arrival]) -> dict[UUID, Seen]:
    """Insert what is new; what was there before comes back. MySQL cannot say which rows of a statement it has left out,
    so it must refuse all of them; it then takes back what the statement has done.
    """
    left = sorted(arrivals, key=lambda arrival: arrival.event_id.int)
    seen: dict[UUID, Seen] = {}
    current = False
    while left:
        try:
            _insert_mysql(connection, place, left)
        except IntegrityError as error:
            if _number(error) != _MYSQL_DUPLICATE:
                raise
        else:
            break
        found = _stored_mysql(connection, place, left, current=current)
        # An older snapshot may not show what has refused us. A locking read does, but it locks gaps, too, into which
        # others want to insert: only if the plain one has found nothing.
        current = not found
        seen |= found
        left = [arrival for arrival in left if arrival.event_id not in found]
    return seen


def _insert_mysql(connection: Connection, place: Mapping[str, Any], arrivals: Sequence[Arrival]) -> None:
    as_stored: Any = inbox.c.event_id.type.dialect_impl(connection.dialect).bind_processor(connection.dialect)
    consumer, tenant = place["consumer"], place["tenant"].encode()
    values: list[Any] = []
    for arrival in arrivals:
        event_id = arrival.event_id if as_stored is None else as_stored(arrival.event_id)
        values += (consumer, tenant, event_id, arrival.schema_version, arrival.digest)
    rows = ", ".join(["(%s, %s, %s, %s, %s)"] * len(arrivals))
    connection.exec_driver_sql(f"INSERT INTO pillarbox_inbox ({_COLUMNS}) VALUES {rows}", tuple(values))  # noqa: S608


def _stored_mysql(
    connection: Connection, place: Mapping[str, Any], arrivals: Sequence[Arrival], *, current: bool
) -> dict[UUID, Seen]:
    stored = select(inbox.c.event_id, inbox.c.schema_version, inbox.c.digest).where(
        inbox.c.consumer == place["consumer"],
        inbox.c.tenant == place["tenant"],
        inbox.c.event_id.in_([arrival.event_id for arrival in arrivals]),
    )
    return _seen(connection.execute(stored.with_for_update(read=True) if current else stored).all())


def _number(error: DBAPIError) -> Any:
    arguments = getattr(error.orig, "args", ())
    return arguments[0] if arguments else None


# -- pruning -----------------------------------------------------------------------------------------------------------

_OLD = "consumer = :consumer AND at < :before ORDER BY at LIMIT :limit"
# PostgreSQL goes straight to the places of the rows: by their keys it might rather walk over the whole table.
_PLACES = f"SELECT ctid FROM pillarbox_inbox WHERE at > '-infinity' AND {_OLD}"  # noqa: S608  constants
_BY_PLACE = f"ctid = ANY (ARRAY({_PLACES}))"
_BY_KEY = f"({_KEY}) IN (SELECT {_KEY} FROM pillarbox_inbox WHERE {_OLD})"  # noqa: S608  constants
_PRUNE = {
    dialect: text(f"DELETE FROM pillarbox_inbox WHERE {old}").bindparams(  # noqa: S608  constants
        bindparam("before", type_=inbox.c.at.type)
    )
    for dialect, old in (("postgresql", _BY_PLACE), ("mysql", _OLD), ("mariadb", _OLD), ("sqlite", _BY_KEY))
}


# -- consumers ---------------------------------------------------------------------------------------------------------


class ConsumerRecord(msgspec.Struct, frozen=True):
    """A consumer, and how far it has come, as its processes have said."""

    name: str
    kind: str
    """``handlers`` or ``projection``."""
    source: str
    topics: tuple[str, ...]
    generation: int
    handled: int
    """All messages that have ever taken effect, letters that were redriven included."""
    last_event_id: UUID | None
    last_occurred_at: datetime | None
    lag: float | None
    """Seconds."""
    held: int
    seen_at: datetime | None
    """When a process of it last said something."""
    updated_at: datetime
    """When it was last registered as something else, or got another generation."""


def register_consumer(connection: Connection, name: str, kind: str, source: str, topics: Sequence[str]) -> int:
    """Make a consumer known, or what has changed about it; its generation. Processes that do it at once take turns."""
    values = {"name": name, "kind": kind, "source": source, "topics": json.dumps([*topics])}
    this = consumers_table.c.id == stable_hash(name)
    with explained():
        insert_missing(connection, consumers_table, [{"id": stable_hash(name), "updated_at": from_now(), **values}])
        # As the update below would: those who hold the generation, one after the other, are not waited for.
        found = connection.execute(select(consumers_table).where(this).with_for_update(key_share=True)).one()
        if found.name != name:
            raise StoreError(f"the consumers {found.name!r} and {name!r} have the same number: rename the newer one")
        if any(found._mapping[column] != value for column, value in values.items()):
            connection.execute(update(consumers_table).where(this).values(updated_at=from_now(), **values))
    return int(found.generation)


def report_position(
    connection: Connection,
    name: str,
    *,
    handled: int,
    last_event_id: UUID | None,
    last_occurred_at: datetime | None,
    lag: float | None,
    held: int,
) -> None:
    """Say how many messages more were dealt with, and which was the last; None leaves the last one as it was."""
    table = consumers_table
    values = {
        "handled": table.c.handled + handled,
        "last_event_id": table.c.last_event_id if last_event_id is None else last_event_id,
        "last_occurred_at": table.c.last_occurred_at if last_occurred_at is None else last_occurred_at,
        "lag": lag,
        "held": held,
        "seen_at": from_now(),
    }
    connection.execute(update(table).where(table.c.id == stable_hash(name)).values(values))


def count_handled(connection: Connection, name: str, handled: int) -> None:
    """So many messages more were dealt with, elsewhere than in a process that runs the consumer."""
    table = consumers_table
    connection.execute(update(table).where(table.c.id == stable_hash(name)).values(handled=table.c.handled + handled))


def consumers(connection: Connection) -> list[ConsumerRecord]:
    """All that were ever registered, by their names."""
    with explained():
        rows = connection.execute(select(consumers_table).order_by(consumers_table.c.name)).all()
    return [_record(row) for row in rows]


def _record(row: Any) -> ConsumerRecord:
    values = {name: getattr(row, name) for name in ConsumerRecord.__struct_fields__}
    return ConsumerRecord(**{**values, "topics": tuple(json.loads(row.topics))})


def read_committed(connection: Connection) -> None:
    """Let a transaction, which has not said anything yet, see what others commit meanwhile. MySQL would show it the
    rows as they were at its first look, and lock the gaps between those that it writes.
    """
    if connection.dialect.name in ("mysql", "mariadb"):
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")


def hold_generation(connection: Connection, name: str) -> int:
    """The generation of a projection, which nobody changes before the end of this transaction. `BeingSwappedError`
    while it is being put in the place of another one.
    """
    this = select(consumers_table.c.generation).where(consumers_table.c.id == stable_hash(name))
    # Beside it, others may hold it and may write how far they have come.
    found = int(connection.execute(this.with_for_update(read=True, key_share=True)).scalar_one())
    if found < 0:
        raise BeingSwappedError(
            f"projection {name} is being swapped for its generation {-found}: in a moment it goes on; if that lasts, a "
            "rebuild has died just then, and another one mends it"
        )
    return found


def generation_of(connection: Connection, name: str) -> int:
    """The generation of a projection; below 0 if its table is being put in the place of another one, or was when
    somebody died.
    """
    this = select(consumers_table.c.generation).where(consumers_table.c.id == stable_hash(name))
    return int(connection.execute(this).scalar_one())


def set_generation(connection: Connection, name: str, generation: int) -> None:
    """Let a consumer start afresh. Waits for all who hold the generation. `StoreError` if there is no such. Below 0, it
    is the mark that the table of that generation is being put in its place, and nobody can hold it.
    """
    this = consumers_table.c.id == stable_hash(name)
    connection.execute(select(consumers_table.c.id).where(this).with_for_update())
    changed = update(consumers_table).where(this).values(generation=generation, updated_at=from_now())
    if not connection.execute(changed).rowcount:
        raise StoreError(f"there is no consumer {name!r}")
