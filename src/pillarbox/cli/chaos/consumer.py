"""A consumer of the chaos: what ``pillarbox consume`` does, on a link that is bad."""

from __future__ import annotations

import logging

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from ...app import Pillarbox
from ...transports.pulsar import PulsarSubscriber
from ..demo.child import Told, live, work_until_told
from .shop import TOPIC, Counted, Things, effects


async def consumer(told: Told) -> None:
    """Consume until SIGTERM: effects by a handler, one for each event, and counts by a projection."""
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {told['name']} %(levelname)s %(message)s")
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)  # as in the command line
    pulsar = PulsarSubscriber(told["pulsar"])
    async with Pillarbox(told["url"]) as box:
        noting = box.consumer("chaos-effects", source=pulsar, topics=[TOPIC], timeout=told["timeout"])
        counting = box.projection(Things, source=pulsar, topics=[TOPIC], timeout=told["timeout"])

        @noting.on(Counted)
        async def note(event: Counted, session: AsyncSession) -> None:
            await session.execute(sa.insert(effects).values(event_id=event.event_id))

        await work_until_told(noting, counting)


if __name__ == "__main__":
    live(consumer)
