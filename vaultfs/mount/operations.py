"""The kernel's requests, translated; and the one guard around all of them.

Nothing is decided here: each handler finds the inodes that the request names and calls `Tree`, `Files` or the core.
`guarded` is what keeps the mount alive (contract.md, promise 10): an error of the family, or of a system call, becomes
the errno that the table gives for it; anything else is EIO for this one request and a traceback in the log. An
exception that left a handler would end the mount.

A request of another kind than the ones that a path walk makes ends the redirect that its thread was given, see
`vaultfs.mount.redirect`.

Source: pyfuse3's `Operations` (the meaning of each handler), fuse(4).
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import FUSEError

from vaultfs.errors import LookAgainError, ReservedNameError, VaultError, errno_of, printable
from vaultfs.mount.attribute_changes import AttributeChanges
from vaultfs.mount.context import MountContext, in_thread
from vaultfs.mount.files import Files
from vaultfs.mount.hints import Hints
from vaultfs.mount.inodes import GHOST_NUMBER, Directory, Link
from vaultfs.mount.renames import Renames
from vaultfs.mount.tree import DirectoryListing, Tree
from vaultfs.mount.xattrs import ExtendedAttributes

__all__ = ["HANDLERS", "Operations", "guarded"]

log = logging.getLogger(__name__)
requests = logging.getLogger("vaultfs.requests")  # every request, with -o debug

_P = ParamSpec("_P")
_R = TypeVar("_R")

# An errno of these in an OSError means a fault of ours, not an answer of the file system below.
_FAULTS = frozenset({errno.EBADF, errno.EFAULT})


def guarded(handler: Callable[_P, Coroutine[Any, Any, _R]]) -> Callable[_P, Coroutine[Any, Any, _R]]:
    """Turn whatever `handler` raises into the FUSEError of the one table; see the module's docstring."""

    @functools.wraps(handler)
    async def guard(*arguments: _P.args, **keywords: _P.kwargs) -> _R:
        try:
            result = await handler(*arguments, **keywords)
        except FUSEError as error:
            failure, cause = error, error.__cause__
        except VaultError as error:
            failure, cause = FUSEError(errno_of(error)), error
        except OSError as error:
            if error.errno is None or error.errno in _FAULTS:
                log.exception("%s failed", handler.__name__)
                failure, cause = FUSEError(errno.EIO), error
            else:
                failure, cause = FUSEError(error.errno), error
        except Exception as error:
            log.exception("%s failed", handler.__name__)
            failure, cause = FUSEError(errno.EIO), error
        else:
            if requests.isEnabledFor(logging.DEBUG):
                _log_request(handler.__name__, arguments, "")
            return result
        if requests.isEnabledFor(logging.DEBUG):
            _log_request(
                handler.__name__, arguments, f" -> {errno.errorcode.get(failure.errno, failure.errno)} ({cause})"
            )
        raise failure from cause

    return guard


def _log_request(handler: str, arguments: tuple[Any, ...], result: str) -> None:
    """One line for one request: names, numbers and the caller's thread, never content."""
    words = []
    for argument in arguments[1:]:
        if isinstance(argument, pyfuse3.RequestContext):
            words.append(f"thread={argument.pid}")
        elif isinstance(argument, bytes) and handler not in ("write", "setxattr"):
            words.append(printable(argument))
        elif isinstance(argument, int):
            words.append(str(argument))
        elif isinstance(argument, bytes):
            words.append(f"{len(argument)} bytes")
    requests.debug("%s(%s)%s", handler, ", ".join(words), result)


class Operations(pyfuse3.Operations):
    """pyfuse3's view of one mount."""

    enable_writeback_cache = False
    enable_acl = False
    supports_dot_lookup = False

    def __init__(
        self,
        context: MountContext,
        tree: Tree,
        renames: Renames,
        files: Files,
        changes: AttributeChanges,
        xattrs: ExtendedAttributes,
    ) -> None:
        super().__init__()
        self._context = context
        self._tree = tree
        self._renames = renames
        self._files = files
        self._changes = changes
        self._xattrs = xattrs
        self._inodes = context.inodes
        self._hints = Hints(context)
        self._listings: dict[int, DirectoryListing] = {}
        self._numbers = itertools.count(1)

    def _other_request(self, thread: int) -> None:
        """A request that no path walk makes: whatever `thread` was told to look for, it has given up."""
        self._files.arrived(thread)

    def _begin_change(self, thread: int) -> None:
        """What every request that changes a name begins with."""
        self._other_request(thread)
        if self._context.options.ro:
            raise FUSEError(errno.EROFS)
        if self._hints.is_companion(thread):
            raise FUSEError(errno.EPERM)

    # --- names --------------------------------------------------------------------------------------------------

    @guarded
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        parent = self._directory(parent_inode)
        try:
            found = self._tree.lookup(parent, name, ctx.pid)
        except FileNotFoundError:
            if self._hints.is_companion(ctx.pid):
                return self._hints.missing(parent, name)
            raise
        if found.st_ino == 0 and self._hints.is_companion(ctx.pid):
            return self._hints.missing(parent, name)
        return found

    def _directory(self, number: int) -> Directory:
        inode = self._inodes[number]
        if isinstance(inode, Directory):
            return inode
        if isinstance(inode, Link):  # something is mounted there
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        try:
            for number, lookups in inode_list:
                self._inodes.forget(number, lookups)
        except Exception:  # FORGET has no answer, so there is nobody to tell; the log has it
            log.exception("forget failed")

    @guarded
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        self._begin_change(ctx.pid)
        return await self._tree.make_directory(
            self._directory(parent_inode), name, mode & 0o7777, ctx.uid, ctx.gid, ctx.pid
        )

    @guarded
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._begin_change(ctx.pid)
        self._tree.remove_directory(self._directory(parent_inode), name)

    @guarded
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        parent = self._directory(parent_inode)
        if self._hints.is_companion(ctx.pid):
            self._hints.unlink(parent, name)
            return
        self._begin_change(ctx.pid)
        await self._tree.unlink(parent, name, ctx.pid)

    @guarded
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        self._begin_change(ctx.pid)
        await self._renames.rename(
            self._directory(parent_inode_old), name_old, self._directory(parent_inode_new), name_new, flags, ctx.pid
        )

    @guarded
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        self._begin_change(ctx.pid)
        return self._tree.make_link(self._directory(parent_inode), name, target, ctx.uid, ctx.gid)

    @guarded
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        link = self._inodes[inode]
        if not isinstance(link, Link):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self._tree.read_link(link)

    @guarded
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        raise FUSEError(errno.EPERM)  # a vault has no hard links: contract.md

    @guarded
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        self._begin_change(ctx.pid)
        parent = self._directory(parent_inode)
        if self._context.policy.is_machinery(parent.path_of(name)):
            raise ReservedNameError(path=parent.path_of(name))
        if mode & 0o170000 not in (0, 0o100000):
            raise FUSEError(errno.EPERM)
        return await self._files.make_node(parent, name, mode, ctx)

    # --- files --------------------------------------------------------------------------------------------------

    @guarded
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return await self._files.open(self._inodes[inode], flags, ctx.pid)

    @guarded
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        self._begin_change(ctx.pid)
        parent = self._directory(parent_inode)
        try:
            return await self._files.create(parent, name, mode, flags, ctx)
        except LookAgainError:
            # The name appeared between the kernel's lookup and now: the walk that follows finds it, and this
            # thread's open arrives there like any other.
            raise FUSEError(errno.ESTALE) from None

    @guarded
    async def read(self, fh: int, off: int, size: int) -> bytes:
        return await self._files.read(fh, off, size)

    @guarded
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return await self._files.write(fh, off, buf)

    @guarded
    async def flush(self, fh: int) -> None:
        await self._files.flush(fh)

    @guarded
    async def release(self, fh: int) -> None:
        await self._files.release(fh)

    @guarded
    async def fsync(self, fh: int, datasync: bool) -> None:
        await self._files.fsync(fh)

    # --- attributes -----------------------------------------------------------------------------------------------

    @guarded
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        if inode == GHOST_NUMBER:
            return self._hints.ghost()
        return self._tree.attributes(self._inodes[inode])

    @guarded
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        if self._hints.is_companion(ctx.pid):  # a chmod to the same mode: only watchers shall hear of it
            return await self.getattr(inode, ctx)
        return await self._changes.set_attributes(self._inodes[inode], attr, fields, fh, ctx.pid)

    @guarded
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        return self._xattrs.get_xattr(self._inodes[inode], name)

    @guarded
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._xattrs.set_xattr(self._inodes[inode], name, value)

    @guarded
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        return self._xattrs.list_xattrs(self._inodes[inode])

    @guarded
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._xattrs.remove_xattr(self._inodes[inode], name)

    @guarded
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        below = self._context.root.statvfs()
        told = pyfuse3.StatvfsData()
        told.f_bsize = below.f_bsize
        told.f_frsize = below.f_frsize
        told.f_blocks = below.f_blocks
        told.f_bfree = below.f_bfree
        told.f_bavail = below.f_bavail
        told.f_files = below.f_files
        told.f_ffree = below.f_ffree
        told.f_favail = below.f_favail
        told.f_namemax = below.f_namemax
        return told

    # --- directories ----------------------------------------------------------------------------------------------

    @guarded
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        self._other_request(ctx.pid)
        directory = self._directory(inode)
        number = next(self._numbers)
        self._listings[number] = DirectoryListing(directory)
        return number

    @guarded
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        for position, name, inode, attributes in self._tree.entries(self._listings[fh], start_id):
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(name), attributes, position):
                break
            if inode is not None:
                inode.lookups += 1

    @guarded
    async def releasedir(self, fh: int) -> None:
        del self._listings[fh]

    @guarded
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        descriptor = self._context.root.open_directory(self._listings[fh].directory.path())
        try:
            await in_thread(os.fsync, descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):  # file systems that cannot sync a directory
                raise
        finally:
            os.close(descriptor)


HANDLERS: tuple[str, ...] = tuple(
    name for name, member in vars(Operations).items() if hasattr(member, "__wrapped__") and not name.startswith("_")
)
"""The names of all guarded handlers."""


def _check_guarded(kind: type[Any]) -> None:
    """Every handler of `kind` that pyfuse3 may await is guarded: forgotten once, it would end the mount one day."""
    for name, member in vars(kind).items():
        is_handler = callable(member) and name in vars(pyfuse3.Operations) and not name.startswith("_")
        if is_handler and name != "forget" and not hasattr(member, "__wrapped__"):
            raise TypeError(f"the handler {name} is not guarded")


_check_guarded(Operations)
