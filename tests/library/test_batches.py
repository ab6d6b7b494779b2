"""Predictions for engines that divide data themselves: the numbers of the plain call, whatever the batches are."""

from __future__ import annotations

import pickle
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.export import BatchPredictor
from tests.closeness import assert_close

pytestmark = pytest.mark.export

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


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("batches") / "posterior.onnx"
    thresholds = {"ood_threshold": 1.0, "answer_threshold": 0.5, "set_threshold": 0.1}
    mola.export.onnx(posterior(), path, torch.rand(2, 3, 6, 6, dtype=torch.float32), classes=CLASSES, **thresholds)
    return path


def test_every_batch_gives_the_numbers_of_the_plain_call(file):
    inputs = torch.rand(18, 3, 6, 6)
    predictor = BatchPredictor(file, COLUMNS, keep=["id"], shape=(3, 6, 6), probabilities=True)
    predictor = pickle.loads(pickle.dumps(predictor))  # as a worker gets it
    plain = posterior().predict(inputs)
    frame = pd.DataFrame(inputs.flatten(1).numpy(), columns=COLUMNS).assign(id=np.arange(len(inputs)) + 7)
    actual = predictor(frame)
    for name in NUMBERS:
        assert_close(actual[name].to_numpy(), getattr(plain, name).double().numpy(), "difference")
    assert_close(np.stack(actual["probs"]), plain.probs.double().numpy(), "difference")
    assert actual["class"].tolist() == [CLASSES[label] for label in plain.label.tolist()]
    assert actual["id"].tolist() == frame["id"].tolist()
    assert actual["outlying"].tolist() == (actual["ood_score"] > 1.0).tolist()
    assert actual["answer"].tolist() == ((actual["confidence"] > 0.5) & ~actual["outlying"]).tolist()

    # However the rows are divided, and whatever holds them.
    parts = pd.concat(map(predictor, [frame[:5], frame[5:5], frame[5:]]))
    assert parts["class"].tolist() == actual["class"].tolist()
    arrays = predictor({name: frame[name].to_numpy() for name in frame})
    pictures = BatchPredictor(file, inputs=["picture"])
    whole = pictures({"picture": inputs.numpy()})
    cells = pictures(pd.DataFrame({"picture": list(inputs.numpy())}))
    for name in NUMBERS:
        for other in (parts, arrays, whole, cells):
            assert_close(np.asarray(other[name]), actual[name].to_numpy(), "difference")

    empty = predictor(frame.head(0))
    assert (empty.dtypes == actual.dtypes).all()
    schema = predictor.spark_schema({"id": "long"})
    assert [part.split()[0] for part in schema.split(", ")] == list(actual.columns)
    assert schema.endswith("set array<boolean>, probs array<double>")


def test_a_row_of_nan_has_no_class_and_leaves_the_others_alone(file):
    predictor = BatchPredictor(file, COLUMNS, shape=(3, 6, 6))
    frame = flat(x3=[1.0, np.nan, 1.0])
    actual = predictor(frame)
    assert actual["class"].isna().tolist() == [False, True, False]
    assert actual["outlying"].tolist()[1]
    assert not actual["answer"].tolist()[1]
    assert_close(actual["confidence"][0], predictor(frame[:1])["confidence"][0], "difference")


def flat(**changes):
    """A frame of three inputs with some columns changed."""
    frame = pd.DataFrame(np.ones((3, 108), dtype=np.float32), columns=COLUMNS)
    return frame.assign(**changes)


WRONG_USE = {
    "a column is missing": ({}, flat()[["x1"]], "no column 'x0'"),
    "words": ({}, flat(x3="seven"), "not float32 arrays"),
    "no file": ({"file": "nowhere.onnx"}, flat(), "nowhere"),
}


@pytest.mark.parametrize("case", WRONG_USE)
def test_wrong_batches_are_refused(file, case):
    options, batch, words = WRONG_USE[case]
    with pytest.raises(mola.errors.MolaError, match=words):
        BatchPredictor(**({"file": file, "inputs": COLUMNS, "shape": (3, 6, 6)} | options))(batch)
