"""Requests that fail in every way, and a service that is killed under them: the books must balance.

A real uvicorn process runs an application with a relay inside, whose sink is a file. Some hundred clients ask it at
once to write something down. Some hang up, at a moment that the seed decides; some handlers fail, early or after their
flush; some are cancelled wherever they are, in COMMIT, too. Twice the process is killed and started again; who was cut
off asks anew. At the end every row has its event and every event its row, each event has reached the sink, whoever was
told 201 finds his row, and whoever was told of an error does not.

    python -m tests.prove.http --requests 200 --seed 7
"""

# No `from __future__ import annotations`: FastAPI could not see what an endpoint's annotation says of a local box.
import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import httpx
import sqlalchemy as sa
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import Aggregate, IntegrationEvent, Pillarbox, Route, UnitOfWork
from pillarbox.fastapi import TraceMiddleware, health, lifespan, unit_of_work
from pillarbox.outbox import Status
from pillarbox.stores import inspection
from pillarbox.stores.tables import lanes
from pillarbox.transport import Capabilities, Message, Outcome
from tests.servers import Servers
from tests.web import Process, free_port

KILLS = 2
PATIENCE = 60.0
DATABASE, SINK = "PROVE_HTTP_DATABASE", "PROVE_HTTP_SINK"

Way = Literal["well", "early error", "late error", "http error", "cancelled", "hang up", "until hung up"]
WAYS: Sequence[Way] = ("well", "well", "well", "early error", "late error", "http error", "cancelled", "hang up")

# -- the service -------------------------------------------------------------------------------------------------------


class Noted(IntegrationEvent, name="prove.note.noted"):
    """Somebody asked us to write something down."""

    note_id: UUID


class Base(DeclarativeBase):
    pass


class Note(Aggregate, Base):
    __tablename__ = "prove_notes"
    id: Mapped[UUID] = mapped_column(primary_key=True)


class Wish(BaseModel):
    """What a client asks for, and what shall go wrong."""

    id: UUID
    way: Way
    seconds: float


class FileTransport:
    """Appends to a file. A line is written at once or not at all."""

    capabilities = Capabilities()

    def __init__(self, file: Path) -> None:
        self._file = file

    def preflight(self, message: Message) -> str | None:  # noqa: ARG002  a file takes anything
        return None

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:  # noqa: ARG002  as above
        return {}

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:  # noqa: ARG002  as above
        with self._file.open("ab", buffering=0) as file:
            file.write(b"".join(message.body + b"\n" for message in messages))
        return Outcome(range(len(messages)))

    async def close(self, producer: str | None = None) -> None:
        """Nothing is open."""


def make_app() -> FastAPI:
    """What uvicorn runs."""
    box = Pillarbox(
        os.environ[DATABASE],
        transports={"file": FileTransport(Path(os.environ[SINK]))},
        routes=[Route("prove.note.*", to="file", topic="notes")],
    )

    @asynccontextmanager
    async def prepared(_app: FastAPI) -> AsyncIterator[None]:
        async with box.engine.begin() as connection:  # several workers start at once
            await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(4711)))
            await connection.run_sync(Base.metadata.create_all)
            await box.migrate()
        yield

    app = FastAPI(lifespan=lifespan(box, relay=lambda: box.relay(lease=1.0), also=prepared))
    app.add_middleware(TraceMiddleware)
    app.include_router(health(box))

    @app.post("/notes", status_code=201)
    async def write_down(wish: Wish, uow: Annotated[UnitOfWork, unit_of_work(box)], request: Request) -> UUID:
        if wish.way == "early error":
            raise RuntimeError("before anything was done")
        note = Note(id=wish.id)
        note.raise_event(Noted(note_id=wish.id))
        uow.add(note)
        task = asyncio.current_task()
        if wish.way == "cancelled" and task is not None:
            asyncio.get_running_loop().call_later(wish.seconds, task.cancel)
        else:
            await asyncio.sleep(wish.seconds)
        await uow.flush()
        if wish.way == "until hung up":
            while not await request.is_disconnected():  # noqa: ASYNC110  nothing else tells
                await asyncio.sleep(0.01)
        if wish.way == "late error":
            raise RuntimeError("after the flush")
        if wish.way == "http error":
            raise HTTPException(422, "we do not like it")
        return wish.id

    return app


class Service(Process):
    """The application in a process of its own."""

    def __init__(self, url: str, folder: Path, *, workers: int = 1) -> None:
        port = free_port()
        self.sink = folder / "sink"
        super().__init__(
            [
                *("-m", "uvicorn", "tests.prove.http:make_app", "--factory", "--host", "127.0.0.1"),
                *("--port", str(port), "--workers", str(workers), "--log-level", "critical"),
            ],
            port,
            folder / "log",
            environment=os.environ | {DATABASE: url, SINK: str(self.sink)},
        )


# -- its clients -------------------------------------------------------------------------------------------------------


class Books:
    """What clients were told."""

    def __init__(self) -> None:
        self.done: set[UUID] = set()
        self.failed: set[UUID] = set()
        self.unknown: set[UUID] = set()
        """Nobody told them: cut off, hung up, or cancelled."""
        self.answered = 0
        self.news = asyncio.Event()

    def tell(self, wish: Wish, status: int) -> None:
        if status == 201:
            self.done.add(wish.id)
        elif wish.way == "cancelled":
            self.unknown.add(wish.id)  # it may have come after COMMIT
        else:
            self.failed.add(wish.id)


async def ask(client: httpx.AsyncClient, books: Books, draw: random.Random) -> None:
    """Ask until there is an answer, each time for something new."""
    way = draw.choice(WAYS)
    while True:
        wish = Wish(id=UUID(int=draw.getrandbits(128)), way=way, seconds=draw.random() * 0.1)
        try:
            async with asyncio.timeout(draw.random() * 0.2 if way == "hang up" else PATIENCE):
                answer = await client.post("/notes", json=wish.model_dump(mode="json"))
        except httpx.ConnectError:
            await asyncio.sleep(0.02)  # nobody is there yet
        except httpx.TransportError:
            books.unknown.add(wish.id)
        except TimeoutError:
            books.unknown.add(wish.id)
            if way != "hang up":
                raise
            break
        else:
            books.tell(wish, answer.status_code)
            break
    books.answered += 1
    books.news.set()


async def kill(service: Service, books: Books, requests: int, draw: random.Random) -> None:
    """Kill the service and start it again, when so many clients have their answer."""
    for moment in sorted(draw.sample(range(requests // 10, requests - requests // 10), KILLS)):
        while books.answered < moment:
            books.news.clear()
            await books.news.wait()
        await asyncio.to_thread(service.kill)
        await asyncio.to_thread(service.start)


# -- the balance -------------------------------------------------------------------------------------------------------


async def prove(url: str, folder: Path, *, requests: int, seed: int) -> dict[str, Any]:
    """Ask and kill at the same time, wait until the outbox is empty, and compare."""
    started = time.perf_counter()
    draw, books = random.Random(seed), Books()
    engine = create_async_engine(url)
    service = Service(url, folder)
    await asyncio.to_thread(service.start)
    try:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=service.url, timeout=PATIENCE, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(kill(service, books, requests, random.Random(f"{seed} kills")))
            for _ in range(requests):
                group.create_task(ask(client, books, random.Random(draw.getrandbits(64))))
        async with asyncio.timeout(PATIENCE):
            while not await _at_rest(engine):  # noqa: ASYNC110  a database rings no bell
                await asyncio.sleep(0.05)
    finally:
        await asyncio.to_thread(service.stop)
    async with engine.connect() as connection:
        rows = set((await connection.execute(sa.select(Note.id))).scalars())
        held = await connection.execute(sa.select(sa.func.count()).where(lanes.c.locked_by.is_not(None)))
        stored = (await connection.execute(sa.text("SELECT aggregate_id FROM outbox_events"))).scalars().all()
    await engine.dispose()
    events = [UUID(found) for found in stored]
    arrived = [UUID(json.loads(line)["note_id"]) for line in service.sink.read_bytes().splitlines()]
    found = {
        "told_done_without_row": len(books.done - rows),
        "told_failed_with_row": len(books.failed & rows),
        "rows_without_event": len(rows - {*events}),
        "events_without_row": len({*events} - rows),
        "rows_with_two_events": len(events) - len({*events}),
        "events_not_delivered": len({*events} - {*arrived}),
        "deliveries_without_row": len({*arrived} - rows),
        "lanes_held_after_the_stop": held.scalar_one(),
    }
    return {
        "requests": requests,
        "kills": KILLS,
        "done": len(books.done),
        "failed": len(books.failed),
        "unknown": len(books.unknown),
        "unknown_with_row": len(books.unknown & rows),
        "rows": len(rows),
        "delivered_twice": len(arrived) - len({*arrived}),
        **found,
        "seconds": round(time.perf_counter() - started, 1),
        "holds": not any(found.values()) and bool(books.done),
    }


async def _at_rest(engine: AsyncEngine) -> bool:
    async with engine.connect() as connection:
        groups = await connection.run_sync(inspection.statistics)
    return {group.status for group in groups} == {Status.SENT}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    servers = Servers()
    os.environ["PILLARBOX_HOME"] = str(servers.folder / "home")
    try:
        url = servers.create_database("embedded").url()
        with tempfile.TemporaryDirectory(prefix="pillarbox-http-") as folder:
            result = asyncio.run(prove(url, Path(folder), requests=given.requests, seed=given.seed))
    finally:
        servers.stop()
    print(json.dumps({"seed": given.seed, **result}, indent=2))
    return int(not result["holds"])


if __name__ == "__main__":
    sys.exit(main())
