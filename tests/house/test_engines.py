"""Predictions on the real engines: Ray Data, Spark and Dask. `make test-recipes` installs them."""

import os
import runpy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "engines.py"


@pytest.mark.filterwarnings("ignore")  # the engines' own
@pytest.mark.parametrize(("engine", "package"), [("dask", "dask"), ("ray", "ray"), ("spark", "pyspark")])
def test_an_engine_gives_the_numbers_of_the_plain_call(engine, package, tmp_path, monkeypatch, capfd):
    missing = package if find_spec(package) is None else ""
    if engine == "spark" and shutil.which("java") is None:
        missing += " Java"
    if missing:
        message = f"NOT INSTALLED: {missing}. `make test-recipes` runs this test."
        pytest.fail(message) if os.environ.get("MOLAPLACE_RECIPES") else pytest.skip(message)
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # of the workers
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "600")  # Ray gives a busy machine 30 to start
    monkeypatch.setattr("sys.argv", ["engines.py", "--engine", engine])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capfd.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith(f"{engine}: "))
    assert "497 rows" in line
    assert "same classes: True" in line
    assert float(line.split("largest difference ")[1].split(",")[0]) < 1e-6
