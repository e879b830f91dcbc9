"""Consumers of a real Pulsar that are killed, or that a message kills: whole processes, started again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import FreshDatabase
from tests.prove.victim import find_deadly, survive_kills
from tests.servers import Pulsar

KINDS = pytest.mark.parametrize("kind", ["embedded", pytest.param("mariadb", marks=pytest.mark.elsewhere)])


@KINDS
async def test_h91_a_consumer_that_is_killed_while_it_spills_and_has_spilled(
    fresh_database: FreshDatabase, pulsar: Pulsar, tmp_path: Path, kind: str
) -> None:
    await survive_kills(fresh_database(kind).url(), pulsar.url, tmp_path, events=300)


@KINDS
async def test_h91_a_message_that_kills_its_process_is_found_and_put_aside(
    fresh_database: FreshDatabase, pulsar: Pulsar, tmp_path: Path, kind: str
) -> None:
    assert await find_deadly(fresh_database(kind).url(), pulsar.url, tmp_path) < 10
