"""Two ways from a vault-relative path to a descriptor, with one meaning.

A *resolver* starts at the descriptor of the vault root, every time, and never lets go of these rules:

- no component is a symbolic or magic link;
- nothing leaves the root, neither by ``..`` nor by an absolute path;
- no component is a mount point (also one that binds a directory of the same file system), and no directory
  has another ``st_dev`` than the root (a btrfs subvolume is no mount, yet nothing can be renamed into it).

The rules are kept *while* the path is walked, so exchanging a directory for a link at any moment gains nothing:
either the directory was used or the call failed.

`KernelResolver` lets openat2(2) do it in one system call. `WalkResolver` takes one component after the other,
opening each with ``O_PATH | O_NOFOLLOW`` and looking at what it got (type, device, mount id) before it goes on;
it serves kernels before 5.6 and sandboxes that forbid openat2, and it explains to the other which component it
was that openat2 would not pass.

Paths here are *clean*: non-empty, relative, without empty, ``.`` and ``..`` components and without NUL (the
root sees to that), and may be longer than PATH_MAX.

Both raise `UnsafePathError` for a broken rule, with the component; everything else (ENOENT, ENOTDIR, EACCES, …)
is the ``OSError`` of the system call.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import NamedTuple, Protocol

from vaultfs import kernel
from vaultfs.errors import PathKind, UnsafePathError
from vaultfs.kernel import openat2

__all__ = ["Bounds", "KernelResolver", "Resolver", "WalkResolver", "mount_id", "refuse_irregular"]

_RULES = kernel.RESOLVE_BENEATH | kernel.RESOLVE_NO_SYMLINKS | kernel.RESOLVE_NO_MAGICLINKS | kernel.RESOLVE_NO_XDEV
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_PATH_MAX = 4096  # bytes with the final NUL: <linux/limits.h>
_ATTEMPTS = 4  # of openat2 before the walk takes over; EAGAIN and EINTR are rare and rarely twice
_CREATE_ATTEMPTS = 16  # between "it is not there" and "somebody made it", when others make and remove it in a loop


class Bounds(NamedTuple):
    """The root that a resolver stays beneath; `single_device` if no directory of its mount can differ in st_dev."""

    fd: int
    dev: int
    mount_id: int
    single_device: bool


class Resolver(Protocol):
    """What the two ways have in common. Each call returns a new descriptor, which the caller closes."""

    def descend(self, path: bytes) -> int:
        """An O_PATH descriptor of the directory `path`, good for ``*at`` calls and nothing else."""

    def reach(self, path: bytes) -> int:
        """An O_PATH descriptor of whatever `path` is: if the last component is a link, of the link itself."""

    def open(self, path: bytes, flags: int, mode: int, regular: bool) -> int:
        """Open `path`; a link as the last component is refused as well.

        With `regular` the call never waits for a FIFO's other end. The caller still looks at what it got
        (`refuse_irregular`): only the walk can tell before it opens.
        """


def mount_id(descriptor: int) -> int:
    """The id of the mount that `descriptor` was reached through: statx(2), or proc's fdinfo before Linux 5.8."""
    number = kernel.statx(descriptor, b"", kernel.AT_EMPTY_PATH | kernel.AT_STATX_DONT_SYNC).mnt_id
    return number or _mount_id_from_proc(descriptor)


def _mount_id_from_proc(descriptor: int) -> int:
    with open(f"/proc/self/fdinfo/{descriptor}", "rb") as lines:
        for line in lines:
            if line.startswith(b"mnt_id:"):
                return int(line.split()[1])
    raise OSError(errno.ENOTSUP, "this kernel does not tell the mount of a descriptor")


def refuse_irregular(mode: int, path: bytes) -> None:
    """Raise for everything but a regular file: IsADirectoryError, or UnsafePathError (link, unsupported type)."""
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if stat.S_ISLNK(mode):
        raise UnsafePathError(PathKind.COMPONENT_LINK, path, cause_errno=errno.ELOOP)
    raise UnsafePathError(PathKind.UNSUPPORTED_TYPE, path)


class WalkResolver:
    """One component after the other; see the module's docstring."""

    __slots__ = ("_bounds",)

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    def descend(self, path: bytes) -> int:
        """See `Resolver.descend`."""
        descriptor = self._bounds.fd
        end = -1
        try:
            while end < len(path):
                start = end + 1
                end = path.find(b"/", start)
                if end < 0:
                    end = len(path)
                following, mode = self._step(descriptor, path[start:end], path[:end])
                if descriptor != self._bounds.fd:
                    os.close(descriptor)
                descriptor = following
                if stat.S_ISLNK(mode):
                    raise UnsafePathError(PathKind.COMPONENT_LINK, path[:end], cause_errno=errno.ELOOP)
                if not stat.S_ISDIR(mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path[:end])
        except BaseException:
            if descriptor != self._bounds.fd:
                os.close(descriptor)
            raise
        return descriptor

    def reach(self, path: bytes) -> int:
        """See `Resolver.reach`."""
        parent, name = self._parent(path)
        try:
            return self._step(parent, name, path)[0]
        finally:
            self._leave(parent)

    def open(self, path: bytes, flags: int, mode: int, regular: bool) -> int:
        """See `Resolver.open`.

        Nothing is opened before it was looked at through an O_PATH descriptor, so a file that was bind-mounted
        into the vault is never truncated and a device never woken up; the open itself then goes through that
        same descriptor (proc(5), ``/proc/self/fd``), which no exchange of names can redirect.
        """
        parent, name = self._parent(path)
        try:
            for _ in range(_CREATE_ATTEMPTS):
                if flags & os.O_CREAT:
                    try:
                        return os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=parent)
                    except FileExistsError:
                        if flags & os.O_EXCL:
                            raise
                try:
                    return self._open_existing(parent, name, path, flags & ~(os.O_CREAT | os.O_EXCL), mode, regular)
                except FileNotFoundError:
                    if not flags & os.O_CREAT:
                        raise  # otherwise somebody removed it since O_EXCL found it: it may be made now
            raise BlockingIOError(errno.EAGAIN, "somebody keeps making and removing it", path)
        finally:
            self._leave(parent)

    def explain(self, path: bytes, cause: OSError) -> UnsafePathError:
        """The error for what openat2 refused with `cause` (ELOOP, EXDEV), naming the component if it is still there."""
        number = cause.errno or 0
        try:
            descriptor = self.reach(path)
        except UnsafePathError as error:
            error.cause_errno = number
            return error
        except OSError:
            # It is not what openat2 saw any more. The refusal stands, only the component stays unknown.
            return UnsafePathError(PathKind.COMPONENT_REDIRECTED, path, cause_errno=number)
        try:
            is_link = stat.S_ISLNK(os.fstat(descriptor).st_mode)
        finally:
            os.close(descriptor)
        kind = PathKind.COMPONENT_LINK if is_link else PathKind.COMPONENT_REDIRECTED
        return UnsafePathError(kind, path, cause_errno=number)

    def _parent(self, path: bytes) -> tuple[int, bytes]:
        directory, slash, name = path.rpartition(b"/")
        return (self.descend(directory) if slash else self._bounds.fd), name

    def _leave(self, parent: int) -> None:
        if parent != self._bounds.fd:
            os.close(parent)

    def _step(self, directory: int, name: bytes, path: bytes) -> tuple[int, int]:
        """One component down: a descriptor of what `name` is, and its mode. `path` is for the error."""
        descriptor = os.open(name, _LOOK, dir_fd=directory)
        try:
            seen = kernel.statx(descriptor, b"", kernel.AT_EMPTY_PATH)
            mount = seen.mnt_id or _mount_id_from_proc(descriptor)
            foreign = stat.S_ISDIR(seen.mode) and seen.dev != self._bounds.dev
            if foreign or mount != self._bounds.mount_id:
                raise UnsafePathError(PathKind.CROSSES_MOUNT, path, cause_errno=errno.EXDEV)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, seen.mode

    def _open_existing(self, parent: int, name: bytes, path: bytes, flags: int, mode: int, regular: bool) -> int:
        seen, kind = self._step(parent, name, path)
        try:
            if stat.S_ISLNK(kind):
                raise UnsafePathError(PathKind.COMPONENT_LINK, path, cause_errno=errno.ELOOP)
            if regular:
                refuse_irregular(kind, path)
            try:
                return os.open(f"/proc/self/fd/{seen}", (flags & ~os.O_NOFOLLOW) | os.O_CLOEXEC, mode)
            except OSError as error:
                error.filename = path  # not the number of a descriptor that is closed by the time it is read
                raise
        finally:
            os.close(seen)


class KernelResolver:
    """openat2(2): one system call for any path that fits into PATH_MAX; see the module's docstring."""

    __slots__ = ("_dev", "_fd", "_single_device", "_walk")

    def __init__(self, bounds: Bounds) -> None:
        self._fd = bounds.fd
        self._dev = bounds.dev
        self._single_device = bounds.single_device
        self._walk = WalkResolver(bounds)

    @staticmethod
    def works(fd: int) -> bool:
        """False where the kernel has no openat2 (ENOSYS) or a sandbox forbids it (EPERM)."""
        try:
            os.close(openat2(fd, b".", _LOOK_DIRECTORY, 0, _RULES))
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
                return False
            raise
        return True

    def descend(self, path: bytes) -> int:
        """See `Resolver.descend`."""
        if len(path) >= _PATH_MAX:
            return self._descend_deep(path)
        try:  # spelled out here and in `reach` instead of calling `_open`: every request of the mount comes along here
            descriptor = openat2(self._fd, path, _LOOK_DIRECTORY, 0, _RULES)
        except OSError as error:
            descriptor = self._open_again(error, self._fd, path, _LOOK_DIRECTORY, 0, path)
            if descriptor < 0:
                return self._walk.descend(path)
        return descriptor if self._single_device else self._same_device(descriptor, path)

    def reach(self, path: bytes) -> int:
        """See `Resolver.reach`."""
        if len(path) < _PATH_MAX and self._single_device:
            try:
                return openat2(self._fd, path, _LOOK, 0, _RULES)
            except OSError as error:
                descriptor = self._open_again(error, self._fd, path, _LOOK, 0, path)
        else:
            descriptor = self._open_below(path, _LOOK, 0)
        return descriptor if descriptor >= 0 else self._walk.reach(path)

    def open(self, path: bytes, flags: int, mode: int, regular: bool) -> int:
        """See `Resolver.open`.

        With `regular` the file is opened O_NONBLOCK, for fear of a FIFO. On a regular file that matters only
        if somebody holds a lease on it (fcntl(2), ``F_SETLEASE``): then it says EAGAIN instead of waiting for
        the lease to be broken, and the walk, which sees the type first, opens it as the caller asked.
        """
        # O_PATH opens nothing, so it waits for no FIFO, and openat2 refuses it together with O_NONBLOCK.
        asked = flags | os.O_NONBLOCK if regular and not flags & os.O_PATH else flags
        if not flags & os.O_CREAT:
            mode = 0  # openat2 rejects a mode that would have no effect
        try:
            descriptor = self._open_below(path, asked, mode)
        except OSError as error:
            if regular and error.errno in (errno.ENXIO, errno.ENODEV):  # a FIFO nobody reads, a socket, a bare device
                raise UnsafePathError(PathKind.UNSUPPORTED_TYPE, path, cause_errno=error.errno) from error
            raise
        if descriptor < 0:
            return self._walk.open(path, flags, mode, regular)
        return descriptor

    def _open_below(self, path: bytes, flags: int, mode: int) -> int:
        if len(path) < _PATH_MAX and self._single_device:
            return self._open(self._fd, path, flags, mode, path)
        directory, slash, name = path.rpartition(b"/")
        if not slash:
            return self._open(self._fd, path, flags, mode, path)
        parent = self.descend(directory)
        try:
            return self._open(parent, name, flags, mode, path)
        finally:
            os.close(parent)

    def _open(self, start: int, path: bytes, flags: int, mode: int, whole: bytes) -> int:
        """openat2 below `start`; -1 if it was interrupted too often: then the walk has to do it."""
        try:
            return openat2(start, path, flags, mode, _RULES)
        except OSError as error:
            return self._open_again(error, start, path, flags, mode, whole)

    def _open_again(self, cause: OSError, start: int, path: bytes, flags: int, mode: int, whole: bytes) -> int:
        """What follows when openat2 failed with `cause`: again, -1, or the error that the caller is to see.

        EAGAIN means that a rename or a mount somewhere raced with the walk in the kernel, openat2(2).
        """
        for _ in range(_ATTEMPTS):
            if cause.errno in (errno.ELOOP, errno.EXDEV):
                raise self._walk.explain(whole, cause) from cause
            if cause.errno not in (errno.EAGAIN, errno.EINTR):
                raise cause
            try:
                return openat2(start, path, flags, mode, _RULES)
            except OSError as error:
                cause = error
        return -1

    def _descend_deep(self, path: bytes) -> int:
        """A directory whose path does not fit into one system call: in the longest pieces that do.

        Each piece keeps the rules beneath the one before it, which kept them beneath the root.
        """
        descriptor = self._fd
        start = 0
        try:
            while start < len(path):
                end = len(path)
                if end - start >= _PATH_MAX:
                    end = path.rfind(b"/", start, start + _PATH_MAX)
                    if end < 0:  # one component longer than PATH_MAX: the kernel says ENAMETOOLONG
                        end = len(path)
                following = self._open(descriptor, path[start:end], _LOOK_DIRECTORY, 0, path[:end])
                if descriptor != self._fd:
                    os.close(descriptor)
                descriptor = self._fd  # nothing of ours is open should the walk below raise
                descriptor = following if following >= 0 else self._walk.descend(path[:end])
                start = end + 1
        except BaseException:
            if descriptor != self._fd:
                os.close(descriptor)
            raise
        return descriptor if self._single_device else self._same_device(descriptor, path)

    def _same_device(self, descriptor: int, path: bytes) -> int:
        """`descriptor` itself, if it is on the root's device; a subvolume below cannot lead back to that device."""
        try:
            if os.fstat(descriptor).st_dev != self._dev:
                raise UnsafePathError(PathKind.CROSSES_MOUNT, path, cause_errno=errno.EXDEV)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
