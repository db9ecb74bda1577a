"""Fixtures for all tests. The mounted ones are in `mount/harness.py`; here they get their lifetimes.

`vault_mount` is a factory: a test calls it for each mount it wants. When the test has passed, each mount is unmounted
and checked for leftovers (`MountedVault.finish`); when it has failed, the daemon's log goes into the report and
everything is torn down without further questions, so that the next test starts clean.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.mount.harness import INTERPRETER, TEST_UID, FileSystem, MountedVault, is_served

_PASSED: pytest.StashKey[bool] = pytest.StashKey()

MountFactory = Callable[..., MountedVault]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield  # type: ignore[misc]
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report  # type: ignore[return-value]


def pytest_configure() -> None:
    # Whoever stops the tests (timeout, a CI runner) wants the mounts gone too: end as Ctrl-C does, with the fixtures.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A shell's background job ignores these two, and so would every program that a test starts and ends by them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def vault_mount(request: pytest.FixtureRequest) -> Iterator[MountFactory]:
    """`vault_mount(options="…", files={…}, over_itself=…, uid=…, on=…, background=…, daemon=…)` → MountedVault."""
    mounts: list[MountedVault] = []

    def factory(options: str = "", **keywords: Any) -> MountedVault:
        mount = MountedVault(options=options, **keywords)
        mounts.append(mount)
        return mount.start()

    with ExitStack() as stack:
        # Also for tests that only make a MountedVault and do not get as far as starting it.
        stack.callback(lambda: [mount.destroy() for mount in mounts])
        yield factory
        try:
            if request.node.stash.get(_PASSED, False):
                for mount in mounts:
                    mount.finish()
        except BaseException:
            _tell_logs(request.node, mounts, "teardown")
            raise
        if not request.node.stash.get(_PASSED, False):
            _tell_logs(request.node, mounts, "call")
    for mount in mounts:
        assert not is_served(mount.mnt), f"could not get rid of {mount.mnt}"


def _tell_logs(item: pytest.Item, mounts: list[MountedVault], when: str) -> None:
    for mount in mounts:
        text = mount.log_text()
        item.add_report_section(when, f"daemon of {mount.mnt}", text[-6000:])
        print(f"daemon's log, {mount.mnt}:\n{text[-6000:]}")


@pytest.fixture
def mounted(vault_mount: MountFactory) -> MountedVault:
    """The ordinary mount: an empty vault, default options, as the user who runs the tests, mounted elsewhere."""
    return vault_mount()


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    yield
    INTERPRETER.close()


@pytest.fixture(scope="session")
def file_system() -> Iterator[Callable[[str], FileSystem]]:
    """`file_system("xfs")`: that file system, made once for the session. Needs root (loop devices)."""
    made: dict[str, FileSystem] = {}

    def get(kind: str) -> FileSystem:
        if os.getuid() != 0:
            pytest.skip("making file systems needs root")
        if kind not in made:
            made[kind] = FileSystem(kind)
        return made[kind]

    with ExitStack() as stack:
        stack.callback(lambda: [system.close() for system in made.values()])
        yield get


@pytest.fixture
def unprivileged() -> int:
    """The uid of a user without privileges: another one than root's, or the tests' own."""
    return TEST_UID if os.getuid() == 0 else os.getuid()
