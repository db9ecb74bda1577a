"""What `mount` remarks, without a mount: each remark only where it applies, and looking changes and follows nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vaultfs.config import MountOptions, build_options
from vaultfs.mount import remarks
from vaultfs.root import VaultRoot

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def vault(tmp_path: Path) -> Path:
    vault = tmp_path.resolve() / "vault"
    vault.mkdir()
    return vault


def collect(vault: Path, *words: str, elsewhere: bool = True, first_mount: bool = False) -> list[str]:
    options: MountOptions = build_options(str(vault), str(vault.parent / "mnt") if elsewhere else str(vault), words)
    with VaultRoot.open(vault) as root:
        return remarks.collect(root, options, first_mount=first_mount)


def only(lines: list[str]) -> str:
    assert len(lines) == 1, lines
    assert lines[0].isprintable()
    return lines[0]


@contextmanager
def program(*words: str, cwd: Path | None = None) -> Iterator[int]:
    """A program that runs `words` in Python, says so, and stays; its pid."""
    script = ";".join([*words, "print(flush=True)", "input()"])
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_nothing_is_remarked_about_an_ordinary_vault(vault: Path) -> None:
    (vault / "d").mkdir()
    (vault / "note.md").write_text("x")
    (vault / "d" / "link").symlink_to("../note.md")
    assert collect(vault) == []
    assert collect(vault, elsewhere=False) == []


# ------------------------------------------------------------------------------------------------------------- links


def test_links_that_lead_out_are_counted_with_the_one_nearest_to_the_top_as_example(vault: Path) -> None:
    (vault / "a" / "b").mkdir(parents=True)
    (vault / "a" / "b" / "inside").symlink_to("../../a")
    (vault / "a" / "b" / "out").symlink_to("../../../x")
    (vault / "absolute").symlink_to(vault)
    (vault / "dangling").symlink_to("nothing/here")
    line = only(collect(vault))
    assert line.startswith("2 symbolic links")
    assert line.endswith(": for example absolute")
    (vault / "absolute").unlink()
    line = only(collect(vault))
    assert line.startswith("1 symbolic link is") and line.endswith(": a/b/out")


def test_the_policy_decides_which_links_count(vault: Path, tmp_path: Path) -> None:
    (vault / "inside").symlink_to("note.md")
    (vault / "allowed").symlink_to(tmp_path / "pictures" / "x")
    (vault / "other").symlink_to("/etc/hosts")
    assert only(collect(vault)).startswith("2 ")
    assert only(collect(vault, "symlinks=refuse")).startswith("3 ")
    line = only(collect(vault, f"allow={tmp_path / 'pictures'}"))
    assert line.startswith("1 ") and line.endswith(": other")


def test_links_in_the_state_directory_are_not_the_users(vault: Path) -> None:
    (vault / ".vaultfs").mkdir()
    (vault / ".vaultfs" / "x").symlink_to("/etc")
    assert collect(vault) == []


def test_the_walk_follows_no_link(vault: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    for number in range(3):
        (tmp_path / "outside" / str(number)).symlink_to("/etc")
    (vault / "way-out").symlink_to(tmp_path / "outside")
    (vault / "circle").symlink_to(".")
    assert only(collect(vault)).startswith("1 ")


def test_a_vault_too_big_to_look_at_is_said_to_have_at_least_that_many(
    vault: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remarks, "ENTRY_LIMIT", 10)
    for number in range(20):
        (vault / f"link{number}").symlink_to("/etc")
    assert only(collect(vault)).startswith("at least 10 symbolic links")
    monkeypatch.setattr(remarks, "ENTRY_LIMIT", 20)
    assert only(collect(vault)).startswith("20 symbolic links")
    monkeypatch.setattr(remarks, "TIME_LIMIT", -1.0)
    assert collect(vault) == []  # none was seen: then nothing is known


def test_names_cannot_write_on_the_terminal(vault: Path) -> None:
    (vault / "\x1b[31m\n").symlink_to("/etc")
    os.symlink("/etc", os.fsencode(vault) + b"/\xff")
    assert "\\x" in only(collect(vault))


@as_root
def test_a_directory_on_another_file_system_is_left_out(vault: Path) -> None:
    (vault / "other").mkdir()
    (vault / "link").symlink_to("/etc")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(vault / "other")], check=True)
    try:
        (vault / "other" / "link").symlink_to("/etc")
        assert only(collect(vault)).startswith("1 ")
    finally:
        subprocess.run(["umount", str(vault / "other")], check=True)


# ------------------------------------------------------------------------------------------------- beside the mount


def test_whoever_stands_in_the_vault_or_has_something_open_is_named(vault: Path) -> None:
    (vault / "daily").mkdir()
    (vault / "daily" / "note.md").write_text("x")
    with (
        program(cwd=vault) as in_it,
        program(cwd=vault / "daily") as below,
        program(f"f = open({str(vault / 'daily' / 'note.md')!r})") as reader,
        program(f"import os; os.open({str(vault)!r}, os.O_RDONLY)") as lister,
    ):
        line = only(collect(vault, elsewhere=False))
        assert "before it was mounted over" in line
        assert f"(pid {in_it}) works in it" in line
        assert f"(pid {below}) works in daily" in line
        assert f"(pid {reader}) has daily/note.md open" in line
        assert f"(pid {lister}) has it open" in line
        assert collect(vault) == [], "mounted elsewhere the vault's path stays what it is"
    assert collect(vault, elsewhere=False) == []


def test_neither_ourselves_nor_a_neighbour_is_named(vault: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = vault.with_name("vault-2")
    beside.mkdir()
    (beside / "note.md").write_text("x")
    monkeypatch.chdir(vault)
    with program(f"f = open({str(beside / 'note.md')!r})", cwd=beside), program(cwd=vault.parent):
        assert collect(vault, elsewhere=False) == []


def test_a_file_that_was_removed_or_replaced_is_not_in_the_vault_any_more(vault: Path) -> None:
    (vault / "removed").write_text("x")
    (vault / "replaced").write_text("x")
    (vault / "new").write_text("x")
    with program(*(f"{name} = open({str(vault / name)!r})" for name in ("removed", "replaced"))):
        (vault / "removed").unlink()
        os.replace(vault / "new", vault / "replaced")
        (vault / "removed (deleted)").write_text("another file, at the text of the link")
        assert collect(vault, elsewhere=False) == []


def test_the_list_of_programs_is_short(vault: Path) -> None:
    line = ""
    with (
        program(cwd=vault),
        program(cwd=vault),
        program(cwd=vault),
        program(cwd=vault),
        program(cwd=vault),
        program(cwd=vault),
        program(cwd=vault),
    ):
        line = only(collect(vault, elsewhere=False))
    assert line.count("works in it") == 5
    assert "and 2 more" in line


@as_root
def test_whoever_came_by_a_bind_mount_is_found_where_the_text_says_nothing(vault: Path, tmp_path: Path) -> None:
    (vault / "daily").mkdir()
    bound = tmp_path / "bound"
    bound.mkdir()
    subprocess.run(["mount", "--bind", str(vault), str(bound)], check=True)
    try:
        with program(cwd=bound / "daily") as pid:
            assert f"(pid {pid}) works in {bound.resolve()}/daily" in only(collect(vault, elsewhere=False))
    finally:
        subprocess.run(["umount", str(bound)], check=True)


# ---------------------------------------------------------------------------------------- backups and sync clients


def test_backups_are_mentioned_once_and_only_where_the_mount_covers_the_vault(vault: Path) -> None:
    assert "one file system" in only(collect(vault, elsewhere=False, first_mount=True))
    assert collect(vault, elsewhere=False) == []
    assert collect(vault, first_mount=True) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "*.tmp",
        "// /.vaultfs",
        "!/.vaultfs\n/.vaultfs",
        "/.vaultfs.old",
        "sub/.vaultfs",
        "#include nowhere",
        ".VAULTFS",
    ],
)
def test_syncthing_users_are_told_the_line_that_is_missing(vault: Path, text: str) -> None:
    (vault / ".stignore").write_text(text)
    assert "add the line /.vaultfs to" in only(collect(vault))


@pytest.mark.parametrize(
    "text",
    ["/.vaultfs", "(?d).vaultfs", "(?d)(?i)/.VaultFS", "*.tmp\n  .vaultfs/  \n", "**/.vaultfs", "/.vaultfs/**", ".*"],
)
def test_syncthing_users_who_have_the_line_are_not_told(vault: Path, text: str) -> None:
    (vault / ".stfolder").mkdir()
    assert len(collect(vault)) == 1
    (vault / ".stignore").write_text(text)
    assert collect(vault) == []
    (vault / ".stignore").write_text("#include shared.txt\n#include .stignore\n")
    assert len(collect(vault)) == 1
    (vault / "shared.txt").write_text("#include shared.txt\n" + text)
    assert collect(vault) == []


def test_an_ignore_file_that_leads_out_is_not_read_and_keeps_nobody_from_mounting(vault: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("/.vaultfs")
    (vault / ".stfolder").mkdir()
    (vault / ".stignore").symlink_to(tmp_path / "outside")
    assert "symbolic link" in only(collect(vault))  # nothing is known about Syncthing, so nothing is said
    (vault / ".stignore").unlink()
    (vault / ".stignore").write_text("#include ../outside")
    assert collect(vault) == []
    os.unlink(vault / ".stignore")
    os.mkfifo(vault / ".stignore")
    assert collect(vault) == []


def test_dropbox_users_are_told_only_if_the_mark_is_missing(vault: Path) -> None:
    (vault / ".vaultfs").mkdir()
    assert collect(vault) == []
    (vault / ".dropbox").write_text("x")
    assert "Dropbox" in only(collect(vault))
    try:
        os.setxattr(vault / ".vaultfs", "user.com.dropbox.ignored", b"1")
    except OSError:
        pytest.skip("no user attributes on this file system")
    assert collect(vault) == []


def test_whatever_goes_wrong_with_one_remark_the_others_are_made(vault: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    (vault / ".stfolder").mkdir()
    monkeypatch.setattr(remarks, "_count_links", broken)
    monkeypatch.setattr(remarks, "_processes_in", broken)
    lines = collect(vault, elsewhere=False, first_mount=True)
    assert ["one file system" in lines[0], "Syncthing" in lines[1]] == [True, True]


def test_looking_changes_nothing(vault: Path) -> None:
    (vault / "d").mkdir()
    (vault / "d" / "link").symlink_to("/etc")
    (vault / ".stignore").write_text("x")

    def state() -> list[tuple[str, int, int, int]]:
        paths = sorted([vault, *vault.rglob("*")])
        return [(str(p), *(getattr(p.lstat(), f"st_{n}") for n in ("mtime_ns", "ctime_ns", "nlink"))) for p in paths]

    before = state()
    descriptors = os.listdir("/proc/self/fd")
    collect(vault, elsewhere=False, first_mount=True)
    assert state() == before
    assert os.listdir("/proc/self/fd") == descriptors, "a descriptor is left open"
