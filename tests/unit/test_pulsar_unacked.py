"""The unacked of a Pulsar member, against any history of redeliveries, and the room in front of it."""

from __future__ import annotations

import math
import random
import threading

import pytest

from pillarbox.transport import Message
from pillarbox.transports.pulsar.unacked import Copy, Room, Unacked


def copy(order: int, *, place: int | None = None, attempt: int = 1, size: int = 0) -> Copy:
    message = Message("orders", "k", b"x" * size, {})
    return Copy(message, order, order if place is None else place, f"consumer-{order}", f"id-{order}", attempt)


def unacked_of(*sizes: int) -> tuple[Unacked, list[Copy]]:
    unacked, copies = Unacked(), [copy(order, size=size) for order, size in enumerate(sizes)]
    for each in copies:
        assert unacked.put(each)
    return unacked, copies


def test_what_comes_again_is_offered_again_only_if_it_is_out() -> None:
    unacked, (one, two) = unacked_of(0, 0)
    assert unacked.take(1, math.inf) == [one]
    assert not unacked.put(copy(2, place=0, attempt=2))
    assert not unacked.put(copy(3, place=1, attempt=2))
    assert unacked.take(9, math.inf) == [one, two]
    assert (one.id, one.consumer, one.attempt) == ("id-2", "consumer-2", 2)
    assert (two.id, two.consumer, two.attempt) == ("id-3", "consumer-3", 2)


def test_no_more_is_taken_than_asked_for_but_for_the_message_that_is_too_much() -> None:
    unacked, (one, two, three, four) = unacked_of(10, 10, 100, 10)
    assert unacked.take(9, 1) == [one]
    assert unacked.take(9, 11) == [two, three]
    assert unacked.take(0, math.inf) == []
    assert unacked.take(9, math.inf) == [four]


@pytest.mark.parametrize("seed", range(50))
def test_order_through_any_history(seed: int) -> None:
    """What is taken is in order, nothing is lost, and what is acknowledged does not come again."""
    dice, unacked, fresh = random.Random(seed), Unacked(), 0
    out: dict[int, Copy] = {}
    done: set[int] = set()
    for _ in range(300):
        match dice.randrange(4):
            case 0:
                unacked.put(copy(fresh))
                fresh += 1
            case 1:
                taken = unacked.take(dice.randrange(1, 4), math.inf)
                assert [each.order for each in taken] == sorted(each.order for each in taken)
                assert not done & {each.order for each in taken}
                out |= {each.order: each for each in taken}
            case 2 if out:
                acknowledged = out.pop(dice.choice([*out]))
                unacked.drop(acknowledged)
                done.add(acknowledged.order)
            case 3 if fresh > len(done):
                place = dice.choice([each for each in range(fresh) if each not in done])
                assert not unacked.put(copy(10_000 + fresh, place=place))
                out.pop(place, None)
    rest = {each.order for each in unacked.take(10_000, math.inf)}
    assert done | rest | out.keys() == {*range(fresh)}
    assert len(unacked) == fresh - len(done)


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
