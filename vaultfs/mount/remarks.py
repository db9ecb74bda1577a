"""Remarks: what somebody who mounts this vault should know about it, one line each, and only if it applies.

`collect` is called once, after recovery and *before* anything is mounted: afterwards the vault's own path leads into
the mount, and nobody could tell any more who stands underneath. It changes nothing, follows no link, looks at the vault
through its `VaultRoot` only, and is bounded: a vault of a million files, or a machine with ten thousand processes, is
looked at in part, and the remark says "at least". A remark that cannot be made is no reason not to mount.

What is remarked
    *Links*: how many symbolic links the `symlinks` policy will not follow. They are listed on the mount, but cannot be
    read, which looks like a fault to somebody who does not know.

    *Beside the mount* (only if the vault is mounted over itself): processes that stand in a directory of the vault or
    have something in it open. They keep what they have, so what they write goes past the mount.

    *Backups* (the same, and only at the first mount): those that stay on one file system skip the mount.

    *Syncthing* and *Dropbox*: if they share this very directory and do not leave `.vaultfs` alone.

How a process in the vault is found
    By the links in ``/proc/PID``, never by their text alone: what is open must have the device and the inode of what
    the text leads to beneath the root. A directory is also recognized by walking up from it, so a shell that stands in
    a bind mount of the vault, or in another mount namespace, is found where the text means nothing. (A plain *file*
    that was opened that way is not.) No call here waits for a daemon of another FUSE mount: ``AT_STATX_DONT_SYNC``.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

from vaultfs import kernel
from vaultfs.config import MountOptions
from vaultfs.errors import UnsafePathError, printable
from vaultfs.mount import procs
from vaultfs.mount.names import NamePolicy
from vaultfs.root import VaultRoot
from vaultfs.state import STATE_NAME

__all__ = ["ENTRY_LIMIT", "TIME_LIMIT", "collect"]

log = logging.getLogger(__name__)

ENTRY_LIMIT = 20_000  # directory entries looked at for links
TIME_LIMIT = 0.5  # seconds for the links, and the same again for the processes
_MOST_NAMED = 5  # processes named in one line
_DEEPEST = 4096  # steps up from a directory; below PATH_MAX there cannot be more
_TEXT_LIMIT = 1 << 16  # bytes read of an ignore file
_MOST_INCLUDES = 8  # ignore files read altogether

# Programs that start a command and wait for it: they do nothing in the vault, and end with it.
_WRAPPERS = frozenset({"sudo", "doas", "pkexec", "timeout"})
_DROPBOX_MARK = "user.com.dropbox.ignored"  # https://help.dropbox.com/sync/ignored-files


def collect(root: VaultRoot, options: MountOptions, *, first_mount: bool) -> list[str]:
    """The remarks about the vault `root` that is about to be mounted with `options`, each one printable line.

    `first_mount`: it had no state directory before. Raises nothing: what goes wrong is in the log, at debug level.
    """
    parts: list[Callable[[], str | None]] = [lambda: _links(root, options)]
    if options.over_itself:
        parts.append(lambda: _beside_the_mount(root))
        if first_mount:
            parts.append(_backups)
    parts += [lambda: _syncthing(root), lambda: _dropbox(root)]
    remarks = []
    for part in parts:
        try:
            remark = part()
        except Exception:
            # Safe, whatever it is: nothing depends on a remark, and nothing was changed to make it. What is really
            # wrong with the vault stops the mount itself, with an error of its own.
            log.debug("a remark could not be made", exc_info=True)
            continue
        if remark:
            remarks.append(remark)
    return remarks


# --- links that will not be followed


class _Links(NamedTuple):
    number: int
    example: bytes
    complete: bool  # the whole vault was looked at


def _links(root: VaultRoot, options: MountOptions) -> str | None:
    found = _count_links(root, NamePolicy(options, STATE_NAME))
    if not found.number:
        return None
    number = f"{found.number}" if found.complete else f"at least {found.number}"
    one = found.number == 1
    if options.symlinks == "refuse":
        why = "by the option symlinks=refuse"
    elif options.symlinks == "allow":
        why = f"{'it leads' if one else 'they lead'} out of the vault, to places that the option allow does not name"
    else:
        why = f"{'it is' if one else 'they are'} absolute or {'leads' if one else 'lead'} out of the vault"
    return (
        f"{number} symbolic {'link is' if one else 'links are'} listed but not followed ({why}): "
        f"{'' if one else 'for example '}{printable(found.example)}"
    )


def _count_links(root: VaultRoot, policy: NamePolicy) -> _Links:
    """Walk the vault breadth first: what is near the top is what its user knows."""
    deadline = time.monotonic() + TIME_LIMIT
    count, example, seen = 0, b"", 0
    pending = deque([b""])
    complete = True
    while pending:
        directory = pending.popleft()
        try:
            descriptor = root.open_directory(directory)
        except (OSError, UnsafePathError) as error:
            # Gone, closed to us, or another file system is mounted there: the mount cannot show links in it either.
            log.debug("not looked at for links: %s", error)
            continue
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    seen += 1
                    if seen > ENTRY_LIMIT or time.monotonic() > deadline:
                        return _Links(count, example, False)
                    name = os.fsencode(entry.name)
                    path = directory + b"/" + name if directory else name
                    if policy.is_machinery(path):
                        continue
                    try:
                        if entry.is_symlink():
                            target = os.readlink(name, dir_fd=descriptor)
                            if not policy.link_is_contained(target, path.count(b"/")):
                                count += 1
                                example = example or path
                        elif entry.is_dir(follow_symlinks=False):
                            pending.append(path)
                    except OSError as error:
                        # Removed, or no link any more, since it was listed: then it is none to be counted.
                        log.debug("not looked at for links: %s", error)
        except OSError as error:
            # The rest of this directory cannot be listed. The other ones can, and "at least" stays true.
            log.debug("%s could not be listed to its end: %s", printable(directory), error)
            complete = False
        finally:
            os.close(descriptor)
    return _Links(count, example, complete)


# --- who works beside the mount


def _beside_the_mount(root: VaultRoot) -> str | None:
    found, complete = _processes_in(root)
    if not found:
        return None
    named = "; ".join(found[:_MOST_NAMED])
    more = len(found) - _MOST_NAMED
    if more > 0:
        named += f"; and {'' if complete else 'at least '}{more} more"
    elif not complete:
        named += "; and perhaps more"
    return (
        f"these had the vault open before it was mounted over, and work beside the mount until started again: {named} "
        '(for a shell this is enough: cd "$PWD")'
    )


def _processes_in(root: VaultRoot) -> tuple[list[str], bool]:
    """Every process but ourselves that has something beneath `root`, in words, the newest ones first; and whether
    all were looked at."""
    deadline = time.monotonic() + TIME_LIMIT
    ours = {os.getpid()}
    for ancestor in procs.ancestors(os.getpid()):
        if procs.program(ancestor) in _WRAPPERS:
            ours.add(ancestor)
    found: list[str] = []
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdecimal()), reverse=True):
        if pid in ours:
            continue
        if time.monotonic() > deadline:
            return found, False
        try:
            what = _use_of(root, pid, deadline)
        except OSError as error:
            # It ended meanwhile, or belongs to somebody else and may not be looked into. The latter cannot be
            # remedied, and there are always some: to say so each time would tell nobody anything.
            log.debug("process %d could not be looked into: %s", pid, error)
            continue
        if what:
            found.append(f"{printable(procs.program(pid) or '?')} (pid {pid}) {what}")
    return found, True


def _use_of(root: VaultRoot, pid: int, deadline: float) -> str | None:
    """How process `pid` uses what is beneath `root`, in words; None if it does not. Where it stands counts most."""
    for link, words in (("cwd", "works in"), ("root", "has its root at")):
        path = _path_beneath(root, b"/proc/%d/%s" % (pid, link.encode()))
        if path is not None:
            return f"{words} {printable(path) if path else 'it'}"
    for name in os.listdir(b"/proc/%d/fd" % pid):
        if time.monotonic() > deadline:
            return None
        path = _path_beneath(root, b"/proc/%d/fd/%s" % (pid, name))
        if path is not None:
            return f"has {printable(path) if path else 'it'} open"
    return None


def _path_beneath(root: VaultRoot, link: bytes) -> bytes | None:
    """Where in the vault the open thing behind the magic `link` is (vault-relative; if only the walk up found it:
    the text of the link); None if it is not there. Raises PermissionError."""
    try:
        text = os.readlink(link)
        if not text.startswith(b"/"):  # a socket, a pipe, an eventfd
            return None
        found = kernel.statx(kernel.AT_FDCWD, link, kernel.AT_STATX_DONT_SYNC | kernel.AT_NO_AUTOMOUNT)
    except PermissionError:
        raise
    except OSError:
        return None  # closed since the listing, or a kernel thread without such a link: nothing is held
    below = root.path.rstrip(b"/") + b"/"
    if text == root.path and (found.dev, found.ino) == (root.dev, root.ino):
        return b""
    if text.startswith(below):
        path = text[len(below) :]
        try:
            standing = root.stat(path)
            if (standing.st_dev, standing.st_ino) == (found.dev, found.ino):
                return path
        except (OSError, UnsafePathError) as error:
            # Removed ("… (deleted)") or somewhere else by now: what is written there cannot get past the mount.
            log.debug("%s leads nowhere in the vault: %s", printable(text), error)
            return None
    if found.dev == root.dev and stat.S_ISDIR(found.mode) and _is_beneath(root, link):
        return text
    return None


def _is_beneath(root: VaultRoot, link: bytes) -> bool:
    """Whether the directory behind the magic `link` is the root or below it, by walking up."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        here = os.open(link, flags)
    except OSError:
        return False  # closed meanwhile
    try:
        previous = (0, 0)
        for _ in range(_DEEPEST):
            found = kernel.statx(here, b"", kernel.AT_EMPTY_PATH | kernel.AT_STATX_DONT_SYNC)
            if (found.dev, found.ino) == (root.dev, root.ino):
                return True
            if found.dev != root.dev or (found.dev, found.ino) == previous:  # left its file system, or at the top
                return False
            previous = (found.dev, found.ino)
            above = os.open(b"..", flags, dir_fd=here)
            os.close(here)
            here = above
        return False
    except OSError as error:
        # A directory on the way that we may not pass: then it is not beneath a vault that we may serve.
        log.debug("the way up from %s ends: %s", printable(link), error)
        return False
    finally:
        os.close(here)


# --- backups and sync clients


def _backups() -> str:
    return (
        "backups that stay on one file system (rsync -x, tar --one-file-system, borg and restic with it) skip this "
        "mount: docs/guide-backups.md has the lines that do not"
    )


def _syncthing(root: VaultRoot) -> str | None:
    if not root.exists(b".stfolder") and not root.exists(b".stignore"):
        return None
    if _ignored_by(root, b".stignore", [b".stignore"]):
        return None
    return (
        "Syncthing shares this directory: add the line /.vaultfs to its .stignore, or drafts and locks go to your "
        "other machines while the vault is not mounted in its own place"
    )


def _ignored_by(root: VaultRoot, path: bytes, read: list[bytes]) -> bool | None:
    """Whether the Syncthing ignore file `path` leaves the state directory alone; None if it says nothing about it.

    https://docs.syncthing.net/users/ignoring.html: the first pattern that matches decides; ``(?d)``, ``(?i)`` and
    ``!`` may stand before it; ``#include FILE``. `read` collects the files that were read, against circles.
    """
    try:
        descriptor = root.open_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        text = os.read(descriptor, _TEXT_LIMIT).decode("utf-8", "replace")
    finally:
        os.close(descriptor)
    name = os.fsdecode(STATE_NAME)
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("#include "):
            included = root.relative(os.path.join(os.path.dirname(path), os.fsencode(line[9:].strip())))
            if included in read or len(read) >= _MOST_INCLUDES:
                continue
            read.append(included)
            answer = _ignored_by(root, included, read)
            if answer is not None:
                return answer
            continue
        if not line or line.startswith(("//", "#")):
            continue
        prefix = re.match(r"(?:!|\(\?[di]\))*", line)
        assert prefix is not None  # it matches the empty text
        pattern = line[prefix.end() :].removeprefix("/").removeprefix("**/").rstrip("/").removesuffix("/**").rstrip("/")
        if fnmatchcase(name, pattern.lower() if "(?i)" in prefix.group() else pattern):
            return "!" not in prefix.group()
    return None


def _dropbox(root: VaultRoot) -> str | None:
    if not root.exists(b".dropbox") and not root.exists(b".dropbox.cache"):
        return None
    try:
        descriptor = root.open_directory(STATE_NAME)
    except FileNotFoundError:
        return None  # no state yet: it is made with the mark
    try:
        if os.getxattr(descriptor, _DROPBOX_MARK) == b"1":
            return None
    except OSError as error:
        # No such mark, or a file system that has none: either way Dropbox does not see one, which is what we say.
        log.debug("no mark for Dropbox: %s", error)
    finally:
        os.close(descriptor)
    return (
        "Dropbox shares this directory, and .vaultfs does not bear its mark to be left out (attr -s "
        "com.dropbox.ignored -V 1 .vaultfs): drafts and locks go to your other machines while the vault is not "
        "mounted in its own place"
    )
