"""Looking at something that may never answer.

A ``stat`` on a mount whose daemon hangs waits until somebody kills one of the two. Such calls are made in a
thread that may be left behind: the kernel lets a process that waits for FUSE be killed, so a thread that still
hangs when the program ends goes with it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["real_path", "within"]

_T = TypeVar("_T")


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """`call()`, or TimeoutError if it takes longer than `seconds`. What it raises is raised here."""
    results: list[_T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed to the waiting thread, which raises it
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


def real_path(path: str, seconds: float = 5.0) -> str:
    """`path` absolute and without links, as far as it exists.

    The directory it stands in is resolved first and then, if there is time, the last part: of a mountpoint whose
    daemon hangs or died the name is known all the same.
    """
    path = os.path.abspath(path)
    parent = within(seconds, lambda: os.path.realpath(os.path.dirname(path)))
    plain = os.path.join(parent, os.path.basename(path)) if path != "/" else path
    try:
        return within(seconds, lambda: os.path.realpath(plain))
    except TimeoutError:
        return plain
