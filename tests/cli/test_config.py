"""Options: what `-o` understands, what it refuses, and that help and documentation say the same as the parser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vaultfs.cli.main import build_parser
from vaultfs.cli.mount import options_help
from vaultfs.config import (
    DEFAULT_LIVE,
    IGNORED_OPTIONS,
    KERNEL_OPTIONS,
    OPTIONS,
    MountOptions,
    build_options,
    describe_default,
    parse_duration,
    parse_options,
    parse_size,
)
from vaultfs.errors import ConfigError

COMMAND_LINE_MD = Path(__file__).parents[2] / "docs" / "command-line.md"


def options(*words: str) -> MountOptions:
    return build_options("/v", "/m", words)


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        options(*words)
    return f"{caught.value} — {caught.value.remedy}"


def test_without_options_the_contracts_defaults_hold() -> None:
    given = options()
    assert given == MountOptions("/v", "/m")
    assert (given.symlinks, given.hardlinks, given.conflict, given.durability) == (
        "contained",
        "read",
        "copy",
        "ordered",
    )
    assert (given.live_above, given.idle_publish, given.lock_timeout, given.lock_stale) == (1 << 30, 5.0, 5.0, 10.0)
    assert given.private_locks == [".git/**", ".hg/**", ".svn/**"]


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("symlinks=refuse", "symlinks", "refuse"),
        ("hardlinks=break", "hardlinks", "break"),
        ("conflict=fail", "conflict", "fail"),
        ("durability=strict", "durability", "strict"),
        ("live-above=2GiB", "live_above", 2 << 30),
        ("live_above=0", "live_above", 0),
        ("idle-publish=0", "idle_publish", 0.0),
        ("lock-timeout=200ms", "lock_timeout", 0.2),
        ("lock-stale=1m", "lock_stale", 60.0),
        ("live=*.a:*.b", "live", ["*.a", "*.b"]),
        ("live=+*.a", "live", [*DEFAULT_LIVE, "*.a"]),
        ("live=a\\:b:c", "live", ["a:b", "c"]),
        ("live=a\\,b", "live", ["a,b"]),
        ("private-locks=x/**", "private_locks", ["x/**"]),
        ("allow_other", "allow_other", True),
        ("allow-other", "allow_other", True),
        ("ro", "ro", True),
        ("ro,rw", "ro", False),
        ("rw,ro", "ro", True),
        ("nonempty", "nonempty", True),
        ("noexec,max_read=4096", "fuse_options", ["noexec", "max_read=4096"]),
        ("allow=/a:/b", "symlinks", "allow"),
        ("log-file=/x/y.log", "log_file", "/x/y.log"),
        ("", "ro", False),
        (",,", "ro", False),
    ],
)
def test_options_are_understood(text: str, field: str, value: object) -> None:
    assert getattr(options(text), field) == value


def test_words_of_fstab_and_mount_change_nothing() -> None:
    words = "defaults,rw,dev,suid,noauto,user,_netdev,nofail,x-systemd.automount,x-systemd.idle-timeout=5,X-a,comment=z"
    assert options(words) == MountOptions("/v", "/m")


def test_later_words_win_and_repeated_additions_add_up() -> None:
    assert options("lock-timeout=1s", "lock-timeout=2s").lock_timeout == 2.0
    assert options("live=a", "live=+b").live == ["a", "b"]
    assert options("live=+b,live=+c").live == [*DEFAULT_LIVE, "b", "c"]


def test_durability_may_be_set_for_some_files() -> None:
    given = options("durability=strict,durability=relaxed:*.tmp:build/**")
    assert given.durability == "strict"
    assert [given.durability_of(path) for path in ("a.md", "x/y.tmp", "build/a", "x/build")] == [
        *("strict", "relaxed", "relaxed", "strict")
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lock-timout=5s", "unknown option lock-timout (did you mean lock-timeout?)"),
        ("allow-ohter", "did you mean allow_other?"),
        ("no_auto", "did you mean noauto?"),
        ("bogus", "The options are: symlinks, allow,"),
        ("=x", "unknown option (empty)"),
        ("\x1b[2J", "unknown option \\x1b[2J"),
        ("symlinks=maybe", "option symlinks: maybe is not understood — It takes one of contained, allow, refuse."),
        ("ro=perhaps", "It takes one of on, off."),
        ("live-above=2 parsecs", "option live-above: 2 parsecs is not understood"),
        ("live-above=-1", "option live-above: -1"),
        ("lock-timeout=-5", "option lock-timeout: -5"),
        ("lock-timeout=soon", "5s"),
        ("lock-timeout=9999999999999", "option lock-timeout"),
        ("lock-timeout", "option lock-timeout needs a value — Write lock-timeout=TIME."),
        ("live=", "option live needs a value"),
        ("live=:", "option live"),
        ("durability=often", "ordered, strict or relaxed"),
        ("noexec=1", "option noexec=1"),
        ("max_read=x", "option max_read=x"),
        ("symlinks=allow", "needs a list of targets"),
        ("symlinks=refuse,allow=/a", "contradict each other"),
        ("allow=a", "a is not an absolute path"),
        ("lock-stale=0.1", "below one second"),
    ],
)
def test_what_is_not_understood_is_named_with_what_is(text: str, words: str) -> None:
    assert words in refused(text)


@given(st.text(max_size=40))
def test_any_text_is_either_understood_or_a_config_error(text: str) -> None:
    try:
        settings = parse_options(text)
    except ConfigError as error:
        assert error.remedy or error.message
    else:
        assert set(settings) <= set(MountOptions.__struct_fields__)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("1k", 1024),
        ("1KiB", 1024),
        ("1kB", 1000),
        ("1.5 MiB", 3 << 19),
        ("2G", 2 << 30),
        ("7b", 7),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("1.5", 1.5), ("250ms", 0.25), ("2 min", 120), ("1h", 3600), ("1d", 86400), ("3S", 3)]
)
def test_durations(text: str, value: float) -> None:
    assert parse_duration(text) == value


@pytest.mark.parametrize("text", ["", "x", "1x", "--1", "1e3", "nan", "inf", "1s2"])
def test_nonsense_is_neither_size_nor_duration(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with pytest.raises(ValueError):
            parse(text)


def test_relative_paths_become_absolute_and_the_vault_over_itself_is_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = build_options("v", "./v/", ["log-file=x.log"])
    assert given.vault == given.mountpoint == str(tmp_path / "v")
    assert given.over_itself
    assert given.log_file == str(tmp_path / "x.log")


def test_every_policy_field_has_its_line_in_the_schema() -> None:
    elsewhere = {"vault", "mountpoint", "fuse_options", "durability_globs"}
    assert {option.field for option in OPTIONS} == set(MountOptions.__struct_fields__) - elsewhere
    assert not {option.name for option in OPTIONS} & (KERNEL_OPTIONS | IGNORED_OPTIONS)


def table_line(option: object) -> str:
    values = option.value.replace("|", " · ")  # type: ignore[attr-defined]
    default = describe_default(option)  # type: ignore[arg-type]
    default = "see below" if len(default) > 40 else f"`{default}`"
    return f"| `{option.name}` | {values} | {default} | {option.help} |"  # type: ignore[attr-defined]


def test_the_documented_table_of_options_is_the_schema() -> None:
    text = COMMAND_LINE_MD.read_text(encoding="utf-8")
    documented = [line for line in text.splitlines() if re.match(r"\| `[a-z_-]+` \| .* \| .* \| .* \|$", line)]
    assert documented == [table_line(option) for option in OPTIONS]
    for glob in DEFAULT_LIVE:
        assert f"`{glob}`" in text


def test_help_names_every_option_and_the_documentation_every_command_and_flag() -> None:
    help_text = options_help()
    documentation = COMMAND_LINE_MD.read_text(encoding="utf-8")
    for option in OPTIONS:
        assert f"  {option.name}" in help_text
    pending = [build_parser()]
    while pending:
        parser = pending.pop()
        for action in parser._actions:
            for flag in action.option_strings:
                if flag not in ("-h", "--help", "-l", "--foreground", "--quiet") and action.help != "==SUPPRESS==":
                    assert flag in documentation, flag
            if isinstance(action.choices, dict):
                for name, subparser in action.choices.items():
                    assert name in documentation
                    pending.append(subparser)
