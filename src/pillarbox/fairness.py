"""Order between tenants in a lane: rates and detours.

A lane is first in, first out, so a tenant with a million events would hold up all events behind them. Such a tenant
gets a *detour*: the lane skips its rows and serves them in turns with the rows of the lane. Several tenants may have
detours at once; paused and rate-limited tenants get them too. A detour ends when it has been empty for a while. Later
events may start another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from . import clock
from .outbox import Lane, Row

FLOOD_PAGES = 8
"""After this many full pages in a row, each tenant with more than `FLOOD_SHARE` of their rows floods the lane."""
FLOOD_SHARE = 0.25
REST_SECONDS = 10.0
"""How long a detour must be empty before it ends."""
_COMPANY_SECONDS = 1.0
_QUANTUM = 4


@dataclass(slots=True)
class Pace:
    """The limits of a lane's turn, and the pauses and rates that operators set."""

    batch: int = 500
    max_bytes: int = 4_194_304
    paused_tenants: frozenset[str] = frozenset()
    rate: float | None = None
    tenant_rates: Mapping[str, float] = field(default_factory=dict)


class Detours:
    """The detours of one lane, as its owner knows them."""

    def __init__(self, lane: Lane) -> None:
        self._waiting: dict[str, None] = dict.fromkeys(lane.detours or ())
        """Tenants whose detours may have something to send; the last served one is last."""
        self._stuck: set[str] = set()
        """Tenants whose detours have rows that may not be sent now."""
        self._empty_since: dict[str, float] = {}
        self.flood: set[str] = set()
        """Tenants that flood the lane, by its last full pages."""
        self._pages = 0
        self._taken: Counter[str | None] = Counter()
        """Rows of each tenant in these pages."""
        self._company_at = float("-inf")

    def next(self, held: Collection[str]) -> str | None:
        """The tenant whose detour is served next."""
        return next((tenant for tenant in self._waiting if tenant not in held), None)

    def with_rows(self, tenants: Collection[str]) -> frozenset[str]:
        """The given tenants whose detours may have something to send."""
        return frozenset(tenant for tenant in tenants if tenant in self._waiting)

    def revive(self) -> None:
        """Try the stuck detours again: something has happened."""
        self._waiting |= dict.fromkeys(sorted(self._stuck))
        self._stuck.clear()

    def quantum(self, limit: int) -> int:
        """Number of rows that a detour takes in one turn: fewer if the lane had rows of its own a moment ago."""
        alone = clock.current().monotonic() - self._company_at > _COMPANY_SECONDS
        return limit if alone else max(1, limit // _QUANTUM)

    def count(self, rows: Sequence[Row]) -> None:
        """Count the tenants of a full page that was sent."""
        self._pages += 1
        self._taken.update([row.tenant for row in rows])
        if self._pages >= FLOOD_PAGES:
            share = FLOOD_SHARE * self._taken.total()
            flood = {tenant for tenant, taken in self._taken.items() if tenant is not None and taken > share}
            self.caught_up()
            self.flood = flood

    def caught_up(self) -> None:
        """The lane has no backlog: restart the count."""
        self._pages, self.flood = 0, set()
        self._taken.clear()

    def moved_on(self, detours: Iterable[str], company: bool) -> None:
        """The lane has moved on and may have skipped rows of any detour. ``company``: it had rows of its own."""
        if company:
            self._company_at = clock.current().monotonic()
        for tenant in detours:
            if tenant not in self._waiting and tenant not in self._stuck:
                self._waiting[tenant] = None

    def served(self, tenant: str, *, more: bool, stuck: bool) -> None:
        """Record a turn of a detour, which has more to send, has only rows that it may not send, or is empty."""
        del self._waiting[tenant]
        if more or stuck:
            self._empty_since.pop(tenant, None)
        else:
            self._empty_since.setdefault(tenant, clock.current().monotonic())
        if more:
            self._waiting[tenant] = None
        elif stuck:
            self._stuck.add(tenant)

    def parted(self, tenants: Iterable[str]) -> None:
        """These tenants have a detour now."""
        self.caught_up()
        self._waiting |= dict.fromkeys(tenants)

    def rested(self, pace: Pace) -> list[str]:
        """Tenants that need no detour any more. They are not returned again for a while."""
        rested = [tenant for tenant, left in self._resting(pace) if left <= 0]
        self._empty_since |= dict.fromkeys(rested, clock.current().monotonic())
        return rested

    def shortest_rest(self, pace: Pace) -> float | None:
        """Seconds until the next detour may end, if nothing arrives."""
        return min((max(0.0, left) for _, left in self._resting(pace)), default=None)

    def _resting(self, pace: Pace) -> list[tuple[str, float]]:
        now = clock.current().monotonic()
        return [
            (tenant, since + REST_SECONDS - now)
            for tenant, since in self._empty_since.items()
            if tenant not in self._waiting and tenant not in pace.paused_tenants
        ]

    def joined(self, left: Collection[str]) -> None:
        """Only these tenants still have a detour. A detour that was to end and did not has rows that were not known."""
        self._waiting |= dict.fromkeys(tenant for tenant in self._empty_since if tenant in left)
        self._empty_since = {tenant: since for tenant, since in self._empty_since.items() if tenant in left}


class Rates:
    """Token buckets for the rates that operators set, of up to one second's worth."""

    def __init__(self) -> None:
        self._levels: dict[str | None, tuple[float, float]] = {}

    def exhausted(self, rates: Mapping[str, float]) -> frozenset[str]:
        """Tenants that have to wait."""
        return frozenset(tenant for tenant, rate in rates.items() if self._available(tenant, rate) < 1)

    def within(self, rows: list[Row], pace: Pace) -> tuple[list[Row], float | None]:
        """The rows that may be sent, in order, and the seconds until the next try."""
        if pace.rate is None and not pace.tenant_rates:
            return rows, None
        rates: dict[str | None, float] = dict(pace.tenant_rates.items())
        if pace.rate is not None:
            rates[None] = pace.rate
        room = {name: int(self._available(name, rate)) for name, rate in rates.items()}
        kept = []
        for row in rows:
            spent = [name for name in dict.fromkeys((None, row.tenant)) if name in room]
            if all(room[name] > 0 for name in spent):
                kept.append(row)
                for name in spent:
                    room[name] -= 1
                    level, seen = self._levels[name]
                    self._levels[name] = level - 1, seen
        waits = [1.0 / rate for name, rate in rates.items() if room[name] < 1]
        return kept, min(*waits, 60.0) if waits else None

    def _available(self, name: str | None, rate: float) -> float:
        now = clock.current().monotonic()
        level, seen = self._levels.get(name, (1.0, now))
        level = min(max(rate, 1.0), level + rate * (now - seen))
        self._levels[name] = level, now
        return level
