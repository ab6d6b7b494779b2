"""`molaplace export`: from a folder that `molaplace fit` wrote to a file that gives the same predictions."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import molaplace as mola
from molaplace.cli import app
from molaplace.cli.fit import run_fit
from molaplace.cli.folder import open_posterior
from molaplace.cli.job import Job
from molaplace.errors import OptionError, StorageError
from tests.closeness import assert_close
from tests.workspace import CLASSES, make_workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("workspace"), "own_networks_for_export")


@pytest.fixture
def folder(workspace, monkeypatch):
    """The same for all tests."""
    monkeypatch.chdir(workspace.root)
    monkeypatch.syspath_prepend(str(workspace.root))
    given = {"network": (f"{workspace.module}:build",), "weights": tuple(workspace.weights(2)), "train": "train"}
    if not (workspace.root / "posterior").exists():
        run_fit(Job(**given, rule="none"), workspace.root / "posterior")
    return workspace.root / "posterior"


def run(*arguments, code: int = 0):
    result = CliRunner().invoke(app, ["export", *map(str, arguments), "--trust"])
    assert result.exit_code == code, result.output
    return result


def test_a_folder_becomes_both_kinds_of_file_that_take_bytes(folder, workspace, tmp_path):
    files = tmp_path / "model.onnx", tmp_path / "model.pt2"
    told = ("--onnx", files[0], "--torch", files[1], "--pixels", "--outputs", "probs, ood_score")
    summary = json.loads(run(folder, *told, "--json").stdout)
    assert [one["path"] for one in summary] == [str(path) for path in files]
    assert all(max(one["differences"].values()) < 1e-4 for one in summary)
    pixels, _ = workspace.pixels("test")
    posterior = open_posterior(folder, trust=True).posterior
    for path in files:
        loaded = mola.export.load(path, trust=True)
        assert loaded.classes == list(CLASSES)
        found = loaded(pixels)
        wanted = posterior.predict(pixels.float() / 255)
        assert_close(found["probs"], wanted.probs)
        assert_close(found["ood_score"], wanted.ood_score, "difference")


def test_what_is_wrong_is_told(folder, tmp_path):
    assert isinstance(run(folder, code=1).exception, OptionError)
    assert isinstance(run(tmp_path, "--torch", tmp_path / "a.pt2", code=1).exception, StorageError)
    assert "got risk" in str(run(folder, "--torch", tmp_path / "a.pt2", "--outputs", "risk", code=1).exception)
    assert not (tmp_path / "a.pt2").exists()
