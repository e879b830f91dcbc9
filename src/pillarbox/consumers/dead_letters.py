"""The dead-letter topic of a consumer, ``<topic>.dlq``: where other systems see what has become a letter.

The letter in the database is what counts. The topic shows it: the message goes there by the outbox, in the transaction
that writes the letter, so it is there if and only if the letter is, however long the broker is away.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .. import clock
from ..inbox import Letter, LetterKind
from ..outbox import Delivery, stable_hash
from ..route import MAX_TOPIC, Route, Router
from .home import OUTBOX, Home

logger = logging.getLogger("pillarbox")

SUFFIX = ".dlq"
_ROUTE = "dlq:"
_NOBODYS_EVENT = "pillarbox.letter"
"""The pattern of the route: no event is called so, and none goes this way by itself."""


def consumer_of(route: str) -> str | None:
    """Whose dead letters go by the route of this name, each to a topic beside the one that its message came by; None if
    it is a route for events.
    """
    return route.removeprefix(_ROUTE) if route.startswith(_ROUTE) else None


class DeadLetterRoute:
    """Makes deliveries of letters."""

    def __init__(self, route: Route, router: Router) -> None:
        self._route = route
        self._router = router
        self._told = False

    @classmethod
    def of(cls, consumer: str, source: str, home: Home) -> DeadLetterRoute | None:
        """None if there is no broker to send letters to."""
        if source == OUTBOX or not home.router.reaches(source):
            return None
        route = Route(_NOBODYS_EVENT, to=source, topic=f"{consumer}{SUFFIX}", name=_ROUTE + consumer, on_failure="skip")
        home.router.add(route)
        return cls(route, home.router)

    def deliveries(self, letters: Sequence[Letter]) -> list[Delivery]:
        """What a rejected event says is well known; the others go to the topic."""
        shown = [letter for letter in letters if letter.kind is not LetterKind.REJECTED]
        return [self._delivery(letter) for letter in shown if self._has_room(letter)]

    def _has_room(self, letter: Letter) -> bool:
        """Whether the outbox takes the name of the topic. If not, the letter is there all the same."""
        size = len(letter.message.topic)
        if size + len(SUFFIX) <= MAX_TOPIC:
            return True
        if not self._told:
            self._told = True
            logger.warning(
                "consumer %s: a topic of %d characters leaves no room for %r in the %d that there may be: letters "
                "about its messages are in the table alone",
                *(letter.consumer, size, SUFFIX, MAX_TOPIC),
            )
        return False

    def _delivery(self, letter: Letter) -> Delivery:
        message = letter.message
        key = message.key or str(letter.event_id or letter.consumer)
        return Delivery(
            event_id=clock.new_id(),  # the outbox may hold the event itself under its own id
            event_type=letter.event_type or _NOBODYS_EVENT,
            route=self._route.id,
            shard=stable_hash(key) % self._router.shards,
            schema_version=letter.schema_version,
            topic=message.topic + SUFFIX,
            key=key,
            tenant=letter.tenant,
            headers={
                **message.headers,
                "dlq_consumer": letter.consumer,
                "dlq_kind": letter.kind.value,
                "dlq_reason": letter.reason,
                "dlq_topic": message.topic,
                "dlq_attempts": str(letter.attempts),
            },
            body=message.body,
        )
