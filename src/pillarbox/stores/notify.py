"""The doorbell between processes, on PostgreSQL: NOTIFY and LISTEN, each on a connection of its own.

LISTEN does not work through a pooler that shares connections between transactions, and a connection that is cut may
look alive for hours. So the listener rings its own bell, at start and then now and again: if that does not arrive, it
says so, loudly, and starts over; relays look by themselves meanwhile, only less often than they ring.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any
from uuid import uuid4

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..outbox import LaneName
from ..redaction import described

logger = logging.getLogger("pillarbox")

CHANNEL = "pillarbox"
MAX_LANES = 200
"""A payload may have 8,000 bytes. What does not go in is found by looking."""
ECHO_SECONDS = 2.0
CHECK_SECONDS = 15.0

Hearer = Callable[[Collection[LaneName]], object]


class PostgresCarrier:
    """`Carrier` on PostgreSQL, for asyncpg and psycopg."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._sender: AsyncConnection | None = None
        self._driver: Any = None
        """The sender's own, so that a ring costs no greenlet."""
        self._sending = asyncio.Lock()
        self._heard = asyncio.Event()
        self._echo = ""
        self.works = False

    async def carry(self, lanes: Collection[LaneName]) -> None:
        await self._notify(",".join([f"{route}/{shard}" for route, shard in [*lanes][:MAX_LANES]]))

    async def listen(self, hearer: Hearer) -> None:
        told = False
        while True:
            try:
                await self._listen_once(hearer)
            except TimeoutError:
                if not told:
                    logger.warning(
                        "LISTEN does not work on this connection: relays look at the outbox by themselves, which is "
                        "slower; through a pooler, give the relay a direct connection"
                    )
                told = True
            except Exception as error:
                logger.info("the doorbell has lost its connection: %s", described(error))
                told = False
            finally:
                self.works = False
            await asyncio.sleep(ECHO_SECONDS)

    async def close(self) -> None:
        if self._sender is not None:
            sender, self._sender, self._driver = self._sender, None, None
            await sender.close()
        await self._engine.dispose()

    async def _notify(self, payload: str) -> None:
        async with self._sending, asyncio.timeout(ECHO_SECONDS):
            try:
                if self._sender is None:
                    self._sender = await self._engine.connect()
                    self._driver = (await self._sender.get_raw_connection()).driver_connection
                # By the driver itself: a ring must cost next to nothing, also when there are hundreds in a second.
                await self._driver.execute(f"NOTIFY {CHANNEL}, '{payload}'")
            except BaseException:
                sender, self._sender, self._driver = self._sender, None, None
                if sender is not None:
                    with suppress(Exception):
                        await sender.invalidate()
                        await sender.close()
                raise

    async def _listen_once(self, hearer: Hearer) -> None:
        async with self._engine.connect() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            reading: asyncio.Future[Any]
            if hasattr(driver, "add_listener"):  # asyncpg
                gone = asyncio.Event()
                driver.add_termination_listener(lambda _driver: gone.set())
                await driver.add_listener(CHANNEL, lambda *it: self._arrived(it[-1], hearer))
                reading = asyncio.ensure_future(gone.wait())
            else:
                await driver.execute(f"LISTEN {CHANNEL}")
                reading = asyncio.ensure_future(self._read(driver, hearer))
            try:
                await self._check_now_and_again(reading)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                await connection.invalidate()  # nobody else may get a connection that listens

    async def _read(self, driver: Any, hearer: Hearer) -> None:
        async for notice in driver.notifies():
            self._arrived(notice.payload, hearer)

    async def _check_now_and_again(self, reading: asyncio.Future[Any]) -> None:
        """Ring our own bell; whoever hears nothing has a dead connection."""
        while True:
            self._heard.clear()
            self._echo = f"echo {uuid4()}"
            await self._notify(self._echo)
            async with asyncio.timeout(ECHO_SECONDS):
                await self._heard.wait()
            self.works = True
            await asyncio.wait([reading], timeout=CHECK_SECONDS)
            if reading.done():
                reading.result()
                raise ConnectionError("the server has hung up")

    def _arrived(self, payload: str, hearer: Hearer) -> None:
        if payload.startswith("echo "):
            if payload == self._echo:
                self._heard.set()
            return
        lanes = [part.partition("/") for part in payload.split(",")]
        with suppress(ValueError):  # somebody else uses our channel
            hearer([LaneName(int(route), int(shard)) for route, _, shard in lanes])
