"""The inbox on a relational database, and the table of those who have one.

The rows are inserted before anything is asked: whoever asks first and inserts afterwards lets the same message through
twice. What was refused as a duplicate is read afterwards, to be compared, and the gates are asked for again, by a new
statement. Rows go in sorted by their event ids, so that two batches with the same messages wait for each other, and
never each for the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection, and_, bindparam, delete, func, insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from ..errors import StoreError
from ..inbox import Admission, Admitted, Arrival, Claim, Spill, consumer_id
from .append import explain, explained, insert_missing
from .claims import is_claimed
from .columns import from_now
from .tables import claims as claims_table
from .tables import consumers as consumers_table
from .tables import inbox

_Lines = Callable[[], Collection[int]]
Seen = tuple[int, bytes]
"""Schema version and digest of what was dealt with."""

_MYSQL_DUPLICATE = 1062
_LIVES_KEPT = 100


class SqlInbox:
    """`Inbox` on PostgreSQL, MariaDB/MySQL and SQLite."""

    def admit(
        self,
        connection: Connection,
        consumer: int,
        tenant: str | None,
        arrivals: Sequence[Arrival],
        *,
        claims: int = 0,
        lines: _Lines = tuple,
    ) -> Admitted:
        first: dict[UUID, Arrival] = {}
        for arrival in arrivals:
            first.setdefault(arrival.event_id, arrival)
        if not first:
            return Admitted(())
        place = {"consumer": consumer, "tenant": tenant or "", "claims": claims}
        try:
            seen, gated = _write(connection, place, [*first.values()], lines)
        except DBAPIError as error:
            explain(error)
            raise
        if not seen and len(first) == len(arrivals):
            return Admitted([Admission.NEW] * len(arrivals), gated)
        return Admitted(admissions(seen, arrivals), gated)

    def spill(self, connection: Connection, claims: int, tenant: str | None, spills: Sequence[Spill]) -> None:
        rows = [
            {
                "consumer": claims,
                "line": spill.claim.line,
                "inbox_id": spill.claim.inbox_id,
                "tenant": tenant or "",
                "delivery": spill.delivery,
                "gate": spill.gate,
                "refused": spill.refused,
            }
            for spill in sorted(spills, key=lambda spill: (spill.claim.line, spill.claim.inbox_id.int))
        ]
        with explained():
            connection.execute(insert(claims_table), rows)

    def redeem(self, connection: Connection, claims: int, claim: Claim) -> tuple[bool, str | None]:
        this = and_(
            claims_table.c.consumer == claims,
            claims_table.c.line == claim.line,
            claims_table.c.inbox_id == claim.inbox_id,
        )
        found = connection.execute(select(claims_table.c.refused).where(this).with_for_update(nowait=True)).first()
        if found is None:
            return False, None
        connection.execute(delete(claims_table).where(this))
        return True, found.refused

    def count_claims(self, connection: Connection, claims: int, limit: int) -> int:
        some = select(claims_table.c.line).where(claims_table.c.consumer == claims).limit(limit)
        return connection.scalar(select(func.count()).select_from(some.subquery())) or 0

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
        elif before[0] == this[0] and before[1] != this[1]:
            answers.append(Admission.ALTERED)
        else:
            answers.append(Admission.DUPLICATE)
    return answers


_Place = Mapping[str, Any]
"""The numbers of the consumer, for its inbox and its claims, and the tenant."""
_Seen = dict[UUID, Seen]
_Rows = Sequence[Any]
_KEY = "consumer, tenant, event_id"
_COLUMNS = f"{_KEY}, schema_version, digest"


def _write(
    connection: Connection, place: _Place, arrivals: Sequence[Arrival], lines: _Lines
) -> tuple[_Seen, Collection[int]]:
    """Insert what is new; what was there before, and the lines that are gated."""
    seen, may_be_gated = _INSERT[connection.dialect.name](connection, place, arrivals)
    # Who refused a row may have committed after our statement began, and a claim with it: only a new one sees that.
    wanted = [*lines()] if seen or may_be_gated else ()
    if not wanted:
        return seen, ()
    asked = {**place, "lines": wanted}
    if connection.dialect.name == "postgresql":
        return seen, connection.execute(_GATED_ARRAY, asked).scalar_one()
    return seen, connection.scalars(_GATED, asked).all()


_GATED = text("""
SELECT DISTINCT line FROM pillarbox_claims WHERE consumer = :claims AND line IN :lines AND gate
""").bindparams(bindparam("lines", expanding=True))
# A line may have many claims, and few that gate: an index has only those.
_GATED_ARRAY = text("""
SELECT ARRAY(SELECT l.line FROM unnest(CAST(:lines AS bigint[])) AS l(line)
             WHERE (SELECT c.gate FROM pillarbox_claims c
                    WHERE c.consumer = CAST(:claims AS bigint) AND c.line = l.line AND c.gate LIMIT 1))
""")


def _insert_postgres(connection: Connection, place: _Place, arrivals: Sequence[Arrival]) -> tuple[_Seen, bool]:
    """Insert what is new, and ask whether there is any gate, in one statement; what was there before."""
    arrays = {
        "event_ids": [arrival.event_id for arrival in arrivals],
        "versions": [arrival.schema_version for arrival in arrivals],
        "digests": [arrival.digest for arrival in arrivals],
    }
    number, new, has_gates = connection.execute(_INSERT_ARRAYS, {**place, **arrays, "count": len(arrivals)}).one()
    if number == len(arrivals):
        return {}, bool(has_gates)
    refused = _without(arrivals, {*(new or ())})
    asked = {**place, "event_ids": [arrival.event_id for arrival in refused]}
    return _or_pruned(connection.execute(_STORED_ARRAY, asked).all(), refused), True


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
SELECT count(*), CASE WHEN count(*) < CAST(:count AS bigint) THEN array_agg(event_id) END,
       (SELECT c.gate FROM pillarbox_claims c WHERE c.consumer = CAST(:claims AS bigint) AND c.gate
        ORDER BY c.line LIMIT 1)
FROM written
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


def _insert_sqlite(connection: Connection, place: _Place, arrivals: Sequence[Arrival]) -> tuple[_Seen, bool]:
    """The same. JSON has no bytes: the digests, which are all of one length, come as one value."""
    rows = json.dumps([(arrival.event_id.hex, arrival.schema_version) for arrival in arrivals])
    digests = b"".join(arrival.digest for arrival in arrivals)
    new = {UUID(found) for found in connection.scalars(_INSERT_JSON, {**place, "rows": rows, "digests": digests})}
    if refused := _without(arrivals, new):
        return _or_pruned(_stored(connection, place, refused), refused), True
    has_claims = place["claims"] != 0
    return {}, has_claims and connection.scalar(_HAS_GATES, place) is not None


_INSERT_JSON = text(f"""
INSERT INTO pillarbox_inbox ({_COLUMNS})
SELECT :consumer, :tenant, json_extract(t.value, '$[0]'), json_extract(t.value, '$[1]'),
       substr(:digests, 1 + 16 * t.key, 16)
FROM json_each(:rows) AS t WHERE true
ON CONFLICT DO NOTHING RETURNING event_id
""")  # noqa: S608  constants
_HAS_GATES = text("SELECT line FROM pillarbox_claims WHERE consumer = :claims AND gate LIMIT 1")


def _insert_mysql(connection: Connection, place: _Place, arrivals: Sequence[Arrival]) -> tuple[_Seen, bool]:
    """Insert what is new. MySQL cannot say which rows of a statement it has left out, so it must refuse all of them; it
    then takes back what the statement has done. Nor has it an index of gates alone: there may be some.
    """
    left = sorted(arrivals, key=lambda arrival: arrival.event_id.int)
    seen: _Seen = {}
    current = False
    while left:
        try:
            _insert_values(connection, place, left)
        except IntegrityError as error:
            if error.orig is None or error.orig.args[0] != _MYSQL_DUPLICATE:
                raise
        else:
            break
        found = {row.event_id: _as_seen(row) for row in _stored(connection, place, left, current=current)}
        # An older snapshot may not show what has refused us. A locking read does, but it locks gaps, too, into which
        # others want to insert: only if the plain one has found nothing.
        current = not found
        seen |= found
        left = _without(left, found)
    return seen, True


def _insert_values(connection: Connection, place: _Place, arrivals: Sequence[Arrival]) -> None:
    as_stored: Any = inbox.c.event_id.type.dialect_impl(connection.dialect).bind_processor(connection.dialect)
    consumer, tenant = place["consumer"], place["tenant"].encode()
    values: list[Any] = []
    for arrival in arrivals:
        event_id = arrival.event_id if as_stored is None else as_stored(arrival.event_id)
        values += (consumer, tenant, event_id, arrival.schema_version, arrival.digest)
    rows = ", ".join(["(%s, %s, %s, %s, %s)"] * len(arrivals))
    connection.exec_driver_sql(f"INSERT INTO pillarbox_inbox ({_COLUMNS}) VALUES {rows}", tuple(values))  # noqa: S608


_INSERT = {
    "postgresql": _insert_postgres,
    "sqlite": _insert_sqlite,
    "mysql": _insert_mysql,
    "mariadb": _insert_mysql,
}


def _stored(connection: Connection, place: _Place, arrivals: Sequence[Arrival], *, current: bool = False) -> _Rows:
    stored = select(inbox.c.event_id, inbox.c.schema_version, inbox.c.digest).where(
        inbox.c.consumer == place["consumer"],
        inbox.c.tenant == place["tenant"],
        inbox.c.event_id.in_([arrival.event_id for arrival in arrivals]),
    )
    return connection.execute(stored.with_for_update(read=True) if current else stored).all()


def _or_pruned(rows: _Rows, refused: Sequence[Arrival]) -> _Seen:
    """What refused these. What was pruned in between had been handled: it is taken for what has come now."""
    stored = {UUID(str(row.event_id)): _as_seen(row) for row in rows}
    return {each.event_id: stored.get(each.event_id, (each.schema_version, each.digest)) for each in refused}


def _as_seen(row: Any) -> Seen:
    return row.schema_version, bytes(row.digest)


def _without(arrivals: Sequence[Arrival], known: Container[UUID]) -> list[Arrival]:
    return [arrival for arrival in arrivals if arrival.event_id not in known]


_THESE = """
consumer = :consumer AND at < :before
AND NOT EXISTS (SELECT 1 FROM pillarbox_claims c WHERE c.inbox_id = pillarbox_inbox.event_id)
ORDER BY at LIMIT :limit
"""
_BY_KEY = f"({_KEY}) IN (SELECT {_KEY} FROM pillarbox_inbox WHERE {_THESE})"  # noqa: S608  constants
# PostgreSQL goes straight to the places of the rows: by their keys it might rather walk over the whole table.
_BY_PLACE = f"ctid = ANY (ARRAY(SELECT ctid FROM pillarbox_inbox WHERE at > '-infinity' AND {_THESE}))"  # noqa: S608
_PRUNE = {
    dialect: text(f"DELETE FROM pillarbox_inbox WHERE {rows}").bindparams(bindparam("before", type_=inbox.c.at.type))  # noqa: S608
    for dialect, rows in {"postgresql": _BY_PLACE, "sqlite": _BY_KEY, "mysql": _THESE, "mariadb": _THESE}.items()
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
    """About how many messages have ever taken effect, as processes have reported every few seconds: one that is killed
    takes with it what it has not reported."""
    last_event_id: UUID | None
    last_occurred_at: datetime | None
    lag: float | None
    """Seconds."""
    seen_at: datetime | None
    """When a process of it last said something, its start included."""
    updated_at: datetime
    """When it was last registered as something else, or got another generation."""


def register_consumer(connection: Connection, name: str, kind: str, source: str, topics: Sequence[str]) -> int:
    """Make a consumer known, or what has changed about it, and that it is seen now; its generation. Processes that do
    it at once take turns.
    """
    values: dict[str, Any] = {"name": name, "kind": kind, "source": source, "topics": json.dumps([*topics])}
    number = consumer_id(name)
    known = select(consumers_table).where(consumers_table.c.id == number)
    try:
        found = connection.execute(known).one_or_none()
    except DBAPIError as error:
        explain(error)
        raise
    if found is None or not _is_seen(connection, found, values):  # it is new, or has just been forgotten
        insert_missing(connection, consumers_table, [{"id": number, "updated_at": from_now(), **values}])
        found = connection.execute(known.with_for_update(key_share=True)).one()  # another process's, it may be
        _is_seen(connection, found, values)
    return int(found.generation)


def _is_seen(connection: Connection, found: Any, values: Mapping[str, Any]) -> bool:
    """Note that a consumer is seen, and what has changed about it; whether it is still there."""
    if found.name != values["name"]:
        raise StoreError(
            f"the consumers {found.name!r} and {values['name']!r} have the same number: rename the newer one"
        )
    noted = {"seen_at": from_now(), **values}
    if any(found._mapping[column] != value for column, value in values.items()):
        noted["updated_at"] = from_now()
    # Those who hold the generation, one after the other, are not waited for.
    this = consumers_table.c.id == found.id
    return bool(connection.execute(update(consumers_table).where(this).values(noted)).rowcount)


def begin_life(connection: Connection, name: str, life: str, has_died: Callable[[str], bool]) -> bool:
    """Note that a process runs the consumer. Whether others have died that were noted; they no longer are."""
    with _lives(connection, name) as lives:
        alive = [each for each in lives if not has_died(each)]
        died = len(alive) < len(lives)
        lives[:] = [*alive, life][-_LIVES_KEPT:]
    return died


def end_life(connection: Connection, name: str, life: str) -> None:
    """It does so no longer."""
    with _lives(connection, name) as lives:
        if life in lives:
            lives.remove(life)  # once: it may run the consumer in another box, too


@contextmanager
def _lives(connection: Connection, name: str) -> Iterator[list[str]]:
    """Those that are noted; what the block makes of them is noted."""
    this = consumers_table.c.id == consumer_id(name)
    noted = connection.execute(select(consumers_table.c.running).where(this).with_for_update(key_share=True)).scalar()
    lives: list[str] = json.loads(noted) if noted else []
    yield lives
    connection.execute(update(consumers_table).where(this).values(running=json.dumps(lives)))


def report_position(
    connection: Connection,
    name: str,
    *,
    handled: int,
    last_event_id: UUID | None,
    last_occurred_at: datetime | None,
    lag: float | None,
) -> None:
    """Say how many messages more were dealt with, and which was the last; None leaves the last one as it was."""
    table = consumers_table
    values = {
        "handled": table.c.handled + handled,
        "last_event_id": table.c.last_event_id if last_event_id is None else last_event_id,
        "last_occurred_at": table.c.last_occurred_at if last_occurred_at is None else last_occurred_at,
        "lag": lag,
        "seen_at": from_now(),
    }
    connection.execute(update(table).where(table.c.id == consumer_id(name)).values(values))


def count_settled(connection: Connection, consumer: ConsumerRecord) -> int:
    """How many messages the inbox remembers that do not wait: they have taken effect, or a person has discarded them.
    Reads all of it. What could not be read is left out: once it can, the inbox knows its event, too.
    """
    number = consumer_id(consumer.name, consumer.generation)
    known = select(func.count()).select_from(inbox).where(inbox.c.consumer == number, inbox.c.schema_version > 0)
    return connection.scalar(known.where(~is_claimed(consumer.name, inbox))) or 0


class Known(NamedTuple):
    """A message that the inbox of a consumer knows, and that does not wait."""

    consumer: str
    tenant: str | None
    at: datetime
    """When it came in."""


def dealt_with(connection: Connection, event_id: UUID) -> list[Known]:
    """The consumers that have dealt with an event, as far as their inboxes remember. What was left out by a rebuild had
    no effect.
    """
    found = []
    for it in consumers(connection):
        number = consumer_id(it.name, it.generation)
        asked = {"consumer": number, "claims": consumer_id(it.name), "event_id": event_id}
        found += [Known(it.name, row.tenant or None, row.at) for row in connection.execute(_DEALT_WITH, asked)]
    return found


# There is no index of events alone: from one tenant to the next by the primary key, and then straight to the event.
_NEXT = "SELECT i.tenant FROM pillarbox_inbox i WHERE i.consumer = :consumer {0} ORDER BY i.tenant LIMIT 1"
_DEALT_WITH = (
    text(f"""
WITH RECURSIVE t (tenant) AS (
    SELECT ({_NEXT.format("")})
    UNION ALL
    SELECT ({_NEXT.format("AND i.tenant > t.tenant")}) FROM t WHERE t.tenant IS NOT NULL
)
SELECT i.tenant, i.at FROM t JOIN pillarbox_inbox i ON i.tenant = t.tenant
WHERE i.consumer = :consumer AND i.event_id = :event_id AND i.schema_version > 0 AND NOT EXISTS (
    SELECT 1 FROM pillarbox_claims c
    WHERE c.consumer = :claims AND c.inbox_id = i.event_id AND c.tenant = i.tenant
)
""")  # noqa: S608  constants
    .bindparams(bindparam("event_id", type_=inbox.c.event_id.type))
    .columns(inbox.c.tenant, inbox.c.at)
)


def consumers(connection: Connection) -> list[ConsumerRecord]:
    """All that were ever registered, by their names."""
    with explained():
        rows = connection.execute(select(consumers_table).order_by(consumers_table.c.name)).all()
    names = ConsumerRecord.__struct_fields__
    return [
        ConsumerRecord(**{name: row._mapping[name] for name in names} | {"topics": tuple(json.loads(row.topics))})
        for row in rows
    ]


def read_committed(connection: Connection) -> None:
    """Let a transaction, which has not said anything yet, see what others commit meanwhile. MySQL would show it the
    rows as they were at its first look, and lock the gaps between those that it writes.
    """
    if connection.dialect.name in ("mysql", "mariadb"):
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")


def hold_generation(connection: Connection, name: str) -> int:
    """The generation of a projection, which no rebuild changes before the end of this transaction."""
    this = select(consumers_table.c.generation).where(consumers_table.c.id == consumer_id(name))
    # Beside it, others may hold it and may write how far they have come.
    return int(connection.execute(this.with_for_update(read=True, key_share=True)).scalar_one())


def set_generation(connection: Connection, name: str, generation: int) -> None:
    """Let a consumer start afresh. Waits for all who hold the generation. `StoreError` if there is no such."""
    this = consumers_table.c.id == consumer_id(name)
    connection.execute(select(consumers_table.c.id).where(this).with_for_update())
    changed = update(consumers_table).where(this).values(generation=generation, updated_at=from_now())
    if not connection.execute(changed).rowcount:
        raise StoreError(f"there is no consumer {name!r}")
