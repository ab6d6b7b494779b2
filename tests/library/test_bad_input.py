"""Wrong use: an error that says what was expected, what came and what to do, and nothing changed."""

import itertools
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import (
    DataError,
    HeadError,
    MolaError,
    MolaWarning,
    OptionError,
    StructureTooLargeError,
)
from tests.conftest import STRUCTURES
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
    """Two networks in train mode, posteriors on them, an ensemble, and a folder saved earlier."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        networks = [make_network(), make_network(6)]
    posterior = mola.fit(networks, LOADER)
    return SimpleNamespace(
        networks=networks,
        network=networks[0],
        posterior=posterior,
        unlabelled=mola.fit(networks[0], [x for x, _ in LOADER]),
        ensemble=mola.ensemble(networks),
        folder=posterior.save(tmp_path_factory.mktemp("saved") / "posterior"),
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


def changed(at, x=None, y=None):
    """The loader with the inputs or the labels of batch `at` replaced."""
    return [((x(a) if x else a), (y(b) if y else b)) if i == at else (a, b) for i, (a, b) in enumerate(LOADER)]


def put(value, row=0):
    def place(tensor):
        tensor = tensor.clone()
        tensor[row] = value
        return tensor

    return place


# --- options ----------------------------------------------------------------------------------------------------------

NAMES = rf"one of {', '.join(STRUCTURES)}, or a Structure object; got "
LINKS = r"one of probit, probit-centred, mean-field, bridge, mc, or a Link object; got "


class Elsewhere(torch.Generator):
    """A generator on a GPU, which this machine need not have."""

    device = torch.device("cuda")


OPTIONS = {
    "unknown structure": (lambda s: mola.fit(s.network, LOADER, structure="kfac"), rf"{NAMES}.*'kfac'"),
    "structure of a wrong case": (lambda s: mola.fit(s.network, LOADER, structure="Kron"), rf"{NAMES}.*'Kron'.*Did you mean 'kron'"),
    "unknown link": (lambda s: mola.fit(s.network, LOADER, link="logit"), rf"{LINKS}.*'logit'"),
    "American link": (lambda s: mola.fit(s.network, LOADER, link="probit-centered"), r"Did you mean 'probit-centred'"),
    "link as a class": (lambda s: mola.fit(s.network, LOADER, link=mola.links.Probit), rf"{LINKS}.*Probit"),
    "link of another likelihood": (lambda s: mola.fit(s.network, LOADER, likelihood="bernoulli", link="bridge"), r"bridge.*bernoulli"),
    "unknown likelihood": (lambda s: mola.fit(s.network, LOADER, likelihood="softmax"), r"one of categorical, bernoulli, gaussian"),
    "lambda 0": (lambda s: mola.fit(s.network, LOADER, prior_precision=0), r"prior_precision.*got 0.*mola\.ensemble"),
    "lambda out of range": (lambda s: mola.fit(s.network, LOADER, prior_precision=1e-60), r"1e-30 and 1e\+30, got 1e-60"),
    "one lambda of two is 0": (lambda s: mola.fit(s.networks, LOADER, prior_precision=[1, 0]), r"between.*got 0"),
    "three lambdas for two": (lambda s: mola.fit(s.networks, LOADER, prior_precision=[1, 2, 3]), r"one value, or 2.*\[1, 2, 3\]"),
    "lambda as a word": (lambda s: mola.fit(s.network, LOADER, prior_precision="auto"), r"prior_precision.*'auto'"),
    "lambda count afterwards": (lambda s: s.posterior.with_prior_precision([1.0]), r"one value, or 2.*\[1\.0\]"),
    "temperature 0": (lambda s: s.posterior.with_temperature(0), r"temperature.*between 0\.001 and 1000, got 0"),
    "pooling above 1": (lambda s: s.posterior.with_pooling(1.5), r"pooling.*between 0 and 1, got 1\.5.*averages their logits"),
    "exponent below 0": (lambda s: s.posterior.with_distance_exponent(-1), r"distance_exponent.*between 0 and 100, got -1"),
    "onset 0": (lambda s: s.posterior.with_distance_exponent(1, onset=0), r"onset.*got 0"),
    "exponent without distances": (
        lambda s: mola.fit(s.network, LOADER, distances=False).with_distance_exponent(1.0), r"distances=False.*distances=True"
    ),
    "exponent of an ensemble": (lambda s: s.ensemble.with_distance_exponent(1.0), r"no distances.*mola\.fit"),
    "distances as a word": (lambda s: mola.fit(s.network, LOADER, distances="yes"), r"distances must be True or False"),
    "noise of classes": (lambda s: s.posterior.with_noise(1.0), r"categorical.*no noise"),
    "weights sum to 0.9": (lambda s: s.posterior.with_weights([0.4, 0.5]), r"sum to 1.*\[0\.4, 0\.5\].*0\.9.*Divide"),
    "negative weight": (lambda s: s.posterior.with_weights([1.5, -0.5]), r"not negative.*-0\.5"),
    "three weights for two": (lambda s: s.posterior.with_weights([0.2, 0.3, 0.5]), r"must be 2 numbers.*got 3"),
    "weights of a wrong name": (lambda s: mola.fit(s.networks, LOADER, weights="equal"), r"uniform, evidence, or numbers .*'equal'"),
    "stacking without data": (lambda s: mola.fit(s.networks, LOADER, weights="stacking"), r"reweight\(val_loader\)"),
    "weights as words": (lambda s: s.posterior.with_weights(["a", "b"]), r"weights.*'a'"),
    "evidence weights without labels": (lambda s: mola.fit(s.network, [X], weights="evidence"), r"evidence needs training labels"),
    "ensemble by evidence": (lambda s: mola.ensemble(s.networks, weights="evidence"), r"plain ensemble.*mola\.fit"),
    "no networks": (lambda s: mola.fit([], LOADER), r"non-empty list.*empty"),
    "networks None": (lambda s: mola.fit(None, LOADER), r"nn\.Module.*None"),
    "networks a path": (lambda s: mola.fit("model.pt", LOADER), r"file name, 'model\.pt'.*load_state_dict"),
    "networks a state dict": (lambda s: mola.fit(s.network.state_dict(), LOADER), r"state dict.*load_state_dict"),
    "one network of two is none": (lambda s: mola.fit([s.network, None], LOADER), r"nn\.Module.*NoneType"),
    "networks and loader exchanged": (lambda s: mola.fit(LOADER, s.network), r"nn\.Module.*tuple"),
    "two names for one head": (lambda s: mola.fit(s.network, LOADER, head=["3", "3"]), r"head.*one value, or 1"),
    "tune an ensemble": (lambda s: s.ensemble.tune(LOADER), r"tuning needs.*plain ensemble.*mola\.fit"),
    "evidence of an ensemble": (lambda s: s.ensemble.log_evidence(), r"evidence needs.*mola\.fit"),
    "sample an ensemble": (lambda s: s.ensemble.sample(2), r"sampling weights needs.*mola\.fit"),
    "precision of an ensemble": (lambda s: s.ensemble.with_prior_precision(2.0), r"needs.*mola\.fit"),
    "bridge on an ensemble": (lambda s: s.ensemble.with_link("bridge")(X), r"'bridge' needs a covariance.*'probit'"),
    "evidence without labels": (lambda s: s.unlabelled.log_evidence(), r"needs training labels.*\(inputs, labels\)"),
    "tune by evidence with data": (lambda s: s.posterior.tune(LOADER, rule=mola.rules.Evidence()), r"only the training data"),
    "tune without data": (lambda s: s.posterior.tune(), r"needs validation data.*val_loader"),
    "unknown rule": (lambda s: s.posterior.tune(LOADER, rule="accuracy"), r"rule must be one of threshold, nll.*'accuracy'"),
    "unknown score": (lambda s: mola.rules.Score("accuracy"), r"one of nll, brier, ece, crps; got 'accuracy'"),
    "regression rule": (lambda s: s.posterior.tune(LOADER, rule="crps"), r"'crps' does not apply to likelihood 'categorical'"),
    "grid with 0": (lambda s: s.posterior.tune(LOADER, rule=mola.rules.Score(grid=[0, 1])), r"grid.*above 0.*\[0, 1\]"),
    "a number for a rule": (lambda s: s.posterior.tune(LOADER, rule=0.9), r"rule must be one of threshold.*Outliers"),
    "a class for a rule": (lambda s: s.posterior.tune(LOADER, rule=mola.rules.Evidence), r"such as mola\.rules\.Outliers"),
    "confidence in per cent": (lambda s: mola.rules.Threshold(confidence=95), r"confidence must lie between 0 and 1.*0\.95"),
    "running average of 1": (lambda s: mola.structures.Kron(running_average=1.0), r"between 0 and 1.*got 1\.0"),
    "no samples": (lambda s: s.posterior.sample(-1), r"-1"),
    "generator of another device": (lambda s: s.posterior.predict(X, generator=Elsewhere()), r"generator must be on the CPU.*cuda"),
    "seed for a generator": (lambda s: s.posterior.predict(X, generator=3), r"torch\.Generator.*got 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_cannot_be_used(name, scene):
    refuse(scene, OPTIONS[name][0], OptionError, OPTIONS[name][1])


def test_options_are_checked_before_the_data_are_read(scene):
    def loader():
        pytest.fail("the data were read before the options were checked")
        yield

    for options in (
        {"structure": "kfac"},
        {"link": "logit"},
        {"likelihood": "softmax"},
        {"prior_precision": 0},
        {"weights": [0.5, 0.6]},
        {"head": ["3"]},
        {"rule": "accuracy"},
        {"rule": "nll"},
        {"positions": 0},
    ):
        with pytest.raises(OptionError):
            mola.fit(scene.networks, loader(), **options)


# --- data -------------------------------------------------------------------------------------------------------------


def used_up():
    batches = iter(LOADER)
    list(batches)
    return batches


def empty(tensor):
    return tensor[:0]


FIT = {
    "empty loader": (lambda: [], r"training loader is empty: it yielded no batch"),
    "used-up generator": (used_up, r"training loader is empty.*read only once.*pass the loader"),
    "no loader": (lambda: None, r"training loader: expected an iterable of batches, got NoneType"),
    "a tensor for a loader": (lambda: X, r"training loader: expected an iterable of batches.*Tensor.*\[\(x, y\)\]"),
    "a batch for a loader": (lambda: (X, Y), r"training loader: expected an iterable of batches.*\[\(x, y\)\]"),
    "first batch empty": (lambda: changed(0, x=empty, y=empty), r"batch 0 of .*size 0.*Remove"),
    "NaN input": (lambda: changed(2, x=put(NAN, 3)), r"batch 2 of the training loader.*NaN or infinite.* 1 of 8 rows.*row 3"),
    "infinite input": (lambda: changed(3, x=put(INF)), r"batch 3 of the training loader.*NaN or infinite.* 1 of 5 "),
    "label too large": (lambda: changed(3, y=put(3)), r"batch 3 of .*\[0, 2\].*3 outputs.*to 3"),
    "ignored label": (lambda: changed(2, y=put(-100)), r"batch 2 of .*from -100.*ignore_index"),
    "labels from 1": (lambda: [(x, y + 1) for x, y in LOADER], r"batch 0 of .*\[0, 2\].*to 3"),
    "float labels": (lambda: changed(2, y=lambda y: y.double()), r"batch 2 of .*integer.*float64.*labels\.long\(\)"),
    "regression targets": (lambda: changed(0, y=lambda y: y + 0.5), r"batch 0 of .*integer.*likelihood='gaussian'"),
    "one-hot labels": (lambda: changed(0, y=lambda y: nn.functional.one_hot(y, 3)), r"batch 0 of .*\(6, 3\).*not one-hot"),
    "column of labels": (lambda: changed(2, y=lambda y: y[:, None]), r"batch 2 of .*8 class indices.*\(8, 1\).*squeeze"),
    "too few labels": (lambda: changed(2, y=lambda y: y[:7]), r"batch 2 of .*8 class indices.*\(7,\)"),
    "names for labels": (lambda: changed(2, y=lambda y: ["a"] * len(y)), r"batch 2 of .*labels must be .*list"),
    "labels missing later": (lambda: changed(2, y=lambda y: None), r"batch 2 of .*has no labels, unlike"),
    "labels missing at first": (lambda: changed(0, y=lambda y: None), r"batch 1 of .*has labels, unlike"),
    "labels alone": (lambda: [{"labels": Y}], r"batch 0 of .*network inputs"),
    "three parts": (lambda: [(X, X, Y)], r"batch 0 of .*tuple of length 3.*\(\(first, second\), labels\)"),
    "numbers for batches": (lambda: [1, 2], r"batch 0 of .*got int"),
    "lists for tensors": (lambda: [X.tolist()], r"batch 0 of .*got list.*torch\.tensor"),
    "words": (lambda: "ab", r"training loader: expected an iterable of batches, got str"),
    "wrong width": (lambda: [(X[:, :4], Y)], r"Sequential failed on inputs of shape \(20, 4\) and type float64"),
    "wrong type": (lambda: [(X.float(), Y)], r"Sequential failed on inputs of shape \(20, 5\) and type float32"),
    "integers": (lambda: [(X.long(), Y)], r"Sequential failed on inputs of shape \(20, 5\) and type int64"),
    "arrays": (lambda: [(X.numpy(), Y.numpy())], r"Sequential failed on inputs of shape.*torch\.from_numpy"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIT)
def test_training_data_that_cannot_be_used(name, scene):
    make, words = FIT[name]
    refuse(scene, lambda s: mola.fit(s.networks, make()), DataError, words)


HELD_OUT = [name for name in FIT if name.split()[0] not in ("no", "labels", "wrong", "arrays", "integers")]
HELD_OUT += ["labels from 1", "labels missing later", "labels missing at first"]
NO_LABELS = {
    "labels missing later": r"batch 2 of .*has no labels",
    "labels missing at first": "batch 0 of .*has no labels",
}


@pytest.mark.parametrize("name", HELD_OUT)
@pytest.mark.parametrize("how", ["tune", "fit"])
def test_validation_data_that_cannot_be_used(name, how, scene):
    make, words = FIT[name]
    actions = {
        "tune": lambda s: s.posterior.tune(make(), rule="nll"),
        "fit": lambda s: mola.fit(s.networks, LOADER, make()),
    }
    refuse(scene, actions[how], DataError, NO_LABELS.get(name, words.replace("training", "validation")))


def test_validation_data_need_labels_where_the_rule_needs_them(scene):
    inputs = [x for x, _ in LOADER]
    for rule in ("threshold", "nll", "distance", mola.rules.Outliers(inputs), mola.rules.Threshold(0.4, brier=0.7)):
        refuse(scene, lambda s, rule=rule: s.posterior.tune(inputs, rule=rule), DataError, "batch 0 .*has no labels")
    refuse(scene, lambda s: s.posterior.reweight(inputs), DataError, "batch 0 of the validation loader has no labels")
    read = scene.posterior.read(inputs, "validation loader", labelled=False)
    refuse(scene, lambda s: s.posterior.reweight(read), DataError, "read without labels")
    rule = mola.rules.Threshold(confidence=0.35)
    with warnings.catch_warnings(action="ignore", category=MolaWarning):
        found, expected = (scene.posterior.tune(data, rule=rule).prior_precision for data in (inputs, LOADER))
    assert found == expected


@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_outliers_that_cannot_be_used(scene):
    for loader, words in (([], "outlier loader is empty"), (changed(1, x=put(NAN)), "batch 1 of the outlier loader")):
        rule = mola.rules.Outliers(loader)
        refuse(scene, lambda s, rule=rule: s.posterior.tune(LOADER, rule=rule), DataError, words)


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_what_is_worth_knowing_warns(scene):
    with pytest.warns(MolaWarning, match=r"1 of 3 classes have no training data \(class 2\)"):
        mola.fit(scene.network, [(X, Y % 2)])


# --- predicting -------------------------------------------------------------------------------------------------------

PREDICT = {
    "wrong width": (lambda: X[:, :4], r"Sequential failed on inputs of shape \(20, 4\) and type float64.*was trained"),
    "too many dimensions": (lambda: X[:, :, None], r"Sequential failed on inputs of shape \(20, 5, 1\)"),
    "one input without a batch": (lambda: X[0], r"Sequential failed on inputs of shape \(5,\)"),
    "wrong type": (lambda: X.float(), r"Sequential failed on inputs of .*type float32"),
    "integers": (lambda: X.long(), r"Sequential failed on inputs of .*type int64"),
    "two inputs": (lambda: (X, X), r"Sequential failed on inputs of \(shape \(20, 5\) and type float64, shape \(20, 5\)"),
    "keywords": (lambda: {"image": X}, r"Sequential failed on inputs of \{image: shape \(20, 5\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", PREDICT)
@pytest.mark.parametrize("who", ["posterior", "ensemble"])
@pytest.mark.parametrize("how", ["call", "predict"])
def test_inputs_that_the_network_cannot_take(name, who, how, scene):
    make, words = PREDICT[name]

    def action(scene):
        predictor = getattr(scene, who)
        return predictor(make()) if how == "call" else predictor.predict(make())

    refuse(scene, action, DataError, rf"networks\[0\].*{words}")


LOADERS = {
    "empty": (lambda: [], r"prediction loader is empty"),
    "used-up generator": (used_up, r"prediction loader is empty.*read only once"),
    "empty batch": (lambda: changed(2, x=empty), r"batch 2 of the prediction loader is empty"),
    "NaN": (
        lambda: changed(2, x=put(NAN, slice(1, 4))),
        r"batch 2 of the prediction loader, networks\[0\].*NaN.*3 of 8",
    ),
    "infinite": (lambda: changed(1, x=put(INF)), r"batch 1 of the prediction loader, networks\[0\].*infinite.*1 of 1"),
    "NaN in one tensor": (lambda: put(NAN, 7)(X), r"networks\[0\].*NaN.*1 of 20"),
    "nothing": (lambda: None, r"prediction loader: expected an iterable of batches, got NoneType"),
    "words": (lambda: "abc", r"prediction loader.*got str"),
    "an array": (lambda: X.numpy(), r"predict_proba"),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("who", ["posterior", "ensemble"])
def test_loaders_that_cannot_be_predicted(name, who, scene):
    make, words = LOADERS[name]
    refuse(scene, lambda s: getattr(s, who).predict(make()), DataError, words)


def test_the_network_that_fails_is_named(scene):
    narrow, broken = nn.Sequential(nn.Linear(4, 3)).double(), make_network()
    broken[3].bias.data[1] = NAN
    words = {narrow: r"networks\[1\].*shape \(6, 5\)", broken: r"batch 0 of .*networks\[1\].*outputs are NaN"}
    for other, expected in words.items():
        pair = [scene.network, other]
        refuse(scene, lambda s, pair=pair: mola.ensemble(pair).predict(LOADER), DataError, expected)
        refuse(scene, lambda s, pair=pair: mola.fit(pair, LOADER), DataError, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_overflow_is_named_in_half_precision(dtype):
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


def test_networks_with_different_numbers_of_classes(scene):
    other = make_network(classes=4)
    refuse(scene, lambda s: mola.fit([s.network, other], LOADER), HeadError, r"same number of outputs.*got \[3, 4\]")
    ensemble = mola.ensemble([scene.network, other])
    for predict in (ensemble, ensemble.predict):
        refuse(scene, lambda s, predict=predict: predict(X), MolaError, r"same shape.*\(20, 3\), \(20, 4\)")


ENSEMBLE = {
    "one logit": (nn.Linear(5, 1), r"at least 2 classes.*bernoulli"),
    "1-d": (nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), r"\(batch, classes\).*\(20,\)"),
    "reshaped": (nn.Sequential(nn.Linear(5, 6), nn.Unflatten(1, (2, 3))), r"\(20, 2, 3\)"),
    "probabilities": (nn.Sequential(nn.Linear(5, 3), nn.Softmax(1)), r"probabilities.*logits"),
}


@pytest.mark.parametrize("name", ENSEMBLE)
def test_an_ensemble_of_what_is_no_classifier_is_refused(name, scene):
    network, words = ENSEMBLE[name]
    refuse(scene, lambda s: mola.ensemble(network.double()).predict(X), HeadError, words)


@pytest.mark.parametrize("kind", ["ensemble", "fitted"])
def test_a_single_input_without_its_batch_is_refused(kind):
    network, inputs = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(9, 3)
    predictor = mola.ensemble(network) if kind == "ensemble" else mola.fit(network, [(inputs, torch.arange(9) % 4)])
    for use in (predictor, predictor.predict):
        with pytest.raises((HeadError, DataError), match=r"inputs\[None\]"):
            use(inputs[0])


# --- size, structures, folders ----------------------------------------------------------------------------------------


def test_a_full_hessian_that_would_not_fit_is_refused_with_its_size():
    wide = nn.Linear(20000, 100)  # 2e6 weights: 4e12 entries, 32 TB
    loader = itertools.repeat((torch.randn(2, 20000), torch.tensor([0, 1])))  # endless: it must not be read
    with (
        unchanged(wide),
        pytest.raises(StructureTooLargeError, match=r"100 outputs x 20,001 features.*'kron'") as caught,
    ):
        mola.fit(wide, loader, structure="full")
    assert isinstance(caught.value, MemoryError)


def test_a_name_of_a_submodule_is_found_there():
    for name, place in (("MolaError", "errors"), ("Threshold", "rules"), ("KronExact", "structures")):
        with pytest.raises(AttributeError, match=rf"it is mola\.{place}\.{name}"):
            getattr(mola, name)
    with pytest.raises(AttributeError, match=r"^module 'molaplace' has no attribute 'nothing'$"):
        mola.nothing  # noqa: B018
