"""A replica that shuts down is out of the catalog at once, keeps its lease, and gives up its place on the ring."""

from pathlib import Path

import pytest

from registry.types import ActivationState
from tests.registry.test_service import Setup


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def listed(setup: Setup) -> set[str]:
    """Replicas that gateways place requests on."""
    delta = setup.registry.changes(0)
    assert delta is not None
    return {replica.replica_id for replica in delta.replicas}


def test_leaving_replica_is_listed_no_more_and_its_successor_takes_its_place(setup: Setup) -> None:
    for name in ("a", "b", "c"):
        setup.join(name)
    before = setup.revision()
    setup.registry.mark_leaving(["a"])
    assert setup.revision() > before
    assert listed(setup) == {"b", "c"}
    assert setup.ring() == {"a": -1, "b": 1, "c": 2}
    assert setup.join("new") == 0
    setup.registry.mark_leaving(["b", "unknown"])
    assert setup.ring() == {"a": -1, "b": -2, "c": 2, "new": 0}
    assert setup.join("newer") == 1


def test_leaving_replica_stays_so_although_it_holds_everything(setup: Setup) -> None:
    setup.join("a")
    setup.registry.mark_leaving(["a"])
    revision = setup.revision()
    for _ in range(3):
        setup.registry.mark_leaving(["a"])
        setup.registry.advance()
    assert (listed(setup), setup.revision()) == (set(), revision)
    setup.stage("a")
    assert [replica.drained for replica in setup.registry.replicas()] == ["it is shutting down"]


def test_activation_does_not_wait_for_a_leaving_replica(setup: Setup) -> None:
    setup.join("a")
    setup.join("b")
    digest = setup.push()
    setup.stage("b", digest)
    setup.registry.advance()
    assert setup.live() is None
    setup.registry.mark_leaving(["a"])
    setup.registry.advance()
    assert setup.live() == 1
    assert setup.state(1) in (ActivationState.FLIPPED, ActivationState.DONE)


def test_leaving_replica_that_goes_silent_hands_no_place_on(setup: Setup) -> None:
    setup.join("a")
    setup.join("b")
    setup.registry.mark_leaving(["a"])
    setup.join("new")
    setup.clock.now_s += 2 * setup.registry.config.lease_ttl_s
    setup.stage("b")
    setup.stage("new")
    setup.registry.advance()
    assert setup.ring() == {"b": 1, "new": 0}


def test_replica_that_joins_again_gets_a_place(setup: Setup) -> None:
    setup.join("a")
    setup.registry.mark_leaving(["a"])
    assert setup.join("a") == 0
    assert listed(setup) == {"a"}
