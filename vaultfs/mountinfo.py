"""The kernel's table of mounts, and taking one out of it.

``/proc/self/mountinfo`` is read, never ``stat``: a look at the table needs nothing from the file systems in it, so
it works on a mount whose daemon hangs or died. A mount of ours has the type ``fuse.vaultfs``.

Sources: proc_pid_mountinfo(5), umount2(2), fusermount3(1).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import subprocess
from typing import NamedTuple

__all__ = ["FSTYPE", "MountEntry", "mount_at", "mounts", "mounts_below", "unmount"]

FSTYPE = "fuse.vaultfs"

_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_OCTAL = re.compile(rb"\\([0-7]{3})")


class MountEntry(NamedTuple):
    """One line of the table. Paths are file system strings (``os.fsencode`` gives the bytes)."""

    mount_id: int
    parent_id: int
    dev: int  # st_dev of the files in it
    mountpoint: str
    options: frozenset[str]
    fstype: str
    source: str
    super_options: frozenset[str]

    @property
    def ours(self) -> bool:
        return self.fstype == FSTYPE

    @property
    def user_id(self) -> int | None:
        """The user who mounted a FUSE file system; None for other file systems."""
        for option in self.super_options:
            if option.startswith("user_id="):
                return int(option.removeprefix("user_id="))
        return None


def _text(field: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))


def mounts() -> list[MountEntry]:
    """All mounts that this process sees, in the kernel's order: of two on one path, the later one is on top."""
    found = []
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            before, _, after = line.rstrip(b"\n").partition(b" - ")
            mount_id, parent_id, device, _root, mountpoint, options = before.split(b" ")[:6]
            fstype, source, super_options = after.split(b" ", 2)
            major, minor = device.split(b":")
            found.append(
                MountEntry(
                    mount_id=int(mount_id),
                    parent_id=int(parent_id),
                    dev=os.makedev(int(major), int(minor)),
                    mountpoint=_text(mountpoint),
                    options=frozenset(os.fsdecode(options).split(",")),
                    fstype=os.fsdecode(fstype),
                    source=_text(source),
                    super_options=frozenset(os.fsdecode(super_options).split(",")),
                )
            )
    return found


def mount_at(path: str) -> MountEntry | None:
    """What is mounted at exactly `path` (absolute, without links), topmost; None if nothing is."""
    found = None
    for mount in mounts():
        if mount.mountpoint == path:
            found = mount
    return found


def mounts_below(path: str) -> list[MountEntry]:
    """What is mounted somewhere below `path` (not at it)."""
    prefix = path.rstrip("/") + "/"
    return [mount for mount in mounts() if mount.mountpoint.startswith(prefix) and mount.mountpoint != path]


def unmount(path: str, *, lazy: bool = False) -> None:
    """Unmount what is on top at `path` (absolute, without links).

    `lazy` detaches it: the name is free at once, files that are open stay usable until they are closed.

    Raises OSError: EBUSY if it is in use, EINVAL if nothing is mounted there, EPERM if it is another user's mount,
    ENOENT if fusermount3 is needed and missing.
    """
    before = mount_at(path)
    if before is None:
        raise OSError(errno.EINVAL, "not mounted", path)
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(path), _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)) == 0:
            return
        number = ctypes.get_errno()
        if number != errno.EPERM:  # root without the capability (a container): fusermount3 may still be allowed to
            raise OSError(number, os.strerror(number), path)
    program = shutil.which("fusermount3") or shutil.which("fusermount")
    if program is None:
        raise OSError(errno.ENOENT, "fusermount3 is not installed", path)
    done = subprocess.run(
        [program, "-u", *(["-z"] if lazy else []), "--", path],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    if done.returncode == 0:
        return
    after = mount_at(path)
    if after is None or after.mount_id != before.mount_id:
        return  # somebody else unmounted it at the same moment: it is gone, and that was wanted
    words = done.stderr.decode("utf-8", "replace").strip()
    raise OSError(errno.EBUSY if "busy" in words.lower() else errno.EPERM, words or "fusermount3 failed", path)
