"""The remarks of a real `vaultfs mount`: they reach the terminal before the command returns, and are right."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.mount.harness import MountedVault, is_served


@pytest.fixture
def vault() -> Iterator[MountedVault]:
    """A vault that the test mounts over itself by the command line."""
    mount = MountedVault(background=True, over_itself=True)
    try:
        yield mount
        if is_served(mount.vault):
            mount.cli("umount", str(mount.vault))
    finally:
        mount.destroy()


def mount_it(mount: MountedVault, *words: str) -> list[str]:
    """Mounts in the background, unmounts, and returns what was said on standard error."""
    done: subprocess.CompletedProcess[bytes] = mount.run(
        [mount.python(), "-m", "vaultfs", "mount", *words, str(mount.vault)], cwd=mount.vault
    )
    assert is_served(mount.vault)
    return done.stderr.decode().splitlines()


def umount(mount: MountedVault) -> None:
    mount.cli("umount", str(mount.vault))
    assert not is_served(mount.vault)


def test_the_first_mount_says_how_to_back_it_up_and_later_ones_do_not(vault: MountedVault) -> None:
    assert sum("docs/guide-backups.md" in line for line in mount_it(vault)) == 1
    umount(vault)
    assert not any("docs/guide-backups.md" in line for line in mount_it(vault))


def test_a_shell_that_stood_in_the_vault_is_told_and_cd_brings_it_into_the_mount(vault: MountedVault) -> None:
    shell = vault.spawn_shell(
        'cd "$1"; echo in; read -r _; echo beside > beside.md; stat -f -c %T .; cd "$PWD"; stat -f -c %T .; read -r _',
        str(vault.vault),
    )
    assert shell.hear() == "in"
    (line,) = [line for line in mount_it(vault) if "had the vault open" in line]
    assert f"(pid {shell.pid}) works in it" in line
    assert line.count("works in") == 1, "the mounting command itself stood in the vault, too, and is not meant"
    assert shell.ask() != "fuseblk"
    assert shell.hear().startswith("fuse")
    shell.kill()


def test_quiet_is_quiet_and_the_log_has_it_all(vault: MountedVault) -> None:
    (vault.vault / "out").symlink_to("/etc/hosts")
    assert mount_it(vault, "-q", "-o", f"log-file={vault.log}") == []
    assert "1 symbolic link is listed but not followed" in vault.log.read_text()
    umount(vault)
    assert sum("symbolic link" in line for line in mount_it(vault)) == 1
