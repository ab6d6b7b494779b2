"""Declared options: flags, help and the run file are of one declaration."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest

from molaplace.cli import COMMANDS, app
from molaplace.cli.job import Job, job_of, parse_class_names, parse_numbers, parse_size
from molaplace.cli.options import as_document, label, read_toml, to_toml
from molaplace.errors import OptionError
from tests.cli.fitted_folders import run
from tests.workspace import CLASSES, job_for


def test_help_names_every_option_and_the_list_of_commands_the_first_line_of_each_help():
    for name, summary in COMMANDS.items():
        output = run(name, "--help").stdout
        context = click.Context(app)
        command = app.get_command(context, name)
        for parameter in command.params:
            assert parameter.opts[-1] in output or parameter.secondary_opts or label(parameter) in output
        assert command.help.splitlines()[0] == summary


def test_the_library_names_arguments_and_the_command_flags(mola_command, tmp_path):
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 1, 8, 8), np.float32), y=np.zeros(4, np.int64))
    data = str(tmp_path / "data.npz")
    code, _, words = mola_command(
        "fit", "--network", "mlp", "--train", data, "--val", data, "--rule", "threshold", "--threshold", "2"
    )
    assert code == 1
    assert "--threshold must be a number" in words


def test_help_needs_no_torch():
    code = "import sys; from molaplace.__main__ import main\ntry: main()\nexcept SystemExit: assert 'torch' not in sys.modules"
    for flag in ("--help", "--version"):
        command = [sys.executable, "-c", f"import sys; sys.argv = ['molaplace', '{flag}']\n{code}"]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_toml_is_read_back_to_the_same_values():
    options = {
        "text": 'quotes " and \\ and \n and \x7f and \u00e9',
        "numbers": [1, 2.5, -1e-300, 1e22],
        "flags": [True, False],
    }
    document = {"command": "fit", "molaplace": "1", "options": options}
    assert tomllib.loads(to_toml(document)) == document


@pytest.mark.usefixtures("_in_workspace")
@pytest.mark.parametrize("price", [0.02, None])
def test_a_job_comes_back_from_its_file(workspace, price):
    statistics = {"mean": (0.5, 0.4, 0.3), "std": (1.0, 2.0, 3.0), "resize": (6, 6)}
    job = job_for(
        workspace, **statistics, classes=CLASSES, threshold=0.8, price=price, distances=False, seed=3, trust=True
    )
    folder = workspace.root / "kept"
    folder.mkdir(exist_ok=True)
    (folder / "job.toml").write_text(to_toml(as_document(job, "fit", folder)))
    document = read_toml(folder / "job.toml")
    read_back = job_of(document, folder / "job.toml")
    assert document["options"]["weights"][0] == "../weights/0.safetensors"
    assert [Path(path).resolve() for path in read_back.weights] == [Path(path).resolve() for path in job.weights]
    assert Path(read_back.train).resolve() == (workspace.root / "train").resolve()
    paths = {name: getattr(job, name) for name in ("weights", "train", "val")}
    assert replace(read_back, **paths) == replace(job, trust=False), (
        "consent is never kept, and an import path is no file"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[options", "not a valid TOML file"),
        ("command = 'fit'", r"\[options\]"),
        ("command = 'predict'\n[options]", "a run file for `molaplace fit`"),
        ("rul = 'nll'", "Did you mean 'rule'"),
        ("prior-precision = 'x'", "prior_precision: .*not a valid float"),
        ("resize = [1, 2, 3]", "height and width"),
        ("structure = 'cron'", "structure: 'cron' is not one of .* Did you mean 'kron'?"),
        ("mean = 'a'", "numbers"),
        ("classes = ['a']", "names"),
        ("seed = -1", "not in the range"),
        ("seed = 1.5", "not a valid integer"),
        ("strict = 'perhaps'", "not a valid boolean"),
        ("trust = true", "trust"),
    ],
)
def test_a_wrong_file_names_the_place(tmp_path, text, words):
    path = tmp_path / "job.toml"
    path.write_text(text if "options" in text or "command" in text else f"command = 'fit'\n[options]\n{text}")
    with pytest.raises(OptionError, match=words) as caught:
        job_of(read_toml(path), path)
    assert str(path) in str(caught.value)


def test_files_of_a_job_are_not_looked_for_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "train.npz").touch()
    (tmp_path / "mlp").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    options = "train = 'train.npz'\nval = 'digits:val'\nnetwork = 'mlp'"
    Path("there/job.toml").write_text(f"command = 'fit'\n[options]\n{options}")
    path = Path("there/job.toml")
    assert job_of(read_toml(path), path) == Job(train="there/train.npz", val="digits:val", network=("mlp",))


def test_values_as_users_write_them():
    many = [f"a class of number {index}" for index in range(1000)]  # longer than a file's name can be
    assert parse_class_names(",".join(many)) == tuple(many)
    assert (parse_size("32X16"), parse_size("7"), parse_numbers("1,.5")) == ((32, 16), 7, (1.0, 0.5))
    digit = "\u00b2"  # a digit to Python, a number to nobody
    wrong = {parse_class_names: ("cat,cat", "one"), parse_numbers: ("a,b", "")}
    for parse, texts in (wrong | {parse_size: ("6x6x6", "0", "-3", "\u0663")}).items():
        for text in (*texts, digit):
            with pytest.raises(click.BadParameter, match="expected"):
                parse(text)
