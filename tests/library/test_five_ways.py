"""However a posterior comes to a reader, it says the same: saved, moved, copied or exported, with every structure and link.

Fitted by several processes it says the same, too: tests/library/test_distributed.py.
"""

import shutil
import warnings

import pytest
import torch
from torch import nn

import mola
from tests.conftest import STRUCTURES
from tests.team_script import LINKS, batches, data, inputs, networks


class Every(nn.Module):
    """What several posteriors say, in one graph: tracing costs more than all else here."""

    def __init__(self, posteriors):
        super().__init__()
        self.posteriors = nn.ModuleList(posteriors)

    def forward(self, values):
        return torch.stack([one(values) for one in self.posteriors])


@pytest.mark.export
def test_all_say_what_the_original_says(structure, tmp_path):
    members, moved = networks(2), []
    fitted = mola.fit(members, list(batches(data(3))), structure=structure, progress=False)
    for index, link in enumerate(LINKS):
        original, folder = fitted.with_link(link), tmp_path / link
        if (index // 2 + STRUCTURES.index(structure)) % 2 == 0:  # half of them, and the others with the next structure
            original = original.with_distance_exponent(1.5).with_temperature(0.8)
        expected = original(inputs())
        original.save(folder / "saved")
        assert torch.equal(original(inputs()), expected), "saving changed the posterior"
        saved = mola.load(folder / "saved", members)
        moved.append(mola.load(shutil.move(folder / "saved", folder / "moved"), members))
        copied = mola.load(shutil.copytree(folder / "moved", folder / "copied"), members)
        for name, one in {"saved": saved, "moved": moved[-1], "copied": copied}.items():
            assert torch.equal(one(inputs()), expected), (link, name)
    # Every structure and every link, not every pair: a link sees moments, whatever they are made of.
    assert len(LINKS) == len(STRUCTURES)
    traced = [STRUCTURES.index(structure)]
    if LINKS[traced[0]] == "mc" and torch.__version__ < (2, 13):
        pytest.skip("torch.export refuses a generator before torch 2.13")
    every = Every([moved[index] for index in traced]).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        graph = torch.export.export(every, (inputs(),), strict=False).module()
    # Not to the bit: a trace takes all rows at once, and sums in another order.
    for index, found, expected in zip(traced, graph(inputs()), every(inputs()), strict=True):
        assert float((found - expected).abs().max()) <= 1e-12, LINKS[index]
