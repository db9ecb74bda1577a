"""Path locks and the fence with a real mount: others on it, many savers at once, one daemon after another."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.test_other_clients import count_together, needs_node
from tests.mount.harness import GUARD, MountedVault, eventually, hear, say
from vaultfs.errors import ExitCode
from vaultfs.locks import Fence
from vaultfs.root import VaultRoot
from vaultfs.state import StateDirectory

Factory = Callable[..., MountedVault]
HERE = Path(__file__).parent


@needs_node
@pytest.mark.parametrize(
    ("mounts", "rounds"), [(1, 40), pytest.param(5, 250, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_theirs_on_the_mount_and_ours_in_the_vault_count_exactly_and_leave_no_lock(
    vault_mount: Factory, mounts: int, rounds: int
) -> None:
    """In full: 10,000 critical sections, on several mounts, since none may grow old in these tests."""
    for _ in range(mounts):
        mount = vault_mount()
        mount.put_behind("counter", "0")
        count_together(mount.vault, mount.mnt, rounds)
        assert mount.read_behind("counter") == mount.read("counter") == str(8 * rounds).encode()
        assert mount.names_behind() == {"counter"}
        mount.umount()


@pytest.fixture(scope="session")
def npm_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    if (HERE / "node_modules/proper-lockfile").is_dir():
        return HERE / "node_modules"
    directory = tmp_path_factory.mktemp("npm")
    shutil.copy(HERE / "package.json", directory)
    done = subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=directory, capture_output=True, timeout=90)
    if done.returncode != 0:
        pytest.skip(f"npm install failed (no network?): {done.stderr.decode(errors='replace')[-200:]}")
    return directory / "node_modules"


@needs_node
def test_programs_that_use_proper_lockfile_on_the_mount_exclude_each_other(
    mounted: MountedVault, npm_modules: Path
) -> None:
    mounted.put_behind("f.json", "0")
    rounds = 15
    programs = [
        subprocess.Popen(
            ["node", str(HERE / "proper_lockfile.cjs"), str(npm_modules), str(mounted.mnt / "f.json"), str(rounds)]
        )
        for _ in range(3)
    ]
    try:
        assert [program.wait(GUARD) for program in programs] == [0] * 3
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert mounted.read_behind("f.json") == str(3 * rounds).encode()
    assert mounted.names_behind() == {"f.json"}


def test_fifty_processes_that_save_one_file_all_get_through_while_another_directory_can_be_listed(
    mounted: MountedVault,
) -> None:
    def save(path: str, number: int) -> int:
        import os

        say("ready")
        hear()
        for _ in range(4):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.write(fd, f"{number}\n".encode() * 100)
            os.close(fd)
        return number

    mounted.put_behind("f.txt", "old")
    mounted.put_behind("elsewhere/note.md", "text")
    savers = [mounted.spawn(save, mounted.mnt / "f.txt", number) for number in range(50)]
    for saver in savers:
        saver.hear()
    for saver in savers:
        saver.say()
    listings = 0
    while any(saver.running for saver in savers):
        assert os.listdir(mounted.mnt / "elsewhere") == ["note.md"]
        listings += 1
    assert [saver.result() for saver in savers] == list(range(50))
    assert listings > 5, "while they saved, another directory could be listed"
    content = mounted.read_behind("f.txt")
    assert content in [f"{number}\n".encode() * 100 for number in range(50)]
    assert mounted.names_behind() == {"f.txt", "elsewhere"}
    mounted.expect_kept(None)  # whole saves that overlapped: what one displaced unseen is kept


# ------------------------------------------------------------------------------------------------- one after another


def second_mount(first: MountedVault, name: str = "second") -> tuple[Path, subprocess.CompletedProcess[bytes]]:
    """`vaultfs mount` of the same vault at another mountpoint."""
    mountpoint = first.base / name
    mountpoint.mkdir()
    os.chown(mountpoint, first.uid, -1)
    log = first.base / f"{name}.log"
    argv = [first.python(), "-m", "vaultfs", "mount", str(first.vault), str(mountpoint), "-o", f"log-file={log}"]
    return mountpoint, first.run(argv, check=False)


def end(first: MountedVault, mountpoint: Path) -> None:
    first.cli("umount", str(mountpoint))


def test_the_second_mount_of_a_vault_is_refused_and_names_the_first(mounted: MountedVault) -> None:
    mountpoint, done = second_mount(mounted)
    assert done.returncode == ExitCode.BUSY
    words = done.stderr.decode()
    assert str(mounted.pid) in words and "hint:" in words
    assert not os.path.ismount(mountpoint)
    mounted.shell("echo still > f.txt")
    assert mounted.read_behind("f.txt") == b"still\n"


def test_after_kill_9_the_next_mount_takes_over_at_once(mounted: MountedVault) -> None:
    mounted.shell("echo one > f.txt")
    os.kill(mounted.pid, signal.SIGKILL)
    eventually(lambda: not _lives(mounted.pid), "the daemon is gone")
    mounted.mark_ended()
    mountpoint, done = second_mount(mounted)
    assert done.returncode == 0, done.stderr.decode()
    try:
        (mountpoint / "f.txt").write_text("two\n")
        assert mounted.read_behind("f.txt") == b"two\n"
        assert os.path.exists(mounted.vault / ".vaultfs/fence")
    finally:
        end(mounted, mountpoint)
        subprocess.run(["fusermount3", "-uz", str(mounted.mnt)], check=False, capture_output=True)


def test_a_daemon_that_was_frozen_past_its_lease_goes_on_if_nobody_took_over(mounted: MountedVault) -> None:
    """Its lease is made to have run out: the record is aged while it stands still."""
    os.kill(mounted.pid, signal.SIGSTOP)
    try:
        fence = mounted.behind / ".vaultfs/fence"
        record = json.loads(fence.read_bytes())
        with open(fence, "r+b") as file:
            aged = {
                **record,
                "lease_expires_at": "2020-01-01T00:01:00.000Z",
                "heartbeat_at": "2020-01-01T00:00:00.000Z",
            }
            file.write(json.dumps(aged, separators=(",", ":")).encode().ljust(1023) + b"\n")
        _, done = second_mount(mounted)
        assert done.returncode == ExitCode.BUSY, "frozen is alive: it is not taken over"
    finally:
        os.kill(mounted.pid, signal.SIGCONT)
    mounted.shell("echo on > f.txt")
    assert mounted.read_behind("f.txt") == b"on\n"


def test_a_daemon_that_was_frozen_and_taken_over_writes_nothing_more(mounted: MountedVault) -> None:
    """Its lease is made a short one, so that nobody has to wait for a minute; the newcomer is a fence alone."""

    def save(path: str) -> int:
        import os

        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(fd, b"never published")
        say("written")
        hear()
        try:
            os.close(fd)
        except OSError as error:
            return error.errno or -1
        return 0

    mounted.put_behind("f.txt", "old")
    saver = mounted.spawn(save, mounted.mnt / "f.txt")
    saver.hear()
    os.kill(mounted.pid, signal.SIGSTOP)
    try:
        file = mounted.behind / ".vaultfs/fence"
        short = {"heartbeat_at": "2020-01-01T00:00:00.000Z", "lease_expires_at": "2020-01-01T00:00:00.300Z"}
        record = {**json.loads(file.read_bytes()), **short}
        with open(file, "r+b") as writing:
            writing.write(json.dumps(record, separators=(",", ":")).encode().ljust(1023) + b"\n")
        with VaultRoot.open(mounted.vault) as root, StateDirectory.open(root) as state:
            successor = Fence.acquire(root, state, wait=5.0)
            os.kill(mounted.pid, signal.SIGCONT)
            assert saver.ask("go").startswith("\x01" + str(errno.EROFS))
            assert mounted.read_behind("f.txt") == b"old"
            with pytest.raises(OSError) as refused:
                (mounted.mnt / "g.txt").write_text("neither")
            assert refused.value.errno == errno.EROFS
            assert mounted.names_behind() == {"f.txt"}
            successor.assert_owned()
            staged = [path for path in (mounted.behind / ".vaultfs").rglob("*") if path.is_file()]
            assert any(path.read_bytes() == b"never published" for path in staged), "what was written is still there"
            successor.release()
    finally:
        os.kill(mounted.pid, signal.SIGCONT)
    mounted.expect_kept(None)
    mounted.expect_log(r"takes no more writes|took this vault over", r"retry_refused failed|Traceback")
    saver.close()
    mounted.cli("umount", str(mounted.mnt))
    assert mounted._process is not None and mounted._process.wait(GUARD) == ExitCode.BUSY, "it says that it lost"
    mounted.mark_ended()
    mountpoint, done = second_mount(mounted)  # finds what the one that lost has left, and keeps it
    assert done.returncode == 0, done.stderr.decode()
    try:
        kept = json.loads(mounted.cli("drafts", str(mountpoint), "--json").stdout)["drafts"]
        assert [draft["path"] for draft in kept] == ["f.txt"]
        assert mounted.kept_content(kept[0]) == b"never published"
        assert (mountpoint / "f.txt").read_bytes() == b"old"
    finally:
        end(mounted, mountpoint)


def _lives(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
