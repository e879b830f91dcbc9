"""A relay of the chaos: what ``pillarbox relay`` does, on links that are bad, and with a mistake if it is a canary."""

from __future__ import annotations

import logging

from ...app import Pillarbox
from ...transports.pulsar import PulsarTransport
from ..demo.child import Told, live, work_until_told
from .canaries import CANARIES
from .shop import route


async def relay(told: Told) -> None:
    """Run a relay until SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {told['name']} %(levelname)s %(message)s")
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)  # as in the command line
    lease: float = told["lease"]
    options = {name: told[name] for name in ("admin_url", "listener_name")} | {
        "timeout": lease,
        "keep_alive": lease / 2,
    }
    if told["canary"]:
        CANARIES[told["canary"]](options)
    pulsar = PulsarTransport(told["pulsar"], **options)
    async with Pillarbox(told["url"], transports={route.to: pulsar}) as box:
        await work_until_told(box.relay(name=told["name"], lease=lease))
    await pulsar.close()


if __name__ == "__main__":
    live(relay)
