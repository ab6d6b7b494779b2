"""Inputs that are NaN or infinite never pass as typical: not in Python, not in exported files, not through thresholds and watches."""

import math

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, OptionError
from tests.closeness import assert_close
from tests.library import problems

BAD = {"NaN": math.nan, "infinity": math.inf, "minus infinity": -math.inf}
FIELDS = ("probs", "confidence", "entropy", "epistemic", "aleatoric", "distance", "mutual_information", "far_field")


def trained(activation=nn.ReLU, seed=0):
    inputs, labels = problems.blobs(0, count=200)
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(inputs.shape[1], 8), activation(), nn.Linear(8, problems.CLASSES)).float()
    optimiser = torch.optim.Adam(network.parameters(), lr=0.05)
    for _ in range(40):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(inputs.float()), labels).backward()
        optimiser.step()
    return network


@pytest.fixture(scope="module")
def val():
    inputs, labels = problems.blobs(1, count=300)
    return inputs.float(), labels


@pytest.fixture(scope="module")
def posterior(val):
    """Networks of tanh turn infinity into a typical feature."""
    inputs, labels = problems.blobs(0, count=200)
    return mola.fit([trained(nn.Tanh), trained(nn.ReLU, 1)], [(inputs.float(), labels)], [val], progress=False)


@pytest.fixture(scope="module")
def batch(val):
    inputs = problems.blobs(2)[0][:9].float()
    rows = {1: math.nan, 4: math.inf, 6: -math.inf, 7: 3e38}
    for row, value in rows.items():
        inputs[row, 0] = value
    return inputs, torch.tensor([row in rows for row in range(9)])


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid])
def test_an_invalid_input_is_refused_with_its_row(value, activation, val):
    posterior = mola.ensemble(trained(activation))
    inputs = val[0][:8].clone()
    inputs[[2, 5], 1] = value
    for data in (inputs, [inputs]):
        with pytest.raises(DataError, match="rows 2, 5") as caught:
            posterior.predict(data)
        assert caught.value.rows == (2, 5)
    with pytest.raises(OptionError, match="raise"):
        posterior.predict(inputs, invalid="skip it")


def test_marked_inputs_are_unknown_and_the_others_are_answered(posterior, batch):
    inputs, invalid = batch
    expected = posterior.predict(inputs[~invalid])
    for predictor in (posterior, mola.Mixture([posterior, posterior])):
        one_batch = predictor.predict(inputs, invalid="mark")
        loader = predictor.predict([inputs[:5], inputs[5:]], invalid="mark")
        for prediction in (one_batch, loader):
            assert torch.equal(prediction.invalid, invalid)
            assert torch.equal(prediction.label[~invalid], expected.label)
            assert (prediction.label[invalid] == -1).all()
            assert torch.equal(prediction.ood_score == torch.inf, invalid)
            for name in FIELDS:
                values = getattr(prediction, name)
                if values is not None:
                    assert values[invalid].isnan().all(), name
                    assert values[~invalid].isfinite().all(), name
            assert_close(prediction.probs[~invalid], expected.probs)
    nothing = posterior.predict(torch.full((3, inputs.shape[1]), torch.nan, dtype=torch.float32), invalid="mark")
    assert nothing.invalid.all()
    mapping = nn.ModuleDict({"x": trained()})
    mapping.forward = lambda x: mapping["x"](x)
    assert torch.equal(mola.ensemble(mapping).predict({"x": inputs[:3]}, invalid="mark").invalid, invalid[:3])


def test_dense_inputs_are_marked_as_a_whole():
    torch.manual_seed(0)
    ensemble = mola.ensemble(nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1)).float())
    images = torch.randn(4, 1, 5, 5).float()
    images[2, 0, 1, 1] = torch.nan
    prediction = ensemble.predict(images, invalid="mark")
    assert prediction.invalid.tolist() == [False, False, True, False]
    assert (prediction.label[2] == -1).all()
    with pytest.raises(DataError) as caught:
        ensemble.predict(images)
    assert caught.value.rows == (2,)


def test_decisions_fail_safe(posterior, val, batch):
    inputs, invalid = batch
    usual = posterior.predict(val[0])
    new = posterior.predict(inputs, invalid="mark")
    alarm = mola.alarm_threshold(usual, 0.05)
    assert alarm(new)[invalid].all()
    assert (new.ood_score > alarm)[invalid].all()
    assert not mola.abstain_threshold(usual, val[1], 0.3)(new)[invalid].any()
    sets = mola.prediction_sets(usual, val[1], 0.9)
    assert sets(new)[invalid].all(), "no class can be ruled out"
    assert torch.equal(sets(new)[~invalid], sets(posterior.predict(inputs[~invalid])))


def test_intervals_of_invalid_inputs_are_infinite():
    torch.manual_seed(0)
    x = torch.randn(100, 2)
    y = x[:, :1]
    regression = mola.fit(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), [(x, y)], likelihood="gaussian")
    band = mola.prediction_intervals(regression.predict(x), y, 0.9)
    x = x[:3].clone()
    x[1] = torch.nan
    prediction = regression.predict(x, invalid="mark")
    lower, upper = band(prediction)
    assert (lower[1], upper[1]) == (-torch.inf, torch.inf)
    assert lower[[0, 2]].isfinite().all()
    assert prediction.ood_score[1] == torch.inf


def test_a_watch_counts_invalid_inputs_as_the_strangest_and_as_wrong(posterior, val):
    watch = mola.watch(posterior, [val], recent=100)
    inputs, labels = (values[:100] for values in problems.blobs(2))
    inputs = inputs.float()
    watch.update(posterior.predict(inputs), labels=labels)
    before = watch.labelled.value
    assert not watch.alarm
    inputs[:50] = torch.nan
    watch.update(posterior.predict(inputs, invalid="mark"), labels=labels)
    assert watch.alarm
    assert (watch.streams[0].window["score"] == math.inf).sum() == 50
    assert watch.accuracy.strange >= 0.5
    assert watch.labelled.value < before - 0.15


@pytest.mark.export
@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_invalid_inputs_are_marked_by_exported_files(tmp_path, posterior, val, batch, kind):
    inputs, invalid = batch
    usual = posterior.predict(val[0])
    path = tmp_path / f"model.{kind}"
    options = {
        "ood_threshold": float(mola.alarm_threshold(usual, 0.05)),
        "answer_threshold": 0.5,
        "set_threshold": 0.2,
    }
    write = mola.export.onnx if kind == "onnx" else mola.export.torch_export
    write(posterior, path, val[0][:2], **options)
    exported = mola.export.load(path, trust=True)
    outputs = exported(inputs)
    for name, values in outputs.items():
        unknown = {"label": values == -1, "ood_score": values == torch.inf}.get(
            name, values.isnan().flatten(1).any(1) if values.dim() > 1 else values.isnan()
        )
        assert torch.equal(unknown, invalid), name
    decisions = exported.decide(outputs)
    assert decisions["outlying"][invalid].all()
    assert not decisions["answer"][invalid].any()
    assert decisions["set"][invalid].all()
    marked = posterior.predict(inputs, invalid="mark")
    assert torch.equal(outputs["label"], marked.label)
    assert_close(outputs["probs"][~invalid], marked.probs[~invalid])
    nan = {name: torch.full_like(values.double(), torch.nan) for name, values in outputs.items()}
    assert exported.decide(nan)["outlying"].all(), "also of files by others"
