"""What of each tenant takes effect, and what does not.

A tenant of which many keys fail and nothing takes effect is *held*: its messages are not tried, but for one now and
then that probes whether the circumstances have changed. If several tenants are held, or a consumer without tenants is,
and no other tenant has been well of late, everything fails: then nothing is spilled either, and the backlog stays where
it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

from .. import clock
from ..retry import RetryPolicy

MANY_LINES = 20
_LINES_KEPT, _BAD_KEPT = 100, 500
_TENANTS_KEPT = 10_000
PROBES = RetryPolicy(base=0.25, cap=4.0)
WELL_SECONDS = 600.0
"""For so long a tenant of which something took effect, and nothing has failed since, says that others' failures are
their own."""
RECENT = 60.0
"""Seconds after which a message that has failed is no more taken to wait here: it may have gone to another process."""


@dataclass(slots=True)
class _Failing:
    """A tenant since something of it last took effect."""

    lines: set[Hashable] = field(default_factory=set)
    again: set[Hashable] = field(default_factory=set)
    """Those that have failed lately, while others took effect: that they fail again says nothing of the tenant."""
    probes: int = 0
    next_probe: float = 0.0
    failed_at: float = 0.0

    @property
    def is_suspicious(self) -> bool:
        """Whether it is more than a few bad keys."""
        return len(self.lines) >= MANY_LINES

    def put_off(self) -> None:
        """Let the next probe wait."""
        self.probes += 1
        self.next_probe = clock.current().monotonic() + PROBES.ceiling(self.probes)


class Progress:
    """What one consumer has seen of its tenants."""

    def __init__(self, patience: float) -> None:
        self.holds = True
        """Whether a tenant may be held: a drain tries every key."""
        self._patience = patience
        self._failing: dict[str | None, _Failing] = {}
        self._bad: dict[str | None, dict[Hashable, float]] = {}
        """Lines of each tenant that have failed while others took effect, and when these did."""
        self._well: dict[str | None, float] = {}
        """When something of each tenant last took effect that has not failed since."""
        self._waits_since: dict[str | None, float] = {}
        """Since when something of a tenant waits, and nothing of it has been settled."""

    def succeeded(self, tenant: str | None) -> None:
        """Something of this tenant took effect."""
        now = clock.current().monotonic()
        self._well.pop(tenant, None)
        self._well[tenant] = now  # the newest is last
        _forget_first(self._well)
        if self._failing and (failing := self._failing.pop(tenant, None)) is not None:
            # Only what failed since the last effect: in an outage nothing stays bad, and all of it tells.
            known = self._bad.pop(tenant, {})
            bad = {line: at for line, at in known.items() if now - at < RECENT and line not in failing.again}
            bad |= dict.fromkeys(failing.lines | failing.again, now)
            self._bad[tenant] = dict([*bad.items()][-_BAD_KEPT:])
            _forget_first(self._bad)
        self._waits_since.pop(tenant, None)

    def settled(self, tenant: str | None) -> None:
        """Something of this tenant has come to its end, though not by an effect. If more of it waits, that is at hand,
        or fails again soon.
        """
        self._waits_since.pop(tenant, None)
        if (failing := self._failing.get(tenant)) is not None:
            failing.failed_at = -math.inf

    def failed(self, tenant: str | None, line: Hashable) -> None:
        """A message of this tenant failed for now, or for an unknown reason."""
        self._well.pop(tenant, None)
        failing = self._failing.setdefault(tenant, _Failing())
        _forget_first(self._failing)
        failing.failed_at = now = clock.current().monotonic()
        lines = failing.again if now - self._bad.get(tenant, {}).get(line, -math.inf) < RECENT else failing.lines
        if len(lines) < _LINES_KEPT:
            lines.add(line)
        if failing.is_suspicious:
            failing.put_off()

    def is_held(self, tenant: str | None) -> bool:
        """Whether messages of this tenant are not tried now."""
        return self.holds and self._of(tenant).is_suspicious and self.rest_of(tenant) > 0

    def may_try(self, tenant: str | None) -> bool:
        """Whether a message of this tenant may be tried now. Of one that is held, only one at a time may."""
        if self.is_held(tenant):
            return False
        if self._of(tenant).is_suspicious:
            self._of(tenant).put_off()
        return True

    def rest_of(self, tenant: str | None) -> float:
        """Seconds until the next message of this tenant may be tried."""
        return max(0.0, self._of(tenant).next_probe - clock.current().monotonic())

    def probes_of(self, tenant: str | None) -> int:
        """How often a tenant that is held was tried in vain."""
        return self._of(tenant).probes

    def _of(self, tenant: str | None) -> _Failing:
        return self._failing.get(tenant) or _Failing()

    @property
    def everything_fails(self) -> bool:
        """Whether the circumstances of all tenants are to blame."""
        suspicious = [tenant for tenant, failing in self._failing.items() if failing.is_suspicious]
        if None not in suspicious and len(suspicious) < 2:
            return False
        return not self._well or clock.current().monotonic() - next(reversed(self._well.values())) > WELL_SECONDS

    def standstill(self, at_hand: Collection[str | None]) -> dict[str | None, float]:
        """The tenants of which nothing was settled for longer than our patience, though something waits: what is at
        hand, and what has failed here of late. Each with the seconds, as far as we know since we were last asked.
        """
        now = clock.current().monotonic()
        waiting = {tenant for tenant, it in self._failing.items() if now - it.failed_at < RECENT}.union(at_hand)
        self._waits_since = {tenant: self._waits_since.get(tenant, now) for tenant in waiting}
        return {tenant: now - since for tenant, since in self._waits_since.items() if now - since >= self._patience}


def _forget_first(kept: dict[str | None, Any]) -> None:
    if len(kept) > _TENANTS_KEPT:
        del kept[next(iter(kept))]
