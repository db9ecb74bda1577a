"""Whole contents of files: copying them, comparing them, and proving that nobody is changing them.

All of it works on open descriptors, leaves their positions alone where it can (SEEK_DATA moves the source's), and knows
no paths.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
from collections.abc import Iterator
from typing import Final

from vaultfs import kernel

__all__ = ["copy_content", "copy_range", "nobody_writes", "same_bytes"]

_COPY_CHUNK: Final = 1 << 30  # copy_file_range copies up to 2 GiB at a time
_CHUNK: Final = 1 << 20


@contextlib.contextmanager
def nobody_writes(fd: int) -> Iterator[bool]:
    """While this lasts: True if it is proven that nobody has the file open for writing or mapped writable.

    `fd` must be open read-only; other read-only descriptors do not matter. Who tries to open it for writing meanwhile
    waits until the end of the context, so that must come within microseconds. fcntl(2), "Leases".

    False also where leases are not to be had (network file systems, another's file): not proven is not proven.
    """
    try:
        # a lease that is broken sends SIGIO by default, which would end the process; SIGURG is ignored by default
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:  # EAGAIN: somebody writes. Others: cannot be proven. Both keep the file, which is safe.
        yield False
        return
    try:
        yield True
    finally:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def copy_content(source: int, target: int) -> bool:
    """Make the empty file `target` hold what `source` holds, its holes included; True if all extents are shared.

    Reflink where the file system can (no data is copied, no matter how large), else SEEK_DATA and copy_file_range.
    Raises OSError: ENOSPC, EDQUOT, EIO.
    """
    size = os.fstat(source).st_size
    if size and kernel.ficlone(source, target):
        return True
    os.ftruncate(target, size)  # holes at the end too
    position = 0
    while position < size:
        try:
            start = os.lseek(source, position, os.SEEK_DATA)
            end = os.lseek(source, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                break
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            start, end = position, size  # holes are not told here: all of it is data
        end = min(end, size)
        copy_range(source, start, target, start, end - start)
        position = end
    return False


def copy_range(source: int, source_offset: int, target: int, target_offset: int, length: int) -> None:
    """Copy `length` bytes (fewer if the source ends), inside the kernel where it can. Raises OSError."""
    while length > 0:
        try:
            copied = os.copy_file_range(source, target, min(length, _COPY_CHUNK), source_offset, target_offset)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF):
                raise
            copied = 0
        if copied == 0:  # the end, or a file system whose copy_file_range does nothing (FUSE, /proc): by hand
            data = os.pread(source, min(length, _CHUNK), source_offset)
            if not data:
                return
            copied = os.pwrite(target, data, target_offset)
        source_offset += copied
        target_offset += copied
        length -= copied


def same_bytes(first: int, second: int, limit: int | None = None) -> bool:
    """True if the two open files hold the same bytes. Sizes first; more than `limit` bytes are not compared (False).

    Raises OSError.
    """
    size = os.fstat(first).st_size
    if os.fstat(second).st_size != size or (limit is not None and size > limit):
        return False
    offset = 0
    while True:
        block = os.pread(first, _CHUNK, offset)
        if block != os.pread(second, _CHUNK, offset):
            return False
        if not block:
            return True
        offset += len(block)
