"""What is said over the control socket, and who has to answer.

A daemon listens on a Unix stream socket that lies outside every vault (`vaultfs.control.registry` says where).
A connection carries one request, one reply, and ends::

    → {"v": 1, "request": "status", "arguments": {}}\\n
    ← {"ok": true, "result": {...}}\\n                            or
    ← {"ok": false, "error": {"kind": "DraftNotFoundError", "message": "...", "hint": "...", "exit_code": 6}}\\n

=============  =======================  ==================================================================
request        arguments                result
=============  =======================  ==================================================================
status         —                        `MountStatus`
drafts         —                        list of `KeptDraftInfo`
draft-content  ``id`` (prefix allowed)  `KeptDraftInfo`; a read-only descriptor of the content comes with
                                        the reply (SCM_RIGHTS), so that the *asker* copies it, with its own
                                        rights, wherever it likes: also onto the mount, which the daemon
                                        itself must never touch
locks          ``below`` (directory,    `LocksInfo`: the locks of the vault, or of what is below (or is) `below`;
               file or lock)            takes as long as a walk through the vault
reap-lock      ``lock`` (a `LockInfo`), what became of it (`vaultfs.locks.reaper.Removal`): removed, lost, left
               ``force``
stop           —                        null, at once; the daemon then publishes what is complete, keeps the
                                        rest as drafts, unmounts and ends
=============  =======================  ==================================================================

Readers ignore keys they do not know; a request that is not known is answered with an error. Only the daemon's
own user and root are answered (SO_PEERCRED), whatever the socket's mode says.

File names are Unix bytes, and JSON text is not: names travel as ``os.fsdecode`` gives them, undecodable bytes as
lone surrogates, written ``\\udcff`` by the standard library's ``json`` (msgspec refuses to encode them). That is
why messages go through ``json`` here and msgspec only checks their shape.

`Provider` is what the mount implements. Its methods are called from threads of the control server, several at a
time, and answer from snapshots: they never wait for a request of the kernel, a lock or a disk longer than a
moment, so that ``vaultfs status`` tells the truth about a mount that hangs.
"""

from __future__ import annotations

import builtins
import json
from typing import Any, Protocol, TypeVar

import msgspec

from vaultfs import errors
from vaultfs.errors import VaultError, exit_code_of, hint_of, words_of
from vaultfs.mount.status import HeldLockInfo, KeptDraftInfo, LockInfo, LocksInfo, MountStatus, OpenDraft

__all__ = [
    "MAXIMUM_REPLY",
    "MAXIMUM_REQUEST",
    "VERSION",
    "Failure",
    "HeldLockInfo",
    "KeptDraftInfo",
    "LockInfo",
    "LocksInfo",
    "MountStatus",
    "OpenDraft",
    "Provider",
    "Reply",
    "Request",
    "decode",
    "encode",
    "failure_of",
    "loads",
    "plain",
    "revive",
]

VERSION = 1
MAXIMUM_REQUEST = 64 << 10  # bytes; longer ones are refused unread
MAXIMUM_REPLY = 64 << 20

_T = TypeVar("_T")


class Provider(Protocol):
    """The mount, as the control server sees it. All methods are thread-safe and quick."""

    def status(self) -> MountStatus:
        """A snapshot of everything that is to be told."""

    def kept_drafts(self) -> list[KeptDraftInfo]:
        """The kept drafts, oldest first."""

    def open_draft(self, draft_id: str) -> int:
        """A new read-only descriptor of the content of the kept draft `draft_id`; the caller closes it.

        Raises DraftNotFoundError.
        """

    def locks(self, below: str) -> LocksInfo:
        """The locks of the vault, those of the daemon among them; of all below `below` (vault-relative) only.

        The one method that may take long: it walks through the vault (in a thread of its own). Raises UnsafePathError,
        OSError.
        """

    def reap_lock(self, lock: LockInfo, *, force: bool) -> str:
        """Removes `lock` if it is still that one, and dead or residue (`force`: whatever it is, but our own).

        Returns a `vaultfs.locks.reaper.Removal`. Raises UnsafePathError, OSError.
        """

    def stop(self) -> None:
        """Ask the daemon to publish what is complete, keep the rest, unmount and end; returns at once."""


class Request(msgspec.Struct):
    request: str
    v: int = VERSION
    arguments: dict[str, Any] = {}


class Failure(msgspec.Struct):
    """An error on its way to the command line: what `vaultfs.errors` says about it, in plain values."""

    kind: str
    message: str
    hint: str
    exit_code: int


class Reply(msgspec.Struct):
    ok: bool
    result: Any = None
    error: Failure | None = None


def failure_of(error: BaseException) -> Failure:
    """`error` as it is sent: class name, message, hint and exit code of the one table."""
    return Failure(type(error).__name__, words_of(error), hint_of(error), exit_code_of(error))


def revive(failure: Failure) -> Exception:
    """The error that the daemon met, to be raised here with the daemon's words: of the same class where that is one
    of the family or an OSError, since the exit code hangs on the class.
    """
    family = getattr(errors, failure.kind, None) or getattr(builtins, failure.kind, None)
    if isinstance(family, type) and issubclass(family, OSError):
        return family(failure.message)
    if not (isinstance(family, type) and issubclass(family, VaultError)):
        family = VaultError
    # Some of the family want to be told more than crosses the socket; the message holds it all in words.
    error: VaultError = family.__new__(family)
    VaultError.__init__(error, failure.message, remedy=failure.hint)
    return error


def plain(record: Any) -> Any:
    """`record` (structs, lists, …) as dicts and lists, for ``json``."""
    return msgspec.to_builtins(record)


def encode(record: Any) -> bytes:
    """One line for the wire."""
    return json.dumps(plain(record), separators=(",", ":")).encode("ascii") + b"\n"


def loads(line: bytes) -> Any:
    """The plain values of one line. Raises ValueError."""
    return json.loads(line)


def decode(line: bytes | Any, kind: type[_T]) -> _T:
    """A record from a line (or from plain values already). Raises ValueError if it has another shape."""
    value = loads(line) if isinstance(line, bytes) else line
    return msgspec.convert(value, kind)  # ValidationError is a ValueError
