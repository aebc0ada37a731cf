"""Who may import whom, read from the sources."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("telemetry", "registry", "replica", "router", "cluster")
ALLOWED: dict[str, tuple[str, ...]] = {
    "telemetry": ("telemetry",),
    "registry": ("registry", "telemetry.logs"),
    "replica": ("replica", "telemetry", "registry.types", "registry.errors"),
    "router": (
        "router",
        "telemetry",
        "registry.types",
        "registry.errors",
        "registry.catalog",
        "registry.pulse",
        "registry.keys",
        "registry.usage_ledger",
        "registry.usage_records",
        "replica.messages",
        "replica.errors",
    ),
    "cluster": FOLDERS,
}
ONLY_IN = {
    "ray": "cluster",
    "torch": "replica",
    "transformers": "replica",
    "triton": "replica/kernels",
    "opentelemetry": "telemetry/otel.py",
}
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            whole_folder = module in FOLDERS
            yield from (f"{module}.{alias.name}" for alias in node.names) if whole_folder else (module,)


def is_under(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_keep_to_the_folders(path: Path) -> None:
    relative = path.relative_to(ROOT)
    folder = relative.parts[0]
    for name in imports(path):
        top = name.partition(".")[0]
        if top in FOLDERS and not any(is_under(name, allowed) for allowed in ALLOWED[folder]):
            pytest.fail(f"{relative} imports {name}")
        if top in ONLY_IN and not relative.is_relative_to(ONLY_IN[top]):
            pytest.fail(f"{relative} imports {name}; only {ONLY_IN[top]} may")


def test_only_replicas_load_torch() -> None:
    """Gateways, the registry and Serve's build tasks import the applications; that must not cost them the engine."""
    code = "import sys, cluster.app; print(sorted({'torch', 'transformers', 'telemetry.otel'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("folder", [path.parent for path in SOURCES if path.name == "__init__.py"], ids=str)
def test_init_files_hold_a_docstring_and_nothing_else(folder: Path) -> None:
    tree = ast.parse((folder / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1
