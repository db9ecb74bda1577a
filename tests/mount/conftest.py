"""Fixtures for tests that look at one directory of a mount, beside a plain directory on the same file system.

Hundreds of small tests need a mount and not one of their own: starting and ending a daemon takes longer than they do.
They share one per module and get a fresh directory each, `here`. What `MountedVault.finish` asserts once the daemon is
gone is asserted at its end, and after each test what can be seen while it runs: no lock, no draft, no staging file, no
alarm in the log. A test that fails takes its mount with it, so that the next one starts on a clean one.

With VAULTFS_TESTS_PLAIN=1 `here` is a plain directory: whatever fails then is wrong with the test (or is a promise that
only the mount keeps).
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import MountedVault, eventually

MOUNT_AGE = 45.0  # seconds; a shared mount older than that is replaced before the harness's watchdog ends it
PLAIN = os.environ.get("VAULTFS_TESTS_PLAIN") == "1"


class SharedMount:
    """One mount for many tests; replaced after a failure and when it grows old."""

    def __init__(self, options: str) -> None:
        self.options = options
        self.mount: MountedVault | None = None
        self._started = 0.0
        self._number = 0
        self._alarms_seen = 0

    def get(self) -> MountedVault:
        if self.mount is not None and time.monotonic() - self._started > MOUNT_AGE:
            self.finish()
        if self.mount is None:
            self.mount = MountedVault(options=self.options)
            self._started = time.monotonic()
            if not PLAIN:
                try:
                    self.mount.start()
                except BaseException:
                    self.destroy()
                    raise
        return self.mount

    def directory(self) -> str:
        self._number += 1
        return f"t{self._number}"

    def assert_quiet(self) -> None:
        """Nothing of the last test is still at work: what `finish` asserts, as far as a running daemon can."""
        mount = self.mount
        if mount is None or PLAIN:
            return
        left: list[str] = []

        def nothing_left() -> bool:
            left[:] = [
                os.path.join(directory, name)
                for kind in ("staging", "pending", "locks", "drafts", "quarantine")
                for directory, _, names in os.walk(mount.behind / ".vaultfs" / kind)
                for name in names
            ]
            return not left

        eventually(nothing_left, f"no draft, lock or staging file is left: {left}", limit=10)
        assert mount.log_alarms() == []

    def finish(self) -> None:
        mount, self.mount = self.mount, None
        if mount is not None:
            try:
                if not PLAIN:
                    mount.finish()
            finally:
                mount.destroy()

    def destroy(self) -> None:
        mount, self.mount = self.mount, None
        if mount is not None:
            mount.destroy()


@pytest.fixture(scope="module")
def shared_mount() -> Iterator[SharedMount]:
    shared = SharedMount("")
    try:
        yield shared
        shared.finish()
    finally:
        shared.destroy()


@pytest.fixture
def here(shared_mount: SharedMount, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A fresh, empty directory on a mount with default options."""
    mount = shared_mount.get()
    directory = (mount.vault if PLAIN else mount.mnt) / shared_mount.directory()
    directory.mkdir()
    failed_before = request.session.testsfailed
    yield directory
    if request.session.testsfailed > failed_before:
        print(f"daemon's log:\n{mount.log_text()[-6000:]}")
        shared_mount.destroy()
        return
    try:
        subprocess.run(["rm", "-rf", directory], check=True, timeout=60)
        shared_mount.assert_quiet()
    except BaseException:
        print(f"daemon's log:\n{mount.log_text()[-6000:]}")
        shared_mount.destroy()
        raise


@pytest.fixture
def root(here: Path) -> Path:
    """The mountpoint itself."""
    return here.parent


@pytest.fixture
def vault_here(here: Path, shared_mount: SharedMount) -> Path:
    """`here` seen from behind: the same directory in the vault."""
    assert shared_mount.mount is not None
    return shared_mount.mount.behind / here.name


@pytest.fixture
def plain(here: Path, shared_mount: SharedMount) -> Iterator[Path]:
    """A fresh, empty directory beside the vault, on the same file system, that vaultfs has nothing to do with."""
    assert shared_mount.mount is not None
    directory = shared_mount.mount.base / f"plain-{here.name}"
    directory.mkdir()
    yield directory
    subprocess.run(["rm", "-rf", directory], check=True, timeout=60)
