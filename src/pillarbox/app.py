"""Pillarbox: the one object that holds everything together. Services, the command line and tests all start from it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Self, TypeVar, cast
from uuid import UUID
from weakref import WeakKeyDictionary, WeakSet

from msgspec import structs
from sqlalchemy import Connection, Dialect, Engine, StaticPool
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from . import session as sessions
from .cache import Cache
from .codec import Codec
from .codecs import Codecs
from .commit import guard_commits
from .consumers.box import OUTBOX
from .consumers.consumer import Consumer, Terms
from .consumers.handling import Effects, Handlers, check_handler
from .consumers.intake import Flow
from .consumers.spilling import work_of
from .context import current_context
from .doorbell import Doorbell
from .embedded import EmbeddedPostgres
from .errors import CommitOutcomeUnknown, ConfigurationError, SessionError, StoreError
from .event import EventType, registry
from .gauges import Gauges
from .inbox import DeadLetter
from .lane_report import count_new
from .options import check_numbers
from .outbox import (
    INBOUND,
    INBOX_DESTINATION,
    LOCAL,
    OUTBOUND,
    SHARDS,
    TABLES,
    Delivery,
    NewRows,
    RouteRecord,
    Row,
)
from .projections.consumer import ProjectionConsumer
from .projections.projection import Projection
from .relay import Pacing, Relay, relay_name
from .retry import RetryPolicy
from .route import OnFailure, Route, Router, check_key, check_routes, check_transports, topic_pattern
from .stores import SqlStore, sqlite, store_on, streaming_on
from .stores.apart import Apart, transaction
from .stores.dead_letters import dead_letters
from .stores.drivers import engine_for, with_driver
from .stores.inbox import SqlInbox
from .stores.notify import PostgresCarrier
from .stores.pool import with_own_pool
from .stores.turns import only_turn
from .telemetry import Observer, Signals
from .tenancy import Tenancy, check_role
from .transport import Capabilities, Message, Publisher, Subscriber, TakesTemplates, Transport
from .unit_of_work import EventPublisher, SessionPublisher, UnitOfWork, Watchdog

_Prepared = tuple[Dialect | None, tuple[RouteRecord, ...]]
"""The engine on which routes were registered, if they had to be, and the routes."""
_Handler = TypeVar("_Handler", bound=Callable[..., Any])
_Found = TypeVar("_Found")
_Consumer = TypeVar("_Consumer", bound=Consumer)
_Maker = TypeVar("_Maker", bound="sessionmaker[Any] | async_sessionmaker[Any]")


logger = logging.getLogger("pillarbox")

APART_SECONDS = 60.0
"""Timeout of internal transactions: a connection may be dead and not say so."""
_NOT_STARTED = "the box is not started: use `async with box:`, or await box.start()"
DEAD_LETTERS_AT_ONCE = 100
PROJECTED_AT_ONCE = 500
"""Events of a projection that share a transaction, unless another number is said."""


class Pillarbox:
    """An outbox on one database.

    ``engine`` is an `AsyncEngine`, a database URL, or None for an embedded PostgreSQL that needs no installation.
    ``transports`` are the destinations by name, ``routes`` say which events go to which of them, and ``signals`` are
    told what happens: `pillarbox.prometheus`, `pillarbox.otel`. An engine that you give stays yours: the box does not
    dispose of it.
    """

    def __init__(
        self,
        engine: AsyncEngine | str | None = None,
        *,
        transports: Mapping[str, Transport] | None = None,
        routes: Sequence[Route] = (),
        codecs: Sequence[Codec] = (),
        tenancy: Literal["off", "required"] = "off",
        row_security: bool = False,
        shards: int | None = None,
        slow_after: float | None = 10.0,
        signals: Sequence[Observer] = (),
    ) -> None:
        if engine is not None and not isinstance(engine, (AsyncEngine, str)):
            raise ConfigurationError(
                f"engine must be an AsyncEngine, a database URL or None, got {type(engine).__name__}; "
                "a plain Session is bound with box.bind(sessionmaker(...))"
            )
        if not _all_are(Route, routes) or not isinstance(transports or {}, Mapping):
            raise ConfigurationError(
                'routes is a list of Route, like [Route("orders.**", to="broker", topic="orders")], and transports a '
                "dict of transports by name"
            )
        if not _all_are(Observer, signals):
            raise ConfigurationError(
                "signals is a list of observers, like [PrometheusSignals()]; one of your own is an instance of a "
                "subclass of pillarbox.telemetry.Observer"
            )
        if isinstance(engine, str):
            with_driver(engine)  # refused here, where it is written, and not only when the box is started
        self._given = engine
        self._engine: AsyncEngine | None = None
        self._embedded: EmbeddedPostgres | None = None
        self.transports = dict(transports or {})
        check_transports(self.transports)
        check_routes(routes, self.transports)
        if shards is not None and not 1 <= shards <= 4096:
            raise ConfigurationError(f"shards must be between 1 and 4096, got {shards}")
        self.codecs = Codecs(tuple(codecs))
        self._shards = shards
        self._watchdog = None if slow_after is None else Watchdog(slow_after)
        self._row_security = row_security
        self.tenancy = Tenancy(tenancy, row_security=row_security)
        capabilities = {name: transport.capabilities for name, transport in self.transports.items()}
        self.router = Router(
            routes,
            self.codecs.named,
            {**capabilities, LOCAL: Capabilities(), INBOX_DESTINATION: Capabilities()},
            shards or SHARDS,
        )
        self.doorbell = Doorbell()
        self._relay_engine: AsyncEngine | None = None
        self._relays: WeakSet[Relay] = WeakSet()
        self._started = False
        self._process: int | None = None
        self.signals = Signals(signals)
        """Who is told what this box and its relays do."""
        self.signals.watch(
            Gauges(lambda: self._engine, lambda: [*self._relays, *self.consumers.values(), *self.handlers.values()])
        )
        self._outbox = self.posts = _BoxOutbox(self)
        self._inbox = SqlInbox()
        self.consumers: dict[str, Consumer] = {}
        """The consumers and projections of this box, by name."""
        self.handlers: dict[str, Consumer] = {}
        """What `subscribe` has registered, by name: consumers that every relay of this box runs."""
        self._unit_sessions: async_sessionmaker[AsyncSession] | None = None
        if isinstance(engine, AsyncEngine):
            self._use(engine)

    # -- its life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:  # noqa: ARG002  who asks makes no difference
        """``FastAPI(lifespan=box.lifespan)``: the box starts and stops with the application. `pillarbox.fastapi` has
        one that can do more.
        """
        async with self:
            yield

    async def start(self) -> None:
        """Connect. Starts the embedded PostgreSQL if no engine was given."""
        self._use_in_this_process()
        if self._engine is None:
            if self._given is None:
                self._embedded = EmbeddedPostgres()
                await asyncio.to_thread(self._embedded.start)
                self._use(engine_for(self._embedded.url))
                if self._relay_engine is not None and self._relay_engine.url != self.engine.url:
                    self._relay_engine = None  # its server may have a new address each time
            else:
                self._use(engine_for(str(self._given)))
        if self._row_security:
            async with self.engine.connect() as connection:
                await connection.run_sync(check_role)
        # Our pools share a dialect, which learns about the server with its first connection: two at once would trip.
        with suppress(OSError, SQLAlchemyError):  # a service may start before its database
            await (await self.engine.connect()).close()
        if self.engine.driver in ("asyncpg", "psycopg") and not self._started:
            self.doorbell.use(PostgresCarrier(with_own_pool(self.engine)))
        self._started = True

    async def stop(self) -> None:
        """Stop the relays of this box, and let go of everything that it has opened."""
        self._check_process()
        workers: list[Consumer | Relay] = [*self.consumers.values(), *self._relays]
        for worker in workers:
            worker.stop()
        await asyncio.gather(*(worker.finished() for worker in workers))
        self._started = False
        for name, transport in self.transports.items():
            try:
                await transport.close()
            except Exception:
                logger.exception("transports[%r] cannot be closed", name)
        await self.doorbell.close()
        if self._relay_engine is not None and self._relay_engine is not self._engine:
            await self._relay_engine.dispose()
        if self._relay_engine is self._engine:
            self._relay_engine = None  # any other is kept: its relays may run again when the box is started again
        if self._engine is not None and self._engine is not self._given:
            await self._engine.dispose()
            self._engine = self._unit_sessions = None
            self._outbox.forget()
        if self._embedded is not None:
            await asyncio.to_thread(self._embedded.stop)
            self._embedded = None
        self._process = None

    def _use_in_this_process(self) -> None:
        """From the first use to `stop`, the box belongs to one process."""
        if self._process != os.getpid():
            self._check_process()
            self._process = os.getpid()

    def _check_process(self) -> None:
        # After a fork two processes would talk on the same connections.
        if self._process is not None and self._process != os.getpid():
            raise SessionError(
                f"the box was started by process {self._process}, and this is process {os.getpid()}, forked from it: "
                "start the box in each worker, in the application's lifespan, and not when modules are imported"
            )

    def _check_started(self) -> None:
        self._check_process()
        if not self._started:
            raise SessionError(_NOT_STARTED)

    @property
    def engine(self) -> AsyncEngine:
        """The engine that the box works with."""
        self._check_process()
        if self._engine is None:
            raise SessionError(_NOT_STARTED)
        return self._engine

    @property
    def store(self) -> SqlStore:
        """Where deliveries live."""
        self.engine  # noqa: B018  says what is missing
        return self._store

    async def migrate(self) -> int:
        """Bring the database to the schema of this release, and register the routes; how many steps that took."""
        from .stores.migrations import migrate  # noqa: PLC0415  Alembic is for those who migrate

        await sqlite.use_write_ahead_log(self.engine)
        async with self.engine.begin() as connection:
            steps = await connection.run_sync(migrate, self._shards)
        await self.register()
        return steps

    async def register(self) -> None:
        """Make the routes and handlers of this box known to relays. The first row that is written does it by itself."""
        self._outbox.forget()
        async with self.engine.begin() as connection:
            prepared = await connection.run_sync(self._outbox.register)
        self._outbox.committed({}, prepared)

    # -- writing -------------------------------------------------------------------------------------------------------

    def unit_of_work(
        self, *, tenant: str | None = None, timeout: float | None = None, new_transaction: bool = False
    ) -> UnitOfWork:
        """A business transaction. Inside another one of the same task it is a savepoint, unless ``new_transaction`` is
        said.
        """
        self._use_in_this_process()
        if self._unit_sessions is None:
            # What a task that outlives its unit of work does with the session would begin a transaction without an end.
            units = async_sessionmaker(self.engine, expire_on_commit=False, close_resets_only=False)
            self._unit_sessions = self.bind(units)
        return UnitOfWork(
            self._unit_sessions,
            self.tenancy,
            tenant=tenant,
            timeout=timeout,
            watchdog=self._watchdog,
            new_transaction=new_transaction,
        )

    def bind(self, maker: _Maker) -> _Maker:
        """Let every session of this sessionmaker (or async_sessionmaker) write to the outbox. It is changed in place,
        and returned.
        """
        sessions.bind(maker, self._outbox)
        return maker

    def publish(
        self,
        session: Session | AsyncSession,
        event: object,
        *,
        key: str | UUID,
        tenant: str | None = None,
        ordered: bool = False,
    ) -> None:
        """Record an event in a bound session. See `EventPublisher.publish`."""
        sessions.bound_session(session).collector.publish(event, key, tenant, ordered=ordered)

    def publisher(self, session: Session | AsyncSession) -> EventPublisher:
        """The port for application code that should not see the session."""
        return SessionPublisher(session)

    async def committed(self, unknown: CommitOutcomeUnknown) -> bool:
        """Ask the database what became of a transaction whose COMMIT was not answered. Waits for it if it is still at
        work.
        """
        if not unknown.written:
            raise SessionError("that transaction wrote nothing to the outbox: its outcome cannot be asked for")
        async with self.engine.connect() as connection:
            return await connection.run_sync(self.store.committed, unknown.written[0])

    # -- handling ------------------------------------------------------------------------------------------------------

    def subscribe(
        self, *kinds: type, name: str | None = None, before_commit: bool = False
    ) -> Callable[[_Handler], _Handler]:
        """Decorator: run this function for events of these types, durably: it is a consumer of the outbox by itself,
        which every relay of this box runs. It may ask for what a handler of `Consumer.on` may ask for, and what it does
        in its unit of work takes effect once.

        With ``before_commit`` it runs inside the transaction that raises the event, is called with the event and the
        session, and what it does or raises commits with it; its failure fails the transaction. An async function needs
        an `AsyncSession`, and gets that.
        """
        if not kinds:
            raise ConfigurationError("subscribe needs at least one event type")
        types: list[EventType] = [registry.of_type(kind) for kind in kinds]

        def keep(handler: _Handler) -> _Handler:
            if before_commit:
                check_handler(handler)
                self._outbox.add_inside(types, handler)
                return handler
            effects = Handlers()
            effects.add(kinds, handler)
            stable = name or f"{handler.__module__}.{handler.__qualname__}"
            self.handlers[stable] = self._make(Consumer, stable, effects, OUTBOX, (), flow=Flow(), terms=Terms())
            return handler

        return keep

    # -- consuming -----------------------------------------------------------------------------------------------------

    def consumer(
        self,
        name: str,
        *,
        source: str | Subscriber,
        topics: Sequence[str] = (),
        batch: int = Flow.batch,
        concurrency: int = Flow.concurrency,
        max_messages: int = Flow.max_messages,
        max_bytes: int = Flow.max_bytes,
        grace: float = Flow.grace,
        retry: RetryPolicy = Terms.retry,
        timeout: float = Terms.timeout,
        patience: float = Terms.patience,
        retention: timedelta = Terms.retention,
        ignores: Sequence[str] = (),
        on_failure: OnFailure = Terms.on_failure,
        max_spilled: int = Terms.max_spilled,
    ) -> Consumer:
        """A consumer: give it handlers by ``@consumer.on(...)``, and let it ``run``.

        ``source`` is the name of a transport that can be subscribed to, or such a subscriber, with its ``topics``; or
        ``"outbox"``, for events of this box itself, without a broker. The name is that of the group and of the inbox:
        keep it for ever. ``batch`` messages share a transaction; if it fails they are tried in halves, so a handler
        may then be called again for an event, and its effects stay once. ``ignores`` are patterns of events that may
        come and that are not known here; all other unknown ones become dead letters.
        """
        self.consumers[name] = consumer = self._make(
            Consumer,
            name,
            Handlers(),
            source,
            topics,
            flow=Flow(batch, concurrency, max_messages, max_bytes, grace),
            terms=Terms(retry, timeout, patience, retention, ignores, on_failure, max_spilled),
        )
        return consumer

    def projection(
        self,
        projection: type[Projection] | Projection,
        *,
        source: str | Subscriber,
        topics: Sequence[str] = (),
        batch: int = PROJECTED_AT_ONCE,
        concurrency: int = 2,
        max_messages: int = 5_000,
        max_bytes: int = Flow.max_bytes,
        grace: float = Flow.grace,
        retry: RetryPolicy = Terms.retry,
        timeout: float = Terms.timeout,
        patience: float = Terms.patience,
        retention: timedelta = Terms.retention,
        ignores: Sequence[str] = (),
        on_failure: OnFailure = Terms.on_failure,
        max_spilled: int = Terms.max_spilled,
        cache: Cache | None = None,
    ) -> ProjectionConsumer:
        """A consumer whose effects are the rows of a projection; its name is that of the projection. A ``cache``, which
        a `ReadDao` has too, forgets rows that change, after the commit. The rest is as for `consumer`.
        """
        effects = projection() if isinstance(projection, type) else projection
        if not isinstance(effects, Projection):
            raise ConfigurationError(f"projection takes a subclass of Projection, got {projection!r}")
        effects.cache = cache
        self.consumers[effects.name] = consumer = self._make(
            ProjectionConsumer,
            effects.name,
            effects,
            source,
            topics,
            flow=Flow(batch, concurrency, max_messages, max_bytes, grace),
            terms=Terms(retry, timeout, patience, retention, ignores, on_failure, max_spilled),
        )
        return consumer

    def _make(
        self,
        kind: Callable[..., _Consumer],
        name: str,
        effects: Effects,
        source: str | Subscriber,
        topics: Sequence[str],
        *,
        flow: Flow,
        terms: Terms,
    ) -> _Consumer:
        check_key("name", name, 200)
        if name in self.consumers or name in self.handlers:
            raise ConfigurationError(
                f"two consumers or handlers are called {name!r}: each has an inbox of its own, by its name"
            )
        check_numbers(f"consumer {name!r}", flow)
        terms.check(f"consumer {name!r}")
        subscriber = None if source == OUTBOX else self._subscriber(name, source)
        if subscriber is None and topics:
            raise ConfigurationError(f"consumer {name!r}: the outbox has no topics; its handlers say what it gets")
        if subscriber is not None and (isinstance(topics, str) or not topics):
            raise ConfigurationError(f"consumer {name!r} needs topics, a list of names, got {topics!r}")
        if isinstance(subscriber, TakesTemplates):
            subscriber.check_topics(topics)
        elif templates := [topic for topic in topics if topic_pattern(topic) is not None]:
            raise ConfigurationError(
                f"consumer {name!r}: {type(subscriber).__name__} takes no templates, as it has no check_topics (see "
                f"pillarbox.transport.TakesTemplates), so name the topics of {templates[0]!r} one by one"
            )
        return kind(
            name,
            self,
            effects,
            source=self._name_of(source),
            subscriber=subscriber,
            topics=topics,
            inbox=self._inbox,
            flow=flow,
            terms=terms,
        )

    def _name_of(self, source: str | Subscriber) -> str:
        if isinstance(source, str):
            return source
        same = [name for name, transport in self.transports.items() if cast("object", transport) is source]
        return same[0] if same else type(source).__name__

    def _subscriber(self, name: str, source: str | Subscriber) -> Subscriber:
        if not isinstance(source, str):
            found: object = source
        elif (found := self.transports.get(source)) is None:
            known = ", ".join(sorted(self.transports)) or "none"
            raise ConfigurationError(
                f"consumer {name!r}: no transport is called {source!r}; known are: {known}, and {OUTBOX!r}"
            )
        if not hasattr(found, "subscribe"):
            raise ConfigurationError(f"consumer {name!r}: {type(found).__name__} cannot be subscribed to")
        return cast("Subscriber", found)

    async def dead_letters(
        self, *, consumer: str | None = None, tenant: str | None = None
    ) -> AsyncIterator[DeadLetter]:
        """The failed deliveries of a consumer, or of all, from the oldest on: messages that it could not turn into
        effects. Where a tenant is set, as in its requests, only that tenant's.
        """
        tenant = tenant or current_context().tenant
        for table in TABLES:
            page: Sequence[DeadLetter] = ()
            while True:
                after = page[-1].row if page else 0
                async with self.engine.connect() as connection:
                    page = await connection.run_sync(
                        dead_letters, table, consumer, tenant, after=after, limit=DEAD_LETTERS_AT_ONCE
                    )
                for letter in page:
                    yield structs.replace(letter, message=work_of(letter.message).message)
                if len(page) < DEAD_LETTERS_AT_ONCE:
                    break

    async def within(self, uow: UnitOfWork, function: Callable[..., _Found], *arguments: Any) -> _Found:
        """Call a function of a connection, in the transaction of a unit of work."""
        bound = sessions.bound_session(uow.session)
        return await uow.session.run_sync(lambda _: bound.lend_connection(function, *arguments))

    async def apart(self, function: Callable[..., _Found], *arguments: Any, **options: Any) -> _Found:
        """Call a function of a connection, in a transaction of its own, which is committed."""
        async with asyncio.timeout(APART_SECONDS), self.engine.begin() as connection:
            return await connection.run_sync(function, *arguments, **options)

    @property
    def takes_turns(self) -> bool:
        """Whether the database has one writer at a time."""
        return self.engine.dialect.name == "sqlite"

    def relay_to(self, consumer: str, destination: Publisher, grace: float, *, inbound: bool) -> Relay:
        """A relay for the lanes of a consumer: those of the outbox, or the inbound ones."""
        if isinstance(self.engine.pool, StaticPool):
            raise ConfigurationError(
                f"consumer {consumer!r}: an in-memory SQLite has one connection, which relay and consumer would have "
                "to share: use a file"
            )
        pacing = Pacing(grace=grace)
        served = f"{INBOX_DESTINATION if inbound else LOCAL}:{consumer}"
        table = INBOUND if inbound else OUTBOUND
        return self._relay({served: destination}, f"{consumer}@{relay_name()}", pacing=pacing, table=table)

    # -- sending -------------------------------------------------------------------------------------------------------

    def relay(
        self,
        *,
        name: str | None = None,
        lease: float = Pacing.lease,
        batch: int = Pacing.batch,
        window_bytes: int = Pacing.window_bytes,
        grace: float = Pacing.grace,
        shards: Collection[int] | None = None,
        tenants: Collection[str] | None = None,
        source: Literal["cursor", "cdc"] = "cursor",
        slot: str | None = None,
    ) -> Relay:
        """A relay for the transports and handlers of this box. It serves every route in the database that needs one of
        them, whoever wrote it; it has a pool of its own.

        With ``shards`` it keeps to these, with ``tenants`` to the lanes in which these tenants are, of routes that are
        sharded by tenant. Relays that keep to nothing leave such lanes to it while it lives.

        With ``source="cdc"``, on PostgreSQL, bodies and wake-ups come by logical replication while it runs: from a
        temporary slot, or from one that is kept and called ``slot``.
        """
        handlers = [*self.handlers.values()]
        return self._relay(
            {**self.transports, **{f"{LOCAL}:{each.name}": each.destination for each in handlers}},
            name or relay_name(),
            consumers=handlers,
            pacing=Pacing(lease=lease, batch=batch, window_bytes=window_bytes, grace=grace),
            shards=shards,
            tenants=tenants,
            source=source,
            slot=slot,
        )

    def _relay(
        self,
        publishers: Mapping[str, Publisher],
        name: str,
        *,
        pacing: Pacing | None = None,
        shards: Collection[int] | None = None,
        tenants: Collection[str] | None = None,
        source: Literal["cursor", "cdc"] = "cursor",
        slot: str | None = None,
        table: str = OUTBOUND,
        consumers: Sequence[Consumer] = (),
    ) -> Relay:
        self._check_started()
        if self._relay_engine is None:
            self._relay_engine = with_own_pool(self.engine)
            self._outbox.configure_transactions(self._relay_engine.sync_engine)
        pacing = pacing or Pacing()
        store, feed = store_on(self._relay_engine, table), None
        if source == "cdc":
            store, feed = streaming_on(self._relay_engine, name, slot, pacing.window_bytes, self.signals)
        elif source != "cursor" or slot is not None:
            raise ConfigurationError(f'relay: source is "cursor" or "cdc", which alone has a slot, got {source!r}')
        relay = Relay(
            store,
            publishers,
            name=name,
            consumers=consumers,
            pacing=pacing,
            shards=shards,
            tenants=tenants,
            bell=self.doorbell,
            feed=feed,
            shares_connection=self._relay_engine is self._engine,
            signals=self.signals,
            check_usable=partial(self._check_relay, self._relay_engine),
        )
        self._relays.add(relay)
        return relay

    def _check_relay(self, engine: AsyncEngine) -> None:
        self._check_started()
        if engine not in (self._relay_engine, self._engine):
            raise SessionError("this relay was made before the box was started again: make another with box.relay()")

    def decode(self, message: Message | Row) -> object:
        """The event in a message."""
        content = self.codecs.reading(message.headers.get("content_type", "application/json")).decode(
            message.body, message.headers
        )
        return registry.build(content.name, content.version, content.payload, content.event_id, content.occurred_at)

    def _use(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.turn = only_turn(engine) or nullcontext()
        """What an effect waits for if relays use the only connection, too."""
        self._store = store_on(engine)
        self.inbound = store_on(engine, INBOUND)
        self._outbox.configure_transactions(engine.sync_engine)


class _BoxOutbox:
    """What the sessions of a box see of it."""

    def __init__(self, box: Pillarbox) -> None:
        self._box = box
        self.router = box.router
        self.tenancy = box.tenancy
        self.signals = box.signals
        self.inside: dict[str, list[Callable[[Any, Any], Any]]] = {}
        self._registered: WeakKeyDictionary[Dialect, tuple[RouteRecord, ...]] = WeakKeyDictionary()
        """By dialect, which an engine has alone, and shares with those that are made from it."""
        self._apart = Apart()

    def add_inside(self, kinds: Sequence[EventType], handler: Callable[[Any, Any], Any]) -> None:
        for kind in kinds:
            self.inside.setdefault(kind.name, []).append(handler)

    def configure_transactions(self, engine: Engine) -> None:
        guard_commits(engine)
        sqlite.configure_transactions(engine)

    def prepare(self, connection: Connection) -> _Prepared:
        self._box._use_in_this_process()
        records = self.router.records
        if self._registered.get(connection.dialect) == records:
            return None, records
        # Apart, or the first write of every other process would wait until this transaction ends. Where there is one
        # writer, or no second connection to be had, it is done in this transaction, and counts once that has committed.
        install = self._box.store.install_id(connection)
        if self._apart.run(connection.engine, partial(self._register_apart, install=install)):
            return None, records
        return self.register(connection)

    def _register_apart(self, engine: Engine, install: UUID) -> None:
        """Unless another transaction has done so meanwhile, or a connection of this engine leads to other tables than
        the business transaction's, whose schema may have been set for it alone.
        """
        if self._registered.get(engine.dialect) == self.router.records:
            return
        with transaction(engine) as connection:
            if self._box.store.install_id(connection) != install:
                raise StoreError("another connection finds another installation of Pillarbox")
            _, records = self.register(connection)
        self._registered[engine.dialect] = records

    def register(self, connection: Connection) -> _Prepared:
        """Make the routes known, in the transaction of this connection."""
        records = self.router.records
        self._use(self._box.store.register(connection, records))
        return connection.dialect, records

    def _use(self, shards: int) -> None:
        if self._box._shards not in (None, shards):
            raise ConfigurationError(
                f"this box was given shards={self._box._shards}, but the database was set up with {shards}"
            )
        self.router.shards = shards

    def forget(self) -> None:
        """What the database knows is not known any more: it may be another one."""
        self._registered.clear()

    def append(self, connection: Connection, deliveries: list[Delivery]) -> None:
        self._box._store.append(connection, deliveries)

    def committed(self, rows: NewRows, prepared: _Prepared | None) -> None:
        if prepared is not None:
            dialect, records = prepared
            if dialect is not None:
                self._registered[dialect] = records
            if self.signals.observers:
                count_new(self.signals, rows, {record.id: record.name for record in records})
            self._box.doorbell.ring({lane for lane, _ in rows})


def _all_are(kind: type, given: object) -> bool:
    return isinstance(given, Collection) and all(isinstance(each, kind) for each in given)
