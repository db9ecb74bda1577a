"""What the lock tests share: a vault with locks, lock directories made by hand, and processes of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from vaultfs.locks import HeldLock, PathLocks
from vaultfs.locks.records import OwnerRecord, encode, timestamp, whoami
from vaultfs.root import VaultRoot
from vaultfs.state import StateDirectory

FORK = multiprocessing.get_context("fork")
GUARD = 60.0  # seconds after which a child counts as hanging; nothing is asserted about it
TOKEN = "11111111-2222-4333-8444-555555555555"


class LockVault:
    """A vault in `path`; `locks` is one program that uses it, `other()` is another (in the same process)."""

    def __init__(self, path: Path, **options: Any) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        self.stack = ExitStack()
        self.root = self.stack.enter_context(VaultRoot.open(path))
        self.state = self.stack.enter_context(StateDirectory.open(self.root))
        self.locks = self.other(**options)

    def other(self, **options: Any) -> PathLocks:
        locks = PathLocks(self.root, self.state, **options)
        self.stack.callback(locks.close)
        return locks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    @property
    def pending(self) -> list[str]:
        return os.listdir(self.path / ".vaultfs/pending") if (self.path / ".vaultfs/pending").exists() else []


def make_lock(
    path: Path,
    *,
    pid: int,
    token: str = TOKEN,
    age: float = 0.0,
    owner: bytes | None = None,
    lease: bool = True,
    **keys: Any,
) -> Path:
    """A lock directory as another tool leaves it, last touched `age` seconds ago; `keys` go into the owner record."""
    path.mkdir()
    if owner is None:
        owner = json.dumps({"v": 1, "pid": pid, "token": token, "created_at": timestamp(), **keys}).encode() + b"\n"
    (path / ".owner.json").write_bytes(owner)
    if lease:
        (path / f".lease-{token}").write_text(token + "\n")
    set_age(path, age)
    return path


def our_record(pid: int, **keys: Any) -> OwnerRecord:
    """A full record of ours, in this machine's and namespace's terms, of a process that never was."""
    me = whoami()
    fields = {
        "host": me.host,
        "boot_id": me.boot_id,
        "start_time": 1,
        "pid_ns": me.pid_ns,
        "time_ns": me.time_ns,
        "tool": "vaultfs",
    }
    return OwnerRecord(v=1, pid=pid, token=TOKEN, created_at=timestamp(), **{**fields, **keys})


def make_our_lock(path: Path, pid: int, **keys: Any) -> Path:
    return make_lock(path, pid=pid, owner=encode(our_record(pid, **keys)))


def set_age(path: Path, age: float) -> None:
    then = time.time() - age
    os.utime(path, (then, then))


def dead_pid() -> int:
    """The number of a process that has ended and been waited for."""
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def in_processes(count: int, function: Callable[..., None], *arguments: Any) -> None:
    """Runs `function` in `count` processes at once and fails if any of them failed or hung."""
    barrier = FORK.Barrier(count)
    processes = [FORK.Process(target=_run, args=(barrier, function, arguments)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(GUARD)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert codes == [0] * count, codes


def _run(barrier: Any, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    barrier.wait(GUARD)
    function(*arguments)


def drive(locks: PathLocks, path: bytes, timeout: float = 5.0) -> tuple[HeldLock | None, str | None]:
    """The lock or None, and who had it."""
    acquisition = locks.begin(path, timeout)
    while isinstance(step := acquisition.step(), float):
        time.sleep(step)
    return step, acquisition.holder
