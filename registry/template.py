"""The fleet's training template: which ranks, targets and dtypes it asks for, and what departs from it."""

from collections.abc import Callable, Sequence

from registry.base_binding import binding
from registry.faults import FaultList
from registry.types import BaseSpec, FleetTemplate, ModuleLora, TemplateRules

HINT = "see `lorafleet template` for a LoraConfig that fits this fleet"


def check_template(modules: Sequence[ModuleLora], rules: TemplateRules, faults: FaultList) -> None:
    """Warn of, or refuse, what `rules` do not allow."""
    tell = faults.add if rules.policy == "refuse" else faults.warn
    ranks = sorted({module.rank for module in modules} - set(rules.ranks)) if rules.ranks else []
    if ranks:
        message = f"the adapter has rank {_listed(ranks)}; the fleet's template asks for {_listed(rules.ranks)}"
        tell("template_rank", message, hint=HINT, field="r")
    _check_names("template_targets", "targets", _names(modules), rules.targets, "target_modules", tell)
    dtypes = {tensor.dtype for module in modules for tensor in (module.a, module.b)}
    _check_names("template_dtype", "has tensors of", sorted(dtypes), rules.dtypes, "dtype", tell)


def _check_names(
    code: str, verb: str, found: Sequence[str], allowed: Sequence[str], field: str, tell: Callable[..., None]
) -> None:
    others = [name for name in found if name not in allowed] if allowed else []
    if others:
        message = f"the adapter {verb} {_listed(others)}; the fleet's template asks for {_listed(allowed)}"
        tell(code, message, hint=HINT, field=field)


def fleet_template(rules: TemplateRules, max_rank: int, base: BaseSpec | None) -> FleetTemplate:
    """What a training run is told."""
    every = sorted({module.path.rpartition(".")[2] for module in base.modules}) if base else []
    return FleetTemplate(
        rules=rules,
        max_rank=max_rank,
        targets=rules.targets or tuple(every),
        base=binding(base, "digest") if base else None,
    )


def _names(modules: Sequence[ModuleLora]) -> list[str]:
    return sorted({module.path.rpartition(".")[2] for module in modules})


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)
