"""The README of an example, done by somebody who follows it command by command."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests import commands
from tests.docs.test_docs import LINK, blocks_of, commands_of, matches
from tests.servers import wait_until
from tests.web import ROOT

_CHANGES = (" -X ", " --json ", " redrive ")
"""What stands in commands that change something: these are done once."""


class Reader:
    """Does what the page says, from top to bottom. ``starts`` has what each line of a block with ``sh`` starts."""

    def __init__(
        self, readme: Path, environment: Mapping[str, str], starts: Mapping[str, Callable[[], object]]
    ) -> None:
        self._readme = readme
        self._environment = environment
        self._starts = starts

    def filled_in(self, command: str) -> str:
        """The command with what the reader puts in place of words like ORDER_ID, and the addresses of this test."""
        return command

    def note(self, command: str, printed: str) -> None:
        """Remember what later commands need."""

    def follow(self) -> None:
        for block in blocks_of(self._readme):
            if block.language == "sh":
                [line] = block.lines
                self._starts[line]()
            elif block.language == "console":
                for each in commands_of(block):
                    self._do(each.command.removeprefix("$ "), each.output, f"{self._readme.name}, line {each.line}")

    def call(self, command: str) -> str:
        """What a command prints."""
        program, *arguments = shlex.split(command)
        if program == "pillarbox":
            done = commands.run(arguments, self._environment, ROOT, timeout=60)
        else:
            done = subprocess.run(
                [program, *arguments],
                env=self._environment,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def _do(self, command: str, shown: list[str], where: str) -> None:
        """Do it; what only looks is done until it shows what the page shows."""
        printed = self.call(self.filled_in(command))
        looks = not any(each in command for each in _CHANGES)

        def as_shown() -> bool:
            nonlocal printed
            if matches(shown, printed.splitlines()):
                return True
            printed = self.call(self.filled_in(command)) if looks else printed
            return False

        try:
            wait_until(as_shown, where, seconds=30 if looks else 0)
        except TimeoutError:
            pytest.fail(f"{where}: {command} prints\n{printed}")
        self.note(command, printed)


def dead_links(readme: Path) -> list[str]:
    """Links of the page that lead nowhere."""
    targets = LINK.findall(readme.read_text("utf-8"))
    assert targets
    return [target for target in targets if not (readme.parent / target).exists()]
