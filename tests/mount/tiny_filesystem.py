"""A file system of one directory with a few files, to learn from a real kernel what the mount will see of it.

Run: tiny_filesystem.py MOUNTPOINT. Prints a line per request: the operation, then what matters of it; first READY and
the pid of its companion, which it has with ANNOUNCE=1 (environment; SLEEPY_COMPANION=1: stopped as it starts). With
HOLD=1 the lookup of ``slow`` and every flush are answered after the command ``go``.

Commands on standard input, one a line: ``announce NAME``; ``invalidate NAME`` or ``delete NAME`` (through an
Invalidator; a deleted one is then announced as well); ``bury NAME`` (announced as deleted, whether it is or not);
``go``.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from functools import partial
from typing import Any

import pyfuse3
import trio

from vaultfs.mount.announce import Announcer
from vaultfs.mount.watch import Invalidator

MOUNTPOINT = sys.argv[1]
go = trio.Event()
KNOWS_SECRET = os.environ.get("KNOWS_SECRET", "1") == "1"
INODES = {b"a": 2, b"b": 3, b"slow": 4}
GHOST = 1 << 40
announcer: Announcer | None = None


def say(*words: object) -> None:
    print(*words, flush=True)


class Tiny(pyfuse3.Operations):
    def _entry(self, inode: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = stat.S_IFDIR | 0o755 if inode == 1 else stat.S_IFREG | 0o644
        entry.st_nlink = 1
        entry.st_uid, entry.st_gid = os.getuid(), os.getgid()
        entry.entry_timeout = entry.attr_timeout = 300
        return entry

    async def lookup(self, parent: int, name: bytes, ctx: Any) -> pyfuse3.EntryAttributes:
        say("LOOKUP", name.decode(), ctx.pid)
        if name == b"slow":
            await go.wait()
        if name in INODES:
            return self._entry(INODES[name])
        if announcer is not None and ctx.pid == announcer.thread_id and KNOWS_SECRET:
            if name == announcer.secret_name:
                raise pyfuse3.FUSEError(errno.ECANCELED)
            ghost = self._entry(GHOST)
            ghost.entry_timeout = 0
            return ghost
        raise pyfuse3.FUSEError(errno.ENOENT)

    async def unlink(self, parent: int, name: bytes, ctx: Any) -> None:
        say("UNLINK", name.decode(), ctx.pid)
        if name in INODES:
            raise pyfuse3.FUSEError(errno.EBUSY)

    async def getattr(self, inode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        return self._entry(inode)

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: Any, ctx: Any) -> pyfuse3.EntryAttributes:
        say("SETATTR", inode, ctx.pid, oct(stat.S_IMODE(attr.st_mode)))
        return self._entry(inode)

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode)

    async def flush(self, fh: int) -> None:
        say("FLUSH")
        await go.wait()

    async def opendir(self, inode: int, ctx: Any) -> int:
        return inode

    async def readdir(self, fh: int, start: int, token: Any) -> None:
        return None

    def forget(self, inode_list: Any) -> None:
        return None


def after_deletion(announcer: Announcer | None, name: bytes) -> None:
    say("INVALIDATED")
    if announcer is not None:
        announcer.deleted(name)


async def serve(announcer: Announcer | None) -> None:
    invalidator = Invalidator()
    invalidator.start()

    async def obey() -> None:
        buffer = b""
        os.set_blocking(0, False)
        while True:
            await trio.lowlevel.wait_readable(0)
            data = os.read(0, 4096)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                verb, _, name = line.partition(b" ")
                if verb == b"announce" and announcer is not None:
                    announcer.announce(name, 0o644)
                elif verb == b"go":
                    go.set()
                elif verb == b"invalidate":
                    invalidator.entry(1, name, then=lambda: say("INVALIDATED"))
                    say("INVALIDATING")
                elif verb == b"delete":
                    invalidator.entry(1, name, INODES.pop(name), then=partial(after_deletion, announcer, name))
                elif verb == b"bury" and announcer is not None:
                    announcer.deleted(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(obey)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()
    if announcer is not None:
        announcer.stop()
    invalidator.stop()


if not os.environ.get("HOLD"):
    go.set()
options = set(pyfuse3.default_options) | {"fsname=tiny", "default_permissions"}
if os.geteuid() == 0:
    options.add("allow_other")
pyfuse3.init(Tiny(), MOUNTPOINT, options)
try:
    if os.environ.get("ANNOUNCE"):
        with open("/proc/self/mountinfo") as table:
            device = next(line.split()[2] for line in table if line.split()[4] == MOUNTPOINT)
        announcer = Announcer(os.fsencode(MOUNTPOINT), os.makedev(*map(int, device.split(":"))), shared=False)
        announcer.start()
        if os.environ.get("SLEEPY_COMPANION"):
            os.kill(announcer.thread_id, signal.SIGSTOP)
    say("READY", announcer.thread_id if announcer else 0)
    trio.run(serve, announcer)
finally:
    pyfuse3.close(unmount=True)
