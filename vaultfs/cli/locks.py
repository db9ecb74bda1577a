"""``vaultfs locks``: which path locks stand in a vault, who holds them, and clearing away what nobody holds.

Where the answer comes from
---------------------------

* a mounted vault: its daemon is asked. It knows its own locks, has watched the others for as long as it runs, and is
  the only way to a vault that is mounted over itself;
* a mounted vault whose daemon does not answer, unless the mount covers it: this process looks itself;
* a vault that nobody serves: this process looks itself. Also a directory that vaultfs has never seen, since other tools
  use the same locks.

What is removed
---------------

``--reap`` removes what is *proven* to be nobody's (verdicts dead and residue) and nothing else. ``--reap PATH --force``
is for a person who knows better: it shows the lock, says what may be lost, and asks. What was shown is what is
removed: if another lock has taken its place while the question stood, that one is left alone. Things that are not of
the lock protocol are never removed, and neither is a lock that the daemon itself holds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import TYPE_CHECKING

from vaultfs.cli.output import Style, age, clock, emit_json, say, table, tell
from vaultfs.control import client, protocol, registry
from vaultfs.control.protocol import LockInfo, LocksInfo
from vaultfs.control.registry import Entry
from vaultfs.errors import (
    BadRequestError,
    ExitCode,
    ForeignLockError,
    LockBusyError,
    NoAnswerError,
    VaultError,
    VaultMissingError,
    printable,
    words_of,
)
from vaultfs.patience import real_path

if TYPE_CHECKING:
    from vaultfs.locks import Survey

__all__ = ["configure", "run"]

_REAPED = ("dead", "residue")
_LATER = "Nobody holds it any more, or somebody else has just taken it: run `vaultfs locks` again."

_EPILOG = """\
verdicts:
  ours      held by the daemon of this mount, for a save that is going in at this moment
  alive     its owner lives
  dead      its owner is proven to be gone; whoever wants the lock next removes it
  residue   nobody's, and old: the same
  unknown   it cannot be told whether its owner lives; never removed unless forced
  foreign   no lock by its content; never touched

examples:
  vaultfs locks                              of all mounted vaults
  vaultfs locks ~/Notes                      of this vault, mounted or not
  vaultfs locks ~/Notes/daily --json         below this directory
  vaultfs locks --reap ~/Notes               remove what is dead or residue
  vaultfs locks --reap ~/Notes/a.md --force  remove this lock, whatever it is; asks first
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("path", metavar="PATH", nargs="?", help="a vault, a mountpoint, or a file or directory in one")
    parser.add_argument("--json", action="store_true", help="everything as JSON (docs/command-line.md)")
    parser.add_argument("--reap", action="store_true", help="remove the locks that are dead or residue")
    parser.add_argument("--force", action="store_true", help="with --reap PATH: remove that one lock, after asking")


def run(arguments: argparse.Namespace) -> int:
    if arguments.force and not (arguments.reap and arguments.path):
        raise BadRequestError("--force removes one lock, and must be told which", remedy="Use --reap PATH --force.")
    if arguments.force and arguments.json:
        raise BadRequestError("--force asks a question, and does not go with --json")
    with contextlib.ExitStack() as stack:
        places = _places(arguments.path, stack)
        found = [(place, place.locks()) for place in places]
        for place, answer in found:
            for directory in answer.closed:
                tell(f"{printable(place.name(directory))}: may not be looked into; locks below are not known")
        locks = [(place, lock) for place, answer in found for lock in answer.locks]
        if arguments.force:
            return _force(locks)
        if arguments.reap:
            return _reap(locks, bool(arguments.json))
        if arguments.json:
            emit_json({"locks": [_plain(place, lock) for place, lock in locks]})
        elif not locks:
            say("No locks.")
        else:
            _print(locks)
    return ExitCode.OK


def _plain(place: _Place, lock: LockInfo) -> dict[str, object]:
    return {"vault": place.vault, **protocol.plain(lock)}


def _print(locks: list[tuple[_Place, LockInfo]]) -> None:
    style = Style()
    for vault in dict.fromkeys(place.vault for place, _ in locks):
        say(f"{printable(vault)}:")
        rows = [
            (
                lock.path or f"? ({lock.lock_path})",
                _owner(lock),
                age(lock.age_s),
                lock.verdict + (" (suspect)" if lock.suspect else ""),
                _evidence(lock),
            )
            for place, lock in locks
            if place.vault == vault
        ]
        say(table(("FILE", "OWNER", "TOUCHED", "VERDICT", "WHY"), rows, indent="  ", style=style))


def _owner(lock: LockInfo) -> str:
    if lock.pid is None:
        return "?"
    return f"{lock.program or '?'} (pid {lock.pid}{f', host {lock.host[:8]}' if lock.host else ''})"


def _evidence(lock: LockInfo) -> str:
    return lock.evidence + (f"; since {clock(lock.since)}" if lock.since else "")


# --- removing


def _reap(locks: list[tuple[_Place, LockInfo]], as_json: bool) -> int:
    removed: list[dict[str, object]] = []
    failed = False
    for place, lock in locks:
        if lock.verdict not in _REAPED:
            continue
        try:
            outcome = place.reap(lock, force=False)
        except (VaultError, OSError) as error:
            tell(f"{printable(place.name(lock.lock_path))}: not removed: {words_of(error)}")
            failed = True
            continue
        if outcome == "removed":
            removed.append(_plain(place, lock))
            if not as_json:
                say(f"removed {printable(place.name(lock.lock_path))}: {lock.verdict}, {printable(lock.evidence)}")
        elif outcome == "left":
            tell(f"{printable(place.name(lock.lock_path))}: left as it is; it has changed in this moment")
            failed = True
    if as_json:
        emit_json({"removed": removed})
    else:
        left = [lock for _, lock in locks if lock.verdict not in _REAPED]
        if left:
            say(f"{len(left)} lock(s) that may be somebody's were left; `vaultfs locks` lists them.")
        elif not removed:
            say("No locks.")
    return ExitCode.FAILED if failed else ExitCode.OK


def _force(locks: list[tuple[_Place, LockInfo]]) -> int:
    """One lock, whatever its verdict, after a question. Raises ForeignLockError and LockBusyError if it cannot be."""
    chosen = [(place, lock) for place, lock in locks if place.asked_for(lock)]
    if not chosen:
        say(
            "There is no lock."
            if not locks
            else "There is no lock of this very path; `vaultfs locks` lists those below."
        )
        return ExitCode.OK
    place, lock = chosen[0]
    name = place.name(lock.lock_path)
    if lock.verdict == "ours":
        raise LockBusyError("the daemon of this mount holds it, for a moment", path=name, remedy="Try again.")
    say(f"{printable(name)}")
    say(f"  owner    {printable(_owner(lock))}")
    say(f"  verdict  {lock.verdict}: {printable(_evidence(lock))}")
    say(f"  {_what_could_be_lost(lock)}")
    sys.stdout.write("Remove this lock? [y/N] ")
    sys.stdout.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        say("It was left as it is.")
        return ExitCode.FAILED
    outcome = place.reap(lock, force=True)
    if outcome == "left":
        raise ForeignLockError("it holds something that is not of the lock protocol, and was left as it is", path=name)
    if outcome == "lost":
        raise LockBusyError("this lock is gone; nothing was removed", path=name, remedy=_LATER)
    say("Removed.")
    return ExitCode.OK


def _what_could_be_lost(lock: LockInfo) -> str:
    if lock.verdict in _REAPED:
        return "Nothing can be lost: it is proven that nobody holds it."
    if lock.verdict == "alive":
        return (
            "Its owner lives. If it is saving this file, its save and the next one may overwrite each other:"
            " one of the two versions could be lost. End that program first if you can."
        )
    if lock.verdict == "foreign":
        return (
            "It is not what any lock looks like. Only files with names of the lock protocol would be removed,"
            " and nothing if there are others. Whatever made it may still rely on it."
        )
    return (
        "Its owner may live, perhaps on another machine or in another container. If it is saving this file at this"
        " moment, its save and the next one may overwrite each other: one of the two versions could be lost."
    )


# --- where locks are


class _Place:
    """A vault, or the part of it that was asked for. `top` is how its user calls it: the vault or the mountpoint."""

    def __init__(self, vault: str, top: str, below: str) -> None:
        self.vault = vault
        self._top = top
        self._below = below

    def name(self, path: str) -> str:
        """`path` (vault-relative) as its user would write it."""
        return os.path.join(self._top, path) if path else self._top

    def asked_for(self, lock: LockInfo) -> bool:
        """True if `lock` is the very one that was asked for, as a file or as a lock directory."""
        return self._below != "" and self._below in (lock.path, lock.lock_path)

    def locks(self) -> LocksInfo:
        raise NotImplementedError

    def reap(self, lock: LockInfo, *, force: bool) -> str:
        raise NotImplementedError


class _Served(_Place):
    """By its daemon."""

    def __init__(self, entry: Entry, top: str, below: str) -> None:
        super().__init__(entry.vault, top, below)
        self._entry = entry

    def locks(self) -> LocksInfo:
        return client.locks(self._entry, self._below)

    def reap(self, lock: LockInfo, *, force: bool) -> str:
        return client.reap_lock(self._entry, lock, force=force)


class _AtRest(_Place):
    """By ourselves."""

    def __init__(self, vault: str, top: str, below: str, survey: Survey) -> None:
        super().__init__(vault, top, below)
        self._survey = survey

    def locks(self) -> LocksInfo:
        from vaultfs.mount.status import locks_info

        return locks_info(self._survey.look(os.fsencode(self._below)))

    def reap(self, lock: LockInfo, *, force: bool) -> str:
        from vaultfs.mount.status import lock_report

        return str(self._survey.reap(lock_report(lock), force=force))


def _places(path: str | None, stack: contextlib.ExitStack) -> list[_Place]:
    """Where to look: what `path` belongs to, or all mounted vaults. What is opened for it is closed by `stack`."""
    known = registry.entries()
    if path is None:
        return [_of_mount(entry, entry.mountpoint, "", stack) for entry in known]
    real = real_path(path)
    entry = registry.find(real, known)
    if entry is not None:
        top = next(top for top in (entry.mountpoint, entry.vault) if _inside(top, real))
        return [_of_mount(entry, top, _relative(top, real), stack)]
    vault = _vault_of(real)
    return [_opened(vault, vault, _relative(vault, real), stack)]


def _inside(top: str, path: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")


def _relative(top: str, path: str) -> str:
    return "" if path == top else path[len(top.rstrip("/")) + 1 :]


def _of_mount(entry: Entry, top: str, below: str, stack: contextlib.ExitStack) -> _Place:
    try:
        client.status(entry)
    except NoAnswerError as error:
        if entry.vault == entry.mountpoint:
            raise  # the mount covers the vault: there is no other way to it
        tell(f"{error}; looking at the vault itself")
        return _opened(entry.vault, top, below, stack)
    return _Served(entry, top, below)


def _vault_of(path: str) -> str:
    """The vault that `path` is in: where vaultfs has left its state, else the directory itself (or the file's)."""
    vault = path
    while not os.path.isdir(os.path.join(vault, ".vaultfs")):
        if vault == "/":
            break
        vault = os.path.dirname(vault)
    else:
        return vault
    if os.path.isdir(path):
        return path
    directory = os.path.dirname(path)
    if not os.path.isdir(directory):
        raise VaultMissingError(path=path)
    return directory


def _opened(vault: str, top: str, below: str, stack: contextlib.ExitStack) -> _Place:
    from vaultfs.locks import Survey
    from vaultfs.locks.liveness import Judge, is_local
    from vaultfs.locks.records import whoami
    from vaultfs.root import VaultRoot

    root = stack.enter_context(VaultRoot.open(vault))
    return _AtRest(vault, top, below, Survey(root, Judge(whoami(), local=is_local(root.fd))))
