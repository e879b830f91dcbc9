"""The plan for a cluster: the required and existing topics and policies, and the steps between them.

Steps only add. A requirement that would remove something (a partition, stored messages, or a policy that was set for
one topic) is a conflict, which is reported and left to operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ...errors import ConfigurationError
from .admin import Policies, PulsarAdmin, Retention
from .names import TopicName


class Action(StrEnum):
    """Kinds of steps."""

    CREATE_TENANT = "create tenant"
    CREATE_NAMESPACE = "create namespace"
    DEDUPLICATE = "deduplicate"
    RETAIN = "retain"
    CREATE_TOPIC = "create topic"
    GROW_TOPIC = "grow topic"
    CONFLICT = "conflict"
    """Reported only."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step and its effect."""

    action: Action
    target: str
    detail: str = ""
    value: Policies | Retention | int | None = None


@dataclass(frozen=True, slots=True)
class Desired:
    """The required state. None accepts any value."""

    topics: tuple[TopicName, ...]
    partitions: int | None = None
    deduplication: bool = True
    retention: Retention | None = None


@dataclass(slots=True)
class Found:
    """The existing state of everything that is required."""

    tenants: set[str] = field(default_factory=set)
    namespaces: dict[str, Policies] = field(default_factory=dict)
    topics: dict[TopicName, int] = field(default_factory=dict)
    """Existing topics with their partitions."""
    exempt: set[TopicName] = field(default_factory=set)
    """Topics that are not deduplicated because of their own policy."""
    default_retention: Retention | None = None
    """Retention where a namespace has no policy; None if it cannot be read."""


async def find(admin: PulsarAdmin, desired: Desired) -> Found:
    """Read the state of everything that is required, and nothing else: the rights may not suffice for more."""
    found = Found()
    for namespace in _namespaces(desired):
        policies = await admin.policies(namespace)
        tenant = namespace.partition("/")[0]
        if policies is not None:
            found.namespaces[namespace] = policies
        if policies is not None or (tenant not in found.tenants and await admin.has_tenant(tenant)):
            found.tenants.add(tenant)
    for topic in desired.topics:
        if topic.namespace_name not in found.namespaces:
            continue
        partitions = await admin.partitions(topic)
        if partitions is not None:
            found.topics[topic] = partitions
            if desired.deduplication and await admin.deduplication_of(topic) is False:
                found.exempt.add(topic)
    if desired.retention is not None and any(each.retention is None for each in found.namespaces.values()):
        found.default_retention = await _default_retention(admin)
    return found


async def _default_retention(admin: PulsarAdmin) -> Retention | None:
    try:
        runtime = await admin.runtime()
        return Retention(int(runtime["defaultRetentionTimeInMinutes"]), int(runtime["defaultRetentionSizeInMB"]))
    except (ConfigurationError, KeyError, ValueError):  # only superusers may read it
        return None


def plan(desired: Desired, found: Found) -> list[Step]:
    """The steps in a possible order. Empty if there is nothing to do."""
    namespaces = _namespaces(desired)
    steps = [
        Step(Action.CREATE_TENANT, tenant, "for all clusters")
        for tenant in dict.fromkeys(each.partition("/")[0] for each in namespaces)
        if tenant not in found.tenants
    ]
    for namespace in namespaces:
        steps += _namespace_steps(namespace, desired, found.namespaces.get(namespace), found.default_retention)
    for topic in desired.topics:
        steps += _topic_steps(topic, desired, found.topics)
        if desired.deduplication and topic in found.exempt:
            remedy = f"pulsar-admin topicPolicies remove-deduplication {topic}"
            steps.append(Step(Action.CONFLICT, str(topic), f"its own policy turns deduplication off: {remedy}"))
    return steps


def _namespace_steps(
    name: str, desired: Desired, policies: Policies | None, default_retention: Retention | None
) -> Iterator[Step]:
    wanted = desired.retention
    if policies is None:
        made = Policies(True if desired.deduplication else None, wanted)
        words = ["deduplicates"] if desired.deduplication else []
        words += [f"keeps messages {wanted}"] if wanted else []
        yield Step(Action.CREATE_NAMESPACE, name, "; ".join(words), made)
        return
    if desired.deduplication and not policies.deduplication:
        yield Step(Action.DEDUPLICATE, name, "was off" if policies.deduplication is False else "was left to the broker")
    if wanted is None or policies.retention == wanted:
        return
    kept = policies.retention or default_retention
    if kept is not None and wanted.covers(kept):
        yield Step(Action.RETAIN, name, f"keeps messages {wanted}", wanted)
        return
    now = "what it keeps now cannot be asked for" if kept is None else f"keeps messages {kept}, and would keep less"
    time, size = (
        f"{value}{unit}" if value > 0 else value for value, unit in ((wanted.minutes, "m"), (wanted.megabytes, "M"))
    )
    remedy = f"pulsar-admin namespaces set-retention --time {time} --size {size} {name}"
    yield Step(Action.CONFLICT, name, f"{now}; if you want that: {remedy}")


def _topic_steps(topic: TopicName, desired: Desired, found: Mapping[TopicName, int]) -> Iterator[Step]:
    wanted, there = desired.partitions, found.get(topic)
    if there is None:
        yield Step(
            Action.CREATE_TOPIC, str(topic), f"{wanted} partitions" if wanted else "not partitioned", wanted or 0
        )
    elif wanted is None or wanted == there:
        return
    elif there == 0 or not wanted:
        what = "not partitioned" if there == 0 else f"partitioned ({there})"
        yield Step(Action.CONFLICT, str(topic), f"is {what}, and stays so; choose another name for a new topic")
    elif wanted < there:
        yield Step(Action.CONFLICT, str(topic), f"has {there} partitions, and none can be taken away; say {there}")
    else:
        detail = f"{there} to {wanted} partitions; keys move: let consumers finish first, or their order breaks once"
        yield Step(Action.GROW_TOPIC, str(topic), detail, wanted)


async def apply(admin: PulsarAdmin, step: Step) -> None:
    """Carry out one step. A step that was already done is fine; conflicts are left alone."""
    match step.action, step.value:
        case Action.CREATE_TENANT, None:
            await admin.create_tenant(step.target)
        case Action.CREATE_NAMESPACE, Policies() as policies:
            await admin.create_namespace(step.target, policies)
        case Action.DEDUPLICATE, None:
            await admin.enable_deduplication(step.target)
        case Action.RETAIN, Retention() as retention:
            await admin.set_retention(step.target, retention)
        case Action.CREATE_TOPIC, int(partitions):
            await admin.create_topic(TopicName.parse(step.target), partitions)
        case Action.GROW_TOPIC, int(partitions):
            await admin.grow(TopicName.parse(step.target), partitions)


def _namespaces(desired: Desired) -> list[str]:
    return list(dict.fromkeys(topic.namespace_name for topic in desired.topics))
