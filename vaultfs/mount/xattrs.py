"""Extended attributes: `user.*` but our own, and the POSIX ACL; no other of the system or of security passes.

Set by path, an attribute is set on the version and on all drafts of its name. What a program sets on a draft is
published with it; everything else the draft takes over from the version that it replaces, so that is what it shows.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from vaultfs.mount.attributes import assert_one_name, open_live, open_same_directory, path_descriptor
from vaultfs.mount.context import MountContext
from vaultfs.mount.inodes import Directory, Draft, Inode, Link, LiveFile, Version

__all__ = ["ExtendedAttributes"]

_OUR_XATTRS = b"user.vaultfs."
_ACL_XATTRS = (b"system.posix_acl_access", b"system.posix_acl_default")


class ExtendedAttributes:
    """All extended attributes of one mount."""

    def __init__(self, context: MountContext) -> None:
        self._context = context

    @staticmethod
    def _passes(name: bytes) -> bool:
        """True for the attributes that a vault has: `user.*` but our own, and the POSIX ACL."""
        return (name.startswith(b"user.") and not name.startswith(_OUR_XATTRS)) or name in _ACL_XATTRS

    @contextmanager
    def _xattr_path(self, inode: Inode, *, change: bool) -> Iterator[str]:
        if isinstance(inode, Draft):
            name = inode.name
            if inode.file is not None:
                yield f"/proc/self/fd/{inode.file.fd}"
                return
            if name is not None and name.version is not None:
                inode = name.version
            elif inode.base is not None:
                inode = inode.base
            else:
                raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        if isinstance(inode, Version):
            with path_descriptor(self._context.root, inode) as descriptor:
                if change:
                    assert_one_name(descriptor, inode.name)
                yield f"/proc/self/fd/{descriptor}"
                if change:
                    inode.update(os.fstat(descriptor))
                    for draft in inode.name.drafts:
                        if draft.base is inode:
                            draft.began = inode.identity
            return
        if isinstance(inode, LiveFile):
            descriptor = open_live(self._context.root, inode, change=change)
        elif isinstance(inode, Directory):
            descriptor = open_same_directory(self._context.root, inode)
        else:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        try:
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)

    def get_xattr(self, inode: Inode, name: bytes) -> bytes:
        if not self._passes(name):
            # ENODATA for what programs ask of every file (capabilities, labels): there is none. EOPNOTSUPP would
            # tell them that the file system has no attributes at all.
            number = errno.ENODATA if name.startswith((b"security.", b"user.")) else errno.EOPNOTSUPP
            raise OSError(number, os.strerror(number))
        below = self._version_below(inode)
        if below is not None and os.fsdecode(name) not in self._own_attributes(inode):
            inode = below
        with self._xattr_path(inode, change=False) as path:
            return os.getxattr(path, name)

    def list_xattrs(self, inode: Inode) -> list[bytes]:
        if isinstance(inode, Link):
            return []
        with self._xattr_path(inode, change=False) as path:
            names = os.listxattr(path)
        below = self._version_below(inode)
        if below is not None:
            own = self._own_attributes(inode)
            with self._xattr_path(below, change=False) as path:
                names = [
                    *(name for name in names if name in own),
                    *(one for one in os.listxattr(path) if one not in own),
                ]
        return [encoded for name in names if self._passes(encoded := os.fsencode(name))]

    @staticmethod
    def _version_below(inode: Inode) -> Version | None:
        """The version whose attributes a draft will take over when it is published."""
        if isinstance(inode, Draft) and inode.file is not None and inode.name is not None:
            return inode.name.version
        return None

    @staticmethod
    def _own_attributes(inode: Inode) -> set[str]:
        return inode.own_attributes if isinstance(inode, Draft) else set()

    def set_xattr(self, inode: Inode, name: bytes, value: bytes) -> None:
        self._assert_xattr_may_change(name)
        for path in self._xattr_targets(inode):
            os.setxattr(path, name, value)
        self._note_attribute(inode, name)

    def remove_xattr(self, inode: Inode, name: bytes) -> None:
        self._assert_xattr_may_change(name)
        below = self._version_below(inode)
        for position, path in enumerate(self._xattr_targets(inode)):
            try:
                os.removexattr(path, name)
            except OSError as error:
                if error.errno != errno.ENODATA:
                    raise
                if position > 0:
                    continue  # the version had it; a draft of its name need not
                if below is None or os.fsdecode(name) in self._own_attributes(inode):
                    raise
                self.get_xattr(below, name)  # a draft that would take it over, and now does not; ENODATA if it has none
        self._note_attribute(inode, name)

    @staticmethod
    def _note_attribute(inode: Inode, name: bytes) -> None:
        """What the program itself set on a draft is published with it; an ACL says what the mode is, too."""
        drafts = [inode] if isinstance(inode, Draft) else []
        if isinstance(inode, Version):
            drafts = list(inode.name.drafts)
        for draft in drafts:
            if draft.file is not None:
                draft.own_attributes.add(os.fsdecode(name))
                if name == _ACL_XATTRS[0]:
                    draft.mode = stat.S_IMODE(os.fstat(draft.file.fd).st_mode)

    def _assert_xattr_may_change(self, name: bytes) -> None:
        if self._context.options.ro:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        self._context.assert_writable()
        if not self._passes(name):
            number = errno.EPERM if name.startswith(_OUR_XATTRS) else errno.EOPNOTSUPP
            raise OSError(number, os.strerror(number))

    def _xattr_targets(self, inode: Inode) -> Iterator[str]:
        """The places where an attribute is changed: set by path, on the version and on all drafts of its name."""
        if isinstance(inode, Draft):
            inode.touched = True
        with self._xattr_path(inode, change=True) as path:
            yield path
        if isinstance(inode, Version):
            for draft in list(inode.name.drafts):
                if draft.file is not None:
                    yield f"/proc/self/fd/{draft.file.fd}"
