"""Topic names, and the partition of a key.

A name is completed and checked before a broker sees it. Refused, with advice, are names that a broker would take for
another topic, for another path of its REST interface, or for a partition of another topic.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Self
from urllib.parse import quote

from ...errors import ConfigurationError
from ...route import PLACEHOLDERS, fill_template

# The broker checks tenants and namespaces by this pattern, and topics not at all: it would accept `..`, blanks and
# slashes.
_PART = re.compile(r"[-=:.\w]+", re.ASCII)
_PARTITION = re.compile(r"-partition-(\d+)\Z", re.ASCII)
_SCHEME = "persistent://"
_ANY = dict.fromkeys(PLACEHOLDERS, "any")
DEFAULT_NAMESPACE = f"{_SCHEME}public/default/"
"""Namespace of names that have none."""

MAX_PARTITIONS = 10_000
"""Most partitions of one topic."""


@dataclass(frozen=True, slots=True)
class TopicName:
    """A persistent topic, or one partition of it. `parse` checks the name; the constructor does not."""

    tenant: str
    namespace: str
    topic: str

    @classmethod
    def parse(cls, text: str, *, partition: bool = False, template: bool = False) -> Self:
        """Parse ``persistent://tenant/namespace/topic``, ``tenant/namespace/topic`` or ``topic`` (in public/default).

        A name that ends in ``-partition-3`` is reserved for the broker and refused, unless ``partition`` allows it. In
        a ``template``, any part may have placeholders.
        """
        scheme, found, rest = text.rpartition("://")
        if found and scheme == "non-persistent":
            raise ConfigurationError(
                f"topic {text!r}: a non-persistent topic stores and deduplicates nothing; write {_SCHEME}..."
            )
        parts = rest.split("/")
        if not found and len(parts) == 1:
            parts = ["public", "default", rest]
        if (found and scheme != "persistent") or len(parts) != 3:
            raise ConfigurationError(f"topic {text!r}: write {_SCHEME}tenant/namespace/topic")
        for kind, part in zip(("tenant", "namespace", "topic"), parts, strict=True):
            checked = fill_template(part, _ANY) if template else part
            if not _PART.fullmatch(checked) or not checked.strip("."):
                raise ConfigurationError(
                    f"topic {text!r}: {part!r} is no name for a {kind}; use letters, digits and any of _ - = : ."
                )
        if not partition and _PARTITION.search(parts[2]):
            raise ConfigurationError(
                f"topic {text!r}: names that end in -partition-N belong to the partitions of another topic; "
                "name that topic, or choose another name"
            )
        return cls(*parts)

    def __str__(self) -> str:
        return f"{_SCHEME}{self.tenant}/{self.namespace}/{self.topic}"

    @property
    def path(self) -> str:
        """Path in the REST interface."""
        return "persistent/" + "/".join(quote(each, safe="") for each in (self.tenant, self.namespace, self.topic))

    @property
    def namespace_name(self) -> str:
        """Tenant and namespace, in the form of the REST interface."""
        return f"{self.tenant}/{self.namespace}"

    @property
    def whole(self) -> Self:
        """The topic of a partition; a topic without partitions itself."""
        return type(self)(self.tenant, self.namespace, _PARTITION.sub("", self.topic))

    def partition(self, number: int) -> Self:
        """A partition, which is a topic by itself."""
        return type(self)(self.tenant, self.namespace, f"{self.topic}-partition-{number}")


def spellings(topic: str) -> list[str]:
    """All names of this topic, or of this template."""
    name = TopicName.parse(topic, template=True)
    whole = str(name)
    short = [name.topic] if whole.startswith(DEFAULT_NAMESPACE) else []
    return [whole, whole.removeprefix(_SCHEME), *short]


def partition_of(key: str, partitions: int) -> int:
    """The partition of a key, by the hashing scheme Murmur3_32Hash of Pulsar's clients.

    It is not the default of the Java client: another producer for the same topic must be configured to use it.
    """
    return _hash_of(key) % partitions


@lru_cache(maxsize=65_536)
def _hash_of(key: str) -> int:
    return murmur3_32(key.encode()) & 0x7FFF_FFFF  # Java's integers are signed, and the clients drop the sign


def murmur3_32(data: bytes) -> int:
    """MurmurHash3 for 32 bits with seed 0, unsigned."""
    state = 0
    whole = len(data) & ~3
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        state ^= _mixed(word)
        state = (((state << 13) | (state >> 19)) * 5 + 0xE654_6B64) & 0xFFFF_FFFF
    state ^= _mixed(int.from_bytes(data[whole:], "little")) ^ len(data)
    state = ((state ^ (state >> 16)) * 0x85EB_CA6B) & 0xFFFF_FFFF
    state = ((state ^ (state >> 13)) * 0xC2B2_AE35) & 0xFFFF_FFFF
    return state ^ (state >> 16)


def _mixed(word: int) -> int:
    word = (word * 0xCC9E_2D51) & 0xFFFF_FFFF
    return (((word << 15) | (word >> 17)) * 0x1B87_3593) & 0xFFFF_FFFF
