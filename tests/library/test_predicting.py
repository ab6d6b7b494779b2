"""Laws of predicting: what a batch is, predictions as sequences and tables, uncertainty, precisions, devices and threads."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import mola
from mola.errors import DataError, HeadError, MolaError, OptionError
from mola.likelihoods import CATEGORICAL, Gaussian
from mola.links import LINKS
from mola.uncertainty import MOST_DRAWS, _entropy_limit, entropy, epistemic_share, softmax_and_entropy
from tests.conftest import STRUCTURES

pytestmark = pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")

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
        self.table, self.head = nn.Embedding(3, 5), nn.Linear(5, 3)

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
    plain, two = make(pair()), make([WithIds()], [((X, Y), Y)])
    kinds = [(plain, X), (plain, (X,)), (plain, X[:0]), (plain, X[:1]), (two, (X, Y)), (two, {"x": X, "ids": Y})]
    for posterior, batch in [*kinds, (two, {"x": X, "ids": Y, "labels": Y})]:
        called = posterior(batch)
        assert torch.equal(posterior.predict(batch).probs, called)
        assert np.array_equal(posterior.predict_proba(batch), called.numpy())
        assert torch.equal(next(iter(posterior.predict_batches(batch))).probs, called)


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
    assert "0 inputs" in repr(prediction)


@pytest.mark.parametrize("link", LINKS)
def test_features_and_outputs_give_what_is_predicted(structure, link):
    posterior = fit(pair(), structure=structure, link=link)
    read = posterior.read(LOADER, "loader", labelled=True)
    found, expected = posterior.predict_from_features(read.phi, read.outputs), posterior.predict(X)
    for field in FIELDS:
        torch.testing.assert_close(getattr(found, field), getattr(expected, field), rtol=1e-10, atol=1e-12)
    assert posterior.tune(read, rule="nll").prior_precision == posterior.tune(LOADER, rule="nll").prior_precision


def test_loader_may_reuse_its_memory():
    """Bias-free heads on raw inputs: the features are the loader's own memory."""

    def again():
        buffer, labels = torch.empty(12, 5), torch.empty(12, dtype=torch.long)
        for x, y in ((X[:12], Y[:12]), (X[12:], Y[12:])):
            yield buffer.copy_(x), labels.copy_(y)

    def results(loader):
        posterior = fit(nets, loader())
        prediction = posterior.predict(loader())
        yield from (posterior(X), prediction.mutual_information, prediction.ood_score, prediction.logit_mean)
        yield torch.tensor(posterior.tune(loader(), rule="nll", progress=False).prior_precision)
        yield posterior.reweight(loader(), progress=False).weights

    nets = [nn.Linear(5, 3, bias=False), nn.Linear(5, 3, bias=False)]
    for one, other in zip(results(again), results(lambda: [(X[:12], Y[:12]), (X[12:], Y[12:])]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# --- a prediction as a sequence ---------------------------------------------------------------------------------------

TARGETS = torch.stack([X[:, 0], X[:, 1].sin(), X[:, 2]], 1) + 0.1 * X[:, 2:]
KINDS = {
    "classes": (3, Y, "categorical", (*FIELDS, "label", "confidence", "entropy", "aleatoric", "epistemic")),
    "labels": (3, (TARGETS > 0).long(), "bernoulli", (*FIELDS, "label", "confidence", "entropy", "aleatoric")),
    "binary": (1, (TARGETS[:, 0] > 0).long(), "bernoulli", (*FIELDS, "label", "confidence")),
    "regression": (3, TARGETS, "gaussian", ("mean", "std", "variance", "within", "between", "ood_score", "distance")),
}
MEMBERS_FIRST = ("logit_mean", "logit_variance")


@pytest.fixture(params=KINDS)
def kind(request):
    outputs, labels, likelihood, fields = KINDS[request.param]
    nets = pair(outputs)
    return fit(nets, [(X, labels)], [(X, labels)], rule="nll", likelihood=likelihood), fields


def rows(prediction, field, index):
    values = getattr(prediction, field)
    return values[:, index] if field in MEMBERS_FIRST else values[index]


def close(first, second):
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-11)


def test_a_slice_equals_predicting_the_slice(kind):
    posterior, fields = kind
    whole = posterior.predict(X)
    for index in (slice(3, 9), slice(None), slice(20, 3), slice(None, None, 5), slice(-4, None)):
        part, alone = whole[index], posterior.predict(X[index])
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
    each = list(prediction)
    assert len(each) == 24
    close(torch.cat([getattr(one, fields[0]) for one in each]), getattr(prediction, fields[0]))
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


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "cpu", "torch"])
def test_copies_hold_the_same_values(kind, how):
    posterior, fields = kind
    prediction = posterior.predict(LOADER)
    if how == "torch":
        buffer = io.BytesIO()
        torch.save(prediction, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    else:
        ways = {"pickle": lambda one: pickle.loads(pickle.dumps(one)), "deepcopy": copy.deepcopy}
        twin = ways.get(how, lambda one: one.cpu())(prediction)
    for field in fields:
        assert torch.equal(getattr(twin, field), getattr(prediction, field)), field
    assert twin.ood_score_name == prediction.ood_score_name
    assert repr(twin) == repr(prediction)


def test_a_prediction_cannot_be_changed(kind):
    posterior, fields = kind
    prediction = posterior.predict(X)
    for field in (fields[0], "ood_score", "anything"):
        with pytest.raises(AttributeError, match="cannot be changed"):
            setattr(prediction, field, X)


COLUMNS = {
    "classes": ["label", "confidence", "entropy", "epistemic", "aleatoric", "ood_score", "distance", "prob_0", "prob_1", "prob_2"],
    "binary": ["label", "confidence", "entropy", "epistemic", "aleatoric", "ood_score", "distance", "prob_0"],
    "labels": [f"{name}_{label}" for name in ("label", "confidence", "entropy", "epistemic", "aleatoric") for label in range(3)]
    + ["ood_score", "distance", "prob_0", "prob_1", "prob_2"],
    "regression": [f"{name}_{output}" for name in ("mean", "std", "aleatoric", "epistemic") for output in range(3)]
    + ["ood_score", "distance"],
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_frame_has_one_row_per_input(name):
    pytest.importorskip("pandas")
    outputs, labels, likelihood, _ = KINDS[name]
    prediction = fit(pair(outputs), [(X, labels)], likelihood=likelihood).predict(X)
    frame = prediction.to_frame()
    assert list(frame.columns) == COLUMNS[name]
    assert len(frame) == 24
    np.testing.assert_array_equal(frame["ood_score"], prediction.ood_score.numpy())
    column = "mean_1" if name == "regression" else "prob_0"
    values = prediction.mean[:, 1] if name == "regression" else prediction.probs[:, 0]
    np.testing.assert_array_equal(frame[column], values.numpy())


def test_frames_of_one_output_and_of_ensembles():
    pytest.importorskip("pandas")
    single = fit(network(0, classes=1), [(X, TARGETS[:, 0])], likelihood="gaussian").predict(X)
    assert list(single.to_frame().columns) == ["mean", "std", "aleatoric", "epistemic", "ood_score", "distance"]
    plain = mola.ensemble(pair()).predict(X).to_frame()
    assert "distance" not in plain.columns  # unknown without training data
    assert "prob_2" in plain.columns


# --- fields -----------------------------------------------------------------------------------------------------------


def test_the_order_of_reading_does_not_matter(structure):
    posterior = fit(pair(), structure=structure)
    expected = posterior.predict(X).computed()
    for order in itertools.permutations(("mutual_information", "ood_score", "logit_variance")):
        prediction = posterior.predict(X)
        for field in order:
            assert torch.equal(getattr(prediction, field), getattr(expected, field))


@pytest.mark.parametrize("structure", [*STRUCTURES, None])
def test_what_happens_afterwards_does_not_matter(structure):
    """Inputs overwritten, networks trained on or moved, other modes of torch: fields are those of the prediction."""
    nets = [nn.Linear(5, 3, bias=False), network(1)]  # the features of the first are the inputs themselves
    posterior = mola.ensemble(nets) if structure is None else fit(nets, structure=structure)
    inputs = X.clone()
    expected, prediction = posterior.predict(inputs).computed(), posterior.predict(inputs)
    inputs.zero_()
    for net in nets:
        for parameter in net.parameters():
            parameter.data.add_(1)
    posterior.float()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        for field in FIELDS:
            one, other = getattr(prediction, field), getattr(expected, field)
            assert one is other is None or torch.equal(one, other), field


def test_fields_beyond_the_memory_limit_are_computed_at_once(monkeypatch):
    posterior = fit(pair())
    expected = posterior.predict(LOADER)
    monkeypatch.setattr("mola.mixture.KEPT_BYTES", 1)
    found = posterior.predict(LOADER)
    for field in FIELDS:
        assert torch.equal(getattr(found, field), getattr(expected, field))


def test_unread_fields_cost_nothing(monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr("mola.posterior.epistemic_share", never)
    posterior = fit(pair(), LOADER, LOADER, rule="nll").reweight(LOADER)
    prediction = posterior.predict(LOADER)[3:9]
    posterior.predict_proba(LOADER)
    assert prediction.label.shape == prediction.entropy.shape == (6,)
    with pytest.raises(AssertionError):
        prediction.epistemic  # noqa: B018


# --- the epistemic share ----------------------------------------------------------------------------------------------


def shares(structure, classes, scale, precision, draws=4000):
    """Errors of the library's shares and of as many random draws, from very many draws, and the shares."""
    torch.manual_seed(classes)
    inputs, labels, net = torch.randn(300, 12), torch.randint(classes, (300,)), nn.Linear(12, classes)
    with torch.no_grad():
        net.weight.mul_(scale)
    posterior = fit(net, [(inputs, labels)], structure=structure, prior_precision=precision)
    phi = torch.cat([inputs[:12], torch.ones(12, 1)], 1)
    mean, spread = net(inputs[:12]).detach(), posterior.components[0].spread(phi)

    def by_draws(count, seed):
        noise = torch.randn(count, spread.noise_size, generator=torch.Generator().manual_seed(seed))
        mixed, within = torch.zeros(12, classes), torch.zeros(12)
        for part in noise.split(250):
            probs = torch.softmax(mean[:, None] + spread.perturb(part), -1)
            mixed += probs.sum(1) / count
            within += torch.special.entr(probs).sum((1, 2)) / count
        return 1 - within / torch.special.entr(mixed).sum(1)

    truth, one = by_draws(draws, 99), torch.ones(1)
    found = torch.stack([epistemic_share(CATEGORICAL, [mean], [spread], one, seed) for seed in range(6)])
    random = torch.stack([by_draws(MOST_DRAWS, seed) for seed in range(6)])
    return *(float((one - truth).square().mean().sqrt()) for one in (found, random)), truth


@pytest.mark.parametrize("precision", [100.0, 1.0, 0.05], ids=["narrow", "usual", "wide"])
@pytest.mark.parametrize("scale", [0.5, 8.0], ids=["unsure", "sure"])
@pytest.mark.parametrize("classes", [2, 5, 100])
def test_epistemic_share_is_as_accurate_as_64_random_draws(classes, scale, precision):
    error, of_random_draws, _ = shares("kron", classes, scale, precision)
    assert error < 1.15 * of_random_draws + 1e-3


@pytest.mark.parametrize("structure", [name for name in STRUCTURES if name != "full"])
def test_epistemic_share_of_many_classes_is_close_with_few_draws(structure):
    error, _, truth = shares(structure, 300, 1.0, 1.0, draws=2000)
    assert error < 0.05
    assert 0.05 < float(truth.mean()) < 0.95


def test_entropy_limit_continues_the_series():
    """Of draws that are each certain of another class, the mean of S has the entropy log S, and that of all log C."""
    quarters = torch.eye(64)[:16].view(4, 4, 64).mean(1)[None]
    assert math.log(16) + math.log(2) < float(_entropy_limit(quarters)) < math.log(16) + 3 * math.log(2)
    same = torch.softmax(torch.randn(5, 1, 7), -1).expand(-1, 4, -1)
    torch.testing.assert_close(_entropy_limit(same), torch.special.entr(same[:, 0]).sum(-1), rtol=1e-12, atol=0)


def test_entropy_keeps_its_digits_near_certainty():
    for margin in (0.0, 1.0, 20.0, 40.0, 300.0):
        logits = torch.tensor([[margin, 0.0, -1.0]])
        rest = torch.tensor([-margin, -margin - 1]).exp()  # relative to the largest
        exact = torch.log1p(rest.sum()) + (rest * torch.tensor([margin, margin + 1])).sum() / (1 + rest.sum())
        probs, found = softmax_and_entropy(logits)
        torch.testing.assert_close(found[0], exact, rtol=1e-13, atol=0)
        torch.testing.assert_close(entropy(probs)[0], exact, rtol=1e-12, atol=0)


# --- precisions and devices -------------------------------------------------------------------------------------------


def test_heads_compute_in_float64_whatever_the_network(structure):
    """Features of a float32 network, exactly as they are, under a float64 head."""
    net = network(0).float()
    inputs = X.float()
    posterior = fit(net, [(inputs, Y)], structure=structure, prior_precision=1e-8)
    head = copy.deepcopy(net[2]).double()
    phi = net[:2](inputs).detach().double()
    exact = fit(nn.Sequential(head), [(phi, Y)], structure=structure, prior_precision=1e-8)
    found, expected = posterior.predict(inputs), exact.predict(phi)
    assert found.probs.dtype == found.mutual_information.dtype == found.logit_variance.dtype == torch.float32
    for field in ("probs", "logit_variance", "distance", "ood_score"):
        one, other = getattr(found, field).double(), getattr(expected, field)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    layer = posterior.components[0].layer
    assert all(tensor.dtype == torch.float64 for tensor in (*layer.sums.tensors.values(), layer.weights))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_networks(structure, dtype):
    exact = fit(pair(), structure=structure)
    coarse = fit([net.to(dtype) for net in pair()], [(X.to(dtype), Y)], structure=structure)
    prediction = coarse.predict(X.to(dtype))
    assert prediction.probs.dtype == prediction.entropy.dtype == torch.float32
    torch.testing.assert_close(prediction.probs.double(), exact(X), rtol=0.1, atol=0.05)
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(24, dtype=torch.float32))


@pytest.mark.parametrize("bias", [True, False])
def test_half_precision_networks_under_the_other_autocast(bias):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3, bias=bias)).half()
    inputs = X.half()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        posterior = fit(net, [(inputs, Y)])
        prediction = posterior.predict(inputs)
        assert torch.equal(posterior(inputs), prediction.probs)
        assert posterior.tune([(inputs, Y)], rule="nll", progress=False)(inputs).isfinite().all()
    assert prediction.mutual_information.dtype == torch.float32
    torch.testing.assert_close(fit(net, [(inputs, Y)])(inputs), prediction.probs, rtol=0.1, atol=0.02)


def test_autocast_rounds_the_network_alone(structure):
    nets = [net.float() for net in pair()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        posterior = fit(nets, [(X.float(), Y)], structure=structure)
        prediction = posterior.predict(X.float()).computed()
        outputs = [net(X.float()).float() for net in nets]
    torch.testing.assert_close(prediction.logit_mean, torch.stack(outputs).detach())
    exact = fit(nets, [(X.float(), Y)], structure=structure).predict(X.float())
    torch.testing.assert_close(prediction.probs, exact.probs, rtol=0.05, atol=0.02)


def test_moving_the_network_takes_the_posterior_along():
    net = network().float()
    posterior = fit(net, [(X.float(), Y)])
    expected = posterior(X.float())
    net.double()
    assert posterior(X).dtype == posterior.predict(X).probs.dtype == torch.float64
    torch.testing.assert_close(posterior(X).float(), expected, rtol=1e-5, atol=1e-6)
    posterior.to(torch.bfloat16)
    torch.testing.assert_close(posterior(X.bfloat16()), expected, rtol=0.1, atol=0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_moving_to_a_gpu_and_back(structure):
    posterior = fit(pair(), structure=structure)
    expected = posterior.predict(X).computed()
    for device in ("cuda", "cpu"):
        posterior.to(device)
        assert posterior(X.to(device)).device.type == device
        found = posterior.predict(X)
        for field in FIELDS:
            torch.testing.assert_close(getattr(found, field), getattr(expected, field), rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("normalise", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_weight_normalised_heads(normalise):
    plain, net = network(0), network(0)
    net[2] = normalise(net[2])
    torch.testing.assert_close(fit(net)(X), fit(plain)(X))
    optimiser = torch.optim.SGD(net.parameters(), 0.5)
    nn.functional.cross_entropy(net(X), Y).backward()
    optimiser.step()
    posterior = fit(net)  # with the weight of the next pass, not of the last
    torch.testing.assert_close(posterior.with_prior_precision(1e20)(X), net(X).detach().softmax(1))


def test_networks_and_inputs_without_values_are_named(make):
    posterior = make(pair())
    with pytest.raises(MolaError, match="meta"):
        mola.ensemble(network(0))(X.to("meta"))
    with pytest.raises(MolaError, match="meta device"):
        fit(network(0).to("meta"))
    for net in getattr(posterior, "networks", []):
        net.to("meta")
    if hasattr(posterior, "networks"):
        for use in (posterior, posterior.predict):
            with pytest.raises(MolaError, match="meta device"):
                use(X)


# --- networks as users bring them -------------------------------------------------------------------------------------


def test_compiled_networks_have_the_same_posterior():
    nets = pair()
    compiled = [torch.compile(net, backend="eager") for net in nets]
    expected, found = fit(nets), fit(compiled)
    torch.testing.assert_close(found(X), expected(X), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mola.ensemble(compiled).predict(X).probs, mola.ensemble(nets)(X))
    assert all(not net[2]._forward_hooks for net in nets)


def test_uninitialised_lazy_layers_are_refused_before_the_first_pass():
    class Unread:
        def __iter__(self):
            raise AssertionError

    net = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(3))
    with pytest.raises(DataError, match=r"lazy parameters.*never run"):
        fit(net, Unread())
    assert all(isinstance(parameter, nn.UninitializedParameter) for parameter in net.parameters())
    net(X)
    assert fit(net)(X).shape == (24, 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_scripted_and_quantised_networks_get_the_real_reason():
    scripted = torch.jit.trace(network(0), X)
    with pytest.raises(HeadError, match=r"TorchScript.*Pass the Python module"):
        fit(scripted)
    quantised = torch.ao.quantization.quantize_dynamic(network(0).float(), {nn.Linear}, torch.qint8)
    with pytest.raises(HeadError, match=r"quantised.*Keep the last layer in floating point"):
        fit(quantised, [(X.float(), Y)])


def test_the_network_still_trains_afterwards():
    net = network(0)
    fit(net, LOADER, LOADER, rule="nll").predict(LOADER)
    nn.functional.cross_entropy(net(X), Y).backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_fitted_in_inference_mode_it_works_outside(structure):
    with torch.inference_mode():
        posterior = fit(pair(), structure=structure)
        inside = posterior.predict(X).computed()
    outside = posterior.predict(X)
    for field in FIELDS:
        torch.testing.assert_close(getattr(inside, field), getattr(outside, field))
    assert posterior.tune(rule="evidence").prior_precision[0] > 0


def test_abandoned_predictions_leave_the_networks_alone():
    nets = [net.train() for net in pair()]
    posterior = fit(nets)
    for _ in posterior.predict_batches(list(X.split(5))):
        assert all(net.training for net in nets)
        break
    assert all(module.training for net in nets for module in net.modules())
    assert all(not module._forward_hooks for net in nets for module in net.modules())


# --- threads ----------------------------------------------------------------------------------------------------------


def test_many_threads_predict_at_once(structure):
    posterior = fit([net.eval() for net in pair()], structure=structure)
    batches = [X[: 3 + index] for index in range(12)]
    expected = [posterior(batch) for batch in batches]
    start = threading.Barrier(4)

    def work(thread):
        start.wait()
        return [(index, posterior(batches[index])) for index in range(thread, 12)]

    with ThreadPoolExecutor(4) as pool:
        for index, probs in itertools.chain.from_iterable(pool.map(work, range(4))):
            torch.testing.assert_close(probs, expected[index], rtol=1e-12, atol=1e-12)
    prediction = posterior.predict(LOADER)
    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(lambda _: prediction.mutual_information, range(8))
    assert all(torch.equal(other, first) for other in others)


def test_regression_likelihood_is_kept_by_slices():
    likelihood = Gaussian(location=3.0, scale=2.0)
    prediction = fit(pair(), [(X, 3 + 2 * TARGETS)], likelihood=likelihood).predict(X)
    lower, upper = prediction[2:5].interval(0.8)
    assert torch.equal(lower, prediction.interval(0.8)[0][2:5])
    assert bool((lower < upper).all())
    torch.testing.assert_close(prediction[2:5].log_prob(TARGETS[2:5]), prediction.log_prob(TARGETS)[2:5])
    with pytest.raises(OptionError, match="no class probabilities"):
        fit(pair(), [(X, TARGETS)], likelihood="gaussian").predict_proba(X)
