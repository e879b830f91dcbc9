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
from uuid import UUID

import msgspec
from sqlalchemy import BigInteger, Boolean, Connection, Integer, Table
from sqlalchemy import inspect as inspect_row
from sqlalchemy.orm import Mapper, Session, mapped_column

from ..cache import Cache
from ..consumers.handling import Incoming, LeftOut, MessageContext
from ..errors import ConcurrencyError, ConfigurationError, HoldFullError, Poison, TenancyError
from ..event import EventType, registry
from ..inbox import Letter, LetterFilter, LetterKind, Letters, LetterState
from ..interceptors.read_cache import cache_key, forget_afterwards
from ..scope import TenantScoped, mixin_column
from ..stores.columns import Utc, now
from ..tenancy import session_tenant
from ..transport import Message
from ..unit_of_work import UnitOfWork
from .change import Act, Change, Key, Position, RowState, Shape
from .upsert import Writer

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
    held: int = 0
    """Of these, those that wait now."""
    version_lag: int = 0
    """By how many versions an event was ahead, at most."""

    def add(self, other: Tally) -> None:
        self.applied += other.applied
        self.stale += other.stale
        self.gaps += other.gaps
        self.held += other.held
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


class _Told(msgspec.Struct, gc=False):
    """An event, and what the handler says to it."""

    incoming: Incoming
    changes: Sequence[Change]
    position: Position | None
    """None if nothing can be told by it."""
    letter: int | None = None
    """Its letter, if it was held."""
    is_stale: bool = False
    """A row had seen this one or a later one."""


class Projection:
    """`Effects` that write the rows of a table. Made without arguments; see the top of this module.

    Options of the class: ``row``; ``name`` (the table's); ``guarded=False`` for rows that are not about one aggregate,
    as counters: then all rests on the inbox; ``contiguous=True`` for those that must not miss an event: one that comes
    too early is held, up to ``hold`` of them; ``ignores``: events that matter only because they have a version.
    """

    name: ClassVar[str]
    row: ClassVar[type]
    guarded: ClassVar[bool]
    contiguous: ClassVar[bool]
    hold: ClassVar[int]
    _shape: ClassVar[Shape]
    _calls: ClassVar[Mapping[type, _Call]]
    _kinds: ClassVar[Mapping[type, EventType]]
    _key_of: ClassVar[Callable[[str], Any]]

    letters: Letters | None
    """Where events that are held wait. Given by the consumer."""
    read: Callable[[Message], Incoming] | None
    """How the event in a letter is read. Given by the consumer."""

    def __init_subclass__(
        cls,
        *,
        row: type | None = None,
        name: str | None = None,
        guarded: bool = True,
        contiguous: bool = False,
        hold: int = 1000,
        ignores: Collection[type] = (),
    ) -> None:
        super().__init_subclass__()
        if row is None:
            return  # a base of projections
        mapper: Any = inspect_row(row, raiseerr=False)
        if not isinstance(mapper, Mapper):
            raise ConfigurationError(f"{cls.__qualname__}: row takes a mapped class, got {row!r}")
        cls._shape = Shape(row, mapper)
        cls.row, cls.name = row, name or str(cls._shape.table.name)  # SQLAlchemy's own kind of text
        cls.guarded, cls.contiguous, cls.hold = guarded, contiguous, hold
        cls._calls = _calls_of(cls, ignores)
        cls._kinds = {kind: registry.of_type(kind) for kind in cls._calls}
        if contiguous and not guarded:
            raise ConfigurationError(f"{cls.__qualname__}: contiguous=True needs the guard")
        if contiguous or ignores:
            cls._key_of = staticmethod(_from_text(cls.__qualname__, cls._shape))

    def __init__(self) -> None:
        if not hasattr(type(self), "_shape"):
            raise ConfigurationError(f"{type(self).__qualname__} has no row: write class ...(Projection, row=...)")
        self.tally = Tally()
        """What was done since somebody has put a new one here."""
        self.cache: Cache | None = None
        """What readers have of these rows; it forgets those that change."""
        self.letters = None
        self.read = None
        self._writer = Writer(self._shape.table, self._shape)

    @property
    def table(self) -> Table:
        """The table that is written."""
        return self._writer.table

    @property
    def kinds(self) -> Collection[EventType]:
        return self._kinds.values()

    def left_out(self) -> LeftOut:
        tally, self.tally = self.tally, Tally()
        return LeftOut(tally.stale, tally.gaps, tally.version_lag)

    def into(self, table: Table) -> Self:
        """The same, for another table with the same columns."""
        if lacking := {column.name for column in self._shape.table.columns} - {c.name for c in table.columns}:
            raise ConfigurationError(f"the table {table.name} has no column {min(lacking)!r}")
        other = copy.copy(self)
        other.tally, other._writer, other.cache = Tally(), Writer(table, self._shape), None
        return other

    # -- for handlers --------------------------------------------------------------------------------------------------

    def put(self, **values: Any) -> Change:
        """Change these columns of the row with this primary key. There will be one if there is none."""
        return self._shape.put(values)

    def remove(self, **key: Any) -> Change:
        """Remove the row with this primary key. A tombstone without content stays, so that older events do not bring
        it back; a later put does.
        """
        return self._shape.remove(key)

    # -- `Effects` -----------------------------------------------------------------------------------------------------

    async def apply(self, uow: UnitOfWork, incoming: Sequence[Incoming]) -> Sequence[Incoming]:
        """Write what these events change, in the transaction of ``uow``. Those that are stale come back."""
        told = [self._told(one) for one in incoming]
        if any(one.changes for one in told):
            await uow.session.run_sync(self._apply, told)
        return [one.incoming for one in told if one.is_stale]

    def _apply(self, session: Session, told: Sequence[_Told]) -> None:
        tenant = self._tenant_of(session, told)
        connection, tally = session.connection(), Tally()
        rows = None if self._writer.must_look(connection) else self._blind_rows(told)
        if rows is None:
            changes = [change for one in told for change in one.changes]
            rows = {change.key: RowState(self._shape, change.key) for change in changes}
            whole = self.contiguous or not all(change.is_whole for change in changes)
            self._writer.load(connection, rows, tenant, whole=whole)
        if self.contiguous:
            self._fold_contiguous(connection, rows, told, tally)
        else:
            for one in told:
                self._fold(rows, one, tally)
        self._writer.write(connection, rows, tenant)
        if self.cache is not None:
            changed = [self._shape.identity(row.key, tenant) for row in rows.values() if row.is_changed]
            forget_afterwards(session, self.cache, [cache_key(self.row, tenant, identity) for identity in changed])
        self.tally.add(tally)

    def _told(self, incoming: Incoming, letter: int | None = None) -> _Told:
        event, context = incoming
        said = self._calls[type(event)](self, event, context)
        changes: Sequence[Change] = (said,) if isinstance(said, Change) else self._several(event, said)
        position = self._position(context)
        if self.contiguous and position is not None:
            changes = self._checked(context, changes)
        return _Told(incoming, changes, position, letter)

    def _several(self, event: object, said: Any) -> Sequence[Change]:
        changes = tuple(said) if isinstance(said, Iterable) else () if said is None else (said,)
        if wrong := [each for each in changes if not isinstance(each, Change)]:
            raise ConfigurationError(
                f"{type(self).__qualname__}: the handler of {type(event).__qualname__} returns a Change, several, "
                f"or None; got a {type(wrong[0]).__name__}"
            )
        return changes

    def _checked(self, context: MessageContext, changes: Sequence[Change]) -> Sequence[Change]:
        """The changes of a contiguous projection: of one row, which in any case sees the event."""
        key = self._own_key(context)
        for change in changes:
            if change.key != key:
                raise ConfigurationError(
                    f"{type(self).__qualname__} is contiguous: an event of {context.aggregate_id!r} cannot change the "
                    f"row {change.key[0]!r}"
                )
        return changes or (_advance(key),)

    def _ignored(self, _event: Any, context: MessageContext) -> Change | None:
        return None if self._position(context) is None else _advance(self._own_key(context))

    def _own_key(self, context: MessageContext) -> Key:
        """The row of the aggregate whose event it is."""
        said = context.aggregate_id
        if said is None:
            raise Poison(f"{self.name}: an event has a version, and no aggregate id")
        try:
            return (type(self)._key_of(said),)
        except ValueError:
            raise Poison(f"{self.name}: the aggregate id {said!r} is no {self._shape.key[0]} of its rows") from None

    def _position(self, context: MessageContext) -> Position | None:
        """Where the event stands; None if nothing can be told by it."""
        return (context.version, context.event_index) if self.guarded and context.version is not None else None

    def _tenant_of(self, session: Session, told: Sequence[_Told]) -> str | None:
        if self._shape.tenant is None:
            return None
        tenants = {one.incoming.context.tenant for one in told}
        tenant = tenants.pop()
        if tenant is None or tenants or session_tenant(session) not in (None, tenant):
            raise TenancyError(f"{self.name}: events of one tenant, in a session of that tenant, are needed")
        return tenant

    # -- each event in its turn ----------------------------------------------------------------------------------------

    def _blind_rows(self, told: Sequence[_Told]) -> dict[Key, RowState] | None:
        """The rows, if they can be written without a look at them: no guard, and all that a new row needs is said."""
        if any(one.position is not None for one in told):
            return None
        changes = [change for one in told for change in one.changes]
        if not all(change.is_whole or self._shape.is_insertable(change.values) for change in changes):
            return None
        return {change.key: RowState(self._shape, change.key, is_known=False) for change in changes}

    def _fold(self, rows: Mapping[Key, RowState], one: _Told, tally: Tally) -> None:
        """Let an event change its rows, unless they have seen a later one."""
        for change in one.changes:
            row = rows[change.key]
            if row.latest is not one:
                row.latest, row.takes = one, self._takes(row, change, one, tally)
                tally.applied += row.takes
            if row.takes:
                row.fold(change)

    def _takes(self, row: RowState, change: Change, one: _Told, tally: Tally) -> bool:
        if one.position is None:
            return True
        if change.act is Act.ADVANCE and not (self.contiguous or row.is_changed or row.stored):
            return False  # there is no row whose version could move on
        if one.position <= row.position and (row.stored is not None or row.is_changed):
            tally.stale += 1
            one.is_stale = True
            return False
        if one.position != row.successor:
            _count_gap(row, one.position, tally)
        row.position, row.count = one.position, one.incoming.context.event_count
        return True

    # -- contiguous ----------------------------------------------------------------------------------------------------

    def _fold_contiguous(
        self, connection: Connection, rows: Mapping[Key, RowState], told: Sequence[_Told], tally: Tally
    ) -> None:
        """Let events change their rows in the order of their versions. Those that come too early are held."""
        early = self._held(connection, rows, told)
        closed = [letter for row in rows.values() for letter in self._release(rows, row, early, tally)]
        for one in told:
            position = one.position
            row = rows[one.changes[0].key] if one.changes else None
            if row is None or position is None or position <= row.successor:
                self._fold(rows, one, tally)
                if row is not None:
                    closed += self._release(rows, row, early, tally)
            elif position in early.setdefault(row.key, {}):
                tally.stale += 1
            else:
                early[row.key][position] = one
        self._hold(connection, rows, early, tally)
        for letter in closed:
            if not _letters(self).close(connection, letter, LetterState.REDRIVEN):
                raise ConcurrencyError(
                    f"{self.name}: somebody else has closed the letter {letter} meanwhile: do it again"
                )

    def _held(
        self, connection: Connection, rows: Mapping[Key, RowState], told: Sequence[_Told]
    ) -> dict[Key, dict[Position, _Told]]:
        """The events that wait for these rows. The rows are locked, so nobody adds any."""
        early: dict[Key, dict[Position, _Told]] = {}
        if self.letters is None or self.read is None or all(row.stored is None for row in rows.values()):
            return early  # for whatever waits there is a row, if only a tombstone
        context = told[0].incoming.context
        ids = {one.incoming.context.aggregate_id for one in told}
        for letter in self._all_held(connection, self.letters, context):
            if letter.message.headers.get("aggregate_id") not in ids or letter.tenant != context.tenant:
                continue
            message = (
                letter.message if letter.edited is None else msgspec.structs.replace(letter.message, body=letter.body)
            )
            one = self._told(self.read(message), letter.id)
            if one.position is not None:
                early.setdefault(one.changes[0].key, {})[one.position] = one
        return early

    def _all_held(self, connection: Connection, letters: Letters, context: MessageContext) -> Iterable[Letter]:
        wanted = LetterFilter(consumer=context.consumer, tenant=context.tenant, kinds=(LetterKind.HELD,))
        page: Sequence[Letter] = letters.find(connection, wanted, limit=_PAGE)
        yield from page
        while len(page) == _PAGE:
            page = letters.find(connection, wanted, after=page[-1].id, limit=_PAGE)
            yield from page

    def _release(
        self, rows: Mapping[Key, RowState], row: RowState, early: Mapping[Key, dict[Position, _Told]], tally: Tally
    ) -> Sequence[int]:
        """Go on with those that have waited until the row came so far; their letters, which are to be closed."""
        closed: list[int] = []
        pool = early.get(row.key, {})
        for position in sorted(pool):
            if position > row.successor:
                break
            one = pool.pop(position)
            self._fold(rows, one, tally)
            if one.letter is not None:
                closed.append(one.letter)
        return closed

    def _hold(
        self,
        connection: Connection,
        rows: Mapping[Key, RowState],
        early: Mapping[Key, Mapping[Position, _Told]],
        tally: Tally,
    ) -> None:
        """Write a letter for each event that has come too early."""
        written: list[Letter] = []
        for key, pool in early.items():
            for position, one in pool.items():
                if one.letter is None:
                    rows[key].keep_place()
                    _count_gap(rows[key], position, tally)
                    written.append(self._letter(one.incoming, rows[key]))
        if not written:
            return
        letters = _letters(self)
        wanted = LetterFilter(consumer=written[0].consumer, kinds=(LetterKind.HELD,))
        waiting = sum(letters.count(connection, wanted).values())
        if waiting + len(written) > self.hold:
            raise HoldFullError(
                f"{self.name}: {waiting} events wait for events before them, and {len(written)} more would be over "
                f"the limit of {self.hold}; the oldest letter of kind 'held' shows which one is missing"
            )
        letters.write(connection, written)
        tally.held += len(written)

    def _letter(self, incoming: Incoming, row: RowState) -> Letter:
        context = incoming.context
        return Letter(
            consumer=context.consumer,
            kind=LetterKind.HELD,
            reason=f"event {context.event_index} of version {context.version} has come, and event "
            f"{row.successor[1]} of version {row.successor[0]} has not",
            message=context.message,
            event_id=context.event_id,
            event_type=context.event_type,
            schema_version=context.schema_version,
            tenant=context.tenant,
            attempts=context.attempt,
        )


_PAGE = 500


def _letters(projection: Projection) -> Letters:
    if projection.letters is None:
        raise ConfigurationError(f"{projection.name} is contiguous, and has no letters for events that come too early")
    return projection.letters


def _advance(key: Key) -> Change:
    return Change(Act.ADVANCE, key, {}, is_whole=False)


def _count_gap(row: RowState, position: Position, tally: Tally) -> None:
    tally.gaps += 1
    tally.version_lag = max(tally.version_lag, position[0] - row.successor[0])


# -- what a class is made of -------------------------------------------------------------------------------------------


def _calls_of(cls: type[Projection], ignores: Collection[type]) -> Mapping[type, _Call]:
    """The handler of each event."""
    calls: dict[type, _Call] = {}
    for name in dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base)):
        function = inspect.getattr_static(cls, name, None)
        for kind in getattr(function, _KINDS, ()):
            if kind in calls:
                raise ConfigurationError(f"{cls.__qualname__} has two handlers for {kind.__qualname__}")
            calls[kind] = _call_of(cls, function)
    for kind in ignores:
        if kind in calls:
            raise ConfigurationError(f"{cls.__qualname__} has a handler for {kind.__qualname__}, and ignores it")
        calls[kind] = Projection._ignored
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


def _from_text(where: str, shape: Shape) -> Callable[[str], Any]:
    """How the key of a row is read from the id of an aggregate."""
    if len(shape.key) != 1:
        raise ConfigurationError(
            f"{where}: contiguous and ignores need rows with one key, the id of the aggregate; "
            f"these have {', '.join(shape.key)}"
        )
    column = shape.table.c[shape.key[0]]
    kind: Callable[[str], Any] = column.type.python_type
    if kind not in (str, int, UUID):
        raise ConfigurationError(f"{where}: {column.name!r} must be a text, a whole number or a UUID, as ids are")
    return kind
