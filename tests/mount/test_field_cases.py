"""Faults that people met with other file systems, editors and vault tools; each must not be one of ours.

The number in a test's name is that of the case in the project's collection of field reports; the docstring says where
it was seen. Cases about locks between tools, crashes and fault injection have their tests beside those subjects; cases
of the command line (37, 86, 90 to 96, 103) that need other machines' states are in tests/cli/test_mounted.py too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import inotify_simple
import pytest

from tests.mount.conftest import SharedMount
from tests.mount.harness import FileSystem, MountedVault, eventually, in_mountinfo
from vaultfs import kernel

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
Factory = Callable[..., MountedVault]

ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "XDG_"))},
    "HOME": "/nonexistent",
    "LC_ALL": "C.UTF-8",
    **{f"GIT_{who}_{what}": "a@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}
VIM = ["vim", "-es", "-N", "-u", "NONE", "-i", "NONE", "-c", "set backupskip="]
has_vim = pytest.mark.skipif(not shutil.which("vim"), reason="vim is not installed")
has_git = pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")


def run(*command: str | Path, cwd: Path | None = None, ok: tuple[int, ...] = (0,), timeout: float = 30) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=ENVIRONMENT,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )
    assert done.returncode in ok, f"{command} ended with {done.returncode}: {done.stdout}"
    return done.stdout


def errno_of(do: Callable[[], object]) -> str:
    try:
        do()
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error))
        return "EOPNOTSUPP" if name == "ENOTSUP" else name
    return "no error"


@contextlib.contextmanager
def opened(path: Path, flags: int, mode: int = 0o644) -> Iterator[int]:
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


# ------------------------------------------------------------------------------------------- editors and atomic saves


@has_vim
@pytest.mark.parametrize("copy", ["yes", "no", "auto"])
def test_001_vim_backs_up_a_file_with_the_execute_bit(here: Path, copy: str) -> None:
    """vim/vim#5309: E212 on GVFS and FUSE, `file~` with x-bit could not be created."""
    (here / "f").write_text("line\n")
    (here / "f").chmod(0o755)
    run(*VIM, "-c", f"set backup backupcopy={copy}", "-c", "s/$/x/", "-c", "wq", here / "f")
    assert (here / "f").read_text() == "linex\n"
    assert stat.S_IMODE((here / "f").stat().st_mode) == 0o755
    assert (here / "f~").read_text() == "line\n"


@has_vim
def test_002_003_vim_writes_its_swap_file_and_leaves_none(here: Path) -> None:
    """baidu/bfs#638, csirmaz/ESFS#1: random writes into a new file fail or freeze the mount."""
    for number in range(3):
        name = here / f"new{number}"
        run(*VIM, "-c", "set swapfile", "-c", "norm ix", "-c", "preserve", "-c", "w", "-c", "norm ZZ", name, timeout=10)
        assert name.read_text() == "x\n"
    assert set(os.listdir(here)) == {"new0", "new1", "new2"}


@has_vim
def test_004_no_editor_believes_that_somebody_else_changed_its_file(here: Path, plain: Path) -> None:
    """neovim#18290, vim#5936: "file changed since reading it" at every save on network mounts."""
    (here / "f").write_text("one\n")
    script = plain / "script.vim"
    script.write_text(
        "set autoread& | s/$/a/ | w\nsleep 1100m\nchecktime\ns/$/b/ | w\nsleep 200m\nchecktime\ns/$/c/ | wq\n"
    )
    printed = run(*VIM, "-V1", "-S", script, here / "f")
    assert "W11" not in printed and "W12" not in printed and "changed since" not in printed, printed
    assert (here / "f").read_text() == "oneabc\n"
    for flags in (os.O_TRUNC, 0, os.O_APPEND):
        with opened(here / "f", os.O_WRONLY | flags) as fd:
            os.write(fd, b"x")
            seen = os.fstat(fd).st_mtime_ns
        assert (here / "f").stat().st_mtime_ns == seen
        time.sleep(0.02)
        assert (here / "f").stat().st_mtime_ns == seen


def test_006_007_lock_links_of_emacs_are_links_to_nowhere(here: Path) -> None:
    """keybase#2056, flysystem#747, ember-cli#6527: `.#file` -> user@host.pid:boot; signals must not turn into EIO."""
    (here / "n.md").write_text("text")
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)  # as Emacs with its timers and SIGIO
    try:
        for number in range(100):
            os.symlink(f"user@host.{number}:45", here / ".#n.md")
            assert os.readlink(here / ".#n.md") == f"user@host.{number}:45"
            (here / "n.md").write_text(f"text {number}")
            os.unlink(here / ".#n.md")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.symlink("user@host.1:45", here / ".#n.md")
    walked = [name for _, _, names in os.walk(here) for name in names]
    assert sorted(walked) == [".#n.md", "n.md"]
    assert stat.S_ISLNK((here / ".#n.md").lstat().st_mode)
    assert errno_of(lambda: (here / ".#n.md").stat()) == "ENOENT"


@pytest.mark.parametrize("name", ["note.md", "with space.txt"])
def test_009_gedit_saves_by_temporary_file_fsync_chmod_and_rename(here: Path, vault_here: Path, name: str) -> None:
    """rclone#2130: gedit (GIO) cannot save."""
    target = here / name
    for content in (b"first", b"second, longer", b""):
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o640
        temporary = here / f".goutputstream-{len(content)}"
        with opened(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600) as fd:
            os.write(fd, content)
            os.fchmod(fd, mode)
            os.fsync(fd)
        if target.exists():
            (here / f"{name}~").unlink(missing_ok=True)
            os.rename(target, here / f"{name}~")
        os.rename(temporary, target)
        assert (vault_here / name).read_bytes() == target.read_bytes() == content
        assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert set(os.listdir(here)) == {name, f"{name}~"}


def test_010_lock_files_of_libreoffice(here: Path) -> None:
    """rclone#3006, #2906: `.~lock.X#` is made, reopened for reading and writing, and deleted."""
    lock = here / ".~lock.a.odt#"
    for _ in range(5):
        with opened(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666) as fd:
            os.write(fd, b",user,host,30.11.2026 11:00,file:///home/user/.config/libreoffice/4;".ljust(77))
        with open(lock, "r+b") as file:
            assert len(file.read()) == 77
            file.seek(0)
            file.write(b"again")
        (here / "a.odt").write_bytes(b"PK\x03\x04")
        assert lock.read_bytes().startswith(b"again")
        lock.unlink()
        assert os.listdir(here) == ["a.odt"]


def test_011_012_names_of_temporary_files_never_stay(here: Path) -> None:
    """rclone#3428, #4936: a temporary name became the final one; editing right after a save killed the mount."""
    for number in range(100):
        temporary = here / f"lu{number}.tmp"
        temporary.write_text(f"{number}")
        os.replace(temporary, here / "document.odt")
        with open(here / "document.odt", "r+") as file:
            assert file.read() == f"{number}"
            file.write("!")
    assert os.listdir(here) == ["document.odt"]
    assert (here / "document.odt").read_text() == "99!"


def test_015_020_renaming_over_a_file_that_somebody_reads(here: Path) -> None:
    """microsoft/vscode#231653 (EBUSY, and the content erased), npm/write-file-atomic#49 (EPERM)."""
    (here / "n.md").write_text("old")
    with opened(here / "n.md", os.O_RDONLY) as fd:
        for number in range(20):
            (here / "t").write_text(f"new {number}")
            os.rename(here / "t", here / "n.md")
            assert os.pread(fd, 9, 0) == b"old"
        assert os.fstat(fd).st_nlink == 0
    assert (here / "n.md").read_text() == "new 19"


@pytest.fixture
def small_vault() -> Iterator[MountedVault]:
    """A vault on a file system of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    system = FileSystem("tmpfs", size=8 << 20)
    mount = MountedVault(on=system.path)
    try:
        mount.expect_log("space", "ENOSPC", "full", "kept", "draft")
        mount.expect_kept(None)
        mount.start()
        yield mount
        mount.finish()
    finally:
        mount.destroy()
        system.close()


def fill(mount: MountedVault) -> Path:
    """Fills the vault's disk to the last block, from behind; returns the file that does it."""
    ballast = mount.vault / "ballast"
    with opened(ballast, os.O_CREAT | os.O_WRONLY) as fd:
        for size in (65536, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(fd, b"x" * size)
    return ballast


@as_root
def test_016_038_a_full_disk_keeps_the_old_content(small_vault: MountedVault) -> None:
    """velociraptor#2885, gocryptfs#550, cryfs#219: a save on a full disk erases or damages what was there."""
    notes = {f"n{number}.md": bytes([65 + number]) * 50_000 for number in range(10)}
    for name, content in notes.items():
        (small_vault.mnt / name).write_bytes(content)
    ballast = fill(small_vault)
    refused = 0
    for number in range(50):
        name = f"n{number % 10}.md"
        try:
            (small_vault.mnt / name).write_bytes(b"z" * 200_000)
            notes[name] = b"z" * 200_000
        except OSError as error:
            assert error.errno == errno.ENOSPC
            refused += 1
        assert (small_vault.mnt / name).read_bytes() == notes[name]
    assert refused == 50
    ballast.unlink()
    for name, content in notes.items():
        assert (small_vault.mnt / name).read_bytes() == content
        (small_vault.mnt / name).write_bytes(b"room again")
        assert small_vault.read_behind(name) == b"room again"


@as_root
def test_030_appending_after_the_disk_was_full_leaves_no_hole(small_vault: MountedVault) -> None:
    """mergerfs#1180: O_APPEND writes after an ENOSPC that was retried end up at wrong offsets."""
    lines = []
    with opened(small_vault.mnt / "grows.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND) as fd:
        ballast = fill(small_vault)
        failed = False
        for number in range(3000):
            line = f"line {number:06} {'y' * 1000}\n".encode()
            try:
                written = os.write(fd, line)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                failed = True
                ballast.unlink(missing_ok=True)
                continue
            lines.append(line[:written])
            if failed and len(lines) > number - 3 and number > 20:
                break
        for number in range(50):
            line = f"more {number}\n".encode()
            assert os.write(fd, line) == len(line)
            lines.append(line)
    assert failed, "the disk never was full"
    assert (small_vault.mnt / "grows.txt").read_bytes() == b"".join(lines)


def test_018_agents_that_save_by_rename_are_seen_by_watchers(here: Path) -> None:
    """mdserve#40: `os.replace` is not noticed by somebody who watches the directory."""
    with contextlib.closing(inotify_simple.INotify(nonblocking=True)) as inotify:
        flags = inotify_simple.flags
        inotify.add_watch(here, flags.MOVED_TO | flags.MOVED_FROM | flags.CREATE | flags.DELETE)
        (here / "t").write_text("new")
        os.replace(here / "t", here / "n.md")
        seen: list[tuple[int, str]] = []

        def told() -> bool:
            seen.extend((event.mask, event.name) for event in inotify.read(timeout=50))
            return (flags.MOVED_TO, "n.md") in seen

        eventually(told, f"MOVED_TO n.md: {seen}")
        assert (here / "n.md").read_text() == "new"


def test_019_saving_through_a_link_keeps_the_link(here: Path, vault_here: Path) -> None:
    """persistent-scratch#24, patchloom#1062, zero#941: an atomic save replaces the link by a file."""
    (here / "d").mkdir()
    (here / "d/n.md").write_text("old")
    os.symlink("d/n.md", here / "l")
    os.symlink("../l", here / "d/back")
    for path, content in ((here / "l", "by the link"), (here / "d/back", "by a link to a link")):
        path.write_text(content)
        with path.open("a") as file:
            file.write("!")
        assert (vault_here / "d/n.md").read_text() == content + "!"
    assert os.readlink(here / "l") == "d/n.md"
    assert os.readlink(vault_here / "d/back") == "../l"


def test_019_a_file_with_several_names_is_read_and_not_written(here: Path, vault_here: Path) -> None:
    (vault_here / "a").write_text("shared")
    os.link(vault_here / "a", vault_here / "b")
    eventually(lambda: (here / "b").exists(), "the new name is seen")
    assert (here / "a").read_text() == (here / "b").read_text() == "shared"
    for attempt in (
        lambda: (here / "a").write_text("x"),
        lambda: os.close(os.open(here / "b", os.O_RDWR)),
        lambda: os.close(os.open(here / "b", os.O_WRONLY | os.O_APPEND)),
        lambda: os.truncate(here / "a", 0),
    ):
        assert errno_of(attempt) == "EMLINK"
    assert (vault_here / "a").read_text() == "shared"
    shutil.copy(here / "a", here / "c")
    os.rename(here / "c", here / "a")  # what the hint says
    (here / "a").write_text("own")
    assert (vault_here / "b").read_text() == "shared"
    eventually(lambda: (here / "b").stat().st_nlink == 1, "b has one name left")
    (here / "b").write_text("writable again")
    assert (vault_here / "b").read_text() == "writable again"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o400, 0o755])
def test_021_the_mode_of_a_file_is_neither_weakened_nor_masked_by_a_save(
    here: Path, vault_here: Path, mode: int
) -> None:
    """atomicwrites#11, paperclip#12713, altimate#1115."""
    (here / "f").write_text("old")
    (here / "f").chmod(mode)
    (vault_here / "f").chmod(mode)
    for mask in (0o777, 0o000, 0o022):
        with umask(mask):
            (here / "f").write_text(f"saved under {mask:o}")
            with (here / "f").open("a") as file:
                file.write("!")
        assert stat.S_IMODE((here / "f").stat().st_mode) == mode
        assert stat.S_IMODE((vault_here / "f").stat().st_mode) == mode


@as_root
def test_022_the_owner_stays_when_somebody_else_saves(vault_mount: Factory) -> None:
    """qwen-code#4431: a save by uid 1001 of a file of uid 1000 changes its owner or empties it."""
    mount = vault_mount(options="allow_other")
    path = mount.mnt / "f"
    path.write_text("old")
    os.chown(path, 1000, 1000)
    path.chmod(0o666)
    run("setpriv", "--reuid=1001", "--regid=1001", "--clear-groups", "--", "sh", "-c", 'echo new > "$1"', "sh", path)
    for place in (path, mount.behind / "f"):
        assert (place.stat().st_uid, place.stat().st_gid, stat.S_IMODE(place.stat().st_mode)) == (1000, 1000, 0o666)
        assert place.read_text() == "new\n"
    path.chmod(0o644)
    command = (
        "setpriv",
        "--reuid=1001",
        "--regid=1001",
        "--clear-groups",
        "--",
        "sh",
        "-c",
        'echo x > "$1"',
        "sh",
        path,
    )
    assert "Permission denied" in run(*command, ok=(1, 2))
    assert path.read_text() == "new\n"


# ------------------------------------------------------------------------------------------ lost updates, torn reads


def test_024_025_a_shorter_save_leaves_no_tail_and_a_new_file_is_no_empty_one(here: Path, vault_here: Path) -> None:
    """TabFS#40, perkeep#1218, bolt-mount#1."""
    for content in ("1234567", "x", "t\n", "", "again", "a" * 200_000, "b"):
        run("sh", "-c", 'printf %s "$2" > "$1"', "sh", here / "a", content) if len(content) < 1000 else (
            here / "a"
        ).write_text(content)
        assert run("cat", here / "a") == content
        assert (vault_here / "a").read_text() == content
        assert (here / "a").stat().st_size == len(content)


@pytest.mark.parametrize("in_place", [False, True], ids=["by-rename", "in-place"])
def test_026_028_098_a_change_in_the_vault_is_seen_whole(here: Path, vault_here: Path, in_place: bool) -> None:
    """brig#95, mirage#1035, musefs#683, sshfs#302, mergerfs#759: old pages, or old sizes, after a change outside."""
    (here / "a").write_bytes(b"old" * 5000)
    os.utime(here / "a", ns=(10**18, 10**18))
    with opened(here / "a", os.O_RDONLY) as reader:
        assert os.pread(reader, 3, 0) == b"old"
        if in_place:
            with (vault_here / "a").open("r+b") as file:
                file.write(b"new" * 5000)
        else:
            (vault_here / "outside").write_bytes(b"new" * 5000)
            os.replace(vault_here / "outside", vault_here / "a")
        os.utime(vault_here / "a", ns=(10**18, 10**18))  # same size, same mtime
        eventually(lambda: (here / "a").read_bytes() == b"new" * 5000, "the new content is seen")
        if not in_place:  # "an outsider that writes in place changes the version that readers hold"
            assert os.pread(reader, 20_000, 0) == b"old" * 5000
            assert os.fstat(reader).st_size == 15_000
    with (vault_here / "a").open("ab") as file:
        file.write(b"tail")
    eventually(lambda: (here / "a").stat().st_size == 15_004, "the new size is seen")
    sums = [hashlib.md5((here / "a").read_bytes()).hexdigest() for _ in range(2)]
    assert sums[0] == sums[1] == hashlib.md5(b"new" * 5000 + b"tail").hexdigest()
    (vault_here / "a").unlink()
    eventually(lambda: not (here / "a").exists() and os.listdir(here) == [], "the removal is seen")
    (vault_here / "b").write_bytes(b"made outside")
    eventually(lambda: (here / "b").exists() and (here / "b").stat().st_size == 12, "no phantom of size 0")


@has_git
def test_031_to_034_git_works_in_the_mount(here: Path) -> None:
    """securefs#58, rclone#5853, cppcryptfs#99, claude-code#85577: reflogs, index.lock, silent failures."""
    repo = here / "r"
    run("git", "init", "-q", "-b", "main", repo)
    for number in range(5):
        (repo / f"f{number}").write_text(f"{number}")
        run("git", "add", ".", cwd=repo)
        run("git", "commit", "-qm", f"c{number}", cwd=repo)
    assert len(run("git", "reflog", cwd=repo).splitlines()) == 5
    run("git", "gc", "-q", cwd=repo)
    run("git", "clone", "-q", repo, here / "clone")
    assert run("git", "fsck", "--full", cwd=here / "clone") == ""
    (repo / ".git/index.lock").touch()
    run("rm", repo / ".git/index.lock")
    (repo / "last").write_text("x")
    run("git", "add", "last", cwd=repo)
    assert run("git", "diff", "--cached", "--name-only", cwd=repo) == "last\n"


def test_035_locks_made_by_renaming_directories(here: Path) -> None:
    """gcsfuse#942: borg makes `lock.exclusive` by mkdtemp and rename, over and over."""
    for number in range(60):
        made = tempfile.mkdtemp(prefix="lock.exclusive.", dir=here)
        (Path(made) / f"host.{number}").touch()
        os.rename(made, here / "lock.exclusive")
        other = tempfile.mkdtemp(prefix="lock.exclusive.", dir=here)
        (Path(other) / "x").touch()
        assert errno_of(lambda o=other: os.rename(o, here / "lock.exclusive")) in ("ENOTEMPTY", "EEXIST")
        shutil.rmtree(other)
        (here / f"lock.exclusive/host.{number}").unlink()
        (here / "lock.exclusive").rmdir()
    assert os.listdir(here) == []


# -------------------------------------------------------------------------------------------------------------- POSIX


def test_044_directories_can_be_synced(here: Path) -> None:
    """python-atomicwrites#28, borg#1290, rocksdb#2929: EINVAL or ENOSYS."""
    (here / "f").write_text("x")
    for path in (here, here.parent):
        with opened(path, os.O_RDONLY) as fd:
            os.fsync(fd)


def test_058_an_unlinked_open_file_can_be_used(here: Path) -> None:
    """macfuse#1112, juicefs#5663, WSL#40262, libfuse#62: fstat, fchmod, ftruncate fail or hit another file."""
    for flags in (os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC, os.O_RDWR | os.O_CREAT | os.O_EXCL):
        if not flags & os.O_EXCL:
            (here / "f").write_text("content")
        with opened(here / "f", flags) as fd:
            os.unlink(here / "f")
            (here / "f").write_text("a successor")
            os.fchmod(fd, 0o600)
            assert os.fstat(fd).st_nlink == 0
            assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
            if flags & os.O_RDWR:
                os.ftruncate(fd, 3)
                os.pwrite(fd, b"abc", 0)
                assert os.pread(fd, 9, 0) == b"abc"
                assert os.fstat(fd).st_size == 3
        assert (here / "f").read_text() == "a successor"
        assert stat.S_IMODE((here / "f").stat().st_mode) != 0o600
        os.unlink(here / "f")


def test_061_removed_open_files_block_no_rmdir_and_leave_no_names(here: Path, vault_here: Path) -> None:
    """macfuse#3, libprojfs#78, mergerfs#619: `.fuse_hidden*`."""
    for flags in (os.O_RDONLY, os.O_RDWR):
        (here / "d").mkdir()
        (here / "d/f").write_text("x")
        with opened(here / "d/f", flags) as fd:
            if flags == os.O_RDWR:
                os.write(fd, b"changed")
            os.unlink(here / "d/f")
            assert os.listdir(here / "d") == os.listdir(vault_here / "d") == []
            os.rmdir(here / "d")
        assert os.listdir(here) == os.listdir(vault_here) == []


@pytest.mark.parametrize("kinds", ["file-file", "file-directory", "directory-directory"])
def test_063_rename_flags_are_obeyed_or_refused(here: Path, vault_here: Path, kinds: str) -> None:
    """cryfs#568, s3fs#2933, ceph#55002: flags are ignored and a plain rename done."""

    def make(name: str, kind: str) -> None:
        if kind == "file":
            (here / name).write_text(name)
        else:
            (here / name).mkdir()
            (here / name / f"in-{name}").write_text(name)

    def look(base: Path, name: str) -> str:
        return (base / name).read_text() if (base / name).is_file() else ",".join(os.listdir(base / name))

    for name, kind in zip("ab", kinds.split("-"), strict=True):
        make(name, kind)
    before = look(here, "a"), look(here, "b")

    def rename(flags: int) -> None:
        kernel.renameat2(-100, os.fsencode(here / "a"), -100, os.fsencode(here / "b"), flags)

    assert errno_of(lambda: rename(kernel.RENAME_NOREPLACE)) == "EEXIST"
    assert (look(here, "a"), look(here, "b")) == before
    answer = errno_of(lambda: rename(kernel.RENAME_EXCHANGE))
    assert answer in ("no error", "EINVAL")
    expected = before[::-1] if answer == "no error" else before
    for base in (here, vault_here):
        assert (look(base, "a"), look(base, "b")) == expected


def test_065_listings_can_be_gone_back_in(here: Path) -> None:
    """go-fuse#252, generic/676: see test_posix for seekdir; here: deleting while listing, as `rm -r` and find do."""
    for number in range(150):
        (here / f"{number}").touch()
    with os.scandir(here) as entries:
        for entry in entries:
            os.unlink(entry.path)
    assert os.listdir(here) == []


def test_071_attributes_and_acl_are_copied_and_kept(here: Path) -> None:
    """go-fuse#392, libfuse#317, borg#1042: `cp -a` clears group bits, strange errnos for security.capability."""
    (here / "f").write_text("x")
    (here / "f").chmod(0o664)
    os.setxattr(here / "f", "user.tag", b"value")
    run("cp", "-a", here / "f", here / "g")
    (here / "g").write_text("saved")
    assert stat.S_IMODE((here / "g").stat().st_mode) == 0o664
    assert os.getxattr(here / "g", "user.tag") == b"value"
    assert errno_of(lambda: os.getxattr(here / "g", "security.capability")) in ("ENODATA", "EOPNOTSUPP")


def test_072_hard_links_are_refused_and_programs_copy_instead(here: Path) -> None:
    """libfuse#79, mergerfs#1343: linked names with different sizes."""
    (here / "a").write_text("x")
    assert errno_of(lambda: os.link(here / "a", here / "b")) == "EPERM"
    assert errno_of(lambda: os.link(here / "a", here / "a")) in ("EPERM", "EEXIST")
    assert (here / "a").stat().st_nlink == 1


def test_073_inode_numbers_agree_and_tar_sees_no_change(here: Path) -> None:
    """buildstream#1568, bb-remote-execution#162: d_ino != st_ino, "file changed as we read it"."""
    for number in range(50):
        (here / f"f{number}").write_text("x")
        (here / f"f{number}").write_text("saved again")
    with os.scandir(here) as entries:
        for entry in entries:
            assert entry.inode() == entry.stat().st_ino == os.stat(entry.path).st_ino
    assert "changed" not in run("tar", "-cf", "/dev/zero", ".", cwd=here)
    before = (here / "f1").stat().st_ino
    run("cat", here / "f1")
    assert (here / "f1").stat().st_ino == before


def test_076_reflinks_and_reservations_fall_back(here: Path) -> None:
    """libfuse#259, #395, ceph#29157: copy_file_range, fallocate."""
    (here / "f").write_bytes(os.urandom(300_000))
    run("cp", "--reflink=auto", here / "f", here / "g")
    assert (here / "g").read_bytes() == (here / "f").read_bytes()
    assert (here / "g").stat().st_size == 300_000
    run("fallocate", "-l", "100000", here / "h", ok=(0, 1))
    run("fallocate", "-x", "-l", "100000", here / "h")  # -x: by posix_fallocate, which can do without
    assert (here / "h").stat().st_size == 100_000
    run("fallocate", "-p", "-o", "0", "-l", "4096", here / "f", ok=(0, 1))
    assert (here / "f").stat().st_size == 300_000


def test_077_df_shows_the_disk_below(here: Path, plain: Path) -> None:
    """retro-fuse#5, bazil#194, soci#1755: zero or wrong."""
    question = ["stat", "-f", "-c", "%b %c %s %S %l"]
    assert run(*question, here) == run(*question, plain)
    assert run("df", "--output=size", here).split()[-1] == run("df", "--output=size", plain).split()[-1]


def test_078_names_are_bytes(here: Path, vault_here: Path) -> None:
    """refuse#11, fusepy#133, WSL#3564, s3fs#960: not UTF-8, and composed or not."""
    base = os.fsencode(here)
    names = [
        b"\xff\x80",
        b"a\xc3",
        unicodedata.normalize("NFC", "é").encode(),
        unicodedata.normalize("NFD", "é").encode(),
    ]
    for name in names:
        fd = os.open(base + b"/" + name, os.O_CREAT | os.O_WRONLY)
        os.write(fd, name)
        os.close(fd)
    assert sorted(os.listdir(base)) == sorted(names) == sorted(os.listdir(os.fsencode(vault_here)))
    for name in names:
        with open(base + b"/" + name, "rb") as file:
            assert file.read() == name
    run("bash", "-c", r"rm $'\xff\x80'", cwd=here)
    assert len(os.listdir(here)) == 3


def test_079_names_of_255_bytes(here: Path) -> None:
    """parsec-cloud#1816, winfsp#191, agentfs#283; the lock of such a name does not fit beside it."""
    for name in ("x" * 255, "é" * 127 + "x", "x" * 251, "x" * 250 + ".md"):
        (here / name).write_text("new")
        (here / name).write_text("saved")
        with (here / name).open("a") as file:
            file.write("!")
        os.rename(here / name, here / ("y" + name[1:]))
        assert (here / ("y" + name[1:])).read_text() == "saved!"
        (here / ("y" + name[1:])).unlink()
    for name in ("x" * 256, "é" * 128):
        assert errno_of(lambda n=name: (here / n).write_text("x")) == "ENAMETOOLONG"


def test_080_paths_near_the_limit_of_the_kernel(here: Path) -> None:
    """After pjdfstest's */03.t: 4095 bytes work, one more is ENAMETOOLONG."""
    room = 4095 - len(os.fsencode(here)) - 1
    parts = []
    while room > 260:
        parts.append("d" * 200)
        room -= 201
    parts.append("f" * min(room, 255))
    path = os.path.join(here, *parts)
    os.makedirs(os.path.dirname(path))
    Path(path).write_text("deep")
    Path(path).write_text("saved")
    assert Path(path).read_text() == "saved"
    os.rename(path, here / "up")
    assert (here / "up").read_text() == "saved"
    run("rm", "-r", here / parts[0])


# ------------------------------------------------------------------------------------- resources, kernel, lifecycle


def test_082_failing_opens_leak_no_descriptors(here: Path, vault_here: Path, shared_mount: SharedMount) -> None:
    """bindfs#125, go-fuse#236."""
    (here / "f").write_text("x")
    (here / "d").mkdir()
    (vault_here / "linked").write_text("x")
    os.link(vault_here / "linked", vault_here / "linked2")
    mount = shared_mount.mount
    assert mount is not None
    if not mount.pid:
        pytest.skip("a plain directory has no daemon")
    attempts: list[Callable[[], object]] = [
        lambda: os.open(here / "missing", os.O_RDONLY),
        lambda: os.open(here / "d", os.O_WRONLY),
        lambda: os.open(here / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY),
        lambda: os.open(here / "linked", os.O_WRONLY),
        lambda: os.open(here / "f/x", os.O_CREAT | os.O_WRONLY),
        lambda: os.mkdir(here / "d"),
        lambda: os.rename(here / "missing", here / "x"),
        lambda: os.rmdir(here / "f"),
        lambda: os.link(here / "f", here / "g"),
        lambda: os.symlink("/etc", here / "g"),
        lambda: os.getxattr(here / "f", "user.missing"),
    ]
    before = len(mount.daemon_descriptors())
    for _ in range(200):
        for attempt in attempts:
            assert errno_of(attempt) != "no error"
    assert len(mount.daemon_descriptors()) <= before + 12, mount.daemon_descriptors()


def test_083_what_the_kernel_forgets_the_daemon_forgets(vault_mount: Factory) -> None:
    """gcsfuse#20, go-fuse#352, libfuse#338: inodes that are never forgotten."""
    if os.geteuid() != 0:
        pytest.skip("only root can make the kernel forget")
    mount = vault_mount()
    (mount.behind / "many").mkdir()
    for number in range(4000):
        (mount.behind / f"many/{number}").touch()

    def memory() -> int:
        fields = Path(f"/proc/{mount.pid}/status").read_text().split("VmRSS:")[1].split()
        return int(fields[0])

    def walk() -> None:
        with os.scandir(mount.mnt / "many") as entries:
            assert sum(1 for entry in entries if entry.stat().st_size == 0) == 4000

    walk()
    mount.drop_caches()
    time.sleep(0.5)  # forgets come in the background; what is asserted is only that memory does not pile up
    first = memory()
    for _ in range(5):
        walk()
        mount.drop_caches()
    eventually(lambda: memory() < first + 12_000, f"memory does not grow with each walk ({first} KiB at first)")


def test_091_the_mount_has_a_type_and_a_source_of_its_own(here: Path) -> None:
    """bazil#89: systemd unmounts what has /dev/fuse as its source."""
    line = in_mountinfo(here.parent)
    assert line is not None
    kind, source = line.partition(" - ")[2].split()[:2]
    assert kind == "fuse.vaultfs"
    assert source != "/dev/fuse"


# -------------------------------------------------------------------------------------------------------- path safety


@pytest.fixture
def outside(here: Path, shared_mount: SharedMount) -> Iterator[Path]:
    """A directory beside the vault that nobody may touch; looked at afterwards."""
    assert shared_mount.mount is not None
    directory = shared_mount.mount.base / f"outside-{here.name}"
    directory.mkdir()
    (directory / "secret").write_text("secret")
    (directory / "d").mkdir()
    yield directory
    assert sorted(os.listdir(directory)) == ["d", "secret"]
    assert (directory / "secret").read_text() == "secret"
    assert os.listdir(directory / "d") == []
    shutil.rmtree(directory)


@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
def test_100_101_links_that_lead_out_are_no_way_out(
    here: Path, vault_here: Path, outside: Path, relative: bool
) -> None:
    """modelcontextprotocol/servers#1845, mcpvault#78, DesktopCommander#219, #420: a link in the jail points out."""
    for name, target in (("l", outside / "secret"), ("d", outside / "d"), ("new", outside / "made")):
        os.symlink(os.path.relpath(target, vault_here) if relative else target, vault_here / name)
    eventually(lambda: set(os.listdir(here)) == {"l", "d", "new"}, "the links are listed")
    refused = ("ELOOP", "EXDEV", "EPERM", "EACCES", "EIO", "EINVAL")
    assert all(stat.S_ISLNK((here / name).lstat().st_mode) for name in ("l", "d", "new"))
    for attempt in (
        lambda: (here / "l").read_text(),
        lambda: (here / "l").write_text("x"),
        lambda: os.truncate(here / "l", 0),
        lambda: os.listdir(here / "d"),
        lambda: (here / "d/x").write_text("x"),
        lambda: (here / "d/x").mkdir(),
        lambda: (here / "new").write_text("x"),
        lambda: os.open(here / "new", os.O_CREAT | os.O_WRONLY),
        lambda: os.chmod(here / "l", 0o777),
        lambda: os.rename(here / "l", here / "d/moved"),
    ):
        assert errno_of(attempt) in refused
    os.rename(here / "l", here / "renamed")
    os.unlink(here / "renamed")
    os.unlink(here / "d")


def test_101_a_directory_swapped_for_a_link_is_not_followed(vault_mount: Factory) -> None:
    """The directory was looked up when it still was one; then somebody puts a link in its place in the vault."""
    mount = vault_mount(files={"d/secret": "ours"})
    mount.expect_kept(None)
    mount.expect_log(".")
    outside = mount.base / "outside"
    (outside / "d").mkdir(parents=True)
    (outside / "secret").write_text("secret")
    directory = os.open(mount.mnt / "d", os.O_RDONLY | os.O_DIRECTORY)
    file = os.open(mount.mnt / "d/secret", os.O_RDWR)
    os.rename(mount.behind / "d", mount.behind / "moved")
    os.symlink(outside, mount.behind / "d")
    for attempt in (
        lambda: os.close(os.open("made", os.O_CREAT | os.O_WRONLY, dir_fd=directory)),
        lambda: os.mkdir("made", dir_fd=directory),
        lambda: os.unlink("secret", dir_fd=directory),
        lambda: os.rmdir("d", dir_fd=directory),
        lambda: os.rename("secret", "renamed", src_dir_fd=directory, dst_dir_fd=directory),
        lambda: os.write(file, b"written"),
        lambda: os.fsync(file),
        lambda: os.close(file),
        lambda: os.close(directory),
        lambda: (mount.mnt / "d/made").write_text("x"),
        lambda: (mount.mnt / "d/secret").unlink(),
    ):
        errno_of(attempt)  # whatever it says: what counts is what it did
    assert sorted(os.listdir(outside)) == ["d", "secret"]
    assert (outside / "secret").read_text() == "secret"
    assert os.listdir(outside / "d") == []


def test_101_a_parent_swapped_for_a_link_while_a_save_is_open(vault_mount: Factory) -> None:
    """The save must not land outside, whatever close() says, and the text must not be lost."""
    mount = vault_mount()
    mount.expect_kept(None)
    mount.expect_conflicts(None)
    mount.expect_log(".")
    outside = mount.base / "outside"
    outside.mkdir()
    (mount.mnt / "d").mkdir()
    (mount.mnt / "d/n.md").write_text("old")
    fd = os.open(mount.mnt / "d/n.md", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"new text")
    os.rename(mount.behind / "d", mount.behind / "moved")
    os.symlink(outside, mount.behind / "d")
    answer = errno_of(lambda: os.close(fd))
    assert os.listdir(outside) == []
    kept = [mount.kept_content(draft) for draft in mount.kept()]
    published = (mount.behind / "moved/n.md").read_bytes()
    assert b"new text" in [published, *kept], (answer, published, kept)
    assert published in (b"old", b"new text")


@pytest.mark.parametrize("words", [["status"], ["umount"], ["drafts"]])
def test_103_dots_in_arguments_of_the_command_line_lead_nowhere(mounted: MountedVault, words: list[str]) -> None:
    """mcp-obsidian#150: `..` in path arguments."""
    done = mounted.cli(*words, str(mounted.mnt / "../../x"), check=False)
    assert done.returncode not in (0, 1)
    assert b"Traceback" not in done.stderr
    done = mounted.cli("drafts", "save-as", "../../x", str(mounted.home / "x"), check=False)
    assert done.returncode != 0
    assert not (mounted.home / "x").exists()


def test_104_outside_links_need_an_explicit_list(vault_mount: Factory) -> None:
    """mcpvault#73: trusted targets outside, off by default."""
    base = Path(tempfile.mkdtemp(prefix="vaultfs-test-outside-"))
    try:
        for name in ("trusted", "other"):
            (base / name).mkdir()
            (base / name / "f").write_text(name)
        mount = vault_mount(options=f"allow={base}/trusted")
        for name in ("trusted", "other"):
            os.symlink(base / name / "f", mount.behind / f"to-{name}")
        eventually(lambda: len(os.listdir(mount.mnt)) == 2, "the links are seen")
        assert (mount.mnt / "to-trusted").read_text() == "trusted"
        assert errno_of(lambda: (mount.mnt / "to-other").read_text()) != "no error"
        os.symlink(base / "trusted/f", mount.mnt / "made")
        assert errno_of(lambda: os.symlink(base / "other/f", mount.mnt / "refused")) == "EPERM"
    finally:
        shutil.rmtree(base)
