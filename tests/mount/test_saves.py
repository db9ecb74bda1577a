"""A save is one publish, made when the one who opened the file lets go of it; readers see old or new, never a mix.

Contract, promises 1, 2 and 3; rules in versions-and-drafts.md, "When a save is complete".
"""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import (
    GUARD,
    Client,
    MountedVault,
    drop_lock,
    eventually,
    hear,
    living_process,
    make_lock,
    say,
    scaled,
)

# ------------------------------------------------------------------------------------------ close, then read


def _saver(path: str, rounds: int) -> None:
    import os

    for number in range(rounds):
        content = b"%06d|" % number * (1 + number * 7 % 400)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(fd, content[:100])
        os.write(fd, content[100:])
        os.close(fd)
        say(str(len(content)))
        hear()


def _checker(path: str, rounds: int) -> list[str]:
    import os

    problems = []
    for number in range(rounds):
        size = int(hear())
        wanted = b"%06d|" % number * (1 + number * 7 % 400)
        by_path = os.stat(path)
        fd = os.open(path, os.O_RDONLY)
        by_handle = os.fstat(fd)
        content = os.read(fd, size + 1000)
        rest = os.read(fd, 1)
        os.close(fd)
        if content != wanted or rest:
            problems.append(f"round {number}: read {content[:7]!r}*{len(content)}, wanted {wanted[:7]!r}*{len(wanted)}")
        if by_path.st_size != size or by_handle.st_size != size:
            problems.append(f"round {number}: stat {by_path.st_size}, fstat {by_handle.st_size}, wanted {size}")
        if by_path.st_ino != by_handle.st_ino:
            problems.append(f"round {number}: inode {by_path.st_ino} by path, {by_handle.st_ino} by handle")
        say("next")
    return problems


def test_what_another_process_reads_right_after_close_is_the_new_version(mounted: MountedVault) -> None:
    rounds = int(scaled(2000))
    saver = mounted.spawn(_saver, mounted.mnt / "note.md", rounds)
    checker = mounted.spawn(_checker, mounted.mnt / "note.md", rounds)
    for _ in range(rounds):
        checker.say(saver.hear())
        checker.hear()
        saver.say()
    saver.result()
    assert checker.result() == []


def _storm_writer(path: str, seconds: float, first: int) -> int:
    import os
    import time

    end = time.monotonic() + seconds
    version = first
    while time.monotonic() < end:
        letter = version % 26
        left = memoryview(bytes([65 + letter]) * (3000 + letter * 4099))  # the size too tells the version
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        while left:
            left = left[os.write(fd, left[:8192]) :]
        os.close(fd)
        version += 2
    return (version - first) // 2


def _storm_reader(path: str, seconds: float) -> dict[str, Any]:
    import os
    import time

    end = time.monotonic() + seconds
    reads, problems = 0, []
    seen = set()
    while time.monotonic() < end and len(problems) < 5:
        try:
            fd = os.open(path, os.O_RDONLY)
            size = os.fstat(fd).st_size
            parts = []
            while part := os.read(fd, 16384):
                parts.append(part)
            after = os.fstat(fd).st_size
            os.close(fd)
        except OSError as error:
            problems.append(f"error {error}")
            continue
        content = b"".join(parts)
        reads += 1
        if not content:
            problems.append("empty")
            continue
        letter = content[0]
        seen.add(letter)
        if content.count(content[:1]) != len(content):
            problems.append(f"mixed: {sorted(set(content))} in {len(content)} bytes")
        wanted = 3000 + (letter - 65) * 4099
        if not len(content) == size == after == wanted:
            problems.append(f"{chr(letter)}: {len(content)} read, fstat {size} then {after}, wanted {wanted}")
    return {"reads": reads, "problems": problems, "versions": len(seen)}


def test_a_storm_of_readers_and_writers_mixes_nothing(mounted: MountedVault) -> None:
    path = mounted.mnt / "storm.txt"
    mounted.put_behind("storm.txt", b"A" * 3000)
    # Each of two writers displaces the other's versions all the time: what came after it began is kept (promise 5).
    mounted.expect_kept(None)
    seconds = scaled(10, "VAULTFS_TEST_STORM")
    writers = [mounted.spawn(_storm_writer, path, seconds, first) for first in (0, 1)]
    readers = [mounted.spawn(_storm_reader, path, seconds) for _ in range(4)]
    saves = sum(writer.result() for writer in writers)
    results = [reader.result() for reader in readers]
    assert [result["problems"] for result in results] == [[]] * 4
    assert saves > 2 and all(result["reads"] > 2 for result in results), "the storm did not happen"
    assert max(result["versions"] for result in results) > 1, "no reader ever met a second version"


def _slow_reader(path: str, steps: int) -> dict[str, Any]:
    import os
    import time

    fd = os.open(path, os.O_RDONLY)
    sizes = [os.fstat(fd).st_size]
    parts = [os.read(fd, 4096)]
    say("reading")
    for _ in range(steps):
        time.sleep(1 / steps)
        parts.append(os.read(fd, 8192))
        sizes.append(os.fstat(fd).st_size)
    while part := os.read(fd, 65536):
        parts.append(part)
    content = b"".join(parts)
    os.lseek(fd, 0, os.SEEK_SET)
    again = os.read(fd, 1 << 20)
    os.close(fd)
    return {
        "bytes": sorted(set(content)),
        "length": len(content),
        "sizes": sorted(set(sizes)),
        "same": again == content,
    }


def test_a_slow_reader_keeps_its_version_while_it_is_overwritten(mounted: MountedVault) -> None:
    size = 200 * 1024
    mounted.put_behind("big.bin", b"1" * size)
    reader = mounted.spawn(_slow_reader, mounted.mnt / "big.bin", 20)
    reader.hear()
    for content in (b"2" * (size * 2), b"3" * 10, b""):  # longer, shorter, empty
        (mounted.mnt / "big.bin").write_bytes(content)
        assert mounted.read("big.bin") == content
        time.sleep(0.1)
    assert reader.running, "the reader was meant to be slower than the savers"
    assert reader.result() == {"bytes": [ord("1")], "length": size, "sizes": [size], "same": True}


# ------------------------------------------------------------------------------------ one opener, many descriptors


def _poll(path: Path, client: Client) -> list[bytes]:
    """What readers of `path` see while `client` runs, repetitions left out."""
    seen: list[bytes] = []
    while client.running:
        content = path.read_bytes()
        if not seen or seen[-1] != content:
            seen.append(content)
        time.sleep(0.02)
    return seen


def test_a_subshell_that_writes_twice_saves_once(mounted: MountedVault) -> None:
    mounted.put_behind("a.json", "{}\n")
    assert mounted.read("a.json") == b"{}\n"
    watcher = mounted.watch_behind()
    client = mounted.spawn_shell("(echo '{'; sleep 1; echo '}') > a.json")
    seen = _poll(mounted.mnt / "a.json", client)
    client.result()
    assert seen[0] == b"{}\n" and set(seen) <= {b"{}\n", b"{\n}\n"}
    assert mounted.read("a.json") == mounted.read_behind("a.json") == b"{\n}\n"
    assert watcher.publishes("a.json") == 1


def _write_child_write(path: str, inherit: bool) -> None:
    import subprocess

    with open(path, "wb", buffering=0) as file:
        file.write(b"first\n")
        subprocess.run(["true"], check=True, close_fds=not inherit, pass_fds=[file.fileno()] if inherit else [])
        subprocess.run("true; true", shell=True, check=True, pass_fds=[file.fileno()] if inherit else [])
        say("between")
        hear()
        file.write(b"second\n")


@pytest.mark.parametrize("inherit", [False, True], ids=["close-on-exec", "inherited"])
@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
def test_a_child_run_between_two_writes_publishes_nothing(mounted: MountedVault, inherit: bool, existing: bool) -> None:
    if existing:
        mounted.put_behind("out.txt", "old\n")
    watcher = mounted.watch_behind()
    client = mounted.spawn(_write_child_write, mounted.mnt / "out.txt", inherit)
    client.hear()
    if existing:
        assert mounted.read("out.txt") == mounted.read_behind("out.txt") == b"old\n"
    else:
        assert "out.txt" not in mounted.names_behind()
    assert watcher.publishes("out.txt") == 0
    client.say()
    client.result()
    assert mounted.read("out.txt") == mounted.read_behind("out.txt") == b"first\nsecond\n"
    assert watcher.publishes("out.txt") == 1


@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
def test_a_loop_of_200_children_with_one_output_saves_once(mounted: MountedVault, existing: bool) -> None:
    if existing:
        mounted.put_behind("list.txt", "old\n")
    watcher = mounted.watch_behind()
    mounted.shell("for i in $(seq 200); do /bin/echo $i; done > list.txt")
    assert mounted.read("list.txt") == mounted.read_behind("list.txt") == b"".join(b"%d\n" % i for i in range(1, 201))
    assert watcher.publishes("list.txt") == 1


def test_duplicates_closed_one_by_one_publish_at_the_last(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old\n")
    watcher = mounted.watch_behind()
    client = mounted.spawn_shell(
        "exec 3>f.txt; exec 4>&3; exec 5>&4; echo one >&3; exec 3>&-; echo closed; read _;"
        "echo two >&4; exec 4>&-; echo closed; read _; exec 5>&-; echo closed; read _"
    )
    for _ in range(2):
        client.hear()
        assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"old\n"
        assert watcher.publishes("f.txt") == 0
        client.say()
    client.hear()
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"one\ntwo\n"
    client.say()
    client.result()
    assert watcher.publishes("f.txt") == 1


def test_a_descriptor_handed_to_a_descendant_is_published_when_that_one_lets_go(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old\n")
    watcher = mounted.watch_behind()
    # The shell that opened the file ends; the background child still writes to it.
    client = mounted.spawn_shell(
        "mkfifo $HOME/fifo; bash -c '(echo early; read _ <$HOME/fifo; echo late) > f.txt & exit 0'; echo gone; read _;"
        "echo go >$HOME/fifo; rm $HOME/fifo"
    )
    client.hear()
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"old\n"
    client.say()
    client.result()
    eventually(lambda: mounted.read_behind("f.txt") == b"early\nlate\n", "the descendant's save is published")
    assert watcher.publishes("f.txt") == 1


def _become_another(path: str, rounds: int) -> None:
    """Programs that become others by execve(2) while their file is open close-on-exec: the close comes from inside."""
    import os

    for number in range(rounds):
        pid = os.fork()
        if pid == 0:
            fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
            os.write(fd, b"%d" % number)
            os.execvp("true", ["true"])
        assert os.waitpid(pid, 0)[1] == 0


def test_a_program_that_becomes_another_has_saved_what_it_does_not_take_along(mounted: MountedVault) -> None:
    """While it is in execve(2), all who look into its /proc wait for it: a daemon that did would wait for itself."""
    mounted.put_behind("f.txt", "old")
    mounted.call(_become_another, mounted.mnt / "f.txt", 50, guard=GUARD / 2)
    eventually(lambda: mounted.read_behind("f.txt") == b"49", "the save is published")
    assert mounted.read("f.txt") == b"49"


def test_a_program_that_becomes_another_saves_what_it_takes_along_when_that_one_ends(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old")
    watcher = mounted.watch_behind()
    client = mounted.spawn_shell("exec 3>f.txt; echo before >&3; exec bash -c 'echo said; read _; echo after >&3'")
    client.hear()
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"old"
    client.say()
    client.result()
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"before\nafter\n"
    assert watcher.publishes("f.txt") == 1


def test_children_that_become_others_do_not_hold_up_the_parent_that_writes(mounted: MountedVault) -> None:
    def write_between(path: str) -> None:
        import subprocess

        with open(path, "w") as file:
            for number in range(60):
                file.write(f"{number}\n")
                file.flush()
                subprocess.Popen(["true"], close_fds=False).wait()
                subprocess.Popen(["true"], pass_fds=[file.fileno()]).wait()

    mounted.put_behind("f.txt", "old")
    watcher = mounted.watch_behind()
    mounted.call(write_between, mounted.mnt / "f.txt", guard=GUARD / 2)
    assert mounted.read_behind("f.txt") == b"".join(b"%d\n" % number for number in range(60))
    assert watcher.publishes("f.txt") == 1


def _two_handles(path: str) -> dict[str, Any]:
    import os

    errors: dict[str, Any] = {}
    one, two = os.open(path, os.O_WRONLY), os.open(path, os.O_WRONLY)
    os.pwrite(one, b"ONE", 0)
    say("written")
    hear()
    for name, fd in (("one", one), ("two", two)):
        try:
            os.close(fd)
            errors[name] = 0
        except OSError as error:
            errors[name] = error.errno
        if name == "one":
            say("closed")
            hear()
            os.pwrite(two, b"TWO", 4)
    return errors


def test_the_first_of_two_write_handles_of_a_process_publishes_when_it_is_closed(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "one two")
    client = mounted.spawn(_two_handles, mounted.mnt / "f.txt")
    client.hear()
    assert mounted.read_behind("f.txt") == b"one two"
    client.ask()
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"ONE two"
    client.say()
    assert client.result() == {"one": 0, "two": 0}
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"ONE TWO"


def test_the_error_of_a_save_is_returned_by_the_handle_whose_close_made_it(vault_mount: Any) -> None:
    import errno

    mounted: MountedVault = vault_mount("lock-timeout=0.3s", files={"f.txt": "one two"})
    mounted.expect_kept(None)
    mounted.expect_log("busy|lock")
    with living_process() as pid:
        token = make_lock(mounted.behind / "f.txt", pid)
        client = mounted.spawn(_two_handles, mounted.mnt / "f.txt")
        client.hear()
        client.ask()
        assert mounted.read_behind("f.txt") == b"one two"
        drop_lock(mounted.behind / "f.txt", token)
        client.say()
        errors = client.result()
    assert errors["one"] == errno.EBUSY and errors["two"] == 0
    eventually(lambda: mounted.read_behind("f.txt") == b"ONE TWO", "both writes are in")


# ---------------------------------------------------------------------------------------------- killed writers


def _write_half_and_die(path: str, flags: int, number: int) -> None:
    import os

    fd = os.open(path, flags, 0o644)
    os.write(fd, b"half of the new content")
    os.kill(os.getpid(), number)


REPLACE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def _only_kept(mounted: MountedVault, target: str) -> dict[str, Any]:
    """The one kept draft, which must be listed for `target`."""
    listed = eventually(mounted.kept, "a draft is listed", step=0.2)
    assert [os.path.basename(str(draft.get("path", draft.get("target")))) for draft in listed] == [target]
    draft: dict[str, Any] = listed[0]
    return draft


@pytest.mark.parametrize("flags", [REPLACE, os.O_RDWR], ids=["replacing", "editing"])
def test_a_writer_killed_halfway_has_not_saved(mounted: MountedVault, flags: int) -> None:
    mounted.put_behind("note.md", "the old content, which is longer than the half")
    mounted.expect_kept(1)
    code, _ = mounted.spawn(_write_half_and_die, mounted.mnt / "note.md", flags, signal.SIGKILL).end()
    assert code == -signal.SIGKILL
    draft = _only_kept(mounted, "note.md")
    assert mounted.read("note.md") == b"the old content, which is longer than the half"
    assert mounted.read_behind("note.md") == b"the old content, which is longer than the half"
    half, old = b"half of the new content", b"the old content, which is longer than the half"
    assert mounted.kept_content(draft) == (half if flags == REPLACE else half + old[len(half) :])


def test_a_new_file_whose_writer_is_killed_outright_is_a_draft(mounted: MountedVault) -> None:
    mounted.expect_kept(1)
    mounted.spawn(_write_half_and_die, mounted.mnt / "new.md", REPLACE, signal.SIGKILL).end()
    draft = _only_kept(mounted, "new.md")
    assert mounted.kept_content(draft) == b"half of the new content"
    assert "new.md" not in mounted.names_behind()
    assert "new.md" not in os.listdir(mounted.mnt)


def test_what_a_killed_writer_only_appended_stays(mounted: MountedVault) -> None:
    mounted.put_behind("list.txt", "old\n")
    mounted.spawn(_write_half_and_die, mounted.mnt / "list.txt", os.O_WRONLY | os.O_APPEND, signal.SIGKILL).end()
    eventually(lambda: mounted.read_behind("list.txt") == b"old\nhalf of the new content", "the append is published")
    assert mounted.read("list.txt") == b"old\nhalf of the new content"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE])
def test_a_new_output_stopped_by_request_is_published_as_far_as_it_got(
    mounted: MountedVault, number: signal.Signals
) -> None:
    def stopped(path: str, number: int) -> None:
        import os
        import signal

        signal.signal(number, signal.SIG_DFL)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(fd, b"as far as it got")
        os.kill(os.getpid(), number)

    code, _ = mounted.spawn(stopped, mounted.mnt / "new.txt", number).end()
    assert code == -number
    eventually(lambda: "new.txt" in mounted.names_behind(), "the new file is published")
    assert mounted.read("new.txt") == mounted.read_behind("new.txt") == b"as far as it got"


def _chatter(mounted: MountedVault, redirection: str, seconds: float) -> tuple[float, str]:
    """A shell that writes lines to its output until it is killed after `seconds`: (how long it had the file open at
    most, how many lines it had surely written)."""
    before = time.monotonic()
    client = mounted.spawn_shell(
        f"exec {redirection}; n=0; while :; do n=$((n+1)); echo line $n; sleep .1; done", mounted.mnt
    )
    time.sleep(seconds)
    client.kill(signal.SIGTERM)
    return time.monotonic() - before, "line 1\nline 2\n"


def _chatter_for_less_than(mounted: MountedVault, redirection: str, most: float) -> str:
    """`_chatter`, killed before its file was open for `most` seconds; "retry" on a machine too slow for that."""
    took, start = _chatter(mounted, redirection, most * 0.5)
    return start if took < most else "retry"


def test_a_stopped_shell_that_wrote_a_new_file_leaves_what_it_wrote(mounted: MountedVault) -> None:
    _, start = _chatter(mounted, "> f.txt", 1)
    eventually(lambda: "f.txt" in mounted.names_behind(), "the new file is published")
    assert mounted.read("f.txt").decode().startswith(start)
    assert mounted.read_behind("f.txt") == mounted.read("f.txt")


def test_a_stopped_shell_that_replaced_a_file_for_a_moment_leaves_the_old_one(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old\n")
    mounted.expect_kept(1)
    start = _chatter_for_less_than(mounted, "> f.txt", 2)
    if start == "retry":
        mounted.expect_kept(None)
        pytest.skip("this machine is too busy to kill a process within two seconds")
    draft = _only_kept(mounted, "f.txt")
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"old\n"
    assert mounted.kept_content(draft).decode().startswith(start)


def test_a_stopped_shell_that_replaced_a_file_for_long_is_published_and_the_old_one_kept(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old\n")
    mounted.expect_kept(1)
    _, start = _chatter(mounted, "> f.txt", 3.2)
    eventually(lambda: mounted.read_behind("f.txt") != b"old\n", "the long output is published")
    assert mounted.read("f.txt").decode().startswith(start)
    assert mounted.kept_content(_only_kept(mounted, "f.txt")) == b"old\n"


def test_a_stopped_shell_that_appended_leaves_its_lines(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old\n")
    _, start = _chatter(mounted, ">> f.txt", 1)
    eventually(lambda: mounted.read_behind("f.txt") != b"old\n", "the lines are published")
    assert mounted.read("f.txt").decode().startswith("old\n" + start)
    assert mounted.read_behind("f.txt") == mounted.read("f.txt")


def test_a_program_that_catches_the_signal_and_exits_has_saved(mounted: MountedVault) -> None:
    def catching(path: str) -> None:
        import os
        import signal
        import sys

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        with open(path, "w") as file:
            file.write("complete\n")
            file.flush()
            os.kill(os.getpid(), signal.SIGTERM)

    mounted.put_behind("f.txt", "old\n")
    code, _ = mounted.spawn(catching, mounted.mnt / "f.txt").end()
    assert code == 3
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"complete\n"


# ------------------------------------------------------------------------------------------------- new files


def _write_slowly(path: str) -> None:
    with open(path, "wb", buffering=0) as file:
        for part in (b"12345\n", b"67890\n"):
            file.write(part)
            say("written")
            hear()


def test_a_new_file_is_readable_while_it_is_written_and_not_yet_in_the_vault(mounted: MountedVault) -> None:
    client = mounted.spawn(_write_slowly, mounted.mnt / "growing.bin")
    for expected in (b"12345\n", b"12345\n67890\n"):
        client.hear()
        assert mounted.read("growing.bin") == expected
        assert (mounted.mnt / "growing.bin").stat().st_size == len(expected)
        assert f" {len(expected)} " in mounted.shell("ls -l growing.bin").stdout.decode()
        assert os.listdir(mounted.mnt) == ["growing.bin"]
        assert mounted.names_behind() == set()
        client.say()
    client.result()
    assert mounted.read_behind("growing.bin") == b"12345\n67890\n"


def test_a_named_temporary_file_can_be_handed_to_a_child(mounted: MountedVault) -> None:
    def hand_over(directory: str) -> str:
        import subprocess
        import tempfile

        with tempfile.NamedTemporaryFile("w", dir=directory, suffix=".txt") as file:
            file.write("for the child\n")
            file.flush()
            return subprocess.run(["cat", file.name], check=True, capture_output=True, text=True).stdout

    assert mounted.call(hand_over, mounted.mnt) == "for the child\n"
    assert os.listdir(mounted.mnt) == [] and mounted.names_behind() == set()


def test_a_pidfile_can_be_read_before_it_is_closed(mounted: MountedVault) -> None:
    client = mounted.spawn_shell("exec 3>daemon.pid; echo $$ >&3; echo ready; read _")
    client.hear()
    assert int(mounted.read("daemon.pid")) > 1
    client.say()
    client.result()
    assert int(mounted.read_behind("daemon.pid")) > 1


def test_a_new_file_closed_without_a_write_is_published_empty(mounted: MountedVault) -> None:
    mounted.shell(": > empty.txt; touch touched.txt")
    assert mounted.names_behind() == {"empty.txt", "touched.txt"}
    assert mounted.read_behind("empty.txt") == mounted.read("touched.txt") == b""


def test_a_mode_set_by_path_while_the_file_is_written_is_the_published_mode(mounted: MountedVault) -> None:
    mounted.put_behind("existing.txt", "old\n")
    for name in ("secret.txt", "existing.txt"):
        client = mounted.spawn(_write_slowly, mounted.mnt / name)
        client.hear()
        mounted.shell('chmod 600 "$1"', name)
        assert stat.S_IMODE((mounted.mnt / name).stat().st_mode) == 0o600
        client.say()
        client.ask()
        client.result()
        assert stat.S_IMODE((mounted.behind / name).stat().st_mode) == 0o600
        assert stat.S_IMODE((mounted.mnt / name).stat().st_mode) == 0o600
        assert mounted.read_behind(name) == b"12345\n67890\n"


def test_an_exclusive_create_claims_the_name_in_the_vault_at_once(mounted: MountedVault) -> None:
    def claim(path: str) -> int:
        import errno
        import os

        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, b"mine")
        say("claimed")
        hear()
        try:
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError as error:
            assert error.errno == errno.EEXIST
        else:
            return 1
        os.close(fd)
        return 0

    client = mounted.spawn(claim, mounted.mnt / "claim.md")
    client.hear()
    assert mounted.read_behind("claim.md") == b"", "claimed, and nothing published yet"
    with pytest.raises(FileExistsError):
        os.open(mounted.mnt / "claim.md", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    client.say()
    assert client.result() == 0
    assert mounted.read_behind("claim.md") == b"mine"


def _racer(directory: str, rounds: int) -> list[int]:
    import os

    won = []
    for number in range(rounds):
        say("ready")
        hear()
        try:
            fd = os.open(f"{directory}/claim-{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        os.write(fd, str(os.getpid()).encode())
        os.close(fd)
        won.append(number)
    return won


def test_of_many_exclusive_creators_exactly_one_wins(mounted: MountedVault) -> None:
    rounds = int(scaled(30))
    racers = [mounted.spawn(_racer, mounted.mnt, rounds) for _ in range(4)]
    for _ in range(rounds):
        for racer in racers:
            racer.hear()
        for racer in racers:
            racer.say()
    won = sorted(number for racer in racers for number in racer.result())
    assert won == list(range(rounds))


def test_an_exclusive_create_of_a_name_taken_in_the_vault_fails(mounted: MountedVault) -> None:
    assert os.listdir(mounted.mnt) == []
    mounted.put_behind("taken.md", "outside\n")
    with pytest.raises(FileExistsError):
        os.open(mounted.mnt / "taken.md", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    assert mounted.read("taken.md") == b"outside\n"


# ------------------------------------------------------------------------- fsync, truncate, idle, nothing changed


def test_fsync_publishes_and_the_file_goes_on(mounted: MountedVault) -> None:
    def syncing(path: str) -> None:
        import os

        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, b"first", 0)
        say("written")
        hear()
        os.fsync(fd)
        say("synced")
        hear()
        os.pwrite(fd, b"SECOND", 6)
        say("written again")
        hear()
        assert os.pread(fd, 100, 0) == b"first SECOND", os.pread(fd, 100, 0)
        os.close(fd)

    mounted.put_behind("f.txt", "FIRST second")
    client = mounted.spawn(syncing, mounted.mnt / "f.txt")
    client.hear()
    assert mounted.read_behind("f.txt") == b"FIRST second"
    client.ask()
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"first second"
    client.ask()
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"first second"
    client.say()
    client.result()
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"first SECOND"


def test_fdatasync_of_a_new_file_brings_it_into_the_vault(mounted: MountedVault) -> None:
    def syncing(path: str) -> None:
        import os

        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(fd, b"durable")
        os.fdatasync(fd)
        say("synced")
        hear()
        os.close(fd)

    client = mounted.spawn(syncing, mounted.mnt / "new.txt")
    client.hear()
    assert mounted.read_behind("new.txt") == mounted.read("new.txt") == b"durable"
    client.say()
    client.result()


def test_truncate_by_path_is_published_when_it_returns(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "0123456789")
    os.truncate(mounted.mnt / "f.txt", 3)
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"012"
    os.truncate(mounted.mnt / "f.txt", 6)
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"012\0\0\0"
    os.truncate(mounted.mnt / "f.txt", 0)
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b""


def test_truncating_on_open_publishes_nothing_until_the_writer_is_done(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old\n")
    client = mounted.spawn_shell("exec 3>f.txt; echo opened; read _; exec 3>&-; echo closed; read _")
    client.hear()
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"old\n"
    client.ask()
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b""
    client.say()
    client.result()


def test_opening_for_writing_without_changing_anything_publishes_nothing(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old\n")
    mounted.put_behind("empty.txt", "")
    before = os.stat(mounted.behind / "f.txt")
    watcher = mounted.watch_behind()
    mounted.shell("exec 3<>f.txt; exec 3>&-; exec 3>>f.txt; exec 3>&-; exec 3>empty.txt; exec 3>&-")
    after = os.stat(mounted.behind / "f.txt")
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert watcher.publishes("f.txt") == watcher.publishes("empty.txt") == 0


def test_what_is_left_open_and_idle_is_published_as_it_stands(vault_mount: Any) -> None:
    mounted: MountedVault = vault_mount("idle-publish=0.5s", files={"edited.txt": "old old", "replaced.txt": "old"})
    client = mounted.spawn_shell(
        "exec 3>new.txt 4<>edited.txt 5>replaced.txt; printf new >&3; printf NEW >&4; printf half >&5; echo written;"
        "read _; printf ' more' >&3; printf ' whole' >&5"
    )
    client.hear()
    eventually(lambda: "new.txt" in mounted.names_behind(), "the idle new file is published")
    eventually(lambda: mounted.read_behind("edited.txt") == b"NEW old", "the idle edit is published")
    assert mounted.read_behind("new.txt") == b"new"
    assert mounted.read_behind("replaced.txt") == b"old", "a replacement is not published before it is complete"
    client.say()
    client.result()
    assert mounted.read_behind("new.txt") == b"new more"
    assert mounted.read_behind("replaced.txt") == b"half whole"


# -------------------------------------------------------------------------------- what a save leaves as it was


def test_mode_owner_and_attributes_survive_a_save(mounted: MountedVault) -> None:
    path = mounted.put_behind("f.txt", "old\n")
    path.chmod(0o640)
    os.setxattr(path, "user.tag", b"kept")
    if os.getuid() == 0:
        os.chown(path, 1234, 2345)
    before = os.stat(path)
    mounted.shell("umask 077; echo new > f.txt")
    after = os.stat(path)
    assert mounted.read_behind("f.txt") == b"new\n"
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert os.getxattr(path, "user.tag") == os.getxattr(mounted.mnt / "f.txt", "user.tag") == b"kept"


def test_a_handle_reports_the_times_that_the_path_reports_after_the_save(mounted: MountedVault) -> None:
    def save(path: str) -> list[list[int]]:
        import os

        found = []
        for number in range(20):
            with open(path, "w") as file:
                file.write(f"save {number}\n")
                file.flush()
                inside = os.fstat(file.fileno())
            after = os.stat(path)
            found.append([inside.st_mtime_ns - after.st_mtime_ns, inside.st_size - after.st_size])
        return found

    assert mounted.call(save, mounted.mnt / "f.txt") == [[0, 0]] * 20


def test_save_then_edit_again_at_once_keeps_the_last_content(mounted: MountedVault) -> None:
    def again(path: str) -> str:
        for number in range(100):
            with open(path, "w") as file:
                file.write(f"{number}\n")
            with open(path, "r+") as file:
                file.seek(0, 2)
                file.write("edited\n")
        with open(path) as file:
            return file.read()

    assert mounted.call(again, mounted.mnt / "f.txt") == "99\nedited\n"
    assert mounted.read_behind("f.txt") == b"99\nedited\n"


def test_a_rename_over_a_file_keeps_the_version_of_its_readers(mounted: MountedVault) -> None:
    mounted.put_behind("n.md", "old old old\n")
    with open(mounted.mnt / "n.md", "rb") as reader:
        assert reader.read(3) == b"old"
        (mounted.mnt / ".n.tmp").write_bytes(b"new\n")
        os.rename(mounted.mnt / ".n.tmp", mounted.mnt / "n.md")
        assert mounted.read("n.md") == mounted.read_behind("n.md") == b"new\n"
        assert reader.read() == b" old old\n"
        assert os.fstat(reader.fileno()).st_size == 12
    assert mounted.names_behind() == {"n.md"}


def test_an_unlinked_open_file_goes_on_and_ends_nowhere(mounted: MountedVault) -> None:
    def unlinked(directory: str) -> list[Any]:
        import os

        found: list[Any] = []
        for name in ("new.txt", "existing.txt"):
            path = f"{directory}/{name}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            os.write(fd, b"written")
            os.unlink(path)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, 3)
            status = os.fstat(fd)
            found.append([status.st_size, status.st_mode & 0o777, status.st_nlink, os.pread(fd, 10, 0).decode()])
            os.close(fd)
        return found

    mounted.put_behind("existing.txt", "old content")
    assert mounted.call(unlinked, mounted.mnt) == [[3, 0o600, 0, "wri"]] * 2
    assert os.listdir(mounted.mnt) == [] and mounted.names_behind() == set()


def test_status_counts_each_save_once(mounted: MountedVault) -> None:
    before = mounted.counters()
    mounted.shell("for i in 1 2 3 4 5; do echo $i > f.txt; done; echo more >> f.txt")
    after = mounted.counters()
    assert after["saves"] - before["saves"] == 6
    assert json.dumps(after)
