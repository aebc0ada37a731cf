"""Which database a test's registries use: every test of the modules that ask for `backend` runs on both."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.registry.uploads import POSTGRES_VARIABLE
from tests.services.postgres import INSTALL_HINT, find_binaries, postgres_server


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A real server's URL; skips where there is none."""
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'lorafleet[postgres]'")
    binaries = find_binaries()
    if binaries is None:
        pytest.skip(f"needs a PostgreSQL server: {INSTALL_HINT}")
    with postgres_server(binaries) as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.services)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Names the database of this test; child processes see it in their environment."""
    if request.param == "postgresql":
        monkeypatch.setenv(POSTGRES_VARIABLE, request.getfixturevalue("postgres_url"))
    return str(request.param)
