"""The witness of a demo on Pulsar: a process that reads the topic by the official client, and writes into the sink's
file what it finds there.

A topic has one order, so one that was killed goes on behind what is in the file.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from ...transports.pulsar import Anonymous, Tls
from ...transports.pulsar.official_client import load, new_client
from .child import Told, live, say
from .sink import Arrival, opened

PATIENCE = 200
"""Milliseconds without a message, after which we look whether to stop."""


async def witness(told: Told) -> None:
    """Follow the topic until SIGTERM, and then to its end."""
    stopped = threading.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    client = new_client(told["url"], Anonymous(), Tls())
    try:
        await asyncio.to_thread(_follow, client, told, stopped)
    finally:
        await asyncio.to_thread(client.close)


def _follow(client: Any, told: Told, stopped: threading.Event) -> None:
    pulsar = load()
    reader = client.create_reader(told["topic"], pulsar.MessageId.earliest)
    with opened(Path(told["file"])) as file:
        known = Path(told["file"]).read_bytes().count(b"\n")
        say("ready")
        while True:
            try:
                message = reader.read_next(timeout_millis=PATIENCE)
            except pulsar.Timeout:
                if stopped.is_set() and not reader.has_message_available():
                    return
                continue
            if known:
                known -= 1
                continue
            file.write(msgspec.json.encode(_arrival(told["topic"], message)) + b"\n")
            file.flush()


def _arrival(topic: str, message: Any) -> Arrival:
    headers = message.properties()
    sender = message.producer_name()
    return Arrival(
        headers["event_id"],
        topic,
        headers.get("tenant_id"),
        message.partition_key(),
        headers.get("version"),
        sender,
        sender,
        time.time(),
    )


if __name__ == "__main__":
    live(witness)
