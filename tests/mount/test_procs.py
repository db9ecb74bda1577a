"""Facts about other processes: asked of real ones, in every state that a close can find them in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vaultfs import kernel
from vaultfs.mount import procs

Run = Callable[[str], "Child"]


class Child:
    """A Python program that prints a line when it is where the test wants it, and goes on when told."""

    def __init__(self, program: str, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid = self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def become_zombie(self) -> None:
        """Wait until it has ended, without reaping it."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    children: list[Child] = []

    def start(program: str) -> Child:
        children.append(Child(program, tmp_path))
        return children[-1]

    yield start
    for child in children:
        child.process.kill()
        child.process.communicate()


@pytest.fixture
def gone() -> int:
    """A pid that is not in use (just was)."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def identity_from(text: str) -> tuple[int, int, set[int]]:
    mount, dev, ino = map(int, text.split())
    return mount, dev, {ino}


def identity(path: Path) -> tuple[int, int, set[int]]:
    status = kernel.statx(kernel.AT_FDCWD, os.fsencode(path))
    return status.mnt_id, status.dev, {status.ino}


# ---------------------------------------------------------------- who is who


def test_a_thread_belongs_to_its_process() -> None:
    tids: list[int] = []
    thread = threading.Thread(target=lambda: tids.append(procs.thread_group(threading.get_native_id())))
    thread.start()
    thread.join()
    assert tids == [os.getpid()]
    assert procs.thread_group(os.getpid()) == os.getpid()


def test_a_thread_that_is_gone_belongs_to_nobody(gone: int) -> None:
    assert procs.thread_group(gone) == 0


def test_start_times_order_processes_and_do_not_change(run: Run, gone: int) -> None:
    child = run("input()")
    first = procs.start_time(child.pid)
    assert first >= procs.start_time(os.getpid()) > 0
    assert procs.start_time(child.pid) == first
    assert procs.start_time(gone) == 0


@pytest.mark.parametrize("name", ["a b", "x) S 1 1", ") (", "))) 0 0", "new\nline", "é"])
def test_a_name_made_to_mislead_changes_no_fact(run: Run, name: str) -> None:
    child = run(f"""
        import sys
        open("/proc/self/comm", "wb").write({name.encode()!r})
        print(flush=True); input()
    """)
    child.line()
    assert procs.program(child.pid) == name
    assert next(procs.ancestors(child.pid)) == os.getpid()
    assert procs.start_time(child.pid) >= procs.start_time(os.getpid())
    assert procs.death_signal(child.pid) == 0
    child.process.kill()
    child.become_zombie()
    assert procs.death_signal(child.pid) == signal.SIGKILL


def test_a_name_that_is_no_text_can_still_be_shown(run: Run, gone: int) -> None:
    child = run("""
        open("/proc/self/comm", "wb").write(b"ab\\xff")
        print(flush=True); input()
    """)
    child.line()
    assert procs.program(child.pid) == "ab\\xff"
    procs.program(child.pid).encode()
    assert procs.program(gone) == ""


def test_ancestors_lead_from_a_grandchild_through_us_to_init(run: Run) -> None:
    child = run("""
        import subprocess, sys
        grandchild = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        print(grandchild.pid, flush=True); input(); grandchild.kill()
    """)
    grandchild = int(child.line())
    line = list(procs.ancestors(grandchild))
    assert line[:2] == [child.pid, os.getpid()]
    assert list(procs.ancestors(os.getpid())) == line[2:]


def test_the_ancestors_of_a_process_that_is_gone_are_none(gone: int) -> None:
    assert list(procs.ancestors(gone)) == []


FAMILY = """
    import subprocess, sys, threading
    second = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)"
    second += "; print(p.pid, flush=True); input(); p.kill()"
    found = []
    hold = threading.Event()
    def start():  # from a thread of its own, which lives on: its children are listed under that thread
        child = subprocess.Popen([sys.executable, "-c", second], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        found.extend([child.pid, int(child.stdout.readline())])
        print(*found, flush=True)
        hold.wait()
    threading.Thread(target=start, daemon=True).start()
    input()
"""


def test_descendants_are_children_of_every_thread_and_theirs(run: Run) -> None:
    child = run(FAMILY)
    family = [int(word) for word in child.line().split()]
    assert procs.descendants(child.pid) == family
    assert set(family) < set(procs.descendants(os.getpid()))


def test_descendants_are_found_without_children_files_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    child = run(FAMILY)
    family = [int(word) for word in child.line().split()]
    monkeypatch.setattr(procs, "_children", lambda pid: None)
    assert procs.descendants(child.pid) == family


def test_descendants_are_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    child = run(FAMILY)
    child.line()
    monkeypatch.setattr(procs, "_MANY", 1)
    assert len(procs.descendants(child.pid)) == 1


def test_a_process_that_is_gone_has_no_descendants(gone: int) -> None:
    assert procs.descendants(gone) == []


# ---------------------------------------------------------------- who has it open


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        (os.O_RDONLY, False),
        (os.O_WRONLY, True),
        (os.O_RDWR, True),
        (os.O_WRONLY | os.O_APPEND, True),
        (os.O_PATH, False),
    ],
)
def test_only_descriptors_open_for_writing_count(tmp_path: Path, flags: int, counts: bool) -> None:
    path = tmp_path / "note"
    path.write_text("x")
    descriptor = os.open(path, flags)
    try:
        found = procs.write_descriptors(os.getpid(), *identity(path))
        assert found == ([descriptor] if counts else [])
        assert ((os.O_ACCMODE & flags) != os.O_RDONLY) == counts  # what fdinfo's flags would say
    finally:
        os.close(descriptor)


def test_the_file_is_known_by_its_identity_and_not_by_its_name(tmp_path: Path) -> None:
    path, other = tmp_path / "note", tmp_path / "other"
    other.write_text("")
    with path.open("w") as ours, other.open("w"), path.open("w") as again:
        asked = identity(path)
        path.rename(tmp_path / "moved")
        (tmp_path / "moved").unlink()
        path.write_text("another file of that name")
        assert procs.write_descriptors(os.getpid(), *asked) == [ours.fileno(), again.fileno()]
        assert procs.write_descriptors(os.getpid(), asked[0] + 1, asked[1] + 1, asked[2]) == []
    assert procs.write_descriptors(os.getpid(), *asked) == []


def test_a_path_longer_than_a_page_hides_no_descriptor(tmp_path: Path) -> None:
    where = os.open(tmp_path, os.O_RDONLY)
    name = "d" * 250
    for _ in range(20):
        os.mkdir(name, dir_fd=where)
        deeper = os.open(name, os.O_RDONLY, dir_fd=where)
        os.close(where)
        where = deeper
    descriptor = os.open("note", os.O_WRONLY | os.O_CREAT, dir_fd=where)
    try:
        status = kernel.statx(descriptor, b"", kernel.AT_EMPTY_PATH)
        place = (status.mnt_id, status.dev, {status.ino})
        assert procs.write_descriptors(os.getpid(), *place) == [descriptor]
    finally:
        os.close(descriptor)
        os.close(where)


def test_the_look_is_made_without_asking_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "note"
    path.touch()
    place = identity(path)

    def spy(*_: object) -> kernel.Statx:
        raise AssertionError("a look at the file itself, which on the mount is a request to ourselves")

    monkeypatch.setattr(kernel, "statx", spy)
    with path.open("w") as file:
        assert procs.write_descriptors(os.getpid(), *place) == [file.fileno()]


def test_an_ended_leader_thread_hides_neither_descriptors_nor_life(run: Run, tmp_path: Path) -> None:
    child = run("""
        import ctypes, os, threading, time
        descriptor = os.open("note", os.O_WRONLY | os.O_CREAT)
        leader = os.getpid()
        def rest():
            while open(f"/proc/{leader}/stat").read().rsplit(")", 1)[1].split()[0] != "Z":
                time.sleep(0.01)
            print(descriptor, os.dup(descriptor), flush=True)
            time.sleep(100)
        threading.Thread(target=rest).start()
        ctypes.CDLL(None).pthread_exit(None)
    """)
    held = [int(word) for word in child.line().split()]
    assert procs.write_descriptors(child.pid, *identity(tmp_path / "note")) == held
    assert procs.distinct_open_files(child.pid, held) == 1
    assert procs.death_signal(child.pid) == 0


def test_a_process_that_is_gone_or_a_zombie_holds_nothing(run: Run, tmp_path: Path, gone: int) -> None:
    child = run("file = open('note', 'w'); print(flush=True); input()")
    child.line()
    asked = identity(tmp_path / "note")
    assert procs.write_descriptors(child.pid, *asked)
    child.go()
    child.become_zombie()
    assert procs.write_descriptors(child.pid, *asked) == []
    assert procs.write_descriptors(gone, *asked) == []


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")


@as_root
def test_a_process_that_cannot_be_looked_into_says_so(tmp_path: Path) -> None:
    path = tmp_path / "note"
    with path.open("w") as file:
        answers = ask_as_nobody(
            lambda: (
                procs.write_descriptors(os.getppid(), *identity_from(os.environ["ASKED"])),
                procs.distinct_open_files(os.getppid(), [file.fileno()]),
                procs.thread_group(os.getppid()) == os.getppid(),
                procs.start_time(os.getppid()) > 0,
            ),
            ASKED=" ".join(str(one) for one in (*identity(path)[:2], *identity(path)[2])),
        )
    assert answers == "(None, 1, True, True)"


@as_root
def test_an_unprivileged_daemon_knows_that_an_ended_process_of_its_user_holds_nothing(tmp_path: Path) -> None:
    """Such a process belongs to root in /proc and cannot be looked into any more."""
    note = tmp_path / "note"
    descriptor = os.open(note, os.O_WRONLY | os.O_CREAT)
    asked = identity(note)

    def question() -> object:
        os.set_inheritable(descriptor, True)
        # By exec, as programs come about: one that only changed its user forbids to be looked into.
        child = os.posix_spawn("/bin/sh", ["sh", "-c", "echo; read x"], {}, file_actions=plumbing)
        os.read(out, 1)  # it has come as far as its first command
        held = procs.write_descriptors(child, *asked)
        os.kill(child, signal.SIGTERM)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        ended = procs.write_descriptors(child, *asked), procs.death_signal(child), procs.is_exiting(child)
        return held == [descriptor], ended

    out, its_out = os.pipe()
    its_in, unused = os.pipe()
    plumbing = [(os.POSIX_SPAWN_DUP2, its_in, 0), (os.POSIX_SPAWN_DUP2, its_out, 1)]
    try:
        assert ask_as_nobody(question) == "(True, ([], 15, True))"
    finally:
        for fd in (descriptor, out, its_out, its_in, unused):
            os.close(fd)


def ask_as_nobody(question: Callable[[], object], **environment: str) -> str:
    """The answer to `question` in a forked child without any rights, as text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.environ.update(environment)
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            os.write(writing, repr(question()).encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(pid, 0)
    return text


def kcmp_works() -> bool:
    try:
        return kernel.kcmp(os.getpid(), os.getpid(), kernel.KCMP_FILE, 0, 0)
    except OSError:
        return False


@pytest.mark.skipif(not kcmp_works(), reason="kcmp(2) is not to be had here")
def test_duplicates_are_one_open_file_and_separate_opens_are_not(tmp_path: Path, gone: int) -> None:
    path = tmp_path / "note"
    with path.open("w") as first, path.open("w") as second:
        copies = [os.dup(first.fileno()), os.dup(second.fileno()), os.dup(first.fileno())]
        try:
            fds = [first.fileno(), second.fileno(), *copies]
            assert procs.write_descriptors(os.getpid(), *identity(path)) == sorted(fds)
            assert procs.distinct_open_files(os.getpid(), fds) == 2
            assert procs.distinct_open_files(os.getpid(), [first.fileno(), copies[0]]) == 1
            assert procs.distinct_open_files(os.getpid(), []) == 0
            assert procs.distinct_open_files(gone, fds) == 0
        finally:
            for copy in copies:
                os.close(copy)
        assert procs.distinct_open_files(os.getpid(), fds) == 2  # the closed ones do not count


# ---------------------------------------------------------------- who is dying


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGABRT])
def test_a_process_killed_by_a_signal_died_of_it(run: Run, number: signal.Signals) -> None:
    child = run("import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); print(flush=True); input()")
    child.line()
    assert (procs.death_signal(child.pid), procs.is_exiting(child.pid)) == (0, False)
    os.kill(child.pid, number)
    child.become_zombie()
    assert (procs.death_signal(child.pid), procs.is_exiting(child.pid)) == (number, True)


@pytest.mark.parametrize("code", [0, 1, 9, 15, 130, 143])
def test_a_process_that_exits_by_itself_died_of_no_signal(run: Run, code: int) -> None:
    child = run(f"import os; os._exit({code})")
    child.become_zombie()
    assert (procs.death_signal(child.pid), procs.is_exiting(child.pid)) == (0, True)


def test_a_process_that_catches_the_signal_and_exits_died_of_none(run: Run) -> None:
    child = run("import signal, sys; signal.signal(15, lambda *_: sys.exit(1)); print(flush=True); input()")
    child.line()
    os.kill(child.pid, signal.SIGTERM)
    child.become_zombie()
    assert procs.death_signal(child.pid) == 0


def test_a_stopped_process_is_not_dying(run: Run) -> None:
    child = run("print(flush=True); input()")
    child.line()
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert (procs.death_signal(child.pid), procs.is_exiting(child.pid)) == (0, False)


def test_all_threads_of_a_process_that_exits_normally_die_of_no_signal(run: Run) -> None:
    """The kernel ends the other threads by SIGKILL: PF_SIGNALED shows on them, a signal in the exit code does not."""
    child = run("""
        import os, threading, time
        for _ in range(20):
            threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        print(flush=True); input(); os._exit(3)
    """)
    child.line()
    seen: set[int] = set()
    child.go()
    while True:
        threads = os.listdir(f"/proc/{child.pid}/task")
        seen.update(procs.death_signal(int(tid)) for tid in threads)
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            break
    assert seen == {0}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_is_told_by_its_signal_once_its_files_are_gone(run: Run, number: signal.Signals) -> None:
    """A big address space takes the kernel a while to take down, before the files: until then nothing is said."""
    child = run("""
        block = bytearray(300 << 20)
        for at in range(0, len(block), 4096):
            block[at] = 1
        print(flush=True); input()
    """)
    child.line()
    os.kill(child.pid, number)
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        assert procs.death_signal(child.pid) in (0, number)
        time.sleep(0)
    assert procs.death_signal(child.pid) == number


def test_a_process_that_is_gone_died_of_no_signal(gone: int) -> None:
    assert procs.death_signal(gone) == 0
    assert not procs.is_dumping_core(gone)


def test_a_process_at_work_dumps_no_core() -> None:
    assert not procs.is_dumping_core(os.getpid())
