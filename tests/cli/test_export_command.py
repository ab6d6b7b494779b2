"""`molaplace export`: from a folder that `molaplace fit` wrote to a file that gives the same predictions."""

from __future__ import annotations

import json

import pytest

import molaplace as mola
from molaplace.errors import OptionError, StorageError
from tests.cli.fitted_folders import run
from tests.closeness import assert_close
from tests.workspace import CLASSES

pytestmark = pytest.mark.usefixtures("_in_workspace")


def test_a_folder_becomes_both_kinds_of_file_that_take_bytes(fitted, workspace, tmp_path):
    files = tmp_path / "model.onnx", tmp_path / "model.pt2"
    told = ("--onnx", files[0], "--torch", files[1], "--pixels", "--outputs", "probs, ood_score")
    summary = json.loads(run("export", fitted.folder, *told, "--json").stdout)
    assert [one["path"] for one in summary] == [str(path) for path in files]
    assert all(max(one["differences"].values()) < 1e-4 for one in summary)
    pixels, _ = workspace.pixels("test")
    expected = fitted.posterior.predict(pixels.float() / 255)
    for path in files:
        loaded = mola.export.load(path, trust=True)
        assert loaded.classes == list(CLASSES)
        found = loaded(pixels)
        assert_close(found["probs"], expected.probs)
        assert_close(found["ood_score"], expected.ood_score, "difference")


def test_what_is_wrong_is_told(fitted, tmp_path):
    path = tmp_path / "a.pt2"
    assert isinstance(run("export", fitted.folder).exception, OptionError)
    assert isinstance(run("export", tmp_path, "--torch", path).exception, StorageError)
    assert "got risk" in str(run("export", fitted.folder, "--torch", path, "--outputs", "risk").exception)
    assert not path.exists()
