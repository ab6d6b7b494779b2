"""The commands for a user's own networks: all the way from checkpoints to a report, mistakes, and what is left out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

import molaplace as mola
from tests import saved_files
from tests.cli.fitted_folders import run
from tests.library.problems import blob_loader, trained

pytestmark = pytest.mark.usefixtures("_in_workspace")


def arguments(workspace, output, *more):
    networks = ("--network", f"{workspace.module}:build", *workspace.weights())
    return ["fit", *networks, "--train", "train", "--val", "val", "--output", str(output), *more]


@pytest.fixture(scope="module")
def posterior(workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted") / "posterior"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace.root)
        patch.syspath_prepend(str(workspace.root))
        outcome = run(*arguments(workspace, folder, "--quiet"))
        assert outcome.exit_code == 0, outcome.output
        assert outcome.output == "", "quiet is quiet"
    return folder


def test_the_nearest_command_is_named_for_a_mistyped_one():
    outcome = run("evalute", "posterior")
    assert outcome.exit_code == 2
    assert 'Did you mean "evaluate"?' in outcome.output


def test_a_posterior_may_be_replaced_which_is_said_and_nothing_else(workspace, tmp_path, mola_command):
    folder = tmp_path / "posterior"
    assert "replaces" not in mola_command(*arguments(workspace, folder))[1]
    assert "which replaces the earlier posterior" in " ".join(mola_command(*arguments(workspace, folder))[1].split())
    file = folder / "posterior.safetensors"
    content = file.read_bytes()
    file.unlink()
    assert mola_command(*arguments(workspace, folder, "--quiet"))[0] == 0, (
        "what an interrupted fit leaves is no obstacle"
    )
    strangers = {
        "contains other files (posterior.safetensors)": {"posterior.safetensors": content},
        "contains other files (notes.txt)": {"notes.txt": b"mine"},
    }
    for index, (words, files) in enumerate(strangers.items()):
        folder = tmp_path / str(index)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        code, out, err = mola_command(*arguments(workspace, folder))
        assert (code, out) == (1, "")
        assert words in err
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_info_for_people_and_for_programs_notices_damage(workspace, posterior, mola_command, tmp_path):
    code, out, _ = mola_command("info", posterior)
    assert code == 0
    for words in (
        "kron",
        "cat, dog, fox",
        "13 weights for each of 3 classes",
        "rule Calibrated",
        "36 inputs",
        "6 x 6, colour, x / 255, not normalised",
        "intact",
    ):
        assert words in " ".join(out.split()), words
    code, out, err = mola_command("info", posterior, "--json")
    assert (code, err) == (0, "")
    assert len(json.loads(out)["components"]) == 3
    damaged = shutil.copytree(posterior, tmp_path / "damaged")
    file = damaged / "posterior.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    code, _, message = mola_command("info", damaged)
    assert code == 1
    assert "corrupt" in message


def test_info_shows_that_the_training_data_changed_after_tuning(mola_command, tmp_path):
    members = [trained(0)]
    posterior = mola.fit(members, blob_loader(1), blob_loader(5))
    for stale, folder in (
        (False, posterior.save(tmp_path / "tuned")),
        (True, posterior.add(blob_loader(2)).save(tmp_path / "new")),
    ):
        assert ("Tune again" in " ".join(mola_command("info", folder)[1].split())) == stale


def test_a_posterior_without_distances_says_so_and_predicts(workspace, tmp_path, mola_command):
    folder = tmp_path / "posterior"
    output = tmp_path / "out.csv"
    assert mola_command(*arguments(workspace, folder, "--no-distances", "--quiet"))[0] == 0
    assert "no distances" in " ".join(mola_command("info", folder)[1].split())
    assert mola_command("predict", folder, "test", "--output", output, "--quiet")[0] == 0
    assert "distance" not in output.read_text().splitlines()[0].split(",")


FIT = ("fit", "--network", "mlp", "--train", "train", "--rule", "evidence")


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("contains other files", ["evaluate", "POSTERIOR", "--test", "test", "-o", "."]),
        ("is a file", ["demo", "-o", "test.npz"]),
        ("unknown data", ["evaluate", "POSTERIOR", "--test", "nowhere"]),
        ("no labels", ["evaluate", "POSTERIOR", "--test", "strange"]),
        ("only once", ["evaluate", "POSTERIOR", "--test", "test", "--ood", "test"]),
        ("not a writable folder", ["export", "POSTERIOR", "--onnx", "test.npz/out.onnx"]),
        ("not a writable folder", ["fit", "--network", "mlp", "--train", "train", "--val", "val", "-o", "/proc/out"]),
        ("contains no posterior. Pass a folder written by `molaplace fit", ["info", "train"]),
        ("--std must be finite and above 0, got 0", [*FIT, "--mean", "0", "--std", "0"]),
        ("as many means as standard deviations", [*FIT, "--mean", "0.5,0.4", "--std", "0.2"]),
        ("no file to write", ["export", "POSTERIOR"]),
        ("got risk", ["export", "POSTERIOR", "--torch", "a.pt2", "--outputs", "risk"]),
        ("ends in .pt2", ["export", "POSTERIOR", "--torch", "a.txt"]),
        ("does not exist", ["fit", "--config", "nowhere.toml"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(posterior, mola_command, words, arguments):
    code, out, err = mola_command(*[str(posterior) if word == "POSTERIOR" else word for word in arguments])
    assert (code, out) == (1, "")
    (last,) = [line for line in err.splitlines() if " % " not in line]  # without the progress
    assert last.startswith("molaplace: ")
    assert words in last


def test_the_process_itself_ends_with_these_codes(workspace, posterior, tmp_path):
    """One real process: what a shell and a scheduler see."""
    shutil.copytree(workspace.root / "strange", tmp_path / "images")
    (tmp_path / "images" / "bad.png").touch()
    command = [
        sys.executable,
        "-m",
        "molaplace",
        "predict",
        posterior,
        tmp_path / "images",
        "--trust",
    ]
    outcome = subprocess.run(
        [*command, "--output", tmp_path / "out.csv"], capture_output=True, text=True, check=False, cwd=workspace.root
    )
    assert outcome.returncode == 3, outcome.stderr
    assert "bad.png: cannot be decoded" in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.usefixtures("_blank_figures")
def test_every_run_is_repeated_from_its_file_and_flags_win(workspace, posterior, tmp_path, mola_command):
    again = tmp_path / "again"
    other = tmp_path / "other"
    assert mola_command("fit", "--config", posterior / "job.toml", "--trust", "--output", again, "--quiet")[0] == 0
    first, second = ((folder / "posterior.safetensors").read_bytes() for folder in (posterior, again))
    assert first == second, "to the last bit"
    assert (
        mola_command("fit", "--config", posterior, "--trust", "--structure", "diag", "--output", other, "--quiet")[0]
        == 0
    )
    assert saved_files.read(other / "posterior.safetensors")[0]["structure"]["name"] == "diag"

    original = tmp_path / "one.csv"
    repeated = tmp_path / "two.csv"
    assert mola_command("predict", posterior, "test", "--output", original, "--probabilities", "--quiet")[0] == 0
    assert mola_command("predict", "--config", f"{original}.toml", "--output", repeated, "--quiet")[0] == 0
    assert original.read_text() == repeated.read_text()

    report = tmp_path / "report"
    assert mola_command("evaluate", posterior, "--test", "test", "--output", report, "--quiet")[0] == 0
    numbers = {
        name: value for name, value in json.loads((report / "numbers.json").read_text()).items() if name != "made"
    }
    (report / "numbers.json").unlink()
    assert mola_command("evaluate", "--config", report / "run.toml", "--quiet")[0] == 0
    assert numbers.items() <= json.loads((report / "numbers.json").read_text()).items()
