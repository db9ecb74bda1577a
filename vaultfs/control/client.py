"""The command line's end of the control socket: one function for each request.

Every function takes an `Entry` of the register and a time limit in seconds, and raises

* `NoAnswerError` if the daemon cannot be reached or does not answer in time (the mount may hang, or be ending),
* the daemon's own error, as a class of `vaultfs.errors`, if it says that something could not be done.
"""

from __future__ import annotations

import os
import socket
from typing import Any, TypeVar

from vaultfs.control import protocol
from vaultfs.control.protocol import KeptDraftInfo, LockInfo, LocksInfo, MountStatus, Reply, Request
from vaultfs.control.registry import Entry, socket_path
from vaultfs.errors import NoAnswerError

__all__ = ["draft_content", "drafts", "locks", "reap_lock", "status", "stop"]

_PATIENCE = 5.0
_WALK = 60.0  # seconds for what walks through the whole vault
_T = TypeVar("_T")


def status(entry: Entry, timeout: float = _PATIENCE) -> MountStatus:
    """What the daemon says about its mount."""
    return _shape(entry, _ask(entry, "status", timeout)[0], MountStatus)


def drafts(entry: Entry, timeout: float = _PATIENCE) -> list[KeptDraftInfo]:
    """The kept drafts of the mount."""
    return _shape(entry, _ask(entry, "drafts", timeout)[0], list[KeptDraftInfo])


def draft_content(entry: Entry, draft_id: str, timeout: float = _PATIENCE) -> tuple[KeptDraftInfo, int]:
    """A kept draft and a read-only descriptor of its content, which the caller closes.

    Raises DraftNotFoundError for an id (or the beginning of one) that names none or several.
    """
    result, descriptor = _ask(entry, "draft-content", timeout, {"id": draft_id})
    try:
        draft = _shape(entry, result, KeptDraftInfo)
        if descriptor is None:
            raise NoAnswerError("the daemon sent no content", path=entry.mountpoint)
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise
    return draft, descriptor


def locks(entry: Entry, below: str = "", timeout: float = _WALK) -> LocksInfo:
    """The locks of the mount's vault, or of what is below (or is) `below`, vault-relative."""
    return _shape(entry, _ask(entry, "locks", timeout, {"below": below})[0], LocksInfo)


def reap_lock(entry: Entry, lock: LockInfo, *, force: bool, timeout: float = _PATIENCE) -> str:
    """Has the daemon remove `lock`, if it is still that one; what became of it (`vaultfs.locks.reaper.Removal`)."""
    arguments = {"lock": protocol.plain(lock), "force": force}
    return _shape(entry, _ask(entry, "reap-lock", timeout, arguments)[0], str)


def stop(entry: Entry, timeout: float = _PATIENCE) -> None:
    """Ask the daemon to publish what is complete, unmount and end. Returns before it has."""
    _ask(entry, "stop", timeout)


def _shape(entry: Entry, value: Any, kind: type[_T]) -> _T:
    try:
        return protocol.decode(value, kind)
    except ValueError as error:
        raise NoAnswerError(
            f"the daemon (version {entry.version}) answers in a way that is not understood: {error}",
            path=entry.mountpoint,
            remedy="It is probably of another version: unmount and mount again.",
        ) from error


def _ask(entry: Entry, request: str, timeout: float, arguments: dict[str, Any] | None = None) -> tuple[Any, int | None]:
    descriptors: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(timeout)
            with socket_path(entry.socket) as path:
                connection.connect(path)
            connection.sendall(protocol.encode(Request(request, arguments=arguments or {})))
            data = b""
            while not data.endswith(b"\n"):
                piece, received, _, _ = socket.recv_fds(connection, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC)
                descriptors += received
                data += piece
                if not piece or len(data) > protocol.MAXIMUM_REPLY:
                    raise ConnectionAbortedError("it hung up")
        reply = protocol.decode(data, Reply)
        if not reply.ok:
            if reply.error is None:
                raise ValueError("an error without words")
            raise protocol.revive(reply.error)
        return reply.result, descriptors.pop(0) if descriptors else None
    except TimeoutError:
        raise NoAnswerError(
            f"the daemon (pid {entry.pid}) does not answer within {timeout:g} s", path=entry.mountpoint
        ) from None
    except (OSError, ValueError) as error:
        raise NoAnswerError(f"the daemon (pid {entry.pid}) does not answer: {error}", path=entry.mountpoint) from None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
