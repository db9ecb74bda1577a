"""The house has two storeys and a front door, and imports point downwards only: cli → control → mount → core."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vaultfs
from vaultfs.errors import TABLE, VaultError

PACKAGE = Path(vaultfs.__file__).parent
STOREYS = {"cli": 3, "control": 2, "mount": 1}
FILES = sorted(PACKAGE.rglob("*.py"))


def storey(module: str) -> int:
    room = module.removeprefix("vaultfs.").split(".")[0]
    return STOREYS.get(room, 0)


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def module_of(file: Path) -> str:
    return ".".join(("vaultfs", *file.relative_to(PACKAGE).with_suffix("").parts))


@pytest.mark.parametrize("file", [file for file in FILES if file.name != "__main__.py"], ids=module_of)
def test_imports_point_down(file: Path) -> None:
    here = storey(module_of(file))
    above = [name for name in imported(file) if name.startswith("vaultfs.") and storey(name) > here]
    assert above == []


@pytest.mark.parametrize("file", [file for file in FILES if storey(module_of(file)) == 0], ids=module_of)
def test_the_core_knows_neither_the_event_loop_nor_the_kernel_interface(file: Path) -> None:
    assert not {name.split(".")[0] for name in imported(file)} & {"trio", "pyfuse3", "argparse"}


def family(kind: type[VaultError]) -> Iterator[type[VaultError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from family(child)


def test_every_error_has_a_row_in_the_one_table_and_words_for_the_user() -> None:
    for kind in family(VaultError):
        if kind.__module__ == "vaultfs.errors":
            assert kind in TABLE, kind
            assert kind.__doc__ and TABLE[kind].hint, kind
