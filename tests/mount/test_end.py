"""The daemon is told to end while files are open: what is complete is published, what is not is kept (promise 4)."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.mount.harness import MountedVault, eventually, hear, say


def _write_half(path: str, flags: int) -> str:
    import os

    descriptor = os.open(path, flags, 0o644)
    os.write(descriptor, b"half of the new text")
    say("half")
    hear()
    try:
        os.close(descriptor)
    except OSError:
        return "told"
    return "not told"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_TRUNC, os.O_RDWR], ids=["replacement", "edit"])
def test_a_daemon_that_is_told_to_end_keeps_what_is_half_written(vault_mount: Any, number: int, flags: int) -> None:
    mounted: MountedVault = vault_mount(files={"f.txt": "old, and whole"})
    mounted.expect_kept(None)
    writer = mounted.spawn(_write_half, mounted.mnt / "f.txt", flags)
    writer.hear()
    mounted.shell('echo done > "$1"', mounted.mnt / "g.txt")
    os.kill(mounted.pid, number)
    _, status = os.waitpid(mounted.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    writer.say()
    assert writer.result() == "told"
    assert mounted.read_behind("f.txt") == b"old, and whole"
    assert mounted.read_behind("g.txt") == b"done\n"
    mounted.mark_ended()
    eventually(lambda: not os.path.ismount(mounted.mnt), "the mount is gone")
    listed = json.loads(mounted.cli("drafts", str(mounted.behind), "--json").stdout)["drafts"]
    [kept] = [one for one in listed if one["path"] == "f.txt"]
    target = mounted.home / "saved"
    mounted.cli("drafts", "save-as", kept["id"], str(target), "--vault", str(mounted.behind))
    assert target.read_bytes().startswith(b"half of the new text")
