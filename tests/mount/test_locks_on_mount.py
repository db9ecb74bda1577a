"""The path lock on a mount: other tools' locks hold up our saves, ours are made for each, the dead are reaped.

Contract, promises 4, 7 and 8; lock-protocol.md.
"""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import (
    MountedVault,
    dead_pid,
    drop_lock,
    eventually,
    hear,
    living_process,
    make_lock,
    say,
)


def _save(path: str, content: str) -> int:
    import os

    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(fd, content.encode())
    say("closing")
    try:
        os.close(fd)
    except OSError as error:
        return error.errno or -1
    return 0


# ------------------------------------------------------------------------------------------------- held by others


@pytest.mark.parametrize("existing", [True, False], ids=["existing", "new"])
def test_a_lock_held_by_a_living_process_delays_the_save_and_then_lets_it_through(
    mounted: MountedVault, existing: bool
) -> None:
    old = mounted.put_behind("f.txt", "old") if existing else mounted.behind / "f.txt"
    mounted.put_behind("other.txt", "old")
    with living_process() as pid:
        token = make_lock(old, pid)
        client = mounted.spawn(_save, mounted.mnt / "f.txt", "new")
        client.hear()
        time.sleep(0.7)
        assert client.running, "close() returned although the lock is held"
        assert (mounted.read_behind("f.txt") if existing else None) == (b"old" if existing else None)
        assert ("f.txt" in mounted.names_behind()) is existing
        # Whoever does not need this file is not held up.
        assert mounted.call(_save, mounted.mnt / "other.txt", "new") == 0
        assert mounted.read("other.txt") == b"new"
        if existing:
            assert mounted.read("f.txt") == b"old"
        assert client.running
        drop_lock(old, token)
        assert client.result() == 0
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"new"


def test_a_lock_held_too_long_fails_the_close_and_loses_nothing(vault_mount: Any) -> None:
    mounted: MountedVault = vault_mount("lock-timeout=0.4s", files={"f.txt": "old"})
    mounted.expect_log("busy|lock")
    with living_process() as pid:
        token = make_lock(mounted.behind / "f.txt", pid)
        assert mounted.call(_save, mounted.mnt / "f.txt", "new") == errno.EBUSY
        assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"old"
        (draft,) = mounted.kept()
        assert os.path.basename(draft["path"]) == "f.txt"
        assert mounted.kept_content(draft) == b"new"
        status = mounted.status()
        assert status["counters"]["busy"] >= 1
        assert status["retries"] == ["f.txt"]
        # Nothing hangs: other files, and this one too.
        assert mounted.call(_save, mounted.mnt / "g.txt", "g") == 0
        assert sorted(os.listdir(mounted.mnt)) == ["f.txt", "g.txt"]
        drop_lock(mounted.behind / "f.txt", token)
    # Promise 4: it is tried again until it is in.
    eventually(lambda: mounted.read_behind("f.txt") == b"new", "the refused save is tried again")
    eventually(lambda: mounted.kept() == [], "the published draft is not listed any more", step=0.3)
    assert mounted.read("f.txt") == b"new"
    assert mounted.status()["retries"] == []


def test_a_later_save_supersedes_one_that_was_refused(vault_mount: Any) -> None:
    def save_twice(path: str) -> list[int]:
        import os

        results = []
        for content in (b"first try", b"second try"):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.write(fd, content)
            try:
                os.close(fd)
                results.append(0)
            except OSError as error:
                results.append(error.errno or -1)
            say("tried")
            hear()
        return results

    mounted: MountedVault = vault_mount("lock-timeout=0.3s", files={"f.txt": "old"})
    mounted.expect_log("busy|lock")
    with living_process() as pid:
        token = make_lock(mounted.behind / "f.txt", pid)
        client = mounted.spawn(save_twice, mounted.mnt / "f.txt")
        client.hear()
        client.ask()
        drop_lock(mounted.behind / "f.txt", token)
        client.say()
        assert client.result() == [errno.EBUSY, errno.EBUSY]
    eventually(lambda: mounted.read_behind("f.txt") == b"second try", "the later save is tried again")
    eventually(lambda: mounted.kept() == [], "the superseded draft is not listed", step=0.3)
    time.sleep(0.5)
    assert mounted.read_behind("f.txt") == b"second try"


@pytest.mark.parametrize("operation", ["rename", "unlink", "truncate"])
def test_path_calls_on_a_locked_file_are_busy_in_the_end(vault_mount: Any, operation: str) -> None:
    mounted: MountedVault = vault_mount("lock-timeout=0.3s", files={"f.txt": "old"})
    mounted.expect_log("busy|lock")
    mounted.expect_kept(None)
    calls: dict[str, Any] = {
        "rename": lambda: os.rename(mounted.mnt / "f.txt", mounted.mnt / "g.txt"),
        "unlink": lambda: os.unlink(mounted.mnt / "f.txt"),
        "truncate": lambda: os.truncate(mounted.mnt / "f.txt", 1),
    }
    with living_process() as pid:
        token = make_lock(mounted.behind / "f.txt", pid)
        with pytest.raises(OSError) as caught:
            calls[operation]()
        assert caught.value.errno == errno.EBUSY
        assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"old"
        drop_lock(mounted.behind / "f.txt", token)


# --------------------------------------------------------------------------------------------------------- reaping


def _reaped(mounted: MountedVault) -> None:
    assert mounted.call(_save, mounted.mnt / "f.txt", "new") == 0
    assert mounted.read_behind("f.txt") == b"new"
    assert mounted.names_behind() == {"f.txt"}


def test_a_lock_whose_owner_is_dead_is_reaped(mounted: MountedVault) -> None:
    make_lock(mounted.put_behind("f.txt", "old"), dead_pid(), age=60)
    _reaped(mounted)


def test_a_lock_of_a_number_used_again_is_reaped(mounted: MountedVault) -> None:
    """The pid lives, but started at another time than the record says."""
    from vaultfs.locks.records import whoami

    me = whoami()
    with living_process() as pid:
        extra = {name: getattr(me, name) for name in ("host", "boot_id", "pid_ns", "time_ns")} | {"start_time": 1}
        make_lock(mounted.put_behind("f.txt", "old"), pid, extra=extra)
        _reaped(mounted)


def test_an_old_lock_directory_with_nothing_in_it_is_removed(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old")
    lock = mounted.behind / "f.txt.lock"
    lock.mkdir()
    os.utime(lock, (time.time() - 60,) * 2)
    _reaped(mounted)


def test_a_living_owner_is_never_reaped_however_old_its_lock_is(vault_mount: Any) -> None:
    mounted: MountedVault = vault_mount("lock-timeout=0.3s", files={"f.txt": "old"})
    mounted.expect_log("busy|lock")
    mounted.expect_kept(None)
    with living_process() as pid:
        token = make_lock(mounted.behind / "f.txt", pid, age=7 * 86400)
        assert mounted.call(_save, mounted.mnt / "f.txt", "new") == errno.EBUSY
        assert (mounted.behind / "f.txt.lock" / f".lease-{token}").read_text() == token + "\n"
        drop_lock(mounted.behind / "f.txt", token)


def _unknown_version(lock: Path) -> None:
    (lock / ".owner.json").write_text(
        json.dumps({"v": 2, "pid": 1, "token": "t", "created_at": "2020-01-01T00:00:00Z"})
    )


def _something_else_inside(lock: Path) -> None:
    (lock / "precious.txt").write_text("not a lock at all")


def _owner_is_a_link(lock: Path) -> None:
    (lock / ".owner.json").symlink_to("/etc/passwd")


@pytest.mark.parametrize("fill", [_unknown_version, _something_else_inside, _owner_is_a_link])
def test_what_is_not_understood_is_never_touched(vault_mount: Any, fill: Any) -> None:
    mounted: MountedVault = vault_mount("lock-timeout=0.3s", files={"f.txt": "old"})
    mounted.expect_log("busy|lock")
    mounted.expect_kept(None)
    mounted.allow_lock("f.txt.lock")
    lock = mounted.behind / "f.txt.lock"
    lock.mkdir()
    fill(lock)
    os.utime(lock, (time.time() - 3600,) * 2)
    before = sorted(os.listdir(lock))
    result = mounted.call(_save, mounted.mnt / "f.txt", "new")
    assert sorted(os.listdir(lock)) == before
    if fill is _unknown_version:
        assert result == errno.EBUSY and mounted.read_behind("f.txt") == b"old"


# --------------------------------------------------------------------------------------------------- our own locks


def test_each_save_is_made_under_the_lock_of_its_path(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old")
    watcher = mounted.watch_behind()
    mounted.shell("echo new > f.txt; echo more >> f.txt; echo new > n.txt; mv n.txt m.txt; rm m.txt")
    seen = [(event.what, event.name) for event in watcher.seen() if "MOVED" in event.what or "DELETE" in event.what]
    locked: set[str] = set()
    changes = 0
    for what, name in seen:
        if name.endswith(".lock"):
            if "MOVED_TO" in what:
                assert name not in locked, seen
                locked.add(name)
            else:
                locked.discard(name)
        elif not name.endswith(".pending") and not name.startswith("."):
            assert name + ".lock" in locked, f"{what} {name} without its lock: {seen}"
            changes += 1
    assert changes >= 6 and not locked


def test_a_lock_of_ours_is_complete_when_it_is_seen(mounted: MountedVault) -> None:
    """Whoever finds our lock finds its owner and lease in it (a peer would take it for residue otherwise)."""
    found: list[list[str]] = []

    def look(event: Any) -> None:
        if event.name == "f.txt.lock" and "MOVED_TO" in event.what:
            try:
                fd = os.open(mounted.behind / "f.txt.lock", os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                return  # released already: ours are held for milliseconds
            names = sorted(os.listdir(fd))
            if os.stat(fd).st_nlink:  # still standing when it was listed
                found.append(names)
            os.close(fd)

    watcher = mounted.watch_behind(on_event=look)
    mounted.shell("for i in $(seq 100); do echo $i > f.txt; done")
    taken = sum(1 for event in watcher.seen() if event.name == "f.txt.lock" and "MOVED_TO" in event.what)
    assert taken >= 100, "each save takes the lock"
    for names in found:
        # Being released (lease first, then owner) is the other state it may be met in.
        assert names in ([], [".owner.json"]) or (len(names) == 2 and names[0].startswith(".lease-")), names


# ---------------------------------------------------------------------------------------------------- out of sight


def test_locks_and_machinery_are_not_listed(mounted: MountedVault) -> None:
    mounted.put_behind("d/f.txt", "text")
    mounted.shell("echo made > d/g.txt")
    with living_process() as pid:
        token = make_lock(mounted.behind / "d" / "f.txt", pid)
        pending = mounted.behind / "d" / f"x.lock.{pid}.some-token.pending"
        pending.mkdir()
        assert sorted(os.listdir(mounted.mnt)) == ["d"]
        assert sorted(os.listdir(mounted.mnt / "d")) == ["f.txt", "g.txt"]
        found = mounted.shell("find . | sort").stdout.decode().split()
        assert found == [".", "./d", "./d/f.txt", "./d/g.txt"]
        # Reached by exact name: a tool that follows the protocol through the mount meets its peers' locks.
        assert json.loads((mounted.mnt / "d" / "f.txt.lock" / ".owner.json").read_text())["pid"] == pid
        pending.rmdir()
        drop_lock(mounted.behind / "d" / "f.txt", token)


def test_a_directory_of_documents_that_is_only_named_like_a_lock_is_shown(mounted: MountedVault) -> None:
    mounted.allow_lock("dead.lock")
    mounted.put_behind("dead.lock/story.txt", "once upon a time")
    assert os.listdir(mounted.mnt) == ["dead.lock"]
    assert mounted.read("dead.lock/story.txt") == b"once upon a time"


def test_the_state_directory_can_neither_be_reached_nor_made(mounted: MountedVault) -> None:
    assert (mounted.behind / ".vaultfs").is_dir()
    with pytest.raises(FileNotFoundError):
        os.stat(mounted.mnt / ".vaultfs")
    with pytest.raises(FileNotFoundError):
        os.open(mounted.mnt / ".vaultfs" / "staging", os.O_RDONLY)
    for make in (
        lambda: os.mkdir(mounted.mnt / ".vaultfs"),
        lambda: os.close(os.open(mounted.mnt / ".vaultfs", os.O_WRONLY | os.O_CREAT)),
        lambda: os.symlink("x", mounted.mnt / ".vaultfs"),
    ):
        with pytest.raises(OSError) as caught:
            make()
        assert caught.value.errno == errno.EPERM
    (mounted.mnt / "x").mkdir()
    with pytest.raises(OSError) as caught:
        os.rename(mounted.mnt / "x", mounted.mnt / ".vaultfs")
    assert caught.value.errno == errno.EPERM
    # A vault's subdirectory may have one of its own: it is a name like any other there? It must not be ours at least.
    assert (mounted.behind / ".vaultfs").is_dir()


def test_removing_a_directory_whose_only_content_is_residue_works(mounted: MountedVault) -> None:
    mounted.put_behind("d/f.txt", "text")
    make_lock(mounted.behind / "d" / "f.txt", dead_pid(), age=60)
    (mounted.behind / "d" / "gone.txt.lock").mkdir()
    os.utime(mounted.behind / "d" / "gone.txt.lock", (time.time() - 60,) * 2)
    mounted.shell("rm -r d")
    assert mounted.names_behind() == set()


def test_removing_a_directory_with_a_living_lock_in_it_is_busy(vault_mount: Any) -> None:
    mounted: MountedVault = vault_mount("lock-timeout=0.3s")
    mounted.expect_log("busy|lock")
    mounted.put_behind("d/f.txt", "text")
    (mounted.behind / "d" / "f.txt").unlink()
    with living_process() as pid:
        token = make_lock(mounted.behind / "d" / "f.txt", pid)
        with pytest.raises(OSError) as caught:
            os.rmdir(mounted.mnt / "d")
        assert caught.value.errno == errno.EBUSY
        assert (mounted.behind / "d" / "f.txt.lock" / ".owner.json").exists()
        drop_lock(mounted.behind / "d" / "f.txt", token)
    os.rmdir(mounted.mnt / "d")


# ------------------------------------------------------------------------------- the protocol run inside the mount


def _protocol(path: str, token: str) -> list[str]:
    """What another vault tool does, run on the mount: takes the lock, saves under it, releases it."""
    import json
    import os

    pid = os.getpid()
    lock, pending = f"{path}.lock", f"{path}.lock.{pid}.{token}.pending"
    os.mkdir(pending)
    record = {"v": 1, "pid": pid, "token": token, "created_at": "2026-11-30T00:00:00.000Z"}
    with open(f"{pending}/.owner.json", "w") as file:
        file.write(json.dumps(record) + "\n")
    with open(f"{pending}/.lease-{token}", "w") as file:
        file.write(token + "\n")
    os.rename(pending, lock)
    seen = [open(f"{lock}/.owner.json").read()]
    say("locked")
    hear()
    with open(path, "w") as file:  # a save under one's own lock is let through
        file.write("saved under my own lock\n")
    with open(path) as file:
        seen.append(file.read())
    say("saved")
    hear()
    os.unlink(f"{lock}/.lease-{token}")
    os.unlink(f"{lock}/.owner.json")
    os.rmdir(lock)
    return seen


def test_a_tool_can_run_the_whole_protocol_on_the_mount(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old")
    tool = mounted.spawn(_protocol, mounted.mnt / "f.txt", "11111111-2222-3333-4444-555555555555")
    tool.hear()
    lock = mounted.behind / "f.txt.lock"
    assert json.loads((lock / ".owner.json").read_text())["token"] == "11111111-2222-3333-4444-555555555555"
    assert sorted(os.listdir(lock)) == [".lease-11111111-2222-3333-4444-555555555555", ".owner.json"]
    assert os.listdir(mounted.mnt) == ["f.txt"]
    other = mounted.spawn(_save, mounted.mnt / "f.txt", "by another program")
    other.hear()
    time.sleep(0.3)
    assert other.running, "another program's save is held up by the tool's lock"
    tool.ask()
    assert other.running and mounted.read_behind("f.txt") == b"saved under my own lock\n"
    tool.say()
    assert tool.result()[1] == "saved under my own lock\n"
    assert other.result() == 0
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"by another program"
    mounted.expect_kept(None)  # the other's replacement began before the tool's save: that one is kept


def test_two_tools_that_run_the_protocol_on_the_mount_exclude_each_other(mounted: MountedVault) -> None:
    def take(path: str, token: str) -> bool:
        import errno
        import os

        lock, pending = f"{path}.lock", f"{path}.lock.{os.getpid()}.{token}.pending"
        os.mkdir(pending)
        for name, text in ((".owner.json", '{"v":1,"pid":%d,"token":"%s","created_at":"2026-11-30T00:00:00Z"}\n'),):
            with open(f"{pending}/{name}", "w") as file:
                file.write(text % (os.getpid(), token))
        with open(f"{pending}/.lease-{token}", "w") as file:
            file.write(token + "\n")
        try:
            os.rename(pending, lock)
        except OSError as error:
            assert error.errno in (errno.EEXIST, errno.ENOTEMPTY), error
            for name in (".owner.json", f".lease-{token}"):
                os.unlink(f"{pending}/{name}")
            os.rmdir(pending)
            return False
        say("locked")
        hear()
        for name in (f".lease-{token}", ".owner.json"):
            os.unlink(f"{lock}/{name}")
        os.rmdir(lock)
        return True

    mounted.put_behind("f.txt", "text")
    first = mounted.spawn(take, mounted.mnt / "f.txt", "a" * 36)
    first.hear()
    assert mounted.call(take, mounted.mnt / "f.txt", "b" * 36) is False
    first.say()
    assert first.result() is True
    third = mounted.spawn(take, mounted.mnt / "f.txt", "c" * 36)
    assert third.hear() == "locked"
    third.say()
    assert third.result() is True


# ------------------------------------------------------------------------------------------- when the name is taken


def test_a_file_at_the_place_of_the_lock_does_not_stop_saves(mounted: MountedVault) -> None:
    """`Cargo.lock` beside `Cargo`; git's `index.lock`."""
    mounted.put_behind(
        "Cargo.lock", "# a document, more than sixty-four bytes long, as they are in every project of cargo\n"
    )
    mounted.shell("echo 1 > Cargo; echo 2 > Cargo; echo more >> Cargo.lock")
    assert mounted.read_behind("Cargo") == b"2\n"
    assert mounted.read_behind("Cargo.lock").endswith(b"cargo\nmore\n")
    assert sorted(os.listdir(mounted.mnt)) == ["Cargo", "Cargo.lock"]


def test_a_name_too_long_for_its_lock_is_saved_all_the_same(mounted: MountedVault) -> None:
    name = "n" * 255
    assert mounted.call(_save, mounted.mnt / name, "long") == 0
    assert mounted.call(_save, mounted.mnt / name, "longer") == 0
    assert mounted.read_behind(name) == b"longer"
    with pytest.raises(OSError) as caught:
        os.close(os.open(mounted.mnt / (name + "n"), os.O_WRONLY | os.O_CREAT))
    assert caught.value.errno == errno.ENAMETOOLONG


def test_a_directory_named_like_the_lock_can_be_made_and_used(mounted: MountedVault) -> None:
    """proper-lockfile: an ownerless directory `NAME.lock`, made through the mount, is its maker's."""
    mounted.put_behind("f.json", "{}")

    def lockfile(path: str) -> int:
        import os

        os.mkdir(path + ".lock")
        os.utime(path + ".lock")
        with open(path, "w") as file:
            file.write("saved while it is held")
        try:
            os.mkdir(path + ".lock")
        except FileExistsError:
            os.rmdir(path + ".lock")
            return 0
        return 1

    assert mounted.call(lockfile, mounted.mnt / "f.json") == 0
    assert mounted.read_behind("f.json") == b"saved while it is held"
    assert mounted.names_behind() == {"f.json"}
