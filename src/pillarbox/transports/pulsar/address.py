"""The address of a Pulsar cluster in the settings.

``pulsar://host:6650?admin=http://host:8080`` or ``pulsar+ssl://...``. Addresses are shown and logged, so they must not
contain secrets, but the names of files that do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from ...errors import ConfigurationError
from ...redaction import redacted
from .credentials import Anonymous, Certificate, Credentials, OAuth2, Tls, Token

_PORTS = {"pulsar": 6650, "pulsar+ssl": 6651}
_FORM = "write pulsar://host:6650?admin=http://host:8080"
_IN_FILES = {"token": "token_file", "client_secret": "oauth2_key_file", "password": "token_file"}


@dataclass(frozen=True, slots=True)
class Address:
    """The location of a cluster, and the credentials for it."""

    service_url: str
    """Scheme, host and port of the binary protocol; several hosts are separated by commas."""
    admin_url: str | None = None
    credentials: Credentials = field(default_factory=Anonymous)
    tls: Tls = field(default_factory=Tls)
    options: Mapping[str, str] = field(default_factory=dict)
    """Other query parameters. The transport refuses unknown ones."""


def parse_address(address: str) -> Address:
    """Parse an address. Opens nothing, and reads no file."""
    base, _, query = address.partition("?")
    scheme, found, hosts = base.partition("://")
    if not found or scheme not in _PORTS:
        raise _wrong(address, f"is no address of a Pulsar cluster; {_FORM}")
    hosts = hosts.removesuffix("/")
    located = ",".join(_location(address, each, _PORTS[scheme]) for each in hosts.split(","))
    given = parse_qsl(query, keep_blank_values=True)
    options = dict(given)
    if len(options) != len(given):
        raise _wrong(address, "says the same option twice")
    if secret := next((each for each in options if each in _IN_FILES), None):
        raise _wrong(address, f"holds a secret ({secret}); put it into a file, and name that by {_IN_FILES[secret]}=")
    admin = options.pop("admin", None)
    tls = Tls(
        ca_file=_file(options, "ca_file"),
        cert_file=_file(options, "cert_file"),
        key_file=_file(options, "key_file"),
        verify=_flag(address, options, "verify"),
        check_hostname=_flag(address, options, "check_hostname"),
    )
    credentials = _credentials(address, options, tls)
    return Address(
        f"{scheme}://{located}", None if admin is None else check_admin_url(admin), credentials, tls, options
    )


def check_admin_url(url: str) -> str:
    """The address of a REST interface, up to its port."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fine = False
    if not fine or not url.isascii() or not url.isprintable() or any(each in url for each in "@?# "):
        raise ConfigurationError(f"{redacted(url)!r} is no address of Pulsar's REST interface; write http://host:8080")
    return url.rstrip("/")


def _location(address: str, text: str, port: int) -> str:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "", parts.port or port
    except ValueError:
        host = ""
    if not host or "@" in text or not text.isascii() or any(each in text for each in "/#\\ ") or not text.isprintable():
        raise _wrong(address, f"names no host and port; {_FORM}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _credentials(address: str, options: dict[str, str], tls: Tls) -> Credentials:
    token, issuer = options.pop("token_file", None), options.pop("oauth2_issuer", None)
    key_file = options.pop("oauth2_key_file", None)
    audience, scope = options.pop("oauth2_audience", None), options.pop("oauth2_scope", None)
    if token and (issuer or key_file):
        raise _wrong(address, "has a token_file and OAuth2: choose one")
    if token:
        return Token(Path(token))
    if key_file:
        return OAuth2(issuer, key_file=Path(key_file), audience=audience, scope=scope)
    if issuer or audience or scope:
        raise _wrong(address, "says OAuth2 without the client's secret; name its file by oauth2_key_file=")
    return Certificate() if tls.cert_file else Anonymous()


def _file(options: dict[str, str], name: str) -> Path | None:
    value = options.pop(name, None)
    return Path(value) if value else None


def _flag(address: str, options: dict[str, str], name: str) -> bool:
    value = options.pop(name, "true")
    if value not in ("true", "false"):
        raise _wrong(address, f"has {name}={value!r}; write true or false")
    return value == "true"


def _wrong(address: str, what: str) -> ConfigurationError:
    # Without the query, which may contain a secret by mistake.
    return ConfigurationError(f"{redacted(address.partition('?')[0])!r} {what}")
