"""Two gateways before the same replicas: whichever is asked tells of the calls of both."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from router.view.records import FleetReport
from tests.e2e.test_metrics_truth import TENANT_HEADER, TenantsByHeader, added_up
from tests.local_fleet import LocalFleet, local_fleet
from tests.metrics_text import samples_of, value_of

CALLS = {"gateway": 3, "gateway-1": 5}
TOKENS = 4


@asynccontextmanager
async def two_gateways(tiny_base: Path, folder: Path) -> AsyncIterator[tuple[LocalFleet, list[httpx.AsyncClient]]]:
    config = ReplicaConfig(
        model=ModelConfig(base=str(tiny_base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(node_store=folder / "node", max_slots=1, arena_bytes=8 << 20),
        scheduler=SchedulerConfig(num_kv_blocks=64),
    )
    async with local_fleet(folder, config, num_replicas=1, num_gateways=2) as fleet:
        for gateway in fleet.gateways:
            gateway.authenticator = TenantsByHeader()
        clients = [fleet.client(gateway) for gateway in fleet.gateways]
        for client, tenant, count in zip(clients, ("acme", "beta"), CALLS.values(), strict=True):
            body = {"model": "tiny-llama", "prompt": "Hello", "max_tokens": TOKENS, "ignore_eos": True}
            for _ in range(count):
                response = await client.post("/v1/completions", json=body, headers={TENANT_HEADER: tenant})
                assert response.status_code == 200, response.text
        yield fleet, clients
        fleet.check_integrity()


async def test_either_gateway_tells_of_the_calls_of_both(tiny_base: Path, tmp_path: Path) -> None:
    async with two_gateways(tiny_base, tmp_path) as (_, clients):
        for client in clients:
            samples = samples_of((await client.get("/metrics")).content)
            assert added_up(samples, "lorafleet_requests_total", "instance") == CALLS
            tokens = added_up(samples, "lorafleet_gateway_completion_tokens_total", "instance")
            assert tokens == {name: TOKENS * count for name, count in CALLS.items()}
            names = [target["labels"]["instance"] for target in (await client.get("/metrics/targets")).json()]
            assert sorted(names) == ["gateway", "gateway-1", "registry", "replica-0"]
            for name, count in CALLS.items():
                alone = (await client.get("/metrics", params={"instance": name})).content
                assert value_of(alone, "lorafleet_requests_total", model="base", version="-", outcome="ok") == count


async def test_report_of_either_gateway_has_the_tenants_and_latencies_of_both(tiny_base: Path, tmp_path: Path) -> None:
    async with two_gateways(tiny_base, tmp_path) as (fleet, clients):

        async def look(client: httpx.AsyncClient) -> FleetReport:
            return FleetReport.model_validate_json((await client.get("/v1/fleet")).text)

        await asyncio.gather(*map(look, clients))  # rates and quantiles need a scrape before the calls
        body = {"model": "tiny-llama", "prompt": "Hello", "max_tokens": TOKENS, "ignore_eos": True}
        for client, tenant in zip(clients, ("acme", "beta"), strict=True):
            await client.post("/v1/completions", json=body, headers={TENANT_HEADER: tenant})
        await asyncio.sleep(1.0)  # a report is shared for that long
        for client, gateway in zip(clients, fleet.gateways, strict=True):
            report = await look(client)
            assert report.gateway == gateway.config.instance
            assert (report.num_gateways, report.num_gateways_counted) == (2, 2)
            assert report.totals.requests == sum(CALLS.values()) + 2
            assert report.totals.tokens == TOKENS * (sum(CALLS.values()) + 2)
            tenants = {tenant.tenant: tenant for tenant in report.tenants}
            assert (tenants["acme"].requests, tenants["beta"].requests) == (4, 6)
            assert all(tenants[name].first_token_p99_s is not None for name in ("acme", "beta"))
            assert [row.requests for row in report.adapters.rows if row.name == "base"] == [10]
