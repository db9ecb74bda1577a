"""Who is dead: the one place that decides whether a lock may be taken from its owner.

The rule is: **only what is provably dead is reaped.** Age alone proves nothing (a suspended laptop, SIGSTOP, a
clock that jumps: all make a live owner look old), a process that we cannot see proves nothing (hidden /proc,
other pid namespaces), and what we do not understand is left alone and reported. The table of lock-protocol.md,
"Reap: who is dead", is `Judge.judge` row by row.

What is proof:

- the owner's machine has restarted since (same host, another boot id; only on a file system that no second
  machine can mount, and not in a vault that is ``shared``),
- in our own pid and time namespace: ``kill(pid, 0)`` says ESRCH, or the number belongs to a process that started
  at another time, or to a zombie of which no thread lives,
- for an owner elsewhere that promised heartbeats: none came for as long as it promised, watched by us, on our own
  monotonic clock (which stands still while *we* sleep).

Time is therefore not read off files but *watched*: `Watches` remembers what earlier looks at the same lock saw.
A `Watch` belongs to whoever holds the `Watches` object and is guarded by that owner's mutex.

What is not promised: a peer that ignores hosts and namespaces may still take a lock of ours for a dead one.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from vaultfs import kernel
from vaultfs.locks.records import Identity, LockContents, OwnerRecord, lease_name
from vaultfs.patience import within

__all__ = [
    "LOCAL_FILE_SYSTEMS",
    "Clocks",
    "Judge",
    "Judgement",
    "Processes",
    "ProcessMark",
    "Verdict",
    "Watch",
    "Watches",
    "is_local",
]

UNKNOWN_TOUCHER = 60.0  # seconds without a new mtime before somebody unknown who kept touching a lock is forgotten
SECOND_LOOK = 0.02  # seconds between two looks that must agree: a resumed owner's timers fire within these

LOCAL_FILE_SYSTEMS = frozenset(  # those that only one running kernel can have mounted; of all others: "perhaps not"
    (
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0xF2F52010,  # f2fs
        0x2FC12FC1,  # zfs
        0xCA451A4E,  # bcachefs
        0x01021994,  # tmpfs
        0x858458F6,  # ramfs
        0x794C7630,  # overlay
        0x4D44,  # vfat
        0x2011BAB0,  # exfat
        0x7366746E,  # ntfs3
        0x3153464A,  # jfs
        0x3434,  # nilfs2
        0x24051905,  # ubifs
    )
)


class Verdict(StrEnum):
    """What a lock is. The values are those of `LockReport.verdict`."""

    ALIVE = "alive"
    DEAD = "dead"  # may be reaped
    RESIDUE = "residue"  # ownerless and old: may be removed
    FOREIGN = "foreign"  # no lock of this protocol: never touched
    UNKNOWN = "unknown"  # cannot be told: never touched
    OURS = "ours"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and why in words for a person."""

    verdict: Verdict
    evidence: str
    suspect: bool = False  # alive as far as can be proven, but the pid seems to be somebody else's by now
    look_again: float = 0.0  # seconds after which a second look may prove more; 0: no use in hurrying
    alive_here: bool = False  # the record's pid counts in our namespace, and names that very process


class ProcessMark(Protocol):
    """What both a lock's owner record and the fence's record say about a process."""

    @property
    def pid(self) -> int: ...
    @property
    def host(self) -> str | None: ...
    @property
    def boot_id(self) -> str | None: ...
    @property
    def start_time(self) -> int | None: ...
    @property
    def pid_ns(self) -> int | None: ...
    @property
    def time_ns(self) -> int | None: ...


class Clocks:
    """The three clocks; tests put others in their place."""

    def wall(self) -> float:
        """Seconds since the epoch: to compare with what files say, never to measure with."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds, standing still while this machine is suspended: to measure other people's silence with."""
        return time.monotonic()

    def boot(self) -> float:
        """Seconds since boot, suspends included: the clock of /proc/PID/stat's start time."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


PATIENCE = 0.03  # seconds


class Processes:
    """What the kernel says about processes of our own pid namespace; tests put others in its place."""

    def exists(self, pid: int) -> bool | None:
        """False only for ESRCH, the one proof of absence; None if the number cannot even be asked for."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        except OverflowError:
            return None
        return True

    def start_time(self, pid: int) -> int | None:
        """When `pid` started, in clock ticks since boot; None if it cannot be seen."""
        fields = self._stat(f"/proc/{pid}/stat")
        return int(fields[19]) if fields else None

    def ended(self, pid: int) -> bool:
        """True if `pid` is a zombie (or being reaped) and no thread of it lives; False if that cannot be seen."""
        fields = self._stat(f"/proc/{pid}/stat")
        if not fields or fields[0] not in (b"Z", b"X"):
            return False
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            return False  # gone this moment or hidden: the next look will tell, this one proves nothing
        states = [self._stat(f"/proc/{pid}/task/{thread}/stat") for thread in threads]
        return all(state is not None and state[0] in (b"Z", b"X") for state in states)

    def program(self, pid: int) -> str | None:
        """The name of the program that `pid` runs, for messages."""
        try:
            with open(f"/proc/{pid}/comm", "rb") as file:
                return os.fsdecode(file.read().strip()) or None
        except OSError:
            return None  # only words for a message

    @staticmethod
    def _stat(path: str) -> list[bytes] | None:
        """Fields 3… of a stat file: behind the program's name, which may itself hold spaces and brackets.

        The read waits while the process is in execve(2), which may itself wait for a close on a vaultfs mount, and so
        for whoever asks here: hence the bound.
        """
        try:
            fields = within(PATIENCE, lambda: Path(path).read_bytes()).rpartition(b")")[2].split()
        except (OSError, TimeoutError):
            return None  # no such process or a hidden /proc: the callers say what that proves, namely nothing
        return fields if len(fields) > 19 else None


@dataclass(slots=True)
class Watch:
    """What was seen of one lock so far. Times without a clock's name are on the monotonic one."""

    record: tuple[int, int, int, str | None]  # which lock, by which owner: dev, ino, birth time, token
    first_boot: float  # boot clock at the first look
    mtime_ns: int
    mtime_since: float
    raw: bytes | None
    steady_since: float  # since when mtime and owner bytes have been what they are
    heartbeat: int | None
    heartbeat_since: float
    moved_at: float | None = None  # when the mtime was last seen to move


@dataclass(slots=True)
class Watches:
    """The looks so far, by place; at most `limit` of them, the longest unused forgotten first."""

    clocks: Clocks = field(default_factory=Clocks)
    limit: int = 1024
    _seen: OrderedDict[bytes, Watch] = field(default_factory=OrderedDict)

    def look(self, place: bytes, contents: LockContents) -> Watch:
        """Adds one look at the lock at `place` (vault-relative path of the lock directory) to what is known."""
        now = self.clocks.monotonic()
        owner = contents.owner
        record = (contents.dev, contents.ino, contents.btime_ns, owner.token if owner else None)
        heartbeat = owner.heartbeat if owner else None
        watch = self._seen.get(place)
        if watch is None or watch.record != record:
            watch = Watch(
                record=record,
                first_boot=self.clocks.boot(),
                mtime_ns=contents.mtime_ns,
                mtime_since=now,
                raw=contents.owner_raw,
                steady_since=now,
                heartbeat=heartbeat,
                heartbeat_since=now,
            )
            self._seen[place] = watch
            if len(self._seen) > self.limit:
                self._seen.popitem(last=False)
            return watch
        self._seen.move_to_end(place)
        if watch.mtime_ns != contents.mtime_ns:
            watch.mtime_ns, watch.mtime_since, watch.moved_at, watch.steady_since = contents.mtime_ns, now, now, now
        if watch.raw != contents.owner_raw:
            watch.raw, watch.steady_since = contents.owner_raw, now
        if watch.heartbeat != heartbeat:
            watch.heartbeat, watch.heartbeat_since = heartbeat, now
        return watch

    def forget(self, place: bytes) -> None:
        """The lock at `place` is gone."""
        self._seen.pop(place, None)


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges locks on behalf of the process `me`.

    `stale`: seconds after which a lock without proof of life may be doubted. `shared`: several machines use this
    vault. `local`: its file system can be mounted by one machine only (see `is_local`).
    """

    me: Identity
    stale: float = 10.0
    shared: bool = False
    local: bool = True
    processes: Processes = field(default_factory=Processes)
    clocks: Clocks = field(default_factory=Clocks)

    def age(self, contents: LockContents, watch: Watch) -> float:
        """Seconds since the lock directory was last touched.

        An mtime in the future means that clocks disagree: then it is as old as we have watched it stand still.
        """
        age = self.clocks.wall() - contents.mtime_ns / 1e9
        return age if age >= 0 else self.clocks.monotonic() - watch.mtime_since

    def judge(self, contents: LockContents, watch: Watch) -> Judgement:
        """The verdict on what one look has found, given the looks before it. Touches nothing."""
        if contents.foreign is not None:
            return Judgement(Verdict.FOREIGN, contents.foreign)
        if contents.unreadable is not None:
            return Judgement(Verdict.UNKNOWN, contents.unreadable)
        if contents.other is not None:
            return Judgement(Verdict.UNKNOWN, contents.other.reason)
        making = [pid for _, pid in contents.scraps if self.processes.exists(pid) is not False]
        if contents.owner is None:
            return self._judge_ownerless(contents, watch, making)
        if lease_name(contents.owner.token) is None:
            return Judgement(Verdict.FOREIGN, "its token is no file name")
        judgement = self._judge_owner(contents.owner, contents, watch)
        if judgement.verdict is not Verdict.DEAD:
            return judgement
        if making:
            return Judgement(Verdict.UNKNOWN, f"{judgement.evidence}, but process {making[0]} is writing an owner")
        if contents.leases and contents.leases != (contents.lease,):
            return Judgement(Verdict.UNKNOWN, f"{judgement.evidence}, but a lease of somebody else is in it")
        if not contents.leases:  # written before there were leases, or left by a reaper that died: no lease decides
            return self._after_second_look(judgement, watch)
        return judgement

    def _judge_ownerless(self, contents: LockContents, watch: Watch, making: list[int]) -> Judgement:
        what = "no owner" if contents.owner_raw is None else "an owner file that cannot be parsed"
        if contents.leases:
            return Judgement(Verdict.UNKNOWN, f"{what}, but a lease")
        if making:
            return Judgement(Verdict.UNKNOWN, f"{what}, but process {making[0]} is writing one")
        if watch.moved_at is not None and self.clocks.monotonic() - watch.moved_at < UNKNOWN_TOUCHER:
            return Judgement(Verdict.UNKNOWN, f"{what}, but somebody keeps touching it")
        if self.age(contents, watch) <= self.stale:
            return Judgement(Verdict.UNKNOWN, f"{what}, touched less than {self.stale:g} s ago")
        return self._after_second_look(Judgement(Verdict.RESIDUE, f"{what}, untouched for {self.stale:g} s"), watch)

    def _after_second_look(self, judgement: Judgement, watch: Watch) -> Judgement:
        """`judgement` if two looks, far enough apart for a resumed owner to have stirred, have seen the same."""
        missing = watch.steady_since + SECOND_LOOK - self.clocks.monotonic()
        if missing <= 0:
            return judgement
        return Judgement(Verdict.UNKNOWN, f"{judgement.evidence} (to be confirmed)", look_again=missing)

    def _judge_owner(self, owner: OwnerRecord, contents: LockContents, watch: Watch) -> Judgement:
        if owner.plain:
            return self._judge_plain(owner, contents, watch)
        judgement = self.judge_process(owner)
        if judgement.verdict is not Verdict.UNKNOWN or self._differs_in_time_only(owner):
            return judgement
        if owner.lease_ms is None or owner.lease_ms <= 0 or owner.heartbeat is None:
            return judgement
        silent = self.clocks.monotonic() - watch.heartbeat_since
        if silent >= owner.lease_ms / 1000:
            return Judgement(Verdict.DEAD, f"{judgement.evidence}; no heartbeat while watched for {silent:.0f} s")
        return Judgement(Verdict.ALIVE, f"{judgement.evidence}; its lease of {owner.lease_ms / 1000:g} s runs")

    def _judge_plain(self, owner: OwnerRecord, contents: LockContents, watch: Watch) -> Judgement:
        """A shared record: a pid, and nothing that says of which machine or namespace."""
        pid, old = owner.pid, self.age(contents, watch) > self.stale
        exists = self.processes.exists(pid)
        if exists is None:
            return Judgement(Verdict.UNKNOWN, f"{pid} is no process number here")
        if not exists or self.processes.ended(pid):
            if old:
                return Judgement(Verdict.DEAD, f"there is no process {pid}")
            return Judgement(
                Verdict.UNKNOWN, f"there is no process {pid}, but the lock is younger than {self.stale:g} s"
            )
        started = self._started(pid)
        if started is not None and started > watch.first_boot + SECOND_LOOK:
            if old:
                return Judgement(Verdict.DEAD, f"process {pid} is younger than the lock")
            return Judgement(Verdict.UNKNOWN, f"process {pid} is younger than the lock, which is not old yet")
        return Judgement(
            Verdict.ALIVE,
            f"process {pid} lives",
            suspect=self._started_after(started, owner.created_at),
            alive_here=True,
        )

    def _started(self, pid: int) -> float | None:
        ticks = self.processes.start_time(pid)
        return None if ticks is None else ticks / os.sysconf("SC_CLK_TCK")

    def _started_after(self, started: float | None, created_at: str) -> bool:
        """By the wall clock, so only good for a hint to a person."""
        try:
            created = datetime.fromisoformat(created_at).timestamp()
        except (ValueError, OverflowError):
            return False
        return started is not None and self.clocks.wall() - self.clocks.boot() + started > created + 1

    def _differs_in_time_only(self, who: ProcessMark) -> bool:
        me = self.me
        return (who.host, who.boot_id, who.pid_ns) == (me.host, me.boot_id, me.pid_ns) and who.time_ns != me.time_ns

    def judge_process(self, who: ProcessMark) -> Judgement:
        """Dead, alive, or unknown for a process that says where its number counts; by proof, never by age."""
        me, pid = self.me, who.pid
        if who.host is None or who.host != me.host:
            return Judgement(Verdict.UNKNOWN, f"process {pid} of another host")
        if who.boot_id is None or me.boot_id is None:
            return Judgement(Verdict.UNKNOWN, f"process {pid} of this host, of an unknown boot")
        if who.boot_id != me.boot_id:
            if self.local and not self.shared:
                return Judgement(Verdict.DEAD, "the machine has restarted since")
            return Judgement(Verdict.UNKNOWN, f"process {pid} of this host or its double, of another boot")
        if who.pid_ns is None or who.pid_ns != me.pid_ns:
            return Judgement(Verdict.UNKNOWN, f"process {pid} of another pid namespace")
        if who.time_ns != me.time_ns:
            return Judgement(Verdict.UNKNOWN, f"process {pid} of another time namespace")
        exists = self.processes.exists(pid)
        if exists is None:
            return Judgement(Verdict.UNKNOWN, f"{pid} is no process number here")
        if not exists:
            return Judgement(Verdict.DEAD, f"there is no process {pid}")
        started = self.processes.start_time(pid)
        if who.start_time is not None and started is not None and started != who.start_time:
            return Judgement(Verdict.DEAD, f"process {pid} is another one by now")
        if self.processes.ended(pid):
            return Judgement(Verdict.DEAD, f"process {pid} has ended and waits for its parent")
        return Judgement(Verdict.ALIVE, f"process {pid} lives", alive_here=True)


def is_local(descriptor: int) -> bool:
    """True if the file system of `descriptor` is one that only one running kernel can have mounted.

    On any other a restart of *this* machine proves nothing: another one, with the same machine id, may be at work.
    """
    return kernel.filesystem_type(descriptor) in LOCAL_FILE_SYSTEMS
