"""The turns of one lane: poll, plan, announce, send, settle.

Before this: the store has rows, and a relay has leased the lane. After it: a transport has the messages, in order per
key. One turn polls, decides which rows are sent and which are parked behind a failed one of their key, announces this
plan, and sends it (`sending.py`). The next announcement settles the batch, or an idle lane does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress

from . import clock
from .alarm import Alarm
from .breaker import Breaker
from .fairness import Detours, Pace, Rates
from .lane_report import Counts, Report
from .leased_lane import LeasedLane
from .numbering import PARTITIONS
from .outbox import Batch, Lane, OutboxStore, Page, Trouble
from .plan import Plan, make_plan
from .rejections import REJECTS_EVERYTHING, Rejections
from .sending import Acknowledged, Sender
from .telemetry import SILENT, Signals
from .transport import Publisher


class LaneWorker:
    """Takes the turns of one lane while the relay owns it."""

    def __init__(
        self,
        lane: Lane,
        store: OutboxStore,
        publisher: Publisher,
        *,
        producer: str,
        deadline: float,
        rejections: Rejections,
        counts: Counts,
        draw: Callable[[], float],
        changed: Callable[[], None],
        signals: Signals = SILENT,
        linger: float = 0.0,
        acknowledged: Acknowledged,
    ) -> None:
        self.pace = Pace()
        self.idle = False
        """There is nothing to do, and no batch is announced."""
        self._publisher = publisher
        self._producer = producer
        self._rejections = rejections
        self._report = Report(lane, counts, signals)
        self._changed = changed
        self._linger = linger
        self.breaker = Breaker(self._report, draw, changed)
        self._leased = LeasedLane(lane, store, deadline)
        self._sender = Sender(
            self._leased,
            publisher,
            producer=producer,
            rejections=rejections,
            breaker=self.breaker,
            report=self._report,
            draw=draw,
            acknowledged=acknowledged,
        )
        self._lost = False
        self._redone = True
        """Whether the announced batch may include redone rows."""
        self._bell = asyncio.Event()
        self._rates = Rates()
        self._detours = Detours(lane)
        self._scan_exhausted = False
        self._alarm = Alarm(self._bell.set)

    # -- for the relay -------------------------------------------------------------------------------------------------

    @property
    def lane(self) -> Lane:
        """The lane in its stored state."""
        return self._leased.lane

    @property
    def acknowledged(self) -> Acknowledged:
        """Messages of the announced batch that the destination has acknowledged."""
        return self._sender.acknowledged

    @property
    def trouble(self) -> Trouble | None:
        """Why the lane, or a tenant in it, does not send."""
        if self.breaker.trouble is None and (place := self._rejections.next_to_probe(self.lane.name)) is not None:
            wait = max(0.0, place.next_probe - clock.current().monotonic())
            return Trouble(f"{place} {REJECTS_EVERYTHING}: {place.reason}", wait)
        return self.breaker.trouble

    def ring(self) -> None:
        """Wake the lane: there may be something to do."""
        self.idle = False
        self._bell.set()

    def extend(self, deadline: float) -> None:
        """Set the new end of a renewed lease."""
        self._leased.extend(deadline)

    def lose(self) -> None:
        """Stop at once: another relay owns the lane."""
        self.extend(float("-inf"))
        self.stop()
        if not self._lost:
            self._lost = True
            self._report.lease_lost()

    def stop(self) -> None:
        """Finish the announced batch if the destination is available, then end."""
        self.breaker.stopping.set()
        self._bell.set()

    # -- turns ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take turns until stopped. Raises `LeaseLostError` when the lease is lost."""
        if self.lane.announced is not None:
            await self._sender.deliver(None)
        while not self.breaker.stopping.is_set():
            if self._bell.is_set():
                self._detours.revive()
            self._bell.clear()  # before the poll: a ring during it counts for the next one
            if not await self.turn() and not await self._hears_more():
                if await self._settle() and self._redone:
                    continue  # the settlement may have made rows of the same key due
                self.idle = True
                self._changed()
                await self._bell.wait()
                self.idle = False
                self._detours.revive()
        await self._settle()

    async def _hears_more(self) -> bool:
        """Whether there is more to do, now or within ``linger``. If there is, the next announcement settles the batch
        and saves a separate write.
        """
        if not self._bell.is_set() and self._linger and self.lane.announced is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._linger):
                    await self._bell.wait()
        return self._bell.is_set()

    async def run_once(self) -> None:
        """Finish the announced batch, take one turn, and settle."""
        self.stop()
        if self.lane.announced is not None:
            await self._sender.deliver(None)
        if self.lane.announced is None or self._sender.stored:
            await self.turn()
        await self._settle()

    async def close(self) -> None:
        """Close the producer: the next owner may need its name."""
        await self._publisher.close(self._producer)

    async def _settle(self) -> bool:
        if self.lane.announced is None or not self._sender.stored:
            return False
        await self._leased.settle()
        return True

    async def turn(self) -> bool:
        """Take one turn of the lane, then one of a detour. Returns whether there is more to do."""
        if owed := self._rejections.owed(self.lane):
            await self._announce(Batch(failures=owed))
            self._rejections.paid(self.lane, owed)
        if rested := self._detours.rested(self.pace):
            await self._settle()
            await self._leased.join(rested)
            self._detours.joined(self.lane.detours or ())
        elsewhere = self._detours.with_rows(self._rejections.probed_elsewhere(self.lane))
        more = await self._serve(None, elsewhere)
        detour = self._detours.next(self._held)
        scan_exhausted = self._scan_exhausted and more  # the rows behind the skipped ones come next
        if detour is not None and not scan_exhausted and (self._sender.stored or self.lane.announced is None):
            more = await self._serve(detour) or more
        if (rest := self._detours.shortest_rest(self.pace)) is not None:
            self._alarm.set(rest)
        more = more or self._detours.next(self._held) is not None
        if (wait := self._rejections.until_probe(self.lane.name, more=more)) is not None:
            self._alarm.set(wait)
        return more

    async def _serve(self, detour: str | None, without: frozenset[str] = frozenset()) -> bool:
        """Send one batch of the lane or of a detour. Returns whether there is more in it now."""
        limit = self._limit if detour is None else self._detours.quantum(self._limit)
        held = self._held | without
        page = await self._leased.poll(limit=limit, max_bytes=self.pace.max_bytes, paused=held, detour=detour)
        if detour is None:
            self._scan_exhausted = page.scan_exhausted
        if page.requests:  # first, and alone: they may concern rows of this page
            await self._announce(Batch(requests=page.requests))
            return True
        if detour is None and (tenants := self._to_part(page, limit)):
            await self._part(tenants)
            return True
        waiting = self.lane.waiting
        plan = self._next_batch(page)
        capabilities = self._publisher.capabilities
        if (capabilities.numbered or capabilities.opens) and not await self._sender.open(plan):
            return True
        found = plan.decides or (page.passed and not plan.stops)
        if found:
            await self._carry_out(plan, page)
        elif detour is None and self.lane.announced is None:
            # Woken without rows. Check whether the lane is still owned.
            await self._leased.amend()
        more = found and self._may_be_more(page, plan, limit, book_changed=self.lane.waiting is not waiting)
        if detour is not None:
            self._detours.served(detour, more=more, stuck=plan.cut or bool(page.held))
        elif self.lane.detours is not None:
            self._watch_for_floods(page, plan, limit)
            if found and self.lane.detours:
                self._detours.moved_on(self.lane.detours, company=bool(page.fresh))
        return more

    async def _carry_out(self, plan: Plan, page: Page) -> None:
        if self._publisher.capabilities.grouped:
            plan.group()
        details = self._sender.numbering.details(plan.items)
        batch = Batch(
            items=[row.id for row in plan.items],
            failures=plan.failures,
            parked=plan.parked,
            cursor=page.cursor,
            details=details | ({"paused": sorted(self.pace.paused_tenants)} if self.pace.paused_tenants else {}),
            relaxed=not self._publisher.capabilities.numbered,
        )
        first = self.lane.next_number
        self._redone = bool(page.redo)
        await self._announce(batch)
        if plan.put_off:
            put_off = [plan.put_off[failure.row] for failure in plan.failures if failure.row in plan.put_off]
            self._rejections.have_been_put_off(self.lane, put_off)
        for failure in plan.failures:  # only now: before the announcement, the plan may be dropped and made again
            if failure.row in plan.refused:
                self._sender.tell(plan.refused[failure.row], failure)
        if plan.items:
            ready = len(plan.messages) == len(plan.items) and PARTITIONS not in details
            await self._sender.deliver(list(enumerate(plan.items, start=first)), plan.messages if ready else None)

    def _to_part(self, page: Page, limit: int) -> set[str]:
        """The tenants that must leave the lane for a detour: tenants that are held, rate-limited or blocked, because
        others would wait behind them, and tenants that flood the lane. Empty in a lane without detours.
        """
        if self.lane.detours is None:
            return set()
        slow = {row.tenant for row in page.fresh if row.tenant is not None and row.tenant in self.pace.tenant_rates}
        flood = self._detours.flood if self._is_full(page, limit) else ()
        return {*page.held, *slow, *flood, *self._rejections.tenants_blocked(self.lane, page.fresh)}

    def _watch_for_floods(self, page: Page, plan: Plan, limit: int) -> None:
        """Count full pages of sent rows. Not in a lane with its own rate: there, all tenants wait for the rate, and a
        detour would wait for all others.
        """
        if page.fresh and self._is_full(page, limit) and self.pace.rate is None:
            if not plan.cut:  # a cut page is read again
                self._detours.count(page.fresh)
        elif not page.passed:
            self._detours.caught_up()

    async def _part(self, tenants: Collection[str]) -> None:
        await self._settle()
        await self._leased.part(tenants)
        self._detours.parted(sorted(tenants))
        self._report.parted(tenants)

    async def _announce(self, batch: Batch) -> None:
        await self._leased.announce(batch)
        self._sender.stored = True

    # -- plans ---------------------------------------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        return min(self.pace.batch, self._publisher.capabilities.max_messages)

    @property
    def _held(self) -> frozenset[str]:
        """Tenants that may send nothing now."""
        exhausted = self._rates.exhausted(self.pace.tenant_rates)
        return self.pace.paused_tenants | exhausted | self._rejections.held(self.lane)

    def _next_batch(self, page: Page) -> Plan:
        try:
            plan = make_plan(page, self.lane, self._publisher.preflight, self._sender.failed)
        except (Exception, asyncio.CancelledError):  # a bug of `preflight`, which the sender turns into a reason
            plan = make_plan(page, self.lane, self._sender.preflight, self._sender.failed)
        items = self._rejections.filter_blocked(self.lane, plan.items, page.fresh)
        if len(items) < len(plan.items):
            free = {row.id for row in items}
            rest = [row for row in plan.items if row.id not in free]
            plan.put_off = {row.id: row for row in rest}
            plan.set_aside(self._rejections.put_off(self.lane, rest, page.fresh))
        items, again = self._rates.within(items, self.pace)
        if again is not None:
            self._alarm.set(again)
        plan.keep(items, page)
        return plan

    def _may_be_more(self, page: Page, plan: Plan, limit: int, *, book_changed: bool) -> bool:
        """Whether to poll again at once. A full page has more rows behind it. After redone rows or a change of waiting
        keys, more rows may be due.
        """
        if page.passed:
            return True
        return plan.decides and (bool(page.redo) or book_changed or self._is_full(page, limit))

    def _is_full(self, page: Page, limit: int) -> bool:
        rows = (*page.redo, *page.fresh)
        return len(rows) >= limit or sum([len(row.body) for row in rows]) >= self.pace.max_bytes
