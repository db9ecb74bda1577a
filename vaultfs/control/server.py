"""The daemon's end of the control socket: threads that answer while the mount works.

It is no part of the mount's event loop on purpose. ``vaultfs status`` is asked when something hangs, and then the
loop may be what hangs. The listener has one thread, and each connection a short-lived one of its own, so that
copying a big draft out does not hold up a status. The threads touch no path on the mount (they would wait for
themselves) and hold no lock of the mount longer than `Provider` takes for a snapshot.

Life of a `ControlServer`: `start` makes the socket, then puts the entry into the register; `close` takes the entry
away first, then the socket. Whoever asks in between gets "connection refused" and treats it as gone.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
from typing import Any

import msgspec

from vaultfs.config import MountOptions
from vaultfs.control import protocol, registry
from vaultfs.control.protocol import KeptDraftInfo, LockInfo, Provider, Reply, Request
from vaultfs.errors import BadRequestError, DraftNotFoundError, VaultError, printable

__all__ = ["ControlServer", "choose_draft"]

_log = logging.getLogger(__name__)

_PATIENCE = 10.0  # seconds for an asker to send its line and to take the answer


class ControlServer:
    """Answers requests about one mount until it is closed. See the module's text."""

    def __init__(self, provider: Provider, options: MountOptions, *, vault_dev: int, vault_ino: int) -> None:
        """`vault_dev` and `vault_ino` are those of the vault's root: by them others notice that it is served,
        whatever path they use.
        """
        self._provider = provider
        self._options = options
        self._vault = (vault_dev, vault_ino)
        self._registration: registry.Registration | None = None
        self._listener: socket.socket | None = None
        self._wake: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    @property
    def entry(self) -> registry.Entry | None:
        """Our entry in the register, while started."""
        return self._registration.entry if self._registration else None

    def start(self) -> None:
        """Listen, and be listed. Raises OSError or VaultError if the register cannot be used; then nothing is left."""
        registration = registry.register(
            vault=self._options.vault,
            mountpoint=self._options.mountpoint,
            vault_dev=self._vault[0],
            vault_ino=self._vault[1],
            log_file=self._options.log_file,
        )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            _bind(listener, registration.entry.socket)
            listener.listen(16)
            self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._thread = threading.Thread(
                target=self._listen, args=(listener, self._wake[0]), name="control", daemon=True
            )
            self._thread.start()
            self._listener, self._registration = listener, registration
            registration.publish()
        except BaseException:
            self._registration = registration
            self.close()
            listener.close()
            raise

    def close(self) -> None:
        """Stop answering and take the entry out of the register. Idempotent; does not wait for running answers."""
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        if self._wake is not None:
            os.write(self._wake[1], b"x")
        if self._thread is not None:
            self._thread.join(_PATIENCE)
            self._thread = None
        if self._wake is not None:
            for descriptor in self._wake:
                os.close(descriptor)
            self._wake = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _listen(self, listener: socket.socket, wake: int) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if wake in ready:
                return
            try:
                connection, _ = listener.accept()
            except OSError:
                # The asker went away again, or there is no descriptor left at this moment; the next may succeed.
                _log.warning("control socket: accept failed", exc_info=True)
                select.select([wake], [], [], 0.1)
                continue
            threading.Thread(target=self._answer, args=(connection,), name="control answer", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_PATIENCE)
            try:
                uid = _peer_uid(connection)
                if uid not in (0, os.geteuid()):
                    _log.warning("control socket: user %d was refused", uid)
                    return
                reply, descriptor = self._handle(_read_line(connection))
            except OSError as error:  # the asker hung up or was too slow: it is its own loss
                _log.info("control socket: %s", error)
                return
            try:
                data = protocol.encode(reply)
                sent = socket.send_fds(connection, [data], [descriptor]) if descriptor is not None else 0
                connection.sendall(data[sent:])
            except OSError as error:
                _log.info("control socket: answer not taken: %s", error)
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    def _handle(self, line: bytes) -> tuple[Reply, int | None]:
        try:
            try:
                request = protocol.decode(line, Request)
            except ValueError as error:
                raise BadRequestError(f"the control socket did not understand: {error}") from None
            return self._dispatch(request)
        except VaultError as error:
            return Reply(ok=False, error=protocol.failure_of(error)), None
        except Exception as error:
            # One bad answer must not end the thread silently: the asker hears of it, and the log has the traceback.
            _log.exception("control socket: request failed")
            return Reply(ok=False, error=protocol.failure_of(error)), None

    def _dispatch(self, request: Request) -> tuple[Reply, int | None]:
        descriptor: int | None = None
        result: Any = None
        if request.request == "status":
            status = self._provider.status()
            result = msgspec.structs.replace(status, log_file=status.log_file or self._options.log_file)
        elif request.request == "drafts":
            result = self._provider.kept_drafts()
        elif request.request == "draft-content":
            draft = choose_draft(self._provider.kept_drafts(), str(request.arguments.get("id", "")))
            descriptor = self._provider.open_draft(draft.id)
            result = draft
        elif request.request == "locks":
            result = self._provider.locks(str(request.arguments.get("below", "")))
        elif request.request == "reap-lock":
            try:
                lock = protocol.decode(request.arguments.get("lock"), LockInfo)
            except ValueError as error:
                raise BadRequestError(f"the control socket did not understand: {error}") from None
            result = self._provider.reap_lock(lock, force=request.arguments.get("force") is True)
        elif request.request == "stop":
            _log.info("asked to stop")
            self._provider.stop()
        else:
            raise BadRequestError(f"this daemon does not know the request {printable(request.request)}")
        return Reply(ok=True, result=protocol.plain(result)), descriptor


def choose_draft(drafts: list[KeptDraftInfo], wanted: str) -> KeptDraftInfo:
    """The draft with the id `wanted`, or the only one whose id begins so. Raises DraftNotFoundError."""
    matching = [draft for draft in drafts if draft.id == wanted]
    if not matching and wanted:
        matching = [draft for draft in drafts if draft.id.startswith(wanted)]
    if not matching:
        raise DraftNotFoundError(f"there is no draft {printable(wanted) or 'without an id'}")
    if len(matching) > 1:
        raise DraftNotFoundError(
            f"{len(matching)} drafts begin with {printable(wanted)}", remedy="Write more of the id."
        )
    return matching[0]


def _bind(listener: socket.socket, path: str) -> None:
    """Bind with mode 0600 from the first moment on.

    The mode is set on the socket before it has a name (Linux: the name takes it over), since the umask belongs to
    the whole process and other threads make files meanwhile.
    """
    os.fchmod(listener.fileno(), 0o600)
    with registry.socket_path(path) as name:
        listener.bind(name)


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def _read_line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(8192)
        data += piece
        if not piece or len(data) > protocol.MAXIMUM_REQUEST:
            raise ConnectionAbortedError("no complete request")
    return data
