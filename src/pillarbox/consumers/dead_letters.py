"""The dead-letter topic of a consumer, ``<topic>.dlq``: where other systems see which messages have failed.

The failed delivery in the database is what counts, and the topic shows it: the message goes there by the outbox, so it
is there however long the broker is away, and once, however often its lane comes to it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from sqlalchemy import Connection

from ..errors import DuplicateEventError
from ..outbox import Delivery, count_rows, shard_of
from ..route import MAX_TOPIC, Route
from ..transport import Message
from .box import OUTBOX, Box
from .spilling import Trouble, is_storable_key, storable
from .window import Work

logger = logging.getLogger("pillarbox")

SUFFIX = ".dlq"
_ROUTE = "dlq:"
_NO_EVENT = "pillarbox.dead_letter"
"""The pattern of the route: no event is called so, and none goes this way by itself."""


def consumer_of(route: str) -> str | None:
    """Whose dead letters go by the route of this name, each to a topic beside the one that its message came by; None if
    it is a route for events.
    """
    return route.removeprefix(_ROUTE) if route.startswith(_ROUTE) else None


class DeadLetterRoute:
    """Sends copies of messages that have failed."""

    def __init__(self, consumer: str, route: Route, box: Box) -> None:
        self._consumer = consumer
        self._route = route
        self._box = box
        self._told = False

    @classmethod
    def of(cls, consumer: str, source: str, box: Box) -> DeadLetterRoute | None:
        """None if there is no broker to send copies to."""
        if source == OUTBOX or not box.router.reaches(source):
            return None
        route = Route(_NO_EVENT, to=source, topic=f"{consumer}{SUFFIX}", name=_ROUTE + consumer, on_failure="skip")
        box.router.add(route)
        return cls(consumer, route, box)

    async def copy(self, failed: Sequence[tuple[Work, Trouble]]) -> None:
        """Send copies of these messages, each unless it was sent before."""
        deliveries = [self._delivery(*each) for each in failed if self._has_room(each[0].message)]
        if not deliveries:
            return
        try:
            prepared = await self._box.apart(self._write, deliveries)
        except DuplicateEventError:
            if len(failed) > 1:
                for each in failed:
                    await self.copy([each])
            return
        self._box.posts.committed(count_rows(deliveries, {}), prepared)

    def _has_room(self, message: Message) -> bool:
        """Whether the outbox takes the name of the topic. If not, the failed delivery is there all the same."""
        size = len(message.topic)
        if size + len(SUFFIX) <= MAX_TOPIC:
            return True
        if not self._told:
            self._told = True
            logger.warning(
                "consumer %s: a topic of %d characters leaves no room for %r in the %d that there may be: its "
                "failed messages are in the database alone",
                *(self._consumer, size, SUFFIX, MAX_TOPIC),
            )
        return False

    def _write(self, connection: Connection, deliveries: list[Delivery]) -> Any:
        prepared = self._box.posts.prepare(connection)
        self._box.posts.append(connection, deliveries)
        return prepared

    def _delivery(self, work: Work, trouble: Trouble) -> Delivery:
        message = work.message
        inbox_id = trouble.arrival.event_id if work.claim is None else work.claim.inbox_id
        key = message.key if message.key and is_storable_key(message.key) else str(inbox_id)
        return Delivery(
            # The outbox may hold the event itself under its own id.
            event_id=uuid5(NAMESPACE_OID, f"{self._route.name} {work.tenant} {inbox_id}"),
            event_type=storable(message.headers.get("event_type", ""))[:200] or _NO_EVENT,
            route=self._route.id,
            shard=shard_of(key, self._box.router.shards),
            schema_version=1,
            topic=storable(message.topic) + SUFFIX,
            key=key,
            tenant=trouble.tenant,
            headers={
                **{storable(name): storable(value) for name, value in message.headers.items()},
                "dlq_consumer": self._consumer,
                "dlq_reason": trouble.reason,
                "dlq_topic": storable(message.topic),
                "dlq_attempts": str(message.attempts + 1),
            },
            body=message.body,
        )
