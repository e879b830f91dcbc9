"""What all simulated worlds have in common: a seed, virtual time, and processes that begin, sleep and end in it."""

from __future__ import annotations

import hashlib
import logging
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pillarbox import clock
from pillarbox.outbox import Census, Lane
from tests.simulation.loop import Life, SimulatedClock, SimulatedLoop
from tests.simulation.wire import FAULTS, Chaos

ACTIVE = 12.0
"""Seconds in which things go wrong."""
PATIENCE = 400.0
"""Seconds after that in which everything must come to its end."""

Focus = tuple[str, Sequence[str]]
"""A call, and the faults that it meets."""


@dataclass
class Result:
    """What became of a seed."""

    seed: int
    violations: list[str]
    faults: Counter[str]
    seconds: float
    """Of virtual time."""
    calls: int
    trace: list[tuple[Any, ...]] = field(repr=False)

    @property
    def lines(self) -> list[str]:
        """The trace, to be read."""
        return [f"{when:10.6f} {' '.join(map(_text, what))}" for when, *what in self.trace]

    @property
    def digest(self) -> str:
        """The same for the same seed."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=16).hexdigest()


class Course(ABC):
    """A world and what happens in it, from the first draw to the verdict. In a ``calm`` one nothing goes wrong but what
    ``crash_at`` says.
    """

    process: ClassVar[str]
    """What a process is called."""

    def __init__(self, seed: int, *, focus: Focus | None, calm: bool, crash_at: tuple[int, str] | None) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.loop = SimulatedLoop()
        self.database_clock = SimulatedClock(self.loop, self.draw, 1_000.0)
        outside = copy_context()
        outside.run(clock._current.set, self.database_clock)
        self.chaos = Chaos(self.loop, self.draw, outside, self.kill, self.pause)
        self.chaos.crash_at = crash_at
        self.violations: list[str] = []
        self.living: list[Life] = []
        self.calm = calm
        self._focus = focus
        self._births = 0

    def run(self) -> Result:
        """Let it happen."""
        logger = logging.getLogger("pillarbox")
        was, logger.disabled = logger.disabled, True  # it would have much to say
        try:
            self.chaos.outside.copy().run(self.loop.run_until_complete, self._happen())
        finally:
            for life in self.living:
                life.alive = False
            self.loop.close()
            logger.disabled = was
        return Result(
            self.seed, self.violations, self.chaos.happened, self.loop.time(), self.chaos.calls, self.chaos.trace
        )

    @abstractmethod
    async def _happen(self) -> None:
        """All of it, and the verdict."""

    def _let_calls_fail(self, calls: Sequence[str]) -> None:
        self.chaos.rate = self.draw.choice((0.0, 0.02, 0.05, 0.1)) if self._focus is None else 0.1
        self.chaos.focus = self._focus or (self.draw.choice(calls), FAULTS)

    # -- processes -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a process."""
        self._births += 1
        own = SimulatedClock(self.loop, self.draw, self.chaos.between(0, 10_000))
        life = Life(f"{self.process}-{self._births}", own)
        self.living.append(life)
        life.context().run(self._begin, life)

    @abstractmethod
    def _begin(self, life: Life) -> None:
        """Give it something to do, and let it `_live`."""

    async def _live(self, life: Life, manner: str = "run") -> None:
        try:
            await getattr(life.relay, manner)()
        except Exception as error:
            if manner == "run" and life.alive:
                self.violations.append(f"H93 silence: {life.name} ended with {error!r}")
        self.kill(life)

    def kill(self, life: Life) -> None:
        """End a process, at this very moment. Another one will take its place."""
        if life.alive:
            self.chaos.note(life.name, "ends")
            life.alive = False
            self.living.remove(life)
            self._lost(life)
            self.chaos.later(self.chaos.between(0.1, 6), self.start)

    @abstractmethod
    def _lost(self, life: Life) -> None:
        """Whoever has dealt with it notices that it is gone."""

    def pause(self, life: Life, seconds: float) -> None:
        """Stop a process for a while."""
        if life.alive and life.paused_at is None:
            self.chaos.note(life.name, "sleeps")
            self.loop.pause(life)
            self.chaos.later(seconds, self.loop.go_on, life)


def _text(value: Any) -> str:
    """What a value looks like in every process: sets have an order of their own in each."""
    if isinstance(value, Lane):
        waiting = _text(value.waiting)
        return f"{value}@{value.epoch}.{value.batch}.{value.next_number} {value.announced} {value.tries} {waiting}"
    if isinstance(value, (frozenset, set)):
        return f"{{{' '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{' '.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{' '.join(sorted(f'{_text(key)}={_text(it)}' for key, it in value.items()))}}}"
    if isinstance(value, Census):
        return f"census {_text(value.relays)} {value.next_expiry}"
    return str(value)
