"""The small form of ``make prove-kills``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import FreshDatabase
from tests.prove.kills import prove


@pytest.mark.parametrize("kind", ["embedded", pytest.param("mariadb", marks=pytest.mark.elsewhere)])
async def test_h34_killed_relays_lose_nothing_and_keep_every_key_in_order(
    fresh_database: FreshDatabase, tmp_path: Path, kind: str
) -> None:
    result = await prove(fresh_database(kind).url(), tmp_path, events=1_500, kills=4, lease=1.0, seed=7)
    assert (result["committed"], result["delivered"], result["kills"]) == (1_500, 1_500, 4)
    assert (result["lost"], result["ghosts"], result["out_of_order"]) == (0, 0, 0)
    assert result["duplicates"] == result["duplicates_tied"]
    assert result["rolled_back"] > 0
