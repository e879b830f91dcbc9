"""Virtual time: an event loop that never waits, and lives that can be stopped or ended between any two steps.

Whatever runs in the context of a `Life` belongs to it, with all its timers. A life that is paused runs nothing until it
goes on, and then everything at once, as a process does after SIGSTOP; one that has ended never runs again, and none of
its cleanup either, as after SIGKILL.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, ContextVar, copy_context
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from pillarbox import clock

_life: ContextVar[Life | None] = ContextVar("pillarbox_life", default=None)

START = datetime(2030, 1, 1, tzinfo=UTC)


class Life:
    """A process, as the loop sees it."""

    def __init__(self, name: str, own_clock: SimulatedClock) -> None:
        self.name = name
        self.host = 0
        self.clock = own_clock
        self.relay: Any = None
        self.alive = True
        self.paused_at: float | None = None
        self.missed: list[Step] = []

    def context(self) -> Context:
        """A context whose steps belong to this life."""
        context = copy_context()
        context.run(_life.set, self)
        context.run(clock._current.set, self.clock)
        return context


class Step:
    """A callback and whose it is: what asyncio asks of a handle, which it makes for each step of each task."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "life")

    _source_traceback = None

    def __init__(self, callback: Callable[..., Any], args: Sequence[Any], context: Context) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.life = context.get(_life)
        self.is_cancelled = False

    def cancel(self) -> None:
        """Never run it."""
        self.is_cancelled = True
        self.callback, self.args = _nothing, ()

    def cancelled(self) -> bool:
        """Whether it never runs."""
        return self.is_cancelled


def _nothing() -> None:
    """What is left of a step that is cancelled."""


class SimulatedClock:
    """A clock over virtual time. The time of day may jump; what `monotonic` says never does."""

    def __init__(self, loop: asyncio.AbstractEventLoop, draw: random.Random, offset: float = 0.0) -> None:
        self._loop = loop
        self._draw = draw
        self.offset = offset
        self._last = 0
        self.jump = 0.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self._loop.time() + self.offset + self.jump)

    def monotonic(self) -> float:
        return self._loop.time() + self.offset

    def new_id(self) -> UUID:
        self._last = max(int(self.now().timestamp() * 1000) << 12, self._last + 1)
        return clock.uuid7(self._last, self._draw.getrandbits(62))


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs what is ready; when nothing is, it is later."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._count = 0
        self._steps: deque[Step] = deque()
        self._timers: list[tuple[float, int, Step]] = []
        self._tasks: list[tuple[asyncio.Task[Any], Context]] = []  # those of the dead, too, whom nobody else remembers

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]  # its types are for those who call it
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Step:
        step = Step(callback, args, context or copy_context())
        self._steps.append(step)
        return step

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Step:
        step = Step(callback, args, context or copy_context())
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, step))
        return step

    def pause(self, life: Life) -> None:
        """Run nothing of it any more."""
        if life.paused_at is None:
            life.paused_at = self._now

    def go_on(self, life: Life) -> None:
        """Run all that it has missed."""
        life.paused_at = None
        self._steps.extend(life.missed)
        life.missed.clear()

    def _run_once(self) -> None:
        steps, timers = self._steps, self._timers
        if not steps:
            self._now = max(self._now, timers[0][0])  # without a timer nothing would ever happen again
        while timers and timers[0][0] <= self._now:
            steps.append(heapq.heappop(timers)[2])
        for _ in range(len(steps)):
            step = steps.popleft()
            life = step.life
            if step.is_cancelled or (life is not None and not life.alive):
                continue
            if life is None or life.paused_at is None:
                try:
                    step.context.run(step.callback, *step.args)
                except Exception as error:
                    self.call_exception_handler({"message": f"{step.callback} failed", "exception": error})
            else:
                life.missed.append(step)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What nobody has caught is not a matter for a log; what the dead have left is none for anybody."""
        if self.is_closed():
            return
        raise RuntimeError(context["message"]) from context.get("exception")

    def create_task(self, coro: Any, *, name: Any = None, context: Context | None = None) -> asyncio.Task[Any]:
        context = context or copy_context()
        task = super().create_task(coro, name=name, context=context)
        self._tasks.append((task, context))
        return task

    def close(self) -> None:
        """Take everything apart that has not come to its end, without a word about it."""
        asyncio._set_running_loop(self)  # cleanup that asks for a loop would be given a new one, which nobody closes
        try:
            for task, context in self._tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    context.run(_close, task.get_coro())
        finally:
            asyncio._set_running_loop(None)
        super().close()


def _close(coroutine: Any) -> None:
    """The innermost one first: what one outside makes of it is not told apart from an error."""
    for _ in range(50):  # cleanup that awaits does not end at once
        try:
            for each in reversed([*_awaiting(coroutine)]):
                each.close()
            return
        except RuntimeError:
            continue


def _awaiting(coroutine: Any) -> Iterator[Any]:
    """It, and those that it waits for, one inside the other."""
    while hasattr(coroutine, "cr_await"):
        yield coroutine
        coroutine = coroutine.cr_await
