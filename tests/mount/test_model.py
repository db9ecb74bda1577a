"""The mount and a plain directory side by side, driven by the same random steps, compared after each.

hypothesis makes up a history of system calls: whole saves, appends, edits in place, files held open for writing or
reading over other steps, renames with all flags, directories, links, modes, times, extended attributes, and changes
made in the vault behind the mount. Both sides must give the same results and errnos and show the same tree after every
step, and what is in the vault must be what the mount shows.

Where the mount promises something else than a plain directory, the difference has a name here and is modelled, not
ignored:

A SAVE IS ONE PUBLISH   what is written to a published file through an open descriptor is not seen by path until that
                        descriptor is closed. On the plain side the writes are held back until then.
READERS KEEP VERSIONS   a descriptor opened for reading goes on reading what it opened.
NO SPECIAL MEMBERS      link and mkfifo fail with EPERM.
EXCHANGE OR EINVAL      two things of different kinds may be exchanged, or the mount says EINVAL and changes nothing.
STAYING INSIDE          links that lead out of the vault cannot be made (EPERM).

Everything is one process with one descriptor for writing on a file at a time; who wins when several write is the
subject of the tests of saves. CI runs the same steps every time; VAULTFS_TEST_SCALE=10 makes ten times as many, at
random.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.mount.conftest import PLAIN, SharedMount
from tests.mount.harness import scaled
from vaultfs import kernel

EXAMPLES = 60
STEPS = 30

FILES = ["a", "b", "c.md", "d/a", "d/b", "d/e/a"]
DIRECTORIES = ["d", "d/e", "x"]
ANY = [*FILES, *DIRECTORIES]
LINKS = ["a", "d", "d/b", "nowhere", "d/../a"]

names = st.sampled_from(ANY)
files = st.sampled_from([*FILES, *FILES, "d"])  # now and then something that is no file
content = st.binary(max_size=40) | st.binary(min_size=1, max_size=3).map(lambda piece: piece * 3000)


class Writer:
    """A descriptor held open for writing on the mount, and what the plain side will have to catch up with."""

    def __init__(self, name: str, fd: int, plain: int | None, known: bytearray) -> None:
        self.name: str | None = name  # None: unlinked meanwhile
        self.fd = fd
        self.plain = plain  # a descriptor there too, for a file that has never been published
        self.content = known  # what reading through the descriptor must give
        self.changed = False


class SideBySide(RuleBasedStateMachine):
    def __init__(self, shared: SharedMount) -> None:
        super().__init__()
        self.shared = shared
        mount = shared.get()
        name = shared.directory()
        self.above = (mount.vault if PLAIN else mount.mnt) / name
        self.vault = mount.vault / name
        self.below = mount.base / f"plain-{name}"
        self.writers: dict[str, Writer] = {}
        self.readers: list[tuple[int, bytes]] = []
        for side in (self.above, self.below):
            side.mkdir()

    # --- helpers

    def both(self, do: Callable[[Path], object]) -> object:
        """`do` on both sides: the same result or the same errno."""
        answers = []
        for side in (self.above, self.below):
            try:
                answers.append(do(side))
            except OSError as error:
                answers.append(errno.errorcode.get(error.errno or 0, repr(error)))
        assert answers[0] == answers[1], f"the mount says {answers[0]!r}, a plain directory {answers[1]!r}"
        return answers[0]

    def busy(self, name: str) -> bool:
        """Does somebody write this file, or one in this directory (as it is now reached, also through a link)?"""
        real = os.path.realpath(self.below / name)
        return any(
            real == os.path.realpath(self.below / w) or os.path.realpath(self.below / w).startswith(real + "/")
            for w in self.writers
        )

    def special(self, name: str) -> bool:
        return (self.below / name).is_symlink()

    def kind(self, name: str) -> int:
        """The type bits of what stands at `name` (0: nothing)."""
        try:
            return stat.S_IFMT((self.below / name).lstat().st_mode)
        except OSError:
            return 0

    def published(self, name: str) -> bool:
        return name not in self.writers or self.writers[name].plain is None

    # --- whole saves

    @rule(name=files, data=content)
    def save(self, name: str, data: bytes) -> None:
        if not self.busy(name):
            self.both(lambda side: (side / name).write_bytes(data))

    @rule(name=files, data=content)
    def append(self, name: str, data: bytes) -> None:
        def do(side: Path) -> int:
            with open(side / name, "ab") as file:
                file.write(data)
                return file.tell()

        if not self.busy(name):
            self.both(do)

    @rule(name=files, data=content, where=st.integers(0, 50))
    def edit(self, name: str, data: bytes, where: int) -> None:
        def do(side: Path) -> bytes:
            fd = os.open(side / name, os.O_RDWR)
            try:
                os.pwrite(fd, data, where)
                return os.pread(fd, 100_000, 0)
            finally:
                os.close(fd)

        if not self.busy(name):
            self.both(do)

    @rule(name=files, size=st.integers(0, 9000))
    def truncate(self, name: str, size: int) -> None:
        if not self.busy(name):
            self.both(lambda side: os.truncate(side / name, size))

    @rule(name=files)
    def create_exclusively(self, name: str) -> None:
        self.both(lambda side: os.close(os.open(side / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640)))

    @rule(name=files, data=content)
    def save_by_rename(self, name: str, data: bytes) -> None:
        def do(side: Path) -> None:
            (side / "temporary").write_bytes(data)
            try:
                os.replace(side / "temporary", side / name)
            finally:
                (side / "temporary").unlink(missing_ok=True)

        if not self.busy(name):
            self.both(do)

    # --- descriptors held over other steps

    @rule(name=st.sampled_from(FILES), truncating=st.booleans())
    def open_for_writing(self, name: str, truncating: bool) -> None:
        if self.busy(name) or self.special(name):
            return
        there = (self.below / name).is_file()
        flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if truncating else 0)
        if there:
            known = bytearray() if truncating else bytearray((self.below / name).read_bytes())
            writer = Writer(name, os.open(self.above / name, flags), None, known)
            writer.changed = truncating and (self.below / name).stat().st_size > 0
            self.writers[name] = writer
        else:
            opened: list[int] = []
            self.both(lambda side: opened.append(os.open(side / name, flags, 0o644)))
            if opened:
                self.writers[name] = Writer(name, opened[0], opened[1], bytearray())

    @precondition(lambda self: self.writers)
    @rule(choice=st.randoms(use_true_random=False), data=content, where=st.integers(0, 9000))
    def write_through_the_descriptor(self, choice: object, data: bytes, where: int) -> None:
        writer = choice.choice(sorted(self.writers.values(), key=lambda w: w.fd))  # type: ignore[attr-defined]
        for fd in filter(None, (writer.fd, writer.plain)):
            assert os.pwrite(fd, data, where) == len(data)
        if data:
            writer.changed = True
            writer.content.extend(bytes(max(0, where - len(writer.content))))
            writer.content[where : where + len(data)] = data

    @precondition(lambda self: self.writers)
    @rule(choice=st.randoms(use_true_random=False), size=st.integers(0, 9000))
    def truncate_through_the_descriptor(self, choice: object, size: int) -> None:
        writer = choice.choice(sorted(self.writers.values(), key=lambda w: w.fd))  # type: ignore[attr-defined]
        for fd in filter(None, (writer.fd, writer.plain)):
            os.ftruncate(fd, size)
        writer.changed = writer.changed or size != len(writer.content)
        writer.content.extend(bytes(max(0, size - len(writer.content))))
        del writer.content[size:]

    @precondition(lambda self: self.writers)
    @rule(choice=st.randoms(use_true_random=False))
    def close_the_writer(self, choice: object) -> None:
        self._close(choice.choice(sorted(self.writers)))  # type: ignore[attr-defined]

    def _close(self, key: str) -> None:
        writer = self.writers.pop(key)
        os.close(writer.fd)
        if writer.plain is not None:
            os.close(writer.plain)
        elif writer.changed and writer.name is not None:  # A SAVE IS ONE PUBLISH
            with open(self.below / writer.name, "r+b") as file:
                file.write(writer.content)
                file.truncate()

    @precondition(lambda self: len(self.readers) < 3)
    @rule(name=st.sampled_from(FILES))
    def open_for_reading(self, name: str) -> None:
        if self.busy(name) and not self.published(name):
            return
        try:
            expected = (self.below / name).read_bytes()
        except OSError as error:
            with contextlib.suppress(OSError):
                os.close(os.open(self.above / name, os.O_RDONLY))
                if not isinstance(error, IsADirectoryError):
                    raise AssertionError(f"{name} can be opened on the mount, but not below: {error}") from None
            return
        self.readers.append((os.open(self.above / name, os.O_RDONLY), expected))

    @precondition(lambda self: self.readers)
    @rule()
    def close_a_reader(self) -> None:
        os.close(self.readers.pop(0)[0])

    # --- names

    @rule(old=names, new=names, flags=st.sampled_from([0, 0, kernel.RENAME_NOREPLACE, kernel.RENAME_EXCHANGE]))
    def rename(self, old: str, new: str, flags: int) -> None:
        if self.busy(new) or (self.busy(old) and old not in self.writers) or (flags and old in self.writers):
            return

        def do(side: Path) -> None:
            kernel.renameat2(kernel.AT_FDCWD, os.fsencode(side / old), kernel.AT_FDCWD, os.fsencode(side / new), flags)

        if flags == kernel.RENAME_EXCHANGE and self.kind(old) != self.kind(new):  # EXCHANGE OR EINVAL
            try:
                do(self.above)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return
                with pytest.raises(OSError, match=rf"\[Errno {error.errno}\]"):
                    do(self.below)
            else:
                do(self.below)
            return
        answer = self.both(do)
        if answer is None and old in self.writers and old != new:
            writer = self.writers.pop(old)
            writer.name = new
            self.writers[new] = writer

    @rule(name=names)
    def unlink(self, name: str) -> None:
        answer = self.both(lambda side: os.unlink(side / name))
        if answer is None and name in self.writers:
            writer = self.writers.pop(name)
            writer.name = None
            assert os.pread(writer.fd, 100_000, 0) == bytes(writer.content)
            assert os.fstat(writer.fd).st_nlink == 0
            os.close(writer.fd)
            if writer.plain is not None:
                os.close(writer.plain)

    @rule(name=names)
    def mkdir(self, name: str) -> None:
        self.both(lambda side: os.mkdir(side / name))

    @rule(name=names)
    def rmdir(self, name: str) -> None:
        self.both(lambda side: os.rmdir(side / name))

    @rule(name=names, leads_to=st.sampled_from(LINKS))
    def symlink(self, name: str, leads_to: str) -> None:
        if "/../" not in leads_to:
            self.both(lambda side: os.symlink(leads_to, side / name))

    @rule(name=names)
    def no_special_members(self, name: str) -> None:
        """NO SPECIAL MEMBERS, STAYING INSIDE"""
        if PLAIN or (self.below / name).exists() or self.special(name) or not (self.below / name).parent.is_dir():
            return
        (self.below / "source").touch()
        (self.above / "source").touch()
        for attempt in (
            lambda: os.link(self.above / "source", self.above / name),
            lambda: os.mkfifo(self.above / name),
            lambda: os.symlink("/etc/passwd", self.above / name),
            lambda: os.symlink("../../../../etc/passwd", self.above / name),
        ):
            try:
                attempt()
            except PermissionError as error:
                assert error.errno == errno.EPERM
            else:
                raise AssertionError("made something that may not be in a vault")
        self.both(lambda side: os.unlink(side / "source"))

    # --- attributes

    @rule(name=names, mode=st.sampled_from([0o644, 0o600, 0o755, 0o700, 0o640]))
    def chmod(self, name: str, mode: int) -> None:
        self.both(lambda side: os.chmod(side / name, mode))

    @rule(name=names, when=st.integers(1, 2 * 10**18))
    def set_times(self, name: str, when: int) -> None:
        def do(side: Path) -> int:
            os.utime(side / name, ns=(when, when))
            return (side / name).stat().st_mtime_ns

        if not self.busy(name):
            self.both(do)

    @rule(name=names, value=st.binary(max_size=20), attribute=st.sampled_from(["user.a", "user.b"]))
    def set_xattr(self, name: str, value: bytes, attribute: str) -> None:
        self.both(lambda side: os.setxattr(side / name, attribute, value))

    @rule(name=names, attribute=st.sampled_from(["user.a", "user.b"]))
    def remove_xattr(self, name: str, attribute: str) -> None:
        self.both(lambda side: os.removexattr(side / name, attribute))

    # --- behind the mount

    @rule(name=st.sampled_from(FILES), data=content)
    def change_in_the_vault(self, name: str, data: bytes) -> None:
        """By another program's rename; the mount must show it soon."""
        if (
            self.busy(name)
            or self.special(name)
            or not (self.below / name).parent.is_dir()
            or (self.below / name).is_dir()
        ):
            return
        if self.special(os.path.dirname(name) or "."):
            return
        for side in (self.vault, self.below):
            (side / "outside").write_bytes(data)
            os.replace(side / "outside", side / name)
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(FileNotFoundError):
                if (self.above / name).read_bytes() == data:
                    break
            assert time.monotonic() < deadline, "the mount never shows what was changed in the vault"
            time.sleep(0.005)

    # --- what must hold after every step

    @staticmethod
    def look(base: Path) -> dict[str, object]:
        found: dict[str, object] = {}
        pending = [""]
        while pending:
            directory = pending.pop()
            for entry in sorted(os.listdir(base / directory)):
                name = os.path.join(directory, entry)
                path = base / name
                info = path.lstat()
                if stat.S_ISLNK(info.st_mode):
                    found[name] = ("link", os.readlink(path))
                    continue
                xattrs = {a: os.getxattr(path, a) for a in os.listxattr(path) if a.startswith("user.")}
                if stat.S_ISDIR(info.st_mode):
                    pending.append(name)
                    found[name] = ("directory", oct(info.st_mode), info.st_nlink, xattrs)
                else:
                    data = path.read_bytes()
                    found[name] = (
                        "file",
                        oct(info.st_mode),
                        info.st_nlink,
                        info.st_size,
                        len(data),
                        data[:50],
                        hash(data),
                        xattrs,
                    )
        return found

    @invariant()
    def both_sides_look_the_same(self) -> None:
        if not hasattr(self, "above"):
            return
        above, below = self.look(self.above), self.look(self.below)
        assert above == below
        behind = self.look(self.vault)
        for name, writer in self.writers.items():
            if writer.plain is not None:  # never published: on the mount only
                above.pop(name, None)
                behind.pop(name, None)
        assert behind == above, "the vault holds something else than the mount shows"

    @invariant()
    def descriptors_see_what_is_theirs(self) -> None:
        for writer in self.writers.values():
            assert os.pread(writer.fd, 100_000, 0) == bytes(writer.content)
            assert os.fstat(writer.fd).st_size == len(writer.content)
        if not PLAIN:
            for fd, expected in self.readers:  # READERS KEEP VERSIONS
                assert os.pread(fd, 100_000, 0) == expected
                assert os.fstat(fd).st_size == len(expected)

    def teardown(self) -> None:
        try:
            for fd, _ in self.readers:
                os.close(fd)
            for key in list(self.writers):
                self._close(key)
            self.both_sides_look_the_same()
        finally:
            self.readers.clear()


def test_the_mount_and_a_plain_directory_side_by_side(shared_mount: SharedMount) -> None:
    scale = scaled(1)
    run_state_machine_as_test(
        lambda: SideBySide(shared_mount),
        settings=settings(
            max_examples=int(EXAMPLES * scale),
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=scale == 1,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    shared_mount.assert_quiet()
