"""The command line: versions, mistakes, and extras that are not installed."""

from __future__ import annotations

import pytest

import molaplace as mola
from molaplace.cli.terminal import showing_progress
from tests.cli.fitted_folders import run
from tests.forked_python import run_python


def test_version():
    outcome = run("--version")
    assert (outcome.exit_code, outcome.stdout) == (0, f"molaplace {mola.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--seed", "-1"],
        ["demos"],
        ["fit", "--mean", "a,b"],
        ["fit", "--structure", "cron"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_a_usage_error(arguments):
    outcome = run(*arguments)
    assert outcome.exit_code == 2
    assert "Usage" in outcome.stderr


@pytest.mark.parametrize(("missing", "extra"), [("cyclopts", "cli"), ("matplotlib", "cli"), ("sklearn", "cli")])
def test_a_missing_extra_is_named_with_its_remedy(missing, extra, tmp_path):
    outcome = run_python(
        "-c",
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['molaplace', 'demo', '--output', {str(tmp_path)!r}]\n"
        "from molaplace.__main__ import main; main()",
    )
    assert outcome.returncode == 1
    assert f"pip install 'molaplace[{extra}]'" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert list(tmp_path.glob("*.html")) == []


def test_progress_without_a_terminal_shows_a_line_for_each_step_or_tenth(capsys):
    with showing_progress(quiet=False) as progress:
        progress("reading", 0.0)
        for epoch in range(1, 101):
            progress(f"epoch {epoch} of 100", epoch / 100)
        progress("done", 1.0)
    first, *epochs, last = capsys.readouterr().err.splitlines()
    assert ("reading" in first, "done" in last) == (True, True)
    assert len(epochs) == 11, "the first epoch and ten tenths"
