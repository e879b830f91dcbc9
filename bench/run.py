"""``make bench``: measures, prints a table, writes ``bench/results.json``.

Figures are ratios against a floor in the same run, because machines differ and are noisy. The server is an embedded
PostgreSQL of its own with default durability, unless PILLARBOX_BENCH_URL names another one (an empty database).
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import imports
import relay
import signals
import uvloop
import write

from pillarbox.embedded import EmbeddedPostgres

RESULTS = Path(__file__).parent / "results.json"


def main() -> None:
    with ExitStack() as stack:
        url = os.environ.get("PILLARBOX_BENCH_URL")
        if url is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pillarbox-bench-"))
            Path(folder).chmod(0o711)  # the server may run as another user, who has to get through
            url = stack.enter_context(EmbeddedPostgres(Path(folder) / "server")).url
        results: dict[str, Any] = {**uvloop.run(write.measure(url)), **uvloop.run(relay.measure(url))}
        results |= uvloop.run(signals.measure(url))
    results |= imports.measure()
    results["write_ratio"] = results["write_ratio_16"]
    results["write_to_hand_ratio"] = results["write_to_hand_ratio_16"]
    parts = (write.report(results), relay.report(results), signals.report(results), imports.report(results))
    print(*parts, sep="\n\n")
    RESULTS.write_text(json.dumps(_rounded(results), indent=2) + "\n")
    print(f"\nwritten to {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 3)


if __name__ == "__main__":
    main()
