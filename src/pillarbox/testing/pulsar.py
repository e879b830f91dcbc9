"""A real Apache Pulsar on this machine only, for ``pillarbox dev pulsar``, tests and benchmarks.

`LocalPulsar` is one process; `PulsarCluster` is ZooKeeper, bookie and broker, which can be killed and frozen
separately. The programs are downloaded by Maven (see `maven`) and need Java 17. All calls block: on an event loop, call
them in a thread.

    folder/              created or existing
    ├── lock             held by this and by every process of the server: a new holder finds all of them gone
    ├── ports.json       kept, because the metadata locate messages by the port of their bookie
    ├── *.conf           written at every start
    ├── *.log            one for each process, of its last start; *.log.1 is of the start before
    └── data/  tmp/

No process outlives this one, even if this one is killed: see `_Group`.
"""

from __future__ import annotations

import atexit
import hashlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..errors import EmbeddedServerError, MissingProgramError, PillarboxError
from . import maven

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from typing import IO

VERSION = "4.0.8"
HOST = "127.0.0.1"

_DISTRIBUTION = maven.Artefact(
    "org.apache.pulsar",
    "pulsar-server-distribution",
    VERSION,
    "35c7d064c9e0928edbf2e708989faba0379662f98aa84ce0d4190c59efb6765e",
    kind="tar.gz",
    classifier="bin",
)
_NAME = f"pulsar-{VERSION}"
_OLDEST_JAVA = 17

# Below the ephemeral ports of operating systems. A client that reconnects to an ephemeral port of a dead server may get
# that very port, connect to itself, and keep the server from starting.
_PORTS = range(10_000, 32_000)

_START_SECONDS = 120  # per process, on a busy machine
_STOP_SECONDS = 20  # Pulsar takes up to ten
_LOCK_SECONDS = 5  # time for processes to die that were killed with their owner
_PAUSE_SECONDS = 0.05
_ATTEMPTS = 5
_LOG_LINES = 20
_LOG_BYTES = 256 * 1024

_SESSION_LEFT = "NoNode"  # possible end of a broker that restarts before its old session has expired
# A killed standalone may restart into an endless conflict with the registration of its own bookie: it comes and goes
# many times a second, and a health check may succeed in between. A sound start logs the second text four times.
_QUARRELS = ("was invalidated", "Failed to resolve network location")
_QUARREL_LINES = 20

_QUICK = (
    "-XX:TieredStopAtLevel=1",
    # The checksum has verified the classes already. A Java without such an option must ignore it.
    *("-XX:+IgnoreUnrecognizedVMOptions", "-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote"),
)

_SETTINGS = {
    "bindAddress": HOST,
    "advertisedAddress": HOST,
    "brokerDeduplicationEnabled": "true",
    "brokerDeleteInactiveTopicsEnabled": "false",
    "webSocketServiceEnabled": "false",
    # Otherwise a topic without subscription is trimmed with each new ledger, and a later reader misses most of it.
    "defaultRetentionTimeInMinutes": "-1",
    "defaultRetentionSizeInMB": "-1",
}


def is_installed() -> bool:
    """Whether Pulsar's programs are in the cache folder."""
    return maven.place(_NAME, _DISTRIBUTION).is_dir()


def install() -> Path:
    """The folder of Pulsar's programs. Downloads them (245 MB) if they are missing."""
    return maven.install(_NAME, _DISTRIBUTION, _unpack) / f"apache-pulsar-{VERSION}"


def java() -> str:
    """The Java for Pulsar: that of ``JAVA_HOME``, or on the path."""
    home = os.environ.get("JAVA_HOME")
    program = shutil.which("java", path=Path(home, "bin")) if home else shutil.which("java")
    remedy = f"install Java {_OLDEST_JAVA} or newer (on Debian: apt-get install openjdk-17-jre-headless)"
    if program is None:
        raise MissingProgramError(f"Pulsar needs Java, and there is none {f'in {home}' if home else 'here'}: {remedy}")
    said = subprocess.run([program, "-version"], capture_output=True, text=True, check=False).stderr  # noqa: S603
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    if found is None or int(found[1]) < _OLDEST_JAVA:
        raise MissingProgramError(f"Pulsar cannot run with {program} ({said.partition(chr(10))[0]}): {remedy}")
    return program


class LocalPulsar:
    """Pulsar in one process (standalone), with its data in a folder.

    ``settings`` are added to the broker's configuration. Ports that are not given are chosen once and kept in the
    folder. ``quick_start`` halves the time of a start by less compilation and checking: good for tests, not for
    measurements. The server is stopped by ``stop`` or ``kill``, or ends with this process.
    """

    cluster_name: ClassVar[str] = "standalone"
    """The cluster's name; a new tenant must be allowed to use it."""
    _may_archive: ClassVar[bool] = True
    """Whether its process loads all classes that other servers need."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        admin_port: int | None = None,
        settings: Mapping[str, str] | None = None,
        quick_start: bool = False,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.settings = dict(settings or {})
        self.quick_start = quick_start
        self._wanted = {"broker": port, "admin": admin_port}
        self._ports: dict[str, int] = {}
        self._group: _Group | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._java: list[str] = []
        self._programs = Path()
        self._archive = Path()

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"pulsar://{HOST}:{self._port('broker')}"

    @property
    def admin_url(self) -> str:
        """The address of the admin REST API."""
        return f"http://{HOST}:{self._port('admin')}"

    @property
    def pids(self) -> dict[str, int]:
        """The running processes by name; clients connect to ``broker``."""
        return {name: process.pid for name, process in self._processes.items() if process.poll() is None}

    def start(self) -> None:
        """Start the server, and wait until topics can be used."""
        if self._group is not None:
            return
        if sys.platform == "win32":
            raise EmbeddedServerError("the local Pulsar needs POSIX processes: use it on Linux, macOS or WSL")
        if odd := re.search(r"[^\w./+~@=-]", str(self.folder)):
            raise EmbeddedServerError(
                f"Pulsar cannot keep its data in {self.folder}, because of the {odd[0]!r} in its name: "
                f"choose another folder, or set PILLARBOX_HOME"
            )
        program, self._programs = java(), install()
        quick = _QUICK if self.quick_start else ()
        self._archive = _class_archive(program, self._programs)
        self._java = [program, *quick, *_java_options(self._programs), *self._sharing()]
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self._lock()
            try:
                self._choose_ports()
                self._group = _Group(lock)
            finally:
                lock.close()  # from here on, the group holds it
            atexit.register(self.kill)
            try:
                self._start_below_broker()
                self.start_broker()
            except BaseException:
                self.kill()
                raise
        except OSError as error:
            raise EmbeddedServerError(f"cannot run a Pulsar in {self.folder}: {error}") from error

    def stop(self) -> None:
        """Stop the server gracefully, which takes some seconds."""
        in_peace = bool(self._processes)
        for name in reversed(self._processes):
            process = self._processes[name]
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                in_peace = False
        if in_peace and self._new_archive.exists():
            self._new_archive.rename(self._archive)
        self.kill()

    def kill(self) -> None:
        """End all processes at once, like a power cut. Acknowledged messages are in the folder."""
        if self._group is None:
            return
        atexit.unregister(self.kill)
        self._group.end()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        self._group = None
        self._new_archive.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def kill_broker(self) -> None:
        """SIGKILL the broker; of `LocalPulsar`, that is the only process."""
        self._kill("broker")

    def start_broker(self) -> None:
        """Start a broker that was killed, and wait until topics can be used.

        Two flaws of Pulsar sometimes make a start after a kill fail, and the next one succeed, so this retries.
        """
        for attempt in range(_ATTEMPTS):
            self._spawn("broker", self._broker_command())
            try:
                self._wait("broker", self._is_ready)
            except _FlawedStartError:
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                break

    def restart_broker(self) -> None:
        """Kill the broker, and start it again."""
        self.kill_broker()
        self.start_broker()

    def freeze_broker(self) -> None:
        """SIGSTOP the broker: connections stay open, without answers."""
        self._signal("broker", signal.SIGSTOP)

    def thaw_broker(self) -> None:
        """Let a frozen broker go on."""
        self._signal("broker", signal.SIGCONT)

    def is_whole(self) -> bool:
        """Whether all processes run, and a message can be stored. Frozen processes are thawed."""
        if self._group is None or set(self.pids) != set(self._members()):
            return False
        for name in self.pids:
            self._signal(name, signal.SIGCONT)
        return _holds(self._is_ready)

    def check(self) -> None:
        """Raise an error, with the end of its log, if a process has ended by itself."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise self._failure(name, f"ended with {process.returncode}")

    def admin(self, method: str, path: str, body: object = None, *, seconds: float = 30) -> Any:
        """Send a request to the admin REST API: ``admin("PUT", "/persistent/public/default/orders/partitions", 4)``.

        Returns JSON or text, or None for an empty answer. A refusal is a ``urllib.error.HTTPError``.
        """
        request = urllib.request.Request(  # noqa: S310  a local server
            f"{self.admin_url}/admin/v2{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        # No proxy: one in the environment is not meant for this machine.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=seconds) as answer:
            content = answer.read().decode()
        try:
            return json.loads(content) if content else None
        except ValueError:
            return content  # plain text, whatever its type says

    @property
    def _new_archive(self) -> Path:
        return self._archive.with_suffix(f".{os.getpid()}")

    def _sharing(self) -> list[str]:
        """Java options for an archive of classes. Without one, Java reads and checks 15,000 classes at each start; with
        one, a start takes a third of the time. The first server that stops gracefully writes it.
        """
        if self._archive.exists():
            return [f"-XX:SharedArchiveFile={self._archive}"]
        if self._may_archive and os.access(self._archive.parent, os.W_OK):
            return [f"-XX:ArchiveClassesAtExit={self._new_archive}"]
        return []

    def _start_below_broker(self) -> None:
        """Start what the broker needs; in standalone mode, nothing."""

    def _members(self) -> tuple[str, ...]:
        """The processes of a working server."""
        return ("broker",)

    def _own_ports(self) -> tuple[str, ...]:
        return ("broker", "admin", "bookie")

    def _broker_command(self) -> list[str]:
        conf = self._configure(
            "standalone",
            self._broker_settings()
            | {
                "allowEphemeralPorts": "true",  # without it, --bookkeeper-port is ignored
                "listeningInterface": _loopback_interface(),  # of the bookie, which accepts no address
            },
        )
        return [
            *("-Xms256m", "-Xmx1g", "-XX:MaxDirectMemorySize=1g", "-Dlog4j.shutdownHookEnabled=false"),
            *(f"-Dpulsar.config.file={conf}", "org.apache.pulsar.PulsarStandaloneStarter"),
            *("--no-functions-worker", "-nss", "-a", HOST, "--bookkeeper-port", str(self._port("bookie"))),
            *("--metadata-dir", str(self._data("metadata")), "--bookkeeper-dir", str(self._data("bookie"))),
        ]

    def _broker_settings(self) -> dict[str, str]:
        ports = {"brokerServicePort": str(self._port("broker")), "webServicePort": str(self._port("admin"))}
        return _SETTINGS | ports | self.settings

    def _is_ready(self) -> bool:
        """The namespace appears after the port is open, and before messages can be stored; `health` stores one."""
        return "public/default" in self.admin("GET", "/namespaces/public", seconds=5) and bool(
            self.admin("GET", "/brokers/health", seconds=10)
        )

    def _configure(self, name: str, settings: Mapping[str, str]) -> Path:
        """Write a configuration: the shipped one, with these settings instead of its own."""
        shipped = (self._programs / "conf" / f"{name}.conf").read_text("utf-8").splitlines()
        # Drop their own lines: of two lines for a setting, the broker uses the last, and the bookie the first.
        others = [line for line in shipped if line.partition("=")[0].strip() not in settings]
        path = self.folder / f"{name}.conf"
        path.write_text("\n".join([*others, *(f"{key}={value}" for key, value in settings.items()), ""]), "utf-8")
        return path

    def _data(self, name: str) -> Path:
        path = self.folder / "data" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _port(self, name: str) -> int:
        if not self._ports:
            raise EmbeddedServerError(f"the local Pulsar in {self.folder} is not started: call start() first")
        return self._ports[name]

    def _choose_ports(self) -> None:
        file = self.folder / "ports.json"
        kept: dict[str, int] = json.loads(file.read_text("utf-8")) if file.exists() else {}
        kept |= {name: port for name, port in self._wanted.items() if port is not None}
        for name in self._own_ports():
            while name not in kept:
                port = random.choice(_PORTS)  # noqa: S311  not a secret
                if port not in kept.values() and _is_free(port):
                    kept[name] = port
        if len(set(kept.values())) < len(kept):
            raise EmbeddedServerError(f"the local Pulsar needs a port for each of these, no two the same: {kept}")
        for name, port in kept.items():
            if not _is_free(port):
                raise EmbeddedServerError(
                    f"port {port} on {HOST}, for the local Pulsar's {name}, is taken: stop who uses it, or choose "
                    f"another {'port' if name in self._wanted else 'folder'}"
                )
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(kept), "utf-8")
        fresh.replace(file)
        self._ports = kept

    def _lock(self) -> IO[bytes]:
        file = (self.folder / "lock").open("wb")
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.close()
                    raise EmbeddedServerError(f"another process runs a Pulsar in {self.folder}") from None
                time.sleep(_PAUSE_SECONDS)

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        if self._group is None:
            raise EmbeddedServerError(f"the local Pulsar in {self.folder} is not started: call start() first")
        if name in self.pids:
            raise EmbeddedServerError(f"the {name} of the local Pulsar in {self.folder} runs already")
        scratch = self.folder / "tmp" / name
        shutil.rmtree(scratch, ignore_errors=True)  # a killed Java leaves its unpacked libraries behind
        scratch.mkdir(parents=True)
        log = self._log(name)
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
        self._processes[name] = self._group.spawn([*self._java, f"-Djava.io.tmpdir={scratch}", *command], log)

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        """Wait until a process is ready. One that does not become ready is killed, and the error has its log."""
        process, deadline = self._processes[name], time.monotonic() + _START_SECONDS
        while True:
            is_ready = _holds(ready)
            said = self._end_of_log(name)
            if process.poll() is not None:
                flawed, problem = _SESSION_LEFT in said, f"ended with {process.returncode}"
            elif max(map(said.count, _QUARRELS)) > _QUARREL_LINES:
                flawed, problem = True, "quarrels with itself"
            elif is_ready:
                return
            elif time.monotonic() > deadline:
                flawed, problem = False, f"was not ready after {_START_SECONDS} s"
            else:
                time.sleep(_PAUSE_SECONDS)
                continue
            self._kill(name)
            raise self._failure(name, problem, _FlawedStartError if flawed else EmbeddedServerError)

    def _failure(
        self, name: str, problem: str, kind: type[EmbeddedServerError] = EmbeddedServerError
    ) -> EmbeddedServerError:
        said = [line for line in self._end_of_log(name).splitlines() if not line.startswith("\t")]  # no stack frames
        tail = said[-_LOG_LINES:]
        what = f"the {name} of the local Pulsar in {self.folder} {problem}; its log ends with:"
        return kind("\n    ".join([what, *tail]))

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _end_of_log(self, name: str) -> str:
        with self._log(name).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
            return log.read().decode("utf-8", "replace")

    def _kill(self, name: str) -> None:
        self._signal(name, signal.SIGKILL)
        self._processes.pop(name).wait()

    def _signal(self, name: str, number: signal.Signals) -> None:
        if name not in self._processes:
            raise EmbeddedServerError(f"the {name} of the local Pulsar in {self.folder} does not run")
        self._processes[name].send_signal(number)


class PulsarCluster(LocalPulsar):
    """Pulsar as in production, with one process of each kind: ZooKeeper, a bookie, a broker. Made for faults."""

    cluster_name = "local"
    _may_archive = False

    def kill_bookie(self) -> None:
        """SIGKILL the bookie: no message can be stored until it is back."""
        self._kill("bookie")

    def start_bookie(self) -> None:
        """Start a bookie that was killed, and wait until brokers can find it.

        A bookie that finds its old registration keeps it, and disappears when the old session expires: so this waits
        first.
        """
        registration = f"/ledgers/available/{HOST}:{self._port('bookie')}".encode()
        self._wait("zookeeper", lambda: registration not in self._asked_zookeeper(b"dump"))
        settings = {
            "bookiePort": str(self._port("bookie")),
            "advertisedAddress": HOST,
            "allowLoopback": "true",
            "listeningInterface": _loopback_interface(),
            "journalDirectory": str(self._data("journal")),
            "journalDirectories": str(self._data("journal")),
            "ledgerDirectories": str(self._data("ledgers")),
            "metadataServiceUri": f"metadata-store:{self._zookeeper}",
            "zkTimeout": "6000",
            "httpServerEnabled": "false",
            "autoRecoveryDaemonEnabled": "false",
            "statsProviderClass": "org.apache.bookkeeper.stats.NullStatsProvider",
            "dbStorage_writeCacheMaxSizeMb": "64",
            "dbStorage_readAheadCacheMaxSizeMb": "64",
            "diskUsageThreshold": "0.99",
            "diskUsageWarnThreshold": "0.98",
        }
        conf = self._configure("bookkeeper", settings)
        self._spawn("bookie", [*_SMALL, "org.apache.bookkeeper.server.Main", "--conf", str(conf)])
        self._wait("bookie", lambda: registration in self._asked_zookeeper(b"dump"))

    def freeze_bookie(self) -> None:
        """SIGSTOP the bookie: the broker accepts messages, and does not answer."""
        self._signal("bookie", signal.SIGSTOP)

    @property
    def _zookeeper(self) -> str:
        return f"zk:{HOST}:{self._port('zookeeper')}"

    def _members(self) -> tuple[str, ...]:
        return ("zookeeper", "bookie", "broker")

    def _own_ports(self) -> tuple[str, ...]:
        return (*super()._own_ports(), "zookeeper")

    def _start_below_broker(self) -> None:
        self._start_zookeeper()
        if not (self.folder / "initialized").exists():
            self._initialize()
            (self.folder / "initialized").touch()
        self.start_bookie()

    def _start_zookeeper(self) -> None:
        settings = {
            "dataDir": str(self._data("zookeeper")),
            "clientPort": str(self._port("zookeeper")),
            "4lw.commands.whitelist": "srvr, dump",
            "clientPortAddress": HOST,
            "admin.enableServer": "false",
            "metricsProvider.className": "org.apache.zookeeper.metrics.impl.NullMetricsProvider",
        }
        conf = self._configure("zookeeper", settings)
        main = ("-Dzookeeper.snapshot.trust.empty=true", "org.apache.zookeeper.server.quorum.QuorumPeerMain")
        self._spawn("zookeeper", [*_SMALL, *main, str(conf)])
        self._wait("zookeeper", lambda: b"Mode: standalone" in self._asked_zookeeper(b"srvr"))

    def _asked_zookeeper(self, question: bytes) -> bytes:
        with socket.create_connection((HOST, self._port("zookeeper")), timeout=5) as connection:
            connection.sendall(question)
            return b"".join(iter(lambda: connection.recv(4096), b""))

    def _initialize(self) -> None:
        options = {"-c": self.cluster_name, "-md": self._zookeeper, "-cms": self._zookeeper}
        addresses = {"-uw": self.admin_url, "-ub": self.url}
        main = ["org.apache.pulsar.PulsarClusterMetadataSetup"]
        main += [word for option in (options | addresses).items() for word in option]
        self._spawn("initialize", [*_SMALL, *main])
        process = self._processes.pop("initialize")
        process.wait(_START_SECONDS)
        if process.returncode != 0:
            raise self._failure("initialize", f"ended with {process.returncode}")

    def _broker_command(self) -> list[str]:
        settings = {
            "clusterName": self.cluster_name,
            "metadataStoreUrl": self._zookeeper,
            "configurationMetadataStoreUrl": self._zookeeper,
            "metadataStoreSessionTimeoutMillis": "4000",
            "managedLedgerDefaultEnsembleSize": "1",
            "managedLedgerDefaultWriteQuorum": "1",
            "managedLedgerDefaultAckQuorum": "1",
            "loadManagerClassName": "org.apache.pulsar.broker.loadbalance.NoopLoadManager",
            "loadBalancerEnabled": "false",
            "functionsWorkerEnabled": "false",
        }
        conf = self._configure("broker", settings | self._broker_settings())
        main = ("-Dlog4j.shutdownHookEnabled=false", "org.apache.pulsar.PulsarBrokerStarter")
        return [*_SMALL, *main, "--broker-conf", str(conf)]


_SMALL = ("-Xms128m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m")


class _FlawedStartError(EmbeddedServerError):
    """The start failed by a flaw of Pulsar; another start may succeed."""


class _Group:
    """A process group that ends with this process, however that ends: its leader kills it when this end of a pipe
    closes.

    (A parent-death signal would be sent at the death of the *thread* that started the process, such as one of
    ``asyncio.to_thread``.) Every member holds the lock, so it is free when all of them are gone.
    """

    def __init__(self, lock: IO[bytes]) -> None:
        self._lock = os.dup(lock.fileno())
        self._leader = subprocess.Popen(
            ["/bin/sh", "-c", "read line; kill -KILL 0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # its own, so that Ctrl-C reaches only this process
            pass_fds=[self._lock],
        )

    def spawn(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(  # noqa: S603  Java, with constant options
                command,
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=self._leader.pid,
                pass_fds=[self._lock],
            )

    def end(self) -> None:
        if self._leader.stdin is not None:
            self._leader.stdin.close()
        self._leader.wait()
        os.close(self._lock)


def _java_options(programs: Path) -> list[str]:
    """The options of ``bin/pulsar``, which itself starts two more Javas and reads ``PULSAR_`` variables."""
    opened = ("io", "util.zip", "nio")
    drivers = {"bookie.drivers": "PulsarMetadataBookieDriver", "client.drivers": "PulsarMetadataClientDriver"}
    return [
        *("-cp", f"{programs / 'lib'}/*"),  # without folders, which an archive of classes does not allow
        *("-XX:+UseG1GC", "-XX:+PerfDisableSharedMem", "-Djava.net.preferIPv4Stack=true"),
        *("-Djute.maxbuffer=10485760", "-Dio.netty.tryReflectionSetAccessible=true"),
        *(f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in opened),
        *(f"--add-opens=java.base/jdk.internal.{package}=ALL-UNNAMED" for package in ("misc", "platform")),
        "--enable-native-access=ALL-UNNAMED",
        "--add-opens=java.management/sun.management=ALL-UNNAMED",
        "--add-opens=jdk.management/com.sun.management.internal=ALL-UNNAMED",
        *(f"-Dbookkeeper.metadata.{key}=org.apache.pulsar.metadata.bookkeeper.{it}" for key, it in drivers.items()),
        *(f"-Dlog4j.configurationFile={programs / 'conf' / 'log4j2.yaml'}", "-Dlog4j2.is.webapp=false"),
        *("-Dpulsar.log.appender=Console", "-Dpulsar.log.root.level=warn"),
    ]


def _class_archive(java: str, programs: Path) -> Path:
    """Path of the archive of classes for this exact Java."""
    program = Path(java).resolve()
    made_by = hashlib.sha256(f"{program} {program.stat().st_mtime_ns}".encode()).hexdigest()
    return programs / f"classes-{made_by[:12]}.jsa"


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="tar")


def _is_free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True


def _holds(ready: Callable[[], bool]) -> bool:
    try:
        return ready()
    except (OSError, http.client.HTTPException):  # also raised by urllib for a refusal, and without an answer in time
        return False


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def main() -> int:
    """Download and prepare Pulsar in advance: ``python -m pillarbox.testing.pulsar``."""
    try:
        programs = install()
        if not _class_archive(java(), programs).exists():
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, LocalPulsar(Path(folder)):
                pass  # its end writes the archive of classes
        sys.stdout.write(f"{programs}\n")
    except PillarboxError as error:
        sys.stderr.write(f"{_NAME}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
