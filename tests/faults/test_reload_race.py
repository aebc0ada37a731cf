"""Requests by alias over HTTP to a real fleet while uploads move it."""

import asyncio
from pathlib import Path

import pytest

from tests.reload_race import check, over_http
from tests.tiny_fleet import TinyFleet

pytestmark = [pytest.mark.serve, pytest.mark.soak]


def test_no_answer_of_a_real_fleet_is_of_a_version_that_the_alias_did_not_stand_for(
    tiny_fleet: TinyFleet, tmp_path: Path
) -> None:
    check(asyncio.run(over_http(tiny_fleet.fleet.url, tiny_fleet.base, tmp_path, 1000)))
