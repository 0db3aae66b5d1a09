"""Factories shared by the sandbox tests, and ways to look at the host from outside of the sandboxes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from envs.sandbox import BubblewrapFactory


@pytest.fixture(scope="session")
def factory() -> Iterator[BubblewrapFactory]:
    """With whatever this machine offers."""
    factory = BubblewrapFactory()
    yield factory
    factory.close()


@pytest.fixture(scope="session")
def rlimits_factory() -> Iterator[BubblewrapFactory]:
    """As on a machine without control groups."""
    factory = BubblewrapFactory(control_groups=False)
    yield factory
    factory.close()


@pytest.fixture(params=["all limits", "rlimits only"])
def any_factory(
    request: pytest.FixtureRequest, factory: BubblewrapFactory, rlimits_factory: BubblewrapFactory
) -> BubblewrapFactory:
    return factory if request.param == "all limits" else rlimits_factory


@pytest.fixture
def pids_running() -> Callable[[str], list[int]]:
    """The host's processes that have a given word among their arguments."""

    def running(word: str) -> list[int]:
        pids = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if word.encode() in path.read_bytes().split(b"\0"):
                    pids.append(int(path.parent.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return pids

    return running


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool], str], None]:
    """Waits until a condition holds, generously: for what the kernel does a moment later."""

    def wait(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not within 30 s: {what}")
            time.sleep(0.01)

    return wait
