"""What all parts of one mount share: the core's objects, the inode table, counters, and three ways of waiting.

`MountContext` is built once by the server and handed to everybody; it owns nothing itself. All of it is used on the
event loop's thread, except where a docstring says otherwise.

Waiting
    `hold_lock` waits for a path lock without holding up anybody else: the core's Acquisition takes one look per
    step and never sleeps, the event loop sleeps between them.
    `TreeGate` keeps directories where they are while a file below them changes: a save or a rename of a file
    passes it *shared*, the rename or removal of a directory *exclusively*. So the path that a save locks is the
    path it publishes at.
    `in_thread` is for what really waits: fsync, big copies. Everything else runs inline (performance.md: a hop
    costs more than most system calls).
"""

from __future__ import annotations

import collections
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, Unpack

import trio

from vaultfs.errors import LockBusyError, VaultGoneError

if TYPE_CHECKING:
    from vaultfs.config import MountOptions
    from vaultfs.drafts import Drafts
    from vaultfs.locks import Fence, HeldLock, PathLocks
    from vaultfs.mount.announce import Announcer
    from vaultfs.mount.inodes import InodeTable
    from vaultfs.mount.names import NamePolicy
    from vaultfs.mount.redirect import Redirects
    from vaultfs.mount.watch import Invalidator, OutsideWatch
    from vaultfs.root import VaultRoot
    from vaultfs.state import StateDirectory

__all__ = ["MountContext", "TreeGate", "in_thread"]

log = logging.getLogger(__name__)

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


async def in_thread(call: Callable[[Unpack[_Arguments]], _Result], *arguments: *_Arguments) -> _Result:
    """Run a call that may wait for a disk in a worker thread.

    It cannot be cancelled half-way: its caller owns descriptors that the thread uses.
    """
    return await trio.to_thread.run_sync(call, *arguments, abandon_on_cancel=False)


class TreeGate:
    """Many may pass together, or one alone. Whoever wants to pass alone is not overtaken for ever."""

    def __init__(self) -> None:
        self._shared = 0
        self._alone = False
        self._waiting_alone = 0
        self._changed = trio.Condition()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        if self._alone or self._waiting_alone:
            async with self._changed:
                while self._alone or self._waiting_alone:
                    await self._changed.wait()
                self._shared += 1
        else:
            self._shared += 1
        try:
            yield
        finally:
            self._shared -= 1
            if self._waiting_alone:
                with trio.CancelScope(shield=True):
                    async with self._changed:
                        self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        self._waiting_alone += 1
        try:
            async with self._changed:
                while self._alone or self._shared:
                    await self._changed.wait()
                self._alone = True
        finally:
            self._waiting_alone -= 1
        try:
            yield
        finally:
            self._alone = False
            with trio.CancelScope(shield=True):
                async with self._changed:
                    self._changed.notify_all()


class MountContext:
    """One mount's shared objects; see the module's docstring."""

    def __init__(
        self,
        *,
        options: MountOptions,
        root: VaultRoot,
        state: StateDirectory,
        drafts: Drafts,
        locks: PathLocks,
        inodes: InodeTable,
        redirects: Redirects,
        policy: NamePolicy,
        fence: Fence | None,
    ) -> None:
        self.options = options
        self.root = root
        self.state = state
        self.drafts = drafts
        self.locks = locks
        self.inodes = inodes
        self.redirects = redirects
        self.policy = policy
        self.fence = fence
        self.gate = TreeGate()
        self.counters: collections.Counter[str] = collections.Counter()
        self.device = 0  # st_dev of the mount itself, known once it is mounted
        self.announcer: Announcer | None = None
        self.invalidator: Invalidator | None = None
        self.watch: OutsideWatch | None = None
        self.read_only_reason: str | None = None
        self.stopping = False

    def assert_writable(self) -> None:
        """Raises VaultGoneError when nothing may be written any more."""
        if self.read_only_reason is not None:
            raise VaultGoneError(self.read_only_reason)
        try:
            self.root.assert_bound()
        except VaultGoneError as error:
            self.read_only_reason = error.message
            log.error("the vault takes no more writes: %s", error)
            raise

    async def hold_lock(self, path: bytes, timeout: float | None = None) -> HeldLock:
        """The path lock of `path`, waited for without holding up others.

        `timeout` is in seconds; None means the mount's `lock-timeout`. Raises LockBusyError at the deadline, and
        what the core raises when something unsafe stands where the lock should be.
        """
        acquisition = self.locks.begin(path, timeout)
        try:
            while True:
                step = acquisition.step()
                if step is None:
                    self.counters["busy"] += 1
                    raise LockBusyError(f"its lock is held by {acquisition.holder or 'somebody'}", path=path)
                if not isinstance(step, float | int):
                    return step
                await trio.sleep(step)
        finally:
            acquisition.cancel()

    @asynccontextmanager
    async def locked(self, *paths: bytes, timeout: float | None = None) -> AsyncIterator[None]:
        """Hold the path locks of all `paths`, taken in byte order under one deadline, released in any case."""
        deadline = trio.current_time() + (self.options.lock_timeout if timeout is None else timeout)
        held: list[HeldLock] = []
        try:
            for path in sorted(set(paths)):
                held.append(await self.hold_lock(path, max(0.0, deadline - trio.current_time())))
            with self.changing():
                yield
        finally:
            for lock in reversed(held):
                lock.release()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """To be held around every change to the vault: while it is, no other daemon can take the vault over."""
        if self.fence is None:
            yield
            return
        with self.fence.gate():
            yield
