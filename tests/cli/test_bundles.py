"""One bundle: what each door writes, each other door opens, and all of them predict the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import molaplace as mola
from molaplace.errors import OptionError, StorageError
from tests import saved_files
from tests.cli.fitted_folders import run
from tests.closeness import assert_close

pytestmark = pytest.mark.parametrize("kind", ["classes"], indirect=True)
BUILD = "kind_classes:build"


def from_python(kind):
    """The posterior, the arguments that make its folder complete, and the networks' predictions for the test data."""
    networks = [kind.open().posterior.networks[index] for index in range(2)]
    posterior = mola.fit(networks, [kind.data("train")], [kind.data("val")], rule="nll", progress=False)
    inputs, labels = kind.data("val")
    validation = (posterior.predict(inputs), labels)
    return posterior, {"build": BUILD, "classes": kind.names, "example": inputs, "validation": validation}


def by_save(kind, folder):
    posterior, options = from_python(kind)
    return posterior.save(folder, networks=True, **options)


def by_hub(kind, folder):
    posterior, options = from_python(kind)
    return mola.hub.save(posterior, folder, **options)


def by_fit(kind, folder):
    kind.fit(output=str(folder))
    return folder


def by_fit_with_copies(kind, folder):
    kind.fit("--bundle", output=str(folder))
    return folder


def reloaded(kind, folder):
    """What another door wrote, loaded and saved again."""
    posterior = mola.load(by_fit(kind, folder.with_name("first")), trust=True)
    _, options = from_python(kind)
    return posterior.save(folder, networks=True, **options)


WRITERS = (by_save, by_hub, by_fit, by_fit_with_copies, reloaded)


def probabilities(path, kind):
    lines = path.read_text().splitlines()
    columns = [lines[0].split(",").index(f"prob_{name}") for name in kind.names]
    return torch.tensor([[float(line.split(",")[column]) for column in columns] for line in lines[1:]])


def loaded(kind, folder, _):
    return mola.load(folder, trust=True).predict(kind.data("test")[0]).probs


def loaded_with_a_function(kind, folder, _):
    import kind_classes

    if not (folder / "networks").exists():
        return loaded(kind, folder, _)
    return mola.load(folder, kind_classes.build).predict(kind.data("test")[0]).probs


def loaded_from_the_hub(kind, folder, _):
    return mola.hub.load(folder, trust=True).predict(kind.data("test")[0]).probs


def predicted(kind, folder, output):
    result = run("predict", folder, "test.npz", "-o", output / "p.csv", "--probabilities", "--error-rate", 0.3)
    assert result.exit_code == 0, result.output
    assert {"outlying", "answer"} <= set((output / "p.csv").read_text().splitlines()[0].split(","))
    return probabilities(output / "p.csv", kind)


def exported(kind, folder, output):
    result = run("export", folder, "--torch", output / "m.pt2", "--no-check")
    assert result.exit_code == 0, result.output
    model = mola.export.load(output / "m.pt2", trust=True)
    assert model.classes == list(kind.names)
    assert model.document["ood_threshold"] is not None
    return model(kind.data("test")[0])["probs"]


READERS = (loaded, loaded_with_a_function, loaded_from_the_hub, predicted, exported)


@pytest.mark.usefixtures("_blank_figures")
@pytest.mark.parametrize("write", WRITERS, ids=lambda door: door.__name__)
def test_what_each_door_writes_each_other_door_opens(kind, write, tmp_path):
    folder = write(kind, tmp_path / "bundle")
    expected = mola.load(folder, kind.open().posterior.networks).predict(kind.data("test")[0]).probs
    for read in READERS:
        assert_close(read(kind, folder, tmp_path), expected.to(torch.float32), "search")
    result = run("evaluate", folder, "--test", "test.npz", "-o", tmp_path / "page", "--json")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "page" / "index.html").exists()
    result = run("watch", folder, "test.npz", "--log", tmp_path / "log.jsonl", "--trust", "--json")
    assert result.exit_code in (0, 3), result.output
    assert json.loads(result.stdout)["inputs"] == len(expected)
    result = run("info", folder)
    assert result.exit_code == 0
    assert "intact" in result.output
    assert "low, middle, high" in result.output
    bundle = mola.load_bundle(folder, trust=True)
    assert (bundle.classes, bundle.outputs, bundle.example.shape) == (kind.names, 3, (2, 4))
    assert len(bundle.columns["ood_score"]) == 120


def test_functions_that_only_a_bundle_names_need_consent(kind, tmp_path):
    folder = by_save(kind, tmp_path / "bundle")
    for load in (mola.load, mola.hub.load):
        with pytest.raises(OptionError, match=rf"names {BUILD}.*trust=True"):
            load(folder)
    (kind.root / BUILD).write_text("a file of this name is no consent")
    try:
        with pytest.raises(OptionError, match="--trust"):
            mola.load(folder)
    finally:
        (kind.root / BUILD).unlink()


def test_networks_that_a_posterior_may_hold_alone_are_not_replaced(kind, tmp_path):
    folder = by_fit_with_copies(kind, tmp_path / "bundle")
    weights = (folder / "networks" / "0" / "model.safetensors").read_bytes()
    posterior = mola.load(folder, trust=True)
    with pytest.raises(StorageError, match="saved posterior with networks"):
        posterior.save(folder)
    assert (folder / "networks" / "0" / "model.safetensors").read_bytes() == weights
    posterior.save(folder, overwrite=True)
    assert not (folder / "networks").exists()


def test_info_knows_every_folder(kind, tmp_path):
    posterior, _ = from_python(kind)
    folders = {
        "posterior": posterior.save(tmp_path / "posterior"),
        "watch": mola.watch(posterior, [kind.data("val")]).save(tmp_path / "watch"),
        "whole networks": mola.whole.fit(posterior.networks[0], [kind.data("train")], subnetwork=5).save(
            tmp_path / "whole"
        ),
    }
    for folder in folders.values():
        result = run("info", folder)
        assert result.exit_code == 0, result.output
        assert "intact" in result.output
    (folders["watch"] / "watch.safetensors").write_bytes(b"damaged")
    assert "truncated" in str(run("info", folders["watch"]).output)


def test_pixels_need_a_preparation(kind, tmp_path):
    posterior, options = from_python(kind)
    folder = posterior.save(tmp_path / "bundle", networks=True, **options)
    pixels = torch.zeros(6, 2, 2, 1, dtype=torch.uint8)
    np.savez(tmp_path / "pixels.npz", x=pixels.numpy())
    refused = run("predict", folder, tmp_path / "pixels.npz", "-o", tmp_path / "p.csv")
    assert "does not contain how images are prepared" in str(refused.output)


def test_names_of_another_number_of_classes_are_refused(kind, tmp_path):
    posterior, options = from_python(kind)
    folder = posterior.save(tmp_path / "bundle", networks=True, **options)
    saved_files.edit(folder / "posterior.safetensors", lambda document, _: document["bundle"].update(classes=["a"]))
    with pytest.raises(StorageError, match="damaged: expected the names of 3 outputs"):
        mola.load(folder, trust=True)
