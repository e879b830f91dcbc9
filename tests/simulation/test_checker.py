"""The ledger checker finds each kind of mistake, and excuses what people and policies have decided."""

from __future__ import annotations

from uuid import UUID

import pytest

from tests.simulation.checker import Entry, Ledger, check


def entry(number: int, *, key: str = "a", tenant: str | None = None, body: bytes = b"body", topic: str = "t") -> Entry:
    return Entry(topic, tenant, key, UUID(int=number), body)


def names(violations: list[str]) -> list[str]:
    return [violation.split()[0] for violation in violations]


ONE, TWO, THREE = entry(1), entry(2), entry(3)


@pytest.mark.parametrize(
    ("arrived", "found"),
    [
        ([ONE, TWO, THREE], []),
        ([ONE, TWO, ONE, TWO, THREE], []),
        ([ONE, THREE], ["I1"]),
        ([ONE, TWO, THREE, entry(4)], ["I2"]),
        ([ONE, entry(2, body=b"other"), THREE], ["I7"]),
        ([ONE, entry(2, key="b"), THREE], ["I7"]),
        ([ONE, entry(2, tenant="x"), THREE], ["I8"]),
        ([ONE, THREE, TWO], ["I5"]),
        ([THREE, ONE, TWO], ["I5", "I5"]),
    ],
)
def test_what_arrived_is_compared_with_what_was_committed(arrived: list[Entry], found: list[str]) -> None:
    assert names(check(Ledger([ONE, TWO, THREE]), {"t": arrived})) == found


def test_a_second_copy_is_wrong_only_where_there_must_be_one() -> None:
    topics = {"t": [ONE, ONE]}
    assert check(Ledger([ONE]), topics) == []
    assert names(check(Ledger([ONE]), topics, once={"t"})) == ["I3"]


def test_order_counts_within_a_key_a_tenant_and_a_topic() -> None:
    others = [entry(4, key="b"), entry(5, tenant="x"), entry(6, topic="u")]
    topics = {"t": [others[1], others[0], ONE, TWO], "u": [others[2]]}
    assert check(Ledger([ONE, TWO, *others]), topics) == []


def test_the_same_event_on_two_topics_is_two_deliveries() -> None:
    assert names(check(Ledger([ONE, entry(1, topic="u")]), {"t": [ONE]}, once={"t", "u"})) == ["I1"]


def test_what_a_person_has_discarded_may_be_missing_or_late() -> None:
    ledger = Ledger([ONE, TWO], may_be_missing={ONE.identity})
    assert check(ledger, {"t": [TWO]}) == []
    assert check(ledger, {"t": [TWO, ONE]}) == []


def test_what_its_key_went_on_without_may_be_late_and_must_arrive() -> None:
    ledger = Ledger([ONE, TWO], may_be_late={ONE.identity})
    assert check(ledger, {"t": [TWO, ONE]}) == []
    assert names(check(ledger, {"t": [TWO]})) == ["I1"]


def test_an_edited_event_counts_as_the_one_that_it_replaces() -> None:
    ledger = Ledger([ONE, TWO], edited={ONE.identity: entry(9, body=b"edited")})
    assert check(ledger, {"t": [entry(9, body=b"edited"), TWO]}, once={"t"}) == []
    assert names(check(ledger, {"t": [TWO, entry(9, body=b"edited")]})) == ["I5"]
    assert names(check(ledger, {"t": [ONE, entry(9, body=b"edited"), TWO]}, once={"t"})) == ["I3"]
