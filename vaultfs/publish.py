"""Publishing: put a complete draft at its name in the vault in one atomic step, and lose nothing on the way.

Calling sequence: `sync_draft` (may block, so from a thread), then, *holding the path's lock*, one of `publish_new`,
`publish_replacement`, `publish_edit`, `publish_append`; then `DraftFile.close`. The publish functions never sleep and
make few system calls. They copy content only where a tail has to be applied to a newer version (`publish_append`), or
where the file system refuses to rename from staging; they compare content only where sizes are equal and a conflict
depends on it.

How it ends:

- They return `Published`: the draft is finished, the name holds it. Its descriptor is read-only from then on.
- They raise `ConflictError`: the name holds somebody else's version, which stays; the draft is finished too, and is
  now the conflict copy or a kept draft, as the error says.
- They raise anything else. If the draft is not `finished`, the name is untouched and the draft still staged, to be
  tried again, kept or discarded. If it is, it was published or kept before something else failed: the disk would not
  confirm the directory (*durability_failed*), the vault or the fence was lost right then (VaultGoneError), or others
  would not let the name alone (*published_uncertain*: everything that was in our hands has been kept).

How it is done, and why nothing gets lost on the way: `publication`.
"""

from __future__ import annotations

import errno
import os

import msgspec

from vaultfs.drafts import DraftFile, Drafts
from vaultfs.errors import Outcome, PublishError
from vaultfs.identity import FileIdentity
from vaultfs.journal import DraftState
from vaultfs.metadata import Metadata
from vaultfs.publication import TRIES, ConflictPolicy, Durability, Publication, Published
from vaultfs.root import VaultRoot

__all__ = [
    "ConflictPolicy",
    "Durability",
    "Metadata",
    "Outcome",
    "Published",
    "publish_append",
    "publish_edit",
    "publish_new",
    "publish_replacement",
    "same_version",
    "sync_draft",
]


def sync_draft(draft: DraftFile, durability: Durability | str = Durability.ORDERED) -> None:
    """Make a complete draft durable as asked, before it is published. Blocks: call it from a thread.

    The draft is marked *publishing*: if the daemon dies from here on, recovery publishes it. Whoever lets it be
    written to again says ``draft.mark("open")`` first.

    Raises PublishError with the outcome durability_failed and the system call's errno (ENOSPC, EDQUOT, EIO).
    """
    relaxed = durability == Durability.RELAXED
    try:
        if not relaxed:
            os.fdatasync(draft.fd)  # before the mark: a mark must not be on disk before what it vouches for
        if draft.record.synced == relaxed:
            draft.record = msgspec.structs.replace(draft.record, synced=not relaxed)
        draft.mark(DraftState.PUBLISHING)
    except OSError as error:
        raise PublishError(
            f"the disk did not take the new version: {error.strerror}",
            path=draft.record.target_path,
            outcome=Outcome.DURABILITY_FAILED,
            cause_errno=error.errno or errno.EIO,
        ) from error


def publish_new(
    root: VaultRoot,
    drafts: Drafts,
    draft: DraftFile,
    path: bytes,
    meta: Metadata,
    durability: Durability | str = Durability.ORDERED,
    *,
    late: bool = False,
    keep_writable: bool = False,
) -> Published:
    """Publish `draft` at the vault-relative `path`, where nothing may stand.

    late: the content was written long ago; its mtime becomes now, so that build tools notice. keep_writable: leave
    the draft's descriptor open for writing, for a file that is going to be written in place (a live file).

    Raises PublishError (destination_conflict, EEXIST, if the name is taken; io_error), VaultGoneError,
    UnsafePathError, OSError of the system calls before the rename.
    """
    with Publication(root, drafts, draft, path, meta, durability, late) as publication:
        publication.dress(None)
        publication.begin()
        try:
            publication.place_new()
        except FileExistsError as error:
            raise PublishError(
                "the name is taken", path=path, outcome=Outcome.DESTINATION_CONFLICT, cause_errno=errno.EEXIST
            ) from error
        return publication.done(keep_writable=keep_writable)


def publish_replacement(
    root: VaultRoot,
    drafts: Drafts,
    draft: DraftFile,
    path: bytes,
    meta: Metadata,
    *,
    known: FileIdentity | None,
    durability: Durability | str = Durability.ORDERED,
    late: bool = False,
) -> Published:
    """Publish `draft` at `path` whatever stands there; what it displaces is kept unless it is `known` or equal.

    known: the version that was there when the replacement began, None if there was none. If nothing stands at the
    name, nothing is replaced.

    Raises PublishError (io_error, atomic_unavailable), VaultGoneError, UnsafePathError for a link or special file at
    the name, IsADirectoryError, OSError of the system calls before the rename.
    """
    with Publication(root, drafts, draft, path, meta, durability, late) as publication:
        return publication.replace(known, "a version that a whole-file save displaced")


def publish_edit(
    root: VaultRoot,
    drafts: Drafts,
    draft: DraftFile,
    path: bytes,
    meta: Metadata,
    *,
    base: FileIdentity,
    conflict: ConflictPolicy = "copy",
    durability: Durability | str = Durability.ORDERED,
    late: bool = False,
    base_fd: int | None = None,
) -> Published:
    """Publish `draft` at `path` if the name still holds the version that it started from.

    base: that version. The same inode with the same size and mtime, or equal bytes, is the same version.
    base_fd: a descriptor of it, if there is one: then a newcomer with the same bytes is recognized.
    conflict: what becomes of the draft otherwise: a copy beside the newcomer, a kept draft, or it replaces the
    newcomer, which is kept.

    Raises ConflictError (the draft is finished then, see the module's text), and what `publish_replacement` raises;
    PublishError published_uncertain if others would not let the name alone.
    """
    with Publication(root, drafts, draft, path, meta, durability, late) as publication:
        for _ in range(2):  # a second time only if the name vanished and came back between two looks
            target = publication.open_target()
            if target is None:
                break
            if publication.compare_and_swap(target, base, base_fd, equal_to_draft=True):
                return publication.done()
            if conflict == "overwrite":
                return publication.replace(None, "a version that a conflicting edit displaced (conflict=overwrite)")
            target = publication.open_target()
            if target is not None:
                break
        raise publication.conflict(target, conflict)


def publish_append(
    root: VaultRoot,
    drafts: Drafts,
    draft: DraftFile,
    path: bytes,
    meta: Metadata,
    *,
    base: FileIdentity,
    append_from: int,
    conflict: ConflictPolicy = "copy",
    durability: Durability | str = Durability.ORDERED,
    late: bool = False,
    base_fd: int | None = None,
) -> Published:
    """Publish a draft that only added to its base: if the name holds something newer, the tail is applied to that.

    append_from: where the tail begins in the draft (the size of `base`). Applying copies the newer version (by
    reflink where there is one) and syncs it: `same_version` tells beforehand whether it will come to that.

    Raises as `publish_edit`; ConflictError only if nothing stands at the name any more, or if it changes faster
    than tails can be applied.
    """
    with Publication(root, drafts, draft, path, meta, durability, late) as publication:
        for _ in range(TRIES):
            target = publication.open_target()
            if target is None:
                break
            if publication.compare_and_swap(target, base, base_fd, equal_to_draft=False):
                return publication.done()
            target = publication.open_target()
            if target is None:
                break
            if publication.apply_tail(target, append_from):
                base, append_from, base_fd = target.identity, target.status.st_size, None
        raise publication.conflict(target, conflict)


def same_version(root: VaultRoot, path: bytes, base: FileIdentity) -> bool:
    """True if `path` holds `base` right now: a publish will then copy and compare nothing. Raises UnsafePathError."""
    try:
        return FileIdentity.from_stat(root.stat(path)).same_content(base)
    except FileNotFoundError:
        return False
