"""node.js on the mount: its watchers see every save with its new content, its ways to save are saves.

The kernel reports writes when they are made, before they are published, and reports nothing of what happens in the
vault behind the mount; a watcher that looks at that moment reads the old version and never looks again. So each test
here saves something, and insists that the watcher reads *that content* in answer to some event. Editors, note
applications and build tools watch by these two: `fs.watch` of node itself, and chokidar.

chokidar tells of no second change of a file within 50 ms of the first, on any file system, so there is a pause before
each save (`PAUSE`). Within one save there is none: the event for the write and the one for the publish come as they do.

The packages come from npm, at fixed versions, once, into a cache directory outside the checkout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
import pytest

from tests.mount.harness import GUARD, eventually

PACKAGES = {"chokidar": "4.0.3", "write-file-atomic": "6.0.0"}  # the newest that node 18 (Debian 12) can run

pytestmark = pytest.mark.skipif(not shutil.which("node") or not shutil.which("npm"), reason="node is not installed")

WATCHERS = {
    "fs.watch": """
        const fs = require('fs'), path = require('path');
        const directory = process.argv[1];
        fs.watch(directory, (event, name) => tell(event, name, path.join(directory, name)));
        ready();
    """,
    "chokidar": """
        const path = require('path');
        const directory = process.argv[1];
        require('chokidar').watch(directory, {ignoreInitial: true})
            .on('all', (event, file) => tell(event, path.relative(directory, file), file))
            .on('error', error => console.log(JSON.stringify({event: 'error', name: String(error), content: null})))
            .on('ready', ready);
    """,
    "chokidar-awaiting-the-end-of-writes": """
        const path = require('path');
        const directory = process.argv[1];
        require('chokidar').watch(directory, {ignoreInitial: true, awaitWriteFinish: {stabilityThreshold: 200}})
            .on('all', (event, file) => tell(event, path.relative(directory, file), file))
            .on('ready', ready);
    """,
}
PAUSE = 0.15  # seconds
TELL = """
    const ready = () => console.log(JSON.stringify({event: 'ready', name: '', content: null}));
    const tell = (event, name, file) => {
        let content = null;
        try { content = require('fs').readFileSync(file, 'utf8'); } catch (error) { content = null; }
        console.log(JSON.stringify({event, name, content}));
    };
"""


@pytest.fixture(scope="module")
def modules() -> Path:
    """A directory `node_modules` with PACKAGES in it; installed once, and complete if it is there at all."""
    cache = Path(os.environ.get("VAULTFS_TESTS_CACHE") or platformdirs.user_cache_path("vaultfs-tests"))
    versions = "_".join(f"{name}-{version}" for name, version in PACKAGES.items())
    target = cache / f"node_{versions}"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            making = Path(scratch) / "made"
            making.mkdir()
            done = subprocess.run(
                ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", making]
                + [f"{name}@{version}" for name, version in PACKAGES.items()],
                capture_output=True,
                text=True,
                timeout=110,
                check=False,
            )
            assert done.returncode == 0, f"npm install failed: {done.stderr}"
            if not target.exists():  # another run may have been quicker
                making.rename(target)
    return target / "node_modules"


class NodeWatcher:
    """A node process that watches a directory and tells what it read at each event."""

    def __init__(self, kind: str, directory: Path, modules: Path) -> None:
        self.told: list[tuple[str, str, str | None]] = []
        self.process = subprocess.Popen(
            ["node", "-e", TELL + WATCHERS[kind], directory],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "NODE_PATH": str(modules)},
            text=True,
        )
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()
        eventually(lambda: ("ready", "", None) in self.told, f"{kind} says that it is ready")

    def _collect(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                record = json.loads(line)
                self.told.append((record["event"], record["name"], record["content"]))
            except ValueError:
                self.told.append(("says", line, None))

    def wait_for(self, name: str, content: str | None, since: int) -> None:
        """Until some event after the first `since` ones made the watcher read `content` at `name` (None: gone)."""
        try:
            eventually(
                lambda: any((n, c) == (name, content) for _, n, c in self.told[since:]),
                f"the watcher reads {content!r:.80} at {name}",
                limit=15,
            )
        except AssertionError as error:
            short = [(e, n, c if c is None else c[:60]) for e, n, c in self.told[since:]]
            raise AssertionError(f"{error}; it was told: {short}") from None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()


@contextmanager
def watching(kind: str, directory: Path, modules: Path) -> Iterator[NodeWatcher]:
    watcher = NodeWatcher(kind, directory, modules)
    try:
        yield watcher
        assert watcher.process.poll() is None, f"the watcher ended: {watcher.told[-3:]}"
    finally:
        watcher.close()


def node(script: str, *arguments: str | Path, modules: Path) -> None:
    done = subprocess.run(
        ["node", "-e", script, *arguments],
        env={**os.environ, "NODE_PATH": str(modules)},
        capture_output=True,
        text=True,
        timeout=GUARD,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def slow_writer(path: Path, content: str) -> None:
    """Opens, truncates, sleeps, writes in two pieces with a sleep between and before the close."""
    with path.open("w") as file:
        time.sleep(0.15)
        file.write(content[:3])
        file.flush()
        time.sleep(0.15)
        file.write(content[3:])
        file.flush()
        time.sleep(0.3)


def replacer(path: Path, content: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(content)
    os.replace(temporary, path)


def editor(path: Path, content: str) -> None:
    with path.open("r+") as file:
        file.seek(0)
        file.write(content)
        file.truncate()


def shell_writer(path: Path, content: str) -> None:
    subprocess.run(["sh", "-c", 'printf %s "$2" > "$1"', "sh", path, content], check=True)


def truncater(path: Path, content: str) -> None:
    path.write_text(content + "too much")
    os.truncate(path, len(content.encode()))


SAVES: list[Callable[[Path, str], object]] = [
    Path.write_text,
    replacer,
    editor,
    shell_writer,
    truncater,
    slow_writer,
]


@pytest.mark.parametrize("kind", WATCHERS)
def test_a_watcher_reads_each_save(here: Path, modules: Path, kind: str) -> None:
    """Existing files, one save after the other; the watcher must have read the new content before the next save."""
    (here / "note.md").write_text("first")
    with watching(kind, here, modules) as watcher:
        for round_number in range(2):
            for save in SAVES:
                time.sleep(PAUSE)
                since = len(watcher.told)
                content = f"{save.__name__} {round_number} {'x' * round_number * 50}"
                save(here / "note.md", content)
                watcher.wait_for("note.md", content, since)


@pytest.mark.parametrize("kind", WATCHERS)
def test_a_watcher_sees_new_renamed_and_removed_files(here: Path, modules: Path, kind: str) -> None:
    with watching(kind, here, modules) as watcher:
        (here / "new.md").write_text("new")
        watcher.wait_for("new.md", "new", 0)
        since = len(watcher.told)
        slow_writer(here / "slow.md", "slowly made")
        watcher.wait_for("slow.md", "slowly made", since)
        time.sleep(PAUSE)
        since = len(watcher.told)
        os.rename(here / "new.md", here / "renamed.md")
        watcher.wait_for("renamed.md", "new", since)
        watcher.wait_for("new.md", None, since)
        time.sleep(PAUSE)
        since = len(watcher.told)
        os.unlink(here / "renamed.md")
        watcher.wait_for("renamed.md", None, since)


@pytest.mark.parametrize("kind", WATCHERS)
def test_a_watcher_sees_changes_made_in_the_vault_behind(
    here: Path, vault_here: Path, modules: Path, kind: str
) -> None:
    (here / "note.md").write_text("first")
    with watching(kind, here, modules) as watcher:
        for number, save in enumerate((replacer, Path.write_text, editor, slow_writer, replacer)):
            time.sleep(PAUSE)
            since = len(watcher.told)
            content = f"{save.__name__} behind the mount, {number}"
            save(vault_here / "note.md", content)
            watcher.wait_for("note.md", content, since)
            assert (here / "note.md").read_text() == content
        time.sleep(PAUSE)
        since = len(watcher.told)
        (vault_here / "arrived.md").write_text("by synchronization")
        watcher.wait_for("arrived.md", "by synchronization", since)
        time.sleep(PAUSE)
        since = len(watcher.told)
        (vault_here / "arrived.md").unlink()
        watcher.wait_for("arrived.md", None, since)
        time.sleep(PAUSE)
        since = len(watcher.told)
        (here / "note.md").write_text("and again through the mount")
        watcher.wait_for("note.md", "and again through the mount", since)


def test_a_watcher_of_a_tree_follows_it_down(here: Path, vault_here: Path, modules: Path) -> None:
    (here / "a/b").mkdir(parents=True)
    (here / "a/b/note.md").write_text("first")
    with watching("chokidar", here, modules) as watcher:
        for number, base in enumerate((here, vault_here, here)):
            time.sleep(PAUSE)
            since = len(watcher.told)
            replacer(base / "a/b/note.md", f"deep {number}")
            watcher.wait_for("a/b/note.md", f"deep {number}", since)
        time.sleep(PAUSE)
        since = len(watcher.told)
        (here / "fresh").mkdir()
        eventually(lambda: any(name == "fresh" for _, name, _ in watcher.told[since:]), "the new directory is seen")
        time.sleep(0.3)  # a watcher needs a moment to look into a directory that is new, on any file system
        (here / "fresh/note.md").write_text("in a fresh directory")
        watcher.wait_for("fresh/note.md", "in a fresh directory", since)


def test_a_polling_watcher_sees_each_save(here: Path, vault_here: Path, modules: Path) -> None:
    """fs.watchFile, which chokidar and others use where inotify is not trusted: it compares times by stat."""
    note = here / "note.md"
    note.write_text("first")
    WATCHERS["fs.watchFile"] = """
        const file = process.argv[1] + '/note.md';
        require('fs').watchFile(file, {interval: 30}, () => tell('change', 'note.md', file));
        setTimeout(ready, 100);
    """
    try:
        with watching("fs.watchFile", here, modules) as watcher:
            for number, base in enumerate((here, vault_here, here)):
                since = len(watcher.told)
                (base / "note.md").write_text(f"polled {number}")
                watcher.wait_for("note.md", f"polled {number}", since)
    finally:
        del WATCHERS["fs.watchFile"]


def test_a_burst_of_saves_ends_with_the_last_content_seen(here: Path, modules: Path) -> None:
    """Events may be merged when saves come fast; the last version may not be missed, of any file."""
    for number in range(5):
        (here / f"n{number}.md").write_text("first")
    with watching("fs.watch", here, modules) as watcher:
        for round_number in range(30):
            for number in range(5):
                (here / f"n{number}.md").write_text(f"round {round_number} of {number}")
        for number in range(5):
            watcher.wait_for(f"n{number}.md", f"round 29 of {number}", 0)


NODE_SAVES = {
    "writeFile": "fs.writeFileSync(f, c)",
    "writeFile-promise": "await fs.promises.writeFile(f, c)",
    "writeFile-flush": "await fs.promises.writeFile(f, c, {flush: true})",
    "appendFile": "fs.truncateSync(f, 0); fs.appendFileSync(f, c.slice(0, 4)); fs.appendFileSync(f, c.slice(4))",
    "rename": "fs.writeFileSync(f + '.tmp', c); fs.renameSync(f + '.tmp', f)",
    "write-file-atomic": "await require('write-file-atomic')(f, c)",
    "write-file-atomic-sync": "require('write-file-atomic').sync(f, c)",
    "stream": "await new Promise(done => { const s = fs.createWriteStream(f); s.write(c.slice(0, 5));"
    " setTimeout(() => s.end(c.slice(5)), 50); s.on('close', done); })",
    "handle": "const h = await fs.promises.open(f, 'r+'); await h.truncate(0); await h.write(c, 0);"
    " await h.sync(); await h.close()",
    "copyFile": "fs.writeFileSync(f + '.other', c); fs.copyFileSync(f + '.other', f); fs.unlinkSync(f + '.other')",
    "cp": "fs.writeFileSync(f + '.other', c); fs.cpSync(f + '.other', f); fs.rmSync(f + '.other')",
}


@pytest.mark.parametrize("way", NODE_SAVES)
def test_nodes_own_ways_to_save(here: Path, vault_here: Path, modules: Path, way: str) -> None:
    """What the writer reads back, what others read after it ended, and what is in the vault: all the new content."""
    note = here / "note.md"
    note.write_text("first content, longer than what comes")
    note.chmod(0o640)
    script = (
        "const fs = require('fs'); const [f, c] = process.argv.slice(1); (async () => {"
        + NODE_SAVES[way]
        + "; if (fs.readFileSync(f, 'utf8') !== c) throw new Error('read back: ' + fs.readFileSync(f, 'utf8'));"
        + " if (fs.statSync(f).size !== c.length) throw new Error('size ' + fs.statSync(f).size);"
        + "})().catch(error => { console.error(error); process.exit(1); })"
    )
    with watching("chokidar", here, modules) as watcher:
        for number in range(2):
            time.sleep(PAUSE)
            since = len(watcher.told)
            node(script, note, f"by {way} {number}", modules=modules)
            assert note.read_text() == f"by {way} {number}"
            assert (vault_here / "note.md").read_text() == f"by {way} {number}"
            watcher.wait_for("note.md", f"by {way} {number}", since)
    if way not in ("rename", "copyFile", "cp"):  # these give it the mode of another file
        assert note.stat().st_mode & 0o777 == 0o640
    assert os.listdir(here) == ["note.md"]


def test_tools_of_node_install_and_run_packages_on_the_mount(here: Path, modules: Path) -> None:
    """npm writes and renames trees of small files; node then loads modules and JSON from them."""
    (here / "package.json").write_text('{"name": "x", "version": "1.0.0"}')
    done = subprocess.run(
        [
            "npm",
            "install",
            "--offline",
            "--no-audit",
            "--no-fund",
            "--install-links",
            modules / "write-file-atomic/../imurmurhash",
        ],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=GUARD,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    node(
        "if (require('imurmurhash')('x').result() !== require(process.argv[1])('x').result()) process.exit(1)",
        here / "node_modules/imurmurhash",
        modules=modules,
    )
    assert json.loads((here / "package-lock.json").read_text())["packages"]
