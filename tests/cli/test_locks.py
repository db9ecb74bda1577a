"""``vaultfs locks``: on a vault that nobody serves, on one mounted elsewhere, and on one mounted over itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.core.lock_support import TOKEN, LockVault, dead_pid, make_lock, make_our_lock, set_age
from tests.mount.harness import MountedVault, living_process
from vaultfs.errors import ExitCode
from vaultfs.locks.reaper import Removal
from vaultfs.locks.survey import Survey

Factory = Callable[..., MountedVault]
Run = Callable[..., subprocess.CompletedProcess[bytes]]
PLACES = ["at rest", "elsewhere", "over itself"]


class Place:
    """A vault in one of the three conditions, with one lock of each kind; `path` is how its user calls it."""

    def __init__(self, mount: MountedVault, kind: str) -> None:
        self.mount = mount
        self.path = mount.vault if kind == "at rest" else mount.mnt
        self.behind = mount.behind

    def run(self, *words: Any, answer: str = "", check: bool = True) -> subprocess.CompletedProcess[bytes]:
        argv = [self.mount.python(), "-m", "vaultfs", "locks", *map(str, words)]
        return self.mount.run(argv, input=answer.encode(), check=check)

    def locks(self, path: Path | None = None) -> dict[str, dict[str, Any]]:
        """What is told, by path of the file (by lock directory where that is not known)."""
        answer = json.loads(self.run(path or self.path, "--json").stdout)
        assert answer["schema"] == 1
        return {lock["path"] or lock["lock_path"]: lock for lock in answer["locks"]}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, vault_mount: Factory) -> Iterator[Place]:
    kind: str = request.param
    if kind == "at rest":
        mount = MountedVault()
        mount.mark_ended()
        (mount.vault / ".vaultfs").mkdir(mode=0o700)  # it has been mounted before
        try:
            yield Place(mount, kind)
        finally:
            mount.destroy()
    else:
        mount = vault_mount(over_itself=kind == "over itself")
        yield Place(mount, kind)
        for name in mount.names_behind():  # what stands here is the test's own, not the mount's
            if name == "Cargo.lock":
                (mount.behind / name).unlink()
            elif name.endswith(".lock"):
                shutil.rmtree(mount.behind / name)
        shutil.rmtree(mount.behind / "d", ignore_errors=True)


def furnish(place: Place, pid: int) -> None:
    """One lock of each kind; `pid` lives."""
    vault = place.behind
    make_lock(vault / "alive.md.lock", pid=pid, token="a" * 8)
    make_our_lock(vault / "dead.md.lock", dead_pid())
    (vault / "d").mkdir()
    (vault / "d/residue.md.lock").mkdir()
    set_age(vault / "d/residue.md.lock", 3600)
    make_our_lock(vault / "d/far.md.lock", 4711, host="elsewhere")
    make_lock(vault / "foreign.md.lock", pid=pid)
    (vault / "foreign.md.lock/.owner.json").unlink()
    os.mkfifo(vault / "foreign.md.lock/.owner.json")
    (vault / "Cargo.lock").write_text("a document")
    (vault / "papers.lock").mkdir()
    (vault / "papers.lock/letter.txt").write_text("a document in a directory of documents")


def test_each_lock_is_told_with_owner_verdict_and_evidence(place: Place) -> None:
    with living_process() as pid:
        furnish(place, pid)
        told = place.locks()
        assert {path: lock["verdict"] for path, lock in told.items()} == {
            "alive.md": "alive",
            "dead.md": "dead",
            "d/residue.md": "residue",
            "d/far.md": "unknown",
            "foreign.md": "foreign",
        }
        assert (told["alive.md"]["pid"], told["alive.md"]["program"]) == (pid, "sleep")
        assert told["dead.md"]["program"] == "vaultfs" and "there is no process" in told["dead.md"]["evidence"]
        assert "another host" in told["d/far.md"]["evidence"] and told["d/far.md"]["host"] == "elsewhere"
        assert ".owner.json" in told["foreign.md"]["evidence"]
        assert told["d/residue.md"]["age_s"] > 3000 and told["d/residue.md"]["pid"] is None
        text = place.run(place.path).stdout.decode()
        for word in ("alive.md", "sleep", "dead.md", "residue", "foreign", "no owner"):
            assert word in text
        assert "Cargo" not in text and "papers" not in text
        assert set(place.locks(place.path / "d")) == {"d/residue.md", "d/far.md"}
        assert set(place.locks(place.path / "dead.md")) == {"dead.md"}


def test_reap_removes_what_is_dead_or_residue_and_nothing_else(place: Place) -> None:
    with living_process() as pid:
        furnish(place, pid)
        before = {path: sorted(os.listdir(place.behind / lock["lock_path"])) for path, lock in place.locks().items()}
        done = place.run("--reap", place.path)
        assert done.stdout.decode().count("removed ") == 2
        assert not (place.behind / "dead.md.lock").exists() and not (place.behind / "d/residue.md.lock").exists()
        left = place.locks()
        assert set(left) == {"alive.md", "d/far.md", "foreign.md"}
        assert all(sorted(os.listdir(place.behind / lock["lock_path"])) == before[path] for path, lock in left.items())
        assert (place.behind / "papers.lock/letter.txt").exists()


def test_force_asks_says_what_could_be_lost_and_takes_no_for_an_answer(place: Place) -> None:
    with living_process() as pid:
        furnish(place, pid)
        lock = place.behind / "alive.md.lock"
        for answer in ("", "n\n", "maybe\n"):
            done = place.run("--reap", place.path / "alive.md", "--force", answer=answer, check=False)
            assert done.returncode == ExitCode.FAILED and lock.exists()
            assert "could be lost" in done.stdout.decode() and str(pid) in done.stdout.decode()
        place.run("--reap", place.path / "alive.md", "--force", answer="y\n")
        assert not lock.exists()
        place.run("--reap", place.path / "d/far.md.lock", "--force", answer="yes\n")
        place.run("--reap", place.path / "foreign.md", "--force", answer="y\n")  # a FIFO with a name of the protocol
        assert set(place.locks()) == {"dead.md", "d/residue.md"}


def test_force_removes_nothing_that_is_not_of_the_protocol(place: Place) -> None:
    with living_process() as pid:
        lock = make_lock(place.behind / "n.md.lock", pid=pid)
        (lock / "letter.txt").write_text("somebody's")
        done = place.run("--reap", place.path / "n.md", "--force", answer="y\n", check=False)
        assert done.returncode == ExitCode.BUSY and b"not of the lock protocol" in done.stderr
        assert sorted(os.listdir(lock)) == [f".lease-{TOKEN}", ".owner.json", "letter.txt"]


def test_force_needs_to_be_told_which(place: Place) -> None:
    assert place.run("--reap", "--force", check=False).returncode == ExitCode.USAGE
    assert place.run(place.path / "a.md", "--force", check=False).returncode == ExitCode.USAGE


def test_a_lock_that_took_the_place_of_the_one_shown_is_left_alone(tmp_path: Path) -> None:
    with LockVault(tmp_path / "vault") as shelf:
        survey = Survey(shelf.root, shelf.locks._judge)
        make_our_lock(shelf.path / "note.lock", dead_pid())
        (shown,) = survey.look().locks
        with shelf.locks.acquire(b"note") as held:  # reaps it, and stands in its place
            for force in (False, True):
                assert survey.reap(shown, force=force) is Removal.LOST
                held.assert_owned()


def test_our_own_locks_are_told_as_ours_private_ones_by_their_path_and_are_not_forced_away(tmp_path: Path) -> None:
    with LockVault(tmp_path / "vault") as shelf:
        (shelf.path / ".git").mkdir()
        with shelf.locks.acquire(b"note") as note, shelf.locks.acquire(b".git/index") as index:
            mine = shelf.locks.survey()
            assert [(lock.path, lock.verdict) for lock in mine.look().locks] == [
                (b".git/index", "ours"),
                (b"note", "ours"),
            ]
            assert all(mine.reap(lock, force=True) is Removal.LEFT for lock in mine.look().locks)
            note.assert_owned()
            index.assert_owned()
            others = Survey(shelf.root, shelf.locks._judge).look().locks
            assert [lock.verdict for lock in others] == ["alive", "alive"]
            assert [lock.path for lock in others] == [
                b"",
                b"note",
            ]  # there is no file .git/index whose name could be tried
            (shelf.path / ".git/index").touch()
            assert Survey(shelf.root, shelf.locks._judge).look(b".git").locks[0].path == b".git/index"


def test_a_daemon_that_does_not_answer_is_done_without(vault_mount: Factory) -> None:
    """Only where the mount does not cover the vault."""
    import signal

    mount = vault_mount()
    mount.status()  # it is registered by now
    make_our_lock(mount.behind / "dead.md.lock", dead_pid())
    os.kill(mount.pid, signal.SIGSTOP)
    try:
        done = mount.cli("locks", str(mount.vault), "--json")
    finally:
        os.kill(mount.pid, signal.SIGCONT)
    assert [lock["verdict"] for lock in json.loads(done.stdout)["locks"]] == ["dead"], done
    assert b"looking at the vault itself" in done.stderr
    mount.cli("locks", "--reap", str(mount.mnt))
    assert mount.names_behind() == set()


def test_a_vault_that_vaultfs_has_never_seen_is_not_changed_by_looking(tmp_path: Path) -> None:
    mount = MountedVault()
    mount.mark_ended()
    try:
        make_lock(mount.vault / "a.lock", pid=dead_pid(), age=60)
        place = Place(mount, "at rest")
        assert {path: lock["verdict"] for path, lock in place.locks().items()} == {"a": "dead"}
        assert os.listdir(mount.vault) == ["a.lock"]
        assert place.run(mount.vault / "none/there", check=False).returncode == ExitCode.NOT_FOUND
    finally:
        mount.destroy()
