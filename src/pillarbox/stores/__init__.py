"""Stores: deliveries and their progress in a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..errors import ConfigurationError, MissingExtraError
from ..outbox import OUTBOUND, Appends, LaneStore, OutboxStore

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine

    from ..telemetry import Signals
    from .feed import Feed
    from .log import LogStore
    from .queue import QueueStore


class SqlStore(LaneStore, OutboxStore, Appends, Protocol):
    """A store on a relational database, for relays and for sessions."""

    def install_id(self, connection: Connection) -> UUID:
        """The id of the installation whose tables this connection sees."""
        ...

    def committed(self, connection: Connection, written: tuple[UUID, int, int]) -> bool:
        """Whether the transaction that wrote this row has committed. Waits for it if it is still running."""
        ...


def store_on(engine: AsyncEngine, table: str = OUTBOUND) -> LogStore | QueueStore:
    """The store for one table of deliveries: a log on PostgreSQL, a queue elsewhere."""
    if engine.dialect.name == "postgresql":
        from .log import LogStore  # noqa: PLC0415  loaded only where it is used

        return LogStore(engine, table)
    from .queue import QueueStore  # noqa: PLC0415  as above

    return QueueStore(engine, table)


def streaming_on(
    engine: AsyncEngine, relay: str, slot: str | None, buffer_bytes: int, signals: Signals
) -> tuple[LogStore, Feed]:
    """The store for a relay that reads bodies by logical replication, and the feed of its stream."""
    if engine.dialect.name != "postgresql":
        raise ConfigurationError(
            f'source "cdc" reads the replication stream of PostgreSQL, not of {engine.dialect.name}'
        )
    try:
        from .feed import Feed  # noqa: PLC0415  an extra
    except ImportError as error:
        raise MissingExtraError('source "cdc"', extra="cdc") from error
    from .buffer import Buffer  # noqa: PLC0415  loaded only where it is used
    from .cdc import CdcStore  # noqa: PLC0415  as above

    buffer = Buffer(buffer_bytes)
    return CdcStore(engine, buffer, signals), Feed(engine, buffer, relay=relay, slot=slot, signals=signals)
