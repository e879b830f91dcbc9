"""Archive files: JSON lines, compressed if the name ends in ``.zst``.

The first line describes the source, one line follows per delivery, and the last line has their number and the SHA-256
of all bytes before it. A file is written under a name of its own run, synced to disk, read back, and then linked to its
final name unless that exists. So a file with the final name is complete.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import secrets
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from uuid import UUID

import msgspec

from ..errors import MissingExtraError, StoreError
from ..outbox import Status
from .retention import RowKey
from .schema import SCHEMA_VERSION

if sys.platform != "win32":
    import fcntl

FORMAT = 1
MAX_BYTES = 8_388_608
"""Most bytes of bodies in memory at a time; a larger single body may exceed it."""
_Line = TypeVar("_Line", bound=msgspec.Struct)
_Row = TypeVar("_Row", RowKey, "Archived")
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
    """If the body is not UTF-8."""
    attempts: int = 0
    sent_at: datetime | None = None
    batch: int | None = None
    number: int | None = None
    last_error: str | None = None
    raised_event_id: UUID | None = None
    """The event id of the row, if an edit was sent under another one."""

    @property
    def content(self) -> bytes:
        """The body."""
        return (self.body or "").encode() if self.body_base64 is None else base64.b64decode(self.body_base64)

    @property
    def known_as(self) -> set[str]:
        """All ids of the event: the sent one and, if it was edited, the earlier ones."""
        ids = {self.event_id, self.raised_event_id or self.event_id}
        return {*map(str, ids), self.headers.get("original_event_id", str(self.event_id))}

    @property
    def size(self) -> int:
        """Length of the body as written."""
        return len(self.body or self.body_base64 or "")

    @property
    def row(self) -> RowKey:
        """The key of the row in the outbox."""
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
    """Facts about a complete file."""

    header: Header
    trailer: Trailer
    in_order: bool
    """Whether the rows of each lane are in the order in which they were written."""


def portions(rows: Iterable[_Row], limit: int | None = None) -> Iterator[list[_Row]]:
    """Split rows, or their keys, into portions whose bodies fit into memory, of at most ``limit`` each."""
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


# -- writing ---------------------------------------------------------------------------------------------------------


class Writer:
    """A file being written. It gets its name in `finish`. Raises `StoreError` if the disk refuses it."""

    def __init__(self, path: Path, header: Header) -> None:
        compressor = _zstandard().ZstdCompressor() if path.suffix == ".zst" else None
        self.path, self.count = path, 0
        self._partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        self._digest = hashlib.sha256()
        self._files = ExitStack()
        _tidy(path.parent)
        with self._writing():
            opened = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # bodies may be personal data
        self._file = self._files.enter_context(os.fdopen(opened, "wb"))
        with suppress(OSError):  # without locks, `_tidy` removes nothing either
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
        """Sync the file to disk, and read it back."""
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
        """Give the file its name. Returns False if another file has it by now."""
        with self._writing():
            try:
                os.link(self._partial, self.path)  # a rename would replace an existing file
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
        """Remove the unfinished file."""
        with suppress(OSError):  # bytes that the disk did not accept
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
    """Remove files of killed runs from the folder. A live run holds a lock."""
    for path in folder.glob(".*.partial"):
        if _PARTIAL.fullmatch(path.name):
            with suppress(OSError), path.open("rb") as file:
                _lock(file)
                path.unlink()


def _lock(file: BinaryIO) -> None:
    """Lock the file until it is closed or the process ends. Raises `OSError` if another process has the lock."""
    if sys.platform != "win32":  # where an open file cannot be removed anyway
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# -- reading ---------------------------------------------------------------------------------------------------------


def verify(path: Path, *, compressed: bool | None = None) -> Summary:
    """Read the whole file. Raises `StoreError` if it is incomplete or altered."""
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
        with suppress(msgspec.MsgspecError):  # otherwise it is a delivery, and the file is incomplete
            trailer = msgspec.json.decode(before, type=Trailer)
    if found is None or trailer is None:
        raise _damaged(path, "its end is missing")
    if (trailer.count, trailer.sha256) != (count, digest.hexdigest()):
        raise _damaged(
            path, f"it says {trailer.count:,} deliveries with another checksum than the {count:,} in it have"
        )
    return Summary(found, trailer, in_order)


def read(path: Path) -> Iterator[Archived]:
    """The deliveries of a complete file."""
    before = b""
    for number, line in enumerate(_lines(path)):
        if number > 1:
            yield _decoded(path, before, Archived)
        before = line


def read_in_order(path: Path, summary: Summary) -> Iterator[Archived]:
    """The deliveries of a complete file, in the order in which they were written to the outbox."""
    if summary.in_order:
        yield from read(path)
        return
    spool = sqlite3.connect("")  # a temporary database, on disk if it is large
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
