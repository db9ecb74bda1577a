"""Acquire and release: ours beside other programs' locks, in one run on one file system. Reported, never asserted.

    python tests/bench/bench_locks.py [DIRECTORY]

Measured: microseconds for one acquire and release by one process, and sections a second that 8 processes get through
together. Compared with

- *borg-style*: an exclusive lock as borg makes it (mkdir of a directory, a file named after its owner in it),
- *filelock* (``pip install filelock``; left out if it is not there),
- *proper-lockfile* (``npm install --prefix tests/interop``; left out if it is not there).

Ours writes and syncs nothing more than borg's, but prepares its lock complete before it is seen, and leaves 1.5 ms
between two locks of one process at one path (lock-protocol.md): so the uncontended figure is taken over many paths.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vaultfs.locks import PathLocks
from vaultfs.root import VaultRoot
from vaultfs.state import StateDirectory

CONTENDERS = 8
ALONE = 400  # sections of one process, each at a path of its own
SECONDS = 3.0  # of contention
MODULES = Path(__file__).parents[1] / "interop/node_modules"
NODE = """
const [modules, directory, alone] = process.argv.slice(1), fs = require("fs");
const lockfile = require(modules + "/proper-lockfile");
(async () => {
  for (let i = 0; i < alone; i++) fs.writeFileSync(`${directory}/p${i}`, "");
  const begun = process.hrtime.bigint();
  for (let i = 0; i < alone; i++) await (await lockfile.lock(`${directory}/p${i}`))();
  console.log(JSON.stringify(Number(process.hrtime.bigint() - begun) / 1e9));
})();
"""
NODE_TOGETHER = """
const [modules, file, seconds] = process.argv.slice(1);
const lockfile = require(modules + "/proper-lockfile");
(async () => {
  let sections = 0;
  for (const end = Date.now() + seconds * 1000; Date.now() < end; sections++)
    await (await lockfile.lock(file, { retries: { retries: 10000, minTimeout: 10, maxTimeout: 10 } }))();
  console.log(sections);
})();
"""

Section = Callable[[str], Any]  # path → a context manager that holds its lock


@contextmanager
def ours(directory: str) -> Iterator[Section]:
    with VaultRoot.open(directory) as root, StateDirectory.open(root) as state:
        locks = PathLocks(root, state)
        yield lambda name: locks.acquire(name.encode(), 60.0)
        locks.close()


@contextmanager
def borg_style(directory: str) -> Iterator[Section]:
    who = f"{os.uname().nodename}.{os.getpid()}-0"

    @contextmanager
    def section(name: str) -> Iterator[None]:
        lock = f"{directory}/{name}.exclusive"
        while True:
            try:
                os.mkdir(lock)
                break
            except FileExistsError:
                time.sleep(0.010)
        os.close(os.open(f"{lock}/{who}", os.O_CREAT | os.O_WRONLY))
        try:
            yield
        finally:
            os.unlink(f"{lock}/{who}")
            os.rmdir(lock)

    yield section


@contextmanager
def by_filelock(directory: str) -> Iterator[Section]:
    import filelock

    yield lambda name: filelock.FileLock(f"{directory}/{name}.flock").acquire(poll_interval=0.010)


def alone(make: Callable[[str], Any], directory: str) -> float:
    """Microseconds for one section."""
    with make(directory) as section:
        begun = time.perf_counter()
        for number in range(ALONE):
            with section(f"p{number}"):
                pass
        return (time.perf_counter() - begun) / ALONE * 1e6


def _contend(make: Callable[[str], Any], directory: str, start: Any, total: Any) -> None:
    with make(directory) as section:
        start.wait()
        end, sections = time.monotonic() + SECONDS, 0
        while time.monotonic() < end:
            with section("shared"):
                sections += 1
        with total.get_lock():
            total.value += sections


def together(make: Callable[[str], Any], directory: str) -> float:
    """Sections a second of all contenders."""
    fork = multiprocessing.get_context("fork")
    start, total = fork.Barrier(CONTENDERS), fork.Value("i")
    processes = [fork.Process(target=_contend, args=(make, directory, start, total)) for _ in range(CONTENDERS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return float(total.value) / SECONDS


def proper_lockfile(directory: str) -> tuple[float, float]:
    words = ["node", "-e", NODE, str(MODULES), directory, str(ALONE)]
    single = json.loads(subprocess.run(words, check=True, capture_output=True).stdout) / ALONE * 1e6
    Path(directory, "shared").touch()
    words = ["node", "-e", NODE_TOGETHER, str(MODULES), f"{directory}/shared", str(SECONDS)]
    programs = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(CONTENDERS)]
    return single, sum(int(program.communicate()[0] or 0) for program in programs) / SECONDS


def main() -> None:
    where = sys.argv[1] if len(sys.argv) > 1 else None
    print(f"{'lock':<18}{'alone, µs':>12}{f'{CONTENDERS} contenders, 1/s':>22}")
    makers: dict[str, Callable[[str], Any]] = {"vaultfs": ours, "borg-style": borg_style}
    try:
        import filelock  # noqa: F401

        makers["filelock"] = by_filelock
    except ModuleNotFoundError:
        print("filelock           not installed")
    for name, make in makers.items():
        with tempfile.TemporaryDirectory(dir=where) as directory:
            print(f"{name:<18}{alone(make, directory):>12.0f}{together(make, directory):>22.0f}")
    if shutil.which("node") is None or not (MODULES / "proper-lockfile").is_dir():
        print("proper-lockfile    not installed")
        return
    with tempfile.TemporaryDirectory(dir=where) as directory:
        single, many = proper_lockfile(directory)
        print(f"{'proper-lockfile':<18}{single:>12.0f}{many:>22.0f}")


if __name__ == "__main__":
    main()
