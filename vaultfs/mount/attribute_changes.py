"""chmod, chown, utimens and truncate: attributes that are set (SETATTR).

Set by path, they apply to the version and to all drafts of its name. Set on a draft (by descriptor) they are published
with it, and if it has nothing to publish they apply to the version at once. A length is content: setting it by path is
a save of its own, setting it by descriptor a write to the draft.
"""

from __future__ import annotations

import errno
import os
import stat

import pyfuse3

from vaultfs.errors import (
    HardLinkedError,
    LookAgainError,
)
from vaultfs.mount.attributes import assert_one_name, open_live, open_same_directory, path_descriptor
from vaultfs.mount.context import MountContext
from vaultfs.mount.files import Files
from vaultfs.mount.inodes import Directory, Draft, Inode, Link, LiveFile, Version
from vaultfs.mount.saves import Saves
from vaultfs.mount.tree import Tree

__all__ = ["AttributeChanges"]


class AttributeChanges:
    """All changes of attributes of one mount."""

    def __init__(self, context: MountContext, saves: Saves, tree: Tree, files: Files) -> None:
        self._context = context
        self._saves = saves
        self._tree = tree
        self._files = files

    async def set_attributes(
        self,
        inode: Inode,
        wanted: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        number: int | None,
        thread: int,
    ) -> pyfuse3.EntryAttributes:
        context = self._context
        if context.options.ro:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        context.assert_writable()
        if fields.update_size:
            await self._set_size(inode, wanted.st_size, number, thread)
        if fields.update_mode or fields.update_uid or fields.update_gid or fields.update_atime or fields.update_mtime:
            try:
                self._set_metadata(inode, wanted, fields)
            except LookAgainError:
                raise self._files.look_again(thread, inode, writing=False) from None
            self._files.arrived(thread)
        return self._tree.attributes(inode)

    async def _set_size(self, inode: Inode, size: int, number: int | None, thread: int) -> None:
        handle = self._files.handle(number)
        if isinstance(inode, Version):
            self._files.assert_may_write(inode, thread)
            raise self._files.look_again(thread, inode, writing=True)
        if isinstance(inode, LiveFile):
            if handle is not None and handle.descriptor is not None:
                os.ftruncate(handle.descriptor, size)
                return
            descriptor, status = self._context.root.open_with_stat(inode.name.path(), os.O_WRONLY)
            try:
                if inode.identity != (status.st_dev, status.st_ino):
                    raise LookAgainError("the file was replaced")
                if status.st_nlink > 1:
                    raise HardLinkedError(path=inode.name.path())
                os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)
            return
        if not isinstance(inode, Draft):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if handle is None:
            await self._truncate_by_path(inode, size, thread)
        else:
            await self._saves.truncate(inode, size)

    async def _truncate_by_path(self, draft: Draft, size: int, thread: int) -> None:
        """truncate(path) is a save of its own: one publish, before it returns."""
        if draft.kind == "edit" and not draft.handles and not draft.changed and draft.file is None:
            self._files.start_afresh(draft)
        draft.promises += 1  # nobody may end it between our steps
        try:
            self._files.arrived(thread)
            await self._saves.truncate(draft, size)
            if draft.kind != "new" or not draft.handles:
                await self._saves.publish(draft, path_call=True)
        finally:
            draft.promises -= 1
            self._saves.end_if_unused(draft)

    def _set_metadata(self, inode: Inode, wanted: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields) -> None:
        if isinstance(inode, Draft):
            name = inode.name
            if inode.changed or name is None or name.version is None or inode.file is not None:
                self._set_on_draft(inode, wanted, fields)
                return
            inode = name.version  # nothing to publish: it applies at once, as on any file system
        if isinstance(inode, Version):
            with path_descriptor(self._context.root, inode) as descriptor:
                assert_one_name(descriptor, inode.name)
                self._apply(f"/proc/self/fd/{descriptor}", wanted, fields)
                inode.update(os.fstat(descriptor))
            for draft in list(inode.name.drafts):
                self._set_on_draft(draft, wanted, fields)
                if draft.base is inode:
                    draft.began = inode.identity
            return
        if isinstance(inode, LiveFile):
            descriptor = open_live(self._context.root, inode)
        elif isinstance(inode, Directory):
            descriptor = open_same_directory(self._context.root, inode)
        else:
            assert isinstance(inode, Link)
            self._set_on_link(inode, wanted, fields)
            return
        try:
            self._apply(f"/proc/self/fd/{descriptor}", wanted, fields)
        finally:
            os.close(descriptor)

    @staticmethod
    def _apply(path: str, wanted: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields) -> None:
        """chown before chmod: a change of owner clears the setuid bits that the mode may ask for."""
        if fields.update_uid or fields.update_gid:
            os.chown(path, wanted.st_uid if fields.update_uid else -1, wanted.st_gid if fields.update_gid else -1)
        if fields.update_mode:
            os.chmod(path, stat.S_IMODE(wanted.st_mode))
        if fields.update_atime or fields.update_mtime:
            now = os.stat(path)
            os.utime(
                path,
                ns=(
                    wanted.st_atime_ns if fields.update_atime else now.st_atime_ns,
                    wanted.st_mtime_ns if fields.update_mtime else now.st_mtime_ns,
                ),
            )

    def _set_on_draft(self, draft: Draft, wanted: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields) -> None:
        """Owner and mode are remembered and given at the publish; times go onto the staging file at once."""
        draft.touched = True
        if fields.update_mode:
            draft.mode = stat.S_IMODE(wanted.st_mode)
        if fields.update_uid:
            draft.uid = wanted.st_uid
        if fields.update_gid:
            draft.gid = wanted.st_gid
        if (fields.update_atime or fields.update_mtime) and draft.file is not None:
            now = os.fstat(draft.file.fd)
            os.utime(
                draft.file.fd,
                ns=(
                    wanted.st_atime_ns if fields.update_atime else now.st_atime_ns,
                    wanted.st_mtime_ns if fields.update_mtime else now.st_mtime_ns,
                ),
            )
            draft.times_set = True

    def _set_on_link(self, link: Link, wanted: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields) -> None:
        with self._context.root.parent(link.path()) as (directory, last):
            if fields.update_uid or fields.update_gid:
                os.chown(
                    last,
                    wanted.st_uid if fields.update_uid else -1,
                    wanted.st_gid if fields.update_gid else -1,
                    dir_fd=directory,
                    follow_symlinks=False,
                )
            if fields.update_mode:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            if fields.update_atime or fields.update_mtime:
                now = os.stat(last, dir_fd=directory, follow_symlinks=False)
                os.utime(
                    last,
                    ns=(
                        wanted.st_atime_ns if fields.update_atime else now.st_atime_ns,
                        wanted.st_mtime_ns if fields.update_mtime else now.st_mtime_ns,
                    ),
                    dir_fd=directory,
                    follow_symlinks=False,
                )
