"""The stream of one relay: kept open, checked, and never waited for.

Streamed rows go to the buffer and wake their lanes. A commit can be on the stream before other connections see it, so
lanes are woken repeatedly until a read has named their rows. When the stream is lost, the buffer is emptied, the loss
is reported, and the stream is reopened with backoff. Meanwhile the relay reads from the table.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Container, Iterator
from typing import Any, Literal, TypeVar
from uuid import uuid4

from sqlalchemy.ext.asyncio import AsyncEngine

from .. import telemetry
from ..alarm import Alarm
from ..errors import ConfigurationError
from ..outbox import LaneName
from ..redaction import redacted
from ..retry import RetryPolicy
from ..telemetry import SILENT, LogEvent, Sample, Signals
from .buffer import Buffer
from .pgoutput import Decoder
from .slots import SlotState, blockers, published, slot_states
from .stream import PREFIX, Stream, StreamRefused, connection_info, open_stream

logger = logging.getLogger("pillarbox")

AGAIN = RetryPolicy(base=0.2, cap=30.0)
CHECK_SECONDS = 5.0
RING_AGAIN, RING_LAST = 0.01, 1.0

Hearer = Callable[[Collection[LaneName]], object]
T = TypeVar("T")


class _Unpublished(Exception):  # noqa: N818  an outcome
    pass


class Feed:
    """Fills a buffer while its relay runs. ``slot`` names a slot that outlives the relay."""

    def __init__(
        self, engine: AsyncEngine, buffer: Buffer, *, relay: str, slot: str | None = None, signals: Signals = SILENT
    ) -> None:
        if slot is not None and not re.fullmatch(rf"{PREFIX}[a-z0-9_]{{0,54}}", slot):
            raise ConfigurationError(
                f"slot must be {PREFIX!r} or start with it, so that people know whose it is, and have at most 63 of "
                f"a-z, 0-9 and _, got {slot!r}"
            )
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._info = connection_info(engine.url, relay)
        self._buffer = buffer
        self._relay = relay
        self._slot = slot
        self._signals = signals
        self._hearer: Hearer = len
        self._lanes: Container[LaneName] = ()
        self._new: set[LaneName] = set()
        self._again: dict[LaneName, tuple[float, float]] = {}
        """When a lane is woken again, and the delay before it."""
        self._alarm = Alarm(self._ring_again)
        self._tasks: list[asyncio.Task[None]] = []
        self._reads = slot
        """Name of the current slot."""
        self._was_up, self._up_at = False, float("inf")
        self._said: str | None = None
        self._strained = self._slot_gone = self._left_behind = False
        """Conditions of the slot that were reported already."""
        self.state: Literal["off", "starting", "up", "down"] = "off"

    @property
    def works(self) -> bool:
        """Whether the stream currently reports commits."""
        return self.state == "up"

    def start(self, hearer: Hearer, lanes: Container[LaneName]) -> None:
        """Start in the background. Only rows of ``lanes`` are kept, and ``hearer`` is called for them."""
        self._hearer, self._lanes = hearer, lanes
        self.state = "starting"
        for reason in ("connection", "slot", "publication", "refused"):
            self._signals.count(telemetry.STREAM_LOST, (reason,), 0)
        for source in ("stream", "table"):
            self._signals.count(telemetry.STREAM_ROWS, (source,), 0)
        self._tasks = [
            asyncio.create_task(work, name=f"stream of {self._relay}") for work in (self._keep_up(), self._watch())
        ]

    async def stop(self) -> None:
        """Stop, and empty the buffer."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)
        self._alarm.cancel()
        self._again.clear()
        self._buffer.clear()
        self._was_up, self._said = False, None
        self.state = "off"

    def samples(self) -> Iterator[Sample]:
        """Its gauges."""
        if self.state != "off":
            yield Sample(telemetry.STREAMS_DOWN, (), self.state != "up")
            yield Sample(telemetry.STREAM_BUFFER, (), self._buffer.bytes)

    # -- the stream ----------------------------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        failures = 0
        while True:
            try:
                await self._stream()
            except Exception as error:
                # A stream that opens and fails at once, repeatedly, is no better than none.
                lasted = asyncio.get_running_loop().time() - self._up_at > AGAIN.cap
                failures = 1 if lasted else failures + 1
                self._lost(error)
            finally:
                self._buffer.clear()
                self._up_at = float("inf")
            await asyncio.sleep(AGAIN.ceiling(failures) / 2 + AGAIN.delay(failures) / 2)

    async def _stream(self) -> None:
        self._reads = self._slot or f"{PREFIX}_{uuid4().hex}"
        async with open_stream(
            self._info,
            self._reads,
            keep=self._slot is not None,
            may_make=self._slot_is_missing,
            lost=self._slot_is_lost,
            waits=self._slot_waits,
        ) as it:
            decoder, put = Decoder(it.facts.table, self._buffer.ahead), self._buffer.put
            lanes, new = self._lanes, self._new
            self._buffer.server = it.facts.server

            def take(message: memoryview) -> None:
                row = decoder.row(message)
                if row is not None and row.lane in lanes:
                    put(row)
                    new.add(row.lane)

            self._up(it)
            reading = asyncio.ensure_future(it.read(take, self._ring))
            checking = asyncio.ensure_future(self._check(it))
            try:
                await asyncio.wait([reading, checking], return_when=asyncio.FIRST_COMPLETED)
                for task in (reading, checking):
                    if task.done():
                        task.result()
            finally:
                reading.cancel()
                checking.cancel()
                await asyncio.gather(reading, checking, return_exceptions=True)

    async def _check(self, stream: Stream) -> None:
        """Check the stream on the server from time to time: some losses are invisible in the stream."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            tables = await self._asked(published)
            if tables == []:
                raise _Unpublished("the publication pillarbox is gone, or does not bring pillarbox_outbox")
            if tables is not None and stream.facts.table not in tables:
                raise _Unpublished("pillarbox_outbox is another table than when the stream began")

    async def _watch(self) -> None:
        """Check the slot all the time: the server keeps WAL for it while it is created, and while it has no reader."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            for slot in await self._asked(slot_states) or ():
                if slot.name == self._reads:
                    self._weigh(slot)

    def _weigh(self, slot: SlotState) -> None:
        if slot.is_lost and self._slot is not None:
            self._slot_is_lost(f"the server has invalidated the slot {slot.name}")
            return
        if slot.strains and not self._strained:
            kept = f"the server keeps {slot.lag:,} bytes of WAL for it"
            if slot.budget is None:
                more = "and nothing bounds that: set max_slot_wal_keep_size, or the disk may fill up"
            else:
                more = f"and may keep {slot.budget:,}; above that it is lost"
            self._say(telemetry.LOG_SLOT_LAGS, f"its slot lags: {kept}, {more}", kept, slot.name)
        self._strained = slot.strains

    async def _asked(self, question: Callable[..., T], *values: Any) -> T | None:
        """The database's answer, or None if it cannot be queried."""
        try:
            async with self._engine.connect() as connection:
                return await connection.run_sync(question, *values)
        except Exception as error:
            logger.debug("relay %s: its stream cannot be looked at: %s", self._relay, _said(error))
            return None

    # -- reports -------------------------------------------------------------------------------------------------------

    def _up(self, stream: Stream) -> None:
        if self._said is not None:
            self._say(telemetry.LOG_STREAM_UP, "its stream is up again", slot=self._reads)
        if stream.left_behind and not self._left_behind:
            what = f"the slot {self._slot} is lost at a failover; drop it while no relay reads it: it is made anew"
            self._say(telemetry.LOG_SLOT_LEFT_BEHIND, what)
        self._left_behind = stream.left_behind
        self._said, self._was_up, self._slot_gone = None, True, False
        self._up_at = asyncio.get_running_loop().time()
        self.state = "up"

    def _lost(self, error: Exception) -> None:
        self._is_down(_said(error))
        logger.debug("relay %s: the stream", self._relay, exc_info=error)
        self._signals.count(telemetry.STREAM_LOST, (_reason(error),))

    def _is_down(self, said: str) -> None:
        fresh = self.state == "up"
        self.state = "down"
        if fresh or said != self._said:
            what = "it has lost its stream" if fresh else "it gets no stream"
            self._say(telemetry.LOG_STREAM_DOWN, f"{what}, and reads bodies from the table: {said}", said)
        self._said = said

    async def _slot_waits(self, process: int) -> str:
        found = await self._asked(blockers, process)
        whom = f" (now for {', '.join(found)})" if found else ""
        said = f"to make a slot, the server waits until transactions that are open have ended{whom}"
        self._is_down(said)
        return said

    def _slot_is_missing(self) -> None:
        if self._was_up:
            self._slot_is_lost(f"the slot {self._slot} is not there any more")
        else:
            what = f"the slot {self._slot} is not there, and is made: what was committed before comes from the table"
            self._say(telemetry.LOG_SLOT_MADE, what)

    def _slot_is_lost(self, reason: str) -> None:
        if self._slot_gone:
            return
        self._slot_gone = True
        self._signals.count(telemetry.STREAM_LOST, ("slot",))
        what = f"{reason}; a new one is made, and what this one would have brought comes from the table"
        self._say(telemetry.LOG_SLOT_LOST, what, reason)

    def _say(self, event: LogEvent, what: str, reason: str | None = None, slot: str | None = None) -> None:
        extra = telemetry.fields(event, relay=self._relay, slot=slot or self._slot, reason=reason)
        level = logging.ERROR if event.level == "error" else logging.WARNING
        logger.log(level, "relay %s: %s", self._relay, what, extra=extra)

    # -- waking lanes --------------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        """Wake the lanes that have new rows."""
        if not self._new:
            return
        self._hearer(self._new)
        at = asyncio.get_running_loop().time() + RING_AGAIN
        for lane in self._new:
            self._again[lane] = (min(at, self._again.get(lane, (at, 0.0))[0]), RING_AGAIN)
        self._new.clear()
        self._alarm.set(RING_AGAIN)

    def _ring_again(self) -> None:
        """Wake lanes with unnamed rows again, which may have read too early. A few times each, with growing delays: the
        rows may belong to a paused tenant.
        """
        now = asyncio.get_running_loop().time()
        due = {lane: pause for lane, (at, pause) in self._again.items() if at <= now}
        if lanes := self._buffer.unnamed(due):
            self._hearer(lanes)
        for lane, pause in due.items():
            del self._again[lane]
            if lane in lanes and 2 * pause < RING_LAST:
                self._again[lane] = (now + 2 * pause, 2 * pause)
        if self._again:
            self._alarm.set(min(at for at, _ in self._again.values()) - now)


def _said(error: BaseException) -> str:
    if isinstance(error, (StreamRefused, _Unpublished)):
        return str(error)
    said = str(error).partition("\n")[0]
    hint = next((hint for words, hint in _HINTS if re.search(words, said)), "")
    return redacted(f"{type(error).__name__}: {said}{hint}")


# A refused connection has no error code, only a text.
_HINTS = (
    ("max_wal_senders", "; raise max_wal_senders"),
    (
        r"(?i)start wal ?sender|replication role|use replication slots|parameter: replication",
        "; the role of the relay needs REPLICATION, and a direct connection",
    ),
)


def _reason(error: BaseException) -> str:
    if isinstance(error, StreamRefused):
        return "refused"
    return "publication" if isinstance(error, _Unpublished) else "connection"
