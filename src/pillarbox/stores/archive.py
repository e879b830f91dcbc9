"""Archives: expired deliveries in a file or a table, and their restoration.

Rows are deleted after the file that has them is complete (`stores.archive_file`), and only these rows. The audit trail
records the progress, so that an interrupted run is continued with the same file. With a table, a row is copied in the
transaction that deletes it from the outbox.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Integer,
    MetaData,
    String,
    Table,
    Uuid,
    and_,
    case,
    column,
    func,
    insert,
    inspect,
    null,
    select,
    table,
    text,
)

from ..errors import StoreError
from ..outbox import Delivery, Status
from .append import Appender
from .archive_file import FORMAT, Archived, Header, Summary
from .columns import ByteExact, LongBytes, LongText, Name, Utc, now
from .retention import RowKey, alone, identities
from .schema import SCHEMA_VERSION
from .tables import audit, failures, lanes, meta, outbox, routes

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")


def header(connection: Connection, made_at: datetime) -> Header:
    """The header for archives of this database."""
    row = connection.execute(select(meta.c.install_id, meta.c.shards)).one()
    return Header(FORMAT, row.install_id, SCHEMA_VERSION, row.shards, made_at)


# -- out of the outbox -------------------------------------------------------------------------------------------------


def fetch(connection: Connection, keys: Sequence[RowKey]) -> list[Archived]:
    """The deliveries of these rows, in this order."""
    if connection.dialect.name == "postgresql":
        rows = connection.execute(_FETCH, identities(keys)).all()
    else:
        o, f = outbox, failures
        in_book = ("event_id", "attempts", "last_error", "headers", "body")
        found = select(
            *(each for each in o.c if each.name not in ("route", *in_book)),
            *(func.coalesce(f.c[name], o.c[name], type_=o.c[name].type).label(name) for name in in_book),
            case((f.c.event_id.is_not(None), o.c.event_id)).label("raised_event_id"),
            o.c.route.label("route_id"),
            routes.c.name.label("route"),
        )
        here = and_(f.c.route == o.c.route, f.c.shard == o.c.shard, f.c.row_id == o.c.id)
        joined = found.outerjoin(routes, routes.c.id == o.c.route).outerjoin(f, here)
        rows = connection.execute(joined.where(o.c.id.in_([key.id for key in keys])).order_by(o.c.id)).all()
    return [_archived(row._mapping) for row in rows]


def _archived(row: Mapping[Any, Any]) -> Archived:
    values = {name: row[name] for name in Archived.__struct_fields__ if name in row}
    body, headers = bytes(values.pop("body")), values.pop("headers")
    values |= {"status": Status(values["status"]), "headers": msgspec.json.decode(headers, type=dict[str, str])}
    try:
        return Archived(**values, body=body.decode())
    except UnicodeDecodeError:
        return Archived(**values, body_base64=base64.b64encode(body).decode())


# The view knows the state of a row of a log, and an edit is what was sent.
_FETCH = text(
    """
    SELECT o.id, coalesce(f.event_id, o.event_id) AS event_id, o.event_type, o.route AS route_id, r.name AS route,
           o.shard, o.schema_version, o.topic, o.key, o.tenant, coalesce(f.headers, o.headers) AS headers,
           coalesce(f.body, o.body) AS body, o.created_at, v.status, v.attempts, v.sent_at, v.batch, o.number,
           v.last_error, CASE WHEN f.event_id IS NOT NULL THEN o.event_id END AS raised_event_id
    FROM unnest(CAST(:ids AS bigint[]), CAST(:events AS uuid[]), CAST(:routes AS bigint[]),
                CAST(:versions AS integer[])) WITH ORDINALITY AS w(id, event_id, route, schema_version, place)
    CROSS JOIN LATERAL (
        SELECT o.* FROM pillarbox_outbox o
        WHERE o.event_id = w.event_id AND o.route = w.route AND o.schema_version = w.schema_version AND o.id = w.id
        LIMIT 1
    ) o
    LEFT JOIN pillarbox_routes r ON r.id = o.route
    LEFT JOIN pillarbox_failures f ON f.route = o.route AND f.shard = o.shard AND f.row_id = o.id
    CROSS JOIN LATERAL (
        SELECT v.status, v.attempts, v.sent_at, v.batch, v.last_error FROM pillarbox_outbound_events v
        WHERE v.raised_event_id = o.event_id AND v.id = o.id LIMIT 1
    ) v
    ORDER BY w.place
    """
)


# -- progress ----------------------------------------------------------------------------------------------------------


class Unfinished(msgspec.Struct):
    """An archive whose rows are not all deleted: its entry in the audit trail."""

    entry: int
    target: str
    sha256: str
    count: int


def unfinished(connection: Connection) -> list[Unfinished]:
    """Files that are complete while their rows are still in the outbox. Of several runs with the same name, the last
    counts, unless it was withdrawn: then the file is that of another run.
    """
    found: dict[str, Unfinished | None] = {}
    trail = select(audit.c.id, audit.c.target, audit.c.details).where(audit.c.action == "archive").order_by(audit.c.id)
    for entry, target, details in connection.execute(trail):
        said = json.loads(details or "{}")
        if said.get("withdrawn"):
            continue
        done = said.get("finished", True)
        found[target] = None if done else Unfinished(entry, target, said["sha256"], said["count"])
    return [it for it in found.values() if it is not None]


def latest(connection: Connection) -> int:
    """Id of the last audit entry about an archive. If it changes during a run, another run may have the same rows."""
    return connection.scalar(select(func.max(audit.c.id)).where(audit.c.action == "archive")) or 0


# -- tables ------------------------------------------------------------------------------------------------------------


def archive_table(connection: Connection, name: str) -> Table:
    """The table of this name, which may be missing. Raises `StoreError` if it is another kind of table."""
    if not _NAME.fullmatch(name):
        raise StoreError(f"{name!r} cannot be the name of an archive: use a-z, 0-9 and _")
    if name.startswith("pillarbox_") or name == "outbox_events":
        raise StoreError(f"{name} cannot be the name of an archive: it is one of the outbox's own")
    kept = _table(name)
    if inspect(connection).has_table(name):
        missing = {each.name for each in kept.c} - {each["name"] for each in inspect(connection).get_columns(name)}
        if missing:
            raise StoreError(f"table {name} is no archive of Pillarbox: it has no {', '.join(sorted(missing))}")
    return kept


def keep(connection: Connection, kept: Table, rows: Sequence[Archived]) -> None:
    """Write these deliveries to the table."""
    names = [each.name for each in kept.c if each.name not in ("body", "headers", "archived_at")]
    values = [
        {name: getattr(row, name) for name in names}
        | {"body": row.content, "headers": msgspec.json.encode(row.headers).decode(), "status": row.status.value}
        for row in rows
    ]
    connection.execute(insert(kept), values)


def _table(name: str) -> Table:
    return Table(
        name,
        MetaData(),
        Column("id", BigInteger, primary_key=True, autoincrement=False),
        Column("event_id", Uuid, primary_key=True),
        Column("route_id", BigInteger, primary_key=True, autoincrement=False),
        Column("raised_event_id", Uuid),
        Column("event_type", String(200), nullable=False),
        Column("route", Name),
        Column("shard", Integer, nullable=False),
        Column("schema_version", Integer, nullable=False),
        Column("topic", Name, nullable=False),
        Column("key", ByteExact(512), nullable=False),
        Column("tenant", ByteExact(200)),
        Column("headers", LongText, nullable=False),
        Column("body", LongBytes, nullable=False),
        Column("created_at", Utc, nullable=False),
        Column("status", String(10), nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("batch", BigInteger),
        Column("number", BigInteger),
        Column("last_error", LongText),
        Column("sent_at", Utc),
        Column("archived_at", Utc, nullable=False, server_default=now()),
        mysql_charset="utf8mb4",
    )


# -- restoration -------------------------------------------------------------------------------------------------------


def check_origin(connection: Connection, summary: Summary, *, foreign: bool) -> None:
    """Raise `StoreError` if the file is from another installation, unless ``foreign`` allows it."""
    here = connection.execute(select(meta.c.install_id, meta.c.shards)).one()
    if summary.header.install_id != here.install_id and not foreign:
        raise StoreError("the archive is from another installation: say --foreign if that is what you want")
    if summary.header.shards != here.shards:
        raise StoreError(
            f"the archive is from an outbox with {summary.header.shards} shards, and this one has {here.shards}"
        )


def absent(connection: Connection, rows: Sequence[Archived]) -> list[Archived]:
    """The given deliveries that are not in the outbox."""
    ids = [row.event_id for row in rows]
    identity = (outbox.c.event_id, outbox.c.route, outbox.c.schema_version)
    there: set[tuple[Any, ...]] = {
        tuple(row) for row in connection.execute(select(*identity).where(identity[0].in_(ids)))
    }
    edited = select(failures.c.event_id, failures.c.route).where(failures.c.event_id.in_(ids))
    there |= {(event, route, row.schema_version) for event, route in connection.execute(edited) for row in rows}
    found = []
    for row in rows:
        key = (row.event_id, row.route_id, row.schema_version)
        if key not in there:
            found.append(row)
            there.add(key)
    return found


def restore(connection: Connection, rows: Sequence[Archived], *, resend: bool) -> int:
    """Restore the deliveries that are not in the outbox, as history or to be sent again. Returns their number.

    Relays never read history: its status is final, and in a log it has no transaction.
    """
    alone(connection)
    missing = absent(connection, rows)
    if not missing:
        return 0
    if resend:
        _check_lanes(connection, missing)
        deliveries = [
            Delivery(
                event_id=row.event_id,
                event_type=row.event_type,
                route=row.route_id,
                shard=row.shard,
                schema_version=row.schema_version,
                topic=row.topic,
                key=row.key,
                tenant=row.tenant,
                headers=row.headers,
                body=row.content,
            )
            for row in missing
        ]
        Appender().append(connection, deliveries)
        return len(missing)
    names = [each.name for each in outbox.c if each.name not in ("id", "route", "headers", "body")]
    columns = [column(each.name, each.type) for each in outbox.c if each.name != "id"]
    statement = insert(table("pillarbox_outbox", *columns, column("xid")))
    if connection.dialect.name == "postgresql":
        statement = statement.values(xid=null())
    values = [
        {name: getattr(row, name) for name in names}
        | {"route": row.route_id, "headers": msgspec.json.encode(row.headers).decode(), "body": row.content}
        | {"status": row.status.value}
        for row in missing
    ]
    connection.execute(statement, values)
    return len(missing)


def _check_lanes(connection: Connection, rows: Sequence[Archived]) -> None:
    asked = {(row.route_id, row.shard): row.route for row in rows}
    known = {tuple(row) for row in connection.execute(select(lanes.c.route, lanes.c.shard))}
    if unknown := sorted({repr(name) for lane, name in asked.items() if lane not in known}):
        raise StoreError(f"nobody has ever written for route {', '.join(unknown)} here, so no relay would send it")
