"""A user's networks and data by name: every form gives the same numbers, and what is wrong is named."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import mola
from mola import metrics
from mola.errors import DataError, HeadError, MissingExtraError, MolaWarning, OptionError, StorageError
from mola.jobs.arrays import open_arrays
from mola.jobs.datasets import open_set
from mola.jobs.evaluate import run_evaluate
from mola.jobs.fit import run_fit
from mola.jobs.folder import describe_inputs, example_of, open_folder
from mola.jobs.information import read_information
from mola.jobs.job import Job, read_job
from mola.jobs.networks import build_networks
from mola.jobs.order import check_order
from mola.jobs.predict import run_predict
from mola.jobs.preparation import Hints, Intake, settle
from mola.jobs.rows import Account, Loader
from mola.jobs.tally import Tally
from mola.jobs.toml import to_toml
from mola.models.checkpoints import load_weights, save_weights
from mola.models.registry import build_network
from tests.own_work import CLASSES, Desk, build, make_desk


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    return make_desk(tmp_path_factory.mktemp("desk"), "own_networks_for_jobs")


@pytest.fixture(autouse=True)
def _at_the_desk(desk, monkeypatch):
    monkeypatch.chdir(desk.root)
    monkeypatch.syspath_prepend(str(desk.root))


def job_for(desk: Desk, **changes) -> Job:
    given = {
        "network": (f"{desk.module}:build",),
        "weights": tuple(desk.weights()),
        "train": "train",
        "val": "val",
        "batch_size": 7,
        "workers": 0,
    }
    return Job(**(given | changes))


@pytest.fixture(scope="module")
def fitted(desk, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk.root)
        patch.syspath_prepend(str(desk.root))
        folder = tmp_path_factory.mktemp("fitted") / "posterior"
        run_fit(job_for(desk), folder)
        return open_folder(folder)


# --- the file -----------------------------------------------------------------------------------------------------------


def test_toml_is_read_back_to_the_same_values():
    document = {
        "text": 'quotes " and \\ and \n and \x7f and é',
        "numbers": [1, 2.5, -1e-300, 1e22],
        "flags": [True, False],
        "empty": [],
        "long": [f"a rather long text number {index}" for index in range(9)],
        "tables": [{"name": "", "shape": [1, 2]}, {"name": "b c", "shape": []}],
        "section": {"one": 1, "odd key!": {"deep": "x"}, "nothing": {}},
    }
    assert tomllib.loads(to_toml(document)) == document
    assert tomllib.loads(to_toml({"a": None, "b": float("inf"), "c": {"d": None, "e": 1}})) == {
        "b": float("inf"),
        "c": {"e": 1},
    }
    with pytest.raises(OptionError, match="cannot write a object"):
        to_toml({"a": object()})


def test_a_job_comes_back_from_its_file(desk, tmp_path):
    job = job_for(
        desk,
        classes=CLASSES,
        resize=(6, 6),
        mean=(0.5, 0.4, 0.3),
        std=(1.0, 2.0, 3.0),
        threshold=0.8,
        seed=3,
        strict=True,
    )
    folder = desk.root / "kept"
    folder.mkdir(exist_ok=True)
    document = job.document(folder)
    (folder / "job.toml").write_text(to_toml(document))
    again, whole = read_job(folder)
    assert whole["networks"]["weights"][0] == "../weights/0.safetensors"
    assert again.network == job.network, "an import path is no file"
    assert [Path(path).resolve() for path in again.weights] == [Path(path).resolve() for path in job.weights]
    assert Path(again.train).resolve() == (desk.root / "train").resolve()
    same = [name for name in vars(job) if name not in ("weights", "train", "val")]
    assert {name: getattr(again, name) for name in same} == {name: getattr(job, name) for name in same}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[networks", "is not TOML"),
        ("format = 'other'", "has the format 'other'"),
        ("version = 9", "version 9"),
        ("networks = 3", "networks must be a table"),
        ("[metod]\nrule = 'nll'", "Did you mean 'method'"),
        ("[method]\nrul = 'nll'", "Did you mean 'rule'"),
        ("[method]\nrule = 3", "rule in .method. must be a text, got 3"),
        ("[preparation]\nresize = [1, 2, 3]", "a whole number, or .height, width."),
        ("[preparation]\nmean = 'a'", "must be a list of numbers"),
        ("[networks]\nweights = [1]", "must be a list of texts"),
        ("[networks]\nclasses = true", "a whole number, or a list of names"),
        ("[run]\nseed = -1", "must be a whole number"),
        ("[data]\nstrict = 'yes'", "must be true or false"),
        ("[method]\nthreshold = 'high'", "must be a number"),
    ],
)
def test_a_wrong_file_names_the_place(tmp_path, text, words):
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=words) as caught:
        read_job(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(OptionError, match=r"nothing\.toml does not exist"):
        read_job(tmp_path / "nothing.toml")


# --- fitting ------------------------------------------------------------------------------------------------------------


def test_a_job_is_what_a_program_would_have_done(desk, fitted):
    train, val = ([desk.inputs(split)] for split in ("train", "val"))
    expected = mola.fit(desk.networks(), train, val, progress=False)
    assert fitted.posterior.prior_precision == pytest.approx(expected.prior_precision, rel=1e-9)
    inputs = desk.inputs("test")[0]
    assert torch.allclose(fitted.posterior(inputs), expected(inputs), atol=1e-6)
    assert fitted.classes == CLASSES
    assert fitted.example.shape == (2, 3, 6, 6)
    assert fitted.example.dtype == torch.float32
    assert fitted.preparation["mode"] == "RGB"
    assert fitted.document["result"]["outputs"] == 3


@pytest.mark.parametrize("form", ["train.npz", "train.csv", "own_networks_for_jobs:train"])
def test_every_form_of_the_same_data_gives_the_same_posterior(desk, fitted, form, tmp_path):
    val = form.replace("train", "val")
    document = run_fit(job_for(desk, train=form, val=val), tmp_path / "posterior").document
    assert document["result"]["prior_precision"] == pytest.approx(fitted.posterior.prior_precision, rel=1e-6)
    assert document["result"]["validation"]["posterior"] == pytest.approx(
        fitted.document["result"]["validation"]["posterior"], rel=1e-5
    )
    assert document["result"]["inputs"] == fitted.document["result"]["inputs"]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"rule": "nll"}, mola.ValidationScore("nll")),
        ({"rule": "brier"}, mola.ValidationScore("brier")),
        ({"rule": "ece"}, mola.ValidationScore("ece")),
        ({"rule": "evidence"}, mola.Evidence()),
        ({"rule": "threshold", "threshold": 0.6}, mola.ConfidenceThreshold(confidence=0.6)),
    ],
    ids=lambda one: one.get("rule") if isinstance(one, dict) else "",
)
@pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")
def test_rules_are_those_of_the_library(desk, tmp_path, changes, rule):
    chosen = run_fit(job_for(desk, **changes), tmp_path / "posterior").document["result"]["prior_precision"]
    data = None if changes["rule"] == "evidence" else [desk.inputs("val")]
    expected = mola.fit(desk.networks(), [desk.inputs("train")], progress=False).tune(data, rule=rule, progress=False)
    assert chosen == pytest.approx(expected.prior_precision, rel=1e-6)


@pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")
def test_outliers_stacking_structure_and_fixed_precision(desk, tmp_path):
    exposed = run_fit(job_for(desk, rule="outliers", outliers="strange"), tmp_path / "a").document["result"]
    strange = torch.stack(
        [torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) for path in sorted(Path("strange").iterdir())]
    )
    plain = mola.fit(desk.networks(), [desk.inputs("train")], progress=False)
    rule = mola.OutlierExposure([strange.float() / 255])
    assert exposed["prior_precision"] == pytest.approx(
        plain.tune([desk.inputs("val")], rule=rule, progress=False).prior_precision, rel=1e-6
    )
    run_fit(
        job_for(desk, rule="none", prior_precision=2.5, mixing="stacking", structure="diag", link="mc"), tmp_path / "b"
    )
    opened = open_folder(tmp_path / "b").posterior
    assert (opened.prior_precision, opened.structure, opened.link.name) == ((2.5,) * 3, "diag", "mc")
    assert opened.weights.tolist() != pytest.approx([1 / 3] * 3), "stacking chose"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": None}, "no training data"),
        ({"network": ()}, "no network"),
        ({"structure": "cron"}, "Did you mean 'kron'"),
        ({"link": "probt"}, "Did you mean 'probit'"),
        ({"rule": "best"}, "rule must be one of"),
        ({"mixing": "even"}, "mixing must be one of"),
        ({"val": None}, "the rule 'threshold' needs validation data"),
        ({"val": None, "rule": "none", "mixing": "stacking"}, "the mixing 'stacking' needs validation data"),
        ({"rule": "nll", "threshold": 0.9}, "--threshold is for the rule 'threshold'"),
        ({"rule": "outliers"}, "go together"),
        ({"outliers": "strange"}, "go together"),
        ({"mode": "CMYK"}, "mode must be one of RGB, L"),
        ({"normalise": "cifar"}, "Did you mean 'cifar10'"),
        ({"mean": (0.5,)}, "both --mean and --std"),
        ({"mean": (0.5,), "std": (0.0,)}, "positive standard deviations"),
        ({"mean": (0.5,), "std": (1.0,), "normalise": "none"}, "both --mean and --std"),
        ({"batch_size": 0}, "batch_size must be 1 or more"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
    ],
    ids=str,
)
def test_a_job_that_cannot_be_done_says_so(desk, tmp_path, changes, words):
    with pytest.raises(OptionError, match=words):
        run_fit(job_for(desk, **changes), tmp_path / "posterior")
    assert not (tmp_path / "posterior").exists()


def test_an_output_that_is_a_file_is_refused(desk, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(OptionError, match="taken is a file"):
        run_fit(job_for(desk), tmp_path / "taken")


# --- opening again ------------------------------------------------------------------------------------------------------


def test_a_bundle_can_be_moved(desk, tmp_path, fitted):
    run_fit(job_for(desk, val="val.npz"), tmp_path / "made", bundle=True)
    shutil.move(tmp_path / "made", tmp_path / "elsewhere")
    opened = open_folder(tmp_path / "elsewhere")
    assert all("elsewhere" in path for path in opened.job.weights)
    assert torch.equal(opened.posterior(opened.example), fitted.posterior(fitted.example))
    with pytest.raises(OptionError, match="--bundle copies files of --weights"):
        run_fit(job_for(desk, weights=(), network=(f"{desk.module}:build",)), tmp_path / "other", bundle=True)


def test_weights_that_changed_or_went_are_named(desk, tmp_path):
    paths = [tmp_path / f"{index}.safetensors" for index in range(2)]
    for path, source in zip(paths, desk.weights(), strict=False):
        shutil.copy(source, path)
    run_fit(job_for(desk, weights=tuple(map(str, paths))), tmp_path / "posterior")
    assert [one["state"] for one in read_information(tmp_path / "posterior")["weight_files"]] == ["as fitted"] * 2
    shutil.copy(desk.weights()[2], paths[1])
    assert read_information(tmp_path / "posterior")["weight_files"][1]["state"] == "changed"
    with pytest.raises(StorageError, match=r"1\.safetensors has changed since the posterior was fitted"):
        open_folder(tmp_path / "posterior")
    paths[1].unlink()
    assert read_information(tmp_path / "posterior")["weight_files"][1]["state"] == "missing"
    with pytest.raises(OptionError, match=r"the weights .*1\.safetensors do not exist"):
        open_folder(tmp_path / "posterior")


def test_a_folder_that_is_none_is_refused(desk, tmp_path, fitted):
    with pytest.raises(StorageError, match=r"holds no job\.toml"):
        open_folder(tmp_path)
    (tmp_path / "job.toml").write_text("[networks]\nnetwork = 'lenet'\n")
    with pytest.raises(StorageError, match="has no results"):
        open_folder(tmp_path)
    (tmp_path / "job.toml").write_text("[result]\noutputs = 'three'\n")
    with pytest.raises(StorageError, match=r"job\.toml: the saved document is garbled"):
        open_folder(tmp_path)
    with pytest.raises(OptionError, match="device 'abacus' cannot be used"):
        open_folder(fitted.folder, device="abacus")
    with pytest.raises(StorageError, match="holds no saved posterior"):
        read_information(tmp_path)


def test_information_without_networks(fitted, desk, tmp_path, monkeypatch):
    monkeypatch.setattr("mola.jobs.networks.build_networks", lambda *_, **__: pytest.fail("built a network"))
    found = read_information(fitted.folder)
    assert (found["components"], found["structure"], found["outputs"], found["features"]) == (3, "kron", 3, [13] * 3)
    assert found["classes"] == list(CLASSES)
    assert found["prior_precision"] == list(fitted.posterior.prior_precision)
    assert found["train_count"] == 36
    json.dumps(found)
    fitted.posterior.save(tmp_path / "by-program")
    assert read_information(tmp_path / "by-program")["job"] is None
    mola.temperature_scaled(desk.networks(), [desk.inputs("val")], progress=False).save(tmp_path / "other")
    with pytest.raises(StorageError, match="holds a saved temperature, not a posterior"):
        read_information(tmp_path / "other")


@pytest.mark.parametrize(
    "inputs",
    [
        torch.ones(5, 3, 2),
        {"input_ids": torch.ones(5, 7).long(), "attention_mask": torch.ones(5, 7).long()},
        (torch.ones(5, 1), torch.ones(5, 2)),
    ],
    ids=["tensor", "mapping", "tuple"],
)
def test_examples_have_the_form_of_the_inputs(inputs):
    example = example_of(tomllib.loads(to_toml(describe_inputs(inputs))))
    if isinstance(inputs, dict):
        assert {name: (one.shape, one.dtype) for name, one in example.items()} == dict.fromkeys(
            inputs, ((2, 7), torch.int64)
        )
        assert example["attention_mask"].all(), "a network that may look at nothing gives no numbers"
    else:
        pairs = zip(
            [inputs] if isinstance(inputs, torch.Tensor) else inputs,
            [example] if isinstance(example, torch.Tensor) else example,
            strict=True,
        )
        assert all(made.shape[1:] == given.shape[1:] and made.dtype == given.dtype for given, made in pairs)


# --- networks -----------------------------------------------------------------------------------------------------------


def test_networks_by_name_and_by_import(desk, tmp_path):
    lenet = build_network("lenet", 7).eval()
    save_weights(lenet, tmp_path / "lenet.safetensors")
    torch.save(
        {"epoch": 3, "state_dict": {f"module.{key}": value for key, value in lenet.state_dict().items()}},
        tmp_path / "lenet.pt",
    )
    inputs = torch.randn(2, 1, 28, 28)
    built = build_networks(["lenet"], [str(tmp_path)])
    assert [path.name for path in built.files] == ["lenet.pt", "lenet.safetensors"], (
        "a folder, in the order of its names"
    )
    for network in built.networks:  # the number of classes is read from the file, wrapped or not
        assert torch.equal(network(inputs), lenet(inputs))
        assert not network.training
    assert built.hints.shape == (1, 28, 28)
    mixed = build_networks([f"{desk.module}:wide", f"{desk.module}:build"], [])
    assert [network[1].out_features for network in mixed.networks] == [20, 12], "as the functions make them"


def test_networks_of_several_architectures(desk, tmp_path):
    torch.manual_seed(5)
    save_weights(build(20), tmp_path / "wide.safetensors")
    names = [f"{desk.module}:build", f"{desk.module}:wide"]
    built = build_networks(names, [desk.weights()[0], str(tmp_path / "wide.safetensors")])
    assert [network[1].out_features for network in built.networks] == [12, 20]


@pytest.mark.parametrize(
    ("names", "weights", "words"),
    [
        (["lenett"], ["0"], "unknown network 'lenett'"),
        (["./here"], ["0"], "is no file or folder here"),
        (["lenet"], [], "lenet has no trained weights by itself"),
        (["{m}:build"], ["nowhere.pt"], r"nowhere\.pt do not exist"),
        (["{m}:build"], ["strange"], "strange holds no weights"),
        (["{m}:build", "{m}:wide"], ["0", "1", "2"], "3 files of weights for 2 networks"),
        (["{m}:gone"], ["0"], "has no 'gone'"),
        (["no_such_module_here:build"], ["0"], "cannot import 'no_such_module_here'"),
        (["{m}:broken"], ["0"], "failed .KeyError"),
        (["{m}:nothing"], ["0"], "made a int; expected an nn.Module"),
        (["train"], [], r"train holds no config\.json"),
        (["gone.pt2"], [], r"gone\.pt2 does not exist"),
    ],
)
def test_networks_that_cannot_be_built_say_why(desk, names, weights, words):
    files = [desk.weights()[int(one)] if one.isdigit() else one for one in weights]
    with pytest.raises(OptionError, match=words):
        build_networks([name.format(m=desk.module) for name in names], files)


def test_a_pickle_that_is_not_weights_is_named_and_not_run(desk, tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was run",))

    torch.save({"state_dict": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(StorageError, match=r"trap\.pt holds more than weights"):
        build_networks([f"{desk.module}:build"], [str(tmp_path / "trap.pt")])
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    with pytest.raises(StorageError, match=r"tensor\.pt holds a Tensor"):
        build_networks([f"{desk.module}:build"], [str(tmp_path / "tensor.pt")])
    (tmp_path / "text.pt").write_text("not weights at all")
    with pytest.raises(StorageError, match=r"text\.pt is neither safetensors nor"):
        build_networks([f"{desk.module}:build"], [str(tmp_path / "text.pt")])
    with pytest.raises(StorageError, match="does not hold this network's weights"):
        build_networks([f"{desk.module}:wide"], [desk.weights()[0]])


def exported(network, inputs, path):
    program = torch.export.export(network, (inputs,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.export.save(program, path)
    return str(path)


def test_an_exported_program_is_fitted_like_its_network(desk, tmp_path, fitted):
    inputs, _ = desk.inputs("train")
    files = [exported(one, inputs[:2], tmp_path / f"{index}.pt2") for index, one in enumerate(desk.networks())]
    with pytest.raises(OptionError, match=r"0\.pt2 is an exported program.*add --trust"):
        build_networks(files)
    run_fit(job_for(desk, network=tuple(files), weights=(), trust=True), tmp_path / "posterior")
    assert "trust" not in (tmp_path / "posterior" / "job.toml").read_text()
    with pytest.raises(OptionError, match="add --trust"):  # a folder may come from a stranger
        open_folder(tmp_path / "posterior")
    opened = open_folder(tmp_path / "posterior", trust=True)
    assert torch.allclose(opened.posterior(inputs), fitted.posterior(inputs), atol=1e-6)
    assert opened.posterior.prior_precision == pytest.approx(fitted.posterior.prior_precision, rel=1e-6)


def test_an_exported_program_without_a_last_layer_or_damaged_is_refused(tmp_path):
    path = exported(nn.Sequential(build(), nn.Softmax(1)).eval(), torch.zeros(2, 3, 6, 6), tmp_path / "probs.pt2")
    with pytest.raises(HeadError, match=r"probs\.pt2 ends in aten\.softmax"):
        build_networks([path], trust=True)
    (tmp_path / "cut.pt2").write_bytes(Path(path).read_bytes()[:200])
    with pytest.raises(StorageError, match=r"cut\.pt2 is no program"):
        build_networks([str(tmp_path / "cut.pt2")], trust=True)


def test_timm_is_asked_for_the_architecture_alone(monkeypatch, tmp_path):
    """timm itself needs torchvision: what is asked of it is tested on a stand-in."""
    monkeypatch.setitem(sys.modules, "timm", None)
    save_weights(build(), tmp_path / "small.safetensors")
    with pytest.raises(MissingExtraError, match=r"timm:small needs timm.*mola-torch\[hub\]"):
        build_networks(["timm:small"], [str(tmp_path / "small.safetensors")])
    asked = []

    def create_model(name, *, pretrained, num_classes):
        if name != "small":
            message = f"Unknown model ({name})"
            raise RuntimeError(message)
        asked.append((pretrained, num_classes))
        network = nn.Sequential(nn.Flatten(), nn.Linear(108, 12), nn.ReLU(), nn.Linear(12, num_classes)).float()
        network.pretrained_cfg = {"input_size": (3, 6, 6), "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.5, 0.5)}
        return network

    monkeypatch.setitem(sys.modules, "timm", types.SimpleNamespace(create_model=create_model))
    built = build_networks(["timm:small"], [str(tmp_path / "small.safetensors")])
    assert asked[-1] == (False, 3), "no download, and as many classes as the file has"
    assert built.hints == Hints(resize=(6, 6), mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.5))
    with pytest.raises(OptionError, match="timm cannot make 'large'"):
        build_networks(["timm:large"], [str(tmp_path / "small.safetensors")])


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
    with pytest.raises(MissingExtraError, match=r"transformers.*mola-torch\[hub\]"):
        build_networks([str(hub_folder(tmp_path / "vit"))])
    with pytest.raises(OptionError, match="holds a ViTModel: expected a classifier"):
        build_networks([str(hub_folder(tmp_path / "bare", "ViTModel"))])
    (tmp_path / "vit" / "model.safetensors").unlink()
    with pytest.raises(StorageError, match=r"model\.safetensors does not exist"):
        build_networks([str(tmp_path / "vit")])
    (tmp_path / "vit" / "config.json").write_text("{")
    (tmp_path / "vit" / "model.safetensors").write_bytes(b"")
    with pytest.raises(StorageError, match=r"config\.json cannot be read as JSON"):
        build_networks([str(tmp_path / "vit")])
    (tmp_path / "vit" / "config.json").write_text("[]")
    with pytest.raises(StorageError, match=r"config\.json holds a list"):
        build_networks([str(tmp_path / "vit")])


def test_a_hub_folder_tells_classes_and_preparation(tmp_path, monkeypatch):
    asked = {}

    def from_pretrained(folder, **options):
        asked.update(options)
        return build(), {"missing_keys": missing}

    missing: list[str] = []
    auto = types.SimpleNamespace(from_pretrained=from_pretrained)
    stand_in = types.SimpleNamespace(AutoModelForImageClassification=auto)
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    shape = {"size": {"shortest_edge": 8}, "do_center_crop": True, "crop_size": {"height": 6, "width": 6}}
    folder = hub_folder(tmp_path / "vit", **shape, image_mean=[0.5, 0.5, 0.5], image_std=[0.2, 0.2, 0.2])
    built = build_networks([str(folder)])
    assert asked["local_files_only"]
    assert asked["use_safetensors"]
    assert not asked["trust_remote_code"]
    assert built.hints == Hints(None, CLASSES, 8, 6, (0.5,) * 3, (0.2,) * 3)
    assert [path.name for path in built.files] == ["model.safetensors"]
    plain = settle(Job(normalise="none"), built.hints, "float32")
    assert (plain.mean, plain.resize) == ((0.0,), 8), "the user's word comes first, then the network's"
    missing.append("classifier.weight")
    with pytest.raises(StorageError, match=r"lacks weights of the network .classifier\.weight"):
        build_networks([str(folder)])
    auto.from_pretrained = lambda *_, **__: (_ for _ in ()).throw(OSError("no such shard\nand more"))
    with pytest.raises(StorageError, match=r"cannot be loaded by transformers: no such shard$"):
        build_networks([str(folder)])


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_hub_folder_from_transformers_itself(desk, tmp_path):
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
    inputs = desk.inputs("test")[0]
    assert torch.equal(built.networks[0](inputs).logits, network(inputs).logits)
    assert built.hints.classes == CLASSES
    job = job_for(desk, network=(str(tmp_path / "vit"),), weights=(), val=None, rule="none", train="train.npz")
    run_fit(job, tmp_path / "posterior")
    opened = open_folder(tmp_path / "posterior")
    expected = mola.fit(network, [desk.inputs("train")], progress=False)
    assert torch.allclose(opened.posterior(inputs), expected(inputs), atol=1e-5)
    assert opened.classes == CLASSES


# --- data ---------------------------------------------------------------------------------------------------------------


INTAKE = Intake(mode="RGB", shape=(3, 6, 6), batch_size=5, workers=2)


def copy_of(desk: Desk, split: str, folder: Path) -> Path:
    shutil.copytree(desk.root / split, folder)
    return folder


def spoil(folder: Path) -> dict[str, str]:
    """Malformed files of every kind, and what is to be said of each."""
    cat, draw = folder / "cat", np.random.default_rng(1)
    whole = next(cat.glob("*.png")).read_bytes()
    (cat / "corrupt.png").write_bytes(whole[:60])
    (cat / "empty.png").write_bytes(b"")
    (cat / "text.jpg").write_text("no image")
    Image.fromarray(draw.integers(0, 255, (9, 6, 3)).astype(np.uint8)).save(cat / "tall.png")
    Image.fromarray(draw.integers(0, 255, (6, 6, 3)).astype(np.uint8)).save(folder / "loose.png")
    return {
        "cat/corrupt.png": "cannot be decoded",
        "cat/empty.png": "cannot be decoded",
        "cat/text.jpg": "cannot be decoded",
        "cat/tall.png": "9 x 6 pixels",
        "loose.png": "no class's subfolder",
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_malformed_images_are_left_out_by_name_and_the_rest_goes_on(desk, tmp_path, workers):
    folder = copy_of(desk, "train", tmp_path / "train")
    expected = spoil(folder)
    account = Account()
    intake = Intake(mode="RGB", shape=(3, 6, 6), batch_size=5, workers=workers)
    loader = Loader(open_set(str(folder), intake, labelled=True), account)
    inputs, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    good_inputs, good_labels = desk.inputs("train")
    assert torch.equal(labels, good_labels)
    assert torch.equal(inputs, good_inputs)
    found = account.left_out[str(folder)]
    assert found.keys() == expected.keys()
    assert all(words in found[name] for name, words in expected.items())
    assert len(account) == 5
    list(loader)
    assert len(account) == 5, "read twice, counted once"
    assert any("5 inputs left out" in line for line in account.lines())
    assert any("and 2 more" in line for line in account.lines(shown=3))
    with pytest.raises(DataError, match=r"(cannot be decoded|pixels|subfolder).*--strict leaves nothing out"):
        list(Loader(loader.source, Account(), strict=True))


def test_grey_among_colour_is_used_and_named(desk, tmp_path):
    folder = copy_of(desk, "train", tmp_path / "train")
    path = folder / "dog" / "grey.png"
    Image.fromarray(np.full((6, 6), 99, dtype=np.uint8)).save(path)
    account = Account()
    batches = list(Loader(open_set(str(folder), INTAKE, labelled=True), account))
    assert sum(len(labels) for _, labels in batches) == 37
    assert account.noted[str(folder)] == {"dog/grey.png": "is grey and was read as RGB"}
    assert len(account) == 0
    asked = Intake(mode="RGB", asked=True, shape=(3, 6, 6))
    quiet = Account()
    list(Loader(open_set(str(folder), asked, labelled=True), quiet))
    assert quiet.noted == {}, "the user has asked for it"
    with pytest.raises(DataError, match=r"grey\.png: is grey"):
        list(Loader(open_set(str(folder), INTAKE, labelled=True), Account(), strict=True))


def test_what_most_images_are_is_what_all_should_be(desk, tmp_path):
    """A first image of another size or colour does not make all others wrong."""
    folder = copy_of(desk, "train", tmp_path / "train")
    Image.fromarray(np.zeros((9, 9), dtype=np.uint8)).save(folder / "cat" / "000-first.png")
    result = run_fit(job_for(desk, train=str(folder)), tmp_path / "posterior")
    assert result.document["result"]["intake"]["shape"] == [3, 6, 6]
    assert result.document["result"]["intake"]["mode"] == "RGB"
    assert list(result.account.left_out[str(folder)]) == ["cat/000-first.png"]
    assert result.document["result"]["left_out"] == 1


def test_images_are_resized_cropped_and_normalised_on_demand(desk, tmp_path):
    document = run_fit(
        job_for(desk, train="train.csv", val="val", resize=(6, 6), normalise="imagenet"), tmp_path / "posterior"
    ).document
    assert document["result"]["intake"]["mean"] == [0.485, 0.456, 0.406]
    intake = settle(Job(resize=8, crop=6, mean=(0.5,), std=(0.25,)), Hints(), "float64")
    (rows,) = open_set("strange", Intake.from_plain(intake.plain() | {"mode": "RGB"}), labelled=False)
    assert rows.inputs.shape == (12, 3, 6, 6)
    assert rows.inputs.dtype == torch.float64
    assert rows.inputs.min() >= -2
    assert rows.inputs.min() < 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: (root / "empty").mkdir(), "empty holds no images"),
        (lambda root: (root / "empty").touch(), "empty is of an unknown kind"),
        (lambda root: None, "no data '.*empty': no such file or folder"),
        (lambda root: shutil.copytree("strange", root / "empty"), "has no subfolders, so its images have no labels"),
        (
            lambda root: shutil.copytree("train", root / "empty" / "sets"),
            "has the subfolder 'sets', which is none of the 3 classes",
        ),
    ],
)
def test_folders_that_are_no_training_data(tmp_path, make, words):
    make(tmp_path)
    with pytest.raises((DataError, OptionError), match=words):
        open_set(str(tmp_path / "empty"), INTAKE, labelled=True, classes=CLASSES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("image,kind\na.png,1\n", "no column of labels: expected one called label"),
        ("place,label\na.png,1\n", "no column of paths"),
        ("path,label\n", "a heading but no rows"),
        ("", "no column of paths.*found nothing"),
        ("path,label\nx\x00,1\n\udcff", "cannot be read as CSV"),
    ],
)
def test_csv_files_that_name_nothing(tmp_path, text, words):
    (tmp_path / "list.csv").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=words):
        open_set(str(tmp_path / "list.csv"), INTAKE, labelled=True)


def test_rows_of_a_csv_that_cannot_be_used_are_named(desk, tmp_path):
    good = desk.root / "train" / "dog"
    picture = next(good.iterdir())
    lines = ["File,Class", f"{picture},dog", f"{picture},1", f"{picture},wolf", f"{picture},", ",dog", "gone.png,fox"]
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    account = Account()
    ((_, labels),) = Loader(open_set(str(tmp_path / "list.csv"), INTAKE, labelled=True, classes=CLASSES), account)
    assert labels.tolist() == [1, 1], "by name or by number"
    rows = next(iter(open_set(str(tmp_path / "list.csv"), INTAKE, labelled=True, classes=CLASSES)))
    assert [words and words.split(":")[0] for words in rows.errors] == [
        None,
        None,
        "has the label 'wolf', which is none of the 3 classes",
        "has no label",
        "row 6 names no file",
    ]
    unlabelled = Account()
    assert (
        sum(
            len(batch[0])
            for batch in Loader(
                open_set(str(tmp_path / "list.csv"), INTAKE, labelled=False), unlabelled, labelled=False
            )
        )
        == 4
    )
    assert unlabelled.left_out[str(tmp_path / "list.csv")] == {"": "row 6 names no file", "gone.png": "does not exist"}


def test_nothing_that_can_be_used_is_an_error_with_the_first_reason(desk, tmp_path):
    (tmp_path / "set" / "cat").mkdir(parents=True)
    (tmp_path / "set" / "cat" / "a.png").write_text("no image")
    with pytest.raises(DataError, match=r"holds no input that can be used. The first: cat/a.png: cannot be decoded"):
        list(Loader(open_set(str(tmp_path / "set"), INTAKE, labelled=True), Account()))
    with pytest.raises(DataError, match="holds no image that can be decoded"):
        run_fit(job_for(desk, train=str(tmp_path / "set")), tmp_path / "posterior")


def test_arrays_are_read_in_portions_and_rows_without_numbers_left_out(tmp_path):
    values = np.random.default_rng(0).normal(size=(11, 4))
    values[3, 1], values[7, :2] = np.nan, np.inf
    labels = np.array([0, 1, 2, 0, 1, 2, 0, 1, 5, -1, 0])
    np.savez_compressed(tmp_path / "set.npz", inputs=np.asfortranarray(values), labels=labels)
    np.save(tmp_path / "set.npy", values)
    intake = Intake(batch_size=4, dtype="float64")
    source = open_arrays(tmp_path / "set.npz", 3, intake, labelled=True)
    assert source.count == 11
    rows = list(source)
    assert [len(one.names) for one in rows] == [4, 4, 3]
    errors = {name: words for one in rows for name, words in zip(one.names, one.errors, strict=True) if words}
    assert errors == {
        "set.npz[3]": "holds 1 value that is nan or infinite",
        "set.npz[7]": "holds 2 values that are nan or infinite",
        "set.npz[8]": "has the label 5, which is none of 3 classes (0 to 2)",
        "set.npz[9]": "has the label -1, which is none of 3 classes (0 to 2)",
    }
    kept = [0, 1, 2, 4, 5, 6, 10]
    assert np.array_equal(torch.cat([one.inputs for one in rows]).numpy(), values[kept])
    assert torch.cat([one.labels for one in rows]).tolist() == labels[kept].tolist()
    alone = list(open_arrays(tmp_path / "set.npy", 3, intake, labelled=False))
    assert np.array_equal(torch.cat([one.inputs for one in alone]).numpy(), values[[0, 1, 2, 4, 5, 6, 8, 9, 10]])


def test_bytes_are_pixels_in_any_layout(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 4, 3)).astype(np.uint8)
    intake = Intake(mean=(0.5,), std=(0.25,))
    expected = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
    for name, values in (("last", pixels), ("first", pixels.transpose(0, 3, 1, 2))):
        np.savez(tmp_path / f"{name}.npz", x=values)
        (rows,) = open_arrays(tmp_path / f"{name}.npz", None, intake, labelled=False)
        assert torch.allclose(rows.inputs, expected, atol=1e-6)
    np.savez(tmp_path / "grey.npz", x=pixels[..., 0])
    (rows,) = open_arrays(tmp_path / "grey.npz", None, intake, labelled=False)
    assert torch.allclose(rows.inputs, expected[:, :1], atol=1e-6)


def save_arrays(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"a": np.zeros((2, 2))}, "holds no inputs: expected an array called x, inputs"),
        ({"x": np.zeros((2, 2))}, "holds no labels"),
        ({"x": np.zeros(2), "y": np.zeros(2)}, "expected numbers, a row for each input"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "expected numbers, a row for each input"),
        ({"x": np.array([["a"], ["b"]]), "y": np.zeros(2)}, "expected numbers, a row for each input"),
        ({"x": np.zeros((2, 2)), "y": np.zeros(3)}, "expected 2 whole numbers"),
        ({"x": np.zeros((2, 2)), "y": np.array([0.5, 1])}, "expected 2 whole numbers"),
        ({"x": np.zeros((2, 2)), "y": np.array(["a", "b"])}, "expected 2 whole numbers"),
        ({"x": np.zeros((2, 2)), "y": np.array([{}, []], dtype=object)}, "holds Python objects, which are not read"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_arrays_that_are_no_data(tmp_path, arrays, words):
    np.savez(tmp_path / "set.npz", **arrays)
    with pytest.raises(DataError, match=words) as caught:
        open_arrays(tmp_path / "set.npz", 3, Intake(), labelled=True)
    assert "set.npz" in str(caught.value)


def test_damaged_arrays_are_named(tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(DataError, match=r"text\.npz is not a whole \.npz file"):
        open_arrays(tmp_path / "text.npz", 3, Intake(), labelled=False)
    with zipfile.ZipFile(tmp_path / "odd.npz", "w") as archive:
        archive.writestr("x.npy", b"nothing like an array")
    with pytest.raises(DataError, match=r"odd\.npz is damaged at x"):
        open_arrays(tmp_path / "odd.npz", 3, Intake(), labelled=False)
    np.save(tmp_path / "cut.npy", np.zeros((10, 3)))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cut\.npy is damaged: it is cut off at row 8 of 10"):
        list(open_arrays(tmp_path / "cut.npy", 3, Intake(batch_size=4), labelled=False))
    np.save(tmp_path / "other.npy", np.zeros((10, 3)))
    with pytest.raises(DataError, match=r"other\.npy holds inputs of shape \(3,\), expected \(4,\)"):
        list(open_arrays(tmp_path / "other.npy", 3, Intake(shape=(4,)), labelled=False))


def test_built_in_sets_by_name(monkeypatch):
    digits = open_set("digits:val", Intake(batch_size=100), labelled=True)
    assert digits.count == 297
    assert sum(len(rows.labels) for rows in digits) == 297
    with pytest.raises(OptionError, match="the split of digits must be one of train, val, report, test"):
        open_set("digits:vall", Intake(), labelled=True)
    with pytest.raises(DataError, match=r"digits:val holds inputs of shape \(1, 8, 8\), expected \(3, 6, 6\)"):
        list(open_set("digits:val", INTAKE, labelled=True))
    monkeypatch.delenv("MOLA_DATA", raising=False)
    with pytest.raises(DataError, match="no data directory"):
        open_set("mnist:test", Intake(), labelled=True)


def test_own_functions_and_what_can_go_wrong_in_them(desk, tmp_path):
    source = open_set(f"{desk.module}:mappings", Intake(), labelled=True, outputs=3)
    first = next(iter(Loader(source, Account())))
    assert first.keys() == {"input", "labels"}
    for name, words in (
        ("gone", "cannot import"),
        ("number", "is a int; expected a function"),
        ("failing", "failed .RuntimeError: the disk is gone"),
        ("uneven", "3 labels for 4 inputs"),
    ):
        with pytest.raises((OptionError, DataError), match=words):
            list(open_set(f"{desk.module}:{name}", Intake(), labelled=True, outputs=3))


def test_one_image_alone(tmp_path, fitted):
    expected = fitted.posterior.predict(next(iter(open_set("strange", INTAKE, labelled=False))).inputs[:1])
    result = run_predict(fitted, "strange/00.png", tmp_path / "out.csv")
    assert (result.count, result.confidence) == (1, pytest.approx(float(expected.confidence), rel=1e-6))
    with pytest.raises(DataError, match="is of an unknown kind"):
        open_set("strange/00.png", INTAKE, labelled=True)


def test_a_folder_that_is_called_like_a_network_does_not_take_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lenet").mkdir()
    assert Job(network=("lenet", "models:build")).document(tmp_path / "deep")["networks"]["network"] == [
        "lenet",
        "models:build",
    ]


def test_data_without_labels_cannot_be_tuned_on():
    with pytest.raises(DataError, match="strange has no labels, which are needed here"):
        list(Loader(open_set("strange", INTAKE, labelled=False), Account()))


# --- the order of the classes -------------------------------------------------------------------------------------------


def test_classes_in_another_order_are_noticed_and_the_advice_mends_it(desk, tmp_path):
    """Folders named so that their alphabetical order is not the networks'."""
    new = {"cat": "zebra", "dog": "ant", "fox": "mole"}
    for split in ("train", "val"):
        for old, name in new.items():
            shutil.copytree(desk.root / split / old, tmp_path / split / name)
    job = job_for(desk, train=str(tmp_path / "train"), val=str(tmp_path / "val"))
    with pytest.raises(DataError, match=r"in another order than the networks' outputs.*--classes zebra,ant,mole"):
        run_fit(job, tmp_path / "posterior")
    result = run_fit(job.with_options({"classes": ("zebra", "ant", "mole")}), tmp_path / "posterior")
    assert result.document["result"]["validation"]["networks"]["accuracy"] > 0.8


def test_order_is_judged_by_counts_alone():
    good = torch.tensor([[9, 1, 0], [0, 8, 2], [1, 0, 9]])
    check_order(good, None, "val")
    with pytest.raises(
        DataError, match=r"would if the outputs were, in this order, 2, 0, 1\. Use labels in that order"
    ):
        check_order(good[[1, 2, 0]], None, "val")
    missing = torch.tensor([[0, 9, 1], [9, 1, 0], [0, 0, 0]])
    with pytest.raises(DataError, match=r"in this order, b, a, \?"):
        check_order(missing, ("a", "b", "c"), "val")
    with pytest.warns(MolaWarning, match="hardly more than guessing"):
        check_order(torch.full((3, 3), 5), None, "val")
    check_order(torch.zeros(3, 3, dtype=torch.int64), None, "val")


def test_the_number_of_classes_must_be_the_networks(desk, tmp_path):
    with pytest.raises(DataError, match=r"2 classes .a, b. for a network with 3 outputs"):
        run_fit(job_for(desk, train="train.npz", classes=("a", "b")), tmp_path / "posterior")
    with pytest.raises(DataError, match="'cat', which is none of the 3 classes"):
        run_fit(job_for(desk, classes=("a", "b", "c")), tmp_path / "posterior")


# --- scores and comparisons ---------------------------------------------------------------------------------------------


def test_a_tally_over_batches_is_the_metric_of_all():
    probs, labels = torch.softmax(3 * torch.randn(101, 4), 1), torch.randint(4, (101,))
    tally = Tally()
    for part, some in zip(probs.split(13), labels.split(13), strict=True):
        tally.add(part, some)
    assert tally.labelled() == pytest.approx(
        {
            "accuracy": metrics.accuracy(probs, labels),
            "nll": metrics.negative_log_likelihood(probs, labels),
            "brier": metrics.brier(probs, labels),
            "ece": metrics.expected_calibration_error(probs, labels),
            "confidence": metrics.mean_confidence(probs),
        }
    )


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")
def test_an_evaluation_is_what_a_program_would_have_found(desk, tmp_path, count):
    run_fit(job_for(desk, weights=tuple(desk.weights(count))), tmp_path / "posterior")
    result = run_evaluate(open_folder(tmp_path / "posterior"), "test.csv", ["strange"])
    train, val = ([desk.inputs(split)] for split in ("train", "val"))
    networks = desk.networks(count)
    methods = {
        "MAP": mola.ensemble(networks[0]),
        "MAP-T": mola.temperature_scaled(networks[0], val, progress=False),
        "DE": mola.ensemble(networks),
        "DE-T": mola.temperature_scaled(networks, val, progress=False),
        "LLLA": mola.fit(networks[0], train, val, progress=False),
        "MoLA": mola.fit(networks, train, val, progress=False),
    }
    expected = list(methods) if count > 1 else ["MAP", "MAP-T", "LLLA"]
    assert list(result.methods) == expected
    strange = next(iter(open_set("strange", INTAKE_ALL, labelled=False))).inputs
    test, labels = desk.inputs("test")
    for name in expected:
        inside, outside = methods[name].predict(test), methods[name].predict(strange)
        found, out = result.methods[name], result.methods[name].outside["strange"]
        assert found.scores["nll"] == pytest.approx(metrics.negative_log_likelihood(inside.probs, labels), rel=1e-5)
        assert found.scores["ece"] == pytest.approx(metrics.expected_calibration_error(inside.probs, labels), rel=1e-4)
        assert out.confidence == pytest.approx(metrics.mean_confidence(outside.probs), rel=1e-5)
        assert out.auroc == pytest.approx(metrics.auroc(-inside.confidence, -outside.confidence))
        assert out.fpr95 == pytest.approx(metrics.fpr_at_tpr(-inside.confidence, -outside.confidence))
        if name in ("LLLA", "MoLA"):
            assert out.ood_auroc == pytest.approx(metrics.auroc(inside.ood_score, outside.ood_score))
        else:
            assert out.ood_auroc is None
        assert sum(found.histogram) == pytest.approx(1)
    json.dumps(result.plain())


INTAKE_ALL = Intake(mode="RGB", shape=(3, 6, 6))


@pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")
def test_an_evaluation_without_validation_data_or_on_data_seen_before_says_so(desk, fitted, tmp_path):
    run_fit(job_for(desk, val=None, rule="evidence"), tmp_path / "posterior")
    opened = open_folder(tmp_path / "posterior")
    alone = run_evaluate(opened, "test.npz")
    assert list(alone.methods) == ["MAP", "DE", "LLLA", "MoLA"]
    assert any("no temperatures" in note for note in alone.notes)
    assert "MAP-T" in run_evaluate(opened, "test.npz", val="val.npz").methods
    assert any("are the validation data" in note for note in run_evaluate(fitted, fitted.job.val).notes)
    with pytest.raises(OptionError, match="each set can be named once"):
        run_evaluate(fitted, "test", ["strange", "strange"])


# --- predicting ---------------------------------------------------------------------------------------------------------


def test_mappings_go_all_the_way(desk, tmp_path):
    """Networks that take their inputs by name."""
    job = job_for(desk, train=f"{desk.module}:mappings", val=f"{desk.module}:mappings")
    with pytest.warns(MolaWarning, match="the validation data are the training data"):
        run_fit(job, tmp_path / "posterior")
    opened = open_folder(tmp_path / "posterior")
    assert opened.example["input"].shape == (2, 3, 6, 6)
    result = run_predict(opened, f"{desk.module}:mappings", tmp_path / "out.npz", probabilities=True)
    stored = np.load(tmp_path / "out.npz")
    expected = opened.posterior.predict(desk.inputs("train")[0])
    assert result.count == 36
    assert np.allclose(stored["probabilities"], expected.probs, atol=1e-6)
    evaluated = run_evaluate(opened, f"{desk.module}:mappings")
    assert evaluated.count == 36


def test_a_file_is_there_only_when_it_is_whole(desk, fitted, tmp_path):
    for ending in ("csv", "jsonl", "npz"):
        with pytest.raises(DataError, match="the disk is gone"):
            run_predict(fitted, f"{desk.module}:failing", tmp_path / f"out.{ending}")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OptionError, match=r"has the ending '.xlsx': expected one of .csv, .jsonl, .npz"):
        run_predict(fitted, "test", tmp_path / "out.xlsx")
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"cannot write .*choose another --output"):
        run_predict(fitted, "test", tmp_path / "file" / "out.csv")


def test_drawing_links_follow_the_seed(desk, tmp_path):
    run_fit(job_for(desk, link="mc", rule="none"), tmp_path / "posterior")
    opened = open_folder(tmp_path / "posterior")
    results = [
        run_predict(opened, "test", tmp_path / f"{index}.csv", seed=seed) for index, seed in enumerate((1, 1, 2))
    ]
    assert results[0].confidence == results[1].confidence != results[2].confidence


def test_weights_load_in_the_networks_own_precision(desk, tmp_path):
    """A file in half precision, a network in float32: inputs follow the network."""
    network = build()
    load_weights(network, desk.weights()[0])
    save_weights(network.half(), tmp_path / "half.safetensors")
    run_fit(job_for(desk, weights=(str(tmp_path / "half.safetensors"),), train="train.npz"), tmp_path / "posterior")
    assert open_folder(tmp_path / "posterior").example.dtype == torch.float32
