"""Projections in the hands of people: real processes, on real databases."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from pillarbox.cli.output import Exit
from tests.e2e import test_cli
from tests.e2e.test_cli import CommandLine, execute, on_sqlite
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
    assert (before["name"], before["generation"], before["handled"], before["held"]) == ("sales", 1, 5, 0)
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
    assert listed[0].split() == ["NAME", "SOURCE", "SEEN", "LAG", "HANDLED", "HELD", "GENERATION"]
    assert (listed[1].split()[0], listed[1].split()[-1]) == ("sales", "3")


def test_what_cannot_be_done_is_said_in_one_line(pillarbox: CommandLine, shop: Database) -> None:
    rebuild = ("projections", "rebuild", "shop:box")
    assert pillarbox.complaint(*rebuild, "sums", code=Exit.USAGE) == (
        "error: this box has no projection 'sums'; it has: sales"
    )
    assert "mails has handlers" in pillarbox.complaint(*rebuild, "mails", code=Exit.SETTINGS)
    assert "there is no broker" in pillarbox.complaint(*rebuild, "sales", "--from", "broker", code=Exit.SETTINGS)
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


PRICES = """
import os
from pathlib import Path

from sqlalchemy import String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import Aggregate, IntegrationEvent, Pillarbox, Poison
from pillarbox.projections import Add, Change, Projection, ProjectionRow, on


class Raised(IntegrationEvent, name="tests.prices.raised", version=1):
    article: str
    cents: int


class Base(DeclarativeBase):
    pass


class Price(Aggregate, Base):
    __tablename__ = "prices_source"
    article: Mapped[str] = mapped_column(String(20), primary_key=True)
    cents: Mapped[int]
    version: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"version_id_col": version}

    def set(self, cents):
        self.raise_event(Raised(article=self.article, cents=cents - (self.cents or 0)))
        self.cents = cents


class PriceRow(ProjectionRow, Base):
    __tablename__ = "prices"
    article: Mapped[str] = mapped_column(String(20), primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)


class Prices(Projection, row=PriceRow):
    @on(Raised)
    def raised(self, event: Raised) -> Change:
        if event.cents == 2 and not Path("mended").exists():
            raise Poison("nobody can bear this")
        return self.put(article=event.article, cents=Add(event.cents))


box = Pillarbox(os.environ["SHOP_URL"])
prices = box.projection(Prices, source="outbox")


async def fill() -> None:
    async with box:
        async with box.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        for cents in (1, 3, 7):
            async with box.unit_of_work() as uow:
                price = await uow.session.get(Price, "tea")
                if price is None:
                    uow.add(price := Price(article="tea"))
                price.set(cents)
        await prices.drain()
"""


@on_sqlite
def test_h85_a_letter_that_is_too_late_is_no_success(pillarbox: CommandLine, migrated: Database) -> None:
    (pillarbox.folder / "shop.py").write_text(PRICES)
    pillarbox.environment["SHOP_URL"] = migrated.url()
    program = [sys.executable, "-c", "import asyncio, shop; asyncio.run(shop.fill())"]
    subprocess.run(program, env=pillarbox.environment, cwd=pillarbox.folder, check=True, timeout=120)
    (pillarbox.folder / "mended").touch()
    said = pillarbox("dlq", "redrive", "shop:box", "--all", code=Exit.PROBLEM).stdout.splitlines()
    assert said[0] == "redrive: 0 of 1 letter done"
    assert "failed again: StaleLetterError: a later event has changed the row in prices already" in said[1]
    assert execute(migrated, "SELECT cents FROM prices")[0][0] == 5
    assert len(pillarbox.json("dlq", "list")["letters"]) == 1
    pillarbox("projections", "rebuild", "shop:box", "prices")
    assert execute(migrated, "SELECT cents FROM prices")[0][0] == 7
    assert len(pillarbox.json("dlq", "list", "--state", "redriven")["letters"]) == 1
