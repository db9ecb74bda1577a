"""A lock on its way onto its name: made out of sight, complete before anybody sees it.

A lock is prepared as ``.vaultfs/pending/PID.TOKEN/`` with owner and lease in it, and then *renamed* onto its name
without replacing (`put_in_place`): whoever sees a lock of ours sees all of it. The same workshop serves heartbeats
(`exchange_owner`), since a temporary file inside a standing lock would make other tools fail or wait for ever.

What a process that was killed on the way leaves in the workshop is in nobody's way; `sweep` clears it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid

from vaultfs import kernel
from vaultfs.errors import UnsuitableVaultError
from vaultfs.locks.liveness import Judge, Verdict
from vaultfs.locks.places import SUFFIX
from vaultfs.locks.reaper import clear_prepared, drop_pending
from vaultfs.locks.records import OWNER, Identity, OwnerRecord, encode, lease_name, look_into, timestamp

__all__ = ["beside_name", "exchange_owner", "new_record", "put_in_place", "sweep"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def new_record(me: Identity, tool: str) -> OwnerRecord:
    """The record of a lock of the process `me`, with a token of its own. To be put in place at once."""
    return OwnerRecord(
        v=1,
        pid=me.pid,
        token=str(uuid.uuid4()),
        created_at=timestamp(),
        host=me.host,
        boot_id=me.boot_id,
        start_time=me.start_time,
        pid_ns=me.pid_ns,
        time_ns=me.time_ns,
        tool=tool,
    )


def beside_name(name: bytes, pid: int, token: str, name_max: int) -> bytes:
    """The name that other tools prepare the lock `name` under, beside it; cut where it would be too long."""
    ending = SUFFIX + f".{pid}.{token}.pending".encode()
    return name.removesuffix(SUFFIX)[: name_max - len(ending)] + ending


def put_in_place(workshop: int, prepared: bytes, directory: int, name: bytes, record: OwnerRecord) -> int:
    """Makes a lock as `prepared` in `workshop` and renames it onto `name` in `directory`; all or nothing.

    Returns a descriptor of the lock directory, which is the caller's. Raises FileExistsError if the name is taken
    by now, UnsuitableVaultError if this file system cannot rename without replacing, and OSError (EXDEV: cannot be
    renamed from this workshop).

    Both files are made this moment, so its mtime is fresh when it appears. (A lock prepared some time ago would
    have to be touched: renaming keeps the mtime, and a peer in another pid namespace judges by it.)
    """
    os.mkdir(prepared, 0o700, dir_fd=workshop)  # if this fails there is nothing of ours to clean up
    lock = -1
    try:
        lock = os.open(prepared, _DIRECTORY, dir_fd=workshop)
        parent, made = os.fstat(directory), os.fstat(lock)
        like = None if (parent.st_uid, parent.st_gid) == (made.st_uid, made.st_gid) else parent
        readable = 0o640 | (parent.st_mode & 0o004)
        _write(lock, OWNER, encode(record), readable, like)
        _write(lock, lease_name(record.token) or b"", record.token.encode() + b"\n", readable, like)
        _give(lock, (parent.st_mode & 0o775) | 0o750, like)
        kernel.renameat2(workshop, prepared, directory, name, kernel.RENAME_NOREPLACE)
    except BaseException as error:
        if lock < 0:
            with contextlib.suppress(OSError):  # empty and nobody's; the error that led here matters more
                os.rmdir(prepared, dir_fd=workshop)
        else:
            drop_pending(workshop, prepared, lock, record)
            os.close(lock)
        if isinstance(error, OSError) and error.errno == errno.ENOTEMPTY:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from error
        if isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.ENOSYS):
            raise UnsuitableVaultError("this file system cannot rename without replacing") from error
        raise
    return lock


def exchange_owner(workshop: int, fresh: bytes, lock: int, record: OwnerRecord) -> bool:
    """Gives the standing lock behind the descriptor `lock` the owner file `record`, in one step.

    It is written as `fresh` in `workshop` and *exchanged* with the one in the lock: a plain rename would put an owner
    into a lock that is just being taken apart. Raises FileNotFoundError if the lock has no owner any more, OSError.
    False where the file system cannot exchange; the lock then keeps the owner that it has.
    """
    like = os.fstat(lock)
    _write(workshop, fresh, encode(record), 0o640 | (like.st_mode & 0o004), like)
    try:
        kernel.renameat2(workshop, fresh, lock, OWNER, kernel.RENAME_EXCHANGE)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EINVAL, errno.ENOSYS):
            return False
        raise
    finally:
        os.unlink(fresh, dir_fd=workshop)
    return True


def sweep(state: int, workshop: bytes, judge: Judge) -> int:
    """Removes what processes that are proven dead left in `workshop` (a name below `state`); returns how many."""
    removed = 0
    pending = os.open(workshop, _DIRECTORY, dir_fd=state)
    try:
        for entry in os.listdir(pending):
            removed += _sweep_one(pending, os.fsencode(entry), judge)
    finally:
        os.close(pending)
    return removed


def _sweep_one(pending: int, name: bytes, judge: Judge) -> bool:
    try:
        lock = os.open(name, _DIRECTORY, dir_fd=pending)
    except FileNotFoundError:
        return False  # its maker has just finished with it
    except NotADirectoryError:  # a heartbeat on its way into a lock
        if not _named_after_the_dead(name, judge):
            return False
        with contextlib.suppress(FileNotFoundError):  # another sweep was faster
            os.unlink(name, dir_fd=pending)
        return True
    try:
        contents = look_into(lock)
        if contents.owner is not None and not contents.owner.plain:
            dead = judge.judge_process(contents.owner).verdict is Verdict.DEAD
        else:  # killed before it could say who it was
            old = judge.clocks.wall() - contents.mtime_ns / 1e9 > judge.stale
            dead = old and _named_after_the_dead(name, judge)
        return dead and clear_prepared(pending, name, lock)
    finally:
        os.close(lock)


def _named_after_the_dead(name: bytes, judge: Judge) -> bool:
    """True if the process number that the name of something prepared starts with is nobody's here."""
    number = name.partition(b".")[0]
    return number.isdigit() and judge.processes.exists(int(number)) is False


def _write(directory: int, name: bytes, data: bytes, mode: int, like: os.stat_result | None) -> None:
    descriptor = os.open(name, _NEW_FILE, mode, dir_fd=directory)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        _give(descriptor, mode, like)
    finally:
        os.close(descriptor)


def _give(descriptor: int, mode: int, like: os.stat_result | None) -> None:
    """Gives what we made the owner and group of `like`, as far as we may, and exactly `mode`, whatever the umask.

    An unprivileged peer that cannot read our lock gives up for good; one that can will judge it, and reap it when we
    are dead.
    """
    if like is not None:
        for owner, group in ((like.st_uid, like.st_gid), (-1, like.st_gid)):
            try:
                os.fchown(descriptor, owner, group)
                break
            except OSError as error:
                # Only root may give away, and not to users outside of its namespace: then it stays ours, which
                # merely leaves the reaping to us.
                if error.errno not in (errno.EPERM, errno.EINVAL, errno.EOVERFLOW):
                    raise
    os.fchmod(descriptor, mode)
