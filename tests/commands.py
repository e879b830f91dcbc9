"""The command line in the process of the test; or it and other programs in a process that starts quickly, forked from
one that has imported all.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import multiprocessing
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from unittest.mock import patch

_MODULE = re.compile(r"[\w.]+:\w+")
_IMPORTED = (
    *(
        f"pillarbox.cli.{name}"
        for name in ("consume", "dlq", "doctor", "lanes", "outbox", "projections", "relay", "retention")
    ),
    "pillarbox.stores.migrations",
    *("aiosqlite", "asyncmy", "asyncpg"),
    *(f"sqlalchemy.dialects.{name}" for name in ("mysql.asyncmy", "postgresql.asyncpg", "sqlite.aiosqlite")),
)


def run(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run ``pillarbox`` to its end: in a process of its own if it imports a module of a user, which would stay."""
    if any(_MODULE.fullmatch(it) or (folder / f"{it}.py").exists() for it in arguments):
        return fork(arguments, environment, folder, timeout)
    return _run_here(arguments, environment, folder)


def _run_here(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """In this process, which has its environment, folder, streams and logging until it ends."""
    from pillarbox.cli import run as command

    out, err = io.BytesIO(), io.BytesIO()
    with (
        contextlib.chdir(folder),
        patch.dict(os.environ, environment, clear=True),
        Path(os.devnull).open("r", encoding="utf-8") as nothing,
        patch.object(sys, "stdin", nothing),
        contextlib.redirect_stdout(io.TextIOWrapper(out, "utf-8", write_through=True)),
        contextlib.redirect_stderr(io.TextIOWrapper(err, "utf-8", write_through=True)),
        _logging_untouched(),
    ):
        code = command(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        said = [stream.getvalue().decode("utf-8") for stream in (out, err)]
    return subprocess.CompletedProcess(["pillarbox", *arguments], code, *said)


@contextlib.contextmanager
def _logging_untouched() -> Iterator[None]:
    """Without handlers, as a new process begins; afterwards all is as it was."""
    loggers = [logging.getLogger(name) for name in (None, "pillarbox", "sqlalchemy.pool")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    loggers[0].handlers.clear()
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, "tests.commands"])
    return context


def fork(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run it to its end as a process of its own."""
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


def start(
    program: Path, environment: Mapping[str, str], folder: Path, *, stdin: socket.socket, out: Path, err: Path
) -> ForkServerProcess:
    """Start a file of Python, to which all warnings are errors."""
    process = _server().Process(
        target=_program, args=(program, dict(environment), folder), kwargs={"stdin": stdin, "out": out, "err": err}
    )
    process.start()
    return process


def _command(arguments: list[str], environment: dict[str, str], folder: Path, out: Path, err: Path) -> None:
    from pillarbox.cli import main

    _settle(environment, folder, out, err)
    sys.argv = ["pillarbox", *arguments]
    main()


def _program(
    program: Path, environment: dict[str, str], folder: Path, *, stdin: socket.socket, out: Path, err: Path
) -> None:
    _settle(environment, folder, out, err)
    os.dup2(stdin.detach(), 0)
    sys.argv, sys.path[0] = [str(program)], str(program.parent)
    warnings.simplefilter("error")
    runpy.run_path(str(program), run_name="__main__")
    gc.collect()  # what it has left open complains


def _settle(environment: dict[str, str], folder: Path, out: Path, err: Path) -> None:
    """Give this process its environment, folder and streams."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), "utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), "utf-8", write_through=True)
