"""Run every example: nothing on stderr, and results as claimed."""

import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.closeness import assert_close

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LIMIT = 600
"""Seconds after which a process counts as hanging."""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run an example in this process and an empty folder, as `python examples/NAME.py`, and return its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    torch.set_default_dtype(torch.float32)

    def start(name, *arguments):
        monkeypatch.setattr("sys.argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    yield start
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


def numbers(printed, row, skip=0):
    """Numbers in the line that begins with `row`, after skipping `skip` earlier matches."""
    lines = [line for line in printed.splitlines() if re.match(rf"\s*{re.escape(row)}\s", line)]
    return [float(number) for number in re.findall(r"(?<![\w.])-?\d+\.?\d*(?:e-?\d+)?", lines[skip][len(row) :])]


def drawn(folder, name):
    return (folder / "example-results" / name).read_bytes().startswith(b"\x89PNG")


def test_segmentation(run, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # networks trained this briefly may be underconfident
        printed = run("segmentation.py", "--steps", "40")
    plain = numbers(printed, "MAP")
    careful = numbers(printed, "MoLA, distance")
    assert careful[-1] < 2  # the median distance of the test pictures; that of the shifted ones is farther
    assert numbers(printed, "MoLA, distance", 1)[-1] > careful[-1]
    assert plain[0] > 0.7
    assert drawn(tmp_path, "segmentation.png")


def test_imagenet_networks(run):
    """Missing packages are reported."""
    printed = run("imagenet_networks.py")
    for name, size in (("lite0", 224), ("lite1", 240), ("lite2", 260)):
        assert f"{name}: not installed" in printed or f"{name}: {size} x {size} pixels" in printed


def test_two_moons(run, tmp_path):
    printed = run("two_moons.py")
    # accuracy, and mean confidence on test data and at radius 5, 10 and 100
    plain, ensemble, llla, mixture = (numbers(printed, name) for name in ("MAP", "deep ensemble", "LLLA", "MoLA"))
    for row in (plain, ensemble, llla, mixture):
        assert row[0] > 90
    for far in (2, 3, 4):
        assert mixture[far] < ensemble[far] < plain[far]
        assert llla[far] < plain[far]
        assert mixture[far] < mixture[1]
    assert drawn(tmp_path, "two_moons.png")


def test_digits(run, tmp_path):
    printed = run("digits.py")
    # A count, then pairs of a value and its standard error.
    mixture = numbers(printed, "MoLA")
    plain = numbers(printed, "MAP")
    assert mixture[1] > 0.94
    assert mixture[3] < plain[3]
    assert mixture[-2] < plain[-2]
    rotated = numbers(printed, "MoLA", skip=1)
    plain = numbers(printed, "MAP", skip=1)
    assert all(mixture < reference for mixture, reference in zip(rotated, plain, strict=True))
    by_score = numbers(printed, "MoLA, ood_score")
    by_confidence = numbers(printed, "MAP, 1 - confidence")
    assert by_score[0] == by_confidence[0] == 50  # upright digits against themselves
    assert all(mixture > reference for mixture, reference in zip(by_score[1:], by_confidence[1:], strict=True))
    assert "same predictions after loading: True" in printed
    assert (tmp_path / "example-results" / "digits-posterior" / "posterior.safetensors").exists()
    assert drawn(tmp_path, "digits.png")


def test_ood_alarm(run, tmp_path):
    printed = run("ood_alarm.py")
    averages = [float(number) for number in re.findall(r"([\d.]+)% for", printed)]
    for rate, average in zip((1, 5, 10), averages, strict=True):
        assert rate - 100 / 401 - 0.05 < average < rate + 0.05  # mean over 1000 splits
    _, usual, _, _ = numbers(printed, "test digits")
    for name, least in (("photographs", 50), ("noise", 50), ("inverted digits", 80), ("two digits at once", 15)):
        assert numbers(printed, name)[1] > max(least, usual), name
    assert drawn(tmp_path, "ood_alarm.png")


def test_tabular(run):
    printed = run("tabular.py")
    for name in ("logistic regression", "MLPClassifier", "MolaClassifier, 1 network", "MolaClassifier, 5 networks"):
        accuracy, loss, _, _ = numbers(printed, name)
        assert accuracy > 95
        assert loss < 0.1
    assert numbers(printed, "MolaClassifier, 5 networks")[1] < 1.15 * numbers(printed, "logistic regression")[1]
    # alarm by score, a column out of range, confidence
    usual = numbers(printed, "correct")
    assert usual[0] < 10 + 100 * 3 * (0.1 * 0.9 * (1 / 225 + 1 / 220)) ** 0.5  # five splits of 45 and 44 rows
    assert numbers(printed, "ash in the wrong unit (x 10)")[0] > 90
    mixed_up = numbers(printed, "each column from another wine")
    assert mixed_up[0] > 35
    assert mixed_up[1] < 10  # a range check would miss these rows
    nothing = numbers(printed, "all columns missing (0)")
    assert nothing[0] > 90
    assert (
        numbers(printed, "magnesium in wrong unit (x 0.1)")[0] < 60
    )  # the score misses many of these rows, as the page warns


def test_mimo_mola(run):
    printed = run("mimo_mola.py")
    plain, full, kron = (numbers(printed, name) for name in ("MIMO", "MIMO-MoLA", "MIMO-MoLA, kron"))
    assert float(re.search(r"sum to 1 to within (\S+)\.$", printed, re.M).group(1)) < 1e-5
    for mixture in (full, kron):
        assert mixture[0] > 94
        assert mixture[0] > plain[0] - 1.5
        assert mixture[2] < plain[2] + 0.05  # confidence on digits
        assert mixture[3] < plain[3]  # confidence on photographs
        assert mixture[4] < plain[4]  # confidence on noise
        assert all(our > other - 2 for our, other in zip(mixture[5:], plain[5:], strict=True))  # AUROC


def test_torchrun_gives_the_posterior_of_one_process(run, tmp_path):
    printed = run("torchrun_fit.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    both = subprocess.run(
        [*command, str(ROOT / "examples" / "torchrun_fit.py")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert both.returncode == 0, both.stderr
    assert "read 500 of 1000" in both.stdout
    for row in ("prior precision", "log evidence", "test accuracy", "mean confidence"):
        assert_close(numbers(both.stdout, row), numbers(printed, row), name=row)


def test_bayesian_optimisation(run):
    pytest.importorskip("botorch", reason="NO BOTORCH: pip install botorch to run this example.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BoTorch and its dependencies warn about themselves
        printed = run("bayesian_optimisation.py", "--steps", "12")
    (first, last) = map(float, re.findall(r"evaluations: (.*)", printed))
    assert 0 <= last < first / 2
