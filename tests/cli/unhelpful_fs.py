"""A file system that knows rename but none of its flags, for the test of what `vaultfs mount` says to such a one.

``python unhelpful_fs.py MOUNTPOINT`` serves an empty directory tree in memory until it is unmounted; it prints
``ready`` when it serves. renameat2 with any flag is EINVAL, as on old network file systems.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from typing import Any

import pyfuse3
import trio


class Tree(pyfuse3.Operations):
    """Directories and empty files; just enough for mkdir, create, rename, rmdir, unlink and listings."""

    def __init__(self) -> None:
        super().__init__()
        self.children: dict[int, dict[bytes, int]] = {pyfuse3.ROOT_INODE: {}}  # of directories only
        self.next = pyfuse3.ROOT_INODE + 1

    async def getattr(self, inode: int, ctx: Any = None) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = (stat.S_IFDIR | 0o755) if inode in self.children else (stat.S_IFREG | 0o644)
        entry.st_uid, entry.st_gid = os.getuid(), os.getgid()
        return entry

    async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> pyfuse3.EntryAttributes:
        if name not in self.children[parent]:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(self.children[parent][name])

    def _make(self, parent: int, name: bytes) -> int:
        if name in self.children[parent]:
            raise pyfuse3.FUSEError(errno.EEXIST)
        self.next += 1
        self.children[parent][name] = self.next
        return self.next

    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        inode = self._make(parent, name)
        self.children[inode] = {}
        return await self.getattr(inode)

    async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
        inode = self._make(parent, name)
        return pyfuse3.FileInfo(fh=inode), await self.getattr(inode)

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode)

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: Any, ctx: Any) -> pyfuse3.EntryAttributes:
        return await self.getattr(inode)

    async def rename(self, parent: int, name: bytes, new_parent: int, new: bytes, flags: int, ctx: Any) -> None:
        if flags:
            raise pyfuse3.FUSEError(errno.EINVAL)
        self.children[new_parent][new] = self.children[parent].pop(name)

    async def unlink(self, parent: int, name: bytes, ctx: Any) -> None:
        del self.children[parent][name]

    async def rmdir(self, parent: int, name: bytes, ctx: Any) -> None:
        del self.children[parent][name]

    async def opendir(self, inode: int, ctx: Any) -> int:
        return inode

    async def readdir(self, fh: int, start: int, token: Any) -> None:
        for number, (name, inode) in enumerate(list(self.children[fh].items())[start:], start + 1):
            if not pyfuse3.readdir_reply(token, name, await self.getattr(inode), number):
                return

    async def access(self, inode: int, mode: int, ctx: Any) -> bool:
        return True

    async def statfs(self, ctx: Any) -> pyfuse3.StatvfsData:
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = 4096
        data.f_blocks = data.f_bfree = data.f_bavail = data.f_files = data.f_ffree = data.f_favail = 1 << 20
        data.f_namemax = 255
        return data


def main() -> None:
    pyfuse3.init(Tree(), sys.argv[1], {"fsname=unhelpful", "default_permissions"})
    print("ready", flush=True)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close()


if __name__ == "__main__":
    main()
