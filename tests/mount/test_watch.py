"""What other programs do in the vault is heard of; what the kernel kept of it is dropped, by a thread that may wait."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import inotify_simple
import pytest
import trio

from tests.mount.harness import eventually
from tests.mount.test_announce import TinyMount, Watcher, threads_in_state, tiny, watch
from vaultfs.mount import watch as watching
from vaultfs.mount.watch import Invalidator, OutsideWatch

__all__ = ["tiny", "watch"]  # fixtures

Call = tuple[int, bytes, bool]


class Outside:
    """An OutsideWatch with callbacks that note what they are told."""

    def __init__(self, **keywords: Any) -> None:
        self.calls: list[Call] = []
        self.overflows = 0
        self.watch = OutsideWatch(self._changed, self._overflow, **keywords)

    async def _changed(self, inode: int, name: bytes, deleted: bool) -> None:
        self.calls.append((inode, name, deleted))

    async def _overflow(self) -> None:
        self.overflows += 1

    def add(self, inode: int, path: Path) -> bool:
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY)
        try:
            return self.watch.add(inode, b"/proc/self/fd/%d" % descriptor)
        finally:
            os.close(descriptor)

    async def wait_for(self, call: Call) -> None:
        with trio.fail_after(30):
            while call not in self.calls:
                await trio.sleep(0.005)

    async def quiet(self, inode: int, path: Path) -> None:
        """All events up to now have been passed on: a last one, which comes after them, has."""
        (path / "the-last").write_text("")
        await self.wait_for((inode, b"the-last", False))
        (path / "the-last").unlink()
        await self.wait_for((inode, b"the-last", True))
        self.calls = [call for call in self.calls if call[1] != b"the-last"]


@asynccontextmanager
async def outside(**keywords: Any) -> AsyncIterator[Outside]:
    """Not running yet; `running` does that."""
    it = Outside(**keywords)
    try:
        yield it
    finally:
        it.watch.close()


@asynccontextmanager
async def running(**keywords: Any) -> AsyncIterator[Outside]:
    async with outside(**keywords) as it, trio.open_nursery() as nursery:
        nursery.start_soon(it.watch.run)
        yield it
        nursery.cancel_scope.cancel()


def in_trio(test: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        trio.run(test, tmp_path)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def write(path: Path) -> None:
    path.write_text("y")


def store_through_mmap(path: Path) -> None:
    import mmap

    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[0:1] = b"z"


ACTIONS: list[tuple[str, Callable[[Path], object], list[Call]]] = [
    ("write", lambda d: write(d / "old"), [(7, b"old", False)]),
    ("mmap", lambda d: store_through_mmap(d / "old"), [(7, b"old", False)]),
    ("create", lambda d: write(d / "new"), [(7, b"new", False)]),
    ("chmod", lambda d: (d / "old").chmod(0o600), [(7, b"old", False)]),
    ("unlink", lambda d: (d / "old").unlink(), [(7, b"old", True)]),
    ("rename", lambda d: (d / "old").rename(d / "new"), [(7, b"old", True), (7, b"new", False)]),
    ("replace", lambda d: (write(d / "x"), (d / "x").rename(d / "old")), [(7, b"old", False), (7, b"x", True)]),
    ("symlink", lambda d: (d / "link").symlink_to("old"), [(7, b"link", False)]),
    ("mkdir", lambda d: (d / "sub").mkdir(), [(7, b"sub", False)]),
    ("gone and back", lambda d: ((d / "old").unlink(), write(d / "old")), [(7, b"old", False)]),
    ("come and gone", lambda d: (write(d / "new"), (d / "new").unlink()), [(7, b"new", True)]),
    ("moved out", lambda d: (d / "old").rename(d.parent / "old"), [(7, b"old", True)]),
    ("own mode", lambda d: d.chmod(0o700), [(7, b"", False)]),
]


@pytest.mark.parametrize(("action", "expected"), [row[1:] for row in ACTIONS], ids=[row[0] for row in ACTIONS])
def test_every_kind_of_change_is_told_once_for_each_name(
    tmp_path: Path, action: Callable[[Path], object], expected: list[Call]
) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    (directory / "old").write_text("x")

    async def test() -> None:
        async with outside() as it:
            assert it.add(7, directory)
            action(directory)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(it.watch.run)
                await it.quiet(7, directory)
                nursery.cancel_scope.cancel()
            assert sorted(it.calls) == sorted(expected)

    trio.run(test)


def test_a_file_deleted_while_it_is_written_stays_deleted(tmp_path: Path) -> None:
    path = tmp_path / "note"

    async def test() -> None:
        async with outside() as it:
            with path.open("w") as file:
                assert it.add(7, tmp_path)
                file.write("x")
                file.flush()
                path.unlink()
                file.write("y")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(it.watch.run)
                await it.quiet(7, tmp_path)
                nursery.cancel_scope.cancel()
            assert it.calls == [(7, b"note", True)]

    trio.run(test)


@in_trio
async def test_names_may_be_any_bytes(tmp_path: Path) -> None:
    async with running() as it:
        it.add(7, tmp_path)
        for name in (b"\xff\xfe", b"new\nline", b"x" * 255):
            os.close(os.open(os.fsencode(tmp_path) + b"/" + name, os.O_CREAT))
            await it.wait_for((7, name, False))


@in_trio
async def test_machinery_is_not_told(tmp_path: Path) -> None:
    async with running(ignored=lambda name: name.startswith(b".vaultfs") or name.endswith(b".lock")) as it:
        it.add(7, tmp_path)
        (tmp_path / ".vaultfs").mkdir()
        (tmp_path / ".vaultfs-probe").write_text("")
        (tmp_path / "a.lock").mkdir()
        await it.quiet(7, tmp_path)
        assert it.calls == []


@in_trio
async def test_state_files_are_not_told_by_default(tmp_path: Path) -> None:
    async with running() as it:
        it.add(7, tmp_path)
        (tmp_path / ".vaultfs").mkdir()
        await it.quiet(7, tmp_path)
        assert it.calls == []


@in_trio
async def test_each_directory_is_told_by_its_own_number(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    async with running() as it:
        assert it.add(1, tmp_path) and it.add(2, tmp_path / "sub")
        assert len(it.watch) == 2
        (tmp_path / "sub" / "note").write_text("x")
        (tmp_path / "note").write_text("x")
        await it.wait_for((1, b"note", False))
        assert (2, b"note", False) in it.calls


@in_trio
async def test_what_is_forgotten_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    async with running() as it:
        it.add(1, tmp_path)
        it.add(2, tmp_path / "sub")
        (tmp_path / "sub" / "before").write_text("x")
        it.watch.forget(2)
        it.watch.forget(2)
        (tmp_path / "sub" / "after").write_text("x")
        await it.quiet(1, tmp_path)
        assert it.calls == [] and len(it.watch) == 1
        assert it.add(2, tmp_path / "sub")
        (tmp_path / "sub" / "again").write_text("x")
        await it.wait_for((2, b"again", False))


@in_trio
async def test_a_directory_that_goes_tells_it_and_is_watched_no_longer(tmp_path: Path) -> None:
    sub = tmp_path / "sub"
    sub.mkdir()
    async with running() as it:
        it.add(1, tmp_path)
        it.add(2, sub)
        shutil.rmtree(sub)
        await it.wait_for((2, b"", True))
        await it.quiet(1, tmp_path)
        assert len(it.watch) == 1
        it.watch.forget(2)
        sub.mkdir()
        assert it.add(2, sub)  # the number is used again, and the late FORGET has not removed the new watch
        (sub / "note").write_text("x")
        await it.wait_for((2, b"note", False))


@in_trio
async def test_a_directory_that_is_moved_tells_it_and_is_still_watched(tmp_path: Path) -> None:
    sub = tmp_path / "sub"
    sub.mkdir()
    async with running() as it:
        it.add(2, sub)
        sub.rename(tmp_path / "elsewhere")
        await it.wait_for((2, b"", True))
        (tmp_path / "elsewhere" / "note").write_text("x")
        await it.wait_for((2, b"note", False))


@in_trio
async def test_a_number_that_means_another_directory_watches_that_one(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    async with running() as it:
        it.add(5, tmp_path / "first")
        it.add(5, tmp_path / "second")
        assert len(it.watch) == 1
        (tmp_path / "first" / "note").write_text("x")
        (tmp_path / "second" / "other").write_text("x")
        await it.wait_for((5, b"other", False))
        assert it.calls == [(5, b"other", False)]


@in_trio
async def test_a_directory_known_by_a_new_number_survives_the_forget_of_the_old(tmp_path: Path) -> None:
    async with running() as it:
        it.add(5, tmp_path)
        it.add(6, tmp_path)
        it.watch.forget(5)
        (tmp_path / "note").write_text("x")
        await it.wait_for((6, b"note", False))
        assert len(it.watch) == 1


@in_trio
async def test_a_callback_that_fails_costs_its_own_name_only(tmp_path: Path) -> None:
    told: list[bytes] = []

    async def changed(inode: int, name: bytes, deleted: bool) -> None:
        if name == b"bad":
            raise RuntimeError("cannot look at that one")
        told.append(name)

    async def overflow() -> None:
        raise AssertionError

    watch = OutsideWatch(changed, overflow)
    watch.add(1, os.fsencode(tmp_path))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        (tmp_path / "bad").write_text("")
        (tmp_path / "good").write_text("")
        with trio.fail_after(30):
            while b"good" not in told:
                await trio.sleep(0.005)
        watch.close()  # ends run() without an error
        watch.close()


@in_trio
async def test_a_flood_lets_other_tasks_have_their_turn(tmp_path: Path) -> None:
    turns = 0
    turns_at_end = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with outside() as it:
        it.add(1, tmp_path)
        for number in range(500):
            (tmp_path / str(number)).write_text("")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(it.watch.run)
            nursery.start_soon(other)
            await it.wait_for((1, b"499", False))
            turns_at_end = turns
            nursery.cancel_scope.cancel()
        assert len(it.calls) == 500
        assert turns_at_end >= 500 // watching._YIELD_AFTER


def test_events_that_the_kernel_dropped_are_told(tmp_path: Path) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 1 << 17:
        pytest.skip("the queue is too long to be filled in a test")

    async def test() -> None:
        async with outside() as it:
            it.add(1, tmp_path)
            first, second = tmp_path / "a", tmp_path / "b"
            first.write_text("")
            for _ in range(limit // 2 + 10):  # two events each, never like the last one, so none are merged
                os.rename(first, second)
                first, second = second, first
            async with trio.open_nursery() as nursery:
                nursery.start_soon(it.watch.run)
                with trio.fail_after(30):
                    while not it.overflows:
                        await trio.sleep(0.005)
                await it.quiet(1, tmp_path)  # and goes on
                nursery.cancel_scope.cancel()

    trio.run(test)


# ---------------------------------------------------------------- what cannot be watched


def test_the_limit_of_watches_makes_add_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    it = Outside()
    try:
        monkeypatch.setattr(inotify_simple.INotify, "add_watch", full)
        with caplog.at_level(logging.WARNING):
            assert not it.add(1, tmp_path)
            assert not it.add(2, tmp_path)
        assert len(it.watch) == 0
        assert caplog.text.count("fs.inotify.max_user_watches") == 1
    finally:
        trio.run(close, it)


async def close(it: Outside) -> None:
    it.watch.close()


def test_without_any_inotify_the_mount_works_and_caches_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(*arguments: object, **keywords: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(inotify_simple.INotify, "__init__", none_left)
    it = Outside()
    assert not it.add(1, tmp_path)
    assert "fs.inotify.max_user_instances" in caplog.text

    async def test() -> None:
        with trio.move_on_after(0.05) as scope:
            await it.watch.run()
        assert scope.cancelled_caught

    trio.run(test)


def test_what_is_no_directory_or_gone_is_not_watched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    it = Outside()
    try:
        assert not it.watch.add(1, os.fsencode(tmp_path / "file"))
        assert not it.watch.add(1, os.fsencode(tmp_path / "missing"))
        assert len(it.watch) == 0
    finally:
        trio.run(close, it)


def test_a_file_system_that_hides_changes_of_others_is_not_watched(tiny: Callable[..., TinyMount]) -> None:
    mount = tiny()
    it = Outside()
    try:
        assert not it.add(1, mount.mountpoint)
    finally:
        trio.run(close, it)


# ---------------------------------------------------------------- the invalidator


class Kernel:
    """Notes what it is told to forget; may be slow."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.error: BaseException | None = None

    def entry(self, parent: int, name: bytes, deleted: int) -> None:
        self.go_on.wait(30)
        self.told.append((parent, name, deleted))
        if self.error is not None:
            raise self.error

    def inode(self, inode: int, attr_only: bool) -> None:
        self.go_on.wait(30)
        self.told.append((inode, attr_only))
        if self.error is not None:
            raise self.error


@pytest.fixture
def kernel_told() -> Kernel:
    return Kernel()


@pytest.fixture
def invalidator(kernel_told: Kernel) -> Any:
    invalidator = Invalidator(kernel_told.entry, kernel_told.inode)
    invalidator.start()
    yield invalidator
    kernel_told.go_on.set()
    assert invalidator.stop()


def test_what_follows_comes_after_the_kernel_forgot(kernel_told: Kernel, invalidator: Invalidator) -> None:
    done = threading.Event()
    invalidator.entry(1, b"a", then=lambda: kernel_told.told.append(("then",)))
    invalidator.entry(1, b"b", 77)
    invalidator.inode(5, True)
    invalidator.inode(6, False, then=done.set)
    assert done.wait(30)
    assert kernel_told.told == [(1, b"a", 0), ("then",), (1, b"b", 77), (5, True), (6, False)]


def test_a_kernel_that_keeps_us_waiting_keeps_no_one_else(kernel_told: Kernel, invalidator: Invalidator) -> None:
    kernel_told.go_on.clear()
    for number in range(1000):
        invalidator.entry(1, b"%d" % number)
    eventually(lambda: invalidator.waiting == 999, "the first is begun, and the others wait without us")
    assert not invalidator.stop(0.05)
    kernel_told.go_on.set()
    assert invalidator.stop()
    assert len(kernel_told.told) == 1  # what was not begun is not begun any more: the mount goes


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, ""),
        OSError(errno.ENOTCONN, ""),
        OSError(errno.ENODEV, ""),
        NotADirectoryError(errno.ENOTDIR, ""),
    ],
)
def test_what_the_kernel_does_not_know_is_forgotten_already(
    kernel_told: Kernel, invalidator: Invalidator, caplog: pytest.LogCaptureFixture, error: OSError
) -> None:
    kernel_told.error = error
    done = threading.Event()
    invalidator.entry(1, b"a", then=done.set)
    assert done.wait(30)
    assert caplog.records == []


@pytest.mark.parametrize("error", [OSError(errno.EPERM, "no"), RuntimeError("unexpected")])
def test_other_failures_are_told_and_cost_their_own_name_only(
    kernel_told: Kernel, invalidator: Invalidator, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    kernel_told.error = error
    done = threading.Event()
    invalidator.entry(1, b"a", then=lambda: 1 / 0)
    invalidator.entry(1, b"b", then=done.set)
    assert done.wait(30)
    assert len(caplog.records) == 3


def test_an_invalidator_that_was_never_started_can_be_stopped() -> None:
    assert Invalidator().stop()


# ---------------------------------------------------------------- on a real mount


def test_a_real_kernel_looks_a_forgotten_name_up_again(tiny: Callable[..., TinyMount]) -> None:
    mount = tiny()
    os.stat(mount.mountpoint / "a")
    os.stat(mount.mountpoint / "a")
    mount.tell("invalidate a")
    mount.wait_for("INVALIDATED")
    os.stat(mount.mountpoint / "a")
    eventually(
        lambda: len([line for line in mount.poll() if line.startswith("LOOKUP a ")]) == 2, "it is looked up again"
    )


def test_watchers_on_a_real_mount_hear_of_a_deletion(
    tiny: Callable[..., TinyMount], watch: Callable[[Path], Watcher]
) -> None:
    mount = tiny()
    on_file = watch(mount.mountpoint / "a")
    mount.tell("delete a")
    mount.wait_for("INVALIDATED")
    assert not (mount.mountpoint / "a").exists()
    on_file.wait_for(inotify_simple.flags.DELETE_SELF, "")


def test_the_thread_that_waits_for_a_program_goes_on_when_the_program_does(tiny: Callable[..., TinyMount]) -> None:
    mount = tiny(HOLD="1")
    program = threading.Thread(target=os.stat, args=(mount.mountpoint / "slow",))
    program.start()
    mount.wait_for("LOOKUP slow")
    mount.tell("invalidate x")
    mount.wait_for("INVALIDATING")
    eventually(lambda: threads_in_state(mount.process.pid, b"D"), "it waits in the kernel")
    assert "INVALIDATED" not in mount.poll()
    mount.tell("go")
    mount.wait_for("INVALIDATED")
    program.join()
