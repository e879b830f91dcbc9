"""The transport port: what a destination is called, and what it can carry.

A route names a transport; the limits of the transport are checked when a delivery is written, so that no message is
ever found to be too large by the relay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Message:
    """A delivery on its way: final bytes, and everything that a broker is told about them."""

    topic: str
    key: str
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport promises and what it can carry."""

    max_body_bytes: int = 1_048_576
    """The largest body that it accepts."""

    max_header_bytes: int = 65_536
    """The most that all headers together, names and values, may take."""


class Transport(Protocol):
    """A destination. Routes refer to it by the name under which it is given to the box."""

    @property
    def capabilities(self) -> Capabilities:
        """Fixed for the life of the transport; known without a connection."""
        ...
