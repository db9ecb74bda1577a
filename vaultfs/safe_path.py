"""The safe-path check: whether a path is safe to work on, and if not, which rule it breaks and where.

`VaultRoot.check` is the way in. The check is for people and for early refusals: it tells the *kind* and the *component*
that is at fault, where a system call has only an errno. It guards nothing by itself, since everything may be different
the moment after; the operations of `VaultRoot` keep the same rules again, at the moment of use.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from vaultfs.errors import PathKind, UnsafePathError

if TYPE_CHECKING:
    from vaultfs.root import VaultRoot

__all__ = ["PathCheck", "check_path"]


class PathCheck(NamedTuple):
    """What stands at a path that `VaultRoot.check` found safe; `kind` and `stat` are None if nothing does."""

    path: bytes
    exists: bool
    kind: Literal["file", "directory"] | None
    stat: os.stat_result | None


def check_path(
    root: VaultRoot,
    path: str | bytes | os.PathLike[str],
    *,
    expected_type: Literal["any", "file", "directory"],
    allow_missing: bool,
    must_not_exist: bool,
    hardlinks: Literal["refuse", "allow"],
    label: str,
    code: str,
) -> PathCheck:
    """See `VaultRoot.check`."""
    try:
        return _check(root, path, expected_type, allow_missing, must_not_exist, hardlinks)
    except UnsafePathError as error:
        if error.kind is PathKind.COMPONENT_LINK and _dangles(root, error.component):
            error.kind = PathKind.COMPONENT_DANGLING
        raise UnsafePathError(
            error.kind, error.component, label=label, code=code, cause_errno=error.cause_errno
        ) from error


def _check(
    root: VaultRoot,
    path: str | bytes | os.PathLike[str],
    expected: str,
    allow_missing: bool,
    must_not_exist: bool,
    hardlinks: str,
) -> PathCheck:
    clean = root.relative(path)
    try:
        found = root.stat(clean)
    except FileNotFoundError as error:
        if allow_missing:
            return PathCheck(clean, False, None, None)
        component = _first(clean, lambda prefix: not root.exists(prefix))
        raise UnsafePathError(PathKind.COMPONENT_MISSING, component, cause_errno=errno.ENOENT) from error
    except NotADirectoryError as error:
        component = _first(clean, lambda prefix: not stat.S_ISDIR(root.stat(prefix).st_mode))
        raise UnsafePathError(PathKind.ANCESTOR_NOT_DIRECTORY, component, cause_errno=errno.ENOTDIR) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UnsafePathError(PathKind.NAME_TOO_LONG, clean, cause_errno=errno.ENAMETOOLONG) from error
        raise
    kind: Literal["file", "directory"]
    if stat.S_ISLNK(found.st_mode):
        raise UnsafePathError(PathKind.COMPONENT_LINK, clean, cause_errno=errno.ELOOP)
    if stat.S_ISREG(found.st_mode):
        kind = "file"
    elif stat.S_ISDIR(found.st_mode):
        kind = "directory"
    else:
        raise UnsafePathError(PathKind.UNSUPPORTED_TYPE, clean)
    if must_not_exist:
        raise UnsafePathError(PathKind.TARGET_PREEXISTING, clean, cause_errno=errno.EEXIST)
    if expected not in ("any", kind):
        number = errno.ENOTDIR if kind == "file" else errno.EISDIR
        raise UnsafePathError(PathKind.WRONG_TYPE, clean, cause_errno=number)
    if kind == "file" and found.st_nlink > 1 and hardlinks == "refuse":
        raise UnsafePathError(PathKind.HARD_LINKED, clean, cause_errno=errno.EMLINK)
    return PathCheck(clean, True, kind, found)


def _first(path: bytes, at_fault: Callable[[bytes], bool]) -> bytes:
    """The shortest prefix of `path` that is `at_fault`; `path` itself if none is any more."""
    end = path.find(b"/")
    while end >= 0:
        if at_fault(path[:end]):
            return path[:end]
        end = path.find(b"/", end + 1)
    return path


def _dangles(root: VaultRoot, link: bytes) -> bool:
    """True if the link leads nowhere. The one place that looks where a link leads: a stat, for the wording."""
    try:
        with root.parent(link) as (directory, name):
            os.stat(name, dir_fd=directory)
    except FileNotFoundError:
        return True
    except (OSError, UnsafePathError):
        return False  # it leads to what we may not see, or changed just now: it is a link all the same
    return False
