"""Whether a directory may be renamed or removed as far as locks are concerned.

A lock below it that somebody lives by would be carried away from under its owner. Residue and the locks of the dead
are no obstacle: they go along, or are reaped. The walk is bounded, since a directory may hold a whole disk; what it
does not reach is not known, and the answer says so by being None.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from vaultfs.errors import UnsafePathError
from vaultfs.locks.liveness import Verdict
from vaultfs.locks.places import SUFFIX

if TYPE_CHECKING:
    from vaultfs.locks.path_lock import PathLocks
    from vaultfs.locks.report import LockReport
    from vaultfs.root import VaultRoot

__all__ = ["lock_below"]


def lock_below(root: VaultRoot, locks: PathLocks, directory: bytes, *, limit: int = 10_000) -> LockReport | None:
    """The first lock found below `directory` whose owner lives, or may live; None if there is none.

    Looks at most at `limit` entries. Locks that `locks` itself holds count as well, private ones included (private
    locks of others cannot be told from their names). Raises OSError if `directory` cannot be listed.
    """
    prefix = directory + b"/"
    for path in locks.held:
        if path.startswith(prefix) and (report := locks.inspect(path)) is not None:
            return report
    waiting = [(directory, root.scandir(directory))]
    while waiting and limit > 0:
        at, entries = waiting.pop()
        for name, status in entries[:limit]:
            if not stat.S_ISDIR(status.st_mode):
                continue
            path = at + b"/" + name
            if name.endswith(SUFFIX) and name != SUFFIX:
                report = locks.inspect_at(path)
                if report is not None and report.verdict in (Verdict.ALIVE, Verdict.UNKNOWN, Verdict.OURS):
                    return report
                if report is None or report.verdict is not Verdict.FOREIGN:
                    continue
            try:
                waiting.append((path, root.scandir(path)))
            except (OSError, UnsafePathError):
                continue  # gone meanwhile, or closed to us: no lock that we could honour
        limit -= len(entries)
    return None
