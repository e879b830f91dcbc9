"""Writers that use the shipped collection code: plain sessions on SQLite in memory, each run to its end at one instant.

What must come of a program of flushes, savepoints and rollbacks is kept in the ledger by the rules alone; what the
outbox holds after its COMMIT goes to the relays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import Connection, Engine, StaticPool, create_engine, delete, insert, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pillarbox import session as sessions
from pillarbox.aggregate import Aggregate
from pillarbox.codecs import Codecs
from pillarbox.commit import guard_commits
from pillarbox.event import IntegrationEvent
from pillarbox.outbox import Delivery, Key, NewRows
from pillarbox.route import Route, Router
from pillarbox.stores import sqlite
from pillarbox.stores.append import Appender
from pillarbox.stores.migrations import migrate
from pillarbox.stores.tables import outbox
from pillarbox.telemetry import SILENT
from pillarbox.tenancy import Tenancy
from tests.simulation.checker import Entry
from tests.simulation.writers import Transaction, Writers

if TYPE_CHECKING:
    from .world import World


class Moved(IntegrationEvent, name="simulation.account.moved", version=1):
    """Something that happens to accounts."""

    step: int


class _Base(DeclarativeBase):
    pass


class Account(Aggregate, _Base):
    """Something that it happens to."""

    __tablename__ = "simulated_accounts"

    name: Mapped[str] = mapped_column(primary_key=True)
    steps: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  SQLAlchemy's way


class _Outbox:
    """What a session sees of its box."""

    tenancy = Tenancy()
    signals = SILENT
    inside: Mapping[str, Sequence[Callable[[Any, Any], Any]]] = {}

    def __init__(self, router: Router) -> None:
        self.router = router
        self._appender = Appender()

    def configure_transactions(self, engine: Engine) -> None:
        guard_commits(engine)
        sqlite.configure_transactions(engine)

    def prepare(self, _connection: Connection) -> None:
        """The relays' store knows the routes already."""

    def append(self, connection: Connection, deliveries: list[Delivery]) -> None:
        self._appender.append(connection, deliveries)

    def committed(self, rows: NewRows, prepared: None) -> None:
        """Nobody is to be told."""


class SessionWriters(Writers):
    """A service that works with aggregates."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        routes = [Route("simulation.**", to=it.destination, topic=it.topic, name=it.name) for it in world.routes]
        self._maker = sessionmaker(_engine(), expire_on_commit=False)
        sessions.bind(self._maker, _Outbox(Router(routes, Codecs(()).named, {}, world.shards)))
        self._steps = 0
        with _engine().begin() as connection:
            connection.execute(delete(outbox))
            connection.execute(delete(Account.__table__))  # type: ignore[arg-type]
            names = dict.fromkeys(key.key for key in self._keys)
            connection.execute(insert(Account), [{"name": name, "steps": 0, "version": 1} for name in names])

    def _start(self) -> None:
        draw = self._world.draw
        with self._maker() as session:
            frames: list[list[tuple[UUID, Key]]] = [[]]
            for _ in range(draw.randrange(1, 9)):
                getattr(self, draw.choice(_STEPS))(session, frames)
            if draw.random() < 0.15:
                session.rollback()
                return
            session.commit()
        self._hand_over([event for frame in frames for event in frame])

    def _raise(self, session: Session, frames: list[list[tuple[UUID, Key]]]) -> None:
        account = session.get_one(Account, self._world.draw.choice(self._keys).key)
        account.steps += self._world.draw.randrange(2)  # often nothing has changed but that something is said
        account.raise_event(event := self._event_of())
        frames[-1].append((event.event_id, Key(None, account.name)))

    def _publish(self, session: Session, frames: list[list[tuple[UUID, Key]]]) -> None:
        key = self._world.draw.choice(self._keys)
        if key.tenant is not None:  # the others are accounts
            event = self._event_of()
            sessions.bound_session(session).collector.publish(event, key.key, key.tenant, ordered=False)
            frames[-1].append((event.event_id, key))

    def _event_of(self) -> Moved:
        self._steps += 1
        event = Moved(step=self._steps)
        self._burden(event.event_id)
        return event

    def _flush(self, session: Session, _frames: object) -> None:
        session.flush()

    def _save(self, session: Session, frames: list[list[tuple[UUID, Key]]]) -> None:
        session.begin_nested()
        frames.append([])

    def _release(self, session: Session, frames: list[list[tuple[UUID, Key]]]) -> None:
        if len(frames) > 1 and (savepoint := session.get_nested_transaction()):
            savepoint.commit()
            inner = frames.pop()
            frames[-1] += inner

    def _undo(self, session: Session, frames: list[list[tuple[UUID, Key]]]) -> None:
        if len(frames) > 1 and (savepoint := session.get_nested_transaction()):
            savepoint.rollback()
            frames.pop()

    def _hand_over(self, events: Sequence[tuple[UUID, Key]]) -> None:
        with _engine().begin() as connection:
            rows = connection.execute(select(outbox).order_by(outbox.c.id)).all()
            connection.execute(delete(outbox))
        deliveries = [_delivery(row) for row in rows]
        bodies = {delivery.event_id: delivery.body for delivery in deliveries}
        entries = [
            Entry(route.topic, key.tenant, key.key, event_id, bodies.get(event_id, b""))
            for event_id, key in events
            for route in self._world.routes
        ]
        store = self._world.store
        self.commit(Transaction(store.begin(), store.reserve(len(deliveries)), deliveries, set()), entries)


_STEPS = (*["_raise"] * 4, "_publish", "_publish", "_flush", "_save", "_save", "_release", "_undo")


@cache
def _engine() -> Engine:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    sqlite.configure_transactions(engine)
    with engine.begin() as connection:
        migrate(connection)
        _Base.metadata.create_all(connection)
    return engine


def _delivery(row: Any) -> Delivery:
    headers = json.loads(row.headers) if isinstance(row.headers, str) else row.headers
    return Delivery(
        row.event_id,
        row.event_type,
        row.route,
        row.shard,
        row.schema_version,
        row.topic,
        row.key,
        row.tenant,
        headers,
        row.body,
    )
