"""``make bench``: measures one subject after the other, prints tables, writes ``bench/results.json``.

Figures are ratios against a floor in the same run, because machines differ and are noisy. Each subject has databases of
its own, and nothing is left behind but the results.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any

import uvloop

from . import (
    cdc,
    consume,
    drain,
    failures,
    fairness,
    figures,
    flush,
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
from .proof import PathNotTakenError, without_warnings
from .servers import Bench, bench
from .sizes import FULL, QUICK

SUBJECTS: dict[str, ModuleType] = {
    "write": write,
    "flush": flush,
    "drain": drain,
    "latency": latency,
    "signals": signals,
    "stores": side_by_side,
    "snapshot": snapshot,
    "kept": kept,
    "late": late,
    "failures": failures,
    "cdc": cdc,
    "fairness": fairness,
    "pulsar": pulsar,
    "consume": consume,
    "imports": imports,
}

LOOPS: dict[str, Callable[[Coroutine[Any, Any, Any]], Any]] = {"uvloop": uvloop.run, "asyncio": asyncio.run}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure.")
    parser.add_argument("--quick", action="store_true", help="small sizes: enough to see that it works")
    parser.add_argument("--only", metavar="SUBJECT,...", help=f"some of: {', '.join(SUBJECTS)}")
    parser.add_argument("--loop", choices=LOOPS, default="uvloop", help="the event loop, but for that of children")
    chosen = parser.parse_args()
    wanted = chosen.only.split(",") if chosen.only else list(SUBJECTS)
    if unknown := set(wanted) - SUBJECTS.keys():
        parser.error(f"no such subject: {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    with bench(QUICK if chosen.quick else FULL) as given:
        version = uvloop.run(given.check_durability())
        machine = {"cores": os.cpu_count(), "postgresql": version, "python": platform.python_version()}
        figures.keep("machine", {"machine": machine})
        for name in wanted:
            _measure(name, given, LOOPS[chosen.loop])
    print(f"written to {figures.RESULTS.relative_to(figures.RESULTS.parents[1])}")


def _measure(name: str, given: Bench, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    started = time.perf_counter()
    try:
        with without_warnings():
            found = run(SUBJECTS[name].measure(given))
    except PathNotTakenError as error:
        sys.exit(f"error: {name} was not measured: {error}")
    seconds = round(time.perf_counter() - started)
    kept = figures.keep(name, found, quick=given.sizes.quick, seconds=seconds)
    print(SUBJECTS[name].report(kept), f"  ({seconds} s)\n", sep="\n", flush=True)


if __name__ == "__main__":
    main()
