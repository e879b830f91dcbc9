"""A consumer as a process, which may be killed, or die of a message. It writes an effect for each event.

python -m tests.prove.victim DATABASE PULSAR TOPIC TROUBLE
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self
from uuid import UUID, uuid4

import uvloop
from sqlalchemy import String, func, select
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import IntegrationEvent, MessageContext, Pillarbox, RetryPolicy, Route, UnitOfWork
from pillarbox.stores.tables import claims
from pillarbox.transports.pulsar import PulsarTransport

NAME = "victim"
AWAY, DEADLY = "away", "deadly"
"""What a text says of its event: its handler fails as long as the file TROUBLE is there; or it ends the process."""


class Told(IntegrationEvent, name="victim.told"):
    key: str
    number: int
    text: str = ""


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "victim_effects"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    event_id: Mapped[UUID]
    key: Mapped[str] = mapped_column(String(50))
    number: Mapped[int]


@asynccontextmanager
async def open_box(url: str, pulsar: str, topic: str) -> AsyncIterator[Pillarbox]:
    """The box of both sides."""
    engine = create_async_engine(url)
    transport = PulsarTransport(pulsar, guarantee="at_least_once")
    routes = [Route("victim.told", to="pulsar", topic=topic)]
    async with Pillarbox(engine, transports={"pulsar": transport}, routes=routes) as box:
        yield box
    await engine.dispose()


async def consume(url: str, pulsar: str, topic: str, trouble: Path) -> None:
    async with open_box(url, pulsar, topic) as box:
        retry = RetryPolicy(base=0.05, cap=0.5, attempts=2)
        consumer = box.consumer(NAME, source="pulsar", topics=[topic], retry=retry)

        @consumer.on(Told)
        async def write(event: Told, uow: UnitOfWork, context: MessageContext) -> None:
            if event.text == DEADLY:
                os._exit(1)
            if event.text == AWAY and trouble.exists():  # noqa: ASYNC240  it is what others use to tell us
                raise ConnectionError("its service is away")
            uow.add(Effect(event_id=event.event_id, key=context.key, number=event.number))

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)
        await consumer.run()


class Victim:
    """Such a process, and the next one when it is dead."""

    def __init__(self, *arguments: str) -> None:
        self._command = [sys.executable, "-m", "tests.prove.victim", *arguments]
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self.deaths = 0

    async def __aenter__(self) -> Self:
        await self._start()
        self._keeping = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._keeping is not None
        assert self._process is not None
        self._keeping.cancel()
        await asyncio.wait([self._keeping])
        if self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(*self._command)

    async def _keep_alive(self) -> None:
        while self._process is not None:
            await self._process.wait()
            self.deaths += 1
            await self._start()

    def kill(self) -> None:
        """Another one comes."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.kill()


# -- the proofs --------------------------------------------------------------------------------------------------------

KEYS = 10
PATIENCE = 180.0


async def survive_kills(url: str, pulsar: str, folder: Path, events: int) -> None:
    """So many events cannot take effect now, and their consumer is killed while it spills them, and after that. Others
    take effect meanwhile; later all do, once and in order.
    """
    topic, trouble = f"victim-{uuid4().hex[:8]}", folder / "trouble"
    trouble.touch()
    told = [Told(key=f"key-{number % KEYS}", number=number, text=AWAY) for number in range(events)]
    healthy = [Told(key="healthy", number=number) for number in range(100)]
    async with open_box(url, pulsar, topic) as box:
        await _publish(box, told)
        async with Victim(url, pulsar, topic, str(trouble)) as victim:
            for spilled in (1, events // 3, events):
                await until(partial(_are_spilled, box, spilled))
                victim.kill()
            await _publish(box, healthy)
            await until(lambda: _are_done(box, len(healthy)))
            trouble.unlink()
            victim.kill()
            await until(lambda: _are_done(box, events + len(healthy)))
        await _check(box, [*told, *healthy])
        assert not await _are_spilled(box, 1)


async def find_deadly(url: str, pulsar: str, folder: Path) -> int:
    """A message kills each process that tries it, until it is put aside; how many died. The others take effect."""
    topic = f"victim-{uuid4().hex[:8]}"
    told = [Told(key=f"key-{number % KEYS}", number=number) for number in range(200)]
    deadly = Told(key="key-3", number=100, text=DEADLY)
    async with open_box(url, pulsar, topic) as box:
        await _publish(box, [*told[:100], deadly, *told[100:]])
        async with Victim(url, pulsar, topic, str(folder / "trouble")) as victim:
            await until(lambda: _are_done(box, len(told)))
            await until(lambda: _has_dead_letters(box))
            deaths = victim.deaths
        await _check(box, told)
        [letter] = [letter async for letter in box.dead_letters()]
        assert letter.event_id == str(deadly.event_id)
        return deaths


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():  # noqa: ASYNC110  another process brings it about
            await asyncio.sleep(0.1)


async def _publish(box: Pillarbox, told: list[Told]) -> None:
    await box.migrate()
    async with box.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with box.unit_of_work() as uow:
        for event in told:
            uow.publish(event, key=event.key)
    await box.relay().drain()


async def _are_spilled(box: Pillarbox, enough: int) -> bool:
    async with box.engine.connect() as connection:
        return int((await connection.execute(select(func.count()).select_from(claims))).scalar_one()) >= enough


async def _are_done(box: Pillarbox, events: int) -> bool:
    async with box.engine.connect() as connection:
        return (await connection.execute(select(func.count()).select_from(Effect))).scalar_one() == events


async def _has_dead_letters(box: Pillarbox) -> bool:
    return bool([letter async for letter in box.dead_letters()])


async def _effects(box: Pillarbox) -> list[Effect]:
    async with box.unit_of_work() as uow:
        return [*(await uow.session.scalars(select(Effect).order_by(Effect.id)))]


async def _check(box: Pillarbox, told: list[Told]) -> None:
    found = await _effects(box)
    assert Counter(row.event_id for row in found) == Counter(event.event_id for event in told)
    for key in {event.key for event in told}:
        numbers = [row.number for row in found if row.key == key]
        assert numbers == sorted(numbers)


def main() -> None:
    *texts, trouble = sys.argv[1:]
    url, pulsar, topic = texts
    uvloop.run(consume(url, pulsar, topic, Path(trouble)))


if __name__ == "__main__":
    main()
