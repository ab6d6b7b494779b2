"""ImageNet as a user runs it: networks by name, images of different sizes, cross-fitting, slices, generated corruptions."""

import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

import molaplace as mola
from molaplace_lab import activations as storing
from molaplace_lab.activations import ActivationCache
from molaplace_lab.commands import app
from molaplace_lab.comparisons import methods_of
from molaplace_lab.corruptions.catalogue import corrupt
from molaplace_lab.networks import open_named
from molaplace_lab.records import Store
from molaplace_lab.runner import Plan, run_suite
from molaplace_lab.suite import DataOptions
from molaplace_lab.suites.imagenet import IMAGENET
from tests.closeness import assert_close
from tests.forked_python import run_python, run_team

SIDE = 24

NETWORKS = """
import torch
from torch import nn

import molaplace as mola

class Net(nn.Module):
    def __init__(self, size, width, seed, outputs=12, soft=False):
        super().__init__()
        torch.manual_seed(seed)
        self.size, self.soft = size, soft
        self.hidden, self.head = nn.Linear(3 * size * size, width), nn.Linear(width, outputs)

    def forward(self, images):
        assert images.shape[1:] == (3, self.size, self.size)
        logits = self.head(self.hidden(images.flatten(1)).tanh())
        return logits.softmax(-1) if self.soft else logits

def small():
    return mola.network.Resized(Net(8, 6, 1), 8, crop=0.875)

def large():
    return mola.network.Resized(Net(14, 6, 2), 14, mean=0.5, std=0.5)

def wide():
    return mola.network.Resized(Net(8, 9, 3), 8)

def other():
    return mola.network.Resized(Net(8, 9, 3, outputs=10), 8)

def soft():
    return mola.network.Resized(Net(8, 9, 3, soft=True), 8)
"""

pytestmark = pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Four of twelve classes, five images each, and no training images; outliers; a module of networks."""
    folder = tmp_path_factory.mktemp("imagenet")
    names = [f"{index:04d}" for index in range(12)]
    generator = np.random.default_rng(0)
    for name in ("0002", "0005", "0007", "0011"):
        class_folder = folder / "data" / "imagenet" / "val" / name
        class_folder.mkdir(parents=True)
        for index in range(5):
            Image.fromarray(generator.integers(0, 256, (30, 36, 3), dtype=np.uint8)).save(class_folder / f"{index}.bmp")
    (folder / "data" / "imagenet" / "synsets.txt").write_text("\n".join(names))
    (folder / "data" / "svhn").mkdir()
    pixels = generator.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "data" / "svhn" / "test_32x32.npz", images=pixels, labels=np.arange(12) % 10)
    (folder / "sizes_for_test.py").write_text(NETWORKS)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def options(root, **changes):
    chosen = {"types": ("contrast", "gaussian_noise"), "image_size": SIDE, "normalisation": "none", "cross_fit": True}
    return DataOptions(directory=root / "data", **{**chosen, **changes})


ARGUMENTS = (
    "bench imagenet --cross-fit --networks sizes_for_test:small,sizes_for_test:large --components 2 --runs 2"
    f" --image-size {SIDE} --types contrast,gaussian_noise --quiet"
).split()


def labels_of(source):
    return torch.cat([labels for _, labels in source])


def inputs_of(source):
    return torch.cat([inputs for inputs, _ in source])


def test_every_image_is_tested_tuned_on_and_summed_equally_often_and_never_at_once(root):
    folds = IMAGENET.make_folds(options(root))
    indices = {
        role: [index for fold in folds for index in fold[role].indices] for role in ("train", "validation", "test")
    }
    for role, times in (("train", 2), ("validation", 1), ("test", 2)):
        assert sorted(indices[role]) == sorted(list(range(20)) * times)
    for fold in folds:
        parts = [set(fold[role].indices) for role in ("train", "validation", "test")]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 20
        assert labels_of(fold["train"]).tolist() == sorted([2, 5, 7, 11] * 2)


def test_a_part_reads_what_was_computed_for_the_whole(root, tmp_path, monkeypatch):
    """In slices, which an interrupted run keeps, and for networks of different sizes."""
    fold = IMAGENET.make_folds(options(root))[3]
    part = fold["severity 2"]
    networks = open_named("sizes_for_test:small,sizes_for_test:large")
    monkeypatch.setattr(storing, "SLICE", 6)
    cache = ActivationCache(tmp_path)
    cache.compute(networks, [part.whole], lambda what, done: None)
    assert len(cache.paths(networks[0], part.whole)) == 4
    stored = cache.read(networks, part)
    assert torch.equal(stored.labels, labels_of(part))
    expected = torch.stack([network.load()(inputs_of(part)) for network in networks]).detach()
    assert_close(stored.logits(), expected)
    # One slice is lost, and it alone is made again.
    lost = cache.paths(networks[1], part.whole)[2]
    lost.unlink()
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    cache.compute(networks, [part.whole], lambda what, done: None)
    assert set(tmp_path.rglob("*.safetensors")) == {*times, lost}
    assert all(path.stat().st_mtime_ns == when for path, when in times.items())
    assert_close(cache.read(networks, part).logits(), expected)


def test_shifted_images_are_the_tested_ones_with_types_in_turn(root):
    fold = IMAGENET.make_folds(options(root))[1]
    shifted = fold["severity 4"]
    clean = dict(zip(fold["test"].indices, inputs_of(fold["test"]), strict=True))
    assert set(shifted.indices) == set(fold["test"].indices)
    for index, (image, inputs) in enumerate(zip(shifted.indices, inputs_of(shifted), strict=True)):
        pixels = (clean[image] * 255).round().to(torch.uint8)[None]
        name = ("contrast", "gaussian_noise")[index % 2]
        expected = corrupt(pixels, name, 4, first=image, parameters="imagenet-c")
        assert torch.equal((inputs * 255).round().to(torch.uint8), expected[0])


def test_networks_of_different_widths_are_mixed_from_stored_features(root, tmp_path):
    """Architectures differ in the features of their last layers: 6 and 9 here, 2048 and 1536 elsewhere."""
    folds = IMAGENET.make_folds(options(root))
    names = "sizes_for_test:small,sizes_for_test:wide"
    networks = open_named(names)
    fold = folds[0]
    plan = Plan(IMAGENET, names, networks, folds, 1, 2, options=options(root))
    cache = ActivationCache(tmp_path / "cache")
    store = Store(tmp_path / "results")
    run_suite(plan, cache, store, lambda doing, done: None)
    mola_record, ensemble_record = (store.read("imagenet", method, 0) for method in ("MoLA (NLL)", "DE"))
    assert {"Mahalanobis", "nearest neighbours"} <= set(ensemble_record.outliers["svhn"].scores)
    posterior = mola.fit(
        [network.load() for network in networks],
        list(fold["train"].open()),
        list(fold["validation"].open()),
        rule="nll",
    )
    predicted = posterior.predict(list(fold["test"].open()))
    expected = float(mola.metrics.negative_log_likelihood(predicted.probs, labels_of(fold["test"])))
    assert mola_record.labelled["test"].metrics["nll"] == pytest.approx(expected, rel=1e-3)
    # As a detector of one network has it, zeros behind its features would be features too.
    alone = cache.read(networks[:1], fold["test"])
    both = cache.read(networks, fold["test"])
    (pair,) = both.slices()
    (single,) = alone.slices()
    assert [part.shape[1] for part in pair.by_network()] == [6, 9]
    assert torch.equal(pair.by_network()[0], single.features[:, 0])


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("other", mola.errors.OptionError, r"small: 12, sizes_for_test:other: 10"),
        ("soft", mola.errors.HeadError, "sizes_for_test:soft: .* applies a softmax"),
    ],
)
def test_networks_that_cannot_be_mixed_are_refused_before_they_are_run(root, tmp_path, name, error, words):
    source = IMAGENET.make_folds(options(root))[0]["test"].whole
    networks = open_named(f"sizes_for_test:small,sizes_for_test:{name}")
    with pytest.raises(error, match=words):
        ActivationCache(tmp_path).compute(networks, [source], lambda doing, done: None)
    assert not list(tmp_path.rglob("*.safetensors"))


IN_SLICES = (
    "import molaplace_lab.activations as storing; storing.SLICE = 3; from molaplace_lab.__main__ import main; main()"
)
"""The `molaplace` command, with slices that a few images fill more than one of."""


def test_two_processes_make_the_records_of_one(root, tmp_path):
    """They divide slices of images between them, and methods."""
    path = {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])}

    def options_of(name):
        folders = {"data": root / "data", "results": tmp_path / name / "results", "cache": tmp_path / name / "cache"}
        return [*ARGUMENTS, "--threads", "1", *(f"--{what}={folder}" for what, folder in folders.items())]

    alone = run_python("-c", IN_SLICES, *options_of("one"), env=os.environ | path, timeout=600)
    assert alone.returncode == 0, alone.stderr
    codes, errors = run_team(2, ["-c", IN_SLICES, *options_of("two")], tmp_path, timeout=600, **path)
    assert codes == [0, 0], errors
    assert list((tmp_path / "one" / "cache").rglob("000000003.safetensors"))  # a second slice
    alone_records, team_records = (
        {(record.method, record.run): record for record in Store(tmp_path / name / "results").records("imagenet")}
        for name in ("one", "two")
    )
    assert len(alone_records) == 2 * len(methods_of("main", IMAGENET.budget, IMAGENET.sweep))
    assert alone_records.keys() == team_records.keys()
    for name, record in alone_records.items():
        other = team_records[name]
        assert_close(other.chosen.get("prior_precision", 0), record.chosen.get("prior_precision", 0))
        for set_name, result in record.labelled.items():
            assert result.count == 8  # two images of each of four classes, each under one corruption
            assert_close(other.labelled[set_name].metrics, result.metrics, scale=1.0, name=name)
        for set_name, result in other.outliers.items():
            for score, numbers in result.scores.items():
                expected = record.outliers[set_name].scores[score]
                assert_close(numbers, expected, "difference", scale=1.0, name=(name, score))
    shifted = [f"severity {severity}" for severity in range(1, 6)]
    assert (list(record.labelled), list(record.outliers)) == (["test", *shifted], ["svhn"])
    assert set(alone_records["MoLA", 1].labelled["severity 3"].types) == {"contrast", "gaussian_noise"}
    document = Store(tmp_path / "one" / "results").read_document("imagenet", "suite.json")
    assert "training images are not available" in document["notes"][-2]
    assert document["network"] == "sizes_for_test:small, sizes_for_test:large"
    # Nothing is left to do: the same command ends at once, and leaves the records as they are.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("run-*.json")}
    assert CliRunner().invoke(app, options_of("one")).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("run-*.json")} == before


def test_a_named_network_takes_its_weights_from_a_file(root, tmp_path):
    (small,) = open_named("sizes_for_test:small")
    network = small.load()
    torch.nn.init.ones_(network.network.head.bias)
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    (from_file,) = open_named(f"sizes_for_test:small={tmp_path / 'weights.safetensors'}")
    images = torch.rand(2, 3, SIDE, SIDE)
    assert torch.equal(from_file.load()(images), network(images))
    assert from_file.checksum != small.checksum
    with pytest.raises(mola.errors.OptionError, match="cannot import 'no_such_module_here"):
        open_named("no_such_module_here:build")
