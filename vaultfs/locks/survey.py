"""All locks of a vault, for a person: who holds what, why we think so, and removing what nobody holds.

``vaultfs locks`` is made of this. `Survey` works in three places: in the daemon (which knows its own locks and has
watched others for as long as it runs), in the command line on a vault that nobody serves, and there on one whose
daemon does not answer. It needs no state directory and changes nothing but what `reap` is told to remove.

Where it looks: every directory named ``NAME.lock`` in the vault, links not followed and other file systems not
entered, and the private locks in ``.vaultfs/locks``. A private lock's name is a hash of the path it is for; the path is
found by hashing the names that the walk meets, so that of a file which does not exist (yet) stays unknown.

What is no lock by its content (a directory of documents that happens to have the name; a file ``Cargo.lock``) is not
listed. What should be one and is not (a link, a FIFO as owner) is, as foreign.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from vaultfs.errors import UnsafePathError
from vaultfs.locks.liveness import Judge, Judgement, Verdict, Watches
from vaultfs.locks.places import SUFFIX
from vaultfs.locks.reaper import Removal, remove_forced, remove_judged
from vaultfs.locks.records import LockContents
from vaultfs.locks.report import Examined, LockReport, examine

if TYPE_CHECKING:
    from vaultfs.root import VaultRoot

__all__ = ["Survey", "SurveyResult"]

STATE_NAME = b".vaultfs"
PRIVATE = STATE_NAME + b"/locks"

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_REAPED = (Verdict.DEAD, Verdict.RESIDUE)


class SurveyResult(msgspec.Struct, frozen=True):
    """`locks` by path; `closed`: directories (vault-relative) that could not be looked into."""

    locks: list[LockReport]
    closed: list[bytes]


class Survey:
    """Looks at the locks of one vault. Keep it as long as you can: what must be watched is judged by later looks.

    `judged`: verdict and age of one look at a lock, remembering it; by default this object remembers its own looks.
    `held`: the paths whose locks the caller holds. May be used by one thread at a time, unless `judged` says otherwise.
    """

    def __init__(
        self,
        root: VaultRoot,
        judge: Judge,
        judged: Callable[[bytes, LockContents], tuple[Judgement, float]] | None = None,
        *,
        held: Callable[[], list[bytes]] = list,
    ) -> None:
        self._root = root
        self._judge = judge
        self._watches = Watches(judge.clocks)
        self._judged = judged or self._judge_alone
        self._held = held

    def _judge_alone(self, place: bytes, contents: LockContents) -> tuple[Judgement, float]:
        watch = self._watches.look(place, contents)
        return self._judge.judge(contents, watch), self._judge.age(contents, watch)

    # -- looking ---------------------------------------------------------------------------------------------------

    def look(self, below: bytes = b"") -> SurveyResult:
        """The locks of everything below the directory `below`, of `below` itself, or the lock `below` itself.

        Takes as long as a walk through the vault; where a second look proves more, it waits for it (20 ms). Raises
        UnsafePathError if `below` leads out of the vault, OSError.
        """
        closed: list[bytes] = []
        private = self._private_names()
        paths: dict[bytes, bytes] = {}  # place → path that its lock is for
        hashes = {self._hash(path): path for path in self._held()}
        for path, status in self._walk(below, closed):
            if path.endswith(SUFFIX) and not path.endswith(b"/" + SUFFIX) and path != SUFFIX:
                if not stat.S_ISREG(status.st_mode):
                    paths[path] = path.removesuffix(SUFFIX)
            elif private:
                hashes[self._hash(path)] = path
        if below and private:
            hashes[self._hash(below)] = below
        for name in private:
            path = hashes.get(name.removesuffix(SUFFIX), b"")
            if not below or path == below or path.startswith(below + b"/"):
                paths[PRIVATE + b"/" + name] = path
        found = {place: self._examine(path, place) for place, path in paths.items()}
        unsettled = {
            place: examined.look_again for place, examined in found.items() if examined and examined.look_again
        }
        if unsettled:
            time.sleep(max(unsettled.values()))
            found.update({place: self._examine(paths[place], place) for place in unsettled})
        reports = [
            examined.report
            for examined in found.values()
            if examined is not None and not (examined.contents is not None and examined.contents.documents)
        ]
        return SurveyResult(sorted(reports, key=lambda report: (report.path, report.lock_path)), sorted(closed))

    @staticmethod
    def _hash(path: bytes) -> bytes:
        return hashlib.sha256(path).hexdigest().encode()

    def _private_names(self) -> list[bytes]:
        try:
            return [name for name in self._root.listdir(PRIVATE) if name.endswith(SUFFIX)]
        except FileNotFoundError:
            return []  # never mounted, or never needed

    def _walk(self, below: bytes, closed: list[bytes]) -> Iterator[tuple[bytes, os.stat_result]]:
        """`below` with its lock, and everything under it that is not in the state directory."""
        if below:
            for path in (below, below + SUFFIX):
                try:
                    yield path, self._root.stat(path)
                except FileNotFoundError:
                    continue  # a lock may stand for a file that does not exist yet, and a file need not be locked
                except NotADirectoryError:
                    continue
                except OSError as error:
                    if error.errno != errno.ENAMETOOLONG:  # then its lock is a private one
                        raise
        waiting = [below]
        while waiting:
            at = waiting.pop()
            try:
                entries = self._root.scandir(at)
            except (FileNotFoundError, NotADirectoryError):
                continue  # gone meanwhile, or `below` is a file
            except (PermissionError, UnsafePathError):
                if at == below:
                    raise
                closed.append(at)
                continue
            for name, status in entries:
                path = at + b"/" + name if at else name
                if path == STATE_NAME:
                    continue
                yield path, status
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(path)

    def _examine(self, path: bytes, place: bytes) -> Examined | None:
        try:
            return examine(self._root, path, place, self._judge, self._judged)
        except (FileNotFoundError, NotADirectoryError):
            return None  # its directory went meanwhile

    # -- removing --------------------------------------------------------------------------------------------------

    def reap(self, report: LockReport, *, force: bool = False) -> Removal:
        """Removes the lock of `report` if it is still that very one, and dead or residue at another look.

        `force`: also if it is alive or unknown, or foreign only in that its protocol files are no plain ones; never
        one that the caller of this object holds, nor anything that is not of the protocol (LEFT).

        Returns what became of it; LOST: it is gone, or another one stands there now. Raises UnsafePathError, OSError
        (EACCES where we may look but not remove).
        """
        try:
            with self._root.parent(report.lock_path) as (directory, name):
                lock = os.open(name, _DIRECTORY, dir_fd=directory)
                try:
                    return self._reap(report, directory, name, lock, force)
                finally:
                    os.close(lock)
        except FileNotFoundError:
            return Removal.LOST
        except NotADirectoryError:
            return Removal.LEFT

    def _reap(self, report: LockReport, directory: int, name: bytes, lock: int, force: bool) -> Removal:
        examined = self._examine(report.path, report.lock_path)
        if examined is None or examined.contents is None or examined.report.mark != report.mark:
            return Removal.LOST
        contents = examined.contents
        status = os.fstat(lock)
        if (status.st_dev, status.st_ino) != (contents.dev, contents.ino):
            return Removal.LOST  # exchanged between our two looks
        if contents.dev != self._root.dev:
            return Removal.LEFT  # another file system is mounted there
        if examined.report.verdict in _REAPED:
            return remove_judged(directory, name, lock, contents)
        if not force or examined.report.verdict == Verdict.OURS:
            return Removal.LEFT
        return remove_forced(directory, name, lock, contents)
