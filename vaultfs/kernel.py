"""The system calls that Python lacks, each as thin as it can be.

Every function here is one system call: it takes plain integers and bytes, returns plain integers or a small
record, and raises ``OSError`` with the kernel's errno and nothing else. No policy lives here, and nothing is
retried: the callers know why a call may be repeated (``EAGAIN`` from openat2, for one).

All calls go through ``CDLL``, so the interpreter's lock is free while the kernel works: a disk that hangs in
one thread does not hold up the thread that answers ``vaultfs status``.

Sources: openat2(2), renameat2(2), statx(2), kcmp(2), ioctl_ficlone(2), syncfs(2), and the kernel's own
``include/uapi/linux/`` headers for the numbers. The numbers of openat2 and of everything added after it are
the same on all architectures; those that differ are in `_SYSCALL_NUMBERS`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import platform
import sys
from typing import Any, NamedTuple

__all__ = [
    "AT_EMPTY_PATH",
    "AT_FDCWD",
    "AT_NO_AUTOMOUNT",
    "AT_STATX_DONT_SYNC",
    "AT_SYMLINK_NOFOLLOW",
    "KCMP_FILE",
    "RENAME_EXCHANGE",
    "RENAME_NOREPLACE",
    "RESOLVE_BENEATH",
    "RESOLVE_NO_MAGICLINKS",
    "RESOLVE_NO_SYMLINKS",
    "RESOLVE_NO_XDEV",
    "Statx",
    "ficlone",
    "filesystem_type",
    "filesystem_uuid",
    "inode_flags",
    "kcmp",
    "openat2",
    "renameat2",
    "set_inode_flags",
    "statx",
    "syncfs",
]

AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW = 0x100
AT_NO_AUTOMOUNT = 0x800
AT_EMPTY_PATH = 0x1000
AT_STATX_DONT_SYNC = 0x4000

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2

KCMP_FILE = 0

STATX_BASIC_STATS = 0x7FF
STATX_BTIME = 0x800
STATX_MNT_ID = 0x1000

_FICLONE = 0x40049409
_FS_IOC_GETFSUUID = 0x80111500
_FS_IOC_GETFLAGS = 0x80086601
_FS_IOC_SETFLAGS = 0x40086602
_SYS_OPENAT2 = 437
_SYSCALL_NUMBERS = {  # machine: (renameat2, statx, kcmp)
    "x86_64": (316, 332, 312),
    "aarch64": (276, 291, 272),
    "riscv64": (276, 291, 272),
}
_numbers = _SYSCALL_NUMBERS.get(platform.machine())
if _numbers is None:  # pragma: no cover - says at import what would otherwise fail in the middle of a save
    raise ImportError(f"vaultfs does not know the system call numbers of {platform.machine()}")
_SYS_RENAMEAT2, _SYS_STATX, _SYS_KCMP = _numbers

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_long = ctypes.c_long


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_NUMBER_OPENAT2 = _long(_SYS_OPENAT2)
_SIZE_OPEN_HOW = _long(ctypes.sizeof(_OpenHow))


@functools.lru_cache(maxsize=256)
def _open_how(flags: int, mode: int, resolve: int) -> Any:
    """A pointer to the argument block of openat2, made once for each of the few combinations in use.

    The kernel only reads it, so threads may share it; building it anew was half of the cost of the call.
    """
    return ctypes.pointer(_OpenHow(flags, mode, resolve))


class _Timestamp(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_int64), ("nsec", ctypes.c_uint32), ("_pad", ctypes.c_int32))


class _Statx(ctypes.Structure):
    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("blksize", ctypes.c_uint32),
        ("attributes", ctypes.c_uint64),
        ("nlink", ctypes.c_uint32),
        ("uid", ctypes.c_uint32),
        ("gid", ctypes.c_uint32),
        ("mode", ctypes.c_uint16),
        ("_spare0", ctypes.c_uint16),
        ("ino", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64),
        ("attributes_mask", ctypes.c_uint64),
        ("atime", _Timestamp),
        ("btime", _Timestamp),
        ("ctime", _Timestamp),
        ("mtime", _Timestamp),
        ("rdev_major", ctypes.c_uint32),
        ("rdev_minor", ctypes.c_uint32),
        ("dev_major", ctypes.c_uint32),
        ("dev_minor", ctypes.c_uint32),
        ("mnt_id", ctypes.c_uint64),
        ("_spare", ctypes.c_uint64 * 13),
    )


class Statx(NamedTuple):
    """What `statx` tells; times in nanoseconds, `btime_ns` 0 where the file system keeps no birth time."""

    mode: int
    dev: int
    ino: int
    nlink: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    ctime_ns: int
    btime_ns: int
    mnt_id: int


def _failed(path: bytes | None = None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)


def openat2(directory: int, path: bytes, flags: int, mode: int = 0, resolve: int = 0) -> int:
    """Open `path` below the descriptor `directory`; returns a descriptor (always close-on-exec).

    Raises OSError: ELOOP and EXDEV for what `resolve` forbids, EAGAIN when a rename raced with the walk,
    ENOSYS on kernels before 5.6; openat2(2).
    """
    descriptor: int = _syscall(
        _NUMBER_OPENAT2, directory, path, _open_how(flags | os.O_CLOEXEC, mode, resolve), _SIZE_OPEN_HOW
    )
    if descriptor < 0:
        raise _failed(path)
    return descriptor


def renameat2(old_directory: int, old: bytes, new_directory: int, new: bytes, flags: int) -> None:
    """Rename with `RENAME_NOREPLACE` or `RENAME_EXCHANGE`; EINVAL or ENOSYS where not supported."""
    if _syscall(_long(_SYS_RENAMEAT2), _long(old_directory), old, _long(new_directory), new, _long(flags)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), old, None, new)


def statx(directory: int, path: bytes, flags: int = 0) -> Statx:
    """statx(2) with basic fields, birth time and mount id.

    With `AT_STATX_DONT_SYNC` a FUSE inode answers from what the kernel was last sent, without a request to
    its daemon: this is how the daemon itself may look at its own mount.
    """
    buffer = _Statx()
    if (
        _syscall(
            _long(_SYS_STATX),
            _long(directory),
            path,
            _long(flags),
            _long(STATX_BASIC_STATS | STATX_BTIME | STATX_MNT_ID),
            ctypes.byref(buffer),
        )
        != 0
    ):
        raise _failed(path)
    return Statx(
        mode=buffer.mode,
        dev=os.makedev(buffer.dev_major, buffer.dev_minor),
        ino=buffer.ino,
        nlink=buffer.nlink,
        uid=buffer.uid,
        gid=buffer.gid,
        size=buffer.size,
        mtime_ns=buffer.mtime.sec * 1_000_000_000 + buffer.mtime.nsec,
        ctime_ns=buffer.ctime.sec * 1_000_000_000 + buffer.ctime.nsec,
        btime_ns=buffer.btime.sec * 1_000_000_000 + buffer.btime.nsec,
        mnt_id=buffer.mnt_id,
    )


def kcmp(first_pid: int, second_pid: int, kind: int, first: int, second: int) -> bool:
    """True if both processes' resources are the same kernel object (kcmp(2)); EPERM without ptrace rights."""
    answer: int = _syscall(
        _long(_SYS_KCMP),
        _long(first_pid),
        _long(second_pid),
        _long(kind),
        ctypes.c_ulong(first),
        ctypes.c_ulong(second),
    )
    if answer < 0:
        raise _failed()
    return answer == 0


def ficlone(source: int, target: int) -> bool:
    """Share all of `source`'s extents with `target` (ioctl_ficlone(2)).

    Returns False where the file system cannot (EOPNOTSUPP, EXDEV, EINVAL, ENOTTY): copy instead. Other errors
    (ENOSPC, EIO, …) are raised.
    """
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS):
            return False
        raise
    return True


def syncfs(descriptor: int) -> None:
    """Write all of the file system of `descriptor` to disk; EIO if any writeback failed since it was opened."""
    if _libc.syncfs(descriptor) != 0:
        raise _failed()


def filesystem_uuid(descriptor: int) -> bytes | None:
    """The UUID of the file system of `descriptor`; None where it does not tell (before Linux 6.9, network, FUSE)."""
    answer = bytearray(17)  # struct fsuuid2: a length, then up to 16 bytes; include/uapi/linux/fs.h
    try:
        fcntl.ioctl(descriptor, _FS_IOC_GETFSUUID, answer)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return None
        raise
    return bytes(answer[1 : 1 + answer[0]])


def filesystem_type(descriptor: int) -> int:
    """The magic number of the file system of `descriptor`; fstatfs(2), include/uapi/linux/magic.h."""
    buffer = (ctypes.c_long * 32)()  # struct statfs is at most 120 bytes, and f_type its first field
    if _libc.fstatfs(descriptor, ctypes.byref(buffer)) != 0:
        raise _failed()
    return int(buffer[0]) & 0xFFFFFFFF


def inode_flags(descriptor: int) -> int | None:
    """The FS_*_FL flags of an inode (ioctl_iflags(2)); None where the file system has none."""
    answer = bytearray(8)
    try:
        fcntl.ioctl(descriptor, _FS_IOC_GETFLAGS, answer)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return None
        raise
    return int.from_bytes(answer[:4], sys.byteorder)  # the kernel writes an int, whatever the ioctl's number says


def set_inode_flags(descriptor: int, flags: int) -> None:
    """Set the FS_*_FL flags of an inode (ioctl_iflags(2)); EPERM or EOPNOTSUPP for those it does not allow."""
    fcntl.ioctl(descriptor, _FS_IOC_SETFLAGS, flags.to_bytes(8, sys.byteorder))
