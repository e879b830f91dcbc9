"""Credentials for the broker's binary port and for its REST interface.

`Credentials.secret` is called for every connection and every challenge, so an expired or replaced secret is never sent.
No repr and no error contains a secret.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ... import clock
from ...errors import ConfigurationError, MissingExtraError
from ...redaction import redacted

TIMEOUT = 10.0
"""Longest wait for a token or another secret, in seconds."""
LIFETIME = 300.0
"""Lifetime of a token in seconds, if its issuer does not state it."""

TokenSource = str | Path | Callable[[], str | Awaitable[str]]


class Credentials(Protocol):
    """A method of authentication."""

    @property
    def method(self) -> str:
        """Pulsar's name of the method: ``none``, ``token`` or ``tls``."""
        ...

    async def secret(self) -> bytes:
        """The current secret. Raises `OSError` if it is unavailable at the moment."""
        ...


class Anonymous:
    """No credentials, for brokers without authentication."""

    method = "none"

    async def secret(self) -> bytes:
        return b""


class Certificate:
    """The identity of the connection's client certificate: see `Tls`."""

    method = "tls"

    async def secret(self) -> bytes:
        return b""


class Token:
    """A token (JWT): its text, a file that is read again each time, or a function that returns it."""

    method = "token"

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        if isinstance(source, str):
            _checked(source)

    def __repr__(self) -> str:
        return f"Token({str(self._source)!r})" if isinstance(self._source, Path) else "Token(***)"

    async def secret(self) -> bytes:
        if isinstance(self._source, str):
            return _checked(self._source)
        if isinstance(self._source, Path):
            text = await asyncio.to_thread(self._source.read_text, "utf-8", "replace")
            return _checked(text, f"the file {self._source}")
        try:
            given = self._source()
            token = await given if inspect.isawaitable(given) else given
        except (OSError, ConfigurationError):
            raise
        except Exception as error:  # the user's function may raise anything
            what = f"{type(error).__name__}: {said(error)}"
            raise ConnectionError(f"the function that gives the token failed: {what}") from None
        return _checked(token, "what the function gave")


class OAuth2:
    """A token from an OAuth2 issuer, by client credentials; cached until shortly before it expires.

    The client is given by ``client_id`` and ``client_secret``, or by the key file of Pulsar's own clients, which is
    read again for each token.
    """

    method = "token"

    def __init__(
        self,
        issuer: str | None = None,
        *,
        client_id: str | None = None,
        client_secret: str | None = None,
        key_file: Path | None = None,
        audience: str | None = None,
        scope: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        if (key_file is None) == (client_id is None or client_secret is None):
            raise ConfigurationError("OAuth2 needs either client_id and client_secret, or a key_file")
        if issuer is None and key_file is None:
            raise ConfigurationError("OAuth2 needs the URL of the issuer, like https://accounts.example.com")
        self._issuer = issuer
        self._client = (client_id, client_secret)
        self._key_file = key_file
        self._more = {name: value for name, value in (("audience", audience), ("scope", scope)) if value}
        self._tls = tls or Tls()
        self._lock = asyncio.Lock()
        self._token = b""
        self._good_until = float("-inf")

    def __repr__(self) -> str:
        return f"OAuth2({self._issuer or str(self._key_file)!r})"

    async def secret(self) -> bytes:
        async with self._lock:
            if clock.current().monotonic() >= self._good_until:
                asked_at = clock.current().monotonic()
                self._token, lifetime = await self._new_token()
                # The broker's clock may differ, and opening a connection takes time.
                self._good_until = asked_at + lifetime - min(60.0, lifetime / 5)
            return self._token

    async def _new_token(self) -> tuple[bytes, float]:
        httpx = load_httpx("OAuth2")
        issuer, client_id, client_secret = await asyncio.to_thread(self._read)
        form = {"grant_type": "client_credentials", "client_id": client_id, "client_secret": client_secret}
        try:
            async with httpx.AsyncClient(verify=self._tls.context(), timeout=TIMEOUT) as client:
                url = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
                endpoint = _answer(issuer, await client.get(url), client_secret).get("token_endpoint")
                if not isinstance(endpoint, str) or not endpoint.startswith(("https://", f"{issuer.split(':')[0]}://")):
                    raise ConfigurationError(f"the issuer {redacted(issuer)} names no token endpoint that is as safe")
                granted = _answer(issuer, await client.post(endpoint, data=form | self._more), client_secret)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol):
            raise ConfigurationError(f"{redacted(issuer)!r} is no URL of an issuer of tokens") from None
        except httpx.TransportError as error:
            raise ConnectionError(f"the issuer {redacted(issuer)} cannot be reached: {said(error)}") from None
        token, lifetime = granted.get("access_token"), granted.get("expires_in", LIFETIME)
        if not isinstance(token, str) or not isinstance(lifetime, int | float) or not 0 <= lifetime < math.inf:
            raise ConfigurationError(f"the issuer {redacted(issuer)} gave no token that can be used")
        return _checked(token, f"the answer of {redacted(issuer)}"), lifetime

    def _read(self) -> tuple[str, str, str]:
        found: Any = dict(zip(("client_id", "client_secret"), self._client, strict=True))
        if self._key_file is not None:
            text = self._key_file.read_text("utf-8")
            try:
                found = json.loads(text)
            except ValueError:
                found = None
        issuer = self._issuer or (found.get("issuer_url") if isinstance(found, dict) else None)
        values = (issuer, *(found.get(each) for each in ("client_id", "client_secret"))) if issuer else ()
        if not values or not all(isinstance(each, str) and each for each in values):
            raise ConfigurationError(f"{self._key_file}: is no key file with client_id, client_secret and issuer_url")
        return values


@dataclass(frozen=True, slots=True)
class Tls:
    """Encryption of connections, and trusted certificates. The peer's certificate is verified by default."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    verify: bool = True
    check_hostname: bool = True

    def context(self) -> ssl.SSLContext:
        """For a new connection: the files are read again, because certificates are replaced."""
        if self.key_file and not self.cert_file:
            raise ConfigurationError(f"key_file {self.key_file} needs the cert_file that belongs to it")
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file:
                # With a password, even an empty one, OpenSSL does not ask for one on the terminal.
                context.load_cert_chain(self.cert_file, self.key_file, password="")
        except OSError as error:  # ssl.SSLError, too
            files = ", ".join(str(each) for each in (self.ca_file, self.cert_file, self.key_file) if each)
            raise ConfigurationError(f"the certificates of {files} cannot be used: {said(error)}") from None
        context.check_hostname = self.check_hostname and self.verify
        if not self.verify:
            context.verify_mode = ssl.CERT_NONE
        return context


def load_httpx(what: str) -> Any:
    """The HTTP client, which is loaded on demand."""
    try:
        import httpx  # noqa: PLC0415  an extra
    except ImportError:
        raise MissingExtraError(what, extra="pulsar") from None
    return httpx


def said(error: BaseException) -> str:
    """Type and text of a foreign error, redacted."""
    return redacted(str(error)) or type(error).__name__


async def secret_of(credentials: Credentials) -> bytes:
    """The current secret, within a time limit."""
    try:
        async with asyncio.timeout(TIMEOUT):
            return await credentials.secret()
    except TimeoutError:
        raise TimeoutError(f"the credentials were unavailable for {TIMEOUT:g} s") from None


def _checked(token: object, where: str = "the token") -> bytes:
    text = token.strip() if isinstance(token, str) else ""
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigurationError(f"{where} holds no token: one line of letters, digits and signs is expected")
    return text.encode()


def _answer(issuer: str, response: Any, secret: str) -> dict[str, Any]:
    """The JSON object of the issuer. Raises an error with its reason if there is none."""
    try:
        found = response.json()
    except ValueError:
        found = None
    if response.status_code == 200 and isinstance(found, dict):
        return found
    reasons = [str(found[each]) for each in ("error", "error_description") if isinstance(found, dict) and each in found]
    what = redacted(" ".join([f"{response.status_code}", *reasons]).replace(secret, "***"))
    if response.status_code >= 500 or response.status_code == 429:
        raise ConnectionError(f"the issuer {redacted(issuer)} is not available: {what}")
    raise ConfigurationError(f"the issuer {redacted(issuer)} refuses: {what}; see its URL, client_id and client_secret")
