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
from tests.library import problems
from tests.library.problems import LOADER, X, Y
from tests.witness import unchanged

NAN = math.nan


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
    files = contents(scene.folder)
    precisions = scene.posterior.prior_precision
    weights = scene.posterior.weights.clone()
    with unchanged(*scene.networks), pytest.raises(kind, match=f"(?s){words}") as caught:
        action(scene)
    error = caught.value
    assert isinstance(error, MolaError)
    assert error.argument is None or str(error).endswith(f"{error.argument} {error.message}")
    assert contents(scene.folder) == files
    assert scene.posterior.prior_precision == precisions
    assert torch.equal(scene.posterior.weights, weights)


def changed(at, x=None, y=None):
    """The loader with the inputs or the labels of batch `at` replaced."""
    return [((x(a) if x else a), (y(b) if y else b)) if i == at else (a, b) for i, (a, b) in enumerate(LOADER)]


def put(value, row=0):
    def replaced(tensor):
        tensor = tensor.clone()
        tensor[row] = value
        return tensor

    return replaced


# --- options ----------------------------------------------------------------------------------------------------------

NAMES = rf"one of {', '.join(STRUCTURES)}, or a Structure object; got "
LINKS = r"one of probit, probit-centred, mean-field, bridge, mc, or a Link object; got "


class Elsewhere(torch.Generator):
    """A generator on a GPU, which this machine need not have."""

    device = torch.device("cuda")


OPTIONS = {
    "unknown structure": (lambda s: mola.fit(s.network, LOADER, structure="kfac"), rf"{NAMES}.*'kfac'"),
    "link as a class": (lambda s: mola.fit(s.network, LOADER, link=mola.links.Probit), rf"{LINKS}.*Probit"),
    "link of another likelihood": (lambda s: mola.fit(s.network, LOADER, likelihood="bernoulli", link="bridge"), r"bridge.*bernoulli"),
    "lambda 0": (lambda s: mola.fit(s.network, LOADER, prior_precision=0), r"prior_precision.*got 0.*mola\.ensemble"),
    "lambda count afterwards": (lambda s: s.posterior.with_prior_precision([1.0]), r"one value, or 2.*\[1\.0\]"),
    "a posterior for networks": (lambda s: mola.fit(s.posterior, LOADER), r"networks.*got MoLA.*posterior\.networks"),
    "networks for components": (lambda s: mola.MoLA(s.networks), r"components.*mola\.fit\(networks"),
    "folder and networks swapped": (lambda s: mola.load(s.networks, s.folder), r"directory.*got a list.*comes first"),
    "two inputs without a tuple": (lambda s: s.posterior(X, X), r"generator.*got a Tensor.*posterior\(\(first, second\)\)"),
    "temperature 0": (lambda s: s.posterior.with_temperature(0), r"temperature.*between 0\.001 and 1000, got 0"),
    "pooling above 1": (lambda s: s.posterior.with_pooling(1.5), r"pooling.*between 0 and 1, got 1\.5.*averages their logits"),
    "exponent below 0": (lambda s: s.posterior.with_distance_exponent(-1), r"distance_exponent.*between 0 and 100, got -1"),
    "exponent of an ensemble": (lambda s: s.ensemble.with_distance_exponent(1.0), r"no distances.*mola\.fit"),
    "noise of classes": (lambda s: s.posterior.with_settings(noise_factor=2.0), r"categorical.*no noise"),
    "weights sum to 0.9": (lambda s: s.posterior.with_weights([0.4, 0.5]), r"sum to 1.*\[0\.4, 0\.5\].*0\.9.*Divide"),
    "weights of a wrong name": (lambda s: mola.fit(s.networks, LOADER, weights="equal"), r"uniform, evidence, or numbers .*'equal'"),
    "stacking without data": (lambda s: mola.fit(s.networks, LOADER, weights="stacking"), r"reweight\(val_loader\)"),
    "ensemble by evidence": (lambda s: mola.ensemble(s.networks, weights="evidence"), r"plain ensemble.*mola\.fit"),
    "no networks": (lambda s: mola.fit([], LOADER), r"non-empty list.*empty"),
    "networks a path": (lambda s: mola.fit("model.pt", LOADER), r"file name, 'model\.pt'.*load_state_dict"),
    "networks a state dict": (lambda s: mola.fit(s.network.state_dict(), LOADER), r"state dict.*load_state_dict"),
    "networks and loader exchanged": (lambda s: mola.fit(LOADER, s.network), r"nn\.Module.*tuple"),
    "tune the covariance of an ensemble": (
        lambda s: s.ensemble.tune(LOADER, rule="nll"),
        r"tuning needs.*plain ensemble.*mola\.fit",
    ),
    "bridge on an ensemble": (lambda s: s.ensemble.with_link("bridge")(X), r"'bridge' needs a covariance.*'probit'"),
    "evidence without labels": (lambda s: s.unlabelled.log_evidence(), r"needs training labels.*\(inputs, labels\)"),
    "tune by evidence with data": (lambda s: s.posterior.tune(LOADER, rule=mola.rules.Evidence()), r"only the training data"),
    "tune without data": (lambda s: s.posterior.tune(), r"needs validation data.*val_loader"),
    "unknown rule": (lambda s: s.posterior.tune(LOADER, rule="accuracy"), r"rule must be one of threshold, nll.*'accuracy'"),
    "regression rule": (lambda s: s.posterior.tune(LOADER, rule="crps"), r"'crps' does not apply to likelihood 'categorical'"),
    "a class for a rule": (lambda s: s.posterior.tune(LOADER, rule=mola.rules.Evidence), r"such as mola\.rules\.Outliers"),
    "confidence in per cent": (lambda s: mola.rules.Threshold(confidence=95), r"confidence must be a number between 0 and 1.*0\.95"),
    "generator of another device": (lambda s: s.posterior.predict(X, generator=Elsewhere()), r"generator must be on the CPU.*cuda"),
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
        {"positions": 0},
    ):
        with pytest.raises(OptionError):
            mola.fit(scene.networks, loader(), **options)
    for fit in (mola.fit, mola.whole.fit):
        for rule in ("threshold", "nll", "calibrated", "distance", mola.rules.Outliers([])):
            with pytest.raises(OptionError, match="needs validation data"):
                fit(scene.networks, loader(), rule=rule)
        with pytest.raises(OptionError, match="training data"):
            fit(scene.networks, loader(), LOADER, rule="evidence")


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
    "a tensor for a loader": (lambda: X, r"training loader: expected an iterable of batches.*Tensor.*\[\(x, y\)\]"),
    "first batch empty": (lambda: changed(0, x=empty, y=empty), r"batch 0 of .*size 0.*Remove"),
    "NaN input": (lambda: changed(2, x=put(NAN, 3)), r"batch 2 of the training loader.*NaN or infinite.* 1 of 8 rows.*row 3"),
    "label too large": (lambda: changed(3, y=put(3)), r"batch 3 of .*\[0, 2\].*3 outputs.*to 3"),
    "ignored label": (lambda: changed(2, y=put(-100)), r"batch 2 of .*from -100.*ignore_index"),
    "float labels": (lambda: changed(2, y=lambda y: y.double()), r"batch 2 of .*integer.*float64.*labels\.long\(\)"),
    "one-hot labels": (lambda: changed(0, y=lambda y: nn.functional.one_hot(y, 3)), r"batch 0 of .*\(6, 3\).*not one-hot"),
    "column of labels": (lambda: changed(2, y=lambda y: y[:, None]), r"batch 2 of .*8 class indices.*\(8, 1\).*squeeze"),
    "names for labels": (lambda: changed(2, y=lambda y: ["a"] * len(y)), r"batch 2 of .*labels must be .*list"),
    "labels missing later": (lambda: changed(2, y=lambda y: None), r"batch 2 of .*has no labels, unlike"),
    "labels missing at first": (lambda: changed(0, y=lambda y: None), r"batch 1 of .*has labels, unlike"),
    "labels alone": (lambda: [{"labels": Y}], r"batch 0 of .*network inputs"),
    "three parts": (lambda: [(X, X, Y)], r"batch 0 of .*tuple of length 3.*\(\(first, second\), labels\)"),
    "lists for tensors": (lambda: [X.tolist()], r"batch 0 of .*got list.*torch\.tensor"),
    "wrong width": (lambda: [(X[:, :4], Y)], r"Sequential failed on inputs of shape \(20, 4\) and type float64"),
    "arrays": (lambda: [(X.numpy(), Y.numpy())], r"Sequential failed on inputs of shape.*torch\.from_numpy"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIT)
def test_training_data_that_cannot_be_used(name, scene):
    make, words = FIT[name]
    refuse(scene, lambda s: mola.fit(s.networks, make()), DataError, words)


HELD_OUT = [
    "empty loader",
    "first batch empty",
    "NaN input",
    "label too large",
    "labels missing later",
    "labels missing at first",
]
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
    refuse(scene, lambda s: s.posterior.reweight(read), DataError, "no labels were read")
    rule = mola.rules.Threshold(confidence=0.35)
    with warnings.catch_warnings(action="ignore", category=MolaWarning):
        unlabelled, labelled = (scene.posterior.tune(data, rule=rule).prior_precision for data in (inputs, LOADER))
    assert unlabelled == labelled


@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_outliers_that_cannot_be_used(scene):
    for loader, words in (([], "outlier loader is empty"), (changed(1, x=put(NAN)), "batch 1 of the outlier loader")):
        rule = mola.rules.Outliers(loader)
        refuse(scene, lambda s, rule=rule: s.posterior.tune(LOADER, rule=rule), DataError, words)


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_what_is_worth_knowing_warns(scene):
    with pytest.warns(MolaWarning, match=r"1 of 3 classes have no training data \(class 2\)"):
        mola.fit(scene.network, [(X, Y % 2)])


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_training_data_as_validation_data_are_noticed(likelihood):
    """In whatever order and batches they come, but not if a label differs."""
    labels = Y if likelihood == "categorical" else (X[:, :3] > 0).double()
    posterior = mola.fit(make_network(), [(X, labels)], likelihood=likelihood)
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(1))
    others = (labels[order] + 1) % 2 if likelihood == "bernoulli" else labels[order] + (labels[order] < 1)
    for targets, same in ((labels[order], True), (others, False)):
        loader = list(zip(X[order].split(6), targets.split(6), strict=True))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            posterior.tune(loader, rule="nll")
        assert any("these seem to be the training data" in str(warning.message) for warning in caught) == same


def test_few_validation_data_are_counted(scene):
    """The gains that the warning names are the negative log prior, shared by the data."""
    with pytest.warns(MolaWarning, match=r"only 8 independent validation data.* more than 0\.12, .* more than 0\.25"):
        scene.posterior.tune([(X[:8], Y[:8])], rule="calibrated")


# --- predicting -------------------------------------------------------------------------------------------------------

LOADERS = {
    "empty": (lambda: [], r"prediction loader is empty"),
    "empty batch": (lambda: changed(2, x=empty), r"batch 2 of the prediction loader: .*size 0"),
    "NaN": (
        lambda: changed(2, x=put(NAN, slice(1, 4))),
        r"batch 2 of the prediction loader, networks\[0\].*NaN.*3 of 8",
    ),
    "NaN in one tensor": (lambda: put(NAN, 7)(X), r"networks\[0\].*NaN.*1 of 20"),
    "an array": (lambda: X.numpy(), r"predict_proba"),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("who", ["posterior", "ensemble"])
def test_loaders_that_cannot_be_predicted(name, who, scene):
    make, words = LOADERS[name]
    refuse(scene, lambda s: getattr(s, who).predict(make()), DataError, words)


def test_the_network_that_fails_is_named(scene):
    narrow = nn.Sequential(nn.Linear(4, 3)).double()
    broken = make_network()
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
    refuse(scene, lambda s: mola.fit([s.network, other], LOADER), HeadError, r"same shape.*\(6, 3\), \(6, 4\)")
    ensemble = mola.ensemble([scene.network, other])
    for predict in (ensemble, ensemble.predict):
        refuse(scene, lambda s, predict=predict: predict(X), MolaError, r"same shape.*\(20, 3\), \(20, 4\)")


ENSEMBLE = {
    "one logit": (nn.Linear(5, 1), r"at least 2 classes.*bernoulli"),
    "1-d": (nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), r"\(batch, classes\).*\(20,\)"),
    "probabilities": (nn.Sequential(nn.Linear(5, 3), nn.Softmax(1)), r"probabilities.*logits"),
}


@pytest.mark.parametrize("name", ENSEMBLE)
def test_an_ensemble_of_what_is_no_classifier_is_refused(name, scene):
    network, words = ENSEMBLE[name]
    refuse(scene, lambda s: mola.ensemble(network.double()).predict(X), HeadError, words)


@pytest.mark.parametrize("kind", ["ensemble", "fitted"])
def test_a_single_input_without_its_batch_is_refused(kind):
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    inputs = torch.randn(9, 3)
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
    for name, module in (("MolaError", "errors"), ("Threshold", "rules"), ("KronExact", "structures")):
        with pytest.raises(AttributeError, match=rf"it is mola\.{module}\.{name}"):
            getattr(mola, name)
    with pytest.raises(AttributeError, match=r"^module 'molaplace' has no attribute 'nothing'$"):
        mola.nothing  # noqa: B018


# --- data that were prepared differently, or swapped ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def overfitted():
    """Networks that are right on all training data and on three quarters of the others, whose inputs are mostly noise."""
    generator = torch.Generator().manual_seed(3)
    sets = []
    for seed, count in ((0, 200), (1, 600)):
        inputs, labels = problems.blobs(seed, count=count)
        sets.append((torch.cat([inputs, torch.randn(count, 20, generator=generator)], 1), labels))
    networks = []
    for seed in range(2):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(23, 64), nn.ReLU(), nn.Linear(64, problems.CLASSES))
        optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
        for _ in range(300):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(sets[0][0]), sets[0][1]).backward()
            optimiser.step()
        networks.append(network)
    return networks, *sets


@pytest.mark.parametrize("change", ["none", "swapped", "not normalised", "another order of channels"])
def test_training_data_on_which_networks_are_worse_are_noticed(overfitted, change):
    networks, train, val = overfitted
    if change == "swapped":
        train, val = val, train
    elif change == "not normalised":
        train = (0.1 * train[0] - 0.5, train[1])
    elif change == "another order of channels":
        train = (torch.cat([train[0][:, [2, 1, 0]], train[0][:, 3:]], 1), train[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = mola.fit(networks, [train], [val], progress=False)
    messages = [str(warning.message) for warning in caught if "on the training data, but only" in str(warning.message)]
    assert len(messages) == (change != "none")
    assert [note for note in posterior.tuning.notes if "swapped" in note] == messages


def test_thresholds_and_watches_from_training_data_are_noticed(overfitted):
    networks, train, val = overfitted
    posterior = mola.fit(networks, [train], [(val[0][:300], val[1][:300])], progress=False)
    with pytest.warns(mola.errors.MolaWarning, match="lower than those of the validation data"):
        mola.alarm_threshold(posterior.predict(train[0]), 0.05)
    with pytest.warns(mola.errors.MolaWarning, match="lower than those of the validation data"):
        mola.watch(posterior, [train])
    for rows in (slice(300), slice(300, None)):
        mola.alarm_threshold(posterior.predict(val[0][rows]), 0.05)
        mola.watch(posterior, [(val[0][rows], val[1][rows])])


def test_a_posterior_that_was_not_tuned_says_so(overfitted):
    networks, train, val = overfitted
    posterior = mola.fit(networks, [train], progress=False)
    assert "not tuned" in repr(posterior)
    assert "not tuned" not in repr(posterior.tune([val], progress=False))
