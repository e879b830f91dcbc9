"""Threads for handlers that are plain functions: such a call may block, and other messages must not wait for it.

No thread can be stopped from outside, so a call that outlives its time-out goes on. It is not begun again beside
itself: until it has ended, its message fails for now. Nor can calls that never end use up the process: from `MOST` on,
no more are begun. The threads are those of one consumer, and do not keep the process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

MOST = 200
"""So many calls of a consumer may be at work, those included that have outlived their time-outs."""


class Threads:
    """Not for several event loops at the same time."""

    def __init__(self) -> None:
        self._at_work: dict[Hashable, threading.Thread] = {}

    async def call(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Call it in a thread, unless a call with this key is still at work. Being cancelled leaves it behind."""
        self._at_work = {each: thread for each, thread in self._at_work.items() if thread.is_alive()}
        if key in self._at_work:
            raise TimeoutError("an earlier call has outlived its time-out and is still at work: not called again")
        if len(self._at_work) >= MOST:
            raise TimeoutError(f"{MOST} calls are still at work, most of which have outlived their time-outs")
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # it is too late to cancel it
        context = copy_context()

        def work() -> None:
            try:
                answer.set_result(context.run(function))
            except (StopIteration, GeneratorExit) as stop:  # no future hands them on
                error = RuntimeError(f"the handler raised {type(stop).__name__}")
                error.__cause__ = stop
                answer.set_exception(error)
            except BaseException as error:
                answer.set_exception(error)

        thread = self._at_work[key] = threading.Thread(target=work, name="pillarbox handler", daemon=True)
        thread.start()
        return await asyncio.wrap_future(answer)
