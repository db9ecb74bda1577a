"""The table of inodes: what the kernel knows by a number, what stands at a name, and when either is forgotten.

Who owns what, and when an inode goes, is told at the top of `vaultfs.mount.inodes`. No method here awaits.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

from vaultfs.errors import LookAgainError
from vaultfs.identity import FileIdentity
from vaultfs.kernel import AT_NO_AUTOMOUNT, AT_SYMLINK_NOFOLLOW, statx
from vaultfs.mount.inodes import (
    FIRST_PRIVATE_NUMBER,
    GHOST_NUMBER,
    ROOT_NUMBER,
    Directory,
    Draft,
    Inode,
    Link,
    LiveFile,
    Name,
    Opener,
    Version,
)
from vaultfs.root import VaultRoot

__all__ = ["InodeTable"]


class InodeTable:
    """All inodes by number."""

    def __init__(self, root: VaultRoot) -> None:
        self._root = root
        self._inodes: dict[int, Inode] = {}
        self._directories: dict[tuple[int, int], Directory] = {}
        self._next_private = FIRST_PRIVATE_NUMBER
        self.forgot_directory: Callable[[int], None] | None = None  # told the number of each directory that goes
        status = os.fstat(root.fd)
        self.top = Directory(ROOT_NUMBER, None, b"", (status.st_dev, status.st_ino))
        self.top.lookups = 1
        self._add(self.top)

    def __len__(self) -> int:
        return len(self._inodes)

    def __iter__(self) -> Iterator[Inode]:
        return iter(list(self._inodes.values()))

    def _add(self, inode: Inode) -> None:
        self._inodes[inode.number] = inode
        if isinstance(inode, Directory):
            self._directories[inode.identity] = inode

    def __getitem__(self, number: int) -> Inode:
        inode = self._inodes.get(number)
        if inode is None:  # the kernel never asks for what it has forgotten; if it did, it shall look again
            raise LookAgainError("unknown inode")
        return inode

    def directory(self, number: int) -> Directory:
        inode = self[number]
        if not isinstance(inode, Directory):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return inode

    def private_number(self) -> int:
        number = self._next_private
        self._next_private += 1
        return number

    def number_for(self, backing: int) -> int:
        """The backing file's own number, or a private one while that is taken or means the mount's root."""
        if backing == ROOT_NUMBER or backing >= GHOST_NUMBER or backing in self._inodes:
            return self.private_number()
        return backing

    # --- what stands at a name ------------------------------------------------------------------------------

    def name_at(self, parent: Directory, name: bytes) -> Name:
        """The Name of `name` in `parent`, made if need be (whatever else stood there is let go)."""
        child = parent.children.get(name)
        if isinstance(child, Name):
            return child
        if child is not None:
            self.drop(parent, name)
        made = Name(parent, name)
        parent.children[name] = made
        return made

    def current_version(self, name: Name, status: os.stat_result) -> Version:
        """The Version for what `status` says stands at `name` now; a new one if that changed."""
        identity = FileIdentity.from_stat(status)
        version = name.version
        if version is not None and version.identity.unchanged(identity):
            return version
        return self.supersede(name, status)

    def supersede(self, name: Name, status: os.stat_result) -> Version:
        """Make the Version for `status` the newest of `name`."""
        old = name.version
        version = Version(self.number_for(status.st_ino), name, status)
        name.version = version
        name.claim = None
        self._add(version)
        if old is not None:
            self.collect(old)
        return version

    def vanished(self, name: Name) -> None:
        """The name holds nothing in the vault any more (removed through the mount or outside)."""
        old, name.version = name.version, None
        name.claim = None
        if old is not None:
            self.collect(old)
        live, name.live = name.live, None
        if live is not None:
            self.collect(live)
        self.collect_name(name)

    def directory_at(self, parent: Directory, name: bytes, status: os.stat_result) -> Directory:
        """The Directory for what `status` says stands at `name`.

        A directory has one place only: one that was renamed outside is found by its identity and moved here, with
        everything that is known below it. The time of its birth tells it from a new one that was given the inode number
        of one removed just before: the kernel may remember that as dead.
        """
        identity = (status.st_dev, status.st_ino)
        child = parent.children.get(name)
        if isinstance(child, Directory):
            if child.identity == identity:
                return child
            self.drop(parent, name)
        elif child is not None:
            self.drop(parent, name)
        birth = self._birth(parent, name, identity)
        known = self._directories.get(identity)
        if known is not None and birth and known.birth == birth and not parent.is_within(known):
            if known.parent is not None:
                known.parent.children.pop(known.name, None)
            known.parent, known.name, known.gone = parent, name, False
            parent.children[name] = known
            return known
        made = Directory(self.number_for(status.st_ino), parent, name, identity)
        made.birth = birth
        parent.children[name] = made
        self._add(made)
        return made

    def _birth(self, parent: Directory, name: bytes, identity: tuple[int, int]) -> int:
        """When the directory was made (ns), 0 if the file system does not say or something else stands there by now."""
        try:
            with self._root.parent(parent.path_of(name)) as (directory, last):
                found = statx(directory, last, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT)
        except OSError:
            return 0  # gone meanwhile: then there is nothing to recognize
        return found.btime_ns if (found.dev, found.ino) == identity else 0

    def directory_removed(self, directory: Directory, status: os.stat_result) -> None:
        """`directory` (it was `status`) was removed through the mount: the kernel takes it for dead from now on."""
        directory.removed = status
        if self._directories.get(directory.identity) is directory:
            del self._directories[directory.identity]

    def link_at(self, parent: Directory, name: bytes, status: os.stat_result) -> Link:
        identity = (status.st_dev, status.st_ino)
        child = parent.children.get(name)
        if isinstance(child, Link) and child.identity == identity:
            return child
        if child is not None:
            self.drop(parent, name)
        made = Link(self.number_for(status.st_ino), parent, name, identity)
        parent.children[name] = made
        self._add(made)
        return made

    def live_at(self, name: Name, status: os.stat_result) -> LiveFile:
        identity = (status.st_dev, status.st_ino)
        live = name.live
        if live is not None and live.identity == identity:
            return live
        old, name.version = name.version, None
        made = LiveFile(self.number_for(status.st_ino), name, identity)
        name.live = made
        name.claim = None
        self._add(made)
        for former in (old, live):
            if former is not None:
                self.collect(former)
        return made

    def became_live(self, draft: Draft, name: Name, status: os.stat_result) -> LiveFile:
        """A new file's draft turned out to be a database: its inode goes on as the LiveFile, in place."""
        live = LiveFile(draft.number, name, (status.st_dev, status.st_ino))
        live.lookups = draft.lookups
        for handle in draft.handles:
            handle.inode = live
            live.handles.add(handle)
        draft.handles.clear()
        name.drafts.discard(draft)
        if name.edit is draft:
            name.edit = None
        name.live = live
        name.claim = None
        self._inodes[draft.number] = live
        return live

    def drop(self, parent: Directory, name: bytes, *, gone: bool = False) -> None:
        """Something else stands at `name` now, or (`gone`) nothing: let go of what was known there.

        Names with drafts stay as they are: their drafts still have to be published somewhere.
        """
        child = parent.children.get(name)
        if child is None:
            return
        if isinstance(child, Name):
            self.vanished(child)
            if not child.drafts:
                child.linked = False
                child.detach()
            return
        del parent.children[name]
        child.parent = None
        if isinstance(child, Directory):
            child.gone = gone
        self.collect(child)
        if not parent.children:
            self.collect(parent)

    # --- drafts -------------------------------------------------------------------------------------------

    def new_draft(self, name: Name, kind: str, base: Version | None, writer: Opener) -> Draft:
        draft = Draft(self.private_number(), name, kind, base, writer)
        self._add(draft)
        name.drafts.add(draft)
        if kind in ("edit", "new"):
            name.edit = draft
        return draft

    def rebase(self, draft: Draft, version: Version | None) -> None:
        """Let `draft` go on from `version`; what it was based on is dropped if nobody else needs it."""
        former = draft.base
        draft.rebase(version)
        if former is not None and former is not version:
            self.collect(former)

    def private_version(self, name: Name, descriptor: int) -> Version:
        """A content that has no name of its own (any more), held by `descriptor`, which it takes over."""
        version = Version(self.private_number(), name, os.fstat(descriptor))
        version.adopt(descriptor)
        return version

    def end_draft(self, draft: Draft) -> None:
        """The draft has nothing more to publish and nobody uses it: let go of its name, base and staging file."""
        name = draft.name
        if name is not None:
            name.drafts.discard(draft)
            if name.edit is draft:
                name.edit = None
        if draft.file is not None:
            draft.file.discard()
            draft.file = None
        if draft.base is not None:
            base, draft.base = draft.base, None
            base.users -= 1
            self.collect(base)
        if name is not None:
            self.collect_name(name)
        self.collect(draft)

    def drafts(self) -> list[Draft]:
        return [inode for inode in list(self._inodes.values()) if isinstance(inode, Draft)]

    # --- forgetting ---------------------------------------------------------------------------------------

    def forget(self, number: int, lookups: int) -> None:
        """The kernel dropped `lookups` of its references (FORGET)."""
        inode = self._inodes.get(number)
        if inode is None:
            return
        inode.lookups = max(0, inode.lookups - lookups)
        if inode.lookups == 0 and number != ROOT_NUMBER:
            self.collect(inode)

    def collect(self, inode: Inode) -> None:
        """Drop `inode` if neither the kernel nor anything here needs it; close what it holds."""
        if isinstance(inode, Version):
            inode.close_if_idle()
            if inode.lookups == 0 and inode.handles == 0 and inode.users == 0:
                name = inode.name
                if name.version is inode:
                    if name.drafts:
                        return
                    name.version = None
                    self.collect_name(name)
                self._remove(inode)
            return
        if inode.lookups > 0 or inode.pinned:
            return
        if isinstance(inode, Draft) and inode.name is not None and inode in inode.name.drafts:
            return
        self._remove(inode)
        if isinstance(inode, LiveFile):
            if inode.name.live is inode:
                inode.name.live = None
                self.collect_name(inode.name)
        elif isinstance(inode, Directory | Link) and inode.parent is not None:
            parent, inode.parent = inode.parent, None
            if parent.children.get(inode.name) is inode:
                del parent.children[inode.name]
            self.collect(parent)

    def collect_name(self, name: Name) -> None:
        if not name.in_use:
            name.detach()
            self.collect(name.parent)

    def _remove(self, inode: Inode) -> None:
        if self._inodes.get(inode.number) is inode:
            del self._inodes[inode.number]
        if isinstance(inode, Directory) and self._directories.get(inode.identity) is inode:
            del self._directories[inode.identity]
        if isinstance(inode, Directory) and self.forgot_directory is not None:
            self.forgot_directory(inode.number)

    def close(self) -> None:
        """Close every descriptor that inodes hold; the mount is gone. Staging files are the drafts' own affair."""
        for inode in self:
            if isinstance(inode, Version) and inode.descriptor is not None:
                os.close(inode.descriptor)
                inode.descriptor = None
            elif isinstance(inode, LiveFile):
                for handle in inode.handles:
                    if handle.descriptor is not None:
                        os.close(handle.descriptor)
                        handle.descriptor = None
        self._inodes.clear()
        self._directories.clear()
