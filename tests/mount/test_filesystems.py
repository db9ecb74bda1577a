"""The core of it all, wherever the vault lies, whoever serves it, and wherever it is mounted.

One program (`everyday`) does what programs do every day; it runs as the mount's user on ext4, btrfs, xfs and tmpfs, as
root and without privileges, on a mount elsewhere and over the vault itself. What it did is then looked at in the vault.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.mount.harness import (
    FileSystem,
    MountedVault,
    dead_pid,
    drop_lock,
    eventually,
    hear,
    is_served,
    living_process,
    make_lock,
    say,
)


def everyday(directory: str) -> list[str]:
    """Makes, saves, appends, edits, renames, removes, locks, links and maps; says what went wrong."""
    import errno
    import fcntl
    import mmap
    import os
    import subprocess

    os.chdir(directory)
    problems = []

    def check(what: str, is_so: Any) -> None:
        if not is_so:
            problems.append(what)

    def text(name: str) -> str:
        with open(name) as file:
            return file.read()

    os.makedirs("notes/daily")
    for number in range(20):
        with open("notes/n.md", "w") as file:
            file.write(f"save {number}\n" * (number + 1))
        check(f"save {number}", text("notes/n.md") == f"save {number}\n" * (number + 1))
    with open("notes/n.md", "a") as file:
        file.write("appended\n")
    check("append", text("notes/n.md").endswith("save 19\nappended\n"))
    with open("notes/n.md", "r+") as file:
        file.write("EDIT")
    check("edit", text("notes/n.md").startswith("EDIT 19\n"))
    os.truncate("notes/n.md", 8)
    check("truncate", text("notes/n.md") == "EDIT 19\n")

    with open("replacement", "w") as file:
        file.write("by rename\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace("replacement", "notes/n.md")
    check("rename over", text("notes/n.md") == "by rename\n")
    check("listing", sorted(os.listdir(".")) == ["notes"] and sorted(os.listdir("notes")) == ["daily", "n.md"])
    os.rename("notes/daily", "notes/weekly")
    os.rmdir("notes/weekly")
    folder = os.open("notes", os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)

    os.chmod("notes/n.md", 0o640)
    os.utime("notes/n.md", ns=(1_000_000_000_123_456_789, 1_000_000_001_123_456_789))
    status = os.stat("notes/n.md")
    check("mode", status.st_mode & 0o777 == 0o640)
    check("mtime", status.st_mtime_ns == 1_000_000_001_123_456_789)
    os.setxattr("notes/n.md", "user.colour", b"blue")
    with open("notes/n.md", "w") as file:
        file.write("saved again\n")
    check("xattr survives a save", os.getxattr("notes/n.md", "user.colour") == b"blue")
    check("mode survives a save", os.stat("notes/n.md").st_mode & 0o777 == 0o640)
    check("owner", os.stat("notes/n.md").st_uid == os.getuid())

    os.symlink("n.md", "notes/link")
    check("link", text("notes/link") == "saved again\n")

    with open("sparse", "wb") as file:
        file.seek(4 << 20)
        file.write(b"end")
    status = os.stat("sparse")
    check("sparse size", status.st_size == (4 << 20) + 3)
    with open("sparse", "r+b") as file:  # an edit of it copies (or reflinks) it, with its hole
        file.write(b"begin")
    with open("sparse", "rb") as file:
        check("sparse content", file.read(8) == b"begin\0\0\0" and file.seek(4 << 20) and file.read() == b"end")

    with open("mapped", "wb") as file:
        file.write(b"." * 10000)
    with open("mapped", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[5000:5006] = b"mapped"
        memory.flush()
    with open("mapped", "rb") as file:
        check("mmap", file.read()[4999:5007] == b".mapped.")

    with open("lock", "w") as one, open("lock", "w") as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        try:
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
            check("flock excludes", False)
        except OSError as error:
            check("flock", error.errno == errno.EAGAIN)

    for flags, expected in ((os.O_EXCL, errno.EEXIST), (0, 0)):
        try:
            os.close(os.open("notes/n.md", os.O_WRONLY | os.O_CREAT | flags, 0o600))
            got = 0
        except OSError as error:
            got = error.errno or -1
        check(f"create {flags}", got == expected)

    subprocess.run("for i in 1 2 3; do echo line $i; done > out.txt; echo more >> out.txt", shell=True, check=True)
    check("shell", text("out.txt") == "line 1\nline 2\nline 3\nmore\n")
    with open("big", "wb") as file:
        for number in range(64):
            file.write(bytes([number]) * 65536)
    with open("big", "rb") as file:
        check("big", all(file.read(65536) == bytes([number]) * 65536 for number in range(64)))
    os.unlink("big")

    below = os.statvfs(".")
    check("statvfs", below.f_blocks > 0 and below.f_namemax >= 255)
    name = b"caf\xe9-\xff"
    with open(name, "wb") as file:
        file.write(b"bytes")
    check("names are bytes", name in os.listdir(b"."))
    os.unlink(name)
    return problems


def _everyday(mounted: MountedVault) -> None:
    assert mounted.call(everyday, mounted.mnt) == []
    assert mounted.names_behind() == {"notes", "sparse", "mapped", "lock", "out.txt"}
    assert mounted.names_behind("notes") == {"n.md", "link"}
    assert mounted.read_behind("notes/n.md") == b"saved again\n"
    assert mounted.read_behind("out.txt") == b"line 1\nline 2\nline 3\nmore\n"
    status = os.stat(mounted.behind / "sparse")
    assert status.st_size == (4 << 20) + 3 and status.st_blocks * 512 < 2 << 20, "holes are kept"
    assert status.st_uid == mounted.uid
    # An outside change is seen, and a dead owner's lock is reaped, here as anywhere.
    mounted.put_behind("out.txt", "from outside\n")
    eventually(lambda: mounted.read("out.txt") == b"from outside\n", "the outside change is seen")
    make_lock(mounted.behind / "out.txt", dead_pid(), age=60)
    os.chown(mounted.behind / "out.txt.lock", mounted.uid, -1)
    for file in (mounted.behind / "out.txt.lock").iterdir():
        os.chown(file, mounted.uid, -1)
    mounted.shell("echo in spite of it > out.txt")
    assert mounted.read_behind("out.txt") == b"in spite of it\n"


PLACES = pytest.mark.parametrize("over_itself", [False, True], ids=["elsewhere", "over-itself"])
USERS = pytest.mark.parametrize("user", ["root", "unprivileged"])


def _uid(user: str, unprivileged: int) -> int:
    if user == "root" and os.getuid() != 0:
        pytest.skip("serving as root needs root")
    return 0 if user == "root" else unprivileged


@USERS
@PLACES
def test_everyday_work(vault_mount: Any, unprivileged: int, user: str, over_itself: bool) -> None:
    _everyday(vault_mount(uid=_uid(user, unprivileged), over_itself=over_itself))


@pytest.mark.parametrize("kind", ["ext4", "btrfs", "xfs", "tmpfs"])
@pytest.mark.parametrize(
    ("user", "over_itself"), [("root", False), ("unprivileged", True)], ids=["root", "unprivileged"]
)
def test_everyday_work_on(
    vault_mount: Any,
    file_system: Callable[[str], FileSystem],
    unprivileged: int,
    kind: str,
    user: str,
    over_itself: bool,
) -> None:
    system = file_system(kind)
    _everyday(vault_mount(uid=_uid(user, unprivileged), over_itself=over_itself, on=system.path))


def _killed_halfway(path: str) -> None:
    import os

    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"half")
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize("kind", ["ext4", "btrfs", "xfs", "tmpfs"])
def test_promises_hold_on(vault_mount: Any, file_system: Callable[[str], FileSystem], kind: str) -> None:
    """What depends on the file system below: exchange, leases, reflinks, attributes of staging files, kept drafts."""
    mounted: MountedVault = vault_mount(
        "lock-timeout=0.3s",
        on=file_system(kind).path,
        files={"killed.md": "old", "locked.md": "old", "edited.md": "the old text"},
    )
    mounted.expect_log("busy|lock|conflict")
    mounted.expect_kept(1)
    mounted.expect_conflicts(1)
    mounted.spawn(_killed_halfway, mounted.mnt / "killed.md").end()
    (draft,) = eventually(mounted.kept, "the draft is listed", step=0.2)
    assert mounted.kept_content(draft) == b"half" and mounted.read_behind("killed.md") == b"old"

    with living_process() as pid:
        token = make_lock(mounted.behind / "locked.md", pid)
        assert mounted.shell("echo new > locked.md; echo $?", check=False).returncode == 0
        assert mounted.read_behind("locked.md") == b"old"
        drop_lock(mounted.behind / "locked.md", token)
    eventually(lambda: mounted.read_behind("locked.md") == b"new\n", "the refused save is tried again")

    def edit(path: str) -> int:
        import os

        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, b"MY", 4)
        say("written")
        hear()
        try:
            os.close(fd)
        except OSError as error:
            return error.errno or -1
        return 0

    client = mounted.spawn(edit, mounted.mnt / "edited.md")
    client.hear()
    mounted.put_behind("edited.md", "somebody else's text")
    client.say()
    assert client.result() == errno.ESTALE
    assert mounted.read_behind("edited.md") == b"somebody else's text"
    (copy,) = mounted.conflicts()
    assert mounted.read_behind(copy) == b"the MYd text"


@pytest.fixture
def small_file_system() -> Iterator[FileSystem]:
    """4 MiB, in memory. (Named before `vault_mount` by a test, it outlives its mounts.)"""
    if os.getuid() != 0:
        pytest.skip("making file systems needs root")
    system = FileSystem("tmpfs", size=4 << 20)
    yield system
    system.close()


def _save_too_much(path: str) -> list[int]:
    """Tries to save more than fits, and says what each attempt was told: 0 for nothing."""
    import os

    results = []
    for _ in range(3):
        told = 0
        try:
            fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        except OSError as error:  # not even room to begin: the first attempt has filled the disk
            results.append(error.errno or -1)
            continue
        try:
            for _ in range(80):
                os.write(fd, b"x" * 65536)
        except OSError as error:
            told = error.errno or -1
        try:
            os.close(fd)
        except OSError as error:
            told = told or error.errno or -1
        results.append(told)
    return results


def test_a_full_vault_tells_the_program_and_recovers(small_file_system: FileSystem, vault_mount: Any) -> None:
    mounted: MountedVault = vault_mount(on=small_file_system.path, files={"f.txt": "old", "other.txt": "other"})
    mounted.expect_kept(None)
    mounted.expect_log("ENOSPC|No space|full")
    assert mounted.call(_save_too_much, mounted.mnt / "f.txt") == [errno.ENOSPC] * 3
    content = mounted.read("f.txt")
    # What a program closes after a write that failed is what it wants to save, here as on any file system: the old
    # version, or all that was written; never a hole, never a mix.
    assert content == mounted.read_behind("f.txt") and content in (b"old", b"x" * len(content))
    assert mounted.read("other.txt") == b"other"
    for draft in mounted.kept():
        assert draft["path"] == "f.txt"
    os.unlink(mounted.mnt / "f.txt")
    mounted.shell("echo fits again > other.txt")
    assert mounted.read_behind("other.txt") == b"fits again\n"


# -------------------------------------------------------------------------------------------- how it begins and ends


@USERS
def test_in_the_background_it_answers_when_the_command_returns(vault_mount: Any, unprivileged: int, user: str) -> None:
    mounted: MountedVault = vault_mount(background=True, uid=_uid(user, unprivileged), files={"f.txt": "text"})
    assert mounted.read("f.txt") == b"text"
    assert mounted.status()["pid"] == mounted.pid
    mounted.shell("echo new > f.txt")
    assert mounted.read_behind("f.txt") == b"new\n"


@PLACES
def test_plain_fusermount_ends_it_cleanly(vault_mount: Any, over_itself: bool) -> None:
    mounted: MountedVault = vault_mount(over_itself=over_itself, files={"f.txt": "text"})
    mounted.shell("echo new > f.txt")
    # Again if it is busy for a moment: anybody on the machine who looks at all mounts (df) may hold it just then.
    eventually(
        lambda: subprocess.run(["fusermount3", "-u", str(mounted.mnt)], capture_output=True).returncode == 0,
        "fusermount3 -u unmounts it",
    )
    _wait_for_end(mounted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(vault_mount: Any, number: signal.Signals) -> None:
    mounted: MountedVault = vault_mount(files={"f.txt": "text"})
    mounted.shell("echo new > f.txt")
    os.kill(mounted.pid, number)
    _wait_for_end(mounted)
    assert mounted.read_behind("f.txt") == b"new\n"


def _wait_for_end(mounted: MountedVault) -> None:
    assert mounted._process is not None
    assert mounted._process.wait(60) == 0
    assert not is_served(mounted.mnt)
    mounted.mark_ended()


def test_umount_waits_for_an_open_save(mounted: MountedVault) -> None:
    """A writer that is about to close: what it wrote is in the vault when the mount is gone, or the mount is busy."""
    client = mounted.spawn_shell(
        "cd /; exec 3>$OLDPWD/f.txt; echo half >&3; echo open; read _; echo whole >&3; exec 3>&-"
    )
    client.hear()
    refused = mounted.cli("umount", str(mounted.mnt), check=False)
    assert refused.returncode != 0 and is_served(mounted.mnt)
    assert b"bash" in refused.stderr + refused.stdout, "it says who holds it"
    client.say()
    client.result()
    mounted.umount()
    assert mounted.read_behind("f.txt") == b"half\nwhole\n"


def test_mounted_again_after_a_kill_the_vault_is_as_it_was_and_nothing_is_lost(vault_mount: Any) -> None:
    first: MountedVault = vault_mount(files={"f.txt": "old"})
    first.expect_kept(None)
    client = first.spawn_shell("exec 3>f.txt; echo half >&3; exec 4>new.txt; echo new >&4; echo open; read _")
    client.hear()
    os.kill(first.pid, signal.SIGKILL)
    assert first._process is not None
    first._process.wait(60)
    client.kill()
    subprocess.run(["fusermount3", "-uz", str(first.mnt)], check=False, capture_output=True)
    assert first.read_behind("f.txt") == b"old" and first.names_behind() == {"f.txt"}
    first.start()
    first.expect_log("recover|killed|left|took this vault over")
    kept = {draft["path"]: draft for draft in first.kept()}
    assert first.kept_content(kept["f.txt"]) == b"half\n"
    assert first.kept_content(kept["new.txt"]) == b"new\n" if "new.txt" in kept else first.read("new.txt") == b"new\n"
    assert first.read("f.txt") == b"old"
