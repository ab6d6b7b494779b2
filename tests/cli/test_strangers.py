"""Files of strangers: nothing that only a file names is imported without `--trust`, and nothing is unpickled."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.cli.folder import open_posterior
from molaplace.cli.info import read_information
from molaplace.cli.networks import build_networks
from molaplace.data.image_files import most_frequent_form
from molaplace.data.opening import open_dataset
from molaplace.data.preprocessing import Preprocessing
from molaplace.errors import DataError, OptionError, StorageError
from molaplace.imported import import_builder, import_function
from molaplace.saving.pretrained import load_pretrained
from molaplace.saving.weights import load_weights
from tests import saved_files
from tests.workspace import job_for, run_fit, with_job


@pytest.fixture(scope="module")
def bundle(workspace, tmp_path_factory):
    """A posterior with its weights, as somebody would offer it for download."""
    folder = tmp_path_factory.mktemp("fitted") / "posterior"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace.root)
        patch.syspath_prepend(str(workspace.root))
        run_fit(job_for(workspace), folder, bundle=True)
    return workspace, folder


@pytest.fixture
def download(bundle, tmp_path, monkeypatch):
    """The user's current folder with a download in it: a posterior that names a module, which writes a witness when it is imported."""
    workspace, folder = bundle
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    class Download:
        witness = tmp_path / "ran"
        honest = workspace.root / f"{workspace.module}.py"

        def __init__(self):
            source = f"open({str(self.witness)!r}, 'w').close()\n{self.honest.read_text()}"
            for module in ("evil.py", "dl/evil.py"):
                path = tmp_path / module
                path.parent.mkdir(exist_ok=True)
                path.write_text(source)

        def posterior(self, network, val=None):
            """A posterior's folder that names a network and, if given, a function for the validation data."""
            path = Path("dl/posterior")
            shutil.copytree(folder, path)
            text = (path / "job.toml").read_text().replace(f'"{workspace.module}:build"', json.dumps(network))
            if val is not None:
                text = re.sub(r'\nval = ".*"', f"\nval = {json.dumps(val)}", text, count=1)
            return with_job(path, text)

    yield Download()
    for name in [name for name in sys.modules if name.startswith(("evil", "dl"))]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "code", ["evil:build", "dl.evil:build", "pytest:main", "torchvision.models:resnet18", "sys:exit"]
)
def test_a_network_that_only_the_folder_names_is_not_built(download, code):
    folder = download.posterior(code)
    with pytest.raises(OptionError, match=rf"names {code}.*--trust.*--network {code}"):
        open_posterior(folder)
    assert not download.witness.exists()


def test_data_that_only_the_folder_names_are_not_opened(download):
    folder = download.posterior("dl.evil:build", val="dl.evil:val")
    Path("mine.py").write_text(download.honest.read_text())
    fitted = open_posterior(folder, network=["mine:build"])
    with pytest.raises(OptionError, match=r"--trust.*--val dl\.evil:val"):
        fitted.open_dataset(fitted.job.val, labelled=True)
    assert not download.witness.exists()


@pytest.mark.parametrize("consent", [{"network": ["dl.evil:build"]}, {"trust": True}], ids=["named", "trusted"])
def test_the_users_word_is_enough(download, consent):
    assert len(open_posterior(download.posterior("dl.evil:build"), **consent).posterior.networks) == 3
    assert download.witness.exists()


@pytest.mark.parametrize(
    ("command", "options", "label"),
    [
        ("fit", {"train": "digits:train", "network": ["dl.evil:build"]}, "--network"),
        ("fit", {"train": "dl.evil:train", "network": ["mlp"]}, "--train"),
        ("fit", {"train": "digits:train", "network": ["mlp"], "outliers": "dl.evil:val"}, "--outliers"),
        ("predict", {"inputs": "dl.evil:val"}, "--inputs"),
        ("evaluate", {"test": "digits:test", "ood": ["digits:val", "dl.evil:val"]}, "--ood"),
        ("export", {"onnx": "x.onnx", "network": ["dl.evil:build"]}, "--network"),
    ],
)
def test_a_run_file_is_not_the_users_word(download, mola_command, command, options, label):
    lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    lines += [] if command == "fit" else [f"posterior = {json.dumps(str(download.posterior('evil:build')))}"]
    Path("dl/run.toml").write_text("\n".join([f'command = "{command}"', "[options]", *lines]))
    code, _, words = mola_command(command, "--config", "dl/run.toml", trust=False)
    assert code == 1
    assert re.search(rf"--trust.*{label} dl\.evil", " ".join(words.split()))
    assert not download.witness.exists()


@pytest.mark.parametrize("name", ["dl/evil:build", "../dl/evil:build", "./dl/evil.py:build", "dl\\evil:build"])
def test_a_path_is_no_module(download, name):
    folder = download.posterior(name)
    with pytest.raises(OptionError, match="cannot import"):
        open_posterior(folder, trust=True)
    with pytest.raises(OptionError, match=r"Expected package\.module:function"):
        import_builder(name)
    assert not download.witness.exists()


def test_the_current_folder_does_not_hide_installed_packages(download, monkeypatch, tmp_path):
    path = [entry for entry in sys.path if entry not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", list(path))
    import_builder("torch.nn:Identity")()
    import_function("evil:build")
    assert sys.path == [*path, str(tmp_path)], "the user's own code may import more, after what is installed"


@pytest.mark.parametrize("kind", ["ForImageClassification", "ForSequenceClassification"])
def test_code_in_a_folder_of_transformers_is_not_run(tmp_path, kind):
    pytest.importorskip("transformers")
    for module in ("modeling_evil.py", "configuration_evil.py"):
        (tmp_path / module).write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    classes = {"AutoConfig": "configuration_evil.EvilConfig", f"AutoModel{kind}": f"modeling_evil.Evil{kind}"}
    config = {"model_type": "evil", "architectures": [f"Evil{kind}"], "auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    with pytest.raises(StorageError, match="cannot be loaded by transformers"):
        build_networks([str(tmp_path)])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "entry",
    [
        {"attn_implementation": "kernels-community/flash-attn"},
        {"_attn_implementation": "paged|user/kernel@v1:forward"},
        {"attn_implementation": {"vision_config": "user/kernel"}},
        {"vision_config": {"experts_implementation": "user/kernel"}},
    ],
)
def test_a_folder_of_transformers_cannot_name_a_kernel_to_download(tmp_path, entry, monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    build_networks([str(tmp_path)])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entry))
    monkeypatch.setattr(transformers.AutoModelForImageClassification, "from_pretrained", None)  # never called
    with pytest.raises(StorageError, match=r"names the kernel.*download and run"):
        build_networks([str(tmp_path)])
    with pytest.raises(StorageError, match=r"names the kernel.*download and run"):
        load_pretrained(transformers.AutoModelForImageClassification, tmp_path)


def small_vit():
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**size, image_size=8, patch_size=4))


@pytest.mark.parametrize(
    "entry",
    [
        {"model_args": {"checkpoint_path": "evil.bin"}},
        {"model_args": {"pretrained_cfg_overlay": {"file": "evil.bin"}}},
        {"vision_config": {"model_args": {"img_size": 8, "checkpoint_path": "evil.bin"}}},
        {"architecture": "hf-hub:user/evil"},
        {"backbone_config": {"backbone": "local-dir:evil"}},
        {"backbone": "evil", "use_pretrained_backbone": True},
        {"backbone": "evil", "backbone_kwargs": {"trust_remote_code": True}},
        {"configuration_files": ["config.4.0.0.json"]},
    ],
    ids=lambda entry: next(iter(entry)),
)
def test_a_folder_of_transformers_cannot_name_files_elsewhere(tmp_path, entry, monkeypatch):
    network = small_vit()
    network.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    harmless = {
        "model_args": {"img_size": [8, 8], "class_token": False, "global_pool": "avg"},
        "architecture": "vit.in1k",
    }
    path.write_text(json.dumps(config | harmless))
    build_networks([str(tmp_path)])
    path.write_text(json.dumps(config | entry))
    monkeypatch.setattr(type(network), "from_pretrained", None)  # never called
    with pytest.raises(StorageError, match=r"config\.json names .*load the network yourself"):
        build_networks([str(tmp_path)])
    with pytest.raises(StorageError, match=r"config\.json names .*load the network yourself"):
        load_pretrained(type(network), tmp_path)


def test_a_folder_of_transformers_cannot_name_a_backbone_by_an_adapter(tmp_path):
    small_vit().save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "user/evil"}))
    with pytest.raises(StorageError, match=r"adapter_config\.json names a backbone"):
        build_networks([str(tmp_path)])


def test_a_folder_of_timm_unpickles_nothing(tmp_path):
    try:
        import timm
        import transformers
    except Exception as error:  # torchvision, which timm imports, fails in its own ways on another build of torch
        pytest.skip(f"NO TIMM: install timm, torchvision and transformers to run this test ({error})")
    config = transformers.TimmWrapperConfig(architecture="resnet10t", num_labels=3)
    transformers.TimmWrapperForImageClassification(config).save_pretrained(tmp_path)
    assert len(build_networks([str(tmp_path)]).networks) == 1, timm.__version__
    torch.save({"fc.weight": Witnessed(tmp_path / "ran")}, tmp_path / "evil.bin")
    path = tmp_path / "config.json"
    arguments = {"model_args": {"checkpoint_path": str(tmp_path / "evil.bin")}}
    path.write_text(json.dumps(json.loads(path.read_text()) | arguments))
    with pytest.raises(StorageError):
        build_networks([str(tmp_path)])
    with pytest.raises(StorageError):
        load_pretrained(transformers.TimmWrapperForImageClassification, tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["data.csv", "data.npz", "listed.csv", "folder"])
def test_pipes_are_no_data(tmp_path, name):
    (tmp_path / "folder" / "cat").mkdir(parents=True)
    (tmp_path / "listed.csv").write_text("path,label\npipe.png,0\n")
    for pipe in ("data.csv", "data.npz", "pipe.png", "folder/cat/pipe.png"):
        os.mkfifo(tmp_path / pipe)
    signal.alarm(60)
    try:
        with pytest.raises(DataError):
            most_frequent_form(open_dataset(str(tmp_path / name), Preprocessing(), labelled=True))
    finally:
        signal.alarm(0)


CONTROLS = "\x1b[2J\x9b31m\u202eevil\r\x07"


def reseal(folder, **entries):
    def change(document, _):
        for name, value in entries.items():
            *way, last = name.split("__")
            inner = document
            for key in way:
                inner = inner[int(key) if key.isdigit() else key]
            inner[last] = value

    saved_files.edit(folder / "posterior.safetensors", change)
    return folder


def control_characters(text):
    """Control characters in a text."""
    return [character for character in text if unicodedata.category(character) == "Cc" and character not in "\n\t"] + [
        character for character in text if character in "\u202a\u202b\u202c\u202d\u202e"
    ]


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_text_of_a_posterior_is_shown_without_control_characters(download, mola_command, as_json):
    names = [f"{CONTROLS}{index}" for index in range(3)]
    folder = reseal(
        download.posterior("evil:build"),
        tuning__summary=CONTROLS, tuning__notes=[CONTROLS], bundle__classes=names, bundle__made__result__images=CONTROLS,
    )  # fmt: skip
    code, words, _ = mola_command("info", folder, *as_json)
    assert code == 0
    assert "evil" in words
    assert control_characters(words) == []
    assert control_characters(repr(read_information(folder))) == []
    for entries in ({"kind": CONTROLS}, {"link__name": CONTROLS}):
        with pytest.raises(StorageError, match="evil") as refusal:
            mola.load(reseal(folder, **entries), [nn.Identity()] * 3)
        assert control_characters(str(refusal.value)) == []


ABSURD = {
    "components__0__head__outputs": 2**60,
    "bundle__classes": ["cat"] * 4,
    "bundle__inputs__tensors": [{"name": "", "shape": [2**40], "dtype": "float32"}],
    "bundle__preparation__batch_size": 0,
    "bundle__preparation__workers": 0,
    "bundle__preparation__crop": 2**40,
    "bundle__preparation__resize": [8, 2**40],
    "bundle__preparation__dtype": "load",
    "bundle__made": {"command": 1},
    "over": "nothing",
    "link": {"name": "mc", "samples": 10**12},
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_numbers_in_a_posterior_are_refused(download, name):
    """Also those that only disagree with the networks."""
    folder = download.posterior("evil:build")
    assert open_posterior(folder, trust=True).outputs == 3
    with pytest.raises(StorageError, match=r"damaged|contains no posterior"):
        open_posterior(reseal(folder, **{name: ABSURD[name]}), trust=True)


class Witnessed:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_objects_in_weights_are_not_made(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pt"
    if form == "pickle":
        path.write_bytes(pickle.dumps({"1.weight": Witnessed("it-ran")}))
    else:
        torch.save({"1.weight": Witnessed("it-ran")}, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(StorageError, match=r"evil\.pt"):
        load_weights(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), path)
    assert not (tmp_path / "it-ran").exists()
