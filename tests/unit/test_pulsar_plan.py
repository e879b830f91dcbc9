"""The steps from what a cluster has to what it must have."""

from __future__ import annotations

from pillarbox.transports.pulsar.admin import Policies, Retention
from pillarbox.transports.pulsar.names import TopicName
from pillarbox.transports.pulsar.plan import Action, Desired, Found, Step, plan

ORDERS, STOCK = TopicName.parse("acme/orders/events"), TopicName.parse("acme/stock/events")
DAY, FOREVER = Retention(24 * 60, -1), Retention(-1, -1)


def there(policies: Policies, partitions: int = 0) -> Found:
    return Found({"acme"}, {"acme/orders": policies}, {ORDERS: partitions})


def actions(desired: Desired, found: Found) -> list[tuple[str, str]]:
    return [(step.action, step.target) for step in plan(desired, found)]


def only(desired: Desired, found: Found) -> Step:
    (step,) = plan(desired, found)
    return step


def test_everything_is_missing() -> None:
    desired = Desired((ORDERS, STOCK), partitions=4, retention=DAY)
    assert actions(desired, Found()) == [
        ("create tenant", "acme"),
        ("create namespace", "acme/orders"),
        ("create namespace", "acme/stock"),
        ("create topic", str(ORDERS)),
        ("create topic", str(STOCK)),
    ]
    made = plan(desired, Found())[1]
    assert (made.value, made.detail) == (Policies(True, DAY), "deduplicates; keeps messages for 24 h")
    assert plan(desired, Found())[3].value == 4


def test_nothing_to_do() -> None:
    assert plan(Desired((ORDERS,), 4, retention=DAY), there(Policies(True, DAY), 4)) == []
    assert plan(Desired((ORDERS,), None), there(Policies(True), 7)) == []
    assert plan(Desired((ORDERS,), deduplication=False), there(Policies())) == []
    assert plan(Desired(()), Found()) == []


def test_deduplication_is_turned_on_and_never_off() -> None:
    assert only(Desired((ORDERS,)), there(Policies())).action is Action.DEDUPLICATE
    assert only(Desired((ORDERS,)), there(Policies(False))).action is Action.DEDUPLICATE
    assert plan(Desired((ORDERS,), deduplication=False), there(Policies(True))) == []
    found = there(Policies(True))
    found.exempt.add(ORDERS)
    assert only(Desired((ORDERS,)), found).action is Action.CONFLICT


def test_retention_only_grows() -> None:
    for kept, wanted, action in [
        (DAY, FOREVER, Action.RETAIN),
        (FOREVER, DAY, Action.CONFLICT),
        (Retention(60, 100), Retention(120, 50), Action.CONFLICT),
        (Retention(60, 100), Retention(60, -1), Action.RETAIN),
        (Retention(0, 0), DAY, Action.RETAIN),
    ]:
        step = only(Desired((ORDERS,), retention=wanted), there(Policies(True, kept)))
        assert step.action is action, (kept, wanted)
    step = only(Desired((ORDERS,), retention=DAY), there(Policies(True, FOREVER)))
    assert step.detail.endswith("set-retention --time 1440m --size -1 acme/orders")


def test_retention_where_the_broker_decides() -> None:
    found, desired = there(Policies(True)), Desired((ORDERS,), retention=DAY)
    assert only(desired, found).action is Action.CONFLICT  # what it keeps now is not known
    found.default_retention = Retention(0, 0)
    assert only(desired, found).action is Action.RETAIN
    found.default_retention = FOREVER
    assert only(desired, found).action is Action.CONFLICT


def test_partitions_only_grow() -> None:
    for found, wanted, action in [
        (2, 4, Action.GROW_TOPIC),
        (4, 2, Action.CONFLICT),
        (0, 2, Action.CONFLICT),
        (2, 0, Action.CONFLICT),
    ]:
        step = only(Desired((ORDERS,), wanted), there(Policies(True), found))
        assert step.action is action, (found, wanted)
