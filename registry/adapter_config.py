"""Reads `adapter_config.json`: strict about types, complete about faults, and never opening what it names."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from registry.block_diagonal import FIELDS as BLOCK_FIELDS
from registry.block_diagonal import BlockRules
from registry.config_fields import check_kind
from registry.faults import FaultList, shown
from registry.strict_json import StrictJsonError, parse
from registry.target_rules import Names, TargetRules

DEFAULT_RANK = 8
DEFAULT_ALPHA = 8.0


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What of the file changes the mathematics. Pattern dictionaries keep the file's order: the first match wins."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    rules: TargetRules = field(default_factory=lambda: TargetRules(None))
    blocks: BlockRules = field(default_factory=BlockRules)
    base_name: str | None = None
    revision: str | None = None
    """Of the base."""
    has_velora: bool = False

    def scale(self, rank: int, alpha: float) -> float:
        """alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (arXiv 2312.03732)."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_config(path: Path, faults: FaultList) -> AdapterConfig | None:
    """Parse the file; None when it is no JSON object. Fields at fault get their defaults, so that checks can go on."""
    try:
        raw = parse(path.read_bytes())
    except StrictJsonError as error:
        faults.add("config_json", f"{path.name}: {error}", field=path.name)
        return None
    if not isinstance(raw, dict):
        faults.add("config_json", f"{path.name} is not a JSON object", field=path.name)
        return None
    check_kind(raw, faults)
    return _Fields(raw, faults).adapter_config()


class _Fields:
    """Typed access to the raw object; every wrong type is a fault that names field, value and what is allowed."""

    def __init__(self, raw: dict[str, object], faults: FaultList) -> None:
        self._raw = raw
        self._faults = faults

    def adapter_config(self) -> AdapterConfig:
        config = AdapterConfig(
            rank=self._rank("r", self._raw.get("r", DEFAULT_RANK)) or DEFAULT_RANK,
            alpha=self._number("lora_alpha", self._raw.get("lora_alpha", DEFAULT_ALPHA), DEFAULT_ALPHA),
            use_rslora=self._flag("use_rslora"),
            rank_pattern={
                key: rank
                for key, value in self._mapping("rank_pattern").items()
                if (rank := self._rank(f"rank_pattern[{shown(key)}]", value))
            },
            alpha_pattern={
                key: self._number(f"alpha_pattern[{shown(key)}]", value, DEFAULT_ALPHA)
                for key, value in self._mapping("alpha_pattern").items()
            },
            rules=self._rules(),
            blocks=self._blocks(),
            base_name=self._text("base_model_name_or_path"),
            revision=self._text("revision"),
            has_velora=bool(self._raw.get("velora_config")),
        )
        if config.alpha == 0:
            self._faults.warn("alpha_zero", "lora_alpha is 0: the adapter changes nothing", field="lora_alpha")
        return config

    def _bad(self, name: str, value: object, allowed: str) -> None:
        self._faults.add("field_type", f"{name} is {shown(value)}; allowed: {allowed}", field=name)

    def _rank(self, name: str, value: object) -> int | None:
        if type(value) is int and value >= 1:
            return value
        self._bad(name, value, "a whole number of at least 1")
        return None

    def _number(self, name: str, value: object, default: float) -> float:
        if type(value) is int or type(value) is float:
            return float(value)
        self._bad(name, value, "a finite number")
        return default

    def _flag(self, name: str) -> bool:
        value = self._raw.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._bad(name, value, "true or false")
        return False

    def _text(self, name: str) -> str | None:
        value = self._raw.get(name)
        if value is None or isinstance(value, str):
            return value or None
        self._bad(name, value, "a string or null")
        return None

    def _mapping(self, name: str) -> dict[str, object]:
        value = self._raw.get(name)
        if isinstance(value, dict):
            return value
        if value is not None:
            self._bad(name, value, "an object or null")
        return {}

    def _blocks(self) -> BlockRules:
        if not self._raw.get("use_bdlora"):
            return BlockRules()
        nested = _Fields(self._mapping("use_bdlora"), self._faults)
        for key, value in nested._raw.items():
            if value and key not in BLOCK_FIELDS:
                self._faults.add("unknown_field", f"use_bdlora has the field {shown(key)}", field="use_bdlora")
        return BlockRules(
            num_blocks=nested._rank("nblocks", nested._raw.get("nblocks", 1)) or 1,
            a_names=nested._listed("target_modules_bd_a"),
            b_names=nested._listed("target_modules_bd_b"),
            strict=nested._raw.get("match_strict") is None or nested._flag("match_strict"),
        )

    def _rules(self) -> TargetRules:
        targets = self._names("target_modules")
        layers = self._layers()
        if isinstance(targets, str) and layers:
            message = "layers_to_transform has a meaning only when target_modules is a list"
            self._faults.add("layers_with_pattern", message, field="layers_to_transform")
        patterns = self._names("layers_pattern")
        return TargetRules(
            targets=targets,
            excludes=self._names("exclude_modules") or frozenset(),
            layers=layers,
            layers_patterns=(patterns,) if isinstance(patterns, str) else self._listed("layers_pattern"),
        )

    def _names(self, name: str) -> Names | None:
        value = self._raw.get(name)
        if value is None or isinstance(value, str):
            return value
        return frozenset(self._listed(name))

    def _listed(self, name: str) -> tuple[str, ...]:
        value = self._raw.get(name)
        if value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            return tuple(value or ())
        self._bad(name, value, "a string, a list of strings or null")
        return ()

    def _layers(self) -> frozenset[int] | None:
        value = self._raw.get("layers_to_transform")
        listed = [value] if type(value) is int else value
        if listed is None or (isinstance(listed, list) and all(type(item) is int for item in listed)):
            return frozenset(listed) if listed else None
        self._bad("layers_to_transform", value, "a whole number, a list of them or null")
        return None
