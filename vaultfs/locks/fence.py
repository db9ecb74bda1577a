"""The fence: one daemon at a time for a whole vault, provable to hosts that cannot see each other's processes.

Calling sequence::

    fence = Fence.acquire(root, state)          # AlreadyServedError names who serves the vault
    ...                                         # every fence.HEARTBEAT seconds: fence.heartbeat()
    with fence.gate():                          # around every change: FenceLostError instead of the change
        ...
    fence.release()

Three files in ``.vaultfs``, none of which is ever removed by name while it might be somebody else's:

``fence.lock``
    On one host the kernel decides: ``flock(LOCK_EX)`` on it guards making, judging and taking over the fence. It is
    held for that moment only, not while serving.
``gate``
    Every change runs under ``flock(LOCK_SH)``, taken *before* ownership is asserted; taking over needs
    ``LOCK_EX``. So a daemon that is frozen outside of a change can be taken over, and finds out before its next
    one; one that is frozen inside a change cannot.
``fence``
    Says who it is, to everybody and to other hosts: a record of fixed length, written by one ``pwrite`` through the
    descriptor that made it, so that a reader sees an old one or a new one.

States: *held* → *released* (the lease is retired: expiry equals the last heartbeat) or → *lost* (somebody took
over; sticky: a lost fence stops writing and never fights back). A lease that ran out while nobody took over (the
machine was asleep) is not lost: the next heartbeat renews it.

Taken over is a holder who is definitely gone (`liveness.Judge.judge_process`), one who released, or one whose
heartbeat stood still for a whole lease, watched on our own monotonic clock: for that, `wait` must be longer than the
lease. The old record is moved aside, compared with what was judged, and put back if it is not that.

What is not promised: on a network file system without working ``flock`` two newcomers may race; both then find out
by the record, and at most one goes on.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Self

import msgspec

from vaultfs import kernel
from vaultfs.errors import (
    AlreadyServedError,
    BadRequestError,
    FenceLostError,
    LockBusyError,
    StateDirectoryError,
)
from vaultfs.locks.liveness import Judge, Verdict, is_local
from vaultfs.locks.pulse import Pulse
from vaultfs.locks.records import NotAPlainFile, read_small_file, whoami

if TYPE_CHECKING:
    from types import TracebackType

    from vaultfs.root import VaultRoot
    from vaultfs.state import StateDirectory

__all__ = ["HEARTBEAT", "LEASE", "WAIT", "Fence", "FenceRecord"]

_log = logging.getLogger(__name__)

LEASE = 60.0  # seconds that a heartbeat promises
HEARTBEAT = 10.0  # seconds between heartbeats
WAIT = 5.0  # seconds that a newcomer waits for a holder to go
LOOK_EVERY = 0.05  # seconds between two looks of a newcomer
RECORD_SIZE = 1024  # bytes, padded with blanks

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_ATTEMPT = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FenceRecord(msgspec.Struct, frozen=True):
    """The record. Times are ISO 8601, UTC; `pid_ns` and `time_ns` say where `pid` and `start_time` count."""

    attempt: str
    pid: int
    host: str | None
    boot_id: str | None
    start_time: int | None
    created_at: str
    heartbeat: int
    heartbeat_at: str
    lease_expires_at: str
    pid_ns: int | None = None
    time_ns: int | None = None
    tool: str | None = None

    @property
    def retired(self) -> bool:
        """True if its holder released it. Needs no clock: a lease that runs never ends at its own heartbeat."""
        return self.lease_expires_at <= self.heartbeat_at

    @property
    def lease(self) -> float:
        """Seconds that the holder promised at its last heartbeat."""
        try:
            ends, began = datetime.fromisoformat(self.lease_expires_at), datetime.fromisoformat(self.heartbeat_at)
            return max((ends - began).total_seconds(), 0.0)
        except (ValueError, TypeError, OverflowError):
            return LEASE


def _encode(record: FenceRecord) -> bytes:
    line = msgspec.json.encode(record)
    return line.ljust(RECORD_SIZE - 1) + b"\n"


def _stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class _Found:
    """What stands at the fence's name: which inode, its bytes, and the record if they are one."""

    dev: int
    ino: int
    raw: bytes
    record: FenceRecord | None


class _Refused(Exception):
    """Why the fence cannot be had right now. Stays in this file."""

    def __init__(self, reason: str, record: FenceRecord | None = None, here: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.record = record
        self.here = here


class Fence:
    """A fence that is held; see the module's calling sequence. Made by `acquire` only.

    `attempt` names this run (and its staging directory). `seized`: the name, below ``.vaultfs/staging``, of the
    predecessor's staging directory if it was renamed away because the predecessor might come back to life.

    Threads: `gate` and `assert_owned` may be used by several; `_mutex` guards the count of changes under way, since
    all of them share one descriptor's flock. One owner calls `heartbeat` and `release`.
    """

    def __init__(
        self, root: VaultRoot, state: StateDirectory, name: bytes, record: FenceRecord, fd: int, gate: int, lease: float
    ) -> None:
        self.attempt = record.attempt
        self.seized: str | None = None
        self._root = root
        self._state = state
        self._name = name
        self._record = record
        self._fd = fd
        self._gate = gate
        self._lease = lease
        status = os.fstat(fd)
        self._identity = (status.st_dev, status.st_ino)
        self._mark = _encode(record)[: len(b'{"attempt":""') + len(record.attempt)]
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._changes = 0
        self._lost: str | None = None
        self._pulse: Pulse | None = None

    # -- getting it ------------------------------------------------------------------------------------------------

    @classmethod
    def acquire(
        cls,
        root: VaultRoot,
        state: StateDirectory,
        *,
        name: str = "",
        attempt: str | None = None,
        tool: str = "vaultfs",
        wait: float = WAIT,
        lease: float = LEASE,
        shared: bool = False,
        judge: Judge | None = None,
    ) -> Fence:
        """The fence of this vault, waiting up to `wait` seconds (sleeping) for a holder to go.

        `name` is "" for the daemon's; a library's own fences have names of letters, digits, ``_.-``.

        Raises AlreadyServedError naming pid, host and since; BadRequestError for a bad name; StateDirectoryError if
        something that is no file stands at one of its names; OSError.
        """
        if name and not _NAME.fullmatch(name):
            raise BadRequestError(f"a fence's name has letters, digits, '_', '.' and '-' only: {name!r}")
        if attempt is not None and not _ATTEMPT.fullmatch(attempt):
            raise BadRequestError(f"an attempt's name has letters, digits, '_' and '-' only: {attempt!r}")
        newcomer = _Newcomer(
            root=root,
            state=state,
            name=f"fence-{name}".encode() if name else b"fence",
            lock_name=f"fencelock-{name}".encode() if name else b"fence.lock",
            gate_name=f"gate-{name}".encode() if name else b"gate",
            attempt=attempt or str(uuid.uuid4()),
            tool=tool,
            lease=lease,
            judge=judge or Judge(whoami(), shared=shared, local=is_local(root.fd)),
        )
        deadline = time.monotonic() + wait
        while True:
            try:
                return newcomer.attempt_once()
            except _Refused as refused:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise _already_served(root, refused) from None
            time.sleep(min(LOOK_EVERY, left))

    # -- having it -------------------------------------------------------------------------------------------------

    @property
    def record(self) -> FenceRecord:
        """What the fence's file says now."""
        return self._record

    @property
    def lost(self) -> bool:
        """True once it was found that somebody took over. Asks nobody; `assert_owned` does."""
        return self._lost is not None

    def assert_owned(self) -> None:
        """Raises FenceLostError unless the fence is ours and the vault is where it was; a few system calls.

        VaultGoneError (its parent class) if only the vault moved: that may be undone, a lost fence may not.
        """
        if self._lost is None:
            self._lost = self._why_lost()
        if self._lost is not None:
            raise FenceLostError(self._lost, path=self._root.path)
        self._root.assert_bound()

    def _why_lost(self) -> str | None:
        if self._fd < 0:
            return "The fence of this vault was released."
        try:
            status = os.stat(self._name, dir_fd=self._state.fd, follow_symlinks=False)
        except FileNotFoundError:
            return "The fence of this vault was removed; nothing more is written by this daemon."
        if (status.st_dev, status.st_ino) != self._identity or os.pread(self._fd, len(self._mark), 0) != self._mark:
            return FenceLostError.__doc__
        try:
            self._state.assert_ours()
        except StateDirectoryError as error:
            return f"The fence of this vault went with {error}"
        return None

    def heartbeat(self) -> None:
        """Renews the lease, also one that ran out while nobody took over. Raises FenceLostError, OSError."""
        self.assert_owned()
        now = datetime.now(UTC)
        record = msgspec.structs.replace(
            self._record,
            heartbeat=self._record.heartbeat + 1,
            heartbeat_at=_stamp(now),
            lease_expires_at=_stamp(now + timedelta(seconds=self._lease)),
        )
        self._write(record)

    def keep(self, every: float = HEARTBEAT) -> None:
        """Has a thread do the heartbeats, for owners without a timer; `release` ends it."""
        if self._pulse is None:
            self._pulse = Pulse(self.heartbeat, every, "vaultfs fence heartbeat")

    @contextmanager
    def gate(self, *, blocking: bool = True) -> Iterator[None]:
        """To be held around every change to the vault; many may be under way at once.

        Raises FenceLostError or VaultGoneError if the vault is not ours to change any more, and, if not `blocking`,
        LockBusyError while somebody is just deciding whether to take it over.
        """
        with self._mutex:
            if self._changes == 0 and self._gate >= 0:
                try:
                    fcntl.flock(self._gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not blocking:
                        raise LockBusyError("Another daemon is about to take this vault over.") from None
                    fcntl.flock(self._gate, fcntl.LOCK_SH)
            self._changes += 1
        try:
            self.assert_owned()  # only now: from here on nobody can take over until this change is done
            yield
        finally:
            with self._mutex:
                self._changes -= 1
                if self._changes == 0 and self._gate >= 0:
                    fcntl.flock(self._gate, fcntl.LOCK_UN)

    def release(self) -> None:
        """Lets the vault go: ends the heartbeat, retires the lease, closes. Idempotent.

        The record stays where it is: by its name we might remove a successor's. Raises FenceLostError, after
        closing everything, if the fence had been lost; OSError likewise.
        """
        if self._fd < 0:
            return
        if self._pulse is not None:
            self._pulse.stop()
        try:
            if os.getpid() != self._pid:
                return  # a child that inherited it: it is the parent's
            lost = self._lost or self._why_lost()
            if lost is not None:
                self._lost = lost
                raise FenceLostError(lost, path=self._root.path)
            now = _stamp(datetime.now(UTC))
            self._write(msgspec.structs.replace(self._record, heartbeat_at=now, lease_expires_at=now))
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
            os.close(self._gate)
            self._fd = self._gate = -1

    def _write(self, record: FenceRecord) -> None:
        if os.pwrite(self._fd, _encode(record), 0) != RECORD_SIZE:
            raise OSError(errno.EIO, "the fence's record was written in part")
        self._record = record

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(slots=True)
class _Newcomer:
    """One process' attempt to get the fence, over several looks. Its clock for silence is the judge's monotonic one."""

    root: VaultRoot
    state: StateDirectory
    name: bytes
    lock_name: bytes
    gate_name: bytes
    attempt: str
    tool: str
    lease: float
    judge: Judge
    seen: _Found | None = None
    seen_since: float = 0.0

    def attempt_once(self) -> Fence:
        """One look under ``flock(fence.lock)``. Raises _Refused, StateDirectoryError, OSError."""
        with self._decision():
            found = self._find()
            if found is None:
                return self._make()
            now = self.judge.clocks.monotonic()
            if self.seen is None or (self.seen.ino, self.seen.raw) != (found.ino, found.raw):
                self.seen, self.seen_since = found, now
            may_revive = self._refuse_unless_gone(found, now - self.seen_since)
            return self._take_over(found, may_revive)

    def _refuse_unless_gone(self, found: _Found, silent: float) -> bool:
        """Raises _Refused if the holder may be at work; else tells whether it might come back to life."""
        record = found.record
        if record is None:  # nobody can hold a fence by it, but its writer may be just at it
            if silent < LOOK_EVERY:
                raise _Refused("by somebody whose fence cannot be read (yet)")
            return False
        if record.retired:
            return False
        judgement = self.judge.judge_process(record)
        if judgement.verdict is Verdict.DEAD:
            return False
        if silent < record.lease:
            raise _Refused(judgement.evidence, record, judgement.alive_here)
        return True

    def _take_over(self, found: _Found, may_revive: bool) -> Fence:
        gate = self._open(self.gate_name)
        try:
            try:
                fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _Refused("it is in the middle of a change", found.record) from None
            seized = self._seize(found.record) if may_revive and found.record is not None else None
            self._set_aside(found)
            fence = self._make()
            fence.seized = seized
            if found.record is not None and not found.record.retired:
                _log.warning(
                    "took this vault over from process %d, since %s", found.record.pid, found.record.created_at
                )
            return fence
        finally:
            os.close(gate)  # and with it the flock: nobody else has this open file description

    def _seize(self, record: FenceRecord) -> str | None:
        """Renames the predecessor's staging away, so that whatever it tries when it wakes up fails with ENOENT."""
        if not _ATTEMPT.fullmatch(record.attempt):
            return None  # not a name that any of us gives to a staging directory
        staging = self.state.name("staging") + b"/"
        seized = f"{record.attempt[:40]}-seized-{uuid.uuid4().hex[:8]}"
        try:
            kernel.renameat2(
                self.state.fd,
                staging + record.attempt.encode(),
                self.state.fd,
                staging + seized.encode(),
                kernel.RENAME_NOREPLACE,
            )
        except FileNotFoundError:
            return None  # it had staged nothing
        return seized

    def _set_aside(self, found: _Found) -> None:
        """Moves the old record off the name and removes it if it is what was judged; else puts it back.

        Another host, for which our flock may mean nothing, can have put a new one there since; or the holder's
        heartbeat came after all.
        """
        aside = self.name + b".taken-" + self.attempt.encode()
        try:
            kernel.renameat2(self.state.fd, self.name, self.state.fd, aside, kernel.RENAME_NOREPLACE)
        except FileNotFoundError:
            raise _Refused("somebody else is taking it over") from None
        moved = self._read(aside)
        if moved is None or (moved.dev, moved.ino, moved.raw) != (found.dev, found.ino, found.raw):
            try:
                kernel.renameat2(self.state.fd, aside, self.state.fd, self.name, kernel.RENAME_NOREPLACE)
            except FileExistsError:
                # Yet another one took the name: what we hold is a fence that was lost before we could put it back.
                _log.warning("left a fence that was taken over at the same moment as %s", os.fsdecode(aside))
            raise _Refused("somebody else is taking it over, or it came back to life", moved.record if moved else None)
        os.unlink(aside, dir_fd=self.state.fd)

    def _make(self) -> Fence:
        me, now = self.judge.me, datetime.now(UTC)
        record = FenceRecord(
            attempt=self.attempt,
            pid=me.pid,
            host=me.host,
            boot_id=me.boot_id,
            start_time=me.start_time,
            created_at=_stamp(now),
            heartbeat=1,
            heartbeat_at=_stamp(now),
            lease_expires_at=_stamp(now + timedelta(seconds=self.lease)),
            pid_ns=me.pid_ns,
            time_ns=me.time_ns,
            tool=self.tool,
        )
        gate, fd = self._open(self.gate_name), -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                fd = os.open(self.name, flags, 0o600, dir_fd=self.state.fd)
            except FileExistsError:
                raise _Refused("somebody on another host was faster") from None
            fence = Fence(self.root, self.state, self.name, record, fd, gate, self.lease)
            fence._write(record)
            os.fsync(fd)
            os.fsync(self.state.fd)
            return fence
        except BaseException:
            if fd >= 0:
                os.close(fd)  # an unfinished record stays: it counts as expired, and by name it might be another's
            os.close(gate)
            raise

    # -- the files -------------------------------------------------------------------------------------------------

    @contextmanager
    def _decision(self) -> Iterator[None]:
        """``flock(LOCK_EX)`` on the lock file that stands at its name while we hold it."""
        lock = self._open(self.lock_name)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _Refused("somebody else is just claiming it") from None
            status = os.fstat(lock)
            try:
                named = os.stat(self.lock_name, dir_fd=self.state.fd, follow_symlinks=False)
            except FileNotFoundError:
                named = None
            if named is None or not os.path.samestat(status, named):
                raise _Refused("its lock file was just exchanged")  # then two could hold "the" flock: look again
            yield
        finally:
            os.close(lock)

    def _open(self, name: bytes) -> int:
        try:
            descriptor = os.open(name, _LOCK_FLAGS, 0o600, dir_fd=self.state.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise StateDirectoryError("is no plain file", path=self.state.path + b"/" + name) from error
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise StateDirectoryError("is no plain file", path=self.state.path + b"/" + name)
        return descriptor

    def _find(self) -> _Found | None:
        return self._read(self.name)

    def _read(self, name: bytes) -> _Found | None:
        try:
            status = os.stat(name, dir_fd=self.state.fd, follow_symlinks=False)
            raw = read_small_file(self.state.fd, name)
        except FileNotFoundError:
            return None
        except NotAPlainFile as error:
            raise StateDirectoryError(f"{error}", path=self.state.path + b"/" + name) from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise StateDirectoryError("is no plain file", path=self.state.path + b"/" + name) from error
            raise
        try:
            record: FenceRecord | None = msgspec.json.decode(raw, type=FenceRecord)
        except msgspec.DecodeError:
            record = None  # counts as expired: nobody can hold a fence by a record that cannot be read
        return _Found(status.st_dev, status.st_ino, raw, record)


def _already_served(root: VaultRoot, refused: _Refused) -> AlreadyServedError:
    record = refused.record
    if record is None:
        return AlreadyServedError(f"This vault is being served already ({refused.reason}).", path=root.path)
    where = "" if refused.here else f" on {'another host' if record.host else 'an unknown host'}"
    if record.host is not None and record.host == whoami().host:
        where = ""
    return AlreadyServedError(
        f"This vault is being served already, by process {record.pid}{where} since {record.created_at} "
        f"({refused.reason}).",
        path=root.path,
        pid=record.pid,
        host=record.host,
        since=record.created_at,
        start_time=record.start_time if refused.here else None,
    )
