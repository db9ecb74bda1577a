"""One mount from its first descriptor to its last: open the vault, mount, serve, settle, unmount.

Order on the way up, each step undone by the one `ExitStack` if a later one fails::

    root → state directory → fence → drafts and locks → recovery → FUSE session → attendant → READY

The root's descriptor is taken before anything is mounted, so that a mount over the vault itself does not get between.
READY is said only after a statfs on the mount was answered, in a thread: it comes back to us as a request.

On the way down
    A plain ``fusermount3 -u`` ends pyfuse3's loop. SIGTERM, SIGINT and the control server's `stop` only set a flag;
    the loop's own task then publishes what is complete, keeps the rest and detaches the mount. What the kernel had
    not yet released is settled after the loop has ended: nobody has it open any more.

`Mount` is also what the control server asks (`vaultfs.control.Provider`): snapshots only, from other threads.
"""

from __future__ import annotations

import datetime
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Protocol

import msgspec
import pyfuse3
import trio

import vaultfs
from vaultfs.config import MountOptions
from vaultfs.drafts import Drafts, KeptDraft
from vaultfs.errors import LookAgainError, MountFailedError, VaultGoneError
from vaultfs.kernel import AT_FDCWD, AT_NO_AUTOMOUNT, AT_STATX_DONT_SYNC, statx
from vaultfs.locks import Fence, PathLocks
from vaultfs.mount import remarks
from vaultfs.mount.announce import Announcer
from vaultfs.mount.attribute_changes import AttributeChanges
from vaultfs.mount.context import MountContext
from vaultfs.mount.files import Files
from vaultfs.mount.inode_table import InodeTable
from vaultfs.mount.inodes import Name
from vaultfs.mount.names import NamePolicy
from vaultfs.mount.operations import Operations
from vaultfs.mount.outside import OutsideChanges
from vaultfs.mount.redirect import Redirects
from vaultfs.mount.renames import Renames
from vaultfs.mount.saves import Saves
from vaultfs.mount.status import (
    HeldLockInfo,
    KeptDraftInfo,
    LockInfo,
    LocksInfo,
    MountStatus,
    OpenDraft,
    lock_report,
    locks_info,
)
from vaultfs.mount.tree import Tree
from vaultfs.mount.watch import Invalidator, OutsideWatch
from vaultfs.mount.xattrs import ExtendedAttributes
from vaultfs.mountinfo import mounts
from vaultfs.patience import within
from vaultfs.root import VaultRoot
from vaultfs.state import STATE_NAME, StateDirectory

__all__ = ["Mount", "serve"]

log = logging.getLogger(__name__)

HOUSEKEEPING = 0.5  # seconds between looks at idle drafts, refused drafts and expired redirects
HEARTBEAT = 10.0  # seconds; lock-md, "The fence"
READY_LIMIT = 20.0  # seconds in which a mount has to answer its first statfs
REMARKS_LIMIT = 5.0  # seconds; they look at other processes, and one that is stuck must not keep the mount
MOST_TASKS = 1000  # requests under way at once; those that wait for a lock wait in one each


class Attendant(Protocol):
    """Whoever answers questions about the mount while it is served (the control server, a storey above)."""

    def start(self) -> None:
        """Begin; called once the mount answers. What it raises ends the mount."""

    def close(self) -> None:
        """End; called in a worker thread, also if `start` failed."""


def serve(options: MountOptions, *, ready: Callable[[], None], attend: Callable[[Mount], Attendant]) -> int:
    """Mount and serve until the mount is gone; calls `ready` once when it answers. Returns the exit code.

    `attend` makes the one who answers questions about the mount.

    Raises what kept the mount from coming up (a VaultError or OSError); then nothing is left behind.
    """
    os.umask(0)  # modes are given exactly; the caller's umask comes with each request
    with ExitStack() as stack:
        root = stack.enter_context(VaultRoot.open(os.fsencode(options.vault)))
        first_mount = not root.exists(STATE_NAME)
        state = stack.enter_context(StateDirectory.open(root, shared=options.shared))
        fence = None
        if not options.shared:
            fence = Fence.acquire(root, state)
            stack.callback(fence.release)
        drafts = Drafts(root, state, fence.attempt if fence is not None else None)
        stack.callback(drafts.close)
        locks = PathLocks(
            root,
            state,
            stale=options.lock_stale,
            timeout=options.lock_timeout,
            private=options.private_locks,
            shared=options.shared,
        )
        stack.callback(locks.close)
        if fence is not None:
            drafts.assert_owned = fence.assert_owned
            drafts.fenced = True
        report = drafts.recover(locks)
        if report.anything:
            logging.getLogger("vaultfs.notice").info("%s", report.summary())
        for remark in _remarks(root, options, first_mount=first_mount):
            logging.getLogger("vaultfs.notice.remark").info("%s", remark)
        mount = Mount(options, root, state, drafts, locks, fence)
        return mount.run(ready, attend)


def _remarks(root: VaultRoot, options: MountOptions, *, first_mount: bool) -> list[str]:
    """What the user should know; nothing if some process of this machine cannot be looked into in time."""
    try:
        return within(REMARKS_LIMIT, lambda: remarks.collect(root, options, first_mount=first_mount))
    except TimeoutError:
        return []


class Mount:
    """One mounted vault."""

    def __init__(
        self,
        options: MountOptions,
        root: VaultRoot,
        state: StateDirectory,
        drafts: Drafts,
        locks: PathLocks,
        fence: Fence | None,
    ) -> None:
        self._options = options
        self._fence = fence
        self._since = datetime.datetime.now(datetime.UTC)
        self._stop_requested: trio.Event | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self.context = MountContext(
            options=options,
            root=root,
            state=state,
            drafts=drafts,
            locks=locks,
            inodes=InodeTable(root),
            redirects=Redirects(),
            policy=NamePolicy(options, state.path),
            fence=fence,
        )
        self.saves = Saves(self.context)
        self.tree = Tree(self.context, self.saves)
        self.files = Files(self.context, self.saves, self.tree)
        self.outside = OutsideChanges(self.context)
        self.operations = Operations(
            self.context,
            self.tree,
            Renames(self.context, self.saves, self.tree),
            self.files,
            AttributeChanges(self.context, self.saves, self.tree, self.files),
            ExtendedAttributes(self.context),
        )

    # --- from mounting to unmounting --------------------------------------------------------------------------

    def run(self, ready: Callable[[], None], attend: Callable[[Mount], Attendant]) -> int:
        """Mount, serve, settle, unmount."""
        options = self._options
        words = {
            f"fsname={_option_text(options.vault)}",
            "subtype=vaultfs",
            "default_permissions",
            *options.fuse_options,
        }
        if options.allow_other:
            words.add("allow_other")
        if options.ro:
            words.add("ro")
        try:
            pyfuse3.init(self.operations, options.mountpoint, words)
        except RuntimeError as error:
            raise MountFailedError(
                f"the kernel or fusermount3 refused it ({error})", path=options.mountpoint
            ) from error
        mounted = True
        if not options.ro:
            self.context.reserve.restore()
        try:
            self.context.root.covered = options.over_itself
            trio.run(self._serve, ready, attend(self))
            mounted = False  # the loop ended because the mount is gone
        finally:
            # Unmounting ends only what nobody has open any more. Being told to stop, or an aborted connection (its
            # mount is still there), ends it under them.
            listed = any(one.mount_id == self.context.mount_id for one in mounts())
            cut_off = self.context.stopping or mounted or listed
            pyfuse3.close(unmount=mounted or self.context.stopping)
            self.context.root.covered = False
            trio.run(self._settle, cut_off)
            self.context.inodes.close()
            self.context.reserve.spend()  # while nothing is mounted nobody needs it
        return 0

    async def _serve(self, ready: Callable[[], None], attendant: Attendant) -> None:
        context, options = self.context, self._options
        self._token = trio.lowlevel.current_trio_token()
        self._stop_requested = trio.Event()
        watch = OutsideWatch(self.outside.changed, self.outside.lost_count)
        invalidator = Invalidator()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._take_signals)
                nursery.start_soon(self._loop_then_cancel, nursery.cancel_scope)
                await self._await_answer()
                mounted = statx(AT_FDCWD, os.fsencode(options.mountpoint), AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT)
                context.device, context.mount_id = mounted.dev, mounted.mnt_id
                invalidator.start()
                context.invalidator = invalidator
                if not options.shared:
                    context.watch = watch
                    context.inodes.forgot_directory = watch.forget
                    nursery.start_soon(watch.run)
                announcer = Announcer(os.fsencode(options.mountpoint), context.device, shared=options.allow_other)
                if not options.ro and announcer.start():
                    context.announcer = announcer
                attendant.start()
                nursery.start_soon(self._every, HOUSEKEEPING, self._expire_redirects)
                nursery.start_soon(self._every, HOUSEKEEPING, self.saves.publish_idle)
                nursery.start_soon(self._every, 2 * HOUSEKEEPING, self.saves.retry_refused)
                nursery.start_soon(self._every, HOUSEKEEPING, self._care_for_locks)
                nursery.start_soon(self._every, 20 * HOUSEKEEPING, self._sweep)
                if self._fence is not None:
                    nursery.start_soon(self._every, HEARTBEAT, self._beat)
                nursery.start_soon(self._stop_when_asked)
                ready()
                log.info("serving %s at %s", options.vault, options.mountpoint)
        finally:
            with trio.CancelScope(shield=True):
                context.watch = None
                context.inodes.forgot_directory = None
                watch.close()
                await self._end_hints(invalidator)
                await trio.to_thread.run_sync(attendant.close)

    async def _end_hints(self, invalidator: Invalidator) -> None:
        """End the invalidating thread, then the companion, which lets go of the mount if that thread is stuck in it.

        The companion stays known until it is dead: its last requests must not be carried out.
        """
        context = self.context
        context.invalidator = None
        ended = await trio.to_thread.run_sync(invalidator.stop)
        if ended and context.announcer is not None:
            await trio.to_thread.run_sync(context.announcer.stop)
            context.announcer = None

    async def _loop_then_cancel(self, scope: trio.CancelScope) -> None:
        """The requests; when the kernel or `terminate` ends them, everything else ends too."""
        try:
            await pyfuse3.main(min_tasks=2, max_tasks=MOST_TASKS)
        finally:
            scope.cancel()

    async def _await_answer(self) -> None:
        with trio.move_on_after(READY_LIMIT) as limit:
            await trio.to_thread.run_sync(os.statvfs, self._options.mountpoint, abandon_on_cancel=True)
        if limit.cancelled_caught:
            raise MountFailedError("it did not answer", path=self._options.mountpoint)

    async def _take_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async for number in signals:
                log.info("got %s", signal.Signals(number).name)
                assert self._stop_requested is not None
                self._stop_requested.set()

    async def _stop_when_asked(self) -> None:
        """Publish what is complete, keep what is not, and detach the mount."""
        assert self._stop_requested is not None
        await self._stop_requested.wait()
        self.context.stopping = True
        log.info("stopping")
        if self.context.invalidator is not None:
            await self._end_hints(self.context.invalidator)  # while requests are still answered: both make some
        pyfuse3.terminate()

    async def _every(self, seconds: float, care: Callable[[], Awaitable[None]]) -> None:
        """Do `care` again and again. What goes wrong in it is logged and ends neither it nor the mount."""
        while True:
            await trio.sleep(seconds)
            try:
                await care()
            except Exception:
                log.exception("%s failed", getattr(care, "__name__", "housekeeping"))

    async def _expire_redirects(self) -> None:
        for draft in self.context.redirects.expire():
            self.saves.end_if_unused(draft)

    async def _care_for_locks(self) -> None:
        self.context.locks.heartbeat()
        self.context.reserve.restore()

    async def _sweep(self) -> None:
        self.context.drafts.sweep()

    async def _beat(self) -> None:
        assert self._fence is not None
        try:
            self._fence.heartbeat()
        except VaultGoneError as error:
            if self.context.read_only_reason is None:
                self.context.read_only_reason = error.message
                log.error("the vault takes no more writes: %s", error)

    async def _settle(self, cut_off: bool) -> None:
        """The kernel is gone, or has let go of us: nobody will release what is still open."""
        await self.saves.settle(cut_off=cut_off)

    # --- what the control server asks, from other threads -------------------------------------------------------

    def status(self) -> MountStatus:
        context = self.context
        now = time.monotonic()
        drafts, retries = [], []
        for draft in context.inodes.drafts():
            name = draft.name
            if name is None:
                continue
            path = _path_text(name)
            if draft.refused is not None and not draft.handles:
                retries.append(path)
                continue
            if not draft.handles:
                continue
            drafts.append(
                OpenDraft(
                    path=path,
                    size=draft.size,
                    age_s=now - draft.created,
                    kind=draft.kind,
                    pid=draft.writer.pid,
                    program=draft.writer.program,
                    changed=draft.changed,
                )
            )
        held = [
            HeldLockInfo(path=os.fsdecode(path), held_s=max(0.0, time.time() - lock.since), private=lock.private)
            for path, lock in list(context.locks.held.items())
        ]
        state = "serving"
        if context.stopping:
            state = "stopping"
        elif context.read_only_reason is not None or self._options.ro or (self._fence is not None and self._fence.lost):
            state = "read-only"
        return MountStatus(
            vault=self._options.vault,
            mountpoint=self._options.mountpoint,
            pid=os.getpid(),
            since=self._since.isoformat(timespec="seconds"),
            version=vaultfs.__version__,
            state=state,  # type: ignore[arg-type]
            reason=context.read_only_reason or ("mounted read-only" if self._options.ro else None),
            drafts=drafts,
            locks=held,
            counters=dict(context.counters),
            kept=self.kept_drafts(),
            retries=retries,
            options=msgspec.to_builtins(self._options),
            log_file=self._options.log_file,
        )

    def kept_drafts(self) -> list[KeptDraftInfo]:
        kept = [_kept_info(draft) for draft in self.context.drafts.kept()]
        for draft in self.context.inodes.drafts():  # those that are still tried again are kept, too
            file, name = draft.file, draft.name
            if draft.refused is not None and file is not None and name is not None:
                kept.append(
                    KeptDraftInfo(
                        id=file.id,
                        path=_path_text(name),
                        size=draft.size,
                        when=file.record.created_at,
                        program=draft.writer.program,
                        pid=draft.writer.pid,
                        uid=file.record.writer.uid,
                        reason=f"{draft.refused}; it is tried again",
                        kind=draft.kind,
                    )
                )
        return kept

    def open_draft(self, draft_id: str) -> int:
        for draft in self.context.inodes.drafts():
            if draft.file is not None and draft.file.id == draft_id:
                return os.open(f"/proc/self/fd/{draft.file.fd}", os.O_RDONLY | os.O_CLOEXEC)
        return self.context.drafts.open_kept(draft_id)

    def locks(self, below: str) -> LocksInfo:
        result = self.context.locks.survey().look(os.fsencode(below))
        return locks_info(result)

    def reap_lock(self, lock: LockInfo, *, force: bool) -> str:
        report = lock_report(lock)
        removal = self.context.locks.survey().reap(report, force=force)
        log.info("asked to remove the lock %r%s (%s): %s", report.lock_path, " by force" * force, lock.verdict, removal)
        return str(removal)

    def stop(self) -> None:
        if self._token is not None and self._stop_requested is not None:
            try:
                self._token.run_sync_soon(self._stop_requested.set)
            except trio.RunFinishedError:
                return  # it has ended already, which is what is asked for


def _path_text(name: Name) -> str:
    try:
        return os.fsdecode(name.path())
    except (LookAgainError, FileNotFoundError):  # its directory was replaced or removed
        return os.fsdecode(name.name)


def _kept_info(draft: KeptDraft) -> KeptDraftInfo:
    return KeptDraftInfo(
        id=draft.id,
        path=draft.target,
        size=draft.size,
        when=draft.when,
        program=draft.writer.program if draft.writer is not None else "",
        pid=draft.writer.pid if draft.writer is not None else 0,
        uid=draft.writer.uid if draft.writer is not None else 0,
        reason=draft.reason or "",
        kind=str(draft.kind),
    )


def _option_text(text: str) -> str:
    """A value of a mount option: commas and backslashes are written with a backslash (libfuse, fuse_opt.h)."""
    escaped = text.replace("\\", "\\\\").replace(",", "\\,")
    return escaped.encode("ascii", "backslashreplace").decode("ascii")
