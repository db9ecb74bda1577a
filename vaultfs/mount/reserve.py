"""A little space kept back, so that a full vault can be emptied through the mount.

Removing a file takes its path lock, and a lock is a directory with two files: on a full disk it cannot be made, and
nothing could ever be deleted. So a small file in the state directory holds space that is given up when a change that
frees space finds the disk full, and taken back when there is room again. Saves never spend it.
"""

from __future__ import annotations

import errno
import logging
import os

from vaultfs.state import StateDirectory

__all__ = ["FULL", "Reserve"]

log = logging.getLogger(__name__)

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
SIZE = 1 << 17  # bytes: a few locks and their directories on any file system
NAME = b"reserve"


class Reserve:
    """The reserve of one mount. All calls are short; `restore` belongs to the housekeeping."""

    def __init__(self, state: StateDirectory) -> None:
        self._state = state
        self._held = False

    def restore(self) -> None:
        """Hold the space again, if there is room for it."""
        if self._held:
            return
        try:
            descriptor = os.open(
                NAME, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._state.fd
            )
        except OSError as error:
            log.debug("no reserve: %s", error)  # a full or read-only disk: the next pass tries again
            return
        try:
            os.posix_fallocate(descriptor, 0, SIZE)
            self._held = True
        except OSError as error:
            log.debug("no reserve: %s", error)
            self._remove()
        finally:
            os.close(descriptor)

    def spend(self) -> bool:
        """Give the space up; True if that may have made room."""
        held, self._held = self._held, False
        return self._remove() or held

    def _remove(self) -> bool:
        try:
            os.unlink(NAME, dir_fd=self._state.fd)
        except FileNotFoundError:
            return False
        return True
