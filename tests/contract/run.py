"""Runs a contract program unchanged: ``python run.py PROGRAM [URL ...]``.

Until the relay is there, a stand-in claims the rows from the store, hands them to the memory transport and the
handlers, and settles them; everything else is the real thing.
"""

from __future__ import annotations

import runpy
import sys

from pillarbox import Message, Pillarbox
from pillarbox.outbox import BUS, Batch
from pillarbox.transports.memory import MemoryTransport


class StandIn:
    """Sends everything that is there, in order, and settles it."""

    def __init__(self, box: Pillarbox) -> None:
        self._box = box

    async def drain(self) -> None:
        store = self._box.store
        destinations = [*self._box.transports, BUS]
        for lane in await store.take("stand-in", lease=0.001, limit=10_000, destinations=destinations):
            page = await store.poll(lane, limit=1000)
            if page.fresh:
                announced = await store.announce(lane, Batch(items=[row.id for row in page.fresh]), settle=False)
                for _, row in await store.rebuild(announced):
                    await self._send(lane.route.destination, Message(row.topic, row.key, row.body, row.headers))
                await store.settle(announced)

    async def _send(self, destination: str, message: Message) -> None:
        if destination == BUS:
            await self._box.handlers[message.topic](self._box.decode(message))
        else:
            transport = self._box.transports[destination]
            assert isinstance(transport, MemoryTransport)
            transport._topics[message.topic].append(message)


if __name__ == "__main__":
    Pillarbox.relay = property(lambda box: lambda: StandIn(box))  # type: ignore[attr-defined]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
