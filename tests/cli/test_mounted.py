"""The command line with real mounts: mount, umount, status, drafts, and what they say to bad input.

Everything is run as a newcomer would run it: as a program, looking at its exit code and at what it prints. Numbers in
docstrings are those of the collection of field reports.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import (
    GUARD,
    TEST_UID,
    MountedVault,
    describe,
    drop_lock,
    eventually,
    in_mountinfo,
    is_served,
    make_lock,
    processes_with,
)
from vaultfs.errors import ExitCode

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
Factory = Callable[..., MountedVault]


@pytest.fixture
def unmounted() -> Iterator[MountedVault]:
    """A vault and a mountpoint, nothing mounted; the test mounts by the command line. Nothing may be left."""
    mount = MountedVault(background=True)
    try:
        yield mount
        if is_served(mount.mnt):
            mount.cli("umount", str(mount.mnt))
        assert in_mountinfo(mount.mnt) is None
        eventually(
            lambda: not processes_with(mount.token),
            f"no process is left: {[describe(pid) for pid in processes_with(mount.token)]}",
        )
    finally:
        mount.destroy()


Done = subprocess.CompletedProcess[bytes]


def mount_it(mount: MountedVault, *words: str | Path, check: bool = False, **keywords: Any) -> Done:
    """`vaultfs mount …`, in the background, with no options but those given."""
    return mount.run([mount.python(), "-m", "vaultfs", "mount", *map(str, words)], check=check, **keywords)


def record(mount: MountedVault) -> dict[str, Any]:
    return mount.status()


def one_clear_line(done: Done) -> str:
    """What a refused command prints: what happened, what to do, and no traceback; returns it."""
    text = done.stderr.decode()
    lines = text.splitlines()
    problem = [line for line in lines if line.startswith("vaultfs: ")]
    hint = [line for line in lines if line.strip().startswith("hint: ")]
    assert len(problem) == 1 and len(hint) == 1, text
    assert "Traceback" not in text
    assert len(lines) == 2, text
    assert len(hint[0].strip()) > len("hint: ") + 10, "the hint says nothing"
    assert done.stdout == b""
    return text


# ------------------------------------------------------------------------------------------------------------- mount


def test_mount_returns_when_the_mount_answers_and_umount_when_the_daemon_is_gone(unmounted: MountedVault) -> None:
    """Case 90, rclone#3342, libfuse#1: umount returns before the daemon is done."""
    (unmounted.vault / "note.md").write_text("note")
    for _ in range(3):
        done = mount_it(unmounted, unmounted.vault, unmounted.mnt)
        assert done.returncode == 0, done.stderr
        assert os.statvfs(unmounted.mnt).f_bsize > 0
        assert is_served(unmounted.mnt)
        assert (unmounted.mnt / "note.md").read_text() == "note"
        pid = record(unmounted)["pid"]
        assert Path(f"/proc/{pid}").exists()
        done = unmounted.cli("umount", str(unmounted.mnt))
        assert not Path(f"/proc/{pid}").exists() or _is_zombie(pid)
        assert not is_served(unmounted.mnt)
        assert os.listdir(unmounted.mnt) == []


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_daemon_is_detached_from_whoever_started_it(unmounted: MountedVault) -> None:
    """A shell that waits for all output of `mount` gets its prompt back; closing the terminal ends nothing."""
    # run() reads the command's output to its end: a daemon that kept the pipe open would hang it
    done = unmounted.run(
        [
            *("bash", "-c", 'out=$("$@" 2>&1); echo "$?: $out"', "bash"),
            *(unmounted.python(), "-m", "vaultfs", "mount", str(unmounted.vault), str(unmounted.mnt)),
        ],
        cwd=unmounted.home,
    )
    assert done.stdout.startswith(b"0: "), done.stdout
    pid = record(unmounted)["pid"]
    assert os.getsid(pid) != os.getsid(0)
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert fields[4] == "0", "it has a controlling terminal"
    os.kill(pid, signal.SIGHUP)
    time.sleep(0.3)
    if not is_served(unmounted.mnt):  # going on or ending cleanly: both are fine
        eventually(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), "the daemon ends")


def test_mount_over_the_vault_itself(vault_mount: Factory) -> None:
    mount = vault_mount(over_itself=True, background=True, files={"note.md": "old"})
    (mount.mnt / "note.md").write_text("new")
    assert mount.read_behind("note.md") == b"new"
    assert ".vaultfs" not in os.listdir(mount.vault)
    done = mount_it(mount, mount.vault)
    assert done.returncode == ExitCode.BUSY
    assert str(mount.pid) in one_clear_line(done)
    mount.umount()
    assert (mount.vault / "note.md").read_text() == "new"
    assert set(os.listdir(mount.vault)) == {"note.md", ".vaultfs"}


def test_naming_the_vault_as_its_own_mountpoint_is_mounting_over_itself(unmounted: MountedVault) -> None:
    (unmounted.vault / "note.md").write_text("old")  # a vault is not empty: that must not be taken for a mistake
    done = mount_it(unmounted, unmounted.vault, unmounted.vault)
    assert done.returncode == 0, done.stderr
    try:
        assert is_served(unmounted.vault)
        (unmounted.vault / "note.md").write_text("new")
    finally:
        unmounted.cli("umount", str(unmounted.vault))
    assert (unmounted.vault / "note.md").read_text() == "new"


def test_the_kernels_table_says_what_is_mounted(mounted: MountedVault) -> None:
    """Case 91, bazil#89: systemd unmounts what has /dev/fuse as its source; df and findmnt show the source."""
    line = in_mountinfo(mounted.mnt)
    assert line is not None
    kind, source = line.partition(" - ")[2].split()[:2]
    assert kind == "fuse.vaultfs"
    assert "vaultfs" in source or source == str(mounted.vault)


FSTAB_OPTIONS = "rw,dev,suid,noauto,user,exec,nofail,_netdev,x-systemd.automount,x-gvfs-show,defaults,comment=notes"


def test_a_mountpoint_that_is_not_empty_can_be_had_by_asking(unmounted: MountedVault) -> None:
    """Case 92, libfuse#582, gocryptfs#440: fuse3 never refuses by itself; `-o nonempty` must be accepted."""
    (unmounted.mnt / "below").write_text("hidden")
    assert mount_it(unmounted, unmounted.vault, unmounted.mnt).returncode == ExitCode.BUSY
    assert mount_it(unmounted, unmounted.vault, unmounted.mnt, "-o", "nonempty").returncode == 0
    assert os.listdir(unmounted.mnt) == []
    unmounted.cli("umount", str(unmounted.mnt))
    assert (unmounted.mnt / "below").read_text() == "hidden"
    (unmounted.mnt / "below").unlink()


def test_options_of_fstab_are_accepted(unmounted: MountedVault) -> None:
    """Case 96, mountpoint-s3#44, b2_fuse#30: unknown words of fstab end the mount."""
    done = mount_it(unmounted, unmounted.vault, unmounted.mnt, "-o", FSTAB_OPTIONS)
    assert done.returncode == 0, done.stderr


def test_read_only_mounts_refuse_to_write_and_say_so(unmounted: MountedVault) -> None:
    (unmounted.vault / "note.md").write_text("note")
    assert mount_it(unmounted, unmounted.vault, unmounted.mnt, "-o", "ro").returncode == 0
    assert (unmounted.mnt / "note.md").read_text() == "note"
    for attempt in (
        lambda: (unmounted.mnt / "note.md").write_text("x"),
        lambda: (unmounted.mnt / "new.md").write_text("x"),
        lambda: (unmounted.mnt / "note.md").unlink(),
        lambda: (unmounted.mnt / "d").mkdir(),
        lambda: (unmounted.mnt / "note.md").chmod(0o600),
        lambda: os.rename(unmounted.mnt / "note.md", unmounted.mnt / "x"),
    ):
        with pytest.raises(OSError, match="Read-only file system"):
            attempt()
    assert (unmounted.vault / "note.md").read_text() == "note"


# ------------------------------------------------------------------------------------------------------------ umount


def test_umount_names_who_holds_the_mount_and_leaves_it_working(mounted: MountedVault) -> None:
    (mounted.mnt / "d").mkdir()
    (mounted.mnt / "note.md").write_text("x")

    def hold(path: str) -> None:
        with open(path) as file:
            print("held", flush=True)
            input()
            file.read()

    reader = mounted.spawn(hold, str(mounted.mnt / "note.md"))
    assert reader.hear() == "held"
    sleeper = subprocess.Popen(["sleep", "600"], cwd=mounted.mnt / "d")
    try:
        done = mounted.cli("umount", "--timeout", "1", str(mounted.mnt), check=False)
        text = done.stderr.decode()
        assert done.returncode == ExitCode.BUSY, text
        assert f"pid {reader.pid}" in text and "note.md" in text
        assert f"sleep (pid {sleeper.pid})" in text
        assert "--lazy" in text and "Traceback" not in text
        (mounted.mnt / "note.md").write_text("still works")
        assert mounted.read_behind("note.md") == b"still works"
    finally:
        sleeper.kill()
        sleeper.wait()
    reader.say()
    reader.end()


def test_umount_waits_for_an_open_save(mounted: MountedVault) -> None:
    def save_slowly(path: str) -> None:
        import time

        with open(path, "w") as file:
            file.write("complete")
            file.flush()
            print("writing", flush=True)
            time.sleep(1.5)

    client = mounted.spawn(save_slowly, str(mounted.mnt / "note.md"))
    assert client.hear() == "writing"
    done = mounted.cli("umount", str(mounted.mnt))
    mounted._assert_ended()
    assert "note.md" in done.stderr.decode()
    assert client.end()[0] == 0
    assert mounted.read_behind("note.md") == b"complete"


def test_a_lazy_umount_takes_the_name_away_and_lets_open_files_finish(mounted: MountedVault) -> None:
    (mounted.mnt / "note.md").write_text("old")

    def save_later(path: str) -> None:
        with open(path, "w") as file:
            file.write("late ")
            file.flush()
            print("open", flush=True)
            input()
            file.write("save")

    client = mounted.spawn(save_later, str(mounted.mnt / "note.md"))
    assert client.hear() == "open"
    mounted.cli("umount", "--lazy", str(mounted.mnt))
    assert not is_served(mounted.mnt)
    assert os.listdir(mounted.mnt) == []
    client.say()
    code, _ = client.end()
    assert code == 0, client.errors()
    assert mounted.read_behind("note.md") == b"late save"
    eventually(lambda: mounted._process is not None and mounted._process.poll() is not None, "the daemon ends")
    mounted._assert_ended()


@pytest.mark.parametrize("way", ["fusermount3", "umount", "SIGTERM", "SIGINT"])
def test_every_ordinary_end_is_a_clean_one(vault_mount: Factory, way: str) -> None:
    mount = vault_mount()
    (mount.mnt / "note.md").write_text("saved")
    if way == "fusermount3":
        mount.run(["fusermount3", "-u", str(mount.mnt)])
    elif way == "umount":
        if os.geteuid() != 0:
            pytest.skip("only root may call umount here")
        mount.run(["umount", str(mount.mnt)])
    else:
        os.kill(mount.pid, getattr(signal, way))
    assert mount._process is not None
    assert mount._process.wait(GUARD) in (0, -getattr(signal, way, 0)), mount.log_text()
    assert not is_served(mount.mnt)
    assert mount.read_behind("note.md") == b"saved"
    mount._finished = True  # finish() must not unmount what is unmounted; it goes on to look for what is left
    status = json.loads(mount.cli("status", "--json", check=False).stdout)
    assert str(mount.mnt) not in [entry["mountpoint"] for entry in status["mounts"]]


def test_sigterm_with_an_open_draft_loses_nothing(vault_mount: Factory) -> None:
    """The writer is cut off; its text is published or listed, and the next mount knows it."""
    mount = vault_mount(files={"note.md": "old"})
    mount.expect_kept(None)

    def write_and_wait(path: str) -> None:
        import os

        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(fd, b"unfinished")
        print("written", flush=True)
        input()

    client = mount.spawn(write_and_wait, str(mount.mnt / "note.md"))
    assert client.hear() == "written"
    os.kill(mount.pid, signal.SIGTERM)
    assert mount._process is not None
    mount._process.wait(GUARD)
    client.say()
    client.end()
    if is_served(mount.mnt):
        mount.run(["fusermount3", "-uz", str(mount.mnt)])
    mount._finished = True
    assert mount.read_behind("note.md") in (b"old", b"unfinished")
    if mount.read_behind("note.md") == b"old":
        drafts = mount.behind / ".vaultfs"
        found = [path.read_bytes() for path in drafts.rglob("*") if path.is_file()]
        assert b"unfinished" in found


def test_umount_accepts_the_vaults_name_too(unmounted: MountedVault) -> None:
    assert mount_it(unmounted, unmounted.vault, unmounted.mnt).returncode == 0
    unmounted.cli("umount", str(unmounted.vault))
    assert not is_served(unmounted.mnt)


@pytest.mark.parametrize("path", ["mnt", "vault", "missing"])
def test_umount_of_what_is_not_mounted(unmounted: MountedVault, path: str) -> None:
    done = unmounted.cli("umount", str(unmounted.base / path), check=False)
    assert done.returncode == ExitCode.NOT_FOUND
    one_clear_line(done)


# ------------------------------------------------------------------------------------------------------------ status


def test_status_without_any_mount(unmounted: MountedVault) -> None:
    done = unmounted.cli("status", check=False)
    assert done.stderr == b"" and done.stdout != b""
    json.loads(unmounted.cli("status", "--json", check=False).stdout)
    done = unmounted.cli("status", str(unmounted.vault), check=False)
    assert done.returncode == ExitCode.NOT_FOUND
    one_clear_line(done)


def test_status_tells_of_writers_and_counts_what_happened(mounted: MountedVault) -> None:
    before = mounted.counters()
    for number in range(3):
        (mounted.mnt / "counted.md").write_text(f"{number}")
    assert mounted.counters()["saves"] >= before.get("saves", 0) + 3

    def hold(path: str) -> None:
        with open(path, "w") as file:
            file.write("x" * 5000)
            file.flush()
            print("open", flush=True)
            input()

    client = mounted.spawn(hold, str(mounted.mnt / "counted.md"))
    assert client.hear() == "open"
    (draft,) = mounted.status()["drafts"]
    assert (draft["path"], draft["size"], draft["pid"], draft["changed"]) == ("counted.md", 5000, client.pid, True)
    assert "python" in draft["program"]
    assert draft["age_s"] >= 0
    for words in (["status"], ["status", str(mounted.mnt)], ["status", str(mounted.vault)]):
        text = mounted.cli(*words, check=False).stdout.decode()  # other mounts may be in trouble
        for expected in (str(mounted.vault), str(mounted.mnt), "counted.md", str(client.pid), draft["program"]):
            assert expected in text, (words, text)
    client.say()
    assert client.end()[0] == 0
    assert mounted.status()["drafts"] == []


def test_status_of_a_path_inside_tells_of_its_mount(mounted: MountedVault) -> None:
    (mounted.mnt / "a/b").mkdir(parents=True)
    (mounted.mnt / "a/b/note.md").write_text("x")
    for path in (mounted.mnt / "a/b/note.md", mounted.vault / "a"):
        assert json.loads(mounted.cli("status", str(path), "--json").stdout)["mounts"][0]["mountpoint"] == str(
            mounted.mnt
        )


def test_status_answers_while_the_daemon_hangs(mounted: MountedVault) -> None:
    os.kill(mounted.pid, signal.SIGSTOP)
    try:
        done = mounted.cli("status", "--json", check=False)
        assert done.returncode == ExitCode.FAILED
        (view,) = [view for view in json.loads(done.stdout)["mounts"] if view["mountpoint"] == str(mounted.mnt)]
        assert view["answers"] is False and view["problem"]
    finally:
        os.kill(mounted.pid, signal.SIGCONT)
    assert mounted.cli("status", str(mounted.mnt)).returncode == 0


def test_a_save_held_up_by_a_lock_shows_in_status(vault_mount: Factory) -> None:
    """The lock is another program's; the writer waits, gets EBUSY, and its text is listed and saved elsewhere."""
    mount = vault_mount(options="lock-timeout=1s", files={"note.md": "old"})
    mount.expect_log("lock", "busy", "EBUSY")
    holder = subprocess.Popen(["sleep", "600"])
    try:
        token = make_lock(mount.behind / "note.md", holder.pid)

        def save(path: str) -> str:
            import errno

            try:
                with open(path, "w") as file:
                    file.write("new")
            except OSError as error:
                return errno.errorcode[error.errno or 0]
            return "saved"

        assert mount.call(save, str(mount.mnt / "note.md")) == "EBUSY"
        (kept,) = mount.kept()
        assert kept["path"] == "note.md" and "lock" in kept["reason"].lower()
        assert mount.kept_content(kept) == b"new"
        text = mount.cli("status", str(mount.mnt)).stdout.decode()
        assert "note.md" in text
        assert mount.counters()["busy"] >= 1
        assert mount.read("note.md") == b"old"
        assert mount.status()["retries"] == ["note.md"]
        drop_lock(mount.behind / "note.md", token)
        eventually(
            lambda: mount.read_behind("note.md") == b"new", "what was refused is published once the lock is gone"
        )
        eventually(lambda: mount.kept() == [] and mount.status()["retries"] == [], "and listed no more")
    finally:
        holder.kill()
        holder.wait()


# ------------------------------------------------------------------------------------------------------------ drafts


def kill_halfway(mount: MountedVault, name: str, content: bytes = b"halfway") -> int:
    """A writer that replaces `name` is killed before it closes; returns its pid. Its draft is then kept."""

    def write_and_wait(path: str, text: str) -> None:
        import os

        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(fd, text.encode("latin-1"))
        print("written", flush=True)
        input()

    client = mount.spawn(write_and_wait, str(mount.mnt / name), content.decode("latin-1"))
    assert client.hear() == "written"
    client.kill(signal.SIGKILL)
    eventually(lambda: [draft for draft in mount.kept() if draft["path"] == name], "the draft is listed")
    return client.pid


def test_a_kept_draft_is_listed_and_can_be_got_out(mounted: MountedVault) -> None:
    mounted.expect_kept(1)
    mounted.expect_log("killed", "kept", "draft")
    (mounted.mnt / "note.md").write_text("old")
    pid = kill_halfway(mounted, "note.md", b"what was written \xff so far")
    (kept,) = mounted.kept()
    assert (kept["path"], kept["pid"]) == ("note.md", pid)
    assert kept["size"] == len(b"what was written \xff so far")
    assert "python" in kept["program"] and kept["reason"] and re.match(r"\d{4}-\d\d-\d\dT", kept["when"])
    text = mounted.cli("drafts", str(mounted.mnt)).stdout.decode()
    for expected in ("note.md", kept["id"][:8], "python"):
        assert expected in text
    assert "note.md" in mounted.cli("drafts", check=False).stdout.decode()
    assert mounted.kept_content(kept) == b"what was written \xff so far"
    inside = mounted.mnt / "recovered.md"
    mounted.cli("drafts", "save-as", kept["id"], str(inside))
    assert inside.read_bytes() == b"what was written \xff so far"
    assert mounted.read_behind("recovered.md") == b"what was written \xff so far"
    assert mounted.read("note.md") == b"old"
    assert len(mounted.kept()) == 1, "getting a draft out does not remove it"


def test_getting_a_draft_out_never_overwrites(mounted: MountedVault) -> None:
    mounted.expect_kept(1)
    mounted.expect_log("killed", "kept", "draft")
    (mounted.mnt / "note.md").write_text("old")
    kill_halfway(mounted, "note.md")
    (kept,) = mounted.kept()
    for target in (mounted.mnt / "note.md", mounted.home / "there"):
        target.write_text("old")
        done = mounted.cli("drafts", "save-as", kept["id"], str(target), check=False)
        assert done.returncode != 0
        one_clear_line(done)
        assert target.read_text() == "old"
    done = mounted.cli("drafts", "save-as", kept["id"], str(mounted.home / "missing/x"), check=False)
    assert done.returncode != 0
    one_clear_line(done)


def test_drafts_survive_the_mount(vault_mount: Factory) -> None:
    first = vault_mount(background=True)
    first.expect_kept(1)
    first.expect_log("killed", "kept", "draft")
    (first.mnt / "note.md").write_text("old")
    kill_halfway(first, "note.md")
    first.cli("umount", str(first.mnt))
    assert mount_it(first, first.vault, first.mnt).returncode == 0
    first.pid = record(first)["pid"]
    first._own_descriptors = first.daemon_descriptors()
    (kept,) = first.kept()
    assert kept["path"] == "note.md"
    assert first.kept_content(kept) == b"halfway"


def test_drafts_when_there_are_none_and_with_wrong_names(mounted: MountedVault) -> None:
    assert mounted.kept() == []
    assert mounted.cli("drafts", str(mounted.mnt)).returncode == 0
    for identity in ("no-such-draft", "../../etc/passwd", "", "a/b"):
        done = mounted.cli("drafts", "save-as", identity, str(mounted.home / "out"), check=False)
        assert done.returncode in (ExitCode.NOT_FOUND, ExitCode.USAGE), (identity, done.stderr)
        one_clear_line(done)
        assert not (mounted.home / "out").exists()
    done = mounted.cli("drafts", str(mounted.base / "missing"), check=False)
    assert done.returncode == ExitCode.NOT_FOUND
    one_clear_line(done)


# ----------------------------------------------------------------------------------------- somebody is there already


def test_a_second_mount_of_a_vault_is_refused_naming_the_first(vault_mount: Factory) -> None:
    first = vault_mount(files={"note.md": "x"})
    other = first.base / "other"
    other.mkdir()
    for words in ([first.vault, other], [first.vault]):
        done = mount_it(first, *words)
        assert done.returncode == ExitCode.BUSY, done.stderr
        assert str(first.pid) in one_clear_line(done)
    assert in_mountinfo(other) is None
    (first.mnt / "note.md").write_text("the first one works on")
    assert first.read_behind("note.md") == b"the first one works on"


def test_the_fence_refuses_a_second_mount_even_if_the_register_is_lost(vault_mount: Factory) -> None:
    """Another user, or another place for the register: the register is another one, the vault is the same."""
    first = vault_mount()
    other = first.base / "other"
    other.mkdir()
    elsewhere = first.base / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    done = subprocess.run(
        [first.python(), "-m", "vaultfs", "mount", first.vault, other],
        env={**first.environment(), "VAULTFS_RUNTIME_DIR": str(elsewhere / "vaultfs")},
        capture_output=True,
        timeout=GUARD,
        check=False,
    )
    assert done.returncode == ExitCode.BUSY, done.stderr
    assert str(first.pid) in one_clear_line(done)
    assert in_mountinfo(other) is None
    (first.mnt / "x").write_text("x")


def test_mounting_where_something_is_mounted(vault_mount: Factory) -> None:
    first = vault_mount()
    another = first.base / "another vault"
    another.mkdir()
    done = mount_it(first, another, first.mnt)
    assert done.returncode == ExitCode.BUSY
    text = one_clear_line(done)
    assert str(first.pid) in text and str(first.vault) in text
    assert os.listdir(another) == []


def test_mounting_a_directory_of_a_mount_is_refused(vault_mount: Factory) -> None:
    first = vault_mount()
    (first.mnt / "d").mkdir()
    other = first.base / "other"
    other.mkdir()
    done = mount_it(first, first.mnt / "d", other)
    assert done.returncode in (ExitCode.BUSY, ExitCode.UNSUITABLE)
    one_clear_line(done)
    assert in_mountinfo(other) is None


@pytest.mark.parametrize("over_itself", [False, True], ids=["elsewhere", "over-itself"])
def test_a_dead_mount_is_recognized_and_replaced(unmounted: MountedVault, over_itself: bool) -> None:
    """Case 37, edge-endpoint#387: the daemon is killed; status says so and does not hang, mounting again just works."""
    words = [unmounted.vault] if over_itself else [unmounted.vault, unmounted.mnt]
    (unmounted.vault / "note.md").write_text("note")
    assert mount_it(unmounted, *words).returncode == 0
    where = unmounted.vault if over_itself else unmounted.mnt
    try:
        pid = json.loads(unmounted.cli("status", str(where), "--json").stdout)["mounts"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), "the daemon is dead")
        with pytest.raises(OSError, match=r"not connected|connection abort"):
            os.listdir(where)
        done = unmounted.cli("status", str(where), check=False)
        assert done.returncode == ExitCode.FAILED
        assert str(where) in done.stdout.decode() and "died" in done.stdout.decode()
        done = mount_it(unmounted, *words)
        assert done.returncode == 0, done.stderr
        assert b"died" in done.stderr + done.stdout
        assert (where / "note.md").read_text() == "note"
        (where / "note.md").write_text("new")
    finally:
        unmounted.cli("umount", str(where), check=False)
    assert in_mountinfo(where) is None, "the dead mount is still below"
    assert (unmounted.vault / "note.md").read_text() == "new"


def test_umount_clears_a_dead_mount_away(unmounted: MountedVault) -> None:
    assert mount_it(unmounted, unmounted.vault, unmounted.mnt).returncode == 0
    os.kill(record(unmounted)["pid"], signal.SIGKILL)
    unmounted.cli("umount", str(unmounted.mnt))
    assert in_mountinfo(unmounted.mnt) is None
    assert str(unmounted.mnt) not in unmounted.cli("status", check=False).stdout.decode()


# --------------------------------------------------------------------------------------------------------- bad input


Prepare = Callable[[MountedVault], tuple[Sequence[str | Path], str]]
BAD: dict[str, tuple[int, Prepare]] = {}


def bad(code: int) -> Callable[[Prepare], Prepare]:
    """A case of bad input: prepares it and returns the words after `mount` and a pattern that the message matches."""

    def enter(prepare: Prepare) -> Prepare:
        BAD[prepare.__name__] = (code, prepare)
        return prepare

    return enter


@bad(ExitCode.NOT_FOUND)
def the_vault_is_missing(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    return [m.base / "nowhere", m.mnt], "nowhere.*\n.*mkdir"


@bad(ExitCode.NOT_FOUND)
def the_vault_is_missing_and_mounted_over(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    return [m.base / "nowhere"], "nowhere"


@bad(ExitCode.UNSUITABLE)
def the_vault_is_a_file(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    (m.base / "file").write_text("x")
    return [m.base / "file", m.mnt], "not a directory"


@bad(ExitCode.UNSAFE)
def the_vault_is_a_link(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    (m.base / "link").symlink_to(m.vault)
    return [m.base / "link", m.mnt], f"link.*\n.*{re.escape(str(m.vault))}"


@bad(ExitCode.UNSAFE)
def the_vault_is_a_dangling_link(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    (m.base / "link").symlink_to("nowhere")
    return [m.base / "link", m.mnt], "link"


@bad(ExitCode.USAGE)
def the_vault_is_an_empty_word(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    return ["", m.mnt], "empty"


@bad(ExitCode.NOT_FOUND)
def the_mountpoint_is_missing(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    return [m.vault, m.base / "nowhere"], "nowhere.*\n.*mkdir"


@bad(ExitCode.UNSUITABLE)
def the_mountpoint_is_a_file(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    (m.base / "file").write_text("x")
    return [m.vault, m.base / "file"], "not a directory"


@bad(ExitCode.BUSY)
def the_mountpoint_is_not_empty(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    (m.base / "full").mkdir()
    (m.base / "full/file").write_text("x")
    return [m.vault, m.base / "full"], "not empty.*\n.*nonempty"


@bad(ExitCode.UNSUITABLE)
def the_mountpoint_lies_in_the_vault(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    """Case 86, bindfs#182, libfuse#509: a daemon that walks into its own mount waits for itself."""
    (m.vault / "mnt").mkdir()
    return [m.vault, m.vault / "mnt"], "inside"


@bad(ExitCode.UNSUITABLE)
def the_mountpoint_lies_in_the_vault_by_way_of_a_link(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    (m.vault / "mnt").mkdir()
    (m.base / "way").symlink_to(m.vault)
    return [m.vault, m.base / "way/mnt"], "inside"


@bad(ExitCode.UNSUITABLE)
def the_vault_lies_in_the_mountpoint(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    (m.mnt / "vault").mkdir()
    return [m.mnt / "vault", m.mnt, "-o", "nonempty"], "inside"


@bad(ExitCode.USAGE)
def an_option_is_unknown(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    return [m.vault, m.mnt, "-o", "ro,durabilty=strict"], "durabilty.*\n?.*durability"


@bad(ExitCode.USAGE)
def an_option_has_a_wrong_value(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    return [m.vault, m.mnt, "-o", "conflict=perhaps"], "conflict: perhaps.*\n.*copy, fail, overwrite"


@bad(ExitCode.USAGE)
def a_duration_is_none(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    return [m.vault, m.mnt, "-o", "lock-timeout=soon"], "lock-timeout"


@bad(ExitCode.USAGE)
def a_switch_is_unknown(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    return [m.vault, m.mnt, "--frobnicate"], "frobnicate"


@bad(ExitCode.USAGE)
def there_are_too_many_words(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    return [m.vault, m.mnt, m.home], "home"


@bad(ExitCode.USAGE)
def there_is_no_word_at_all(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    return [], "VAULT"


@bad(ExitCode.USAGE)
def the_log_file_lies_in_the_vault(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    return [m.vault, m.mnt, "-o", f"log-file={m.vault}/log"], "log"


@bad(ExitCode.USAGE)
def the_log_file_cannot_be_made(m: MountedVault) -> tuple[Sequence[str | Path], str]:
    return [m.vault, m.mnt, "-o", f"log-file={m.base}/nowhere/log"], "log"


def everything_below(base: Path) -> set[str]:
    """What is there, but for the places where vaultfs may log and register."""
    return {
        str(path.relative_to(base))
        for path in base.rglob("*")
        if path.relative_to(base).parts[0] not in ("home", "run")
    }


def mounts_of(mount: MountedVault) -> list[str]:
    """The lines of the kernel's table that concern this test; others may mount at the same time."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(mount.base) in line]


def assert_refused(mount: MountedVault, words: Sequence[str | Path], code: int, pattern: str) -> None:
    mount.python()  # makes the interpreter reachable for the user, by mounts of its own
    before, mounts = everything_below(mount.base), mounts_of(mount)
    for foreground in ((), ("-f",)):
        done = mount_it(mount, *words, *foreground)
        text = one_clear_line(done)
        assert done.returncode == code, text
        assert re.search(pattern, text), text
        assert everything_below(mount.base) == before, "something was left behind"
        assert mounts_of(mount) == mounts
        assert processes_with(mount.token) == []


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_one_clear_line(unmounted: MountedVault, name: str) -> None:
    code, prepare = BAD[name]
    words, pattern = prepare(unmounted)
    assert_refused(unmounted, words, code, pattern)


@pytest.fixture
def of_a_user() -> Iterator[MountedVault]:
    mount = MountedVault(background=True, uid=TEST_UID if os.geteuid() == 0 else None)
    os.chmod("/dev/fuse", 0o666)  # as udev makes it
    try:
        yield mount
        assert in_mountinfo(mount.mnt) is None
    finally:
        mount.destroy()


def test_a_vault_that_may_not_be_written(of_a_user: MountedVault) -> None:
    of_a_user.vault.chmod(0o555)
    assert_refused(of_a_user, [of_a_user.vault, of_a_user.mnt], ExitCode.DENIED, r"vault.*\n.*as its owner")


@as_root
def test_a_vault_and_a_mountpoint_of_somebody_else(of_a_user: MountedVault) -> None:
    private = of_a_user.base / "private"
    private.mkdir(mode=0o700)
    assert_refused(of_a_user, [private, of_a_user.mnt], ExitCode.DENIED, "private")
    readable = of_a_user.base / "readable"
    readable.mkdir(mode=0o755)
    assert_refused(of_a_user, [of_a_user.vault, readable], ExitCode.DENIED, "readable")


@as_root
def test_allow_other_of_a_user_without_the_line_in_fuse_conf(of_a_user: MountedVault) -> None:
    """Case 93, kopia#4169, geesefs#33."""
    if re.search(r"^user_allow_other\s*$", Path("/etc/fuse.conf").read_text(), re.MULTILINE):
        pytest.skip("this machine allows it")
    assert_refused(
        of_a_user, [of_a_user.vault, of_a_user.mnt, "-o", "allow_other"], ExitCode.DENIED, "user_allow_other"
    )


def in_namespace(mount: MountedVault, prepare: str, *words: str | Path, uid: int | None = None) -> Done:
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"] if uid else []
    return subprocess.run(
        [
            *("unshare", "--mount", "--propagation", "private", "sh", "-ec", f'{prepare}; exec "$@"', "sh"),
            *(*become, mount.python(), "-m", "vaultfs", "mount", *map(str, words)),
        ],
        env=mount.environment(),
        cwd="/",
        capture_output=True,
        timeout=GUARD,
        check=False,
    )


@as_root
def test_a_machine_without_dev_fuse(unmounted: MountedVault) -> None:
    """Case 94, podman#14402, for-linux#321: a container without the device."""
    hide = "mkdir -p $HOME/dev; mount -t tmpfs dev $HOME/dev; for d in null urandom random zero tty; do"
    hide += " touch $HOME/dev/$d; mount --bind /dev/$d $HOME/dev/$d; done; mount --move $HOME/dev /dev"
    done = in_namespace(unmounted, hide, unmounted.vault, unmounted.mnt)
    assert done.returncode == ExitCode.UNSUITABLE, done.stderr
    text = one_clear_line(done)
    assert "/dev/fuse" in text and "modprobe fuse" in text
    assert os.listdir(unmounted.vault) == []


@as_root
def test_a_machine_without_fusermount3(of_a_user: MountedVault) -> None:
    """A user cannot mount without it."""
    hide = f"mount --bind /dev/null {os.path.realpath(shutil.which('fusermount3') or '')}"  # nobody may run that
    done = in_namespace(of_a_user, hide, of_a_user.vault, of_a_user.mnt, uid=TEST_UID)
    assert done.returncode == ExitCode.UNSUITABLE, done.stderr
    assert "fusermount3" in one_clear_line(done)
    assert os.listdir(of_a_user.vault) == []


@as_root
def test_a_vault_on_a_read_only_file_system(unmounted: MountedVault) -> None:
    prepare = f"mount --bind {unmounted.vault} {unmounted.vault}; mount -o remount,bind,ro {unmounted.vault}"
    done = in_namespace(unmounted, prepare, unmounted.vault, unmounted.mnt)
    assert done.returncode == ExitCode.UNSUITABLE, done.stderr
    assert re.search(r"read-only.*\n.*-o ro", one_clear_line(done))


def test_a_file_system_that_cannot_rename_without_replacing(unmounted: MountedVault) -> None:
    place = unmounted.base / "unhelpful"
    place.mkdir()
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("unhelpful_fs.py"), place], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        (place / "vault").mkdir()
        done = mount_it(unmounted, place / "vault", unmounted.mnt)
        assert done.returncode == ExitCode.UNSUITABLE, done.stderr
        assert "rename" in one_clear_line(done)
        assert os.listdir(place / "vault") == []
    finally:
        subprocess.run(["fusermount3", "-uz", place], check=False)
        server.wait(GUARD)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], ExitCode.USAGE),
        (["frobnicate"], ExitCode.USAGE),
        (["umount"], ExitCode.USAGE),
        (["drafts", "save-as"], ExitCode.USAGE),
        (["status", "a", "b"], ExitCode.USAGE),
    ],
)
def test_wrong_words_are_told_with_the_way_to_the_right_ones(
    unmounted: MountedVault, words: list[str], code: int
) -> None:
    done = unmounted.cli(*words, check=False)
    assert done.returncode == code
    assert "--help" in one_clear_line(done)


@pytest.mark.parametrize("command", [[], ["mount"], ["umount"], ["status"], ["drafts"], ["drafts", "save-as"]])
def test_help_is_there_for_every_command(unmounted: MountedVault, command: list[str]) -> None:
    text = unmounted.cli(*command, "--help").stdout.decode()
    assert "usage: vaultfs" in text
    assert len(text.splitlines()) > 5
    assert re.search(r"vaultfs \d", unmounted.cli("--version").stdout.decode())


# --------------------------------------------------------------------------------------------- names on the terminal


EVIL = "evil\x1b[31m\x07\rname\n.md"


def assert_harmless(output: bytes) -> None:
    """No control character but the newlines that the program itself prints."""
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", output), output


def test_control_characters_in_names_are_escaped(mounted: MountedVault) -> None:
    mounted.expect_kept(2)
    mounted.expect_log("killed", "kept", "draft")
    raw = b"\xff\xfe not utf-8.md"
    (mounted.mnt / EVIL).write_text("old")
    Path(os.fsdecode(os.fsencode(mounted.mnt) + b"/" + raw)).write_text("old")

    def hold(path: str) -> None:
        import os

        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(fd, b"new")
        print("open", flush=True)
        input()

    for name in (EVIL, os.fsdecode(raw)):
        client = mounted.spawn(hold, str(mounted.mnt / name))
        assert client.hear() == "open"
        for words in (["status"], ["status", str(mounted.mnt)]):
            done = mounted.cli(*words, check=False)
            assert_harmless(done.stdout)
            assert b"evil" in done.stdout or b"not utf-8" in done.stdout
        assert name in [draft["path"] for draft in mounted.status()["drafts"]]
        client.kill()
    eventually(lambda: len(mounted.kept()) == 2, "both drafts are listed")
    assert {draft["path"] for draft in mounted.kept()} == {EVIL, os.fsdecode(raw)}
    assert_harmless(mounted.cli("drafts", str(mounted.mnt)).stdout)
    log = mounted.log_text().encode(errors="surrogateescape")
    assert_harmless(log)


def test_messages_about_paths_with_control_characters_are_harmless(unmounted: MountedVault) -> None:
    for words in (
        ["mount", str(unmounted.base / EVIL), str(unmounted.mnt)],
        ["umount", str(unmounted.base / EVIL)],
        ["status", str(unmounted.base / EVIL)],
        ["drafts", str(unmounted.base / EVIL)],
        ["mount", str(unmounted.vault), str(unmounted.mnt), "-o", "evil\x1b[31m"],
    ):
        done = unmounted.cli(*words, check=False)
        assert done.returncode != 0
        assert_harmless(done.stderr)
        assert b"evil" in done.stderr


def test_a_vault_and_a_mountpoint_with_strange_names(unmounted: MountedVault) -> None:
    """Spaces, commas, backslashes, colons, newlines and no UTF-8: in the words, in the mount table, in the register."""
    for name in ("with space, comma", "back\\slash:colon=equals", "new\nline\ttab", os.fsdecode(b"\xff\xfe")):
        vault, mountpoint = unmounted.base / f"vault {name}", unmounted.base / f"mnt {name}"
        vault.mkdir()
        mountpoint.mkdir()
        done = mount_it(unmounted, vault, mountpoint)
        assert done.returncode == 0, done.stderr
        (mountpoint / "note.md").write_text("x")
        assert (vault / "note.md").read_text() == "x"
        status = json.loads(unmounted.cli("status", str(mountpoint), "--json").stdout)["mounts"][0]
        assert (status["vault"], status["mountpoint"]) == (str(vault), str(mountpoint))
        assert_harmless(unmounted.cli("status", check=False).stdout)
        unmounted.cli("umount", str(mountpoint))
        with pytest.raises(FileNotFoundError):
            os.stat(mountpoint / "note.md")


def test_the_control_socket_is_private(mounted: MountedVault) -> None:
    sockets = [path for path in mounted.runtime.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
    assert sockets, "there is no socket in XDG_RUNTIME_DIR"
    for path in sockets:
        assert path.lstat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert not path.is_relative_to(mounted.vault)
