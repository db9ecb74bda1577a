"""Is a save complete? The first two questions that are asked when a descriptor is closed.

FLUSH arrives for every close of every duplicate: the shell's ``echo x > f`` sends one before anything is written, and
the exec of every child that inherited the descriptor sends one.

1. *Is its opener done with it?* (`opener_is_done`) The opener's descriptors that are open for writing on a draft of the
   name are counted in /proc, those of one open file description once, and compared with the handles that this
   process has not let go of. When an opener lets go while a descendant still holds the descriptor, the descendant
   becomes the opener. A process that cannot be looked into is never found to be done: its save is published at
   RELEASE.
2. *Was it dying of a signal?* (`was_cut_short`) Then it has not saved, except where publishing would hurt nothing. A
   process that catches the signal and exits has closed its files itself.

Source: versions-and-drafts.md, "When a save is complete".
"""

from __future__ import annotations

import signal
import time
from functools import partial

import trio

from vaultfs.mount import procs
from vaultfs.mount.context import MountContext
from vaultfs.mount.inodes import Draft, Handle, Opener
from vaultfs.patience import within

__all__ = ["Completeness"]

LONG_OUTPUT = 2.0  # seconds after which an output that was stopped is worth more than what it replaces
STOP_REQUESTS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE})


class Completeness:
    """The judgement for one mount."""

    def __init__(self, context: MountContext) -> None:
        self._context = context

    async def opener_is_done(self, handle: Handle, draft: Draft) -> bool:
        """Question 1, and the noting of question 2's signal; hands the handle on to a descendant that holds it."""
        opener = handle.opener
        if opener is None or not procs.is_still(opener.pid, opener.start_time):
            return False  # gone or unknown: RELEASE publishes
        siblings = draft.name.drafts if draft.name is not None else {draft}
        numbers = frozenset().union(*(one.sent_numbers for one in siblings))
        mount_id, device = self._context.mount_id, self._context.device
        descriptors = procs.write_descriptors(opener.pid, mount_id, device, numbers)
        if descriptors is None:
            return False
        if descriptors:
            expected = self._open_handles(siblings, opener.pid, opener.start_time)
            if len(descriptors) >= expected:
                distinct = procs.distinct_open_files(opener.pid, descriptors)
                if (len(descriptors) if distinct is None else distinct) >= expected:
                    return False
        death = procs.death_signal(opener.pid)
        if death:
            draft.interrupted = (death, draft.writes)
        heir = await self._heir(siblings, opener.pid, numbers)
        if heir is not None:
            handle.opener = heir
            return False
        return True

    @staticmethod
    def _open_handles(drafts: set[Draft], pid: int, start_time: int) -> int:
        return sum(
            1
            for draft in drafts
            for handle in draft.handles
            if not handle.let_go
            and handle.opener is not None
            and handle.opener.pid == pid
            and handle.opener.start_time == start_time
        )

    async def _heir(self, drafts: set[Draft], pid: int, numbers: frozenset[int]) -> Opener | None:
        """A descendant of `pid` that still holds the descriptor which `pid` let go of."""
        for attempt in range(4):
            passing = False
            for child in procs.descendants(pid):
                descriptors = procs.write_descriptors(child, self._context.mount_id, self._context.device, numbers)
                if not descriptors:
                    continue
                try:
                    start = within(procs.PATIENCE, partial(procs.start_time, child))
                except TimeoutError:
                    passing = True  # in the middle of an exec: what it keeps is seen when that is over
                    continue
                own = self._open_handles(drafts, child, start)
                distinct = procs.distinct_open_files(child, descriptors) if own else 1
                if own and (len(descriptors) if distinct is None else distinct) <= own:
                    continue
                if attempt < 3 and all(procs.closes_on_exec(child, number) for number in descriptors):
                    # Between fork and exec a child holds everything for a moment: that is no inheritance.
                    passing = True
                    continue
                return Opener(child, start, procs.program(child))
            if not passing:
                return None
            await trio.sleep(0.002 * (attempt + 1))
        return None

    def was_cut_short(self, draft: Draft) -> bool:
        """Question 2: True if the last writer was killed and publishing what it left could hurt."""
        if draft.interrupted is None:
            return False
        death, writes = draft.interrupted
        if writes != draft.writes:
            draft.interrupted = None  # somebody else went on writing, and ended well
            return False
        if draft.kind == "edit" and draft.append_from is not None:
            return False
        asked_to_stop = death in STOP_REQUESTS or draft.opened_by_dying
        had_no_content = draft.kind == "new" or (draft.began is not None and draft.began.size == 0)
        if had_no_content and asked_to_stop:
            return False
        age = time.monotonic() - draft.created
        if draft.kind == "replacement" and asked_to_stop and draft.front_to_back and age > LONG_OUTPUT:
            return False
        idle = self._context.options.idle_publish
        return not (draft.kind == "edit" and idle and time.monotonic() - draft.last_write > idle)
