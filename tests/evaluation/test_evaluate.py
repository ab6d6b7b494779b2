"""`mola.evaluate` against scikit-learn, torchmetrics and a bootstrap over inputs."""

import json
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn

import molaplace as mola
from molaplace import metrics
from molaplace.errors import DataError, OptionError, StorageError
from molaplace.evaluation import Estimate
from molaplace.evaluation.estimates import standard_error
from molaplace.likelihoods.categorical import Categorical, CategoricalPredictive
from tests.closeness import assert_close
from tests.pages import Page


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def table(count, seed, shift=0.0, classes=4):
    inputs = torch.randn(count, 5, generator=generator(seed), dtype=torch.float64) + shift
    return inputs, (
        inputs[:, :classes] + torch.randn(count, classes, generator=generator(seed + 99), dtype=torch.float64)
    ).argmax(1)


def loader(pair, size=64):
    return list(zip(*(torch.split(tensor, size) for tensor in pair), strict=True))


def network(outputs=4, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, outputs)).double()


@pytest.fixture(scope="module")
def posterior():
    train = table(400, 0)
    networks = [network(seed=seed) for seed in range(2)]
    for component in networks:
        optimiser = torch.optim.Adam(component.parameters(), 1e-2)
        for _ in range(150):
            optimiser.zero_grad()
            nn.functional.cross_entropy(component(train[0]), train[1]).backward()
            optimiser.step()
    return mola.fit(networks, loader(train), loader(table(200, 1)), rule="nll", progress=False)


@pytest.fixture(scope="module")
def evaluated(posterior):
    data = {"test": table(500, 2), "blur": table(300, 3, 0.5), "far": table(400, 4, 2.0)}
    predictors = {"MoLA": posterior, "DE": mola.ensemble(posterior.networks)}
    loaders = {name: loader(pair) for name, pair in data.items()}
    evaluation = mola.evaluate(
        predictors, loaders["test"], ood={"far": loaders["far"]}, shifted={"blur": loaders["blur"]}
    )
    return data, predictors, evaluation


@pytest.mark.parametrize("data", ["test", "blur"])
def test_scores_of_classes_against_other_libraries(evaluated, data):
    from torchmetrics.functional.classification import multiclass_calibration_error

    pairs, predictors, evaluation = evaluated
    inputs, labels = pairs[data]
    for name, predictor in predictors.items():
        probs = predictor(inputs).detach()
        row = evaluation[name, data]
        correct = probs.argmax(1) == labels
        ece = multiclass_calibration_error(probs, labels, num_classes=4, n_bins=15, norm="l1")
        expected = {
            "accuracy": float(correct.double().mean()),
            "nll": log_loss(labels, probs.double().numpy(), labels=range(4)),
            "brier": float((probs - torch.eye(4)[labels]).square().sum(1).mean()),
            "ece": float(ece),
            "aurc": metrics.area_under_risk_coverage(1 - probs.amax(1).double(), correct),
            "confidence": float(probs.amax(1).mean()),
        }
        assert {key: estimate.value for key, estimate in row.items()} == pytest.approx(expected, abs=1e-5)
        assert row["accuracy"].error == pytest.approx(correct.numpy().std(ddof=1) / math.sqrt(len(labels)))


def test_outliers_against_scikit_learn(evaluated):
    pairs, predictors, evaluation = evaluated
    for name, predictor in predictors.items():
        inside, outside = (predictor.predict(pairs[data][0]) for data in ("test", "far"))
        truth = [0] * len(inside) + [1] * len(outside)
        row = evaluation[name, "far"]
        for metric, scores in (
            ("max_probability", [1 - inside.confidence, 1 - outside.confidence]),
            ("ood_score", [inside.ood_score, outside.ood_score]),
        ):
            auroc = roc_auc_score(truth, torch.cat(scores).numpy())
            assert row[f"auroc_{metric}"].value == pytest.approx(auroc, abs=1e-5)
            below = np.quantile(scores[0].numpy(), 0.95)
            assert row[f"fpr95_{metric}"].value == pytest.approx((scores[1].numpy() <= below).mean(), abs=3e-3)


def resampled(function, *columns):
    """Bootstrap standard error: inputs are drawn with replacement."""
    draw, count = np.random.default_rng(0), len(columns[0])
    rows = [torch.from_numpy(draw.integers(0, count, count)) for _ in range(400)]
    return np.std([function(*(column[index] for column in columns)) for index in rows], ddof=1)


def test_multi_label_data_count_known_labels_and_cluster_inputs():
    inputs = torch.randn(300, 5, generator=generator())
    labels = (inputs[:, :3] > 0).float()
    labels[::7, 1], labels[3] = math.nan, -100
    ensemble = mola.ensemble([network(3), network(3, 1)], likelihood="bernoulli")
    estimates = mola.evaluate(ensemble, loader((inputs, labels)), ood={"far": [4 * inputs]})["ensemble", "test"]
    alone = mola.ensemble(ensemble.networks[0], likelihood="bernoulli")
    assert list(mola.evaluate(alone, loader((inputs, labels))).entries) == [("network", "test")]
    probs = ensemble(inputs).double()
    known = ~(labels.isnan() | (labels == -100))
    right = torch.where(labels > 0.5, probs, 1 - probs)
    assert estimates["nll"].value == pytest.approx(float(-right[known].log().mean()))
    assert estimates["brier"].value == pytest.approx(float(2 * (1 - right[known]).square().mean()))
    slow = resampled(lambda likelihoods, mask: float((likelihoods > 0.5)[mask].double().mean()), right, known)
    assert estimates["accuracy"].error == pytest.approx(slow, rel=0.15)


@pytest.mark.parametrize("heteroscedastic", [False, True])
def test_regression_by_definition(heteroscedastic):
    inputs = torch.randn(400, 5, generator=generator())
    targets = inputs[:, :2] + 0.3 * torch.randn(400, 2, generator=generator(1))
    likelihood = mola.likelihoods.Gaussian(heteroscedastic=heteroscedastic)
    networks = [network(4 if heteroscedastic else 2, seed) for seed in range(2)]
    posterior = mola.fit(networks, loader((inputs, targets)), likelihood=likelihood, progress=False)
    evaluation = mola.evaluate({"r": posterior}, loader((inputs, targets)), ood={"far": [5 * inputs]})
    prediction = posterior.predict(inputs)
    row = evaluation["r", "test"]
    lower, upper = prediction.interval(0.9)
    inside = ((targets >= lower) & (targets <= upper)).double()
    assert row["rmse"].value == pytest.approx(float((prediction.mean - targets).square().mean().sqrt()), rel=1e-5)
    assert row["nll"].value == pytest.approx(-float(prediction.log_prob(targets).double().mean()), rel=1e-5)
    assert row["crps"].value == pytest.approx(float(prediction.crps(targets).mean()), rel=1e-5)
    assert row["coverage_90"] == pytest.approx((float(inside.mean()), float(inside.mean(1).std()) / 20), abs=1e-6)
    squares = (prediction.mean - targets).square().mean(1)
    assert row["rmse"].error == pytest.approx(resampled(lambda errors: float(errors.mean().sqrt()), squares), rel=0.15)
    assert set(evaluation["r", "far"]) == {
        f"{metric}_{by}" for metric in ("auroc", "fpr95") for by in ("variance", "ood_score")
    }
    assert evaluation["r", "far"]["auroc_ood_score"].value > 0.9


def test_dense_outputs_leave_out_ignored_positions():
    images = torch.randn(12, 3, 6, 5, generator=generator())
    labels = torch.randint(4, (12, 6, 5), generator=generator(1))
    labels[:, 0] = -100
    head = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    posterior = mola.fit(head, loader((images, labels), 5), progress=False)
    evaluation = mola.evaluate(posterior, loader((images, labels), 5), ood={"far": [9 * images]})
    probs = posterior(images).movedim(1, -1)[:, 1:].reshape(-1, 4).double()
    known = labels[:, 1:].flatten()
    row = evaluation["MoLA", "test"]
    assert row["nll"].value == pytest.approx(metrics.negative_log_likelihood(probs, known), rel=1e-6)
    correct = (probs.argmax(1) == known).double()
    assert row["accuracy"] == pytest.approx(
        (float(correct.mean()), standard_error(correct, torch.arange(12).repeat_interleave(25)))
    )
    assert evaluation.test.num_inputs == 12
    drawn = mola.evaluate(posterior, loader((images, labels), 5), positions=7)["MoLA", "test"]
    assert drawn["nll"].value == pytest.approx(row["nll"].value, rel=0.2)
    assert drawn["nll"].error > row["nll"].error / 2
    in_other_batches = mola.evaluate(posterior, loader((images, labels), 7), positions=7)["MoLA", "test"]
    assert in_other_batches["nll"] == pytest.approx(drawn["nll"], rel=1e-5)
    blank = torch.full((2, 6, 5), -100)
    padded = mola.evaluate(posterior, [*loader((images, labels), 5), (images[:2], blank)])
    assert padded["MoLA", "test"]["nll"] == pytest.approx(row["nll"])
    assert padded.test.num_inputs == 14
    with pytest.raises(DataError, match="contains no known labels"):
        mola.evaluate(posterior, [(images[:2], blank)])


@pytest.mark.parametrize("outputs", [1, 2])
def test_dense_yes_or_no_leaves_out_missing_labels_and_groups_by_input(outputs):
    """Each known label is a row, a missing label is NaN, and the rows of an input depend on each other."""
    images = torch.randn(8, 3, 4, 5, generator=generator())
    labels = (torch.rand(8, outputs, 4, 5, generator=generator(1)) < 0.4).double()
    labels[:, -1, 1] = math.nan
    labels[5] = math.nan
    ensemble = mola.ensemble(nn.Conv2d(3, outputs, 1), likelihood="bernoulli")
    evaluation = mola.evaluate(ensemble, loader((images, labels), 3), ood={"far": [9 * images]})
    known = ~labels.isnan()
    losses = nn.functional.binary_cross_entropy(ensemble(images).double()[known], labels[known], reduction="none")
    inputs = torch.arange(8)[:, None, None, None].expand_as(labels)[known]
    expected = (float(losses.mean()), standard_error(losses, inputs))
    assert evaluation["network", "test"]["nll"] == pytest.approx(expected, rel=1e-5)
    positions = known.any(1)
    scores = [(1 - torch.maximum(probs, 1 - probs)).mean(1) for probs in map(ensemble, (images, 9 * images))]
    auroc = metrics.auroc(scores[0][positions], scores[1].flatten())
    assert evaluation["network", "far"]["auroc_max_probability"].value == pytest.approx(auroc, abs=1e-5)


def test_any_callable_is_a_predictor(evaluated):
    pairs, predictors, evaluation = evaluated
    test = loader(pairs["test"])
    by_name = {"numpy": lambda x: predictors["DE"](x).numpy(), "mixed": mola.Mixture(list(predictors.values()))}
    other = mola.evaluate(by_name, test, ood={"far": [pairs["far"][0]]})
    assert_close(other["numpy", "test"], evaluation["DE", "test"], "float64")
    far = other["numpy", "far"]  # without the scores of logits
    assert_close(far, {name: evaluation["DE", "far"][name] for name in far}, "float64")
    assert other["mixed", "test"]["nll"].value < max(evaluation[name, "test"]["nll"].value for name in predictors)
    assert_close(mola.evaluate(by_name["numpy"], test)["<lambda>", "test"], evaluation["DE", "test"], "float64")

    def exported(inputs):
        prediction = predictors["MoLA"].predict(inputs)
        return {"probs": prediction.probs, "ood_score": prediction.ood_score}

    exported_evaluation = mola.evaluate(exported, test, ood={"far": loader(pairs["far"])})
    assert_close(exported_evaluation["exported", "test"], evaluation["MoLA", "test"], "float64")
    far = exported_evaluation["exported", "far"]
    assert_close(far, {name: evaluation["MoLA", "far"][name] for name in far}, "float64")
    with pytest.raises(DataError, match="'probs'; got mean"):
        mola.evaluate(lambda inputs: {"mean": inputs}, test)
    for scores in (torch.full((500,), math.nan), torch.zeros(3)):
        with pytest.raises(DataError, match=r"predictor '<lambda>' on the test loader.* one ood_score"):
            mola.evaluate(lambda x, scores=scores: exported(x) | {"ood_score": scores[: len(x)]}, test)


class WithoutBrier(Categorical):
    """Classes whose distribution has no Brier score."""

    def distribution(self, probs):
        return WithoutBrierPredictive(probs)


class WithoutBrierPredictive(CategoricalPredictive):
    def scores(self, labels):
        return {name: score for name, score in super().scores(labels).items() if name != "brier"}


def test_a_score_that_a_likelihood_lacks_is_left_out(evaluated):
    pairs, predictors, evaluation = evaluated
    ensemble = predictors["DE"]
    row = mola.evaluate(ensemble.forward, loader(pairs["test"]), likelihood=WithoutBrier())["forward", "test"]
    expected = {name: estimate for name, estimate in evaluation["DE", "test"].items() if name != "brier"}
    assert_close(row, expected, "float64")


def process(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    team = mola.distributed.Team()
    inputs, classes = table(150, 5)
    far = loader(table(60, 6, 2.0))  # one batch: a process has none
    for likelihood, labels in (("categorical", classes), ("bernoulli", (inputs[:, :4] > 0).double())):
        ensemble, test = mola.ensemble(network(), likelihood=likelihood), loader((inputs, labels))
        evaluation = mola.evaluate(ensemble, team.shard(test), ood={"far": team.shard(far)}, team=team)
        alone = mola.evaluate(ensemble, test, ood={"far": far})
        assert evaluation.sets == alone.sets
        for key, row in alone.entries.items():
            assert_close(evaluation[key], row, "float64")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_processes_evaluate_together(tmp_path):
    mp.spawn(process, (tmp_path / "meeting",), nprocs=2)


def test_the_table_prints_and_becomes_a_frame(evaluated):
    evaluation = evaluated[2]
    assert "MoLA" in repr(evaluation)
    frame = evaluation.to_frame()
    assert frame.index.names == ["predictor", "data"]
    assert frame.loc[("MoLA", "test"), "nll"] == evaluation["MoLA", "test"]["nll"].value
    assert frame.loc[("MoLA", "far"), "auroc_ood_score_se"] == evaluation["MoLA", "far"]["auroc_ood_score"].error
    assert math.isnan(frame.loc[("MoLA", "far"), "nll"])
    assert str(Estimate(0.95123, 0.0021)) == "0.9512 ± 0.0021"
    assert str(Estimate(0.5, 1e-9)) == str(Estimate(0.5)) == "0.5", "the error of a constant is rounding"
    with pytest.raises(KeyError, match="no row"):
        evaluation["MoLA", "nowhere"]


INPUTS, LABELS = table(20, 6)


@pytest.mark.parametrize(
    ("error", "words", "test", "options"),
    [
        (DataError, "test loader has no labels", [INPUTS], {}),
        (DataError, "test loader is empty", [], {}),
        (DataError, "blur loader: labels must lie", None, {"shifted": {"blur": [(INPUTS, LABELS + 4)]}}),
        (DataError, "far loader: expected an iterable", None, {"ood": {"far": INPUTS}}),
        (DataError, r"^predictor 'a' on the n loader, batch 0 .*NaN", None, {"ood": {"n": [INPUTS * math.nan]}}),
        (DataError, r"^predictor 'a' on the test .*between 0 and 1", None, {"predictors": {"a": network()}}),
        (OptionError, "different name", None, {"shifted": {"test": []}}),
        (OptionError, "different name", None, {"shifted": {"a": []}, "ood": {"a": []}}),
        (OptionError, "at least one predictor", None, {"predictors": {}}),
        (OptionError, "predictors must .*got list", None, {"predictors": [network()]}),
        (OptionError, r"ood must .*\{'noise': loader\}; got Tensor", None, {"ood": INPUTS}),
        (OptionError, "positions must .*got 'average'", None, {"positions": "average"}),
        (OptionError, "shifted must .*got DataLoader", None, {"shifted": torch.utils.data.DataLoader(INPUTS)}),
    ],
)
def test_wrong_use_is_refused(posterior, error, words, test, options):
    predictors = options.get("predictors", {"a": posterior})
    others = {name: value for name, value in options.items() if name != "predictors"}
    with pytest.raises(error, match=words):
        mola.evaluate(predictors, [(INPUTS, LABELS)] if test is None else test, **others)


# --- baselines -------------------------------------------------------------------------------------------------------

CLASS_BASELINES = ["MAP", "MAP-T", "DE", "DE-T", "DE-L", "LLLA", "MoLA (paper)"]


def passes(networks, run):
    """The number of passes of each network while a function runs."""
    counts = [0] * len(networks)

    def count(index):
        def hook(*_):
            counts[index] += 1

        return hook

    hooks = [module.register_forward_hook(count(index)) for index, module in enumerate(networks)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return counts


def test_each_network_runs_once_on_each_batch_for_all_methods(posterior):
    """Test data of 2 batches, outliers of 1, validation data of 4: of the validation data, all baselines share one pass."""
    val, test, far = loader(table(200, 1)), loader(table(100, 2)), loader(table(60, 4, 2.0))
    methods = {}
    assert passes(posterior.networks, lambda: methods.update(mola.baselines(posterior, val, progress=False))) == [4, 4]
    assert list(methods) == CLASS_BASELINES
    refitted = mola.fit(posterior.networks, loader(table(400, 0)), structure="full", progress=False)
    predictors = {**methods, "MoLA": posterior, "full": refitted}
    run = lambda: mola.evaluate(predictors, test, ood={"far": far})  # noqa: E731
    assert passes(posterior.networks, run) == [3, 3]


def test_methods_that_share_passes_have_the_results_of_each_alone(posterior):
    val, test, far = loader(table(200, 1)), loader(table(100, 2)), {"far": loader(table(60, 4, 2.0))}
    methods = {"MoLA": posterior, **mola.baselines(posterior, val, progress=False)}
    together = mola.evaluate(methods, test, ood=far)
    for name, method in methods.items():
        assert_close(
            mola.evaluate({name: method}, test, ood=far).entries,
            {key: row for key, row in together.entries.items() if key[0] == name},
            "float64",
        )


def test_posteriors_that_share_some_networks_run_each_once():
    trunk, heads = network(8), [nn.Linear(8, 4).double() for _ in range(3)]
    branches = [nn.Sequential(trunk, head) for head in heads]
    train, test = loader(table(100, 0)), loader(table(60, 2))
    first, last = (mola.fit(part, train, progress=False) for part in (branches[:2], branches[1:]))
    run = lambda: mola.evaluate({"first": first, "last": last}, test)  # noqa: E731
    assert passes(heads, run) == [1, 1, 1]


def test_baselines_are_what_a_program_would_make(posterior):
    networks, val = posterior.networks, loader(table(200, 1))
    weighted = posterior.with_weights([0.3, 0.7])
    methods = mola.baselines(weighted, val, progress=False)
    scaled = mola.calibration.temperature_scaled
    quiet = {"weights": [0.3, 0.7], "progress": False}
    expected = {
        "MAP": mola.ensemble(networks[0]),
        "MAP-T": scaled(networks[0], val, progress=False),
        "DE": mola.ensemble(networks, [0.3, 0.7]),
        "DE-T": scaled(networks, val, **quiet),
        "DE-L": scaled(networks, val, mean="logits", **quiet),
        "LLLA": mola.fit(networks[0], loader(table(400, 0)), val, progress=False),
        "MoLA (paper)": weighted.tune(val, rule="threshold", progress=False),
    }
    inputs, _ = table(50, 3)
    for name, method in expected.items():
        assert_close(methods[name](inputs), method(inputs), "float64", name=name)
    assert list(mola.baselines(posterior.alone(0), val, progress=False)) == ["MAP", "MAP-T", "LLLA (paper)"]
    assert list(mola.baselines(posterior)) == ["MAP", "DE", "LLLA"]
    with pytest.raises(OptionError, match="plain ensemble"):
        mola.baselines(mola.ensemble(networks), val)


def test_baselines_of_a_regression():
    inputs = torch.randn(200, 5, generator=generator())
    targets = inputs[:, :2] + 0.3 * torch.randn(200, 2, generator=generator(1))
    data = loader((inputs, targets))
    posterior = mola.fit(
        [network(2, seed) for seed in range(2)], data[:2], data[2:], likelihood="gaussian", progress=False
    )
    methods = mola.baselines(posterior, data[2:], progress=False)
    assert list(methods) == ["MAP", "MAP-N", "DE", "DE-N", "LLLA"]
    rows = mola.evaluate({"MoLA": posterior, **methods}, data[2:])
    assert rows["DE-N", "test"]["nll"].value < rows["DE", "test"]["nll"].value


# --- the page --------------------------------------------------------------------------------------------------------


def test_a_page_is_saved_with_its_verdict(posterior, tmp_path):
    methods = {"ours": posterior, **mola.baselines(posterior, loader(table(200, 1)), progress=False)}
    data = {"ood": {"far": loader(table(60, 4, 2.0))}, "shifted": {"blur": loader(table(80, 3, 0.5))}}
    evaluation = mola.evaluate(methods, loader(table(100, 2)), classes=["<a>", "b", "c", "d"], **data)
    assert "<table>" in evaluation._repr_html_()
    path = evaluation.save(tmp_path / "page")
    text = path.read_text()
    page = Page(text)
    assert "script" not in page.tags
    assert "a" not in page.tags
    for words in (
        "ours: ",
        "DE-L",
        "MoLA (paper)",
        "Shifted data: accuracy",
        "Outliers: far",
        "&lt;a&gt;",
        "mola.evaluate",
    ):
        assert words in text
    numbers = json.loads((path.parent / "numbers.json").read_text())
    assert numbers["methods"]["DE"]["labelled"]["blur"]["metrics"]["nll"] == evaluation["DE", "blur"]["nll"].value
    evaluation.save(tmp_path / "page")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "index.html").write_text("mine")
    with pytest.raises(StorageError, match="other files"):
        evaluation.save(tmp_path / "notes")
    assert (tmp_path / "notes" / "index.html").read_text() == "mine"


@pytest.mark.usefixtures("_blank_figures")
def test_one_predictor_has_a_page(posterior, tmp_path):
    assert "MoLA: 1." in mola.evaluate(posterior, loader(table(100, 2))).save(tmp_path).read_text()
    regression = mola.ensemble(network(2), likelihood=mola.likelihoods.Gaussian(noise=0.5))
    inputs, _ = table(30, 0)
    assert "network: " in mola.evaluate(regression, [(inputs, inputs[:, :2])]).save(tmp_path).read_text()
