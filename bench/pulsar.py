"""From the log into a real Pulsar, exactly once, beside a bare loop of the official client, which has to do without
batches to be exact.

    pulsar_ratio            entries mixed, to the official client
    pulsar_by_key_ratio     entries by key, of 100 keys
    pulsar_cpu_us           of the transport alone, in entries of a thousand
    pulsar_latency_ms       from COMMIT returning in one process to the broker's acknowledgement in another, at 100/s
    pulsar_latency_1000_ms  at 1,000/s
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any
from uuid import uuid4

import pulsar as official

from pillarbox.testing.pulsar import LocalPulsar
from pillarbox.transport import Message, Outcome
from pillarbox.transports.pulsar import PulsarTransport

from .children import Task, write
from .figures import body, cpu_seconds, waits
from .load import Sink, TimingSink, refill_and_drain
from .proof import doorbell_heard, require
from .servers import Bench

KEYS = 100
WINDOW = 2_000
_RATES = {"pulsar_latency_ms": (100, 1), "pulsar_latency_1000_ms": (1_000, 10)}


class PulsarSink(TimingSink):
    """The transport, and a note of what the broker has acknowledged."""

    def __init__(self, broker: LocalPulsar, **options: Any) -> None:
        super().__init__()
        self.transport = PulsarTransport(broker.url, admin_url=broker.admin_url, **options)
        self.capabilities = self.transport.capabilities
        self.preflight = self.transport.preflight  # type: ignore[method-assign]
        self.open = self.transport.open  # type: ignore[method-assign]
        self.close = self.transport.close  # type: ignore[method-assign]
        self.timed = False

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:
        outcome = await self.transport.send(producer, messages)
        self.take([messages[index] for index in outcome.accepted])
        return outcome

    def take(self, messages: Sequence[Message]) -> None:
        if self.timed:
            super().take(messages)
        else:
            Sink.take(self, messages)


async def measure(bench: Bench) -> dict[str, object]:
    """All figures, by name."""
    broker = LocalPulsar(bench.folder / "pulsar")
    await asyncio.to_thread(broker.start)
    try:
        figures = await _drain(bench, broker)
        figures |= {"pulsar_cpu_us": await _cpu(bench, broker)}
        return figures | await _latency(bench, broker)
    finally:
        await asyncio.to_thread(broker.stop)


async def _drain(bench: Bench, broker: LocalPulsar) -> dict[str, object]:
    events = bench.sizes.drain
    rates: dict[str, list[float]] = {"mixed": [], "by_key": [], "official": []}
    for number in range(bench.sizes.few + 1):
        found = {"official": await asyncio.to_thread(_official, broker, events // 2)}
        for entries in ("mixed", "by_key"):
            sink = PulsarSink(broker, entries=entries)
            async with bench.database() as url, bench.box(url, sink) as box:
                found[entries] = await refill_and_drain(box, sink, events, keys=KEYS)
        if number:  # the first time the broker's own code is compiled
            for name, rate in found.items():
                rates[name].append(rate)
    floor = rates.pop("official")
    ratios = {name: [rate / bare for rate, bare in zip(of, floor, strict=True)] for name, of in rates.items()}
    return {
        "pulsar_ratio": statistics.median(ratios["mixed"]),
        "pulsar_by_key_ratio": statistics.median(ratios["by_key"]),
        "pulsar_per_second": statistics.median(rates["mixed"]),
        "pulsar_by_key_per_second": statistics.median(rates["by_key"]),
        "pulsar_floor_per_second": statistics.median(floor),
    }


def _messages(topic: str, events: int) -> list[Message]:
    return [
        Message(
            topic,
            f"k{number % KEYS}",
            body(number),
            {
                "event_id": str(uuid4()),
                "event_type": "bench.clock.ticked",
                "aggregate_type": "order",
                "aggregate_id": str(number % KEYS),
                "schema_version": "1",
                "content_type": "application/json",
            },
            number + 1,
        )
        for number in range(events)
    ]


def _official(broker: LocalPulsar, events: int) -> float:
    """The official client as it must be used to be exact: numbers of our own, no batches."""
    client = official.Client(broker.url, logger=official.ConsoleLogger(official.LoggerLevel.Error))
    try:
        topic = f"persistent://public/default/floor-{uuid4().hex}"
        producer = client.create_producer(
            topic, producer_name="floor", batching_enabled=False, max_pending_messages=WINDOW, block_if_queue_full=True
        )
        messages = _messages(topic, events)
        left, done = count(events - 1, -1), threading.Event()

        def acknowledged(result: Any, _message: Any) -> None:
            if result != official.Result.Ok or next(left) == 0:
                done.set()

        started = time.perf_counter()
        for message in messages:
            producer.send_async(
                message.body,
                acknowledged,
                properties=message.headers,
                partition_key=message.key,
                sequence_id=message.number,
            )
        if not done.wait(120):
            raise TimeoutError("the official client has not come to its end")
        return events / (time.perf_counter() - started)
    finally:
        client.close()


async def _cpu(bench: Bench, broker: LocalPulsar) -> float:
    """Microseconds for each message, from ready messages to their receipts."""
    transport = PulsarTransport(broker.url, admin_url=broker.admin_url, entries="mixed")
    topic = f"persistent://public/default/bench-{uuid4().hex}"
    messages = _messages(topic, bench.sizes.drain)
    await transport.open("bench", [topic])
    before = cpu_seconds()
    for start in range(0, len(messages), 1_000):
        await transport.send("bench", messages[start : start + 1_000])
    spent = cpu_seconds() - before
    again = await transport.send("bench", messages[-1_000:])
    require(len(again.duplicates) == 1_000, "the broker took messages for new that it had: it does not deduplicate")
    await transport.close()
    return spent / len(messages) * 1e6


async def _latency(bench: Bench, broker: LocalPulsar) -> dict[str, object]:
    sink = PulsarSink(broker)
    sink.timed = True
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _RATES}
    async with bench.database() as url, bench.box(url, sink) as box:
        for number in range(bench.sizes.latency_rounds):
            for name, (rate, together) in _RATES.items():
                sink.arrived.clear()
                relay = box.relay()
                running = asyncio.ensure_future(relay.run())
                task = Task(url, rate, bench.sizes.latency_seconds, together, first=number * 1_000_000)
                async with doorbell_heard(box, task.seconds):
                    committed = await write(task)
                async with asyncio.timeout(20):
                    while not committed.keys() <= sink.arrived.keys():  # noqa: ASYNC110  a sink rings no bell
                        await asyncio.sleep(0.01)
                relay.stop()
                await running
                found[name].append(waits(committed, sink.arrived))
    return {
        name: {each: statistics.median(one[each] for one in rounds) for each in ("p50", "p99")}
        for name, rounds in found.items()
    }


def report(results: Mapping[str, Any]) -> str:
    """Lines for people."""
    rates = f"{results['pulsar_per_second']:,.0f}/s, the client {results['pulsar_floor_per_second']:,.0f}/s"
    lines = [
        "pulsar: from the log into a real broker, exactly once, to a bare loop of the official client",
        f"  entries mixed         {results['pulsar_ratio']:8.2f} ({rates})",
        f"  by key, of {KEYS}        {results['pulsar_by_key_ratio']:8.2f}",
        f"  CPU of the transport  {results['pulsar_cpu_us']:8.2f} us",
    ]
    for name, (rate, _) in _RATES.items():
        lines.append(
            f"  {rate:5,} events/s        {results[name]['p50']:8.2f} ms p50, {results[name]['p99']:.2f} ms p99"
        )
    return "\n".join(lines)
