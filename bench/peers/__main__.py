"""``make bench-peers``: every contender in turns, each right after the floor; the table, and ``peers`` in the results.

The environments are made once, in PILLARBOX_BENCH_CACHE or the temporary folder, with pinned versions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop

from bench import figures
from bench.servers import Bench, bench
from bench.sizes import FULL

_ROOT = Path(__file__).parents[2]
_DRIVERS = ("asyncpg==0.32.0", "uvloop==0.23.0")
PEERS: dict[str, tuple[str, ...]] = {
    "txoutbox": ("txoutbox[postgres]==0.2.2",),
    "faststream_outbox": ("faststream-outbox[asyncpg]==0.19.0", "faststream==0.7.8", "sqlalchemy==2.1.8"),
    "pgqueuer": ("pgqueuer[asyncpg]==1.6.0",),
    "python_cqrs": ("python-cqrs[sqlalchemy]==5.3.0", "sqlalchemy==2.0.57", "pydantic==2.14.3"),
}
"""What each needs beside the drivers. Pillarbox and the floor run in the environment of this project."""

_SECONDS = 240


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Measure other libraries.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--events", type=int, default=FULL.drain)
    parser.add_argument("--seconds", type=float, default=5.0, help="of latency, per round")
    asked = parser.parse_args()
    pythons = {"pillarbox": sys.executable, **{name: str(_environment(name)) for name in PEERS}}
    with bench(FULL) as given:
        found = uvloop.run(_measure(given, pythons, asked.rounds, asked.events, asked.seconds))
    kept = figures.keep("peers", {"peers": found}, rounds=asked.rounds, events=asked.events)
    print(report(kept))


def _environment(name: str) -> Path:
    """The interpreter of an environment with the contender in it."""
    cache = Path(os.environ.get("PILLARBOX_BENCH_CACHE") or Path(tempfile.gettempdir()) / "pillarbox-bench-peers")
    folder = cache / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join((*PEERS[name], *_DRIVERS))
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PEERS[name], *_DRIVERS], check=True)
        stamp.write_text(wanted)
    return python


async def _measure(
    given: Bench, pythons: Mapping[str, str], rounds: int, events: int, seconds: float
) -> dict[str, object]:
    await given.check_durability()
    drains: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    latencies: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    floors: list[float] = []
    names = list(pythons)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            floor = await _run(given, sys.executable, "floor", "drain", "--events", events)
            drained = await _run(given, pythons[name], name, "drain", "--events", events)
            floors.append(floor["per_second"])
            drains[name].append({**drained, "ratio": drained["per_second"] / floor["per_second"]})
            latencies[name].append(await _run(given, pythons[name], name, "latency", "--seconds", seconds))
    contenders = {name: {**_medians(drains[name]), "latency_ms": _medians(latencies[name])} for name in names}
    fastest = max((name for name in names if name != "pillarbox"), key=lambda name: contenders[name]["ratio"])
    return {
        "floor_per_second": statistics.median(floors),
        "contenders": contenders,
        "fastest_peer": fastest,
        "to_fastest_peer": contenders["pillarbox"]["ratio"] / contenders[fastest]["ratio"],
        "versions": {name: needs[0].partition("==")[2] for name, needs in PEERS.items()},
    }


def _medians(rounds: list[dict[str, float]]) -> dict[str, Any]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


async def _run(given: Bench, python: str, name: str, *arguments: object) -> dict[str, float]:
    """One measurement, on a database of its own."""
    mode, *options = map(str, arguments)
    async with given.database() as url:
        command = [python, "-m", f"bench.peers.{name}", mode, url.replace("+asyncpg", ""), *options]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: ASYNC221  nothing else is to run
    if done.returncode:
        raise SystemExit(f"error: {name} {mode}: {done.stderr.strip()[-2000:]}")
    print(f"  {name:18} {mode:8} {done.stdout.strip()}", file=sys.stderr, flush=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def report(results: Mapping[str, Any]) -> str:
    """A table, best first."""
    peers = results["peers"]
    lines = [
        f"peers: events/s to a handler that does nothing; the floor has {peers['floor_per_second']:,.0f}",
        "                     events/s  of floor  us CPU  B of WAL   ms p50   ms p99",
    ]
    ranked = sorted(peers["contenders"].items(), key=lambda item: -item[1]["ratio"])
    for name, found in ranked:
        wait = found["latency_ms"]
        lines.append(
            f"  {name:18} {found['per_second']:8,.0f} {found['ratio']:9.2f} {found['cpu_us_per_event']:7.1f} "
            f"{found['wal_bytes_per_event']:9,.0f} {wait['p50']:8.1f} {wait['p99']:8.1f}"
        )
    lines.append(f"  Pillarbox to {peers['fastest_peer']}: {peers['to_fastest_peer']:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
