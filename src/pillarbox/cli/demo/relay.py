"""A relay of the demo: what ``pillarbox relay`` does, with the sink, or a Pulsar broker, as its destination.

Whenever it was too slow, it says so in a file: then a message may come twice although nobody did anything to it.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from ...app import Pillarbox
from ...errors import LeaseLostError
from ...transport import Publisher
from .child import Told, live, work_until_told
from .ledger import Fault, Kind
from .transport import SinkTransport


class Stalls(logging.Handler):
    """Writes down when the relay lost a lease, of which its log tells, or an answer."""

    def __init__(self, file: Path, relay: str) -> None:
        super().__init__()
        self._file = file
        self._relay = relay

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and any(isinstance(arg, LeaseLostError) for arg in record.args):
            self.add()

    def add(self) -> None:
        """There is one now."""
        now = time.time()
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(Fault(Kind.STALL, self._relay, now, now)) + b"\n")


async def relay(told: Told) -> None:
    """Run a relay until SIGTERM."""
    logging.basicConfig(level=logging.WARNING)
    name, lease = told["name"], told["lease"]
    stalls = Stalls(Path(told["stalls"]), name)
    logging.getLogger("pillarbox").addHandler(stalls)
    transport = _transport(told, stalls)
    async with Pillarbox(told["url"], transports={told["destination"]: transport}) as box:
        await work_until_told(box.relay(name=name, lease=lease))


def _transport(told: Told, stalls: Stalls) -> Publisher:
    if told["broker"] is not None:
        from ...transports.pulsar import PulsarTransport  # noqa: PLC0415  needs packages that others do not need

        return PulsarTransport(told["broker"]["url"], admin_url=told["broker"]["admin_url"])
    # An answer that has not come well within the lease is not waited for: another relay may own the lane by then.
    return SinkTransport(told["port"], told["name"], timeout=told["lease"] * 0.6, unanswered=stalls.add)


if __name__ == "__main__":
    live(relay)
