"""A TCP proxy on loopback that can lose the answer to a COMMIT."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Literal, Self
from urllib.parse import urlsplit

Mode = Literal["pass", "lose the answer", "lose the question"]


class Proxy:
    """Stands between a client and a database server. It cuts the connection around the first COMMIT, as it was told."""

    def __init__(self, url: str) -> None:
        self._upstream = urlsplit(url)
        self.mode: Mode = "pass"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        """The server's URL, by way of the proxy."""
        port = self._listener.getsockname()[1]
        return self._upstream._replace(netloc=f"{self._upstream.username}@127.0.0.1:{port}").geturl()

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        _shut(self._listener)
        for connection in self._sockets:
            _shut(connection)
        for thread in self._threads:
            thread.join(10)

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection((self._upstream.hostname or "", self._upstream.port or 0))
            self._sockets += [client, server]
            cut = threading.Event()
            self._start(self._questions, client, server, cut)
            self._start(self._answers, client, server, cut)

    def _questions(self, client: socket.socket, server: socket.socket, cut: threading.Event) -> None:
        while data := _receive(client):
            if b"COMMIT" in data.upper() and self.mode != "pass":
                if self.mode == "lose the question":
                    break
                cut.set()
            with suppress(OSError):  # a server that hangs up is no longer asked
                server.sendall(data)
        _shut(client)
        if not cut.is_set():
            _shut(server)

    def _answers(self, client: socket.socket, server: socket.socket, cut: threading.Event) -> None:
        while data := _receive(server):
            if cut.is_set():
                break
            client.sendall(data)
        _shut(client)
        _shut(server)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65_536)
    except OSError:
        return b""


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
