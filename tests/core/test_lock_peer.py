"""The lock is shared both ways with a tool that knows nothing of ours: as other tools do it, all by name.

The peer here is written from the protocol's description: it prepares ``NAME.lock.PID.TOKEN.pending`` beside the file,
renames it plainly, judges by pid and mtime, and gives up with an error after a lock vanished three times under its
look.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.lock_support import FORK, GUARD, LockVault, dead_pid, in_processes, make_our_lock, set_age


class GaveUp(Exception):
    """The peer's error after a lock vanished under its look once too often."""


class Peer:
    """Another tool's lock of one path."""

    def __init__(self, path: Path) -> None:
        self.lock = path.with_name(path.name + ".lock")
        self.token = ""

    def acquire(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        vanished = 0
        while True:
            try:
                if self.lock.exists() and not self._reap():
                    if time.monotonic() >= deadline:
                        return False
                    time.sleep(0.01)
                    continue
            except FileNotFoundError:
                vanished += 1
                if vanished > 3:
                    raise GaveUp from None
                time.sleep(0.01)
                continue
            if self._put():
                return True

    def _put(self) -> bool:
        self.token = str(uuid.uuid4())
        pending = self.lock.with_name(f"{self.lock.name}.{os.getpid()}.{self.token}.pending")
        pending.mkdir()
        record = {"v": 1, "pid": os.getpid(), "token": self.token, "created_at": "2026-01-01T00:00:00.000Z"}
        (pending / ".owner.json").write_text(json.dumps(record) + "\n")
        (pending / f".lease-{self.token}").write_text(self.token + "\n")
        try:
            pending.rename(self.lock)
        except OSError:
            for entry in pending.iterdir():
                entry.unlink()
            pending.rmdir()
            return False
        return True

    def _reap(self) -> bool:
        """True if the lock is gone."""
        if time.time() - self.lock.stat().st_mtime <= 10:
            return False
        owner = json.loads((self.lock / ".owner.json").read_text())
        try:
            os.kill(owner["pid"], 0)
        except ProcessLookupError:
            self.token = owner["token"]
            self.release()
            return True
        return False

    def release(self) -> None:
        (self.lock / f".lease-{self.token}").unlink()
        (self.lock / ".owner.json").unlink()
        self.lock.rmdir()


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[LockVault]:
    with LockVault(tmp_path / "vault") as vault:
        yield vault


def test_we_and_a_peer_are_never_inside_at_once_and_it_never_gives_up(shelf: LockVault) -> None:
    """Ours is taken again and again as fast as we allow ourselves; the peer still gets its turns."""
    note, turns = shelf.path / "note", 300
    note.write_text("0")
    done = FORK.Event()

    def count() -> None:
        value = int(note.read_text())
        time.sleep(0.0003)
        note.write_text(str(value + 1))

    def peer() -> None:
        try:
            for _ in range(turns):
                lock = Peer(note)
                assert lock.acquire(GUARD)
                count()
                lock.release()
        finally:
            done.set()

    process = FORK.Process(target=peer)
    process.start()
    ours = 0
    while not done.is_set():
        with shelf.locks.acquire(b"note", GUARD):
            count()
        ours += 1
    process.join(GUARD)
    assert process.exitcode == 0
    assert ours > 0
    assert int(note.read_text()) == turns + ours
    assert sorted(os.listdir(shelf.path)) == [".vaultfs", "note"]


def test_a_live_peer_holds_us_up_and_we_hold_up_a_live_peer(shelf: LockVault) -> None:
    peer = Peer(shelf.path / "note")
    assert peer.acquire(0)
    set_age(peer.lock, 1000)
    assert shelf.locks.try_acquire(b"note") is None
    peer.release()
    with shelf.locks.acquire(b"note"):
        assert not peer.acquire(0.05)
    assert peer.acquire(0)
    peer.release()


def test_each_reaps_what_the_others_dead_left(shelf: LockVault) -> None:
    note = shelf.path / "note"

    def die_holding() -> None:
        assert Peer(note).acquire(0)

    in_processes(1, die_holding)
    set_age(note.with_name("note.lock"), 11)
    with shelf.locks.acquire(b"note", 1.0):
        pass
    make_our_lock(note.with_name("note.lock"), dead_pid())
    set_age(note.with_name("note.lock"), 11)
    peer = Peer(note)
    assert peer.acquire(0)
    peer.release()
