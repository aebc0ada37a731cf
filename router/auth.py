"""Who is calling. Knows nothing of routes beyond the scope each one needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from router.errors import PermissionDenied

DEFAULT_TENANT = "default"


class Scope(StrEnum):
    """What a caller may do; every route that is not public names one."""

    INFER = "infer"
    UPLOAD = "upload"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller."""

    tenant: str
    scopes: frozenset[Scope]

    def require(self, scope: Scope) -> None:
        """Raise PermissionDenied unless the caller has `scope`."""
        if scope not in self.scopes:
            raise PermissionDenied(f"this key lacks the scope `{scope}`")


class Authenticator(Protocol):
    async def authenticate(self, headers: Mapping[str, str]) -> Principal:
        """The caller behind these lower-case headers; raises AuthenticationFailed."""
        ...


class OpenAuthenticator:
    """Everybody is one tenant with every scope: for servers without keys, which bind to loopback only."""

    def __init__(self, tenant: str = DEFAULT_TENANT) -> None:
        self._principal = Principal(tenant, frozenset(Scope))

    async def authenticate(self, headers: Mapping[str, str]) -> Principal:
        return self._principal
