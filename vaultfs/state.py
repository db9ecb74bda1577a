"""The state directory `.vaultfs`: where drafts, locks being made and the journal live, and whose they are.

It stands in the vault (so that a rename between it and a document is atomic), belongs to the user who serves the
vault, has mode 0700 and no ACL of its own, and is reached through one descriptor that is verified when it is opened.
Everything in it is named *from that descriptor* at the moment of use: whoever renames a part of it away stops those
who were still using it, whatever they remember.

::

    .vaultfs/id             which host, file system and vault root this state belongs to
    .vaultfs/.gitignore     `*`
    .vaultfs/journal        an index of drafts and claims (journal.py)
    .vaultfs/staging/ATTEMPT/…   working copies of one run of a daemon (drafts.py)
    .vaultfs/drafts/…       drafts that were kept
    .vaultfs/pending/…      lock directories in the making (locks/)
    .vaultfs/locks/…        private locks
    .vaultfs/quarantine/…   what was set aside: a state directory that came from elsewhere, for one

**Copied state is never replayed.** A sync client or a backup may bring back a `.vaultfs` from another time, disk or
machine; its drafts would be published over newer work. `id` tells: another root inode or another file system means a
copy, which is moved to `quarantine/` whole, untouched. Two cases are refused instead, since another host may be serving
this very vault: where the file system has no identity and only the host differs, and where a copy from another host has
a fence that was written within the last minute. A disk that was moved to another machine with the vault on it keeps
its state.

Not promised: protection from the user who owns the directory. It keeps others out, not oneself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import socket
import stat
import time
from pathlib import Path
from typing import Final, Self

import msgspec

from vaultfs import kernel
from vaultfs.errors import StateDirectoryError, printable
from vaultfs.root import VaultRoot

__all__ = ["STATE_NAME", "SUBDIRECTORIES", "StateDirectory", "StateIdentity", "host_identity"]

STATE_NAME: Final = b".vaultfs"
SUBDIRECTORIES: Final = frozenset({"staging", "pending", "locks", "drafts", "quarantine"})

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ACL_NAMES: Final = ("system.posix_acl_default", "system.posix_acl_access")
_BTRFS_MAGIC: Final = 0x9123683E
_ID_LIMIT: Final = 4096
_FENCE_LEASE: Final = 60.0  # seconds; lock-protocol: a fence that was written more recently may have a living owner
# errnos of a file system that has no such attribute, or none at all
_NO_ATTRIBUTE: Final = frozenset({errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class StateIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `.vaultfs/id` holds: the vault that this state belongs to.

    `uuid` and `fsid` both name the file system: neither is to be had everywhere, and `fsid` is a device number on
    some (xfs), while `uuid` is shared by all snapshots of one btrfs.
    """

    v: int
    host: str
    root_ino: int
    uuid: str = ""
    fsid: str = ""
    btrfs: bool = False

    def same_vault(self, other: StateIdentity) -> bool | None:
        """True or False where it can be told, None where only the host could decide and it differs."""
        if self.root_ino != other.root_ino:
            return False
        if self.uuid and other.uuid:
            if self.uuid != other.uuid:
                return False
            # a btrfs snapshot has the UUID and the inode numbers of its origin; its fsid has the subvolume in it
            return self.fsid == other.fsid if self.btrfs or other.btrfs else True
        if self.fsid and other.fsid:
            return self.fsid == other.fsid
        return True if self.host == other.host else None


def host_identity() -> str:
    """This machine: its machine-id, hashed with our own salt so that the id is not given away (machine-id(5))."""
    for source in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):  # absent in many containers: the host name stands in
            text = Path(source).read_text(encoding="ascii").strip()
            if text:
                return hashlib.blake2b(text.encode(), key=b"vaultfs host", digest_size=16).hexdigest()
    return hashlib.blake2b(socket.gethostname().encode(), key=b"vaultfs host", digest_size=16).hexdigest()


class StateDirectory:
    """The opened state directory of one vault; the descriptor is closed by `close` or the context manager.

    `path` is its vault-relative path, `fd` its descriptor (never O_PATH), `filesystem` a text that names its file
    system, `set_aside` the vault-relative path where a foreign state directory was moved to when this one was made.
    """

    path: Final = STATE_NAME

    def __init__(self, root: VaultRoot, fd: int, identity: StateIdentity, set_aside: bytes | None) -> None:
        status = os.fstat(fd)
        self.root = root
        self.fd = fd
        self.dev = status.st_dev
        self.ino = status.st_ino
        self.identity = identity
        self.set_aside = set_aside
        self._made: set[str] = set()

    @property
    def filesystem(self) -> str:
        return self.identity.uuid or self.identity.fsid or f"host:{self.identity.host}"

    @classmethod
    def open(cls, root: VaultRoot, *, create: bool = True, shared: bool = False) -> StateDirectory:
        """Open the state directory of `root`, making it if `create`.

        `shared` says that several hosts serve this vault: then the host in `id` is not compared.

        Raises StateDirectoryError if what stands there is no directory of ours with mode 0700, if the vault's root
        may be written by everybody (they could exchange the directory), or if it belongs to another host and the file
        system has no identity; FileNotFoundError without `create`; OSError of the system calls (EROFS, ENOSPC).
        """
        root_status = os.fstat(root.fd)
        if root_status.st_mode & stat.S_IWOTH and not root_status.st_mode & stat.S_ISVTX:
            raise StateDirectoryError(
                "everybody may write the vault's directory and could exchange its state; take that right away "
                "(chmod o-w) or set the sticky bit (chmod +t)",
                path=root.path,
            )
        ours = cls._identity_of(root)
        for _ in range(8):  # another process may make, or set aside, the directory at the same time
            fd = cls._open_or_make(root, create)
            try:
                # in this order: whoever makes it writes `id` before anything else
                used = cls._has_content(fd)
                theirs = cls._read_identity(fd)
                if theirs is None and not used:
                    cls._write_identity(fd, ours)
                    theirs = cls._read_identity(fd)
                same = theirs.same_vault(ours) if theirs is not None else False
                if same is None and not shared:
                    raise StateDirectoryError(
                        "the state directory was made on another host, and this file system does not say whether it "
                        "is a copy; mount with -o shared if both serve this vault, or move .vaultfs away",
                        path=STATE_NAME,
                    )
                if same is not False:
                    state = cls(root, fd, ours, None)
                    state._furnish()
                    fd = -1  # owned by `state` now
                    return state
                if not create:
                    raise StateDirectoryError("the state directory was copied from elsewhere", path=STATE_NAME)
                if theirs is not None and theirs.host != ours.host and cls._fence_is_fresh(fd):
                    raise StateDirectoryError(
                        "the state directory seems to be in use on another host, which reaches this vault by another "
                        "file system; mount with -o shared if so, or try again in a minute if it is a copy",
                        path=STATE_NAME,
                    )
                set_aside = cls._set_aside(root, fd, ours)
                if set_aside is not None:
                    os.close(fd)
                    fd = -1
                    state = cls.open(root, create=True, shared=shared)
                    state.set_aside = set_aside
                    return state
            finally:
                if fd >= 0:
                    os.close(fd)
        raise StateDirectoryError("the state directory keeps changing under our hands", path=STATE_NAME)

    # --- making and judging it

    @staticmethod
    def _identity_of(root: VaultRoot) -> StateIdentity:
        uuid = kernel.filesystem_uuid(root.fd)
        fsid = os.fstatvfs(root.fd).f_fsid
        return StateIdentity(
            v=1,
            host=host_identity(),
            root_ino=root.ino,
            uuid=uuid.hex() if uuid and any(uuid) else "",  # a nil UUID names nothing
            fsid=f"{fsid & 0xFFFFFFFFFFFFFFFF:x}" if fsid else "",
            btrfs=kernel.filesystem_type(root.fd) == _BTRFS_MAGIC,
        )

    @classmethod
    def _open_or_make(cls, root: VaultRoot, create: bool) -> int:
        try:
            fd = os.open(STATE_NAME, _DIRECTORY_FLAGS, dir_fd=root.fd)
        except FileNotFoundError:
            if not create:
                raise
            with contextlib.suppress(FileExistsError):  # made by somebody else just now: verified below like any other
                os.mkdir(STATE_NAME, 0o700, dir_fd=root.fd)
            fd = os.open(STATE_NAME, _DIRECTORY_FLAGS, dir_fd=root.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise StateDirectoryError("the state directory is a link or a file", path=STATE_NAME) from error
            raise
        try:
            cls._verify_private(root, fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @staticmethod
    def _verify_private(root: VaultRoot, fd: int) -> None:
        status = os.fstat(fd)
        if status.st_dev != root.dev:
            raise StateDirectoryError("the state directory is on another file system than the vault", path=STATE_NAME)
        if status.st_uid != os.geteuid():
            raise StateDirectoryError(f"the state directory belongs to user {status.st_uid}", path=STATE_NAME)
        # A vault with a default ACL or a setgid root hands both on to what is made in it; staged files must have
        # neither, since a document's rights come from the document.
        for name in _ACL_NAMES:
            try:
                os.removexattr(fd, name)
            except OSError as error:
                if error.errno not in _NO_ATTRIBUTE:
                    raise
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(fd, 0o700)
        status = os.fstat(fd)
        if stat.S_IMODE(status.st_mode) != 0o700:
            raise StateDirectoryError(f"the state directory has mode {stat.S_IMODE(status.st_mode):o}", path=STATE_NAME)

    @staticmethod
    def _has_content(fd: int) -> bool:
        """True if there is state in it that an `id` must have come before."""
        return any(name == "journal" or name in SUBDIRECTORIES for name in os.listdir(fd))

    @staticmethod
    def _read_identity(fd: int) -> StateIdentity | None:
        try:
            handle = os.open(b"id", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                return None
            raise
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return None
            return msgspec.json.decode(os.read(handle, _ID_LIMIT), type=StateIdentity)
        except msgspec.DecodeError:  # damaged: whose it is cannot be told, so it is judged like a copy
            return None
        finally:
            os.close(handle)

    @staticmethod
    def _write_identity(fd: int, identity: StateIdentity) -> None:
        """Write `id` complete under another name first: two processes may do this at once, and the first one wins."""
        temporary = b"id." + secrets.token_hex(8).encode()
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=fd)
        try:
            try:
                os.write(handle, msgspec.json.encode(identity) + b"\n")
                os.fsync(handle)
            finally:
                os.close(handle)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, b"id", src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            os.rename(temporary, b"id", src_dir_fd=fd, dst_dir_fd=fd)  # no hard links here (FAT): last one wins
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=fd)

    @staticmethod
    def _fence_is_fresh(fd: int) -> bool:
        """True if somebody wrote the fence within its lease: another host sees this vault under another identity
        (the server of a network file system its disk, a client what the network calls it), and may be alive."""
        try:
            written = os.stat(b"fence", dir_fd=fd, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return False
        return abs(time.time() - written) < _FENCE_LEASE

    @classmethod
    def _set_aside(cls, root: VaultRoot, fd: int, ours: StateIdentity) -> bytes | None:
        """Exchange the foreign directory for a fresh one and move it into the fresh one's quarantine.

        Returns where it is now, None if somebody else was faster (look again). A crash in between leaves it
        beside the new one under a hidden name, which is reported but never read.
        """
        # Whoever wants to move this very directory has to hold its flock: there is one who does.
        fcntl.flock(fd, fcntl.LOCK_EX)
        foreign = os.fstat(fd)
        try:
            standing = os.stat(STATE_NAME, dir_fd=root.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if (standing.st_dev, standing.st_ino) != (foreign.st_dev, foreign.st_ino):
            return None
        mark = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}".encode()
        aside = STATE_NAME + b"-staging-" + mark
        os.mkdir(aside, 0o700, dir_fd=root.fd)
        fresh = os.open(aside, _DIRECTORY_FLAGS, dir_fd=root.fd)
        try:
            cls._verify_private(root, fresh)
            cls._write_identity(fresh, ours)
            os.mkdir(b"quarantine", 0o700, dir_fd=fresh)
            try:
                kernel.renameat2(root.fd, aside, root.fd, STATE_NAME, kernel.RENAME_EXCHANGE)
            except OSError as error:
                os.unlink(b"id", dir_fd=fresh)
                os.rmdir(b"quarantine", dir_fd=fresh)
                os.rmdir(aside, dir_fd=root.fd)
                if error.errno in (errno.EINVAL, errno.ENOSYS):
                    raise StateDirectoryError(
                        "the state directory was copied from elsewhere, and this file system cannot exchange it in "
                        "one step; move .vaultfs out of the vault",
                        path=STATE_NAME,
                    ) from error
                raise
            kernel.renameat2(root.fd, aside, fresh, b"quarantine/copied-" + mark, kernel.RENAME_NOREPLACE)
        finally:
            os.close(fresh)
        return STATE_NAME + b"/quarantine/copied-" + mark

    def _furnish(self) -> None:
        """The marks by which other tools leave the directory alone."""
        try:
            handle = os.open(b".gitignore", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        except FileExistsError:
            return  # furnished before
        try:
            os.write(handle, b"*\n")
        finally:
            os.close(handle)
        with contextlib.suppress(OSError):  # a convenience for Dropbox users, impossible without user xattrs
            os.setxattr(self.fd, "user.com.dropbox.ignored", b"1")

    # --- using it

    def name(self, subdirectory: str) -> bytes:
        """The subdirectory's name relative to `fd`, made if it is not there.

        Raises StateDirectoryError if a link or a file stands there or it is not ours, or for a name not in
        SUBDIRECTORIES.
        """
        encoded = subdirectory.encode("ascii")
        if subdirectory in self._made:
            return encoded
        if subdirectory not in SUBDIRECTORIES:
            raise StateDirectoryError(f"there is no {printable(subdirectory)!r} in a state directory", path=self.path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(encoded, 0o700, dir_fd=self.fd)
        try:
            handle = os.open(encoded, _DIRECTORY_FLAGS, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise StateDirectoryError("is a link or a file", path=self.path + b"/" + encoded) from error
            raise
        try:
            status = os.fstat(handle)
        finally:
            os.close(handle)
        if status.st_uid != os.geteuid() or status.st_dev != self.dev:
            raise StateDirectoryError("is not ours", path=self.path + b"/" + encoded)
        self._made.add(subdirectory)
        return encoded

    def forget(self, subdirectory: str) -> None:
        """Look again at the next `name`: for callers who found that the subdirectory has gone."""
        self._made.discard(subdirectory)

    def directory(self, subdirectory: str) -> bytes:
        """The subdirectory's vault-relative path, made if it is not there; raises as `name`."""
        return self.path + b"/" + self.name(subdirectory)

    def assert_ours(self) -> None:
        """Raises StateDirectoryError unless the name `.vaultfs` still is the directory that `fd` holds."""
        try:
            status = os.stat(STATE_NAME, dir_fd=self.root.fd, follow_symlinks=False)
        except FileNotFoundError:
            raise StateDirectoryError("the state directory was removed", path=self.path) from None
        if (status.st_dev, status.st_ino) != (self.dev, self.ino):
            raise StateDirectoryError("the state directory was exchanged for another", path=self.path)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
