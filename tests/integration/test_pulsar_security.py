"""A broker that wants to know who we are: TLS, tokens and client certificates, as it really checks them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import ssl
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pillarbox.errors import ConfigurationError
from pillarbox.testing.conformance.publisher import messages
from pillarbox.testing.pulsar import LocalPulsar
from pillarbox.transport import TopicsRefusedError
from pillarbox.transports.pulsar import Certificate, PulsarSubscriber, PulsarTransport, Tls, Token
from tests.integration.test_pulsar_transport import new_topic
from tests.servers import Server
from tests.web import free_port

SECRET = b"a secret of at least 32 bytes, or so"


def token(role: str, secret: bytes = SECRET) -> str:
    """A JWT, as the broker wants it."""

    def part(content: bytes) -> str:
        return base64.urlsafe_b64encode(content).rstrip(b"=").decode()

    head = f"{part(json.dumps({'alg': 'HS256'}).encode())}.{part(json.dumps({'sub': role}).encode())}"
    return f"{head}.{part(hmac.digest(secret, head.encode(), hashlib.sha256))}"


@dataclass
class Authority:
    """Signs certificates, and keeps them as files."""

    folder: Path

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self.ca_file = self.folder / "ca.pem"
        certificate = self._signed(self._name, self._key.public_key(), x509.BasicConstraints(True, None))
        self.ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._signed(subject, key.public_key(), x509.BasicConstraints(False, None))
        files = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, basic: x509.BasicConstraints
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        authority = self._key.public_key()
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=2))
            .add_extension(basic, critical=True)
            .add_extension(_usage(basic.ca), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority), critical=False)
            .add_extension(here, critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _usage(authority: bool) -> x509.KeyUsage:
    """Python 3.13 insists on it, and on the identifiers of keys."""
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=authority,
        crl_sign=authority,
        decipher_only=False,
        **dict.fromkeys(others, False),
    )


@dataclass
class Guarded:
    """A broker that lets roles in by tokens and certificates. Who says nothing may look, which lets it get ready."""

    broker: LocalPulsar
    authority: Authority
    tls_port: int

    @property
    def url(self) -> str:
        return f"pulsar+ssl://127.0.0.1:{self.tls_port}"

    @property
    def tls(self) -> Tls:
        return Tls(ca_file=self.authority.ca_file)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pillarbox-guarded-") as folder:
        yield Path(folder)


@pytest.fixture
def guarded(use_server: Callable[[str], Server], folder: Path, _started: dict[str, Guarded]) -> Guarded:
    use_server("pulsar-cluster")  # says whether there is a Pulsar to be had
    if "it" not in _started:
        _started["it"] = _start(folder)
    return _started["it"]


@pytest.fixture(scope="module")
def _started() -> Iterator[dict[str, Guarded]]:
    started: dict[str, Guarded] = {}
    yield started
    for each in started.values():
        each.broker.kill()


def _start(folder: Path) -> Guarded:
    authority, port = Authority(folder), free_port()
    certificate, key = authority.issue("broker")
    plugins = "org.apache.pulsar.broker.authentication.AuthenticationProvider"
    broker = LocalPulsar(
        folder / "pulsar",
        quick_start=True,
        settings={
            "brokerServicePortTls": str(port),
            "tlsCertificateFilePath": str(certificate),
            "tlsKeyFilePath": str(key),
            "tlsTrustCertsFilePath": str(authority.ca_file),
            "authenticationEnabled": "true",
            "authenticationProviders": f"{plugins}Token,{plugins}Tls",
            "tokenSecretKey": f"data:;base64,{base64.b64encode(SECRET).decode()}",
            "authorizationEnabled": "true",
            "superUserRoles": "anonymous,orders",
            "anonymousUserRole": "anonymous",
        },
    )
    broker.start()
    return Guarded(broker, authority, port)


async def delivered(transport: PulsarTransport) -> None:
    topic = new_topic()
    try:
        assert await transport.open("lane", [topic]) == {topic: -1}
        assert len((await transport.send("lane", messages(topic, "aab"))).accepted) == 3
    finally:
        await transport.close()


async def test_tls_is_verified_and_a_token_lets_us_in(guarded: Guarded) -> None:
    await delivered(
        PulsarTransport(
            guarded.url, admin_url=guarded.broker.admin_url, tls=guarded.tls, credentials=Token(token("orders"))
        )
    )


async def test_a_client_certificate_lets_us_in(guarded: Guarded) -> None:
    certificate, key = guarded.authority.issue("orders")
    tls = Tls(ca_file=guarded.authority.ca_file, cert_file=certificate, key_file=key)
    transport = PulsarTransport(guarded.url, admin_url=guarded.broker.admin_url, tls=tls, credentials=Certificate())
    await delivered(transport)


async def test_a_broker_with_a_strange_certificate_is_not_believed(guarded: Guarded, tmp_path: Path) -> None:
    stranger = Authority(tmp_path)
    for tls in (Tls(), Tls(ca_file=stranger.ca_file)):
        transport = PulsarTransport(guarded.url, admin_url=guarded.broker.admin_url, tls=tls)
        with pytest.raises(ConnectionError, match="TLS fails: CERTIFICATE_VERIFY_FAILED"):
            await transport.open("lane", [new_topic()])
        await transport.close()


async def test_a_broker_of_another_name_is_not_believed(guarded: Guarded) -> None:
    url = guarded.url.replace("127.0.0.1", "localhost")
    transport = PulsarTransport(url, admin_url=guarded.broker.admin_url, tls=guarded.tls)
    with pytest.raises(ConnectionError, match="TLS fails"):
        await transport.open("lane", [new_topic()])
    await transport.close()


async def test_a_forged_token_is_refused_and_not_shown(guarded: Guarded) -> None:
    forged = token("orders", b"another secret of at least 32 bytes")
    transport = PulsarTransport(
        guarded.url, admin_url=guarded.broker.admin_url, tls=guarded.tls, credentials=Token(forged)
    )
    with pytest.raises((OSError, ConfigurationError)) as refused:
        await transport.open("lane", [new_topic()])
    assert forged not in str(refused.value)
    assert forged not in repr(transport)
    await transport.close()


async def test_a_role_that_may_not_write_is_refused_by_topic(guarded: Guarded) -> None:
    """By its topic, so that others go on. It may not ask the REST interface either, so we do not ask."""
    transport = PulsarTransport(
        guarded.url, tls=guarded.tls, credentials=Token(token("nobody")), guarantee="at_least_once"
    )
    with pytest.raises((TopicsRefusedError, OSError)):
        await transport.open("lane", [new_topic()])
    await transport.close()


async def test_a_role_that_may_consume_finds_the_topics_of_tenants(guarded: Guarded) -> None:
    async with httpx.AsyncClient(base_url=guarded.broker.admin_url, trust_env=False) as client:
        path = "/admin/v2/namespaces/public/default/permissions/reader"
        (await client.post(path, json=["consume"])).raise_for_status()
    template, tls = new_topic() + "-{tenant}", guarded.tls
    reader = PulsarSubscriber(
        guarded.url, tls=tls, credentials=Token(token("reader")), admin_url=guarded.broker.admin_url
    )
    writer = PulsarTransport(
        guarded.url, admin_url=guarded.broker.admin_url, tls=tls, credentials=Token(token("orders"))
    )
    member = await reader.subscribe([template], "billing")
    try:
        await writer.open("lane", [topic := template.format(tenant="acme")])
        await writer.send("lane", messages(topic, "aa"))
        async with asyncio.timeout(30):
            [received, *_] = await member.receive(1)
        assert received.message.topic == topic
        with pytest.raises(ConfigurationError, match=r"answers 40[13]"):  # who may list tenants is a superuser
            await reader.subscribe(["persistent://{tenant}/pay/events"], "billing")
        with pytest.raises(ConnectionError, match="'billing' cannot be joined"):
            await reader.subscribe(["persistent://public/other/{tenant}"], "billing")
    finally:
        await member.close()
        await writer.close()


def test_tls_without_verification_has_to_be_asked_for() -> None:
    assert Tls().context().verify_mode is ssl.CERT_REQUIRED
    assert Tls(verify=False).context().verify_mode is ssl.CERT_NONE
