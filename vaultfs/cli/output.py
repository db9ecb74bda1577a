"""What commands print: tables, times, sizes, and JSON that any file name survives.

Everything that comes from a file name or from another program goes through `vaultfs.errors.printable` before it
reaches a terminal: a name with escape sequences in it could otherwise rewrite what the user reads. In ``--json``
output nothing is escaped but what JSON escapes; bytes that are no UTF-8 appear as lone surrogates (``"\\udcff"``
for the byte 0xFF), which Python's ``os.fsencode`` turns back into the very bytes.

Colours only on a terminal, never with ``NO_COLOR`` or ``TERM=dumb`` (no-color.org).
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from vaultfs.errors import printable

__all__ = ["SCHEMA", "Style", "age", "clock", "emit_json", "say", "size", "table", "tell"]

SCHEMA = 1  # of all --json output; keys are only added under the same number


class Style:
    """Words with a colour, if the stream wants any."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = sys.stdout if stream is None else stream
        self.on = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.on else text

    def bold(self, text: str) -> str:
        return self._wrap("1", text)

    def dim(self, text: str) -> str:
        return self._wrap("2", text)

    def good(self, text: str) -> str:
        return self._wrap("32", text)

    def bad(self, text: str) -> str:
        return self._wrap("31", text)


def _width(text: str) -> int:
    """Columns that `text` takes on a terminal (East Asian wide characters two, combining ones none)."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], *, indent: str = "", style: Style | None = None
) -> str:
    """Aligned columns; numbers to the right. Cells are escaped here. Returns lines, each with its newline."""
    style = style or Style()
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    right = [bool(rows) and all(isinstance(row[column], int | float) for row in rows) for column in range(len(headers))]
    widths = [max(map(_width, column)) for column in zip(headers, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = []
        for text, width, numeric in zip(row, widths, right, strict=True):
            space = " " * (width - _width(text))
            padded.append(space + text if numeric else text + space)
        return "  ".join(padded).rstrip()

    text = f"{indent}{style.dim(line(headers))}\n"
    return text + "".join(f"{indent}{line(row)}\n" for row in cells)


def size(number: int) -> str:
    """Bytes for people: ``812 B``, ``4.0 KiB``, ``1.2 GiB``."""
    if number < 1024:
        return f"{number} B"
    value = float(number)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1000 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"


def age(seconds: float) -> str:
    """A duration for people: ``0.3 s``, ``45 s``, ``12 min``, ``3.5 h``, ``2 d``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 172800:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.0f} d"


def clock(text: str) -> str:
    """An ISO 8601 time in the reader's own time zone; `text` itself if it is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def emit_json(document: dict[str, Any]) -> None:
    """Print `document` with the schema number first. ASCII only: surrogates survive any terminal and pipe."""
    say(json.dumps({"schema": SCHEMA, **document}, indent=2, ensure_ascii=True))


def say(text: str) -> None:
    """One or more lines on standard output (the caller has escaped what needs it)."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def tell(text: str) -> None:
    """A remark for the user on standard error, as one ``vaultfs:`` line."""
    sys.stderr.write(f"vaultfs: {text}\n")
    sys.stderr.flush()
