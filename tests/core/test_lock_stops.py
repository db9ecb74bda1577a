"""Reapers at the worst moment: many at once over many rounds, one stopped between any two of its steps, odd clocks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.core.lock_support import (
    FORK,
    GUARD,
    LockVault,
    dead_pid,
    drive,
    in_processes,
    make_our_lock,
    our_record,
)
from vaultfs import kernel
from vaultfs.locks.liveness import Clocks, Judge
from vaultfs.locks.reaper import Removal
from vaultfs.locks.records import encode, whoami

NOTE = b"note"
REAPERS = 8
STEPS = ("mkdir", "open", "write", "fchmod", "unlink", "rmdir", "stat")


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[LockVault]:
    with LockVault(tmp_path / "vault") as vault:
        yield vault


@pytest.mark.parametrize("rounds", [60, pytest.param(2000, marks=[pytest.mark.full, pytest.mark.timeout(600)])])
def test_eight_reapers_have_one_winner_in_each_round_and_none_removes_a_successors_lock(
    shelf: LockVault, rounds: int
) -> None:
    """The winner's successor takes the name while the others are still at it."""
    dead = dead_pid()
    turn, ranks, wins, taken = FORK.Barrier(REAPERS), FORK.Value("i"), FORK.Value("i"), FORK.Value("i")

    def reap() -> None:
        with ranks.get_lock():
            rank = ranks.value
            ranks.value += 1
        with LockVault(shelf.path) as own:
            survey = own.locks.survey()
            for number in range(rounds):
                if rank == 0:
                    make_our_lock(shelf.path / "note.lock", dead)
                turn.wait(GUARD)
                report = own.locks.inspect(NOTE)
                if report is not None and report.pid == dead and survey.reap(report) is Removal.REMOVED:
                    with wins.get_lock():
                        wins.value += 1
                held = own.locks.try_acquire(NOTE)
                if held is not None:
                    held.assert_owned()
                    held.release()
                    with taken.get_lock():
                        taken.value += 1
                turn.wait(GUARD)
                if rank == 0:
                    assert wins.value <= number + 1
                    assert not (shelf.path / "note.lock").exists()
                turn.wait(GUARD)

    in_processes(REAPERS, reap)
    assert taken.value >= rounds, "in each round somebody got the lock"
    # An acquisition reaps as well, so not every round has a winner here; none has two.
    assert 0 < wins.value <= rounds


def _acquire_and_stop(vault: Path, step: int) -> None:
    """Acquires and releases the lock, and stops before the system call number `step` of the protocol."""
    with LockVault(vault) as shelf:
        left = step

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def stepping(*arguments: Any, **keywords: Any) -> Any:
                nonlocal left
                left -= 1
                if left == -1:
                    os.kill(os.getpid(), signal.SIGSTOP)
                return call(*arguments, **keywords)

            return stepping

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        kernel.renameat2 = counted(kernel.renameat2)
        with shelf.locks.acquire(NOTE, GUARD) as held:
            held.assert_owned()
    os._exit(0)


def test_a_reaper_stopped_between_any_two_steps_never_hurts_a_lock_that_changed_hands(tmp_path: Path) -> None:
    """Before it has its own lock somebody else gets it, and keeps it; once it has, it keeps it, though stopped.

    Stopped with an empty lock directory, it is overtaken when that is stale; that is short here.
    """
    with LockVault(tmp_path / "vault", stale=0.05) as shelf:
        _overtake_at_each_step(shelf)


def _overtake_at_each_step(shelf: LockVault) -> None:
    lock = shelf.path / "note.lock"
    overtaken = kept = 0
    for step in range(200):
        make_our_lock(lock, dead_pid())
        reaper = FORK.Process(target=_acquire_and_stop, args=(shelf.path, step))
        reaper.start()
        assert reaper.pid is not None
        try:
            _, status = os.waitpid(reaper.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                assert os.waitstatus_to_exitcode(status) == 0
                break
            holder = shelf.locks.inspect(NOTE)
            if holder is not None and holder.pid == reaper.pid:
                assert drive(shelf.locks, NOTE, 0.03)[0] is None, step
                kept += 1
                os.kill(reaper.pid, signal.SIGCONT)
            else:
                held, who = drive(shelf.locks, NOTE, GUARD)
                assert held is not None, (step, who)
                overtaken += 1
                os.kill(reaper.pid, signal.SIGCONT)
                time.sleep(0.02)  # for what it was at; a reaper that would do harm does it at once
                held.assert_owned()
                assert shelf.other().try_acquire(NOTE) is None
                held.release()
            _, status = os.waitpid(reaper.pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0, step
            assert not lock.exists(), step
        finally:
            if reaper.is_alive():
                reaper.kill()
    else:
        raise AssertionError("it never came through")
    assert overtaken > 5 and kept > 3


class ShiftedClocks(Clocks):
    """The machine's clocks, each set wrong by so many seconds."""

    def __init__(self, *, wall: float = 0.0, boot: float = 0.0) -> None:
        self._wall, self._boot = wall, boot

    def wall(self) -> float:
        return super().wall() + self._wall

    def boot(self) -> float:
        return super().boot() + self._boot


DAY = 86400.0
WRONG = [{"wall": DAY}, {"wall": -DAY}, {"boot": DAY}, {"boot": -DAY}, {"wall": DAY, "boot": DAY}]


@pytest.mark.parametrize("shift", WRONG, ids=str)
@pytest.mark.parametrize("file_clock", [0.0, DAY, -DAY], ids=["files right", "files ahead", "files behind"])
def test_with_clocks_wrong_by_a_day_no_live_lock_is_stolen_and_no_dead_one_is_immortal(
    shelf: LockVault, shift: dict[str, float], file_clock: float
) -> None:
    judge = Judge(whoami(), stale=0.05, clocks=ShiftedClocks(**shift))
    mine = shelf.other(judge=judge)
    lock = shelf.path / "note.lock"

    def touch() -> None:
        now = lock.stat().st_mtime + file_clock
        os.utime(lock, (now, now))

    with shelf.locks.acquire(NOTE):
        touch()
        for _ in range(3):
            assert drive(mine, NOTE, 0.03)[0] is None
    make_our_lock(lock, dead_pid())
    touch()
    held, who = drive(mine, NOTE, 2.0)
    assert held is not None, who
    held.release()
    # A record that does not say where its number counts, of nobody: once stale, by the clock or by watching.
    record = our_record(dead_pid(), host=None, boot_id=None, start_time=None, pid_ns=None, time_ns=None, tool=None)
    lock.mkdir()
    (lock / ".owner.json").write_bytes(encode(record))
    (lock / f".lease-{record.token}").write_text(record.token + "\n")
    touch()
    held, who = drive(mine, NOTE, 2.0)
    assert held is not None, who
    held.release()
