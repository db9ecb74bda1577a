"""Watchers are told of saves: by a process that a dying daemon does not drag along, and only when somebody watches."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import inotify_simple
import pytest

from tests.mount.harness import eventually
from vaultfs import kernel
from vaultfs.mount import companion, procs
from vaultfs.mount.announce import Announcer

REPOSITORY = Path(__file__).resolve().parents[2]
ATTRIB = inotify_simple.flags.ATTRIB


class Watcher:
    """An inotify watch, as any editor has one."""

    def __init__(self, path: Path) -> None:
        self._inotify = inotify_simple.INotify()
        self._inotify.add_watch(os.fsencode(path), inotify_simple.masks.ALL_EVENTS)

    def seen(self, wait: float = 0.0) -> list[tuple[int, str]]:
        return [(event.mask, event.name) for event in self._inotify.read(timeout=int(wait * 1000))]

    def wait_for(self, mask: int, name: str) -> None:
        eventually(lambda: (mask, name) in self.seen(0.1), f"{mask:x} of {name!r} is reported")

    def close(self) -> None:
        self._inotify.close()


@pytest.fixture
def watch() -> Iterator[Callable[[Path], Watcher]]:
    watchers: list[Watcher] = []

    def start(path: Path) -> Watcher:
        watchers.append(Watcher(path))
        return watchers[-1]

    yield start
    for watcher in watchers:
        watcher.close()


class TinyMount:
    """`tiny_filesystem.py` in a process of its own."""

    def __init__(self, mountpoint: Path, **environment: str) -> None:
        self.mountpoint = mountpoint
        self._closed = False
        self.process = subprocess.Popen(
            [sys.executable, str(REPOSITORY / "tests/mount/tiny_filesystem.py"), str(mountpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.companion = int(self.wait_for("READY").split()[1])
        self.dev = os.stat(mountpoint).st_dev

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.decode().strip())

    def poll(self) -> list[str]:
        while not self._lines.empty():
            self.said.append(self._lines.get())
        return self.said

    def wait_for(self, pattern: str) -> str:
        return str(
            eventually(
                lambda: next((line for line in self.poll() if re.match(pattern, line)), None), f"{pattern} is said"
            )
        )

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """Idempotent, and comes back also where the daemon hangs."""
        if self._closed:
            return
        self._closed = True
        self.process.kill()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:  # the very hang that is tested for: do not leave it behind
            script = f"from vaultfs.mount import companion; companion.abort({self.dev})"
            subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=False)
            self.process.wait()
        # Only now: the connection of a mount that is detached already cannot be found by its number for certain.
        subprocess.run([*UNMOUNT, self.mountpoint], check=False)
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # a last command to a process that is gone
                stream.close()


UNMOUNT = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]


@pytest.fixture
def tiny() -> Iterator[Callable[..., TinyMount]]:
    mounts: list[TinyMount] = []
    with tempfile.TemporaryDirectory() as directory:

        def start(**environment: str) -> TinyMount:
            mountpoint = Path(directory) / f"mount{len(mounts)}"
            mountpoint.mkdir()
            mounts.append(TinyMount(mountpoint, **environment))
            return mounts[-1]

        try:
            yield start
        finally:
            for mount in mounts:
                mount.close()


@pytest.fixture
def announcer_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Announcer]]:
    announcers: list[Announcer] = []

    def start(mountpoint: Path, dev: int | None = None, **keywords: Any) -> Announcer:
        announcer = Announcer(os.fsencode(mountpoint), os.stat(mountpoint).st_dev if dev is None else dev, **keywords)
        announcers.append(announcer)
        assert announcer.start()
        return announcer

    yield start
    for announcer in announcers:
        announcer.stop()


# ---------------------------------------------------------------- who watches


def test_the_device_number_is_the_kernels_own() -> None:
    assert companion.kernel_device(os.makedev(0, 45)) == 45
    assert companion.kernel_device(os.makedev(8, 17)) == 0x800011
    assert companion.kernel_device(os.makedev(0, 300)) == 300


def test_a_watcher_on_a_real_mount_is_found_and_only_while_it_watches(
    tiny: Callable[..., TinyMount], watch: Callable[[Path], Watcher]
) -> None:
    mount, other = tiny(), tiny()
    assert not companion.look(mount.dev)[0]
    watcher = watch(mount.mountpoint)
    assert companion.look(mount.dev)[0]
    assert companion.watched(mount.dev, shared=False)
    assert not companion.look(other.dev)[0]
    watcher.close()
    assert not companion.look(mount.dev)[0]


def test_the_look_for_watchers_asks_the_mount_nothing(
    tiny: Callable[..., TinyMount], watch: Callable[[Path], Watcher]
) -> None:
    mount = tiny()
    watch(mount.mountpoint / "a")
    mount.wait_for("LOOKUP a ")
    before = len(mount.poll())
    assert companion.look(mount.dev)[0]
    os.stat(mount.mountpoint / "b")  # a request that certainly is one, so that all earlier ones have been printed
    mount.wait_for("LOOKUP b ")
    assert [line for line in mount.poll()[before:] if not line.startswith("LOOKUP b")] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_who_cannot_be_looked_into_may_be_watching() -> None:
    """As another user: our own process cannot be looked into then, and it is of another uid."""

    def answers() -> str:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
                nowhere = os.makedev(0, 0xFFFFF)
                found = companion.watched(nowhere, shared=True), companion.watched(nowhere, shared=False)
                os.write(writing, repr(found).encode())
            except BaseException as error:
                os.write(writing, repr(error).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as file:
            text = file.read()
        os.waitpid(pid, 0)
        return text

    assert answers() == "(True, False)"


# ---------------------------------------------------------------- touching the name


def test_a_touch_is_seen_by_watchers_of_the_directory_and_changes_nothing(
    tmp_path: Path, watch: Callable[[Path], Watcher]
) -> None:
    note = tmp_path / "a" / "note"
    note.parent.mkdir()
    note.write_text("x")
    note.chmod(0o640)
    watcher = watch(note.parent)
    assert companion.touch(os.fsencode(tmp_path), tmp_path.stat().st_dev, b"a/note", 0o640)
    assert watcher.seen() == [(ATTRIB, "note")]
    assert stat.S_IMODE(note.stat().st_mode) == 0o640


def test_a_touch_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / "secret"
    secret.write_text("x")
    secret.chmod(0o600)
    root = tmp_path / "root"
    root.mkdir()
    (root / "directory").symlink_to(outside)
    (root / "file").symlink_to(secret)
    dev = root.stat().st_dev
    for path in (b"directory/secret", b"file", b"directory"):
        assert not companion.touch(os.fsencode(root), dev, path, 0o666)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_a_touch_leaves_other_file_systems_alone(tmp_path: Path) -> None:
    """As when the mount is gone: the walk ends in the directory that it was mounted on."""
    note = tmp_path / "note"
    note.write_text("x")
    note.chmod(0o600)
    assert not companion.touch(os.fsencode(tmp_path), tmp_path.stat().st_dev + 1, b"note", 0o666)
    assert stat.S_IMODE(note.stat().st_mode) == 0o600


def test_a_touch_of_what_is_gone_is_nothing(tmp_path: Path) -> None:
    dev = tmp_path.stat().st_dev
    assert not companion.touch(os.fsencode(tmp_path), dev, b"missing", 0o644)
    assert not companion.touch(os.fsencode(tmp_path), dev, b"missing/deeper", 0o644)
    assert not companion.touch(os.fsencode(tmp_path / "missing"), dev, b"note", 0o644)


def test_a_touch_reaches_names_deeper_than_a_path_may_be_long(tmp_path: Path) -> None:
    name = "d" * 200
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(25):
        os.mkdir(name, dir_fd=here)
        here, old = os.open(name, os.O_RDONLY, dir_fd=here), here
        os.close(old)
    try:
        path = b"/".join([name.encode()] * 25)
        assert companion.touch(os.fsencode(tmp_path), tmp_path.stat().st_dev, path, 0o700)
        assert stat.S_IMODE(os.fstat(here).st_mode) == 0o700
    finally:
        os.close(here)


# ---------------------------------------------------------------- telling of a deletion


def test_without_proof_nothing_is_unlinked(tmp_path: Path) -> None:
    """A plain directory, or another daemon's mount, does not know the secret."""
    note = tmp_path / "note"
    note.write_text("precious")
    dev = tmp_path.stat().st_dev
    assert not companion.bury(os.fsencode(tmp_path), dev, b"note", b".vaultfs-secret")
    (tmp_path / ".vaultfs-secret").write_text("")  # not even if that name happens to exist
    assert not companion.bury(os.fsencode(tmp_path), dev, b"note", b".vaultfs-secret")
    assert not companion.bury(os.fsencode(tmp_path), dev, b"note", b"")
    assert note.read_text() == "precious"


def test_the_proof_must_be_of_that_very_errno(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "note"
    note.write_text("x")
    dev = tmp_path.stat().st_dev
    real = os.stat

    def answer(number: int) -> None:
        def stat(path: Any, **keywords: Any) -> os.stat_result:
            if path == b"secret":
                raise OSError(number, "")
            return real(path, **keywords)

        monkeypatch.setattr(os, "stat", stat)

    for number in (errno.ENOENT, errno.EACCES, errno.ENOTCONN, errno.EIO):
        answer(number)
        assert not companion.bury(os.fsencode(tmp_path), dev, b"note", b"secret")
    answer(errno.ECANCELED)
    assert not companion.bury(os.fsencode(tmp_path), dev + 1, b"note", b"secret")
    assert note.exists()
    assert companion.bury(os.fsencode(tmp_path), dev, b"note", b"secret")
    assert not note.exists()  # so the tests above would have seen it


def test_no_descriptor_is_left_open_by_a_walk_that_fails(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    before = sorted(os.listdir("/proc/self/fd"))
    for path in (b"missing", b"d/missing", b"d/missing/deeper", b"d"):
        companion.touch(os.fsencode(tmp_path), tmp_path.stat().st_dev, path, 0o755)
        companion.bury(os.fsencode(tmp_path), tmp_path.stat().st_dev, path, b"secret")
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("known", [True, False], ids=["known to the kernel", "never looked up"])
def test_a_deletion_outside_reaches_watchers_of_the_directory(
    tiny: Callable[..., TinyMount], watch: Callable[[Path], Watcher], known: bool
) -> None:
    mount = tiny(ANNOUNCE="1")
    if known:
        os.stat(mount.mountpoint / "a")
    watcher = watch(mount.mountpoint)
    mount.tell("delete a")
    watcher.wait_for(inotify_simple.flags.DELETE, "a")
    assert not (mount.mountpoint / "a").exists()
    assert (mount.mountpoint / "b").exists()


def test_a_name_that_came_back_is_not_told_as_deleted(
    tiny: Callable[..., TinyMount], watch: Callable[[Path], Watcher]
) -> None:
    mount = tiny(ANNOUNCE="1")
    watcher = watch(mount.mountpoint)
    mount.tell("bury a")
    mount.wait_for("UNLINK a ")
    mount.tell("announce b")
    seen: list[tuple[int, str]] = []
    eventually(lambda: seen.extend(watcher.seen(0.1)) or (ATTRIB, "b") in seen, "what follows is announced")
    assert (inotify_simple.flags.DELETE, "a") not in seen
    assert (mount.mountpoint / "a").exists()


def test_a_daemon_that_does_not_prove_to_know_us_gets_no_unlink(
    tiny: Callable[..., TinyMount], watch: Callable[[Path], Watcher]
) -> None:
    mount = tiny(ANNOUNCE="1", KNOWS_SECRET="0")
    watcher = watch(mount.mountpoint)
    mount.tell("bury a")
    mount.tell("announce b")
    watcher.wait_for(ATTRIB, "b")
    assert [line for line in mount.poll() if line.startswith("LOOKUP .vaultfs-")]
    assert not [line for line in mount.poll() if line.startswith("UNLINK")]


# ---------------------------------------------------------------- announcing, with a real companion


def test_what_is_announced_reaches_a_watcher(
    tmp_path: Path, watch: Callable[[Path], Watcher], announcer_of: Callable[..., Announcer]
) -> None:
    for name in ("note", "two words\n", "é"):
        (tmp_path / name).write_text("x")
    watcher = watch(tmp_path)
    announcer = announcer_of(tmp_path)
    for name in ("note", "two words\n", "é"):
        announcer.announce(os.fsencode(name), stat.S_IFREG | 0o644)
        watcher.wait_for(ATTRIB, name)
    assert announcer.lost == 0


class Looks:
    """Stands in for the real look, which in some sandboxes cannot tell that nobody watches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.somebody = False
        self.looks = 0
        self.touched: list[tuple[bytes, int]] = []
        monkeypatch.setattr(companion, "watched", self._watched)
        self.buried: list[bytes] = []
        monkeypatch.setattr(companion, "touch", lambda mountpoint, dev, path, mode: self.touched.append((path, mode)))
        monkeypatch.setattr(companion, "bury", lambda mountpoint, dev, path, secret: self.buried.append(path))

    def _watched(self, dev: int, shared: bool) -> bool:
        self.looks += 1
        return self.somebody


def test_nothing_is_touched_while_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    telling = companion.Companion(b"/", 1, 1, False, b"secret")
    telling.add([b"644 a", b"644 b"])
    telling.tell()
    assert (looks.looks, looks.touched) == (1, [])


def test_who_begins_to_watch_just_before_a_save_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that found nobody is no reason to drop what is announced after it."""
    looks = Looks(monkeypatch)
    telling = companion.Companion(b"/", 1, 1, False, b"secret")
    telling.add([b"644 before"])
    telling.tell()
    looks.somebody = True
    telling.add([b"600 after it began to watch"])
    telling.tell()
    assert looks.touched == [(b"after it began to watch", 0o600)]


def test_looks_are_spaced_out_when_saves_come_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companion, "LOOK_INTERVAL", 1000.0)
    looks = Looks(monkeypatch)
    looks.somebody = True
    telling = companion.Companion(b"/", 1, 1, False, b"secret")
    for number in range(10):
        telling.add([b"644 %d" % number])
        telling.tell()
    assert looks.looks == 1
    assert len(looks.touched) == 10


def test_what_is_announced_again_before_it_was_told_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    looks.somebody = True
    telling = companion.Companion(b"/", 1, 1, False, b"secret")
    telling.add([b"644 a", b"644 b b"])
    telling.add([b"600 a"])
    telling.tell()
    assert looks.touched == [(b"a", 0o600), (b"b b", 0o644)]


def test_the_last_that_happened_to_a_name_is_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    looks.somebody = True
    telling = companion.Companion(b"/", 1, 1, False, b"secret")
    telling.add([b"644 went", b"gone went", b"gone came", b"644 came"])
    telling.tell()
    assert (looks.touched, looks.buried) == ([(b"came", 0o644)], [b"went"])


def test_the_mount_knows_its_companion_by_the_thread_id(
    tiny: Callable[..., TinyMount], watch: Callable[[Path], Watcher]
) -> None:
    """chmod to the same mode on a real FUSE mount: one SETATTR by the announced thread, IN_ATTRIB for the directory
    and for the file."""
    mount = tiny(ANNOUNCE="1")
    in_directory, on_file = watch(mount.mountpoint), watch(mount.mountpoint / "a")
    mount.tell("announce a")
    in_directory.wait_for(ATTRIB, "a")
    on_file.wait_for(ATTRIB, "")
    assert mount.wait_for("SETATTR 2 ").split() == ["SETATTR", "2", str(mount.companion), "0o644"]


def test_many_announcements_of_one_name_are_fewer_touches(
    tmp_path: Path, watch: Callable[[Path], Watcher], announcer_of: Callable[..., Announcer]
) -> None:
    (tmp_path / "note").write_text("x")
    (tmp_path / "last").write_text("x")
    watcher = watch(tmp_path)
    announcer = announcer_of(tmp_path)
    for _ in range(2000):
        announcer.announce(b"note", 0o644)
    announcer.announce(b"last", 0o644)
    seen: list[tuple[int, str]] = []
    eventually(lambda: seen.extend(watcher.seen(0.1)) or (ATTRIB, "last") in seen, "the last name is announced")
    assert 1 <= seen.count((ATTRIB, "note")) < 1000


def test_a_flood_never_holds_up_the_daemon(tmp_path: Path, announcer_of: Callable[..., Announcer]) -> None:
    announcer = announcer_of(tmp_path)
    os.kill(announcer.thread_id, signal.SIGSTOP)
    try:
        for number in range(60_000):
            announcer.announce(b"some/directory/note-%d" % number, 0o644)
        assert announcer.lost > 0
    finally:
        os.kill(announcer.thread_id, signal.SIGCONT)


def test_a_path_too_long_for_the_pipe_is_left_out(tmp_path: Path, announcer_of: Callable[..., Announcer]) -> None:
    announcer = announcer_of(tmp_path)
    announcer.announce(b"a/" * 3000, 0o644)
    assert announcer.lost == 1


def test_a_companion_that_died_is_disowned_and_started_again(
    tmp_path: Path,
    watch: Callable[[Path], Watcher],
    announcer_of: Callable[..., Announcer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "note").write_text("x")
    watcher = watch(tmp_path)
    announcer = announcer_of(tmp_path)
    first = announcer.thread_id
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    announcer.announce(b"note", 0o644)
    assert announcer.lost == 1 and announcer.thread_id == first  # not yet: a companion that cannot live is no storm
    monkeypatch.setattr("vaultfs.mount.announce._START_AGAIN", 0.0)
    announcer.announce(b"note", 0o644)
    assert announcer.thread_id not in (0, first)
    announcer.announce(b"note", 0o644)
    watcher.wait_for(ATTRIB, "note")


def test_without_a_companion_announcing_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    announcer = Announcer(os.fsencode(tmp_path), tmp_path.stat().st_dev)
    announcer.announce(b"note", 0o644)
    assert not announcer.start()
    announcer.announce(b"note", 0o644)
    assert announcer.thread_id == 0
    announcer.stop()


def test_stopping_ends_the_companion_and_frees_its_number(
    tmp_path: Path, announcer_of: Callable[..., Announcer]
) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    announcer = announcer_of(tmp_path)
    pid = announcer.thread_id
    announcer.stop()
    announcer.stop()
    assert announcer.thread_id == 0
    assert procs.start_time(pid) == 0
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_companion_holds_neither_the_mount_nor_its_connection(tiny: Callable[..., TinyMount]) -> None:
    mount = tiny(ANNOUNCE="1")
    links = [os.readlink(f"/proc/{mount.companion}/fd/{fd}") for fd in os.listdir(f"/proc/{mount.companion}/fd")]
    links.append(os.readlink(f"/proc/{mount.companion}/cwd"))
    assert not [link for link in links if "fuse" in link or link.startswith(str(mount.mountpoint))]


# ---------------------------------------------------------------- the death of the daemon


def gone(pid: int) -> bool:
    return procs.start_time(pid) == 0


def test_the_companion_ends_with_a_killed_daemon(tiny: Callable[..., TinyMount]) -> None:
    mount = tiny(ANNOUNCE="1")
    mount.process.kill()
    mount.process.wait()
    eventually(lambda: gone(mount.companion) or procs.is_exiting(mount.companion), "the companion has ended")


def test_a_daemon_killed_while_it_answers_its_companion_dies_at_once(
    tiny: Callable[..., TinyMount], watch: Callable[[Path], Watcher]
) -> None:
    """With the announcement in a thread of the daemon this hangs until the connection is aborted by hand."""
    mount = tiny(ANNOUNCE="1", HOLD="1")
    watch(mount.mountpoint)
    mount.tell("announce slow")
    mount.wait_for(f"LOOKUP slow {mount.companion}")
    mount.process.kill()
    mount.process.wait(30)
    eventually(lambda: gone(mount.companion) or procs.is_exiting(mount.companion), "the companion has ended")


@pytest.mark.skipif(
    os.geteuid() != 0 and not os.path.ismount("/sys/fs/fuse/connections"),
    reason="needs fusectl or the right to mount it",
)
def test_a_daemon_killed_while_the_kernel_waits_for_a_program_is_let_go(tiny: Callable[..., TinyMount]) -> None:
    """The invalidating thread waits for a directory that a lookup holds; the lookup waits for the daemon."""
    mount = tiny(ANNOUNCE="1", HOLD="1")
    program = subprocess.Popen(["stat", str(mount.mountpoint / "slow")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        mount.wait_for("LOOKUP slow")
        mount.tell("invalidate x")
        mount.wait_for("INVALIDATING")
        eventually(lambda: threads_in_state(mount.process.pid, b"D"), "the thread waits in the kernel")
        mount.process.kill()
        mount.process.wait(30)
        _, errors = program.communicate(timeout=30)
        assert program.returncode != 0 and errors
    finally:
        mount.close()  # before we wait for a program that waits for it
        program.kill()
        program.communicate()


@pytest.mark.skipif(
    os.geteuid() != 0 and not os.path.ismount("/sys/fs/fuse/connections"),
    reason="needs fusectl or the right to mount it",
)
def test_a_companion_that_comes_too_late_to_be_told_lets_go_too(tiny: Callable[..., TinyMount]) -> None:
    """The daemon's main thread dies before the companion has asked to hear of it."""
    mount = tiny(ANNOUNCE="1", SLEEPY_COMPANION="1", HOLD="1")
    program = subprocess.Popen(["stat", str(mount.mountpoint / "slow")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        mount.wait_for("LOOKUP slow")
        mount.tell("invalidate x")
        eventually(lambda: threads_in_state(mount.process.pid, b"D"), "the thread waits in the kernel")
        mount.process.kill()
        eventually(
            lambda: Path(f"/proc/{mount.process.pid}/stat").read_bytes().split()[2] == b"Z", "its main thread died"
        )
        os.kill(mount.companion, signal.SIGCONT)
        mount.process.wait(30)
        program.communicate(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):  # ended, as it should
            os.kill(mount.companion, signal.SIGCONT)
        mount.close()  # before we wait for a program that waits for it
        program.kill()
        program.communicate()


def threads_in_state(pid: int, state: bytes) -> list[str]:
    found = []
    for tid in os.listdir(f"/proc/{pid}/task"):
        text = Path(f"/proc/{pid}/task/{tid}/stat").read_bytes()
        if text[text.rfind(b")") + 2 :][:1] == state:
            found.append(tid)
    return found


@pytest.mark.parametrize(
    ("then", "number"),
    [("time.sleep(100)", signal.SIGTERM), ("f.close(); time.sleep(100)", 0)],
    ids=["killed", "closes"],
)
def test_a_dying_program_is_told_from_a_closing_one_while_its_flush_waits(
    tiny: Callable[..., TinyMount], then: str, number: int
) -> None:
    """What the flush handler of the mount will see of its opener."""
    mount = tiny(HOLD="1")
    path = mount.mountpoint / "a"
    shown = kernel.statx(kernel.AT_FDCWD, os.fsencode(path))
    place = (shown.mnt_id, shown.dev, {shown.ino})
    script = f"import time; f = open({str(path)!r}, 'r+b', buffering=0); print(flush=True); input(); {then}"
    program = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert program.stdout is not None and program.stdin is not None
        program.stdout.readline()
        assert len(procs.write_descriptors(program.pid, *place) or []) == 1
        if number:
            program.send_signal(number)
        else:
            program.stdin.write(b"\n")
            program.stdin.flush()
        mount.wait_for("FLUSH")
        assert procs.death_signal(program.pid) == number
        assert procs.is_exiting(program.pid) == bool(number)
        assert procs.write_descriptors(program.pid, *place) == []
    finally:
        mount.tell("go")
        program.kill()
        program.communicate()
