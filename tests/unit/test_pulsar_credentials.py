"""How we prove who we are: tokens, OAuth2 against a real HTTP server on loopback, certificates."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pillarbox import clock
from pillarbox.errors import ConfigurationError
from pillarbox.transports.pulsar.admin import PulsarAdmin
from pillarbox.transports.pulsar.credentials import Anonymous, Certificate, Credentials, OAuth2, Tls, Token
from tests.web import free_port

SECRET = "hunter2-hunter2"  # noqa: S105  what must never be shown


class Issuer:
    """Gives tokens, as OAuth2 servers do, or answers as it is told."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, str]] = []
        self.lifetime: Any = 3600
        self.answer: tuple[int, object] | None = None
        self.endpoint = "/token"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-len")), 0)
        form = {name: value[0] for name, value in parse_qs((await reader.readexactly(int(length))).decode()).items()}
        status, body = self.reply(head.split(" ")[1], form)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode())
        writer.write(content)
        await writer.drain()
        writer.close()

    def reply(self, path: str, form: dict[str, str]) -> tuple[int, object]:
        if path == "/.well-known/openid-configuration":
            at = self.endpoint
            return 200, {"token_endpoint": at if at.startswith("ftp") else f"{self.url}{at}"}
        self.asked.append(form)
        if self.answer is not None:
            return self.answer
        if form.get("client_secret") != SECRET:
            said = f"client secret {form.get('client_secret')} is wrong"
            return 401, {"error": "invalid_client", "error_description": said}
        return 200, {"access_token": f"token-{len(self.asked)}", "expires_in": self.lifetime}


class Shifted(clock.SystemClock):
    """A clock that is put forward."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    issuer = Issuer()
    async with await asyncio.start_server(issuer.serve, "127.0.0.1", 0) as server:
        issuer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield issuer


def client_of(issuer: Issuer, secret: str = SECRET, **options: Any) -> OAuth2:
    return OAuth2(issuer.url, client_id="shop", client_secret=secret, **options)


async def test_those_who_send_nothing() -> None:
    ways: list[tuple[Credentials, str]] = [(Anonymous(), "none"), (Certificate(), "tls")]
    for credentials, method in ways:
        assert (credentials.method, await credentials.secret()) == (method, b"")


class TestToken:
    async def test_from_a_text_a_file_a_function(self, tmp_path: Path) -> None:
        async def later() -> str:
            return "third"

        assert await Token("first\n").secret() == b"first"
        assert await Token(lambda: "second").secret() == b"second"
        assert await Token(later).secret() == b"third"
        file = tmp_path / "token"
        file.write_text("one\n")
        token = Token(file)
        assert await token.secret() == b"one"
        file.write_text("two\n")
        assert await token.secret() == b"two"
        file.unlink()
        with pytest.raises(OSError, match="No such file"):
            await token.secret()

    def test_is_never_shown(self) -> None:
        assert SECRET not in repr(Token(SECRET)) + repr(OAuth2("https://a", client_id="b", client_secret=SECRET))

    @pytest.mark.parametrize("text", ["", " \n", "a b", "a\r\nX-Evil: 1", "tökn"])
    async def test_what_is_none_is_refused(self, text: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="the token holds no token"):
            Token(text)
        (tmp_path / "token").write_text(text, "utf-8")
        with pytest.raises(ConfigurationError, match=r"the file .* holds no token"):
            await Token(tmp_path / "token").secret()

    async def test_a_file_that_is_no_text_and_a_function_that_gives_none_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "token").write_bytes(b"\xff\xfe")
        for source in (tmp_path / "token", lambda: None):
            with pytest.raises(ConfigurationError, match="holds no token"):
                await Token(source).secret()  # type: ignore[arg-type]

    async def test_a_function_that_fails_is_not_to_be_had_at_the_moment(self) -> None:
        def vault() -> str:
            raise RuntimeError(f"sealed, token={SECRET}")

        with pytest.raises(OSError, match="gives the token failed: RuntimeError: sealed") as error:
            await Token(vault).secret()
        assert SECRET not in str(error.value)


class TestOAuth2:
    async def test_a_token_is_kept_until_shortly_before_it_expires(self, issuer: Issuer) -> None:
        credentials = client_of(issuer, audience="urn:pulsar", scope="produce")
        with clock.use(Shifted()) as shifted:
            assert isinstance(shifted, Shifted)
            assert {await credentials.secret() for _ in range(3)} == {b"token-1"}
            shifted.ahead = 3500
            assert await credentials.secret() == b"token-1"
            shifted.ahead = 3545
            assert await asyncio.gather(*(credentials.secret() for _ in range(5))) == [b"token-2"] * 5
        assert credentials.method == "token"
        assert issuer.asked[0] == {
            "grant_type": "client_credentials",
            "client_id": "shop",
            "client_secret": SECRET,
            "audience": "urn:pulsar",
            "scope": "produce",
        }

    async def test_the_key_file_of_pulsar(self, issuer: Issuer, tmp_path: Path) -> None:
        file = tmp_path / "key.json"
        found = {"type": "client_credentials", "client_id": "shop", "client_secret": SECRET, "issuer_url": issuer.url}
        file.write_text(json.dumps(found))
        assert await OAuth2(key_file=file).secret() == b"token-1"
        for content in ("", "[]", '"x"', "{}", json.dumps(found | {"client_id": 7})):
            file.write_text(content)
            with pytest.raises(ConfigurationError, match="is no key file with client_id"):
                await OAuth2(key_file=file).secret()
        file.unlink()
        with pytest.raises(FileNotFoundError):
            await OAuth2(key_file=file).secret()

    async def test_a_wrong_secret(self, issuer: Issuer) -> None:
        with pytest.raises(ConfigurationError, match=r"refuses: 401 invalid_client .*see its URL, client_id") as caught:
            await client_of(issuer, "wr0ng-secret").secret()
        assert "wr0ng" not in str(caught.value)

    async def test_an_issuer_that_is_down(self) -> None:
        credentials = OAuth2(f"http://127.0.0.1:{free_port()}", client_id="a", client_secret=SECRET)
        with pytest.raises(ConnectionError, match="cannot be reached"):
            await credentials.secret()

    @pytest.mark.parametrize(
        ("answer", "kind"),
        [
            ((503, b"<html>"), ConnectionError),
            ((429, {"error": "slow_down"}), ConnectionError),
            ((200, b"no json"), ConfigurationError),
            ((200, []), ConfigurationError),
            ((200, {}), ConfigurationError),
            ((200, {"access_token": 7}), ConfigurationError),
            ((200, {"access_token": "a\nb"}), ConfigurationError),
            ((200, b'{"access_token": "a", "expires_in": NaN}'), ConfigurationError),
            ((200, {"access_token": "a", "expires_in": -1}), ConfigurationError),
            ((302, {}), ConfigurationError),
        ],
    )
    async def test_odd_answers(self, issuer: Issuer, answer: tuple[int, object], kind: type[Exception]) -> None:
        issuer.answer = answer
        with pytest.raises(kind, match=r"(the issuer|the answer of) http://127"):
            await client_of(issuer).secret()

    async def test_a_failure_is_not_kept(self, issuer: Issuer) -> None:
        credentials = client_of(issuer)
        issuer.answer = (500, {})
        with pytest.raises(ConnectionError):
            await credentials.secret()
        issuer.answer = None
        assert await credentials.secret() == b"token-2"

    async def test_an_endpoint_that_is_less_safe(self, issuer: Issuer) -> None:
        issuer.endpoint = "ftp://127.0.0.1/token"
        with pytest.raises(ConfigurationError, match="no token endpoint that is as safe"):
            await client_of(issuer).secret()

    @pytest.mark.parametrize("issuer_url", ["nonsense", "http://", "http://a b", "gopher://x"])
    async def test_what_is_no_issuer(self, issuer_url: str) -> None:
        with pytest.raises((ConfigurationError, ConnectionError)):
            await OAuth2(issuer_url, client_id="a", client_secret=SECRET).secret()

    def test_half_a_client_is_refused(self) -> None:
        for given in ({}, {"client_id": "a"}, {"client_id": "a", "client_secret": "b", "key_file": Path("c")}):
            with pytest.raises(ConfigurationError, match="either client_id and client_secret, or a key_file"):
                OAuth2("https://a", **given)
        with pytest.raises(ConfigurationError, match="the URL of the issuer"):
            OAuth2(client_id="a", client_secret=SECRET)


class Authority:
    """Makes certificates for loopback, signed by itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = self._write("ca", self._key, self._certificate("ca", self._key.public_key(), authority=True))

    def issue(self, name: str, *, password: bytes | None = None) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        cert = self._write(name, key, self._certificate(name, key.public_key()), password)
        return cert, self._folder / f"{name}.key"

    def _certificate(self, name: str, key: ec.EllipticCurvePublicKey, *, authority: bool = False) -> x509.Certificate:
        builder = x509.CertificateBuilder(
            issuer_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ca")]),
            subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
            public_key=key,
            serial_number=x509.random_serial_number(),
            not_valid_before=datetime.now(UTC) - timedelta(hours=1),
            not_valid_after=datetime.now(UTC) + timedelta(hours=1),
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        return builder.add_extension(names, critical=False).sign(self._key, hashes.SHA256())

    def _write(
        self, name: str, key: ec.EllipticCurvePrivateKey, cert: x509.Certificate, password: bytes | None = None
    ) -> Path:
        lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        form = serialization.PrivateFormat.PKCS8
        (self._folder / f"{name}.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, lock))
        file = self._folder / f"{name}.pem"
        file.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        return file


class TestTls:
    @pytest.fixture
    def authority(self, tmp_path: Path) -> Authority:
        return Authority(tmp_path)

    async def test_verified_by_default(self, authority: Authority) -> None:
        cert, key = authority.issue("localhost")
        serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        serving.load_cert_chain(cert, key)

        async def met(tls: Tls, name: str = "localhost") -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls.context(), server_hostname=name)
            except ssl.SSLCertVerificationError:
                return False
            writer.transport.abort()
            return True

        async with await asyncio.start_server(lambda _, it: it.close(), "127.0.0.1", 0, ssl=serving) as server:
            port = server.sockets[0].getsockname()[1]
            assert not await met(Tls())
            assert await met(Tls(ca_file=authority.file))
            assert not await met(Tls(ca_file=authority.file), "elsewhere")
            assert await met(Tls(ca_file=authority.file, check_hostname=False), "elsewhere")
            assert not await met(Tls(check_hostname=False))
            assert await met(Tls(verify=False), "elsewhere")

    def test_files_that_cannot_be_used(self, authority: Authority, tmp_path: Path) -> None:
        cert, key = authority.issue("shop")
        locked, locked_key = authority.issue("locked", password=b"x")
        assert Tls(cert_file=cert, key_file=key).context().check_hostname
        (tmp_path / "empty").write_text("")
        for tls in (
            Tls(ca_file=tmp_path / "absent"),
            Tls(ca_file=tmp_path / "empty"),
            Tls(cert_file=cert),
            Tls(cert_file=cert, key_file=locked_key),
            Tls(cert_file=locked, key_file=locked_key),  # and nobody is asked for a password
        ):
            with pytest.raises(ConfigurationError, match=f"the certificates of {tmp_path}.* cannot be used: "):
                tls.context()
        with pytest.raises(ConfigurationError, match="needs the cert_file"):
            Tls(key_file=key).context()

    async def test_certificates_that_are_replaced_are_read_again_for_the_rest_interface(
        self, authority: Authority, tmp_path: Path
    ) -> None:
        cert, key = authority.issue("localhost")
        serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        serving.load_cert_chain(cert, key)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            writer.close()

        (tmp_path / "another").mkdir()
        believed = tmp_path / "believed.pem"
        believed.write_bytes(Authority(tmp_path / "another").file.read_bytes())
        async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=serving) as server:
            url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
            async with PulsarAdmin(url, tls=Tls(ca_file=believed)) as admin:
                with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                    await admin.runtime()
                believed.write_bytes(authority.file.read_bytes())
                assert await admin.runtime() == {}
