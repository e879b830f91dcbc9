"""The chaos, put together: start everything, write and break, let it drain, and judge."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..demo.ledger import read_ledger
from ..demo.stage import TICK, Happening, Scene
from .faults import Faults, Kind
from .report import figures, judge, read_effects, read_topic
from .shop import ledger
from .world import World

Show = Callable[[Scene], None]


async def play(
    seconds: float, seed: int, kinds: Collection[Kind], canary: str | None, looking: AbstractContextManager[Show]
) -> dict[str, Any]:
    """Run it; the report. If a promise was broken, what the processes and servers said is kept."""
    folder = await asyncio.to_thread(_new_folder)
    clean = False
    try:
        replicated = Kind.PROMOTE in kinds
        async with World(folder, seed=seed, replicated=replicated, canary=canary) as world:
            with looking as show:
                report = await _perform(world, seconds, seed, kinds, show)
        clean = report["clean"]
    finally:
        if clean or canary:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    return report | ({} if clean or canary else {"folder": str(folder)})


async def _perform(world: World, seconds: float, seed: int, kinds: Collection[Kind], show: Show) -> dict[str, Any]:
    scene = Scene(seconds, world.slots, title="pillarbox chaos", destination="broker")
    started = time.monotonic()
    faults = Faults(world, kinds, seed, lambda what, good=False: scene.story.append(_now(started, what, good=good)))
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(_watch(world, scene, started, show))
        writing = group.create_task(world.write())
        await faults.strike(seconds)
        world.stop_writing()
        await writing
        scene.story.append(_now(started, "the faults are over: what is left is sent", good=True))
        stopped = time.monotonic()
        drained = await world.drained()
        drain_seconds = time.monotonic() - stopped
        watching.cancel()
    await world.stop_relays()
    consumed = await world.consumed()
    await world.stop_consumers()
    arrived = await asyncio.to_thread(read_topic, world.cluster.url)
    async with world.database.engine.connect() as connection:
        committed = await connection.run_sync(read_ledger, ledger)
        effect = await connection.run_sync(read_effects)
    verdict = judge(committed, arrived, world.written)
    scene.balance = verdict.balance
    show(scene)
    return {
        "seed": seed,
        "minutes": round((stopped - started) / 60, 2),
        **figures(verdict, faults.all, arrived, world.written),
        "drained": drained,
        "drain_seconds": round(drain_seconds, 2),
        **effect,
        "ended_by_themselves": len(world.ended),
        "peak_relay_memory_mb": round(world.peak_memory / 1_048_576, 1),
        "clean": verdict.holds and drained and consumed and not any(effect.values()),
    }


def _new_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pillarbox-chaos-"))
    folder.chmod(0o711)  # who is root has a PostgreSQL that runs as somebody else
    return folder


def _now(started: float, what: str, *, good: bool = False) -> Happening:
    return Happening(time.monotonic() - started, what, good)


async def _watch(world: World, scene: Scene, started: float, show: Show) -> None:
    while True:
        await world.look_after_them()
        found = await world.progress()
        if found is not None:
            committed, announced, scene.owners = found
            scene.committed.append(committed)
            scene.delivered.append(min(committed, announced))
        scene.elapsed = time.monotonic() - started
        scene.sink = world.broker_state
        show(scene)
        await asyncio.sleep(TICK)
