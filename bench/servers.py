"""The servers that are measured, and databases that last as long as a subject.

PostgreSQL is an embedded one of its own with default durability, unless PILLARBOX_BENCH_URL names another: there
databases are made and dropped.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
from sqlalchemy import make_url

from pillarbox import Pillarbox
from pillarbox.embedded import EmbeddedPostgres
from tests.servers import DatabaseServer

from .load import Sink, box_on
from .sizes import Sizes


@dataclass(frozen=True)
class Bench:
    """What a subject is given: a server and how much to do."""

    url: str
    """A database of the server, not used but to make others from."""
    folder: Path
    sizes: Sizes

    @asynccontextmanager
    async def database(self) -> AsyncIterator[str]:
        """The URL of a new database. It is dropped at the end."""
        name = f"pillarbox_bench_{os.getpid()}_{next(_NUMBERS)}"
        await self._execute(f"CREATE DATABASE {name}")
        try:
            yield make_url(self.url).set(database=name).render_as_string(hide_password=False)
        finally:
            await self._execute(f"DROP DATABASE {name} WITH (FORCE)")

    def box(self, url: str, sink: Sink, **options: Any) -> AbstractAsyncContextManager[Pillarbox]:
        """A box on a database."""
        return box_on(url, sink, **options)

    @contextmanager
    def another(self, kind: type[DatabaseServer]) -> Iterator[str]:
        """The URL of a database on a new server of another kind. `Missing` if that is not installed."""
        server = kind(self.folder / f"{kind.label}-{next(_NUMBERS)}")
        server.start()
        try:
            server.create("bench")
            yield server.url("bench", server.drivers[0])
        finally:
            server.stop()

    async def check_durability(self) -> str:
        """Refuse a server that promises less than PostgreSQL does by default; its version comes back."""
        async with _connected(self.url) as connection:
            for setting in ("fsync", "synchronous_commit", "full_page_writes"):
                if await connection.fetchval(f"SHOW {setting}") != "on":
                    raise SystemExit(f"error: the server must run with its default durability: {setting} is off")
            return str(await connection.fetchval("SHOW server_version"))

    async def _execute(self, statement: str) -> None:
        async with _connected(self.url) as connection:
            await connection.execute(statement)


_NUMBERS = count(1)


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        yield connection
    finally:
        await connection.close()


@contextmanager
def bench(sizes: Sizes) -> Iterator[Bench]:
    """Everything that a subject needs. Nothing of it is left behind, even if we are told to end."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="pillarbox-bench-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # the server may run as another user, who has to get through
        url = os.environ.get("PILLARBOX_BENCH_URL")
        if url is not None:
            yield Bench(url, folder, sizes)
            return
        with EmbeddedPostgres(folder / "server", database="postgres") as server:
            yield Bench(server.url, folder, sizes)
