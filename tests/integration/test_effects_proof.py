"""The long proofs about consumers, in small."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import Pillarbox
from pillarbox.consumers.failure import Failure, classify
from pillarbox.stores import inbox as stored
from tests.prove import consumer_outage, effects
from tests.prove.accounts import AccountView
from tests.servers import Database


async def test_h80_effects_happen_once_through_kills_copies_and_disorder(
    postgres_database: Database, tmp_path: Path
) -> None:
    sizes = {"events": 1_500, "kills": 4, "seed": 7, "processes": 2}
    result = await effects.prove(postgres_database.url(), tmp_path, **sizes)
    assert result["holds"], result
    assert (result["events"], result["kills"], result["kills_before_ack"]) == (1_500, 4, 2)
    assert min(result["duplicates"], result["disordered"]) > 0, result


@pytest.mark.full
async def test_h87_an_outage_of_the_database_makes_no_dead_letters_and_consumers_go_on_after_it(
    postgres_database: Database,
) -> None:
    async with consumer_outage.linked(postgres_database.url()) as (url, link):
        result = await consumer_outage.prove(url, consumer_outage.cut(link), seconds=3.0, rate=20.0, seed=7)
    assert result["holds"], result
    assert result["failed_attempts"] > 0


async def test_h87_a_server_whose_unix_socket_is_not_there_is_away(tmp_path: Path) -> None:
    """A file that is not there has a name, and may be the fault of the message."""
    with pytest.raises(FileNotFoundError) as away:
        await asyncio.open_unix_connection(tmp_path / "nobody")
    with pytest.raises(FileNotFoundError) as lacking:
        (tmp_path / "nobody").read_bytes()
    assert classify(away.value) is Failure.TRANSIENT
    assert classify(lacking.value) is Failure.UNKNOWN


async def test_a_process_that_starts_does_not_wait_for_those_that_work(postgres_database: Database) -> None:
    """They hold the generation of their projection one after the other: there may never be a moment without any."""
    engine = create_async_engine(postgres_database.url())
    said: dict[str, Any] = {"kind": "projection", "source": "broker", "topics": ["accounts"]}
    async with Pillarbox(engine) as box:
        await box.migrate()
        async with engine.begin() as first:
            await first.run_sync(stored.register_consumer, "rows", **said)
        async with engine.begin() as working, engine.begin() as starting:
            await working.run_sync(stored.hold_generation, "rows")
            await starting.execute(text("SET LOCAL lock_timeout = '2s'"))
            await starting.run_sync(stored.register_consumer, "rows", **said)
    await engine.dispose()


def test_a_projection_that_is_named_by_its_table_has_a_plain_text_as_name() -> None:
    """It is the name of a group, and goes to brokers; SQLAlchemy's own kind of text cannot be encoded by all."""
    assert type(AccountView.name) is str
