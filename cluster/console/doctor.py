"""`lorafleet doctor`: asks the server one question after another and says what is wrong and what to do."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from cluster.console.client import LOOPBACK_HOSTS, ControlClient
from cluster.console.errors import ControlError
from cluster.console.follow import what_is_missing
from cluster.console.render import count
from telemetry.catalogue import HITS


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """The answer to one question. `hint` says what to do about it."""

    question: str
    verdict: Verdict
    detail: str
    hint: str | None = None

    def as_json(self) -> dict[str, str | None]:
        return asdict(self)


Check = Callable[[ControlClient], Finding]


def examine(client: ControlClient, *, has_key: bool) -> list[Finding]:
    """Every check in order. Raises Unreachable when nobody answers the first, for then no other can be asked."""
    client_findings = [_key_on_the_wire(client, has_key)]
    client.health()
    reached = Finding("server", Verdict.OK, f"{client.url} answers")
    return [reached, *client_findings, *(_safely(check, client) for check in CHECKS)]


def _safely(check: Check, client: ControlClient) -> Finding:
    try:
        return check(client)
    except ControlError as error:
        return Finding(_question(check), Verdict.FAILED, error.message, error.hint)


def _question(check: Check) -> str:
    return getattr(check, "__name__", "check").strip("_")


def _key_on_the_wire(client: ControlClient, has_key: bool) -> Finding:
    parts = urlsplit(client.url)
    if not has_key:
        return Finding("key", Verdict.OK, "no key is sent")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK_HOSTS:
        return Finding("key", Verdict.WARNING, "the key travels unencrypted", "use an https:// URL")
    return Finding("key", Verdict.OK, "a key is sent")


def _ready(client: ControlClient) -> Finding:
    ready, body = client.ready()
    if ready:
        return Finding("ready", Verdict.OK, "the fleet serves")
    return Finding("ready", Verdict.FAILED, what_is_missing(body), "wait for it with: lorafleet wait-ready")


def _base(client: ControlClient) -> Finding:
    base = client.base_name()
    if base is None:
        return Finding("base", Verdict.FAILED, "no base model is served", "look at the log of a replica")
    return Finding("base", Verdict.OK, base)


def _replicas(client: ControlClient) -> Finding:
    replicas = client.replicas()
    if not replicas:
        return Finding("replicas", Verdict.FAILED, "no replica is ready", "look at the log of a replica")
    broken = [f"{replica.replica_id}: {why}" for replica in replicas for why in replica.failed.values()]
    if broken:
        return Finding("replicas", Verdict.WARNING, "; ".join(broken), "push the adapter again, or retire it")
    behind = max(replica.revision for replica in replicas) - min(replica.revision for replica in replicas)
    return Finding("replicas", Verdict.OK, f"{len(replicas)} ready, {count(behind, 'revision')} apart")


def _adapters(client: ControlClient) -> Finding:
    adapters = client.adapters()
    waiting = [adapter.name for adapter in adapters if adapter.pending]
    if waiting:
        return Finding("adapters", Verdict.WARNING, f"still staging: {', '.join(waiting)}", "lorafleet replicas")
    return Finding("adapters", Verdict.OK, f"{len(adapters)} registered")


def _metrics(client: ControlClient) -> Finding:
    try:
        num_instances = len(_replica_instances(client.metrics()))
    except (ValueError, KeyError) as error:
        return Finding("metrics", Verdict.FAILED, f"not Prometheus text: {error}")
    if not num_instances:
        return Finding("metrics", Verdict.WARNING, "no replica's metrics are in it", "lorafleet top will be empty")
    return Finding("metrics", Verdict.OK, f"from {count(num_instances, 'instance')}")


def _replica_instances(text: str) -> set[str]:
    """The members that tell of adapters in tiers. Raises ValueError and KeyError for what is no Prometheus text."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.labels.get("instance", "") for sample in samples if sample.name in HITS.sample_names}


CHECKS: tuple[Check, ...] = (_ready, _base, _replicas, _adapters, _metrics)
