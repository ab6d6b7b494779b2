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
    close = {"atol": 1e-5} if form == "onnx" else {"atol": 0, "rtol": 0}
    for name in ("confidence", "entropy", "epistemic", "ood_score", "distance"):
        np.testing.assert_allclose(found[name], getattr(plain, name).double().numpy(), err_msg=name, **close)
    np.testing.assert_allclose(np.stack(found["probs"]), plain.probs.double().numpy(), **close)
    assert found["class"].tolist() == [CLASSES[label] for label in plain.label.tolist()]
    assert found["id"].tolist() == frame["id"].tolist()
    assert ("outlying" in found) == (form != "hub")

    # However the rows are divided, and whatever holds them.
    parts = pd.concat(predictor.over([frame[:5], frame[5:5], frame[5:]]))
    pd.testing.assert_frame_equal(parts, found, rtol=1e-6)
    arrays = predictor({name: frame[name].to_numpy() for name in frame})
    cells = BatchPredictor(source, inputs="picture", **more)({"picture": inputs.numpy()})
    whole = BatchPredictor(source, **more)(inputs.numpy())
    for name in ("label", "confidence", "ood_score"):
        np.testing.assert_array_equal(arrays[name], found[name])
        np.testing.assert_array_equal(cells[name], found[name])
        np.testing.assert_array_equal(whole[name], found[name])
    objects = pd.DataFrame({"picture": list(inputs.numpy())})
    again = BatchPredictor(source, inputs="picture", **more)(objects)
    np.testing.assert_array_equal(again["confidence"], found["confidence"])

    empty = predictor(frame.head(0))
    assert list(empty.columns) == list(found.columns)
    assert (empty.drop(columns="probs").dtypes == found.drop(columns="probs").dtypes).all()
    schema = predictor.spark_schema({"id": "long"})
    assert [part.split()[0] for part in schema.split(", ")] == list(found.columns)
    assert schema.endswith("probs array<double>")


def test_what_cannot_be_predicted_is_told(desk, source_of, tmp_path):
    source, _ = source_of("folder")
    frame = frame_of(desk)
    predictor = BatchPredictor(source, inputs=COLUMNS, shape=(3, 6, 6))
    with pytest.raises(mola.errors.DataError, match="no column 'x0'"):
        predictor(frame[["id"]])
    with pytest.raises(mola.errors.DataError, match="name the columns"):
        BatchPredictor(source)(frame)
    with pytest.raises(mola.errors.DataError, match="got int"):
        predictor(3)
    broken = frame.copy()
    broken.loc[4, "x3"] = np.nan
    with pytest.raises(mola.errors.DataError, match="row 4 of the batch is not finite"):
        predictor(broken)
    with pytest.raises(mola.errors.DataError, match="cannot be made float32 inputs"):
        predictor(frame.assign(x3="seven"))
    with pytest.raises(mola.errors.StorageError, match="put it where all processes can read it"):
        BatchPredictor(tmp_path / "nowhere.onnx")(np.zeros((1, 3, 6, 6)))
    with pytest.raises(mola.errors.OptionError, match="batch_size"):
        BatchPredictor(source, batch_size=0)
    with pytest.raises(mola.errors.OptionError, match="dtype must be one of"):
        BatchPredictor(source, dtype="complex64")
    with pytest.raises(mola.errors.OptionError, match="types of no column, got id"):
        predictor.spark_schema({"id": "long"})


def test_what_is_wrong_with_a_batch_is_said_and_nothing_is_lost_or_wrapped_around(desk, source_of, tmp_path):
    source, more = source_of("hub")
    frame = frame_of(desk)
    predictor = BatchPredictor(source, inputs=COLUMNS, shape=(3, 6, 6), **more)
    # The error of a source is not one of the columns.
    with pytest.raises(mola.errors.StorageError, match=r"^[^:]*nowhere\.onnx is neither"):
        BatchPredictor(tmp_path / "nowhere.onnx", inputs=COLUMNS)(frame)
    with pytest.raises(mola.errors.DataError, match=r"^row 4 of the batch is not finite"):
        predictor(frame.assign(x3=np.where(np.arange(len(frame)) == 4, np.nan, 1.0)))
    # A column that is kept would be hidden by a prediction of the same name.
    clashing = BatchPredictor(source, inputs=COLUMNS, keep=["label"], shape=(3, 6, 6), **more)
    for batch in (frame.assign(label=9), {name: frame[name].to_numpy() for name in COLUMNS} | {"label": frame["id"]}):
        with pytest.raises(
            mola.errors.OptionError, match="keep: 'label' is also the name of a column of the predictions"
        ):
            clashing(batch)
    with pytest.raises(mola.errors.DataError, match="row 1 of the batch is None"):
        BatchPredictor(source, inputs="x", **more)({"x": np.array([np.zeros(3), None], dtype=object)})
    # Numbers that a type cannot hold would become others in silence.
    for dtype, value in (("int64", np.nan), ("uint8", 300.0), ("uint8", -1.0), ("int32", 0.5)):
        with pytest.raises(mola.errors.DataError, match=f"row 2 of the batch has numbers that {dtype} cannot hold"):
            BatchPredictor(source, dtype=dtype, **more)(np.array([[1.0], [2.0], [value]]))
    # Columns may have numbers for names, as frames made of arrays do; tensors may be in a graph.
    inputs, _ = desk.inputs("test")
    numbered = BatchPredictor(source, inputs=range(len(COLUMNS)), shape=(3, 6, 6), **more)
    expected = predictor(frame)["confidence"].tolist()
    assert numbered(pd.DataFrame(inputs.flatten(1).numpy()))["confidence"].tolist() == expected
    assert predictor(inputs.flatten(1).requires_grad_())["confidence"].tolist() == expected
    # Nested lists, as Arrow and Spark hand them out: arrays of arrays.
    nested = np.empty(len(inputs), dtype=object)
    for index, image in enumerate(inputs.numpy()):
        nested[index] = np.empty(3, dtype=object)
        for channel in range(3):
            nested[index][channel] = np.empty(6, dtype=object)
            nested[index][channel][:] = list(image[channel])
    cells = BatchPredictor(source, inputs="picture", **more)
    assert cells({"picture": nested})["confidence"].tolist() == expected


def test_a_source_is_read_once_and_again_when_it_changes(desk, source_of, tmp_path, monkeypatch):
    source = Path(shutil.copytree(source_of("hub")[0], tmp_path / "moved"))
    reads = []
    read = mola.hub.load
    monkeypatch.setattr(mola.hub, "load", lambda *given: reads.append(1) or read(*given))
    inputs = desk.inputs("test")[0].numpy()
    for _ in range(3):
        pickle.loads(pickle.dumps(BatchPredictor(source, build=build)))(inputs)
    assert len(reads) == 1
    later = (source / "config.json").stat().st_mtime_ns + 10**9
    os.utime(source / "config.json", ns=(later, later))
    BatchPredictor(source, build=build)(inputs)
    assert len(reads) == 2


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
