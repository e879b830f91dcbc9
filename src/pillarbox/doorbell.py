"""The doorbell: after a commit, whoever owns the lanes is told at once.

It stays out of the business transaction: NOTIFY inside it costs a quarter of the commit rate, and can fail the commit.
Relays of this process are told directly. Others are told by a `Carrier`, in the background, with lane numbers only and
as seldom as possible: what rings while one message is on its way goes with the next. A ring is a hint and may get lost;
relays look by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from typing import Protocol

from .outbox import LaneName

logger = logging.getLogger("pillarbox")

Hearer = Callable[[Collection[LaneName]], Collection[LaneName]]
"""Is told which lanes have new rows, and answers with those that it does not own."""

ANYBODY = LaneName(0, -1)
"""Rung when a relay comes or goes: all relays see to their shares."""

PAUSE = 0.005
"""The shortest time between two messages to other processes; twice that while rings keep coming."""
CROWD = 5
"""With so many rings since the last message, it is four times that: a message costs as much as a small statement."""


class Carrier(Protocol):
    """Brings rings to other processes, and theirs to us."""

    @property
    def works(self) -> bool:
        """Whether what others ring arrives here."""
        ...

    async def carry(self, lanes: Collection[LaneName]) -> None:
        """Tell the other processes. An error loses the ring, and nothing else."""
        ...

    async def listen(self, hearer: Callable[[Collection[LaneName]], object]) -> None:
        """Call ``hearer`` for every ring of others, until cancelled. Mends itself."""
        ...

    async def close(self) -> None:
        """Let go of its connections."""
        ...


class Doorbell:
    """Rung by the sessions of a box, heard by its relays."""

    def __init__(self, carrier: Carrier | None = None) -> None:
        self._carrier = carrier
        self._hearers: list[Hearer] = []
        self._lock = threading.Lock()
        self._rung: set[LaneName] = set()
        """What other threads have rung."""
        self._to_carry: set[LaneName] = set()
        self._rings = 0
        """How many rings these lanes come from."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._carrying: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._stopped: asyncio.Task[None] | None = None

    @property
    def reaches_everybody(self) -> bool:
        """Whether we hear other processes."""
        return self._carrier is not None and self._carrier.works

    def ring(self, lanes: Collection[LaneName]) -> None:
        """Something was committed to these lanes. From any thread; returns at once."""
        if self._carrier is None and not self._hearers:
            return
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if self._loop is None:
            self._loop = here
        if self._loop is None or self._loop.is_closed():
            return
        if self._loop is here:
            try:
                self._answer(lanes)
            except Exception:  # who rings has committed
                logger.exception("the doorbell was not heard")
            return
        # The caller is in a thread or in another loop; relays and the carrier belong to this one.
        with self._lock:
            first = not self._rung
            self._rung.update(lanes)
        if first:
            self._loop.call_soon_threadsafe(self._answer_others)

    def use(self, carrier: Carrier) -> None:
        """From now on other processes are told, and heard, too."""
        self._carrier = carrier
        self._settle_in()

    def hear(self, hearer: Hearer) -> Callable[[], None]:
        """Tell ``hearer`` about every ring, here or elsewhere, until the result is called."""
        self._hearers.append(hearer)
        self._settle_in()

        def stop() -> None:
            self._hearers.remove(hearer)
            if not self._hearers and self._listening is not None:
                self._listening.cancel()
                self._stopped, self._listening = self._listening, None

        return stop

    def _settle_in(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._listening, self._carrying = loop, None, None
            self._rung.clear()  # what was rung in a loop that has ended was never answered
        if self._carrier is not None and self._hearers and self._listening is None:
            self._listening = loop.create_task(self._carrier.listen(self._tell), name="doorbell: listen")

    async def close(self) -> None:
        """Let what is on its way go out, and tell nobody else any more."""
        self._answer_others()
        if self._carrying is not None:
            await asyncio.wait([self._carrying], timeout=1.0)
        if self._stopped is not None:  # told already: to be told twice would disturb it while it closes its connection
            await asyncio.wait([self._stopped], timeout=1.0)
        for task in (self._carrying, self._listening, self._stopped):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        self._carrying = self._listening = self._stopped = None
        if self._carrier is not None:
            carrier, self._carrier = self._carrier, None
            await carrier.close()

    def _answer_others(self) -> None:
        with self._lock:
            lanes, self._rung = self._rung, set()
        self._answer(lanes)

    def _answer(self, lanes: Collection[LaneName]) -> None:
        unowned = self._tell(lanes)
        if self._carrier is not None and unowned:
            self._to_carry.update(unowned)
            self._rings += 1
            if self._carrying is None or self._carrying.done():
                self._carrying = asyncio.get_running_loop().create_task(self._carry(), name="doorbell: carry")

    def _tell(self, lanes: Collection[LaneName]) -> Collection[LaneName]:
        for hearer in [*self._hearers]:
            lanes = hearer(lanes)
        return lanes

    async def _carry(self) -> None:
        carrier, pause = self._carrier, PAUSE
        while self._to_carry and carrier is not None:
            lanes, self._to_carry, self._rings = self._to_carry, set(), 0
            try:
                await carrier.carry(lanes)
            except Exception as error:
                logger.debug("the doorbell does not ring: %s", error)
            await asyncio.sleep(pause)
            pause = 2 * PAUSE if self._rings < CROWD else 4 * PAUSE
