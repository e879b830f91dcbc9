"""faststream-outbox: its broker on SQLAlchemy and asyncpg, with a subscriber that finishes in batches."""

from __future__ import annotations

import json
import warnings
from typing import Any

from faststream_outbox import OutboxBroker, make_outbox_table  # type: ignore[import-not-found]
from faststream_outbox.autovacuum import outbox_autovacuum_ddl  # type: ignore[import-not-found]
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from bench.figures import body

from .contender import Arrived, Contender, main

warnings.simplefilter("ignore")

_QUEUE = "orders"


class FastStreamOutbox(Contender):
    left = "SELECT count(*) FROM outbox"

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self._metadata = MetaData()
        self._table = make_outbox_table(self._metadata, table_name="outbox")
        self._engine = create_async_engine(self.url, pool_size=8)
        self._sessions = async_sessionmaker(self._engine, expire_on_commit=False)
        self._broker = OutboxBroker(self._engine, outbox_table=self._table, logger=None)

    async def prepare(self) -> None:
        async with self._engine.begin() as connection:
            await connection.run_sync(self._metadata.create_all)
            await connection.execute(text(outbox_autovacuum_ddl("outbox")))

    async def open(self) -> None:
        """The engine is there."""

    async def fill(self, events: int) -> None:
        for first in range(0, events, 1000):
            async with self._sessions() as session, session.begin():
                content = [_content(seq) for seq in range(first, min(first + 1000, events))]
                await self._broker.publish_batch(*content, queue=_QUEUE, session=session)

    async def start(self, arrived: Arrived, *, drain: bool) -> None:
        self._broker = OutboxBroker(self._engine, outbox_table=self._table, logger=None)

        @self._broker.subscriber(  # type: ignore[untyped-decorator]
            _QUEUE,
            max_workers=1,
            fetch_batch_size=500 if drain else 100,
            terminal_flush_batch_size=500 if drain else 1,
            min_fetch_interval=0.01,
            max_fetch_interval=1.0,
        )
        async def handle(content: dict[str, Any]) -> None:
            arrived(content["seq"])

        await self._broker.start()

    async def stop(self) -> None:
        await self._broker.stop()

    async def commit(self, seq: int) -> None:
        async with self._sessions() as session, session.begin():
            await self._broker.publish(_content(seq), queue=_QUEUE, session=session)


def _content(seq: int) -> dict[str, Any]:
    return dict(json.loads(body(seq)))


if __name__ == "__main__":
    main(FastStreamOutbox)
