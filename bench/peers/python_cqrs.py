"""python-cqrs: its repository on SQLAlchemy and the loop of its documentation, which sends one by one."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import cqrs  # type: ignore[import-not-found]
import pydantic
from cqrs.message_brokers import protocol  # type: ignore[import-not-found]
from cqrs.outbox.sqlalchemy import Base  # type: ignore[import-not-found]
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from bench.figures import body

from .contender import Arrived, Contender, main

logging.disable(logging.WARNING)


class Order(pydantic.BaseModel, frozen=True):
    seq: int
    order_id: str
    customer: str
    note: str


_Event = cqrs.PydanticNotificationEvent[Order]
cqrs.OutboxedEventMap.register("order_created", _Event)


class PythonCqrs(Contender):
    left = "SELECT count(*) FROM outbox WHERE event_status <> 'PRODUCED'"

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self._engine = create_async_engine(self.url)
        self._sessions = async_sessionmaker(self._engine, expire_on_commit=False)

    async def prepare(self) -> None:
        async with self._engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)

    async def open(self) -> None:
        """The engine is there."""

    async def fill(self, events: int) -> None:
        for first in range(0, events, 1000):
            await self._commit(range(first, min(first + 1000, events)))

    async def commit(self, seq: int) -> None:
        await self._commit([seq])

    async def _commit(self, numbers: Any) -> None:
        async with self._sessions() as session:
            outbox = cqrs.SqlAlchemyOutboxedEventRepository(session)
            for seq in numbers:
                order = Order(**json.loads(body(seq)))
                outbox.add(_Event(event_name="order_created", topic="orders", payload=order))
            await outbox.commit()

    async def start(self, arrived: Arrived, *, drain: bool) -> None:
        class Broker(protocol.MessageBroker):  # type: ignore[misc]
            async def send_message(self, message: Any) -> None:
                arrived(message.payload["payload"]["seq"])

        async def produce() -> None:
            async with self._sessions() as session:
                producer = cqrs.EventProducer(Broker(), cqrs.SqlAlchemyOutboxedEventRepository(session))
                async for messages in producer.event_batch_generator(batch_size=1000 if drain else 100):
                    for message in messages:
                        await producer.send_message(message)
                    await producer.repository.commit()
                    if not messages:
                        await asyncio.sleep(0.05)  # its documentation waits for ten seconds

        self._producing = asyncio.create_task(produce())

    async def stop(self) -> None:
        self._producing.cancel()


if __name__ == "__main__":
    main(PythonCqrs)
