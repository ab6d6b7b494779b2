"""Predictions for engines that divide data themselves: the numbers of the plain call, whatever the batches are."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import mola
from mola.app.jobs.batches import BatchPredictor
from tests.closeness import assert_close
from tests.own_work import CLASSES, build

COLUMNS = [f"x{index}" for index in range(108)]


@pytest.fixture(autouse=True)
def _single_precision(_at_the_desk):
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def source_of(desk, fitted, tmp_path_factory):
    """The same posterior in the form asked for, and the options that it needs."""
    folder = tmp_path_factory.mktemp("forms")

    @cache
    def make(form):
        torch.set_default_dtype(torch.float32)
        if form == "folder":
            return fitted.folder, {}
        if form == "hub":
            return mola.hub.save(fitted.posterior, folder / "hub", classes=CLASSES), {"build": build}
        inputs, _ = desk.inputs("test")
        mola.export.onnx(fitted.posterior, folder / "posterior.onnx", inputs[:2], classes=CLASSES, ood_threshold=1.0)
        return folder / "posterior.onnx", {}

    return make


def frame_of(desk):
    inputs, _ = desk.inputs("test")
    return pd.DataFrame(inputs.flatten(1).numpy(), columns=COLUMNS).assign(id=np.arange(len(inputs)) + 7)


@pytest.mark.parametrize("form", ["folder", "hub", pytest.param("onnx", marks=pytest.mark.slow)])
def test_every_source_and_batch_gives_the_numbers_of_the_plain_call(desk, fitted, source_of, form):
    source, more = source_of(form)
    predictor = BatchPredictor(source, inputs=COLUMNS, keep="id", shape=(3, 6, 6), probabilities=True, **more)
    assert len(pickle.dumps(predictor)) < 4000
    predictor = pickle.loads(pickle.dumps(predictor))  # as a worker gets it
    inputs, _ = desk.inputs("test")
    plain = fitted.posterior.predict(inputs)
    frame = frame_of(desk)
    found = predictor(frame)
    for name in ("confidence", "entropy", "epistemic", "ood_score", "distance"):
        assert_close(found[name].to_numpy(), getattr(plain, name).double().numpy(), "difference")
    assert_close(np.stack(found["probs"]), plain.probs.double().numpy(), "difference" if form == "onnx" else "float32")
    assert found["class"].tolist() == [CLASSES[label] for label in plain.label.tolist()]
    assert found["id"].tolist() == frame["id"].tolist()
    assert ("outlying" in found) == (form != "hub")

    # However the rows are divided, and whatever holds them.
    parts = pd.concat(predictor.over([frame[:5], frame[5:5], frame[5:]]))
    assert parts["class"].tolist() == found["class"].tolist()
    for name in ("confidence", "entropy", "epistemic", "ood_score", "distance"):
        assert_close(parts[name].to_numpy(), found[name].to_numpy(), "difference")
    arrays = predictor({name: frame[name].to_numpy() for name in frame})
    cells = BatchPredictor(source, inputs="picture", **more)({"picture": inputs.numpy()})
    whole = BatchPredictor(source, **more)(inputs.numpy())
    for name in ("label", "confidence", "ood_score"):
        for other in (arrays, cells, whole):
            assert_close(np.asarray(other[name]), found[name].to_numpy(), "difference")
    objects = pd.DataFrame({"picture": list(inputs.numpy())})
    again = BatchPredictor(source, inputs="picture", **more)(objects)
    assert_close(again["confidence"].to_numpy(), found["confidence"].to_numpy())

    empty = predictor(frame.head(0))
    assert list(empty.columns) == list(found.columns)
    assert (empty.drop(columns="probs").dtypes == found.drop(columns="probs").dtypes).all()
    schema = predictor.spark_schema({"id": "long"})
    assert [part.split()[0] for part in schema.split(", ")] == list(found.columns)
    assert schema.endswith("probs array<double>")


def flat(**changes):
    """A frame of three inputs with some columns changed."""
    frame = pd.DataFrame(np.ones((3, 108), dtype=np.float32), columns=COLUMNS)
    return frame.assign(**changes)


CELLS = np.array([np.zeros(3), None], dtype=object)
NAMED = {"inputs": COLUMNS, "shape": (3, 6, 6)}
WRONG_USE = {
    "a column is missing": (NAMED, flat()[["x1"]], "no column 'x0'"),
    "no columns are named": ({}, flat(), "name the columns"),
    "no batch": (NAMED, 3, "got int"),
    "nan": (NAMED, flat(x3=[1.0, np.nan, 1.0]), "row 1 of the batch is not finite"),
    "words": (NAMED, flat(x3="seven"), "cannot be converted to float32"),
    "none": ({"inputs": "x"}, {"x": CELLS}, "row 1 of the batch is None"),
    "a name twice": ({**NAMED, "keep": ["label"]}, flat(label=9), "keep: 'label'"),
    "nan as an integer": ({"dtype": "int64"}, np.array([[1.0], [np.nan]]), "int64 cannot hold"),
    "too large for bytes": ({"dtype": "uint8"}, np.array([[1.0], [300.0]]), "uint8 cannot hold"),
    "below 0 for bytes": ({"dtype": "uint8"}, np.array([[1.0], [-1.0]]), "uint8 cannot hold"),
    "a half as an integer": ({"dtype": "int32"}, np.array([[1.0], [0.5]]), "int32 cannot hold"),
    "another shape": ({"shape": (5, 5)}, np.ones((2, 3)), "of shape"),
}


@pytest.mark.parametrize("case", WRONG_USE)
def test_wrong_batches_are_refused(source_of, case):
    source, more = source_of("hub")
    options, batch, words = WRONG_USE[case]
    with pytest.raises(mola.errors.MolaError, match=words):
        BatchPredictor(source, **options, **more)(batch)


def test_wrong_options_and_sources_are_refused(desk, source_of, tmp_path):
    source, _ = source_of("folder")
    with pytest.raises(mola.errors.StorageError, match=r"^[^:]*nowhere\.onnx is neither"):
        BatchPredictor(tmp_path / "nowhere.onnx", inputs=COLUMNS)(frame_of(desk))
    for options in ({"batch_size": 0}, {"dtype": "complex64"}):
        with pytest.raises(mola.errors.OptionError, match=next(iter(options))):
            BatchPredictor(source, **options)
    with pytest.raises(mola.errors.OptionError, match="got id"):
        BatchPredictor(source, inputs=COLUMNS).spark_schema({"id": "long"})


# --- engines --------------------------------------------------------------------------------------------------------------


def require(package):
    """The package; where it is missing the test is skipped loudly."""
    if find_spec(package) is None:
        pytest.skip(f"{package} IS NOT INSTALLED: nothing here was tried. pip install -c constraints.txt {package}")
    return __import__(package)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the engines' own
@pytest.mark.parametrize("engine", ["dask", "ray", "spark"])
def test_the_example_of_an_engine_gives_the_numbers_of_the_plain_call(engine, tmp_path, monkeypatch, capfd):
    import runpy

    require({"spark": "pyspark"}.get(engine, engine))
    if engine == "spark" and shutil.which("java") is None:
        pytest.skip("NO JAVA: Spark was not tried. Install a Java runtime, such as default-jre-headless.")
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_arrow_tables(desk, source_of):
    arrow = require("pyarrow")
    frame = frame_of(desk)
    predictor = BatchPredictor(source_of("folder")[0], inputs=COLUMNS, keep=["id"], shape=(3, 6, 6))
    found = predictor(arrow.Table.from_pandas(frame, preserve_index=False)).to_pandas()
    pd.testing.assert_frame_equal(found, predictor(frame), check_dtype=False)
    # Empty partitions have the types of full ones, and record batches stay what they are, as Spark's `mapInArrow` asks.
    predictor = BatchPredictor(source_of("folder")[0], inputs=COLUMNS, keep=["id"], shape=(3, 6, 6), probabilities=True)
    for kind in (arrow.Table, arrow.RecordBatch):
        batch = kind.from_pandas(frame, preserve_index=False)
        full, empty = predictor(batch), predictor(batch.slice(0, 0))
        assert isinstance(full, kind)
        assert isinstance(empty, kind)
        assert full.schema == empty.schema
