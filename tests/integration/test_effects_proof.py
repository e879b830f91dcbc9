"""The long proofs about consumers, in small."""

from __future__ import annotations

from pathlib import Path

from pillarbox.consumers.failure import Failure, classify
from pillarbox.errors import HoldFullError
from tests.prove import effects
from tests.prove.accounts import AccountView
from tests.servers import Database


async def test_h80_effects_happen_once_through_kills_copies_and_disorder(
    postgres_database: Database, tmp_path: Path
) -> None:
    sizes = {"events": 1_500, "kills": 4, "seed": 7, "processes": 2}
    result = await effects.prove(postgres_database.url(), tmp_path, **sizes)
    assert result["holds"], result
    assert (result["events"], result["kills"], result["kills_before_ack"]) == (1_500, 4, 2)
    assert min(result["duplicates"], result["disordered"], result["held"]) > 0, result


def test_a_projection_that_is_named_by_its_table_has_a_plain_text_as_name() -> None:
    """It is the name of a group, and goes to brokers; SQLAlchemy's own kind of text cannot be encoded by all."""
    assert type(AccountView.name) is str


def test_h84_no_event_becomes_a_letter_because_too_many_wait_for_their_predecessors() -> None:
    assert classify(HoldFullError("full")) is Failure.TRANSIENT
