"""Taking a lock directory apart so that nobody else's is hurt: by its owner, or once its owner is proven dead.

Everything happens through *one descriptor* of the lock directory, the one through which it was judged. By name, a
process that was stopped between looking and unlinking would strip whatever lock stands at that name when it
continues: its successor's. Only the last step, ``rmdir``, needs the name; it compares the inode first, and can
remove an empty directory at most, which a complete lock never is.

Unlinking the lease (``.lease-TOKEN``) is the compare-and-swap of the protocol: its name cannot be guessed and no
later lock has it, so of many who try, one succeeds, and only that one goes on.

States, in this order; whoever dies on the way leaves what the next reaper finishes:

    owner + lease → owner (the lock is decided) → empty → gone
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from enum import StrEnum

from vaultfs.locks.records import (
    LEASE_PREFIX,
    OWNER,
    LockContents,
    OwnerRecord,
    is_protocol_name,
    lease_name,
    look_into,
)

__all__ = [
    "Removal",
    "clear_prepared",
    "drop_pending",
    "remove_directory",
    "remove_forced",
    "remove_judged",
    "same_directory",
    "unlink_if_there",
]


class Removal(StrEnum):
    """How the removal of a lock ended."""

    REMOVED = "removed"
    LOST = "lost"  # somebody else was faster; look at the name again
    LEFT = "left"  # something is in it that was not there when it was judged; it stays


def same_directory(directory: int, name: bytes, dev: int, ino: int) -> bool:
    """True if `name` in `directory` is the inode that we mean."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return status.st_dev == dev and status.st_ino == ino


def unlink_if_there(name: bytes, lock: int) -> bool:
    """Unlinks a protocol file through the lock's descriptor; False if it was gone."""
    try:
        os.unlink(name, dir_fd=lock)
    except FileNotFoundError:
        return False
    return True


def remove_directory(directory: int, name: bytes, dev: int, ino: int) -> Removal:
    """The last step: rmdir of the emptied lock directory, by name, if the name still means it.

    A successor that takes the name between the comparison and the rmdir is not empty, and stays (ENOTEMPTY).
    Raises OSError for failures of the file system.
    """
    if not same_directory(directory, name, dev, ino):
        return Removal.LOST
    try:
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        return Removal.LOST
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return Removal.LEFT if same_directory(directory, name, dev, ino) else Removal.LOST
        raise
    return Removal.REMOVED


def remove_judged(directory: int, name: bytes, lock: int, contents: LockContents) -> Removal:
    """Removes the lock `name` in `directory`, judged dead or residue by `contents`, through its descriptor `lock`.

    Many may call this for one lock at once: one gets REMOVED. Raises OSError (EACCES where we may judge but not
    remove).
    """
    if not same_directory(directory, name, contents.dev, contents.ino):
        return Removal.LOST
    owner = contents.owner
    lease = contents.lease
    if lease is not None:
        if not unlink_if_there(lease, lock):
            return Removal.LOST
    else:  # nothing to swap: it must at least be, to this moment, what was judged
        now = look_into(lock)
        if (now.mtime_ns, now.btime_ns, now.owner_raw, now.leases, now.foreign) != (
            contents.mtime_ns,
            contents.btime_ns,
            contents.owner_raw,
            (),
            None,
        ):
            return Removal.LOST
    # Without a lease the owner file stands in for it: whoever unlinks it goes on.
    if contents.owner_raw is not None and not unlink_if_there(OWNER, lock) and lease is None and owner is not None:
        return Removal.LOST
    for scrap, _ in contents.scraps:
        unlink_if_there(scrap, lock)
    return remove_directory(directory, name, contents.dev, contents.ino)


def drop_pending(directory: int, name: bytes, lock: int, record: OwnerRecord) -> bool:
    """Removes our own prepared lock `name` in `directory`, open as `lock`, never published.

    Only if it holds nothing but an owner and a lease with our token; whatever else is found in it stays, and so
    does the directory (False).
    """
    lease = lease_name(record.token)
    try:
        return _clear(directory, name, lock, lambda entry: entry in (OWNER, lease))
    except OSError:
        return False  # private residue: the sweep at the next mount clears it; the error that led here matters more


def clear_prepared(directory: int, name: bytes, lock: int) -> bool:
    """Removes a prepared lock of a process that is proven dead; False if it holds anything else, and stays."""
    return _clear(directory, name, lock, is_protocol_name)


def _clear(directory: int, name: bytes, lock: int, expected: Callable[[bytes], bool]) -> bool:
    entries = [os.fsencode(entry) for entry in os.listdir(lock)]
    status = os.fstat(lock)
    if not all(map(expected, entries)) or not same_directory(directory, name, status.st_dev, status.st_ino):
        return False
    for entry in entries:
        unlink_if_there(entry, lock)
    return remove_directory(directory, name, status.st_dev, status.st_ino) is Removal.REMOVED


def remove_forced(directory: int, name: bytes, lock: int, contents: LockContents) -> Removal:
    """Removes the lock `name` in `directory` because a person said so, whatever the verdict; `lock` is its descriptor.

    Only names of the protocol that are no directories are unlinked (the name only, should it be a link); if anything
    else is in it, nothing is touched (LEFT). The leases go first: who holds one of them finds out. Raises OSError.
    """
    if not same_directory(directory, name, contents.dev, contents.ino):
        return Removal.LOST
    entries = [os.fsencode(entry) for entry in os.listdir(lock)]
    for entry in entries:
        try:
            status = os.stat(entry, dir_fd=lock, follow_symlinks=False)
        except FileNotFoundError:
            return Removal.LOST  # its owner is releasing it, or somebody else removes it
        if not is_protocol_name(entry) or stat.S_ISDIR(status.st_mode):
            return Removal.LEFT
    for entry in sorted(entries, key=lambda entry: not entry.startswith(LEASE_PREFIX)):
        if not unlink_if_there(entry, lock):
            return Removal.LOST
    return remove_directory(directory, name, contents.dev, contents.ino)
