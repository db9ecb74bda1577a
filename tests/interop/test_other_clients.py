"""Path locks shared with programs that are not ours: a Node.js client, the shell example, and a path-based reaper.

`vault_lock.mjs` follows the protocol document only; `docs/examples/lock.sh` is what readers of that page copy.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.lock_support import FORK, GUARD, LockVault, dead_pid, drive, make_lock, make_our_lock, set_age
from tests.mount.harness import REPOSITORY
from vaultfs.locks import PathLocks
from vaultfs.root import VaultRoot
from vaultfs.state import StateDirectory

CLIENT = Path(__file__).with_name("vault_lock.mjs")
SHELL = REPOSITORY / "docs/examples/lock.sh"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[LockVault]:
    with LockVault(tmp_path / "vault") as vault:
        yield vault


def node(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["node", str(CLIENT), *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=GUARD)
    assert process.returncode == 0
    return output.strip()


def count_ours(vault: Path, rounds: int) -> None:
    with VaultRoot.open(vault) as root, StateDirectory.open(root) as state:
        locks = PathLocks(root, state)
        for _ in range(rounds):
            with locks.acquire(b"counter", GUARD):
                value = int((vault / "counter").read_text())
                (vault / "counter").write_text(str(value + 1))


def count_together(vault: Path, through: Path, rounds: int) -> None:
    """Four of ours in `vault` and four of Node's at `through` (the same directory), `rounds` each."""
    go = vault.parent / "go"
    others = [node("count", through / "counter", rounds, go) for _ in range(4)]
    ours = [FORK.Process(target=count_ours, args=(vault, rounds)) for _ in range(4)]
    for process in ours:
        process.start()
    go.touch()
    try:
        for process in ours:
            process.join(GUARD * 2)
        assert [process.exitcode for process in ours] == [0] * 4
        for other in others:
            said(other)
    finally:
        for process in ours:
            process.kill()
        for other in others:
            other.kill()
            other.wait()


@needs_node
@pytest.mark.parametrize("rounds", [150, pytest.param(1250, marks=pytest.mark.full)])
def test_four_of_ours_and_four_of_theirs_count_exactly_and_leave_no_lock(shelf: LockVault, rounds: int) -> None:
    """In full: 10,000 critical sections."""
    (shelf.path / "counter").write_text("0")
    count_together(shelf.path, shelf.path, rounds)
    assert int((shelf.path / "counter").read_text()) == 8 * rounds
    assert sorted(os.listdir(shelf.path)) == [".vaultfs", "counter"]
    assert shelf.pending == []


@needs_node
def test_each_is_held_up_by_the_other_while_that_lives_and_reaps_it_when_it_is_dead(shelf: LockVault) -> None:
    held = shelf.locks.acquire(b"note")
    assert said(node("judge", shelf.path / "note")) == "alive"
    assert said(node("try", shelf.path / "note")) == "busy"
    held.release()
    theirs = node("hold", shelf.path / "note")
    assert theirs.stdout is not None and theirs.stdout.readline() == "locked\n"
    assert shelf.locks.try_acquire(b"note") is None
    assert theirs.communicate("go\n", GUARD)[0] == "removed\n"
    make_our_lock(shelf.path / "note.lock", dead_pid())
    assert said(node("try", shelf.path / "note", 2000)) == "locked"
    killed = node("hold", shelf.path / "note")
    assert killed.stdout is not None and killed.stdout.readline() == "locked\n"
    killed.kill()
    killed.wait()
    assert shelf.locks.try_acquire(b"note") is None, "a record that does not say where its number counts must be stale"
    set_age(shelf.path / "note.lock", 60)
    shelf.locks.acquire(b"note", 1).release()


@needs_node
def test_both_judge_alike(shelf: LockVault) -> None:
    cases = {
        "dead": lambda at: make_our_lock(at, dead_pid()),
        "alive": lambda at: make_lock(at, pid=os.getpid(), age=86400),
        "unknown": lambda at: make_our_lock(at, 4711, host="elsewhere", boot_id="elsewhere"),
        "residue": lambda at: (at.mkdir(), set_age(at, 60)),
        "foreign": lambda at: (at.mkdir(), os.mkfifo(at / ".owner.json")),
    }
    for verdict, make in cases.items():
        make(shelf.path / f"{verdict}.lock")
        assert said(node("judge", shelf.path / verdict)) == verdict
    assert {lock.path.decode(): str(lock.verdict) for lock in shelf.locks.survey().look().locks} == {
        verdict: verdict for verdict in cases
    }


# ------------------------------------------------------------------------------------------------- the shell example


def run_shell(file: Path, *command: object) -> subprocess.Popen[str]:
    return subprocess.Popen([str(SHELL), str(file), *map(str, command)], stdin=subprocess.PIPE, stdout=-1, text=True)


def test_the_shell_example_and_ours_count_exactly_together(shelf: LockVault) -> None:
    (shelf.path / "counter").write_text("0")
    add = 'read -r n <"$1"; echo $((n + 1)) >"$1"'
    loop = 'i=0; while [ $i -lt 8 ]; do "$1" "$2" sh -c "$3" sh "$2" || exit; i=$((i + 1)); done'
    shells = [
        subprocess.Popen(["sh", "-c", loop, "sh", str(SHELL), str(shelf.path / "counter"), add]) for _ in range(3)
    ]
    count_ours(shelf.path, 60)
    assert [shell.wait(GUARD) for shell in shells] == [0] * 3
    assert int((shelf.path / "counter").read_text()) == 3 * 8 + 60
    assert sorted(os.listdir(shelf.path)) == [".vaultfs", "counter"]


def test_the_shell_example_waits_for_the_living_and_reaps_the_dead(shelf: LockVault) -> None:
    held = shelf.locks.acquire(b"note")
    waiting = run_shell(shelf.path / "note", "echo", "inside")
    time.sleep(0.3)
    assert waiting.poll() is None
    held.release()
    assert said(waiting) == "inside"
    make_our_lock(shelf.path / "note.lock", dead_pid())
    assert said(run_shell(shelf.path / "note", "echo", "inside")) == "inside"
    inside = run_shell(shelf.path / "note", "sh", "-c", "echo locked; read -r _")
    assert inside.stdout is not None and inside.stdout.readline() == "locked\n"
    assert shelf.locks.try_acquire(b"note") is None
    inside.communicate("\n", GUARD)
    assert inside.returncode == 0 and not (shelf.path / "note.lock").exists()


def test_the_shell_example_leaves_what_it_cannot_judge(shelf: LockVault) -> None:
    (shelf.path / "note.lock").mkdir()
    os.mkfifo(shelf.path / "note.lock/.owner.json")
    busy = run_shell(shelf.path / "note", "echo", "inside")
    assert busy.wait(GUARD) == 75
    assert os.listdir(shelf.path / "note.lock") == [".owner.json"]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_the_shell_example_is_clean() -> None:
    subprocess.run(["shellcheck", str(SHELL)], check=True)


# ------------------------------------------------------------------------------------- stopped at the worst moment


def _reap_by_path(lock: Path, token: str, step: int) -> None:
    """What a client without descriptors does to a lock that it has judged dead; stops before its step number `step`."""
    steps = [
        lambda: os.unlink(lock / f".lease-{token}"),
        lambda: os.unlink(lock / ".owner.json"),
        lambda: os.rmdir(lock),
    ]
    for number, act in enumerate(steps):
        if number == step:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            act()
        except FileNotFoundError:
            if number == 0:
                os._exit(0)  # the lease is gone: somebody else has decided
        except OSError:
            os._exit(0)  # not empty: a successor's


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_path_based_reaper_that_was_stopped_leaves_the_successor_a_lock_that_it_can_release(
    shelf: LockVault, step: int
) -> None:
    lock = make_our_lock(shelf.path / "note.lock", dead_pid())
    token = next(name for name in os.listdir(lock) if name.startswith(".lease-")).removeprefix(".lease-")
    reaper = FORK.Process(target=_reap_by_path, args=(lock, token, step))
    reaper.start()
    assert reaper.pid is not None
    os.waitpid(reaper.pid, os.WUNTRACED)
    set_age(lock, 60)  # step 2: ownerless, and old enough for anybody to remove
    held, who = drive(shelf.locks, b"note", GUARD)
    assert held is not None, who
    os.kill(reaper.pid, signal.SIGCONT)
    reaper.join(GUARD)
    held.assert_owned()
    other = shelf.other()
    assert other.try_acquire(b"note") is None, "the successor's lock holds others up, even if its owner file was taken"
    held.release()
    assert not lock.exists()
    other.acquire(b"note", 1).release()
