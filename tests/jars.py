"""Pulsar's official client for Java, which reads back what we publish: ``python -m tests.jars`` fetches it.

Of all that it depends on these jars are enough for a reader; the others are about encryption and configuration files.
They come from Maven into the cache folder of `tests.binaries`, each with the checksum that it must have. Only the
standard library is used: `make servers` runs this before anything is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from xml.sax.saxutils import escape

from pillarbox.testing import maven
from pillarbox.testing.maven import Artefact
from tests.binaries import UnavailableError

COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
VERSION = "4.0.8"

_PULSAR, _TELEMETRY = "org.apache.pulsar", "io.opentelemetry"
JARS = (
    Artefact(_PULSAR, "pulsar-client", VERSION, "6d97474a63b3ccbddd40c127f85fb6f79f405e221743454d0ef8beec3b3e494e"),
    Artefact(_PULSAR, "pulsar-client-api", VERSION, "3f5f65cc20e70e14e1c689ee95cbc4833be1974550e29ee75f77d5e7c2d245ef"),
    Artefact(
        _PULSAR, "pulsar-client-admin-api", VERSION, "d0f489b2b27d6f5cdfc75a3bb0003eade9703582e1a6c9aa0e83644db99076a8"
    ),
    Artefact(
        _TELEMETRY, "opentelemetry-api", "1.45.0", "b5903cf245e3a8ddf95b95031529ebcc70884a76b953798d3093a4ada7fcc140"
    ),
    Artefact(
        _TELEMETRY,
        "opentelemetry-api-incubator",
        "1.45.0-alpha",
        "4a664ae100e727c42d22b099b168cdd4f43ed6fec9dc152f2e3afc6aa1143b03",
    ),
    Artefact(
        _TELEMETRY,
        "opentelemetry-context",
        "1.45.0",
        "9b6dd4a2e758b0fd6da81faa882856085821ec60e1407a1113e1ba13a0eff5e0",
    ),
    Artefact(
        "com.fasterxml.jackson.core",
        "jackson-annotations",
        "2.17.2",
        "873a606e23507969f9bbbea939d5e19274a88775ea5a169ba7e2d795aa5156e1",
    ),
    Artefact("org.slf4j", "slf4j-api", "2.0.13", "e7c2a48e8515ba1f49fa637d57b4e2f590b3f5bd97407ac699c3aa5efb1204a9"),
)


def folder() -> Path:
    """Where they are, once they are installed. Another set of jars is another folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256("".join(jar.sha256 for jar in JARS).encode()).hexdigest()
    return cache / "pillarbox" / "servers" / f"pulsar-client-{VERSION}-{digest[:12]}"


def classpath() -> str:
    """All of them, as Java takes it."""
    return os.pathsep.join(str(folder() / jar.file) for jar in JARS)


def obstacle() -> str | None:
    """Why they cannot be had or not be used here, if so."""
    if shutil.which("javac") is None:
        return "that takes a JDK, 17 or newer (java and javac)"
    return maven.obstacle()


def install() -> Path:
    """The folder with the jars; fetches them if they are not there yet. Of several processes one does it."""
    place = folder()
    if place.is_dir():
        return place
    if reason := obstacle():
        raise UnavailableError(reason)
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / f".{place.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}-") as scratch:
                fetched = Path(scratch, "jars")
                fetched.mkdir()
                _fetch(fetched)
                _check(fetched)
                fetched.rename(place)  # at once: nobody sees half of it
    return place


def _fetch(into: Path) -> None:
    base = os.environ.get("PILLARBOX_MAVEN")
    if not base:
        _fetch_by_maven(into)
        return
    for jar in JARS:
        try:
            with urllib.request.urlopen(f"{base.rstrip('/')}/{jar.path}", timeout=60) as answer:  # noqa: S310
                (into / jar.file).write_bytes(answer.read())
        except OSError as error:
            raise UnavailableError(f"{jar.path} cannot be fetched: {error}") from error


def _fetch_by_maven(into: Path) -> None:
    """By one call for all of them: a project that depends on these, and on nothing that they would bring along."""
    alone = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
    dependencies = "".join(
        f"<dependency><groupId>{escape(jar.group)}</groupId><artifactId>{escape(jar.name)}</artifactId>"
        f"<version>{escape(jar.version)}</version>{alone}</dependency>"
        for jar in JARS
    )
    project = "<groupId>pillarbox</groupId><artifactId>jars</artifactId><version>1</version>"
    (into.parent / "pom.xml").write_text(
        f"<project><modelVersion>4.0.0</modelVersion>{project}<dependencies>{dependencies}</dependencies></project>"
    )
    command = ["mvn", "--quiet", "--batch-mode", COPY, f"-DoutputDirectory={into}"]
    done = subprocess.run(
        command, cwd=into.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise UnavailableError(f"mvn cannot fetch Pulsar's client:\n{done.stdout}{done.stderr}")


def _check(fetched: Path) -> None:
    for jar in JARS:
        try:
            found = hashlib.sha256((fetched / jar.file).read_bytes()).hexdigest()
        except FileNotFoundError:
            raise UnavailableError(f"{jar.path} did not come") from None
        if found != jar.sha256:
            raise UnavailableError(f"{jar.path} has the SHA-256 {found}, which is not the one we know")


def main() -> int:
    try:
        sys.stdout.write(f"{install()}\n")
    except UnavailableError as error:
        sys.stderr.write(f"Pulsar's client for Java: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
