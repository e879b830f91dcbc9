"""Run many seeds: ``python -m tests.simulation --seeds 50000 --processes 2``."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.simulation.consumers import simulate_consumers
from tests.simulation.course import Result
from tests.simulation.world import simulate

CHUNK = 100
TWICE = 100
"""Every so many seeds one is run again, and must leave the same trace."""
SHARE = 2
"""Of so many seeds one is a world of consumers as well."""


@dataclass
class Report:
    """What came of some seeds."""

    seeds: int = 0
    calls: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[Result] = field(default_factory=list)

    def __iadd__(self, other: Report) -> Report:
        self.seeds += other.seeds
        self.calls += other.calls
        self.seconds += other.seconds
        self.faults.update(other.faults)
        self.failed += other.failed
        return self


def run(seeds: Iterable[int], world: Callable[[int], Result] = simulate) -> Report:
    """Run seeds, one after the other."""
    report = Report()
    gc.disable()  # a world is one large knot: it goes at once, when it is over
    try:
        for seed in seeds:
            result = world(seed)
            if seed % TWICE == 0 and world(seed).digest != result.digest:
                result.violations.append("not repeatable: another run of this seed left another trace")
            report += Report(1, result.calls, result.seconds, result.faults, [result] if result.violations else [])
            if seed % 20 == 0:
                gc.collect()
    finally:
        gc.enable()
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3_000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    end, failed = options.start + options.seeds, False
    chunks = [range(first, min(first + CHUNK, end)) for first in range(options.start, end, CHUNK)]
    for name, world, every in (("relays", simulate, 1), ("consumers", simulate_consumers, SHARE)):
        started, report = time.perf_counter(), Report()
        for part in _parts(partial(run, world=world), [chunk[::every] for chunk in chunks], options.processes):
            report += part
        sys.stdout.write(f"{name}: {told(report, time.perf_counter() - started)}")
        failed = failed or bool(report.failed)
    return int(failed)


def _parts(work: Callable[[range], Report], chunks: Sequence[range], processes: int) -> Iterator[Report]:
    if processes == 1:
        yield from map(work, chunks)
    else:
        with multiprocessing.Pool(processes) as pool:
            yield from pool.imap_unordered(work, chunks)


def told(report: Report, seconds: float) -> str:
    """The report as text, with the last lines of what went wrong."""
    faults = ", ".join(f"{name} {count:,}" for name, count in report.faults.most_common())
    lines = [
        f"{report.seeds:,} seeds in {seconds:.0f} s: {report.seeds / seconds:.0f} per second",
        f"{report.seconds / 3600:,.1f} virtual hours, {report.calls:,} calls",
        f"{report.faults.total():,} faults: {faults}",
        f"{len(report.failed):,} seeds with violations",
    ]
    for result in sorted(report.failed, key=lambda result: result.seed)[:10]:
        lines += [f"seed {result.seed}:", *(f"  {violation}" for violation in result.violations[:10])]
        lines += [f"    {line[:200]}" for line in result.lines[-30:]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
