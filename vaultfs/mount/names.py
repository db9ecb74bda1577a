"""What a name means before anybody opens it: hidden, reserved, live, private; and where a link may lead.

Pure decisions over names and attributes: nothing here touches the vault. The policies are those of contract.md.

Live
    A file is served in place if its name matches a `live` glob, if it is a sibling of such a file (``x.db-wal``,
    ``x.db-shm``, ``x.db-journal``), or if it is a lock file: a lock-like name with at most 64 bytes of content. A
    ``Cargo.lock`` is longer, and a document. Inside the `private-locks` globs lock-like names are no lock files of
    ours: git publishes ``index.lock`` by renaming it. What a file *contains* (an SQLite header) is looked at by
    whoever opens it: `is_database`.

Contained links
    A link's target is contained if it is relative, has ``..`` only at its front, and no more of them than the
    link's directory is deep. Then the kernel, which resolves it through the mount, cannot be led out of the vault.
    It is checked when the link is made and at every readlink, because a link or its directory may be moved.
"""

from __future__ import annotations

import os
import re

from vaultfs.config import MountOptions
from vaultfs.locks.places import Globs

__all__ = ["LOCK_FILE_LIMIT", "SQLITE_HEADER", "NamePolicy", "is_database"]

LOCK_FILE_LIMIT = 64  # bytes
SQLITE_HEADER = b"SQLite format 3\x00"  # https://www.sqlite.org/fileformat.html, section 1.3.1

_LOCK_LIKE = ("*.lock", "*.lck", "*.pid", ".lock", "lock", "LOCK")
_SIBLINGS = (b"-wal", b"-shm", b"-journal")
_STAGING_PREFIX = b".vaultfs-staging-"
_PROTOCOL_FILE = re.compile(rb"\.owner\.json(\..+\.tmp)?|\.lease-.+", re.DOTALL)


def is_database(start: bytes) -> bool:
    """True if a file that begins with `start` is an SQLite database."""
    return start.startswith(SQLITE_HEADER)


class NamePolicy:
    """The decisions for one mount."""

    def __init__(self, options: MountOptions, state_name: bytes | None) -> None:
        self._live = Globs(options.live)
        self._lock_like = Globs(_LOCK_LIKE)
        self._private = Globs(options.private_locks)
        self._state_name = state_name
        self._symlinks = options.symlinks
        self._allowed = [os.fsencode(target) for target in options.allow]

    def is_machinery(self, path: bytes) -> bool:
        """True for the state directory and hidden staging names: they cannot be reached, made or replaced."""
        name = path[path.rfind(b"/") + 1 :]
        return (self._state_name is not None and path == self._state_name) or name.startswith(_STAGING_PREFIX)

    def may_be_lock_directory(self, name: bytes) -> bool:
        """True for names that a path lock or a pending one can have: whether it is one, its content tells."""
        return name.endswith(b".lock") or (name.endswith(b".pending") and b".lock." in name)

    def is_protocol_file(self, directory_name: bytes, name: bytes) -> bool:
        """True for the files inside lock directories: served in place, without drafts or locks."""
        return self.may_be_lock_directory(directory_name) and _PROTOCOL_FILE.fullmatch(name) is not None

    def is_live(self, path: bytes) -> bool:
        """True if the name alone makes the file live (also a new one)."""
        if self._live.match(path):
            return True
        return any(path.endswith(suffix) and self._live.match(path[: -len(suffix)]) for suffix in _SIBLINGS)

    def is_lock_file(self, path: bytes, size: int) -> bool:
        """True if the published file at `path` is a lock file of some program."""
        return size <= LOCK_FILE_LIMIT and self._lock_like.match(path) and not self._private.match(path)

    def link_is_contained(self, target: bytes, depth: int) -> bool:
        """True if a link in a directory `depth` levels below the root may lead to `target`."""
        if self._symlinks == "refuse":
            return False
        if self._symlinks == "allow" and any(
            target == allowed or target.startswith(allowed.rstrip(b"/") + b"/") for allowed in self._allowed
        ):
            return b"/../" not in target + b"/"
        if not target or target.startswith(b"/") or b"\0" in target:
            return False
        parts = [part for part in target.split(b"/") if part not in (b"", b".")]
        upward = 0
        while upward < len(parts) and parts[upward] == b"..":
            upward += 1
        return upward <= depth and b".." not in parts[upward:]
