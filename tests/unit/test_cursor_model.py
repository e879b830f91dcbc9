"""The small form of the model behind ``make prove-cursor``, and proof that it would find a mistake."""

from __future__ import annotations

import pytest

from pillarbox.cursor import Snapshot
from tests.prove.cursor_model import SMALL, WRONG, Tx, World, Wrong, expose, steps, visit


@pytest.mark.parametrize("scenario", SMALL)
def test_no_promise_is_broken_in_any_state(scenario: str) -> None:
    result = visit(scenario)
    assert (result.story, result.broken) == ([], {})
    assert result.states > 200


def test_no_promise_is_broken_with_larger_looks() -> None:
    assert visit("KK L K", limits=(1, 2, 3)).broken == {}


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.__name__ for wrong in WRONG])
def test_a_wrong_reader_breaks_what_it_is_expected_to(wrong: type[Wrong]) -> None:
    _, result = expose(wrong)
    assert [*result.broken] == [wrong.breaks]


class TestDatabase:
    """The model of the database follows PostgreSQL's rules."""

    def run(self, programs: str, *wanted: str) -> World:
        world = World(tuple(Tx() for _ in programs.split()))
        for each in wanted:
            world = next(step for said, step in steps(world, programs.split()) if said.startswith(each))
        return world

    def test_what_runs_above_the_latest_completed_transaction_is_not_listed(self) -> None:
        world = self.run(".K L", "T1 gets", "T2, which", "T1, which", "T1 commits")
        assert world.snapshot == Snapshot(4, 4)

    def test_what_runs_below_it_is(self) -> None:
        world = self.run("K L", "T1", "T2", "T2 commits")
        assert world.snapshot == Snapshot(3, 5, (3,))

    def test_a_rollback_completes_a_transaction_as_well(self) -> None:
        world = self.run("K L", "T1", "T2", "T2 rolls back")
        assert (world.snapshot, world.committed) == (Snapshot(3, 5, (3,)), ())

    def test_a_savepoint_has_a_number_of_its_own_and_its_rows_have_the_transaction_s(self) -> None:
        world = self.run("(K) L", "T1", "T1 rolls its savepoint back")
        assert (world.snapshot, world.pending) == (Snapshot(3, 5, (3,)), ())
        world = self.run("(K) L", "T1", "T1 keeps", "T1 commits")
        assert [row.xid for row in world.committed] == [3]
        assert world.snapshot == Snapshot(5, 5)

    def test_a_key_is_locked_until_the_end_of_its_transaction(self) -> None:
        said = [said for said, _ in steps(self.run("K K", "T1"), ["K", "K"])]
        assert said == ["T1 rolls back", "T1 commits"]

    def test_a_savepoint_that_is_rolled_back_frees_its_locks(self) -> None:
        said = [said for said, _ in steps(self.run("(K) K", "T1", "T1 rolls its savepoint back"), ["(K)", "K"])]
        assert any(each.startswith("T2") for each in said)
