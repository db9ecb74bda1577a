"""The register of running mounts: one small file for each, beside its control socket.

It lives outside every vault, in a directory of its own (0700, checked to be ours and no link):

* ``/run/vaultfs`` for root,
* ``$XDG_RUNTIME_DIR/vaultfs`` or ``/run/user/UID/vaultfs`` for a user,
* ``/tmp/vaultfs-UID`` where there is none of these,
* ``$VAULTFS_RUNTIME_DIR`` instead of all of them, if set.

``NAME.json`` holds an `Entry`, ``NAME.sock`` is the socket; NAME is unique for each run of a daemon, so nobody ever
removes a successor's files. An entry is believed only while its process lives: the same pid *with the same start
time* on the same boot. Whoever reads the register clears what dead daemons left (they cannot do it themselves), but
not before the mount that such a daemon left is gone too: until then its user wants to hear what stands there.
An entry made in another pid namespace cannot be judged from here and is left alone.

Root sees the registers of all users, a user only its own. Mounts that are in no register one can see are still in
the kernel's table (`vaultfs.mountinfo`), and ``vaultfs status`` shows them as such.
"""

from __future__ import annotations

import contextlib
import glob
import os
import select
import stat
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from vaultfs import __version__
from vaultfs.control import protocol
from vaultfs.errors import VaultError, printable
from vaultfs.mount import procs
from vaultfs.mountinfo import mounts

__all__ = [
    "Entry",
    "Registration",
    "dead",
    "entries",
    "find",
    "is_running",
    "register",
    "runtime_directory",
    "socket_path",
    "wait_gone",
]


class Entry(msgspec.Struct):
    """What the register says about one mount. Paths are absolute and without links."""

    vault: str
    mountpoint: str
    pid: int
    start_time: int  # of the pid, clock ticks since boot
    boot_id: str
    pid_ns: int  # inode of /proc/self/ns/pid
    uid: int
    since: str  # ISO 8601, UTC
    version: str
    socket: str
    vault_dev: int
    vault_ino: int
    log_file: str | None = None


def runtime_directory(*, create: bool = False) -> str:
    """The directory of this user's register (it may not exist yet unless `create`).

    Raises VaultError if what is there is not ours alone, OSError if it cannot be made.
    """
    path = _runtime_path()
    if create:
        with contextlib.suppress(FileExistsError):
            os.makedirs(path, mode=0o700)
    _verify(path)
    return path


def _runtime_path() -> str:
    if chosen := os.environ.get("VAULTFS_RUNTIME_DIR"):
        return os.path.abspath(chosen)
    uid = os.geteuid()
    candidates = ["/run"] if uid == 0 else [os.environ.get("XDG_RUNTIME_DIR") or "", f"/run/user/{uid}"]
    for base in candidates:
        if base.startswith("/") and os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK):
            return f"{base}/vaultfs"
    return f"/tmp/vaultfs-{uid}"


def _verify(path: str) -> bool:
    """True if `path` is a directory that is ours alone, False if there is nothing; VaultError for anything else.

    Below /tmp anybody may have made it first: a link, or a directory that others can write.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise VaultError(
            "this should be a directory of mode 0700 that belongs to you, and is not",
            path=path,
            remedy="Somebody else made it: remove it, or set VAULTFS_RUNTIME_DIR to a private directory.",
        )
    return True


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


class Registration:
    """Our own entry; `close` takes it (and the socket's name) away."""

    def __init__(self, path: str, entry: Entry) -> None:
        self.path = path
        self.entry = entry

    def publish(self) -> None:
        """Write the entry: complete or not at all, since others read the register at any time."""
        temporary = f"{self.path}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(protocol.encode(self.entry))
        os.rename(temporary, self.path)

    def close(self) -> None:
        """Idempotent; never fails because something is gone already."""
        for path in (self.path, f"{self.path}.tmp", self.entry.socket):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def register(
    *, vault: str, mountpoint: str, vault_dev: int, vault_ino: int, log_file: str | None = None
) -> Registration:
    """Prepare the entry of this process; it becomes visible with `Registration.publish`."""
    directory = runtime_directory(create=True)
    name = f"{directory}/{os.getpid()}-{uuid.uuid4().hex[:8]}"
    entry = Entry(
        vault=vault,
        mountpoint=mountpoint,
        pid=os.getpid(),
        start_time=procs.start_time(os.getpid()),
        boot_id=boot_id(),
        pid_ns=pid_namespace(),
        uid=os.geteuid(),
        since=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        version=__version__,
        socket=f"{name}.sock",
        vault_dev=vault_dev,
        vault_ino=vault_ino,
        log_file=log_file,
    )
    return Registration(f"{name}.json", entry)


def is_running(entry: Entry) -> bool | None:
    """Whether the daemon of `entry` lives; None if that cannot be judged from this pid namespace."""
    if entry.boot_id != boot_id():
        return False
    if entry.pid_ns != pid_namespace():
        return None
    return not wait_gone(entry, 0)


def wait_gone(entry: Entry, timeout: float) -> bool:
    """Wait up to `timeout` seconds for the daemon of `entry` to end; True if it has (a zombie has).

    Through a pidfd: the answer is about this very process, though its pid be used again meanwhile.
    """
    try:
        descriptor = os.pidfd_open(entry.pid)
    except ProcessLookupError:
        return True
    try:
        if procs.start_time(entry.pid) != entry.start_time:
            return True  # the number belongs to another process by now
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(descriptor)


def _directories() -> list[str]:
    """Registers that this user may look into."""
    own = _runtime_path()
    if os.environ.get("VAULTFS_RUNTIME_DIR"):
        return [own]
    if os.geteuid() == 0:
        others = [*glob.glob("/run/user/*/vaultfs"), *glob.glob("/tmp/vaultfs-*")]
    else:
        # A session and a cron job of one user may see different environments; the register is the user's.
        others = [f"/run/user/{os.geteuid()}/vaultfs", f"/tmp/vaultfs-{os.geteuid()}"]
    return sorted({path for path in [own, *others] if os.path.isdir(path) and not os.path.islink(path)})


def entries() -> list[Entry]:
    """All running mounts that this user may know of, oldest first. Clears what dead daemons left behind."""
    return _scan()[0]


def dead() -> list[Entry]:
    """Mounts whose daemon died and that still stand in the kernel's table: every look at them is an error.

    Their entries are kept until the mount is gone, so that its user hears what it was.
    """
    return _scan()[1]


def _scan() -> tuple[list[Entry], list[Entry]]:
    """(running, dead). Removes the entries of dead daemons whose mounts are gone, or replaced by running ones."""
    running: list[Entry] = []
    gone: list[tuple[str, Entry, bool]] = []
    for directory in _directories():
        try:
            names = os.listdir(directory)
            owner = os.lstat(directory).st_uid
        except (PermissionError, FileNotFoundError):
            continue  # another user's, or just removed: nothing of it may be known
        if owner != os.geteuid() and str(owner) not in directory.replace("-", "/").split("/"):
            continue  # /tmp/vaultfs-1000 made by somebody else than 1000: what it says is worth nothing
        for name in names:
            path = f"{directory}/{name}"
            if name.endswith(".json"):
                entry = _read(path, owner)
                if entry is None:
                    continue
                if is_running(entry) is False:
                    # Root removes nothing in a directory that another user could swap under its hands.
                    gone.append((path, entry, owner == os.geteuid()))
                else:
                    running.append(entry)
            elif name.endswith((".sock", ".tmp")) and owner == os.geteuid():
                _clear_orphan(directory, name)
    standing = {mount.mountpoint for mount in mounts() if mount.ours} - {entry.mountpoint for entry in running}
    left: dict[str, Entry] = {}
    for path, entry, removable in gone:
        if entry.mountpoint in standing:
            left[entry.mountpoint] = entry
        elif removable:
            Registration(path, entry).close()

    def by_age(entry: Entry) -> tuple[str, str]:
        return entry.since, entry.mountpoint

    return sorted(running, key=by_age), sorted(left.values(), key=by_age)


def _read(path: str, owner: int) -> Entry | None:
    """One entry; None if it vanished, or is none (then it is left alone: somebody else's file).

    An entry says where a socket is: only what the register's owner wrote is believed, and only a socket in the
    same directory.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (owner, 0):
            return None
        try:
            entry = protocol.decode(file.read(protocol.MAXIMUM_REQUEST), Entry)
        except ValueError:
            return None
    if entry.socket != path.removesuffix(".json") + ".sock":
        return None
    return entry


def _clear_orphan(directory: str, name: str) -> None:
    """Remove a socket or half-written entry whose daemon was killed before (or while) its entry was there.

    Only if no process with the pid in its name exists at all: one without an entry may just be starting.
    """
    pid, _, rest = name.partition("-")
    if not pid.isdecimal() or not rest or procs.start_time(int(pid)):
        return
    stem = name.removesuffix(".tmp").removesuffix(".json").removesuffix(".sock")
    if name.endswith(".sock") and os.path.exists(f"{directory}/{stem}.json"):
        return  # the entry decides (it may be of another pid namespace)
    with contextlib.suppress(FileNotFoundError, PermissionError):
        os.unlink(f"{directory}/{name}")


@contextlib.contextmanager
def socket_path(path: str) -> Iterator[str]:
    """`path` as it can be given to ``bind`` and ``connect``, which take at most 107 bytes."""
    if len(os.fsencode(path)) <= 100:
        yield path
        return
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)


def find(path: str, known: list[Entry] | None = None) -> Entry | None:
    """The mount that `path` (absolute, without links) belongs to: its mountpoint, its vault, or a path in either.

    The nearest one wins: of a vault inside another one's mountpoint, the inner.
    """
    best: Entry | None = None
    longest = -1
    for entry in entries() if known is None else known:
        for top in (entry.mountpoint, entry.vault):
            if (path == top or path.startswith(top.rstrip("/") + "/")) and len(top) > longest:
                best, longest = entry, len(top)
    return best


def describe(entry: Entry) -> str:
    """One phrase for messages: who serves what where."""
    return f"{printable(entry.vault)} is served on {printable(entry.mountpoint)} by pid {entry.pid}"
