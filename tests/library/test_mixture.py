"""Mixtures of anything that gives probabilities, what a prediction says, and MoLA as a module."""

import copy
import io
import itertools
import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import mola
from mola import DataError, OptionError
from tests.closeness import assert_close
from tests.witness import unchanged

X = torch.randn(20, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(20) % 3
SIZES = [6, 1, 8, 5]
LOADER = list(zip(X.split(SIZES), Y.split(SIZES), strict=True))
STRUCTURES = ["kron", "kron-exact", "kron-diag", "diag", "full"]
LINKS = ["probit", "probit-centered", "mean-field", "bridge", "mc"]


def make_network(width=4, seed=0, classes=3):
    torch.manual_seed(seed)
    layers = nn.Linear(5, width), nn.BatchNorm1d(width), nn.Dropout(), nn.Tanh(), nn.Linear(width, classes)
    network = nn.Sequential(*layers).double()
    network[1].running_mean.normal_()
    network[4].weight.data *= 3
    return network


def three():
    return [make_network(4, 0), make_network(6, 1).eval(), make_network(3, 2)]


def entropy(probs):
    return -(probs * probs.clamp_min(1e-300).log()).sum(-1)


# --- mixtures of predictors ---------------------------------------------------------------------------------------------

TABLE = torch.softmax(torch.randn(5, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64), 1)


def sharp(x):
    return torch.softmax(5 * x[:, :3], 1)


def flat(x):
    return torch.full((len(x), 3), 1 / 3, dtype=x.dtype)


def in_numpy(x):
    return torch.softmax(x[:, 2:], 1).numpy()


def read_only(x):
    """As arrays of other libraries are: they may be read, not written."""
    values = in_numpy(x)
    values.flags.writeable = False
    return values


def backwards(x):
    return np.ascontiguousarray(in_numpy(x)[:, ::-1])[:, ::-1]


def in_lists(x):
    return in_numpy(x).tolist()


def in_single(x):
    return sharp(x).float()


class Classifier:
    """An object of another library."""

    def __call__(self, x):
        return in_numpy(x)


class Probabilities(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3).double()

    def forward(self, x):
        return torch.softmax(self.layer(x), 1)


PREDICTORS = {
    "function": lambda: sharp,
    "constant": lambda: flat,
    "numpy": lambda: in_numpy,
    "read-only numpy": lambda: read_only,
    "reversed numpy": lambda: backwards,
    "lists": lambda: in_lists,
    "object": Classifier,
    "method": lambda: Classifier().__call__,
    "lambda": lambda: lambda x: sharp(-x),
    "float32": lambda: in_single,
    "module": Probabilities,
    "MoLA": lambda: mola.fit(three(), LOADER),
    "MAP": lambda: mola.ensemble(make_network()),
    "mixture": lambda: mola.Mixture([sharp, flat], [0.9, 0.1]),
}


def probabilities(predictor, x):
    output = predictor(x)
    return output.detach().double() if isinstance(output, torch.Tensor) else torch.tensor(np.array(output)).double()


@pytest.fixture(autouse=True)
def _every_warning_every_time():
    """Some of torch's warnings come once for each process: which test fails must not depend on the order of tests."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_mixture_is_the_weighted_mean_of_any_predictors(name):
    predictors = [PREDICTORS[name](), sharp, flat]
    weights = [0.5, 0.3, 0.2]
    mixture = mola.Mixture(predictors, weights)
    members = [probabilities(predictor, X) for predictor in predictors]
    expected = sum(weight * probs for weight, probs in zip(weights, members, strict=True))
    assert_close(mixture(X), expected)
    prediction = mixture.predict(X)
    assert_close(prediction.probs, expected)
    spread = entropy(expected) - sum(weight * entropy(probs) for weight, probs in zip(weights, members, strict=True))
    assert_close(prediction.mutual_information, spread, "difference")
    assert_close(prediction.ood_score, 1 - expected.max(1).values, "difference")
    assert prediction.ood_score_name == "max-probability"
    assert not prediction.probs.requires_grad
    assert_close(mixture.predict_proba(X.numpy()), expected)


def test_any_sequence_of_predictors_will_do():
    expected = mola.Mixture([sharp, flat])(X)
    assert torch.equal(mola.Mixture((sharp, flat))(X), expected)
    assert torch.equal(mola.Mixture(predictor for predictor in (sharp, flat))(X), expected)
    modules = nn.ModuleList([Probabilities(), Probabilities()])
    torch.testing.assert_close(mola.Mixture(modules)(X), (modules[0](X) + modules[1](X)) / 2)


def test_predicting_with_modules_leaves_them_as_they_were_and_evaluates_them():
    module = nn.Sequential(make_network(), nn.Softmax(1)).train()
    expected = copy.deepcopy(module).eval()(X).detach()
    mixture = mola.Mixture([module, flat])
    with unchanged(module):
        probs = mixture.predict(X).probs
    torch.testing.assert_close(probs, (expected + flat(X)) / 2, rtol=1e-12, atol=1e-12)


def test_a_mixture_of_mixtures_is_a_mixture():
    members = [sharp, flat, in_numpy]
    nested = mola.Mixture([mola.Mixture(members[:2], [0.25, 0.75]), members[2]], [0.4, 0.6])
    torch.testing.assert_close(nested(X), mola.Mixture(members, [0.1, 0.3, 0.6])(X), rtol=1e-12, atol=1e-12)


def test_weights_of_zero_and_one_choose():
    assert torch.equal(mola.Mixture([sharp, flat], [1, 0])(X), sharp(X))
    torch.testing.assert_close(mola.Mixture([sharp, flat], [0, 1]).predict(X).probs, flat(X))


def test_modules_among_the_predictors_are_registered():
    module = Probabilities()
    mixture = mola.Mixture([sharp, module, Classifier()])
    assert [id(parameter) for parameter in mixture.parameters()] == [id(parameter) for parameter in module.parameters()]
    mixture.float()
    assert module.layer.weight.dtype == torch.float32


BAD = {
    "no predictor": (lambda: mola.Mixture([]), OptionError, r"at least one callable"),
    "not callable": (lambda: mola.Mixture([sharp, 3]), OptionError, r"callable"),
    "a function alone": (lambda: mola.Mixture(sharp), OptionError, r"callable"),
    "wrong word": (
        lambda: mola.Mixture([sharp], "evidence"),
        OptionError,
        r"weights must be 'uniform', or numbers .*; got 'evidence'",
    ),
    "weights that do not sum to 1": (lambda: mola.Mixture([sharp, flat], [1, 1]), OptionError, r"sum to 1.*sum 2"),
    "too many weights": (lambda: mola.Mixture([sharp], [0.5, 0.5]), OptionError, r"expected 1 number, .*got 2"),
    "negative": (lambda: mola.Mixture([sharp, flat], [-1, 2]), OptionError, r"not negative"),
    "logits": (
        lambda: mola.Mixture([flat, logits]),
        DataError,
        r"predictors\[1\].*sum to 1.*mola\.ensemble or mola\.fit",
    ),
    "a network": (
        lambda: mola.Mixture([flat, make_network()]),
        DataError,
        r"predictors\[1\].*sum to 1.*mola\.ensemble",
    ),
    "logarithms": (lambda: mola.Mixture([lambda x: sharp(x).log()]), DataError, r"predictors\[0\].*sum to 1.*logits"),
    "below 0": (lambda: mola.Mixture([constant([1.5, -0.5])]), DataError, r"predictors\[0\].*(negative|below 0|-0\.5)"),
    "NaN": (lambda: mola.Mixture([flat, constant([math.nan] * 3)]), DataError, r"predictors\[1\].*nan"),
    "labels": (lambda: mola.Mixture([lambda x: x.argmax(1)]), DataError, r"\(n, C\).*int64 of shape \(20,\)"),
    "integers": (lambda: mola.Mixture([lambda x: x.argmax(1)[:, None]]), DataError, r"int64 of shape \(20, 1\)"),
    "three dimensions": (lambda: mola.Mixture([lambda x: flat(x)[None]]), DataError, r"shape \(1, 20, 3\)"),
    "nothing": (lambda: mola.Mixture([lambda x: None]), DataError, r"predictors\[0\].*NoneType"),
    "a prediction": (lambda: mola.Mixture([mola.Mixture([flat]).predict]), DataError, r"predictors\[0\].*Prediction"),
    "other classes": (
        lambda: mola.Mixture([flat, constant([0.25] * 4)]),
        DataError,
        r"number of classes, got \[3, 4\]",
    ),
    "other rows": (lambda: mola.Mixture([flat, lambda x: flat(x[:7])]), DataError, r"20.*7"),
}


def logits(x):
    return 5 * x[:, :3]


def constant(row):
    return lambda x: torch.tensor(row, dtype=x.dtype).repeat(len(x), 1)


@pytest.mark.parametrize("how", ["call", "predict"])
@pytest.mark.parametrize("name", BAD)
def test_what_is_no_mixture_is_refused(name, how):
    make, kind, words = BAD[name]
    with pytest.raises(kind, match=f"(?s){words}"):
        use(make(), how)


def use(mixture, how):
    return mixture(X) if how == "call" else getattr(mixture, how)(X)


# --- predictions --------------------------------------------------------------------------------------------------------

MIXTURES = {f"MoLA {structure}": lambda s=structure: mola.fit(three(), LOADER, structure=s) for structure in STRUCTURES}
MIXTURES |= {f"MoLA {link}": lambda link=link: mola.fit(three(), LOADER, link=link) for link in LINKS}
MIXTURES |= {
    "LLLA": lambda: mola.fit(make_network(), LOADER),
    "MAP": lambda: mola.ensemble(make_network()),
    "deep ensemble": lambda: mola.ensemble(three(), [0.2, 0.3, 0.5]),
    "functions": lambda: mola.Mixture([sharp, flat, in_numpy], [0.2, 0.3, 0.5]),
    "one-hot functions": lambda: mola.Mixture([one_hot(0), one_hot(1), one_hot(2)], [0.1, 0.2, 0.7]),
    "one function three times": lambda: mola.Mixture([sharp, sharp, sharp], [0.1, 0.2, 0.7]),
    "one certain function": lambda: mola.Mixture([one_hot(0)]),
}


def one_hot(column):
    return lambda x: nn.functional.one_hot((x[:, column] > 0).long(), 3).to(x)


@pytest.fixture(params=MIXTURES)
def mixture(request):
    return MIXTURES[request.param]()


def test_the_fields_of_a_prediction_agree(mixture):
    prediction = mixture.predict(X)
    probs = prediction.probs
    assert len(prediction) == 20
    assert bool((probs >= 0).all())
    torch.testing.assert_close(probs.sum(1), torch.ones(20), rtol=0, atol=1e-12)
    assert torch.equal(prediction.label, probs.argmax(1))
    assert torch.equal(prediction.confidence, probs.max(1).values)
    torch.testing.assert_close(prediction.entropy, entropy(probs), rtol=1e-12, atol=1e-12)
    assert torch.equal(prediction.total, prediction.entropy)
    assert torch.equal(prediction.epistemic, prediction.mutual_information)
    torch.testing.assert_close(prediction.aleatoric + prediction.epistemic, prediction.total, rtol=1e-12, atol=1e-12)
    for part in (prediction.aleatoric, prediction.epistemic, prediction.total):
        assert part.shape == (20,)
        assert bool((part >= 0).all())
        assert bool((part <= math.log(3) + 1e-12).all())


def test_a_prediction_prints_its_size_and_averages(mixture):
    prediction = mixture.predict(X)
    text = repr(prediction)
    assert "20 inputs" in text
    assert "3 classes" in text
    assert f"{float(prediction.confidence.mean()):.3f}" in text
    assert f"{float(prediction.entropy.mean()):.3f}" in text
    assert "tensor" not in text


def test_a_prediction_cannot_be_changed(mixture):
    prediction = mixture.predict(X)
    with pytest.raises(AttributeError):
        prediction.probs = X
    with pytest.raises(AttributeError):
        prediction.label = Y


FIELDS = ["probs", "label", "confidence", "entropy", "mutual_information", "ood_score", "logit_mean", "logit_variance"]


def test_a_loader_and_one_tensor_give_the_same(mixture):
    whole = mixture.predict(X)
    for loader in (LOADER, (x for x, _ in LOADER), [[x] for x, _ in LOADER]):
        parts = mixture.predict(loader)
        for field in FIELDS:
            if getattr(whole, field) is None:
                assert getattr(parts, field) is None
            else:
                torch.testing.assert_close(getattr(parts, field), getattr(whole, field), rtol=1e-10, atol=1e-10)
    sizes = [len(part) for part in mixture.predict_batches(LOADER)]
    assert sizes == SIZES


def test_a_call_a_prediction_and_an_array_are_the_same_numbers(mixture):
    probs = mixture(X)
    torch.testing.assert_close(mixture.predict(X).probs, probs, rtol=1e-14, atol=1e-14)
    array = mixture.predict_proba(X.numpy())
    assert isinstance(array, np.ndarray)
    np.testing.assert_allclose(array, probs.numpy(), rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(mixture.predict_proba(LOADER), probs.numpy(), rtol=1e-12, atol=1e-12)


def test_seeded_draws_are_the_same_bits_through_every_entry(mixture):
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return mixture.predict(X, generator=generator)

    for field in ("probs", "mutual_information"):
        assert torch.equal(getattr(draw(5), field), getattr(draw(5), field))
    if isinstance(mixture, mola.MoLA):
        call = mixture(X, generator=torch.Generator().manual_seed(5))
        torch.testing.assert_close(call, draw(5).probs, rtol=1e-14, atol=1e-14)
        if mixture.link.name == "mc":
            assert not torch.equal(draw(5).probs, draw(6).probs)


def test_a_generator_reaches_the_members_that_draw():
    """An argument that is taken must not be dropped."""
    drawing = mola.fit(three(), LOADER, link="mc")
    mixture = mola.Mixture([drawing, flat], [0.5, 0.5])
    first, again, other = (mixture.predict(X, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(first.probs, again.probs)
    assert not torch.equal(first.probs, other.probs)


def test_mutual_information_of_an_ensemble_is_exact():
    networks = three()
    prediction = mola.ensemble(networks, [0.2, 0.3, 0.5]).predict(X)
    members = [network.eval()(X).detach().softmax(1) for network in networks]
    within = sum(weight * entropy(probs) for weight, probs in zip([0.2, 0.3, 0.5], members, strict=True))
    torch.testing.assert_close(prediction.epistemic, prediction.entropy - within, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(prediction.aleatoric, within, rtol=1e-10, atol=1e-12)
    assert prediction.logit_variance.abs().max() == 0
    assert float(mola.ensemble(networks[0]).predict(X).epistemic.abs().max()) < 1e-12


def test_far_away_the_uncertainty_is_epistemic():
    posterior = mola.fit(make_network(), LOADER, prior_precision=1e-4)
    near = mola.fit(make_network(), LOADER, prior_precision=1e6).predict(X)
    assert float(posterior.predict(X).epistemic.mean()) > 10 * float(near.epistemic.mean())


# --- numpy habits -------------------------------------------------------------------------------------------------------


def test_arrays_of_any_kind_are_taken():
    posterior = mola.fit(make_network(), LOADER)
    expected = posterior.predict_proba(X.numpy())
    read_only = X.numpy().copy()
    read_only.flags.writeable = False
    kinds = {
        "read-only": read_only,
        "column-major": np.asfortranarray(X.numpy()),
        "strided": np.repeat(X.numpy(), 2, axis=0)[::2],
        "reversed": X.numpy()[::-1][::-1],
    }
    for name, array in kinds.items():
        assert_close(posterior.predict_proba(array), expected, "float64", name=name)
    assert_close(posterior.predict_proba(X.numpy().astype(np.float32)), expected)
    assert_close(posterior.predict_proba(X.numpy().astype(">f8")), expected, "float64")


def test_the_array_is_read_in_the_precision_of_the_network():
    posterior = mola.fit(make_network().float(), [(x.float(), y) for x, y in LOADER])
    probs = posterior.predict_proba(X.numpy())
    assert probs.dtype == np.float32
    assert_close(probs, posterior.predict(X.float()).probs)


def test_token_numbers_stay_integers():
    network = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
    tokens = torch.randint(9, (12, 2))
    posterior = mola.fit(network, [(tokens, torch.arange(12) % 3)])
    np.testing.assert_array_equal(posterior.predict_proba(tokens.numpy()), posterior(tokens).numpy())


# --- MoLA is a module ---------------------------------------------------------------------------------------------------

METHODS = {
    "call": lambda p: p(X),
    "predict": lambda p: p.predict(LOADER),
    "predict_proba": lambda p: p.predict_proba(X.numpy()),
    "log_evidence": lambda p: p.log_evidence(),
    "sample": lambda p: p.sample(50, generator=torch.Generator().manual_seed(0)),
    "confidence_bound": lambda p: p.confidence_bound(X),
    "eval": lambda p: p.eval(),
    "train": lambda p: p.train(),
    "tune": lambda p: p.tune(LOADER, mola.ConfidenceThreshold(confidence=0.4)),
    "tune by evidence": lambda p: p.tune(rule=mola.Evidence(shared=False)),
    "reweight": lambda p: p.reweight(LOADER),
    "with_prior_precision": lambda p: p.with_prior_precision(3.0)(X),
    "with_weights": lambda p: p.with_weights("evidence")(X),
    "with_link": lambda p: p.with_link("mc")(X),
    "repr": repr,
    "state_dict": lambda p: p.state_dict(),
}


@pytest.mark.parametrize("structure", ["kron", "full"])
@pytest.mark.parametrize("method", METHODS)
def test_no_method_changes_the_networks_or_the_posterior(method, structure):
    """Also where merely reading the head's weight would, as under spectral normalisation in train mode."""
    networks = three()
    nn.utils.parametrizations.spectral_norm(networks[0][4])
    networks[0].train()
    posterior = mola.fit(networks, LOADER, structure=structure)
    before = posterior.predict(X).probs
    precisions, weights, link = posterior.prior_precision, posterior.weights.clone(), posterior.link
    with unchanged(*networks):
        METHODS[method](posterior)
    assert (posterior.prior_precision, posterior.link) == (precisions, link)
    assert torch.equal(posterior.weights, weights)
    assert torch.equal(posterior.predict(X).probs, before)


def test_the_mode_of_the_posterior_is_its_own():
    networks = three()
    modes = [[module.training for module in network.modules()] for network in networks]
    posterior = mola.fit(networks, LOADER)
    outer = nn.Sequential(posterior)
    expected = posterior.predict(X).probs
    for change in (posterior.eval, posterior.train, outer.eval, outer.train, mola.Mixture([posterior]).eval):
        change()
        assert [[module.training for module in network.modules()] for network in networks] == modes
        assert torch.equal(posterior(X), expected)
    assert posterior.eval() is posterior
    assert not posterior.training
    assert posterior.train().training


@pytest.mark.parametrize("structure", STRUCTURES)
def test_changing_precision_moves_everything_and_loses_nothing(structure):
    posterior = mola.fit(three(), LOADER, structure=structure)
    exact = posterior(X)
    assert exact.dtype == torch.float64
    single = posterior.float()(X.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-5)
    half = posterior.to(torch.bfloat16)(X.bfloat16())
    assert half.dtype == torch.float32  # of probabilities, two digits would not do
    torch.testing.assert_close(half.double(), exact, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_posterior_that_moves_is_made_anew_from_its_curvature(structure, dtype):
    """Not cast from what it was: it gains the digits of float64, and loses none to half precision."""
    posterior = mola.fit(make_network().float(), [(x.float(), y) for x, y in LOADER], structure=structure)
    posterior.predict(X.float())
    posterior.to(dtype)
    fresh = posterior.with_prior_precision(1.0)
    assert torch.equal(posterior.predict(X.to(dtype)).logit_variance, fresh.predict(X.to(dtype)).logit_variance)


def test_a_network_that_its_owner_moves_takes_the_posterior_along():
    network = make_network().float()
    posterior = mola.fit(network, [(x.float(), y) for x, y in LOADER])
    expected = posterior(X.float())
    network.double()
    probs = posterior(X)
    assert probs.dtype == torch.float64
    assert_close(probs, expected)
    assert posterior.predict(X).probs.dtype == torch.float64


@pytest.mark.parametrize("structure", [*STRUCTURES, None])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_whole_and_apart(structure, how):
    networks = three()
    posterior = mola.ensemble(networks) if structure is None else mola.fit(networks, LOADER, structure=structure)
    expected = posterior.predict(X)
    if how == "deepcopy":
        twin = copy.deepcopy(posterior)
    else:
        buffer = io.BytesIO()
        torch.save(posterior, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    for field in ("probs", "mutual_information", "logit_variance"):
        assert torch.equal(getattr(twin.predict(X), field), getattr(expected, field))
    for component in twin.components:
        assert structure is None or any(component.head.layer is module for module in component.network.modules())
        assert all(component.network is not network for network in networks)
    for network in twin.networks:
        for parameter in network.parameters():
            parameter.data.zero_()
    assert torch.equal(posterior.predict(X).probs, expected.probs)
    if structure is None:
        torch.testing.assert_close(twin.predict(X).probs, torch.full((20, 3), 1 / 3))
    else:
        with pytest.raises(mola.HeadError, match="changed since the posterior was fitted"):
            twin.predict(X)


@pytest.mark.export
@pytest.mark.parametrize(("structure", "used"), [("kron", False), ("kron", True), (None, False)])
def test_an_exported_posterior_gives_the_same_for_any_batch_size(structure, used):
    """With the other structures: test_export.py, and for one size test_five_ways.py."""
    networks = three()
    posterior = mola.ensemble(networks) if structure is None else mola.fit(networks, LOADER, structure=structure)
    if used:
        posterior(X)
    with unchanged(*networks):
        program = torch.export.export(posterior.eval(), (X,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    exported = program.module()
    for size in (2, 17, 64):
        inputs = torch.randn(size, 5, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
        torch.testing.assert_close(exported(inputs), posterior(inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.export
def test_a_mixture_of_modules_can_be_exported():
    mixture = mola.Mixture([mola.fit(three(), LOADER), mola.ensemble(make_network()), Probabilities()], [0.5, 0.3, 0.2])
    program = torch.export.export(mixture.eval(), (X,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    inputs = X[:7] + 1
    torch.testing.assert_close(program.module()(inputs), mixture(inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_threads_may_predict_at_once(training):
    """As in a service: none sees another's dropout, and the networks come out as they went in."""
    networks = [make_network(64, seed).train(training) for seed in range(2)]
    posterior = mola.fit(networks, LOADER).eval()
    inputs = X.repeat(20, 1)
    expected = posterior(inputs)
    start = threading.Barrier(4)
    patience = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can

    def work():
        start.wait()
        return [posterior(inputs) for _ in range(6)]

    try:
        with unchanged(*networks), ThreadPoolExecutor(4) as pool:
            answers = [answer.result() for answer in [pool.submit(work) for _ in range(4)]]
    finally:
        sys.setswitchinterval(patience)
    for probs in itertools.chain.from_iterable(answers):
        torch.testing.assert_close(probs, expected, rtol=1e-12, atol=1e-12)


WORK = {
    "probabilities": lambda p: p(X),
    "prediction": lambda p: p.predict(X).mutual_information,
    "outlier score": lambda p: p.predict(X).ood_score,
    "variance": lambda p: p.predict(X).logit_variance,
    "evidence": lambda p: p.log_evidence(),
    "evidence weights": lambda p: p.with_weights("evidence").weights,
    "stacking": lambda p: p.reweight(LOADER).weights,
    "samples": lambda p: torch.cat(
        [w.flatten() for w in p.sample(5, generator=torch.Generator().manual_seed(1)).weights]
    ),
    "bound": lambda p: p.confidence_bound(X),
    "tuned": lambda p: torch.tensor(p.tune(rule=mola.Evidence(shared=False)).prior_precision, dtype=torch.float64),
    **{link: lambda p, link=link: p.with_link(link)(X) for link in LINKS},
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_default_type_of_torch_does_not_matter(structure):
    """These tests run with float64 as default; their users have float32."""
    networks = three()
    results = []
    for default in (torch.float64, torch.float32):
        torch.set_default_dtype(default)
        posterior = mola.fit(networks, LOADER, structure=structure, prior_precision=0.3)
        results.append({name: work(posterior) for name, work in WORK.items()})
    for name in WORK:
        assert results[1][name].dtype == torch.float64, name
        assert torch.equal(results[0][name], results[1][name]), name


def test_new_values_share_the_networks_and_leave_the_old_one_alone():
    networks = three()
    posterior = mola.fit(networks, LOADER)
    before = posterior.predict(X).probs
    others = [
        posterior.with_prior_precision(9.0),
        posterior.with_weights([1, 0, 0]),
        posterior.with_link("mean-field"),
        posterior.tune(LOADER, mola.ConfidenceThreshold(confidence=0.4)),
        posterior.reweight(LOADER),
    ]
    for other in others:
        assert not torch.equal(other.predict(X).probs, before)
        assert all(one is two for one, two in zip(other.networks, networks, strict=True))
        assert torch.equal(posterior.predict(X).probs, before)


def test_an_ensemble_can_be_stacked():
    """Stacking needs no curvature: the better network gets the weight."""
    good, bad = make_network(8, 0), make_network(8, 1)
    labels = good.eval()(X).argmax(1)
    good[4].weight.data *= 5
    stacked = mola.ensemble([bad, good]).reweight([(X, labels)])
    assert float(stacked.weights[1]) > 0.9
    assert float(stacked.weights.sum()) == pytest.approx(1, abs=1e-12)


def test_one_network_many_times_is_one_network():
    network = make_network()
    one = mola.fit(network, LOADER).predict(X)
    many = mola.fit([network] * 4, LOADER).predict(X)
    torch.testing.assert_close(many.probs, one.probs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(many.epistemic, one.epistemic, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(many.ood_score, one.ood_score, rtol=1e-9, atol=1e-12)
