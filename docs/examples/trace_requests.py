"""Serve a vault in the foreground and print each request of the kernel with what it was answered.

    python docs/examples/trace_requests.py VAULT MOUNTPOINT [-o OPTIONS]

A tool for developers, see docs/development.md. The traces in docs/how-it-works.md were made with it.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyfuse3

from vaultfs.cli.main import main
from vaultfs.mount.operations import HANDLERS, Operations

OPEN_FLAGS = ("O_WRONLY", "O_RDWR", "O_TRUNC", "O_APPEND", "O_CREAT", "O_EXCL")
BY_INODE = ("open", "getattr", "setattr", "getxattr", "setxattr", "opendir")
BY_HANDLE = ("read", "write", "flush", "release", "fsync")


def caller(arguments: tuple[Any, ...]) -> str:
    context = next((one for one in arguments if isinstance(one, pyfuse3.RequestContext)), None)
    if context is None:
        return ""
    try:
        return Path(f"/proc/{context.pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "?"  # it ended meanwhile


def inode(operations: Operations, number: int) -> str:
    return next((repr(one) for one in operations._inodes if one.number == number), str(number))


def told(operations: Operations, name: str, arguments: tuple[Any, ...]) -> str:
    words = []
    for position, argument in enumerate(arguments):
        if position == 0 and name in BY_INODE:
            words.append(inode(operations, argument))
        elif position == 0 and name in BY_HANDLE:
            handle = operations._files._handles.get(argument)
            words.append(repr(handle.inode) if handle is not None else str(argument))
        elif position == 1 and name == "open":
            words.append("|".join(flag for flag in OPEN_FLAGS if argument & getattr(os, flag)) or "O_RDONLY")
        elif isinstance(argument, bytes):
            words.append(repr(argument) if len(argument) <= 40 else f"({len(argument)} bytes)")
        elif isinstance(argument, int):
            words.append(str(argument))
        elif isinstance(argument, pyfuse3.SetattrFields):
            words += [field for field in dir(argument) if field.startswith("update_") and getattr(argument, field)]
    return " ".join(words)


def answered(operations: Operations, result: Any) -> str:
    entry = result[1] if isinstance(result, tuple) else result
    if isinstance(entry, pyfuse3.EntryAttributes):
        return f"{inode(operations, entry.st_ino)} size={entry.st_size} kept {entry.entry_timeout:g} s"
    if isinstance(result, bytes):
        return f"{len(result)} bytes"
    return str(result) if isinstance(result, int) else "ok"


def traced(name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)  # which also keeps the mark of the guard: see vaultfs.mount.operations
    async def trace(self: Operations, *arguments: Any, **keywords: Any) -> Any:
        line = f"{time.monotonic():.3f} {caller(arguments):12} {name.upper():10} {told(self, name, arguments)} -> "
        try:
            result = await handler(self, *arguments, **keywords)
        except pyfuse3.FUSEError as error:
            print(line + errno.errorcode.get(error.errno, str(error.errno)), flush=True)
            raise
        print(line + answered(self, result), flush=True)
        return result

    return trace


if __name__ == "__main__":
    for one in HANDLERS:
        setattr(Operations, one, traced(one, getattr(Operations, one)))
    sys.exit(main(["mount", "-f", *sys.argv[1:]]))
