"""The ``vaultfs`` command: finds the command's file, runs it, and turns errors into words and exit codes.

Each command is a module with ``configure(parser)`` (its arguments and help) and ``run(arguments) -> int`` (its exit
code). Only the module of the command that was asked for is imported: ``vaultfs --help`` must not wait for what it
does not use. `build_parser` without a command name configures all of them (for documentation and completion).

An error is told in two lines on standard error, what happened and what to do about it::

    vaultfs: /home/ann/Nots: There is no such vault.
      hint: Check the spelling, or make the directory first: mkdir DIRECTORY.

and the exit code is that of the one table in `vaultfs.errors`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from vaultfs import __version__

__all__ = ["COMMANDS", "Command", "build_parser", "main"]


class Command(NamedTuple):
    module: str
    summary: str


COMMANDS = {
    "mount": Command("vaultfs.cli.mount", "serve a vault: every save atomic, locked and recoverable"),
    "umount": Command("vaultfs.cli.umount", "end a mount when all saves are in the vault"),
    "status": Command("vaultfs.cli.status", "what is mounted, who writes what, what happened so far"),
    "locks": Command("vaultfs.cli.locks", "which path locks stand, who holds them; clear away what nobody holds"),
    "drafts": Command("vaultfs.cli.drafts", "list the drafts that could not be published, or save one elsewhere"),
}

_EPILOG = """\
examples:
  vaultfs mount ~/Notes              serve ~/Notes in its own place
  vaultfs mount ~/Notes ~/mnt        serve it at ~/mnt
  vaultfs status                     look at what is going on
  vaultfs umount ~/Notes             end it

vaultfs COMMAND --help tells more about each command.
"""


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors in the form of all other errors of this program."""

    def error(self, message: str) -> NoReturn:
        from vaultfs.errors import ExitCode, printable

        words = printable(message)
        sys.stderr.write(f"vaultfs: {words}\n  hint: Run `{self.prog} --help` for what is understood.\n")
        raise SystemExit(ExitCode.USAGE)


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser; with the arguments of the command `only`, or of all commands if that is None."""
    parser = _Parser(
        prog="vaultfs",
        description="Mount a folder of documents so that every save in it is atomic, locked and recoverable.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vaultfs {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if only is None or only == name:
            module = importlib.import_module(command.module)
            module.configure(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # A terminal whose encoding lacks a character, or a name that is no text, must not turn into a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    chosen = words[0] if words and words[0] in COMMANDS else ""
    if chosen == "drafts":
        words = _drafts_shorthand(words)
    try:
        parsed = build_parser(chosen).parse_args(words)
        code: int = parsed.run(parsed)
        sys.stdout.flush()  # here, where a closed pipe can still be told from success
        return code
    except BrokenPipeError:
        # `vaultfs status | head -1`: whoever reads has enough. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as if SIGPIPE had ended it
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130
    except Exception as error:
        return report(error)


def _drafts_shorthand(words: list[str]) -> list[str]:
    """``drafts [PATH]`` is ``drafts list [PATH]``; a path named like a subcommand is written ``./list``."""
    following = words[1] if len(words) > 1 else ""
    return words if following in ("list", "save-as", "-h", "--help") else [words[0], "list", *words[1:]]


def report(error: Exception) -> int:
    """Tell `error` on standard error; returns its exit code. An error that nobody foresaw shows its traceback."""
    from vaultfs.errors import VaultError, exit_code_of, hint_of, words_of

    words = words_of(error)
    if not isinstance(error, VaultError | OSError):
        import traceback

        traceback.print_exception(error)
        words = f"this should not happen, and is a fault of vaultfs: {words}"
    sys.stderr.write(f"vaultfs: {words}\n  hint: {hint_of(error)}\n")
    return exit_code_of(error)


if __name__ == "__main__":
    sys.exit(main())
