"""What a mount tells about itself: the records behind ``vaultfs status`` and ``vaultfs drafts``.

Their fields are the documented, stable JSON of both commands (docs/command-line.md). Paths are vault-relative text as
``os.fsdecode`` gives it, with undecodable bytes as lone surrogates.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ["HeldLockInfo", "KeptDraftInfo", "MountStatus", "OpenDraft"]


class OpenDraft(msgspec.Struct):
    """A draft that somebody works on at this moment."""

    path: str  # vault-relative
    size: int  # bytes
    age_s: float  # since it was opened
    kind: str  # edit, append, replacement, new
    pid: int  # the writer's; 0 if not known
    program: str
    changed: bool  # False: opened for writing, nothing written yet


class HeldLockInfo(msgspec.Struct):
    """A path lock that this daemon holds."""

    path: str
    held_s: float
    private: bool = False  # kept in the state directory, not beside the file


class KeptDraftInfo(msgspec.Struct):
    """A draft that could not be published, or a version that was displaced; kept until somebody decides."""

    id: str
    path: str  # where it belongs, vault-relative
    size: int
    when: str  # ISO 8601, UTC
    program: str
    pid: int
    uid: int
    reason: str  # in words
    kind: str = "edit"


class MountStatus(msgspec.Struct):
    """Everything `vaultfs status` shows about one mount."""

    vault: str
    mountpoint: str
    pid: int
    since: str  # ISO 8601, UTC
    version: str
    state: Literal["serving", "read-only", "stopping"] = "serving"
    reason: str | None = None  # why it is read-only
    drafts: list[OpenDraft] = []
    locks: list[HeldLockInfo] = []
    counters: dict[str, int] = {}  # saves, conflicts, busy, errors, …
    kept: list[KeptDraftInfo] = []
    retries: list[str] = []  # paths whose publishing is tried again, vault-relative
    options: dict[str, Any] = {}
    log_file: str | None = None
