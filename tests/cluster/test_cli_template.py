"""`lorafleet template` prints what really trains and is really taken; pushes of archives and sources."""

import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.config import RegistryConfig
from registry.service import Registry
from registry.types import FleetTemplate, TemplateRules
from replica.config import ModelConfig
from replica.model.base_model import BaseModel
from tests.cluster.cli_harness import Cli, adapter_folder
from tests.cluster.fake_control import FakeFleet, adapter_record, replica_record, serving, version_record


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet(replicas=[replica_record(0)])


@pytest.fixture
def cli(fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    with serving(fleet) as url:
        yield Cli(url, capsys)


def registry_of(folder: Path, base: BaseModel, rules: TemplateRules) -> Registry:
    registry = Registry.open(RegistryConfig(data_dir=folder, template=rules))
    registry.blobs.put_bytes(base.tokenizer_json)
    registry.publish_base(base.spec, actor="replica")
    return registry


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> BaseModel:
    return BaseModel.load(ModelConfig.model_validate({"base": str(tiny_base), "device": "cpu"}))


@pytest.mark.parametrize(
    "rules",
    [
        TemplateRules(),
        TemplateRules(policy="refuse", ranks=(4, 8), targets=("q_proj", "v_proj"), dtypes=("BF16",)),
        TemplateRules(policy="refuse", dtypes=("F32", "BF16")),
    ],
    ids=["anything", "strict", "dtypes"],
)
def test_printed_script_trains_an_adapter_that_the_fleet_takes(
    rules: TemplateRules, base: BaseModel, tiny_base: Path, tmp_path: Path, cli: Cli, fleet: FakeFleet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    registry = registry_of(tmp_path / "data", base, rules)
    fleet.template = registry.template()
    printed = cli("template").out
    script = tmp_path / "train.py"
    script.write_text(printed.replace(f'"{base.spec.base_id}"  # folder', f"{str(tiny_base)!r}  # folder"))
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(script))
    files = {path.name: path for path in (tmp_path / "adapter").iterdir()}
    pushed = registry.push("trained", files, owner="a", activate=False)
    manifest = registry.manifest(pushed.version.digest)
    assert {warning.code for warning in pushed.warnings} == {"changes_nothing"}, "PEFT starts with B = 0"
    assert manifest.base is not None
    assert manifest.base.verified_by == "digest"
    assert set(manifest.target_names) == set(rules.targets or fleet.template.targets)
    assert {module.a.dtype for module in manifest.modules} <= set(rules.dtypes or ("F32",))
    registry.close()


def test_template_as_json_holds_the_config(cli: Cli, fleet: FakeFleet, base: BaseModel, tmp_path: Path) -> None:
    registry = registry_of(tmp_path, base, TemplateRules(ranks=(32, 8)))
    fleet.template = registry.template()
    printed = cli("template", "--json").json
    assert (printed["lora_config"]["r"], printed["lora_config"]["lora_alpha"]) == (8, 16)
    fields = {name: value for name, value in printed.items() if name != "lora_config"}
    assert FleetTemplate.model_validate(fields) == registry.template()
    registry.close()


def test_template_without_a_base_is_refused(cli: Cli) -> None:
    ran = cli("template")
    assert ran.status == 1
    assert "no base model" in ran.err


@pytest.mark.parametrize("name", ["sql.zip", "sql.tar.gz", "SQL.TGZ"])
def test_archive_is_sent_as_it_is(name: str, cli: Cli, fleet: FakeFleet, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"packed")
    assert cli("push", "sql", str(tmp_path / name)).status == 0
    assert fleet.uploads == [{name: b"packed"}]


def test_url_is_a_source_of_the_server(cli: Cli, fleet: FakeFleet) -> None:
    commit = "a" * 40
    assert cli("push", "sql", "hf://acme/sql", "--revision", commit, "--no-activate").status == 0
    assert fleet.sources == [{"source": "hf://acme/sql", "revision": commit, "activate": False, "wait": False}]
    assert "sql@1 is live" in cli("push", "sql", "s3://bucket/sql").out


def test_revision_of_a_folder_is_wrong_usage(cli: Cli, tmp_path: Path) -> None:
    assert cli("push", "sql", str(adapter_folder(tmp_path)), "--revision", "x").status == 2


def test_files_that_name_base_and_tokenizer_are_sent(cli: Cli, fleet: FakeFleet, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path)
    extra = {"lorafleet_base.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json"}
    for name in (*extra, "optimizer.pt"):
        (folder / name).write_text("{}")
    cli("push", "sql", str(folder))
    assert fleet.uploads[0].keys() == {"adapter_config.json", "adapter_model.safetensors", *extra}


def test_version_that_does_not_name_its_base_is_marked(cli: Cli, fleet: FakeFleet) -> None:
    silent = version_record(1).model_copy(update={"base_verified": False})
    fleet.adapters["sql"] = adapter_record("sql", 1, versions=(silent,))
    fleet.adapters["law"] = adapter_record("law", 1)
    assert ["unverified" in line for line in cli("ls").out.splitlines()[1:]] == [False, True]
    assert "unverified" in cli("show", "sql").out
    assert "unverified" not in cli("show", "law").out
