"""Whose fault it was, told from what real databases say through every driver."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import pytest
from sqlalchemy import CheckConstraint, ForeignKey, String, insert, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox.consumers.failure import Failure, classify
from tests.conftest import FreshDatabase
from tests.servers import Database

pytestmark = pytest.mark.dialects

POSTGRES = [("embedded", "asyncpg"), ("embedded", "psycopg")]
MYSQL = [("mariadb", "asyncmy"), ("mariadb", "aiomysql")]
SERVERS = [*POSTGRES, *MYSQL]
ALL = [*SERVERS, ("sqlite", "aiosqlite")]


class Base(DeclarativeBase):
    pass


class Parent(Base):
    __tablename__ = "failure_parents"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Row(Base):
    __tablename__ = "failure_rows"
    __table_args__ = (CheckConstraint("amount > 0", name="failure_positive"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(String(10))
    amount: Mapped[int] = mapped_column(default=1)
    parent: Mapped[int | None] = mapped_column(ForeignKey(Parent.id))


@dataclass
class Bench:
    """A database with rows 1 and 2, and a driver to it."""

    database: Database
    driver: str
    engine: AsyncEngine

    @property
    def is_postgres(self) -> bool:
        return self.database.is_postgres

    @property
    def is_sqlite(self) -> bool:
        return self.driver == "aiosqlite"

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[AsyncConnection]:
        async with self.engine.connect() as connection:
            yield connection
            await connection.rollback()

    async def insert(self, **values: Any) -> None:
        async with AsyncSession(self.engine) as session:
            if self.is_sqlite:
                await session.execute(text("PRAGMA foreign_keys = ON"))
            session.add(Row(**({"id": 3, "name": "third"} | values)))
            await session.commit()

    async def execute(self, *statements: str) -> None:
        async with self.connect() as connection:
            for statement in statements:
                await connection.execute(text(statement))


@pytest.fixture
async def bench(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> AsyncIterator[Bench]:
    kind, driver = request.param
    database = fresh_database(kind)
    engine = create_async_engine(database.url(driver), connect_args={"timeout": 0} if kind == "sqlite" else {})
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
        await connection.execute(insert(Row), [{"id": 1, "name": "first"}, {"id": 2, "name": "second"}])
    yield Bench(database, driver, engine)
    await engine.dispose()


def on(*pairs: tuple[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bench", pairs, indirect=True, ids=["-".join(pair) for pair in pairs])


async def failure_of(attempt: Awaitable[object]) -> Failure:
    """The class of what comes out of it, which is an error of SQLAlchemy and no other."""
    with pytest.raises(DBAPIError) as caught:
        await attempt
    return classify(caught.value)


def touch(row: int, amount: int = 5) -> Any:
    return update(Row).where(Row.id == row).values(amount=amount)


class TestTheMessagesFault:
    @on(*ALL)
    async def test_h87_not_null(self, bench: Bench) -> None:
        assert await failure_of(bench.insert(name=None)) is Failure.UNKNOWN

    @on(*ALL)
    async def test_h87_check(self, bench: Bench) -> None:
        assert await failure_of(bench.insert(amount=-1)) is Failure.POISON

    @on(*SERVERS)
    async def test_h87_too_long(self, bench: Bench) -> None:
        assert await failure_of(bench.insert(name="x" * 11)) is Failure.POISON

    @on(*SERVERS)
    async def test_h87_out_of_range(self, bench: Bench) -> None:
        """asyncpg refuses it by itself, before the server sees it."""
        assert await failure_of(bench.insert(amount=10**12)) is Failure.POISON

    @on(*POSTGRES)
    async def test_h87_a_character_that_no_text_may_have(self, bench: Bench) -> None:
        assert await failure_of(bench.insert(name="a\0b")) is Failure.POISON


class TestNobodyCanTell:
    @on(*ALL)
    async def test_h87_unique(self, bench: Bench) -> None:
        assert await failure_of(bench.insert(id=1)) is Failure.UNKNOWN

    @on(*ALL)
    async def test_h87_foreign_key(self, bench: Bench) -> None:
        assert await failure_of(bench.insert(parent=7)) is Failure.UNKNOWN

    @on(*ALL)
    async def test_h87_undefined_table(self, bench: Bench) -> None:
        assert await failure_of(bench.execute("SELECT 1 FROM failure_nowhere")) is Failure.UNKNOWN

    @on(*ALL)
    async def test_h87_undefined_column(self, bench: Bench) -> None:
        assert await failure_of(bench.execute("SELECT nothing FROM failure_rows")) is Failure.UNKNOWN


class TestTheCircumstances:
    @on(*ALL)
    async def test_h87_lock_timeout(self, bench: Bench) -> None:
        impatient = [] if bench.is_sqlite else ["SET innodb_lock_wait_timeout = 1"]
        if bench.is_postgres:
            impatient = ["SET lock_timeout = '50ms'"]
        async with bench.connect() as holder:
            await holder.execute(touch(1))
            attempt = bench.execute(*impatient, "UPDATE failure_rows SET amount = 6 WHERE id = 1")
            assert await failure_of(attempt) is Failure.TRANSIENT

    @on(*SERVERS)
    async def test_h87_deadlock(self, bench: Bench) -> None:
        async with bench.connect() as one, bench.connect() as other:
            await one.execute(touch(1))
            await other.execute(touch(2))
            done = await asyncio.gather(one.execute(touch(2)), other.execute(touch(1)), return_exceptions=True)
        (failed,) = [each for each in done if isinstance(each, BaseException)]
        assert isinstance(failed, DBAPIError)
        assert classify(failed) is Failure.TRANSIENT

    @on(*POSTGRES)
    async def test_h87_serialization_failure(self, bench: Bench) -> None:
        async with bench.engine.execution_options(isolation_level="REPEATABLE READ").connect() as late:
            await late.execute(select(Row.id))
            async with bench.engine.begin() as early:
                await early.execute(touch(1))
            assert await failure_of(late.execute(touch(1))) is Failure.TRANSIENT

    @on(*SERVERS)
    async def test_h87_killed_backend(self, bench: Bench) -> None:
        async with AsyncSession(bench.engine) as session:
            await kill(bench, session)
            assert await failure_of(session.execute(select(Row.id))) is Failure.TRANSIENT
            with pytest.raises(PendingRollbackError) as caught:
                await session.execute(select(Row.id))
            assert classify(caught.value) is Failure.TRANSIENT, (
                "whoever goes on in the session learns no more than this"
            )

    @on(*SERVERS)
    async def test_h87_killed_while_it_waits_for_an_answer(self, bench: Bench) -> None:
        async with bench.connect() as holder, AsyncSession(bench.engine) as session:
            await holder.execute(touch(1))
            number = await number_of(bench, session)
            waiting = asyncio.ensure_future(failure_of(session.execute(touch(1))))
            await until_waiting(bench, number)
            await kill_number(bench, number)
            assert await waiting is Failure.TRANSIENT

    @on(*SERVERS)
    async def test_h87_statement_timeout(self, bench: Bench) -> None:
        if bench.is_postgres:
            limit, slow = "SET statement_timeout = '50ms'", "SELECT pg_sleep(30)"
        else:
            dialect: Any = bench.engine.dialect
            limit = f"SET {'max_statement_time = 0.05' if dialect.is_mariadb else 'max_execution_time = 50'}"
            columns = "information_schema.columns"
            slow = f"SELECT COUNT(DISTINCT a.column_name, b.column_name) FROM {columns} a, {columns} b, {columns} c"
        assert await failure_of(bench.execute(limit, slow)) is Failure.TRANSIENT

    @on(*SERVERS)
    async def test_h87_read_only(self, bench: Bench) -> None:
        """As after a fail-over that left us at a replica."""
        session = "SESSION CHARACTERISTICS AS" if bench.is_postgres else "SESSION"
        write = "INSERT INTO failure_rows (id, name, amount) VALUES (3, 'third', 1)"
        attempt = bench.execute(f"SET {session} TRANSACTION READ ONLY", "COMMIT", write)
        assert await failure_of(attempt) is Failure.TRANSIENT

    @on(*SERVERS)
    async def test_h87_nobody_listens(self, bench: Bench) -> None:
        with socket.socket() as taken:  # bound, and never listening
            taken.bind(("127.0.0.1", 0))
            url = make_url(bench.database.url(bench.driver)).set(
                host="127.0.0.1", port=taken.getsockname()[1], query={}
            )
            engine = create_async_engine(url)
            with pytest.raises((OSError, DBAPIError)) as caught:
                async with engine.connect():
                    pass
            await engine.dispose()
        assert classify(caught.value) is Failure.TRANSIENT

    @on(("sqlite", "aiosqlite"))
    async def test_h87_a_file_that_cannot_be_opened(self, bench: Bench) -> None:
        engine = create_async_engine(f"{bench.database.url()}-no-such-folder/file")
        with pytest.raises(DBAPIError) as caught:
            async with engine.connect():
                pass
        assert classify(caught.value) is Failure.TRANSIENT
        await engine.dispose()


@on(("embedded", "asyncpg"))
async def test_h87_a_driver_used_without_sqlalchemy(bench: Bench) -> None:
    url = make_url(bench.database.url("asyncpg")).set(drivername="postgresql")
    connection = await asyncpg.connect(url.render_as_string(hide_password=False))
    for statement, kind in (
        ("INSERT INTO failure_rows (id) VALUES (3)", Failure.UNKNOWN),
        ("SELECT pg_terminate_backend(pg_backend_pid())", Failure.TRANSIENT),
        ("SELECT 1", Failure.TRANSIENT),
    ):
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)) as caught:
            await connection.execute(statement)
        assert classify(caught.value) is kind


async def number_of(bench: Bench, session: AsyncSession) -> int:
    asked = "SELECT pg_backend_pid()" if bench.is_postgres else "SELECT CONNECTION_ID()"
    return int((await session.execute(text(asked))).scalar_one())


async def kill(bench: Bench, session: AsyncSession) -> None:
    await kill_number(bench, await number_of(bench, session))


async def kill_number(bench: Bench, number: int) -> None:
    await bench.execute(f"SELECT pg_terminate_backend({number}, 5000)" if bench.is_postgres else f"KILL {number}")


async def until_waiting(bench: Bench, number: int) -> None:
    """Until the backend waits for a lock."""
    if bench.is_postgres:
        asked = f"SELECT count(*) FROM pg_locks WHERE pid = {number} AND NOT granted"
    else:
        asked = f"SELECT count(*) FROM information_schema.processlist WHERE id = {number} AND info LIKE 'UPDATE%'"
    async with asyncio.timeout(60), bench.connect() as watcher:
        while not (await watcher.execute(text(asked))).scalar_one():
            await watcher.rollback()
            await asyncio.sleep(0.01)
