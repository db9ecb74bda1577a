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


def _write_until_told(path: str) -> int:
    import os

    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    say("writing")
    try:
        while True:
            os.write(descriptor, b"x" * 1000)
    except OSError as error:
        return error.errno or -1  # and the descriptor is closed by ending, as in any program


def test_a_writer_that_ends_because_the_mount_did_has_not_saved(vault_mount: Any) -> None:
    mounted: MountedVault = vault_mount(files={f"f{number}.txt": "old, and whole" for number in range(6)})
    mounted.expect_kept(None)
    writers = [mounted.spawn(_write_until_told, mounted.mnt / f"f{number}.txt") for number in range(6)]
    for writer in writers:
        writer.hear()
    os.kill(mounted.pid, signal.SIGTERM)
    _, status = os.waitpid(mounted.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert all(writer.result() != 0 for writer in writers)
    mounted.mark_ended()
    assert [mounted.read_behind(f"f{number}.txt") for number in range(6)] == [b"old, and whole"] * 6
    listed = json.loads(mounted.cli("drafts", str(mounted.behind), "--json").stdout)["drafts"]
    assert {one["path"] for one in listed} == {f"f{number}.txt" for number in range(6)}
