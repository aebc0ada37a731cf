"""Which keys a canary takes."""

import random
import uuid

from hypothesis import given
from hypothesis import strategies as st

from registry.catalog import Catalog
from registry.stickiness import place, takes_canary
from registry.types import AdapterRecord, Canary, CatalogDelta, VersionState
from tests.registry.uploads import version

keys = st.tuples(st.text(max_size=8), st.text(max_size=300))


@given(keys, st.floats(0, 1), st.floats(0, 1))
def test_raising_the_weight_only_adds_keys(key: tuple[str, str], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 <= place("legal", key) < 1
    assert takes_canary("legal", key, high) or not takes_canary("legal", key, low)
    assert takes_canary("legal", key, 1.0)
    assert not takes_canary("legal", key, 0.0)


def test_place_of_a_key_never_changes() -> None:
    """Written down once: gateways of two releases serve the same canary while one replaces the other."""
    assert [round(place("legal", ("t", key)), 6) for key in ("", "user-7", "user-8", "ü")] == PLACES


PLACES = [0.606843, 0.725332, 0.343366, 0.070842]


def share(names: list[str], weight: float, adapter: str) -> float:
    return sum(takes_canary(adapter, ("default", name), weight) for name in names) / len(names)


def test_numbered_keys_get_the_weight_to_within_two_points() -> None:
    for adapter in range(50):
        for pattern in ("user-{}", "{:05d}", "u{}@example.com"):
            for start in (0, 1, 977):
                names = [pattern.format(number) for number in range(start, start + 200)]
                for weight in (0.01, 0.1, 0.5, 0.9):
                    assert abs(share(names, weight, f"a{adapter}") - weight) <= 0.02


def test_other_keys_get_the_weight_as_chance_has_it() -> None:
    source = random.Random(3)
    names = [str(uuid.UUID(int=source.getrandbits(128))) for _ in range(20_000)]
    assert abs(share(names, 0.1, "legal") - 0.1) < 0.01


def test_adapters_and_tenants_choose_other_keys() -> None:
    names = [f"user-{number}" for number in range(200)]
    chosen = {
        (adapter, tenant): frozenset(name for name in names if takes_canary(adapter, (tenant, name), 0.1))
        for adapter in ("a", "b")
        for tenant in ("t", "u")
    }
    assert len(set(chosen.values())) == 4


def catalog(weight: float, state: VersionState = VersionState.ACTIVE) -> Catalog:
    record = AdapterRecord(
        name="legal",
        owner="o",
        revision=1,
        created_at_s=0,
        aliases={"live": 1, "beta": 2},
        versions=(version(1), version(2, state)),
        canaries={"live": Canary(number=2, weight=weight)},
    )
    catalog = Catalog([])
    catalog.apply(CatalogDelta(revision=1, full=True, adapters=(record,), replicas=(), base=None))
    return catalog


def test_key_decides_and_without_one_the_tenant_does() -> None:
    served = catalog(0.5)
    for number in range(50):
        expected = 2 if takes_canary("legal", ("t", f"u{number}"), 0.5) else 1
        assert {served.resolve("t", "legal", f"u{number}").number for _ in range(3)} == {expected}
        tenants = 2 if takes_canary("legal", (f"t{number}", f"t{number}"), 0.5) else 1
        assert served.resolve(f"t{number}", "legal").number == tenants


def test_numbers_and_other_aliases_know_no_canary() -> None:
    served = catalog(1.0)
    assert [served.resolve("t", model).number for model in ("legal", "legal@live", "legal@1")] == [2, 2, 1]
    assert served.resolve("t", "legal@beta").number == 2


def test_canary_out_of_service_takes_nothing() -> None:
    for state in VersionState:
        served = catalog(1.0, state)
        assert served.resolve("t", "legal").number == (2 if state is VersionState.ACTIVE else 1)
