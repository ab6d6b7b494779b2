"""Folders for a model hub: what is written can be read back, the card is what hubs read, and damage is noticed."""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import mola
from mola import hub
from mola.errors import DataError, OptionError, StorageError
from mola.hub.card import as_yaml
from tests.closeness import assert_close
from tests.forked_python import run_python

os.environ.setdefault("HF_HUB_OFFLINE", "1")
X, Y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(60) % 3
TEST = [(X[:20], Y[:20]), (X[20:], Y[20:])]
NAMES = ["ant: red", "bee", 'cat "tabby"']


def build(dtype=torch.float64):
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


@pytest.fixture
def posterior():
    return mola.fit([build(), build()], [(X, Y)], prior_precision=0.3).with_weights([0.25, 0.75])


def require(package):
    if find_spec(package) is None:
        pytest.skip(f"{package} IS NOT INSTALLED: cards were not read by it.")
    return __import__(package)


def read_card(folder):
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    return require("yaml").safe_load(front), body


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_saved_is_loaded_in_any_precision(tmp_path, dtype):
    posterior = mola.fit([build(dtype), build(dtype)], [(X.to(dtype), Y)], structure="full", link="mean-field")
    folder = mola.save_to_hub_folder(posterior, tmp_path / "model")
    again = mola.load_from_hub_folder(folder, build)  # which builds in float64
    assert_close(again(X.to(dtype)), posterior(X.to(dtype)))
    assert_close(again.predict(X.to(dtype)).ood_score, posterior.predict(X.to(dtype)).ood_score, "difference")
    assert not any(network.training for network in again.networks)


def test_ensembles_and_folders_without_networks(tmp_path, posterior):
    plain = mola.ensemble(posterior.networks, weights=[0.25, 0.75])
    mola.save_to_hub_folder(plain, tmp_path / "plain", classes=NAMES)
    assert_close(mola.load_from_hub_folder(tmp_path / "plain", build)(X), plain(X), "float64")
    mola.save_to_hub_folder(posterior, tmp_path / "bare", networks=False)
    assert not (tmp_path / "bare" / "networks").exists()
    assert_close(mola.load_from_hub_folder(tmp_path / "bare", posterior.networks)(X), posterior(X), "float64")
    with pytest.raises(OptionError, match="saved without its networks"):
        mola.load_from_hub_folder(tmp_path / "bare", build)


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")  # the grid of two ends where it ends
def test_cooling_is_kept_and_told(tmp_path, posterior):
    cooled = posterior.tune(TEST, rule=mola.ValidationScore("nll", grid=[0.1, 1.0]), progress=False)
    cooled = cooled.with_temperature(0.8).with_distance_exponent(1.5)
    folder = mola.save_to_hub_folder(cooled, tmp_path / "cooled")
    again, card = mola.load_from_hub_folder(folder, build), (folder / "README.md").read_text()
    for name in ("probs", "distance", "ood_score", "mutual_information"):
        assert_close(getattr(again.predict(X), name), getattr(cooled.predict(X), name), "float64", name=name)
    assert (again.temperature, again.distance_exponent) == (0.8, 1.5)
    assert "| temperature | 0.8: logits are divided by it, and so sharpened |" in card
    assert (
        "exponent 1.5: logits of inputs 2 times as far from the training classes as usual are divided by 2.83" in card
    )
    plain = mola.save_to_hub_folder(posterior, tmp_path / "plain")
    assert not any(word in (plain / "README.md").read_text() for word in ("temperature", "distance"))


def test_the_temperature_of_an_ensemble_is_kept_and_no_older_reader_loses_it(tmp_path, posterior):
    warm, config = mola.ensemble(posterior.networks).with_temperature(1.7), tmp_path / "warm" / "config.json"
    mola.save_to_hub_folder(warm, tmp_path / "warm", classes=NAMES)
    again = mola.load_from_hub_folder(tmp_path / "warm", build)
    assert again.temperature == 1.7
    assert_close(again(X), warm(X), "float64")
    assert "1.7: logits are divided by it, and so softened" in (tmp_path / "warm" / "README.md").read_text()
    assert json.loads(config.read_bytes())["version"] == 2
    mola.save_to_hub_folder(warm.with_temperature(1.0), tmp_path / "warm", classes=NAMES)
    assert json.loads(config.read_bytes())["version"] == 1


def test_measured_numbers_are_those_of_the_metrics(posterior):
    probs = posterior(X)
    measured = hub.measure(posterior, TEST, "Held-out rows", bins=5)
    assert measured.count == 60
    assert measured.values["accuracy"] == mola.metrics.accuracy(probs, Y)
    assert measured.values["nll"] == pytest.approx(mola.metrics.negative_log_likelihood(probs, Y), rel=1e-12)
    assert measured.values["ece"] == pytest.approx(mola.metrics.expected_calibration_error(probs, Y), rel=1e-12)
    confidence, label = probs.max(1)
    for count, mean, right in measured.bins:
        upper = (int(mean * 5) + 1) / 5
        chosen = (confidence > upper - 0.2) & (confidence <= upper)
        assert count == int(chosen.sum())
        assert mean == pytest.approx(float(confidence[chosen].mean()))
        assert right == pytest.approx(float((label == Y)[chosen].double().mean()))
    assert sum(count for count, _, _ in measured.bins) == 60
    with pytest.raises(DataError, match="batch 0 of the test loader has no labels"):
        hub.measure(posterior, [X], "none")
    with pytest.raises(OptionError, match="finite numbers"):
        hub.Measured("set", 3, {"nll": float("nan")})


def test_the_card_is_what_hubs_and_people_read(tmp_path, posterior):
    measured = hub.measure(posterior, TEST, 'Rows: "held out"')
    own = hub.Measured("Elsewhere", 7, {"auroc": 0.5})
    folder = mola.save_to_hub_folder(
        posterior, tmp_path / "insects", classes=NAMES, measured=[measured, own], license="mit", tags=["insects", "mola"],
        pipeline_tag="tabular-classification",
    )  # fmt: skip
    front, body = read_card(folder)
    assert (front["library_name"], front["license"]) == ("mola", "mit")
    assert front["pipeline_tag"] == "tabular-classification"
    assert front["tags"].count("mola") == 1
    assert "insects" in front["tags"]
    (index,) = front["model-index"]
    assert index["name"] == "insects"
    first, second = index["results"]
    assert first["dataset"] == {"name": 'Rows: "held out"', "type": "rows-held-out"}
    assert {one["type"]: one["value"] for one in first["metrics"]} == {
        name: round(value, 6) for name, value in measured.values.items()
    }
    assert second["metrics"] == [{"type": "auroc", "name": "auroc", "value": 0.5}]
    for words in (*NAMES, "| kron |", "0.3, 0.3", "0.25, 0.75", "![Accuracy over confidence](reliability.png)"):
        assert words in body
    assert body.count("| predictions | mean confidence | accuracy |") == 1
    assert (folder / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "config.json").read_bytes())["classes"] == NAMES
    if find_spec("huggingface_hub") is None:
        pytest.skip("huggingface_hub IS NOT INSTALLED: its own reader of cards was not tried.")
    from huggingface_hub import ModelCard

    results = ModelCard.load(folder / "README.md").data.eval_results
    assert [(one.dataset_name, one.metric_type) for one in results][-1] == ("Elsewhere", "auroc")
    assert results[0].task_type == "tabular-classification"


def test_the_snippet_of_the_card_works(tmp_path, posterior, monkeypatch):
    (tmp_path / "insect_networks.py").write_text(
        "import torch\nfrom torch import nn\ndef small():\n"
        "    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, named in (("told", "insect_networks:small"), ("untold", None)):
        folder = mola.save_to_hub_folder(posterior, tmp_path / name, build=named)
        (snippet,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
        namespace = {"x": X} if named else {"x": X, "build": build}
        exec(snippet, namespace)
        assert_close(namespace["prediction"].probs, posterior(X), "float64")


def test_networks_of_transformers_load_by_themselves(tmp_path, monkeypatch):
    transformers = require("transformers")
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4,
        id2label={0: "ant", 1: "bee", 2: "cat"}, label2id={"ant": 0, "bee": 1, "cat": 2},
    )  # fmt: skip
    networks = [transformers.ViTForImageClassification(config) for _ in range(2)]
    batch = {"pixel_values": torch.randn(9, 3, 8, 8)}
    posterior = mola.fit(networks, [{**batch, "labels": torch.arange(9) % 3}])
    folder = mola.save_to_hub_folder(posterior, tmp_path / "vit")
    front, body = read_card(folder)
    assert front["pipeline_tag"] == "image-classification"
    assert "Classes (3): ant, bee, cat." in body
    assert_close(mola.load_from_hub_folder(folder)(batch), posterior(batch))
    auto = mola.load_from_hub_folder(folder, transformers.AutoModelForImageClassification)
    assert_close(auto(batch), posterior(batch))
    monkeypatch.chdir(tmp_path)
    namespace = {"x": batch}
    exec(re.findall(r"```python\n(.*?)```", body, re.S)[0], namespace)
    assert_close(namespace["prediction"].probs, posterior(batch))


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("named", [True, False])
def test_weights_that_transformers_would_make_up_are_refused(tmp_path, named):
    """A plain ensemble has no checksum of what its networks compute."""
    transformers = require("transformers")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "image_size": 8, "patch_size": 4}
    config = transformers.ViTConfig(num_hidden_layers=1, num_labels=3, **sizes)
    plain = mola.ensemble([transformers.ViTForImageClassification(config)])
    folder = mola.save_to_hub_folder(plain, tmp_path / "vit", classes=["a", "b", "c"])
    damage(folder, "networks/0/config.json", lambda document: document.update(num_hidden_layers=2))
    build = transformers.AutoModelForImageClassification if named else None
    with pytest.raises(StorageError, match=r"lacks weights of the network that its config\.json describes"):
        mola.load_from_hub_folder(folder, build)


def damage(folder, name, how):
    path = folder / name
    if how == "remove":
        path.unlink()
    elif how == "flip":
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    else:
        document = json.loads(path.read_bytes())
        document.pop("sha256", None)  # as older versions wrote it: what is inside is looked at
        how(document)
        path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("config.json", "remove", "config.json cannot be read.*save_to_hub_folder"),
        ("config.json", lambda document: document.update(format="other"), "not written by mola"),
        ("config.json", lambda document: document.update(version=3), "version 3; this mola reads versions 1 and 2"),
        ("config.json", lambda document: document.pop("networks"), "garbled.*'networks'"),
        ("config.json", lambda document: document["networks"][0].update(dtype="load"), "unknown precision 'load'"),
        ("config.json", lambda document: document["networks"].pop(), r"2 components, got 1 model"),
        ("networks/1/model.safetensors", "remove", "1/model.safetensors is missing"),
        ("networks/0/model.safetensors", "flip", "0/model.safetensors is damaged: download"),
        ("posterior/posterior.json", "remove", "posterior.json is missing"),
    ],
)
def test_damage_is_noticed(tmp_path, posterior, name, how, words):
    folder = mola.save_to_hub_folder(posterior, tmp_path / "model")
    damage(folder, name, how)
    with pytest.raises(StorageError, match=words):
        mola.load_from_hub_folder(folder, build)


def test_a_folder_cannot_name_code_to_run(tmp_path, posterior):
    folder = mola.save_to_hub_folder(posterior, tmp_path / "model", build="os:abort")
    with pytest.raises(OptionError, match=r"Sequential: pass a function that builds one"):
        mola.load_from_hub_folder(folder)
    damage(folder, "config.json", lambda document: document["networks"][0].update(
        type="transformers.utils.import_utils.requires_backends", from_pretrained=True))  # fmt: skip
    require("transformers")
    with pytest.raises(StorageError, match="does not have"):
        mola.load_from_hub_folder(folder)


def test_another_architecture_or_another_models_folder_is_refused(tmp_path, posterior):
    folder = mola.save_to_hub_folder(posterior, tmp_path / "model")
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        mola.load_from_hub_folder(folder, lambda: nn.Linear(4, 3))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(StorageError, match=r"not written by mola.*folder of its own"):
        mola.save_to_hub_folder(posterior, tmp_path / "foreign")
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["config.json"]
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="is a file"):
        mola.save_to_hub_folder(posterior, tmp_path / "file")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"classes": ["a", "b"]}, "3 different names"),
        ({"classes": ["a", "b", "b"]}, "3 different names"),
        ({"build": "package.module"}, "package.module:function"),
        ({"build": "package::function"}, "package.module:function"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, posterior, settings, words):
    with pytest.raises(OptionError, match=words):
        mola.save_to_hub_folder(posterior, tmp_path / "model", **settings)
    assert not (tmp_path / "model").exists()
    with pytest.raises(OptionError, match=r"names .* needed for a plain ensemble"):
        mola.save_to_hub_folder(mola.ensemble(posterior.networks), tmp_path / "model")
    with pytest.raises(OptionError, match=r"mola.fit or mola.ensemble, got Sequential"):
        mola.save_to_hub_folder(build(), tmp_path / "model")


def test_saving_again_replaces_the_old_model(tmp_path, posterior):
    mola.save_to_hub_folder(posterior, tmp_path / "model")
    single = mola.fit(build(), [(X, Y)])
    mola.save_to_hub_folder(single, tmp_path / "model")
    assert_close(mola.load_from_hub_folder(tmp_path / "model", build)(X), single(X), "float64")
    assert sorted(path.name for path in (tmp_path / "model" / "networks").iterdir()) == ["0"]


def test_yaml_is_read_as_it_was_meant():
    yaml = require("yaml")
    value = {
        "a": [{"b": {"c": ["x: y", "- z", "no", "1"]}, "d": 1.5}, {"b": {"c": []}, "d": -1e-7}],
        "e": "#",
        "f": None,
    }
    value["a"][1]["b"]["c"] = ["é"]
    assert yaml.safe_load(as_yaml(value)) == value


def test_the_card_needs_no_matplotlib(tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import torch, mola; from mola import hub\n"
        "x, y = torch.randn(9, 4), torch.arange(9) % 3\n"
        "posterior = mola.fit(torch.nn.Linear(4, 3), [(x, y)], progress=False)\n"
        f"folder = mola.save_to_hub_folder(posterior, {str(tmp_path / 'm')!r}, measured=hub.measure(posterior, [(x, y)], 'x'))\n"
        "print(sorted(path.name for path in folder.iterdir()), 'reliability' in (folder / 'README.md').read_text())"
    )
    said = run_python("-c", code).stdout
    assert said.strip() == "['README.md', 'config.json', 'networks', 'posterior'] False"


class Preparing:
    """Something that makes inputs, as transformers' tokenizers and processors do."""

    def save_pretrained(self, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "vocabulary.txt").write_text("a b c")


def test_a_tokenizer_goes_with_the_model_or_the_card_says_that_there_is_none(tmp_path):
    posterior, names = (
        mola.ensemble(nn.Linear(4, 3)),
        {"classes": ["a", "b", "c"], "pipeline_tag": "text-classification"},
    )
    folder = mola.save_to_hub_folder(
        posterior, tmp_path / "model", tokenizer=Preparing(), processor=Preparing(), **names
    )
    card = (folder / "README.md").read_text()
    assert 'tokenizer = Preparing.from_pretrained("model/tokenizer")' in card
    assert 'processor = Preparing.from_pretrained("model/processor")' in card
    assert "holds no" not in card
    assert (folder / "tokenizer" / "vocabulary.txt").read_text() == "a b c"
    mola.save_to_hub_folder(posterior, folder, **names)
    assert not (folder / "tokenizer").exists(), "the old model's would be taken for the new one's"
    card = (folder / "README.md").read_text()
    assert "This folder holds no tokenizer." in card
    assert "from_pretrained" not in card
    mola.save_to_hub_folder(posterior, folder, **names | {"pipeline_tag": "image-classification"})
    assert "This folder holds no processor." in (folder / "README.md").read_text()
    mola.save_to_hub_folder(posterior, folder, **names | {"pipeline_tag": "tabular-classification"})
    assert "holds no" not in (folder / "README.md").read_text()
    with pytest.raises(OptionError, match="tokenizer: expected an object with save_pretrained"):
        mola.save_to_hub_folder(posterior, tmp_path / "other", tokenizer=str, **names)
