"""The fence: one daemon for a vault, whoever dies, freezes, or sits on another host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.core.lock_support import FORK, GUARD, LockVault, dead_pid, in_processes
from vaultfs.errors import (
    AlreadyServedError,
    BadRequestError,
    FenceLostError,
    LockBusyError,
    StateDirectoryError,
    VaultGoneError,
)
from vaultfs.locks import Fence, FenceRecord
from vaultfs.locks import fence as fence_module
from vaultfs.locks.fence import RECORD_SIZE, _encode
from vaultfs.locks.liveness import Clocks, Judge
from vaultfs.locks.records import whoami


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[LockVault]:
    with LockVault(tmp_path / "vault") as vault:
        yield vault


def claim(shelf: LockVault, **options: Any) -> Fence:
    fence = Fence.acquire(shelf.root, shelf.state, **{"wait": 0.0, **options})
    shelf.stack.callback(_release, fence)
    return fence


def _release(fence: Fence) -> None:
    with contextlib.suppress(FenceLostError):  # some tests lose it on purpose
        fence.release()


def record_of(shelf: LockVault) -> FenceRecord:
    return msgspec.json.decode((shelf.path / ".vaultfs/fence").read_bytes(), type=FenceRecord)


def plant(shelf: LockVault, **fields: Any) -> None:
    """A fence as another process left it: running, of this host, unless `fields` say otherwise."""
    me = whoami()
    record = FenceRecord(
        **{
            "attempt": "predecessor",
            "pid": dead_pid(),
            "host": me.host,
            "boot_id": me.boot_id,
            "start_time": 1,
            "created_at": "2020-02-02T02:02:02.000Z",
            "heartbeat": 7,
            "heartbeat_at": "2020-02-02T02:02:02.000Z",
            "lease_expires_at": "2020-02-02T02:03:02.000Z",
            "pid_ns": me.pid_ns,
            "time_ns": me.time_ns,
            **fields,
        }
    )
    (shelf.path / ".vaultfs/fence").write_bytes(_encode(record))


HOLDER = """
    import sys, time
    from vaultfs.locks import Fence
    from vaultfs.root import VaultRoot
    from vaultfs.state import StateDirectory

    root = VaultRoot.open(sys.argv[1])
    state = StateDirectory.open(root)
    fence = Fence.acquire(root, state, lease=0.3, attempt="holder")
    state.name("staging")
    (__import__("pathlib").Path(sys.argv[1]) / ".vaultfs/staging/holder").mkdir()
    if sys.argv[2] == "inside":
        with fence.gate():
            print("held", flush=True)
            sys.stdin.readline()
    else:
        print("held", flush=True)
        sys.stdin.readline()
    try:
        with fence.gate():
            print("changed", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


class Holder:
    """Another daemon, which goes on when it is told to and says what became of its next change."""

    def __init__(self, shelf: LockVault, where: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(HOLDER), str(shelf.path), where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        shelf.stack.callback(self.end)
        assert self.says() == "held"

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> str:
        os.kill(self.process.pid, signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.says()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


# -- one at a time


def test_the_second_is_refused_and_told_who_serves(shelf: LockVault) -> None:
    claim(shelf)
    with pytest.raises(AlreadyServedError) as refused:
        claim(shelf)
    assert refused.value.pid == os.getpid()
    assert refused.value.since == record_of(shelf).created_at
    assert refused.value.host == whoami().host
    assert refused.value.start_time == whoami().start_time
    assert str(os.getpid()) in str(refused.value)


def test_of_many_at_once_exactly_one_gets_it(shelf: LockVault) -> None:
    results = FORK.Queue()
    over = FORK.Barrier(6)

    def compete() -> None:
        try:
            fence = Fence.acquire(shelf.root, shelf.state, wait=0.2)
        except AlreadyServedError:
            results.put("refused")
            over.wait(GUARD)
            return
        results.put("held")
        over.wait(GUARD)  # nobody leaves before everybody has an answer
        fence.release()

    in_processes(6, compete)
    assert sorted(results.get(timeout=GUARD) for _ in range(6)) == ["held"] + ["refused"] * 5


def test_nobody_judges_or_makes_a_fence_while_another_does(shelf: LockVault) -> None:
    with open(shelf.path / ".vaultfs/fence.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(AlreadyServedError, match="claiming"):
            claim(shelf)
    claim(shelf)


def test_released_means_free_at_once_though_the_process_lives(shelf: LockVault) -> None:
    first = claim(shelf)
    first.release()
    first.release()
    assert record_of(shelf).retired
    claim(shelf).assert_owned()


def test_a_newcomer_waits_for_the_holder_to_go(shelf: LockVault) -> None:
    first = claim(shelf)
    timer = threading.Timer(0.15, first.release)
    timer.start()
    claim(shelf, wait=GUARD).assert_owned()
    timer.join()


def test_fences_of_other_names_do_not_meet(shelf: LockVault) -> None:
    claim(shelf)
    claim(shelf, name="index")
    claim(shelf, name="index.lock")
    with pytest.raises(AlreadyServedError):
        claim(shelf, name="index")
    for name in ("a/b", "..\0", "ä", "x" * 65):
        with pytest.raises(BadRequestError):
            claim(shelf, name=name)
    with pytest.raises(BadRequestError):
        claim(shelf, attempt="../staging")


# -- taking over


@pytest.mark.parametrize("gone", [{}, {"boot_id": "earlier"}, {"pid": os.getpid()}])
def test_a_holder_that_is_gone_is_taken_over_at_once(shelf: LockVault, gone: dict[str, Any]) -> None:
    plant(shelf, **gone)
    fence = claim(shelf)
    fence.assert_owned()
    assert fence.seized is None  # the dead do not revive: their staging is left to recovery as it is
    assert [name for name in os.listdir(shelf.path / ".vaultfs") if "taken" in name] == []


def test_a_killed_holder_is_taken_over_at_once(shelf: LockVault) -> None:
    holder = Holder(shelf, "outside")
    holder.process.kill()
    holder.process.wait()
    claim(shelf).assert_owned()


def test_an_unreadable_record_counts_as_expired_at_the_second_look(shelf: LockVault) -> None:
    (shelf.path / ".vaultfs/fence").write_text("{")
    with pytest.raises(AlreadyServedError):
        claim(shelf)
    claim(shelf, wait=5.0).assert_owned()


@pytest.mark.parametrize("elsewhere", [{"host": "there"}, {"pid_ns": 1}])
def test_a_holder_elsewhere_is_taken_over_when_its_heartbeat_stood_still_for_a_whole_lease(
    shelf: LockVault, elsewhere: dict[str, Any]
) -> None:
    """Long expired by its own clock, which proves nothing; and dead by number, which counts elsewhere."""
    (shelf.path / ".vaultfs" / shelf.state.name("staging").decode() / "predecessor").mkdir()
    lease = {"heartbeat_at": "2020-02-02T02:02:02.000Z", "lease_expires_at": "2020-02-02T02:02:02.300Z"}
    plant(shelf, **elsewhere, **lease)
    with pytest.raises(AlreadyServedError):
        claim(shelf)
    fence = claim(shelf, wait=GUARD)
    fence.assert_owned()
    assert fence.seized is not None
    assert os.listdir(shelf.path / ".vaultfs/staging") == [fence.seized]


class LoudClocks(Clocks):
    """40 seconds go by between two looks of a newcomer, and at each of the first `beats` the holder's heart beats."""

    def __init__(self, shelf: LockVault, beats: int) -> None:
        self.shelf = shelf
        self.beats = beats
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 40.0
        if self.beats > 0:  # after the newcomer read the record: it sees this beat at its next look
            self.beats -= 1
            plant_in_place(self.shelf, heartbeat=100 + self.beats)
        return self.now


def test_a_heartbeat_in_every_lease_keeps_newcomers_out_and_silence_lets_them_in(shelf: LockVault) -> None:
    plant(shelf, host="there")
    with pytest.raises(AlreadyServedError):
        claim(shelf, wait=0.4, judge=Judge(whoami(), clocks=LoudClocks(shelf, 1000)))
    claim(shelf, wait=GUARD, judge=Judge(whoami(), clocks=LoudClocks(shelf, 3))).assert_owned()


def plant_in_place(shelf: LockVault, **fields: Any) -> None:
    """A heartbeat as the holder writes it: one pwrite into the same inode."""
    path = shelf.path / ".vaultfs/fence"
    record = msgspec.structs.replace(record_of(shelf), **fields)
    descriptor = os.open(path, os.O_WRONLY)
    os.pwrite(descriptor, _encode(record), 0)
    os.close(descriptor)


def test_a_daemon_frozen_outside_a_change_is_taken_over_and_finds_out_before_its_next(shelf: LockVault) -> None:
    holder = Holder(shelf, "outside")
    os.kill(holder.process.pid, signal.SIGSTOP)
    with pytest.raises(AlreadyServedError) as refused:
        claim(shelf)
    assert refused.value.pid == holder.process.pid
    fence = claim(shelf, wait=GUARD)
    assert os.listdir(shelf.path / ".vaultfs/staging") == [fence.seized]
    assert holder.go_on() == "FenceLostError"
    fence.assert_owned()


def test_a_daemon_frozen_inside_a_change_is_not_taken_over(shelf: LockVault) -> None:
    holder = Holder(shelf, "inside")
    os.kill(holder.process.pid, signal.SIGSTOP)
    with pytest.raises(AlreadyServedError, match="in the middle of a change") as refused:
        claim(shelf, wait=1.0)
    assert refused.value.pid == holder.process.pid
    assert os.listdir(shelf.path / ".vaultfs/staging") == ["holder"]
    assert holder.go_on() == "changed"


def test_a_record_that_changed_under_the_takeover_is_put_back(
    shelf: LockVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host, which our flock does not hold up, claims the fence between our judgement and our rename."""
    plant(shelf)
    real = fence_module.kernel.renameat2

    def late(*arguments: Any) -> None:
        monkeypatch.undo()
        (shelf.path / ".vaultfs/fence").unlink()
        plant(shelf, attempt="somebody-else", host="there")
        real(*arguments)

    monkeypatch.setattr(fence_module.kernel, "renameat2", late)
    with pytest.raises(AlreadyServedError):
        claim(shelf)
    assert record_of(shelf).attempt == "somebody-else"
    assert [name for name in os.listdir(shelf.path / ".vaultfs") if "taken" in name] == []


# -- holding it


def test_a_lease_that_ran_out_while_nobody_took_over_is_renewed(shelf: LockVault) -> None:
    fence = claim(shelf, lease=0.001)
    time.sleep(0.01)
    fence.assert_owned()
    before = record_of(shelf)
    fence.heartbeat()
    assert record_of(shelf).heartbeat == before.heartbeat + 1
    assert not record_of(shelf).retired
    assert (shelf.path / ".vaultfs/fence").stat().st_size == RECORD_SIZE


def lose(shelf: LockVault, how: str) -> None:
    fence = shelf.path / ".vaultfs/fence"
    if how == "removed":
        fence.unlink()
    elif how == "replaced":
        data = fence.read_bytes()
        fence.unlink()
        fence.write_bytes(data)
    elif how == "rewritten":
        plant_in_place(shelf, attempt="somebody-else")
    else:
        (shelf.path / ".vaultfs").rename(shelf.path / "moved")
        (shelf.path / ".vaultfs").mkdir()


@pytest.mark.parametrize("how", ["removed", "replaced", "rewritten", "state moved"])
def test_a_lost_fence_stops_every_change_for_good_and_says_so_at_release(shelf: LockVault, how: str) -> None:
    fence = claim(shelf)
    lose(shelf, how)
    for action in (fence.assert_owned, fence.heartbeat):
        with pytest.raises(FenceLostError):
            action()
    with pytest.raises(FenceLostError), fence.gate():
        pytest.fail("let a change through")
    assert fence.lost
    before = {path: path.read_bytes() for path in shelf.path.rglob("fence*")}
    with pytest.raises(FenceLostError):
        fence.release()
    assert {path: path.read_bytes() for path in shelf.path.rglob("fence*")} == before  # not ours to write
    fence.release()  # closed all the same


def test_a_vault_that_was_moved_stops_changes_until_it_is_back(shelf: LockVault) -> None:
    fence = claim(shelf)
    away = shelf.path.with_name("away")
    shelf.path.rename(away)
    with pytest.raises(VaultGoneError) as gone, fence.gate():
        pytest.fail("let a change through")
    assert not isinstance(gone.value, FenceLostError)
    away.rename(shelf.path)
    with fence.gate():
        pass


def test_many_changes_may_be_under_way_and_the_gate_is_open_until_the_last_is_done(shelf: LockVault) -> None:
    fence = claim(shelf)
    newcomer = os.open(shelf.path / ".vaultfs/gate", os.O_RDWR)
    first, second = fence.gate(), fence.gate()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(BlockingIOError):
        fcntl.flock(newcomer, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second.__exit__(None, None, None)
    fcntl.flock(newcomer, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(LockBusyError), fence.gate(blocking=False):
        pytest.fail("let a change through while somebody takes over")
    os.close(newcomer)
    with fence.gate(blocking=False):
        pass


def test_a_thread_does_the_heartbeats_until_release(shelf: LockVault) -> None:
    fence = claim(shelf)
    fence.keep(every=0.01)
    deadline = time.monotonic() + GUARD
    while record_of(shelf).heartbeat < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    fence.release()
    last = record_of(shelf)
    assert last.heartbeat >= 4
    assert last.retired
    time.sleep(0.05)
    assert record_of(shelf) == last


def test_a_thread_whose_fence_is_lost_stops_and_never_fights_back(
    shelf: LockVault, caplog: pytest.LogCaptureFixture
) -> None:
    fence = claim(shelf)
    fence.keep(every=0.01)
    plant_in_place(shelf, attempt="somebody-else")
    deadline = time.monotonic() + GUARD
    while not fence.lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert record_of(shelf).attempt == "somebody-else"
    with pytest.raises(FenceLostError):
        fence.release()


def test_a_child_process_does_not_release_the_fence(shelf: LockVault) -> None:
    fence = claim(shelf)
    in_processes(1, fence.release)
    fence.assert_owned()
    assert not record_of(shelf).retired


@pytest.mark.parametrize("name", ["fence", "fence.lock", "gate"])
@pytest.mark.parametrize("kind", ["link", "directory", "fifo"])
def test_what_is_no_plain_file_is_refused(shelf: LockVault, name: str, kind: str) -> None:
    path = shelf.path / ".vaultfs" / name
    if kind == "link":
        path.symlink_to(shelf.path / "target")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(StateDirectoryError):
        claim(shelf)
    assert not (shelf.path / "target").exists()
