"""Drafts on disk: working copies in staging, what was kept of them, and the claims of names.

Calling sequence::

    drafts = Drafts(root, state)                       # one for each daemon run, or library vault object
    report = recovery.recover(drafts)                  # at mount: what earlier runs left (or drafts.recover())
    draft = drafts.create(b"a/b.md", base=identity, kind=DraftKind.EDIT, writer=writer)
    draft.copy_from(version_fd)                        # unless it starts empty
    os.pwrite(draft.fd, …)
    publish.sync_draft(draft, durability)              # then, under the path's lock:
    publish.publish_edit(root, drafts, draft, …)       # or draft.keep(reason), or draft.discard()
    draft.close()                                      # always: `fd` is the DraftFile's own until then

A draft is in one of these states; the arrows are the only ways between them:

- *open*: staged in `.vaultfs/staging/ATTEMPT/`, being written → durable, publishing, kept, discarded.
- *durable*: the program's own fsync put it on disk. Recovery publishes it.
- *publishing*: complete, and its publish has begun. Recovery finishes it.
- *finished*: published, kept or discarded. `fd` stays open, for reading only, until `close`.

Who may touch a staging file: its attempt, as long as it holds `flock` on its staging directory. Recovery takes over
the directories whose flock is free (the kernel frees it when the process dies, however it dies) and those that the
fence renamed away from a predecessor that may come back to life (`locks.fence`). Staging is always named from the
descriptor of `.vaultfs`: when somebody renamed our attempt's directory away, everything we try afterwards fails, and
`Drafts` says FenceLostError.

Where renaming from staging to the target's directory is not possible (EXDEV: project quotas, encrypted directories,
subvolumes) the draft is staged in the target's own directory, under a hidden name `.vaultfs-staging-ID`.

A displaced version is thrown away only when it is known *and* a read lease proves that nobody has it open for writing
or mapped writable (fcntl(2), F_SETLEASE); otherwise it is kept, and looked at again by `sweep`.

Drafts and DraftFile are used from one thread; only `DraftFile.copy_from` and `publish.sync_draft` may run in another
one, while nobody else touches that draft.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import msgspec

from vaultfs import kernel
from vaultfs.errors import BadRequestError, DraftNotFoundError, FenceLostError, StateDirectoryError
from vaultfs.identity import FileIdentity
from vaultfs.journal import (
    KEPT_NAME,
    MARK_NAME,
    Claim,
    DraftKind,
    DraftRecord,
    DraftState,
    Journal,
    JournalLine,
    Mark,
    Writer,
    encode_path,
    staged_name,
    target_of_name,
)
from vaultfs.root import VaultRoot
from vaultfs.state import StateDirectory

if TYPE_CHECKING:
    from vaultfs.locks.path_lock import PathLocks
    from vaultfs.recovery import RecoveryReport

__all__ = [
    "HIDDEN_PREFIX",
    "DraftFile",
    "DraftKind",
    "DraftRecord",
    "DraftState",
    "Drafts",
    "KeptDraft",
    "Writer",
    "boot_id",
    "copy_content",
    "copy_range",
    "is_sidecar",
    "nobody_writes",
]

HIDDEN_PREFIX: Final = b".vaultfs-staging-"

_STAGING_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_XATTR: Final = frozenset(  # no such thing here, no room for it, or not ours to write: the sidecar stands in
    {errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOSPC, errno.EDQUOT, errno.E2BIG, errno.ERANGE, errno.EPERM, errno.EACCES}
)
_SIDECAR: Final = b".json"
_SIDECAR_LIMIT: Final = 1 << 20
_COPY_CHUNK: Final = 1 << 30  # copy_file_range copies up to 2 GiB at a time
_BUFFER: Final = 1 << 20


class KeptDraft(msgspec.Struct, frozen=True):
    """A line of `vaultfs drafts`. `target` is vault-relative ("" if unknown), `when` ISO 8601 UTC, `size` bytes."""

    id: str
    target: str
    size: int
    when: str
    writer: Writer
    reason: str
    kind: DraftKind


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def is_sidecar(name: bytes) -> bool:
    """True for the names of sidecars (and of those being written) in staging and among the kept drafts."""
    return b"~" not in name and name.endswith((_SIDECAR, _SIDECAR + b".new"))


def boot_id() -> str:
    """Which boot of this machine this is (random(4)); "" where /proc does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""  # then every earlier attempt counts as one of another boot: more is kept, nothing is lost


@contextlib.contextmanager
def nobody_writes(fd: int) -> Iterator[bool]:
    """While this lasts: True if it is proven that nobody has the file open for writing or mapped writable.

    `fd` must be open read-only; other read-only descriptors do not matter. Who tries to open it for writing meanwhile
    waits until the end of the context, so that must come within microseconds. fcntl(2), "Leases".

    False also where leases are not to be had (network file systems, another's file): not proven is not proven.
    """
    try:
        # a lease that is broken sends SIGIO by default, which would end the process; SIGURG is ignored by default
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:  # EAGAIN: somebody writes. Others: cannot be proven. Both keep the file, which is safe.
        yield False
        return
    try:
        yield True
    finally:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def copy_content(source: int, target: int) -> bool:
    """Make the empty file `target` hold what `source` holds, its holes included; True if all extents are shared.

    Reflink where the file system can (no data is copied, no matter how large), else SEEK_DATA and copy_file_range.
    Raises OSError: ENOSPC, EDQUOT, EIO.
    """
    size = os.fstat(source).st_size
    if size and kernel.ficlone(source, target):
        return True
    os.ftruncate(target, size)  # holes at the end too
    position = 0
    while position < size:
        try:
            start = os.lseek(source, position, os.SEEK_DATA)
            end = os.lseek(source, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                break
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            start, end = position, size  # holes are not told here: all of it is data
        end = min(end, size)
        copy_range(source, start, target, start, end - start)
        position = end
    return False


def copy_range(source: int, source_offset: int, target: int, target_offset: int, length: int) -> None:
    """Copy `length` bytes (fewer if the source ends), inside the kernel where it can. Raises OSError."""
    while length > 0:
        try:
            copied = os.copy_file_range(source, target, min(length, _COPY_CHUNK), source_offset, target_offset)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF):
                raise
            copied = 0
        if copied == 0:  # the end, or a file system whose copy_file_range does nothing (FUSE, /proc): by hand
            data = os.pread(source, min(length, _BUFFER), source_offset)
            if not data:
                return
            copied = os.pwrite(target, data, target_offset)
        source_offset += copied
        target_offset += copied
        length -= copied


class Drafts:
    """All drafts of one daemon run (`attempt`); see the module's text. Closed by `close` or the context manager.

    `assert_owned`, if set, is called by each publish before and after the name is touched: the fence's check.
    `fenced` says that a fence keeps other vaultfs processes away, so that a file system without RENAME_EXCHANGE may
    be served by comparing and renaming.
    """

    def __init__(self, root: VaultRoot, state: StateDirectory, attempt: str | None = None) -> None:
        self.root = root
        self.state = state
        self.attempt = attempt if attempt is not None else uuid.uuid4().hex
        if not self.attempt.replace("-", "").replace("_", "").isalnum():
            raise BadRequestError(f"an attempt's name has letters, digits, - and _ only: {self.attempt!r}")
        self.assert_owned: Callable[[], None] | None = None
        self.fenced = False
        self.unproven: set[str] = set()  # kept displaced versions that may go once nobody writes them: see `sweep`
        self.journal = Journal(state)
        self._boot_id = boot_id()
        self._directory_fd = -1  # our staging directory; holds the flock that says this attempt lives
        self._prefix = b""
        self._beside: set[bytes] = set()  # directories that cannot be renamed into from staging

    @staticmethod
    def new_id() -> str:
        """Ten letters that can be typed: 40 random bits; O_EXCL and NOREPLACE see to it that none is used twice."""
        return os.urandom(5).hex()

    # --- staging

    def staging(self) -> bytes:
        """Our staging directory, relative to `state.fd`, with a slash at the end; made on demand."""
        if self._directory_fd < 0:
            staging = self.state.name("staging")
            for _ in range(8):
                self._prefix = staging + b"/" + self.attempt.encode() + b"/"
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._prefix, 0o700, dir_fd=self.state.fd)
                fd = os.open(self._prefix, _DIRECTORY_FLAGS, dir_fd=self.state.fd)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    ours = os.stat(self._prefix, dir_fd=self.state.fd, follow_symlinks=False)
                    if ours.st_ino == os.fstat(fd).st_ino:
                        self._directory_fd = fd
                        self.journal.append(JournalLine(attempt=f"{self.attempt} {self._boot_id}"))
                        return self._prefix
                except (BlockingIOError, FileNotFoundError):
                    pass  # a recovery is just looking whether this is left over: take another name
                except BaseException:
                    os.close(fd)
                    raise
                os.close(fd)
                self.attempt = uuid.uuid4().hex
            raise StateDirectoryError("no staging directory can be had", path=self.state.path + b"/staging")
        return self._prefix

    def create(
        self,
        target: bytes,
        *,
        base: FileIdentity | None,
        kind: DraftKind | str,
        writer: Writer,
        mode: int | None = None,
        append_from: int | None = None,
        synced: bool = True,
        supersedes: str | None = None,
    ) -> DraftFile:
        """A new, empty draft of the vault-relative path `target`.

        base: the version that it starts from (None: there is none). mode: permission bits that a new file is to have;
        the draft itself is 0600. append_from: for kind "append", the size of `base`. synced: False if it will be
        published without waiting for the disk (`relaxed`). supersedes: the draft whose tail it is going to carry.

        Raises OSError (ENOSPC, EACCES, …), FenceLostError.
        """
        hidden = self._hides_beside(target)
        for _ in range(8):
            draft_id = self.new_id()
            try:
                if hidden:
                    place = target.rpartition(b"/")[0]
                    place = (place + b"/" if place else b"") + HIDDEN_PREFIX + draft_id.encode()
                    fd = self.root.open_file(place, _STAGING_FLAGS, 0o600)
                    name = place
                else:
                    place = None
                    name = self.staging() + staged_name(draft_id, target)
                    fd = self._open_staging(name)
                break
            except FileExistsError:
                continue
        else:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        try:
            record = DraftRecord(
                id=draft_id,
                target=encode_path(target),
                base=base,
                kind=DraftKind(kind),
                writer=writer,
                created_at=_now(),
                append_from=append_from,
                ino=os.fstat(fd).st_ino,
                attempt=self.attempt,
                hidden=encode_path(place) if place is not None else None,
                mode=mode,
                synced=synced,
                supersedes=supersedes,
            )
            draft = DraftFile(self, fd, record, name, place)
            draft._write_record()
        except BaseException:
            os.close(fd)
            self._unlink_quietly(name, place)
            raise
        return draft

    def _open_staging(self, name: bytes) -> int:
        try:
            return os.open(name, _STAGING_FLAGS, 0o600, dir_fd=self.state.fd)
        except FileNotFoundError:
            self._restore_staging()
            return os.open(name, _STAGING_FLAGS, 0o600, dir_fd=self.state.fd)

    def _restore_staging(self) -> None:
        """Our staging directory has gone: removed (make it again) or taken over (FenceLostError)?

        Who took it over may have emptied and removed it since; then only the fence can tell.
        """
        self.assert_attempt()
        if self.assert_owned is not None:
            self.assert_owned()
        self.state.forget("staging")
        os.close(self._directory_fd)
        self._directory_fd = -1
        self.staging()

    def assert_attempt(self) -> None:
        """Raises FenceLostError if somebody renamed our staging directory away: that is how one is taken over."""
        if self._directory_fd < 0:
            return
        held = os.fstat(self._directory_fd)
        try:
            found = os.stat(self._prefix, dir_fd=self.state.fd, follow_symlinks=False)
        except FileNotFoundError:
            if held.st_nlink > 0:
                raise FenceLostError(path=self.state.path) from None
            return
        if found.st_ino != held.st_ino and held.st_nlink > 0:
            raise FenceLostError(path=self.state.path)

    def _hides_beside(self, target: bytes) -> bool:
        return bool(self._beside) and target.rpartition(b"/")[0] in self._beside

    def _unlink_quietly(self, name: bytes, hidden: bytes | None) -> None:
        """Take back a staging file that nothing was written to, on an error path where the error itself matters."""
        with contextlib.suppress(OSError):
            if hidden is not None:
                self.root.unlink(hidden)
            else:
                os.unlink(name, dir_fd=self.state.fd)

    # --- sidecars

    def _sidecar_name(self, directory: bytes, draft_id: str) -> bytes:
        return directory + draft_id.encode() + _SIDECAR

    def write_sidecar(self, directory: bytes, record: DraftRecord) -> None:
        """The full record beside the file, complete or not at all. `directory` ends with a slash."""
        name = self._sidecar_name(directory, record.id)
        temporary = name + b".new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self.state.fd)
        try:
            os.write(fd, msgspec.json.encode(record) + b"\n")
            if record.state is not DraftState.OPEN:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=self.state.fd, dst_dir_fd=self.state.fd)

    def read_sidecar(self, directory: bytes, draft_id: str) -> DraftRecord | None:
        try:
            fd = os.open(self._sidecar_name(directory, draft_id), _READ_FLAGS, dir_fd=self.state.fd)
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(os.read(fd, _SIDECAR_LIMIT), type=DraftRecord)
        except (msgspec.DecodeError, OSError):  # damaged: the mark, the name and the journal are asked instead
            return None
        finally:
            os.close(fd)

    def drop_sidecar(self, directory: bytes, draft_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._sidecar_name(directory, draft_id), dir_fd=self.state.fd)

    # --- kept drafts

    def kept(self) -> list[KeptDraft]:
        """What was kept, oldest first. Files in the drafts directory that say nothing of themselves are listed too."""
        found = []
        for encoded in self._kept_names():
            with contextlib.suppress(FileNotFoundError):  # published or discarded while we list
                entry = self._look_at_kept(encoded)
                if entry is not None:
                    found.append(_listed(*entry))
        found.sort(key=lambda draft: (draft.when, draft.id))
        return found

    def _kept_names(self) -> list[bytes]:
        fd = os.open(self.state.name("drafts"), _DIRECTORY_FLAGS, dir_fd=self.state.fd)
        try:
            names = [os.fsencode(name) for name in os.listdir(fd)]
        finally:
            os.close(fd)
        return [name for name in names if not is_sidecar(name)]

    def _look_at_kept(self, name: bytes) -> tuple[DraftRecord, os.stat_result] | None:
        directory = self.state.name("drafts") + b"/"
        draft_id, target = target_of_name(name)
        status = os.stat(directory + name, dir_fd=self.state.fd, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            return None
        record = None
        with contextlib.suppress(PermissionError):  # a displaced version may be one that we cannot read: name it still
            fd = os.open(directory + name, _READ_FLAGS, dir_fd=self.state.fd)
            try:
                with contextlib.suppress(OSError, msgspec.DecodeError):  # no xattr: the sidecar, then the name
                    record = msgspec.json.decode(os.getxattr(fd, KEPT_NAME), type=DraftRecord)
            finally:
                os.close(fd)
        if record is None or record.id != draft_id:
            record = self.read_sidecar(directory, draft_id)
        if record is None:
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(status.st_mtime))
            record = DraftRecord(id=draft_id, target=encode_path(target or b""), state=DraftState.KEPT, kept_at=when)
        return record, status

    def _kept_name(self, draft_id: str) -> bytes:
        """Relative to `state.fd`. Raises DraftNotFoundError."""
        wanted = os.fsencode(draft_id)
        for encoded in self._kept_names():  # only what is listed can be meant, whatever the text looks like
            if wanted and (encoded == wanted or encoded.startswith(wanted + b"~")):
                return self.state.name("drafts") + b"/" + encoded
        raise DraftNotFoundError(f"there is no draft {draft_id!r}")

    def find_kept(self, draft_id: str) -> tuple[DraftRecord, KeptDraft]:
        """The full record of a kept draft, and its line in the list. Raises DraftNotFoundError."""
        try:
            entry = self._look_at_kept(self._kept_name(draft_id).rpartition(b"/")[2])
        except FileNotFoundError:
            entry = None
        if entry is None:
            raise DraftNotFoundError(f"there is no draft {draft_id!r}")
        return entry[0], _listed(*entry)

    def open_kept(self, draft_id: str) -> int:
        """A read-only descriptor of a kept draft; the caller closes it. Raises DraftNotFoundError."""
        try:
            return os.open(self._kept_name(draft_id), _READ_FLAGS, dir_fd=self.state.fd)
        except FileNotFoundError:
            raise DraftNotFoundError(f"there is no draft {draft_id!r}") from None

    def save_as(self, draft_id: str, destination: str | bytes) -> None:
        """Copy a kept draft to the absolute path `destination`, which must not exist; the draft stays listed.

        Raises DraftNotFoundError, FileExistsError, BadRequestError for a relative path, OSError. Inside the vault it
        keeps VaultRoot's rules; outside it is the caller's own right to write there that counts.
        """
        path = os.fsencode(destination)
        if not path.startswith(b"/"):
            raise BadRequestError("the destination must be an absolute path", path=path)
        source = self.open_kept(draft_id)
        try:
            inside = path.startswith(self.root.path.rstrip(b"/") + b"/")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            relative = self.root.relative(path) if inside else b""
            target = self.root.open_file(relative, flags, 0o600) if inside else os.open(path, flags, 0o600)
            try:
                copy_content(source, target)
                os.fsync(target)
            except BaseException:
                if inside:
                    self.root.unlink(relative)
                else:
                    os.unlink(path)
                raise
            finally:
                os.close(target)
        finally:
            os.close(source)

    def discard(self, draft_id: str) -> None:
        """Delete a kept draft. Raises DraftNotFoundError."""
        try:
            os.unlink(self._kept_name(draft_id), dir_fd=self.state.fd)
        except FileNotFoundError:
            raise DraftNotFoundError(f"there is no draft {draft_id!r}") from None
        self.drop_sidecar(self.state.name("drafts") + b"/", draft_id)
        self.unproven.discard(draft_id)

    def reopen(self, draft_id: str) -> DraftFile:
        """Take a kept draft back into staging, to publish it (with ``late=True``). Raises DraftNotFoundError."""
        name = self._kept_name(draft_id)
        record, _ = self.find_kept(draft_id)
        try:
            fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.state.fd)
        except FileNotFoundError:
            raise DraftNotFoundError(f"there is no draft {draft_id!r}") from None
        try:
            kind = DraftKind.REPLACEMENT if record.kind is DraftKind.DISPLACED else record.kind
            draft = self.adopt(name, fd, msgspec.structs.replace(record, kind=kind, state=DraftState.DURABLE))
        except BaseException:
            os.close(fd)
            raise
        with contextlib.suppress(OSError):  # void from here on: the mark speaks for the draft
            os.removexattr(fd, KEPT_NAME)
        self.drop_sidecar(self.state.name("drafts") + b"/", draft_id)
        return draft

    def adopt(self, name: bytes, fd: int, record: DraftRecord) -> DraftFile:
        """Make the file `name` (relative to `state.fd`, open at `fd`) a draft of this attempt; `fd` is its own then.

        Raises OSError; then the file is where it was, and `fd` the caller's.
        """
        record = msgspec.structs.replace(
            record, reason=None, kept_at="", ino=os.fstat(fd).st_ino, attempt=self.attempt, hidden=None
        )
        staged = self.staging() + staged_name(record.id, record.target_path)
        self.move_to(self.state.fd, name, staged)
        draft = DraftFile(self, fd, record, staged, None)
        draft._write_record()
        return draft

    def adopt_hidden(self, place: bytes, fd: int, record: DraftRecord) -> DraftFile:
        """The same for a draft that is staged beside its target at the vault-relative path `place`."""
        record = msgspec.structs.replace(
            record, reason=None, kept_at="", ino=os.fstat(fd).st_ino, attempt=self.attempt, hidden=encode_path(place)
        )
        draft = DraftFile(self, fd, record, place, place)
        draft._write_record()
        return draft

    def keep_file(
        self, directory: int, name: bytes, fd: int, record: DraftRecord, reason: str, *, sync: bool = True
    ) -> KeptDraft:
        """Move the file `name` (in `directory`, open at `fd`) to the kept drafts, with its full record.

        Nothing is overwritten. Raises OSError; the file is then still at `name`.
        """
        record = msgspec.structs.replace(
            record, state=DraftState.KEPT, reason=reason, kept_at=_now(), hidden=None, ino=os.fstat(fd).st_ino
        )
        drafts = self.state.name("drafts") + b"/"
        kept = drafts + staged_name(record.id, record.target_path)
        try:
            os.setxattr(fd, KEPT_NAME, msgspec.json.encode(record))
        except OSError as error:
            if error.errno not in _NO_XATTR and error.errno != errno.EBADF:  # EBADF: all we could get is O_PATH
                raise
            try:
                self.write_sidecar(drafts, record)
            except OSError as full:
                # On a full disk the name still says where it belongs; that it is kept matters more than why.
                if full.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
        try:
            self.move_to(directory, name, kept)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._copy_to(fd, kept, record)
            os.unlink(name, dir_fd=directory)
        if sync:
            with contextlib.suppress(OSError):  # EBADF with O_PATH; a disk that fails is told of by the publish itself
                os.fsync(fd)
            self._sync_drafts()
        self.note_gone(record.id)
        return _listed(record, os.fstat(fd))

    def _copy_to(self, source: int, kept: bytes, record: DraftRecord) -> None:
        target = os.open(kept, _STAGING_FLAGS, 0o600, dir_fd=self.state.fd)
        try:
            copy_content(source, target)
            with contextlib.suppress(OSError):  # the name says what is needed
                os.setxattr(target, KEPT_NAME, msgspec.json.encode(record))
            os.fsync(target)
        except BaseException:
            os.unlink(kept, dir_fd=self.state.fd)
            raise
        finally:
            os.close(target)

    def _sync_drafts(self) -> None:
        fd = os.open(self.state.name("drafts"), _DIRECTORY_FLAGS, dir_fd=self.state.fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def move_to(self, directory: int, name: bytes, new: bytes) -> None:
        """Rename into the state directory, never over anything. Raises OSError: EEXIST, EXDEV, ENOENT."""
        try:
            kernel.renameat2(directory, name, self.state.fd, new, kernel.RENAME_NOREPLACE)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
            # no NOREPLACE here, and nothing was done: ids are random and the directory is ours alone
            os.rename(name, new, src_dir_fd=directory, dst_dir_fd=self.state.fd)

    def sweep(self) -> int:
        """Look again at displaced versions that somebody had open for writing; delete those that nobody changed.

        Cheap when there is nothing to look at. Returns how many are gone.
        """
        gone = 0
        for draft_id in list(self.unproven):
            try:
                record, _ = self.find_kept(draft_id)
                fd = self.open_kept(draft_id)
            except DraftNotFoundError:
                self.unproven.discard(draft_id)
                continue
            except PermissionError:
                continue  # cannot be looked at: stays listed
            try:
                with nobody_writes(fd) as proven:
                    if not proven:
                        continue
                    now = FileIdentity.from_stat(os.fstat(fd))
                    if record.base is not None and (now.size, now.mtime_ns) == (record.base.size, record.base.mtime_ns):
                        self.discard(draft_id)
                        gone += 1
                    self.unproven.discard(draft_id)  # changed after it was displaced: kept for good
            finally:
                os.close(fd)
        return gone

    # --- claims

    def claim(self, path: bytes, identity: FileIdentity, writer: Writer) -> None:
        """Remember that the empty file `path` was made for O_CREAT|O_EXCL: it goes if its opener dies with us."""
        line = Claim(
            path=encode_path(path), identity=identity, writer=writer, boot_id=self._boot_id, attempt=self.attempt
        )
        self.journal.append(JournalLine(claim=line))

    def unclaim(self, path: bytes) -> None:
        """The claim was published, removed or renamed (then claim it again under the new name)."""
        with contextlib.suppress(OSError):  # as for `note_gone`: what is no longer empty and unchanged is never removed
            self.journal.append(JournalLine(unclaim=encode_path(path)))

    # --- life

    def recover(self, locks: PathLocks | None = None) -> RecoveryReport:
        """Put in order what earlier attempts left: see `vaultfs.recovery.recover`."""
        from vaultfs.recovery import recover  # the one import upwards: recovery builds on publish, and that on drafts

        return recover(self, locks)

    def compact(self) -> None:
        """Shorten the journal to what is still of use, if nobody else has it open."""
        known = self.journal.read()
        lines = [JournalLine(attempt=f"{name} {boot}") for name, boot in known.attempts.items() if self._has(name)]
        lines += [JournalLine(draft=record) for record in known.drafts.values()]
        lines += [JournalLine(claim=claim) for claim in known.claims.values()]
        self.journal.compact(lines)

    def _has(self, attempt: str) -> bool:
        try:
            os.stat(self.state.name("staging") + b"/" + attempt.encode(), dir_fd=self.state.fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def note_gone(self, draft_id: str) -> None:
        """A draft is finished; its line is of no more use."""
        # The journal is an index. On a full disk a finished save is finished all the same; recovery finds no file for
        # a line that was not crossed out, or finds that the name has it.
        with contextlib.suppress(OSError):
            self.journal.append(JournalLine(gone=draft_id))
            if self.journal.wants_compaction:
                self.compact()

    def close(self) -> None:
        """Let go of the staging directory (removed if it is empty) and the journal. Drafts must be closed before."""
        if self._directory_fd >= 0:
            with contextlib.suppress(OSError):  # not empty: the next recovery looks at it
                os.rmdir(self._prefix, dir_fd=self.state.fd)
            os.close(self._directory_fd)
            self._directory_fd = -1
        self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _listed(record: DraftRecord, status: os.stat_result) -> KeptDraft:
    return KeptDraft(
        id=record.id,
        target=os.fsdecode(record.target_path),
        size=status.st_size,
        when=record.kept_at or record.created_at,
        writer=record.writer,
        reason=record.reason or "found without a record",
        kind=record.kind,
    )


class DraftFile:
    """One draft in staging. `fd` is its descriptor (O_RDWR; read-only once finished); `close` closes it.

    `name` is relative to the state directory's descriptor, or the vault-relative `hidden` path where the draft is
    staged beside its target.
    """

    __slots__ = ("_drafts", "_sidecar", "fd", "finished", "hidden", "name", "record", "target")

    def __init__(self, drafts: Drafts, fd: int, record: DraftRecord, name: bytes, hidden: bytes | None) -> None:
        self._drafts = drafts
        self.fd = fd
        self.record = record
        self.name = name
        self.hidden = hidden
        self.target = record.target_path
        self.finished = False
        self._sidecar = False

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def path(self) -> bytes:
        """Where it is staged, vault-relative."""
        return self.hidden if self.hidden is not None else self._drafts.state.path + b"/" + self.name

    def place(self) -> contextlib.AbstractContextManager[tuple[int, bytes]]:
        """A context manager that gives (directory descriptor, name) for `*at` calls on the staging file."""
        if self.hidden is None:
            return contextlib.nullcontext((self._drafts.state.fd, self.name))
        return self._drafts.root.parent(self.hidden)

    # --- what it says of itself

    def _needs_sidecar(self) -> bool:
        # what a tail's copy stands for decides whether the tail is applied once or twice: no second source for that
        return self.hidden is not None or b"~" not in self.name or self.record.supersedes is not None

    def _write_record(self) -> None:
        """Mark the inode (and write the sidecar where that does not say all), then the journal."""
        sidecar = self._needs_sidecar()
        try:
            os.setxattr(self.fd, MARK_NAME, Mark.pack(self.record))
        except OSError as error:
            if error.errno not in _NO_XATTR:
                raise
            sidecar = True
        if sidecar:
            self._drafts.write_sidecar(self._drafts.staging(), self.record)
            self._sidecar = True
        self._drafts.journal.append(JournalLine(draft=self.record))

    def unmark(self) -> None:
        """Take our mark off the inode: it is, or is about to become, a document."""
        with contextlib.suppress(OSError):  # absent, or read-only by now: void on what is not staged, and hidden anyway
            os.removexattr(self.fd, MARK_NAME)

    def mark(self, state: DraftState | str, *, durable: bool = False) -> None:
        """Say how far the draft got. `durable`: with content and record on disk when this returns (blocks).

        Raises OSError: ENOSPC, EIO.
        """
        if durable:
            os.fsync(self.fd)  # first: a mark must never be on disk before the content that it vouches for
        self.record = msgspec.structs.replace(self.record, state=DraftState(state))
        self._write_record()
        if durable:
            os.fsync(self.fd)  # not fdatasync: the mark is metadata
            self._drafts.journal.sync()

    def begin(self, *, synced: bool) -> None:
        """The intent: from this line on recovery finishes the publish, or finds that it happened."""
        record = self.record
        if record.state is not DraftState.PUBLISHING or record.synced != synced:  # else `sync_draft` wrote the line
            self.record = record = msgspec.structs.replace(record, state=DraftState.PUBLISHING, synced=synced)
            self._drafts.journal.append(JournalLine(draft=record))

    def describe(
        self,
        *,
        base: FileIdentity | None = None,
        kind: DraftKind | None = None,
        append_from: int | None = None,
        mode: int | None = None,
    ) -> None:
        """Change what the draft is, e.g. from an append to an edit (`append_from` stays only with kind "append")."""
        changes: dict[str, object] = {}
        if base is not None:
            changes["base"] = base
        if mode is not None:
            changes["mode"] = mode
        if kind is not None:
            changes["kind"] = kind
            changes["append_from"] = append_from if kind is DraftKind.APPEND else None
        self.record = msgspec.structs.replace(self.record, **changes)
        self._write_record()

    def retarget(self, target: bytes) -> None:
        """The file was renamed, or a directory above it: the draft belongs to `target` now. Raises OSError."""
        drafts = self._drafts
        record = msgspec.structs.replace(self.record, target=encode_path(target))
        if self.hidden is None:
            name = drafts.staging() + staged_name(self.id, target)
            if b"~" not in name:
                drafts.write_sidecar(drafts.staging(), record)
                self._sidecar = True
            if name != self.name:
                drafts.move_to(drafts.state.fd, self.name, name)
                self.name = name
        else:
            # the hidden file itself stays where it is, or went along with its directory
            old = self.target
            moved = self._moved_along(old, target)
            if moved is not None:
                self.hidden = self.name = moved
                record = msgspec.structs.replace(record, hidden=encode_path(moved))
        self.record = record
        self.target = target
        self._write_record()

    def _moved_along(self, old: bytes, new: bytes) -> bytes | None:
        """Where the hidden staging file is now that `old` became `new`; None if it did not move."""
        assert self.hidden is not None
        try:
            if self._drafts.root.stat(self.hidden).st_ino == self.record.ino:
                return None
        except OSError:
            pass  # not there any more: a directory above it was renamed
        return (new.rpartition(b"/")[0] + b"/" if b"/" in new else b"") + self.hidden.rpartition(b"/")[2]

    # --- content

    def copy_from(self, source: int) -> bool:
        """Start from the content of the descriptor `source`; True if by reflink (at no cost). May run in a thread.

        Raises OSError: ENOSPC, EDQUOT, EIO.
        """
        return copy_content(source, self.fd)

    def move_beside(self) -> None:
        """Stage the draft in its target's own directory, which cannot be renamed into from staging (EXDEV).

        Copies the content; later drafts of that directory are staged there from the start. Raises OSError.
        """
        drafts = self._drafts
        target = self.target
        parent = target.rpartition(b"/")[0]
        hidden = (parent + b"/" if parent else b"") + HIDDEN_PREFIX + self.id.encode()
        status = os.fstat(self.fd)
        fd = drafts.root.open_file(hidden, _STAGING_FLAGS, 0o600)
        try:
            copy_content(self.fd, fd)
            os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fdatasync(fd)
            record = msgspec.structs.replace(self.record, ino=os.fstat(fd).st_ino, hidden=encode_path(hidden))
            old = self.name
            os.dup2(fd, self.fd, inheritable=False)
        except BaseException:
            drafts._unlink_quietly(hidden, hidden)
            raise
        finally:
            os.close(fd)
        self.record = record
        self.hidden = self.name = hidden
        self._write_record()
        os.unlink(old, dir_fd=drafts.state.fd)
        drafts._beside.add(parent)

    def restore(self) -> None:
        """Somebody destroyed the staging file: make it again from the descriptor. Raises OSError, FenceLostError."""
        drafts = self._drafts
        drafts.assert_attempt()
        fresh = drafts.create(
            self.target,
            base=self.record.base,
            kind=self.record.kind,
            writer=self.record.writer,
            mode=self.record.mode,
            append_from=self.record.append_from,
            synced=self.record.synced,
        )
        try:
            status = os.fstat(self.fd)
            copy_content(self.fd, fresh.fd)
            os.utime(fresh.fd, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fdatasync(fresh.fd)
        except BaseException:
            fresh.discard()
            raise
        self.become(fresh)

    def become(self, fresh: DraftFile) -> None:
        """Take over the staging file of `fresh`, which is used up by this; ours is forgotten (not unlinked)."""
        old = self.id
        if self._sidecar:
            self._drafts.drop_sidecar(self._drafts.staging(), old)
        os.dup2(fresh.fd, self.fd, inheritable=False)
        os.close(fresh.fd)
        fresh.fd = -1
        fresh.finished = True
        self.record, self.name, self.hidden, self._sidecar = fresh.record, fresh.name, fresh.hidden, fresh._sidecar
        self.target = fresh.target
        self._drafts.note_gone(old)

    # --- the end

    def finish(self, reading: int | None) -> None:
        """It is published: nothing of ours is left at `name`. `reading`: a read-only descriptor of the published file.

        `fd` becomes read-only: a version never changes, and a descriptor open for writing would hold up the proof
        that nobody writes it when it is displaced in its turn.
        """
        if reading is not None:
            os.dup2(reading, self.fd, inheritable=False)
        self._end()

    def _end(self) -> None:
        self.finished = True
        if self._sidecar:
            self._drafts.drop_sidecar(self._drafts.staging(), self.id)
            self._sidecar = False
        self._drafts.note_gone(self.id)

    def keep(self, reason: str, *, sync: bool = True, close: bool = True) -> KeptDraft:
        """Move it to the kept drafts, with its record on disk if `sync`; with `close` False `fd` stays, read-only.

        Raises OSError, FenceLostError; then it is still staged, and recovery will keep it.
        """
        drafts = self._drafts
        status = os.fstat(self.fd)
        if stat.S_IMODE(status.st_mode) & 0o7177:  # dressed for its name already: private again
            os.fchmod(self.fd, 0o600)
        try:
            with self.place() as (directory, name):
                kept = drafts.keep_file(directory, name, self.fd, self.record, reason, sync=sync)
        except FileNotFoundError:
            self.restore()  # destroyed by somebody (FenceLostError if it was taken over): our descriptor has it all
            with self.place() as (directory, name):
                kept = drafts.keep_file(directory, name, self.fd, self.record, reason, sync=sync)
        self.unmark()
        if not close:
            reading = drafts.open_kept(self.id)
            try:
                os.dup2(reading, self.fd, inheritable=False)
            finally:
                os.close(reading)
        self._end()
        if close:
            self.close()
        return kept

    def discard(self) -> None:
        """Delete the draft and close it. Idempotent; does nothing but close to a finished one."""
        if not self.finished:
            try:
                with self.place() as (directory, name):
                    os.unlink(name, dir_fd=directory)
            except FileNotFoundError:
                pass  # gone already, or our directory was taken over: nothing of ours to delete
            self._end()
        self.close()

    def close(self) -> None:
        """Close `fd`. Idempotent. An unfinished draft stays staged: recovery will look at it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
