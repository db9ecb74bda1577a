"""Requests of our own companion process: hints for watchers, answered without changing anything.

The companion (`vaultfs.mount.announce`) touches names through the mount so that the kernel tells inotify watchers of
saves and of changes made outside. It is recognized by its thread id alone. What each request gets is the contract in
`announce`'s docstring; the ghost is the entry it is shown for a name that was deleted outside, so that the kernel
passes its unlink on to us, and tells watchers IN_DELETE when we say yes to it.
"""

from __future__ import annotations

import errno
import os
import stat

import pyfuse3

from vaultfs.mount.attributes import entry_attributes
from vaultfs.mount.context import MountContext
from vaultfs.mount.inodes import GHOST_NUMBER, Directory

__all__ = ["Hints"]


class Hints:
    """Answers for the companion of one mount."""

    def __init__(self, context: MountContext) -> None:
        self._context = context

    def is_companion(self, thread: int) -> bool:
        announcer = self._context.announcer
        return announcer is not None and thread == announcer.thread_id

    def missing(self, parent: Directory, name: bytes) -> pyfuse3.EntryAttributes:
        """The answer to a lookup of a name that does not exist."""
        announcer = self._context.announcer
        if announcer is not None and parent.parent is None and name == announcer.secret_name:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        return self.ghost()

    def ghost(self) -> pyfuse3.EntryAttributes:
        status = os.fstat(self._context.root.fd)
        ghost = entry_attributes(status, GHOST_NUMBER, entry_timeout=0.0, attr_timeout=0.0)
        ghost.st_mode = pyfuse3.ModeT(stat.S_IFREG | 0o600)
        ghost.st_nlink = 1
        ghost.st_size = 0
        return ghost

    def unlink(self, parent: Directory, name: bytes) -> None:
        """Never removes anything: EBUSY if the name came back, otherwise watchers are told of the deletion."""
        if self._context.root.exists(parent.path_of(name)):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
