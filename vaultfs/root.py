"""VaultRoot: everything beneath one directory descriptor, and the safe-path check.

Calling sequence::

    with VaultRoot.open("/home/ada/Notes") as root:
        path = root.relative("daily/../daily/today.md")    # what a person or a program wrote → b"daily/today.md"
        root.check(path, expected_type="file")             # or the reason why it is not safe, as a kind
        with root.parent(path) as (directory, name):       # for any *at call that has no method here
            os.utime(name, dir_fd=directory, follow_symlinks=False)
        descriptor = root.open_file(path, os.O_RDONLY)     # the caller closes it

What holds for every operation:

- The vault is the directory that was opened, not its path: each call starts at the root's descriptor. No directory
  descriptor is kept between calls, since it might have been moved out of the vault meanwhile.
- No link is followed, no mount is crossed, nothing leaves the vault. The kernel checks that while it walks
  (`resolvers`), not before, so a directory that is exchanged for a link wins no race. What breaks one of these
  rules raises `UnsafePathError` with its kind and component.
- What is merely absent or of another type is the ``OSError`` of the system call (FileNotFoundError,
  NotADirectoryError, FileExistsError, …), for components on the way as well as for the last one.
- Paths are bytes, relative to the root, without leading slash; ``b""`` is the root itself. They may be longer than
  PATH_MAX and hold any bytes but NUL and ``/``. Components ``.``, ``..`` and empty ones are refused: `relative`
  makes clean paths of what users write.

What is *not* promised: a directory that somebody moves out of the vault *during* a call may still receive that one
change. `assert_reachable` tells afterwards.

A VaultRoot has no state but its descriptor; threads may share it. Its owner closes it, once, when nobody uses it.
"""

from __future__ import annotations

import errno
import os
import stat
from types import TracebackType
from typing import Literal, Self

from vaultfs import kernel
from vaultfs.errors import PathKind, UnsafePathError, VaultGoneError
from vaultfs.paths import relative_path, require_clean
from vaultfs.resolvers import Bounds, KernelResolver, Resolver, WalkResolver, mount_id, refuse_irregular
from vaultfs.safe_path import PathCheck, check_path

__all__ = ["PathCheck", "VaultRoot"]

# File systems on which every directory of one mount has the mount's own st_dev, so that nobody needs to look.
# Anything not listed (btrfs with its subvolumes, what is yet to come) is looked at, at one fstat a call.
_SINGLE_DEVICE = frozenset(
    (b"ext2", b"ext3", b"ext4", b"xfs", b"tmpfs", b"f2fs", b"vfat", b"exfat", b"ntfs3", b"overlay", b"fuseblk")
)
_REMOVE_ATTEMPTS = 16  # of one directory that somebody keeps filling while it is removed


class _Parent:
    """The context manager of `VaultRoot.parent`; resolves on entering, closes on leaving."""

    __slots__ = ("_descriptor", "_path", "_root")

    def __init__(self, root: VaultRoot, path: bytes) -> None:
        self._root = root
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> tuple[int, bytes]:
        found = self._root._enter(self._path)
        self._descriptor = found[0]
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _leave(self._path, self._descriptor)


def _leave(path: bytes, descriptor: int) -> None:
    """Close what `VaultRoot._enter` opened for `path`; at the top level it is the root's own, which stays."""
    if b"/" in path:
        os.close(descriptor)


class VaultRoot:
    """See the module's docstring. `path` is absolute and real; `dev`, `ino` and `mount_id` are the root's.

    `covered` is set by whoever mounts a file system over the vault's own path: from then on `path` names that
    file system and is not looked at any more.
    """

    __slots__ = ("_resolver", "covered", "dev", "fd", "ino", "mount_id", "name_max", "path", "resolver")

    def __init__(self, fd: int, path: bytes, resolver: Literal["auto", "openat2", "walk"]) -> None:
        """For `open` only, which hands over `fd` and closes it should this raise."""
        found = os.fstat(fd)
        self.fd = fd
        self.path = path
        self.dev = found.st_dev
        self.ino = found.st_ino
        self.mount_id = mount_id(fd)
        self.covered = False
        self.name_max = os.fstatvfs(fd).f_namemax
        self.resolver: Literal["openat2", "walk"]
        bounds = Bounds(fd, self.dev, self.mount_id, _type_of_mount(self.mount_id) in _SINGLE_DEVICE)
        self._resolver: Resolver
        if resolver == "openat2" or (resolver == "auto" and KernelResolver.works(fd)):
            self.resolver, self._resolver = "openat2", KernelResolver(bounds)
        else:
            self.resolver, self._resolver = "walk", WalkResolver(bounds)

    @classmethod
    def open(
        cls, path: str | bytes | os.PathLike[str], *, resolver: Literal["auto", "openat2", "walk"] = "auto"
    ) -> VaultRoot:
        """Open the vault directory `path`, which is itself no link (its ancestors may be).

        Raises UnsafePathError with the kinds root-empty, root-missing, root-link, root-not-directory and
        root-unresolvable (its `cause_errno` says why), PermissionError for a directory that may not be read.
        """
        name = os.fsencode(path)
        if not name:
            raise UnsafePathError(PathKind.ROOT_EMPTY, name, label="vault")
        if b"\0" in name:
            raise UnsafePathError(PathKind.ROOT_UNRESOLVABLE, name, label="vault", cause_errno=errno.EINVAL)
        name = name.rstrip(b"/") or b"/"  # O_NOFOLLOW does follow a link with a slash behind it
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except PermissionError:
            raise
        except OSError as error:
            kind = _why_no_root(name, error)
            raise UnsafePathError(kind, name, label="vault", cause_errno=error.errno or 0) from error
        try:
            real = os.readlink(b"/proc/self/fd/%d" % fd)
            if not real.startswith(b"/"):  # "(unreachable)/…": outside of this process' chroot
                raise UnsafePathError(PathKind.ROOT_UNRESOLVABLE, name, label="vault")
            return cls(fd, real, resolver)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Let go of the vault. Harmless when repeated; every other call afterwards is EBADF."""
        fd, self.fd = self.fd, -1
        self._resolver = WalkResolver(Bounds(-1, self.dev, self.mount_id, True))  # the number may soon be another file
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<VaultRoot {self.path!r} by {self.resolver}>"

    # -- is it still the vault? ----------------------------------------------------------------------------------

    def assert_bound(self) -> None:
        """Raise VaultGoneError unless `path` is still the path of the directory that we hold.

        The kernel knows where our directory is (the link in /proc needs no walk, so a hung disk above the vault
        cannot hold us up here); that no other directory was mounted over it, an lstat tells.
        """
        try:
            real = os.readlink(b"/proc/self/fd/%d" % self.fd)
            if real != self.path:
                raise VaultGoneError(
                    f"The vault directory was moved or removed; it is now {os.fsdecode(real)!r}.", path=self.path
                )
            if self.covered:
                return
            found = os.lstat(self.path)
        except OSError as error:
            raise VaultGoneError(path=self.path) from error
        if found.st_ino != self.ino or found.st_dev != self.dev:
            raise VaultGoneError("Something else stands at the vault's path.", path=self.path)

    def assert_reachable(self, path: bytes, directory: int) -> None:
        """Raise UnsafePathError (component-redirected) unless `directory` is what the parent of `path` is now.

        For use after a change that was made through a descriptor of `parent`: if the directory was moved away
        meanwhile, the change went with it.
        """
        parent = path.rpartition(b"/")[0]
        try:
            now = self.stat(parent)
        except FileNotFoundError as error:
            raise UnsafePathError(PathKind.COMPONENT_REDIRECTED, parent, cause_errno=errno.ENOENT) from error
        if not os.path.samestat(now, os.fstat(directory)):
            raise UnsafePathError(PathKind.COMPONENT_REDIRECTED, parent)

    # -- paths ---------------------------------------------------------------------------------------------------

    def relative(
        self, path: str | bytes | os.PathLike[str], *, label: str = "path", code: str = "unsafe-path"
    ) -> bytes:
        """What a user wrote, as a clean vault-relative path: ``.``, ``..`` and doubled slashes are worked out.

        An absolute path is taken if it is below `self.path` as written. Working out ``..`` by the text alone
        means the same as walking it, since no component may be a link. A trailing slash is dropped.

        Raises UnsafePathError: empty, invalid (NUL, not encodable), escapes, name-too-long.
        """
        return relative_path(path, self.path, self.name_max, label=label, code=code)

    def parent(self, path: bytes) -> _Parent:
        """A context manager that gives (descriptor of the directory, last name) of `path`.

        The descriptor is O_PATH: it serves ``*at`` calls (``dir_fd=``), not fsync or listing, and is closed on
        leaving. For a path without slash it is the root's own, and nothing is opened.

        Entering raises UnsafePathError, or OSError if the directory is not there.
        """
        return _Parent(self, path)

    def _enter(self, path: bytes) -> tuple[int, bytes]:
        """`parent` without the context manager: whoever calls this calls `_leave` in a ``finally``."""
        require_clean(path)
        directory, slash, name = path.rpartition(b"/")
        if slash:
            return self._resolver.descend(directory), name
        return self.fd, name

    # -- looking -------------------------------------------------------------------------------------------------

    def stat(self, path: bytes) -> os.stat_result:
        """lstat: what stands at `path`, a link included. Raises UnsafePathError, OSError."""
        if not path:
            return os.fstat(self.fd)
        require_clean(path)
        descriptor = self._resolver.reach(path)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if found.st_dev != self.dev and stat.S_ISDIR(found.st_mode):
            raise UnsafePathError(PathKind.CROSSES_MOUNT, path, cause_errno=errno.EXDEV)
        return found

    def exists(self, path: bytes) -> bool:
        """True if anything stands at `path`, be it a dangling link. Raises as `stat`, but not for absence."""
        try:
            self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def readlink(self, path: bytes) -> bytes:
        """The text of the link `path`. Raises UnsafePathError, OSError (EINVAL: no link)."""
        parent, name = self._enter(path)
        try:
            return os.readlink(name, dir_fd=parent)
        finally:
            _leave(path, parent)

    def open_directory(self, path: bytes) -> int:
        """A readable descriptor of the directory `path`: to list it, to fsync it. The caller closes it.

        Raises UnsafePathError, OSError.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if not path:
            return os.open(b".", flags, dir_fd=self.fd)  # one of its own: the root's has one position for all threads
        require_clean(path)
        descriptor = self._resolver.open(path, flags, 0, False)
        try:
            if os.fstat(descriptor).st_dev != self.dev:
                raise UnsafePathError(PathKind.CROSSES_MOUNT, path, cause_errno=errno.EXDEV)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def scandir(self, path: bytes) -> list[tuple[bytes, os.stat_result]]:
        """Names and lstats of the directory `path`, unordered; what vanishes meanwhile is left out.

        A mount point is listed with what is mounted there; any use of it is refused. Raises UnsafePathError, OSError.
        """
        found: list[tuple[bytes, os.stat_result]] = []
        descriptor = self.open_directory(path)
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    try:
                        found.append((os.fsencode(entry.name), entry.stat(follow_symlinks=False)))
                    except FileNotFoundError:
                        continue  # removed since the directory was read: as if it had been removed before
        finally:
            os.close(descriptor)
        return found

    def listdir(self, path: bytes) -> list[bytes]:
        """The names in the directory `path`, unordered. Raises UnsafePathError, OSError."""
        descriptor = self.open_directory(path)
        try:
            return [os.fsencode(name) for name in os.listdir(descriptor)]
        finally:
            os.close(descriptor)

    def statvfs(self) -> os.statvfs_result:
        """Size and free space of the vault's file system."""
        return os.fstatvfs(self.fd)

    # -- files ---------------------------------------------------------------------------------------------------

    def open_file(self, path: bytes, flags: int, mode: int = 0, *, regular: bool = True) -> int:
        """Open the file `path` (open(2) `flags`, and `mode` less the umask for O_CREAT); the caller closes it.

        With `regular` anything but a regular file is refused, without waiting for a FIFO; O_NONBLOCK, which means
        nothing on a regular file, may then be set on the descriptor. Always close-on-exec.

        Raises UnsafePathError (component-link for a link, unsupported-type), IsADirectoryError, OSError.
        """
        return self.open_with_stat(path, flags, mode, regular=regular)[0]

    def open_with_stat(
        self, path: bytes, flags: int, mode: int = 0, *, regular: bool = True
    ) -> tuple[int, os.stat_result]:
        """`open_file`, and the fstat that it made anyway."""
        require_clean(path)
        descriptor = self._resolver.open(path, flags, mode, regular)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                if regular:
                    refuse_irregular(found.st_mode, path)
                if found.st_dev != self.dev and stat.S_ISDIR(found.st_mode):
                    raise UnsafePathError(PathKind.CROSSES_MOUNT, path, cause_errno=errno.EXDEV)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, found

    # -- changes -------------------------------------------------------------------------------------------------

    def mkdir(self, path: bytes, mode: int = 0o777, *, recursive: bool = False, exclusive: bool = True) -> list[bytes]:
        """Make the directory `path`, with `recursive` also those above it, each with `mode` less the umask.

        Returns those that were really made, the topmost first. If `path` is there already: with `exclusive`
        FileExistsError, else nothing is made if it is a directory.

        Raises UnsafePathError, whose `created` is the last directory made before the error: the only one that
        the caller may clean up; OSError (FileNotFoundError: the parent is missing and `recursive` was not said).
        """
        made: list[bytes] = []
        wanted = [path]
        patience = 2 * path.count(b"/") + _REMOVE_ATTEMPTS  # somebody may remove what we make, but not for ever
        try:
            while wanted:
                try:
                    self._make_directory(wanted[-1], mode)
                    made.append(wanted.pop())
                except FileNotFoundError:
                    above = wanted[-1].rpartition(b"/")[0]
                    patience -= 1
                    if not recursive or not above or not patience:
                        raise
                    wanted.append(above)
                except FileExistsError:
                    if len(wanted) == 1:
                        if exclusive:
                            raise
                        self._require_directory(path)
                    wanted.pop()  # one on the way that is no directory fails at the next step down
        except UnsafePathError as error:
            error.created = made[-1] if made else None
            raise
        return made

    def _make_directory(self, path: bytes, mode: int) -> None:
        parent, name = self._enter(path)
        try:
            os.mkdir(name, mode, dir_fd=parent)
        finally:
            _leave(path, parent)

    def _require_directory(self, path: bytes) -> None:
        mode = self.stat(path).st_mode
        if stat.S_ISLNK(mode):
            raise UnsafePathError(PathKind.COMPONENT_LINK, path, cause_errno=errno.ELOOP)
        if not stat.S_ISDIR(mode):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def rename(self, old: bytes, new: bytes, flags: int = 0) -> None:
        """rename(2), or renameat2(2) with `kernel.RENAME_NOREPLACE` or `kernel.RENAME_EXCHANGE`.

        A link is itself renamed, or replaced. Raises UnsafePathError, OSError.
        """
        old_parent, old_name = self._enter(old)
        try:
            same = old.rpartition(b"/")[0] == new.rpartition(b"/")[0]
            if same:
                require_clean(new)
                new_parent, new_name = old_parent, new.rpartition(b"/")[2]
            else:
                new_parent, new_name = self._enter(new)
            try:
                if flags:
                    kernel.renameat2(old_parent, old_name, new_parent, new_name, flags)
                else:
                    os.rename(old_name, new_name, src_dir_fd=old_parent, dst_dir_fd=new_parent)
            finally:
                if not same:
                    _leave(new, new_parent)
        finally:
            _leave(old, old_parent)

    def unlink(self, path: bytes, missing_ok: bool = False) -> bool:
        """Remove the file or link `path`; True if it did. With `missing_ok`, False if it was not there.

        Raises UnsafePathError, OSError (IsADirectoryError: a directory).
        """
        try:
            parent, name = self._enter(path)
            try:
                os.unlink(name, dir_fd=parent)
            finally:
                _leave(path, parent)
        except FileNotFoundError:
            if missing_ok:
                return False
            raise
        return True

    def rmdir(self, path: bytes, missing_ok: bool = False) -> bool:
        """Remove the empty directory `path`; True if it did. With `missing_ok`, False if it was not there.

        Raises UnsafePathError, OSError (ENOTEMPTY; EBUSY: something is mounted there).
        """
        try:
            parent, name = self._enter(path)
            try:
                os.rmdir(name, dir_fd=parent)
            finally:
                _leave(path, parent)
        except FileNotFoundError:
            if missing_ok:
                return False
            raise
        return True

    def symlink(self, target: bytes, path: bytes) -> None:
        """Make the link `path` with the text `target`, whatever that leads to. Raises UnsafePathError, OSError."""
        parent, name = self._enter(path)
        try:
            os.symlink(target, name, dir_fd=parent)
        finally:
            _leave(path, parent)

    def remove_tree(self, path: bytes) -> None:
        """Remove `path` and, if it is a directory, everything in it; links are removed, not followed.

        Every directory is reached from the root anew, so any depth will do with one descriptor at a time. What
        appears meanwhile is removed too, for a bounded number of looks. Stops at the first error, and removes
        nothing that is mounted.

        Raises FileNotFoundError if `path` is not there, UnsafePathError, OSError.
        """
        if not stat.S_ISDIR(self.stat(path).st_mode):
            self.unlink(path)
            return
        require_clean(path)
        pending = [(path, _REMOVE_ATTEMPTS)]
        while pending:
            directory, attempts = pending.pop()
            below = self._remove_files(directory)
            if not below:
                try:
                    self.rmdir(directory, missing_ok=True)
                    continue
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
            if attempts <= 0:
                raise OSError(errno.ENOTEMPTY, "somebody keeps filling it while it is removed", directory)
            pending.append((directory, attempts - 1))
            pending.extend((child, _REMOVE_ATTEMPTS) for child in below)

    def _remove_files(self, directory: bytes) -> list[bytes]:
        """Remove all that is no directory from `directory`; returns the directories left in it."""
        below: list[bytes] = []
        try:
            descriptor = self.open_directory(directory)
        except FileNotFoundError:
            return below  # somebody else removed it; the rmdir that follows says so where it matters
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    name = os.fsencode(entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        below.append(directory + b"/" + name)
                        continue
                    try:
                        os.unlink(name, dir_fd=descriptor)
                    except FileNotFoundError:
                        continue  # removed by somebody else: what we wanted
                    except IsADirectoryError:
                        below.append(directory + b"/" + name)  # became one since the directory was read
        finally:
            os.close(descriptor)
        return below

    def sync_directory(self, path: bytes) -> None:
        """fsync the directory `path`: names made, renamed and removed in it are on disk. Raises as `open_directory`."""
        if not path:
            os.fsync(self.fd)
            return
        descriptor = self.open_directory(path)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    # -- the check -----------------------------------------------------------------------------------------------

    def check(
        self,
        path: str | bytes | os.PathLike[str],
        *,
        expected_type: Literal["any", "file", "directory"] = "any",
        allow_missing: bool = True,
        must_not_exist: bool = False,
        hardlinks: Literal["refuse", "allow"] = "refuse",
        label: str = "path",
        code: str = "unsafe-path",
    ) -> PathCheck:
        """Is `path` (anything that `relative` takes) a safe place for a file or directory? What is there now?

        It is an answer to people and for early refusals; it guards nothing by itself, since things may change
        the moment after. Every operation of this class keeps the same rules again, at the moment of use.

        expected_type: what has to stand there, if anything does. allow_missing: the last components may be
        absent. must_not_exist: nothing may stand there. hardlinks: whether a file with several names is refused.
        label, code: the caller's words for the error.

        Raises UnsafePathError, its `kind` any but the root-* ones, its `component` the first that is at fault,
        its `cause_errno` that of the system call. Other errors (EACCES, EIO, …) stay OSError.
        """
        return check_path(
            self,
            path,
            expected_type=expected_type,
            allow_missing=allow_missing,
            must_not_exist=must_not_exist,
            hardlinks=hardlinks,
            label=label,
            code=code,
        )


def _why_no_root(path: bytes, error: OSError) -> PathKind:
    """Which of the root's kinds it is that opening `path` as a directory failed with `error`."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return PathKind.ROOT_MISSING
    except OSError:
        return PathKind.ROOT_UNRESOLVABLE  # a loop of links above, a name too long, a dead server: errno says it
    if stat.S_ISLNK(mode):
        return PathKind.ROOT_LINK
    if not stat.S_ISDIR(mode):
        return PathKind.ROOT_NOT_DIRECTORY
    return PathKind.ROOT_UNRESOLVABLE


def _type_of_mount(number: int) -> bytes | None:
    """The file system type of the mount with this id, from /proc/self/mountinfo (proc(5)); None if not found."""
    try:
        lines = open("/proc/self/mountinfo", "rb")
    except OSError:
        return None  # then every directory is looked at: slower by an fstat, no less safe
    with lines:
        for line in lines:
            if int(line.split(b" ", 1)[0]) == number:
                return line.rpartition(b" - ")[2].split(b" ", 1)[0]
    return None
