"""The local Pulsar: what survives a kill, and that nothing of it is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pulsar as client
import pytest

from pillarbox.errors import EmbeddedServerError, MissingProgramError
from pillarbox.testing.pulsar import HOST, LocalPulsar, PulsarCluster
from tests.servers import Pulsar, Server, wait_until

_QUIET = client.ConsoleLogger(client.LoggerLevel.Error)


@contextmanager
def connected(url: str) -> Iterator[client.Client]:
    connection = client.Client(url, logger=_QUIET)
    try:
        yield connection
    finally:
        connection.close()


def send(url: str, topic: str, *bodies: bytes) -> None:
    with connected(url) as connection:
        producer = connection.create_producer(topic)
        for body in bodies:
            producer.send(body)


def stored(url: str, topic: str) -> list[bytes]:
    with connected(url) as connection:
        reader = connection.create_reader(topic, client.MessageId.earliest)
        found = []
        while reader.has_message_available():
            found.append(reader.read_next(10_000).data())
        return found


@pytest.mark.parametrize("number", [1, 2])  # two tests, so that two workers may meet
def test_the_server_of_the_run_stores_and_answers(pulsar: Pulsar, number: int) -> None:
    topic = f"kept-{number}-{uuid4().hex}"
    send(pulsar.url, topic, b"one", b"two")
    assert stored(pulsar.url, topic) == [b"one", b"two"]
    with urllib.request.urlopen(f"{pulsar.admin_url}/admin/v2/clusters", timeout=30) as answer:  # noqa: S310  ours
        assert json.load(answer) == [LocalPulsar.cluster_name]


def test_a_cluster_loses_nothing_when_broker_and_bookie_are_killed(pulsar_cluster: PulsarCluster) -> None:
    pulsar_cluster.admin("PUT", "/tenants/shop", {"allowedClusters": [pulsar_cluster.cluster_name], "adminRoles": []})
    send(pulsar_cluster.url, "kept", b"one")
    before = pulsar_cluster.url, pulsar_cluster.admin_url, pulsar_cluster.pids

    pulsar_cluster.freeze_bookie()
    pulsar_cluster.kill_broker()
    pulsar_cluster.kill_bookie()
    assert set(pulsar_cluster.pids) == {"zookeeper"}
    pulsar_cluster.start_bookie()
    pulsar_cluster.start_broker()

    assert (pulsar_cluster.url, pulsar_cluster.admin_url) == before[:2]
    assert pulsar_cluster.pids["zookeeper"] == before[2]["zookeeper"]
    assert "shop" in pulsar_cluster.admin("GET", "/tenants")
    send(pulsar_cluster.url, "kept", b"two")
    assert stored(pulsar_cluster.url, "kept") == [b"one", b"two"]


class Waiting(LocalPulsar):
    """A server whose Java does nothing but wait, and leaves a file if it is told to end."""

    def start(self) -> None:
        super().start()
        wait_until(lambda: "waiting" in self._end_of_log("broker"), "the script to come up")

    def _is_ready(self) -> bool:
        return True


JAVA = """#!/bin/sh
[ "$1" = -version ] && { echo 'openjdk version "17.0.1"' >&2; exit 0; }
for word; do case "$word" in -XX:ArchiveClassesAtExit=*) file="${word#*=}"; esac; done
trap '[ -z "$file" ] || echo classes > "$file"; exit 143' TERM
echo waiting
while :; do sleep 0.05; done
"""


def test_the_first_server_that_stops_in_peace_leaves_its_classes_to_the_others(
    use_server: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_server("pulsar-cluster")
    archive = tmp_path / "classes.jsa"
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(JAVA)
    java.chmod(0o700)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr("pillarbox.testing.pulsar._class_archive", lambda _java, _programs: archive)
    server = Waiting(tmp_path / "server")

    server.start()
    server.kill()
    assert not archive.exists()
    server.start()
    server.stop()
    assert archive.read_text() == "classes\n"
    server.start()
    sharing = Path(f"/proc/{server.pids['broker']}/cmdline").read_bytes()
    server.stop()
    assert f"-XX:SharedArchiveFile={archive}".encode() in sharing
    assert list(tmp_path.glob("classes*")) == [archive]


def test_a_command_runs_it_until_told_and_keeps_the_data(use_server: Callable[[str], Server], tmp_path: Path) -> None:
    use_server("pulsar-cluster")
    with socket.create_server((HOST, 0)) as one, socket.create_server((HOST, 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
    with command(tmp_path, *ports) as (first, url):
        send(url, "kept", b"one")
        pids = children(first)
        first.kill()  # nobody is left to stop the servers
    wait_until(lambda: not any(map(alive, pids)), "the servers to follow their owner")

    with command(tmp_path, *ports) as (second, url):
        assert stored(url, "kept") == [b"one"]
        pids = children(second)
        second.send_signal(signal.SIGTERM)
        assert second.communicate(timeout=60) == ("", "")
        assert second.returncode == 0
    assert not any(map(alive, pids))


@contextmanager
def command(home: Path, port: int, admin_port: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``pillarbox dev pulsar``, and the address that it prints."""
    program = Path(sys.executable).with_name("pillarbox")
    process = subprocess.Popen(
        [program, "dev", "pulsar", "--json", "--port", str(port), "--admin-port", str(admin_port)],
        env=os.environ | {"PILLARBOX_HOME": str(home)},
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            printed = json.loads("".join(process.stdout.readline() for _ in range(4)))
            assert printed == {"url": f"pulsar://{HOST}:{port}", "admin_url": f"http://{HOST}:{admin_port}"}
            yield process, printed["url"]
        finally:
            process.kill()


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").exists()  # a zombie, which init may be slow to bury, has none


def test_a_taken_port_is_named(use_server: Callable[[str], Server], tmp_path: Path) -> None:
    use_server("pulsar-cluster")
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EmbeddedServerError, match=f"port {port} .* is taken"):
            LocalPulsar(tmp_path, admin_port=port).start()


def test_one_that_quarrels_with_itself_is_started_again(
    use_server: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed standalone does now and then, here at every start: its bookie comes and goes, for ever."""
    use_server("pulsar-cluster")
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(
        """#!/bin/sh
        [ "$1" = -version ] && exec echo 'openjdk version "17.0.1"' >&2
        echo started >> starts
        yes 'Failed to resolve network location for 127.0.0.1' | head -30
        exec sleep 600
        """
    )
    java.chmod(0o700)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(EmbeddedServerError, match="quarrels with itself; its log ends with"):
        LocalPulsar(tmp_path / "data").start()
    assert (tmp_path / "data" / "starts").read_text().split() == ["started"] * 5


def test_a_start_that_fails_shows_the_log(use_server: Callable[[str], Server], tmp_path: Path) -> None:
    use_server("pulsar-cluster")
    server = LocalPulsar(tmp_path, settings={"maxMessageSize": "many"}, quick_start=True)
    with pytest.raises(EmbeddedServerError, match=r'(?s)ended with 1; its log ends with:.*"many"'):
        server.start()
    assert server.pids == {}


def test_without_java_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(MissingProgramError, match="install Java 17 or newer"):
        LocalPulsar(tmp_path).start()
