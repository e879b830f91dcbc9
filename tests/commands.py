"""The command line in processes that start quickly: forked from one that has imported everything already."""

from __future__ import annotations

import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

_IMPORTED = (
    *(f"pillarbox.cli.{name}" for name in ("dlq", "doctor", "lanes", "outbox", "relay", "retention")),
    "pillarbox.stores.migrations",
    *("aiosqlite", "asyncmy", "asyncpg"),
    *(f"sqlalchemy.dialects.{name}" for name in ("mysql.asyncmy", "postgresql.asyncpg", "sqlite.aiosqlite")),
)


def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, "tests.commands"])
    return context


def run(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run ``pillarbox`` to its end, as a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        process = _server().Process(target=_command, args=(list(arguments), dict(environment), folder, out, err))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"pillarbox {' '.join(arguments)} did not end")
        return subprocess.CompletedProcess(
            ["pillarbox", *arguments], process.exitcode, out.read_text("utf-8"), err.read_text("utf-8")
        )


def _command(arguments: list[str], environment: dict[str, str], folder: Path, out: Path, err: Path) -> None:
    from pillarbox.cli import main

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), "utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), "utf-8", write_through=True)
    sys.argv = ["pillarbox", *arguments]
    main()
