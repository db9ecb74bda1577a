"""After a crash: the vault holds old or new, whatever was written is somewhere, and nothing is left lying about."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.core.conftest import Mounter
from tests.core.publishing import WRITER, Store, close, opened, put
from vaultfs import kernel, recovery
from vaultfs.drafts import HIDDEN_PREFIX, Drafts, DraftState, Writer
from vaultfs.errors import ConflictError
from vaultfs.identity import FileIdentity
from vaultfs.journal import MARK_NAME, DraftKind, JournalLine
from vaultfs.locks.liveness import Processes
from vaultfs.locks.path_lock import PathLocks
from vaultfs.publish import Metadata, publish_append, publish_edit, publish_new, publish_replacement, sync_draft
from vaultfs.recovery import RecoveryReport

# Every call by which a publish changes something that outlives the process (and some that do not)
_CHANGES = [
    *((os, name) for name in ("open", "write", "pwrite", "ftruncate", "copy_file_range", "fdatasync", "fsync")),
    *((os, name) for name in ("unlink", "rename", "link", "mkdir", "rmdir", "dup2")),
    *((os, name) for name in ("setxattr", "removexattr", "fchmod", "fchown", "utime")),
    (kernel, "renameat2"),
    (fcntl, "fcntl"),
]
_rename = os.rename  # not counted: for what others do


def _killed_at(step: int, action: Callable[[], None]) -> bool:
    """Run `action` in a child that is killed before its nth change; False if it got to the end before that."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **keywords: Any) -> Any:
                nonlocal count
                count += 1
                if count == step:
                    os._exit(9)
                return original(*arguments, **keywords)

            return call

        status = 1
        try:
            for module, name in _CHANGES:
                setattr(module, name, counted(getattr(module, name)))
            action()
            status = 0
        except BaseException as error:
            print(f"step {step}: {error!r}", flush=True)
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


# --- what is done when the child dies. Each makes `written` when the new content is complete.


def _newcomer(store: Store, written: Path) -> None:
    """Somebody else's version comes; that one is not what is cut off."""
    (store.directory / "outside").write_bytes(b"newcomer")
    _rename(store.directory / "outside", store.directory / "a.md")
    written.with_suffix(".came").write_bytes(b"")


def _draft(store: Store, written: Path, content: bytes, kind: str, base: FileIdentity | None, **more: Any) -> Any:
    draft = store.drafts.create(b"a.md", base=base, kind=kind, writer=WRITER, mode=0o644, **more)
    os.write(draft.fd, content)
    written.write_bytes(b"")
    sync_draft(draft)
    return draft


def _new(store: Store, written: Path) -> None:
    draft = _draft(store, written, b"new", DraftKind.NEW, None)
    publish_new(store.root, store.drafts, draft, b"a.md", Metadata(mode=0o644))
    draft.close()


def _replacement(store: Store, written: Path) -> None:
    known = store.identity("a.md")
    draft = _draft(store, written, b"new", DraftKind.REPLACEMENT, known)
    publish_replacement(store.root, store.drafts, draft, b"a.md", Metadata(), known=known)
    draft.close()


def _edit(store: Store, written: Path) -> None:
    base = store.identity("a.md")
    draft = _draft(store, written, b"new", DraftKind.EDIT, base)
    publish_edit(store.root, store.drafts, draft, b"a.md", Metadata(), base=base)
    draft.close()


def _displacing(store: Store, written: Path) -> None:
    known = store.identity("a.md")
    draft = _draft(store, written, b"new", DraftKind.REPLACEMENT, known)
    _newcomer(store, written)
    publish_replacement(store.root, store.drafts, draft, b"a.md", Metadata(), known=known)
    draft.close()


def _conflict(store: Store, written: Path) -> None:
    base = store.identity("a.md")
    draft = _draft(store, written, b"new", DraftKind.EDIT, base)
    _newcomer(store, written)
    try:
        publish_edit(store.root, store.drafts, draft, b"a.md", Metadata(), base=base)
    except ConflictError:
        draft.close()
        return
    raise AssertionError("no conflict")


def _conflict_in_the_exchange(store: Store, written: Path) -> None:
    base = store.identity("a.md")
    draft = _draft(store, written, b"new", DraftKind.EDIT, base)
    original = kernel.renameat2

    def late(*arguments: Any) -> None:
        kernel.renameat2 = original
        _newcomer(store, written)
        original(*arguments)

    kernel.renameat2 = late
    try:
        publish_edit(store.root, store.drafts, draft, b"a.md", Metadata(), base=base)
    except ConflictError:
        draft.close()
        return
    raise AssertionError("no conflict")


def _append(store: Store, written: Path) -> None:
    base = store.identity("a.md")
    draft = _draft(store, written, b"old+tail", DraftKind.APPEND, base, append_from=3)
    _newcomer(store, written)
    publish_append(store.root, store.drafts, draft, b"a.md", Metadata(), base=base, append_from=3)
    draft.close()


def _keep(store: Store, written: Path) -> None:
    _draft(store, written, b"new", DraftKind.EDIT, store.identity("a.md")).keep("its lock was held")


_ACTIONS = {
    action.__name__.strip("_"): action
    for action in (_new, _replacement, _edit, _displacing, _conflict, _conflict_in_the_exchange, _append, _keep)
}


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: hundreds of crashes need no disk, since only processes die here."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize("damage", ["none", "the machine stopped too", "the journal is lost"])
@pytest.mark.parametrize("name", list(_ACTIONS))
def test_killed_at_any_step_nothing_is_lost_and_nothing_is_left(
    memory: Path, name: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if damage == "the machine stopped too":
        monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    for step in range(1, 200):
        directory = memory / str(step)
        directory.mkdir()
        written = memory / f"written{step}"
        if name != "new":
            (directory / "a.md").write_bytes(b"old")

        def action(directory: Path = directory, written: Path = written) -> None:
            store = Store(directory)
            _ACTIONS[name](store, written)
            store.close()

        killed = _killed_at(step, action)
        if damage == "the journal is lost":
            (directory / ".vaultfs/journal").unlink(missing_ok=True)
        with opened(directory) as store:
            report = store.drafts.recover()
            assert not report.failures, (step, report)
            came = written.with_suffix(".came").exists()
            _check(store, name, damage, step, report, complete=written.exists(), came=came)
            assert not store.drafts.recover().anything, step
        if not killed:
            assert step > 15
            return
    raise AssertionError("it never got to its end")


def _check(
    store: Store, name: str, damage: str, step: int, report: RecoveryReport, *, complete: bool, came: bool
) -> None:
    documents, kept = store.documents(), store.kept_contents()
    everywhere = [*documents.values(), *kept]
    note = (step, documents, kept, report)
    at_name = documents.get("a.md")
    assert at_name in {
        "new": (None, b"new"),
        "append": (b"old", b"newcomer", b"newcomer+tail", b"old+tail"),
        "displacing": (b"old", b"newcomer", b"new"),
        "conflict": (b"old", b"newcomer") if came else (b"old", b"new"),
        # the last one: cut off while our version had the name for a moment; the newcomer is kept then
        "conflict_in_the_exchange": (b"old", b"newcomer", b"new"),
        "keep": (b"old", b"new"),
    }.get(name, (b"old", b"new")), note
    if complete:
        assert any(content in (b"new", b"newcomer+tail", b"old+tail") for content in everywhere), note
    if name in ("replacement", "edit") and at_name == b"new" and damage != "the journal is lost":
        assert not kept, ("the version that was replaced is known, and nobody writes it", *note)
    if came:
        assert any(b"newcomer" in content for content in everywhere), note
    tails = [content for content in everywhere if b"+tail" in content]
    assert all(content.count(b"+tail") == 1 for content in tails), note
    assert len(tails) <= 1, note
    assert not store.staged(), note
    assert [path.name for path in (store.directory / ".vaultfs/staging").iterdir()] in (
        [],
        [store.drafts.attempt],
    ), note
    assert not [found for found in documents if found.startswith(os.fsdecode(HIDDEN_PREFIX))], note
    for document in documents:
        assert MARK_NAME not in os.listxattr(store.directory / document) or damage != "none", note
    for kept_draft in report.kept:
        assert kept_draft.target == "a.md", note


# --- single cases


@pytest.fixture
def left(vault: Path) -> Iterator[Callable[[Callable[[Store], object]], None]]:
    """`left(action)`: what a process that did `action` and died leaves behind."""

    def leave(action: Callable[[Store], object]) -> None:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                action(Store(vault))
                status = 0
            except BaseException as error:
                print(repr(error), flush=True)
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0

    yield leave


def _recovered(vault: Path, **more: Any) -> tuple[RecoveryReport, dict[str, bytes], dict[bytes, str]]:
    with opened(vault) as store:
        report = store.drafts.recover(**more)
        return report, store.documents(), store.kept_contents()


def test_an_edit_cut_off_while_it_was_written_is_kept_with_where_it_belongs(vault: Path, left: Any) -> None:
    (vault / "a.md").write_bytes(b"old")

    def action(store: Store) -> None:
        draft = store.drafts.create(b"a.md", base=store.identity("a.md"), kind="edit", writer=WRITER)
        os.write(draft.fd, b"half a sent")

    left(action)
    report, documents, kept = _recovered(vault)
    assert documents == {"a.md": b"old"}
    assert list(kept) == [b"half a sent"]
    assert report.kept[0].target == "a.md" and report.kept[0].writer == WRITER
    assert report.summary() == "recovered: 1 draft kept (see `vaultfs drafts`)"


def test_what_fsync_made_durable_is_published(vault: Path, left: Any) -> None:
    (vault / "a.md").write_bytes(b"old")
    (vault / "a.md").chmod(0o640)

    def action(store: Store) -> None:
        draft = store.drafts.create(b"a.md", base=store.identity("a.md"), kind="edit", writer=WRITER)
        os.write(draft.fd, b"synced by its program")
        draft.mark("durable", durable=True)

    left(action)
    report, documents, _ = _recovered(vault)
    assert documents == {"a.md": b"synced by its program"}
    assert report.published == ["a.md"] and not report.kept
    assert (vault / "a.md").stat().st_mode & 0o777 == 0o640


def test_what_fsync_made_durable_is_published_after_a_power_loss_too(
    vault: Path, left: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (vault / "a.md").write_bytes(b"old")

    def action(store: Store) -> None:
        draft = store.drafts.create(b"a.md", base=store.identity("a.md"), kind="edit", writer=WRITER)
        os.write(draft.fd, b"synced by its program")
        draft.mark(DraftState.DURABLE, durable=True)

    left(action)
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    assert _recovered(vault)[1] == {"a.md": b"synced by its program"}


def test_what_nobody_synced_is_not_published_after_a_power_loss(
    vault: Path, left: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (vault / "a.md").write_bytes(b"old")

    def action(store: Store) -> None:
        base = store.identity("a.md")
        store.draft("a.md", b"relaxed", DraftKind.EDIT, base, durability="relaxed")
        draft = store.drafts.create(b"a.md", base=base, kind="append", writer=WRITER, append_from=3)
        os.write(draft.fd, b"old and a tail")

    left(action)
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    report, documents, kept = _recovered(vault)
    assert documents == {"a.md": b"old"}
    assert kept.keys() == {b"relaxed", b"old and a tail"}
    assert not report.published


def test_where_mark_and_journal_disagree_after_a_power_loss_nothing_is_published(
    vault: Path, left: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made durable, then written to again; of the second step only one of the two records reached the disk."""
    (vault / "a.md").write_bytes(b"old")

    def action(store: Store) -> None:
        draft = store.drafts.create(b"a.md", base=store.identity("a.md"), kind="edit", writer=WRITER)
        os.write(draft.fd, b"synced, ")
        draft.mark(DraftState.DURABLE, durable=True)
        journal = (vault / ".vaultfs/journal").read_bytes()
        draft.mark(DraftState.OPEN)
        os.write(draft.fd, b"and half of wh")
        (vault / ".vaultfs/journal").write_bytes(journal)

    left(action)
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    report, documents, kept = _recovered(vault)
    assert documents == {"a.md": b"old"} and kept.keys() == {b"synced, and half of wh"}
    assert not report.published


def test_attributes_that_the_program_set_on_its_draft_are_recovered_with_it(vault: Path, left: Any) -> None:
    (vault / "a.md").write_bytes(b"old")
    os.setxattr(vault / "a.md", "user.theirs", b"1")

    def action(store: Store) -> None:
        draft = store.draft("a.md", b"new", DraftKind.EDIT, store.identity("a.md"))
        os.setxattr(draft.fd, "user.own", b"2")

    left(action)
    assert _recovered(vault)[1] == {"a.md": b"new"}
    assert sorted(os.listxattr(vault / "a.md")) == ["user.own", "user.theirs"]


def test_what_was_only_appended_is_applied_once_to_what_is_there(vault: Path, left: Any) -> None:
    (vault / "log.txt").write_bytes(b"one\n")

    def action(store: Store) -> None:
        base = store.identity("log.txt")
        draft = store.drafts.create(b"log.txt", base=base, kind="append", writer=WRITER, append_from=4)
        os.write(draft.fd, b"one\nappended\n")
        put(store.directory / "log.txt", b"one\nfrom outside\n")

    left(action)
    assert _recovered(vault)[1] == {"log.txt": b"one\nfrom outside\nappended\n"}
    assert _recovered(vault)[1] == {"log.txt": b"one\nfrom outside\nappended\n"}


def test_a_begun_save_is_not_finished_over_a_newer_version(vault: Path, left: Any) -> None:
    (vault / "a.md").write_bytes(b"old")

    def action(store: Store) -> None:
        for kind in (DraftKind.EDIT, DraftKind.REPLACEMENT):
            store.draft("a.md", kind.encode(), kind, store.identity("a.md"))
        store.draft("b.md", b"new", DraftKind.NEW)
        put(store.directory / "a.md", b"newer")
        put(store.directory / "b.md", b"taken")

    left(action)
    report, documents, kept = _recovered(vault)
    assert documents == {"a.md": b"newer", "b.md": b"taken"}
    assert kept.keys() == {b"edit", b"replacement", b"new"}
    assert not report.published


def test_a_target_that_leads_elsewhere_by_now_is_not_followed(vault: Path, left: Any, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (vault / "sub").mkdir()
    left(lambda store: store.draft("sub/a.md", b"new", DraftKind.NEW))
    (vault / "sub").rmdir()
    (vault / "sub").symlink_to(outside)
    report, _, kept = _recovered(vault)
    assert kept.keys() == {b"new"} and not report.failures
    assert not list(outside.iterdir())


def test_non_empty_staging_without_any_record_is_kept(vault: Path) -> None:
    with opened(vault) as store:
        staging = vault / ".vaultfs" / store.state.name("staging").decode() / "someattempt"
        staging.mkdir()
        (staging / "unknown").write_bytes(b"whatever this was")
        (staging / "abcdefgh~sub%2Fa.md").write_bytes(b"named")
        (staging / "empty").write_bytes(b"")
        (staging / "abcdefgh.json").write_bytes(b"{")
        (vault / ".vaultfs/staging/stray").write_bytes(b"stray")
    report, _, kept = _recovered(vault)
    assert kept.keys() == {b"whatever this was", b"named"}
    assert sorted(draft.target for draft in report.kept) == ["", "sub/a.md"]
    assert not staging.exists()
    assert len(report.failures) == 1 and (vault / ".vaultfs/staging/stray").exists()


def test_a_mark_copied_along_with_the_file_is_void(vault: Path, left: Any) -> None:
    """`cp -a` copies xattrs: the copy of a staged file is no draft of ours, and above all not one to publish."""
    (vault / "a.md").write_bytes(b"old")
    left(lambda store: store.draft("a.md", b"new", DraftKind.EDIT, store.identity("a.md")))
    staged = next((vault / ".vaultfs/staging").rglob("*~*"))
    copy = staged.with_name("copy")
    subprocess.run(["cp", "-a", str(staged), str(copy)], check=True)
    staged.unlink()
    copy.rename(staged)
    (vault / ".vaultfs/journal").unlink()
    _, documents, kept = _recovered(vault)
    assert documents == {"a.md": b"old"} and kept == {b"new": "found without a record"}


def test_a_draft_equal_to_its_file_is_not_kept(vault: Path, left: Any) -> None:
    (vault / "a.md").write_bytes(b"same")
    left(lambda store: store.draft("a.md", b"same", DraftKind.EDIT, store.identity("a.md")))
    report, documents, kept = _recovered(vault)
    assert documents == {"a.md": b"same"} and not kept and report.deleted == 1
    assert not report.anything


def test_a_new_file_gets_mode_and_owner_of_its_writer(vault: Path, left: Any) -> None:
    writer = Writer(pid=9, program="p", uid=12, start_time=1, gid=34) if os.geteuid() == 0 else WRITER

    def action(store: Store) -> None:
        draft = store.drafts.create(b"a.md", base=None, kind="new", writer=writer, mode=0o640)
        os.write(draft.fd, b"x")
        sync_draft(draft)

    left(action)
    _recovered(vault)
    status = (vault / "a.md").stat()
    assert status.st_mode & 0o7777 == 0o640
    assert os.geteuid() != 0 or (status.st_uid, status.st_gid) == (12, 34)


def test_the_staging_of_the_living_is_left_alone_unless_the_fence_took_it(vault: Path) -> None:
    (vault / "a.md").write_bytes(b"old")
    with opened(vault) as living:
        draft = living.draft("a.md", b"being written", DraftKind.EDIT, living.identity("a.md"))
        with Drafts(living.root, living.state) as newcomer:
            report = newcomer.recover()
            assert report.alive == 1 and not report.anything
            assert living.staged()
            attempt = living.directory / ".vaultfs/staging" / living.drafts.attempt
            attempt.rename(attempt.with_name(attempt.name + "-seized-1234"))
            report = newcomer.recover()
            assert report.published == ["a.md"] and not report.alive
        assert living.documents() == {"a.md": b"being written"}
        draft.close()


def test_a_locked_file_is_kept_as_a_draft(vault: Path, left: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_LOCK_TIMEOUT", 0.05)
    (vault / "a.md").write_bytes(b"old")
    left(lambda store: store.draft("a.md", b"new", DraftKind.EDIT, store.identity("a.md")))
    with opened(vault) as store:
        theirs, ours = PathLocks(store.root, store.state), PathLocks(store.root, store.state)
        with theirs.acquire(b"a.md"):
            report = store.drafts.recover(ours)
        assert store.documents() == {"a.md": b"old"}
        assert report.kept[0].reason == "could not be published by recovery: its lock was held"
        ours.close()
        theirs.close()


def test_kept_drafts_can_be_taken_back_and_published(vault: Path, left: Any) -> None:
    (vault / "a.md").write_bytes(b"old")

    def action(store: Store) -> None:
        draft = store.drafts.create(b"a.md", base=store.identity("a.md"), kind="edit", writer=WRITER)
        os.write(draft.fd, b"half")

    left(action)
    with opened(vault) as store:
        kept = store.drafts.recover().kept[0]
        draft = store.drafts.reopen(kept.id)
        assert draft.record.base is not None and not store.drafts.kept()
        publish_edit(
            store.root, store.drafts, draft, b"a.md", Metadata(), base=draft.record.base, late=True, conflict="fail"
        )
        close(draft)
        assert store.documents() == {"a.md": b"half"}
        assert not os.listxattr(vault / "a.md")


# --- displaced versions


def test_a_displaced_version_that_somebody_still_writes_is_kept_until_proven(vault: Path, left: Any) -> None:
    (vault / "a.md").write_bytes(b"old")
    writer = open(vault / "a.md", "r+b")

    def action(store: Store) -> None:
        known = store.identity("a.md")
        draft = store.draft("a.md", b"new", DraftKind.REPLACEMENT, known)
        os.unlink = lambda *_, **__: os._exit(0)  # type: ignore[assignment]
        fcntl.fcntl = lambda *_: os._exit(0)  # type: ignore[assignment]
        publish_replacement(store.root, store.drafts, draft, b"a.md", Metadata(), known=known)

    left(action)
    _, documents, kept = _recovered(vault)
    assert documents == {"a.md": b"new"} and kept.keys() == {b"old"}
    writer.close()


def test_displaced_versions_left_unproven_are_looked_at_again_by_the_next_run(vault: Path) -> None:
    with opened(vault) as store:
        known = store.save_new("a.md", b"old").identity
        with open(vault / "a.md", "r+b"):
            store.replace("a.md", b"new", known)
        assert store.kept_contents().keys() == {b"old"}
    report, _, kept = _recovered(vault)
    assert not kept and report.deleted == 1


# --- claims


def _claimed(store: Store, writer: Writer) -> None:
    fd = store.root.open_file(b"claimed", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    store.drafts.claim(b"claimed", FileIdentity.from_stat(os.fstat(fd)), writer)


@pytest.mark.parametrize(
    "changed", ["nothing", "written to", "removed", "replaced", "touched", "open for writing", "unclaimed"]
)
def test_a_claim_whose_opener_is_gone_goes_if_nothing_about_it_changed(vault: Path, left: Any, changed: str) -> None:
    def action(store: Store) -> None:
        _claimed(store, Writer(pid=os.getpid(), start_time=Processes().start_time(os.getpid()) or 0))
        if changed == "unclaimed":
            store.drafts.unclaim(b"claimed")

    left(action)
    path = vault / "claimed"
    other = None
    if changed == "written to":
        path.write_bytes(b"x")
    elif changed == "removed":
        path.unlink()
    elif changed == "replaced":
        put(path, b"")
    elif changed == "touched":
        os.utime(path, ns=(5, 5))
    elif changed == "open for writing":
        other = open(path, "r+b")
    report, documents, _ = _recovered(vault)
    assert ("claimed" in documents) == (changed not in ("nothing", "removed"))
    assert report.claims == (["claimed"] if changed == "nothing" else [])
    with opened(vault) as store:
        assert bool(store.drafts.journal.read().claims) == (other is not None), "looked at again if it may yet go"
    if other is not None:
        other.close()
        assert _recovered(vault)[0].claims == ["claimed"]
    assert not _recovered(vault)[0].claims


def test_a_claim_whose_opener_lives_stays(vault: Path, left: Any) -> None:
    writer = Writer(pid=os.getpid(), start_time=Processes().start_time(os.getpid()) or 0)
    left(lambda store: _claimed(store, writer))
    assert "claimed" in _recovered(vault)[1]
    with opened(vault) as store:
        assert list(store.drafts.journal.read().claims) == ["claimed"], "and is not forgotten"


def test_a_claim_of_a_number_used_again_is_not_taken_for_the_opener(vault: Path, left: Any) -> None:
    writer = Writer(pid=os.getpid(), start_time=(Processes().start_time(os.getpid()) or 0) + 1)
    left(lambda store: _claimed(store, writer))
    assert "claimed" not in _recovered(vault)[1]


# --- residue, and drafts beside their targets


def test_locks_that_were_being_made_are_cleared(vault: Path, left: Any) -> None:
    def action(store: Store) -> None:
        original = kernel.renameat2

        def die(*arguments: Any) -> None:
            if arguments[-1] == kernel.RENAME_NOREPLACE:
                os._exit(0)
            original(*arguments)

        kernel.renameat2 = die  # type: ignore[assignment]
        PathLocks(store.root, store.state).acquire(b"a.md")

    left(action)
    assert list((vault / ".vaultfs/pending").iterdir())
    with opened(vault) as store:
        locks = PathLocks(store.root, store.state)
        report = store.drafts.recover(locks)
        locks.close()
    assert report.locks == 1 and not list((vault / ".vaultfs/pending").iterdir())


def test_one_file_in_trouble_does_not_hold_up_the_others(
    vault: Path, left: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def action(store: Store) -> None:
        for name in "abc":
            store.draft(f"{name}.md", name.encode(), DraftKind.NEW)

    left(action)
    original = Drafts.adopt

    def adopt(self: Drafts, name: bytes, fd: int, record: Any) -> Any:
        if record.target == "b.md":
            raise OSError(errno.EIO, "bad sector")
        return original(self, name, fd, record)

    monkeypatch.setattr(Drafts, "adopt", adopt)
    report, documents, _ = _recovered(vault)
    assert documents == {"a.md": b"a", "c.md": b"c"}
    assert len(report.failures) == 1 and "bad sector" in report.failures[0] and "1 file could" in report.summary()
    monkeypatch.undo()
    report, documents, _ = _recovered(vault)
    assert documents == {"a.md": b"a", "b.md": b"b", "c.md": b"c"}, "and it is still there the next time"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_drafts_staged_beside_their_targets_are_found(tmp_path: Path, vault: Path, mount: Mounter, left: Any) -> None:
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(320 << 20)
    if subprocess.run(["mkfs.xfs", "-q", image], check=False).returncode:
        pytest.skip("needs xfs")
    mount("-o", "loop", image, vault)
    (vault / "project").mkdir()
    subprocess.run(["chattr", "-p", "77", "+P", str(vault / "project")], check=True)

    def action(store: Store) -> None:
        known = store.save_new("project/a.md", b"old").identity
        store.draft("project/a.md", b"finished by recovery", DraftKind.EDIT, known)
        draft = store.drafts.create(b"project/b.md", base=None, kind="new", writer=WRITER)
        os.write(draft.fd, b"half")
        assert draft.hidden is not None

    left(action)
    report, documents, kept = _recovered(vault)
    assert documents == {"project/a.md": b"finished by recovery"}
    assert list(kept) == [b"half"]
    assert [draft.target for draft in report.kept] == ["project/b.md"]


def test_a_state_directory_whose_setting_aside_was_cut_off_is_put_away(vault: Path) -> None:
    with opened(vault) as store:
        (vault / ".vaultfs-staging-20260101-000000-abcd").mkdir()
        (vault / ".vaultfs-staging-20260101-000000-abcd/id").write_text("?")
        (vault / ".vaultfs-staging-zzzzzzzz").write_bytes(b"a draft that lost its journal")
        report = store.drafts.recover()
        assert report.set_aside == ".vaultfs/quarantine/copied-20260101-000000-abcd"
        assert not store.documents() and store.kept_contents().keys() == {b"a draft that lost its journal"}


def test_the_journal_is_short_after_recovery(vault: Path) -> None:
    with opened(vault) as store:
        for number in range(50):
            store.replace("a.md", b"%d" % number)
        store.drafts.journal.append(JournalLine(unclaim="x"))
        before = (vault / ".vaultfs/journal").stat().st_size
        store.drafts.recover()
        assert (vault / ".vaultfs/journal").stat().st_size < before / 20
