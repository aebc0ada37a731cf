"""The registry's records as tables and sentences for people. Pure: records in, text out."""

import json
import time
from collections.abc import Sequence

from cluster.console.client import VersionDetail
from cluster.console.render import COLUMN_GAP, Grid, count, human_age, human_bytes
from registry.types import (
    LIVE_ALIAS,
    Activation,
    AdapterManifest,
    AdapterRecord,
    Event,
    ReplicaRecord,
    VersionRecord,
    VersionState,
)

NONE = "-"
DIGEST_CHARS = 12
"""As much of a digest or a node's id as a table shows."""


def adapters_grid(adapters: list[AdapterRecord]) -> Grid:
    headers = ("NAME", "LIVE", "VERSIONS", "ALIASES", "RANK", "SIZE", "BASE", "OWNER", "CHANGED")
    rows = [_adapter_row(adapter) for adapter in sorted(adapters, key=lambda adapter: adapter.name)]
    return Grid(headers, rows, right=frozenset({"LIVE", "VERSIONS", "RANK", "SIZE"}))


def _adapter_row(adapter: AdapterRecord) -> tuple[str, ...]:
    live = adapter.version(adapter.aliases.get(LIVE_ALIAS, 0))
    others = (f"{alias}={number}" for alias, number in sorted(adapter.aliases.items()) if alias != LIVE_ALIAS)
    newest_s = max((version.created_at_s for version in adapter.versions), default=adapter.created_at_s)
    return (
        adapter.name,
        str(live.number) if live else _why_not_live(adapter),
        str(len(adapter.versions)),
        " ".join(others) or NONE,
        str(live.max_rank) if live else NONE,
        human_bytes(live.num_bytes) if live else NONE,
        _base_word(live) if live else NONE,
        adapter.owner,
        f"{human_age(newest_s)} ago",
    )


def _why_not_live(adapter: AdapterRecord) -> str:
    if adapter.pending:
        return "staging"
    gone = (VersionState.RETIRED, VersionState.COLLECTED)
    is_gone = bool(adapter.versions) and all(version.state in gone for version in adapter.versions)
    return VersionState.RETIRED.value if is_gone else NONE


VERSION_HEADERS = (
    *("VERSION", "STATE", "ALIASES", "STAGED", "RESIDENT", "RANK", "SIZE", "TARGETS", "BASE", "DIGEST", "CREATED"),
)


def versions_grid(adapter: AdapterRecord, replicas: Sequence[ReplicaRecord]) -> Grid:
    newest_first = sorted(adapter.versions, key=lambda version: -version.number)
    rows = [_version_row(adapter, version, replicas) for version in newest_first]
    title = f"{adapter.name} (owner {adapter.owner}, callers {', '.join(adapter.callers)}, revision {adapter.revision})"
    right = frozenset({"VERSION", "STAGED", "RESIDENT", "RANK", "SIZE"})
    return Grid(VERSION_HEADERS, rows, title=title, right=right)


def _version_row(adapter: AdapterRecord, version: VersionRecord, replicas: Sequence[ReplicaRecord]) -> tuple[str, ...]:
    return (
        str(version.number),
        version.state.value,
        " ".join(_aliases_of(adapter, version.number)) or NONE,
        f"{num_staged(version.digest, replicas)}/{len(replicas)}",
        str(sum(version.digest in replica.resident for replica in replicas)),
        str(version.max_rank),
        human_bytes(version.num_bytes),
        ",".join(version.target_names),
        _base_word(version),
        version.digest[:DIGEST_CHARS],
        f"{human_age(version.created_at_s)} ago",
    )


def _aliases_of(adapter: AdapterRecord, number: int) -> list[str]:
    """Aliases that point at the version, then those whose canary it is, with its share."""
    targets = [alias for alias, target in sorted(adapter.aliases.items()) if target == number]
    canaries = sorted(adapter.canaries.items())
    return targets + [f"{alias}:{canary.weight:.0%}" for alias, canary in canaries if canary.number == number]


def _base_word(version: VersionRecord) -> str:
    """Whether the upload said for which base it was trained."""
    return "verified" if version.base_verified else "unverified"


def _base_detail(manifest: AdapterManifest) -> str:
    """`SmolLM2-135M-Instruct at 7e27bd9f, verified by digest`"""
    base = manifest.base
    if base is None:
        return "verified" if manifest.base_verified else "unverified: only its shapes fit"
    at = f" at {base.revision[:DIGEST_CHARS]}" if base.revision else ""
    by = f"verified by {base.verified_by}" if manifest.base_verified else "unverified: only its shapes fit"
    return f"{base.base_id}{at}, {by}"


def version_lines(name: str, detail: VersionDetail) -> list[str]:
    version, manifest = detail.version, detail.manifest
    scales = sorted({module.scale for module in manifest.modules})
    lines = [
        f"{name}@{version.number}  {version.state.value}, created {human_age(version.created_at_s)} ago",
        f"  digest   {version.digest}",
        f"  base     {manifest.base_digest} ({_base_detail(manifest)})",
        f"  size     {human_bytes(version.num_bytes)} in {count(len(manifest.modules), 'module')}",
        f"  rank     {version.max_rank}, scale {', '.join(f'{scale:g}' for scale in scales)}",
        f"  targets  {', '.join(version.target_names)}",
    ]
    return lines + [f"  warning  {warning.code}: {warning.message}" for warning in manifest.warnings]


def replicas_grid(replicas: Sequence[ReplicaRecord]) -> Grid:
    headers = ("RING", "REPLICA", "NODE", "RESIDENT", "STAGED", "FAILED", "REVISION")
    rows = [
        (
            str(replica.ring_id),
            replica.replica_id,
            replica.node_id[:DIGEST_CHARS],
            f"{len(replica.resident)}/{replica.num_slots}",
            str(len(replica.staged)),
            str(len(replica.failed)),
            str(replica.revision),
        )
        for replica in sorted(replicas, key=lambda replica: replica.ring_id)
    ]
    return Grid(headers, rows, right=frozenset({"RING", "RESIDENT", "STAGED", "FAILED", "REVISION"}))


def event_line(event: Event) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at_s))
    what = event.name or (event.digest or "")[:DIGEST_CHARS]
    if event.name and event.number is not None:
        what = f"{event.name}@{event.number}"
    detail = " ".join(f"{key}={value}" for key, value in sorted(event.detail.items()))
    return COLUMN_GAP.join(
        part for part in (at, f"r{event.revision}", event.kind, what, f"by {event.actor}", detail) if part
    )


def num_staged(digest: str, replicas: Sequence[ReplicaRecord]) -> int:
    return sum(digest in replica.staged for replica in replicas)


def arrival_line(activation: Activation, replicas: Sequence[ReplicaRecord]) -> str:
    """`legal@1 is live on 2 replicas (0.4 s)`; of a canary, `legal@2 takes 10% of live on ...`."""
    holders = num_staged(activation.digest, replicas)
    where = f" on {count(holders, 'replica')}" if holders else ""
    took = "" if activation.staged_after_s is None else f" ({activation.staged_after_s:.1f} s)"
    share = "is" if activation.weight is None else f"takes {activation.weight:.0%} of"
    return f"{activation.name}@{activation.number} {share} {activation.alias}{where}{took}"


def model_name(activation: Activation) -> str:
    """What a request writes as its `model`."""
    return activation.name if activation.alias == LIVE_ALIAS else f"{activation.name}@{activation.alias}"


def curl_lines(url: str, model: str, *, has_key: bool) -> list[str]:
    """A chat request to copy; a key is named by its variable, never shown."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    key = ['  -H "Authorization: Bearer $LORAFLEET_API_KEY" \\'] if has_key else []
    return [
        f"curl {url}/v1/chat/completions \\",
        *key,
        "  -H 'Content-Type: application/json' \\",
        f"  -d '{body}'",
    ]


def python_lines(url: str, model: str, *, has_key: bool) -> list[str]:
    key = 'os.environ["LORAFLEET_API_KEY"]' if has_key else '"none"'
    return [
        *(["import os"] if has_key else []),
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1", api_key={key})',
        f'client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello"}}])',
    ]


def next_steps(url: str, base: str | None, *, has_key: bool) -> list[str]:
    """What to do with a fleet that has just become ready. `base` is the base model's name, None when unknown."""
    model = base or "NAME"
    return [
        "push an adapter:",
        "  lorafleet push NAME DIR",
        "call it with curl:",
        *(f"  {line}" for line in curl_lines(url, model, has_key=has_key)),
        "or from Python:",
        *(f"  {line}" for line in python_lines(url, model, has_key=has_key)),
    ]
