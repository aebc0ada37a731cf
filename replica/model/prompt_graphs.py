"""Steps with prompts in them, recorded in pieces: one from each layer's attention to the next one's.

Launching a step of a few hundred rows takes the host longer than the device computes it. What such a step does is the
same for all steps of so many rows, but for attention, whose work is cut up anew each time. So a recording ends where a
layer attends, and the next one begins behind it; a replay runs the pieces, and attention between them. vLLM calls this
piecewise CUDA graphs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from replica.model.cuda_graphs import Cut, Pieces, StepGraphs
from replica.model.paged_attention import ScoreRule
from replica.model.step_attention import CutAttention, LayerHeads

ROW_BUCKETS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Steps are padded to one of these; above the largest, the device has enough to do while the host launches."""


class PieceRecorder(Protocol):
    """Turns a step into one that does the same again, piece by piece."""

    def record_pieces(self, run: Pieces) -> Pieces: ...


class Seams:
    """Attention of a step in pieces. Queries wait at fixed addresses until the cut, and answers are read from there."""

    def __init__(
        self, attention: CutAttention, layers: Sequence[LayerHeads], slots: torch.Tensor, dtype: torch.dtype
    ) -> None:
        self._attention, self._slots = attention, slots
        widest = max(heads.num_heads * max(heads.shape.key_dim, heads.shape.value_dim) for heads in layers)
        self._queries, self._answers = torch.zeros(2, len(slots) * widest, dtype=dtype, device=slots.device)
        self._shapes = [(heads.num_heads, heads.shape.key_dim, heads.shape.value_dim) for heads in layers]
        self._cut: Cut | None = None

    def __repr__(self) -> str:
        return f"Seams({len(self._slots)} rows, {len(self._shapes)} layers)"

    @contextmanager
    def cut_by(self, cut: Cut) -> Iterator[None]:
        """Inside, `cut` is called where a layer attends."""
        self._cut = cut
        try:
            yield
        finally:
            self._cut = None

    def attend_layer(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
    ) -> torch.Tensor:
        """Write keys and values, put the queries by, cut; what is returned is filled at the cut."""
        assert self._cut is not None, "attention outside a step"
        num_rows = q.shape[0]
        queries, answers = self._places(layer, num_rows)
        self._attention.write_layer(layer, k, v, self._slots[:num_rows])
        queries.copy_(q)
        self._cut(layer)
        return answers

    def attend(self, layer: int, num_rows: int) -> None:
        """What happens at a cut: attention of the first `num_rows` rows, as the step's plan has it."""
        self._attention.read_layer(layer, *self._places(layer, num_rows))

    def _places(self, layer: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        num_heads, key_dim, value_dim = self._shapes[layer]
        queries = self._queries[: num_rows * num_heads * key_dim].view(num_rows, num_heads, key_dim)
        answers = self._answers[: num_rows * num_heads * value_dim].view(num_rows, num_heads, value_dim)
        return queries, answers


class PromptGraphs(StepGraphs[Pieces]):
    """Steps with prompts. `run(bucket, room, seams)` computes one whose attention is `seams`."""

    def __init__(
        self,
        buckets: Sequence[int],
        rooms: Sequence[int],
        recorder: PieceRecorder,
        run: Callable[[int, int, Seams], None],
        seams: Seams,
    ) -> None:
        super().__init__(buckets, rooms)
        self._recorder, self._run, self._seams = recorder, run, seams

    def replay(self, bucket: int, room: int, num_rows: int) -> None:
        """Run a step, of which the first `num_rows` rows are real."""
        self._recorded[bucket, room](lambda layer: self._seams.attend(layer, num_rows))

    def _record(self, bucket: int, room: int) -> Pieces:
        run_step, seams = self._run, self._seams

        def run(cut: Cut) -> None:
            with seams.cut_by(cut):
                run_step(bucket, room, seams)

        return self._recorder.record_pieces(run)


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """The buckets for steps of up to `max_rows` rows, rising."""
    sizes = {size for size in ROW_BUCKETS if size < max_rows}
    return tuple(sorted(sizes | ({max_rows} if 2 <= max_rows <= ROW_BUCKETS[-1] else set())))
