"""The demo, put together: from the settings to the report."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...app import Pillarbox
from ...context import event_context
from ...settings import Settings
from ...stores.schema import check_schema
from ..database import opened
from .ledger import Balance, Kind
from .lines import Lines
from .processes import Processes
from .shop import Shop, route, tables
from .stage import Scene, Stage, percentile
from .transport import SinkTransport

if TYPE_CHECKING:
    from ...testing.pulsar import LocalPulsar

RELAYS = 2

Audience = Callable[[Stage | None], AbstractContextManager[Callable[[Scene], None]]]
"""Given the stage, if keys are to do something there, somebody who looks at its scenes during a block."""


def audience(stream: IO[str] | None) -> Audience:
    """Whoever looks at this stream; nobody, if it is None."""
    if stream is None:
        return lambda _stage: nullcontext(lambda _scene: None)
    if stream.isatty():
        from .picture import Picture  # noqa: PLC0415  needs a package that only terminals need

        return lambda stage: Picture(stage, stream)
    return lambda _stage: nullcontext(Lines(stream))


async def play(
    settings: Settings, seconds: float, kinds: Collection[Kind], looking: Audience, *, pulsar: bool = False
) -> dict[str, Any]:
    """Run the demo; its report."""
    lease = min(2.0, max(1.0, seconds / 15))
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(opened(settings, embedded="pillarbox_demo"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pillarbox-demo-")))
        broker = await stack.enter_async_context(_broker(folder)) if pulsar else None
        transports = {route.to: SinkTransport(0, "shop", timeout=1.0)}
        box = Pillarbox(engine, transports=transports, routes=[route], shards=settings.shards, tenancy=settings.tenancy)
        await stack.enter_async_context(box)
        if settings.database_url is None:
            await box.migrate()
        async with engine.connect() as connection:
            await connection.run_sync(check_schema)
        await stack.enter_async_context(tables(engine))
        await box.register()
        url = engine.url.render_as_string(hide_password=False)
        processes = Processes(
            folder, url=url, destination=route.to, relays=RELAYS, lease=lease, broker=broker, topic=route.topic
        )
        await stack.enter_async_context(processes)
        stage = Stage(Shop(box), processes, seconds=seconds, lease=lease, exactly_once=pulsar)
        service = settings.service
        stack.enter_context(event_context(source_service=service.name, source_version=service.version))
        show = stack.enter_context(looking(stage))
        return _report(stage, await stage.play(kinds, show))


@asynccontextmanager
async def _broker(folder: Path) -> AsyncIterator[LocalPulsar]:
    """A real Pulsar, which goes with the demo."""
    from ...testing.pulsar import LocalPulsar  # noqa: PLC0415  only this demo needs it

    broker = LocalPulsar(folder / "pulsar", quick_start=True)
    await asyncio.to_thread(broker.start)
    try:
        yield broker
    finally:
        await asyncio.to_thread(broker.kill)


def _report(stage: Stage, balance: Balance) -> dict[str, Any]:
    started = stage.started
    faults = [
        {"kind": it.kind, "target": it.target, "at": round(it.started - started, 3), "seconds": round(it.seconds, 3)}
        for it in stage.processes.faults
    ]
    return {
        **asdict(balance),
        "faults": faults,
        "rolled_back": stage.shop.rolled_back,
        "seconds": round(stage.scene.elapsed, 3),
        "events_per_second": round(balance.committed / stage.scene.elapsed, 1),
        "lag_ms": {"p50": round(percentile(stage.lags, 0.5), 1), "p99": round(percentile(stage.lags, 0.99), 1)},
        "balanced": balance.holds,
    }
