"""What a lock says about its owner, and how it is read without trusting it.

A lock is a directory that holds two files:

``.owner.json``
    one JSON object and a newline. ``v`` (1), ``pid``, ``token`` and ``created_at`` are shared with other tools
    and fixed; the rest is ours (`OwnerRecord`) and lets a stranger tell a dead owner from one it merely cannot
    see. Readers ignore keys that they do not know.
``.lease-TOKEN``
    the token and a newline. Who unlinks it has decided what becomes of the lock: see `vaultfs.locks.reaper`.

`look_into` reads a standing lock *through one descriptor* of its directory, so that everything it returns
belongs to one and the same lock, whatever happens to the name meanwhile. Nothing found there is trusted: a
file is opened without following links and without waiting (a FIFO would hold us up for ever), and must be a
regular file of at most 64 KiB before a byte of it is read. What does not fit is not an error but a finding
(`LockContents.foreign`, `.unreadable`, `.other`): what to do about it is decided in `vaultfs.locks.liveness`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from datetime import UTC, datetime
from typing import Any

import msgspec

from vaultfs import kernel
from vaultfs.errors import printable
from vaultfs.state import host_identity

__all__ = [
    "LEASE_PREFIX",
    "OWNER",
    "OWNER_LIMIT",
    "Identity",
    "LockContents",
    "NotAPlainFile",
    "OtherRecord",
    "OwnerRecord",
    "encode",
    "is_protocol_name",
    "lease_name",
    "look_into",
    "parse_owner",
    "read_small_file",
    "timestamp",
    "whoami",
]

OWNER = b".owner.json"
LEASE_PREFIX = b".lease-"
OWNER_LIMIT = 64 * 1024  # bytes; a larger owner file is none

_SCRAP = re.compile(rb"\.owner\.json\.(\d{1,10})\.\d+\.[0-9A-Za-z-]+\.tmp")  # other tools' half-written owners
_ENTRIES_LIMIT = 32  # a lock holds two files, at times a few scraps; what holds more is something else
_SAFE_INTEGER = 2**53 - 1  # the other tools are JavaScript


class Identity(msgspec.Struct, frozen=True):
    """Which process on which machine: what tells this process from every other one that ever had its number."""

    pid: int
    host: str | None
    boot_id: str | None
    start_time: int | None  # clock ticks since boot, field 22 of /proc/PID/stat
    pid_ns: int | None
    time_ns: int | None


class OwnerRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """``.owner.json``. The first four are shared and always there; any of the others may be missing."""

    v: int
    pid: int
    token: str
    created_at: str
    host: str | None = None
    boot_id: str | None = None
    start_time: int | None = None
    pid_ns: int | None = None
    time_ns: int | None = None
    tool: str | None = None
    lease_ms: int | None = None
    heartbeat: int | None = None

    @property
    def plain(self) -> bool:
        """True for a shared record: nothing says on which machine its pid counts."""
        return (
            self.host is None
            and self.boot_id is None
            and self.start_time is None
            and self.pid_ns is None
            and self.time_ns is None
        )


class OtherRecord(msgspec.Struct, frozen=True):
    """An owner file that somebody means seriously but that we do not understand: never judged, only reported."""

    reason: str
    pid: int | None = None


class LockContents(msgspec.Struct, frozen=True):
    """One look into a lock directory through its descriptor."""

    dev: int
    ino: int
    mtime_ns: int
    btime_ns: int
    owner_raw: bytes | None  # the bytes of the owner file; None: there is none
    owner: OwnerRecord | None  # None: no owner file, or nothing that can be parsed
    other: OtherRecord | None = None
    leases: tuple[bytes, ...] = ()  # the names of lease files
    scraps: tuple[tuple[bytes, int], ...] = ()  # half-written owners: (name, pid)
    foreign: str | None = None  # something that no lock holds: hands off
    documents: bool = False  # holds things, and none of them is of the protocol: somebody's own directory
    unreadable: str | None = None  # we are not allowed to know

    @property
    def lease(self) -> bytes | None:
        """The name of the owner's own lease file if it is there."""
        if self.owner is None:
            return None
        name = lease_name(self.owner.token)
        return name if name is not None and name in self.leases else None


def timestamp() -> str:
    """Now, as the shared format has it: ISO 8601, UTC, milliseconds, ``Z``."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def lease_name(token: str) -> bytes | None:
    """The name of the lease file of `token`, or None if the token is no safe file name.

    Tokens come out of other people's files: ``../../notes`` must not become a path.
    """
    name = LEASE_PREFIX + os.fsencode(token.encode("utf-8", "surrogatepass").decode("utf-8", "replace"))
    if b"/" in name or b"\0" in name or len(name) > 255:
        return None
    return name


def is_protocol_name(name: bytes) -> bool:
    """True for the names that the protocol uses inside a lock directory."""
    return name == OWNER or name.startswith(LEASE_PREFIX) or _SCRAP.fullmatch(name) is not None


def encode(record: OwnerRecord) -> bytes:
    """`record` as it is written: one JSON object and a newline."""
    return msgspec.json.encode(record) + b"\n"


def parse_owner(raw: bytes) -> OwnerRecord | OtherRecord | None:
    """The record in `raw`; None for what is no record at all.

    At least as lenient as the other tools' ``JSON.parse``: a lock that they take for a live one must never look
    like garbage to us. A JSON object with another ``v``, or with our own keys in shapes that we never write, is
    an `OtherRecord`.
    """
    try:
        document: Any = json.loads(raw.decode("utf-8", "replace"))
    except ValueError:
        return None
    except RecursionError:  # nested beyond our parser's depth, but perhaps not beyond theirs
        return OtherRecord("the owner file is nested too deeply to be read")
    if not isinstance(document, dict):
        return None
    pid = _integer(document.get("pid"))
    if "v" in document and _integer(document["v"]) != 1:
        return OtherRecord(f"the owner file is of version {str(document['v'])[:20]!r}", pid)
    token, created_at = document.get("token"), document.get("created_at")
    if (
        _integer(document.get("v")) != 1
        or pid is None
        or not 0 < pid <= _SAFE_INTEGER
        or not isinstance(token, str)
        or not token
        or not isinstance(created_at, str)
        or not created_at
    ):
        return None
    try:
        return msgspec.convert({**document, "v": 1, "pid": pid}, OwnerRecord)
    except msgspec.ValidationError as error:
        return OtherRecord(f"the owner file has keys that we know in shapes that we do not ({error})", pid)


def _integer(value: object) -> int | None:
    """`value` if it is an integer as JavaScript sees it: 1.0 is 1 and true is not."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


class NotAPlainFile(Exception):
    """What was opened is no regular file of one name within the limit; says what it is. Stays in this package."""


def read_small_file(directory: int, name: bytes, limit: int = OWNER_LIMIT) -> bytes:
    """All of the regular file `name` in `directory`, if it has at most `limit` bytes.

    Raises OSError as open(2) does (ELOOP for a link), and `NotAPlainFile` for everything that must not be read.
    """
    descriptor = os.open(
        name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=directory
    )
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotAPlainFile("is no regular file")
        if status.st_nlink > 1:
            raise NotAPlainFile("has more than one hard link")
        if status.st_size > limit:
            raise NotAPlainFile(f"is over {limit} bytes")
        data = b""
        while len(data) <= limit:  # it may grow while we read: never more than one byte over the limit
            piece = os.read(descriptor, limit + 1 - len(data))
            if not piece:
                return data
            data += piece
        raise NotAPlainFile(f"is over {limit} bytes")
    finally:
        os.close(descriptor)


def look_into(descriptor: int) -> LockContents:
    """Everything that the lock directory behind `descriptor` says, in one look.

    Entries that vanish meanwhile (their owner is just releasing) are simply not there. Raises OSError only for
    failures of the file system itself (EIO, ESTALE).
    """
    status = kernel.statx(descriptor, b"", kernel.AT_EMPTY_PATH)
    names: list[bytes] = []
    leases: list[bytes] = []
    scraps: list[tuple[bytes, int]] = []
    raw: bytes | None = None
    foreign: str | None = None
    unreadable: str | None = None
    protocol = False
    try:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                names.append(os.fsencode(entry.name))
                if len(names) > _ENTRIES_LIMIT:
                    foreign = f"holds more than {_ENTRIES_LIMIT} entries"
                    break
        for name in sorted(names):
            scrap = _SCRAP.fullmatch(name)
            if name != OWNER and scrap is None and not name.startswith(LEASE_PREFIX):
                foreign = foreign or f"holds {printable(name)!r}, which is not of the protocol"
                continue
            protocol = True
            try:
                if name == OWNER:
                    raw = read_small_file(descriptor, name)
                    continue
                entry_status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                continue  # released under our look (ESTALE: on a network file system); the caller looks again
            except NotAPlainFile as error:
                foreign = f"its {printable(name)!r} {error}"
                continue
            if not stat.S_ISREG(entry_status.st_mode) or entry_status.st_nlink > 1:
                foreign = f"its {printable(name)!r} is no regular file of one name"
            elif scrap is not None:
                scraps.append((name, int(scrap[1])))
            else:
                leases.append(name)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
            foreign = f"its owner file is no regular file ({error.strerror})"
        elif error.errno in (errno.EACCES, errno.EPERM):
            unreadable = f"it may not be read ({error.strerror})"
        else:
            raise
    parsed = parse_owner(raw) if raw is not None else None
    return LockContents(
        dev=status.dev,
        ino=status.ino,
        mtime_ns=status.mtime_ns,
        btime_ns=status.btime_ns,
        owner_raw=raw,
        owner=parsed if isinstance(parsed, OwnerRecord) else None,
        other=parsed if isinstance(parsed, OtherRecord) else None,
        leases=tuple(leases),
        scraps=tuple(scraps),
        foreign=foreign,
        documents=foreign is not None and not protocol,
        unreadable=unreadable,
    )


def whoami() -> Identity:
    """The identity of this process, read from the kernel; what cannot be read is None.

    `host` is the machine's id hashed with a salt of our own (`vaultfs.state.host_identity`).
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            start_time: int | None = int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        start_time = None  # no /proc: others will then judge by the pid alone, which only errs towards "alive"
    return Identity(
        pid=os.getpid(),
        host=host_identity(),
        boot_id=_first_line("/proc/sys/kernel/random/boot_id"),
        start_time=start_time,
        pid_ns=_namespace("pid"),
        time_ns=_namespace("time"),
    )


def _first_line(path: str) -> str | None:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline().strip() or None
    except (OSError, ValueError):
        return None  # not there: the record says less, and a reader that misses a key never calls an owner dead


def _namespace(kind: str) -> int | None:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return None  # a kernel without this namespace, or no /proc: see _first_line
