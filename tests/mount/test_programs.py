"""Ordinary programs do their work on the mount and never notice it.

Every test runs the real program, looks at what it printed and how it ended, and compares what is in the vault
afterwards with what the same commands leave in a plain directory, or with what they must leave. After each test the
fixture looks for locks, drafts and staging files left behind: a program that ended well has saved everything.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import pty
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

CLEAN = {
    **{key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "PYTHON", "XDG_"))},
    "LC_ALL": "C.UTF-8",
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_EDITOR": "true",
}


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run(*command: str | Path, cwd: Path, text: str | None = None, ok: Sequence[int] = (0,), timeout: float = 60) -> str:
    """Run `command` in `cwd`, insist on one of the exit codes `ok`, return what it printed (both streams)."""
    done = subprocess.run(
        command,
        cwd=cwd,
        input=text,
        stdin=None if text is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=CLEAN,
        encoding="utf-8",
        errors="replace",
        timeout=timeout,
        check=False,
    )
    assert done.returncode in ok, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def shell(script: str, cwd: Path, timeout: float = 60) -> str:
    return run("bash", "-ec", script, cwd=cwd, timeout=timeout)


def digest(base: Path, *, times: bool = False) -> dict[str, object]:
    """Every path below `base` with kind, mode and content (and mtime): two equal digests are equal trees."""
    found: dict[str, object] = {}
    for path in sorted(base.rglob("*")):
        info = path.lstat()
        name = str(path.relative_to(base))
        when = info.st_mtime_ns if times else 0
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = ("directory", info.st_mode, when)
        else:
            found[name] = (info.st_mode, hashlib.sha256(path.read_bytes()).hexdigest(), when)
    return found


def small_project(base: Path) -> None:
    """Some hundred files of different kinds, to be copied, archived and synchronized."""
    for number in range(60):
        directory = base / f"notes/{number % 7}/deep er/{number % 3}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"note {number}.md").write_bytes(os.urandom(number * 37))
    (base / "empty").write_bytes(b"")
    (base / "big.bin").write_bytes(os.urandom(3_000_000))
    (base / "script.sh").write_text("#!/bin/sh\necho hello\n")
    (base / "script.sh").chmod(0o755)
    (base / "private").write_text("x")
    (base / "private").chmod(0o600)
    (base / "link").symlink_to("notes/1")
    (base / "an empty directory").mkdir()
    old = 1_234_567_890_123_456_789
    for path in base.rglob("*"):
        os.utime(path, ns=(old, old), follow_symlinks=False)


# -------------------------------------------------------------------------------------------------------------- git


@needs("git")
def test_git_from_init_to_gc(here: Path) -> None:
    """init, add, commit, branch, merge, rebase, stash, tag, gc, worktree-less reset; fsck finds nothing."""
    repo = here / "repo"
    run("git", "init", "-q", "-b", "main", repo, cwd=here)
    for number in range(30):
        (repo / f"file{number}.txt").write_text(f"line\n{number}\n" * 20)
    run("git", "add", ".", cwd=repo)
    run("git", "commit", "-qm", "first", cwd=repo)
    run("git", "checkout", "-qb", "topic", cwd=repo)
    (repo / "topic.txt").write_text("topic\n")
    run("git", "add", "topic.txt", cwd=repo)
    run("git", "commit", "-qm", "topic", cwd=repo)
    run("git", "checkout", "-q", "main", cwd=repo)
    run("git", "mv", "file1.txt", "renamed.txt", cwd=repo)
    run("git", "rm", "-q", "file2.txt", cwd=repo)
    run("git", "commit", "-qam", "moved", cwd=repo)
    run("git", "rebase", "-q", "main", "topic", cwd=repo)
    (repo / "file3.txt").write_text("not committed\n")
    run("git", "stash", "-q", cwd=repo)
    assert (repo / "file3.txt").read_text().startswith("line")
    run("git", "stash", "pop", "-q", cwd=repo)
    assert (repo / "file3.txt").read_text() == "not committed\n"
    run("git", "commit", "-qam", "stashed", cwd=repo)
    run("git", "merge", "-q", "--no-ff", "-m", "merge", "main", cwd=repo)
    run("git", "tag", "-a", "v1", "-m", "one", cwd=repo)
    run("git", "gc", "-q", cwd=repo)
    assert run("git", "fsck", "--full", "--strict", "--no-dangling", cwd=repo) == ""
    assert run("git", "status", "--porcelain", cwd=repo) == ""
    assert len(run("git", "log", "--oneline", cwd=repo).splitlines()) == 4
    assert "stashed" in run("git", "reflog", cwd=repo)
    assert not list(repo.rglob("*.lock"))


@needs("git")
def test_git_clones_into_the_mount_and_out_of_it(here: Path, plain: Path) -> None:
    source = plain / "source"
    run("git", "init", "-q", "-b", "main", source, cwd=plain)
    small_project(source)
    run("git", "add", ".", cwd=source)
    run("git", "commit", "-qm", "all", cwd=source)
    run("git", "clone", "-q", "--no-local", source, here / "clone", cwd=here)
    assert run("git", "fsck", "--full", cwd=here / "clone") == ""
    assert run("git", "status", "--porcelain", cwd=here / "clone") == ""
    (here / "clone/added").write_text("x")
    run("git", "add", "added", cwd=here / "clone")
    run("git", "commit", "-qm", "added", cwd=here / "clone")
    run("git", "clone", "-q", here / "clone", plain / "back", cwd=plain)  # local: git tries hard links first
    assert (plain / "back/added").read_text() == "x"
    run("git", "push", "-q", "origin", "main:pushed", cwd=here / "clone")
    run("git", "clone", "-q", here / "clone", here / "second", cwd=here)
    assert run("git", "fsck", "--full", cwd=here / "second") == ""


@needs("git")
def test_git_keeps_a_lock_of_its_own_to_itself(here: Path) -> None:
    """An index.lock in the way is git's to complain about, and it can be removed through the mount."""
    run("git", "init", "-q", "repo", cwd=here)
    (here / "repo/f").write_text("x")
    (here / "repo/.git/index.lock").write_text("")
    assert "index.lock" in run("git", "add", "f", cwd=here / "repo", ok=[128])
    (here / "repo/.git/index.lock").unlink()
    run("git", "add", "f", cwd=here / "repo")
    run("git", "commit", "-qm", "x", cwd=here / "repo")


# ----------------------------------------------------------------------------------------------------------- editors


VIM_WAYS = [
    "backupcopy=yes",
    "backupcopy=no",
    "backupcopy=auto",
    "backup backupcopy=yes",
    "backup backupcopy=no",
    "nowritebackup",
    "fsync",
    "undofile",
]


@needs("vim")
@pytest.mark.parametrize("settings", VIM_WAYS)
def test_vim_saves_with_swap_file_and_backup(here: Path, settings: str) -> None:
    note = here / "note.md"
    note.write_text("one\ntwo\n")
    note.chmod(0o640)
    command = ["vim", "-es", "-N", "-u", "NONE", "-i", "NONE", "-c", "set swapfile backupskip= " + settings]
    run(*command, "-c", "%s/two/three/", "-c", "w", "-c", "normal Goend", "-c", "wq", note, cwd=here)
    assert note.read_text() == "one\nthree\nend\n"
    assert note.stat().st_mode & 0o7777 == 0o640
    expected = {"note.md"}
    if settings.startswith("backup "):
        expected.add("note.md~")
    if settings == "undofile":
        expected.add(".note.md.un~")
    assert set(os.listdir(here)) == expected
    run(*command, "-c", "normal ifirst ", "-c", "wq", here / "new.md", cwd=here)
    assert (here / "new.md").read_text() == "first \n"


@needs("vim")
def test_a_second_vim_is_warned_by_the_swap_file_of_the_first(here: Path) -> None:
    note = here / "note.md"
    note.write_text("one\n")
    with Terminal("vim", "-N", "-u", "NONE", "-i", "NONE", "note.md", cwd=here) as first:
        first.wait_for("one")
        first.wait_until(lambda: (here / ".note.md.swp").exists())
        second = run("vim", "-es", "-N", "-u", "NONE", "-i", "NONE", "-V1", "-c", "wq", note, cwd=here, ok=[0, 1])
        assert "E325" in second or "ATTENTION" in second
        first.type("A more\x1b:wq\r")
        first.end()
    assert note.read_text() == "one more\n"
    assert os.listdir(here) == ["note.md"]


class Terminal:
    """A program on a terminal of its own: type at it, wait for what it shows."""

    def __init__(self, *command: str, cwd: Path) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(cwd)
                os.execvpe(command[0], command, {**CLEAN, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"})
            finally:
                os._exit(127)
        self.shown = b""
        self.ended = False

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    def pump(self, seconds: float = 0.05) -> bool:
        """Read what the program shows now; False when it has closed its terminal."""
        while select.select([self.fd], [], [], seconds)[0]:
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # EIO: the other side is closed, which is how a terminal says end of file
                return False
            if not data:
                return False
            self.shown += data
        return True

    def wait_until(self, condition: object, seconds: float = 20) -> None:
        assert callable(condition)
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"in vain; shown so far: {self.shown[-2000:]!r}"
            self.pump()

    def wait_for(self, text: str) -> None:
        self.wait_until(lambda: text.encode() in self.shown)

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def end(self) -> None:
        """Wait for the program to end by itself, with exit code 0."""
        deadline = time.monotonic() + 20
        while True:
            alive = self.pump()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.ended = True
                assert status == 0, f"ended with {status}; shown: {self.shown[-2000:]!r}"
                return
            assert time.monotonic() < deadline, f"does not end; shown: {self.shown[-2000:]!r}"
            if not alive:
                time.sleep(0.02)


@needs("nano")
@pytest.mark.parametrize("backup", [False, True], ids=["", "backup"])
def test_nano_saves_what_is_typed(here: Path, backup: bool) -> None:
    (here / "note.md").write_text("one\n")
    options = ["--ignorercfiles", "--locking", *(["--backup"] if backup else [])]
    with Terminal("nano", *options, "note.md", cwd=here) as nano:
        nano.wait_for("one")
        nano.type("typed ")
        nano.wait_for("typed")
        nano.type("\x13")  # ^S: save
        nano.wait_for("Wrote")
        assert (here / "note.md").read_text() == "typed one\n"
        nano.type("more ")
        nano.wait_for("more")
        nano.type("\x0f\r")  # ^O, return: save under the same name
        nano.wait_until(lambda: (here / "note.md").read_text() == "typed more one\n")
        nano.type("\x18")  # ^X: leave
        nano.end()
    assert set(os.listdir(here)) == ({"note.md", "note.md~"} if backup else {"note.md"})


# ---------------------------------------------------------------------------------- stream editors and small tools


@needs("perl")
def test_in_place_editors(here: Path) -> None:
    for name in ("a", "b"):
        (here / name).write_text("one two\n")
        (here / name).chmod(0o604)
    shell("sed -i s/one/1/ a b; sed -i.bak s/two/2/ a; perl -i -pe s/1/I/ a; perl -i.orig -pe s/1/I/ b", here)
    assert {p.name: p.read_text() for p in here.iterdir()} == {
        "a": "I 2\n",
        "a.bak": "1 two\n",
        "b": "I two\n",
        "b.orig": "1 two\n",
    }
    assert all(path.stat().st_mode & 0o777 == 0o604 for path in here.iterdir())


def test_coreutils(here: Path, plain: Path) -> None:
    """tee, install, truncate, dd, cp, mv, split, shuf, touch, ln -s, sort -o in place: as in a plain directory."""
    script = """
        umask 022
        seq 1000 > numbers; seq 5 >> numbers
        tee one two < numbers > three; echo more | tee -a one > /dev/null
        install -m 750 numbers installed; install -d -m 700 made/of/directories
        truncate -s 100 one; truncate -s +50 two; truncate -s 0 three; truncate -s 4096 four
        printf XXX | dd of=numbers bs=1 seek=10 conv=notrunc status=none
        dd if=numbers of=part bs=1k count=2 skip=1 status=none conv=fsync
        dd if=/dev/zero of=zeros bs=64k count=20 status=none oflag=sync
        cp -a installed copied; cp --sparse=always zeros sparse; cp -l one linked 2>/dev/null || cp one linked
        mv part made/of/; mv made/of moved; mkdir -p a/b/c; mv -T moved a/b/c/d; mv -n two one; mv -b two numbers
        split -n 4 numbers piece-; cat piece-* > joined; cmp joined numbers
        sort -rn -o numbers numbers; sort -u -o numbers numbers
        touch -d '2001-02-03 04:05:06.789' one; touch -r one made; touch -c nothing
        ln -s one link; ln -sf two link; cp -P link link2; chmod -R go-w .; mktemp -d ./made-XXXX > /dev/null
        mktemp temporary.XXXX > /dev/null; rmdir made-????; rm temporary.????; shred -u copied
    """
    for base in (here, plain):
        shell(script, base)
    above, below = digest(here), digest(plain)
    assert above == below
    assert (here / "one").stat().st_mtime_ns == (plain / "one").stat().st_mtime_ns


def test_cp_mv_and_rm_of_whole_trees(here: Path, plain: Path) -> None:
    small_project(plain)
    run("cp", "-a", f"{plain}/.", here / "copy", cwd=here)
    assert digest(here / "copy", times=True) == digest(plain, times=True)
    run("cp", "-a", here / "copy", here / "second", cwd=here)
    assert digest(here / "second", times=True) == digest(plain, times=True)
    run("mv", here / "second", here / "moved", cwd=here)
    run("mv", here / "copy", plain / "out", cwd=here)  # over the mount's edge: mv copies and removes
    run("mv", plain / "out", here / "in", cwd=here)
    assert digest(here / "in", times=True) == digest(here / "moved", times=True) == digest(plain, times=True)
    run("diff", "-r", here / "in", plain, cwd=here)
    run("rm", "-r", here / "in", here / "moved", cwd=here)
    assert os.listdir(here) == []


def test_tar_unpacks_packs_and_compares(here: Path, plain: Path) -> None:
    small_project(plain)
    archive = plain.parent / "archive.tar"
    run("tar", "-C", plain, "--format=posix", "-cf", archive, ".", cwd=here)
    (here / "unpacked").mkdir()
    run("tar", "-C", here / "unpacked", "-xpf", archive, cwd=here)
    assert digest(here / "unpacked", times=True) == digest(plain, times=True)
    assert run("tar", "-C", here / "unpacked", "-df", archive, cwd=here) == ""
    run("tar", "-C", here / "unpacked", "-xpf", archive, cwd=here)  # over what is there
    assert digest(here / "unpacked") == digest(plain)
    printed = run("tar", "-C", here / "unpacked", "-czf", here / "again.tgz", ".", cwd=here)
    assert "changed as we read it" not in printed
    assert run("tar", "-C", plain, "-df", here / "again.tgz", cwd=here) == ""


@needs("rsync")
def test_the_second_rsync_transfers_nothing(here: Path, plain: Path) -> None:
    small_project(plain)
    for options in (["-a"], ["-aXA"], ["-a", "--inplace"]):
        target = here / "-".join(["to", *options])
        first = run("rsync", *options, "--itemize-changes", f"{plain}/", target, cwd=here)
        assert ">f+++++++++ big.bin" in first
        assert run("rsync", *options, "--itemize-changes", f"{plain}/", target, cwd=here) == ""
        assert digest(target, times=True) == digest(plain, times=True)
        assert run("rsync", *options, "-c", "--itemize-changes", f"{target}/", plain, cwd=here) == ""
        changed = target / "notes/1/deep er/1/note 1.md"
        changed.write_bytes(b"changed" * 1000)
        again = run("rsync", *options, "--delete", "--itemize-changes", f"{plain}/", target, cwd=here)
        assert [line for line in again.splitlines() if line.startswith(">")] == [
            line for line in again.splitlines() if line.endswith("note 1.md")
        ]
        # --inplace leaves the times of directories alone after its writes, and a save moves them: that of its lock
        times = "--inplace" not in options
        assert digest(target, times=times) == digest(plain, times=times)


@needs("rg")
def test_searchers_and_walkers_see_documents_and_nothing_else(here: Path, plain: Path) -> None:
    for base in (here, plain):
        small_project(base)
        for number in range(5):
            (base / f"notes/{number}/find me.md").write_text(f"the needle is here: {number}\n")
    for command in (
        "rg -uuu --sort path needle .",
        "grep -r needle . | sort",
        "find . | sort",
        "find . -type f -size +1k | sort",
        "find . -type d -empty",
        "find . -newermt 2020-01-01 -type f | sort",
        "ls -AR --zero . | tr '\\0' '\\n'",
        "find . -type f -print0 | xargs -0 md5sum | wc -l",
    ):
        assert shell(command, here) == shell(command, plain), command
    sizes = [int(shell("du -sb --apparent-size notes | cut -f1", base)) for base in (here, plain)]
    assert abs(sizes[0] - sizes[1]) < 200_000  # directories may have other sizes
    assert int(shell("du -sk big.bin | cut -f1", here)) >= 2900  # blocks are reported, not only sizes


@needs("make", "gcc")
def test_a_small_project_builds_and_rebuilds_only_what_changed(here: Path) -> None:
    (here / "Makefile").write_text(
        "program: main.o part.o libtool.a\n\t$(CC) -o $@ main.o part.o -L. -ltool\n"
        "libtool.a: tool.o\n\trm -f $@\n\tar rcs $@ $^\n"
        "%.o: %.c common.h\n\t$(CC) -c -o $@ $<\n"
    )
    (here / "common.h").write_text("int part(void); int tool(void);\n")
    (here / "main.c").write_text(
        '#include <stdio.h>\n#include "common.h"\nint main(void){printf("%d\\n", part()+tool());return 0;}\n'
    )
    (here / "part.c").write_text('#include "common.h"\nint part(void){return 40;}\n')
    (here / "tool.c").write_text('#include "common.h"\nint tool(void){return 2;}\n')
    run("make", "-j2", cwd=here)
    assert run("./program", cwd=here) == "42\n"
    assert "up to date" in run("make", cwd=here)
    time.sleep(0.05)  # make compares mtimes; the kernel's clock for files ticks coarsely
    (here / "part.c").write_text('#include "common.h"\nint part(void){return 50;}\n')
    rebuilt = run("make", cwd=here)
    assert "part.o" in rebuilt and "main.c" not in rebuilt and "tool.c" not in rebuilt
    assert "skew" not in rebuilt
    assert run("./program", cwd=here) == "52\n"
    assert "up to date" in run("make", cwd=here)


def test_shell_redirections(here: Path) -> None:
    script = """
        echo one > f; echo two >> f; { echo three; echo four; } >> f; echo five 1<> g
        cat < f > copy; (echo out; echo err >&2) > log 2>&1; exec 3> held; echo a >&3; echo b >&3; exec 3>&-
        exec 4<> both; echo written >&4; exec 4>&-; set -o noclobber; (echo x > f) 2> /dev/null || echo refused
        echo y >| copy2
        while read -r line; do echo "<$line>"; done < f > angled; cat << END > here-document
text
END
        for i in 1 2 3; do echo $i; done | tee piped > /dev/null; : > emptied; : > f2; echo "$(< f)" > quoted
    """
    assert shell(script, here) == "refused\n"
    assert {p.name: p.read_text() for p in here.iterdir()} == {
        "f": "one\ntwo\nthree\nfour\n",
        "g": "five\n",
        "copy": "one\ntwo\nthree\nfour\n",
        "log": "out\nerr\n",
        "held": "a\nb\n",
        "both": "written\n",
        "copy2": "y\n",
        "angled": "<one>\n<two>\n<three>\n<four>\n",
        "here-document": "text\n",
        "piped": "1\n2\n3\n",
        "emptied": "",
        "f2": "",
        "quoted": "one\ntwo\nthree\nfour\n",
    }


# ------------------------------------------------------------------------------------------------------- locks, maps


def test_flock_among_processes(here: Path) -> None:
    """flock(1) lets one in at a time, also with a command, a timeout, and a lock file made on the way."""
    (here / "count").write_text("0")
    loop = "for i in 1 2 3 4 5; do flock counter.lock sh -c 'n=$(cat count); echo $((n+1)) > count'; done"
    workers = [subprocess.Popen(["sh", "-ec", loop], cwd=here) for _ in range(6)]
    assert [worker.wait(60) for worker in workers] == [0] * 6
    assert (here / "count").read_text() == "30\n"
    holder = subprocess.Popen(["flock", "held.lock", "sh", "-c", "echo held; read x"], cwd=here, stdin=-1, stdout=-1)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    run("flock", "-n", "held.lock", "true", cwd=here, ok=[1])
    run("flock", "-w", "0.2", "held.lock", "true", cwd=here, ok=[1])
    holder.communicate(b"\n", timeout=20)
    run("flock", "-n", "held.lock", "true", cwd=here)


@pytest.mark.parametrize("name", ["note.md", "data.db"], ids=["document", "live"])
def test_record_locks_among_processes_that_write_the_same_file(here: Path, name: str) -> None:
    """fcntl(2) locks: what one holds another is refused, and a release lets it in."""
    (here / name).write_bytes(b"0" * 100)
    ready, release = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with open(here / name, "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX, 10, 0)
            os.write(ready[1], b"x")
            os.read(release[0], 1)
        os._exit(0)
    with open(here / name, "r+b") as file:
        os.read(ready[0], 1)
        with pytest.raises(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 5)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 50)
        os.write(release[1], b"x")
        fcntl.lockf(file, fcntl.LOCK_EX, 10, 0)
    os.waitpid(child, 0)
    for end in (*ready, *release):
        os.close(end)


class RawMapping:
    """mmap(2) itself: Python's mmap duplicates the descriptor, so the file would never be closed before munmap."""

    def __init__(self, fd: int, length: int) -> None:
        self.memory = ctypes.memmove
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self.libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.length = length
        self.address = self.libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        assert self.address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())

    def write(self, offset: int, data: bytes) -> None:
        self.memory(self.address + offset, data, len(data))

    def unmap(self) -> None:
        assert self.libc.munmap(self.address, self.length) == 0


@pytest.mark.parametrize("name", ["note.bin", "live.db"], ids=["document", "live"])
@pytest.mark.parametrize("closed_first", [False, True], ids=["open", "closed-before-munmap"])
def test_shared_writable_mapping(here: Path, vault_here: Path, name: str, closed_first: bool) -> None:
    (here / name).write_bytes(b"old" * 4000)
    fd = os.open(here / name, os.O_RDWR)
    view = mmap.mmap(fd, 12_000)  # keeps a duplicate of the descriptor of its own
    raw = None
    if closed_first:
        raw = RawMapping(fd, 12_000)
        view.close()
        os.close(fd)
        raw.write(6_000, b"NEW")
        raw.unmap()
    else:
        view[6_000:6_003] = b"NEW"
        view.flush()
        view.close()
        os.close(fd)
    expected = b"old" * 2000 + b"NEW" + b"old" * 1999
    deadline = time.monotonic() + 20
    while (here / name).read_bytes() != expected and time.monotonic() < deadline:
        time.sleep(0.02)  # after munmap the kernel's last release may still be on its way
    assert (here / name).read_bytes() == expected
    assert (vault_here / name).read_bytes() == expected


def test_a_mapped_reader_keeps_the_version_it_mapped(here: Path) -> None:
    """In a process of its own: if the mapped file shrinks after all, the kernel answers with SIGBUS."""
    (here / "f").write_bytes(b"old" * 20_000)
    child = os.fork()
    if child == 0:
        fd = os.open(here / "f", os.O_RDONLY)
        view = mmap.mmap(fd, 60_000, prot=mmap.PROT_READ)
        os.close(fd)
        whole = view[:3] == b"old"
        for content in (b"new" * 30_000, b"", b"x"):
            (here / "f").write_bytes(content)
        os._exit(0 if whole and view[:] == b"old" * 20_000 else 1)  # also the pages that nobody had touched before
    assert os.waitpid(child, 0)[1] == 0
    assert (here / "f").read_bytes() == b"x"


# ------------------------------------------------------------------------------------------------------------ sqlite


@needs("sqlite3")
@pytest.mark.parametrize("mode", ["delete", "wal", "truncate", "persist"])
@pytest.mark.parametrize("name", ["data.db", "places"], ids=["live-by-name", "live-by-content"])
def test_sqlite_with_two_processes(here: Path, vault_here: Path, mode: str, name: str) -> None:
    """Two shells insert at the same time; nothing is lost, the file is sound, on the mount and in the vault."""
    database = here / name
    run("sqlite3", database, f"pragma journal_mode={mode}; create table t(who, n);", cwd=here)
    insert = "".join(f".timeout 30000\ninsert into t values(?1, {n});\n" for n in range(25))
    workers = [
        subprocess.Popen(["sqlite3", database], stdin=subprocess.PIPE, cwd=here, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for number, worker in enumerate(workers):
        assert worker.stdin is not None
        worker.stdin.write(insert.replace("?1", f"'w{number}'"))
        worker.stdin.close()
        worker.stdin = None
    for worker in workers:
        _, errors = worker.communicate(timeout=60)
        assert (worker.returncode, errors) == (0, "")
    question = "select who, count(*), sum(n) from t group by who order by who; pragma integrity_check;"
    answer = "w0|25|300\nw1|25|300\nok\n"
    assert run("sqlite3", database, question, cwd=here) == answer
    with sqlite3.connect(database) as connection:
        connection.execute("insert into t values('python', 1)")
    connection.close()
    run("sqlite3", database, "vacuum; pragma wal_checkpoint(truncate);", cwd=here)
    assert run("sqlite3", vault_here / name, question, cwd=vault_here) == "python|1|1\n" + answer


def test_python_writes_a_database_and_reads_it_while_it_is_open(here: Path) -> None:
    with sqlite3.connect(here / "notes.sqlite3") as connection:
        connection.execute("pragma journal_mode=wal")
        connection.execute("create table t(x)")
        connection.executemany("insert into t values(?)", [(n,) for n in range(1000)])
        connection.commit()
        reader = "import sqlite3; print(sqlite3.connect('notes.sqlite3').execute('select sum(x) from t').fetchone()[0])"
        assert run(sys.executable, "-c", reader, cwd=here) == "499500\n"
        connection.execute("delete from t where x > 10")
    connection.close()
    assert set(os.listdir(here)) == {"notes.sqlite3"}


# ------------------------------------------------------------------------------------------------------------ python


def test_pythons_own_ways_to_save(here: Path) -> None:
    """pathlib, tempfile, os.replace, shutil: what scripts and agents use."""
    note = here / "note.md"
    for number in range(30):
        with tempfile.NamedTemporaryFile("w", dir=here, delete=False) as file:
            file.write(f"{number}")
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, note)
        assert note.read_text() == f"{number}"
    note.write_text("written")
    with note.open("a") as file:
        file.write(" appended")
    with note.open("r+") as file:
        assert file.read() == "written appended"
        file.seek(0)
        file.write("WRITTEN")
    assert note.read_text() == "WRITTEN appended"
    note.rename(here / "renamed.md")
    shutil.copy2(here / "renamed.md", here / "copy.md")
    shutil.move(here / "copy.md", here / "moved.md")
    assert (here / "moved.md").stat().st_mtime_ns == (here / "renamed.md").stat().st_mtime_ns
    shutil.copytree(here, here / "tree", ignore=lambda *_: ["tree"])
    shutil.make_archive(str(here / "zipped"), "zip", here / "tree")
    shutil.unpack_archive(here / "zipped.zip", here / "unzipped")
    assert digest(here / "unzipped").keys() == {"renamed.md", "moved.md"}
    with tempfile.TemporaryDirectory(dir=here) as scratch:
        (Path(scratch) / "x").touch()
    with tempfile.NamedTemporaryFile(dir=here) as file:
        file.write(b"for a child")
        file.flush()
        assert run("cat", file.name, cwd=here) == "for a child"
    with tempfile.SpooledTemporaryFile(max_size=10, dir=here) as spooled:
        spooled.write(b"x" * 100)
        spooled.seek(0)
        assert spooled.read() == b"x" * 100
    shutil.rmtree(here / "tree")
    shutil.rmtree(here / "unzipped")
    assert set(os.listdir(here)) == {"renamed.md", "moved.md", "zipped.zip"}


def test_python_compiles_its_modules_into_the_directory(here: Path) -> None:
    (here / "module.py").write_text("value = 1\n")
    program = "import module; print(module.value, module.__cached__)"
    first = run(sys.executable, "-c", program, cwd=here).split()
    assert first[0] == "1" and Path(first[1]).exists()
    (here / "module.py").write_text("value = 2222\n")
    assert run(sys.executable, "-c", program, cwd=here).split()[0] == "2222"


EXEC = """
import os, sys
how, path, content = sys.argv[1:]
fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)  # close-on-exec, as Python, Go, Rust and node open everything
os.write(fd, content.encode())
if how == "itself":
    os.execv("/bin/true", ["true"])
elif how == "a child":
    child = os.fork()
    if child == 0:
        os.execv("/bin/true", ["true"])
    assert os.waitpid(child, 0)[1] == 0
    os.write(fd, b"!")
    os.close(fd)
elif how == "by vfork":
    assert os.posix_spawn("/bin/true", ["true"], {}) and os.wait()[1] == 0
    os.write(fd, b"!")
elif how == "a thread's child":
    import subprocess, threading
    done = []
    thread = threading.Thread(target=lambda: done.append(subprocess.run(["/bin/true"], close_fds=False).returncode))
    thread.start()
    os.write(fd, b"!")
    thread.join()
    assert done == [0]
"""


@pytest.mark.parametrize("how", ["itself", "a child", "by vfork", "a thread's child"])
@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_a_program_that_becomes_another_with_a_descriptor_open(
    here: Path, vault_here: Path, how: str, there: bool
) -> None:
    """execve closes such descriptors while it holds the lock that every look at its /proc waits for.

    A daemon that looks then waits for the program that waits for it, and `ps` waits for both. What the program had
    written when it became another is saved: it has let go of the file by itself.
    """
    note = here / "note.md"
    if there:
        note.write_text("old")
    for number in range(5):
        content = f"{how} {number}"
        done = subprocess.run(
            ["timeout", "-s", "KILL", "20", sys.executable, "-c", EXEC, how, note, content], check=False
        )
        assert done.returncode == 0, "it never came back"
        expected = content + ("!" if how != "itself" else "")
        deadline = time.monotonic() + 20  # nobody can be told of the end of exec's close: it may come a moment later
        while (vault_here / "note.md").read_text() != expected and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (vault_here / "note.md").read_text() == note.read_text() == expected
