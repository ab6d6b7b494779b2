"""No file of the project may be ignored by git: ignored files are missing from the wheel and are not linted.

`make test-wheel` tests the wheel itself.
"""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IN_ANY_FOLDER = {"__pycache__/", "*.partial", "*.training"}
"""Patterns that may match in any folder."""


def test_no_tracked_file_is_ignored():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert not ignored, "anchor the pattern of .gitignore that these match"


def test_every_ignored_name_has_its_place():
    lines = (ROOT / ".gitignore").read_text().splitlines()
    patterns = {line for line in lines if line and not line.startswith("#")}
    assert {pattern for pattern in patterns if not pattern.startswith("/")} == IN_ANY_FOLDER
