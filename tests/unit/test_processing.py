"""What becomes of a message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pillarbox.consumers.processing import Processed, Processor
from pillarbox.consumers.window import Work
from pillarbox.transport import Message


class Waiting(Processor):
    """Its handlers wait for ever. One that is thrown away fails while it cleans up, as where context is reset."""

    async def _together(self, works: Sequence[Work]) -> Processed:
        try:
            return Processed(settled=[*works, await asyncio.get_running_loop().create_future()])
        finally:
            raise ValueError("created in a different Context")


def test_what_is_left_of_a_task_of_another_loop_does_no_more() -> None:
    """A loop ended before its tasks; later, while another one runs, they are thrown away."""
    nothing: Any = None
    processor = Waiting(
        "answers",
        *(nothing, nothing),
        reader=nothing,
        inbox=nothing,
        report=nothing,
        progress=nothing,
        identify=nothing,
        timeout=1.0,
        spiller=None,
        parks=False,
    )
    works = [Work(Message("questions", key, b"", {})) for key in ("a", "b")]
    loop = asyncio.new_event_loop()
    coroutine = processor.process(works)
    task = loop.create_task(coroutine)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()

    async def throw_away() -> str:
        try:
            coroutine.close()
        except BaseException as error:
            return str(error)
        return ""

    assert asyncio.run(throw_away()) == "created in a different Context"
    assert not task.done()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
