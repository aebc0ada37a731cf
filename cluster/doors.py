"""Who may come in at a gateway: by key, or everybody while there is no key and the server listens on loopback only."""

import ipaddress
import logging

from registry.catalog import Catalog
from router.auth import Authenticator, KeyAuthenticator, OpenAuthenticator
from router.config import RouterConfig

logger = logging.getLogger("lorafleet.gateway")
UNKNOWN_HOST = "an address that Serve did not tell"


def serve_host() -> str:
    """The address that Serve's HTTP servers listen on, `UNKNOWN_HOST` where it cannot be found out."""
    from ray.serve.context import _get_global_client

    try:
        return str(_get_global_client().http_config.host)
    except Exception:
        logger.exception("Serve does not tell its HTTP host; taking it for one that others can reach")
        return UNKNOWN_HOST


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def authenticator(config: RouterConfig, catalog: Catalog, host: str) -> Authenticator:
    """The gateway's door, by its configuration and the address that the server listens on; says what it lets in."""
    if config.keys == "ignored":
        logger.warning("router.keys is `ignored`: whoever reaches %s may do everything", host)
        return OpenAuthenticator()
    is_open = config.keys == "auto" and is_loopback(host)
    if is_open:
        logger.warning("until the first key is made, whoever reaches %s (this machine only) may do everything", host)
    else:
        logger.info("listening on %s: every caller needs a key", host)
    because = f"this server listens on {host} and has no keys yet"
    return KeyAuthenticator(lambda: catalog.access, open_without_keys=is_open, closed_because=because)
