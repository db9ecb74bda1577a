"""What a mount can be told: one schema for the command line, `-o` and (later) configuration files.

`MountOptions` is the record that everything below the command line works with; its field names are the option
names of docs/command-line.md with underscores, its defaults are those of the contract. `OPTIONS` is the schema:
one line for each option with its kind, the placeholder of its value and its help. The help text of
``vaultfs mount``, the options table of the documentation (a test compares them), the parser of ``-o`` and the
messages about wrong values all come from that one table, so they cannot drift apart.

How ``-o`` is read
------------------

``-o`` takes the words of mount(8): ``name`` or ``name=value``, separated by commas, ``\\,`` for a comma inside a
value. Lists are separated by colons (``live=*.db:*.log``, ``\\:`` for a colon inside); a list that starts with
``+`` adds to what is there already instead of replacing it (``live=+*.journal``). Sizes are bytes or have a unit
(``1GiB``, ``500k``), durations are seconds or have one (``5s``, ``200ms``, ``1m``). A dash and an underscore in a
name are the same. What fstab and mount(8) add for themselves (``defaults``, ``noauto``, ``_netdev``, ``user``,
``x-systemd.automount`` …) is accepted and means nothing here.

The later word wins, as with mount(8). An unknown name or a value that cannot be understood raises `ConfigError`
that says which, what was probably meant, and what there is; nothing is ever ignored silently, because a
misspelt ``owner-onyl`` would be a policy that is not there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from vaultfs.errors import ConfigError, printable

__all__ = [
    "DEFAULT_LIVE",
    "DEFAULT_PRIVATE_LOCKS",
    "IGNORED_OPTIONS",
    "KERNEL_OPTIONS",
    "OPTIONS",
    "MountOptions",
    "Option",
    "build_options",
    "describe_default",
    "parse_duration",
    "parse_options",
    "parse_size",
]

DEFAULT_LIVE = (
    *("*.db", "*.db-*", "*.sqlite", "*.sqlite-*", "*.sqlite3", "*.sqlite3-*", "*.mdb", "*.duckdb", "*.wal"),
    *("*.gdbm", "*.tdb", "*.img", "*.qcow2", "*.vmdk", "*.vdi", "*.log", ".*.sw?"),
)
DEFAULT_PRIVATE_LOCKS = (".git/**", ".hg/**", ".svn/**")

DurabilityName = Literal["ordered", "strict", "relaxed"]
SymlinkPolicy = Literal["contained", "allow", "refuse"]
HardlinkPolicy = Literal["read", "refuse", "break"]
ConflictPolicy = Literal["copy", "fail", "overwrite"]


class MountOptions(msgspec.Struct, frozen=True):
    """Everything a daemon is told about one mount. Sizes are bytes, durations seconds, paths absolute.

    `vault` and `mountpoint` are file system strings (undecodable bytes as surrogates: ``os.fsencode`` them).
    """

    vault: str
    mountpoint: str
    symlinks: SymlinkPolicy = "contained"
    allow: list[str] = []  # outside targets that links may have; only with symlinks="allow"
    hardlinks: HardlinkPolicy = "read"
    live: list[str] = msgspec.field(default_factory=lambda: list(DEFAULT_LIVE))
    live_above: int = 1 << 30
    idle_publish: float = 5.0  # 0: never
    conflict: ConflictPolicy = "copy"
    durability: DurabilityName = "ordered"
    durability_globs: list[tuple[DurabilityName, str]] = []  # exceptions from `durability`; the first match decides
    lock_timeout: float = 5.0
    lock_stale: float = 10.0
    private_locks: list[str] = msgspec.field(default_factory=lambda: list(DEFAULT_PRIVATE_LOCKS))
    shared: bool = False
    allow_other: bool = False
    ro: bool = False
    nonempty: bool = False
    debug: bool = False
    log_file: str | None = None
    fuse_options: list[str] = []  # words for the kernel's mount call, passed on as they are

    @property
    def over_itself(self) -> bool:
        """True if the vault is mounted over itself, so that no second path to it exists."""
        return self.vault == self.mountpoint

    def durability_of(self, path: str) -> DurabilityName:
        """The durability for the vault-relative `path`: that of the first matching glob, or the general one."""
        if self.durability_globs:
            from fnmatch import fnmatchcase

            name = path.rpartition("/")[2]
            for level, glob in self.durability_globs:
                if fnmatchcase(path if "/" in glob else name, glob):
                    return level
        return self.durability


class Option(NamedTuple):
    """One line of the schema."""

    name: str  # as written in -o and in the documentation
    kind: Literal["switch", "choice", "size", "duration", "globs", "paths", "path", "durability"]
    value: str  # placeholder of the value in help texts; for a choice: the values themselves
    help: str

    @property
    def field(self) -> str:
        """The attribute of `MountOptions`."""
        return self.name.replace("-", "_")


OPTIONS: tuple[Option, ...] = (
    Option("symlinks", "choice", "contained|allow|refuse", "which symbolic links may be made and followed"),
    Option("allow", "paths", "DIR[:DIR…]", "targets outside the vault that links may have (implies symlinks=allow)"),
    Option("hardlinks", "choice", "read|refuse|break", "files with several hard links: only read, refuse, or break"),
    Option("live", "globs", "GLOB[:GLOB…]", "files served in place, without drafts (databases, logs, lock files)"),
    Option("live-above", "size", "SIZE", "edited files above this size are live where there is no reflink"),
    Option("idle-publish", "duration", "TIME", "publish an open file that has been idle for so long; 0: never"),
    Option("conflict", "choice", "copy|fail|overwrite", "what an edit does when somebody else was faster"),
    Option("durability", "durability", "LEVEL[:GLOB…]", "ordered, strict or relaxed; with globs: for those files only"),
    Option("lock-timeout", "duration", "TIME", "how long a save waits for a file's lock"),
    Option("lock-stale", "duration", "TIME", "age at which the lock of a dead owner may be cleared"),
    Option("private-locks", "globs", "GLOB[:GLOB…]", "files whose locks are kept in the state directory"),
    Option("shared", "switch", "on|off", "several hosts serve this vault: no fence, short cache times"),
    Option("allow_other", "switch", "on|off", "other users may use the mount, within the files' permissions"),
    Option("ro", "switch", "on|off", "read only"),
    Option("nonempty", "switch", "on|off", "allow a mountpoint that is not empty (its content is hidden)"),
    Option("debug", "switch", "on|off", "log every request"),
    Option("log-file", "path", "FILE", "where the daemon logs; default: one file for each mount in the state home"),
)

# Words of mount(8), fstab and libfuse that are accepted. Those in KERNEL_OPTIONS are passed on to the kernel; the
# others say what is so anyway, or are meant for the programs that read fstab.
KERNEL_OPTIONS = frozenset({"noexec", "nosuid", "nodev", "noatime", "sync", "dirsync", "max_read"})
IGNORED_OPTIONS = frozenset(
    {"defaults", "rw", "dev", "suid", "exec", "async", "atime", "relatime", "strictatime", "nodiratime", "diratime"}
    | {"norelatime", "nostrictatime", "lazytime", "nolazytime", "auto", "noauto", "user", "nouser", "users", "owner"}
    | {"group", "_netdev", "nofail", "comment", "default_permissions", "fsname", "subtype", "silent", "loud"}
)

_CHOICES = {option.name: tuple(option.value.split("|")) for option in OPTIONS if option.kind == "choice"}
_DURABILITIES = ("ordered", "strict", "relaxed")
_BY_NAME = {option.name.replace("_", "-"): option for option in OPTIONS}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|sec|min|m|h|d|)", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 366 * 86400.0


def parse_size(text: str) -> int:
    """Bytes of ``1GiB``, ``500k``, ``1.5 MB``, ``4096``. Units count in 1024, except ``kB MB GB TB`` (1000).

    Raises ValueError for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    number, unit, suffix = match.groups()
    base = 1000 if suffix.lower() == "b" and unit else 1024
    return int(float(number) * base ** " kmgt".index(unit.lower() or " "))


def parse_duration(text: str) -> float:
    """Seconds of ``5s``, ``200ms``, ``1m``, ``2h``, ``0.5`` (at most a year). Raises ValueError for anything else."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    seconds = float(match[1]) * _SECONDS[match[2].lower()]
    if seconds > _LONGEST:
        raise ValueError(text)
    return seconds


def _split(text: str, separator: str) -> list[str]:
    r"""`text` split at `separator`, but not where a backslash stands before it; other backslashes stay."""
    words, word, characters = [], "", iter(text)
    for character in characters:
        if character == "\\":
            following = next(characters, "")
            word += following if following == separator else character + following
        elif character == separator:
            words.append(word)
            word = ""
        else:
            word += character
    return [*words, word]


def parse_options(text: str, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read one ``-o`` argument; returns `base` (fields of `MountOptions` already set) with its words applied.

    Raises ConfigError that names the option, and what was meant or what there is.
    """
    settings = dict(base or {})
    for word in _split(text, ","):
        name, equals, value = word.partition("=")
        name = name.strip()
        if not name and not equals:
            continue  # `-o a,,b` and an empty -o: mount(8) produces both
        _apply(settings, name, value if equals else None)
    return settings


def _apply(settings: dict[str, Any], name: str, value: str | None) -> None:
    if name == "rw":
        settings["ro"] = False
    if name in IGNORED_OPTIONS or name.startswith(("x-", "X-")):
        return
    if name in KERNEL_OPTIONS:
        word = name if value is None else f"{name}={value}"
        if (name == "max_read") != (value is not None and value.isdecimal()):
            raise ConfigError(f"option {printable(word)}: max_read takes a number, the others take no value")
        settings["fuse_options"] = [*settings.get("fuse_options", []), word]
        return
    option = _BY_NAME.get(name.replace("_", "-"))
    if option is None:
        raise _unknown(name)
    parsed = _value(option, value, settings)
    if option.kind == "durability":
        level, *globs = parsed
        if globs:
            settings["durability_globs"] = [*settings.get("durability_globs", []), *((level, glob) for glob in globs)]
        else:
            settings["durability"] = level
    else:
        settings[option.field] = parsed


def _unknown(name: str) -> ConfigError:
    from difflib import get_close_matches  # only when somebody misspelt something

    names = [option.name for option in OPTIONS]
    close = get_close_matches(name.replace("_", "-"), [*names, *KERNEL_OPTIONS, *IGNORED_OPTIONS], n=1, cutoff=0.6)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return ConfigError(
        f"unknown option {printable(name) or '(empty)'}{meant}", remedy=f"The options are: {', '.join(names)}."
    )


def _value(option: Option, value: str | None, settings: Mapping[str, Any]) -> Any:
    if option.kind == "switch":
        word = "on" if value is None else value.lower()
        if word in ("on", "yes", "true", "1"):
            return True
        if word in ("off", "no", "false", "0"):
            return False
        raise _wrong(option, value)
    if value is None or not value.strip():
        raise ConfigError(f"option {option.name} needs a value", remedy=f"Write {option.name}={option.value}.")
    if option.kind == "choice":
        if value not in _CHOICES[option.name]:
            raise _wrong(option, value)
        return value
    if option.kind in ("size", "duration"):
        try:
            return parse_size(value) if option.kind == "size" else parse_duration(value)
        except ValueError:
            raise _wrong(option, value) from None
    if option.kind == "path":
        if "\0" in value:
            raise _wrong(option, value)
        return value
    items = [item for item in _split(value.removeprefix("+"), ":") if item]
    if not items:
        raise _wrong(option, value)
    if option.kind == "durability":
        if items[0] not in _DURABILITIES:
            raise _wrong(option, value)
        return items
    if value.startswith("+"):
        before = settings.get(option.field)
        return [*(_default(option.field) if before is None else before), *items]
    return items


_EXAMPLES = {
    "size": "a number of bytes, or one with a unit: 512MiB, 1G",
    "duration": "seconds, or a number with a unit: 500ms, 5s, 2m",
    "durability": "ordered, strict or relaxed, with globs after a colon if it is for some files only",
}


def _wrong(option: Option, value: str | None) -> ConfigError:
    wanted = _EXAMPLES.get(option.kind) or "one of " + option.value.replace("|", ", ")
    return ConfigError(
        f"option {option.name}: {printable(value or '')} is not understood", remedy=f"It takes {wanted}."
    )


def _default(field: str) -> Any:
    return getattr(MountOptions("", ""), field)


def describe_default(option: Option) -> str:
    """The default of `option` as one would write it in ``-o`` (for help and documentation)."""
    default = _default(option.field)
    if option.kind == "switch":
        return "on" if default else "off"
    if option.kind == "size":
        return f"{default >> 30}GiB"
    if option.kind == "duration":
        return f"{default:g}s"
    if isinstance(default, list):
        return ":".join(default) or "none"
    return default or "automatic"


def build_options(vault: str, mountpoint: str, words: Iterable[str] = (), **overrides: Any) -> MountOptions:
    """The record for one mount, from its two paths and its ``-o`` arguments in order.

    Relative paths (also those of `log-file`) are made absolute, links are not resolved. `overrides` are fields
    that the command line sets by flags of its own. Raises ConfigError, also for values that contradict each other.
    """
    settings: dict[str, Any] = {}
    for word in words:
        settings = parse_options(word, settings)
    settings.update(overrides)
    if settings.get("allow") and "symlinks" not in settings:
        settings["symlinks"] = "allow"
    if settings.get("log_file"):
        settings["log_file"] = os.path.abspath(os.path.expanduser(settings["log_file"]))
    options = MountOptions(os.path.abspath(vault), os.path.abspath(mountpoint), **settings)
    _check(options)
    return options


def _check(options: MountOptions) -> None:
    if options.allow and options.symlinks != "allow":
        raise ConfigError(
            f"options allow and symlinks={options.symlinks} contradict each other",
            remedy="Drop one of them; allow=DIR needs symlinks=allow.",
        )
    if options.symlinks == "allow" and not options.allow:
        raise ConfigError("option symlinks=allow needs a list of targets", remedy="Write allow=DIR[:DIR…] as well.")
    for target in options.allow:
        if not target.startswith("/"):
            raise ConfigError(
                f"option allow: {printable(target)} is not an absolute path",
                remedy="Targets outside the vault are named from the root: allow=/srv/pictures.",
            )
    if options.lock_stale < 1:
        raise ConfigError(
            "option lock-stale is below one second",
            remedy="Locks younger than that may be in the making; choose 1s or more.",
        )
