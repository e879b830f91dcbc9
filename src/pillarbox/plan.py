"""The plan for a page: which rows are sent, which fail, and which are parked behind one of their key.

Before this: the store has read the rows. After it: the lane announces the plan and carries it out. There is no I/O
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .outbox import Failure, FailurePolicy, Key, Lane, Page, Row
from .transport import Message


@dataclass(slots=True)
class Plan:
    """The decisions about the rows of a page."""

    items: list[Row] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    """The messages of all items. Empty when items were removed or reordered."""
    failures: list[Failure] = field(default_factory=list)
    refused: dict[int, Row] = field(default_factory=dict)
    """Rows that ``preflight`` refused, by id, even if `keep` removed their failures."""
    parked: list[int] = field(default_factory=list)
    put_off: Mapping[int, Row] = field(default_factory=dict)
    """Rows of blocked places by id, whether they are put off or parked."""
    cut: bool = False
    """Some rows of the page must wait."""
    stops: bool = False
    """Fresh rows must wait: the page is not passed."""

    @property
    def decides(self) -> bool:
        """Whether there is anything to announce."""
        return bool(self.items or self.failures or self.parked)

    def keep(self, items: list[Row], page: Page) -> None:
        """Keep only these items. A page with a cursor is read once, so its batch must end before the first fresh row
        that has to wait.
        """
        self.cut = len(items) < len(self.items)
        self.items = items
        if not self.cut or page.cursor is None:
            return
        decided = {row.id for row in self.items} | {failure.row for failure in self.failures} | {*self.parked}
        first = next((row.id for row in page.fresh if row.id not in decided), None)
        if first is not None:
            self.stops = True
            behind = {row.id for row in page.fresh if row.id >= first}
            self.items = [item for item in self.items if item.id not in behind]
            self.failures = [failure for failure in self.failures if failure.row not in behind]
            self.parked = [parked for parked in self.parked if parked not in behind]

    def set_aside(self, failures: Mapping[int, Failure]) -> None:
        """Remove items that have failures, by id. Later items of their keys are parked."""
        if not failures:
            return
        items, self.items, stopped = self.items, [], set[Key]()
        self.messages.clear()
        for row in items:
            if row.order_key in stopped:
                self.parked.append(row.id)
            elif (failure := failures.get(row.id)) is not None:
                stopped.add(row.order_key)
                self.failures.append(failure)
            else:
                self.items.append(row)

    def group(self) -> None:
        """Put the items of one topic and key together, in their order."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in self.items:
            groups.setdefault((row.topic, row.key), []).append(row)
        if len(groups) > 1:
            self.items = [row for group in groups.values() for row in group]
            self.messages.clear()  # their numbers have changed


def make_plan(
    page: Page, lane: Lane, preflight: Callable[[Message], str | None], failed: Callable[[Row, str], Failure]
) -> Plan:
    """Plan all rows in order. A row that ``preflight`` refuses has failed; later rows of its key are parked."""
    plan = Plan()
    stopped: set[Key] = set()

    def decide(row: Row) -> None:
        number = lane.next_number + len(plan.items)
        message = Message(row.topic, row.key, row.body, row.headers, number, "", row.attempts)
        refusal = preflight(message)
        if refusal is None:
            plan.items.append(row)
            plan.messages.append(message)
            return
        failure = failed(row, refusal)
        plan.failures.append(failure)
        plan.refused[row.id] = row
        if stops_key(failure, lane):
            stopped.add(row.order_key)

    for row in page.redo:
        if row.order_key not in stopped:
            decide(row)
    waiting = lane.waiting
    for row in page.fresh:
        if (stopped or waiting) and ((key := row.order_key) in stopped or key in waiting):
            plan.parked.append(row.id)
        else:
            decide(row)
    return plan


def stops_key(failure: Failure, lane: Lane) -> bool:
    """Whether later rows of the key wait: until the retry, or, on a route that parks, for an operator."""
    return failure.retry_after is not None or lane.route.on_failure is FailurePolicy.PARK
