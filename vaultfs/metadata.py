"""What a new version takes over from the file that it replaces, or from the directory that it is made in.

Replacing: owner and group first (a chown clears setuid bits), then the POSIX access ACL and the `user.*` attributes,
the mode last. The mode is the *draft's* if the program changed it there (the kernel takes setuid away on a write by a
SETATTR to the draft), otherwise the one that the file has now, at the time of publishing: a `chmod 600` while the file
was being written must not be lost.

New: what the directory would have given to a file made in it. A setgid directory gives its group; a default ACL gives
the access ACL, in place of the umask (acl(5), the kernel's `posix_acl_create_masq`); the inheritable flags are set
(chattr(1): no dump, no atime, compression, no copy-on-write, …).

Never taken over: `security.capability`, `security.ima`, `security.evm` (they vouch for content, and this is other
content), `security.selinux` (the kernel labels by directory), and vaultfs' own attributes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from typing import Final

import msgspec

from vaultfs import kernel
from vaultfs.journal import OWN_XATTR_PREFIX

__all__ = ["Metadata", "access_acl_of_new_file", "dress_as_new", "dress_as_replacement"]

_ACCESS: Final = "system.posix_acl_access"
_DEFAULT: Final = "system.posix_acl_default"
_ABSENT: Final = frozenset({errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF})

# include/uapi/linux/posix_acl.h and posix_acl_xattr.h
_ACL_VERSION: Final = 2
_ACL_HEADER: Final = struct.Struct("<I")
_ACL_ENTRY: Final = struct.Struct("<HHI")  # tag, permissions, id
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20

# FS_*_FL of include/uapi/linux/fs.h that ext4, xfs and btrfs hand down to files: secure deletion, undelete,
# compress, sync, no dump, no atime, do not compress, data journalling, no copy-on-write
_INHERITED_FLAGS: Final = 0x1 | 0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x400 | 0x4000 | 0x00800000


class Metadata(msgspec.Struct, frozen=True):
    """What the publisher knows of a draft's metadata; the rest is read where it is published.

    mode: the draft's permission bits, or those asked for a new file (None: the target's, or 0666 less `umask`).
    base_mode: what `mode` was when the draft began; only a `mode` that differs from it is the program's own wish.
    uid, gid: the owner of a new file (None: the publisher's own). base_uid, base_gid: what they were when the draft
    began; where one is given and differs, the program changed the owner, also of a file that it replaces.
    umask: of the program that makes a new file; 0 if `mode` has it taken off already.
    own_attributes: names of extended attributes (the ACL among them) that the program itself set on the draft, or
    removed from it: they stay as they are.
    """

    mode: int | None = None
    base_mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    base_uid: int | None = None
    base_gid: int | None = None
    umask: int = 0o022
    own_attributes: frozenset[str] = frozenset()


def dress_as_replacement(
    fd: int, now: os.stat_result, target: int | None, status: os.stat_result, meta: Metadata
) -> int:
    """Give the staged file `fd` (its stat: `now`) the metadata of the file that it replaces; returns the mode it got.

    `target` is a descriptor of that file (None if it cannot be read), `status` its stat. Raises OSError: EPERM where
    the owner cannot be kept, ENOSPC for attributes.
    """
    uid = meta.uid if meta.uid is not None and meta.base_uid not in (None, meta.uid) else status.st_uid
    gid = meta.gid if meta.gid is not None and meta.base_gid not in (None, meta.gid) else status.st_gid
    if (now.st_uid, now.st_gid) != (uid, gid):
        os.fchown(fd, uid if now.st_uid != uid else -1, gid if now.st_gid != gid else -1)
    if target is not None:
        _transfer(fd, target, meta.own_attributes)
    mode = stat.S_IMODE(status.st_mode)
    if meta.mode is not None and meta.mode != meta.base_mode:
        mode = meta.mode & 0o7777
    return mode


def _attributes(fd: int) -> list[str]:
    try:
        return os.listxattr(fd)
    except OSError as error:
        if error.errno in _ABSENT:
            return []
        raise


def _wanted(name: str) -> bool:
    return name == _ACCESS or (name.startswith("user.") and not name.startswith(OWN_XATTR_PREFIX))


def _transfer(fd: int, target: int, own: frozenset[str]) -> None:
    """Make `fd` have those attributes of `target` that go over to a new version, and no others but its `own`."""
    wanted = [name for name in _attributes(target) if _wanted(name) and name not in own]
    for name in _attributes(fd):
        if _wanted(name) and name not in wanted and name not in own:  # left from an earlier try against another target
            os.removexattr(fd, name)
    for name in wanted:
        try:
            value = os.getxattr(target, name)
        except OSError as error:
            if error.errno in _ABSENT:  # removed since it was listed
                continue
            raise
        os.setxattr(fd, name, value)


def dress_as_new(fd: int, now: os.stat_result, directory: int, meta: Metadata) -> int:
    """Give the staged file `fd` what the directory at the descriptor `directory` (O_PATH will do) gives to new files.

    Returns the mode that it is to have. Raises OSError: EPERM where `meta` asks for an owner that may not be given.
    """
    parent = os.fstat(directory)
    uid = meta.uid if meta.uid is not None and meta.uid != now.st_uid else -1
    gid = meta.gid if meta.gid is not None and meta.gid != now.st_gid else -1
    inherited_group = False
    if parent.st_mode & stat.S_ISGID:
        inherited_group = parent.st_gid != now.st_gid
        gid = parent.st_gid if inherited_group else -1
    if inherited_group:
        # The kernel gives the directory's group even to those who are no members of it; chown does not. Our own group
        # is what is left, and refusing the save for it would be worse.
        with contextlib.suppress(PermissionError):
            os.fchown(fd, -1, gid)
        gid = -1
    if uid != -1 or gid != -1:
        os.fchown(fd, uid, gid)
    mode = meta.mode & 0o7777 if meta.mode is not None else 0o666
    readable = _readable(directory)
    if readable < 0:
        return mode & ~meta.umask
    try:
        try:
            default = os.getxattr(readable, _DEFAULT)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            default = None
        flags = kernel.inode_flags(readable) or 0
    finally:
        os.close(readable)
    if flags & _INHERITED_FLAGS:
        _inherit_flags(fd, flags & _INHERITED_FLAGS)
    if default is None:
        return mode & ~meta.umask
    acl, mode = access_acl_of_new_file(default, mode)
    if acl is not None:
        os.setxattr(fd, _ACCESS, acl)
    return mode


def _readable(directory: int) -> int:
    """A descriptor of the directory that xattr calls take; -1 where it may be searched but not read."""
    try:
        return os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    except PermissionError:
        return -1  # then neither a default ACL nor flags can be seen; the umask stands in for both


def _inherit_flags(fd: int, wanted: int) -> None:
    own = kernel.inode_flags(fd)
    if own is None or own & wanted == wanted:
        return
    try:
        kernel.set_inode_flags(fd, own | wanted)
    except OSError as error:
        # Some cannot be set on a file that has content already (no copy-on-write), or not by everybody. They are
        # advice about storage, no part of what was saved.
        if error.errno not in (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY):
            raise


def access_acl_of_new_file(default: bytes, mode: int) -> tuple[bytes | None, int]:
    """(access ACL, mode) of a file made with `mode` in a directory that has the default ACL `default`.

    The ACL is None where the mode says it all. As the kernel does it: the owner's entry is masked by the mode's owner
    bits, the mask (or the group's entry where there is none) by the group bits, others by the others' bits; what is
    left is the mode. Source: `posix_acl_create_masq` in fs/posix_acl.c. A malformed ACL counts as none.
    """
    if len(default) < _ACL_HEADER.size or (len(default) - _ACL_HEADER.size) % _ACL_ENTRY.size:
        return None, mode
    if _ACL_HEADER.unpack_from(default)[0] != _ACL_VERSION:
        return None, mode
    entries = list(_ACL_ENTRY.iter_unpack(default[_ACL_HEADER.size :]))
    masked = any(tag == _MASK for tag, _, _ in entries)
    result = mode & ~0o777
    packed = [default[: _ACL_HEADER.size]]
    for tag, permissions, identity in entries:
        if tag == _USER_OBJ:
            permissions &= mode >> 6 & 7
            result |= permissions << 6
        elif tag == (_MASK if masked else _GROUP_OBJ):
            permissions &= mode >> 3 & 7
            result |= permissions << 3
        elif tag == _OTHER:
            permissions &= mode & 7
            result |= permissions
        packed.append(_ACL_ENTRY.pack(tag, permissions, identity))
    extended = masked or any(tag in (_USER, _GROUP) for tag, _, _ in entries)
    return (b"".join(packed) if extended else None), result
