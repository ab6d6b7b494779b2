"""Folders for a model hub: what is written can be read back, the card is what hubs read, and damage is noticed."""

import hashlib
import itertools
import json
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace import hub
from molaplace.errors import OptionError, StorageError
from molaplace.evaluation import Estimate
from tests import saved_files
from tests.closeness import assert_close
from tests.library.test_saving import stopped_at

os.environ.setdefault("HF_HUB_OFFLINE", "1")
huggingface_hub = pytest.importorskip("huggingface_hub", reason="NO HUGGINGFACE_HUB: `make setup` installs it")
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(60) % 3
TEST = [(X[:20], Y[:20]), (X[20:], Y[20:])]
NAMES = ["ant: red", "bee", 'cat "tabby"']


def build(dtype=torch.float64):
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


@pytest.fixture
def posterior():
    return mola.fit([build(), build()], [(X, Y)], prior_precision=0.3, progress=False).with_weights([0.25, 0.75])


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
    folder = hub.save(posterior, tmp_path / "model")
    loaded = hub.load(folder, build)  # which builds in float64
    assert_close(loaded(X.to(dtype)), posterior(X.to(dtype)))
    assert_close(loaded.predict(X.to(dtype)).ood_score, posterior.predict(X.to(dtype)).ood_score, "difference")
    assert not any(network.training for network in loaded.networks)


def test_the_card_is_what_hubs_and_people_read(tmp_path, posterior, monkeypatch):
    measured = mola.evaluate(posterior, TEST, shifted={'Rows: "later"': TEST}, ood={"far": [3 * X]})
    folder = hub.save(
        posterior, tmp_path / "insects", classes=NAMES, evaluation=measured, license="mit", tags=["insects", "molaplace"],
        pipeline_tag="tabular-classification",
    )  # fmt: skip
    front, body = read_card(folder)
    assert (front["library_name"], front["license"]) == ("molaplace", "mit")
    assert front["tags"].count("molaplace") == 1
    first = front["model-index"][0]["results"][0]
    assert {estimate["type"]: estimate["value"] for estimate in first["metrics"]} == {
        name: round(estimate.value, 6) for name, estimate in measured["MoLA", "test"].items()
    }
    for words in (*NAMES, "| kron |", "0.3, 0.3", "0.25, 0.75"):
        assert words in body
    (snippet,) = re.findall(r"```python\n(.*?)```", body, re.S)
    monkeypatch.chdir(tmp_path)
    namespace = {"x": X, "build": build}
    exec(snippet, namespace)
    assert_close(namespace["prediction"].probs, posterior(X), "float64")
    assert f"| nll | {measured['MoLA', 'test']['nll']} |" in body
    results = huggingface_hub.ModelCard.load(folder / "README.md").data.eval_results
    assert {(result.dataset_name, result.task_type) for result in results} == {
        (name, "tabular-classification") for name in ("test", 'Rows: "later"', "far")
    }


def test_arguments_that_cannot_be_used_are_refused(tmp_path, posterior):
    both = mola.evaluate({"a": posterior, "b": posterior}, TEST)
    for wrong, arguments, words in (
        (posterior, {"evaluation": both}, "alone"),
        (posterior, {"classes": ["a", "b"]}, "3 different names"),
        (mola.ensemble(posterior.networks), {}, "plain ensemble"),
        (mola.whole.fit(build(), [(X, Y)], subnetwork=5), {}, r"whole networks.*posterior\.save"),
        (build(), {}, "Sequential"),
    ):
        with pytest.raises(OptionError, match=words):
            hub.save(wrong, tmp_path / "model", **arguments)
    assert not (tmp_path / "model").exists()


def test_names_stay_text_in_the_card(tmp_path, posterior):
    script = "<script>alert(1)</script>"
    where = ("m", "<script>\n\n# injected {{ 7 * 7 }}")
    entries = {where: {f"{script}|": Estimate(0.5, float("nan"))}}
    evaluation = SimpleNamespace(entries=entries, sets={where[1]: SimpleNamespace(num_inputs=3)})
    folder = hub.save(
        posterior, tmp_path / '"+x+"', classes=[script, "a|b\n# c", "[x](javascript:alert(1))"], evaluation=evaluation
    )
    front, body = read_card(folder)
    assert front["model-index"][0]["results"][0]["dataset"]["name"] == where[1]
    assert not any(words in body for words in ("<script", "\n# injected", "\n# c", "[x](", "49"))
    compile(next(line for line in body.splitlines() if line.startswith("posterior = ")), "card", "exec")


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_networks_of_transformers_load_by_themselves(tmp_path):
    transformers = require("transformers")
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4,
        id2label={0: "ant", 1: "bee", 2: "cat"}, label2id={"ant": 0, "bee": 1, "cat": 2},
    )  # fmt: skip
    networks = [transformers.ViTForImageClassification(config) for _ in range(2)]
    batch = {"pixel_values": torch.randn(9, 3, 8, 8)}
    posterior = mola.fit(networks, [{**batch, "labels": torch.arange(9) % 3}])
    folder = hub.save(posterior, tmp_path / "vit")
    front, body = read_card(folder)
    assert front["pipeline_tag"] == "image-classification"
    assert "Classes (3): ant, bee, cat." in body
    assert_close(hub.load(folder)(batch), posterior(batch))
    auto = hub.load(folder, transformers.AutoModelForImageClassification)
    assert_close(auto(batch), posterior(batch))
    damage(folder, "networks/0/config.json", lambda document: document.update(num_hidden_layers=2))
    with pytest.raises(StorageError, match=r"networks\[0\]"):  # transformers makes up the weights of a second layer
        hub.load(folder)
    damage(folder, "networks/1/model.safetensors", "cut")
    with pytest.raises(StorageError, match="damaged or incomplete"):
        hub.load(folder)


def damage(folder, name, change):
    path = folder / name
    if change == "remove":
        path.unlink()
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif change == "flip":
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    else:
        if path.suffix == ".json":
            document = json.loads(path.read_bytes())
            change(document)
            path.write_text(json.dumps(document))
        else:
            saved_files.edit(path, lambda document, _: change(document))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("posterior.safetensors", lambda document: document.update(version=2), "version 2.*Update"),
        ("posterior.safetensors", lambda document: document.pop("bundle"), "damaged at 'bundle'"),
        (
            "posterior.safetensors",
            lambda document: document["bundle"]["networks"][0].pop("type"),
            "damaged at .*an entry 'type'",
        ),
        (
            "posterior.safetensors",
            lambda document: document["bundle"]["networks"][0].update(dtype="load"),
            "precision 'load' is unknown",
        ),
        ("networks/1/model.safetensors", "remove", "1/model.safetensors cannot be read"),
        ("networks/0/model.safetensors", "flip", r"networks\[0\].*differ"),
        ("posterior.safetensors", "remove", "posterior.safetensors cannot be read"),
    ],
)
def test_damage_is_noticed(tmp_path, posterior, name, change, words):
    folder = hub.save(posterior, tmp_path / "model")
    damage(folder, name, change)
    with pytest.raises(StorageError, match=words):
        hub.load(folder, build)


def test_a_folder_cannot_name_code_to_run(tmp_path, posterior):
    folder = hub.save(posterior, tmp_path / "model")
    with pytest.raises(OptionError, match=r"Sequential\. Pass a function that builds this network"):
        hub.load(folder)
    damage(folder, "posterior.safetensors", lambda document: document["bundle"]["networks"][0].update(
        type="transformers.utils.import_utils.requires_backends", pretrained=True))  # fmt: skip
    require("transformers")
    with pytest.raises(StorageError, match="does not provide"):
        hub.load(folder)


def test_another_architecture_or_another_models_folder_is_refused(tmp_path, posterior):
    folder = hub.save(posterior, tmp_path / "model")
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        hub.load(folder, lambda: nn.Linear(4, 3))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(StorageError, match=r"other files \(config\.json\)"):
        hub.save(posterior, tmp_path / "foreign")
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["config.json"]


def test_saving_again_replaces_the_old_model(tmp_path, posterior):
    folder = hub.save(posterior, tmp_path / "model")
    (folder / ".gitattributes").write_text("the user's")
    single = mola.fit(build(), [(X, Y)], progress=False)
    hub.save(single, folder)
    assert_close(hub.load(folder, build)(X), single(X), "float64")
    assert [path.name for path in (folder / "networks").iterdir()] == ["0"]
    with torch.no_grad():
        single.networks[0][3].weight += 1
    with pytest.raises(StorageError, match="have changed since the posterior was fitted"):
        hub.save(single, folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".gitattributes", ".molaplace.json", ".molaplace.json.lock", "README.md", "networks", "posterior.safetensors"
    ]  # fmt: skip
    assert hub.load(folder, build).components[0].layer.sums.count == len(X), "the old model is still readable"


def test_a_save_that_stops_anywhere_leaves_a_model_or_none(tmp_path, posterior):
    """A process is killed at each of its changes of the file system, or one change is refused."""
    single = mola.fit(build(), [(X, Y)], progress=False)
    old = hub.save(posterior, tmp_path / "old")
    counts = []
    for step, refused in itertools.product(range(0, 100, 2), (True, False)):
        folder = shutil.copytree(old, tmp_path / f"{step}-{refused}")
        finished = stopped_at(step, lambda folder=folder: hub.save(single, folder), refused=refused)
        if finished:
            counts.append(len(hub.load(folder, build).networks))
            break
        if refused or (folder / "posterior.safetensors").exists():
            counts.append(len(hub.load(folder, build).networks))
    assert len(counts) > 10
    assert set(counts) == {1, 2}, "the old model and the new one"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub that is a folder."""
    root = tmp_path / "server"

    def create_repo(repo_id, *, private, exist_ok):
        (root / repo_id).mkdir(parents=True, exist_ok=exist_ok)
        return f"https://hub/{repo_id}{' (private)' if private else ''}"

    def repo_info(repo_id):
        return SimpleNamespace(sha="head")

    def list_repo_tree(repo_id, *, recursive, revision):
        for path in (root / repo_id).rglob("*"):
            name = path.relative_to(root / repo_id).as_posix()
            if path.is_dir():
                yield huggingface_hub.RepoFolder(path=name, oid="")
                continue
            content = path.read_bytes()
            large = path.suffix == ".safetensors"
            lfs = {"size": len(content), "oid": hashlib.sha256(content).hexdigest(), "pointerSize": 0}
            yield huggingface_hub.RepoFile(path=name, size=len(content), oid="", lfs=lfs if large else None)

    def hf_hub_download(repo_id, filename, *, revision):
        return str(root / repo_id / filename)

    def upload_folder(
        *, repo_id, folder_path, commit_message, delete_patterns, parent_commit="head", ignore_patterns=()
    ):
        assert parent_commit == "head"
        huggingface_hub.ModelCard.load(Path(folder_path) / "README.md")
        names = [path.relative_to(root / repo_id).as_posix() for path in (root / repo_id).rglob("*") if path.is_file()]
        for name in huggingface_hub.utils.filter_repo_objects(names, allow_patterns=delete_patterns):
            (root / repo_id / name).unlink()
        ignored = shutil.ignore_patterns(*ignore_patterns)
        shutil.copytree(folder_path, root / repo_id, dirs_exist_ok=True, ignore=ignored)

    def snapshot_download(repo_id, *, revision, allow_patterns):
        if not (root / repo_id).exists() or revision not in (None, "main"):
            raise huggingface_hub.utils.LocalEntryNotFoundError("404")
        return str(root / repo_id)

    for function in (create_repo, repo_info, list_repo_tree, hf_hub_download, upload_folder, snapshot_download):
        monkeypatch.setattr(huggingface_hub, function.__name__, function)
    return root


def test_a_posterior_is_uploaded_and_downloaded(server, posterior):
    assert (
        hub.push(posterior, "me/insects", private=True, classes=NAMES, license="mit")
        == "https://hub/me/insects (private)"
    )
    assert_close(hub.load("me/insects", build)(X), posterior(X), "float64")
    front, body = read_card(server / "me/insects")
    assert front["license"] == "mit"
    assert 'mola.hub.load("me/insects", build)' in body
    hub.push(mola.fit(build(), [(X, Y)], progress=False), "me/insects")
    assert len(hub.load("me/insects", build, revision="main").networks) == 1
    assert [path.parent.name for path in (server / "me/insects/networks").rglob("*.safetensors")] == ["0"]
    for name, revision in (("me/birds", None), ("me/insects", "v2")):
        with pytest.raises(StorageError, match=r"cannot be downloaded.*404"):
            hub.load(name, build, revision=revision)


class Preparing:
    """Something that makes inputs, as transformers' tokenizers and processors do."""

    def save_pretrained(self, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "vocabulary.txt").write_text("a b c")


def test_a_tokenizer_goes_with_the_model_or_the_card_names_what_is_missing(tmp_path, posterior):
    options = {"pipeline_tag": "text-classification"}
    folder = hub.save(posterior, tmp_path / "model", tokenizer=Preparing(), processor=Preparing(), **options)
    card = (folder / "README.md").read_text()
    assert 'tokenizer = Preparing.from_pretrained("model", subfolder="tokenizer")' in card
    assert "contains no" not in card
    assert (folder / "tokenizer" / "vocabulary.txt").read_text() == "a b c"
    hub.save(posterior, folder, **options)
    assert not (folder / "tokenizer").exists(), "the old model's would be taken for the new one's"
    assert "contains no tokenizer" in (folder / "README.md").read_text()
