"""What a vault root finds, refuses and says about it: every property by both resolvers."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.conftest import Mounter
from tests.mount.harness import FileSystem
from vaultfs import kernel, resolvers
from vaultfs.errors import PathKind, UnsafePathError, VaultGoneError
from vaultfs.root import VaultRoot

CREATE = os.O_CREAT | os.O_WRONLY | os.O_TRUNC


def write(root: VaultRoot, path: bytes, data: bytes = b"text") -> None:
    descriptor = root.open_file(path, CREATE, 0o644)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def read(root: VaultRoot, path: bytes) -> bytes:
    descriptor = root.open_file(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 20)
    finally:
        os.close(descriptor)


def refusal(call: Callable[..., object], *arguments: object, **keywords: object) -> UnsafePathError:
    with pytest.raises(UnsafePathError) as caught:
        call(*arguments, **keywords)
    return caught.value


OPERATIONS: dict[str, Callable[[VaultRoot, bytes], object]] = {
    "stat": lambda root, path: root.stat(path),
    "exists": lambda root, path: root.exists(path),
    "open": lambda root, path: root.open_file(path, os.O_RDONLY),
    "create": lambda root, path: root.open_file(path, CREATE, 0o600),
    "open_directory": lambda root, path: root.open_directory(path),
    "scandir": lambda root, path: root.scandir(path),
    "listdir": lambda root, path: root.listdir(path),
    "mkdir": lambda root, path: root.mkdir(path),
    "mkdir recursive": lambda root, path: root.mkdir(path, recursive=True, exclusive=False),
    "unlink": lambda root, path: root.unlink(path, missing_ok=True),
    "rmdir": lambda root, path: root.rmdir(path, missing_ok=True),
    "rename from": lambda root, path: root.rename(path, b"elsewhere"),
    "rename to": lambda root, path: root.rename(b"a file", path),
    "exchange": lambda root, path: root.rename(b"a file", path, kernel.RENAME_EXCHANGE),
    "symlink": lambda root, path: root.symlink(b"target", path),
    "readlink": lambda root, path: root.readlink(path),
    "remove_tree": lambda root, path: root.remove_tree(path),
    "sync_directory": lambda root, path: root.sync_directory(path),
    "check": lambda root, path: root.check(path),
    "parent": lambda root, path: root.parent(path).__enter__(),
}

# -- opening the vault --------------------------------------------------------------------------------------------


def test_the_vault_itself_is_judged_before_it_is_used(tmp_path: Path, resolver: str) -> None:
    (tmp_path / "vault").mkdir()
    (tmp_path / "link").symlink_to("vault")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    expected = {
        "": PathKind.ROOT_EMPTY,
        str(tmp_path / "nothing"): PathKind.ROOT_MISSING,
        str(tmp_path / "file" / "below"): PathKind.ROOT_MISSING,
        str(tmp_path / "link"): PathKind.ROOT_LINK,
        str(tmp_path / "link") + "/": PathKind.ROOT_LINK,
        str(tmp_path / "dangling"): PathKind.ROOT_LINK,
        str(tmp_path / "file"): PathKind.ROOT_NOT_DIRECTORY,
        str(tmp_path / "loop" / "vault"): PathKind.ROOT_UNRESOLVABLE,
        str(tmp_path / ("n" * 300)): PathKind.ROOT_UNRESOLVABLE,
        str(tmp_path / "vault\0"): PathKind.ROOT_UNRESOLVABLE,
    }
    for path, kind in expected.items():
        error = refusal(VaultRoot.open, path, resolver=resolver)
        assert (path, error.kind) == (path, kind)
        assert error.label == "vault"


def test_links_above_the_vault_are_worked_out_once(tmp_path: Path, resolver: str) -> None:
    (tmp_path / "real" / "vault").mkdir(parents=True)
    (tmp_path / "way").symlink_to("real")
    with VaultRoot.open(tmp_path / "way" / "vault", resolver=resolver) as root:  # type: ignore[arg-type]
        assert root.path == os.fsencode(tmp_path / "real" / "vault")
        (tmp_path / "way").unlink()
        root.assert_bound()


def test_where_openat2_is_not_to_be_had_the_walk_takes_its_place(vault: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with VaultRoot.open(vault) as root:
        assert root.resolver == "openat2"
    for number in (errno.ENOSYS, errno.EPERM):

        def forbidden(*_: object, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(resolvers, "openat2", forbidden)
        with VaultRoot.open(vault) as root:
            assert root.resolver == "walk"
            write(root, b"note")
            assert root.listdir(b"") == [b"note"]


def test_an_openat2_that_is_always_interrupted_ends_in_the_walk(vault: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with VaultRoot.open(vault, resolver="openat2") as root:
        root.mkdir(b"a/b", recursive=True)
        calls = 0

        def raced(*_: object) -> int:
            nonlocal calls
            calls += 1
            raise BlockingIOError(errno.EAGAIN, "raced")

        monkeypatch.setattr(resolvers, "openat2", raced)
        write(root, b"a/b/note", b"through")
        assert read(root, b"a/b/note") == b"through"
        assert root.stat(b"a/b/note").st_size == 7
        root.rename(b"a/b/note", b"a/note")
        assert root.listdir(b"a/b") == []
        assert 0 < calls < 100


def test_a_closed_root_does_nothing_to_what_has_its_number_now(vault: Path, resolver: str) -> None:
    (vault / "d").mkdir()
    root = VaultRoot.open(vault, resolver=resolver)  # type: ignore[arg-type]
    number = root.fd
    root.close()
    others = os.open(vault, os.O_RDONLY)
    try:
        assert others == number, "the test wants the number to be used again"
        root.close()
        os.fstat(others)
        for name in ("stat", "create", "scandir", "mkdir", "unlink", "rename to"):
            with pytest.raises(OSError, match="descriptor"):
                OPERATIONS[name](root, b"d/name")
            with pytest.raises(OSError, match="descriptor"):
                OPERATIONS[name](root, b"name")
        assert os.listdir(vault) == ["d"]
    finally:
        os.close(others)


# -- is it still the vault? ---------------------------------------------------------------------------------------


def test_a_vault_that_is_moved_removed_or_replaced_is_gone(root: VaultRoot, vault: Path, tmp_path: Path) -> None:
    root.assert_bound()
    vault.rename(tmp_path / "moved")
    with pytest.raises(VaultGoneError):
        root.assert_bound()
    vault.mkdir()
    with pytest.raises(VaultGoneError):
        root.assert_bound()
    vault.rmdir()
    vault.symlink_to("moved")
    with pytest.raises(VaultGoneError):
        root.assert_bound()
    vault.unlink()
    (tmp_path / "moved").rename(vault)
    root.assert_bound()
    vault.rmdir()
    with pytest.raises(VaultGoneError):
        root.assert_bound()


def test_what_is_mounted_over_the_vault_is_not_the_vault(root: VaultRoot, vault: Path, mount: Mounter) -> None:
    write(root, b"note")
    mount("-t", "tmpfs", "none", vault)
    with pytest.raises(VaultGoneError):
        root.assert_bound()
    root.covered = True  # it was us
    root.assert_bound()
    assert root.listdir(b"") == [b"note"]
    assert root.mkdir(b"a/b", recursive=True) == [b"a", b"a/b"]
    assert os.listdir(vault) == []


def test_a_parent_that_was_moved_away_is_noticed_afterwards(root: VaultRoot) -> None:
    root.mkdir(b"a/b", recursive=True)
    with root.parent(b"a/b/note") as (directory, _):
        root.assert_reachable(b"a/b/note", directory)
        root.rename(b"a/b", b"b")
        assert refusal(root.assert_reachable, b"a/b/note", directory).kind is PathKind.COMPONENT_REDIRECTED
        root.mkdir(b"a/b")
        assert refusal(root.assert_reachable, b"a/b/note", directory).kind is PathKind.COMPONENT_REDIRECTED


# -- what users write ---------------------------------------------------------------------------------------------


def test_user_paths_become_clean(root: VaultRoot) -> None:
    inside = root.path
    expected: dict[str | bytes | Path, bytes] = {
        "a/b": b"a/b",
        "./a//b/": b"a/b",
        "a/../b": b"b",
        ".": b"",
        "a/..": b"",
        inside + b"/a": b"a",
        inside: b"",
        "...": b"...",
        "ä/\udcff": "ä/".encode() + b"\xff",
        b"\xff\n": b"\xff\n",
        Path("x/y"): b"x/y",
        "n" * 255: b"n" * 255,
    }
    for written, clean in expected.items():
        assert root.relative(written) == clean


def test_user_paths_that_cannot_be_meant_are_refused(root: VaultRoot) -> None:
    expected: dict[str | bytes, PathKind] = {
        "": PathKind.EMPTY,
        "..": PathKind.ESCAPES,
        "a/../../b": PathKind.ESCAPES,
        "/etc/passwd": PathKind.ESCAPES,
        "/": PathKind.ESCAPES,
        root.path + b"x/a": PathKind.ESCAPES,
        root.path + b"/../a": PathKind.ESCAPES,
        "a\0b": PathKind.INVALID,
        "a\ud800b": PathKind.INVALID,
        "n" * 256: PathKind.NAME_TOO_LONG,
    }
    for written, kind in expected.items():
        error = refusal(root.relative, written, label="source", code="bad-source")
        assert (written, error.kind) == (written, kind)
        assert (error.label, error.code) == ("source", "bad-source")


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "check"])
def test_every_operation_refuses_paths_that_are_not_clean(root: VaultRoot, tmp_path: Path, operation: str) -> None:
    write(root, b"a file")
    root.mkdir(b"a")
    (tmp_path / "outside").mkdir()
    before = sorted(os.listdir(tmp_path)), sorted(root.listdir(b""))
    for path, kind in {
        b"..": PathKind.ESCAPES,
        b"../outside": PathKind.ESCAPES,
        b"a/../../outside": PathKind.ESCAPES,
        b"a/..": PathKind.ESCAPES,
        b"/etc": PathKind.INVALID,
        b"/": PathKind.INVALID,
        b"a//b": PathKind.INVALID,
        b"a/": PathKind.INVALID,
        b".": PathKind.INVALID,
        b"./a": PathKind.INVALID,
        b"a/.": PathKind.INVALID,
        b"a\0b": PathKind.INVALID,
        b".a\0b": PathKind.INVALID,
    }.items():
        error = refusal(OPERATIONS[operation], root, path)
        assert (path, error.kind) == (path, kind)
    assert (sorted(os.listdir(tmp_path)), sorted(root.listdir(b""))) == before


def test_the_root_can_be_listed_and_looked_at_but_not_changed(root: VaultRoot) -> None:
    assert root.stat(b"").st_ino == root.ino
    assert root.exists(b"")
    assert root.listdir(b"") == []
    root.sync_directory(b"")
    assert root.statvfs().f_namemax == 255
    for name in ("mkdir", "unlink", "rmdir", "rename from", "symlink", "readlink", "parent", "create"):
        assert refusal(OPERATIONS[name], root, b"").kind is PathKind.EMPTY


# -- links --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_operation_goes_through_a_link(root: VaultRoot, vault: Path, tmp_path: Path, operation: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "deep").mkdir()
    write(root, b"a file")
    root.mkdir(b"a/inside/deep", recursive=True)
    (vault / "a" / "out").symlink_to(outside)
    (vault / "a" / "in").symlink_to("inside")
    (vault / "a" / "absolute").symlink_to(vault / "a" / "inside")
    for link in (b"a/out", b"a/in", b"a/absolute"):
        for path in (link + b"/name", link + b"/deep/name"):
            error = refusal(OPERATIONS[operation], root, path)
            assert (error.kind, error.component) == (PathKind.COMPONENT_LINK, link)
            assert error.cause_errno == errno.ELOOP
    assert sorted(os.listdir(outside)) == ["deep"]
    assert os.listdir(outside / "deep") == []


def test_a_link_as_the_last_component_is_never_opened(root: VaultRoot, vault: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("untouched")
    (vault / "out").symlink_to(tmp_path / "victim")
    (vault / "new").symlink_to(tmp_path / "made")
    (vault / "directory").symlink_to(tmp_path)
    for name in (b"out", b"new", b"directory"):
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_TRUNC, CREATE, os.O_RDWR | os.O_APPEND):
            error = refusal(root.open_file, name, flags, 0o644)
            assert (error.kind, error.component) == (PathKind.COMPONENT_LINK, name)
        for directory in (root.open_directory, root.scandir, root.listdir):
            assert refusal(directory, name).kind is PathKind.COMPONENT_LINK
        with pytest.raises(FileExistsError):
            root.open_file(name, CREATE | os.O_EXCL, 0o644)
    assert (tmp_path / "victim").read_text() == "untouched"
    assert not (tmp_path / "made").exists()


def test_a_link_can_be_looked_at_moved_and_removed_as_the_link_it_is(root: VaultRoot, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("untouched")
    root.symlink(b"../victim", b"link")
    assert stat.S_ISLNK(root.stat(b"link").st_mode)
    assert root.exists(b"link")
    assert root.readlink(b"link") == b"../victim"
    root.rename(b"link", b"other")
    assert root.unlink(b"other")
    root.mkdir(b"tree")
    root.symlink(b"../..", b"tree/up")
    root.remove_tree(b"tree")
    root.symlink(b"../victim", b"link")
    root.remove_tree(b"link")
    assert root.listdir(b"") == []
    assert (tmp_path / "victim").read_text() == "untouched"


# -- mounts -------------------------------------------------------------------------------------------------------


def all_cross(root: VaultRoot, mountpoint: bytes) -> None:
    """No operation gets beneath the mount point; looking at it is refused as well."""
    for operation, call in OPERATIONS.items():
        error = refusal(call, root, mountpoint + b"/name")
        assert (operation, error.kind, error.component) == (operation, PathKind.CROSSES_MOUNT, mountpoint)
    for name in ("stat", "exists", "open_directory", "scandir", "listdir", "check", "remove_tree"):
        assert refusal(OPERATIONS[name], root, mountpoint).kind is PathKind.CROSSES_MOUNT


def test_another_file_system_in_the_vault_is_not_entered(root: VaultRoot, vault: Path, mount: Mounter) -> None:
    write(root, b"a file")
    root.mkdir(b"a/mounted", recursive=True)
    mount("-t", "tmpfs", "none", vault / "a" / "mounted")
    all_cross(root, b"a/mounted")
    assert os.listdir(vault / "a" / "mounted") == []


def test_a_bind_mount_of_the_same_file_system_is_a_mount_too(
    root: VaultRoot, vault: Path, tmp_path: Path, mount: Mounter
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    write(root, b"a file")
    root.mkdir(b"a/mounted", recursive=True)
    mount("--bind", outside, vault / "a" / "mounted")
    assert os.stat(vault / "a" / "mounted").st_dev == root.dev
    all_cross(root, b"a/mounted")
    assert os.listdir(outside) == []


def test_a_file_that_is_bind_mounted_into_the_vault_is_neither_read_nor_truncated(
    root: VaultRoot, vault: Path, tmp_path: Path, mount: Mounter
) -> None:
    (tmp_path / "victim").write_text("untouched")
    write(root, b"note")
    mount("--bind", tmp_path / "victim", vault / "note")
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_TRUNC, CREATE):
        assert refusal(root.open_file, b"note", flags, 0o644).kind is PathKind.CROSSES_MOUNT
    assert refusal(root.check, b"note").kind is PathKind.CROSSES_MOUNT
    assert (tmp_path / "victim").read_text() == "untouched"


def test_removing_a_tree_spares_what_is_mounted_in_it(root: VaultRoot, vault: Path, mount: Mounter) -> None:
    root.mkdir(b"tree/mounted", recursive=True)
    mount("-t", "tmpfs", "none", vault / "tree" / "mounted")
    (vault / "tree" / "mounted" / "kept").write_text("")
    assert refusal(root.remove_tree, b"tree").component == b"tree/mounted"
    assert os.listdir(vault / "tree" / "mounted") == ["kept"]


def test_a_subvolume_is_not_entered(file_system: Callable[[str], FileSystem], resolver: str, tmp_path: Path) -> None:
    vault = file_system("btrfs").path / tmp_path.name
    vault.mkdir()
    (vault / "a").mkdir()
    subprocess.run(["btrfs", "-q", "subvolume", "create", str(vault / "a" / "volume")], check=True)
    (vault / "a" / "volume" / "below").mkdir()
    with VaultRoot.open(vault, resolver=resolver) as root:  # type: ignore[arg-type]
        write(root, b"a file")
        write(root, b"a/note", b"here")
        assert read(root, b"a/note") == b"here"
        all_cross(root, b"a/volume")
        assert refusal(root.open_file, b"a/volume/below/note", CREATE, 0o644).kind is PathKind.CROSSES_MOUNT
    assert os.listdir(vault / "a" / "volume") == ["below"]
    assert os.listdir(vault / "a" / "volume" / "below") == []


# -- what is no plain file ----------------------------------------------------------------------------------------


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(root: VaultRoot, vault: Path) -> None:
    os.mkfifo(vault / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(vault / "socket"))
    for name in (b"fifo", b"socket"):
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            assert refusal(root.open_file, name, flags).kind is PathKind.UNSUPPORTED_TYPE
        assert refusal(root.check, name).kind is PathKind.UNSUPPORTED_TYPE
    root.mkdir(b"directory")
    with pytest.raises(IsADirectoryError):
        root.open_file(b"directory", os.O_RDONLY)
    for call in (root.open_directory, root.scandir, root.listdir):
        with pytest.raises(NotADirectoryError):
            call(b"fifo")


@pytest.mark.skipif(os.getuid() != 0, reason="making devices needs root")
def test_a_device_in_the_vault_is_refused(root: VaultRoot, vault: Path) -> None:
    os.mknod(vault / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(vault / "nothing", stat.S_IFBLK | 0o666, os.makedev(250, 250))
    for name in (b"null", b"nothing"):
        assert refusal(root.open_file, name, os.O_RDWR).kind is PathKind.UNSUPPORTED_TYPE


def test_what_is_asked_for_as_anything_may_be_anything(root: VaultRoot, vault: Path) -> None:
    os.mkfifo(vault / "fifo")
    descriptor = root.open_file(b"fifo", os.O_RDONLY | os.O_NONBLOCK, regular=False)
    os.close(descriptor)


def test_a_lease_of_somebody_is_waited_for_unless_the_caller_says_not_to(root: VaultRoot, vault: Path) -> None:
    write(root, b"leased", b"old")
    holder = """
        import fcntl, os, signal, sys, time
        signal.signal(signal.SIGIO, lambda *_: None)
        descriptor = os.open("leased", os.O_RDONLY)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        print("leased", flush=True)
        sys.stdin.readline()
        time.sleep(0.2)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    """
    command = [sys.executable, "-c", textwrap.dedent(holder)]
    with subprocess.Popen(command, cwd=vault, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"leased\n"
        with pytest.raises(BlockingIOError):
            root.open_file(b"leased", os.O_WRONLY | os.O_NONBLOCK)
        os.close(root.open_file(b"leased", os.O_RDONLY))  # a read lease is no matter to readers
        process.stdin.close()  # it lets go in a while
        os.close(root.open_file(b"leased", os.O_WRONLY))


# -- the check ----------------------------------------------------------------------------------------------------


def test_the_check_tells_what_is_there(root: VaultRoot) -> None:
    root.mkdir(b"a")
    write(root, b"a/note", b"12345")
    found = root.check("a/note", expected_type="file", allow_missing=False)
    assert (found.path, found.exists, found.kind) == (b"a/note", True, "file")
    assert found.stat is not None and found.stat.st_size == 5
    assert root.check("./a//", expected_type="directory").kind == "directory"
    assert root.check(root.path + b"/a/note").path == b"a/note"
    assert root.check(".").kind == "directory"
    for missing in ("b", "a/b", "b/c/d", "a/b/c"):
        found = root.check(missing, must_not_exist=True)
        assert (found.exists, found.kind, found.stat) == (False, None, None)


def test_the_check_names_the_rule_and_the_component(root: VaultRoot, vault: Path, tmp_path: Path) -> None:
    root.mkdir(b"a/b", recursive=True)
    write(root, b"a/note")
    os.link(vault / "a" / "note", tmp_path / "other name")
    write(root, b"a/b/single")
    root.symlink(b"b", b"a/link")
    root.symlink(b"nowhere", b"a/dangling")
    root.symlink(os.fsencode(tmp_path / "nowhere"), b"a/dangling outside")
    root.symlink(os.fsencode(tmp_path), b"a/out")
    os.mkfifo(vault / "a" / "fifo")
    cases: list[tuple[str, dict[str, object], PathKind, bytes, int]] = [
        ("", {}, PathKind.EMPTY, b"", 0),
        ("../x", {}, PathKind.ESCAPES, b"../x", 0),
        ("x\0", {}, PathKind.INVALID, b"x\0", 0),
        ("n" * 256, {}, PathKind.NAME_TOO_LONG, b"n" * 256, errno.ENAMETOOLONG),
        ("a/link", {}, PathKind.COMPONENT_LINK, b"a/link", errno.ELOOP),
        ("a/link/c/d", {}, PathKind.COMPONENT_LINK, b"a/link", errno.ELOOP),
        ("a/out/x", {}, PathKind.COMPONENT_LINK, b"a/out", errno.ELOOP),
        ("a/dangling", {}, PathKind.COMPONENT_DANGLING, b"a/dangling", errno.ELOOP),
        ("a/dangling/x", {}, PathKind.COMPONENT_DANGLING, b"a/dangling", errno.ELOOP),
        ("a/dangling outside", {}, PathKind.COMPONENT_DANGLING, b"a/dangling outside", errno.ELOOP),
        ("a/c", {"allow_missing": False}, PathKind.COMPONENT_MISSING, b"a/c", errno.ENOENT),
        ("a/c/d/e", {"allow_missing": False}, PathKind.COMPONENT_MISSING, b"a/c", errno.ENOENT),
        ("a/note/x", {}, PathKind.ANCESTOR_NOT_DIRECTORY, b"a/note", errno.ENOTDIR),
        ("a/note/x/y", {}, PathKind.ANCESTOR_NOT_DIRECTORY, b"a/note", errno.ENOTDIR),
        ("a/b/single", {"must_not_exist": True}, PathKind.TARGET_PREEXISTING, b"a/b/single", errno.EEXIST),
        ("a/b", {"must_not_exist": True}, PathKind.TARGET_PREEXISTING, b"a/b", errno.EEXIST),
        ("a/note", {}, PathKind.HARD_LINKED, b"a/note", errno.EMLINK),
        ("a/fifo", {}, PathKind.UNSUPPORTED_TYPE, b"a/fifo", 0),
        ("a/b", {"expected_type": "file"}, PathKind.WRONG_TYPE, b"a/b", errno.EISDIR),
        ("a/b/single", {"expected_type": "directory"}, PathKind.WRONG_TYPE, b"a/b/single", errno.ENOTDIR),
    ]
    for path, keywords, kind, component, number in cases:
        error = refusal(root.check, path, **keywords, label="note", code="bad-note")
        assert (path, error.kind, error.component, error.cause_errno) == (path, kind, component, number)
        assert (error.label, error.code) == ("note", "bad-note")
        assert kind.value in str(error) and "note" in str(error)
    assert root.check("a/note", hardlinks="allow").kind == "file"


def test_a_refused_call_that_finds_all_well_afterwards_says_redirected(
    vault: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with VaultRoot.open(vault, resolver="openat2") as root:
        write(root, b"note")

        def was_a_link(*_: object) -> int:
            raise OSError(errno.ELOOP, "a link, a moment ago")

        monkeypatch.setattr(resolvers, "openat2", was_a_link)
        for path in (b"note", b"gone meanwhile"):
            error = refusal(root.stat, path)
            assert (error.kind, error.cause_errno) == (PathKind.COMPONENT_REDIRECTED, errno.ELOOP)


# -- operations ---------------------------------------------------------------------------------------------------


def test_absence_and_type_are_the_errors_of_the_system_call(root: VaultRoot) -> None:
    write(root, b"file")
    root.mkdir(b"directory")
    write(root, b"directory/inside")
    for path in (b"missing", b"missing/below"):
        for name in ("stat", "open", "open_directory", "scandir", "listdir", "readlink", "remove_tree", "rename from"):
            with pytest.raises(FileNotFoundError):
                OPERATIONS[name](root, path)
        assert not root.exists(path)
        assert not root.unlink(path, missing_ok=True)
        assert not root.rmdir(path, missing_ok=True)
        for remove in (root.unlink, root.rmdir):
            with pytest.raises(FileNotFoundError):
                remove(path)
    for name in ("create", "mkdir", "symlink"):
        with pytest.raises(FileNotFoundError):
            OPERATIONS[name](root, b"missing/below")
    for name in ("stat", "open", "create", "mkdir", "unlink", "symlink"):
        with pytest.raises(NotADirectoryError):
            OPERATIONS[name](root, b"file/below")
    assert not root.exists(b"file/below")
    for name in ("mkdir", "symlink"):
        with pytest.raises(FileExistsError):
            OPERATIONS[name](root, b"file")
    with pytest.raises(IsADirectoryError):
        root.unlink(b"directory")
    with pytest.raises(OSError, match="not empty"):
        root.rmdir(b"directory")
    with pytest.raises(OSError, match="too long"):
        root.stat(b"n" * 256)


def test_descriptors_are_not_inherited_and_modes_are_as_asked(root: VaultRoot) -> None:
    mask = os.umask(0o027)
    try:
        descriptor, found = root.open_with_stat(b"file", CREATE | os.O_EXCL, 0o666)
        root.mkdir(b"directory", 0o777)
    finally:
        os.umask(mask)
    try:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert os.path.samestat(found, os.fstat(descriptor))
    finally:
        os.close(descriptor)
    assert stat.S_IMODE(root.stat(b"file").st_mode) == 0o640
    assert stat.S_IMODE(root.stat(b"directory").st_mode) == 0o750
    directory = root.open_directory(b"directory")
    try:
        assert fcntl.fcntl(directory, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.fsync(directory)
    finally:
        os.close(directory)


def test_truncating_appending_and_exclusive_creation_are_as_in_open(root: VaultRoot) -> None:
    write(root, b"file", b"12345")
    os.close(root.open_file(b"file", os.O_CREAT | os.O_WRONLY, 0o600))
    assert read(root, b"file") == b"12345"
    descriptor = root.open_file(b"file", os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, b"6")
    os.close(descriptor)
    assert read(root, b"file") == b"123456"
    with pytest.raises(FileExistsError):
        root.open_file(b"file", CREATE | os.O_EXCL, 0o600)
    os.close(root.open_file(b"file", os.O_WRONLY | os.O_TRUNC))
    assert read(root, b"file") == b""


def test_mkdir_tells_what_it_made(root: VaultRoot) -> None:
    assert root.mkdir(b"a") == [b"a"]
    assert root.mkdir(b"a/b/c/d", recursive=True) == [b"a/b", b"a/b/c", b"a/b/c/d"]
    assert root.mkdir(b"a/b/c/d", recursive=True, exclusive=False) == []
    assert root.mkdir(b"a/b", exclusive=False) == []
    with pytest.raises(FileExistsError):
        root.mkdir(b"a/b/c/d", recursive=True)
    write(root, b"file")
    with pytest.raises(FileExistsError):
        root.mkdir(b"file", exclusive=False)
    root.symlink(b"a", b"link")
    assert refusal(root.mkdir, b"link", exclusive=False).kind is PathKind.COMPONENT_LINK


def test_mkdir_marks_on_the_error_what_it_had_made(root: VaultRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    root.symlink(b"elsewhere", b"link")
    assert refusal(root.mkdir, b"link/a/b", recursive=True).created is None
    made = root._make_directory

    def swapped_behind_our_back(path: bytes, mode: int) -> None:
        made(path, mode)
        if path == b"a/b":
            root.rename(b"a/b", b"a/old")
            root.symlink(b"old", b"a/b")

    with monkeypatch.context() as patch:
        patch.setattr(VaultRoot, "_make_directory", lambda self, path, mode: swapped_behind_our_back(path, mode))
        error = refusal(root.mkdir, b"a/b/c/d", recursive=True)
    assert (error.kind, error.component, error.created) == (PathKind.COMPONENT_LINK, b"a/b", b"a/b")


def test_rename_knows_replacing_not_replacing_and_exchanging(root: VaultRoot) -> None:
    root.mkdir(b"d")
    for old, new in ((b"one", b"two"), (b"one", b"d/two"), (b"d/one", b"two"), (b"d/one", b"d/two")):
        write(root, old, b"1")
        write(root, new, b"2")
        root.rename(old, new, kernel.RENAME_EXCHANGE)
        assert (read(root, old), read(root, new)) == (b"2", b"1")
        with pytest.raises(FileExistsError):
            root.rename(old, new, kernel.RENAME_NOREPLACE)
        root.rename(old, new)
        assert read(root, new) == b"2"
        assert not root.exists(old)
        root.rename(new, old, kernel.RENAME_NOREPLACE)
        root.unlink(old)


def test_listing_gives_names_and_their_lstat(root: VaultRoot) -> None:
    root.mkdir(b"d/sub", recursive=True)
    write(root, b"d/file", b"123")
    root.symlink(b"nowhere", b"d/link")
    listed = dict(root.scandir(b"d"))
    assert sorted(listed) == sorted(root.listdir(b"d")) == [b"file", b"link", b"sub"]
    for name, found in listed.items():
        assert os.path.samestat(found, root.stat(b"d/" + name))
    assert listed[b"file"].st_size == 3
    assert stat.S_ISLNK(listed[b"link"].st_mode)
    assert len(root.scandir(b"")) == len(root.scandir(b"")) == 1, "each listing starts at the beginning"


def test_removing_a_tree_removes_all_of_it_and_nothing_else(root: VaultRoot) -> None:
    root.mkdir(b"tree/a/b", recursive=True)
    root.mkdir(b"tree/c")
    root.mkdir(b"beside")
    for path in (b"tree/f", b"tree/a/f", b"tree/a/b/f", b"beside/f"):
        write(root, path)
    root.symlink(b"../../beside", b"tree/a/link")
    root.remove_tree(b"tree")
    assert root.listdir(b"") == [b"beside"]
    assert root.listdir(b"beside") == [b"f"]
    root.remove_tree(b"beside/f")
    assert root.listdir(b"beside") == []


def test_removing_a_tree_that_somebody_keeps_filling_ends(root: VaultRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(b"tree")
    remove = root.rmdir
    filled = 0

    def filled_first(_: VaultRoot, path: bytes, missing_ok: bool = False) -> bool:
        nonlocal filled
        if path == b"tree":
            filled += 1
            write(root, b"tree/again")
        return remove(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(VaultRoot, "rmdir", filled_first)
        with pytest.raises(OSError, match="filling"):
            root.remove_tree(b"tree")
    assert 1 < filled < 100
    root.remove_tree(b"tree")
    assert not root.exists(b"tree")


# -- any name, any depth ------------------------------------------------------------------------------------------


def test_names_may_be_of_any_bytes(root: VaultRoot) -> None:
    names = [bytes([value]) for value in range(1, 256) if bytes([value]) not in (b"/", b".")]
    names += [b"...", b"..a", b".a", b"a.", b"-rf", b"\xff" * 255, "ä".encode() * 127, b"\n\x1b[31m", b"*?["]
    for name in names:
        assert root.relative(name) == name
        root.mkdir(name)
        write(root, name + b"/" + name, name)
    assert sorted(root.listdir(b"")) == sorted(names)
    for name in names:
        assert root.listdir(name) == [name]
        assert read(root, name + b"/" + name) == name
        assert root.check(name + b"/" + name).kind == "file"
        root.rename(name + b"/" + name, name + b"/x")
        root.remove_tree(name)
    assert root.listdir(b"") == []


def test_paths_may_be_longer_than_the_kernel_takes_at_once(root: VaultRoot, tmp_path: Path) -> None:
    levels = [b"level-%03d-%s" % (level, b"x" * 20) for level in range(300)]
    deep = b"/".join(levels)
    assert len(deep) > 2 * 4096
    with pytest.raises(OSError, match="too long"):
        os.stat(deep, dir_fd=root.fd)
    assert len(root.mkdir(deep, recursive=True)) == 300
    write(root, deep + b"/note", b"down here")
    assert read(root, deep + b"/note") == b"down here"
    assert root.stat(deep + b"/note").st_size == 9
    assert root.check(deep + b"/note").kind == "file"
    root.rename(deep + b"/note", deep + b"/renamed")
    assert root.listdir(deep) == [b"renamed"]
    root.symlink(os.fsencode(tmp_path), deep + b"/link")
    assert refusal(root.mkdir, deep + b"/link/made").component == deep + b"/link"
    with pytest.raises(FileNotFoundError):
        root.open_file(deep + b"/missing/note", CREATE, 0o600)
    with pytest.raises(OSError, match="too long"):
        root.stat(deep + b"/" + b"n" * 5000 + b"/x")
    middle = b"/".join(levels[:150])
    root.rename(middle, b"moved")
    root.symlink(b"/".join([b".."] * 148 + [b"moved"]), middle)
    assert refusal(root.stat, deep + b"/renamed").component == middle
    root.unlink(middle)
    root.rename(b"moved", middle)
    root.remove_tree(levels[0])
    assert root.listdir(b"") == []
