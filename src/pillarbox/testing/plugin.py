"""The pytest plugin: the fixture ``pillarbox``, and the fixture ``pillarbox_config`` for its configuration.

Every pytest that finds this package loads the plugin, so it imports nothing before a test uses the fixture. It needs no
plugin for async tests and works with any of them: the box is started and stopped inside the test, in its loop.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .harness import Harness, PillarboxConfig

_HARNESS = pytest.StashKey["Harness"]()


@pytest.fixture
def pillarbox_config() -> PillarboxConfig:
    """Configuration of a test's box: override it in a conftest.py or in a test module."""
    from .harness import PillarboxConfig  # noqa: PLC0415  loaded only where it is used

    return PillarboxConfig()


@pytest.fixture
def pillarbox(request: pytest.FixtureRequest, pillarbox_config: PillarboxConfig, tmp_path: Path) -> Iterator[Harness]:
    """A box in a test, with brokers in memory: see `pillarbox.testing.harness.Harness`."""
    from .harness import Harness  # noqa: PLC0415  as above

    harness = request.node.stash[_HARNESS] = Harness(pillarbox_config, tmp_path)
    try:
        yield harness
    finally:
        harness.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Start the box before an async test and stop it afterwards, in the test's own task."""
    harness = item.stash.get(_HARNESS, None)
    test = getattr(item, "obj", None)
    if harness is None or not inspect.iscoroutinefunction(test):
        return (yield)
    item.obj = _inside(harness, test)  # type: ignore[attr-defined]  # of a Function
    try:
        return (yield)
    finally:
        item.obj = test  # type: ignore[attr-defined]


def _inside(harness: Harness, test: Any) -> Any:
    @functools.wraps(test)
    async def run(*arguments: Any, **named: Any) -> Any:
        async with harness:
            return await test(*arguments, **named)

    return run
