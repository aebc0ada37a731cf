"""What a gateway knows of the registry: resolves a request's `model` to a digest, once. Knows no database."""

from collections.abc import Iterable, Sequence

from registry.errors import ModelNotFound
from registry.stickiness import takes_canary
from registry.types import (
    EVERYBODY,
    LIVE_ALIAS,
    Access,
    AdapterRecord,
    BaseSpec,
    CatalogDelta,
    Record,
    ReplicaRecord,
    VersionRecord,
    VersionState,
    is_adapter_name,
    is_alias_name,
)

MAX_NUMBER_DIGITS = 9
NOBODY: frozenset[str] = frozenset()


class Resolution(Record):
    """What a request asked for. For the base model `adapter`, `number` and `digest` are None."""

    model: str
    adapter: str | None = None
    number: int | None = None
    digest: str | None = None


class Catalog:
    """The latest state that the registry has told, kept by applying its deltas in order."""

    def __init__(self, base_names: Sequence[str]) -> None:
        self.revision = 0
        self.base: BaseSpec | None = None
        self.replicas: tuple[ReplicaRecord, ...] = ()
        self.access: Access | None = None
        """Who may come in; None until the registry has told."""
        self._base_names = tuple(base_names)
        self._adapters: dict[str, AdapterRecord] = {}
        self._servable: dict[str, dict[int, VersionRecord]] = {}
        """Name -> number -> version, of those in service only: what `resolve` looks things up in."""
        self._callers: dict[str, frozenset[str]] = {}
        """Name -> who may call it: a look-up costs the same whatever is in the list, and whether there is one."""

    def __repr__(self) -> str:
        return f"Catalog(revision={self.revision}, adapters={len(self._adapters)}, replicas={len(self.replicas)})"

    @property
    def base_names(self) -> tuple[str, ...]:
        """The configured names of the base, the preferred one first; its own id when none is configured."""
        own = () if self.base is None else (self.base.base_id,)
        return self._base_names or own

    @property
    def adapters(self) -> tuple[AdapterRecord, ...]:
        """Every adapter, by name."""
        return tuple(self._adapters[name] for name in sorted(self._adapters))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of adapters that have a version in service, sorted."""
        return tuple(sorted(name for name, versions in self._servable.items() if versions))

    def apply(self, delta: CatalogDelta) -> bool:
        """Take over what changed; returns whether anything did. A delta that brings nothing new is ignored."""
        if not delta.full and delta.revision <= self.revision:
            return False
        before = (self.revision, self.base, self.replicas, self._adapters)
        kept, servable, callers = ({}, {}, {}) if delta.full else (self._adapters, self._servable, self._callers)
        self._adapters = {**kept, **{adapter.name: adapter for adapter in delta.adapters}}
        self._servable = {**servable, **{adapter.name: _servable(adapter.versions) for adapter in delta.adapters}}
        self._callers = {**callers, **{adapter.name: frozenset(who_may_call(adapter)) for adapter in delta.adapters}}
        self.access = delta.access or self.access
        self.revision, self.base, self.replicas = delta.revision, delta.base, delta.replicas
        return before != (self.revision, self.base, self.replicas, self._adapters)

    def resolve(self, tenant: str, model: str, key: str | None = None) -> Resolution:
        """The version that `model` names for this tenant: a base name, `name`, `name@4` or `name@alias`.

        Names of the base match first and exactly. While an alias has a canary, `key` (by default the tenant) decides
        between it and the alias's own version. Raises ModelNotFound for everything that may not be called.
        """
        if model in self.base_names or (self.base is not None and model == self.base.base_id):
            return Resolution(model=model)
        name, at, reference = model.partition("@")
        allowed = self._callers.get(name, NOBODY) if is_adapter_name(name) else NOBODY
        if allowed.isdisjoint((tenant, EVERYBODY)):
            raise ModelNotFound(f"the model {_shown(model)} does not exist")
        adapter = self._adapters[name]
        version = self._version(adapter, reference if at else LIVE_ALIAS, (tenant, tenant if key is None else key))
        if version is None:
            raise ModelNotFound(f"the model {_shown(model)} does not exist: no version in service has that reference")
        return Resolution(model=model, adapter=name, number=version.number, digest=version.digest)

    def _version(self, adapter: AdapterRecord, reference: str, key: tuple[str, str]) -> VersionRecord | None:
        """The version in service that `reference` (a number or an alias) stands for, for this key.

        A canary that was taken out of service takes nothing; an alias whose own version was still refuses.
        """
        servable = self._servable[adapter.name]
        if _is_number(reference):
            return servable.get(int(reference))
        stable = servable.get(adapter.aliases.get(reference, 0)) if is_alias_name(reference) else None
        canary = adapter.canaries.get(reference)
        if stable is None or canary is None or not takes_canary(adapter.name, key, canary.weight):
            return stable
        return servable.get(canary.number, stable)

    def adapters_for(self, tenant: str) -> tuple[AdapterRecord, ...]:
        """The adapters that the tenant may call, by name."""
        who = (tenant, EVERYBODY)
        return tuple(adapter for adapter in self.adapters if not self._callers[adapter.name].isdisjoint(who))


def who_may_call(adapter: AdapterRecord) -> tuple[str, ...]:
    """The tenants whose requests may use the adapter, its owner first."""
    return (adapter.owner, *adapter.callers)


def _servable(versions: Iterable[VersionRecord]) -> dict[int, VersionRecord]:
    return {version.number: version for version in versions if version.state is VersionState.ACTIVE}


def _is_number(reference: str) -> bool:
    plain = reference.isascii() and reference.isdecimal() and not reference.startswith("0")
    return plain and len(reference) <= MAX_NUMBER_DIGITS


def _shown(model: str) -> str:
    return repr(model if len(model) <= 80 else model[:80] + "…")
