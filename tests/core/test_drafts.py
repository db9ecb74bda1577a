"""Drafts on disk: they say what they are, they are listed, and nothing deletes one that holds something."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.publishing import WRITER, Store, close, opened
from vaultfs.content import nobody_writes
from vaultfs.drafts import Drafts, DraftState
from vaultfs.errors import BadRequestError, DraftNotFoundError, FenceLostError
from vaultfs.identity import FileIdentity
from vaultfs.journal import (
    MARK_NAME,
    DraftKind,
    DraftRecord,
    Journal,
    JournalLine,
    Mark,
    decode_path,
    encode_path,
    staged_name,
    target_of_name,
)

PATHS = st.binary(min_size=1, max_size=600).filter(lambda path: b"\0" not in path)


@pytest.fixture
def store(vault: Path) -> Iterator[Store]:
    with opened(vault) as found:
        yield found


# --- what a draft says of itself


@given(PATHS)
def test_any_path_survives_in_names_and_journal(path: bytes) -> None:
    assert decode_path(encode_path(path)) == path
    encode_path(path).encode("ascii")
    name = staged_name("abcdefgh", path)
    assert len(name) <= 255 and b"/" not in name
    draft_id, target = target_of_name(name)
    assert draft_id == "abcdefgh"
    assert target == (path if b"~" in name else None)


@given(
    st.sampled_from(list(DraftKind)),
    st.sampled_from(list(DraftState)),
    st.booleans(),
    st.none() | st.integers(0, 1 << 62),
    st.none() | st.tuples(st.integers(1, 1 << 63), st.integers(0, 1 << 62), st.integers(-(1 << 62), 1 << 62)),
)
def test_a_mark_holds_what_recovery_asks(
    kind: DraftKind,
    state: DraftState,
    synced: bool,
    append_from: int | None,
    version: tuple[int, int, int] | None,
) -> None:
    base = version and FileIdentity(dev=7, ino=version[0], nlink=1, size=version[1], mtime_ns=version[2], ctime_ns=0)
    record = DraftRecord(
        id="abcdefgh", target="a/b", base=base, state=state, kind=kind, append_from=append_from, ino=99, synced=synced
    )
    packed = Mark.pack(record)
    assert len(packed) <= 48  # more would not fit into an inode of 256 bytes
    assert Mark.unpack(packed, "abcdefgh", b"a/b", 7) == record


def test_what_is_no_mark_is_not_read_as_one() -> None:
    packed = Mark.pack(DraftRecord(id="a", target="b"))
    for data in (b"", packed[:-1], packed + b"x", b"9" + packed[1:], packed[:1] + b"?" + packed[2:]):
        assert Mark.unpack(data, "a", b"b", 0) is None


def test_a_staged_draft_is_private_and_bears_its_mark_and_target(store: Store) -> None:
    draft = store.draft("sub/a%b.md", b"text", DraftKind.NEW)
    path = store.directory / os.fsdecode(draft.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert target_of_name(os.fsencode(path.name)) == (draft.id, b"sub/a%b.md")
    mark = Mark.unpack(os.getxattr(path, MARK_NAME), draft.id, b"sub/a%b.md", 0)
    assert mark is not None and mark.ino == path.stat().st_ino and mark.state is DraftState.PUBLISHING
    close(draft)
    assert not store.staged()


def test_a_target_too_long_for_a_name_goes_into_a_sidecar_that_goes_with_the_draft(store: Store) -> None:
    target = b"d" * 200 + b"/" + b"e" * 200
    draft = store.drafts.create(target, base=None, kind="new", writer=WRITER)
    assert len(store.staged()) == 2
    record = store.drafts.read_sidecar(store.drafts.staging(), draft.id)
    assert record is not None and record.target_path == target
    close(draft)
    assert not store.staged()


def test_without_xattrs_the_sidecar_has_the_record(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no xattrs here")

    monkeypatch.setattr(os, "setxattr", refuse)
    draft = store.draft("a.md", b"text", DraftKind.NEW)
    record = store.drafts.read_sidecar(store.drafts.staging(), draft.id)
    assert record == draft.record
    kept = draft.keep("why not")
    assert store.drafts.kept() == [kept]
    assert kept.reason == "why not" and kept.target == "a.md"
    store.drafts.discard(kept.id)
    assert not list((store.directory / ".vaultfs/drafts").iterdir())
    assert not store.staged()


def test_retarget_follows_a_rename(store: Store) -> None:
    draft = store.draft("old/a.md", b"text", DraftKind.NEW)
    draft.retarget(b"new/b.md")
    assert target_of_name(os.fsencode(Path(os.fsdecode(draft.path)).name))[1] == b"new/b.md"
    long = b"n" * 250 + b"/b.md"
    draft.retarget(long)
    assert draft.record.target_path == long
    draft.retarget(b"c.md")
    kept = draft.keep("kept")
    assert kept.target == "c.md"
    assert store.kept_contents() == {b"text": "kept"}


# --- content


def test_a_copy_keeps_holes_size_and_content(store: Store) -> None:
    source = store.directory / "sparse"
    with open(source, "wb") as file:
        file.write(b"begin")
        file.seek(8 << 20)
        file.write(b"middle")
        file.truncate(16 << 20)
    draft = store.drafts.create(b"copy", base=None, kind="edit", writer=WRITER)
    with open(source, "rb") as file:
        draft.copy_from(file.fileno())
    status = os.fstat(draft.fd)
    assert status.st_size == 16 << 20
    assert status.st_blocks * 512 < 1 << 20
    assert os.pread(draft.fd, 5, 0) == b"begin" and os.pread(draft.fd, 6, 8 << 20) == b"middle"
    assert os.pread(draft.fd, 16, (16 << 20) - 16) == bytes(16)
    close(draft)


@pytest.mark.parametrize("size", [0, 1, 4095, 4097, 3 << 20])
@pytest.mark.parametrize("kernel_copies", [True, False])
def test_a_copy_is_whole(store: Store, size: int, kernel_copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel_copies:

        def refuse(*_: object) -> int:
            raise OSError(errno.EXDEV, "not here")

        monkeypatch.setattr(os, "copy_file_range", refuse)
    content = os.urandom(size)
    (store.directory / "source").write_bytes(content)
    draft = store.drafts.create(b"copy", base=None, kind="edit", writer=WRITER)
    with open(store.directory / "source", "rb") as file:
        draft.copy_from(file.fileno())
    assert os.pread(draft.fd, size + 1, 0) == content
    close(draft)


# --- who writes a file


def test_a_lease_proves_that_nobody_writes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    fd = os.open(path, os.O_RDONLY)

    def proven() -> bool:
        with nobody_writes(fd) as answer:
            return answer

    assert proven()
    other = os.open(path, os.O_RDONLY)
    assert proven(), "readers do not matter"
    os.close(other)
    other = os.open(path, os.O_WRONLY)
    assert not proven()
    os.close(other)
    assert proven()
    other = os.open(path, os.O_RDWR)
    mapped = mmap.mmap(other, 4096)
    os.close(other)
    assert not proven(), "a writable mapping outlives its descriptor"
    mapped.close()
    assert proven()
    os.close(fd)


# --- kept drafts


def test_kept_drafts_are_listed_with_where_they_belong_and_can_be_read_saved_and_discarded(
    store: Store, tmp_path: Path
) -> None:
    first = store.draft("a/one.md", b"one", DraftKind.EDIT).keep("the lock was held")
    second = store.draft("two.md", b"twotwo", DraftKind.NEW).keep("the disk was full")
    assert {kept.id: (kept.target, kept.size, kept.reason, kept.writer) for kept in store.drafts.kept()} == {
        first.id: ("a/one.md", 3, "the lock was held", WRITER),
        second.id: ("two.md", 6, "the disk was full", WRITER),
    }
    fd = store.drafts.open_kept(first.id)
    assert os.read(fd, 9) == b"one"
    with pytest.raises(OSError):
        os.write(fd, b"x")
    os.close(fd)
    outside = tmp_path / "saved"
    store.drafts.save_as(first.id, str(outside))
    assert outside.read_bytes() == b"one"
    with pytest.raises(FileExistsError):
        store.drafts.save_as(second.id, str(outside))
    assert outside.read_bytes() == b"one"
    store.drafts.save_as(second.id, store.root.path + b"/inside.md")
    assert (store.directory / "inside.md").read_bytes() == b"twotwo"
    with pytest.raises(BadRequestError):
        store.drafts.save_as(second.id, "relative")
    store.drafts.discard(first.id)
    with pytest.raises(DraftNotFoundError):
        store.drafts.open_kept(first.id)
    assert [kept.id for kept in store.drafts.kept()] == [second.id]
    for wrong in ("", "..", "../id", "*", second.id[:-1], "ä"):
        with pytest.raises(DraftNotFoundError):
            store.drafts.discard(wrong)


def test_kept_drafts_outlive_the_journal_and_the_process(vault: Path) -> None:
    with opened(vault) as store:
        kept = store.draft("a.md", b"text", DraftKind.EDIT).keep("why")
    (vault / ".vaultfs/journal").unlink()
    with opened(vault) as store:
        assert store.drafts.kept() == [kept]


def test_a_stranger_among_the_kept_is_listed_too(store: Store) -> None:
    store.state.name("drafts")
    (store.directory / ".vaultfs/drafts/stranger").write_bytes(b"?")
    assert [(kept.id, kept.target) for kept in store.drafts.kept()] == [("stranger", "")]


def test_keeping_without_closing_leaves_a_reader(store: Store) -> None:
    draft = store.draft("a.md", b"text", DraftKind.EDIT)
    draft.keep("why", close=False)
    assert os.pread(draft.fd, 9, 0) == b"text"
    with pytest.raises(OSError):
        os.pwrite(draft.fd, b"x", 0)
    draft.discard()
    assert list(store.kept_contents()) == [b"text"], "discarding a finished draft deletes nothing"


def test_a_draft_whose_staging_file_was_destroyed_can_still_be_kept(store: Store) -> None:
    draft = store.draft("a.md", b"text", DraftKind.EDIT)
    for path in store.staged():
        os.unlink(path)
    draft.keep("why")
    assert store.kept_contents() == {b"text": "why"}


def test_a_full_disk_does_not_keep_a_draft_from_being_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = store.draft("a.md", b"text", DraftKind.EDIT)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "setxattr", full)
    monkeypatch.setattr(Drafts, "write_sidecar", full)
    draft.keep("the disk is full")
    monkeypatch.undo()
    assert [kept.target for kept in store.drafts.kept()] == ["a.md"]


# --- whose staging it is


def test_a_predecessor_whose_staging_was_taken_over_can_stage_and_publish_nothing(store: Store) -> None:
    published = store.save_new("a.md", b"old")
    draft = store.draft("a.md", b"from the dead", DraftKind.EDIT, published.identity)
    staging = store.directory / ".vaultfs/staging"
    (staging / store.drafts.attempt).rename(staging / f"{store.drafts.attempt}-seized-1")
    with pytest.raises(FenceLostError):
        store.edit("a.md", b"from the dead too", published.identity)
    with pytest.raises(FenceLostError):
        store.replace("b.md", b"new")
    from vaultfs.publish import Metadata, publish_edit

    with pytest.raises(FenceLostError):
        publish_edit(store.root, store.drafts, draft, b"a.md", Metadata(), base=published.identity)
    with pytest.raises(FenceLostError):
        draft.keep("why")
    draft.close()
    assert store.documents() == {"a.md": b"old"}


def test_a_staging_directory_that_was_only_removed_is_made_again(store: Store) -> None:
    store.save_new("a.md", b"old")
    (store.directory / ".vaultfs/staging" / store.drafts.attempt).rmdir()
    store.save_new("b.md", b"new")
    assert store.documents() == {"a.md": b"old", "b.md": b"new"}


def test_two_with_one_name_do_not_share_a_staging_directory(store: Store) -> None:
    with Drafts(store.root, store.state, store.drafts.attempt) as other:
        assert store.drafts.staging() != other.staging()


# --- the journal


def test_torn_and_foreign_lines_are_skipped(store: Store) -> None:
    store.draft("a.md", b"text", DraftKind.NEW).close()
    path = store.directory / ".vaultfs/journal"
    known = store.drafts.journal.read()
    assert len(known.drafts) == 1 and known.ignored == 0
    with open(path, "ab") as file:
        file.write(b'{"draft":{"id":"torn","tar')
    again = Journal(store.state)
    again.append(JournalLine(unclaim="x"))
    known = again.read()
    again.close()
    assert len(known.drafts) == 1 and known.ignored == 1


def test_compaction_keeps_what_is_open_and_waits_for_others(store: Store) -> None:
    draft = store.draft("open.md", b"text", DraftKind.NEW)
    for number in range(20):
        store.replace("a.md", b"%d" % number)
    path = store.directory / ".vaultfs/journal"
    before = path.stat().st_size
    other = Journal(store.state)
    store.drafts.compact()
    assert path.stat().st_size == before, "somebody else has it open"
    other.append(JournalLine(unclaim="x"))
    other.close()
    store.drafts.compact()
    assert path.stat().st_size < before
    store.drafts.claim(b"claimed", store.identity("a.md"), WRITER)
    known = store.drafts.journal.read()
    assert list(known.drafts) == [draft.id] and list(known.claims) == ["claimed"]
    store.drafts.unclaim(b"claimed")
    assert not store.drafts.journal.read().claims
    close(draft)


def test_the_journal_does_not_grow_for_ever(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from vaultfs import journal

    monkeypatch.setattr(journal, "_COMPACT_AFTER", 50)
    for number in range(100):
        store.replace("a.md", b"%d" % number)
    assert (store.directory / ".vaultfs/journal").stat().st_size < 60 * 600
