"""What stands at the place of a lock, told: which lock it is, who made it, the verdict, and why.

`examine` is the one look behind `PathLocks.inspect` and ``vaultfs locks``. It touches nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from vaultfs.locks.liveness import Judge, Judgement, Verdict
from vaultfs.locks.records import LockContents, OwnerRecord, look_into

if TYPE_CHECKING:
    from vaultfs.root import VaultRoot

__all__ = ["Examined", "LockReport", "examine", "mark_of", "program_of"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LockReport(msgspec.Struct, frozen=True):
    """What was found at the lock of a path. `verdict` is a `liveness.Verdict`.

    `path` is what the lock is for; b"" for a private lock whose path is not known (its name is a hash). `mark` names
    this very lock, so that what is removed later is what was shown. `since` is the owner's `created_at`.
    """

    path: bytes
    lock_path: bytes
    verdict: str
    pid: int | None
    program: str | None
    host: str | None
    age_s: float
    evidence: str
    suspect: bool = False
    since: str | None = None
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Examined:
    """A report and what it was made from; `contents` is None for what is no directory."""

    report: LockReport
    contents: LockContents | None
    look_again: float  # seconds after which a second look may prove more; 0: no use in hurrying


def mark_of(contents: LockContents) -> str:
    """A text that no other lock has: the directory's inode and birth, and the owner's token."""
    token = contents.owner.token if contents.owner is not None else ""
    return f"{contents.dev}:{contents.ino}:{contents.btime_ns}:{token}"


def program_of(judge: Judge, owner: OwnerRecord | None, judgement: Judgement) -> str | None:
    """The program that holds the lock, if it runs here; else the tool that its record names."""
    if owner is None:
        return None
    here = judgement.alive_here or judgement.verdict is Verdict.OURS
    return (judge.processes.program(owner.pid) if here else None) or owner.tool


def examine(
    root: VaultRoot,
    path: bytes,
    place: bytes,
    judge: Judge,
    judgement_of: Callable[[bytes, LockContents], tuple[Judgement, float]],
) -> Examined | None:
    """Looks once at whatever stands at `place` (vault-relative), the lock of `path`; None if nothing does.

    `judgement_of(place, contents)` gives the verdict and the lock's age in seconds: the looks that were made before
    are its caller's. Raises UnsafePathError, OSError.
    """
    try:
        with root.parent(place) as (directory, name):
            try:
                lock = os.open(name, _DIRECTORY, dir_fd=directory)
            except NotADirectoryError:
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                age = judge.clocks.wall() - status.st_mtime
                kind = "a link" if stat.S_ISLNK(status.st_mode) else "no directory"
                return Examined(
                    LockReport(path, place, Verdict.FOREIGN, None, None, None, age, f"it is {kind}"), None, 0.0
                )
            except PermissionError:
                report = LockReport(path, place, Verdict.UNKNOWN, None, None, None, 0.0, "it may not be read")
                return Examined(report, None, 0.0)
    except FileNotFoundError:
        return None
    try:
        contents = look_into(lock)
    finally:
        os.close(lock)
    judgement, age = judgement_of(place, contents)
    owner = contents.owner
    other = contents.other
    report = LockReport(
        path=path,
        lock_path=place,
        verdict=judgement.verdict,
        pid=owner.pid if owner else other.pid if other else None,
        program=program_of(judge, owner, judgement),
        host=owner.host if owner else None,
        age_s=age,
        evidence=judgement.evidence,
        suspect=judgement.suspect,
        since=owner.created_at if owner else None,
        mark=mark_of(contents),
    )
    return Examined(report, contents, judgement.look_again)
