"""The library never imports the laboratory, and scripts import names that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [path for folder in ("benchmarks", "docs", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path, *packages):
    """All names that a file imports from the packages, in the form module.name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in packages:
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in packages:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def exists(name):
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_scripts_that_the_tests_do_not_run_import_names_that_exist(path):
    assert [name for name in imports(path, "molaplace", "molaplace_lab") if not exists(name)] == []


def test_the_library_never_imports_the_laboratory():
    for path in (ROOT / "src" / "molaplace").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) molaplace_lab", path.read_text(), re.M), path
