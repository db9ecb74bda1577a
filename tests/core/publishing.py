"""What the tests of state, drafts, publishing and recovery share: a vault with its machinery, and words for saves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vaultfs.drafts import DraftFile, Drafts, Writer
from vaultfs.identity import FileIdentity
from vaultfs.journal import DraftKind
from vaultfs.publish import (
    Durability,
    Metadata,
    Published,
    publish_append,
    publish_edit,
    publish_new,
    publish_replacement,
    sync_draft,
)
from vaultfs.root import VaultRoot
from vaultfs.state import StateDirectory

WRITER = Writer(pid=4711, program="a test", uid=os.geteuid(), start_time=1)


class Store:
    """A vault directory with its root, state directory and drafts; `save*` do what the mount does for one save."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = VaultRoot.open(directory)
        self.state = StateDirectory.open(self.root)
        self.drafts = Drafts(self.root, self.state)

    def close(self) -> None:
        self.drafts.close()
        self.state.close()
        self.root.close()

    def identity(self, path: str) -> FileIdentity:
        return FileIdentity.from_stat(self.root.stat(path.encode()))

    def draft(
        self,
        path: str,
        content: bytes,
        kind: str,
        base: FileIdentity | None = None,
        *,
        durability: str = "ordered",
        **more: Any,
    ) -> DraftFile:
        draft = self.drafts.create(path.encode(), base=base, kind=kind, writer=WRITER, **more)
        os.write(draft.fd, content)
        sync_draft(draft, durability)
        return draft

    def save_new(self, path: str, content: bytes, meta: Metadata | None = None, **more: Any) -> Published:
        draft = self.draft(path, content, DraftKind.NEW)
        try:
            return publish_new(self.root, self.drafts, draft, path.encode(), meta or Metadata(mode=0o644), **more)
        finally:
            close(draft)

    def replace(self, path: str, content: bytes, known: FileIdentity | None = None, **more: Any) -> Published:
        draft = self.draft(path, content, DraftKind.REPLACEMENT, known)
        try:
            return publish_replacement(
                self.root, self.drafts, draft, path.encode(), more.pop("meta", Metadata()), known=known, **more
            )
        finally:
            close(draft)

    def edit(self, path: str, content: bytes, base: FileIdentity, **more: Any) -> Published:
        draft = self.draft(path, content, DraftKind.EDIT, base)
        try:
            return publish_edit(
                self.root, self.drafts, draft, path.encode(), more.pop("meta", Metadata()), base=base, **more
            )
        finally:
            close(draft)

    def append(self, path: str, whole: bytes, base: FileIdentity, **more: Any) -> Published:
        draft = self.draft(path, whole, DraftKind.APPEND, base, append_from=base.size)
        try:
            return publish_append(
                self.root,
                self.drafts,
                draft,
                path.encode(),
                Metadata(),
                base=base,
                append_from=base.size,
                **more,
            )
        finally:
            close(draft)

    def kept_contents(self) -> dict[bytes, str]:
        """content → reason of all kept drafts."""
        found = {}
        for kept in self.drafts.kept():
            fd = self.drafts.open_kept(kept.id)
            with open(fd, "rb") as file:
                found[file.read()] = kept.reason
        return found

    def documents(self) -> dict[str, bytes]:
        """name → content of all files of the vault, the machinery's hidden ones included."""
        return {
            str(path.relative_to(self.directory)): path.read_bytes()
            for path in sorted(self.directory.rglob("*"))
            if path.is_file() and ".vaultfs/" not in str(path.relative_to(self.directory)) + "/"
        }

    def staged(self) -> list[str]:
        """What is left in staging."""
        return [str(path) for path in (self.directory / ".vaultfs/staging").rglob("*") if path.is_file()]


def close(draft: DraftFile) -> None:
    """End a draft whatever became of it: what is not finished is deleted."""
    draft.discard()


@contextmanager
def opened(directory: Path) -> Iterator[Store]:
    """A store, closed at the end; every descriptor that was opened meanwhile must be closed again."""
    before = set(os.listdir("/proc/self/fd"))
    store = Store(directory)
    try:
        yield store
    finally:
        store.close()
    left = set(os.listdir("/proc/self/fd")) - before
    assert not left, f"descriptors left open: {left}"


@contextmanager
def intervening(module: Any, name: str, actions: dict[int, Callable[[], object]]) -> Iterator[list[int]]:
    """While this lasts, before the nth call (from 1) of `module.name` the action n is done: somebody else's move.

    Gives a list whose length is the number of calls so far.
    """
    original = getattr(module, name)
    calls: list[int] = []

    def replaced(*arguments: Any, **keywords: Any) -> Any:
        calls.append(len(calls) + 1)
        action = actions.get(len(calls))
        if action is not None:
            action()
        return original(*arguments, **keywords)

    with ExitStack() as stack:
        setattr(module, name, replaced)
        stack.callback(setattr, module, name, original)
        yield calls


def put(path: Path, content: bytes) -> None:
    """What a careful program outside does: write beside it and rename over it."""
    beside = path.with_name(path.name + ".outside")
    beside.write_bytes(content)
    beside.rename(path)


__all__ = ["WRITER", "Durability", "Store", "close", "intervening", "opened", "put"]
