"""The README's two commands in a fresh clone: what they show, what they leave, what they say when something is missing.

The quickstart builds a virtual environment (pip's own cache makes that quick where it has been done before), so its
test may take minutes on a new machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import TEST_UID

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS = ["scripts/quickstart", "scripts/test", ".ci/run"]

pytestmark = pytest.mark.skipif(
    not (REPOSITORY / ".git").exists() or not shutil.which("git"), reason="this is no git checkout"
)


@pytest.fixture(scope="module")
def clone() -> Iterator[Path]:
    """What `git clone` gives a newcomer."""
    base = Path(tempfile.mkdtemp(prefix="vaultfs-test-clone-"))
    try:
        base.chmod(0o755)
        target = base / "vaultfs"
        # The checkout may belong to another user (CI): git would refuse to read it without being told.
        git = ["git", "-c", f"safe.directory={REPOSITORY}", "-c", f"safe.directory={REPOSITORY}/.git"]
        subprocess.run([*git, "clone", "-q", "--no-hardlinks", REPOSITORY, target], check=True, capture_output=True)
        yield target
    finally:
        shutil.rmtree(base, ignore_errors=True)


def run(
    *command: str | Path,
    cwd: Path,
    ok: int = 0,
    timeout: float = 900,
    environment: dict[str, str] | None = None,
    uid: int = 0,
) -> str:
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"] if uid else []
    variables = {
        key: value for key, value in os.environ.items() if not key.startswith(("VAULTFS_", "PYTEST_", "PYTHON"))
    }
    done = subprocess.run(
        [*become, *command],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**variables, **(environment or {})},
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == ok, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="without root it may only say what to install")
def test_quickstart_shows_what_it_promises_twice_and_leaves_nothing(clone: Path) -> None:
    scratch = clone.parent / "scratch"
    scratch.mkdir()
    steps = [
        r"\$ vaultfs mount",
        r"served on .*mnt",
        r"\$ ls mnt\ntoday\.md",
        # a save through the mount
        r"\$ cat vault/today\.md\nBuy bread and milk\.",
        # a reader that sees old, then new
        r"a reader sees:  Buy bread and milk\.\n",
        r"the writer has closed it:  Monday: rain\|Tuesday: sun",
        # a lock held by another process that delays a save
        r"process \d+ holds the lock",
        r"the save still waits; the vault has:  Monday: rain\|Tuesday: sun",
        # the state
        r"\$ vaultfs status mnt",
        r"serving",
        r"today\.md",
        r"the vault has:  Wednesday: snow",
        # the end, and how to go on
        r"\$ vaultfs umount mnt",
        r"\$ cat vault/today\.md\nWednesday: snow",
        r"vaultfs mount ~/Notes",
        r"vaultfs umount ~/Notes",
    ]
    mounts = Path("/proc/self/mountinfo").read_text().count(str(scratch))
    for _ in range(2):
        shown = run("scripts/quickstart", cwd=clone, environment={"TMPDIR": str(scratch), "TERM": "dumb"})
        position = 0
        for step in steps:
            found = re.compile(step).search(shown, position)
            assert found, f"does not show {step!r} (in this order):\n{shown}"
            position = found.start()
        assert "Traceback" not in shown and "rror" not in shown.replace("errors", ""), shown
        assert Path("/proc/self/mountinfo").read_text().count(str(scratch)) == mounts == 0
        assert os.listdir(scratch) == [], "something is left behind"
    assert "Preparing" not in shown, "the second run made the environment again"
    assert run("git", "status", "--porcelain", cwd=clone) == "", "the checkout is not as it was"


@pytest.mark.parametrize("script", ["scripts/quickstart", "scripts/test"])
def test_scripts_explain_themselves(clone: Path, script: str) -> None:
    assert script in run(script, "--help", cwd=clone)


def test_quickstart_refuses_words_that_it_does_not_know(clone: Path) -> None:
    assert "--frobnicate" in run("scripts/quickstart", "--frobnicate", cwd=clone, ok=1)


@pytest.fixture
def without_libfuse(clone: Path) -> str:
    """A PATH on which pkg-config knows no fuse3: a machine where libfuse3-dev is not installed."""
    stub = clone.parent / "stub"
    stub.mkdir(exist_ok=True)
    (stub / "pkg-config").write_text("#!/bin/sh\nexit 1\n")
    (stub / "pkg-config").chmod(0o755)
    return f"{stub}:/usr/bin:/bin"


@pytest.mark.parametrize("script", ["scripts/quickstart", "scripts/test"])
def test_without_root_they_say_exactly_what_to_run(clone: Path, without_libfuse: str, script: str) -> None:
    if not shutil.which("apt-get"):
        pytest.skip("this system has no apt")
    uid = TEST_UID if os.geteuid() == 0 else 0
    environment = {"PATH": without_libfuse, "HOME": "/nonexistent"}
    shown = run(script, cwd=clone, ok=1, environment=environment, uid=uid, timeout=60)
    command = re.search(r"sudo apt-get update && sudo apt-get install -y --no-install-recommends (.*)", shown)
    assert command and "libfuse3-dev" in command.group(1).split(), shown
    assert not (clone / ".venv").exists() or os.geteuid() == 0


def test_on_a_system_without_apt_they_name_the_packages(clone: Path, without_libfuse: str) -> None:
    farm = clone.parent / "programs"
    farm.mkdir()
    for program in Path("/usr/bin").iterdir():
        if not program.name.startswith("apt") and not (farm / program.name).exists():
            (farm / program.name).symlink_to(program)
    path = f"{without_libfuse.split(':')[0]}:{farm}"
    shown = run("/usr/bin/bash", "scripts/quickstart", cwd=clone, ok=1, environment={"PATH": path}, timeout=60)
    assert "libfuse3-dev" in shown and "Fedora" in shown, shown


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_scripts_have_no_known_shell_mistakes() -> None:
    scripts = [path for name in SCRIPTS if (path := REPOSITORY / name).exists()]
    scripts += [path for path in (REPOSITORY / "scripts").iterdir() if path.suffix == ".sh"]
    done = subprocess.run(["shellcheck", "-x", *scripts], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_scripts_can_be_run() -> None:
    for name in SCRIPTS:
        assert os.access(REPOSITORY / name, os.X_OK), name
