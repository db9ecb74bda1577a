"""What stands where a lock should be: reaped when that is proven right, left alone and reported when not."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.core.lock_support import (
    FORK,
    GUARD,
    TOKEN,
    LockVault,
    dead_pid,
    drive,
    in_processes,
    make_lock,
    make_our_lock,
    our_record,
    set_age,
)
from tests.mount.harness import TEST_UID
from vaultfs import kernel
from vaultfs.errors import BadRequestError, ForeignLockError, LockBrokenError, LockBusyError
from vaultfs.locks import making, path_lock
from vaultfs.locks.records import encode

NOTE = b"note"


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[LockVault]:
    with LockVault(tmp_path / "vault") as vault:
        yield vault


def lock_of(shelf: LockVault) -> Path:
    return shelf.path / "note.lock"


def everything_in(path: Path) -> list[tuple[str, int, int]]:
    """All names below `path` with inode and size: equal if nobody touched anything."""
    return sorted(
        (entry, (status := os.lstat(os.path.join(directory, entry))).st_ino, status.st_size)
        for directory, directories, files in os.walk(path)
        for entry in directories + files
    )


# -- reaped


@pytest.mark.parametrize(
    "leave",
    [
        lambda lock: make_our_lock(lock, dead_pid()),
        lambda lock: make_our_lock(lock, os.getpid(), start_time=1),
        lambda lock: make_our_lock(lock, os.getpid(), boot_id="an earlier boot"),
        lambda lock: make_lock(lock, pid=dead_pid(), age=11),
        lambda lock: make_lock(lock, pid=dead_pid(), age=11, lease=False),
        lambda lock: make_lock(lock, pid=1, age=11, owner=b'{"v":1,"pid"', lease=False),
        lambda lock: (lock.mkdir(), set_age(lock, 11)),
    ],
    ids=[
        "ours, no such process",
        "ours, number used again",
        "ours, machine restarted",
        "shared, no such process",
        "shared without lease",
        "torn owner",
        "empty",
    ],
)
def test_what_a_dead_owner_left_is_reaped_by_the_next_who_asks(
    shelf: LockVault, leave: Callable[[Path], object]
) -> None:
    leave(lock_of(shelf))
    held = shelf.locks.try_acquire(NOTE)
    assert held is not None
    held.assert_owned()
    held.release()
    assert not lock_of(shelf).exists()


def test_residue_of_a_writer_that_died_is_removed_with_its_half_written_owner(shelf: LockVault) -> None:
    lock_of(shelf).mkdir()
    (lock_of(shelf) / f".owner.json.{dead_pid()}.1700000000000.0f-1e.tmp").write_text("{")
    set_age(lock_of(shelf), 11)
    held = shelf.locks.try_acquire(NOTE)
    assert held is not None
    held.release()


@pytest.mark.parametrize(
    "leave",
    [
        lambda lock: make_our_lock(lock, os.getpid(), start_time=None),
        lambda lock: make_our_lock(lock, dead_pid(), host="another host"),
        lambda lock: make_our_lock(lock, dead_pid(), pid_ns=1),
        lambda lock: make_our_lock(lock, dead_pid(), time_ns=1),
        lambda lock: make_lock(lock, pid=1, age=1e6),
        lambda lock: make_lock(lock, pid=dead_pid(), age=3),
        lambda lock: make_lock(lock, pid=1, owner=b'{"v":2,"pid":1,"token":"t","created_at":"x"}', age=1e6),
        lambda lock: (make_lock(lock, pid=1), (lock / ".owner.json").unlink(), set_age(lock, 1e6)),
        lambda lock: make_lock(lock, pid=1, owner=b"", age=1e6),
        lambda lock: lock.mkdir(),
    ],
    ids=[
        "ours, alive",
        "of another host",
        "of another pid namespace",
        "of another time namespace",
        "shared, alive",
        "shared, dead, young",
        "version 2",
        "lease without owner",
        "lease, and an owner that cannot be parsed",
        "empty, young",
    ],
)
def test_what_is_not_proven_dead_is_busy_and_stays_as_it_is(shelf: LockVault, leave: Callable[[Path], object]) -> None:
    leave(lock_of(shelf))
    before = everything_in(lock_of(shelf))
    with pytest.raises(LockBusyError):
        shelf.locks.acquire(NOTE, 0.06)
    assert everything_in(lock_of(shelf)) == before
    report = shelf.locks.inspect(NOTE)
    assert report is not None
    assert report.verdict in ("alive", "unknown")
    assert report.evidence


# -- hostile


def fifo_owner(lock: Path) -> None:
    lock.mkdir()
    os.mkfifo(lock / ".owner.json")


def linked_owner(lock: Path) -> None:
    lock.mkdir()
    (lock / ".owner.json").symlink_to("/etc/passwd")


def huge_owner(lock: Path) -> None:
    lock.mkdir()
    with open(lock / ".owner.json", "wb") as file:
        file.truncate(1 << 30)


def directory_owner(lock: Path) -> None:
    (lock / ".owner.json").mkdir(parents=True)


def hard_linked_owner(lock: Path) -> None:
    make_lock(lock, pid=dead_pid())
    os.link(lock / ".owner.json", lock.parent / "second name")


def device_lease(lock: Path) -> None:
    make_lock(lock, pid=dead_pid(), lease=False)
    os.mkfifo(lock / f".lease-{TOKEN}")


def novel_inside(lock: Path) -> None:
    make_lock(lock, pid=dead_pid())
    (lock / "novel.txt").write_text("It was a dark and stormy night")


def escaping_token(lock: Path) -> None:
    make_lock(lock, pid=dead_pid(), owner=encode(our_record(dead_pid())).replace(TOKEN.encode(), b"../../victim"))


def link_as_lock(lock: Path) -> None:
    (lock.parent / "elsewhere").mkdir()
    lock.symlink_to("elsewhere")


def fifo_as_lock(lock: Path) -> None:
    os.mkfifo(lock)


@pytest.mark.parametrize(
    "leave",
    [
        fifo_owner,
        linked_owner,
        huge_owner,
        directory_owner,
        hard_linked_owner,
        device_lease,
        novel_inside,
        escaping_token,
        link_as_lock,
        fifo_as_lock,
    ],
)
def test_a_hostile_lock_is_refused_at_once_and_never_touched(shelf: LockVault, leave: Callable[[Path], object]) -> None:
    leave(lock_of(shelf))
    set_age(lock_of(shelf), 1000)
    (shelf.path / ".lease-..").mkdir()
    (shelf.path / "victim").write_text("not yours")
    before = everything_in(shelf.path)
    began = time.monotonic()
    with pytest.raises(ForeignLockError):
        shelf.locks.acquire(NOTE, 30)
    assert time.monotonic() - began < 15  # it did not wait for the deadline
    assert everything_in(shelf.path) == before
    report = shelf.locks.inspect(NOTE)
    assert report is not None
    assert report.verdict == "foreign"


def test_a_lock_on_another_file_system_is_never_reaped(shelf: LockVault, mount: Callable[..., None]) -> None:
    lock_of(shelf).mkdir()
    mount("-t", "tmpfs", "none", lock_of(shelf))
    (lock_of(shelf) / ".owner.json").write_bytes(encode(our_record(dead_pid())))
    (lock_of(shelf) / f".lease-{TOKEN}").write_text(TOKEN)
    with pytest.raises(ForeignLockError):
        shelf.locks.acquire(NOTE, 30)
    assert len(os.listdir(lock_of(shelf))) == 2


def test_a_release_that_fails_is_made_up_for_when_the_lock_is_met_again(
    shelf: LockVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = shelf.locks.acquire(NOTE)

    def broken(*_: object) -> bool:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(path_lock, "same_directory", broken)
        with pytest.raises(OSError, match="Input/output"):
            held.release()
    assert lock_of(shelf).exists()
    assert not shelf.locks.is_ours(b"note.lock")
    again = shelf.locks.try_acquire(NOTE)
    assert again is not None
    again.release()
    assert not lock_of(shelf).exists()


def test_a_lock_that_may_not_be_read_is_an_error_at_once(tmp_path: Path) -> None:
    """As another user: root may read everything."""
    if os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    vault = tmp_path / "vault"
    vault.mkdir()
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == 0 and not path.stat().st_mode & stat.S_IXOTH and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    for number, (owner_mode, lock_mode) in enumerate([(0o600, 0o755), (0o644, 0o700), (0o644, 0o744)]):
        lock = make_lock(vault / f"note{number}.lock", pid=dead_pid(), age=100)
        (lock / ".owner.json").chmod(owner_mode)
        lock.chmod(lock_mode)
    os.chown(vault, TEST_UID, TEST_UID)

    def ask() -> None:
        os.setgroups([])
        os.setgid(TEST_UID)
        os.setuid(TEST_UID)
        with LockVault(vault) as shelf:
            for number in range(3):
                with pytest.raises(LockBrokenError):
                    shelf.locks.acquire(b"note%d" % number, 30)
                report = shelf.locks.inspect(b"note%d" % number)
                assert report is not None
                assert report.verdict == "unknown"

    in_processes(1, ask)


# -- release


def test_release_removes_the_lock_and_may_be_repeated(shelf: LockVault) -> None:
    held = shelf.locks.acquire(NOTE)
    assert shelf.locks.held == {NOTE: held}
    assert shelf.locks.is_ours(b"note.lock")
    held.release()
    assert os.listdir(shelf.path) == [".vaultfs"]
    held.release()
    assert shelf.locks.held == {}
    assert not shelf.locks.is_ours(b"note.lock")
    with pytest.raises(LockBrokenError):
        held.assert_owned()


def test_release_leaves_a_successors_lock_alone(shelf: LockVault, caplog: pytest.LogCaptureFixture) -> None:
    held = shelf.locks.acquire(NOTE)
    for entry in lock_of(shelf).iterdir():  # somebody thought us dead
        entry.unlink()
    lock_of(shelf).rmdir()
    successor = make_lock(lock_of(shelf), pid=1)
    before = everything_in(successor)
    with pytest.raises(LockBrokenError):
        held.assert_owned()
    held.release()
    assert everything_in(successor) == before
    assert "taken away" in caplog.text


def test_a_lock_that_was_moved_off_its_name_is_not_removed_through_the_descriptor(
    shelf: LockVault, caplog: pytest.LogCaptureFixture
) -> None:
    held = shelf.locks.acquire(NOTE)
    lock_of(shelf).rename(shelf.path / "aside")
    successor = make_lock(lock_of(shelf), pid=1)
    before = everything_in(shelf.path)
    held.release()
    assert everything_in(shelf.path) == before
    assert successor.exists()
    assert "not at its place" in caplog.text


def test_a_lock_whose_owner_file_was_taken_is_still_ours_and_is_released(shelf: LockVault) -> None:
    """The inode and the lease decide."""
    held = shelf.locks.acquire(NOTE)
    (lock_of(shelf) / ".owner.json").unlink()
    held.assert_owned()
    held.release()
    assert not lock_of(shelf).exists()


def test_a_lock_whose_lease_was_taken_is_lost_and_left_to_the_taker(
    shelf: LockVault, caplog: pytest.LogCaptureFixture
) -> None:
    held = shelf.locks.acquire(NOTE)
    (lock_of(shelf) / f".lease-{held.token}").unlink()
    with pytest.raises(LockBrokenError):
        held.assert_owned()
    held.release()
    assert (lock_of(shelf) / ".owner.json").exists()
    assert "taken away" in caplog.text


def test_what_somebody_put_into_our_lock_stays(shelf: LockVault, caplog: pytest.LogCaptureFixture) -> None:
    held = shelf.locks.acquire(NOTE)
    (lock_of(shelf) / "novel.txt").write_text("It was a dark and stormy night")
    held.release()
    assert os.listdir(lock_of(shelf)) == ["novel.txt"]
    assert "it stays" in caplog.text


def test_a_lock_that_was_moved_with_its_directory_is_removed_when_it_is_met_again(
    shelf: LockVault, caplog: pytest.LogCaptureFixture
) -> None:
    """Never through an alias at release; but our own process lives on, and nobody else could ever reap it."""
    (shelf.path / "old").mkdir()
    held = shelf.locks.acquire(b"old/note")
    (shelf.path / "old").rename(shelf.path / "new")
    held.release()
    assert (shelf.path / "new/note.lock/.owner.json").exists()
    assert "not at its place" in caplog.text
    again = shelf.locks.try_acquire(b"new/note")
    assert again is not None
    again.release()
    assert os.listdir(shelf.path / "new") == []


def test_a_child_process_does_not_release_what_it_inherited(shelf: LockVault) -> None:
    held = shelf.locks.acquire(NOTE)

    def leave() -> None:
        with pytest.raises(LockBrokenError):
            held.assert_owned()
        held.release()
        assert shelf.locks.try_acquire(NOTE) is None  # for the child the parent is just another owner

    in_processes(1, leave)
    held.assert_owned()
    held.release()


def test_the_last_of_several_handles_releases(shelf: LockVault) -> None:
    """A caller that is under the lock already is let through by its token, nobody else of this program is."""
    first = shelf.locks.acquire(NOTE)
    assert shelf.locks.try_acquire(NOTE) is None
    second = shelf.locks.acquire(NOTE, token=first.token)
    third = first.share()
    first.release()
    second.release()
    second.release()
    third.assert_owned()
    assert lock_of(shelf).exists()
    third.release()
    assert not lock_of(shelf).exists()
    with pytest.raises(LockBrokenError):
        third.share()


def test_close_releases_what_is_still_held(shelf: LockVault) -> None:
    other = shelf.other()
    other.acquire(NOTE)
    other.acquire(b"another")
    other.close()
    assert os.listdir(shelf.path) == [".vaultfs"]


# -- making


def test_a_lock_is_owned_like_its_directory_and_readable_by_its_group_whatever_the_umask(shelf: LockVault) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to give files away")
    folder = shelf.path / "folder"
    folder.mkdir()
    folder.chmod(0o2775)
    os.chown(folder, TEST_UID, TEST_UID + 1)
    before = os.umask(0o077)
    try:
        held = shelf.locks.acquire(b"folder/note")
    finally:
        os.umask(before)
    made = [folder / "note.lock", *(folder / "note.lock").iterdir()]
    assert len(made) == 3
    for path in made:
        status = path.stat()
        assert (status.st_uid, status.st_gid) == (TEST_UID, TEST_UID + 1)
        assert status.st_mode & stat.S_IRGRP
        assert not status.st_mode & stat.S_IWOTH
    assert made[0].stat().st_mode & stat.S_IXGRP
    held.release()


def test_a_failure_while_making_leaves_nothing_prepared(shelf: LockVault, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(making, "_write", full)
    with pytest.raises(OSError, match="No space"):
        shelf.locks.acquire(NOTE)
    assert shelf.pending == []
    assert not lock_of(shelf).exists()


def test_a_cleared_state_directory_is_furnished_again(shelf: LockVault) -> None:
    shelf.locks.acquire(NOTE).release()
    (shelf.path / ".vaultfs/pending").rmdir()
    shelf.locks.acquire(b"another").release()


def test_a_missing_directory_is_said_to_be_missing(shelf: LockVault) -> None:
    with pytest.raises(FileNotFoundError):
        shelf.locks.acquire(b"nowhere/note", 30)
    (shelf.path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        shelf.locks.acquire(b"file/note", 30)


def test_the_vault_itself_has_no_lock_and_an_acquisition_serves_once(shelf: LockVault) -> None:
    with pytest.raises(BadRequestError):
        shelf.locks.begin(b"")
    acquisition = shelf.locks.begin(NOTE)
    acquisition.cancel()
    with pytest.raises(BadRequestError):
        acquisition.step()


# -- long-held locks, and what was never put in place


def test_a_long_held_lock_gets_a_lease_a_heartbeat_and_a_fresh_mtime(
    shelf: LockVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = shelf.locks.acquire(NOTE)
    raw = (lock_of(shelf) / ".owner.json").read_bytes()
    shelf.locks.heartbeat()
    assert (lock_of(shelf) / ".owner.json").read_bytes() == raw  # young: not worth a system call
    monkeypatch.setattr(path_lock, "REFRESH_AFTER", 0.0)
    set_age(lock_of(shelf), 100)
    shelf.locks.heartbeat()
    shelf.locks.heartbeat()
    record = (lock_of(shelf) / ".owner.json").read_bytes()
    assert b'"heartbeat":2' in record
    assert b'"lease_ms":60000' in record
    assert time.time() - lock_of(shelf).stat().st_mtime < 50
    assert shelf.pending == []
    held.assert_owned()
    held.release()
    assert not lock_of(shelf).exists()


def test_a_heartbeat_puts_no_owner_into_a_lock_that_is_being_taken(
    shelf: LockVault, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = shelf.locks.acquire(NOTE)
    (lock_of(shelf) / f".lease-{held.token}").unlink()
    (lock_of(shelf) / ".owner.json").unlink()
    monkeypatch.setattr(path_lock, "REFRESH_AFTER", 0.0)
    shelf.locks.heartbeat()
    assert os.listdir(lock_of(shelf)) == []
    assert shelf.pending == []
    assert "taken away" in caplog.text
    held.release()


def test_the_sweep_clears_what_the_dead_had_prepared_and_nothing_else(shelf: LockVault) -> None:
    shelf.locks.acquire(NOTE).release()
    pending, gone = shelf.path / ".vaultfs/pending", dead_pid()
    make_our_lock(pending / f"{gone}.a", gone)
    (pending / f"{gone}.b").mkdir()
    (pending / f"{gone}.b/.lease-x").write_text("x\n")
    set_age(pending / f"{gone}.b", 100)
    (pending / f"{gone}.c.beat").write_text("{}")
    (pending / f"{gone}.young").mkdir()
    make_our_lock(pending / f"{os.getpid()}.alive", os.getpid(), start_time=None)
    (pending / f"{gone}.odd").mkdir()
    (pending / f"{gone}.odd/novel.txt").write_text("It was a dark and stormy night")
    set_age(pending / f"{gone}.odd", 100)
    assert shelf.locks.sweep() == 3
    assert sorted(shelf.pending) == sorted([f"{gone}.young", f"{os.getpid()}.alive", f"{gone}.odd"])


STEPS = ("mkdir", "open", "write", "fchmod", "unlink", "rmdir")


def _lock_and_die(vault: Path, step: int) -> None:
    """Takes and releases a lock, and is killed before the system call number `step` of the protocol."""
    with LockVault(vault) as shelf:
        left = step

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def stepping(*arguments: Any, **keywords: Any) -> Any:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return call(*arguments, **keywords)

            return stepping

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        kernel.renameat2 = counted(kernel.renameat2)
        with shelf.locks.acquire(NOTE):
            os.open(vault, os.O_RDONLY)  # a step of its own: killed while holding it
    os._exit(0)


def test_a_process_killed_at_any_step_blocks_nobody_and_leaves_nothing_that_is_not_cleared(tmp_path: Path) -> None:
    """Ownerless leftovers must be `stale` first; that is short here, and a second look is needed in any case."""
    with LockVault(tmp_path / "vault", stale=0.03) as shelf:
        ways = set()
        for step in range(100):
            process = FORK.Process(target=_lock_and_die, args=(shelf.path, step))
            process.start()
            process.join(GUARD)
            left = tuple(sorted(name.split("-")[0] for name in everything_named(shelf)))
            ways.add(left)
            held, who = drive(shelf.locks, NOTE, GUARD)
            assert held is not None, (step, who)
            held.release()
            time.sleep(0.035 * bool(shelf.pending))
            shelf.locks.sweep()
            assert everything_named(shelf) == [], step
            if process.exitcode == 0:
                break
            assert process.exitcode == -signal.SIGKILL
        assert process.exitcode == 0
        assert {(), ("note.lock",), ("note.lock", "note.lock/.lease", "note.lock/.owner.json")} <= ways
        assert ("note.lock", "note.lock/.owner.json") in ways


def everything_named(shelf: LockVault) -> list[str]:
    """The locks in the vault and in the workshop, with what is in them."""
    found = [*shelf.path.rglob("note.lock*"), *shelf.path.rglob("note.lock*/*"), *shelf.path.rglob("pending/**/*")]
    return sorted({str(path.relative_to(shelf.path)) for path in found})
