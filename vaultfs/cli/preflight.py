"""Everything that can be known to go wrong before anything is mounted, each with its own words and remedy.

`check` runs in the process that is going to serve the mount, before the mount's code is even imported. It changes
nothing, with two exceptions: a *dead* vaultfs mount (its daemon was killed; every look at it says ENOTCONN) at the
vault or the mountpoint is detached, with a notice, because the usual reason to run ``mount`` is that it died; and
the file system is tried out with four renames in a directory that is removed again.

The order of the checks is the order in which a user can do something about them: the machine, the vault, the
mountpoint, how the two lie, who serves the vault already. None of this is what makes the mount safe (between a
check and the mount everything can change): the mount itself relies on descriptors and on the fence.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable

import msgspec

from vaultfs import kernel
from vaultfs.config import MountOptions
from vaultfs.control import registry
from vaultfs.errors import (
    AlreadyServedError,
    ConfigError,
    DeviceMissingError,
    MountDeniedError,
    MountpointError,
    MountpointMissingError,
    MountpointTakenError,
    NoAnswerError,
    PathKind,
    UnsafePathError,
    UnsuitableVaultError,
    VaultDeniedError,
    VaultMissingError,
    printable,
)
from vaultfs.mountinfo import MountEntry, mount_at, mounts, mounts_below, unmount
from vaultfs.patience import real_path, within

__all__ = ["DEAD", "check", "check_log_file", "check_machine", "probe_renames"]

FUSE_DEVICE = "/dev/fuse"
FUSE_CONF = "/etc/fuse.conf"

DEAD = (errno.ENOTCONN, errno.ECONNABORTED)
"""What the kernel says of a mount whose daemon is gone."""

_PATIENCE = 10.0
_CAP_SYS_ADMIN = 21


def check(options: MountOptions, notice: Callable[[str], None]) -> MountOptions:
    """Raise what stands against this mount; returns the options with both paths absolute and without links.

    `notice` is called with one line for each thing that was put right on the way.
    """
    check_machine(options)
    vault, status = _check_vault(options, notice)
    if options.over_itself:
        mountpoint = vault
        if os.geteuid() != 0:
            _check_rights(vault, status)
    else:
        mountpoint = _check_mountpoint(options, notice)
        if mountpoint != vault:
            _check_apart(vault, status, mountpoint)
    _check_own_files(mountpoint)
    if not options.shared:
        _check_not_served(vault, status)
    for inner in mounts_below(vault)[:3]:
        notice(
            f"{printable(inner.mountpoint)} is mounted inside this vault and cannot be reached through it: vaultfs "
            "crosses no mount; unmount it first if it belongs to the vault"
        )
    return msgspec.structs.replace(options, vault=vault, mountpoint=mountpoint)


# --- the machine


def check_machine(options: MountOptions) -> None:
    """/dev/fuse, fusermount3, the rights to mount, and fuse.conf."""
    try:
        os.close(os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise DeviceMissingError(
            "there is no such device: this machine (or container) has no FUSE",
            path=FUSE_DEVICE,
            remedy="Load it: modprobe fuse. In a container: --device /dev/fuse --cap-add SYS_ADMIN.",
        ) from None
    except PermissionError:
        raise MountDeniedError(
            "you may not open this device",
            path=FUSE_DEVICE,
            remedy=f"As root: chmod 666 {FUSE_DEVICE} (what udev does by default). In a container: --device /dev/fuse.",
        ) from None
    except OSError as error:
        raise DeviceMissingError(
            f"the kernel has no FUSE ({error.strerror})", path=FUSE_DEVICE, remedy="Load it: modprobe fuse."
        ) from None
    if os.geteuid() == 0:
        if not _may_mount():
            raise MountDeniedError(
                "root may not mount here (no CAP_SYS_ADMIN): this is probably a container",
                remedy="Start the container with --device /dev/fuse --cap-add SYS_ADMIN.",
            )
        return
    if shutil.which("fusermount3") is None:
        raise DeviceMissingError(
            "fusermount3 is not installed, and only with it a user can mount",
            remedy="Install it: sudo apt-get install fuse3 (other systems: the package fuse3).",
        )
    if options.allow_other and _user_allow_other() is False:
        raise MountDeniedError(
            f"option allow_other is not allowed to users on this machine ({FUSE_CONF})",
            remedy=f"As root add the line user_allow_other to {FUSE_CONF}, or mount without allow_other.",
        )


def _may_mount() -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return True


def _user_allow_other() -> bool | None:
    """Whether fuse.conf allows it; None if only fusermount3 may read the file (then fusermount3 decides)."""
    try:
        with open(FUSE_CONF, encoding="utf-8", errors="replace") as file:
            return any(line.strip() == "user_allow_other" for line in file)
    except FileNotFoundError:
        return False
    except PermissionError:
        return None


# --- the vault


def _refuse_state_directory(vault: str) -> None:
    """What keeps a vault's drafts and locks is none: served as documents, it could be changed by anybody."""
    if ".vaultfs" in vault.split("/"):
        raise UnsuitableVaultError(
            "this is the state directory of a vault, or a part of one",
            path=vault,
            remedy="Mount the vault itself: the directory that .vaultfs is in.",
        )


def _check_vault(options: MountOptions, notice: Callable[[str], None]) -> tuple[str, os.stat_result]:
    parent, name = os.path.split(options.vault)
    # Links on the way to the vault are the user's own business; the vault itself must not be one.
    vault = os.path.join(real_path(parent), name) if name else options.vault
    try:
        status = _look(vault, notice)
    except FileNotFoundError:
        raise VaultMissingError(path=vault) from None
    except PermissionError:
        raise VaultDeniedError("you may not look at this directory", path=vault) from None
    except OSError as error:
        raise UnsuitableVaultError(f"this cannot be looked at: {error.strerror}", path=vault) from None
    if stat.S_ISLNK(status.st_mode):
        link = UnsafePathError(PathKind.ROOT_LINK, os.fsencode(vault), "the vault is a symbolic link")
        link.remedy = f"Name the directory itself: vaultfs mount {printable(os.path.realpath(vault))}"
        raise link
    if not stat.S_ISDIR(status.st_mode):
        raise UnsuitableVaultError("this is not a directory", path=vault)
    _refuse_state_directory(vault)
    mount = _mount_of(status.st_dev)
    if mount is not None and mount.ours:
        _refuse_mounted_vault(vault, mount)
    if not options.ro:
        _check_writable(vault)
    elif not os.access(vault, os.R_OK | os.X_OK, effective_ids=True):
        raise VaultDeniedError("you may not read this vault", path=vault, remedy="Mount it as its owner.")
    return vault, status


def _refuse_mounted_vault(vault: str, mount: MountEntry) -> None:
    entry = next((entry for entry in registry.entries() if entry.mountpoint == mount.mountpoint), None)
    by = f" (pid {entry.pid})" if entry is not None else ""
    if vault == mount.mountpoint:
        raise AlreadyServedError(f"this is a vaultfs mount already{by}", path=vault)
    raise UnsuitableVaultError(
        f"this lies inside the vaultfs mount {printable(mount.mountpoint)}{by}; it is served there already",
        path=vault,
    )


def _check_writable(vault: str) -> None:
    if os.statvfs(vault).f_flag & os.ST_RDONLY:
        raise UnsuitableVaultError(
            "this is on a read-only file system",
            path=vault,
            remedy="Make it writable, or mount it read only: vaultfs mount -o ro VAULT.",
        )
    if not os.access(vault, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise VaultDeniedError(path=vault)
    probe_renames(vault)


def probe_renames(vault: str) -> None:
    """Try whether the file system renames directories without replacing, and exchanges files. Both are needed:
    the one for locks, the other for saves.

    Raises UnsuitableVaultError if it does not. A full disk proves nothing, and is no reason not to mount.
    """
    state = os.path.join(vault, ".vaultfs")
    inside = os.path.isdir(state) and not os.path.islink(state) and os.stat(state).st_uid == os.geteuid()
    try:
        # In the state directory if there is one: whoever watches the vault sees nothing of it.
        directory = tempfile.mkdtemp(prefix=f".vaultfs-probe-{os.getpid()}-", dir=state if inside else vault)
    except PermissionError:
        raise VaultDeniedError(path=vault) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return
        raise UnsuitableVaultError(f"no directory can be made in it: {error.strerror}", path=vault) from None
    try:
        _try_renames(directory, vault)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise UnsuitableVaultError(f"it cannot be used: {error.strerror}", path=vault) from None
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # ours alone; what fails here would have failed above


def _try_renames(directory: str, vault: str) -> None:
    for name in ("first", "second"):
        os.mkdir(f"{directory}/{name}")
        os.close(os.open(f"{directory}/{name}.file", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def rename(old: str, new: str, flag: int, what: str) -> bool:
        try:
            kernel.renameat2(
                kernel.AT_FDCWD,
                os.fsencode(f"{directory}/{old}"),
                kernel.AT_FDCWD,
                os.fsencode(f"{directory}/{new}"),
                flag,
            )
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            raise UnsuitableVaultError(f"its file system cannot {what}", path=vault) from None
        return True

    noreplace, exchange = kernel.RENAME_NOREPLACE, kernel.RENAME_EXCHANGE
    works = rename("first", "third", noreplace, "rename a directory without replacing another")
    if not works or rename("third", "second", noreplace, "rename a directory without replacing another"):
        raise UnsuitableVaultError("its file system replaces directories where it was told not to", path=vault)
    before = os.stat(f"{directory}/first.file").st_ino
    rename("first.file", "second.file", exchange, "exchange two files in one step")
    if os.stat(f"{directory}/second.file").st_ino != before:
        raise UnsuitableVaultError("its file system does not exchange files when it says so", path=vault)


# --- the mountpoint


def _check_mountpoint(options: MountOptions, notice: Callable[[str], None]) -> str:
    mountpoint = real_path(options.mountpoint)
    try:
        status = _look(mountpoint, notice)
    except FileNotFoundError:
        raise MountpointMissingError(path=mountpoint, remedy=f"Make it first: mkdir {printable(mountpoint)}") from None
    except PermissionError:
        raise MountDeniedError("you may not look at this mountpoint", path=mountpoint) from None
    except OSError as error:
        raise MountpointError(f"this cannot be looked at: {error.strerror}", path=mountpoint) from None
    if not stat.S_ISDIR(status.st_mode):
        raise MountpointError("the mountpoint is not a directory", path=mountpoint)
    if mountpoint == os.path.abspath(options.vault) or mountpoint == real_path(options.vault):
        return mountpoint  # over itself after all: what holds for the vault was checked
    mount = mount_at(mountpoint)
    if mount is not None and mount.fstype != "autofs":  # autofs: we are what is to be mounted on it
        raise MountpointTakenError(_what_is_there(mount), path=mountpoint)
    if os.geteuid() != 0:
        _check_rights(mountpoint, status)
    if not options.nonempty and mount is None and within(_PATIENCE, lambda: next(os.scandir(mountpoint), None)):
        raise MountpointTakenError(
            "the mountpoint is not empty, and the mount would hide what is in it",
            path=mountpoint,
            remedy="Choose an empty directory, or mount with -o nonempty.",
        )
    return mountpoint


def _what_is_there(mount: MountEntry) -> str:
    if mount.ours:
        for entry in registry.entries():
            if entry.mountpoint == mount.mountpoint:
                return f"the vault {printable(entry.vault)} is mounted here already (pid {entry.pid})"
        return "a vault is mounted here already"
    return f"something else ({printable(mount.fstype)}, {printable(mount.source)}) is mounted here"


def _check_rights(mountpoint: str, status: os.stat_result) -> None:
    """What fusermount3 asks of a user who is not root, told before it says so in its own words."""
    if not os.access(mountpoint, os.W_OK, effective_ids=True):
        raise MountDeniedError(
            "you may not write this mountpoint", path=mountpoint, remedy="Choose a directory that belongs to you."
        )
    if status.st_mode & stat.S_ISVTX and status.st_uid != os.geteuid():
        raise MountDeniedError(
            "this mountpoint is a shared directory of somebody else",
            path=mountpoint,
            remedy="Make a directory of your own in it, and mount there.",
        )


# --- how the two lie


def _check_apart(vault: str, status: os.stat_result, mountpoint: str) -> None:
    """Neither may lie inside the other: a daemon that reaches its own mount waits for itself for ever."""
    remedy = "Mount it outside, or leave the mountpoint away: then the vault is served in its own place."
    if mountpoint.startswith(vault.rstrip("/") + "/") or _is_above(status, mountpoint):
        raise MountpointError(
            f"the mountpoint lies inside the vault {printable(vault)}", path=mountpoint, remedy=remedy
        )
    if vault.startswith(mountpoint.rstrip("/") + "/") or _is_above(os.stat(mountpoint), vault):
        raise MountpointError(
            f"the vault {printable(vault)} lies inside this mountpoint", path=mountpoint, remedy=remedy
        )


def _is_above(status: os.stat_result, path: str) -> bool:
    """Whether `path`, or a directory it lies in, is the directory of `status` (also by way of a bind mount)."""
    while True:
        try:
            here = os.stat(path)
        except OSError:
            return False  # not to be looked at: then its mount is none that leads to ours
        if (here.st_dev, here.st_ino) == (status.st_dev, status.st_ino):
            return True
        if path == "/":
            return False
        path = os.path.dirname(path)


def _check_own_files(mountpoint: str) -> None:
    """The daemon's own program must not come to lie under its mount: loading a module would wait for itself."""
    ours = {sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
    for path in sorted(map(os.path.realpath, ours)):
        if path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/"):
            raise UnsuitableVaultError(
                f"vaultfs itself is installed below it ({printable(path)}), and would wait for itself",
                path=mountpoint,
                remedy="Mount the vault somewhere else (vaultfs mount VAULT MOUNTPOINT), or install vaultfs elsewhere.",
            )


def check_log_file(options: MountOptions) -> None:
    """The log must not lie in the vault, where every line would be a save. To be asked before it is opened."""
    if options.log_file:
        log = real_path(options.log_file)
        for directory in {real_path(options.vault), real_path(options.mountpoint)}:
            if log.startswith(directory.rstrip("/") + "/"):
                raise ConfigError(
                    f"option log-file: {printable(log)} lies in the vault, and every line would be a save",
                    remedy="Choose a file outside.",
                )


def _check_not_served(vault: str, status: os.stat_result) -> None:
    """One daemon for a vault: not the same one twice, and no part of one that is served."""
    above = {(status.st_dev, status.st_ino): "this vault"}
    directory = vault
    while directory != os.path.dirname(directory):
        directory = os.path.dirname(directory)
        found = os.stat(directory)
        above[(found.st_dev, found.st_ino)] = f"the vault {printable(directory)}, which this is a part of,"
    for entry in registry.entries():
        which = above.get((entry.vault_dev, entry.vault_ino))
        if which is not None:
            served = AlreadyServedError(
                f"{which} is served already, on {printable(entry.mountpoint)} by pid {entry.pid}",
                path=vault,
                pid=entry.pid,
                since=entry.since,
                start_time=entry.start_time,
            )
            served.remedy = f"Use that mount, or end it first: vaultfs umount {printable(entry.mountpoint)}"
            raise served


# --- mounts that are dead or hang


def _mount_of(dev: int) -> MountEntry | None:
    found = None
    for mount in mounts():
        if mount.dev == dev and mount.ours:
            found = mount
    return found


def _look(path: str, notice: Callable[[str], None]) -> os.stat_result:
    """lstat with a time limit; detaches dead vaultfs mounts at `path` (there may be several upon one another)."""

    def look() -> os.stat_result:
        status = os.lstat(path)
        mount = mount_at(path)
        if mount is not None and mount.fstype.startswith("fuse"):
            # The kernel may answer for a dead daemon from what it remembers; statfs it always has to ask for.
            os.statvfs(path)
        return status

    for _ in range(8):
        try:
            return within(_PATIENCE, look)
        except TimeoutError:
            raise NoAnswerError("this does not answer: a mount hangs here", path=path) from None
        except OSError as error:
            if error.errno not in DEAD:
                raise
        mount = mount_at(path)
        if mount is None or not mount.ours:
            dead = mount or _dead_above(path)
            where = printable(dead.mountpoint) if dead else printable(path)
            raise MountpointTakenError(
                f"a dead mount ({dead.fstype if dead else 'fuse'}) is in the way at {where}",
                path=path,
                remedy=f"Detach it: fusermount3 -uz {where}",
            )
        try:
            unmount(path, lazy=True)
        except OSError as error:
            raise MountpointTakenError(
                f"a dead mount is in the way and cannot be detached ({error.strerror})",
                path=path,
                remedy=f"As root: umount -l {printable(path)}",
            ) from None
        notice(f"{printable(path)}: a vaultfs mount whose daemon had died was detached")
    raise MountpointTakenError("too many dead mounts lie upon one another here", path=path)


def _dead_above(path: str) -> MountEntry | None:
    """The mount that `path` lies in, by the table alone."""
    best = None
    for mount in mounts():
        inside = path == mount.mountpoint or path.startswith(mount.mountpoint.rstrip("/") + "/")
        if inside and (best is None or len(mount.mountpoint) >= len(best.mountpoint)):
            best = mount
    return best
