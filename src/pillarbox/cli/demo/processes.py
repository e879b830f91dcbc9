"""The sink and the relays as processes, and what can be done to them. Every fault is written down, with its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ... import clock
from .child import Child
from .ledger import Fault, Kind
from .sink import Arrivals

if TYPE_CHECKING:
    from ...testing.pulsar import LocalPulsar


class State(StrEnum):
    """How a process is."""

    RUNNING = "running"
    KILLED = "killed"
    FROZEN = "frozen"


@dataclass(slots=True)
class Slot:
    """A place for one relay at a time: whoever was killed there is followed by another one, under a new name."""

    letter: str
    name: str
    child: Child
    state: State = State.RUNNING


class Processes:
    """The processes between the database and the sink's file. None of them outlives the block. With a broker, that is
    where relays send to, and a witness writes the file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        url: str,
        destination: str,
        relays: int,
        lease: float,
        broker: LocalPulsar | None = None,
        topic: str = "",
    ) -> None:
        self._folder = folder
        self._broker = broker
        addresses = None if broker is None else {"url": broker.url, "admin_url": broker.admin_url}
        self._stalls = folder / "stalls.jsonl"
        self._told = {
            "url": url,
            "destination": destination,
            "lease": lease,
            "stalls": str(self._stalls),
            "broker": addresses,
        }
        self._letters = ascii_lowercase[:relays]
        self._lives = count(1)
        self._sink_told: dict[str, Any] = {"file": str(folder / "sink.jsonl"), "port": 0, "rejects": True}
        if broker is not None:
            self._sink_told |= {"url": broker.url, "topic": topic}
        self._sink: Child | None = None
        self.sink_state = State.RUNNING
        self.slots: list[Slot] = []
        self.faults: list[Fault] = []
        self.arrivals = Arrivals(folder / "sink.jsonl")

    async def __aenter__(self) -> Self:
        try:
            await self._start_sink()
            for letter in self._letters:
                self.slots.append(Slot(letter, *await self._start_relay(letter)))
            await asyncio.gather(*(slot.child.answer() for slot in self.slots))
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    def check(self) -> None:
        """A `CommandError` if one of them has ended by itself."""
        for child in self._children():
            child.check()

    @property
    def stalls(self) -> list[Fault]:
        """When a relay was too slow by itself."""
        return msgspec.json.Decoder(Fault).decode_lines(self._stalls.read_bytes()) if self._stalls.exists() else []

    async def stop(self) -> None:
        """Ask all of them to end, the relays first, and wait for it."""
        await asyncio.gather(*(slot.child.stop() for slot in self.slots))
        if self._sink is not None:
            await self._sink.stop()

    def let_sink_reject(self, rejects: bool) -> None:
        """Tell the sink whether to reject what is poisoned."""
        self._sink_told["rejects"] = rejects
        if self._sink is not None:
            self._sink.tell(rejects=rejects)

    @contextmanager
    def fault(self, kind: Kind, target: str) -> Iterator[None]:
        """Write down that something is wrong during the block."""
        fault = Fault(kind, target, _now())
        self.faults.append(fault)
        yield
        fault.ended = _now()

    @asynccontextmanager
    async def killed(self, slot: Slot) -> AsyncIterator[None]:
        """Kill the relay, as the kernel does when memory runs out, and start another one after the block."""
        with self.fault(Kind.KILL, slot.name):
            slot.state = State.KILLED
            await slot.child.kill()
        yield
        slot.name, slot.child = await self._start_relay(slot.letter)
        slot.state = State.RUNNING

    @contextmanager
    def frozen(self, slot: Slot) -> Iterator[None]:
        """Let the relay stand still, like a machine that swaps: it notices nothing of it."""
        with self.fault(Kind.FREEZE, slot.name):
            slot.child.freeze()
            slot.state = State.FROZEN
            yield
            slot.child.thaw()
            slot.state = State.RUNNING

    @asynccontextmanager
    async def without_sink(self) -> AsyncIterator[None]:
        """Kill the sink, and start it again after the block. A broker stands still instead: as one process it is not
        made to be killed, and may take a minute to come back.
        """
        with self.fault(Kind.STOP_SINK, self.sink_name):
            if self._broker is not None:
                self.sink_state = State.FROZEN
                self._broker.freeze_broker()
                yield
                self._broker.thaw_broker()
                self.sink_state = State.RUNNING
                return
            self.sink_state = State.KILLED
            if self._sink is not None:
                await self._sink.kill()
            yield
            await self._start_sink()

    @property
    def sink_name(self) -> str:
        """What relays send to."""
        return "sink" if self._broker is None else "broker"

    async def _start_sink(self) -> None:
        module = "sink" if self._broker is None else "witness"
        self._sink = await Child.start(module, self._folder / "log", **self._sink_told)
        self._sink_told["port"] = await self._sink.answer()
        self._sink.tell(**self._sink_told)  # something may have changed while it started
        self.sink_state = State.RUNNING

    async def _start_relay(self, letter: str) -> tuple[str, Child]:
        name = f"{self._told['destination']}/{letter}{next(self._lives)}"
        port = self._sink_told["port"]
        return name, await Child.start("relay", self._folder / "log", name=name, port=port, **self._told)

    async def _end(self) -> None:
        await asyncio.gather(*(child.kill() for child in self._children()))

    def _children(self) -> list[Child]:
        return [*([self._sink] if self._sink is not None else []), *(slot.child for slot in self.slots)]


def _now() -> float:
    return clock.now().timestamp()
