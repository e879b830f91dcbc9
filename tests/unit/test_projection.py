"""Projections without a database: what a class must look like, and what several changes of a row come to."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, cast
from uuid import UUID

import pytest
from sqlalchemy import ForeignKey, Interval, LargeBinary, PickleType, String
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column

from pillarbox import IntegrationEvent, TenantScoped
from pillarbox.consumers.handling import Effects, Incoming, MessageContext
from pillarbox.errors import ConfigurationError, Poison, UnregisteredEventError
from pillarbox.projections import Add, Change, Projection, ProjectionRow, Tally, on
from pillarbox.projections.change import Position, RowState


class LampLit(IntegrationEvent, name="tests.lamp.lit", version=1):
    lamp: str


class LampOut(IntegrationEvent, name="tests.lamp.out", version=1):
    lamp: str


class LampSold(IntegrationEvent, name="tests.lamp.sold", version=2):
    lamp: str


class Mood(Enum):
    GOOD = 1


class Base(DeclarativeBase):
    pass


class LampRow(ProjectionRow, Base):
    __tablename__ = "unit_lamps"

    lamp: Mapped[str] = mapped_column(String(20), primary_key=True)
    state: Mapped[str] = mapped_column("the_state", String(20))
    place: Mapped[str | None] = mapped_column(String(20))
    watts: Mapped[int] = mapped_column(default=5)
    by: Mapped[str] = mapped_column(String(20), server_default="nobody")


class PairRow(ProjectionRow, Base):
    __tablename__ = "unit_pairs"

    left: Mapped[int] = mapped_column(primary_key=True)
    right: Mapped[int] = mapped_column(primary_key=True)


class Lamps(Projection, row=LampRow):
    @on(LampLit, LampSold)
    def lit(self, event: LampLit | LampSold) -> Change:
        return self.put(lamp=event.lamp, state="lit")

    @on(LampOut)
    def out(self, event: LampOut) -> Change:
        return self.remove(lamp=event.lamp)


LAMPS = Lamps()
WHOLE = {"the_state": "lit", "place": "hall", "watts": 9, "by": "me"}


def lamp(stored: Position | None = None, values: dict[str, Any] | None = None) -> RowState:
    if stored is None:
        return RowState()
    return RowState(is_stored=True, is_alive=True, position=stored, values=dict(values or WHOLE))


def folded(row: RowState, changes: Sequence[Change]) -> RowState:
    for change in changes:
        row.fold(change)
    return row


class TestClasses:
    def test_a_projection_is_effects(self) -> None:
        effects: Effects = LAMPS
        assert [(kind.name, kind.version) for kind in effects.kinds] == [
            ("tests.lamp.lit", 1),
            ("tests.lamp.sold", 2),
            ("tests.lamp.out", 1),
        ]
        assert (LAMPS.name, LAMPS.table.name, LAMPS.tally) == ("unit_lamps", "unit_lamps", Tally())

    def test_a_handler_may_ask_for_the_circumstances_in_any_place(self) -> None:
        class Asking(Projection, row=LampRow, name="asking"):
            @on(LampLit)
            def lit(self, context: MessageContext, event: LampLit) -> Change:
                return self.put(lamp=event.lamp, state=context.key)

        context = MessageContext("c", "t", "key", None, UUID(int=1), "e", 1, datetime.now(UTC), 1, {}, None, 0, 1)
        [change] = [Asking._calls[LampLit](Asking(), LampLit(lamp="a"), context)]
        assert change == LAMPS.put(lamp="a", state="key")

    def test_handlers_are_inherited_and_can_be_replaced(self) -> None:
        class Brighter(Lamps, row=LampRow, name="brighter"):
            @on(LampLit)
            def lit(self, event: LampLit | LampSold) -> Change:
                return self.put(lamp=event.lamp, state="bright")

        assert {kind.name for kind in Brighter().kinds} == {"tests.lamp.lit", "tests.lamp.out"}

    def test_two_handlers_for_one_event(self) -> None:
        with pytest.raises(ConfigurationError, match="two handlers for LampLit"):

            class Twice(Projection, row=LampRow):
                @on(LampLit)
                def lit(self, event: LampLit) -> None: ...

                @on(LampLit)
                def lit_too(self, event: LampLit) -> None: ...

    def test_handlers_only_say_what_changes(self) -> None:
        with pytest.raises(ConfigurationError, match="def, not async def"):

            class Waiting(Projection, row=LampRow):
                @on(LampLit)
                async def lit(self, event: LampLit) -> None: ...

        with pytest.raises(ConfigurationError, match=r"Asking.*lit: a handler of a projection takes the event"):

            class AskingMuch(Projection, row=LampRow):
                @on(LampLit)
                def lit(self, event: LampLit, session: Any) -> None: ...

        with pytest.raises(ConfigurationError, match="on takes event types"):
            on("tests.lamp.lit")  # type: ignore[arg-type]

    def test_events_have_names(self) -> None:
        with pytest.raises(UnregisteredEventError):

            class Nameless(Projection, row=LampRow):
                @on(dict)
                def lit(self, event: Any) -> None: ...

    def test_something_must_be_handled(self) -> None:
        with pytest.raises(ConfigurationError, match="has no handler"):

            class Idle(Projection, row=LampRow):
                pass

        with pytest.raises(ConfigurationError, match="has no row"):
            Projection()

    @pytest.mark.parametrize(("said", "kind"), [({"lamp": "hall"}, "dict"), ("hall", "str"), (5, "int"), ([5], "int")])
    def test_a_handler_returns_changes_and_the_error_names_what_it_got(self, said: Any, kind: str) -> None:
        class Mistaken(Projection, row=LampRow):
            @on(LampLit)
            def lit(self, _event: LampLit) -> Any:
                return said

        with pytest.raises(ConfigurationError, match=f"returns a Change, several, or None; got a {kind}"):
            Mistaken()._changes(Incoming(LampLit(lamp="hall"), cast(MessageContext, None)))

    def test_rows_are_projection_rows(self) -> None:
        class Plain(Base):
            __tablename__ = "unit_plain"
            id: Mapped[int] = mapped_column(primary_key=True)

        for row, problem in ((Plain, "let it inherit from ProjectionRow"), (dict, "row takes a mapped class")):
            with pytest.raises(ConfigurationError, match=problem):

                class Wrong(Lamps, row=row):
                    pass

    def test_rows_are_in_one_table(self) -> None:
        class BigLamp(LampRow):
            __tablename__ = "unit_big_lamps"
            lamp: Mapped[str] = mapped_column(ForeignKey("unit_lamps.lamp"), primary_key=True)

        with pytest.raises(ConfigurationError, match="is in one table"):

            class BigLamps(Lamps, row=BigLamp):
                pass

    def test_the_tenant_is_part_of_the_key(self) -> None:
        class Own(ProjectionRow, TenantScoped, Base):
            __tablename__ = "unit_own_lamps"
            lamp: Mapped[str] = mapped_column(String(20), primary_key=True)

        table: Any = Own.__table__
        assert [column.name for column in table.primary_key] == ["tenant_id", "lamp"]

        class Loose(ProjectionRow, TenantScoped, Base):
            __tablename__ = "unit_loose_lamps"
            lamp: Mapped[str] = mapped_column(String(20), primary_key=True)
            tenant_id: Mapped[str] = mapped_column(String(20))

        with pytest.raises(ConfigurationError, match="its tenant_id must belong to the primary key"):

            class LooseLamps(Lamps, row=Loose):
                pass

    def test_rows_may_be_dataclasses(self) -> None:
        class DataBase(MappedAsDataclass, DeclarativeBase):
            pass

        class Data(ProjectionRow, DataBase):
            __tablename__ = "unit_data_lamps"
            lamp: Mapped[str] = mapped_column(String(20), primary_key=True)

        assert Data(lamp="a").lamp == "a"


class TestChanges:
    def test_names_are_those_of_the_class(self) -> None:
        assert LAMPS.put(state="lit", lamp="a") == LAMPS.put(lamp="a", state="lit")
        assert LAMPS.put(lamp="a", state="lit").values == {"the_state": "lit"}
        for values, problem in (
            ({"lamp": "a", "the_state": "lit"}, "LampRow has no 'the_state'"),
            ({"lamp": "a", "projected_version": 3}, "LampRow has no 'projected_version'"),
            ({"state": "lit"}, "'lamp' is in its primary key, and must be given"),
        ):
            with pytest.raises(ConfigurationError, match=problem):
                LAMPS.put(**values)
        with pytest.raises(ConfigurationError, match="remove takes the primary key, and no 'state'"):
            LAMPS.remove(lamp="a", state="lit")

    def test_whole_is_what_leaves_nothing_of_before(self) -> None:
        assert LAMPS.put(lamp="a", state="lit", place="hall", watts=1, by="me").is_whole
        assert not LAMPS.put(lamp="a", state="lit", place="hall", watts=Add(1), by="me").is_whole
        assert not LAMPS.put(lamp="a", state="lit").is_whole
        assert LAMPS.remove(lamp="a").is_whole


class TestFolding:
    def test_later_puts_go_over_earlier_ones(self) -> None:
        puts = [LAMPS.put(lamp="a", state="lit", watts=7), LAMPS.put(lamp="a", state="dim", place=None)]
        assert folded(lamp((1, 0)), puts).values == {"the_state": "dim", "place": None, "watts": 7, "by": "me"}

    def test_amounts_are_added_to_what_is_known(self) -> None:
        more = [LAMPS.put(lamp="a", watts=Add(2)), LAMPS.put(lamp="a", watts=Add(3))]
        assert folded(lamp((1, 0)), more).values["watts"] == 14
        assert folded(lamp(), more).values["watts"] == 5
        assert folded(lamp((1, 0), {**WHOLE, "watts": None}), more).values["watts"] == 5
        assert folded(lamp(), [*more, LAMPS.put(lamp="a", watts=1), *more]).values["watts"] == 6

    def test_nothing_is_left_of_what_was_removed(self) -> None:
        row = folded(lamp((1, 0)), [LAMPS.remove(lamp="a")])
        assert (row.is_alive, row.values) == (False, {"the_state": "", "place": None, "watts": 5, "by": ""})
        row = folded(row, [LAMPS.put(lamp="a", state="lit", by="me")])
        assert row.is_alive
        Lamps._shape.fill(row.values, entirely=True)
        assert row.values == {**WHOLE, "place": None, "watts": 5}

    def test_a_new_row_needs_what_has_no_default(self) -> None:
        shape, values = Lamps._shape, {"the_state": "lit"}
        shape.fill(values, entirely=False)
        assert values == {"the_state": "lit", "place": None, "watts": 5}
        with pytest.raises(Poison, match="says nothing about 'the_state'"):
            shape.fill({"watts": 3}, entirely=False)
        with pytest.raises(Poison, match="says nothing about 'by'"):
            shape.fill({"the_state": "lit"}, entirely=True)

    def test_what_comes_next(self) -> None:
        row = lamp()
        assert row.successor == (1, 0)
        row.position, row.count = (1, 0), 2
        assert row.successor == (1, 1)
        row.position = (1, 1)
        assert row.successor == (2, 0)

    def test_every_kind_of_column_has_something_to_leave(self) -> None:
        class Full(ProjectionRow, Base):
            __tablename__ = "unit_full"

            id: Mapped[int] = mapped_column(primary_key=True)
            price: Mapped[Decimal]
            mood: Mapped[Mood]
            seen: Mapped[bool]
            image: Mapped[bytes] = mapped_column(LargeBinary)
            lasts: Mapped[Any] = mapped_column(Interval, nullable=False)

        class Fulls(Projection, row=Full):
            @on(LampOut)
            def out(self, _event: LampOut) -> Change:
                return self.remove(id=1)

        assert dict(Fulls().remove(id=1).values).items() >= {"price": 0, "mood": Mood.GOOD, "image": b""}.items()

        class Strange(ProjectionRow, Base):
            __tablename__ = "unit_strange"

            id: Mapped[int] = mapped_column(primary_key=True)
            thing: Mapped[Any] = mapped_column(PickleType, nullable=False)

        class Stranges(Fulls, row=Strange):
            pass

        with pytest.raises(ConfigurationError, match="nothing is known to leave in 'thing'"):
            Stranges().remove(id=1)
