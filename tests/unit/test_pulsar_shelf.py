"""The shelf of a Pulsar member, against what it must do for any history of refusals and redeliveries."""

from __future__ import annotations

import random

import pytest

from pillarbox.transport import Message
from pillarbox.transports.pulsar.shelf import Copy, Shelf


def copy(order: int, lane: str, *, place: int | None = None, attempts: int = 0) -> Copy:
    message = Message("orders", lane, b"", {})
    return Copy(message, order, order if place is None else place, lane, f"id-{order}", "orders", attempts)


def shelf_of(lanes: str) -> tuple[Shelf, list[Copy]]:
    shelf, copies = Shelf(), [copy(order, lane) for order, lane in enumerate(lanes)]
    for each in copies:
        assert shelf.put(each)
    return shelf, copies


def test_what_is_behind_a_resting_one_waits_and_what_is_before_it_does_not() -> None:
    shelf, (one, two, three) = shelf_of("aaa")
    assert shelf.take(3) == [one, two, three]
    assert shelf.hold(two)
    assert shelf.hold(one)
    assert shelf.hold(three)
    shelf.release(three)
    assert shelf.take(3) == []
    shelf.release(one)
    assert shelf.take(3) == [one]
    shelf.release(two)
    assert shelf.take(3) == [two, three]
    assert [each.attempts for each in (one, two, three)] == [2, 2, 2]


def test_only_what_is_out_can_rest() -> None:
    shelf, (one,) = shelf_of("a")
    assert not shelf.hold(one)
    shelf.take(1)
    assert shelf.hold(one)
    assert not shelf.hold(one)
    shelf.drop(one)
    shelf.release(one)
    assert shelf.take(1) == []
    assert len(shelf) == 0


def test_what_comes_again_is_offered_again_only_if_it_is_out() -> None:
    shelf, (one, two) = shelf_of("aa")
    shelf.take(1)
    assert not shelf.put(copy(2, "a", place=0, attempts=1))
    assert not shelf.put(copy(3, "a", place=1, attempts=1))
    assert shelf.take(9) == [one, two]
    assert (one.id, one.attempts, one.offers) == ("id-2", 2, 2)
    assert (two.id, two.attempts, two.offers) == ("id-3", 2, 1)


@pytest.mark.parametrize("seed", range(50))
def test_order_per_lane_through_any_history(seed: int) -> None:
    """Whoever acknowledges only what is the first of its lane sees each lane in order, and all of it."""
    dice = random.Random(seed)
    shelf, copies = shelf_of("".join(dice.choices("abc", k=60)))
    done: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    resting: list[Copy] = []
    while len(shelf):
        refused: list[Copy] = []
        for each in shelf.take(dice.randint(1, 5)):
            lane = str(each.lane)
            assert not [other for other in resting if other.lane == lane and other.order < each.order]
            first = next(other for other in copies if other.lane == lane and other.order not in done[lane])
            if each is first and dice.random() < 0.7:
                done[lane].append(each.order)
                shelf.drop(each)
            else:
                refused.append(each)
        for each in refused:
            assert shelf.hold(each)
        resting += refused
        dice.shuffle(resting)
        for _ in range(dice.randint(0, len(resting))):
            shelf.release(resting.pop())
    assert all(orders == sorted(orders) for orders in done.values())
