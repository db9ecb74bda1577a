"""Locks: who may change what, and when.

- `records`: what a lock says about its owner, read without trusting it
- `liveness`: who is dead, the one table of proof
- `reaper`: taking a lock apart so that nobody else's is hurt
- `places`: where the lock of a path stands
- `making`: a lock on its way onto its name
- `report`: what stands at the place of a lock, told
- `survey`: all locks of a vault, for a person
- `below`: whether locks stand against moving a directory
- `path_lock`: one owner at a time for one path, shared with other tools
- `fence`: one daemon at a time for a whole vault
- `pulse`: a thread for the heartbeats of owners without a timer
"""

from __future__ import annotations

from vaultfs.locks.below import lock_below
from vaultfs.locks.fence import Fence, FenceRecord
from vaultfs.locks.path_lock import Acquisition, HeldLock, PathLocks
from vaultfs.locks.places import DEFAULT_PRIVATE, is_lock_directory, is_lock_name
from vaultfs.locks.report import LockReport
from vaultfs.locks.survey import Survey

__all__ = [
    "DEFAULT_PRIVATE",
    "Acquisition",
    "Fence",
    "FenceRecord",
    "HeldLock",
    "LockReport",
    "PathLocks",
    "Survey",
    "is_lock_directory",
    "is_lock_name",
    "lock_below",
]
