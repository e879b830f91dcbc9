"""The memory cache's bounds, and a Redis package that is not there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pillarbox.cache import MemoryCache, Ticket


async def fill(cache: MemoryCache, *keys: str) -> None:
    for key in keys:
        ticket = await cache.get(key)
        assert isinstance(ticket, Ticket)
        await cache.set(ticket, key.encode(), ttl=60)


async def test_a_full_cache_forgets_what_was_used_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillarbox.cache.MAX_KEYS", 2)
    cache = MemoryCache()
    await fill(cache, "a", "b")
    await cache.get("a")
    await fill(cache, "c")
    assert await cache.get("a") == b"a"
    assert await cache.get("c") == b"c"
    assert isinstance(await cache.get("b"), Ticket)


async def test_a_ticket_that_had_to_make_room_fills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pillarbox.cache.MAX_KEYS", 1)
    cache = MemoryCache()
    ticket = await cache.get("a")
    assert isinstance(ticket, Ticket)
    await cache.get("b")
    await cache.set(ticket, b"a", ttl=60)
    assert isinstance(await cache.get("a"), Ticket)


def test_a_missing_redis_package_is_named_with_the_command() -> None:
    program = """
import sys
sys.modules["redis"] = None
from pillarbox.errors import MissingExtraError
try:
    import pillarbox.caches.redis
except MissingExtraError as error:
    sys.exit(str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == (
        "the Redis cache needs a package that is not installed: pip install 'pillarbox[redis]'"
    )
