"""Who keeps a mount busy: processes with a file open in it, mapped from it, or standing in one of its directories.

Files are recognized by the device number of the mount, asked with ``AT_STATX_DONT_SYNC`` through ``/proc``: the
kernel answers that by itself, so a daemon that hangs is no obstacle, and bind mounts and other mount namespaces
are seen too (where the text of a link is wrong). The text is used only to say *which* file.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from vaultfs import kernel
from vaultfs.errors import printable
from vaultfs.mount import procs
from vaultfs.mountinfo import MountEntry, mounts_below

__all__ = ["Holder", "Holders", "find_holders"]


class Holder(NamedTuple):
    pid: int  # 0 for another mount
    program: str
    what: str  # in words, escaped


class Holders(NamedTuple):
    found: list[Holder]
    unseen: int  # processes of other users that may not be looked into


def find_holders(mount: MountEntry, *, except_pid: int = 0) -> Holders:
    """Everything that keeps `mount` busy, one entry for each process. `except_pid` (the daemon) does not count."""
    found = [
        Holder(0, "mount", f"{printable(below.mountpoint)} is mounted in it")
        for below in mounts_below(mount.mountpoint)
    ]
    unseen = 0
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) in (except_pid, os.getpid()):
            continue
        try:
            what = _uses(name, mount.dev)
        except PermissionError:
            unseen += 1
            continue
        except OSError:
            continue  # it ended while we looked: it holds nothing any more
        if what:
            found.append(Holder(int(name), printable(procs.program(int(name)) or "?"), what))
    return Holders(found, unseen)


def _uses(pid: str, dev: int) -> str | None:
    """How process `pid` uses the file system `dev`, in words; None if it does not."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        if _is_on(f"/proc/{pid}/fd/{name}", dev):
            return f"has {_target(f'/proc/{pid}/fd/{name}')} open"
    for name, words in (("cwd", "works in"), ("root", "has its root at"), ("exe", "runs")):
        if _is_on(f"/proc/{pid}/{name}", dev):
            return f"{words} {_target(f'/proc/{pid}/{name}')}"
    device = f"{os.major(dev):02x}:{os.minor(dev):02x}".encode()
    with open(f"/proc/{pid}/maps", "rb") as file:
        for line in file:
            fields = line.rstrip(b"\n").split(None, 5)
            if len(fields) == 6 and fields[3] == device:
                return f"has {printable(fields[5])} mapped"
    return None


def _is_on(path: str, dev: int) -> bool:
    try:
        return kernel.statx(kernel.AT_FDCWD, path.encode(), kernel.AT_STATX_DONT_SYNC).dev == dev
    except PermissionError:
        raise
    except OSError:
        return False  # closed since the listing, or a kernel thread without such a link


def _target(path: str) -> str:
    try:
        return printable(os.readlink(path))
    except OSError:
        return "a file"  # closed in this moment; it was there, and the user will look again
