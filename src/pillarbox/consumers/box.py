"""What a consumer needs of its box."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine

from ..codecs import Codecs
from ..collector import Outbox
from ..outbox import Appends, OutboxStore
from ..relay import Relay
from ..route import Router
from ..telemetry import Signals
from ..transport import Publisher
from ..unit_of_work import UnitOfWork

_Found = TypeVar("_Found")

OUTBOX = "outbox"
"""The source of consumers that need no broker."""


class Inbound(Appends, OutboxStore, Protocol):
    """The store of inbound lanes."""


class Box(Protocol):
    """The box, as its consumers see it."""

    router: Router
    signals: Signals
    codecs: Codecs

    @property
    def posts(self) -> Outbox:
        """Its outbox."""
        ...

    @property
    def engine(self) -> AsyncEngine:
        """The database of the inbox and of the effects."""
        ...

    @property
    def takes_turns(self) -> bool:
        """Whether the database has one writer at a time."""
        ...

    @property
    def turn(self) -> AbstractAsyncContextManager[object]:
        """What an effect waits for if relays use the only connection, too."""
        ...

    def unit_of_work(
        self, *, tenant: str | None = None, timeout: float | None = None, new_transaction: bool = False
    ) -> UnitOfWork:
        """See `Pillarbox.unit_of_work`."""
        ...

    async def within(self, uow: UnitOfWork, function: Callable[..., _Found], *arguments: Any) -> _Found:
        """Call a function of a connection, in the transaction of a unit of work."""
        ...

    async def apart(self, function: Callable[..., _Found], *arguments: Any, **options: Any) -> _Found:
        """Call a function of a connection, in a transaction of its own, which is committed."""
        ...

    @property
    def inbound(self) -> Inbound:
        """Where spilled messages are stored."""
        ...

    def relay_to(self, consumer: str, destination: Publisher, grace: float, *, inbound: bool) -> Relay:
        """A relay for the lanes of this consumer: those of the outbox, or the inbound ones."""
        ...
