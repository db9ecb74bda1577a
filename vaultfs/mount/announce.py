"""Saves → watchers: tells the companion process which names changed.

`Announcer.announce` is one write to a pipe: it never waits, may be called from any thread, and costs the same whether
somebody watches or not. Everything else (is anybody watching, at most once per name, the chmod through the mount)
is done by the process described in `vaultfs.mount.companion`, which also says why it is a process.

Calling sequence::

    announcer = Announcer(b"/home/me/notes", os.stat(mountpoint).st_dev, shared=allow_other)
    announcer.start()                        # in the daemon's main thread, once the mount answers
    …
    announcer.announce(b"a/note.md", 0o644)  # after a publish, with no lock of ours held, though it would not matter
    …
    announcer.deleted(b"a/old.md")           # after a deletion outside, when the kernel has forgotten the name
    …
    announcer.stop()                         # before the daemon unmounts, in a worker thread

What the handlers owe it, for requests with ``ctx.pid == announcer.thread_id``, also while `stop` is at work:

- setattr: reply the attributes, change nothing;
- lookup of `secret_name` in the root: ECANCELED;
- lookup of any other name that does not exist: an entry of some regular file with a number that nothing else has,
  entry timeout 0: the kernel sends an unlink only for what it believes to exist;
- unlink: if the name exists, EBUSY (it came back); otherwise say yes. *Never* remove anything;
- everything else that would change something: EPERM. It does not happen.

A mount that lacks the second to fourth is safe: the unlink is then not sent.

What is not promised: announcements are hints. One is lost if the companion cannot be started or died, if thousands
wait because the mount hangs, if the path is longer than 4000 bytes, and on a mount that is read-only for the kernel
(chmod is refused before it comes to us).
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import select
import subprocess
import sys
import threading
import time

from vaultfs.mount import companion

__all__ = ["Announcer"]

log = logging.getLogger(__name__)

_PIPE_SIZE = 1 << 20  # bytes: some ten thousand names, the most an unprivileged process may ask for
_START_AGAIN = 30.0  # seconds before a companion that died is started again


class Announcer:
    """The daemon's end of the pipe to its companion; owns the process and the pipe, and `stop` releases both."""

    def __init__(self, mountpoint: bytes, mount_dev: int, *, shared: bool = True) -> None:
        """Starts nothing yet.

        `mountpoint` is absolute; `mount_dev` is the ``st_dev`` of the mounted file system; `shared` says that other
        users may use the mount (allow_other).
        """
        self._mountpoint = mountpoint
        self._dev = mount_dev
        self._shared = shared
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._thread = 0
        self._started_at = 0.0
        self.secret_name = b".vaultfs-" + secrets.token_hex(16).encode()  # reserved on every mount
        self._guard = threading.Lock()  # of all of the above: `announce` may come from the invalidating thread
        self._owner = 0
        self.lost = 0  # announcements that could not be handed over; for the counters of `vaultfs status`

    @property
    def thread_id(self) -> int:
        """The thread id by which the companion's requests are known (``ctx.pid``); 0 while there is none.

        It stays known for as long as the process lives, also after `stop`: a request of it that the daemon did not
        recognize would be carried out. And it is forgotten before the process is reaped, so that the kernel cannot
        give the number to a stranger, whose requests would then not be.
        """
        return self._thread

    def start(self) -> bool:
        """Start the companion; False (and a line in the log) if that fails: the mount works without.

        Call it in the daemon's main thread: the companion watches over the thread that started it.
        """
        with self._guard:
            self._owner = threading.get_ident()
            return self._start()

    def _start(self) -> bool:
        self._started_at = time.monotonic()
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(writing, False)
            try:
                fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
            except OSError as error:
                # Over the user's pipe quota: the usual 64 KiB must do.
                log.debug("the announcing pipe keeps its usual size: %s", error)
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    companion.__file__,
                    os.fsdecode(self._mountpoint),
                    str(self._dev),
                    str(os.getpid()),
                    "shared" if self._shared else "own",
                    os.fsdecode(self.secret_name),
                ],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Ctrl-C in the terminal is the daemon's business
            )
        except OSError as error:
            os.close(writing)
            log.warning("programs that watch will not be told of saves: the companion does not start: %s", error)
            return False
        finally:
            os.close(reading)
        self._pipe = writing
        self._thread = self._process.pid
        return True

    def announce(self, path: bytes, mode: int) -> None:
        """Tell whoever watches that `path` (vault-relative, b"" is the root), whose mode is `mode`, has changed.

        Never waits and never fails. Any thread.
        """
        self._send(b"%o %s\0" % (mode & 0o7777, path))

    def deleted(self, path: bytes) -> None:
        """Tell whoever watches that the file or directory `path` is gone; as `announce`.

        Deletions made through the mount are told by the kernel.
        """
        self._send(b"gone %s\0" % path)

    def _send(self, message: bytes) -> None:
        if len(message) > select.PIPE_BUF:  # would not be written in one piece; no program watches so deep
            self.lost += 1
            return
        with self._guard:
            if self._pipe < 0:
                self.lost += 1
                return
            try:
                os.write(self._pipe, message)
            except BlockingIOError:  # thousands wait already: the mount hangs, or their watchers are long flooded
                self.lost += 1
            except BrokenPipeError:
                self.lost += 1
                self._died()

    def _died(self) -> None:
        """The companion ended by itself (killed, out of memory): start another, but not again and again.

        The pipe broke, so all its threads are past making requests.
        """
        if threading.get_ident() != self._owner or time.monotonic() - self._started_at < _START_AGAIN:
            return  # a later announcement of the main thread will find it dead again
        os.close(self._pipe)
        self._pipe = -1
        log.warning("the companion process ended unexpectedly; starting another")
        if self._reap(limit=1.0):
            self._start()

    def _reap(self, limit: float) -> bool:
        """Wait at most `limit` seconds until the companion has ended, disown its thread id, and only then reap it."""
        process = self._process
        if process is None:
            return True
        deadline = time.monotonic() + limit
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        self._thread = 0
        process.wait()
        self._process = None
        return True

    def stop(self, limit: float = 2.0) -> bool:
        """End the companion, waiting at most `limit` seconds; True if it ended. What was not announced is dropped.

        Idempotent. Not to be called from the loop while it has to answer requests: the companion may be waiting for
        one. A companion stuck in the mount keeps its `thread_id` and ends when the mount goes.
        """
        with self._guard:
            if self._pipe >= 0:
                os.close(self._pipe)
                self._pipe = -1
            if self._reap(limit):
                return True
            if self._process is not None:
                self._process.kill()
                log.warning("the companion process %d is stuck in the mount and ends with it", self._process.pid)
            return False
