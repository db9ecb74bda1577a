"""A small process beside the daemon, for what the daemon must not do itself: touch its own mount.

It is a process and not a thread for one reason, tried on Linux 6.18: a thread of the daemon that waits for an
answer of the daemon sleeps uninterruptibly. If the daemon is killed just then, the thread cannot die, so the files
of the process stay open, ``/dev/fuse`` among them, so the kernel never learns that nobody will answer: the mount and
everybody on it hang until somebody aborts the connection by hand. A process of its own, without ``/dev/fuse``, gets
its error like any other program when the daemon dies.

It has two duties.

**Telling watchers.** The kernel reports writes to inotify when they are made, on the draft, before the publish, and
changes from outside not at all. So after each publish a chmod to the same mode is made on the name, *through the
mount*; the kernel then tells watchers of the directory and of the file (IN_ATTRIB), and the daemon, which knows the
caller by its pid, changes nothing. For a name that was deleted outside, an unlink is made in the same way, since
``invalidate_entry(deleted=…)`` reaches those who watch the file but not those who watch its directory (tried).
The daemon sends ``MODE PATH NUL`` (octal, or ``gone`` for a deletion; relative to the mountpoint) over the pipe
that is standard input. What is asked again before it was done is done once, the last way it was asked.

An unlink that somebody carried out would be a loss, so before one is sent the very mount that it goes to must prove
that its daemon knows us: a lookup of our secret name in its root fails with ECANCELED, and only from us (see
`vaultfs.mount.announce` for the daemon's side). A directory below the mount, or the mount of a later daemon that
got the same place and the same device number, says ENOENT.

When nobody watches, nothing is done. Who watches stands in ``/proc/PID/fdinfo``; that look costs some
milliseconds, so it is made at most every half second and never takes more than a twentieth of the time. An
announcement is dropped only after a look *begun after it was made* found nobody: it waits for that look, so that a
program which begins to watch just before a save is not passed over.

**Letting go of the mount.** One thread of the daemon cannot be moved out: the one that tells the kernel to forget
names (`vaultfs.mount.watch.Invalidator`). It may wait in the kernel for a directory that a program holds while *that*
waits for the daemon; killed then, the daemon hangs as above. This process hears when the daemon's main thread dies
(PR_SET_PDEATHSIG; the pipe would not tell, it stays open as well), and if the rest has not followed a second later
it aborts the connection, as ``echo 1 >/sys/fs/fuse/connections/N/abort`` does. Everybody gets ENOTCONN then, as
after any daemon's death.

The main thread tells the watchers, because the daemon sees the thread id of a caller, and only the main thread's is
the pid that the daemon knows. It may be stuck in the mount; so a second thread reads the pipe and keeps guard. When
the pipe ends the process ends, whatever the main thread is at.

This file is run by its path (``python -I -S companion.py MOUNTPOINT DEV DAEMON shared|own SECRET``), so that nothing
but a few standard modules is loaded: it imports nothing of vaultfs. `vaultfs.mount.announce` starts it and talks to it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import stat
import sys
import threading
import time

__all__ = ["Companion", "abort", "bury", "kernel_device", "look", "touch", "watched"]

LOOK_INTERVAL = 0.5  # seconds between two looks for watchers, at least
LOOK_SHARE = 20  # and this many times what the last look took
# Seconds from a publish to its announcement. Not at once: the kernel has just told watchers of the write to the draft,
# and chokidar drops what follows within 50 ms on the same path, for good. While saves of one path come closely one
# after the other, it is told of at the latest after ANNOUNCE_LIMIT.
ANNOUNCE_AFTER = 0.08
ANNOUNCE_LIMIT = 0.5
DYING_LIMIT = 1.0  # seconds that the daemon's threads have to follow its main thread

_GONE = -1

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS = 0x20000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_CONNECTIONS = "/sys/fs/fuse/connections"
_DAEMON_DIED = signal.SIGUSR1


def kernel_device(dev: int) -> int:
    """A ``st_dev`` as the kernel numbers it inside (``major << 20 | minor``): so it stands in fdinfo's ``sdev:``."""
    return os.major(dev) << 20 | os.minor(dev)


def watched(dev: int, shared: bool) -> bool:
    """Whether some process watches something on the file system `dev`, as far as can be told.

    A process that cannot be looked into counts as a watcher if it may use the mount: everybody's if the mount is
    `shared` (allow_other), otherwise those of our own user that forbid to be looked at (password managers do).
    """
    found, unknown = look(dev)
    return found or any(shared or _runs_as_us(pid) for pid in unknown)


def look(dev: int) -> tuple[bool, list[str]]:
    """(whether a process watches `dev` by inotify or fanotify, the pids that could not be looked into)."""
    needle = b"sdev:%x " % kernel_device(dev)
    unknown: list[str] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if _watches(name, needle):
                    return True, unknown
            except PermissionError:
                unknown.append(name)
            except OSError:
                continue  # it ended while it was looked at
    return False, unknown


def _watches(pid: str, needle: bytes) -> bool:
    table = os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for fd in os.listdir(table):
            try:
                if "notify" not in os.readlink(fd, dir_fd=table)[:24]:  # anon_inode:inotify, anon_inode:[fanotify]
                    continue
                with open(f"/proc/{pid}/fdinfo/{fd}", "rb") as info:
                    if needle in info.read():
                        return True
            except PermissionError:
                raise
            except OSError:
                continue  # closed meanwhile, or a path too long to be read, which no notify descriptor has
    finally:
        os.close(table)
    return False


def _runs_as_us(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                if line.startswith(b"Uid:"):
                    return int(line.split()[1]) == os.getuid()
    except OSError:
        pass  # it ended meanwhile, so it does not watch
    return False


def touch(mountpoint: bytes, dev: int, path: bytes, mode: int) -> bool:
    """chmod `path` on the mount to `mode`, which it has already; True if that was done.

    What `path` leads to must be a file or directory on `dev`: if the mount is gone, the walk ends in the directory
    below it.
    """
    here = -1
    try:
        here = _walk(os.open(mountpoint, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), path)
        status = os.fstat(here)
        if status.st_dev != dev or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            return False
        os.chmod(f"/proc/self/fd/{here}", mode)
        return True
    except OSError:
        # Safe to ignore whatever it is, for nothing but a hint is lost: the name is gone or renamed again (another
        # announcement follows), the mount is gone or read-only, the daemon refuses, or the file is not ours.
        return False
    finally:
        if here >= 0:
            os.close(here)


def bury(mountpoint: bytes, dev: int, path: bytes, secret: bytes) -> bool:
    """unlink `path`, which is gone already, on the mount whose daemon knows `secret` and us; True if it said yes."""
    here = -1
    try:
        # From the proof on all goes through this descriptor: whatever is mounted there later, it is the same mount.
        here = os.open(mountpoint, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if not secret or not _knows_us(here, secret):
            return False
        directory, _, name = path.rpartition(b"/")
        root, here = here, -1
        here = _walk(root, directory)
        if os.fstat(here).st_dev != dev:  # something else is mounted inside our mount
            return False
        os.unlink(name, dir_fd=here)
        return True
    except OSError:
        # As above: a hint. The name may be there again, which the daemon then says; its announcement follows.
        return False
    finally:
        if here >= 0:
            os.close(here)


def _knows_us(root: int, secret: bytes) -> bool:
    try:
        os.stat(secret, dir_fd=root, follow_symlinks=False)
    except OSError as error:
        return error.errno == errno.ECANCELED
    return False


def _walk(here: int, path: bytes) -> int:
    """A descriptor for `path` below the descriptor `here`, which is closed in any case.

    No link is followed: the walk goes name by name with O_NOFOLLOW, so a path may also be longer than PATH_MAX.
    Descriptors are O_PATH, which sends no open to the daemon, and are held for one call only: one kept longer would
    make the mount busy.
    """
    for name in path.split(b"/") if path else ():
        try:
            there = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
        finally:
            os.close(here)
        here = there
    return here


class Companion:
    """The two threads' common state: `_pending`, guarded by `_changed`."""

    def __init__(self, mountpoint: bytes, dev: int, daemon: int, shared: bool, secret: bytes) -> None:
        self._mountpoint = mountpoint
        self._dev = dev
        self._daemon = daemon
        self._shared = shared
        self._secret = secret
        self._changed = threading.Condition()
        self._pending: dict[bytes, tuple[int, float, float]] = {}  # path: mode or _GONE, when asked for first, when due
        self._next_look = 0.0
        self._somebody = False

    def add(self, messages: list[bytes]) -> None:
        """Take announcements as they come from the pipe, without their NUL."""
        with self._changed:
            now = time.monotonic()
            for message in messages:
                mode, _, path = message.partition(b" ")
                asked = self._pending[path][1] if path in self._pending else now
                due = min(now + ANNOUNCE_AFTER, asked + ANNOUNCE_LIMIT)
                self._pending[path] = (_GONE if mode == b"gone" else int(mode, 8), asked, due)
            self._changed.notify()

    def tell(self) -> None:
        """Wait until something is pending and make it known to whoever watches; the main thread, again and again."""
        with self._changed:
            while not self._pending:
                self._changed.wait()
            due = min(due for _, _, due in self._pending.values())
        if not self._somebody:
            due = max(due, self._next_look)  # without a watcher: for a look that begins after it was made
        time.sleep(max(0.0, due - time.monotonic()))
        with self._changed:
            now = time.monotonic()
            batch = {path: mode for path, (mode, _, due) in self._pending.items() if due <= now}
            for path in batch:
                del self._pending[path]
        if time.monotonic() >= self._next_look:
            began = time.monotonic()
            self._somebody = watched(self._dev, self._shared)
            ended = time.monotonic()
            self._next_look = ended + max(LOOK_INTERVAL, LOOK_SHARE * (ended - began))
        if self._somebody:
            for path, mode in batch.items():
                if mode == _GONE:
                    bury(self._mountpoint, self._dev, path, self._secret)
                else:
                    touch(self._mountpoint, self._dev, path, mode)

    def listen(self, died: int) -> None:
        """The second thread: takes announcements from the pipe and keeps guard; ends the process with the pipe.

        `died` becomes readable when the main thread of the daemon (or whichever thread started us) has died.
        """
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {_DAEMON_DIED})
        rest = b""
        give_up_at: float | None = None
        while True:
            timeout = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            readable, _, _ = select.select([0] if give_up_at is not None else [0, died], [], [], timeout)
            if not readable and give_up_at is not None:
                give_up_at = None
                os.read(died, 64)
                if _is_stuck(self._daemon):
                    abort(self._dev)
            if died in readable:
                give_up_at = time.monotonic() + DYING_LIMIT
            if 0 in readable:
                data = os.read(0, 1 << 16)
                if not data:
                    os._exit(0)  # the daemon is gone or wants us gone; the main thread may be stuck, so no clean exit
                *messages, rest = (rest + data).split(b"\0")
                self.add(messages)


def _is_stuck(daemon: int) -> bool:
    """Whether the main thread of our parent `daemon` has ended and other threads of it have not."""
    try:
        with open(f"/proc/{daemon}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return False  # gone altogether: the pipe ends any moment
    # With a thread left our parent still has its pid; gone, we would be a child of init.
    return os.getppid() == daemon and text[text.rfind(b")") + 2 :][:1] == b"Z"


def abort(dev: int) -> bool:
    """End the FUSE connection of the file system `dev`: all who wait for it get ECONNABORTED; True if done.

    Where ``/sys/fs/fuse/connections`` is not mounted (containers), root mounts it in a namespace of its own, which
    nobody else sees and which ends with this process.
    """
    control = f"{_CONNECTIONS}/{kernel_device(dev)}/abort"
    if not os.path.exists(control) and os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if (
            libc.unshare(_CLONE_NEWNS) != 0
            or libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC_PRIVATE), None) != 0
            or libc.mount(b"none", _CONNECTIONS.encode(), b"fusectl", ctypes.c_ulong(0), None) != 0
        ):
            print(f"vaultfs: cannot mount {_CONNECTIONS}: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    try:
        with open(control, "w") as file:
            file.write("1")
    except OSError as error:
        # Nothing more can be done from here; the words help who looks for the reason of a mount that hangs.
        print(f"vaultfs: the daemon died but its mount is stuck ({error}); abort it by hand", file=sys.stderr)
        return False
    return True


def main(arguments: list[str]) -> None:
    """Never returns: the process ends with its standard input."""
    mountpoint, dev, daemon = os.fsencode(arguments[0]), int(arguments[1]), int(arguments[2])
    shared, secret = arguments[3] == "shared", os.fsencode(arguments[4])
    # Only the second thread may take this signal: the main thread can be stuck, and the kernel would prefer it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {_DAEMON_DIED})
    died, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(_DAEMON_DIED, lambda number, frame: None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the daemon, whose end is ours
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(_DAEMON_DIED))
    if os.getppid() != daemon:
        return  # it died before we asked to be told
    if _is_stuck(daemon):  # or its main thread did: no signal will come any more
        os.kill(os.getpid(), _DAEMON_DIED)
    companion = Companion(mountpoint, dev, daemon, shared, secret)
    threading.Thread(target=companion.listen, args=(died,), daemon=True).start()
    while True:
        companion.tell()


if __name__ == "__main__":
    main(sys.argv[1:])
