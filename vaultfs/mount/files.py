"""Regular files of the mount: opening, reading, writing and their attributes.

Who gets what by opening (versions-and-drafts.md, "How a writer gets the draft"):

===================  ==============================  =========================================================
arrives on           for reading                     for writing, or truncating
===================  ==============================  =========================================================
Version, current     that version                    look again: the lookup gives the right draft
Version, superseded  look again                      look again
Draft                that draft, while the name was  that draft
                     never published; otherwise
                     look again for the version
LiveFile             in place                        in place
===================  ==============================  =========================================================

Whoever comes back to the same inode without a lookup came from ``/proc/self/fd/N`` or O_PATH: writers of a Version
are refused (they cannot be given another inode), readers and joiners of a draft are let in.

Attributes set by path apply to the version and to all drafts of the name; set on a draft (by descriptor) they are
published with it, and if it has nothing to publish they apply to the version at once.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
from functools import partial

import pyfuse3
import trio

from vaultfs.errors import (
    CallerUnknownError,
    HardLinkedError,
    LookAgainError,
    PublishError,
    VaultGoneError,
    printable,
)
from vaultfs.identity import FileIdentity
from vaultfs.mount import procs
from vaultfs.mount.context import MountContext, in_thread
from vaultfs.mount.inodes import Directory, Draft, Handle, Inode, LiveFile, Name, Opener, Version
from vaultfs.mount.names import SQLITE_HEADER, is_database
from vaultfs.mount.saves import Saves
from vaultfs.mount.tree import Tree
from vaultfs.publish import publish_new

__all__ = ["Files"]

LEASE_LIMIT = 60.0  # seconds; /proc/sys/fs/lease-break-time is 45
LEASE_PAUSE = 0.05

log = logging.getLogger(__name__)

_OUR_XATTRS = b"user.vaultfs."
_ACL_XATTRS = (b"system.posix_acl_access", b"system.posix_acl_default")


def _writes(flags: int) -> bool:
    return (flags & os.O_ACCMODE) != os.O_RDONLY or bool(flags & os.O_TRUNC)


class Files:
    """All operations on regular files of one mount, and on the attributes of everything."""

    def __init__(self, context: MountContext, saves: Saves, tree: Tree) -> None:
        self._context = context
        self._saves = saves
        self._tree = tree
        self._handles: dict[int, Handle] = {}
        self._numbers = itertools.count(1)

    # --- opening ------------------------------------------------------------------------------------------------

    async def open(self, inode: Inode, flags: int, thread: int) -> pyfuse3.FileInfo:
        """Open `inode`; what the open has to wait for below holds up nobody else.

        Somebody may hold a lease on the file (fcntl(2), F_SETLEASE; Samba does). Our open without waiting has asked the
        holder to give it up, and is repeated until that is done or the kernel has taken it away.
        """
        deadline = trio.current_time() + LEASE_LIMIT
        while True:
            try:
                return await self._open(inode, flags, thread)
            except BlockingIOError:
                if trio.current_time() > deadline:
                    raise
                await trio.sleep(LEASE_PAUSE)

    async def _open(self, inode: Inode, flags: int, thread: int) -> pyfuse3.FileInfo:
        if isinstance(inode, Version):
            return self._open_version(inode, flags, thread)
        if isinstance(inode, Draft):
            return await self._open_draft(inode, flags, thread)
        if isinstance(inode, LiveFile):
            return self._open_live(inode, flags)
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))

    def look_again(self, thread: int, source: Inode, *, writing: bool, truncating: bool = False) -> LookAgainError:
        """Note what `thread` wants, and make the error that sends it to look for it."""
        former = self._context.redirects.begin(thread, source, writing=writing, truncating=truncating)
        if former is not None:
            self._saves.end_if_unused(former)
        self._context.counters["redirects"] += 1
        return LookAgainError()

    def arrived(self, thread: int) -> None:
        """`thread` got what it was looking for."""
        former = self._context.redirects.end(thread)
        if former is not None:
            self._saves.end_if_unused(former)

    def _open_version(self, version: Version, flags: int, thread: int) -> pyfuse3.FileInfo:
        redirects = self._context.redirects
        if _writes(flags):
            self.assert_may_write(version, thread)
            self._serve_in_place_if_huge(version, flags)
            raise self.look_again(thread, version, writing=True, truncating=bool(flags & os.O_TRUNC))
        if version.stat.st_nlink > 1 and self._context.options.hardlinks == "refuse":
            raise HardLinkedError(path=version.name.path())
        pending = redirects.get(thread)
        second = pending is not None and not pending.writing
        if not (second and version.descriptor is not None):
            if not self._is_current(version):
                raise self.look_again(thread, version, writing=False)
            try:
                version.open_content(self._context.root)
            except LookAgainError:
                raise self.look_again(thread, version, writing=False) from None
        # The second time it is what the name held when this thread looked: the kernel looks again only once, so
        # a version that was superseded since then is given all the same. It was current after open(2) was called.
        descriptor = version.descriptor
        assert descriptor is not None
        if not version.checked_header:
            version.checked_header = True
            if version.is_current and not version.name.drafts and is_database(os.pread(descriptor, 16, 0)):
                # It is a database whatever its name: from now on it is served in place.
                self._context.inodes.live_at(version.name, version.stat)
                raise self.look_again(thread, version, writing=False)
        self.arrived(thread)
        handle = Handle(version, writes=False)
        version.handles += 1
        return self._register(handle, keep_cache=True)

    def _serve_in_place_if_huge(self, version: Version, flags: int) -> None:
        """`live-above`: an edit of such a file would copy it whole, where the file system cannot share extents."""
        if (
            version.identity.size > self._context.options.live_above
            and not flags & os.O_TRUNC
            and not self._saves.can_reflink
            and not version.name.drafts
            and version.is_current
        ):
            self._context.inodes.live_at(version.name, version.stat)

    def _is_current(self, version: Version) -> bool:
        """True if the vault's name still holds exactly this version: a new open sees an outside change at once."""
        if not version.is_current:
            return False
        try:
            status = self._context.root.stat(version.name.path())
        except FileNotFoundError:
            return False
        return version.identity.unchanged(FileIdentity.from_stat(status))

    def assert_may_write(self, version: Version, thread: int) -> None:
        """Raises what opening `version` for writing shall fail with, here rather than at close."""
        context = self._context
        path = version.name.path() if version.name.linked else None
        if context.options.ro:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        if context.read_only_reason is not None:
            raise VaultGoneError(context.read_only_reason)
        if thread == 0:
            log.info("%s: refused to a writer in another pid namespace", printable(path or b"?"))
            raise CallerUnknownError(path=path)
        if version.stat.st_nlink > 1 and version.is_current and context.options.hardlinks != "break":
            raise HardLinkedError(path=path)
        if context.redirects.came_back_unlooked(thread, version, writing=True):
            self.arrived(thread)
            log.info("%s: refused to a writer that reopens by descriptor", printable(path or b"?"))
            raise CallerUnknownError(path=path)
        if path is not None and version.is_current:
            self._assert_publishable(path)

    def _assert_publishable(self, path: bytes) -> None:
        """A publish needs to make and remove names in the file's directory: fail at open, not at close."""
        if os.geteuid() == 0:
            return
        with self._context.root.parent(path) as (directory, _):
            if not os.access(b".", os.W_OK | os.X_OK, dir_fd=directory):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    async def _open_draft(self, draft: Draft, flags: int, thread: int) -> pyfuse3.FileInfo:
        redirects = self._context.redirects
        name = draft.name
        pending = redirects.get(thread)
        truncating = bool(flags & os.O_TRUNC)
        walked = redirects.was_given(thread, draft)
        if not _writes(flags):
            published = name is not None and (name.version is not None or name.live is not None)
            if walked and published:
                raise self.look_again(thread, draft, writing=False)
            self.arrived(thread)
            handle = Handle(draft, writes=False)
            draft.handles.add(handle)
            return self._register(handle, keep_cache=True)
        if thread == 0:
            raise CallerUnknownError()
        if self._context.options.ro:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        promised = pending is not None and pending.draft is draft
        unlooked = redirects.came_back_unlooked(thread, draft, writing=True)
        if name is not None and draft not in name.drafts:
            raise self.look_again(thread, draft, writing=True, truncating=truncating)
        if truncating and draft.size > 0 and draft.kind == "new" and not promised and not unlooked:
            # Whole-file saves that overlap are each whole, also of a file that was never published.
            raise self.look_again(thread, draft, writing=True, truncating=True)
        opener = pending.opener if pending is not None and pending.opener is not None else self._saves.opener(thread)
        keep_cache = True
        looked_up = promised and draft.base is not None and draft.base.descriptor is not None
        if draft.kind == "edit" and not looked_up and not draft.handles and not draft.changed and draft.file is None:
            keep_cache = self.start_afresh(draft)
        if draft.base is not None:
            draft.base.open_content(self._context.root)
        if truncating and draft.kind == "replacement" and draft.file is None and not draft.published:
            await self._saves.prepare(draft, empty=True)
            draft.changed = True
        elif truncating and draft.size > 0:
            await self._saves.truncate(draft, 0)
        handle = Handle(draft, writes=True, append=bool(flags & os.O_APPEND))
        handle.syncing = bool(flags & os.O_DSYNC)
        handle.opener = opener
        draft.handles.add(handle)
        draft.interrupted = None
        self.arrived(thread)
        return self._register(handle, keep_cache=keep_cache)

    def start_afresh(self, draft: Draft) -> bool:
        """A clean draft that nobody has open starts from the newest version; False if its cached pages are stale."""
        name = draft.name
        if name is None or draft.base is name.version:
            return True
        self._context.inodes.rebase(draft, name.version)
        draft.size = name.version.identity.size if name.version is not None else 0
        draft.append_from = draft.size
        draft.diverged = False
        return False

    def _open_live(self, live: LiveFile, flags: int) -> pyfuse3.FileInfo:
        context = self._context
        path = live.name.path()
        writes = _writes(flags)
        if writes:
            context.assert_writable()
            if context.options.ro:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        wanted = (os.O_RDWR if writes else os.O_RDONLY) | os.O_NONBLOCK
        try:
            descriptor, status = context.root.open_with_stat(path, wanted | flags & os.O_DSYNC)
        except PermissionError:
            if not writes or (flags & os.O_ACCMODE) != os.O_WRONLY:
                raise
            descriptor, status = context.root.open_with_stat(path, os.O_WRONLY | os.O_NONBLOCK | flags & os.O_DSYNC)
        try:
            if live.identity != (status.st_dev, status.st_ino):
                raise LookAgainError("the file was replaced")
            if writes and status.st_nlink > 1:
                raise HardLinkedError(path=path)
            if flags & os.O_TRUNC:
                os.ftruncate(descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise
        handle = Handle(live, writes=writes, append=bool(flags & os.O_APPEND))
        handle.descriptor = descriptor
        live.handles.add(handle)
        return self._register(handle, keep_cache=True)

    def _register(self, handle: Handle, *, keep_cache: bool) -> pyfuse3.FileInfo:
        number = next(self._numbers)
        self._handles[number] = handle
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(number), keep_cache=keep_cache)

    # --- making files ---------------------------------------------------------------------------------------------

    async def create(
        self, parent: Directory, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        """Open a name that did not exist when the kernel looked (open(2) with O_CREAT)."""
        context = self._context
        path = parent.path_of(name)
        self._tree.assert_name_is_free(path)
        context.assert_writable()
        if context.options.ro:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        exclusive = bool(flags & os.O_EXCL)
        protocol = context.policy.is_protocol_file(parent.name, name)
        if protocol or context.policy.is_live(path):
            return self._create_live(parent, name, mode, flags, ctx)
        if ctx.pid == 0:
            raise CallerUnknownError(path=path)
        entry = context.inodes.name_at(parent, name)
        if context.root.exists(path):
            if exclusive:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            raise LookAgainError("somebody made it a moment ago")
        self._assert_publishable(path)
        status_above = context.root.stat(parent.path())
        opener = self._saves.opener(ctx.pid)
        claim: FileIdentity | None = None
        if exclusive:
            claim = await context.while_locked(
                lambda: (parent.path_of(name),),
                partial(self._make_claim, parent, name, mode, ctx, status_above, opener),
                saver=opener,
            )
        if entry.shown_draft is not None:
            if claim is None:
                raise LookAgainError("somebody made it a moment ago")
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if parent.children.get(name) is not entry:  # dropped while we waited for the lock
            entry = context.inodes.name_at(parent, name)
        entry.claim = claim
        draft = context.inodes.new_draft(entry, "new", None, opener)
        draft.umask = ctx.umask
        as_root = os.geteuid() == 0
        own_group = ctx.gid if as_root else os.getegid()
        group = status_above.st_gid if status_above.st_mode & stat.S_ISGID else own_group
        draft.take_metadata(stat.S_IMODE(mode), ctx.uid if as_root else os.geteuid(), group)
        draft.opened_by_dying = procs.is_dumping_core(ctx.pid)
        try:
            await self._saves.prepare(draft)
        except BaseException:
            self._saves.keep(draft, "")
            context.inodes.end_draft(draft)
            raise
        handle = Handle(draft, writes=_writes(flags), append=bool(flags & os.O_APPEND))
        handle.syncing = bool(flags & os.O_DSYNC)
        handle.opener = opener
        draft.handles.add(handle)
        draft.lookups += 1
        return self._register(handle, keep_cache=True), self._tree.entry(draft, None)

    def _make_claim(
        self,
        parent: Directory,
        name: bytes,
        mode: int,
        ctx: pyfuse3.RequestContext,
        above: os.stat_result,
        opener: Opener,
    ) -> FileIdentity:
        """The empty file by which O_EXCL claims a name in the vault; the path lock is held."""
        path = parent.path_of(name)
        entry = self._context.inodes.name_at(parent, name)
        if entry.shown_draft is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        context = self._context
        descriptor = context.root.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IMODE(mode))
        try:
            if os.geteuid() == 0:
                os.fchown(descriptor, ctx.uid, above.st_gid if above.st_mode & stat.S_ISGID else ctx.gid)
                os.fchmod(descriptor, stat.S_IMODE(mode))
            claim = FileIdentity.from_stat(os.fstat(descriptor))
        finally:
            os.close(descriptor)
        context.drafts.claim(path, claim, self._saves.writer(opener, ctx.uid))
        return claim

    def _create_live(
        self, parent: Directory, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        context = self._context
        path = parent.path_of(name)
        try:
            descriptor, status = context.root.open_with_stat(
                path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags & os.O_DSYNC, stat.S_IMODE(mode)
            )
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            raise LookAgainError("somebody made it a moment ago") from None
        if os.geteuid() == 0:
            above = context.root.stat(parent.path())
            os.fchown(descriptor, ctx.uid, above.st_gid if above.st_mode & stat.S_ISGID else ctx.gid)
            os.fchmod(descriptor, stat.S_IMODE(mode))
            status = os.fstat(descriptor)
        live = context.inodes.live_at(context.inodes.name_at(parent, name), status)
        live.lookups += 1
        handle = Handle(live, writes=_writes(flags), append=bool(flags & os.O_APPEND))
        handle.descriptor = descriptor
        live.handles.add(handle)
        return self._register(handle, keep_cache=True), self._tree.entry(live, status)

    async def make_node(
        self, parent: Directory, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """mknod(2) of a regular file: an empty file, published at once."""
        info, entry = await self.create(parent, name, mode, os.O_WRONLY | os.O_EXCL, ctx)
        handle = self._handles[info.fh]
        inode = handle.inode
        handle.let_go = True
        if isinstance(inode, Draft):
            await self._saves.publish(inode)
        await self.release(info.fh)
        return entry

    # --- reading and writing ----------------------------------------------------------------------------------------

    async def read(self, number: int, offset: int, size: int) -> bytes:
        handle = self._handles[number]
        inode = handle.inode
        if isinstance(inode, Version):
            descriptor = inode.descriptor
            assert descriptor is not None
            return os.pread(descriptor, size, offset)
        if isinstance(inode, LiveFile):
            assert handle.descriptor is not None
            return os.pread(handle.descriptor, size, offset)
        descriptor = inode.content(self._context.root)
        return os.pread(descriptor, size, offset) if descriptor >= 0 else b""

    async def write(self, number: int, offset: int, data: bytes) -> int:
        handle = self._handles[number]
        inode = handle.inode
        if isinstance(inode, Draft) and offset == 0 and inode.kind == "new" and data.startswith(SQLITE_HEADER):
            await self._become_live(inode)
        inode = handle.inode  # it may have become live
        if isinstance(inode, Draft):
            return await self._saves.write(handle, inode, offset, data)
        descriptor = handle.descriptor
        assert descriptor is not None
        if handle.append:
            offset = os.fstat(descriptor).st_size
        return os.pwrite(descriptor, data, offset)

    async def _become_live(self, draft: Draft) -> None:
        """A new file turns out to be a database: publish it as it is, and serve its inode in place from now on."""
        context = self._context
        name = draft.name
        if name is None or name.claim is not None or draft.file is None:
            return
        async with draft.saving:
            await context.while_locked(lambda: (name.path(),), partial(self._publish_as_live, draft, name))

    def _publish_as_live(self, draft: Draft, name: Name) -> None:
        context = self._context
        if draft.name is not name or draft.file is None:
            return
        file, path = draft.file, name.path()
        metadata, durability = self._saves.metadata(draft), self._saves.durability(path)
        try:
            publish_new(context.root, context.drafts, file, path, metadata, durability, keep_writable=True)
        except PublishError:
            return  # the name was taken in the vault: an ordinary draft, which displaces nothing unseen
        draft.file = None
        status = os.fstat(file.fd)
        for handle in draft.handles:
            handle.descriptor = os.dup(file.fd)
        file.close()
        draft.changed = False
        context.inodes.became_live(draft, name, status)

    async def flush(self, number: int) -> None:
        handle = self._handles[number]
        if isinstance(handle.inode, Draft) and handle.writes:
            await self._saves.flush(handle, handle.inode)

    async def release(self, number: int) -> None:
        handle = self._handles.pop(number)
        inode = handle.inode
        if isinstance(inode, Version):
            inode.handles -= 1
            self._context.inodes.collect(inode)
        elif isinstance(inode, LiveFile):
            inode.handles.discard(handle)
            if handle.descriptor is not None:
                descriptor, handle.descriptor = handle.descriptor, None
                os.close(descriptor)
            self._context.inodes.collect(inode)
        else:
            await self._saves.release(handle, inode)

    async def fsync(self, number: int) -> None:
        handle = self._handles[number]
        inode = handle.inode
        if isinstance(inode, Draft):
            await self._saves.fsync(handle, inode)
        elif isinstance(inode, LiveFile) and handle.descriptor is not None:
            await in_thread(os.fsync, handle.descriptor)
        elif isinstance(inode, Version) and inode.descriptor is not None:
            await in_thread(os.fsync, inode.descriptor)

    def handle(self, number: int | None) -> Handle | None:
        """The open handle with this number."""
        return self._handles.get(number) if number is not None else None
