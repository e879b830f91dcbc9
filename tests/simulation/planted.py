"""A planted mistake, and the search for a world in which it shows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.simulation.course import Result

Plant = Callable[[pytest.MonkeyPatch], None]
LIMIT = 1_000
"""Seeds within which every mistake must show."""


@dataclass
class Mutant:
    """A mistake, the worlds in which it shows, and how. The world of this ``seed`` shows it, until a change of the
    shipped code moves it to another one.
    """

    plant: Plant
    shows: tuple[str, ...]
    simulate: Callable[..., Result]
    world: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __str__(self) -> str:
        return self.plant.__name__.removeprefix("_")

    def caught(self, seeds: Iterable[int]) -> tuple[int, str] | None:
        """The first of these seeds that shows the mistake, and what was seen; None if it gets away."""
        for seed in seeds:
            for violation in self.simulate(seed, **self.world).violations:
                if violation.startswith(self.shows):
                    return seed, violation
        return None

    def check(self, patch: pytest.MonkeyPatch) -> None:
        """Plant it, and fail if it gets away. Others are tried only if its seed has moved: `make simulate` names it."""
        self.plant(patch)
        assert self.caught([*range(self.seed, LIMIT), *range(self.seed)])


def search(mutants: Sequence[Mutant]) -> int:
    """Say which seed is the first to catch each mistake. 1 if one gets away."""
    lost = 0
    for mutant in mutants:
        with pytest.MonkeyPatch.context() as patch:
            mutant.plant(patch)
            seed, violation = mutant.caught(range(LIMIT)) or (LIMIT, "")
        lost += not violation
        sys.stdout.write(f"{mutant!s:55} {seed:5}  {violation or 'GOT AWAY'}\n")
        sys.stdout.flush()
    return int(lost > 0)
