"""What earlier runs left behind, put in order when a vault is mounted.

For every staged file of an attempt that lives no more (`drafts` says how that is known) there are three questions:

1. *What is it?* Its mark, its name, its sidecar and the journal say so. A file whose inode is not the one that the
   record names is not our draft S, but what an exchange took off the name: *displaced*.
2. *What does the name hold now?* S itself: then it is published, and what is in staging may go if it is the version B
   that S started from and nobody writes it; everything else is kept and listed. B: then what was begun is finished.
3. *May it be finished?* Yes if its publish had begun, if the program's own fsync made it durable, or if it was only
   appended to (the tail is applied to whatever is there by now, once). Otherwise it moves to the kept drafts and is
   listed with where it belongs.

When in doubt, it is kept. Only these are deleted: empty files; unfinished copies of a tail whose draft is there too;
drafts that equal what the name holds; displaced versions as under 2.

**After a power loss** (the attempt ran in another boot) less is believed: what was published or written without
waiting for the disk (`relaxed`, a draft still open) may hold anything, so it is kept and never published; and where
mark and journal disagree about how far a draft got, it counts as open.

Also done here: claims (empty files made for O_CREAT|O_EXCL) whose opener is gone are removed, if nothing about them
changed; locks that were being made by processes now dead are dropped; a state directory that was set aside, and what a
crash left of that, is reported.

Nothing here raises for the sake of one file: what cannot be handled stays where it is and is named in the report.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import msgspec

from vaultfs.content import nobody_writes, same_bytes
from vaultfs.drafts import HIDDEN_PREFIX, Drafts, KeptDraft, boot_id
from vaultfs.errors import ConflictError, LockBusyError, VaultError, printable
from vaultfs.identity import FileIdentity
from vaultfs.journal import (
    KEPT_NAME,
    MARK_NAME,
    Claim,
    DraftKind,
    DraftRecord,
    DraftState,
    JournalState,
    Mark,
    decode_path,
    encode_path,
    target_of_name,
)
from vaultfs.kept import is_sidecar
from vaultfs.locks.liveness import Processes
from vaultfs.locks.path_lock import PathLocks
from vaultfs.publish import Metadata, Published, publish_append, publish_edit, publish_new, publish_replacement
from vaultfs.state import STATE_NAME

__all__ = ["RecoveryReport", "recover"]

_SEIZED: Final = "-seized-"  # in the name of a staging directory that the fence took away from a predecessor
_LOCK_TIMEOUT: Final = 1.0  # seconds, for each file; what is locked for longer is kept as a draft
_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RecoveryReport(msgspec.Struct):
    """What was found and done. Paths are vault-relative, as text with undecodable bytes as surrogates."""

    published: list[str] = []
    kept: list[KeptDraft] = []
    deleted: int = 0  # drafts that held nothing new, and displaced versions that were known
    claims: list[str] = []
    locks: int = 0  # that were being made by processes now dead
    alive: int = 0  # attempts that are still running, and were left alone
    set_aside: str | None = None
    failures: list[str] = []

    @property
    def anything(self) -> bool:
        return bool(self.published or self.kept or self.claims or self.set_aside or self.failures)

    def summary(self) -> str:
        """One line for a person."""
        parts = []
        if self.published:
            parts.append(f"{_count(len(self.published), 'save')} finished")
        if self.kept:
            parts.append(f"{_count(len(self.kept), 'draft')} kept (see `vaultfs drafts`)")
        if self.claims:
            parts.append(f"{_count(len(self.claims), 'empty claim')} removed")
        if self.set_aside:
            parts.append(f"a state directory from elsewhere set aside as {printable(self.set_aside)}")
        if self.failures:
            parts.append(f"{_count(len(self.failures), 'file')} could not be handled: {printable(self.failures[0])}")
        return "recovered: " + ", ".join(parts) if parts else "nothing to recover"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def recover(drafts: Drafts, locks: PathLocks | None = None) -> RecoveryReport:
    """Put in order what earlier attempts left in the vault of `drafts`.

    locks: for taking each file's path lock while it is published, and for dropping locks that were being made by
    processes now dead; without it nothing is locked (when nobody else is known to use the vault). Waits up to a
    second for a lock that is held.

    Raises OSError if the state directory cannot be read; everything else is in the report.
    """
    return _Recovery(drafts, locks).run()


class _Found(msgspec.Struct):
    """A staged file under the question what it is."""

    directory: int  # descriptor that `name` is relative to
    name: bytes
    fd: int
    status: os.stat_result
    record: DraftRecord | None
    same_boot: bool
    hidden: bytes | None  # its vault-relative path, if staged beside its target
    prefix: bytes  # the staging directory, relative to the state directory, with a slash; for sidecars

    @property
    def is_draft(self) -> bool:
        return self.record is not None and self.record.ino == self.status.st_ino


class _Recovery:
    def __init__(self, drafts: Drafts, locks: PathLocks | None) -> None:
        self._drafts = drafts
        self._root = drafts.root
        self._state = drafts.state
        self._locks = locks
        self._boot_id = boot_id()
        self._report = RecoveryReport()
        self._known = JournalState()
        self._living: set[str] = {drafts.attempt}

    def run(self) -> RecoveryReport:
        report = self._report
        self._known = self._drafts.journal.read()
        if self._state.set_aside is not None:
            report.set_aside = os.fsdecode(self._state.set_aside)
        for attempt in self._names(self._state.name("staging")):
            self._attempt(attempt)
        self._beside()
        self._published_marks()
        for claim in list(self._known.claims.values()):
            self._guarded(decode_path(claim.path), partial(self._claim, claim))
        if self._locks is not None:
            report.locks = self._locks.sweep()
        for kept in self._drafts.kept():
            with contextlib.suppress(VaultError, OSError):  # it stays listed, which is all that is promised
                if self._drafts.find_kept(kept.id)[0].spent:
                    self._drafts.unproven.add(kept.id)
        report.deleted += self._drafts.sweep()
        self._drafts.compact()
        return report

    def _names(self, directory: bytes) -> list[bytes]:
        fd = os.open(directory, _DIRECTORY_FLAGS, dir_fd=self._state.fd)
        try:
            return sorted(os.fsencode(name) for name in os.listdir(fd))
        finally:
            os.close(fd)

    def _guarded(self, what: bytes, action: Callable[[], None]) -> None:
        """One file's trouble is a line in the report, and the others still have their turn."""
        try:
            action()
        except (OSError, VaultError) as error:
            self._report.failures.append(f"{os.fsdecode(what)}: {error}")

    # --- attempts

    def _attempt(self, name: bytes) -> None:
        """One directory below staging."""
        prefix = self._state.name("staging") + b"/" + name
        attempt = os.fsdecode(name)
        if attempt == self._drafts.attempt:
            return
        try:
            fd = os.open(prefix, _DIRECTORY_FLAGS, dir_fd=self._state.fd)
        except FileNotFoundError:
            return  # its owner has just finished
        except NotADirectoryError:
            self._report.failures.append(f"{os.fsdecode(prefix)}: is no staging directory")
            return
        try:
            if _SEIZED not in attempt:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._living.add(attempt)
                    self._report.alive += 1
                    return
            names = [os.fsencode(entry) for entry in os.listdir(fd)]
            prefix += b"/"
            staged = sorted(entry for entry in names if not is_sidecar(entry))
            superseded = self._superseded(prefix, staged)
            for entry in staged:
                self._guarded(prefix + entry, partial(self._staged, prefix, entry, superseded, staged))
            left = os.listdir(fd)
            if all(is_sidecar(os.fsencode(sidecar)) for sidecar in left):
                for sidecar in left:
                    os.unlink(sidecar, dir_fd=fd)
                os.rmdir(prefix, dir_fd=self._state.fd)
        except OSError as error:
            self._report.failures.append(f"{os.fsdecode(prefix)}: {error}")
        finally:
            os.close(fd)

    def _superseded(self, prefix: bytes, staged: list[bytes]) -> set[str]:
        """The drafts whose tail a complete newer draft carries: they must not be applied again."""
        superseded = set()
        for name in staged:
            draft_id = target_of_name(name)[0]
            record = self._known.drafts.get(draft_id) or self._drafts.read_sidecar(prefix, draft_id)
            if record is None or not record.supersedes:
                continue
            with contextlib.suppress(OSError):  # it will be looked at again, and fail there, in its own turn
                found = self._look(self._state.fd, prefix + name, prefix, None)
                if found is not None:
                    os.close(found.fd)
                    if found.is_draft and found.record is not None and found.record.state is not DraftState.OPEN:
                        superseded.add(record.supersedes)
        return superseded

    def _staged(self, prefix: bytes, name: bytes, superseded: set[str], siblings: list[bytes]) -> None:
        found = self._look(self._state.fd, prefix + name, prefix, None)
        if found is None:
            return
        try:
            record = found.record
            if record is not None and found.is_draft:
                if record.id in superseded:
                    self._delete(found)
                    return
                if record.supersedes and record.state is DraftState.OPEN:
                    tail = record.supersedes.encode()
                    if any(entry == tail or entry.startswith(tail + b"~") for entry in siblings):
                        self._delete(found)  # an unfinished copy; the tail is in the draft that it was made from
                        return
            self._settle(found)
        finally:
            if found.fd >= 0:
                os.close(found.fd)

    def _look(self, directory: int, name: bytes, prefix: bytes, hidden: bytes | None) -> _Found | None:
        """Open a staged file and find out what it is; None if it is gone."""
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "is no file, so none of ours")
            fd = self._open(directory, name)
        except FileNotFoundError:
            return None
        try:
            draft_id, target = target_of_name(name.rpartition(b"/")[2].removeprefix(HIDDEN_PREFIX))
            journalled = self._known.drafts.get(draft_id)
            sidecar = self._drafts.read_sidecar(prefix, draft_id)
            if target is None:
                for source in (journalled, sidecar):
                    if source is not None:
                        target = source.target_path
                        break
            mark = None
            with contextlib.suppress(OSError):  # no mark: the other sources have to do
                mark = Mark.unpack(os.getxattr(fd, MARK_NAME), draft_id, target or b"", self._root.dev)
            if mark is not None and mark.ino != status.st_ino:
                mark = None  # copied from another file: void
            attempt = journalled.attempt if journalled is not None else os.fsdecode(prefix.split(b"/")[1])
            same_boot = bool(self._boot_id) and self._known.attempts.get(attempt) == self._boot_id
            record = self._merge(journalled, sidecar, mark, same_boot)
            if record is not None and target is not None:
                record = msgspec.structs.replace(record, target=encode_path(target))
            if record is None:
                record = self._of_the_name(draft_id, target)
            return _Found(directory, name, fd, os.fstat(fd), record, same_boot, hidden, prefix)
        except BaseException:
            os.close(fd)
            raise

    @staticmethod
    def _open(directory: int, name: bytes) -> int:
        for flags in (os.O_RDWR, os.O_RDONLY, os.O_PATH):  # displaced files keep their mode, and we may not be root
            try:
                return os.open(name, flags | _OPEN_FLAGS, dir_fd=directory)
            except PermissionError:
                continue
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

    def _merge(
        self, journalled: DraftRecord | None, sidecar: DraftRecord | None, mark: DraftRecord | None, same_boot: bool
    ) -> DraftRecord | None:
        """One record out of what several sources say; the module's text says whom to believe."""
        record = journalled or sidecar or mark
        if record is None:
            return None
        if record.base is not None:
            # st_dev may be another one after a reboot; the state directory is bound to this very file system
            record = msgspec.structs.replace(record, base=msgspec.structs.replace(record.base, dev=self._root.dev))
        if same_boot or record is mark:
            return record
        if mark is not None and mark.state is not record.state:
            record = msgspec.structs.replace(record, state=DraftState.OPEN)
        return record

    def _of_the_name(self, draft_id: str, target: bytes | None) -> DraftRecord | None:
        """No record, but a target: if the file there bears our mark, this one was displaced by it."""
        if not target:
            return None
        with contextlib.suppress(OSError, VaultError):
            fd, status = self._root.open_with_stat(target, os.O_RDONLY)
            try:
                mark = Mark.unpack(os.getxattr(fd, MARK_NAME), draft_id, target, self._root.dev)
                if mark is not None and mark.ino == status.st_ino:
                    return mark
            finally:
                os.close(fd)
        return None

    # --- one file

    def _settle(self, found: _Found) -> None:
        """Publish it, keep it, or delete it."""
        record = found.record
        with contextlib.suppress(OSError, msgspec.DecodeError):  # the usual case: it was not being kept
            kept = msgspec.json.decode(os.getxattr(found.fd, KEPT_NAME), type=DraftRecord)
            if kept.ino == found.status.st_ino:
                self._keep(found, kept, kept.reason or "was being kept")
                return
        if found.status.st_size == 0 and (record is None or record.state is DraftState.OPEN):
            self._delete(found)  # nothing was ever written to it
            return
        if record is None:
            draft_id, target = _told_by(found)
            record = DraftRecord(id=draft_id, target=encode_path(target or b""))
            self._keep(found, record, "found without a record")
            return
        if not found.is_draft:
            self._displaced(found, record)
            return
        if record.kind is DraftKind.APPEND and found.status.st_size <= (record.append_from or 0):
            self._delete(found)  # a copy of its base, nothing appended
            return
        at_name = self._at_name(record)
        unchanged = at_name is not None and record.base is not None and at_name.same_content(record.base)
        if unchanged and self._equals_name(found, record):
            self._delete(found)
            return
        publishable, reason = self._judge(found, record, at_name)
        if publishable:
            self._publish(found, record, at_name)
        else:
            self._keep(found, record, reason)

    def _at_name(self, record: DraftRecord) -> FileIdentity | None:
        try:
            status = self._root.stat(record.target_path)
        except (FileNotFoundError, NotADirectoryError, VaultError):
            return None  # also if a link or a mount is in the way by now: then nothing can be published there
        return FileIdentity.from_stat(status)

    def _equals_name(self, found: _Found, record: DraftRecord) -> bool:
        try:
            fd = self._root.open_file(record.target_path, os.O_RDONLY)
        except (OSError, VaultError):
            return False  # cannot be compared: not equal
        try:
            return same_bytes(fd, found.fd)
        finally:
            os.close(fd)

    @staticmethod
    def _judge(found: _Found, record: DraftRecord, at_name: FileIdentity | None) -> tuple[bool, str]:
        """(may it be published, why not)."""
        if not found.same_boot and (not record.synced or record.state is DraftState.OPEN):
            return False, "the machine stopped before the save was on disk; the content may be incomplete"
        if record.kind is DraftKind.APPEND:
            if at_name is None:
                return False, "the file is no longer there"
            return True, ""
        if record.state is DraftState.OPEN:
            return False, "the mount ended before the save was complete"
        if record.state is DraftState.KEPT:
            return False, record.reason or "was being kept"
        if record.base is None:
            return (at_name is None), "the name was taken before the save could be finished"
        if at_name is None:
            return False, "the file is no longer there"
        return at_name.same_content(record.base), "the file was changed before the save could be finished"

    @contextlib.contextmanager
    def _locked(self, path: bytes) -> Iterator[None]:
        """The path's lock, where there are locks. Raises LockBusyError."""
        lock: AbstractContextManager[object] = contextlib.nullcontext()
        if self._locks is not None:
            lock = self._locks.acquire(path, _LOCK_TIMEOUT)
        with lock:
            yield

    def _publish(self, found: _Found, record: DraftRecord, at_name: FileIdentity | None) -> None:
        """Finish what was begun; if that does not work, keep it."""
        drafts, root, path = self._drafts, self._root, record.target_path
        os.fdatasync(found.fd)
        if found.hidden is not None:
            draft = drafts.adopt_hidden(found.hidden, found.fd, record)
        else:
            draft = drafts.adopt(found.name, found.fd, record)
            drafts.drop_sidecar(found.prefix, record.id)
        found.fd = -1  # the draft's own now
        meta = Metadata(
            mode=record.mode if record.mode is not None else (None if at_name is not None else 0o600),
            base_mode=record.mode,
            uid=record.writer.uid if record.writer.pid and os.geteuid() == 0 else None,
            gid=record.writer.gid if record.writer.pid and os.geteuid() == 0 else None,
            umask=0,
            own_attributes=self._own_attributes(draft.fd, path),
        )
        try:
            published: Published
            try:
                with self._locked(path):
                    if record.kind is DraftKind.APPEND and record.base is not None and record.append_from is not None:
                        published = publish_append(
                            root,
                            drafts,
                            draft,
                            path,
                            meta,
                            base=record.base,
                            append_from=record.append_from,
                            conflict="fail",
                            late=True,
                        )
                    elif record.base is None:
                        published = publish_new(root, drafts, draft, path, meta, late=True)
                    elif record.kind is DraftKind.REPLACEMENT:
                        published = publish_replacement(root, drafts, draft, path, meta, known=record.base, late=True)
                    else:
                        published = publish_edit(
                            root, drafts, draft, path, meta, base=record.base, conflict="fail", late=True
                        )
            except ConflictError as conflict:
                if conflict.kept is None:
                    raise
                self._report.kept.append(drafts.find_kept(conflict.kept)[1])
                return
            except (LockBusyError, OSError, VaultError) as error:
                if not draft.finished:
                    reason = "its lock was held" if isinstance(error, LockBusyError) else str(error)
                    self._report.kept.append(draft.keep(f"could not be published by recovery: {reason}"))
                    return
                raise
            self._report.published.append(os.fsdecode(path))
            if published.displaced is not None:
                self._report.kept.append(published.displaced)
        finally:
            draft.close()

    def _own_attributes(self, fd: int, path: bytes) -> frozenset[str]:
        """Attributes of the draft that its target lacks: the program set them, and nobody is left to say so."""
        try:
            target = self._root.open_file(path, os.O_RDONLY)
        except (OSError, VaultError):
            return frozenset()  # a new file keeps what it has anyway
        try:
            return frozenset(os.listxattr(fd)) - frozenset(os.listxattr(target))
        except OSError:
            return frozenset()  # no attributes on this file system
        finally:
            os.close(target)

    def _displaced(self, found: _Found, record: DraftRecord) -> None:
        """An exchange happened: this stood at the name. It may go only if it is B, and S has the name safely."""
        identity = FileIdentity.from_stat(found.status)
        at_name = self._at_name(record)
        published = at_name is not None and at_name.ino == record.ino
        safe = found.same_boot or (record.synced and record.state is not DraftState.OPEN)
        if published:
            self._unmark(record.target_path, record.ino)
            self._report.published.append(os.fsdecode(record.target_path))
        if published and safe and record.base is not None and identity.same_content(record.base):
            self._hold_for_reading(found)
            with nobody_writes(found.fd) as proven:
                if proven:
                    self._delete(found)
                    return
        reason = "displaced by a save that was cut off"
        self._keep(
            found,
            DraftRecord(
                id=self._drafts.new_id(),
                target=record.target,
                base=identity,
                kind=DraftKind.DISPLACED,
                writer=record.writer,
                created_at=record.created_at,
            ),
            reason,
            journalled=record.id,
        )

    @staticmethod
    def _hold_for_reading(found: _Found) -> None:
        """Exchange our descriptor for a read-only one: our own O_RDWR would count as a writer under a lease."""
        with contextlib.suppress(PermissionError):  # then it is O_PATH, which proves nothing, so the file is kept
            reading = os.open(found.name, os.O_RDONLY | _OPEN_FLAGS, dir_fd=found.directory)
            os.close(found.fd)
            found.fd = reading

    def _unmark(self, path: bytes, ino: int) -> None:
        with contextlib.suppress(OSError, VaultError):  # the mark is void and hidden; taking it off is tidiness
            fd, status = self._root.open_with_stat(path, os.O_RDONLY)
            try:
                if status.st_ino == ino:
                    os.removexattr(fd, MARK_NAME)
            finally:
                os.close(fd)

    def _keep(self, found: _Found, record: DraftRecord, reason: str, *, journalled: str | None = None) -> None:
        if stat.S_IMODE(found.status.st_mode) & 0o7177 and found.is_draft:
            with contextlib.suppress(OSError):  # another's file, or O_PATH: the directory is private anyway
                os.fchmod(found.fd, 0o600)
        kept = self._drafts.keep_file(found.directory, found.name, found.fd, record, reason)
        self._forget(found, journalled or record.id)
        self._report.kept.append(kept)

    def _delete(self, found: _Found) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(found.name, dir_fd=found.directory)
        self._forget(found, _told_by(found)[0])
        self._report.deleted += 1

    def _forget(self, found: _Found, draft_id: str) -> None:
        self._drafts.drop_sidecar(found.prefix, draft_id)
        self._known.drafts.pop(draft_id, None)
        self._drafts.note_gone(draft_id)

    # --- beside their targets

    def _beside(self) -> None:
        """Drafts staged in their target's own directory, which only the journal (or a look at the root) tells of."""
        hidden = {
            decode_path(record.hidden): record.attempt
            for record in self._known.drafts.values()
            if record.hidden is not None and record.attempt not in self._living
        }
        for entry in os.listdir(self._root.fd):
            name = os.fsencode(entry)
            if name.startswith(HIDDEN_PREFIX):
                draft_id = name.removeprefix(HIDDEN_PREFIX).decode("ascii", "replace")
                record = self._known.drafts.get(draft_id)
                if record is None or record.attempt not in self._living:
                    hidden.setdefault(name, "")
        for path, attempt in hidden.items():
            self._guarded(path, partial(self._hidden, path, attempt))

    def _hidden(self, path: bytes, attempt: str) -> None:
        try:
            status = self._root.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        if stat.S_ISDIR(status.st_mode):
            self._set_aside_leftover(path)
            return
        prefix = self._state.name("staging") + b"/" + os.fsencode(attempt or "-") + b"/"
        with self._root.parent(path) as (directory, name):
            found = self._look(directory, name, prefix, path)
            if found is None:
                return
            try:
                self._settle(found)
            finally:
                if found.fd >= 0:
                    os.close(found.fd)

    def _set_aside_leftover(self, path: bytes) -> None:
        """A state directory that was being set aside when that was cut off: now it is."""
        mark = path.removeprefix(HIDDEN_PREFIX)
        aside = self._state.name("quarantine") + b"/copied-" + mark
        with self._root.parent(path) as (directory, name):
            self._drafts.move_to(directory, name, aside)
        self._report.set_aside = os.fsdecode(STATE_NAME + b"/" + aside)

    # --- what needs no staged file

    def _published_marks(self) -> None:
        """Drafts that the journal knows and staging does not hold: published, all but for taking the mark off."""
        for record in list(self._known.drafts.values()):
            if record.attempt in self._living:
                continue
            if record.state is DraftState.PUBLISHING:
                self._unmark(record.target_path, record.ino)
            if not self._still_staged(record):
                self._drafts.note_gone(record.id)

    def _still_staged(self, record: DraftRecord) -> bool:
        """True if it is among those that could not be handled: its line is needed again next time."""
        prefix = os.fsencode(record.id)
        return any(prefix in failure.encode("utf-8", "surrogateescape") for failure in self._report.failures)

    def _claim(self, claim: Claim) -> None:
        """Remove an empty file that was made for a program which is gone, if it is exactly as it was made."""
        if claim.attempt in self._living:
            return
        if claim.boot_id == self._boot_id and self._opener_lives(claim):
            return  # its line stays in the journal: looked at again next time
        path = decode_path(claim.path)
        made = msgspec.structs.replace(claim.identity, dev=self._root.dev)
        try:
            fd, status = self._root.open_with_stat(path, os.O_RDONLY)
        except (OSError, VaultError):
            self._drafts.unclaim(path)  # gone, or something else by now
            return
        try:
            if not FileIdentity.from_stat(status).unchanged(made) or made.size:
                self._drafts.unclaim(path)
                return
            with self._locked(path), nobody_writes(fd) as proven:
                now = FileIdentity.from_stat(os.fstat(fd))
                if proven and now.unchanged(made) and self._root.stat(path).st_ino == made.ino:
                    self._root.unlink(path)
                    self._report.claims.append(os.fsdecode(path))
                    self._drafts.unclaim(path)
        finally:
            os.close(fd)

    def _opener_lives(self, claim: Claim) -> bool:
        processes, writer = Processes(), claim.writer
        if not writer.pid or processes.exists(writer.pid) is False or processes.ended(writer.pid):
            return False
        started = processes.start_time(writer.pid)
        return not writer.start_time or started is None or started == writer.start_time


def _told_by(found: _Found) -> tuple[str, bytes | None]:
    """(id, target) as the file's own name has them."""
    return target_of_name(found.name.rpartition(b"/")[2].removeprefix(HIDDEN_PREFIX))
