"""A cache in Redis, which all processes share.

No business transaction fails, or waits for long, because Redis is down. After a failure it is not asked for a moment,
and reads go to the database. Keys that could not be deleted are remembered, and deleted with the next request; if the
process ends before, they live out their time.
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
"""Seconds that Redis may take to answer."""
PAUSE = 1.0
"""Seconds without a request after a failure."""
MAX_OWED = 100_000
"""How many keys a process remembers to delete. The others live out their time."""

# A key holds either V and a value, or T and the number of a ticket.
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
        self._client: Redis = Redis.from_url(
            url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT, retry=Retry(NoBackoff(), 0)
        )
        self._prefix = prefix
        self._asleep_until = 0.0
        self._owed: set[str] = set()
        """Keys that are still to be deleted."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def get(self, key: str) -> bytes | Ticket | None:
        entry = await self._run(_GET, key, b"T" + uuid4().hex.encode(), _milliseconds(TICKET_SECONDS))
        if entry is None:
            return None
        return entry[1:] if entry[:1] == b"V" else Ticket(key, entry[1:].decode())

    async def set(self, ticket: Ticket, value: bytes, *, ttl: float) -> None:
        await self._run(_FILL, ticket.key, b"T" + ticket.number.encode(), b"V" + value, _milliseconds(ttl))

    async def delete(self, keys: Collection[str]) -> None:
        self._owed.update(keys)
        await self._run()

    async def _run(self, script: str = "", key: str = "", *arguments: bytes | int) -> bytes | None:
        """Delete the owed keys, then run a script for a key. None if Redis does not answer."""
        if clock.current().monotonic() < self._asleep_until:
            return None
        pipeline: Any = self._client.pipeline(transaction=False)
        owed, self._owed = self._owed, set()
        for each in owed:
            pipeline.delete(self._prefix + each)
        if script:
            pipeline.eval(script, 1, self._prefix + key, *arguments)
        try:
            answers: list[Any] = await pipeline.execute()
        except BaseException as error:
            self._owed |= owed
            while len(self._owed) > MAX_OWED:
                self._owed.pop()
            if not isinstance(error, (RedisError, OSError)):
                raise
            self._asleep_until = clock.current().monotonic() + PAUSE
            logger.warning("the Redis cache does not answer; %d keys wait to be deleted: %s", len(self._owed), error)
            return None
        return answers[-1] if script else None


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
