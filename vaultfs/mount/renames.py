"""rename(2) on the mount: files with their drafts, directories with what is below them, links.

A rename of files is one synchronous step while both path locks are held. The drafts of a file go along with it;
those of a file that it is renamed over stay with the place, and conflict or replace when they are published. A file
that was never published exists only as a draft: renamed over another file it waits as a replacement of that, whose
version stays visible until then. A directory waits for locks that others hold below it.

`RENAME_NOREPLACE` and `RENAME_EXCHANGE` do what they say or fail; they are never ignored.

Source: versions-and-drafts.md, "Create, rename, unlink"; lock-protocol.md, "Several locks, and directories".
"""

from __future__ import annotations

import errno
import os
import stat
from functools import partial

import pyfuse3
import trio

from vaultfs.errors import (
    LockBusyError,
    LookAgainError,
)
from vaultfs.identity import FileIdentity
from vaultfs.locks import is_lock_directory
from vaultfs.locks.below import lock_below
from vaultfs.mount.context import MountContext
from vaultfs.mount.inodes import Directory, Draft, Name
from vaultfs.mount.saves import Saves
from vaultfs.mount.tree import Tree

__all__ = ["Renames"]

LOCK_BELOW_PAUSE = 0.05  # seconds between looks for locks below a directory that is to be renamed


class Renames:
    """All renames of one mount."""

    def __init__(self, context: MountContext, saves: Saves, tree: Tree) -> None:
        self._context = context
        self._saves = saves
        self._tree = tree

    async def rename(
        self, old_parent: Directory, old: bytes, new_parent: Directory, new: bytes, flags: int, thread: int
    ) -> None:
        context = self._context
        if flags not in (0, pyfuse3.RENAME_NOREPLACE, pyfuse3.RENAME_EXCHANGE):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        old_path, new_path = old_parent.path_of(old), new_parent.path_of(new)
        for path in (old_path, new_path):
            self._tree.assert_name_is_free(path)
        context.assert_writable()
        source = old_parent.children.get(old)
        if isinstance(source, Name) and source.shown_draft is not None:
            await self._rename_file(old_parent, old, new_parent, new, flags, thread)
            return
        status = context.root.stat(old_path)
        if stat.S_ISREG(status.st_mode):
            await self._rename_file(old_parent, old, new_parent, new, flags, thread)
        elif stat.S_ISDIR(status.st_mode):
            await self._rename_directory(old_parent, old, new_parent, new, flags)
            if new.endswith(b".lock"):
                context.note_lock_made(new_path, self._saves.opener(thread))
        else:
            await self._rename_link(old_parent, old, new_parent, new, flags)

    def _names_for_rename(
        self, old_parent: Directory, old: bytes, new_parent: Directory, new: bytes, flags: int
    ) -> tuple[Name, Name]:
        """The two Names; what stands in the way of renaming a file raises the errno of rename(2)."""
        source = self._context.inodes.name_at(old_parent, old)
        there = new_parent.children.get(new)
        if isinstance(there, Name):
            return source, there
        new_path = new_parent.path_of(new)
        try:
            status = self._context.root.stat(new_path)
        except FileNotFoundError:
            return source, self._context.inodes.name_at(new_parent, new)
        if stat.S_ISDIR(status.st_mode) and not flags & pyfuse3.RENAME_EXCHANGE:
            number = errno.EEXIST if flags & pyfuse3.RENAME_NOREPLACE else errno.EISDIR
            raise OSError(number, os.strerror(number), new_path)
        if flags & pyfuse3.RENAME_EXCHANGE and not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "only two files or two directories can be exchanged", new_path)
        return source, self._context.inodes.name_at(new_parent, new)

    async def _rename_file(
        self, old_parent: Directory, old: bytes, new_parent: Directory, new: bytes, flags: int, thread: int
    ) -> None:
        context = self._context
        source, target = self._names_for_rename(old_parent, old, new_parent, new, flags)
        if source is target:
            return
        await self._publish_finished(source)
        move = partial(self._move_file, old_parent, old, new_parent, new, flags)
        if context.policy.is_protocol_file(old_parent.name, old):
            move()
        else:
            saver = self._saves.opener(thread)
            await context.while_locked(
                lambda: (old_parent.path_of(old), new_parent.path_of(new)), move, saver=saver, frees_space=True
            )

    def _move_file(self, old_parent: Directory, old: bytes, new_parent: Directory, new: bytes, flags: int) -> None:
        """The rename itself; both path locks are held."""
        source, target = self._names_for_rename(old_parent, old, new_parent, new, flags)
        old_path, new_path = source.path(), target.path()
        unpublished = source.shown_draft is not None
        target_shown = target.shown_draft is not None
        if flags & pyfuse3.RENAME_NOREPLACE and target_shown:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new_path)
        if flags & pyfuse3.RENAME_EXCHANGE and (target_shown or unpublished):
            raise OSError(errno.EINVAL, "a file that was never published cannot be exchanged", new_path)
        if unpublished:
            self._move_unpublished(source, target, old_path, new_path, flags)
        elif flags & pyfuse3.RENAME_EXCHANGE:
            self._exchange_files(source, target, old_path, new_path)
        else:
            self._move_published(source, target, old_path, new_path, flags)

    async def _publish_finished(self, name: Name) -> None:
        """A draft that is finished but not in yet is published before its name moves."""
        for draft in list(name.drafts):
            if draft.changed and draft.name is name and all(handle.let_go for handle in draft.handles):
                if not draft.handles and draft.refused is None:
                    continue  # promised to somebody who has not opened it yet
                await self._saves.publish(draft, path_call=True)
                self._saves.end_if_unused(draft)

    def _move_published(self, source: Name, target: Name, old_path: bytes, new_path: bytes, flags: int) -> None:
        context = self._context
        if target.version is not None:
            target.version.hold(context.root)
        context.root.rename(old_path, new_path, flags)
        drafts = self._leave(target, new_path)
        self._place(source, target.parent, target.name)
        self._take_over(source, drafts)
        self._refresh(source, new_path)
        self._retarget(source, new_path)

    def _move_unpublished(self, source: Name, target: Name, old_path: bytes, new_path: bytes, flags: int) -> None:
        """The draft of a name that was never published moves along; what it is renamed over stays in the vault,
        and stays visible under the name, until the draft is published.
        """
        context = self._context
        claim = source.claim
        occupied = context.root.exists(new_path)
        if occupied and flags & pyfuse3.RENAME_NOREPLACE:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new_path)
        if claim is not None:
            if occupied:
                context.root.unlink(old_path, missing_ok=True)
                context.drafts.unclaim(old_path)
                source.claim = None
            else:
                context.root.rename(old_path, new_path, pyfuse3.RENAME_NOREPLACE)
                context.drafts.unclaim(old_path)
                source.claim = FileIdentity.from_stat(context.root.stat(new_path))
                for draft in source.drafts:
                    context.drafts.claim(new_path, source.claim, self._saves.writer(draft.writer, draft.uid or 0))
        if not occupied:
            drafts = self._leave(target, new_path)
            self._place(source, target.parent, target.name)
            self._take_over(source, drafts)
            self._retarget(source, new_path)
            return
        began = target.version.identity if target.version is not None else None
        if target.version is None and target.live is None:
            began = context.inodes.current_version(target, context.root.stat(new_path)).identity
        for draft in list(source.drafts):
            source.drafts.discard(draft)
            draft.name = target
            if draft.kind == "new":
                draft.kind = "replacement"
                draft.began = began
            target.drafts.add(draft)
        source.edit = None
        source.linked = False
        source.detach()
        self._retarget(target, new_path)

    def _exchange_files(self, source: Name, target: Name, old_path: bytes, new_path: bytes) -> None:
        context = self._context
        for name in (source, target):
            if name.version is not None:
                name.version.hold(context.root)
        context.root.rename(old_path, new_path, pyfuse3.RENAME_EXCHANGE)
        source_parent, source_name = source.parent, source.name
        target_parent, target_name = target.parent, target.name
        source.detach()
        target.detach()
        self._place(source, target_parent, target_name)
        self._place(target, source_parent, source_name)
        for name, path in ((source, new_path), (target, old_path)):
            self._refresh(name, path)
            self._retarget(name, path)

    def _leave(self, target: Name, path: bytes) -> list[Draft]:
        """`target` loses its place to a file renamed over it; returns the drafts that stay with the place."""
        drafts = list(target.drafts)
        for draft in drafts:
            target.drafts.discard(draft)
        target.edit = None
        if target.claim is not None:
            self._context.drafts.unclaim(path)
        self._context.inodes.vanished(target)
        target.linked = False
        target.detach()
        return drafts

    @staticmethod
    def _place(name: Name, parent: Directory, last: bytes) -> None:
        name.detach()
        name.parent, name.name = parent, last
        parent.children[last] = name

    @staticmethod
    def _take_over(name: Name, drafts: list[Draft]) -> None:
        """Drafts of a file that was renamed over belong to the place: an edit conflicts, a replacement goes on."""
        for draft in drafts:
            draft.name = name
            name.drafts.add(draft)

    def _refresh(self, name: Name, path: bytes) -> None:
        """A rename changes the ctime and nothing else: take it over, so that it is not taken for an outside change."""
        status = self._context.root.stat(path)
        identity = FileIdentity.from_stat(status)
        version = name.version
        if version is not None:
            if version.identity.unchanged_but_renamed(identity):
                was = version.identity
                version.update(status)
                for draft in name.drafts:
                    if draft.began is not None and draft.began.same_object(was):
                        draft.began = version.identity
            elif stat.S_ISREG(status.st_mode):
                self._context.inodes.current_version(name, status)

    def _retarget(self, name: Name, path: bytes) -> None:
        for draft in name.drafts:
            if draft.file is not None:
                draft.file.retarget(path)

    async def _rename_link(
        self, old_parent: Directory, old: bytes, new_parent: Directory, new: bytes, flags: int
    ) -> None:
        context = self._context
        there = new_parent.children.get(new)
        target = there if isinstance(there, Name) else None
        new_path = new_parent.path_of(new)
        if target is not None:
            if target.shown_draft is not None and flags:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new_path)
            if target.version is not None:
                target.version.hold(context.root)
        await context.while_locked(
            lambda: (new_parent.path_of(new),),
            lambda: context.root.rename(old_parent.path_of(old), new_parent.path_of(new), flags),
        )
        if target is not None:
            self._tree.unname_drafts(target)
        context.inodes.drop(old_parent, old)
        context.inodes.drop(new_parent, new)

    async def _rename_directory(
        self, old_parent: Directory, old: bytes, new_parent: Directory, new: bytes, flags: int
    ) -> None:
        context = self._context
        move = partial(self._move_directory, old_parent, old, new_parent, new, flags)
        if context.policy.may_be_lock_directory(old) and is_lock_directory(context.root, old_parent.path_of(old)):
            with context.changing():
                move()
        else:
            deadline = trio.current_time() + context.options.lock_timeout
            while (held := lock_below(context.root, context.locks, old_parent.path_of(old))) is not None:
                if trio.current_time() > deadline:  # its owner could not find it again
                    raise LockBusyError(f"a lock below it is held: {held.evidence}", path=held.lock_path)
                await trio.sleep(LOCK_BELOW_PAUSE)
            await context.while_locked(lambda: (old_parent.path_of(old), new_parent.path_of(new)), move)

    def _move_directory(self, old_parent: Directory, old: bytes, new_parent: Directory, new: bytes, flags: int) -> None:
        context = self._context
        old_path, new_path = old_parent.path_of(old), new_parent.path_of(new)
        source, target = old_parent.children.get(old), new_parent.children.get(new)
        if isinstance(target, Name) and target.shown_draft is not None:
            number = errno.EEXIST if flags & pyfuse3.RENAME_NOREPLACE else errno.ENOTDIR
            raise OSError(number, os.strerror(number), new_path)
        if isinstance(target, Directory) and not flags and self._tree.has_unpublished(target):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), new_path)
        context.root.rename(old_path, new_path, flags)
        if flags & pyfuse3.RENAME_EXCHANGE:
            self._exchanged(old_parent, old, new_parent, new)
        else:
            context.inodes.drop(new_parent, new)
            old_parent.children.pop(old, None)
            if isinstance(source, Directory):
                source.parent, source.name = new_parent, new
                new_parent.children[new] = source
        for draft in context.inodes.drafts():
            if draft.file is not None and draft.name is not None:
                try:
                    draft.file.retarget(draft.name.path())
                except (LookAgainError, FileNotFoundError):
                    continue  # below a directory that is not reachable: its path cannot have changed by this rename

    @staticmethod
    def _exchanged(old_parent: Directory, old: bytes, new_parent: Directory, new: bytes) -> None:
        first, second = old_parent.children.pop(old, None), new_parent.children.pop(new, None)
        for child, parent, name in ((first, new_parent, new), (second, old_parent, old)):
            if child is not None:
                child.parent, child.name = parent, name
                parent.children[name] = child
