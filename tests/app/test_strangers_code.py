"""Attacks by a downloaded tree: wherever a stranger puts a module, and however his files name it, it does not run by itself.

Every module that an attack places writes a witness file when it is imported. Each attack is tried with the two things that a
posterior's folder can name, networks and data, and through the files that make a run again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from molaplace.cli.fit import run_fit
from molaplace.cli.folder import open_posterior
from molaplace.cli.networks import build_networks
from molaplace.errors import OptionError, StorageError
from molaplace.hub import FORMAT
from molaplace_lab.imported import import_builder, import_function
from tests.own_work import job_for, make_desk, with_job

OWN_WORD_OR_TRUST = r"name it on the command line: --(network|val) \S+\. .*add --trust"
PLACED = ("dl", "src", "other", "posterior", "torchvision", "looks_like_mine", "evil", "mine")
"""Beginnings of the names of the modules that are placed below."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A posterior with its weights, as somebody would offer it for download."""
    desk = make_desk(tmp_path_factory.mktemp("desk"), "own_networks_of_a_stranger")
    folder = tmp_path_factory.mktemp("fitted") / "posterior"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk.root)
        patch.syspath_prepend(str(desk.root))
        run_fit(job_for(desk), folder, bundle=True)
    return desk, folder


@pytest.fixture
def place(bundle, tmp_path, monkeypatch):
    """The user's current folder, and what an attack needs: modules with a witness, and a posterior that names code."""
    desk, folder = bundle
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    known = set(sys.modules)

    class Place:
        root = tmp_path
        witness = tmp_path / "ran"
        honest = (desk.root / f"{desk.module}.py").read_text()

        def module(self, path):
            """The honest module, which in addition writes the witness when it is imported."""
            target = tmp_path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(f"open({str(self.witness)!r}, 'w').close()\n{self.honest}")

        def posterior(self, path, code="", option="network"):
            shutil.copytree(folder, tmp_path / path)
            job = tmp_path / path / "job.toml"
            text = job.read_text()
            if option == "val":
                code, honest = f"{code}:val", self.own()
                text = re.sub(r'val = ".*"', f'val = "{code}"', text, count=1)
                text = text.replace(f"{desk.module}:build", honest)
            elif code:
                text = text.replace(f"{desk.module}:build", f"{code}:build")
            with_job(job.parent, text)
            return Path(path)

        def own(self):
            """An honest module of the user's own."""
            (tmp_path / f"mine_{tmp_path.name}.py").write_text(self.honest)
            return f"mine_{tmp_path.name}:build"

    yield Place()
    for name in set(sys.modules) - known:  # modules stay imported: each attack begins anew
        if name.startswith(PLACED):
            del sys.modules[name]


def opened(folder, option, **words):
    """What `molaplace predict` does with the networks that a folder names, or `molaplace evaluate` with its validation data."""
    fitted = open_posterior(folder, **words)
    if option == "val":
        fitted.open_dataset(fitted.job.val, labelled=True)
    return fitted


ATTACKS = {
    # name: modules that came along, the posterior's folder, the module that it names
    "beside": (["dl/evil.py"], "dl/posterior", "dl.evil"),
    "inside": (["posterior/evil.py"], "posterior", "posterior.evil"),
    "in the current folder": (["posterior/evil.py"], "posterior", "evil"),
    "behind a link": (["dl/evil.py"], "dl/posterior", "dl.evil"),
    "a link that leads in": (["dl/evil.py"], "dl/posterior", "looks_like_mine"),
    "on the path": (["dl/evil_on_the_path.py"], "dl/posterior", "evil_on_the_path"),
    "in another posterior": (["other/evil.py"], "posterior", "other.evil"),
    "in a hub folder": (["evil_of_a_hub.py"], "posterior", "evil_of_a_hub"),
    "named like torchvision": (
        ["torchvision/__init__.py", "torchvision/models.py"], "torchvision/posterior", "torchvision.models"),
    "of an odd finder": (["far/away/evil_by_finder.py"], "posterior", "evil_by_finder"),
}  # fmt: skip


class Finder:
    """Finds a module as packages are found that are installed for editing."""

    def __init__(self, path):
        self.path = path

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.path) if name == self.path.stem else None


def prepare(place, name, option="network"):
    """Set up an attack; the folder that the user opens."""
    modules, folder, code = ATTACKS[name]
    if name == "in another posterior":
        place.posterior("other")
    opened = place.posterior(folder, code, option)
    for module in modules:
        place.module(module)
    if name == "in the current folder":
        os.chdir(opened)
        return Path()
    if name == "behind a link":
        (place.root / "shortcut").symlink_to(place.root / opened)
        return Path("shortcut")
    if name == "a link that leads in":
        (place.root / f"{code}.py").symlink_to(place.root / modules[0])
    elif name == "on the path":
        sys.path.append(str(place.root / "dl"))  # as PYTHONPATH does
    elif name == "in a hub folder":
        (place.root / "config.json").write_text(json.dumps({"format": FORMAT}))
    elif name == "of an odd finder":
        sys.meta_path.append(Finder(place.root / modules[0]))
    return opened


@pytest.mark.parametrize(
    ("attack", "option"),
    [*((name, "network") for name in ATTACKS), *((name, "val") for name in ("beside", "inside", "of an odd finder"))],
)
def test_a_module_that_came_along_is_not_run(place, monkeypatch, attack, option):
    if "torchvision" in sys.modules:
        monkeypatch.delitem(sys.modules, "torchvision")
        monkeypatch.delitem(sys.modules, "torchvision.models", raising=False)
    folder = prepare(place, attack, option)
    with pytest.raises(OptionError, match=OWN_WORD_OR_TRUST):
        opened(folder, option)
    assert not place.witness.exists()


@pytest.mark.parametrize("code", ["pytest:main", "unittest.__main__:build", "sys:exit", "__main__:main"])
def test_installed_functions_are_not_called(place, code):
    """`pytest:main` would run the tests that a stranger put beside his posterior."""
    folder = place.posterior("posterior", code.partition(":")[0])
    place.module("posterior/conftest.py")
    with pytest.raises(OptionError, match=OWN_WORD_OR_TRUST):
        open_posterior(folder)
    assert not place.witness.exists()


@pytest.mark.parametrize("name", ["dl/evil:build", "../dl/evil:build", "./dl/evil.py:build", "dl\\evil:build"])
def test_a_path_is_no_module(place, name):
    place.module("dl/evil.py")
    folder = place.posterior("dl/posterior")
    job = place.root / folder / "job.toml"
    with_job(
        job.parent, re.sub(r"network = \[.*\]", lambda _: f"network = [{json.dumps(name)}]", job.read_text(), count=1)
    )
    with pytest.raises(OptionError, match="unknown network"):
        open_posterior(folder)
    with pytest.raises(
        OptionError,
        match=r"expected a function in the form package\.module:function.*Pass the name of a module, not a file",
    ):
        import_builder(name)
    assert not place.witness.exists()


def test_what_is_not_there_is_not_imported_in_parts(place):
    place.module("dl/__init__.py")
    with pytest.raises(OptionError, match=r"cannot import 'dl\.nowhere'.*Run the command in the folder"):
        open_posterior(place.posterior("posterior", "dl.nowhere"))
    assert not place.witness.exists()


def test_a_folder_is_not_taken_for_a_package_that_is_imported_later(place, monkeypatch):
    """`molaplace evaluate matplotlib/posterior` must not find matplotlib in the current folder."""
    path = [entry for entry in sys.path if entry not in ("", str(place.root))]
    monkeypatch.setattr(sys, "path", list(path))
    import_builder("torch.nn:Identity")()
    assert sys.path == path
    import_function(place.own())
    assert sys.path == [*path, str(place.root)], (
        "found when the user's own code asks for it, but after what is installed"
    )


@pytest.mark.parametrize("word", [{"network": ["dl.evil:build"]}, {"trust": True}], ids=["named", "trusted"])
def test_the_users_own_word_is_enough(place, word):
    assert len(open_posterior(prepare(place, "beside"), **word).posterior.networks) == 3
    assert place.witness.exists()


@pytest.mark.parametrize("path", ["mine_alone.py", "mine/models.py", "src/deep/models.py"])
def test_modules_of_the_current_folder_are_found(place, path):
    place.module(path)
    open_posterior(place.posterior("runs/1/posterior", path.removesuffix(".py").replace("/", ".")))
    assert place.witness.exists()


@pytest.mark.parametrize(
    ("command", "options", "label"),
    [
        ("fit", {"train": "digits:train", "network": ["dl.evil:build"]}, "--network"),
        ("fit", {"train": "dl.evil:train", "network": ["mlp"]}, "--train"),
        ("fit", {"train": "digits:train", "network": ["mlp"], "outliers": "dl.evil:val"}, "--outliers"),
        ("predict", {"inputs": "dl.evil:val"}, "DATA"),
        ("evaluate", {"test": "dl.evil:val"}, "--test"),
        ("evaluate", {"test": "digits:test", "ood": ["digits:val", "dl.evil:val"]}, "--ood"),
        ("export", {"onnx": "x.onnx", "network": ["dl.evil:build"]}, "--network"),
    ],
)
def test_the_file_of_a_run_is_not_the_users_word_for_code(place, mola_command, command, options, label):
    folder = place.posterior("dl/posterior", place.own().removesuffix(":build"))
    place.module("dl/evil.py")
    lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    lines += [] if command == "fit" else [f"posterior = {json.dumps(str(folder))}"]
    (place.root / "dl" / "run.toml").write_text("\n".join([f'command = "{command}"', "[options]", *lines]))
    code, _, words = mola_command(command, "--config", "dl/run.toml")
    assert code == 1
    assert re.search(rf"name it on the command line: {label} dl\.evil.*add --trust", " ".join(words.split()))
    assert not place.witness.exists()


@pytest.mark.parametrize("kind", ["ForImageClassification", "ForSequenceClassification"])
def test_code_in_a_folder_of_transformers_is_not_run(place, kind):
    pytest.importorskip("transformers")
    place.module("hf/modeling_evil.py")
    place.module("hf/configuration_evil.py")
    config = {
        "model_type": "evil",
        "architectures": [f"Evil{kind}"],
        "auto_map": {
            "AutoConfig": "configuration_evil.EvilConfig",
            f"AutoModel{kind}": f"modeling_evil.Evil{kind}",
        },
    }
    (place.root / "hf" / "config.json").write_text(json.dumps(config))
    (place.root / "hf" / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    with pytest.raises(StorageError, match="cannot be loaded by transformers"):
        build_networks(["hf"])
    assert not place.witness.exists()
