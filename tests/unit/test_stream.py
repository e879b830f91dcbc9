"""What a stream says, and what is kept of it."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox.errors import ConfigurationError, StoreError
from pillarbox.outbox import LaneName
from pillarbox.stores import feed as feeds
from pillarbox.stores import stream as streams
from pillarbox.stores.buffer import AHEAD, OVERHEAD, RINGS, Buffer
from pillarbox.stores.feed import Feed
from pillarbox.stores.pgoutput import COLUMNS, Decoder, Streamed
from pillarbox.stores.slots import LARGE, SlotState
from pillarbox.stores.stream import Facts, Stream, connection_info
from tests.relays import in_virtual_time

TABLE, LANE, OTHER = 4711, LaneName(-5, 3), LaneName(1, 7)
FACTS = Facts("here", 180_000, TABLE, "0/0")
EVENT = UUID(int=7)
VALUES = {
    "id": (9).to_bytes(8),
    "event_id": EVENT.bytes,
    "route": (-5).to_bytes(8, signed=True),
    "shard": (3).to_bytes(4),
    "topic": b"orders",
    "key": "k\u00e4".encode(),
    "tenant": None,
    "headers": b'{"a": "b"}',
    "body": b"\x00\xff",
    "xid": (2**33).to_bytes(8),
}


def relation(columns: tuple[str, ...], table: int = TABLE) -> memoryview:
    described = b"".join(struct.pack(">B", 0) + name.encode() + b"\0" + struct.pack(">Ii", 20, -1) for name in columns)
    head = b"R" + struct.pack(">I", table) + b"public\0pillarbox_outbox\0" + b"d" + struct.pack(">H", len(columns))
    return memoryview(head + described)


def inserted(values: list[bytes | None], table: int = TABLE, kind: bytes = b"b") -> memoryview:
    columns = b"".join(b"n" if value is None else kind + struct.pack(">I", len(value)) + value for value in values)
    return memoryview(b"I" + struct.pack(">IcH", table, b"N", len(values)) + columns)


def streamed(row: int, *, xid: int = 1, lane: LaneName = LANE, size: int = 0) -> Streamed:
    return Streamed(row, xid, lane, EVENT.bytes, b"", b"", None, b"", bytes(size))


def looked_at(limit: int, *lanes: LaneName) -> Buffer:
    """A buffer of lanes that somebody looks at, while their stream is up."""
    buffer = Buffer(limit)
    buffer.server = "here"
    for lane in lanes or (LANE, OTHER):
        buffer.span(lane)
    return buffer


# -- decoding ----------------------------------------------------------------------------------------------------------


def test_a_row_comes_out_as_it_went_in() -> None:
    decoder = Decoder(TABLE)
    assert decoder.row(relation(COLUMNS)) is None
    row = decoder.row(inserted([VALUES[name] for name in COLUMNS]))
    assert row is not None
    assert (row.id, row.xid, row.lane) == (9, 2**33, LANE)
    assert row.values() == (str(EVENT), "orders", "kä", None, '{"a": "b"}', b"\x00\xff")


def test_columns_come_in_any_order_and_strange_ones_are_passed_over() -> None:
    names = ("status", *reversed(COLUMNS), "sent_at")
    decoder = Decoder(TABLE)
    decoder.row(relation(names))
    row = decoder.row(inserted([VALUES.get(name, b"?") for name in names]))
    assert row is not None
    assert (row.id, row.values()[0]) == (9, str(EVENT))


def test_rows_of_other_tables_are_passed_over() -> None:
    decoder = Decoder(TABLE)
    decoder.row(relation(COLUMNS))
    decoder.row(relation(("id",), table=1))
    assert decoder.row(inserted([b"?"], table=1)) is None
    assert decoder.row(inserted([VALUES[name] for name in COLUMNS])) is not None


def test_h60_messages_of_every_other_kind_are_passed_over() -> None:
    decoder = Decoder(TABLE)
    for kind in b"BCMOTUDYSEcA":
        assert decoder.row(memoryview(bytes([kind]) + b"whatever it says")) is None


def test_a_row_from_before_there_was_a_log_is_passed_over() -> None:
    decoder = Decoder(TABLE)
    decoder.row(relation(COLUMNS))
    assert decoder.row(inserted([None if name == "xid" else VALUES[name] for name in COLUMNS])) is None


def test_a_publication_that_leaves_something_out_is_refused() -> None:
    with pytest.raises(StoreError, match="leaves out body, xid of"):
        Decoder(TABLE).row(relation(COLUMNS[:-2]))


def test_values_as_text_are_refused() -> None:
    decoder = Decoder(TABLE)
    decoder.row(relation(COLUMNS))
    with pytest.raises(StoreError, match="binary was asked for"):
        decoder.row(inserted([b"12345678"] * len(COLUMNS), kind=b"t"))


def test_rows_that_are_not_wanted_are_passed_over() -> None:
    decoder = Decoder(TABLE, skip={9})
    decoder.row(relation(COLUMNS))
    assert decoder.row(inserted([VALUES[name] for name in COLUMNS])) is None


# -- keeping -----------------------------------------------------------------------------------------------------------


def test_a_row_is_given_for_its_id_and_transaction_only() -> None:
    """H102: after a failover, another row may have the id."""
    buffer = looked_at(1_000_000)
    buffer.put(streamed(5, xid=7))
    assert buffer.get(LANE, 5, 8) is None
    assert buffer.get(LaneName(1, 1), 5, 7) is None
    found = buffer.get(LANE, 5, 7)
    assert found is not None
    assert found.id == 5


def test_the_oldest_go_first_and_the_bound_holds() -> None:
    buffer = looked_at(10 * OVERHEAD, *(LaneName(0, shard) for shard in range(3)))
    for row in range(1, 101):
        buffer.put(streamed(row, lane=LaneName(0, row % 3)))
        assert buffer.bytes <= buffer.limit
    kept = [row for row in range(1, 101) if buffer.get(LaneName(0, row % 3), row, 1)]
    assert kept == [*range(91, 101)]


def test_a_row_that_is_too_large_is_not_kept() -> None:
    buffer = looked_at(OVERHEAD * 2)
    buffer.put(streamed(1))
    buffer.put(streamed(2, size=OVERHEAD * 2))
    assert (buffer.bytes, buffer.span(LANE)) == (0, None)


def test_rows_that_were_read_before_they_came_are_remembered() -> None:
    buffer = looked_at(1_000_000)
    buffer.passed(LANE, [1, 2])
    assert [*buffer.ahead] == [1, 2]
    buffer.passed(LANE, [*range(10, 10 + 2 * AHEAD)])
    assert len(buffer.ahead) == AHEAD


def test_a_row_that_nobody_comes_for_keeps_nothing_else() -> None:
    buffer = looked_at(1_000_000)
    buffer.put(streamed(1, lane=OTHER))
    for row in range(2, 10_000):
        buffer.put(streamed(row))
        buffer.passed(LANE, [row])
    assert len(buffer._order) < 2_000
    assert buffer.get(OTHER, 1, 1) is not None


def test_what_is_used_goes_and_all_that_came_before_it() -> None:
    buffer = looked_at(1_000_000)
    for row in (3, 5, 4, 9, 7):
        buffer.put(streamed(row))
    assert buffer.span(LANE) == (3, 9)
    buffer.passed(LANE, [5])
    assert [row for row in range(10) if buffer.get(LANE, row, 1)] == [7, 9]
    assert buffer.span(LANE) == (6, 9)
    buffer.passed(LANE, [7, 9])
    assert (buffer.span(LANE), buffer.bytes) == (None, 0)


def test_a_lane_whose_look_passed_over_a_row_is_told_of_a_few_times() -> None:
    """The row was on the stream before it could be seen."""
    buffer = looked_at(1_000_000)
    for row in (1, 2, 3):
        buffer.put(streamed(row))
    buffer.passed(LANE, [2, 3])
    assert buffer.unnamed([OTHER]) == set()
    assert [buffer.unnamed([LANE]) for _ in range(RINGS + 1)] == [{LANE}] * RINGS + [set()]
    for row in (4, 5):
        buffer.put(streamed(row))
    buffer.passed(LANE, [5])
    buffer.passed(LANE, [4])
    assert buffer.unnamed([LANE]) == set()


def test_rows_of_a_lane_without_a_cursor_are_heard_of_and_not_kept() -> None:
    buffer = looked_at(1_000_000, OTHER)
    buffer.put(streamed(1))
    assert (buffer.bytes, buffer.get(LANE, 1, 1)) == (0, None)
    assert buffer.unnamed([LANE, OTHER]) == {LANE}


def test_the_same_row_twice_takes_its_place_once() -> None:
    buffer = looked_at(1_000_000)
    buffer.put(streamed(1, xid=1))
    buffer.put(streamed(1, xid=2))
    assert buffer.get(LANE, 1, 1) is None
    buffer.passed(LANE, [1])
    assert buffer.bytes == 0


def test_nothing_outlives_its_stream() -> None:
    buffer = looked_at(1_000_000)
    buffer.put(streamed(1))
    buffer.clear()
    assert (buffer.span(LANE), buffer.bytes) == (None, 0)
    assert vars(buffer)["server"] is None
    buffer.put(streamed(2))
    assert buffer.span(LANE) == (2, 2)


# -- ringing -----------------------------------------------------------------------------------------------------------


class Bell:
    """A feed without a stream, and how often it has rung for each lane."""

    def __init__(self) -> None:
        self.buffer = looked_at(1_000_000)
        self.feed = Feed(create_async_engine("postgresql+asyncpg://a@h/d"), self.buffer, relay="r1")
        self.feed._hearer = self._heard
        self.rung: Counter[LaneName] = Counter()
        self.last = 0.0
        self._rang = asyncio.Event()

    async def rings(self, lane: LaneName, times: int) -> None:
        """Wait until it has rung so often for a lane."""
        while self.rung[lane] < times:
            self._rang.clear()
            await self._rang.wait()

    def _heard(self, lanes: Collection[LaneName]) -> None:
        self.rung.update(lanes)
        if LANE in lanes:
            self.last = asyncio.get_running_loop().time()
        self._rang.set()

    def bring(self, row: Streamed) -> None:
        self.buffer.put(row)
        self.feed._new.add(row.lane)
        self.feed._ring()


@in_virtual_time
async def test_a_row_that_no_look_names_is_rung_for_a_few_times_whatever_others_do() -> None:
    """It may be of a tenant who is paused: then every other commit would ring for it again."""
    bell, began = Bell(), asyncio.get_running_loop().time()
    bell.bring(streamed(1))
    for row in range(2, 1000):
        bell.bring(streamed(row, lane=OTHER))
        bell.buffer.passed(OTHER, [row])
        await asyncio.sleep(0.007)
    assert bell.rung[LANE] == 8
    assert 1.0 < bell.last - began < 2.0  # a commit that waits for a standby is visible long after it was streamed
    assert bell.rung[OTHER] >= 998


@in_virtual_time
async def test_a_new_row_is_rung_for_again_soon_although_another_lane_waits_longer() -> None:
    bell = Bell()
    bell.bring(streamed(1, lane=OTHER))
    await asyncio.sleep(0.7)  # the next time for that one is at 1.27
    bell.bring(streamed(2))
    await asyncio.sleep(0.08)
    assert bell.rung[LANE] == 4


@pytest.mark.every_loop
async def test_h129_a_stream_rings_again_on_a_loop_whose_handles_are_no_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop answers a delay below half a millisecond with a handle that knows no time."""
    monkeypatch.setattr(feeds, "RING_AGAIN", 0.0002)
    bell = Bell()
    bell.bring(streamed(1))
    bell.bring(streamed(2, lane=OTHER))
    async with asyncio.timeout(20):
        await bell.rings(LANE, RINGS + 1)


# -- keeping it up -----------------------------------------------------------------------------------------------------


class Brief:
    """A stream that ends after a while."""

    facts = FACTS
    left_behind = False

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def read(self, *_: object) -> None:
        await asyncio.sleep(self._seconds)
        raise StoreError("something is wrong with a row")


async def _ups(monkeypatch: pytest.MonkeyPatch, lasts: float, seconds: float) -> int:
    """How often a stream that lasts so long is up in a while."""
    ups = 0

    @asynccontextmanager
    async def brief(*_: object, **__: object) -> AsyncIterator[Brief]:
        nonlocal ups
        ups += 1
        yield Brief(lasts)

    monkeypatch.setattr(feeds, "open_stream", brief)
    monkeypatch.setattr(feeds, "CHECK_SECONDS", 1e6)
    feed = Feed(create_async_engine("postgresql+asyncpg://a@h/d"), Buffer(1), relay="r1")
    feed.start(len, ())
    await asyncio.sleep(seconds)
    await feed.stop()
    return ups


@in_virtual_time
async def _flaps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _ups(monkeypatch, 0.01, 120.0) < 20
    assert await _ups(monkeypatch, 40.0, 400.0) == 10


def test_a_stream_that_comes_up_and_fails_at_once_is_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    _flaps(monkeypatch)


# -- connecting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("postgresql+asyncpg://a:p%40ss@h:5/d?ssl=require", ["host=h", "port=5", "password=p@ss", "sslmode=require"]),
        ("postgresql+asyncpg://a@/d?host=/run/pg&port=6&prepared_statement_cache_size=0", ["host=/run/pg", "port=6"]),
        ("postgresql+psycopg://a@/d?host=one:1&host=two:2&target_session_attrs=primary", ["host=one,two", "port=1,2"]),
    ],
)
def test_libpq_connects_to_where_the_url_leads(url: str, parts: list[str]) -> None:
    info = connection_info(make_url(url), "r1")
    words = info.replace("'", "").split(" ")
    assert {*parts, "dbname=d", "replication=database", "tcp_user_timeout=15000"} <= {*words}
    assert "prepared_statement_cache_size" not in info


@pytest.mark.parametrize("name", ["orders", "pillarbox-1", "Pillarbox", "pillarbox'", "pillarbox_" + "x" * 60])
def test_a_slot_has_a_name_that_says_whose_it_is(name: str) -> None:
    with pytest.raises(ConfigurationError, match="slot must be"):
        Feed(None, Buffer(1), relay="r1", slot=name)  # type: ignore[arg-type]  # not used before


def test_h57_a_slot_strains_at_half_of_its_budget() -> None:
    def slot(lag: int, budget: int | None) -> SlotState:
        return SlotState("pillarbox", False, True, "reserved", lag, budget)

    assert [slot(lag, 100).strains for lag in (0, 49, 50, 200)] == [False, False, True, True]
    assert [slot(lag, None).strains for lag in (LARGE - 1, LARGE)] == [False, True]


class Libpq:
    """A connection that has read some messages already, and gets no more."""

    def __init__(self, *messages: bytes, busy: bool = False) -> None:
        self._messages = [*messages]
        self._busy = busy
        self._ends = socket.socketpair()
        self.socket = self._ends[0].fileno()
        self.pgconn = self

    def is_busy(self) -> bool:
        return self._busy

    def send_query(self, _: bytes) -> None:
        pass

    flush = consume_input = finish = lambda *_: None

    def get_copy_data(self, _: int) -> tuple[int, memoryview]:
        return (1, memoryview(self._messages.pop())) if self._messages else (0, memoryview(b""))

    def close(self) -> None:
        for end in self._ends:
            end.close()


@pytest.fixture
def libpq() -> Any:
    made: list[Libpq] = []

    def make(*given: Any, **more: Any) -> Any:
        made.append(Libpq(*given, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def test_rows_that_came_with_the_answer_are_taken_before_anything_is_waited_for(
    libpq: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CONFIRM_SECONDS", 3600.0)
    came = asyncio.Event()
    message = b"w" + bytes(24) + b"row"
    reading = asyncio.ensure_future(Stream(libpq(message), FACTS).read(lambda _: came.set(), lambda: None))
    async with asyncio.timeout(10):
        await came.wait()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_a_server_that_does_not_answer_is_not_waited_for(
    libpq: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "ANSWER_SECONDS", 0.01)
    async with asyncio.timeout(10):
        with pytest.raises(ConnectionError, match="has not answered"):
            await streams._start(libpq(busy=True), "pillarbox", FACTS)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("FATAL:  permission denied to start WAL sender", "needs REPLICATION"),
        ("FATAL:  must be superuser or replication role to start walsender", "needs REPLICATION"),
        ("ERROR:  permission denied to use replication slots", "needs REPLICATION"),
        ("FATAL:  unsupported startup parameter: replication", "a direct connection"),
        ("FATAL:  number of requested standby connections exceeds max_wal_senders (currently 10)", "; raise max_wal"),
        ('ERROR:  replication slot "pillarbox" is active for PID 7', None),
        ("terminating walsender process due to replication timeout", None),
    ],
)
def test_what_a_server_says_comes_with_what_to_do(said: str, hint: str | None) -> None:
    told = feeds._said(ConnectionError(said))
    assert hint in told if hint else "REPLICATION" not in told
