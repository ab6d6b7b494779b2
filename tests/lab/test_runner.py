"""Suites: stored activations change nothing, work is done once, and what was done is not lost."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import molaplace as mola
from molaplace import metrics
from molaplace.demo import LabelledData
from molaplace.images import Images, normalisation
from molaplace.perceptrons import mlp
from molaplace_lab.activations import ActivationCache, open_networks
from molaplace_lab.comparisons import methods_of
from molaplace_lab.methods import LastLayerMethod
from molaplace_lab.networks import Training, check_networks, find_networks, train_networks
from molaplace_lab.records import Record, Store
from molaplace_lab.runner import Plan, run_suite
from molaplace_lab.suite import DataOptions, Suite, TrainingData
from molaplace_lab.suites.image_sources import image_source
from molaplace_lab.training import Recipe
from tests.closeness import assert_close
from tests.forked_python import run_python, run_team

CLASSES = 3
SIDE = 4


def build():
    return mlp(SIDE * SIDE, (12, 6), CLASSES)


def images(count, seed, noise=40):
    """Blobs: class c is bright in row c."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    pixels = torch.randint(0, noise, (count, 1, SIDE, SIDE), generator=generator)
    pixels[torch.arange(count), 0, labels] += 115
    return Images(pixels.to(torch.uint8), labels)


def sources(options):
    def source(name, role, data, level=0.0, change=lambda data: data):
        return image_source(options, "none", name, name.title(), role, data, level=level, change=change)

    def noisy(data):
        noise = torch.randint(0, 100, data.pixels.shape, generator=torch.Generator().manual_seed(9))
        return Images((data.pixels + noise).clamp(max=255).to(torch.uint8), data.labels)

    test = images(90, 2, noise=140)
    return {
        "train": source("train", "train", images(options.train or 120, 0, noise=140)),
        "validation": source("validation", "validation", images(60, 1, noise=140)),
        "test": source("test", "test", test),
        "noise 1": source("noise 1", "shift", test, level=1.0, change=noisy),
        # Labels of outliers are not the network's: 7 is no class of it.
        "strange": source("strange", "outlier", Images(images(70, 3).pixels.flip(2), torch.full((70,), 7))),
    }


SUITE = Suite(
    name="blobs",
    title="Blobs",
    builders={"mlp": build},
    classes=("a", "b", "c"),
    recipe=Recipe(epochs=12, learning_rate=1e-2),
    threshold=None,
    shift={"title": "Noisy blobs", "axis": "level"},
    make_sources=sources,
    training_data=lambda options, recipe: TrainingData(
        LabelledData(images(120, 0).pixels, images(120, 0).labels), normalisation("none")
    ),
    components=2,
)


def same_weights(first, second):
    """Bit for bit; the order of a file's metadata is not determined."""
    first = load_file(first)
    second = load_file(second)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(autouse=True)
def _single_precision():
    """As users have it."""
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    torch.set_default_dtype(torch.float32)  # fixtures of a module are made before those of a test
    folder = tmp_path_factory.mktemp("networks")
    train_networks(Training(SUITE, 4, SUITE.recipe), folder, lambda doing, done: None)
    return folder


@pytest.fixture(scope="module")
def plan(trained):
    networks = open_networks(find_networks(trained), build, "mlp")
    return Plan(SUITE, "mlp", networks, [sources(DataOptions())], runs=2, components=2, groups=("main",))


def run(plan, folder, **options):
    folders = ActivationCache(folder / "activations"), Store(folder / "results")
    run_suite(plan, *folders, lambda doing, done: None, **options)
    return records_of(folder)


@pytest.fixture(scope="module")
def finished(plan, tmp_path_factory):
    """A folder in which everything was run."""
    folder = tmp_path_factory.mktemp("finished")
    run(plan, folder)
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def records_of(folder):
    return Store(folder / "results").records("blobs")


def whole_networks(plan, run_index, count):
    return [network.load() for network in plan.members("main", run_index)[:count]]


def loader(plan, name):
    return list(plan.sources[name].open())


@pytest.mark.parametrize(("method", "count"), [("MAP", 1), ("DE", 2), ("LLLA", 1), ("MoLA", 2)])
@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")  # that the grid grew is no matter here
def test_stored_activations_give_what_the_whole_networks_give(plan, finished, method, count):
    """The slow and obvious way: the public calls on the networks themselves, images in."""
    record = Store(finished / "results").read("blobs", method, 1)
    models = whole_networks(plan, 1, count)
    test, train, validation, strange = (loader(plan, name) for name in ("test", "train", "validation", "strange"))
    if method in ("MAP", "DE"):
        predictor = mola.ensemble(models)
    else:
        predictor = mola.fit(models, train, validation, rule="threshold", progress=False)
        assert_close(record.chosen["prior_precision"][0], predictor.prior_precision[0])
    labels = torch.cat([labels for _, labels in test])
    inside, outside = (predictor.predict([x for x, _ in batches], progress=False) for batches in (test, strange))
    result = record.labelled["test"]
    outlying = record.outliers["strange"]
    assert_close(result.metrics["nll"], metrics.negative_log_likelihood(inside.probs, labels), scale=1.0)
    assert result.metrics["accuracy"] == metrics.accuracy(inside.probs, labels)
    assert result.count == sum(result.histogram) == 90
    assert_close(outlying.confidence, metrics.mean_confidence(outside.probs))
    assert outlying.scores["entropy"]["auroc"] == pytest.approx(
        metrics.auroc(inside.entropy, outside.entropy), abs=1e-3
    )


def more_sources():
    """One more set of outliers, and two types of noise dealt over the test images."""
    plain = sources(DataOptions())
    shifted = replace(plain["noise 1"], types=("faint", "loud"))
    data = Images(images(50, 4).pixels.flip(3), torch.zeros(50, dtype=torch.int64))
    further = image_source(DataOptions(), "none", "further", "Further", "outlier", data)
    return {**plain, "noise 1": shifted, "further": further}


def test_a_second_run_keeps_the_records_and_computes_nothing(plan, copied, monkeypatch):
    """With or without the cache of activations; additional sets of outliers are warned of, and do not spoil records."""
    first = records_of(copied)
    shutil.rmtree(copied / "activations")
    monkeypatch.setattr(LastLayerMethod, "fit", lambda *_: pytest.fail("fitted again"))
    assert run(plan, copied) == first
    assert not list((copied / "activations").rglob("*.safetensors"))
    with pytest.warns(mola.errors.MolaWarning, match="no results for Further"):
        run(replace(plan, folds=[more_sources()]), copied)
    assert records_of(copied) == first
    document = Store(copied / "results").read_document("blobs", "suite.json")
    assert {"further", "strange"} < set(document["sets"])


def test_a_run_that_stops_or_refuses_keeps_the_other_records(plan, tmp_path, monkeypatch):
    plan = replace(plan, runs=1)
    fit = LastLayerMethod.fit
    done = []

    def failing(at, error):
        def replaced(self, context):
            done.append(self.name)
            if self.name == at:
                raise error
            return fit(self, context)

        monkeypatch.setattr(LastLayerMethod, "fit", replaced)

    failing("DE-T", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path)
    methods = {record.method for record in records_of(tmp_path)}
    assert methods == {"MAP", "MAP-T", "DE"}
    done.clear()
    failing("LLLA", mola.errors.StructureTooLargeError("too large"))
    with pytest.raises(mola.errors.OptionError, match="LLLA, run 1: too large"):
        run(plan, tmp_path)
    every = {method.name for method in plan.methods("main")}
    assert set(done) == every - methods
    assert {record.method for record in records_of(tmp_path)} == every - {"LLLA"}


def test_another_experiment_is_refused_or_replaced(plan, copied):
    first = {(record.method, record.run): record for record in records_of(copied)}
    fewer = replace(plan, folds=[sources(DataOptions(train=60))])
    outliers = {**plan.sources, "strange": replace(more_sources()["further"], name="strange")}
    without = {name: source for name, source in plan.sources.items() if name != "noise 1"}
    strict = replace(plan, suite=replace(SUITE, threshold=0.5))
    changed = [
        fewer,
        replace(plan, components=1),
        strict,
        *(replace(plan, folds=[sets]) for sets in (outliers, without)),
    ]
    for other in changed:
        with pytest.raises(mola.errors.StorageError, match=r"another experiment \(.+\)\. Write.*--fresh"):
            run(other, copied)
    assert {(record.method, record.run): record for record in records_of(copied)} == first
    made = {record.method: record for record in run(replace(strict, runs=1), copied, fresh=True)}
    assert {record.run for record in records_of(copied)} == {0}, "records of the other experiment were kept"
    assert "50.00% as given" in made["MoLA"].chosen["rule"]


def test_types_of_shift_are_tallied_from_every_second_row(plan, tmp_path):
    made = run(replace(plan, runs=1, folds=[more_sources()]), tmp_path)
    record = next(record for record in made if record.method == "DE")
    test = loader(plan, "noise 1")
    probs = mola.ensemble(whole_networks(plan, 0, 2)).predict([inputs for inputs, _ in test], progress=False).probs
    labels = torch.cat([labels for _, labels in test])
    by_type = record.labelled["noise 1"].types
    assert list(by_type) == ["faint", "loud"]
    for index, numbers in enumerate(by_type.values()):
        rows = probs[index::2], labels[index::2]
        assert numbers["accuracy"] == pytest.approx(metrics.accuracy(*rows), rel=1e-5)
        assert numbers["nll"] == pytest.approx(metrics.negative_log_likelihood(*rows), rel=1e-4)
        assert numbers["ece"] == pytest.approx(metrics.expected_calibration_error(*rows), abs=1e-3)
    assert record.labelled["test"].types == {}
    assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_the_same_network_twice_is_refused(plan):
    with pytest.raises(mola.errors.OptionError, match=r"00\.safetensors and zz\.safetensors are the same"):
        replace(plan, networks=[*plan.networks, replace(plan.networks[0], path=Path("zz.safetensors"))])


@pytest.mark.parametrize(
    ("suite", "name", "options"),
    [
        (replace(SUITE, name="other"), "mlp", DataOptions()),
        (SUITE, "lenet", DataOptions()),
        (SUITE, "mlp", DataOptions(normalisation="imagenet")),
    ],
)
def test_networks_trained_for_something_else_are_refused(trained, suite, name, options):
    check_networks(find_networks(trained), SUITE, "mlp", DataOptions())
    with pytest.raises(mola.errors.OptionError, match=r"00\.safetensors was trained.*(data|model|normalisation)"):
        check_networks(find_networks(trained), suite, name, options)


def test_a_record_that_cannot_be_read_is_made_again(plan, copied):
    store = Store(copied / "results")
    path = store.path("blobs", "DE", 0)
    whole = store.read("blobs", "DE", 0)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.warns(mola.errors.MolaWarning, match=r"run-0\.json cannot be read.*It will be recomputed"):
        run(replace(plan, runs=1), copied)
    assert store.read("blobs", "DE", 0).labelled == whole.labelled


# --- networks


def test_a_network_of_another_recipe_is_refused(trained):
    with pytest.raises(
        mola.errors.StorageError, match=r"00\.safetensors was trained with other options.*another folder"
    ):
        train_networks(Training(SUITE, 1, replace(SUITE.recipe, epochs=9)), trained, lambda doing, done: None)


def test_an_interrupted_ensemble_goes_on_to_the_same_bits(tmp_path):
    def stop(doing, done):
        if doing.startswith("network 2 of 3, epoch 2"):
            raise KeyboardInterrupt

    # Both trainings one after the other: how numbers below 1e-38 are rounded may change as other tests import libraries.
    training = Training(SUITE, 3, SUITE.recipe)
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    train_networks(training, whole, lambda doing, done: None)
    with pytest.raises(KeyboardInterrupt):
        train_networks(training, parts, stop)
    assert [path.name for path in find_networks(parts)] == ["00.safetensors"]
    train_networks(training, parts, lambda doing, done: None)
    for path in find_networks(parts):
        assert same_weights(path, whole / path.name)
    assert not list(parts.glob("*.training.safetensors"))


# --- several processes


def test_the_digits_suite_end_to_end_in_one_process_and_in_two(tmp_path):
    """Networks, activations and records are each the work of one process: nothing depends on how many there are."""
    options = ["bench", "digits", "--train", "--components", "2", "--threads", "1", "--quiet", "--groups", "main"]
    options += ["--train-images", "150", "--test-images", "40", "--outliers", "30"]
    alone, team = (
        [
            "-m",
            "molaplace_lab",
            *options,
            *(f"--{what}={tmp_path / name / what}" for what in ("networks", "results", "cache")),
        ]
        for name in ("one", "two")
    )
    done = run_python(*alone, timeout=600)
    assert done.returncode == 0, done.stderr
    codes, errors = run_team(2, team, tmp_path, timeout=600)
    assert codes == [0, 0], errors
    alone, team = (
        {
            (record.method, record.run): replace(record, seconds={}, environment={})
            for record in Store(tmp_path / name / "results").records("digits")
        }
        for name in ("one", "two")
    )
    assert {method for method, _ in alone} == {method.name for method in methods_of("main", SUITE.budget, SUITE.sweep)}
    assert team == alone
    assert list(alone["DE", 0].labelled) == ["test", *(f"rotation {angle}" for angle in range(15, 181, 15))]
    assert {result.count for result in alone["DE", 0].outliers.values()} == {30}
    for path in find_networks(tmp_path / "one" / "networks"):
        assert same_weights(path, tmp_path / "two" / "networks" / path.name)
