"""The official client: imported on demand, and configured by Pillarbox's settings."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from typing import Any

from ...errors import MissingExtraError
from .credentials import TIMEOUT, Credentials, Tls, said

PATIENCE = 10
"""Seconds that the broker may take to connect, or to store a message."""

_log = logging.getLogger(__name__)


def load() -> Any:
    """The module ``pulsar``."""
    try:
        import pulsar  # noqa: PLC0415  an extra, and a heavy one
    except ImportError:
        raise MissingExtraError("receiving from Pulsar", extra="pulsar") from None
    return pulsar


def new_client(url: str, credentials: Credentials, tls: Tls) -> Any:
    """Create a client. Opens nothing yet. It belongs to the running loop, on which its threads ask for tokens: so never
    block the loop to wait for the client.
    """
    pulsar = load()
    files = {"tls_certificate_file_path": tls.cert_file, "tls_private_key_file_path": tls.key_file or tls.cert_file}
    authentication = None
    if credentials.method == "tls":
        authentication = pulsar.AuthenticationTLS(*map(str, files.values()))
    elif credentials.method != "none":
        authentication = pulsar.AuthenticationToken(_token_source(credentials, asyncio.get_running_loop()))
    return pulsar.Client(
        url,
        authentication,
        operation_timeout_seconds=PATIENCE,
        connection_timeout_ms=PATIENCE * 1_000,
        tls_trust_certs_file_path=str(tls.ca_file or ssl.get_default_verify_paths().cafile or "") or None,
        tls_allow_insecure_connection=not tls.verify,
        tls_validate_hostname=tls.verify and tls.check_hostname,
        # Its default log goes to standard output, and a Python logger would be called from its threads, even at exit.
        logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),
        **{name: str(file) for name, file in files.items() if file is not None},
    )


def _token_source(credentials: Credentials, loop: asyncio.AbstractEventLoop) -> Callable[[], str]:
    last = ""

    def token() -> str:
        """Called on the client's threads, where an error would be lost: the broker gets the last token and decides."""
        nonlocal last
        try:
            last = asyncio.run_coroutine_threadsafe(credentials.secret(), loop).result(TIMEOUT).decode()
        except Exception as error:
            _log.warning("no new token for Pulsar: %s", said(error))
        return last

    return token
