"""Look again: how a writer gets its draft, and a reader its version.

`open` for writing arrives on the Version that the name resolved to. Answered with ESTALE, Linux walks the path
again with LOOKUP_REVAL (open(2) and truncate(2) do; fs/namei.c), and the lookups that follow from the same thread
are answered with the right draft. A read-only open that lands on a draft of a published name is sent back likewise
to the Version, and a Version that was superseded or changed outside is left behind in the same way.

Pending redirects are keyed by the caller's thread id alone: keyed by name they leak ESTALE to programs when names
are renamed meanwhile. An entry is made by the ESTALE answer, used by *every* lookup of a regular file by that thread
(the kernel sends two, with a FORGET between or after), and removed by the open, setattr or create that succeeds, or by
another kind of request of that thread. It expires after seconds, not milliseconds: longer than the worst stall.

An open that comes back to the same inode without a lookup in between did not walk a path: it came from
`/proc/self/fd/N` or an O_PATH descriptor (`came_back_unlooked`). Nor did an open of a draft that no lookup of the same
thread was answered with (`was_given`): names of drafts are never cached, so a walk always asks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from vaultfs.mount.inodes import Draft, Inode, Opener

__all__ = ["EXPIRES_AFTER", "Redirect", "Redirects"]

EXPIRES_AFTER = 10.0  # seconds


class Redirect:
    """What a thread was told to look again for.

    `source` is the inode that was not what it wanted; `looked` tells whether a lookup came since; `draft` is the
    one that its lookups are answered with, once one was chosen (a promise: it keeps the draft alive).
    """

    __slots__ = ("draft", "expires", "looked", "opener", "source", "truncating", "writing")

    def __init__(self, source: Inode, *, writing: bool, truncating: bool) -> None:
        self.source = source
        self.writing = writing
        self.truncating = truncating
        self.looked = False
        self.draft: Draft | None = None
        self.opener: Opener | None = None  # who it is, once that was looked up
        self.expires = time.monotonic() + EXPIRES_AFTER

    def promise(self, draft: Draft) -> None:
        """Answer the lookups of this thread with `draft` from now on."""
        if self.draft is draft:
            return
        self.withdraw()
        self.draft = draft
        draft.promises += 1

    def withdraw(self) -> Draft | None:
        """Take the promise back; returns the draft that lost it, so that the caller can end it if it is unused."""
        draft, self.draft = self.draft, None
        if draft is not None:
            draft.promises -= 1
        return draft


class Redirects:
    """The pending redirects of all threads. Runs on the event loop's thread only."""

    def __init__(self) -> None:
        self._pending: dict[int, Redirect] = {}
        self._given: dict[int, tuple[Draft, float]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def get(self, thread: int) -> Redirect | None:
        return self._pending.get(thread)

    def begin(self, thread: int, source: Inode, *, writing: bool, truncating: bool = False) -> Draft | None:
        """Note that `thread` is being told to look again; returns a draft that lost an older promise, if any."""
        former = self._pending.get(thread)
        self._pending[thread] = Redirect(source, writing=writing, truncating=truncating)
        return former.withdraw() if former is not None else None

    def came_back_unlooked(self, thread: int, source: Inode, *, writing: bool) -> bool:
        """True if `thread` was told to look again for `source` and came back without having looked."""
        pending = self._pending.get(thread)
        return pending is not None and pending.source is source and pending.writing is writing and not pending.looked

    def gave(self, thread: int, draft: Draft) -> None:
        """A lookup of `thread` was answered with `draft`."""
        self._given[thread] = (draft, time.monotonic() + EXPIRES_AFTER)

    def was_given(self, thread: int, draft: Draft) -> bool:
        """True if the open of `draft` that `thread` makes now comes from a path walk."""
        given = self._given.pop(thread, None)
        return given is not None and given[0] is draft and given[1] > time.monotonic()

    def end(self, thread: int) -> Draft | None:
        """`thread` got what it wanted, or gave up; returns the draft that it had been promised."""
        pending = self._pending.pop(thread, None)
        return pending.withdraw() if pending is not None else None

    def expire(self) -> Iterable[Draft]:
        """Drop what nobody came back for; yields the drafts that lost a promise."""
        now = time.monotonic()
        for thread, (_, expires) in list(self._given.items()):
            if expires < now:
                del self._given[thread]
        for thread, pending in list(self._pending.items()):
            if pending.expires < now:
                del self._pending[thread]
                draft = pending.withdraw()
                if draft is not None:
                    yield draft
