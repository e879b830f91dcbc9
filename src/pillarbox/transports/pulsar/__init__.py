"""Apache Pulsar: `PulsarTransport` publishes, exactly once where the broker can; `PulsarSubscriber` receives."""

from __future__ import annotations

from ...errors import MissingExtraError

try:
    import google.protobuf  # noqa: F401
    import google_crc32c  # noqa: F401
    import httpx  # noqa: F401
    import lz4.block  # noqa: F401
    import zstandard  # noqa: F401
except ImportError as error:
    raise MissingExtraError(f"Pulsar ({error.name})", extra="pulsar") from None

from .credentials import Anonymous, Certificate, Credentials, OAuth2, Tls, Token
from .subscriber import PulsarSubscriber
from .transport import PulsarTransport

__all__ = ["Anonymous", "Certificate", "Credentials", "OAuth2", "PulsarSubscriber", "PulsarTransport", "Tls", "Token"]
