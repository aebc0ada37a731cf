"""A source in S3, in GCS or on the hub, through fsspec. Credentials and endpoints are the environment's, as for every
program that uses these services; a request can name neither.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import fsspec

from registry.errors import LimitExceeded, RegistryError, SourceNotFound, SourceUnavailable
from registry.source_urls import HUB, Place

logger = logging.getLogger("lorafleet.registry")
MAX_DEPTH = 2
READ_BYTES = 4 * 1024 * 1024
NEEDS = {
    "s3": "s3fs: pip install 'lorafleet[s3]'",
    "gs": "gcsfs: pip install 'lorafleet[gcs]'",
    HUB: "huggingface_hub",
}


class RemoteSource:
    """`sources.Store` over one prefix, object or repository."""

    def __init__(self, place: Place, revision: str | None) -> None:
        self._place = place
        self._path = place.path
        if place.scheme == HUB:
            owner, repository, *inside = place.path.split("/")
            self._path = "/".join([owner, f"{repository}@{revision}", *inside])
        with self._reaching():
            self._fs: Any = fsspec.filesystem(
                place.scheme, skip_instance_cache=True, **({} if place.scheme == HUB else {"use_listings_cache": False})
            )

    def names(self, max_files: int) -> list[str]:
        with self._reaching():
            if self._fs.info(self._path)["type"] != "directory":
                return [self._path.rpartition("/")[2]]
            found = self._fs.find(self._path, maxdepth=MAX_DEPTH)
        if not found:
            raise SourceNotFound(f"{self._place} holds no files")
        if len(found) > max_files:
            raise LimitExceeded(f"{self._place} has {len(found)} files; at most {max_files} are allowed")
        return sorted(str(path).removeprefix(f"{self._path}/") for path in found)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        with self._reaching(), self._fs.open(self._path_of(name), "rb", block_size=READ_BYTES) as file:
            yield file

    def _path_of(self, name: str) -> str:
        return self._path if self._path.rpartition("/")[2] == name else f"{self._path}/{name}"

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RegistryError:
            raise
        except FileNotFoundError:
            raise SourceNotFound(f"{self._place} does not exist") from None
        except ImportError as error:
            raise SourceUnavailable(f"{self._place.scheme}:// needs {NEEDS[self._place.scheme]}") from error
        except Exception as error:  # any client library may be behind it, and its texts may hold secrets
            logger.warning("source %s: %s: %s", self._place, type(error).__name__, error)
            raise SourceUnavailable(f"{self._place} cannot be read ({type(error).__name__})") from None
