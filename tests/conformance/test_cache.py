"""Every cache against the same promises, and what Redis alone can do: be away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

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

    async def test_prefixes_keep_services_apart(self, redis_url: str) -> None:
        async with RedisCache(redis_url, prefix="a:") as ours, RedisCache(redis_url, prefix="b:") as theirs:
            ticket = await ours.get("key")
            assert isinstance(ticket, Ticket)
            await ours.set(ticket, b"1", ttl=60)
            assert await theirs.get("key") != b"1"
