"""Reports of a fleet as `/v1/fleet` answers them, for tests of those who read them."""

from typing import Any

from router.view.records import (
    AdapterRow,
    AdapterTable,
    Finding,
    FleetReport,
    History,
    ReplicaView,
    SlotRow,
    TenantView,
    Totals,
)

NOISY = Finding(severity="warn", code="noisy_tenant", text="globex holds 82 % of the queue", subject="globex")


def replica_view(ordinal: int, **changes: Any) -> ReplicaView:
    fields: dict[str, Any] = {
        "replica_id": f"replica-{ordinal}",
        "ring_id": ordinal,
        "node_id": "node-a",
        "answers": True,
        "drained": None,
        "behind": 0,
        "num_slots": 4,
        "slots": (SlotRow("pinned", "legal", 2, 1, 3.0), SlotRow("loading", "sales", 1, 0, 0.0), *(FREE,) * 2),
        "num_staged": 2,
        "num_host_cached": 1,
        "running": 2,
        "waiting": 3,
        "loading": 1,
        "kv_used": 0.25,
        "tokens": 1000.0,
        "tokens_per_s": 42.0,
        "swaps": 7.0,
        "swaps_per_s": 0.5,
        "hits": 9.0,
        "misses": 1.0,
        "hit_rate": 0.9,
    }
    return ReplicaView(**{**fields, **changes})


FREE = SlotRow("free", None, None, 0, 0.0)


def adapter_row(name: str, **changes: Any) -> AdapterRow:
    numbers = dict.fromkeys(AdapterRow._fields, 0.0)
    return AdapterRow(**{**numbers, "name": name, "owner": "team-a", "live": 2, "num_versions": 2, **changes})


def tenant_view(tenant: str, **changes: Any) -> TenantView:
    numbers: dict[str, Any] = dict.fromkeys(TenantView.model_fields, 0)
    return TenantView(**{**numbers, "tenant": tenant, **changes})


def fleet_report(**changes: Any) -> FleetReport:
    totals: dict[str, Any] = dict.fromkeys(Totals.model_fields, 0)
    fields: dict[str, Any] = {
        "at_s": 1e9,
        "window_s": 10.0,
        "latency_window_s": 60.0,
        "period_s": 1.0,
        "gateway": "gateway",
        "num_gateways": 1,
        "num_gateways_counted": 1,
        "revision": 3,
        "base": "tiny",
        "missing": (),
        "registry_answers": True,
        "totals": Totals(**{**totals, "tokens_per_s": 84.0, "waiting": 50, "hit_rate": 0.9, "swaps_per_s": 1.25}),
        "findings": (NOISY,),
        "replicas": (replica_view(0), replica_view(1, answers=False)),
        "adapters": AdapterTable(
            num_total=2, num_matching=2, rows=(adapter_row("legal", requests=11.0, first_token_p99_s=1.5),)
        ),
        "num_tenants": 1,
        "tenants": (tenant_view("globex", waiting=41, queue_share=0.82, oldest_wait_s=3.25),),
        "rollouts": (),
        "events": (),
        "history": History(points=()),
    }
    return FleetReport(**{**fields, **changes})
