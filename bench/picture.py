"""The picture of the performance page, drawn from the results: plain SVG, made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_WIDTH = 880
_LABEL = 216
"""How much of the width the names take."""
_ROW = 24
_BAR = 14
_MARGIN = 24
_STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 15px }
  .note { fill: #57606a; font-size: 12px; paint-order: stroke; stroke: #ffffff; stroke-width: 4px }
  .ours { fill: #1f6f5c } .other { fill: #a9b4bf } .tail { fill: #d5dbe1 } .ours-tail { fill: #8fc2b4 }
  .mark { stroke: #57606a; stroke-dasharray: 3 3 }
"""


@dataclass(frozen=True)
class Bar:
    """A name and a length, and what is written beside it. A tail is a second, paler length behind the first."""

    name: str
    value: float
    text: str
    ours: bool = True
    tail: float = 0.0


@dataclass(frozen=True)
class Panel:
    """Bars below a title, with a line where the comparison is."""

    title: str
    note: str
    bars: Sequence[Bar]
    line: float | None = None

    @property
    def height(self) -> int:
        return 58 + _ROW * len(self.bars)


def draw(results: Mapping[str, Any]) -> str:
    """The picture, of as much as was measured."""
    panels = list(_panels(results))
    parts: list[str] = []
    top = _MARGIN
    for panel in panels:
        parts += _panel(panel, top)
        top += panel.height + _MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}" '
        f'role="img" aria-label="How fast Pillarbox is">'
    )
    background = f'<rect width="{_WIDTH}" height="{top}" rx="6" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", background, *parts, "</svg>", ""])


def _panels(results: Mapping[str, Any]) -> Iterator[Panel]:
    if "peers" in results:
        yield _drains(results["peers"])
        yield _latencies(results["peers"]["contenders"])
    if "kept_rows_ratio" in results:
        yield _hard(results)


def _drains(peers: Mapping[str, Any]) -> Panel:
    ranked = sorted(peers["contenders"].items(), key=lambda item: -item[1]["ratio"])
    bars = [Bar(_name(name), it["ratio"], f"{it['ratio']:.2f}", name == "pillarbox") for name, it in ranked]
    note = "of what a hand-written SKIP LOCKED loop sends in the same run (the line); longer is better"
    return Panel("Events per second out of a backlog", note, bars, line=1.0)


def _latencies(contenders: Mapping[str, Any]) -> Panel:
    ranked = sorted(contenders.items(), key=lambda item: item[1]["latency_ms"]["p50"])
    bars = []
    for name, found in ranked:
        p50, p99 = found["latency_ms"]["p50"], found["latency_ms"]["p99"]
        bars.append(Bar(_name(name), p50, f"{p50:.1f} ms, {p99:.1f} ms", name == "pillarbox", tail=p99))
    note = "at 100 events per second, median and 99th percentile (pale); shorter is better"
    return Panel("From COMMIT to the handler, in another process", note, bars)


def _hard(results: Mapping[str, Any]) -> Panel:
    speeds = {
        f"{_short(results['kept_rows'])} delivered rows kept": results["kept_rows_ratio"],
        "the same, not analyzed": results["kept_rows_unanalyzed_ratio"],
        "old transactions open": 1 / results["old_snapshot_ratio"],
        "a deep backlog": results["deep_backlog_ratio"],
        "all events of one key": results["hot_key_ratio"],
        **{f"{count} relay processes": ratio for count, ratio in results["relays_ratio"].items() if count != "1"},
    }
    bars = [Bar(name, speed, f"{speed:.2f}") for name, speed in speeds.items()]
    note = "speed of Pillarbox, of its own speed when it is easy (the line); longer is better"
    return Panel("When it gets hard", note, bars, line=1.0)


def _panel(panel: Panel, top: int) -> Iterable[str]:
    longest = max([*(max(bar.value, bar.tail) for bar in panel.bars), panel.line or 0.0])
    room = _WIDTH - _LABEL - 2 * _MARGIN - 110
    left = _MARGIN + _LABEL
    yield f'<text class="title" x="{_MARGIN}" y="{top + 14}">{escape(panel.title)}</text>'
    yield f'<text class="note" x="{_MARGIN}" y="{top + 33}">{escape(panel.note)}</text>'
    if panel.line is not None:
        x = left + panel.line / longest * room
        bottom = top + 48 + _ROW * len(panel.bars) - 4
        yield f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top + 42}" y2="{bottom}"/>'
    for number, bar in enumerate(panel.bars):
        y = top + 48 + number * _ROW
        lengths = [max(1.5, value / longest * room) for value in (bar.value, bar.tail)]
        yield f'<text x="{_MARGIN}" y="{y + 12}">{escape(bar.name)}</text>'
        if bar.tail:
            yield _bar("ours-tail" if bar.ours else "tail", left, y, lengths[1])
        yield _bar("ours" if bar.ours else "other", left, y, lengths[0])
        yield f'<text class="note" x="{left + max(lengths) + 8:.1f}" y="{y + 12}">{escape(bar.text)}</text>'


def _bar(kind: str, x: float, y: float, width: float) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2"/>'


def _name(module: str) -> str:
    return "Pillarbox" if module == "pillarbox" else module.replace("_", "-")


def _short(count: int) -> str:
    return f"{count // 1_000_000} million" if count >= 1_000_000 else f"{count:,}"
