"""What reaches the terminal: nothing that could rewrite it, everything aligned; and JSON that any name survives."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vaultfs.cli import output
from vaultfs.cli.main import COMMANDS, build_parser, main
from vaultfs.errors import ExitCode


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_and_undecodable_bytes_are_escaped_in_tables() -> None:
    text = output.table(("FILE",), [["a\x1b[31mred\n\x07\x9b\u202e\udcff"]], style=output.Style(io.StringIO()))
    assert text.count("\n") == 2
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "\\x1b[31mred\\n\\x07" in text
    assert "\\xff" in text


def test_columns_are_aligned_also_for_wide_and_combining_characters() -> None:
    rows = [["日本", "x"], ["e\u0301", "x"], ["abcdef", "x"]]
    text = output.table(("NAME", "Y"), rows, style=output.Style(io.StringIO()))
    columns = [output._width(line.rpartition("x")[0]) for line in text.splitlines()[1:]]
    assert columns == [8, 8, 8]


def test_numbers_stand_to_the_right() -> None:
    assert output.table(("N",), [[5], [1234]], style=output.Style(io.StringIO())).splitlines()[1] == "   5"


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert output.Style(Terminal()).bold("x") == "\x1b[1mx\x1b[0m"
    assert output.Style(io.StringIO()).bold("x") == "x"
    monkeypatch.setenv("TERM", "dumb")
    assert output.Style(Terminal()).bold("x") == "x"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.Style(Terminal()).bold("x") == "x"


def test_json_is_ascii_and_gives_the_very_bytes_back(capsys: pytest.CaptureFixture[str]) -> None:
    name = b"\xff\x80\x1b caf\xc3\xa9"
    output.emit_json({"path": os.fsdecode(name)})
    text = capsys.readouterr().out
    assert text.isascii()
    document = json.loads(text)
    assert document["schema"] == output.SCHEMA
    assert os.fsencode(document["path"]) == name


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes_for_people(number: int, text: str) -> None:
    assert output.size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59, "59 s"), (600, "10 min"), (9000, "2.5 h"), (864000, "10 d")]
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert output.age(seconds) == text


def test_times_are_shown_in_the_readers_zone_and_nonsense_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    try:
        assert output.clock("2026-11-30T10:00:00Z") == "2026-11-30 12:00:00"
        assert output.clock("2026-11-30T10:00:00") == "2026-11-30 12:00:00"
        assert output.clock("a while ago") == "a while ago"
    finally:
        monkeypatch.undo()
        time.tzset()


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vaultfs", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.parametrize(
    "words", [(), ("fly",), ("mount",), ("mount", "--fast", "/x"), ("umount",), ("drafts", "save-as", "x")]
)
def test_wrong_words_are_told_in_two_lines_with_code_2(words: tuple[str, ...]) -> None:
    done = command(*words)
    assert done.returncode == ExitCode.USAGE
    problem, hint = done.stderr.splitlines()
    assert problem.startswith("vaultfs: ")
    assert hint.startswith("  hint: Run `vaultfs")


def test_help_needs_nothing_heavy() -> None:
    done = command("--help")
    assert done.returncode == 0
    for name in COMMANDS:
        assert f"    {name} " in done.stdout
    heavy = ("msgspec", "rich", "psutil", "trio", "pyfuse3", "subprocess")
    probe = (
        "import sys\nfrom vaultfs.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        f"print('\\nHEAVY', [module for module in {heavy} if module in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True
    )
    assert "HEAVY []" in done.stdout


def test_every_command_has_a_summary_examples_and_its_own_arguments() -> None:
    for name in COMMANDS:
        parser = build_parser(name)
        (group,) = [action for action in parser._actions if isinstance(action.choices, dict)]
        assert isinstance(group.choices, dict)
        text = group.choices[name].format_help()
        assert "examples:" in text, name


def test_output_into_a_closed_pipe_is_no_error_message(tmp_path: Path) -> None:
    shell = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m vaultfs status --json | true"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "VAULTFS_RUNTIME_DIR": str(tmp_path / "none")},
        check=False,
    )
    assert shell.stderr == ""
    assert shell.returncode in (0, 141)  # 0 if it had written everything before the pipe was closed


def test_a_terminal_without_unicode_is_no_traceback() -> None:
    done = command("mount", "/nö/☃", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == ExitCode.NOT_FOUND
    assert "\\u2603" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_that_nobody_foresaw_shows_where_it_happened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_arguments: object) -> int:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("vaultfs.cli.status.run", broken)
    assert main(["status"]) == ExitCode.FAILED
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "fault of vaultfs: planted" in text


def test_drafts_without_an_action_lists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VAULTFS_RUNTIME_DIR", str(tmp_path / "run"))
    for words in (["drafts", "--json"], ["drafts", "list", "--json"]):
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out) == {"schema": 1, "drafts": []}
    assert main(["drafts", str(tmp_path)]) == ExitCode.NOT_FOUND
    assert "not in a vault" in capsys.readouterr().err
