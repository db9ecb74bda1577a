"""Where the lock of a path stands, and what is a lock by its name.

The *public* lock of ``DIR/NAME`` is the directory ``DIR/NAME.lock``: other tools look there and nowhere else. The
*private* one is ``.vaultfs/locks/HASH.lock``, with HASH the SHA-256 of the path relative to the vault's root. It
is used

- **by rule**, for paths matched by the vault's ``private-locks`` globs and for names so long that ``.lock`` does
  not fit behind them: everybody who uses the vault decides the same way, so nothing else needs to be looked at;
- **by circumstance**, while something that is no lock has the public name. That may change at any moment, so who
  holds such a lock looks at the public name again before it changes anything (`HeldLock.still_right`).

Globs: ``*``, ``?`` and ``[…]`` match within one component, ``**`` any number of components. A glob that starts
with ``/`` starts at the vault's root; any other may start at every directory (``.git/**`` also means
``project/.git/…``).
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vaultfs.errors import UnsafePathError
from vaultfs.locks.records import is_protocol_name

if TYPE_CHECKING:
    from vaultfs.root import VaultRoot

__all__ = ["DEFAULT_PRIVATE", "SUFFIX", "Globs", "Places", "is_lock_directory", "is_lock_name", "pending_name"]

SUFFIX = b".lock"
DEFAULT_PRIVATE = (".git/**", ".hg/**", ".svn/**")

_PENDING = re.compile(rb".*\.lock\.\d{1,10}\.[0-9A-Za-z-]+\.pending", re.DOTALL)


def pending_name(pid: int, token: str) -> bytes:
    """The name under which a lock is prepared in ``.vaultfs/pending``."""
    return f"{pid}.{token}".encode()


def is_lock_name(name: bytes) -> bool:
    """True for names of lock directories, standing (``NAME.lock``) or being prepared beside (``….pending``)."""
    return (name.endswith(SUFFIX) and name != SUFFIX) or _PENDING.fullmatch(name) is not None


def is_lock_directory(root: VaultRoot, path: bytes) -> bool:
    """True if `path` (vault-relative) is a directory with a lock's name that holds nothing but protocol files.

    An empty one counts: other tools make their lock in that order, or never put anything in. A link, a file, a
    directory with a document in it, or one that cannot be looked into is no lock, and is shown.
    """
    if not is_lock_name(path.rpartition(b"/")[2]):
        return False
    try:
        entries = root.scandir(path)
    except (OSError, UnsafePathError):
        return False  # hiding needs proof: what cannot be looked into is listed, and whoever opens it hears why
    return all(is_protocol_name(name) and stat.S_ISREG(status.st_mode) for name, status in entries)


class Globs:
    """Whether a path is matched by any of some globs; see the top of this file for what they mean."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._expression = re.compile(b"|".join(map(_translate, patterns)) or rb"(?!)", re.DOTALL)

    def match(self, path: bytes) -> bool:
        """True if one of the globs matches all of `path` (vault-relative)."""
        return self._expression.fullmatch(path) is not None


def _translate(pattern: str) -> bytes:
    glob = os.fsencode(pattern)
    anchored = glob.startswith(b"/")
    pieces = []
    for component in glob.strip(b"/").split(b"/"):
        pieces.append(b"**" if component == b"**" else _translate_component(component))
    expression = b"" if anchored else rb"(?:[^/]+/)*"
    for index, piece in enumerate(pieces):
        last = index == len(pieces) - 1
        if piece == b"**":
            expression += rb".+" if last else rb"(?:[^/]+/)*"
        else:
            expression += piece + (b"" if last else b"/")
    return b"(?:" + expression + b")"


def _translate_component(glob: bytes) -> bytes:
    expression, index = b"", 0
    while index < len(glob):
        character = glob[index : index + 1]
        index += 1
        if character == b"*":
            expression += rb"[^/]*"
        elif character == b"?":
            expression += rb"[^/]"
        elif character == b"[" and (end := glob.find(b"]", index + 1)) > 0:
            members = glob[index:end].replace(b"\\", rb"\\").replace(b"[", rb"\[")
            negated = members[:1] in (b"!", b"^")
            expression += b"(?!/)[" + (b"^" + members[1:] if negated else members) + b"]"
            index = end + 1
        else:
            expression += re.escape(character)
    return expression


class Places:
    """Where locks stand in one vault. Pure: asks no file system.

    `private`: globs of paths whose lock is private by rule. `directory`: vault-relative path of private locks.
    `name_max`: the longest name that the vault's file system allows, in bytes.
    """

    def __init__(self, private: Sequence[str], directory: bytes, name_max: int = 255) -> None:
        self._globs = Globs(private)
        self._directory = directory
        self._name_max = name_max

    def private_by_rule(self, path: bytes) -> bool:
        """True if the lock of `path` is private whatever stands beside it."""
        return len(path) - path.rfind(b"/") - 1 + len(SUFFIX) > self._name_max or self._globs.match(path)

    def public(self, path: bytes) -> bytes:
        """The vault-relative path of the public lock of `path`."""
        return path + SUFFIX

    def private(self, path: bytes) -> bytes:
        """The vault-relative path of the private lock of `path`."""
        return self._directory + b"/" + hashlib.sha256(path).hexdigest().encode() + SUFFIX
