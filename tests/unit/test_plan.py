"""Which rows of a page go, which have failed, and which wait: without a store and without a broker."""

from __future__ import annotations

from uuid import UUID

import pytest

from pillarbox.cursor import Cursor
from pillarbox.outbox import Failure, FailurePolicy, Key, Lane, Page, RouteRecord, Row
from pillarbox.plan import Plan, make_plan
from pillarbox.transport import Message
from tests.relays import TOPIC


def lane(*waiting: str, on_failure: FailurePolicy = FailurePolicy.PARK) -> Lane:
    route = RouteRecord("orders", "broker", TOPIC, on_failure=on_failure)
    return Lane(route, 0, 1, UUID(int=1), 0, 7, None, 0, frozenset(Key(None, key) for key in waiting))


def rows(text: str, *, topic: str = TOPIC) -> tuple[Row, ...]:
    """``a1 b2``: a key of one letter, and the number of the row."""
    return tuple(Row(int(it[1:]), f"{int(it[1:]):032x}", topic, it[0], None, {}, b"", 0) for it in text.split())


def planned(page: Page, lane: Lane, *, refused: str = "", dead: bool = False) -> Plan:
    def preflight(message: Message) -> str | None:
        return "too large" if message.key in refused.split() else None

    return make_plan(page, lane, preflight, lambda row, why: Failure(row.id, 1, why, None if dead else 1.0))


def ids(plan: Plan) -> tuple[list[int], list[int], list[int]]:
    """Of what goes, what has failed and what waits."""
    return [row.id for row in plan.items], [failure.row for failure in plan.failures], plan.parked


def test_failed_rows_go_first_and_numbers_go_on_from_the_last() -> None:
    plan = planned(Page(rows("b1"), rows("a2 a3")), lane())
    assert ids(plan) == ([1, 2, 3], [], [])
    assert [message.number for message in plan.messages] == [7, 8, 9]


def test_what_is_behind_a_failure_waits() -> None:
    plan = planned(Page(rows("b1"), rows("a2 b3 c4 a5 d6")), lane("c"), refused="a b")
    assert ids(plan) == ([6], [1, 2], [3, 4, 5])
    assert [*plan.refused] == [1, 2]


@pytest.mark.parametrize("policy", FailurePolicy)
def test_behind_a_dead_row_the_route_says_who_waits(policy: FailurePolicy) -> None:
    plan = planned(Page((), rows("a1 a2")), lane(on_failure=policy), refused="a", dead=True)
    assert ids(plan) == (([], [1], [2]) if policy is FailurePolicy.PARK else ([], [1, 2], []))


@pytest.mark.parametrize("once", [True, False], ids=["a page that comes once", "a page that comes again"])
def test_a_batch_that_is_cut_leaves_no_gap_in_a_page_that_comes_once(once: bool) -> None:
    page = Page(rows("z9"), rows("a1 b2 c3 d4"), cursor=Cursor() if once else None)
    plan = planned(page, lane("d"), refused="c")
    plan.keep([row for row in plan.items if row.key != "b"], page)
    assert plan.cut
    assert plan.stops is once
    assert ids(plan) == (([9, 1], [], []) if once else ([9, 1], [3], [4]))


def test_nothing_is_cut_if_all_may_go() -> None:
    page = Page((), rows("a1 b2"), cursor=Cursor())
    plan = planned(page, lane())
    plan.keep(plan.items, page)
    assert (plan.cut, plan.stops, ids(plan)) == (False, False, ([1, 2], [], []))


def test_a_topic_that_cannot_be_opened_costs_no_attempt_and_holds_up_no_other_key() -> None:
    page = Page((), (*rows("a1"), *rows("b2", topic="closed"), *rows("b3 c4")))
    plan = planned(page, lane())
    plan.set_aside({2: Failure(2, 0, "no such right", 30.0)})
    assert ids(plan) == ([1, 4], [2], [3])
    assert plan.failures == [Failure(2, 0, "no such right", 30.0)]
    assert plan.messages == []


def test_items_of_a_key_are_put_together_in_their_order() -> None:
    plan = planned(Page((), rows("a1 b2 a3 c4 b5")), lane())
    plan.group()
    assert [row.id for row in plan.items] == [1, 3, 2, 5, 4]
