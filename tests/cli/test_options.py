"""Options: names of the library, values as users write them, and the run file, which flags override in both directions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest

from molaplace.cli import app
from molaplace.cli.commands import COMMANDS
from molaplace.cli.job import Job, job_of
from molaplace.cli.options import read_toml, to_toml
from molaplace.errors import OptionError
from molaplace.images import NORMALISATIONS
from molaplace.likelihoods import LIKELIHOODS
from molaplace.links import LINKS
from molaplace.rules import RULES
from molaplace.structures import STRUCTURES
from tests.cli.fitted_folders import run
from tests.workspace import CLASSES, job_for


def test_names_of_the_library_are_the_choices():
    hints = get_type_hints(Job, include_extras=False)
    choices = {
        "structure": STRUCTURES,
        "link": LINKS,
        "likelihood": LIKELIHOODS,
        "rule": (*RULES, "outliers", "none"),
        "normalise": NORMALISATIONS,
    }
    for name, known in choices.items():
        literals = {choice for part in (hints[name], *get_args(hints[name])) for choice in get_args(part)}
        assert literals - set(get_args(hints[name])) | {c for c in literals if isinstance(c, str)} >= set(known), name
        assert {choice for choice in literals if isinstance(choice, str)} == set(known), name


@pytest.mark.parametrize("command", [command.__name__ for command in COMMANDS])
def test_help_names_every_option_and_needs_no_torch(command):
    code = (
        "import sys; from molaplace.__main__ import main\n"
        "try: main()\nexcept SystemExit: assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    line = f"import sys; sys.argv = ['molaplace', {command!r}, '--help']\n{code}"
    output = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True).stdout
    for argument in app[command].assemble_argument_collection(parse_docstring=True):
        if argument.show:
            assert argument.name in output


def test_the_library_names_arguments_and_the_command_flags(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 1, 8, 8), np.float32), y=np.zeros(4, np.int64))
    data = tmp_path / "data.npz"
    outcome = run("fit", "--network", "mlp", "--train", data, "--val", data, "--rule", "threshold", "--threshold", "2")
    assert outcome.exit_code == 1
    assert "--threshold must be a number" in outcome.stderr


@pytest.mark.usefixtures("_in_workspace")
@pytest.mark.parametrize("price", [0.02, None])
def test_a_job_comes_back_from_its_file(workspace, price, tmp_path):
    statistics = {
        "mean": (0.5, 0.4, 0.3),
        "std": (1.0, 2.0, 3.0),
        "resize": (6, 6),
        "head": 'quotes " \\ \n \x7f \u00e9',
    }
    job = job_for(
        workspace, **statistics, classes=CLASSES, threshold=0.8, price=price, distances=False, seed=3, trust=True
    )
    path = tmp_path / "job.toml"
    path.write_text(to_toml(job.as_document()))
    assert job_of(read_toml(path), path) == replace(job, trust=False), "consent is never kept"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[options", "not a valid TOML file"),
        ("command = 'fit'", r"\[options\]"),
        ("command = 'predict'\n[options]", "a run file for `molaplace fit`"),
        ("rul = 'nll'", 'Unknown option: "\\[rul\\]"'),
        ("prior-precision = 'x'", "prior-precision"),
        ("resize = [1, 2, 3]", "height and width"),
        ("structure = 'cron'", '"cron" for \\[structure\\].*Did you mean "kron"'),
        ("mean = 'a'", "numbers"),
        ("classes = ['a']", "names"),
        ("seed = -1", "Must be >= 0"),
        ("seed = 1.5", "whole number"),
        ("trust = true", "trust, which only the command line can"),
    ],
)
def test_a_wrong_file_names_the_place(tmp_path, text, words):
    path = tmp_path / "job.toml"
    path.write_text(text if "options" in text or "command" in text else f"command = 'fit'\n[options]\n{text}")
    with pytest.raises(OptionError, match=words) as caught:
        job_of(read_toml(path), path)
    assert str(path) in str(caught.value)
    outcome = run("fit", "--config", path)
    assert outcome.exit_code == 1
    assert str(path) in outcome.stderr


def job_from(*flags: str, file: str) -> Job:
    Path("job.toml").write_text(f"command = 'fit'\n[options]\n{file}")
    _, bound, _ = app.parse_args(["fit", *flags, "--config", "job.toml"], exit_on_error=False, print_error=False)
    return replace(bound.arguments["options"], weights=bound.arguments.get("weights", ()))


def test_flags_override_a_run_file_in_both_directions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = "weights = ['a', 'b']\nstrict = true\ndistances = false\nseed = 3\nmean = [0.5]\nnetwork = ['x', 'y']"
    assert job_from(file=file) == replace(
        Job(strict=True, distances=False, seed=3, mean=(0.5,), network=("x", "y"), config=Path("job.toml")),
        weights=("a", "b"),
    )
    job = job_from("--no-strict", "--distances", "--mean", "-1,2", "--network", "z", "--seed", "0", "c", file=file)
    assert (job.strict, job.distances, job.mean, job.network, job.seed) == (False, True, (-1.0, 2.0), ("z",), 0)
    assert job.weights == ("c",)


def test_values_as_users_write_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    many = [f"a class of number {index}" for index in range(1000)]  # longer than a file's name can be
    assert job_from("--classes", ",".join(many), file="").classes == tuple(many)
    Path("names.txt").write_text("\n".join(many))
    assert job_from("--classes", "names.txt", file="").classes == tuple(many)
    job = job_from("--resize", "32X16", "--std", "1,.5", "--normalize", "imagenet", file="")
    assert (job.resize, job.std, job.normalise) == ((32, 16), (1.0, 0.5), "imagenet")
    assert job_from("--resize", "7", file="").resize == 7
    digit = "\u00b2"  # a digit to Python, a number to nobody
    for flag, texts in {
        "--classes": ("cat,cat", "one"),
        "--mean": ("a,b", ""),
        "--resize": ("6x6x6", "0", "-3"),
    }.items():
        for text in (*texts, digit):
            outcome = run("fit", flag, text)
            assert outcome.exit_code == 2, (flag, text)
            assert "expected" in outcome.stderr


def test_text_that_is_not_utf8_is_refused_before_any_work():
    outcome = run("fit", "--network", "mlp", "--train", "tr\udce9in")
    assert outcome.exit_code == 1
    assert "--train must be valid UTF-8" in outcome.stderr
