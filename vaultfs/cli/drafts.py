"""``vaultfs drafts``: what could not be published and waits for somebody to decide, and how to get it out.

A mounted vault is asked through its daemon: mounted over itself, its state directory cannot be reached in any other
way. A vault that is not mounted is read from its state directory. For ``save-as`` the daemon hands over a descriptor
of the content and *this* process writes the new file, with the user's own rights, wherever the user likes, the mount
included (the daemon could not: it would wait for itself).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from vaultfs.cli.output import clock, emit_json, say, size, table, tell
from vaultfs.control import client, protocol, registry
from vaultfs.control.protocol import KeptDraftInfo
from vaultfs.control.registry import Entry
from vaultfs.errors import (
    BadRequestError,
    DraftNotFoundError,
    ExitCode,
    NoAnswerError,
    NotMountedError,
    VaultMissingError,
    printable,
)
from vaultfs.patience import real_path

if TYPE_CHECKING:
    from vaultfs.drafts import Drafts

__all__ = ["configure", "run"]

_STATE = ".vaultfs"

_EPILOG = """\
`vaultfs drafts [PATH]` is short for `vaultfs drafts list [PATH]`.

examples:
  vaultfs drafts                          of all mounted vaults
  vaultfs drafts ~/Notes --json           of this vault, mounted or not
  vaultfs drafts save-as 3xk rescued.md   the beginning of an id is enough
  vaultfs drafts save-as 3xk -            to standard output, to compare
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list kept drafts: file, when, who, why")
    listing.add_argument("path", metavar="PATH", nargs="?", help="a vault, a mountpoint, or anything in one")
    listing.add_argument("--json", action="store_true", help="everything as JSON (docs/command-line.md)")
    saving = actions.add_parser("save-as", help="copy the content of a draft to a new file; the draft stays listed")
    saving.add_argument("id", metavar="ID", help="as listed, or its beginning")
    saving.add_argument("file", metavar="FILE", help="a file that does not exist, a directory, or - for the terminal")
    saving.add_argument("--vault", metavar="PATH", help="look in this vault only")


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "save-as":
        return _save_as(arguments)
    found = [(source.vault, draft) for source in _sources(arguments.path) for draft in source.drafts()]
    if arguments.json:
        emit_json({"drafts": [{"vault": vault, **protocol.plain(draft)} for vault, draft in found]})
    elif not found:
        say("No drafts are kept.")
    else:
        _print(found)
    return ExitCode.OK


def _print(found: list[tuple[str, KeptDraftInfo]]) -> None:
    for vault in dict.fromkeys(vault for vault, _ in found):
        say(f"{printable(vault)}:")
        rows = [
            (draft.id, draft.path or "?", size(draft.size), clock(draft.when), _who(draft), draft.reason)
            for of, draft in found
            if of == vault
        ]
        say(table(("ID", "FILE", "SIZE", "WHEN", "WHO", "WHY"), rows, indent="  "))


def _who(draft: KeptDraftInfo) -> str:
    return f"{draft.program or '?'} (pid {draft.pid}, user {draft.uid})" if draft.pid else draft.program or "?"


# --- where drafts come from


class _Mounted(NamedTuple):
    """A running daemon."""

    entry: Entry

    @property
    def vault(self) -> str:
        return self.entry.vault

    def drafts(self) -> list[KeptDraftInfo]:
        return client.drafts(self.entry)

    def open(self, draft_id: str) -> int:
        return client.draft_content(self.entry, draft_id)[1]


class _AtRest(NamedTuple):
    """A vault that nobody serves: read from its state directory, which is not changed by that."""

    vault: str

    def drafts(self) -> list[KeptDraftInfo]:
        with self._store() as store:
            return [
                KeptDraftInfo(
                    id=draft.id,
                    path=draft.target,
                    size=draft.size,
                    when=draft.when,
                    program=draft.writer.program,
                    pid=draft.writer.pid,
                    uid=draft.writer.uid,
                    reason=draft.reason,
                    kind=draft.kind,
                )
                for draft in store.kept()
            ]

    def open(self, draft_id: str) -> int:
        with self._store() as store:
            return store.open_kept(draft_id)

    @contextlib.contextmanager
    def _store(self) -> Iterator[Drafts]:
        from vaultfs.drafts import Drafts
        from vaultfs.root import VaultRoot
        from vaultfs.state import StateDirectory

        with VaultRoot.open(self.vault) as root:
            state = StateDirectory.open(root, create=False)
            try:
                with Drafts(root, state) as store:
                    yield store
            finally:
                state.close()


def _sources(path: str | None) -> list[_Mounted | _AtRest]:
    """Where to look: the vault that `path` belongs to, or all mounted ones (and the one we stand in)."""
    known = registry.entries()
    if path is None:
        return [_Mounted(entry) for entry in known]
    real = real_path(path)
    entry = registry.find(real, known)
    if entry is not None:
        return [_Mounted(entry)]
    if not os.path.lexists(real):
        raise VaultMissingError(path=real)
    vault = real
    while not os.path.isdir(os.path.join(vault, _STATE)):
        if vault == "/":
            raise NotMountedError(
                "this is not in a vault: it is not mounted, and no mount of vaultfs left anything here", path=real
            )
        vault = os.path.dirname(vault)
    return [_AtRest(vault)]


# --- save-as


def _save_as(arguments: argparse.Namespace) -> int:
    source, draft = _choose(arguments.id, arguments.vault)
    content = source.open(draft.id)
    with open(content, "rb") as reading:
        if arguments.file == "-":
            import sys

            shutil.copyfileobj(reading, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return ExitCode.OK
        target = arguments.file
        if os.path.isdir(target):
            target = os.path.join(target, os.path.basename(draft.path) or draft.id)
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise BadRequestError(
                "this file exists already, and is not replaced", path=target, remedy="Choose another name."
            ) from None
        try:
            with open(descriptor, "wb") as writing:  # closing it may be what fails: a vault publishes there
                shutil.copyfileobj(reading, writing, 1 << 20)
                writing.flush()
                os.fsync(descriptor)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):  # made by us a moment ago, and incomplete
                os.unlink(target)
            raise
    tell(f"saved as {printable(target)}; the draft is still listed")
    return ExitCode.OK


def _choose(wanted: str, path: str | None) -> tuple[_Mounted | _AtRest, KeptDraftInfo]:
    """The draft whose id is `wanted` or begins so, and where it is. Raises DraftNotFoundError, also for several."""
    sources = _sources(path)
    if path is None:
        with contextlib.suppress(NotMountedError):  # the working directory is in no vault: it was only a guess
            here = _sources(os.getcwd())
            sources += [source for source in here if source not in sources]
    found: list[tuple[_Mounted | _AtRest, KeptDraftInfo]] = []
    silent: NoAnswerError | None = None
    for source in sources:
        try:
            found += [(source, draft) for draft in source.drafts() if draft.id.startswith(wanted)]
        except NoAnswerError as error:
            silent = error  # one mount that hangs must not keep the drafts of the others from their owner
    exact = [(source, draft) for source, draft in found if draft.id == wanted]
    found = exact or (found if wanted else [])
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(f"{draft.id} ({printable(draft.path)})" for _, draft in found[:5])
        raise DraftNotFoundError(f"several drafts begin with {printable(wanted)}: {listed}", remedy="Write more of it.")
    if silent is not None:
        raise silent
    raise DraftNotFoundError(f"there is no draft {printable(wanted) or 'without an id'}")
