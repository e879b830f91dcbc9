"""A writer of the chaos: a process with several tasks that commit, roll back, hesitate and lose their connections.

Of every transaction it says how it ended, as far as it can know: ``unknown`` if COMMIT was sent and not answered.
"""

from __future__ import annotations

import asyncio
import random
import time
from enum import StrEnum

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from ...app import Pillarbox
from ...errors import CommitOutcomeUnknown, PillarboxError
from ...transports.pulsar import PulsarTransport
from ..demo.child import Told, live, say
from .shop import Counted, counters, keys, ledger, route

TASKS = 3
MOST_PER_TRANSACTION = 8
ROLLED_BACK = 0.1
HESITATES = 0.1
"""How many transactions stay open for a while, so that later ones overtake them."""


class Ending(StrEnum):
    """How a transaction ended, as its writer knows."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    UNKNOWN = "unknown"


class Written(msgspec.Struct, frozen=True):
    """A transaction."""

    ending: Ending
    events: list[str]
    at: float


class _ChangedItsMind(Exception):  # noqa: N818  an outcome, not a failure
    """The business rolls back."""


async def write(told: Told) -> None:
    """Write until we are told to stop; say that it is done, and wait to be ended."""
    engine = create_async_engine(told["url"], isolation_level="READ COMMITTED", pool_pre_ping=True, pool_size=TASKS)
    # It sends nothing; the route only has to know what its messages may look like.
    pulsar = PulsarTransport("pulsar://127.0.0.1:1", admin_url="http://127.0.0.1:1")
    async with Pillarbox(engine, transports={route.to: pulsar}, routes=[route]) as box:
        async with asyncio.TaskGroup() as group:
            for task in range(TASKS):
                draw = random.Random(f"{told['seed']} writer {told['number']} {task}")  # noqa: S311  repeatable
                group.create_task(_write(box, draw, told))
        say(None)
        await asyncio.Event().wait()


async def _write(box: Pillarbox, draw: random.Random, told: Told) -> None:
    while not told.get("stop"):
        await asyncio.sleep(draw.expovariate(told["per_second"] / TASKS))
        chosen = draw.sample(keys(told["number"]), draw.randint(1, MOST_PER_TRANSACTION))
        events: list[str] = []
        ending = Ending.COMMITTED
        try:
            await _transaction(box, draw, chosen, events)
        except CommitOutcomeUnknown:
            ending = Ending.UNKNOWN
        except (_ChangedItsMind, DBAPIError, PillarboxError, OSError, TimeoutError):
            ending = Ending.ROLLED_BACK
        say(Written(ending, events, time.time()))


async def _transaction(box: Pillarbox, draw: random.Random, chosen: list[str], events: list[str]) -> None:
    async with box.unit_of_work() as uow:
        ours = counters.c.key.in_(chosen)
        # Locked one after the other, so that no two wait for each other.
        await uow.session.execute(sa.select(counters.c.key).where(ours).order_by(counters.c.key).with_for_update())
        raised = sa.update(counters).where(ours).values(number=counters.c.number + 1)
        entries = []
        for key, number in await uow.session.execute(raised.returning(counters.c.key, counters.c.number)):
            event = Counted(number=number)
            uow.publish(event, key=key)
            events.append(str(event.event_id))
            entries.append({"event_id": event.event_id, "tenant": None, "key": key, "version": number})
        await uow.session.execute(sa.insert(ledger), entries)
        if draw.random() < HESITATES:
            await asyncio.sleep(draw.random() * 0.5)
        if draw.random() < ROLLED_BACK:
            raise _ChangedItsMind


if __name__ == "__main__":
    live(write)
