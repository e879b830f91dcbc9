"""Processes of their own: writers, so that latency is measured across processes, and relays, so that they can be many
and be weighed.

A writer gets its task as an argument and prints when each COMMIT returned. A relay says that it is ready, answers every
line that it is sent with what it has done, and stops at the end of its input.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .figures import BATCH, PAYLOAD_BYTES
from .load import OrderSink, Sink, Ticked, box_on
from .proof import require, without_warnings

_ROOT = Path(__file__).parents[1]
_READY_SECONDS = 30
_STOP_SECONDS = 30


@dataclass(frozen=True)
class Task:
    """What a writer does: commits at a fixed rate, whether or not the last one has returned."""

    url: str
    rate: float
    """Events per second."""
    seconds: float
    together: int = 1
    """Events per transaction."""
    warm_up: float = 1.0
    """Seconds before the first one that is told of."""
    tenant: str | None = None
    first: int = 0


async def write(task: Task) -> dict[int, float]:
    """Let another process write; when the COMMIT of each event returned, by the monotonic clock that all share."""
    async with writer(task) as committed:
        return await committed


@asynccontextmanager
async def writer(task: Task) -> AsyncIterator[Awaitable[dict[int, float]]]:
    """A process that writes meanwhile."""
    process = await _start("write", json.dumps(asdict(task)))

    async def committed() -> dict[int, float]:
        output, _ = await process.communicate()
        assert process.returncode == 0
        return {int(seq): at for seq, at in json.loads(output).items()}

    telling = asyncio.ensure_future(committed())
    try:
        yield telling
    finally:
        telling.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()


class RelayProcess:
    """A relay in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self._process = process
        self._in, self._out = process.stdin, process.stdout

    async def ready(self) -> None:
        async with asyncio.timeout(_READY_SECONDS):
            assert await self._out.readline() == b"ready\n"

    async def told(self) -> dict[str, int]:
        """What it has done."""
        self._in.write(b"\n")
        async with asyncio.timeout(_READY_SECONDS):
            return dict(json.loads(await self._out.readline()))

    async def stop(self) -> None:
        self._in.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        require(self._process.returncode == 0, "a relay in a process of its own failed, or warned of something")


@asynccontextmanager
async def relays(url: str, count: int) -> AsyncIterator[list[RelayProcess]]:
    """So many relays, each with an even share of the lanes."""
    async with AsyncExitStack() as stack:
        running = []
        for _ in range(count):
            relay = RelayProcess(await _start("relay", url))
            stack.push_async_callback(relay.stop)
            running.append(relay)
        for relay in running:
            await relay.ready()
        async with asyncio.timeout(_READY_SECONDS):
            while not _is_even([(await relay.told())["lanes"] for relay in running]):  # noqa: ASYNC110  they tell only when asked
                await asyncio.sleep(0.05)
        yield running


def _is_even(lanes: list[int]) -> bool:
    return min(lanes) > 0 and max(lanes) - min(lanes) <= 1


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "bench.children", *arguments)
    return await asyncio.create_subprocess_exec(
        *command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=2**20
    )


# -- in the other process ----------------------------------------------------------------------------------------------


async def _write(task: Task) -> None:
    committed: dict[int, float] = {}
    spare = "x" * (PAYLOAD_BYTES - 30)
    async with box_on(task.url, Sink(), tenancy="off") as box, asyncio.TaskGroup() as group:

        async def commit(first: int) -> None:
            async with box.unit_of_work(tenant=task.tenant) as uow:
                for seq in range(first, first + task.together):
                    uow.publish(Ticked(seq=seq, note=spare), key=str(seq))
            at = time.monotonic()
            if first >= task.first + task.warm_up * task.rate:
                committed.update(dict.fromkeys(range(first, first + task.together), at))

        started = time.monotonic()
        for number in range(0, int((task.warm_up + task.seconds) * task.rate), task.together):
            await asyncio.sleep(max(0.0, started + number / task.rate - time.monotonic()))
            group.create_task(commit(task.first + number))
    print(json.dumps(committed))


async def _relay(url: str) -> None:
    sink = OrderSink()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with box_on(url, sink) as box:
        relay = box.relay(batch=BATCH)
        running = asyncio.ensure_future(relay.run())
        print("ready", flush=True)
        while await reader.readline():
            told = {"count": sink.count, "disordered": sink.disordered, "lanes": relay.status()["lanes"]}
            print(json.dumps(told), flush=True)
        relay.stop()
        await running


def _main() -> None:
    import uvloop  # noqa: PLC0415  a relay of ours is weighed with what it needs

    if sys.argv[1] == "write":
        work: Coroutine[Any, Any, None] = _write(Task(**json.loads(sys.argv[2])))
    else:
        work = _relay(sys.argv[2])
    with without_warnings():
        uvloop.run(work)


if __name__ == "__main__":
    _main()
