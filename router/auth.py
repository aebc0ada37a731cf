"""Who is calling and what they may do. Keys come with the catalog, so callers are known while the registry is down."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from registry import keys
from registry.errors import NotReady
from registry.types import Access, KeyHash, Scope
from router.errors import AuthenticationFailed, PermissionDenied

DEFAULT_TENANT = "default"
SCHEME = "bearer"


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller."""

    tenant: str
    scopes: frozenset[Scope]

    def require(self, scope: Scope, *, or_admin: bool = False) -> None:
        """Raise PermissionDenied unless the caller has `scope`, or with `or_admin` that of an admin."""
        if scope not in self.scopes and not (self.is_admin and (or_admin or scope is Scope.METRICS)):
            raise PermissionDenied(f"this key lacks the scope `{scope}`")

    @property
    def is_admin(self) -> bool:
        return Scope.ADMIN in self.scopes


class Authenticator(Protocol):
    async def authenticate(self, headers: Mapping[str, str]) -> Principal:
        """The caller behind these lower-case headers; raises AuthenticationFailed."""
        ...

    def take_used(self) -> tuple[str, ...]:
        """The ids of keys that were used since the last call."""
        ...


class OpenAuthenticator:
    """Everybody is one tenant with every scope: for servers without keys, which listen on loopback only."""

    def __init__(self, tenant: str = DEFAULT_TENANT) -> None:
        self._principal = Principal(tenant, frozenset(Scope))

    async def authenticate(self, headers: Mapping[str, str]) -> Principal:
        return self._principal

    def take_used(self) -> tuple[str, ...]:
        return ()


class KeyAuthenticator:
    """Knows callers by their keys.

    While there has never been a key, `open_without_keys` lets everybody in as one tenant; else nobody comes in, and
    `closed_because` says why. The keys are those of `access()`, None while the registry has not told.
    """

    def __init__(
        self,
        access: Callable[[], Access | None],
        *,
        open_without_keys: bool,
        closed_because: str = "this server has no keys yet",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._access = access
        self._open = OpenAuthenticator() if open_without_keys else None
        self._closed_because = closed_because
        self._wall_clock = wall_clock
        self._seen: Access | None = None
        self._by_id: dict[str, tuple[KeyHash, Principal]] = {}
        self._used: set[str] = set()

    def __repr__(self) -> str:
        return f"KeyAuthenticator({len(self._by_id)} keys)"

    async def authenticate(self, headers: Mapping[str, str]) -> Principal:
        """Raises AuthenticationFailed, and NotReady before the registry has told who may come in."""
        access = self._access()
        if access is None:
            raise NotReady("the registry has not told yet who may call; retry later")
        if not access.has_keys:
            if self._open is None:
                raise AuthenticationFailed(f"{self._closed_because}: make the first one with `lorafleet key bootstrap`")
            return await self._open.authenticate(headers)
        self._follow(access)
        return self._known(headers.get("authorization", ""))

    def take_used(self) -> tuple[str, ...]:
        """The ids of keys that were used since the last call."""
        used, self._used = self._used, set()
        return tuple(used)

    def _follow(self, access: Access) -> None:
        if access is not self._seen:
            self._by_id = {key.key_id: (key, Principal(key.tenant, frozenset(key.scopes))) for key in access.keys}
            self._seen = access

    def _known(self, header: str) -> Principal:
        """The principal of a key. An unknown id costs what a wrong secret does, and reads the same."""
        scheme, _, text = header.partition(" ")
        if not header or scheme.lower() != SCHEME:
            raise AuthenticationFailed("no API key: send `Authorization: Bearer lf_...`")
        key_id, secret = keys.split(text.strip()) or ("", "")
        found = self._by_id.get(key_id)
        salt, wanted = (keys.NO_SALT, keys.NO_HASH) if found is None else (found[0].salt, found[0].hash)
        if not keys.is_secret(salt, wanted, secret) or found is None:
            raise AuthenticationFailed("this API key is not known, or was revoked")
        key, principal = found
        if key.expires_at_s is not None and key.expires_at_s <= self._wall_clock():
            raise AuthenticationFailed("this API key has expired")
        self._used.add(key_id)
        return principal
