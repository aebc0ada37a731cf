"""The fleet at a glance: its JSON, and the page of our own that shows it."""

import re

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from router.auth import Principal
from router.dashboard_files import load_files
from router.errors import BadRequest
from router.gateway import Gateway
from router.params import query_int
from router.view.fleet_view import FleetView

MAX_ADAPTERS = 2000
DEFAULT_ADAPTERS = 1000
MAX_SEARCH_CHARS = 100


class FleetApi:
    """Handlers over one gateway and one view of the fleet."""

    def __init__(self, gateway: Gateway) -> None:
        self._view = FleetView(gateway, gateway.config.instance)
        self._files = load_files()

    async def fleet(self, request: Request, caller: Principal) -> Response:
        """The fleet now. `limit` and `search` are of the adapters; `since` leaves out older points of the history."""
        search = request.query_params.get("search", "")
        if len(search) > MAX_SEARCH_CHARS:
            raise BadRequest(f"search is longer than {MAX_SEARCH_CHARS} characters", "search")
        report = await self._view.report(
            limit=min(query_int(request, "limit", DEFAULT_ADAPTERS), MAX_ADAPTERS),
            search=search,
            since_s=_since(request),
            with_events=caller.is_admin,
        )
        headers = {"cache-control": "no-store"}
        return Response(report.model_dump_json(), media_type="application/json", headers=headers)

    async def page(self, request: Request, caller: Principal) -> Response:
        """The dashboard. Everybody may load it: it holds nothing until it has a key."""
        return self._files["dashboard.html"].answer(request)

    async def file(self, request: Request, caller: Principal) -> Response:
        """A file that the dashboard loads; anything but those there are is no file."""
        name = str(request.path_params["file"])
        if name not in self._files:
            raise HTTPException(404)
        return self._files[name].answer(request)


def _since(request: Request) -> float:
    """Seconds since the epoch."""
    text = request.query_params.get("since", "0")
    if re.fullmatch(r"[0-9]{1,10}(\.[0-9]{1,9})?", text, re.ASCII) is None:
        raise BadRequest(f"since is {text[:80]!r}; allowed: seconds since the epoch", "since")
    return float(text)
