"""``vaultfs mount``: bring a mount up, in the background, and return 0 only when it answers.

Two processes
-------------

The command that the user typed (the *parent*) reads the options, opens the log file, and starts itself again as
``vaultfs mount -f`` in a new session: the *daemon*. Nothing is forked from a process that has threads or an event
loop, and ``-f`` by hand is the very same program. The daemon makes the checks of `vaultfs.cli.preflight`, mounts,
and tells the parent what happens through a pipe, one JSON object a line::

    {"notice": "..."}                       something for the user's terminal (also from the mount, see `NOTICES`)
    {"remark": "..."}                       the same, but not if the user said -q
    {"mounting": "/real/mountpoint"}        the checks are passed; from now on there may be a mount to clear away
    {"ready": true}                         the mount is up, says the daemon
    {"error": {kind, message, hint, exit_code}}

READY is not believed: the parent itself asks the mount for its statfs, in a thread that may be left behind, and
looks whether the kernel has a mount of ours there. If anything fails, the parent ends the daemon, detaches a mount
that is left, prints the daemon's own words and returns its exit code.

Until it is ready, a daemon whose parent dies (Ctrl-C, a closed terminal) is ended by it or finds its pipe closed;
afterwards the two have nothing to do with each other.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec

from vaultfs.cli.output import say, tell
from vaultfs.cli.preflight import check, check_log_file
from vaultfs.config import OPTIONS, MountOptions, build_options, describe_default
from vaultfs.control import protocol
from vaultfs.control.protocol import Failure
from vaultfs.errors import ConfigError, DeviceMissingError, ExitCode, MountFailedError, VaultError, printable
from vaultfs.mountinfo import mount_at, mounts, unmount
from vaultfs.patience import within

__all__ = ["NOTICES", "configure", "default_log_file", "options_help", "run"]

NOTICES = "vaultfs.notice"
"""The logger for what the user should read on the terminal while a mount comes up: ``getLogger(NOTICES).info``."""

_REMARKS = f"{NOTICES}.remark"
"""Below it: what is good to know although all is well (`vaultfs.mount.remarks`). With -q it is only in the log."""

_MOUNT_PATIENCE = 120.0  # recovery may copy, and the fence waits for a predecessor
_ANSWER_PATIENCE = 15.0
_LOG_LIMIT = 16 << 20

_EPILOG = """\
options (-o NAME or -o NAME=VALUE, several separated by commas):
{options}
  What mount(8) and fstab add (defaults, noauto, _netdev, nofail, user, x-…) is accepted. Lists that start with +
  add to the default. docs/command-line.md tells more.

examples:
  vaultfs mount ~/Notes                        serve it in its own place: nobody can write beside the mount
  vaultfs mount ~/Notes ~/mnt                  serve it at ~/mnt
  vaultfs mount -o ro,allow_other /srv/v /mnt  read only, for all users
  vaultfs mount -f -o debug ~/Notes            in the foreground, to watch what happens
"""


def options_help() -> str:
    """The options with their values, help and defaults, as lines."""
    lines = []
    for option in OPTIONS:
        word = option.name if option.kind == "switch" else f"{option.name}={option.value}"
        default = describe_default(option)
        if len(default) > 40:
            default = "see docs/command-line.md"
        lines.append(f"  {word}\n        {option.help} (default: {default})")
    return "\n".join(lines)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG.format(options=options_help())
    parser.add_argument("vault", metavar="VAULT", help="the directory with your documents")
    parser.add_argument(
        "mountpoint",
        metavar="MOUNTPOINT",
        nargs="?",
        help="an empty directory; left away: VAULT is served in its own place",
    )
    parser.add_argument(
        "-f", "--foreground", action="store_true", help="stay in the foreground and log to the terminal"
    )
    parser.add_argument("-o", dest="options", metavar="OPTIONS", action="append", default=[], help="see below")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing when all is well")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=_MOUNT_PATIENCE,
        help=f"how long to wait for the mount (default: {_MOUNT_PATIENCE:.0f})",
    )
    # Between the two processes only:
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--log", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    # An empty string is the current directory to abspath, and a mistake in a script to everybody else.
    for path in (arguments.vault, arguments.mountpoint):
        if path == "":
            raise ConfigError("a path is empty", remedy="Name the directory; the current one is written as a dot.")
    options = build_options(arguments.vault, arguments.mountpoint or arguments.vault, arguments.options)
    if arguments.foreground:
        return _serve(options, arguments)
    return _start(options, arguments)


# --- the daemon


def _serve(options: MountOptions, arguments: argparse.Namespace) -> int:
    if arguments.log is None:
        check_log_file(options)
    report = _Report(arguments.ready_fd)
    _set_up_log(options, report)
    try:
        options = check(options, report.notice)
        if arguments.log:
            options = msgspec.structs.replace(options, log_file=arguments.log)
        try:
            from vaultfs.control.server import ControlServer
            from vaultfs.mount.server import Mount, serve
        except ImportError as error:
            raise DeviceMissingError(
                f"a library that vaultfs needs cannot be loaded: {error}",
                remedy="Run scripts/quickstart, which installs it: libfuse3 and pyfuse3.",
            ) from error
        report.send({"mounting": options.mountpoint})

        def ready() -> None:
            if arguments.ready_fd is None and not arguments.quiet:
                tell(f"{_sentence(options)}; Ctrl-C ends it")
            report.ready()

        def attend(mount: Mount) -> ControlServer:
            root = mount.context.root
            return ControlServer(mount, options, vault_dev=root.dev, vault_ino=root.ino)

        return serve(options, ready=ready, attend=attend)
    except Exception as error:
        if not report.open:
            raise  # in the foreground main tells it; in the background it belongs into the log, where stderr goes
        # What a VaultError says is meant for people and complete; whatever else this is, somebody has to find it.
        trace = None if isinstance(error, VaultError) else error
        logging.getLogger(__name__).error("the mount did not come up: %s", error, exc_info=trace)
        failure = protocol.failure_of(error)
        report.send({"error": protocol.plain(failure)})
        return failure.exit_code
    finally:
        report.close()


class _Report(logging.Handler):
    """The daemon's end of the pipe, and the handler of the logger `NOTICES`. Without a pipe it sends nothing."""

    def __init__(self, descriptor: int | None) -> None:
        super().__init__()
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_inheritable(descriptor, False)

    @property
    def open(self) -> bool:
        return self._descriptor is not None

    def send(self, message: dict[str, Any]) -> None:
        if self._descriptor is not None:
            # A parent that is gone cannot be told anything; `ready` decides about that, and the log has it all.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._descriptor, json.dumps(message).encode("ascii") + b"\n")

    def ready(self) -> None:
        """The last word. Raises MountFailedError if nobody is there to hear it: then nobody wants this mount."""
        if self._descriptor is not None:
            try:
                os.write(self._descriptor, b'{"ready": true}\n')
            except BrokenPipeError:
                raise MountFailedError("whoever started this mount is gone") from None
        self.close()

    def notice(self, text: str) -> None:
        logging.getLogger(NOTICES).info("%s", text)

    def emit(self, record: logging.LogRecord) -> None:
        self.send({"remark" if record.name == _REMARKS else "notice": record.getMessage()})

    def close(self) -> None:
        if self._descriptor is not None:
            logging.getLogger(NOTICES).removeHandler(self)
            os.close(self._descriptor)
            self._descriptor = None
        super().close()


def _set_up_log(options: MountOptions, report: _Report) -> None:
    """Everything to standard error (which is the log file in the background), and to `log-file` in the foreground."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if options.log_file and not report.open:
        try:
            handlers.append(logging.FileHandler(options.log_file, encoding="utf-8", errors="backslashreplace"))
        except OSError as error:
            raise _no_log(options.log_file, error) from None
    logging.basicConfig(
        level=logging.DEBUG if options.debug else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=handlers,
        force=True,
    )
    if report.open:
        logging.getLogger(NOTICES).addHandler(report)


# --- the parent


def _start(options: MountOptions, arguments: argparse.Namespace) -> int:
    check_log_file(options)
    log_path, log = _open_log(options)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    command = [sys.executable, "-P", "-m", "vaultfs", "mount", "-f", "--ready-fd", str(writing), "--log", log_path]
    for word in arguments.options:
        command += ["-o", word]
    command += ["--", options.vault, *([] if options.over_itself else [options.mountpoint])]
    daemon: subprocess.Popen[bytes] | None = None
    waiting = _Waiting(reading, options, log_path, quiet=arguments.quiet)
    environment = _environment()
    os.chdir("/")  # all paths are absolute by now; whoever stands in the vault is told to be beside the mount
    signal.signal(signal.SIGTERM, _ended_by)
    signal.signal(signal.SIGHUP, _ended_by)
    try:
        try:
            daemon = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environment,
                start_new_session=True,
                pass_fds=[writing],
            )
        finally:
            os.close(writing)
            os.close(log)
        waiting.until_ready(daemon, arguments.timeout)
        waiting.until_it_answers()
    except BaseException:
        if daemon is not None:
            _end(daemon)
        waiting.leave_nothing()
        raise
    finally:
        os.close(reading)
    daemon.returncode = 0  # it lives on without us: Popen must not warn about that
    if not arguments.quiet:
        say(f"{_sentence(options)}. To end it: vaultfs umount {_shell(options.mountpoint)}")
    return ExitCode.OK


def _ended_by(number: int, _frame: object) -> None:
    """A parent that is ended by ``timeout`` or a closing terminal still clears away what it began."""
    raise SystemExit(128 + number)


class _Waiting:
    """What the parent learns from the pipe."""

    def __init__(self, reading: int, options: MountOptions, log_path: str, *, quiet: bool) -> None:
        self._quiet = quiet
        self._reading = reading
        self._options = options
        self._log_path = log_path
        self._mounting: str | None = None
        self._before = {mount.mount_id for mount in mounts() if mount.ours}  # not for us to clear away

    def until_ready(self, daemon: subprocess.Popen[bytes], timeout: float) -> None:
        """Pass notices on until READY; raises what the daemon reports, or MountFailedError if it just ended."""
        deadline = time.monotonic() + timeout
        data = b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._reading], [], [], left)[0]:
                raise MountFailedError(
                    f"the mount did not come up within {timeout:g} s",
                    path=self._options.vault,
                    remedy=f"The log may tell why: {printable(self._log_path)}",
                )
            piece = os.read(self._reading, 65536)
            if not piece:
                raise self._ended(daemon)
            data += piece
            *lines, data = data.split(b"\n")
            for line in lines:
                if self._heard(json.loads(line)):
                    return

    def _heard(self, message: dict[str, Any]) -> bool:
        if "notice" in message:
            tell(printable(str(message["notice"])))
        elif "remark" in message:
            if not self._quiet:
                tell(printable(str(message["remark"])))
        elif "mounting" in message:
            self._mounting = str(message["mounting"])
        elif "error" in message:
            error = protocol.revive(protocol.decode(message["error"], Failure))
            if type(error) is VaultError:  # one that nobody foresaw
                error.remedy = f"This should not happen. The log tells more: {printable(self._log_path)}"
            raise error
        return "ready" in message

    def _ended(self, daemon: subprocess.Popen[bytes]) -> MountFailedError:
        try:
            code = daemon.wait(10)
        except subprocess.TimeoutExpired:
            how = "closed its pipe"
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return MountFailedError(
            f"the daemon {how} before the mount was up",
            path=self._options.vault,
            remedy=f"The log may tell why: {printable(self._log_path)}",
        )

    def until_it_answers(self) -> None:
        """READY was heard: see for ourselves."""
        mountpoint = self._mounting or self._options.mountpoint
        mount = mount_at(mountpoint)
        if mount is None or not mount.ours:
            raise MountFailedError("the daemon is ready, but no mount is to be seen here", path=mountpoint)
        try:
            within(_ANSWER_PATIENCE, lambda: os.statvfs(mountpoint))
        except (TimeoutError, OSError) as error:
            raise MountFailedError(
                f"the mount is there, but does not answer ({getattr(error, 'strerror', None) or error})",
                path=mountpoint,
                remedy=f"The log may tell why: {printable(self._log_path)}",
            ) from None

    def leave_nothing(self) -> None:
        """Detach a mount that the failed daemon left, and only that."""
        if self._mounting is None:
            return
        mount = mount_at(self._mounting)
        if mount is not None and mount.ours and mount.mount_id not in self._before:
            try:
                unmount(self._mounting, lazy=True)
            except OSError as error:
                tell(f"{printable(self._mounting)}: a mount is left and cannot be detached ({error.strerror})")


def _end(daemon: subprocess.Popen[bytes]) -> None:
    """End a daemon that has not become ready: politely, then surely. It has its own chance to unmount first."""
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        if daemon.poll() is not None:
            return
        daemon.send_signal(number)
        try:
            daemon.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def _environment() -> dict[str, str]:
    """The environment, so that the daemon finds the same vaultfs as we are, also one that is not installed."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(sys.modules["vaultfs"].__file__ or "")))
    environment = dict(os.environ)
    if os.path.basename(package) not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    return environment


def _sentence(options: MountOptions) -> str:
    where = "in its own place" if options.over_itself else f"on {printable(options.mountpoint)}"
    return f"{printable(options.vault)} is served {where}"


def _shell(path: str) -> str:
    import shlex

    return printable(shlex.quote(path))


# --- the log file


def default_log_file(mountpoint: str) -> str:
    """``NAME-HASH.log`` in the user's state directory: to be recognized by people, and one for each mountpoint."""
    from platformdirs import user_state_dir

    name = re.sub(r"[^A-Za-z0-9._-]+", "_", os.path.basename(mountpoint)).strip("._")[:40] or "vault"
    digest = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:8]
    return os.path.join(user_state_dir("vaultfs", appauthor=False), f"{name}-{digest}.log")


def _open_log(options: MountOptions) -> tuple[str, int]:
    """The log file's path and a descriptor to append to it. Private: paths of documents are written there.

    A file that has grown big is set aside as ``.1`` first; the daemon itself never opens the log again, since it
    may lie below its own mount.
    """
    path = options.log_file or default_log_file(options.mountpoint)
    try:
        if options.log_file is None:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_size > _LOG_LIMIT:
                    os.replace(path, f"{path}.1")
        return path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY, 0o600)
    except OSError as error:
        raise _no_log(path, error) from None


def _no_log(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"the log file cannot be written: {error.strerror}",
        path=path,
        remedy="Name another one: vaultfs mount -o log-file=FILE …",
    )
