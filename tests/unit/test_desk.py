"""The desk of a consumer: order per key, turns for tenants, and what rests."""

from __future__ import annotations

from pillarbox.consumers.desk import Desk, Work
from pillarbox.transport import Message, Received


def received(key: str, number: int = 0, *, tenant: str = "acme", body: bytes = b"{}") -> Received:
    return Received(Message("orders", key, body, {"tenant_id": tenant, "event_id": f"{key}{number}"}))


def names(works: list[Work]) -> list[str]:
    return [work.message.headers["event_id"] for work in works]


def test_a_key_is_worked_on_by_one_at_a_time() -> None:
    desk = Desk()
    desk.put([received("a", 1), received("a", 2), received("b", 1)])
    first = desk.take(1)
    assert names(first) == ["a1"]
    assert names(desk.take(10)) == ["b1"]
    assert desk.take(10) == []
    desk.done(first)
    assert names(desk.take(10)) == ["a2"]


def test_what_is_left_goes_back_to_the_front_and_rests() -> None:
    desk = Desk()
    desk.put([received("a", 1), received("a", 2), received("a", 3), received("b", 1)])
    taken = desk.take(3)
    resting = desk.done(taken, taken[1:])
    assert names(desk.take(10)) == ["b1"]
    desk.put([received("a", 4)])
    assert desk.take(10) == []
    for line in resting:
        desk.wake(line)
    assert names(desk.take(10)) == ["a2", "a3", "a4"]


def test_a_batch_has_one_tenant_and_tenants_take_turns() -> None:
    desk = Desk()
    desk.put([received(f"k{index}", tenant="loud") for index in range(4)])
    desk.put([received("q", tenant="quiet")])
    assert names(desk.take(2)) == ["k00", "k10"]
    assert names(desk.take(2)) == ["q0"]
    assert names(desk.take(2)) == ["k20", "k30"]


def test_messages_without_a_key_wait_for_nobody() -> None:
    desk = Desk()
    desk.put([received("", 1), received("", 2)])
    assert names(desk.take(1)) == ["1"]
    assert names(desk.take(1)) == ["2"]


def test_it_knows_how_much_is_on_it() -> None:
    desk = Desk()
    desk.put([received("a", body=b"12345"), received("b", body=b"123")])
    taken = desk.take(1)
    assert (desk.count, desk.bytes) == (2, 8)
    desk.done(taken)
    assert (desk.count, desk.bytes) == (1, 3)
