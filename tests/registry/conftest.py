"""Which database a test's registries use: every test of the modules that ask for `backend` runs on both."""

from collections.abc import Iterator

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


@pytest.fixture
def postgres(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries of this test keep their rows in PostgreSQL; child processes see it in their environment."""
    monkeypatch.setenv(POSTGRES_VARIABLE, postgres_url)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.services)])
def backend(request: pytest.FixtureRequest) -> str:
    """Names the database of this test."""
    if request.param == "postgresql":
        request.getfixturevalue("postgres")
    return str(request.param)
