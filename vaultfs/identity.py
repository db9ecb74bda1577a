"""Which object is it, and is it still as it was: `FileIdentity`, `capture`, `TreeSnapshot`.

A `FileIdentity` is what the file system tells of an object at one moment. Three questions are asked of two of them:

- `same_object`: the same inode?
- `same_content`: the same inode with, as far as can be told, the same bytes?
- `unchanged`: nothing at all happened to it? With one legitimate exception, `unchanged_but_renamed`: renaming an
  object changes its ctime and nothing else.

Inode numbers are used again and timestamps can be set; where that matters ask for the sha256, which `capture` gives.

`capture` reads a whole file and knows that what it read is one state of it. `capture_tree` records the identity of
every entry below a directory. A tree has no single moment; two snapshots that are equal, one after the other,
prove that nothing moved in between.

Numbers come from stat(2), times are in nanoseconds.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from typing import Literal, NamedTuple

import msgspec

from vaultfs.errors import BadRequestError, PathCallConflictError
from vaultfs.root import VaultRoot

__all__ = ["Captured", "FileIdentity", "TreeEntry", "TreeSnapshot", "capture", "capture_tree", "digest"]

_CHUNK = 1 << 20  # bytes read at a time
_CAPTURE_ATTEMPTS = 8  # of reading a file that others keep changing or replacing
_CLOCK_TICK_NS = 20_000_000  # timestamps before Linux 6.13 are no finer than a timer tick (at most 10 ms)


class FileIdentity(msgspec.Struct, frozen=True):
    """What stat(2) told of an object, and the sha256 of its content (hexadecimal) if that was asked for."""

    dev: int
    ino: int
    nlink: int
    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str | None = None

    @classmethod
    def from_stat(cls, found: os.stat_result, sha256: str | None = None) -> FileIdentity:
        """The identity that `found` describes."""
        return cls(
            found.st_dev, found.st_ino, found.st_nlink, found.st_size, found.st_mtime_ns, found.st_ctime_ns, sha256
        )

    def same_object(self, other: FileIdentity) -> bool:
        """The same inode of the same file system."""
        return self.ino == other.ino and self.dev == other.dev

    def same_content(self, other: FileIdentity) -> bool:
        """The same inode, size and mtime; and the same sha256 where both know theirs."""
        return (
            self.ino == other.ino
            and self.dev == other.dev
            and self.size == other.size
            and self.mtime_ns == other.mtime_ns
            and self._same_digest(other)
        )

    def unchanged(self, other: FileIdentity) -> bool:
        """Everything that stat tells is the same; the sha256 is not compared."""
        return self.ctime_ns == other.ctime_ns and self._same_but_ctime(other)

    def unchanged_but_renamed(self, other: FileIdentity) -> bool:
        """The same in all but ctime, which a rename changes; and the same sha256 where both know theirs."""
        return self._same_but_ctime(other) and self._same_digest(other)

    def _same_but_ctime(self, other: FileIdentity) -> bool:
        return (
            self.ino == other.ino
            and self.dev == other.dev
            and self.nlink == other.nlink
            and self.size == other.size
            and self.mtime_ns == other.mtime_ns
        )

    def _same_digest(self, other: FileIdentity) -> bool:
        return self.sha256 is None or other.sha256 is None or self.sha256 == other.sha256


class Captured(NamedTuple):
    """A file's content, the identity (with sha256) of the object it was read from, and that object's st_mode."""

    data: bytes
    identity: FileIdentity
    mode: int


def digest(descriptor: int) -> str:
    """The sha256 of the whole file open at `descriptor`, hexadecimal; its position stays. Raises OSError."""
    sha = hashlib.sha256()
    offset = 0
    while block := os.pread(descriptor, _CHUNK, offset):
        sha.update(block)
        offset += len(block)
    return sha.hexdigest()


def capture(root: VaultRoot, path: bytes, *, limit: int | None = None) -> Captured:
    """Read the regular file `path` whole, and verify that it did not change meanwhile.

    It is read again, for a bounded number of times, if it did. `limit` is the most bytes that are taken.

    Raises PathCallConflictError if it would not hold still, OSError (EFBIG: over `limit`), and what
    `VaultRoot.open_file` raises.
    """
    for _ in range(_CAPTURE_ATTEMPTS):
        descriptor, before = root.open_with_stat(path, os.O_RDONLY)
        try:
            if limit is not None and before.st_size > limit:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
            data = _read(descriptor, before.st_size)
            # Two writes within one tick of the clock leave the same mtime, and the second may be one that we read
            # half of. A file as young as that is read twice.
            young = time.time_ns() - before.st_mtime_ns < _CLOCK_TICK_NS
            if young and _read(descriptor, before.st_size) != data:
                continue
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        identity = FileIdentity.from_stat(before, hashlib.sha256(data).hexdigest())
        if len(data) == before.st_size and identity.unchanged(FileIdentity.from_stat(after)):
            return Captured(data, identity, before.st_mode)
    raise PathCallConflictError("The file kept changing while it was read.", path=path)


def _read(descriptor: int, size: int) -> bytes:
    """The first `size` bytes, fewer if the file ends before; one more if it goes on after them."""
    blocks: list[bytes] = []
    offset = 0
    while offset <= size:
        block = os.pread(descriptor, min(size + 1 - offset, 1 << 30), offset)
        if not block:
            break
        blocks.append(block)
        offset += len(block)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


class TreeEntry(msgspec.Struct, frozen=True):
    """One object of a tree: its path relative to the tree's top, st_mode, identity, and the text of a link."""

    path: bytes
    mode: int
    identity: FileIdentity
    target: bytes | None = None


class TreeSnapshot(msgspec.Struct, frozen=True):
    """All objects of a tree: the directory at its top, and the entries below it, each directory before its content,
    names in byte order."""

    top: FileIdentity
    mode: int
    entries: tuple[TreeEntry, ...]

    def unchanged(self, other: TreeSnapshot) -> bool:
        """Nothing differs that stat, and sha256 where both know it, can tell."""
        return self.top.ctime_ns == other.top.ctime_ns and self.unchanged_but_renamed(other)

    def unchanged_but_renamed(self, other: TreeSnapshot) -> bool:
        """Nothing differs but the ctime of the directory at the top, which renaming the tree changes."""
        return (
            self.top.unchanged_but_renamed(other.top)
            and self.mode == other.mode
            and len(self.entries) == len(other.entries)
            and all(map(_same_entry, self.entries, other.entries))
        )


def _same_entry(one: TreeEntry, other: TreeEntry) -> bool:
    return (
        one.path == other.path
        and one.mode == other.mode
        and one.target == other.target
        and one.identity.ctime_ns == other.identity.ctime_ns
        and one.identity.unchanged_but_renamed(other.identity)
    )


def capture_tree(
    root: VaultRoot,
    path: bytes,
    *,
    content: Literal["identity", "sha256"] = "identity",
    max_entries: int = 100_000,
    max_depth: int = 1_000,
) -> TreeSnapshot:
    """The snapshot of the directory `path`, links not followed. With `content` "sha256" every file is read as well.

    `max_entries` and `max_depth` (levels below `path`) bound the work: BadRequestError beyond them.

    Raises PathCallConflictError if a directory changed while it was listed or an entry vanished,
    UnsafePathError (crosses-mount: something is mounted within), OSError.
    """
    entries: list[TreeEntry] = []
    top = root.stat(path)
    if not stat.S_ISDIR(top.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    pending: list[tuple[bytes, FileIdentity, int, int]] = [(b"", FileIdentity.from_stat(top), top.st_mode, 0)]
    while pending:
        place, identity, mode, depth = pending.pop()
        if place:
            entries.append(TreeEntry(place, mode, identity))
        if depth > max_depth:
            raise BadRequestError(f"The tree is deeper than {max_depth} levels.", path=path)
        below: list[tuple[bytes, FileIdentity, int, int]] = []
        files: list[TreeEntry] = []
        for name, found in _listing(root, _join(path, place), identity):
            if len(entries) + len(files) + len(below) >= max_entries:
                raise BadRequestError(f"The tree has more than {max_entries} entries.", path=path)
            child = _join(place, name)
            if stat.S_ISDIR(found.st_mode):
                below.append((child, FileIdentity.from_stat(found), found.st_mode, depth + 1))
            else:
                files.append(_entry(root, _join(path, child), child, found, content))
        entries.extend(files)
        pending.extend(below)
    entries.sort(key=lambda entry: entry.path.split(b"/"))
    return TreeSnapshot(FileIdentity.from_stat(top), top.st_mode, tuple(entries))


def _listing(root: VaultRoot, directory: bytes, expected: FileIdentity) -> list[tuple[bytes, os.stat_result]]:
    """The entries of a directory that is `expected` before and after it is read."""
    try:
        listed = root.scandir(directory)
        now = FileIdentity.from_stat(root.stat(directory))
    except FileNotFoundError as error:
        raise PathCallConflictError("A directory vanished while the tree was recorded.", path=directory) from error
    if not now.unchanged(expected):
        raise PathCallConflictError("A directory changed while the tree was recorded.", path=directory)
    return listed


def _entry(root: VaultRoot, path: bytes, place: bytes, found: os.stat_result, content: str) -> TreeEntry:
    identity = FileIdentity.from_stat(found)
    target = None
    try:
        if stat.S_ISLNK(found.st_mode):
            target = root.readlink(path)
        if stat.S_ISREG(found.st_mode) and content == "sha256":
            now = capture(root, path).identity
        else:
            now = FileIdentity.from_stat(root.stat(path))  # and this refuses what is mounted there
    except FileNotFoundError as error:
        raise PathCallConflictError("A file vanished while the tree was recorded.", path=path) from error
    if not now.unchanged(identity):
        raise PathCallConflictError("A file changed while the tree was recorded.", path=path)
    return TreeEntry(place, found.st_mode, now, target)


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory and name else directory or name
