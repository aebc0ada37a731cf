"""The endpoints for those who run the fleet: liveness, readiness, metrics."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from registry.errors import NotReady
from router.auth import Principal
from router.errors import error_body
from router.gateway import Gateway


class OperationsApi:
    """Handlers over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def health(self, request: Request, caller: Principal) -> Response:
        """The process answers; says nothing of the fleet."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request, caller: Principal) -> Response:
        """200 when a call to the base would be served: some replica makes progress. Else 503 with what is missing."""
        missing = await self._gateway.unready()
        body: dict[str, object] = {"ready": not missing, "missing": missing, "revision": self._gateway.catalog.revision}
        if missing:
            body |= error_body(NotReady(f"not ready: no {', no '.join(missing)} yet"))
        return JSONResponse(body, 503 if missing else 200)

    async def metrics(self, request: Request, caller: Principal) -> Response:
        """One scrape for the fleet, or for the member `instance` alone, in Prometheus' text format."""
        instance, gateway = request.query_params.get("instance"), self._gateway
        text = await (gateway.exposition() if instance is None else gateway.exposition_of(instance))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def targets(self, request: Request, caller: Principal) -> Response:
        """Every member as a target of its own, as Prometheus' `http_sd_configs` wants to be told."""
        here = [request.url.netloc]
        return JSONResponse(
            [
                {"targets": here, "labels": {"__param_instance": instance, "instance": instance}}
                for instance in await self._gateway.instances()
            ]
        )
