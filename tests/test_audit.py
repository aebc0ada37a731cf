"""The verdict of `make audit`: packages that could not be looked up are not clean."""

from types import ModuleType, SimpleNamespace

import pytest

from tests.deploy_scripts import load_script

PACKAGES = ["one==1.0", "two==2.0"]
CLEAN = {"name": "One", "version": "1.0", "vulns": []}
BAD = {"name": "two", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"], "aliases": []}]}
SKIPPED = {"name": "two", "skip_reason": "Dependency not found on PyPI and could not be audited: two (2.0)"}


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("audit", monkeypatch)


def test_every_package_known_and_none_vulnerable_is_clean(audit: ModuleType) -> None:
    status, lines = audit.verdict(PACKAGES, [CLEAN, {**BAD, "vulns": []}])
    assert (status, lines) == (0, ["2 of 2 packages were looked up, 0 faults found"])


def test_vulnerable_package_is_named_with_its_mend(audit: ModuleType) -> None:
    status, lines = audit.verdict(PACKAGES, [CLEAN, BAD])
    assert status == 1
    assert lines[:2] == ["two 2.0: PYSEC-1, mended in 2.1", "2 of 2 packages were looked up, 1 faults found"]


@pytest.mark.parametrize(("found", "num_known"), [([CLEAN, SKIPPED], 1), ([], 0), (None, 0)])
def test_what_could_not_be_looked_up_is_not_clean(audit: ModuleType, found: object, num_known: int) -> None:
    status, lines = audit.verdict(PACKAGES, found)
    assert status == 2
    assert lines[0].startswith(f"{num_known} of 2 packages were looked up")
    assert lines[-1].startswith("NOT CHECKED")


@pytest.mark.parametrize("spelled", ["Jaraco.context", "jaraco_context", "jaraco-_context"])
def test_spelling_of_a_name_makes_no_difference(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, spelled: str
) -> None:
    here = [SimpleNamespace(name=spelled, version="1.0+cpu"), SimpleNamespace(name="LoraFleet", version="1")]
    monkeypatch.setattr(audit, "distributions", lambda: here)
    packages = audit.installed()
    assert packages == ["jaraco-context==1.0"]
    for told in (spelled, "jaraco-context"):
        assert audit.verdict(packages, [{"name": told, "version": "1.0", "vulns": []}])[0] == 0
        assert audit.verdict([f"{spelled}==1.0"], [{"name": told, "version": "1.0", "vulns": []}])[0] == 0


def test_everything_installed_is_asked_for_but_ourselves(audit: ModuleType) -> None:
    packages = audit.installed()
    assert any(each.startswith("pytest==") for each in packages)
    assert not any(each.startswith("lorafleet==") or "+" in each for each in packages)
