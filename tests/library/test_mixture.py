"""Mixtures of anything that gives probabilities, the fields of a prediction, and MoLA as a module."""

import copy
import io
import math

import numpy as np
import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, OptionError
from tests.closeness import assert_close
from tests.conftest import STRUCTURES
from tests.library.problems import LOADER, X
from tests.witness import unchanged

LINKS = ["probit", "probit-centred", "mean-field", "bridge", "mc"]

pytestmark = pytest.mark.filterwarnings(
    "ignore:only .* of the labels:molaplace.errors.MolaWarning", "ignore:the prior prec:molaplace.errors.MolaWarning"
)


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


# --- mixtures of predictors -------------------------------------------------------------------------------------------


def sharp(x):
    return torch.softmax(5 * x[:, :3], 1)


def flat(x):
    return torch.full((len(x), 3), 1 / 3, dtype=x.dtype)


def in_numpy(x):
    return torch.softmax(x[:, 2:], 1).numpy()


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
    "numpy": lambda: in_numpy,
    "lists": lambda: lambda x: in_numpy(x).tolist(),
    "object": Classifier,
    "float32": lambda: lambda x: sharp(x).float(),
    "module": Probabilities,
    "MoLA": lambda: mola.fit(three(), LOADER),
    "MAP": lambda: mola.ensemble(make_network()),
    "mixture": lambda: mola.Mixture([sharp, flat], [0.9, 0.1]),
}


def probabilities(predictor, x):
    output = predictor(x)
    return output.detach().double() if isinstance(output, torch.Tensor) else torch.tensor(np.array(output)).double()


@pytest.mark.parametrize("name", PREDICTORS)
def test_mixture_is_the_weighted_mean_of_any_predictors(name):
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
    assert_close(prediction.ood_score, 1 - expected.amax(1))
    assert prediction.ood_score_name == "max-probability"
    assert not prediction.probs.requires_grad
    assert_close(mixture.predict_proba(X.numpy()), expected)


def test_modules_are_registered_evaluated_and_left_as_they_were():
    module = nn.Sequential(make_network(), nn.Softmax(1)).train()
    expected = copy.deepcopy(module).eval()(X).detach()
    mixture = mola.Mixture([module, flat, Classifier()], [0.5, 0.5, 0.0])
    with unchanged(module):
        probs = mixture.predict(X).probs
    torch.testing.assert_close(probs, (expected + flat(X)) / 2, rtol=1e-12, atol=1e-12)
    assert [id(parameter) for parameter in mixture.parameters()] == [id(parameter) for parameter in module.parameters()]
    mixture.float()
    assert module[0][0].weight.dtype == torch.float32


def logits(x):
    return 5 * x[:, :3]


def constant(row):
    return lambda x: torch.tensor(row, dtype=x.dtype).repeat(len(x), 1)


BAD = {
    "no predictor": (lambda: mola.Mixture([]), OptionError, r"one or more callables.*got none"),
    "a function alone": (lambda: mola.Mixture(sharp), OptionError, r"callable"),
    "wrong word": (lambda: mola.Mixture([sharp], "evidence"), OptionError, r"'uniform', or numbers .*; got 'evidence'"),
    "logits": (lambda: mola.Mixture([flat, logits]), DataError, r"predictors\[1\].*mola\.ensemble or mola\.fit"),
    "logarithms": (lambda: mola.Mixture([lambda x: sharp(x).log()]), DataError, r"predictors\[0\].*logits"),
    "sums": (lambda: mola.Mixture([lambda x: sharp(x) / 2]), DataError, r"predictors\[0\].*rows must sum to 1"),
    "NaN": (lambda: mola.Mixture([flat, constant([math.nan] * 3)]), DataError, r"predictors\[1\].*nan"),
    "labels": (lambda: mola.Mixture([lambda x: x.argmax(1)]), DataError, r"\(n, C\).*int64 of shape \(20,\)"),
    "three dimensions": (lambda: mola.Mixture([lambda x: flat(x)[None]]), DataError, r"shape \(1, 20, 3\)"),
    "a prediction": (lambda: mola.Mixture([mola.Mixture([flat]).predict]), DataError, r"predictors\[0\].*Prediction"),
    "other classes": (lambda: mola.Mixture([flat, constant([0.25] * 4)]), DataError, r"same shape.*\(20, 3\), \(20, 4\)"),
    "other rows": (lambda: mola.Mixture([flat, lambda x: flat(x[:7])]), DataError, r"20.*7"),
    "other likelihoods": (
        lambda: mola.Mixture([mola.ensemble(make_network()), mola.ensemble(make_network(), likelihood="bernoulli")]),
        OptionError,
        r"same likelihood.*categorical.*bernoulli",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", ["call", "predict"])
@pytest.mark.parametrize("name", BAD)
def test_what_is_no_mixture_is_refused(name, how):
    make, kind, words = BAD[name]
    with pytest.raises(kind, match=f"(?s){words}"):
        make()(X) if how == "call" else make().predict(X)


# --- predictions ------------------------------------------------------------------------------------------------------


def one_hot(column):
    return lambda x: nn.functional.one_hot((x[:, column] > 0).long(), 3).to(x)


MIXTURES = {f"MoLA {structure}": lambda s=structure: mola.fit(three(), LOADER, structure=s) for structure in STRUCTURES}
MIXTURES |= {f"MoLA {link}": lambda link=link: mola.fit(three(), LOADER, link=link) for link in LINKS}
MIXTURES |= {
    "LLLA": lambda: mola.fit(make_network(), LOADER),
    "scaled": lambda: mola.fit(three(), LOADER).with_temperature(0.7).with_pooling(0.4).with_distance_exponent(1.5),
    "MAP": lambda: mola.ensemble(make_network()),
    "deep ensemble": lambda: mola.ensemble(three(), [0.2, 0.3, 0.5]),
    "functions": lambda: mola.Mixture([sharp, flat, in_numpy], [0.2, 0.3, 0.5]),
    "one-hot functions": lambda: mola.Mixture([one_hot(0), one_hot(1), one_hot(2)], [0.1, 0.2, 0.7]),
    "one certain function": lambda: mola.Mixture([one_hot(0)]),
}


@pytest.fixture(params=MIXTURES)
def mixture(request):
    return MIXTURES[request.param]()


def test_fields_of_a_prediction_agree(mixture):
    prediction = mixture.predict(X)
    probs = prediction.probs
    assert bool((probs >= 0).all())
    torch.testing.assert_close(probs.sum(1), torch.ones(20), rtol=0, atol=1e-12)
    assert torch.equal(prediction.label, probs.argmax(1))
    assert torch.equal(prediction.confidence, probs.amax(1))
    torch.testing.assert_close(prediction.entropy, entropy(probs), rtol=1e-12, atol=1e-12)
    if getattr(mixture, "distance_exponent", 0) == 0:
        assert torch.equal(prediction.epistemic, prediction.mutual_information)
    torch.testing.assert_close(prediction.aleatoric + prediction.epistemic, prediction.entropy, rtol=1e-12, atol=1e-12)
    assert bool((torch.stack([prediction.aleatoric, prediction.epistemic]) >= -1e-15).all())


def test_seeded_draws_are_the_same_through_every_entry(mixture):
    def draw(seed):
        return mixture.predict(X, generator=torch.Generator().manual_seed(seed))

    for field in ("probs", "mutual_information"):
        assert torch.equal(getattr(draw(5), field), getattr(draw(5), field))
    torch.testing.assert_close(
        mixture(X, generator=torch.Generator().manual_seed(5)), draw(5).probs, rtol=1e-14, atol=1e-14
    )
    if isinstance(mixture, mola.MoLA) and mixture.link.name == "mc":
        assert not torch.equal(draw(5).probs, draw(6).probs)


# --- MoLA is a module -------------------------------------------------------------------------------------------------

METHODS = {
    "call": lambda p: p(X),
    "predict": lambda p: p.predict(LOADER).computed(),
    "predict_proba": lambda p: p.predict_proba(X.numpy()),
    "log_evidence": lambda p: p.log_evidence(),
    "sample": lambda p: p.sample(50, generator=torch.Generator().manual_seed(0)),
    "confidence_bound": lambda p: p.confidence_bound(X),
    "eval": lambda p: p.eval(),
    "train": lambda p: p.train(),
    "tune": lambda p: p.tune(LOADER, rule=mola.rules.Threshold(confidence=0.4)),
    "tune by evidence": lambda p: p.tune(rule=mola.rules.Evidence(shared=False)),
    "reweight": lambda p: p.reweight(LOADER),
    "with_prior_precision": lambda p: p.with_prior_precision(3.0)(X),
    "with_weights": lambda p: p.with_weights("evidence")(X),
    "with_link": lambda p: p.with_link("mc")(X),
    "with_temperature": lambda p: p.with_temperature(0.5)(X),
    "with_pooling": lambda p: p.with_pooling(0.0)(X),
    "with_distance_exponent": lambda p: p.with_distance_exponent(3.0, onset=0.5)(X),
    "repr": repr,
    "state_dict": lambda p: p.state_dict(),
}


@pytest.mark.parametrize("structure", ["kron", "full"])
@pytest.mark.parametrize("method", METHODS)
def test_no_method_changes_the_networks_or_the_posterior(method, structure):
    """Not even where reading the head's weight would, as under spectral normalisation in train mode."""
    networks = three()
    nn.utils.parametrizations.spectral_norm(networks[0][4])
    networks[0].train()
    posterior = mola.fit(networks, LOADER, structure=structure)
    before = posterior.predict(X).probs
    precisions = posterior.prior_precision
    weights = posterior.weights.clone()
    link = posterior.link
    with unchanged(*networks):
        METHODS[method](posterior)
    assert (posterior.prior_precision, posterior.link) == (precisions, link)
    assert torch.equal(posterior.weights, weights)
    assert torch.equal(posterior.predict(X).probs, before)


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
        assert structure is None or any(component.head.module is module for module in component.network.modules())
        assert all(component.network is not network for network in networks)
    for parameter in twin.parameters():
        parameter.data.zero_()
    assert torch.equal(posterior.predict(X).probs, expected.probs)


WORK = {
    "probabilities": lambda p: p(X),
    "epistemic": lambda p: p.predict(X).mutual_information,
    "outlier score": lambda p: p.predict(X).ood_score,
    "variance": lambda p: p.predict(X).logit_variance,
    "evidence": lambda p: p.log_evidence(),
    "evidence weights": lambda p: p.with_weights("evidence").weights,
    "stacking": lambda p: p.reweight(LOADER).weights,
    "samples": lambda p: torch.cat([w.flatten() for w in p.sample(5, generator=torch.Generator().manual_seed(1)).weights]),
    "bound": lambda p: p.confidence_bound(X),
    "tuned": lambda p: torch.tensor(p.tune(rule=mola.rules.Evidence(shared=False)).prior_precision, dtype=torch.float64),
    **{link: lambda p, link=link: p.with_link(link)(X) for link in LINKS},
}  # fmt: skip


def test_the_default_type_of_torch_does_not_matter(structure):
    """These tests run with float64 as default; users have float32."""
    networks = three()
    results = []
    for default in (torch.float64, torch.float32):
        torch.set_default_dtype(default)
        posterior = mola.fit(networks, LOADER, structure=structure, prior_precision=0.3)
        results.append({name: work(posterior) for name, work in WORK.items()})
    for name in WORK:
        assert results[1][name].dtype == torch.float64, name
        torch.testing.assert_close(results[1][name], results[0][name], rtol=1e-12, atol=1e-13, msg=name)


def test_a_tuning_describes_the_posterior_that_has_it():
    tuned = mola.fit(three(), LOADER).tune(LOADER, rule=mola.rules.Threshold(confidence=0.4))
    for other in (tuned.with_weights([1, 0, 0]), tuned.with_link("mc"), tuned.with_temperature(0.5)):
        assert other.tuning is None
    assert tuned.reweight(LOADER).tuning is not None
