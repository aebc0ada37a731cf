"""Steps from older schemas, refusal of newer ones, and that the steps lead to the tables the program reads."""

import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, text

from registry import schema
from registry.errors import SchemaMismatch
from registry.tables import metadata
from registry.types import VersionState
from tests.registry.uploads import open_registry, sha

ROWS = (
    "UPDATE meta SET revision = 3",
    "INSERT INTO adapters VALUES ('old', 'o', '[\"*\"]', 3, 1.0)",
    f"INSERT INTO manifests VALUES ('{sha('m')}', '{{}}', '{sha('blob')}', 4, 1, '[\"q_proj\"]')",
    f"INSERT INTO versions VALUES ('old', 1, '{sha('m')}', 'retired', 1.0)",
    "INSERT INTO events VALUES (1, 1.0, 'version_pushed', 'old', 1, NULL, 'o', '{}')",
    "INSERT INTO events VALUES (2, 1.25, 'alias_moved', 'old', 1, NULL, 'o', '{\"alias\": \"live\"}')",
    "INSERT INTO events VALUES (3, 1e9, 'version_retired', 'old', 1, NULL, 'ö', '{}')",
)


def at(path: Path) -> Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    return create_engine(f"sqlite:///{path}").connect()


def make_schema_2(path: Path) -> None:
    """A database as the release before steps were counted left it."""
    with at(path) as connection, connection.begin():
        config = Config()
        config.set_main_option("script_location", str(schema.SCRIPTS))
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
        connection.execute(text("DROP TABLE alembic_version"))
        for row in ROWS:
            connection.exec_driver_sql(row)


def test_steps_lead_to_the_tables_that_the_program_reads(tmp_path: Path) -> None:
    open_registry(tmp_path).close()
    with at(tmp_path / "registry.db") as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert schema.stamped(connection) == schema.HEAD


def test_head_is_the_last_step_there_is() -> None:
    assert max(path.name[1:5] for path in (schema.SCRIPTS / "versions").glob("r*.py")) == schema.HEAD


def test_schema_2_is_upgraded_and_keeps_what_it_held(tmp_path: Path) -> None:
    make_schema_2(tmp_path / "registry.db")
    registry = open_registry(tmp_path)
    (version,) = registry.adapter("old").versions
    assert (version.state, version.digest) == (VersionState.RETIRED, sha("m"))
    page = registry.audit(0)
    assert [entry.revision for entry in page.entries] == [1, 2, 3]
    assert page.entries[-1].hash == page.head_hash
    registry.close()
    open_registry(tmp_path).close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("UPDATE alembic_version SET version_num = '9999'", "schema 9999; this program knows 0002 to 0008"),
        ("DROP TABLE alembic_version", "schema 8; this program reads 2 to 8"),
    ],
)
def test_schema_that_is_unknown_is_refused_and_left_alone(tmp_path: Path, change: str, words: str) -> None:
    open_registry(tmp_path).close()
    with at(tmp_path / "registry.db") as connection, connection.begin():
        connection.execute(text(change))
    before = (tmp_path / "registry.db").read_bytes()
    with pytest.raises(SchemaMismatch, match=words):
        open_registry(tmp_path)
    assert (tmp_path / "registry.db").read_bytes() == before


def test_step_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_schema_2(tmp_path / "registry.db")
    with monkeypatch.context() as patched:
        patched.setattr("registry.audit.entry_hash", lambda previous, event: None)
        with pytest.raises(Exception, match="NOT NULL"):
            open_registry(tmp_path)
    with at(tmp_path / "registry.db") as connection:
        assert connection.execute(text("SELECT schema_version, revision FROM meta")).one() == (2, 3)
        assert schema.stamped(connection) is None
    open_registry(tmp_path).close()


def test_database_that_is_there_does_not_load_alembic(tmp_path: Path) -> None:
    open_registry(tmp_path).close()
    code = (
        "import sys; from pathlib import Path; from tests.registry.uploads import open_registry;"
        f"open_registry(Path({str(tmp_path)!r})).close(); print('alembic' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
