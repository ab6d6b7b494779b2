"""Methods of the suites that are more than a last layer: SWAG, MultiSWAG, MIMO, MIMO-MoLA."""

from dataclasses import replace

import pytest
import torch

import molaplace as mola
from molaplace.errors import OptionError, StorageError
from molaplace.metrics import auroc, negative_log_likelihood
from molaplace.saving.weights import save_weights
from molaplace_lab.activations import ActivationCache, open_networks
from molaplace_lab.cost import measure_cost
from molaplace_lab.mimo import stored_mimo
from molaplace_lab.networks import Training, find_networks, train_networks
from molaplace_lab.records import Store
from molaplace_lab.runner import Plan, run_suite
from molaplace_lab.suite import Budget, DataOptions, MimoBudget, SwagBudget, changed
from molaplace_lab.swag import stored_draws
from molaplace_lab.training import member_seeds
from tests.closeness import assert_close
from tests.lab.test_runner import CLASSES, SUITE, build, sources

BUDGET = Budget(SwagBudget(1e-2, snapshots=3, batch_size=32, samples=4), MimoBudget(epochs=15, batch_repetition=2))


@pytest.fixture(autouse=True)
def _single_precision():
    """As users have it."""
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("networks")
    train_networks(Training(SUITE, 4, SUITE.recipe), folder, lambda doing, done: None)
    networks = open_networks(find_networks(folder), build, "mlp")
    data = sources(DataOptions())
    return Plan(SUITE, "mlp", networks, [data], runs=2, components=2, groups=("beyond",), budget=BUDGET)


def run(plan, folder, **options):
    activations = ActivationCache(folder / "activations")
    store = Store(folder / "results")
    run_suite(plan, activations, store, lambda doing, done: None, **options)
    return store.records("blobs")


@pytest.fixture(scope="module")
def finished(plan, tmp_path_factory):
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("beyond")
    return folder, {(record.method, record.run): record for record in run(plan, folder)}


def nll(plan, predictor, name="test"):
    labels = torch.cat([labels for _, labels in plan.sources[name].open()])
    return negative_log_likelihood(predictor.predict(list(plan.sources[name].open())).probs, labels)


def test_swag_and_mimo_in_a_suite_are_the_library_s(plan, finished):
    _, records = finished
    training = SUITE.training_data(DataOptions(), SUITE.recipe)
    swags = [stored_draws(network, training, BUDGET.swag, None) for network in plan.members("beyond", 1)]
    mimo = stored_mimo(build, training, SUITE.recipe, BUDGET.mimo, member_seeds(2, 0)[1], None)
    test, strange, train, val = (list(plan.sources[name].open()) for name in ("test", "strange", "train", "validation"))
    posterior = mola.fit(mimo.networks, train, val, rule="threshold", structure="full", progress=False)
    predictors = {
        "SWAG": mola.ensemble(swags[0]),
        "MultiSWAG": mola.ensemble([draw for draws in swags for draw in draws]),
        "MIMO": mola.ensemble(mimo.networks),
        "MIMO-MoLA": posterior,
    }
    for method, predictor in predictors.items():
        for name in ("test", "noise 1"):
            assert_close(records[method, 1].labelled[name].metrics["nll"], nll(plan, predictor, name), scale=1.0)
    assert records["MIMO-MoLA", 1].chosen["prior_precision"] == pytest.approx(list(posterior.prior_precision), rel=1e-4)
    spread = auroc(*(predictors["SWAG"].predict(batches).mutual_information for batches in (test, strange)))
    recorded = records["SWAG", 1].outliers["strange"].scores["mutual information"]["auroc"]
    assert recorded == pytest.approx(spread, abs=2e-3)


def test_what_is_trained_is_taken_up(plan, finished, monkeypatch):
    folder, records = finished
    for method in ("swag", "mimo"):
        monkeypatch.setattr(f"molaplace_lab.{method}.train_epoch", lambda *_: pytest.fail("trained again"))
    again = {(record.method, record.run): record for record in run(plan, folder, fresh=True)}
    for key, record in again.items():
        assert record.labelled == records[key].labelled
        assert record.outliers == records[key].outliers


def test_another_budget_is_another_record(plan, finished):
    folder, records = finished
    other = replace(plan, runs=1, budget=replace(BUDGET, swag=replace(BUDGET.swag, samples=2)))
    methods = {record.method: record for record in run(other, folder) if record.run == 0}
    assert methods["SWAG"].labelled != records["SWAG", 0].labelled
    assert methods["SWAG"].settings != records["SWAG", 0].settings
    assert methods["MIMO"].labelled == records["MIMO", 0].labelled


def test_damaged_predictions_are_named(plan, finished):
    folder, _ = finished
    whole = {path: path.read_bytes() for path in (folder / "activations" / "predictions").rglob("*.safetensors")}
    for path, content in whole.items():
        path.write_bytes(content[:50])
    try:
        with pytest.raises(StorageError, match="it will be recomputed"):
            run(plan, folder, fresh=True)
    finally:
        for path, content in whole.items():
            path.write_bytes(content)


@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_whole_networks_in_a_suite_are_the_library_s(plan, tmp_path):
    records = {record.method: record for record in run(replace(plan, runs=1, groups=("whole",)), tmp_path)}
    models = [network.load() for network in plan.members("whole", 0)]
    train, val = (list(plan.sources[name].open()) for name in ("train", "validation"))
    for name, options in (("MoLA (all layers)", {"structure": "kron"}), ("MoLA (subnetwork)", {"subnetwork": 303})):
        posterior = mola.whole.fit(models, train, val, rule="threshold", progress=False, **options)
        assert records[name].labelled["test"].metrics["nll"] == pytest.approx(nll(plan, posterior), rel=1e-4)
        assert records[name].chosen["prior_precision"] == pytest.approx(list(posterior.prior_precision), rel=1e-4)
        # One predictor disagrees with nobody: no score is made of that.
        assert set(records[name].outliers["strange"].scores) == {"max probability", "entropy"}
    # What was fitted is taken up.
    again = run(replace(plan, runs=1, groups=("whole",)), tmp_path, fresh=True)
    assert [record.labelled for record in again] == [record.labelled for record in records.values()]


def test_cost_of_all_methods_is_measured_in_one_run(plan):
    sources = (plan.sources[name] for name in ("train", "test"))
    document = measure_cost(plan.members("beyond", 0), *sources, BUDGET, lambda doing, done: None, repeats=1)
    rows = {row["method"]: row for row in document["rows"]}
    numbers = sum(tensor.numel() for tensor in plan.networks[0].load().state_dict().values())
    assert rows["MAP"]["bytes"] == 4 * numbers
    assert rows["DE"]["bytes"] == 2 * rows["MAP"]["bytes"]
    # The formula: mean, second moment and one deviation a snapshot, and a header.
    swag = 4 * numbers * (2 + BUDGET.swag.snapshots)
    assert swag <= rows["SWAG"]["bytes"] <= swag + 5000
    assert all(row["predict_seconds"] > 0 for row in rows.values())
    assert {name for name, row in rows.items() if row["fit_seconds"] is None} == {"MAP", "DE", "MIMO"}


def test_cost_of_networks_with_denormal_weights(plan, tmp_path):
    network = plan.networks[0].load()
    with torch.no_grad():
        next(weights for weights in network.parameters() if len(weights) == CLASSES)[0] = 1e-40
    save_weights(network, tmp_path / "00.safetensors")
    networks = open_networks(find_networks(tmp_path), build, "mlp")
    sources = (plan.sources[name] for name in ("train", "test"))
    document = measure_cost(networks, *sources, None, lambda doing, done: None, repeats=1)
    assert all(row["bytes"] > 0 for row in document["rows"])


def test_budgets_are_changed_in_words():
    budget = changed(SwagBudget(1e-2), " snapshots=12, learning_rate=2e-3 ,images=12500,")
    assert budget == SwagBudget(2e-3, snapshots=12, images=12500)
    assert changed(budget, "") == budget
    for text in ("epochs", "speed=3", "epochs=many", "epochs=2.5", "epochs=0", "members=0", "batch_repetition=0"):
        with pytest.raises(OptionError, match=r"expected name=number|above 0"):
            changed(MimoBudget(), text)
    for text in ("snapshots=1", "samples=0", "images=0", "batch_size=0", "learning_rate=0"):
        with pytest.raises(OptionError, match=r"expected .* above"):
            changed(SwagBudget(1e-2), text)
