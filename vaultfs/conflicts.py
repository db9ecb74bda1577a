"""What a conflict copy is called.

The name is ``STEM.sync-conflict-YYYYMMDD-HHMMSS-ID.EXT``, the form that Syncthing uses and other
tools know to look for: local time, and seven letters that keep copies of one second apart.
"""

from __future__ import annotations

import base64
import os
import re
import time
from typing import Final

__all__ = ["conflict_name"]

_MARK: Final = re.compile(rb"\.sync-conflict-\d{8}-\d{6}-[0-9A-Za-z]{5,16}")  # other tools' IDs as well
_NAME_LIMIT: Final = 255
_EXTENSION_LIMIT: Final = 64  # what is longer is no extension, but a sentence with a dot in it


def conflict_name(name: bytes, when: float | None = None) -> bytes:
    """A name beside `name` for a copy of it that conflicts; another one at each call.

    A copy of a copy is named after the original, so marks do not pile up. The stem is cut, at a character's border,
    so that the whole fits into 255 bytes.
    """
    original = _MARK.sub(b"", name) or name
    stem, dot, extension = original.rpartition(b".")
    if not stem or len(extension) > _EXTENSION_LIMIT:  # ".bashrc" is all stem
        stem, dot, extension = original, b"", b""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(when)).encode()
    mark = b".sync-conflict-" + stamp + b"-" + base64.b32encode(os.urandom(5))[:7]
    room = _NAME_LIMIT - len(mark) - len(dot) - len(extension)
    if len(stem) > room:
        stem = stem[:room]
        while stem and len(stem) + 4 > room and not _ends_whole(stem):
            stem = stem[:-1]
    return stem + mark + dot + extension


def _ends_whole(text: bytes) -> bool:
    """False if `text` ends within a UTF-8 character (bytes that are no UTF-8 at all may be cut anywhere)."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 == 0x80:
            continue
        width = 1 if byte < 0x80 else 2 if byte >> 5 == 6 else 3 if byte >> 4 == 14 else 4 if byte >> 3 == 30 else 1
        return back >= width
    return True
