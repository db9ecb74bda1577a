"""Nothing gets out: no link, mount or hard link leads an operation of the daemon out of the vault.

Contract, promise 6 and the table of errors. The sentinels lie outside the vault; inotify tells whether anybody so
much as opened them.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import inotify_simple
import pytest

from tests.mount.harness import MountedVault, scaled

SECRET = b"a secret that lies outside the vault\n"
REFUSED_LINK = {errno.ELOOP, errno.EXDEV}


def _error_of(call: Callable[[], Any]) -> int:
    """The errno that `call` fails with; 0 if it does not fail."""
    try:
        result = call()
    except OSError as error:
        return error.errno or -1
    if isinstance(result, int) and result > 2:
        os.close(result)
    return 0


@contextmanager
def _untouched(mounted: MountedVault) -> Iterator[Path]:
    """A directory outside the vault with a file in it, which must be neither opened, read, written nor listed."""
    outside = mounted.base / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "secret.txt").write_bytes(SECRET)
    before = {path: os.lstat(path) for path in (outside, outside / "secret.txt")}
    flags = inotify_simple.flags
    watcher = mounted.watch(
        outside,
        mask=flags.OPEN | flags.ACCESS | flags.MODIFY | flags.CREATE | flags.DELETE | flags.MOVED_TO | flags.ATTRIB,
    )
    yield outside
    assert watcher.seen() == [], "something outside the vault was touched"
    watcher.close()
    for path, status in before.items():
        after = os.lstat(path)
        assert (after.st_mtime_ns, after.st_ctime_ns, after.st_ino) == (
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_ino,
        ), path
    assert os.listdir(outside) == ["secret.txt"]


def test_a_link_to_a_file_outside_is_listed_and_leads_nowhere(mounted: MountedVault) -> None:
    with _untouched(mounted) as outside:
        for name, target in {
            "absolute": "/etc/passwd",
            "secret": str(outside / "secret.txt"),
            "relative": "../outside/secret.txt",
            "winding": "sub/../../outside/secret.txt",
        }.items():
            (mounted.behind / name).symlink_to(target)
        (mounted.behind / "sub").mkdir()
        assert set(os.listdir(mounted.mnt)) == {"absolute", "secret", "relative", "winding", "sub"}
        assert _error_of(lambda: os.open(mounted.mnt / "absolute", os.O_RDONLY)) in REFUSED_LINK
        for name in ("secret", "relative", "winding"):  # never try to write where it would hurt if it went through
            path = mounted.mnt / name
            assert _error_of(lambda path=path: os.open(path, os.O_RDONLY)) in REFUSED_LINK, name
            assert _error_of(lambda path=path: os.open(path, os.O_WRONLY | os.O_TRUNC)) in REFUSED_LINK, name
            assert _error_of(lambda path=path: os.open(path, os.O_WRONLY | os.O_APPEND)) in REFUSED_LINK, name
            assert _error_of(lambda path=path: os.truncate(path, 0)) in REFUSED_LINK, name
            assert _error_of(lambda path=path: os.chmod(path, 0o777)) in REFUSED_LINK, name
            assert _error_of(lambda path=path: os.setxattr(path, "user.x", b"y")) in REFUSED_LINK, name
            assert (mounted.behind / name).is_symlink()
        mounted.shell("rm absolute secret relative winding")
        assert mounted.names_behind() == {"sub"}


def test_a_linked_directory_outside_leads_nowhere(mounted: MountedVault) -> None:
    with _untouched(mounted) as outside:
        (mounted.behind / "d").symlink_to(outside)
        inside = mounted.mnt / "d"
        for call in (
            lambda: os.listdir(inside),
            lambda: os.open(inside / "secret.txt", os.O_RDONLY),
            lambda: os.open(inside / "new.txt", os.O_WRONLY | os.O_CREAT),
            lambda: os.open(inside / "new.txt", os.O_WRONLY | os.O_CREAT | os.O_EXCL),
            lambda: os.mkdir(inside / "new"),
            lambda: os.unlink(inside / "secret.txt"),
            lambda: os.rename(inside / "secret.txt", mounted.mnt / "stolen.txt"),
            lambda: os.stat(inside / "secret.txt"),
        ):
            assert _error_of(call) in REFUSED_LINK
        (mounted.mnt / "mine.txt").write_text("mine")
        assert _error_of(lambda: os.rename(mounted.mnt / "mine.txt", inside / "mine.txt")) in REFUSED_LINK
        assert mounted.names_behind() == {"d", "mine.txt"}


def test_escaping_links_and_special_files_cannot_be_made(mounted: MountedVault) -> None:
    (mounted.mnt / "d" / "e").mkdir(parents=True)
    (mounted.mnt / "f.txt").write_text("text")
    for target, name in (
        ("/etc/passwd", "l"),
        ("..", "l"),
        ("../x", "l"),
        ("../../x", "d/l"),
        ("e/../../../x", "d/l"),
        ("../../../x", "d/e/l"),
    ):
        assert _error_of(lambda target=target, name=name: os.symlink(target, mounted.mnt / name)) == errno.EPERM, target
    assert _error_of(lambda: os.mkfifo(mounted.mnt / "fifo")) == errno.EPERM
    if os.getuid() == 0:
        assert _error_of(lambda: os.mknod(mounted.mnt / "null", 0o020666, os.makedev(1, 3))) == errno.EPERM
    assert _error_of(lambda: os.link(mounted.mnt / "f.txt", mounted.mnt / "g.txt")) == errno.EPERM
    assert mounted.names_behind() == {"d", "f.txt"}
    assert os.listdir(mounted.behind / "d") == ["e"]


def test_contained_links_work_and_stay_links(mounted: MountedVault) -> None:
    mounted.put_behind("d/n.md", "text\n")
    mounted.put_behind("top.md", "top\n")
    os.symlink("n.md", mounted.mnt / "d" / "l")
    os.symlink("../top.md", mounted.mnt / "d" / "up")
    os.symlink("d", mounted.mnt / "dl")
    assert mounted.read("d/l") == mounted.read("dl/n.md") == b"text\n"
    assert os.readlink(mounted.mnt / "d" / "up") == "../top.md"
    mounted.shell("echo changed > dl/l; echo up > d/up")
    assert (mounted.behind / "d" / "l").is_symlink() and (mounted.behind / "d" / "up").is_symlink()
    assert mounted.read_behind("d/n.md") == b"changed\n" and mounted.read_behind("top.md") == b"up\n"
    # A link is judged where it is when it is used: moved up, this one would lead out.
    os.rename(mounted.mnt / "d" / "up", mounted.mnt / "up")
    assert _error_of(lambda: os.open(mounted.mnt / "up", os.O_RDONLY)) in REFUSED_LINK


def test_dangling_lock_links_of_editors_can_be_made_and_removed(mounted: MountedVault) -> None:
    os.symlink("user@host.123:45", mounted.mnt / ".#note.md")
    assert os.readlink(mounted.mnt / ".#note.md") == "user@host.123:45"
    assert _error_of(lambda: os.stat(mounted.mnt / ".#note.md")) == errno.ENOENT
    assert _error_of(lambda: os.symlink("other@host", mounted.mnt / ".#note.md")) == errno.EEXIST
    os.unlink(mounted.mnt / ".#note.md")
    assert mounted.names_behind() == set()


def test_with_links_refused_no_link_leads_anywhere(vault_mount: Any) -> None:
    mounted: MountedVault = vault_mount("symlinks=refuse", files={"n.md": "text\n"})
    (mounted.behind / "l").symlink_to("n.md")
    assert _error_of(lambda: os.open(mounted.mnt / "l", os.O_RDONLY)) in REFUSED_LINK
    assert _error_of(lambda: os.symlink("n.md", mounted.mnt / "l2")) == errno.EPERM
    assert mounted.names_behind() == {"l", "n.md"}


def test_dot_dot_never_leads_out(mounted: MountedVault) -> None:
    with _untouched(mounted):
        (mounted.mnt / "sub").mkdir()
        # On the mount the kernel resolves `..` (to the mountpoint's own parent); in a path given to vaultfs, we do.
        for words in (["drafts", "save-as", "../../x", str(mounted.home / "x")], ["drafts", "save-as", "..", "x"]):
            assert mounted.cli(*words, check=False).returncode != 0
        assert os.listdir(mounted.home) == []


def test_a_hard_linked_file_can_be_read_and_not_written(mounted: MountedVault) -> None:
    outside = mounted.base / "outside.txt"
    outside.write_bytes(SECRET)
    os.link(outside, mounted.behind / "inside.txt")
    before = os.stat(outside)
    path = mounted.mnt / "inside.txt"
    assert mounted.read("inside.txt") == SECRET
    assert _error_of(lambda: os.open(path, os.O_WRONLY)) == errno.EMLINK
    assert _error_of(lambda: os.open(path, os.O_RDWR)) == errno.EMLINK
    assert _error_of(lambda: os.open(path, os.O_WRONLY | os.O_TRUNC)) == errno.EMLINK
    assert _error_of(lambda: os.open(path, os.O_WRONLY | os.O_APPEND)) == errno.EMLINK
    assert _error_of(lambda: os.truncate(path, 0)) == errno.EMLINK
    after = os.stat(outside)
    assert outside.read_bytes() == SECRET
    assert (after.st_mtime_ns, after.st_mode, after.st_nlink) == (before.st_mtime_ns, before.st_mode, before.st_nlink)


def test_with_hard_links_broken_a_save_replaces_this_name_only(vault_mount: Any) -> None:
    mounted: MountedVault = vault_mount("hardlinks=break")
    outside = mounted.base / "outside.txt"
    outside.write_bytes(SECRET)
    os.link(outside, mounted.behind / "inside.txt")
    mounted.shell("echo mine > inside.txt")
    assert mounted.read("inside.txt") == mounted.read_behind("inside.txt") == b"mine\n"
    assert outside.read_bytes() == SECRET and os.stat(outside).st_nlink == 1


def test_with_hard_links_refused_they_cannot_even_be_read(vault_mount: Any) -> None:
    mounted: MountedVault = vault_mount("hardlinks=refuse")
    outside = mounted.base / "outside.txt"
    outside.write_bytes(SECRET)
    os.link(outside, mounted.behind / "inside.txt")
    assert _error_of(lambda: os.open(mounted.mnt / "inside.txt", os.O_RDONLY)) == errno.EMLINK


@pytest.mark.skipif(os.getuid() != 0, reason="mounting in the vault needs root")
def test_another_file_system_inside_the_vault_is_not_entered(mounted: MountedVault) -> None:
    (mounted.behind / "m").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(mounted.behind / "m")], check=True)
    try:
        (mounted.behind / "m" / "secret.txt").write_bytes(SECRET)
        for call in (
            lambda: os.open(mounted.mnt / "m" / "secret.txt", os.O_RDONLY),
            lambda: os.open(mounted.mnt / "m" / "new.txt", os.O_WRONLY | os.O_CREAT),
            lambda: os.listdir(mounted.mnt / "m"),
        ):
            assert _error_of(call) == errno.EXDEV
        assert os.listdir(mounted.behind / "m") == ["secret.txt"]
    finally:
        subprocess.run(["umount", str(mounted.behind / "m")], check=True)


def _save_all_the_time(path: str, seconds: float) -> dict[str, int]:
    import os
    import time

    end = time.monotonic() + seconds
    results: dict[str, int] = {}
    number = 0
    while time.monotonic() < end:
        number += 1
        for name in (f"new-{number % 50}.txt", "same.txt"):
            try:
                fd = os.open(f"{path}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.write(fd, b"must stay inside")
                os.close(fd)
                outcome = "saved"
            except OSError as error:
                outcome = os.strerror(error.errno or 0)
            results[outcome] = results.get(outcome, 0) + 1
    return results


def _swap_all_the_time(directory: str, seconds: float) -> int:
    import ctypes
    import time

    libc = ctypes.CDLL(None, use_errno=True)
    end = time.monotonic() + seconds
    count = 0
    while count == 0 or time.monotonic() < end:
        libc.renameat2(-100, f"{directory}/d".encode(), -100, f"{directory}/link".encode(), 2)
        count += 1
        time.sleep(0.0005)
    return count


def test_swapping_a_directory_for_a_link_wins_no_race(mounted: MountedVault) -> None:
    mounted.expect_kept(None)
    mounted.expect_log(".")  # refusals are told in the log; what matters here is what lies outside
    with _untouched(mounted) as outside:
        (mounted.behind / "d").mkdir()
        (mounted.behind / "link").symlink_to(outside)
        seconds = scaled(2, "VAULTFS_TEST_STORM")
        swapper = mounted.spawn(_swap_all_the_time, mounted.behind, seconds)
        savers = [mounted.spawn(_save_all_the_time, mounted.mnt / "d", seconds) for _ in range(2)]
        assert swapper.result() > 10
        outcomes = [saver.result() for saver in savers]
        assert any("saved" in outcome for outcome in outcomes), f"no save ever met the directory: {outcomes}"
        assert any(set(outcome) - {"saved"} for outcome in outcomes), f"no save ever met the link: {outcomes}"
        # Once the directory is back in its place, locks whose release failed meanwhile are released: see the teardown.
        if (mounted.behind / "d").is_symlink():
            mounted.call(_swap_all_the_time, mounted.behind, 0)
        assert (mounted.behind / "d").is_dir() and not (mounted.behind / "d").is_symlink()
