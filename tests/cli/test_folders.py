"""Whatever writes files meets whatever lies in the folder, and nothing of the user's is lost in any case."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.cli.commands import (
    EvaluateOptions,
    ExportOptions,
    FolderOptions,
    WatchOptions,
    demo,
    evaluate,
    export,
    fit,
    watch,
)
from molaplace.cli.job import Job
from molaplace.errors import MolaError
from molaplace.export import Written
from molaplace.saving import files
from tests.library.test_hub import server  # noqa: F401 (a fixture)
from tests.library.test_saving import stopped_at

pytestmark = [
    pytest.mark.parametrize("kind", ["classes"], indirect=True),
    pytest.mark.usefixtures("_blank_figures", "kind"),
]
QUIET = {"quiet": True}
POSTERIOR = Path("posterior")
OPENED = {"trust": True, **QUIET}
ENTRIES = {
    "posterior.save": "posterior.safetensors",
    "whole.save": "posterior.safetensors",
    "Watch.save": "watch.safetensors",
    "hub.save": "posterior.safetensors",
    "hub.push": "posterior.safetensors",
    "fit": "posterior.safetensors",
    "evaluate": "index.html",
    "demo": "index.html",
    "watch": "watch.html",
    "export": "model.onnx",
}
"""The file of each door without which there is nothing to open."""

DIFFERENT = {**ENTRIES, "hub.save": "model.safetensors", "hub.push": "model.safetensors"}
"""Endings of the names of files that depend on what is written."""

FILE_DOORS = ("watch", "export")
"""Doors that write single files, whose folder may contain anything else."""

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(60) % 3


def posterior(version):
    torch.manual_seed(version)
    return mola.fit(nn.Linear(4, 3, dtype=torch.float64), [(X, Y)], prior_precision=1.0, progress=False)


def fake_demo(monkeypatch, version):
    result = SimpleNamespace(networks=[nn.Linear(2, 2)], evaluation=None)
    monkeypatch.setattr("molaplace.demo.run.run_demo", lambda *_: result)
    monkeypatch.setattr("molaplace.cli.evaluate.print_summary", lambda *_: None)

    def write_page(evaluation, folder, progress):
        (folder / "figures").mkdir()
        for name in ("figures/a.svg", f"figures/of-{version}.svg", "numbers.json", "index.html"):
            (folder / name).write_text(f"page {version}")

    monkeypatch.setattr("molaplace.report.writing.write_page", write_page)


def fake_export(monkeypatch, version):
    def write(posterior, path, example, **settings):
        Path(path).write_text(f"graph {version}")
        return Written(Path(path), 0, [], [], None, {})

    monkeypatch.setattr(mola.export, "onnx", write)


@pytest.fixture
def write(request, monkeypatch):
    """Write something through a door to a folder; its content depends on the version."""
    door = request.getfixturevalue("door")
    monkeypatch.setattr(os, "fsync", lambda _: None)  # only a computer that fails needs it

    def run(folder, version, **overwrite):
        if door == "posterior.save":
            posterior(version).save(folder, **overwrite)
        elif door == "whole.save":
            torch.manual_seed(version)
            mola.whole.fit(nn.Linear(4, 3, dtype=torch.float64), [(X, Y)], subnetwork=5).save(folder, **overwrite)
        elif door == "Watch.save":
            mola.watch(posterior(version), [(X, Y)]).save(folder, **overwrite)
        elif door == "hub.save":
            mola.hub.save(posterior(version), folder, **overwrite)
        elif door == "hub.push":
            mola.hub.push(posterior(version), f"me/{folder.name}", **overwrite)
        elif door == "fit":
            data = {"network": ("kind_classes:build",), "train": "train.npz", "val": "val.npz", "rule": "none"}
            fit((f"{version}.safetensors",), options=Job(output=folder, bundle=True, **data, **QUIET, **overwrite))
        elif door == "evaluate":
            ood = ("far.npz",)[:version]
            options = EvaluateOptions(output=folder, test="test.npz", ood=ood, **OPENED, **overwrite)
            evaluate(POSTERIOR, options=options)
        elif door == "demo":
            fake_demo(monkeypatch, version)
            demo(output=folder, **QUIET, options=FolderOptions(**overwrite))
        elif door == "watch":
            x = np.random.default_rng(version).normal(size=(60, 4)).astype(np.float32)
            np.savez(f"new-{version}.npz", x=x)
            watch(POSTERIOR, f"new-{version}.npz", options=WatchOptions(log=folder / "watch.jsonl", **OPENED))
        else:
            fake_export(monkeypatch, version)
            export(POSTERIOR, options=ExportOptions(onnx=folder / "model.onnx", **OPENED))

    return run


@pytest.fixture
def folder(request, tmp_path):
    """The folder that a door writes to; for `push`, the repository."""
    return (
        request.getfixturevalue("server") / "me" if request.getfixturevalue("door") == "hub.push" else tmp_path
    ) / "f"


def files_of(folder):
    """Content of all files, except those of interrupted saves, by name."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".saving-" not in str(path)]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def put(folder, **named):
    """Write files of the user, in the folders of reports and models too, and return them."""
    users = {"README.txt": b"mine", "figures/mine.png": b"mine", "networks/resnet.py": b"mine", **named}
    for name, content in users.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return users


def refused(folder, write, *arguments, **overwrite):
    before = files_of(folder) if folder.is_dir() else folder.read_bytes()
    with pytest.raises(MolaError) as caught:
        write(folder, *arguments, **overwrite)
    assert (files_of(folder) if folder.is_dir() else folder.read_bytes()) == before
    return str(caught.value)


doors = pytest.mark.parametrize("door", ENTRIES)


@doors
def test_empty_and_missing_folders_and_our_own(door, folder, write):
    write(folder, 0)
    first = files_of(folder)
    assert ENTRIES[door] in first
    users = put(folder)
    write(folder, 1)
    second = files_of(folder)
    assert users.items() <= second.items(), "the user's files are kept"
    replaced = [name for name in first if name.endswith(DIFFERENT[door])]
    assert replaced
    assert all(second.get(name) != first[name] for name in replaced), "ours are replaced"
    if door not in FILE_DOORS:
        shutil.rmtree(folder)
        folder.mkdir()
        write(folder, 1)
        assert files_of(folder).keys() | users.keys() == second.keys(), "and nothing of the first is left"


@doors
def test_a_folder_of_the_user(door, folder, write):
    users = put(folder)
    if door in FILE_DOORS:
        write(folder, 0)
    else:
        assert "other files (README.txt, figures, " in refused(folder, write, 0).replace("figures/mine.png", "figures")
        write(folder, 0, overwrite=True)
    assert ENTRIES[door] in files_of(folder)
    assert users.items() <= files_of(folder).items()


@doors
def test_a_file_in_the_way(door, folder, write):
    users = put(folder, **{ENTRIES[door]: b"the user's", ".gitattributes": b"mine"})
    overwrite = {} if door in FILE_DOORS else {"overwrite": True}
    assert ENTRIES[door] in refused(folder, write, 0, **overwrite)
    assert users == {name: content for name, content in files_of(folder).items() if name in users}
    if door != "hub.push":
        shutil.rmtree(folder)
        folder.write_bytes(b"a file")
        refused(folder, write, 0, **overwrite)


@doors
def test_a_file_of_ours_that_the_user_has_changed(door, folder, write):
    write(folder, 0)
    with open(folder / ENTRIES[door], "ab") as file:
        file.write(b"\n")
    assert ENTRIES[door] in refused(folder, write, 1)


@doors
def test_a_file_system_that_refuses(door, folder, write, monkeypatch):
    write(folder, 0)
    put(folder)
    mkdir = os.mkdir

    def refuse(path, *arguments, **options):
        if "/f/" in str(path) or door == "hub.push":
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    before = files_of(folder)
    with pytest.raises((MolaError, PermissionError)):
        write(folder, 1)
    assert files_of(folder) == before


@pytest.mark.parametrize("door", [door for door in ENTRIES if door != "hub.push"])  # a push is one commit of the hub
def test_a_process_that_is_killed_anywhere(door, folder, write, tmp_path, monkeypatch):
    replace = files._replace
    write(folder, 0)
    users = put(folder)
    ours = [name for name in files_of(folder) if name not in users and "molaplace.json" not in name]
    old = {name: content for name, content in files_of(folder).items() if name in ours}
    killed = []

    def kill(new, target, *arguments, **options):
        if (target / ENTRIES[door]).exists() and new.parent.parent == folder:
            for step in range(0, 100):
                copy = shutil.copytree(folder, tmp_path / str(step))
                there = copy / new.relative_to(folder)
                finished = stopped_at(step, lambda there=there, copy=copy: replace(there, copy, *arguments, **options))
                killed.append(files_of(copy))
                shutil.rmtree(there)
                shutil.copytree(new, there)
                replace(there, copy, *arguments, **options)
                killed.append(files_of(copy))
                if finished:
                    break
        replace(new, target, *arguments, **options)

    monkeypatch.setattr(files, "_replace", kill)
    write(folder, 1)
    new = {name: content for name, content in files_of(folder).items() if name not in users}
    assert len(killed) > 10
    for state in killed:
        assert users.items() <= state.items()
        if ENTRIES[door] in state and door != "watch":  # whose log goes on
            besides = ("job.toml", ".molaplace.json", ".model.onnx.molaplace.json")
            sets = [{name: content for name, content in whole.items() if name not in besides} for whole in (old, new)]
            assert any(whole.items() <= state.items() for whole in sets)
    repeated = {name: content for name, content in killed[1].items() if "molaplace.json" not in name}
    if door != "watch":
        assert repeated == {name: content for name, content in {**new, **users}.items() if "molaplace.json" not in name}


@pytest.mark.parametrize("door", ["evaluate"])
def test_one_kind_does_not_replace_another(door, folder, write):
    posterior(0).save(folder)
    assert "contains a saved posterior" in refused(folder, write, 0)
    write(folder, 0, overwrite=True)
    assert not (folder / "posterior.safetensors").exists()


def test_a_log_and_a_page_never_share_a_file(tmp_path):
    np.savez("new.npz", x=np.zeros((9, 4), dtype=np.float32))
    for name in ("x.html", "x.HTML"):
        with pytest.raises(MolaError, match=r"must not end in \.html"):
            watch(POSTERIOR, "new.npz", options=WatchOptions(log=tmp_path / name, **OPENED))
    assert not list(tmp_path.iterdir())


def test_weights_of_an_earlier_fit_stay_with_the_fit_that_uses_them(tmp_path):
    networks = {"network": ("kind_classes:build",), "train": "train.npz", "rule": "evidence", **QUIET}
    fit(("0.safetensors",), options=Job(output=tmp_path / "f", bundle=True, **networks))
    weights = tmp_path / "f" / "networks" / "0" / "model.safetensors"
    content = weights.read_bytes()
    fit((str(weights),), options=Job(output=tmp_path / "f", **networks))
    assert weights.read_bytes() == content
    assert "saved posterior with networks" in refused(tmp_path / "f", lambda folder: posterior(0).save(folder))


def test_a_marker_cannot_claim_files_outside_its_folder(tmp_path):
    (tmp_path / "mine").write_text("mine")
    folder = posterior(0).save(tmp_path / "f")
    checksum = files.Marker.read(folder / files.MARKER).files["posterior.safetensors"][0]
    shutil.copy(folder / "posterior.safetensors", tmp_path / "copy")
    (folder / "link").symlink_to(tmp_path)
    names = ("../copy", "link/copy", str(tmp_path / "copy"))
    marker = (folder / files.MARKER).read_text()
    claims = ", ".join(f'"{name}": ["{checksum}"]' for name in names)
    (folder / files.MARKER).write_text(marker.replace('"files": {', f'"files": {{{claims},'))
    posterior(1).save(folder)
    assert (tmp_path / "copy").exists()
