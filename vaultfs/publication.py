"""One publish under way: the exchange, what becomes of what it displaces, and of a draft that meets a newcomer.

The functions of `publish` are the way in; each makes a `Publication`, which holds the target's directory and what was
opened on the way, and closes it all at the end. The path's lock is held throughout, but programs that write into the
vault directly take no lock: every rename here may meet their files.

**The exchange** (core-library.md). S is what we staged, E what we expect at the name, H what RENAME_EXCHANGE gave us
for it. H is E: done. Otherwise we exchange back at once and look at what we hold then. S: the name has the newcomer
again. Y, neither S nor H: somebody wrote while S was at the name, so Y has to have it: H is kept and Y put back. At
most 8 exchanges; then everything is kept and the outcome is uncertain. So a reader of the name may see S for some
microseconds before the newcomer is back: one whole version after another, as with any two saves.

A file that stood at the name and is known (or equal) is deleted once it is proven that nobody writes it, everything
else that we took off a name is kept and listed (`kept`).

Where RENAME_EXCHANGE is not to be had, only a publisher that holds the vault's fence (`Drafts.fenced`) may replace,
by comparing and renaming; others get *atomic_unavailable*.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from types import TracebackType
from typing import Final, Literal, NoReturn, Self

import msgspec

from vaultfs import kernel
from vaultfs.conflicts import conflict_name
from vaultfs.content import copy_content, copy_range, nobody_writes, same_bytes
from vaultfs.drafts import DraftFile, Drafts, KeptDraft
from vaultfs.errors import ConflictError, Outcome, PathKind, PublishError, UnsafePathError, printable
from vaultfs.identity import FileIdentity, digest
from vaultfs.journal import DraftKind, DraftRecord, DraftState, encode_path, staged_name
from vaultfs.metadata import Metadata, dress_as_new, dress_as_replacement
from vaultfs.root import VaultRoot

__all__ = ["TRIES", "ConflictPolicy", "Durability", "Publication", "Published", "Target"]

TRIES: Final = 8  # exchanges, or looks at a name that keeps changing
_COMPARE_LIMIT: Final = 4 << 20  # bytes; a displaced version that is larger is kept rather than read on the way
_CONFLICT_COMPARE_LIMIT: Final = 256 << 20  # bytes; what is larger counts as different: a copy too many, no stall
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_UNSUPPORTED: Final = (errno.EINVAL, errno.ENOSYS)  # the file system rejects the flag before doing anything

ConflictPolicy = Literal["copy", "fail", "overwrite"]


class Durability(StrEnum):
    """What `close()` waits for."""

    ORDERED = "ordered"  # the draft's data is on disk before it is renamed: old or new after a power loss
    STRICT = "strict"  # and the directory is, at every publish
    RELAXED = "relaxed"  # nothing: atomic for readers and for a killed daemon


class Published(msgspec.Struct, frozen=True):
    """A publish that went through.

    identity: of the published file, as the name showed it afterwards. displaced: what stood at the name and was
    kept. superseded: somebody replaced or removed the new version before we could look at it at its name.
    """

    identity: FileIdentity
    outcome: Outcome = Outcome.PUBLISHED
    displaced: KeptDraft | None = None
    conflict_copy: bytes | None = None
    superseded: bool = False


class Target:
    """What stands at a name: a descriptor (O_PATH if it may not be read) and its stat. Closed by the publication."""

    __slots__ = ("fd", "identity", "readable", "status")

    def __init__(self, fd: int, status: os.stat_result, readable: bool) -> None:
        self.fd = fd
        self.status = status
        self.readable = readable
        self.identity = FileIdentity.from_stat(status)


class Publication:
    """One publish under way: the target's directory is held open, and what was opened on the way, until the end."""

    def __init__(
        self,
        root: VaultRoot,
        drafts: Drafts,
        draft: DraftFile,
        path: bytes,
        meta: Metadata,
        durability: Durability | str,
        late: bool,
    ) -> None:
        if draft.finished:
            raise PublishError("the draft is finished already", path=path, outcome=Outcome.INVALID_REQUEST)
        self._root = root
        self._drafts = drafts
        self._draft = draft
        self._path = path
        self._meta = meta
        self._durability = Durability(durability)
        self._late = late
        self._parent = root.parent(path)
        self._descriptors: list[int] = []
        self._displaced: KeptDraft | None = None
        self._dressed_for: Target | None = None
        self._begun = False
        self._directory = -1
        self._name = b""

    def __enter__(self) -> Self:
        self._directory, self._name = self._parent.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._descriptors:
            os.close(fd)
        self._parent.__exit__(kind, error, trace)

    # --- looking

    def open_target(self) -> Target | None:
        """What stands at the name; None for nothing. Raises UnsafePathError, IsADirectoryError."""
        return self._open(self._directory, self._name)

    def _open(self, directory: int, name: bytes) -> Target | None:
        readable = True
        try:
            fd = os.open(name, _READ_FLAGS, dir_fd=directory)
        except FileNotFoundError:
            return None
        except (PermissionError, BlockingIOError):  # write-only, or leased: it can be replaced, though not read
            readable = False
            try:
                fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            except FileNotFoundError:
                return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UnsafePathError(PathKind.COMPONENT_LINK, self._path, cause_errno=errno.ELOOP) from error
            if error.errno == errno.ENXIO:  # a socket
                raise UnsafePathError(PathKind.UNSUPPORTED_TYPE, self._path, cause_errno=errno.ENXIO) from error
            raise
        self._descriptors.append(fd)
        status = os.fstat(fd)
        self._refuse_irregular(status)
        if status.st_dev != self._root.dev:
            raise UnsafePathError(PathKind.CROSSES_MOUNT, self._path, cause_errno=errno.EXDEV)
        return Target(fd, status, readable)

    def _refuse_irregular(self, status: os.stat_result) -> None:
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._path)
        if stat.S_ISLNK(status.st_mode):
            raise UnsafePathError(PathKind.COMPONENT_LINK, self._path, cause_errno=errno.ELOOP)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafePathError(PathKind.UNSUPPORTED_TYPE, self._path)

    def _held(self) -> os.stat_result | None:
        """What stands in staging under the draft's name."""
        with self._draft.place() as (directory, name):
            try:
                return os.stat(name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def _is_draft(self, status: os.stat_result) -> bool:
        return status.st_ino == self._draft.record.ino and status.st_dev == self._root.dev

    def _accepts(self, found: Target, base: FileIdentity, base_fd: int | None, *, equal_to_draft: bool) -> bool:
        """Is `found` the version that the draft started from, or as good as that?"""
        if found.identity.same_content(base):
            return True
        if not found.readable:
            return False
        if equal_to_draft and same_bytes(found.fd, self._draft.fd, _CONFLICT_COMPARE_LIMIT):
            return True
        if found.status.st_size != base.size:
            return False
        if base_fd is not None:
            version = os.fstat(base_fd)
            if (version.st_dev, version.st_ino) != (found.status.st_dev, found.status.st_ino):
                return same_bytes(found.fd, base_fd, _CONFLICT_COMPARE_LIMIT)
        return base.sha256 is not None and base.size <= _CONFLICT_COMPARE_LIMIT and digest(found.fd) == base.sha256

    # --- before the name is touched

    def dress(self, target: Target | None) -> None:
        """Give the draft the metadata that it will have at the name. Raises OSError."""
        fd = self._draft.fd
        now = os.fstat(fd)
        if target is None:
            mode = dress_as_new(fd, now, self._directory, self._meta)
        else:
            mode = dress_as_replacement(fd, now, target.fd if target.readable else None, target.status, self._meta)
        if not mode & 0o200 and os.geteuid() != 0:
            self._draft.unmark()  # it could not be taken off a read-only file any more; the journal knows the draft
        os.fchmod(fd, mode)
        if self._late:
            os.utime(fd)
        self._dressed_for = target

    def begin(self) -> None:
        """Record the intent; from here on a crash is finished, or found to have been complete, by recovery."""
        self._assert_ours()
        if self._draft.target != self._path:
            self._draft.retarget(self._path)
        self._draft.begin(synced=self._durability is not Durability.RELAXED)
        self._begun = True

    def _assert_ours(self) -> None:
        self._root.assert_bound()
        if self._drafts.assert_owned is not None:
            self._drafts.assert_owned()

    # --- the renames

    def _rename(self, flags: int, name: bytes | None = None) -> None:
        """renameat2 between staging and the name (or another `name` in its directory).

        Stages the draft anew where that is what is wrong. Raises OSError: EEXIST, ENOENT (the name is gone), EINVAL or
        ENOSYS (no such flag here), and others.
        """
        for _ in range(3):
            try:
                with self._draft.place() as (directory, staged):
                    kernel.renameat2(directory, staged, self._directory, name or self._name, flags)
                return
            except OSError as error:
                if error.errno == errno.EXDEV and not self._staged_here():
                    self._draft.move_beside()
                elif error.errno == errno.ENOENT and self._held() is None:
                    self._draft.restore()  # destroyed by somebody; FenceLostError if it was taken over
                else:
                    raise
            self.dress(self._dressed_for)
            self.begin()
        raise PublishError("the staged file keeps disappearing", path=self._path)

    def _staged_here(self) -> bool:
        hidden = self._draft.hidden
        return hidden is not None and hidden.rpartition(b"/")[0] == self._path.rpartition(b"/")[0]

    def place_new(self, name: bytes | None = None) -> None:
        """Move the draft to the name, never over anything. Raises FileExistsError, OSError."""
        try:
            self._rename(kernel.RENAME_NOREPLACE, name)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            # Nothing was done: link and unlink do the same for files. No other failure is tried by another means.
            with self._draft.place() as (directory, staged):
                os.link(
                    staged, name or self._name, src_dir_fd=directory, dst_dir_fd=self._directory, follow_symlinks=False
                )
                os.unlink(staged, dir_fd=directory)

    def replace(self, known: FileIdentity | None, reason: str) -> Published:
        """Put the draft at the name whatever stands there; see `publish_replacement`."""
        for _ in range(TRIES):
            target = self.open_target()
            self.dress(target)
            if not self._begun:
                self.begin()
            if target is None:
                try:
                    self.place_new()
                except FileExistsError:
                    continue  # taken meanwhile: a replacement like any other
                return self.done()
            try:
                self._rename(kernel.RENAME_EXCHANGE)
            except FileNotFoundError:
                continue  # the name is free now
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self._replace_without_exchange(target, known, reason)
                return self.done()
            with self._draft.place() as (directory, staged):
                held = self._take_hold(directory, staged, target)
                if held is None:  # somebody took it out of our staging: nothing to keep or delete
                    return self.done()
                if held is not target:
                    self._dress_published(held)
                self._dispose(directory, staged, held, self._may_go(held, known), reason)
            return self.done()
        raise PublishError("the name keeps changing", path=self._path)

    def _take_hold(self, directory: int, staged: bytes, target: Target) -> Target | None:
        """What the exchange gave us: `target`, or a newcomer; None if somebody took it out of our staging.

        What is no regular file goes back where it was, and is refused.
        """
        try:
            status = os.stat(staged, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if status.st_ino == target.status.st_ino and status.st_dev == target.status.st_dev:
            target.status = status
            target.identity = FileIdentity.from_stat(status)
            return target
        if not stat.S_ISREG(status.st_mode):
            kernel.renameat2(directory, staged, self._directory, self._name, kernel.RENAME_EXCHANGE)
            self._refuse_irregular(status)
        return self._open(directory, staged)

    def _dress_published(self, held: Target) -> None:
        """The draft has the name already, but took its metadata from a file that was not the last one there."""
        with suppress(OSError):  # it is published; rights that are one save old are what a slower save would have had
            self.dress(held)

    def _may_go(self, held: Target, known: FileIdentity | None) -> bool:
        if known is not None and held.identity.same_content(known):
            return True
        return held.readable and same_bytes(held.fd, self._draft.fd, _COMPARE_LIMIT)

    def _dispose(self, directory: int, name: bytes, held: Target, may_go: bool, reason: str) -> None:
        """Delete what was displaced if it may go and nobody writes it; keep and list it otherwise."""
        spent = False
        if may_go and held.readable:
            with nobody_writes(held.fd) as proven:
                if proven:
                    now = os.fstat(held.fd)
                    if (now.st_size, now.st_mtime_ns) == (held.status.st_size, held.status.st_mtime_ns):
                        os.unlink(name, dir_fd=directory)
                        return
            spent = True
            reason = "somebody had this version open for writing when it was replaced"
        self._keep(directory, name, held, reason, spent=spent)

    def _keep(self, directory: int, name: bytes, held: Target, reason: str, *, spent: bool = False) -> None:
        record = DraftRecord(
            id=self._drafts.new_id(),
            target=encode_path(self._path),
            base=held.identity,
            kind=DraftKind.DISPLACED,
            writer=self._draft.record.writer,
            created_at=self._draft.record.created_at,
            attempt=self._drafts.attempt,
            spent=spent,
        )
        self._displaced = self._drafts.keep_file(directory, name, held.fd, record, reason, sync=False)
        if spent:
            self._drafts.unproven.add(record.id)

    def _replace_without_exchange(self, target: Target, known: FileIdentity | None, reason: str) -> None:
        """Compare and rename: under the fence, and only there. What is displaced is linked into staging before."""
        if not self._drafts.fenced:
            raise PublishError(
                "this file system cannot exchange two files in one step, and no fence is held",
                path=self._path,
                outcome=Outcome.ATOMIC_UNAVAILABLE,
                cause_errno=errno.EOPNOTSUPP,
            )
        extra = self._drafts.staging() + staged_name(self._drafts.new_id(), self._path)
        state = self._drafts.state.fd
        linked = True
        try:
            os.link(self._name, extra, src_dir_fd=self._directory, dst_dir_fd=state, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV):
                raise
            linked = False
        if not linked and not self._may_go(target, known):
            copy = os.open(extra, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=state)
            self._descriptors.append(copy)
            copy_content(target.fd, copy)
            linked = True
        with self._draft.place() as (directory, staged):
            os.rename(staged, self._name, src_dir_fd=directory, dst_dir_fd=self._directory)
        if linked:
            held = self._open(state, extra)
            if held is not None:
                self._dispose(state, extra, held, self._may_go(held, known), reason)

    # --- compare and swap

    def compare_and_swap(
        self, target: Target, base: FileIdentity, base_fd: int | None, *, equal_to_draft: bool
    ) -> bool:
        """Put the draft at the name if that holds `base` (or as good); False if it holds something else.

        When False is returned the name has the newest version that others put there and staging has the draft.
        Raises PublishError published_uncertain after 8 exchanges.
        """
        if not self._accepts(target, base, base_fd, equal_to_draft=equal_to_draft):
            return False
        self.dress(target)
        self.begin()
        try:
            self._rename(kernel.RENAME_EXCHANGE)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._replace_without_exchange(target, target.identity, "displaced by an edit")
            return True
        with self._draft.place() as (directory, staged):
            expected = target.identity
            held = self._take_hold(directory, staged, target)
            if held is None:
                return True  # taken out of our staging by somebody: the draft has the name all the same
            if held.identity.same_content(expected) or self._accepts(
                held, base, base_fd, equal_to_draft=equal_to_draft
            ):
                if held is not target:
                    self._dress_published(held)
                self._dispose(directory, staged, held, True, "displaced by an edit")
                return True
            self._put_back(directory, staged, held)
        return False

    def _put_back(self, directory: int, staged: bytes, held: Target) -> None:
        """Give the name back to the newcomer `held`; when this returns, staging has the draft again.

        Raises PublishError published_uncertain when others do not let the name alone for so long.
        """
        placed: Target | None = None  # what we put at the name last; None: the draft
        for _ in range(TRIES - 1):
            try:
                status = self._exchange_back(directory, staged)
            except FileExistsError:
                continue
            if status is None:  # the name was free: `held` has it, and the draft is where only our descriptor knows it
                self._draft.restore()
                return
            if placed is None and self._is_draft(status):
                return  # the usual case
            if placed is not None and (status.st_ino, status.st_dev) == (placed.status.st_ino, placed.status.st_dev):
                # The newest has the name; what we hold was overwritten by its writer, unseen: keep it. The draft
                # was destroyed at the name.
                self._keep(directory, staged, placed, "a version that was overwritten while another was being saved")
                self._draft.restore()
                return
            if not stat.S_ISREG(status.st_mode):
                break
            newer = self._open(directory, staged)
            if newer is None:
                break
            placed, held = held, newer
        self._give_up(directory, staged)

    def _exchange_back(self, directory: int, staged: bytes) -> os.stat_result | None:
        """Put what we hold at the name; the stat of what we got for it, None if the name was free.

        Raises FileExistsError if the name was free and is not any more.
        """
        try:
            kernel.renameat2(directory, staged, self._directory, self._name, kernel.RENAME_EXCHANGE)
            return os.stat(staged, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            self._drafts.assert_attempt()
            # Somebody removed the draft from the name. What we hold was there before it: it gets the free name.
            kernel.renameat2(directory, staged, self._directory, self._name, kernel.RENAME_NOREPLACE)
            return None

    def _give_up(self, directory: int, staged: bytes) -> NoReturn:
        """Others would not let the name alone. Keep all that is in our hands, and say that it is uncertain."""
        status = self._held()
        if status is None or not self._is_draft(status):
            if status is not None and stat.S_ISREG(status.st_mode):
                found = self._open(directory, staged)
                if found is not None:
                    self._keep(directory, staged, found, "taken off its name while others kept changing it")
            self._draft.restore()
        kept = self._draft.keep("others kept changing the file while it was saved", close=False)
        raise PublishError(
            f"others kept changing the file while it was saved; the new version is kept as draft {kept.id}",
            path=self._path,
            outcome=Outcome.PUBLISHED_UNCERTAIN,
        )

    # --- tails

    def apply_tail(self, target: Target, append_from: int) -> bool:
        """Make the draft hold `target` with the draft's own tail behind it; False if the target changed meanwhile.

        The new staging file says that it carries the tail of the old one, and on which inode: whoever recovers finds
        either the old draft or, once the new one is complete, that one, and applies nothing twice.
        """
        draft = self._draft
        old = draft.record
        fresh = self._drafts.create(
            self._path,
            base=target.identity,
            kind=DraftKind.APPEND,
            writer=old.writer,
            mode=old.mode,
            append_from=target.status.st_size,
            synced=old.synced,
            supersedes=old.id,
        )
        try:
            copy_content(target.fd, fresh.fd)
            now = os.fstat(target.fd)
            if (now.st_size, now.st_mtime_ns) != (target.status.st_size, target.status.st_mtime_ns):
                fresh.discard()
                return False
            status = os.fstat(draft.fd)
            copy_range(draft.fd, append_from, fresh.fd, target.status.st_size, status.st_size - append_from)
            os.utime(fresh.fd, ns=(status.st_atime_ns, status.st_mtime_ns))
            if self._durability is not Durability.RELAXED:
                os.fdatasync(fresh.fd)
            fresh.mark(DraftState.PUBLISHING)
        except BaseException:
            fresh.discard()
            raise
        with draft.place() as (directory, staged):
            os.unlink(staged, dir_fd=directory)
        draft.become(fresh)
        return True

    # --- the end

    def conflict(self, newcomer: Target | None, policy: ConflictPolicy) -> ConflictError:
        """The newcomer keeps the name (None: nothing stands there); the draft becomes a copy beside it, or is kept.

        Returns the error to raise; raises OSError if not even keeping it went well (then it is still staged).
        """
        if policy != "fail":  # with "overwrite" there is nothing left to overwrite when it comes to this
            with suppress(OSError):  # no directory, no space, no right to make a name: then it is kept as a draft
                copy = self._make_copy(newcomer)
                name = printable(copy.rpartition(b"/")[2])
                return ConflictError(
                    f"somebody else's version came in between; yours is beside it as {name}",
                    path=self._path,
                    conflict_copy=copy,
                )
        kept = self._draft.keep("somebody else's version came in between", close=False)
        return ConflictError(
            f"somebody else's version came in between; yours is kept as draft {kept.id}", path=self._path, kept=kept.id
        )

    def _make_copy(self, newcomer: Target | None) -> bytes:
        self.dress(newcomer)
        self.begin()
        self._draft.unmark()  # before, not after: recovery would not know where to look for what it left there
        for _ in range(64):
            name = conflict_name(self._name)
            try:
                self.place_new(name)
            except FileExistsError:
                continue
            with suppress(FileNotFoundError):  # moved on by somebody; the descriptor stays as it is then
                self._finish_at(name)
            if not self._draft.finished:
                self._draft.finish(None)
            self._sync_directory()
            parent = self._path.rpartition(b"/")[0]
            return parent + b"/" + name if parent else name
        raise PublishError("no free name for the conflict copy", path=self._path)

    def _finish_at(self, name: bytes, *, keep_writable: bool = False) -> os.stat_result | None:
        """Look at the name, and end the draft: its stat if the name is the draft, None if not (any more)."""
        try:
            fd = os.open(name, _READ_FLAGS, dir_fd=self._directory)
        except OSError:
            # removed, made unreadable (a mode without read permission) or turned into a link by somebody
            try:
                status = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
            except FileNotFoundError:
                return None
            return status if self._is_draft(status) else None
        try:
            status = os.fstat(fd)
            if not self._is_draft(status):
                return None
            self._draft.finish(None if keep_writable else fd)
            return status
        finally:
            os.close(fd)

    def done(self, *, keep_writable: bool = False) -> Published:
        """The draft has the name: verify that, take our marks off, sync the directory if asked."""
        self._draft.unmark()
        status = self._finish_at(self._name, keep_writable=keep_writable)
        superseded = status is None
        if status is None:
            status = os.fstat(self._draft.fd)
        if not self._draft.finished:
            self._draft.finish(None)
        self._assert_ours()
        self._sync_directory()
        return Published(identity=FileIdentity.from_stat(status), displaced=self._displaced, superseded=superseded)

    def _sync_directory(self) -> None:
        if self._durability is not Durability.STRICT:
            return
        try:
            with _readable(self._directory) as fd:
                os.fsync(fd)
        except OSError as error:
            raise PublishError(
                f"published, but the disk did not confirm the directory: {error.strerror}",
                path=self._path,
                outcome=Outcome.DURABILITY_FAILED,
                cause_errno=error.errno or errno.EIO,
            ) from error


@contextmanager
def _readable(directory: int) -> Iterator[int]:
    fd = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)
