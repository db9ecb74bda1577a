"""Changes made in the vault from outside → the kernel forgets what it kept of them.

The kernel may keep names and attributes of the mount for hours, because versions never change and whatever happens
through the mount is known. What other programs do in the vault directory behind it must be heard of: `OutsideWatch`
puts an inotify watch on every vault directory that the kernel looked up, and `Invalidator` passes on what the mount
then decides. The two know nothing of each other; between them stands the mount, which alone compares identities::

    watch = OutsideWatch(changed, overflow)         # changed(directory_inode, name, deleted): look at the name, compare
    nursery.start_soon(watch.run)
    …
    cached = watch.add(inode, b"/proc/self/fd/7")   # BEFORE the directory's first name is given to the kernel
    …
    watch.forget(inode)                             # on FORGET of the directory

    invalidator = Invalidator()
    invalidator.start()
    invalidator.entry(parent_inode, b"note.md", then=lambda: announcer.announce(…))
    …
    await trio.to_thread.run_sync(invalidator.stop) # while the loop still answers requests
    watch.close()

The daemon's own publishes cause events like any other change; that is meant (there is no telling them apart
without a race) and must be cheap: an event costs 1 to 2 µs here, several for one name become one call of `changed`,
and machinery is left out by its name before that.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import struct
import threading
from collections.abc import Awaitable, Callable

import pyfuse3
import trio
from inotify_simple import INotify
from inotify_simple import flags as bits

from vaultfs import kernel

__all__ = ["Invalidator", "OutsideWatch"]

log = logging.getLogger(__name__)

Changed = Callable[[int, bytes, bool], Awaitable[None]]
Overflow = Callable[[], Awaitable[None]]

# As plain integers: an operation on an IntEnum costs more than all else that is done with an event.
_GONE = int(bits.DELETE | bits.MOVED_FROM)
_COME = int(bits.CREATE | bits.MOVED_TO)
_ITSELF = int(bits.DELETE_SELF | bits.MOVE_SELF | bits.UNMOUNT)
_OVERFLOW = int(bits.Q_OVERFLOW)
_IGNORED = int(bits.IGNORED)
_MASK = int(
    _GONE
    | _COME
    | bits.DELETE_SELF
    | bits.MOVE_SELF
    | bits.MODIFY
    | bits.CLOSE_WRITE  # a store through mmap shows by this alone
    | bits.ATTRIB
    | bits.ONLYDIR
    | bits.EXCL_UNLINK  # an unlinked file that is still written to has no name that could matter
)
_EVENT = struct.Struct("iIII")
_BUFFER = 1 << 18

# inotify on these tells of changes made on this machine alone, and sometimes not even of those.
_UNWATCHABLE = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "fuse", "virtiofs", "lustre", "gfs2", "ocfs2", "vboxsf")

_PAUSE = (
    0.005  # seconds between two readings: the first change is passed on at once, a flood at most 200 times a second
)
_YIELD_AFTER = 32  # names passed on before other tasks of the loop have their turn


def _machinery(name: bytes) -> bool:
    return name.startswith(b".vaultfs")


class OutsideWatch:
    """inotify watches on vault directories, by the directory's inode number on the mount.

    All methods are for the trio thread. Owns the inotify descriptor; `close` releases it and all watches.
    """

    def __init__(self, changed: Changed, overflow: Overflow, *, ignored: Callable[[bytes], bool] = _machinery) -> None:
        """Never fails: without inotify (too many instances) `add` says False for every directory.

        `changed(directory_inode, name, deleted)` is awaited for each name that something happened to. `deleted` tells
        what the last event said, no more: whether the name is there now is for the mount to see. An empty name means
        the watched directory itself, which was deleted, moved or unmounted. `overflow()` is awaited when the kernel
        dropped events: anything may have changed. What either raises goes to the log. `ignored(name)` leaves names
        out; by default those that begin with ``.vaultfs``.
        """
        self._changed = changed
        self._overflow = overflow
        self._ignored = ignored
        self._by_watch: dict[int, int] = {}
        self._by_inode: dict[int, int] = {}
        self._watchable: dict[int, bool] = {}  # by mount id
        self._complained = False
        self._inotify: INotify | None = None
        try:
            self._inotify = INotify(nonblocking=True)
        except OSError as error:
            self._complain("fs.inotify.max_user_instances", error)

    def __len__(self) -> int:
        """How many directories are watched."""
        return len(self._by_inode)

    def _complain(self, limit: str, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            log.warning(
                "not all directories can be watched, so the mount asks the disk more often there (%s); raise %s",
                error.strerror,
                limit,
            )

    def add(self, directory_inode: int, directory_fd_path: bytes) -> bool:
        """Watch a vault directory; True if every later change in it will be heard of.

        `directory_fd_path` is ``/proc/self/fd/N`` of a descriptor on it (O_PATH will do): by a path a swapped link
        could lead elsewhere. False: the limit of watches is reached, the directory cannot be read, or its file
        system does not tell of all changes; give the kernel short cache times for what is in it. Events from before
        the call are not reported, so call this before giving the kernel the first name. Again for the same inode
        is cheap, and replaces the watch if the number means another directory now.
        """
        if self._inotify is None:
            return False
        try:
            if not self._tells_all(directory_fd_path):
                return False
            watch = self._inotify.add_watch(directory_fd_path, _MASK)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                self._complain("fs.inotify.max_user_watches", error)
            # Anything else (not readable, gone, not supported) means the same to the caller: not watched.
            return False
        old = self._by_inode.get(directory_inode)
        if old is not None and old != watch:
            self._remove(old)
        former = self._by_watch.get(watch)
        if former is not None and former != directory_inode:
            # The same directory under a new number: the kernel forgot the old one, whose FORGET is still to come.
            del self._by_inode[former]
        self._by_watch[watch] = directory_inode
        self._by_inode[directory_inode] = watch
        return True

    def _tells_all(self, path: bytes) -> bool:
        mount_id = kernel.statx(kernel.AT_FDCWD, path, kernel.AT_NO_AUTOMOUNT).mnt_id
        known = self._watchable.get(mount_id)
        if known is None:
            known = self._watchable[mount_id] = not _file_system_type(mount_id).startswith(_UNWATCHABLE)
        return known

    def forget(self, directory_inode: int) -> None:
        """Watch it no longer; nothing happens if it is not watched."""
        watch = self._by_inode.pop(directory_inode, None)
        if watch is not None:
            self._remove(watch)

    def _remove(self, watch: int) -> None:
        self._by_watch.pop(watch, None)
        try:
            if self._inotify is not None:
                self._inotify.rm_watch(watch)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the directory is gone and the watch with it
                raise

    async def run(self) -> None:
        """Pass on changes until cancelled or closed."""
        if self._inotify is None:
            await trio.sleep_forever()
            return
        try:
            while self._inotify is not None:
                await trio.lowlevel.wait_readable(self._inotify.fileno())
                await self._dispatch(self._inotify.fileno())
                await trio.sleep(_PAUSE)
        except trio.ClosedResourceError:
            return  # close() was called while we waited

    async def _dispatch(self, descriptor: int) -> None:
        changes, overflowed = self._read(descriptor)
        if overflowed:
            await self._guarded(self._overflow)
        for count, ((inode, name), deleted) in enumerate(changes.items()):
            if count % _YIELD_AFTER == _YIELD_AFTER - 1:
                await trio.lowlevel.checkpoint()
            await self._guarded(self._changed, inode, name, deleted)

    async def _guarded(self, callback: Callable[..., Awaitable[None]], *arguments: object) -> None:
        try:
            await callback(*arguments)
        except Exception:
            # One name that cannot be looked at must end neither the mount nor the watch on all others. The cost of
            # not having passed it on is a stale name, so it is told.
            log.exception("a change made outside could not be passed on: %r", arguments)

    def _read(self, descriptor: int) -> tuple[dict[tuple[int, bytes], bool], bool]:
        """What happened, each name once, in the order of the first event; and whether events were dropped."""
        changes: dict[tuple[int, bytes], bool] = {}
        overflowed = False
        try:
            data = os.read(descriptor, _BUFFER)
        except BlockingIOError:  # nothing there after all
            return changes, False
        at = 0
        while at < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size + length
            if mask & _OVERFLOW:
                overflowed = True
                continue
            inode = self._by_watch.get(watch)
            if inode is None:  # forgotten meanwhile
                continue
            if mask & _IGNORED:  # the kernel removed the watch: the directory is gone; its last event came before
                del self._by_watch[watch]
                if self._by_inode.get(inode) == watch:
                    del self._by_inode[inode]
                continue
            if mask & _ITSELF:
                changes[(inode, b"")] = True
                continue
            name = data[at - length : at].rstrip(b"\0")
            if not name:  # an attribute of the directory itself
                changes.setdefault((inode, b""), False)
            elif self._ignored(name):
                continue
            elif mask & _GONE:
                changes[(inode, name)] = True
            elif mask & _COME:
                changes[(inode, name)] = False
            else:
                changes.setdefault((inode, name), False)
        return changes, overflowed

    def close(self) -> None:
        """End all watches, and `run`; idempotent."""
        if self._inotify is not None:
            inotify, self._inotify = self._inotify, None
            trio.lowlevel.notify_closing(inotify.fileno())
            inotify.close()
            self._by_inode.clear()
            self._by_watch.clear()


def _file_system_type(mount_id: int) -> str:
    """The type as in /proc/self/mountinfo ("ext4", "fuse.sshfs"); empty if that mount is not ours to see."""
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            if line.startswith(b"%d " % mount_id):
                return line.partition(b" - ")[2].split()[0].decode("ascii", "replace")
    return ""


class Invalidator:
    """One thread that tells the kernel to forget, and holds nothing while it does.

    ``pyfuse3.invalidate_entry`` waits in the kernel for the parent directory's lock, which a program may hold that
    waits for an answer of this daemon: called from the loop, or by anybody who holds what an answer needs, it would
    never come back. Requests are done one after the other, in order.

    A daemon that is *killed* while this thread waits cannot die by itself; `vaultfs.mount.companion` sees to that.
    """

    def __init__(
        self,
        invalidate_entry: Callable[[int, bytes, int], None] = pyfuse3.invalidate_entry,
        invalidate_inode: Callable[[int, bool], None] = pyfuse3.invalidate_inode,
    ) -> None:
        self._invalidate_entry = invalidate_entry
        self._invalidate_inode = invalidate_inode
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None] | None] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="vaultfs-invalidator", daemon=True)
        self._stopping = False

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def entry(
        self, parent_inode: int, name: bytes, deleted_inode: int = 0, *, then: Callable[[], None] | None = None
    ) -> None:
        """The kernel shall look `name` in `parent_inode` up again; any thread, never waits.

        With `deleted_inode` (the number that the kernel has for the name) programs that watch are told of a deletion.
        `then` is called by the thread afterwards, also if the kernel knew of no such name: an announcement, which
        must not come before, or watchers would look and still see what is to be forgotten.
        """
        self._put(lambda: self._invalidate_entry(parent_inode, name, deleted_inode), then)

    def inode(self, inode: int, attr_only: bool, *, then: Callable[[], None] | None = None) -> None:
        """The kernel shall ask again for the attributes of `inode`, and unless `attr_only` for its content."""
        self._put(lambda: self._invalidate_inode(inode, attr_only), then)

    def _put(self, request: Callable[[], None], then: Callable[[], None] | None) -> None:
        if not self._stopping:
            self._queue.put((request, then))

    @property
    def waiting(self) -> int:
        """Requests not yet begun."""
        return self._queue.qsize()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._stopping:
                continue  # the mount goes, and with it all that the kernel kept
            request, then = item
            try:
                request()
            except OSError as error:
                # ENOENT: the kernel keeps no such name or inode, which is what we want. ENOTDIR: the parent's number
                # means a file now, so the name is gone with it. ENOTCONN, ENODEV, EBADF, EINVAL (no session): the
                # connection is gone and all that was kept as well. ENOTEMPTY, EBUSY (of a deletion): a directory with
                # known names in it, or a mount point; the kernel has dropped what could be dropped of it.
                if error.errno not in (
                    errno.ENOENT,
                    errno.ENOTDIR,
                    errno.ENOTCONN,
                    errno.ENODEV,
                    errno.EBADF,
                    errno.EINVAL,
                    errno.ENOTEMPTY,
                    errno.EBUSY,
                ):
                    log.warning("the kernel did not forget what changed outside: %s", error)
            except Exception:
                # The thread must go on for all other names; a stale one is told.
                log.exception("the kernel could not be told what changed outside")
            if then is not None:
                try:
                    then()
                except Exception:
                    # As above: an announcement that fails must not keep later names stale.
                    log.exception("a change made outside could not be announced")

    def stop(self, limit: float = 2.0) -> bool:
        """End the thread, waiting at most `limit` seconds; True if it ended. Idempotent, any thread but the loop's.

        Call it while the loop still answers requests: what the thread waits for in the kernel is such an answer.
        Call it before ``pyfuse3.close``, which frees what the thread uses.
        """
        self._stopping = True
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(limit)
        return not self._thread.is_alive()
