"""The session's side of the outbox: events are collected once, and written by the transaction that saves their
aggregates.

Before this: aggregates raise, `publish` records. After it: the store has one row per delivery, in the same transaction.
The rules:

- Everything raised is written by the next flush, in one statement, after the ORM's own statements. There is no second
  place that collects. A savepoint flushes before it begins and before it is released, and COMMIT flushes before it is
  sent, so whatever is written belongs to exactly one savepoint and disappears with it.
- An aggregate's rows are written only after this transaction has written or locked the aggregate's own row. If nothing
  about it has changed, its version is raised, or without one its row is locked: so the order of ids within a key is the
  order of locks.
- A rollback drops what was raised since the transaction or savepoint began. An object that the rollback makes transient
  again keeps what it had raised before it was added: adding it again is the same story told again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import greenlet
from sqlalchemy import Connection, Engine, inspect
from sqlalchemy import event as sqlalchemy_events
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import (
    FromStatement,
    ORMExecuteState,
    Session,
    SessionTransaction,
    SessionTransactionOrigin,
    sessionmaker,
)
from sqlalchemy.orm.exc import StaleDataError

from .aggregate import Aggregate, recorded_by
from .collector import Collector, Outbox
from .commit import GUARDED
from .errors import BulkStatementError, ConcurrencyError, SessionError, SessionNotBoundError, SessionSharedError

_Found = TypeVar("_Found")

BULK_ALLOWED = "pillarbox_bulk"
"""Execution option that marks a bulk statement on an aggregate as meant: it will raise no events."""


SEALED = "pillarbox_sealed"
"""In the ``info`` of a session whose transaction belongs to somebody else than those who use it now."""
KEPT_OPEN = "pillarbox_kept_open"
"""In the ``info`` of a session that its unit of work closes."""


class BoundSession(Session):
    """A Session that belongs to a box. `bind` puts it in front of the class that a sessionmaker makes."""

    pillarbox: Outbox

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.collector = Collector(self, self.pillarbox, lend=BoundSession._lent)
        self._holder: greenlet.greenlet | None = None

    def flush(self, objects: Any = None) -> None:
        before, autoflush = self._enter(), self.autoflush
        try:
            if objects is None and self.collector.pending:
                # Handlers, routes and codecs may ask for something, and to look at an expired row loads it: no flush
                # inside this one for that.
                self.autoflush = False
                self.collector.flush(super().flush)
            else:
                super().flush(objects)
        except StaleDataError as error:
            raise ConcurrencyError(f"somebody else changed or deleted it first: {error}") from error
        finally:
            self._holder, self.autoflush = before, autoflush

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        with self._alone():
            return super().execute(*args, **kwargs)

    def scalar(self, *args: Any, **kwargs: Any) -> Any:
        with self._alone():
            return super().scalar(*args, **kwargs)

    def scalars(self, *args: Any, **kwargs: Any) -> Any:
        with self._alone():
            return super().scalars(*args, **kwargs)

    def get(self, entity: Any, *args: Any, **kwargs: Any) -> Any:
        self.pillarbox.tenancy.check_get(self, entity)
        return super().get(entity, *args, **kwargs)

    def commit(self) -> None:
        self._check_seal()
        before = self._enter()
        try:
            super().commit()
        finally:
            self._holder = before

    def rollback(self) -> None:
        self._check_seal()
        with self._alone():
            super().rollback()

    def _check_seal(self) -> None:
        if self.info.get(SEALED):
            raise SessionError(
                "this transaction is that of a consumer, which commits it together with the row of its inbox: "
                "a handler may use savepoints, and raises an error to have everything undone"
            )

    def merge(self, instance: Any, **kwargs: Any) -> Any:
        """The copy in the session takes over what the given aggregate has raised: nobody else would ever write it."""
        merged = super().merge(instance, **kwargs)
        for given in _with_cascade(instance):
            copy = merged if given is instance else self._copy_of(given)
            if copy is not given:
                self.collector.take_over(given, copy)
        return merged

    def merge_all(self, instances: Any, *, load: bool = True, options: Any = None) -> Any:
        """That of SQLAlchemy (since 2.1) leads past `merge`. As there, nothing is flushed between two of them."""
        if load:
            self._autoflush()
        with self.no_autoflush:
            return [self.merge(instance, load=load, options=options) for instance in instances]

    def _copy_of(self, given: Aggregate) -> Aggregate:
        """The object of this session that stands for a merged one."""
        mapper = inspect(type(given))
        key = mapper.primary_key_from_instance(given)
        for candidate in (self.identity_map.get(mapper.identity_key_from_primary_key(tuple(key))), *self.new):
            if type(candidate) is type(given) and mapper.primary_key_from_instance(candidate) == key:
                return candidate
        raise SessionError(f"merge would lose the events of a {type(given).__name__}: merge it by itself, or add it")

    def close(self) -> None:
        self._check_kept_open()
        before = self._enter()  # or somebody would go on with a connection that belongs to the next one
        try:
            super().close()
        finally:
            self._holder = before
        self.collector.let_go()

    def reset(self) -> None:
        self._check_kept_open()
        super().reset()

    def invalidate(self) -> None:
        self._check_kept_open()
        super().invalidate()

    def _check_kept_open(self) -> None:
        """A session that is closed forgets its transaction: the unit of work would commit nothing, without an error."""
        if self.info.get(KEPT_OPEN):
            raise SessionError(
                "the session of a unit of work is closed when its block ends, and cannot be closed in it: "
                "leave the block, or raise an error to undo everything"
            )

    def bulk_save_objects(self, objects: Any, *args: Any, **kwargs: Any) -> None:
        objects = list(objects)
        for item in objects:
            _refuse_bulk_of(type(item))
        super().bulk_save_objects(objects, *args, **kwargs)

    def bulk_insert_mappings(self, mapper: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_bulk_of(inspect(mapper).class_)
        super().bulk_insert_mappings(mapper, *args, **kwargs)

    def bulk_update_mappings(self, mapper: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_bulk_of(inspect(mapper).class_)
        super().bulk_update_mappings(mapper, *args, **kwargs)

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        bind = super().get_bind(*args, **kwargs)
        if GUARDED not in bind.dialect.__dict__:
            self.pillarbox.configure_transactions(bind.engine)
        return bind

    def connection(self, *args: Any, **kwargs: Any) -> Connection:
        self.pillarbox.tenancy.check_raw_connection(self, kwargs.get("execution_options"))
        return super().connection(*args, **kwargs)

    def lend_connection(self, function: Callable[..., _Found], *arguments: Any) -> _Found:
        """Call a function of the connection that this transaction has. Its statements are ours, and no user's."""
        with self._alone():
            return function(Session.connection(self), *arguments)

    def _is_clean(self) -> bool:
        # COMMIT and savepoints ask this to see whether a flush is needed: a session with nothing but events needs one.
        # A rollback asks it, too, to see what came after it; what is still there then goes with the transaction.
        return not (self.collector.pending and self.is_active) and super()._is_clean()

    @property
    def busy(self) -> bool:
        """Whether somebody is in the middle of an operation of this session."""
        return self._holder is not None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        before = self._enter()
        try:
            yield
        finally:
            self._holder = before

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Our own task goes on with the session in another greenlet, and we wait for it."""
        before, self._holder = self._holder, None
        try:
            yield
        finally:
            self._holder = before

    def _enter(self) -> greenlet.greenlet | None:
        """Every operation of an AsyncSession runs in a greenlet of its own, and every thread has one: two at once are
        two users. Who was here before comes back, to be put back by whoever leaves.
        """
        me, before = greenlet.getcurrent(), self._holder
        if before is not None and before is not me and not before.dead:
            raise SessionSharedError(
                "two tasks or threads use one session at the same time; give each its own "
                "(handing a session on is fine)"
            )
        self._holder = me
        return before if before is me else None


def bind(maker: Any, outbox: Outbox) -> None:
    """Make every session of this sessionmaker collect events for the box. The maker is changed in place."""
    if isinstance(maker, async_sessionmaker):
        base = maker.kw.get("sync_session_class") or maker.class_.sync_session_class
        if bound := _bound_class(base, outbox):
            maker.configure(sync_session_class=bound)
    elif isinstance(maker, sessionmaker):
        if bound := _bound_class(maker.class_, outbox):
            maker.class_ = bound
    else:
        raise SessionError(f"bind takes a sessionmaker or async_sessionmaker, got {type(maker).__name__}")


def bound_session(session: Session | AsyncSession) -> BoundSession:
    """The session of a box that this is."""
    plain = session.sync_session if isinstance(session, AsyncSession) else session
    if not isinstance(plain, BoundSession):
        raise SessionNotBoundError(
            "this session does not belong to the box: make it with a sessionmaker that went through box.bind(...), "
            "or use box.unit_of_work()"
        )
    return plain


def _bound_class(base: type[Session], outbox: Outbox) -> type[Session] | None:
    if issubclass(base, BoundSession):
        if base.pillarbox is not outbox:
            raise SessionError("this sessionmaker is bound to another box")
        return None
    bound = type(base.__name__, (BoundSession, base), {"pillarbox": outbox})
    for name, listener in _LISTENERS.items():
        sqlalchemy_events.listen(bound, name, listener)
    outbox.tenancy.listen(bound)
    return bound


def _after_transaction_create(session: BoundSession, transaction: SessionTransaction) -> None:
    if transaction.origin is not SessionTransactionOrigin.SUBTRANSACTION:  # as every flush has one
        session.collector.begun()


def _after_transaction_end(session: BoundSession, transaction: SessionTransaction) -> None:
    if transaction.origin is not SessionTransactionOrigin.SUBTRANSACTION:
        session.collector.ended()


def _before_commit(session: BoundSession) -> None:
    if session.pillarbox.signals.observers:
        session.collector.commit_begins()


def _after_commit(session: BoundSession) -> None:
    session.collector.committing()


def _after_rollback(session: BoundSession) -> None:
    session.collector.rolled_back()


def _added(session: BoundSession, instance: object) -> None:
    if isinstance(instance, Aggregate):
        session.collector.attach(instance, new=True)


def _arrived(session: BoundSession, instance: object) -> None:
    if isinstance(instance, Aggregate):
        session.collector.attach(instance, new=False)


def _left(session: BoundSession, instance: object) -> None:
    if isinstance(instance, Aggregate):
        if not session.is_active:
            session.collector.rolled_back()  # nobody says so if ROLLBACK itself failed or was cancelled
        session.collector.detach(instance)


def _refuse_bulk(state: ORMExecuteState) -> None:
    if not (state.is_update or state.is_delete or state.is_insert):
        return
    statement: Any = state.statement
    if isinstance(statement, FromStatement):
        statement = statement.element
    # What is around a statement does not take over its options, and the mark may stand on either.
    if state.execution_options.get(BULK_ALLOWED) or statement.get_execution_options().get(BULK_ALLOWED):
        return
    table = getattr(statement, "table", None)
    for owner in _subclasses(Aggregate):
        mapper = owner.__dict__.get("__mapper__")
        if mapper is not None and table in mapper.tables:
            _refuse_bulk_of(owner)


def _refuse_bulk_of(owner: type) -> None:
    if issubclass(owner, Aggregate):
        raise BulkStatementError(
            f"a bulk statement on {owner.__name__} changes aggregates without raising their events; "
            f"load them, or mark the statement with .execution_options({BULK_ALLOWED}=True) if that is meant"
        )


_LISTENERS: dict[str, Callable[..., None]] = {
    "after_transaction_create": _after_transaction_create,
    "after_transaction_end": _after_transaction_end,
    "before_commit": _before_commit,
    "after_commit": _after_commit,
    "after_rollback": _after_rollback,
    "transient_to_pending": _added,
    "loaded_as_persistent": _arrived,
    "detached_to_persistent": _arrived,
    "pending_to_transient": _left,
    "persistent_to_transient": _left,
    "persistent_to_detached": _left,
    "deleted_to_detached": _left,
    "do_orm_execute": _refuse_bulk,
}


def _with_cascade(instance: object) -> list[Aggregate]:
    """The aggregates with events among an object and all that merge takes along with it."""
    state = inspect(instance)
    found = [instance, *(row[0] for row in state.mapper.cascade_iterator("merge", state))]
    return [item for item in found if isinstance(item, Aggregate) and recorded_by(item).events]


def _subclasses(cls: type[Aggregate]) -> Iterator[type[Aggregate]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
