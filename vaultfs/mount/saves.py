"""When a save is complete, how its draft is published, and what happens to one that cannot be.

At the FLUSH of a handle whose draft has changed it is asked whether its opener is done with it and has not been killed
(`vaultfs.mount.completeness`); then it is published, now, and what goes wrong is the result of `close()`.

RELEASE of the last handle is the net under it all. A draft that could not be published stays with its name, marked
`refused`, and is tried again (`retry_refused`) until it is in or the name has changed; then it is kept on disk and
listed by `vaultfs drafts`.

Publishing (`_publish_saving`) holds the draft's `saving` lock. The draft's data is synced, then the path lock is waited
for; from getting it to releasing it nothing awaits, so what is decided about the name holds until it is done. Nobody
else is held up by a save that waits: other drafts of the name, renames and removals go ahead if they get the lock.

Sources of the rules: versions-and-drafts.md, "When a save is complete"; contract.md, promises 2 to 5.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import stat
import time
from contextlib import ExitStack
from functools import partial

from vaultfs.drafts import DraftFile, DraftState, Writer
from vaultfs.errors import (
    ConflictError,
    LockBusyError,
    LookAgainError,
    PathCallConflictError,
    PublishError,
    VaultError,
    printable,
)
from vaultfs.identity import FileIdentity
from vaultfs.kernel import ficlone
from vaultfs.metadata import Metadata
from vaultfs.mount import procs
from vaultfs.mount.completeness import Completeness
from vaultfs.mount.context import MountContext, in_thread
from vaultfs.mount.inodes import Draft, Handle, Name, Opener, Version
from vaultfs.publish import (
    Durability,
    Outcome,
    Published,
    publish_append,
    publish_edit,
    publish_new,
    publish_replacement,
    sync_draft,
)

__all__ = ["Saves"]

log = logging.getLogger(__name__)

INLINE_COPY = 1 << 18  # bytes; longer contents are copied in a thread
SYNC_ATTEMPTS = 3  # how often a draft that is being written to meanwhile is synced before the lock is taken
FSYNC_SPACING = 20.0  # a repeated fsync publishes after so many durations of the last copy
IDLE_SPACING = 50.0  # an idle draft is published at most once in so many durations of the last copy


class Saves:
    """All decisions about drafts of one mount."""

    def __init__(self, context: MountContext) -> None:
        self._context = context
        self._completeness = Completeness(context)
        self.can_reflink = _can_reflink(context)

    # --- which draft ----------------------------------------------------------------------------------------

    def opener(self, thread: int) -> Opener:
        """The process of thread `thread`."""
        pid = procs.thread_group(thread) or thread
        return Opener(pid, procs.start_time(pid), procs.program(pid))

    @staticmethod
    def writer(opener: Opener, uid: int) -> Writer:
        """`opener` as records on disk name it."""
        return Writer(pid=opener.pid, program=opener.program, uid=uid, start_time=opener.start_time)

    def choose_draft(self, name: Name, opener: Opener, *, truncating: bool) -> Draft:
        """The draft that `opener` shall write to, made if need be."""
        inodes = self._context.inodes
        version = name.version
        shown = name.shown_draft
        if truncating:
            if shown is not None and shown.size == 0:
                return shown
            if (version is not None and version.identity.size > 0) or shown is not None:
                draft = inodes.new_draft(name, "replacement", version, opener)
                self._take_metadata(draft, version, shown)
                return draft
        else:
            own = self._replacement_of(name, opener)
            if own is not None:
                return own
            if shown is not None:
                return shown
        if name.edit is not None and name.edit.joinable:
            return name.edit
        draft = inodes.new_draft(name, "edit", version, opener)
        self._take_metadata(draft, version, None)
        return draft

    @staticmethod
    def _take_metadata(draft: Draft, version: Version | None, shown: Draft | None) -> None:
        if version is not None:
            draft.take_metadata(stat.S_IMODE(version.stat.st_mode), version.stat.st_uid, version.stat.st_gid)
        elif shown is not None:
            draft.mode, draft.base_mode = shown.mode, shown.base_mode
            draft.uid, draft.base_uid = shown.uid, shown.base_uid
            draft.gid, draft.base_gid = shown.gid, shown.base_gid
            draft.umask = shown.umask

    @staticmethod
    def _replacement_of(name: Name, opener: Opener) -> Draft | None:
        """The replacement draft that `opener`, or a living ancestor of it, has open (``cmd > log 2>> log``)."""
        open_replacements = [
            (draft, handle.opener)
            for draft in name.drafts
            if draft.kind == "replacement"
            for handle in draft.handles
            if handle.opener is not None and not handle.let_go
        ]
        if not open_replacements:
            return None
        for draft, holder in open_replacements:
            if holder.same(opener):
                return draft
        for ancestor in procs.ancestors(opener.pid):
            for draft, holder in open_replacements:
                if holder.pid == ancestor:
                    return draft
        return None

    # --- the content of a draft ---------------------------------------------------------------------------

    async def prepare(self, draft: Draft, *, empty: bool = False) -> None:
        """Give the draft a staging file with its content (or an `empty` one): the first change needs it."""
        if draft.file is not None:
            return
        async with draft.preparing:
            if draft.file is not None:
                return
            self._context.assert_writable()
            base = draft.base
            file = self._context.drafts.create(
                draft.name.path() if draft.name is not None else b"",
                base=base.identity if base is not None else draft.began,
                kind=draft.kind,
                writer=self.writer(draft.writer, draft.uid or 0),
                mode=draft.mode if draft.mode is not None else 0o600,
            )
            try:
                if base is not None and not empty and base.identity.size > 0:
                    source = base.open_content(self._context.root)
                    began = time.monotonic()
                    if base.identity.size > INLINE_COPY and not self.can_reflink:
                        self.can_reflink = await in_thread(file.copy_from, source)
                    else:
                        self.can_reflink = file.copy_from(source)
                    draft.copy_seconds = time.monotonic() - began
                    self._context.counters["copies"] += 1
            except BaseException:
                file.discard()
                raise
            draft.file = file
            draft.backing_number = file.record.ino

    async def write(self, handle: Handle, draft: Draft, offset: int, data: bytes) -> int:
        """Write to the draft; on O_APPEND handles at the end of its content, whatever the kernel believes."""
        if draft.file is None:
            await self.prepare(draft)
        assert draft.file is not None
        if draft.file.record.state is DraftState.PUBLISHING:
            draft.file.mark(DraftState.OPEN)  # complete a moment ago, and now it goes on
        if handle.append:
            offset = draft.size
        written = os.pwrite(draft.file.fd, data, offset)
        draft.written(offset, written, appending=handle.append)
        draft.times_set = False
        if handle.syncing:
            await self._make_durable(draft)
        return written

    async def truncate(self, draft: Draft, size: int) -> None:
        """Set the length of the draft's content. Truncating an empty file to nothing is no change."""
        if size == draft.size and (size == 0 or draft.file is None):
            return
        await self.prepare(draft, empty=size == 0)
        assert draft.file is not None
        os.ftruncate(draft.file.fd, size)
        draft.truncated(size)
        draft.times_set = False

    # --- the three questions --------------------------------------------------------------------------------

    async def flush(self, handle: Handle, draft: Draft) -> None:
        """A descriptor of `handle` was closed (FLUSH). Raises what `close()` shall report."""
        if not draft.changed:
            return
        done = await self._completeness.opener_is_done(handle, draft)
        if not done:
            return
        handle.let_go = True
        if self._completeness.was_cut_short(draft):
            return
        await self.publish(draft)

    async def release(self, handle: Handle, draft: Draft) -> None:
        """The last reference to `handle` is gone (RELEASE): the net under whatever FLUSH did not publish."""
        draft.handles.discard(handle)
        if draft.handles:
            return
        if draft.name is not None and draft.changed and draft.refused is None:
            if self._completeness.was_cut_short(draft):
                death = draft.interrupted[0] if draft.interrupted is not None else 0
                self.keep(draft, f"its writer was ended by {signal.Signals(death).name} before it had saved")
            else:
                try:
                    await self.publish(draft)
                except Exception as error:
                    # close() has returned already, so the log and `vaultfs status` are all there is to tell by;
                    # the draft is kept, so nothing is lost.
                    if draft.refused is None and draft.changed:
                        self.keep(draft, str(error))
                    log.info("%s: not published at its last close: %s", self._shown(draft), error)
        self.end_if_unused(draft)

    def end_if_unused(self, draft: Draft) -> None:
        """End a draft that nobody has open, nobody was promised, and that has nothing left to publish."""
        if draft.handles or draft.promises > 0:
            return
        if draft.refused is not None and draft.name is not None and draft.changed:
            return  # it is tried again
        self._context.inodes.end_draft(draft)

    # --- publishing -------------------------------------------------------------------------------------------

    async def publish(
        self, draft: Draft, *, path_call: bool = False, late: bool = False, timeout: float | None = None
    ) -> None:
        """Put the draft at its name. `path_call`: truncate(path) and rename hear EBUSY for a conflict, since the
        kernel would repeat an ESTALE and the program never hear of it. `late`: long after the last write. `timeout`:
        seconds to wait for the lock, None for the mount's `lock-timeout`.
        """
        draft.promises += 1  # nobody may end it, and close what a thread is syncing, while we are at it
        try:
            async with draft.saving:
                if draft.name is None:  # unlinked: its content goes with its last handle
                    draft.changed = False
                if draft.changed:
                    await self._publish_saving(draft, late=late, timeout=timeout)
        except ConflictError as error:
            self._context.counters["conflicts"] += 1
            if path_call:
                raise PathCallConflictError(error.message, path=error.path) from error
            raise
        except (VaultError, OSError) as error:
            await self._refuse(draft, error, late=late)
            raise
        finally:
            draft.promises -= 1

    async def _refuse(self, draft: Draft, error: VaultError | OSError, *, late: bool) -> None:
        """Note why the draft is not in; make it and its record durable before the answer goes out."""
        if draft.file is not None and draft.file.finished:
            # It was published, or kept by the publisher, though not everything went well: nothing is left to do.
            draft.file.close()
            draft.file = None
            draft.changed = False
            return
        if draft.refused is None:
            words = error.message if isinstance(error, VaultError) else error.strerror or error
            log.info("%s: not saved: %s; its draft is kept", self._shown(draft), printable(str(words)))
        if not isinstance(error, LockBusyError):
            self._context.counters["errors"] += 1
        draft.refused = error.message if isinstance(error, VaultError) else error.strerror or str(error)
        file = draft.file
        if file is not None and not late:  # what is tried again has been made durable at its first refusal
            try:
                await in_thread(_durably, file, DraftState.OPEN)
            except OSError as failure:
                log.error("%s: its draft could not be made durable: %s", self._shown(draft), failure)

    def durability(self, path: bytes) -> Durability:
        return Durability(self._context.options.durability_of(os.fsdecode(path)))

    async def _publish_saving(self, draft: Draft, *, late: bool, timeout: float | None) -> None:
        """Sync the draft, wait for the path lock, put it at its name; again while it is written to in between."""
        context = self._context
        context.assert_writable()
        if draft.kind == "new" and self._adopt_claim(draft):
            return
        await self.prepare(draft)

        def paths() -> tuple[bytes, ...]:
            return (draft.name.path(),) if draft.name is not None else ()

        for attempt in range(SYNC_ATTEMPTS):
            file, writes = draft.file, draft.writes
            if file is None or draft.name is None:
                return
            durability = self.durability(draft.name.path())
            if durability is not Durability.RELAXED:
                await in_thread(sync_draft, file, durability)
            put = partial(self._put_if_unchanged, draft, writes, late=late, last=attempt == SYNC_ATTEMPTS - 1)
            if await context.while_locked(paths, put, saver=draft.writer, timeout=timeout):
                return

    def _put_if_unchanged(self, draft: Draft, writes: int, *, late: bool, last: bool) -> bool:
        """Publish, with the path lock held. False if the draft was written to since it was synced: sync it again."""
        name = draft.name
        if name is None or draft.file is None:
            return True  # unlinked while we waited
        path = name.path()
        durability = self.durability(path)
        if draft.writes != writes and durability is not Durability.RELAXED:
            if not last:
                return False
            sync_draft(draft.file, durability)  # somebody writes all the time: once more, here, and that is it
        if name.version is not None:
            name.version.hold(self._context.root)
        # A tail may go onto somebody else's version; then this is all that is left of the draft's own view.
        own = os.dup(draft.file.fd) if draft.kind == "edit" and draft.append_from is not None else -1
        try:
            published = self._put(name, draft, path, durability, late=late)
            self._after_publish(name, draft, path, published, own)
        except ConflictError:
            self._after_conflict(name, draft, path)
            raise
        finally:
            if own >= 0:
                os.close(own)
        return True

    @staticmethod
    def metadata(draft: Draft) -> Metadata:
        return Metadata(
            mode=draft.mode,
            base_mode=draft.base_mode,
            uid=draft.uid,
            gid=draft.gid,
            base_uid=draft.base_uid,
            base_gid=draft.base_gid,
            umask=draft.umask,
            own_attributes=frozenset(draft.own_attributes),
        )

    def _put(self, name: Name, draft: Draft, path: bytes, durability: Durability, *, late: bool) -> Published:
        """Choose the publish for this draft, and do it. The path lock is held."""
        context = self._context
        root, drafts, file = context.root, context.drafts, draft.file
        assert file is not None
        meta = self.metadata(draft)
        late = late and not draft.times_set
        if draft.kind == "edit" and draft.base is not None:
            if draft.append_from is not None:
                return publish_append(
                    root,
                    drafts,
                    file,
                    path,
                    meta,
                    base=draft.base.identity,
                    append_from=draft.append_from,
                    conflict=context.options.conflict,
                    durability=durability,
                    late=late,
                    base_fd=draft.base.descriptor,
                )
            return publish_edit(
                root,
                drafts,
                file,
                path,
                meta,
                base=draft.base.identity,
                conflict=context.options.conflict,
                durability=durability,
                late=late,
                base_fd=draft.base.descriptor,
            )
        known = name.claim if name.claim is not None else draft.began
        if draft.interrupted is not None and draft.kind == "replacement":
            known = None  # its writer was stopped: as far as it got is worth having, and so is what it displaces
        if known is None and name.version is None:
            try:
                return publish_new(root, drafts, file, path, meta, durability, late=late)
            except PublishError as error:
                if error.outcome is not Outcome.DESTINATION_CONFLICT:
                    raise
        return publish_replacement(root, drafts, file, path, meta, known=known, durability=durability, late=late)

    def _after_publish(self, name: Name, draft: Draft, path: bytes, published: Published, own: int) -> None:
        context = self._context
        file, draft.file = draft.file, None
        assert file is not None
        try:
            descriptor = os.dup(file.fd)  # read-only since it is published
        finally:
            file.close()
        status = os.fstat(descriptor)
        version = context.inodes.supersede(name, status)
        version.adopt(descriptor)
        name.claim = None
        draft.changed = False
        draft.refused = None
        draft.interrupted = None
        draft.published += 1
        draft.published_at = time.monotonic()
        if own >= 0 and os.fstat(own).st_ino != status.st_ino:
            self._keep_own_view(name, draft, own)
        else:
            context.inodes.rebase(draft, version)
            draft.append_from = draft.size
        if draft.kind == "new":
            draft.kind = "edit"
        draft.take_metadata(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
        draft.own_attributes.clear()
        self._supersede_refused(name, draft)
        context.counters["saves"] += 1
        if published.displaced is not None:
            context.counters["displaced"] += 1
            log.info("%s: saved; the version it displaced is kept as draft %s", printable(path), published.displaced.id)
        log.debug(
            "%s: saved by %s (pid %d), %d bytes", printable(path), draft.writer.program, draft.writer.pid, draft.size
        )
        if context.announcer is not None:
            context.announcer.announce(path, stat.S_IMODE(status.st_mode))

    def _keep_own_view(self, name: Name, draft: Draft, content: int) -> None:
        """What the draft held went onto, or beside, somebody else's version: nobody's sizes or offsets are disturbed.

        The draft goes on with its own `content` (a descriptor of it), what is appended to it later goes onto the newest
        version again, and whoever opens the name for editing from now on gets a draft of that version.
        """
        inodes = self._context.inodes
        reading = os.open(f"/proc/self/fd/{content}", os.O_RDONLY | os.O_CLOEXEC)
        inodes.rebase(draft, inodes.private_version(name, reading))
        draft.diverged = True
        draft.append_from = draft.size
        if name.edit is draft:
            name.edit = None

    def _after_conflict(self, name: Name, draft: Draft, path: bytes) -> None:
        """The draft's content is in a conflict copy (or kept); the name holds somebody else's version."""
        context = self._context
        file, draft.file = draft.file, None
        draft.changed = False
        draft.refused = None
        if file is not None:
            self._keep_own_view(name, draft, file.fd)
            draft.append_from = None  # what follows belongs to the copy, and goes into the next one whole
            file.close()
        try:
            status = context.root.stat(path)
        except FileNotFoundError:
            context.inodes.vanished(name)
            return
        if stat.S_ISREG(status.st_mode):
            context.inodes.current_version(name, status)

    def _adopt_claim(self, draft: Draft) -> bool:
        """Nothing was ever written to a file made with O_EXCL: then the claim in the vault is all of it, and published.

        False if there is more to publish, or if the claim was taken away or replaced by somebody.
        """
        context, name = self._context, draft.name
        if name is None or name.claim is None or draft.writes or draft.size or draft.touched:
            return False
        path = name.path()
        try:
            status = context.root.stat(path)
        except FileNotFoundError:
            return False
        if not name.claim.same_object(FileIdentity.from_stat(status)):
            return False
        context.drafts.unclaim(path)
        version = context.inodes.supersede(name, status)
        if draft.file is not None:
            draft.file.discard()
            draft.file = None
        draft.changed = False
        draft.kind = "edit"
        context.inodes.rebase(draft, version)
        draft.append_from = 0
        context.counters["saves"] += 1
        if context.announcer is not None:
            context.announcer.announce(path, stat.S_IMODE(status.st_mode))
        return True

    # --- what could not be published ------------------------------------------------------------------------

    def keep(self, draft: Draft, reason: str) -> None:
        """Move the draft to the kept ones on disk; an empty one that was never written holds nothing to keep."""
        file, draft.file = draft.file, None
        draft.changed = False
        draft.refused = None
        if file is None:
            self._drop_claim(draft)
            return
        if draft.size == 0 and draft.kind == "new":
            file.discard()
        else:
            try:
                kept = file.keep(reason)
            except (VaultError, OSError) as error:
                # It stays staged, under its name and with its record, and the next mount's recovery keeps it.
                log.error("%s: its draft could not be moved to the kept ones: %s", printable(file.path), error)
                file.close()
            else:
                self._context.counters["kept"] += 1
                log.info("%s: its draft is kept as %s: %s", printable(kept.target), kept.id, reason)
        self._drop_claim(draft)

    def _drop_claim(self, draft: Draft) -> None:
        """An O_EXCL claim whose draft will not be published goes, if it is still the empty file that we made."""
        name = draft.name
        if name is None or name.claim is None or draft.kind != "new":
            return
        claim, name.claim = name.claim, None
        try:
            path = name.path()
            status = self._context.root.stat(path)
            if claim.same_object(FileIdentity.from_stat(status)) and status.st_size == 0:
                self._context.root.unlink(path)
        except (VaultError, OSError) as error:
            # Removed by somebody else, or not to be reached: an empty file may stay, which is all that it is.
            log.debug("an empty claim stays: %s", error)
            return
        self._context.drafts.unclaim(path)

    def _supersede_refused(self, name: Name, winner: Draft) -> None:
        """A later save by the same process supersedes one of its own that is still being tried again.

        By the same process, not one of the same name: two agents are both "python3", and neither speaks for the other.
        """
        for draft in list(name.drafts):
            if (
                draft is not winner
                and draft.refused is not None
                and not draft.handles
                and draft.writer.same(winner.writer)
            ):
                log.info(
                    "%s: the save that waited is superseded by a later one of the same program", self._shown(draft)
                )
                draft.changed = False
                draft.refused = None
                self.end_if_unused(draft)

    async def retry_refused(self) -> None:
        """Try again what a busy lock kept out; keep on disk what must not go in any more."""
        if self._context.read_only_reason is not None:
            return  # nothing may be written any more; the drafts are on disk, for the next mount
        # The newest first: it is the one that shall have the name, and those that it supersedes are kept.
        busy: set[Name] = set()
        for draft in sorted(self._context.inodes.drafts(), key=lambda one: one.last_write, reverse=True):
            name = draft.name
            if draft.refused is None or draft.handles or name is None or name in busy:
                continue
            try:
                await self._retry(draft)
            except LockBusyError:
                busy.add(name)  # the next pass tries again
                continue
            except (VaultError, OSError) as error:
                # The place is gone, or holds what no draft may replace: that does not mend itself.
                if draft.changed:
                    self.keep(draft, error.message if isinstance(error, VaultError) else error.strerror or str(error))
            self.end_if_unused(draft)

    async def _retry(self, draft: Draft) -> None:
        if not draft.changed or draft.file is None or draft.name is None:
            return
        path = draft.name.path()
        if self._name_changed(draft, path):
            self.keep(draft, f"{draft.refused}; meanwhile the name holds another version")
            return
        await self.publish(draft, late=True, timeout=0.0)
        log.info("%s: saved at last", printable(path))

    def _name_changed(self, draft: Draft, path: bytes) -> bool:
        assert draft.name is not None
        try:
            now: FileIdentity | None = FileIdentity.from_stat(self._context.root.stat(path))
        except FileNotFoundError:
            now = None
        expected = draft.name.claim if draft.name.claim is not None else draft.began
        if now is None or expected is None:
            return now is not expected
        return not now.same_content(expected)

    # --- fsync and idle writers -------------------------------------------------------------------------------

    async def fsync(self, handle: Handle, draft: Draft) -> None:
        """fsync and fdatasync publish, but not each one of a row of them where each would copy the file."""
        if draft.changed and draft.name is not None:
            spaced = time.monotonic() - draft.published_at >= FSYNC_SPACING * draft.copy_seconds
            handle.syncs += 1
            if handle.syncs == 1 or self.can_reflink or spaced:
                await self.publish(draft)
            else:
                await self._make_durable(draft)
        if draft.name is not None:
            await self._sync_directory(draft.name)

    async def _make_durable(self, draft: Draft) -> None:
        file = draft.file
        if file is not None:
            await in_thread(_durably, file, DraftState.DURABLE)

    async def _sync_directory(self, name: Name) -> None:
        directory = self._context.root.open_directory(name.parent.path())
        try:
            await in_thread(_fsync_directory, directory)
        finally:
            os.close(directory)

    async def publish_idle(self) -> None:
        """Publish what was edited or made and then left open without a write for `idle-publish` seconds."""
        idle = self._context.options.idle_publish
        if not idle:
            return
        now = time.monotonic()
        for draft in self._context.inodes.drafts():
            if (
                not draft.handles
                or not draft.changed
                or draft.kind == "replacement"
                or draft.name is None
                or draft.refused is not None
                or now - draft.last_write < idle
                or now - draft.published_at < IDLE_SPACING * draft.copy_seconds
            ):
                continue
            try:
                await self.publish(draft)
            except (VaultError, OSError) as error:
                # Its writer is still there and will be told by its own close; the draft stays as it is.
                log.info("%s: not published while idle: %s", self._shown(draft), error)

    async def settle(self, *, cut_off: bool) -> None:
        """The mount is gone: publish what is complete, keep the rest.

        `cut_off`: it ended under those who had files open. Then complete is only what had been let go of while the
        kernel was there: nobody can tell a program that was done from one that closed because of the error it got.
        """
        for draft in self._context.inodes.drafts():
            if draft.name is None or not draft.changed:
                self._context.inodes.end_draft(draft)
                continue
            unfinished = cut_off and any(handle.writes and not handle.let_go for handle in draft.handles)
            if not unfinished and not self._completeness.was_cut_short(draft):
                try:
                    await self.publish(draft)
                except Exception as error:
                    log.info("%s: not published at the end: %s", self._shown(draft), error)
            if draft.changed:
                self.keep(draft, draft.refused or "the mount ended while it was still being written")
            draft.handles.clear()
            self._context.inodes.end_draft(draft)

    @staticmethod
    def _shown(draft: Draft) -> str:
        if draft.name is None:
            return "(unlinked file)"
        try:
            return printable(draft.name.path())
        except (LookAgainError, FileNotFoundError):  # its directory was replaced or removed
            return printable(draft.name.name)


def _durably(file: DraftFile, state: DraftState) -> None:
    file.mark(state, durable=True)


def _can_reflink(context: MountContext) -> bool:
    """Try it on an unnamed file in the state directory: nothing else tells for sure."""
    with ExitStack() as stack:
        try:
            directory = context.root.open_directory(context.state.path)
            stack.callback(os.close, directory)
            source = os.open(b".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=directory)
            stack.callback(os.close, source)
            target = os.open(b".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=directory)
            stack.callback(os.close, target)
            os.write(source, b"x")
            return ficlone(source, target)
        except OSError:
            return False  # no unnamed files, or no room for one: copies are made the ordinary way then


def _fsync_directory(directory: int) -> None:
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):  # file systems that cannot sync a directory
            raise
