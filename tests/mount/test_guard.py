"""An exception in one request is EIO for that request and a traceback in the log; the mount lives on.

Contract, promise 10. `faulty_daemon.py` plants the exceptions.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mount.faulty_daemon import KINDS
from tests.mount.harness import MountedVault, eventually

AT_FDCWD = -100
AT_STATX_FORCE_SYNC = 0x2000


def _ask_attributes(path: Path) -> None:
    """A stat that the kernel may not answer from its cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(256)
    if libc.statx(AT_FDCWD, os.fsencode(path), AT_STATX_FORCE_SYNC, 0x7FF, buffer) != 0:
        raise OSError(ctypes.get_errno(), "statx")


def _open_and(path: Path, flags: int, call: Callable[[int], Any]) -> None:
    fd = os.open(path, flags)
    try:
        call(fd)
    finally:
        os.close(fd)


def _save(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(b"saved")


# handler → what a program does to meet it, given a directory with a file f, an empty directory e, and a link l.
# None: nobody is told of a failure there.
PROVOKE: dict[str, Callable[[Path], Any]] = {
    "lookup": lambda d: os.stat(d / "never-looked-up"),
    "getattr": lambda d: _ask_attributes(d / "f"),
    "setattr": lambda d: os.chmod(d / "f", 0o640),
    "mkdir": lambda d: os.mkdir(d / "new"),
    "rmdir": lambda d: os.rmdir(d / "e"),
    "unlink": lambda d: os.unlink(d / "f"),
    "rename": lambda d: os.rename(d / "f", d / "g"),
    "symlink": lambda d: os.symlink("f", d / "s"),
    "readlink": lambda d: os.readlink(d / "l"),
    "link": lambda d: os.link(d / "f", d / "h"),
    "mknod": lambda d: os.mknod(d / "n", stat.S_IFREG | 0o644),
    "open": lambda d: os.close(os.open(d / "f", os.O_RDONLY)),
    "create": lambda d: os.close(os.open(d / "c", os.O_WRONLY | os.O_CREAT, 0o644)),
    "read": lambda d: (d / "f").read_bytes(),
    "write": lambda d: _open_and(d / "f", os.O_WRONLY, lambda fd: os.write(fd, b"written")),
    "flush": lambda d: _save(d / "f"),
    "release": lambda d: (d / "f").read_bytes(),
    "fsync": lambda d: _open_and(d / "f", os.O_WRONLY, lambda fd: (os.write(fd, b"x"), os.fsync(fd))),
    "opendir": lambda d: os.listdir(d / "e"),
    "readdir": lambda d: os.listdir(d / "e"),
    "releasedir": lambda d: os.listdir(d / "e"),
    "fsyncdir": lambda d: _open_and(d / "e", os.O_RDONLY | os.O_DIRECTORY, os.fsync),
    "statfs": lambda d: os.statvfs(d),
    "setxattr": lambda d: os.setxattr(d / "f", "user.x", b"y"),
    "getxattr": lambda d: os.getxattr(d / "f", "user.y"),
    "listxattr": lambda d: os.listxattr(d / "f"),
    "removexattr": lambda d: os.removexattr(d / "f", "user.y"),
}
UNHEARD = {"release", "releasedir"}  # their answers reach no program


class Faulty:
    """A mount whose handlers can be made to fail."""

    def __init__(self, vault_mount: Any, directories: list[str]) -> None:
        launcher = Path(__file__).with_name("faulty_daemon.py")
        files: dict[str, bytes | str] = {f"{name}/f": "content" for name in directories}
        self.mount: MountedVault = vault_mount(daemon=[sys.executable, str(launcher)], files=files)
        self._plant = self.mount.home / "plant"
        for name in directories:
            os.setxattr(self.mount.behind / name / "f", "user.y", b"z")
            (self.mount.behind / name / "e").mkdir()
            (self.mount.behind / name / "l").symlink_to("f")
            # The mount is made to know the entries, so that the provoked call fails in its own handler only.
            os.listdir(self.mount.mnt / name)
            os.stat(self.mount.mnt / name / "f")
        self.mount.expect_log("planted in", "Traceback", " failed")
        self.mount.expect_kept(None)

    def provoke(self, handler: str, kind: str, directory: str) -> int:
        """The errno that a program gets when it meets `handler` with a fault in it."""
        before = self.logged(handler)
        self._plant.write_text(f"{handler} {kind}")
        try:
            PROVOKE[handler](self.mount.mnt / directory)
        except OSError as error:
            return error.errno or -1
        finally:
            if handler in UNHEARD:  # these requests are made after the program has gone on
                eventually(lambda: self.logged(handler) > before, f"{handler} is met")
            self._plant.write_text("")
        return 0

    def logged(self, handler: str) -> int:
        """How many tracebacks of a planted fault in `handler` the daemon's log holds."""
        return len(
            re.findall(
                rf"Traceback \(most recent call last\):(?:\n .*)+\n\w+: .*planted in {handler}\b",
                self.mount.log.read_text(),
            )
        )


def test_every_handler_has_its_trial() -> None:
    from vaultfs.mount.operations import HANDLERS

    assert set(HANDLERS) <= set(PROVOKE), "a new handler needs a line in PROVOKE"


def test_an_exception_in_any_handler_is_an_error_of_that_request_only(vault_mount: Any) -> None:
    from vaultfs.mount.operations import HANDLERS

    faulty = Faulty(vault_mount, list(HANDLERS))
    problems = []
    for handler in HANDLERS:
        got = faulty.provoke(handler, "value", handler)
        if handler not in UNHEARD and got != errno.EIO:
            problems.append(f"{handler}: {errno.errorcode.get(got, got)} instead of EIO")
        if not faulty.logged(handler):
            problems.append(f"{handler}: no traceback in the log")
        # The mount lives on, and so does this directory.
        directory = faulty.mount.mnt / handler
        (directory / "after").write_text(f"after {handler}")
        if (directory / "after").read_text() != f"after {handler}" or "after" not in os.listdir(directory):
            problems.append(f"{handler}: does not work any more")
    assert problems == []
    # A close that failed in the daemon had not saved; the last release did.
    assert faulty.mount.read_behind("flush/f") == b"saved"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "value"])
def test_any_kind_of_exception_is_caught(vault_mount: Any, kind: str) -> None:
    faulty = Faulty(vault_mount, ["d"])
    assert faulty.provoke("getattr", kind, "d") == errno.EIO
    assert "planted in getattr" in faulty.mount.log_text()
    assert (faulty.mount.mnt / "d" / "f").read_text() == "content"


def test_a_fault_in_the_last_close_is_met_by_everyone_at_once_and_nobody_is_stuck(vault_mount: Any) -> None:
    """Faults in a row, in several programs at a time, leave a mount that still serves."""
    faulty = Faulty(vault_mount, ["d"])
    for _ in range(20):
        for handler in ("lookup", "open", "write", "flush", "readdir"):
            assert faulty.provoke(handler, "value", "d") == errno.EIO
    assert (faulty.mount.mnt / "d" / "f").read_text() in ("content", "saved")
    (faulty.mount.mnt / "d" / "f").write_text("after all")
    assert faulty.mount.read_behind("d/f") == b"after all"
