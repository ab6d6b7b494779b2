"""Laws of predicting: what a batch is, predictions as sequences and tables, uncertainty, precisions, devices and threads."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import DataError
from molaplace.links import LINKS
from tests.closeness import assert_close
from tests.conftest import STRUCTURES

pytestmark = pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(24) % 3
LOADER = [(X[:10], Y[:10]), (X[10:], Y[10:])]
FIELDS = ("probs", "mutual_information", "ood_score", "logit_mean", "logit_variance", "distance", "far_field")


def network(seed=0, width=6, classes=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, classes))


def pair(classes=3):
    return [network(0, classes=classes), network(1, classes=classes)]


def fit(networks, loader=LOADER, val_loader=None, **options):
    return mola.fit(networks, loader, val_loader, progress=False, **options)


class WithIds(nn.Module):
    """Two inputs: a vector, and an index for each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(3, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x, ids):
        return self.head(x + self.table(ids))


PREDICTORS = {
    "kron": fit,
    "tuned": lambda nets, loader=LOADER: fit(nets, loader, loader, rule="nll"),
    "ensemble": lambda nets, loader=LOADER: mola.ensemble(nets),
    "mixture": lambda nets, loader=LOADER: mola.Mixture([mola.ensemble(net) for net in nets]),
}


@pytest.fixture(params=PREDICTORS)
def make(request):
    return PREDICTORS[request.param]


# --- batches ----------------------------------------------------------------------------------------------------------


def test_call_and_prediction_take_the_same(make):
    plain = make(pair())
    two = make([WithIds()], [((X, Y), Y)])
    kinds = [(plain, X), (plain, (X,)), (plain, X[:0]), (plain, X[:1]), (two, (X, Y)), (two, {"x": X, "ids": Y})]
    for posterior, batch in [*kinds, (two, {"x": X, "ids": Y, "labels": Y})]:
        with torch.no_grad():
            called = posterior(batch)
        assert torch.equal(posterior.predict(batch).probs, called)
        assert np.array_equal(posterior.predict_proba(batch), called.numpy())
        assert torch.equal(next(iter(posterior.predict_batches(batch))).probs, called)


def test_keyword_arguments_are_a_batch():
    batch = {"x": X.float(), "ids": Y}
    posterior = fit([WithIds()], [batch | {"labels": Y}])
    assert torch.equal(posterior(**batch), posterior(batch))
    assert torch.equal(posterior(inputs=batch), posterior(batch))


def test_indices_in_a_tuple_are_an_argument_and_no_labels():
    posterior = fit(WithIds(), [((X, Y), Y)])
    assert not torch.equal(posterior.predict((X, Y)).probs, posterior.predict((X, Y.roll(1))).probs)
    assert posterior.confidence_bound((X, Y)).shape == (24,)
    with pytest.raises(DataError, match="positional argument"):
        fit(pair()).predict((X, Y))


def test_loader_equals_the_call(make):
    posterior = make(pair())
    for loader in (LOADER, [[X, Y]], [(X, Y)], iter(LOADER), [X[:10], X[10:]], [{"input": X, "labels": Y}]):
        torch.testing.assert_close(posterior.predict(loader).probs, posterior(X), rtol=1e-12, atol=1e-12)
    for batch in ([X, Y], [X]):
        with pytest.raises(DataError, match="expected one batch, got a list"):
            posterior(batch)


@pytest.mark.parametrize("link", LINKS)
def test_empty_batch_gives_an_empty_prediction(structure, link):
    posterior = fit(pair(), structure=structure, link=link)
    prediction = posterior.predict(X[:0]).computed()
    assert len(prediction) == 0
    assert list(prediction) == []
    assert posterior(X[:0]).shape == prediction.probs.shape == (0, 3)
    for field in ("label", "confidence", "entropy", "mutual_information", "ood_score", "aleatoric", "distance"):
        assert getattr(prediction, field).shape == (0,)


@pytest.mark.parametrize("link", LINKS)
def test_features_and_outputs_give_what_is_predicted(structure, link):
    posterior = fit(pair(), structure=structure, link=link)
    read = posterior.read(LOADER, "loader", labelled=True)
    rows = read.rows_at()
    actual = posterior.predict_from_features(rows.phi, rows.outputs)
    expected = posterior.predict(X)
    for field in FIELDS:
        torch.testing.assert_close(getattr(actual, field), getattr(expected, field), rtol=1e-10, atol=1e-12)
    assert posterior.tune(read, rule="nll").prior_precision == posterior.tune(LOADER, rule="nll").prior_precision


def test_loader_may_reuse_its_memory():
    """Bias-free heads on raw inputs: the features are the loader's own memory."""

    def again():
        buffer = torch.empty(12, 5)
        labels = torch.empty(12, dtype=torch.long)
        for x, y in ((X[:12], Y[:12]), (X[12:], Y[12:])):
            yield buffer.copy_(x), labels.copy_(y)

    def results(loader):
        posterior = fit(nets, loader())
        prediction = posterior.predict(loader())
        yield from (posterior(X), prediction.mutual_information, prediction.ood_score, prediction.logit_mean)
        yield torch.tensor(posterior.tune(loader(), rule="nll", progress=False).prior_precision)
        yield posterior.reweight(loader(), progress=False).weights

    nets = [nn.Linear(5, 3, bias=False), nn.Linear(5, 3, bias=False)]
    for actual, expected in zip(results(again), results(lambda: [(X[:12], Y[:12]), (X[12:], Y[12:])]), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# --- a prediction as a sequence ---------------------------------------------------------------------------------------

TARGETS = torch.stack([X[:, 0], X[:, 1].sin(), X[:, 2]], 1) + 0.1 * X[:, 2:]
KINDS = {
    "classes": (3, Y, "categorical", (*FIELDS, "label", "confidence", "entropy", "aleatoric", "epistemic")),
    "labels": (3, (TARGETS > 0).long(), "bernoulli", (*FIELDS, "label", "confidence", "entropy", "aleatoric")),
    "binary": (1, (TARGETS[:, 0] > 0).long(), "bernoulli", (*FIELDS, "label", "confidence")),
    "regression": (3, TARGETS, "gaussian", ("mean", "std", "variance", "within", "between", "ood_score", "distance")),
}


@pytest.fixture(params=KINDS)
def kind(request):
    outputs, labels, likelihood, fields = KINDS[request.param]
    nets = pair(outputs)
    return fit(nets, [(X, labels)], [(X, labels)], rule="nll", likelihood=likelihood), fields


def rows(prediction, field, index):
    return getattr(prediction, field)[index]


def close(first, second):
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-11)


def test_a_slice_equals_predicting_the_slice(kind):
    posterior, fields = kind
    whole = posterior.predict(X)
    for index in (slice(3, 9), slice(None), slice(20, 3), slice(None, None, 5), slice(-4, None)):
        part = whole[index]
        alone = posterior.predict(X[index])
        assert len(part) == len(alone) == len(X[index])
        for field in fields:
            close(getattr(part, field), getattr(alone, field))
            close(getattr(part, field), rows(whole, field, index))


def test_indexing_iteration_and_length(kind):
    posterior, fields = kind
    prediction = posterior.predict(X)
    assert len(prediction) == 24
    for index in (0, 5, -1):
        assert len(prediction[index]) == 1
        close(getattr(prediction[index], fields[0]), getattr(prediction, fields[0])[index][None])
    singles = list(prediction)
    assert len(singles) == 24
    close(torch.cat([getattr(single, fields[0]) for single in singles]), getattr(prediction, fields[0]))
    mask = torch.arange(24) % 4 == 0
    for chosen in ([2, 0, 7], torch.tensor([2, 0, 7]), mask):
        for field in fields:
            close(getattr(prediction[chosen], field), rows(prediction, field, chosen))
    for index in (24, -25):
        with pytest.raises(IndexError, match=r"out of range.*24 inputs"):
            prediction[index]


def test_batches_joined_equal_one_batch(kind):
    posterior, fields = kind
    whole = posterior.predict(X)
    parts = [posterior.predict(some) for some in X.split([7, 1, 16])]
    for joined in (posterior.predict(list(X.split(5))), type(whole).concatenate(parts)):
        assert len(joined) == 24
        for field in fields:
            close(getattr(joined, field), getattr(whole, field))
    assert [len(part) for part in posterior.predict_batches(list(X.split(10)))] == [10, 10, 4]


def test_fields_as_numpy(kind):
    posterior, fields = kind
    prediction = posterior.predict(X)
    arrays = prediction.numpy()
    assert set(fields) <= set(arrays)
    for field, array in arrays.items():
        assert isinstance(array, np.ndarray)
        np.testing.assert_array_equal(array, getattr(prediction, field).numpy())


def test_copies_hold_the_same_values(kind):
    posterior, fields = kind
    prediction = posterior.predict(LOADER)
    for twin in (pickle.loads(pickle.dumps(prediction)), copy.deepcopy(prediction), prediction.cpu()):
        for field in (*fields, "ood_score"):
            assert torch.equal(getattr(twin, field), getattr(prediction, field)), field


@pytest.mark.parametrize("name", KINDS)
def test_a_frame_has_one_row_per_input(name):
    pytest.importorskip("pandas")
    outputs, labels, likelihood, _ = KINDS[name]
    prediction = fit(pair(outputs), [(X, labels)], likelihood=likelihood).predict(X)
    frame = prediction.to_frame()
    assert len(frame) == 24
    fields = ("mean", "std") if name == "regression" else ("label", "confidence", "entropy", "probs")
    for field in (*fields, "aleatoric", "epistemic", "ood_score", "distance"):
        values = getattr(prediction, field).reshape(24, -1).numpy()
        names = (
            [field] if values.shape[1] == 1 and field != "probs" else [f"{field}_{k}" for k in range(values.shape[1])]
        )
        np.testing.assert_array_equal(frame[[name.replace("probs", "prob") for name in names]], values)


# --- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", [*STRUCTURES, None])
def test_what_happens_afterwards_does_not_matter(structure):
    """Inputs overwritten, networks trained on or moved, other modes of torch: fields are those of the prediction."""
    nets = [nn.Linear(5, 3, bias=False), network(1)]  # the features of the first are the inputs themselves
    weights = torch.tensor([0.3, 0.7])
    posterior = mola.ensemble(nets) if structure is None else fit(nets, structure=structure)
    posterior = posterior.with_weights(weights)
    inputs = X.clone()
    expected = posterior.predict(inputs).computed()
    prediction = posterior.predict(inputs)
    inputs.zero_()
    weights.zero_()
    for net in nets:
        for parameter in net.parameters():
            parameter.data.add_(1)
    posterior.float()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        for field in FIELDS:
            after = getattr(prediction, field)
            before = getattr(expected, field)
            assert after is before is None or torch.equal(after, before), field


# --- precisions and devices -------------------------------------------------------------------------------------------


def test_moving_the_network_takes_the_posterior_along():
    net = network().float()
    posterior = fit(net, [(X.float(), Y)])
    expected = posterior(X.float())
    net.double()
    assert posterior(X).dtype == posterior.predict(X).probs.dtype == torch.float64
    assert_close(posterior(X), expected)
    posterior.to(torch.bfloat16)
    torch.testing.assert_close(posterior(X.bfloat16()), expected, rtol=0.1, atol=0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_moving_to_a_gpu_and_back(structure):
    posterior = fit(pair(), structure=structure)
    expected = posterior.predict(X).computed()
    for device in ("cuda", "cpu"):
        posterior.to(device)
        assert posterior(X.to(device)).device.type == device
        actual = posterior.predict(X)
        for field in FIELDS:
            torch.testing.assert_close(getattr(actual, field), getattr(expected, field), rtol=1e-8, atol=1e-10)
