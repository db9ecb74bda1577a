"""Others who write the same name without taking the lock, at the worst moments.

The first half places somebody else's move exactly between two system calls of a publish; the second lets processes
loose. In both the question is the same: is every version somewhere, and does whoever came last have the name?
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.core.publishing import Store, close, intervening, opened, put
from vaultfs import kernel
from vaultfs.errors import ConflictError, Outcome, PublishError
from vaultfs.identity import FileIdentity
from vaultfs.journal import MARK_NAME, DraftKind
from vaultfs.publish import Metadata, publish_append, publish_edit, publish_replacement

CONFLICT = re.compile(r"\.sync-conflict-")


@pytest.fixture
def store(vault: Path) -> Iterator[Store]:
    with opened(vault) as found:
        yield found


def _edit_with(
    store: Store, actions: dict[int, Callable[[], object]], content: bytes = b"ours"
) -> BaseException | None:
    """An edit of a.md, with somebody else's `actions` before the nth rename."""
    base = store.save_new("a.md", b"base").identity
    draft = store.draft("a.md", content, DraftKind.EDIT, base)
    try:
        with intervening(kernel, "renameat2", actions):
            publish_edit(store.root, store.drafts, draft, b"a.md", Metadata(), base=base)
    except (ConflictError, PublishError) as error:
        return error
    finally:
        assert os.pread(draft.fd, 99, 0) == content
        close(draft)
    return None


def _puts(store: Store, content: bytes) -> Callable[[], None]:
    return lambda: put(store.directory / "a.md", content)


def _copies(store: Store) -> list[bytes]:
    return [content for name, content in store.documents().items() if CONFLICT.search(name)]


def test_a_newcomer_just_before_the_exchange_gets_the_name_back(store: Store) -> None:
    error = _edit_with(store, {1: _puts(store, b"newcomer")})
    assert isinstance(error, ConflictError)
    assert store.documents()["a.md"] == b"newcomer"
    assert _copies(store) == [b"ours"]
    assert not store.drafts.kept() and not store.staged()


def test_a_write_in_place_just_before_the_exchange_is_a_newcomer_too(store: Store) -> None:
    error = _edit_with(store, {1: lambda: (store.directory / "a.md").write_bytes(b"BASE, longer")})
    assert isinstance(error, ConflictError)
    assert store.documents()["a.md"] == b"BASE, longer"
    assert _copies(store) == [b"ours"]


def test_an_equal_newcomer_just_before_the_exchange_is_none(store: Store) -> None:
    assert _edit_with(store, {1: _puts(store, b"ours")}) is None
    assert store.documents() == {"a.md": b"ours"}
    assert not store.drafts.kept() and not store.staged()


def test_who_writes_while_our_version_has_the_name_keeps_it(store: Store) -> None:
    error = _edit_with(store, {1: _puts(store, b"first"), 2: _puts(store, b"second")})
    assert isinstance(error, ConflictError)
    assert store.documents()["a.md"] == b"second"
    assert _copies(store) == [b"ours"], "destroyed at the name, made again from its descriptor"
    assert list(store.kept_contents()) == [b"first"]
    assert not store.staged()


@pytest.mark.parametrize("writers", [2, 3, 4, 5])
def test_the_last_of_many_writers_has_the_name(store: Store, writers: int) -> None:
    error = _edit_with(store, {n: _puts(store, b"writer %d" % n) for n in range(1, writers + 1)})
    assert isinstance(error, ConflictError)
    assert store.documents()["a.md"] == b"writer %d" % writers
    assert _copies(store) == [b"ours"]
    assert b"writer %d" % (writers - 1) in store.kept_contents()
    assert not store.staged()


def test_writers_who_never_stop_make_it_uncertain_and_lose_nothing(store: Store) -> None:
    written: list[bytes] = []

    def write() -> None:
        written.append(b"writer %d" % len(written))
        put(store.directory / "a.md", written[-1])

    base = store.save_new("a.md", b"base").identity
    draft = store.draft("a.md", b"ours", DraftKind.EDIT, base)
    original = kernel.renameat2

    def exchange(*arguments: int | bytes) -> None:
        if arguments[-1] == kernel.RENAME_EXCHANGE:
            write()
        original(*arguments)  # type: ignore[arg-type]

    kernel.renameat2 = exchange  # type: ignore[assignment]
    try:
        with pytest.raises(PublishError) as caught:
            publish_edit(store.root, store.drafts, draft, b"a.md", Metadata(), base=base)
    finally:
        kernel.renameat2 = original
    close(draft)
    assert caught.value.outcome is Outcome.PUBLISHED_UNCERTAIN and not caught.value.cleanup
    assert len(written) == 8
    # each writer overwrote what we had put back; the last one's version was in our hands when we gave up
    assert {store.documents()["a.md"], *store.kept_contents()} >= {b"ours", written[-1], written[-2]}
    assert not store.staged()


def test_a_name_removed_before_the_exchange_is_a_conflict_copy(store: Store) -> None:
    error = _edit_with(store, {1: (store.directory / "a.md").unlink})
    assert isinstance(error, ConflictError)
    assert _copies(store) == [b"ours"] and len(store.documents()) == 1


def test_a_name_removed_while_our_version_had_it_goes_to_the_newcomer(store: Store) -> None:
    error = _edit_with(store, {1: _puts(store, b"newcomer"), 2: (store.directory / "a.md").unlink})
    assert isinstance(error, ConflictError)
    assert store.documents()["a.md"] == b"newcomer"
    assert _copies(store) == [b"ours"]


def test_a_staged_file_destroyed_by_somebody_is_made_again(store: Store) -> None:
    def destroy() -> None:
        for path in store.staged():
            os.unlink(path)

    assert _edit_with(store, {1: destroy}) is None
    assert store.documents() == {"a.md": b"ours"}
    assert not store.staged()


def test_what_was_moved_aside_by_its_editor_is_not_taken_for_the_base(store: Store) -> None:
    """An editor that renames the file to a backup and writes a new one, both before our exchange."""

    def backup() -> None:
        (store.directory / "a.md").rename(store.directory / "a.md~")
        (store.directory / "a.md").write_bytes(b"editor")

    error = _edit_with(store, {1: backup})
    assert isinstance(error, ConflictError)
    documents = store.documents()
    assert (documents["a.md"], documents["a.md~"]) == (b"editor", b"base")
    assert _copies(store) == [b"ours"]


def test_a_replacement_survives_every_newcomer_and_keeps_it(store: Store) -> None:
    known = store.save_new("a.md", b"base").identity
    draft = store.draft("a.md", b"ours", DraftKind.REPLACEMENT, known)
    with intervening(kernel, "renameat2", {1: _puts(store, b"newcomer")}):
        publish_replacement(store.root, store.drafts, draft, b"a.md", Metadata(), known=known)
    close(draft)
    assert store.documents() == {"a.md": b"ours"}
    assert list(store.kept_contents()) == [b"newcomer"]


def test_a_replacement_of_a_name_that_comes_and_goes(store: Store) -> None:
    path = store.directory / "a.md"
    for existed, actions in (
        (False, {1: _puts(store, b"came")}),
        (True, {1: path.unlink}),
        (True, {1: path.unlink, 2: _puts(store, b"came")}),
    ):
        path.unlink(missing_ok=True)
        known = store.save_new("a.md", b"base").identity if existed else None
        draft = store.draft("a.md", b"ours", DraftKind.REPLACEMENT, known)
        with intervening(kernel, "renameat2", actions):
            publish_replacement(store.root, store.drafts, draft, b"a.md", Metadata(), known=known)
        close(draft)
        assert store.documents() == {"a.md": b"ours"}
        came = len(actions) == 2 or not existed
        assert list(store.kept_contents()) == [b"came"] * came
        for kept in store.drafts.kept():
            store.drafts.discard(kept.id)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_tail_follows_its_file_through_newcomers(store: Store, times: int) -> None:
    base = store.save_new("a.md", b"base\n").identity
    draft = store.draft("a.md", b"base\ntail\n", DraftKind.APPEND, base, append_from=5)
    # one exchange and, when it went wrong, one back: the odd ones are the attempts
    actions = {2 * n - 1: _puts(store, b"version %d\n" % n) for n in range(1, times + 1)}
    with intervening(kernel, "renameat2", actions):
        publish_append(store.root, store.drafts, draft, b"a.md", Metadata(), base=base, append_from=5)
    close(draft)
    assert store.documents() == {"a.md": b"version %d\ntail\n" % times}
    assert not store.drafts.kept() and not store.staged()


def test_a_published_version_replaced_at_once_is_reported_as_superseded(store: Store) -> None:
    draft = store.draft("a.md", b"ours", DraftKind.NEW)
    original = os.open

    def open_after(path: bytes, flags: int, *arguments: int, dir_fd: int | None = None) -> int:
        if path == b"a.md" and (store.directory / "a.md").exists():
            os.open = original  # type: ignore[assignment]
            put(store.directory / "a.md", b"newer")
        return original(path, flags, *arguments, dir_fd=dir_fd)

    from vaultfs.publish import publish_new

    os.open = open_after  # type: ignore[assignment]
    try:
        published = publish_new(store.root, store.drafts, draft, b"a.md", Metadata())
    finally:
        os.open = original
    assert published.superseded
    assert published.identity == FileIdentity.from_stat(os.fstat(draft.fd))
    close(draft)
    assert store.documents() == {"a.md": b"newer"}


# --- processes let loose


def _sealed(text: bytes) -> bytes:
    """Content that says of itself whether it is whole; of a length that varies."""
    body = text + b"." * (hash(text) % 5000)
    return hashlib.sha256(body).hexdigest().encode() + body


def _is_whole(content: bytes) -> bool:
    return hashlib.sha256(content[64:]).hexdigest().encode() == content[:64]


def _outsider(directory: Path, stop: Path, number: int) -> None:
    """Puts versions at the name by exchange, so that it knows what it took off; all of that goes to a record."""
    record = directory.parent / f"record{number}"
    record.mkdir()
    fd = os.open(directory, os.O_RDONLY)
    count = 0
    while not stop.exists():
        name = b"outside%d" % number
        (directory / os.fsdecode(name)).write_bytes(_sealed(b"outsider %d version %d" % (number, count)))
        kernel.renameat2(fd, name, fd, b"a.md", kernel.RENAME_EXCHANGE)
        (directory / os.fsdecode(name)).rename(record / str(count))
        count += 1
        time.sleep(random.random() * 0.002)


def _reader(directory: Path, stop: Path) -> None:
    """The name always exists and always holds one whole version."""
    count = 0
    while not stop.exists():
        content = (directory / "a.md").read_bytes()
        assert _is_whole(content), content[:200]
        count += 1
    assert count > 100


def _forked(target: Callable[..., None], *arguments: object) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            target(*arguments)
            status = 0
        except BaseException as error:
            os.write(2, f"{target.__name__}: {error!r}\n".encode())
        finally:
            os._exit(status)
    return child


def test_in_a_storm_no_version_is_lost_torn_or_missing(store: Store) -> None:
    """Two outsiders, two readers and our edits and replacements, all of one file, for a while."""
    stop = store.directory.parent / "stop"
    made = {_sealed(b"first")}
    store.save_new("a.md", next(iter(made)))
    children = [_forked(_outsider, store.directory, stop, number) for number in range(2)]
    children += [_forked(_reader, store.directory, stop) for _ in range(2)]
    consumed: set[bytes] = set()
    outcomes = {"published": 0, "conflict": 0, "uncertain": 0}
    deadline = time.monotonic() + 3
    turn = 0
    while time.monotonic() < deadline:
        turn += 1
        fd, status = store.root.open_with_stat(b"a.md", os.O_RDONLY)
        base_content = os.pread(fd, 1 << 20, 0)
        os.close(fd)
        base = FileIdentity.from_stat(status)
        content = _sealed(b"ours %d" % turn)
        if turn % 3:
            time.sleep(random.random() * 0.001)
        made.add(content)
        try:
            if turn % 4:
                store.edit("a.md", content, base)
            else:
                store.replace("a.md", content, base)
            outcomes["published"] += 1
            # its base may go; if another version was displaced, that one is kept and will be found
            consumed.add(base_content)
        except ConflictError:
            outcomes["conflict"] += 1
        except PublishError as error:
            assert error.outcome is Outcome.PUBLISHED_UNCERTAIN
            outcomes["uncertain"] += 1
    stop.touch()
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    found = set(store.documents().values()) | set(store.kept_contents())
    for record in store.directory.parent.glob("record*"):
        counts = sorted(int(path.name) for path in record.iterdir())
        number = int(record.name.removeprefix("record"))
        made |= {_sealed(b"outsider %d version %d" % (number, count)) for count in counts}
        found |= {path.read_bytes() for path in record.iterdir()}
    lost = made - found - consumed
    assert not lost, [content[64:100] for content in lost]
    assert not found - made, "something that nobody wrote"
    assert outcomes["published"] > 20 and outcomes["conflict"] > 0, outcomes
    assert not store.staged()
    for path in store.directory.glob("a*.md"):
        assert MARK_NAME not in os.listxattr(path)
