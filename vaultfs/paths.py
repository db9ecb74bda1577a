"""Vault paths as text: what a clean one is, and how to make one of what a person wrote.

A *clean* path is relative to the vault root, in bytes, components separated by single slashes; no component is
empty, ``.`` or ``..``; no NUL. Everything in the core takes clean paths, and `require_clean` is asked before any of
them reaches a system call: a ``..`` that slipped through would be resolved by calls such as unlinkat(2), and a NUL
would cut the path short. ``b""`` is the root, where a call allows it.

Nothing here looks at the file system.
"""

from __future__ import annotations

import errno
import os

from vaultfs.errors import PathKind, UnsafePathError

__all__ = ["relative_path", "require_clean"]

_UNCLEAN = frozenset((b"", b".", b".."))
_DOT, _SLASH = b"./"


def require_clean(path: bytes) -> None:
    """Raise UnsafePathError (EMPTY, INVALID, ESCAPES) unless every component of `path` is a plain name.

    The first line lets nearly everything pass at the price of a few searches; hidden names get the second look.
    """
    if path and b"\0" not in path and b"//" not in path and b"/." not in path:
        if path[0] != _DOT and path[0] != _SLASH and path[-1] != _SLASH:
            return
    elif not path:
        raise UnsafePathError(PathKind.EMPTY, path, "the vault itself cannot be used here")
    if b"\0" in path:
        raise UnsafePathError(PathKind.INVALID, path, "a path holds no NUL")
    unclean = _UNCLEAN.intersection(path.split(b"/"))
    if b".." in unclean:
        raise UnsafePathError(PathKind.ESCAPES, path)
    if unclean:
        raise UnsafePathError(PathKind.INVALID, path, "a path has neither empty components nor '.'")


def relative_path(
    path: str | bytes | os.PathLike[str], vault: bytes, name_max: int, *, label: str = "path", code: str = "unsafe-path"
) -> bytes:
    """What a user wrote, as a clean path, or ``b""`` for the root: see `VaultRoot.relative`.

    `vault` is the vault's absolute path, `name_max` the longest name in bytes; `label` and `code` go into the error.
    """
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError as error:
        component = str(path).encode("utf-8", "replace")
        raise UnsafePathError(PathKind.INVALID, component, label=label, code=code) from error
    if not raw:
        raise UnsafePathError(PathKind.EMPTY, raw, label=label, code=code)
    if b"\0" in raw:
        raise UnsafePathError(PathKind.INVALID, raw, label=label, code=code)
    inside = raw
    if raw.startswith(b"/"):
        prefix = vault.rstrip(b"/")
        if raw != vault and not raw.startswith(prefix + b"/"):
            raise UnsafePathError(PathKind.ESCAPES, raw, label=label, code=code)
        inside = raw[len(prefix) :]
    components: list[bytes] = []
    for component in inside.split(b"/"):
        if component == b"..":
            if not components:
                raise UnsafePathError(PathKind.ESCAPES, raw, label=label, code=code)
            components.pop()
        elif component not in (b"", b"."):
            if len(component) > name_max:
                number = errno.ENAMETOOLONG
                raise UnsafePathError(PathKind.NAME_TOO_LONG, raw, label=label, code=code, cause_errno=number)
            components.append(component)
    return b"/".join(components)
