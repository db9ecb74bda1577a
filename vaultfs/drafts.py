"""Drafts on disk: working copies in staging, and the claims of names. (What is kept of them: `kept`.)

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

Drafts and DraftFile are used from one thread; only `DraftFile.copy_from` and `publish.sync_draft` may run in another
one, while nobody else touches that draft.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import msgspec

from vaultfs.draft_file import HIDDEN_PREFIX, STAGING_FLAGS, DraftFile
from vaultfs.errors import BadRequestError, DraftNotFoundError, FenceLostError, StateDirectoryError
from vaultfs.identity import FileIdentity
from vaultfs.journal import (
    KEPT_NAME,
    Claim,
    DraftKind,
    DraftRecord,
    DraftState,
    JournalLine,
    Writer,
    encode_path,
    staged_name,
)
from vaultfs.kept import KeptDraft, KeptDrafts, timestamp
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
]

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def boot_id() -> str:
    """Which boot of this machine this is (random(4)); "" where /proc does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""  # then every earlier attempt counts as one of another boot: more is kept, nothing is lost


class Drafts(KeptDrafts):
    """All drafts of one daemon run (`attempt`); see the module's text. Closed by `close` or the context manager.

    `assert_owned`, if set, is called by each publish before and after the name is touched: the fence's check.
    `fenced` says that a fence keeps other vaultfs processes away, so that a file system without RENAME_EXCHANGE may
    be served by comparing and renaming.
    """

    def __init__(self, root: VaultRoot, state: StateDirectory, attempt: str | None = None) -> None:
        super().__init__(root, state)
        self.attempt = attempt if attempt is not None else uuid.uuid4().hex
        if not self.attempt.replace("-", "").replace("_", "").isalnum():
            raise BadRequestError(f"an attempt's name has letters, digits, - and _ only: {self.attempt!r}")
        self.assert_owned: Callable[[], None] | None = None
        self.fenced = False
        self._boot_id = boot_id()
        self._directory_fd = -1  # our staging directory; holds the flock that says this attempt lives
        self._prefix = b""
        self._beside: set[bytes] = set()  # directories that cannot be renamed into from staging

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
                    fd = self.root.open_file(place, STAGING_FLAGS, 0o600)
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
                created_at=timestamp(),
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
            return os.open(name, STAGING_FLAGS, 0o600, dir_fd=self.state.fd)
        except FileNotFoundError:
            self._restore_staging()
            return os.open(name, STAGING_FLAGS, 0o600, dir_fd=self.state.fd)

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

    # --- taking over what is there

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
