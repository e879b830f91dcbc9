"""Decoder for PostgreSQL's output plugin ``pgoutput``, as far as an outbox needs it: inserts into one table.

All other messages are skipped. One of these is `pg_logical_emit_message(false, ...)`, which is delivered even if its
transaction rolls back.
"""

from __future__ import annotations

import struct
from collections.abc import Container
from typing import NamedTuple

from ..errors import StoreError
from ..outbox import LaneName

COLUMNS = ("id", "event_id", "route", "shard", "topic", "key", "tenant", "headers", "body", "xid")
"""The required columns. Where the server supports it, the publication leaves out the others."""

_INSERT, _RELATION = b"IR"
_BINARY, _NULL = b"bn"
_TABLE = struct.Struct(">I")
_INSERTED = struct.Struct(">IcH")
_SIZE = struct.Struct(">I")
_ID = struct.Struct(">q")


class Streamed(NamedTuple):
    """A streamed row with undecoded values: most are decoded only when they are used."""

    id: int
    xid: int
    lane: LaneName
    event_id: bytes
    topic: bytes
    key: bytes
    tenant: bytes | None
    headers: bytes
    body: bytes

    def values(self) -> tuple[str, str, str, str | None, str, bytes]:
        """Event id, topic, key, tenant, headers and body, as a statement returns them."""
        tenant = None if self.tenant is None else self.tenant.decode()
        headers = self.headers.decode()
        digits = self.event_id.hex()
        event = f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
        return event, self.topic.decode(), self.key.decode(), tenant, headers, self.body


class Decoder:
    """Decodes the messages of one stream in their order: the server describes a table once, before its first row."""

    def __init__(self, table: int, skip: Container[int] = ()) -> None:
        self._table = table
        """The table's oid: another schema may have a table of the same name."""
        self._skip = skip
        self._wanted: tuple[int, ...] = ()

    def row(self, message: memoryview) -> Streamed | None:
        """The row of an insert into the outbox, if it has a transaction. Rows in ``skip`` are not decoded."""
        kind = message[0]
        if kind == _INSERT:
            return self._inserted(message)
        if kind == _RELATION and _TABLE.unpack_from(message, 1)[0] == self._table:
            self._describe(bytes(message))
        return None

    def _describe(self, message: bytes) -> None:
        at = message.index(0, message.index(0, 5) + 1) + 2  # schema, name, replica identity
        count = int.from_bytes(message[at : at + 2])
        at += 2
        names = []
        for _ in range(count):
            end = message.index(0, at + 1)  # after its flags
            names.append(message[at + 1 : end].decode())
            at = end + 9  # type and modifier
        if missing := [name for name in COLUMNS if name not in names]:
            raise StoreError(f"the publication leaves out {', '.join(missing)} of pillarbox_outbox")
        self._wanted = tuple(names.index(name) for name in COLUMNS)

    def _inserted(self, message: memoryview) -> Streamed | None:
        table, _, count = _INSERTED.unpack_from(message, 1)
        if table != self._table:
            return None
        if self._wanted[0] == 0 and _ID.unpack_from(message, 13)[0] in self._skip:
            return None
        data, at, found = message.tobytes(), 8, list[bytes | None]()
        for _ in range(count):
            kind = data[at]
            if kind == _BINARY:
                start = at + 5
                at = start + _SIZE.unpack_from(data, at + 1)[0]
                found.append(data[start:at])
            elif kind == _NULL:
                at += 1
                found.append(None)
            else:
                raise StoreError(f"the stream brings a value as {chr(kind)!r}, and binary was asked for")
        row, event_id, route, shard, topic, key, tenant, headers, body, xid = [found[index] for index in self._wanted]
        if xid is None or row is None or route is None or shard is None:
            return None  # written before the log existed
        lane = LaneName(int.from_bytes(route, signed=True), int.from_bytes(shard, signed=True))
        values = (event_id or b"", topic or b"", key or b"", tenant, headers or b"", body or b"")
        return Streamed(int.from_bytes(row), int.from_bytes(xid), lane, *values)
