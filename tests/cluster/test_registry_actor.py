"""The registry actor without Ray: archives in pieces, sources, and the template, as a gateway asks for them."""

from pathlib import Path

import pytest

from cluster.registry_actor import RegistryActor
from registry.config import RegistryConfig
from registry.errors import InvalidAdapter, SourceRefused
from registry.types import AdapterSource, TemplateRules
from tests.registry.test_archives import zipped
from tests.registry.uploads import make_base, plain_upload

BASE = make_base()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return plain_upload(tmp_path / "models" / "sql", BASE)


def actor(tmp_path: Path) -> RegistryActor:
    rules = TemplateRules(ranks=(2, 4))
    roots = (str(tmp_path / "models"),)
    return RegistryActor(RegistryConfig(data_dir=tmp_path / "data", source_roots=roots, template=rules), tick_s=60)


async def send(registry: RegistryActor, data: bytes) -> str:
    upload_id = await registry.begin_upload()
    for offset in range(0, len(data), 100):
        await registry.append_upload(upload_id, "adapter.zip", offset, data[offset : offset + 100])
    return upload_id


async def test_archive_and_source_are_one_version(tmp_path: Path, files: dict[str, Path]) -> None:
    registry = actor(tmp_path)
    await registry.publish_base(BASE)
    upload_id = await send(registry, zipped({name: path.read_bytes() for name, path in files.items()}))
    pushed = await registry.push(upload_id, "sql", "a", False)
    await registry.drop_upload(upload_id)
    again = await registry.push_source("sql", AdapterSource(url=str(tmp_path / "models" / "sql")), "a", False)
    assert (pushed.created, again.created, again.version) == (True, False, pushed.version)
    assert not any((tmp_path / "data" / "uploads").iterdir())


async def test_refusals_come_back_as_they_are(tmp_path: Path, files: dict[str, Path]) -> None:
    registry = actor(tmp_path)
    await registry.publish_base(BASE)
    with pytest.raises(SourceRefused):
        await registry.push_source("sql", AdapterSource(url="/etc"), "a", True)
    upload_id = await send(registry, zipped({"../x": b""}))
    with pytest.raises(InvalidAdapter, match="plain relative path"):
        await registry.push(upload_id, "sql", "a", True)
    await registry.drop_upload(upload_id)
    assert await registry.adapters() == ()


async def test_gateways_are_known_while_they_have_a_lease(tmp_path: Path) -> None:
    registry = actor(tmp_path)
    assert await registry.gateways() == ()
    for gateway_id in ("g1", "g0"):
        await registry.follow_gateway(gateway_id, 0, 0.0)
    assert await registry.gateways() == ("g0", "g1")
    await registry.leave_gateway("g1")
    assert await registry.gateways() == ("g0",)


async def test_template_is_that_of_the_configuration(tmp_path: Path) -> None:
    registry = actor(tmp_path)
    assert (await registry.template()).base is None
    await registry.publish_base(BASE)
    template = await registry.template()
    assert (template.rules.ranks, template.max_rank) == ((2, 4), 256)
    assert template.targets == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert template.base is not None
    assert template.base.digest == BASE.digest
