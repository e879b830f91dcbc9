"""A TCP link on loopback with faults: cut, silent, one-way, or slow.

It stands between a client and a server (a host that begins with a slash is the path of a Unix socket), on the event
loop that started it. Swallowed bytes are lost. `mend` cuts connections that lost bytes, because no TCP connection
continues with a gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Self


class Way(Enum):
    """Direction: requests go up, answers come down."""

    UP = "up"
    DOWN = "down"


BOTH = frozenset(Way)


class Link:
    """``async with Link(host, port) as link``: connect to ``link.port`` instead."""

    def __init__(self, host: str, port: int = 0, *, watch: Callable[[Link, bytes], None] | None = None) -> None:
        self.port = 0
        self._target = host, port
        self._watch = watch
        """Called with data on its way up, before it is passed on."""
        self._server: asyncio.Server | None = None
        self._ends: dict[asyncio.StreamWriter, bool] = {}
        """Both ends of each connection, and whether bytes of it were swallowed."""
        self._swallowed: frozenset[Way] = frozenset()
        self._delays: dict[Way, float] = {}
        self._refusing = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self.drop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def lead_to(self, host: str, port: int = 0) -> None:
        """Connect to another server from now on, like the name of a promoted replica, and cut existing connections."""
        self._target = host, port
        self.drop()

    # -- faults --------------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Cut existing connections, and accept new ones."""
        for end in list(self._ends):
            end.transport.abort()
        self._ends.clear()

    def cut(self) -> None:
        """Cut existing connections, and refuse new ones, until `mend`."""
        self._refusing = True
        self.drop()

    def swallow(self, ways: frozenset[Way] = BOTH) -> None:
        """Accept bytes and pass none on, until `mend`, without any error."""
        self._swallowed = ways

    def slow_down(self, way: Way, seconds: float) -> None:
        """Delay each piece of data in this direction, until `mend`."""
        self._delays[way] = seconds

    def mend(self) -> None:
        """End all faults."""
        self._refusing, self._swallowed = False, frozenset()
        self._delays.clear()
        for end, holed in list(self._ends.items()):
            if holed:
                end.transport.abort()

    # -- connections ---------------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Not a coroutine: one that has not begun when the link is stopped would leave its connection open."""
        if self._refusing:
            writer.transport.abort()
            return
        self._ends[writer] = False
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends, ways = [writer], list[asyncio.Task[None]]()
        try:
            far_reader, far_writer = await self._connect()
            ends.append(far_writer)
            self._ends[far_writer] = False
            ways.append(asyncio.create_task(self._pump(reader, far_writer, Way.UP)))
            ways.append(asyncio.create_task(self._pump(far_reader, writer, Way.DOWN)))
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, asyncio.CancelledError):  # the server is not there, or the link is being stopped
            pass
        for way in ways:
            way.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*ways, return_exceptions=True)
        for end in ends:
            self._ends.pop(end, None)
            end.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self._target
        if host.startswith("/"):
            return await asyncio.open_unix_connection(host)
        return await asyncio.open_connection(host, port)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        with suppress(OSError):
            while data := await reader.read(262_144):
                if way is Way.UP and self._watch is not None:
                    self._watch(self, data)
                if seconds := self._delays.get(way):
                    await asyncio.sleep(seconds)
                if way in self._swallowed:
                    self._ends[writer] = True
                    continue
                writer.write(data)
                await writer.drain()
