"""Networks as a user names them: every form gives the same network, and what is wrong is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.cli.folder import open_posterior
from molaplace.cli.networks import build_networks, folder_hints
from molaplace.errors import MissingExtraError, OptionError, StorageError
from molaplace.perceptrons import mlp
from molaplace.saving.weights import save_weights
from tests.closeness import assert_close
from tests.workspace import CLASSES, job_for, run_fit

pytestmark = pytest.mark.usefixtures("_in_workspace")


def test_networks_by_name_and_by_import(workspace, tmp_path):
    perceptron = mlp(64, (256, 256), 7, bias=False).eval()
    save_weights(perceptron, tmp_path / "mlp.safetensors")
    torch.save(
        {"epoch": 3, "state_dict": {f"module.{key}": value for key, value in perceptron.state_dict().items()}},
        tmp_path / "mlp.pt",
    )
    inputs = torch.randn(2, 1, 8, 8)
    built = build_networks(["mlp"], [str(tmp_path)], classes=7)
    assert [path.name for path in built.files] == ["mlp.pt", "mlp.safetensors"], "a folder, in the order of its names"
    for network in built.networks:  # wrapped or not
        assert_close(network(inputs), perceptron(inputs))
        assert not network.training
    assert built.hints.mode == "L"
    mixed = build_networks([f"{workspace.module}:wide", f"{workspace.module}:build"], [])
    assert [network[1].out_features for network in mixed.networks] == [20, 12], "as the functions make them"


@pytest.mark.parametrize(
    ("names", "weights", "words"),
    [
        (["mlpp"], ["0"], r"unknown network 'mlpp'\. Did you mean 'mlp'\?"),
        (["./here"], ["0"], "file or folder does not exist"),
        (["mlp"], [], "mlp has no trained weights"),
        (["{m}:build"], ["nowhere.pt"], r"nowhere\.pt do not exist"),
        (["{m}:build"], ["strange"], "strange contains no weights"),
        (["{m}:build", "{m}:wide"], ["0", "1", "2"], "3 weight files for 2 networks"),
        (["{m}:gone"], ["0"], "no attribute 'gone'"),
        (["no_such_module_here:build"], ["0"], "No module named 'no_such_module_here'"),
        (["{m}:broken"], ["0"], "failed .KeyError"),
        (["{m}:nothing"], ["0"], "returned int; expected a network"),
        (["train"], [], r"train contains no config\.json"),
    ],
)
def test_networks_that_cannot_be_built_say_why(workspace, names, weights, words):
    files = [workspace.weights()[int(path)] if path.isdigit() else path for path in weights]
    with pytest.raises(OptionError, match=words):
        build_networks([name.format(m=workspace.module) for name in names], files)


@pytest.mark.filterwarnings("ignore")  # torch's own, of what it deprecates
def test_compiled_networks_are_unwrapped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "import torch\n\n\ndef compiled():\n    return torch.compile(torch.nn.Linear(3, 2))\n"
    Path("compiled_networks.py").write_text(code)
    assert type(build_networks(["compiled_networks:compiled"]).networks[0]) is nn.Linear


def hub_folder(folder: Path, architecture: str = "ViTForImageClassification", **processor) -> Path:
    folder.mkdir()
    names = {str(index): name for index, name in enumerate(CLASSES)}
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "id2label": names}))
    (folder / "model.safetensors").write_bytes(b"")
    if processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def test_a_hub_folder_that_cannot_be_loaded_says_why(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"transformers.*molaplace\[hub\]"):
        build_networks([str(hub_folder(tmp_path / "vit"))])
    with pytest.raises(OptionError, match="contains a ViTModel: expected a classifier"):
        build_networks([str(hub_folder(tmp_path / "bare", "ViTModel"))])
    (tmp_path / "vit" / "config.json").write_text("{")
    with pytest.raises(StorageError, match=r"config\.json is not readable JSON"):
        build_networks([str(tmp_path / "vit")])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, lambda pixels: (pixels / 255 - 0.4) / 0.2),
        ({"rescale_factor": 1 / 127.5, "rescale_offset": True}, lambda pixels: (pixels / 127.5 - 1 - 0.4) / 0.2),
        ({"do_rescale": False, "do_normalize": False}, lambda pixels: pixels),
    ],
)
def test_pixels_come_to_the_range_that_the_processor_says(tmp_path, settings, expected):
    folder = hub_folder(tmp_path / "vit", image_mean=[0.4] * 3, image_std=[0.2] * 3, **settings)
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    normalised = folder_hints(folder)[0].normalise(pixels)
    assert_close(normalised, expected(pixels.double()))


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_hub_folder_from_transformers_itself(workspace, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.set_default_dtype(torch.float32)
    names = dict(enumerate(CLASSES))
    config = transformers.ViTConfig(
        image_size=6,
        patch_size=3,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        id2label=names,
        label2id={name: index for index, name in names.items()},
    )
    torch.manual_seed(0)
    network = transformers.ViTForImageClassification(config).eval()
    network.save_pretrained(tmp_path / "vit")
    built = build_networks([str(tmp_path / "vit")])
    inputs = workspace.inputs("test")[0]
    assert_close(built.networks[0](inputs).logits, network(inputs).logits)
    assert built.classes == CLASSES
    job = job_for(workspace, network=(str(tmp_path / "vit"),), weights=(), val=None, rule="none", train="train.npz")
    run_fit(job, tmp_path / "posterior")
    opened = open_posterior(tmp_path / "posterior", trust=True)
    expected = mola.fit(network, [workspace.inputs("train")], progress=False)
    assert_close(opened.posterior(inputs), expected(inputs))
    assert opened.classes == CLASSES
