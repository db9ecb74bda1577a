"""Kept drafts: what could not be published, or was taken off its name, listed with where it belongs.

Each is a file ``.vaultfs/drafts/ID~TARGET`` that describes itself (`journal`): the full record is its xattr, or a
sidecar ``ID.json`` beside it; failing both, the name still says where it belongs. So the list needs no index and
survives the loss of everything else. Files there that say nothing of themselves are listed too.

A displaced version is thrown away only when it is known *and* a read lease proves that nobody writes it
(`content.nobody_writes`); where that could not be proven it is kept, marked as spent, and looked at again by `sweep`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from typing import Final

import msgspec

from vaultfs import kernel
from vaultfs.content import copy_content, nobody_writes
from vaultfs.errors import BadRequestError, DraftNotFoundError
from vaultfs.identity import FileIdentity
from vaultfs.journal import (
    KEPT_NAME,
    DraftKind,
    DraftRecord,
    DraftState,
    Journal,
    JournalLine,
    Writer,
    encode_path,
    staged_name,
    target_of_name,
)
from vaultfs.root import VaultRoot
from vaultfs.state import StateDirectory

__all__ = ["NO_XATTR", "KeptDraft", "KeptDrafts", "is_sidecar", "timestamp"]

NO_XATTR: Final = frozenset(  # no such thing here, no room for it, or not ours to write: the sidecar stands in
    {errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOSPC, errno.EDQUOT, errno.E2BIG, errno.ERANGE, errno.EPERM, errno.EACCES}
)
_CREATE_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SIDECAR: Final = b".json"
_SIDECAR_LIMIT: Final = 1 << 20


class KeptDraft(msgspec.Struct, frozen=True):
    """A line of `vaultfs drafts`. `target` is vault-relative ("" if unknown), `when` ISO 8601 UTC, `size` bytes."""

    id: str
    target: str
    size: int
    when: str
    writer: Writer
    reason: str
    kind: DraftKind


def timestamp() -> str:
    """Now, ISO 8601 UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def is_sidecar(name: bytes) -> bool:
    """True for the names of sidecars (and of those being written) in staging and among the kept drafts."""
    return b"~" not in name and name.endswith((_SIDECAR, _SIDECAR + b".new"))


class KeptDrafts:
    """The kept drafts of one vault. `unproven`: ids of those that `sweep` looks at."""

    def __init__(self, root: VaultRoot, state: StateDirectory) -> None:
        self.root = root
        self.state = state
        self.journal = Journal(state)
        self.unproven: set[str] = set()

    @staticmethod
    def new_id() -> str:
        """Ten letters that can be typed: 40 random bits; O_EXCL and NOREPLACE see to it that none is used twice."""
        return os.urandom(5).hex()

    # --- the list

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

    # --- keeping

    def keep_file(
        self, directory: int, name: bytes, fd: int, record: DraftRecord, reason: str, *, sync: bool = True
    ) -> KeptDraft:
        """Move the file `name` (in `directory`, open at `fd`) to the kept drafts, with its full record.

        Nothing is overwritten. Raises OSError; the file is then still at `name`.
        """
        record = msgspec.structs.replace(
            record, state=DraftState.KEPT, reason=reason, kept_at=timestamp(), hidden=None, ino=os.fstat(fd).st_ino
        )
        drafts = self.state.name("drafts") + b"/"
        kept = drafts + staged_name(record.id, record.target_path)
        try:
            os.setxattr(fd, KEPT_NAME, msgspec.json.encode(record))
        except OSError as error:
            if error.errno not in NO_XATTR and error.errno != errno.EBADF:  # EBADF: all we could get is O_PATH
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
        target = os.open(kept, _CREATE_FLAGS, 0o600, dir_fd=self.state.fd)
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

    # --- the journal

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
