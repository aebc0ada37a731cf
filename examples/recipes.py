"""How each tenant's adapter is trained: deliberately unlike one another, as the adapters of real tenants are."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ATTENTION = ("q_proj", "v_proj")
EVERYTHING = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Recipe:
    """LoRA shape and training length. The patterns map a projection to its own rank or alpha; `layers` None is all."""

    rank: int
    alpha: int
    targets: tuple[str, ...] = ATTENTION
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, int] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    num_steps: int = 50
    batch_size: int = 4
    learning_rate: float = 1.5e-3
    seed: int = 7


RECIPES: Mapping[str, Recipe] = {
    "sql": Recipe(rank=4, alpha=8, targets=EVERYTHING, num_steps=40, batch_size=8),
    "support": Recipe(rank=8, alpha=16, targets=EVERYTHING, learning_rate=1e-3),
    "pirate": Recipe(rank=32, alpha=16, use_rslora=True, learning_rate=1e-3, num_steps=70),
    "legal": Recipe(rank=16, alpha=32, num_steps=60),
    "commit": Recipe(
        rank=4,
        alpha=8,
        rank_pattern={"v_proj": 8},
        alpha_pattern={"v_proj": 16},
        layers=tuple(range(10, 30)),
        learning_rate=2e-3,
    ),
    "summary": Recipe(rank=8, alpha=16, num_steps=60),
}
