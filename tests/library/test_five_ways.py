"""However a posterior comes to a reader, it says the same: saved, moved, loaded, exported, or fitted by several processes."""

import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file

import mola
from tests.conftest import CLOSED_FORM_LINKS
from tests.library.test_distributed import run
from tests.team_script import batches, data, inputs, networks

LINKS = (*CLOSED_FORM_LINKS, "mc")


@pytest.fixture(scope="module")
def from_a_team(tmp_path_factory):
    """What two processes say, each of which saw half of the data: one run for all structures and links."""
    folder = tmp_path_factory.mktemp("team")
    codes, errors = run(2, "ways", folder)
    assert codes == [0, 0], errors
    first, second = (load_file(folder / f"ways-{rank}-of-2.safetensors") for rank in range(2))
    assert {name: one.tolist() for name, one in first.items()} == {name: one.tolist() for name, one in second.items()}
    return first


@pytest.mark.parametrize("link", LINKS)
def test_all_say_what_the_original_says(structure, link, tmp_path, from_a_team):
    members = networks(2)
    original = mola.fit(members, list(batches(data(3))), structure=structure, link=link, progress=False)
    expected = original(inputs())
    original.save(tmp_path / "saved")
    assert torch.equal(original(inputs()), expected), "saving changed the posterior"
    saved = mola.load(tmp_path / "saved", members)
    moved = mola.load(shutil.move(tmp_path / "saved", tmp_path / "moved"), members)
    copied = mola.load(shutil.copytree(tmp_path / "moved", tmp_path / "copied"), members)
    for name, one in {"saved": saved, "moved": moved, "copied": copied}.items():
        assert torch.equal(one(inputs()), expected), name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        graph = torch.export.export(moved.eval(), (inputs(),), strict=False).module()
    # Not to the bit: a trace takes all rows at once, and sums in another order.
    assert float((graph(inputs()) - expected).abs().max()) <= 1e-12
    assert float((from_a_team[f"{structure}/{link}"] - expected).abs().max()) <= 1e-12
