"""API keys: how they are made and known again. Knows no database and no HTTP.

A key is `lf_<key id>_<secret>`. The id is public and finds the row; the secret has 256 random bits, so that nobody can
guess it from its hash and one round of sha256 over salt and secret is enough (a slow hash protects words that people
choose, and would let strangers spend our processor time). Decision 0010 has the argument.
"""

import hashlib
import hmac
import secrets
from typing import NamedTuple

PREFIX = "lf"
ID_BYTES = 6
SALT_BYTES = 16
SECRET_BYTES = 32
MAX_KEY_CHARS = 128


class Minted(NamedTuple):
    """A new key: `text` goes to the client, the rest to the registry."""

    text: str
    key_id: str
    salt: str
    hash: str


def mint() -> Minted:
    """A key that nobody has seen before."""
    key_id, salt = secrets.token_hex(ID_BYTES), secrets.token_hex(SALT_BYTES)
    secret = secrets.token_urlsafe(SECRET_BYTES)
    return Minted(f"{PREFIX}_{key_id}_{secret}", key_id, salt, secret_hash(salt, secret))


def secret_hash(salt: str, secret: str) -> str:
    """sha256 over the salt's bytes and the secret, in hexadecimal."""
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode("utf-8", "replace")).hexdigest()


def split(text: str) -> tuple[str, str] | None:
    """The id and the secret that a client sent, or None for what cannot be a key."""
    parts = text.split("_", 2) if len(text) <= MAX_KEY_CHARS else []
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == PREFIX else None


NO_SALT = "0" * (2 * SALT_BYTES)
NO_HASH = "0" * 64
"""What an unknown id is compared with, so that it costs what a known one does."""


def is_secret(salt: str, wanted: str, secret: str) -> bool:
    """Whether `secret` is the one, in time that does not depend on where it differs."""
    return hmac.compare_digest(secret_hash(salt, secret), wanted)
