"""Predictions for engines that divide data themselves: the numbers of the plain call, whatever the batches are."""

from __future__ import annotations

import os
import pickle
import runpy
import shutil
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.export import BatchPredictor
from tests.closeness import assert_close

CLASSES = ("cat", "dog", "fox")

COLUMNS = [f"x{index}" for index in range(108)]
NUMBERS = ("confidence", "entropy", "epistemic", "ood_score", "distance")


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


@cache
def posterior():
    """Perceptrons for images of 3 x 6 x 6 pixels, untrained."""
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Flatten(), nn.Linear(108, 12), nn.ReLU(), nn.Linear(12, 3)).float() for _ in range(2)]
    inputs = torch.rand(60, 3, 6, 6, dtype=torch.float32)
    return mola.fit(networks, [(inputs, torch.arange(60) % 3)], progress=False)


@pytest.mark.parametrize("form", ["function", pytest.param("onnx", marks=pytest.mark.slow)])
def test_every_source_and_batch_gives_the_numbers_of_the_plain_call(tmp_path, form):
    inputs = torch.rand(18, 3, 6, 6)
    source = posterior
    if form == "onnx":
        source = tmp_path / "posterior.onnx"
        mola.export.onnx(posterior(), source, inputs[:2], classes=CLASSES, ood_threshold=1.0)
    predictor = BatchPredictor(
        source, COLUMNS, keep="id", shape=(3, 6, 6), probabilities=True, classes=CLASSES, ood_threshold=1.0
    )
    predictor = pickle.loads(pickle.dumps(predictor))  # as a worker gets it
    plain = posterior().predict(inputs)
    frame = pd.DataFrame(inputs.flatten(1).numpy(), columns=COLUMNS).assign(id=np.arange(len(inputs)) + 7)
    actual = predictor(frame)
    for name in NUMBERS:
        assert_close(actual[name].to_numpy(), getattr(plain, name).double().numpy(), "difference")
    assert_close(np.stack(actual["probs"]), plain.probs.double().numpy(), "difference" if form == "onnx" else "float32")
    assert actual["class"].tolist() == [CLASSES[label] for label in plain.label.tolist()]
    assert actual["id"].tolist() == frame["id"].tolist()
    assert "outlying" in actual

    # However the rows are divided, and whatever holds them.
    parts = pd.concat(map(predictor, [frame[:5], frame[5:5], frame[5:]]))
    assert parts["class"].tolist() == actual["class"].tolist()
    arrays = predictor({name: frame[name].to_numpy() for name in frame})
    pictures = BatchPredictor(source, inputs="picture")
    whole = pictures({"picture": inputs.numpy()})
    cells = pictures(pd.DataFrame({"picture": list(inputs.numpy())}))
    for name in NUMBERS:
        for other in (parts, arrays, whole, cells):
            assert_close(np.asarray(other[name]), actual[name].to_numpy(), "difference")

    empty = predictor(frame.head(0))
    assert (empty.dtypes == actual.dtypes).all()
    schema = predictor.spark_schema({"id": "long"})
    assert [part.split()[0] for part in schema.split(", ")] == list(actual.columns)
    assert schema.endswith("probs array<double>")


def flat(**changes):
    """A frame of three inputs with some columns changed."""
    frame = pd.DataFrame(np.ones((3, 108), dtype=np.float32), columns=COLUMNS)
    return frame.assign(**changes)


WRONG_USE = {
    "a column is missing": ({}, flat()[["x1"]], "no column 'x0'"),
    "no batch": ({}, 3, "got int"),
    "nan": ({}, flat(x3=[1.0, np.nan, 1.0]), "row 1 of the batch contains NaN"),
    "words": ({}, flat(x3="seven"), "cannot be converted to float32"),
    "no source": ({"source": "nowhere.onnx"}, flat(), "nowhere"),
    "no posterior": ({"source": list}, flat(), "got list"),
}


@pytest.mark.parametrize("case", WRONG_USE)
def test_wrong_batches_are_refused(case):
    options, batch, words = WRONG_USE[case]
    with pytest.raises(mola.errors.MolaError, match=words):
        BatchPredictor(**({"source": posterior, "inputs": COLUMNS, "shape": (3, 6, 6)} | options))(batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the engines' own
@pytest.mark.parametrize("engine", ["dask", "ray", "spark"])
def test_the_example_of_an_engine_gives_the_numbers_of_the_plain_call(engine, tmp_path, monkeypatch, capfd):
    package = {"spark": "pyspark"}.get(engine, engine)
    if find_spec(package) is None or (engine == "spark" and shutil.which("java") is None):
        pytest.skip(
            f"{package} (OR JAVA) IS NOT INSTALLED: nothing here was tried. pip install -c constraints.txt {package}"
        )
    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # of the workers
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "600")  # Ray gives a busy machine 30 to start
    monkeypatch.setattr("sys.argv", ["engines.py", "--engine", engine])
    runpy.run_path(str(root / "examples" / "engines.py"), run_name="__main__")
    printed = capfd.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith(f"{engine}: "))
    assert "497 rows" in line
    assert "same classes: True" in line
    assert float(line.split("largest difference ")[1].split(",")[0]) < 1e-6
