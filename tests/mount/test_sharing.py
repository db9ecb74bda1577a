"""Programs that write the same file at the same time: each keeps what it was promised, nobody loses anything unseen.

Contract, promise 5; one edit draft for all who edit, one replacement draft for each who replaces
(versions-and-drafts.md, "One inode, one content").
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import CONFLICT_NAME, MountedVault, eventually, hear, say, scaled

# ------------------------------------------------------------------------------------------------------- appends


@pytest.mark.parametrize("name", ["lines.txt", "lines.log"], ids=["document", "live"])
def test_no_line_of_many_appenders_is_lost(mounted: MountedVault, name: str) -> None:
    count = int(scaled(200))
    script = 'for i in $(seq "$3"); do echo "writer $1 line $i" >> "$2"; done'
    clients = [mounted.spawn_shell(script, number, name, count) for number in range(8)]
    for client in clients:
        client.result()
    wanted = sorted(f"writer {number} line {line}" for number in range(8) for line in range(1, count + 1))
    assert sorted(mounted.read(name).decode().splitlines()) == wanted
    assert mounted.read_behind(name) == mounted.read(name)


@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
def test_two_redirections_of_one_command_to_one_file_both_arrive(mounted: MountedVault, existing: bool) -> None:
    if existing:
        mounted.put_behind("log", "old\n")
    mounted.shell("(echo out; echo err >&2) > log 2>> log")
    assert sorted(mounted.read("log").splitlines()) == [b"err", b"out"]
    assert mounted.read_behind("log") == mounted.read("log")


def test_a_command_that_appends_to_the_run_it_is_part_of_joins_it(mounted: MountedVault) -> None:
    """The shell's own offset does not move when its children append, here as in any directory: so compare with one."""
    script = "exec > run.txt; echo begin; /bin/echo child >> run.txt; bash -c 'echo grandchild >> run.txt'; echo end"
    mounted.put_behind("run.txt", "an older run\n")
    mounted.shell(script)
    mounted.shell(script, cwd=mounted.home)
    wanted = (mounted.home / "run.txt").read_bytes()
    assert b"grandchild" in wanted
    assert mounted.read("run.txt") == mounted.read_behind("run.txt") == wanted


def _append_slowly(path: str) -> list[int]:
    import os

    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    sizes = []
    for part in (b"a1\n", b"a2\n"):
        before = os.fstat(fd).st_size
        os.write(fd, part)
        after = os.fstat(fd).st_size
        assert after == before + len(part), (before, after)
        assert os.lseek(fd, 0, os.SEEK_CUR) == after, (os.lseek(fd, 0, os.SEEK_CUR), after)
        sizes.append(after)
        say("appended")
        hear()
    assert os.fstat(fd).st_size == sizes[-1]
    os.close(fd)
    return sizes


def test_an_appender_that_stays_open_while_another_rewrites_the_file_keeps_its_lines(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "v0\n")
    appender = mounted.spawn(_append_slowly, mounted.mnt / "f.txt")
    appender.hear()
    mounted.shell("echo rewritten, and longer than before > f.txt")
    assert mounted.read("f.txt") == b"rewritten, and longer than before\n"
    appender.ask()
    appender.say()
    assert appender.result() == [6, 9], "the appender's own sizes are not disturbed"
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"rewritten, and longer than before\na1\na2\n"


# ------------------------------------------------------------------------------------------------- whole-file saves


def _save_in_two_steps(path: str, letter: str, size: int) -> list[int]:
    import os

    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    sizes = []
    for _ in range(2):
        say("next")
        hear()
        os.write(fd, letter.encode() * size)
        sizes.append(os.fstat(fd).st_size)
    say("next")
    hear()
    os.close(fd)
    return sizes


def test_interleaved_saves_of_one_file_are_each_published_whole(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old")
    mounted.expect_kept(1)
    one = mounted.spawn(_save_in_two_steps, mounted.mnt / "f.txt", "1", 5000)
    two = mounted.spawn(_save_in_two_steps, mounted.mnt / "f.txt", "2", 300)
    one.hear(), two.hear()
    for client in (one, two, two, one):
        assert mounted.read("f.txt") == b"old"
        client.ask()
    one.say()
    assert one.result() == [5000, 10000], "the other's save does not disturb the size"
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"1" * 10000
    two.say()
    assert two.result() == [300, 600]
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"2" * 600
    # The second displaced a version that came after it began.
    kept = mounted.kept()
    assert len(kept) == 1 and mounted.kept_content(kept[0]) == b"1" * 10000


def _save_many(path: str, letter: str, rounds: int) -> None:
    for number in range(rounds):
        with open(path, "wb", buffering=0) as file:
            for _ in range(10):
                file.write(letter.encode() * (100 + number))


def _read_whole_ones(path: str) -> list[str]:
    problems = []
    say("reading")
    import select
    import sys

    while not select.select([sys.stdin], [], [], 0)[0]:
        with open(path, "rb") as file:
            content = file.read()
        if not content or content != content[:1] * len(content) or (content[:1] != b"0" and len(content) % 10):
            problems.append(f"{sorted(set(content))} in {len(content)} bytes")
    return problems[:5]


def test_of_overlapping_saves_readers_never_see_a_mix(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "0" * 77)
    mounted.expect_kept(None)
    reader = mounted.spawn(_read_whole_ones, mounted.mnt / "f.txt")
    reader.hear()
    savers = [mounted.spawn(_save_many, mounted.mnt / "f.txt", letter, int(scaled(100))) for letter in "12"]
    for saver in savers:
        saver.result()
    reader.say()
    assert reader.result() == []
    assert len(mounted.read("f.txt")) == 10 * (100 + int(scaled(100)) - 1)


# ---------------------------------------------------------------------------------------------------- lock files


@pytest.mark.parametrize("lock", ["lock", "counter.lck", "guard.txt"], ids=["lock", "lck", "document"])
def test_shells_that_count_under_flock_lose_no_increment(mounted: MountedVault, lock: str) -> None:
    mounted.put_behind("counter.txt", "0\n")
    rounds = int(scaled(2))
    script = (
        "for i in $(seq $2); do (exec 9>$1; flock 9; n=$(cat counter.txt); echo $((n+1)) > counter.txt) || exit 1; done"
    )
    shells = [mounted.spawn_shell(script, lock, rounds) for _ in range(25)]
    for shell in shells:
        shell.result()
    assert mounted.read("counter.txt") == mounted.read_behind("counter.txt") == b"%d\n" % (25 * rounds)


def _count_in_json(path: str, how: str, rounds: int) -> None:
    import fcntl
    import json

    lock = fcntl.flock if how == "flock" else fcntl.lockf
    for _ in range(rounds):
        with open(path, "r+") as file:
            lock(file, fcntl.LOCK_EX)
            record = json.load(file)
            record["sum"] += 1
            record["history"].append(record["sum"])
            file.seek(0)
            json.dump(record, file)
            file.truncate()
            file.flush()


@pytest.mark.parametrize("how", ["flock", "lockf"])
def test_programs_that_edit_one_json_file_under_its_lock_lose_no_change(mounted: MountedVault, how: str) -> None:
    rounds = int(scaled(25))
    mounted.put_behind("shared.json", json.dumps({"sum": 0, "history": []}))
    programs = [mounted.spawn(_count_in_json, mounted.mnt / "shared.json", how, rounds) for _ in range(6)]
    for program in programs:
        program.result()
    record = json.loads(mounted.read("shared.json"))
    assert record["sum"] == 6 * rounds and record["history"] == list(range(1, 6 * rounds + 1))
    assert mounted.read_behind("shared.json") == mounted.read("shared.json")


# ------------------------------------------------------------------------------------------------------ conflicts


def _edit(path: str, offset: int, data: str) -> dict[str, Any]:
    import os

    fd = os.open(path, os.O_RDWR)
    before = os.fstat(fd).st_size
    os.pread(fd, 1 << 16, 0)
    say("open")
    hear()
    os.pwrite(fd, data.encode(), offset)
    after = os.fstat(fd).st_size
    content = os.pread(fd, 1 << 16, 0).decode()
    say("written")
    hear()
    try:
        os.close(fd)
        error = 0
    except OSError as failure:
        error = failure.errno or -1
    return {"error": error, "before": before, "after": after, "content": content}


def _edit_of(mounted: MountedVault, name: str, *, outside: Any, before_write: bool, offset: int = 0) -> dict[str, Any]:
    """Edits `name` ("EDITED" at `offset`) while `outside()` happens, before or after the first write."""
    client = mounted.spawn(_edit, mounted.mnt / name, offset, "EDITED")
    client.hear()
    if before_write:
        outside()
    client.ask()
    if not before_write:
        outside()
    client.say()
    result: dict[str, Any] = client.result()
    return result


BEFORE_OR_AFTER = pytest.mark.parametrize("before_write", [True, False], ids=["before-write", "after-write"])


@BEFORE_OR_AFTER
def test_an_editor_is_not_disturbed_by_one_who_truncates(mounted: MountedVault, before_write: bool) -> None:
    mounted.put_behind("f.txt", "some text of 26 characters")
    mounted.expect_conflicts(1)
    mounted.expect_log("conflict")
    result = _edit_of(
        mounted, "f.txt", outside=lambda: mounted.shell("echo short > f.txt"), before_write=before_write, offset=10
    )
    assert result == {"error": errno.ESTALE, "before": 26, "after": 26, "content": "some text EDITEDcharacters"}
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"short\n"
    (copy,) = mounted.conflicts()
    assert mounted.read_behind(copy) == b"some text EDITEDcharacters"


@BEFORE_OR_AFTER
def test_an_edit_that_meets_a_change_from_outside_becomes_a_conflict_copy(
    mounted: MountedVault, before_write: bool
) -> None:
    mounted.put_behind("notes/day.plan.md", "the text they both started from")
    mounted.expect_conflicts(1)
    mounted.expect_log("conflict")
    result = _edit_of(
        mounted,
        "notes/day.plan.md",
        outside=lambda: mounted.put_behind("notes/day.plan.md", "written by somebody in the vault"),
        before_write=before_write,
    )
    assert result["error"] == errno.ESTALE
    assert mounted.read("notes/day.plan.md") == b"written by somebody in the vault"
    assert mounted.read_behind("notes/day.plan.md") == b"written by somebody in the vault"
    (copy,) = mounted.conflicts()
    assert re.fullmatch(r"notes/day\.plan\.sync-conflict-\d{8}-\d{6}-[A-Za-z0-9]+\.md", copy)
    assert mounted.read_behind(copy) == mounted.read(copy) == b"EDITEDxt they both started from"
    assert os.path.basename(copy) in os.listdir(mounted.mnt / "notes")


def test_a_conflict_copy_of_a_conflict_copy_is_not_nested(mounted: MountedVault) -> None:
    name = "day.sync-conflict-20260101-120000-ABCDEF1.md"
    mounted.put_behind(name, "a conflict copy that somebody works on")
    mounted.expect_conflicts(2)
    mounted.expect_log("conflict")
    result = _edit_of(mounted, name, outside=lambda: mounted.put_behind(name, "changed"), before_write=False)
    assert result["error"] == errno.ESTALE
    assert mounted.read_behind(name) == b"changed"
    (copy,) = set(mounted.conflicts()) - {name}
    assert len(CONFLICT_NAME.findall(copy)) == 1


def test_an_edit_whose_result_somebody_else_wrote_too_is_no_conflict(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "before")
    result = _edit_of(mounted, "f.txt", outside=lambda: mounted.put_behind("f.txt", "EDITED"), before_write=False)
    assert result["error"] == 0
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"EDITED"


def test_a_change_of_metadata_alone_is_no_conflict_and_stays(mounted: MountedVault) -> None:
    path = mounted.put_behind("f.txt", "before, longer")
    result = _edit_of(mounted, "f.txt", outside=lambda: path.chmod(0o640), before_write=False)
    assert result["error"] == 0
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"EDITED, longer"
    assert stat.S_IMODE((mounted.behind / "f.txt").stat().st_mode) == 0o640


def test_appending_is_no_conflict_whoever_rewrites_the_file(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "v0\n")
    appender = mounted.spawn(_append_slowly, mounted.mnt / "f.txt")
    appender.hear()
    mounted.put_behind("f.txt", "from outside\n")
    appender.ask()
    appender.say()
    appender.result()
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"from outside\na1\na2\n"


def test_an_edit_whose_file_was_removed_outside_is_not_lost(mounted: MountedVault) -> None:
    path = mounted.put_behind("f.txt", "before, longer")
    mounted.expect_conflicts(None)
    mounted.expect_kept(None)
    mounted.expect_log("conflict")
    _edit_of(mounted, "f.txt", outside=path.unlink, before_write=False)
    survivors = [mounted.read_behind(name) for name in mounted.names_behind()]
    survivors += [mounted.kept_content(draft) for draft in mounted.kept()]
    assert b"EDITED, longer" in survivors


def test_a_replacement_goes_through_and_keeps_what_it_displaced_unseen(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "before")
    mounted.expect_kept(1)
    client = mounted.spawn(_save_in_two_steps, mounted.mnt / "f.txt", "n", 10)
    client.hear()
    client.ask()
    mounted.put_behind("f.txt", "from outside, while the save was going on")
    client.ask()
    client.say()
    client.result()
    assert mounted.read("f.txt") == mounted.read_behind("f.txt") == b"n" * 20
    (draft,) = mounted.kept()
    assert mounted.kept_content(draft) == b"from outside, while the save was going on"


def test_with_conflict_fail_the_edit_is_kept_as_a_draft(vault_mount: Any) -> None:
    mounted: MountedVault = vault_mount("conflict=fail", files={"f.txt": "before, longer"})
    mounted.expect_kept(1)
    mounted.expect_log("conflict")
    result = _edit_of(mounted, "f.txt", outside=lambda: mounted.put_behind("f.txt", "outside"), before_write=False)
    assert result["error"] == errno.ESTALE
    assert mounted.read_behind("f.txt") == b"outside"
    (draft,) = mounted.kept()
    assert mounted.kept_content(draft) == b"EDITED, longer"


def test_with_conflict_overwrite_the_displaced_version_is_kept(vault_mount: Any) -> None:
    mounted: MountedVault = vault_mount("conflict=overwrite", files={"f.txt": "before, longer"})
    mounted.expect_kept(1)
    mounted.expect_log("conflict")
    result = _edit_of(mounted, "f.txt", outside=lambda: mounted.put_behind("f.txt", "outside"), before_write=False)
    assert result["error"] == 0
    assert mounted.read_behind("f.txt") == b"EDITED, longer"
    (draft,) = mounted.kept()
    assert mounted.kept_content(draft) == b"outside"


# ------------------------------------------------------------------------------------- outside changes, and renames


def test_what_an_outsider_changes_is_what_readers_get(mounted: MountedVault) -> None:
    """Also when size and mtime are as before: readers that look again see the new file."""
    path = mounted.put_behind("f.txt", "one")
    before = os.stat(path)
    with open(mounted.mnt / "f.txt", "rb") as old:
        for number in range(20):
            content = b"%03d" % number
            mounted.put_behind("f.txt", content)
            os.utime(mounted.behind / "f.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
            eventually(lambda content=content: mounted.read("f.txt") == content, "the change is seen")
        assert old.read() == b"one"


def test_a_file_with_an_unfinished_save_can_be_renamed_and_is_published_under_its_new_name(
    mounted: MountedVault,
) -> None:
    mounted.put_behind("there.txt", "the other's old version")
    for old, new in (("a.txt", "b.txt"), ("c.txt", "there.txt")):
        client = mounted.spawn(_save_in_two_steps, mounted.mnt / old, "x", 5)
        client.hear()
        client.ask()
        mounted.shell('mv "$1" "$2"', old, new)
        assert old not in os.listdir(mounted.mnt)
        if new == "there.txt":
            assert mounted.read_behind(new) == b"the other's old version"
        client.ask()
        client.say()
        client.result()
        assert mounted.read(new) == mounted.read_behind(new) == b"x" * 10
    assert mounted.names_behind() == {"b.txt", "there.txt"}


def test_a_renamed_directory_takes_its_unfinished_saves_along(mounted: MountedVault) -> None:
    mounted.put_behind("d/f.txt", "old")
    client = mounted.spawn(_save_in_two_steps, mounted.mnt / "d" / "f.txt", "x", 5)
    client.hear()
    client.ask()
    os.rename(mounted.mnt / "d", mounted.mnt / "e")
    assert mounted.read("e/f.txt") == b"old"
    client.ask()
    client.say()
    client.result()
    assert mounted.read("e/f.txt") == mounted.read_behind("e/f.txt") == b"x" * 10
    assert mounted.names_behind() == {"e"}


def _rename(path: Path, other: Path, flags: int) -> int:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(-100, os.fsencode(path), -100, os.fsencode(other), flags)
    return 0 if done == 0 else ctypes.get_errno()


def test_rename_flags_do_what_they_say(mounted: MountedVault) -> None:
    mounted.put_behind("a", "content of a")
    mounted.put_behind("b", "content of b")
    assert _rename(mounted.mnt / "a", mounted.mnt / "b", 1) == errno.EEXIST
    assert (mounted.read_behind("a"), mounted.read_behind("b")) == (b"content of a", b"content of b")
    assert _rename(mounted.mnt / "a", mounted.mnt / "c", 1) in (0, errno.EINVAL)
    name = "c" if "c" in mounted.names_behind() else "a"
    swapped = _rename(mounted.mnt / name, mounted.mnt / "b", 2)
    assert swapped in (0, errno.EINVAL)
    expected = (b"content of b", b"content of a") if swapped == 0 else (b"content of a", b"content of b")
    assert (mounted.read_behind(name), mounted.read_behind("b")) == expected
    assert (mounted.read(name), mounted.read("b")) == expected
