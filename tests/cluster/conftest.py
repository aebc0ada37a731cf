"""The command line through a real gateway to a real registry; files with needs of their own override a part."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from registry.catalog import Catalog
from router.app import create_app
from router.config import RouterConfig
from router.gateway import Gateway
from tests.cluster.cli_harness import Cli
from tests.cluster.http_server import serving_app
from tests.local_fleet import LocalRegistry
from tests.registry.two_replicas import TwoReplicas
from tests.router.fakes import FakeFleet


@contextmanager
def serving(setup: TwoReplicas) -> Iterator[str]:
    gateway = Gateway(RouterConfig(), Catalog(("base",)), FakeFleet(), LocalRegistry(setup.registry))
    with serving_app(create_app(gateway)) as url:
        yield url


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[TwoReplicas]:
    setup = TwoReplicas(tmp_path)
    yield setup
    setup.registry.close()


@pytest.fixture
def cli(setup: TwoReplicas, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    with serving(setup) as url:
        yield Cli(url, capsys)
