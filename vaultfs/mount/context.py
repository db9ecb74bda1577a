"""What all parts of one mount share: the core's objects, the inode table, counters, and how they wait.

`MountContext` is built once by the server and handed to everybody; it owns nothing itself. All of it is used on the
event loop's thread, except where a docstring says otherwise.

How a name in the vault is changed
    `while_locked` waits for path locks without holding up anybody else, and then runs the change as one *synchronous*
    call, locks held, between two turns of the event loop. So no other handler sees a change half done, a lock of ours
    is never seen standing by any handler, and no lock is held while something waits. The paths to lock are asked for
    anew at each look, in the same turn: a directory above them that was renamed meanwhile is no race.

How the disk is waited for
    `in_thread` is for what really waits: fsync, big copies. Everything else runs inline (performance.md: a hop
    costs more than most system calls).
"""

from __future__ import annotations

import collections
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, Unpack

import trio

from vaultfs.errors import LockBusyError, VaultError, VaultGoneError, printable
from vaultfs.mount import procs
from vaultfs.mount.reserve import FULL, Reserve
from vaultfs.patience import within

if TYPE_CHECKING:
    from vaultfs.config import MountOptions
    from vaultfs.drafts import Drafts
    from vaultfs.locks import Acquisition, Fence, HeldLock, PathLocks
    from vaultfs.mount.announce import Announcer
    from vaultfs.mount.inode_table import InodeTable
    from vaultfs.mount.inodes import Opener
    from vaultfs.mount.names import NamePolicy
    from vaultfs.mount.redirect import Redirects
    from vaultfs.mount.watch import Invalidator, OutsideWatch
    from vaultfs.root import VaultRoot
    from vaultfs.state import StateDirectory

__all__ = ["MountContext", "in_thread"]

COUNTERS = ("saves", "conflicts", "busy", "errors", "kept", "displaced", "copies", "redirects")

log = logging.getLogger(__name__)

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


async def in_thread(call: Callable[[Unpack[_Arguments]], _Result], *arguments: *_Arguments) -> _Result:
    """Run a call that may wait for a disk in a worker thread.

    It cannot be cancelled half-way: its caller owns descriptors that the thread uses.
    """
    return await trio.to_thread.run_sync(call, *arguments, abandon_on_cancel=False)


@contextmanager
def _releasing(held: list[HeldLock]) -> Iterator[None]:
    """Release all of `held` at the end, each whatever the others do."""
    with ExitStack() as stack:
        for lock in held:
            stack.callback(lock.release)
        yield


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
        self.counters: collections.Counter[str] = collections.Counter(dict.fromkeys(COUNTERS, 0))
        self.device = 0  # st_dev of the mount itself, known once it is mounted
        self.mount_id = 0
        self.announcer: Announcer | None = None
        self.invalidator: Invalidator | None = None
        self.watch: OutsideWatch | None = None
        self.read_only_reason: str | None = None
        self.stopping = False
        self.reserve = Reserve(state)
        self._turns: dict[bytes, trio.Lock] = {}  # path → held by the one who looks at its busy lock
        self._lock_makers: dict[tuple[int, int], Opener] = {}  # (st_dev, st_ino) of a lock directory → who made it

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

    async def while_locked(
        self,
        paths: Callable[[], Iterable[bytes]],
        change: Callable[[], _Result],
        *,
        timeout: float | None = None,
        saver: Opener | None = None,
        frees_space: bool = False,
    ) -> _Result:
        """Run `change` with the path locks of all `paths()` held; it must not wait for anything.

        `saver` is the process on whose behalf it is: it is let through a lock that it, or a living ancestor of it, was
        seen to put in place through the mount (lock-protocol.md, "Re-entry"). With `frees_space` the reserve is spent
        if the disk is too full for a lock.

        `timeout` is in seconds, for all locks together; None means the mount's `lock-timeout`. Locks are taken in byte
        order, all or none: nobody waits for a lock while holding another, so two renames cannot wait for each other.

        Raises LockBusyError at the deadline, FenceLostError, what the core raises when something unsafe stands where
        a lock should be, and what `change` raises.
        """
        limit = self.options.lock_timeout if timeout is None else timeout
        deadline = trio.current_time() + limit
        looks: dict[bytes, Acquisition] = {}
        async with AsyncExitStack() as stack:
            turn: bytes | None = None
            while True:
                wanted = sorted(set(paths()))
                try:
                    held, wait, busy = self._take_all(wanted, looks, deadline, saver)
                except LockBusyError:
                    if timeout is None:  # what is tried again in the background counts once
                        self.counters["busy"] += 1
                    raise
                except OSError as error:
                    if error.errno not in FULL or not frees_space or not self.reserve.spend():
                        raise
                    looks.clear()
                    continue
                if busy is None:
                    with _releasing(held), self.changing():
                        return change()
                if turn is None:
                    turn = busy
                    await stack.enter_async_context(self._turn(turn, deadline))
                    looks.clear()  # what was seen before the others' turns is old
                else:
                    await trio.sleep(wait)

    @asynccontextmanager
    async def _turn(self, path: bytes, deadline: float) -> AsyncIterator[None]:
        """Of all who wait for the lock of `path`, one looks; the others are told when it is their turn.

        Each look reads and judges the lock anew, so a crowd of lookers would keep everybody else from being answered.
        """
        turn = self._turns.setdefault(path, trio.Lock())
        with trio.move_on_at(deadline):
            await turn.acquire()
        if turn.statistics().owner is not trio.lowlevel.current_task():
            self.counters["busy"] += 1
            raise LockBusyError("others wait for its lock already, which is held", path=path)
        try:
            yield
        finally:
            turn.release()
            if not turn.locked():
                self._turns.pop(path, None)

    def _take_all(
        self, wanted: list[bytes], looks: dict[bytes, Acquisition], deadline: float, saver: Opener | None
    ) -> tuple[list[HeldLock], float, bytes | None]:
        """All locks of `wanted`; or none of them, the seconds to wait before the next look, and the busy path."""
        with ExitStack() as stack:
            held: list[HeldLock] = []
            for path in wanted:
                look = looks.get(path)
                if look is None:
                    left = max(0.0, deadline - trio.current_time())
                    look = looks[path] = self.locks.begin(path, left, through=self._own_lock(path, saver))
                step = look.step()
                if step is None:
                    # Anybody may have written the record: it must not speak to a terminal or forge a line of the log.
                    raise LockBusyError(f"its lock is held by {printable(look.holder or 'somebody')}", path=path)
                if isinstance(step, float | int):
                    return [], step, path
                del looks[path]
                held.append(step)
                stack.callback(step.release)
            for lock in held:
                if not lock.still_right():  # what stood in the way of a lock beside the file has gone: take that one
                    return [], 0.0, lock.path
            stack.pop_all()
            return held, 0.0, None

    def note_lock_made(self, path: bytes, maker: Opener) -> None:
        """`maker` put a directory in place through the mount at `path`, which has a lock's name."""
        try:
            status = self.root.stat(path)
        except FileNotFoundError:
            return  # gone already
        self._lock_makers[(status.st_dev, status.st_ino)] = maker
        for identity, former in list(self._lock_makers.items()):
            if not procs.exists(former.pid):
                del self._lock_makers[identity]

    def _own_lock(self, path: bytes, saver: Opener | None) -> tuple[int, int] | None:
        """The lock directory beside `path`, if `saver` or a living ancestor of it put it there through the mount.

        The processes are told apart by pid and start time as we saw them, never by what the lock's record says:
        numbers repeat across namespaces.
        """
        if saver is None or not self._lock_makers:
            return None
        try:
            status = self.root.stat(path + b".lock")
        except (OSError, VaultError):
            return None  # no such lock, or nothing that may be judged here: the acquisition itself will say
        maker = self._lock_makers.get((status.st_dev, status.st_ino))
        if maker is None:
            return None
        if maker.same(saver) or (maker.pid in procs.ancestors(saver.pid) and self._lives(maker)):
            return status.st_dev, status.st_ino
        return None

    @staticmethod
    def _lives(process: Opener) -> bool:
        try:
            return within(procs.PATIENCE, lambda: procs.start_time(process.pid)) == process.start_time
        except TimeoutError:
            return False  # in the middle of an exec: the next look will tell

    @contextmanager
    def changing(self) -> Iterator[None]:
        """To be held around every change to the vault: while it is, no other daemon can take the vault over."""
        if self.fence is None:
            yield
            return
        with self.fence.gate():
            yield
