"""The inodes of the mount: one inode, one content.

The kernel keeps page cache, size and mapped memory per inode. So every inode here is exactly one of

``Version``    published and immutable: its content, size and pages can be cached for ever;
``Draft``      one private working content, with a size, page cache and mapped memory of its own;
``LiveFile``   one stable inode for a path, passed through in place;
``Directory``  and ``Link`` (a symbolic link, or something else that is only listed).

A ``Name`` is no inode: it is what a directory entry of the vault means on the mount. It points to its newest
Version, and knows all drafts that will be published at it. Publishing a draft makes a new Version; the old one
lives as long as somebody has it open.

Numbers
    A Version's, Link's or Directory's number is the backing file's own, unless that is still taken by something
    the kernel remembers; Drafts get numbers from `FIRST_PRIVATE_NUMBER` up. `stat` of a draft reports the number
    that a `stat` of its path reports at that moment (`Draft.shown_number`), because programs compare the two.

Ownership
    ``InodeTable`` (inode_table.py) owns all inodes. An inode leaves it when the kernel has forgotten it (`lookups` is
    0) and nothing here needs it: an open handle, a promised redirect, a draft that is based on it, a directory's
    children. A Version owns its descriptor; a Draft owns its staging file. Everything in this file runs on the event
    loop's thread, and no method awaits: between two awaits of a handler nothing changes. Other threads (the control
    server) only take snapshots with ``list(...)``.

Why a Version holds a descriptor before it is superseded: once another file has its name, its content can be
reached by that descriptor alone.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

import trio

from vaultfs.errors import LookAgainError
from vaultfs.identity import FileIdentity

if TYPE_CHECKING:
    from vaultfs.drafts import DraftFile
    from vaultfs.root import VaultRoot

__all__ = [
    "FIRST_PRIVATE_NUMBER",
    "GHOST_NUMBER",
    "ROOT_NUMBER",
    "Directory",
    "Draft",
    "Handle",
    "Inode",
    "Link",
    "LiveFile",
    "Name",
    "Opener",
    "Version",
]

ROOT_NUMBER = 1  # FUSE_ROOT_ID, fuse(4)
FIRST_PRIVATE_NUMBER = 1 << 62
GHOST_NUMBER = FIRST_PRIVATE_NUMBER - 1  # stands for no inode at all: see `vaultfs.mount.hints`


class Inode:
    """What the kernel knows by a number; `lookups` counts how often it was told (lookup, create, readdirplus)."""

    __slots__ = ("lookups", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.lookups = 0

    @property
    def pinned(self) -> bool:
        """True while something here needs the inode, whatever the kernel remembers."""
        return False


class Directory(Inode):
    """A directory of the vault; `children` holds only what the kernel knows or a draft needs."""

    __slots__ = ("birth", "children", "gone", "identity", "name", "parent", "removed", "watched")

    def __init__(self, number: int, parent: Directory | None, name: bytes, identity: tuple[int, int]) -> None:
        super().__init__(number)
        self.parent = parent
        self.name = name
        self.identity = identity  # (st_dev, st_ino): tells a directory that was replaced outside from this one
        self.children: dict[bytes, Directory | Link | Name] = {}
        self.birth = 0  # when it was made (ns), 0 if not known
        self.watched = False
        self.gone = False  # nothing stands at its place any more: whoever has it open meets ENOENT in it
        self.removed: os.stat_result | None = None  # what it was when it was removed, for those who have it open

    @property
    def pinned(self) -> bool:
        return self.number == ROOT_NUMBER or bool(self.children)

    @property
    def depth(self) -> int:
        """Directories between the vault's root and this one, itself included; 0 for the root."""
        depth = 0
        directory = self
        while directory.parent is not None:
            depth += 1
            directory = directory.parent
        return depth

    def path(self) -> bytes:
        """Vault-relative path. Raises FileNotFoundError if it was removed, LookAgainError if it was replaced."""
        if self.number == ROOT_NUMBER:
            return b""
        if self.parent is None:
            if self.removed is not None or self.gone:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.name)
            raise LookAgainError("the directory was replaced")
        above = self.parent.path()
        return above + b"/" + self.name if above else self.name

    def path_of(self, name: bytes) -> bytes:
        """Vault-relative path of the entry `name`."""
        here = self.path()
        return here + b"/" + name if here else name

    def is_within(self, other: Directory) -> bool:
        """True if this is `other` or lies below it."""
        directory: Directory | None = self
        while directory is not None:
            if directory is other:
                return True
            directory = directory.parent
        return False

    def __repr__(self) -> str:
        return f"<Directory {self.number} {self.name!r}>"


class Link(Inode):
    """A symbolic link, or a fifo, socket or device that was put into the vault: listed, never opened by us."""

    __slots__ = ("identity", "name", "parent")

    def __init__(self, number: int, parent: Directory, name: bytes, identity: tuple[int, int]) -> None:
        super().__init__(number)
        self.parent: Directory | None = parent
        self.name = name
        self.identity = identity

    def path(self) -> bytes:
        if self.parent is None:
            raise LookAgainError("the link was removed or replaced")
        return self.parent.path_of(self.name)


class Name:
    """What one directory entry of the vault means on the mount (a regular file's entry).

    `version`  the newest published content that the mount has seen, None while there is none;
    `edit`     the one draft that everyone who opens the name without truncating it shares;
    `drafts`   all drafts that will be published at this name: the edit draft, replacements, detached ones;
    `claim`    the empty file that O_CREAT|O_EXCL put into the vault for us: it does not count as published;
    `live`     the LiveFile, while the name is served in place.
    """

    __slots__ = ("claim", "drafts", "edit", "linked", "live", "name", "parent", "version")

    def __init__(self, parent: Directory, name: bytes) -> None:
        self.parent = parent
        self.name = name
        self.version: Version | None = None
        self.edit: Draft | None = None
        self.drafts: set[Draft] = set()
        self.claim: FileIdentity | None = None
        self.live: LiveFile | None = None
        self.linked = True

    def path(self) -> bytes:
        return self.parent.path_of(self.name)

    @property
    def shown_draft(self) -> Draft | None:
        """The draft that the name shows, because nothing was ever published at it; None otherwise."""
        if self.version is not None or self.live is not None:
            return None
        if self.edit is not None:
            return self.edit
        return min(self.drafts, key=lambda draft: draft.number, default=None)

    @property
    def in_use(self) -> bool:
        return self.version is not None or bool(self.drafts) or self.live is not None or self.claim is not None

    def detach(self) -> None:
        """Take the name out of its directory, if it is still the one that stands there."""
        if self.parent.children.get(self.name) is self:
            del self.parent.children[self.name]

    def __repr__(self) -> str:
        return f"<Name {self.name!r}>"


class Version(Inode):
    """Published content. `descriptor` is read-only and opened at the latest before the content loses its name."""

    __slots__ = ("checked_header", "descriptor", "handles", "identity", "name", "stat", "users")

    def __init__(self, number: int, name: Name, status: os.stat_result) -> None:
        super().__init__(number)
        self.name = name
        self.stat = status
        self.identity = FileIdentity.from_stat(status)
        self.descriptor: int | None = None
        self.handles = 0
        self.users = 0  # drafts that are based on this content
        self.checked_header = False

    @property
    def pinned(self) -> bool:
        return self.handles > 0 or self.users > 0 or self.name.version is self

    @property
    def is_current(self) -> bool:
        return self.name.version is self and self.name.linked

    def update(self, status: os.stat_result) -> None:
        """Take over the metadata of the same content (after chmod, chown, utimens or setxattr)."""
        self.stat = status
        self.identity = FileIdentity.from_stat(status)

    def open_content(self, root: VaultRoot) -> int:
        """The descriptor of exactly this content.

        Raises LookAgainError if the name holds something else by now: the kernel walks the path again and gets
        the version that is there.
        """
        if self.descriptor is None:
            if not self.is_current:
                raise LookAgainError("superseded")
            try:
                # O_NONBLOCK matters only where somebody holds a lease: then BlockingIOError, and the open waits.
                descriptor = root.open_file(self.name.path(), os.O_RDONLY | os.O_NONBLOCK)
            except FileNotFoundError as error:
                raise LookAgainError("removed") from error
            if not FileIdentity.from_stat(os.fstat(descriptor)).unchanged(self.identity):
                os.close(descriptor)
                raise LookAgainError("changed outside")
            self.descriptor = descriptor
        return self.descriptor

    def hold(self, root: VaultRoot) -> None:
        """Keep the content reachable before its name is taken away, if somebody may still ask for it."""
        if self.descriptor is None and (self.lookups > 0 or self.handles > 0 or self.users > 0):
            try:
                self.open_content(root)
            except (LookAgainError, OSError):
                # It changed outside a moment ago: there is nothing left to hold, and whoever asks for this inode
                # is told to look again.
                return

    def adopt(self, descriptor: int) -> None:
        """Take over `descriptor` (read-only, open on this very content)."""
        if self.descriptor is None:
            self.descriptor = descriptor
        else:
            os.close(descriptor)

    def close_if_idle(self) -> None:
        """Close the descriptor when the content can be had again by its name, or nobody can ask for it."""
        if (
            self.descriptor is not None
            and self.handles == 0
            and self.users == 0
            and (self.is_current or self.lookups == 0)
        ):
            os.close(self.descriptor)
            self.descriptor = None

    def status(self) -> os.stat_result:
        """The attributes; of a superseded version as the kernel below tells them now (link count 0)."""
        if self.descriptor is not None and not self.is_current:
            return os.fstat(self.descriptor)
        return self.stat

    def __repr__(self) -> str:
        return f"<Version {self.number} of {self.name.name!r}>"


class Opener:
    """The process whose letting go completes a save: its thread group and when that started (clock ticks)."""

    __slots__ = ("pid", "program", "start_time")

    def __init__(self, pid: int, start_time: int, program: str) -> None:
        self.pid = pid
        self.start_time = start_time
        self.program = program

    def same(self, other: Opener) -> bool:
        return self.pid == other.pid and self.start_time == other.start_time


class Draft(Inode):
    """One private working content of a name.

    `kind`         "edit" (starts from `base`), "replacement" (starts empty, whatever the name holds) or "new" (the
                   name had nothing when it was made);
    `base`         the Version whose content this draft shows while it has no staging file of its own (None: empty);
    `began`        identity of what the name held when the draft began, or was last published: displacing that is no
                   surprise;
    `file`         the staging file, made at the first change;
    `changed`      there is something to publish;
    `writes`       counts changes, so that whoever awaited can tell whether the content moved under it;
    `append_from`  length at the last publish while everything since was only appended, otherwise None;
    `diverged`     its appends are published onto versions of others: it keeps its own view and takes no new openers.
    """

    __slots__ = (
        "append_from",
        "backing_number",
        "base",
        "base_gid",
        "base_mode",
        "base_uid",
        "began",
        "changed",
        "copy_seconds",
        "created",
        "diverged",
        "file",
        "front_to_back",
        "gid",
        "handles",
        "interrupted",
        "kind",
        "last_write",
        "mode",
        "name",
        "opened_by_dying",
        "own_attributes",
        "preparing",
        "promises",
        "published",
        "published_at",
        "refused",
        "saving",
        "sent_numbers",
        "size",
        "times_set",
        "touched",
        "uid",
        "umask",
        "writer",
        "writes",
    )

    def __init__(self, number: int, name: Name, kind: str, base: Version | None, writer: Opener) -> None:
        super().__init__(number)
        self.name: Name | None = name
        self.kind = kind
        self.base = base if kind == "edit" else None
        self.began = base.identity if base is not None else None
        if self.base is not None:
            self.base.users += 1
        self.writer = writer
        self.file: DraftFile | None = None
        self.backing_number = 0  # of the staging file: it becomes the version's own
        self.changed = kind == "new"
        self.writes = 0
        self.size = self.base.identity.size if self.base is not None else 0
        self.append_from: int | None = self.size
        self.diverged = False
        self.front_to_back = True
        self.mode: int | None = None
        self.uid: int | None = None
        self.gid: int | None = None
        self.base_mode: int | None = None  # what these three were when the draft began, or was last published
        self.base_uid: int | None = None
        self.base_gid: int | None = None
        self.own_attributes: set[str] = set()  # extended attributes that the program itself set on the draft
        self.umask = 0
        self.times_set = False  # the writer itself set the times: a late publish leaves them
        self.touched = False  # a new file's mode, owner, times or xattrs were changed since it was made
        self.handles: set[Handle] = set()
        self.promises = 0
        self.sent_numbers: set[int] = {number}
        self.created = time.monotonic()
        self.last_write = self.created
        self.copy_seconds = 0.0
        self.published = 0
        self.published_at = self.created
        self.opened_by_dying = False
        self.interrupted: tuple[int, int] | None = None  # (signal, `writes` at that moment)
        self.refused: str | None = None  # why the last attempt to publish failed; None while none did
        self.preparing = trio.Lock()  # held while the staging file is made
        self.saving = trio.Lock()  # held while it is published

    @property
    def pinned(self) -> bool:
        return bool(self.handles) or self.promises > 0 or self.refused is not None

    @property
    def joinable(self) -> bool:
        """True if whoever opens the name for editing now may share this draft: it starts from the newest version."""
        return self.name is not None and not self.diverged and self.base is self.name.version

    @property
    def shown_number(self) -> int:
        """The inode number that a `stat` of the draft's path reports now."""
        if self.name is not None and self.name.version is not None:
            return self.name.version.number
        return self.backing_number or self.number

    def rebase(self, version: Version | None) -> None:
        """Go on from `version`: what is read before the next change, and what the next publish compares with."""
        if version is not None:
            version.users += 1
        if self.base is not None:
            self.base.users -= 1
            self.base.close_if_idle()
        self.base = version
        self.began = version.identity if version is not None else None

    def written(self, offset: int, length: int, *, appending: bool) -> None:
        """Note a change of `length` bytes at `offset` (before `size` is raised).

        What is written to an empty file is only an append if the program asked to append: otherwise it is a whole
        new content, which must not be added to what somebody else saved meanwhile.
        """
        if offset != self.size:
            self.front_to_back = False
            self.append_from = None
        elif self.append_from == 0 and not appending:
            self.append_from = None
        self.size = max(self.size, offset + length)
        self.touch()

    def truncated(self, size: int) -> None:
        if size < self.size:
            self.append_from = None
            if size != 0:
                self.front_to_back = False
        elif size > self.size:
            self.append_from = None
        self.size = size
        self.touch()

    def take_metadata(self, mode: int, uid: int, gid: int) -> None:
        """Start from this mode and owner: only what differs from them at the publish is the program's own wish."""
        self.mode = self.base_mode = mode
        self.uid = self.base_uid = uid
        self.gid = self.base_gid = gid

    def touch(self) -> None:
        self.changed = True
        self.writes += 1
        self.last_write = time.monotonic()

    def content(self, root: VaultRoot) -> int:
        """A descriptor to read the content from; -1 if it is empty and has none."""
        if self.file is not None:
            return self.file.fd
        if self.base is not None:
            return self.base.open_content(root)
        return -1

    def __repr__(self) -> str:
        return f"<Draft {self.number} {self.kind} of {self.name.name if self.name else None!r}>"


class LiveFile(Inode):
    """A file that is served in place: one inode, locks and mapped memory shared by all who use the mount."""

    __slots__ = ("handles", "identity", "name")

    def __init__(self, number: int, name: Name, identity: tuple[int, int]) -> None:
        super().__init__(number)
        self.name = name
        self.identity = identity
        self.handles: set[Handle] = set()

    @property
    def pinned(self) -> bool:
        return bool(self.handles) or (self.name.live is self and self.lookups > 0)

    def __repr__(self) -> str:
        return f"<LiveFile {self.number} of {self.name.name!r}>"


class Handle:
    """One open file description of the mount.

    `descriptor` is the live file's own descriptor (owned by the handle); drafts and versions keep theirs.
    `let_go` is set once the opener was found to be done with it: what counts from then on is the other handles.
    """

    __slots__ = ("append", "descriptor", "inode", "let_go", "opener", "syncing", "syncs", "writes")

    def __init__(self, inode: Draft | LiveFile | Version, *, writes: bool, append: bool = False) -> None:
        self.inode = inode
        self.writes = writes
        self.append = append
        self.syncing = False
        self.syncs = 0
        self.opener: Opener | None = None
        self.let_go = False
        self.descriptor: int | None = None
