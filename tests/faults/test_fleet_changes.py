"""The proxy is killed, the configuration changes, replicas come and go: clients of a real fleet lose no answer.

Each once and short; `benchmarks/fleet_faults.py` has them often, beside killed, stopped and hung replicas.
"""

from collections.abc import Iterator
from functools import partial

import pytest

from tests.faults.trouble import Fault, Theatre, kill_proxy, roll, scale, theatre
from tests.tiny_fleet import TinyFleet

pytestmark = [pytest.mark.serve, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def stage(tiny_fleet: TinyFleet) -> Iterator[Theatre]:
    with theatre(tiny_fleet, num_clients=3, num_tokens=24) as stage:
        yield stage


def test_connections_wait_for_the_next_proxy(stage: Theatre) -> None:
    seen = stage.inflict(kill_proxy)
    assert seen["right"] > 0
    assert seen.keys() <= {"right", "broken", "whole_s", "longest_wait_s", "last_harm_s"}, "none was refused"


@pytest.mark.parametrize(
    "fault",
    [partial(roll, coalesce_s=0.03), partial(scale, num_replicas=3), partial(scale, num_replicas=2)],
    ids=["rolling update", "one more replica", "one less"],
)
def test_every_request_has_its_answer_while_the_fleet_changes(stage: Theatre, fault: Fault) -> None:
    seen = stage.inflict(fault)
    assert seen["right"] > 0
    assert seen.keys() == {"right", "whole_s", "longest_wait_s", "last_harm_s"}
