"""What importing costs, in milliseconds of processor time over what it is compared with."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from .servers import Bench

SQLALCHEMY = "import sqlalchemy.ext.asyncio"


async def measure(bench: Bench) -> dict[str, float]:
    """Pairs of fresh interpreters, with and without; the median of the differences."""
    rounds = bench.sizes.import_rounds
    return {
        "import_ms": _difference("import pillarbox", "pass", rounds),
        "import_box_ms": _difference(f"{SQLALCHEMY}; from pillarbox import Pillarbox", SQLALCHEMY, rounds),
    }


def _difference(statement: str, base: str, rounds: int) -> float:
    _milliseconds(statement)  # writes the byte code
    return statistics.median(_milliseconds(statement) - _milliseconds(base) for _ in range(rounds))


def _milliseconds(statement: str) -> float:
    code = f"import time; {statement}; print(time.process_time() * 1000)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def report(results: Mapping[str, Any]) -> str:
    """Lines for people."""
    return (
        f"import pillarbox: {results['import_ms']:.0f} ms over bare Python\n"
        f"from pillarbox import Pillarbox: {results['import_box_ms']:.0f} ms over {SQLALCHEMY}"
    )
