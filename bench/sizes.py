"""How much is measured: the whole, or enough to see that it works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Numbers of events, rounds and seconds."""

    quick: bool = False
    rounds: int = 5
    few: int = 3
    """Rounds of what takes long."""
    connections: tuple[int, ...] = (1, 4, 16)
    slice_seconds: float = 1.0
    transaction: int = 1_000_000
    drain: int = 60_000
    """Half a second of work: in less, a run is mostly its start and its end."""
    signal_events: int = 20_000
    signal_rounds: int = 21
    import_rounds: int = 15
    latency_rounds: int = 3
    latency_seconds: float = 5.0
    snapshot_seconds: float = 60.0
    kept: int = 10_000_000
    relays: tuple[int, ...] = (1, 2, 4)
    relays_backlog: int = 100_000
    backlog: int = 1_000_000
    backlog_first: int = 100_000
    late: int = 1_000_000
    discard: int = 60_000
    fail: int = 20_000
    crowd: int = 1_000_000
    crowd_seconds: float = 20.0
    consume: int = 40_000
    consume_singly: int = 2_000


FULL = Sizes()
QUICK = Sizes(
    quick=True,
    rounds=3,
    few=1,
    connections=(16,),
    slice_seconds=0.3,
    transaction=20_000,
    drain=5_000,
    signal_events=5_000,
    signal_rounds=3,
    import_rounds=3,
    latency_rounds=1,
    latency_seconds=1.0,
    snapshot_seconds=3.0,
    kept=200_000,
    relays=(1, 2),
    relays_backlog=10_000,
    backlog=50_000,
    backlog_first=10_000,
    late=50_000,
    discard=5_000,
    fail=2_000,
    crowd=20_000,
    crowd_seconds=2.0,
    consume=10_000,
    consume_singly=400,
)
