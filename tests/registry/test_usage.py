"""Use adds up, counts once, survives a kill, and is reported by what is asked for."""

import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.config import RetentionConfig
from registry.service import Registry
from registry.usage_ledger import UsageLedger
from registry.usage_records import DAY_S, HOUR_S, Consumer, UsageBatch, UsageGroup, UsageReport, UsageRow
from tests.registry import usage_sender
from tests.registry.uploads import open_registry

ROOT = Path(__file__).parents[2]
NOW_S = 400 * DAY_S
pytestmark = pytest.mark.usefixtures("backend")
LEGAL = Consumer("acme", "legal", 2, "d" * 64)
SQL = Consumer("acme", "sql", 1, "e" * 64)
BASE = Consumer("beta")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    registry = open_registry(tmp_path, lambda: NOW_S)
    yield registry
    registry.close()


def hand_over(registry: Registry, ledger: UsageLedger) -> None:
    while (batch := ledger.batch()) is not None:
        ledger.acknowledged(registry.usage.take(batch))


def report(registry: Registry, *groups: UsageGroup, tenant: str | None = None) -> list[UsageRow]:
    return list(registry.usage.report(from_s=None, to_s=None, tenant=tenant, group_by=groups).rows)


def total(registry: Registry) -> UsageRow:
    (row,) = report(registry)
    return row


def test_use_is_added_up_by_what_is_asked_for(registry: Registry) -> None:
    now_s = [float(NOW_S - DAY_S)]
    gateway, replica = (UsageLedger(name, lambda: now_s[0]) for name in ("g", "r"))
    gateway.add(LEGAL, requests=1, prompt_tokens=5, output_tokens=7)
    gateway.add(LEGAL, requests=1, prompt_tokens=1, output_tokens=1)
    replica.add(LEGAL, device_ns=3_000_000_000)
    now_s[0] += HOUR_S
    gateway.add(LEGAL, requests=1, prompt_tokens=10, output_tokens=20)
    gateway.add(BASE, requests=2, prompt_tokens=4, output_tokens=4)
    now_s[0] += DAY_S - HOUR_S - 1
    replica.add(SQL, device_ns=5)
    for ledger in (gateway, replica):
        hand_over(registry, ledger)
    by_version = report(registry, UsageGroup.TENANT, UsageGroup.VERSION)
    legal = {"tenant": "acme", "adapter": "legal", "version": 2, "digest": "d" * 64}
    assert by_version[0].model_dump(exclude_none=True) == {
        **legal, "requests": 3, "prompt_tokens": 16, "output_tokens": 28, "device_ns": 3_000_000_000,
    }  # fmt: skip
    assert [(row.tenant, row.adapter, row.version, row.digest) for row in by_version[1:]] == [
        ("acme", "sql", 1, "e" * 64),
        ("beta", None, None, None),
    ]
    assert by_version[0].device_s == 3.0
    assert [(row.start_s, row.requests) for row in report(registry, UsageGroup.HOUR)] == [
        (NOW_S - DAY_S, 2), (NOW_S - DAY_S + HOUR_S, 3), (NOW_S - HOUR_S, 0),
    ]  # fmt: skip
    assert [(row.start_s, row.tenant, row.requests) for row in report(registry, UsageGroup.DAY, UsageGroup.TENANT)] == [
        (NOW_S - DAY_S, "acme", 3), (NOW_S - DAY_S, "beta", 2),
    ]  # fmt: skip
    assert [row.requests for row in report(registry, tenant="beta")] == [2]


def test_report_of_nothing_is_empty_by_group_and_zero_in_all(registry: Registry) -> None:
    assert report(registry, UsageGroup.TENANT) == []
    assert (total(registry).requests, total(registry).device_ns) == (0, 0)


def test_range_takes_hours_by_their_beginning(registry: Registry) -> None:
    for hour in range(4):
        ledger = UsageLedger("g", lambda hour=hour: float(NOW_S - DAY_S + hour * HOUR_S))  # type: ignore[misc]
        ledger.add(LEGAL, requests=1)
        hand_over(registry, ledger)
    found = registry.usage.report(from_s=NOW_S - DAY_S + HOUR_S, to_s=NOW_S - DAY_S + 3 * HOUR_S, group_by=())
    assert found.rows[0].requests == 2


def test_report_says_when_it_is_cut(registry: Registry) -> None:
    ledger = UsageLedger("g", lambda: float(NOW_S))
    for number in range(1, 8):
        ledger.add(Consumer("t", "a", number, f"{number:064d}"), requests=1)
    hand_over(registry, ledger)

    def ask(limit: int) -> UsageReport:
        return registry.usage.report(from_s=None, to_s=None, group_by=(UsageGroup.VERSION,), limit=limit)

    assert (len(ask(7).rows), ask(7).is_whole) == (7, True)
    assert (len(ask(6).rows), ask(6).is_whole) == (6, False)


def test_batch_that_comes_again_counts_once(registry: Registry) -> None:
    ledger = UsageLedger("g", lambda: float(NOW_S))
    ledger.add(LEGAL, requests=1)
    first = ledger.batch()
    assert first is not None
    registry.usage.take(first)  # and the answer is lost
    ledger.add(LEGAL, requests=1)
    assert ledger.batch() == first
    hand_over(registry, ledger)
    assert registry.usage.take(first) == 2
    assert total(registry).requests == 2


def test_batches_of_a_process_that_was_started_again_are_new(registry: Registry) -> None:
    for _ in range(2):
        ledger = UsageLedger("g", lambda: float(NOW_S))
        ledger.add(LEGAL, requests=1)
        hand_over(registry, ledger)
    assert total(registry).requests == 2


def test_lost_answers_from_many_sources_lose_and_double_nothing(registry: Registry) -> None:
    counted: Counter[str] = Counter()
    lock = threading.Lock()

    def work(seed: int) -> None:
        rng, ledger = random.Random(seed), UsageLedger(f"g{seed}", lambda: float(NOW_S))
        for _ in range(15):
            tenant, tokens = rng.choice("abc"), rng.randrange(100)
            ledger.add(Consumer(tenant), requests=1, output_tokens=tokens)
            with lock:
                counted[tenant] += tokens
            batch = ledger.batch()
            assert batch is not None
            for _ in range(rng.randint(1, 3)):
                last = registry.usage.take(batch)
            if rng.random() < 0.6:
                ledger.acknowledged(last)
        hand_over(registry, ledger)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {row.tenant: row.output_tokens for row in report(registry, UsageGroup.TENANT)} == counted
    assert total(registry).requests == 60


def test_nothing_acknowledged_is_lost_or_doubled_by_kill(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.registry.usage_sender", str(tmp_path)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(20)]
    child.send_signal(signal.SIGKILL)
    lines += [line for line in child.stdout.readlines() if line.endswith("\n")]
    child.stdout.close()
    child.wait()
    acknowledged = int(lines[-1])
    registry = open_registry(tmp_path, lambda: usage_sender.NOW_S)
    stored = total(registry).requests
    assert acknowledged <= stored <= acknowledged + 1
    for sequence in (acknowledged, acknowledged + 1, acknowledged + 1):
        registry.usage.take(usage_sender.batch(sequence))
    assert total(registry).requests == acknowledged + 1
    assert total(registry).output_tokens == (acknowledged + 1) * (acknowledged + 2) // 2
    registry.check_integrity()
    registry.close()


def test_use_past_its_retention_goes(tmp_path: Path) -> None:
    now_s = [float(NOW_S)]
    registry = open_registry(tmp_path, lambda: now_s[0], retention=RetentionConfig(usage_s=2 * DAY_S))
    ledger = UsageLedger("g", lambda: now_s[0])
    for _ in range(4):
        ledger.add(LEGAL, requests=1)
        hand_over(registry, ledger)
        now_s[0] += DAY_S
    assert [row.start_s for row in report(registry, UsageGroup.DAY)] == [
        NOW_S + DAY_S,
        NOW_S + 2 * DAY_S,
        NOW_S + 3 * DAY_S,
    ]
    registry.close()


def test_use_is_in_a_backup(registry: Registry, tmp_path: Path) -> None:
    ledger = UsageLedger("g", lambda: float(NOW_S))
    ledger.add(LEGAL, requests=1, device_ns=7)
    batch = ledger.batch()
    assert batch is not None
    registry.usage.take(batch)
    registry.backup(str(tmp_path / "backup"))
    other = open_registry(tmp_path / "other", lambda: NOW_S)
    other.restore(str(tmp_path / "backup"))
    other.usage.take(batch)
    assert report(other, UsageGroup.VERSION) == report(registry, UsageGroup.VERSION)
    other.close()


class TestLedger:
    """What waits for a registry that is away."""

    def test_hours_are_merged_before_anything_is_lost(self) -> None:
        now_s = [0.0]
        ledger = UsageLedger("g", lambda: now_s[0], max_entries=10)
        for _ in range(50):
            for tenant in "abc":
                ledger.add(Consumer(tenant), requests=1, device_ns=2)
            now_s[0] += HOUR_S
        entries = self._all(ledger)
        assert len(entries) <= 10
        assert Counter({t: sum(e.requests for e in entries if e.tenant == t) for t in "abc"}) == dict.fromkeys(
            "abc", 50
        )
        assert sum(entry.device_ns for entry in entries) == 300
        assert ledger.num_lost == 0

    def test_consumers_that_wait_already_lose_nothing_in_the_next_hour(self) -> None:
        now_s = [0.0]
        ledger = UsageLedger("g", lambda: now_s[0], max_entries=3)
        for _ in range(4):
            for tenant in "abc":
                ledger.add(Consumer(tenant), requests=1)
            now_s[0] += HOUR_S
        entries = self._all(ledger)
        assert {(entry.tenant, entry.hour_s): entry.requests for entry in entries} == {
            (tenant, 3 * HOUR_S): 4 for tenant in "abc"
        }
        assert ledger.num_lost == 0

    def test_memory_is_bounded_and_the_loss_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        ledger = UsageLedger("g", lambda: 0.0, max_entries=5)
        for number in range(20):
            ledger.add(Consumer(f"t{number}"), requests=1)
        assert len(self._all(ledger)) == 5
        assert ledger.num_lost == 15
        assert caplog.text.count("is lost") == 1

    def test_late_acknowledgement_changes_nothing(self) -> None:
        ledger = UsageLedger("g", lambda: 0.0)
        ledger.add(BASE, requests=1)
        first = ledger.batch()
        assert first is not None
        ledger.acknowledged(first.sequence)
        ledger.add(BASE, requests=1)
        second = ledger.batch()
        ledger.acknowledged(first.sequence)
        assert ledger.batch() is second

    def _all(self, ledger: UsageLedger) -> list:  # type: ignore[type-arg]
        entries = []
        while (batch := ledger.batch()) is not None:
            entries += batch.entries
            ledger.acknowledged(batch.sequence)
        return entries


def test_batch_refuses_what_no_member_would_send() -> None:
    with pytest.raises(ValueError, match="sequence"):
        UsageBatch(source="g", sequence=0, entries=())
