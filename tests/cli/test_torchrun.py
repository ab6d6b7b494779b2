"""Commands of several processes under torchrun: the output of one process."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import molaplace as mola
from molaplace.cli.folder import open_posterior
from tests.cli.fitted_folders import run
from tests.closeness import assert_close
from tests.forked_python import run_team
from tests.workspace import evaluated, make_workspace

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300
"""Seconds after which processes count as hanging."""


@pytest.mark.slow  # torchrun starts Python and torch three times; what processes do together is tested above, forked
@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_the_command_under_torchrun(tmp_path, monkeypatch):
    """`torchrun -m molaplace fit`: pictures and arrays divided, one folder written, one process that speaks.

    The commands after it are given to processes that have met once: to start each with torchrun takes five times as long.
    """
    workspace = make_workspace(tmp_path, "own_networks_for_teams")
    (tmp_path / "train" / "dog" / "zz.png").write_bytes(b"\x89PNG")
    options = ["fit", "--network", f"{workspace.module}:build", *workspace.weights(2), "--train", "train"]
    options += ["--val", "val.npz", "--mixing", "stacking", "--batch-size", "5", "--json"]
    options += ["--checkpoint", "kept", "--output"]
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}
    several = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "molaplace"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    single = run(*options, "one")
    assert single.exit_code == 3, single.output
    command = [*several, *options, "two"]
    done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "two" / "posterior.safetensors").exists()
    assert not (tmp_path / "kept").exists()
    expected = json.loads(single.stdout)
    document = json.loads(done.stdout)  # one document: one process printed
    assert document["result"]["train_count"] == expected["result"]["train_count"] == 36
    assert document["left_out"] == expected["left_out"]
    assert list(document["left_out"]["train"]) == ["dog/zz.png"]
    assert_close(document["result"]["prior_precision"], expected["result"]["prior_precision"])
    metrics = [fit["result"]["validation"]["metrics"] for fit in (expected, document)]
    assert_close(metrics[1], metrics[0], "difference")
    scores = [fit["result"]["validation"]["outlier_threshold"] for fit in (expected, document)]
    assert_close(scores[1], scores[0], "difference")
    inputs, _ = workspace.inputs("test")
    posteriors = [mola.load(tmp_path / name, workspace.networks(2)) for name in ("one", "two")]
    assert_close(posteriors[1](inputs), posteriors[0](inputs))
    evaluate = ["evaluate", "two", "--test", "test", "--ood", "strange", "--output", "report", "--json", "--trust"]
    pictures, arrays = (
        ["predict", "two", data, "--probabilities", "--json", "--trust", "--output", output]
        for data, output in (("test", "two-pictures.csv"), ("test.npz", "two-arrays.jsonl"))
    )
    alone = evaluated(open_posterior("two", trust=True), "test", "strange").document()
    for bad, content in (("test/cat/bad", b"\x89PNG"), ("test/dog/zz", b"none either")):
        (tmp_path / f"{bad}.png").write_bytes(content)
    report, *predicted = run_commands([evaluate, pictures, arrays], tmp_path, **path)
    check_evaluation(tmp_path, report, alone)
    check_predictions(tmp_path, *predicted)
    monkeypatch.setenv("WORLD_SIZE", "2")
    wrong = run("info", "two").stderr
    assert "molaplace info runs in one process, but torchrun started 2" in wrong
    assert "fit, predict, evaluate can run in several processes" in wrong


def run_commands(commands, folder, **environment):
    """What two processes say and write, one command after the other."""
    (folder / "commands.json").write_text(json.dumps(commands))
    command = ["-m", "tests.team_script", "commands", folder]
    codes, errors = run_team(2, command, folder, cwd=ROOT, timeout=LIMIT, **environment)
    assert codes == [0, 0], "\n".join(errors)
    told = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]
    return [{part: left[part] + right[part] for part in left} for left, right in zip(*told, strict=True)]


def check_predictions(root, pictures, arrays):
    """`torchrun -m molaplace predict`: the rows of one process, in their order, for pictures and for arrays, bad ones included."""
    for data, output, done in (("test", "pictures.csv", pictures), ("test.npz", "arrays.jsonl", arrays)):
        command = ["predict", "two", data, "--probabilities", "--json", "--output", f"one-{output}"]
        single = run(*command)
        assert done["codes"] == [0, 0], done["stderr"]  # torchrun takes any other for a crash
        assert single.exit_code == (3 if data == "test" else 0), single.output
        expected = json.loads(single.stdout)
        document = json.loads(done["stdout"])
        assert (document["count"], document["left_out"]) == (expected["count"], expected["left_out"])
        assert expected["count"] == 18
        for name in ("confidence", "entropy", "epistemic", "outlying"):
            assert_close(document[name], expected[name], "difference")
        assert (root / f"two-{output}.toml").exists()
        tables = [read_rows(root / f"{folder}-{output}") for folder in ("one", "two")]
        texts = [[[row.get(key) for key in ("name", "class", "error")] for row in table] for table in tables]
        assert texts[1] == texts[0]
        assert sum(bool(error) for *_, error in texts[0]) == (2 if data == "test" else 0)
        scores = [[float(row["ood_score"]) for row in table if not row.get("error")] for table in tables]
        assert_close(scores[1], scores[0], "difference")


def read_rows(path):
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return list(csv.DictReader(text.splitlines()))


def check_evaluation(root, done, alone):
    assert done["codes"] == [0, 0], done["stderr"]
    shared = json.loads(done["stdout"])
    assert (root / "report" / "index.html").exists()
    assert shared["sets"]["test"]["count"] == alone["sets"]["test"]["count"] == 18
    for method, expected in alone["methods"].items():
        result = shared["methods"][method]
        mine = result["labelled"]["test"]
        theirs = expected["labelled"]["test"]
        for name, error in theirs["errors"].items():
            assert_close(mine["metrics"][name], theirs["metrics"][name], "difference", name=method)
            assert_close(mine["errors"][name], error, "difference", scale=1.0, name=method)
        scores = result["outliers"]["strange"]["scores"]
        for score, separation in expected["outliers"]["strange"]["scores"].items():
            assert_close(scores[score]["auroc"], separation["auroc"], "difference", scale=1.0, name=score)
    assert {name: lead["best"] for name, lead in shared["leads"]["test"].items()} == {
        name: list(lead["best"]) for name, lead in alone["leads"]["test"].items()
    }
