"""The demo on a terminal: a live picture, and keys."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import IO

from ...errors import MissingExtraError
from .ledger import Balance, Kind
from .processes import State
from .stage import Scene, Stage

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    raise MissingExtraError("the picture of the demo", extra="demo") from missing

_KEYS = {"k": Kind.KILL, "f": Kind.FREEZE, "s": Kind.STOP_SINK, "p": Kind.POISON}
_HELP = "k kill a relay · f freeze one · s stop the sink · p poison · q finish"
_COLOURS = {"a": "cyan", "b": "magenta", "c": "yellow", "d": "green"}  # of relays
_STATES = {State.RUNNING: "green", State.KILLED: "bold red", State.FROZEN: "bold blue"}
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 92
_BESIDE = 32  # columns beside a sparkline; each of its own is half a second
_STORY = 7  # lines


class Picture:
    """Draws scenes, each in the place of the one before, and hears the keys; without a stage there is nothing to do
    by keys.
    """

    def __init__(self, stage: Stage | None, stream: IO[str]) -> None:
        self._stage = stage
        self._exits = ExitStack()
        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> Callable[[Scene], None]:
        with ExitStack() as entered:
            entered.enter_context(self._live)
            if self._stage is not None and sys.stdin.isatty():
                self._listen(entered, self._stage, sys.stdin.fileno())
            self._exits = entered.pop_all()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _show(self, scene: Scene) -> None:
        drawn = _drawn(scene, min(_WIDTH, self._console.width), _HELP if self._stage is not None else None)
        self._live.update(drawn, refresh=True)

    def _listen(self, exits: ExitStack, stage: Stage, terminal: int) -> None:
        loop = asyncio.get_running_loop()
        exits.callback(termios.tcsetattr, terminal, termios.TCSADRAIN, termios.tcgetattr(terminal))
        tty.setcbreak(terminal)
        exits.callback(loop.remove_reader, terminal)
        loop.add_reader(terminal, _pressed, stage, terminal)


def _pressed(stage: Stage, terminal: int) -> None:
    for key in os.read(terminal, 100).decode("ascii", "replace").lower():
        if key == "q":
            stage.finish()
        elif key in _KEYS:
            stage.strike(_KEYS[key])


def _drawn(scene: Scene, width: int, keys: str | None) -> Panel:
    parts: list[RenderableType] = [_figures(scene, width - _BESIDE), "", _processes(scene), "", _story(scene)]
    if scene.balance is not None:
        parts.append(_ledger(scene.balance))
    return Panel(
        Group(*parts),
        title=f"[bold]{scene.title}[/]  [dim]{scene.elapsed:.0f} of {scene.seconds:.0f} s[/]",
        title_align="left",
        subtitle=f"[dim]{keys}[/]" if keys and scene.balance is None else None,
        border_style="dim",
        width=width,
    )


def _figures(scene: Scene, columns: int) -> Table:
    figures = Table.grid(padding=(0, 2))
    for name, totals, colour in (("committed", scene.committed, "cyan"), ("delivered", scene.delivered, "green")):
        rates = [after - before for before, after in pairwise(_newest(totals, columns + 1))]
        figures.add_row(name, _sparkline(rates, columns, colour), f"{scene.rate(totals):.0f}/s", f"{totals[-1]:,}")
    backlog = _newest(scene.backlog, columns)
    figures.add_row("backlog", _sparkline(backlog, columns, "yellow"), f"{backlog[-1]:,}")
    if scene.lags:
        figures.add_row("lag", f"p50 {scene.lag(0.5):,.0f} ms   p99 {scene.lag(0.99):,.0f} ms")
    return figures


def _processes(scene: Scene) -> Table:
    strip = Text()
    for owner in scene.owners:
        strip.append("██ " if owner else "░░ ", _COLOURS[owner] if owner else "dim")
    relays = Text()
    for slot in scene.slots:
        relays.append(f"● {slot.letter} ", _COLOURS[slot.letter]).append(slot.state, _STATES[slot.state])
        relays.append(f", {scene.owners.count(slot.letter)} lanes   ")
    sink = Text("stopped" if scene.sink is State.KILLED else "taking", _STATES[scene.sink])
    if scene.waiting:
        sink.append(f"   {scene.waiting:,} wait with what it rejected", "yellow")
    processes = Table.grid(padding=(0, 2))
    for name, content in (("lanes    ", strip), ("relays", relays), (scene.destination, sink)):
        processes.add_row(name, content)
    return processes


def _story(scene: Scene) -> Text:
    lines = [
        Text.assemble((f"{it.at:5.1f} s  ", "dim"), (it.what, "green" if it.good else "red"))
        for it in scene.story[-_STORY:]
    ]
    return Text("\n").join(lines + [Text()] * (_STORY - len(lines)))


def _ledger(balance: Balance) -> Panel:
    figures = Table.grid(padding=(0, 2))
    figures.add_row("committed", f"{balance.committed:,}", "delivered", f"{balance.delivered:,}")
    figures.add_row("lost", _none(balance.lost), "ghosts", _none(balance.ghosts))
    duplicates = _none(balance.duplicates - balance.duplicates_tied).append(" unexplained")
    if balance.duplicates_tied:
        duplicates.append(f", {balance.duplicates_tied:,} after a fault")
    figures.add_row("out of order", _none(balance.out_of_order), "duplicates", duplicates)
    colour, verdict = ("green", "the ledger balances") if balance.holds else ("red", "the ledger does NOT balance")
    return Panel(figures, title=f"[bold]{verdict}[/]", title_align="left", border_style=colour)


def _none(number: int) -> Text:
    return Text().append(f"{number:,}", "green" if number == 0 else "bold red")


def _newest(ticks: Sequence[int], count: int) -> Sequence[int]:
    """The newest ticks, every second one of them."""
    return ticks[::-2][:count][::-1]


def _sparkline(values: Sequence[int], columns: int, colour: str) -> Text:
    highest = max([*values, 1])
    bars = "".join(_BARS[max(0, value) * (len(_BARS) - 1) // highest] for value in values)
    return Text(bars.ljust(columns), colour)
