"""The control socket and the register of mounts, with a provider that is no mount."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vaultfs.config import MountOptions
from vaultfs.control import client, protocol, registry
from vaultfs.control.protocol import HeldLockInfo, KeptDraftInfo, MountStatus, OpenDraft
from vaultfs.control.server import ControlServer
from vaultfs.errors import DraftNotFoundError, NoAnswerError, VaultError
from vaultfs.mountinfo import MountEntry


class FakeMount:
    """A provider with one open draft, one kept draft, and names that no terminal should see raw."""

    def __init__(self, content: Path) -> None:
        self.content = content
        self.stopped = threading.Event()
        self.failure: Exception | None = None
        self.delay = 0.0

    def status(self) -> MountStatus:
        time.sleep(self.delay)
        if self.failure:
            raise self.failure
        return MountStatus(
            vault="/vault\udcff",
            mountpoint="/mnt/\x1b[31m",
            pid=os.getpid(),
            since="2026-11-30T10:00:00Z",
            version="0",
            drafts=[OpenDraft("a\udc80.md", 12, 1.5, "edit", 77, "vim", True)],
            locks=[HeldLockInfo("b.md", 0.01)],
            counters={"saves": 3},
        )

    def kept_drafts(self) -> list[KeptDraftInfo]:
        return [
            KeptDraftInfo("abc123", "a\udc80.md", 5, "2026-11-30T10:00:00Z", "vim", 77, os.getuid(), "lock busy"),
            KeptDraftInfo("abd999", "b.md", 0, "2026-11-30T10:00:01Z", "cp", 78, os.getuid(), "killed"),
        ]

    def open_draft(self, draft_id: str) -> int:
        assert draft_id in ("abc123", "abd999")
        return os.open(self.content, os.O_RDONLY)

    def stop(self) -> None:
        self.stopped.set()


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "run"
    monkeypatch.setenv("VAULTFS_RUNTIME_DIR", str(directory))
    return directory


@pytest.fixture
def mount(tmp_path: Path) -> FakeMount:
    content = tmp_path / "content"
    content.write_bytes(b"draft")
    return FakeMount(content)


@pytest.fixture
def served(runtime: Path, mount: FakeMount, tmp_path: Path) -> Iterator[registry.Entry]:
    options = MountOptions("/srv/vault", "/mnt/notes", log_file="/var/log/x.log")
    server = ControlServer(mount, options, vault_dev=1, vault_ino=2)
    server.start()
    assert server.entry is not None
    yield server.entry
    server.close()
    assert os.listdir(runtime) == []


def test_status_arrives_as_it_was_said_undecodable_names_included(served: registry.Entry, mount: FakeMount) -> None:
    status = client.status(served)
    assert status.vault == "/vault\udcff"
    assert status.drafts == mount.status().drafts
    assert status.locks == [HeldLockInfo("b.md", 0.01)]
    assert status.counters == {"saves": 3}
    assert status.log_file == "/var/log/x.log"


def test_content_of_a_draft_comes_as_a_descriptor_by_id_or_its_beginning(served: registry.Entry) -> None:
    for wanted in ("abc123", "abc"):
        draft, descriptor = client.draft_content(served, wanted)
        with open(descriptor, "rb") as file:
            assert file.read() == b"draft"
        assert draft.id == "abc123"


@pytest.mark.parametrize(("wanted", "words"), [("ab", "2 drafts begin"), ("zz", "no draft"), ("", "no draft")])
def test_an_id_that_names_no_single_draft_is_refused(served: registry.Entry, wanted: str, words: str) -> None:
    with pytest.raises(DraftNotFoundError, match=words):
        client.draft_content(served, wanted)


def test_stop_reaches_the_mount_and_returns_before_it_ended(served: registry.Entry, mount: FakeMount) -> None:
    client.stop(served)
    assert mount.stopped.is_set()


def test_an_error_of_the_daemon_keeps_its_words_and_the_server_lives_on(
    served: registry.Entry, mount: FakeMount
) -> None:
    mount.failure = ValueError("planted")
    with pytest.raises(VaultError, match="planted"):
        client.status(served)
    mount.failure = None
    assert client.status(served).counters == {"saves": 3}


def test_a_hanging_answer_is_given_up_and_holds_up_no_other(served: registry.Entry, mount: FakeMount) -> None:
    mount.delay = 1.0
    with pytest.raises(NoAnswerError, match="does not answer within"):
        client.status(served, timeout=0.1)
    assert [draft.id for draft in client.drafts(served)] == ["abc123", "abd999"]
    mount.delay = 0.0
    assert client.status(served).pid == os.getpid()


@pytest.mark.parametrize(
    "line", [b"\n", b"nonsense\n", b"[]\n", b'{"request": 1}\n', b'{"request":"status","v":1,"new":2}\n']
)
def test_whatever_is_said_the_socket_answers_one_line(served: registry.Entry, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        with registry.socket_path(served.socket) as path:
            connection.connect(path)
        connection.sendall(line)
        answer = b""
        while not answer.endswith(b"\n"):
            piece = connection.recv(65536)
            assert piece
            answer += piece
    assert json.loads(answer)["ok"] is (b"new" in line)  # unknown keys are ignored, nonsense is an error


def test_an_unknown_request_and_one_that_never_ends_are_refused(served: registry.Entry) -> None:
    with pytest.raises(VaultError, match="does not know the request fly"):
        client._ask(served, "fly", 5)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        with registry.socket_path(served.socket) as path:
            connection.connect(path)
        with pytest.raises(OSError):
            for _ in range(100):
                connection.sendall(b"x" * 65536)
    assert client.status(served).counters == {"saves": 3}


def test_socket_and_register_are_for_their_owner_only(served: registry.Entry, runtime: Path) -> None:
    assert os.stat(runtime).st_mode & 0o777 == 0o700
    assert os.stat(served.socket).st_mode & 0o777 == 0o600
    assert all(os.stat(runtime / name).st_mode & 0o077 == 0 for name in os.listdir(runtime))


def test_asking_leaves_no_descriptor_behind(served: registry.Entry) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    client.status(served)
    before = descriptors()
    for _ in range(20):
        client.status(served)
        os.close(client.draft_content(served, "abc")[1])
        with pytest.raises(DraftNotFoundError):
            client.draft_content(served, "zz")
    deadline = time.monotonic() + 5
    while descriptors() > before and time.monotonic() < deadline:  # the answering threads close theirs on their own
        time.sleep(0.01)
    assert descriptors() <= before


def test_a_register_path_longer_than_a_socket_name_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: FakeMount
) -> None:
    monkeypatch.setenv("VAULTFS_RUNTIME_DIR", str(tmp_path / ("d" * 120)))
    server = ControlServer(mount, MountOptions("/v", "/m"), vault_dev=1, vault_ino=2)
    server.start()
    try:
        assert server.entry is not None
        assert client.status(server.entry).counters == {"saves": 3}
    finally:
        server.close()


def test_a_register_that_others_can_write_or_that_is_a_link_is_refused(runtime: Path, tmp_path: Path) -> None:
    runtime.mkdir(mode=0o700)
    runtime.chmod(0o770)
    with pytest.raises(VaultError, match="0700"):
        registry.runtime_directory(create=True)
    runtime.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    runtime.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(VaultError, match="0700"):
        registry.runtime_directory(create=True)


def test_entries_are_found_by_mountpoint_vault_and_what_lies_below(served: registry.Entry) -> None:
    for path in ("/srv/vault", "/srv/vault/a/b", "/mnt/notes", "/mnt/notes/x"):
        assert registry.find(path) == served
    for path in ("/srv", "/srv/vault2", "/mnt/notes.md", "/"):
        assert registry.find(path) is None


DAEMON = """
import sys, time
from vaultfs.control import registry
registration = registry.register(vault="/v", mountpoint="/m", vault_dev=1, vault_ino=2)
open(registration.entry.socket, "w").close()
registration.publish()
print(registration.entry.socket, flush=True)
time.sleep(60)
"""


def test_what_a_killed_daemon_left_is_cleared_and_a_living_one_is_not(runtime: Path) -> None:
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    try:
        daemon.stdout.readline()
        (entry,) = registry.entries()
        assert entry.pid == daemon.pid
        assert registry.wait_gone(entry, 0) is False
        daemon.send_signal(signal.SIGKILL)
        assert registry.wait_gone(entry, 10) is True  # although nobody has waited for the zombie yet
        assert registry.entries() == []
        assert os.listdir(runtime) == []
    finally:
        daemon.kill()
        daemon.wait()
        daemon.stdout.close()


def test_a_dead_daemon_is_remembered_while_its_mount_stands(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = [MountEntry(1, 0, 1, "/m", frozenset(), "fuse.vaultfs", "/v", frozenset())]
    monkeypatch.setattr(registry, "mounts", lambda: table)
    registration = registry.register(vault="/v", mountpoint="/m", vault_dev=1, vault_ino=2)
    registration.entry.start_time -= 1
    registration.publish()
    assert registry.entries() == []
    assert [entry.vault for entry in registry.dead()] == ["/v"]
    successor = registry.register(vault="/v", mountpoint="/m", vault_dev=1, vault_ino=2)
    successor.publish()
    assert registry.entries() == [successor.entry]  # mounted again: what stands there is no dead mount any more
    assert registry.dead() == []
    assert len(os.listdir(runtime)) == 1
    successor.close()


def test_a_pid_used_again_is_no_running_daemon(runtime: Path) -> None:
    registration = registry.register(vault="/v", mountpoint="/m", vault_dev=1, vault_ino=2)
    registration.entry.start_time -= 1
    registration.publish()
    assert registry.entries() == []
    assert os.listdir(runtime) == []


def test_an_entry_of_another_pid_namespace_is_left_alone(runtime: Path) -> None:
    registration = registry.register(vault="/v", mountpoint="/m", vault_dev=1, vault_ino=2)
    registration.entry.pid_ns += 1
    registration.entry.start_time -= 1
    registration.publish()
    assert len(registry.entries()) == 1
    registration.close()
    assert os.listdir(runtime) == []


def test_files_that_are_no_entries_are_neither_believed_nor_removed(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    (runtime / "notes.json").write_text("{")
    (runtime / "other.json").write_text('{"vault": 3}')
    (runtime / "link.json").symlink_to("/etc/passwd")
    os.mkfifo(runtime / "pipe.json")
    forged = protocol.plain(registry.register(vault="/v", mountpoint="/m", vault_dev=1, vault_ino=2).entry)
    (runtime / "forged.json").write_text(json.dumps({**forged, "socket": "/etc/passwd"}))
    before = sorted(os.listdir(runtime))
    assert registry.entries() == []
    assert sorted(os.listdir(runtime)) == before
