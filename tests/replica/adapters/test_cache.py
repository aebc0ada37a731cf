"""The adapter cache over real threads and a real node store."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from replica.adapters.cache import AdapterCache, AdapterLease
from replica.adapters.fit import Budgets, ImagePlanner
from replica.adapters.node_store import NodeStore
from replica.adapters.stats import STAGES
from replica.config import MIB, AdapterCacheConfig
from replica.errors import AdapterTooLarge, AdapterUnavailable, ReplicaError, UnknownAdapter
from tests.replica.adapters.made import QV, SITES, DictSource, Made, assert_holds, layout_of, make_adapter

ADAPTERS = [make_adapter(seed, rank=rank) for seed, rank in enumerate((8, 8, 8, 8, 4, 16))]
CPU = torch.device("cpu")


def image_bytes(made: Made) -> int:
    return layout_of(made, torch.float32).num_bytes


R8_BYTES = image_bytes(ADAPTERS[0])


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A cache with its store and source, and helpers that wait as an engine's step loop would."""

    def __init__(self, folder: Path, source: DictSource, clock: Callable[[], float], **limits: Any) -> None:
        store_bytes = limits.pop("store_bytes", 64 * MIB)
        self.source = source
        self.store = NodeStore(folder, source, store_bytes)
        config = AdapterCacheConfig(node_store=folder, node_store_bytes=store_bytes, **limits)
        self.cache = AdapterCache.build(config, self.store, SITES, CPU, torch.float32, clock)
        self.changed = threading.Event()
        self.cache.on_change(self.changed.set)

    def stage(self, *adapters: Made) -> None:
        for made in adapters:
            self.source.blobs[made.manifest.blob_sha256] = made.blob
            self.store.stage(made.manifest)

    def until(self, done: Callable[[], bool], limit_s: float = 20.0) -> None:
        end_s = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < end_s, repr(self.cache)
            self.changed.wait(0.05)
            self.changed.clear()
            self.cache.poll()
            self.cache.check_integrity()

    def ready(self, made: Made) -> AdapterLease:
        lease = self.cache.acquire(made.digest)
        self.until(lambda: lease.ready or lease.error is not None)
        assert lease.error is None, lease.error
        assert_holds(lease.pairs, made)
        return lease

    def use(self, *adapters: Made) -> None:
        for made in adapters:
            self.ready(made).release()

    def error(self, digest: str) -> ReplicaError:
        lease = self.cache.acquire(digest)
        self.until(lambda: lease.ready or lease.error is not None)
        lease.release()
        assert lease.error is not None
        return lease.error


@contextmanager
def bench(folder: Path, source: DictSource | None = None, clock: Callable[[], float] = time.monotonic, **limits: Any):
    made = Bench(folder, source or DictSource(), clock, **limits)
    try:
        yield made
        made.cache.check_integrity()
        assert not made.cache._leases
    finally:
        made.cache.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Bench]:
    with bench(tmp_path, max_slots=2) as made:
        made.stage(*ADAPTERS)
        yield made


def test_acquire_gives_the_true_weights_and_later_a_hit(fleet: Bench) -> None:
    first = fleet.ready(ADAPTERS[0])
    second = fleet.cache.acquire(ADAPTERS[0].digest)
    assert second.ready
    assert second.slot == first.slot
    stats = fleet.cache.stats()
    assert (stats.num_hits, stats.num_misses) == (1, 1)
    assert stats.loads == {"host": 0, "node": 1, "blob": 0}
    assert stats.slots_by_state == {"free": 1, "loading": 0, "resident": 0, "pinned": 1}
    first.release()
    second.release()
    assert fleet.cache.stats().slots_by_state["resident"] == 1
    assert stats.load_seconds["total"][0] == 1


def test_release_twice_is_an_error_and_counts_once(fleet: Bench) -> None:
    lease = fleet.ready(ADAPTERS[0])
    lease.release()
    with pytest.raises(AssertionError, match="twice"):
        lease.release()
    with pytest.raises(AssertionError, match="released"):
        lease.pairs  # noqa: B018


def test_unknown_digest_is_refused_at_once(fleet: Bench) -> None:
    for digest in ("0" * 64, "", "../x"):
        with pytest.raises(UnknownAdapter):
            fleet.cache.acquire(digest)
        fleet.cache.prefetch(digest)


def test_evicted_adapter_comes_back_from_the_host_bit_equal(fleet: Bench) -> None:
    for _ in range(50):
        fleet.use(*ADAPTERS[:3])
    stats = fleet.cache.stats()
    assert stats.loads["node"] == 3
    assert stats.loads["host"] >= 50
    assert stats.evictions["slot", "room"] == stats.loads["host"] + 1
    assert fleet.source.num_fetches == len(ADAPTERS)


def test_budgets_of_exactly_one_adapter_work_in_every_tier(tmp_path: Path) -> None:
    one, two = ADAPTERS[:2]
    size = one.manifest.blob_bytes
    with bench(tmp_path, max_slots=4, arena_bytes=R8_BYTES, host_bytes=R8_BYTES, store_bytes=size) as tight:
        tight.stage(one, two)
        for _ in range(5):
            tight.use(one, two)
        stats = tight.cache.stats()
        assert stats.loads["blob"] >= 8
        assert stats.arena_free_bytes == 0
        assert stats.host_bytes == R8_BYTES
        assert tight.store.num_bytes == size


def test_more_waiters_than_the_host_cache_holds_all_get_served(tmp_path: Path) -> None:
    with bench(tmp_path, max_slots=1, arena_bytes=R8_BYTES, host_bytes=R8_BYTES) as tight:
        tight.stage(*ADAPTERS[:4])
        leases = [tight.cache.acquire(made.digest) for made in ADAPTERS[:4]]
        while leases:
            tight.until(lambda: any(lease.ready for lease in leases))
            lease = next(lease for lease in leases if lease.ready)
            assert_holds(lease.pairs, next(one for one in ADAPTERS if one.digest == lease.digest))
            leases.remove(lease)
            lease.release()


@pytest.mark.parametrize(
    ("limit", "value"),
    [("arena_bytes", R8_BYTES - 1), ("host_bytes", R8_BYTES - 1), ("max_rank", 7)],
)
def test_adapter_that_can_never_fit_is_refused_naming_the_limit(tmp_path: Path, limit: str, value: int) -> None:
    with bench(tmp_path, **{limit: value}) as small:
        small.stage(ADAPTERS[0], ADAPTERS[4])
        small.cache.check_fits(ADAPTERS[4].manifest)
        with pytest.raises(AdapterTooLarge, match=limit):
            small.cache.check_fits(ADAPTERS[0].manifest)
        assert isinstance(small.error(ADAPTERS[0].digest), AdapterTooLarge)
        with pytest.raises(AdapterTooLarge, match=limit):
            small.cache.acquire(ADAPTERS[0].digest)
        small.use(ADAPTERS[4])


def test_the_size_of_an_image_is_read_from_its_manifest_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench(tmp_path) as fleet:
        assert fleet.cache.image_bytes(ADAPTERS[0].digest) == 0, "it is not known"
        fleet.stage(*ADAPTERS[:3])
        fleet.cache.check_fits(ADAPTERS[0].manifest)
        fleet.use(ADAPTERS[1])
        read: list[str] = []
        manifest = fleet.store.manifest
        monkeypatch.setattr(fleet.store, "manifest", lambda digest: read.append(digest) or manifest(digest))
        for made in [*ADAPTERS[:3], *ADAPTERS[:3]]:
            assert fleet.cache.image_bytes(made.digest) == R8_BYTES
        assert read == [ADAPTERS[2].digest]
        fleet.store.forget(ADAPTERS[0].digest)
        fleet.cache.forget(ADAPTERS[0].digest)
        assert fleet.cache.image_bytes(ADAPTERS[0].digest) == 0


def test_a_load_is_expected_to_take_what_loads_took_and_reads_without_a_copy_do_not_count(tmp_path: Path) -> None:
    with bench(tmp_path) as fleet:
        fleet.stage(*ADAPTERS[:4], ADAPTERS[5])
        assert fleet.cache.load_s(ADAPTERS[0].digest) == 0, "nothing was loaded yet"
        fleet.use(ADAPTERS[0])
        times = fleet.cache.stats().load_seconds
        taken_s = times["read"][1] + times["convert"][1] + times["copy"][1]
        assert fleet.cache.load_s(ADAPTERS[1].digest) == pytest.approx(taken_s)
        for made in ADAPTERS[1:4]:
            fleet.cache.prefetch(made.digest)
            fleet.until(lambda made=made: made.digest in fleet.cache.stats().host_cached)
        assert fleet.cache.load_s(ADAPTERS[1].digest) == pytest.approx(taken_s)
        assert fleet.cache.load_s(ADAPTERS[5].digest) == pytest.approx(taken_s), "no longer than the longest load"
        assert fleet.cache.load_s("0" * 64) == 0


def test_a_read_ahead_of_its_turn_counts_for_the_load_that_it_was_for(tmp_path: Path) -> None:
    with bench(tmp_path) as fleet:
        fleet.stage(ADAPTERS[0])
        fleet.cache.prefetch(ADAPTERS[0].digest)
        fleet.until(lambda: ADAPTERS[0].digest in fleet.cache.stats().host_cached)
        fleet.use(ADAPTERS[0])
        times = fleet.cache.stats().load_seconds
        taken_s = times["read"][1] + times["convert"][1] + times["copy"][1]
        assert fleet.cache.load_s(ADAPTERS[0].digest) == pytest.approx(taken_s)


def test_check_fits_knows_the_node_store_too() -> None:
    planner = ImagePlanner(SITES, torch.float32, Budgets(64, MIB, MIB, ADAPTERS[0].manifest.blob_bytes - 1))
    with pytest.raises(AdapterTooLarge, match="node_store_bytes"):
        planner.plan(ADAPTERS[0].manifest)


def test_changed_bytes_fail_their_own_waiters_only_and_heal_after_the_ttl(tmp_path: Path) -> None:
    clock = Clock()
    with bench(tmp_path, clock=clock, failure_ttl_s=10) as fleet:
        fleet.stage(*ADAPTERS[:2])
        bad, good = ADAPTERS[:2]
        path = fleet.store.open(bad.digest)
        path.write_bytes(bad.blob[:-1] + bytes([bad.blob[-1] ^ 1]))
        leases = [fleet.cache.acquire(made.digest) for made in (bad, good)]
        fleet.until(lambda: all(lease.ready or lease.error for lease in leases))
        assert isinstance(leases[0].error, AdapterUnavailable)
        assert_holds(leases[1].pairs, good)
        for lease in leases:
            lease.release()
        clock.now_s = 9.9
        fetches = fleet.source.num_fetches
        for _ in range(3):
            fleet.cache.prefetch(bad.digest)
            with pytest.raises(AdapterUnavailable, match="changed"):
                fleet.cache.acquire(bad.digest)
        assert fleet.source.num_fetches == fetches
        assert fleet.cache.stats().num_failures == 1
        clock.now_s = 10.1
        fleet.use(bad)


def test_adapter_that_does_not_fit_the_base_fails_its_waiter(fleet: Bench) -> None:
    other = make_adapter(77, sites=(*SITES[:-1], replace(SITES[-1], out_features=31)))
    fleet.stage(other)
    assert "down_proj has shapes" in str(fleet.error(other.digest))


@pytest.mark.parametrize(("ahead", "source"), [(AdapterCache.prefetch, "node"), (AdapterCache.warm, "host")])
def test_bytes_that_a_request_fetched_come_from_the_node_and_those_warmed_from_the_host(
    fleet: Bench, ahead: Callable[[AdapterCache, str], None], source: str
) -> None:
    ahead(fleet.cache, ADAPTERS[0].digest)
    fleet.until(lambda: ADAPTERS[0].digest in fleet.cache.stats().host_cached)
    assert fleet.cache.stats().resident == ()
    fleet.use(ADAPTERS[0])
    assert fleet.cache.stats().loads == {"host": 0, "node": 0, "blob": 0} | {source: 1}


def test_warm_takes_only_room_to_spare_and_refreshes_nothing(tmp_path: Path) -> None:
    with bench(tmp_path, host_bytes=2 * R8_BYTES, num_load_threads=1) as fleet:
        fleet.stage(*ADAPTERS[:3])
        fleet.cache.warm("0" * 64)
        for made in ADAPTERS[:2]:
            fleet.cache.warm(made.digest)
            fleet.until(lambda made=made: made.digest in fleet.cache.stats().host_cached)
        fleet.cache.warm(ADAPTERS[2].digest)
        fleet.cache.warm(ADAPTERS[0].digest)
        fleet.cache._workers.readers.submit(lambda: None).result(20)  # on the one thread, after those
        assert fleet.cache.stats().host_cached == (ADAPTERS[0].digest, ADAPTERS[1].digest)
        assert fleet.cache.stats().evictions["host", "room"] == 0


def test_warm_again_with_room_to_spare_refreshes_nothing_either(tmp_path: Path) -> None:
    with bench(tmp_path, num_load_threads=1) as fleet:
        fleet.stage(*ADAPTERS[:2])
        for made in ADAPTERS[:2]:
            fleet.cache.warm(made.digest)
            fleet.until(lambda made=made: made.digest in fleet.cache.stats().host_cached)
        fleet.cache.warm(ADAPTERS[0].digest)
        fleet.cache._workers.readers.submit(lambda: None).result(20)
        assert fleet.cache.stats().host_cached == (ADAPTERS[0].digest, ADAPTERS[1].digest)


def test_q_and_v_after_all_seven_leaves_nothing_behind(tmp_path: Path) -> None:
    few = make_adapter(50, targets=QV)
    with bench(tmp_path, max_slots=1, arena_bytes=R8_BYTES) as fleet:
        fleet.stage(ADAPTERS[0], few)
        fleet.use(ADAPTERS[0])
        lease = fleet.ready(few)
        ranks = fleet.cache.arena.tables.ranks[lease.slot]
        assert ranks.tolist() == [8 if site.path.endswith(("q_proj", "v_proj")) else 0 for site in SITES]
        lease.release()


def test_fragments_are_joined_while_others_stay_pinned(tmp_path: Path) -> None:
    with bench(tmp_path, max_slots=8, arena_bytes=4 * R8_BYTES) as fleet:
        fleet.stage(*ADAPTERS)
        leases = [fleet.ready(made) for made in ADAPTERS[:4]]
        leases[0].release()
        leases[2].release()
        large = fleet.ready(ADAPTERS[5])
        for lease, made in ((leases[1], ADAPTERS[1]), (leases[3], ADAPTERS[3])):
            assert_holds(lease.pairs, made)
            lease.release()
        large.release()


def test_pinned_adapters_are_never_evicted_and_the_oldest_waiter_comes_first(fleet: Bench) -> None:
    held = [fleet.ready(made) for made in ADAPTERS[:2]]
    waiting = [fleet.cache.acquire(made.digest) for made in (ADAPTERS[2], ADAPTERS[3])]
    fleet.until(lambda: fleet.cache.stats().load_seconds["read"][0] == 4)
    fleet.cache.poll()
    assert not any(lease.ready for lease in waiting)
    held[0].release()
    fleet.until(lambda: waiting[0].ready)
    assert not waiting[1].ready
    assert_holds(held[1].pairs, ADAPTERS[1])
    held[1].release()
    fleet.until(lambda: waiting[1].ready)
    for lease in waiting:
        lease.release()


def test_freed_slot_is_not_taken_back_by_a_later_arrival(fleet: Bench) -> None:
    held = [fleet.ready(made) for made in ADAPTERS[:2]]
    waiting = fleet.cache.acquire(ADAPTERS[2].digest)
    fleet.until(lambda: fleet.cache.stats().load_seconds["read"][0] == 3)
    fleet.cache.poll()
    held[0].release()
    late = fleet.cache.acquire(ADAPTERS[0].digest)
    assert not late.ready
    fleet.until(lambda: waiting.ready)
    assert not late.ready
    for lease in (waiting, held[1]):
        lease.release()
    fleet.until(lambda: late.ready)
    assert_holds(late.pairs, ADAPTERS[0])
    late.release()


def test_adapters_in_constant_use_do_not_keep_a_newcomer_out(tmp_path: Path) -> None:
    clock = Clock()
    with bench(tmp_path, clock=clock, max_slots=2, drain_after_s=1) as fleet:
        fleet.stage(*ADAPTERS[:3])
        running = [(made, fleet.ready(made)) for made in ADAPTERS[:2]]
        newcomer = fleet.cache.acquire(ADAPTERS[2].digest)
        fleet.until(lambda: fleet.cache.stats().load_seconds["read"][0] == 3)
        for _ in range(400):
            clock.now_s += 0.1
            made, lease = running.pop(0)
            running.append((made, fleet.cache.acquire(made.digest)))
            lease.release()
            fleet.changed.wait(0.005)
            fleet.cache.poll()
            if newcomer.ready:
                break
        assert newcomer.ready
        assert 1 <= clock.now_s < 10
        newcomer.release()
        fleet.until(lambda: all(lease.ready for _, lease in running))
        for _, lease in running:
            lease.release()


def test_withdrawn_waiter_lets_the_others_go_on(fleet: Bench) -> None:
    held = [fleet.ready(made) for made in ADAPTERS[:2]]
    first, second = fleet.cache.acquire(ADAPTERS[2].digest), fleet.cache.acquire(ADAPTERS[3].digest)
    first.release()
    held[0].release()
    fleet.until(lambda: second.ready)
    assert ADAPTERS[2].digest not in fleet.cache.stats().resident
    for lease in (held[1], second):
        lease.release()


def test_forget_while_pinned_takes_effect_at_release(fleet: Bench) -> None:
    lease = fleet.ready(ADAPTERS[0])
    fleet.store.forget(ADAPTERS[0].digest)
    fleet.cache.forget(ADAPTERS[0].digest)
    fleet.cache.poll()
    assert_holds(lease.pairs, ADAPTERS[0])
    assert fleet.cache.stats().slots_by_state["pinned"] == 1
    assert ADAPTERS[0].digest not in fleet.cache.stats().resident
    with pytest.raises(UnknownAdapter):
        fleet.cache.acquire(ADAPTERS[0].digest)
    lease.release()
    assert fleet.cache.stats().slots_by_state["free"] == 2
    assert fleet.cache.stats().host_cached == ()


def test_forget_when_idle_frees_the_slot(fleet: Bench) -> None:
    fleet.use(ADAPTERS[0])
    fleet.cache.forget(ADAPTERS[0].digest)
    fleet.cache.poll()
    assert fleet.cache.stats().slots_by_state["free"] == 2


class MeetingSource(DictSource):
    """A fetch ends only when `num_parties` of them are under way at once."""

    def __init__(self, num_parties: int, *adapters: Made) -> None:
        super().__init__(*adapters)
        self.meeting = threading.Barrier(num_parties)

    def fetch(self, sha256: str, to: Path) -> None:
        self.meeting.wait(20)
        super().fetch(sha256, to)


class StuckSource(DictSource):
    """Fetches of those in `stuck` wait for `gate`."""

    def __init__(self, *adapters: Made) -> None:
        super().__init__(*adapters)
        self.stuck: set[str] = set()
        self.gate = threading.Event()

    def fetch(self, sha256: str, to: Path) -> None:
        if sha256 in self.stuck:
            self.gate.wait(30)
        super().fetch(sha256, to)


def test_loads_of_different_adapters_overlap_and_of_one_are_single_flight(tmp_path: Path) -> None:
    source = MeetingSource(4, *ADAPTERS[:4])
    with bench(tmp_path, source, max_slots=4) as fleet:
        for made in ADAPTERS[:4]:
            fleet.store.remember(made.manifest)
        leases = [fleet.cache.acquire(made.digest) for made in ADAPTERS[:4] for _ in range(3)]
        fleet.until(lambda: all(lease.ready for lease in leases))
        assert source.num_fetches == 4
        assert fleet.cache.stats().loads["blob"] == 4
        for lease in leases:
            lease.release()


def test_stuck_fetches_hold_up_nobody_else(tmp_path: Path) -> None:
    source = StuckSource(*ADAPTERS)
    source.stuck = {made.manifest.blob_sha256 for made in ADAPTERS[:4]}
    with bench(tmp_path, source, max_slots=1, num_load_threads=2) as fleet:
        fleet.stage(*ADAPTERS[4:])
        for made in ADAPTERS[:4]:
            fleet.store.remember(made.manifest)
        stuck = [fleet.cache.acquire(made.digest) for made in ADAPTERS[:4]]
        fleet.use(*ADAPTERS[4:])
        assert not any(lease.ready for lease in stuck)
        source.gate.set()
        for lease in stuck:
            lease.release()


def test_fetch_that_fails_costs_only_its_waiters(tmp_path: Path) -> None:
    source = DictSource(ADAPTERS[1])
    with bench(tmp_path, source) as fleet:
        for made in ADAPTERS[:2]:
            fleet.store.remember(made.manifest)
        assert isinstance(fleet.error(ADAPTERS[0].digest), AdapterUnavailable)
        fleet.use(ADAPTERS[1])


def test_copy_that_fails_frees_its_slot(fleet: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr("replica.adapters.copier._copy_on_one_core", broken)
        assert "device lost" in str(fleet.error(ADAPTERS[0].digest))
    assert fleet.cache.stats().slots_by_state["free"] == 2
    fleet.use(ADAPTERS[0])


def test_observer_sees_every_stage(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    class Observer:
        def observe(self, stage: str, seconds: float, source: str) -> None:
            assert seconds >= 0
            seen.append((stage, source))

    source = DictSource(ADAPTERS[0])
    store = NodeStore(tmp_path, source, MIB)
    store.remember(ADAPTERS[0].manifest)
    cache = AdapterCache.build(AdapterCacheConfig(), store, SITES, CPU, torch.float32, observer=Observer())
    lease = cache.acquire(ADAPTERS[0].digest)
    while not lease.ready:
        cache.poll()
    lease.release()
    cache.close()
    assert sorted(seen) == sorted((stage, "blob") for stage in STAGES)
