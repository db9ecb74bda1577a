"""What a mount tells about itself: the records behind ``vaultfs status``, ``drafts`` and ``locks``.

Their fields are the documented, stable JSON of these commands (docs/command-line.md). Paths are vault-relative text as
``os.fsdecode`` gives it, with undecodable bytes as lone surrogates.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import msgspec

from vaultfs.locks.report import LockReport
from vaultfs.locks.survey import PRIVATE, SurveyResult

__all__ = [
    "HeldLockInfo",
    "KeptDraftInfo",
    "LockInfo",
    "LocksInfo",
    "MountStatus",
    "OpenDraft",
    "lock_info",
    "lock_report",
    "locks_info",
]


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


class LockInfo(msgspec.Struct):
    """A path lock that stands in the vault, whoever made it."""

    path: str  # what it is for, vault-relative; "" if that cannot be told (a private lock's name is a hash)
    lock_path: str  # the lock directory, vault-relative
    verdict: str  # ours, alive, dead, residue, foreign, unknown
    evidence: str  # for the verdict, in words
    age_s: float  # since it was last touched
    pid: int | None = None
    program: str | None = None
    host: str | None = None
    since: str | None = None  # as its owner says; ISO 8601, UTC
    suspect: bool = False  # alive, but its pid may be another process by now
    private: bool = False  # kept in the state directory, not beside the file
    mark: str = ""  # names this very lock


class LocksInfo(msgspec.Struct):
    """The locks of a vault. `closed`: directories that could not be looked into."""

    locks: list[LockInfo]
    closed: list[str] = []


def lock_info(report: LockReport) -> LockInfo:
    """`report` as it is told."""
    return LockInfo(
        path=os.fsdecode(report.path),
        lock_path=os.fsdecode(report.lock_path),
        verdict=str(report.verdict),
        evidence=report.evidence,
        age_s=report.age_s,
        pid=report.pid,
        program=report.program,
        host=report.host,
        since=report.since,
        suspect=report.suspect,
        private=report.lock_path.startswith(PRIVATE + b"/"),
        mark=report.mark,
    )


def locks_info(result: SurveyResult) -> LocksInfo:
    """`result` as it is told."""
    return LocksInfo([lock_info(report) for report in result.locks], [os.fsdecode(path) for path in result.closed])


def lock_report(info: LockInfo) -> LockReport:
    """The other way: which lock `info` tells of."""
    return LockReport(
        path=os.fsencode(info.path),
        lock_path=os.fsencode(info.lock_path),
        verdict=info.verdict,
        pid=info.pid,
        program=info.program,
        host=info.host,
        age_s=info.age_s,
        evidence=info.evidence,
        suspect=info.suspect,
        since=info.since,
        mark=info.mark,
    )


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
