"""Fixtures of the core's tests: a vault root by each of the two resolvers, and the leak check that goes with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from vaultfs.root import VaultRoot

Mounter = Callable[..., None]


@pytest.fixture
def vault(tmp_path: Path) -> Path:
    """An empty vault directory, with `tmp_path` around it as the outside."""
    path = tmp_path / "vault"
    path.mkdir()
    return path


@pytest.fixture(params=["openat2", "walk"])
def resolver(request: pytest.FixtureRequest) -> str:
    """Each of the two: what holds for one holds for the other."""
    return str(request.param)


@pytest.fixture
def root(vault: Path, resolver: str) -> Iterator[VaultRoot]:
    """The root of `vault`; afterwards every descriptor that the test's calls opened has been closed again."""
    before = set(os.listdir("/proc/self/fd"))
    with VaultRoot.open(vault, resolver=resolver) as opened:  # type: ignore[arg-type]
        yield opened
    left = set(os.listdir("/proc/self/fd")) - before
    assert not left, f"left open: {[_describe(fd) for fd in left]}"


def _describe(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return "the listing's own descriptor"


def _unmount(path: str | Path) -> None:
    """Also when a test failed and left something open there: the next one starts without it."""
    if subprocess.run(["umount", str(path)], check=False).returncode:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def mount() -> Iterator[Mounter]:
    """`mount("-t", "tmpfs", "none", path)`; unmounted when the test is over."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    with ExitStack() as stack:

        def mounted(*arguments: str | Path) -> None:
            subprocess.run(["mount", *map(str, arguments)], check=True)
            stack.callback(_unmount, arguments[-1])

        yield mounted
