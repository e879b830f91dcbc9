"""Archives: what leaves the outbox by retention, kept in a file or a table, and the way back.

A file is JSON lines, compressed if its name ends in ``.zst``: a line that says where it comes from, one per delivery,
and a last one with their number and the SHA-256 of all bytes before it. It is written under a name that no other run
has, brought to the disk, read back, and then gets its own, unless somebody else has taken that: a file with the right
name is whole. Only then are rows deleted, those that the file holds and no others, and the trail says how far that has
come. Whoever finds the work half done goes on with the same file.

In a table a row arrives in the transaction that deletes it from the outbox.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import secrets
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from uuid import UUID

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
    column,
    func,
    insert,
    inspect,
    null,
    select,
    table,
    text,
)

from ..errors import MissingExtraError, StoreError
from ..outbox import Delivery, Status
from .append import Appender
from .columns import ByteExact, JsonText, LongBytes, LongText, Name, Utc, now
from .retention import RowKey, alone, identities
from .schema import SCHEMA_VERSION
from .tables import audit, lanes, meta, outbox, routes

if sys.platform != "win32":
    import fcntl

FORMAT = 1
MAX_BYTES = 8_388_608
"""Of bodies that are in memory at a time, but for one that is larger."""
_Line = TypeVar("_Line", bound=msgspec.Struct)
_Row = TypeVar("_Row", RowKey, "Archived")
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_PARTIAL = re.compile(r"\..+\.jsonl(\.zst)?\.[0-9a-f]{8}\.partial")


class Archived(msgspec.Struct, omit_defaults=True):
    """A delivery as it was sent, or as it was discarded."""

    id: int
    event_id: UUID
    event_type: str
    route_id: int
    shard: int
    schema_version: int
    topic: str
    key: str
    headers: dict[str, str]
    created_at: datetime
    status: Status
    route: str | None = None
    tenant: str | None = None
    body: str | None = None
    body_base64: str | None = None
    """If the body is no UTF-8."""
    attempts: int = 0
    sent_at: datetime | None = None
    batch: int | None = None
    number: int | None = None
    last_error: str | None = None
    raised_event_id: UUID | None = None
    """The identity of the row, if an edit has sent it under another one."""

    @property
    def content(self) -> bytes:
        """The body."""
        return (self.body or "").encode() if self.body_base64 is None else base64.b64decode(self.body_base64)

    @property
    def known_as(self) -> set[str]:
        """The ids by which people know the event: that which was sent and, if it was edited, those before."""
        ids = {self.event_id, self.raised_event_id or self.event_id}
        return {*map(str, ids), self.headers.get("original_event_id", str(self.event_id))}

    @property
    def size(self) -> int:
        """How long its body is, as it is written."""
        return len(self.body or self.body_base64 or "")

    @property
    def row(self) -> RowKey:
        """How the row is found in the outbox."""
        return RowKey(self.id, self.raised_event_id or self.event_id, self.route_id, self.schema_version, 0)


class Header(msgspec.Struct):
    """The first line of a file."""

    pillarbox_archive: int
    install_id: UUID
    schema_version: int
    shards: int
    made_at: datetime


class Trailer(msgspec.Struct):
    """The last line of a file."""

    count: int
    sha256: str


class Summary(msgspec.Struct):
    """What is known of a file that is whole."""

    header: Header
    trailer: Trailer
    in_order: bool
    """Whether the rows of each lane are in the order in which they were written."""


def header(connection: Connection, made_at: datetime) -> Header:
    """Where the rows of this database come from."""
    row = connection.execute(select(meta.c.install_id, meta.c.shards)).one()
    return Header(FORMAT, row.install_id, SCHEMA_VERSION, row.shards, made_at)


# -- out of the outbox -------------------------------------------------------------------------------------------------


def portions(rows: Iterable[_Row], limit: int | None = None) -> Iterator[list[_Row]]:
    """The rows, or their keys, in portions whose bodies fit into memory; at most ``limit`` at a time."""
    portion: list[_Row] = []
    size = 0
    for row in rows:
        if portion and (len(portion) == limit or size + row.size > MAX_BYTES):
            yield portion
            portion, size = [], 0
        portion.append(row)
        size += row.size
    if portion:
        yield portion


def fetch(connection: Connection, keys: Sequence[RowKey]) -> list[Archived]:
    """The deliveries of these rows, in this order."""
    if connection.dialect.name == "postgresql":
        rows = connection.execute(_FETCH, identities(keys)).all()
    else:
        wanted = outbox.c.id.in_([key.id for key in keys])
        columns = [each for each in outbox.c if each.name not in ("route", "available_at")]
        found = select(*columns, outbox.c.route.label("route_id"), routes.c.name.label("route"))
        joined = found.outerjoin(routes, routes.c.id == outbox.c.route)
        rows = connection.execute(joined.where(wanted).order_by(outbox.c.id)).all()
    return [_archived(row._mapping) for row in rows]


def _archived(row: Mapping[Any, Any]) -> Archived:
    values = {name: row[name] for name in Archived.__struct_fields__ if name in row}
    body, headers = bytes(values.pop("body")), values.pop("headers")
    values |= {"status": Status(values["status"]), "headers": msgspec.json.decode(headers, type=dict[str, str])}
    try:
        return Archived(**values, body=body.decode())
    except UnicodeDecodeError:
        return Archived(**values, body_base64=base64.b64encode(body).decode())


# The view knows what became of a row of a log, and an edit is what was sent.
_FETCH = text(
    """
    SELECT o.id, coalesce(f.event_id, o.event_id) AS event_id, o.event_type, o.route AS route_id, r.name AS route,
           o.shard, o.schema_version, o.topic, o.key, o.tenant, CAST(coalesce(f.headers, o.headers) AS text) AS headers,
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
        SELECT v.status, v.attempts, v.sent_at, v.batch, v.last_error FROM outbox_events v
        WHERE v.raised_event_id = o.event_id AND v.id = o.id LIMIT 1
    ) v
    ORDER BY w.place
    """
)


# -- files -------------------------------------------------------------------------------------------------------------


class Writer:
    """A file in the making. It has its name when `finish` has returned, and not before. `StoreError` if the disk does
    not take it.
    """

    def __init__(self, path: Path, header: Header) -> None:
        compressor = _zstandard().ZstdCompressor() if path.suffix == ".zst" else None
        self.path, self.count = path, 0
        self._partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        self._digest = hashlib.sha256()
        self._files = ExitStack()
        _tidy(path.parent)
        with self._writing():
            opened = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # bodies may be personal
        self._file = self._files.enter_context(os.fdopen(opened, "wb"))
        with suppress(OSError):  # where there are no locks nobody tidies up, either
            _lock(self._file)
        self._out: Any = self._file if compressor is None else compressor.stream_writer(self._file, closefd=False)
        self._write(header)

    def add(self, rows: Sequence[Archived]) -> None:
        """Write these deliveries."""
        with self._writing():
            for row in rows:
                self._write(row)
        self.count += len(rows)

    def close(self) -> Summary:
        """Bring it to the disk, and read it back."""
        trailer = Trailer(self.count, self._digest.hexdigest())
        with self._writing():
            self._write(trailer)
            if self._out is not self._file:
                self._out.close()
            self._file.flush()
            os.fsync(self._file.fileno())
        found = verify(self._partial, compressed=self.path.suffix == ".zst")
        if found.trailer != trailer:
            raise StoreError(f"{self._partial} is not what was written: see the disk")
        return found

    def finish(self) -> bool:
        """Give the file its name. False if another one has it by now."""
        with self._writing():
            try:
                os.link(self._partial, self.path)  # a rename would replace what is there
            except FileExistsError:
                return False
            self._partial.unlink()
            self._files.close()
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        return True

    def discard(self) -> None:
        """Leave nothing behind."""
        with suppress(OSError):  # what the disk has not taken yet
            self._files.close()
        with self._writing():
            self._partial.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _write(self, line: msgspec.Struct) -> None:
        data = msgspec.json.encode(line) + b"\n"
        if not isinstance(line, Trailer):
            self._digest.update(data)
        self._out.write(data)


def _tidy(folder: Path) -> None:
    """Remove what runs that were killed have left in the folder. One that lives holds a lock."""
    for path in folder.glob(".*.partial"):
        if _PARTIAL.fullmatch(path.name):
            with suppress(OSError), path.open("rb") as file:
                _lock(file)
                path.unlink()


def _lock(file: BinaryIO) -> None:
    """Until it is closed, at the latest by the end of the process. `OSError` if somebody else has the lock."""
    if sys.platform != "win32":  # where a file that is open cannot be removed anyway
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def verify(path: Path, *, compressed: bool | None = None) -> Summary:
    """Read the whole file. `StoreError` if it is not what somebody once wrote."""
    digest, count, in_order = hashlib.sha256(), 0, True
    found, trailer, before = None, None, b""
    last: dict[tuple[int, int], int] = {}
    for line in _lines(path, compressed):
        if before:
            digest.update(before)
            if found is None:
                found = _header(path, before)
            else:
                row = _decoded(path, before, Archived)
                lane = (row.route_id, row.shard)
                in_order = in_order and last.get(lane, 0) < row.id
                last[lane] = row.id
                count += 1
        before = line
    if found is not None and before.endswith(b"\n"):
        with suppress(msgspec.MsgspecError):  # else it is a delivery, and more were to come
            trailer = msgspec.json.decode(before, type=Trailer)
    if found is None or trailer is None:
        raise _damaged(path, "its end is missing")
    if (trailer.count, trailer.sha256) != (count, digest.hexdigest()):
        raise _damaged(
            path, f"it says {trailer.count:,} deliveries with another checksum than the {count:,} in it have"
        )
    return Summary(found, trailer, in_order)


def read(path: Path) -> Iterator[Archived]:
    """The deliveries of a file that is whole."""
    before = b""
    for number, line in enumerate(_lines(path)):
        if number > 1:
            yield _decoded(path, before, Archived)
        before = line


def read_in_order(path: Path, summary: Summary) -> Iterator[Archived]:
    """The deliveries of a file that is whole, in the order in which they were written to the outbox."""
    if summary.in_order:
        yield from read(path)
        return
    spool = sqlite3.connect("")  # on the disk, if it is large, and gone when it is closed
    try:
        spool.execute("CREATE TABLE spool (id INTEGER, line BLOB)")
        spool.executemany("INSERT INTO spool VALUES (?, ?)", ((row.id, msgspec.json.encode(row)) for row in read(path)))
        for (line,) in spool.execute("SELECT line FROM spool ORDER BY id"):
            yield _decoded(path, line, Archived)
    finally:
        spool.close()


def _header(path: Path, line: bytes) -> Header:
    try:
        said = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError:
        said = {}
    number = said.get("pillarbox_archive")
    if not isinstance(number, int):
        raise StoreError(f"{path} is no archive of Pillarbox")
    if number > FORMAT or said.get("schema_version", 0) > SCHEMA_VERSION:
        raise StoreError(f"{path} was written by a newer release: upgrade pillarbox to read it")
    return _decoded(path, line, Header)


def _decoded(path: Path, line: bytes, kind: type[_Line]) -> _Line:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(f"{path} is damaged: {why}; take another copy of it")


def _lines(path: Path, compressed: bool | None = None) -> Iterator[bytes]:
    if compressed is None:
        compressed = path.suffix == ".zst"
    try:
        with path.open("rb") as file, _plain(file, compressed) as stream:
            yield from stream
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:
        if compressed and isinstance(error, _zstandard().ZstdError):
            raise _damaged(path, str(error)) from error
        raise


@contextmanager
def _plain(file: BinaryIO, compressed: bool) -> Iterator[BinaryIO]:
    if not compressed:
        yield file
        return
    with io.BufferedReader(_zstandard().ZstdDecompressor().stream_reader(file, closefd=False)) as stream:
        yield stream


def _zstandard() -> Any:
    try:
        import zstandard  # noqa: PLC0415  an extra
    except ModuleNotFoundError as error:
        raise MissingExtraError("a file that ends in .zst", extra="archive") from error
    return zstandard


# -- how far it has come -----------------------------------------------------------------------------------------------


class Unfinished(msgspec.Struct):
    """An archive whose rows are not all deleted: the row of the trail about it."""

    entry: int
    target: str
    sha256: str
    count: int


def unfinished(connection: Connection) -> list[Unfinished]:
    """Files that were written, and whose rows are still in the outbox. A later run with the same name counts alone,
    unless it was withdrawn: then the file is that of another run.
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
    """The last row of the trail about an archive. A newer one, when a file is whole, may be about the same rows."""
    return connection.scalar(select(func.max(audit.c.id)).where(audit.c.action == "archive")) or 0


# -- tables ------------------------------------------------------------------------------------------------------------


def archive_table(connection: Connection, name: str) -> Table:
    """The table of this name, which need not be there. `StoreError` if it is another kind of table."""
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
    """Write these deliveries into the table."""
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
        Column("headers", JsonText, nullable=False),
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


# -- back --------------------------------------------------------------------------------------------------------------


def check_origin(connection: Connection, summary: Summary, *, foreign: bool) -> None:
    """`StoreError` if the file is from elsewhere, and nobody said that it may be."""
    here = connection.execute(select(meta.c.install_id, meta.c.shards)).one()
    if summary.header.install_id != here.install_id and not foreign:
        raise StoreError("the archive is from another installation: say --foreign if that is what you want")
    if summary.header.shards != here.shards:
        raise StoreError(
            f"the archive is from an outbox with {summary.header.shards} shards, and this one has {here.shards}"
        )


def absent(connection: Connection, rows: Sequence[Archived]) -> list[Archived]:
    """Those of the deliveries that are not in the outbox."""
    ids = [row.event_id for row in rows]
    identity = (outbox.c.event_id, outbox.c.route, outbox.c.schema_version)
    there: set[tuple[Any, ...]] = {
        tuple(row) for row in connection.execute(select(*identity).where(identity[0].in_(ids)))
    }
    if connection.dialect.name == "postgresql":
        edited = connection.execute(_EDITED, {"events": [str(each) for each in ids]}).all()
        there |= {(event, route, row.schema_version) for event, route in edited for row in rows}
    found = []
    for row in rows:
        key = (row.event_id, row.route_id, row.schema_version)
        if key not in there:
            found.append(row)
            there.add(key)
    return found


_EDITED = text("SELECT f.event_id, f.route FROM pillarbox_failures f WHERE f.event_id = ANY (CAST(:events AS uuid[]))")


def restore(connection: Connection, rows: Sequence[Archived], *, resend: bool) -> int:
    """Bring back those that are not in the outbox: as the history that they are, or to be sent again. How many.

    History is never looked at by a relay: its status says that it is at its end, and in a log it has no transaction.
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
    names = [each.name for each in outbox.c if each.name not in ("id", "route", "available_at", "headers", "body")]
    columns = [column(each.name, each.type) for each in outbox.c if each.name != "id"]
    statement = insert(table("pillarbox_outbox", *columns, column("xid")))
    if connection.dialect.name == "postgresql":
        statement = statement.values(xid=null())
    values = [
        {name: getattr(row, name) for name in names}
        | {"route": row.route_id, "headers": msgspec.json.encode(row.headers).decode(), "body": row.content}
        | {"status": row.status.value, "available_at": None}
        for row in missing
    ]
    connection.execute(statement, values)
    return len(missing)


def _check_lanes(connection: Connection, rows: Sequence[Archived]) -> None:
    asked = {(row.route_id, row.shard): row.route for row in rows}
    known = {tuple(row) for row in connection.execute(select(lanes.c.route, lanes.c.shard))}
    if unknown := sorted({repr(name) for lane, name in asked.items() if lane not in known}):
        raise StoreError(f"nobody has ever written for route {', '.join(unknown)} here, so no relay would send it")
