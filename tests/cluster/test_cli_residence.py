"""`lorafleet pin`, `unpin` and `preload`, through a real gateway to a real registry."""

import pytest

from registry.types import Preload
from tests.cluster.cli_harness import Cli
from tests.registry.two_replicas import TwoReplicas


def test_pin_and_unpin_are_one_command_each(cli: Cli, setup: TwoReplicas) -> None:
    assert cli("pin", "alice").out == "alice is pinned; no preload\n"
    assert setup.registry.adapter("alice").pinned
    assert cli("--json", "unpin", "alice").json == {"name": "alice", "pinned": False, "preload": None}
    ran = cli("pin", "nobody")
    assert (ran.status, ran.err.count("\n")) == (1, 1)


def test_pin_without_room_says_so_in_a_line(cli: Cli, setup: TwoReplicas) -> None:
    for number in range(4):
        setup.push(10 + number, name=f"tenant-{number}")
    assert [cli("pin", f"tenant-{number}").status for number in range(3)] == [0, 0, 0]
    ran = cli("pin", "tenant-3")
    assert ran.status == 1
    assert ran.err.startswith("error: tenant-3 cannot be pinned: 3 adapters are")


def test_preload_is_set_shown_and_ended(cli: Cli, setup: TwoReplicas) -> None:
    assert cli("preload", "alice", "--at", "07:30").out == "alice is not pinned; preload each day at 07:30 UTC\n"
    assert setup.registry.adapter("alice").preload == Preload(at="07:30")
    assert cli("preload", "alice", "--every", "600").out == "alice is not pinned; preload every 600 s\n"
    assert cli("--json", "preload", "alice").json["preload"] == {"every_s": 600.0}
    assert cli("preload", "alice", "--off").out == "alice is not pinned; no preload\n"
    assert setup.registry.adapter("alice").preload is None


WRONG = (("--at", "7:30"), ("--every", "0"), ("--every", "60", "--off"), ("--at", "nine"))


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_schedule_is_refused_before_anything_is_sent(
    cli: Cli, setup: TwoReplicas, wrong: tuple[str, ...]
) -> None:
    revision = setup.revision()
    ran = cli("preload", "alice", *wrong)
    assert ran.status == 2
    assert ran.err.count("\n") == 1
    assert setup.revision() == revision
