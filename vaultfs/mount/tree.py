"""Names and directories of the mount: what a lookup finds, and how names are made, moved and removed.

A lookup asks the vault each time the kernel asks us; what the kernel may keep is decided by the timeouts. What
stands at a name is one of: a directory, a link, a regular file (its Version, LiveFile, or the draft that the calling
thread was redirected to), a draft of a name that was never published, or nothing. Hidden are the state directory,
staging names, and path locks (`NamePolicy`).

A change to a name is one synchronous step while its path lock is held (`MountContext.while_locked`); what stands at
the name is looked at in that step, not before. Before a Version loses its name it is held
open (`Version.hold`).

A file that was made with O_CREAT alone exists on the mount and not in the vault; one made with O_EXCL stands in the
vault as an empty *claim*, because programs use that as a lock. Neither counts as published.

Sources: versions-and-drafts.md, "Create, rename, unlink"; lock-protocol.md, "What the mount shows".
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pyfuse3

from vaultfs.errors import (
    LockBusyError,
    LookAgainError,
    ProtectedMemberError,
    ReservedNameError,
)
from vaultfs.identity import FileIdentity
from vaultfs.locks import is_lock_directory
from vaultfs.mount.attributes import KEPT_BRIEFLY, KEPT_LONG, entry_attributes
from vaultfs.mount.context import MountContext
from vaultfs.mount.inodes import Directory, Draft, Inode, Link, LiveFile, Name, Version
from vaultfs.mount.saves import Saves

__all__ = ["DirectoryListing", "Tree"]

LOOKS = 64  # at a name that somebody keeps replacing outside


def _absent(path: bytes) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


class DirectoryListing:
    """One open directory: a snapshot of its entries, so that positions stay what they were.

    The snapshot is taken at the first read and again after a rewind; positions 1 and 2 are "." and "..".
    """

    __slots__ = ("directory", "entries")

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.entries: list[tuple[bytes, os.stat_result | None]] | None = None


class Tree:
    """All operations on names of one mount."""

    def __init__(self, context: MountContext, saves: Saves) -> None:
        self._context = context
        self._saves = saves

    # --- lookups ----------------------------------------------------------------------------------------------

    def lookup(self, parent: Directory, name: bytes, thread: int) -> pyfuse3.EntryAttributes:
        """The entry `name` of `parent` for `thread`; counts as one lookup of the inode it gives."""
        context = self._context
        path = parent.path_of(name)
        if context.policy.is_machinery(path):
            raise _absent(path)
        self.watch(parent)
        for attempt in range(LOOKS):
            try:
                status = context.root.stat(path)
            except FileNotFoundError:
                return self._lookup_unpublished(parent, name, path, thread)
            inode = self.seen(parent, name, path, status)
            if inode is None:
                raise _absent(path)
            if isinstance(inode, Version | Draft):
                try:
                    inode = self._redirected(inode, thread) or inode
                except LookAgainError:
                    if attempt + 1 < LOOKS:
                        continue  # replaced outside between two steps of ours: what stands there now?
                    raise
                if isinstance(inode, Draft):
                    context.redirects.gave(thread, inode)
            inode.lookups += 1
            return self.entry(inode, status)
        raise AssertionError("the last look returns or raises")

    def _lookup_unpublished(self, parent: Directory, name: bytes, path: bytes, thread: int) -> pyfuse3.EntryAttributes:
        inodes = self._context.inodes
        inodes.drop(parent, name, gone=True)
        child = parent.children.get(name)
        if isinstance(child, Name):
            shown = child.shown_draft
            if shown is not None and shown.kind == "new":
                inode = self._redirected(shown, thread) or shown
                self._context.redirects.gave(thread, inode)
                inode.lookups += 1
                return self.entry(inode, None)
        if parent.watched and not self._context.policy.may_be_lock_directory(name):
            absent = pyfuse3.EntryAttributes()
            absent.st_ino = pyfuse3.InodeT(0)
            absent.entry_timeout = KEPT_LONG
            return absent
        raise _absent(path)

    def _redirected(self, inode: Version | Draft, thread: int) -> Draft | None:
        """The draft that `thread` was told to look for, if it was; made if need be.

        What the open that follows will need is opened here, since the kernel looks again only once: then the open
        finds it, whatever becomes of the name until then. Raises LookAgainError if the name changed just now.
        """
        pending = self._context.redirects.get(thread)
        if pending is None:
            return None
        pending.looked = True
        name = inode.name
        if not pending.writing:
            if isinstance(inode, Version):
                with suppress(BlockingIOError):  # a lease on the file: the open will wait for it
                    inode.open_content(self._context.root)
            return None
        if name is None:
            return None
        promised = pending.draft
        if promised is not None and promised.name is name:
            return promised
        if pending.opener is None:
            pending.opener = self._saves.opener(thread)
        draft = self._saves.choose_draft(name, pending.opener, truncating=pending.truncating)
        former = pending.withdraw()
        pending.promise(draft)
        if former is not None and former is not draft:
            self._saves.end_if_unused(former)
        if draft.base is not None:
            try:
                with suppress(BlockingIOError):
                    draft.base.open_content(self._context.root)
            except LookAgainError:
                pending.withdraw()
                self._saves.end_if_unused(draft)
                raise
        return draft

    def seen(self, parent: Directory, name: bytes, path: bytes, status: os.stat_result) -> Inode | None:
        """The inode for what `status` says stands at `name`, without regard to who asks; None if it is hidden."""
        context = self._context
        inodes = context.inodes
        mode = status.st_mode
        if stat.S_ISREG(mode):
            entry = inodes.name_at(parent, name)
            if entry.claim is not None and entry.claim.same_object(FileIdentity.from_stat(status)):
                if status.st_size == 0:
                    return entry.shown_draft or inodes.current_version(entry, status)
                entry.claim = None  # somebody wrote into the claim in the vault: it is a version like any other
            if self._is_live(entry, path, status):
                return inodes.live_at(entry, status)
            if entry.live is not None:
                former, entry.live = entry.live, None
                inodes.collect(former)
            return inodes.current_version(entry, status)
        if stat.S_ISDIR(mode):
            if (status.st_dev, status.st_ino) == (context.root.dev, context.state.ino):
                return None  # recognized by its inode as well as by its name
            if status.st_dev != context.root.dev:
                return inodes.link_at(parent, name, status)  # something is mounted there: listed, not entered
            return inodes.directory_at(parent, name, status)
        return inodes.link_at(parent, name, status)

    def _is_live(self, entry: Name, path: bytes, status: os.stat_result) -> bool:
        policy = self._context.policy
        if entry.live is not None and (entry.live.handles or entry.live.identity == (status.st_dev, status.st_ino)):
            return entry.live.identity == (status.st_dev, status.st_ino)
        if entry.drafts:
            return False  # never while it has a draft with an old version under it
        return (
            policy.is_live(path)
            or policy.is_lock_file(path, status.st_size)
            or policy.is_protocol_file(entry.parent.name, entry.name)
        )

    def entry(self, inode: Inode, status: os.stat_result | None) -> pyfuse3.EntryAttributes:
        """What the kernel is told about `inode` by lookup, create and readdirplus. Counts no lookup."""
        if isinstance(inode, Version):
            keep = self._keep(inode)
            return entry_attributes(
                inode.status(),
                inode.number,
                entry_timeout=0.0 if inode.name.drafts else keep,
                attr_timeout=keep,
            )
        if isinstance(inode, Draft):
            attributes = self.draft_attributes(inode)
            attributes.st_ino = pyfuse3.InodeT(inode.number)
            inode.sent_numbers.add(inode.number)
            return attributes
        assert status is not None
        if isinstance(inode, LiveFile):
            return entry_attributes(status, inode.number, entry_timeout=0.0, attr_timeout=0.0)
        if isinstance(inode, Directory) and inode.parent is not None:
            brief = self._context.policy.may_be_lock_directory(inode.name)
            keep = 0.0 if brief else self._keep_in(inode.parent)
            return entry_attributes(status, inode.number, entry_timeout=keep, attr_timeout=min(keep, KEPT_BRIEFLY))
        return entry_attributes(status, inode.number, entry_timeout=KEPT_BRIEFLY, attr_timeout=KEPT_BRIEFLY)

    @staticmethod
    def _keep_in(directory: Directory) -> float:
        return KEPT_LONG if directory.watched else KEPT_BRIEFLY

    def _keep(self, version: Version) -> float:
        """Not at all if the file has several names: what happens by another one is not seen at this one."""
        return 0.0 if version.stat.st_nlink > 1 else self._keep_in(version.name.parent)

    def attributes(self, inode: Inode) -> pyfuse3.EntryAttributes:
        """The attributes of `inode` for getattr and setattr."""
        if isinstance(inode, Version):
            return entry_attributes(inode.status(), inode.number, entry_timeout=0.0, attr_timeout=self._keep(inode))
        if isinstance(inode, Draft):
            return self.draft_attributes(inode)
        if isinstance(inode, LiveFile):
            return entry_attributes(self.live_status(inode), inode.number, entry_timeout=0.0, attr_timeout=0.0)
        assert isinstance(inode, Directory | Link)
        if isinstance(inode, Directory) and inode.removed is not None:
            gone = entry_attributes(inode.removed, inode.number, entry_timeout=0.0, attr_timeout=0.0)
            gone.st_nlink = 0
            return gone
        status = self._context.root.stat(inode.path())
        self._assert_same(inode, status)
        return entry_attributes(status, inode.number, entry_timeout=0.0, attr_timeout=KEPT_BRIEFLY)

    @staticmethod
    def _assert_same(inode: Directory | Link, status: os.stat_result) -> None:
        """Raises LookAgainError if something else stands at the inode's path by now.

        Answered with the attributes of another type, the kernel would make the inode bad for good.
        """
        if (status.st_dev, status.st_ino) != inode.identity:
            raise LookAgainError("something else stands there now")

    def live_status(self, live: LiveFile) -> os.stat_result:
        for handle in live.handles:
            if handle.descriptor is not None:
                return os.fstat(handle.descriptor)
        return self._context.root.stat(live.name.path())

    def draft_attributes(self, draft: Draft) -> pyfuse3.EntryAttributes:
        """The attributes of a draft: its content's own size and times, its file's owner and mode to be."""
        if draft.file is not None:
            status = os.fstat(draft.file.fd)
        elif draft.base is not None:
            status = draft.base.status()
        elif draft.name is not None and draft.name.version is not None:
            status = draft.name.version.status()
        else:
            status = os.fstat(self._context.root.fd)
        number = draft.shown_number
        draft.sent_numbers.add(number)
        attributes = entry_attributes(status, number, entry_timeout=0.0, attr_timeout=0.0)
        mode = draft.mode if draft.mode is not None else stat.S_IMODE(status.st_mode)
        attributes.st_mode = pyfuse3.ModeT(stat.S_IFREG | mode)
        attributes.st_nlink = 1 if draft.name is not None else 0
        attributes.st_rdev = 0
        if draft.uid is not None:
            attributes.st_uid = draft.uid
        if draft.gid is not None:
            attributes.st_gid = draft.gid
        attributes.st_size = draft.size
        if draft.file is None and draft.base is None:
            attributes.st_blocks = 0
        return attributes

    def watch(self, directory: Directory) -> None:
        """Have outside changes to `directory` seen from now on, if they can be; before its entries are looked at."""
        watch = self._context.watch
        if watch is None or directory.watched:
            return
        descriptor = self._context.root.open_directory(directory.path())
        try:
            directory.watched = watch.add(directory.number, b"/proc/self/fd/%d" % descriptor)
        finally:
            os.close(descriptor)

    # --- listings ---------------------------------------------------------------------------------------------

    def entries(
        self, listing: DirectoryListing, start: int
    ) -> Iterator[tuple[int, bytes, Inode | None, pyfuse3.EntryAttributes]]:
        """The entries after position `start`: position, name, inode and attributes.

        The caller counts a lookup for each entry that the kernel took; none for "." and "..", whose inode is None.
        """
        directory = listing.directory
        if start == 0 or listing.entries is None:
            self.watch(directory)
            listing.entries = self._snapshot(directory)
        for position, (name, above) in enumerate(((b".", directory), (b"..", directory.parent or directory))):
            if position >= start:
                yield position + 1, name, None, self.entry(above, self._context.root.stat(above.path()))
        for position in range(max(start, 2), len(listing.entries) + 2):
            name, status = listing.entries[position - 2]
            path = directory.path_of(name)
            if status is None:
                child = directory.children.get(name)
                inode: Inode | None = child.shown_draft if isinstance(child, Name) else None
            else:
                inode = self._seen_again(directory, name, path, status)
            if inode is not None:
                yield position + 1, name, inode, self.entry(inode, status)

    def _seen_again(self, directory: Directory, name: bytes, path: bytes, status: os.stat_result) -> Inode | None:
        """`seen`, for an entry of a snapshot that may be older than what we know of the name by now."""
        child = directory.children.get(name)
        if isinstance(child, Name) and stat.S_ISREG(status.st_mode):
            known = child.live or child.version
            if known is not None and not self._as_in_snapshot(known, status):
                try:
                    status = self._context.root.stat(path)
                except FileNotFoundError:
                    return None
        return self.seen(directory, name, path, status)

    @staticmethod
    def _as_in_snapshot(known: LiveFile | Version, status: os.stat_result) -> bool:
        if isinstance(known, LiveFile):
            return known.identity == (status.st_dev, status.st_ino)
        return known.identity.unchanged(FileIdentity.from_stat(status))

    def _snapshot(self, directory: Directory) -> list[tuple[bytes, os.stat_result | None]]:
        context = self._context
        path = directory.path()
        entries: list[tuple[bytes, os.stat_result | None]] = []
        present = set()
        for name, status in context.root.scandir(path):
            child_path = directory.path_of(name)
            present.add(name)
            if context.policy.is_machinery(child_path):
                continue
            if (
                stat.S_ISDIR(status.st_mode)
                and context.policy.may_be_lock_directory(name)
                and is_lock_directory(context.root, child_path)
            ):
                continue
            entries.append((name, status))
        for name, child in directory.children.items():
            if name not in present and isinstance(child, Name):
                shown = child.shown_draft
                if shown is not None and shown.kind == "new":
                    entries.append((name, None))
        return entries

    # --- making names -------------------------------------------------------------------------------------------

    def assert_name_is_free(self, path: bytes) -> None:
        """Raises ReservedNameError for machinery. A path lock of our own is never seen standing (`while_locked`)."""
        if self._context.policy.is_machinery(path):
            raise ReservedNameError(path=path)

    async def make_directory(
        self, parent: Directory, name: bytes, mode: int, uid: int, gid: int, thread: int
    ) -> pyfuse3.EntryAttributes:
        context = self._context
        path = parent.path_of(name)
        self.assert_name_is_free(path)
        context.assert_writable()
        child = parent.children.get(name)
        if isinstance(child, Name) and child.shown_draft is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        with context.changing():
            context.root.mkdir(path, mode)
            self._give_to(path, uid, gid, parent)
        if name.endswith(b".lock"):  # proper-lockfile, `mkdir f.lock`: it belongs to the process that made it
            context.note_lock_made(path, self._saves.opener(thread))
        return self._entry_of_new(parent, name, path)

    def make_link(self, parent: Directory, name: bytes, target: bytes, uid: int, gid: int) -> pyfuse3.EntryAttributes:
        context = self._context
        path = parent.path_of(name)
        if context.policy.is_machinery(path):
            raise ReservedNameError(path=path)
        if not context.policy.link_is_contained(target, parent.depth):
            raise ProtectedMemberError(
                "a link may only lead to something inside the vault, by a relative path", path=path
            )
        context.assert_writable()
        child = parent.children.get(name)
        if isinstance(child, Name) and child.shown_draft is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        with context.changing():
            context.root.symlink(target, path)
            self._give_to(path, uid, gid, parent)
        return self._entry_of_new(parent, name, path)

    def _give_to(self, path: bytes, uid: int, gid: int, parent: Directory) -> None:
        """Root's daemon makes things on behalf of others: they belong to their maker (setgid directories rule)."""
        if os.geteuid() != 0:
            return
        above = self._context.root.stat(parent.path())
        group = above.st_gid if above.st_mode & stat.S_ISGID else gid
        with self._context.root.parent(path) as (directory, last):
            os.chown(last, uid, group, dir_fd=directory, follow_symlinks=False)
            status = os.stat(last, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) and above.st_mode & stat.S_ISGID and not status.st_mode & stat.S_ISGID:
                os.chmod(last, stat.S_IMODE(status.st_mode) | stat.S_ISGID, dir_fd=directory)

    def _entry_of_new(self, parent: Directory, name: bytes, path: bytes) -> pyfuse3.EntryAttributes:
        status = self._context.root.stat(path)
        inode = self.seen(parent, name, path, status)
        if inode is None:
            raise _absent(path)
        inode.lookups += 1
        return self.entry(inode, status)

    def read_link(self, link: Link) -> bytes:
        """The link's text, if the policy lets anybody follow it; ELOOP otherwise."""
        path = link.path()
        self._assert_same(link, self._context.root.stat(path))
        try:
            target = self._context.root.readlink(path)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise LookAgainError("no link any more") from error
        assert link.parent is not None
        if not self._context.policy.link_is_contained(target, link.parent.depth):
            raise OSError(errno.ELOOP, "the link leads out of the vault", path)
        return target

    # --- removing names -----------------------------------------------------------------------------------------

    async def unlink(self, parent: Directory, name: bytes, thread: int) -> None:
        context = self._context
        path = parent.path_of(name)
        self.assert_name_is_free(path)
        context.assert_writable()
        child = parent.children.get(name)
        if not isinstance(child, Name):
            status = context.root.stat(path)
            if not stat.S_ISREG(status.st_mode):
                with context.changing():
                    context.root.unlink(path)
                context.inodes.drop(parent, name)
                return
            child = context.inodes.name_at(parent, name)
        remove = partial(self._remove_file, parent, name)
        never_in_vault = child.shown_draft is not None and child.claim is None and not context.root.exists(path)
        if never_in_vault or child.live is not None or context.policy.is_protocol_file(parent.name, name):
            remove()
        else:
            saver = self._saves.opener(thread)
            await context.while_locked(lambda: (parent.path_of(name),), remove, saver=saver, frees_space=True)

    def _remove_file(self, parent: Directory, last: bytes) -> None:
        context = self._context
        name, path = context.inodes.name_at(parent, last), parent.path_of(last)
        if name.version is not None:
            name.version.hold(context.root)
        with context.changing():
            context.root.unlink(path, missing_ok=name.shown_draft is not None)
        if name.claim is not None:
            context.drafts.unclaim(path)
        self.unname_drafts(name)
        context.inodes.vanished(name)
        name.linked = False
        name.detach()

    def unname_drafts(self, name: Name) -> None:
        """The name is gone: its drafts live on for those who have them open, and go with their last handle."""
        for draft in list(name.drafts):
            if draft.refused is not None and not draft.handles:
                self._saves.keep(draft, f"{draft.refused}; meanwhile the file was removed")
            name.drafts.discard(draft)
            draft.name = None
            draft.changed = False
            draft.refused = None
            if not draft.handles and draft.promises == 0:
                self._context.inodes.end_draft(draft)
        name.edit = None

    def remove_directory(self, parent: Directory, name: bytes) -> None:
        context = self._context
        path = parent.path_of(name)
        self.assert_name_is_free(path)
        context.assert_writable()
        child = parent.children.get(name)
        if isinstance(child, Directory) and self.has_unpublished(child):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        status = context.root.stat(path)
        with context.changing():
            try:
                context.root.rmdir(path)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY or not self._only_machinery(path):
                    raise
                self._clear_machinery(path)
                context.root.rmdir(path)
        if isinstance(child, Directory):
            context.inodes.directory_removed(child, status)
        context.inodes.drop(parent, name)

    @staticmethod
    def has_unpublished(directory: Directory) -> bool:
        return any(isinstance(one, Name) and one.shown_draft is not None for one in directory.children.values())

    def _only_machinery(self, path: bytes) -> bool:
        context = self._context
        return all(
            stat.S_ISDIR(status.st_mode)
            and context.policy.may_be_lock_directory(name)
            and is_lock_directory(context.root, path + b"/" + name)
            for name, status in context.root.scandir(path)
        )

    def _clear_machinery(self, path: bytes) -> None:
        """Remove stale lock residue in a directory that holds nothing else. Raises LockBusyError for a live lock."""
        for name in self._context.root.listdir(path):
            if name.endswith(b".lock"):
                file = path + b"/" + name.removesuffix(b".lock")
                lock = self._context.locks.try_acquire(file)
                if lock is None:
                    raise LockBusyError("a lock in the directory is held", path=file)
                lock.release()  # having got it proves that nobody held it, and releasing it removes it
