"""The demo where there is no terminal: a line per second, and one for whatever happens."""

from __future__ import annotations

from typing import IO

import click

from .stage import Scene


class Lines:
    """Writes lines."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._seconds = 0
        self._told = 0

    def __call__(self, scene: Scene) -> None:
        """Write what is new since the last time."""
        for happening in scene.story[self._told :]:
            click.echo(f"{happening.at:5.1f} s  {happening.what}", self._stream)
        self._told = len(scene.story)
        if scene.elapsed >= self._seconds + 1 and scene.balance is None:
            self._seconds = int(scene.elapsed)
            held = "  ".join(f"{slot.letter} {scene.owners.count(slot.letter)}" for slot in scene.slots)
            lag = f"  lag {scene.lag(0.5):.0f} / {scene.lag(0.99):.0f} ms" if scene.lags else ""
            click.echo(
                f"{scene.elapsed:5.1f} s  committed {scene.committed[-1]:,} ({scene.rate(scene.committed):.0f}/s)"
                f"  delivered {scene.delivered[-1]:,} ({scene.rate(scene.delivered):.0f}/s)"
                f"  backlog {scene.backlog[-1]:,}{lag}  lanes {held}",
                self._stream,
            )
