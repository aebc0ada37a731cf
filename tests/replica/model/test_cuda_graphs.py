"""Which decode steps are recorded, in what order, and what a step is told; with recorders that need no GPU."""

from collections.abc import Callable

import pytest
import torch

from replica.kernels.rows import rooms_for
from replica.model.cuda_graphs import DecodeGraphs, DirectRecorder, Stopwatch, bucket_sizes
from replica.model.step_buffers import BufferSizes, StepBuffers


class ListRecorder:
    """Runs once at the recording, as a capture does; replays only note that they happened."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.replayed: list[int] = []

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        number, self.num_recorded = self.num_recorded, self.num_recorded + 1
        return lambda: self.replayed.append(number)


def recorded(max_num_seqs: int, rooms: tuple[int, ...]) -> tuple[DecodeGraphs, ListRecorder, list[str]]:
    events: list[str] = []
    recorder = ListRecorder()
    graphs = DecodeGraphs(
        bucket_sizes(max_num_seqs), rooms, recorder, lambda bucket, room: events.append(f"run {bucket} {room}")
    )
    graphs.record_all(lambda bucket: events.append(f"plan {bucket}"))
    return graphs, recorder, events


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (2,)),
        (2, (2,)),
        (3, (2, 3)),
        (8, (2, 4, 8)),
        (20, (2, 4, 8, 16, 20)),
        (64, (2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (100, (2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)),
    ],
)
def test_buckets_rise_to_the_largest_batch_and_never_hold_one_row(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(max_num_seqs) == sizes


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 2), (2, 2), (3, 4), (9, 16), (20, 20), (21, None)])
def test_a_step_takes_the_smallest_bucket_that_holds_it(num_rows: int, bucket: int | None) -> None:
    assert DecodeGraphs(bucket_sizes(20), (0,), DirectRecorder(), lambda bucket, room: None).bucket(num_rows) == bucket


@pytest.mark.parametrize(("max_rank", "room"), [(0, 0), (1, 16), (16, 16), (17, 128), (128, 128)])
def test_a_step_takes_the_smallest_room_that_holds_its_ranks(max_rank: int, room: int) -> None:
    assert DecodeGraphs((2,), (0, 16, 128), DirectRecorder(), lambda bucket, room: None).room(max_rank) == room


def test_a_rank_that_has_no_room_is_an_error() -> None:
    with pytest.raises(AssertionError, match="rank 129, and room for 128"):
        DecodeGraphs((2,), (0, 16, 128), DirectRecorder(), lambda bucket, room: None).room(129)


def test_the_largest_is_recorded_first_and_each_is_planned_before() -> None:
    _, _, events = recorded(4, (0, 16))
    steps = [("plan 4", "run 4 0"), ("plan 4", "run 4 16"), ("plan 2", "run 2 0"), ("plan 2", "run 2 16")]
    assert events == [event for step in steps for event in step]


def test_without_adapters_only_base_steps_are_recorded() -> None:
    graphs, _, events = recorded(4, rooms_for(0))
    assert len(graphs) == 2
    assert events == ["plan 4", "run 4 0", "plan 2", "run 2 0"]


def test_a_replay_runs_the_recording_of_its_bucket_and_room() -> None:
    graphs, recorder, events = recorded(4, (0, 16, 64))
    num_events = len(events)
    graphs.replay(2, 16)
    graphs.replay(4, 0)
    graphs.replay(4, 64)
    assert recorder.replayed == [4, 0, 2]
    assert len(events) == num_events


def test_a_direct_recorder_runs_at_each_replay() -> None:
    runs: list[tuple[int, int]] = []
    graphs = DecodeGraphs((2,), (0,), DirectRecorder(), lambda bucket, room: runs.append((bucket, room)))
    graphs.record_all(lambda bucket: None)
    graphs.replay(2, 0)
    graphs.replay(2, 0)
    assert runs == [(2, 0)] * 2


def test_buffers_send_every_section_and_only_the_pages_in_use() -> None:
    sizes = BufferSizes(num_rows=3, num_sequences=3, num_pages=5, num_lora_words=7)
    buffers = StepBuffers(sizes, torch.device("cpu"))
    host = buffers.next_host()
    for number, array in enumerate(host.arrays.values(), start=1):
        array[:] = number
    buffers.send(host, num_pages=2)
    for number, (name, view) in enumerate(buffers.views.items(), start=1):
        expected = [number] * len(view)
        assert view.tolist() == ([number, number, 0, 0, 0] if name == "pages" else expected), name


def test_two_host_copies_take_turns() -> None:
    buffers = StepBuffers(BufferSizes(2, 2, 2, 2), torch.device("cpu"))
    hosts = [buffers.next_host() for _ in range(4)]
    assert hosts[0] is hosts[2]
    assert hosts[1] is hosts[3]
    assert hosts[0] is not hosts[1]


def test_sections_are_aligned_and_do_not_overlap() -> None:
    sizes = BufferSizes(num_rows=3, num_sequences=2, num_pages=5, num_lora_words=7)
    buffers = StepBuffers(sizes, torch.device("cpu"))
    starts = [view.data_ptr() - buffers.memory.data_ptr() for view in buffers.views.values()]
    ends = [start + view.nbytes for start, view in zip(starts, buffers.views.values(), strict=True)]
    assert all(start % 16 == 0 for start in starts)
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_memory_that_was_cached_before_does_not_count_as_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture gives cached memory back to the device; what was measured would be below 0."""
    in_use, cached = 1000, 300

    def empty() -> None:
        nonlocal cached
        cached = 0

    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: in_use + cached)
    watch = Stopwatch(torch.device("cuda"))
    empty()
    in_use += 50
    assert watch.bytes() == 50


def test_elsewhere_no_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("there is no CUDA device"))
    assert Stopwatch(torch.device("cpu")).bytes() == 0
