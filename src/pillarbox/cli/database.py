"""From the settings to a database that answers, and back out with one clear line if it does not."""

from __future__ import annotations

import asyncio
import logging
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from ..embedded import EmbeddedPostgres
from ..errors import NotMigratedError
from ..settings import Settings, masked
from ..stores import sqlite
from ..stores.drivers import engine_for
from ..stores.inspection import do_not_compile
from ..stores.schema import check_schema
from ..telemetry import JsonFormatter
from .output import CommandError, Exit, plain, redacted

CONNECT_SECONDS = 10.0

_T = TypeVar("_T")


def load_settings(config: Path | None) -> Settings:
    """The settings of this command; logging follows them."""
    settings = Settings.load(config)
    handler = logging.StreamHandler()
    text = _OneLine("%(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else text)
    # Only our own loggers are turned up: others would show statements and their values.
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("pillarbox").setLevel(settings.log_level.upper())
    # A lost server is reported once, by us; the pool would add a stack trace for every connection that it clears away.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    return settings


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run it to the end. SIGINT and SIGTERM cancel it, so that it cleans up."""

    async def until_told() -> _T:
        task = asyncio.current_task()
        if task is not None and sys.platform != "win32":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(until_told())
    except asyncio.CancelledError:
        raise CommandError("terminated", Exit.TERMINATED) from None


@contextmanager
def signals() -> Iterator[asyncio.Future[Exit]]:
    """Done when SIGINT or SIGTERM has come, so that no portion is torn apart. The second one is taken at its word."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    told: asyncio.Future[Exit] = loop.create_future()

    def tell(code: Exit) -> None:
        if not told.done():
            told.set_result(code)
        elif task is not None:
            task.cancel()

    numbers = {} if sys.platform == "win32" else {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}
    for each, code in numbers.items():
        loop.add_signal_handler(each, tell, code)
    try:
        yield told
    finally:
        for each in numbers:
            loop.remove_signal_handler(each)


async def ask(settings: Settings, question: Callable[[Connection], _T]) -> _T:
    """Open the database, see that it is migrated, and ask."""
    async with opened(settings) as engine, engine.connect() as connection:
        await connection.run_sync(check_schema)
        await connection.run_sync(do_not_compile)
        return await connection.run_sync(question)


@asynccontextmanager
async def opened(
    settings: Settings, *, create: bool = False, embedded: str = "pillarbox"
) -> AsyncIterator[AsyncEngine]:
    """An engine whose database has answered.

    ``create`` allows that a SQLite file does not exist yet; ``embedded`` names the database within the embedded server.
    """
    async with AsyncExitStack() as stack:
        url = await _url(settings, embedded, stack)
        file = _sqlite_file(url)
        source = settings.origins()["database_url"]
        if file is not None and not file.parent.is_dir():
            raise CommandError(
                f"the folder {file.parent} for the SQLite file {file.name} does not exist: make it, or correct "
                f"database_url (from {source})",
                Exit.UNREACHABLE,
            )
        if file is not None and not create and not file.exists():
            # Connecting would create it, and a typing error in its name would look like an empty outbox.
            raise NotMigratedError(
                f"the SQLite file {file} does not exist: correct database_url, or run `pillarbox migrate`"
            )
        engine = _engine(url)
        stack.push_async_callback(engine.dispose)
        async with reached(engine, f"database_url (from {source})"):
            yield engine


@asynccontextmanager
async def changing(settings: Settings) -> AsyncIterator[AsyncEngine]:
    """The database, migrated, for those who write."""
    async with opened(settings) as engine:
        sqlite.configure_transactions(engine.sync_engine)
        async with engine.connect() as connection:
            await connection.run_sync(check_schema)
        yield engine


async def change(settings: Settings, work: Callable[[Connection], _T]) -> _T:
    """Change something, in one transaction."""
    async with changing(settings) as engine, engine.begin() as connection:
        return await connection.run_sync(work)


@asynccontextmanager
async def reached(engine: AsyncEngine, address: str) -> AsyncIterator[None]:
    """The database has answered; what it says later is told in one line. ``address`` is where its URL stands."""
    where, file = masked(engine.url), _sqlite_file(engine.url)
    try:
        if file is not None:
            # First without the async driver, whose thread writes a traceback of its own if it cannot open the file.
            sqlite3.connect(file).close()
        async with asyncio.timeout(CONNECT_SECONDS), engine.connect():
            pass
    except Exception as error:  # drivers have errors of their own for what goes wrong before the first statement
        remedy = f"see that the server runs and that {address} is right"
        raise CommandError(f"cannot reach {where}: {reason(error)}; {remedy}", Exit.UNREACHABLE) from error
    try:
        yield
    except (DBAPIError, OSError) as error:
        raise CommandError(f"{where} rejected the statement: {reason(error)}", Exit.UNREACHABLE) from error


def reason(error: BaseException) -> str:
    """What a driver says, in one line: what follows the first one may quote data."""
    said = str(error.orig if isinstance(error, DBAPIError) else error).strip()
    return redacted(said.splitlines()[0]) if said else type(error).__name__


async def _url(settings: Settings, database: str, stack: AsyncExitStack) -> URL:
    if settings.database_url is not None:
        return make_url(settings.database_url.get_secret_value())
    postgres = embedded_postgres(settings, database)
    await asyncio.to_thread(postgres.start)
    stack.push_async_callback(asyncio.to_thread, postgres.stop)
    return make_url(postgres.url)


def embedded_postgres(settings: Settings, database: str = "pillarbox") -> EmbeddedPostgres:
    """The embedded server of these settings."""
    return EmbeddedPostgres(settings.home / "postgres" if settings.home else None, database)


def _engine(url: URL) -> AsyncEngine:
    # SQLite has one writer at a time: wait for it longer than the driver would.
    sqlite = url.get_backend_name() == "sqlite"
    extra: dict[str, Any] = {"connect_args": {"timeout": 30}} if sqlite else {"isolation_level": "READ COMMITTED"}
    return engine_for(url, hide_parameters=True, pool_pre_ping=True, **extra)


def _sqlite_file(url: URL) -> Path | None:
    if url.get_backend_name() != "sqlite" or not url.database or url.database.startswith((":", "file:")):
        return None
    return Path(url.database)


class _OneLine(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        return plain(super().formatMessage(record))
