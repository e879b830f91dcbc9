"""What every measurement shares and no library is needed for: the event, and readings of time, memory and processor."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

RESULTS = Path(__file__).parent / "results.json"
PAYLOAD_BYTES = 300
BATCH = 500
_MEGABYTE = 1_048_576


def body(seq: int, order: int | None = None) -> bytes:
    """An event of `PAYLOAD_BYTES`; its number comes first, where `seq_of` finds it. Each has an order of its own,
    unless another one is named.
    """
    order_id = str(UUID(int=seq if order is None else order))
    fields: dict[str, object] = {"seq": seq, "order_id": order_id, "customer": f"customer-{seq % 1000}"}
    bare = len(json.dumps(fields, separators=(",", ":")))
    return json.dumps({**fields, "note": "x" * (PAYLOAD_BYTES - bare - 10)}, separators=(",", ":")).encode()


def seq_of(content: bytes) -> int:
    """All that any sink or floor does with an event: know which one it was."""
    return int(content[7 : content.index(b",", 7)])


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def waits(committed: Mapping[int, float], arrived: Mapping[int, float]) -> dict[str, float]:
    """Milliseconds from COMMIT returning to the sink being called. Below zero: the sink was faster than the answer."""
    times = [max(0.0, arrived[seq] - at) * 1000 for seq, at in committed.items()]
    return {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99)}


def cpu_seconds() -> float:
    """The processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_mb(process: int) -> float:
    """The memory of a process."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:  # not on Linux
        said = subprocess.run(["ps", "-o", "rss=", "-p", str(process)], capture_output=True, text=True, check=True)  # noqa: S607
        return int(said.stdout) / 1024
    return pages * resource.getpagesize() / _MEGABYTE


def load() -> dict[str, Any]:
    """What was measured so far."""
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def keep(subject: str, figures: Mapping[str, object], **about: object) -> dict[str, Any]:
    """Put figures into the results, beside those of other subjects; all of them come back. What an earlier run has
    measured of the same subject goes, also where this one did not measure it.
    """
    kept = load()
    for name in kept.get("runs", {}).get(subject, {}).get("names", ()):
        kept.pop(name, None)
    kept |= rounded(dict(figures))
    run = {"at": time.strftime("%Y-%m-%d %H:%M:%S"), "load": round(os.getloadavg()[0], 1), **about}
    run["names"] = sorted(figures)
    kept["runs"] = {**kept.get("runs", {}), subject: run}
    RESULTS.write_text(json.dumps(kept, indent=2) + "\n")
    return kept


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value
