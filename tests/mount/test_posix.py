"""System calls on the mount answer as they do on the file system below.

Each *case* is a function of one empty directory that returns something comparable. It is run on the mount and on
a plain directory of the same file system, and both answers (or errnos) must be equal: nobody has to know what
ext4 or tmpfs would say. Where the contract wants something else than the file system below, the test says so in
its name and checks the contract's answer instead.

Everything here is about one process; who sees what of another's save is in the tests of drafts and versions.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.harness import MountedVault
from vaultfs import kernel

libc = ctypes.CDLL(None, use_errno=True)
UTIME_NOW = (1 << 30) - 1
UTIME_OMIT = (1 << 30) - 2


# --------------------------------------------------------------------------------------------------------- helpers


def outcome(do: Callable[[], object]) -> object:
    """What `do` returns, or the name of the errno it fails with."""
    try:
        return do()
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error))
        return "EOPNOTSUPP" if name == "ENOTSUP" else name  # two names of one number


def write(path: Path, data: bytes = b"content\n", flags: int = os.O_CREAT | os.O_TRUNC, mode: int = 0o644) -> None:
    fd = os.open(path, os.O_WRONLY | flags, mode)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def rename2(old: Path, new: Path, flags: int) -> None:
    kernel.renameat2(kernel.AT_FDCWD, os.fsencode(old), kernel.AT_FDCWD, os.fsencode(new), flags)


class Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


def utimensat(path: Path, atime: tuple[int, int], mtime: tuple[int, int]) -> None:
    """utimensat(2) itself: Python's os.utime cannot say UTIME_OMIT for one of the two."""
    times = (Timespec * 2)(Timespec(*atime), Timespec(*mtime))
    if libc.utimensat(-100, os.fsencode(path), times, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def tree(base: Path) -> list[tuple[str, str, object]]:
    """Names, kinds, modes and contents below `base`: what a program can tell about a directory."""
    found: list[tuple[str, str, object]] = []
    for path in sorted(base.rglob("*")):
        name = str(path.relative_to(base))
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            found.append((name, "link", os.readlink(path)))
        elif stat.S_ISDIR(info.st_mode):
            found.append((name, "directory", oct(info.st_mode & 0o7777)))
        else:
            found.append((name, oct(info.st_mode & 0o7777), path.read_bytes()))
    return found


@contextlib.contextmanager
def descriptor(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> Iterator[int]:
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


Case = Callable[[Path], object]
CASES: list[Case] = []


def same(case: Case) -> Case:
    """Marks `case` as one whose answer on the mount must be the plain directory's."""
    CASES.append(case)
    return case


# ------------------------------------------------------------------------------------------------ opening, creating


@same
def create_gives_the_mode_asked_for_less_the_umask(base: Path) -> object:
    modes = []
    for mask in (0o022, 0o077, 0o777, 0):
        with umask(mask):
            name = base / f"f{mask}"
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o666))
            (base / f"d{mask}").mkdir(mode=0o777)
        modes.append((oct(name.stat().st_mode), oct((base / f"d{mask}").stat().st_mode)))
    return modes


@same
def a_file_made_read_only_can_be_written_through_the_descriptor_that_made_it(base: Path) -> object:
    with descriptor(base / "f", os.O_CREAT | os.O_RDWR, 0o444) as fd:
        os.write(fd, b"x")
        seen = os.pread(fd, 10, 0)
    return seen, (base / "f").read_bytes(), oct((base / "f").stat().st_mode)


@same
def exclusive_create_refuses_what_is_there(base: Path) -> object:
    write(base / "f")
    (base / "d").mkdir()
    (base / "dangling").symlink_to("nowhere")
    return [
        outcome(lambda n=n: os.open(base / n, os.O_CREAT | os.O_EXCL | os.O_WRONLY)) for n in ("f", "d", "dangling")
    ]


@same
def exclusive_create_of_a_new_name_makes_it_once(base: Path) -> object:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    os.close(os.open(base / "f", flags))
    return outcome(lambda: os.open(base / "f", flags)), (base / "f").stat().st_size


@same
def opens_that_cannot_be(base: Path) -> object:
    write(base / "f")
    (base / "d").mkdir()
    (base / "l").symlink_to("f")
    (base / "loop").symlink_to("loop")
    tries = [
        ("missing", os.O_RDONLY),
        ("missing", os.O_WRONLY),
        ("d", os.O_WRONLY),
        ("d", os.O_RDWR | os.O_TRUNC),
        ("d", os.O_CREAT | os.O_WRONLY),
        ("f", os.O_RDONLY | os.O_DIRECTORY),
        ("f/x", os.O_RDONLY),
        ("f/x", os.O_CREAT | os.O_WRONLY),
        ("f/", os.O_RDONLY),
        ("missing/", os.O_CREAT | os.O_WRONLY),
        ("missing/x", os.O_CREAT | os.O_WRONLY),
        ("l", os.O_RDONLY | os.O_NOFOLLOW),
        ("l", os.O_WRONLY | os.O_NOFOLLOW),
        ("loop", os.O_RDONLY),
        ("loop", os.O_CREAT | os.O_WRONLY),
        ("loop/x", os.O_RDONLY),
        ("", os.O_RDONLY),
    ]
    answers = []
    for name, flags in tries:
        answers.append((name, flags, outcome(lambda n=name, f=flags: os.open(f"{base}/{n}" if n else "", f))))
    return answers


@same
def open_for_reading_with_truncation_empties_the_file(base: Path) -> object:
    write(base / "f")
    with descriptor(base / "f", os.O_RDONLY | os.O_TRUNC) as fd:
        size = os.fstat(fd).st_size
    return size, (base / "f").read_bytes()


@same
def writing_through_a_link_writes_its_target_and_leaves_the_link(base: Path) -> object:
    write(base / "f", b"old")
    (base / "l").symlink_to("f")
    write(base / "l", b"new")
    (base / "fresh").symlink_to("made")
    write(base / "fresh", b"through a dangling link")
    return tree(base)


@same
def a_descriptor_knows_its_access_mode(base: Path) -> object:
    write(base / "f")
    with descriptor(base / "f", os.O_RDONLY) as reader, descriptor(base / "f", os.O_WRONLY) as writer:
        return [
            outcome(lambda: os.write(reader, b"x")),
            outcome(lambda: os.read(writer, 1)),
            outcome(lambda: os.ftruncate(reader, 0)),
            (base / "f").read_bytes(),
        ]


@same
def path_descriptors_say_what_they_name_and_read_nothing(base: Path) -> object:
    write(base / "f")
    with descriptor(base / "f", os.O_PATH) as fd:
        return os.fstat(fd).st_size, outcome(lambda: os.read(fd, 1)), outcome(lambda: os.fchmod(fd, 0o600))


# ------------------------------------------------------------------------------------------------ reading, writing


@same
def offsets_holes_and_ends(base: Path) -> object:
    with descriptor(base / "f", os.O_CREAT | os.O_RDWR) as fd:
        os.pwrite(fd, b"end", 10_000)
        answers: list[object] = [
            os.fstat(fd).st_size,
            os.pread(fd, 5, 0),
            os.pread(fd, 50, 9_999),
            os.pread(fd, 5, 10_003),
        ]
        answers += [os.lseek(fd, 0, os.SEEK_END), os.lseek(fd, -3, os.SEEK_CUR), os.read(fd, 99)]
        answers += [outcome(lambda: os.lseek(fd, -1, os.SEEK_SET)), os.write(fd, b"!"), os.writev(fd, [b"a", b"bc"])]
        answers += [os.lseek(fd, 0, os.SEEK_CUR), os.fstat(fd).st_size]
    return answers, (base / "f").read_bytes()


@same
def appends_go_to_the_end_wherever_the_offset_is(base: Path) -> object:
    write(base / "f", b"0123456789")
    with descriptor(base / "f", os.O_RDWR | os.O_APPEND) as fd:
        os.lseek(fd, 2, os.SEEK_SET)
        os.write(fd, b"A")
        where = os.lseek(fd, 0, os.SEEK_CUR)
        os.pwrite(fd, b"B", 0)  # Linux appends here too, whatever POSIX says: pwrite(2), BUGS
        os.ftruncate(fd, 11)
        os.write(fd, b"C")
        size = os.fstat(fd).st_size
    return where, size, (base / "f").read_bytes()


@same
def two_descriptors_of_one_process_share_the_content(base: Path) -> object:
    write(base / "f", b"0" * 20)
    with descriptor(base / "f", os.O_RDWR) as first, descriptor(base / "f", os.O_RDWR) as second:
        os.pwrite(first, b"first", 0)
        os.pwrite(second, b"second", 10)
        seen = os.pread(first, 20, 0), os.pread(second, 20, 0)
        os.ftruncate(second, 12)
        sizes = os.fstat(first).st_size, os.fstat(second).st_size
    return seen, sizes, (base / "f").read_bytes()


@same
def big_content_comes_back_whole(base: Path) -> object:
    data = bytes(range(256)) * 12_345
    write(base / "f", data)
    with descriptor(base / "f") as fd:
        window = os.pread(fd, 300_000, 1_000_001)
    return (base / "f").read_bytes() == data, window == data[1_000_001:1_300_001], (base / "f").stat().st_size


@same
def truncate_by_path(base: Path) -> object:
    write(base / "f", b"0123456789")
    (base / "d").mkdir()
    answers: list[object] = []
    for size in (4, 8, 0, 3):
        os.truncate(base / "f", size)
        answers.append((base / "f").read_bytes())
    answers += [outcome(lambda: os.truncate(base / "f", -1)), outcome(lambda: os.truncate(base / "d", 0))]
    answers += [outcome(lambda: os.truncate(base / "missing", 0)), outcome(lambda: os.truncate(f"{base}/f/", 0))]
    return answers


@same
def truncate_by_descriptor(base: Path) -> object:
    write(base / "f", b"0123456789")
    with descriptor(base / "f", os.O_RDWR) as fd:
        answers: list[object] = []
        for size in (4, 8, 0, 3):
            os.ftruncate(fd, size)
            answers.append((os.pread(fd, 99, 0), os.fstat(fd).st_size))
        answers.append(outcome(lambda: os.ftruncate(fd, -1)))
    return answers, (base / "f").read_bytes()


@same
def truncating_and_going_on_writing_at_the_old_offset_leaves_zeros(base: Path) -> object:
    with descriptor(base / "f", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"12345678")
        os.ftruncate(fd, 0)
        os.write(fd, b"9")
    return (base / "f").read_bytes()


@same
def shared_mapping_of_a_new_file(base: Path) -> object:
    with descriptor(base / "f", os.O_CREAT | os.O_RDWR) as fd:
        os.ftruncate(fd, 10_000)
        with mmap.mmap(fd, 10_000) as view:
            view[5_000:5_003] = b"mid"
            view.flush()
            seen = os.pread(fd, 3, 5_000)
    return seen, (base / "f").read_bytes()


@same
def sendfile_and_copy_file_range_copy_all(base: Path) -> object:
    data = os.urandom(1) * 300_000
    write(base / "f", data)
    with descriptor(base / "f") as source, descriptor(base / "g", os.O_CREAT | os.O_RDWR) as target:
        done = 0
        while done < len(data):
            done += os.sendfile(target, source, done, len(data) - done)
    with descriptor(base / "f") as source, descriptor(base / "h", os.O_CREAT | os.O_RDWR) as target:
        done = 0
        while count := os.copy_file_range(source, target, len(data)):
            done += count
        size = os.fstat(target).st_size
    return done, size, (base / "g").read_bytes() == data, (base / "h").read_bytes() == data


# ---------------------------------------------------------------------------------------------------------- rename


def _population(base: Path) -> None:
    write(base / "f", b"f")
    write(base / "g", b"g")
    for name in ("empty", "empty2", "full", "full/sub"):
        (base / name).mkdir()
    write(base / "full/inner", b"inner")
    (base / "link").symlink_to("f")


RENAMES = [
    ("f", "new"),
    ("f", "g"),
    ("f", "f"),
    ("f", "empty"),
    ("f", "empty/x"),
    ("f", "full/inner"),
    ("f", "missing/x"),
    ("f", "g/x"),
    ("f", "link"),
    ("link", "f"),
    ("link", "new"),
    ("missing", "new"),
    ("empty", "new"),
    ("empty", "empty2"),
    ("full", "empty"),
    ("empty", "full"),
    ("full/sub", "empty"),
    ("empty", "f"),
    ("full", "full/sub/x"),
    ("full/sub", "full"),
    ("empty", "empty/x"),
    ("full", "new"),
    ("f/", "new"),
    ("f", "new/"),
    ("empty", "new/"),
]


@pytest.mark.parametrize(("old", "new"), RENAMES, ids=[f"{a}-to-{b}".replace("/", ":") for a, b in RENAMES])
@pytest.mark.parametrize(
    "flags", [0, kernel.RENAME_NOREPLACE, kernel.RENAME_EXCHANGE], ids=["", "noreplace", "exchange"]
)
def test_rename(here: Path, plain: Path, old: str, new: str, flags: int) -> None:
    def case(base: Path) -> object:
        _population(base)
        # pathlib would eat the trailing slashes
        answer = outcome(
            lambda: kernel.renameat2(
                kernel.AT_FDCWD, os.fsencode(f"{base}/{old}"), kernel.AT_FDCWD, os.fsencode(f"{base}/{new}"), flags
            )
        )
        return answer, tree(base)

    on_the_mount, below = case(here), case(plain)
    if flags == kernel.RENAME_EXCHANGE and on_the_mount[0] == "EINVAL":  # allowed: "do what they say or EINVAL"
        assert on_the_mount[1] == tree_of_population(plain.parent)
        return
    assert on_the_mount == below


def tree_of_population(parent: Path) -> list[tuple[str, str, object]]:
    with tempfile.TemporaryDirectory(dir=parent) as scratch:
        _population(Path(scratch))
        return tree(Path(scratch))


@same
def unknown_rename_flags_are_refused(base: Path) -> object:
    _population(base)
    both = kernel.RENAME_NOREPLACE | kernel.RENAME_EXCHANGE
    return outcome(lambda: rename2(base / "f", base / "n", both)), outcome(lambda: rename2(base / "f", base / "n", 64))


@same
def a_renamed_file_goes_on_for_those_who_have_it_open(base: Path) -> object:
    write(base / "f", b"old")
    with descriptor(base / "f", os.O_RDWR) as fd:
        os.rename(base / "f", base / "g")
        os.pwrite(fd, b"new", 0)
        seen = os.pread(fd, 9, 0)
    return seen, tree(base)


@same
def a_new_file_renamed_before_it_is_closed_lands_at_its_new_name(base: Path) -> object:
    write(base / "target", b"old")
    with descriptor(base / "temporary", os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
        os.write(fd, b"new")
        os.rename(base / "temporary", base / "target")
        os.write(fd, b"er")
    return tree(base)


@same
def directories_renamed_under_open_files_and_directories(base: Path) -> object:
    (base / "d/sub").mkdir(parents=True)
    write(base / "d/sub/f", b"f")
    with (
        descriptor(base / "d/sub", os.O_RDONLY | os.O_DIRECTORY) as directory,
        descriptor(base / "d/sub/f", os.O_RDWR) as fd,
    ):
        os.rename(base / "d", base / "e")
        os.pwrite(fd, b"F", 0)
        made = os.open("made", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=directory)
        os.write(made, b"made")
        os.close(made)
        listed = sorted(os.listdir(directory))
    return listed, tree(base)


@same
def renaming_between_directories_moves_the_link_counts(base: Path) -> object:
    for name in ("a", "b", "a/x"):
        (base / name).mkdir()
    before = (base / "a").stat().st_nlink - (base / "b").stat().st_nlink
    os.rename(base / "a/x", base / "b/x")
    return before, (base / "a").stat().st_nlink - (base / "b").stat().st_nlink


@same
def dot_and_dotdot_are_no_names_to_rename(base: Path) -> object:
    (base / "d").mkdir()
    answers = []
    for old, new in (("d/.", "e"), ("d/..", "e"), ("d", "d/."), ("d", ".")):
        answers.append(outcome(lambda o=old, n=new: os.rename(f"{base}/{o}", f"{base}/{n}")))
    return answers


# ------------------------------------------------------------------------------------------------- unlink and rmdir


@same
def unlink_and_rmdir_of_the_wrong_thing(base: Path) -> object:
    _population(base)
    answers = [outcome(lambda n=n: os.unlink(f"{base}/{n}")) for n in ("empty", "missing", "f/x", "f/", "link", "f")]
    answers += [
        outcome(lambda n=n: os.rmdir(f"{base}/{n}"))
        for n in ("g", "full", "missing", "empty/.", "empty/..", "empty/", "full/sub")
    ]
    return answers, tree(base)


@same
def an_unlinked_open_file_lives_until_it_is_closed(base: Path) -> object:
    write(base / "f", b"0123456789")
    answers: list[object] = []
    for flags in (os.O_RDONLY, os.O_RDWR):
        with descriptor(base / "f", flags) as fd:
            if (base / "f").exists() and flags == os.O_RDWR:
                os.unlink(base / "f")
            answers.append((os.pread(fd, 99, 0), os.fstat(fd).st_nlink, os.fstat(fd).st_size))
            os.fchmod(fd, 0o600)
            os.utime(fd, ns=(1, 2))
            if flags == os.O_RDWR:
                os.ftruncate(fd, 4)
                os.pwrite(fd, b"X", 1)
                os.fsync(fd)
            info = os.fstat(fd)
            answers.append((oct(info.st_mode), info.st_size, os.pread(fd, 99, 0)))
    return answers, os.listdir(base)


@same
def an_unlinked_file_open_for_reading_only_keeps_its_content(base: Path) -> object:
    write(base / "f", b"0123456789")
    with descriptor(base / "f") as fd:
        os.unlink(base / "f")
        write(base / "f", b"another")
        info = os.fstat(fd)
        os.fchmod(fd, 0o640)
        return os.pread(fd, 99, 0), info.st_nlink, info.st_size, oct(os.fstat(fd).st_mode), (base / "f").read_bytes()


@same
def a_new_file_unlinked_while_it_is_written_leaves_nothing(base: Path) -> object:
    with descriptor(base / "f", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"abc")
        os.unlink(base / "f")
        os.write(fd, b"def")
        answers = os.pread(fd, 99, 0), os.fstat(fd).st_nlink, os.fstat(fd).st_size
    return answers, os.listdir(base)


@same
def a_directory_whose_files_were_unlinked_while_open_can_be_removed(base: Path) -> object:
    (base / "d").mkdir()
    write(base / "d/f", b"f")
    with descriptor(base / "d/f", os.O_RDWR) as fd:
        os.write(fd, b"changed")
        os.unlink(base / "d/f")
        listed = os.listdir(base / "d")
        os.rmdir(base / "d")
        seen = os.pread(fd, 99, 0)
    return listed, seen, tree(base)


@same
def a_removed_directory_that_is_still_open(base: Path) -> object:
    (base / "d").mkdir()
    with descriptor(base / "d", os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.rmdir(base / "d")
        return (
            os.listdir(fd),
            outcome(lambda: os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=fd)),
            outcome(lambda: os.mkdir("x", dir_fd=fd)),
            outcome(lambda: os.stat("x", dir_fd=fd)),
        )


def test_directories_that_come_and_go_are_not_taken_for_one_another(here: Path) -> None:
    """File systems give a new directory the number of one just removed; the kernel knows that one as dead."""
    for number in range(250):
        directory = here / f"d{number}"
        directory.mkdir()
        write(directory / "f")
        os.rename(directory / "f", directory / "g")
        subprocess.run(["rm", "-r", directory], check=True)
    assert os.listdir(here) == []


@same
def mkdir_of_what_cannot_be_made(base: Path) -> object:
    _population(base)
    names = ("f", "empty", "link", "missing/x", "f/x", "empty/.", "new/", "new")
    return [outcome(lambda n=n: os.mkdir(f"{base}/{n}")) for n in names]


# --------------------------------------------------------------------------------------------------------- symlinks


@same
def contained_links(base: Path) -> object:
    write(base / "f", b"f")
    (base / "d").mkdir()
    (base / "d/up").symlink_to("../f")
    (base / "to-d").symlink_to("d")
    (base / "dangling").symlink_to("nowhere/at/all")
    answers = [
        (base / "d/up").read_bytes(),
        (base / "to-d/up").read_bytes(),
        os.readlink(base / "dangling"),
        (base / "dangling").lstat().st_size,
        stat.S_ISLNK((base / "dangling").lstat().st_mode),
        outcome(lambda: (base / "dangling").stat()),
        outcome(lambda: os.readlink(base / "f")),
        outcome(lambda: os.symlink("x", base / "f")),
        outcome(lambda: os.symlink("x", base / "missing/x")),
        outcome(lambda: os.symlink("", base / "empty")),
    ]
    os.unlink(base / "to-d")
    return answers, tree(base)


# ---------------------------------------------------------------------------------------------------- readdir


class Dirent(ctypes.Structure):
    _fields_ = (
        ("ino", ctypes.c_uint64),
        ("off", ctypes.c_int64),
        ("reclen", ctypes.c_ushort),
        ("type", ctypes.c_ubyte),
        ("name", ctypes.c_char * 256),
    )


class Listing:
    """opendir(3) and its family: what Python's os.listdir hides."""

    def __init__(self, path: Path) -> None:
        libc.opendir.restype = ctypes.c_void_p
        libc.readdir64.restype = ctypes.POINTER(Dirent)
        libc.telldir.restype = ctypes.c_long
        for name in ("readdir64", "telldir", "rewinddir", "closedir"):
            getattr(libc, name).argtypes = [ctypes.c_void_p]
        libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
        self.stream = libc.opendir(os.fsencode(path))
        assert self.stream, os.strerror(ctypes.get_errno())

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *_: object) -> None:
        libc.closedir(self.stream)

    def next(self) -> tuple[bytes, int, int] | None:
        entry = libc.readdir64(self.stream)
        return (entry.contents.name, entry.contents.ino, entry.contents.type) if entry else None

    def rest(self) -> list[bytes]:
        names = []
        while (entry := self.next()) is not None:
            names.append(entry[0])
        return names

    def tell(self) -> int:
        return int(libc.telldir(self.stream))

    def seek(self, where: int) -> None:
        libc.seekdir(self.stream, where)

    def rewind(self) -> None:
        libc.rewinddir(self.stream)


def test_seekdir_to_each_cookie_goes_on_where_it_was_and_rewinddir_starts_over(here: Path) -> None:
    for number in range(150):
        write(here / f"file-{number:03}-with-a-name-of-some-length", b"")
    with Listing(here) as listing:
        order, cookies = [], []
        while True:
            cookies.append(listing.tell())
            entry = listing.next()
            if entry is None:
                break
            order.append(entry[0])
        assert sorted(order) == sorted([*os.listdir(os.fsencode(here)), b".", b".."])
        for position in (0, 1, 2, 75, 149, 151, 40, len(order)):
            listing.seek(cookies[position])
            assert listing.rest() == order[position:]
        write(here / "made-meanwhile", b"")
        listing.rewind()
        assert sorted(listing.rest()) == sorted([*order, b"made-meanwhile"])


def test_listing_while_entries_are_removed_skips_none(here: Path) -> None:
    names = {f"f{number:04}".encode() for number in range(600)}
    for name in names:
        write(here / os.fsdecode(name), b"")
    seen = set()
    with Listing(here) as listing:
        while (entry := listing.next()) is not None:
            if entry[0] not in (b".", b".."):
                seen.add(entry[0])
                os.unlink(here / os.fsdecode(entry[0]))
    assert seen == names
    assert os.listdir(here) == []


def test_inode_numbers_and_types_in_listings_are_those_of_stat(here: Path) -> None:
    write(here / "f")
    (here / "d").mkdir()
    (here / "l").symlink_to("f")
    write(here / "saved-again", b"1")
    write(here / "saved-again", b"2")
    with Listing(here) as listing:
        found = {}
        while (entry := listing.next()) is not None:
            found[entry[0]] = entry[1:]
    assert set(found) == {b".", b"..", b"f", b"d", b"l", b"saved-again"}
    for name, (number, kind) in found.items():
        info = os.lstat(os.path.join(os.fsencode(here), name))
        assert number == info.st_ino, name
        assert kind in (0, stat.S_IFMT(info.st_mode) >> 12), name


def test_dot_and_dotdot_lead_where_they_should(here: Path) -> None:
    (here / "d").mkdir()
    assert (here / "d/.").stat().st_ino == (here / "d").stat().st_ino
    assert os.stat(f"{here}/d/..").st_ino == here.stat().st_ino
    assert os.path.samefile(f"{here}/d/../d/.", here / "d")


@same
def a_big_directory_is_listed_whole(base: Path) -> object:
    for number in range(500):
        os.close(os.open(base / f"{number}", os.O_CREAT | os.O_WRONLY))
    entries = list(os.scandir(base))
    return sorted(entry.name for entry in entries), all(entry.is_file() for entry in entries)


# ------------------------------------------------------------------------------------------ attributes and times


@same
def chmod_of_files_and_directories(base: Path) -> object:
    write(base / "f")
    (base / "d").mkdir()
    answers = []
    for mode in (0o600, 0o000, 0o777, 0o1777, 0o2755, 0o4755, 0o7777):
        for name in ("f", "d"):
            (base / name).chmod(mode)
            answers.append(oct((base / name).stat().st_mode))
    with descriptor(base / "f") as fd:
        os.fchmod(fd, 0o640)
        answers.append(oct(os.fstat(fd).st_mode))
    answers += [outcome(lambda: os.chmod(base / "missing", 0o600)), (base / "f").read_bytes()]
    return answers


@same
def mode_owner_and_times_survive_a_save(base: Path) -> object:
    write(base / "f", b"old")
    (base / "f").chmod(0o751)
    if os.geteuid() == 0:
        os.chown(base / "f", 1234, 4321)
    write(base / "f", b"newer")
    info = (base / "f").stat()
    return oct(info.st_mode), info.st_uid, info.st_gid, info.st_size, info.st_nlink


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_chown(here: Path, plain: Path) -> None:
    def case(base: Path) -> object:
        write(base / "f")
        (base / "l").symlink_to("f")
        answers: list[object] = []
        for uid, gid in ((1, 2), (-1, 3), (4, -1), (-1, -1), (0, 0)):
            os.chown(base / "f", uid, gid)
            answers.append(((base / "f").stat().st_uid, (base / "f").stat().st_gid))
        os.chown(base / "l", 5, 6, follow_symlinks=False)
        answers.append(((base / "l").lstat().st_uid, (base / "f").stat().st_uid))
        (base / "f").chmod(0o6755)
        os.chown(base / "f", 7, 8)  # clears setuid and setgid
        answers.append(oct((base / "f").stat().st_mode))
        return answers

    assert case(here) == case(plain)


@same
def times_can_be_set_to_the_nanosecond(base: Path) -> object:
    write(base / "f")
    (base / "d").mkdir()
    (base / "l").symlink_to("f")
    answers = []
    for name in ("f", "d"):
        os.utime(base / name, ns=(1_111_111_111_123_456_789, 2_000_000_000_987_654_321))
        answers.append((base / name).stat().st_mtime_ns)
        answers.append((base / name).stat().st_atime_ns)
    os.utime(base / "l", ns=(5, 6), follow_symlinks=False)
    answers += [(base / "l").lstat().st_mtime_ns, (base / "f").stat().st_mtime_ns]
    with descriptor(base / "f", os.O_RDWR) as fd:
        os.utime(fd, ns=(7, 8_000_000_009))
        answers.append(os.fstat(fd).st_mtime_ns)
    answers.append((base / "f").stat().st_mtime_ns)
    os.utime(base / "f", ns=(0, -1_500_000_000))  # before 1970
    answers.append((base / "f").stat().st_mtime_ns)
    return answers


@same
def utime_omit_leaves_a_time_alone_and_now_is_now(base: Path) -> object:
    write(base / "f")
    os.utime(base / "f", ns=(1_000_000_000, 2_000_000_000))
    utimensat(base / "f", (0, UTIME_OMIT), (5, 5))
    first = (base / "f").stat().st_atime_ns, (base / "f").stat().st_mtime_ns
    utimensat(base / "f", (7, 7), (0, UTIME_OMIT))
    second = (base / "f").stat().st_atime_ns, (base / "f").stat().st_mtime_ns
    utimensat(base / "f", (0, UTIME_OMIT), (0, UTIME_OMIT))
    third = (base / "f").stat().st_atime_ns, (base / "f").stat().st_mtime_ns
    before = time.time_ns() - 50_000_000  # the kernel's own clock for files ticks coarsely
    utimensat(base / "f", (0, UTIME_OMIT), (0, UTIME_NOW))
    now = (base / "f").stat()
    return first, second, third, now.st_atime_ns, before <= now.st_mtime_ns <= time.time_ns()


@same
def times_set_by_the_writer_survive_its_close(base: Path) -> object:
    """What tar, rsync, cp -p and unzip do: write, set the times, close."""
    write(base / "there", b"old")
    for name in ("there", "new"):
        with descriptor(base / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) as fd:
            os.write(fd, b"content")
            os.utime(fd, ns=(1_000_000_000, 3_000_000_007))
            os.fchmod(fd, 0o604)
    return [((base / n).stat().st_mtime_ns, oct((base / n).stat().st_mode)) for n in ("there", "new")]


def test_mtime_after_close_is_what_the_writer_saw_by_fstat(here: Path) -> None:
    write(here / "there", b"old")
    for name, flags in (("new", os.O_CREAT), ("there", os.O_TRUNC), ("there", 0), ("there", os.O_APPEND)):
        with descriptor(here / name, os.O_WRONLY | flags) as fd:
            os.write(fd, b"some content")
            seen = os.fstat(fd)
        after = (here / name).stat()
        assert (after.st_mtime_ns, after.st_size) == (seen.st_mtime_ns, seen.st_size), (name, flags)


@same
def what_moves_which_time(base: Path) -> object:
    write(base / "f", b"x")
    (base / "d").mkdir()
    for name in ("f", "d"):
        os.utime(base / name, ns=(10**18, 10**18))

    def moved(do: Callable[[], object], name: str) -> tuple[bool, bool]:
        before = (base / name).stat()
        time.sleep(0.02)  # longer than the tick of the kernel's file clock
        do()
        after = (base / name).stat()
        return after.st_mtime_ns != before.st_mtime_ns, after.st_ctime_ns != before.st_ctime_ns

    return [
        moved(lambda: (base / "f").read_bytes(), "f"),
        moved(lambda: (base / "f").chmod(0o600), "f"),
        moved(lambda: os.setxattr(base / "f", "user.a", b"1"), "f"),
        moved(lambda: write(base / "f", b"y"), "f"),
        moved(lambda: os.truncate(base / "f", 0), "f"),
        moved(lambda: os.rename(base / "f", base / "g"), "d"),
        moved(lambda: os.rename(base / "g", base / "d/g"), "d"),
        moved(lambda: (base / "d/g").read_bytes(), "d"),
        moved(lambda: os.unlink(base / "d/g"), "d"),
        moved(lambda: os.mkdir(base / "d/e"), "d"),
    ]


@same
def opening_for_writing_without_writing_changes_nothing(base: Path) -> object:
    write(base / "f", b"x")
    os.utime(base / "f", ns=(10**18, 10**18))
    before = (base / "f").stat()
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_CREAT):
        os.close(os.open(base / "f", flags))
    after = (base / "f").stat()
    return (before.st_mtime_ns, before.st_ctime_ns, before.st_ino) == (
        after.st_mtime_ns,
        after.st_ctime_ns,
        after.st_ino,
    )


def test_inode_numbers_are_stable_while_nobody_saves(here: Path) -> None:
    write(here / "f", b"x")
    (here / "d").mkdir()
    before = (here / "f").stat().st_ino, (here / "d").stat().st_ino
    (here / "f").read_bytes()
    (here / "f").chmod(0o600)
    os.rename(here / "f", here / "g")
    os.rename(here / "g", here / "f")
    os.close(os.open(here / "f", os.O_RDWR))
    with descriptor(here / "f") as fd:
        assert os.fstat(fd).st_ino == before[0]
    write(here / "another", b"y")
    assert ((here / "f").stat().st_ino, (here / "d").stat().st_ino) == before


def test_fstat_of_a_writer_and_stat_of_its_path_agree_on_the_inode_number(here: Path) -> None:
    """Python's tempfile, `tail -F`, vim and log rotators compare the two to learn whether a name is still theirs."""
    write(here / "f", b"x")
    for flags in (os.O_RDWR, os.O_RDWR | os.O_TRUNC):
        with descriptor(here / "f", flags) as fd:
            assert os.fstat(fd).st_ino == (here / "f").stat().st_ino
            os.write(fd, b"written")
            assert os.fstat(fd).st_ino == (here / "f").stat().st_ino
            os.fsync(fd)
            assert os.fstat(fd).st_ino == (here / "f").stat().st_ino
    with descriptor(here / "new", os.O_CREAT | os.O_RDWR) as fd:
        assert os.fstat(fd).st_ino == (here / "new").stat().st_ino
        os.write(fd, b"written")
        assert os.fstat(fd).st_ino == (here / "new").stat().st_ino


@same
def access_is_judged_by_mode(base: Path) -> object:
    write(base / "f", mode=0o644)
    (base / "f").chmod(0o755)
    return [os.access(base / "f", how) for how in (os.F_OK, os.R_OK, os.W_OK, os.X_OK)], os.access(base / "no", os.F_OK)


@same
def programs_in_the_directory_can_be_run(base: Path) -> object:
    write(base / "script", b"#!/bin/sh\necho ran $1\n", mode=0o755)
    first = subprocess.run([base / "script", "one"], capture_output=True, check=True).stdout
    write(base / "script", b"#!/bin/sh\necho changed $1\n")
    second = subprocess.run([base / "script", "two"], capture_output=True, check=True).stdout
    shutil.copy("/bin/true", base / "program")
    return first, second, subprocess.run([base / "program"], check=False).returncode


# --------------------------------------------------------------------------------------------- statfs and xattrs


def test_statfs_is_that_of_the_vault(here: Path, plain: Path) -> None:
    above, below = os.statvfs(here), os.statvfs(plain)
    for field in ("f_bsize", "f_frsize", "f_blocks", "f_files", "f_namemax"):
        assert getattr(above, field) == getattr(below, field), field
    assert 0 <= above.f_bavail <= above.f_bfree <= above.f_blocks
    assert abs(above.f_bfree - below.f_bfree) <= below.f_blocks // 10  # others use the disk meanwhile


@same
def user_xattrs(base: Path) -> object:
    write(base / "f")
    (base / "d").mkdir()
    answers: list[object] = []
    for name in ("f", "d"):
        path = base / name
        os.setxattr(path, "user.a", b"\0binary\xff")
        os.setxattr(path, "user.empty", b"")
        answers += [
            os.getxattr(path, "user.a"),
            os.getxattr(path, "user.empty"),
            sorted(n for n in os.listxattr(path) if n.startswith("user.")),
            outcome(lambda p=path: os.setxattr(p, "user.a", b"x", os.XATTR_CREATE)),
            outcome(lambda p=path: os.setxattr(p, "user.b", b"x", os.XATTR_REPLACE)),
            outcome(lambda p=path: os.setxattr(p, "user.a", b"second", os.XATTR_REPLACE)),
            outcome(lambda p=path: os.getxattr(p, "user.missing")),
            outcome(lambda p=path: os.removexattr(p, "user.missing")),
            outcome(lambda p=path: os.removexattr(p, "user.empty")),
            os.getxattr(path, "user.a"),
            sorted(n for n in os.listxattr(path) if n.startswith("user.")),
            outcome(lambda p=path: os.setxattr(p, "nonsense", b"x")),
        ]
    with descriptor(base / "f", os.O_RDWR) as fd:
        os.setxattr(fd, "user.by-descriptor", b"1")
        answers.append(os.getxattr(fd, "user.by-descriptor"))
    answers.append(outcome(lambda: os.getxattr(base / "missing", "user.a")))
    return answers


@same
def user_xattrs_survive_saves_of_every_kind(base: Path) -> object:
    write(base / "f")
    os.setxattr(base / "f", "user.a", b"kept")
    write(base / "f", b"replaced")
    answers = [os.getxattr(base / "f", "user.a")]
    write(base / "f", b"appended", os.O_APPEND)
    answers.append(os.getxattr(base / "f", "user.a"))
    with descriptor(base / "f", os.O_RDWR) as fd:
        os.write(fd, b"edited")
        os.setxattr(base / "f", "user.b", b"set by path while it is written")
    answers.append(os.getxattr(base / "f", "user.a"))
    answers.append(os.getxattr(base / "f", "user.b"))
    with descriptor(base / "new", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"new")
        os.setxattr(fd, "user.c", b"set by its writer")
    answers.append(os.getxattr(base / "new", "user.c"))
    return answers


def test_attributes_of_the_system_are_refused_the_same_way_by_every_call(here: Path) -> None:
    """`cp -a`, `ls -Z`, tar and rsync take EOPNOTSUPP or ENODATA for "there is none" and anything else for a fault."""
    write(here / "f")
    value = b"\0\0\0\2" + bytes(16)  # a well-formed capability: the kernel refuses others before it asks anybody
    for name in ("security.capability", "security.ima", "trusted.overlay.opaque", "system.nonsense"):
        assert outcome(lambda n=name: os.getxattr(here / "f", n)) in ("EOPNOTSUPP", "ENODATA"), name
        assert outcome(lambda n=name: os.setxattr(here / "f", n, value)) in ("EOPNOTSUPP", "EPERM"), name
        assert outcome(lambda n=name: os.removexattr(here / "f", n)) in ("EOPNOTSUPP", "EPERM", "ENODATA"), name
        assert name not in os.listxattr(here / "f")


@pytest.mark.skipif(not shutil.which("setfacl"), reason="the acl package is not installed")
def test_an_acl_set_through_the_mount_is_kept_by_saves(here: Path, plain: Path) -> None:
    def case(base: Path) -> object:
        write(base / "f", b"old", mode=0o640)
        (base / "f").chmod(0o640)
        set_it = subprocess.run(["setfacl", "-m", "u:1234:rw,g:4321:r", base / "f"], capture_output=True, check=False)
        if set_it.returncode != 0:
            return "refused"
        write(base / "f", b"new")
        shown = subprocess.run(["getfacl", "-cnp", base / "f"], capture_output=True, check=True).stdout
        subprocess.run(["cp", "-a", base / "f", base / "copy"], check=True)
        copied = subprocess.run(["getfacl", "-cnp", base / "copy"], capture_output=True, check=True).stdout
        return shown, copied, oct((base / "f").stat().st_mode)

    below = case(plain)
    if below == "refused":
        pytest.skip("the file system below has no ACL")
    assert case(here) == below


# ------------------------------------------------------------------------------------------------- names and depth


NAMES = [
    b"\xff\x80",
    b"new\nline",
    b"tab\tand\x1b[31mescape",
    b"-rf",
    b" leading and trailing ",
    b"...",
    b"ends.",
    b"caf\xc3\xa9",
    b"cafe\xcc\x81",
    b"CON",
    b'a:b*c?d|e<f>g"h\\i',
    b"x" * 255,
    "日本".encode() * 42 + b"xyz",
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_come_back_byte_for_byte(here: Path, name: bytes) -> None:
    base = os.fsencode(here)
    path = os.path.join(base, name)
    write(Path(os.fsdecode(path)), b"content")
    assert os.listdir(base) == [name]
    assert Path(os.fsdecode(path)).read_bytes() == b"content"
    write(Path(os.fsdecode(path)), b"again")
    assert os.listdir(base) == [name]
    os.rename(path, base + b"/other")
    os.mkdir(path)
    assert sorted(os.listdir(base)) == sorted([name, b"other"])
    os.rmdir(path)
    os.rename(base + b"/other", path)
    os.unlink(path)
    assert os.listdir(base) == []


@same
def names_that_are_too_long(base: Path) -> object:
    write(base / "f")
    long = b"x" * 256
    root = os.fsencode(base) + b"/"
    return [
        outcome(lambda: os.open(root + long, os.O_CREAT | os.O_WRONLY)),
        outcome(lambda: os.open(root + "é".encode() * 128, os.O_CREAT | os.O_WRONLY)),
        outcome(lambda: os.mkdir(root + long)),
        outcome(lambda: os.rename(base / "f", root + long)),
        outcome(lambda: os.symlink("f", root + long)),
        outcome(lambda: os.stat(root + long)),
        outcome(lambda: os.stat(root + b"d/" * 3000)),
    ], os.listdir(base)


@same
def names_differ_by_case_and_by_unicode_form(base: Path) -> object:
    for name in ("Readme", "README", "caf\u00e9", "cafe\u0301"):
        write(base / name, name.encode())
    return tree(base)


def test_paths_longer_than_the_kernel_takes_at_once(here: Path) -> None:
    """300 levels of 30 bytes by dir_fd: far over PATH_MAX; written, renamed, listed and removed."""
    name = "a-directory-name-of-some-bytes"
    step = os.open(here, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(300):
        os.mkdir(name, dir_fd=step)
        deeper = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=step)
        os.close(step)
        step = deeper
    for content in (b"first", b"second"):
        fd = os.open("leaf", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644, dir_fd=step)
        os.write(fd, content)
        os.close(fd)
    os.rename("leaf", "renamed", src_dir_fd=step, dst_dir_fd=step)
    fd = os.open("renamed", os.O_RDWR, dir_fd=step)
    assert os.read(fd, 99) == b"second"
    os.close(fd)
    assert os.listdir(step) == ["renamed"]
    os.close(step)
    os.rename(here / name, here / "moved")
    subprocess.run(["rm", "-r", here / "moved"], check=True)
    assert os.listdir(here) == []


# ----------------------------------------------------------------------- what the contract decides, whatever is below


def test_hard_links_devices_fifos_and_sockets_cannot_be_made(here: Path) -> None:
    write(here / "f")
    assert outcome(lambda: os.link(here / "f", here / "g")) == "EPERM"
    assert outcome(lambda: os.mkfifo(here / "fifo")) == "EPERM"
    if os.geteuid() == 0:
        assert outcome(lambda: os.mknod(here / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))) == "EPERM"
        assert outcome(lambda: os.mknod(here / "disk", stat.S_IFBLK | 0o666, os.makedev(7, 0))) == "EPERM"
    with socket.socket(socket.AF_UNIX) as plug:
        before = Path.cwd()
        os.chdir(here)  # a socket's path may be 108 bytes long at most
        try:
            assert outcome(lambda: plug.bind("socket")) == "EPERM"
        finally:
            os.chdir(before)
    assert os.listdir(here) == ["f"]


@same
def mknod_of_a_plain_file_makes_an_empty_file(base: Path) -> object:
    os.mknod(base / "f", stat.S_IFREG | 0o640)
    return tree(base), outcome(lambda: os.mknod(base / "f", stat.S_IFREG | 0o640))


@pytest.mark.parametrize("target", ["/etc/passwd", "../" * 30 + "etc/passwd", "a/../../../../../../../../x", "/"])
def test_links_that_lead_out_cannot_be_made(here: Path, target: str) -> None:
    assert outcome(lambda: os.symlink(target, here / "l")) == "EPERM"
    assert os.listdir(here) == []


def test_the_state_directory_cannot_be_reached_or_made(root: Path, here: Path) -> None:
    reserved = root / ".vaultfs"
    write(here / "f")
    (here / "d").mkdir()
    assert ".vaultfs" not in os.listdir(root)
    assert outcome(lambda: os.stat(reserved)) == "ENOENT"
    assert outcome(lambda: os.open(reserved / "journal", os.O_RDONLY)) == "ENOENT"
    for attempt in (
        lambda: os.mkdir(reserved),
        lambda: os.open(reserved, os.O_CREAT | os.O_WRONLY),
        lambda: os.symlink("d", reserved),
        lambda: os.rename(here / "f", reserved),
        lambda: os.rename(here / "d", reserved),
    ):
        assert outcome(attempt) == "EPERM"
    for attempt in (
        lambda: os.rename(reserved, here / "taken"),
        lambda: os.unlink(reserved),
        lambda: os.rmdir(reserved),
    ):
        assert outcome(attempt) in ("EPERM", "ENOENT")
    assert sorted(os.listdir(here)) == ["d", "f"]


def test_sync_calls_on_files_and_directories_succeed(here: Path) -> None:
    (here / "d").mkdir()
    write(here / "f")
    for path, flags in ((here, os.O_DIRECTORY), (here / "d", os.O_DIRECTORY), (here / "f", 0)):
        with descriptor(path, os.O_RDONLY | flags) as fd:
            os.fsync(fd)
            os.fdatasync(fd)
            assert libc.syncfs(fd) == 0
    with descriptor(here / "f", os.O_RDWR | os.O_SYNC) as fd:
        os.write(fd, b"synchronous")
    with descriptor(here / "f", os.O_WRONLY | os.O_TRUNC | os.O_DSYNC) as fd:
        os.write(fd, b"data")
    assert (here / "f").read_bytes() == b"data"


def test_unnamed_temporary_files_work_or_say_that_they_do_not_exist(here: Path) -> None:
    answer = outcome(lambda: os.open(here, os.O_TMPFILE | os.O_RDWR, 0o600))
    if isinstance(answer, int):
        os.close(answer)
    else:
        assert answer in ("EOPNOTSUPP", "EISDIR")  # what makes programs fall back: open(2), O_TMPFILE
    with tempfile.TemporaryFile(dir=here) as file:
        file.write(b"x" * 100_000)
        file.seek(0)
        assert file.read() == b"x" * 100_000
    assert os.listdir(here) == []


def test_direct_io_works_or_is_refused_at_open(here: Path) -> None:
    write(here / "f", b"0" * 8192)
    answer = outcome(lambda: os.open(here / "f", os.O_RDWR | os.O_DIRECT))
    if answer == "EINVAL":
        return
    assert isinstance(answer, int)
    try:
        with mmap.mmap(-1, 4096) as page:
            page[:] = b"d" * 4096
            assert os.pwrite(answer, page, 4096) == 4096
            assert os.preadv(answer, [page], 0) == 4096
            assert page[:] == b"0" * 4096
    finally:
        os.close(answer)
    assert (here / "f").read_bytes() == b"0" * 4096 + b"d" * 4096


def test_space_can_be_reserved_or_programs_learn_to_do_without(here: Path) -> None:
    with descriptor(here / "f", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"start")
        plain_answer = libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(50_000))
        if plain_answer != 0:
            assert ctypes.get_errno() == errno.EOPNOTSUPP
        os.posix_fallocate(fd, 0, 100_000)  # glibc writes zeros where the file system cannot
        assert os.fstat(fd).st_size == 100_000
        punched = libc.fallocate(fd, 0x03, ctypes.c_long(0), ctypes.c_long(4096))
        assert punched == 0 or ctypes.get_errno() == errno.EOPNOTSUPP
    expected = bytes(100_000) if punched == 0 else b"start" + bytes(99_995)
    assert (here / "f").read_bytes() == expected


def test_looking_for_holes_finds_all_data(here: Path) -> None:
    with descriptor(here / "f", os.O_CREAT | os.O_RDWR) as fd:
        os.pwrite(fd, b"data", 1_000_000)
        size = os.fstat(fd).st_size
    with descriptor(here / "f") as fd:
        found, position = b"", 0
        while position < size:
            start = os.lseek(fd, position, os.SEEK_DATA)
            assert start >= position
            found += bytes(start - position)
            position = os.lseek(fd, start, os.SEEK_HOLE)
            found += os.pread(fd, position - start, start)
        assert found == (here / "f").read_bytes()
        assert outcome(lambda: os.lseek(fd, size, os.SEEK_DATA)) == "ENXIO"


def test_unknown_ioctls_are_refused_as_such(here: Path) -> None:
    """`cp --reflink=auto`, lsattr, and terminals' isatty() ask by ioctl and go on by the errno."""
    write(here / "f")
    with descriptor(here / "f", os.O_RDWR) as fd:
        assert not os.isatty(fd)
        assert outcome(lambda: fcntl.ioctl(fd, 0x40049409, fd)) in ("EOPNOTSUPP", "EINVAL", "ENOTTY", "ENOSYS", "EXDEV")
        flags = outcome(lambda: fcntl.ioctl(fd, 0x80086601, bytes(8)))
        assert isinstance(flags, bytes) or flags in ("ENOTTY", "ENOSYS", "EOPNOTSUPP")


# --------------------------------------------------------------------------------------------- the cases, side by side


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_answers_as_below(here: Path, plain: Path, case: Case) -> None:
    assert case(here) == case(plain)


# ------------------------------------------------------------------------------------------------------ other users


def _as_user(uid: int, gid: int, groups: list[int], do: Callable[[], object], cwd: Path) -> object:
    """What `do` returns when somebody else calls it in `cwd`. By fork: the interpreter may lie where others may not."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(groups)
            os.setgid(gid)
            os.setuid(uid)
            os.umask(0o022)
            os.chdir(cwd)
            answer = repr(do())
        except BaseException as error:  # whatever it is belongs into the parent's assertion, not into a second pytest
            answer = repr(error)
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answers:
        answer_of_child = answers.read().decode()
    os.waitpid(child, 0)
    return answer_of_child


def _what_another_user_can_do() -> object:
    def put(path: str, data: str) -> str:
        with open(path, "w") as file:
            file.write(data)
        return "ok"

    def owner(path: str) -> object:
        info = os.stat(path)
        return info.st_uid, info.st_gid, oct(info.st_mode)

    return [
        outcome(lambda: put("shared/f", "new")),
        outcome(lambda: os.mkdir("shared/d")),
        outcome(lambda: owner("shared/f")),
        outcome(lambda: owner("shared/d")),
        outcome(lambda: put("group-may", "changed")),
        outcome(lambda: owner("group-may")),
        outcome(lambda: Path("private").read_text()),
        outcome(lambda: put("private", "stolen")),
        outcome(lambda: put("new-in-a-directory-of-root", "x")),
        outcome(lambda: os.chmod("group-may", 0o777)),
        outcome(lambda: os.chown("group-may", 1234, -1)),
        outcome(lambda: os.unlink("private")),
        outcome(lambda: os.rename("private", "shared/mine")),
        outcome(lambda: os.truncate("private", 0)),
        outcome(lambda: os.utime("group-may", (1, 1))),
        outcome(lambda: os.utime("group-may")),
        outcome(lambda: os.setxattr("private", "user.a", b"1")),
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become other users")
def test_owner_groups_and_modes_are_judged_for_every_caller(vault_mount: Callable[..., MountedVault]) -> None:
    """Files belong to their maker; a directory with setgid hands its group on; supplementary groups count."""

    def case(base: Path) -> object:
        (base / "shared").mkdir()
        os.chown(base / "shared", 0, 2500)
        (base / "shared").chmod(0o2775)
        write(base / "group-may", b"x")
        os.chown(base / "group-may", 1000, 2500)
        (base / "group-may").chmod(0o660)
        write(base / "private", b"x")
        (base / "private").chmod(0o600)
        return (
            _as_user(1001, 1001, [2500], _what_another_user_can_do, base),
            _as_user(1002, 1002, [], _what_another_user_can_do, base),
            tree(base),
        )

    mount = vault_mount(options="allow_other")
    plain = mount.base / "plain"
    for base in (plain, mount.mnt / "d"):
        base.mkdir()
        base.chmod(0o755)
    below = case(plain)
    assert "'ok'" in str(below) and "EACCES" in str(below), "the plain directory does not tell users apart"
    assert case(mount.mnt / "d") == below
