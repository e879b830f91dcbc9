"""A cache in Redis, shared by all processes.

If Redis is down, no business transaction fails or waits for long. After a failure Redis is not used for a moment, and
reads go to the database. Keys that could not be deleted stay until they expire.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, Self
from uuid import uuid4

from .. import clock
from ..cache import TICKET_SECONDS, Ticket
from ..errors import MissingExtraError

try:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
except ImportError:
    raise MissingExtraError("the Redis cache", extra="redis") from None

logger = logging.getLogger("pillarbox")

TIMEOUT = 0.25
"""Seconds to wait for an answer of Redis."""
PAUSE = 1.0
"""Seconds without a request after a failure."""

# A key has either V and a value, or T and the number of a ticket.
_GET = """
local found = redis.call('GET', KEYS[1])
if not found then
    found = ARGV[1]
    redis.call('SET', KEYS[1], found, 'PX', ARGV[2])
end
return found
"""
_FILL = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
"""


class RedisCache:
    """Keeps values in the Redis at ``url``. Use it as a context manager, or call `aclose`."""

    def __init__(self, url: str, *, prefix: str = "pillarbox:") -> None:
        self._client: Any = Redis.from_url(
            url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT, retry=Retry(NoBackoff(), 0)
        )
        self._prefix = prefix
        self._asleep_until = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def get(self, key: str) -> bytes | Ticket | None:
        ticket, seconds = b"T" + uuid4().hex.encode(), _milliseconds(TICKET_SECONDS)
        entry = await self._ask("EVAL", _GET, 1, self._prefix + key, ticket, seconds)
        if entry is None:
            return None
        return entry[1:] if entry[:1] == b"V" else Ticket(key, entry[1:].decode())

    async def set(self, ticket: Ticket, value: bytes, *, ttl: float) -> None:
        number, seconds = b"T" + ticket.number.encode(), _milliseconds(ttl)
        await self._ask("EVAL", _FILL, 1, self._prefix + ticket.key, number, b"V" + value, seconds)

    async def delete(self, keys: Collection[str]) -> None:
        if keys:
            await self._ask("DEL", *(self._prefix + key for key in keys))

    async def _ask(self, *command: str | bytes | int) -> Any:
        """The answer to a command; None without an answer of Redis."""
        if clock.current().monotonic() < self._asleep_until:
            return None
        try:
            return await self._client.execute_command(*command)
        except (RedisError, OSError) as error:
            self._asleep_until = clock.current().monotonic() + PAUSE
            logger.warning("the Redis cache does not answer: %s", error)
            return None


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
