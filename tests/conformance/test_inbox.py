"""The inbox on every database, against the same promises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import and_, delete, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox.stores import sqlite
from pillarbox.stores.inbox import SqlInbox
from pillarbox.stores.migrations import migrate
from pillarbox.stores.tables import claims, inbox
from pillarbox.testing.conformance.inbox import InboxContract, Transaction, World
from tests.servers import DATABASES, Database, Server, Servers

DRIVERS = [
    *((kind, None) for kind in DATABASES),
    *(pair for pair in (("embedded", "psycopg"), ("mariadb", "aiomysql")) if pair[0] in DATABASES),
]


class DatabaseWorld(World):
    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.inbox = SqlInbox()
        self.takes_turns = engine.dialect.name == "sqlite"

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return _transaction(self.engine)

    async def age(self, by: timedelta) -> None:
        async with self.engine.begin() as connection:
            for row in (await connection.execute(select(inbox))).all():
                this = and_(*(column == row._mapping[column] for column in inbox.primary_key))
                await connection.execute(update(inbox).where(this).values(at=row.at - by))


@asynccontextmanager
async def _transaction(engine: AsyncEngine) -> AsyncIterator[Transaction]:
    async with engine.begin() as connection:

        async def run(method: Any, *arguments: Any, **options: Any) -> Any:
            return await connection.run_sync(method, *arguments, **options)

        yield run


@pytest.fixture(scope="module")
def migrated(servers: Servers) -> Iterator[dict[str, Database]]:  # noqa: ARG001  they outlive the databases
    """One database of each kind for all tests: making the tables would take longer than most of them."""
    made: dict[str, Database] = {}
    yield made
    for database in made.values():
        database.server.drop(database.name)


@pytest.fixture(params=DRIVERS, ids=lambda pair: "-".join(filter(None, pair)))
async def world(
    request: pytest.FixtureRequest,
    servers: Servers,
    use_server: Callable[[str], Server],
    migrated: dict[str, Database],
) -> AsyncIterator[World]:
    kind, driver = request.param
    use_server(kind)
    is_new = kind not in migrated
    if is_new:
        migrated[kind] = servers.create_database(kind)
    engine = create_async_engine(migrated[kind].url(driver))
    sqlite.configure_transactions(engine.sync_engine)
    if is_new:
        async with engine.begin() as connection:
            await connection.run_sync(migrate)
    yield DatabaseWorld(engine)
    async with engine.begin() as connection:
        await connection.execute(delete(inbox))
        await connection.execute(delete(claims))
    await engine.dispose()


class TestSqlInbox(InboxContract):
    """On every database, and with each driver."""
