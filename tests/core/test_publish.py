"""Publishing: what is at the name afterwards, what it looks like, and where everything else went."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.conftest import Mounter
from tests.core.publishing import WRITER, Store, close, intervening, opened, put
from vaultfs import kernel
from vaultfs.conflicts import conflict_name
from vaultfs.drafts import HIDDEN_PREFIX
from vaultfs.errors import ConflictError, Outcome, PublishError, UnsafePathError, VaultGoneError, errno_of
from vaultfs.identity import FileIdentity, digest
from vaultfs.journal import MARK_NAME, DraftKind
from vaultfs.metadata import access_acl_of_new_file
from vaultfs.publish import Metadata, publish_edit, publish_new, publish_replacement, same_version, sync_draft

CONFLICT = re.compile(r"\.sync-conflict-\d{8}-\d{6}-[A-Z2-7]{7}")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def store(vault: Path) -> Iterator[Store]:
    with opened(vault) as found:
        yield found


# --- plain saves


@pytest.mark.parametrize("durability", ["ordered", "strict", "relaxed"])
def test_each_kind_of_save_leaves_one_whole_file_and_nothing_else(store: Store, durability: str) -> None:
    published = store.save_new("a.md", b"one", durability=durability)
    assert store.documents() == {"a.md": b"one"}
    assert published.identity == store.identity("a.md")
    published = store.replace("a.md", b"two", published.identity, durability=durability)
    assert store.documents() == {"a.md": b"two"}
    published = store.edit("a.md", b"three", published.identity, durability=durability)
    assert store.documents() == {"a.md": b"three"}
    published = store.append("a.md", b"threefour", published.identity, durability=durability)
    assert store.documents() == {"a.md": b"threefour"}
    assert published.identity == store.identity("a.md")
    assert published.displaced is None and not published.superseded
    assert published.outcome is Outcome.PUBLISHED
    assert not store.staged() and not store.drafts.kept()
    assert MARK_NAME not in os.listxattr(store.directory / "a.md")


def test_publish_new_never_replaces(store: Store) -> None:
    store.save_new("a.md", b"one")
    draft = store.draft("a.md", b"two", DraftKind.NEW)
    with pytest.raises(PublishError) as caught:
        publish_new(store.root, store.drafts, draft, b"a.md", Metadata())
    assert caught.value.outcome is Outcome.DESTINATION_CONFLICT and errno_of(caught.value) == errno.EEXIST
    assert store.documents() == {"a.md": b"one"}
    assert not draft.finished  # and can still be published otherwise
    publish_replacement(store.root, store.drafts, draft, b"a.md", Metadata(), known=store.identity("a.md"))
    close(draft)
    assert store.documents() == {"a.md": b"two"}


def test_a_replacement_of_nothing_is_a_new_file(store: Store) -> None:
    store.replace("a.md", b"one", known=None)
    published = store.replace("b.md", b"two", known=store.identity("a.md"))
    assert published.displaced is None
    assert store.documents() == {"a.md": b"one", "b.md": b"two"}


def test_a_replacement_keeps_a_version_that_it_does_not_know(store: Store) -> None:
    known = store.save_new("a.md", b"one").identity
    put(store.directory / "a.md", b"newcomer")
    published = store.replace("a.md", b"two", known)
    assert store.documents() == {"a.md": b"two"}
    assert published.displaced is not None and published.displaced.target == "a.md"
    assert list(store.kept_contents()) == [b"newcomer"]


def test_a_replacement_keeps_its_known_version_if_that_was_changed_in_place(store: Store) -> None:
    known = store.save_new("a.md", b"one").identity
    with open(store.directory / "a.md", "r+b") as file:
        file.write(b"ONE!")
    store.replace("a.md", b"two", known)
    assert list(store.kept_contents()) == [b"ONE!"]


def test_a_replacement_does_not_keep_what_equals_it(store: Store) -> None:
    known = store.save_new("a.md", b"one").identity
    put(store.directory / "a.md", b"two")
    assert store.replace("a.md", b"two", known).displaced is None
    assert not store.drafts.kept()


def test_a_reader_keeps_the_version_that_it_opened(store: Store) -> None:
    known = store.save_new("a.md", b"one").identity
    with open(store.directory / "a.md", "rb") as reader:
        store.replace("a.md", b"second", known)
        assert reader.read() == b"one"
        assert os.fstat(reader.fileno()).st_size == 3


def test_a_displaced_version_that_somebody_writes_is_kept_until_it_is_proven_unchanged(store: Store) -> None:
    known = store.save_new("a.md", b"one").identity
    with open(store.directory / "a.md", "r+b"):
        known = store.replace("a.md", b"two", known).identity
        assert list(store.kept_contents()) == [b"one"]
        assert store.drafts.sweep() == 0 and store.drafts.unproven
    assert store.drafts.sweep() == 1
    assert not store.drafts.kept() and not store.drafts.unproven
    with open(store.directory / "a.md", "r+b", buffering=0) as writer:
        store.replace("a.md", b"three", known)
        writer.write(b"TWO, written after it was displaced")
    assert store.drafts.sweep() == 0
    assert list(store.kept_contents()) == [b"TWO, written after it was displaced"]


def test_our_own_descriptor_does_not_count_as_a_writer(store: Store) -> None:
    draft = store.draft("a.md", b"one", DraftKind.NEW)
    known = publish_new(store.root, store.drafts, draft, b"a.md", Metadata()).identity
    assert os.pread(draft.fd, 9, 0) == b"one"
    with pytest.raises(OSError):
        os.pwrite(draft.fd, b"x", 0)
    store.replace("a.md", b"two", known)
    assert not store.drafts.kept()
    assert os.pread(draft.fd, 9, 0) == b"one"
    draft.close()


def test_a_draft_published_under_another_name_is_staged_under_that_one_first(store: Store) -> None:
    """What an exchange takes off the name must be known by the name that it was taken off."""
    store.save_new("b.md", b"old")
    draft = store.draft("a.md", b"new", DraftKind.REPLACEMENT)
    seen: list[str] = []
    with intervening(kernel, "renameat2", {2: lambda: seen.extend(store.staged())}):
        publish_replacement(store.root, store.drafts, draft, b"b.md", Metadata(), known=store.identity("b.md"))
    close(draft)
    assert [Path(path).name.partition("~")[2] for path in seen] == ["b.md"]


def test_a_live_file_keeps_its_writable_descriptor(store: Store) -> None:
    draft = store.draft("a.db", b"header", DraftKind.NEW)
    publish_new(store.root, store.drafts, draft, b"a.db", Metadata(), keep_writable=True)
    os.pwrite(draft.fd, b"HEADER", 0)
    draft.close()
    assert store.documents() == {"a.db": b"HEADER"}


# --- conflicts


@pytest.mark.parametrize("how", ["renamed over", "written in place", "removed", "removed and made again"])
def test_an_edit_leaves_a_newcomer_alone_and_becomes_a_conflict_copy(store: Store, how: str) -> None:
    base = store.save_new("note.md", b"base").identity
    path = store.directory / "note.md"
    if how == "renamed over":
        put(path, b"newcomer")
    elif how == "written in place":
        path.write_bytes(b"newcomer")
    else:
        path.unlink()
        if how != "removed":
            path.write_bytes(b"newcomer")
    with pytest.raises(ConflictError) as caught:
        store.edit("note.md", b"edited", base)
    assert errno_of(caught.value) == errno.ESTALE
    copy = os.fsdecode(caught.value.conflict_copy or b"")
    assert CONFLICT.search(copy) and copy.startswith("note.") and copy.endswith(".md")
    expected = {copy: b"edited"} | ({} if how == "removed" else {"note.md": b"newcomer"})
    assert store.documents() == expected
    assert not store.staged() and not store.drafts.kept()
    assert MARK_NAME not in os.listxattr(store.directory / copy)


@pytest.mark.parametrize("how", ["chmod", "touched with equal bytes", "renamed over with the draft's bytes"])
def test_no_conflict_where_the_bytes_are_the_same(store: Store, how: str) -> None:
    base = store.save_new("a.md", b"base").identity
    path = store.directory / "a.md"
    base_fd = os.open(path, os.O_RDONLY)
    if how == "chmod":
        path.chmod(0o640)
    elif how == "renamed over with the draft's bytes":
        put(path, b"edited")
    else:
        put(path, b"base")
        os.utime(path, ns=(1, 1))
    store.edit("a.md", b"edited", base, base_fd=base_fd)
    os.close(base_fd)
    assert store.documents() == {"a.md": b"edited"}
    assert not store.drafts.kept()
    if how == "chmod":
        assert stat.S_IMODE(path.stat().st_mode) == 0o640, "the newer metadata is taken over"


def test_equal_bytes_are_recognized_by_the_digest_too(store: Store) -> None:
    store.save_new("a.md", b"base")
    with open(store.directory / "a.md", "rb") as file:
        base = FileIdentity.from_stat(os.fstat(file.fileno()), digest(file.fileno()))
    put(store.directory / "a.md", b"base")
    store.edit("a.md", b"edited", base)
    base = FileIdentity.from_stat((store.directory / "a.md").stat(), base.sha256)
    put(store.directory / "a.md", b"BASE")
    with pytest.raises(ConflictError):
        store.edit("a.md", b"edited again", base)


def test_conflict_fail_keeps_the_draft(store: Store) -> None:
    base = store.save_new("a.md", b"base").identity
    put(store.directory / "a.md", b"newcomer")
    with pytest.raises(ConflictError) as caught:
        store.edit("a.md", b"edited", base, conflict="fail")
    assert caught.value.conflict_copy is None
    assert [kept.id for kept in store.drafts.kept()] == [caught.value.kept]
    assert store.documents() == {"a.md": b"newcomer"}
    assert list(store.kept_contents()) == [b"edited"]


def test_conflict_overwrite_keeps_what_it_overwrites(store: Store) -> None:
    base = store.save_new("a.md", b"base").identity
    put(store.directory / "a.md", b"newcomer")
    published = store.edit("a.md", b"edited", base, conflict="overwrite")
    assert store.documents() == {"a.md": b"edited"}
    assert published.displaced is not None
    assert list(store.kept_contents()) == [b"newcomer"]


def test_a_draft_whose_copy_cannot_be_made_is_kept(store: Store) -> None:
    (store.directory / "sub").mkdir()
    base = store.save_new("sub/a.md", b"base").identity
    draft = store.draft("sub/a.md", b"edited", DraftKind.EDIT, base)
    with (
        intervening(
            kernel, "renameat2", {1: lambda: subprocess.run(["rm", "-r", store.directory / "sub"], check=True)}
        ),
        pytest.raises(ConflictError) as caught,
    ):
        publish_edit(store.root, store.drafts, draft, b"sub/a.md", Metadata(), base=base)
    close(draft)
    assert caught.value.kept
    assert list(store.kept_contents()) == [b"edited"]


def test_a_copy_is_never_made_over_a_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from vaultfs import publication

    base = store.save_new("a.md", b"base").identity
    put(store.directory / "a.md", b"newcomer")
    (store.directory / "taken").write_bytes(b"taken")
    names = iter([b"taken", b"taken", b"free"])
    monkeypatch.setattr(publication, "conflict_name", lambda name: next(names))
    with pytest.raises(ConflictError):
        store.edit("a.md", b"edited", base)
    assert store.documents() == {"a.md": b"newcomer", "taken": b"taken", "free": b"edited"}


@given(st.binary(min_size=1, max_size=255).filter(lambda name: b"/" not in name and b"\0" not in name))
def test_names_of_copies_fit(name: bytes) -> None:
    copy = conflict_name(name)
    assert len(copy) <= 255 and copy != name
    assert len(conflict_name(copy)) <= 255


@given(st.text(min_size=1, max_size=255).filter(lambda name: "/" not in name and "\0" not in name))
def test_names_of_copies_are_not_cut_within_a_character(name: str) -> None:
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return
    if len(encoded) <= 255:
        conflict_name(encoded).decode()


def test_names_of_copies() -> None:
    def name_of(name: str) -> str:
        return CONFLICT.sub(".MARK", conflict_name(name.encode()).decode())

    assert name_of("note.md") == "note.MARK.md"
    assert name_of("archive.tar.gz") == "archive.tar.MARK.gz"
    assert name_of(".bashrc") == ".bashrc.MARK"
    assert name_of("README") == "README.MARK"
    assert name_of("ends.") == "ends.MARK."
    assert CONFLICT.sub(".MARK", conflict_name(conflict_name(b"note.md")).decode()) == "note.MARK.md", "never nested"
    assert conflict_name(b"a") != conflict_name(b"a")


# --- appends


def test_a_tail_is_applied_to_the_newer_version(store: Store) -> None:
    base = store.save_new("log.txt", b"one\n").identity
    put(store.directory / "log.txt", b"zero\none\nfrom outside\n")
    published = store.append("log.txt", b"one\nours\n", base)
    assert store.documents() == {"log.txt": b"zero\none\nfrom outside\nours\n"}
    assert published.identity == store.identity("log.txt")
    assert not store.staged() and not store.drafts.kept()


def test_tails_on_one_base_all_land(store: Store) -> None:
    base = store.save_new("log.txt", b"").identity
    for number in range(5):
        store.append("log.txt", b"%d\n" % number, base)
    assert store.documents() == {"log.txt": b"0\n1\n2\n3\n4\n"}


def test_equal_tails_are_two_tails(store: Store) -> None:
    base = store.save_new("log.txt", b"begin\n").identity
    store.append("log.txt", b"begin\nsame\n", base)
    store.append("log.txt", b"begin\nsame\n", base)
    assert store.documents() == {"log.txt": b"begin\nsame\nsame\n"}


def test_a_tail_for_a_file_that_is_gone_is_a_conflict_copy(store: Store) -> None:
    base = store.save_new("log.txt", b"one\n").identity
    (store.directory / "log.txt").unlink()
    with pytest.raises(ConflictError) as caught:
        store.append("log.txt", b"one\nours\n", base)
    assert store.documents() == {os.fsdecode(caught.value.conflict_copy or b""): b"one\nours\n"}


def test_same_version_says_whether_a_tail_has_to_be_applied(store: Store) -> None:
    base = store.save_new("a.md", b"x").identity
    (store.directory / "a.md").chmod(0o600)
    assert same_version(store.root, b"a.md", base)
    put(store.directory / "a.md", b"y")
    assert not same_version(store.root, b"a.md", base)
    (store.directory / "a.md").unlink()
    assert not same_version(store.root, b"a.md", base)


# --- metadata


def test_mode_attributes_acl_and_mtime_survive_a_save(store: Store) -> None:
    known = store.save_new("a.md", b"one").identity
    path = store.directory / "a.md"
    subprocess.run(["setfacl", "-m", "u:1:r--", str(path)], check=True)
    os.setxattr(path, "user.tag", b"kept")
    os.setxattr(path, "user.vaultfs.unsynced", b"never")
    acl = os.getxattr(path, "system.posix_acl_access")
    mode = path.stat().st_mode
    for save in (store.replace, store.edit):
        draft_time = 1_000_000_000_123_456_789
        draft = store.draft("a.md", b"two", DraftKind.EDIT, known)
        os.utime(draft.fd, ns=(draft_time, draft_time))
        if save == store.replace:
            known = publish_replacement(store.root, store.drafts, draft, b"a.md", Metadata(), known=known).identity
        else:
            known = publish_edit(store.root, store.drafts, draft, b"a.md", Metadata(), base=known).identity
        close(draft)
        assert path.stat().st_mode == mode
        assert os.getxattr(path, "user.tag") == b"kept"
        assert os.getxattr(path, "system.posix_acl_access") == acl
        assert not [name for name in os.listxattr(path) if name.startswith("user.vaultfs.")]
        assert path.stat().st_mtime_ns == draft_time


@needs_root
def test_owner_survives_and_capabilities_do_not(store: Store) -> None:
    known = store.save_new("a.md", b"one").identity
    path = store.directory / "a.md"
    os.chown(path, 12, 34)
    path.chmod(0o6755)
    os.setxattr(path, "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))
    store.replace("a.md", b"two", known)
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (12, 34, 0o6755)
    assert "security.capability" not in os.listxattr(path)


def test_a_chmod_while_it_was_being_written_is_not_lost(store: Store) -> None:
    known = store.save_new("a.md", b"one").identity
    (store.directory / "a.md").chmod(0o600)
    store.replace("a.md", b"two", known, meta=Metadata(mode=0o644, base_mode=0o644))
    assert stat.S_IMODE((store.directory / "a.md").stat().st_mode) == 0o600


def test_a_mode_that_the_program_set_on_the_draft_wins(store: Store) -> None:
    known = store.save_new("a.md", b"one", Metadata(mode=0o755)).identity
    store.replace("a.md", b"two", known, meta=Metadata(mode=0o700, base_mode=0o755))
    assert stat.S_IMODE((store.directory / "a.md").stat().st_mode) == 0o700


def test_attributes_taken_away_meanwhile_do_not_come_back(store: Store) -> None:
    """Dressed for one version, then published over another: the first one's attributes must not stick."""
    known = store.save_new("a.md", b"one").identity
    path = store.directory / "a.md"
    os.setxattr(path, "user.tag", b"old")

    def newcomer() -> None:
        put(path, b"newcomer")
        path.chmod(0o600)

    with intervening(kernel, "renameat2", {1: newcomer}):
        store.replace("a.md", b"two", known)
    assert "user.tag" not in os.listxattr(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_new_file_gets_mode_less_umask(store: Store) -> None:
    store.save_new("a", b"", Metadata(mode=0o666, umask=0o027))
    store.save_new("b", b"", Metadata(umask=0o077))
    modes = [stat.S_IMODE((store.directory / name).stat().st_mode) for name in "ab"]
    assert modes == [0o640, 0o600]


@needs_root
def test_a_new_file_gets_the_owner_asked_for_and_the_group_of_a_setgid_directory(store: Store) -> None:
    (store.directory / "sub").mkdir()
    store.save_new("sub/a", b"", Metadata(mode=0o644, uid=12, gid=34))
    os.chown(store.directory / "sub", 0, 56)
    (store.directory / "sub").chmod(0o2775)
    store.save_new("sub/b", b"", Metadata(mode=0o2755, uid=12, gid=34))
    first, second = (store.directory / "sub/a").stat(), (store.directory / "sub/b").stat()
    assert (first.st_uid, first.st_gid) == (12, 34)
    assert (second.st_uid, second.st_gid) == (12, 56)


@pytest.mark.parametrize("mode", [0o666, 0o640, 0o777, 0o400])
@pytest.mark.parametrize("default", ["u:1:rwx,g::r-x,o::---", "u::rw,g::r,o::r", "g:7:rw-,m::r--", "o::rwx"])
def test_a_default_acl_gives_what_the_kernel_gives(store: Store, mode: int, default: str) -> None:
    sub = store.directory / "sub"
    sub.mkdir()
    subprocess.run(["setfacl", "-d", "-m", default, str(sub)], check=True)
    os.close(os.open(sub / "kernel", os.O_CREAT | os.O_EXCL, mode))
    store.save_new("sub/ours", b"", Metadata(mode=mode))

    def rights(name: str) -> tuple[int, bytes | None]:
        names = os.listxattr(sub / name)
        acl = os.getxattr(sub / name, "system.posix_acl_access") if "system.posix_acl_access" in names else None
        return (sub / name).stat().st_mode, acl

    assert rights("ours") == rights("kernel")


def test_a_malformed_default_acl_counts_as_none() -> None:
    for acl in (b"", b"\x02\0\0\0\1", b"\x03\0\0\0" + bytes(8)):
        assert access_acl_of_new_file(acl, 0o640) == (None, 0o640)


def test_a_new_file_inherits_the_directorys_flags(store: Store) -> None:
    sub = store.directory / "sub"
    sub.mkdir()
    if subprocess.run(["chattr", "+A", str(sub)], capture_output=True, check=False).returncode:
        pytest.skip("no inode flags here")
    store.save_new("sub/a", b"x")
    fd = os.open(sub / "a", os.O_RDONLY)
    assert (kernel.inode_flags(fd) or 0) & 0x80
    os.close(fd)


def test_a_late_publish_sets_mtime_to_now(store: Store) -> None:
    draft = store.draft("a.md", b"x", DraftKind.NEW)
    os.utime(draft.fd, ns=(1, 1))
    publish_new(store.root, store.drafts, draft, b"a.md", Metadata(), late=True)
    close(draft)
    assert (store.directory / "a.md").stat().st_mtime > 1_000_000_000


def test_read_only_files_can_be_saved_and_bear_no_mark_afterwards() -> None:
    """As somebody who is not root: on a read-only file no xattr can be changed any more."""
    directory = tempfile.mkdtemp()  # not below pytest's own directory, which others may not search
    if os.geteuid() == 0:
        os.chown(directory, 1234, 1234)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(1234, 1234, 1234)
                os.setresuid(1234, 1234, 1234)
            _save_read_only_files(Path(directory))
            os.write(write, b"ok")
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    shutil.rmtree(directory)
    with open(read, "rb") as file:
        assert file.read().decode() == "ok"


def _save_read_only_files(directory: Path) -> None:
    path = directory / "a.md"
    with opened(directory) as store:
        known = store.save_new("a.md", b"one", Metadata(mode=0o444)).identity
        known = store.replace("a.md", b"two", known).identity
        known = store.edit("a.md", b"three", known).identity
        assert not store.drafts.kept()
        put(path, b"newcomer")
        path.chmod(0o444)
        store.replace("a.md", b"four", known)
        assert store.kept_contents().keys() == {b"newcomer"}
        path.chmod(0)
        store.replace("a.md", b"five", store.identity("a.md"))
        assert stat.S_IMODE(path.stat().st_mode) == 0
        path.chmod(0o444)
        assert not os.listxattr(path)
        assert path.read_bytes() == b"five"
        # what cannot be read cannot be proven to be written by nobody: it is kept, and listed by its name at least
        assert [kept.target for kept in store.drafts.kept()] == ["a.md"] * 2


def test_a_disk_that_is_full_by_now_does_not_make_a_finished_save_fail(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = store.save_new("a.md", b"one").identity
    draft = store.draft("a.md", b"two", DraftKind.REPLACEMENT, known)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(store.drafts.journal, "append", full)
    publish_replacement(store.root, store.drafts, draft, b"a.md", Metadata(), known=known)
    close(draft)
    assert store.documents() == {"a.md": b"two"} and not store.staged()


def test_a_full_disk_is_told_as_such_and_leaves_the_old_version(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    known = store.save_new("a.md", b"one").identity
    draft = store.drafts.create(b"a.md", base=known, kind="edit", writer=WRITER)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(PublishError) as caught:
        sync_draft(draft)
    assert errno_of(caught.value) == errno.ENOSPC and caught.value.outcome is Outcome.DURABILITY_FAILED
    assert not draft.finished
    close(draft)
    assert store.documents() == {"a.md": b"one"}


# --- what is refused


def test_links_directories_and_special_files_at_the_name_are_refused(store: Store) -> None:
    base = store.save_new("a.md", b"base").identity
    path = store.directory / "a.md"
    outside = store.directory.parent / "outside"
    outside.write_bytes(b"outside")
    for make, refusal in (
        (lambda: path.symlink_to(outside), UnsafePathError),
        (path.mkdir, IsADirectoryError),
        (lambda: os.mkfifo(path), UnsafePathError),
    ):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        make()
        for save in (store.replace, store.edit, store.append):
            with pytest.raises(refusal):
                save("a.md", b"base and more", base)
            assert path.lstat().st_ino == os.lstat(path).st_ino
    assert outside.read_bytes() == b"outside"
    assert not store.staged()


def test_something_irregular_that_comes_in_between_is_put_back(store: Store) -> None:
    base = store.save_new("a.md", b"base").identity
    path = store.directory / "a.md"

    def become_directory() -> None:
        path.unlink()
        path.mkdir()
        (path / "inside").write_bytes(b"inside")

    draft = store.draft("a.md", b"edited", DraftKind.EDIT, base)
    with intervening(kernel, "renameat2", {1: become_directory}), pytest.raises(IsADirectoryError):
        publish_edit(store.root, store.drafts, draft, b"a.md", Metadata(), base=base)
    assert store.documents() == {"a.md/inside": b"inside"}
    assert not draft.finished
    draft.keep("a directory is there")
    assert list(store.kept_contents()) == [b"edited"]


def test_nothing_is_published_into_a_vault_that_was_moved(store: Store) -> None:
    store.save_new("a.md", b"one")
    moved = store.directory.with_name("moved")
    store.directory.rename(moved)
    try:
        with pytest.raises(VaultGoneError):
            store.replace("a.md", b"two")
        assert (moved / "a.md").read_bytes() == b"one"
    finally:
        moved.rename(store.directory)


def test_the_fence_is_asked_before_and_after(store: Store) -> None:
    asked: list[bytes] = []

    def ask() -> None:
        asked.append(store.documents().get("a.md", b""))

    store.drafts.assert_owned = ask
    store.save_new("a.md", b"one")
    assert asked == [b"", b"one"]

    def refuse() -> None:
        raise VaultGoneError

    store.drafts.assert_owned = refuse
    with pytest.raises(VaultGoneError):
        store.replace("a.md", b"two")
    assert store.documents() == {"a.md": b"one"}


def test_a_finished_draft_cannot_be_published_again(store: Store) -> None:
    draft = store.draft("a.md", b"x", DraftKind.NEW)
    publish_new(store.root, store.drafts, draft, b"a.md", Metadata())
    with pytest.raises(PublishError) as caught:
        publish_new(store.root, store.drafts, draft, b"b.md", Metadata())
    assert caught.value.outcome is Outcome.INVALID_REQUEST
    close(draft)


# --- file systems that cannot do everything


def _without(monkeypatch: pytest.MonkeyPatch, *flags: int) -> None:
    original = kernel.renameat2

    def limited(old_directory: int, old: bytes, new_directory: int, new: bytes, flag: int) -> None:
        if flag in flags:
            raise OSError(errno.EINVAL, "not here")
        original(old_directory, old, new_directory, new, flag)

    monkeypatch.setattr(kernel, "renameat2", limited)


def test_without_noreplace_a_link_stands_in(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, kernel.RENAME_NOREPLACE)
    store.save_new("a.md", b"one")
    assert (store.directory / "a.md").stat().st_nlink == 1
    draft = store.draft("a.md", b"two", DraftKind.NEW)
    with pytest.raises(PublishError):
        publish_new(store.root, store.drafts, draft, b"a.md", Metadata())
    close(draft)
    assert store.documents() == {"a.md": b"one"}


def test_without_exchange_only_a_fence_holder_replaces(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, kernel.RENAME_EXCHANGE)
    known = store.save_new("a.md", b"one").identity
    with pytest.raises(PublishError) as caught:
        store.edit("a.md", b"two", known)
    assert caught.value.outcome is Outcome.ATOMIC_UNAVAILABLE
    assert store.documents() == {"a.md": b"one"}
    store.drafts.fenced = True
    known = store.edit("a.md", b"two", known).identity
    put(store.directory / "a.md", b"newcomer")
    store.replace("a.md", b"three", known)
    assert store.documents() == {"a.md": b"three"}
    assert list(store.kept_contents()) == [b"newcomer"]
    assert (store.directory / "a.md").stat().st_nlink == 1
    monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EPERM, "no links here")))
    store.replace("a.md", b"four", None)
    assert store.documents() == {"a.md": b"four"}
    assert sorted(store.kept_contents()) == [b"newcomer", b"three"]
    assert not store.staged()


@needs_root
def test_directories_that_cannot_be_renamed_into_get_their_staging_beside_the_file(
    tmp_path: Path, mount: Mounter
) -> None:
    image, directory = tmp_path / "image", tmp_path / "vault"
    directory.mkdir()
    with open(image, "wb") as file:
        file.truncate(320 << 20)
    if shutil.which("mkfs.xfs") is None:
        pytest.skip("needs xfs")
    subprocess.run(["mkfs.xfs", "-q", image], check=True)
    mount("-o", "loop", image, directory)
    (directory / "project").mkdir()
    subprocess.run(["chattr", "-p", "77", "+P", str(directory / "project")], check=True)
    with opened(directory) as store:
        for turn in range(2):  # the first one finds out, the second one knows
            name = f"project/{turn}.md"
            published = store.save_new(name, b"one")
            put(directory / name, b"newcomer")
            store.replace(name, b"two", published.identity)
            base = store.edit(name, b"three", store.identity(name)).identity
            put(directory / name, b"another")
            with pytest.raises(ConflictError):
                store.edit(name, b"conflicting", base)
            assert list(store.kept_contents()) == [b"newcomer"]
            store.drafts.discard(store.drafts.kept()[0].id)
        contents = sorted(store.documents().values())
        assert [content for content in contents if content != b""] == [b"another"] * 2 + [b"conflicting"] * 2
        assert not [name for name in os.listdir(directory / "project") if name.startswith(HIDDEN_PREFIX.decode())]
        assert not store.staged()
        draft = store.drafts.create(b"project/late.md", base=None, kind="new", writer=WRITER)
        assert draft.hidden is not None
        os.write(draft.fd, b"kept")
        sync_draft(draft)
        draft.keep("why")
        assert list(store.kept_contents()) == [b"kept"]
