"""What LoRA adds to the base product at each projection of a Llama-3.1-8B layer, in microseconds in a CUDA graph.

python -m benchmarks.gpu_kernels [--out DIR] [--tune]

64 rows, and prompts of 8,192: the base product alone (cuBLAS) against the base product with LoRA, over 32 layers'
buffers in turn (2 of prompts), so that neither side finds its weights in L2. Conditions and the peers' figures are
those of the table in `PEERS`.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import commit
from replica.adapters.slot_tables import SlotTables
from replica.adapters.weights import row_of_b
from replica.kernels.grouped_lora import BoundRows, LoraKernels
from replica.kernels.groups import GroupShape
from replica.kernels.rows import RowSegment, RowsView, num_words, pack_rows
from replica.kernels.tuning import ExpandConfig, ProductConfig, ShrinkConfig, shrink_config

NUM_LAYERS = 32
NUM_ROWS = 64
OTHER_ROWS = (16, 72, 96, 128)
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
NUM_SLOTS = 64
LEFT = ", not added"
"""Of a case whose sum is left to the next kernel, as in the model."""

SITES: dict[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}

PEERS = {
    "qkv": {8: (16.1, 22.8), 64: (16.5, 40.8)},
    "gate_up": {8: (62.3, 68.1), 64: (62.6, 97.5)},
    "down": {8: (35.4, 42.7), 64: (35.8, 58.5)},
}
"""SGLang 0.5.23 triton_v2 on an H200 under the same conditions: (base, base + LoRA), microseconds."""


@dataclass(frozen=True)
class Tenant:
    """One adapter of the batch: its rank, and which of a group's projections it touches."""

    rank: int
    touches: tuple[bool, ...] = (True, True, True)


class Bench:
    """Weights of all layers for one group, and an arena of adapters that touch it."""

    def __init__(
        self, name: str, tenants: Sequence[Tenant], num_layers: int = NUM_LAYERS, num_rows: int = NUM_ROWS
    ) -> None:
        self.in_features, self.outs = SITES[name]
        self.num_layers, self.num_rows = num_layers, num_rows
        num_out, num_projections = sum(self.outs), len(self.outs)
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.x = [_random(generator, num_rows, self.in_features) for _ in range(num_layers)]
        self.weights = [_random(generator, num_out, self.in_features) * 0.02 for _ in range(num_layers)]
        self.tables = SlotTables(NUM_SLOTS, NUM_LAYERS * num_projections, DEVICE)
        self.memory = _random(generator, self._place(tenants)) * 0.02
        self.groups = [
            GroupShape(
                tuple(range(layer * num_projections, (layer + 1) * num_projections)), self.outs, self.in_features
            )
            for layer in range(num_layers)
        ]
        self.kernels = LoraKernels(self.memory, self.tables)
        self.tenants = tenants

    def _place(self, tenants: Sequence[Tenant]) -> int:
        """Slot by slot, layer by layer, as images are."""
        end, host = 0, SlotTables(NUM_SLOTS, self.tables.ranks.shape[1], torch.device("cpu"))
        for slot, tenant in enumerate(tenants):
            for layer, (p, width) in itertools.product(range(self.num_layers), enumerate(self.outs)):
                if not tenant.touches[p]:
                    continue
                site, stride = layer * len(self.outs) + p, row_of_b(tenant.rank)
                host.a_offsets[slot, site] = end
                end += tenant.rank * self.in_features
                host.b_offsets[slot, site] = end
                end += width * stride
                host.ranks[slot, site], host.scales[slot, site] = tenant.rank, 0.5
        for mine, theirs in ((self.tables.a_offsets, host.a_offsets), (self.tables.b_offsets, host.b_offsets)):
            mine.copy_(theirs)
        self.tables.ranks.copy_(host.ranks)
        self.tables.scales.copy_(host.scales)
        return end

    def view(self, num_adapters: int, max_rank: int = 0, share: int = 0) -> RowsView:
        """A step whose rows so many adapters share, or take `share` of each, the others being base only.

        `max_rank`: with room for one that is larger than any of them.
        """
        words = torch.zeros(num_words(self.num_rows), dtype=torch.int32)
        share = share or self.num_rows // max(num_adapters, 1)
        segments = [
            RowSegment(slot * share, (slot + 1) * share, slot, self.tenants[slot].rank) for slot in range(num_adapters)
        ]
        num_tiles = pack_rows(segments, self.num_rows, words.numpy())
        largest = max(max_rank, *(tenant.rank for tenant in self.tenants))
        return RowsView(words.to(DEVICE), self.num_rows, max(num_tiles, NUM_ROWS), largest)

    def base(self) -> None:
        for layer in range(self.num_layers):
            torch.nn.functional.linear(self.x[layer], self.weights[layer])

    def whole(self, num_adapters: int, *, add: bool = True, max_rank: int = 0, share: int = 0) -> Callable[[], None]:
        """Base product and LoRA; with `add`, their sum in a launch of its own, which the model leaves to its layers."""
        view = self.view(num_adapters, max_rank, share)

        def run() -> None:
            bound = self.kernels.bind(view)
            for layer in range(self.num_layers):
                y, delta = self.kernels.linear(self.x[layer], self.weights[layer], None, self.groups[layer], bound)
                if add:
                    y.add_(delta)

        return run

    def summed(self, num_adapters: int) -> Callable[[], None]:
        """What a step of many rows does: the product adds to what LoRA left in its output."""
        view = self.view(num_adapters)

        def run() -> None:
            bound = self.kernels.bind(view)
            for layer in range(self.num_layers):
                self.kernels.summed(self.x[layer], self.weights[layer], None, self.groups[layer], bound)

        return run

    def products(self, config: ProductConfig) -> Callable[[], None]:
        def run() -> None:
            for layer in range(self.num_layers):
                self.kernels.product(self.x[layer], self.weights[layer], None, config)

        return run

    def expand(self, num_adapters: int, config: ExpandConfig) -> Callable[[], None]:
        """The expand alone."""
        bound = self.kernels.bind(self.view(num_adapters))
        d = torch.empty(self.num_rows, sum(self.outs), dtype=DTYPE, device=DEVICE)
        t = self.kernels.shrink(self.x[0], d, self.groups[0], bound, self.shrink_cut(bound))

        def run() -> None:
            for layer in range(self.num_layers):
                self.kernels.expand(t, d, self.groups[layer], bound, config)

        return run

    def shrink_cut(self, bound: BoundRows) -> ShrinkConfig:
        return shrink_config(bound.rows, len(self.outs), self.in_features, _processors())

    def shrink(self, num_adapters: int, config: ShrinkConfig) -> Callable[[], None]:
        """The shrink alone."""
        bound = self.kernels.bind(self.view(num_adapters))
        d = torch.empty(self.num_rows, sum(self.outs), dtype=DTYPE, device=DEVICE)

        def run() -> None:
            for layer in range(self.num_layers):
                self.kernels.shrink(self.x[layer], d, self.groups[layer], bound, config)

        return run

    def error(self, num_adapters: int) -> float:
        """Relative distance of one layer from float64."""
        view, group = self.kernels.bind(self.view(num_adapters)), self.groups[0]
        base, delta = self.kernels.linear(self.x[0], self.weights[0], None, group, view)
        y = base.double() + delta.double()
        expected = self.x[0].double() @ self.weights[0].double().T
        share = self.num_rows // max(num_adapters, 1)
        for slot in range(num_adapters):
            rows, column = slice(slot * share, (slot + 1) * share), 0
            for site, width in zip(group.sites, group.out_features, strict=True):
                rank = int(self.tables.ranks[slot, site])
                if rank:
                    a_at, b_at = int(self.tables.a_offsets[slot, site]), int(self.tables.b_offsets[slot, site])
                    stride = row_of_b(rank)
                    a = self.memory[a_at : a_at + rank * self.in_features].view(rank, -1).double()
                    b = self.memory[b_at : b_at + width * stride].view(width, stride)[:, :rank].double()
                    expected[rows, column : column + width] += 0.5 * (self.x[0][rows].double() @ a.T @ b.T)
                column += width
        return float((y - expected).norm() / expected.norm())


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=DTYPE)


class Timed:
    """A captured graph of one pass over the layers."""

    def __init__(self, run: Callable[[], None], num_layers: int) -> None:
        run()
        torch.cuda.synchronize()
        self.run = run  # a graph reads its tensors; they must live as long
        self.num_layers, self.graph = num_layers, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            run()

    def us(self, repeats: int = 5) -> float:
        """Microseconds a layer in one measurement."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / repeats / self.num_layers


def medians(timed: dict[str, Timed], rounds: int = 9) -> dict[str, float]:
    """All variants in turn, `rounds` times over; the median of each."""
    found: dict[str, list[float]] = {name: [] for name in timed}
    for one in timed.values():
        one.us()
    for _ in range(rounds):
        for name, one in timed.items():
            found[name].append(one.us())
    return {name: statistics.median(values) for name, values in found.items()}


def _processors() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def measure(name: str) -> list[dict[str, Any]]:
    """The table's rows for one group of projections."""
    bench = Bench(name, [Tenant(16)] * NUM_SLOTS)
    timed = {"base": Timed(bench.base, NUM_LAYERS)}
    for count in (0, 1, 8, 32, 64):
        timed[str(count)] = Timed(bench.whole(count), NUM_LAYERS)
        timed[f"{count}{LEFT}"] = Timed(bench.whole(count, add=False), NUM_LAYERS)
    for count in (8, 64):
        timed[f"{count}, room for r=128{LEFT}"] = Timed(bench.whole(count, add=False, max_rank=128), NUM_LAYERS)
    us = medians(timed)
    errors = {str(count): bench.error(count) for count in (1, 8, 64)}
    del bench, timed
    us.update(_other_ranks(name))
    rows = []
    for case, total in us.items():
        peer = PEERS.get(name, {}).get(int(case)) if case.isdigit() else None
        rows.append(
            {
                "site": name, "case": case, "us": round(total, 2), "added_us": round(total - us["base"], 2),
                "peer_added_us": None if peer is None else round(peer[1] - peer[0], 2), "error": errors.get(case),
            }
        )  # fmt: skip
    return rows


def _other_ranks(name: str) -> dict[str, float]:
    """64 tenants at r=8; 63 at r=8 and one at r=64; every second one on the first projection only; 32 on all
    projections, with 32 rows beside them that are base only or of tenants on q and v only; 16 and 64 at r=64.
    """
    on_q_and_v = Tenant(16, (True, False, True) if name == "qkv" else (False, False, False))
    cases = {
        "64 at r=8": [Tenant(8)] * 64,
        "63 at r=8, one at r=64": [Tenant(64)] + [Tenant(8)] * 63,
        "64 at r=16, half on the first projection": [Tenant(16), Tenant(16, (True, False, False))] * 32,
        "32 at r=16 on all, 32 on q and v": [Tenant(16)] * 32 + [on_q_and_v] * 32,
        "64 at r=64": [Tenant(64)] * 64,
    }
    benches = {case: Bench(name, tenants, 16) for case, tenants in cases.items()}
    timed = {case: Timed(bench.whole(64), 16) for case, bench in benches.items()}
    timed["16 at r=64"] = Timed(benches["64 at r=64"].whole(16), 16)
    timed[f"16 at r=64{LEFT}"] = Timed(benches["64 at r=64"].whole(16, add=False), 16)
    left = {f"{case}{LEFT}": Timed(bench.whole(64, add=False), 16) for case, bench in benches.items()}
    alone = benches["32 at r=16 on all, 32 on q and v"].whole(32, add=False, share=1)
    return medians(timed | left | {f"32 at r=16 on all, 32 base only{LEFT}": Timed(alone, 16)})


def of_rows(name: str, num_rows: int) -> list[dict[str, Any]]:
    """Steps of other numbers of rows, the sum left to the next kernel, beside the library's product of as many rows."""
    bench = Bench(name, [Tenant(16)] * NUM_SLOTS, 16, num_rows)
    timed = {f"{num_rows} rows, base": Timed(bench.base, 16)}
    for count in sorted({0, 1, 8, 16, min(num_rows, 64)}):
        timed[f"{num_rows} rows, {count}{LEFT}"] = Timed(bench.whole(count, add=False), 16)
    us = medians(timed)
    return _added(name, us, us[f"{num_rows} rows, base"])


def prompts(name: str, num_rows: int = 8192) -> list[dict[str, Any]]:
    """A long prompt of each of 8 adapters, beside the base product of as many rows."""
    bench = Bench(name, [Tenant(16)] * 8, 2, num_rows)
    us = medians({"prompts, base": Timed(bench.base, 2), "prompts, 8": Timed(bench.summed(8), 2)})
    return _added(name, us, us["prompts, base"])


def _added(name: str, us: dict[str, float], base_us: float) -> list[dict[str, Any]]:
    return [
        {"site": name, "case": case, "us": round(total, 2), "added_us": round(total - base_us, 2)}
        for case, total in us.items()
    ]


def over_a_layer(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each case adds at all sites together, and as a share of 64 at r=16; cases that every site has."""
    added: dict[str, dict[str, float]] = {}
    for row in rows:
        added.setdefault(row["case"], {})[row["site"]] = row["added_us"]
    sums = {case: sum(by_site.values()) for case, by_site in added.items() if by_site.keys() == SITES.keys()}
    whole = {form: sums.get(f"64{form}") for form in ("", LEFT)}
    found = []
    for case, total in sums.items():
        of_64 = whole[LEFT if case.endswith(LEFT) else ""]
        is_other = "prompts" in case or "rows" in case
        share = round(total / of_64, 3) if of_64 and not is_other else None
        found.append({"site": "layer", "case": case, "added_us": round(total, 2), "of_64_at_r16": share})
    return found


SHRINKS = ((8, 128, 4, 8, 2), (8, 128, 3, 12, 2), (8, 128, 4, 8, 4), (4, 128, 4, 8, 2))
"""(parts of K, block of K, stages, programs a multiprocessor, warps)."""

EXPANDS = ((256, 6, 2, 168), (512, 3, 4, 168), (256, 4, 4, 128), (256, 5, 2, 200), (128, 8, 2, 128))
"""(lines, programs a multiprocessor, warps, registers a thread)."""

PRODUCTS = ((32, 128, 6, 4), (32, 128, 7, 4), (64, 128, 5, 4), (128, 128, 4, 4), (256, 64, 4, 8))
"""(columns, block of K, stages, warps)."""


def tune(name: str, counts: Sequence[int] = (1, 8, 64)) -> dict[str, Any]:
    """Each part under each cut, and the whole as it is."""
    bench, found = Bench(name, [Tenant(16)] * NUM_SLOTS), {}
    found["base"] = medians({"base": Timed(bench.base, NUM_LAYERS)})
    for blocks in PRODUCTS:
        config = ProductConfig(64, *blocks)
        found[f"product {config}"] = medians({"0": Timed(bench.products(config), NUM_LAYERS)}, rounds=5)
    for splits, block_k, stages, programs, warps in SHRINKS:
        cut = ShrinkConfig(splits, block_k, stages, programs * _processors(), warps)
        found[f"shrink {cut}"] = medians({str(n): Timed(bench.shrink(n, cut), NUM_LAYERS) for n in counts}, rounds=5)
    for lines, programs, warps, registers in EXPANDS:
        wide = ExpandConfig(lines, programs * _processors(), warps, registers)
        found[f"expand {wide}"] = medians({str(n): Timed(bench.expand(n, wide), NUM_LAYERS) for n in counts}, rounds=5)
    found["whole"] = medians({str(n): Timed(bench.whole(n), NUM_LAYERS) for n in counts})
    for case, us in found.items():
        print(name, case, {n: round(each, 1) for n, each in us.items()}, flush=True)
    return {"site": name, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--sites", default=",".join(SITES))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.sites.split(",")
    if options.tune:
        results = [tune(name) for name in names]
        (options.out / "gpu_kernels_tuning.json").write_text(json.dumps(results, indent=1))
        return
    rows = [row for name in names for row in (*measure(name), *prompts(name))]
    rows += [row for name in names for num_rows in OTHER_ROWS for row in of_rows(name, num_rows)]
    rows += over_a_layer(rows)
    device = torch.cuda.get_device_name()
    record = {"device": device, "torch": torch.__version__, "commit": commit(), "rows": rows}
    (options.out / "gpu_kernels.json").write_text(json.dumps(record, indent=1))
    print(
        f"{device}, torch {torch.__version__}, commit {record['commit']}; microseconds a layer, {NUM_ROWS} rows, r=16"
    )
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items() if value is not None))


if __name__ == "__main__":
    main()
