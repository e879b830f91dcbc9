"""``python -m bench.page``: puts the results into the performance page, and draws its picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import figures, picture

_DOCS = Path(__file__).parents[1] / "docs"
PAGE = _DOCS / "reference" / "performance.md"
PICTURE = _DOCS / "images" / "performance.svg"
_OWN_LOAD = 5.0
"""What a benchmark, with the server and processes of its own, brings about by itself."""


def main() -> None:
    results = figures.load()
    if quick := [name for name, run in results["runs"].items() if run.get("quick")]:
        raise SystemExit(f"error: measured with small sizes, which are no figures: {', '.join(quick)}; run make bench")
    page = PAGE.read_text()
    for name, lines in _blocks(results):
        fence = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, found = fence.subn(lambda match, lines=lines: f"{match[1]}\n{lines}\n\n{match[2]}", page)  # type: ignore[misc]
        assert found == 1, name
    PAGE.write_text(page)
    PICTURE.write_text(picture.draw(results))
    print(f"written: {PAGE.relative_to(_DOCS.parent)}, {PICTURE.relative_to(_DOCS.parent)}")


def _blocks(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    machine = results["machine"]
    cores = {1: "one core", 2: "two cores"}.get(machine["cores"], f"{machine['cores']} cores")
    python = machine["python"].rpartition(".")[0]
    postgresql = machine["postgresql"].split()[0]
    measured = f"On a machine with {cores}, PostgreSQL {postgresql} and Python {python}."
    yield "machine", measured + _busy(results)
    yield "figures", _table(("figure", "measured"), [(f"`{name}`", value) for name, value in _figures(results)])
    yield (
        "write",
        _table(("connections", "without", "by hand", "Pillarbox", "to without", "to by hand"), _write(results)),
    )
    if "stores" in results:
        stores = [(name, f"{it['per_second']:,.0f}", f"{it['ratio']:.2f}") for name, it in results["stores"].items()]
        yield "stores", _table(("what", "events/s", "to the floor"), stores)
    if "peers" in results:
        head = (
            "library",
            "events/s",
            "to the floor",
            "CPU, us per event",
            "WAL, bytes per event",
            "p50, ms",
            "p99, ms",
        )
        yield "peers", _table(head, _peers(results["peers"]))


def _busy(results: Mapping[str, Any]) -> str:
    loads = [run["load"] for run in results["runs"].values() if "load" in run]
    if max(loads, default=0.0) <= _OWN_LOAD:
        return ""
    busy = f"Other programs kept it busy meanwhile, with a load of {min(loads):.0f} to {max(loads):.0f}:"
    return f"\n{busy} rates are lower and times longer than\nthey would be alone, and ratios are less certain, too."


def _figures(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _NAMES:
        if name in results:
            found = results[name]
            if isinstance(found, dict):
                yield name, ", ".join(f"{each}: {value:.2f}" for each, value in found.items())
            else:
                yield name, f"{found:,.0f}" if abs(found) >= 100 else f"{found:.2f}"


_NAMES = (
    *(
        "write_ratio",
        "write_to_hand_ratio",
        "flush_ratio",
        "bytes_per_event",
        "drain_ratio",
        "cpu_us_per_event",
        "wal_bytes_per_event",
    ),
    *("latency_ms", "latency_2000_ms", "old_snapshot_ratio", "kept_rows_ratio", "kept_rows_unanalyzed_ratio"),
    *("deep_backlog_ratio", "hot_key_ratio", "relays_ratio", "late_1m_rss_mb", "fairness_ratio"),
    *("fairness_first_s", "dead_row_ratio", "discard_60k_s", "discard_longest_look_s", "fail_20k_s"),
    *("cdc_ratio", "cdc_live_ratio", "cdc_hits", "signals_ratio", "consume_ratio", "consume_batch_gain"),
    "consume_spill_ratio",
    *("consume_cpu_us", "import_ms", "import_box_ms"),
)


def _write(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    prefix = "write_ratio_"
    for count in sorted(int(name.removeprefix(prefix)) for name in results if name.startswith(prefix)):
        rates = [f"{results[f'write_tps_{name}_{count}']:,.0f}" for name in ("plain", "hand", "pillarbox")]
        ratios = [f"{results[f'write_{name}_{count}']:.2f}" for name in ("ratio", "to_hand_ratio")]
        yield str(count), *rates, *ratios


def _peers(peers: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, found in sorted(peers["contenders"].items(), key=lambda item: -item[1]["ratio"]):
        version = peers["versions"].get(name)
        wait = found["latency_ms"]
        yield (
            "**Pillarbox**" if version is None else f"{name.replace('_', '-')} {version}",
            f"{found['per_second']:,.0f}",
            f"{found['ratio']:.2f}",
            f"{found['cpu_us_per_event']:.0f}",
            f"{found['wal_bytes_per_event']:,.0f}",
            f"{wait['p50']:.1f}",
            f"{wait['p99']:.1f}",
        )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
