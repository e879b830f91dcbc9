"""The consumer of a projection, and its rebuild."""

from __future__ import annotations

from sqlalchemy import Connection

from ..consumers.consumer import Consumer
from ..inbox import consumer_id
from ..stores import inbox as stored
from .projection import Projection
from .rebuild import From, Rebuild, Rebuilt, Tell


class ProjectionConsumer(Consumer):
    """Made by ``box.projection()``."""

    kind = "projection"
    effects: Projection

    def identify(self, connection: Connection) -> int:
        """The number of its generation, which no rebuild changes before this transaction ends."""
        stored.read_committed(connection)
        return consumer_id(self.name, stored.hold_generation(connection, self.name))

    async def rebuild(
        self, source: From = "outbox", *, incomplete: bool = False, progress: Tell | None = None
    ) -> Rebuilt:
        """Compute the rows again, from the events in the outbox, at the broker, or in these archives and the outbox,
        and replace the live rows. The consumer may run meanwhile, in this process and in others.

        A `StoreError` if the live table has had events that the source lacks, unless the new one may be ``incomplete``.
        ``progress`` is called with each `Progress`, and may be async.
        """
        await self.register()
        rebuild = Rebuild(self, self.effects, self._box.engine, self._reader, self._inbox, progress)
        return await rebuild.run(source, incomplete=incomplete)
