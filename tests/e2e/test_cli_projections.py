"""Projections in the hands of people: real processes, on real databases."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from pillarbox.cli.output import Exit
from tests.e2e import test_cli
from tests.e2e.test_cli import CommandLine, execute
from tests.servers import Database

pillarbox = test_cli.pillarbox
database = test_cli.database
migrated = test_cli.migrated

MODULE = """
import os

from sqlalchemy import String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import IntegrationEvent, Pillarbox
from pillarbox.projections import Add, Change, Projection, ProjectionRow, on


class Sold(IntegrationEvent, name="tests.sold.sold", version=1):
    article: str
    pieces: int


class Base(DeclarativeBase):
    pass


class SaleRow(ProjectionRow, Base):
    __tablename__ = "sales"
    article: Mapped[str] = mapped_column(String(20), primary_key=True)
    pieces: Mapped[int]


class Sales(Projection, row=SaleRow, guarded=False):
    @on(Sold)
    def sold(self, event: Sold) -> Change:
        return self.put(article=event.article, pieces=Add(event.pieces))


box = Pillarbox(os.environ["SHOP_URL"])
sales = box.projection(Sales, source="outbox")
mails = box.consumer("mails", source="outbox")


@mails.on(Sold)
async def mail(event: Sold) -> None:
    raise AssertionError("no mail is sent again")


async def fill() -> None:
    async with box:
        async with box.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        for pieces in range(5):
            async with box.unit_of_work() as uow:
                uow.publish(Sold(article="tea", pieces=pieces), key="tea")
        await sales.drain()
"""


@pytest.fixture
def shop(pillarbox: CommandLine, migrated: Database) -> Database:
    """A service with a projection whose table somebody has spoilt."""
    (pillarbox.folder / "shop.py").write_text(MODULE)
    pillarbox.environment["SHOP_URL"] = migrated.url()
    program = [sys.executable, "-c", "import asyncio, shop; asyncio.run(shop.fill())"]
    subprocess.run(program, env=pillarbox.environment, cwd=pillarbox.folder, check=True, timeout=120)
    execute(migrated, "UPDATE sales SET pieces = 99")
    return migrated


def test_a_spoilt_table_is_written_anew(pillarbox: CommandLine, shop: Database) -> None:
    [before] = pillarbox.json("projections", "list")["projections"]
    assert (before["name"], before["generation"], before["handled"]) == ("sales", 1, 5)
    assert pillarbox("projections", "rebuild", "shop:box", "sales", "--dry-run").stdout == (
        "rebuild: sales would get generation 2\n"
    )
    assert execute(shop, "SELECT pieces FROM sales")[0][0] == 99

    done = pillarbox.json("projections", "rebuild", "shop:box", "sales", "--reason", "it was wrong")
    assert (done["generation"], done["events"], done["left_out"]) == (2, 5, 0)
    assert execute(shop, "SELECT pieces FROM sales")[0][0] == 10
    [entry] = pillarbox.json("outbox", "audit")["entries"]
    assert (entry["action"], entry["target"], entry["reason"]) == ("rebuild", "projection sales", "it was wrong")
    assert (entry["details"]["finished"], entry["details"]["events"]) == (True, 5)

    printed = pillarbox("projections", "rebuild", "shop", "sales").stdout
    assert printed.startswith("rebuild: sales has generation 3: 5 events in ")
    listed = pillarbox("projections", "list").stdout.splitlines()
    assert listed[0].split()[:6] == ["NAME", "KIND", "SOURCE", "TOPICS", "GENERATION", "HANDLED"]
    assert listed[1].split()[:6] == ["sales", "projection", "outbox", "-", "3", "5"]
    [exactly] = pillarbox.json("projections", "list", "--exact")["projections"]
    assert (exactly["settled"], exactly["waiting"]) == (5, 0)


def test_what_cannot_be_done_is_said_in_one_line(pillarbox: CommandLine, shop: Database) -> None:
    rebuild = ("projections", "rebuild", "shop:box")
    assert pillarbox.complaint(*rebuild, "sums", code=Exit.USAGE) == (
        "error: this box has no projection 'sums'; it has: sales"
    )
    assert "no projection 'mails'" in pillarbox.complaint(*rebuild, "mails", code=Exit.USAGE)
    assert "use `--from outbox`" in pillarbox.complaint(*rebuild, "sales", "--from", "broker", code=Exit.SETTINGS)
    assert "cannot read none.jsonl" in pillarbox.complaint(*rebuild, "sales", "--from", "none.jsonl", code=Exit.PROBLEM)
    execute(shop, "DELETE FROM pillarbox_outbox")
    lost = pillarbox.complaint(*rebuild, "sales", code=Exit.PROBLEM)
    assert "it has had 5 events or more that are not found any more" in lost
    assert execute(shop, "SELECT pieces FROM sales")[0][0] == 99
    assert pillarbox.json(*rebuild, "sales", "--incomplete")["events"] == 0


def test_on_a_terminal_a_bar_shows_how_far_it_has_come(pillarbox: CommandLine, shop: Database) -> None:
    main, terminal = pty.openpty()
    process = pillarbox.start("projections", "rebuild", "shop:box", "sales", stderr=terminal)
    os.close(terminal)
    assert process.communicate(timeout=60)[0].startswith("rebuild: sales has generation 2: 5 events in ")
    shown = os.read(main, 10_000).decode()
    os.close(main)
    assert "sales" in shown
    assert "100%" in shown
    assert execute(shop, "SELECT pieces FROM sales")[0][0] == 10
