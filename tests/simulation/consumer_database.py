"""The database of simulated consumers: transactions that fail, end late or end unheard, and a box that uses it.

All that happens here happens at one instant; what takes time is the way there and back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, NamedTuple, Self, TypeVar, cast
from uuid import UUID

from sqlalchemy.exc import OperationalError

from pillarbox.codecs import Codecs
from pillarbox.consumers.box import Box
from pillarbox.errors import CommitOutcomeUnknown, DuplicateEventError
from pillarbox.outbox import INBOX_DESTINATION, Delivery, Direction, NewRows
from pillarbox.relay import Pacing, Relay, RelayStore
from pillarbox.route import Router
from pillarbox.stores import inbox as stored
from pillarbox.stores.operations import retry_now
from pillarbox.telemetry import SILENT
from pillarbox.transport import Capabilities, Publisher
from tests.memory.inbox import MemoryInbox, MemoryTable, MemoryTransaction, RowLockedError
from tests.simulation.inbound import InboundStore
from tests.simulation.loop import Life
from tests.simulation.wire import DULL, Chaos, Reply, Wire

_Found = TypeVar("_Found")

SOURCE = "broker"
SHARDS = 2
MARK = "simulated_mark"
"""The header with the number that the world knows a message by."""
LOST = 1.5
"""The server hears no ROLLBACK of a transaction that would linger for longer."""
UNHEARD = 30.0
"""Seconds after which the server ends a transaction whose client has given up waiting for its COMMIT. Longer than any
request is on its way: one that comes late still commits.
"""


EFFECT, FOLLOW_UP, SPILLED, DEAD_LETTER = "effect", "follow-up", "spilled", "dead letter"


_DULL = frozenset({"count_claims", "_prune"})
"""What a consumer asks every few seconds, besides what `Database.housekeeping` has."""


class Record(NamedTuple):
    """Something that was committed."""

    what: str
    mark: int


class _SerializationFailure(Exception):  # noqa: N818  named as the server calls it
    sqlstate = "40001"


class SimulatedTransaction(MemoryTransaction):
    """One that belongs to a process, and knows what will have been committed by it."""

    dialect = SimpleNamespace(name="memory")

    def __init__(self, life: Life, linger: float) -> None:
        super().__init__()
        self.life = life
        self.linger = linger
        """How long the server needs to see that its client is gone."""
        self.written: list[Record] = []
        self.xid: int | None = None
        """Its number, once it has written deliveries, and those with their ids."""
        self.spilled: list[tuple[list[int], Sequence[Delivery]]] = []

    def record(self, what: str, mark: int) -> None:
        """This is there if it commits."""
        self.written.append(Record(what, mark))
        self.wrote(lambda: self.written.remove(Record(what, mark)))


class Database:
    """What all processes share."""

    def __init__(self, chaos: Chaos, *, log: bool) -> None:
        self.inbox = MemoryInbox()
        self.store = InboundStore(
            self.inbox, shards=SHARDS, draw_token=lambda: UUID(int=chaos.draw.getrandbits(128)), log=log
        )
        self.dead_letters = MemoryTable[UUID, Delivery]()
        self.running = MemoryTable[str, tuple[Life, ...]]()
        """The processes that are noted to run a consumer."""
        self.housekeeping: Mapping[Callable[..., Any], Callable[..., Any]] = {
            stored.begin_life: self._begin_life,
            stored.end_life: self._end_life,
            stored.register_consumer: _nothing,
            stored.report_position: _nothing,
            retry_now: _nothing,
        }
        """What is written in SQL beside the ports, and what takes its place here."""
        self.log: list[Record] = []
        """All that was committed, in this order."""
        self.settled: set[int] = set()
        """The marks of what has an effect, or a delivery in a lane."""
        self.wrong: list[str] = []
        self.away = False
        self.open: dict[SimulatedTransaction, None] = {}
        self._chaos = chaos

    def begin(self, life: Life) -> SimulatedTransaction:
        """A transaction of a process."""
        transaction = SimulatedTransaction(life, self._chaos.between(0, 2))
        self.open[transaction] = None
        transaction.when_over(lambda: self.open.pop(transaction))
        return transaction

    def execute(self, transaction: SimulatedTransaction, function: Callable[..., Any], reply: Reply) -> None:
        """Call a function in a transaction, as soon as nobody else holds what it needs."""
        if self.away:
            transaction.rollback()
        if not transaction.is_open:
            reply(ConnectionError("the server has closed the connection"))
            return
        try:
            result = transaction.attempt(function)
        except RowLockedError as locked:
            self._chaos.happened["waits for another transaction"] += 1
            locked.owner.when_over(lambda: self.execute(transaction, function, reply))
            return
        except Exception as error:
            result = error
        reply(result)

    def commit(self, transaction: SimulatedTransaction, reply: Reply) -> None:
        """Let it stand, if nothing speaks against it."""
        if self.away:
            transaction.rollback()
        if not transaction.is_open:
            reply(ConnectionError("the server has closed the connection"))
        elif self._chaos.rate and self._chaos.draw.random() < self._chaos.rate:
            self._chaos.happened["commit fails"] += 1
            transaction.rollback()
            reply(OperationalError("COMMIT", {}, _SerializationFailure("could not serialize access")))
        else:
            self._chaos.note(
                transaction.life.name, "committed", *(f"{it.what} {it.mark}" for it in transaction.written)
            )
            self.log += transaction.written
            self.settled |= {it.mark for it in transaction.written if it.what in (EFFECT, SPILLED)}
            for ids, deliveries in transaction.spilled:
                self.store.commit(cast(int, transaction.xid), ids, deliveries)
            transaction.commit()
            if transaction.spilled:
                self.wrong += self.store.wrong_gates()
            reply(None)

    def append(self, transaction: SimulatedTransaction, deliveries: Sequence[Delivery]) -> None:
        """Write deliveries to lanes: their ids are given now, and they appear when it commits."""
        if transaction.xid is None:
            transaction.xid = xid = self.store.begin()
            transaction.when_over(lambda: self.store.end(xid))
        ids = self.store.reserve(len(deliveries))
        transaction.spilled.append((ids, deliveries))
        for delivery in deliveries:
            transaction.record(SPILLED, int(delivery.headers[MARK]))

    def serve(self, life: Life, name: str, args: Sequence[Any], options: Mapping[str, Any], reply: Reply) -> None:
        """A call of a relay has arrived, and waits for whoever has the claims that it is about."""
        if self.away:
            reply(ConnectionError("the database is away"))
            return
        try:
            result = _run_now(getattr(self.store, name)(*args, **options))
        except RowLockedError as locked:
            self._chaos.happened["waits for another transaction"] += 1
            locked.owner.when_over(lambda: self.serve(life, name, args, options, reply))
            return
        except Exception as error:
            result = error
        if name not in DULL:
            self._chaos.note(life.name, name, *args, options, result)
        reply(result)

    def _begin_life(self, transaction: SimulatedTransaction, name: str, *_signs: object, **_of_death: object) -> bool:
        """As `stored.begin_life` does it, but for the signs of death: here all processes have one number."""
        ours = transaction.life
        noted = self.running.hold(transaction, name) or ()
        left = [it for it in noted if it.alive or it.host != ours.host]
        self.running.write(transaction, name, (*left, ours))
        return len(left) < len(noted)

    def _end_life(self, transaction: SimulatedTransaction, name: str, *_signs: object) -> None:
        left = [*(self.running.hold(transaction, name) or ())]
        if transaction.life in left:
            left.remove(transaction.life)
        self.running.write(transaction, name, tuple(left))

    def restart(self) -> None:
        """No transaction survives it."""
        for transaction in [*self.open]:
            transaction.rollback()

    def lost(self, life: Life) -> None:
        """A process is gone; the server sees it before long."""
        for transaction in self.open:
            if transaction.life is life:
                self._chaos.later(transaction.linger, transaction.rollback)


class SimulatedUnitOfWork:
    """A transaction as a handler sees it. Objects are marks: adding one is the effect, publishing one the follow-up."""

    def __init__(self, database: Database, chaos: Chaos, life: Life, wire: Wire, *, commits_as: str = "commit") -> None:
        self._database = database
        self._chaos = chaos
        self._wire = wire
        self._commits_as = commits_as
        self._pending: list[Record] = []
        self.transaction = database.begin(life)

    def sealed(self) -> AbstractContextManager[None]:
        """Nobody ends it before its time here."""
        return nullcontext()

    def add(self, mark: int) -> None:
        """Let there be an effect."""
        self._pending.append(Record(EFFECT, mark))

    def publish(self, mark: int) -> None:
        """Raise an event."""
        self._pending.append(Record(FOLLOW_UP, mark))

    async def flush(self) -> None:
        """Write it."""
        pending, self._pending = self._pending, []
        for record in pending:
            await self.ask("write", partial(_record, record=record))

    async def ask(self, kind: str, function: Callable[[SimulatedTransaction], _Found]) -> _Found:
        """Have a function called in this transaction."""
        run = partial(self._database.execute, self.transaction, function)
        return cast(_Found, await self._wire.ask(kind, run))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.flush()
                await _uninterrupted(self._commit())
        finally:
            is_heard = error is not None and self.transaction.linger < LOST
            self._chaos.later(0.0 if is_heard else self.transaction.linger, self.transaction.rollback)

    async def _commit(self) -> None:
        try:
            await self._wire.ask(self._commits_as, partial(self._database.commit, self.transaction))
        except ConnectionError as error:
            self.transaction.linger = UNHEARD
            raise CommitOutcomeUnknown from error


class StorePort:
    """The lanes, as one process sees them: at the other end of a wire."""

    def __init__(self, database: Database, life: Life, wire: Wire) -> None:
        self._database = database
        self._life = life
        self._wire = wire

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            return await self._wire.ask(name, partial(self._database.serve, self._life, name, args, options))

        return call


class SimulatedPosts:
    """The way into the outbox of one process: what goes there are dead letters."""

    def __init__(self, database: Database, router: Router) -> None:
        self._database = database
        self._router = router

    def prepare(self, _transaction: SimulatedTransaction) -> None:
        """The routes are known."""
        ways = [it for it in self._router.records if it.direction is Direction.INBOUND]
        self._database.store.register(None, ways)

    def append(self, transaction: SimulatedTransaction, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if self._database.dead_letters.hold(transaction, delivery.event_id) is not None:
                raise DuplicateEventError("this dead letter was written before")
            self._database.dead_letters.write(transaction, delivery.event_id, delivery)
            transaction.record(DEAD_LETTER, int(delivery.headers[MARK]))

    def committed(self, _rows: NewRows, _prepared: None) -> None:
        """No relay waits for them."""


class SimulatedBox:
    """The box of one process."""

    takes_turns = False

    def __init__(self, database: Database, chaos: Chaos, life: Life, wire: Wire, pacing: Pacing) -> None:
        self.signals = SILENT
        self.codecs = Codecs()
        self.router = Router([], self.codecs.named, {SOURCE: Capabilities(), INBOX_DESTINATION: Capabilities()}, SHARDS)
        self.posts = SimulatedPosts(database, self.router)
        self.inbound = database
        self.turn = nullcontext()
        self._database = database
        self._pacing = pacing
        self._unit = partial(SimulatedUnitOfWork, database, chaos, life, wire)
        self._relay = partial(
            Relay, cast(RelayStore, StorePort(database, life, wire)), name=life.name, draw=chaos.draw.random
        )

    @property
    def as_box(self) -> Box:
        """For those who want the port: all but an engine is here."""
        return cast(Box, self)

    def unit_of_work(self, **_options: Any) -> SimulatedUnitOfWork:
        return self._unit()

    async def within(self, uow: SimulatedUnitOfWork, function: Callable[..., _Found], *arguments: Any) -> _Found:
        return await uow.ask("admit", lambda transaction: function(transaction, *arguments))

    async def apart(self, function: Callable[..., _Found], *arguments: Any, **options: Any) -> _Found:
        here: Callable[..., _Found] = self._database.housekeeping.get(function, function)
        is_dull = here is not function or function.__name__ in _DULL
        async with self._unit(commits_as="keep house" if is_dull else "commit") as uow:
            kind = "keep house" if is_dull else "spill"
            return await uow.ask(kind, lambda transaction: here(transaction, *arguments, **options))

    def relay_to(self, consumer: str, destination: Publisher, grace: float, *, inbound: bool) -> Relay:  # noqa: ARG002
        """As a box does it, but for the pacing."""
        return self._relay({f"{INBOX_DESTINATION}:{consumer}": destination}, pacing=self._pacing)


def _run_now(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("a store in memory does not wait")


def _nothing(*_arguments: Any, **_options: Any) -> None:
    """What only people see."""


def _record(transaction: SimulatedTransaction, record: Record) -> None:
    transaction.record(*record)


async def _uninterrupted(work: Any) -> None:
    """A COMMIT that was sent is waited for, whoever cancels us."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise
