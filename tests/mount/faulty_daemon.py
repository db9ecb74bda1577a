"""`vaultfs`, with a fault planted in its handlers: run as a program in the place of `python -m vaultfs`.

A handler whose name stands in the file ~/plant (``NAME KIND``; HOME is the test's own) raises instead of doing its
work; those that nobody may refuse (release, releasedir) raise after it, so that the test sees the fault and not its own
leak.

The fault is put *inside* the guard that is installed on the class, into the cell where the guard keeps the handler:
what is tried is the real guard around the real handler, as pyfuse3 calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

AFTERWARDS = ("release", "releasedir")
KINDS: dict[str, Callable[[str], BaseException]] = {
    "value": lambda name: ValueError(f"planted in {name}"),
    "key": lambda name: KeyError(f"planted in {name}"),
    "assertion": lambda name: AssertionError(f"planted in {name}"),
    "oserror": lambda name: OSError(f"planted in {name}"),  # without an errno: nothing a program could be told
    "recursion": lambda name: RecursionError(f"planted in {name}"),
    "group": lambda name: ExceptionGroup(f"planted in {name}", [ValueError("one"), ValueError("two")]),
}


def _planted(name: str) -> BaseException | None:
    try:
        words = (Path.home() / "plant").read_text().split()
    except FileNotFoundError:  # nothing planted yet
        return None
    return KINDS[words[1]](name) if words and words[0] == name else None


def _with_fault(name: str, handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def faulty(*arguments: Any, **keywords: Any) -> Any:
        failure = _planted(name)
        if failure is not None and name in AFTERWARDS:
            await handler(*arguments, **keywords)
        if failure is not None:
            raise failure
        return await handler(*arguments, **keywords)

    faulty.__name__ = name
    return faulty


def plant() -> None:
    """Plants the faults into `vaultfs.mount.operations.Operations`."""
    from vaultfs.mount.operations import HANDLERS, Operations

    for name in HANDLERS:
        guard: Any = vars(Operations)[name]
        cells = dict(zip(guard.__code__.co_freevars, guard.__closure__, strict=True))
        cells["handler"].cell_contents = _with_fault(name, guard.__wrapped__)


if __name__ == "__main__":
    from vaultfs.cli.main import main

    if "mount" in sys.argv[1:2]:
        plant()
    sys.exit(main())
