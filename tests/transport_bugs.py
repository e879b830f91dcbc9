"""The ways in which a transport breaks the contract of `Publisher.send`, for proofs and the simulator."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from enum import StrEnum
from typing import Any

from pillarbox.transport import Outcome


class Bug(StrEnum):
    """What `send` does as soon as a certain message is in its request."""

    RAISES = "raises"
    RUNS_OUT_OF_MEMORY = "runs-out-of-memory"
    CANCELS = "cancels"
    """It raises CancelledError, though nobody has cancelled it."""
    HANGS = "hangs"
    RETURNS_NONE = "returns-none"
    SAYS_NOTHING = "says-nothing"
    NAMES_A_STRANGER = "names-a-stranger"
    """It accepts a message that was not in the request."""
    NAMES_TWICE = "names-twice"


async def misbehave(bug: Bug, stored: Collection[int], size: int) -> Outcome:
    """What becomes of a request of that size, of which these messages were stored before the bug showed."""
    answer: Any = None
    match bug:
        case Bug.RAISES:
            raise ValueError("cannot encode this message")
        case Bug.RUNS_OUT_OF_MEMORY:
            raise MemoryError
        case Bug.CANCELS:
            raise asyncio.CancelledError
        case Bug.HANGS:
            await asyncio.get_running_loop().create_future()
        case Bug.SAYS_NOTHING:
            answer = Outcome(())
        case Bug.NAMES_A_STRANGER:
            answer = Outcome([*stored, size])
        case Bug.NAMES_TWICE:
            answer = Outcome([size - 1, size - 1])
    accepted: Outcome = answer
    return accepted
