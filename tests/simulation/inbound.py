"""The lanes of spilled messages: the store in memory, whose owners' operations claims follow as on a database."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pillarbox.inbox import Claim, Spill
from pillarbox.outbox import Batch, Failure, FailurePolicy, Key, Lane, Status
from tests.memory.inbox import MemoryInbox
from tests.simulation.store import SimulatedStore


class InboundStore(SimulatedStore):
    """Deliveries with claims. `RowLockedError` where a database would wait for the transaction that has one."""

    def __init__(self, inbox: MemoryInbox, **options: Any) -> None:
        super().__init__(**options)
        self.inbox = inbox
        self.ever_failed: set[int] = set()
        """Rows that have failed for good: later ones of their keys need not wait for them."""

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        asked = self._lanes[lane.name].requests
        self._lock([*_dead(batch.failures), *(asked[it].row for it in batch.requests if it in asked)])
        return await super().announce(lane, batch, settle=settle)

    async def amend(
        self,
        lane: Lane,
        failures: Sequence[Failure],
        *,
        parked: Sequence[int] = (),
        attempts: Mapping[int, int] | None = None,
    ) -> Lane:
        self._lock(_dead(failures))
        return await super().amend(lane, failures, parked=parked, attempts=attempts)

    def _fail(self, failures: Sequence[Failure]) -> list[Key]:
        keys = super()._fail(failures)
        dead = [*_dead(failures)]
        self.ever_failed.update(dead)
        self.gate([row for row in dead if not self._parks(self._rows[row])], gate=False)
        return keys

    def _carry_out(self, lane: Any, numbers: Sequence[int]) -> list[Key]:
        wanted = {*numbers}
        asked = [lane.requests[number] for number in self._feasible(lane) if number in wanted]
        gone = self.gone(request.row for request in asked)
        for request in asked:
            if request.row in gone:
                request.action = "redrive"
            if request.action == "discard":
                self._change([request.row], None)
            else:
                self.gate([request.row], gate=True)
        return super()._carry_out(lane, numbers)

    # -- claims --------------------------------------------------------------------------------------------------------

    def gate(self, rows: Collection[int], *, gate: bool) -> None:
        """Later messages must wait for these, or need not."""
        self._change(rows, {"gate": True, "refused": None} if gate else {"gate": False})

    def gone(self, rows: Iterable[int]) -> Collection[int]:
        """Those of the rows that took effect, or never will."""
        held = {claim.delivery for _, claim in self.inbox.claims.seen(None)}
        return {row for row in rows if self._rows[row].row.event_id not in held}

    def waits_for_person(self, left: Collection[int]) -> Collection[int]:
        """The parked rows of keys whose first row is one of these, which have failed and are left as they are."""
        found = set[int]()
        for lane in self._lanes.values():
            for rows in lane.keys.values():
                if min(rows) in left:
                    found.update(row for row, it in rows.items() if it.status is Status.PARKED)
        return found

    def wrong_gates(self) -> list[str]:
        """Claims that keep later messages waiting for ever, or let them pass what has failed if its key parks."""
        if any(map(self._parks, self.rows())):
            return [
                f"C11 gate: {claim.delivery} waits for its effect, and others do not wait for it"
                for _, claim in self.inbox.claims.seen(None)
                if not claim.gate
            ]
        failed = {row.row.event_id for row in self.rows() if row.status is Status.FAILED}
        return [
            f"C11 gate: {claim.delivery} has failed, and others wait for it"
            for _, claim in self.inbox.claims.seen(None)
            if claim.gate and (claim.refused is not None or claim.delivery in failed)
        ]

    def _parks(self, stored: Any) -> bool:
        return self._routes[stored.lane.route].on_failure is FailurePolicy.PARK

    def stale_claims(self) -> list[str]:
        """Claims of what is at its end: nothing will ever delete them."""
        over = {it.row.event_id for it in self.rows() if it.status in (Status.SENT, Status.DISCARDED)}
        claims = [claim.delivery for _, claim in self.inbox.claims.seen(None)]
        return [f"C11 gate: {delivery} is at its end, and has a claim" for delivery in claims if delivery in over]

    def _lock(self, rows: Iterable[int]) -> None:
        for place, _ in self._claims_of(rows):
            self.inbox.claims.hold(None, place)

    def _change(self, rows: Iterable[int], changes: Mapping[str, Any] | None) -> None:
        for place, claim in self._claims_of(rows):
            self.inbox.claims.write(None, place, None if changes is None else claim._replace(**changes))

    def _claims_of(self, rows: Iterable[int]) -> list[tuple[tuple[int, Claim], Spill]]:
        events = {self._rows[row].row.event_id for row in rows}
        return [(place, claim) for place, claim in self.inbox.claims.seen(None) if claim.delivery in events]


def _dead(failures: Iterable[Failure]) -> Iterator[int]:
    return (failure.row for failure in failures if failure.retry_after is None)
