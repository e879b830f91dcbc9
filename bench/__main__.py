"""``make bench``: measures one subject after the other, prints tables, writes ``bench/results.json``.

Figures are ratios against a floor in the same run, because machines differ and are noisy. Each subject has databases of
its own, and nothing is left behind but the results.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from types import ModuleType

import uvloop

from . import (
    cdc,
    consume,
    drain,
    fairness,
    figures,
    imports,
    kept,
    late,
    latency,
    pulsar,
    side_by_side,
    signals,
    snapshot,
    write,
)
from .servers import Bench, bench
from .sizes import FULL, QUICK

SUBJECTS: dict[str, ModuleType] = {
    "write": write,
    "drain": drain,
    "latency": latency,
    "signals": signals,
    "stores": side_by_side,
    "snapshot": snapshot,
    "kept": kept,
    "late": late,
    "cdc": cdc,
    "fairness": fairness,
    "pulsar": pulsar,
    "consume": consume,
    "imports": imports,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure.")
    parser.add_argument("--quick", action="store_true", help="small sizes: enough to see that it works")
    parser.add_argument("--only", metavar="SUBJECT,...", help=f"some of: {', '.join(SUBJECTS)}")
    chosen = parser.parse_args()
    wanted = chosen.only.split(",") if chosen.only else list(SUBJECTS)
    if unknown := set(wanted) - SUBJECTS.keys():
        parser.error(f"no such subject: {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    with bench(QUICK if chosen.quick else FULL) as given:
        version = uvloop.run(given.check_durability())
        machine = {"cores": os.cpu_count(), "postgresql": version, "python": platform.python_version()}
        figures.keep("machine", {"machine": machine})
        for name in wanted:
            _measure(name, given)
    print(f"written to {figures.RESULTS.relative_to(figures.RESULTS.parents[1])}")


def _measure(name: str, given: Bench) -> None:
    started = time.perf_counter()
    found = uvloop.run(SUBJECTS[name].measure(given))
    seconds = round(time.perf_counter() - started)
    kept = figures.keep(name, found, quick=given.sizes.quick, seconds=seconds)
    print(SUBJECTS[name].report(kept), f"  ({seconds} s)\n", sep="\n", flush=True)


if __name__ == "__main__":
    main()
