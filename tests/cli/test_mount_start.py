"""The two processes of `vaultfs mount`: whatever the daemon does instead of mounting, the parent tells.

The daemon's `serve` is replaced by one that misbehaves (through ``sitecustomize``, in the daemon's own process);
nothing is ever mounted here, so these tests need no /dev/fuse.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vaultfs.cli.mount import default_log_file
from vaultfs.errors import ExitCode

REPOSITORY = Path(__file__).parents[2]

MISBEHAVING = """
import os, sys, types

def serve(options, *, ready, attend):
    import logging, time
    from vaultfs.errors import AlreadyServedError, HardLinkedError
    open(os.environ["SEEN"], "w").write(f"{os.getpid()}\\n{options.vault}\\n{options.mountpoint}\\n{options.log_file}")
    logging.getLogger("vaultfs.notice").info("a remark\\x1b[31m")
    logging.getLogger("vaultfs").warning("a line for the log")
    mode = os.environ["MISBEHAVE"]
    if mode == "busy": raise AlreadyServedError("somebody has it", path=options.vault, pid=4)
    if mode == "denied": raise PermissionError(13, "Permission denied", options.mountpoint)
    if mode == "bug": raise ZeroDivisionError("planted")
    if mode == "killed": os.kill(os.getpid(), 9)
    if mode == "gone": return 3
    if mode == "liar": ready()
    time.sleep(600)

server = types.ModuleType("vaultfs.mount.server")
server.serve, server.Mount = serve, object
sys.modules["vaultfs.mount.server"] = server
import vaultfs.cli.preflight
vaultfs.cli.preflight.check_machine = lambda options: None
"""


class Place:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.vault, self.mnt, self.seen, self.state = path / "vault", path / "mnt", path / "seen", path / "state"
        for directory in (self.vault, self.mnt, path / "site"):
            directory.mkdir()
        (path / "site" / "sitecustomize.py").write_text(MISBEHAVING)

    def start(self, how: str, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "vaultfs", "mount", *words, str(self.vault), str(self.mnt)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.path,
            env={
                **os.environ,
                "PYTHONPATH": f"{self.path / 'site'}:{REPOSITORY}",
                "MISBEHAVE": how,
                "SEEN": str(self.seen),
                "VAULTFS_RUNTIME_DIR": str(self.path / "run"),
                "XDG_STATE_HOME": str(self.state),
            },
        )

    def daemon(self) -> int:
        return int(self.seen.read_text().split("\n")[0])

    def fails(self, how: str, *words: str) -> tuple[int, list[str]]:
        """Exit code and error lines; the daemon must be gone and nothing printed to standard output."""
        parent = self.start(how, *words)
        out, err = parent.communicate(timeout=60)
        assert out == ""
        assert not is_alive(self.daemon())
        return parent.returncode, err.splitlines()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    if place.seen.exists() and is_alive(place.daemon()):
        os.kill(place.daemon(), signal.SIGKILL)
        raise AssertionError("the daemon was left running")


@pytest.mark.parametrize(
    ("how", "code", "words", "hint"),
    [
        ("busy", ExitCode.BUSY, "somebody has it", "vaultfs umount"),
        ("denied", ExitCode.DENIED, "Permission denied", "You need the right"),
        ("bug", ExitCode.FAILED, "planted", ".log"),
        ("killed", ExitCode.FAILED, "killed by signal 9", ".log"),
        ("gone", ExitCode.FAILED, "ended with code 3", ".log"),
        ("liar", ExitCode.FAILED, "no mount is to be seen", "foreground"),
    ],
)
def test_a_daemon_that_fails_is_told_with_its_own_words(
    place: Place, how: str, code: int, words: str, hint: str
) -> None:
    returned, lines = place.fails(how)
    assert returned == code
    remark, problem, remedy = lines
    assert remark == "vaultfs: a remark\\x1b[31m"
    assert problem.startswith("vaultfs: ") and words in problem
    assert remedy.startswith("  hint: ") and hint in remedy


def test_a_daemon_that_never_gets_ready_is_given_up_and_ended(place: Place) -> None:
    returned, lines = place.fails("hang", "--timeout", "1")
    assert returned == ExitCode.FAILED
    assert "did not come up within 1 s" in lines[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_parent_that_is_ended_takes_the_unready_daemon_along(place: Place, number: int) -> None:
    parent = place.start("hang")
    try:
        deadline = time.monotonic() + 30
        while not (place.seen.exists() and place.seen.read_text().count("\n") == 3):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        parent.send_signal(number)
        _, err = parent.communicate(timeout=60)
    finally:
        parent.kill()
        parent.wait()
    assert parent.returncode == 128 + number
    assert "Traceback" not in err
    assert not is_alive(place.daemon())


def test_the_daemon_gets_absolute_paths_and_its_log_holds_what_happened(place: Place) -> None:
    place.fails("busy", "-o", "log-file=own.log")
    _, vault, mountpoint, log = place.seen.read_text().split("\n")
    assert (vault, mountpoint, log) == (str(place.vault), str(place.mnt), str(place.path / "own.log"))
    text = Path(log).read_text()
    assert "a line for the log" in text
    assert "somebody has it" in text
    assert os.stat(log).st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("how", "traced"), [("busy", False), ("bug", True)])
def test_the_log_traces_faults_and_not_what_a_user_did(place: Place, how: str, traced: bool) -> None:
    place.fails(how, "-o", "log-file=own.log")
    text = (place.path / "own.log").read_text()
    assert ("Traceback (most recent call last)" in text) is traced
    assert "the mount did not come up: " in text


def test_without_a_log_file_each_mountpoint_has_its_own_in_the_state_home(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.fails("busy")
    monkeypatch.setenv("XDG_STATE_HOME", str(place.state))
    log = Path(default_log_file(str(place.mnt)))
    assert log.is_relative_to(place.state / "vaultfs")
    assert "somebody has it" in log.read_text()
    assert os.stat(log).st_mode & 0o777 == 0o600
    assert default_log_file("/a/mnt") != default_log_file("/b/mnt")
    assert os.path.basename(default_log_file("/x/../n\n\x1b/☃")).isascii()


def test_a_log_that_has_grown_is_set_aside(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(place.state))
    log = Path(default_log_file(str(place.mnt)))
    log.parent.mkdir(parents=True)
    with log.open("wb") as file:
        file.truncate(17 << 20)
    place.fails("busy")
    assert log.with_name(log.name + ".1").stat().st_size == 17 << 20
    assert log.stat().st_size < 1 << 20


@pytest.mark.parametrize("log", ["nowhere/x.log", "vault"])
def test_a_log_file_that_cannot_be_written_is_refused_before_anything_starts(place: Place, log: str) -> None:
    parent = place.start("busy", "-o", f"log-file={place.path / log}")
    _, err = parent.communicate(timeout=60)
    assert parent.returncode == ExitCode.USAGE
    assert "log file cannot be written" in err
    assert not place.seen.exists()


def test_a_wrong_option_is_refused_before_anything_starts(place: Place) -> None:
    parent = place.start("busy", "-o", "symlink=contained")
    _, err = parent.communicate(timeout=60)
    assert parent.returncode == ExitCode.USAGE
    assert "did you mean symlinks?" in err
    assert not place.seen.exists()
    assert not place.state.exists()


def test_messages_between_the_two_processes_are_one_json_object_a_line(tmp_path: Path) -> None:
    from vaultfs.cli.mount import _Report

    reading, writing = os.pipe()
    report = _Report(writing)
    report.send({"notice": "two\nlines \udcff"})
    report.ready()
    with open(reading, "rb") as pipe:
        lines = pipe.read().splitlines()
    assert [json.loads(line) for line in lines] == [{"notice": "two\nlines \udcff"}, {"ready": True}]
