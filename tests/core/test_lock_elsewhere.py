"""Owners in real namespaces, names at the limit, and two daemons that start at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.lock_support import FORK, GUARD, LockVault, drive, in_processes
from vaultfs.errors import AlreadyServedError
from vaultfs.locks import Fence
from vaultfs.locks.liveness import Judge, Processes
from vaultfs.locks.records import whoami
from vaultfs.root import VaultRoot
from vaultfs.state import StateDirectory

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
HOLD = """
import sys
from vaultfs.locks import PathLocks
from vaultfs.root import VaultRoot
from vaultfs.state import StateDirectory
with VaultRoot.open(sys.argv[1]) as root, StateDirectory.open(root) as state:
    held = PathLocks(root, state).acquire(b"note")
    print("locked", flush=True)
    sys.stdin.readline()
    held.release()
"""


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[LockVault]:
    with LockVault(tmp_path / "vault") as vault:
        yield vault


@as_root
@pytest.mark.parametrize(
    ("words", "evidence"),
    [
        (["--pid", "--fork", "--mount-proc"], "another pid namespace"),
        (["--time", "--boottime", "86400", "--fork"], "another time namespace"),
    ],
    ids=["pid", "time"],
)
def test_an_owner_in_another_namespace_is_unknown_alive_or_dead(
    shelf: LockVault, words: list[str], evidence: str
) -> None:
    """Its number means nothing here: of the dead one it may be that of a living process of ours."""
    holder = subprocess.Popen(
        ["unshare", *words, "--kill-child", sys.executable, "-c", HOLD, str(shelf.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        report = shelf.locks.inspect(b"note")
        assert report is not None and report.verdict == "unknown" and evidence in report.evidence
        held, who = drive(shelf.locks, b"note", 0.05)
        assert held is None and who is not None and evidence in who
    finally:
        holder.kill()
        holder.wait()
    report = shelf.locks.inspect(b"note")
    assert report is not None and report.verdict == "unknown" and evidence in report.evidence


class HiddenProc(Processes):
    """A /proc mounted with hidepid, as seen by another user: nothing in it for a process of somebody else."""

    @staticmethod
    def _stat(path: str) -> list[bytes] | None:
        return None


def test_a_hidden_proc_proves_nothing(shelf: LockVault) -> None:
    judge = Judge(whoami(), stale=0.0, processes=HiddenProc())
    with shelf.locks.acquire(b"note"):
        other = shelf.other(judge=judge)
        report = other.survey().look().locks[0]
        assert (report.verdict, report.pid) == ("alive", os.getpid())
        assert drive(other, b"note", 0.03)[0] is None


@pytest.mark.parametrize(
    ("name", "private"),
    [
        (b"n" * 250, False),
        (b"n" * 251, True),
        (b"n" * 255, True),
        ("日".encode() * 83 + b"n", False),  # 250 bytes
        ("日".encode() * 83 + b"nn", True),  # 251
        ("日".encode() * 85, True),  # 255
    ],
    ids=["250", "251", "255", "250 in three-byte characters", "251 in them", "255 in them"],
)
def test_names_are_measured_in_bytes(shelf: LockVault, name: bytes, private: bool) -> None:
    (shelf.path / os.fsdecode(name)).touch()
    with shelf.locks.acquire(name) as held:
        assert held.private is private
        assert drive(shelf.other(), name, 0.02)[0] is None
        (told,) = shelf.locks.survey().look().locks
        assert told.path == name and told.lock_path.startswith(b".vaultfs/") is private
    assert shelf.locks.survey().look().locks == []


def _start(vault: Path, turn: object, rounds: int, held: object, both: object) -> None:
    with VaultRoot.open(vault) as root, StateDirectory.open(root) as state:
        for _ in range(rounds):
            turn.wait(GUARD)  # type: ignore[attr-defined]
            try:
                fence = Fence.acquire(root, state, wait=0.0)
            except AlreadyServedError:
                fence = None
            if fence is not None:
                with fence.gate(), held.get_lock():  # type: ignore[attr-defined]
                    held.value += 1  # type: ignore[attr-defined]
            turn.wait(GUARD)  # type: ignore[attr-defined]
            both.value = max(both.value, held.value)  # type: ignore[attr-defined]
            turn.wait(GUARD)  # type: ignore[attr-defined]
            if fence is not None:
                fence.assert_owned()
                held.value -= 1  # type: ignore[attr-defined]
                fence.release()


def test_two_daemons_that_start_at_once_200_times_never_both_get_the_fence(shelf: LockVault) -> None:
    turn, held, both = FORK.Barrier(2), FORK.Value("i"), FORK.Value("i")
    in_processes(2, _start, shelf.path, turn, 200, held, both)
    assert both.value == 1, "never two; and at least once one"
