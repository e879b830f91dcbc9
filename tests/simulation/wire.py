"""The network between processes and servers: everything takes time, gets lost, or comes when nobody waits for it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

from tests.simulation.loop import Life, SimulatedLoop, Step

Reply = Callable[[Any], None]
Effect = Callable[[Reply], None]

DULL = frozenset({"census", "ready", "renew", "poll", "keep house"})
"""Calls that are made all the time: faults hit them less often."""

CALLS = ("send", "open", "announce", "amend", "settle", "rebuild", "take", "release")

PAUSE = (1.0, 12.0)
"""How long a process sleeps: shorter or longer than its leases."""

FAULTS = ("crash before", "crash after", "crash after", "pause", "pause", "lose request", "lose answer", "late", "slow")


class Chaos:
    """Chance, time, and the record of what came of them."""

    def __init__(
        self,
        loop: SimulatedLoop,
        draw: random.Random,
        outside: Context,
        kill: Callable[[Life], None],
        pause: Callable[[Life, float], None],
    ) -> None:
        self.loop = loop
        self.draw = draw
        self.outside = outside
        self.kill = kill
        self.pause = pause
        self.rate = 0.0
        """How likely a call is to be hit by a fault."""
        self.focus: tuple[str, Sequence[str]] = "", FAULTS
        """A kind of call that is hit more often than others, and by what."""
        self.crash_at: tuple[int, str] | None = None
        """The number of a call, and what happens to it: for those who want to try every single one."""
        self.calls = 0
        self.happened: Counter[str] = Counter()
        self.trace: list[tuple[Any, ...]] = []

    def note(self, *what: Any) -> None:
        """Add to the trace."""
        self.trace.append((self.loop.time(), *what))

    def later(self, seconds: float, step: Callable[..., Any], *args: Any) -> Step:
        """Do something that belongs to no process."""
        return self.loop.call_at(self.loop.time() + seconds, step, *args, context=self.outside)

    def between(self, low: float, high: float) -> float:
        """Some number."""
        return low + (high - low) * self.draw.random()

    def fault_of(self, kind: str) -> str | None:
        """What happens to this call."""
        self.calls += 1
        if self.crash_at is not None and self.crash_at[0] == self.calls:
            return self.crash_at[1]
        focused = kind == self.focus[0]
        if self.rate and self.draw.random() < self.rate * (5.0 if focused else 0.1 if kind in DULL else 1.0):
            fault = self.draw.choice(self.focus[1] if focused else FAULTS)
            self.happened[fault] += 1
            return fault
        return None


class Wire:
    """The connections of one process."""

    def __init__(self, chaos: Chaos, life: Life) -> None:
        self._chaos = chaos
        self._life = life

    async def ask(self, kind: str, effect: Effect, *, patience: float | None = None) -> Any:
        """Have something done elsewhere, at one instant, and wait for what the server replies. One that may not reply
        at all needs ``patience``.
        """
        chaos = self._chaos
        answer: asyncio.Future[Any] = chaos.loop.create_future()
        there, back = chaos.draw.random() * 0.01, 0.0 if kind in DULL else chaos.draw.random() * 0.01
        fault = chaos.fault_of(kind)
        if fault is not None:
            chaos.note(self._life.name, kind, fault)
            there, back = self._suffer(fault, there, back)
            if fault in ("late", "lose request", "lose answer"):
                patience = chaos.draw.choice((0.05, chaos.between(0.5, 8)))

        def give(result: Any) -> None:
            if not answer.done():
                answer.set_result(result)

        def reply(result: Any) -> None:
            if fault != "lose answer":
                chaos.later(back, give, result) if back else give(result)

        if fault not in ("crash before", "lose request"):
            chaos.later(there, effect, reply)
        hopeless = chaos.later(patience, give, ConnectionError(f"no answer to {kind}")) if patience else None
        result = await answer
        if hopeless is not None:
            hopeless.cancel()
        if isinstance(result, Exception):
            raise result
        return result

    def _suffer(self, fault: str, there: float, back: float) -> tuple[float, float]:
        """What a fault does to the process, and to the ways there and back."""
        chaos, life = self._chaos, self._life
        if fault == "crash before":
            chaos.kill(life)
        elif fault == "crash after":
            back += 0.01
            chaos.later(there + back / 2, chaos.kill, life)
        elif fault == "pause":
            chaos.later(chaos.between(0, there + back), chaos.pause, life, chaos.between(*PAUSE))
        elif fault == "slow":
            return chaos.between(0, 3), chaos.between(0, 3)
        elif fault == "late":
            return chaos.between(2, 25), back
        return there, back
