"""A replication stream of PostgreSQL, over psycopg: a slot, a publication, and the streamed messages.

Everything received is confirmed at once. A stream is never read again, so the server need not keep anything for it. The
server's own position is confirmed as well, which covers the writes of other databases. A slot without a name is
temporary: it ends with its connection, so a dead relay keeps no WAL.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import errors, pq
from psycopg.conninfo import make_conninfo
from psycopg.rows import namedtuple_row
from sqlalchemy import URL

from .pgoutput import COLUMNS

PUBLICATION = "pillarbox"
PREFIX = "pillarbox"
"""Prefix of slot names, for operators, `doctor` and metrics."""

CONFIRM_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""A server that was silent this long is asked for an answer; after three times as long, it counts as lost."""
ANSWER_SECONDS = 15.0
"""Longest wait for any answer, except for a new slot."""
SLOW_SECONDS, MAKING_SECONDS = 10.0, 180.0
"""How long the creation of a slot may take before its cause is reported, and in all: the server keeps WAL meanwhile."""
SLICE = 500
"""Number of messages that are read before other tasks run."""

_DATA, _KEEPALIVE = b"wk"
_POSITION = struct.Struct(">Q")
_HEADER = 25
_CONFIRM = struct.Struct(">cQQQQ?")


class StreamRefused(Exception):  # noqa: N818  an outcome, which an operator can change
    """The server refuses a stream; the message says what to do."""


@dataclass(frozen=True)
class Facts:
    """Facts about a server on which a stream depends."""

    server: str
    """The server's start time, as reads return it."""
    version: int
    table: int
    position: str


def connection_info(url: URL, name: str) -> str:
    """Connection settings of libpq for a URL of any driver."""
    there = url.set(drivername="postgresql+psycopg")
    given: dict[str, Any] = dict(there.get_dialect()().create_connect_args(there)[1])
    if "ssl" in given:  # as asyncpg calls it
        given.setdefault("sslmode", "require" if given["ssl"] in ("true", "True") else given["ssl"])
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    options = {key: value for key, value in given.items() if key in known}
    return make_conninfo(
        **{
            "connect_timeout": 10,
            # Creating a slot may take as long as the longest transaction, so only the network can detect a lost server.
            "keepalives_idle": int(SILENT_SECONDS),
            "keepalives_interval": int(SILENT_SECONDS),
            "keepalives_count": 3,
            **({"tcp_user_timeout": int(3000 * SILENT_SECONDS)} if "tcp_user_timeout" in known else {}),
            **options,
            "application_name": f"pillarbox stream of {name}"[:63],
            "replication": "database",
            "client_encoding": "UTF8",
        }
    )


class Stream:
    """An open replication stream. Made by `open_stream`."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], facts: Facts, *, left_behind: bool = False) -> None:
        self._connection = connection
        self._pg = connection.pgconn
        self.facts = facts
        self.left_behind = left_behind
        """Whether its slot is lost at a failover although the server could copy it."""
        self.position = 0
        """Position up to which everything was received."""
        self._heard_at = 0.0
        self._confirmed_at = 0.0

    async def read(self, take: Callable[[memoryview], None], done: Callable[[], None]) -> None:
        """Pass every message to ``take``, and call ``done`` when there is no more for now. Ends only with an error."""
        loop = asyncio.get_running_loop()
        self._heard_at = self._confirmed_at = loop.time()
        with _readable(self._pg) as readable:
            while True:
                while self._take_some(take):  # some may have arrived with the answer that began the stream
                    done()
                    await asyncio.sleep(0)
                done()
                if loop.time() - self._confirmed_at > CONFIRM_SECONDS:
                    self._confirm()
                try:
                    async with asyncio.timeout(CONFIRM_SECONDS):
                        await readable.wait()
                except TimeoutError:
                    self._see_whether_it_lives()
                readable.clear()
                self._pg.consume_input()

    def _take_some(self, take: Callable[[memoryview], None]) -> bool:
        """Read some messages. Returns whether there may be more."""
        get = self._pg.get_copy_data
        for _ in range(SLICE):
            size, message = get(1)
            if size == 0:
                return False
            if size < 0:
                result = self._pg.get_result()
                said = b"" if result is None else result.error_message
                raise ConnectionError(said.decode("utf-8", "replace").strip() or "the server has ended the stream")
            self._heard_at = asyncio.get_running_loop().time()
            self.position = max(self.position, _POSITION.unpack_from(message, 1)[0])
            if message[0] == _DATA:
                take(message[_HEADER:])
            elif message[0] == _KEEPALIVE and message[17]:  # a server that shuts down waits for this answer
                self._confirm()
        return True

    def _see_whether_it_lives(self) -> None:
        silent = asyncio.get_running_loop().time() - self._heard_at
        if silent > 3 * SILENT_SECONDS:
            raise ConnectionError(f"the server has said nothing for {silent:.0f} seconds")
        if silent > SILENT_SECONDS:
            self._confirm(ask=True)

    def _confirm(self, *, ask: bool = False) -> None:
        at = self.position
        self._pg.put_copy_data(_CONFIRM.pack(b"r", at, at, at, 0, ask))
        self._pg.flush()
        self._confirmed_at = asyncio.get_running_loop().time()


@asynccontextmanager
async def open_stream(
    info: str,
    slot: str,
    *,
    keep: bool,
    may_make: Callable[[], None],
    lost: Callable[[str], None],
    waits: Callable[[int], Awaitable[str]],
) -> AsyncIterator[Stream]:
    """A stream of commits from now on. ``may_make`` is called before a permanent slot is created, and ``lost`` with the
    reason before an invalid one is replaced. While the creation of a slot takes long, ``waits`` is called with its
    process and returns the cause.
    """
    connection = await psycopg.AsyncConnection.connect(
        info, autocommit=True, prepare_threshold=None, row_factory=namedtuple_row
    )
    try:
        facts = await _examine(connection)
        await _publish(connection, facts)
        found = await _kept(connection, slot, may_make, lost) if keep else None
        if found is None:
            await _make(connection, slot, facts, waits, keep=keep)
        await _start(connection, slot, facts)
        yield Stream(connection, facts, left_behind=found is not None and found.failover == "false")
    finally:
        await connection.close()


@contextmanager
def _readable(pg: pq.abc.PGconn) -> Iterator[asyncio.Event]:
    """An event that is set whenever there is something to read. libpq closes the socket of a lost connection, and the
    next connection may get the same file descriptor: a loop that still watched the old one would not notice the new
    one.
    """
    loop, readable, number = asyncio.get_running_loop(), asyncio.Event(), pg.socket
    loop.add_reader(number, readable.set)
    try:
        yield readable
    finally:
        loop.remove_reader(number)


@asynccontextmanager
async def _answer() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            yield
    except TimeoutError as error:
        raise ConnectionError(f"the server has not answered for {ANSWER_SECONDS:.0f} seconds") from error


async def _run(connection: psycopg.AsyncConnection[Any], statement: str) -> psycopg.AsyncCursor[Any]:
    async with _answer():
        return await connection.execute(statement.encode())


async def _one(connection: psycopg.AsyncConnection[Any], statement: str) -> Any:
    return await (await _run(connection, statement)).fetchone()


_FACTS = """
    SELECT CAST(extract(epoch FROM pg_postmaster_start_time()) AS text) AS server,
           CAST(current_setting('server_version_num') AS integer) AS version,
           CAST(to_regclass('pillarbox_outbox') AS oid) AS outbox, pg_is_in_recovery() AS standby,
           current_setting('wal_level') AS wal_level,
           CASE WHEN NOT pg_is_in_recovery() THEN CAST(pg_current_wal_flush_lsn() AS text) END AS position
"""


async def _examine(connection: psycopg.AsyncConnection[Any]) -> Facts:
    found = await _one(connection, _FACTS)
    if found.standby:
        raise StreamRefused("this server is a standby: a relay, and its stream, need the primary")
    if found.wal_level != "logical":
        raise StreamRefused(
            f"wal_level is {found.wal_level}: ALTER SYSTEM SET wal_level = 'logical', and restart the server"
        )
    if found.outbox is None:
        raise StreamRefused("there is no table pillarbox_outbox: run `pillarbox migrate`")
    return Facts(found.server, found.version, found.outbox, found.position)


_PUBLICATION = """
    SELECT p.pubinsert AND p.pubviaroot AS so, p.puballtables OR t.tablename IS NOT NULL OR EXISTS (
               SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = c.oid
           ) AS there,
           to_jsonb(t) -> 'attnames' AS columns, to_jsonb(t) ->> 'rowfilter' AS some
    FROM pg_publication p CROSS JOIN pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_publication_tables t
           ON t.pubname = p.pubname AND t.schemaname = n.nspname AND t.tablename = c.relname
    WHERE p.pubname = '{}' AND c.oid = {}
"""


async def _publish(connection: psycopg.AsyncConnection[Any], facts: Facts) -> None:
    """Create or repair the publication, so that it has the required columns of the table."""
    columns = f" ({', '.join(COLUMNS)})" if facts.version >= 150_000 else ""
    table = f"TABLE pillarbox_outbox{columns}"
    for _ in range(3):  # each round repairs one defect
        state = await _one(connection, _PUBLICATION.format(PUBLICATION, facts.table))
        if state is None:
            options = "(publish = 'insert', publish_via_partition_root = true)"
            statement = f"CREATE PUBLICATION {PUBLICATION} FOR {table} WITH {options}"
        elif not state.there:
            statement = f"ALTER PUBLICATION {PUBLICATION} ADD {table}"
        elif not state.so:
            statement = f"ALTER PUBLICATION {PUBLICATION} SET (publish = 'insert', publish_via_partition_root = true)"
        elif not {*COLUMNS} <= {*(state.columns or COLUMNS)} or state.some is not None:
            drop = f"ALTER PUBLICATION {PUBLICATION} DROP TABLE pillarbox_outbox"
            statement = f"{drop}; ALTER PUBLICATION {PUBLICATION} ADD {table}"
        else:
            return
        try:
            await _run(connection, statement)
        except (errors.DuplicateObject, errors.UniqueViolation):
            pass  # another relay was faster
        except errors.InsufficientPrivilege as error:
            raise StreamRefused(f"this role may not publish the outbox: let its owner run `{statement}`") from error


async def _make(
    connection: psycopg.AsyncConnection[Any],
    slot: str,
    facts: Facts,
    waits: Callable[[int], Awaitable[str]],
    *,
    keep: bool,
) -> None:
    """Create a slot. The server waits for all open transactions, and keeps WAL for the slot from the beginning, so the
    wait is limited: disconnecting removes the slot.
    """
    options = "(SNAPSHOT 'nothing', FAILOVER true)" if keep and facts.version >= 170_000 else "NOEXPORT_SNAPSHOT"
    statement = f"CREATE_REPLICATION_SLOT {slot} {'' if keep else 'TEMPORARY '}LOGICAL pgoutput {options}"
    making = asyncio.ensure_future(connection.execute(statement.encode()))
    try:
        if not (await asyncio.wait([making], timeout=SLOW_SECONDS))[0]:
            reason = await waits(connection.info.backend_pid)
            if not (await asyncio.wait([making], timeout=MAKING_SECONDS))[0]:
                raise StreamRefused(reason)
        making.result()
    except errors.ConfigurationLimitExceeded as error:
        raise StreamRefused(
            "all replication slots of the server are in use: raise max_replication_slots, or drop those that nobody "
            "reads (`pillarbox doctor` names ours)"
        ) from error
    finally:
        making.cancel()  # this also cancels it on the server
        await asyncio.gather(making, return_exceptions=True)


_SLOT = """
    SELECT plugin, database = current_database() AS here, active_pid, wal_status,
           to_jsonb(s) ->> 'invalidation_reason' AS reason, to_jsonb(s) ->> 'failover' AS failover
    FROM pg_replication_slots s WHERE slot_name = '{}'
"""


async def _kept(
    connection: psycopg.AsyncConnection[Any], name: str, may_make: Callable[[], None], lost: Callable[[str], None]
) -> Any:
    """The slot, if it exists and is valid; None if it must be created."""
    found = await _one(connection, _SLOT.format(name))
    for _ in range(5):  # a reader that has just disconnected may still be listed
        if found is None or found.active_pid is None:
            break
        await asyncio.sleep(0.2)
        found = await _one(connection, _SLOT.format(name))
    if found is None:
        may_make()
        return None
    if found.plugin != "pgoutput" or not found.here:
        raise StreamRefused(f"the slot {name} belongs to something else: give the relay another name for its slot")
    if found.active_pid is not None:
        raise StreamRefused(
            f"the slot {name} is read by process {found.active_pid}: each relay needs a slot of its own"
        )
    if found.wal_status != "lost" and found.reason is None:
        return found
    lost(f"the server has invalidated the slot {name} ({found.reason or 'wal_removed'})")
    await _run(connection, f"DROP_REPLICATION_SLOT {name}")
    return None


async def _start(connection: psycopg.AsyncConnection[Any], slot: str, facts: Facts) -> None:
    """Start streaming. Earlier commits are in the table, which the relay reads anyway."""
    command = (
        f"START_REPLICATION SLOT {slot} LOGICAL {facts.position} "
        f"(proto_version '1', publication_names '{PUBLICATION}', binary 'true')"
    )
    pg = connection.pgconn
    pg.send_query(command.encode())
    pg.flush()
    with _readable(pg) as readable:
        async with _answer():
            while pg.is_busy():
                await readable.wait()
                readable.clear()
                pg.consume_input()
    result = pg.get_result()
    if result is None or result.status != pq.ExecStatus.COPY_BOTH:
        said = b"" if result is None else result.error_message
        raise ConnectionError(said.decode("utf-8", "replace").strip())
