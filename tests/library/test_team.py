"""What several processes find is what one finds: sums, tuning, weights and predictions, however the data are divided."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import molaplace as mola
from tests.closeness import assert_close
from tests.forked_python import run_team
from tests.team_script import laws

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def alone():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with pytest.warns(mola.errors.MolaWarning):  # tuning by the threshold: these networks are not overconfident
        actual = laws(None)
    torch.set_default_dtype(before)
    return actual


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_team_does_what_one_process_does(size, alone, tmp_path):
    command = ["-m", "tests.team_script", "laws", tmp_path]
    codes, errors = run_team(size, command, tmp_path, cwd=ROOT, timeout=300)
    assert codes == [0] * size, "\n".join(errors)
    actual = [load_file(tmp_path / f"{rank}-of-{size}.safetensors") for rank in range(size)]
    assert len(alone) > 150
    for name, expected in alone.items():
        for other in actual[1:]:
            assert torch.equal(other[name], actual[0][name]), f"{name} differs between ranks"
        if name.endswith(("lambda", "threshold", "label")):
            assert torch.equal(actual[0][name], expected), name
        searched = name.endswith(("stacking", "ensemble", "by evidence"))
        assert_close(actual[0][name], expected, "search" if searched else "float64", name=name)
    for rank in range(size):
        resumed = json.loads((tmp_path / f"{rank}-of-{size}.json").read_text())
        assert not resumed["alike in the fit"]
        assert not resumed["alike in validation data"]
        assert resumed["kept"]
        assert resumed["same"]
        assert resumed["passes"] == resumed["batches"] - (2 + rank) + 1  # one of them finds the head
    assert not (tmp_path / "kept").exists()
