"""Many programs, one file: a busy lock holds up those who need it and no one else (contract, promise 10)."""

from __future__ import annotations

import os
import shutil
from typing import Any

from tests.mount.harness import MountedVault, drop_lock, eventually, hear, living_process, make_lock, say


def _save_from_many_threads(path: str, count: int) -> list[int]:
    import os
    import threading

    def save(number: int) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(descriptor, b"%d\n" % number * 100)
        try:
            os.close(descriptor)
            results[number] = 0
        except OSError as error:
            results[number] = error.errno or -1

    results = [-2] * count
    threads = [threading.Thread(target=save, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    say("waiting")
    for thread in threads:
        thread.join()
    return results


def test_many_who_wait_for_one_lock_all_get_through_and_hold_up_nobody(vault_mount: Any) -> None:
    mounted: MountedVault = vault_mount("lock-timeout=60s", files={"f.txt": "old", "d/g.txt": "other"})
    mounted.expect_kept(None)  # overlapping whole-file saves keep what they displace
    with living_process() as pid:
        token = make_lock(mounted.behind / "f.txt", pid)
        crowd = mounted.spawn(_save_from_many_threads, mounted.mnt / "f.txt", 50)
        crowd.hear()
        before = mounted.counters()["saves"]
        for number in range(20):  # another file is saved, another directory listed, while fifty wait
            mounted.shell('echo "$1" > "$2"; ls "$3" > /dev/null', number, mounted.mnt / "d/g.txt", mounted.mnt / "d")
        assert mounted.counters()["saves"] - before == 20
        assert crowd.running and mounted.read_behind("f.txt") == b"old"
        drop_lock(mounted.behind / "f.txt", token)
        assert crowd.result() == [0] * 50


def test_a_draft_that_cannot_be_saved_any_more_does_not_keep_others_from_being_tried_again(vault_mount: Any) -> None:
    mounted: MountedVault = vault_mount("lock-timeout=0.2s", files={"f.txt": "old", "d/g.txt": "old"})
    mounted.expect_log("replaced|busy|lock")
    mounted.expect_kept(None)

    def save_two(first: str, second: str) -> list[int]:
        import os

        results = []
        descriptors = [os.open(path, os.O_WRONLY | os.O_TRUNC) for path in (first, second)]
        for descriptor in descriptors:
            os.write(descriptor, b"new")
        say("open")
        hear()
        for descriptor in descriptors:
            try:
                os.close(descriptor)
                results.append(0)
            except OSError as error:
                results.append(error.errno or -1)
        return results

    with living_process() as pid:
        token = make_lock(mounted.behind / "f.txt", pid)
        saver = mounted.spawn(save_two, mounted.mnt / "f.txt", mounted.mnt / "d/g.txt")
        saver.hear()
        shutil.rmtree(mounted.behind / "d")
        (mounted.behind / "d").mkdir()
        (mounted.behind / "d/other.txt").write_text("somebody else's")
        saver.say()
        refused = saver.result()
        assert refused[0] != 0
        drop_lock(mounted.behind / "f.txt", token)
    eventually(lambda: mounted.read_behind("f.txt") == b"new", "the refused save is tried again")
    assert (mounted.behind / "d/other.txt").read_text() == "somebody else's"
    if refused[1] == 0:
        assert mounted.read_behind("d/g.txt") == b"new"
    else:
        eventually(lambda: any(mounted.kept_content(one) == b"new" for one in mounted.kept()), "its draft is kept")


def test_an_attribute_can_be_removed_by_path_while_the_file_is_being_replaced(mounted: MountedVault) -> None:
    mounted.put_behind("f.txt", "old")
    path = mounted.mnt / "f.txt"
    os.setxattr(path, "user.label", b"draft")

    def replace(path: str) -> None:
        import os

        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(descriptor, b"new")
        say("open")
        hear()
        os.close(descriptor)

    writer = mounted.spawn(replace, path)
    writer.hear()
    os.removexattr(path, "user.label")
    writer.say()
    writer.result()
    assert mounted.read_behind("f.txt") == b"new"
    assert "user.label" not in os.listxattr(mounted.behind / "f.txt")


def test_a_lease_on_one_file_holds_up_only_who_opens_that_file(vault_mount: Any) -> None:
    """Samba takes leases on what it serves (kernel oplocks); whoever opens such a file waits for it to be given up."""
    mounted: MountedVault = vault_mount(files={"leased.txt": "leased", "other.txt": "other"})

    def hold(path: str) -> None:
        import fcntl
        import os
        import signal

        signal.signal(signal.SIGIO, signal.SIG_IGN)
        descriptor = os.open(path, os.O_RDWR)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        say("held")
        hear()
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(descriptor)

    holder = mounted.spawn(hold, mounted.behind / "leased.txt")
    holder.hear()
    reader = mounted.spawn_shell('cat "$1"', mounted.mnt / "leased.txt")
    for number in range(5):
        mounted.shell('cat "$1" > /dev/null; echo "$2" > "$3"', mounted.mnt / "other.txt", number, mounted.mnt / "n")
    assert reader.running
    holder.say()
    assert reader.end() == (0, "leased")
    holder.result()


def _save_text(path: str, text: str) -> int:
    import os

    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(descriptor, text.encode())
    say("closing")
    try:
        os.close(descriptor)
    except OSError as error:
        return error.errno or -1
    return 0


def test_a_refused_save_is_not_lost_to_another_process_of_the_same_program(vault_mount: Any) -> None:
    mounted: MountedVault = vault_mount("lock-timeout=2s", files={"f.txt": "old"})
    mounted.expect_kept(None)
    with living_process() as pid:
        token = make_lock(mounted.behind / "f.txt", pid)
        first = mounted.spawn(_save_text, mounted.mnt / "f.txt", "text of the first agent")
        assert first.result() != 0
        second = mounted.spawn(_save_text, mounted.mnt / "f.txt", "text of the second agent")
        second.hear()
        drop_lock(mounted.behind / "f.txt", token)
        assert second.result() == 0
    assert mounted.read_behind("f.txt") == b"text of the second agent"
    eventually(
        lambda: any(mounted.kept_content(one) == b"text of the first agent" for one in mounted.kept()),
        "the first agent's text is kept",
        step=0.3,
    )
