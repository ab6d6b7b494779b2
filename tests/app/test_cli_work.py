"""The commands for a user's own networks: all the way from checkpoints to a report, mistakes, and what is left out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mola.__main__ import main
from mola.app.cli import app
from mola.saving.schema import sealed
from tests.own_work import make_desk


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    return make_desk(tmp_path_factory.mktemp("desk"), "own_networks_for_cli")


@pytest.fixture(autouse=True)
def _at_the_desk(desk, monkeypatch):
    monkeypatch.chdir(desk.root)
    monkeypatch.syspath_prepend(str(desk.root))


@pytest.fixture
def mola_command(monkeypatch, capsys):
    """Run the command as a shell would: exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["mola", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return run


def arguments(desk, output, *more, train="train", val="val"):
    return [
        "fit",
        *("--network", f"{desk.module}:build", "--weights", *desk.weights()),
        *("--train", train, "--val", val, "--output", str(output), *more),
    ]


@pytest.fixture(scope="module")
def posterior(desk, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted") / "posterior"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk.root)
        patch.syspath_prepend(str(desk.root))
        outcome = CliRunner().invoke(app, arguments(desk, folder, "--quiet"))
        assert outcome.exit_code == 0, outcome.exception
        assert outcome.output == "", "quiet is quiet"
    return folder


def test_a_posterior_may_be_replaced_which_is_said_and_nothing_else(desk, tmp_path, mola_command):
    place = tmp_path / "posterior"
    assert "in place of" not in mola_command(*arguments(desk, place))[1]
    assert "in place of the earlier posterior" in " ".join(mola_command(*arguments(desk, place))[1].split())
    assert json.loads(mola_command(*arguments(desk, place, "--json"))[1])["replaced"] is True
    (place / "posterior.json").unlink()
    assert mola_command(*arguments(desk, place, "--quiet"))[0] == 0, "what an interrupted fit leaves is no obstacle"
    document = json.loads((place / "posterior.json").read_text())
    strangers = {
        "saved swag": {"posterior.json": json.dumps(sealed(document | {"kind": "swag"}))},
        "not written by mola": {"posterior.json": "{}"},
        "holds other files (notes.txt) and no posterior": {"notes.txt": "mine"},
    }
    for index, (words, files) in enumerate(strangers.items()):
        folder = tmp_path / str(index)
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        code, out, err = mola_command(*arguments(desk, folder))
        assert (code, out) == (1, "")
        assert words in err
        assert "another --output" in err
        assert {path.name: path.read_text() for path in folder.iterdir()} == files


def test_a_job_file_makes_the_same_posterior_again_and_flags_win(desk, posterior, tmp_path, mola_command):
    again = tmp_path / "again"
    assert mola_command("fit", "--config", posterior / "job.toml", "--output", again, "--quiet")[0] == 0
    first, second = (json.loads((folder / "posterior.json").read_text()) for folder in (posterior, again))
    assert first == second, "to the last bit, checksum of the tensors included"
    other = tmp_path / "other"
    assert mola_command("fit", "--config", posterior, "--structure", "diag", "--output", other, "--quiet")[0] == 0
    assert json.loads((other / "posterior.json").read_text())["structure"]["name"] == "diag"


def test_info_notices_damage(posterior, mola_command, tmp_path):
    damaged = shutil.copytree(posterior, tmp_path / "damaged")
    (file,) = damaged.glob("tensors-*.safetensors")
    file.write_bytes(file.read_bytes() + b"x")
    code, _, said = mola_command("info", damaged)
    assert code == 1
    assert "corrupt" in said


def test_info_for_people_and_for_programs(posterior, mola_command):
    code, out, _ = mola_command("info", posterior)
    assert code == 0
    for words in ("kron", "cat, dog, fox", "36 inputs", "intact"):
        assert words in " ".join(out.split()), words
    code, out, err = mola_command("info", posterior, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["components"] == 3


def test_a_posterior_without_distances_says_so_and_predicts(desk, tmp_path, mola_command):
    place, output = tmp_path / "posterior", tmp_path / "out.csv"
    assert mola_command(*arguments(desk, place, "--no-distances", "--quiet"))[0] == 0
    told = " ".join(mola_command("info", place)[1].split())
    assert "no distances" in told
    assert "': 13 features with the bias, if it has one, 3 classes" in told
    assert json.loads(mola_command("info", place, "--json")[1])["has_distances"] is False
    assert mola_command("predict", place, "test", "--output", output, "--quiet")[0] == 0
    assert "distance" not in output.read_text().splitlines()[0].split(",")


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("holds other files", ["evaluate", "POSTERIOR", "--test", "test", "-o", "."]),
        ("not a writable folder", ["export", "POSTERIOR", "--onnx", "test.npz/out.onnx"]),
        ("not a writable folder", ["predict", "POSTERIOR", "test", "-o", "/proc/out.csv"]),
        ("not a writable folder", ["evaluate", "POSTERIOR", "--test", "test", "-o", "/proc/out"]),
        ("not a writable folder", ["fit", "--network", "lenet", "--train", "train", "--val", "val", "-o", "/proc/out"]),
        ("holds other files", ["fit", "--network", "lenet", "--train", "train", "--val", "val", "-o", "."]),
        ("holds no saved posterior", ["info", "train"]),
        ("--mean must be numbers", ["fit", "--mean", "a,b"]),
        ("or a FILE with a name on each line", ["fit", "--classes", "cat,cat"]),
        ("does not exist", ["fit", "--config", "nowhere.toml"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(posterior, mola_command, words, arguments):
    code, out, err = mola_command(*[str(posterior) if one == "POSTERIOR" else one for one in arguments])
    assert (code, out) == (1, "")
    last = [line for line in err.splitlines() if not line.strip().startswith(("0 %", "5 %"))]
    assert len(last) == 1
    assert last[0].startswith("mola: ")
    assert words in last[0]


def test_the_process_itself_ends_with_these_codes(desk, posterior, tmp_path):
    """One real process: what a shell and a scheduler see."""
    shutil.copytree(desk.root / "strange", tmp_path / "images")
    (tmp_path / "images" / "bad.png").touch()
    command = [sys.executable, "-m", "mola", "predict", posterior, tmp_path / "images", "--threads", "1"]
    outcome = subprocess.run(
        [*command, "--output", tmp_path / "out.csv"], capture_output=True, text=True, check=False, cwd=desk.root
    )
    assert outcome.returncode == 3, outcome.stderr
    assert "bad.png: cannot be decoded" in outcome.stderr
    assert "Traceback" not in outcome.stderr


# --- a run again from its own file


@pytest.mark.usefixtures("_blank_figures")
def test_every_run_writes_the_file_that_makes_it_again(desk, tmp_path, mola_command):
    posterior, first, second = tmp_path / "posterior", tmp_path / "one.csv", tmp_path / "two.csv"
    assert mola_command(*arguments(desk, posterior), "--quiet")[0] == 0
    assert mola_command("predict", posterior, "test", "--output", first, "--probabilities", "--quiet")[0] == 0
    # The file alone; a flag wins over it.
    assert mola_command("predict", "--config", f"{first}.toml", "--output", second, "--quiet")[0] == 0
    assert first.read_text() == second.read_text()
    first.unlink()
    assert mola_command("predict", "--config", f"{first}.toml", "--quiet")[0] == 0
    assert first.read_text() == second.read_text()

    report = tmp_path / "report"
    assert mola_command("evaluate", posterior, "--test", "test", "--output", report, "--quiet")[0] == 0
    kept = {name: value for name, value in json.loads((report / "numbers.json").read_text()).items() if name != "made"}
    (report / "numbers.json").unlink()
    assert mola_command("evaluate", "--config", report / "run.toml", "--quiet")[0] == 0
    assert kept.items() <= json.loads((report / "numbers.json").read_text()).items()
