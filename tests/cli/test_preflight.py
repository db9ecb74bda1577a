"""What is told before anything is mounted: each trouble its own words, remedy and exit code, and nothing left.

The checks run in this process; where a machine would have to be broken for the trouble (no /dev/fuse, a file system
that cannot exchange), the one call that notices it is replaced. Real dead mounts and busy ones: test_mounted.py.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vaultfs import kernel
from vaultfs.cli import preflight
from vaultfs.config import MountOptions, build_options
from vaultfs.control import registry
from vaultfs.errors import (
    AlreadyServedError,
    ConfigError,
    DeviceMissingError,
    ExitCode,
    MountDeniedError,
    MountpointError,
    MountpointMissingError,
    MountpointTakenError,
    UnsafePathError,
    UnsuitableVaultError,
    VaultDeniedError,
    VaultError,
    VaultMissingError,
    exit_code_of,
    hint_of,
)
from vaultfs.mountinfo import MountEntry

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a vault and a mountpoint, on a machine that can mount; nothing may be left in either."""
    monkeypatch.setenv("VAULTFS_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(preflight, "check_machine", lambda options: None)
    (tmp_path / "vault").mkdir()
    (tmp_path / "mnt").mkdir()
    yield tmp_path
    for path in (tmp_path / "vault", tmp_path / "mnt"):
        if path.is_dir() and not path.is_symlink():
            assert [name for name in os.listdir(path) if "probe" in name] == []


def no_notice(text: str) -> None:
    raise AssertionError(f"an unexpected notice: {text}")


def check(place: Path, *words: str, vault: str = "vault", mountpoint: str | None = "mnt") -> MountOptions:
    options = build_options(str(place / vault), str(place / (mountpoint or vault)), words)
    return preflight.check(options, no_notice)


def refused(
    call: Callable[[], object], family: type[VaultError], code: int, *words: str, hint: str | None = None
) -> VaultError:
    with pytest.raises(family) as caught:
        call()
    error = caught.value
    assert exit_code_of(error) == code
    for word in words:
        assert word in str(error)
    assert "\n" not in str(error) + hint_of(error)
    if hint is not None:
        assert hint in hint_of(error)
    return error


def test_a_good_vault_passes_and_paths_come_back_without_links(place: Path) -> None:
    (place / "link").symlink_to(place)
    options = build_options(str(place / "link" / "vault"), str(place / "link" / "mnt"))
    checked = preflight.check(options, no_notice)
    assert (checked.vault, checked.mountpoint) == (str(place / "vault"), str(place / "mnt"))
    assert os.listdir(place / "vault") == []


def test_a_vault_over_itself_need_not_be_empty(place: Path) -> None:
    (place / "vault" / "note.md").write_text("x")
    checked = check(place, mountpoint=None)
    assert checked.over_itself
    (place / "other").symlink_to(place / "vault")
    assert check(place, mountpoint="other").over_itself  # a link to the vault is the vault as a mountpoint


def test_a_missing_vault(place: Path) -> None:
    refused(lambda: check(place, vault="none"), VaultMissingError, ExitCode.NOT_FOUND, "none", hint="mkdir")
    refused(lambda: check(place, vault="none/deeper"), VaultMissingError, ExitCode.NOT_FOUND)


def test_a_vault_that_is_a_file(place: Path) -> None:
    (place / "file").write_text("x")
    refused(lambda: check(place, vault="file"), UnsuitableVaultError, ExitCode.UNSUITABLE, "not a directory")
    refused(lambda: check(place, vault="file/below"), UnsuitableVaultError, ExitCode.UNSUITABLE)


def test_a_vault_that_is_a_link_names_the_directory_to_use(place: Path) -> None:
    (place / "link").symlink_to("vault")
    (place / "dangling").symlink_to("nowhere")
    refused(lambda: check(place, vault="link"), UnsafePathError, ExitCode.UNSAFE, "link", hint=str(place / "vault"))
    refused(lambda: check(place, vault="dangling"), UnsafePathError, ExitCode.UNSAFE, "symbolic link")


def test_names_with_control_characters_are_escaped(place: Path) -> None:
    error = refused(lambda: check(place, vault="no\x1b[2J\n"), VaultMissingError, ExitCode.NOT_FOUND)
    assert "\\x1b[2J\\n" in str(error)


@pytest.mark.parametrize("flag", [kernel.RENAME_NOREPLACE, kernel.RENAME_EXCHANGE])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_the_renames_that_saves_need(
    place: Path, monkeypatch: pytest.MonkeyPatch, flag: int, number: int
) -> None:
    real = kernel.renameat2

    def renameat2(old_directory: int, old: bytes, new_directory: int, new: bytes, flags: int) -> None:
        if flags == flag:
            raise OSError(number, os.strerror(number))
        real(old_directory, old, new_directory, new, flags)

    monkeypatch.setattr(kernel, "renameat2", renameat2)
    refused(lambda: check(place), UnsuitableVaultError, ExitCode.UNSUITABLE, "file system cannot", hint="local file")
    check(place, "ro")  # to read it, no rename is needed


def test_a_file_system_that_replaces_although_told_not_to(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(old_directory: int, old: bytes, new_directory: int, new: bytes, flags: int) -> None:
        os.rename(old, new)

    monkeypatch.setattr(kernel, "renameat2", plain)
    refused(lambda: check(place), UnsuitableVaultError, ExitCode.UNSUITABLE, "replaces directories")


def test_a_full_disk_is_no_reason_not_to_mount(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdtemp(**_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(preflight.tempfile, "mkdtemp", mkdtemp)
    check(place)


def test_the_file_system_is_tried_out_of_sight_where_there_is_a_state_directory(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "vault" / ".vaultfs").mkdir(mode=0o700)
    before = os.stat(place / "vault").st_mtime_ns
    check(place)
    assert os.stat(place / "vault").st_mtime_ns == before
    assert os.listdir(place / "vault" / ".vaultfs") == []


def test_a_vault_that_may_not_be_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.os, "access", lambda path, mode, **_: not mode & os.W_OK)
    refused(lambda: check(place), VaultDeniedError, ExitCode.DENIED, hint="as its owner")


def test_a_missing_mountpoint_and_one_that_is_a_file(place: Path) -> None:
    (place / "file").write_text("")
    refused(lambda: check(place, mountpoint="none"), MountpointMissingError, ExitCode.NOT_FOUND, "none", hint="mkdir")
    refused(lambda: check(place, mountpoint="file"), MountpointError, ExitCode.UNSUITABLE, "not a directory")


def test_a_mountpoint_that_is_not_empty_needs_leave(place: Path) -> None:
    (place / "mnt" / "x").write_text("")
    refused(lambda: check(place), MountpointTakenError, ExitCode.BUSY, "not empty", hint="-o nonempty")
    check(place, "nonempty")


@pytest.mark.parametrize("deep", ["", "/a/b"])
def test_neither_may_lie_in_the_other(place: Path, deep: str) -> None:
    (place / f"vault/mnt{deep}").mkdir(parents=True)
    (place / f"mnt/vault{deep}").mkdir(parents=True)
    refused(
        lambda: check(place, mountpoint=f"vault/mnt{deep}"),
        MountpointError,
        ExitCode.UNSUITABLE,
        "inside the vault",
        hint="outside",
    )
    refused(
        lambda: check(place, "nonempty", vault=f"mnt/vault{deep}"),
        MountpointError,
        ExitCode.UNSUITABLE,
        "inside this mountpoint",
        hint="outside",
    )


def test_neighbours_with_a_common_beginning_are_no_trouble(place: Path) -> None:
    (place / "vault2").mkdir()
    check(place, mountpoint="vault2")
    check(place, vault="vault2", mountpoint="vault")


def test_a_mountpoint_inside_the_vault_by_way_of_a_link(place: Path) -> None:
    (place / "vault" / "sub").mkdir()
    (place / "way").symlink_to(place / "vault" / "sub")
    refused(lambda: check(place, mountpoint="way"), MountpointError, ExitCode.UNSUITABLE, "inside the vault")


def test_vaultfs_must_not_come_to_lie_under_its_own_mount(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "vault" / "venv").mkdir()
    monkeypatch.setattr(sys, "prefix", str(place / "vault" / "venv"))
    refused(
        lambda: check(place, mountpoint=None), UnsuitableVaultError, ExitCode.UNSUITABLE, "installed", hint="MOUNTPOINT"
    )
    check(place)  # mounted elsewhere it is a directory like any other


def test_a_log_file_in_the_vault_would_log_its_own_saves(place: Path) -> None:
    for log in ("vault/x.log", "mnt/x.log"):
        options = build_options(str(place / "vault"), str(place / "mnt"), [f"log-file={place / log}"])
        refused(lambda options=options: preflight.check_log_file(options), ConfigError, ExitCode.USAGE, "log-file")
    preflight.check_log_file(build_options(str(place / "vault"), str(place / "mnt"), [f"log-file={place}/x.log"]))


def entry_for(place: Path, mountpoint: str) -> registry.Registration:
    status = os.stat(place / "vault")
    return registry.register(
        vault=str(place / "vault"), mountpoint=mountpoint, vault_dev=status.st_dev, vault_ino=status.st_ino
    )


def test_a_vault_that_is_served_already_names_who_and_where(place: Path) -> None:
    registration = entry_for(place, "/somewhere")
    registration.publish()
    try:
        words = ("/somewhere", str(os.getpid()))
        refused(lambda: check(place), AlreadyServedError, ExitCode.BUSY, *words, hint="vaultfs umount /somewhere")
        check(place, "shared")
    finally:
        registration.close()
    check(place)


def mounted(monkeypatch: pytest.MonkeyPatch, path: Path, fstype: str) -> None:
    entry = MountEntry(1, 0, os.stat(path).st_dev + 7, str(path), frozenset(), fstype, "src", frozenset({"user_id=0"}))
    monkeypatch.setattr(preflight, "mount_at", lambda at: entry if at == str(path) else None)


def test_a_mountpoint_where_something_is_mounted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, place / "mnt", "fuse.vaultfs")
    refused(lambda: check(place), MountpointTakenError, ExitCode.BUSY, "a vault is mounted", hint="umount")
    mounted(monkeypatch, place / "mnt", "ext4")
    refused(lambda: check(place, "nonempty"), MountpointTakenError, ExitCode.BUSY, "something else (ext4, src)")


def test_autofs_below_is_what_we_are_to_be_mounted_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, place / "mnt", "autofs")
    check(place)


class Dead:
    """One path says ENOTCONN until the mount there is detached: at lstat, or (`cached`) only at statfs."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        path: Path,
        fstype: str,
        failure: int | None = None,
        cached: bool = False,
    ) -> None:
        self.path, self.dead, self.failure, self.cached = str(path), True, failure, cached
        self.entry = MountEntry(1, 0, 1, self.path, frozenset(), fstype, "src", frozenset())
        self.lstat, self.statvfs = os.lstat, os.statvfs
        monkeypatch.setattr(preflight.os, "lstat", self.dead_lstat)
        monkeypatch.setattr(preflight.os, "statvfs", self.dead_statvfs)
        monkeypatch.setattr(preflight, "mount_at", lambda at: self.entry if self.dead and at == self.path else None)
        monkeypatch.setattr(preflight, "unmount", self.unmount)

    def dead_lstat(self, path: str, **keywords: int) -> os.stat_result:
        if self.dead and path == self.path and not self.cached:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), path)
        return self.lstat(path, **keywords)

    def dead_statvfs(self, path: str) -> os.statvfs_result:
        if self.dead and path == self.path:
            raise OSError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED), path)
        return self.statvfs(path)

    def unmount(self, path: str, *, lazy: bool) -> None:
        assert lazy and path == self.path
        if self.failure:
            raise OSError(self.failure, os.strerror(self.failure), path)
        self.dead = False


@pytest.mark.parametrize("where", ["mnt", "vault"])
def test_a_dead_mount_of_ours_is_detached_with_a_word(place: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    Dead(monkeypatch, place / where, "fuse.vaultfs")
    notices: list[str] = []
    preflight.check(build_options(str(place / "vault"), str(place / "mnt")), notices.append)
    (notice,) = notices
    assert str(place / where) in notice and "detached" in notice


def test_a_dead_mount_of_somebody_else_is_left_and_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Dead(monkeypatch, place / "mnt", "fuse.sshfs")
    words = ("dead mount", "fuse.sshfs")
    refused(lambda: check(place), MountpointTakenError, ExitCode.BUSY, *words, hint=f"fusermount3 -uz {place}/mnt")
    assert dead.dead


def test_a_dead_mount_that_cannot_be_detached(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Dead(monkeypatch, place / "mnt", "fuse.vaultfs", failure=errno.EPERM)
    refused(lambda: check(place), MountpointTakenError, ExitCode.BUSY, "cannot be detached", hint="umount -l")


# --- the machine


OPTIONS = MountOptions("/v", "/m")


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An unprivileged user on a machine that can mount; returns its fuse.conf."""
    device = tmp_path / "fuse"
    device.touch()
    monkeypatch.setattr(preflight, "FUSE_DEVICE", str(device))
    monkeypatch.setattr(preflight, "FUSE_CONF", str(tmp_path / "fuse.conf"))
    monkeypatch.setattr(preflight.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(preflight.shutil, "which", lambda name: f"/usr/bin/{name}")
    preflight.check_machine(OPTIONS)
    return tmp_path / "fuse.conf"


def test_no_fuse_device(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "FUSE_DEVICE", "/nowhere/fuse")
    refused(
        lambda: preflight.check_machine(OPTIONS),
        DeviceMissingError,
        ExitCode.UNSUITABLE,
        "/nowhere/fuse",
        hint="--device /dev/fuse",
    )


@pytest.mark.parametrize(
    ("number", "family", "code", "hint"),
    [
        (errno.EACCES, MountDeniedError, ExitCode.DENIED, "chmod 666"),
        (errno.EPERM, MountDeniedError, ExitCode.DENIED, "--device"),
        (errno.ENODEV, DeviceMissingError, ExitCode.UNSUITABLE, "modprobe fuse"),
        (errno.ENXIO, DeviceMissingError, ExitCode.UNSUITABLE, "modprobe fuse"),
    ],
)
def test_a_fuse_device_that_cannot_be_opened(
    user: Path, monkeypatch: pytest.MonkeyPatch, number: int, family: type[VaultError], code: int, hint: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(preflight.os, "open", refuse)
    refused(lambda: preflight.check_machine(OPTIONS), family, code, hint=hint)


def test_no_fusermount3_for_a_user_and_none_needed_by_root(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None)
    words = ("fusermount3",)
    refused(lambda: preflight.check_machine(OPTIONS), DeviceMissingError, ExitCode.UNSUITABLE, *words, hint="fuse3")
    monkeypatch.setattr(preflight.os, "geteuid", lambda: 0)
    monkeypatch.setattr(preflight, "_may_mount", lambda: True)
    preflight.check_machine(OPTIONS)


@pytest.mark.parametrize("text", [None, "", "#user_allow_other\n", "user_allow_others\n"])
def test_allow_other_for_a_user_needs_the_administrators_word(user: Path, text: str | None) -> None:
    options = MountOptions("/v", "/m", allow_other=True)
    if text is not None:
        user.write_text(text)
    refused(lambda: preflight.check_machine(options), MountDeniedError, ExitCode.DENIED, hint="user_allow_other")
    user.write_text("# mine\nuser_allow_other\n")
    preflight.check_machine(options)


def test_root_without_the_right_to_mount_is_told_about_its_container(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.os, "geteuid", lambda: 0)
    monkeypatch.setattr(preflight, "_may_mount", lambda: False)
    refused(lambda: preflight.check_machine(OPTIONS), MountDeniedError, ExitCode.DENIED, hint="SYS_ADMIN")


@as_root
def test_a_users_mountpoint_must_be_the_users(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.os, "geteuid", lambda: 65534)
    (place / "mnt").chmod(0o777 | stat.S_ISVTX)
    refused(lambda: check(place), MountDeniedError, ExitCode.DENIED, "somebody else")
