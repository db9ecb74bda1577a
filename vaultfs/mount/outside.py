"""Changes made in the vault behind the mount: what the kernel shall forget, and what watchers shall hear.

`vaultfs.mount.watch` says that something happened to a name; here the name is compared with what we know of it, because
our own publishes are heard of as well. Only what differs is passed on: to the kernel, which then asks again, and after
that to those who watch the mount.
"""

from __future__ import annotations

import os
import stat
from functools import partial

from vaultfs.errors import (
    LookAgainError,
    VaultError,
)
from vaultfs.identity import FileIdentity
from vaultfs.mount.context import MountContext
from vaultfs.mount.inodes import Directory, Inode, Link, LiveFile, Name, Version

__all__ = ["OutsideChanges"]


class OutsideChanges:
    """The judgement of all events of one mount."""

    def __init__(self, context: MountContext) -> None:
        self._context = context

    async def changed(self, number: int, name: bytes, deleted: bool) -> None:
        """Something happened to `name` in the vault directory with inode `number`: ourselves, or somebody else."""
        context = self._context
        try:
            directory = context.inodes.directory(number)
            path = directory.path_of(name) if name else b""
        except (LookAgainError, NotADirectoryError, FileNotFoundError):
            return  # forgotten or removed meanwhile: the kernel keeps nothing of it either
        if context.invalidator is None or context.policy.is_machinery(path):
            return
        if not name:
            if deleted:  # the directory itself went or moved: its watch tells nothing reliable any more
                directory.watched = False
            context.invalidator.inode(number, attr_only=True)
            return
        child = directory.children.get(name)
        try:
            status: os.stat_result | None = context.root.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            status = None
        except (OSError, VaultError):
            context.invalidator.entry(number, name)
            return
        known: Inode | None = None
        if isinstance(child, Name):
            known = child.live or child.version
            if status is None and child.shown_draft is not None:
                return
            if (
                child.claim is not None
                and status is not None
                and child.claim.same_object(FileIdentity.from_stat(status))
            ):
                return
            if isinstance(known, LiveFile):
                if status is not None and known.identity == (status.st_dev, status.st_ino):
                    return
            elif isinstance(known, Version):
                if status is not None and known.identity.unchanged(FileIdentity.from_stat(status)):
                    return
            elif status is None:
                known = None
        elif isinstance(child, Directory | Link):
            known = child
            if status is not None and child.identity == (status.st_dev, status.st_ino):
                context.invalidator.inode(child.number, attr_only=True)
                return
        if status is None and known is not None:
            announcer = context.announcer
            told = partial(announcer.deleted, path) if announcer is not None else None
            # Not for a directory: the kernel would take it for dead, and it may only have been moved.
            deleted_number = 0 if isinstance(known, Directory) else known.number
            context.invalidator.entry(number, name, deleted_number, then=told)
            context.inodes.drop(directory, name, gone=True)
        else:
            announcer = context.announcer
            then = None
            if announcer is not None and status is not None and not context.policy.may_be_lock_directory(name):
                then = partial(announcer.announce, path, stat.S_IMODE(status.st_mode))
            context.invalidator.entry(number, name, then=then)
        context.invalidator.inode(number, attr_only=True)

    async def lost_count(self) -> None:
        """Events were lost: tell the kernel to forget all names, and start watching anew."""
        context = self._context
        for inode in context.inodes:
            if isinstance(inode, Directory) and context.invalidator is not None:
                for name in list(inode.children):
                    context.invalidator.entry(inode.number, name)
                context.invalidator.inode(inode.number, attr_only=True)
