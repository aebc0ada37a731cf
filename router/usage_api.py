"""The usage report over HTTP, for charge-back: JSON or CSV. A tenant sees its own, an admin everybody's."""

import csv
import io
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from registry.usage_records import UsageGroup, UsageReport, UsageRow
from router.auth import Principal
from router.errors import BadRequest, PermissionDenied
from router.gateway import Gateway
from router.params import query_time

DEFAULT_GROUPS = "tenant,version"
COLUMNS: dict[UsageGroup, tuple[str, ...]] = {
    UsageGroup.HOUR: ("start",),
    UsageGroup.DAY: ("start",),
    UsageGroup.TENANT: ("tenant",),
    UsageGroup.ADAPTER: ("adapter",),
    UsageGroup.VERSION: ("adapter", "version", "digest"),
}
COUNTS = ("requests", "prompt_tokens", "output_tokens", "device_s")


class UsageApi:
    """Handlers over one gateway and its registry."""

    def __init__(self, gateway: Gateway) -> None:
        self._registry = gateway.registry

    async def usage(self, request: Request, caller: Principal) -> Response:
        form = request.query_params.get("format", "json")
        if form not in ("csv", "json"):
            raise BadRequest(f"format is {form[:80]!r}; allowed: csv, json", "format")
        report = await self._registry.usage(
            from_s=query_time(request, "from"),
            to_s=query_time(request, "to"),
            tenant=tenant_of(request.query_params.get("tenant"), caller),
            group_by=groups_of(request.query_params.get("group_by", DEFAULT_GROUPS)),
        )
        if not report.is_whole:
            raise BadRequest(
                f"the report has more than {len(report.rows)} rows; take a shorter time or fewer groups", "group_by"
            )
        return Response(as_csv(report), media_type="text/csv") if form == "csv" else JSONResponse(as_json(report))


def tenant_of(asked: str | None, caller: Principal) -> str | None:
    """Whose use is shown; None is everybody's. Raises PermissionDenied."""
    if caller.is_admin:
        return asked
    if asked not in (None, caller.tenant):
        raise PermissionDenied("this key sees the use of its own tenant only")
    return caller.tenant


def groups_of(text: str) -> tuple[UsageGroup, ...]:
    """`tenant,version` as groups, in the order given. Raises BadRequest."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    allowed = ", ".join(UsageGroup)
    for word in words:
        if word not in tuple(UsageGroup):
            raise BadRequest(f"group_by has {word[:80]!r}; allowed: {allowed}", "group_by")
    if UsageGroup.HOUR in words and UsageGroup.DAY in words:
        raise BadRequest("group_by has both hour and day; take one", "group_by")
    return tuple(dict.fromkeys(UsageGroup(word) for word in words))


def columns_of(report: UsageReport) -> tuple[str, ...]:
    """The names of the columns, groups first."""
    return (*dict.fromkeys(name for group in report.group_by for name in COLUMNS[group]), *COUNTS)


def cells(row: UsageRow) -> dict[str, Any]:
    """Everything that a row has, as it is shown."""
    start = None if row.start_s is None else datetime.fromtimestamp(row.start_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {**row.model_dump(exclude={"start_s", "device_ns"}), "start": start, "device_s": row.device_s}


def as_json(report: UsageReport) -> dict[str, Any]:
    names = columns_of(report)
    data = [{name: shown[name] for name in names} for shown in map(cells, report.rows)]
    head = {"object": "list", "from_s": report.from_s, "to_s": report.to_s, "group_by": list(report.group_by)}
    return {**head, "data": data}


def as_csv(report: UsageReport) -> str:
    """A header and a line a row; what there is not is empty, as the version of the base model."""
    names = columns_of(report)
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\r\n")
    table.writeheader()
    for row in report.rows:
        table.writerow({**cells(row), "device_s": f"{row.device_ns // 10**9}.{row.device_ns % 10**9:09d}"})
    return text.getvalue()
