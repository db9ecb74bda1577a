"""One family of errors, and the one table that turns an error into an errno, an exit code and a hint.

Whoever finds that something cannot be done raises the class that says *what happened*; nobody else picks an
errno. At the two edges the table is asked: the mount calls `errno_of` to answer the kernel, the command line
calls `exit_code_of` and `hint_of` to answer a person. An ``OSError`` that the file system below raised keeps
its own errno: on the mount a full disk below is a full disk above.

A class's docstring is what the user reads (``vaultfs: PATH: MESSAGE``, then the hint), so it says what happened
in words for somebody whose notes are at stake.

`TABLE` is complete: a test walks the family and fails for a class that has no row.
"""

from __future__ import annotations

import errno
import os
from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "TABLE",
    "AlreadyServedError",
    "BadRequestError",
    "BusyMountError",
    "CallerUnknownError",
    "ConfigError",
    "ConflictError",
    "DeviceMissingError",
    "DraftNotFoundError",
    "ExitCode",
    "FenceLostError",
    "ForeignLockError",
    "HardLinkedError",
    "LockBusyError",
    "LockBrokenError",
    "LookAgainError",
    "MountDeniedError",
    "MountFailedError",
    "MountpointError",
    "MountpointMissingError",
    "MountpointTakenError",
    "NoAnswerError",
    "NotMountedError",
    "Outcome",
    "OwnerOnlyError",
    "PathCallConflictError",
    "PathKind",
    "ProtectedMemberError",
    "PublishError",
    "ReservedNameError",
    "StateDirectoryError",
    "UnsafePathError",
    "UnsuitableVaultError",
    "VaultDeniedError",
    "VaultError",
    "VaultFullError",
    "VaultGoneError",
    "VaultMissingError",
    "errno_of",
    "exit_code_of",
    "hint_of",
    "printable",
    "words_of",
]


class ExitCode:
    """Exit codes of the command line; documented in docs/command-line.md."""

    OK = 0
    FAILED = 1  # something unexpected; the message says what
    USAGE = 2  # wrong words on the command line, or in a configuration file
    UNSAFE = 3  # a path that vaultfs will not touch
    BUSY = 4  # held by somebody: a lock, a mount in use, a vault served by another daemon
    CONFLICT = 5  # somebody else's version came in between; both are kept
    NOT_FOUND = 6  # no such vault, mountpoint, mount or draft
    UNSUITABLE = 7  # this vault, file system or machine cannot do what vaultfs needs
    DENIED = 8  # not permitted
    FOUND = 9  # a check found something to look at


class PathKind(StrEnum):
    """Why a path is not safe. The values are stable: programs may compare them."""

    EMPTY = "empty"
    INVALID = "invalid"
    ROOT_EMPTY = "root-empty"
    ROOT_MISSING = "root-missing"
    ROOT_LINK = "root-link"
    ROOT_NOT_DIRECTORY = "root-not-directory"
    ROOT_UNRESOLVABLE = "root-unresolvable"
    COMPONENT_LINK = "component-link"
    COMPONENT_DANGLING = "component-dangling"
    COMPONENT_REDIRECTED = "component-redirected"
    COMPONENT_MISSING = "component-missing"
    ANCESTOR_NOT_DIRECTORY = "ancestor-not-directory"
    TARGET_PREEXISTING = "target-preexisting"
    HARD_LINKED = "hardlinked"
    UNSUPPORTED_TYPE = "unsupported-type"
    WRONG_TYPE = "wrong-type"
    ESCAPES = "escapes"
    CROSSES_MOUNT = "crosses-mount"
    NAME_TOO_LONG = "name-too-long"


class Outcome(StrEnum):
    """How a publish ended. The values are stable: programs may compare them."""

    PUBLISHED = "published"
    DESTINATION_CONFLICT = "destination_conflict"  # the name is taken, and replacing was not asked for
    IDENTITY_MISMATCH = "identity_mismatch"  # the name holds another version than the one expected
    ATOMIC_UNAVAILABLE = "atomic_unavailable"  # this file system cannot compare and swap
    INVALID_REQUEST = "invalid_request"
    IO_ERROR = "io_error"
    DURABILITY_FAILED = "durability_failed"  # the disk refused to confirm; the data may be gone after a power loss
    DURABILITY_NOT_PROVABLE = "durability_not_provable"
    PUBLISHED_UNCERTAIN = "published_uncertain"  # the rename may have happened; everything is kept


def printable(text: bytes | str) -> str:
    """`text` for a terminal: control characters and undecodable bytes escaped, everything else as it is.

    A file name may hold escape sequences; printed raw it could rewrite what the user reads.
    """
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    return "".join(
        character
        if character.isprintable()
        else character.encode("utf-8", "surrogateescape").decode("latin-1").encode("unicode_escape").decode()
        if not "\udc80" <= character <= "\udcff"
        else f"\\x{ord(character) - 0xDC00:02x}"
        for character in text
    )


class VaultError(Exception):
    """Something about this vault could not be done.

    `path` is the file it happened to; `remedy` replaces the table's hint where the place that raises knows better.
    """

    def __init__(
        self, message: str | None = None, *, path: bytes | str | None = None, remedy: str | None = None
    ) -> None:
        self.path: bytes | None = os.fsencode(path) if path is not None else None
        self.remedy = remedy
        self.message = message if message is not None else (self.__doc__ or "").split("\n")[0]
        super().__init__(self.message)

    def __str__(self) -> str:
        if self.path is not None:
            return f"{printable(self.path)}: {self.message}"
        return self.message


class UnsafePathError(VaultError):
    """The path leaves the vault, crosses a link or a mount, or names no plain file or directory.

    `kind` says which rule it breaks and `component` (vault-relative) where; `label` and `code` are the
    caller's own words, carried along unchanged; `cause_errno` is the system call's errno, 0 if none was made.
    `created` holds the directory that a `mkdir` really made before a later check failed: only such a one may be
    cleaned up by the caller.
    """

    def __init__(
        self,
        kind: PathKind,
        component: bytes,
        message: str | None = None,
        *,
        label: str = "path",
        code: str = "unsafe-path",
        cause_errno: int = 0,
        created: bytes | None = None,
    ) -> None:
        super().__init__(message or f"{label} is not safe ({kind.value})", path=component)
        self.kind = kind
        self.component = component
        self.label = label
        self.code = code
        self.cause_errno = cause_errno
        self.created = created


class BadRequestError(VaultError):
    """The request itself makes no sense."""


class ConfigError(BadRequestError):
    """An option or a configuration file says something that vaultfs does not understand."""


class ReservedNameError(VaultError):
    """The name is reserved for vaultfs itself."""


class ProtectedMemberError(VaultError):
    """The kind of file asked for (device, fifo, socket, hard link, escaping link) cannot be made in a vault."""


class HardLinkedError(VaultError):
    """The file has more than one hard link; writing it would change files outside your sight."""


class LockBusyError(VaultError):
    """Another program holds the lock of this file."""


class LockBrokenError(VaultError):
    """The lock of this file could not be judged or taken: something about it keeps changing."""


class ForeignLockError(LockBrokenError):
    """What stands where the lock of this file should be is not a lock."""


class ConflictError(VaultError):
    """Somebody else's version came in between; both are kept.

    `conflict_copy` is the vault-relative path of the copy made beside the file, `kept` the id of the draft among
    `vaultfs drafts` where no copy was made.
    """

    def __init__(
        self,
        message: str | None = None,
        *,
        path: bytes | str | None = None,
        conflict_copy: bytes | None = None,
        kept: str | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.conflict_copy = conflict_copy
        self.kept = kept


class PathCallConflictError(ConflictError):
    """The name changed while it was being worked on."""


class LookAgainError(VaultError):
    """This inode is not what the caller wants now; the kernel walks the path again when it hears this."""


class CallerUnknownError(VaultError):
    """A program that cannot be identified (another pid namespace, or a reopen by descriptor) may not write."""


class VaultFullError(VaultError):
    """The vault's disk is full; the old version is untouched."""


class OwnerOnlyError(VaultError):
    """The owner-only policy cannot be met."""


class VaultGoneError(VaultError):
    """The vault directory was moved, replaced or unmounted; nothing more is written."""


class FenceLostError(VaultGoneError):
    """Another daemon took this vault over; nothing more is written by this one."""


class PublishError(VaultError):
    """The new version could not be put in place.

    `outcome` says how it ended and `cleanup` whether the staged file may be removed: never after an uncertain
    outcome, since the rename may have happened. `cause_errno` is the system call's errno where one failed (the
    program on the mount gets that one), else 0.
    """

    def __init__(
        self,
        message: str | None = None,
        *,
        path: bytes | str | None = None,
        outcome: Outcome = Outcome.IO_ERROR,
        cleanup: bool = False,
        cause_errno: int = 0,
    ) -> None:
        super().__init__(message, path=path)
        self.outcome = outcome
        self.cleanup = cleanup
        self.cause_errno = cause_errno


class StateDirectoryError(VaultError):
    """The vault's state directory (.vaultfs) cannot be used."""


class DraftNotFoundError(VaultError):
    """There is no such draft."""


class NotMountedError(VaultError):
    """This is no vaultfs mount."""


class NoAnswerError(VaultError):
    """The daemon of this mount does not answer."""


class BusyMountError(VaultError):
    """The mount is in use."""


class AlreadyServedError(VaultError):
    """This vault is being served already.

    By the process `pid` on `host` (None: this one) since `since` (ISO 8601), as far as its fence says. `start_time`
    (clock ticks since boot) tells that process from a later one with its number; None unless it runs right here.
    """

    def __init__(
        self,
        message: str | None = None,
        *,
        path: bytes | str | None = None,
        pid: int | None = None,
        host: str | None = None,
        since: str | None = None,
        start_time: int | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.pid = pid
        self.host = host
        self.since = since
        self.start_time = start_time


class UnsuitableVaultError(VaultError):
    """This directory cannot be mounted as a vault."""


class VaultMissingError(UnsuitableVaultError):
    """There is no such vault."""


class VaultDeniedError(UnsuitableVaultError):
    """You may not write this vault."""


class MountpointError(VaultError):
    """This directory cannot be the mountpoint."""


class MountpointMissingError(MountpointError):
    """There is no such mountpoint."""


class MountpointTakenError(MountpointError):
    """The mountpoint is in use already."""


class MountDeniedError(VaultError):
    """You may not mount like this."""


class DeviceMissingError(VaultError):
    """This machine cannot mount FUSE file systems as it is."""


class MountFailedError(VaultError):
    """The mount did not come up."""


class Row(NamedTuple):
    """One line of the table: what the kernel is told, what the shell is told, what a person is told."""

    errno: int
    exit_code: int
    hint: str


TABLE: dict[type[VaultError], Row] = {
    VaultError: Row(errno.EIO, ExitCode.FAILED, "See the daemon's log for details; nothing was lost."),
    UnsafePathError: Row(
        errno.EXDEV, ExitCode.UNSAFE, "vaultfs only touches plain files and directories inside the vault."
    ),
    BadRequestError: Row(errno.EINVAL, ExitCode.USAGE, "Run `vaultfs COMMAND --help` for what is understood."),
    ConfigError: Row(errno.EINVAL, ExitCode.USAGE, "Run `vaultfs mount --help` for the options and their values."),
    ReservedNameError: Row(
        errno.EPERM, ExitCode.UNSAFE, "Choose another name; .vaultfs and the lock of an open save are taken."
    ),
    ProtectedMemberError: Row(
        errno.EPERM, ExitCode.UNSAFE, "A vault holds files, directories and links that stay inside it."
    ),
    HardLinkedError: Row(
        errno.EMLINK,
        ExitCode.UNSAFE,
        "Copy the file and rename the copy over it, or mount with -o hardlinks=break.",
    ),
    LockBusyError: Row(
        errno.EBUSY,
        ExitCode.BUSY,
        "The old version is untouched and the new one is kept as a draft; `vaultfs locks` says who holds the lock.",
    ),
    LockBrokenError: Row(
        errno.EBUSY,
        ExitCode.BUSY,
        "The old version is untouched; `vaultfs locks` says what is wrong with its lock.",
    ),
    ForeignLockError: Row(
        errno.EBUSY,
        ExitCode.BUSY,
        "vaultfs never touches what it does not know; move NAME.lock away if nothing uses it.",
    ),
    ConflictError: Row(
        errno.ESTALE,
        ExitCode.CONFLICT,
        "Nothing is lost: your text is in the conflict copy beside the file (or among `vaultfs drafts`).",
    ),
    PathCallConflictError: Row(errno.EBUSY, ExitCode.CONFLICT, "Look at the file as it is now, and try again."),
    LookAgainError: Row(errno.ESTALE, ExitCode.FAILED, "Try again."),
    CallerUnknownError: Row(
        errno.EACCES,
        ExitCode.DENIED,
        "Open the file by its path, from the daemon's own pid namespace, to write it.",
    ),
    VaultFullError: Row(errno.ENOSPC, ExitCode.FAILED, "Free some space on the vault's disk and save again."),
    OwnerOnlyError: Row(
        errno.EACCES, ExitCode.DENIED, "Files must be 0600, directories 0700, without ACL: `vaultfs check` lists them."
    ),
    VaultGoneError: Row(
        errno.EROFS,
        ExitCode.FAILED,
        "Unmount, put the vault directory back in its place, and mount again; open drafts are kept.",
    ),
    FenceLostError: Row(
        errno.EROFS, ExitCode.BUSY, "Unmount here; drafts of this daemon are kept and listed by `vaultfs drafts`."
    ),
    PublishError: Row(errno.EIO, ExitCode.FAILED, "The old version is untouched; `vaultfs drafts` lists the new one."),
    StateDirectoryError: Row(
        errno.EIO, ExitCode.UNSUITABLE, "Check the owner and mode (0700) of .vaultfs in the vault."
    ),
    DraftNotFoundError: Row(errno.ENOENT, ExitCode.NOT_FOUND, "`vaultfs drafts` lists what is kept."),
    NotMountedError: Row(errno.EINVAL, ExitCode.NOT_FOUND, "`vaultfs status` lists what is mounted."),
    NoAnswerError: Row(
        errno.ETIMEDOUT, ExitCode.FAILED, "Look at its log; if it hangs for good: vaultfs umount --lazy MOUNTPOINT."
    ),
    BusyMountError: Row(
        errno.EBUSY, ExitCode.BUSY, "Close those programs and try again, or use --lazy to detach the mount now."
    ),
    AlreadyServedError: Row(
        errno.EBUSY, ExitCode.BUSY, "Use the mount that is there, or unmount it first: vaultfs umount MOUNTPOINT."
    ),
    UnsuitableVaultError: Row(
        errno.EINVAL, ExitCode.UNSUITABLE, "Choose a directory on a local file system that you may write."
    ),
    VaultMissingError: Row(
        errno.ENOENT, ExitCode.NOT_FOUND, "Check the spelling, or make the directory first: mkdir DIRECTORY."
    ),
    VaultDeniedError: Row(errno.EACCES, ExitCode.DENIED, "Mount it as its owner."),
    MountpointError: Row(
        errno.EINVAL, ExitCode.UNSUITABLE, "Choose an empty directory outside the vault, or leave the mountpoint away."
    ),
    MountpointMissingError: Row(errno.ENOENT, ExitCode.NOT_FOUND, "Make it first: mkdir MOUNTPOINT."),
    MountpointTakenError: Row(
        errno.EBUSY, ExitCode.BUSY, "Choose another mountpoint, or unmount what is there: vaultfs umount MOUNTPOINT."
    ),
    MountDeniedError: Row(errno.EACCES, ExitCode.DENIED, "Ask the administrator of this machine, or mount as root."),
    DeviceMissingError: Row(
        errno.ENODEV, ExitCode.UNSUITABLE, "Install fuse3 (apt-get install fuse3) and load it: modprobe fuse."
    ),
    MountFailedError: Row(errno.EIO, ExitCode.FAILED, "Run it in the foreground to see more: vaultfs mount -f …"),
}

_ERRNO_OF_KIND = {  # an unsafe path's errno depends on the rule it breaks: contract.md, "Errors that a program gets"
    PathKind.EMPTY: errno.ENOENT,
    PathKind.INVALID: errno.EINVAL,
    PathKind.ROOT_EMPTY: errno.ENOENT,
    PathKind.ROOT_MISSING: errno.ENOENT,
    PathKind.ROOT_LINK: errno.ELOOP,
    PathKind.ROOT_NOT_DIRECTORY: errno.ENOTDIR,
    PathKind.COMPONENT_LINK: errno.ELOOP,
    PathKind.COMPONENT_DANGLING: errno.ELOOP,
    PathKind.COMPONENT_MISSING: errno.ENOENT,
    PathKind.ANCESTOR_NOT_DIRECTORY: errno.ENOTDIR,
    PathKind.TARGET_PREEXISTING: errno.EEXIST,
    PathKind.HARD_LINKED: errno.EMLINK,
    PathKind.UNSUPPORTED_TYPE: errno.EPERM,
    PathKind.WRONG_TYPE: errno.EINVAL,
    PathKind.NAME_TOO_LONG: errno.ENAMETOOLONG,
}


def _row(error: VaultError) -> Row:
    for family in type(error).__mro__:
        if family in TABLE:
            return TABLE[family]
    return TABLE[VaultError]


def errno_of(error: BaseException) -> int:
    """The errno that a program gets for `error`: the table's, the system call's own, or EIO for the unexpected."""
    if isinstance(error, UnsafePathError):
        return _ERRNO_OF_KIND.get(error.kind, TABLE[UnsafePathError].errno)
    if isinstance(error, PublishError) and error.cause_errno:
        return error.cause_errno
    if isinstance(error, VaultError):
        return _row(error).errno
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return errno.EIO


def words_of(error: BaseException) -> str:
    """What happened, in one line for a terminal: ``PATH: MESSAGE``."""
    if isinstance(error, OSError):
        name = f"{printable(os.fsdecode(error.filename))}: " if isinstance(error.filename, str | bytes) else ""
        return f"{name}{error.strerror or error}"
    return str(error) or type(error).__name__


def exit_code_of(error: BaseException) -> int:
    """The exit code that the command line ends with for `error`."""
    if isinstance(error, VaultError):
        return _row(error).exit_code
    if isinstance(error, PermissionError):
        return ExitCode.DENIED
    if isinstance(error, FileNotFoundError):
        return ExitCode.NOT_FOUND
    return ExitCode.FAILED


def hint_of(error: BaseException) -> str:
    """One line that says what to do next."""
    if isinstance(error, VaultError):
        return error.remedy or _row(error).hint
    if isinstance(error, PermissionError):
        return "You need the right to read and write the vault and to use the mountpoint."
    return TABLE[VaultError].hint
