"""From what the file system below says to what the kernel is told.

Timeouts are where freshness is decided (versions-and-drafts.md, "How a writer gets the draft"):

* A Version is immutable, so its attributes may be kept long; its *name* only as long as no draft of that name
  exists, because a publish then gives the name to another inode without the kernel asking.
* Drafts and live files change under their inode: nothing about them is kept.
* Directories that are not watched for outside changes, and everything in them, are kept for a moment only.
"""

from __future__ import annotations

import os

import pyfuse3

__all__ = ["KEPT_BRIEFLY", "KEPT_LONG", "entry_attributes"]

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
