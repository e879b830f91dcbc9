"""What one session has raised, what it has written, and what a rollback takes back.

The rules of `pillarbox.session`, kept per transaction and savepoint. A frame is what happened inside one of them;
whatever is written belongs to the innermost, is handed to the surrounding one when it is released, and disappears when
it is rolled back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import iscoroutinefunction
from typing import Any, Protocol
from uuid import UUID
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection, Engine, Select, inspect, literal, select, text
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import async_session
from sqlalchemy.orm import InstanceState, Session
from sqlalchemy.util import await_only

from . import clock, commit, telemetry
from .aggregate import Aggregate, recorded_by
from .errors import DuplicateEventError, SessionError
from .event import Event, EventType, Raised, capture
from .outbox import Delivery, LaneName, NewRows, stable_hash
from .route import MAX_KEY_BYTES, MAX_TENANT_BYTES, Origin, Router, check_key, default_aggregate_type
from .telemetry import Activity, Signals, handed_on
from .tenancy import Tenancy, TenantScoped, session_tenant

MAX_ROUNDS = 100

_Unnumbered = tuple[EventType, str, str, int | None]
"""An event's type, the type and id of its aggregate, and the version of that."""
_Place = tuple[int, int, int, str | None]
"""Route, schema version, shard and tenant of a row."""
_Recorded = tuple["_Entry", _Unnumbered, int, int]
"""With its identity, and the hash of all that must not differ when an event is recorded twice."""

_encode = msgspec.json.Encoder(order="deterministic").encode
_LOCK_KEY = text("SELECT pg_advisory_xact_lock(:number)")


class Outbox(Protocol):
    """What a session needs to know about the box that it is bound to."""

    router: Router
    tenancy: Tenancy
    signals: Signals

    @property
    def inside(self) -> Mapping[str, Sequence[Callable[[Any, Any], Any]]]:
        """Handlers that run inside the transaction, by the name of the event."""
        ...

    def configure_transactions(self, engine: Engine) -> None:
        """Make COMMIT and transactions on this engine what they must be. Twice is fine."""
        ...

    def prepare(self, connection: Connection) -> Any:
        """Make sure that routes and lanes are registered, before the first row; what `committed` must be given."""
        ...

    def append(self, connection: Connection, deliveries: list[Delivery]) -> None:
        """Write rows in the open transaction."""
        ...

    def committed(self, rows: NewRows, prepared: Any) -> None:
        """A transaction with these rows has committed."""
        ...


class _Entry(msgspec.Struct, frozen=True):
    """An event on its way into the outbox: raised by an aggregate, or published under a key."""

    raised: Raised
    aggregate: Aggregate | None = None
    key: str = ""
    tenant: str | None = None
    ordered: bool = False


class _Frame:
    """What happened inside one transaction or savepoint."""

    __slots__ = ("aggregates", "committed", "marks", "refused", "taken_over", "undone", "written")

    def __init__(self, written: _Written) -> None:
        self.written = written
        """Shared by all of a transaction."""
        self.marks = written.marks()
        """How much had been written when it began."""
        self.aggregates: WeakValueDictionary[int, Aggregate] | None = None
        """Those that have raised something. One with events that are not written is kept by the collector; nothing is
        to be restored in one that nobody keeps."""
        self.taken_over: list[tuple[Aggregate, list[Raised]]] = []
        self.refused = False
        self.committed = False
        self.undone = False

    def touch(self, aggregate: Aggregate) -> None:
        if self.aggregates is None:
            self.aggregates = WeakValueDictionary()
        self.aggregates[id(aggregate)] = aggregate

    def absorb(self, inner: _Frame) -> None:
        """A released savepoint becomes part of what surrounds it."""
        for aggregate in inner.touched():
            self.touch(aggregate)
        self.taken_over += inner.taken_over

    def touched(self) -> list[Aggregate]:
        """The aggregates that are still there."""
        return [] if self.aggregates is None else [*self.aggregates.values()]


class _Written:
    """What the transaction has written, in the order in which it did: a rollback takes back the end of it. Of an event
    only its id is kept, of its content a hash.
    """

    __slots__ = ("_foreign", "_ids", "_known", "_numbered", "_places", "handled", "hashes")

    def __init__(self) -> None:
        self.hashes: dict[int, int] = {}
        """What was recorded of each event, by its `identity`: those that were written, or go nowhere."""
        self._foreign: dict[int, tuple[Callable[[], object], int]] = {}
        """Events without an id, each with its number. They are not kept for that, if their class allows it: once such
        an event is gone, nobody can record it again, and another object may be where it was.
        """
        self._numbered = 0
        self._ids: list[int] = []
        self._places: list[_Place] = []
        """For each row the id of its event, and where it went."""
        self._known: dict[_Place, _Place] = {}
        self.handled: dict[int, None] = {}
        """Events that handlers were called with."""

    def marks(self) -> tuple[int, ...]:
        """How much there is."""
        return len(self.hashes), len(self._ids), len(self.handled)

    def undo(self, marks: tuple[int, ...]) -> None:
        """Forget what came after these marks."""
        hashes, rows, handled = marks
        while len(self.hashes) > hashes:
            self.hashes.popitem()
        while len(self.handled) > handled:
            self.handled.popitem()
        del self._ids[rows:], self._places[rows:]

    def number(self, event: object) -> int:
        """The number below 0 of an event of a foreign class, which carries no id."""
        known, number = self._foreign.get(id(event), (None, 0))
        if known is None or known() is not event:
            self._numbered = number = self._numbered - 1
            self._foreign[id(event)] = _reference(event), number
        return number

    def note_rows(self, deliveries: Sequence[Delivery]) -> None:
        """These rows were written."""
        for row in deliveries:
            self._ids.append(row.event_id.int)
            place = row.route, row.schema_version, row.shard, row.tenant
            self._places.append(self._known.setdefault(place, place))  # each once in memory

    def rows(self) -> commit.Written:
        """All rows: event, route and schema version."""
        return [(UUID(int=number), *place[:2]) for number, place in zip(self._ids, self._places, strict=True)]

    def count(self) -> NewRows:
        """How many rows there are, by lane and tenant."""
        rows: NewRows = {}
        for route, _, shard, tenant in self._places:
            place = LaneName(route, shard), tenant
            rows[place] = rows.get(place, 0) + 1
        return rows


def _reference(event: object) -> Callable[[], object]:
    """What leads to the event, and does not keep it, unless its class allows for nothing else."""
    try:
        return weakref.ref(event)
    except TypeError:
        return lambda: event


class Collector:
    """Everything that one session has to write and has written. Holds aggregates with events until their transaction
    ends.
    """

    def __init__(self, session: Session, outbox: Outbox, lend: Callable[[Any], AbstractContextManager[None]]) -> None:
        self._lend = lend
        self._session = weakref.ref(session)  # aggregates refer to us: they must not keep the session alive
        self._outbox = outbox
        self._touched: dict[int, Aggregate] = {}
        self._published: list[_Entry] = []
        self._plain: list[Aggregate] = []
        self._frames: list[_Frame] = []
        self._open: commit.OpenTransaction | None = None
        self._prepared: Any = None
        self._borrowed = False
        """Whether the transaction belongs to somebody else: then it may be undone although we have committed."""
        self._commit_began: float | None = None
        self._commit_took: float | None = None
        self.committed = False
        """Whether the newest transaction of the session has committed. True from the moment of the database's answer.
        """

    @property
    def session(self) -> Session:
        session = self._session()
        if session is None:
            raise SessionError("the session of this aggregate is gone")
        return session

    @property
    def pending(self) -> bool:
        """Whether something is raised and not written."""
        return bool(self._published or self._touched)

    # -- what is raised ------------------------------------------------------------------------------------------------

    def touched(self, aggregate: Aggregate) -> None:
        if self._session() is None:
            recorded_by(aggregate).collector = None
            return
        if not self._frames:
            self.session.begin()
        self._touched[id(aggregate)] = aggregate
        self._frames[-1].touch(aggregate)

    def publish(self, event: object, key: str | UUID, tenant: str | None, *, ordered: bool) -> None:
        """Record an event without an aggregate. It is checked now and written by the next flush."""
        checked = check_key("key", str(key) if isinstance(key, UUID) else key, MAX_KEY_BYTES)
        if tenant is not None:
            check_key("tenant", tenant, MAX_TENANT_BYTES)
        if ordered and self.session.get_bind().dialect.name not in ("postgresql", "sqlite"):
            raise SessionError(
                "ordered=True needs transaction locks, which this database does not have: "
                "raise the event from an aggregate"
            )
        if not self._frames:
            self.session.begin()
        self._published.append(_Entry(capture(event), None, checked, tenant, ordered))

    def attach(self, aggregate: Aggregate, *, new: bool) -> None:
        """The aggregate has come into the session."""
        recorded = recorded_by(aggregate)
        recorded.collector = self
        recorded.before = tuple(recorded.events) if new else ()
        if inspect(aggregate, raiseerr=False) is None:
            self._plain.append(aggregate)
        if recorded.events:
            self.touched(aggregate)

    def detach(self, aggregate: Aggregate) -> None:
        """The aggregate has left the session; what it has not handed over stays with it."""
        recorded_by(aggregate).collector = None
        self._touched.pop(id(aggregate), None)
        if not (self._frames and self._frames[-1].undone):  # sent away, not thrown out by a rollback
            for frame in self._frames:
                if frame.aggregates is not None:
                    frame.aggregates.pop(id(aggregate), None)

    def let_go(self) -> None:
        """The session is closed: plain aggregates, which no session tells about it, are free."""
        for aggregate in self._plain:
            recorded_by(aggregate).collector = None
        self._plain.clear()

    def take_over(self, given: Aggregate, merged: Aggregate) -> None:
        """``merge`` has made a copy of an aggregate: its events go on with the copy."""
        events, recorded_by(given).events = recorded_by(given).events, []
        if events:
            recorded_by(merged).events += events
            self.touched(merged)
            self._frames[-1].taken_over.append((given, events))

    # -- what is written -----------------------------------------------------------------------------------------------

    def flush(self, flush_orm: Callable[[], None]) -> None:
        """Let the ORM write, then write what was raised. Listeners may raise more meanwhile: go on until nothing is
        left. The session must not flush by itself meanwhile.
        """
        inside = self._outbox.inside
        for _ in range(MAX_ROUNDS):
            if inside:
                self._run_handlers()
            prepared = {
                identity: aggregate for identity, aggregate in self._touched.items() if recorded_by(aggregate).events
            }
            self._touched = dict(prepared)
            for aggregate in prepared.values():
                self._prepare_row(aggregate)
            flush_orm()
            if self._touched.keys() <= prepared.keys() and not (inside and self._unhandled()):
                self._write()
                return
        raise SessionError(
            f"events were still being raised after {MAX_ROUNDS} flushes: "
            "a listener answers every event with another one"
        )

    def _run_handlers(self) -> None:
        """Call the handlers that belong to the transaction, for what was raised and for what they raise in turn."""
        if any(frame.refused for frame in self._frames):
            raise SessionError("a handler has failed in this transaction: roll back")
        for _ in range(MAX_ROUNDS):
            fresh = self._unhandled()
            if not fresh:
                return
            self._frames[-1].written.handled.update((it.event_id.int, None) for it in fresh)
            for it in sorted(fresh, key=lambda it: it.sequence):
                for handler in self._outbox.inside[it.type.name]:
                    try:
                        self._run_handler(handler, it.event)
                    except BaseException:
                        self._frames[-1].refused = True  # whoever catches this must not commit without the handler
                        raise
        raise SessionError(f"handlers were still raising events after {MAX_ROUNDS} rounds: they answer each other")

    def _unhandled(self) -> list[Raised]:
        raised = [it for aggregate in self._touched.values() for it in recorded_by(aggregate).events]
        raised += [entry.raised for entry in self._published]
        wanted = [it for it in raised if it.type.name in self._outbox.inside]
        return [it for it in wanted if it.event_id.int not in self._frames[-1].written.handled]

    def _run_handler(self, handler: Callable[[Any, Any], Any], event: object) -> None:
        if not (iscoroutinefunction(handler) or iscoroutinefunction(getattr(handler, "__call__", None))):  # noqa: B004  it is callable
            handler(event, self.session)
            return
        around = async_session(self.session)
        if around is None:
            raise SessionError("an async handler with before_commit=True needs an AsyncSession")
        with self._lend(self.session):
            await_only(handler(event, around))

    def _prepare_row(self, aggregate: Aggregate) -> None:
        """Make sure that this flush writes the aggregate's own row, or lock it."""
        state: InstanceState[Any] | None = inspect(aggregate, raiseerr=False)
        if state is None or not self._is_stored(state) or aggregate in self.session.deleted or _writes_its_row(state):
            return
        versioned, version = state.mapper.version_id_col, aggregate.aggregate_version
        if versioned is not None and version is not None and state.mapper.version_id_generator is not False:
            setattr(aggregate, state.mapper.get_property_by_column(versioned).key, version + 1)
        else:
            # Not by writing a column again: somebody may have changed it since we read it.
            self._connection().execute(_row_of(state).with_for_update())

    def _write(self) -> None:
        entries = self._published
        if self._touched:
            own = [_Entry(it, each) for each in self._touched.values() for it in recorded_by(each).events]
            entries = sorted(own + entries, key=lambda entry: entry.raised.sequence)
        written, recorded = self._frames[-1].written, list[_Recorded]()
        for entry in entries:
            raised, origin = entry.raised, self._origin(entry)
            content = hash((_encode(raised.payload), entry.key, entry.tenant, origin[1], origin[2]))
            identity = raised.event_id.int if isinstance(raised.event, Event) else written.number(raised.event)
            recorded.append((entry, origin, identity, content))
        fresh = self._without_repetitions(recorded)
        wanted = self._numbered(fresh)
        if wanted:
            self._append(wanted)
        for _, _, identity, content in fresh:
            written.hashes[identity] = content
        for aggregate in self._touched.values():
            recorded_by(aggregate).events.clear()
        self._touched.clear()
        self._published.clear()

    def _origin(self, entry: _Entry) -> _Unnumbered:
        kind, aggregate = entry.raised.type, entry.aggregate
        if aggregate is None:
            return kind, default_aggregate_type(kind.name), entry.key, None
        version = aggregate.aggregate_version
        state: InstanceState[Any] | None = inspect(aggregate, raiseerr=False)
        if version is not None and state is not None and not self._is_stored(state):
            version += 1  # it is deleted: this is the version that it would have
        identity = check_key("aggregate_id", aggregate.aggregate_id, MAX_KEY_BYTES)
        return kind, aggregate.aggregate_type, identity, version

    def _is_stored(self, state: InstanceState[Any]) -> bool:
        """Whether the session knows the object as a row. Its own flags still call one deleted that was added again."""
        return state.key is not None and self.session.identity_map.get(state.key) is state.obj()

    def _without_repetitions(self, recorded: list[_Recorded]) -> list[_Recorded]:
        """An event that is recorded twice is written once. Two events with one id are a mistake."""
        hashes, new = self._frames[-1].written.hashes, dict[int, int]()
        fresh = []
        for it in recorded:
            entry, _, identity, content = it
            known = hashes.get(identity, new.get(identity))
            if known is None:
                new[identity] = content
                fresh.append(it)
            elif known != content:
                raise DuplicateEventError(
                    f"the event id {entry.raised.event_id} was recorded twice in this transaction, "
                    "with another content, key, tenant or aggregate: make a new event"
                )
        return fresh

    def _numbered(self, fresh: list[_Recorded]) -> list[tuple[_Entry, Origin]]:
        """Those that go anywhere, each with its number within its aggregate: local ones apart from those that leave.

        A consumer must be able to see from what it gets whether something is missing; it never gets the local ones.
        """
        totals: dict[tuple[str, str, bool], int] = {}
        numbered = []
        for entry, (kind, aggregate_type, aggregate_id, version), _, _ in fresh:
            group = aggregate_type, aggregate_id, kind.integration
            index = totals.get(group, 0)
            totals[group] = index + 1
            if self._outbox.router.plan(kind):
                numbered.append((entry, group, version, index))
        return [
            (entry, Origin(group[0], group[1], version, index, totals[group]))
            for entry, group, version, index in numbered
        ]

    def _append(self, wanted: list[tuple[_Entry, Origin]]) -> None:
        connection = self._connection()
        prepared = self._outbox.prepare(connection)
        self._prepared = None if self._borrowed else prepared
        if self._outbox.signals.traces:
            self._append_traced(connection, wanted)
        else:
            self._append_rows(connection, wanted)
        if self._open is None:
            self._open = commit.remember(connection.connection, self._frames[-1].written.rows)

    def _append_rows(self, connection: Connection, wanted: list[tuple[_Entry, Origin]]) -> None:
        deliveries: list[Delivery] = []
        for entry, origin in wanted:
            deliveries += self._outbox.router.deliveries(entry.raised, origin, self._tenant_of(entry))
        if ordered := [entry for entry, _ in wanted if entry.ordered]:
            self._lock_keys(connection, ordered)
        try:
            self._outbox.append(connection, deliveries)
        except BaseException:
            commit.doubt(connection)  # rows may go by the driver, where SQLAlchemy tells nobody of an error
            raise
        self._frames[-1].written.note_rows(deliveries)

    def _append_traced(self, connection: Connection, wanted: list[tuple[_Entry, Origin]]) -> None:
        raised = [entry.raised for entry, _ in wanted]
        activity = Activity(
            telemetry.APPEND,
            "",
            {
                "messaging.system": "pillarbox",
                "messaging.operation.name": "append",
                "messaging.operation.type": "create",
                "messaging.batch.message_count": len(raised),
                "db.system.name": connection.dialect.name,
                "db.operation.name": "INSERT",
                "db.collection.name": "pillarbox_outbox",
            },
            [{"event_id": str(it.event_id), "event_type": it.type.name} | it.context.headers() for it in raised],
        )
        with self._outbox.signals.during(activity):
            contexts = [handed_on(it.context, activity) for it in raised]
            self._append_rows(
                connection,
                [
                    (replace(entry, raised=replace(entry.raised, context=context)), origin)
                    for (entry, origin), context in zip(wanted, contexts, strict=True)
                ],
            )

    def _connection(self) -> Connection:
        session = self.session
        try:
            bind = session.get_bind()
        except UnboundExecutionError as error:
            raise SessionError(
                "the outbox has no database in this session: give the sessionmaker bind=engine"
            ) from error
        # What the ORM has just used is taken from where it is: to ask for it takes longer than all of this.
        transaction: Any = session._transaction
        known = transaction._connections.get(bind) if transaction is not None and transaction.is_active else None
        connection = known[0] if known else Session.connection(session, bind_arguments={"bind": bind})
        self._borrowed = connection is bind
        if _is_autocommit(connection):
            raise SessionError("this engine is in AUTOCOMMIT mode, where a rollback would undo nothing")
        return connection

    def _lock_keys(self, connection: Connection, entries: list[_Entry]) -> None:
        """Transactions that publish under one key, and asked for it, write their rows in the order in which they
        commit.
        """
        if connection.dialect.name == "postgresql":  # on SQLite there is one writer at a time anyway
            for number in sorted({stable_hash(f"{self._tenant_of(entry) or ''}\n{entry.key}") for entry in entries}):
                connection.execute(_LOCK_KEY, {"number": number})

    def _tenant_of(self, entry: _Entry) -> str | None:
        tenancy, session, raised = self._outbox.tenancy, self.session, entry.raised
        owner = entry.aggregate.tenant_id if isinstance(entry.aggregate, TenantScoped) else None
        given = entry.tenant or owner or session_tenant(session) or raised.context.tenant
        if given is None and not tenancy.required:
            return None
        tenant = tenancy.tenant_of(session, given, raised.type.name)
        return None if tenant is None else check_key("tenant", tenant, MAX_TENANT_BYTES)

    # -- transactions and savepoints -----------------------------------------------------------------------------------

    def begun(self) -> None:
        if not self._frames:
            self.committed = False
        self._frames.append(_Frame(self._frames[-1].written if self._frames else _Written()))

    def commit_begins(self) -> None:
        """Called only if somebody wants to know how long it takes."""
        self._commit_began = clock.current().monotonic()

    def committing(self) -> None:
        if self._frames:
            self._frames[-1].committed = True
            self.committed = len(self._frames) == 1
            if self.committed and self._commit_began is not None:
                self._commit_took = clock.current().monotonic() - self._commit_began

    def rolled_back(self) -> None:
        """The database has undone the innermost transaction or savepoint; what is not written will never be."""
        if self._frames:
            self._frames[-1].undone = True
        self._touched.clear()
        self._published.clear()

    def ended(self) -> None:
        if not self._frames:
            return
        frame = self._frames.pop()
        if not frame.committed:
            self._forget(frame)
        elif self._frames:
            self._frames[-1].absorb(frame)
        if not self._frames:
            for aggregate in frame.touched():
                recorded_by(aggregate).before = ()
            self._end(frame)

    def _end(self, frame: _Frame) -> None:
        unknown, rows = False, frame.written.count()
        if self._open is not None:
            unknown = commit.forget(self._open)
            self._open = None
        if self._outbox.signals.observers:
            # In a transaction that belongs to somebody else nothing was committed yet.
            ours = rows and self._prepared is not None
            self._tell(unknown=unknown, took=self._commit_took if ours else None)
        if rows:
            self._outbox.committed(rows, self._prepared)

    def _tell(self, *, unknown: bool, took: float | None) -> None:
        if unknown:
            self._outbox.signals.count(telemetry.COMMIT_UNKNOWN)
        if took is not None:
            self._outbox.signals.observe(telemetry.COMMIT, {took: 1})
        self._commit_began = self._commit_took = None

    def _forget(self, frame: _Frame) -> None:
        for given, events in frame.taken_over:
            recorded_by(given).events[:0] = events
        for aggregate in frame.touched():
            recorded = recorded_by(aggregate)
            if recorded.collector not in (None, self):
                continue  # it has moved on to another session
            state: InstanceState[Any] | None = inspect(aggregate, raiseerr=False)
            again = state is None or state.transient
            recorded.events = list(recorded.before) if again else []
        frame.written.undo(frame.marks)
        self.rolled_back()


def _is_autocommit(connection: Connection) -> bool:
    """Whether every statement is a transaction of its own, by an option or because the engine was made like that."""
    made = getattr(connection.dialect, "_on_connect_isolation_level", None)
    return bool(connection.get_execution_options().get("isolation_level", made) == "AUTOCOMMIT")


def _anchor(state: InstanceState[Any]) -> Any:
    """The table whose row stands for the aggregate: all its changes must meet there, also with joined inheritance."""
    versioned = state.mapper.version_id_col
    return versioned.table if versioned is not None else state.mapper.base_mapper.local_table


def _writes_its_row(state: InstanceState[Any]) -> bool:
    """Whether the next flush writes that row. With a version column any change does, since it raises the version."""
    versioned, anchor = state.mapper.version_id_col is not None, _anchor(state)
    return any(
        state.attrs[attribute.key].history.has_changes()
        for attribute in state.mapper.column_attrs
        if versioned or any(column.table is anchor for column in attribute.columns)
    )


def _row_of(state: InstanceState[Any]) -> Select[Any]:
    """The row that stands for the aggregate."""
    keys = zip(state.mapper.primary_key, state.identity or (), strict=True)
    return select(literal(1)).select_from(_anchor(state)).where(*(column == value for column, value in keys))
