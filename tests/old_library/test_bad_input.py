"""Bad input: a clear error that says what was expected, what came and what to do, and nothing changed."""

import itertools
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import mola
from mola import DataError, HeadError, MolaError, OptionError, StorageError, StructureTooLargeError
from tests.witness import unchanged

X = torch.randn(20, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(20) % 3
SIZES = [6, 1, 8, 5]
LOADER = list(zip(X.split(SIZES), Y.split(SIZES), strict=True))
NAN, INF = math.nan, math.inf


def make_network(width=4, classes=3):
    layers = nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes)
    return nn.Sequential(*layers).double().train()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """Two networks in train mode, a posterior on each and on both, an ensemble, and a folder saved earlier."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        networks = [make_network(), make_network(6)]
    posterior = mola.fit(networks, LOADER)
    folder = posterior.save(tmp_path_factory.mktemp("saved") / "posterior")
    return SimpleNamespace(
        networks=networks,
        network=networks[0],
        posterior=posterior,
        one=mola.fit(networks[0], LOADER),
        unlabelled=mola.fit(networks[0], [x for x, _ in LOADER]),
        ensemble=mola.ensemble(networks),
        folder=folder,
    )


def refuse(scene, action, kind, words):
    """The action fails with these words, and changes neither the networks, nor the posterior, nor the files."""
    files, precisions, weights = (
        contents(scene.folder),
        scene.posterior.prior_precision,
        scene.posterior.weights.clone(),
    )
    with unchanged(*scene.networks), pytest.raises(kind, match=f"(?s){words}") as caught:
        action(scene)
    assert isinstance(caught.value, MolaError)
    assert contents(scene.folder) == files
    assert scene.posterior.prior_precision == precisions
    assert torch.equal(scene.posterior.weights, weights)
    mola.load(scene.folder, scene.networks)


def changed(at, x=None, y=None):
    """The loader with the inputs or the labels of batch `at` replaced."""
    return [((x(a) if x else a), (y(b) if y else b)) if i == at else (a, b) for i, (a, b) in enumerate(LOADER)]


def put(value, row=0):
    def place(tensor):
        tensor = tensor.clone()
        tensor[row] = value
        return tensor

    return place


# --- options ------------------------------------------------------------------------------------------------------------

NAMES = r"one of kron, kron-exact, kron-diag, diag, full, or a Structure object; got "
LINKS = r"one of probit, probit-centered, mean-field, bridge, mc, or a Link object; got "


class Elsewhere(torch.Generator):
    """A generator on a card, which this machine need not have."""

    device = torch.device("cuda")


OPTIONS = {
    "unknown structure": (lambda s: mola.fit(s.network, LOADER, structure="kfac"), rf"{NAMES}.*'kfac'"),
    "structure of a wrong case": (lambda s: mola.fit(s.network, LOADER, structure="Kron"), rf"{NAMES}.*'Kron'"),
    "structure None": (lambda s: mola.fit(s.network, LOADER, structure=None), rf"{NAMES}.*None"),
    "structure as a class": (lambda s: mola.fit(s.network, LOADER, structure=mola.Kron), rf"{NAMES}.*Kron"),
    "one structure for each": (lambda s: mola.fit(s.networks, LOADER, structure=["kron", "diag"]), rf"{NAMES}.*diag"),
    "unknown link": (lambda s: mola.fit(s.network, LOADER, link="logit"), rf"{LINKS}.*'logit'"),
    "link as a class": (lambda s: mola.fit(s.network, LOADER, link=mola.Probit), rf"{LINKS}.*Probit"),
    "list of links": (lambda s: mola.fit(s.networks, LOADER, link=["mc", "mc"]), rf"{LINKS}.*mc"),
    "unknown link afterwards": (lambda s: s.posterior.with_link("softmax"), rf"{LINKS}.*'softmax'"),
    "lambda 0": (lambda s: mola.fit(s.network, LOADER, prior_precision=0), r"prior_precision.*above 0.*got 0"),
    "lambda that float32 cannot hold": (
        lambda s: mola.fit(s.network, LOADER, prior_precision=1e-60),
        r"between 1e-30 and 1e\+30, got 1e-60",
    ),
    "lambda too large afterwards": (lambda s: s.posterior.with_prior_precision(1e40), r"between 1e-30 .*got 1e\+40"),
    "lambda below 0": (lambda s: mola.fit(s.network, LOADER, prior_precision=-1.5), r"above 0.*got -1\.5"),
    "lambda NaN": (lambda s: mola.fit(s.network, LOADER, prior_precision=NAN), r"finite.*got nan"),
    "lambda infinite": (lambda s: mola.fit(s.network, LOADER, prior_precision=INF), r"finite.*got inf"),
    "one lambda of two is 0": (lambda s: mola.fit(s.networks, LOADER, prior_precision=[1, 0]), r"above 0.*got 0"),
    "three lambdas for two": (lambda s: mola.fit(s.networks, LOADER, prior_precision=[1, 2, 3]), r"or 2 of them.*got 3"),
    "no lambda": (lambda s: mola.fit(s.networks, LOADER, prior_precision=[]), r"or 2 of them.*got 0"),
    "lambda as a word": (lambda s: mola.fit(s.network, LOADER, prior_precision="auto"), r"prior_precision.*'auto'"),
    "lambda None": (lambda s: mola.fit(s.network, LOADER, prior_precision=None), r"prior_precision.*None"),
    "lambda 0 afterwards": (lambda s: s.posterior.with_prior_precision(0.0), r"above 0.*got 0"),
    "lambda count afterwards": (lambda s: s.posterior.with_prior_precision([1.0]), r"or 2 of them.*got 1"),
    "weights sum to 0.9": (lambda s: s.posterior.with_weights([0.4, 0.5]), r"sum to 1.*\[0\.4, 0\.5\].*0\.9.*Divide"),
    "weights not normalised": (lambda s: mola.fit(s.networks, LOADER, weights=[1, 1]), r"sum to 1.*with sum 2"),
    "negative weight": (lambda s: s.posterior.with_weights([1.5, -0.5]), r"not negative.*-0\.5"),
    "NaN weight": (lambda s: s.posterior.with_weights([NAN, 1.0]), r"finite.*nan"),
    "infinite weight": (lambda s: s.posterior.with_weights([INF, 0.0]), r"finite.*inf"),
    "three weights for two": (lambda s: s.posterior.with_weights([0.2, 0.3, 0.5]), r"expected 2 numbers.*got 3"),
    "weights of a wrong name": (
        lambda s: mola.fit(s.networks, LOADER, weights="equal"),
        r"uniform, evidence, or numbers .*'equal'",
    ),
    "stacking without data": (lambda s: mola.fit(s.networks, LOADER, weights="stacking"), r"reweight\(val_loader\)"),
    "weights None": (lambda s: s.posterior.with_weights(None), r"weights.*None"),
    "weights as words": (lambda s: s.posterior.with_weights(["a", "b"]), r"weights.*'a'"),
    "evidence weights without labels": (
        lambda s: mola.fit(s.network, [X], weights="evidence"),
        r"evidence needs training labels.*\(inputs, labels\)",
    ),
    "ensemble by evidence": (lambda s: mola.ensemble(s.networks, weights="evidence"), r"needs curvature.*mola\.fit"),
    "ensemble weights": (lambda s: mola.ensemble(s.networks, weights=[0.5, 0.6]), r"sum to 1"),
    "no models": (lambda s: mola.fit([], LOADER), r"non-empty list"),
    "models None": (lambda s: mola.fit(None, LOADER), r"nn\.Module.*None"),
    "models a path": (lambda s: mola.fit("model.pt", LOADER), r"nn\.Module.*name of a file, 'model\.pt'"),
    "models functions": (lambda s: mola.fit([torch.relu], LOADER), r"nn\.Module.*builtin"),
    "models classes": (lambda s: mola.fit([nn.Linear], LOADER), r"nn\.Module.*type"),
    "one model of two is none": (lambda s: mola.fit([s.network, None], LOADER), r"nn\.Module.*Sequential, NoneType"),
    "models and loader exchanged": (lambda s: mola.fit(LOADER, s.network), r"nn\.Module.*tuple"),
    "empty ensemble": (lambda s: mola.ensemble([]), r"non-empty list"),
    "two names for one head": (lambda s: mola.fit(s.network, LOADER, head=["3", "3"]), r"or 1 of them.*got 2"),
    "tune an ensemble": (lambda s: s.ensemble.tune(LOADER), r"tuning.*needs curvature.*plain ensemble.*mola\.fit"),
    "evidence of an ensemble": (lambda s: s.ensemble.log_evidence(), r"evidence needs curvature.*mola\.fit"),
    "sample an ensemble": (lambda s: s.ensemble.sample(2), r"sampling weights needs curvature.*mola\.fit"),
    "precision of an ensemble": (lambda s: s.ensemble.with_prior_precision(2.0), r"needs curvature.*mola\.fit"),
    "save an ensemble": (lambda s: s.ensemble.save(s.folder), r"saving.*needs curvature.*mola\.fit"),
    "bridge on an ensemble": (lambda s: s.ensemble.with_link("bridge")(X), r"'bridge' needs a covariance.*'probit'"),
    "bridge on an ensemble, predict": (lambda s: s.ensemble.with_link("bridge").predict(X), r"needs a covariance"),
    "evidence without labels": (lambda s: s.unlabelled.log_evidence(), r"needs training labels.*\(inputs, labels\)"),
    "tune by evidence without labels": (lambda s: s.unlabelled.tune(rule=mola.Evidence()), r"needs training labels"),
    "tune by evidence with data": (lambda s: s.posterior.tune(LOADER, mola.Evidence()), r"training data alone"),
    "tune without data": (lambda s: s.posterior.tune(), r"ConfidenceThreshold needs validation data.*val_loader"),
    "score without data": (lambda s: s.posterior.tune(rule=mola.ValidationScore()), r"needs validation data"),
    "unknown score": (lambda s: mola.ValidationScore("accuracy"), r"one of nll, brier, ece, crps; got 'accuracy'"),
    "grid with 0": (lambda s: s.posterior.tune(LOADER, mola.ValidationScore(grid=[0, 1])), r"grid.*above 0.*\[0, 1\]"),
    "empty grid": (lambda s: s.posterior.tune(LOADER, mola.ValidationScore(grid=[])), r"grid.*\[\]"),
    "no draws": (lambda s: mola.MonteCarlo(samples=0), r"at least 1, got 0"),
    "draws over what": (lambda s: mola.MonteCarlo(over="inputs"), r"logits, weights; got 'inputs'"),
    "running average of 1": (lambda s: mola.Kron(running_average=1.0), r"between 0 and 1.*got 1\.0"),
    "bytes for a prior precision": (lambda s: s.posterior.with_prior_precision(b"12"), r"above 0, got b'12'"),
    "no samples": (lambda s: s.posterior.sample(-1), r"-1"),
    "generator of another device": (
        lambda s: s.posterior.predict(X, generator=Elsewhere()),
        r"generator must be on the CPU.*cuda",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_cannot_be_used(name, scene):
    refuse(scene, OPTIONS[name][0], OptionError, OPTIONS[name][1])


BEFORE_READING = {
    "structure": {"structure": "kfac"},
    "link": {"link": "logit"},
    "prior precision": {"prior_precision": 0},
    "count of prior precisions": {"prior_precision": [1, 2, 3]},
    "weights that do not sum to 1": {"weights": [0.5, 0.6]},
    "count of weights": {"weights": [1.0]},
    "name of weights": {"weights": "equal"},
    "count of heads": {"head": ["3"]},
}


@pytest.mark.parametrize("name", BEFORE_READING)
def test_options_are_checked_before_an_hour_of_reading(name, scene):
    def loader():
        pytest.fail("the data were read before the options were checked")
        yield

    with pytest.raises(OptionError):
        mola.fit(scene.networks, loader(), **BEFORE_READING[name])


NUMBERS = [1, 1.0, np.float32(1), np.int64(1), np.array(1.0), torch.tensor(1.0), [1, 1], np.ones(2), torch.ones(2)]


@pytest.mark.parametrize("value", NUMBERS, ids=[f"{type(value).__name__} {value}" for value in NUMBERS])
def test_any_number_is_a_prior_precision(value, scene):
    """Scalars of numpy and torch come out of every grid search."""
    posterior = mola.fit(scene.networks, LOADER, prior_precision=value)
    assert posterior.prior_precision == (1.0, 1.0)
    assert scene.posterior.with_prior_precision(value).prior_precision == (1.0, 1.0)


WEIGHTS = [(0.25, 0.75), [0.25, 0.75], np.array([0.25, 0.75]), torch.tensor([0.25, 0.75], requires_grad=True)]


@pytest.mark.parametrize("value", WEIGHTS, ids=lambda value: type(value).__name__)
def test_any_numbers_are_weights(value, scene):
    assert scene.posterior.with_weights(value).weights.tolist() == [0.25, 0.75]


# --- data ---------------------------------------------------------------------------------------------------------------

FIT = {
    "empty loader": (lambda: [], r"training loader is empty: it yielded no batch"),
    "used-up generator": (lambda: used_up(), r"training loader is empty.*read before.*pass the loader itself"),
    "no loader": (lambda: None, r"training loader: expected an iterable of batches, got NoneType"),
    "a tensor for a loader": (lambda: X, r"training loader: expected an iterable of batches.*Tensor.*\[\(x, y\)\]"),
    "a batch for a loader": (lambda: (X, Y), r"training loader: expected an iterable of batches.*\[\(x, y\)\]"),
    "first batch empty": (lambda: changed(0, x=lambda x: x[:0], y=lambda y: y[:0]), r"batch 0 of .*size 0.*Remove"),
    "later batch empty": (lambda: changed(2, x=lambda x: x[:0], y=lambda y: y[:0]), r"batch 2 of .*size 0.*Remove"),
    "NaN input": (lambda: changed(2, x=put(NAN, 3)), r"batch 2 of the training loader.*NaN or infinite.* 1 of 8 "),
    "NaN in the first batch": (lambda: changed(0, x=put(NAN, slice(2))), r"batch 0 of .*NaN.* 2 of 6 "),
    "infinite input": (lambda: changed(3, x=put(INF)), r"batch 3 of the training loader.*NaN or infinite.* 1 of 5 "),
    "label too large": (lambda: changed(3, y=put(3)), r"batch 3 of .*\[0, 2\].*3 outputs.*to 3"),
    "label below 0": (lambda: changed(1, y=put(-1)), r"batch 1 of .*\[0, 2\].*from -1"),
    "ignored label": (lambda: changed(2, y=put(-100)), r"batch 2 of .*from -100.*ignore-index"),
    "labels from 1": (lambda: [(x, y + 1) for x, y in LOADER], r"batch 0 of .*\[0, 2\].*to 3"),
    "float labels": (lambda: changed(2, y=lambda y: y.double()), r"batch 2 of .*integer.*float64.*labels\.long\(\)"),
    "boolean labels": (lambda: changed(0, y=lambda y: y > 0), r"batch 0 of .*integer.*bool"),
    "one-hot labels": (
        lambda: changed(0, y=lambda y: nn.functional.one_hot(y, 3)),
        r"batch 0 of .*6 class indices.*\(6, 3\).*not one-hot",
    ),
    "column of labels": (lambda: changed(2, y=lambda y: y[:, None]), r"batch 2 of .*8 class indices.*\(8, 1\)"),
    "too few labels": (lambda: changed(2, y=lambda y: y[:7]), r"batch 2 of .*8 class indices.*\(7,\)"),
    "one label": (lambda: changed(2, y=lambda y: y[0]), r"batch 2 of .*8 class indices.*\(\)"),
    "names for labels": (lambda: changed(2, y=lambda y: ["a"] * len(y)), r"batch 2 of .*labels must be .*list"),
    "labels missing later": (lambda: changed(2, y=lambda y: None), r"batch 2 of .*has no labels, unlike"),
    "labels missing at first": (lambda: changed(0, y=lambda y: None), r"batch 1 of .*has labels, unlike"),
    "three parts": (lambda: [(X, X, Y)], r"batch 0 of .*tuple of length 3.*\(\(first, second\), labels\)"),
    "numbers for batches": (lambda: [1, 2], r"batch 0 of .*got int"),
    "words": (lambda: "ab", r"batch 0 of .*got str"),
    "wrong width": (lambda: [(X[:, :4], Y)], r"Sequential failed on inputs of shape \(20, 4\) and type float64"),
    "wrong width later": (lambda: changed(2, x=lambda x: x[:, :4]), r"batch 2 of .*shape \(8, 4\)"),
    "wrong type": (lambda: [(X.float(), Y)], r"Sequential failed on inputs of shape \(20, 5\) and type float32"),
    "integers": (lambda: [(X.long(), Y)], r"Sequential failed on inputs of shape \(20, 5\) and type int64"),
    "arrays": (lambda: [(X.numpy(), Y.numpy())], r"Sequential failed on inputs of type ndarray"),
}  # fmt: skip


def used_up():
    batches = iter(LOADER)
    list(batches)
    return batches


@pytest.mark.parametrize("name", FIT)
def test_training_data_that_cannot_be_used(name, scene):
    make, words = FIT[name]
    refuse(scene, lambda s: mola.fit(s.networks, make()), DataError, words)


HELD_OUT = [name for name in FIT if name.split()[0] not in ("no", "labels", "wrong", "arrays", "integers")]
HELD_OUT += ["labels from 1", "labels missing later"]


@pytest.mark.parametrize("name", HELD_OUT)
@pytest.mark.parametrize("how", ["tune", "reweight", "score", "fit"])
def test_validation_data_that_cannot_be_used(name, how, scene):
    make, words = FIT[name]
    words = words.replace("training", "validation").replace(
        "batch 2 of .*has no labels, unlike", "batch 2 of .*no labels"
    )
    actions = {
        "tune": lambda s: s.posterior.tune(make()),
        "reweight": lambda s: s.posterior.reweight(make()),
        "score": lambda s: s.posterior.tune(make(), mola.ValidationScore("nll")),
        "fit": lambda s: mola.fit(s.networks, LOADER, make()),
    }
    if name == "labels missing at first":
        words = "batch 0 of .*no labels"
    refuse(scene, actions[how], DataError, words)


def test_validation_needs_labels_where_the_rule_needs_them(scene):
    inputs = [x for x, _ in LOADER]
    for action in (
        lambda s: s.posterior.tune(inputs),
        lambda s: s.posterior.reweight(inputs),
        lambda s: s.posterior.tune(inputs, mola.ValidationScore("ece")),
        lambda s: s.posterior.tune(inputs, mola.OutlierExposure(inputs)),
        lambda s: s.posterior.tune(inputs, mola.ConfidenceThreshold(confidence=0.4, brier=0.7)),
    ):
        refuse(scene, action, DataError, r"batch 0 of the validation loader has no labels.*\(inputs, labels\)")
    rule = mola.ConfidenceThreshold(confidence=0.35)
    with warnings.catch_warnings(action="ignore", category=mola.MolaWarning):
        assert scene.posterior.tune(inputs, rule).prior_precision == scene.posterior.tune(LOADER, rule).prior_precision


def test_outliers_that_cannot_be_used(scene):
    for loader, words in (([], "outlier loader is empty"), (changed(1, x=put(NAN)), "batch 1 of the outlier loader")):
        refuse(scene, lambda s, loader=loader: s.posterior.tune(LOADER, mola.OutlierExposure(loader)), DataError, words)


PREDICT = {
    "wrong width": (lambda: X[:, :4], r"Sequential failed on inputs of shape \(20, 4\) and type float64.*trained on"),
    "too many dimensions": (lambda: X[:, :, None], r"Sequential failed on inputs of shape \(20, 5, 1\)"),
    "one input without a batch": (lambda: X[0], r"Sequential failed on inputs of shape \(5,\)"),
    "wrong type": (lambda: X.float(), r"Sequential failed on inputs of .*type float32"),
    "integers": (lambda: X.long(), r"Sequential failed on inputs of .*type int64"),
    "two inputs": (
        lambda: (X, X),
        r"Sequential failed on inputs of \(shape \(20, 5\) and type float64, shape \(20, 5\)",
    ),
    "keywords": (lambda: {"image": X}, r"Sequential failed on inputs of \{image: shape \(20, 5\)"),
}


@pytest.mark.parametrize("name", PREDICT)
@pytest.mark.parametrize("who", ["posterior", "ensemble"])
@pytest.mark.parametrize("how", ["call", "predict", "predict_batches", "confidence_bound"])
def test_inputs_that_the_network_cannot_take(name, who, how, scene):
    make, words = PREDICT[name]

    def action(scene):
        predictor = getattr(scene, who)
        output = predictor(make()) if how == "call" else getattr(predictor, how)(make())
        return list(output) if how == "predict_batches" else output

    refuse(scene, action, DataError, words)


LOADERS = {
    "empty": (lambda: [], r"prediction loader is empty"),
    "used-up generator": (used_up, r"prediction loader is empty.*read before"),
    "empty batch": (lambda: changed(2, x=lambda x: x[:0]), r"batch 2 of the prediction loader is empty"),
    "NaN": (lambda: changed(2, x=put(NAN, slice(1, 4))), r"batch 2 of the prediction loader, models\[0\].*NaN.*3 of 8"),
    "infinite": (lambda: changed(1, x=put(INF)), r"batch 1 of the prediction loader, models\[0\].*infinite.*1 of 1"),
    "NaN in one tensor": (lambda: put(NAN, 7)(X), r"models\[0\].*NaN.*1 of 20"),
    "a number": (lambda: 3, r"prediction loader: expected an iterable of batches, got int"),
    "nothing": (lambda: None, r"prediction loader: expected an iterable of batches, got NoneType"),
    "words": (lambda: "abc", r"batch 0 of the prediction loader.*got str"),
    "an array": (lambda: X.numpy(), r"prediction loader.*ndarray"),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("who", ["posterior", "ensemble"])
def test_loaders_that_cannot_be_predicted(name, who, scene):
    make, words = LOADERS[name]
    refuse(scene, lambda s: getattr(s, who).predict(make()), DataError, words)


def test_a_failure_that_only_one_network_has_is_laid_at_its_door(scene):
    other = nn.Sequential(nn.Linear(4, 3)).double()
    for action in (
        mola.ensemble([scene.network, other]).predict,
        lambda loader: mola.fit([scene.network, other], loader),
    ):
        refuse(scene, lambda s, action=action: action(LOADER), DataError, r"models\[1\].*shape \(6, 5\)")


def test_nan_that_only_one_network_makes_is_laid_at_its_door(scene):
    broken = make_network()
    broken[3].bias.data[1] = NAN
    with unchanged(broken):
        refuse(scene, lambda s: mola.fit([s.network, broken], LOADER), DataError, r"batch 0 of .*models\[1\].*logits")
        refuse(
            scene, lambda s: mola.ensemble([s.network, broken]).predict(LOADER), DataError, r"batch 0 of .*models\[1\]"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_overflow_is_named_in_half_precision_only(dtype, scene):
    network = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False))
    nn.init.constant_(network[0].weight, 60.0)
    nn.init.constant_(network[1].weight, 60.0)
    network.to(dtype)
    loader = [(X[:4].to(dtype), Y[:4]), (torch.full((2, 5), 100).to(dtype), Y[:2])]  # features 3e4, logits 7.2e6
    if dtype == torch.float16:
        with unchanged(network), pytest.raises(DataError, match=r"batch 1 .*infinite for 2 of 2.*float16.*bfloat16"):
            mola.fit(network, loader)
    else:
        assert bool(torch.isfinite(mola.fit(network, loader).predict(loader).probs).all())


def test_an_ensemble_of_differing_numbers_of_classes_says_so(scene):
    ensemble = mola.ensemble([scene.network, make_network(classes=4)])
    for predict in (ensemble, ensemble.predict):
        refuse(scene, lambda s, predict=predict: predict(X), MolaError, r"same number of classes, got \[3, 4\]")


ENSEMBLE = {
    "one logit": (nn.Linear(5, 1), r"at least 2 classes"),
    "3-d": (nn.Sequential(nn.Linear(5, 6), nn.Unflatten(1, (2, 3))), r"\(batch, classes\).*\(20, 2, 3\)"),
    "1-d": (nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), r"\(batch, classes\).*\(20,\)"),
}


@pytest.mark.parametrize("name", ENSEMBLE)
def test_an_ensemble_of_what_is_no_classifier_is_refused(name, scene):
    network, words = ENSEMBLE[name]
    refuse(scene, lambda s: mola.ensemble([s.network, network.double()]).predict(X), HeadError, words)


# --- size, sums, folders ------------------------------------------------------------------------------------------------


def test_a_full_hessian_that_would_not_fit_says_how_large_it_would_be(scene):
    wide = nn.Linear(20000, 100)  # 2e6 weights: 4e12 entries, 32 TB
    loader = itertools.repeat((torch.randn(2, 20000), torch.tensor([0, 1])))  # endless: it must not be read
    with unchanged(wide), pytest.raises(StructureTooLargeError, match=r"2000100 x 2000100") as caught:
        mola.fit(wide, loader, structure="full")
    message = str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert "100 x 20001 weights" in message
    assert f"{8 * 2000100**2 / 1e9:.2f} GB" in message
    assert "'kron'" in message
    assert "'diag'" in message
    assert f"{8 * (20001**2 + 100**2) / 1e9:.3f} GB" in message


def test_the_memory_allowed_decides():
    needed = 5 * 8 * (5 * 3) ** 2  # the Hessian, its eigenvectors and the solver's workspace
    network = nn.Linear(4, 3)
    loader = [(X[:, :4], Y)]
    mola.fit(network, loader, structure=mola.Full(memory=needed))
    with pytest.raises(StructureTooLargeError, match=r"15 x 15.*free"):
        mola.fit(network, loader, structure=mola.Full(memory=needed - 1))


def test_many_hessians_together_may_not_fit_either():
    """Eight sums of 15 x 15 are alive at once: more than one of them with its solver's workspace."""
    networks = [nn.Linear(4, 3) for _ in range(8)]
    with unchanged(*networks), pytest.raises(StructureTooLargeError, match=r"8 (networks|models|components)"):
        mola.fit(networks, [(X[:, :4], Y)], structure=mola.Full(memory=5 * 8 * 15**2))


def test_running_averages_do_not_add_up(scene):
    structure = mola.Kron(running_average=0.9)
    posteriors = [mola.fit(scene.network, loader, structure=structure) for loader in (LOADER, LOADER[:2])]
    factors = [posterior.components[0].curvature.factors for posterior in posteriors]
    refuse(scene, lambda s: factors[0] + factors[1], OptionError, r"order of the batches.*without running_average")
    exact = mola.fit(scene.network, LOADER).components[0].curvature.factors
    for first, second in ((exact, factors[0]), (factors[0], exact)):
        with pytest.raises((TypeError, OptionError)):
            first + second


def test_factors_of_different_structures_do_not_add_up(scene):
    factors = [
        mola.fit(scene.network, LOADER, structure=name).components[0].curvature.factors for name in ("kron", "diag")
    ]
    with pytest.raises(TypeError, match="unsupported operand"):
        factors[0] + factors[1]


def test_a_posterior_on_another_network(scene):
    other = make_network()
    words = r"models\[0\]: the weights of head '3' are not those.*fitted on"
    refuse(scene, lambda s: mola.load(s.folder, [other, s.networks[1]]), StorageError, words)
    words = r"models\[0\].*\(3, 7, True\).*\(3, 5, True\)"
    refuse(scene, lambda s: mola.load(s.folder, [s.networks[1], s.networks[0]]), StorageError, words)
    words = r"2 components, got 1 model: pass the 2 networks that it was fitted on, in the same order"
    refuse(scene, lambda s: mola.load(s.folder, s.networks[0]), StorageError, words)


def test_errors_of_a_kind_can_be_caught_by_the_built_in_that_fits():
    kinds = {OptionError: ValueError, DataError: ValueError, HeadError: ValueError, StorageError: ValueError}
    kinds |= {StructureTooLargeError: MemoryError, mola.MissingExtraError: ImportError, mola.BoundError: ValueError}
    for kind, builtin in kinds.items():
        assert issubclass(kind, builtin)
        assert issubclass(kind, MolaError)


def test_a_head_that_was_trained_further_is_noticed():
    network = make_network()
    posterior = mola.fit(network, LOADER)
    posterior.predict(X)
    with torch.no_grad():
        network[3].weight += 0.1
    for use in (posterior, posterior.predict, posterior.confidence_bound):
        with pytest.raises(mola.HeadError, match=r"models\[0\].*changed since.*Fit again"):
            use(X)


def test_an_ensemble_of_networks_with_a_softmax_is_refused():
    with pytest.raises(mola.HeadError, match=r"probabilities already.*logits"):
        mola.ensemble(nn.Sequential(make_network(), nn.Softmax(1))).predict(X)


def test_a_batch_of_a_loader_goes_in_a_list():
    posterior = mola.fit(make_network(), LOADER)
    for batch in ([X, Y], (X, Y)):
        assert torch.equal(posterior.predict([batch]).probs, posterior.predict(X).probs)
        with pytest.raises(mola.DataError):
            posterior.predict(batch)


@pytest.mark.parametrize("arguments", [(LOADER, 0.9), (LOADER, mola.Evidence), (mola.Evidence(),)], ids=str)
def test_what_is_no_rule_is_refused(arguments):
    posterior = mola.fit(make_network(), LOADER)
    with pytest.raises(mola.OptionError, match=r"one of threshold, nll, .* such as mola\.Evidence\(\)"):
        posterior.tune(*arguments)


@pytest.mark.parametrize("options", [{"confidence": 95}, {"confidence": 0}, {"brier": -1}], ids=str)
def test_thresholds_out_of_range_are_refused(options):
    with pytest.raises(mola.OptionError, match="must lie between"):
        mola.ConfidenceThreshold(**options)


def test_an_array_for_a_tensor_is_told_where_to_go():
    with pytest.raises(mola.DataError, match="predict_proba"):
        mola.fit(make_network(), LOADER).predict(X.numpy())


@pytest.mark.parametrize("count", [1, 3])
def test_small_batches_are_gathered_for_the_full_hessian(count, monkeypatch):
    """However small the batches, the Hessian is written once for a few hundred rows."""
    calls = []
    original = mola.Full.sums
    monkeypatch.setattr(mola.Full, "sums", lambda self, *args: calls.append(1) or original(self, *args))
    small = [(x[None], y[None]) for x, y in zip(X, Y, strict=True)]
    networks = [make_network()] * count
    found = mola.fit(networks, small, structure="full")
    assert len(calls) == count
    torch.testing.assert_close(found(X), mola.fit(networks, [(X, Y)], structure="full")(X))


def ends_in_softmax(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(dropout), nn.Linear(8, 4), nn.Softmax(1)).eval()


@pytest.mark.parametrize(
    "use",
    [
        lambda loader: mola.ensemble(ends_in_softmax())(loader[0][0]),
        lambda loader: mola.Swag.fit(ends_in_softmax(), loader, epochs=2, progress=False),
        lambda loader: mola.multi_swag([ends_in_softmax()], loader, epochs=2, progress=False),
        lambda loader: mola.fit_whole(ends_in_softmax(), loader, structure="diag", progress=False),
        lambda loader: mola.McDropout(ends_in_softmax(0.3))(loader[0][0]),
        lambda loader: mola.temperature_scaled(ends_in_softmax(), loader),
    ],
    ids=["ensemble", "swag", "multi-swag", "whole", "dropout", "temperature"],
)
def test_probabilities_are_not_taken_for_logits(use):
    inputs, labels = torch.randn(20, 3), torch.randint(4, (20,))
    with pytest.raises(mola.HeadError, match="probabilities already"):
        use([(inputs, labels)])


def test_logits_of_a_single_input_may_sum_to_1():
    network = nn.Linear(2, 2, bias=False)
    network.weight.data = torch.eye(2)
    inputs = torch.tensor([[0.25, 0.75]])
    torch.testing.assert_close(mola.ensemble(network)(inputs), inputs.softmax(1))


@pytest.mark.parametrize("kind", ["ensemble", "last layer", "whole", "mimo"])
def test_a_single_input_without_its_batch_is_refused(kind):
    torch.manual_seed(0)
    network, inputs, labels = (
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)),
        torch.randn(9, 3),
        torch.arange(9) % 4,
    )
    loader = [(inputs, labels)]
    predictor = {
        "ensemble": lambda: mola.ensemble(network),
        "last layer": lambda: mola.fit(network, loader, progress=False),
        "whole": lambda: mola.fit_whole(network, loader, structure="diag", progress=False),
        "mimo": lambda: mola.Mimo(network, 2, example=inputs[:2]),
    }[kind]()
    for use in (predictor, predictor.predict):
        with pytest.raises((mola.HeadError, mola.DataError), match=r"inputs\[None\]"):
            use(inputs[0])


def test_what_cannot_be_validation_data_is_refused_before_the_pass():
    class Unread:
        def __iter__(self):
            raise AssertionError

    with pytest.raises(mola.DataError, match="the validation loader: expected an iterable of batches, got int"):
        mola.fit(nn.Linear(3, 4), Unread(), 5, progress=False)


def test_a_batch_of_nan_leaves_a_mimo_as_it_was():
    inputs, labels = torch.randn(9, 3), torch.arange(9) % 4
    mimo = mola.Mimo(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)), 2, example=inputs[:2])
    before = [parameter.clone() for parameter in mimo.parameters()]
    with pytest.raises(mola.DataError, match="the inputs hold NaN"):
        mimo.fit([(inputs * torch.nan, labels)], epochs=1, progress=False)
    assert all(torch.equal(*pair) for pair in zip(before, mimo.parameters(), strict=True))
    with pytest.raises(mola.OptionError, match=r"model: expected one nn\.Module"):
        mola.Mimo([nn.Linear(3, 4)], 2, example=inputs[:2])
