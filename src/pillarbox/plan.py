"""What becomes of the rows of a page: which go, which cannot, and which wait behind one of their key.

Before this: the store has found the rows. After it: the lane announces the plan, and carries it out. Nothing is read,
written or sent here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .outbox import Failure, FailurePolicy, Key, Lane, Page, Row
from .transport import Message


@dataclass(slots=True)
class Plan:
    """What is to be done with the rows of a page."""

    items: list[Row] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    """The items as they would be sent, if nothing is taken out of them."""
    failures: list[Failure] = field(default_factory=list)
    refused: dict[int, Row] = field(default_factory=dict)
    """The rows that preflight refused, whatever became of their failures."""
    parked: list[int] = field(default_factory=list)
    put_off: Mapping[int, Row] = field(default_factory=dict)
    """Rows to blocked places, by their ids, some of which have failures for that."""
    cut: bool = False
    """Some rows of the page must wait."""
    stops: bool = False
    """Fresh rows are among it: the page is not passed."""

    @property
    def decides(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.items or self.failures or self.parked)

    def keep(self, items: list[Row], page: Page) -> None:
        """Let only these items go. Of a page that comes once only, what stays behind must be the end of it: then the
        batch ends before anything that has to wait.
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
        """Leave these items out, by their ids. What is behind one of them in its key waits with it."""
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
    """All rows that may go, in their order. What preflight refuses has failed, and its key waits with it."""
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
    """Whether the rows behind it wait: until it is tried again, or for ever, if the route wants that."""
    return failure.retry_after is not None or lane.route.on_failure is FailurePolicy.PARK
