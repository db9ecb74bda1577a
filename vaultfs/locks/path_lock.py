"""The path lock: one owner at a time for ``DIR/NAME``, shared with every tool that knows ``NAME.lock/``.

Calling sequence, for a program that may wait::

    locks = PathLocks(root, state)
    with locks.acquire(b"daily/today.md", timeout=2) as held:    # LockBusyError at the deadline
        ...                                                     # change the file
        held.assert_owned()                                     # right before what cannot be undone

and for an event loop, which must never sleep in here::

    acquisition = locks.begin(b"daily/today.md")
    while not isinstance(step := acquisition.step(), HeldLock):
        if step is None:
            ...                                                 # busy; acquisition.holder says who has it
        await trio.sleep(step)
    held = step

The states of a lock of ours, on disk and in hand:

    prepared    ``.vaultfs/pending/PID.TOKEN/`` with owner and lease: exists within one `step` only
    standing    renamed onto its name, without replacing: from here on others see it, always complete
    released    lease, owner, directory removed through the descriptor that was opened when it was made
    stray       the release failed, or its directory was moved away with the lock in it: it stands, and is removed
                by this same object when it meets it again under whatever name
    lost        somebody took it from us; `assert_owned` says so, `release` leaves alone what stands there now

`HeldLock` is a handle on a standing lock; a lock is released when its last handle is. Each handle has one owner, who
calls `release` (or leaves the ``with`` block) exactly where the change is over. A child process that inherits a
handle by fork cannot release it.

`PathLocks` may be used by several threads: `_mutex` guards what it remembers (`_standing`, `_strays`,
`_released`, `_watches`), and is never held during a wait, only during the few system calls of one look's
judgement. Nobody acquires a lock while holding another, except a rename, which takes both in byte order.

What is not promised: fairness, and protection against programs that do not look for locks.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from vaultfs.errors import (
    BadRequestError,
    ForeignLockError,
    LockBrokenError,
    LockBusyError,
    UnsafePathError,
    VaultError,
    printable,
)
from vaultfs.locks.liveness import Judge, Judgement, Verdict, Watch, Watches, is_local
from vaultfs.locks.making import beside_name, exchange_owner, new_record, put_in_place, sweep
from vaultfs.locks.places import DEFAULT_PRIVATE, SUFFIX, Places, pending_name
from vaultfs.locks.reaper import (
    Removal,
    remove_directory,
    remove_judged,
    same_directory,
    unlink_if_there,
)
from vaultfs.locks.records import (
    OWNER,
    LockContents,
    OwnerRecord,
    lease_name,
    look_into,
    whoami,
)
from vaultfs.locks.report import LockReport, examine, program_of
from vaultfs.locks.survey import Survey

if TYPE_CHECKING:
    from vaultfs.root import VaultRoot
    from vaultfs.state import StateDirectory

__all__ = ["Acquisition", "HeldLock", "PathLocks"]

_log = logging.getLogger(__name__)

LOOK_EVERY = 0.010  # seconds between two looks at a lock that stands
OWN_LOOK_EVERY = 0.002  # the same if it is our own: no system call is needed to see that it is gone
GAP = 0.0015  # seconds between two locks of ours at one path: peers give up after meeting three releases in a row
VANISHED_RETRIES = 3  # looks per acquisition that may fail because a component of the lock's path vanished
AT_ONCE = 4  # times that one step starts over at once, after a reap or a collision, before it asks to be called again
REFRESH_AFTER = 3.0  # seconds after which a lock that is held refreshes its mtime and has a heartbeat
LEASE_MS = 60_000  # what a heartbeat promises
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(slots=True)
class _Standing:
    """One lock of ours on disk. Owned by `PathLocks`; `fd` is closed exactly where it leaves `_standing`."""

    path: bytes
    place: bytes  # vault-relative path of the lock directory
    private: bool
    by_circumstance: bool
    through: tuple[int, int] | None
    record: OwnerRecord
    pid: int  # the process that made it: not `record.pid` by chance of a fork
    fd: int
    dev: int
    ino: int
    since: float
    since_monotonic: float
    mutex: threading.Lock  # heartbeat and release do not meet
    handles: int = 1
    first: HeldLock | None = None  # the handle that `PathLocks.held` shows; it keeps this alive and the other way round


class HeldLock:
    """A handle on a lock that we hold. `since` is in seconds since the epoch; `private` as in `places`."""

    __slots__ = ("_locks", "_released", "_standing", "path", "private", "since", "token")

    def __init__(self, locks: PathLocks, standing: _Standing) -> None:
        self._locks = locks
        self._standing = standing
        self._released = False
        self.path = standing.path
        self.token = standing.record.token
        self.since = standing.since
        self.private = standing.private

    def __repr__(self) -> str:
        return f"<HeldLock {self.path!r}{' released' if self._released else ''}>"

    def assert_owned(self) -> None:
        """Raises LockBrokenError unless the lock still stands at its name, with our lease in it; OSError."""
        standing = self._standing
        if self._released or standing.pid != os.getpid():
            raise LockBrokenError("The lock of this file was released already.", path=self.path)
        lease = lease_name(standing.record.token) or b""
        try:
            with self._locks._root.parent(standing.place) as (directory, name):
                owned = same_directory(directory, name, standing.dev, standing.ino)
            os.stat(lease, dir_fd=standing.fd, follow_symlinks=False)
        except FileNotFoundError:
            owned = False
        if not owned:
            raise LockBrokenError("The lock of this file was taken away while it was held.", path=self.path)

    def still_right(self) -> bool:
        """False if this is a private lock by circumstance and the circumstance is over: release it and start over.

        To be asked right before the change that the lock is for. One system call; free for any other lock.
        """
        standing = self._standing
        if not standing.by_circumstance:
            return True
        return self._locks._taken(standing.path, standing.through)

    def share(self) -> HeldLock:
        """Another handle on the same lock, to be released on its own: for code that is let through."""
        return self._locks._share(self._standing)

    def release(self) -> None:
        """Lets the lock go; when the last handle does, it is removed. Harmless when repeated.

        If the lock is not ours any more, what stands there is left alone and a warning is logged. Raises OSError if
        the file system fails; the lock then stands until this object meets it again.
        """
        if not self._released:
            self._released = True
            self._locks._let_go(self._standing)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class _Wait:
    """What a look has to say instead of a lock. `free`: this wait is due even if the deadline has passed."""

    seconds: float
    free: bool = False


class _Again(Exception):
    """Look again at once. Stays in this file."""


class Acquisition:
    """One attempt to get the lock of one path; belongs to one task. See the module's calling sequence.

    `holder` says after a look who holds the lock, in words; `judgement` why we think so.
    """

    def __init__(
        self, locks: PathLocks, path: bytes, timeout: float, token: str | None, through: tuple[int, int] | None
    ) -> None:
        self.path = path
        self.holder: str | None = None
        self.judgement: Judgement | None = None
        self._locks = locks
        self._deadline = locks._judge.clocks.monotonic() + timeout
        self._token = token
        self._through = through
        self._vanished = 0
        self._second_look = True
        self._over = False

    def step(self) -> HeldLock | float | None:
        """One look, and the lock if it can be had. Never sleeps.

        Returns the lock; or after how many seconds to call again; or None: the deadline has passed, it is busy.

        Raises ForeignLockError, LockBrokenError (unreadable, or its path keeps changing), UnsafePathError,
        UnsuitableVaultError (no renaming without replacing here), and OSError as the file system says
        (FileNotFoundError: there is no such directory; ENOSPC; EROFS).
        """
        if self._over:
            raise BadRequestError("this acquisition is over", path=self.path)
        over = True
        try:
            found = self._look_repeatedly()
            if isinstance(found, HeldLock):
                return found
            left = self._deadline - self._locks._judge.clocks.monotonic()
            if not found.free and left <= 0:
                return None
            over = False
            return found.seconds if found.free else min(found.seconds, left)
        finally:
            self._over = over

    def cancel(self) -> None:
        """Gives up. Nothing is ever prepared between two steps, so nothing needs to be removed; idempotent."""
        self._over = True

    def _look_repeatedly(self) -> HeldLock | _Wait:
        for _ in range(AT_ONCE):
            try:
                return self._locks._attempt(self)
            except _Again:
                continue
            except OSError as error:
                if error.errno not in (
                    errno.ENOENT,
                    errno.ENOTDIR,
                    errno.ESTALE,
                ):  # ESTALE: gone, on network file systems
                    raise
                self._note_vanished(error)
                return _Wait(LOOK_EVERY)
        return _Wait(GAP)

    def _note_vanished(self, error: OSError) -> None:
        """A component of the lock's path vanished under the look. Only a fresh walk that is clean allows another.

        Raises `error` if the walk fails as well, LockBrokenError when the retries are used up.
        """
        with self._locks._root.parent(self.path) as (_, name):
            if self._vanished >= VANISHED_RETRIES:
                raise LockBrokenError("The directory of this file keeps changing.", path=self.path) from error
        del name
        self._vanished += 1


class PathLocks:
    """The path locks of one vault object or daemon; see the module's docstring.

    Args: `tool`: our name in owner records. `stale`: seconds, see `Judge`. `timeout`: seconds that an acquisition
    may take unless it says otherwise. `private`: globs of paths whose locks are private by rule; all who use the
    vault must agree on them. `shared`: several hosts use this vault.
    """

    def __init__(
        self,
        root: VaultRoot,
        state: StateDirectory,
        *,
        tool: str = "vaultfs",
        stale: float = 10.0,
        timeout: float = 5.0,
        private: Sequence[str] = DEFAULT_PRIVATE,
        shared: bool = False,
        judge: Judge | None = None,
    ) -> None:
        self._root = root
        self._state = state
        self._tool = tool
        self._timeout = timeout
        self._judge = judge or Judge(whoami(), stale=stale, shared=shared, local=is_local(root.fd))
        self._places = Places(private, state.directory("locks"), root.name_max)
        self._mutex = threading.Lock()
        self._standing: dict[bytes, _Standing] = {}  # by place
        self._strays: dict[str, tuple[int, int, bytes]] = {}  # token → (dev, ino, path) of locks we could not remove
        self._released: dict[bytes, float] = {}  # place → when we released it last; entries older than GAP are stale
        self._watches = Watches(self._judge.clocks)

    # -- getting locks ---------------------------------------------------------------------------------------------

    def begin(
        self,
        path: bytes,
        timeout: float | None = None,
        *,
        token: str | None = None,
        through: tuple[int, int] | None = None,
    ) -> Acquisition:
        """An attempt to get the lock of `path`; its clock (`timeout` seconds) starts now.

        `token`: of a lock of this object that the caller is already under; it is let through that lock.
        `through`: (st_dev, st_ino) of a lock directory that the caller itself, or an ancestor of it, was *seen* to
        put in place; while that one stands, callers are let through it and share the private lock instead.

        Raises BadRequestError for the vault itself, which has no lock.
        """
        if not path:
            raise BadRequestError("the vault itself has no lock")
        if self._judge.me.pid != os.getpid():
            self._start_over_after_fork()
        return Acquisition(self, path, self._timeout if timeout is None else timeout, token, through)

    def acquire(self, path: bytes, timeout: float | None = None, *, token: str | None = None) -> HeldLock:
        """The lock of `path`, waiting for it in `time.sleep`.

        Raises LockBusyError at the deadline, saying who holds it, and whatever `Acquisition.step` raises.
        """
        acquisition = self.begin(path, timeout, token=token)
        held = _drive(acquisition)
        if held is None:
            raise LockBusyError(f"The lock of this file is held by {acquisition.holder or 'somebody'}.", path=path)
        return held

    def try_acquire(self, path: bytes, *, token: str | None = None) -> HeldLock | None:
        """The lock of `path` if it can be had now, None if it is busy; raises as `Acquisition.step`.

        "Now" allows for the milliseconds that a second look, or the gap behind our own last lock, takes.
        """
        return _drive(self.begin(path, 0.0, token=token))

    # -- knowing about locks ---------------------------------------------------------------------------------------

    @property
    def held(self) -> Mapping[bytes, HeldLock]:
        """A snapshot of the locks that we hold, by path. The handles belong to those who acquired them."""
        with self._mutex:
            return {lock.path: lock.first for lock in self._standing.values() if lock.first is not None}

    def is_ours(self, lock_path: bytes) -> bool:
        """True if this object holds the lock whose directory is `lock_path` (vault-relative)."""
        with self._mutex:
            return lock_path in self._standing

    def inspect(self, path: bytes) -> LockReport | None:
        """Who holds the lock of `path`, as far as can be told; None if nobody. Touches nothing.

        A look adds to what is known: locks that must be watched before they are judged are judged better by the
        second look. Raises UnsafePathError, OSError.
        """
        place = self._places.private(path) if self._places.private_by_rule(path) else self._places.public(path)
        report = self._inspect(path, place)
        if report is not None and report.verdict == Verdict.FOREIGN:
            return self._inspect(path, self._places.private(path)) or report
        return report

    def inspect_at(self, lock_path: bytes) -> LockReport | None:
        """Like `inspect`, for whatever stands at `lock_path` (``DIR/NAME.lock``); None if nothing does."""
        return self._inspect(lock_path.removesuffix(SUFFIX), lock_path)

    def _inspect(self, path: bytes, place: bytes) -> LockReport | None:
        examined = examine(self._root, path, place, self._judge, self._judged)
        return examined.report if examined is not None else None

    def _judged(self, place: bytes, contents: LockContents) -> tuple[Judgement, float]:
        """One more look at the lock at `place`: the verdict, and the lock's age in seconds."""
        with self._mutex:
            watch = self._watches.look(place, contents)
            return self._judgement(contents, watch), self._judge.age(contents, watch)

    def survey(self) -> Survey:
        """Looks at all locks of the vault, those of this object among them, for a person: see `locks.survey`."""
        return Survey(self._root, self._judge, self._judged, held=lambda: list(self.held))

    # -- keeping and ending ----------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Shows the world that long-held locks are alive. To be called every second or so by the owner's timer.

        Locks younger than REFRESH_AFTER seconds cost nothing. Raises OSError if the file system fails.
        """
        now = self._judge.clocks.monotonic()
        with self._mutex:
            due = [lock for lock in self._standing.values() if now - lock.since_monotonic >= REFRESH_AFTER]
        for standing in due:
            with standing.mutex:
                if standing.fd >= 0 and standing.pid == os.getpid():
                    self._beat(standing)
        self._collect_strays()

    def _collect_strays(self) -> None:
        """Tries again to remove locks of ours that were not at their place when they were released."""
        with self._mutex:
            places = sorted({path for _, _, path in self._strays.values()})
        for path in places:
            try:
                lock = self.try_acquire(path)
            except (OSError, VaultError):
                continue  # still not to be reached, or something else stands there: the next beat looks again
            if lock is not None:
                lock.release()

    def sweep(self) -> int:
        """Removes locks that processes which are dead now had prepared and never put in place; returns how many.

        For the start of a daemon; what cannot be judged stays.
        """
        return sweep(self._state.fd, self._state.name("pending"), self._judge)

    def close(self) -> None:
        """Releases what is still held. Raises OSError if one could not be, after trying the others."""
        failure: OSError | None = None
        with self._mutex:
            remaining = list(self._standing.values())
        for standing in remaining:
            standing.handles = 1
            try:
                self._let_go(standing)
            except OSError as error:
                failure = error
        self._collect_strays()
        if failure is not None:
            raise failure

    # -- one look --------------------------------------------------------------------------------------------------

    def _attempt(self, acquisition: Acquisition) -> HeldLock | _Wait:
        """One look at the lock of the acquisition's path, and taking it if it is free.

        Raises `_Again` when it should be looked at again at once: after a reap, a collision, a release.
        """
        path = acquisition.path
        if self._places.private_by_rule(path):
            return self._attempt_at(acquisition, self._places.private(path), private=True) or _Wait(LOOK_EVERY)
        found = self._attempt_at(acquisition, self._places.public(path), private=False)
        if found is not None:
            return found
        found = self._attempt_at(acquisition, self._places.private(path), private=True, by_circumstance=True)
        if found is None:  # by `private=True` that raises ForeignLockError instead
            raise ForeignLockError(path=path)
        if isinstance(found, HeldLock) and not found.still_right():
            found.release()  # the name became free, or a lock, while we took the private one
            raise _Again
        return found

    def _attempt_at(
        self, acquisition: Acquisition, place: bytes, *, private: bool, by_circumstance: bool = False
    ) -> HeldLock | _Wait | None:
        """`_attempt` at one place; None if what stands there is no lock, but something that may stand there."""
        with self._mutex:
            own = self._standing.get(place)
            if own is not None:
                if own.record.token == acquisition._token and own.handles > 0:
                    own.handles += 1
                    return HeldLock(self, own)
                acquisition.holder = "this program itself"
                return _Wait(OWN_LOOK_EVERY)
            released = self._released.get(place)
        if released is not None:
            gap = released + GAP - self._judge.clocks.monotonic()
            if gap > 0:
                return _Wait(gap, free=True)
        with self._root.parent(place) as (directory, name):
            try:
                lock: int | None = os.open(name, _DIRECTORY, dir_fd=directory)
            except FileNotFoundError:
                lock = None
            except NotADirectoryError:
                if private or not self._is_regular(directory, name):
                    raise ForeignLockError(path=acquisition.path) from None
                return None
            except PermissionError as error:
                raise LockBrokenError("The lock of this file may not be read.", path=acquisition.path) from error
            if lock is None:
                return self._take(acquisition, place, directory, name, private, by_circumstance)
            try:
                status = os.fstat(lock)
                if acquisition._through == (status.st_dev, status.st_ino) and not private:
                    return None
                return self._look(acquisition, place, directory, name, lock)
            finally:
                os.close(lock)

    def _look(self, acquisition: Acquisition, place: bytes, directory: int, name: bytes, lock: int) -> _Wait | None:
        """Judges the lock that stands at `place`, open as `lock`, and removes it if that is allowed."""
        contents = look_into(lock)
        if contents.dev != self._root.dev:  # before anything in there is judged, let alone removed
            raise ForeignLockError("Another file system is mounted at its lock.", path=acquisition.path)
        if contents.documents and not place.startswith(self._state.path + b"/"):
            return None  # somebody's own directory that happens to have this name
        with self._mutex:
            judgement = self._judgement(contents, self._watches.look(place, contents))
            known = self._strays.get(contents.owner.token) if contents.owner is not None else None
            stray = known is not None and known[:2] == (contents.dev, contents.ino)
        acquisition.judgement = judgement
        acquisition.holder = self._describe(name, contents, judgement)
        if stray or judgement.verdict in (Verdict.DEAD, Verdict.RESIDUE):
            removal = remove_judged(directory, name, lock, contents)
            if removal is Removal.LEFT:
                return _Wait(LOOK_EVERY)
            with self._mutex:
                self._watches.forget(place)
                if stray and contents.owner is not None:
                    self._strays.pop(contents.owner.token, None)
            if removal is Removal.REMOVED and not stray:
                _log.info("reaped the lock %r: %s", place, judgement.evidence)
            raise _Again
        if contents.owner_raw is None and not same_directory(directory, name, contents.dev, contents.ino):
            raise _Again  # we caught its owner's release half-way, and it is over
        if judgement.verdict is Verdict.FOREIGN:
            raise ForeignLockError(f"Its {printable(name)} is no lock: {judgement.evidence}.", path=acquisition.path)
        if contents.unreadable is not None:
            raise LockBrokenError(f"The lock of this file: {contents.unreadable}.", path=acquisition.path)
        if judgement.look_again and acquisition._second_look:
            acquisition._second_look = False  # once: a lock that keeps changing is busy, not a reason to overstay
            return _Wait(judgement.look_again, free=True)
        return _Wait(judgement.look_again or LOOK_EVERY)

    def _judgement(self, contents: LockContents, watch: Watch) -> Judgement:
        """The judge's verdict, or ours if it is our own lock. The caller holds `_mutex`."""
        owner = contents.owner
        if owner is not None and owner.pid == self._judge.me.pid:
            for standing in self._standing.values():
                if standing.record.token == owner.token:
                    return Judgement(Verdict.OURS, f"held by this very program ({self._tool})")
        return self._judge.judge(contents, watch)

    def _describe(self, name: bytes, contents: LockContents, judgement: Judgement) -> str:
        owner = contents.owner
        if owner is None:
            return f"somebody unknown ({printable(name)}: {judgement.evidence})"
        program = program_of(self._judge, owner, judgement)
        return f"process {owner.pid}{f' ({program})' if program else ''} since {owner.created_at}: {judgement.evidence}"

    @staticmethod
    def _is_regular(directory: int, name: bytes) -> bool:
        try:
            return stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            raise _Again from None

    def _taken(self, path: bytes, through: tuple[int, int] | None) -> bool:
        """True while the public name of `path`'s lock is something that a private lock stands in for."""
        try:
            with self._root.parent(self._places.public(path)) as (directory, name):
                try:
                    lock = os.open(name, _DIRECTORY, dir_fd=directory)
                except NotADirectoryError:
                    return stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False
        try:
            status = os.fstat(lock)
            return through == (status.st_dev, status.st_ino) or look_into(lock).documents
        finally:
            os.close(lock)

    # -- putting a lock in place -----------------------------------------------------------------------------------

    def _take(
        self, acquisition: Acquisition, place: bytes, directory: int, name: bytes, private: bool, by_circumstance: bool
    ) -> HeldLock:
        """Prepares a lock and renames it onto the free `name` in `directory`. Raises `_Again` on a collision."""
        record = new_record(self._judge.me, self._tool)
        prepared = self._state.name("pending") + b"/" + pending_name(record.pid, record.token)
        try:
            try:
                lock = put_in_place(self._state.fd, prepared, directory, name, record)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                # No rename from .vaultfs into this directory (project quota, fscrypt): prepare it beside, as others do.
                beside = beside_name(name, record.pid, record.token, self._root.name_max)
                lock = put_in_place(directory, beside, directory, name, record)
        except FileExistsError:
            raise _Again from None
        except FileNotFoundError:
            self._state.forget("pending")  # somebody cleared .vaultfs; the caller starts over and makes it anew
            raise
        status = os.fstat(lock)
        standing = _Standing(
            path=acquisition.path,
            place=place,
            private=private,
            by_circumstance=by_circumstance,
            through=acquisition._through,
            record=record,
            pid=self._judge.me.pid,
            fd=lock,
            dev=status.st_dev,
            ino=status.st_ino,
            since=self._judge.clocks.wall(),
            since_monotonic=self._judge.clocks.monotonic(),
            mutex=threading.Lock(),
        )
        standing.first = held = HeldLock(self, standing)
        with self._mutex:
            self._standing[place] = standing
        return held

    # -- heartbeat and release -------------------------------------------------------------------------------------

    def _beat(self, standing: _Standing) -> None:
        """Counts the lock's heartbeat and refreshes its mtime. The caller holds `standing.mutex`."""
        record = standing.record
        record = msgspec.structs.replace(record, lease_ms=LEASE_MS, heartbeat=(record.heartbeat or 0) + 1)
        workshop = self._state.name("pending") + b"/" + pending_name(standing.pid, f"{record.token}.beat")
        try:
            if exchange_owner(self._state.fd, workshop, standing.fd, record):
                standing.record = record
            os.utime(standing.fd)
        except FileNotFoundError:
            _log.warning("the lock %r was taken away while it was held", standing.place)

    def _share(self, standing: _Standing) -> HeldLock:
        with self._mutex:
            if standing.handles <= 0:
                raise LockBrokenError("The lock of this file was released already.", path=standing.path)
            standing.handles += 1
        return HeldLock(self, standing)

    def _let_go(self, standing: _Standing) -> None:
        """Drops one handle; the last one removes the lock. The only place that closes `standing.fd`."""
        with self._mutex:
            standing.handles -= 1
            if standing.handles > 0:
                return
        with standing.mutex:
            if standing.fd < 0:
                return
            gone = False
            try:
                gone = standing.pid != os.getpid() or self._remove(standing)
            finally:
                os.close(standing.fd)
                standing.fd = -1
                standing.first = None
                self._note_released(standing, stray=not gone)

    def _note_released(self, standing: _Standing, *, stray: bool) -> None:
        now = self._judge.clocks.monotonic()
        with self._mutex:
            if stray:
                self._strays[standing.record.token] = (standing.dev, standing.ino, standing.path)
            if self._standing.get(standing.place) is standing:
                del self._standing[standing.place]
            if len(self._released) > 64:
                self._released = {place: at for place, at in self._released.items() if at + GAP > now}
            self._released[standing.place] = now

    def _remove(self, standing: _Standing) -> bool:
        """Removes our lock from disk, or leaves it alone if it is not ours any more; False makes it a stray.

        The inode and the lease decide, not the owner file: if a reaper took that, we can still release.
        """
        lease = lease_name(standing.record.token) or b""
        for _ in range(3):  # the directory may be exchanged for another one just now, as atomic tree updates do
            try:
                with self._root.parent(standing.place) as (directory, name):
                    if not same_directory(directory, name, standing.dev, standing.ino):
                        break
                    if not unlink_if_there(lease, standing.fd):
                        break
                    unlink_if_there(OWNER, standing.fd)
                    if remove_directory(directory, name, standing.dev, standing.ino) is Removal.LEFT:
                        _log.warning("the lock %r holds something of somebody else now; it stays", standing.place)
                    return True
            except (FileNotFoundError, NotADirectoryError):
                continue
            except UnsafePathError:
                break  # a component is a link by now: never through an alias
        try:
            os.stat(lease, dir_fd=standing.fd, follow_symlinks=False)
        except FileNotFoundError:
            _log.warning("the lock %r was taken away while it was held", standing.place)
            return True
        _log.warning("the lock %r is not at its place any more; left where it is", standing.place)
        return False

    def _start_over_after_fork(self) -> None:
        """In a child process: what the parent holds is the parent's."""
        self._judge = dataclasses.replace(self._judge, me=whoami())
        self._mutex = threading.Lock()  # a thread of the parent may have held it at the fork
        self._standing, self._strays, self._released = {}, {}, {}
        self._watches = Watches(self._judge.clocks)


def _drive(acquisition: Acquisition) -> HeldLock | None:
    while True:
        step = acquisition.step()
        if not isinstance(step, float):
            return step
        time.sleep(step)
