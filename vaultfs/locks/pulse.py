"""A thread that calls something again and again: for owners of locks and fences that have no timer of their own.

The mount has one (trio) and does not need this; a library user's program may sleep in `input` for minutes while it
holds a lock that others judge by its heartbeat.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from vaultfs.errors import VaultError

__all__ = ["Pulse"]

_log = logging.getLogger(__name__)


class Pulse:
    """Calls `beat` every `every` seconds in a thread of its own until `stop`, or until it fails for good.

    A VaultError ends it (the fence is lost: beating on would be fighting back) and an OSError does not (a full disk
    may have room again at the next beat). Either is kept in `failure` and logged; the owner finds out at its next
    `assert_owned`, which looks itself. The thread is a daemon: it never keeps a program from ending.
    """

    def __init__(self, beat: Callable[[], None], every: float, name: str) -> None:
        self.failure: Exception | None = None
        self._beat = beat
        self._every = every
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._every):
            try:
                self._beat()
            except VaultError as error:
                self.failure = error
                _log.error("%s stops: %s", self._thread.name, error)
                return
            except OSError as error:
                self.failure = error
                _log.error("%s failed and goes on: %s", self._thread.name, error)

    def stop(self) -> None:
        """No beat begins after this returns; a beat that is under way is waited for. Idempotent."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
