"""Projections: tables that events write, for those who read.

    class OrderRow(ProjectionRow, Base):
        __tablename__ = "order_summary"
        order_id: Mapped[UUID] = mapped_column(primary_key=True)
        status: Mapped[str]

    class OrderSummary(Projection, row=OrderRow):
        @on(OrderPlaced)
        def placed(self, event: OrderPlaced) -> Change:
            return self.put(order_id=event.order_id, status="placed")

Before this: events have come in, and the inbox knows them. After it: the rows are what these events say, and they know
which event was the last. One that is not later than that changes nothing, so events may come again, and in any order
that keeps to the rules: a row that was removed stays as a tombstone, and knows it too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from sqlalchemy import BigInteger, Boolean, Connection, Integer, Table
from sqlalchemy import inspect as inspect_row
from sqlalchemy.orm import Mapper, Session, mapped_column

from ..cache import Cache
from ..consumers.handling import EventsFailedError, Incoming, LeftOut, MessageContext
from ..errors import ConfigurationError, TenancyError
from ..event import EventType, registry
from ..interceptors.read_cache import cache_key, forget_at_end
from ..stores.columns import Utc, now
from ..tenancy import session_tenant
from ..tenant_scope import TenantScoped, mixin_column
from ..unit_of_work import UnitOfWork
from .change import Add, Change, Key, Position, RowState, Shape
from .rows import Rows

_KINDS = "__pillarbox_kinds__"
_Function = TypeVar("_Function", bound=Callable[..., Any])


class ProjectionRow:
    """Mixin for the mapped class of a projection's rows. Which event was the last to change the row is in the row.

    If the class is `TenantScoped` as well, its ``tenant_id`` becomes part of the primary key.
    """

    projected_version = mixin_column(lambda: mapped_column(BigInteger, nullable=False, default=0, sort_order=900))
    projected_index = mixin_column(lambda: mapped_column(Integer, nullable=False, default=0, sort_order=901))
    projected_count = mixin_column(lambda: mapped_column(Integer, nullable=False, default=1, sort_order=902))
    deleted = mixin_column(lambda: mapped_column(Boolean, nullable=False, default=False, sort_order=903))
    projected_at = mixin_column(lambda: mapped_column(Utc, nullable=False, default=now(), sort_order=904))

    def __init_subclass__(cls, **options: Any) -> None:
        if issubclass(cls, TenantScoped) and "tenant_id" not in vars(cls):
            made = vars(TenantScoped)["tenant_id"].fget(cls)
            made.column.primary_key = True
            cls.tenant_id = made
        super().__init_subclass__(**options)


@dataclass
class Tally:
    """What became of events, counted for each row that they concern."""

    applied: int = 0
    stale: int = 0
    """Not later than what the row had seen."""
    gaps: int = 0
    """Came when at least one before them had not."""
    version_lag: int = 0
    """By how many versions an event was ahead, at most."""

    def add(self, other: Tally) -> None:
        self.applied += other.applied
        self.stale += other.stale
        self.gaps += other.gaps
        self.version_lag = max(self.version_lag, other.version_lag)


def on(*kinds: type) -> Callable[[_Function], _Function]:
    """Decorator for methods of a `Projection`: it says what these events change.

    It takes the event and, if it has a parameter with that annotation, the `MessageContext`; it returns a `Change`,
    several of them, or None. It is called again for an event that comes again, so it must do nothing else.
    """
    if not kinds or not all(isinstance(kind, type) for kind in kinds):
        raise ConfigurationError(f"on takes event types, got {kinds!r}")

    def mark(function: _Function) -> _Function:
        setattr(function, _KINDS, (*getattr(function, _KINDS, ()), *kinds))
        return function

    return mark


_Call = Callable[[Any, Any, MessageContext], Change | Iterable[Change] | None]


class Projection:
    """`Effects` that write the rows of a table. Made without arguments; see the top of this module.

    Options of the class: ``row``; ``name`` (the table's); ``guarded=False`` for rows that are not about one aggregate,
    as counters: then all rests on the inbox.
    """

    name: ClassVar[str]
    row: ClassVar[type]
    guarded: ClassVar[bool]
    _shape: ClassVar[Shape]
    _calls: ClassVar[Mapping[type, _Call]]
    _kinds: ClassVar[Mapping[type, EventType]]

    def __init_subclass__(cls, *, row: type | None = None, name: str | None = None, guarded: bool = True) -> None:
        super().__init_subclass__()
        if row is None:
            return  # a base of projections
        mapper: Any = inspect_row(row, raiseerr=False)
        if not isinstance(mapper, Mapper):
            raise ConfigurationError(f"{cls.__qualname__}: row takes a mapped class, got {row!r}")
        cls._shape = Shape(row, mapper)
        cls.row, cls.name = row, name or str(cls._shape.table.name)  # SQLAlchemy's own kind of text
        cls.guarded = guarded
        cls._calls = _calls_of(cls)
        cls._kinds = {kind: registry.of_type(kind) for kind in cls._calls}

    def __init__(self) -> None:
        if not hasattr(type(self), "_shape"):
            raise ConfigurationError(f"{type(self).__qualname__} has no row: write class ...(Projection, row=...)")
        self.tally = Tally()
        """What was done since a new one was put here."""
        self.cache: Cache | None = None
        """What readers have of these rows; it forgets those that change."""
        self._rows = Rows(self._shape.table, self._shape)

    @property
    def table(self) -> Table:
        """The table that is written."""
        return self._rows.table

    @property
    def kinds(self) -> Collection[EventType]:
        return self._kinds.values()

    def left_out(self) -> LeftOut:
        tally, self.tally = self.tally, Tally()
        return LeftOut(tally.stale, tally.gaps, tally.version_lag)

    def into(self, table: Table) -> Self:
        """The same projection, for another table with the same columns."""
        other = copy.copy(self)
        other.tally, other._rows, other.cache = Tally(), Rows(table, self._shape), None
        return other

    # -- for handlers --------------------------------------------------------------------------------------------------

    def put(self, **values: Any) -> Change:
        """Change these columns of the row with this primary key. There will be one if there is none."""
        key, others = self._shape.form(tuple(values))
        content = {column: values[name] for column, name in others}
        is_whole = len(content) == len(self._shape.columns) and Add not in map(type, content.values())
        return Change(tuple([values[name] for name in key]), content, is_whole)

    def remove(self, **key: Any) -> Change:
        """Remove the row with this primary key. A tombstone without content stays, so that older events do not bring
        it back; a later put does.
        """
        names, others = self._shape.form(tuple(key))
        if others:
            raise ConfigurationError(f"{self.row.__qualname__}: remove takes the primary key, and no {others[0][1]!r}")
        return Change(tuple([key[name] for name in names]), self._shape.blank, is_whole=True, removes=True)

    # -- `Effects` -----------------------------------------------------------------------------------------------------

    names_failures = True

    async def apply(self, uow: UnitOfWork, incoming: Sequence[Incoming]) -> None:
        """Write what these events change, in the transaction of ``uow``."""
        if incoming:  # the inbox may have known all of them
            await uow.session.run_sync(self._apply, incoming)

    def _apply(self, session: Session, incoming: Sequence[Incoming]) -> None:
        tenant = self._tenant_of(incoming, session_tenant(session))
        changed = self.write(session.connection(), tenant, incoming)
        if self.cache is not None:
            keys = [cache_key(self.row, tenant, self._shape.identity(key, tenant)) for key in changed]
            forget_at_end(session, self.cache, keys)

    def write(self, connection: Connection, tenant: str | None, incoming: Sequence[Incoming]) -> Sequence[Key]:
        """Write what these events of one tenant change; the keys of the rows that have changed."""
        told, tally = self._all_changes(incoming), Tally()
        rows = {change.key: RowState() for changes in told for change in changes}
        whole = not all(change.is_whole for changes in told for change in changes)
        self._rows.load(connection, rows, tenant, whole=whole)
        for one, changes in zip(incoming, told, strict=True):
            self._fold(rows, one.context, changes, tally)
        self._rows.write(connection, rows, tenant)
        self.tally.add(tally)
        return [key for key, row in rows.items() if row.is_changed]

    def _fold(
        self, rows: Mapping[Key, RowState], context: MessageContext, changes: Sequence[Change], tally: Tally
    ) -> None:
        """Let an event change its rows, except those that have seen it or a later one."""
        position = self._position(context)
        taken: dict[int, bool] = {}  # an event may change a row twice
        for change in changes:
            row = rows[change.key]
            if id(row) not in taken:
                taken[id(row)] = _takes(row, position, context.event_count, tally)
            if taken[id(row)]:
                row.fold(change)

    def _all_changes(self, incoming: Sequence[Incoming]) -> Sequence[Sequence[Change]]:
        told, errors = list[Sequence[Change]](), dict[int, Exception]()
        for place, one in enumerate(incoming):
            try:
                told.append(self._changes(one))
            except Exception as error:
                if len(incoming) == 1:
                    raise
                errors[place] = error
        if errors:
            raise EventsFailedError(errors)
        return told

    def _changes(self, incoming: Incoming) -> Sequence[Change]:
        event = incoming.event
        said = self._calls[type(event)](self, event, incoming.context)
        if isinstance(said, Change):
            return (said,)
        is_one = isinstance(said, Mapping | str) or not isinstance(said, Iterable)
        changes: tuple[Any, ...] = () if said is None else (said,) if is_one else tuple(said)
        if wrong := [each for each in changes if not isinstance(each, Change)]:
            raise ConfigurationError(
                f"{type(self).__qualname__}: the handler of {type(event).__qualname__} returns a Change, several, "
                f"or None; got a {type(wrong[0]).__name__}"
            )
        return changes

    def _position(self, context: MessageContext) -> Position | None:
        """Where the event stands; None if nothing can be told by it."""
        return (context.version, context.event_index) if self.guarded and context.version is not None else None

    def _tenant_of(self, incoming: Sequence[Incoming], session: str | None) -> str | None:
        if self._shape.tenant is None:
            return None
        tenant, *others = {one.context.tenant for one in incoming}
        if tenant is None or others or session not in (None, tenant):
            raise TenancyError(f"{self.name}: events of one tenant, in a session of that tenant, are needed")
        return tenant


def _takes(row: RowState, position: Position | None, count: int, tally: Tally) -> bool:
    """Whether the row has seen nothing as late as this. If so, it has seen this now."""
    if position is not None:
        if position <= row.position and (row.is_stored or row.is_changed):
            tally.stale += 1
            return False
        if position != row.successor:
            tally.gaps += 1
            tally.version_lag = max(tally.version_lag, position[0] - row.successor[0])
        row.position, row.count = position, count
    tally.applied += 1
    return True


# -- what a class is made of -------------------------------------------------------------------------------------------


def _calls_of(cls: type[Projection]) -> Mapping[type, _Call]:
    """The handler of each event."""
    calls: dict[type, _Call] = {}
    for name in dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base)):
        function = inspect.getattr_static(cls, name, None)
        for kind in getattr(function, _KINDS, ()):
            if kind in calls:
                raise ConfigurationError(f"{cls.__qualname__} has two handlers for {kind.__qualname__}")
            calls[kind] = _call_of(cls, function)
    if not calls:
        raise ConfigurationError(f"{cls.__qualname__} has no handler: mark one with @on(...)")
    return calls


def _call_of(cls: type[Projection], function: Any) -> _Call:
    where = f"{cls.__qualname__}.{function.__name__}"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{where}: handlers of a projection only say what changes: def, not async def")
    wanted = [p for p in list(inspect.signature(function).parameters.values())[1:] if p.default is p.empty]
    contexts = [p.name for p in wanted if _is_context(p.annotation)]
    events = [p.name for p in wanted if not _is_context(p.annotation)]
    if len(events) != 1 or len(contexts) > 1:
        raise ConfigurationError(
            f"{where}: a handler of a projection takes the event and, if it is annotated so, a MessageContext"
        )
    if not contexts:
        return lambda self, event, _context: function(self, event)
    of_event, of_context = events[0], contexts[0]
    return lambda self, event, context: function(self, **{of_event: event, of_context: context})


def _is_context(annotation: object) -> bool:
    """Annotations may be texts, and name what only the enclosing function knows."""
    if isinstance(annotation, str):
        return annotation.strip("'\"").rpartition(".")[2] == MessageContext.__name__
    return annotation is MessageContext
