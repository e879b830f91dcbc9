"""What one event costs a business transaction: transactions per second with and without, in the same run.

Four variants take turns on one PostgreSQL with default durability, in slices, so that a noisy machine hits all of them
alike:

    plain      an AsyncSession on asyncpg inserts an order; Pillarbox is not bound
    hand       the same, and one outbox row by a Core insert: what a team writes by hand
    own        the same in a session of one's own that is bound to a box, and one published event
    pillarbox  the same in a unit of work, and one published event
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    DateTime,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    Uuid,
    func,
    insert,
    text,
)
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import IntegrationEvent, Pillarbox, Route
from pillarbox.transports.memory import MemoryTransport

from .figures import PAYLOAD_BYTES
from .servers import Bench


class OrderCreated(IntegrationEvent, name="bench.order.created", version=1):
    seq: int
    tenant: str
    order_id: UUID
    customer: str
    amount: int
    note: str


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "bench_orders"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    customer: Mapped[str] = mapped_column(Text)
    amount: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


HAND = Table(
    "bench_hand_outbox",
    MetaData(),
    Column("id", BigInteger, primary_key=True),
    Column("topic", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("headers", JSON),
    Column("xid", Text, server_default=text("pg_current_xact_id()"), nullable=False),
    Column("created_at", DateTime(timezone=True), server_default=func.now(), nullable=False),
    Column("sent_at", DateTime(timezone=True)),
    Column("lease_token", Uuid),
    Column("lease_until", DateTime(timezone=True)),
)

Transaction = Callable[[int], Awaitable[None]]


def fields(seq: int) -> dict[str, object]:
    body: dict[str, object] = {
        "seq": seq,
        "tenant": f"tenant-{seq % 50}",
        "order_id": UUID(int=seq),
        "customer": f"customer-{seq % 1000}",
        "amount": seq % 10_000,
    }
    body["note"] = "x" * (PAYLOAD_BYTES - len(json.dumps(body, default=str, separators=(",", ":"))) - 10)
    return body


def order(seq: int) -> Order:
    return Order(customer=f"customer-{seq % 1000}", amount=seq % 10_000)


def variants(engine: AsyncEngine, box: Pillarbox) -> dict[str, Transaction]:
    plain_sessions = async_sessionmaker(engine, expire_on_commit=False)
    bound_sessions = box.bind(async_sessionmaker(box.engine, expire_on_commit=False))
    hand_insert = insert(HAND)

    async def plain(seq: int) -> None:
        async with plain_sessions() as session, session.begin():
            session.add(order(seq))

    async def hand(seq: int) -> None:
        payload = json.dumps(fields(seq), default=str, separators=(",", ":")).encode()
        async with plain_sessions() as session, session.begin():
            session.add(order(seq))
            await session.execute(hand_insert, {"topic": "orders", "key": str(seq), "payload": payload})

    async def own(seq: int) -> None:
        event = OrderCreated(**fields(seq))  # type: ignore[arg-type]
        async with bound_sessions() as session, session.begin():
            session.add(order(seq))
            box.publish(session, event, key=str(seq))

    async def pillarbox(seq: int) -> None:
        event = OrderCreated(**fields(seq))  # type: ignore[arg-type]
        async with box.unit_of_work() as uow:
            uow.add(order(seq))
            uow.publish(event, key=str(seq))

    return {"plain": plain, "hand": hand, "own": own, "pillarbox": pillarbox}


async def rate(transaction: Transaction, connections: int, seconds: float, first: int) -> float:
    """Transactions per second over a slice of time."""
    deadline = time.perf_counter() + seconds
    done = 0

    async def work(seq: int) -> None:
        nonlocal done
        while time.perf_counter() < deadline:
            await transaction(seq)
            seq += connections
            done += 1

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for worker in range(connections):
            group.create_task(work(first + worker))
    return done / (time.perf_counter() - started)


async def measure(bench: Bench) -> dict[str, float]:
    """All figures, by name. Those without a number of connections are those of the most."""
    sizes = bench.sizes
    most = max(sizes.connections)
    results: dict[str, float] = {}
    async with bench.database() as url:
        plain_engine = create_async_engine(url, pool_size=most + 4, max_overflow=0)
        engine = create_async_engine(url, pool_size=most + 4, max_overflow=0)
        try:
            async with Pillarbox(
                engine,
                transports={"broker": MemoryTransport()},
                routes=[Route("bench.**", to="broker", topic="bench.order.events")],
            ) as box:
                await prepare(box)
                for connections in sizes.connections:
                    results |= await pairs(variants(plain_engine, box), connections, sizes.slice_seconds, sizes.rounds)
        finally:
            await engine.dispose()
            await plain_engine.dispose()
    return results | {name: results[f"{name}_{most}"] for name in ("write_ratio", "write_to_hand_ratio")}


async def prepare(box: Pillarbox) -> None:
    await box.migrate()
    async with box.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
        await connection.run_sync(HAND.metadata.create_all)
        await connection.execute(text("CREATE INDEX ON bench_hand_outbox (id) WHERE sent_at IS NULL"))


async def pairs(choices: dict[str, Transaction], connections: int, seconds: float, rounds: int) -> dict[str, float]:
    """Every variant in turn, so many rounds; ratios are medians over neighbours."""
    runs: dict[str, list[float]] = {name: [] for name in choices}
    sequence = 0
    for transaction in choices.values():
        await rate(transaction, connections, seconds / 4, sequence := sequence + 1_000_000)
    for turn in range(rounds):
        names = list(choices) if turn % 2 == 0 else list(choices)[::-1]
        for name in names:
            runs[name].append(await rate(choices[name], connections, seconds, sequence := sequence + 1_000_000))
    suffix = f"_{connections}"

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(runs[one], runs[other], strict=True))

    return {
        **{f"write_tps_{name}{suffix}": statistics.median(values) for name, values in runs.items()},
        f"write_ratio{suffix}": ratio("pillarbox", "plain"),
        f"write_hand_ratio{suffix}": ratio("hand", "plain"),
        f"write_own_ratio{suffix}": ratio("own", "plain"),
        f"write_to_hand_ratio{suffix}": ratio("pillarbox", "hand"),
    }


def report(results: Mapping[str, Any]) -> str:
    """A table: rates, then ratios. ``to hand`` is the unit of work by the hand-written variant of the same run."""
    lines = [
        "write: transactions per second, one event each",
        "connections    plain     hand      own  pillarbox   ratio  by hand  own ratio  to hand",
    ]
    prefix = "write_ratio_"
    for connections in sorted(int(name.removeprefix(prefix)) for name in results if name.startswith(prefix)):
        tps = [results[f"write_tps_{name}_{connections}"] for name in ("plain", "hand", "own", "pillarbox")]
        ratios = [
            results[f"write_{name}_{connections}"] for name in ("ratio", "hand_ratio", "own_ratio", "to_hand_ratio")
        ]
        lines.append(
            f"{connections:11} {tps[0]:8,.0f} {tps[1]:8,.0f} {tps[2]:8,.0f} {tps[3]:10,.0f} "
            f"{ratios[0]:7.2f} {ratios[1]:8.2f} {ratios[2]:10.2f} {ratios[3]:8.2f}"
        )
    return "\n".join(lines)
