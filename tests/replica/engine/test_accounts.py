"""What each request took of the device's time, and the report of those that ended."""

import random
from collections.abc import Sequence

import pytest

from replica.accounts import NS_PER_S, RequestReport
from replica.errors import EngineDead
from tests.fake_device import FakeLink
from tests.fakes import FakeAdapters
from tests.replica.engine.harness import Bench


class Reported(Bench):
    """A bench that keeps the reports; nothing may be reported twice."""

    def __init__(self, **config: object) -> None:
        self.reports: dict[str, RequestReport] = {}
        super().__init__(on_ended=self._take, **config)  # type: ignore[arg-type]

    def _take(self, reports: Sequence[RequestReport]) -> None:
        for report in reports:
            assert report.request.request_id not in self.reports
            self.reports[report.request.request_id] = report

    def finish(self) -> None:
        super().finish()
        for _ in range(2):
            self.step()

    @property
    def sum_ns(self) -> int:
        return sum(report.device_ns for report in self.reports.values())

    @property
    def busy_ns(self) -> int:
        return round(self.engine.busy_s * NS_PER_S)


@pytest.mark.parametrize("is_behind", [False, True], ids=["in step", "behind the host"])
def test_parts_add_up_to_the_busy_time_to_the_nanosecond(is_behind: bool) -> None:
    bench = Reported(num_blocks=24, num_slots=2, link=FakeLink() if is_behind else None)
    rng = random.Random(3)
    for index in range(40):
        fields = {"n": rng.choice((1, 1, 2)), "adapter": rng.choice((None, "a", "b", "c")), "tenant": rng.choice("xyz")}
        bench.submit(f"r{index}", rng.choices(range(40), k=rng.randint(1, 30)), rng.randint(1, 12), **fields)
    while bench.num_live:
        bench.step()
        if rng.random() < 0.2:
            bench.engine.abort(f"r{rng.randrange(40)}")
    bench.finish()
    assert len(bench.reports) == 40
    assert bench.engine.counts.num_preemptions > 0
    assert {report.outcome for report in bench.reports.values()} == {"length", "abort"}
    assert bench.sum_ns == bench.busy_ns > 0


def test_a_step_is_divided_by_tokens() -> None:
    bench = Reported(max_batch_tokens=16)
    bench.submit("long", range(12), 1)
    bench.submit("short", range(4), 1)
    bench.finish()
    long, short = bench.reports["long"], bench.reports["short"]
    assert 0 <= long.device_ns - 3 * short.device_ns < 16
    assert (long.num_prompt, long.num_output, short.num_prompt, short.num_output) == (12, 1, 4, 1)


def test_times_are_in_order_and_a_load_is_no_queue() -> None:
    bench = Reported(adapters=FakeAdapters(2, load_polls=5))
    bench.submit("a", range(5), 3, adapter="a")
    bench.submit("base", range(5), 3)
    bench.finish()
    loaded, base = bench.reports["a"], bench.reports["base"]
    for report in (loaded, base):
        times = [report.arrived_s, report.admitted_s, report.ready_s, report.started_s, report.first_token_s]
        assert None not in times
        assert [*times, report.ended_s] == sorted([*times, report.ended_s])  # type: ignore[type-var]
        assert report.queue_s >= 0
    assert loaded.load_s > 0
    assert base.load_s == 0


def test_failed_load_is_reported_with_its_code_and_without_device_time() -> None:
    bench = Reported(adapters=FakeAdapters(2, broken=("bad",), unknown=("gone",)))
    bench.submit("a", range(5), 3, adapter="bad")
    bench.submit("b", range(5), 3, adapter="gone")
    bench.finish()
    report = bench.reports["a"]
    assert (report.outcome, report.device_ns, report.started_s) == ("adapter_unavailable", 0, None)
    assert report.load_s > 0
    assert bench.reports["b"].outcome == "unknown_adapter"


def test_request_that_is_aborted_in_the_queue_took_nothing() -> None:
    bench = Reported()
    bench.submit("a", range(5), 3)
    bench.engine.abort("a")
    bench.finish()
    report = bench.reports["a"]
    assert (report.outcome, report.device_ns, report.num_prompt, report.num_output) == ("abort", 0, 0, 0)
    assert report.queue_s > 0


def test_reports_come_when_the_loop_dies() -> None:
    bench = Reported()
    bench.submit("a", range(5), 3)
    bench.step()
    bench.model.error = RuntimeError("broken")
    bench.engine.start()
    bench.engine._thread.join()
    assert bench.reports["a"].outcome == EngineDead.code


def test_a_listener_that_fails_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(reports: Sequence[RequestReport]) -> None:
        raise RuntimeError("no")

    bench = Bench(on_ended=refuse)
    bench.submit("a", range(5), 3)
    bench.finish()
    assert "the reports of 1 requests were refused" in caplog.text
