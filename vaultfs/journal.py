"""What is known about a draft, and the index `.vaultfs/journal` of all of them.

A staged draft describes itself, so that it can be told what it is when everything else is lost:

- its *name* is ``ID~TARGET``, the target being the vault-relative path with ``%`` and ``/`` escaped. After an
  exchange the displaced version stands under that name, and so it is known too where that one came from;
- a small *xattr* (`MARK_NAME`, 44 bytes) holds what kind of draft it is, how far it got, its own inode number (the
  mark is void on any other inode: `cp -a` copies xattrs) and the version it started from. It is binary and that
  short so that it fits into the inode on ext4 and xfs: a mark that needs a block of its own costs 55 µs at every save,
  this one 2 (measured; so does a full record as JSON).

Where the target does not fit into a file name, or the file system has no user xattrs, a *sidecar* ``ID.json`` beside it
holds the full record. A *kept* draft always has the full record: as the xattr `KEPT_NAME`, or in a sidecar.

The journal adds what recovery should know after the daemon alone has died: full records, intents, claims. Its lines are
appended with one write each and never synced; a torn or unreadable line is ignored. It is an index: losing it loses no
content, and may cost no more than a name or a writer. It is compacted when the vault is mounted and when it has grown.

Everyone who has the journal open holds `flock(LOCK_SH)` on it; only who gets `LOCK_EX` (nobody else has it open) may
replace it, and who opens it looks whether it is still the one at the name after getting the lock. Paths are
percent-encoded in JSON.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import urllib.parse
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from vaultfs.identity import FileIdentity
from vaultfs.state import StateDirectory

__all__ = [
    "KEPT_NAME",
    "MARK_NAME",
    "OWN_XATTR_PREFIX",
    "Claim",
    "DraftKind",
    "DraftRecord",
    "DraftState",
    "Journal",
    "JournalLine",
    "JournalState",
    "Mark",
    "Writer",
    "decode_path",
    "encode_path",
    "staged_name",
    "target_of_name",
]

OWN_XATTR_PREFIX: Final = "user.vaultfs."
MARK_NAME: Final = "user.vaultfs.draft"
KEPT_NAME: Final = "user.vaultfs.kept"
_JOURNAL_NAME: Final = b"journal"
_NAME_LIMIT: Final = 255
_COMPACT_AFTER: Final = 4096  # lines; a line is about 400 bytes


class DraftKind(StrEnum):
    """How a draft relates to the version at its name."""

    EDIT = "edit"  # started from a version and changed it
    APPEND = "append"  # started from a version and only added to its end
    REPLACEMENT = "replacement"  # whole new content for a name that had a version
    NEW = "new"  # content for a name that had none
    DISPLACED = "displaced"  # no draft of ours: a version that a save of ours took off its name


class DraftState(StrEnum):
    """How far a draft got."""

    OPEN = "open"  # being written
    DURABLE = "durable"  # the program's own fsync put it on disk: publish it if the daemon dies
    PUBLISHING = "publishing"  # complete; the publish has begun
    KEPT = "kept"  # could not be published, or was displaced; listed by `vaultfs drafts`


class Writer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who wrote a draft. `start_time` is field 22 of /proc/PID/stat (ticks), 0 if unknown; `gid` None if unknown."""

    pid: int = 0
    program: str = ""
    uid: int = 0
    start_time: int = 0
    gid: int | None = None


class DraftRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that is known about a draft. `target` and `hidden` are percent-encoded vault-relative paths."""

    id: str
    target: str
    base: FileIdentity | None = None
    state: DraftState = DraftState.OPEN
    kind: DraftKind = DraftKind.EDIT
    writer: Writer = Writer()
    created_at: str = ""  # ISO 8601, UTC
    kept_at: str = ""
    reason: str | None = None
    append_from: int | None = None
    ino: int = 0  # of the staging file itself
    attempt: str = ""
    hidden: str | None = None  # where it is staged, if not in staging/ATTEMPT
    mode: int | None = None  # permission bits that a new file is to have
    supersedes: str | None = None  # the draft whose tail this one carries; that one must not be applied again
    synced: bool = True  # False under `relaxed`: after a power loss the published content is not to be trusted
    spent: bool = False  # displaced and known: may go as soon as it is proven that nobody writes it

    @property
    def target_path(self) -> bytes:
        return decode_path(self.target)


class Claim(msgspec.Struct, frozen=True):
    """An empty file made in the vault for a program that asked for O_CREAT|O_EXCL."""

    path: str
    identity: FileIdentity
    writer: Writer
    boot_id: str
    attempt: str


class JournalLine(msgspec.Struct, omit_defaults=True):
    """One line; exactly one of the fields is set."""

    draft: DraftRecord | None = None
    gone: str | None = None
    claim: Claim | None = None
    unclaim: str | None = None
    attempt: str | None = None  # "ATTEMPT BOOT_ID": in which boot an attempt ran


class JournalState(msgspec.Struct):
    """What the lines add up to."""

    drafts: dict[str, DraftRecord] = {}
    claims: dict[str, Claim] = {}
    attempts: dict[str, str] = {}
    ignored: int = 0

    def apply(self, line: JournalLine) -> None:
        if line.draft is not None:
            self.drafts[line.draft.id] = line.draft
        elif line.gone is not None:
            self.drafts.pop(line.gone, None)
        elif line.claim is not None:
            self.claims[line.claim.path] = line.claim
        elif line.unclaim is not None:
            self.claims.pop(line.unclaim, None)
        elif line.attempt is not None:
            attempt, _, boot_id = line.attempt.partition(" ")
            self.attempts[attempt] = boot_id


def encode_path(path: bytes) -> str:
    """A path as JSON text: percent-encoded, so that any byte survives."""
    return urllib.parse.quote_from_bytes(path, safe="/ !$&'()*+,;=:@")


def decode_path(text: str) -> bytes:
    return urllib.parse.unquote_to_bytes(text)


def staged_name(draft_id: str, target: bytes) -> bytes:
    """The file name of a staged or kept draft: with its target where that fits (then no sidecar is needed for it)."""
    name = draft_id.encode("ascii") + b"~" + target.replace(b"%", b"%25").replace(b"/", b"%2F")
    return name if len(name) <= _NAME_LIMIT and target else draft_id.encode("ascii")


def target_of_name(name: bytes) -> tuple[str, bytes | None]:
    """(id, target) of a staged file's name; the target is None if the name does not hold it."""
    draft_id, mark, target = name.partition(b"~")
    return os.fsdecode(draft_id), target.replace(b"%2F", b"/").replace(b"%25", b"%") if mark else None


class Mark:
    """The xattr of a staged draft, packed; see the module's text for why it is so small."""

    _LAYOUT: Final = struct.Struct("<4sQQQQQ")
    _KINDS: Final = {kind: kind.value[0].encode() for kind in DraftKind}
    _STATES: Final = {state: state.value[0].encode() for state in DraftState}
    _KIND_OF: Final = {letter: kind for kind, letter in _KINDS.items()}
    _STATE_OF: Final = {letter: state for state, letter in _STATES.items()}
    _NOTHING: Final = 0xFFFFFFFFFFFFFFFF

    @classmethod
    def pack(cls, record: DraftRecord) -> bytes:
        flags = b"1" + cls._KINDS[record.kind] + cls._STATES[record.state] + (b"s" if record.synced else b"u")
        base = record.base
        append_from = cls._NOTHING if record.append_from is None else record.append_from
        if base is None:
            return cls._LAYOUT.pack(flags, record.ino, 0, 0, 0, append_from)
        return cls._LAYOUT.pack(flags, record.ino, base.ino, base.size, base.mtime_ns & cls._NOTHING, append_from)

    @classmethod
    def unpack(cls, data: bytes, draft_id: str, target: bytes, dev: int) -> DraftRecord | None:
        """The record that a mark stands for; None if it is none of this version."""
        if len(data) != cls._LAYOUT.size:
            return None
        flags, ino, base_ino, size, mtime_ns, append_from = cls._LAYOUT.unpack(data)
        kind = cls._KIND_OF.get(flags[1:2])
        state = cls._STATE_OF.get(flags[2:3])
        if flags[:1] != b"1" or kind is None or state is None:
            return None
        if mtime_ns >> 63:  # times before 1970 are negative
            mtime_ns -= 1 << 64
        base = None
        if base_ino:
            base = FileIdentity(dev=dev, ino=base_ino, nlink=1, size=size, mtime_ns=mtime_ns, ctime_ns=0)
        return DraftRecord(
            id=draft_id,
            target=encode_path(target),
            base=base,
            state=state,
            kind=kind,
            append_from=None if append_from == cls._NOTHING else append_from,
            ino=ino,
            synced=flags[3:4] == b"s",
        )


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(JournalLine)


class Journal:
    """The opened journal of one daemon run or one vault object. Closed by `close`.

    Appending is safe from several threads and processes (one O_APPEND write a line); the rest is for one thread.
    """

    def __init__(self, state: StateDirectory) -> None:
        self._state = state
        self._lines = 0
        self._fd = self._open()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        while True:
            fd = os.open(_JOURNAL_NAME, flags, 0o600, dir_fd=self._state.fd)
            try:
                # who compacts holds LOCK_EX for the moment of one small rewrite, so this waits for no longer
                fcntl.flock(fd, fcntl.LOCK_SH)
                with contextlib.suppress(FileNotFoundError):
                    if (
                        os.stat(_JOURNAL_NAME, dir_fd=self._state.fd, follow_symlinks=False).st_ino
                        == os.fstat(fd).st_ino
                    ):
                        # a torn last line must not swallow the first of ours
                        size = os.fstat(fd).st_size
                        if size and os.pread(fd, 1, size - 1) != b"\n":
                            os.write(fd, b"\n")
                        return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # it was compacted between our open and our lock: take the new one

    def append(self, line: JournalLine) -> None:
        """Write one line. Raises OSError (ENOSPC, EIO)."""
        os.write(self._fd, _encoder.encode(line) + b"\n")
        self._lines += 1

    def sync(self) -> None:
        """Wait until what was appended is on disk. Blocks. Raises OSError."""
        os.fdatasync(self._fd)

    @property
    def wants_compaction(self) -> bool:
        return self._lines >= _COMPACT_AFTER

    def read(self) -> JournalState:
        """Everything in it; lines that cannot be read are counted and skipped."""
        state = JournalState()
        content = bytearray()
        while chunk := os.pread(self._fd, 1 << 20, len(content)):
            content += chunk
        for text in bytes(content).split(b"\n"):
            if not text:
                continue
            try:
                state.apply(_decoder.decode(text))
            except msgspec.DecodeError:  # torn by a crash, or written by a later version: an index may have holes
                state.ignored += 1
        return state

    def compact(self, lines: Iterable[JournalLine]) -> bool:
        """Replace the journal by `lines`; False (nothing done) if somebody else has it open just now."""
        self._lines = 0  # not tried again before as many lines have come again
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            # a failed conversion may have dropped the shared lock (flock(2)): take it again
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            return False
        temporary = b"journal.new"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self._state.fd)
        try:
            os.write(fd, b"".join(_encoder.encode(line) + b"\n" for line in lines))
            os.fdatasync(fd)
            fcntl.flock(fd, fcntl.LOCK_SH)
            os.rename(temporary, _JOURNAL_NAME, src_dir_fd=self._state.fd, dst_dir_fd=self._state.fd)
        except BaseException:
            os.close(fd)
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            raise
        os.close(self._fd)
        self._fd = fd
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
