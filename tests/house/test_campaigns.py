"""Short versions of long campaigns: random calls against the closed form, kills, and simulated guarantees."""

import importlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["fuzz"])
def script(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module(request.param)


@pytest.fixture
def campaign(script, monkeypatch, capsys):
    """Run the script's `main` with options in this process; return its exit code and output."""

    def run(*options):
        torch.set_default_dtype(torch.float32)
        monkeypatch.setattr(sys, "argv", [script.__file__, *options])
        return script.main(), capsys.readouterr().out

    return run


def test_random_calls_say_what_the_closed_form_says(script, campaign, monkeypatch):
    monkeypatch.setattr(script, "QUICK", 80)
    code, printed = campaign("--quick")
    assert code == 0, printed
    counts = {name: int(n) for n, name in re.findall(r"(\d+) ([a-z ]+)", printed.splitlines()[-1].split(": ")[1])}
    assert counts["right"] > 60, "most calls must be decided"


@pytest.mark.slow  # what is killed while it writes is also in test_damaged_files.py
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills are those of a forked process")
def test_killed_work_is_neither_lost_nor_half_done():
    command = [sys.executable, ROOT / "benchmarks" / "crash.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 kills: 0 lost, 0 half-written, 0 differs" in done.stdout


def test_a_mistake_is_noticed(script, campaign, monkeypatch):
    """The closed form catches a wrong constant."""
    monkeypatch.setattr(
        "molaplace.links.probit_scaled", lambda mean, variance: mean * (1 + math.pi / 16 * variance).rsqrt()
    )
    monkeypatch.setattr(script, "QUICK", 40)
    code, printed = campaign("--quick")
    assert code == 1
    assert re.search(r"FAILED: wrong: .*probs.*\n  python benchmarks/fuzz.py --case \d+", printed), printed


guarantees = pytest.mark.parametrize("script", ["guarantees"], indirect=True)


@guarantees
def test_simulated_guarantees_hold(campaign):
    code, printed = campaign("--quick")
    assert code == 0, printed
    assert printed.startswith("100 cells")


@guarantees
def test_a_broken_guarantee_is_noticed(script, campaign, monkeypatch):
    """A conformal rank that is one too small or one too large."""
    chosen = [cell for cell in script.cells() if cell.count == 20 and cell.exact and cell.guarantee == 0.9]
    monkeypatch.setattr(script, "cells", lambda: chosen)
    monkeypatch.setattr(script, "QUICK", 150)
    for shift in (-1, 1):
        monkeypatch.setattr(
            "molaplace.decisions.ranks.conformal_rank",
            lambda count, rate, shift=shift: math.ceil((count + 1) * (1 - rate) - 1e-9) + shift,
        )
        code, printed = campaign("--quick")
        assert code == 1, printed
        assert printed.count("BROKEN") == len(chosen) > 5
