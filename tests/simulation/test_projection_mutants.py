"""Projections under events that come again and in any order, by seed; and planted mistakes that this must find."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import Connection, String, delete, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import IntegrationEvent, Pillarbox
from pillarbox.codecs import Codecs
from pillarbox.consumers.handling import Incoming, Reader
from pillarbox.projections import Add, Change, Projection, ProjectionRow, Tally, on, projection
from pillarbox.projections.change import Position, RowState
from pillarbox.projections.rows import Rows
from pillarbox.transport import Message
from tests.domain import order_box
from tests.servers import Database

SEEDS = 25
LIMIT = 15
"""Seeds within which every mistake must show."""


class PurseStated(IntegrationEvent, name="tests.purse.stated", version=1):
    purse: UUID
    owner: str
    coins: int


class PurseFilled(IntegrationEvent, name="tests.purse.filled", version=1):
    purse: UUID
    coins: int


class PurseLost(IntegrationEvent, name="tests.purse.lost", version=1):
    purse: UUID


class Base(DeclarativeBase):
    pass


class PurseRow(ProjectionRow, Base):
    __tablename__ = "simulated_purses"

    purse: Mapped[UUID] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(String(20), default="nobody")
    coins: Mapped[int]


class _Purses(Projection):
    @on(PurseStated)
    def stated(self, event: PurseStated) -> Change:
        return self.put(purse=event.purse, owner=event.owner, coins=event.coins)

    @on(PurseLost)
    def lost(self, event: PurseLost) -> Change:
        return self.remove(purse=event.purse)


class LatestPurses(_Purses, row=PurseRow):
    """Each event says everything: the latest one counts, whatever is missing before it."""


class SummedPurses(_Purses, row=PurseRow):
    """Events add up: they come in their order, and old ones again."""

    @on(PurseFilled)
    def filled(self, event: PurseFilled) -> Change:
        return self.put(purse=event.purse, coins=Add(event.coins))


Purses = type[LatestPurses] | type[SummedPurses]
State = tuple[str, int] | None


class Story:
    """Some purses, what happens to them, and what they are in the end: by a plain fold."""

    def __init__(self, seed: int, kind: Purses) -> None:
        self._draw = random.Random(seed)
        self._kind = kind
        self.expected: dict[UUID, State] = {}
        self.messages: list[Message] = []
        for _ in range(3):
            self._live(UUID(int=self._draw.getrandbits(128)))

    def _live(self, purse: UUID) -> None:
        state: State = None
        for version in range(1, self._draw.randrange(3, 7)):
            count = self._draw.choice((1, 1, 2, 3))
            for index in range(count):
                event, state = self._next(purse, state)
                self.messages.append(self._message(purse, event, (version, index), count))
        self.expected[purse] = state

    def _next(self, purse: UUID, state: State) -> tuple[IntegrationEvent, State]:
        coins = self._draw.randrange(1, 1000)
        if state is not None and self._draw.random() < 0.2:
            return PurseLost(purse=purse), None
        if state is not None and self._kind is SummedPurses and self._draw.random() < 0.7:
            return PurseFilled(purse=purse, coins=coins), (state[0], state[1] + coins)
        owner = f"owner {self._draw.randrange(5)}"
        return PurseStated(purse=purse, owner=owner, coins=coins), (owner, coins)

    def _message(self, purse: UUID, event: Any, position: Position, count: int) -> Message:
        name = {PurseStated: "stated", PurseFilled: "filled", PurseLost: "lost"}[type(event)]
        payload: Mapping[str, Any] = {
            field: getattr(event, field) for field in ("purse", "owner", "coins") if hasattr(event, field)
        }
        headers = {
            "event_id": str(event.event_id),
            "event_type": f"tests.purse.{name}",
            "schema_version": "v1",
            "occurred_at": event.occurred_at.isoformat(),
            "aggregate_id": str(purse),
            "version": str(position[0]),
            "event_index": str(position[1]),
            "event_count": str(count),
        }
        return Message("purses", str(purse), msgspec.json.encode(payload), headers)

    def deliveries(self) -> list[list[Message]]:
        """All of it, each once or more, in batches; what adds up in its order, and the rest in any."""
        copies: list[Message] = []
        for message in reversed(self.messages):
            for _ in range(self._draw.choice((0, 1, 2))):
                copies.insert(self._draw.randrange(len(copies) + 1), message)
            copies.insert(0, message)
        if self._kind is LatestPurses:
            self._draw.shuffle(copies)
        batches = []
        while copies:
            size = self._draw.choice((1, 2, 5))
            batches.append(copies[:size])
            copies = copies[size:]
        return batches

    def fails(self) -> bool:
        """Whether a transaction does."""
        return self._draw.random() < 0.15


class _Failed(Exception):  # noqa: N818  an outcome
    """Makes a transaction roll back."""


async def difference(box: Pillarbox, kind: Purses, seed: int) -> str:
    """What is wrong after a story was told; nothing, if all is as the fold says."""
    story, projection = Story(seed, kind), kind()
    reader = Reader(f"purses-{seed}", projection, Codecs())

    def read(message: Message) -> Incoming:
        incoming = reader.read(message)
        assert incoming is not None
        return incoming

    for batch in story.deliveries():
        incoming = [read(message) for message in batch]
        if story.fails():
            with suppress(_Failed):
                async with box.unit_of_work() as uow:
                    await projection.apply(uow, incoming)
                    raise _Failed
        async with box.unit_of_work() as uow:
            await projection.apply(uow, incoming)
    return await box.apart(_compare, story)


def _compare(connection: Connection, story: Story) -> str:
    table = PurseRow.metadata.tables["simulated_purses"]
    found = connection.execute(select(table.c.purse, table.c.owner, table.c.coins, table.c.deleted)).all()
    there: dict[UUID, State] = {
        purse: None if deleted else (owner, coins) for purse, owner, coins, deleted in found if purse in story.expected
    }
    wrong = [
        f"{state} and not {there.get(purse)}" for purse, state in story.expected.items() if there.get(purse) != state
    ]
    return "; ".join(wrong)


@pytest.fixture
async def box(sqlite_database: Database) -> AsyncIterator[Pillarbox]:
    async with order_box(sqlite_database.url()) as box:
        await box.migrate()
        async with box.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        yield box


@pytest.mark.parametrize("kind", [LatestPurses, SummedPurses])
async def test_h84_h85_events_in_any_order_and_number_come_to_the_fold(box: Pillarbox, kind: Purses) -> None:
    assert not {seed: wrong for seed in range(SEEDS) if (wrong := await difference(box, kind, seed))}


# -- planted mistakes --------------------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def _no_guard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Projection, "_position", lambda _self, _context: None)


def _index_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Projection, "_position", lambda _self, context: (context.version, 0))


def _version_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Projection, "_position", lambda _self, context: (1, context.event_index))


def _tombstone_not_kept(patch: pytest.MonkeyPatch) -> None:
    write = Rows.write

    def thorough(self: Rows, connection: Connection, *arguments: Any) -> None:
        write(self, connection, *arguments)
        connection.execute(delete(self.table).where(self.table.c.deleted))

    patch.setattr(Rows, "write", thorough)


def _duplicate_applied(patch: pytest.MonkeyPatch) -> None:
    takes = projection._takes

    def greedy(row: RowState, position: Position | None, count: int, tally: Tally) -> bool:
        return position == row.position or takes(row, position, count, tally)

    patch.setattr(projection, "_takes", greedy)


MISTAKES: Sequence[tuple[Plant, Purses]] = (
    (_no_guard, LatestPurses),
    (_index_ignored, LatestPurses),
    (_version_ignored, LatestPurses),
    (_tombstone_not_kept, LatestPurses),
    (_tombstone_not_kept, SummedPurses),
    (_duplicate_applied, SummedPurses),
    (_no_guard, SummedPurses),
)


@pytest.mark.parametrize(
    ("plant", "kind"), MISTAKES, ids=[f"{plant.__name__[1:]}-{kind.__name__}" for plant, kind in MISTAKES]
)
async def test_a_planted_mistake_of_a_projection_is_caught(
    box: Pillarbox, monkeypatch: pytest.MonkeyPatch, plant: Plant, kind: Purses
) -> None:
    plant(monkeypatch)
    for seed in range(LIMIT):
        if await difference(box, kind, seed):
            return
    pytest.fail("nothing was wrong")
