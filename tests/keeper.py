"""One Pulsar for all processes of a pytest run, too big for one each. It is kept by a process that none of them owns.

    folder/                 the same for all of them
    ├── gate.lock           held by who looks whether the server is there
    ├── users.lock          held shared by every user; the keeper waits for it, and has it when the last user is gone
    └── addresses.json      there while the server is

The kernel takes a lock back however a process ends, so a worker that crashes leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from pillarbox.testing.pulsar import LocalPulsar


def join(folder: Path) -> tuple[IO[bytes], dict[str, str]]:
    """Use the server, which the first one starts: until the file is closed, it stays. Its addresses come along."""
    folder.mkdir(parents=True, exist_ok=True)
    addresses = folder / "addresses.json"
    with _locked(folder / "gate.lock", fcntl.LOCK_EX):
        claim = _locked(folder / "users.lock", fcntl.LOCK_SH)
        try:
            if not addresses.exists():
                _start_keeper(folder)
            return claim, json.loads(addresses.read_text())
        except BaseException:
            claim.close()
            raise


def _start_keeper(folder: Path) -> None:
    log = folder / "keeper.log"
    with log.open("wb") as errors:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.keeper", str(folder)],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # it outlives us if others still use the server
        )
    assert keeper.stdout is not None
    with keeper.stdout as said:
        if said.readline() != b"ready\n":
            raise RuntimeError(f"Pulsar did not start:\n{log.read_text()}")
    keeper.returncode = 0  # nobody waits for it


def keep(folder: Path) -> None:
    addresses = folder / "addresses.json"
    with tempfile.TemporaryDirectory(prefix="pillarbox-pulsar-") as place:
        server = LocalPulsar(Path(place), quick_start=True)
        server.start()
        try:
            addresses.write_text(json.dumps({"url": server.url, "admin_url": server.admin_url}))
            sys.stdout.write("ready\n")
            sys.stdout.close()
            with _locked(folder / "users.lock", fcntl.LOCK_EX):
                addresses.unlink(missing_ok=True)
        finally:
            server.kill()


def _locked(path: Path, how: int) -> IO[bytes]:
    file = path.open("ab", buffering=0)
    fcntl.flock(file, how)
    return file


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
