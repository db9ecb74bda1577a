"""Who watches sees whole versions: from behind, in the vault directory, and on the mount, by inotify.

Contract, promises 1 and 3; versions-and-drafts.md, "Watchers see saves". node's `fs.watch` and chokidar have their own
tests in `tests/interop`.
"""

from __future__ import annotations

import os
import threading

from tests.mount.harness import Event, MountedVault, eventually, hear, say, scaled


def _hundred_saves(path: str, rounds: int) -> None:
    import os

    for number in range(rounds):
        content = b"%04d" % number * (1 + number * 37 % 5000)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for start in range(0, len(content), 4096):
            os.write(fd, content[start : start + 4096])
        os.close(fd)


def _is_whole(content: bytes) -> bool:
    if content == b"old":
        return True
    if not content or not content[:4].isdigit():
        return False
    number = int(content[:4])
    return content == b"%04d" % number * (1 + number * 37 % 5000)


def test_watched_from_behind_only_whole_versions_appear_at_a_name(mounted: MountedVault) -> None:
    """At every event and all the time between, whatever the vault directory shows at the name is one whole version."""
    rounds = int(scaled(100))
    mounted.put_behind("f.txt", "old")
    problems: list[str] = []
    looks = 0

    def look(what: str) -> None:
        nonlocal looks
        try:
            fd = os.open(mounted.behind / "f.txt", os.O_RDONLY)
        except FileNotFoundError:
            problems.append(f"{what}: the name was missing")
            return
        content = b""
        while part := os.read(fd, 1 << 16):
            content += part
        os.close(fd)
        looks += 1
        if not _is_whole(content):
            problems.append(f"{what}: {content[:12]!r}… of {len(content)} bytes")

    def on_event(event: Event) -> None:
        if event.name == "f.txt":
            look(event.what)

    watcher = mounted.watch_behind(on_event=on_event)
    ended = threading.Event()

    def look_all_the_time() -> None:
        while not ended.is_set():
            look("between events")

    looker = threading.Thread(target=look_all_the_time)
    looker.start()
    mounted.call(_hundred_saves, mounted.mnt / "f.txt", rounds)
    ended.set()
    looker.join()
    events = watcher.seen()
    assert problems == []
    assert watcher.publishes("f.txt") == rounds, "each save is one publish"
    # Nobody wrote in place: the name only ever changed by a rename.
    assert [event for event in events if event.name == "f.txt" and "MODIFY" in event.what] == []
    # Nothing but the document, its lock and the state directory ever had a name there.
    assert {event.name for event in events} <= {"f.txt", "f.txt.lock", "", ".vaultfs"}
    assert looks > rounds


def _contents_at_events(mounted: MountedVault, name: str) -> list[bytes]:
    """What a program reads that looks at the mount's `name` whenever inotify tells it something about it."""
    contents: list[bytes] = []

    def look(event: Event) -> None:
        if event.name == name:
            try:
                contents.append((mounted.mnt / name).read_bytes())
            except FileNotFoundError:
                contents.append(b"(gone)")

    mounted.watch(mounted.mnt, on_event=look)
    return contents


def test_watchers_on_the_mount_read_each_save(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old")
    os.listdir(mounted.mnt)
    contents = _contents_at_events(mounted, "f.txt")
    for number in range(5):
        mounted.shell('echo "save $1" > f.txt', number)
        wanted = b"save %d\n" % number
        eventually(lambda wanted=wanted: contents and contents[-1] == wanted, "the watcher reads the save")


def test_watchers_on_the_mount_read_a_save_that_was_closed_long_after_it_was_written(mounted: MountedVault) -> None:
    def slow(path: str) -> None:
        with open(path, "w") as file:
            file.write("new")
            file.flush()
            say("written")
            hear()

    mounted.put_behind("f.txt", "old")
    os.listdir(mounted.mnt)
    contents = _contents_at_events(mounted, "f.txt")
    client = mounted.spawn(slow, mounted.mnt / "f.txt")
    client.hear()
    eventually(lambda: contents, "the kernel reports the write itself")
    assert set(contents) == {b"old"}
    client.say()
    client.result()
    eventually(lambda: contents[-1] == b"new", "the watcher reads the save")


def test_watchers_on_the_mount_read_what_is_changed_in_the_vault(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old")
    assert mounted.read("f.txt") == b"old"
    contents = _contents_at_events(mounted, "f.txt")
    for number in range(3):
        content = b"outside %d" % number
        mounted.put_behind("f.txt", content)
        eventually(lambda content=content: contents and contents[-1] == content, "the watcher reads the change")
    mounted.put_behind("f.txt", "written in place", in_place=True)
    eventually(lambda: contents[-1] == b"written in place", "the watcher reads the change in place")
    (mounted.behind / "f.txt").unlink()
    eventually(lambda: contents[-1] == b"(gone)", "the watcher is told of the removal")


def test_watchers_on_the_mount_hear_of_an_atomic_replacement_as_a_rename(mounted: MountedVault) -> None:
    (mounted.mnt / "n.md").write_text("old")
    watcher = mounted.watch(mounted.mnt)
    (mounted.mnt / ".n.md.tmp").write_text("new")
    os.replace(mounted.mnt / ".n.md.tmp", mounted.mnt / "n.md")
    assert any(event.name == "n.md" and "MOVED_TO" in event.what for event in watcher.seen())


def test_a_save_announced_to_watchers_changes_nothing(mounted: MountedVault) -> None:
    """The announcement is a chmod to the same mode: it leaves mode, times and content alone."""
    path = mounted.put_behind("f.txt", "old")
    path.chmod(0o640)
    contents = _contents_at_events(mounted, "f.txt")
    mounted.shell("echo new > f.txt")
    published = os.stat(mounted.behind / "f.txt")
    eventually(lambda: contents and contents[-1] == b"new\n", "the watcher reads the save")
    after = os.stat(mounted.behind / "f.txt")
    assert (after.st_mode, after.st_mtime_ns, after.st_ino) == (
        published.st_mode,
        published.st_mtime_ns,
        published.st_ino,
    )
