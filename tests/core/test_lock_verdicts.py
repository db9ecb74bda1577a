"""Who is dead: each row of the table, with processes and clocks that the test controls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from tests.core.lock_support import TOKEN
from vaultfs.locks.liveness import Clocks, Judge, Judgement, Processes, Verdict, Watches
from vaultfs.locks.records import Identity, LockContents, OwnerRecord, parse_owner

ME = Identity(pid=10, host="here", boot_id="boot", start_time=500, pid_ns=1, time_ns=2)
LEASE = b".lease-" + TOKEN.encode()


@dataclass
class FakeClocks(Clocks):
    now: float = 1000.0
    boot_now: float = 100.0
    monotonic_now: float = 50.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.monotonic_now

    def boot(self) -> float:
        return self.boot_now

    def go_on(self, seconds: float) -> None:
        self.now += seconds
        self.boot_now += seconds
        self.monotonic_now += seconds

    def suspend(self, seconds: float) -> None:
        self.now += seconds
        self.boot_now += seconds


@dataclass
class FakeProcesses(Processes):
    started: dict[int, int | None] = field(default_factory=dict)  # pid → start time in ticks (100 a second)
    zombies: set[int] = field(default_factory=set)

    def exists(self, pid: int) -> bool | None:
        return None if pid > 2**31 else pid in self.started

    def start_time(self, pid: int) -> int | None:
        return self.started.get(pid)

    def ended(self, pid: int) -> bool:
        return pid in self.zombies


class Court:
    """A judge, and a lock that is looked at again and again."""

    def __init__(self, **options: Any) -> None:
        self.clocks = FakeClocks()
        self.processes = FakeProcesses()
        self.judge = Judge(ME, processes=self.processes, clocks=self.clocks, **options)
        self.watches = Watches(self.clocks)
        self.touched = self.clocks.now

    def look(self, owner: OwnerRecord | None, **contents: Any) -> Judgement:
        raw = msgspec.json.encode(owner) if owner else None
        found = LockContents(
            **{
                "dev": 1,
                "ino": 2,
                "mtime_ns": int(self.touched * 1e9),
                "btime_ns": 7,
                "owner_raw": raw,
                "owner": owner,
                "leases": (LEASE,) if owner else (),
                **contents,
            }
        )
        return self.judge.judge(found, self.watches.look(b"x.lock", found))

    def verdict(self, owner: OwnerRecord | None, **contents: Any) -> Verdict:
        return self.look(owner, **contents).verdict


def full(**keys: Any) -> OwnerRecord:
    fields = {"host": "here", "boot_id": "boot", "start_time": 4000, "pid_ns": 1, "time_ns": 2}
    return OwnerRecord(v=1, pid=77, token=TOKEN, created_at="1970-01-01T00:15:00.000Z", **{**fields, **keys})


def plain(pid: int = 77) -> OwnerRecord:
    return OwnerRecord(v=1, pid=pid, token=TOKEN, created_at="1970-01-01T00:15:00.000Z")


@pytest.fixture
def court() -> Court:
    return Court()


def test_another_boot_of_this_machine_is_dead(court: Court) -> None:
    court.processes.started[77] = 4000
    assert court.verdict(full(boot_id="earlier")) is Verdict.DEAD


@pytest.mark.parametrize("options", [{"shared": True}, {"local": False}])
def test_another_boot_proves_nothing_where_a_second_machine_may_be_at_work(options: dict[str, bool]) -> None:
    assert Court(**options).verdict(full(boot_id="earlier")) is Verdict.UNKNOWN


def test_no_such_process_is_dead_without_any_waiting(court: Court) -> None:
    assert court.verdict(full()) is Verdict.DEAD


def test_a_number_used_again_is_dead(court: Court) -> None:
    court.processes.started[77] = 4001
    assert court.verdict(full()) is Verdict.DEAD


def test_the_same_process_is_alive_however_old(court: Court) -> None:
    court.processes.started[77] = 4000
    court.touched = 0.0
    for _ in range(3):
        court.clocks.go_on(1e7)
        assert court.verdict(full()) is Verdict.ALIVE


def test_a_process_whose_start_cannot_be_seen_is_alive(court: Court) -> None:
    court.processes.started[77] = None
    assert court.verdict(full()) is Verdict.ALIVE


def test_a_zombie_is_dead(court: Court) -> None:
    court.processes.started[77] = 4000
    court.processes.zombies.add(77)
    assert court.verdict(full()) is Verdict.DEAD


def test_another_time_namespace_alone_is_unknown_also_with_a_lease(court: Court) -> None:
    assert court.verdict(full(time_ns=3)) is Verdict.UNKNOWN
    owner = full(time_ns=3, lease_ms=1000, heartbeat=1)
    court.verdict(owner)
    court.clocks.go_on(100)
    assert court.verdict(owner) is Verdict.UNKNOWN


def test_a_number_that_cannot_be_asked_for_is_unknown(court: Court) -> None:
    court.clocks.go_on(100)
    assert court.verdict(plain(pid=2**40)) is Verdict.UNKNOWN


def test_a_shared_record_of_no_process_is_dead_once_stale(court: Court) -> None:
    assert court.verdict(plain()) is Verdict.UNKNOWN
    court.clocks.go_on(9.9)
    assert court.verdict(plain()) is Verdict.UNKNOWN
    court.clocks.go_on(0.2)
    assert court.verdict(plain()) is Verdict.DEAD


def test_a_shared_record_whose_number_was_given_to_a_later_process_is_dead_once_stale(court: Court) -> None:
    court.processes.started[77] = 4000  # at 40 s after boot; it is 100 s now
    assert court.verdict(plain()) is Verdict.ALIVE
    court.clocks.go_on(5)
    court.processes.started[77] = 10300
    assert court.verdict(plain()) is Verdict.UNKNOWN
    court.clocks.go_on(6)
    assert court.verdict(plain()) is Verdict.DEAD


def test_a_shared_record_of_a_living_process_is_alive_and_suspect_if_that_started_later(court: Court) -> None:
    court.touched = 0.0
    court.processes.started[77] = 4000  # at 940 s by the wall clock; the record was made at 900 s
    judgement = court.look(plain())
    assert judgement.verdict is Verdict.ALIVE
    assert judgement.suspect
    court.processes.started[77] = None
    assert not court.look(plain()).suspect


@pytest.mark.parametrize("elsewhere", [{"host": "there"}, {"pid_ns": 9}, {"pid_ns": None}])
def test_an_owner_elsewhere_is_dead_when_its_heartbeat_stood_still_for_its_lease(
    court: Court, elsewhere: dict[str, Any]
) -> None:
    owner = full(**elsewhere, lease_ms=60_000, heartbeat=1)
    court.touched = 0.0
    assert court.verdict(owner) is Verdict.ALIVE
    court.clocks.go_on(59)
    assert court.verdict(msgspec.structs.replace(owner, heartbeat=2)) is Verdict.ALIVE
    court.clocks.go_on(59)
    assert court.verdict(msgspec.structs.replace(owner, heartbeat=2)) is Verdict.ALIVE
    court.clocks.go_on(1)
    assert court.verdict(msgspec.structs.replace(owner, heartbeat=2)) is Verdict.DEAD


def test_a_lease_does_not_run_out_while_we_are_suspended(court: Court) -> None:
    owner = full(host="there", lease_ms=60_000, heartbeat=1)
    court.verdict(owner)
    court.clocks.suspend(100_000)
    assert court.verdict(owner) is Verdict.ALIVE


@pytest.mark.parametrize("elsewhere", [{"host": "there"}, {"pid_ns": 9}])
def test_an_owner_elsewhere_without_lease_is_never_reaped(court: Court, elsewhere: dict[str, Any]) -> None:
    court.touched = 0.0
    for _ in range(3):
        court.clocks.go_on(1e7)
        assert court.verdict(full(**elsewhere)) is Verdict.UNKNOWN


@pytest.mark.parametrize(
    "raw",
    [
        b'{"v":2,"pid":77,"token":"t","created_at":"x"}',
        b'{"v":true,"pid":77,"token":"t","created_at":"x"}',
        b'{"v":1,"pid":77,"token":"t","created_at":"x","start_time":"yesterday"}',
        b'{"v":1,"pid":77,"token":"t","created_at":"x","deep":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    ],
)
def test_a_record_that_is_meant_seriously_but_not_understood_is_unknown(court: Court, raw: bytes) -> None:
    other = parse_owner(raw)
    assert other is not None
    assert not isinstance(other, OwnerRecord)
    court.touched = 0.0
    assert court.verdict(None, owner_raw=raw, other=other) is Verdict.UNKNOWN


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{",
        b"{}",
        b'{"v":1,"pid":0,"token":"t","created_at":"x"}',
        b'{"v":1,"pid":1.5,"token":"t","created_at":"x"}',
        b'{"v":1,"pid":7,"token":"","created_at":"x"}',
        b'{"v":1,"pid":7,"token":"t"}',
    ],
)
def test_what_is_no_record_is_no_owner(raw: bytes) -> None:
    assert parse_owner(raw) is None


@pytest.mark.parametrize(
    "raw",
    [
        b'{"v":1,"pid":7,"token":"t","created_at":"x"}',
        b'{"created_at":"x","token":"t","pid":7.0,"v":1.0,"host":null,"colour":"red"}\r\n',
        b'{"v":1,"pid":7,"token":"t","created_at":"x","odd":"\xff"}',
    ],
)
def test_what_another_tool_takes_for_a_record_is_one(raw: bytes) -> None:
    record = parse_owner(raw)
    assert isinstance(record, OwnerRecord)
    assert record.pid == 7
    assert record.plain


def test_an_ownerless_lock_is_residue_once_stale_and_the_same_at_a_second_look(court: Court) -> None:
    assert court.verdict(None) is Verdict.UNKNOWN
    court.clocks.go_on(11)
    assert court.verdict(None) is Verdict.RESIDUE


def test_the_first_look_at_an_old_ownerless_lock_asks_for_a_second(court: Court) -> None:
    """After a suspend a living owner's lock looks old for the moment that its timers need."""
    court.touched = 0.0
    first = court.look(None)
    assert first.verdict is Verdict.UNKNOWN
    assert 0 < first.look_again < 0.1
    court.clocks.go_on(first.look_again)
    assert court.verdict(None) is Verdict.RESIDUE


@pytest.mark.parametrize("change", [{"owner_raw": b"{"}, {"btime_ns": 8}, {"mtime_ns": 1}])
def test_a_change_between_the_two_looks_starts_over(court: Court, change: dict[str, Any]) -> None:
    court.touched = 0.0
    first = court.look(None, owner_raw=b"")
    court.clocks.go_on(first.look_again)
    assert court.verdict(None, **{"owner_raw": b"", **change}) is Verdict.UNKNOWN


def test_an_ownerless_lock_that_somebody_keeps_touching_is_held_until_a_minute_after_the_last_touch(
    court: Court,
) -> None:
    for _ in range(5):
        assert court.verdict(None) is Verdict.UNKNOWN
        court.clocks.go_on(12)
        court.touched = court.clocks.now - 0.1
    assert court.verdict(None) is Verdict.UNKNOWN
    court.clocks.go_on(59)
    assert court.verdict(None) is Verdict.UNKNOWN
    court.clocks.go_on(2)
    assert court.verdict(None) is Verdict.RESIDUE


def test_an_mtime_in_the_future_is_as_old_as_it_was_watched(court: Court) -> None:
    court.touched = court.clocks.now + 1e6
    assert court.verdict(None) is Verdict.UNKNOWN
    court.clocks.go_on(9)
    assert court.verdict(None) is Verdict.UNKNOWN
    court.clocks.go_on(2)
    assert court.verdict(None) is Verdict.RESIDUE


def test_half_written_owners_count_as_nothing_only_if_their_writer_is_dead(court: Court) -> None:
    court.touched = 0.0
    scraps = ((b".owner.json.88.1.u.tmp", 88),)
    court.verdict(None, scraps=scraps)
    court.clocks.go_on(1)
    assert court.verdict(None, scraps=scraps) is Verdict.RESIDUE
    court.processes.started[88] = 1
    assert court.verdict(None, scraps=scraps) is Verdict.UNKNOWN


def test_a_lease_without_an_owner_is_never_reaped(court: Court) -> None:
    court.touched = 0.0
    court.verdict(None, leases=(LEASE,))
    court.clocks.go_on(1000)
    assert court.verdict(None, leases=(LEASE,)) is Verdict.UNKNOWN


def test_a_dead_owner_without_lease_is_reaped_after_a_second_look_only(court: Court) -> None:
    first = court.look(full(), leases=())
    assert first.verdict is Verdict.UNKNOWN
    court.clocks.go_on(first.look_again)
    assert court.verdict(full(), leases=()) is Verdict.DEAD


@pytest.mark.parametrize("leases", [(b".lease-other",), (LEASE, b".lease-other")])
def test_a_dead_owner_with_somebody_elses_lease_is_left_alone(court: Court, leases: tuple[bytes, ...]) -> None:
    court.verdict(full(), leases=leases)
    court.clocks.go_on(100)
    assert court.verdict(full(), leases=leases) is Verdict.UNKNOWN


def test_foreign_comes_before_everything_else(court: Court) -> None:
    assert court.verdict(full(), foreign="holds a novel") is Verdict.FOREIGN


def test_a_token_that_is_no_file_name_is_foreign(court: Court) -> None:
    owner = msgspec.structs.replace(full(), token="../../notes")
    assert court.verdict(owner, leases=()) is Verdict.FOREIGN


def test_watches_forget_the_longest_unused(court: Court) -> None:
    court.watches.limit = 2
    found = LockContents(dev=1, ino=2, mtime_ns=0, btime_ns=0, owner_raw=None, owner=None)
    first = court.watches.look(b"a", found)
    court.watches.look(b"b", found)
    assert court.watches.look(b"a", found) is first
    court.watches.look(b"c", found)
    assert court.watches.look(b"a", found) is first
