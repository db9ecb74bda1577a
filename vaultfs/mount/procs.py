"""Facts about other processes, read from ``/proc``: who has a file open, who descends from whom, who is dying.

The mount decides by these facts whether a save is complete, so they are asked on every close. Three rules follow:

*Nothing here waits for a process that waits for us.* execve(2) holds the process's ``exec_update_lock`` while it
closes close-on-exec descriptors, and each of those closes is a FLUSH that waits for the daemon. On such a process
these wait (Linux 6.18): ``stat``, ``task/*/stat``, readlink of ``fd/N`` and whatever follows that link, ``environ``,
``io``, ``wchan``, kcmp(2). These answer at once: ``status``, ``comm``, ``children``, ``fdinfo/N``, the listings of
``fd`` and ``task``, lstat of ``fd/N``. So open files are told by their fdinfo alone; ``stat`` is read only of a process
that has no files any more (``FDSize`` 0: it exits, and an exec is over), of the caller of an open (it is in that call),
or with a bound (`vaultfs.patience`).

*Cheapest test first.* The permission bits of the link ``/proc/PID/fd/N`` itself are the access mode of the open
file (``fs/proc/fd.c``, ``tid_fd_update_inode``): one lstat sorts out what is only read; fdinfo tells mount and inode.

*A process may be gone between any two steps.* Then every function gives what its docstring says for that, and
raises nothing. A pid that was used again is recognized by `start_time`, which callers keep beside the pid.

A thread group whose leader thread has ended (``pthread_exit`` in ``main``) looks dead in ``/proc/PID``: state Z, no
descriptors. Its other threads still have everything; the functions here look at them before they believe it.

Sources: proc_pid_stat(5), proc_pid_status(5), proc_pid_fdinfo(5), kcmp(2), the kernel's ``fs/exec.c``,
``fs/proc/array.c`` and ``kernel/exit.c``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Container, Iterator, Sequence

from vaultfs import kernel
from vaultfs.patience import within

__all__ = [
    "ancestors",
    "death_signal",
    "closes_on_exec",
    "descendants",
    "distinct_open_files",
    "exists",
    "is_dumping_core",
    "is_exiting",
    "is_still",
    "program",
    "start_time",
    "thread_group",
    "write_descriptors",
]

PF_EXITING = 0x4  # include/linux/sched.h; unchanged since these flags are shown
PF_DUMPCORE = 0x200

# Positions in /proc/PID/stat counted from the state, which is field 3 and the first after the name.
_STATE = 0
_FLAGS = 6
_START_TIME = 19
_EXIT_CODE = 49

PATIENCE = 0.03  # seconds that a look may take which waits while the process is in execve(2)
_MANY = 4096  # more generations or descendants than any save needs; a bound, so that no fork bomb holds up a close

_GONE = (errno.ENOENT, errno.ESRCH, errno.ENOTDIR)
_DENIED = (errno.EACCES, errno.EPERM)


def _read(path: str) -> bytes:
    """All of a small file of ``/proc``; empty if its process is gone or may not be looked at."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE or error.errno in _DENIED:
            return b""
        raise
    try:
        # One read gets all of stat, status and comm: the kernel makes their text as a whole, below one page.
        return os.read(descriptor, 8192)
    except ProcessLookupError:  # ended between open and read
        return b""
    finally:
        os.close(descriptor)


def _stat_fields(path: str) -> list[bytes]:
    """The fields of a stat file from the state on, or an empty list if there is no such process.

    The name before them may hold spaces and parentheses of its own, so they begin after the *last* one.
    """
    text = _read(path)
    return text[text.rfind(b")") + 2 :].split() if text else []


def _status(tid: int, field: bytes) -> int | None:
    """A number of ``/proc/TID/status``, which never waits; None if there is no such thread."""
    text = _read(f"/proc/{tid}/status")
    start = text.find(b"\n" + field + b":")
    if start < 0:
        return None
    return int(text[start + len(field) + 2 : text.index(b"\n", start + 1)])


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError as error:
        if error.errno in _GONE or error.errno in _DENIED:
            return []
        raise


def thread_group(tid: int) -> int:
    """The process (thread group id) that thread `tid` belongs to; 0 if there is no such thread.

    The kernel tells a FUSE daemon the *thread* that makes a request (`ctx.pid`).
    """
    return _status(tid, b"Tgid") or 0


def start_time(pid: int) -> int:
    """When `pid` began, in clock ticks since boot; 0 if it is gone. With the pid it names one process for ever.

    Waits while that process is in execve(2): only for the caller of a request that is no FLUSH, or with a bound.
    """
    fields = _stat_fields(f"/proc/{pid}/stat")
    return int(fields[_START_TIME]) if fields else 0


def program(pid: int) -> str:
    """The short name (at most 15 bytes) of process `pid`, for people; empty if it is gone.

    Any bytes may be in it, also half a UTF-8 character: what cannot be decoded is shown as ``\\xNN``, so that the
    text can go into a record.
    """
    return _read(f"/proc/{pid}/comm").removesuffix(b"\n").decode("utf-8", "backslashreplace")


def exists(pid: int) -> bool:
    """False only if there is certainly no process `pid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def is_still(pid: int, started: int) -> bool:
    """Whether `pid` is still the process that began at `started`, as far as can be told without waiting for it.

    A process with open files is believed by its number (numbers come again after millions); one that has none, and so
    is ending, is looked at.
    """
    files = _status(pid, b"FDSize")
    if files is None:
        return False
    return files > 0 or start_time(pid) == started


def ancestors(pid: int) -> Iterator[int]:
    """The parent of `pid`, its parent, and so on to init; ends early where one is gone."""
    for _ in range(_MANY):
        parent = _status(pid, b"PPid")
        if not parent:
            return
        yield parent
        pid = parent


def descendants(pid: int) -> list[int]:
    """Children, grandchildren, … of process `pid`, nearest first, at most 4096; empty if it is gone.

    Children of an intermediate process that ended belong to init (or a subreaper) by then and are not among them.
    While a process closes its files on exit, its children are still its own (``kernel/exit.c``: files go before
    the children are handed on).
    """
    found: list[int] = []
    seen = {pid}
    by_parent: dict[int, list[int]] | None = None
    pending = [pid]
    for parent in pending:  # grows while it is walked: breadth first
        if by_parent is None:
            children = _children(parent)
            if children is None:  # a kernel without CONFIG_PROC_CHILDREN: one look at every process instead
                by_parent = _children_by_parent()
        if by_parent is not None:
            children = by_parent.get(parent, [])
        for child in children or ():
            if child in seen:  # a pid used again while we looked
                continue
            seen.add(child)
            found.append(child)
            pending.append(child)
            if len(found) >= _MANY:
                return found
    return found


def _children(pid: int) -> list[int] | None:
    """The children of all threads of `pid`; None if this kernel has no ``children`` files."""
    result: list[int] = []
    for tid in _threads(pid):
        try:
            with open(f"/proc/{pid}/task/{tid}/children", "rb") as file:
                result.extend(map(int, file.read().split()))
        except (FileNotFoundError, ProcessLookupError):
            # The thread ended meanwhile, or the kernel has no such file at all: our own thread tells which.
            if not os.path.exists("/proc/thread-self/children"):
                return None
        except PermissionError:
            continue  # its children cannot be known; those of the other threads can
    return result


def _children_by_parent() -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            parent = _status(int(name), b"PPid")
            if parent:
                result.setdefault(parent, []).append(int(name))
    return result


def write_descriptors(pid: int, mount_id: int, dev: int, inos: Container[int]) -> list[int] | None:
    """The descriptors of process `pid` that are open for writing on a file of the mount with one of the numbers `inos`.

    `mount_id` is the mount's (statx(2), ``stx_mnt_id``), `dev` its ``st_dev`` as ``makedev`` makes it; `inos` are the
    numbers that were sent to the kernel for the inodes in question: fdinfo shows the last one that it took.

    Returns an empty list if the process is gone, has let go of all its files (it exits) or never had it, and None
    if it cannot be looked into (another user's, or one that forbids it): then nothing is known.
    """
    result = _write_descriptors(f"/proc/{pid}", mount_id, dev, inos)
    if result or _status(pid, b"FDSize"):
        return result
    # Of a thread without files nothing can be learned, and it belongs to root in /proc. Others may live on.
    for tid in map(int, _threads(pid)):
        if tid != pid:
            result = _write_descriptors(f"/proc/{pid}/task/{tid}", mount_id, dev, inos)
            if result or _status(tid, b"FDSize"):
                return result
    return []  # all are on their way out, or gone: everything will be closed


def _write_descriptors(process: str, mount_id: int, dev: int, inos: Container[int]) -> list[int] | None:
    """The same, of one thread's table; None also if it could not be listed for whatever other reason."""
    try:
        table = os.open(process + "/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE:
            return []
        if error.errno in _DENIED:
            return None
        raise
    try:
        # Through this descriptor it stays the same process to the end, even if its pid is used again.
        found = []
        for name in os.listdir(table):
            try:
                if not os.stat(name, dir_fd=table, follow_symlinks=False).st_mode & stat.S_IWUSR:
                    continue
                mount, ino = _place(f"{process}/fdinfo/{name}")
                if ino in inos and (mount == mount_id or _is_mount_of(mount, dev)):
                    found.append(int(name))
            except OSError as error:
                if error.errno not in _GONE:  # forbidden, or whatever else hides one: it could be the one asked for
                    return None
                # Closed since the listing: then it is not held, which is what is asked.
        return found
    except OSError as error:
        if error.errno in _GONE:  # the process ended while its table was listed
            return []
        if error.errno in _DENIED:
            return None
        raise
    finally:
        os.close(table)


def _place(fdinfo: str) -> tuple[int, int]:
    """(mount id, inode number) of an open file. Raises OSError."""
    descriptor = os.open(fdinfo, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
    mount = ino = -1
    for line in text.split(b"\n", 4)[:4]:
        key, _, value = line.partition(b":")
        if key == b"mnt_id":
            mount = int(value)
        elif key == b"ino":
            ino = int(value)
    return mount, ino


def _is_mount_of(mount: int, dev: int) -> bool:
    """Whether the mount with id `mount` shows the file system `dev`: a bind mount of it does.

    A mount of another namespace is not in our table; it is taken for one, so that a save waits rather than is cut.
    """
    device = b"%d:%d" % (os.major(dev), os.minor(dev))
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            words = line.split(b" ", 3)
            if int(words[0]) == mount:
                return words[2] == device
    return True


def closes_on_exec(pid: int, fd: int) -> bool:
    """True if descriptor `fd` of process `pid` will be closed by its next exec, or is closed already.

    The flags in fdinfo are octal and show the descriptor's own close-on-exec bit (``fs/proc/fd.c``, ``seq_show``).
    """
    text = _read(f"/proc/{pid}/fdinfo/{fd}")
    start = text.find(b"flags:")
    if start < 0:
        return True
    return bool(int(text[start + 6 : text.index(b"\n", start)], 8) & os.O_CLOEXEC)


def distinct_open_files(pid: int, fds: Sequence[int]) -> int | None:
    """How many separate opens the descriptors `fds` of process `pid` are: duplicates of one another count once.

    A descriptor closed meanwhile does not count. None if the kernel does not tell (kcmp(2) without the right to
    trace the process, in a sandbox, or not built in), or does not within a moment (the process is in execve(2)).
    """
    if len(fds) < 2:
        return len(fds)
    try:
        return within(PATIENCE, lambda: _distinct_open_files(pid, fds))
    except TimeoutError:
        return None


def _distinct_open_files(pid: int, fds: Sequence[int]) -> int | None:
    tid = pid
    try:
        if fds and not _is_open(pid, fds[0]):  # that one was closed, or the leader thread is gone and has no files
            tid = next((thread for thread in map(int, _threads(pid)) if _is_open(thread, fds[0])), pid)
        distinct: list[int] = []
        for fd in fds:
            if _is_open(tid, fd) and not any(_same_open_file(tid, fd, other) for other in distinct):
                distinct.append(fd)
        return len(distinct)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP):
            return None
        raise


def _is_open(tid: int, fd: int) -> bool:
    return _same_open_file(tid, fd, fd)


def _same_open_file(tid: int, first: int, second: int) -> bool:
    try:
        return kernel.kcmp(tid, tid, kernel.KCMP_FILE, first, second)
    except OSError as error:
        if error.errno in (errno.EBADF, errno.ESRCH):  # one of them is closed, or the process is gone
            return False
        raise


def death_signal(pid: int) -> int:
    """The signal that process or thread `pid` is dying of, or died of if it is a zombie; 0 if of none.

    PF_SIGNALED is not asked: it also shows on the threads of a process that exits normally. A process that catches
    the signal and exits gives 0: it had its say. 0 too where the kernel hides exit codes from us (another user's
    process): whoever cannot look into a process does not publish at its FLUSH anyway. A process that still has files
    is not dying: those go first (``kernel/exit.c``), and only then does its ``stat`` wait for nobody.
    """
    if _status(pid, b"FDSize"):
        return 0
    fields = _stat_fields(f"/proc/{pid}/stat")
    if not fields or not int(fields[_FLAGS]) & PF_EXITING:
        return 0
    return int(fields[_EXIT_CODE]) & 0x7F


def is_exiting(pid: int) -> bool:
    """Whether process `pid` is on its way out in all its threads, a zombie, or gone. May wait as `start_time` does."""
    return _is_ending(pid) and all(_is_ending(int(tid)) for tid in _threads(pid) if int(tid) != pid)


def _is_ending(tid: int) -> bool:
    """The same of one thread (or, by a pid, of the leader thread)."""
    fields = _stat_fields(f"/proc/{tid}/stat")
    return not fields or bool(int(fields[_FLAGS]) & PF_EXITING)


def is_dumping_core(tid: int) -> bool:
    """Whether thread `tid` is writing a core dump: what it opens now is that dump, not a document."""
    fields = _stat_fields(f"/proc/{tid}/stat")
    return bool(fields) and bool(int(fields[_FLAGS]) & PF_DUMPCORE)
