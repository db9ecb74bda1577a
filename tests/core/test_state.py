"""The state directory: private, bound to its vault, and a copied one is never taken for our own."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from tests.core.publishing import WRITER, opened
from vaultfs import state as state_module
from vaultfs.errors import StateDirectoryError
from vaultfs.root import VaultRoot
from vaultfs.state import StateDirectory, StateIdentity

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def test_it_is_made_private_whatever_the_vault_hands_down(vault: Path) -> None:
    subprocess.run(["setfacl", "-d", "-m", "u:1:rwx,g::rwx", str(vault)], check=True)
    os.chmod(vault, 0o2775)
    with opened(vault) as store:
        status = (vault / ".vaultfs").stat()
        assert stat.S_IMODE(status.st_mode) == 0o700
        assert not os.listxattr(store.state.fd) or all(
            not name.startswith("system.posix_acl") for name in os.listxattr(store.state.fd)
        )
        # what is staged has neither the ACL nor the group of the vault
        draft = store.draft("a.md", b"x", "new")
        assert not [name for name in os.listxattr(draft.fd) if name.startswith("system.")]
        assert stat.S_IMODE(os.fstat(draft.fd).st_mode) == 0o600
        draft.discard()
    assert (vault / ".vaultfs/.gitignore").read_text() == "*\n"


def test_a_second_open_finds_the_same_state(vault: Path) -> None:
    with VaultRoot.open(vault) as root:
        with StateDirectory.open(root) as first:
            number = first.ino
        with StateDirectory.open(root, create=False) as second:
            assert second.ino == number
            assert second.set_aside is None
            second.assert_ours()


def test_without_create_nothing_is_made(vault: Path) -> None:
    with VaultRoot.open(vault) as root, pytest.raises(FileNotFoundError):
        StateDirectory.open(root, create=False)
    assert not list(vault.iterdir())


@pytest.mark.parametrize("impostor", ["link", "file", "dangling"])
def test_a_link_or_file_in_its_place_is_refused(vault: Path, impostor: str) -> None:
    outside = vault.parent / "outside"
    if impostor == "link":
        outside.mkdir()
    if impostor == "file":
        (vault / ".vaultfs").write_text("")
    else:
        (vault / ".vaultfs").symlink_to(outside)
    with VaultRoot.open(vault) as root, pytest.raises(StateDirectoryError):
        StateDirectory.open(root)
    assert not outside.exists() or not list(outside.iterdir())


@needs_root
def test_anothers_directory_is_refused(vault: Path) -> None:
    (vault / ".vaultfs").mkdir()
    os.chown(vault / ".vaultfs", 1, 1)
    with VaultRoot.open(vault) as root, pytest.raises(StateDirectoryError, match="belongs to user 1"):
        StateDirectory.open(root)


def test_a_vault_that_everybody_may_write_is_refused_unless_sticky(vault: Path) -> None:
    os.chmod(vault, 0o777)
    with VaultRoot.open(vault) as root:
        with pytest.raises(StateDirectoryError, match="o-w"):
            StateDirectory.open(root)
        assert not list(vault.iterdir())
        os.chmod(vault, 0o1777)
        StateDirectory.open(root).close()


def test_a_subdirectory_that_is_a_link_is_refused(vault: Path) -> None:
    with opened(vault) as store:
        (vault / "elsewhere").mkdir()
        (vault / ".vaultfs/staging").symlink_to(vault / "elsewhere")
        with pytest.raises(StateDirectoryError):
            store.drafts.create(b"a", base=None, kind="new", writer=WRITER)
        assert not list((vault / "elsewhere").iterdir())


def test_a_copied_state_directory_is_set_aside_whole_and_never_replayed(vault: Path, tmp_path: Path) -> None:
    with opened(vault) as store:
        published = store.save_new("a.md", b"old")
        draft = store.draft("a.md", b"a draft from another time", "edit", published.identity)
        draft.close()
    other = tmp_path / "restored"
    shutil.copytree(vault, other, symlinks=True)
    (other / "a.md").write_bytes(b"newer")
    names = sorted(path.name for path in (other / ".vaultfs").rglob("*"))
    with opened(other) as store:
        assert store.state.set_aside is not None
        report = store.drafts.recover()
        assert report.set_aside is not None and not report.published and not report.kept
        assert (other / "a.md").read_bytes() == b"newer"
        aside = other / os.fsdecode(store.state.set_aside)
        assert sorted(path.name for path in aside.rglob("*")) == names
        assert "set aside" in report.summary()
    assert not [path for path in other.iterdir() if path.name.startswith(".vaultfs-")]
    with opened(other) as store:  # and that was that
        assert store.state.set_aside is None


def test_state_without_a_readable_id_counts_as_copied(vault: Path) -> None:
    with opened(vault) as store:
        store.save_new("a.md", b"a")
    (vault / ".vaultfs/id").write_text("{")
    with opened(vault) as store:
        assert store.state.set_aside is not None


def test_a_directory_that_was_only_just_made_gets_its_id(vault: Path) -> None:
    (vault / ".vaultfs").mkdir(mode=0o755)
    with opened(vault) as store:
        assert store.state.set_aside is None
        assert json.loads((vault / ".vaultfs/id").read_text())["root_ino"] == vault.stat().st_ino


def test_another_host_alone_sets_nothing_aside() -> None:
    here = StateIdentity(v=1, host="here", root_ino=5, uuid="u", fsid="f")
    there = StateIdentity(v=1, host="there", root_ino=5, uuid="u", fsid="f")
    assert there.same_vault(here) is True  # the disk was moved
    assert StateIdentity(v=1, host="here", root_ino=6, uuid="u").same_vault(here) is False
    assert StateIdentity(v=1, host="here", root_ino=5, uuid="x", fsid="f").same_vault(here) is False
    renumbered = StateIdentity(v=1, host="here", root_ino=5, uuid="u", fsid="other device number")
    assert renumbered.same_vault(here) is True
    snapshot = StateIdentity(v=1, host="here", root_ino=5, uuid="u", fsid="other subvolume", btrfs=True)
    assert snapshot.same_vault(here) is False
    nameless = StateIdentity(v=1, host="there", root_ino=5)
    assert nameless.same_vault(StateIdentity(v=1, host="here", root_ino=5)) is None
    assert nameless.same_vault(StateIdentity(v=1, host="there", root_ino=5)) is True


def test_where_only_the_host_could_tell_nothing_is_moved(vault: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nameless = classmethod(lambda cls, root: StateIdentity(v=1, host="one", root_ino=root.ino))
    monkeypatch.setattr(StateDirectory, "_identity_of", nameless)
    with opened(vault):
        pass
    before = sorted(os.listdir(vault / ".vaultfs"))
    nameless = classmethod(lambda cls, root: StateIdentity(v=1, host="two", root_ino=root.ino))
    monkeypatch.setattr(StateDirectory, "_identity_of", nameless)
    with VaultRoot.open(vault) as root:
        with pytest.raises(StateDirectoryError, match="shared"):
            StateDirectory.open(root)
        StateDirectory.open(root, shared=True).close()
    assert sorted(os.listdir(vault / ".vaultfs")) == before


def test_a_copy_that_another_host_may_be_serving_is_not_moved(vault: Path) -> None:
    """The server of a network file system and its client see one vault under two identities."""
    with opened(vault) as store:
        identity = store.state.identity
    theirs = {"v": 1, "host": "another", "root_ino": identity.root_ino, "uuid": "f00d", "fsid": "f00d"}
    (vault / ".vaultfs/id").write_text(json.dumps(theirs))
    (vault / ".vaultfs/fence").write_text("alive")
    with VaultRoot.open(vault) as root, pytest.raises(StateDirectoryError, match="in use on another host"):
        StateDirectory.open(root)
    assert json.loads((vault / ".vaultfs/id").read_text()) == theirs
    os.utime(vault / ".vaultfs/fence", (0, 0))
    with opened(vault) as store:
        assert store.state.set_aside is not None


@pytest.mark.parametrize("copied", [False, True])
def test_many_at_once_agree_on_one_directory(vault: Path, copied: bool) -> None:
    if copied:
        with opened(vault) as store:
            store.save_new("a.md", b"a")
        identity = json.loads((vault / ".vaultfs/id").read_text()) | {"root_ino": 1}
        (vault / ".vaultfs/id").write_text(json.dumps(identity))
    barrier = threading.Barrier(12)
    numbers: list[int] = []
    failures: list[BaseException] = []

    def open_it() -> None:
        try:
            with VaultRoot.open(vault) as root:
                barrier.wait()
                with StateDirectory.open(root) as state:
                    numbers.append(state.ino)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    with VaultRoot.open(vault) as root, StateDirectory.open(root, create=False) as state:
        assert numbers == [state.ino] * 12
    assert not [path.name for path in vault.iterdir() if path.name.startswith(".vaultfs-")]
    assert len(list((vault / ".vaultfs").glob("quarantine/copied-*"))) == copied


def test_the_machine_id_is_not_given_away() -> None:
    identity = state_module.host_identity()
    for source in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        if os.path.exists(source):
            assert Path(source).read_text().strip() not in identity
