"""DraftFile: one draft in staging, from the moment it is made until it is published, kept or discarded.

See `drafts` for its states and who may touch it. Its owner closes it: `close`, which `discard` and (unless told
otherwise) `keep` include.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, Final

import msgspec

from vaultfs.content import copy_content
from vaultfs.identity import FileIdentity
from vaultfs.journal import (
    MARK_NAME,
    DraftKind,
    DraftRecord,
    DraftState,
    JournalLine,
    Mark,
    encode_path,
    staged_name,
)
from vaultfs.kept import NO_XATTR, KeptDraft

if TYPE_CHECKING:
    from vaultfs.drafts import Drafts

__all__ = ["HIDDEN_PREFIX", "STAGING_FLAGS", "DraftFile"]

HIDDEN_PREFIX: Final = b".vaultfs-staging-"  # of drafts that have to be staged in their target's own directory
STAGING_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


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
            if error.errno not in NO_XATTR:
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
        fd = drafts.root.open_file(hidden, STAGING_FLAGS, 0o600)
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
