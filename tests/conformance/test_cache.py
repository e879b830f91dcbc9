"""Every cache against the same promises, and what Redis alone can do: be away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from redis import asyncio as redis

from pillarbox import clock
from pillarbox.cache import Cache, MemoryCache, Ticket
from pillarbox.caches.redis import RedisCache
from pillarbox.testing.conformance.cache import CacheContract, World


class Hand(clock.SystemClock):
    """A clock that is moved by hand."""

    seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


class MemoryWorld(World):
    def __init__(self, hand: Hand) -> None:
        self.cache: Cache = MemoryCache()
        self._hand = hand

    async def advance(self, seconds: float) -> None:
        self._hand.seconds += seconds


class RedisWorld(World):
    """Redis has a clock of its own: here time passes by taking it from what is left to each key."""

    def __init__(self, cache: RedisCache, client: redis.Redis) -> None:
        self.cache: Cache = cache
        self._client = client

    async def advance(self, seconds: float) -> None:
        for key in await self._client.keys():
            left = await self._client.pttl(key) - round(seconds * 1000)
            await self._client.pexpire(key, left)


@pytest.fixture
def hand() -> Iterator[Hand]:
    with clock.use(hand := Hand()):
        yield hand


class TestMemoryCache(CacheContract):
    @pytest.fixture
    def world(self, hand: Hand) -> World:
        return MemoryWorld(hand)


class TestRedisCache(CacheContract):
    @pytest.fixture
    async def world(self, redis_url: str) -> AsyncIterator[World]:
        async with RedisCache(redis_url) as cache, redis.from_url(redis_url) as client:
            yield RedisWorld(cache, client)


class Gate:
    """A way to Redis that can be closed."""

    def __init__(self, url: str) -> None:
        self._upstream = urlsplit(url)
        self._open: list[asyncio.StreamWriter] = []
        self._port = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """The URL of the way, as long as it is open."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = server.sockets[0].getsockname()[1]
        try:
            yield f"redis://127.0.0.1:{self._port}/0"
        finally:
            server.close()
            for writer in self._open:
                writer.close()
            await server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        self._open += [writer, upstream[1]]
        await asyncio.gather(_copy(reader, upstream[1]), _copy(upstream[0], writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
    writer.close()


class TestRedisAway:
    async def test_nothing_is_found_nothing_is_kept_and_nothing_fails(
        self, hand: Hand, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with RedisCache("redis://127.0.0.1:1/0") as cache:
            assert await cache.get("key") is None
            await cache.set(Ticket("key", "1"), b"1", ttl=60)
            await cache.delete(["key"])
            assert caplog.text.count("does not answer") == 1, "it is left alone for a moment"
            hand.seconds += 1
            assert await cache.get("key") is None
            assert caplog.text.count("does not answer") == 2

    async def test_what_was_deleted_meanwhile_is_gone_when_it_is_back(self, redis_url: str, hand: Hand) -> None:
        gate = Gate(redis_url)
        async with RedisCache(redis_url) as near:
            async with gate.open() as way:
                far = RedisCache(way)
                ticket = await far.get("key")
                assert isinstance(ticket, Ticket)
                await far.set(ticket, b"old", ttl=60)
            await far.delete(["key"])
            assert await near.get("key") == b"old", "for the rest of its time, if nobody comes back"
            hand.seconds += 1
            async with gate.open():
                assert isinstance(await far.get("key"), Ticket)
                assert isinstance(await near.get("key"), Ticket)
                await far.aclose()

    async def test_a_process_remembers_only_so_many_keys(self, hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pillarbox.caches.redis.MAX_OWED", 3)
        async with RedisCache("redis://127.0.0.1:1/0") as cache:
            for number in range(9):
                await cache.delete([f"{number}"])
                hand.seconds += 1
            assert len(cache._owed) == 3

    async def test_prefixes_keep_services_apart(self, redis_url: str) -> None:
        async with RedisCache(redis_url, prefix="a:") as ours, RedisCache(redis_url, prefix="b:") as theirs:
            ticket = await ours.get("key")
            assert isinstance(ticket, Ticket)
            await ours.set(ticket, b"1", ttl=60)
            assert await theirs.get("key") != b"1"
