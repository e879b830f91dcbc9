"""Adapters to brokers, one file each. `connect` makes one from an address in the settings."""

from __future__ import annotations

from ..errors import ConfigurationError
from ..transport import Publisher


def connect(name: str, address: str) -> Publisher:
    """The transport for an address, like ``logging:``. Opens nothing yet."""
    scheme, colon, _ = address.partition(":")
    if colon and scheme == "logging":
        from .logging import LoggingTransport  # noqa: PLC0415  a transport is loaded only where it is used

        return LoggingTransport()
    if scheme in ("pulsar", "pulsar+ssl"):
        from .pulsar import PulsarTransport  # noqa: PLC0415

        return PulsarTransport.from_address(address)
    raise ConfigurationError(
        f"transports: {name} has the address {scheme!r}, which is not known; use logging: or pulsar://host:6650"
    )
