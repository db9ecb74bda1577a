"""From what the file system below says to what the kernel is told.

Timeouts are where freshness is decided (versions-and-drafts.md, "How a writer gets the draft"):

* A Version is immutable, so its attributes may be kept long; its *name* only as long as no draft of that name
  exists, because a publish then gives the name to another inode without the kernel asking.
* Drafts and live files change under their inode: nothing about them is kept.
* Directories that are not watched for outside changes, and everything in them, are kept for a moment only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pyfuse3

from vaultfs.errors import HardLinkedError, LookAgainError
from vaultfs.identity import FileIdentity
from vaultfs.mount.inodes import Directory, LiveFile, Name, Version
from vaultfs.root import VaultRoot

__all__ = [
    "KEPT_BRIEFLY",
    "KEPT_LONG",
    "assert_one_name",
    "entry_attributes",
    "open_live",
    "open_same_directory",
    "path_descriptor",
]

KEPT_LONG = 3600.0  # seconds; outside changes are told to the kernel as they are seen
KEPT_BRIEFLY = 1.0  # seconds, where outside changes cannot be watched


def entry_attributes(
    status: os.stat_result, number: int, *, entry_timeout: float, attr_timeout: float
) -> pyfuse3.EntryAttributes:
    """`status` with inode number `number` and the two timeouts (seconds)."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = pyfuse3.InodeT(number)
    entry.generation = 0
    entry.entry_timeout = entry_timeout
    entry.attr_timeout = attr_timeout
    entry.st_mode = pyfuse3.ModeT(status.st_mode)
    entry.st_nlink = status.st_nlink
    entry.st_uid = status.st_uid
    entry.st_gid = status.st_gid
    entry.st_rdev = status.st_rdev
    entry.st_size = status.st_size
    entry.st_blksize = 4096
    entry.st_blocks = status.st_blocks
    entry.st_atime_ns = status.st_atime_ns
    entry.st_mtime_ns = status.st_mtime_ns
    entry.st_ctime_ns = status.st_ctime_ns
    return entry


@contextmanager
def path_descriptor(root: VaultRoot, version: Version) -> Iterator[int]:
    """A descriptor that stands for exactly this version, with or without the right to read it.

    The one that is held, if the name holds something else by now: the path was resolved before, as on any file system.
    Raises LookAgainError if none is held.
    """
    if version.descriptor is not None and not version.is_current:
        yield version.descriptor
        return
    try:
        descriptor = root.open_file(version.name.path(), os.O_PATH)
    except FileNotFoundError:
        if version.descriptor is None:
            raise
        yield version.descriptor
        return
    try:
        if version.identity.unchanged(FileIdentity.from_stat(os.fstat(descriptor))):
            yield descriptor
        elif version.descriptor is not None:
            yield version.descriptor
        else:
            raise LookAgainError("changed outside")
    finally:
        os.close(descriptor)


def open_same_directory(root: VaultRoot, directory: Directory) -> int:
    """A descriptor of exactly this directory. Raises LookAgainError if another one stands at its path by now."""
    descriptor = root.open_directory(directory.path())
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != directory.identity:
        os.close(descriptor)
        raise LookAgainError("something else stands there now")
    return descriptor


def assert_one_name(descriptor: int, name: Name) -> None:
    """Raises HardLinkedError if the open file has several names: a change of it would be one of all of them."""
    if os.fstat(descriptor).st_nlink > 1:
        raise HardLinkedError(path=name.path())


def open_live(root: VaultRoot, live: LiveFile, *, change: bool = True) -> int:
    """A path descriptor of exactly this live file, for its attributes.

    Raises LookAgainError if another file stands at its path by now, HardLinkedError if it has several names and is to
    be changed.
    """
    descriptor, status = root.open_with_stat(live.name.path(), os.O_PATH)
    try:
        if (status.st_dev, status.st_ino) != live.identity:
            raise LookAgainError("the file was replaced")
        if change:
            assert_one_name(descriptor, live.name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
