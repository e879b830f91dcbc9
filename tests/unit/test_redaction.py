"""What is kept of other people's error texts."""

from __future__ import annotations

import pytest

from pillarbox.redaction import MAX_CHARACTERS, described, redacted

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dBjftJeZ4CVPmB92K27uhbUJU1p1r"
PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQ\n-----END PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (
            "cannot connect to amqp://user:swordfish@host:5672/vhost",
            "cannot connect to amqp://user:***@host:5672/vhost",
        ),
        ("postgresql://:sword:fish@host/db", "postgresql://:***@host/db"),
        (f"401 for token {JWT}", "401 for token ***"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer ***"),
        ("authorization: basic dXNlcjpzd29yZGZpc2g=", "authorization: basic ***"),
        (f"bad key {PEM} given", "bad key *** given"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE and it ends here", "***"),
        ("denied for AKIAIOSFODNN7EXAMPLE", "denied for ***"),
        ("password=swordfish, user=joe", "password=***, user=joe"),
        ('{"api_key": "sword fish", "user": "joe"}', '{"api_key": ***, "user": "joe"}'),
        ("PASSWD : swordfish", "PASSWD : ***"),
        ("access-key=sword;region=eu", "access-key=***;region=eu"),
        ("token=abc&user=joe", "token=***&user=joe"),
        ("{'password': 'sword fish', 'user': 'joe'}", "{'password': ***, 'user': 'joe'}"),
        ("DB_PASSWORD=swordfish", "DB_PASSWORD=***"),
        ("client_secret=abc access_token=def", "client_secret=*** access_token=***"),
        ('{"accessToken":"abc","user":"joe"}', '{"accessToken":***,"user":"joe"}'),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtn/K7MDENG", "AWS_SECRET_ACCESS_KEY=***"),
        ("amqp://user:sword@fish@host", "amqp://user:***@host"),
        ("nothing to hide: topic 'orders' does not exist", "nothing to hide: topic 'orders' does not exist"),
    ],
)
def test_s40_secrets_are_taken_out(text: str, kept: str) -> None:
    assert redacted(text) == kept


@pytest.mark.parametrize(
    "text",
    [
        "(1045, \"Access denied for user 'joe'@'localhost'\")",
        "passport: 12, tokenizer: fast, secretary: joe, key: order-1",
        "https://host/path?x=1 and mail to joe@example.com",
    ],
)
def test_what_is_no_secret_stays_readable(text: str) -> None:
    assert redacted(text) == text


def test_s12_it_is_one_line_that_steers_no_terminal() -> None:
    said = redacted("first\r\nerror: faked \x1b]0;owned\x07 \u202e\x00 end")
    assert said.isprintable()
    assert said.startswith("first error: faked ")


def test_nobody_reads_a_megabyte() -> None:
    assert len(redacted("x" * 1_000_000)) == MAX_CHARACTERS
    assert redacted("x" * 600).endswith("x…")
    assert redacted("x" * MAX_CHARACTERS) == "x" * MAX_CHARACTERS


def test_a_secret_that_is_cut_off_is_no_secret_less() -> None:
    said = redacted("y" * (MAX_CHARACTERS - 20) + " password=" + "swordfish" * 1000)
    assert "fish" not in said


def test_redacting_twice_changes_nothing() -> None:
    once = redacted(f"password=swordfish {JWT} amqp://a:b@c")
    assert redacted(once) == once


def test_what_an_error_says_may_raise_an_error_or_be_nothing_and_a_group_of_one_says_what_that_one_says() -> None:
    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert described(UnspeakableError()) == "UnspeakableError: its text cannot be read"
    assert described(TimeoutError()) == "TimeoutError"
    assert described(ExceptionGroup("of tasks", [KeyError("a")])) == "KeyError: 'a'"
    assert described(ExceptionGroup("of tasks", [KeyError("a"), KeyError("b")])).startswith("ExceptionGroup: of tasks")
