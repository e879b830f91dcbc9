"""Random programs on the write side, against a model that says what must be in the outbox.

Each run is a random nest of savepoints, flushes, queries, rollbacks, failures, commits and cancellations over several
aggregates and tenants. The model knows only the rules (`pillarbox.session`), not the code; after every run the outbox
must hold exactly the model's events, in the model's order.

    python -m tests.prove.fuzz --runs 5000 --seed 7 --database sqlite --database postgres
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID, uuid4

from sqlalchemy import func, inspect, select, text
from sqlalchemy.exc import IntegrityError

from pillarbox import Pillarbox
from pillarbox.embedded import EmbeddedPostgres
from pillarbox.stores.tables import outbox
from pillarbox.unit_of_work import UnitOfWork
from tests.domain import Order, OrderNoted, OrderPlaced, OrderRepriced, order_box, set_up

MAX_DEPTH = 3


@dataclass
class Frame:
    """A transaction or savepoint, as the model sees it."""

    written: list[UUID] = field(default_factory=list)
    added: list[Order] = field(default_factory=list)


class Model:
    """What must be in the outbox, by the rules alone."""

    def __init__(self) -> None:
        self.committed: list[UUID] = []
        self.frames: list[Frame] = [Frame()]
        self.pending: list[UUID] = []
        self.unattached: dict[int, list[UUID]] = {}

    def raised(self, order: Order | None, event_id: UUID) -> None:
        if order is not None and id(order) in self.unattached:
            self.unattached[id(order)].append(event_id)
        else:
            self.pending.append(event_id)

    def add(self, order: Order) -> None:
        self.pending += self.unattached.pop(id(order))
        self.frames[-1].added.append(order)

    def flush(self) -> None:
        # Rows are written in the order in which events were raised, and ids rise in that order, too.
        self.frames[-1].written += sorted(self.pending)
        self.pending = []

    def begin_savepoint(self) -> None:
        self.flush()
        self.frames.append(Frame())

    def release_savepoint(self) -> None:
        self.flush()
        inner = self.frames.pop()
        self.frames[-1].written += inner.written
        self.frames[-1].added += inner.added

    def rollback_savepoint(self, before: dict[int, list[UUID]]) -> list[Order]:
        self.pending = []
        frame = self.frames.pop()
        for order in frame.added:
            self.unattached[id(order)] = list(before[id(order)])
        return frame.added

    def commit(self) -> None:
        while len(self.frames) > 1:
            self.release_savepoint()
        self.flush()
        self.committed += self.frames[0].written
        self.frames = [Frame()]

    def rollback(self, before: dict[int, list[UUID]]) -> list[Order]:
        gone: list[Order] = []
        while self.frames:
            gone += self.rollback_savepoint(before)
        self.frames = [Frame()]
        return gone


class Run:
    """One random program."""

    def __init__(self, box: Pillarbox, seed: int) -> None:
        self.box = box
        self.draw = random.Random(seed)
        self.model = Model()
        self.tenant = self.draw.choice([None, "one"])
        self.before: dict[int, list[UUID]] = {}
        self.free: list[Order] = []  # transient objects
        self.held: list[Order] = []  # objects in the session
        self.everything: list[Order] = []  # keeps ids of objects from being used again
        self.savepoints: list[object] = []
        self.trace: list[str] = []
        self.touched: set[UUID] = set()

    async def execute(self) -> None:
        """Run, perhaps until cancelled."""
        task = asyncio.create_task(self._program())
        if self.draw.random() < 0.2:
            for _ in range(self.draw.randrange(400)):
                await asyncio.sleep(0)
            task.cancel()
            self.trace.append("cancel")
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            raise error

    async def _program(self) -> None:
        uow = self.box.unit_of_work(tenant=self.tenant)
        leaving = False
        try:
            async with uow:
                for _ in range(self.draw.randrange(3, 40)):
                    name = self.draw.choice(_OPERATIONS)
                    self.trace.append(name)
                    await getattr(self, f"_{name}")(uow)
                leaving = self.draw.random() < 0.8
                self.trace.append("leave" if leaving else "abandon")
                if not leaving:
                    raise _Abandoned
        except _Abandoned:
            self.model.rollback(self.before)
        except asyncio.CancelledError:
            # Only a COMMIT that was under way can have gone through; whoever was cancelled can tell.
            if uow.committed and self._was_committing():
                self.model.commit()
            else:
                self.model.rollback(self.before)
            raise
        else:
            self.model.commit()

    def _was_committing(self) -> bool:
        return next((step for step in reversed(self.trace) if step != "cancel"), "") in ("commit", "leave")

    # -- operations ----------------------------------------------------------------------------------------------------

    async def _place(self, _uow: UnitOfWork) -> None:
        order = Order(id=uuid4(), total_cents=1)
        self.everything.append(order)
        self.free.append(order)
        self.model.unattached[id(order)] = []
        self._raise(order, OrderPlaced(order_id=order.id, total_cents=1))

    async def _note_free(self, _uow: UnitOfWork) -> None:
        if self.free:
            self._raise(self.draw.choice(self.free), OrderNoted(note="while free"))

    async def _add(self, uow: UnitOfWork) -> None:
        if self.free:
            order = self.free.pop(self.draw.randrange(len(self.free)))
            self.before[id(order)] = list(self.model.unattached[id(order)])
            uow.add(order)
            self.model.add(order)
            self.held.append(order)

    async def _change(self, uow: UnitOfWork) -> None:
        if order := await self._some(uow):
            order.total_cents += 1
            self._raise(order, OrderRepriced(order_id=order.id, total_cents=order.total_cents))

    async def _note(self, uow: UnitOfWork) -> None:
        if order := await self._some(uow):
            self._raise(order, OrderNoted(note="nothing changed"))

    async def _delete(self, uow: UnitOfWork) -> None:
        order = await self._some(uow)
        if order is not None and inspect(order).persistent and order not in uow.session.sync_session.deleted:
            self._raise(order, OrderNoted(note="last words"))
            await uow.session.delete(order)
            self.model.flush()
            await uow.flush()
            self.held.remove(order)

    async def _publish(self, uow: UnitOfWork) -> None:
        event = OrderNoted(note="published")
        tenant = self.draw.choice(["two", "three"]) if self.tenant is None else self.tenant
        uow.publish(event, key=self.draw.choice("abc"), tenant=tenant)
        self._raised(None, event.event_id)

    async def _publish_again(self, uow: UnitOfWork) -> None:
        event = OrderNoted(note="twice")
        uow.publish(event, key="a")
        uow.publish(event, key="a")
        self._raised(None, event.event_id)

    async def _flush(self, uow: UnitOfWork) -> None:
        await uow.flush()
        self.model.flush()

    async def _query(self, uow: UnitOfWork) -> None:
        await uow.session.scalar(select(func.count()).select_from(Order))
        self.model.flush()

    async def _begin(self, uow: UnitOfWork) -> None:
        if len(self.savepoints) < MAX_DEPTH:
            self.savepoints.append(await uow.session.begin_nested())
            self.model.begin_savepoint()

    async def _release(self, _uow: UnitOfWork) -> None:
        if self.savepoints:
            await self.savepoints.pop().commit()  # type: ignore[attr-defined]
            self.model.release_savepoint()

    async def _undo(self, uow: UnitOfWork) -> None:
        if self.savepoints:
            await self.savepoints.pop().rollback()  # type: ignore[attr-defined]
            self._gone(uow, self.model.rollback_savepoint(self.before))

    async def _fail(self, uow: UnitOfWork) -> None:
        """A statement that the database refuses, inside a savepoint."""
        known = [order for order in self.held if inspect(order).persistent]
        if not known:
            return
        self.model.begin_savepoint()
        try:
            async with uow.session.begin_nested():
                uow.publish(OrderNoted(note="never"), key="a")
                await uow.session.execute(
                    text("INSERT INTO test_orders (id, total_cents, version) SELECT id, 1, 1 FROM test_orders"),
                )
        except IntegrityError:
            self._gone(uow, self.model.rollback_savepoint(self.before))
        else:
            self.model.release_savepoint()
            raise AssertionError("the database took a key twice")

    async def _commit(self, uow: UnitOfWork) -> None:
        await uow.commit()
        self.model.commit()
        self.savepoints.clear()
        self._let_go_of_deleted()

    async def _rollback(self, uow: UnitOfWork) -> None:
        await uow.rollback()
        self.savepoints.clear()
        self._gone(uow, self.model.rollback(self.before))

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _raise(self, order: Order, event: OrderNoted | OrderPlaced | OrderRepriced) -> None:
        order.raise_event(event)
        self._raised(order, event.event_id)

    def _raised(self, order: Order | None, event_id: UUID) -> None:
        self.touched.add(event_id)
        self.model.raised(order, event_id)

    async def _some(self, uow: UnitOfWork) -> Order | None:
        if not self.held:
            return None
        order = self.draw.choice(self.held)
        if inspect(order).expired_attributes and inspect(order).persistent:
            await uow.session.refresh(order)
            self.model.flush()
        return order

    def _gone(self, uow: UnitOfWork, orders: list[Order]) -> None:
        """After a rollback: new objects are free again, deleted ones are back."""
        for order in orders:
            if order in self.held:
                self.held.remove(order)
            # SQLAlchemy goes on calling one deleted that was deleted meanwhile: no further use for it.
            if {"id", "total_cents"} <= inspect(order).dict.keys() and not inspect(order).was_deleted:
                self.free.append(order)
        self.held = [order for order in self.held if order in uow.session.sync_session]

    def _let_go_of_deleted(self) -> None:
        self.held = [order for order in self.held if not inspect(order).was_deleted]


class _Abandoned(Exception):  # noqa: N818  leaves a unit of work by an error
    pass


_OPERATIONS = [
    *["place", "add", "change", "note", "publish"] * 3,
    *["flush", "query", "begin", "release", "undo"] * 2,
    *["note_free", "publish_again", "delete", "fail", "commit", "rollback"],
]


async def fuzz(box: Pillarbox, seeds: range) -> list[str]:
    """Run the programs; what went wrong, one line each."""
    violations = []
    for seed in seeds:
        run = Run(box, seed)
        await run.execute()
        found = await _stored(box, run.touched)
        if found != run.model.committed:
            violations.append(
                f"seed {seed}: wanted {len(run.model.committed)}, found {len(found)}: {' '.join(run.trace)}"
            )
    violations += await _order(box)
    return violations


async def _stored(box: Pillarbox, event_ids: set[UUID]) -> list[UUID]:
    async with box.engine.connect() as connection:
        return list(
            (
                await connection.scalars(
                    select(outbox.c.event_id).where(outbox.c.event_id.in_(event_ids)).order_by(outbox.c.id)
                )
            ).all()
        )


async def _order(box: Pillarbox) -> list[str]:
    """Within an aggregate, (version, index) must rise with the row's id."""
    last: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    wrong = []
    async with box.engine.connect() as connection:
        for (headers,) in await connection.execute(select(outbox.c.headers).order_by(outbox.c.id)):
            values = json.loads(headers) if isinstance(headers, str) else headers
            if "version" in values:
                place = (int(values["version"]), int(values["event_index"]))
                if place <= last[values["aggregate_id"]]:
                    wrong.append(f"order {values['aggregate_id']}: {place} after {last[values['aggregate_id']]}")
                last[values["aggregate_id"]] = place
    return wrong


async def prove(url: str, seeds: range) -> list[str]:
    async with order_box(url) as box:
        await set_up(box)
        return await fuzz(box, seeds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--database", choices=["sqlite", "postgres"], action="append")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.runs)
    results: dict[str, object] = {"seed": arguments.seed, "runs": arguments.runs}
    failed = False
    with tempfile.TemporaryDirectory(prefix="pillarbox-fuzz-") as folder:
        Path(folder).chmod(0o711)
        for database in arguments.database or ["sqlite", "postgres"]:
            started = time.perf_counter()
            if database == "sqlite":
                violations = asyncio.run(prove(f"sqlite+aiosqlite:///{folder}/fuzz.db", seeds))
            else:
                with EmbeddedPostgres(Path(folder) / "server") as server:
                    violations = asyncio.run(prove(server.url, seeds))
            failed = failed or bool(violations)
            seconds = round(time.perf_counter() - started, 1)
            results[database] = {"violations": len(violations), "first": violations[:10], "seconds": seconds}
    print(json.dumps(results, indent=2))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
