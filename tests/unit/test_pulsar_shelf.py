"""The shelf of a Pulsar member, against any history of redeliveries, and the room in front of it."""

from __future__ import annotations

import math
import random
import threading

import pytest

from pillarbox.transport import Message
from pillarbox.transports.pulsar.shelf import Copy, Room, Shelf


def copy(order: int, *, place: int | None = None, attempt: int = 1, size: int = 0) -> Copy:
    message = Message("orders", "k", b"x" * size, {})
    return Copy(message, order, order if place is None else place, f"consumer-{order}", f"id-{order}", attempt)


def shelf_of(*sizes: int) -> tuple[Shelf, list[Copy]]:
    shelf, copies = Shelf(), [copy(order, size=size) for order, size in enumerate(sizes)]
    for each in copies:
        assert shelf.put(each)
    return shelf, copies


def test_what_comes_again_is_offered_again_only_if_it_is_out() -> None:
    shelf, (one, two) = shelf_of(0, 0)
    assert shelf.take(1, math.inf) == [one]
    assert not shelf.put(copy(2, place=0, attempt=2))
    assert not shelf.put(copy(3, place=1, attempt=2))
    assert shelf.take(9, math.inf) == [one, two]
    assert (one.id, one.consumer, one.attempt) == ("id-2", "consumer-2", 2)
    assert (two.id, two.consumer, two.attempt) == ("id-3", "consumer-3", 2)


def test_no_more_is_taken_than_asked_for_but_for_the_message_that_is_too_much() -> None:
    shelf, (one, two, three, four) = shelf_of(10, 10, 100, 10)
    assert shelf.take(9, 1) == [one]
    assert shelf.take(9, 11) == [two, three]
    assert shelf.take(0, math.inf) == []
    assert shelf.take(9, math.inf) == [four]


@pytest.mark.parametrize("seed", range(50))
def test_order_through_any_history(seed: int) -> None:
    """What is taken is in order, nothing is lost, and what is acknowledged does not come again."""
    dice, shelf, fresh = random.Random(seed), Shelf(), 0
    out: dict[int, Copy] = {}
    done: set[int] = set()
    for _ in range(300):
        match dice.randrange(4):
            case 0:
                shelf.put(copy(fresh))
                fresh += 1
            case 1:
                taken = shelf.take(dice.randrange(1, 4), math.inf)
                assert [each.order for each in taken] == sorted(each.order for each in taken)
                assert not done & {each.order for each in taken}
                out |= {each.order: each for each in taken}
            case 2 if out:
                acknowledged = out.pop(dice.choice([*out]))
                shelf.drop(acknowledged)
                done.add(acknowledged.order)
            case 3 if fresh > len(done):
                place = dice.choice([each for each in range(fresh) if each not in done])
                assert not shelf.put(copy(10_000 + fresh, place=place))
                out.pop(place, None)
    rest = {each.order for each in shelf.take(10_000, math.inf)}
    assert done | rest | out.keys() == {*range(fresh)}
    assert len(shelf) == fresh - len(done)


def test_who_brings_waits_for_room() -> None:
    room, brought = Room(2, 100), threading.Semaphore(0)

    def bring() -> None:
        for size in (10, 200, 1, 1, 1):
            if room.use(size):
                brought.release()

    bringing = threading.Thread(target=bring)
    bringing.start()
    for _ in range(2):
        assert brought.acquire(timeout=10)
    assert not brought.acquire(timeout=0.1)
    room.free(1, 10)  # of the two messages, there is room for one now, and for none of the bytes
    assert not brought.acquire(timeout=0.1)
    room.free(1, 200)
    assert brought.acquire(timeout=10)
    assert brought.acquire(timeout=10)
    room.close()
    bringing.join(10)
    assert not bringing.is_alive()
    assert not brought.acquire(blocking=False)
