"""A cache in Redis, which all processes share.

No business transaction fails, or waits for long, because Redis is down: after a failure it is left alone for a moment,
reads find nothing and go to the database, and keys that could not be deleted are remembered and deleted before anything
else is asked. A process that ends before that leaves them to their time to live.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
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

MAX_OWED = 100_000
"""How many keys a process remembers to delete. Beyond that the oldest are left to their time to live."""

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

Command = tuple[str, str, list[bytes | int]]
"""A script, the key that it is about, and its arguments."""


class RedisCache:
    """Keeps values in the Redis at ``url``. Waits at most ``timeout`` seconds for it, and leaves it alone for ``pause``
    seconds after that. Use it as a context manager, or call `aclose`.
    """

    def __init__(self, url: str, *, prefix: str = "pillarbox:", timeout: float = 0.25, pause: float = 1.0) -> None:
        self._client: Redis = Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0)
        )
        self._prefix = prefix
        self._pause = pause
        self._asleep_until = 0.0
        self._owed: dict[str, object] = {}
        """Keys to delete, each with a mark of its own: a key may be owed again while it is being deleted."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def get(self, keys: Collection[str]) -> dict[str, bytes | Ticket]:
        number = b"T" + uuid4().hex.encode()
        seconds = _milliseconds(TICKET_SECONDS)
        found = await self._run([(_GET, key, [number, seconds]) for key in keys])
        return {key: _read(key, entry) for key, entry in zip(keys, found, strict=False)}

    async def set(self, values: Mapping[Ticket, bytes], *, ttl: float) -> None:
        await self._run(
            [
                (_FILL, ticket.key, [b"T" + ticket.number.encode(), b"V" + value, _milliseconds(ttl)])
                for ticket, value in values.items()
            ]
        )

    async def delete(self, keys: Collection[str]) -> None:
        self._owed |= {key: object() for key in keys}
        while len(self._owed) > MAX_OWED:
            self._owed.pop(next(iter(self._owed)))
        await self._run([])

    async def _run(self, commands: list[Command]) -> list[bytes]:
        """Delete what is owed, then do this. Nothing comes back if Redis does not answer."""
        if clock.current().monotonic() < self._asleep_until:
            return []
        owed = dict(self._owed)
        pipeline: Any = self._client.pipeline(transaction=False)
        for key in owed:
            pipeline.delete(self._prefix + key)
        for script, key, arguments in commands:
            pipeline.eval(script, 1, self._prefix + key, *arguments)
        try:
            answers: list[bytes] = await pipeline.execute()
        except (RedisError, OSError) as error:
            self._asleep_until = clock.current().monotonic() + self._pause
            logger.warning("the Redis cache does not answer; %d keys wait to be deleted: %s", len(owed), error)
            return []
        for key, mark in owed.items():
            if self._owed.get(key) is mark:
                del self._owed[key]
        return answers[len(owed) :]


def _read(key: str, entry: bytes) -> bytes | Ticket:
    return entry[1:] if entry[:1] == b"V" else Ticket(key, entry[1:].decode())


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
