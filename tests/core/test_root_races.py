"""A second process exchanges a directory of the vault for a link that leads out of it, as fast as it can.

Whatever the library does below that name meanwhile, it happens in the vault or not at all. The outside is laid out
like the directory, so that a call which followed the link would find there just what it looks for; and one test shows
that code which checks first and acts then *is* caught by the same swapper, or these tests would prove nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vaultfs.errors import PathKind, UnsafePathError
from vaultfs.root import VaultRoot

SWAPS = 30_000
PACKAGE = str(Path(__file__).parents[2])
PATIENCE = 60.0  # seconds; reached only if the swapper is dead
Operation = Callable[[VaultRoot, frozenset[int]], None]  # on the vault, while these inodes are the outside
CREATE = os.O_CREAT | os.O_WRONLY | os.O_TRUNC


@contextmanager
def swapping(vault: Path, one: str, other: str) -> Iterator[Callable[[], bool]]:
    """Exchanges two names in a process of its own; the value tells whether to go on: fewer than SWAPS yet."""
    program = f"""
        import os, sys
        from vaultfs.kernel import RENAME_EXCHANGE, renameat2
        directory = os.open(".", os.O_RDONLY)
        counter = os.open("../swaps", os.O_CREAT | os.O_WRONLY, 0o600)
        parent, done = os.getppid(), 0
        while os.getppid() == parent:
            renameat2(directory, {os.fsencode(one)!r}, directory, {os.fsencode(other)!r}, RENAME_EXCHANGE)
            done += 1
            if done % 50 == 0:
                os.pwrite(counter, b"%d" % done, 0)
    """
    counter = vault.parent / "swaps"
    counter.write_text("0")
    deadline = time.monotonic() + PATIENCE

    def go_on() -> bool:
        assert process.poll() is None, "the swapper failed"
        assert time.monotonic() < deadline, "the swapper does not come forward"
        return int(counter.read_text()) < SWAPS

    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=vault, env={"PYTHONPATH": PACKAGE}
    ) as process:
        try:
            yield go_on
        finally:
            process.kill()


def furnish(directory: Path, name: str) -> None:
    """What every call looks for, with content that tells where it is."""
    (directory / "sub" / "tree" / "deep").mkdir(parents=True, exist_ok=True)
    (directory / "empty").mkdir(exist_ok=True)
    for place in ("victim", "second", "sub/victim", "sub/tree/victim", "sub/tree/deep/victim"):
        (directory / place).write_text(name)
    if not (directory / "link").is_symlink():
        (directory / "link").symlink_to(name)


def state(directory: Path) -> list[tuple[str, int, int, int, str]]:
    """Everything below `directory`: whatever is changed there shows."""
    seen = []
    for place in [directory, *sorted(directory.rglob("*"))]:
        found = place.lstat()
        content = os.readlink(place) if place.is_symlink() else place.read_text() if place.is_file() else ""
        seen.append((str(place), found.st_ino, found.st_mtime_ns, found.st_ctime_ns, content))
    return seen


@pytest.fixture
def outside(tmp_path: Path, vault: Path) -> Path:
    """The place that the link `out` in the vault leads to; beside `out` stands the directory `d`."""
    path = tmp_path / "outside"
    path.mkdir()
    furnish(path, "outside")
    (vault / "d").mkdir()
    (vault / "out").symlink_to(path)
    return path


def write(root: VaultRoot, _: frozenset[int]) -> None:
    for path in (b"d/victim", b"d/sub/victim", b"d/new"):
        descriptor = root.open_file(path, CREATE, 0o644)
        try:
            os.write(descriptor, b"inside")
        finally:
            os.close(descriptor)


def read(root: VaultRoot, outside: frozenset[int]) -> None:
    for path in (b"d/victim", b"d/sub/victim"):
        descriptor = root.open_file(path, os.O_RDONLY)
        try:
            assert os.read(descriptor, 100) != b"outside"
        finally:
            os.close(descriptor)
    for path in (b"d", b"d/sub"):
        assert not any(found.st_ino in outside for _, found in root.scandir(path))
    assert root.stat(b"d/victim").st_ino not in outside
    assert root.readlink(b"d/link") == b"inside"


def rename(root: VaultRoot, _: frozenset[int]) -> None:
    root.rename(b"d/second", b"d/victim")
    root.rename(b"d/victim", b"d/sub/victim")
    root.rename(b"d/sub/victim", b"d/second")
    root.rename(b"d/second", b"top")
    root.rename(b"top", b"d/second")


def remove(root: VaultRoot, _: frozenset[int]) -> None:
    root.unlink(b"d/victim")
    root.unlink(b"d/sub/victim")
    root.rmdir(b"d/empty")


def make(root: VaultRoot, _: frozenset[int]) -> None:
    root.mkdir(b"d/made/below", recursive=True, exclusive=False)
    root.symlink(b"target", b"d/sub/new link")
    root.remove_tree(b"d/made")
    root.unlink(b"d/sub/new link")


def remove_tree(root: VaultRoot, _: frozenset[int]) -> None:
    root.remove_tree(b"d/sub")


def by_parent(root: VaultRoot, _: frozenset[int]) -> None:
    with root.parent(b"d/victim") as (directory, name):
        os.chmod(name, 0o600, dir_fd=directory)
        os.utime(name, dir_fd=directory, follow_symlinks=False)


def check(root: VaultRoot, outside: frozenset[int]) -> None:
    found = root.check("d/victim")
    assert found.stat is None or found.stat.st_ino not in outside


@pytest.mark.parametrize("operation", [write, read, rename, remove, make, remove_tree, by_parent, check])
def test_swapping_a_directory_for_a_link_gains_nothing(
    root: VaultRoot, vault: Path, outside: Path, operation: Operation
) -> None:
    furnish(vault / "d", "inside")
    before = state(outside)
    inodes = frozenset(number for _, number, *_ in before)
    outcomes: Counter[str] = Counter()
    with swapping(vault, "d", "out") as go_on:
        while go_on():
            try:
                operation(root, inodes)
                outcomes["done"] += 1
            except UnsafePathError as error:
                assert error.kind in (
                    PathKind.COMPONENT_LINK,
                    PathKind.COMPONENT_DANGLING,
                    PathKind.COMPONENT_REDIRECTED,
                )
                outcomes["refused"] += 1
            except (FileNotFoundError, FileExistsError, NotADirectoryError):
                refurnish(root)
    assert state(outside) == before
    assert outcomes["refused"] and outcomes["done"], "the swapper was never there, or always"


def refurnish(root: VaultRoot) -> None:
    """Put back what an operation used up, by whichever of the two names the directory has now."""
    for name in (b"d", b"out"):
        try:
            root.mkdir(name + b"/sub/tree/deep", recursive=True, exclusive=False)
            root.mkdir(name + b"/empty", exclusive=False)
            for place in (b"/victim", b"/second", b"/sub/victim", b"/sub/tree/victim", b"/sub/tree/deep/victim"):
                descriptor = root.open_file(name + place, CREATE, 0o644)
                os.write(descriptor, b"inside")
                os.close(descriptor)
        except (UnsafePathError, OSError):
            continue  # it has just become the link: then the other is the directory


def test_swapping_a_file_for_a_link_gains_nothing(root: VaultRoot, vault: Path, outside: Path) -> None:
    (vault / "file").write_text("inside")
    (vault / "link").symlink_to(outside / "victim")
    before = state(outside)
    outcomes: Counter[str] = Counter()
    with swapping(vault, "file", "link") as go_on:
        while go_on():
            for flags in (os.O_RDONLY, os.O_WRONLY | os.O_TRUNC, CREATE):
                try:
                    descriptor, found = root.open_with_stat(b"file", flags, 0o644)
                except UnsafePathError as error:
                    assert error.kind in (PathKind.COMPONENT_LINK, PathKind.COMPONENT_REDIRECTED)
                    outcomes["refused"] += 1
                    continue
                outcomes["done"] += 1
                assert found.st_ino != before[-1][1]
                os.close(descriptor)
    assert state(outside) == before
    assert outcomes["refused"] and outcomes["done"]


def test_the_swapper_does_catch_code_that_checks_first_and_acts_then(vault: Path, outside: Path) -> None:
    furnish(vault / "d", "inside")
    before = state(outside)
    with swapping(vault, "d", "out") as go_on:
        while go_on():
            if not (vault / "d").is_symlink():
                time.sleep(0.0001)  # on one CPU nobody gets in between otherwise
                (vault / "d" / "victim").write_text("inside")
            if state(outside) != before:
                return
    pytest.fail("the swapper caught nobody: these tests prove nothing here")
