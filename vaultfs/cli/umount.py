"""``vaultfs umount``: end a mount so that nothing is lost and nothing is left, and say who is in the way.

Order of events
---------------

1. While programs have drafts open that they have written to, wait (up to ``--timeout``): they are about to save.
2. Unmount as the kernel understands it, never by force: if a program has a file open, works in a directory or has
   something mapped, the kernel says EBUSY. That answer has no race in it, unlike a look at who uses the mount
   followed by the end of the daemon. A program that merely looks (an indexer) is given a second to go away.
3. The daemon hears of it from the kernel, publishes what is complete, keeps the rest as drafts, ends; we wait for
   its process to be gone. If it does not end by itself (the mount is still there in another mount namespace), it
   is asked to over the control socket.

Without a control socket (the daemon hangs, was killed, or belongs to another version) steps 2 and 3 still work.
``--lazy`` takes the name away at once; the daemon ends when the last file is closed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import time

from vaultfs.cli.output import tell
from vaultfs.control import client, registry
from vaultfs.control.holders import find_holders
from vaultfs.control.registry import Entry
from vaultfs.errors import (
    BusyMountError,
    ExitCode,
    MountDeniedError,
    NoAnswerError,
    NotMountedError,
    printable,
)
from vaultfs.mountinfo import MountEntry, mount_at, unmount
from vaultfs.patience import real_path, within

__all__ = ["configure", "run"]

_LOOK = 5.0  # seconds to find out who uses the mount
_GRACE = 1.0  # seconds for those who merely look
_UNASKED = 3.0  # seconds for a daemon to notice by itself that its mount is gone
_SHOWN = 20

_EPILOG = """\
examples:
  vaultfs umount ~/Notes              wait for open saves, unmount, return when the daemon is gone
  vaultfs umount --lazy ~/Notes       take it away now; programs keep the files that they have open
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("path", metavar="MOUNTPOINT", help="the mountpoint, or the vault that is mounted")
    parser.add_argument("-l", "--lazy", action="store_true", help="detach now, end when the last file is closed")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=10.0,
        help="how long to wait for open saves, and then for the daemon to end (default: 10)",
    )


def run(arguments: argparse.Namespace) -> int:
    entry, mount = _find(arguments.path)
    if mount is not None:
        if arguments.lazy:
            _unmount(mount, lazy=True)
        else:
            _unmount_when_idle(mount, entry, arguments.timeout)
    if entry is not None:
        _wait_for_end(entry, mount, arguments)
    return ExitCode.OK


def _find(path: str) -> tuple[Entry | None, MountEntry | None]:
    """The register's and the kernel's view of the mount at `path`, or of the vault `path`."""
    real = real_path(path)
    known = [*registry.entries(), *registry.dead()]
    entry = next((entry for entry in known if entry.mountpoint == real), None)
    entry = entry or next((entry for entry in known if entry.vault == real), None)
    mount = mount_at(entry.mountpoint if entry is not None else real)
    if mount is not None and not mount.ours:
        mount = None
    if mount is None and entry is None:
        raise NotMountedError("no vault is mounted here", path=real)
    if mount is not None and os.geteuid() not in (0, mount.user_id):
        raise MountDeniedError(
            f"this mount belongs to user {mount.user_id}", path=real, remedy="Ask that user, or unmount it as root."
        )
    return entry, mount


def _unmount_when_idle(mount: MountEntry, entry: Entry | None, timeout: float) -> None:
    begun = time.monotonic()
    told = False
    while True:
        writing = _being_written(entry)
        waited = time.monotonic() - begun
        if writing and waited < timeout:
            if not told:
                tell(f"waiting for {len(writing)} open save(s): {', '.join(writing[:3])}{' …' * (len(writing) > 3)}")
                told = True
        elif _unmount(mount):
            return
        elif waited >= (timeout if writing else min(timeout, _GRACE)):
            raise _busy(mount, entry, writing)
        time.sleep(0.05)


def _being_written(entry: Entry | None) -> list[str]:
    if entry is None:
        return []
    try:
        return [
            f"{printable(draft.path)} ({printable(draft.program)})"
            for draft in client.status(entry).drafts
            if draft.changed
        ]
    except NoAnswerError:
        return []  # it hangs or is ending: then only the kernel can tell whether the mount is in use


def _unmount(mount: MountEntry, *, lazy: bool = False) -> bool:
    """True if it is unmounted, False if it is busy."""
    try:
        unmount(mount.mountpoint, lazy=lazy)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        now = mount_at(mount.mountpoint)
        if now is not None and now.mount_id == mount.mount_id:
            raise
        # somebody else unmounted it in this moment
    return True


def _busy(mount: MountEntry, entry: Entry | None, writing: list[str]) -> BusyMountError:
    daemon = entry.pid if entry is not None else 0
    try:
        holders, unseen = within(_LOOK, lambda: find_holders(mount, except_pid=daemon))
    except TimeoutError:  # a process that is stuck in the kernel can hold up whoever looks at it
        holders, unseen = [], 0
    for holder in holders[:_SHOWN]:
        tell(f"in use: {holder.program} (pid {holder.pid}) {holder.what}" if holder.pid else f"in use: {holder.what}")
    if len(holders) > _SHOWN:
        tell(f"in use: and {len(holders) - _SHOWN} more")
    if unseen and not holders:
        tell(f"{unseen} processes of other users cannot be looked into; as root more can be seen")
    words = "the mount is in use"
    if writing:
        words += f", and {len(writing)} file(s) are still being written"
    return BusyMountError(words, path=mount.mountpoint)


def _wait_for_end(entry: Entry, mount: MountEntry | None, arguments: argparse.Namespace) -> None:
    patience = max(arguments.timeout, 1.0)
    if registry.wait_gone(entry, (_GRACE if arguments.lazy else min(patience, _UNASKED)) if mount is not None else 0):
        return
    if arguments.lazy and mount is not None:
        tell(f"detached; the daemon (pid {entry.pid}) ends when the last file is closed")
        return
    with contextlib.suppress(NoAnswerError):  # it may be ending already; whether it does is seen in a moment
        client.stop(entry, patience)
    if not registry.wait_gone(entry, patience):
        raise NoAnswerError(
            f"the mount is gone, but its daemon (pid {entry.pid}) has not ended within {patience:g} s",
            path=entry.mountpoint,
            remedy=f"It may wait for a hanging disk. Its log: {printable(entry.log_file or 'none')}",
        )
