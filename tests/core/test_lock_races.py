"""Locks under contention by real processes: one holder at a time, one reaper that wins, nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.lock_support import FORK, GUARD, LockVault, dead_pid, drive, in_processes, make_our_lock
from vaultfs.errors import LockBrokenError
from vaultfs.locks import PathLocks, making, path_lock
from vaultfs.locks.reaper import Removal, remove_judged
from vaultfs.locks.records import LockContents, look_into, timestamp
from vaultfs.root import VaultRoot
from vaultfs.state import StateDirectory

PROCESSES = 8


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[LockVault]:
    with LockVault(tmp_path / "vault") as vault:
        yield vault


def _count_up(vault: Path, rounds: int) -> None:
    """Read, add one, write: loses counts unless each is alone."""
    with VaultRoot.open(vault) as root, StateDirectory.open(root) as state:
        locks = PathLocks(root, state)
        for _ in range(rounds):
            with locks.acquire(b"counter", GUARD) as held:
                value = int((vault / "counter").read_text())
                (vault / "counter").write_text(str(value + 1))
                held.assert_owned()


def test_eight_processes_count_exactly_and_leave_no_lock(shelf: LockVault) -> None:
    (shelf.path / "counter").write_text("0")
    in_processes(PROCESSES, _count_up, shelf.path, 150)
    assert int((shelf.path / "counter").read_text()) == PROCESSES * 150
    assert sorted(os.listdir(shelf.path)) == [".vaultfs", "counter"]
    assert shelf.pending == []


def test_without_the_lock_the_same_counters_lose_counts(shelf: LockVault) -> None:
    """Or the test above would prove nothing."""
    (shelf.path / "counter").write_text("0")

    def careless() -> None:
        for _ in range(150):
            value = int((shelf.path / "counter").read_text() or "0")
            time.sleep(0.0002)
            (shelf.path / "counter").write_text(str(value + 1))

    in_processes(PROCESSES, careless)
    assert int((shelf.path / "counter").read_text()) < PROCESSES * 150


def test_whoever_sees_a_lock_of_ours_sees_it_complete(shelf: LockVault) -> None:
    """A second process opens the lock directory as often as it can while it comes and goes a few hundred times."""
    looks, incomplete = FORK.Value("i"), FORK.Value("i")
    over = FORK.Event()

    def watch() -> None:
        while not over.is_set():
            try:
                lock = os.open(shelf.path / "note.lock", os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue
            try:
                owner = os.open(".owner.json", os.O_RDONLY, dir_fd=lock)
            except FileNotFoundError:
                # Being released is allowed, but then its lease went first.
                incomplete.value += any(name.startswith(".lease-") for name in os.listdir(lock))
            else:
                looks.value += 1
                record = json.loads(os.read(owner, 4096))
                incomplete.value += record["v"] != 1 or record["pid"] == os.getpid()
                os.close(owner)
            os.close(lock)

    watcher = FORK.Process(target=watch)
    watcher.start()
    try:
        rounds, deadline = 0, time.monotonic() + GUARD
        while (rounds < 400 or looks.value < 100) and time.monotonic() < deadline:
            with shelf.locks.acquire(b"note"):
                time.sleep(0.0005 * (rounds % 4 == 0))  # at times long enough for the watcher to get the only CPU
            rounds += 1
    finally:
        over.set()
        watcher.join(GUARD)
    assert watcher.exitcode == 0
    assert looks.value >= 100
    assert incomplete.value == 0


def test_of_many_reapers_one_wins_and_none_removes_a_successor(shelf: LockVault) -> None:
    """Each of eight finds the same dead lock, reaps it and holds its own for a moment: never two at once."""
    results = FORK.Queue()

    def reap(rounds: int, start: float) -> None:
        with VaultRoot.open(shelf.path) as root, StateDirectory.open(root) as state:
            locks = PathLocks(root, state)
            for number in range(rounds):
                time.sleep(max(0.0, start + number * 0.12 - time.monotonic()))
                with locks.acquire(b"note%d" % number, GUARD) as held:
                    inside = os.open(shelf.path / f"inside{number}", os.O_CREAT | os.O_EXCL)  # fails if two are inside
                    held.assert_owned()
                    os.close(inside)
                    os.unlink(shelf.path / f"inside{number}")
                results.put(number)

    rounds = 8
    for number in range(rounds):
        make_our_lock(shelf.path / f"note{number}.lock", dead_pid())
    in_processes(PROCESSES, reap, rounds, time.monotonic() + 0.2)
    assert sorted(results.get(timeout=GUARD) for _ in range(rounds * PROCESSES)) == sorted(
        list(range(rounds)) * PROCESSES
    )
    assert [name for name in os.listdir(shelf.path) if name.endswith(".lock")] == []


def test_a_reaper_that_was_stopped_between_looking_and_removing_does_not_touch_the_successor(
    shelf: LockVault,
) -> None:
    """The slow reaper judged the dead lock through a descriptor; by the time it removes, another lock has the name."""
    dead = make_our_lock(shelf.path / "note.lock", dead_pid())
    slow = os.open(dead, os.O_RDONLY | os.O_DIRECTORY)
    judged = look_into(slow)
    held, _ = drive(shelf.locks, b"note")  # reaps, and takes its place
    assert held is not None
    assert remove_judged(shelf.root.fd, b"note.lock", slow, judged) is Removal.LOST
    os.close(slow)
    held.assert_owned()
    held.release()


def test_who_cannot_unlink_the_lease_that_it_saw_removes_nothing(shelf: LockVault) -> None:
    dead = make_our_lock(shelf.path / "note.lock", dead_pid())
    slow = os.open(dead, os.O_RDONLY | os.O_DIRECTORY)
    judged = look_into(slow)
    next(dead.glob(".lease-*")).unlink()  # a faster one has begun
    assert remove_judged(shelf.root.fd, b"note.lock", slow, judged) is Removal.LOST
    os.close(slow)
    assert os.listdir(dead) == [".owner.json"]


def test_a_lock_that_is_not_at_its_name_any_more_is_not_stripped(shelf: LockVault) -> None:
    dead = make_our_lock(shelf.path / "note.lock", dead_pid())
    slow = os.open(dead, os.O_RDONLY | os.O_DIRECTORY)
    judged = look_into(slow)
    dead.rename(shelf.path / "aside")
    make_our_lock(dead, os.getpid())
    assert remove_judged(shelf.root.fd, b"note.lock", slow, judged) is Removal.LOST
    os.close(slow)
    assert len(os.listdir(shelf.path / "aside")) == 2
    assert len(os.listdir(dead)) == 2


def test_a_directory_that_appears_between_look_and_rename_is_not_replaced(
    shelf: LockVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain rename replaces an empty directory: that is somebody's ownerless lock."""
    theirs: list[int] = []

    def late() -> str:
        monkeypatch.undo()
        (shelf.path / "note.lock").mkdir()
        theirs.append((shelf.path / "note.lock").stat().st_ino)
        return timestamp()

    monkeypatch.setattr(making, "timestamp", late)
    assert isinstance(shelf.locks.begin(b"note").step(), float)
    assert [(shelf.path / "note.lock").stat().st_ino] == theirs
    assert shelf.pending == []


def test_a_release_that_is_caught_half_way_is_no_reason_to_wait(
    shelf: LockVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = make_our_lock(shelf.path / "note.lock", os.getpid())

    def late(descriptor: int) -> LockContents:
        monkeypatch.undo()
        for entry in lock.iterdir():
            entry.unlink()
        contents = look_into(descriptor)
        lock.rmdir()
        return contents

    monkeypatch.setattr(path_lock, "look_into", late)
    held = shelf.locks.begin(b"note", 0.0).step()
    assert held is not None
    assert not isinstance(held, float)
    held.release()


HOLDER = """
    import sys, time
    from vaultfs.locks import PathLocks, making, path_lock
    from vaultfs.root import VaultRoot
    from vaultfs.state import StateDirectory

    root = VaultRoot.open(sys.argv[1])
    held = PathLocks(root, StateDirectory.open(root)).acquire(b"note")
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(shelf: LockVault) -> Iterator[subprocess.Popen[str]]:
    """A program that holds the lock of `note` until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(shelf.path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_live_owner_is_never_reaped_however_old_and_even_when_stopped(
    shelf: LockVault, holder: subprocess.Popen[str]
) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    os.utime(shelf.path / "note.lock", (0, 0))
    held, who = drive(shelf.locks, b"note", 0.3)
    assert held is None
    assert str(holder.pid) in str(who)
    assert (shelf.path / "note.lock/.owner.json").exists()


def test_a_killed_owner_is_reaped_at_once_also_as_a_zombie(shelf: LockVault, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, and not waited for: a zombie
    held, who = drive(shelf.locks, b"note", 5.0)
    assert held is not None, who
    held.release()


def test_a_waiter_gets_the_lock_when_its_owner_releases(shelf: LockVault) -> None:
    other = shelf.other()
    held = shelf.locks.acquire(b"note")
    acquisition = other.begin(b"note", GUARD)
    assert isinstance(acquisition.step(), float)
    assert isinstance(acquisition.step(), float)
    held.release()
    time.sleep(0.003)
    second = acquisition.step()
    assert second is not None
    assert not isinstance(second, float)
    second.release()


def test_at_the_deadline_the_answer_is_busy_and_a_timeout_of_zero_still_looks_once(shelf: LockVault) -> None:
    other = shelf.other()
    taken = other.acquire(b"note")
    acquisition = shelf.locks.begin(b"note", 0.0)
    assert acquisition.step() is None
    assert str(os.getpid()) in str(acquisition.holder)
    taken.release()
    free = shelf.locks.begin(b"note", 0.0).step()
    assert free is not None
    assert not isinstance(free, float)
    free.release()


def test_between_two_locks_of_ours_at_one_path_the_name_is_free_for_a_moment(shelf: LockVault) -> None:
    """Peers that meet three releases in a row give up: `step` asks for a pause instead of taking the next at once."""
    shelf.locks.acquire(b"note").release()
    step = shelf.locks.begin(b"note").step()
    assert isinstance(step, float)
    assert 0 < step <= 0.002
    elsewhere = shelf.locks.begin(b"another note").step()  # nobody waits for that one
    assert not isinstance(elsewhere, float)
    assert elsewhere is not None
    elsewhere.release()


class ShakyRoot:
    """A root in which the directory of a lock seems to vanish in the walk, `times` times; the file's own does not."""

    def __init__(self, root: VaultRoot, times: int, number: int) -> None:
        self._root = root
        self.times = times
        self.number = number

    def __getattr__(self, name: str) -> object:
        return getattr(self._root, name)

    def parent(self, path: bytes) -> object:
        if path.endswith(b".lock") and self.times > 0:
            self.times -= 1
            raise OSError(self.number, "vanished", path)
        return self._root.parent(path)


def shaky(shelf: LockVault, times: int, number: int = errno.ENOENT) -> PathLocks:
    locks = shelf.other()
    locks._root = ShakyRoot(shelf.root, times, number)  # type: ignore[assignment]
    return locks


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.ESTALE])
def test_a_directory_that_vanishes_under_the_look_is_looked_at_again_three_times(shelf: LockVault, number: int) -> None:
    acquisition = shaky(shelf, 3, number).begin(b"note", GUARD)
    for _ in range(3):
        assert acquisition.step() == 0.01
    held = acquisition.step()
    assert held is not None
    assert not isinstance(held, float)
    held.release()


def test_retries_used_up_are_an_error_and_the_deadline_passed_is_busy(shelf: LockVault) -> None:
    acquisition = shaky(shelf, 4).begin(b"note", GUARD)
    for _ in range(3):
        acquisition.step()
    with pytest.raises(LockBrokenError):
        acquisition.step()
    assert shaky(shelf, 4).begin(b"note", 0.0).step() is None
