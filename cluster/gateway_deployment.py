"""The gateway's Serve deployment: the plain Gateway, following the registry's catalog."""

import asyncio
import logging
from typing import Any

from fastapi import FastAPI
from ray import serve

from cluster.channel import wait_until_set
from cluster.config import FleetConfig
from cluster.doors import authenticator, serve_host
from cluster.registry_client import ServeRegistry
from cluster.serve_fleet import ServeFleet
from cluster.serve_peers import ServePeers
from cluster.usage_teller import tell_forever, tell_last
from registry.catalog import Catalog
from registry.errors import RegistryError
from registry.types import CatalogDelta
from registry.usage_ledger import UsageLedger
from router.app import create_app
from router.gateway import Gateway
from router.journal import Journal
from telemetry.logs import set_up
from telemetry.traces import open_tracer

logger = logging.getLogger("lorafleet.gateway")
RETRY_S = 0.5
FIRST_CATALOG_S = 30.0
"""How long a gateway that starts waits for the registry, before it takes requests with nothing to go by."""
WATCH_RUNNING_S = 0.05
SHARE_S = 0.5
"""How often a gateway says what it holds and wants of limits that several gateways share."""


class GatewayDeployment:
    """The HTTP face. It follows the registry's catalog and serves on from the last one when the registry is down.

    Serve sends requests once `__init__` is over, so it waits for the first catalog there: a gateway that knows no model
    would lose requests.
    """

    async def __init__(self, config: FleetConfig, base_names: tuple[str, ...], replicas: Any) -> None:  # type: ignore[misc]
        self._config = config
        context = serve.get_replica_context()
        self._gateway_id = context.replica_id.unique_id
        self._registry = ServeRegistry(serve.get_deployment_handle("RegistryActor", app_name=config.registry_app))
        placement = config.placement
        self._fleet = ServeFleet(
            replicas, self._gateway_id, silence_s=placement.silence_s, probe_timeout_s=placement.probe_timeout_s
        )
        self._catalog = Catalog(base_names)
        set_up(config.logs, role="gateway", member=self._gateway_id)
        self._tracer = open_tracer(config.traces, role="gateway", member=self._gateway_id)
        self._journal = Journal(UsageLedger(self._gateway_id), self._tracer)
        instance = self._instance_of(self._gateway_id)
        router = config.router.model_copy(update={"instance": instance, "placement": placement})
        self._gateway = Gateway(
            router,
            self._catalog,
            self._fleet,
            self._registry,
            authenticator=authenticator(router, self._catalog, serve_host()),
            shares_limits=True,
            journal=self._journal,
            peers=ServePeers(
                serve.get_deployment_handle(context.deployment, context.app_name), router.instance, self._instances
            ),
        )
        self._has_catalog, self._has_news = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        self._following = loop.create_task(self._follow())
        self._watching = loop.create_task(self._watch_running())
        self._pulsing = loop.create_task(self._pulse())
        self._preloading = loop.create_task(self._preload())
        self._sharing = loop.create_task(self._share_limits())
        self._telling = loop.create_task(tell_forever(self._journal.ledger, self._registry))
        if not await wait_until_set(self._has_catalog, FIRST_CATALOG_S):
            logger.warning("no catalog after %g s; taking requests without one", FIRST_CATALOG_S)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._gateway, server_repeats_id=True)

    async def instance(self) -> str:
        """What other gateways know this one by."""
        return self._gateway.config.instance

    def _instance_of(self, gateway_id: str) -> str:
        return f"{self._config.router.instance}-{gateway_id}"

    async def _instances(self) -> list[str]:
        """All gateways with a live lease, this one too. Raises RegistryError."""
        return [self._instance_of(gateway_id) for gateway_id in await self._registry.gateways()]

    async def metrics_for(self, asker: str, wanted: str | None = None) -> tuple[str, bytes] | None:
        """Its instance and metrics for another gateway that is being scraped, unless that one wants a third one's."""
        own = self._gateway.config.instance
        if asker == own or wanted not in (None, own):
            return None
        return own, await self._gateway.own_exposition()

    async def _follow(self) -> None:
        """Keep the catalog current for ever; each call acknowledges what was applied before it.

        What requests used is told until a call has come through: the collector goes by it.
        """
        used: set[str] = set()
        while True:
            try:
                used.update(self._gateway.take_used())
                delta = await self._registry.follow_gateway(
                    self._gateway_id, self._catalog.revision, self._config.watch_timeout_s, tuple(used)
                )
                used.clear()
                if delta is not None:
                    await self._apply(delta)
                self._has_catalog.set()
            except RegistryError as error:
                logger.warning("catalog: %s; serving on from revision %d", error.message, self._catalog.revision)
                await asyncio.sleep(RETRY_S)
            except Exception:
                logger.exception("the gateway could not apply a change; it asks again")
                await asyncio.sleep(RETRY_S)

    async def _watch_running(self) -> None:
        """Take note at once of replicas that Serve stops, for ever; this loop waits for nothing else."""
        while True:
            await asyncio.sleep(WATCH_RUNNING_S)
            try:
                if self._gateway.stopping(self._fleet.gone(), self._fleet.starting()):
                    self._has_news.set()
            except Exception:
                logger.exception("watching for replicas that stop stumbled; it goes on")

    async def _pulse(self) -> None:
        """Exchange loads and demand with the fleet for ever, at once when a replica begins to stop."""
        while True:
            await wait_until_set(self._has_news, self._config.router.placement.pulse_s)
            self._has_news.clear()
            try:
                await self._gateway.exchange(self._gateway_id, self._registry)
            except RegistryError as error:
                logger.debug("pulse: %s", error.message)
            except Exception:
                logger.exception("the gateway's pulse stumbled; it goes on")

    async def _preload(self) -> None:
        """Bring adapters to their homes by the clock, for ever."""
        while True:
            await asyncio.sleep(self._config.router.placement.pulse_s)
            try:
                await self._gateway.preload()
            except Exception:
                logger.exception("preloading stumbled; it goes on")

    async def _share_limits(self) -> None:
        """Hold this gateway's parts of tenants' limits for ever; a request that waits for a part is told at once."""
        while True:
            try:
                await self._gateway.share_limits(self._gateway_id, self._registry)
            except RegistryError as error:
                logger.debug("limits: %s; keeping the parts there are", error.message)
                await asyncio.sleep(RETRY_S)
            except Exception:
                logger.exception("sharing limits stumbled; it goes on")
                await asyncio.sleep(RETRY_S)
            await self._gateway.limits.wait_for_news(SHARE_S)

    async def _apply(self, delta: CatalogDelta) -> None:
        await self._gateway.apply(delta)
        self._fleet.follow(frozenset(replica.replica_id for replica in self._catalog.replicas))

    def check_health(self) -> None:
        loops = (self._following, self._watching, self._pulsing, self._preloading, self._sharing)
        if any(task.done() for task in loops):
            raise RuntimeError("the gateway no longer follows the catalog")

    async def __del__(self) -> None:
        loops = (self._following, self._watching, self._pulsing, self._preloading, self._sharing, self._telling)
        for task in loops:
            task.cancel()
        await tell_last(self._journal.ledger, self._registry)
        try:
            await self._registry.leave_gateway(self._gateway_id)
        except RegistryError as error:
            logger.warning("could not leave: %s", error.message)
        await asyncio.to_thread(self._tracer.close)
