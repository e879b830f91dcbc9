"""The link that can be made bad."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from pillarbox.testing.link import Link, Way


async def ask(link: Link) -> bytes:
    """What comes back through the link; nothing, if it is cut."""
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    try:
        writer.write(b"who?\n")
        return await asyncio.wait_for(reader.readline(), 0.2)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


@asynccontextmanager
async def server(path: Path) -> AsyncIterator[str]:
    """Says its name to everybody who asks; the path of its socket."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            writer.write(path.name.encode() + b"\n")
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        yield str(path)


async def test_it_leads_to_a_socket_and_then_to_another_one(tmp_path: Path) -> None:
    async with server(tmp_path / "one") as one, server(tmp_path / "two") as two, Link(one) as link:
        assert await ask(link) == b"one\n"
        link.lead_to(two)
        assert await ask(link) == b"two\n"


async def test_cut_it_refuses_and_mended_it_does_not(tmp_path: Path) -> None:
    async with server(tmp_path / "one") as one, Link(one) as link:
        link.cut()
        assert await ask(link) == b""
        link.mend()
        assert await ask(link) == b"one\n"


@pytest.mark.parametrize("way", Way)
async def test_what_it_swallows_is_gone(tmp_path: Path, way: Way) -> None:
    async with server(tmp_path / "one") as one, Link(one) as link:
        link.swallow(frozenset({way}))
        with pytest.raises(TimeoutError):
            await ask(link)
        link.mend()
        assert await ask(link) == b"one\n"


@pytest.mark.parametrize("steps", range(8))
async def test_who_comes_at_the_last_moment_is_not_left_connected(tmp_path: Path, steps: int) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "one"))
        server.listen()
        async with Link(str(tmp_path / "one")) as link:
            reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
            for _ in range(steps):
                await asyncio.sleep(0)
        async with asyncio.timeout(5):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        writer.transport.abort()
