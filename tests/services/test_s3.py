"""Blobs and sources in S3, through a real S3-protocol endpoint."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from registry.blobs import BlobStore
from registry.config import RegistryConfig
from registry.errors import BlobNotFound, LimitExceeded, SourceNotFound, SourceRefused, SourceUnavailable
from registry.sources import fetched
from registry.types import AdapterSource
from tests.registry.test_archives import zipped
from tests.registry.uploads import make_base, open_registry, plain_upload
from tests.services.s3 import running_s3

pytestmark = [pytest.mark.services, pytest.mark.filterwarnings("ignore")]

BASE = make_base()
NAMES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    with running_s3("adapters"):
        import s3fs

        yield s3fs.S3FileSystem(skip_instance_cache=True)


def test_blobs_are_stored_once_and_read_in_pieces(bucket: Any, tmp_path: Path) -> None:
    store = BlobStore("s3://adapters/blobs")
    data = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(data)
    sha256 = store.put_file(tmp_path / "file")
    assert sha256 == store.put_bytes(data) == hashlib.sha256(data).hexdigest()
    assert (store.size(sha256), store.exists(sha256), store.exists("0" * 64)) == (len(data), True, False)
    assert store.read(sha256, 1000, 5000) == data[1000:6000]
    assert store.read(sha256, len(data) - 3, 100) == data[-3:]
    with pytest.raises(BlobNotFound):
        store.read("1" * 64, 0, 1)


def test_registry_keeps_its_blobs_in_s3_and_takes_uploads_from_there(bucket: Any, tmp_path: Path) -> None:
    files = plain_upload(tmp_path / "sql", BASE)
    for name, path in files.items():
        bucket.put_file(str(path), f"adapters/team/sql/{name}")
        bucket.put_file(str(path), f"adapters/team/named/legal/{name}")
    bucket.pipe_file("adapters/team/sql/README.md", b"card")
    bucket.pipe_file("adapters/team/sql.zip", zipped({name: path.read_bytes() for name, path in files.items()}))
    registry = open_registry(tmp_path / "data", blobs_url="s3://adapters/store", source_roots=("s3://adapters/team",))
    registry.publish_base(BASE, actor="r")
    pushed = [
        registry.push_source("sql", AdapterSource(url=f"s3://adapters/team/{place}"), owner="a")
        for place in ("sql", "sql/", "named", "sql.zip")
    ]
    assert [result.created for result in pushed] == [True, False, False, False]
    assert {result.version.digest for result in pushed} == {pushed[0].version.digest}
    registry.check_integrity()
    manifest = registry.manifest(pushed[0].version.digest)
    weights = files["adapter_model.safetensors"].read_bytes()
    assert registry.blobs.read(manifest.blob_sha256, 0, len(weights)) == weights


def test_source_changes_are_seen(bucket: Any, tmp_path: Path) -> None:
    config = RegistryConfig(source_roots=("s3://adapters",))
    for content in (b"{}", b'{"r": 4}'):
        bucket.pipe_file("adapters/live/adapter_config.json", content)
        with fetched(AdapterSource(url="s3://adapters/live"), config) as files:
            assert files["adapter_config.json"].read_bytes() == content


@pytest.mark.parametrize(
    ("url", "limits", "error"),
    [
        ("s3://adapters/nothing", {}, SourceNotFound),
        ("s3://other/x", {}, SourceRefused),
        ("s3://adapters/many", {"max_files": 3}, LimitExceeded),
        ("s3://adapters/large", {"max_unpacked_bytes": 1000}, LimitExceeded),
    ],
)
def test_what_cannot_be_taken_is_refused(url: str, limits: dict[str, int], error: Any, bucket: Any) -> None:
    for i in range(4):
        bucket.pipe_file(f"adapters/many/{i}", b"x")
    bucket.pipe_file("adapters/large/adapter_config.json", bytes(2000))
    config = RegistryConfig.model_validate({"source_roots": ("s3://adapters",), **limits})
    with pytest.raises(error), fetched(AdapterSource(url=url), config):
        pass


def test_endpoint_that_is_gone_is_unavailable(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    config = RegistryConfig(source_roots=("s3://adapters",))
    with pytest.raises(SourceUnavailable), fetched(AdapterSource(url="s3://adapters/sql"), config):
        pass
