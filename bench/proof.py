"""Proof that a figure was measured on the path that it is about.

Where something fails, a relay falls back by itself: from the stream to the table, from the doorbell to looking, from a
batch to single events. The figure that comes of it looks like any other. So a subject requires what shows its path, and
whatever Pillarbox warns of meanwhile fails the subject as well.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager

from pillarbox import Pillarbox
from pillarbox.outbox import LaneName

_RINGS_PER_SECOND = 5
"""Fewer rings than that, and a relay that looks by itself is no slower."""


class PathNotTakenError(Exception):
    """What was measured is something else than what the figure is about."""


def require(shown: object, otherwise: str) -> None:
    """Fail the subject unless the path was taken."""
    if not shown:
        raise PathNotTakenError(otherwise)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Fail if Pillarbox warns of anything during the block: it does whenever it falls back."""
    kept = _Kept()
    logger = logging.getLogger("pillarbox")
    logger.addHandler(kept)
    try:
        yield
    finally:
        logger.removeHandler(kept)
    require(not kept.warnings, f"Pillarbox warned meanwhile: {'; '.join(kept.warnings[:3])}")


@contextmanager
def meant(part: str) -> Iterator[None]:
    """During the block, warnings with this in their text are what the figure is about."""
    logger = logging.getLogger("pillarbox")

    def is_other(record: logging.LogRecord) -> bool:
        return part not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


@asynccontextmanager
async def doorbell_heard(box: Pillarbox, seconds: float) -> AsyncIterator[None]:
    """Fail unless commits of other processes rang here, all through the block, in which they write for so long."""
    rings = 0

    def hear(lanes: Collection[LaneName]) -> Collection[LaneName]:
        nonlocal rings
        rings += 1
        return lanes

    stop = box.doorbell.hear(hear)
    try:
        yield
        require(box.doorbell.reaches_everybody, "the doorbell does not hear other processes any more")
        require(rings >= seconds * _RINGS_PER_SECOND, f"the doorbell rang {rings} times in {seconds:g} s")
    finally:
        stop()
