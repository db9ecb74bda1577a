"""A real mount for a test: a real daemon, real client processes, and a teardown that misses nothing.

`MountedVault` owns everything that one mounted test needs: a directory with the vault and the mountpoint in it,
the daemon (a subprocess), and every client program. Its life has three parts.

`start()` runs `vaultfs mount` and returns when the mount answers.

While mounted, a test works through

- `mnt`, the mountpoint, and `behind`, the vault directory seen from behind (also when it is mounted over);
- `call(function, …)` and `spawn(function, …)`, which run a function *in a process of its own* (the function's
  source is sent, so it must import what it uses), `shell(script, …)` and `run(argv)`: always as the mount's user
  and with a time limit that is a guard against hanging, never something a test asserts;
- `cli(…)`, `status()`, `counters()`, `kept()`: what `vaultfs` itself says;
- `watch_behind()`: what inotify saw happen in the vault directory.

`finish()` unmounts and asserts that nothing is left: no client, no open file in the daemon, no mount, no daemon (and
that it ended with 0), no lock, pending or staging entry, no draft or conflict copy that the test did not
announce, no WARNING or worse in the log that the test did not announce, no process. `destroy()` is the robust end for a
test that failed: it asserts nothing and leaves nothing.

A daemon that hangs would take the test process with it, since a process waiting for FUSE only hears fatal signals.
So a watchdog kills a daemon that has lived for longer than any test may take; the kernel then answers ENOTCONN and the
test fails instead of wedging the run.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import site
import stat
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import inotify_simple

REPOSITORY = Path(__file__).resolve().parents[2]
_NOBODY = pwd.getpwnam("nobody")  # fusermount3 serves only users who have a name
TEST_UID, TEST_GID = _NOBODY.pw_uid, _NOBODY.pw_gid
# Seconds that a client may take before it counts as hanging. Nothing is asserted about how long it takes.
GUARD = float(os.environ.get("VAULTFS_TEST_GUARD", "60"))
DAEMON_GUARD = 110.0  # seconds; a daemon older than that is killed (pytest's own limit is 120)
# In the environment of every process of one test: that is how leftovers are found.
TOKEN_VARIABLE = "VAULTFS_TEST_TOKEN"
ALARMING = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|Traceback \(most recent call last\)")
LOCK_NAME = re.compile(r".+\.lock$|.+\.pending$")
CONFLICT_NAME = re.compile(r"\.sync-conflict-\d{8}-\d{6}-[^.]+")


class Hung(AssertionError):
    """A client program did not end within the guard."""


def scaled(default: float, variable: str = "VAULTFS_TEST_SCALE") -> float:
    """`default`, times what the environment asks for (`VAULTFS_TEST_SCALE=10` for a soak)."""
    return default * float(os.environ.get(variable, "1"))


def eventually(condition: Callable[[], Any], what: str = "", limit: float = GUARD / 2, step: float = 0.02) -> Any:
    """Waits until `condition()` is true and returns its value; fails with `what` after `limit` seconds (a guard)."""
    deadline = time.monotonic() + limit
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"never came true: {what or inspect.getsource(condition).strip()}")
        time.sleep(step)


def in_mountinfo(path: Path) -> str | None:
    """The line of /proc/self/mountinfo whose mountpoint is `path`, the topmost one."""
    wanted = str(path).replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011").replace("\n", "\\012")
    found = None
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        if line.split(" ")[4] == wanted:
            found = line
    return found


def is_served(path: Path) -> bool:
    """Is a FUSE file system mounted at `path`?"""
    line = in_mountinfo(path)
    return line is not None and line.partition(" - ")[2].startswith("fuse")


def _status_of(pid: int) -> dict[str, str]:
    """/proc/PID/status: the one file there that nobody ever has to wait for.

    The others (environ, stat, the links in fd) wait for a process that is in execve(2), and that one may be waiting for
    a mount that hangs: then whoever looked at all processes of the machine would hang with it.
    """
    try:
        lines = Path("/proc", str(pid), "status").read_text(errors="replace").splitlines()
    except OSError:
        return {}  # ended meanwhile
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def is_running(pid: int) -> bool:
    """Does `pid` live? A zombie does not."""
    return _status_of(pid).get("State", "Z")[0] not in "ZX"


def parent_of(pid: int) -> int:
    """The pid of the process that started `pid`; 0 if that one is gone."""
    return int(_status_of(pid).get("PPid", "0"))


def adopt_orphans() -> None:
    """Makes this process the parent of all descendants whose own parents end: so none is lost sight of."""
    PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants() -> list[int]:
    """The living processes below this one."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            children.setdefault(parent_of(int(entry)), []).append(int(entry))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.extend(pid for pid in below if is_running(pid))
        waiting.extend(below)
    return found


def processes_with(token: str) -> list[int]:
    """The pids of the living descendants of this process that carry `token` in their environment."""
    needle = f"{TOKEN_VARIABLE}={token}".encode()
    return [pid for pid in descendants() if needle in _environment_of(pid).split(b"\0")]


def describe(pid: int) -> str:
    try:
        return f"{pid} {Path('/proc', str(pid), 'cmdline').read_bytes().replace(chr(0).encode(), b' ')[:200]!r}"
    except OSError:
        return f"{pid} (gone)"


# ---------------------------------------------------------------------------------------------------------- users


# In a child, since setpriv still has its capabilities when it starts the first interpreter: that one starting proves
# nothing about the daemon, which starts itself again.
_IMPORT_IN_A_CHILD = (
    "import subprocess, sys;"
    " subprocess.run([sys.executable, '-c', 'import pyfuse3, trio, msgspec, vaultfs'], check=True)"
)


class Interpreter:
    """A Python that a user can start, with vaultfs and all it needs importable.

    The virtual environment of the tests, or the Python below it, may lie under a home directory (`/root`,
    `~/.pyenv`) that the unprivileged test user cannot enter. Then what it needs is bind-mounted to a place that it can.
    """

    def __init__(self) -> None:
        self._binds: list[Path] = []
        self._directory: Path | None = None
        self._own = (sys.executable, [str(REPOSITORY)])
        self._others: tuple[str, list[str]] | None = None
        self._libraries: Path | None = None  # where a Python that was bound elsewhere finds its libpython

    def for_user(self, uid: int) -> tuple[str, list[str]]:
        """(executable, PYTHONPATH) for `uid`."""
        if uid == os.getuid():
            return self._own
        if self._others is None:
            self._others = self._make_reachable()
        return self._others

    def variables(self, uid: int) -> dict[str, str]:
        """What a program of `uid` needs in its environment to start this Python."""
        variables = {"PYTHONPATH": os.pathsep.join(self.for_user(uid)[1]), "PYTHONDONTWRITEBYTECODE": "1"}
        if uid != os.getuid() and self._libraries is not None:
            variables["LD_LIBRARY_PATH"] = str(self._libraries)
        return variables

    def _works(self, executable: str, path: Sequence[str]) -> bool:
        try:
            return (
                subprocess.run(
                    [*as_user(TEST_UID), executable, "-c", _IMPORT_IN_A_CHILD],
                    env={
                        "PATH": os.environ["PATH"],
                        "PYTHONPATH": os.pathsep.join(path),
                        "PYTHONDONTWRITEBYTECODE": "1",
                        **({"LD_LIBRARY_PATH": str(self._libraries)} if self._libraries else {}),
                    },
                    cwd="/",
                    capture_output=True,
                    timeout=GUARD,
                ).returncode
                == 0
            )
        except OSError:
            return False

    def _make_reachable(self) -> tuple[str, list[str]]:
        if self._works(*self._own):
            return self._own
        self._directory = Path(tempfile.mkdtemp(prefix="vaultfs-python-"))
        self._directory.chmod(0o755)
        base = self._bind(Path(sys.base_prefix), "base")
        self._libraries = base / "lib"
        paths = [self._bind(REPOSITORY, "repository")]
        for number, directory in enumerate(
            dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        ):
            paths.append(self._bind(Path(directory), f"site{number}"))
        if site.ENABLE_USER_SITE and Path(site.getusersitepackages()).is_dir():
            paths.append(self._bind(Path(site.getusersitepackages()), "user-site"))
        real = Path(os.path.realpath(sys.executable))
        executable = str(base / real.relative_to(os.path.realpath(sys.base_prefix)))
        strings = [str(path) for path in paths]
        if not self._works(executable, strings):
            raise AssertionError(f"no Python that an unprivileged user can start: {executable} with {strings}")
        return executable, strings

    def _bind(self, source: Path, name: str) -> Path:
        assert self._directory is not None
        target = self._directory / name
        target.mkdir()
        subprocess.run(["mount", "--bind", str(source), str(target)], check=True)
        self._binds.append(target)
        return target

    def close(self) -> None:
        for target in reversed(self._binds):
            subprocess.run(["umount", "-l", str(target)], check=False)
        if self._directory is not None:
            for entry in self._directory.iterdir():
                entry.rmdir()  # empty mountpoints; anything else must not be removed by a test's cleanup
            self._directory.rmdir()


INTERPRETER = Interpreter()


def as_user(uid: int) -> list[str]:
    """The words before a command that make it run as `uid`."""
    if uid == os.getuid():
        return []
    return ["setpriv", f"--reuid={uid}", f"--regid={TEST_GID}", "--clear-groups", "--"]


# -------------------------------------------------------------------------------------------------------- clients


class Client:
    """A program that runs beside the test and can be talked to line by line: `ask`, `say`, `hear`, `result`."""

    def __init__(self, argv: Sequence[str], *, env: dict[str, str], cwd: str) -> None:
        self._errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=env, cwd=cwd, text=True
        )
        self.pid = self.process.pid

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def say(self, line: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, guard: float = GUARD) -> str:
        """The next line the program prints; its end is an error."""
        assert self.process.stdout is not None
        timer = threading.Timer(guard, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            code = self.process.wait(GUARD)
            raise AssertionError(f"client ended with {code} instead of answering: {self.errors()}")
        return line.rstrip("\n")

    def ask(self, line: str = "go", guard: float = GUARD) -> str:
        self.say(line)
        return self.hear(guard)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def end(self, guard: float = GUARD) -> tuple[int, str]:
        """Closes the program's input, waits for its end: (exit code, what else it printed)."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended already, without listening
            self.process.stdin.close()
        hung = threading.Event()
        timer = threading.Timer(guard, lambda: (hung.set(), self.process.kill()))
        timer.start()
        try:
            output = self.process.stdout.read()
            self.process.wait()
        finally:
            timer.cancel()
        if hung.is_set():
            raise Hung(f"client {self.process.args!r:.300} did not end: {self.errors()}")
        return self.process.returncode, output

    def result(self, guard: float = GUARD) -> Any:
        """The value that the function of `spawn` returned; its exception fails the test."""
        code, output = self.end(guard)
        if code != 0:
            raise AssertionError(f"client ended with {code}: {self.errors()}")
        for line in reversed(output.splitlines()):
            if line.startswith("\x01"):
                return json.loads(line[1:])
        return None

    def kill(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return self.process.wait(GUARD)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # in the kernel, waiting for the mount: ends with the daemon
                self.process.wait(GUARD)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # what was to be said to a program that has ended
                    stream.close()
        self._errors.close()


_PROLOGUE = """
from __future__ import annotations
from typing import Any
import json as _json, sys as _sys
def hear():
    line = _sys.stdin.readline()
    if not line:
        raise SystemExit("the test is gone")
    return line.rstrip("\\n")
def say(text="ok"):
    print(text, flush=True)
"""


def source_of(function: Callable[..., Any], arguments: Sequence[Any]) -> str:
    """A program that calls `function` with `arguments` (JSON values and paths) and prints the value as JSON.

    Inside, `hear()` reads a line from the test and `say(text)` sends one.
    """
    plain = json.dumps([str(argument) if isinstance(argument, Path) else argument for argument in arguments])
    return (
        _PROLOGUE
        + textwrap.dedent(inspect.getsource(function))
        + f"\n_value = {function.__name__}(*_json.loads({plain!r}))\nprint('\\x01' + _json.dumps(_value), flush=True)\n"
    )


def hear() -> str:
    """Inside a function given to `spawn`: the next line from the test. (Here only for linters and type checkers.)"""
    raise NotImplementedError("runs in a client process only")


def say(text: str = "ok") -> None:
    """Inside a function given to `spawn`: a line to the test. (Here only for linters and type checkers.)"""
    raise NotImplementedError("runs in a client process only")


# -------------------------------------------------------------------------------------------------------- inotify


class Event(tuple[str, str]):
    """(what, name), `what` being one or more of inotify's names joined by `|`."""

    @property
    def what(self) -> str:
        return self[0]

    @property
    def name(self) -> str:
        return self[1]


class Watcher:
    """Collects inotify events of one directory in a thread; `seen()` gives them in the kernel's order."""

    _MASK = (
        inotify_simple.flags.CREATE
        | inotify_simple.flags.DELETE
        | inotify_simple.flags.MOVED_FROM
        | inotify_simple.flags.MOVED_TO
        | inotify_simple.flags.MODIFY
        | inotify_simple.flags.ATTRIB
        | inotify_simple.flags.CLOSE_WRITE
    )

    def __init__(
        self, directory: Path, *, mask: int | None = None, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self._inotify = inotify_simple.INotify(nonblocking=True)
        self._inotify.add_watch(str(directory), self._MASK if mask is None else mask)
        self._events: list[Event] = []
        self._on_event = on_event
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        while not self._stop.is_set():
            for event in self._inotify.read(timeout=20):
                names = "|".join(str(flag.name) for flag in inotify_simple.flags.from_mask(event.mask))
                found = Event((names, event.name))
                self._events.append(found)
                if self._on_event is not None:
                    try:
                        self._on_event(found)
                    except BaseException as failure:  # told to the test by seen(); a thread cannot fail it
                        self._failure = self._failure or failure

    def seen(self, settle: float = 0.15) -> list[Event]:
        """All events so far, once none has come for `settle` seconds."""
        count = -1
        while count != len(self._events):
            count = len(self._events)
            time.sleep(settle)
        if self._failure is not None:
            raise self._failure
        return list(self._events)

    def publishes(self, name: str) -> int:
        """How many times a new object was put at `name` (made, linked, renamed or exchanged into place)."""
        return sum(1 for event in self.seen() if event.name == name and re.search("MOVED_TO|CREATE", event.what))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._inotify.close()


# ------------------------------------------------------------------------------------------------------ the mount


class MountedVault:
    """One vault, one daemon, and every process that a test starts around them. See the file's docstring."""

    def __init__(
        self,
        *,
        options: str = "",
        files: dict[str, bytes | str] | None = None,
        over_itself: bool = False,
        uid: int | None = None,
        on: Path | None = None,
        background: bool = False,
        daemon: Sequence[str] | None = None,
    ) -> None:
        """`on`: the directory (of a certain file system) to make the vault in. `daemon`: the words that stand in
        the place of `python -m vaultfs` (a launcher that plants faults); they get the same arguments.
        """
        self.uid = os.getuid() if uid is None else uid
        self.options = options
        self.background = background
        self.token = uuid.uuid4().hex
        adopt_orphans()
        self._daemon_words = list(daemon) if daemon is not None else None
        self._clients: list[Client] = []
        self._watchers: list[Watcher] = []
        self._expected_log: list[re.Pattern[str]] = [re.compile(r"had the vault open|open before it was mounted")]
        self._expected_kept: int | None = 0
        self._expected_conflicts: int | None = 0
        self._allowed_locks: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: threading.Timer | None = None
        self._finished = False
        self.pid = 0

        self.base = Path(tempfile.mkdtemp(prefix="vaultfs-test-", dir=on))
        self.base.chmod(0o755)
        self.vault = self.base / "vault"
        self.mnt = self.vault if over_itself else self.base / "mnt"
        self.runtime = self.base / "run"
        self.home = self.base / "home"
        self.log = self.base / "daemon.log"
        self._stderr = self.base / "daemon.stderr"
        for directory in {self.vault, self.mnt, self.runtime, self.home}:
            directory.mkdir()
            directory.chmod(0o700 if directory in (self.runtime, self.home) else 0o755)
            os.chown(directory, self.uid, -1 if self.uid == os.getuid() else TEST_GID)
        self._logs_made_by_user()
        # Taken before the mount: over itself there is no other way behind it.
        self._behind_fd = os.open(self.vault, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.behind = Path(f"/proc/{os.getpid()}/fd/{self._behind_fd}") if over_itself else self.vault
        for name, content in (files or {}).items():
            self.put_behind(name, content)

    # --- before

    def _logs_made_by_user(self) -> None:
        for file in (self.log, self._stderr):
            file.touch()
            os.chown(file, self.uid, -1)

    def put_behind(self, name: str, content: bytes | str, *, in_place: bool = False) -> Path:
        """Puts `content` at `name` in the vault, by a rename as a careful outsider would (or writing in place)."""
        path = self.behind / name
        data = content.encode() if isinstance(content, str) else content
        path.parent.mkdir(parents=True, exist_ok=True)
        for directory in list(path.relative_to(self.behind).parents)[:-1]:
            os.chown(self.behind / directory, self.uid, -1)
        written = path if in_place else self.base / f"outside-{uuid.uuid4().hex}"
        written.write_bytes(data)
        if not in_place:
            os.chown(written, self.uid, -1 if self.uid == os.getuid() else TEST_GID)
            os.replace(written, path)
        return path

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "VAULTFS_RUNTIME_DIR": str(self.runtime / "vaultfs"),  # root's register is not below XDG_RUNTIME_DIR
            "LC_ALL": "C.UTF-8",
            **INTERPRETER.variables(self.uid),
            TOKEN_VARIABLE: self.token,
        }

    def python(self) -> str:
        """A Python that the mount's user can start."""
        return INTERPRETER.for_user(self.uid)[0]

    # --- start

    def mount_command(self) -> list[str]:
        words = self._daemon_words or [self.python(), "-m", "vaultfs"]
        options = ",".join(part for part in (self.options, f"log-file={self.log}") if part)
        command = [*as_user(self.uid), *words, "mount", str(self.vault)]
        if self.mnt != self.vault:
            command.append(str(self.mnt))
        return [*command, *([] if self.background else ["-f"]), "-o", options]

    def start(self) -> MountedVault:
        if not os.path.exists("/dev/fuse"):
            raise AssertionError("no /dev/fuse: the tests of the mount need it (modprobe fuse, or pass the device in)")
        if self.uid != 0 and stat.S_IMODE(os.stat("/dev/fuse").st_mode) & 0o666 != 0o666:
            os.chmod("/dev/fuse", 0o666)  # what udev makes it on every ordinary machine
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog = threading.Timer(DAEMON_GUARD, self._kill_daemon)
        self._watchdog.daemon = True
        self._watchdog.start()
        with open(self._stderr, "ab") as stderr:
            self._process = subprocess.Popen(
                self.mount_command(),
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=self.environment(),
                cwd="/",
                start_new_session=True,
            )
        if self.background:
            code = self._process.wait(GUARD)
            assert code == 0, f"vaultfs mount ended with {code}: {self.log_text()}"
            assert is_served(self.mnt), "vaultfs mount returned 0, but nothing is mounted"
            self.pid = self._find_daemon()
        else:
            self.pid = self._process.pid
            eventually(self._is_up, "the mount comes up")
        # The first requests make what is made once (tables, threads); what is open afterwards is the daemon's own.
        self.run(["stat", "-f", str(self.mnt)])
        self._own_descriptors = self.daemon_descriptors()
        return self

    def _is_up(self) -> bool:
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"vaultfs mount -f ended with {code}: {self.log_text()}"
        return is_served(self.mnt)

    def _find_daemon(self) -> int:
        found = [pid for pid in processes_with(self.token) if " mount -f " in describe(pid)]
        assert len(found) == 1, f"expected one daemon in the background, found {[describe(pid) for pid in found]}"
        return found[0]

    # --- clients

    def run(
        self,
        argv: Sequence[str],
        *,
        check: bool = True,
        guard: float = GUARD,
        input: bytes | None = None,
        cwd: Any = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a program as the mount's user and waits for its end."""
        try:
            done = subprocess.run(
                # The directory is entered by the user itself: root may not enter another user's mount.
                [*as_user(self.uid), "env", "-C", str(cwd or "/"), *[str(word) for word in argv]],
                input=input,
                stdin=subprocess.DEVNULL if input is None else None,
                capture_output=True,
                timeout=guard,
                env=self.environment(),
                cwd="/",
            )
        except subprocess.TimeoutExpired:
            raise Hung(f"{argv!r:.300} did not end") from None
        if check and done.returncode != 0:
            raise AssertionError(
                f"{argv!r:.300} ended with {done.returncode}: {done.stderr.decode(errors='replace')}"
                f"{done.stdout.decode(errors='replace')}"
            )
        return done

    def shell(self, script: str, *arguments: Any, **keywords: Any) -> subprocess.CompletedProcess[bytes]:
        """Runs a bash script in the mount (`$1`, … are `arguments`)."""
        return self.run(
            ["bash", "-c", script, "bash", *[str(argument) for argument in arguments]],
            **{"cwd": self.mnt, **keywords},
        )

    def _client(self, argv: Sequence[str]) -> Client:
        client = Client([*as_user(self.uid), *argv], env=self.environment(), cwd="/")
        self._clients.append(client)
        return client

    def spawn(self, function: Callable[..., Any], *arguments: Any) -> Client:
        """Starts `function` in a process of its own; see `source_of`."""
        return self._client([self.python(), "-S", "-c", source_of(function, arguments)])

    def call(self, function: Callable[..., Any], *arguments: Any, guard: float = GUARD) -> Any:
        """Runs `function` in a process of its own and gives its value."""
        client = self.spawn(function, *arguments)
        try:
            return client.result(guard)
        finally:
            self._forget(client)

    def spawn_shell(self, script: str, *arguments: Any) -> Client:
        """Starts a bash script in the mount."""
        words = " ".join(shlex.quote(str(argument)) for argument in arguments)
        return self._client(["bash", "-c", f"cd {shlex.quote(str(self.mnt))} || exit 99\nset -- {words}\n{script}"])

    def _forget(self, client: Client) -> None:
        client.close()
        self._clients.remove(client)

    def read(self, name: str) -> bytes:
        """The content of `name` through the mount, read by a process of the mount's user."""
        if self.uid == os.getuid():
            return (self.mnt / name).read_bytes()
        return self.run(["cat", str(self.mnt / name)]).stdout

    def read_behind(self, name: str) -> bytes:
        return (self.behind / name).read_bytes()

    def names_behind(self, directory: str = ".") -> set[str]:
        """What the vault directory really holds, without the state directory."""
        return set(os.listdir(self.behind / directory)) - {".vaultfs"}

    # --- what vaultfs says

    def cli(self, *words: str, check: bool = True, guard: float = GUARD) -> subprocess.CompletedProcess[bytes]:
        return self.run([self.python(), "-m", "vaultfs", *words], check=check, guard=guard)

    def status(self) -> dict[str, Any]:
        """This mount's record in `vaultfs status --json`."""
        answer = json.loads(self.cli("status", str(self.mnt), "--json").stdout)
        mounts = answer.get("mounts", [answer]) if isinstance(answer, dict) else answer
        found = [record for record in mounts if record["mountpoint"] == str(self.mnt)]
        assert len(found) == 1, f"status does not tell of this mount: {answer}"
        record: dict[str, Any] = found[0]
        return record

    def counters(self) -> dict[str, int]:
        return dict(self.status()["counters"])

    def kept(self) -> list[dict[str, Any]]:
        """What `vaultfs drafts --json` lists for this mount."""
        answer = json.loads(self.cli("drafts", str(self.mnt), "--json").stdout)
        drafts = answer.get("drafts", answer.get("kept")) if isinstance(answer, dict) else answer
        return list(drafts)

    def kept_content(self, draft: dict[str, Any]) -> bytes:
        """A kept draft's content, by `vaultfs drafts save-as`."""
        target = self.home / f"saved-{uuid.uuid4().hex}"
        self.cli("drafts", "save-as", str(draft["id"]), str(target))
        return target.read_bytes()

    def watch_behind(self, directory: str = ".", **keywords: Any) -> Watcher:
        watcher = Watcher(self.behind / directory, **keywords)
        self._watchers.append(watcher)
        return watcher

    def watch(self, path: Path, **keywords: Any) -> Watcher:
        watcher = Watcher(path, **keywords)
        self._watchers.append(watcher)
        return watcher

    def conflicts(self) -> list[str]:
        """Vault-relative paths of the conflict copies."""
        return sorted(name for name, _ in self._entries() if CONFLICT_NAME.search(os.path.basename(name)))

    # --- what a test announces

    def expect_log(self, *patterns: str) -> None:
        """Lines of the log that match one of `patterns` are expected; they need not come."""
        self._expected_log.extend(re.compile(pattern) for pattern in patterns)

    def expect_kept(self, count: int | None) -> None:
        """How many kept drafts the test ends with (None: any number)."""
        self._expected_kept = count

    def expect_conflicts(self, count: int | None) -> None:
        self._expected_conflicts = count

    def allow_lock(self, *names: str) -> None:
        """Lock directories (vault-relative) that the test itself leaves standing."""
        self._allowed_locks.update(names)

    # --- the log

    def log_text(self) -> str:
        return "".join(
            f"--- {file.name}\n{file.read_text(errors='replace')}" for file in (self.log, self._stderr) if file.exists()
        )

    def log_alarms(self) -> list[str]:
        """The alarming lines of the daemon's log (and of what it printed) that no test announced."""
        lines = self.log_text().splitlines()
        return [
            line
            for line in lines
            if ALARMING.search(line) and not any(expected.search(line) for expected in self._expected_log)
        ]

    # --- descriptors

    def daemon_descriptors(self) -> dict[int, str]:
        """What the daemon has open: descriptor → text of its link."""
        directory = f"/proc/{self.pid}/fd"
        found = {}
        for name in os.listdir(directory):
            with suppress(FileNotFoundError):  # closed between the listing and the look
                found[int(name)] = os.readlink(f"{directory}/{name}")
        return found

    def drop_caches(self) -> None:
        """Makes the kernel forget what it knows of this mount: the daemon gets FORGETs. Needs root.

        A remount that changes nothing begins with shrink_dcache_sb(), and touches no other file system. Where root may
        not look at the mount (another user's), all caches of the machine are dropped.
        """
        if self.uid != os.getuid():
            Path("/proc/sys/vm/drop_caches").write_text("2")
            return
        line = in_mountinfo(self.mnt)
        assert line is not None
        flags = 32  # MS_REMOUNT
        bits = (("ro", 1), ("nosuid", 2), ("nodev", 4), ("noexec", 8), ("noatime", 1024), ("relatime", 1 << 21))
        for word, bit in bits:
            if word in line.split(" ")[5].split(","):
                flags |= bit
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(None, os.fsencode(self.mnt), None, ctypes.c_ulong(flags), None) != 0:
            raise OSError(ctypes.get_errno(), "remount to drop the caches of this mount", str(self.mnt))

    def leaked_descriptors(self) -> dict[int, str]:
        """What the daemon still has open of the vault's files and staging, beyond what it had after mounting.

        Its own things (log, socket, inotify, the state directory's directories and its fence, gate and journal) may
        come and go; a document, a draft or a lock may not stay.
        """
        own = {"/.vaultfs", "/.vaultfs/journal", "/.vaultfs/fence", "/.vaultfs/gate", "/.vaultfs/fence.lock"}
        leaked = {}
        others = {}
        for fd, text in self.daemon_descriptors().items():
            if not text.startswith(str(self.vault)):
                others[fd] = text
                continue
            inside = text.removeprefix(str(self.vault)).removesuffix(" (deleted)")
            if inside in own or text in self._own_descriptors.values():
                continue
            if inside.startswith("/.vaultfs/staging/") and self._expected_kept != 0:
                continue  # a draft that was refused, and is tried again
            if re.fullmatch(r"/\.vaultfs/(staging|pending|locks|drafts|quarantine)(/[^/]*)?", inside) and os.path.isdir(
                f"/proc/{self.pid}/fd/{fd}"
            ):
                continue
            leaked[fd] = text
        # Outside the vault a few more (a worker thread's pipe, a connection) are its own business; a heap is not.
        if not leaked and len(others) > len(self._own_descriptors) + 8:
            return others
        return leaked

    def assert_no_leak(self) -> None:
        """Nobody has a file open any more and the kernel has forgotten all: then the daemon has nothing open either."""
        if os.getuid() != 0:
            return  # without root the kernel cannot be made to forget
        leak: dict[int, str] = {}

        def none_left() -> bool:
            nonlocal leak
            # Again each time: a file that was closed a moment ago was still in use at the last one.
            self.drop_caches()
            leak = self.leaked_descriptors()
            return not leak

        try:
            eventually(none_left, limit=6, step=0.1)
        except AssertionError:
            raise AssertionError(f"the daemon keeps open what nobody uses: {leak}") from None

    # --- the end

    def _entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """Everything in the vault from behind but the state directory: (vault-relative path, lstat)."""
        top = str(self.behind)
        for directory, names, files in os.walk(top):
            if directory == top and ".vaultfs" in names:
                names.remove(".vaultfs")
            for name in [*names, *files]:
                path = os.path.join(directory, name)
                try:
                    yield os.path.relpath(path, top), os.lstat(path)
                except FileNotFoundError:
                    continue  # removed meanwhile (a lock of a save, while mounted)

    def settle(self, guard: float = GUARD / 2) -> None:
        """Waits for every client to end; one that does not is the test's own fault."""
        for client in list(self._clients):
            if client.running:
                client.end(guard)
            self._forget(client)

        def clients() -> list[str]:
            found = processes_with(self.token)  # among them the daemon and what it has started itself, its companion
            return [describe(pid) for pid in found if self.pid not in (pid, parent_of(pid))]

        try:
            eventually(lambda: not clients(), limit=guard)
        except AssertionError:
            raise AssertionError(f"client processes do not end: {clients()}") from None

    def umount(self, *words: str) -> None:
        """`vaultfs umount`, and the proof that the daemon is gone with 0 and nothing is mounted when it returns."""
        self.cli("umount", *words, str(self.mnt))
        self._assert_ended()

    def _assert_ended(self) -> None:
        assert not is_served(self.mnt), "still mounted after unmounting"
        if self.background:
            assert not is_running(self.pid), "vaultfs umount returned, but the daemon lives"
            with suppress(ChildProcessError):  # adopted by us when its parent ended, unless it had another to go to
                os.waitpid(self.pid, os.WNOHANG)
        else:
            assert self._process is not None
            # Our own child stays a zombie until we wait for it: gone means that it does not run any more.
            assert not is_running(self._process.pid), "vaultfs umount returned, but the daemon still runs"
            code = self._process.wait(GUARD)
            assert code == 0, f"the daemon ended with {code}: {self.log_text()}"
        self._finished = True

    def mark_ended(self) -> None:
        """Tells that the test itself has ended the daemon and checked how."""
        self._finished = True

    def finish(self) -> None:
        """Unmounts (unless the test did) and asserts that nothing is left."""
        self.settle()
        for watcher in self._watchers:
            watcher.close()
        self._watchers.clear()
        if not self._finished:
            self.assert_no_leak()
            self.umount()
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        problems = []
        for pid in processes_with(self.token):
            problems.append(f"process left: {describe(pid)}")
        for name, status in self._entries():
            if (
                stat.S_ISDIR(status.st_mode)
                and LOCK_NAME.fullmatch(os.path.basename(name))
                and name not in self._allowed_locks
            ):
                problems.append(f"lock left in the vault: {name}")
        state = self.behind / ".vaultfs"
        for kind in ("staging", "pending", "locks", "quarantine"):
            for directory, names, files in os.walk(state / kind):
                inside = os.path.relpath(directory, state)
                left = files if kind == "staging" else [*names, *files]
                problems.extend(f"left in the state directory: {inside}/{name}" for name in left)
        if (
            self._expected_kept == 0
            and (state / "drafts").is_dir()
            and any(not name.endswith(".json") for name in os.listdir(state / "drafts"))
        ):
            problems.append(f"drafts kept that nobody expected: {os.listdir(state / 'drafts')}")
        if self._expected_conflicts is not None and len(self.conflicts()) != self._expected_conflicts:
            problems.append(f"expected {self._expected_conflicts} conflict copies, found {self.conflicts()}")
        problems.extend(f"log: {line}" for line in self.log_alarms())
        assert not problems, "\n".join(problems)

    def _kill_daemon(self) -> None:
        for pid in {self.pid, self._process.pid if self._process is not None else 0} - {0}:
            if parent_of(pid) == os.getpid():  # ours still, and not a number that somebody else has now
                with suppress(ProcessLookupError):  # ended by itself meanwhile
                    os.kill(pid, signal.SIGKILL)

    def destroy(self) -> None:
        """Ends and removes everything, whatever state it is in; asserts nothing. Safe to call at any time."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        for watcher in self._watchers:
            watcher.close()
        self._watchers.clear()
        if is_served(self.mnt):
            subprocess.run(["fusermount3", "-uz", str(self.mnt)], capture_output=True, check=False)
        self._kill_daemon()
        for client in list(self._clients):
            self._forget(client)
        for pid in processes_with(self.token):
            with suppress(ProcessLookupError):  # ended by itself meanwhile
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait(GUARD)
        while is_served(self.mnt):
            if subprocess.run(["umount", "-l", str(self.mnt)], capture_output=True, check=False).returncode != 0:
                break  # reported by the next look at /proc/self/mountinfo; removing the tree is refused below
        os.close(self._behind_fd)
        if not is_served(self.mnt):
            shutil.rmtree(self.base, ignore_errors=True)


def _environment_of(pid: int) -> bytes:
    try:
        return Path("/proc", str(pid), "environ").read_bytes()
    except OSError:
        return b""


# -------------------------------------------------------------------------------------------------- file systems


class FileSystem:
    """A file system of a certain kind, made in a sparse image (tmpfs: in memory) and mounted for the session."""

    _SIZE: ClassVar = {"ext4": 96 << 20, "btrfs": 128 << 20, "xfs": 320 << 20}  # the least their mkfs accept, and some
    _MAKE: ClassVar = {"ext4": ["mkfs.ext4", "-q", "-F"], "btrfs": ["mkfs.btrfs", "-q"], "xfs": ["mkfs.xfs", "-q"]}

    def __init__(self, kind: str, *, size: int | None = None) -> None:
        self.kind = kind
        self._base = Path(tempfile.mkdtemp(prefix=f"vaultfs-{kind}-"))
        self._base.chmod(0o755)
        self.path = self._base / "fs"
        self.path.mkdir()
        try:
            if kind == "tmpfs":
                command = ["mount", "-t", "tmpfs", "-o", f"size={size or 64 << 20}", "tmpfs", str(self.path)]
            else:
                image = self._base / "image"
                with image.open("wb") as file:
                    file.truncate(size or self._SIZE[kind])
                if shutil.which(self._MAKE[kind][0]) is None:
                    raise AssertionError(f"{self._MAKE[kind][0]} is missing: scripts/test installs what the tests need")
                subprocess.run([*self._MAKE[kind], str(image)], check=True, capture_output=True)
                command = ["mount", "-o", "loop", str(image), str(self.path)]
            subprocess.run(command, check=True, capture_output=True)
        except subprocess.CalledProcessError as failure:
            shutil.rmtree(self._base, ignore_errors=True)
            raise AssertionError(f"{failure.cmd}: {failure.stderr.decode(errors='replace')}") from failure
        self.path.chmod(0o755)

    def close(self) -> None:
        done = subprocess.run(["umount", str(self.path)], capture_output=True, check=False)
        if done.returncode != 0:
            subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)
        shutil.rmtree(self._base, ignore_errors=True)
        assert done.returncode == 0, f"{self.kind} is still in use after the tests: {done.stderr.decode()}"


# ---------------------------------------------------------------------------------------------------------- locks


@contextmanager
def living_process() -> Iterator[int]:
    """The pid of a process that lives as long as the block."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def dead_pid() -> int:
    """The pid of a process that has been, and is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def make_lock(
    path: Path, pid: int, *, token: str | None = None, age: float = 0, extra: dict[str, Any] | None = None
) -> str:
    """Puts the lock of `path` into place as another tool would (lock-protocol.md, *shared* part); gives its token."""
    token = token or str(uuid.uuid4())
    pending = path.with_name(f"{path.name}.lock.{pid}.{token}.pending")
    pending.mkdir()
    created = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - age)) + ".000Z"
    record = {"v": 1, "pid": pid, "token": token, "created_at": created, **(extra or {})}
    (pending / ".owner.json").write_text(json.dumps(record) + "\n")
    (pending / f".lease-{token}").write_text(token + "\n")
    os.rename(pending, path.with_name(path.name + ".lock"))
    if age:
        then = time.time() - age
        os.utime(path.with_name(path.name + ".lock"), (then, then))
    return token


def drop_lock(path: Path, token: str) -> None:
    """Releases what `make_lock` made, in the protocol's order."""
    lock = path.with_name(path.name + ".lock")
    (lock / f".lease-{token}").unlink()
    (lock / ".owner.json").unlink()
    lock.rmdir()
