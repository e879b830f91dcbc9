"""Names of topics, addresses, and the partition of a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from pillarbox.errors import ConfigurationError
from pillarbox.transports.pulsar.address import parse_address
from pillarbox.transports.pulsar.credentials import Anonymous, Certificate, OAuth2, Tls, Token
from pillarbox.transports.pulsar.names import TopicName, murmur3_32, partition_of, spellings


class TestTopicName:
    @pytest.mark.parametrize(
        ("text", "whole"),
        [
            ("persistent://acme/orders/events", "persistent://acme/orders/events"),
            ("acme/orders/events", "persistent://acme/orders/events"),
            ("events", "persistent://public/default/events"),
            ("a-b=c:d.e_F/n/t..x", "persistent://a-b=c:d.e_F/n/t..x"),
            ("orders-partition-x", "persistent://public/default/orders-partition-x"),
        ],
    )
    def test_is_completed(self, text: str, whole: str) -> None:
        name = TopicName.parse(text)
        assert str(name) == whole
        assert TopicName.parse(whole) == name

    @pytest.mark.parametrize(
        ("text", "same"),
        [
            ("events", ["persistent://public/default/events", "public/default/events", "events"]),
            ("x-{tenant}", ["persistent://public/default/x-{tenant}", "public/default/x-{tenant}", "x-{tenant}"]),
            ("persistent://a/b/{tenant}", ["persistent://a/b/{tenant}", "a/b/{tenant}"]),
            ("{tenant}/x-{aggregate}/y", ["persistent://{tenant}/x-{aggregate}/y", "{tenant}/x-{aggregate}/y"]),
        ],
    )
    def test_may_be_written_in_several_ways(self, text: str, same: list[str]) -> None:
        assert spellings(text) == same

    @pytest.mark.parametrize(
        "text",
        [
            *("", "/", "a/b", "a//c", "/a/b/c", "a/b/c/", "a/b/c/d", "persistent://", "persistent://events"),
            *(
                "persistent://a/b/c/d",
                "persistent:/a/b/c",
                "kafka://a/b/c",
                "persistent://x://a/b/c",
                "PERSISTENT://a/b/c",
            ),
            *("..", ".", "a/../c", "../b/c", "a/b/..", "a/b/%2e%2e", "a/b/c?x=1", "a/b/c#x", "a/b/c d", "a/b\\c/d"),
            *(
                "evil\n",
                "evil\r\nX: y",
                "evil\x00",
                "evil\x1b[2J",
                "\u202elive",
                "münchen",
                "a/b/e\u0301",
                "a/b/\ud800",
            ),
            *("{tenant}", "a+b", "a*"),
        ],
    )
    def test_hostile_names_are_refused(self, text: str) -> None:
        with pytest.raises(ConfigurationError, match=r"^topic '") as caught:
            TopicName.parse(text)
        assert str(caught.value).isprintable()

    def test_topics_that_store_nothing_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="deduplicates nothing; write persistent://"):
            TopicName.parse("non-persistent://a/b/c")

    def test_a_partition_is_a_topic_of_its_own(self) -> None:
        topic = TopicName.parse("a/b/c")
        assert str(topic.partition(3)) == "persistent://a/b/c-partition-3"
        assert topic.partition(12).whole == topic == topic.whole
        with pytest.raises(ConfigurationError, match="belong to the partitions of another topic"):
            TopicName.parse(str(topic.partition(3)))
        assert TopicName.parse(str(topic.partition(3)), partition=True) == topic.partition(3)

    def test_its_place_in_the_rest_interface(self) -> None:
        topic = TopicName.parse("a/b/c:d=e")
        assert (topic.path, topic.namespace_name) == ("persistent/a/b/c%3Ad%3De", "a/b")
        assert TopicName("a", "b", "../x y").path == "persistent/a/b/..%2Fx%20y"


# The vectors that the official C++ client keeps, with the remark that Java's are the same.
OFFICIAL = {
    "k1": 2110152746,
    "k2": 1479966664,
    "key1": 462881061,
    "key2": 1936800180,
    "key01": 39696932,
    "key02": 751761803,
}


class TestPartitions:
    @pytest.mark.parametrize(("key", "value"), OFFICIAL.items())
    def test_hashes_as_the_official_clients(self, key: str, value: int) -> None:
        assert murmur3_32(key.encode()) & 0x7FFFFFFF == value
        assert partition_of(key, 7) == value % 7
        assert partition_of(key, 1) == 0

    @pytest.mark.parametrize(
        ("data", "value"),
        [
            (b"", 0),
            (b"\xff\xff\xff\xff", 0x76293B50),
            (b"\x21\x43\x65\x87", 0xF55B516B),
            (b"\x21\x43\x65", 0x7E4A8634),
            (b"\x21\x43", 0xA0F7B07A),
            (b"\x21", 0x72661CF4),
            (b"\x00\x00\x00\x00", 0x2362F9DE),
            (b"\x00", 0x514E28B7),
        ],
    )
    def test_published_vectors(self, data: bytes, value: int) -> None:
        assert murmur3_32(data) == value

    def test_the_bytes_are_utf8(self) -> None:
        assert partition_of("schlüssel", 64) == (murmur3_32("schlüssel".encode()) & 0x7FFFFFFF) % 64
        assert {partition_of(f"order-{number}", 4) for number in range(100)} == {0, 1, 2, 3}


class TestAddress:
    def test_plain(self) -> None:
        found = parse_address("pulsar://broker?admin=http://broker:8080/&entries=mixed")
        assert (found.service_url, found.admin_url) == ("pulsar://broker:6650", "http://broker:8080")
        assert found.options == {"entries": "mixed"}
        assert isinstance(found.credentials, Anonymous)
        assert parse_address("pulsar+ssl://a:1,b,[::1]/").service_url == "pulsar+ssl://a:1,b:6651,[::1]:6651"
        assert parse_address("pulsar://a").admin_url is None

    def test_credentials_are_in_files(self) -> None:
        assert isinstance(parse_address("pulsar://a?token_file=/run/token").credentials, Token)
        found = parse_address("pulsar+ssl://a?oauth2_key_file=key.json&oauth2_issuer=https://b&oauth2_audience=c")
        assert isinstance(found.credentials, OAuth2)
        assert found.options == {}
        mutual = parse_address("pulsar+ssl://a?cert_file=c.pem&key_file=k.pem&ca_file=ca.pem&check_hostname=false")
        assert isinstance(mutual.credentials, Certificate)
        assert mutual.tls == Tls(Path("ca.pem"), Path("c.pem"), Path("k.pem"), check_hostname=False)

    @pytest.mark.parametrize(
        ("address", "what"),
        [
            ("kafka://a", "is no address of a Pulsar cluster"),
            ("pulsar:a", "is no address of a Pulsar cluster"),
            ("pulsar://", "names no host"),
            ("pulsar://a,,b", "names no host"),
            ("pulsar://a:x", "names no host"),
            ("pulsar://a:99999", "names no host"),
            ("pulsar://user:hidden@a", "names no host"),
            ("pulsar://a/b", "names no host"),
            ("pulsar://a b", "names no host"),
            ("pulsar://a\r\n", "names no host"),
            ("pulsar://a?token=hidden", "holds a secret .token.; .* token_file="),
            ("pulsar://a?x=1&x=2", "twice"),
            ("pulsar://a?verify=no", "verify='no'; write true or false"),
            ("pulsar://a?token_file=a&oauth2_key_file=b", "choose one"),
            ("pulsar://a?oauth2_issuer=https://b", "oauth2_key_file="),
            ("pulsar://a?admin=broker:8080", "no address of Pulsar's REST interface"),
            ("pulsar://a?admin=http://user:hidden@b", "no address of Pulsar's REST interface"),
            ("pulsar://a?admin=http://b%0d%0ax", "no address of Pulsar's REST interface"),
        ],
    )
    def test_mistakes(self, address: str, what: str) -> None:
        with pytest.raises(ConfigurationError, match=what) as caught:
            parse_address(address)
        assert "hidden" not in str(caught.value)
        assert str(caught.value).isprintable()
