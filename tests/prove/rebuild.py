"""A projection with 1,000,000 events behind it is written anew while 500 events a second come in, the live one applies
them, and readers ask all the time: no query fails, nobody sees half a table, and in the end every event has had its
effect once.

The past is written by SQL, in the form that the library gives to one event, and counts as delivered. Writer, live
projection and readers are a process of their own.

    python -m tests.prove.rebuild --events 1000000 --rate 500 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

import msgspec
from sqlalchemy import String, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import IntegrationEvent, Pillarbox
from pillarbox.inbox import consumer_id
from pillarbox.outbox import stable_hash
from pillarbox.projections import Add, Change, Projection, ProjectionRow, on
from pillarbox.projections.consumer import ProjectionConsumer
from pillarbox.projections.rebuild import Progress, Rebuilt, Stage
from tests.servers import Servers

ARTICLES = 1_000
READERS = 4
SHARDS = 4


class PieceSold(IntegrationEvent, name="prove.rebuilt.sold", version=1):
    article: str
    pieces: int


class Base(DeclarativeBase):
    pass


class SoldRow(ProjectionRow, Base):
    __tablename__ = "prove_rebuilt"

    article: Mapped[str] = mapped_column(String(20), primary_key=True)
    sales: Mapped[int] = mapped_column(default=0)
    pieces: Mapped[int] = mapped_column(default=0)


class Sold(Projection, row=SoldRow, guarded=False):
    """Nothing but the inbox keeps an event from being counted twice."""

    @on(PieceSold)
    def sold(self, event: PieceSold) -> Change:
        return self.put(article=event.article, sales=Add(1), pieces=Add(event.pieces))


def projected(url: str) -> tuple[Pillarbox, ProjectionConsumer]:
    box = Pillarbox(create_async_engine(url, pool_size=READERS + 4), shards=SHARDS)
    return box, box.projection(Sold, source="outbox")


# -- the past ----------------------------------------------------------------------------------------------------------


async def set_up(url: str, events: int) -> None:
    """The tables, and so many events that were delivered and applied."""
    box, consumer = projected(url)
    async with box:
        await box.migrate()
        async with box.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with box.unit_of_work() as uow:
            uow.publish(PieceSold(article="a0", pieces=1), key="a0")
        await consumer.drain()
        names = [f"a{number}" for number in range(ARTICLES)]
        shards = [stable_hash(name) % SHARDS for name in names]
        async with box.engine.begin() as connection:
            given = {"names": names, "shards": shards, "events": events - 1}
            await connection.execute(_PAST, given)
            await connection.execute(_DEALT_WITH, {"consumer": consumer_id(consumer.name)})
            await connection.execute(text("DELETE FROM prove_rebuilt"))
            await connection.execute(_FOLD_INTO)
        async with box.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            await connection.execute(text("VACUUM ANALYZE pillarbox_outbox, pillarbox_inbox, prove_rebuilt"))
    await box.engine.dispose()


# Each is like the one event that the library has written, but for its id, its key and what it says.
_PAST = text(
    """
    INSERT INTO pillarbox_outbox (event_id, event_type, route, shard, schema_version, topic, key, tenant, headers, body,
                                  status, sent_at)
    SELECT e.id, o.event_type, o.route, a.shard, o.schema_version, o.topic, a.name, o.tenant,
           CAST(CAST(o.headers AS jsonb) || jsonb_build_object('event_id', e.id, 'aggregate_id', a.name) AS text),
           convert_to(CAST(json_build_object('article', a.name, 'pieces', e.n % 7) AS text), 'UTF8'), 'SENT', now()
    FROM (SELECT gen_random_uuid() AS id, n FROM generate_series(1, CAST(:events AS integer)) n) e
    JOIN unnest(CAST(:names AS text[]), CAST(:shards AS integer[])) WITH ORDINALITY AS a(name, shard, place)
        ON a.place = 1 + e.n % cardinality(CAST(:names AS text[]))
    CROSS JOIN (SELECT * FROM pillarbox_outbox LIMIT 1) o
    ORDER BY e.n
    """
)
_DEALT_WITH = text(
    """
    INSERT INTO pillarbox_inbox (consumer, tenant, event_id, schema_version, digest)
    SELECT :consumer, '', event_id, schema_version, decode(md5(body), 'hex') FROM pillarbox_outbox
    ON CONFLICT DO NOTHING
    """
)
_FOLDED = """
    SELECT s.said ->> 'article', count(*), sum(CAST(s.said ->> 'pieces' AS integer))
    FROM pillarbox_outbox o CROSS JOIN LATERAL (SELECT CAST(convert_from(o.body, 'UTF8') AS json) AS said) s GROUP BY 1
"""
_FOLD_INTO = text(
    f"INSERT INTO prove_rebuilt (article, sales, pieces, projected_version, projected_index, "
    f"projected_count, deleted, projected_at) SELECT f.*, 0, 0, 1, false, now() FROM ({_FOLDED}) f"
)


# -- meanwhile ---------------------------------------------------------------------------------------------------------


@dataclass
class Life:
    """What went on meanwhile."""

    written: int = 0
    queries: int = 0
    failures: list[str] = field(default_factory=list)
    half: int = 0
    """Queries that saw fewer sales than one before them."""
    slowest: float = 0.0


async def live(url: str, rate: int, seed: int, is_over: Callable[[], bool], begun: Callable[[], object]) -> Life:
    """Write, project and read until it is over; then project the rest. ``begun`` is called when all are at work."""
    life, draw = Life(), random.Random(seed)
    box, consumer = projected(url)
    async with box:
        running = asyncio.create_task(consumer.run())
        async with asyncio.TaskGroup() as group:
            group.create_task(_tell_when_at_work(consumer, life, begun, is_over))
            group.create_task(_write(box, rate, draw, life, is_over))
            for _ in range(READERS):
                group.create_task(_read(box, life, is_over))
        consumer.stop()
        await running
        await consumer.drain()
    await box.engine.dispose()
    return life


async def _tell_when_at_work(
    consumer: ProjectionConsumer, life: Life, begun: Callable[[], object], is_over: Callable[[], bool]
) -> None:
    while not is_over():
        if life.written and life.queries >= READERS and consumer.status()["handled"]:
            begun()
            return
        await asyncio.sleep(0.01)


async def _write(box: Pillarbox, rate: int, draw: random.Random, life: Life, is_over: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not is_over():
        due = int((time.monotonic() - began) * rate) - life.written
        if due > 0:
            async with box.unit_of_work() as uow:
                for _ in range(due):
                    article = f"a{draw.randrange(ARTICLES)}"
                    uow.publish(PieceSold(article=article, pieces=draw.randrange(9)), key=article)
            life.written += due
        await asyncio.sleep(0.1)


async def _read(box: Pillarbox, life: Life, is_over: Callable[[], bool]) -> None:
    """Ask on one connection after the other, so that prepared statements outlive the swap."""
    asked = text("SELECT sum(sales), count(*) FROM prove_rebuilt")
    seen = 0
    while not is_over():
        try:
            async with box.engine.connect() as connection:
                for _ in range(50):
                    began = time.monotonic()
                    sales, _ = (await connection.execute(asked)).one()
                    await connection.rollback()
                    life.slowest = max(life.slowest, time.monotonic() - began)
                    life.queries += 1
                    life.half += sales < seen
                    seen = max(seen, sales)
                    await asyncio.sleep(0.005)
        except Exception as error:
            life.failures.append(f"{type(error).__name__}: {error}")


def _in_process(url: str, rate: int, seed: int, pipe: Pipe) -> None:
    life = asyncio.run(live(url, rate, seed, pipe.poll, lambda: pipe.send("begun")))
    pipe.send(asdict(life))


# -- the proof ---------------------------------------------------------------------------------------------------------


async def rebuild(url: str, progress: Callable[[Progress], None] | None = None) -> Rebuilt:
    """What is to be proved."""
    box, consumer = projected(url)
    async with box:
        done = await consumer.rebuild(progress=progress)
    await box.engine.dispose()
    return done


async def violations(url: str, done: Rebuilt, life: Life) -> list[str]:
    """What should not be."""
    found = [*life.failures]
    if life.half:
        found.append(f"{life.half} queries saw less than others had seen before")
    box, consumer = projected(url)
    async with box, box.engine.connect() as connection:
        table = (await connection.execute(text("SELECT article, sales, pieces FROM prove_rebuilt"))).all()
        folded = (await connection.execute(text(_FOLDED))).all()
        known = consumer_id(consumer.name, done.generation)
        seen = await connection.scalar(text("SELECT count(*) FROM pillarbox_inbox WHERE consumer = :it"), {"it": known})
        total = await connection.scalar(text("SELECT count(*) FROM pillarbox_outbox"))
        others = await connection.scalar(text("SELECT count(*) FROM pillarbox_inbox")) - seen
    await box.engine.dispose()
    if sorted(map(tuple, table)) != sorted(map(tuple, folded)):
        found.append("the table is not what the events say")
    if seen != total:
        found.append(f"the inbox knows {seen} of {total} events")
    if others:
        found.append(f"{others} rows of old generations are left in the inbox")
    return found


def prove(url: str, events: int, rate: int, seed: int) -> dict[str, Any]:
    """The ledger. What is wrong is in its ``violations``."""
    asyncio.run(set_up(url, events))
    mine, theirs = multiprocessing.Pipe()
    given = (url, rate, seed, theirs)
    process = multiprocessing.get_context("spawn").Process(target=_in_process, args=given, daemon=True)
    process.start()
    theirs.close()  # so that we are told if the process ends
    if not mine.poll(60):
        raise TimeoutError("writer, projection and readers are not at work after a minute")
    mine.recv()
    stages: dict[Stage, float] = {}
    began = time.monotonic()

    def tell(progress: Progress) -> None:
        if progress.stage not in stages:
            stages[progress.stage] = round(time.monotonic() - began, 1)

    done = asyncio.run(rebuild(url, tell))
    mine.send("over")
    life = msgspec.convert(mine.recv(), Life)
    process.join()
    wrong = asyncio.run(violations(url, done, life))
    return {
        "seed": seed,
        **asdict(done),
        "per_second": round(done.events / done.seconds),
        "reached_after": stages,
        "written_meanwhile": life.written,
        "queries": life.queries,
        "slowest_query": round(life.slowest, 3),
        "violations": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    servers = Servers()
    os.environ["PILLARBOX_HOME"] = str(servers.folder / "home")
    try:
        database = servers.create_database("embedded")
        ledger = prove(database.url(), given.events, given.rate, given.seed)
    finally:
        servers.stop()
    print(json.dumps(ledger, indent=2))
    return 1 if ledger["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
