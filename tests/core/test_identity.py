"""What identities tell apart, and what a capture of a file or tree is worth while others write."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.core.conftest import Mounter
from vaultfs import identity as identity_module
from vaultfs.errors import BadRequestError, PathCallConflictError, PathKind, UnsafePathError
from vaultfs.identity import FileIdentity, TreeSnapshot, capture, capture_tree, digest
from vaultfs.root import VaultRoot


def identity_of(path: Path) -> FileIdentity:
    return FileIdentity.from_stat(path.lstat())


def let_time_pass() -> None:
    """Until a change gets another timestamp than one made before: a few ticks of the kernel's clock."""
    time.sleep(0.02)


# -- FileIdentity -------------------------------------------------------------------------------------------------


def test_a_rename_changes_the_ctime_and_nothing_else(vault: Path) -> None:
    (vault / "note").write_text("text")
    before = identity_of(vault / "note")
    let_time_pass()
    (vault / "note").rename(vault / "renamed")
    after = identity_of(vault / "renamed")
    assert after.ctime_ns != before.ctime_ns
    assert not after.unchanged(before)
    assert after.unchanged_but_renamed(before)
    assert after.same_object(before) and after.same_content(before)


@pytest.mark.parametrize(
    ("change", "object_stays", "content_stays"),
    [
        (lambda path: path.write_text("TEXT"), True, False),
        (lambda path: path.write_text("longer text"), True, False),
        (lambda path: os.utime(path, ns=(0, 0)), True, False),
        (lambda path: path.chmod(0o600), True, True),
        (lambda path: os.link(path, path.with_name("other")), True, True),
        (lambda path: (path.with_name("new").write_text("text"), path.with_name("new").rename(path)), False, False),
    ],
    ids=["same size", "other size", "mtime", "mode", "link", "replaced"],
)
def test_a_change_is_told_from_none(
    vault: Path, change: Callable[[Path], object], object_stays: bool, content_stays: bool
) -> None:
    note = vault / "note"
    note.write_text("text")
    before = identity_of(note)
    assert before.unchanged(identity_of(note))
    let_time_pass()
    change(note)
    after = identity_of(note)
    assert not after.unchanged(before)
    assert after.same_object(before) is object_stays
    assert after.same_content(before) is content_stays


def test_the_digest_counts_only_where_both_have_one(vault: Path) -> None:
    (vault / "note").write_text("text")
    plain = identity_of(vault / "note")
    one, other = (msgspec.structs.replace(plain, sha256=letter * 64) for letter in "ab")
    assert one.same_content(plain) and plain.same_content(one) and one.same_content(one)
    assert not one.same_content(other)
    assert not one.unchanged_but_renamed(other)
    assert one.unchanged(other), "unchanged asks the file system alone"


def test_an_identity_survives_json_and_ignores_what_it_does_not_know(vault: Path) -> None:
    (vault / "note").write_text("text")
    before = identity_of(vault / "note")
    assert msgspec.json.decode(msgspec.json.encode(before), type=FileIdentity) == before
    grown = msgspec.to_builtins(before) | {"of the future": 1}
    assert msgspec.convert(grown, FileIdentity) == before


def test_a_digest_is_of_the_whole_file_and_moves_no_position(vault: Path) -> None:
    data = os.urandom(3_000_000)
    (vault / "note").write_bytes(data)
    descriptor = os.open(vault / "note", os.O_RDONLY)
    try:
        os.lseek(descriptor, 1000, os.SEEK_SET)
        assert digest(descriptor) == hashlib.sha256(data).hexdigest()
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 1000
    finally:
        os.close(descriptor)


# -- capture ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4096, 1_000_003])
def test_a_capture_is_the_whole_file(root: VaultRoot, vault: Path, size: int) -> None:
    data = os.urandom(size)
    (vault / "note").write_bytes(data)
    (vault / "note").chmod(0o640)
    captured = capture(root, b"note")
    assert captured.data == data
    assert captured.mode == (vault / "note").stat().st_mode
    assert captured.identity.unchanged(identity_of(vault / "note"))
    assert captured.identity.sha256 == hashlib.sha256(data).hexdigest()


def test_a_capture_follows_no_link_and_takes_no_more_than_allowed(root: VaultRoot, vault: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (vault / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafePathError) as refused:
        capture(root, b"link")
    assert refused.value.kind is PathKind.COMPONENT_LINK
    (vault / "note").write_bytes(b"12345")
    assert capture(root, b"note", limit=5).data == b"12345"
    with pytest.raises(OSError) as too_large:
        capture(root, b"note", limit=4)
    assert too_large.value.errno == errno.EFBIG
    with pytest.raises(FileNotFoundError):
        capture(root, b"missing")


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"NEWS"),
        lambda path: path.write_bytes(b"much longer"),
        lambda path: path.write_bytes(b""),
        lambda path: (path.with_name("new").write_bytes(b"new!"), path.with_name("new").rename(path)),
    ],
    ids=["same size", "longer", "shorter", "replaced"],
)
def test_what_changes_under_the_read_is_read_again(
    root: VaultRoot, vault: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    note = vault / "note"
    note.write_bytes(b"old!")
    let_time_pass()
    read = identity_module._read
    changed: list[bytes] = []

    def changed_under_the_first_read(descriptor: int, size: int) -> bytes:
        data = read(descriptor, size)
        if not changed:
            change(note)
            changed.append(note.read_bytes())
        return data

    monkeypatch.setattr(identity_module, "_read", changed_under_the_first_read)
    captured = capture(root, b"note")
    assert captured.data == changed[0]
    assert captured.identity.unchanged(identity_of(note))


def test_a_write_within_one_tick_of_the_clock_is_seen_though_its_mtime_is_not(
    root: VaultRoot, vault: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = vault / "note"
    note.write_bytes(b"old!")
    found = note.stat()
    read = identity_module._read
    changed = False

    def changed_under_the_first_read(descriptor: int, size: int) -> bytes:
        nonlocal changed
        data = read(descriptor, size)
        if not changed:
            changed = True
            note.write_bytes(b"new!")
        return data

    # What a coarse clock shows: the stat of before, for ever.
    monkeypatch.setattr(identity_module, "_read", changed_under_the_first_read)
    monkeypatch.setattr(os, "fstat", lambda _: found)
    monkeypatch.setattr(time, "time_ns", lambda: found.st_mtime_ns + 1_000_000)
    assert capture(root, b"note").data == b"new!"


def test_a_file_that_never_holds_still_is_a_conflict(
    root: VaultRoot, vault: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = vault / "note"
    note.write_bytes(b"0")
    read = identity_module._read

    def always_changing(descriptor: int, size: int) -> bytes:
        data = read(descriptor, size)
        note.write_bytes(data + b"0")
        return data

    monkeypatch.setattr(identity_module, "_read", always_changing)
    with pytest.raises(PathCallConflictError) as conflict:
        capture(root, b"note")
    assert conflict.value.path == b"note"


def test_captures_of_a_file_that_is_replaced_all_the_time_are_whole_versions(root: VaultRoot, vault: Path) -> None:
    writer = """
        import itertools, os
        parent = os.getppid()
        for number in itertools.count():
            if os.getppid() != parent:
                break
            with open("new", "wb") as file:
                file.write(bytes([97 + number % 26]) * (1000 + number % 26 * 5000))
            os.rename("new", "note")
    """
    (vault / "note").write_bytes(b"a" * 1000)
    seen: set[bytes] = set()
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(writer)], cwd=vault) as process:
        try:
            deadline = time.monotonic() + 30
            while len(seen) < 20 and time.monotonic() < deadline:
                data, identity, _ = capture(root, b"note")
                assert data == data[:1] * (1000 + (data[0] - 97) * 5000)
                assert identity.size == len(data)
                seen.add(data[:1])
        finally:
            process.kill()
    assert len(seen) >= 20, "the writer did not write"


# -- trees --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(vault: Path) -> Path:
    path = vault / "tree"
    (path / "b" / "deep").mkdir(parents=True)
    (path / "a").mkdir()
    (path / "b-").write_text("between b and what is in b, if sorted by text")
    for place in ("a/one", "b/two", "b/deep/three"):
        (path / place).write_text(place)
    (path / "link").symlink_to("../..")
    let_time_pass()
    return path


def test_a_snapshot_lists_everything_in_order_and_follows_nothing(root: VaultRoot, tree: Path) -> None:
    snapshot = capture_tree(root, b"tree")
    names = [b"a", b"a/one", b"b", b"b/deep", b"b/deep/three", b"b/two", b"b-", b"link"]
    assert [entry.path for entry in snapshot.entries] == names
    for entry in snapshot.entries:
        path = tree / os.fsdecode(entry.path)
        assert entry.identity.unchanged(identity_of(path))
        assert entry.mode == path.lstat().st_mode
        assert entry.target == (b"../.." if entry.path == b"link" else None)
    assert snapshot.unchanged(capture_tree(root, b"tree"))


def test_a_renamed_tree_is_the_same_but_for_its_own_ctime(root: VaultRoot, tree: Path) -> None:
    before = capture_tree(root, b"tree", content="sha256")
    root.rename(b"tree", b"elsewhere")
    after = capture_tree(root, b"elsewhere", content="sha256")
    assert not after.unchanged(before)
    assert after.unchanged_but_renamed(before)


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "b" / "deep" / "four").write_text(""),
        lambda tree: (tree / "b" / "deep" / "three").unlink(),
        lambda tree: (tree / "b" / "two").write_text("TWO"),
        lambda tree: (tree / "a").chmod(0o700),
        lambda tree: (tree / "b" / "deep" / "three").rename(tree / "a" / "three"),
        lambda tree: (tree / "a" / "one").rename(tree / "a" / "eno"),
        lambda tree: ((tree / "link").unlink(), (tree / "link").symlink_to("..")),
        lambda tree: tree.chmod(0o700),
    ],
    ids=["added", "removed", "rewritten", "mode", "moved", "renamed", "link", "top"],
)
def test_any_change_in_a_tree_shows(root: VaultRoot, tree: Path, change: Callable[[Path], object]) -> None:
    before = capture_tree(root, b"tree")
    change(tree)
    after = capture_tree(root, b"tree")
    assert not after.unchanged(before)
    assert not after.unchanged_but_renamed(before)


def test_content_is_compared_where_it_was_asked_for(root: VaultRoot, tree: Path) -> None:
    plain = capture_tree(root, b"tree")
    before = capture_tree(root, b"tree", content="sha256")
    assert [entry.identity.sha256 is not None for entry in before.entries] == [
        entry.path in (b"a/one", b"b/deep/three", b"b/two", b"b-") for entry in before.entries
    ]
    assert plain.unchanged(before)
    forged = tuple(
        msgspec.structs.replace(entry, identity=msgspec.structs.replace(entry.identity, sha256="0" * 64))
        if entry.path == b"b/two"
        else entry
        for entry in before.entries
    )
    assert not before.unchanged(TreeSnapshot(before.top, before.mode, forged))


def test_a_tree_that_changes_while_it_is_recorded_is_a_conflict(
    root: VaultRoot, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = VaultRoot.scandir

    for change in (
        lambda: (tree / "b" / "new").write_text(""),
        lambda: (tree / "b" / "two").write_text("changed"),
        lambda: (tree / "b" / "two").unlink(),
        lambda: (tree / "b" / "deep").rename(tree / "deep"),
    ):

        def changing(self: VaultRoot, path: bytes, change: Callable[[], object] = change) -> object:
            listed = scandir(self, path)
            if path == b"tree/b":
                change()
            return listed

        with monkeypatch.context() as patch:
            patch.setattr(VaultRoot, "scandir", changing)
            with pytest.raises(PathCallConflictError):
                capture_tree(root, b"tree")


def test_a_tree_is_recorded_within_limits(root: VaultRoot, tree: Path) -> None:
    assert len(capture_tree(root, b"tree", max_entries=8, max_depth=2).entries) == 8
    with pytest.raises(BadRequestError):
        capture_tree(root, b"tree", max_entries=7)
    with pytest.raises(BadRequestError):
        capture_tree(root, b"tree", max_depth=1)


def test_what_is_mounted_in_a_tree_is_not_recorded(root: VaultRoot, tree: Path, tmp_path: Path, mount: Mounter) -> None:
    (tmp_path / "outside").write_text("")
    mount("--bind", tmp_path / "outside", tree / "a" / "one")
    with pytest.raises(UnsafePathError) as refused:
        capture_tree(root, b"tree")
    assert (refused.value.kind, refused.value.component) == (PathKind.CROSSES_MOUNT, b"tree/a/one")


def test_a_snapshot_is_of_a_directory(root: VaultRoot, tree: Path) -> None:
    for path in (b"tree/a/one", b"tree/link"):
        with pytest.raises(NotADirectoryError):
            capture_tree(root, path)
    assert len(capture_tree(root, b"").entries) == 9
    assert (tree / "a" / "one").exists()
