"""However a posterior reaches its reader, it predicts the same: saved, moved, copied or exported, with every structure and link."""

import shutil
import warnings

import pytest
import torch

import mola
from tests.conftest import STRUCTURES, make_problem

LINKS = ("probit", "probit-centred", "mean-field", "bridge", "mc")


@pytest.mark.export
def test_all_predict_what_the_original_predicts(structure, tmp_path):
    problems = [make_problem(seed) for seed in range(2)]
    members, inputs = [problem.network for problem in problems], make_problem(9).inputs
    fitted = mola.fit(members, problems[0].loader, structure=structure, progress=False)
    for index, link in enumerate(LINKS):
        original, folder = fitted.with_link(link), tmp_path / link
        if (index // 2 + STRUCTURES.index(structure)) % 2 == 0:  # half of them, the others with the next structure
            original = original.with_distance_exponent(1.5).with_temperature(0.8).with_pooling(0.5)
        expected = original(inputs)
        original.save(folder / "saved")
        assert torch.equal(original(inputs), expected), "saving changed the posterior"
        saved = mola.load(folder / "saved", members)
        moved = mola.load(shutil.move(folder / "saved", folder / "moved"), members)
        copied = mola.load(shutil.copytree(folder / "moved", folder / "copied"), members)
        for one in (saved, moved, copied):
            assert torch.equal(one(inputs), expected), link
        exportable = link != "mc" or torch.__version__ >= (2, 13)  # before, torch.export refuses a generator
        if exportable and index == STRUCTURES.index(
            structure
        ):  # every structure and every link, not every pair: tracing takes long
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
                graph = torch.export.export(moved.eval(), (inputs,), strict=False).module()
            torch.testing.assert_close(graph(inputs), expected, rtol=0, atol=1e-12)
