"""The window of a consumer: order per key, turns for tenants, and what rests."""

from __future__ import annotations

from pillarbox.consumers.window import Window, Work
from pillarbox.transport import Message


def work(key: str, number: int = 0, *, tenant: str = "acme", body: bytes = b"{}") -> Work:
    return Work(Message("orders", key, body, {"tenant_id": tenant, "event_id": f"{key}{number}"}))


def names(works: list[Work]) -> list[str]:
    return [work.message.headers["event_id"] for work in works]


def take(window: Window, limit: int) -> list[Work]:
    """Of the tenant whose turn it is."""
    ready = window.ready()
    return window.take(ready[0], limit) if ready else []


def test_a_key_is_worked_on_by_one_at_a_time() -> None:
    window = Window()
    window.put([work("a", 1), work("a", 2), work("b", 1)])
    first = take(window, 1)
    assert names(first) == ["a1"]
    assert names(take(window, 10)) == ["b1"]
    assert window.ready() == []
    window.done(first)
    assert names(take(window, 10)) == ["a2"]


def test_what_is_left_goes_back_to_the_front_and_rests() -> None:
    window = Window()
    window.put([work("a", 1), work("a", 2), work("a", 3), work("b", 1)])
    taken = take(window, 3)
    resting = window.done(taken, taken[1:])
    assert names(take(window, 10)) == ["b1"]
    window.put([work("a", 4)])
    assert window.ready() == []
    for line in resting:
        window.wake(line)
    assert names(take(window, 10)) == ["a2", "a3", "a4"]


def test_a_batch_has_one_tenant_and_tenants_take_turns() -> None:
    window = Window()
    window.put([work(f"k{index}", tenant="loud") for index in range(4)])
    window.put([work("q", tenant="quiet")])
    assert names(take(window, 2)) == ["k00", "k10"]
    assert window.ready() == ["quiet", "loud"]
    assert names(take(window, 2)) == ["q0"]
    assert names(take(window, 2)) == ["k20", "k30"]


def test_messages_without_a_key_wait_for_nobody() -> None:
    window = Window()
    window.put([work("", 1), work("", 2)])
    assert names(take(window, 1)) == ["1"]
    assert names(take(window, 1)) == ["2"]


def test_keys_of_different_tenants_and_topics_are_different_lines() -> None:
    window = Window()
    elsewhere = Work(Message("payments", "a", b"{}", {"tenant_id": "acme", "event_id": "elsewhere"}))
    window.put([work("a", 1), work("a", 2, tenant="globex"), elsewhere])
    assert names(take(window, 1)) == ["a1"]
    assert names(take(window, 1)) == ["a2"]
    assert names(take(window, 1)) == ["elsewhere"]


def test_more_of_a_line_may_be_taken_while_it_is_worked_on() -> None:
    window = Window()
    window.put([work("a", number) for number in range(5)])
    [first] = take(window, 1)
    more = window.more_of(first.line, 2)
    assert names(more) == ["a1", "a2"]
    window.done([first, *more])
    assert names(take(window, 10)) == ["a3", "a4"]
    assert window.more_of(first.line, 2) == []


def test_the_oldest_that_waits_for_its_turn_is_known() -> None:
    window = Window()
    window.put([work("a", 1), work("b", 1)])
    oldest = window.oldest("acme")
    assert oldest is not None
    assert names([oldest]) == ["a1"]
    take(window, 10)
    assert window.oldest("acme") is None


def test_it_knows_how_much_is_in_it() -> None:
    window = Window()
    window.put([work("a", body=b"12345"), work("b", body=b"123", tenant="globex")])
    taken = take(window, 1)
    assert (window.count, window.bytes, window.tenants) == (2, 8, {"acme": 1, "globex": 1})
    window.done(taken)
    assert (window.count, window.bytes, window.tenants) == (1, 3, {"globex": 1})
