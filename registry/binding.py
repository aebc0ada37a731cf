"""Binds the tensors of an adapter to modules of the base: every tensor to a module, or the adapter is refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from registry.adapter_config import AdapterConfig
from registry.block_diagonal import BlockError, stored_shapes
from registry.config import RegistryConfig
from registry.config_fields import CHANGES_SHAPES
from registry.faults import FaultList, shown
from registry.pattern_match import PatternError
from registry.safetensors_header import StoredTensor
from registry.target_rules import resolve_pattern
from registry.tensor_facts import TensorFacts, look_at
from registry.tensor_keys import PREFIX, KeyReader, Side
from registry.types import BaseSpec, ModuleLora, ModuleSpec, TensorInfo

PATTERN_HINT = "in rank_pattern the first key that matches wins, and PEFT sorts the keys when it saves"


@dataclass(frozen=True, slots=True)
class Pair:
    """Both factors of one module, as stored: A should be (rank, in), B (out, rank)."""

    module: ModuleSpec
    a: StoredTensor
    b: StoredTensor


class Binder:
    """Checks one adapter against one base. Faults go to the list; `bind` returns what binds."""

    def __init__(self, base: BaseSpec, config: RegistryConfig, faults: FaultList) -> None:
        self._modules = {module.path: module for module in base.modules}
        self._config = config
        self._faults = faults

    def bind(
        self, path: Path, tensors: Mapping[str, StoredTensor], adapter: AdapterConfig | None
    ) -> tuple[ModuleLora, ...]:
        """The LoRA of every module that `tensors` (of the file at `path`) touch, sorted by module path.

        `adapter` None (the configuration cannot be read) leaves only the checks that need no configuration.
        """
        facts = self._look_at_all(path, tensors)
        if self._faults.codes & CHANGES_SHAPES:
            return ()
        pairs = self._pair(tensors, adapter is not None and adapter.has_velora)
        if not pairs:
            self._faults.add("nothing_bound", "no LoRA pair of the file binds to a module of the base")
        if adapter is None:
            return ()
        if "field_type" not in self._faults.codes:
            self._check_targets(adapter, pairs)
        ranks, alphas = self._resolve(adapter, pairs)
        blocks = {name: self._blocks_of(adapter, name) for name in pairs}
        for name, pair in pairs.items():
            self._check_shapes(pair, ranks[name], blocks[name])
        if self._faults.codes:
            return ()
        if all(facts[pair.b.key].is_zero for pair in pairs.values()):
            self._faults.warn("changes_nothing", "every lora_B is zero: the adapter changes nothing")
        return tuple(
            ModuleLora(
                path=name,
                rank=ranks[name],
                alpha=alphas[name],
                scale=adapter.scale(ranks[name], alphas[name]),
                a=_tensor_info(pairs[name].a, facts[pairs[name].a.key]),
                b=_tensor_info(pairs[name].b, facts[pairs[name].b.key]),
                a_blocks=blocks[name][0],
                b_blocks=blocks[name][1],
            )
            for name in sorted(pairs)
        )

    def _look_at_all(self, path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, TensorFacts]:
        facts: dict[str, TensorFacts] = {}
        with path.open("rb") as file:
            for tensor in tensors.values():
                try:
                    facts[tensor.key] = look_at(file, tensor)
                except EOFError:
                    self._faults.add("truncated", f"{path.name} ends inside {shown(tensor.key, 160)}")
                    break
                self._check_finite(tensor.key, facts[tensor.key])
        return facts

    def _check_finite(self, key: str, facts: TensorFacts) -> None:
        if facts.num_nonfinite:
            message = f"{shown(key, 160)} holds {facts.num_nonfinite} values that are NaN or infinite"
            self._faults.add("not_finite", message, hint="the training run diverged", field=key[:200])
        if facts.num_overflowing:
            message = f"{shown(key, 160)} holds {facts.num_overflowing} values that overflow in bfloat16"
            self._faults.add("overflow", message, field=key[:200])

    def _pair(self, tensors: Mapping[str, StoredTensor], has_velora: bool) -> dict[str, Pair]:
        reader = KeyReader(self._modules, self._faults, has_velora=has_velora)
        sides: dict[str, dict[Side, StoredTensor]] = {}
        for key, tensor in sorted(tensors.items()):
            bound = reader.read(key)
            if bound is None:
                continue
            factors = sides.setdefault(bound.path, {})
            if bound.side in factors:
                message = f"{shown(key, 160)} and {shown(factors[bound.side].key, 160)} are the same factor"
                self._faults.add("duplicate_tensor", message, field=key[:200])
            factors[bound.side] = tensor
        return {
            path: Pair(self._modules[path], factors["A"], factors["B"])
            for path, factors in sides.items()
            if self._is_complete(path, factors)
        }

    def _is_complete(self, path: str, factors: Mapping[Side, StoredTensor]) -> bool:
        missing = [side for side in ("A", "B") if side not in factors]
        for side in missing:
            key = f"{PREFIX}{path}.lora_{side}.weight"
            self._faults.add("missing_tensor", f"{shown(key, 160)} is missing: half of a LoRA pair", field=key[:200])
        return not missing

    def _check_targets(self, adapter: AdapterConfig, pairs: Mapping[str, Pair]) -> None:
        if adapter.rules.targets is None:
            self._faults.warn("targets_null", "target_modules is null: the tensors decide", field="target_modules")
        try:
            targeted = adapter.rules.targeted(sorted(pairs), cpu_s=self._config.pattern_cpu_s)
        except PatternError as error:
            self._faults.add("pattern", f"target, exclude or layers pattern: {error}", field="target_modules")
            return
        for path in sorted(pairs.keys() - targeted):
            message = f"the file has tensors for {shown(path, 160)}, which the configuration does not target"
            self._faults.add("untargeted_module", message, field="target_modules")

    def _resolve(self, adapter: AdapterConfig, pairs: Mapping[str, Pair]) -> tuple[dict[str, int], dict[str, float]]:
        paths, cpu_s = sorted(pairs), self._config.pattern_cpu_s
        ranks, alphas = dict.fromkeys(paths, adapter.rank), dict.fromkeys(paths, adapter.alpha)
        idle: dict[str, tuple[str, ...]] = {}
        field = "rank_pattern"
        try:
            ranks, idle[field] = resolve_pattern(adapter.rank_pattern, adapter.rank, paths, cpu_s=cpu_s)
            field = "alpha_pattern"
            alphas, idle[field] = resolve_pattern(adapter.alpha_pattern, adapter.alpha, paths, cpu_s=cpu_s)
        except PatternError as error:
            self._faults.add("pattern", f"{field}: {error}", field=field)
        for field, keys in idle.items():
            if keys and paths:
                listed = ", ".join(shown(key) for key in keys[:5])
                self._faults.warn("pattern_idle", f"{field} matches no module with {listed}", field=field)
        return ranks, alphas

    def _blocks_of(self, adapter: AdapterConfig, path: str) -> tuple[int, int]:
        try:
            return adapter.blocks.blocks_of(path)
        except BlockError as error:
            self._faults.add("bdlora", f"use_bdlora: {error}", field="use_bdlora")
            return 1, 1

    def _check_shapes(self, pair: Pair, rank: int, blocks: tuple[int, int]) -> None:
        """Against the base, and against `rank` unless a fault in the configuration makes that a guess."""
        if self._faults.codes & {"field_type", "pattern"} and pair.a.shape:
            rank = pair.a.shape[0]
        if rank > self._config.max_rank:
            message = f"{shown(pair.module.path)} has rank {rank}; at most {self._config.max_rank} is served"
            self._faults.add("rank_too_large", message, field="r")
        if "bdlora" in self._faults.codes:
            return
        try:
            a_shape, b_shape = stored_shapes(rank, pair.module.in_features, pair.module.out_features, blocks)
        except BlockError as error:
            self._faults.add("bdlora", f"{shown(pair.module.path)}: {error}", field="use_bdlora")
            return
        self._check_shape(pair.a, a_shape, width=1)
        self._check_shape(pair.b, b_shape, width=0)

    def _check_shape(self, tensor: StoredTensor, wanted: tuple[int, int], width: int) -> None:
        """`width` is the dimension that comes from the base; the other one is the rank."""
        if tensor.shape == wanted:
            return
        message = f"{shown(tensor.key, 160)} has shape {shown(tensor.shape)}; expected {wanted}"
        other_base = len(tensor.shape) == 2 and tensor.shape[width] != wanted[width]
        code, hint = "shape", "the rank of the file is not the configuration's; " + PATTERN_HINT
        if other_base:
            code, hint = "base_mismatch", "the adapter was probably trained for another base"
        self._faults.add(code, message, hint=hint, field=tensor.key[:200])


def _tensor_info(tensor: StoredTensor, facts: TensorFacts) -> TensorInfo:
    return TensorInfo.model_validate(
        {"key": tensor.key, "dtype": tensor.dtype, "shape": tensor.shape, "sha256": facts.sha256}
    )
