"""Aggregates: plain ones and every kind of SQLAlchemy class."""

from __future__ import annotations

import copy
import pickle
from uuid import UUID, uuid4

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column

from pillarbox import Aggregate, EventError
from tests.domain import Order, OrderNoted, OrderPlaced


class Base(DeclarativeBase):
    pass


class DataBase(MappedAsDataclass, DeclarativeBase):
    pass


class First(Aggregate, Base):
    __tablename__ = "first"
    id: Mapped[int] = mapped_column(primary_key=True)


class Last(Base, Aggregate):
    __tablename__ = "last"
    tenant: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)


class FirstData(Aggregate, DataBase):
    __tablename__ = "first_data"
    id: Mapped[int] = mapped_column(primary_key=True)
    revision: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"version_id_col": revision}  # noqa: RUF012  SQLAlchemy's way


class LastData(DataBase, Aggregate):
    __tablename__ = "last_data"
    id: Mapped[int] = mapped_column(primary_key=True)


class ShoppingCart(Aggregate):
    def __init__(self, cart_id: UUID) -> None:
        self.id = cart_id
        self.version = 4


class TestRaising:
    def test_what_is_raised_is_handed_over_once(self) -> None:
        order = Order.place(100)
        order.note("x")
        assert order.pull_events() == [OrderPlaced(order_id=order.id, total_cents=100), OrderNoted(note="x")]
        assert order.pull_events() == []

    @pytest.mark.parametrize(
        "make", [lambda: First(id=1), lambda: Last(tenant="a", number=1), lambda: FirstData(1), lambda: LastData(1)]
    )
    def test_every_kind_of_mapped_class_can_raise(self, make: object) -> None:
        aggregate = make()  # type: ignore[operator]
        aggregate.raise_event(OrderNoted(note="x"))
        assert aggregate.pull_events() == [OrderNoted(note="x")]

    def test_a_dataclass_stays_what_it_was(self) -> None:
        one, other = FirstData(1), FirstData(1)
        one.raise_event(OrderNoted(note="x"))
        assert one == other
        assert "pillarbox" not in repr(one)

    def test_copies_have_raised_nothing(self) -> None:
        cart = ShoppingCart(uuid4())
        cart.raise_event(OrderNoted(note="x"))
        for twin in (copy.copy(cart), copy.deepcopy(cart), pickle.loads(pickle.dumps(cart))):  # noqa: S301  our own bytes
            assert twin.pull_events() == []
        assert len(cart.pull_events()) == 1


class TestIdentity:
    def test_mapped_classes_tell_their_key_and_version(self) -> None:
        data = FirstData(7, revision=3)
        assert (data.aggregate_type, data.aggregate_id, data.aggregate_version) == ("first_data", "7", 3)
        last = Last(tenant="acme", number=7)
        assert (last.aggregate_type, last.aggregate_id, last.aggregate_version) == ("last", "acme:7", None)
        assert Last(tenant="a:1", number=7).aggregate_id == "a%3A1:7"

    def test_plain_classes_tell_their_attributes(self) -> None:
        cart = ShoppingCart(UUID(int=1))
        assert (cart.aggregate_type, cart.aggregate_id, cart.aggregate_version) == (
            "shopping_cart",
            str(UUID(int=1)),
            4,
        )

    def test_without_an_identity_there_is_no_order(self) -> None:
        with pytest.raises(EventError, match="no identity"):
            First().aggregate_id  # noqa: B018  reading it is the test
