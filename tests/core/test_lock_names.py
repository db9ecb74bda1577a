"""Where the lock of a path stands, what is hidden as one, and what happens when the name is taken."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.lock_support import LockVault, dead_pid, make_lock, make_our_lock, set_age
from vaultfs.errors import LockBusyError, UnsuitableVaultError
from vaultfs.locks import HeldLock, is_lock_directory, lock_below, making
from vaultfs.locks.places import DEFAULT_PRIVATE, Globs, is_lock_name
from vaultfs.locks.records import timestamp


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[LockVault]:
    with LockVault(tmp_path / "vault") as vault:
        yield vault


def private_locks(shelf: LockVault) -> list[str]:
    return os.listdir(shelf.path / ".vaultfs/locks")


@pytest.mark.parametrize(
    ("path", "private"),
    [
        (b".git/index", True),
        (b"project/.git/refs/heads/main", True),
        (b".gitignore", False),
        (b"x.git/index", False),
        (b"notes/git/index", False),
        (b".hg/store/data", True),
        (b"a/.svn/wc.db", True),
        (b".git", False),
    ],
)
def test_version_control_has_its_locks_elsewhere(path: bytes, private: bool) -> None:
    assert Globs(DEFAULT_PRIVATE).match(path) is private


@pytest.mark.parametrize(
    ("glob", "matching", "others"),
    [
        ("*.tmp", [b"a.tmp", b"x/y/.tmp"], [b"a.tmp/b", b"a.tmpx"]),
        ("/build/**", [b"build/a", b"build/a/b"], [b"build", b"x/build/a"]),
        ("a/**/z", [b"a/z", b"a/b/z", b"x/a/b/c/z"], [b"a/bz", b"az"]),
        ("[a-c]?[!x]", [b"b1y", b"d/a\n0"], [b"b1x", b"d1y", b"a/y"]),
        ("we[ird", [b"we[ird"], [b"wei"]),
        ("ü*", ["übung".encode()], [b"u"]),
    ],
)
def test_globs_mean_what_their_manual_says(glob: str, matching: list[bytes], others: list[bytes]) -> None:
    globs = Globs(["nothing-else", glob])
    assert [path for path in matching if not globs.match(path)] == []
    assert [path for path in others if globs.match(path)] == []
    assert not Globs([]).match(b"anything")


def test_a_lock_by_rule_is_private_and_leaves_the_public_name_free(shelf: LockVault) -> None:
    (shelf.path / ".git").mkdir()
    with shelf.locks.acquire(b".git/index") as held:
        assert held.private
        assert held.still_right()
        assert os.listdir(shelf.path / ".git") == []
        assert len(private_locks(shelf)) == 1
        assert shelf.other().try_acquire(b".git/index") is None
        report = shelf.other().inspect(b".git/index")
        assert report is not None
        assert report.lock_path.startswith(b".vaultfs/locks/")
    assert private_locks(shelf) == []


@pytest.mark.parametrize(("length", "private"), [(250, False), (251, True), (255, True)])
def test_a_name_behind_which_lock_does_not_fit_has_a_private_lock(shelf: LockVault, length: int, private: bool) -> None:
    with shelf.locks.acquire(b"n" * length) as held:
        assert held.private is private
        assert shelf.other().try_acquire(b"n" * length) is None


def test_a_file_with_the_locks_name_makes_the_lock_private_until_it_goes(shelf: LockVault) -> None:
    """git's index.lock, outside of the globs."""
    (shelf.path / "index.lock").write_text("git's")
    held = shelf.locks.acquire(b"index")
    assert held.private
    assert held.still_right()
    assert shelf.other().try_acquire(b"index") is None
    (shelf.path / "index.lock").rename(shelf.path / "index")
    assert not held.still_right()  # the name is free: a peer may take it now, and would not know of us
    held.release()
    with shelf.locks.acquire(b"index") as public:
        assert not public.private
    assert (shelf.path / "index").read_text() == "git's"


def test_a_name_that_becomes_free_while_the_private_lock_is_taken_gets_the_public_one(
    shelf: LockVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shelf.path / "index.lock").write_text("git's")

    def late() -> str:
        monkeypatch.undo()
        (shelf.path / "index.lock").unlink()
        return timestamp()

    monkeypatch.setattr(making, "timestamp", late)
    with shelf.locks.acquire(b"index") as held:
        assert not held.private
    assert private_locks(shelf) == []


def test_a_private_lock_is_not_right_any_more_when_a_lock_took_the_name(shelf: LockVault) -> None:
    (shelf.path / "index.lock").write_text("git's")
    held = shelf.locks.acquire(b"index")
    (shelf.path / "index.lock").unlink()
    make_lock(shelf.path / "index.lock", pid=1)
    assert not held.still_right()
    held.release()


def test_a_directory_of_documents_with_the_locks_name_makes_the_lock_private(shelf: LockVault) -> None:
    (shelf.path / "box.lock").mkdir()
    (shelf.path / "box.lock/key.txt").write_text("under the mat")
    with shelf.locks.acquire(b"box") as held:
        assert held.private
        assert held.still_right()
        report = shelf.locks.inspect(b"box")
        assert report is not None
        assert report.verdict == "ours"
    assert (shelf.path / "box.lock/key.txt").read_text() == "under the mat"


def test_an_ownerless_directory_that_somebody_keeps_touching_is_busy(shelf: LockVault) -> None:
    """npm's proper-lockfile holds its lock this way."""
    lock = shelf.path / "data.lock"
    lock.mkdir()
    set_age(lock, 30)
    acquisition = shelf.locks.begin(b"data")
    acquisition.step()
    set_age(lock, 20)
    acquisition.step()
    with pytest.raises(LockBusyError, match="keeps touching"):
        shelf.locks.acquire(b"data", 0.1)
    assert lock.exists()


def test_who_was_seen_to_put_a_lock_in_place_is_let_through_that_one_and_no_other(shelf: LockVault) -> None:
    lock = make_our_lock(shelf.path / "note.lock", os.getpid(), start_time=None)
    seen = (lock.stat().st_dev, lock.stat().st_ino)
    assert shelf.locks.begin(b"note", 0.0).step() is None
    held = shelf.locks.begin(b"note", 0.0, through=seen).step()
    assert isinstance(held, HeldLock)
    assert held.private
    assert held.still_right()
    assert shelf.other().begin(b"note", 0.0, through=seen).step() is None  # they share one holder: one after the other
    for entry in lock.iterdir():
        entry.unlink()
    lock.rmdir()
    assert not held.still_right()
    held.release()
    make_our_lock(shelf.path / "note.lock", os.getpid(), start_time=None)
    assert shelf.locks.begin(b"note", 0.0, through=(seen[0], seen[1] + 10**6)).step() is None


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        (b"note.lock", True),
        (b".lock", False),
        (b"note.locks", False),
        (b"note.lock.4711.0f-1e.pending", True),
        (b"note.lock.4711.pending", False),
        (b"note.pending", False),
    ],
)
def test_a_lock_is_known_by_its_name(name: bytes, is_one: bool) -> None:
    assert is_lock_name(name) is is_one


def test_only_directories_that_hold_nothing_but_protocol_files_are_hidden(shelf: LockVault) -> None:
    path = shelf.path
    make_lock(path / "a.lock", pid=1)
    make_lock(path / "b.lock.1.0f.pending", pid=1)
    (path / "c.lock").mkdir()
    make_lock(path / "d.lock", pid=1)
    (path / "d.lock/.owner.json.12.34.ab-cd.tmp").write_text("")
    hidden = [b"a.lock", b"b.lock.1.0f.pending", b"c.lock", b"d.lock"]

    make_lock(path / "e.lock", pid=1)
    (path / "e.lock/novel.txt").write_text("")
    (path / "f.lock").write_text("a file")
    (path / "g.lock").symlink_to("a.lock")
    make_lock(path / "h", pid=1)
    (path / "i.lock/.owner.json").mkdir(parents=True)
    shown = [b"e.lock", b"f.lock", b"g.lock", b"h", b"i.lock", b"missing.lock"]

    assert [name for name in hidden if not is_lock_directory(shelf.root, name)] == []
    assert [name for name in shown if is_lock_directory(shelf.root, name)] == []


@pytest.mark.parametrize("name", [b"note", b"n" * 250])
def test_where_nothing_can_be_renamed_from_the_state_directory_the_lock_is_prepared_beside(
    shelf: LockVault, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    """Project quotas and encrypted directories answer EXDEV within one mount."""
    real, prepared = making.kernel.renameat2, []

    def picky(old_directory: int, old: bytes, new_directory: int, new: bytes, flags: int) -> None:
        if old_directory == shelf.state.fd:
            raise OSError(18, "Invalid cross-device link")
        prepared.append(old)
        real(old_directory, old, new_directory, new, flags)

    monkeypatch.setattr(making.kernel, "renameat2", picky)
    with shelf.locks.acquire(name) as held:
        held.assert_owned()
        assert not held.private
        assert is_lock_name(prepared[0])
    assert os.listdir(shelf.path) == [".vaultfs"]
    assert shelf.pending == []


def test_a_file_system_that_cannot_rename_without_replacing_is_unsuitable(
    shelf: LockVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(making.kernel, "renameat2", unable)
    with pytest.raises(UnsuitableVaultError):
        shelf.locks.acquire(b"note")
    assert os.listdir(shelf.path) == [".vaultfs"]
    assert shelf.pending == []


def test_a_lock_that_somebody_lives_by_stands_against_moving_its_directory(shelf: LockVault) -> None:
    (shelf.path / "a/b.lock/c").mkdir(parents=True)  # somebody's own directory, looked into like any other
    (shelf.path / "ab").mkdir()
    make_our_lock(shelf.path / "ab/x.lock", os.getpid(), start_time=None)
    make_our_lock(shelf.path / "a/dead.lock", dead_pid())
    (shelf.path / "a/residue.lock").mkdir()
    set_age(shelf.path / "a/residue.lock", 100)
    assert lock_below(shelf.root, shelf.locks, b"a/b.lock") is None
    lock_below(shelf.root, shelf.locks, b"a")
    time.sleep(0.03)  # residue needs a second look
    assert lock_below(shelf.root, shelf.locks, b"a") is None
    theirs = make_our_lock(shelf.path / "a/b.lock/c/note.lock", os.getpid(), start_time=None)
    found = lock_below(shelf.root, shelf.locks, b"a")
    assert found is not None
    assert (found.path, found.lock_path) == (b"a/b.lock/c/note", b"a/b.lock/c/note.lock")
    assert lock_below(shelf.root, shelf.locks, b"a", limit=1) is None  # bounded
    theirs.rename(shelf.path / "elsewhere.lock")
    assert lock_below(shelf.root, shelf.locks, b"a") is None


def test_a_private_lock_of_ours_below_stands_against_moving_its_directory(shelf: LockVault) -> None:
    (shelf.path / "a/.git").mkdir(parents=True)
    with shelf.locks.acquire(b"a/.git/index"):
        found = lock_below(shelf.root, shelf.locks, b"a")
        assert found is not None
        assert found.verdict == "ours"
    assert lock_below(shelf.root, shelf.locks, b"a") is None
