"""``vaultfs status``: what is mounted, who writes what, which locks are held, what happened so far.

The mounts are those of the register (`vaultfs.control.registry`), also the dead ones, and those in the kernel's own
table that are in no register this user can read: another user's, or one whose register is lost (with
``VAULTFS_RUNTIME_DIR`` the register alone counts, unless a path is asked for). Each daemon is asked over its control
socket, so a mount that hangs is shown as one that does not answer, and holds nothing up for longer than its time
limit. Exit code 0 if all mounts answer, 1 if one does not; mounts of other users do not count.
"""

from __future__ import annotations

import argparse
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from vaultfs import __version__
from vaultfs.cli.output import Style, age, clock, emit_json, say, size, table
from vaultfs.control import client, protocol, registry
from vaultfs.control.protocol import MountStatus
from vaultfs.control.registry import Entry
from vaultfs.errors import ExitCode, NoAnswerError, NotMountedError, VaultError, printable
from vaultfs.mountinfo import MountEntry, mounts
from vaultfs.patience import real_path, within

__all__ = ["View", "collect", "configure", "run"]

_EPILOG = """\
examples:
  vaultfs status                       all mounts
  vaultfs status ~/Notes/daily         the mount that this belongs to
  vaultfs status --json | jq '.mounts[].counters'
"""


class View(msgspec.Struct):
    """One mount as it is shown. `problem` says why `answers` is false; then `status` is only what others know."""

    status: MountStatus
    answers: bool
    problem: str | None = None
    foreign: bool = False  # another user's, which this one cannot ask


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("path", metavar="PATH", nargs="?", help="a mountpoint, a vault, or anything in one")
    parser.add_argument("--json", action="store_true", help="everything as JSON (docs/command-line.md)")


def run(arguments: argparse.Namespace) -> int:
    views = collect(arguments.path)
    if arguments.json:
        emit_json(
            {
                "version": __version__,
                "mounts": [
                    {**protocol.plain(view.status), "answers": view.answers, "problem": view.problem} for view in views
                ],
            }
        )
    elif not views:
        say("No vault is mounted.")
    else:
        style = Style()
        say("\n".join(_text(view, style) for view in views))
    return ExitCode.OK if all(view.answers or view.foreign for view in views) else ExitCode.FAILED


def collect(path: str | None = None, timeout: float = 5.0) -> list[View]:
    """All mounts, or the one that `path` belongs to; daemons are asked at the same time, each up to `timeout` s.

    Raises NotMountedError if `path` belongs to none.
    """
    running, dead = registry.entries(), registry.dead()
    listed = {entry.mountpoint for entry in [*running, *dead]}
    others = [mount for mount in mounts() if mount.ours and mount.mountpoint not in listed]
    if path is not None:
        real = real_path(path)
        entry = registry.find(real, [*running, *dead])
        inside = [mount for mount in others if _contains(mount.mountpoint, real)]
        inside.sort(key=lambda mount: len(mount.mountpoint))
        if entry is not None and not (inside and len(inside[-1].mountpoint) > len(entry.mountpoint)):
            running, dead, others = [item for item in running if item is entry], [], []
            dead = [] if running else [entry]
        elif inside:
            running, dead, others = [], [], inside[-1:]
        else:
            raise NotMountedError("this belongs to no mounted vault", path=real)
    elif os.environ.get("VAULTFS_RUNTIME_DIR"):
        others = []
    with ThreadPoolExecutor(max_workers=16) as pool:
        asked = pool.map(lambda entry: _ask(entry, timeout), running)
        looked = pool.map(_look, others)
        return [*asked, *map(_dead, dead), *looked]


def _contains(top: str, path: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")


def _ask(entry: Entry, timeout: float) -> View:
    try:
        return View(client.status(entry, timeout), answers=True)
    except NoAnswerError as error:
        problem = error.message
    except (VaultError, OSError) as error:
        problem = str(error)
    return View(_known(entry), answers=False, problem=problem)


def _dead(entry: Entry) -> View:
    return View(_known(entry), answers=False, problem=_died(entry.mountpoint))


def _died(mountpoint: str) -> str:
    return f"its daemon died; mount it again, or clear it away with: vaultfs umount {mountpoint}"


def _known(entry: Entry) -> MountStatus:
    """What the register knows without asking."""
    return MountStatus(
        vault=entry.vault,
        mountpoint=entry.mountpoint,
        pid=entry.pid,
        since=entry.since,
        version=entry.version,
        log_file=entry.log_file,
    )


def _look(mount: MountEntry) -> View:
    """A mount without an entry that we may read."""
    try:
        within(3.0, lambda: os.statvfs(mount.mountpoint))
        problem = "its control socket is out of reach"
    except TimeoutError:
        problem = "it does not answer"
    except OSError as error:
        problem = f"it cannot be looked at: {error.strerror}"
        if error.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            problem = _died(mount.mountpoint)
    foreign = mount.user_id not in (None, os.geteuid())
    if foreign:
        problem += f" (it belongs to user {mount.user_id})"
    status = MountStatus(vault=mount.source, mountpoint=mount.mountpoint, pid=0, since="", version="")
    return View(status, answers=False, problem=problem, foreign=foreign)


# --- for people


def _text(view: View, style: Style) -> str:
    status = view.status
    title = style.bold(printable(status.vault))
    if status.mountpoint != status.vault:
        title += f" on {style.bold(printable(status.mountpoint))}"
    lines = [title]
    if not view.answers:
        lines.append(f"  {style.bad('no answer')}: {printable(view.problem or '')}")
    else:
        state = style.good(status.state) if status.state == "serving" else style.bad(status.state)
        lines.append(f"  {state}{f': {printable(status.reason)}' if status.reason else ''}")
    if status.pid:
        lines.append(f"  pid {status.pid} since {printable(clock(status.since))}, vaultfs {printable(status.version)}")
    if status.log_file:
        lines.append(f"  log {printable(status.log_file)}")
    if status.counters:
        lines.append("  " + ", ".join(f"{printable(name)} {number}" for name, number in status.counters.items()))
    text = "\n".join(lines) + "\n"
    return text + "".join(_sections(status, style))


def _sections(status: MountStatus, style: Style) -> list[str]:
    sections: list[tuple[str, tuple[str, ...], list[tuple[Any, ...]]]] = [
        (
            "open drafts",
            ("FILE", "SIZE", "AGE", "KIND", "WRITER"),
            [
                (
                    draft.path,
                    size(draft.size),
                    age(draft.age_s),
                    draft.kind if draft.changed else f"{draft.kind}, unchanged",
                    f"{draft.program} (pid {draft.pid})" if draft.pid else draft.program,
                )
                for draft in status.drafts
            ],
        ),
        ("locks held", ("FILE", "FOR"), [(lock.path, age(lock.held_s)) for lock in status.locks]),
        ("tried again until it is in", ("FILE",), [(path,) for path in status.retries]),
        (
            "kept drafts (vaultfs drafts)",
            ("ID", "FILE", "SIZE", "WHEN", "WHY"),
            [(draft.id, draft.path, size(draft.size), clock(draft.when), draft.reason) for draft in status.kept],
        ),
    ]
    return [
        f"  {title}\n{table(headers, rows, indent='    ', style=style)}" for title, headers, rows in sections if rows
    ]
