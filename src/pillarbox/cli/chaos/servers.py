"""The servers under fire: a PostgreSQL, if wanted with a replica that every COMMIT waits for, and a Pulsar cluster."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from ...embedded import EmbeddedPostgres
from ...testing.pulsar import HOST, PulsarCluster

_PAUSE = 0.05
_OURS = "chaos"
_HAS_ALL = """
    SELECT coalesce(bool_and(flush_lsn >= CAST(CAST(:written AS text) AS pg_lsn) AND sync_state = 'sync'), false)
    FROM pg_stat_replication
"""
_SOMEBODY = f"""
    SELECT pg_terminate_backend(pid) FROM (
        SELECT pid FROM pg_stat_activity
        WHERE backend_type = 'client backend' AND datname = current_database() AND application_name <> '{_OURS}'
        ORDER BY random() LIMIT 1
    ) AS somebody
"""  # noqa: S608  constants


class Database:
    """A PostgreSQL that crashes, and that a replica can take the place of. What durability rests on stays as it is."""

    def __init__(self, folder: Path, *, replicated: bool) -> None:
        self._folder = folder
        self._replicated = replicated
        self._made = 0
        self.primary = self._new()
        self.replica: EmbeddedPostgres | None = None
        """None while there is none, or one that is not yet waited for."""
        self.engine: AsyncEngine
        """Straight to the primary."""

    async def start(self) -> None:
        """Start it, with its replica."""
        await asyncio.to_thread(self.primary.start)
        self._connect()
        await self.configure(wal_retrieve_retry_interval="'100ms'", wal_keep_size="'512MB'")
        if self._replicated:
            await self.add_replica()

    async def add_replica(self) -> None:
        """Make a replica of the primary, and let COMMIT wait for it from then on."""
        replica = self._new()
        await asyncio.to_thread(replica.follow, self.primary)
        await asyncio.to_thread(replica.start)
        # Set after the copy was made, which must not wait for a replica of its own when it is promoted.
        await self.configure(synchronous_standby_names="'*'")
        await self._followed()
        self.replica = replica

    async def restart(self) -> None:
        """Crash and come back."""
        await asyncio.to_thread(self.primary.control, "restart", "-m", "immediate")

    async def promote(self) -> None:
        """The primary dies, and its replica takes its place; it has none of its own until one is added.

        A backend that is killed while its COMMIT waits for the replica shows what the replica may not have yet. That is
        PostgreSQL's word, not ours: so the replica must have come past everything that was there a moment ago.
        """
        old, new = self.primary, self.replica
        if new is None:
            raise RuntimeError("there is no replica to promote")
        await self._followed()
        self.replica = None
        await asyncio.to_thread(old.control, "stop", "-m", "immediate")
        await asyncio.to_thread(new.control, "promote")
        self.primary = new
        await self.engine.dispose()
        self._connect()
        await asyncio.to_thread(old.stop)
        await asyncio.to_thread(shutil.rmtree, old.folder, ignore_errors=True)

    async def kill_backend(self) -> None:
        """End the connection of somebody, from within."""
        await self.ask(_SOMEBODY)

    async def ask(self, question: str, **values: Any) -> Any:
        """The one value that is the answer, if there is one."""
        async with self.engine.connect() as connection:
            answer = await connection.execute(sa.text(question), values)
            return answer.scalar() if answer.returns_rows else None

    async def configure(self, **settings: str) -> None:
        """Change settings of the server."""
        for name, value in settings.items():
            await self.ask(f"ALTER SYSTEM SET {name} = {value}")
        await self.ask("SELECT pg_reload_conf()")

    async def stop(self) -> None:
        """End it, in no particular peace."""
        if hasattr(self, "engine"):
            await self.engine.dispose()
        for server in (self.primary, self.replica):
            if server is not None:
                await asyncio.to_thread(server.stop)

    async def _followed(self) -> None:
        written = await self.ask("SELECT CAST(pg_current_wal_flush_lsn() AS text)")
        while not await self.ask(_HAS_ALL, written=written):  # noqa: ASYNC110  a server rings no bell
            await asyncio.sleep(_PAUSE)

    def _connect(self) -> None:
        ours = {"server_settings": {"application_name": _OURS}}
        self.engine = create_async_engine(
            self.primary.url, isolation_level="AUTOCOMMIT", poolclass=NullPool, connect_args=ours
        )

    def _new(self) -> EmbeddedPostgres:
        self._made += 1
        return EmbeddedPostgres(self._folder / f"postgres-{self._made}")


def pulsar_cluster(folder: Path, port: int, listeners: Mapping[str, int]) -> PulsarCluster:
    """A cluster whose broker has a name for each link, so that a client who asks for it stays on its link."""
    ports = {"direct": port, **listeners}
    advertised = ",".join(f"{name}:pulsar://{HOST}:{each}" for name, each in ports.items())
    settings = {"advertisedListeners": advertised, "internalListenerName": "direct"}
    return PulsarCluster(folder, port=port, settings=settings, quick_start=True)


def free_port() -> int:
    """A port for the broker, below those that systems give to outgoing connections."""
    while True:
        port = random.randrange(10_000, 32_000)  # noqa: S311  not a secret
        with socket.socket() as trial:
            if trial.connect_ex((HOST, port)):
                return port
