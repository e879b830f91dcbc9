"""The consumer of a projection, which can be rebuilt."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

from ..consumers.consumer import Consumer
from ..inbox import consumer_id
from ..stores import inbox as stored
from .projection import Projection
from .rebuild import From, Rebuild, Rebuilt, Tell


class ProjectionConsumer(Consumer):
    """Made by ``box.projection()``."""

    kind = "projection"

    def __init__(self, name: str, home: Any, effects: Projection, **options: Any) -> None:
        self.projection = effects
        super().__init__(name, home, effects, **options)

    def identify(self, connection: Connection) -> int:
        """The number of its generation, which stays as it is as long as this transaction does."""
        stored.read_committed(connection)
        return consumer_id(self.name, stored.hold_generation(connection, self.name))

    async def rebuild(
        self, source: From = "outbox", *, incomplete: bool = False, progress: Tell | None = None
    ) -> Rebuilt:
        """Write the table anew, from the events in the outbox, at the broker, or in these archives and then in the
        outbox, and replace the old rows by the new ones. It may run meanwhile, here and elsewhere.

        Refused if the old table has had events that are not found there, unless the new one may be ``incomplete``.
        ``progress`` is told how far it has come, and may be async.
        """
        await self.register()
        rebuild = Rebuild(
            name=self.name,
            engine=self._home.engine,
            live=self.projection,
            reader=self._reader,
            source=self.source,
            topics=self.topics,
            subscriber=self.subscriber,
            inbox=self._inbox,
            progress=progress,
        )
        return await rebuild.run(source, incomplete=incomplete)
